"""What ranks publish of a shared host pool, worked by hand from C4 and g1-g2-cache.md section 7.

Blocks are 1 MB, each link moves 1 MB/ms, a prefill takes 2 ms and a decode step 1 ms; the pool itself is unlimited
unless a test says otherwise. A prompt of 9 tokens over ids (1, 2, 3) has the whole blocks a = [a0, a1].
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from g2sim.actors.host_pool import events as ev
from g2sim.actors.host_pool.messages import (
    Completion,
    Join,
    LookUp,
    LookUpOutcome,
    PoolChange,
    PrepareStore,
    QueueLoad,
    Retire,
    StoreReply,
)
from g2sim.actors.host_pool.pool import HostPool
from g2sim.actors.host_pool.transfers import FairLinks, Link, max_min
from g2sim.actors.kv.blocks import BlockChain, BlockHasher
from g2sim.actors.kv.events import BlocksRemoved, BlocksStored
from g2sim.actors.kv.numbers import NO_NUMBERS
from g2sim.actors.kv.prompt import RunPrompt
from g2sim.bus.drivers import InlineDriver
from g2sim.bus.events import Record
from g2sim.scenarios.run import run_scenario
from g2sim.scenarios.schema import Scenario

MB = 1_000_000
Row = tuple[float, tuple[int, ...], int]
"""(timestamp, hash ids of all blocks but the last, output tokens); one more token follows the whole blocks."""


def run(
    folder: Path, rows: Sequence[Row], *, workers: int, dp: int = 1, gpu_blocks: int = 8, capacity: int = 8
) -> list[Record]:
    """The KV events of a run, requests handed out in turn."""
    trace = folder / "trace.jsonl"
    lines = [
        {
            "timestamp": at_ms,
            "input_length": 4 * len(ids) + 1,
            "hash_ids": [*ids, 900 + number],
            "output_length": output,
        }
        for number, (at_ms, ids, output) in enumerate(rows)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    worker = {
        "parallelism": {"replicas": workers, "attention_data": dp},
        "scheduler": {"max_sequences": 1, "max_batched_tokens": 64},
        "kv_cache": {
            "block_size": 4,
            "bytes_per_token": 250_000,
            "capacity": {"type": "fixed", "blocks": gpu_blocks},
            "host_offload": {
                "scope": "cluster_shared",
                "num_host_blocks": capacity,
                "d2h_bandwidth_gbps": 1.0,
                "h2d_bandwidth_gbps": 1.0,
                "shared_d2h_bandwidth_gbps": 0.0,
                "shared_h2d_bandwidth_gbps": 0.0,
            },
        },
        "timing": {"type": "fixed", "prefill_ms": 2.0, "decode_ms": 1.0},
    }
    source = {"type": "trace", "format": "mooncake", "paths": [str(trace)], "block_size": 4}
    scenario = Scenario.from_dict(
        {
            "name": "streams",
            "engine": {"mode": "aggregated", "workers": {"aggregated": worker}},
            "traffic": {"source": source, "load": {"type": "trace_timestamps"}},
        },
        base_dir=folder,
    )
    records: list[Record] = []
    run_scenario(scenario, None, verify=True, driver=InlineDriver, on_record=records.append)
    return [record for record in records if isinstance(record.event, BlocksStored | BlocksRemoved)]


def names(rows: Sequence[Row]) -> dict[int, str]:
    """Short names of block hashes: the hash ids of the prefix, as "1", "1.2"; ids are numbered as the loader does."""
    interned: dict[int, int] = {}
    found = {}
    for number, (_, ids, _) in enumerate(rows):
        own = [interned.setdefault(id_, len(interned)) for id_ in (*ids, 900 + number)]
        chain = BlockHasher(4).chain(RunPrompt(tuple(own), 4, 4 * len(ids)))
        for position, hash_ in enumerate(chain.sequence_hashes):
            found[hash_] = ".".join(map(str, ids[: position + 1]))
    return found


def told(records: Sequence[Record], rows: Sequence[Row], rank: tuple[int, int] | None = None) -> list[tuple[Any, ...]]:
    """(time, tier, kind, names, parent's name, start) of one rank's events, or of all of them."""
    short = names(rows)
    out: list[tuple[Any, ...]] = []
    for record in records:
        event = record.event
        if rank is not None and (event.worker, event.dp_rank) != rank:
            continue
        blocks = [short[hash_] for hash_ in event.block_hashes]
        tier = "device" if event.tier == "device" else "host"
        if isinstance(event, BlocksRemoved):
            out.append((record.time_ms, tier, "removed", blocks))
        else:
            parent = None if event.parent_hash is None else short[event.parent_hash]
            out.append((record.time_ms, tier, "stored", blocks, parent, event.start_position))
    return out


def host_of(events: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return [event for event in events if event[1] == "host"]


def check_streams(records: Sequence[Record], rows: Sequence[Row], ranks: Sequence[tuple[int, int]]) -> None:
    """Ids of each rank are 0, 1, 2, ... over both tiers, and all ranks tell the same host changes in one order."""
    first = [event[2:] for event in host_of(told(records, rows, ranks[0]))]
    assert first
    for worker, dp_rank in ranks:
        mine = [r.event for r in records if (r.event.worker, r.event.dp_rank) == (worker, dp_rank)]
        assert [event.event_id for event in mine] == list(range(len(mine)))
        assert {event.role for event in mine} == {"aggregated"}
        assert [event[2:] for event in host_of(told(records, rows, (worker, dp_rank)))] == first
    assert {(r.event.worker, r.event.dp_rank) for r in records} == set(ranks)


# -- whole runs


def test_the_table_of_restore_shared(tmp_path: Path) -> None:
    """Section 7's example to the letter: one rank, three GPU blocks, A, then X, then A restored from the pool."""
    rows: list[Row] = [(0.0, (1, 2), 2), (100.0, (11, 12), 1), (200.0, (1, 2), 1)]
    records = run(tmp_path, rows, workers=1, gpu_blocks=3)
    check_streams(records, rows, [(0, 0)])
    assert told(records, rows) == [
        (2.0, "device", "stored", ["1", "1.2"], None, 0),
        (4.0, "host", "stored", ["1", "1.2"], None, 0),
        (102.0, "device", "removed", ["1.2", "1"]),
        (102.0, "device", "stored", ["11", "11.12"], None, 0),
        (104.0, "host", "stored", ["11", "11.12"], None, 0),
        (200.0, "device", "removed", ["11.12"]),
        (202.0, "device", "stored", ["1", "1.2"], None, 0),
        (204.0, "device", "removed", ["11"]),
    ]


def test_two_ranks_an_idle_one_tells_at_once_and_a_busy_one_at_its_pass_end(tmp_path: Path) -> None:
    """A on worker 0 (0-2, stored 2-4); X on worker 1 (3-5, stored 5-7).

    A lands at 4: worker 0, idle, tells it at 4; worker 1 is in its pass and tells it at 5, after that pass's own device
    blocks. X lands at 7, both are idle: both tell it at 7.
    """
    rows: list[Row] = [(0.0, (1, 2), 1), (3.0, (11, 12), 1)]
    records = run(tmp_path, rows, workers=2)
    check_streams(records, rows, [(0, 0), (1, 0)])
    a, x = (["1", "1.2"], None, 0), (["11", "11.12"], None, 0)
    assert told(records, rows, (0, 0)) == [
        (2.0, "device", "stored", *a),
        (4.0, "host", "stored", *a),
        (7.0, "host", "stored", *x),
    ]
    assert told(records, rows, (1, 0)) == [
        (5.0, "device", "stored", *x),
        (5.0, "host", "stored", *a),
        (7.0, "host", "stored", *x),
    ]


def test_two_ranks_of_one_worker_are_two_publishers(tmp_path: Path) -> None:
    """Attention DP 2: each rank tells every change under the worker's number and its own rank, with ids of its own."""
    rows: list[Row] = [(0.0, (1, 2), 1), (10.0, (11, 12), 1)]
    records = run(tmp_path, rows, workers=1, dp=2)
    check_streams(records, rows, [(0, 0), (0, 1)])
    for rank in ((0, 0), (0, 1)):
        assert host_of(told(records, rows, rank)) == [
            (4.0, "host", "stored", ["1", "1.2"], None, 0),
            (14.0, "host", "stored", ["11", "11.12"], None, 0),
        ]


def test_three_ranks_a_removal_is_told_when_the_victim_is_chosen(tmp_path: Path) -> None:
    """G2=2. A (one block) and B (one block) on workers 0 and 1, then X (two blocks) on worker 2 at 100.

    A lands at 3 and B at 13. X's pass starts at 100 and takes the room of both, the older first: the idle workers tell
    the removal at 100, worker 2 at its pass end, 102, after its device blocks. X lands at 104 and all tell it then.
    """
    rows: list[Row] = [(0.0, (1,), 1), (10.0, (5,), 1), (100.0, (11, 12), 1)]
    records = run(tmp_path, rows, workers=3, capacity=2)
    check_streams(records, rows, [(0, 0), (1, 0), (2, 0)])
    for worker, removed_ms in ((0, 100.0), (1, 100.0), (2, 102.0)):
        assert host_of(told(records, rows, (worker, 0))) == [
            (3.0, "host", "stored", ["1"], None, 0),
            (13.0, "host", "stored", ["5"], None, 0),
            (removed_ms, "host", "removed", ["1", "5"]),
            (104.0, "host", "stored", ["11", "11.12"], None, 0),
        ]
    at_the_end = [event[1:3] for event in told(records, rows, (2, 0)) if event[0] == 102.0]
    assert at_the_end == [("device", "stored"), ("host", "removed")]


def test_five_ranks_a_longer_prompt_stores_only_what_is_missing(tmp_path: Path) -> None:
    """Worker 0 stores 1.2; worker 1 computes 1.2.3.4 at 50 and stores the rest: a run with parent 1.2 and start 2.

    The load of 1.2 comes first (50-52, the pool publishes nothing for it), the pass is 52-54, the store 54-56. Worker 2
    restores all four blocks at 80 (80-84) and has nothing to store; a restore is device news of worker 2 alone.
    """
    rows: list[Row] = [(0.0, (1, 2), 1), (50.0, (1, 2, 3, 4), 1), (80.0, (1, 2, 3, 4), 1)]
    records = run(tmp_path, rows, workers=5)
    check_streams(records, rows, [(worker, 0) for worker in range(5)])
    for worker in range(5):
        assert host_of(told(records, rows, (worker, 0))) == [
            (4.0, "host", "stored", ["1", "1.2"], None, 0),
            (56.0, "host", "stored", ["1.2.3", "1.2.3.4"], "1.2", 2),
        ]
    everything = ["1", "1.2", "1.2.3", "1.2.3.4"]
    device = [event for event in told(records, rows, (2, 0)) if event[1] == "device"]
    assert device == [(84.0, "device", "stored", everything, None, 0)]
    assert not [event for event in told(records, rows, (4, 0)) if event[1] == "device"]


def test_five_ranks_never_tell_more_than_the_pool_holds(tmp_path: Path) -> None:
    """20 prompts of 2 blocks through G2=6: folded event by event, no rank's account of the pool exceeds 6 blocks."""
    rows: list[Row] = [(7.0 * n, (100 + 2 * n, 101 + 2 * n), 1) for n in range(20)]
    records = run(tmp_path, rows, workers=5, capacity=6)
    check_streams(records, rows, [(worker, 0) for worker in range(5)])
    for worker in range(5):
        resident: set[str] = set()
        for event in host_of(told(records, rows, (worker, 0))):
            if event[2] == "removed":
                assert resident >= set(event[3])
                resident -= set(event[3])
            else:
                assert not resident & set(event[3])
                resident |= set(event[3])
            assert len(resident) <= 6
        assert len(resident) == 6


# -- joining and leaving (pools are static in a run, so the pool is used directly)


def link(rate: float = math.inf) -> Link:
    return Link(d2h_bytes_per_ms=rate * MB, h2d_bytes_per_ms=rate * MB, latency_ms=0.0)


def chain(*hashes: int) -> BlockChain:
    return BlockChain(hashes, tuple(hash_ + 1000 for hash_ in hashes))


def join(pool: HostPool, client: int, rate: float = math.inf) -> tuple[PoolChange, ...]:
    return pool.join(
        Join(client=client, worker=client, role="aggregated", dp_rank=0, link=link(rate), actor=f"worker-{client}")
    )


def pool_with(*rates: float, capacity: int = 16, pool_rate: float = math.inf) -> HostPool:
    """Clients with links of these rates; ``pool_rate`` limits loads only."""
    pool = HostPool("g2", capacity, MB, FairLinks(math.inf, pool_rate * MB, max_min), shared=True)
    for client, rate in enumerate(rates):
        join(pool, client, rate)
    return pool


def prepare(pool: HostPool, now_ms: float, *hashes: int, client: int = 0, start: int = 0) -> StoreReply:
    message = PrepareStore(
        client=client, request=client, chain=chain(*hashes), start=start, stop=len(hashes), busy_sources=NO_NUMBERS
    )
    return pool.prepare_store(message, now_ms)


def store(pool: HostPool, now_ms: float, *hashes: int, client: int = 0) -> None:
    prepare(pool, now_ms, *hashes, client=client)
    pool.boundary(client, now_ms)


def load(pool: HostPool, now_ms: float, *hashes: int, client: int = 0) -> int:
    message = QueueLoad(client=client, request=client, chain=chain(*hashes), start=0, stop=len(hashes), from_ms=now_ms)
    return pool.queue_load(message, now_ms)


def outcome(pool: HostPool, *hashes: int, client: int = 0) -> LookUpOutcome:
    message = LookUp(client=client, chain=chain(*hashes), base_blocks=0, latest_store=None, loading=())
    return pool.look_up(message).outcome


def run_of(*hashes: int, parent: int | None = None, start: int = 0) -> PoolChange:
    return PoolChange(
        stored=True,
        block_hashes=hashes,
        tokens_hashes=tuple(hash_ + 1000 for hash_ in hashes),
        parent_hash=parent,
        start_position=start,
    )


def test_a_first_client_is_told_nothing() -> None:
    """The snapshot of an empty pool is empty."""
    assert join(pool_with(), 0) == ()


def test_a_store_is_cut_where_a_block_was_known_already() -> None:
    """With 2 of (1, 2, 3, 4) resident, storing the rest tells two runs: 1, and 3-4 with parent 2 from position 2."""
    pool = pool_with(math.inf, math.inf)
    prepare(pool, 0.0, 1, 2, start=1)
    pool.boundary(0, 0.0)
    pool.tick(1, 0.0)
    store(pool, 1.0, 1, 2, 3, 4)
    assert pool.tick(1, 1.0).changes == (run_of(1), run_of(3, 4, parent=2, start=2))


def test_a_late_client_gets_the_resident_blocks_parents_first_cut_into_runs() -> None:
    """Snapshot: sorted by (position, key), a run wherever the next block's parent is the one before it.

    Chains 5-4-3 and 5-6: positions 0: 5; 1: 4 and 6; 2: 3. So 5-4 is a run, 6 one of its own with parent 5, and 3 one
    with parent 4. What is still pending (8) comes later, live; every parent has been told before its child.
    """
    pool = pool_with(math.inf, 0.5)
    store(pool, 0.0, 5, 4, 3)
    store(pool, 1.0, 5, 6)
    store(pool, 2.0, 5, 8, client=1)  # moves until 4
    snapshot = join(pool, 2)
    assert snapshot == (run_of(5, 4), run_of(6, parent=5, start=1), run_of(3, parent=4, start=2))
    known: set[int] = set()
    for one in snapshot:
        assert one.parent_hash is None or one.parent_hash in known
        known.update(one.block_hashes)
    assert pool.tick(2, 2.0).changes == ()
    assert pool.tick(2, 4.0).changes == (run_of(8, parent=5, start=1),)


def test_a_late_client_is_told_from_then_on_what_all_are_told() -> None:
    """After the snapshot the live stream is the same, removal first; nothing of before is told twice."""
    pool = pool_with(math.inf, capacity=2)
    store(pool, 0.0, 1, 2)
    assert join(pool, 1) == (run_of(1, 2),)
    pool.tick(0, 0.0)
    store_told = prepare(pool, 1.0, 3)
    assert store_told.positions.tolist() == [0]
    reply = pool.boundary(0, 1.0)
    owner = reply.before.changes + reply.after.changes
    assert owner == (PoolChange(stored=False, block_hashes=(1,)), run_of(3))
    assert pool.tick(1, 1.0).changes == owner


def test_what_a_retired_client_stored_stays() -> None:
    """Its resident blocks remain, and nothing is announced for its going."""
    pool = pool_with(math.inf, math.inf)
    store(pool, 0.0, 1, 2)
    pool.tick(1, 0.0)
    pool.retire(0, 0.0)
    assert sorted(pool.contents()) == [1, 2]
    assert pool.tick(1, 0.0).changes == ()
    assert outcome(pool, 1, 2, client=1) is LookUpOutcome.HIT
    assert pool.clients() == [1]
    pool.check()


def test_loads_of_a_retired_client_are_cancelled_and_unpinned() -> None:
    """The blocks can be evicted at once, the load never finishes, and peers are told that something has ended."""
    pool = pool_with(math.inf, 0.1, capacity=2)
    store(pool, 0.0, 1, 2)
    number = load(pool, 1.0, 1, 2, client=1)
    pool.tick(0, 1.0)
    assert prepare(pool, 2.0, 3, 4).transfer is None
    pool.retire(1, 0.0)
    gone = pool.outbox[-1]
    assert isinstance(gone, ev.ClientRetired)
    assert (gone.worker, gone.canceled_loads, gone.rolled_back_stores) == (1, (number,), ())
    assert pool.untold() == [0]
    assert pool.tick(0, 2.0).progress
    pool.check()
    assert prepare(pool, 2.0, 3, 4).transfer is not None
    assert sorted(pool.contents()) == [3, 4]
    pool.advance(1000.0)
    assert not any(isinstance(event, ev.LoadFinished) for event in pool.outbox)


def test_prepared_stores_of_a_retired_client_are_rolled_back_and_waiters_wake() -> None:
    """A peer that waits for such a block is told of progress, and then misses; nothing was or is announced."""
    pool = pool_with(math.inf, math.inf)
    number = prepare(pool, 0.0, 1, 2, client=1).transfer
    assert outcome(pool, 1, 2, client=0) is LookUpOutcome.DEFERRED
    assert not pool.has_progress(0)
    pool.retire(1, 0.0)
    gone = pool.outbox[-1]
    assert isinstance(gone, ev.ClientRetired)
    assert (gone.canceled_loads, gone.rolled_back_stores) == ((), (number,))
    assert pool.has_progress(0)
    reply = pool.tick(0, 0.0)
    assert (reply.progress, reply.changes, reply.completions) == (True, (), ())
    assert outcome(pool, 1, 2, client=0) is LookUpOutcome.MISS
    assert pool.used_blocks == 0
    pool.check()


def test_submitted_stores_of_a_retired_client_still_land() -> None:
    """They become resident when their copy ends, peers are told, the retired one is not; a new client of that number
    inherits nothing."""
    pool = pool_with(math.inf, 0.5)
    store(pool, 0.0, 1, 2, client=1)  # until 4
    pool.retire(1, 0.0)
    assert outcome(pool, 1, 2, client=0) is LookUpOutcome.DEFERRED
    reply = pool.tick(0, 4.0)
    assert (reply.progress, reply.changes, reply.completions) == (True, (run_of(1, 2),), ())
    assert outcome(pool, 1, 2, client=0) is LookUpOutcome.HIT
    assert join(pool, 1) == (run_of(1, 2),)
    assert pool.tick(1, 5.0).completions == ()
    pool.check()


def test_a_peers_own_completions_survive_a_retirement() -> None:
    """What a peer has under way goes on and is delivered to it alone."""
    pool = pool_with(1.0, 1.0, math.inf)
    store(pool, 0.0, 1, 2, client=2)
    number = load(pool, 0.0, 1, 2, client=0)
    load(pool, 0.0, 1, 2, client=1)
    pool.retire(1, 0.0)
    assert pool.tick(0, 2.0).completions == (Completion(number, 0, True, 2.0),)
    assert {pins for _, pins in pool.contents().values()} == {0}


def test_a_cancelled_load_has_used_its_share_until_it_is_cancelled() -> None:
    """Pool 1, two loads of 2 MB from 0; one is cancelled at 1: the other had 0.5 until then, and ends at 2.5, not 2."""
    pool = pool_with(1.0, 1.0, math.inf, pool_rate=1.0)
    store(pool, 0.0, 1, 2, client=2)
    load(pool, 0.0, 1, 2, client=0)
    load(pool, 0.0, 1, 2, client=1)
    pool.serve(Retire(client=1), 1.0)
    assert pool.next_event_ms() == 2.5


def test_a_load_that_has_ended_by_then_is_finished_not_cancelled() -> None:
    """Its copy ended at 2 and nobody has looked since; at 5 the client retires: the load is over, not cancelled."""
    pool = pool_with(1.0, math.inf)
    store(pool, 0.0, 1, 2, client=1)
    load(pool, 0.0, 1, 2, client=0)
    pool.serve(Retire(client=0), 5.0)
    assert [e.ended_ms for e in pool.outbox if isinstance(e, ev.LoadFinished)] == [2.0]
