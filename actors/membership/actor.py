"""Faults of workers, carried out: who is told what, when.

Owns: the order of things when a worker crashes, is found dead, restarts, loses its caches, or drops out of discovery;
what becomes of lost requests. Refuses to know: what a worker, a router or a hand-off does about it (they are asked).

All of a fault happens at the beginning of its instants, before transfers and passes end there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs

from g2sim.actors.config import WorkerRole
from g2sim.actors.kv.events import Tier
from g2sim.actors.membership.events import RequestLost
from g2sim.actors.membership.messages import (
    CachesAreCleared,
    ClearCaches,
    Crash,
    LostRequest,
    Restart,
    SendAgain,
    TakeLost,
    WorkerNews,
    WorkersAreBack,
    WorkersAreDown,
    WorkersAreLost,
)
from g2sim.actors.phases import Phase
from g2sim.actors.router.faults import Fault, FaultKind, OnCrash
from g2sim.actors.router.pool import WorkerState
from g2sim.actors.traffic.request import RequestStatus
from g2sim.actors.worker.events import PassEnded, RequestAdmitted, RequestEnded
from g2sim.bus.errors import ProtocolError
from g2sim.bus.events import Record
from g2sim.bus.kernel import Ask, Kernel, Port, Turn


@attrs.frozen(slots=True)
class _Step:
    """Timer: a part of a fault is due."""

    fault: Fault
    name: str


@attrs.frozen(slots=True)
class _Target:
    role: WorkerRole
    worker: int
    actor: str


class Progress:
    """A listener of how far requests are, by what was published.

    Attributes:
        tokens: visible tokens of requests that have not ended; ``admitted_in``: roles that have admitted them.
    """

    EVENTS = (RequestAdmitted, PassEnded, RequestEnded)

    def __init__(self) -> None:
        self.tokens: dict[int, int] = {}
        self.admitted_in: dict[int, frozenset[str]] = {}

    def deliver(self, record: Record) -> None:
        event = record.event
        if isinstance(event, RequestAdmitted):
            self.admitted_in[event.request] = self.admitted_in.get(event.request, frozenset()) | {event.role}
        elif isinstance(event, RequestEnded):
            self.tokens.pop(event.request, None)
            self.admitted_in.pop(event.request, None)
        elif event.role != WorkerRole.PREFILL:
            for request in event.emitted:
                self.tokens[request] = self.tokens.get(request, 0) + 1


class MembershipActor:
    """See the module's text.

    Args:
        faults: those that strike workers.
        workers: role -> actor names, by worker number.
        routers: role -> names of its router replicas.
        coordinator: name of the hand-off coordinator, None in an aggregated deployment.
        traffic: name of the actor that submits requests.
    """

    def __init__(
        self,
        *,
        faults: Sequence[Fault],
        workers: Mapping[WorkerRole, Sequence[str]],
        routers: Mapping[WorkerRole, Sequence[str]],
        coordinator: str | None,
        traffic: str,
    ) -> None:
        self._faults = tuple(faults)
        self._workers = workers
        self._routers = routers
        self._coordinator = coordinator
        self._traffic = traffic
        self._progress = Progress()
        self._steps: dict[str, Callable[[Fault, Port], Turn]] = {
            "crash": self._crash,
            "detect": self._detect,
            "restart": self._restart,
            "clear": self._clear,
            "hide": partial(self._tell_routers, WorkerState.DRAINING),
            "show": partial(self._tell_routers, WorkerState.READY),
        }

    def start(self, kernel: Kernel, name: str) -> None:
        """Put all faults on the agenda; once, after this actor was registered as ``name``."""
        slot = kernel.slot(name)
        for fault in self._faults:
            if fault.kind is FaultKind.WORKER_CRASH:
                kernel.post(slot, _Step(fault, "crash"), Phase.FAULT, fault.from_ms)
                kernel.post(slot, _Step(fault, "detect"), Phase.FAULT, fault.from_ms + fault.detect_ms)
                kernel.post(slot, _Step(fault, "restart"), Phase.FAULT, fault.until_ms)
            elif fault.kind is FaultKind.CACHE_CLEAR:
                kernel.post(slot, _Step(fault, "clear"), Phase.FAULT, fault.from_ms)
            else:
                kernel.post(slot, _Step(fault, "hide"), Phase.FAULT, fault.from_ms)
                kernel.post(slot, _Step(fault, "show"), Phase.FAULT, fault.until_ms)
        kernel.listen(Progress.EVENTS, self._progress)

    def receive(self, message: Any, port: Port) -> Turn:
        if type(message) is not _Step:
            raise ProtocolError(f"membership: no use for a {type(message).__name__}")
        return self._steps[message.name](message.fault, port)

    def waiting(self) -> Sequence[str]:
        return ()

    # -- steps

    def _crash(self, fault: Fault, port: Port) -> Turn:
        targets = self._targets(fault)
        for target in targets:
            yield Ask(target.actor, Crash(fault.name))
        if self._coordinator is not None:
            yield Ask(self._coordinator, WorkersAreDown(tuple([target.actor for target in targets])))

    def _detect(self, fault: Fault, port: Port) -> Turn:
        yield from self._tell_routers(WorkerState.REMOVED, fault, port)
        lost: dict[int, LostRequest] = {}
        targets = self._targets(fault)
        for target in targets:
            here: Sequence[LostRequest] = yield Ask(target.actor, TakeLost())
            if target.role is not WorkerRole.PREFILL:
                lost.update((one.request, one) for one in here)
        if self._coordinator is not None:
            # What was on a prefill worker is part of a hand-off, or over.
            actors = tuple([target.actor for target in targets])
            handed: Sequence[LostRequest] = yield Ask(self._coordinator, WorkersAreLost(actors))
            lost.update((one.request, one) for one in handed)
        for request in sorted(lost):
            self._settle(lost[request], fault, port)

    def _restart(self, fault: Fault, port: Port) -> Turn:
        targets = self._targets(fault)
        for target in targets:
            yield Ask(target.actor, Restart(fault.name))
        if self._coordinator is not None:
            yield Ask(self._coordinator, WorkersAreBack(tuple([target.actor for target in targets])))
        yield from self._tell_routers(WorkerState.READY, fault, port)

    def _clear(self, fault: Fault, port: Port) -> Turn:
        targets = self._targets(fault)
        tiers = frozenset(Tier if fault.tier is None else [fault.tier])
        for target in targets:
            yield Ask(target.actor, ClearCaches(fault.name, fault.dp_rank, tiers))
        if self._coordinator is not None:
            actors = tuple([target.actor for target in targets])
            yield Ask(self._coordinator, CachesAreCleared(actors, fault.dp_rank, tiers))

    # -- inside

    def _targets(self, fault: Fault) -> list[_Target]:
        return [
            _Target(role, worker, actors[worker])
            for role, actors in self._workers.items()
            for worker in fault.workers_of(role.pool_name, len(actors))
        ]

    def _tell_routers(self, state: WorkerState, fault: Fault, port: Port) -> Turn:
        for target in self._targets(fault):
            for router in self._routers[target.role]:
                yield Ask(router, WorkerNews(target.worker, state, fault.name))

    def _settle(self, lost: LostRequest, fault: Fault, port: Port) -> None:
        """A lost request ends, or begins anew."""
        request, again = lost.request, fault.requests is OnCrash.RESUBMIT
        tokens = self._progress.tokens.get(request, 0)
        where: dict[str, Any] = {"worker": lost.worker, "role": lost.role, "dp_rank": lost.dp_rank}
        port.publish(RequestLost(request=request, fault=fault.name, tokens=tokens, resubmitted=again, **where))
        if not again:
            port.publish(RequestEnded(request=request, status=RequestStatus.FAILED.value, **where))
            return
        admitted_in = self._progress.admitted_in.get(request, frozenset())
        port.send(self._traffic, SendAgain(request, lost.role, tokens, admitted_in), phase=Phase.ARRIVAL)
