"""A router on the bus: hears signals, asks its state, carries decisions out.

Owns: which events are signals, their order, and who is sent what. Refuses to know: how anything is decided (``state``).

It knows what it is told: requests by their senders, KV events through a subscription that may lag and never wakes it,
and first tokens and ends, which do not lag. All wait in inboxes and are taken up, in the order in which they became
known, before the router does anything else. Signals wake it only while requests wait in its policy.

One of several replicas hears of the progress of requests that it placed itself. With load sync it hears of the others'
placements, first tokens and ends too, a fixed time after they happened.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from g2sim.actors.config import RouterConfig, WorkerRole
from g2sim.actors.handoff.events import SourceHeld
from g2sim.actors.kv.events import BlocksCleared, BlocksRemoved, BlocksStored
from g2sim.actors.membership.events import WorkerCrashed, WorkerRestarted, WorkerStateKnown
from g2sim.actors.membership.messages import WorkerNews
from g2sim.actors.phases import Phase
from g2sim.actors.router.events import (
    PlacementShared,
    PlacementWeighed,
    RequestPlaced,
    RequestRefused,
    RequestWaits,
    SharingEnded,
)
from g2sim.actors.router.faults import FaultPlan
from g2sim.actors.router.loads import Booking
from g2sim.actors.router.messages import (
    ROUTER_PREFIX,
    CancelRequest,
    ChooseRank,
    FeedDue,
    LoadChanged,
    PlaceRequest,
    RankAnswer,
    RankChosen,
    RankIsPending,
    RankIsRefused,
    RankReply,
    RequestIsOver,
    WithdrawRequest,
)
from g2sim.actors.router.policy import Placement, RoutedRequest, Weighing
from g2sim.actors.router.state import Decision, Placed, Refused, RouterState, Waits
from g2sim.actors.traffic.request import RequestStatus
from g2sim.actors.worker.events import PassGave, RequestEnded
from g2sim.actors.worker.messages import CancelOnWorker, SubmitRequest
from g2sim.actors.worker.sequence import RankRequest
from g2sim.bus.errors import ProtocolError
from g2sim.bus.events import Record
from g2sim.bus.kernel import Ask, Kernel, Port, Subscription, Turn

if TYPE_CHECKING:
    from g2sim.actors.router.feed import RouterFeed

KV_EVENTS = (BlocksStored, BlocksRemoved, BlocksCleared)

Known = tuple[float, bool, int | float]
"""When something became known: time [ms]; at one time what was under way first, then in order of publication."""

WAKE_PHASE = Phase.START
"""Requests that are released join passes that start at this instant, also after one that took no time. Routers are
registered before workers, so they come first in this phase."""


def load_signals(role: WorkerRole) -> tuple[type[Any], ...]:
    """Events that tell a pool's router of progress.

    When the work of a prefill pool on a request is over, and when a decode pool can never take one, is told by the
    hand-off coordinator (``RequestIsOver``).
    """
    return (SourceHeld,) if role is WorkerRole.PREFILL else (PassGave, RequestEnded)


class RouterActor:
    """See the module's text.

    Args:
        state: the router without its bus.
        workers: actor names, by worker number.
        coordinator: name of the hand-off coordinator, None in an aggregated deployment.
    """

    def __init__(self, *, state: RouterState, workers: Sequence[str], coordinator: str | None) -> None:
        self.state = state
        self._role = state.pool.role
        self._workers = tuple(workers)
        self._coordinator = coordinator
        self._kv: Subscription | None = None
        self._signals: Subscription | None = None
        self.feed: RouterFeed | None = None
        self._sync: Subscription | None = None
        self._lag_ms = 0.0
        self._sync_ms = 0.0
        self._name = ""
        self._given: dict[int, RankRequest] = {}

    def subscribe(self, kernel: Kernel, name: str, config: RouterConfig, faults: FaultPlan | None = None) -> None:
        """Subscribe to what the policy looks at; once, after this actor was registered as ``name``.

        KV events take the way that ``faults`` of this pool leave open.
        """
        policy, pool, kv_event_lag_ms = self.state.policy, self.state.pool, config.kv_event_lag_ms
        self._name = name
        plan = None if faults is None else faults.of_pool(pool.role.pool_name)
        if policy.sees_blocks and plan is not None and plan.faults:
            from g2sim.actors.router.feed import RouterFeed  # only runs with faults need it

            self.feed = RouterFeed(
                name.removeprefix(ROUTER_PREFIX), plan, kv_event_lag_ms, pool, kernel.slot(name).port
            )
            kernel.listen((*KV_EVENTS, WorkerCrashed, WorkerRestarted), self.feed)
        elif policy.sees_blocks:
            self._lag_ms = kv_event_lag_ms
            self._kv = kernel.subscribe(name, KV_EVENTS, lag_ms=kv_event_lag_ms)
        if policy.sees_load:
            signals = load_signals(self._role)
            self._signals = kernel.subscribe(name, signals, wake_message=LoadChanged(), wake_phase=WAKE_PHASE)
            self._signals.silent = True
        if policy.sees_load and config.replicas > 1 and config.load_sync_ms is not None:
            self._sync_ms = config.load_sync_ms
            self._sync = kernel.subscribe(
                name,
                (*signals, PlacementShared, SharingEnded),
                lag_ms=self._sync_ms,
                wake_message=LoadChanged(),
                wake_phase=WAKE_PHASE,
            )
            self._sync.silent = True

    def receive(self, message: Any, port: Port) -> Turn | RankReply | None:
        reply = self._handle(message, port)
        if self._signals is not None:
            self._signals.silent = not self.state.has_waiting
        if self._sync is not None:
            if self.state.has_waiting and self._sync.silent:
                self._sync.rouse()
            self._sync.silent = not self.state.has_waiting
        return reply

    def _handle(self, message: Any, port: Port) -> Turn | RankReply | None:
        released = self._catch_up(port)
        kind = type(message)
        if kind is ChooseRank:
            decision = self.state.place(_routed(message.arrived), port.now_ms)
            return RankReply(self._published(decision, port), tuple(released))
        if kind is RequestIsOver:
            if self._sync is not None and message.request in self.state.pool.loads:
                port.publish(SharingEnded(request=message.request, pool=self._role.pool_name))
            released += self._publish(self.state.ended(message.request, port.now_ms), port)
            return RankReply(None, tuple(released))
        if kind is WithdrawRequest:
            released += self._publish(self.state.withdraw(message.request, port.now_ms), port)
            return RankReply(None, tuple(released))
        if kind is WorkerNews:
            released += self._learn(message, port)
            return self._send_out(released)
        if kind is CancelRequest and self._coordinator is not None:
            if message.request in self.state.waiting:  # else what was heard just now has released it
                released += self._withdraw(message.request, port)
            return RankReply(None, tuple(released))
        if kind is CancelRequest:
            return self._cancel(message.request, released, port)
        if kind is PlaceRequest:
            given = self._given[message.given.request] = message.given
            decision = self.state.place(_routed(message), port.now_ms)
            answer = self._published(decision, port)
            if not isinstance(answer, RankIsPending):
                del self._given[given.request]
            if isinstance(answer, Placement):
                port.send(self._workers[answer.worker], SubmitRequest(answer.dp_rank, given), phase=Phase.SUBMIT)
        elif kind is not LoadChanged and kind is not FeedDue:
            raise ProtocolError(f"router: no use for a {kind.__name__}")
        elif not released:
            port.no_effect()
        return self._send_out(released) if released else None

    def _cancel(self, request: int, released: list[RankChosen], port: Port) -> Turn:
        """Cancel a request where it is: here, or on the worker that says it has it. Nobody has one that just ended."""
        yield from self._send_out(released)
        if request in self.state.waiting:
            del self._given[request]
            yield from self._send_out(self._withdraw(request, port))
            return
        for worker in self._workers:
            if (yield Ask(worker, CancelOnWorker(request))):
                return

    def _learn(self, news: WorkerNews, port: Port) -> list[RankChosen]:
        """A worker is gone, out of sight or back. Returns what that releases."""
        pool = self._role.pool_name
        port.publish(WorkerStateKnown(pool=pool, worker=news.worker, state=news.state.value, fault=news.fault))
        if self.feed is not None:
            self.feed.learn(news.worker, news.state)
        return self._publish(self.state.set_worker(news.worker, news.state, port.now_ms), port)

    def _withdraw(self, request: int, port: Port) -> list[RankChosen]:
        """End a request that waits here. Returns what its going releases."""
        freed = self._publish(self.state.withdraw(request, port.now_ms), port)
        status = RequestStatus.CANCELED.value
        port.publish(RequestEnded(worker=None, role=self._role.value, dp_rank=None, request=request, status=status))
        return freed

    def waiting(self) -> Sequence[str]:
        return [f"request {request} waits for policy {self.state.policy.name}" for request in self.state.waiting]

    # -- hearing

    def _catch_up(self, port: Port) -> list[RankChosen]:
        """Take up what became known since the last turn, in order. Returns what was released."""
        heard = [] if self._kv is None else [one for one in self._kv.drain() if one.event.role == self._role]
        told: Iterable[tuple[Known, int, bool | Booking, bool]] = ()
        if self._signals is not None:
            told = self._progress(self._signals.drain(), 0.0, from_peer=False)
        if self._sync is not None:
            news = self._progress(self._sync.drain(), self._sync_ms, from_peer=True)
            told = heapq.merge(told, news, key=itemgetter(0))
        released: list[RankChosen] = []
        if self.feed is not None and (events := self.feed.drain()):
            # The feed wakes the router whenever something is due, so none of this became known after a signal.
            released += self._publish(self.state.observe(events, port.now_ms), port)
        start = 0
        for known, request, what, from_peer in told:
            stop = start
            # A worker publishes a pass's KV events before its tokens.
            while stop < len(heard) and _known(heard[stop], self._lag_ms) <= known:
                stop += 1
            released += self._observe(heard[start:stop], port)
            start = stop
            if isinstance(what, Booking):
                self.state.peer_placed(request, what)
                continue
            hear = self.state.ended if what else self.state.first_token
            released += self._publish(hear(request, known[0], from_peer=from_peer), port)
        return released + self._observe(heard[start:], port)

    def _progress(
        self, told: Sequence[Record], lag_ms: float, *, from_peer: bool
    ) -> Iterator[tuple[Known, int, bool | Booking, bool]]:
        """(when, request, what, ``from_peer``), in order, for each request that has its first token or ends.

        ``what`` is False for a first token, True for an end, and what a peer has booked for a placement. Of one pass of
        a rank come those that end without a token, then those that were given one, then the rejected ones. A request
        that ends with its first token only ends.
        """
        position = 0
        while position < len(told):
            record = told[position]
            position += 1
            event, kind, known = record.event, type(record.event), _known(record, lag_ms)
            if kind is PlacementShared or kind is SharingEnded:
                if event.pool == self._role.pool_name and record.source != self._name:
                    yield known, event.request, kind is SharingEnded or _shared(event), from_peer
                continue
            if event.role != self._role:
                continue
            if kind is not PassGave:
                if kind is not RequestEnded or event.status != RequestStatus.FAILED:
                    yield known, event.request, kind is not SourceHeld, from_peer
                continue
            ends: dict[int, str] = {}
            while position < len(told) and told[position].cause == record.cause:
                end = told[position].event
                if type(end) is not RequestEnded:
                    break
                ends[end.request] = end.status
                position += 1
            for request, status in ends.items():
                if status != RequestStatus.REJECTED and request not in event.emitted:
                    yield known, request, True, from_peer
            if ends or not self.state.awaiting.isdisjoint(event.emitted):
                for request in event.emitted:
                    if request in ends:
                        yield known, request, True, from_peer
                    elif request in self.state.awaiting:
                        yield known, request, False, from_peer
            for request, status in ends.items():
                if status == RequestStatus.REJECTED:
                    yield known, request, True, from_peer

    def _observe(self, heard: Sequence[Record], port: Port) -> list[RankChosen]:
        if not heard:
            return []
        decisions = self.state.observe([record.event for record in heard], heard[-1].time_ms + self._lag_ms)
        return self._publish(decisions, port)

    # -- carrying out

    def _send_out(self, released: Sequence[RankChosen]) -> Turn:
        """Requests that have waited go where they are to go, on the spot."""
        for chosen in released:
            if self._coordinator is not None:
                yield Ask(self._coordinator, chosen)
                continue
            given, answer = self._given.pop(chosen.request), chosen.answer
            if isinstance(answer, Placement):
                yield Ask(self._workers[answer.worker], SubmitRequest(answer.dp_rank, given))

    def _publish(self, decisions: Sequence[Decision], port: Port) -> list[RankChosen]:
        """Publish decisions about requests that have waited."""
        released = []
        for decision in decisions:
            answer = self._published(decision, port)
            if isinstance(answer, RankIsPending):
                raise ProtocolError("router: a request was released to wait on")
            released.append(RankChosen(self._role, decision.request.request, answer))
        return released

    def _published(self, decision: Decision, port: Port) -> RankAnswer:
        """Publish a decision."""
        request, pool = decision.request.request, self._role.pool_name
        if isinstance(decision, Waits):
            port.publish(RequestWaits(request=request, pool=pool))
            return RankIsPending()
        if isinstance(decision, Refused):
            port.publish(RequestRefused(request=request, pool=pool, reason=decision.reason))
            end = RequestEnded(
                worker=None, role=self._role.value, dp_rank=None, request=request, status=RequestStatus.REJECTED.value
            )
            port.publish(end)
            return RankIsRefused()
        if decision.why is not None and port.hears(PlacementWeighed):
            port.publish(weighed(decision.why, decision.request, pool, self.state.policy.name))
        port.publish(self._placed(decision))
        if self._sync is not None:
            booked = self.state.pool.loads.booking(request)
            port.publish(
                PlacementShared(
                    request=request,
                    pool=pool,
                    scheduler=booked.place,
                    prefill_tokens=booked.prefill_tokens,
                    block_hashes=tuple(booked.hashes),
                )
            )
        if self.feed is not None:
            self.feed.audit(decision.request, decision.placement)
        return decision.placement

    def _placed(self, decision: Placed) -> RequestPlaced:
        placement = decision.placement
        return RequestPlaced(
            request=decision.request.request,
            pool=self._role.pool_name,
            worker=placement.worker,
            dp_rank=placement.dp_rank,
            scheduler=self.state.pool.place_of(placement),
            outcome="immediate" if decision.queued_at_ms is None else "queued",
            queued_at_ms=decision.queued_at_ms,
            overlap_blocks=decision.overlap_blocks,
            best_overlap_blocks=decision.best_overlap_blocks,
        )


def _known(record: Record, lag_ms: float) -> Known:
    return record.time_ms + lag_ms, lag_ms == 0.0, record.cause


def _shared(event: PlacementShared) -> Booking:
    return Booking(event.scheduler, event.prefill_tokens, event.block_hashes)


def weighed(why: Weighing, request: RoutedRequest, pool: str, policy: str) -> PlacementWeighed:
    """A policy's account as an event."""
    candidates, chosen = why.candidates, why.candidates[why.chosen]
    hashes, overlap_blocks = request.chain.sequence_hashes, chosen.device_blocks + chosen.host_blocks
    return PlacementWeighed(
        request=request.request,
        pool=pool,
        policy=policy,
        reason=why.reason,
        chosen=why.chosen,
        tied=why.tied,
        workers=tuple([one.placement.worker for one in candidates]),
        dp_ranks=tuple([one.placement.dp_rank for one in candidates]),
        device_blocks=tuple([one.device_blocks for one in candidates]),
        host_blocks=tuple([one.host_blocks for one in candidates]),
        prefill_tokens=tuple([one.prefill_tokens for one in candidates]),
        active_blocks=tuple([one.active_blocks for one in candidates]),
        active_requests=tuple([one.active_requests for one in candidates]),
        costs=tuple(why.costs),
        part_names=tuple(why.parts),
        parts=tuple(map(tuple, why.parts.values())),
        # A policy may have put candidates of its own into its account.
        overlap_hash=hashes[overlap_blocks - 1] if 0 < overlap_blocks <= len(hashes) else None,
    )


def _routed(arrived: PlaceRequest) -> RoutedRequest:
    given, spec = arrived.given, arrived.spec
    return RoutedRequest(
        request=given.request,
        prompt_tokens=given.prompt.length,
        output_tokens=given.output_tokens,
        chain=given.chain,
        arrival_ms=arrived.arrival_ms,
        name=spec.name,
        session_id=spec.session_id,
        turn_index=spec.turn_index,
        agentic=spec.agentic,
    )
