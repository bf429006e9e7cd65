"""A run as stretches of time: what requests, passes, transfers and caches did from when to when.

Owns: which events begin and end a stretch, for everything that draws a run over time. Refuses to know: how it is drawn,
and every figure of the report.

The phases of a request split its life without gaps. Up to the first token they are the report's ``ttft_parts_ms``
(``request_rows``), with ``router`` split off ``queue``; ``decode`` lasts to the end, and ``preempted`` is a wait for
blocks that were lost. A restore after a preemption is ``host_load`` too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from g2sim.actors.config import WorkerRole
from g2sim.actors.handoff import events as ho
from g2sim.actors.host_pool import events as hp
from g2sim.actors.kv.events import BlocksCleared, BlocksRemoved, BlocksStored, Tier
from g2sim.actors.membership.events import RequestLost, WorkerCrashed
from g2sim.actors.router.events import PlacementWeighed, RequestPlaced
from g2sim.actors.traffic.events import RequestArrived
from g2sim.actors.worker import events as wk
from g2sim.bus.errors import InvariantViolation
from g2sim.bus.events import Record
from g2sim.scenarios.request_rows import POOL_OF_ROLE

PHASES = (
    "router",
    "queue",
    "host_load",
    "restored_wait",
    "prefill",
    "reservation",
    "transfer",
    "decode_queue",
    "decode",
    "preempted",
)
STORE, LOAD, HANDOFF = "store", "load", "handoff"
"""Kinds of transfers: device to host, host to device, prefill rank to decode rank."""

KvEvent = BlocksStored | BlocksRemoved | BlocksCleared

_PREFILL = WorkerRole.PREFILL.value
_DECODE = WorkerRole.DECODE.value


def rank_name(role: str, worker: int, dp_rank: int) -> str:
    """A rank as the report's table names it, e.g. "agg-0/0"."""
    return f"{POOL_OF_ROLE[role]}-{worker}/{dp_rank}"


@attrs.frozen(slots=True)
class Pass:
    """A pass of one rank, from its start to when its results were visible [ms]."""

    rank: str
    start_ms: float
    end_ms: float
    started: wk.PassStarted
    ended: wk.PassEnded


@attrs.frozen(slots=True)
class Transfer:
    """Blocks or tokens on a link.

    Attributes:
        link: name of the host pool, or "handoff".
        kind: ``STORE``, ``LOAD`` or ``HANDOFF``.
        start_ms: when the link took it; on a private tier's lane, which moves one transfer after the other, its turn.
        amount: blocks; tokens of a hand-off.
        done: False if it was canceled, or was under way at the end of the log.
    """

    link: str
    kind: str
    request: int
    rank: str
    start_ms: float
    end_ms: float
    amount: int
    done: bool


class SpanSink:
    """Takes what a ``SpanFold`` finds, in order of its end. Each method does nothing until a subclass wants it."""

    def arrived(self, time_ms: float, event: RequestArrived) -> None: ...

    def weighed(self, event: PlacementWeighed) -> None: ...

    def placed(self, time_ms: float, event: RequestPlaced) -> None: ...

    def admitted(self, time_ms: float, event: wk.RequestAdmitted) -> None: ...

    def preempted(self, time_ms: float, event: wk.RequestPreempted) -> None: ...

    def phase(self, request: int, name: str, rank: str | None, start_ms: float, end_ms: float) -> None: ...

    def passed(self, span: Pass, first_tokens: list[int]) -> None:
        """``first_tokens``: requests whose first visible token this pass made."""

    def transferred(self, span: Transfer) -> None: ...

    def device_blocks(self, time_ms: float, rank: str, resident: int) -> None:
        """G1 of a rank holds this many blocks from here on, as its KV events say."""

    def host_blocks(self, time_ms: float, pool: str, resident: int, used: int) -> None:
        """A host pool holds this many blocks from here on; ``used`` has those in addition whose store is under way."""

    def kv_event(self, time_ms: float, rank: str, event: KvEvent) -> None: ...

    def crashed(self, time_ms: float, rank: str) -> None:
        """A rank is gone with its worker; when it comes back, its KV events are numbered from 0."""

    def ended(self, time_ms: float, request: int, status: str | None) -> None:
        """``status`` is None for a request that the log leaves open."""


@attrs.define(slots=True)
class _Open:
    """A request that has not ended: its phase since when, and where."""

    phase: str
    since_ms: float
    rank: str | None = None
    before_load: str = "queue"
    has_token: bool = False


@attrs.define(slots=True)
class _Underway:
    link: str
    kind: str
    request: int
    rank: str
    start_ms: float
    amount: int
    end_ms: float | None = None


class SpanFold:
    """Folds records, in log order, into spans for a sink; ``finish`` ends what the log leaves open."""

    def __init__(self, sink: SpanSink) -> None:
        self._sink = sink
        self._now_ms = 0.0
        self._open: dict[int, _Open] = {}
        self._passes: dict[str, tuple[float, wk.PassStarted]] = {}
        self._transfers: dict[tuple[str, int], _Underway] = {}
        self._handoffs: dict[int, _Underway] = {}
        self._lane_free_ms: dict[tuple[str, str], float] = {}
        self._device: dict[str, int] = {}
        self._host: dict[str, list[int]] = {}  # pool -> [resident, pending]

    def apply(self, record: Record) -> None:
        """Take the next record. Raises: InvariantViolation if it ends or changes what never began."""
        self._now_ms = record.time_ms
        handler = _HANDLERS.get(type(record.event))
        if handler is None:
            return
        try:
            handler(self, record.time_ms, record.event)
        except KeyError as missing:
            what = f"{type(record.event).__name__} at {record.time_ms!r} ms"
            raise InvariantViolation(f"{what}: nothing before it speaks of {missing}") from missing

    def finish(self) -> None:
        for underway in [*self._transfers.values(), *self._handoffs.values()]:
            self._transferred(underway, self._now_ms, done=False)
        for request in list(self._open):
            self._close(request, self._now_ms, None)

    # -- requests

    def _arrived(self, time_ms: float, event: RequestArrived) -> None:
        self._open[event.request] = _Open("router", min(event.arrival_ms, time_ms))
        self._sink.arrived(time_ms, event)

    def _weighed(self, _: float, event: PlacementWeighed) -> None:
        self._sink.weighed(event)

    def _placed(self, time_ms: float, event: RequestPlaced) -> None:
        self._sink.placed(time_ms, event)
        if self._open[event.request].phase == "router":
            self._enter(event.request, "queue", time_ms, None)

    def _queued(self, _: float, event: wk.RequestQueued) -> None:
        # A decode rank queues when it is activated, which begins a phase of its own.
        if event.role != _DECODE:
            self._open[event.request].rank = _rank_of(event)

    def _admitted(self, time_ms: float, event: wk.RequestAdmitted) -> None:
        self._sink.admitted(time_ms, event)
        has_token = self._open[event.request].has_token or event.role == _DECODE
        self._enter(event.request, "decode" if has_token else "prefill", time_ms, _rank_of(event))

    def _preempted(self, time_ms: float, event: wk.RequestPreempted) -> None:
        self._sink.preempted(time_ms, event)
        self._enter(event.request, "preempted", time_ms, _rank_of(event))

    def _ended(self, time_ms: float, event: wk.RequestEnded) -> None:
        self._close(event.request, time_ms, event.status)

    def _enter(self, request: int, phase: str, time_ms: float, rank: str | None) -> None:
        state = self._open[request]
        self._sink.phase(request, state.phase, state.rank, state.since_ms, time_ms)
        state.phase, state.since_ms = phase, time_ms
        if rank is not None:
            state.rank = rank

    def _close(self, request: int, time_ms: float, status: str | None) -> None:
        state = self._open.pop(request)
        self._sink.phase(request, state.phase, state.rank, state.since_ms, time_ms)
        self._sink.ended(time_ms, request, status)

    # -- passes

    def _pass_started(self, time_ms: float, event: wk.PassStarted) -> None:
        self._passes[_rank_of(event)] = time_ms, event

    def _pass_ended(self, time_ms: float, event: wk.PassEnded) -> None:
        rank = _rank_of(event)
        first_tokens = []
        if event.role != _PREFILL:
            for request in event.emitted:
                state = self._open[request]
                if not state.has_token:
                    state.has_token = True
                    first_tokens.append(request)
                    if state.phase == "prefill":
                        self._enter(request, "decode", time_ms, None)
        start_ms, started = self._passes.pop(rank)
        self._sink.passed(Pass(rank, start_ms, time_ms, started, event), first_tokens)

    # -- crashes

    def _crashed(self, time_ms: float, event: WorkerCrashed) -> None:
        of_worker = f"{POOL_OF_ROLE[event.role]}-{event.worker}/"
        for rank in [rank for rank in self._device if rank.startswith(of_worker)]:
            self._passes.pop(rank, None)
            self._device[rank] = 0
            self._sink.device_blocks(time_ms, rank, 0)
            self._sink.crashed(time_ms, rank)

    def _lost(self, time_ms: float, event: RequestLost) -> None:
        underway = self._handoffs.pop(event.request, None)
        if underway is not None:
            self._transferred(underway, time_ms, done=False)
        if event.resubmitted:
            self._enter(event.request, "router", time_ms, None)
            self._open[event.request].rank = None

    # -- hand-off

    def _held(self, time_ms: float, event: ho.SourceHeld) -> None:
        self._enter(event.request, "reservation", time_ms, None)

    def _reserved(self, time_ms: float, event: ho.DestinationReserved) -> None:
        self._enter(event.request, "transfer", time_ms, _rank_of(event))

    def _moved(self, time_ms: float, event: ho.TransferStarted) -> None:
        rank = self._open[event.request].rank or ""
        self._handoffs[event.request] = _Underway(
            HANDOFF, HANDOFF, event.request, rank, time_ms, event.tokens, event.end_ms
        )

    def _activated(self, time_ms: float, event: ho.DestinationActivated) -> None:
        underway = self._handoffs.pop(event.request, None)
        if underway is not None:
            # A rank in the middle of a pass activates later than the transfer ends.
            self._transferred(underway, time_ms if underway.end_ms is None else underway.end_ms, done=True)
        self._enter(event.request, "decode_queue", time_ms, _rank_of(event))

    # -- caches and links

    def _kv(self, time_ms: float, event: KvEvent) -> None:
        rank = _rank_of(event)
        self._sink.kv_event(time_ms, rank, event)
        if event.tier == Tier.HOST_PINNED:
            return
        before = self._device.get(rank, 0)
        if isinstance(event, BlocksCleared):
            resident = 0
        elif isinstance(event, BlocksStored):
            resident = before + len(event.block_hashes)
        else:
            resident = before - len(event.block_hashes)
        self._device[rank] = resident
        self._sink.device_blocks(time_ms, rank, resident)

    def _host_changed(self, time_ms: float, pool: str, resident: int, pending: int) -> None:
        counts = self._host.setdefault(pool, [0, 0])
        counts[0] += resident
        counts[1] += pending
        self._sink.host_blocks(time_ms, pool, counts[0], counts[0] + counts[1])

    def _prepared(self, time_ms: float, event: hp.StorePrepared) -> None:
        blocks = len(event.block_hashes)
        self._transfers[event.pool, event.transfer] = _Underway(
            event.pool, STORE, event.request, _rank_of(event), time_ms, blocks
        )
        self._host_changed(time_ms, event.pool, 0, blocks)

    def _submitted(self, time_ms: float, event: hp.StoreSubmitted) -> None:
        underway = self._transfers[event.pool, event.transfer]
        underway.start_ms = self._turn_ms(underway, time_ms, event.completes_at_ms)

    def _landed(self, time_ms: float, event: hp.StoreLanded) -> None:
        underway = self._transfers.pop((event.pool, event.transfer))
        self._host_changed(time_ms, event.pool, underway.amount, -underway.amount)
        self._transferred(underway, event.ended_ms, done=True)

    def _dropped(self, time_ms: float, event: hp.StoreDropped) -> None:
        underway = self._transfers.pop((event.pool, event.transfer))
        self._host_changed(time_ms, event.pool, 0, -underway.amount)
        self._transferred(underway, event.ended_ms, done=True)

    def _evicted(self, time_ms: float, event: hp.HostBlocksEvicted) -> None:
        self._host_changed(time_ms, event.pool, -len(event.block_hashes), 0)

    def _cleared(self, time_ms: float, event: hp.HostPoolCleared) -> None:
        """Memory that loads still read counts as used, like that of a store under way."""
        kept = len(event.loading_hashes)
        self._host_changed(time_ms, event.pool, -len(event.block_hashes) - kept, kept)

    def _freed(self, time_ms: float, event: hp.ClearedBlocksFreed) -> None:
        self._host_changed(time_ms, event.pool, 0, -len(event.block_hashes))

    def _load_queued(self, time_ms: float, event: hp.LoadQueued) -> None:
        blocks = len(event.block_hashes)
        underway = _Underway(event.pool, LOAD, event.request, _rank_of(event), time_ms, blocks)
        underway.start_ms = self._turn_ms(underway, time_ms, event.completes_at_ms)
        self._transfers[event.pool, event.transfer] = underway
        state = self._open[event.request]
        state.before_load = "restored_wait" if state.phase == "queue" else state.phase
        self._enter(event.request, "host_load", time_ms, underway.rank)

    def _load_finished(self, time_ms: float, event: hp.LoadFinished) -> None:
        underway = self._transfers.pop((event.pool, event.transfer))
        self._transferred(underway, event.ended_ms, done=True)
        state = self._open.get(underway.request)  # may have ended: a canceled request's copy runs on
        if state is not None and state.phase == "host_load":
            self._enter(underway.request, state.before_load, time_ms, None)

    def _retired(self, time_ms: float, event: hp.ClientRetired) -> None:
        for transfer in (*event.canceled_loads, *event.rolled_back_stores):
            underway = self._transfers.pop((event.pool, transfer))
            if underway.kind == STORE:
                self._host_changed(time_ms, event.pool, 0, -underway.amount)
            self._transferred(underway, time_ms, done=False)
        for kind in (STORE, LOAD):
            self._lane_free_ms.pop((event.pool, kind), None)

    def _turn_ms(self, underway: _Underway, time_ms: float, completes_at_ms: float | None) -> float:
        """When a transfer's turn comes: at once, but after the one before it on a lane whose ends are certain."""
        if completes_at_ms is None:
            return time_ms
        lane = underway.link, underway.kind
        start_ms = max(time_ms, self._lane_free_ms.get(lane, 0.0))
        self._lane_free_ms[lane] = completes_at_ms
        return min(start_ms, completes_at_ms)

    def _transferred(self, underway: _Underway, end_ms: float, *, done: bool) -> None:
        self._sink.transferred(
            Transfer(
                link=underway.link,
                kind=underway.kind,
                request=underway.request,
                rank=underway.rank,
                start_ms=min(underway.start_ms, end_ms),
                end_ms=end_ms,
                amount=underway.amount,
                done=done,
            )
        )


def _rank_of(event: Any) -> str:
    return rank_name(event.role, event.worker, event.dp_rank)


_HANDLERS: Mapping[type[Any], Callable[[SpanFold, float, Any], None]] = {
    RequestArrived: SpanFold._arrived,
    PlacementWeighed: SpanFold._weighed,
    RequestPlaced: SpanFold._placed,
    wk.RequestQueued: SpanFold._queued,
    wk.RequestAdmitted: SpanFold._admitted,
    wk.RequestPreempted: SpanFold._preempted,
    wk.RequestEnded: SpanFold._ended,
    WorkerCrashed: SpanFold._crashed,
    RequestLost: SpanFold._lost,
    wk.PassStarted: SpanFold._pass_started,
    wk.PassEnded: SpanFold._pass_ended,
    ho.SourceHeld: SpanFold._held,
    ho.DestinationReserved: SpanFold._reserved,
    ho.TransferStarted: SpanFold._moved,
    ho.DestinationActivated: SpanFold._activated,
    BlocksStored: SpanFold._kv,
    BlocksRemoved: SpanFold._kv,
    BlocksCleared: SpanFold._kv,
    hp.StorePrepared: SpanFold._prepared,
    hp.StoreSubmitted: SpanFold._submitted,
    hp.StoreLanded: SpanFold._landed,
    hp.StoreDropped: SpanFold._dropped,
    hp.HostBlocksEvicted: SpanFold._evicted,
    hp.HostPoolCleared: SpanFold._cleared,
    hp.ClearedBlocksFreed: SpanFold._freed,
    hp.LoadQueued: SpanFold._load_queued,
    hp.LoadFinished: SpanFold._load_finished,
    hp.ClientRetired: SpanFold._retired,
}
