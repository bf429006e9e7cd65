"""Events of a hand-off, in the order in which it goes through them. Ranks publish theirs, the coordinator the rest.

``worker``, ``role`` and ``dp_rank`` name the owner of the blocks that the event is about; ``handoff`` counts from 1 in
order of arrival.
"""

from __future__ import annotations

from g2sim.actors.config import WorkerRole
from g2sim.actors.traffic.request import RequestStatus
from g2sim.actors.worker.events import CanceledRequestLeft, RequestEnded
from g2sim.bus.events import event


@event("ho.held")
class SourceHeld:
    """The prompt is computed; the prefill rank holds its blocks until the destination is active."""

    request: int
    handoff: int
    worker: int
    role: str
    dp_rank: int


@event("ho.rsv")
class DestinationReserved:
    """A decode rank has set all blocks of the prompt aside; ``fresh_blocks`` of them lack their KV."""

    request: int
    handoff: int
    worker: int
    role: str
    dp_rank: int
    fresh_blocks: int


@event("ho.move")
class TransferStarted:
    """The KV is on its way. ``tokens`` are charged for; ``end_ms`` is when the transfer is over."""

    request: int
    handoff: int
    tokens: int
    end_ms: float


@event("ho.act")
class DestinationActivated:
    """The decode rank owns the prompt's blocks with their KV, and queues the request."""

    request: int
    handoff: int
    worker: int
    role: str
    dp_rank: int


@event("ho.rel")
class SourceReleased:
    """The prefill rank has given the prompt's blocks back; the hand-off is over.

    ``canceled``: without having reached a decode rank. For a rank that has crashed, the coordinator says so.
    """

    request: int
    handoff: int
    worker: int
    role: str
    dp_rank: int
    canceled: bool


@event("ho.fail")
class HandoffFailed:
    """The chosen decode rank can never take the request: ``reason`` says why. The request ends here as "failed"."""

    request: int
    handoff: int
    worker: int
    role: str
    dp_rank: int
    reason: str


def leaves_with(end: RequestEnded) -> type[CanceledRequestLeft] | type[SourceReleased] | None:
    """The event that says that nothing of an ended request is left on the servers; None if nothing is.

    What computes or restores a canceled request goes on until ``CanceledRequestLeft``. Otherwise a source is held until
    its destination is active, or has failed; ``SourceReleased`` may have come before the end.
    """
    if end.status == RequestStatus.CANCELED:
        return CanceledRequestLeft if end.leaves_later else None
    return SourceReleased if end.role == WorkerRole.DECODE.value else None
