"""The order in which a host pool's idle blocks are evicted.

Owns: which blocks may be evicted, and which of them is the oldest.
Refuses to know: what a block is, and why it may be evicted.

Most touches never matter: a block is made recent many times before it is evicted. So they are noted as they come, a
prompt at a time, and the blocks that were oldest before are used up first, without those that have been touched since.
Only then do the notes say which blocks are oldest. Noting a touch is one update of a set.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet

from g2sim.bus.errors import InvariantViolation

_NOTES_PER_BLOCK = 8


class Recency:
    """Blocks in order of age. What is not among them may be touched, without effect.

    Args:
        most_noted: blocks that are noted, besides eight times those that are here, before the notes are sorted in; a
            bound on memory, without effect on results.
    """

    __slots__ = ("_blocks", "_by_number", "_most_noted", "_noted_blocks", "_notes", "_outdated", "_sorted")

    def __init__(self, most_noted: int = 4096) -> None:
        self._most_noted = most_noted
        self._blocks: set[int] = set()
        self._sorted: list[int] = []  # youngest first; right for blocks that are not outdated
        self._outdated: set[int] = set()  # what may be older there than it is, or is not here any more
        self._notes: dict[int, Sequence[int]] = {}  # what has become young since, the latest last; by identity
        self._by_number: set[int] = set()  # the notes which are not youngest first, but ordered by number
        self._noted_blocks = 0  # with repetitions

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def are_among(self, blocks: AbstractSet[int]) -> bool:
        return self._blocks <= blocks

    def touch(self, blocks: Sequence[int]) -> None:
        """Make those of ``blocks`` that are here youngest, the first of them last.

        No block is given twice, and the sequence must not change.
        """
        if id(blocks) not in self._notes:
            self._outdated.update(blocks)
        self._note(blocks)

    def add(self, blocks: Collection[int]) -> None:
        """Let these be evicted, too, which were not here: the youngest, ordered among themselves by number."""
        self._blocks.update(blocks)
        cohort = list(blocks)
        self._by_number.add(id(cohort))
        self._note(cohort)

    def remove(self, blocks: Collection[int]) -> None:
        """These cannot be evicted any more; some may not have been here."""
        self._blocks.difference_update(blocks)
        self._outdated.update(blocks)

    def take_oldest(self, count: int, spared: set[int]) -> list[int] | None:
        """Remove the ``count`` oldest blocks outside ``spared``; None, and nothing is removed, if there are not enough.

        Returns: the blocks, oldest first.
        """
        blocks = self._blocks
        if len(blocks) - len(blocks & spared) < count:
            return None
        taken: list[int] = []
        passed: list[int] = []
        while len(taken) < count:
            if not self._sorted:
                self._sort()
                if not self._sorted:
                    raise InvariantViolation("the order of eviction has lost blocks")
            oldest = self._sorted[len(taken) - count :]
            del self._sorted[len(taken) - count :]
            oldest.reverse()
            outdated = self._outdated
            if not outdated.isdisjoint(oldest):
                oldest = [block for block in oldest if block not in outdated]
            if not spared.isdisjoint(oldest):
                passed += [block for block in oldest if block in spared]
                oldest = [block for block in oldest if block not in spared]
            taken += oldest
        passed.reverse()
        self._sorted += passed
        blocks.difference_update(taken)
        return taken

    def take_all(self) -> tuple[int, ...]:
        """Remove all blocks; oldest first."""
        oldest_first = self.in_order()
        self._blocks.clear()
        self._sorted.clear()
        return oldest_first

    def in_order(self) -> tuple[int, ...]:
        """All blocks, oldest first."""
        self._sort()
        return tuple(reversed(self._sorted))

    def _note(self, blocks: Sequence[int]) -> None:
        known = self._notes.pop(id(blocks), None)
        self._notes[id(blocks)] = blocks
        if known is None:
            self._noted_blocks += len(blocks)
            if self._noted_blocks > self._most_noted + _NOTES_PER_BLOCK * len(self._blocks):
                self._sort()

    def _sort(self) -> None:
        """Find the order that the notes make: the last note of a block counts."""
        older = self._blocks.copy()
        youngest_first: list[int] = []
        for number, note in reversed(self._notes.items()):
            if older.issuperset(note):
                found = list(note)
            elif older.isdisjoint(note):
                continue
            else:
                found = [block for block in note if block in older]
            older.difference_update(found)
            if number in self._by_number:
                found.sort(reverse=True)
            youngest_first += found
        youngest_first += [block for block in self._sorted if block in older]
        self._sorted = youngest_first
        self._outdated.clear()
        self._notes.clear()
        self._by_number.clear()
        self._noted_blocks = 0
