"""What the event log says the state is, and whether the actors agree (audits A to E, C3).

``StateFold`` rebuilds residency and the request table from events alone; ``Verifier`` holds it against live actors. The
two share no code with the actors' own books.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from g2sim.actors.handoff.events import DestinationActivated, SourceHeld
from g2sim.actors.host_pool import events as hp
from g2sim.actors.host_pool.pool import HostPool
from g2sim.actors.kv.events import BlocksCleared, BlocksRemoved, BlocksStored, Tier
from g2sim.actors.membership.events import WorkerCrashed
from g2sim.actors.traffic.events import RequestArrived
from g2sim.actors.worker import events as wk
from g2sim.actors.worker.actor import WorkerActor
from g2sim.bus.errors import InvariantViolation
from g2sim.bus.events import Record
from g2sim.scenarios.report import SHARED_POOL

RankId = tuple[str, int, int]
"""(role, worker, dp_rank)."""


@attrs.define(slots=True)
class RankState:
    """One rank as its events show it: block hashes by tier, and requests by state."""

    device: set[int] = attrs.Factory(set)
    host: set[int] = attrs.Factory(set)
    waiting: set[int] = attrs.Factory(set)
    running: set[int] = attrs.Factory(set)
    next_event_id: int = 0


@attrs.define(slots=True)
class PoolState:
    """One host pool as its events show it: hash -> [resident, pins], and the blocks of transfers under way.

    After a clear ``cleared`` has those of the transfers that were under way, and ``kept`` counts the memory they still
    take, by hash.
    """

    blocks: dict[int, list[int]] = attrs.Factory(dict)
    transfers: dict[int, tuple[int, ...]] = attrs.Factory(dict)
    cleared: set[int] = attrs.Factory(set)
    kept: Counter[int] = attrs.Factory(Counter)

    def end(self, transfer: int) -> tuple[tuple[int, ...], bool]:
        """Forget a transfer. Returns its blocks, and whether the pool was cleared while it was under way."""
        was_cleared = transfer in self.cleared
        self.cleared.discard(transfer)
        return self.transfers.pop(transfer), was_cleared

    def free(self, block_hashes: Iterable[int]) -> None:
        """Memory that a clear has left to transfers is free."""
        for hash_ in block_hashes:
            if not self.kept[hash_]:
                raise InvariantViolation(f"memory of block {hash_} is freed that no clear has left to a transfer")
            self.kept[hash_] -= 1
        self.kept = +self.kept


class StateFold:
    """State of a deployment, folded from events in log order.

    Attributes:
        ranks, pools: by id and by name.
        open_requests: arrived and not ended; ``ended`` counts ends by status.
    Raises: InvariantViolation from ``apply`` for an event that contradicts what came before.
    """

    def __init__(self) -> None:
        self.ranks: dict[RankId, RankState] = {}
        self.pools: dict[str, PoolState] = {}
        self.open_requests: set[int] = set()
        self.ended: dict[str, int] = {}
        self.now_ms = 0.0

    def apply(self, record: Record) -> None:
        self.now_ms = record.time_ms
        handler = _HANDLERS.get(type(record.event))
        if handler is not None:
            handler(self, record.event)

    def snapshot(self) -> dict[str, Any]:
        """The whole state as plain values, for comparison."""
        return {
            "now_ms": self.now_ms,
            "ranks": {
                rank_id: (sorted(s.device), sorted(s.host), sorted(s.waiting), sorted(s.running), s.next_event_id)
                for rank_id, s in sorted(self.ranks.items())
            },
            "pools": {
                name: {hash_: tuple(entry) for hash_, entry in sorted(pool.blocks.items())}
                for name, pool in sorted(self.pools.items())
            },
            "open_requests": sorted(self.open_requests),
            "ended": dict(sorted(self.ended.items())),
        }

    # -- ranks

    def _rank(self, event: Any) -> RankState:
        rank_id = (event.role, event.worker, event.dp_rank)
        state = self.ranks.get(rank_id)
        if state is None:
            state = self.ranks[rank_id] = RankState()
        return state

    def _numbered(self, event: Any) -> RankState:
        state = self._rank(event)
        if event.event_id != state.next_event_id:
            raise InvariantViolation(
                f"{event.role}-{event.worker}/{event.dp_rank}: KV event {event.event_id} follows "
                f"{state.next_event_id - 1}"
            )
        state.next_event_id += 1
        return state

    def _stored(self, event: BlocksStored) -> None:
        state = self._numbered(event)
        tier = state.device if event.tier == Tier.DEVICE else state.host
        if not tier.isdisjoint(event.block_hashes):
            raise InvariantViolation(f"KV event {event.event_id} stores a block that is resident on {event.tier}")
        tier.update(event.block_hashes)

    def _removed(self, event: BlocksRemoved) -> None:
        state = self._numbered(event)
        tier = state.device if event.tier == Tier.DEVICE else state.host
        if not tier.issuperset(event.block_hashes):
            raise InvariantViolation(f"KV event {event.event_id} removes a block that is not resident on {event.tier}")
        tier.difference_update(event.block_hashes)

    def _cleared(self, event: BlocksCleared) -> None:
        state = self._numbered(event)
        if event.tier != Tier.HOST_PINNED:
            state.device.clear()
        if event.tier != Tier.DEVICE:
            state.host.clear()

    def _queued(self, event: wk.RequestQueued) -> None:
        self._rank(event).waiting.add(event.request)

    def _admitted(self, event: wk.RequestAdmitted) -> None:
        state = self._rank(event)
        state.waiting.remove(event.request)
        state.running.add(event.request)

    def _preempted(self, event: wk.RequestPreempted) -> None:
        state = self._rank(event)
        state.running.remove(event.request)
        state.waiting.add(event.request)

    def _ended(self, event: wk.RequestEnded) -> None:
        state = self._rank(event)
        if not event.leaves_later:
            state.running.discard(event.request)
        state.waiting.discard(event.request)
        if event.request not in self.open_requests:
            raise InvariantViolation(f"request {event.request} ends twice, or never arrived")
        self.open_requests.remove(event.request)
        self.ended[event.status] = self.ended.get(event.status, 0) + 1

    def _left(self, event: wk.CanceledRequestLeft) -> None:
        self._rank(event).running.discard(event.request)

    def _held(self, event: SourceHeld) -> None:
        self._rank(event).running.remove(event.request)

    def _activated(self, event: DestinationActivated) -> None:
        self._rank(event).waiting.add(event.request)

    def _crashed(self, event: WorkerCrashed) -> None:
        """Nothing is left of a worker's ranks; what its host pools lose they say themselves."""
        for role, worker, dp_rank in self.ranks:
            if (role, worker) == (event.role, event.worker):
                self.ranks[role, worker, dp_rank] = RankState()

    def _arrived(self, event: RequestArrived) -> None:
        self.open_requests.add(event.request)

    # -- host pools

    def _pool(self, event: Any) -> PoolState:
        state = self.pools.get(event.pool)
        if state is None:
            state = self.pools[event.pool] = PoolState()
        return state

    def _prepared(self, event: hp.StorePrepared) -> None:
        pool = self._pool(event)
        pool.transfers[event.transfer] = event.block_hashes
        for hash_ in event.block_hashes:
            if hash_ in pool.blocks:
                raise InvariantViolation(f"{event.pool}: transfer {event.transfer} stores a block that is known")
            pool.blocks[hash_] = [0, 0]

    def _landed(self, event: hp.StoreLanded) -> None:
        pool = self._pool(event)
        block_hashes, was_cleared = pool.end(event.transfer)
        if was_cleared:
            raise InvariantViolation(f"{event.pool}: store {event.transfer} of before a clear lands")
        for hash_ in block_hashes:
            pool.blocks[hash_][0] = 1

    def _dropped(self, event: hp.StoreDropped) -> None:
        pool = self._pool(event)
        block_hashes, was_cleared = pool.end(event.transfer)
        if not was_cleared:
            raise InvariantViolation(f"{event.pool}: store {event.transfer} is dropped without a clear")
        pool.free(block_hashes)

    def _evicted(self, event: hp.HostBlocksEvicted) -> None:
        pool = self._pool(event)
        for hash_ in event.block_hashes:
            resident, pins = pool.blocks.pop(hash_)
            if not resident or pins:
                raise InvariantViolation(f"{event.pool}: a block that is pending or pinned is evicted")

    def _pool_cleared(self, event: hp.HostPoolCleared) -> None:
        pool = self._pool(event)
        unused = {hash_ for hash_, (resident, pins) in pool.blocks.items() if resident and not pins}
        loading = {hash_ for hash_, (resident, pins) in pool.blocks.items() if resident and pins}
        if unused != set(event.block_hashes) or loading != set(event.loading_hashes):
            raise InvariantViolation(f"{event.pool}: is cleared of other blocks than it had")
        pool.kept.update(pool.blocks.keys() - unused)
        pool.cleared.update(pool.transfers)
        pool.blocks = {}

    def _freed(self, event: hp.ClearedBlocksFreed) -> None:
        self._pool(event).free(event.block_hashes)

    def _load_queued(self, event: hp.LoadQueued) -> None:
        pool = self._pool(event)
        pool.transfers[event.transfer] = event.block_hashes
        for hash_ in event.block_hashes:
            pool.blocks[hash_][1] += 1

    def _load_finished(self, event: hp.LoadFinished) -> None:
        self._end_load(self._pool(event), event.transfer)

    def _end_load(self, pool: PoolState, transfer: int) -> None:
        block_hashes, was_cleared = pool.end(transfer)
        for hash_ in () if was_cleared else block_hashes:
            pool.blocks[hash_][1] -= 1

    def _retired(self, event: hp.ClientRetired) -> None:
        pool = self._pool(event)
        for transfer in event.canceled_loads:
            self._end_load(pool, transfer)
        for transfer in event.rolled_back_stores:
            block_hashes, was_cleared = pool.end(transfer)
            if was_cleared:
                pool.free(block_hashes)
                continue
            for hash_ in block_hashes:
                del pool.blocks[hash_]


_HANDLERS: Mapping[type[Any], Callable[[StateFold, Any], None]] = {
    BlocksStored: StateFold._stored,
    BlocksRemoved: StateFold._removed,
    BlocksCleared: StateFold._cleared,
    wk.RequestQueued: StateFold._queued,
    wk.RequestAdmitted: StateFold._admitted,
    wk.RequestPreempted: StateFold._preempted,
    wk.RequestEnded: StateFold._ended,
    wk.CanceledRequestLeft: StateFold._left,
    SourceHeld: StateFold._held,
    DestinationActivated: StateFold._activated,
    RequestArrived: StateFold._arrived,
    WorkerCrashed: StateFold._crashed,
    hp.StorePrepared: StateFold._prepared,
    hp.StoreLanded: StateFold._landed,
    hp.StoreDropped: StateFold._dropped,
    hp.HostBlocksEvicted: StateFold._evicted,
    hp.HostPoolCleared: StateFold._pool_cleared,
    hp.ClearedBlocksFreed: StateFold._freed,
    hp.LoadQueued: StateFold._load_queued,
    hp.LoadFinished: StateFold._load_finished,
    hp.ClientRetired: StateFold._retired,
}


_SMALL_BLOCKS = 1024
_WHOLE_EVERY = 256


class Verifier:
    """Holds the fold against live actors: after every turn in which a pass ended, and at the end.

    Requests are compared whole each time, and so are caches of up to ``_SMALL_BLOCKS`` blocks. Of a larger cache every
    ``_WHOLE_EVERY``-th comparison, and the last, are of all its blocks; those between are of the number of blocks, and
    of each block that events have spoken of since.

    To be used as a sink (``record``) and as a turn observer (``turn_ended``) of the run's kernel.
    """

    def __init__(self, workers: Mapping[str, WorkerActor], host_pools: Mapping[str, HostPool]) -> None:
        self.fold = StateFold()
        self.checkpoints = 0
        self._workers = workers
        self._host_pools = host_pools
        self._passes_ended: set[str] = set()
        self._spoken_of: dict[tuple[Any, ...], set[int]] = {}
        self._looks: Counter[tuple[Any, ...]] = Counter()

    def record(self, record: Record) -> None:
        event = record.event
        kind = type(event)
        if kind is BlocksStored or kind is BlocksRemoved:
            self._note((event.role, event.worker, event.dp_rank, event.tier), event.block_hashes)
        elif kind in _POOL_EVENTS:
            pool = self.fold.pools.get(event.pool, PoolState())
            transfers = (*event.canceled_loads, *event.rolled_back_stores) if kind is hp.ClientRetired else ()
            for transfer in transfers or (getattr(event, "transfer", None),):
                self._note((event.pool,), pool.transfers.get(transfer, ()))
            self._note((event.pool,), getattr(event, "block_hashes", ()))
            if kind is hp.HostPoolCleared:
                self._note((event.pool,), pool.blocks)
        self.fold.apply(record)
        if kind is wk.PassEnded:
            self._passes_ended.add(record.source)

    def turn_ended(self) -> None:
        """Compare what the passes that ended in this turn have touched."""
        if not self._passes_ended:
            return
        for name in sorted(self._passes_ended):
            self._compare_worker(self._workers[name], at_boundary=True)
        self._passes_ended.clear()
        self._compare_pools(at_end=False)
        self.checkpoints += 1

    def finish(self) -> None:
        """Compare everything that is at rest."""
        for worker in self._workers.values():
            if not worker.busy:
                self._compare_worker(worker, at_boundary=False)
        self._compare_pools(at_end=True)
        self.checkpoints += 1

    def _compare_worker(self, worker: WorkerActor, *, at_boundary: bool) -> None:
        for place in worker.places:
            rank = place.rank
            who = worker.role, worker.worker, place.dp_rank
            told = self.fold.ranks.get(who, RankState())
            where = f"{worker.name}/{place.dp_rank}"
            spoken_of = self._take((*who, Tier.DEVICE.value))
            if self._looks_whole((where,), len(told.device), at_end=not at_boundary):
                rank.pool.check()
                self._same(f"{where}: G1 residency", rank.cached_hashes(), told.device)
            else:
                live = spoken_of & rank.cached_hashes() if spoken_of else spoken_of
                self._same(f"{where}: G1 residency", live, spoken_of & told.device)
                self._count(f"{where}: blocks in G1", rank.pool.resident_blocks, len(told.device))
            self._same(f"{where}: running requests", {seq.request for seq in rank.running}, told.running)
            waiting = {seq.request for seq in [*rank.queue, *rank.connector]}
            self._same(f"{where}: waiting requests", waiting, told.waiting)
            pool = place.own_pool or self._host_pools.get(SHARED_POOL)
            # What a later rank of this worker has just done to a shared pool an earlier one hears in the next phase.
            has_news = pool is not None and rank.client in pool.untold()
            if at_boundary and pool is not None and not has_news and rank.config.host is not None:
                spoken_of = self._take((*who, Tier.HOST_PINNED.value))
                what = f"{where}: G2 residency as published"
                if self._looks_whole((where, pool.name), len(told.host), at_end=False):
                    resident = {hash_ for hash_, (is_resident, _) in pool.contents().items() if is_resident}
                    self._same(what, resident, told.host)
                elif spoken_of:
                    contents = pool.contents()
                    live = {hash_ for hash_ in spoken_of if contents.get(hash_, (False, 0))[0]}
                    self._same(what, live, spoken_of & told.host)

    def _compare_pools(self, *, at_end: bool) -> None:
        for name, pool in self._host_pools.items():
            state = self.fold.pools.get(name, PoolState())
            told = state.blocks
            spoken_of = self._take((name,))
            looks_whole = self._looks_whole((name,), len(told), at_end=at_end)
            contents = pool.contents() if looks_whole or spoken_of else {}
            if looks_whole:
                pool.check()
                spoken_of = {*contents, *told}
            wrong = []
            for hash_ in spoken_of:
                live = contents.get(hash_)
                if (None if live is None else [int(live[0]), live[1]]) != told.get(hash_):
                    wrong.append(hash_)
            if wrong:
                self._fail(f"{name}: {len(wrong)} blocks differ, e.g. {min(wrong)}")
            self._count(f"{name}: blocks", pool.used_blocks, len(told) + state.kept.total())

    def _looks_whole(self, what: tuple[Any, ...], blocks: int, *, at_end: bool) -> bool:
        self._looks[what] += 1
        return at_end or blocks <= _SMALL_BLOCKS or self._looks[what] % _WHOLE_EVERY == 0

    def _note(self, what: tuple[Any, ...], hashes: Iterable[int]) -> None:
        self._spoken_of.setdefault(what, set()).update(hashes)

    def _take(self, what: tuple[Any, ...]) -> set[int]:
        return self._spoken_of.pop(what, set())

    def _count(self, what: str, live: int, told: int) -> None:
        if live != told:
            self._fail(f"{what}: {live} live, {told} in the log")

    def _same(self, what: str, live: set[int], told: set[int]) -> None:
        if live != told:
            self._fail(f"{what}: only live {sorted(live - told)[:5]}, only in the log {sorted(told - live)[:5]}")

    def _fail(self, what: str) -> None:
        raise InvariantViolation(f"live state and log differ at {self.fold.now_ms!r} ms: {what}")


_POOL_EVENTS = (
    hp.StorePrepared,
    hp.StoreLanded,
    hp.HostBlocksEvicted,
    hp.HostPoolCleared,
    hp.LoadQueued,
    hp.LoadFinished,
    hp.ClientRetired,
)
