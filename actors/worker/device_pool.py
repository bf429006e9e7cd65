"""The GPU KV cache of one rank (G1): memory, prefix copies and their order of eviction.

Owns: which memory block holds which copy, who uses it, and what is evicted next.
Refuses to know: requests, time, events (callers get the evicted hashes back).

Memory is numbered 0..capacity-1. A memory block is free, reserved (taken by a reservation, not yet used), or holds a
*copy*: private (no hash) or cached under a hash. Several copies of one hash may exist; the oldest alive is the
*primary* one, the only one that prefix hits use. A copy has uses: by sequences, reservations, and transfers that hold
it. Without any a cached copy is *inactive* and may be evicted, oldest first, and the memory of a private one is free. A
clear takes the hashes from copies in use: no hit finds them.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from g2sim.bus.errors import InvariantViolation


class Reservation:
    """Room set aside: ``hits`` are pinned copies in prefix order, ``fresh`` is memory, used from its end."""

    __slots__ = ("fresh", "hits")

    def __init__(self, hits: list[int], fresh: list[int]) -> None:
        self.hits = hits
        self.fresh = fresh


class DevicePool:
    """See the module's text. Block numbers are opaque to callers."""

    __slots__ = (
        "_free",
        "_hash",
        "_inactive",
        "_primary",
        "_read_by",
        "_uses",
        "_younger",
        "capacity_blocks",
        "copies",
        "copy_outs",
        "evicted_blocks",
        "reserved_blocks",
    )

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self.reserved_blocks = 0
        self.copies = 0
        self.evicted_blocks = 0
        # Transfers that still read device memory, and what they hold (shared scope only).
        self.copy_outs: dict[int, tuple[int, ...]] = {}
        self._free = list(range(capacity_blocks))
        self._hash: list[int | None] = [None] * capacity_blocks
        self._uses = [0] * capacity_blocks
        self._read_by: dict[int, int] = {}  # block -> the last transfer that reads it, or has read it
        self._primary: dict[int, int] = {}
        self._younger: dict[int, list[int]] = {}
        self._inactive: OrderedDict[int, None] = OrderedDict()

    # -- looking

    @property
    def active_blocks(self) -> int:
        """Blocks in use or set aside; inactive copies count as available."""
        return self.copies - len(self._inactive) + self.reserved_blocks

    @property
    def available_blocks(self) -> int:
        return self.capacity_blocks - self.active_blocks

    def lookup(self, hash_: int) -> int | None:
        """The primary copy of a hash."""
        return self._primary.get(hash_)

    def primaries(self, hashes: Sequence[int]) -> list[int]:
        """The primary copies of hashes that are resident."""
        primary = self._primary
        try:
            return [primary[hash_] for hash_ in hashes]
        except KeyError as missing:
            raise InvariantViolation(f"block {missing} was counted as a hit but is not resident") from None

    def match(self, hashes: Iterable[int]) -> tuple[int, int]:
        """Leading hashes that are resident: (how many, how many of them are active)."""
        primary, uses = self._primary, self._uses
        found = active = 0
        for hash_ in hashes:
            block = primary.get(hash_)
            if block is None:
                break
            found += 1
            if uses[block]:
                active += 1
        return found, active

    def blocks_before_eviction_of(self, hashes: Sequence[int]) -> int:
        """How many blocks can be reserved before a copy is evicted that a hit on one of these would use."""
        used = set(self.primaries(hashes))
        evictable = next((idx for idx, block in enumerate(self._inactive) if block in used), len(self._inactive))
        return len(self._free) + evictable

    @property
    def resident_blocks(self) -> int:
        """Distinct blocks that can be found here."""
        return len(self._primary)

    def resident_hashes(self) -> set[int]:
        return set(self._primary)

    # -- reserving

    def reserve(self, hits: Sequence[int], fresh_blocks: int) -> tuple[Reservation, list[int]] | None:
        """Use ``hits`` and set ``fresh_blocks`` aside, evicting inactive copies as needed; all or nothing.

        Returns: the reservation and the hashes whose last copy was evicted, in order; None if there is no room.
        """
        free, inactive = self._free, self._inactive
        missing = fresh_blocks - len(free)
        if missing > 0:
            uses = self._uses
            spared = len({block for block in hits if not uses[block]}) if hits else 0
            if missing > len(inactive) - spared:
                return None
        self._use(hits)
        if missing <= 0:
            keep = len(free) - fresh_blocks
            taken = free[keep:]
            del free[keep:]
            self.reserved_blocks += fresh_blocks
            return Reservation(list(hits), taken), []
        taken = free[:]
        free.clear()
        evicted = list(itertools.islice(inactive, missing))
        removed = self._evict(evicted)
        self.reserved_blocks += fresh_blocks
        return Reservation(list(hits), taken + evicted), removed

    def allocate(self, hits: Sequence[int], fresh_blocks: int) -> tuple[list[int], list[int]] | None:
        """Use ``hits`` and private copies at once. Returns: the blocks, hits first; and as ``reserve``."""
        reserved = self.reserve(hits, fresh_blocks)
        if reserved is None:
            return None
        reservation, removed = reserved
        return reservation.hits + self.take_private(reservation, fresh_blocks), removed

    def still_copied_out(self, blocks: Iterable[int]) -> list[int]:
        """Transfers that still read memory which has been taken anew, each once."""
        copy_outs = self.copy_outs
        if not copy_outs:
            return []
        transfers = dict.fromkeys(map(self._read_by.get, blocks))
        return [transfer for transfer in transfers if transfer is not None and transfer in copy_outs]

    def activate_hits(self, reservation: Reservation) -> list[int]:
        """Take the hits out of a reservation, which used them until now."""
        hits, reservation.hits = reservation.hits, []
        return hits

    def take_private(self, reservation: Reservation, blocks: int) -> list[int]:
        """Use that many memory blocks of a reservation for private copies; returns them in order of use."""
        fresh = reservation.fresh
        keep = len(fresh) - blocks
        if keep < 0:
            raise InvariantViolation(f"{blocks} device blocks are taken of a reservation of {len(fresh)}")
        taken = fresh[keep:]
        taken.reverse()
        del fresh[keep:]
        self.reserved_blocks -= blocks
        self.copies += blocks
        uses = self._uses
        for block in taken:
            uses[block] = 1
        return taken

    def cancel(self, reservation: Reservation) -> None:
        """Give a reservation back, hits in reverse order."""
        self.release(reservation.hits)
        self.reserved_blocks -= len(reservation.fresh)
        self._free.extend(reservation.fresh)
        reservation.hits = []
        reservation.fresh = []

    # -- using

    def cache(self, blocks: Sequence[int], hashes: Sequence[int]) -> list[int]:
        """Enter private copies under their hashes, in order.

        Returns: the positions, in ``blocks``, of those that are the first copies of their hashes.
        """
        hash_of, primary = self._hash, self._primary
        first: list[int] = []
        for position, (block, hash_) in enumerate(zip(blocks, hashes, strict=True)):
            if hash_of[block] is not None:
                raise InvariantViolation(f"device block {block} is cached twice")
            hash_of[block] = hash_
            if primary.setdefault(hash_, block) == block:
                first.append(position)
            else:
                self._younger.setdefault(hash_, []).append(block)
        return first

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one use of each block, last to first. After the last one a cached copy may be evicted."""
        hash_of, uses, inactive, free = self._hash, self._uses, self._inactive, self._free
        for block in reversed(blocks):
            uses[block] = left = uses[block] - 1
            if left > 0:
                continue
            if left < 0:
                raise InvariantViolation(f"device block {block} is released more often than referenced")
            if hash_of[block] is None:
                self.copies -= 1
                free.append(block)
            else:
                inactive[block] = None

    def clear(self) -> tuple[list[int], list[int]]:
        """Evict all inactive copies, and let no hit find those in use.

        Returns: hashes that no copy in use had, in order of eviction; and the others, a prefix after what follows it.
        """
        gone = list(self._inactive)
        removed = self._evict(gone)
        self._free += gone
        in_use = list(reversed(self._primary))
        for block in itertools.chain(self._primary.values(), *self._younger.values()):
            self._hash[block] = None
        self._primary.clear()
        self._younger.clear()
        return removed, in_use

    # -- copies to the host tier

    def copied_out(self, blocks: Iterable[int]) -> list[int]:
        """Places in ``blocks`` of memory that an earlier transfer still reads."""
        copy_outs = self.copy_outs
        if not copy_outs:
            return []
        return [place for place, transfer in enumerate(map(self._read_by.get, blocks)) if transfer in copy_outs]

    def begin_copy_out(self, blocks: Sequence[int], transfer: int, *, hold: bool) -> None:
        """Note that ``transfer`` reads these blocks; with ``hold`` they cannot be evicted until it has ended."""
        self._read_by.update(dict.fromkeys(blocks, transfer))
        if hold:
            self._use(blocks)
        self.copy_outs[transfer] = tuple(blocks) if hold else ()

    def end_copy_out(self, transfer: int) -> None:
        """The transfer has ended; what it held is let go, last to first."""
        self.release(self.copy_outs.pop(transfer))

    # -- inside

    def _use(self, blocks: Iterable[int]) -> None:
        uses, inactive = self._uses, self._inactive
        for block in blocks:
            if not uses[block]:
                inactive.pop(block, None)
            uses[block] += 1

    def _evict(self, blocks: Sequence[int]) -> list[int]:
        """Evict inactive copies, in order; returns the hashes of which no other copy is left."""
        hash_of, primary, younger_of, inactive = self._hash, self._primary, self._younger, self._inactive
        removed: list[int] = []
        for block in blocks:
            del inactive[block]
            hash_ = hash_of[block]
            if hash_ is None:
                raise InvariantViolation(f"device block {block} is inactive but private")
            hash_of[block] = None
            younger = younger_of.get(hash_)
            if younger is None:
                del primary[hash_]
                removed.append(hash_)
                continue
            if primary[hash_] == block:
                primary[hash_] = younger.pop(0)
            else:
                younger.remove(block)
            if not younger:
                del younger_of[hash_]
        self.copies -= len(blocks)
        self.evicted_blocks += len(blocks)
        return removed

    def check(self) -> None:
        """Raise InvariantViolation unless the books agree. Costs O(resident blocks), and a scan of the memory."""
        cached = len(self._primary) + sum(map(len, self._younger.values()))
        if not len(self._free) + self.reserved_blocks + self.copies == self.capacity_blocks:
            raise InvariantViolation(
                f"device pool: free {len(self._free)} + reserved {self.reserved_blocks} + copies {self.copies} "
                f"!= capacity {self.capacity_blocks}"
            )
        if not cached == self.capacity_blocks - self._hash.count(None):
            raise InvariantViolation("device pool: hash index and memory disagree")
        for hash_, block in self._primary.items():
            if not self._hash[block] == hash_:
                raise InvariantViolation(f"device pool: block {block} is indexed under a hash it does not hold")
        for block in self._inactive:
            if self._uses[block]:
                raise InvariantViolation(f"device pool: inactive block {block} is in use")
        if min(self._uses) < 0:
            raise InvariantViolation("device pool: negative use count")
        in_use = self.capacity_blocks - self._uses.count(0)
        if not in_use == self.copies - len(self._inactive):
            raise InvariantViolation(
                f"device pool: {in_use} blocks in use, but {self.copies} copies with {len(self._inactive)} inactive"
            )
