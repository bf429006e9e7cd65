"""KV events: where blocks are, as a router may learn it (contract C4).

One publisher is one rank of one worker. Its ``event_id`` counts from 0 without a gap over both tiers.
A removal that makes room is published before the store that uses the room.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence

from g2sim.bus.events import event


class Tier(enum.StrEnum):
    """Where a copy of a block is: the GPU's memory, or pinned host memory."""

    DEVICE = "device"
    HOST_PINNED = "host_pinned"


@event("kv.sto")
class BlocksStored:
    """A contiguous run of blocks became resident.

    Attributes:
        worker, role, dp_rank: the publisher; ``worker`` counts from 0 within its role.
        event_id: number of this event among the publisher's, from 0.
        tier: "device" or "host_pinned".
        parent_hash: sequence hash of the block before the run, None at the start of a prompt.
        start_position: place of the run's first block in its sequence, in blocks from 0.
        block_hashes, token_hashes: sequence hash and tokens hash of each block, in prompt order.
    """

    worker: int
    role: str
    dp_rank: int
    event_id: int
    tier: str
    parent_hash: int | None
    start_position: int
    block_hashes: tuple[int, ...]
    token_hashes: tuple[int, ...]


@event("kv.rem")
class BlocksRemoved:
    """Blocks left a tier, in eviction order."""

    worker: int
    role: str
    dp_rank: int
    event_id: int
    tier: str
    block_hashes: tuple[int, ...]


@event("kv.clr")
class BlocksCleared:
    """The publisher's tier (None: every tier) holds nothing any more."""

    worker: int
    role: str
    dp_rank: int
    event_id: int
    tier: str | None


def removed_by_clear(untold: Iterable[tuple[bool, Sequence[int]]], cleared: Sequence[int]) -> tuple[int, ...]:
    """The blocks whose removal is to be announced when a tier is cleared before all of its changes were.

    Args:
        untold: changes that have not been announced, in order: stored or removed, and block hashes.
        cleared: what the tier held, in order of removal.
    Returns: what was announced as stored, and not as removed. No store of before the clear is announced after it.
    """
    unknown: set[int] = set()
    gone: list[int] = []
    for stored, block_hashes in (*untold, (False, cleared)):
        if stored:
            unknown.update(block_hashes)
            continue
        for hash_ in block_hashes:
            if hash_ in unknown:
                unknown.remove(hash_)
            else:
                gone.append(hash_)
    return tuple(gone)
