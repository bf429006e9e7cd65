"""Events of a router. ``pool`` is "agg", "prefill" or "decode".

A decision is what one turn of a router publishes about one request: ``rt.why`` if its policy weighs ranks, then
``rt.place``, or ``rt.wait``, or ``rt.refuse``. They share request, pool, time and cause.
"""

from __future__ import annotations

from g2sim.bus.events import event


@event("rt.place")
class RequestPlaced:
    """A request was sent to a rank.

    Attributes:
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


@event("rt.why", version=2)
class PlacementWeighed:
    """What a placement was chosen from, as the router believed it to be. Columns have one entry a candidate.

    Attributes:
        policy, reason: the policy's name and its word for the rule that decided.
        chosen: position of the chosen candidate.
        tied: how many candidates were as good as the best.
        workers, dp_ranks: the candidates, by (worker, rank).
        device_blocks, host_blocks: overlap with the prompt: prefix on the device, and what continues it in host memory.
        prefill_tokens, active_blocks, active_requests: load before this placement; ``active_blocks`` with the request.
        costs: lower is better; empty from a policy that does not count.
        part_names, parts: what costs are made of: one column for each name.
        overlap_hash: sequence hash of the last block that the router believes cached at the chosen rank, None if it
            believes in none. The hashes before it follow from the parents in KV events.
    """

    request: int
    pool: str
    policy: str
    reason: str
    chosen: int
    tied: int
    workers: tuple[int, ...]
    dp_ranks: tuple[int, ...]
    device_blocks: tuple[int, ...]
    host_blocks: tuple[int, ...]
    prefill_tokens: tuple[int, ...]
    active_blocks: tuple[int, ...]
    active_requests: tuple[int, ...]
    costs: tuple[float, ...]
    part_names: tuple[str, ...]
    parts: tuple[tuple[float, ...], ...]
    overlap_hash: int | None


@event("rt.wait")
class RequestWaits:
    """A request waits in the router."""

    request: int
    pool: str


@event("rt.refuse")
class RequestRefused:
    """The policy refused a request; it ends as "rejected"."""

    request: int
    pool: str
    reason: str
