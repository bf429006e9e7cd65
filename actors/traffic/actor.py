"""Traffic on the bus: releases requests when they are ready, and tells the driver how they ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from g2sim.actors.kv.blocks import BlockHasher
from g2sim.actors.kv.prompt import OUTPUT_TOKEN_BASE
from g2sim.actors.phases import Phase
from g2sim.actors.router.messages import PlaceRequest
from g2sim.actors.traffic.events import RequestArrived
from g2sim.actors.traffic.request import Release, RequestStatus, TrafficDriver
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


class TrafficActor:
    """See the module's text.

    Args:
        driver: says what is ready when.
        hasher: identifies prompt blocks for the deployment's block size.
        front: actor that takes requests in (the router, or the hand-off coordinator).

    ``ends`` must be set to the subscription that carries the events of ended requests before the run starts.
    """

    ends: Subscription

    def __init__(self, *, driver: TrafficDriver, hasher: BlockHasher, front: str, front_phase: Phase) -> None:
        self._driver = driver
        self._hasher = hasher
        self._front = front
        self._front_phase = front_phase
        self._keys: dict[int, int] = {}
        self._released = 0
        self._output_base = 0
        self._timer: Envelope | None = None
        self._timer_ms: float | None = None

    def receive(self, message: Any, port: Port) -> None:
        kind = type(message)
        if kind is _Ready:
            self._timer = self._timer_ms = None
            for release in self._driver.release(port.now_ms):
                self._send_out(release, port)
        elif kind is RequestsEnded:
            ends = [
                (self._take_key(record.event.request), RequestStatus(record.event.status))
                for record in self.ends.drain()
            ]
            for event in self._driver.ended(ends, port.now_ms):
                port.publish(event)
        elif kind is not Begin:
            raise ProtocolError(f"traffic: no use for a {kind.__name__}")
        self._set_timer(port)

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
        port.send(self._front, PlaceRequest(given, spec, release.arrival_ms), phase=self._front_phase)

    def _take_output_ids(self, count: int) -> int:
        """Consecutive ids for generated tokens; the space is used again after 2**31 tokens."""
        if self._output_base + count > OUTPUT_TOKEN_BASE:
            self._output_base = 0
        base = self._output_base
        self._output_base += count
        return base

    def _take_key(self, request: int) -> int:
        try:
            return self._keys.pop(request)
        except KeyError:
            raise InvariantViolation(f"request {request} ended twice, or was never released") from None

    def _set_timer(self, port: Port) -> None:
        next_ms = self._driver.next_ready_ms()
        if next_ms is not None:
            next_ms = max(next_ms, port.now_ms)
        if self._timer is not None:
            if next_ms == self._timer_ms:
                return
            port.cancel(self._timer)
        self._timer_ms = next_ms
        self._timer = None if next_ms is None else port.send_self(_Ready(), phase=Phase.ARRIVAL, at_ms=next_ms)
