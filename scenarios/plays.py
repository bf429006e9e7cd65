"""Plays in the report: outcomes, trajectories, and the digest of what happened in which order.

Owns: the fold of agentic events into the report's play fields, and the order of lifecycle events in it.
Refuses to know: how plays are driven (``g2sim.actors.traffic``), and tokens.

Source: workloads 12; the digest is checked against the reference's recordings.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs

from g2sim.actors.traffic.events import AdmissionClosed, PlayRecycled, PlaySettled, RequestArrived, RequestSkipped
from g2sim.actors.traffic.lifecycle import LifecycleDigest, LifecycleEvent
from g2sim.actors.traffic.request import RequestStatus
from g2sim.bus.errors import InvariantViolation
from g2sim.scenarios.statistics import exact_distribution


@attrs.define(slots=True)
class _Play:
    """One play.

    Attributes:
        index: position in the order in which outcomes are listed.
        started_ms: when an instance was activated [ms]; None for other plays.
        failure: (instant [ms], ordinal, request id, status) of the earliest failed request.
    """

    index: int
    started_ms: float | None = None
    first_dispatch_ms: float | None = None
    latest_terminal_ms: float | None = None
    failure: tuple[float, tuple[int, int], str, str] | None = None
    censored: bool = False
    settled: PlaySettled | None = None
    settled_at_ms: float | None = None

    def outcome(self, play_id: str, start_ms: float) -> dict[str, Any]:
        """Keys whose value is unknown are left out, as the reference does."""
        failure_id, failure_status = self.failure[2:] if self.failure is not None else (None, None)
        if self.settled is not None and self.settled.failure_request_id is not None:
            failure_id, failure_status = self.settled.failure_request_id, self.settled.failure_status
        fields = {
            "play_id": play_id,
            "status": "incomplete" if self.settled is None or self.censored else self.settled.status,
            "causal_terminal_ms": _since(
                start_ms, self.latest_terminal_ms if self.failure is None else self.failure[0]
            ),
            "settled_at_ms": _since(start_ms, self.settled_at_ms),
            "failure_request_id": failure_id,
            "failure_status": failure_status,
        }
        return {key: value for key, value in fields.items() if value is not None}


@attrs.frozen(slots=True)
class _Terminal:
    """A request's end that waits for its hand-over to be complete."""

    ordinal: tuple[int, int]
    request_id: str
    play_id: str
    status: str
    settled: bool


class PlayFold:
    """Folds the agentic events of a run.

    Ends of one settle round reach the traffic together (a *hand-over*), and the lifecycle has them by node ordinal,
    with the skips and settled plays that follow. In the log a hand-over is a stretch of ends at one instant followed
    by the traffic's own events, so it is closed by an arrival, by an end after such an event, or by a later instant.
    """

    def __init__(self) -> None:
        self._plays: dict[str, _Play] = {}
        self._lifecycle = LifecycleDigest()
        self._left: list[_Terminal] = []
        self._unsettled: dict[int, _Terminal] = {}
        self._opened_ms = 0.0
        self._handover_ms = 0.0
        self._terminals: list[_Terminal] = []
        self._skips: dict[tuple[str, str], list[str]] = {}
        self._settled: dict[str, None] = {}

    def announce(self, play_ids: Iterable[str]) -> None:
        """Plays in the order in which outcomes are listed; others follow in order of appearance."""
        for play_id in play_ids:
            self._play(play_id)

    def opened(self, time_ms: float) -> None:
        """The clock of the plays announced so far starts."""
        self._opened_ms = time_ms

    def recycled(self, time_ms: float, event: PlayRecycled) -> None:
        """Another instance starts, and is listed behind the others."""
        self._play(event.play_id).started_ms = time_ms

    def closed(self, event: AdmissionClosed) -> None:
        """Nothing more is dispatched. What settles because of that is no part of the hand-over before."""
        self._close()
        for play_id in event.censored:
            self._plays[play_id].censored = True

    def left(self, time_ms: float, arrival: RequestArrived) -> None:
        """Nothing is left on the servers of a request that had ended before."""
        self._open(time_ms)
        self._left.append(self._unsettled.pop(arrival.request))

    def arrived(self, time_ms: float, event: RequestArrived) -> None:
        play_id, request_id = _identified(event)
        self._close()
        play = self._play(play_id)
        if event.cache_id is not None and play.started_ms is None:
            play.started_ms = self._opened_ms
        if play.first_dispatch_ms is None:
            play.first_dispatch_ms = time_ms
        self._lifecycle.feed(time_ms, play_id, request_id, LifecycleEvent.DISPATCH)

    def ended(self, time_ms: float, arrival: RequestArrived, status: str, *, settled: bool) -> None:
        """A request ended; ``left`` follows unless it is ``settled``."""
        play_id, request_id = _identified(arrival)
        self._open(time_ms, is_end=True)
        play = self._plays[play_id]
        # The numbers of an instance's requests do not tell in which order instances were made.
        index = 0 if arrival.cache_id is None else play.index
        ordinal = index, arrival.request if arrival.uuid is None else int(arrival.uuid, 16)
        terminal = _Terminal(ordinal, request_id, play_id, status, settled)
        self._terminals.append(terminal)
        if not settled:
            self._unsettled[arrival.request] = terminal
        play.latest_terminal_ms = time_ms
        if status != RequestStatus.COMPLETED:
            failure = (time_ms, ordinal, request_id, status)
            play.failure = failure if play.failure is None else min(play.failure, failure)

    def skipped(self, time_ms: float, event: RequestSkipped) -> None:
        self._open(time_ms)
        key = event.play_id, event.because
        if not any((terminal.play_id, terminal.request_id) == key for terminal in self._terminals):
            raise InvariantViolation(f"request {event.name} was skipped because of {event.because}, which did not end")
        self._skips.setdefault(key, []).append(event.name)

    def settled(self, time_ms: float, event: PlaySettled) -> None:
        play = self._plays.get(event.play_id)
        if play is None or play.settled is not None:
            raise InvariantViolation(f"play {event.play_id} settled {'twice' if play else 'but never began'}")
        self._open(time_ms)
        self._settled[event.play_id] = None
        play.settled, play.settled_at_ms = event, time_ms

    def summary(self, start_ms: float = 0.0) -> dict[str, Any]:
        """The summary's play fields; empty when no play was seen or announced. Changes nothing.

        Args:
            start_ms: where the measured clock starts; outcomes are on it [ms].
        """
        if not self._plays:
            return {}
        completed = [
            play for play in self._plays.values() if play.settled is not None and play.settled.status == "completed"
        ]
        times = exact_distribution(
            [
                play.latest_terminal_ms - (play.first_dispatch_ms if play.started_ms is None else play.started_ms)
                for play in completed
                if play.latest_terminal_ms is not None and play.first_dispatch_ms is not None
            ]
        )
        fields: dict[str, Any] = {
            "total_trajectories": len(self._plays),
            "completed_trajectories": len(completed),
            "incomplete_trajectories": len(self._plays) - len(completed),
            "agentic_play_outcomes": [play.outcome(play_id, start_ms) for play_id, play in self._plays.items()],
            "p50_trajectory_e2e_latency_ms": times.median,
            **times.named("trajectory_e2e_latency_ms"),
        }
        lifecycle = self._lifecycle.copy()
        self._write_handover(lifecycle)
        fields["agentic_lifecycle_event_count"] = lifecycle.count
        fields["agentic_lifecycle_digest"] = lifecycle.hexdigest()
        return fields

    def _play(self, play_id: str) -> _Play:
        return self._plays.setdefault(play_id, _Play(len(self._plays)))

    def _open(self, time_ms: float, *, is_end: bool = False) -> None:
        if time_ms != self._handover_ms or (is_end and (self._skips or self._settled)):
            self._close()
            self._handover_ms = time_ms

    def _close(self) -> None:
        self._write_handover(self._lifecycle)
        self._terminals.clear()
        self._left.clear()
        self._skips.clear()
        self._settled.clear()

    def _write_handover(self, lifecycle: LifecycleDigest) -> None:
        """All causal terminals by node ordinal, each with what it dropped; then all quiescences by node ordinal."""
        at_ms = self._handover_ms
        terminals = sorted(self._terminals, key=lambda terminal: terminal.ordinal)
        for item in terminals:
            status = RequestStatus(item.status)
            lifecycle.feed(at_ms, item.play_id, item.request_id, LifecycleEvent.CAUSAL_TERMINAL, status)
            for name in self._skips.get((item.play_id, item.request_id), ()):
                lifecycle.feed(at_ms, item.play_id, name, LifecycleEvent.SKIPPED)
        left = [terminal for terminal in terminals if terminal.settled] + self._left
        left.sort(key=lambda terminal: terminal.ordinal)
        last_of_play = {terminal.play_id: terminal for terminal in left}
        for item in left:
            lifecycle.feed(at_ms, item.play_id, item.request_id, LifecycleEvent.QUIESCENT)
            if item is last_of_play[item.play_id] and item.play_id in self._settled:
                lifecycle.feed(at_ms, item.play_id, None, LifecycleEvent.PLAY_QUIESCENT)
        for play_id in self._settled:
            if play_id not in last_of_play:
                lifecycle.feed(at_ms, play_id, None, LifecycleEvent.PLAY_QUIESCENT)


def _since(start_ms: float, at_ms: float | None) -> float | None:
    return None if at_ms is None else at_ms - start_ms


def _identified(arrival: RequestArrived) -> tuple[str, str]:
    if arrival.play_id is None or arrival.name is None:
        raise InvariantViolation(f"request {arrival.request} is in a play but has no name")
    return arrival.play_id, arrival.name
