"""Runs that the tests of pages and timelines look at."""

from __future__ import annotations

import base64
import json
import re
import zlib
from pathlib import Path
from typing import Any

from g2sim.scenarios.run import run_scenario
from g2sim.scenarios.schema import Scenario, load_scenario

REPO = Path(__file__).resolve().parents[2]
LIBRARY = REPO / "scenarios" / "library"

_CACHE = {
    "block_size": 64,
    "bytes_per_token": 131072,
    "capacity": {"type": "fixed", "blocks": 600},
    "host_offload": {"scope": "cluster_shared", "num_host_blocks": 4096, "kv_layout_id": "x"},
}

SEPARATE = {
    "name": "separate </script><b>pools</b> & more",
    "why": "Two prefill and two decode workers over one pool, placed by a router whose view lags.",
    "engine": {
        "mode": "disaggregated",
        "workers": {
            "prefill": {"parallelism": {"replicas": 2}, "kv_cache": _CACHE, "timing": {"type": "polynomial"}},
            "decode": {"parallelism": {"replicas": 2}, "kv_cache": _CACHE, "timing": {"type": "polynomial"}},
        },
        "kv_transfer": {"bandwidth_gb_per_second": 10.0},
    },
    "router": {"policy": "dynamo_kv", "kv_event_lag_ms": 50.0},
    "traffic": {
        "source": {"type": "trace", "format": "mooncake", "paths": ["traces/chat-sessions.jsonl"]},
        "load": {"type": "trace_timestamps"},
    },
}

MANY = {
    "name": "ten-thousand",
    "engine": {
        "workers": {
            "aggregated": {
                "parallelism": {"replicas": 4},
                "kv_cache": {
                    "block_size": 16,
                    "bytes_per_token": 1024,
                    "capacity": {"type": "fixed", "blocks": 256},
                    "host_offload": {"scope": "dp_rank_local", "num_host_blocks": 512},
                },
                "timing": {"type": "fixed", "prefill_ms": 10.0, "decode_ms": 1.0},
            }
        }
    },
    "traffic": {
        "source": {"type": "synthetic", "input_tokens": 33, "output_tokens": 3},
        "load": {"type": "concurrency", "concurrency": 64},
        "stop": {"requests": 10_000},
    },
}


def make_run(name: str, folder: Path) -> Path:
    """Runs "demo", "separate" or "many" into a folder."""
    if name == "demo":
        scenario = load_scenario(LIBRARY / "agentx-g2-shared.yaml")
    else:
        scenario = Scenario.from_dict({"separate": SEPARATE, "many": MANY}[name], base_dir=LIBRARY)
    run_scenario(scenario, folder)
    return folder


def payload_of(page: str) -> dict[str, Any]:
    """The data in a page, read without anything of the page's own."""
    found = re.findall(r'<script id="data" type="application/octet-stream">([A-Za-z0-9+/=]+)</script>', page)
    assert len(found) == 1
    value: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(found[0])))
    return value
