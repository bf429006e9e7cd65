"""What the log says of faults of the event plane, as a fold: when indexes were right again, and what placement lost.

Owns: the report's section ``event_plane`` and its table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tabulate import tabulate

from g2sim.actors.router import events as ev

DEFINITIONS = {
    "converged_after_ms": "from the end of the last fault until the router had applied everything published by then; "
    "null if it did not within the run",
    "misinformed": "placements at which the router was wrong about any eligible rank",
    "phantom_blocks, unseen_blocks": "blocks of the prompt believed and not there, and the reverse, summed over "
    "placements and eligible ranks",
    "chosen_phantom_blocks, chosen_unseen_blocks": "the same at the chosen ranks only",
    "believed_regret_blocks, resident_regret_blocks": "best overlap of any eligible rank - that of the chosen one, "
    "summed over placements: as the router believed, and as it was",
    "index_end": "blocks that the index has wrong at the end of the run, over ranks and tiers",
}

_COUNTS: Mapping[type[Any], str] = {
    ev.MessageStruck: "messages_struck",
    ev.MessageStale: "messages_stale",
    ev.GapFound: "gaps",
    ev.RecoveryAsked: "recoveries",
}

_PLACEMENT = (
    "misinformed",
    "phantom_blocks",
    "unseen_blocks",
    "chosen_phantom_blocks",
    "chosen_unseen_blocks",
    "believed_regret_blocks",
    "resident_regret_blocks",
)


class EventPlaneFold:
    """Folds the events of the event plane; ``section`` is None as long as there was none."""

    def __init__(self) -> None:
        self._pools: dict[str, dict[str, Any]] = {}
        self._faults: dict[str, dict[str, Any]] = {}
        self.handlers: dict[type[Any], Callable[[float, Any], None]] = {
            ev.FaultBegan: self._began,
            ev.FaultEnded: self._ended,
            ev.MessageStruck: self._struck,
            ev.MessageStale: self._counted,
            ev.GapFound: self._counted,
            ev.RecoveryAsked: self._counted,
            ev.RecoveryAnswered: self._answered,
            ev.PlacementAudited: self._audited,
            ev.IndexConverged: self._converged,
            ev.IndexCompared: self._compared,
        }

    def section(self) -> dict[str, Any] | None:
        """The report's section."""
        if not self._pools:
            return None
        return {
            "faults": [{"name": name, **fault} for name, fault in self._faults.items()],
            "routers": [{"pool": name, **pool} for name, pool in self._pools.items()],
            "definitions": dict(DEFINITIONS),
        }

    def _pool(self, event: Any) -> dict[str, Any]:
        pool = self._pools.get(event.pool)
        if pool is None:
            pool = self._pools[event.pool] = {
                **dict.fromkeys(_COUNTS.values(), 0),
                "messages_lost": 0,
                "replays": 0,
                "snapshots": 0,
                "converged_after_ms": None,
                "placements": 0,
                **dict.fromkeys(_PLACEMENT, 0),
                "index_end": None,
            }
        return pool

    def _fault(self, name: str) -> dict[str, Any]:
        return self._faults.setdefault(name, {"kind": None, "from_ms": None, "until_ms": None, "messages": 0})

    def _began(self, time_ms: float, event: ev.FaultBegan) -> None:
        self._pool(event)
        self._fault(event.fault).update(kind=event.kind, from_ms=time_ms)

    def _ended(self, time_ms: float, event: ev.FaultEnded) -> None:
        self._fault(event.fault)["until_ms"] = time_ms

    def _struck(self, time_ms: float, event: ev.MessageStruck) -> None:
        self._counted(time_ms, event)
        self._pool(event)["messages_lost"] += not event.due_ms
        for name in event.faults:
            self._fault(name)["messages"] += 1

    def _counted(self, _: float, event: Any) -> None:
        self._pool(event)[_COUNTS[type(event)]] += 1

    def _answered(self, _: float, event: ev.RecoveryAnswered) -> None:
        self._pool(event)[f"{event.mode}s"] += 1

    def _audited(self, _: float, event: ev.PlacementAudited) -> None:
        pool = self._pool(event)
        pool["placements"] += 1
        beyond = event.believed_blocks - event.resident_blocks
        pool["misinformed"] += bool(event.phantom_blocks or event.unseen_blocks)
        pool["phantom_blocks"] += event.phantom_blocks
        pool["unseen_blocks"] += event.unseen_blocks
        pool["chosen_phantom_blocks"] += max(0, beyond)
        pool["chosen_unseen_blocks"] += max(0, -beyond)
        pool["believed_regret_blocks"] += event.best_believed_blocks - event.believed_blocks
        pool["resident_regret_blocks"] += event.best_resident_blocks - event.resident_blocks

    def _converged(self, _: float, event: ev.IndexConverged) -> None:
        self._pool(event)["converged_after_ms"] = event.took_ms

    def _compared(self, _: float, event: ev.IndexCompared) -> None:
        self._pool(event)["index_end"] = {
            "phantom_blocks": event.phantom_blocks,
            "unseen_blocks": event.unseen_blocks,
            "messages_under_way": event.under_way,
        }


def event_plane_table(section: Mapping[str, Any]) -> str:
    """The section for people, at most 100 columns wide."""
    faults = tabulate(
        [[one["name"], one["kind"], one["from_ms"], one["until_ms"], one["messages"]] for one in section["faults"]],
        headers=["fault", "kind", "from [ms]", "until [ms]", "messages struck"],
    )
    streams = tabulate(
        [
            [
                one["pool"],
                *(one[key] for key in ("messages_lost", "messages_stale", "gaps", "replays", "snapshots")),
                "not converged" if one["converged_after_ms"] is None else f"{one['converged_after_ms']:.3f}",
            ]
            for one in section["routers"]
        ],
        headers=["router", "lost", "stale", "gaps", "replays", "snapshots", "index right again after [ms]"],
    )
    placements = tabulate(
        [[one["pool"], one["placements"], *(one[key] for key in _PLACEMENT)] for one in section["routers"]],
        headers=[
            "router",
            "placed",
            "mis-\ninformed",
            "phantom\n[blocks]",
            "unseen\n[blocks]",
            "chosen:\nphantom",
            "chosen:\nunseen",
            "regret\nbelieved",
            "regret\n[blocks]",
        ],
    )
    return f"faults of the event plane\n{faults}\n\n{streams}\n\n{placements}"
