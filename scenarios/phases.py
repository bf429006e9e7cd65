"""Snapshots, preparation and profile in the report.

Owns: the fold of load-control events into the report's ``agentic_snapshots``, ``agentic_phases`` and
``agentic_profile``. Refuses to know: how a run is driven (``g2sim.actors.traffic``), latencies, and plays' outcomes.

Source: workloads 8.5, 9 and 10.6; checked against the reference's recordings.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from g2sim.actors.traffic.events import (
    AdmissionClosed,
    PlayRecycled,
    PreparationEnded,
    ProfileFinished,
    RequestArrived,
    TimersPulledForward,
)
from g2sim.actors.traffic.profile import Deadlines, ProfileOptions
from g2sim.actors.traffic.request import RequestStatus
from g2sim.actors.traffic.snapshot import KEY_SCHEMA
from g2sim.scenarios.request_rows import EndedRequest

BARRIER = "all_preparation_succeeded_and_server_quiescent"


class PhaseFold:
    """Folds load control; empty where there is none.

    Attributes:
        start_ms: where the measured clock starts [ms]; None while preparation is under way or if it failed.
        finished: the profile is over, so that nothing counts any more.
    """

    def __init__(self) -> None:
        self.start_ms: float | None = 0.0
        self.finished = False
        self._graph: dict[str, Any] = {}
        self._snapshots: list[dict[str, Any]] | None = None
        self._ledger: list[dict[str, Any]] | None = None
        self._entry: dict[str, dict[str, Any]] = {}
        self._preparation: tuple[float, PreparationEnded] | None = None
        self._options: ProfileOptions | None = None
        self._lanes = 0
        self._issued = self._canceled = self._successes = 0
        self._first_ms: float | None = None
        self._last_success_ms: float | None = None
        self._earliest_success_ms: float | None = None
        self._shifts: list[dict[str, Any]] = []
        self._closed: AdmissionClosed | None = None
        self._done: tuple[float, ProfileFinished] | None = None
        self._unsettled: set[int] = set()
        self._recycled = 0

    def begin(self, facts: Mapping[str, Any]) -> None:
        """Take what was known before the run, as ``agentic_facts`` gives it."""
        snapshots = facts.get("agentic_snapshots")
        if snapshots is None:
            return
        self._graph, self._lanes = facts["agentic_graph"], facts["agentic_lanes"]
        self._snapshots = list(snapshots)
        if (ledger := facts.get("agentic_phases")) is not None:
            self.start_ms = None
            self._ledger = [_not_issued(entry, self._graph["block_size"]) for entry in ledger]
            self._entry = {entry["identity"]["request_id"]: entry for entry in self._ledger}
        if (options := facts.get("agentic_profile")) is not None:
            self._options = ProfileOptions(**options)

    def recycled(self, _: float, event: PlayRecycled) -> None:
        if self._snapshots is not None:
            self._snapshots.append(event.play)
        self._recycled += 1

    def shifted(self, time_ms: float, event: TimersPulledForward) -> None:
        self._shifts.append(
            {
                "at_ms": time_ms,
                "play_id": event.play_id,
                "shifted_by_ms": event.shifted_by_ms,
                "timer_count": event.timer_count,
            }
        )

    def prepared(self, time_ms: float, event: PreparationEnded) -> None:
        self._preparation = time_ms, event
        if event.failure_request is None:
            self.start_ms = time_ms

    def closed(self, _: float, event: AdmissionClosed) -> None:
        self._closed = event

    def done(self, time_ms: float, event: ProfileFinished) -> None:
        self._done, self.finished = (time_ms, event), True

    def arrived(self, time_ms: float, event: RequestArrived) -> None:
        """A request was dispatched; one of preparation goes into the ledger."""
        if event.preparation is not None:
            self._entry[f"{event.play_id}:{event.preparation}"]["dispatched_at_ms"] = time_ms
            return
        self._issued += 1
        if self._first_ms is None:
            self._first_ms = time_ms

    def ended(self, end: EndedRequest, *, settled: bool) -> None:
        """A request ended; ``settled``: nothing is left of it on the servers."""
        arrival = end.track.arrival
        if arrival.preparation is not None:
            entry = self._entry[f"{arrival.play_id}:{arrival.preparation}"]
            first = end.track.admissions[0] if end.track.admissions else None
            entry |= {
                "causal_terminal_at_ms": end.terminal_ms,
                "quiescent_at_ms": end.terminal_ms if settled else None,
                "terminal_status": end.status,
                "observed_output_tokens": len(end.track.token_times_ms),
                "first_admit_ms": None if first is None else first.at_ms,
                "first_admission_reused_input_tokens": None if first is None else first.event.reused_tokens,
            }
            return
        if not settled:
            self._unsettled.add(arrival.request)
        if end.status == RequestStatus.CANCELED:
            self._canceled += 1
        elif end.status == RequestStatus.COMPLETED:
            self._successes += 1
            self._last_success_ms = end.terminal_ms
            earliest = self._earliest_success_ms
            self._earliest_success_ms = arrival.arrival_ms if earliest is None else min(earliest, arrival.arrival_ms)

    def left(self, time_ms: float, arrival: RequestArrived) -> None:
        """Nothing is left on the servers of a request that had ended before."""
        if arrival.preparation is not None:
            self._entry[f"{arrival.play_id}:{arrival.preparation}"]["quiescent_at_ms"] = time_ms
        elif not self.finished:
            self._unsettled.discard(arrival.request)

    def summary(self, outcomes: list[dict[str, Any]], in_flight: int) -> dict[str, Any]:
        """The summary's fields.

        Args:
            outcomes: the plays' outcomes.
            in_flight: measured requests that have arrived and not ended.
        """
        fields: dict[str, Any] = {}
        if self._snapshots is not None:
            shared = {"schema": KEY_SCHEMA, "graph": self._graph}
            fields["agentic_snapshots"] = [shared | entry for entry in self._snapshots]
        if self._ledger is not None:
            fields["agentic_phases"] = self._phases(self._ledger)
        if self._options is not None and self.start_ms is not None:
            fields["agentic_profile"] = self._profile(self._options, self.start_ms, outcomes, in_flight)
        return fields

    def row(self, row: dict[str, Any]) -> dict[str, Any]:
        """A measured request's row on the measured clock."""
        if self._ledger is None:
            return row
        moved: dict[str, Any] = _moved(row, self.start_ms or 0.0)
        return moved | {"agentic_phase": "profile"}

    def measured_ms(self, last_ms: float) -> float:
        """Duration of the measured part, if the last request completed at ``last_ms`` [ms].

        A profile counts from the earliest arrival of a request that succeeded, anything else from the clock's start.
        """
        if self._options is None:
            return max(0.0, last_ms - (self.start_ms or 0.0))
        if self._last_success_ms is None or self._earliest_success_ms is None:
            return 0.0
        return self._last_success_ms - self._earliest_success_ms

    def _phases(self, ledger: list[dict[str, Any]]) -> dict[str, Any]:
        at_ms, end = self._preparation or (None, PreparationEnded())
        failed = end.failure_request is not None
        started = at_ms is not None and not failed
        lanes = []
        for lane in range(self._lanes):
            own = [entry for entry in ledger if entry["lane_id"] == lane]
            done = [entry for entry in own if entry["terminal_status"] == RequestStatus.COMPLETED]
            lanes.append(
                {
                    "lane_id": lane,
                    "play_id": own[0]["identity"]["play_id"],
                    **{f"{phase}_expected": _count(own, phase) for phase in ("primers", "warmup")},
                    **{f"{phase}_completed": _count(done, phase) for phase in ("primers", "warmup")},
                    "requests_quiescent": sum(entry["quiescent_at_ms"] is not None for entry in own),
                }
            )
        return {
            "schema": "aisimulate.agentic.phases.v1",
            "phase": "aborted" if failed else "profile" if started else "preparation",
            "barrier_condition": BARRIER,
            "profile_start_ms": at_ms if started else None,
            "finished_at_ms": at_ms,
            "failure_request_id": None if end.failure_request is None else str(uuid.UUID(end.failure_request)),
            "failure_reason": end.failure_reason,
            "lanes": lanes,
            "requests": ledger,
        }

    def _profile(
        self, options: ProfileOptions, start_ms: float, outcomes: list[dict[str, Any]], in_flight: int
    ) -> dict[str, Any]:
        deadlines = Deadlines.of(options, start_ms)
        finished_ms = None if self._done is None else self._done[0]
        observation_ms = self.measured_ms(0.0)
        settled = sum("settled_at_ms" in outcome for outcome in outcomes)
        censored = self._closed.censored if self._closed is not None else ()
        started = self._lanes + self._recycled
        retired = settled if self._done is None else started
        return {
            "schema": "aisimulate.agentic.profile.v1",
            "options": {key: getattr(options, key) for key in sorted(ProfileOptions.__annotations__)},
            "profile_start_ms": start_ms,
            "admission_cutoff_ms": deadlines.cutoff_ms,
            "response_grace_deadline_ms": deadlines.grace_end_ms,
            "cancel_drain_deadline_ms": deadlines.drain_end_ms,
            "cancel_drain_timed_out": False,
            "admission_closed": self._closed is not None,
            "finished_at_ms": finished_ms,
            "plays_started": started,
            "client_completed_plays": retired - len(censored),
            "retired_plays": retired,
            "server_quiescent_plays": settled,
            "issued_requests": self._issued,
            "successful_responses": self._successes,
            "canceled_requests": self._canceled,
            "never_issued_requests": 0 if self._closed is None else self._closed.never_issued,
            "client_in_flight_requests": in_flight,
            "unsettled_server_requests": len(self._unsettled),
            "server_unsettled_requests": len(self._unsettled),
            "corpus_cursor": self._lanes + self._recycled,
            "idle_shifts": self._shifts,
            "first_request_ms": self._first_ms,
            "last_successful_response_ms": self._last_success_ms,
            "observation_duration_ms": observation_ms,
            "successful_request_throughput": self._successes * 1000.0 / observation_ms
            if observation_ms > 0.0
            else None,
        }


def _not_issued(entry: dict[str, Any], block_size: int) -> dict[str, Any]:
    tokens = entry["input_length"] // block_size * block_size
    blank = (
        *("dispatched_at_ms", "first_admit_ms", "causal_terminal_at_ms", "quiescent_at_ms", "terminal_status"),
        *("first_admission_reused_input_tokens", "observed_output_tokens"),
    )
    return {
        **entry,
        "uuid": str(uuid.UUID(entry["uuid"])),
        "expected_full_block_tokens": tokens,
        **dict.fromkeys(blank),
    }


def _count(entries: list[dict[str, Any]], phase: str) -> int:
    return sum(entry["phase"] == phase.removesuffix("s") for entry in entries)


def _moved(value: Any, start_ms: float) -> Any:
    """A row with every instant in it counted from ``start_ms``."""
    if isinstance(value, list):
        return [_moved(one, start_ms) for one in value]
    if not isinstance(value, dict):
        return value
    return {
        key: one - start_ms if key in _INSTANTS and one is not None else _moved(one, start_ms)
        for key, one in value.items()
    }


_INSTANTS = frozenset(
    f"{name}_ms"
    for name in (
        *("arrival_time", "dispatched_at", "first_admit", "first_token", "last_token", "terminal_time", "at"),
        *("host_load_queued", "host_load_finished", "prefill_admit", "source_held", "destination_reserved"),
        *("destination_activated", "decode_admit", "source_released", "queue_entered_at", "released_at"),
    )
)
"""Fields of a row, and of the histories in it, that are instants; the other times are durations."""
