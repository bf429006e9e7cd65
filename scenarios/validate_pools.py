"""Host pools in a run log, held against what ranks announce of them.

Owns: each pool's own history (what landed, what was evicted) and how far each client has announced it; visibility not
before the copy ends; capacity and pins of pools; play isolation of loads. Refuses to know: residency of ranks.

A client must announce exactly the pool's changes, in their order, from its join on, after a snapshot of what was
resident then. The history is kept only from where the slowest client is. A clear ends the history: a client then must
announce the removal of what it has announced as resident, and nothing of what it has not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs

from g2sim.actors.traffic.events import RequestArrived
from g2sim.bus.events import BY_CLASS
from g2sim.scenarios.validate_state import Place

RankId = tuple[str, int]
"""Worker name and rank, as in verdicts."""

Say = Callable[[str, Place, RankId | None, str], None]
"""Takes code, place, rank and problem."""

_NEW: Final = -1


@attrs.define(slots=True)
class _Client:
    """What it must announce: the rest of its snapshot, ``owed``; that what a clear took is gone, ``cleared``; then the
    pool's changes from number ``next_idx`` on.
    """

    next_idx: int
    owed: set[int]
    cleared: set[int] = attrs.Factory(set)
    retired: bool = False
    lost: bool = False


@attrs.define(slots=True)
class _Transfer:
    block_hashes: tuple[int, ...]
    is_load: bool
    cleared: bool = False


class _Pool:
    def __init__(self, capacity: int | None) -> None:
        self.capacity = capacity
        self.resident: dict[int, str | None] = {}  # hash -> cache id that stored it
        self.pending: dict[int, str | None] = {}
        self.kept = 0  # blocks that a clear has left to transfers under way
        self.pins: dict[int, int] = {}
        self.transfers: dict[int, _Transfer] = {}
        self.clients: dict[RankId, _Client] = {}
        self.history: deque[tuple[bool, int]] = deque()  # stored or not, hash
        self.first_idx = 0  # number of history[0]

    @property
    def next_idx(self) -> int:
        return self.first_idx + len(self.history)

    def trim(self) -> None:
        slowest = min((c.next_idx for c in self.clients.values() if not (c.retired or c.lost)), default=self.next_idx)
        while self.first_idx < slowest and self.history:
            self.history.popleft()
            self.first_idx += 1


class PoolAudit:
    """All host pools of one run log.

    Args:
        say: takes findings.
        capacity: role -> most blocks of a pool, when known.
    """

    def __init__(self, say: Say, capacity: dict[str, int]) -> None:
        self._say = say
        self._capacity = capacity
        self._pools: dict[str, _Pool] = {}
        self._pool_of: dict[RankId, _Pool] = {}
        self._cache_ids: dict[int, str] = {}  # open request -> its cache id

    def feed(self, place: Place, tag: str, values: Sequence[Any]) -> None:
        """Take one record that is no KV event."""
        handler = _HANDLERS.get(tag)
        if handler is not None:
            handler(self, place, *values)

    def announced(self, place: Place, rank: RankId, stored: bool, block_hashes: Sequence[int]) -> None:
        """A rank published a change of its host tier."""
        pool = self._pool_of.get(rank)
        if pool is None:
            return
        client = pool.clients[rank]
        if client.lost:
            return
        for hash_ in block_hashes:
            if client.owed and stored and hash_ in client.owed:
                client.owed.discard(hash_)
                continue
            if client.owed:
                self._lose(client, "KV623", place, rank, f"{len(client.owed)} resident blocks are not in its snapshot")
                return
            if client.cleared:
                if not stored and hash_ in client.cleared:
                    client.cleared.discard(hash_)
                    continue
                problem = f"{'store' if stored else 'removal'} of {hash_} comes before removals of a clear"
                self._lose(client, "KV702", place, rank, problem)
                return
            if not self._follows(pool, client, place, rank, stored, hash_):
                return
        pool.trim()

    def finish(self, place: Place) -> None:
        for pool in self._pools.values():
            for rank, client in pool.clients.items():
                behind = pool.next_idx - client.next_idx + len(client.cleared)
                if behind and not (client.retired or client.lost):
                    self._say("KV703", place, rank, f"{behind} changes of its host pool are not announced")

    def _follows(self, pool: _Pool, client: _Client, place: Place, rank: RankId, stored: bool, hash_: int) -> bool:
        """Whether a change is the next of the pool's history."""
        at = client.next_idx - pool.first_idx
        if at < len(pool.history) and pool.history[at] == (stored, hash_):
            client.next_idx += 1
            return True
        what = f"{'store' if stored else 'removal'} of {hash_}"
        if stored and hash_ in pool.pending:
            self._lose(client, "KV801", place, rank, f"{what}: its copy has not ended")
        elif (stored, hash_) in list(pool.history)[at:]:
            sign, other = pool.history[at]
            wanted = f"{'store' if sign else 'removal'} of {other}"
            self._lose(client, "KV702", place, rank, f"{what} comes before the pool's {wanted}")
        else:
            self._lose(client, "KV701", place, rank, f"{what}: the pool made no such change")
        return False

    def _lose(self, client: _Client, code: str, place: Place, rank: RankId, problem: str) -> None:
        """One finding for a client that left the pool's history; nothing after that can be told."""
        client.lost = True
        self._say(code, place, rank, problem)

    def _pool(self, name: str) -> _Pool:
        pool = self._pools.get(name)
        if pool is None:
            pool = self._pools[name] = _Pool(None)
        return pool

    def _joined(self, place: Place, name: str, worker: int, role: str, dp_rank: int) -> None:
        pool = self._pool(name)
        pool.capacity = self._capacity.get(role)
        rank = (f"{role}-{worker}", dp_rank)
        pool.clients[rank] = _Client(pool.next_idx, set(pool.resident))
        self._pool_of[rank] = pool

    def _left(self, place: Place, name: str, worker: int, role: str, dp_rank: int, loads: Any, stores: Any) -> None:
        pool = self._pool(name)
        client = pool.clients.get((f"{role}-{worker}", dp_rank))
        if client is not None:
            client.retired = True
        for number in loads:
            self._unpin(pool, pool.transfers.pop(number, None))
        for number in stores:
            gone = pool.transfers.pop(number, None)
            if gone is not None and gone.cleared:
                pool.kept -= len(gone.block_hashes)
                continue
            for hash_ in gone.block_hashes if gone else ():
                pool.pending.pop(hash_, None)
        pool.trim()

    def _prepared(
        self,
        place: Place,
        name: str,
        worker: int,
        role: str,
        dp_rank: int,
        request: int,
        transfer: int,
        block_hashes: tuple[int, ...],
    ) -> None:
        pool = self._pool(name)
        pool.transfers[transfer] = _Transfer(block_hashes, False)
        cache_id = self._cache_ids.get(request)
        pool.pending.update(dict.fromkeys(block_hashes, cache_id))
        held = len(pool.resident) + len(pool.pending) + pool.kept
        if pool.capacity is not None and held > pool.capacity:
            self._say("KV502", place, None, f"{name} holds {held} blocks, capacity {pool.capacity}")

    def _landed(self, place: Place, name: str, transfer: int, _ended_ms: float) -> None:
        pool = self._pool(name)
        done = pool.transfers.pop(transfer, None)
        for hash_ in done.block_hashes if done and not done.cleared else ():
            pool.resident[hash_] = pool.pending.pop(hash_, None)
            pool.history.append((True, hash_))
        pool.trim()

    def _evicted(self, place: Place, name: str, block_hashes: tuple[int, ...]) -> None:
        pool = self._pool(name)
        for hash_ in block_hashes:
            if hash_ not in pool.resident:
                state = "pending" if hash_ in pool.pending else "absent"
                self._say("KV503", place, None, f"{name} evicts {hash_}, which is {state}")
                continue
            if pool.pins.get(hash_):
                self._say("KV503", place, None, f"{name} evicts {hash_}, which is pinned")
            del pool.resident[hash_]
            pool.history.append((False, hash_))
        pool.trim()

    def _cleared(self, place: Place, name: str, block_hashes: tuple[int, ...], loading_hashes: tuple[int, ...]) -> None:
        pool = self._pool(name)
        for hash_ in block_hashes:
            if hash_ not in pool.resident or pool.pins.get(hash_):
                state = "pinned" if hash_ in pool.resident else "not resident"
                self._say("KV503", place, None, f"{name} frees the memory of {hash_} in a clear, which is {state}")
        for client in pool.clients.values():
            known = set(pool.resident) - client.owed
            for stored, hash_ in reversed(list(pool.history)[client.next_idx - pool.first_idx :]):
                (known.discard if stored else known.add)(hash_)
            client.cleared |= known
            client.owed = set()
            client.next_idx = pool.next_idx
        pool.kept += len(pool.pending) + len(loading_hashes)
        pool.resident.clear()
        pool.pending.clear()
        pool.pins.clear()
        for transfer in pool.transfers.values():
            transfer.cleared = True
        pool.trim()

    def _freed(self, place: Place, name: str, block_hashes: tuple[int, ...]) -> None:
        self._pool(name).kept -= len(block_hashes)

    def _dropped(self, place: Place, name: str, transfer: int, _ended_ms: float) -> None:
        pool = self._pool(name)
        done = pool.transfers.pop(transfer, None)
        pool.kept -= len(done.block_hashes) if done else 0

    def _load(
        self,
        place: Place,
        name: str,
        worker: int,
        role: str,
        dp_rank: int,
        request: int,
        transfer: int,
        block_hashes: tuple[int, ...],
        _completes_at_ms: float | None,
    ) -> None:
        pool = self._pool(name)
        pool.transfers[transfer] = _Transfer(block_hashes, True)
        cache_id = self._cache_ids.get(request)
        for hash_ in block_hashes:
            pool.pins[hash_] = pool.pins.get(hash_, 0) + 1
            owner = pool.resident.get(hash_)
            if owner != cache_id and hash_ in pool.resident:
                problem = f"request {request} of cache id {cache_id} loads {hash_}, which cache id {owner} stored"
                self._say("KV811", place, (f"{role}-{worker}", dp_rank), problem)
                break

    def _load_done(self, place: Place, name: str, transfer: int, _ended_ms: float) -> None:
        pool = self._pool(name)
        self._unpin(pool, pool.transfers.pop(transfer, None))

    @staticmethod
    def _unpin(pool: _Pool, load: _Transfer | None) -> None:
        for hash_ in load.block_hashes if load and not load.cleared else ():
            pins = pool.pins.pop(hash_, 1) - 1
            if pins > 0:
                pool.pins[hash_] = pins

    def _arrived(self, place: Place, *values: Any) -> None:
        cache_id = values[_CACHE_ID]
        if cache_id is not None:
            self._cache_ids[values[0]] = cache_id

    def _ended(self, place: Place, worker: int, role: str, dp_rank: int, request: int, status: str, *_: Any) -> None:
        if role != "prefill" or status != "completed":  # a prefilled request lives on in the decode pool
            self._cache_ids.pop(request, None)


_CACHE_ID: Final = BY_CLASS[RequestArrived].fields.index("cache_id")

_HANDLERS: Final[dict[str, Callable[..., None]]] = {
    "hp.join": PoolAudit._joined,
    "hp.left": PoolAudit._left,
    "hp.prep": PoolAudit._prepared,
    "hp.land": PoolAudit._landed,
    "hp.drop": PoolAudit._dropped,
    "hp.evict": PoolAudit._evicted,
    "hp.clear": PoolAudit._cleared,
    "hp.free": PoolAudit._freed,
    "hp.load": PoolAudit._load,
    "hp.done": PoolAudit._load_done,
    "tr.arr": PoolAudit._arrived,
    "wk.fin": PoolAudit._ended,
}

POOL_TAGS: Final = frozenset(_HANDLERS)
"""Tags of the records that ``PoolAudit.feed`` has a use for."""
