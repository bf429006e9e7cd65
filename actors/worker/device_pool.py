"""The GPU KV cache of one rank (G1): memory, prefix copies and their order of eviction.

Owns: which memory block holds which copy, who uses it, and what is evicted next.
Refuses to know: requests, time, events (callers get the evicted blocks' numbers back), and what a number stands for.

Memory is numbered 0..capacity-1. A memory block is free, reserved (taken by a reservation, not yet used), or holds a
*copy*: private (of no number) or cached under the number of its hash (``kv.numbers``). Several copies of one number may
exist; the oldest alive is the *primary* one, the only one that prefix hits use. A copy has uses: by sequences and
reservations, and by the transfer that holds it. Without any a cached copy is *inactive* and may be evicted, oldest
first, and the memory of a private one is free. A clear takes the numbers from copies in use: no hit finds them.

Blocks come and go by the prompt, and this is most of a run's work. So what is known of them stands in arrays, by memory
block or by number, and each step is done for all blocks of a call at once. Generated tokens need and fill one block at
a time: these steps exist for a single block, too, on views of the arrays that have cheap items.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from g2sim.actors.kv.numbers import NO_NUMBERS, BlockNumbers, Numbers, lengthened
from g2sim.bus.errors import InvariantViolation


class Reservation:
    """Room set aside: ``hits`` are pinned copies in prefix order, ``fresh`` is memory, used from its end."""

    __slots__ = ("fresh", "hits")

    def __init__(self, hits: Numbers, fresh: Numbers) -> None:
        self.hits = hits
        self.fresh = fresh


class EvictionOrder:
    """Memory blocks, oldest first, each of them once.

    The entry of a block that leaves in another way than as the oldest stays where it is, and is passed over later.

    Args:
        capacity_blocks: blocks are numbered below it.
    """

    __slots__ = ("_blocks", "_end", "_entries", "_entry_items", "_entry_of", "_entry_of_items", "_oldest_at")

    def __init__(self, capacity_blocks: int) -> None:
        self._blocks = 0
        self._entries: Numbers = np.zeros(2 * capacity_blocks, np.int64)
        self._entry_of: Numbers = np.full(capacity_blocks, -1, np.int64)  # block -> its entry, -1 if it is not here
        self._entry_items = _items(self._entries)
        self._entry_of_items = _items(self._entry_of)
        self._oldest_at = 0  # entries before it are done with
        self._end = 0

    def __len__(self) -> int:
        return self._blocks

    def append(self, blocks: Numbers) -> None:
        """These are the youngest from now on, the last of them most."""
        count = len(blocks)
        if self._end + count > len(self._entries):
            in_order = self.in_order()
            self._oldest_at = 0
            self._end = self._blocks
            self._write(in_order, 0)
        self._write(blocks, self._end)
        self._end += count
        self._blocks += count

    def leave(self, blocks: Numbers) -> None:
        """These leave, as far as they are here, whatever their age."""
        self._blocks -= self.count(blocks)
        self._entry_of[blocks] = -1

    def count(self, blocks: Numbers) -> int:
        """How many of these blocks are here."""
        return int(np.count_nonzero(self._entry_of[blocks] >= 0))

    def take_oldest(self, count: int) -> Numbers:
        """Remove the ``count`` oldest blocks; there must be as many. Returns: the blocks, oldest first."""
        found = 0
        parts: list[Numbers] = []
        while found < count:
            at = self._oldest_at
            stop = min(at + count - found, self._end)
            if stop == at:
                raise InvariantViolation("the order of eviction has lost blocks")
            entries = self._entries[at:stop]
            valid = self._entry_of[entries] == _counting(at, stop)
            part = entries.copy() if valid.all() else entries[valid]
            parts.append(part)
            found += len(part)
            self._oldest_at = stop
        taken = parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else NO_NUMBERS
        self._entry_of[taken] = -1
        self._blocks -= count
        return taken

    def take_one(self) -> int:
        """Remove the oldest block; there must be one."""
        entries, entry_of = self._entry_items, self._entry_of_items
        at = self._oldest_at
        while entry_of[entries[at]] != at:
            at += 1
        self._oldest_at = at + 1
        self._blocks -= 1
        block = entries[at]
        entry_of[block] = -1
        return block

    def in_order(self) -> Numbers:
        """All blocks, oldest first."""
        entries = self._entries[self._oldest_at : self._end]
        blocks: Numbers = entries[self._entry_of[entries] == _counting(self._oldest_at, self._end)]
        return blocks

    def _write(self, blocks: Numbers, at: int) -> None:
        stop = at + len(blocks)
        self._entries[at:stop] = blocks
        self._entry_of[blocks] = _counting(at, stop)


class DevicePool:
    """See the module's text. Memory blocks are opaque to callers.

    Args:
        numbering: gives the numbers of hashes.
    """

    __slots__ = (
        "_free",
        "_free_blocks",
        "_held",
        "_held_blocks",
        "_inactive",
        "_number",
        "_number_items",
        "_numbering",
        "_primary",
        "_primary_items",
        "_reader",
        "_since",
        "_stored",
        "_unheld",
        "_uses",
        "_uses_items",
        "_younger",
        "capacity_blocks",
        "copies",
        "copy_outs",
        "evicted_blocks",
        "reserved_blocks",
        "resident_blocks",
    )

    def __init__(self, capacity_blocks: int, numbering: BlockNumbers) -> None:
        self.capacity_blocks = capacity_blocks
        self.reserved_blocks = 0
        self.resident_blocks = 0  # numbers that can be found here
        self.copies = 0
        self.evicted_blocks = 0
        # Transfers that still read device memory, and what they read.
        self.copy_outs: dict[int, Numbers] = {}
        self._numbering = numbering
        # By memory block.
        self._free: Numbers = np.arange(capacity_blocks)  # of these the first ``_free_blocks``, taken from their end
        self._free_blocks = capacity_blocks
        self._number: Numbers = np.full(capacity_blocks, -1, np.int64)
        self._uses: NDArray[np.int32] = np.zeros(capacity_blocks, np.int32)  # without holds
        self._held: NDArray[np.bool_] = np.zeros(capacity_blocks, np.bool_)
        self._held_blocks = 0
        self._reader: Numbers = np.full(capacity_blocks, -1, np.int64)  # the last of the transfers without a hold
        self._unheld: set[int] = set()
        self._inactive = EvictionOrder(capacity_blocks)
        # By number.
        self._primary: Numbers = np.full(numbering.limit, -1, np.int64)
        self._since: Numbers = np.zeros(numbering.limit, np.int64)  # they are found in this order
        self._stored = 0
        self._younger: dict[int, list[int]] = {}
        numbering.keep(self._number)
        self._number_items = _items(self._number)
        self._primary_items = _items(self._primary)
        self._uses_items = _items(self._uses)

    # -- looking

    @property
    def active_blocks(self) -> int:
        """Blocks in use or set aside; inactive copies count as available."""
        return self.copies - len(self._inactive) + self.reserved_blocks

    @property
    def available_blocks(self) -> int:
        return self.capacity_blocks - self.active_blocks

    def holds(self, number: int) -> bool:
        """Whether a copy of it can be found."""
        return number < len(self._primary_items) and self._primary_items[number] >= 0

    def primaries(self, numbers: Numbers) -> Numbers:
        """The primary copies of numbers that are resident."""
        self._fit()
        blocks: Numbers = self._primary[numbers]
        if len(blocks) and blocks.min() < 0:
            missing = self._numbering.hash_of(int(numbers[blocks < 0][0]))
            raise InvariantViolation(f"block {missing} was counted as a hit but is not resident")
        return blocks

    def match(self, numbers: Numbers) -> tuple[int, int]:
        """Leading numbers that are resident: (how many, how many of them are active)."""
        self._fit()
        if not len(numbers) or self._primary[numbers[0]] < 0:
            return 0, 0
        blocks = self._primary[numbers]
        found = int((blocks < 0).argmax()) or len(numbers)
        blocks = blocks[:found]
        in_use = self._uses[blocks] > 0
        if self._held_blocks:
            in_use |= self._held[blocks]
        return found, int(np.count_nonzero(in_use))

    def blocks_before_eviction_of(self, numbers: Numbers) -> int:
        """How many blocks can be reserved before a copy is evicted that a hit on one of these would use."""
        used = np.zeros(self.capacity_blocks, np.bool_)
        used[self.primaries(numbers)] = True
        places = used[self._inactive.in_order()].nonzero()[0]
        return self._free_blocks + (int(places[0]) if len(places) else len(self._inactive))

    def resident_numbers(self) -> Numbers:
        """All that can be found here, the one that came last first."""
        numbers = (self._primary >= 0).nonzero()[0]
        return numbers[self._since[numbers].argsort()[::-1]]

    # -- reserving

    def reserve(self, hits: Numbers, fresh_blocks: int) -> tuple[Reservation, Numbers] | None:
        """Use ``hits`` and set ``fresh_blocks`` aside, evicting inactive copies as needed; all or nothing.

        Returns: the reservation and the numbers whose last copy was evicted, in order; None if there is no room.
        """
        taken = self._take(hits, fresh_blocks)
        if taken is None:
            return None
        fresh, removed = taken
        self.reserved_blocks += fresh_blocks
        return Reservation(hits, fresh), removed

    def allocate(self, hits: Numbers, fresh_blocks: int) -> tuple[Numbers, Numbers] | None:
        """Use ``hits`` and private copies at once. Returns: the blocks, hits first; and as ``reserve``."""
        taken = self._take(hits, fresh_blocks)
        if taken is None:
            return None
        fresh, removed = taken
        fresh = fresh[::-1]
        self._begin_private(fresh)
        return (np.concatenate((hits, fresh)) if len(hits) else fresh), removed

    def allocate_one(self) -> tuple[int, int]:
        """``allocate`` a single block, without hits; there must be room. Returns: the block; a number or -1."""
        removed = -1
        if self._free_blocks:
            self._free_blocks -= 1
            block = int(self._free[self._free_blocks])
        else:
            if not len(self._inactive):
                raise InvariantViolation("a device block is taken, though none is available")
            block = self._inactive.take_one()
            removed = self._evict_one(block)
        self.copies += 1
        self._uses_items[block] = 1
        return block, removed

    def still_copied_out(self, blocks: Numbers) -> list[int]:
        """Transfers that still read memory which has been taken anew, each once."""
        if not self._unheld:
            return []  # held memory is not taken
        readers = self._reader[blocks]
        return list(dict.fromkeys(readers[readers >= 0].tolist()))

    def activate_hits(self, reservation: Reservation) -> Numbers:
        """Take the hits out of a reservation, which used them until now."""
        hits, reservation.hits = reservation.hits, NO_NUMBERS
        return hits

    def take_private(self, reservation: Reservation, blocks: int) -> Numbers:
        """Use that many memory blocks of a reservation for private copies; returns them in order of use."""
        fresh = reservation.fresh
        keep = len(fresh) - blocks
        if keep < 0:
            raise InvariantViolation(f"{blocks} device blocks are taken of a reservation of {len(fresh)}")
        taken = fresh[keep:][::-1]
        reservation.fresh = fresh[:keep]
        self.reserved_blocks -= blocks
        self._begin_private(taken)
        return taken

    def cancel(self, reservation: Reservation) -> None:
        """Give a reservation back, hits in reverse order."""
        self.release(reservation.hits)
        self.reserved_blocks -= len(reservation.fresh)
        self._set_free(reservation.fresh)
        reservation.hits = reservation.fresh = NO_NUMBERS

    # -- using

    def cache(self, blocks: Numbers, numbers: Numbers) -> Numbers:
        """Enter private copies under their numbers, in order; no number twice.

        Returns: the positions, in ``blocks``, of those that are the first copies of their numbers.
        """
        count = len(blocks)
        if count != len(numbers):
            raise InvariantViolation(f"{count} device blocks are cached under {len(numbers)} numbers")
        if not count:
            return NO_NUMBERS
        self._fit()
        before = self._number[blocks]
        if before.max() >= 0:
            raise InvariantViolation(f"device block {blocks[before >= 0][0]} is cached twice")
        self._number[blocks] = numbers
        primary = self._primary
        is_first = primary[numbers] < 0
        first = is_first.nonzero()[0]
        if len(first) < count:
            for position in (~is_first).nonzero()[0].tolist():
                self._younger.setdefault(int(numbers[position]), []).append(int(blocks[position]))
            blocks, numbers = blocks[first], numbers[first]
            count = len(first)
        primary[numbers] = blocks
        self._since[numbers] = _counting(self._stored, self._stored + count)
        self._stored += count
        self.resident_blocks += count
        return first

    def cache_one(self, block: int, number: int) -> bool:
        """``cache`` a single block. Returns: whether it is the first copy."""
        if number >= len(self._primary_items):
            self._fit()
        if self._number_items[block] >= 0:
            raise InvariantViolation(f"device block {block} is cached twice")
        self._number_items[block] = number
        if self._primary_items[number] >= 0:
            self._younger.setdefault(number, []).append(block)
            return False
        self._primary_items[number] = block
        self._since[number] = self._stored
        self._stored += 1
        self.resident_blocks += 1
        return True

    def release(self, blocks: Numbers) -> None:
        """Drop one use of each block, last to first. After the last one a cached copy may be evicted."""
        if not len(blocks):
            return
        blocks = blocks[::-1]
        left = self._uses[blocks] - 1
        if left.min() < 0:
            raise InvariantViolation(f"device block {blocks[left < 0][0]} is released more often than referenced")
        self._uses[blocks] = left
        unused = left == 0
        if self._held_blocks:
            unused &= ~self._held[blocks]
        self._let_go(blocks[unused])

    def clear(self) -> tuple[Numbers, Numbers]:
        """Evict all inactive copies, and let no hit find those in use.

        Returns: numbers that no copy in use had, in order of eviction; and the others, a prefix after what follows it.
        """
        gone = self._inactive.take_oldest(len(self._inactive))
        removed = self._evict(gone)
        self._set_free(gone)
        in_use = self.resident_numbers()
        self._number[self._primary[in_use]] = -1
        self._number[list(itertools.chain(*self._younger.values()))] = -1
        self._primary[in_use] = -1
        self.resident_blocks = 0
        self._younger.clear()
        return removed, in_use

    # -- copies to the host tier

    def copied_out(self, blocks: Numbers) -> Numbers:
        """Places in ``blocks`` of memory that an earlier transfer still reads."""
        if self._unheld:
            read = self._reader[blocks] >= 0
            if self._held_blocks:
                read |= self._held[blocks]
        elif self._held_blocks:
            read = self._held[blocks]
        else:
            return NO_NUMBERS
        return read.nonzero()[0]

    def begin_copy_out(self, blocks: Numbers, transfer: int, *, hold: bool) -> None:
        """Note that ``transfer`` reads these blocks; with ``hold`` they cannot be evicted until it has ended.

        Raises: InvariantViolation if one of them is held already, or is to be held although nobody uses it.
        """
        self.copy_outs[transfer] = blocks
        if not hold:
            self._reader[blocks] = transfer
            self._unheld.add(transfer)
            return
        if len(blocks) and (self._held[blocks].any() or self._uses[blocks].min() < 1):
            raise InvariantViolation(f"transfer {transfer} copies device blocks that another one holds, or nobody uses")
        self._held[blocks] = True
        self._held_blocks += len(blocks)

    def end_copy_out(self, transfer: int) -> None:
        """The transfer has ended; what it held is let go, last to first."""
        blocks = self.copy_outs.pop(transfer)
        if transfer in self._unheld:
            self._unheld.discard(transfer)
            self._reader[blocks[self._reader[blocks] == transfer]] = -1
            return
        self._held[blocks] = False
        self._held_blocks -= len(blocks)
        blocks = blocks[::-1]
        self._let_go(blocks[self._uses[blocks] == 0])

    # -- inside

    def _fit(self) -> None:
        """Make the arrays by number long enough for all numbers that there are."""
        limit = self._numbering.limit
        if limit != len(self._primary):
            self._primary = lengthened(self._primary, limit, -1)
            self._primary_items = _items(self._primary)
            self._since = lengthened(self._since, limit)

    def _take(self, hits: Numbers, fresh_blocks: int) -> tuple[Numbers, Numbers] | None:
        """Use ``hits`` and take memory: as ``reserve``. Returns: the memory, used from its end; and numbers."""
        free = self._free_blocks
        missing = fresh_blocks - free
        if len(hits):
            if missing > 0 and missing > len(self._inactive) - self._inactive.count(hits):
                return None
            self._inactive.leave(hits)
            self._uses[hits] += 1
        elif missing > len(self._inactive):
            return None
        if missing <= 0:
            self._free_blocks = free - fresh_blocks
            return self._free[self._free_blocks : free].copy(), NO_NUMBERS
        evicted = self._inactive.take_oldest(missing)
        self._free_blocks = 0
        return (np.concatenate((self._free[:free], evicted)) if free else evicted), self._evict(evicted)

    def _begin_private(self, blocks: Numbers) -> None:
        self.copies += len(blocks)
        self._uses[blocks] = 1

    def _set_free(self, blocks: Numbers) -> None:
        stop = self._free_blocks + len(blocks)
        self._free[self._free_blocks : stop] = blocks
        self._free_blocks = stop

    def _let_go(self, blocks: Numbers) -> None:
        """Nothing uses these any more: cached copies may be evicted from now on, in order; other memory is free."""
        is_cached = self._number[blocks] >= 0
        if not is_cached.all():
            private = blocks[~is_cached]
            self.copies -= len(private)
            self._set_free(private)
            blocks = blocks[is_cached]
        if len(blocks):
            self._inactive.append(blocks)

    def _evict(self, blocks: Numbers) -> Numbers:
        """Evict copies that are inactive no more, in order; returns the numbers of which no other copy is left."""
        count = len(blocks)
        self.copies -= count
        self.evicted_blocks += count
        numbers = self._number[blocks]
        if count and numbers.min() < 0:
            raise InvariantViolation(f"device block {blocks[numbers < 0][0]} is inactive but private")
        self._number[blocks] = -1
        if self._younger:
            numbers = self._without_other_copies(blocks, numbers)
        self._primary[numbers] = -1
        self.resident_blocks -= len(numbers)
        return numbers

    def _evict_one(self, block: int) -> int:
        """``_evict`` a single copy; returns its number if no other copy is left, else -1."""
        number = self._number_items[block]
        if number < 0:
            raise InvariantViolation(f"device block {block} is inactive but private")
        if number in self._younger:
            last = self._evict(np.array([block]))
            return int(last[0]) if len(last) else -1
        self.copies -= 1
        self.evicted_blocks += 1
        self._number_items[block] = -1
        self._primary_items[number] = -1
        self.resident_blocks -= 1
        return number

    def _without_other_copies(self, blocks: Numbers, numbers: Numbers) -> Numbers:
        """Those of the numbers, whose copies in ``blocks`` are evicted in order, that have no other copy then."""
        younger_of = self._younger
        last: list[int] = []
        for place, (block, number) in enumerate(zip(blocks.tolist(), numbers.tolist(), strict=True)):
            younger = younger_of.get(number)
            if younger is None:
                last.append(place)
                continue
            if self._primary[number] == block:
                self._primary[number] = younger.pop(0)
            else:
                younger.remove(block)
            if not younger:
                del younger_of[number]
        return numbers[last]

    def check(self) -> None:
        """Raise InvariantViolation unless the books agree. Costs O(memory, and numbers there are)."""
        if not self._free_blocks + self.reserved_blocks + self.copies == self.capacity_blocks:
            raise InvariantViolation(
                f"device pool: free {self._free_blocks} + reserved {self.reserved_blocks} + copies {self.copies} "
                f"!= capacity {self.capacity_blocks}"
            )
        numbers = self.resident_numbers()
        cached = len(numbers) + sum(map(len, self._younger.values()))
        if not cached == np.count_nonzero(self._number >= 0) or not len(numbers) == self.resident_blocks:
            raise InvariantViolation("device pool: index and memory disagree")
        if not np.array_equal(self._number[self._primary[numbers]], numbers):
            raise InvariantViolation("device pool: a block is indexed under a number that it does not hold")
        inactive = self._inactive.in_order()
        in_use = (self._uses > 0) | self._held
        used = inactive[in_use[inactive]].tolist()
        if used or not len(set(inactive.tolist())) == len(self._inactive):
            raise InvariantViolation(f"device pool: inactive blocks {sorted(used)} are in use")
        if self._uses.min(initial=0) < 0:
            raise InvariantViolation("device pool: negative use count")
        if not np.count_nonzero(in_use) == self.copies - len(inactive):
            raise InvariantViolation(
                f"device pool: {np.count_nonzero(in_use)} blocks in use, but {self.copies} copies with "
                f"{len(inactive)} inactive"
            )
        holds = [blocks.tolist() for transfer, blocks in self.copy_outs.items() if transfer not in self._unheld]
        held = sorted(itertools.chain(*holds))
        if not held == self._held.nonzero()[0].tolist() or not len(held) == self._held_blocks:
            raise InvariantViolation("device pool: transfers and what they hold disagree")
        if not self._unheld <= self.copy_outs.keys():
            raise InvariantViolation("device pool: transfers that hold nothing are not known")


def _items(array: Any) -> memoryview[int]:
    """A view of an array whose single items cost less to get and to set."""
    return memoryview(array)


_COUNTED: Numbers = np.arange(4096)


def _counting(start: int, stop: int) -> Numbers:
    """The numbers from ``start`` to ``stop``; not to be changed."""
    return _COUNTED[start:stop] if stop <= 4096 else np.arange(start, stop)
