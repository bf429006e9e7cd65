"""A small deployment for sweeps, and the command line in fresh processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from g2sim.scenarios.cli import main

GPU = "engine.workers.aggregated.kv_cache.capacity.blocks"
REQUESTS = [
    (0.0, [1, 2, 3, 4]),
    (1.0, [11, 12, 13, 14]),
    (100.0, [11, 12, 13, 14, 15]),
    (200.0, [11, 12, 13, 14]),
    (300.0, [1, 2, 3, 4]),
]
"""(arrival [ms], block ids): round robin puts the last where the first was, and the third in between."""


def trace_file(path: Path, requests: list[tuple[float, list[int]]]) -> None:
    lines = [
        {"timestamp": at_ms, "input_length": 4 * len(ids), "output_length": 2, "hash_ids": ids}
        for at_ms, ids in requests
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def values(*, poisson: bool = False) -> dict[str, Any]:
    host = {"num_host_blocks": 64, "d2h_bandwidth_gbps": 0.0, "h2d_bandwidth_gbps": 0.0}
    worker = {
        "parallelism": {"replicas": 2},
        "kv_cache": {
            "block_size": 4,
            "bytes_per_token": 16,
            "capacity": {"type": "fixed", "blocks": 64},
            "host_offload": host,
        },
        "timing": {"type": "fixed", "prefill_ms": 10.0, "decode_ms": 1.0},
    }
    source: dict[str, Any] = {"type": "trace", "format": "mooncake", "paths": ["t.jsonl"], "block_size": 4}
    traffic: dict[str, Any] = {"source": source, "load": {"type": "trace_timestamps"}}
    if poisson:
        traffic = {
            "source": {"type": "synthetic", "input_tokens": 16, "output_tokens": 3},
            "load": {"type": "poisson", "requests_per_second": 150.0},
            "stop": {"requests": 20},
        }
    return {
        "seed": 3,
        "engine": {"mode": "aggregated", "workers": {"aggregated": worker}},
        "traffic": traffic,
        "evaluation": {"sla": {"ttft_ms": 12.0, "itl_ms": 5.0}},
    }


def scenario_file(folder: Path) -> Path:
    """A scenario file with its trace."""
    trace_file(folder / "t.jsonl", REQUESTS)
    path = folder / "s.yaml"
    path.write_text(yaml.safe_dump(values()))
    return path


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command line, in this process and folder, says of bad input."""
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    out, err = capsys.readouterr()
    assert (stopped.value.code, out) == (2, "")
    return err
