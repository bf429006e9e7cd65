"""A worker on the bus: its ranks, one clock for all of them, and the events that the world sees.

Owns: when passes start and end, and what is published when. Refuses to know: what a pass does (``rank``), and how a
shared pool works (it is asked over the bus; a private tier is served here).
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Generator, Sequence
from functools import partial
from typing import Any

import attrs

from g2sim.actors.config import WorkerRole
from g2sim.actors.handoff import events as handoff_events
from g2sim.actors.host_pool.actor import end_pass_late, publish_outbox
from g2sim.actors.host_pool.events import OF_TRANSFER_ENDS
from g2sim.actors.host_pool.messages import (
    QUIET,
    BoundaryReply,
    Clear,
    HostProgress,
    Join,
    NewsAt,
    PoolChange,
    Retire,
    StandBy,
    StandDown,
    TakeNews,
)
from g2sim.actors.host_pool.transfers import Link
from g2sim.actors.kv.events import BlocksCleared, BlocksRemoved, BlocksStored, Tier
from g2sim.actors.membership.events import CachesCleared, WorkerCrashed, WorkerRestarted
from g2sim.actors.membership.messages import ClearCaches, Crash, LostRequest, Restart, TakeLost
from g2sim.actors.phases import Phase
from g2sim.actors.traffic.request import RequestStatus
from g2sim.actors.worker import events as ev
from g2sim.actors.worker.deferred_passes import MOST_PASSES, DeferredPasses, DeferredRetries, LateShow
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
    SubmitRequest,
    WorkerReport,
)
from g2sim.actors.worker.place import RankPlace
from g2sim.actors.worker.rank import DeviceChange, PassResult, RemovedBlocks
from g2sim.bus.errors import ProtocolError
from g2sim.bus.kernel import Envelope, Port

Reply = HandoffReply | bool | tuple[LostRequest, ...] | None


@attrs.frozen(slots=True)
class Begin:
    """First message of a run: join the host tier."""


@attrs.frozen(slots=True)
class _StartPass:
    pass


@attrs.frozen(slots=True)
class _PassEnd:
    pass


@attrs.frozen(slots=True)
class _HostDeadline:
    pass


_OF_DECODE_PASSES = (ev.PassStarted, ev.PassEnded, BlocksStored, BlocksRemoved)
"""What is published of passes that only decode."""
_DEVICE, _HOST_PINNED = Tier.DEVICE.value, Tier.HOST_PINNED.value
_PASS_END = _PassEnd()
_START_PASS = _StartPass()


class WorkerActor:
    """See the module's text.

    Args:
        name: the actor's name on the bus.
        worker: its number within its role.
        role: "aggregated", "prefill" or "decode".
        places: its ranks.
        shared_pool: name of the shared pool's actor, None without one.
        link: the ranks' connection to their host tier, None without one.
        coordinator: name of the hand-off coordinator, None in an aggregated deployment.
        watched: somebody subscribes to this worker's KV events, so hearing of a change in a shared pool is an effect.
    """

    def __init__(
        self,
        *,
        name: str,
        worker: int,
        role: str,
        places: Sequence[RankPlace],
        shared_pool: str | None,
        link: Link | None,
        coordinator: str | None,
        watched: bool,
    ) -> None:
        self.name = name
        self.worker = worker
        self.role = role
        self.places = tuple(places)
        self._shared_pool = shared_pool
        self._link = link
        self._coordinator = coordinator
        self._watched = watched
        self._report_is_awaited = False
        self._canceled: dict[int, RankPlace] = {}
        self._in_flight: list[tuple[RankPlace, PassResult]] | None = None
        self._pass_end: Envelope | None = None
        self._defers = False
        self._stands_by = False
        self._takes_news = False
        self._down = False
        self._lost: dict[int, LostRequest] = {}
        self._start_is_due = False
        self._deadline: Envelope | None = None
        self._deadline_ms: float | None = None

    quiet = frozenset({_PassEnd, _StartPass, _HostDeadline, HostProgress, SubmitRequest})

    def receive(self, message: Any, port: Port) -> Reply:
        kind = type(message)
        if self._defers:
            if self._takes_news and kind is HostProgress:
                port.no_effect()  # it looks at the end of the pass in flight
                return None
            port.recall_own()
        if self._down:
            return self._receive_while_down(message, port)
        if kind is _PassEnd:
            self._end_pass(port)
        elif kind is _StartPass:
            self._start_pass(port)
        elif kind is HostProgress:
            self._hear_of_transfers(self.places, message.due, port)
        elif kind is _HostDeadline:
            self._meet_deadline(port)
        elif kind is SubmitRequest:
            self._submit(message, port)
        elif kind is AbandonHandoff:
            return self._abandon(message, port)
        elif kind is CancelOnWorker:
            return self._cancel(message.request, port)
        elif kind is ReserveDestination:
            return self._reserve(message, port)
        elif kind is ActivateDestination or kind is ReleaseSource:
            return self._change_handoff(message, port)
        elif kind is Begin:
            self._begin(port)
        elif kind is Crash:
            self._crash(message, port)
        elif kind is ClearCaches:
            self._clear(message, port)
        else:
            raise ProtocolError(f"{self.name}: no use for a {kind.__name__}")
        return None

    @property
    def busy(self) -> bool:
        """Whether a pass is in flight."""
        return self._in_flight is not None

    @property
    def _ready(self) -> bool:
        return any(place.rank.ready for place in self.places)

    @property
    def _has_news(self) -> bool:
        """Whether some rank has KV events that somebody waits for."""
        return self._watched and any(
            place.rank.device_changes or place.rank.host_changes or place.rank.restored for place in self.places
        )

    def waiting(self) -> Sequence[str]:
        return [
            f"rank {place.dp_rank}: {line}" if len(self.places) > 1 else line
            for place in self.places
            for line in place.rank.waiting()
        ]

    # -- messages

    def _begin(self, port: Port) -> None:
        told = port.hears(BlocksStored) or port.hears(BlocksRemoved)
        for place in self.places:
            place.rank.notes_changes = told
            place.ask = partial(self._ask_host, place, port)
            if self._link is None:
                continue
            snapshot = place.ask(
                Join(
                    client=place.rank.client,
                    worker=self.worker,
                    role=self.role,
                    dp_rank=place.dp_rank,
                    link=self._link,
                    actor=self.name,
                )
            )
            place.rank.host_changes.extend(snapshot)
            self._publish_changes(place, port)

    def _submit(self, message: SubmitRequest, port: Port) -> None:
        self.places[message.dp_rank].rank.submit(message.given, message.handoff)
        port.publish(
            ev.RequestQueued(worker=self.worker, role=self.role, dp_rank=message.dp_rank, request=message.given.request)
        )
        self._plan(port)

    def _cancel(self, request: int, port: Port) -> bool:
        """Take a request off its rank; one that a pass in flight computes leaves when that has ended."""
        for place in self.places:
            computed = self._in_flight is not None and (
                place.rank.computes(request)
                or any(place is one and _shows(result, request) for one, result in self._in_flight)
            )
            if not computed and not place.rank.has(request):
                continue
            self._tell_passes(place, port)
            if computed:
                self._canceled[request] = place
            left = not computed and place.rank.cancel(request)
            port.publish(
                ev.RequestEnded(
                    request=request, status=RequestStatus.CANCELED.value, leaves_later=not left, **place.who
                )
            )
            self._plan(port)
            return True
        return False

    def _start_pass(self, port: Port) -> None:
        self._start_is_due = False
        if self._in_flight is not None or not self._ready:
            port.no_effect()
            return
        now_ms = port.now_ms
        results: list[tuple[RankPlace, PassResult]] = []
        end_ms = now_ms
        for place in self.places:
            rank = place.rank
            if rank.ready:
                result = rank.decode_pass(now_ms, place.ask) or _talk(place, rank.run_pass(now_ms))
                if result.end_ms > end_ms:
                    end_ms = result.end_ms
                results.append((place, result))
        if end_ms > now_ms:
            for place, result in results:
                self._publish_start(place, result, port)
            self._in_flight = results
            if self._deadline is not None:
                port.cancel(self._deadline)
                self._deadline = self._deadline_ms = None
            if not self._defer_passes(results, port):
                self._pass_end = port.send_self(_PASS_END, phase=Phase.PASS_END, at_ms=end_ms)
            return
        self._close(results, port)
        if not any(result.progress for _, result in results) and not self._has_news:
            port.no_effect()
            if self._ready:
                # Try again when something else has changed.
                self._start_is_due = True
                if not self._stand_by(port):
                    port.retry(_START_PASS, phase=Phase.START)
        for place, result in results:
            self._publish_start(place, result, port)
        self._show(results, port)
        self._plan(port)

    def _defer_passes(self, results: Sequence[tuple[RankPlace, PassResult]], port: Port) -> bool:
        """Put off what follows a decode pass that has begun, as far as it concerns nobody else. False if it does."""
        place, result = results[0]
        rank = place.rank
        if len(self.places) > 1 or not result.only_tokens or self._canceled or self._report_is_awaited:
            return False
        if not port.may_defer(*_OF_DECODE_PASSES):
            return False
        look_up = rank.blocked_look_up
        news_at_ms = math.inf
        carefree = False
        if rank.boundary is not None:
            carefree = rank.is_carefree and port.may_defer(*OF_TRANSFER_ENDS)
            news_at_ms = place.ask(NewsAt(rank.client, look_up, carefree))
            if news_at_ms <= result.end_ms:
                return False
        ends_ms = [result.end_ms, *rank.plan_decode_passes(result.end_ms, MOST_PASSES)]
        del ends_ms[bisect_right(ends_ms, port.time_limit_ms, 1) :]
        del ends_ms[bisect_left(ends_ms, news_at_ms, 1) :]
        if len(ends_ms) == 1:
            return False
        if carefree or look_up is not None or news_at_ms != math.inf:
            place.ask(StandBy(rank.client, port.order, look_up, ends_ms[:-1], carefree))
            self._stands_by = True
        self._takes_news = carefree
        self._take_up_run(place, result.emitted, port)
        show: LateShow | None = None
        if any(map(port.hears, _OF_DECODE_PASSES)):
            show = LateShow(place, result, port, partial(self._publish_changes, place, port))
        take_news = partial(self._take_news, place, ends_ms, port) if carefree else None
        port.defer(DeferredPasses(place, ends_ms, port, show, take_news, partial(self._go_on, port)))
        self._defers = True
        self._pass_end = port.send_self(_PASS_END, phase=Phase.PASS_END, at_ms=ends_ms[-1])
        return True

    def _take_news(
        self, place: RankPlace, ends_ms: Sequence[float], port: Port, first: int, stop: int
    ) -> Sequence[tuple[int, BoundaryReply]]:
        """What the host tier has told at the ends from ``first`` to ``stop`` of passes that were put off."""
        client, own_pool = place.rank.client, place.own_pool
        if own_pool is None:
            news: Sequence[tuple[int, BoundaryReply]] = place.ask(TakeNews(client))
            return news
        found = []
        for at in range(first, stop):
            if own_pool.at_rest:
                break
            reply = end_pass_late(own_pool, client, ends_ms[at], port.order, port)
            if reply is not None:
                found.append((at, reply))
        return found

    def _stand_by(self, port: Port) -> bool:
        """Leave retries out that would come to nothing as long as nobody changes anything. False if they may not."""
        place = self.places[0]
        rank = place.rank
        if len(self.places) > 1 or not rank.is_stuck or not port.may_defer():
            return False
        if rank.boundary is not None:
            look_up = rank.blocked_look_up
            if place.ask(NewsAt(rank.client, look_up)) != math.inf:
                return False
            place.ask(StandBy(rank.client, port.order, look_up))
            self._stands_by = True
        port.defer(DeferredRetries(partial(self._try_again, port)))
        self._defers = True
        return True

    def _try_again(self, port: Port) -> None:
        """Retries that were put off are recalled."""
        self._stand_down()
        port.park_again(_START_PASS, Phase.START)

    def _stand_down(self) -> None:
        self._defers = self._takes_news = False
        if self._stands_by:
            self._stands_by = False
            place = self.places[0]
            place.ask(StandDown(place.rank.client))

    def _go_on(self, port: Port, end_ms: float | None) -> None:
        """Deferred passes are recalled: the one in flight ends at ``end_ms``, or the last one has just ended."""
        self._stand_down()
        planned = self._pass_end
        if planned is None or planned.time_ms == end_ms:
            return
        port.cancel(planned)
        if end_ms is None:
            self._in_flight = None
            self._plan(port)
        else:
            self._pass_end = port.send_self(_PASS_END, phase=Phase.PASS_END, at_ms=end_ms)

    def _end_pass(self, port: Port) -> None:
        results = self._in_flight
        if results is None:
            raise ProtocolError(f"{self.name}: a pass ends, but none is in flight")
        self._in_flight = None
        for request, place in self._canceled.items():
            if place.rank.has(request) and not place.rank.cancel(request):
                raise ProtocolError(f"{self.name}: request {request} was computed while it was restored")
        self._close(results, port)
        self._show(results, port)
        self._plan(port)

    def _close(self, results: list[tuple[RankPlace, PassResult]], port: Port) -> None:
        """Let the host tier and the reservations of every rank take their part of a pass end."""
        for place in self.places:
            rank = place.rank
            if rank.boundary is not None:
                reply = place.ask(rank.boundary)
                if reply is not QUIET:
                    rank.end_pass(reply)
            reports = rank.try_reservation() if rank.wants_reservation else ()
            if not reports:
                continue
            by_rank = {place.dp_rank: result for place, result in results}
            if place.dp_rank not in by_rank:
                # A rank that had no part in the pass can still reserve at its end.
                by_rank[place.dp_rank] = PassResult()
                results.append((place, by_rank[place.dp_rank]))
            by_rank[place.dp_rank].reports.extend(reports)

    def _reserve(self, message: ReserveDestination, port: Port) -> HandoffReply:
        place = self.places[message.dp_rank]
        reply = place.rank.reserve_destination(message.handoff, message.given, idle=self._in_flight is None)
        self._publish_reports(place, reply.reports, port)
        self._after_command(place, port)
        return reply

    def _change_handoff(self, message: ActivateDestination | ReleaseSource, port: Port) -> HandoffReply:
        if self._in_flight is not None:
            self._report_is_awaited = True
            return HandoffReply(busy=True)
        place = self.places[message.dp_rank]
        who = place.who | {"handoff": message.handoff}
        if isinstance(message, ActivateDestination):
            request = place.rank.activate_destination(message.handoff, message.cleared)
            port.publish(handoff_events.DestinationActivated(request=request, **who))
        else:
            request = place.rank.release_source(message.handoff)
            port.publish(handoff_events.SourceReleased(request=request, canceled=message.canceled, **who))
        reports = place.rank.try_reservation()
        self._publish_reports(place, reports, port)
        self._after_command(place, port)
        return HandoffReply(reports=reports)

    def _abandon(self, message: AbandonHandoff, port: Port) -> HandoffReply:
        place = self.places[message.dp_rank]
        request = place.rank.abandon(message.handoff)
        if request is not None:
            who = place.who | {"handoff": message.handoff}
            port.publish(handoff_events.SourceReleased(request=request, canceled=True, **who))
        reports = place.rank.try_reservation() if self._in_flight is None else ()
        self._publish_reports(place, reports, port)
        self._after_command(place, port)
        return HandoffReply(reports=reports)

    def _after_command(self, place: RankPlace, port: Port) -> None:
        if self._in_flight is None:
            self._publish_changes(place, port)
            self._plan(port)

    def _meet_deadline(self, port: Port) -> None:
        self._deadline = self._deadline_ms = None
        due = [place for place in self.places if _is_due(place, port.now_ms)]
        self._hear_of_transfers(due, True, port)

    def _hear_of_transfers(self, places: Sequence[RankPlace], due: bool, port: Port) -> None:
        if self._in_flight is not None:
            port.no_effect()
            return
        news = False
        for place in places:
            _talk(place, place.rank.tick())
            news = news or bool(place.rank.host_changes)
            self._publish_changes(place, port)
        self._publish_left(port)
        if not due and not (news and self._watched):
            port.no_effect()
        self._plan(port)

    def _clear(self, message: ClearCaches, port: Port) -> None:
        """Lose all that can be found; shown at once, or at the end of the pass in flight."""
        emptied: list[RankPlace] = []
        for place in self.places:
            if message.dp_rank not in (None, place.dp_rank):
                continue
            rank = place.rank
            dropped, kept = rank.clear(message.tiers)
            for one, result in self._in_flight or ():
                if one is place:
                    result.reports = [_of_before_a_clear(report, message.tiers) for report in result.reports]
            clears_host = Tier.HOST_PINNED in message.tiers and self._link is not None
            port.publish(
                CachesCleared(
                    fault=message.fault,
                    device_dropped_blocks=dropped,
                    device_kept_blocks=kept,
                    host_dropped_blocks=place.ask(Clear(client=rank.client)) if clears_host else 0,
                    **place.who,
                )
            )
            if (dropped or kept) and self._link is None:
                emptied.append(place)
        if self._in_flight is not None:
            return
        for place in self.places:
            if self._link is not None:
                _talk(place, place.rank.tick())
            if place in emptied:
                # With a host tier a rank says what left it block by block, as one clear stands for all tiers.
                place.rank.drop_changes()
                port.publish(BlocksCleared(tier=None, event_id=place.next_event_id, **place.who))
                place.next_event_id += 1
            self._publish_changes(place, port)
        self._publish_left(port)
        self._plan(port)

    # -- crashing

    def _crash(self, message: Crash, port: Port) -> None:
        """The process dies. What the host tier knows of it is given up; a pass under way never shows."""
        self._down = True
        for pending in (self._pass_end if self._in_flight is not None else None, self._deadline):
            if pending is not None:
                port.cancel(pending)
        self._deadline = self._deadline_ms = None
        ends = [(place, [end.request for end in result.endings]) for place, result in self._in_flight or ()]
        self._in_flight = None
        self._report_is_awaited = False
        self.tell_passes(port)
        for place, requests in (*((place, place.rank.requests()) for place in self.places), *ends):
            for request in requests:
                if request not in self._canceled:
                    self._lose(request, place)
        port.publish(WorkerCrashed(worker=self.worker, role=self.role, fault=message.fault))
        for place in self.places:
            left = [request for request, where in self._canceled.items() if where is place]
            for request in (*left, *place.rank.leaving()):
                port.publish(ev.CanceledRequestLeft(request=request, **place.who))
            if self._link is not None:
                place.ask(Retire(client=place.rank.client, abrupt=True))
            if place.own_pool is not None:
                place.own_pool.empty()
                publish_outbox(place.own_pool, port)
            place.rank = place.rank.fresh()
            place.next_event_id = 0
        self._canceled.clear()

    def _receive_while_down(self, message: Any, port: Port) -> Reply:
        """Nobody answers, so what is asked for stays undone until whoever asked learns why."""
        kind = type(message)
        if kind is Restart:
            self._restart(message, port)
            return None
        if kind is TakeLost:
            lost = tuple(self._lost.values())
            self._lost.clear()
            return lost
        if kind is SubmitRequest:
            self._lose(message.given.request, self.places[message.dp_rank])
            return None
        if kind is CancelOnWorker:
            lost_one = self._lost.pop(message.request, None)
            if lost_one is None:
                return False
            who = self.places[lost_one.dp_rank].who
            port.publish(ev.RequestEnded(request=message.request, status=RequestStatus.CANCELED.value, **who))
            return True
        if kind is ActivateDestination or kind is ReleaseSource:
            return HandoffReply(busy=True)
        if kind is ReserveDestination or kind is AbandonHandoff:
            return HandoffReply()
        if kind is _StartPass:
            self._start_is_due = False
        port.no_effect()
        return None

    def _restart(self, message: Restart, port: Port) -> None:
        self._down = False
        port.publish(WorkerRestarted(worker=self.worker, role=self.role, fault=message.fault))
        self._begin(port)

    def _lose(self, request: int, place: RankPlace) -> None:
        self._lost[request] = LostRequest(request, self.worker, self.role, place.dp_rank)

    # -- showing

    def _publish_start(self, place: RankPlace, result: PassResult, port: Port) -> None:
        """Publish what shows at the start of a pass; of one that comes to nothing, only what it preempted.

        A request can be admitted, and make room for the next one in the same pass.
        """
        who = place.who
        if result.preempted:
            admitted = {admission.request for admission in result.admissions}
            for request in result.preempted:
                if request not in admitted:
                    port.publish(ev.RequestPreempted(request=request, **who))
        if not result.is_pass:
            return
        for admission in result.admissions:
            port.publish(
                ev.RequestAdmitted(
                    request=admission.request,
                    reused_tokens=admission.reused_tokens,
                    g1_tokens=admission.g1_tokens,
                    host_tokens=admission.host_tokens,
                    readmission=admission.readmission,
                    **who,
                )
            )
            if admission.request in result.preempted:
                port.publish(ev.RequestPreempted(request=admission.request, **who))
        if port.hears(ev.PassStarted):
            port.publish_values(ev.PassStarted, place.pass_started(result, result.compute_start_ms, result.end_ms))

    def _show(self, results: Sequence[tuple[RankPlace, PassResult]], port: Port) -> None:
        """Make passes visible, rank by rank: KV events first, then tokens and ends."""
        for place in self.places:
            self._publish_changes(place, port)
        if len(results) == 1 and not self._canceled and not self._report_is_awaited:
            place, result = results[0]
            if result.only_tokens and not result.reports:
                self._count_pass(place, result, port)
                self._publish_left(port)
                return
        self._show_all(results, port)

    def _count_pass(self, place: RankPlace, result: PassResult, port: Port) -> None:
        """Show a pass that gave tokens and did nothing else, and keep what its run is to be told of it."""
        if port.hears(ev.PassEnded):
            port.publish_values(ev.PassEnded, place.pass_ended(result, result.emitted))
        place.pass_idx += 1
        if port.hears(ev.PassesEnded):
            self._take_up_run(place, result.emitted, port)
            place.times_ms.append(port.now_ms)

    def _take_up_run(self, place: RankPlace, emitted: tuple[int, ...], port: Port) -> None:
        """Tell what is known of another run before passes of this one are counted."""
        if emitted is not place.emitted:
            self._tell_passes(place, port)
            place.emitted = emitted

    def _show_all(self, results: Sequence[tuple[RankPlace, PassResult]], port: Port) -> None:
        reports: list[HandoffReport] = []
        # A prefill rank's token and its end of work are the hand-off's, not the request's.
        hands_over = self.role == WorkerRole.PREFILL
        for place, result in results:
            if not result.progress:
                continue
            who = place.who
            if result.is_pass:
                emitted = () if hands_over else self._without_canceled_requests(result.emitted)
                self._tell_passes(place, port)
                if port.hears(ev.PassEnded):
                    port.publish_values(ev.PassEnded, place.pass_ended(result, emitted))
                if port.hears(ev.PassesEnded):
                    port.publish(
                        ev.PassesEnded(
                            worker=self.worker,
                            role=self.role,
                            dp_rank=place.dp_rank,
                            ends_ms=array("d", [port.now_ms]),
                            emitted=emitted,
                            prefill_tokens=result.prefill_tokens,
                        )
                    )
                if not result.only_tokens and port.hears(ev.PassGave):
                    port.publish(ev.PassGave(role=self.role, emitted=emitted))
                place.pass_idx += 1
            for ending in result.endings:
                if ending.request in self._canceled:
                    continue
                if hands_over and ending.status is RequestStatus.COMPLETED:
                    continue
                port.publish(ev.RequestEnded(request=ending.request, status=ending.status.value, **who))
            wanted = self._without_canceled(place, result.reports)
            self._publish_reports(place, wanted, port)
            reports.extend(wanted)
        self._publish_left(port)
        if self._coordinator is not None and (reports or self._report_is_awaited):
            self._report_is_awaited = False
            port.send(self._coordinator, WorkerReport(self.name, tuple(reports)), phase=Phase.REPORT)

    def tell_passes(self, port: Port) -> None:
        """Publish what is known of passes that have ended; after a run, whose last passes may not be told yet."""
        for place in self.places:
            self._tell_passes(place, port)

    def _tell_passes(self, place: RankPlace, port: Port) -> None:
        if place.times_ms:
            ends_ms, place.times_ms = place.times_ms, array("d")
            port.publish(ev.PassesEnded(self.worker, self.role, place.dp_rank, ends_ms, place.emitted, 0))

    def _without_canceled_requests(self, requests: tuple[int, ...]) -> tuple[int, ...]:
        if not self._canceled:
            return requests
        return tuple([request for request in requests if request not in self._canceled])

    def _without_canceled(self, place: RankPlace, reports: Sequence[HandoffReport]) -> list[HandoffReport]:
        """Reports of hand-offs that somebody still waits for; the sources of the others are released."""
        for report in reports:
            if report.request in self._canceled and isinstance(report, SourceIsHeld):
                place.rank.release_source(report.handoff)
        return [report for report in reports if report.request not in self._canceled]

    def _publish_left(self, port: Port) -> None:
        """Publish which canceled requests hold nothing any more."""
        for place in self.places:
            rank = place.rank
            if not self._canceled and not rank.canceled_left:
                continue
            left = [request for request, where in self._canceled.items() if where is place]
            for request in (*left, *rank.take_left()):
                port.publish(ev.CanceledRequestLeft(request=request, **place.who))
        self._canceled.clear()

    def _publish_reports(self, place: RankPlace, reports: Sequence[HandoffReport], port: Port) -> None:
        who = place.who
        for report in reports:
            if isinstance(report, SourceIsHeld):
                port.publish(handoff_events.SourceHeld(request=report.request, handoff=report.handoff, **who))
            elif isinstance(report, DestinationIsReserved):
                port.publish(
                    handoff_events.DestinationReserved(
                        request=report.request, handoff=report.handoff, fresh_blocks=report.fresh_blocks, **who
                    )
                )

    def _publish_changes(self, place: RankPlace, port: Port, late_ms: float | None = None) -> None:
        """Publish the rank's KV events: its passes' device changes, host changes, then restored device blocks.

        Args:
            late_ms: when they happened, if that was in a deferred turn.
        """
        rank = place.rank
        if not rank.device_changes and not rank.host_changes and not rank.restored:
            return
        if not rank.notes_changes:
            rank.drop_changes()
            return
        for change in rank.device_changes:
            self._publish_change(place, _DEVICE, change, type(change) is RemovedBlocks, port, late_ms)
        for host_change in rank.host_changes:
            self._publish_change(place, _HOST_PINNED, host_change, not host_change.stored, port, late_ms)
        for change in rank.restored:
            self._publish_change(place, _DEVICE, change, type(change) is RemovedBlocks, port, late_ms)
        rank.drop_changes()

    def _publish_change(
        self,
        place: RankPlace,
        tier: str,
        change: DeviceChange | PoolChange,
        removed: bool,
        port: Port,
        late_ms: float | None,
    ) -> None:
        """Publish the rank's next KV event."""
        event_type: type[Any]
        values: tuple[Any, ...]
        if removed:
            event_type, values = BlocksRemoved, (*place.named, place.next_event_id, tier, change.block_hashes)
        else:
            stored: Any = change
            event_type = BlocksStored
            values = (
                *place.named,
                place.next_event_id,
                tier,
                stored.parent_hash,
                stored.start_position,
                stored.block_hashes,
                stored.tokens_hashes,
            )
        place.next_event_id += 1
        if late_ms is None:
            port.publish_values(event_type, values)
        else:
            port.publish_late_values(late_ms, Phase.PASS_END, event_type, values)

    # -- inside

    def _plan(self, port: Port) -> None:
        """After a turn that leaves the worker idle: see to it that it starts, and hears of its transfers, on time."""
        if self._in_flight is not None:
            return
        if not self._start_is_due and self._ready:
            port.send_self(_START_PASS, phase=Phase.START)
            self._start_is_due = True
        if self._shared_pool is not None or self._link is None:
            return
        deadlines = [place.own_pool.next_event_ms() for place in self.places if place.own_pool is not None]
        deadline_ms = min((deadline for deadline in deadlines if deadline is not None), default=None)
        if deadline_ms == self._deadline_ms:
            return
        if self._deadline is not None:
            port.cancel(self._deadline)
        self._deadline_ms = deadline_ms
        self._deadline = None
        if deadline_ms is not None:
            self._deadline = port.send_self(_HostDeadline(), phase=Phase.TICK, at_ms=max(deadline_ms, port.now_ms))

    def _ask_host(self, place: RankPlace, port: Port, message: Any) -> Any:
        own_pool = place.own_pool
        if own_pool is None:
            if self._shared_pool is None:
                raise ProtocolError(f"{self.name}: there is no host tier to ask")
            return port.call(self._shared_pool, message)
        reply = own_pool.serve(message, port.now_ms)
        publish_outbox(own_pool, port)
        return reply


def _talk(place: RankPlace, steps: Generator[Any, Any, Any]) -> Any:
    """Drive one of a rank's methods, answering what it asks of its host tier."""
    reply: Any = None
    try:
        while True:
            reply = place.ask(steps.send(reply))
    except StopIteration as stop:
        return stop.value


def _shows(result: PassResult, request: int) -> bool:
    """Whether a pass ends, or puts something out for, this request."""
    return request in result.emitted or any(one.request == request for one in (*result.endings, *result.reports))


def _of_before_a_clear(report: HandoffReport, tiers: frozenset[Tier]) -> HandoffReport:
    if not isinstance(report, SourceIsHeld):
        return report
    return SourceIsHeld(report.handoff, report.request, report.cleared | tiers)


def _is_due(place: RankPlace, now_ms: float) -> bool:
    if place.own_pool is None:
        return False
    next_ms = place.own_pool.next_event_ms()
    return next_ms is not None and next_ms <= now_ms
