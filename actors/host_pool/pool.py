"""The host-memory tier (G2): which blocks it holds, which give way, and what moves in and out.

Owns: residency, pins, order of eviction, transfers, and what each client has not been told yet.
Refuses to know: requests beyond their number, the bus, and device memory.

A block is *pending* from the moment room is taken for it until its copy lands, then *resident*. Both count as used.
Only resident blocks that no load has pinned can be evicted, oldest first. Age: a touch makes one block the youngest; a
landing store, or a finished load, makes its whole cohort youngest at once, ordered among themselves by hash.

A clear begins a new book of blocks. Transfers under way go on with the old one, where nobody looks; its blocks count
as used until these have ended.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any

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
from g2sim.actors.kv.blocks import BlockChain, consecutive
from g2sim.actors.kv.events import removed_by_clear
from g2sim.bus.errors import InvariantViolation

ROUNDING_MS = 1e-3
"""Far more than a transfer's end moves when bytes move in other steps."""


class _Cohort:
    """What one store brings, block by block: as ``runs`` of its prompt. Pending until it lands, then resident."""

    __slots__ = ("resident", "runs")

    def __init__(self, runs: list[PoolChange]) -> None:
        self.resident = False
        self.runs = runs


class _Book:
    """Blocks by their hashes: each block's cohort, and how many loads have pinned it, if any."""

    __slots__ = ("cohorts", "pins")

    def __init__(self) -> None:
        self.cohorts: dict[int, _Cohort] = {}
        self.pins: dict[int, int] = {}

    def places(self) -> list[tuple[int, int, int, int | None]]:
        """(position in its prompt, hash, tokens hash, parent's hash) of each resident block, in this order."""
        found = []
        for cohort in dict.fromkeys(self.cohorts.values()):
            for run in cohort.runs if cohort.resident else ():
                parent = run.parent_hash
                for position, hash_ in enumerate(run.block_hashes, run.start_position):
                    if self.cohorts.get(hash_) is cohort:
                        found.append((position, hash_, run.tokens_hashes[position - run.start_position], parent))
                    parent = hash_
        return sorted(found, key=itemgetter(0, 1))


class _Transfer:
    """``book``: the one that its blocks are in. ``cohort``: what a store brings."""

    __slots__ = ("block_hashes", "book", "client", "cohort", "direction", "request", "submitted")

    def __init__(
        self,
        client: int,
        request: int,
        direction: Direction,
        block_hashes: tuple[int, ...],
        book: _Book,
        cohort: _Cohort | None,
    ) -> None:
        self.client = client
        self.request = request
        self.direction = direction
        self.block_hashes = block_hashes
        self.book = book
        self.cohort = cohort
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

    Events to publish are left in ``outbox``, in order; whoever drives the pool takes them out.
    """

    def __init__(
        self, name: str, capacity_blocks: int, block_bytes: int, transport: Transport, *, shared: bool
    ) -> None:
        self.name = name
        self.shared = shared
        self.capacity_blocks = capacity_blocks
        self.block_bytes = block_bytes
        self.outbox: list[Any] = []
        self._transport = transport
        self._book = _Book()
        self._cleared_blocks = 0  # in older books
        self._evictable = Recency()
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
        if self._evictable:
            self._evict(self._evictable.take_all())
        self._transport.restart()

    def clear(self, now_ms: float) -> int:
        """See ``Clear``."""
        self._catch_up(now_ms)
        untold = [change for client in self._clients.values() for change in client.changes]
        if not self._book.cohorts and not any(change.stored for change in untold):
            return 0
        unused = self._evictable.take_all()
        self._take_out(unused)
        in_use, self._book = self._book.cohorts, _Book()
        self._cleared_blocks += len(in_use)
        loading = tuple([hash_ for hash_, cohort in in_use.items() if cohort.resident])
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
            self.make_recent(message.chain.sequence_hashes)
            return before
        landed = message.latest_store is None or message.latest_store not in self._transfers
        if not landed:
            return LookUpReply(LookUpOutcome.DEFERRED, 0, False)
        keys = message.chain.sequence_hashes
        cohorts, loading = self._book.cohorts, message.loading
        matched = 0
        wait = False
        for hash_ in keys[message.base_blocks :]:
            cohort = cohorts.get(hash_)
            if cohort is None:
                break
            matched += 1
            if not cohort.resident or hash_ in loading:
                wait = True
        self.make_recent(keys)
        if not matched:
            return LookUpReply(LookUpOutcome.MISS, 0, landed, self._residency)
        if wait:
            return LookUpReply(LookUpOutcome.DEFERRED, 0, landed, self._residency)
        return LookUpReply(LookUpOutcome.HIT, matched, landed, self._residency)

    def queue_load(self, message: QueueLoad, now_ms: float) -> int:
        """Pin the blocks and start moving them. Returns the transfer."""
        self._catch_up(now_ms)
        client = self._clients[message.client]
        keys = message.chain.sequence_hashes[message.start : message.stop]
        cohorts, pins = self._book.cohorts, self._book.pins
        for hash_ in keys:
            cohort = cohorts.get(hash_)
            if cohort is None or not cohort.resident:
                raise InvariantViolation(f"{self.name}: load of a block that is not resident")
            pins[hash_] = pins.get(hash_, 0) + 1
        self._evictable.remove(keys)
        number = self._new_transfer(message.client, message.request, Direction.HOST_TO_DEVICE, keys)
        end_ms = self._submit(number, client, now_ms, max(now_ms, message.from_ms))
        self.outbox.append(
            ev.LoadQueued(
                request=message.request,
                transfer=number,
                block_hashes=keys,
                completes_at_ms=end_ms,
                **client.who,
            )
        )
        return number

    # -- storing

    def prepare_store(self, message: PrepareStore, now_ms: float) -> StoreReply:
        """See ``PrepareStore``. A RETRY changes nothing but the transport's clock."""
        keys = message.chain.sequence_hashes
        cohorts = self._book.cohorts
        wanted = keys[message.start : message.stop]
        present = cohorts.keys() & wanted
        if present:
            missing = [position for position, hash_ in enumerate(wanted, message.start) if hash_ not in present]
        else:
            missing = list(range(message.start, message.start + len(wanted)))
        if not missing:
            return StoreReply(StoreOutcome.PRESENT, None, ())
        if message.busy_sources and not message.busy_sources.isdisjoint(missing):
            return StoreReply(StoreOutcome.NOT_READY, None, ())
        self._catch_up(now_ms)
        client = self._clients[message.client]
        block_hashes = tuple([keys[position] for position in missing]) if present else wanted
        needed = len(missing) - (self.capacity_blocks - self.used_blocks)
        victims = self._evictable.take_oldest(needed, present) if needed > 0 else []
        if victims is None:
            self.outbox.append(
                ev.StorePutOff(
                    request=message.request,
                    block_hashes=block_hashes,
                    never_fits=len(wanted) > self.capacity_blocks,
                    **client.who,
                )
            )
            return StoreReply(StoreOutcome.RETRY, None, ())
        if victims:
            self._evict(tuple(victims))
        self._residency += 1
        cohort = _Cohort(_runs(message.chain, missing))
        for hash_ in block_hashes:
            cohorts[hash_] = cohort
        number = self._new_transfer(message.client, message.request, Direction.DEVICE_TO_HOST, block_hashes, cohort)
        client.prepared.append(number)
        self.outbox.append(
            ev.StorePrepared(request=message.request, transfer=number, block_hashes=block_hashes, **client.who)
        )
        self.make_recent(keys)
        return StoreReply(StoreOutcome.PREPARED, number, tuple(missing))

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
            elif transfer.book is not self._book or transfer.cohort is None:
                self._give_up_store(transfer)
                self.outbox.append(ev.StoreDropped(pool=self.name, transfer=number, ended_ms=end_ms))
            else:
                transfer.cohort.resident = True
                self._evictable.add(transfer.block_hashes)
                self.outbox.append(ev.StoreLanded(pool=self.name, transfer=number, ended_ms=end_ms))
                for run in transfer.cohort.runs:
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
        return len(self._book.cohorts) + self._cleared_blocks

    @property
    def resident_blocks(self) -> int:
        return sum(cohort.resident for cohort in self._book.cohorts.values())

    def block(self, hash_: int) -> tuple[bool, int] | None:
        """One block: (resident, pins), None if it is not here."""
        cohort = self._book.cohorts.get(hash_)
        return None if cohort is None else (cohort.resident, self._book.pins.get(hash_, 0))

    def contents(self) -> dict[int, tuple[bool, int]]:
        """Every block: (resident, pins)."""
        pins = self._book.pins
        return {hash_: (cohort.resident, pins.get(hash_, 0)) for hash_, cohort in self._book.cohorts.items()}

    def transfers_under_way(self) -> list[str]:
        """One line a transfer, for people."""
        return [
            f"transfer {number} ({transfer.direction.name.lower()}, {len(transfer.block_hashes)} blocks, "
            f"request {transfer.request})"
            for number, transfer in self._transfers.items()
        ]

    def check(self) -> None:
        """Raise InvariantViolation unless the books agree. Costs O(blocks)."""
        if not self.used_blocks <= self.capacity_blocks:
            raise InvariantViolation(f"{self.name}: {self.used_blocks} blocks in {self.capacity_blocks}")
        older = dict.fromkeys(transfer.book for transfer in self._transfers.values())
        older.pop(self._book, None)
        if not sum(len(book.cohorts) for book in older) == self._cleared_blocks:
            raise InvariantViolation(f"{self.name}: {self._cleared_blocks} cleared blocks, transfers use others")
        for book in (self._book, *older):
            self._check_book(book)
        if not self._evictable.are_among(self._book.cohorts.keys()):
            raise InvariantViolation(f"{self.name}: the eviction order holds blocks that are gone")
        if not self._untold == {number for number, own in self._clients.items() if not self._has_told(own)}:
            raise InvariantViolation(f"{self.name}: clients {sorted(self._untold)} are taken for those to be told")

    def _check_book(self, book: _Book) -> None:
        pins: dict[int, int] = {}
        pending: set[int] = set()
        for transfer in self._transfers.values():
            if transfer.book is not book:
                continue
            if transfer.direction is Direction.HOST_TO_DEVICE:
                for hash_ in transfer.block_hashes:
                    pins[hash_] = pins.get(hash_, 0) + 1
            else:
                pending.update(transfer.block_hashes)
        if not book.pins.keys() <= book.cohorts.keys():
            raise InvariantViolation(f"{self.name}: blocks are pinned that are gone")
        for hash_, cohort in book.cohorts.items():
            pinned = book.pins.get(hash_, 0)
            if not pinned == pins.get(hash_, 0):
                raise InvariantViolation(f"{self.name}: block {hash_} has {pinned} pins for {pins.get(hash_, 0)} loads")
            if not cohort.resident == (hash_ not in pending):
                raise InvariantViolation(f"{self.name}: block {hash_} is pending without a store, or the reverse")
            is_evictable = book is self._book and hash_ in self._evictable
            if not is_evictable == (cohort.resident and not pinned):
                raise InvariantViolation(f"{self.name}: block {hash_} is wrongly in or out of the eviction order")

    # -- inside

    def _has_told(self, own: _Client) -> bool:
        """Whether a tick would tell a client nothing."""
        return own.seen == self._ended and not own.changes and not own.completions

    def _catch_up(self, now_ms: float) -> None:
        if self.shared:
            self.advance(now_ms)

    def _new_transfer(
        self,
        client: int,
        request: int,
        direction: Direction,
        block_hashes: tuple[int, ...],
        cohort: _Cohort | None = None,
    ) -> int:
        number = self._next_transfer
        self._next_transfer += 1
        self._transfers[number] = _Transfer(client, request, direction, block_hashes, self._book, cohort)
        return number

    def _submit(self, number: int, client: _Client, now_ms: float, from_ms: float) -> float | None:
        transfer = self._transfers[number]
        if transfer.submitted:
            raise InvariantViolation(f"{self.name}: transfer {number} is submitted twice")
        transfer.submitted = True
        self._submitted += 1
        size_bytes = self.block_bytes * len(transfer.block_hashes)
        return self._transport.submit(
            number, transfer.client, client.joined.link, transfer.direction, size_bytes, now_ms, from_ms
        )

    def _evict(self, block_hashes: tuple[int, ...]) -> None:
        self._take_out(block_hashes)
        self.outbox.append(ev.HostBlocksEvicted(pool=self.name, block_hashes=block_hashes))
        self._announce(PoolChange(stored=False, block_hashes=block_hashes))

    def _take_out(self, block_hashes: Iterable[int]) -> None:
        """Blocks that nobody used, and which are not evictable any more, are here no more."""
        self._residency += 1
        cohorts = self._book.cohorts
        for hash_ in block_hashes:
            del cohorts[hash_]

    def _give_up_store(self, transfer: _Transfer) -> None:
        for hash_ in transfer.block_hashes:
            del transfer.book.cohorts[hash_]
        if transfer.book is not self._book:
            self._cleared_blocks -= len(transfer.block_hashes)

    def make_recent(self, keys: Sequence[int]) -> None:
        """Make each evictable block youngest, last to first, so that a prefix is never older than what follows it."""
        self._evictable.touch(keys)

    def _unpin(self, transfer: _Transfer) -> None:
        idle = []
        book, pins = transfer.book, transfer.book.pins
        for hash_ in transfer.block_hashes:
            left = pins.get(hash_, 0) - 1
            if left < 0:
                raise InvariantViolation(f"{self.name}: block {hash_} is unpinned more often than pinned")
            if left:
                pins[hash_] = left
            else:
                del pins[hash_]
                idle.append(hash_)
        if book is self._book:
            self._evictable.add(idle)
        elif idle:
            for hash_ in idle:
                del book.cohorts[hash_]
            self._cleared_blocks -= len(idle)
            self.outbox.append(ev.ClearedBlocksFreed(pool=self.name, block_hashes=tuple(idle)))

    def _announce(self, change: PoolChange) -> None:
        for client in self._clients.values():
            client.changes.append(change)
        self._untold.update(self._clients)

    def _resident_runs(self) -> list[PoolChange]:
        """All that is resident, parents before children; a run breaks where the next block's parent is another one."""
        runs: list[list[tuple[int, int, int, int | None]]] = []
        for place in self._book.places():
            if runs and place[3] == runs[-1][-1][1]:
                runs[-1].append(place)
            else:
                runs.append([place])
        return [
            PoolChange(
                stored=True,
                block_hashes=tuple([hash_ for _, hash_, _, _ in run]),
                tokens_hashes=tuple([own for _, _, own, _ in run]),
                parent_hash=run[0][3],
                start_position=run[0][0],
            )
            for run in runs
        ]


def _runs(chain: BlockChain, positions: Sequence[int]) -> list[PoolChange]:
    """Blocks of a prompt that become resident."""
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
