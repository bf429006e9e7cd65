"""What the log says of router replicas, as a fold: who placed how much, and how far their views were from the truth.

Owns: the report's section ``routers`` and its table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from tabulate import tabulate

from g2sim.actors.config import WorkerRole
from g2sim.actors.handoff.events import SourceReleased
from g2sim.actors.router.events import PlacementWeighed, RequestPlaced
from g2sim.actors.worker.events import RequestEnded
from g2sim.bus.events import Record

DEFINITIONS = {
    "skew_requests_mean, skew_requests_max": "skew of a replica's view: |requests in flight at the chosen rank - those "
    "that the replica counted there| when a request is placed; null from a policy that weighs no ranks",
    "misled": "placements at a rank that was among the emptiest in the replica's view, but not in truth, by "
    "requests in flight at the ranks that were weighed",
}


REPLICA_EVENTS = frozenset({PlacementWeighed, RequestPlaced, RequestEnded, SourceReleased})
"""What the fold needs to hear."""


@attrs.define(slots=True)
class _Replica:
    pool: str
    placements: int = 0
    weighed: int = 0
    skew: int = 0
    most_skew: int = 0
    misled: int = 0

    def entry(self, name: str) -> dict[str, Any]:
        blind = not self.weighed
        return {
            "router": name,
            "pool": self.pool,
            "placements": self.placements,
            "skew_requests_mean": None if blind else self.skew / self.weighed,
            "skew_requests_max": None if blind else self.most_skew,
            "misled": None if blind else self.misled,
        }


class ReplicaFold:
    """Folds a log into what its router replicas did.

    A request is in flight at a rank from its placement until it ends, in a prefill pool until its source is released.

    Args:
        routers: pool -> names of its replicas.
    """

    def __init__(self, routers: Mapping[str, Sequence[str]]) -> None:
        self._replicas = {name: _Replica(pool) for pool, names in routers.items() for name in names}
        self._place: dict[tuple[str, int], tuple[int, int]] = {}
        self._in_flight: dict[tuple[str, int, int], int] = {}

    def apply(self, record: Record) -> None:
        """Take the next record of the log."""
        event = record.event
        kind = type(event)
        if kind is PlacementWeighed:
            self._weighed(self._replicas[record.source], event)
        elif kind is RequestPlaced:
            self._replicas[record.source].placements += 1
            self._place[event.pool, event.request] = event.worker, event.dp_rank
            rank = (event.pool, event.worker, event.dp_rank)
            self._in_flight[rank] = self._in_flight.get(rank, 0) + 1
        elif kind is RequestEnded or kind is SourceReleased:
            pool = WorkerRole(event.role).pool_name
            place = self._place.pop((pool, event.request), None)
            if place is not None:
                self._in_flight[pool, *place] -= 1

    def section(self) -> dict[str, Any]:
        """The report's section."""
        return {
            "replicas": [replica.entry(name) for name, replica in self._replicas.items()],
            "definitions": dict(DEFINITIONS),
        }

    def _weighed(self, replica: _Replica, event: PlacementWeighed) -> None:
        ranks = zip(event.workers, event.dp_ranks, strict=True)
        true = [self._in_flight.get((event.pool, *rank), 0) for rank in ranks]
        seen = event.active_requests
        skew = abs(true[event.chosen] - seen[event.chosen])
        replica.weighed += 1
        replica.skew += skew
        replica.most_skew = max(replica.most_skew, skew)
        replica.misled += seen[event.chosen] == min(seen) and true[event.chosen] > min(true)


def replicas_table(section: Mapping[str, Any]) -> str:
    """The section for people, at most 100 columns wide."""
    columns = ("router", "placements", "skew_requests_mean", "skew_requests_max", "misled")
    rows = [[one[column] for column in columns] for one in section["replicas"]]
    headers = ["router", "placed", "skew [requests]: mean", "most", "misled"]
    return tabulate(rows, headers=headers, missingval="-", floatfmt=".3f")
