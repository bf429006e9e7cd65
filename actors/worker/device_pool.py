"""The GPU KV cache of one rank (G1): memory, prefix copies and their order of eviction.

Owns: which memory block holds which copy, who uses it, and what is evicted next.
Refuses to know: requests, time, events (callers get the evicted hashes back).

Memory is numbered 0..capacity-1. A memory block is free, reserved (taken by a reservation, not yet used), or holds a
*copy*: private (no hash yet) or cached under a hash. Several copies of one hash may exist; the oldest alive is the
*primary* one, the only one that prefix hits use. A cached copy that nobody references, pins or holds is *inactive*
and may be evicted, oldest first. A clear takes the hashes from copies in use: no hit finds them, and their memory is
free when their last use has ended.
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
        "_copied_out_by",
        "_free",
        "_hash",
        "_held_by",
        "_inactive",
        "_pins",
        "_primary",
        "_refs",
        "_unlisted",
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
        self._refs = [0] * capacity_blocks
        self._pins = [0] * capacity_blocks
        self._held_by: list[int | None] = [None] * capacity_blocks
        self._copied_out_by: list[int | None] = [None] * capacity_blocks
        self._primary: dict[int, int] = {}
        self._younger: dict[int, list[int]] = {}
        self._inactive: OrderedDict[int, None] = OrderedDict()
        # Copies without a hash, because of a clear, that may have several uses.
        self._unlisted: set[int] = set()

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

    def match(self, hashes: Iterable[int]) -> tuple[int, int]:
        """Leading hashes that are resident: (how many, how many of them are active)."""
        primary, inactive = self._primary, self._inactive
        found = active = 0
        for hash_ in hashes:
            block = primary.get(hash_)
            if block is None:
                break
            found += 1
            if block not in inactive:
                active += 1
        return found, active

    def blocks_before_eviction_of(self, hashes: Sequence[int]) -> int:
        """How many blocks can be reserved before a copy is evicted that a hit on one of these would use."""
        used = {self._primary[hash_] for hash_ in hashes}
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
        """Pin ``hits`` and set ``fresh_blocks`` aside, evicting inactive copies as needed; all or nothing.

        Returns: the reservation and the hashes whose last copy was evicted, in order; None if there is no room.
        """
        free, inactive = self._free, self._inactive
        missing = fresh_blocks - len(free)
        if missing > 0:
            spared = len({block for block in hits if block in inactive}) if hits else 0
            if missing > len(inactive) - spared:
                return None
        pins = self._pins
        for block in hits:
            inactive.pop(block, None)
            pins[block] += 1
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

    def still_copied_out(self, reservation: Reservation) -> list[int]:
        """Transfers that still read memory which the reservation took, in order of use, each once."""
        if not self.copy_outs:
            return []
        out: list[int] = []
        for block in reversed(reservation.fresh):
            transfer = self._copied_out_by[block]
            if transfer is not None and transfer in self.copy_outs and transfer not in out:
                out.append(transfer)
        return out

    def activate_hits(self, reservation: Reservation) -> list[int]:
        """Turn the reservation's pins into references."""
        hits, reservation.hits = reservation.hits, []
        pins, refs = self._pins, self._refs
        for block in hits:
            pins[block] -= 1
            refs[block] += 1
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
        refs = self._refs
        for block in taken:
            refs[block] = 1
        return taken

    def cancel(self, reservation: Reservation) -> None:
        """Give a reservation back, hits in reverse order."""
        for block in reservation.hits:
            self._pins[block] -= 1
        self._settle(reversed(reservation.hits))
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
            if hash_ in primary:
                self._younger.setdefault(hash_, []).append(block)
            else:
                primary[hash_] = block
                first.append(position)
        return first

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference of each block, last to first; a private copy becomes free memory at once."""
        hashes, refs, free, unlisted = self._hash, self._refs, self._free, self._unlisted
        unused: list[int] = []
        for block in reversed(blocks):
            if hashes[block] is None and block not in unlisted:
                refs[block] = 0
                self.copies -= 1
                free.append(block)
                continue
            refs[block] = left = refs[block] - 1
            if left == 0:
                unused.append(block)
            elif left < 0:
                raise InvariantViolation(f"device block {block} is released more often than referenced")
        self._settle(unused)

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
            self._unlisted.add(block)
        self._primary.clear()
        self._younger.clear()
        return removed, in_use

    # -- copies to the host tier

    def is_copied_out(self, block: int) -> bool:
        """Whether an earlier transfer still reads this memory."""
        transfer = self._copied_out_by[block]
        return transfer is not None and transfer in self.copy_outs

    def begin_copy_out(self, blocks: Sequence[int], transfer: int, *, hold: bool) -> None:
        """Note that ``transfer`` reads these blocks; with ``hold`` they cannot be evicted until it has ended."""
        for block in blocks:
            self._copied_out_by[block] = transfer
            if hold:
                self._held_by[block] = transfer
                self._inactive.pop(block, None)
                if self._hash[block] is None:
                    self._unlisted.add(block)
        self.copy_outs[transfer] = tuple(blocks) if hold else ()

    def end_copy_out(self, transfer: int) -> None:
        """The transfer has ended; what it held is let go, last to first."""
        held = self.copy_outs.pop(transfer)
        for block in held:
            self._held_by[block] = None
            self._copied_out_by[block] = None
        self._settle(reversed(held))

    # -- inside

    def _settle(self, blocks: Iterable[int]) -> None:
        """Let cached copies that nobody uses any more be evicted, in this order; unlisted ones become free memory."""
        refs, pins, held_by, hash_of, inactive = self._refs, self._pins, self._held_by, self._hash, self._inactive
        for block in blocks:
            if refs[block] == pins[block] == 0 and held_by[block] is None:
                if hash_of[block] is not None:
                    inactive[block] = None
                elif block in self._unlisted:
                    self._unlisted.remove(block)
                    self.copies -= 1
                    self._free.append(block)

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
            if not (self._refs[block] == self._pins[block] == 0 and self._held_by[block] is None):
                raise InvariantViolation(f"device pool: inactive block {block} is in use")
        for block in self._unlisted:
            if not (
                self._hash[block] is None
                and (self._refs[block] or self._pins[block] or self._held_by[block] is not None)
            ):
                raise InvariantViolation(f"device pool: unlisted block {block} has a hash, or is not in use")
        if not (min(self._refs) >= 0 and min(self._pins) >= 0):
            raise InvariantViolation("device pool: negative use count")
