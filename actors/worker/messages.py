"""What a worker is told, and what it reports of hand-offs."""

from __future__ import annotations

from typing import Final

import attrs

from g2sim.actors.kv.events import Tier
from g2sim.actors.worker.sequence import RankRequest
from g2sim.bus.plain import Plain


class SubmitRequest(Plain):
    """Queue a request on one rank; on a prefill rank as the source of hand-off ``handoff``."""

    __slots__ = ("dp_rank", "given", "handoff")

    def __init__(self, dp_rank: int, given: RankRequest, handoff: int | None = None) -> None:
        self.dp_rank: Final = dp_rank
        self.given: Final = given
        self.handoff: Final = handoff


@attrs.frozen(slots=True)
class CancelOnWorker:
    """Nobody waits for this request any longer. Reply: whether it was here; if so, its end has been published."""

    request: int


@attrs.frozen(slots=True)
class AbandonHandoff:
    """Give back what a canceled hand-off holds on a rank, or waits for. Reply: ``HandoffReply``, never busy."""

    dp_rank: int
    handoff: int


class ReserveDestination(Plain):
    """Set blocks aside for a hand-off's prompt, now or when there is room. Reply: ``HandoffReply``."""

    __slots__ = ("dp_rank", "given", "handoff")

    def __init__(self, dp_rank: int, handoff: int, given: RankRequest) -> None:
        self.dp_rank: Final = dp_rank
        self.handoff: Final = handoff
        self.given: Final = given


class ActivateDestination(Plain):
    """The KV has arrived: queue the request with its blocks. Reply: ``HandoffReply``.

    ``cleared``: as in ``SourceIsHeld``.
    """

    __slots__ = ("cleared", "dp_rank", "handoff")

    def __init__(self, dp_rank: int, handoff: int, cleared: frozenset[Tier]) -> None:
        self.dp_rank: Final = dp_rank
        self.handoff: Final = handoff
        self.cleared: Final = cleared


class ReleaseSource(Plain):
    """Give a held source's blocks back; ``canceled`` if the hand-off failed. Reply: ``HandoffReply``."""

    __slots__ = ("canceled", "dp_rank", "handoff")

    def __init__(self, dp_rank: int, handoff: int, canceled: bool) -> None:
        self.dp_rank: Final = dp_rank
        self.handoff: Final = handoff
        self.canceled: Final = canceled


class SourceIsHeld(Plain):
    """A prefill source is done; its blocks stay until it is released.

    ``cleared``: tiers that were cleared while it had KV, which is therefore to get to no such tier anywhere.
    """

    __slots__ = ("cleared", "handoff", "request")

    def __init__(self, handoff: int, request: int, cleared: frozenset[Tier] = frozenset()) -> None:
        self.handoff: Final = handoff
        self.request: Final = request
        self.cleared: Final = cleared


@attrs.frozen(slots=True)
class SourceIsRejected:
    """A prefill rank will not run this request; the hand-off is over."""

    handoff: int
    request: int


class DestinationIsReserved(Plain):
    """A decode destination has all its prompt blocks; ``fresh_blocks`` of them have no KV yet."""

    __slots__ = ("fresh_blocks", "handoff", "request")

    def __init__(self, handoff: int, request: int, fresh_blocks: int) -> None:
        self.handoff: Final = handoff
        self.request: Final = request
        self.fresh_blocks: Final = fresh_blocks


HandoffReport = SourceIsHeld | SourceIsRejected | DestinationIsReserved


class HandoffReply(Plain):
    """Answer to a hand-off command.

    Attributes:
        busy: a pass is in flight, so nothing was done; the worker reports when it has ended.
        refused: why the command can never be carried out, None if it can.
        reports: what came of it.
    """

    __slots__ = ("busy", "refused", "reports")

    def __init__(self, busy: bool = False, refused: str | None = None, reports: tuple[HandoffReport, ...] = ()) -> None:
        self.busy: Final = busy
        self.refused: Final = refused
        self.reports: Final = reports


class WorkerReport(Plain):
    """Sent by a worker to the coordinator when a pass has ended: it is free now, and this has become of hand-offs."""

    __slots__ = ("actor", "reports")

    def __init__(self, actor: str, reports: tuple[HandoffReport, ...]) -> None:
        self.actor: Final = actor
        self.reports: Final = reports
