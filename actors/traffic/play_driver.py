"""What all drivers of plays do: release what is ready, and follow up what ended.

Owns: the events that follow from ends. Refuses to know: which plays start when, and what their requests look like.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Collection, Iterable, Sequence

from g2sim.actors.traffic.events import PlaySettled, RequestSkipped
from g2sim.actors.traffic.graph import Trigger, lane_name
from g2sim.actors.traffic.plays import NodeMode, NodeRun, PlayMachine, PlayRun
from g2sim.actors.traffic.request import Release, RequestSpec, RequestStatus
from g2sim.bus.errors import ProtocolError


class PlayDriver(abc.ABC):
    """A ``TrafficDriver`` over a ``PlayMachine``. The key of a release is its node's ordinal."""

    def __init__(self) -> None:
        self._machine = PlayMachine()
        self._now_ms = 0.0
        self._plays: list[PlayRun] = []
        self._runs: dict[int, NodeRun] = {}

    @abc.abstractmethod
    def _spec(self, run: NodeRun) -> RequestSpec:
        """The request of a node."""

    @abc.abstractmethod
    def _client_finished(self, play: PlayRun, now_ms: float) -> None:
        """A play has nothing outstanding and nothing left to dispatch."""

    def _add(self, play: PlayRun) -> None:
        self._plays.append(play)
        self._runs.update((run.ordinal, run) for run in play.nodes)

    def next_ready_ms(self) -> float | None:
        """The earliest ready time of a request that can be released [ms], None if there is none."""
        return self._machine.next_ready_ms()

    def release(self, now_ms: float) -> list[Release]:
        """Every request with a ready time <= ``now_ms`` [ms], in the order in which it must be routed."""
        self._advance(now_ms)
        return [Release(run.ordinal, run.gate_ms, self._spec(run)) for run in self._machine.sweep(now_ms)]

    def ended(
        self, ends: Sequence[tuple[int, RequestStatus]], now_ms: float, *, busy: Collection[int] = ()
    ) -> list[RequestSkipped | PlaySettled]:
        """Released requests ended at ``now_ms`` [ms], in any order: ends of one instant count in ordinal order.

        Args:
            ends: (key, status) of all requests that end at this point of the instant.
            now_ms: the instant.
            busy: keys among them of which something is left on the servers; ``quiesced`` must follow for them.
        Returns: requests that a failure makes skip, then plays that settle.
        Raises: ProtocolError if a key is unknown or not outstanding.
        """
        self._advance(now_ms)
        events: list[RequestSkipped | PlaySettled] = []
        for key, status in sorted(ends):
            run = self._run(key)
            name = run.node.request_id
            for skipped in self._machine.end(run, status, now_ms):
                events.append(RequestSkipped(name=skipped.node.request_id, play_id=run.play.play_id, because=name))
            if run.play.client_finished:
                self._client_finished(run.play, now_ms)
        return events + self.quiesced([key for key, _ in ends if key not in busy], now_ms)

    def quiesced(self, keys: Iterable[int], now_ms: float) -> list[RequestSkipped | PlaySettled]:
        """Nothing is left on the servers of requests that had ended busy, or end right now.

        Returns: plays that settle.
        """
        self._advance(now_ms)
        events: list[RequestSkipped | PlaySettled] = []
        for key in sorted(keys):
            run = self._run(key)
            self._machine.settle(run)
            if run.play.quiescent:
                events.append(settled(run.play))
        return events

    def waiting(self) -> list[str]:
        """One line for each request and play that cannot go on by itself."""
        lines = []
        for play in self._plays:
            if play.idle_since_ms is None and play.outstanding == 0:
                lines.append(f"play {play.play_id!r} waits for a lane")
                continue
            modes = {run.node.request_id: run.mode for run in play.nodes}
            for run in play.nodes:
                if run.mode is NodeMode.DISPATCHED:
                    lines.append(f"request {run.node.request_id!r} was released and has not ended")
                elif run.mode is NodeMode.BLOCKED:
                    lines.append(f"request {run.node.request_id!r} waits for {_open_sources(run, modes)}")
                elif run.busy:
                    lines.append(f"request {run.node.request_id!r} ended and has not left the servers")
        return lines

    def _run(self, key: int) -> NodeRun:
        run = self._runs.get(key)
        if run is None:
            raise ProtocolError(f"key {key!r} was never released")
        return run

    def _advance(self, now_ms: float) -> None:
        if not self._now_ms <= now_ms < math.inf:
            raise ProtocolError(f"time goes from {self._now_ms!r} ms to {now_ms!r} ms")
        self._now_ms = now_ms


def settled(play: PlayRun) -> PlaySettled:
    """The event that a play is quiescent."""
    failed, status = play.failure or (None, None)
    ending = "completed" if failed is None else "failed"
    return PlaySettled(
        play_id=play.play_id,
        lane_id=None if play.lane is None else lane_name(play.lane),
        status="incomplete" if play.censored else ending,
        failure_request_id=None if failed is None else failed.node.request_id,
        failure_status=None if status is None else status.value,
    )


def _open_sources(run: NodeRun, modes: dict[str, NodeMode]) -> str:
    """The triggers that a blocked node waits for."""
    fired = {
        Trigger.DISPATCH: (NodeMode.DISPATCHED, NodeMode.COMPLETED, NodeMode.FAILED),
        Trigger.COMPLETION: (NodeMode.COMPLETED,),
    }
    return ", ".join(
        f"{edge.trigger} of {edge.source!r}" for edge in run.node.edges if modes[edge.source] not in fired[edge.trigger]
    )
