"""The GPU KV cache of one rank (G1): memory, prefix copies and their order of eviction.

Owns: which memory block holds which copy, who uses it, and what is evicted next.
Refuses to know: requests, time, events (callers get the evicted hashes back).

Memory is numbered 0..capacity-1. A memory block is free, reserved (taken by a reservation, not yet used), or holds a
*copy*: private (no hash) or cached under a hash. Several copies of one hash may exist; the oldest alive is the
*primary* one, the only one that prefix hits use. A copy has uses: by sequences and reservations, and by the transfer
that holds it. Without any a cached copy is *inactive* and may be evicted, oldest first, and the memory of a private one
is free. A clear takes the hashes from copies in use: no hit finds them.

Blocks come and go by the prompt, and this is most of a run's work. So each step is done for all blocks of a call before
the next one, and what concerns only some of them (several copies of one hash, a hit on an inactive copy) is looked for
once a call, not once a block.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from g2sim.bus.errors import InvariantViolation


class Reservation:
    """Room set aside: ``hits`` are pinned copies in prefix order, ``fresh`` is memory, used from its end."""

    __slots__ = ("fresh", "hits")

    def __init__(self, hits: list[int], fresh: list[int]) -> None:
        self.hits = hits
        self.fresh = fresh


class EvictionOrder:
    """Blocks, oldest first, each of them once: they come in runs, and most leave as the oldest.

    The entry of a block that leaves in another way stays where it is, and is passed over later.

    Args:
        most_outdated: such entries that are kept; a bound on memory, without effect on results.
    """

    __slots__ = ("_blocks", "_entries", "_most_outdated", "_oldest_at", "_outdated")

    def __init__(self, most_outdated: int) -> None:
        self._most_outdated = most_outdated
        self._blocks = 0
        self._entries: list[int] = []
        self._oldest_at = 0  # entries before it are done with
        self._outdated: dict[int, int] = {}  # block -> how many of its entries, the first ones, are outdated

    def __len__(self) -> int:
        return self._blocks

    def append(self, blocks: list[int]) -> None:
        """These are the youngest from now on, the last of them most."""
        self._entries += blocks
        self._blocks += len(blocks)

    def leave(self, block: int) -> None:
        """A block that is here leaves, whatever its age."""
        self._outdated[block] = self._outdated.get(block, 0) + 1
        self._blocks -= 1
        if len(self._entries) - self._oldest_at - self._blocks > self._most_outdated:
            self._entries = self.in_order()
            self._oldest_at = 0
            self._outdated.clear()

    def take_oldest(self, count: int) -> list[int]:
        """Remove the ``count`` oldest blocks; there must be as many. Returns: the blocks, oldest first."""
        stop = self._oldest_at + count
        taken = self._entries[self._oldest_at : stop]
        if self._outdated and not self._outdated.keys().isdisjoint(taken):
            taken, stop = self._first(count, self._outdated)
        self._blocks -= count
        if 2 * stop > len(self._entries):
            del self._entries[:stop]
            stop = 0
        self._oldest_at = stop
        return taken

    def in_order(self) -> list[int]:
        """All blocks, oldest first."""
        return self._first(self._blocks, self._outdated.copy())[0]

    def _first(self, count: int, outdated: dict[int, int]) -> tuple[list[int], int]:
        """The ``count`` oldest blocks, and where their entries end; takes what it passes over from ``outdated``."""
        found: list[int] = []
        at = self._oldest_at
        while len(found) < count:
            block = self._entries[at]
            at += 1
            entries = outdated.get(block, 0)
            if not entries:
                found.append(block)
            elif entries == 1:
                del outdated[block]
            else:
                outdated[block] = entries - 1
        return found, at


class DevicePool:
    """See the module's text. Block numbers are opaque to callers."""

    __slots__ = (
        "_free",
        "_hash",
        "_held",
        "_inactive",
        "_primary",
        "_read_by",
        "_unheld",
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
        self._uses = [0] * capacity_blocks  # without holds
        self._held: set[int] = set()
        self._unheld: set[int] = set()  # those of the transfers that hold nothing
        self._read_by: dict[int, int] = {}  # block -> the last one of those that reads it, or has read it
        self._primary: dict[int, int] = {}
        self._younger: dict[int, list[int]] = {}
        self._inactive = EvictionOrder(capacity_blocks)

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
        primary, uses, held = self._primary, self._uses, self._held
        found = active = 0
        for hash_ in hashes:
            block = primary.get(hash_)
            if block is None:
                break
            found += 1
            if uses[block] or block in held:
                active += 1
        return found, active

    def blocks_before_eviction_of(self, hashes: Sequence[int]) -> int:
        """How many blocks can be reserved before a copy is evicted that a hit on one of these would use."""
        used = set(self.primaries(hashes))
        inactive = self._inactive.in_order()
        evictable = next((idx for idx, block in enumerate(inactive) if block in used), len(inactive))
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
        taken = self._take(hits, fresh_blocks)
        if taken is None:
            return None
        fresh, removed = taken
        self.reserved_blocks += fresh_blocks
        return Reservation(list(hits), fresh), removed

    def allocate(self, hits: Sequence[int], fresh_blocks: int) -> tuple[list[int], list[int]] | None:
        """Use ``hits`` and private copies at once. Returns: the blocks, hits first; and as ``reserve``."""
        taken = self._take(hits, fresh_blocks)
        if taken is None:
            return None
        fresh, removed = taken
        fresh.reverse()
        self._begin_private(fresh)
        return ([*hits, *fresh] if hits else fresh), removed

    def still_copied_out(self, blocks: Iterable[int]) -> list[int]:
        """Transfers that still read memory which has been taken anew, each once."""
        unheld = self._unheld
        if not unheld:
            return []  # held memory is not taken
        transfers = dict.fromkeys(map(self._read_by.get, blocks))
        return [transfer for transfer in transfers if transfer is not None and transfer in unheld]

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
        self._begin_private(taken)
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
        if len(blocks) != len(hashes):
            raise InvariantViolation(f"{len(blocks)} device blocks are cached under {len(hashes)} hashes")
        for block, hash_ in zip(blocks, hashes):  # noqa: B905 - just checked, and it costs time
            if hash_of[block] is not None:
                raise InvariantViolation(f"device block {block} is cached twice")
            hash_of[block] = hash_
        first_copies = list(map(primary.setdefault, hashes, blocks))
        if first_copies == blocks:
            return list(range(len(blocks)))
        first: list[int] = []
        for position, block in enumerate(blocks):
            if first_copies[position] == block:
                first.append(position)
            else:
                self._younger.setdefault(hashes[position], []).append(block)
        return first

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one use of each block, last to first. After the last one a cached copy may be evicted."""
        uses, held = self._uses, self._held
        unused: list[int] = []
        for block in reversed(blocks):
            uses[block] = left = uses[block] - 1
            if not left:
                unused.append(block)
            elif left < 0:
                raise InvariantViolation(f"device block {block} is released more often than referenced")
        if held and not held.isdisjoint(unused):
            unused = [block for block in unused if block not in held]
        self._let_go(unused)

    def clear(self) -> tuple[list[int], list[int]]:
        """Evict all inactive copies, and let no hit find those in use.

        Returns: hashes that no copy in use had, in order of eviction; and the others, a prefix after what follows it.
        """
        gone = self._inactive.take_oldest(len(self._inactive))
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
        held, unheld, read_by = self._held, self._unheld, self._read_by
        if unheld:
            return [place for place, block in enumerate(blocks) if read_by.get(block) in unheld or block in held]
        if held.isdisjoint(blocks):
            return []
        return [place for place, block in enumerate(blocks) if block in held]

    def begin_copy_out(self, blocks: Sequence[int], transfer: int, *, hold: bool) -> None:
        """Note that ``transfer`` reads these blocks; with ``hold`` they cannot be evicted until it has ended.

        Raises: InvariantViolation if one of them is held already, or is to be held although nobody uses it.
        """
        if not hold:
            self._read_by.update(dict.fromkeys(blocks, transfer))
            self._unheld.add(transfer)
            self.copy_outs[transfer] = ()
            return
        uses, held = self._uses, self._held
        held_blocks = len(held) + len(blocks)
        held.update(blocks)
        if len(held) != held_blocks or 0 in [uses[block] for block in blocks]:
            raise InvariantViolation(f"transfer {transfer} copies device blocks that another one holds, or nobody uses")
        self.copy_outs[transfer] = tuple(blocks)

    def end_copy_out(self, transfer: int) -> None:
        """The transfer has ended; what it held is let go, last to first."""
        blocks, uses = self.copy_outs.pop(transfer), self._uses
        self._unheld.discard(transfer)
        self._held.difference_update(blocks)
        self._let_go([block for block in reversed(blocks) if not uses[block]])

    # -- inside

    def _take(self, hits: Sequence[int], fresh_blocks: int) -> tuple[list[int], list[int]] | None:
        """Use ``hits`` and take memory: as ``reserve``. Returns: the memory, used from its end; and hashes."""
        free = self._free
        missing = fresh_blocks - len(free)
        if hits:
            if missing > 0:
                uses, held = self._uses, self._held
                spared = {block for block in hits if not uses[block] and block not in held}
                if missing > len(self._inactive) - len(spared):
                    return None
            self._use(hits)
        elif missing > len(self._inactive):
            return None
        if missing <= 0:
            keep = len(free) - fresh_blocks
            taken = free[keep:]
            del free[keep:]
            return taken, []
        evicted = self._inactive.take_oldest(missing)
        taken = free + evicted
        free.clear()
        return taken, self._evict(evicted)

    def _begin_private(self, blocks: list[int]) -> None:
        self.copies += len(blocks)
        uses = self._uses
        for block in blocks:
            uses[block] = 1

    def _use(self, blocks: Iterable[int]) -> None:
        uses, held = self._uses, self._held
        for block in blocks:
            if not uses[block] and block not in held:
                self._inactive.leave(block)
            uses[block] += 1

    def _let_go(self, blocks: list[int]) -> None:
        """Nothing uses these any more: cached copies may be evicted from now on, in order; other memory is free."""
        if not blocks:
            return
        hash_of = self._hash
        private = [block for block in blocks if hash_of[block] is None]
        if private:
            self.copies -= len(private)
            self._free += private
            if blocks[: len(private)] == private:  # the rest of a request, which fills no block
                blocks = blocks[len(private) :]
            else:
                blocks = [block for block in blocks if hash_of[block] is not None]
        self._inactive.append(blocks)

    def _evict(self, blocks: Sequence[int]) -> list[int]:
        """Evict copies that are inactive no more, in order; returns the hashes of which no other copy is left."""
        hash_of, primary, younger_of = self._hash, self._primary, self._younger
        self.copies -= len(blocks)
        self.evicted_blocks += len(blocks)
        hashes: list[int] = []
        for block in blocks:
            hash_ = hash_of[block]
            if hash_ is None:
                raise InvariantViolation(f"device block {block} is inactive but private")
            hash_of[block] = None
            hashes.append(hash_)
        if not younger_of:
            for hash_ in hashes:
                del primary[hash_]
            return hashes
        removed: list[int] = []
        for block, hash_ in zip(blocks, hashes, strict=True):
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
        inactive = set(self._inactive.in_order())
        in_use = {block for block, uses in enumerate(self._uses) if uses} | self._held
        if not len(inactive) == len(self._inactive) or inactive & in_use:
            raise InvariantViolation(f"device pool: inactive blocks {sorted(inactive & in_use)} are in use")
        if min(self._uses) < 0:
            raise InvariantViolation("device pool: negative use count")
        if not len(in_use) == self.copies - len(inactive):
            raise InvariantViolation(
                f"device pool: {len(in_use)} blocks in use, but {self.copies} copies with {len(inactive)} inactive"
            )
        held = [block for blocks in self.copy_outs.values() for block in blocks]
        if not sorted(held) == sorted(self._held) or not self._unheld <= self.copy_outs.keys():
            raise InvariantViolation("device pool: transfers and what they hold disagree")
