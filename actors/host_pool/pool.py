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
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
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
from g2sim.actors.host_pool.transfers import Direction, Transport
from g2sim.actors.kv.events import removed_by_clear
from g2sim.bus.errors import InvariantViolation

_ROUNDING_MS = 1e-3
"""Far more than a transfer's end moves when bytes move in other steps."""
_MAX_TOUCHED = 64
"""Prompts whose touches are put off; a bound on memory."""


class _Entry:
    """One block: pending or resident, its pins, and where it belongs in its sequence."""

    __slots__ = ("parent_hash", "pins", "position", "resident", "tokens_hash")

    def __init__(self, tokens_hash: int, parent_hash: int | None, position: int) -> None:
        self.resident = False
        self.pins = 0
        self.tokens_hash = tokens_hash
        self.parent_hash = parent_hash
        self.position = position


class _Transfer:
    """``entries``: the book that its blocks are in."""

    __slots__ = ("block_hashes", "client", "direction", "entries", "request", "submitted")

    def __init__(
        self,
        client: int,
        request: int,
        direction: Direction,
        block_hashes: tuple[int, ...],
        entries: dict[int, _Entry],
    ) -> None:
        self.client = client
        self.request = request
        self.direction = direction
        self.block_hashes = block_hashes
        self.entries = entries
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
        self._entries: dict[int, _Entry] = {}
        self._cleared_blocks = 0  # in older books
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._transfers: dict[int, _Transfer] = {}
        self._clients: dict[int, _Client] = {}
        self._next_transfer = 0
        self._ended = 0
        self._residency = 0
        self._submitted = 0
        self._touched: dict[int, Sequence[int]] = {}

    # -- membership

    def join(self, message: Join) -> tuple[PoolChange, ...]:
        """Add a client. Returns the resident blocks as runs, parents before children; pending ones come later."""
        if message.client in self._clients:
            raise InvariantViolation(f"{self.name}: client {message.client} joins twice")
        client = self._clients[message.client] = _Client(message, self.name, self._ended)
        self.outbox.append(ev.ClientJoined(**client.who))
        resident = [(entry.position, hash_) for hash_, entry in self._entries.items() if entry.resident]
        return tuple(self._runs(hash_ for _, hash_ in sorted(resident)))

    def retire(self, client: int, now_ms: float, *, abrupt: bool = False) -> None:
        """Remove a client. What it stored stays, and nobody is told of it on its behalf; see ``Retire``."""
        self.advance(now_ms)
        gone = self._clients.pop(client)
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

    def empty(self) -> None:
        """Lose everything: the memory is gone, and with it the last client.

        Raises: InvariantViolation while there are clients, whose transfers would have to end first.
        """
        if self._clients:
            raise InvariantViolation(f"{self.name}: is emptied while it has clients")
        self._carry_out_touches()
        if self._evictable:
            self._evict(tuple(self._evictable))
        self._transport.restart()

    def clear(self, now_ms: float) -> int:
        """See ``Clear``."""
        self._catch_up(now_ms)
        untold = [change for client in self._clients.values() for change in client.changes]
        if not self._entries and not any(change.stored for change in untold):
            return 0
        self._carry_out_touches()
        unused = tuple(self._evictable)
        self._take_out(unused)
        in_use, self._entries = self._entries, {}
        self._cleared_blocks += len(in_use)
        loading = tuple([hash_ for hash_, entry in in_use.items() if entry.resident])
        self.outbox.append(ev.HostPoolCleared(pool=self.name, block_hashes=unused, loading_hashes=loading))
        for client in self._clients.values():
            told_later = [(change.stored, change.block_hashes) for change in client.changes]
            gone = removed_by_clear(told_later, unused + loading)
            client.changes = [PoolChange(stored=False, block_hashes=gone)] if gone else []
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
        entries, loading = self._entries, message.loading
        matched = 0
        wait = False
        for position in range(message.base_blocks, len(keys)):
            hash_ = keys[position]
            entry = entries.get(hash_)
            if entry is None:
                break
            matched += 1
            if not entry.resident or hash_ in loading:
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
        for hash_ in keys:
            entry = self._entries.get(hash_)
            if entry is None or not entry.resident:
                raise InvariantViolation(f"{self.name}: load of a block that is not resident")
            entry.pins += 1
            self._evictable.pop(hash_, None)
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
        entries = self._entries
        missing = [position for position in range(message.start, message.stop) if keys[position] not in entries]
        if not missing:
            return StoreReply(StoreOutcome.PRESENT, None, ())
        if message.busy_sources and not message.busy_sources.isdisjoint(missing):
            return StoreReply(StoreOutcome.NOT_READY, None, ())
        self._catch_up(now_ms)
        client = self._clients[message.client]
        wanted = keys[message.start : message.stop]
        block_hashes = tuple(keys[position] for position in missing)
        needed = len(missing) - (self.capacity_blocks - self.used_blocks)
        victims = self._victims(needed, set(wanted))
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
        tokens_hashes = message.chain.tokens_hashes
        for position in missing:
            parent = keys[position - 1] if position else None
            entries[keys[position]] = _Entry(tokens_hashes[position], parent, position)
        number = self._new_transfer(message.client, message.request, Direction.DEVICE_TO_HOST, block_hashes)
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
            elif transfer.entries is not self._entries:
                self._give_up_store(transfer)
                self.outbox.append(ev.StoreDropped(pool=self.name, transfer=number, ended_ms=end_ms))
            else:
                for hash_ in transfer.block_hashes:
                    self._entries[hash_].resident = True
                self._make_youngest(transfer.block_hashes)
                self.outbox.append(ev.StoreLanded(pool=self.name, transfer=number, ended_ms=end_ms))
                for run in self._runs(transfer.block_hashes):
                    self._announce(run)
            client = self._clients.get(transfer.client)
            if client is not None:
                client.completions.append(Completion(number, transfer.request, is_load, end_ms))

    def tick(self, client: int, now_ms: float) -> TickReply:
        """Advance, and tell the client what it has not been told."""
        self.advance(now_ms)
        own = self._clients[client]
        if self._has_told(own):
            return NOTHING
        progress = own.seen != self._ended
        own.seen = self._ended
        done: list[Completion] = []
        while own.completions and own.completions[0].end_ms <= now_ms:
            done.append(own.completions.popleft())
        changes, own.changes = own.changes, []
        return TickReply(tuple(done), progress, tuple(changes))

    def boundary(self, client: int, now_ms: float) -> BoundaryReply:
        """The end of a client's pass; see ``PassBoundary``."""
        own = self._clients[client]
        if not self._transfers and self._has_told(own):
            self._transport.advance(now_ms)
            return QUIET
        before = self.tick(client, now_ms)
        submitted = self.submit_prepared(client, now_ms)
        return BoundaryReply(before, submitted, self.tick(client, now_ms))

    def news_at_ms(self, message: NewsAt) -> float:
        """See ``NewsAt``. What is under way may end a little sooner than it seems, because of rounding."""
        own, look_up = self._clients[message.client], message.look_up
        if own.prepared or not self._has_told(own):
            return -math.inf
        if look_up is not None and (look_up.again is None or look_up.again.residency != self._residency):
            return -math.inf
        next_ms = self._transport.next_event_ms()
        return math.inf if next_ms is None else next_ms - _ROUNDING_MS

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
        return [number for number, own in self._clients.items() if not self._has_told(own)]

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
        return len(self._entries) + self._cleared_blocks

    @property
    def resident_blocks(self) -> int:
        return sum(entry.resident for entry in self._entries.values())

    def block(self, hash_: int) -> tuple[bool, int] | None:
        """One block: (resident, pins), None if it is not here."""
        entry = self._entries.get(hash_)
        return None if entry is None else (entry.resident, entry.pins)

    def contents(self) -> dict[int, tuple[bool, int]]:
        """Every block: (resident, pins)."""
        return {hash_: (entry.resident, entry.pins) for hash_, entry in self._entries.items()}

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
        older = {id(transfer.entries): transfer.entries for transfer in self._transfers.values()}
        older.pop(id(self._entries), None)
        if not sum(map(len, older.values())) == self._cleared_blocks:
            raise InvariantViolation(f"{self.name}: {self._cleared_blocks} cleared blocks, transfers use others")
        for entries in (self._entries, *older.values()):
            self._check_book(entries)
        if not self._evictable.keys() <= self._entries.keys():
            raise InvariantViolation(f"{self.name}: the eviction order holds blocks that are gone")

    def _check_book(self, entries: dict[int, _Entry]) -> None:
        pins: dict[int, int] = {}
        pending: set[int] = set()
        for transfer in self._transfers.values():
            if transfer.entries is not entries:
                continue
            if transfer.direction is Direction.HOST_TO_DEVICE:
                for hash_ in transfer.block_hashes:
                    pins[hash_] = pins.get(hash_, 0) + 1
            else:
                pending.update(transfer.block_hashes)
        for hash_, entry in entries.items():
            if not entry.pins == pins.get(hash_, 0):
                raise InvariantViolation(
                    f"{self.name}: block {hash_} has {entry.pins} pins for {pins.get(hash_, 0)} loads"
                )
            if not entry.resident == (hash_ not in pending):
                raise InvariantViolation(f"{self.name}: block {hash_} is pending without a store, or the reverse")
            is_evictable = entries is self._entries and hash_ in self._evictable
            if not is_evictable == (entry.resident and entry.pins == 0):
                raise InvariantViolation(f"{self.name}: block {hash_} is wrongly in or out of the eviction order")

    # -- inside

    def _has_told(self, own: _Client) -> bool:
        """Whether a tick would tell a client nothing."""
        return own.seen == self._ended and not own.changes and not own.completions

    def _catch_up(self, now_ms: float) -> None:
        if self.shared:
            self.advance(now_ms)

    def _new_transfer(self, client: int, request: int, direction: Direction, block_hashes: Sequence[int]) -> int:
        number = self._next_transfer
        self._next_transfer += 1
        self._transfers[number] = _Transfer(client, request, direction, tuple(block_hashes), self._entries)
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

    def _victims(self, needed: int, spared: set[int]) -> list[int] | None:
        """The ``needed`` oldest evictable blocks outside ``spared``; None if there are not enough."""
        if needed <= 0:
            return []
        self._carry_out_touches()
        victims = []
        for hash_ in self._evictable:
            if hash_ not in spared:
                victims.append(hash_)
                if len(victims) == needed:
                    return victims
        return None

    def _evict(self, block_hashes: tuple[int, ...]) -> None:
        self._take_out(block_hashes)
        self.outbox.append(ev.HostBlocksEvicted(pool=self.name, block_hashes=block_hashes))
        self._announce(PoolChange(stored=False, block_hashes=block_hashes))

    def _take_out(self, block_hashes: Iterable[int]) -> None:
        """Evictable blocks are here no more."""
        self._residency += 1
        for hash_ in block_hashes:
            del self._entries[hash_]
            del self._evictable[hash_]

    def _give_up_store(self, transfer: _Transfer) -> None:
        for hash_ in transfer.block_hashes:
            del transfer.entries[hash_]
        if transfer.entries is not self._entries:
            self._cleared_blocks -= len(transfer.block_hashes)

    def make_recent(self, keys: Sequence[int]) -> None:
        """Make each evictable block youngest, last to first, so that a prefix is never older than what follows it.

        It is done when ages matter: of several touches of one prompt only the last one counts.
        """
        touched = self._touched
        touched.pop(id(keys), None)
        touched[id(keys)] = keys
        if len(touched) > _MAX_TOUCHED:
            self._carry_out_touches()

    def _carry_out_touches(self) -> None:
        evictable = self._evictable
        for keys in self._touched.values():
            for hash_ in reversed(keys):
                if hash_ in evictable:
                    evictable.move_to_end(hash_)
        self._touched.clear()

    def _make_youngest(self, block_hashes: Iterable[int]) -> None:
        self._carry_out_touches()
        for hash_ in sorted(block_hashes):
            self._evictable[hash_] = None
            self._evictable.move_to_end(hash_)

    def _unpin(self, transfer: _Transfer) -> None:
        idle = []
        entries = transfer.entries
        for hash_ in transfer.block_hashes:
            entry = entries[hash_]
            entry.pins -= 1
            if entry.pins < 0:
                raise InvariantViolation(f"{self.name}: block {hash_} is unpinned more often than pinned")
            if entry.pins == 0:
                idle.append(hash_)
        if entries is self._entries:
            self._make_youngest(idle)
        elif idle:
            for hash_ in idle:
                del entries[hash_]
            self._cleared_blocks -= len(idle)
            self.outbox.append(ev.ClearedBlocksFreed(pool=self.name, block_hashes=tuple(idle)))

    def _announce(self, change: PoolChange) -> None:
        for client in self._clients.values():
            client.changes.append(change)

    def _runs(self, block_hashes: Iterable[int]) -> list[PoolChange]:
        """Stored runs; one breaks where the next block's parent is not the block before it."""
        runs: list[list[int]] = []
        last: int | None = None
        for hash_ in block_hashes:
            if last is not None and self._entries[hash_].parent_hash == last:
                runs[-1].append(hash_)
            else:
                runs.append([hash_])
            last = hash_
        return [
            PoolChange(
                stored=True,
                block_hashes=tuple(run),
                tokens_hashes=tuple(self._entries[hash_].tokens_hash for hash_ in run),
                parent_hash=self._entries[run[0]].parent_hash,
                start_position=self._entries[run[0]].position,
            )
            for run in runs
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
