"""Deployments as a whole: shared and private host tiers under aggregated workers and under 2 prefill + 2 decode."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from g2sim.bus.drivers import InlineDriver
from g2sim.bus.errors import ConfigError
from g2sim.scenarios.report import report_text
from g2sim.scenarios.run import run_scenario
from g2sim.scenarios.schema import Scenario

SHARED_ONLY = {"shared_d2h_bandwidth_gbps": 0.5, "shared_h2d_bandwidth_gbps": 0.25, "kv_layout_id": "x"}


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


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("num_host_blocks", 65),
        ("shared_d2h_bandwidth_gbps", 2.0),
        ("shared_h2d_bandwidth_gbps", 2.0),
        ("kv_layout_id", "another"),
    ],
)
def test_roles_that_disagree_about_their_pool_are_refused_with_both_values(
    tmp_path: Path, field: str, other: object
) -> None:
    tier = host("cluster_shared", shared_d2h_bandwidth_gbps=8.0, shared_h2d_bandwidth_gbps=8.0, kv_layout_id="one")
    with pytest.raises(ConfigError) as error:
        run(tmp_path, {"prefill": worker(1, tier), "decode": worker(1, tier | {field: other})})
    assert field in str(error.value)
    assert repr(other) in str(error.value)
    assert str(tier[field]) in str(error.value)


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


@pytest.mark.parametrize("roles", [("aggregated",), ("prefill", "decode")])
def test_fields_that_only_a_shared_pool_knows_mean_nothing_to_private_tiers(
    tmp_path: Path, roles: tuple[str, ...]
) -> None:
    """The same report, rows and events, to the byte, with and without them."""
    plain, with_fields = (
        run(tmp_path, {role: worker(2, host("dp_rank_local", **extra)) for role in roles})
        for extra in ({}, SHARED_ONLY)
    )
    assert report_text(plain[0]) == report_text(with_fields[0])
    assert plain[1:] == with_fields[1:]


def test_the_pool_holds_one_copy_and_another_worker_restores_it(tmp_path: Path) -> None:
    """Round robin over 3 workers: prompts return to workers that have never seen them."""
    shared, rows, _ = run(tmp_path, {"aggregated": worker(3, host("cluster_shared"))})
    private, private_rows, _ = run(tmp_path, {"aggregated": worker(3, host("dp_rank_local"))})
    restored = sum(row["first_admission_host_reused_input_tokens"] for row in rows)
    assert restored == 12 * 16, "every prompt but the first of each kind is restored whole"
    assert restored > sum(row["first_admission_host_reused_input_tokens"] for row in private_rows)
    assert shared["summary"]["g2_domains"][0]["used_blocks"] == 16
    assert sum(pool["used_blocks"] for pool in private["g2_pools"]) > 16


def test_the_hand_off_takes_its_time_for_the_whole_prompt_or_for_what_is_missing(tmp_path: Path) -> None:
    """18 tokens x 250,000 B at 0.5 GB/s are 9 ms; 5 missing blocks of 4 tokens are 10 ms."""
    workers = {"prefill": worker(1, None), "decode": worker(1, None)}
    for mode, delay_ms in (("full_prompt", 9.0), ("destination_missing", 10.0)):
        transfer = {"bytes_per_token": 250000, "bandwidth_gb_per_second": 0.5, "timing_mode": mode}
        _, rows, _ = run(tmp_path, workers, kv_transfer=transfer)
        first = rows[0]
        assert first["destination_activated_ms"] - first["destination_reserved_ms"] == delay_ms
        assert sum(first["ttft_parts_ms"].values()) == first["ttft_ms"]
