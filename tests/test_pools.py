"""2 prefill + 2 decode workers as a whole: who works, what is restored, and what a hand-off takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from g2sim.bus.drivers import InlineDriver
from g2sim.scenarios.run import run_scenario
from g2sim.scenarios.schema import Scenario


def host(scope: str, **change: Any) -> dict[str, Any]:
    return {"scope": scope, "num_host_blocks": 64, "d2h_bandwidth_gbps": 1.0, "h2d_bandwidth_gbps": 1.0} | change


def worker(replicas: int, tier: dict[str, Any] | None, **change: Any) -> dict[str, Any]:
    cache = {
        "block_size": 4,
        "bytes_per_token": 250000,
        "capacity": {"type": "fixed", "blocks": 6},
        "host_offload": tier,
    }
    return {
        "parallelism": {"replicas": replicas},
        "scheduler": {"max_batched_tokens": 16, "max_sequences": 4},
        "kv_cache": cache | change,
        "timing": {"type": "fixed", "prefill_ms": 2.0, "decode_ms": 1.0},
    }


def trace(folder: Path) -> Path:
    """Two prompts in turn, far apart: each pushes the other out of a G1 of 6 blocks."""
    rows = [
        {"timestamp": 100 * k, "input_length": 18, "output_length": 2, "hash_ids": [k % 4 * 10 + b for b in range(5)]}
        for k in range(16)
    ]
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(folder: Path, workers: dict[str, Any], **engine: Any) -> tuple[dict[str, Any], list[dict[str, Any]], list[Any]]:
    mode = "disaggregated" if "prefill" in workers else "aggregated"
    values = {
        "name": "pools",
        "engine": {"mode": mode, "workers": workers} | engine,
        "traffic": {
            "source": {"type": "trace", "format": "mooncake", "paths": [str(trace(folder))], "block_size": 4},
            "load": {"type": "trace_timestamps"},
        },
    }
    rows: list[dict[str, Any]] = []
    records: list[Any] = []
    result = run_scenario(
        Scenario.from_dict(values, base_dir=folder),
        None,
        verify=True,
        driver=InlineDriver,
        on_row=rows.append,
        on_record=records.append,
    )
    return result.report, rows, records


@pytest.mark.parametrize("scope", ["cluster_shared", "dp_rank_local"])
def test_2p2d_uses_two_workers_in_each_pool_and_restores_host_blocks(tmp_path: Path, scope: str) -> None:
    """Each pool is looked at by itself; one shared domain counts its capacity once."""
    tier = host(scope)
    report, rows, records = run(tmp_path, {"prefill": worker(2, tier), "decode": worker(2, tier)})
    assert {row["terminal_status"] for row in rows} == {"completed"}
    for pool in ("prefill", "decode"):
        placed = {r["logical_worker_id"] for row in rows for r in row["routing_history"] if r["pool"] == pool}
        assert placed == {0, 1}, pool
    assert sum(row["first_admission_host_reused_input_tokens"] for row in rows) > 0
    if scope == "cluster_shared":
        (domain,) = report["summary"]["g2_domains"]
        assert domain["capacity_blocks"] == 64
        assert domain["resident_blocks"] == domain["used_blocks"] == 16, "four prompts of four whole blocks, once each"
    else:
        assert "g2_domains" not in report["summary"]
        assert len(report["g2_pools"]) == 4
    steps = [type(record.event).__name__ for record in records]
    for step in ("SourceHeld", "DestinationReserved", "TransferStarted", "DestinationActivated", "SourceReleased"):
        assert steps.count(step) == len(rows)


def test_the_hand_off_takes_its_time_for_the_whole_prompt_or_for_what_is_missing(tmp_path: Path) -> None:
    """18 tokens x 250,000 B at 0.5 GB/s are 9 ms; 5 missing blocks of 4 tokens are 10 ms."""
    workers = {"prefill": worker(1, None), "decode": worker(1, None)}
    for mode, delay_ms in (("full_prompt", 9.0), ("destination_missing", 10.0)):
        transfer = {"bytes_per_token": 250000, "bandwidth_gb_per_second": 0.5, "timing_mode": mode}
        _, rows, _ = run(tmp_path, workers, kv_transfer=transfer)
        first = rows[0]
        assert first["destination_activated_ms"] - first["destination_reserved_ms"] == delay_ms
        assert sum(first["ttft_parts_ms"].values()) == first["ttft_ms"]
