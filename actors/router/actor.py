"""A router on the bus: hears signals, asks its state, carries decisions out.

Owns: which events are signals, their order, and who is sent what. Refuses to know: how anything is decided (``state``).

It knows what it is told: requests by their senders, KV events through a subscription that may lag and never wakes it,
and first tokens and ends, which do not lag. Both wait in inboxes and are taken up, in the order in which they became
known, before the router does anything else. Signals wake it only while requests wait in its policy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from g2sim.actors.config import WorkerRole
from g2sim.actors.handoff.events import SourceHeld
from g2sim.actors.kv.events import BlocksCleared, BlocksRemoved, BlocksStored
from g2sim.actors.phases import Phase
from g2sim.actors.router.events import PlacementWeighed, RequestPlaced, RequestRefused, RequestWaits
from g2sim.actors.router.faults import FaultPlan
from g2sim.actors.router.messages import (
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
)
from g2sim.actors.router.policy import Placement, RoutedRequest, Weighing
from g2sim.actors.router.state import Decision, Placed, Refused, RouterState, Waits
from g2sim.actors.traffic.request import RequestStatus
from g2sim.actors.worker.events import PassEnded, RequestEnded
from g2sim.actors.worker.messages import CancelOnWorker, SubmitRequest
from g2sim.actors.worker.sequence import RankRequest
from g2sim.bus.errors import ProtocolError
from g2sim.bus.events import Record
from g2sim.bus.kernel import Ask, Kernel, Port, Subscription, Turn

if TYPE_CHECKING:
    from g2sim.actors.router.feed import RouterFeed

KV_EVENTS = (BlocksStored, BlocksRemoved, BlocksCleared)

WAKE_PHASE = Phase.START
"""Requests that are released join passes that start at this instant, also after one that took no time. Routers are
registered before workers, so they come first in this phase."""


def load_signals(role: WorkerRole) -> tuple[type[Any], ...]:
    """Events that tell a pool's router of progress.

    When the work of a prefill pool on a request is over, and when a decode pool can never take one, is told by the
    hand-off coordinator (``RequestIsOver``).
    """
    return (SourceHeld,) if role is WorkerRole.PREFILL else (PassEnded, RequestEnded)


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
        self._lag_ms = 0.0
        self._given: dict[int, RankRequest] = {}

    def subscribe(self, kernel: Kernel, name: str, kv_event_lag_ms: float, faults: FaultPlan | None = None) -> None:
        """Subscribe to what the policy looks at; once, after this actor was registered as ``name``.

        KV events take the way that ``faults`` of this pool leave open.
        """
        policy, pool = self.state.policy, self.state.pool
        plan = None if faults is None else faults.of_pool(pool.role.pool_name)
        if policy.sees_blocks and plan is not None and plan.faults:
            from g2sim.actors.router.feed import RouterFeed  # only runs with faults need it

            self.feed = RouterFeed(plan, kv_event_lag_ms, pool, kernel.slot(name).port)
            kernel.listen(KV_EVENTS, self.feed)
        elif policy.sees_blocks:
            self._lag_ms = kv_event_lag_ms
            self._kv = kernel.subscribe(name, KV_EVENTS, lag_ms=kv_event_lag_ms)
        if policy.sees_load:
            self._signals = kernel.subscribe(
                name, load_signals(self._role), wake_message=LoadChanged(), wake_phase=WAKE_PHASE
            )
            self._signals.silent = True

    def receive(self, message: Any, port: Port) -> Turn | RankReply | None:
        reply = self._handle(message, port)
        if self._signals is not None:
            self._signals.silent = not self.state.has_waiting
        return reply

    def _handle(self, message: Any, port: Port) -> Turn | RankReply | None:
        released = self._catch_up(port)
        kind = type(message)
        if kind is ChooseRank:
            decision = self.state.place(_routed(message.arrived), port.now_ms)
            return RankReply(self._published(decision, port), tuple(released))
        if kind is RequestIsOver:
            released += self._publish(self.state.ended(message.request, port.now_ms), port)
            return RankReply(None, tuple(released))
        if kind is CancelRequest and self._coordinator is not None:
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
        """Cancel a request where it is: here, or on the worker that says it has it."""
        yield from self._send_out(released)
        if request in self.state.waiting:
            del self._given[request]
            yield from self._send_out(self._withdraw(request, port))
            return
        for worker in self._workers:
            if (yield Ask(worker, CancelOnWorker(request))):
                return
        raise ProtocolError(f"router: request {request} is canceled, but no worker has it")

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
        told = [] if self._signals is None else self._signals.drain()
        released: list[RankChosen] = []
        if self.feed is not None and (events := self.feed.drain()):
            # The feed wakes the router whenever something is due, so none of this became known after a signal.
            released += self._publish(self.state.observe(events, port.now_ms), port)
        start = 0
        for record, request, is_end in self._progress(told):
            stop = start
            while stop < len(heard) and self._is_before(heard[stop], record):
                stop += 1
            released += self._observe(heard[start:stop], port)
            start = stop
            hear = self.state.ended if is_end else self.state.first_token
            released += self._publish(hear(request, record.time_ms), port)
        return released + self._observe(heard[start:], port)

    def _progress(self, told: Sequence[Record]) -> Iterator[tuple[Record, int, bool]]:
        """(record, request, whether it ends) for each request that has its first token or ends, in order.

        Of one pass of a rank come those that end without a token, then those that were given one, then the rejected
        ones. A request that ends with its first token only ends.
        """
        position = 0
        while position < len(told):
            record = told[position]
            position += 1
            event = record.event
            if event.role != self._role:
                continue
            if type(event) is not PassEnded:
                if type(event) is not RequestEnded or event.status != RequestStatus.FAILED:
                    yield record, event.request, type(event) is not SourceHeld
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
                    yield record, request, True
            if ends or not self.state.awaiting.isdisjoint(event.emitted):
                for request in event.emitted:
                    if request in ends:
                        yield record, request, True
                    elif request in self.state.awaiting:
                        yield record, request, False
            for request, status in ends.items():
                if status == RequestStatus.REJECTED:
                    yield record, request, True

    def _is_before(self, heard: Record, told: Record) -> bool:
        """Whether a KV event was known when a signal came. A worker publishes a pass's KV events before its tokens."""
        due_ms = heard.time_ms + self._lag_ms
        if due_ms != told.time_ms:
            return due_ms < told.time_ms
        return self._lag_ms > 0.0 or heard.cause <= told.cause

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
        if decision.why is not None:
            port.publish(weighed(decision.why, decision.request, pool, self.state.policy.name))
        port.publish(self._placed(decision))
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
