"""Private and shared host tiers side by side: what must not matter, what must differ, and what must agree."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import attrs
import pytest

from g2sim.actors.host_pool.events import StoreLanded, StorePrepared
from g2sim.actors.kv.events import BlocksStored
from g2sim.actors.worker.events import RequestAdmitted
from g2sim.bus.drivers import InlineDriver
from g2sim.bus.errors import ConfigError
from g2sim.bus.events import Record
from g2sim.scenarios.report import report_text
from g2sim.scenarios.run import run_scenario
from g2sim.scenarios.schema import Scenario

Values = dict[str, Any]

SHARED_ONLY = {
    "shared_d2h_bandwidth_gbps": 0.001,
    "shared_h2d_bandwidth_gbps": 0.001,
    "kv_layout_id": "left-over",
    "sharing": "equal_share",
}
"""Set in every way that would show: a shared pool this slow would make every restore last."""

TRACE = [
    (0.0, [1, 2, 3], 2),
    (3.0, [4, 5, 6], 2),
    (30.0, [11, 12, 13], 2),
    (33.0, [14, 15, 16], 2),
    (60.0, [1, 2, 3], 3),
    (62.0, [4, 5, 6], 3),
    (90.0, [1, 2, 3], 2),
    (93.0, [1, 2, 3], 2),
]
"""Prompts of 9 tokens, two whole blocks each, by round robin on two workers.

Those at 60 and 62 come back to the worker that has computed them, after another prompt has pushed them out of its GPU
cache; the one at 93 meets the other worker.
"""


@attrs.frozen
class Ran:
    """Report bytes, request rows and records of a run."""

    report: str
    rows: list[Values]
    records: list[Record]

    @property
    def restored_tokens(self) -> int:
        return sum(row["first_admission_host_reused_input_tokens"] or 0 for row in self.rows)

    @property
    def domains(self) -> Any:
        return json.loads(self.report)["summary"].get("g2_domains")

    def workers(self, role: str) -> set[int]:
        admissions = [r.event for r in self.records if isinstance(r.event, RequestAdmitted)]
        return {event.worker for event in admissions if event.role == role}


def worker(scope: str, *, gpu_blocks: int, replicas: int = 2, seats: int = 1, **host: Any) -> Values:
    return {
        "parallelism": {"replicas": replicas},
        "scheduler": {"max_sequences": seats, "max_batched_tokens": 16},
        "kv_cache": {
            "block_size": 4,
            "bytes_per_token": 250_000,
            "capacity": {"type": "fixed", "blocks": gpu_blocks},
            "host_offload": {
                "scope": scope,
                "num_host_blocks": 16,
                "d2h_bandwidth_gbps": 1.0,
                "h2d_bandwidth_gbps": 1.0,
                **host,
            },
        },
        "timing": {"type": "fixed", "prefill_ms": 2.0, "decode_ms": 1.0},
    }


def engine(mode: str, scope: str, **host: Any) -> Values:
    if mode == "aggregated":
        return {"mode": mode, "workers": {mode: worker(scope, gpu_blocks=3, **host)}}
    roles = {
        "prefill": worker(scope, gpu_blocks=3, **host),
        "decode": worker(scope, gpu_blocks=8, seats=4, **host),
    }
    return {"mode": mode, "workers": roles}


def run(folder: Path, mode: str, scope: str, **host: Any) -> Ran:
    path = folder / "trace.jsonl"
    lines = [{"timestamp": t, "input_length": 9, "hash_ids": ids, "output_length": out} for t, ids, out in TRACE]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    source = {"type": "trace", "format": "mooncake", "paths": [str(path)], "block_size": 4}
    traffic = {"source": source, "load": {"type": "trace_timestamps"}}
    scenario = Scenario.from_dict(
        {"name": "scopes", "engine": engine(mode, scope, **host), "traffic": traffic}, base_dir=folder
    )
    rows: list[Values] = []
    records: list[Record] = []
    result = run_scenario(
        scenario, None, verify=True, driver=InlineDriver, on_row=rows.append, on_record=records.append
    )
    return Ran(report_text(result.report), rows, records)


MODES = pytest.mark.parametrize("mode", ["aggregated", "disaggregated"])


# -- refused


@pytest.mark.parametrize(
    ("path", "prefill", "decode"),
    [
        ("host_offload.kv_layout_id", "layout-a", "layout-b"),
        ("host_offload.num_host_blocks", 16, 17),
        ("host_offload.shared_d2h_bandwidth_gbps", 80.0, 79.5),
        ("host_offload.shared_h2d_bandwidth_gbps", 0.0, 80.0),
        ("host_offload.sharing", "max_min", "equal_share"),
        ("bytes_per_token", 250_000, 125_000),
        ("block_size", 4, 8),
    ],
)
def test_roles_that_disagree_on_their_pool_are_refused_with_both_values(
    path: str, prefill: object, decode: object
) -> None:
    """A shared pool has one layout, capacity and bandwidth: the message names the field, what it is and must be."""
    workers = engine("disaggregated", "cluster_shared", kv_layout_id="layout-a")["workers"]
    for role, value in (("prefill", prefill), ("decode", decode)):
        *outer, last = path.split(".")
        inner = workers[role]["kv_cache"]
        for key in outer:
            inner = inner[key]
        inner[last] = value
    traffic = {"source": {"type": "synthetic"}, "load": {"type": "concurrency"}, "stop": {"requests": 3}}
    values = {"engine": {"mode": "disaggregated", "workers": workers}, "traffic": traffic}
    with pytest.raises(ConfigError) as caught:
        Scenario.from_dict(values)
    message = str(caught.value)
    assert caught.value.exit_code == 2
    assert caught.value.field == f"engine.workers.decode.kv_cache.{path}"
    assert str(decode) in message
    assert str(prefill) in message
    assert f"engine.workers.prefill.kv_cache.{path}" in message
    agreeing = copy.deepcopy(values)
    agreeing["engine"]["workers"]["decode"]["kv_cache"] = {
        **agreeing["engine"]["workers"]["prefill"]["kv_cache"],
        "capacity": {"type": "fixed", "blocks": 8},
    }
    Scenario.from_dict(agreeing)


@pytest.mark.parametrize("key", ["d2h_bandwidth_gbps", "h2d_bandwidth_gbps", "latency_to_first_byte_ms"])
def test_roles_may_differ_in_what_is_their_own(key: str) -> None:
    """Link rates and latency belong to a rank, not to the pool, and need not agree."""
    workers = engine("disaggregated", "cluster_shared")["workers"]
    workers["decode"]["kv_cache"]["host_offload"][key] = 0.5
    traffic = {"source": {"type": "synthetic"}, "load": {"type": "concurrency"}, "stop": {"requests": 3}}
    Scenario.from_dict({"engine": {"mode": "disaggregated", "workers": workers}, "traffic": traffic})


# -- private


@MODES
def test_fields_of_a_shared_pool_do_not_touch_a_private_tier(tmp_path: Path, mode: str) -> None:
    """dp_rank_local with the shared-only fields left set gives the same report bytes, rows and log events."""
    plain = run(tmp_path, mode, "dp_rank_local")
    left_over = run(tmp_path, mode, "dp_rank_local", **SHARED_ONLY)
    assert left_over.report == plain.report
    assert left_over.rows == plain.rows
    assert left_over.records == plain.records
    assert plain.restored_tokens > 0


@MODES
def test_those_fields_do_matter_to_a_shared_pool(tmp_path: Path, mode: str) -> None:
    """The counterpart: with cluster_shared the same settings change the report, so the test above can fail."""
    assert run(tmp_path, mode, "cluster_shared").report != run(tmp_path, mode, "cluster_shared", **SHARED_ONLY).report


@MODES
def test_a_private_run_reports_no_domain(tmp_path: Path, mode: str) -> None:
    """g2_domains is about shared pools; private tiers are not in it."""
    assert run(tmp_path, mode, "dp_rank_local").domains is None


# -- shared


def test_two_prefill_and_two_decode_workers_on_one_pool(tmp_path: Path) -> None:
    """One domain of 16 blocks for four workers, two workers at work in each role, and prompts restored from it.

    The trace has four different prompts of two whole blocks: 8 blocks are resident at the end, on however many workers
    they were computed.
    """
    ran = run(tmp_path, "disaggregated", "cluster_shared")
    assert ran.domains == [{"capacity_blocks": 16, "resident_blocks": 8, "used_blocks": 8}]
    assert ran.workers("prefill") == {0, 1}
    assert ran.workers("decode") == {0, 1}
    assert {row["prefill_worker_idx"] for row in ran.rows} == {0, 1}
    assert {row["decode_worker_idx"] for row in ran.rows} == {0, 1}
    assert ran.restored_tokens == 24  # at 60, 62 and 93, two blocks of 4 tokens each


def test_the_private_twin_of_that_run(tmp_path: Path) -> None:
    """The same run with private tiers uses the same workers and restores where the worker itself had stored: 60, 62."""
    shared, private = (run(tmp_path, "disaggregated", scope) for scope in ("cluster_shared", "dp_rank_local"))
    for role in ("prefill", "decode"):
        assert private.workers(role) == shared.workers(role) == {0, 1}
    assert private.restored_tokens == 16
    twin = run(tmp_path, "disaggregated", "dp_rank_local", **SHARED_ONLY)
    assert (twin.report, twin.records) == (private.report, private.records)


@pytest.mark.parametrize(("scope", "copies"), [("cluster_shared", 1), ("dp_rank_local", 2)])
def test_a_shared_pool_holds_one_copy_of_a_block(tmp_path: Path, scope: str, copies: int) -> None:
    """F45: a prompt that both workers compute is stored once in a shared pool, and once a worker in private tiers.

    In the aggregated trace [1, 2] is met by worker 0 (0, 60 and 90) and by worker 1 (93).
    """
    ran = run(tmp_path, "aggregated", scope)
    stores = [r.event for r in ran.records if isinstance(r.event, StorePrepared)]
    landed = [r.event for r in ran.records if isinstance(r.event, StoreLanded)]
    hashes = [hash_ for event in stores for hash_ in event.block_hashes]
    first = stores[0].block_hashes
    assert [hashes.count(hash_) for hash_ in first] == [copies, copies]
    assert len(landed) == len(stores)
    publishers = {
        (r.event.worker, hash_)
        for r in ran.records
        if isinstance(r.event, BlocksStored) and r.event.tier == "host_pinned"
        for hash_ in r.event.block_hashes
    }
    assert {worker for worker, hash_ in publishers if hash_ == first[0]} == {0, 1}
    if copies == 1:
        assert len(hashes) == len(set(hashes)) == 8
        assert ran.domains == [{"capacity_blocks": 16, "resident_blocks": 8, "used_blocks": 8}]
