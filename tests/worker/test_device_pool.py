"""The GPU KV cache of one rank against an obvious model, and field cases."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from g2sim.actors.kv.numbers import BlockNumbers, Numbers
from g2sim.actors.worker.device_pool import DevicePool, EvictionOrder, Reservation
from g2sim.bus.errors import InvariantViolation

HASHES = range(100, 106)


class ListPool:
    """A device pool that takes and gives lists, and hashes in place of their numbers.

    Its numbers are not in the order of hashes, and nobody keeps them but the pool, so that they are given again.
    """

    def __init__(self, capacity: int) -> None:
        self.numbering = BlockNumbers(sweep_at=0)
        self.real = DevicePool(capacity, self.numbering)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def numbers(self, hashes: list[int]) -> Numbers:
        numbers = array([0] * len(hashes))
        self.numbering.keep(numbers)
        for place, hash_ in enumerate(hashes):
            numbers[place] = self.numbering.numbers([hash_])[0]
        return numbers

    def hashes(self, numbers: Numbers) -> list[int]:
        return self.numbering.hashes(numbers)

    def lookup(self, hash_: int) -> int | None:
        resident = self.real.resident_numbers()
        places = [place for place, one in enumerate(self.hashes(resident)) if one == hash_]
        assert all(self.real.holds(int(resident[place])) for place in places)
        return int(self.real.primaries(resident[places])[0]) if places else None

    def resident_hashes(self) -> set[int]:
        return set(self.hashes(self.real.resident_numbers()))

    def primaries(self, hashes: list[int]) -> list[int]:
        return self.real.primaries(self.numbers(hashes)).tolist()

    def match(self, hashes: list[int]) -> tuple[int, int]:
        return self.real.match(self.numbers(hashes))

    def blocks_before_eviction_of(self, hashes: list[int]) -> int:
        return self.real.blocks_before_eviction_of(self.numbers(hashes))

    def reserve(self, hits: list[int], fresh: int) -> tuple[Reservation, list[int]] | None:
        got = self.real.reserve(array(hits), fresh)
        return None if got is None else (got[0], self.hashes(got[1]))

    def allocate(self, hits: list[int], fresh: int) -> tuple[list[int], list[int]] | None:
        got = self.real.allocate(array(hits), fresh)
        return None if got is None else (got[0].tolist(), self.hashes(got[1]))

    def allocate_one(self) -> tuple[list[int], list[int]]:
        block, number = self.real.allocate_one()
        return [block], [] if number < 0 else [self.numbering.hash_of(number)]

    def activate_hits(self, reservation: Reservation) -> list[int]:
        return self.real.activate_hits(reservation).tolist()

    def take_private(self, reservation: Reservation, blocks: int) -> list[int]:
        return self.real.take_private(reservation, blocks).tolist()

    def cache(self, blocks: list[int], hashes: list[int]) -> list[int]:
        return self.real.cache(array(blocks), self.numbers(hashes)).tolist()

    def cache_one(self, block: int, hash_: int) -> bool:
        return self.real.cache_one(block, int(self.numbers([hash_])[0]))

    def release(self, blocks: list[int]) -> None:
        self.real.release(array(blocks))

    def clear(self) -> tuple[list[int], list[int]]:
        removed, in_use = self.real.clear()
        return self.hashes(removed), self.hashes(in_use)

    def copied_out(self, blocks: list[int]) -> list[int]:
        return self.real.copied_out(array(blocks)).tolist()

    def still_copied_out(self, blocks: Any) -> list[int]:
        return self.real.still_copied_out(array(blocks))

    def begin_copy_out(self, blocks: list[int], transfer: int, *, hold: bool) -> None:
        self.real.begin_copy_out(array(blocks), transfer, hold=hold)


def array(blocks: Any) -> Numbers:
    return np.array(blocks, np.int64)


def cached_chain(pool: ListPool, hashes: list[int]) -> list[int]:
    """A request's blocks, taken and cached in order."""
    reserved = pool.reserve([], len(hashes))
    assert reserved is not None
    blocks = pool.take_private(reserved[0], len(hashes))
    pool.cache(blocks, hashes)
    return blocks


def release_request(pool: ListPool, blocks: list[int]) -> None:
    """As a rank does it: from the last block to the first."""
    for block in reversed(blocks):
        pool.release([block])


def primaries(pool: ListPool, hashes: list[int]) -> list[int]:
    found = [pool.lookup(hash_) for hash_ in hashes]
    assert None not in found
    return [block for block in found if block is not None]


# -- refusals


def test_a_block_cannot_be_cached_twice() -> None:
    """A copy that has a hash keeps it; a second one is an error that names the block."""
    pool = ListPool(2)
    (block,) = cached_chain(pool, [1])
    with pytest.raises(InvariantViolation, match=f"block {block} is cached twice"):
        pool.cache([block], [2])


def test_a_reference_cannot_be_given_back_twice() -> None:
    """Releasing a cached copy more often than it was referenced is an error that names the block."""
    pool = ListPool(2)
    (block,) = cached_chain(pool, [1])
    pool.release([block])
    with pytest.raises(InvariantViolation, match=f"block {block} is released more often"):
        pool.release([block])


def test_as_many_blocks_are_cached_as_hashes() -> None:
    pool = ListPool(2)
    allocated = pool.allocate([], 2)
    assert allocated is not None
    with pytest.raises(InvariantViolation, match="2 device blocks are cached under 1 numbers"):
        pool.cache(allocated[0], [1])


@pytest.mark.parametrize("in_use", [True, False])
def test_two_transfers_cannot_hold_a_block_nor_one_a_block_that_nobody_uses(in_use: bool) -> None:
    pool = ListPool(2)
    chain = cached_chain(pool, [1, 2])
    if in_use:
        pool.begin_copy_out(chain[1:], 8, hold=True)
    else:
        release_request(pool, chain[1:])
    with pytest.raises(InvariantViolation, match="transfer 9 copies device blocks"):
        pool.begin_copy_out(chain, 9, hold=True)


def test_the_check_finds_memory_that_is_counted_twice() -> None:
    """If free, reserved and held memory do not add up to the capacity, check() says so with the numbers."""
    pool = ListPool(2)
    pool.real.reserved_blocks += 1
    with pytest.raises(InvariantViolation, match="free 2 \\+ reserved 1 \\+ copies 0 != capacity 2"):
        pool.check()


@pytest.mark.parametrize("hits_in_use", [True, False])
def test_a_refused_reservation_leaves_no_trace(hits_in_use: bool) -> None:
    """F53: with 5 blocks free, 1,000 tries of 6 fresh blocks over 2 cached hits change neither room nor use counts."""
    pool = ListPool(7)
    owned = cached_chain(pool, [1, 2])
    if not hits_in_use:
        release_request(pool, owned)
    available = 5 if hits_in_use else 7
    for _ in range(1000):
        assert pool.reserve(primaries(pool, [1, 2]), 6) is None
        assert pool.available_blocks == available
        assert pool.reserved_blocks == 0
        assert pool.match([1, 2]) == (2, 2 if hits_in_use else 0)
    pool.check()
    if hits_in_use:
        release_request(pool, owned)  # one reference each: now idle, not before and not twice
    assert pool.match([1, 2]) == (2, 0)
    reserved = pool.reserve([], 7)
    assert reserved is not None
    assert reserved[1] == [2, 1]


# -- field cases and rules worked by hand


def test_the_tail_of_a_chain_is_evicted_first_every_time() -> None:
    """F40: 200 times over, room for one block costs a three-block chain its last block, and two still hit."""
    for _ in range(200):
        pool = ListPool(3)
        release_request(pool, cached_chain(pool, [1, 2, 3]))
        reserved = pool.reserve([], 1)
        assert reserved is not None
        assert reserved[1] == [3]
        pool.release(pool.take_private(reserved[0], 1))
        assert pool.match([1, 2, 3]) == (2, 0)


def test_a_hash_is_removed_with_its_last_copy_only() -> None:
    """Two copies of one hash: evicting the older makes the younger primary and removes nothing; the second does."""
    pool = ListPool(3)
    older, younger = cached_chain(pool, [1]), cached_chain(pool, [1])
    assert pool.lookup(1) == older[0]
    release_request(pool, older)
    release_request(pool, younger)
    first = pool.reserve([], 2)
    assert first is not None
    assert first[1] == []
    assert pool.lookup(1) == younger[0]
    second = pool.reserve([], 1)
    assert second is not None
    assert second[1] == [1]
    assert pool.lookup(1) is None


def test_of_three_copies_the_oldest_alive_is_the_primary_one() -> None:
    """Copies take over in the order in which they were cached, whichever of them is evicted first."""
    pool = ListPool(3)
    first, second, third = cached_chain(pool, [1]), cached_chain(pool, [1]), cached_chain(pool, [1])
    release_request(pool, first)
    assert pool.reserve([], 1) is not None
    assert pool.lookup(1) == second[0]
    release_request(pool, second)
    assert pool.reserve([], 1) is not None
    assert pool.lookup(1) == third[0]


def test_the_most_recently_evicted_memory_is_used_first() -> None:
    """Taken memory is free memory, then evicted memory in eviction order, and is used from its end."""
    pool = ListPool(3)
    chain = cached_chain(pool, [1, 2])
    release_request(pool, chain)
    (free,) = {0, 1, 2} - set(chain)
    reserved = pool.reserve([], 3)
    assert reserved is not None
    assert reserved[1] == [2, 1]
    assert pool.take_private(reserved[0], 3) == [chain[0], chain[1], free]


def test_a_held_copy_is_active_and_still_hits() -> None:
    """While a shared store reads it, an idle copy counts as active, cannot be evicted, and is still a prefix hit."""
    pool = ListPool(2)
    chain = cached_chain(pool, [1, 2])
    pool.begin_copy_out(chain, 9, hold=True)
    release_request(pool, chain)
    assert pool.active_blocks == 2
    assert pool.reserve([], 1) is None
    assert pool.match([1, 2]) == (2, 2)
    pool.end_copy_out(9)
    assert pool.active_blocks == 0
    reserved = pool.reserve([], 1)
    assert reserved is not None
    assert reserved[1] == [2]  # let go last to first, so the tail is the older one


def test_a_reservation_that_is_given_back_leaves_a_held_copy_where_it_is() -> None:
    pool = ListPool(2)
    chain = cached_chain(pool, [1, 2])
    release_request(pool, chain)
    reserved = pool.reserve(chain, 0)
    assert reserved is not None
    pool.begin_copy_out(chain, 9, hold=True)
    pool.cancel(reserved[0])
    assert pool.active_blocks == 2
    assert pool.reserve([], 1) is None
    pool.end_copy_out(9)
    assert pool.active_blocks == 0


def test_memory_that_is_still_read_is_named_to_its_next_user() -> None:
    """A private store does not protect its sources; whoever takes the memory is told of the transfer, once."""
    pool = ListPool(2)
    chain = cached_chain(pool, [1, 2])
    pool.begin_copy_out(chain, 9, hold=False)
    release_request(pool, chain)
    reserved = pool.reserve([], 2)
    assert reserved is not None
    assert pool.still_copied_out(reserved[0].fresh) == [9]
    assert pool.copied_out(chain) == [0, 1]
    pool.end_copy_out(9)
    assert pool.still_copied_out(reserved[0].fresh) == []


def test_what_is_cleared_in_use_is_found_no_more_and_free_with_its_last_use() -> None:
    """A copy with two references, a pin and a hold outlives all but the last; its hash is stored anew meanwhile."""
    pool = ListPool(4)
    owned = cached_chain(pool, [1, 2])
    again = pool.reserve(primaries(pool, [1, 2]), 0)
    pinned = pool.reserve(primaries(pool, [1]), 0)
    assert again is not None
    assert pinned is not None
    assert pool.activate_hits(again[0]) == owned
    pool.begin_copy_out(owned[:1], 7, hold=True)
    assert pool.clear() == ([], [2, 1])
    assert (pool.match([1, 2]), pool.resident_blocks, pool.available_blocks) == ((0, 0), 0, 2)
    fresh = cached_chain(pool, [1, 2])
    assert not set(fresh) & set(owned)
    assert pool.reserve([], 1) is None
    release_request(pool, owned)
    assert pool.available_blocks == 0
    release_request(pool, owned)
    assert pool.available_blocks == 1
    pool.cancel(pinned[0])
    assert pool.available_blocks == 1
    pool.end_copy_out(7)
    assert (pool.available_blocks, pool.match([1, 2])) == (2, (2, 2))
    pool.check()


# -- the models


@settings(max_examples=300, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["append", "leave", "take", "one", "look"]), st.integers(0, 5)), max_size=40
    )
)
def test_blocks_are_evicted_in_the_order_of_a_list(steps: list[tuple[str, int]]) -> None:
    """Blocks come in runs, leave from the middle and come again, and are taken as the oldest."""
    order, model = EvictionOrder(6), list[int]()
    for kind, number in steps:
        if kind == "append":
            run = [block for block in (5, 3, 0, 4, 1, 2)[number:] if block not in model]
            order.append(array(run))
            model += run
        elif kind == "leave":
            assert order.count(array([number])) == (number in model)
            order.leave(array([number]))
            model = [block for block in model if block != number]
        elif kind == "take":
            count = min(number, len(model))
            assert order.take_oldest(count).tolist() == model[:count]
            del model[:count]
        elif kind == "one" and model:
            assert order.take_one() == model.pop(0)
        elif kind == "look":
            assert order.in_order().tolist() == model
        assert len(order) == len(model)
    assert order.in_order().tolist() == model


class Copy:
    """One memory block with content, in the model."""

    def __init__(self, block: int) -> None:
        self.block = block
        self.hash: int | None = None
        self.cleared = False
        self.refs = 1
        self.pins = 0
        self.held = False

    @property
    def unused(self) -> bool:
        return self.refs == 0 and self.pins == 0 and not self.held


class Reserved:
    """A reservation: the product's, and what the model thinks of it."""

    def __init__(self, real: Reservation, hits: list[Copy], taken: list[int]) -> None:
        self.real = real
        self.hits = hits
        self.taken = taken


class DevicePoolMachine(RuleBasedStateMachine):
    """Lists and dicts: ``free`` is a stack, ``cached`` is in order of caching, ``idle`` in order of eviction.

    ``cleared`` copies were in use at a clear, or are copied out without a hash.
    """

    @initialize(capacity=st.integers(min_value=1, max_value=7))
    def start(self, capacity: int) -> None:
        self.capacity = capacity
        self.pool = ListPool(capacity)
        self.free = list(range(capacity))
        self.cached: list[Copy] = []
        self.private: list[Copy] = []
        self.cleared: list[Copy] = []
        self.idle: list[Copy] = []
        self.reservations: list[Reserved] = []
        self.requests: list[list[Copy]] = []
        self.transfers: dict[int, list[Copy]] = {}
        self.next_transfer = 0

    def primary(self, hash_: int) -> Copy | None:
        return next((copy for copy in self.cached if copy.hash == hash_), None)

    def settle(self, copy: Copy) -> None:
        if copy.unused and copy.hash is not None:
            self.idle.append(copy)
        elif copy.unused and copy.cleared:
            self.cleared.remove(copy)
            self.free.append(copy.block)

    @rule(data=st.data(), fresh=st.integers(min_value=0, max_value=8), at_once=st.booleans())
    def reserve(self, data: st.DataObject, fresh: int, at_once: bool) -> None:
        resident = [hash_ for hash_ in HASHES if self.primary(hash_) is not None]
        wanted = data.draw(st.lists(st.sampled_from(resident), unique=True) if resident else st.just([]))
        hits = [copy for copy in map(self.primary, wanted) if copy is not None]
        missing = max(0, fresh - len(self.free))
        blocks = [copy.block for copy in hits]
        assert self.pool.primaries(wanted) == blocks
        if at_once and fresh == 1 and not hits and (self.free or self.idle):
            got: Any = self.pool.allocate_one()
        else:
            got = self.pool.allocate(blocks, fresh) if at_once else self.pool.reserve(blocks, fresh)
        if missing > len([copy for copy in self.idle if copy not in hits]):
            assert got is None
            return
        assert got is not None
        for copy in hits:
            copy.pins += 1
            if copy in self.idle:
                self.idle.remove(copy)
        cut = len(self.free) - (fresh - missing)
        taken, self.free = self.free[cut:], self.free[:cut]
        removed = []
        for _ in range(missing):
            victim = self.idle.pop(0)
            self.cached.remove(victim)
            taken.append(victim.block)
            if victim.hash is not None and self.primary(victim.hash) is None:
                removed.append(victim.hash)
        assert got[1] == removed
        if isinstance(got[0], Reservation):
            self.reservations.append(Reserved(got[0], hits, taken))
            return
        copies = [Copy(block) for block in reversed(taken)]
        assert got[0] == [copy.block for copy in (*hits, *copies)]
        for copy in hits:
            copy.pins -= 1
            copy.refs += 1
        self.private += copies
        self.requests.append([*hits, *copies])

    @rule()
    def clear(self) -> None:
        removed = []
        while self.idle:
            victim = self.idle.pop(0)
            self.cached.remove(victim)
            self.free.append(victim.block)
            if victim.hash is not None and self.primary(victim.hash) is None:
                removed.append(victim.hash)
        in_use = list(dict.fromkeys(copy.hash for copy in self.cached))
        dropped, kept = self.pool.clear()
        assert dropped == removed
        assert sorted(kept) == sorted(hash_ for hash_ in in_use if hash_ is not None)
        for copy in self.cached:
            copy.hash, copy.cleared = None, True
        self.cleared += self.cached
        self.cached = []

    @precondition(lambda self: self.reservations)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        reserved = data.draw(st.sampled_from(self.reservations))
        self.reservations.remove(reserved)
        self.pool.cancel(reserved.real)
        for copy in reversed(reserved.hits):
            copy.pins -= 1
            self.settle(copy)
        self.free += reserved.taken

    @precondition(lambda self: self.reservations)
    @rule(data=st.data(), hashes=st.lists(st.sampled_from(HASHES) | st.none(), min_size=8, max_size=8))
    def use(self, data: st.DataObject, hashes: list[int | None]) -> None:
        """Turn a whole reservation into a request; blocks with a hash are cached at once."""
        reserved = data.draw(st.sampled_from(self.reservations))
        self.reservations.remove(reserved)
        assert self.pool.activate_hits(reserved.real) == [copy.block for copy in reserved.hits]
        for copy in reserved.hits:
            copy.pins -= 1
            copy.refs += 1
        copies = [Copy(block) for block in reversed(reserved.taken)]
        assert self.pool.take_private(reserved.real, len(copies)) == [copy.block for copy in copies]
        self.private += copies
        request = [*reserved.hits, *copies]
        entered = list(zip(copies, hashes, strict=False))
        if None not in hashes and len(set(hashes)) == len(hashes):
            self.cache(entered)
        else:
            for copy, hash_ in entered:
                if hash_ is not None:
                    self.cache([(copy, hash_)])
        self.requests.append(request)

    def cache(self, entered: list[tuple[Copy, int]]) -> None:
        first: list[int] = []
        for position, (copy, hash_) in enumerate(entered):
            if self.primary(hash_) is None:
                first.append(position)
            self.private.remove(copy)
            copy.hash = hash_
            self.cached.append(copy)
        if len(entered) == 1:
            assert self.pool.cache_one(entered[0][0].block, entered[0][1]) is (first == [0])
            return
        assert self.pool.cache([copy.block for copy, _ in entered], [hash_ for _, hash_ in entered]) == first

    @precondition(lambda self: self.private)
    @rule(data=st.data(), hash_=st.sampled_from(HASHES))
    def cache_later(self, data: st.DataObject, hash_: int) -> None:
        self.cache([(data.draw(st.sampled_from(self.private)), hash_)])

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        request = self.requests.pop(data.draw(st.integers(min_value=0, max_value=len(self.requests) - 1)))
        for copy in reversed(request):
            self.pool.release([copy.block])
            copy.refs -= 1
            if copy.hash is None and not copy.cleared:
                self.private.remove(copy)
                self.free.append(copy.block)
            else:
                self.settle(copy)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), hold=st.booleans())
    def begin_copy_out(self, data: st.DataObject, hold: bool) -> None:
        request = data.draw(st.sampled_from(self.requests))
        busy = self.pool.copied_out([copy.block for copy in request])
        sources = [copy for place, copy in enumerate(request) if place not in busy]
        self.pool.begin_copy_out([copy.block for copy in sources], self.next_transfer, hold=hold)
        for copy in sources:
            copy.held = hold
            if hold and copy.hash is None and not copy.cleared:
                copy.cleared = True
                self.private.remove(copy)
                self.cleared.append(copy)
        self.transfers[self.next_transfer] = sources if hold else []
        self.next_transfer += 1

    @precondition(lambda self: self.transfers)
    @rule(data=st.data())
    def end_copy_out(self, data: st.DataObject) -> None:
        transfer = data.draw(st.sampled_from(sorted(self.transfers)))
        self.pool.end_copy_out(transfer)
        for copy in reversed(self.transfers.pop(transfer)):
            copy.held = False
            self.settle(copy)

    @rule(hashes=st.lists(st.sampled_from(HASHES), max_size=6))
    def match(self, hashes: list[int]) -> None:
        found = active = 0
        for hash_ in hashes:
            copy = self.primary(hash_)
            if copy is None:
                break
            found += 1
            active += copy not in self.idle
        assert self.pool.match(hashes) == (found, active)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        reserved = sum(len(one.taken) for one in self.reservations)
        in_use = len(self.cached) + len(self.private) + len(self.cleared) - len(self.idle) + reserved
        assert self.pool.reserved_blocks == reserved
        assert self.pool.copies == len(self.cached) + len(self.private) + len(self.cleared)
        assert self.pool.active_blocks == in_use
        assert self.pool.available_blocks == self.capacity - in_use
        assert self.pool.resident_hashes() == {copy.hash for copy in self.cached}
        for hash_ in HASHES:
            copy = self.primary(hash_)
            assert self.pool.lookup(hash_) == (None if copy is None else copy.block)


class TestDevicePoolAgainstItsModel(DevicePoolMachine.TestCase):  # type: ignore[name-defined,misc]
    """Any sequence of commands leaves the pool and a model of lists and dicts with the same answers."""

    settings: Any = settings(max_examples=150, stateful_step_count=40, deadline=None)
