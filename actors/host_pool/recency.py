"""The order in which a host pool's idle blocks are evicted.

Owns: which blocks may be evicted, and which of them is the oldest.
Refuses to know: what a block is, and why it may be evicted.

Most touches never matter: a block is made recent many times before it is evicted. So a touch only writes the blocks'
ages, a prompt at a time. The order is found now and then, and used up from its oldest block on, without those whose age
has changed since: they are younger than all that are left in it. When it is used up, it is found anew.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from g2sim.actors.kv.numbers import NO_NUMBERS, Numbers, lengthened
from g2sim.bus.errors import InvariantViolation

_AT_ONCE = 64


class Recency:
    """Blocks, by their numbers, in order of age. What is not among them may be touched, without effect.

    Args:
        limit: every number is below it, until ``grow`` says otherwise.
    """

    __slots__ = ("_ages", "_clock", "_count", "_here", "_latest", "_next", "_order", "_order_ages", "_spared")

    def __init__(self, limit: int) -> None:
        self._here: NDArray[np.bool_] = np.zeros(limit, np.bool_)
        self._count = 0
        self._clock = 0
        self._ages: Numbers = np.zeros(limit, np.int64)  # no two that are here are equal; the largest is the youngest
        self._latest = NO_NUMBERS  # what was touched last, if nothing has been added since
        self._spared: NDArray[np.bool_] = np.zeros(limit, np.bool_)  # all False between calls
        # Blocks that were here when it was found, oldest first, and their ages then. It is used up before ``_next``.
        self._order = NO_NUMBERS
        self._order_ages = NO_NUMBERS
        self._next = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, block: int) -> bool:
        return bool(self._here[block])

    def grow(self, limit: int) -> None:
        """Let there be larger numbers, below ``limit``."""
        self._here = lengthened(self._here, limit)
        self._ages = lengthened(self._ages, limit)
        self._spared = np.zeros(limit, np.bool_)

    def touch(self, blocks: Numbers) -> None:
        """Make those of ``blocks`` that are here youngest, the first of them last.

        No block is given twice, and nobody changes the array.
        """
        if blocks is self._latest:
            return
        self._latest = blocks
        # A block that is not here gets an age, too: it gets another one before that can matter.
        clock = self._clock
        self._clock = youngest = clock + len(blocks)
        self._ages[blocks] = np.arange(youngest, clock, -1)

    def add(self, blocks: Numbers) -> None:
        """Let these be evicted, too, which were not here: the youngest, the last of them last."""
        self._latest = NO_NUMBERS
        count = len(blocks)
        self._here[blocks] = True
        self._count += count
        self._ages[blocks] = np.arange(self._clock + 1, self._clock + 1 + count)
        self._clock += count

    def remove(self, blocks: Numbers) -> None:
        """These cannot be evicted any more; some may not have been here."""
        here = self._here
        self._count -= int(np.count_nonzero(here[blocks]))
        here[blocks] = False

    def take_oldest(self, count: int, spared: Numbers) -> Numbers | None:
        """Remove the ``count`` oldest blocks outside ``spared``; None, and nothing is removed, if there are not enough.

        Returns: the blocks, oldest first.
        """
        here, is_spared, any_spared = self._here, self._spared, len(spared) > 0
        if self._count - (int(np.count_nonzero(here[spared])) if any_spared else 0) < count:
            return None
        if any_spared:
            is_spared[spared] = True
        taken: list[Numbers] = []
        passed: list[Numbers] = []  # places in the order of blocks that are spared
        missing, step, is_new = count, count + _AT_ONCE, False
        while missing:
            start = self._next
            if start == len(self._order):
                if is_new:
                    raise InvariantViolation("the order of eviction has lost blocks")
                self._find_order()
                passed.clear()
                start, is_new = 0, True
            oldest = self._order[start : start + step]
            is_valid = here[oldest]
            is_valid &= self._ages[oldest] == self._order_ages[start : start + step]
            may_go = is_valid & ~is_spared[oldest] if any_spared else is_valid
            places = may_go.nonzero()[0][:missing]
            missing -= len(places)
            used = len(oldest) if missing else int(places[-1]) + 1
            self._next = start + used
            going = oldest[places]
            here[going] = False
            taken.append(going)
            if any_spared:
                passed.append((is_valid & ~may_go)[:used].nonzero()[0] + start)
            step *= 2
        if any_spared:
            is_spared[spared] = False
            self._keep_place(passed)
        self._count -= count
        return taken[0] if len(taken) == 1 else np.concatenate((NO_NUMBERS, *taken))

    def take_all(self) -> Numbers:
        """Remove all blocks; oldest first."""
        oldest_first = self.in_order()
        self._here[oldest_first] = False
        self._count = 0
        return oldest_first

    def in_order(self) -> Numbers:
        """All blocks, oldest first."""
        blocks = self._here.nonzero()[0]
        return blocks[self._ages[blocks].argsort()]

    def are_here(self) -> NDArray[np.bool_]:
        """Whether each number is that of a block that is here: bool[limit]."""
        if np.count_nonzero(self._here) != self._count:
            raise InvariantViolation(f"{self._count} blocks are counted in the order of eviction, others are there")
        return self._here.copy()

    def _find_order(self) -> None:
        self._order = self.in_order()
        self._order_ages = self._ages[self._order]
        self._next = 0

    def _keep_place(self, passed: list[Numbers]) -> None:
        """Put blocks, given by their places in the order, back before what is left of it."""
        places = np.concatenate((NO_NUMBERS, *passed))
        if len(places):
            start = self._next - len(places)
            self._order[start : self._next] = self._order[places]
            self._order_ages[start : self._next] = self._order_ages[places]
            self._next = start
