"""Field case F48: caches that are cleared while copies are under way, and what becomes of requests in flight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from field_runs import BLOCK, Ran, Values, host, row, simulate, worker
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from g2sim.actors.handoff.events import DestinationActivated, DestinationReserved, SourceHeld
from g2sim.actors.host_pool.events import (
    ClearedBlocksFreed,
    HostPoolCleared,
    LoadFinished,
    LoadQueued,
    StoreDropped,
    StoreLanded,
    StoreSubmitted,
)
from g2sim.actors.kv.events import BlocksCleared, BlocksRemoved, BlocksStored
from g2sim.actors.membership.events import CachesCleared
from g2sim.actors.worker.events import RequestAdmitted
from g2sim.bus.events import Record
from g2sim.scenarios.run import report_of_log
from g2sim.scenarios.state_fold import StateFold
from g2sim.scenarios.stream_sources import check_files
from g2sim.scenarios.time_travel import inspect_run
from g2sim.scenarios.validate import Validator


def clear(at_ms: float, **more: Any) -> Values:
    return {"name": f"clear-{at_ms}", "type": "cache_clear", "from_ms": at_ms, **more}


def stores(ran: Ran) -> list[tuple[Record, BlocksStored]]:
    return [(record, record.event) for record in ran.records if isinstance(record.event, BlocksStored)]


def findings(folder: Path) -> list[str]:
    validator = Validator()
    check_files([folder], validator)
    validator.finish()
    return [f"{one.code} {one.problem}" for one in validator.findings.kept]


@pytest.mark.parametrize("shared", [False, True])
def test_f48_a_clear_under_copies_leaves_both_tiers_empty_when_these_have_ended(shared: bool, tmp_path: Path) -> None:
    """Load over [0, 60], store over [10, 50], clear of all tiers at 30, the prefix again at 70; all 1,000 ms later.

    The load's prefix comes to the host first, and is cleared from the device at 500.
    """
    prefix, other = [1, 2, 3, 4, 5, 6], [11, 12, 13, 14]
    rows = [
        row(0.0, prefix),
        row(1000.0, [*prefix, 7]),
        row(1009.0, other),
        row(1070.0, [*prefix, 8]),
    ]
    ran = simulate(
        tmp_path,
        rows,
        router={"policy": "dynamo_kv"},
        faults={"plan": [clear(500.0, tier="device"), clear(1030.0)]},
        out=tmp_path / "run",
        aggregated=worker(gpu_blocks=32, host=host(10, d2h_ms=10.0, h2d_ms=10.0, shared=shared)),
    )
    (queued,) = ran.of(LoadQueued)
    assert (queued.completes_at_ms or 1060.0, len(queued.block_hashes)) == (1060.0, 6)
    submitted = [record for record in ran.records if isinstance(record.event, StoreSubmitted)][1]
    assert submitted.time_ms == 1010.0
    (cleared,) = [one for one in ran.of(HostPoolCleared) if one.loading_hashes]
    assert (cleared.block_hashes, set(cleared.loading_hashes)) == ((), set(queued.block_hashes))
    (dropped,) = ran.of(StoreDropped)
    assert (dropped.transfer, dropped.ended_ms) == (submitted.event.transfer, 1050.0)
    (freed,) = [one for one in ran.records if isinstance(one.event, ClearedBlocksFreed)]
    assert (freed.time_ms, freed.event.block_hashes) == (1060.0, queued.block_hashes)
    assert ran.of(LoadFinished)[0].ended_ms == 1060.0
    fold = StateFold()
    for record in ran.records:
        if record.time_ms >= 1070.0:
            break
        fold.apply(record)
        if record.time_ms >= 1030.0 and type(record.event) is not CachesCleared:
            assert not isinstance(record.event, BlocksStored | StoreLanded)
        assert sum(len(pool.blocks) + pool.kept.total() for pool in fold.pools.values()) <= 10
    (rank,), (pool,) = fold.ranks.values(), fold.pools.values()
    assert (rank.device, rank.host) == (set(), set())
    assert (pool.blocks, pool.kept, pool.transfers) == ({}, {}, {})
    assert ran.column("reused_input_tokens") == [0, 6 * BLOCK, 0, 0]
    assert {one["terminal_status"] for one in ran.rows} == {"completed"}
    assert findings(tmp_path / "run") == []
    assert report_of_log(tmp_path / "run").report == ran.report
    pools = [
        inspect_run(tmp_path / "run", at_ms=at_ms).value["g2_pools"][0] for at_ms in (1029.0, 1040.0, 1055.0, 1065.0)
    ]
    assert [len(one["resident_blocks"]) for one in pools] == [6, 0, 0, 0]
    assert [len(one["cleared_blocks"]) for one in pools] == [0, 10, 6, 0]
    (router,) = ran.report["event_plane"]["routers"]
    assert set(router["index_end"].values()) == {0}


def test_f48_a_pass_in_flight_announces_nothing_of_before_the_clear(tmp_path: Path) -> None:
    """Clear at 5 in the pass over [0, 10]: its blocks are never announced, and what the request adds is not cached."""
    rows = [row(0.0, [1, 2, 3], out=3 * BLOCK), row(100.0, [1, 2, 3, 4])]
    ran = simulate(
        tmp_path,
        rows,
        faults={"plan": [clear(5.0)]},
        out=tmp_path / "run",
        aggregated=worker(gpu_blocks=16, prefill_ms=10.0),
    )
    (cleared,) = ran.of(CachesCleared)
    assert (cleared.device_dropped_blocks, cleared.device_kept_blocks) == (0, 3)
    assert [record.time_ms for record, _ in stores(ran)] == [110.0]
    assert ran.of(BlocksRemoved, BlocksCleared) == []
    assert ran.column("reused_input_tokens") == [0, 0]
    assert findings(tmp_path / "run") == []


@pytest.mark.parametrize(
    ("at_ms", "after", "before"),
    [
        (5.0, None, SourceHeld),  # in the prefill pass
        (30.0, DestinationReserved, DestinationActivated),  # while the KV moves
        (85.0, DestinationActivated, None),  # while the destination decodes
    ],
)
@pytest.mark.parametrize("tier", [None, "device"])
def test_f48_kv_of_a_hand_off_is_cached_nowhere_after_a_clear(
    at_ms: float, after: type[Any] | None, before: type[Any] | None, tier: str | None, tmp_path: Path
) -> None:
    """The prompt's KV takes 60 ms to the decode rank; whoever comes after it finds nothing on either rank."""
    rows = [row(0.0, [1, 2, 3, 4, 5, 6], out=40), row(300.0, [1, 2, 3, 4, 5, 6, 7])]
    ran = simulate(
        tmp_path,
        rows,
        faults={"plan": [clear(at_ms, tier=tier)]},
        handoff={"bytes_per_token": 250_000, "bandwidth_gb_per_second": 0.1},
        out=tmp_path / "run",
        prefill=worker(gpu_blocks=16, prefill_ms=10.0),
        decode=worker(gpu_blocks=32),
    )
    kinds = [type(record.event) for record in ran.records]
    cleared = kinds.index(CachesCleared)
    assert after is None or kinds.index(after) < cleared
    assert before is None or cleared < kinds.index(before)
    fold = StateFold()
    for record in ran.records:
        if record.time_ms >= 300.0:
            break
        fold.apply(record)
        assert record.time_ms < at_ms or not isinstance(record.event, BlocksStored)
    assert [rank.device for rank in fold.ranks.values()] == [set(), set()]
    assert ran.column("reused_input_tokens") == [0, 0]
    assert findings(tmp_path / "run") == []


def test_f48_a_source_that_waits_for_a_destination_at_a_clear_is_cached_nowhere(tmp_path: Path) -> None:
    """The only decode rank is out of discovery over [0.5, 100]; the prefill rank is cleared while it holds the KV."""
    rows = [row(1.0, [1, 2, 3, 4, 5, 6], out=5), row(200.0, [11, 12], out=2)]
    flap = {"name": "away", "type": "discovery_flap", "from_ms": 0.5, "until_ms": 100.0, "pool": "decode"}
    ran = simulate(
        tmp_path,
        rows,
        faults={"plan": [flap, clear(50.0, pool="prefill")]},
        prefill=worker(gpu_blocks=16),
        decode=worker(gpu_blocks=32),
    )
    stored = [(record.time_ms >= 50.0, one.role, one.block_hashes) for record, one in stores(ran)]
    first, second = ran.blocks.values()
    assert stored == [(False, "prefill", first), (True, "prefill", second), (True, "decode", second)]


PROMPTS = [[1, 2, 3, 4], [1, 2, 3, 5, 6], [1, 2], [7, 8, 9], [7, 8, 9, 10, 11], [12, 13, 14, 15, 16, 17]]


@given(
    prompts=st.lists(st.tuples(st.floats(0.0, 60.0), st.sampled_from(PROMPTS)), min_size=2, max_size=8),
    at_ms=st.lists(st.floats(1.0, 90.0), min_size=1, max_size=2, unique=True),
    separate=st.booleans(),
    tier=st.sampled_from([None, "host_pinned", "device"]),
    shared=st.booleans(),
    gpu_blocks=st.sampled_from([14, 18, 40]),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_f48_only_what_was_begun_after_the_last_clear_is_announced_after_it(
    prompts: list[tuple[float, list[int]]],
    at_ms: list[float],
    separate: bool,
    tier: str | None,
    shared: bool,
    gpu_blocks: int,
    tmp_path: Path,
) -> None:
    """Small caches, slow copies, clears at any moment: a store after the last clear is of a prompt begun after it."""
    rows = [row(when, ids, out=3) for when, ids in sorted(prompts)]
    one = worker(
        gpu_blocks=gpu_blocks,
        prefill_ms=3.0,
        host=host(8, d2h_ms=4.0, h2d_ms=6.0, shared=shared),
        max_batched_tokens=12,
        replicas=1 if separate else 2,
    )
    ran = simulate(
        tmp_path,
        rows,
        router={"policy": "dynamo_kv"},
        faults={"plan": [clear(when, tier=tier) for when in at_ms]},
        handoff={"bytes_per_token": 250_000, "bandwidth_gb_per_second": 0.2} if separate else None,
        **({"prefill": one, "decode": one} if separate else {"aggregated": one}),
    )
    assert ran.report["requests"]["completed"] == len(rows)
    last = max(idx for idx, record in enumerate(ran.records) if isinstance(record.event, CachesCleared))
    begun: set[int] = set()
    for record in ran.records[:last]:
        if isinstance(record.event, RequestAdmitted | LoadQueued):
            begun.add(record.event.request)
    fresh: set[int] = set()
    for record in ran.records[last:]:
        event = record.event
        if isinstance(event, RequestAdmitted | LoadQueued):
            # One that was preempted begins anew, with a load or without.
            if event.request not in begun or isinstance(event, LoadQueued) or event.readmission:
                fresh.update(ran.blocks[event.request])
        elif isinstance(event, BlocksStored) and tier in (None, event.tier):
            assert fresh.issuperset(event.block_hashes)
