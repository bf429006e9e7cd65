"""What a router is asked, and what it tells the hand-off coordinator."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from g2sim.actors.config import WorkerRole
from g2sim.actors.router.policy import Placement
from g2sim.actors.traffic.request import RequestSpec
from g2sim.actors.worker.sequence import RankRequest

ROUTER_PREFIX = "router-"
"""What names of routers begin with."""


def router_names(role: WorkerRole, replicas: int) -> list[str]:
    """Names of a pool's routers."""
    name = ROUTER_PREFIX + role.pool_name
    return [name] if replicas == 1 else [f"{name}/{replica}" for replica in range(replicas)]


def dealt_to(replicas: Sequence[str], request: int) -> str:
    """Which of a pool's router replicas a request belongs to: they take turns by the requests' numbers."""
    return replicas[request % len(replicas)]


@attrs.frozen(slots=True)
class PlaceRequest:
    """Choose a rank for a request, and send it there.

    Attributes:
        spec: what traffic says of it.
        arrival_ms: when it arrived [ms].
    """

    given: RankRequest
    spec: RequestSpec
    arrival_ms: float


@attrs.frozen(slots=True)
class CancelRequest:
    """Nobody waits for this request any longer. Its end is published at once, wherever it is."""

    request: int


@attrs.frozen(slots=True)
class WithdrawRequest:
    """Asked: a request that waits here is not to be placed; its end is not published. Reply: ``RankReply``."""

    request: int


@attrs.frozen(slots=True)
class ChooseRank:
    """Choose a rank for an arrived request. Reply: ``RankReply``; the asker sends the request there."""

    arrived: PlaceRequest


@attrs.frozen(slots=True)
class RankIsPending:
    """The request waits; ``RankChosen`` will follow."""


@attrs.frozen(slots=True)
class RankIsRefused:
    """Nobody will serve the request; the router has published its end."""


RankAnswer = Placement | RankIsPending | RankIsRefused


@attrs.frozen(slots=True)
class RankChosen:
    """A pending request has its answer."""

    role: WorkerRole
    request: int
    answer: Placement | RankIsRefused


@attrs.frozen(slots=True)
class RankReply:
    """Reply of a router to whoever hands requests over.

    Attributes:
        answer: to what was asked, None if that was no request.
        released: requests that have waited; they go first.
    """

    answer: RankAnswer | None
    released: tuple[RankChosen, ...]


@attrs.frozen(slots=True)
class LoadChanged:
    """Placed requests have made progress; the router's inbox says which."""


@attrs.frozen(slots=True)
class FeedDue:
    """Something on the agenda of the router's feed is due."""


@attrs.frozen(slots=True)
class RequestIsOver:
    """Asked: the hand-off of a request is complete, or its rank can never take it. Reply: ``RankReply``."""

    request: int
