"""Field cases about offload and the host tier, as whole runs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from field_runs import BLOCK, Ran, host, row, simulate, worker

from g2sim.actors.host_pool.events import HostBlocksEvicted, LoadFinished, LoadQueued, StoreLanded, StorePrepared
from g2sim.actors.kv.events import BlocksRemoved, BlocksStored
from g2sim.actors.worker.events import RequestAdmitted, RequestPreempted
from g2sim.bus.errors import ConfigError
from g2sim.scenarios.schema import Scenario


def all_end(ran: Ran) -> None:
    assert set(ran.column("terminal_status")) == {"completed"}
    state = ran.state()
    assert state["open_requests"] == []
    for blocks in state["pools"].values():
        assert set(blocks.values()) <= {(1, 0)}, "every block is resident and no pin is left"


def test_f07_residency_from_events_is_that_of_the_workers_on_every_path(tmp_path: Path) -> None:
    """Fresh compute, write-through, eviction, loads from the pool and hand-offs; compared at every pass end."""
    tier = host(64, shared=True)
    rows = [row(7.0 * k, [10 * (k % 9) + b for b in range(5)], out=3) for k in range(60)]
    ran = simulate(
        tmp_path,
        rows,
        prefill=worker(gpu_blocks=16, host=tier, replicas=2),
        decode=worker(gpu_blocks=16, host=tier, replicas=2),
    )
    all_end(ran)
    assert {event.tier for event in ran.of(BlocksStored)} == {event.tier for event in ran.of(BlocksRemoved)} | {
        "host_pinned"
    }
    assert ran.of(LoadFinished)


def test_f09_f10_a_removal_comes_before_the_store_that_it_makes_room_for(tmp_path: Path) -> None:
    """The events of one rank, in their order, never hold more than the pool."""
    rows = [row(10.0 * k, [10 * (k % 5) + b for b in range(2)]) for k in range(40)]
    ran = simulate(tmp_path, rows, aggregated=worker(gpu_blocks=4, host=host(4)))
    held: set[int] = set()
    for event in ran.of(BlocksStored, BlocksRemoved):
        if event.tier == "host_pinned":
            held = held | set(event.block_hashes) if isinstance(event, BlocksStored) else held - set(event.block_hashes)
            assert len(held) <= 4
    assert ran.of(HostBlocksEvicted)


def test_f19_sharing_a_prefix_removes_nothing(tmp_path: Path) -> None:
    rows = [row(0, [1, 2, 3, 4]), row(10, [1, 2, 5, 6]), row(20, [1, 2, 3, 4, 7])]
    ran = simulate(tmp_path, rows, router={"policy": "prefix_affinity"}, aggregated=worker(gpu_blocks=64))
    assert not ran.of(BlocksRemoved)
    assert ran.rows[2]["reused_input_tokens"] == 4 * BLOCK
    assert ran.rows[2]["routing_history"][0]["reported_overlap_tokens"] == 4 * BLOCK


def test_f26_a_head_that_does_not_fit_waits_for_loads_that_hold_its_blocks(tmp_path: Path) -> None:
    """G1=20: three requests load four host blocks each, 2 ms a block; one of 18 new blocks waits until they end."""
    prompts = [[10 * k + b for b in range(4)] for k in range(3)]
    rows = [row(10 * k, ids) for k, ids in enumerate(prompts)]
    rows += [row(100, range(100, 119))]  # pushes them out of G1
    rows += [row(1000, [*ids, 50 + ids[0]]) for ids in prompts] + [row(1001, range(200, 218))]
    ran = simulate(tmp_path, rows, aggregated=worker(gpu_blocks=20, host=host(64, h2d_ms=2.0)))
    all_end(ran)
    assert ran.column("first_admission_host_reused_input_tokens")[4:] == [16, 16, 16, 0]
    assert ran.rows[7]["first_admit_ms"] >= max(one["terminal_time_ms"] for one in ran.rows[4:7])


@pytest.mark.parametrize("mode", ["lifo", "fifo"])
def test_f27_a_preempted_request_loads_only_after_its_own_store(tmp_path: Path, mode: str) -> None:
    """G1=10, stores of 50 ms a block; two requests that grow by five blocks each force a preemption."""
    rows = [row(0, [1, 2, 3, 4], out=20), row(0, [11, 12, 13, 14], out=20)]
    ran = simulate(tmp_path, rows, aggregated=worker(gpu_blocks=10, host=host(64, d2h_ms=50.0), preemption_mode=mode))
    all_end(ran)
    assert ran.of(RequestPreempted)
    stores = {event.transfer: event for event in ran.of(StorePrepared)}
    under_way: set[int] = set()
    for event in ran.of(StorePrepared, StoreLanded, LoadQueued):
        if isinstance(event, StorePrepared):
            under_way |= set(event.block_hashes)
        elif isinstance(event, StoreLanded):
            under_way -= set(stores[event.transfer].block_hashes)
        else:
            assert not under_way & set(event.block_hashes)
    for one in ran.rows:
        assert one["first_admission_host_reused_input_tokens"] == 0
        assert [hop["is_readmission"] for hop in one["admission_history"]].count(False) == 1
    for event in ran.of(RequestAdmitted):
        assert (event.g1_tokens is None) is (event.host_tokens is None) is event.readmission, "F80"


def test_f29_requests_that_share_host_blocks_do_not_go_one_behind_the_other(tmp_path: Path) -> None:
    """Ten requests over 20 host blocks, 1 ms a block. The reference copies once: the other nine hit G1 at 20 ms."""
    shared = list(range(20))
    rows = [row(0, shared)] + [row(10 + k, range(1000 * (k + 1), 1000 * (k + 1) + 250)) for k in range(2)]
    rows += [row(1000, [*shared, 500 + k]) for k in range(10)]
    ran = simulate(
        tmp_path, rows, aggregated=worker(gpu_blocks=256, host=host(1024), max_batched_tokens=2048, max_sequences=32)
    )
    all_end(ran)
    late = ran.rows[3:]
    moved = Counter(hash_ for event in ran.of(LoadQueued) for hash_ in event.block_hashes)
    assert set(moved.values()) == {1}, "each block is moved once"
    assert len(moved) == 20
    assert {one["first_admit_ms"] for one in late} == {1020.0}


@pytest.mark.parametrize("roles", [("prefill", "decode"), ("decode",)])
def test_f31_no_lock_is_left_in_any_role(tmp_path: Path, roles: tuple[str, ...]) -> None:
    rows = [row(3.0 * k, [10 * (k % 23) + b for b in range(6)], out=5) for k in range(200)]
    workers = {
        role: worker(gpu_blocks=24, replicas=2, host=host(48) if role in roles else None)
        for role in ("prefill", "decode")
    }
    ran = simulate(tmp_path, rows, **workers)
    all_end(ran)
    assert len(ran.of(StorePrepared)) == len(ran.of(StoreLanded)) > 50
    for pool in ran.report["g2_pools"]:
        assert pool["resident_blocks"] == pool["used_blocks"]


def test_f36_what_was_written_to_the_host_is_found_again(tmp_path: Path) -> None:
    prompts = [[10 * k + b for b in range(8)] for k in range(10)]
    rows = [row(100.0 * k, ids) for k, ids in enumerate(prompts * 2)]
    ran = simulate(tmp_path, rows, aggregated=worker(gpu_blocks=16, host=host(256)))
    all_end(ran)
    # The last block of a prompt is always computed, or there would be nothing to predict from.
    assert ran.column("first_admission_host_reused_input_tokens")[10:] == [7 * BLOCK] * 10
    written = {hash_ for event in ran.of(StorePrepared) for hash_ in event.block_hashes}
    assert len(written) == ran.report["g2_pools"][0]["resident_blocks"] == 80


def test_f37_host_hits_do_not_depend_on_room_in_g1(tmp_path: Path) -> None:
    """The same 20 host blocks, on a worker that has never had them on its GPU."""
    hits = []
    for gpu_blocks in (24, 100, 10_000):
        rows = [row(0, range(20)), row(1000, [*range(20), 99])]
        both = worker(gpu_blocks=gpu_blocks, replicas=2, host=host(256, shared=True))
        hits.append(simulate(tmp_path, rows, aggregated=both).rows[1]["first_admission_host_reused_input_tokens"])
    assert hits == [20 * BLOCK] * 3


def test_f38_a_host_tier_changes_times_as_well_as_hits(tmp_path: Path) -> None:
    """Prompts over one chunk of prefill: what is loaded saves passes, and takes the time of the load."""
    prompts = [[100 * k + b for b in range(32)] for k in range(4)]
    rows = [row(1000.0 * k, ids) for k, ids in enumerate(prompts * 2)]
    settings = {"gpu_blocks": 40, "prefill_ms": 50.0, "max_batched_tokens": 32}
    without = simulate(tmp_path, rows, aggregated=worker(**settings))
    with_host = simulate(tmp_path, rows, aggregated=worker(**settings, host=host(4096)))
    for bare, loaded in zip(without.rows[4:], with_host.rows[4:], strict=True):
        blocks = loaded["first_admission_host_reused_input_tokens"] // BLOCK
        assert blocks == 31
        computed = bare["ttft_parts_ms"]["prefill"], loaded["ttft_parts_ms"]["prefill"]
        assert computed == (4 * 50.0, 50.0)
        load_ms = loaded["ttft_parts_ms"]["host_load"]
        assert load_ms >= 31.0
        assert bare["ttft_ms"] - loaded["ttft_ms"] == computed[0] - computed[1] - load_ms


def test_f39_a_block_that_is_copied_to_the_host_stays_on_the_gpu(tmp_path: Path) -> None:
    rows = [row(100.0 * k, [10 * (k % 3) + b for b in range(8)]) for k in range(6)]
    ran = simulate(tmp_path, rows, aggregated=worker(gpu_blocks=64, host=host(64)))
    assert ran.column("first_admission_g1_reused_input_tokens")[3:] == [7 * BLOCK] * 3
    assert ran.column("first_admission_host_reused_input_tokens") == [0] * 6
    assert not ran.of(LoadQueued)


@pytest.mark.parametrize("step_ms", [0.0, 1.0])
def test_f42_what_is_counted_does_not_depend_on_the_clock(step_ms: float, tmp_path: Path) -> None:
    """A store, an eviction from G1 and the first load of the same blocks: in one instant, at time 0 and at 10,000."""

    def figures(at_ms: float) -> list[Any]:
        rows = [row(0, [99], tokens=1), *(row(at_ms, ids) for ids in (range(6), range(20, 28), [*range(6), 90]))]
        one = worker(gpu_blocks=8, prefill_ms=step_ms, decode_ms=step_ms, host=host(32, d2h_ms=step_ms, h2d_ms=step_ms))
        ran = simulate(tmp_path, rows, aggregated=one)
        all_end(ran)
        names = ("first_admission_host_reused_input_tokens", "ttft_ms", "ttft_parts_ms", "e2e_latency_ms")
        return [ran.report["g2_pools"], *(ran.column(name)[1:] for name in names)]

    early = figures(0.0)
    assert early == figures(10_000.0)
    assert early[1] == [0, 0, 6 * BLOCK]
    if not step_ms:
        assert early[2] == [0.0] * 3


def test_f43_one_budget_in_bytes_is_one_number_of_blocks(tmp_path: Path) -> None:
    """64 GiB of blocks of 2 MiB are 32,768; ranks of one worker share a shared pool, and each has a private one."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 4, "output_length": 1, "hash_ids": [1]}\n')

    def blocks(dp_size: int, block_bytes: int, scope: str) -> list[int]:
        one = worker(gpu_blocks=8)
        one["parallelism"]["attention_data"] = dp_size
        one["kv_cache"]["bytes_per_token"] = block_bytes // BLOCK
        one["kv_cache"]["host_offload"] = {"scope": scope, "num_host_blocks": 2**36 // block_bytes}
        return [
            pool["capacity_blocks"] for pool in simulate(tmp_path, [row(0, [1])], aggregated=one).report["g2_pools"]
        ]

    assert blocks(1, 2**21, "cluster_shared") == [32_768]
    assert blocks(1, 2**23, "cluster_shared") == [8_192]
    assert blocks(4, 2**21, "cluster_shared") == [32_768]
    assert blocks(4, 2**21, "dp_rank_local") == [32_768] * 4


def test_f44_blocks_that_come_back_are_charged_before_they_arrive(tmp_path: Path) -> None:
    """G1=12: while 5 blocks are on their way back, a request for 8 has to wait, though the room is not used yet."""
    rows = [row(0, range(6)), row(10, range(20, 32)), row(1000, [*range(5), 90]), row(1001, range(50, 58))]
    ran = simulate(tmp_path, rows, aggregated=worker(gpu_blocks=12, host=host(64, h2d_ms=10.0)))
    all_end(ran)
    back, other = ran.rows[2:]
    assert back["first_admission_host_reused_input_tokens"] == 5 * BLOCK
    assert back["first_admit_ms"] == 1050.0
    assert other["first_admit_ms"] >= back["terminal_time_ms"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("d2h_bandwidth_gbps", -1.0),
        ("h2d_bandwidth_gbps", float("nan")),
        ("shared_d2h_bandwidth_gbps", float("inf")),
        ("latency_to_first_byte_ms", -0.5),
        ("num_host_blocks", 0),
    ],
)
def test_f46_bad_numbers_of_a_host_tier_are_refused_and_not_clipped(field: str, value: float) -> None:
    tier = {**host(8, shared=True), field: value}
    values = {
        "engine": {"mode": "aggregated", "workers": {"aggregated": worker(gpu_blocks=8, host=tier)}},
        "traffic": {"source": {"type": "synthetic"}, "load": {"type": "concurrency"}, "stop": {"requests": 1}},
    }
    with pytest.raises(ConfigError) as caught:
        Scenario.from_dict(values)
    assert caught.value.field == f"engine.workers.aggregated.kv_cache.host_offload.{field}"
    assert repr(value) in str(caught.value)
