"""Events of a worker: passes, and what happens to requests in them.

``worker`` counts from 0 within ``role``; ``dp_rank`` counts from 0 within the worker; ``request`` is the number that
traffic gave. A pass is decided at its start and becomes visible at its end: admissions and preemptions are published
at the start, tokens and ends at the end.
"""

from __future__ import annotations

from array import array
from typing import Final

from g2sim.bus.events import SIGNALS, event, signal
from g2sim.bus.plain import Plain


@event("wk.sub")
class RequestQueued:
    """A request joined a rank's waiting queue."""

    worker: int
    role: str
    dp_rank: int
    request: int


@event("wk.adm")
class RequestAdmitted:
    """A request was taken from a queue into the running list. Published at the start of the pass.

    Attributes:
        reused_tokens: known tokens (prompt, after a preemption also generated ones) whose KV was found.
        g1_tokens, host_tokens: how many of them lay in G1 and came from G2; None on a readmission, and
            both None on a rank without a host tier.
        readmission: the request had been admitted in this pool before.
    """

    worker: int
    role: str
    dp_rank: int
    request: int
    reused_tokens: int
    g1_tokens: int | None
    host_tokens: int | None
    readmission: bool


@event("wk.pre")
class RequestPreempted:
    """A running request lost its blocks and went back to the front of the waiting queue."""

    worker: int
    role: str
    dp_rank: int
    request: int


@event("wk.run")
class PassStarted:
    """A pass began.

    Attributes:
        pass_idx: number of the pass on this rank, from 0.
        compute_start_ms: when compute starts; later than the publication when a fence holds it back.
        end_ms: when the rank's own work ends. Ranks of one worker show their results together, at the largest.
        scheduled_tokens: tokens taken from the budget.
        scheduled_requests: requests that were given tokens (or admitted with none to compute).
    """

    worker: int
    role: str
    dp_rank: int
    pass_idx: int
    compute_start_ms: float
    end_ms: float
    scheduled_tokens: int
    scheduled_requests: int


@event("wk.end")
class PassEnded:
    """A pass ended and its results became visible.

    Attributes:
        emitted: requests that produced one token each, in order.
        prefill_tokens: all tokens computed for entries that had prompt tokens in them.
    """

    worker: int
    role: str
    dp_rank: int
    pass_idx: int
    emitted: tuple[int, ...]
    prefill_tokens: int


class PassesEnded(Plain):
    """Several passes of a rank that put out the same, told together, late, where nobody hears ``PassEnded``.

    It is in no log: a log's events are one by one, at their times.

    Attributes:
        ends_ms: when they ended [ms], in order.
        emitted, prefill_tokens: of each of them, as in ``PassEnded``.
    """

    __slots__ = ("dp_rank", "emitted", "ends_ms", "prefill_tokens", "role", "worker")

    def __init__(
        self, worker: int, role: str, dp_rank: int, ends_ms: array[float], emitted: tuple[int, ...], prefill_tokens: int
    ) -> None:
        self.worker: Final = worker
        self.role: Final = role
        self.dp_rank: Final = dp_rank
        self.ends_ms: Final = ends_ms
        self.emitted: Final = emitted
        self.prefill_tokens: Final = prefill_tokens


SIGNALS.add(PassesEnded)


@signal
class PassGave:
    """A pass has ended in which a request may have got its first token or ended, which a run of decode passes never is.

    It is in no log, where ``PassEnded`` says the same; routers hear it, and are not woken by other passes.
    """

    role: str
    emitted: tuple[int, ...]


@event("wk.fin", version=2)
class RequestEnded:
    """A request ended: status "completed", "rejected", "failed" or "canceled".

    ``worker`` and ``dp_rank`` are None if no rank was chosen for it: the router of this role refused it, or it was
    canceled there. ``leaves_later``: it was canceled while a pass computes it, or a restore fills its blocks;
    ``CanceledRequestLeft`` follows.
    """

    worker: int | None
    role: str
    dp_rank: int | None
    request: int
    status: str
    leaves_later: bool = False


@event("wk.left")
class CanceledRequestLeft:
    """What a request still held when it was canceled was given back."""

    worker: int
    role: str
    dp_rank: int
    request: int
