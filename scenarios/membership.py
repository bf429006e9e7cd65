"""What the log says of workers that crashed, dropped out of discovery or lost their caches, as a fold.

Owns: the report's section ``membership`` and its tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tabulate import tabulate

from g2sim.actors.membership.events import (
    CachesCleared,
    RequestLost,
    WorkerCrashed,
    WorkerRestarted,
    WorkerStateKnown,
)
from g2sim.actors.router.pool import WorkerState
from g2sim.scenarios.request_rows import POOL_OF_ROLE

DEFINITIONS = {
    "crashed_ms, restarted_ms": "when the worker's process died, and when its next one began; null for a worker that "
    "only dropped out of discovery",
    "unknown_ms": "from the crash until the routers knew; null without a crash",
    "removed_ms, ready_ms": "when the pool's last router took the worker out of its choice, and when "
    "it took it in again",
    "requests_failed, requests_resubmitted": "requests that were lost with the worker, by what became of them",
    "tokens_lost": "tokens that requests had been given which then failed",
    "device_dropped_blocks, host_dropped_blocks": "blocks of a cleared rank that were not in use, so that their memory "
    "was free at once; from a shared host pool they count at the first rank",
    "device_kept_blocks": "blocks that were in use: found no more, and their memory free when their last use had ended",
}


class MembershipFold:
    """Folds the events of membership; ``section`` is None as long as there was none."""

    def __init__(self) -> None:
        self._workers: dict[tuple[str, str, int], dict[str, Any]] = {}
        self._clears: list[dict[str, Any]] = []
        self.handlers: dict[type[Any], Callable[[float, Any], None]] = {
            WorkerCrashed: self._crashed,
            WorkerRestarted: self._restarted,
            WorkerStateKnown: self._known,
            CachesCleared: self._cleared,
        }

    def section(self) -> dict[str, Any] | None:
        """The report's section."""
        if not self._workers and not self._clears:
            return None
        return {
            "workers": [
                {"fault": fault, "pool": pool, "worker": worker, **entry}
                for (fault, pool, worker), entry in self._workers.items()
            ],
            "cleared_caches": list(self._clears),
            "definitions": dict(DEFINITIONS),
        }

    def lost(self, event: RequestLost) -> None:
        """Take note of a lost request."""
        entry = self._entry(event.fault, POOL_OF_ROLE[event.role], event.worker)
        if event.resubmitted:
            entry["requests_resubmitted"] += 1
        else:
            entry["requests_failed"] += 1
            entry["tokens_lost"] += event.tokens

    def _entry(self, fault: str, pool: str, worker: int) -> dict[str, Any]:
        entry = self._workers.get((fault, pool, worker))
        if entry is None:
            times = ("crashed_ms", "unknown_ms", "removed_ms", "restarted_ms", "ready_ms")
            counts = ("requests_failed", "requests_resubmitted", "tokens_lost")
            entry = self._workers[fault, pool, worker] = dict.fromkeys(times) | dict.fromkeys(counts, 0)
        return entry

    def _cleared(self, time_ms: float, event: CachesCleared) -> None:
        self._clears.append(
            {
                "fault": event.fault,
                "pool": POOL_OF_ROLE[event.role],
                "worker": event.worker,
                "dp_rank": event.dp_rank,
                "at_ms": time_ms,
                "device_dropped_blocks": event.device_dropped_blocks,
                "device_kept_blocks": event.device_kept_blocks,
                "host_dropped_blocks": event.host_dropped_blocks,
            }
        )

    def _crashed(self, time_ms: float, event: WorkerCrashed) -> None:
        self._entry(event.fault, POOL_OF_ROLE[event.role], event.worker)["crashed_ms"] = time_ms

    def _restarted(self, time_ms: float, event: WorkerRestarted) -> None:
        self._entry(event.fault, POOL_OF_ROLE[event.role], event.worker)["restarted_ms"] = time_ms

    def _known(self, time_ms: float, event: WorkerStateKnown) -> None:
        entry = self._entry(event.fault, event.pool, event.worker)
        if event.state == WorkerState.READY.value:
            entry["ready_ms"] = time_ms
            return
        entry["removed_ms"] = time_ms
        if entry["crashed_ms"] is not None:
            entry["unknown_ms"] = time_ms - entry["crashed_ms"]


def membership_table(section: Mapping[str, Any]) -> str:
    """The section for people, at most 100 columns wide."""
    return "\n\n".join(
        table(section[name]) for name, table in (("workers", _away), ("cleared_caches", _cleared)) if section[name]
    )


def _cleared(entries: Sequence[Mapping[str, Any]]) -> str:
    names = ("device_dropped_blocks", "device_kept_blocks", "host_dropped_blocks")
    rows = [
        [one["fault"], f"{one['pool']}-{one['worker']}/{one['dp_rank']}", one["at_ms"], *(one[name] for name in names)]
        for one in entries
    ]
    headers = ["fault", "rank", "at [ms]", "G1 lost\n[blocks]", "G1 in use\n[blocks]", "G2 lost\n[blocks]"]
    return f"caches that were cleared\n{tabulate(rows, headers=headers)}"


def _away(entries: Sequence[Mapping[str, Any]]) -> str:
    names = {
        "crashed_ms": "crashed\n[ms]",
        "removed_ms": "removed\n[ms]",
        "restarted_ms": "restarted\n[ms]",
        "ready_ms": "ready\n[ms]",
        "requests_failed": "requests\nfailed",
        "requests_resubmitted": "resub-\nmitted",
        "tokens_lost": "lost\n[tokens]",
    }
    rows = [[one["fault"], f"{one['pool']}-{one['worker']}", *(one[name] for name in names)] for one in entries]
    return f"workers that were away\n{tabulate(rows, headers=['fault', 'worker', *names.values()])}"
