"""Events of a router. ``pool`` is "agg", "prefill" or "decode"; which replica of several it was is the record's source.

A decision is what one turn of a router publishes about one request: ``rt.why`` if its policy weighs ranks, then
``rt.place``, or ``rt.wait``, or ``rt.refuse``. They share request, pool, time and cause.
"""

from __future__ import annotations

from operator import add

from g2sim.bus.events import event


@event("rt.place")
class RequestPlaced:
    """A request was sent to a rank.

    Attributes:
        worker, dp_rank: where it goes; ``scheduler`` = worker * dp_size + dp_rank.
        outcome: "immediate", or "queued" when it waited in the router.
        queued_at_ms: when it began to wait, None when it did not.
        overlap_blocks, best_overlap_blocks: overlap that the policy reports for the chosen rank, and the best among the
            eligible ones (dynamo_kv weighs blocks in host memory); None for a policy that does not look.
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

    @property
    def believed_blocks(self) -> tuple[int, ...]:
        """Blocks of the prompt that the router believes each candidate to hold, in both tiers, without any weight."""
        return tuple(map(add, self.device_blocks, self.host_blocks))


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


LOAD_SYNC_TAGS = "sync."
"""What the tags of events of load sync begin with; only runs with it have them."""


@event("sync.share")
class PlacementShared:
    """A replica tells the others what it has booked for a request that it placed.

    Attributes:
        scheduler: where the request goes; ``prefill_tokens`` wait there for it.
        block_hashes: sequence hashes of its whole prompt blocks.
    """

    request: int
    pool: str
    scheduler: int
    prefill_tokens: int
    block_hashes: tuple[int, ...]


@event("sync.end")
class SharingEnded:
    """A replica tells the others that a hand-off is over for its pool; other ends they hear from the pool's ranks."""

    request: int
    pool: str


# The event plane, in runs with faults. ``pool`` names the router: with several replicas it is "agg/0", "agg/1" and so
# on, each with faults drawn for itself. A *sequence* is the number of a message, which a publisher may begin anew; a
# rank's event ids go on. ``worker`` counts within ``pool``.

EVENT_PLANE_TAGS = "ep."
"""What the tags of these events begin with."""


@event("ep.begin")
class FaultBegan:
    """A fault is active from here on."""

    pool: str
    fault: str
    kind: str


@event("ep.end")
class FaultEnded:
    """A fault is over."""

    pool: str
    fault: str
    kind: str


@event("ep.hit")
class MessageStruck:
    """Faults changed the way of a KV event to a router.

    Attributes:
        faults: their names.
        event_id: the event; ``sequence``: the number of its message.
        due_ms: when each copy arrives [ms]; empty if it is lost.
    """

    pool: str
    faults: tuple[str, ...]
    worker: int
    dp_rank: int
    event_id: int
    sequence: int
    due_ms: tuple[float, ...]


@event("ep.stale")
class MessageStale:
    """A router dropped a message: it has that number already."""

    pool: str
    worker: int
    dp_rank: int
    sequence: int


@event("ep.gap")
class GapFound:
    """A router misses the message with this number; what follows it waits."""

    pool: str
    worker: int
    dp_rank: int
    sequence: int


@event("ep.ask")
class RecoveryAsked:
    """A router asked a rank for all messages from this number on, or for a snapshot, as ``mode`` says."""

    pool: str
    worker: int
    dp_rank: int
    mode: str
    sequence: int


@event("ep.heal")
class RecoveryAnswered:
    """A router applied a rank's answer.

    Attributes:
        mode: "replay" or "snapshot"; a snapshot replaces what was known of the rank.
        sequence: number of the last message that it covers.
        events: how many events it holds.
    """

    pool: str
    worker: int
    dp_rank: int
    mode: str
    sequence: int
    events: int


@event("ep.audit")
class PlacementAudited:
    """What a router believed when it placed a request, and what was so, in blocks of its prompt on both tiers together.

    Attributes:
        believed_blocks, resident_blocks: at the chosen rank.
        best_believed_blocks, best_resident_blocks: the largest of any eligible rank.
        phantom_blocks, unseen_blocks: believed and not there, and the reverse, summed over the eligible ranks.
    """

    request: int
    pool: str
    believed_blocks: int
    resident_blocks: int
    best_believed_blocks: int
    best_resident_blocks: int
    phantom_blocks: int
    unseen_blocks: int


@event("ep.same")
class IndexConverged:
    """A router has applied everything that was published until the last fault was over, ``took_ms`` after that."""

    pool: str
    took_ms: float


@event("ep.final")
class IndexCompared:
    """A router's index against what is resident, at the end of a run.

    Attributes:
        phantom_blocks, unseen_blocks: believed and not resident, and the reverse, over ranks and tiers.
        under_way: messages and answers that have not arrived.
    """

    pool: str
    phantom_blocks: int
    unseen_blocks: int
    under_way: int
