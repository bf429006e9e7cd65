"""KV events on their way into a router's index, when faults are to strike them.

Owns: the agenda of what is to happen when, and what the log is told. Refuses to know: which faults strike what
(``line``), how gaps are closed (``recovery``), and what a router does with events.

A run without faults does not have one: its router reads an ordinary subscription.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Any

from g2sim.actors.kv.events import Tier
from g2sim.actors.membership.events import WorkerCrashed, WorkerRestarted
from g2sim.actors.phases import Phase
from g2sim.actors.router import events as ev
from g2sim.actors.router.faults import Fault, FaultKind, FaultPlan
from g2sim.actors.router.line import Line
from g2sim.actors.router.messages import FeedDue
from g2sim.actors.router.policy import KvEvent, Placement, RoutedRequest
from g2sim.actors.router.pool import Pool, WorkerState
from g2sim.actors.router.recovery import Answer, Publisher, Receiver
from g2sim.bus.errors import InvariantViolation
from g2sim.bus.events import Record
from g2sim.bus.kernel import Port

Step = Callable[..., None]


class RouterFeed:
    """See the module's text. A listener of KV events, crashes and restarts (``deliver``); its router drains it.

    Args:
        name: of the router in events.
        plan: the faults of this router's pool, at least one.
        lag_ms: what every message takes [ms].
        pool: the router's view; what it holds is compared, never changed.
        port: the router's; it is woken with ``FeedDue`` when something is due.
    """

    def __init__(self, name: str, plan: FaultPlan, lag_ms: float, pool: Pool, port: Port) -> None:
        self._recovery = plan.recovery
        self._pool = pool
        self._name = name
        self._port = port
        self._line = Line(plan.faults, lag_ms, port.stream)
        self._resident = pool.blank()  # what an index without faults and lag would hold
        self._publishers = [self._publisher(place, 0) for place in pool.places]
        self._receivers = [Receiver(0) for _ in pool.places]
        self._gaps: dict[int, int] = {}  # place -> the missing number that the router waits for
        self._beats: set[int] = set()  # places with a heartbeat under way
        self._silent: set[int] = set()  # places whose worker has crashed and not restarted
        self._gone: set[int] = set()  # workers that the router knows to be gone
        self._restarting = 0
        self._under_way = 0
        self._goal: list[int] | None = None  # place -> what is to be applied before the index counts as converged
        self._stops_ms = plan.stops_ms
        self._heard: list[KvEvent] = []
        self._agenda: list[tuple[float, int, Step, tuple[Any, ...]]] = []
        self._steps = 0
        self._wakes: set[float] = set()
        for fault in plan.faults:
            self._at(fault.from_ms, self._begin, fault)
            self._at(fault.until_ms, self._end, fault)
        self._at(self._stops_ms, self._stop)

    # -- for the router

    def deliver(self, record: Record) -> None:
        """A KV event was published, or a worker has crashed or restarted."""
        event = record.event
        if event.role != self._pool.role:
            return
        if isinstance(event, WorkerCrashed):
            for place in self._places_of(event.worker):
                publisher = self._publishers[place] = self._publisher(
                    self._pool.places[place], self._publishers[place].epoch + 1
                )
                self._resident.apply(publisher.cleared())
                self._silent.add(place)
            return
        if isinstance(event, WorkerRestarted):
            self._silent.difference_update(self._places_of(event.worker))
            return
        self._resident.apply(event)
        place = self._pool.place_of(Placement(event.worker, event.dp_rank))
        publisher = self._publishers[place]
        sequence = publisher.publish(event)
        passage = self._line.carry(event.worker, event.dp_rank, record.time_ms)
        if passage.struck_by:
            self._tell(
                ev.MessageStruck,
                place,
                faults=tuple(fault.name for fault in passage.struck_by),
                event_id=event.event_id,
                sequence=sequence,
                due_ms=passage.due_ms,
            )
        for due_ms in passage.due_ms:
            self._under_way += 1
            self._at(due_ms, self._arrive, place, sequence, publisher.epoch, event)
        if not passage.due_ms:
            self._plan_beat(place)

    def drain(self) -> list[KvEvent]:
        """What the router is to apply by now, in order."""
        now_ms = self._port.now_ms
        agenda = self._agenda
        while agenda and agenda[0][0] <= now_ms:
            _, _, step, arguments = heapq.heappop(agenda)
            step(*arguments)
        self._wakes.discard(now_ms)
        heard, self._heard = self._heard, []
        if self._goal is not None and all(map(self._has_reached, self._receivers, self._goal)):
            self._goal = None
            self._port.publish(ev.IndexConverged(pool=self._name, took_ms=now_ms - self._stops_ms))
        return heard

    def learn(self, worker: int, state: WorkerState) -> None:
        """The router learned of a worker. Of one that is gone it forgets how far its streams were read."""
        if state is not WorkerState.REMOVED:
            self._gone.discard(worker)
            return
        self._gone.add(worker)
        for place in self._places_of(worker):
            self._connect(place)

    def audit(self, request: RoutedRequest, placement: Placement) -> None:
        """Publish what the router believed of a request that it placed, and what was so."""
        places = self._pool.ready_places()
        believed, resident = (
            {place: overlap.device[place] + overlap.host[place] for place in places}
            for overlap in (self._pool.overlap(request), self._resident.overlap(request))
        )
        chosen = self._pool.place_of(placement)
        self._port.publish(
            ev.PlacementAudited(
                request=request.request,
                pool=self._name,
                believed_blocks=believed[chosen],
                resident_blocks=resident[chosen],
                best_believed_blocks=max(believed.values()),
                best_resident_blocks=max(resident.values()),
                phantom_blocks=sum(max(0, believed[place] - resident[place]) for place in places),
                unseen_blocks=sum(max(0, resident[place] - believed[place]) for place in places),
            )
        )

    def publish_end(self) -> None:
        """Publish how the index compares with what is resident, at the end of a run.

        Raises: InvariantViolation if nothing is under way and they differ.
        """
        phantom = unseen = 0
        for place, publisher in enumerate(self._publishers):
            for tier in Tier:
                believed = self._pool.believed(place, tier)
                phantom += len(believed - publisher.resident(tier))
                unseen += len(self._resident.believed(place, tier) - believed)
        self._port.publish(
            ev.IndexCompared(pool=self._name, phantom_blocks=phantom, unseen_blocks=unseen, under_way=self._under_way)
        )
        if (phantom or unseen) and not self._agenda:
            raise InvariantViolation(
                f"router {self._name}: faults are over, but its index has {phantom} blocks that are not resident, and "
                f"lacks {unseen} that are"
            )

    # -- steps of the agenda

    def _begin(self, fault: Fault) -> None:
        self._port.publish(ev.FaultBegan(pool=self._name, fault=fault.name, kind=fault.kind.value))
        if fault.kind is FaultKind.ROUTER_RESTART:
            self._restarting += 1
            for place, publisher in enumerate(self._publishers):
                self._connect(place)
                self._heard.append(publisher.cleared())
        elif fault.kind is FaultKind.PUBLISHER_RESET:
            for place in self._struck(fault):
                self._publishers[place].reset()

    def _end(self, fault: Fault) -> None:
        self._port.publish(ev.FaultEnded(pool=self._name, fault=fault.name, kind=fault.kind.value))
        if fault.kind is FaultKind.ROUTER_RESTART:
            self._restarting -= 1
            again: list[int] = list(range(len(self._publishers)))
        elif fault.kind is FaultKind.PUBLISHER_RESET:
            again = self._struck(fault)
        else:
            return
        for place in again:
            self._connect(place)
            if not self._restarting and self._pool.places[place].worker not in self._gone:
                self._ask(place)

    def _stop(self) -> None:
        self._goal = [publisher.last for publisher in self._publishers]

    def _arrive(self, place: int, sequence: int, epoch: int, event: KvEvent | None) -> None:
        if event is not None:
            self._under_way -= 1
        if self._restarting:
            return
        if self._receivers[place].hear(sequence, epoch, event):
            self._settle(place)
        else:
            self._tell(ev.MessageStale, place, sequence=sequence)

    def _beat(self, place: int) -> None:
        """A rank tells its last number; the faults strike that message too."""
        self._beats.discard(place)
        if place in self._silent:
            return
        who, publisher = self._pool.places[place], self._publishers[place]
        passage = self._line.carry(who.worker, who.dp_rank, self._port.now_ms)
        for due_ms in passage.due_ms:
            self._at(due_ms, self._arrive, place, publisher.last, publisher.epoch, None)
        if not passage.due_ms:
            self._plan_beat(place)

    def _lose_patience(self, place: int, missing: int, receiver: Receiver) -> None:
        if receiver is self._receivers[place] and receiver.missing == missing:
            self._ask(place)

    def _answered(self, place: int, answer: Answer, receiver: Receiver) -> None:
        self._under_way -= 1
        if receiver is not self._receivers[place]:
            return
        self._heard.extend(receiver.answered(answer))
        self._tell(ev.RecoveryAnswered, place, mode=answer.mode.value, sequence=answer.last, events=len(answer.events))
        self._settle(place)

    # -- inside

    def _at(self, time_ms: float, step: Step, *arguments: Any) -> None:
        self._steps += 1
        heapq.heappush(self._agenda, (time_ms, self._steps, step, arguments))
        if time_ms not in self._wakes:
            self._wakes.add(time_ms)
            self._port.send_self(FeedDue(), phase=Phase.START, at_ms=time_ms)

    def _tell(self, event: type[Any], place: int, **fields: Any) -> None:
        who = self._pool.places[place]
        self._port.publish(event(pool=self._name, worker=who.worker, dp_rank=who.dp_rank, **fields))

    def _publisher(self, place: Placement, epoch: int) -> Publisher:
        return Publisher(
            worker=place.worker,
            role=self._pool.role.value,
            dp_rank=place.dp_rank,
            history_events=self._recovery.history_events,
            epoch=epoch,
        )

    def _places_of(self, worker: int) -> range:
        return range(worker * self._pool.dp_size, (worker + 1) * self._pool.dp_size)

    def _struck(self, fault: Fault) -> list[int]:
        return [idx for idx, place in enumerate(self._pool.places) if fault.strikes(place.worker, place.dp_rank)]

    def _has_reached(self, receiver: Receiver, goal: int) -> bool:
        return receiver.last >= goal and not receiver.asking and not self._restarting

    def _connect(self, place: int) -> None:
        """Forget how far a rank's stream was read."""
        self._receivers[place] = Receiver(self._publishers[place].epoch)
        self._gaps.pop(place, None)

    def _settle(self, place: int) -> None:
        """Apply what can be, and see to what is missing."""
        receiver = self._receivers[place]
        self._heard.extend(receiver.ready())
        missing = receiver.missing
        if missing is None:
            self._gaps.pop(place, None)
        elif self._gaps.get(place) != missing:
            self._gaps[place] = missing
            self._tell(ev.GapFound, place, sequence=missing)
            if self._recovery.patience_ms:
                due_ms = self._port.now_ms + self._recovery.patience_ms
                self._at(due_ms, self._lose_patience, place, missing, receiver)
            else:
                self._ask(place)

    def _ask(self, place: int) -> None:
        receiver, mode = self._receivers[place], self._recovery.mode
        first = receiver.last + 1
        receiver.asking = True
        self._tell(ev.RecoveryAsked, place, mode=mode.value, sequence=first)
        if place in self._silent:
            return
        self._under_way += 1
        answer = self._publishers[place].answer(first, mode)
        self._at(self._port.now_ms + self._recovery.latency_ms, self._answered, place, answer, receiver)

    def _plan_beat(self, place: int) -> None:
        if place not in self._beats:
            self._beats.add(place)
            every_ms, now_ms = self._recovery.heartbeat_ms, self._port.now_ms
            beat = math.floor(now_ms / every_ms) + 1
            if beat * every_ms <= now_ms:  # the quotient was rounded down to below a whole number
                beat += 1
            self._at(beat * every_ms, self._beat, place)
