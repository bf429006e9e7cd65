"""Recorded agentic workloads: where they are, how their files are laid out, and how one is played back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from g2sim.actors.traffic.agentic import AgenticDriver
from g2sim.actors.traffic.agentic_mooncake import load_agentic_mooncake
from g2sim.actors.traffic.events import PlaySettled, RequestSkipped
from g2sim.actors.traffic.graph import AgenticCorpus
from g2sim.actors.traffic.lifecycle import LifecycleDigest, LifecycleEvent
from g2sim.actors.traffic.request import Release, RequestStatus
from g2sim.actors.traffic.weka import load_weka

ORACLE = Path(__file__).parent.parent / "oracle"

Case = dict[str, Any]


def names(*patterns: str) -> list[str]:
    return sorted(path.stem for pattern in patterns for path in (ORACLE / "workload").glob(f"{pattern}.json"))


def case(name: str) -> Case:
    read: Case = json.loads((ORACLE / "workload" / f"{name}.json").read_text(encoding="utf-8"))
    return read


def options(recorded: Case) -> dict[str, Any]:
    """The workload's options, whichever build recorded the case."""
    call: dict[str, Any] = recorded["call"]
    return call if recorded["oracle"] == "dynamo" else call["traffic"]


def lay_out(recorded: Case, folder: Path) -> Path:
    """Write the trace of a case with the bytes that were recorded."""
    if "trace_path" in recorded:
        return ORACLE / str(recorded["trace_path"])
    if "files" in recorded:
        for name, rows in recorded["files"].items():
            (folder / "corpus" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "corpus" / name).write_text(_text(rows), encoding="utf-8")
        return folder / "corpus"
    path = folder / str(recorded["trace_name"])
    path.write_text(_text(recorded["trace"]), encoding="utf-8")
    return path


def _text(rows: list[Any]) -> str:
    return "".join((row if isinstance(row, str) else json.dumps(row, separators=(",", ":"))) + "\n" for row in rows)


def load(recorded: Case, folder: Path, *, strict: bool = True) -> AgenticCorpus:
    path = lay_out(recorded, folder)
    if recorded["trace_format"] == "agentic_mooncake":
        return load_agentic_mooncake(path)
    given = options(recorded)
    return load_weka(
        path,
        basis=given.get("weka_nested_timestamp_basis", "auto"),
        block_size=given.get("trace_block_size"),
        strict=strict,
    )


class Replay:
    """Plays a driver against recorded ends, and keeps what came of it.

    Attributes:
        releases: every release, in order.
        lifecycle: digest over everything that happened.
        outcomes: play id -> outcome, with the keys of reports.
    """

    def __init__(self, driver: AgenticDriver, ends: dict[str, tuple[float, RequestStatus]]) -> None:
        self._driver = driver
        self._ends = ends
        self._open: dict[int, tuple[float, RequestStatus, Release]] = {}
        self.releases: list[Release] = []
        self.lifecycle = LifecycleDigest()
        self.outcomes: dict[str, dict[str, Any]] = {
            play.play_id: {"play_id": play.play_id, "status": "incomplete"} for play in driver.graph.plays
        }

    def run(self) -> None:
        """At each instant: ends first, then releases, until nothing more happens in it."""
        while (now_ms := self._next_ms()) is not None:
            while self._end(now_ms) or self._release(now_ms):
                pass

    def _next_ms(self) -> float | None:
        ready_ms = self._driver.next_ready_ms()
        due = [end_ms for end_ms, _, _ in self._open.values()] + ([] if ready_ms is None else [ready_ms])
        return min(due, default=None)

    def _release(self, now_ms: float) -> bool:
        releases = self._driver.release(now_ms)
        for release in releases:
            name = release.spec.name
            assert name is not None
            self._open[release.key] = (*self._ends[name], release)
            self._feed(release.arrival_ms, release, LifecycleEvent.DISPATCH)
        self.releases += releases
        return bool(releases)

    def _end(self, now_ms: float) -> bool:
        """Hand over what ends now, and write it down in the order that section 12 gives."""
        due = {key: self._open.pop(key) for key, (end_ms, _, _) in sorted(self._open.items()) if end_ms == now_ms}
        events = self._driver.ended([(key, status) for key, (_, status, _) in due.items()], now_ms) if due else []
        for _, status, release in due.values():
            self._feed(now_ms, release, LifecycleEvent.CAUSAL_TERMINAL, status)
            for event in events:
                if isinstance(event, RequestSkipped) and event.because == release.spec.name:
                    self.lifecycle.feed(now_ms, event.play_id, event.name, LifecycleEvent.SKIPPED)
        settled = {event.play_id: event for event in events if isinstance(event, PlaySettled)}
        last = {play_of(release): key for key, (_, _, release) in due.items()}
        for key, (_, _, release) in due.items():
            self._feed(now_ms, release, LifecycleEvent.QUIESCENT)
            play_id = play_of(release)
            if play_id in settled and last[play_id] == key:
                self.lifecycle.feed(now_ms, play_id, None, LifecycleEvent.PLAY_QUIESCENT)
                self._settle(settled[play_id], now_ms)
        return bool(due)

    def _feed(self, at_ms: float, release: Release, event: LifecycleEvent, status: RequestStatus | None = None) -> None:
        self.lifecycle.feed(at_ms, play_of(release), release.spec.name, event, status)
        outcome = self.outcomes[play_of(release)]
        if status is not None and "failure" not in outcome:
            outcome["causal_terminal_ms"] = at_ms
            if status is not RequestStatus.COMPLETED:
                outcome["failure"] = True

    def _settle(self, event: PlaySettled, now_ms: float) -> None:
        outcome = self.outcomes[event.play_id]
        outcome.pop("failure", None)
        outcome |= {"status": event.status, "settled_at_ms": now_ms}
        if event.failure_request_id is not None:
            outcome |= {"failure_request_id": event.failure_request_id, "failure_status": event.failure_status}


def play_of(release: Release) -> str:
    assert release.spec.agentic is not None
    return release.spec.agentic.play_id
