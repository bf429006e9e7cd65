"""Runs to look into: small, with both tiers, evictions, restores and a router that hears late."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from g2sim.scenarios.run import run_scenario
from g2sim.scenarios.schema import Scenario

LAG_MS = 7.0


def values(**router: Any) -> dict[str, Any]:
    host = {"scope": "cluster_shared", "num_host_blocks": 24}
    cache = {
        "block_size": 4,
        "bytes_per_token": 1000,
        "capacity": {"type": "fixed", "blocks": 12},
        "host_offload": host,
    }
    worker = {
        "parallelism": {"replicas": 2},
        "scheduler": {"max_sequences": 2},
        "kv_cache": cache,
        "timing": {"type": "fixed", "prefill_ms": 5.0, "decode_ms": 1.0},
    }
    source = {"type": "trace", "format": "mooncake", "paths": ["chats.jsonl"], "block_size": 4}
    return {
        "name": "travel",
        "engine": {"workers": {"aggregated": worker}},
        "traffic": {"source": source, "load": {"type": "trace_timestamps"}},
        "router": {"policy": "round_robin", **router},
    }


def trace() -> str:
    rows: list[dict[str, Any]] = []
    for turn in range(3):
        for chat in range(4):
            ids = [1, *range(10 * chat + 10, 10 * chat + 13 + 2 * turn)]
            start = {"timestamp": 3 * chat} if turn == 0 else {"delay": 4}
            lengths = {"input_length": 4 * len(ids), "output_length": 3, "hash_ids": ids}
            rows.append({"session_id": f"chat-{chat}", **start, **lengths})
    return "".join(json.dumps(row) + "\n" for row in rows)


def write_run(folder: Path, name: str, **router: Any) -> Path:
    (folder / "chats.jsonl").write_text(trace())
    run_scenario(Scenario.from_dict(values(**router), base_dir=folder), folder / name, verify=True)
    return folder / name
