"""The host tier against an obvious model, private and shared, and field cases."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from g2sim.actors.host_pool import events as ev
from g2sim.actors.host_pool import pool as pool_module
from g2sim.actors.host_pool.messages import (
    Clear,
    Join,
    LookUp,
    LookUpOutcome,
    LookUpReply,
    PoolChange,
    PrepareStore,
    QueueLoad,
    StoreOutcome,
    StoreReply,
    Tick,
)
from g2sim.actors.host_pool.pool import HostPool
from g2sim.actors.host_pool.transfers import FairLinks, FifoLanes, Link, equal_share, max_min
from g2sim.actors.kv.blocks import BlockChain, ChainPart
from g2sim.actors.kv.numbers import NO_NUMBERS, BlockNumbers
from g2sim.bus.errors import InvariantViolation

MB = 1_000_000


def link(rate: float = math.inf, latency_ms: float = 0.0) -> Link:
    """A link of ``rate`` MB/ms both ways; a block is 1 MB."""
    return Link(d2h_bytes_per_ms=rate * MB, h2d_bytes_per_ms=rate * MB, latency_ms=latency_ms)


def chain(*hashes: int) -> BlockChain:
    return BlockChain(hashes, tuple(hash_ + 1000 for hash_ in hashes))


def shared_pool(capacity: int, *links: Link, rate: float = math.inf) -> HostPool:
    """A shared pool with one client a link."""
    pool = HostPool("g2", capacity, MB, FairLinks(rate * MB, rate * MB, max_min), shared=True)
    for client, own in enumerate(links):
        join(pool, client, own)
    return pool


def join(pool: HostPool, client: int, own: Link | None = None) -> tuple[PoolChange, ...]:
    return pool.join(
        Join(client=client, worker=client, role="aggregated", dp_rank=0, link=own or link(), actor=f"worker-{client}")
    )


def prepare(
    pool: HostPool, now_ms: float, keys: BlockChain, *, client: int = 0, request: int = 0, start: int = 0
) -> StoreReply:
    return pool.prepare_store(
        PrepareStore(client=client, request=request, chain=keys, start=start, stop=len(keys), busy_sources=NO_NUMBERS),
        now_ms,
    )


def store(pool: HostPool, now_ms: float, *hashes: int, client: int = 0) -> StoreReply:
    """A whole store in one instant: prepared, submitted, and landed if the link is unlimited."""
    reply = prepare(pool, now_ms, chain(*hashes), client=client)
    pool.boundary(client, now_ms)
    return reply


def answered(reply: LookUpReply) -> tuple[LookUpOutcome, int, bool]:
    """What a reply says of the blocks asked for."""
    return reply.outcome, reply.matched, reply.store_landed


def look_up(pool: HostPool, *hashes: int, client: int = 0, base: int = 0) -> LookUpReply:
    return pool.look_up(LookUp(client=client, chain=chain(*hashes), base_blocks=base, latest_store=None, loading=()))


def load(pool: HostPool, now_ms: float, *hashes: int, client: int = 0) -> int:
    return pool.queue_load(
        QueueLoad(client=client, request=9, chain=chain(*hashes), start=0, stop=len(hashes), from_ms=now_ms), now_ms
    )


def pins(pool: HostPool) -> dict[int, int]:
    return {hash_: count for hash_, (_, count) in pool.contents().items() if count}


def eviction_order(pool: HostPool) -> list[int]:
    return pool.eviction_order()


def snapshot(pool: HostPool) -> tuple[Any, ...]:
    """All that a caller can see, the order of eviction included."""
    return pool.contents(), eviction_order(pool), pool.transfers_under_way(), pool.untold()


# -- refused


def test_a_client_joins_once() -> None:
    """A second join under one number is an error that names it."""
    pool = shared_pool(4, link())
    with pytest.raises(InvariantViolation, match="client 0 joins twice"):
        join(pool, 0)


@pytest.mark.parametrize("hashes", [(7,), (1, 7)])
def test_what_is_not_resident_cannot_be_loaded(hashes: tuple[int, ...]) -> None:
    """A load of an unknown block is an error: a look-up must have found it resident."""
    pool = shared_pool(4, link())
    store(pool, 0.0, 1)
    with pytest.raises(InvariantViolation, match="not resident"):
        load(pool, 0.0, *hashes)


def test_a_pool_answers_only_its_own_messages() -> None:
    """Anything that is not one of the pool's messages is an error that names its type."""
    with pytest.raises(InvariantViolation, match="no answer to a str"):
        shared_pool(4).serve("store, please", 0.0)


def test_a_refused_store_is_not_taken_for_stored() -> None:
    """F33: G2=4, all pinned by a load; 6 blocks are refused as never fitting, not announced, and miss later."""
    pool = shared_pool(4, link(), link(0.1))
    store(pool, 0.0, 1, 2, 3, 4)
    load(pool, 1.0, 1, 2, 3, 4, client=1)
    pool.tick(0, 1.0)
    pool.outbox.clear()
    before = snapshot(pool)
    assert prepare(pool, 2.0, chain(11, 12, 13, 14, 15, 16)) == StoreReply(StoreOutcome.RETRY, None, NO_NUMBERS)
    assert snapshot(pool) == before
    (put_off,) = pool.outbox
    assert isinstance(put_off, ev.StorePutOff)
    assert put_off.never_fits
    assert put_off.block_hashes == (11, 12, 13, 14, 15, 16)
    assert pool.tick(0, 2.0).changes == ()
    assert look_up(pool, 11, 12, 13, 14, 15, 16).outcome is LookUpOutcome.MISS


@pytest.mark.parametrize("pinned", [3, 14])
def test_eviction_passes_over_pinned_blocks(pinned: int) -> None:
    """F35: G2=16 full. With 3 of the 10 oldest pinned the 10 oldest unpinned go; with 14 pinned none does."""
    pool = shared_pool(16, link(), link(0.001))
    for hash_ in range(16):
        store(pool, float(hash_), hash_)
    load(pool, 20.0, *range(pinned), client=1)
    before = pool.contents()
    reply = prepare(pool, 21.0, chain(*range(100, 110)))
    pool.check()
    if pinned == 3:
        assert reply.outcome is StoreOutcome.PREPARED
        assert sorted(pool.contents()) == [0, 1, 2, 13, 14, 15, *range(100, 110)]
    else:
        assert reply.outcome is StoreOutcome.RETRY
        assert pool.contents() == before
    assert pins(pool) == dict.fromkeys(range(pinned), 1)
    assert pool.used_blocks == 16


def test_room_for_blocks_on_their_way_is_taken() -> None:
    """F47: G2=8 with 6 pinned; of two stores of 2 blocks in one tick, 20 ms each, one is taken and one waits."""
    pool = shared_pool(8, link(0.1), link(0.1), link(0.01))
    store(pool, 0.0, 1, 2, 3, 4, 5, 6, client=0)
    pool.advance(60.0)
    load(pool, 60.0, 1, 2, 3, 4, 5, 6, client=2)
    first = prepare(pool, 61.0, chain(11, 12), client=0)
    second = prepare(pool, 61.0, chain(21, 22), client=1)
    assert (first.outcome, second.outcome) == (StoreOutcome.PREPARED, StoreOutcome.RETRY)
    assert (pool.used_blocks, pool.resident_blocks) == (8, 6)
    pool.boundary(0, 61.0)
    assert pool.next_event_ms() == 81.0
    assert prepare(pool, 70.0, chain(21, 22), client=1).outcome is StoreOutcome.RETRY
    assert prepare(pool, 81.0, chain(21, 22), client=1).outcome is StoreOutcome.PREPARED  # 11 and 12 are old enough
    assert pool.used_blocks == 8


# -- other field cases


def test_a_small_tier_goes_on_taking_stores() -> None:
    """F30: 40 distinct 8-block prompts through G2=16: each is stored, the oldest give way, never more than 16."""
    pool = shared_pool(16, link())
    resident: set[int] = set()
    stored = 0
    for prompt in range(40):
        hashes = range(prompt * 8, prompt * 8 + 8)
        prepare(pool, float(prompt), chain(*hashes))
        reply = pool.boundary(0, float(prompt))
        for change in (*reply.before.changes, *reply.after.changes):
            if change.stored:
                resident.update(change.block_hashes)
                stored += len(change.block_hashes)
            else:
                resident.difference_update(change.block_hashes)
            assert len(resident) <= 16
        pool.check()
    assert stored == 320
    assert resident == set(pool.contents()) == set(range(38 * 8, 40 * 8))


def test_what_stores_brought_is_forgotten_with_their_last_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """G2=5, and 0 stays as it is looked up each time: memory does not grow, and who joins late is told of 0 as well."""
    monkeypatch.setattr(pool_module, "_LEAST_RUN_BLOCKS", 5)
    pool = shared_pool(5, link())
    store(pool, 0.0, 0)
    for prompt in range(1, 100):
        store(pool, float(prompt), 10 * prompt, 10 * prompt + 1)
        look_up(pool, 0)
        pool.check()
        assert len(pool._book._runs) <= 6
    told = [change.block_hashes for change in join(pool, 1)]
    assert told == [(0,), (980,), (990,), (981,), (991,)]


def test_numbers_of_what_the_pool_holds_are_given_to_nobody_else() -> None:
    """Resident blocks, and those that a clear has left to a copy under way, though nobody else knows their chains."""
    numbering = BlockNumbers(sweep_at=0)
    pool = HostPool("g2", 8, MB, FairLinks(math.inf, math.inf, max_min), shared=True, numbering=numbering)
    for client, own in enumerate((link(), link(0.001))):
        join(pool, client, own)
    store(pool, 0.0, 1, 2, client=1)  # until 2000
    pool.serve(Clear(client=0), 1.0)
    store(pool, 1.0, 5, 6)
    look_up(pool, 99)
    for stranger in range(1000, 2000, 50):
        numbering.numbers(range(stranger, stranger + 50))
        pool.check()
        assert pool.contents() == {5: (True, 0), 6: (True, 0)}
    assert pool.used_blocks == 4


def test_two_loads_of_the_same_blocks_count_their_pins() -> None:
    """F34: loads over [0,40] and [20,60]: pins 1, 2, 1, 0 at 10, 30, 50, 61; evictable at 61 and not at 50."""
    pool = shared_pool(4, link(0.1), link(0.1), link())
    store(pool, 0.0, 1, 2, 3, 4, client=2)
    load(pool, 0.0, 1, 2, 3, 4, client=0)
    seen = []
    for now_ms in (10.0, 20.0, 30.0, 50.0, 61.0):
        pool.advance(now_ms)
        pool.check()
        seen.append({count for _, count in pool.contents().values()})
        if now_ms == 20.0:
            load(pool, 20.0, 1, 2, 3, 4, client=1)
        if now_ms == 50.0:
            assert prepare(pool, now_ms, chain(11), client=2).outcome is StoreOutcome.RETRY
    assert seen == [{1}, {1}, {2}, {1}, {0}]
    assert [e.ended_ms for e in pool.outbox if isinstance(e, ev.LoadFinished)] == [40.0, 60.0]
    assert prepare(pool, 61.0, chain(11, 12, 13, 14), client=2).outcome is StoreOutcome.PREPARED
    assert sorted(pool.contents()) == [11, 12, 13, 14]


def test_a_tail_that_was_stored_anew_makes_way_before_its_head_once_the_chain_is_looked_up() -> None:
    """F41: G2=4. [8,9] costs [1,2,3,4] its tail, the tail comes back for [8,9], then [10,11] takes the tail again.

    Each request looks up before it stores, as a rank does, and the chain is looked up once more after its tail has
    landed: a landing cohort is younger than its head until then (the reference's rule, test below).
    """
    pool = shared_pool(4, link())
    for now_ms, hashes in enumerate([(1, 2, 3, 4), (1, 2, 3, 4), (8, 9)]):
        look_up(pool, *hashes)
        store(pool, float(now_ms), *hashes)
    assert sorted(pool.contents()) == [1, 2, 8, 9]
    look_up(pool, 1, 2, 3, 4)
    assert store(pool, 3.0, 1, 2, 3, 4).positions.tolist() == [2, 3]
    assert sorted(pool.contents()) == [1, 2, 3, 4]
    look_up(pool, 1, 2, 3, 4)
    store(pool, 4.0, 10, 11)
    assert sorted(pool.contents()) == [1, 2, 10, 11]


def test_until_it_is_looked_up_a_landing_cohort_is_younger_than_its_head() -> None:
    """Where F41 and the reference part: the head is touched when the store is prepared, the tail is new at landing."""
    pool = shared_pool(4, link())
    store(pool, 0.0, 1, 2)
    store(pool, 1.0, 1, 2, 3, 4)
    store(pool, 2.0, 10, 11)
    assert sorted(pool.contents()) == [3, 4, 10, 11]


def test_the_removal_that_makes_room_is_announced_first() -> None:
    """F10: G2=4 holds [1,2,3,4]; storing [5,6] tells every client: removed two, then stored two; never above 4."""
    pool = shared_pool(4, link(), link())
    store(pool, 0.0, 1, 2, 3, 4)
    for client in (0, 1):
        pool.tick(client, 0.0)
    prepare(pool, 1.0, chain(5, 6))
    told = pool.tick(1, 1.0).changes
    pool.boundary(0, 1.0)
    told += pool.tick(1, 1.0).changes
    assert [(change.stored, change.block_hashes) for change in told] == [(False, (1, 2)), (True, (5, 6))]


def test_of_copies_that_end_together_stores_take_effect_first() -> None:
    """Whatever their numbers: the load is the older transfer."""
    pool = shared_pool(16, link(0.1), link(0.1), link())
    store(pool, 0.0, 1, 2, 3, 4, client=2)
    load(pool, 0.0, 1, 2, 3, 4, client=0)
    prepare(pool, 0.0, chain(11, 12, 13, 14), client=1)
    pool.boundary(1, 0.0)
    pool.outbox.clear()
    pool.advance(40.0)
    assert [type(event) for event in pool.outbox] == [ev.StoreLanded, ev.LoadFinished]
    assert [event.ended_ms for event in pool.outbox] == [40.0, 40.0]


def test_a_client_whose_process_is_gone_leaves_no_copy_under_way_and_no_pin() -> None:
    """One store under way and one prepared are rolled back, a load gives its pins back; what is resident stays."""
    pool = shared_pool(8, link(1.0), link(1.0), rate=1.0)
    store(pool, 0.0, 1, 2)
    pool.tick(0, 10.0)
    load(pool, 10.0, 1)
    prepare(pool, 10.0, chain(3))
    pool.submit_prepared(0, 10.0)
    prepare(pool, 10.0, chain(4))
    pool.tick(1, 10.0)
    pool.outbox.clear()
    pool.retire(0, 10.5, abrupt=True)
    gone = [event for event in pool.outbox if isinstance(event, ev.ClientRetired)]
    assert [(len(one.canceled_loads), len(one.rolled_back_stores)) for one in gone] == [(1, 2)]
    assert pool.contents() == {1: (True, 0), 2: (True, 0)}
    assert (pool.next_event_ms(), pool.transfers_under_way(), pool.untold()) == (None, [], [1])
    assert pool.tick(1, 10.5).progress
    pool.check()
    assert [change.block_hashes for change in join(pool, 0)] == [(1, 2)]


def test_a_private_tier_that_is_emptied_has_free_lanes_and_a_member_less() -> None:
    pool = HostPool("g2", 4, MB, FifoLanes(), shared=False)
    join(pool, 0, link(1.0))
    store(pool, 0.0, 1, 2)
    pool.tick(0, 2.0)
    load(pool, 2.0, 1, 2)
    with pytest.raises(InvariantViolation, match="while it has clients"):
        pool.empty()
    pool.retire(0, 2.5, abrupt=True)
    pool.outbox.clear()
    pool.empty()
    assert [event.block_hashes for event in pool.outbox] == [(1, 2)]
    assert (pool.contents(), pool.used_blocks, pool.next_event_ms()) == ({}, 0, None)
    pool.empty()
    assert len(pool.outbox) == 1
    assert join(pool, 0, link(1.0)) == ()
    store(pool, 3.0, 5)
    assert pool.next_event_ms() == 4.0


def test_ties_in_a_cohort_go_by_hash() -> None:
    """A cohort has one age: of blocks that landed together the smallest hash goes first, wherever it stands."""
    pool = shared_pool(4, link())
    store(pool, 0.0, 30, 10, 40, 20)
    store(pool, 1.0, 1, 2)
    assert sorted(pool.contents()) == [1, 2, 30, 40]


def test_a_look_up_waits_for_a_pending_block_even_behind_resident_ones() -> None:
    """One pending key makes the whole look-up wait; the resident keys before it are made young all the same."""
    pool = shared_pool(8, link(0.1), link())
    store(pool, 0.0, 5, 6, client=1)
    store(pool, 0.0, 7, client=1)
    prepare(pool, 1.0, chain(5, 6, 8), client=0)
    assert look_up(pool, 5, 6, 8, client=1).outcome is LookUpOutcome.DEFERRED
    assert eviction_order(pool) == [7, 6, 5]
    assert answered(look_up(pool, 5, 6, 7, client=1)) == (LookUpOutcome.HIT, 3, True)
    assert answered(look_up(pool, 5, 9, 7, client=1)) == (LookUpOutcome.HIT, 1, True)
    assert answered(look_up(pool, 9, 5, client=1)) == (LookUpOutcome.MISS, 0, True)


def test_a_store_of_the_requests_own_defers_without_touching() -> None:
    """While the request's latest store is under way its look-up is put off and changes no age."""
    pool = shared_pool(8, link(), link(0.1))
    store(pool, 0.0, 1)
    store(pool, 1.0, 2)
    own = prepare(pool, 2.0, chain(3), client=1).transfer
    before = eviction_order(pool)
    message = LookUp(client=1, chain=chain(1), base_blocks=0, latest_store=own, loading=())
    assert answered(pool.look_up(message)) == (LookUpOutcome.DEFERRED, 0, False)
    assert eviction_order(pool) == before


# -- the model


ENDS = (ev.StoreLanded, ev.StoreDropped, ev.LoadFinished)


class Held:
    """One block in the model. ``age``: (epoch, hash), compared as it stands."""

    def __init__(self, hash_: int) -> None:
        self.hash = hash_
        self.resident = False
        self.pins = 0
        self.epoch = -1

    @property
    def age(self) -> tuple[int, int]:
        return self.epoch, self.hash

    @property
    def evictable(self) -> bool:
        return self.resident and self.pins == 0


CHAINS = (
    chain(50, 40, 30, 20),
    chain(50, 40, 31, 60),
    chain(50, 41, 70, 10, 80),
    chain(90, 91),
    chain(15, 25, 35, 45, 55, 65),
)
"""Chains with common heads, hashes in no particular order."""

PARTS = st.builds(
    lambda keys, start, blocks: ChainPart(keys, min(start, len(keys)), min(start + blocks, len(keys))),
    st.sampled_from(CHAINS),
    st.integers(0, 3),
    st.integers(0, 2),
)

PARENTS = {
    hash_: (keys.sequence_hashes[at - 1] if at else None, at)
    for keys in CHAINS
    for at, hash_ in enumerate(keys.sequence_hashes)
}


class HostPoolMachine(RuleBasedStateMachine):
    """Blocks are a dict, ages are numbers, victims are sorted for.

    When a transfer ends is the transport's business (test_transfers.py): the model takes that from the pool's events,
    and works out itself what it means.
    """

    transports = staticmethod(lambda: FifoLanes())
    shared = False
    sweeps = False

    def chain_of(self, keys: BlockChain) -> BlockChain:
        """What a message brings. Where numbers are swept it is a new one, as old ones keep their numbers in use."""
        if not self.sweeps:
            return keys
        self.number_strangers(20)
        return BlockChain(keys.sequence_hashes, keys.tokens_hashes)

    def number_strangers(self, blocks: int) -> None:
        """Nobody holds them for long, so that the numbers of blocks that have left the pool are given to others."""
        assert self.numbering is not None
        self.numbering.numbers(range(self.strangers, self.strangers + blocks))
        self.strangers += blocks

    @initialize(capacity=st.integers(min_value=1, max_value=9))
    def start(self, capacity: int) -> None:
        self.capacity = capacity
        self.numbering = BlockNumbers(sweep_at=0) if self.sweeps else None
        self.pool = HostPool("g2", capacity, MB, self.transports(), shared=self.shared, numbering=self.numbering)
        self.strangers = 1000
        self.now_ms = 0.0
        self.blocks: dict[int, Held] = {}
        self.epoch = 0
        self.transfers: dict[int, tuple[int, bool, tuple[int, ...]]] = {}  # client, is_load, hashes
        self.cleared: dict[int, list[Held]] = {}  # transfer under way at a clear -> its blocks
        self.freed: list[tuple[int, ...]] = []
        self.next_transfer = 0
        self.prepared: dict[int, list[int]] = {}
        self.untold: dict[int, list[tuple[bool, tuple[int, ...]]]] = {}
        self.done: dict[int, list[tuple[int, bool]]] = {}
        self.behind: dict[int, bool] = {}
        self.next_client = 0
        self.asked: list[tuple[LookUp, LookUpReply]] = []
        self.join()

    @precondition(lambda self: self.sweeps)
    @rule(blocks=st.sampled_from([1, 3, 20, 3000]))
    def others_use_the_numbering(self, blocks: int) -> None:
        self.number_strangers(blocks)

    # what it means

    def new_epoch(self) -> int:
        self.epoch += 1
        return self.epoch

    def touch(self, keys: Sequence[int]) -> None:
        for hash_ in reversed(keys):
            held = self.blocks.get(hash_)
            if held is not None and held.evictable:
                held.epoch = self.new_epoch()

    def victims(self, needed: int, spared: Sequence[int]) -> list[Held] | None:
        oldest = sorted((h for h in self.blocks.values() if h.evictable and h.hash not in spared), key=lambda h: h.age)
        return oldest[: max(0, needed)] if len(oldest) >= needed else None

    @property
    def used(self) -> int:
        return len(self.blocks) + len({id(held) for kept in self.cleared.values() for held in kept})

    def end_load(self, number: int) -> None:
        _, _, hashes = self.transfers.pop(number)
        if number not in self.cleared:
            self.unpin(hashes)
            return
        kept = self.cleared.pop(number)
        still = {id(held) for others in self.cleared.values() for held in others}
        free = tuple(held.hash for held in kept if id(held) not in still)
        if free:
            self.freed.append(free)

    def unpin(self, hashes: Sequence[int]) -> None:
        epoch = self.new_epoch()
        for hash_ in hashes:
            held = self.blocks[hash_]
            held.pins -= 1
            if held.pins == 0:
                held.epoch = epoch

    def announce(self, stored: bool, hashes: tuple[int, ...]) -> None:
        for told in self.untold.values():
            told.append((stored, hashes))

    def hear(self) -> None:
        """Take the ends of transfers from the pool's events."""
        last = (-math.inf, -1, -1)
        for event in self.pool.outbox:
            if isinstance(event, ev.ClearedBlocksFreed):
                assert self.freed.pop(0) == event.block_hashes
            if not isinstance(event, ENDS):
                continue
            client, is_load, hashes = self.transfers[event.transfer]
            order = (event.ended_ms, int(is_load), event.transfer)
            assert last < order
            assert event.ended_ms <= self.now_ms
            last = order
            if is_load:
                self.end_load(event.transfer)
            elif event.transfer in self.cleared:
                assert isinstance(event, ev.StoreDropped)
                del self.transfers[event.transfer], self.cleared[event.transfer]
            else:
                assert isinstance(event, ev.StoreLanded)
                del self.transfers[event.transfer]
                epoch = self.new_epoch()
                for hash_ in hashes:
                    self.blocks[hash_].resident = True
                    self.blocks[hash_].epoch = epoch
                for run in runs(hashes):
                    self.announce(True, run)
            self.behind = dict.fromkeys(self.behind, True)
            if client in self.done:
                self.done[client].append((event.transfer, is_load))
        assert not self.freed
        self.pool.outbox.clear()

    def client(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.prepared)))

    def expect_tick(self, client: int, replies: Sequence[Any]) -> None:
        told, self.untold[client] = self.untold[client], []
        done, self.done[client] = self.done[client], []
        behind, self.behind[client] = self.behind[client], False
        changes = [(c.stored, c.block_hashes) for reply in replies for c in reply.changes]
        if told and told[0] != changes[0]:  # a clear removes in an order that the model does not know
            assert (told[0][0], changes[0][0]) == (False, False)
            told[0] = (False, tuple(sorted(told[0][1])))
            changes[0] = (False, tuple(sorted(changes[0][1])))
        assert changes == told
        assert [(c.transfer, c.is_load) for reply in replies for c in reply.completions] == done
        assert any(reply.progress for reply in replies) is behind
        for reply in replies:
            for change in reply.changes:
                if change.stored:
                    assert (change.parent_hash, change.start_position) == PARENTS[change.block_hashes[0]]
                    assert change.tokens_hashes == tuple(hash_ + 1000 for hash_ in change.block_hashes)

    # commands

    @precondition(lambda self: self.shared and len(self.prepared) < 3)
    @rule()
    def join(self) -> None:
        client = self.next_client
        self.next_client += 1
        told = join(self.pool, client, link((1.0, 0.4, math.inf)[client % 3], (0.0, 0.25)[client % 2]))
        resident = sorted((PARENTS[h.hash][1], h.hash) for h in self.blocks.values() if h.resident)
        assert [change.block_hashes for change in told] == runs([hash_ for _, hash_ in resident])
        self.prepared[client], self.untold[client], self.done[client] = [], [], []
        self.behind[client] = False

    @precondition(lambda self: self.shared and len(self.prepared) > 1)
    @rule(data=st.data(), abrupt=st.booleans())
    def retire(self, data: st.DataObject, abrupt: bool) -> None:
        client = self.client(data)
        self.pool.outbox.clear()
        self.pool.retire(client, 0.0, abrupt=abrupt)
        loads = [number for number, (owner, is_load, _) in self.transfers.items() if owner == client and is_load]
        for number in loads:
            self.end_load(number)
        freed = [event.block_hashes for event in self.pool.outbox if isinstance(event, ev.ClearedBlocksFreed)]
        assert self.freed == freed
        self.freed = []
        stores = self.prepared.pop(client)
        if abrupt:
            stores = [
                number for number, (owner, is_load, _) in self.transfers.items() if owner == client and not is_load
            ]
        for number in stores:
            for hash_ in self.transfers.pop(number)[2]:
                if number not in self.cleared:
                    del self.blocks[hash_]
            self.cleared.pop(number, None)
        del self.untold[client], self.done[client], self.behind[client]
        if loads or stores:
            self.behind = dict.fromkeys(self.behind, True)
        gone = next(event for event in self.pool.outbox if isinstance(event, ev.ClientRetired))
        assert (gone.canceled_loads, gone.rolled_back_stores) == (tuple(loads), tuple(stores))

    @rule(data=st.data(), keys=st.sampled_from(CHAINS))
    def look_up_and_load(self, data: st.DataObject, keys: BlockChain) -> None:
        client = self.client(data)
        hashes = keys.sequence_hashes
        base = data.draw(st.integers(min_value=0, max_value=len(keys)))
        own = data.draw(st.sampled_from([None, *range(self.next_transfer)]))
        parts = data.draw(st.lists(PARTS, max_size=2))
        loading = tuple(parts)
        message = LookUp(client=client, chain=keys, base_blocks=base, latest_store=own, loading=loading)
        if self.asked and data.draw(st.booleans()):
            message, before = data.draw(st.sampled_from(self.asked))
            if message.client not in self.prepared:
                return
            client, keys, base, own, loading = (
                message.client,
                message.chain,
                message.base_blocks,
                message.latest_store,
                message.loading,
            )
            hashes = keys.sequence_hashes
            message = message.after(before)
        sent_loading = tuple([ChainPart(self.chain_of(part.chain), part.start, part.stop) for part in loading])
        sent = LookUp(
            client=client,
            chain=self.chain_of(keys),
            base_blocks=base,
            latest_store=own,
            loading=sent_loading,
            again=message.again,
        )
        reply = self.pool.look_up(sent)
        if reply.outcome is not LookUpOutcome.DEFERRED:
            self.asked.append((message, reply))
        if own in self.transfers:
            assert answered(reply) == (LookUpOutcome.DEFERRED, 0, False)
            return
        is_loading = {hash_ for part in loading for hash_ in part.chain.sequence_hashes[part.start : part.stop]}
        known = []
        for hash_ in hashes[base:]:
            if hash_ not in self.blocks:
                break
            known.append(hash_)
        self.touch(hashes)
        if not known:
            assert answered(reply) == (LookUpOutcome.MISS, 0, True)
        elif any(not self.blocks[hash_].resident or hash_ in is_loading for hash_ in known):
            assert answered(reply) == (LookUpOutcome.DEFERRED, 0, True)
        else:
            assert answered(reply) == (LookUpOutcome.HIT, len(known), True)
            if data.draw(st.booleans()):
                self.load(client, keys, base, base + len(known))

    def load(self, client: int, keys: BlockChain, start: int, stop: int) -> None:
        hashes = keys.sequence_hashes[start:stop]
        message = QueueLoad(
            client=client, request=1, chain=self.chain_of(keys), start=start, stop=stop, from_ms=self.now_ms
        )
        number = self.pool.queue_load(message, self.now_ms)
        self.hear()  # what ended before the load began
        assert number == self.next_transfer
        self.next_transfer += 1
        for hash_ in hashes:
            self.blocks[hash_].pins += 1
        self.transfers[number] = (client, True, hashes)

    @rule(data=st.data(), keys=st.sampled_from(CHAINS))
    def prepare(self, data: st.DataObject, keys: BlockChain) -> None:
        client = self.client(data)
        stop = data.draw(st.integers(min_value=1, max_value=len(keys)))
        start = data.draw(st.integers(min_value=0, max_value=stop - 1))
        busy = data.draw(st.lists(st.integers(min_value=start, max_value=stop - 1), max_size=2, unique=True))
        before = snapshot(self.pool)
        missing = [at for at in range(start, stop) if keys.sequence_hashes[at] not in self.blocks]
        message = PrepareStore(
            client=client,
            request=1,
            chain=self.chain_of(keys),
            start=start,
            stop=stop,
            busy_sources=np.array(busy, np.int64),
        )
        reply = self.pool.prepare_store(message, self.now_ms)
        if not missing:
            assert reply == StoreReply(StoreOutcome.PRESENT, None, NO_NUMBERS)
            assert snapshot(self.pool) == before
            return
        if set(busy) & set(missing):
            assert reply == StoreReply(StoreOutcome.NOT_READY, None, NO_NUMBERS)
            assert snapshot(self.pool) == before
            return
        ended = any(isinstance(event, ENDS) for event in self.pool.outbox)
        self.hear()
        wanted = keys.sequence_hashes[start:stop]
        victims = self.victims(len(missing) - (self.capacity - self.used), wanted)
        if victims is None:
            assert reply == StoreReply(StoreOutcome.RETRY, None, NO_NUMBERS)
            assert ended or snapshot(self.pool) == before
            return
        assert reply == StoreReply(StoreOutcome.PREPARED, self.next_transfer, np.array(missing))
        for held in victims:
            del self.blocks[held.hash]
        if victims:
            self.announce(False, tuple(held.hash for held in victims))
        hashes = tuple(keys.sequence_hashes[at] for at in missing)
        for hash_ in hashes:
            self.blocks[hash_] = Held(hash_)
        self.transfers[self.next_transfer] = (client, False, hashes)
        self.prepared[client].append(self.next_transfer)
        self.next_transfer += 1
        self.touch(keys.sequence_hashes)

    @rule(data=st.data())
    def clear(self, data: st.DataObject) -> None:
        message = Clear(client=self.client(data))
        dropped = self.pool.serve(message, self.now_ms)
        cleared = [event for event in self.pool.outbox if isinstance(event, ev.HostPoolCleared)]
        self.hear()
        unused = sorted((held for held in self.blocks.values() if held.evictable), key=lambda held: held.age)
        loading = [held for held in self.blocks.values() if held.resident and held.pins]
        assert dropped == len(unused)
        assert sum(len(event.block_hashes) + len(event.loading_hashes) for event in cleared) == len(unused + loading)
        for number, (_, _, hashes) in self.transfers.items():
            if number not in self.cleared:
                self.cleared[number] = [self.blocks[hash_] for hash_ in hashes]
        for client, told in self.untold.items():
            known = {held.hash for held in (*unused, *loading)}
            for stored, hashes in reversed(told):
                known = known - set(hashes) if stored else known | set(hashes)
            self.untold[client] = [(False, tuple(sorted(known)))] if known else []
        self.blocks = {}

    @rule(data=st.data())
    def boundary(self, data: st.DataObject) -> None:
        client = self.client(data)
        reply = self.pool.boundary(client, self.now_ms)
        self.hear()
        assert [number for number, _ in reply.submitted] == self.prepared[client]
        self.prepared[client] = []
        self.expect_tick(client, [reply.before, reply.after])

    @rule(data=st.data())
    def tick(self, data: st.DataObject) -> None:
        client = self.client(data)
        reply = self.pool.serve(Tick(client), self.now_ms)
        self.hear()
        self.expect_tick(client, [reply])

    @rule(step_ms=st.sampled_from([0.5, 1.0, 2.5]))
    def wait(self, step_ms: float) -> None:
        self.now_ms += step_ms

    @precondition(lambda self: self.pool.next_event_ms() is not None)
    @rule()
    def wait_for_the_next_event(self) -> None:
        next_ms = self.pool.next_event_ms()
        assert next_ms is not None
        self.now_ms = max(self.now_ms, next_ms)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        assert self.used <= self.capacity
        assert self.pool.contents() == {h.hash: (h.resident, h.pins) for h in self.blocks.values()}
        assert self.pool.used_blocks == self.used
        assert self.pool.resident_blocks == sum(h.resident for h in self.blocks.values())
        oldest = sorted((h for h in self.blocks.values() if h.evictable), key=lambda h: h.age)
        assert eviction_order(self.pool) == [held.hash for held in oldest]
        assert self.pool.untold() == [c for c in self.prepared if self.behind[c] or self.untold[c]]
        assert self.pool.clients() == list(self.prepared)
        for client in self.prepared:
            moving = any(owner == client for owner, _, _ in self.transfers.values())
            assert self.pool.has_work(client) is (moving or bool(self.done[client]))


def runs(hashes: Sequence[int]) -> list[tuple[int, ...]]:
    """Cut where a block's parent is not the one before it."""
    out: list[list[int]] = []
    for hash_ in hashes:
        if out and PARENTS[hash_][0] == out[-1][-1]:
            out[-1].append(hash_)
        else:
            out.append([hash_])
    return [tuple(run) for run in out]


class _Equal(HostPoolMachine):
    transports = staticmethod(lambda: FairLinks(1.5 * MB, 1.5 * MB, equal_share))
    shared = True


class _MaxMin(HostPoolMachine):
    transports = staticmethod(lambda: FairLinks(1.5 * MB, 1.5 * MB, max_min))
    shared = True


class _Sweeping(_MaxMin):
    sweeps = True


PATIENT = settings(max_examples=80, stateful_step_count=40, deadline=None)


class TestPrivatePoolAgainstItsModel(HostPoolMachine.TestCase):  # type: ignore[name-defined,misc]
    """Any sequence of commands leaves a private pool and the model with the same blocks, ages, pins and news."""

    settings: Any = PATIENT


class TestEqualSharePoolAgainstItsModel(_Equal.TestCase):  # type: ignore[name-defined,misc]
    """The same for a shared pool with equal shares, with clients that come and go."""

    settings: Any = PATIENT


class TestMaxMinPoolAgainstItsModel(_MaxMin.TestCase):  # type: ignore[name-defined,misc]
    """The same for a shared pool with max-min shares."""

    settings: Any = PATIENT


class TestPoolThatSharesANumberingAgainstItsModel(_Sweeping.TestCase):  # type: ignore[name-defined,misc]
    """The same where numbers are given again as soon as nobody uses them, and grow beyond the pool's arrays."""

    settings: Any = PATIENT
