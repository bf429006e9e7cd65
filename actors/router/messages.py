"""What a router is asked, and what it tells the hand-off coordinator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs

from g2sim.actors.config import WorkerRole
from g2sim.actors.router.policy import Placement
from g2sim.actors.traffic.request import RequestSpec
from g2sim.actors.worker.sequence import RankRequest
from g2sim.bus.plain import Plain

ROUTER_PREFIX = "router-"
"""What names of routers begin with."""


def router_names(role: WorkerRole, replicas: int) -> list[str]:
    """Names of a pool's routers."""
    name = ROUTER_PREFIX + role.pool_name
    return [name] if replicas == 1 else [f"{name}/{replica}" for replica in range(replicas)]


def dealt_to(replicas: Sequence[str], request: int) -> str:
    """Which of a pool's router replicas a request belongs to: they take turns by the requests' numbers."""
    return replicas[request % len(replicas)]


class PlaceRequest(Plain):
    """Choose a rank for a request, and send it there.

    Attributes:
        spec: what traffic says of it.
        arrival_ms: when it arrived [ms].
    """

    __slots__ = ("arrival_ms", "given", "spec")

    def __init__(self, given: RankRequest, spec: RequestSpec, arrival_ms: float) -> None:
        self.given: Final = given
        self.spec: Final = spec
        self.arrival_ms: Final = arrival_ms


@attrs.frozen(slots=True)
class CancelRequest:
    """Nobody waits for this request any longer. Its end is published at once, wherever it is."""

    request: int


@attrs.frozen(slots=True)
class WithdrawRequest:
    """Asked: a request that waits here is not to be placed; its end is not published. Reply: ``RankReply``."""

    request: int


class ChooseRank(Plain):
    """Choose a rank for an arrived request. Reply: ``RankReply``; the asker sends the request there."""

    __slots__ = ("arrived",)

    def __init__(self, arrived: PlaceRequest) -> None:
        self.arrived: Final = arrived


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


class RankReply(Plain):
    """Reply of a router to whoever hands requests over.

    Attributes:
        answer: to what was asked, None if that was no request.
        released: requests that have waited; they go first.
    """

    __slots__ = ("answer", "released")

    def __init__(self, answer: RankAnswer | None, released: tuple[RankChosen, ...]) -> None:
        self.answer: Final = answer
        self.released: Final = released


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
