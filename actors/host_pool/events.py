"""Events of a host pool. ``pool`` is its name; a client is one rank of one worker.

A pool's residency can be folded from these alone: a prepared store's blocks are pending until it lands, an evicted
block is gone, a queued load pins its blocks until it is loaded. After a clear nothing is resident; blocks of transfers
under way take memory until ``ClearedBlocksFreed`` or ``StoreDropped``.
"""

from __future__ import annotations

from g2sim.bus.events import event


@event("hp.join")
class ClientJoined:
    """A rank became a client of the pool."""

    pool: str
    worker: int
    role: str
    dp_rank: int


@event("hp.left")
class ClientRetired:
    """A rank left the pool. ``canceled_loads`` and ``rolled_back_stores`` are transfer ids that end with it."""

    pool: str
    worker: int
    role: str
    dp_rank: int
    canceled_loads: tuple[int, ...]
    rolled_back_stores: tuple[int, ...]


@event("hp.evict")
class HostBlocksEvicted:
    """Resident blocks gave way to a store, in eviction order, or were lost with their memory."""

    pool: str
    block_hashes: tuple[int, ...]


@event("hp.clear")
class HostPoolCleared:
    """All that was resident is gone, and no store under way will land. Blocks of transfers under way keep their memory.

    Attributes:
        block_hashes: resident blocks that no load was reading, in eviction order; their memory is free.
        loading_hashes: resident blocks that loads under way are reading.
    """

    pool: str
    block_hashes: tuple[int, ...]
    loading_hashes: tuple[int, ...]


@event("hp.free")
class ClearedBlocksFreed:
    """The last load that read these blocks, which a clear had found in use, is over: their memory is free."""

    pool: str
    block_hashes: tuple[int, ...]


@event("hp.prep")
class StorePrepared:
    """Blocks of one request became pending: room is taken, the copy starts at the end of the pass."""

    pool: str
    worker: int
    role: str
    dp_rank: int
    request: int
    transfer: int
    block_hashes: tuple[int, ...]


@event("hp.sub")
class StoreSubmitted:
    """A prepared store was handed to the link. ``completes_at_ms`` is None when others can still change it."""

    pool: str
    transfer: int
    completes_at_ms: float | None


@event("hp.land")
class StoreLanded:
    """A store's copy was found complete: its blocks are resident.

    ``ended_ms`` is when the copy ended. A private tier looks at its rank's ticks only, so that can be earlier.
    """

    pool: str
    transfer: int
    ended_ms: float


@event("hp.drop")
class StoreDropped:
    """A store that was under way at a clear was found complete: its memory is free, and nothing became resident.

    ``ended_ms`` as in ``StoreLanded``.
    """

    pool: str
    transfer: int
    ended_ms: float


@event("hp.retry")
class StorePutOff:
    """No room for the blocks of a request that the pool lacks; tried again in the request's next pass.

    ``never_fits``: what was offered, known blocks included, exceeds the whole capacity, so no retry can succeed.
    """

    pool: str
    worker: int
    role: str
    dp_rank: int
    request: int
    block_hashes: tuple[int, ...]
    never_fits: bool


@event("hp.load")
class LoadQueued:
    """A restore began: its blocks are pinned. ``completes_at_ms`` is None when others can still change it."""

    pool: str
    worker: int
    role: str
    dp_rank: int
    request: int
    transfer: int
    block_hashes: tuple[int, ...]
    completes_at_ms: float | None


@event("hp.done")
class LoadFinished:
    """A restore's copy was found complete: its pins are given back. ``ended_ms`` as in ``StoreLanded``."""

    pool: str
    transfer: int
    ended_ms: float


OF_TRANSFER_ENDS = (StoreLanded, StoreDropped, LoadFinished, ClearedBlocksFreed)
"""What is published when a transfer has ended."""
