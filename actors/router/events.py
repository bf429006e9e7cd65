"""Events of a router."""

from __future__ import annotations

from g2sim.bus.events import event


@event("rt.place")
class RequestPlaced:
    """A request was sent to a rank.

    Attributes:
        pool: "agg", "prefill" or "decode".
        worker, dp_rank: where it goes; ``scheduler`` = worker * dp_size + dp_rank.
        outcome: "immediate", or "queued" when it waited in the router.
        queued_at_ms: when it began to wait, None when it did not.
        overlap_blocks, best_overlap_blocks: overlap that the router believed in at the chosen rank, and the best
            among the eligible ones; None for a policy that does not look.
    """

    request: int
    pool: str
    worker: int
    dp_rank: int
    scheduler: int
    outcome: str
    queued_at_ms: float | None
    overlap_blocks: int | None
    best_overlap_blocks: int | None
