"""The hand-off coordinator: the order in which prompts move from prefill to decode ranks.

Owns: the deployment's one queue of hand-off actions, transfers, and who is waited for.
Refuses to know: how a rank reserves, activates or releases (it is asked), and how a router chooses.

Each hand-off goes: submit to a prefill rank, source held, reserve on a decode rank, transfer, activate, release the
source. Every action's outcome puts the next one at the end of the queue. An action that meets a worker with a pass in
flight is parked with its rank, and goes to the end of the queue when that pass has ended, before what that rank reports
then. A request that has waited in a router goes on at once when its rank is chosen, without the queue.

Source: offline replay of aisimulate-core 0.13.0; recordings ``pd_*`` in tests/oracle.
"""

from __future__ import annotations

import enum
import heapq
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import attrs

from g2sim.actors.config import HandoffConfig, TransferTiming, WorkerRole
from g2sim.actors.handoff import events as ev
from g2sim.actors.kv.events import Tier
from g2sim.actors.membership.messages import (
    CachesAreCleared,
    LostRequest,
    WorkersAreBack,
    WorkersAreDown,
    WorkersAreLost,
)
from g2sim.actors.phases import Phase
from g2sim.actors.router.messages import (
    CancelRequest,
    ChooseRank,
    PlaceRequest,
    RankChosen,
    RankIsPending,
    RankIsRefused,
    RankReply,
    RequestIsOver,
    WithdrawRequest,
    dealt_to,
)
from g2sim.actors.router.policy import Placement
from g2sim.actors.traffic.request import RequestStatus
from g2sim.actors.worker.events import RequestEnded
from g2sim.actors.worker.messages import (
    AbandonHandoff,
    ActivateDestination,
    CancelOnWorker,
    DestinationIsReserved,
    HandoffReply,
    HandoffReport,
    ReleaseSource,
    ReserveDestination,
    SourceIsHeld,
    SourceIsRejected,
    SubmitRequest,
    WorkerReport,
)
from g2sim.actors.worker.sequence import RankRequest
from g2sim.bus.errors import ProtocolError
from g2sim.bus.kernel import Ask, Port, Turn


class _Step(enum.Enum):
    SUBMIT = "submit"
    RESERVE = "reserve"
    TRANSFER = "transfer"
    ACTIVATE = "activate"
    RELEASE = "release"
    CANCEL_SOURCE = "cancel source"
    CLEAR_AWAY = "clear away"


@attrs.frozen(slots=True)
class _Work:
    """Work off the queue of actions."""


_WORK = _Work()


@attrs.frozen(slots=True)
class _TransfersEnd:
    """Timer of the next transfer."""


class _Handoff:
    """One hand-off under way.

    ``fresh_blocks`` is what the destination lacked; ``held``: the source is, or was; ``moved``: the destination has the
    KV; ``activated``: it owns it; ``over``: the request has ended, or was refused; ``source_lost``: its worker crashed;
    ``cleared``: tiers that were cleared since the source had its KV.
    """

    __slots__ = (
        "activated",
        "arrived",
        "cleared",
        "destination",
        "fresh_blocks",
        "given",
        "held",
        "moved",
        "number",
        "over",
        "source",
        "source_lost",
    )

    def __init__(self, number: int, arrived: PlaceRequest) -> None:
        self.number = number
        self.arrived = arrived
        self.given: RankRequest = arrived.given
        self.source: Placement | None = None
        self.destination: Placement | None = None
        self.fresh_blocks = 0
        self.held = False
        self.moved = False
        self.activated = False
        self.over = False
        self.source_lost = False
        self.cleared: frozenset[Tier] = frozenset()


def transfer_delay_ms(tokens: int, config: HandoffConfig) -> float:
    """How long the KV of ``tokens`` tokens takes [ms]; 0 without a size or a bandwidth.

    The products and quotients are taken from left to right; the result is not rounded to nanoseconds.
    """
    if not config.bytes_per_token or not config.gb_per_s:
        return 0.0
    return float(tokens) * float(config.bytes_per_token) / (config.gb_per_s * 1e9) * 1000.0


class HandoffCoordinator:
    """See the module's text.

    Args:
        config: size and rate of transfers.
        block_size_tokens: tokens per block.
        workers: role -> actor names by worker number.
        routers: role -> names of the router replicas that place for it.
        listening: roles whose routers want to hear when a request is over.
    """

    def __init__(
        self,
        *,
        config: HandoffConfig,
        block_size_tokens: int,
        workers: Mapping[WorkerRole, Sequence[str]],
        routers: Mapping[WorkerRole, Sequence[str]],
        listening: Collection[WorkerRole],
    ) -> None:
        self._config = config
        self._block_size = block_size_tokens
        self._workers = workers
        self._routers = routers
        self._listening = frozenset(listening)
        self._handoffs: dict[int, _Handoff] = {}
        self._arrived = 0
        self._actions: deque[tuple[_Step, _Handoff]] = deque()
        self._parked: dict[str, list[tuple[int, _Step, _Handoff]]] = {}
        self._unplaced: dict[tuple[WorkerRole, int], _Handoff] = {}
        self._transfers: list[tuple[float, int]] = []
        self._down: set[str] = set()
        self._work_is_due = False

    quiet = frozenset({_Work, _TransfersEnd, WorkerReport})

    def receive(self, message: Any, port: Port) -> Turn | None:
        kind = type(message)
        if kind is _Work:
            return self._work_off(port)
        if kind is WorkerReport:
            self._hear(message)
        elif kind is PlaceRequest:
            self._arrived += 1
            handoff = self._handoffs[self._arrived] = _Handoff(self._arrived, message)
            self._actions.append((_Step.SUBMIT, handoff))
        elif kind is CancelRequest:
            return self._cancel(message.request, port)
        elif kind is RankChosen:
            return self._go_on([message], port)
        elif kind is _TransfersEnd:
            if not self._transfers or self._transfers[0][0] > port.now_ms:
                port.no_effect()  # another transfer's timer of this instant has taken them all
            while self._transfers and self._transfers[0][0] <= port.now_ms:
                _, number = heapq.heappop(self._transfers)
                self._moved(self._handoffs[number])
        elif kind is CachesAreCleared:
            self._note_clear(message)
        elif kind is WorkersAreDown:
            self._break_off(message.actors)
        elif kind is WorkersAreLost:
            return self._clear_after(message.actors, port)
        elif kind is WorkersAreBack:
            self._down.difference_update(message.actors)
        else:
            raise ProtocolError(f"hand-off coordinator: no use for a {kind.__name__}")
        self._plan(port)
        return None

    def waiting(self) -> Sequence[str]:
        lines = [f"request {request} waits for a {role.value} rank" for role, request in self._unplaced]
        for actor, actions in self._parked.items():
            lines += [
                f"request {handoff.given.request}: {step.value} waits for {actor}" for _, step, handoff in actions
            ]
        return lines

    def _hear(self, message: WorkerReport) -> None:
        """A worker's pass has ended: rank by rank, what was parked there, and then what the rank reports."""
        parked = self._parked.pop(message.actor, ())
        reports = [(self._rank_of(report), report) for report in message.reports]
        for dp_rank in sorted({dp_rank for dp_rank, *_ in (*parked, *reports)}):
            self._actions.extend((step, handoff) for place, step, handoff in parked if place == dp_rank)
            self._take([report for place, report in reports if place == dp_rank])

    def _rank_of(self, report: HandoffReport) -> int:
        handoff = self._handoffs[report.handoff]
        return _known(handoff.destination if isinstance(report, DestinationIsReserved) else handoff.source).dp_rank

    def _plan(self, port: Port) -> None:
        if self._actions and not self._work_is_due:
            port.send_self(_WORK, phase=Phase.HANDOFF)
            self._work_is_due = True

    def _work_off(self, port: Port) -> Turn:
        self._work_is_due = False
        while self._actions:
            step, handoff = self._actions.popleft()
            if step is _Step.SUBMIT:
                yield from self._submit(handoff, port)
            elif step is _Step.RESERVE:
                yield from self._reserve(handoff, port)
            elif step is _Step.TRANSFER:
                self._transfer(handoff, port)
            elif step is _Step.ACTIVATE:
                yield from self._activate(handoff)
            elif step is _Step.CLEAR_AWAY:
                yield from self._end(handoff, port)
            else:
                yield from self._release(step, handoff, port)

    def _submit(self, handoff: _Handoff, port: Port) -> Turn:
        given = handoff.given
        if handoff.source is None:
            handoff.source = yield from self._choose(WorkerRole.PREFILL, handoff, port)
        if (source := handoff.source) is None:
            return
        # Prefill makes at most the first token; the decode side makes it again.
        prefill_only = RankRequest(
            request=given.request,
            prompt=given.prompt,
            chain=given.chain,
            output_tokens=min(given.output_tokens, 1),
            output_base=given.output_base,
            output_ids=given.output_ids,
            admitted_in=given.admitted_in,
        )
        yield Ask(
            self._workers[WorkerRole.PREFILL][source.worker],
            SubmitRequest(source.dp_rank, prefill_only, handoff.number),
        )

    def _reserve(self, handoff: _Handoff, port: Port) -> Turn:
        if handoff.destination is None:
            handoff.destination = yield from self._choose(WorkerRole.DECODE, handoff, port)
        if (chosen := handoff.destination) is None:
            return
        reply: HandoffReply = yield Ask(
            self._workers[WorkerRole.DECODE][chosen.worker],
            ReserveDestination(chosen.dp_rank, handoff.number, handoff.given),
        )
        if reply.refused is not None:
            where: dict[str, Any] = {
                "worker": chosen.worker,
                "role": WorkerRole.DECODE.value,
                "dp_rank": chosen.dp_rank,
            }
            request = handoff.given.request
            port.publish(ev.HandoffFailed(request=request, handoff=handoff.number, reason=reply.refused, **where))
            port.publish(RequestEnded(request=request, status=RequestStatus.FAILED.value, **where))
            handoff.over = True
            self._actions.append((_Step.CANCEL_SOURCE, handoff))
            return
        self._take(reply.reports)

    def _transfer(self, handoff: _Handoff, port: Port) -> None:
        if self._down and not self._down.isdisjoint(self._actors(handoff)):
            return
        tokens = handoff.given.prompt.length
        if self._config.timing is TransferTiming.DESTINATION_MISSING:
            tokens = handoff.fresh_blocks * self._block_size
        delay_ms = transfer_delay_ms(tokens, self._config)
        end_ms = port.now_ms + delay_ms
        port.publish(
            ev.TransferStarted(request=handoff.given.request, handoff=handoff.number, tokens=tokens, end_ms=end_ms)
        )
        if delay_ms > 0.0:
            heapq.heappush(self._transfers, (end_ms, handoff.number))
            port.send_self(_TransfersEnd(), phase=Phase.TRANSFER_END, at_ms=end_ms)
        else:
            self._moved(handoff)

    def _moved(self, handoff: _Handoff) -> None:
        handoff.moved = True
        self._actions.append((_Step.ACTIVATE, handoff))

    def _activate(self, handoff: _Handoff) -> Turn:
        placement = _known(handoff.destination)
        actor = self._workers[WorkerRole.DECODE][placement.worker]
        reply: HandoffReply = yield Ask(actor, ActivateDestination(placement.dp_rank, handoff.number, handoff.cleared))
        if reply.busy:
            self._parked.setdefault(actor, []).append((placement.dp_rank, _Step.ACTIVATE, handoff))
            return
        handoff.activated = True
        self._actions.append((_Step.RELEASE, handoff))
        self._take(reply.reports)

    def _release(self, step: _Step, handoff: _Handoff, port: Port) -> Turn:
        if step is _Step.CANCEL_SOURCE and handoff.destination is not None:
            handoff.destination = None
            yield from self._tell_over(WorkerRole.DECODE, handoff, port)
        if handoff.source_lost:
            yield from self._end(handoff, port)
            return
        placement = _known(handoff.source)
        actor = self._workers[WorkerRole.PREFILL][placement.worker]
        reply: HandoffReply = yield Ask(
            actor, ReleaseSource(placement.dp_rank, handoff.number, step is _Step.CANCEL_SOURCE)
        )
        if reply.busy:
            self._parked.setdefault(actor, []).append((placement.dp_rank, step, handoff))
            return
        yield from self._end(handoff, port)
        self._take(reply.reports)

    def _cancel(self, request: int, port: Port) -> Turn:
        """Cancel a request where it is: before, in or after its hand-off. Whoever has it publishes its end.

        Nobody has one that has ended earlier in this instant.
        """
        handoff = next((one for one in self._handoffs.values() if one.given.request == request), None)
        if handoff is None or handoff.activated:
            for actor in self._workers[WorkerRole.DECODE]:
                if (yield Ask(actor, CancelOnWorker(request))):
                    break
            return
        where = next((role for role in self._routers if (role, request) in self._unplaced), None)
        if where is not None:
            reply: RankReply = yield Ask(dealt_to(self._routers[where], request), CancelRequest(request))
            if any(chosen.request == request for chosen in reply.released):
                where = None
            else:
                del self._unplaced[where, request]
            yield from self._go_on(reply.released, port)
            if handoff.number not in self._handoffs or (_Step.CANCEL_SOURCE, handoff) in self._actions:
                return  # released, and refused by the rank
        self._forget(handoff)
        if not handoff.held and handoff.source is not None:
            yield Ask(self._workers[WorkerRole.PREFILL][handoff.source.worker], CancelOnWorker(request))
            yield from self._tell_over(WorkerRole.PREFILL, handoff, port)
        elif handoff.held:
            for role, placement in ((WorkerRole.DECODE, handoff.destination), (WorkerRole.PREFILL, handoff.source)):
                if placement is not None:
                    yield from self._abandon(self._workers[role][placement.worker], placement, handoff)
            yield from self._tell_over(WorkerRole.PREFILL, handoff, port)
        if where is None and (handoff.held or handoff.source is None):
            role = WorkerRole.DECODE if handoff.held else WorkerRole.PREFILL
            status = RequestStatus.CANCELED.value
            port.publish(RequestEnded(worker=None, role=role.value, dp_rank=None, request=request, status=status))
        self._plan(port)

    def _note_clear(self, message: CachesAreCleared) -> None:
        """Sources that are held are of before the clear."""
        for handoff in self._handoffs.values():
            source = handoff.source
            if source is None or not handoff.held or message.dp_rank not in (None, source.dp_rank):
                continue
            if self._workers[WorkerRole.PREFILL][source.worker] in message.actors:
                handoff.cleared |= message.tiers

    # -- workers that crash

    def _actors(self, handoff: _Handoff) -> tuple[str | None, str | None]:
        """Source and destination by actor, None where none was chosen."""
        source, destination = handoff.source, handoff.destination
        return (
            None if source is None else self._workers[WorkerRole.PREFILL][source.worker],
            None if destination is None else self._workers[WorkerRole.DECODE][destination.worker],
        )

    def _break_off(self, actors: Sequence[str]) -> None:
        """Transfers from and to workers that have crashed bring nothing any more."""
        self._down.update(actors)
        self._transfers = [
            entry for entry in self._transfers if self._down.isdisjoint(self._actors(self._handoffs[entry[1]]))
        ]
        heapq.heapify(self._transfers)

    def _clear_after(self, actors: Sequence[str], port: Port) -> Turn:
        """Give up the hand-offs that need a worker which is gone. Returns the requests that are lost with them."""
        lost: list[LostRequest] = []
        for handoff in list(self._handoffs.values()):
            source, destination = self._actors(handoff)
            source_lost, destination_lost = source in actors, destination in actors
            done = handoff.over or handoff.activated
            if source_lost and handoff.held:
                self._publish_lost_source(handoff, canceled=not handoff.moved, port=port)
            if source_lost and handoff.moved and not done and not destination_lost:
                handoff.source_lost = True
            elif source_lost and done:
                self._forget(handoff)
                yield from self._tell_over(WorkerRole.PREFILL, handoff, port)
            elif destination_lost and handoff.activated:
                yield from self._give_back(handoff, source_lost, destination_lost, port)
            elif (source_lost or destination_lost) and not done:
                yield from self._give_back(handoff, source_lost, destination_lost, port)
                role = WorkerRole.DECODE if destination_lost else WorkerRole.PREFILL
                placement = _known(handoff.destination if destination_lost else handoff.source)
                lost.append(LostRequest(handoff.given.request, placement.worker, role.value, placement.dp_rank))
        for actor in actors:
            self._parked.pop(actor, None)
        self._plan(port)
        return tuple(lost)

    def _give_back(self, handoff: _Handoff, source_lost: bool, destination_lost: bool, port: Port) -> Turn:
        """End a hand-off that cannot go on; what it holds on a worker that is left is given back."""
        self._forget(handoff)
        request = handoff.given.request
        if self._unplaced.pop((WorkerRole.DECODE, request), None) is not None:
            reply: RankReply = yield Ask(self._router(WorkerRole.DECODE, handoff), WithdrawRequest(request))
            yield from self._go_on(reply.released, port)
        source, destination = self._actors(handoff)
        if destination is not None and not destination_lost:
            yield from self._abandon(destination, _known(handoff.destination), handoff)
            yield from self._tell_over(WorkerRole.DECODE, handoff, port)
        if handoff.held and source is not None and not source_lost:
            yield from self._abandon(source, _known(handoff.source), handoff)
        yield from self._tell_over(WorkerRole.PREFILL, handoff, port)

    def _abandon(self, actor: str, placement: Placement, handoff: _Handoff) -> Turn:
        abandoned: HandoffReply = yield Ask(actor, AbandonHandoff(placement.dp_rank, handoff.number))
        self._take(abandoned.reports)

    def _publish_lost_source(self, handoff: _Handoff, *, canceled: bool, port: Port) -> None:
        source = _known(handoff.source)
        port.publish(
            ev.SourceReleased(
                request=handoff.given.request,
                handoff=handoff.number,
                worker=source.worker,
                role=WorkerRole.PREFILL.value,
                dp_rank=source.dp_rank,
                canceled=canceled,
            )
        )

    def _forget(self, handoff: _Handoff) -> None:
        """Nothing more is done for a hand-off."""
        del self._handoffs[handoff.number]
        self._actions = deque(entry for entry in self._actions if entry[1] is not handoff)
        self._parked = {
            actor: [entry for entry in entries if entry[2] is not handoff] for actor, entries in self._parked.items()
        }
        self._transfers = [entry for entry in self._transfers if entry[1] != handoff.number]
        heapq.heapify(self._transfers)

    def _router(self, role: WorkerRole, handoff: _Handoff) -> str:
        return dealt_to(self._routers[role], handoff.given.request)

    def _choose(self, role: WorkerRole, handoff: _Handoff, port: Port) -> Turn:
        """The rank that a router chooses; None if the request waits there, or is refused."""
        reply: RankReply = yield Ask(self._router(role, handoff), ChooseRank(handoff.arrived))
        yield from self._go_on(reply.released, port)
        if isinstance(reply.answer, Placement):
            return reply.answer
        if isinstance(reply.answer, RankIsPending):
            self._unplaced[role, handoff.given.request] = handoff
        else:
            self._give_up(role, handoff)
        return None

    def _end(self, handoff: _Handoff, port: Port) -> Turn:
        del self._handoffs[handoff.number]
        yield from self._tell_over(WorkerRole.PREFILL, handoff, port)

    def _tell_over(self, role: WorkerRole, handoff: _Handoff, port: Port) -> Turn:
        """Tell a router that its rank is done with the request. What it releases joins passes of this instant."""
        if role not in self._listening:
            return
        reply: RankReply = yield Ask(self._router(role, handoff), RequestIsOver(handoff.given.request))
        yield from self._go_on(reply.released, port)

    def _go_on(self, released: Sequence[RankChosen], port: Port) -> Turn:
        """Requests that have waited in a router go where it sends them."""
        for chosen in released:
            handoff = self._unplaced.pop((chosen.role, chosen.request))
            if isinstance(chosen.answer, RankIsRefused):
                self._give_up(chosen.role, handoff)
            elif chosen.role is WorkerRole.PREFILL:
                handoff.source = chosen.answer
                yield from self._submit(handoff, port)
            else:
                handoff.destination = chosen.answer
                yield from self._reserve(handoff, port)
        self._plan(port)

    def _give_up(self, role: WorkerRole, handoff: _Handoff) -> None:
        """A router refused the request, and has published its end."""
        if role is WorkerRole.PREFILL:
            del self._handoffs[handoff.number]
        else:
            handoff.over = True
            self._actions.append((_Step.CANCEL_SOURCE, handoff))

    def _take(self, reports: Sequence[HandoffReport]) -> None:
        """Queue what follows from what ranks report."""
        for report in reports:
            if isinstance(report, SourceIsRejected):
                self._handoffs[report.handoff].over = True
                self._actions.append((_Step.CLEAR_AWAY, self._handoffs[report.handoff]))
            elif isinstance(report, SourceIsHeld):
                self._handoffs[report.handoff].held = True
                self._handoffs[report.handoff].cleared = report.cleared
                self._actions.append((_Step.RESERVE, self._handoffs[report.handoff]))
            else:
                handoff = self._handoffs[report.handoff]
                handoff.fresh_blocks = report.fresh_blocks
                self._actions.append((_Step.TRANSFER, handoff))


def _known(placement: Placement | None) -> Placement:
    if placement is None:
        raise ProtocolError("a hand-off goes on before its rank was chosen")
    return placement
