"""Traffic on the bus: releases requests when they are ready, and tells the driver how they ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs

from g2sim.actors.handoff.departures import Departures
from g2sim.actors.handoff.events import SourceReleased
from g2sim.actors.host_pool.events import (
    ClientRetired,
    LoadFinished,
    LoadQueued,
    StoreDropped,
    StoreLanded,
    StorePrepared,
)
from g2sim.actors.kv.blocks import BlockHasher
from g2sim.actors.kv.prompt import OUTPUT_TOKEN_BASE, continued_prompt
from g2sim.actors.membership.messages import SendAgain
from g2sim.actors.phases import Phase
from g2sim.actors.router.messages import CancelRequest, PlaceRequest, dealt_to
from g2sim.actors.traffic.events import RequestArrived
from g2sim.actors.traffic.play_driver import PlayDriver
from g2sim.actors.traffic.request import Cancel, LoadControl, Release, RequestStatus, TrafficDriver
from g2sim.actors.worker.events import CanceledRequestLeft, RequestEnded
from g2sim.actors.worker.sequence import RankRequest
from g2sim.bus.errors import InvariantViolation, ProtocolError
from g2sim.bus.kernel import Envelope, Port, Subscription


@attrs.frozen(slots=True)
class Begin:
    """First message of a run."""


@attrs.frozen(slots=True)
class RequestsEnded:
    """Some requests have ended; the subscription's inbox says which."""


@attrs.frozen(slots=True)
class _Ready:
    """Timer of the next arrival."""


def watched_events(driver: TrafficDriver, *, disaggregated: bool) -> list[type[Any]]:
    """The events that a traffic actor has to hear of."""
    events: list[type[Any]] = [RequestEnded]
    if disaggregated:
        events.append(SourceReleased)
    if isinstance(driver, LoadControl):
        events.append(CanceledRequestLeft)
        if driver.prepares:
            events += [StorePrepared, StoreLanded, StoreDropped, LoadQueued, LoadFinished, ClientRetired]
    return events


class TrafficActor:
    """See the module's text.

    Args:
        driver: says what is ready when.
        hasher: identifies prompt blocks for the deployment's block size.
        fronts: actors that take requests in, in turns (the router replicas, or the hand-off coordinator).
        front_phase, cancel_phase: when they hear of arrivals, and of cancellations.

    ``ends`` must be set before the run starts, to the subscription that carries the events of ended requests, and of
    what the servers still hold of them (``watched_events``).
    ``keeps_requests`` is to be set if requests may have to be sent again.
    ``on_request`` may be set to what looks at requests as they are sent out; it changes nothing.
    """

    ends: Subscription
    on_request: Callable[[RankRequest], None] | None = None
    keeps_requests = False
    quiet = frozenset({RequestsEnded, _Ready})

    def __init__(
        self,
        *,
        driver: TrafficDriver,
        hasher: BlockHasher,
        fronts: Sequence[str],
        front_phase: Phase,
        cancel_phase: Phase,
    ) -> None:
        self._driver = driver
        self._load = driver if isinstance(driver, LoadControl) else None
        self._departures = Departures[int]()  # keys
        self._canceled: dict[int, float] = {}  # request -> when [ms]; until it is known to have ended
        self._transfers: set[tuple[str, int]] = set()
        self._hasher = hasher
        self._fronts = tuple(fronts)
        self._front_phase = front_phase
        self._cancel_phase = cancel_phase
        self._keys: dict[int, int] = {}
        self._sent: dict[int, PlaceRequest] = {}
        self._released = 0
        self._output_base = 0
        self._timer: Envelope | None = None
        self._timer_ms: float | None = None

    def receive(self, message: Any, port: Port) -> None:
        kind = type(message)
        if self._canceled:
            self._check_canceled(port.now_ms)
        if kind is _Ready:
            self._timer = self._timer_ms = None
            self._control(port)
            for release in self._driver.release(port.now_ms):
                self._send_out(release, port)
        elif kind is RequestsEnded:
            self._take_note(port)
        elif kind is SendAgain:
            self._send_again(message, port)
        elif kind is not Begin:
            raise ProtocolError(f"traffic: no use for a {kind.__name__}")
        self._set_timer(port)

    def _take_note(self, port: Port) -> None:
        """Tell the driver what has ended, and what has left the servers after its end."""
        ends: list[tuple[int, RequestStatus]] = []
        busy: set[int] = set()
        left: list[int] = []
        for record in self.ends.drain():
            event = record.event
            kind = type(event)
            if kind is RequestEnded:
                key, status = self._take_key(event.request), RequestStatus(event.status)
                ends.append((key, status))
                if self._departures.ended(event, key):
                    busy.add(key)
            elif kind is SourceReleased or kind is CanceledRequestLeft:
                gone = self._departures.left(event, has_ended=event.request not in self._keys)
                if gone in busy:
                    busy.remove(gone)
                elif gone is not None:
                    left.append(gone)
            elif kind is StorePrepared or kind is LoadQueued:
                self._transfers.add((event.pool, event.transfer))
            elif kind is ClientRetired:
                over = (*event.canceled_loads, *event.rolled_back_stores)
                self._transfers.difference_update((event.pool, transfer) for transfer in over)
            else:
                self._transfers.discard((event.pool, event.transfer))
        if not ends and not left:
            port.no_effect()
        plays = self._driver if isinstance(self._driver, PlayDriver) else None
        if ends and plays is None:
            self._publish(self._driver.ended(ends, port.now_ms), port)
        if ends and plays is not None:
            self._publish(plays.ended(ends, port.now_ms, busy=busy), port)
        if left and plays is not None:
            self._publish(plays.quiesced(left, port.now_ms), port)

    def _control(self, port: Port) -> None:
        if self._load is None:
            return
        canceled = []
        for item in self._load.control(port.now_ms, settled=not self._departures.any_stay and not self._transfers):
            if isinstance(item, Cancel):
                canceled.append(item.key)
            else:
                port.publish(item)
        requests = {key: request for request, key in self._keys.items()} if canceled else {}
        for key in canceled:
            self.cancel(requests[key], port)

    def cancel(self, request: int, port: Port) -> None:
        """Nobody waits for a released request any longer; ``port`` is of the actor whose turn it is.

        It has ended before this instant is over: canceled, or as it would have if its end comes first.
        """
        if request in self._canceled:
            return
        self._canceled[request] = port.now_ms
        port.send(dealt_to(self._fronts, request), CancelRequest(request), phase=self._cancel_phase)

    def _check_canceled(self, now_ms: float) -> None:
        for request, canceled_ms in list(self._canceled.items()):
            if canceled_ms < now_ms:
                if request in self._keys:
                    raise InvariantViolation(f"request {request} was canceled at {canceled_ms!r} ms and has not ended")
                del self._canceled[request]

    def _publish(self, events: Sequence[object], port: Port) -> None:
        for event in events:
            port.publish(event)

    def waiting(self) -> Sequence[str]:
        lines = [f"request {request} has not ended" for request in self._keys]
        return [*lines, *self._driver.waiting()]

    def _send_out(self, release: Release, port: Port) -> None:
        spec = release.spec
        request = self._released
        self._released += 1
        self._keys[request] = release.key
        agentic = spec.agentic
        port.publish(
            RequestArrived(
                request=request,
                arrival_ms=release.arrival_ms,
                input_tokens=spec.prompt.length,
                output_tokens=spec.output_tokens,
                name=spec.name,
                session_id=spec.session_id,
                turn_index=spec.turn_index,
                uuid=None if spec.uuid is None else f"{spec.uuid:032x}",
                play_id=agentic.play_id if agentic else None,
                conversation_id=agentic.conversation_id if agentic else None,
                lane_id=agentic.lane_id if agentic else None,
                root_id=agentic.root_id if agentic else None,
                parent_id=agentic.parent_id if agentic else None,
                cache_id=agentic.cache_id if agentic else None,
                preparation=spec.preparation,
            )
        )
        given = RankRequest(
            request=request,
            prompt=spec.prompt,
            chain=self._hasher.chain(spec.prompt),
            output_tokens=spec.output_tokens,
            output_base=self._take_output_ids(spec.output_tokens),
            output_ids=spec.output_ids,
        )
        if self.on_request is not None:
            self.on_request(given)
        arrived = PlaceRequest(given, spec, release.arrival_ms)
        if self.keeps_requests:
            self._sent[request] = arrived
        port.send(dealt_to(self._fronts, request), arrived, phase=self._front_phase)

    def _send_again(self, message: SendAgain, port: Port) -> None:
        """Submit a request anew, unless it has ended meanwhile: its tokens so far are part of its prompt."""
        sent = self._sent.get(message.request)
        if sent is None:
            port.no_effect()
            return
        if message.request in self._canceled:  # at this instant, when nobody had it
            canceled = RequestStatus.CANCELED.value
            port.publish(
                RequestEnded(worker=None, role=message.role, dp_rank=None, request=message.request, status=canceled)
            )
            return
        self._departures.begins_anew(message.request)
        given, tokens = sent.given, message.tokens
        prompt, chain, output_ids = given.prompt, given.chain, given.output_ids
        if tokens:
            prompt = continued_prompt(prompt, given.output_base, output_ids, tokens)
            chain = self._hasher.chain(prompt)
        again = RankRequest(
            request=given.request,
            prompt=prompt,
            chain=chain,
            output_tokens=given.output_tokens - tokens,
            output_base=given.output_base + tokens,
            output_ids=None if output_ids is None else output_ids[tokens:],
            admitted_in=message.admitted_in,
        )
        if self.on_request is not None:
            self.on_request(again)
        front = dealt_to(self._fronts, message.request)
        port.send(front, PlaceRequest(again, sent.spec, sent.arrival_ms), phase=self._front_phase)

    def _take_output_ids(self, count: int) -> int:
        """Consecutive ids for generated tokens; the space is used again after 2**31 tokens."""
        if self._output_base + count > OUTPUT_TOKEN_BASE:
            self._output_base = 0
        base = self._output_base
        self._output_base += count
        return base

    def _take_key(self, request: int) -> int:
        self._sent.pop(request, None)
        try:
            return self._keys.pop(request)
        except KeyError:
            raise InvariantViolation(f"request {request} ended twice, or was never released") from None

    def _set_timer(self, port: Port) -> None:
        next_ms = self._driver.next_ready_ms()
        if (
            self._load is not None
            and self._load.prepares
            and not (self._keys or self._departures.any_stay or self._transfers)
        ):
            next_ms = port.now_ms
        if next_ms is not None:
            next_ms = max(next_ms, port.now_ms)
        if self._timer is not None:
            if next_ms == self._timer_ms:
                return
            port.cancel(self._timer)
        self._timer_ms = next_ms
        self._timer = None if next_ms is None else port.send_self(_Ready(), phase=Phase.ARRIVAL, at_ms=next_ms)
