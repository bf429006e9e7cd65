"""The host-memory tier (G2): which blocks it holds, which give way, and what moves in and out.

Owns: residency, pins, order of eviction, transfers, and what each client has not been told yet.
Refuses to know: requests beyond their number, the bus, and device memory.

A block is *pending* from the moment room is taken for it until its copy lands, then *resident*. Both count as used.
Only resident blocks that no load has pinned can be evicted, oldest first. Age: a touch makes one block the youngest; a
landing store, or a finished load, makes its whole cohort youngest at once, ordered among themselves by hash.

What is known of blocks stands in arrays by their numbers, so that a step is a few operations on arrays for a whole
prompt; only events speak of hashes.

A clear begins a new book of blocks. Transfers under way go on with the old one, where nobody looks; its blocks count
as used until these have ended.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from g2sim.actors.host_pool import events as ev
from g2sim.actors.host_pool.messages import (
    NOTHING,
    QUIET,
    BoundaryReply,
    Clear,
    Completion,
    Join,
    LookUp,
    LookUpOutcome,
    LookUpReply,
    NewsAt,
    PassBoundary,
    PoolChange,
    PrepareStore,
    QueueLoad,
    Retire,
    StandBy,
    StandDown,
    StoreOutcome,
    StoreReply,
    Tick,
    TickReply,
)
from g2sim.actors.host_pool.recency import Recency
from g2sim.actors.host_pool.transfers import Direction, Transport
from g2sim.actors.kv.blocks import BlockChain, ChainPart, consecutive
from g2sim.actors.kv.events import removed_by_clear
from g2sim.actors.kv.numbers import NO_NUMBERS, BlockNumbers, Numbers, lengthened
from g2sim.bus.errors import InvariantViolation

ROUNDING_MS = 1e-3
"""Far more than a transfer's end moves when bytes move in other steps."""


ABSENT, PENDING, RESIDENT = range(3)
"""States of a block. Their order matters: the least of several blocks is what they come to together."""

_LEAST_RUN_BLOCKS = 1 << 15


class _Place(NamedTuple):
    """Where a block stands in its prompt."""

    position: int
    hash: int
    tokens_hash: int
    parent_hash: int | None
    number: int


class _Book:
    """What is known of blocks, by their numbers.

    Attributes:
        states: int8[limit].
        pins: how many loads are reading a block, int32[limit].
        stores: the transfer that has brought a block, or will; of no meaning if it is absent. int64[limit].
        used_blocks: how many are not absent.
    """

    __slots__ = ("_most_run_blocks", "_run_blocks", "_runs", "pins", "states", "stores", "used_blocks")

    def __init__(self, limit: int) -> None:
        self.states: NDArray[np.int8] = np.zeros(limit, np.int8)
        self.pins: NDArray[np.int32] = np.zeros(limit, np.int32)
        self.stores: Numbers = np.zeros(limit, np.int64)
        self.used_blocks = 0
        self._runs: dict[int, list[PoolChange]] = {}  # by transfer; some may have no block here any more
        self._run_blocks = 0
        self._most_run_blocks = _LEAST_RUN_BLOCKS

    def grow(self, limit: int) -> None:
        """Let there be larger numbers, below ``limit``."""
        self.states = lengthened(self.states, limit)
        self.pins = lengthened(self.pins, limit)
        self.stores = lengthened(self.stores, limit)

    def begin_store(self, transfer: int, blocks: Numbers, runs: list[PoolChange]) -> None:
        """Blocks that were absent become pending; ``runs`` are the same blocks."""
        self.states[blocks] = PENDING
        self.stores[blocks] = transfer
        self.used_blocks += len(blocks)
        self._runs[transfer] = runs
        self._run_blocks += len(blocks)
        if self._run_blocks > self._most_run_blocks:
            self._forget_runs()

    def runs_of(self, transfer: int) -> list[PoolChange]:
        """What a store brings, as runs of its prompt."""
        return self._runs[transfer]

    def take_out(self, blocks: Numbers) -> None:
        """Blocks that are here, and that nobody uses, are here no more."""
        self.states[blocks] = ABSENT
        self.used_blocks -= len(blocks)

    def blocks(self) -> Numbers:
        """All blocks that are here, in the order of their numbers."""
        numbers: Numbers = (self.states != ABSENT).nonzero()[0]
        return numbers

    def places(self, numbering: BlockNumbers) -> list[_Place]:
        """Each block that is here, in the order of the stores that brought them."""
        numbers = self.blocks()
        brought = zip(self.stores[numbers].tolist(), numbering.hashes(numbers), strict=True)
        here = dict(zip(brought, numbers.tolist(), strict=True))
        found: list[_Place] = []
        for transfer, runs in self._runs.items():
            for run in runs:
                parent = run.parent_hash
                for position, hash_ in enumerate(run.block_hashes, run.start_position):
                    number = here.get((transfer, hash_))
                    if number is not None:
                        own = run.tokens_hashes[position - run.start_position]
                        found.append(_Place(position, hash_, own, parent, number))
                    parent = hash_
        return found

    def _forget_runs(self) -> None:
        """Of stores that have no block here any more. It costs as much as noting a part of them did."""
        known = set(np.unique(self.stores[self.blocks()]).tolist())
        self._runs = {transfer: runs for transfer, runs in self._runs.items() if transfer in known}
        self._run_blocks = sum([len(run.block_hashes) for runs in self._runs.values() for run in runs])
        self._most_run_blocks = max(_LEAST_RUN_BLOCKS, 2 * self._run_blocks)


class _Transfer:
    """``blocks``: their numbers. ``book``: the one that they are in."""

    __slots__ = ("blocks", "book", "client", "direction", "request", "submitted")

    def __init__(self, client: int, request: int, direction: Direction, blocks: Numbers, book: _Book) -> None:
        self.client = client
        self.request = request
        self.direction = direction
        self.blocks = blocks
        self.book = book
        self.submitted = False


class _Client:
    """``who``: the fields that name it in the pool's events. ``seen``: transfers ended at its last tick."""

    __slots__ = ("changes", "completions", "joined", "prepared", "seen", "who")

    def __init__(self, joined: Join, pool: str, seen: int) -> None:
        self.joined = joined
        self.who: dict[str, Any] = {
            "pool": pool,
            "worker": joined.worker,
            "role": joined.role,
            "dp_rank": joined.dp_rank,
        }
        self.seen = seen
        self.prepared: list[int] = []
        self.completions: deque[Completion] = deque()
        self.changes: list[PoolChange] = []


class HostPool:
    """See the module's text.

    Args:
        name: the pool's name in events.
        capacity_blocks: blocks it holds, pending ones included; >= 1.
        block_bytes: size of one block [B].
        transport: how bytes move.
        shared: several ranks use it, so that each use first moves what others have under way. A private pool moves
            only at its rank's ticks, as the reference does.
        numbering: of the blocks; None for one of its own.

    Events to publish are left in ``outbox``, in order; whoever drives the pool takes them out.
    """

    def __init__(
        self,
        name: str,
        capacity_blocks: int,
        block_bytes: int,
        transport: Transport,
        *,
        shared: bool,
        numbering: BlockNumbers | None = None,
    ) -> None:
        self.name = name
        self.shared = shared
        self.capacity_blocks = capacity_blocks
        self.block_bytes = block_bytes
        self.outbox: list[Any] = []
        self._transport = transport
        self._numbering = BlockNumbers() if numbering is None else numbering
        self._numbering.add_user(self._numbers_in_use)
        self._limit = self._numbering.limit
        self._book = _Book(self._limit)
        self._cleared_blocks = 0  # in older books
        self._evictable = Recency(self._limit)
        self._is_asked: NDArray[np.bool_] = np.zeros(self._limit, np.bool_)  # all False between calls
        self._transfers: dict[int, _Transfer] = {}
        self._clients: dict[int, _Client] = {}
        self._untold: set[int] = set()  # clients that a tick would tell something
        self._next_transfer = 0
        self._ended = 0
        self._residency = 0
        self._submitted = 0

    # -- membership

    def join(self, message: Join) -> tuple[PoolChange, ...]:
        """Add a client. Returns the resident blocks as runs, parents before children; pending ones come later."""
        if message.client in self._clients:
            raise InvariantViolation(f"{self.name}: client {message.client} joins twice")
        client = self._clients[message.client] = _Client(message, self.name, self._ended)
        self.outbox.append(ev.ClientJoined(**client.who))
        return tuple(self._resident_runs())

    def retire(self, client: int, now_ms: float, *, abrupt: bool = False) -> None:
        """Remove a client. What it stored stays, and nobody is told of it on its behalf; see ``Retire``."""
        self.advance(now_ms)
        gone = self._clients.pop(client)
        self._untold.discard(client)
        own = [(number, transfer) for number, transfer in self._transfers.items() if transfer.client == client]
        loads = [number for number, transfer in own if transfer.direction is Direction.HOST_TO_DEVICE]
        stores = gone.prepared
        if abrupt:
            stores = [number for number, transfer in own if transfer.direction is Direction.DEVICE_TO_HOST]
        for number in (*loads, *stores):
            if self._transfers[number].submitted:
                self._transport.remove(number)
        self.outbox.append(ev.ClientRetired(canceled_loads=tuple(loads), rolled_back_stores=tuple(stores), **gone.who))
        for number in loads:
            self._unpin(self._transfers.pop(number))
        for number in stores:
            self._give_up_store(self._transfers.pop(number))
        if loads or stores:
            self._ended += 1
            self._residency += 1
            self._untold.update(self._clients)

    def empty(self) -> None:
        """Lose everything: the memory is gone, and with it the last client.

        Raises: InvariantViolation while there are clients, whose transfers would have to end first.
        """
        if self._clients:
            raise InvariantViolation(f"{self.name}: is emptied while it has clients")
        if len(self._evictable):
            self._evict(self._evictable.take_all())
        self._transport.restart()

    def clear(self, now_ms: float) -> int:
        """See ``Clear``."""
        self._catch_up(now_ms)
        untold = [change for client in self._clients.values() for change in client.changes]
        if not self._book.used_blocks and not any(change.stored for change in untold):
            return 0
        idle = self._evictable.take_all()
        self._take_out(idle)
        in_use, self._book = self._book, _Book(self._limit)
        self._cleared_blocks += in_use.used_blocks
        places = in_use.places(self._numbering)
        loading = tuple([place.hash for place in places if in_use.states[place.number] == RESIDENT])
        unused = tuple(self._numbering.hashes(idle))
        self.outbox.append(ev.HostPoolCleared(pool=self.name, block_hashes=unused, loading_hashes=loading))
        for client in self._clients.values():
            told_later = [(change.stored, change.block_hashes) for change in client.changes]
            gone = removed_by_clear(told_later, unused + loading)
            client.changes = [PoolChange(stored=False, block_hashes=gone)] if gone else []
        self._untold = {number for number, own in self._clients.items() if not self._has_told(own)}
        return len(unused)

    # -- restoring

    def look_up(self, message: LookUp) -> LookUpReply:
        """See ``LookUp``. A store of the request's own that is under way defers without touching anything."""
        before = message.again
        if before is not None and before.residency == self._residency:
            self.make_recent(message.chain)
            return before
        landed = message.latest_store is None or message.latest_store not in self._transfers
        if not landed:
            return LookUpReply(LookUpOutcome.DEFERRED, 0, False)
        wanted = self._numbers(message.chain)[message.base_blocks :]
        matched = 0
        wait = False
        if len(wanted):
            states = self._book.states[wanted]
            first_least = int(states.argmin())
            matched = len(wanted) if states[first_least] != ABSENT else first_least
            if matched:
                wait = bool(states[:matched].min() == PENDING) or self._any_among(message.loading, wanted[:matched])
        self.make_recent(message.chain)
        if not matched:
            return LookUpReply(LookUpOutcome.MISS, 0, landed, self._residency)
        if wait:
            return LookUpReply(LookUpOutcome.DEFERRED, 0, landed, self._residency)
        return LookUpReply(LookUpOutcome.HIT, matched, landed, self._residency)

    def queue_load(self, message: QueueLoad, now_ms: float) -> int:
        """Pin the blocks and start moving them. Returns the transfer."""
        self._catch_up(now_ms)
        client = self._clients[message.client]
        blocks = self._numbers(message.chain)[message.start : message.stop]
        if np.count_nonzero(self._book.states[blocks] == RESIDENT) != len(blocks):
            raise InvariantViolation(f"{self.name}: load of a block that is not resident")
        self._book.pins[blocks] += 1
        self._evictable.remove(blocks)
        number = self._new_transfer(message.client, message.request, Direction.HOST_TO_DEVICE, blocks)
        end_ms = self._submit(number, client, now_ms, max(now_ms, message.from_ms))
        self.outbox.append(
            ev.LoadQueued(
                request=message.request,
                transfer=number,
                block_hashes=message.chain.sequence_hashes[message.start : message.stop],
                completes_at_ms=end_ms,
                **client.who,
            )
        )
        return number

    # -- storing

    def prepare_store(self, message: PrepareStore, now_ms: float) -> StoreReply:
        """See ``PrepareStore``. A RETRY changes nothing but the transport's clock."""
        chain, start = message.chain, message.start
        wanted = self._numbers(chain)[start : message.stop]
        is_missing = self._book.states[wanted] == ABSENT
        places = is_missing.nonzero()[0]
        count = len(places)
        if not count:
            return StoreReply(StoreOutcome.PRESENT, None, NO_NUMBERS)
        busy = message.busy_sources
        if len(busy) and is_missing[busy - start].any():
            return StoreReply(StoreOutcome.NOT_READY, None, NO_NUMBERS)
        self._catch_up(now_ms)
        client = self._clients[message.client]
        positions = places + start
        runs = _runs(chain, positions)
        block_hashes = runs[0].block_hashes
        for run in runs[1:]:
            block_hashes += run.block_hashes
        needed = count - (self.capacity_blocks - self.used_blocks)
        if needed > 0:
            present = NO_NUMBERS if count == len(wanted) else wanted[~is_missing]
            victims = self._evictable.take_oldest(needed, present)
            if victims is None:
                self.outbox.append(
                    ev.StorePutOff(
                        request=message.request,
                        block_hashes=block_hashes,
                        never_fits=len(wanted) > self.capacity_blocks,
                        **client.who,
                    )
                )
                return StoreReply(StoreOutcome.RETRY, None, NO_NUMBERS)
            self._evict(victims)
        self._residency += 1
        blocks = wanted[places]
        number = self._new_transfer(message.client, message.request, Direction.DEVICE_TO_HOST, blocks)
        self._book.begin_store(number, blocks, runs)
        client.prepared.append(number)
        self.outbox.append(
            ev.StorePrepared(request=message.request, transfer=number, block_hashes=block_hashes, **client.who)
        )
        self.make_recent(chain)
        return StoreReply(StoreOutcome.PREPARED, number, positions)

    def submit_prepared(self, client: int, now_ms: float) -> tuple[tuple[int, float | None], ...]:
        """Start moving everything the client has prepared, in order. Returns (transfer, its end if certain [ms])."""
        own = self._clients[client]
        self._catch_up(now_ms)
        prepared, own.prepared = own.prepared, []
        out = []
        for number in prepared:
            end_ms = self._submit(number, own, now_ms, now_ms)
            self.outbox.append(ev.StoreSubmitted(pool=self.name, transfer=number, completes_at_ms=end_ms))
            out.append((number, end_ms))
        return tuple(out)

    # -- time

    def advance(self, now_ms: float) -> None:
        """Move transfers to ``now_ms`` and let what has ended take effect."""
        ended = self._transport.advance(now_ms)
        if not ended:
            return
        transfers = self._transfers
        self._residency += 1
        ended.sort(key=lambda item: (item[0], transfers[item[1]].direction, item[1]))
        for end_ms, number in ended:
            transfer = transfers.pop(number)
            self._ended += 1
            is_load = transfer.direction is Direction.HOST_TO_DEVICE
            if is_load:
                self.outbox.append(ev.LoadFinished(pool=self.name, transfer=number, ended_ms=end_ms))
                self._unpin(transfer)
            elif transfer.book is not self._book:
                self._give_up_store(transfer)
                self.outbox.append(ev.StoreDropped(pool=self.name, transfer=number, ended_ms=end_ms))
            else:
                transfer.book.states[transfer.blocks] = RESIDENT
                self._let_go(transfer.blocks)
                self.outbox.append(ev.StoreLanded(pool=self.name, transfer=number, ended_ms=end_ms))
                for run in transfer.book.runs_of(number):
                    self._announce(run)
            client = self._clients.get(transfer.client)
            if client is not None:
                client.completions.append(Completion(number, transfer.request, is_load, end_ms))
        self._untold.update(self._clients)

    def tick(self, client: int, now_ms: float) -> TickReply:
        """Advance, and tell the client what it has not been told."""
        self.advance(now_ms)
        if client not in self._untold:
            return NOTHING
        own = self._clients[client]
        progress = own.seen != self._ended
        own.seen = self._ended
        done: list[Completion] = []
        while own.completions and own.completions[0].end_ms <= now_ms:
            done.append(own.completions.popleft())
        changes, own.changes = own.changes, []
        if not own.completions:
            self._untold.discard(client)
        return TickReply(tuple(done), progress, tuple(changes))

    def boundary(self, client: int, now_ms: float) -> BoundaryReply:
        """The end of a client's pass; see ``PassBoundary``."""
        if not self._transfers and client not in self._untold:
            self._transport.advance(now_ms)
            return QUIET
        before = self.tick(client, now_ms)
        submitted = self.submit_prepared(client, now_ms)
        return BoundaryReply(before, submitted, self.tick(client, now_ms))

    def news_at_ms(self, message: NewsAt) -> float:
        """See ``NewsAt``. What is under way may end a little sooner than it seems, because of rounding."""
        own, look_up = self._clients[message.client], message.look_up
        if own.prepared:
            return -math.inf
        if message.carefree:
            return math.inf
        if message.client in self._untold:
            return -math.inf
        if look_up is not None and (look_up.again is None or look_up.again.residency != self._residency):
            return -math.inf
        next_ms = self._transport.next_event_ms()
        return math.inf if next_ms is None else next_ms - ROUNDING_MS

    @property
    def at_rest(self) -> bool:
        """Whether the end of a pass would come to nothing for any client that has prepared nothing."""
        return not self._transfers and not self._untold

    @property
    def state_idx(self) -> int:
        """It grows when anything changes but how far bytes have moved, and what is recent."""
        return self._residency + self._submitted

    def serve(self, message: Any, now_ms: float) -> Any:
        """Answer one message of ``messages``; raises InvariantViolation for anything else."""
        handler = _HANDLERS.get(type(message))
        if handler is None:
            raise InvariantViolation(f"{self.name}: no answer to a {type(message).__name__}")
        return handler(self, message, now_ms)

    def next_event_ms(self) -> float | None:
        return self._transport.next_event_ms()

    def untold(self) -> list[int]:
        """Clients that a tick would tell something, in order of joining."""
        return [number for number in self._clients if number in self._untold] if self._untold else []

    # -- looking

    def clients(self) -> list[int]:
        """All clients, in order of joining."""
        return list(self._clients)

    def has_progress(self, client: int) -> bool:
        """Whether a transfer has ended since the client's last tick."""
        return self._clients[client].seen != self._ended

    def actor_of(self, client: int) -> str | None:
        """Name of the actor that a client belongs to; None if it is no client (any more)."""
        own = self._clients.get(client)
        return None if own is None else own.joined.actor

    def has_work(self, client: int) -> bool:
        """Whether one of the client's transfers is under way or not yet told."""
        own = self._clients[client]
        return bool(own.completions) or any(transfer.client == client for transfer in self._transfers.values())

    @property
    def used_blocks(self) -> int:
        return self._book.used_blocks + self._cleared_blocks

    @property
    def resident_blocks(self) -> int:
        return int(np.count_nonzero(self._book.states == RESIDENT))

    def contents(self) -> dict[int, tuple[bool, int]]:
        """Every block, in no particular order: (resident, pins). Costs O(blocks)."""
        book = self._book
        blocks = book.blocks()
        is_resident = (book.states[blocks] == RESIDENT).tolist()
        known = zip(is_resident, book.pins[blocks].tolist(), strict=True)
        return dict(zip(self._numbering.hashes(blocks), known, strict=True))

    def eviction_order(self) -> list[int]:
        """Every block that can be evicted, the next one first. Costs O(blocks)."""
        return self._numbering.hashes(self._evictable.in_order())

    def transfers_under_way(self) -> list[str]:
        """One line a transfer, for people."""
        return [
            f"transfer {number} ({transfer.direction.name.lower()}, {len(transfer.blocks)} blocks, "
            f"request {transfer.request})"
            for number, transfer in self._transfers.items()
        ]

    def check(self) -> None:
        """Raise InvariantViolation unless the books agree. Costs O(blocks)."""
        if not self.used_blocks <= self.capacity_blocks:
            raise InvariantViolation(f"{self.name}: {self.used_blocks} blocks in {self.capacity_blocks}")
        older = dict.fromkeys(transfer.book for transfer in self._transfers.values())
        older.pop(self._book, None)
        if not sum([book.used_blocks for book in older]) == self._cleared_blocks:
            raise InvariantViolation(f"{self.name}: {self._cleared_blocks} cleared blocks, transfers use others")
        for book in (self._book, *older):
            self._check_book(book)
        if self._is_asked.any():
            raise InvariantViolation(f"{self.name}: marks are left of a question that has been answered")
        if not self._untold == {number for number, own in self._clients.items() if not self._has_told(own)}:
            raise InvariantViolation(f"{self.name}: clients {sorted(self._untold)} are taken for those to be told")

    def _check_book(self, book: _Book) -> None:
        pins = np.zeros_like(book.pins)
        is_pending = np.zeros(len(book.states), np.bool_)
        for transfer in self._transfers.values():
            if transfer.book is not book:
                continue
            if transfer.direction is Direction.HOST_TO_DEVICE:
                pins[transfer.blocks] += 1
            else:
                is_pending[transfer.blocks] = True
        is_here, is_resident = book.states != ABSENT, book.states == RESIDENT
        if not np.count_nonzero(is_here) == book.used_blocks == len(book.places(self._numbering)):
            raise InvariantViolation(f"{self.name}: {book.used_blocks} blocks are counted, others are here")
        if (book.pins[~is_here] != 0).any():
            raise InvariantViolation(f"{self.name}: blocks are pinned that are gone")
        self._check_blocks(book.pins == pins, "is not pinned once for each load")
        self._check_blocks((book.states == PENDING) == is_pending, "is pending without a store, or the reverse")
        if book is self._book:
            self._check_blocks(
                self._evictable.are_here() == (is_resident & (pins == 0)), "is wrongly in or out of the eviction order"
            )

    def _check_blocks(self, is_right: NDArray[np.bool_], what: str) -> None:
        wrong = (~is_right).nonzero()[0]
        if len(wrong):
            raise InvariantViolation(f"{self.name}: block {min(self._numbering.hashes(wrong))} {what}")

    # -- inside

    def _has_told(self, own: _Client) -> bool:
        """Whether a tick would tell a client nothing."""
        return own.seen == self._ended and not own.changes and not own.completions

    def _catch_up(self, now_ms: float) -> None:
        if self.shared:
            self.advance(now_ms)

    def _numbers(self, chain: BlockChain) -> Numbers:
        """The numbers of a chain's blocks; there is a place for each of them in all arrays by number."""
        numbers = chain.numbers(self._numbering)
        limit = self._numbering.limit
        if limit != self._limit:
            self._limit = limit
            self._book.grow(limit)
            self._evictable.grow(limit)
            self._is_asked = np.zeros(limit, np.bool_)
        return numbers

    def _numbers_in_use(self) -> Numbers:
        """Older books have no other blocks than those of transfers."""
        return np.concatenate((self._book.blocks(), *[transfer.blocks for transfer in self._transfers.values()]))

    def _any_among(self, parts: tuple[ChainPart, ...], blocks: Numbers) -> bool:
        """Whether any block of the parts is one of ``blocks``."""
        if not parts:
            return False
        of_parts = np.concatenate([self._numbers(part.chain)[part.start : part.stop] for part in parts])
        self._is_asked[blocks] = True
        found = bool(self._is_asked[of_parts].any())
        self._is_asked[blocks] = False
        return found

    def _new_transfer(self, client: int, request: int, direction: Direction, blocks: Numbers) -> int:
        number = self._next_transfer
        self._next_transfer += 1
        self._transfers[number] = _Transfer(client, request, direction, blocks, self._book)
        return number

    def _submit(self, number: int, client: _Client, now_ms: float, from_ms: float) -> float | None:
        transfer = self._transfers[number]
        if transfer.submitted:
            raise InvariantViolation(f"{self.name}: transfer {number} is submitted twice")
        transfer.submitted = True
        self._submitted += 1
        size_bytes = self.block_bytes * len(transfer.blocks)
        return self._transport.submit(
            number, transfer.client, client.joined.link, transfer.direction, size_bytes, now_ms, from_ms
        )

    def _evict(self, blocks: Numbers) -> None:
        block_hashes = tuple(self._numbering.hashes(blocks))
        self._take_out(blocks)
        self.outbox.append(ev.HostBlocksEvicted(pool=self.name, block_hashes=block_hashes))
        self._announce(PoolChange(stored=False, block_hashes=block_hashes))

    def _take_out(self, blocks: Numbers) -> None:
        """Blocks that nobody used, and which are not evictable any more, are here no more."""
        self._residency += 1
        self._book.take_out(blocks)

    def _give_up_store(self, transfer: _Transfer) -> None:
        transfer.book.take_out(transfer.blocks)
        if transfer.book is not self._book:
            self._cleared_blocks -= len(transfer.blocks)

    def make_recent(self, chain: BlockChain) -> None:
        """Make each evictable block youngest, last to first, so that a prefix is never older than what follows it."""
        self._evictable.touch(self._numbers(chain))

    def _let_go(self, blocks: Numbers) -> None:
        """A cohort that nobody uses any more can be evicted, as the youngest, ordered among themselves by hash."""
        self._evictable.add(self._numbering.sorted_by_hash(blocks) if len(blocks) > 1 else blocks)

    def _unpin(self, transfer: _Transfer) -> None:
        book, blocks = transfer.book, transfer.blocks
        left = book.pins[blocks] - 1
        if (left < 0).any():
            raise InvariantViolation(f"{self.name}: a block is unpinned more often than pinned")
        book.pins[blocks] = left
        idle = blocks[left == 0]
        if book is self._book:
            self._let_go(idle)
        elif len(idle):
            book.take_out(idle)
            self._cleared_blocks -= len(idle)
            self.outbox.append(ev.ClearedBlocksFreed(pool=self.name, block_hashes=tuple(self._numbering.hashes(idle))))

    def _announce(self, change: PoolChange) -> None:
        for client in self._clients.values():
            client.changes.append(change)
        self._untold.update(self._clients)

    def _resident_runs(self) -> list[PoolChange]:
        """All that is resident, parents before children; a run breaks where the next block's parent is another one."""
        runs: list[list[_Place]] = []
        places = self._book.places(self._numbering)
        for place in sorted([one for one in places if self._book.states[one.number] == RESIDENT]):
            if runs and place.parent_hash == runs[-1][-1].hash:
                runs[-1].append(place)
            else:
                runs.append([place])
        return [
            PoolChange(
                stored=True,
                block_hashes=tuple([place.hash for place in run]),
                tokens_hashes=tuple([place.tokens_hash for place in run]),
                parent_hash=run[0].parent_hash,
                start_position=run[0].position,
            )
            for run in runs
        ]


def _runs(chain: BlockChain, positions: Numbers) -> list[PoolChange]:
    """Blocks of a prompt that become resident, at ascending positions."""
    return [
        PoolChange(
            stored=True,
            block_hashes=chain.sequence_hashes[start:stop],
            tokens_hashes=chain.tokens_hashes[start:stop],
            parent_hash=chain.sequence_hashes[start - 1] if start else None,
            start_position=start,
        )
        for start, stop in consecutive(positions)
    ]


_HANDLERS: dict[type[Any], Callable[[HostPool, Any, float], Any]] = {
    Join: lambda pool, message, now_ms: pool.join(message),
    Retire: lambda pool, message, now_ms: pool.retire(message.client, now_ms, abrupt=message.abrupt),
    Clear: lambda pool, message, now_ms: pool.clear(now_ms),
    LookUp: lambda pool, message, now_ms: pool.look_up(message),
    QueueLoad: lambda pool, message, now_ms: pool.queue_load(message, now_ms),
    PrepareStore: lambda pool, message, now_ms: pool.prepare_store(message, now_ms),
    NewsAt: lambda pool, message, now_ms: pool.news_at_ms(message),
    # Nobody else asks a private pool in between, and it knows its ends from the start.
    StandBy: lambda pool, message, now_ms: None,
    StandDown: lambda pool, message, now_ms: None,
    PassBoundary: lambda pool, message, now_ms: pool.boundary(message.client, now_ms),
    Tick: lambda pool, message, now_ms: pool.tick(message.client, now_ms),
}
