"""Events of membership, in runs whose faults strike whole workers.

``worker`` counts within ``role`` or ``pool``; ``fault`` is the fault's name.
"""

from __future__ import annotations

from g2sim.bus.events import event

MEMBERSHIP_TAGS = "mb."
"""What the tags of these events begin with; only runs with such faults have them."""


@event("mb.crash")
class WorkerCrashed:
    """A worker's process died, and with it its requests, device memory and private host tiers. It falls silent.

    Routers know when ``WorkerStateKnown`` says so.
    """

    worker: int
    role: str
    fault: str


@event("mb.start")
class WorkerRestarted:
    """A worker's new process began, empty; its ranks number their KV events from 0."""

    worker: int
    role: str
    fault: str


@event("mb.clear")
class CachesCleared:
    """A rank lost its cached blocks. Its KV events say which, at the end of a pass under way.

    Attributes:
        device_dropped_blocks, host_dropped_blocks: not in use, so that their memory is free; those of a shared pool
            count at the first rank that asked.
        device_kept_blocks: in use. Nobody finds them any more, and their memory is free when their last use has ended.
    """

    worker: int
    role: str
    dp_rank: int
    fault: str
    device_dropped_blocks: int
    device_kept_blocks: int
    host_dropped_blocks: int


@event("mb.know")
class WorkerStateKnown:
    """A router learned of a worker.

    Attributes:
        pool: the router's; which replica of several it was is the record's source.
        state: "removed": it is gone, with all that was known of it; "draining": it is given nothing new; "ready".
    """

    pool: str
    worker: int
    state: str
    fault: str


@event("mb.lost")
class RequestLost:
    """A request was on a worker that crashed, or its KV on the way from or to one. Published when that is found out.

    Attributes:
        worker, role, dp_rank: the rank that it was lost on.
        tokens: tokens that it had been given.
        resubmitted: it is placed anew; otherwise it ends as "failed".
    """

    request: int
    worker: int
    role: str
    dp_rank: int
    fault: str
    tokens: int
    resubmitted: bool
