"""Small numbers for block hashes, so that what is known of blocks can stand in arrays.

A number is a name within one process: it stands for one sequence hash for as long as anybody may use it, and maybe for
another one later. No result depends on which number a block has, so whoever needs one may have a numbering of its own;
those who share one need not look hashes up.

Blocks that follow each other in a prompt get numbers that do, a *run* of them at a time. A hash says all that comes
before its block, so a block is known by being the first one of a run, or by standing behind the block before it; hashes
inside of runs are not looked up.

Owns: which hash has which number, and when a number may be given again.
Refuses to know: who uses numbers, and for what.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from g2sim.actors.kv.lists import common_items

Numbers = NDArray[np.int64]
"""Numbers of blocks, positions or device blocks, in an array that can index others."""

NO_NUMBERS: Numbers = np.empty(0, np.int64)

T = TypeVar("T", bound=np.generic)

_LEAST_LIMIT = 1 << 12
_MOST_RUN = 32
"""Blocks of a run. A run is freed whole, so one block in use keeps the numbers of the others."""
_UNUSED = -1  # in place of the hash of a number that nobody uses


def lengthened(array: NDArray[T], length: int, fill: int = 0) -> NDArray[T]:
    """A longer copy of an array, with ``fill`` in its new places."""
    return np.concatenate((array, np.full(length - len(array), fill, array.dtype)))


class BlockNumbers:
    """See the module's text.

    A number is in use while it stands in an array that ``keep`` was told of and that somebody still holds, or while one
    of the users says so. All others may be given again.

    Args:
        sweep_at: numbers that are given before it is looked for the first time which of them are in use.

    Attributes:
        limit: every number is below it. It only grows, by doubling, so it is the length for arrays by number.
    """

    __slots__ = (
        "_arrays",
        "_first_of",
        "_free",
        "_given",
        "_hash_array",
        "_hashes",
        "_most_arrays",
        "_starts",
        "_sweep_at",
        "_sweep_least",
        "_users",
        "limit",
    )

    def __init__(self, sweep_at: int = 1 << 12) -> None:
        self.limit = _LEAST_LIMIT
        self._sweep_least = self._sweep_at = sweep_at
        self._hashes: list[int] = []  # by number
        self._hash_array: NDArray[np.uint64] = np.zeros(self.limit, np.uint64)  # the same, for many at a time
        self._first_of: dict[int, int] = {}  # the first hash of each run that is in use -> its number
        self._starts: list[int] = []  # the first number of each run, in order; runs that are free are among them
        self._free: dict[int, list[int]] = {}  # length -> first numbers of runs that are free
        self._given = 0
        self._arrays: list[weakref.ref[Any]] = []
        self._most_arrays = 1024
        self._users: list[Callable[[], Numbers]] = []

    def __len__(self) -> int:
        """How many hashes have a number."""
        return self._given

    def keep(self, numbers: Numbers) -> None:
        """The numbers in this array are in use for as long as it exists, or a slice of it; those below 0 are none.

        It must not be a slice itself. Others, which are not in use, may be freed now.
        """
        if len(self._arrays) >= self._most_arrays:
            self._arrays = [known for known in self._arrays if known() is not None]
            self._most_arrays = max(1024, 2 * len(self._arrays))
        self._arrays.append(weakref.ref(numbers))
        if self._given > self._sweep_at:
            self._sweep()

    def add_user(self, in_use: Callable[[], Numbers]) -> None:
        """``in_use`` is asked for numbers that are in use, from now on."""
        self._users.append(in_use)

    def numbers(self, hashes: Sequence[int], parent: int = -1) -> Numbers:
        """The numbers of hashes of consecutive blocks, in an array that is kept.

        Args:
            parent: the number of the block before the first one, -1 if it is the first one of a prompt.
        """
        parts: list[Numbers] = []
        wanted = list(hashes)
        at = 0
        while at < len(wanted):
            start = self._find(wanted[at], parent)
            if start < 0:
                new = self._before_known(wanted[at : at + _MOST_RUN])
                start, length = self._give(new), len(new)
            else:
                length = common_items(self._hashes, start, wanted, at)
            parts.append(np.arange(start, start + length))
            at += length
            parent = start + length - 1
        numbers = parts[0] if len(parts) == 1 else np.concatenate((NO_NUMBERS, *parts))
        self.keep(numbers)
        return numbers

    def hash_of(self, number: int) -> int:
        """What a number that is in use stands for."""
        return self._hashes[number]

    def hashes(self, numbers: Numbers) -> list[int]:
        """What numbers stand for, in their order."""
        found: list[int] = self._hash_array[numbers].tolist()
        return found

    def sorted_by_hash(self, numbers: Numbers) -> Numbers:
        """The same numbers, those with smaller hashes first."""
        return numbers[self._hash_array[numbers].argsort()]

    def _find(self, hash_: int, parent: int) -> int:
        following = parent + 1
        if 0 < following < len(self._hashes) and self._hashes[following] == hash_:
            return following
        return self._first_of.get(hash_, -1)

    def _before_known(self, hashes: list[int]) -> list[int]:
        """Those of hashes, the first of which is new, that come before one that has a number; others are new, too.

        If one inside of a run were among them, so would be all of that run before it, with its first one.
        """
        if self._first_of.keys().isdisjoint(hashes):
            return hashes
        known = next(idx for idx, hash_ in enumerate(hashes) if hash_ in self._first_of)
        return hashes[:known]

    def _give(self, hashes: list[int]) -> int:
        """Make a run of hashes that have no number. Returns: the first number."""
        length = len(hashes)
        free = self._free.get(length)
        if free:
            start = free.pop()
            self._hashes[start : start + length] = hashes
        else:
            start = len(self._hashes)
            self._starts.append(start)
            self._hashes += hashes
            if len(self._hashes) > self.limit:
                while len(self._hashes) > self.limit:
                    self.limit *= 2
                self._hash_array = lengthened(self._hash_array, self.limit)
        self._hash_array[start : start + length] = array("Q", hashes)
        self._first_of[hashes[0]] = start
        self._given += length
        return start

    def _sweep(self) -> None:
        """Free the runs of which no number is in use. It costs as much as giving a part of them did."""
        ends = [*self._starts[1:], len(self._hashes)]
        in_use = np.zeros(len(self._hashes), np.bool_)
        held = [known() for known in self._arrays]
        for numbers in (np.concatenate([one for one in held if one is not None]), *[ask() for ask in self._users]):
            in_use[numbers[numbers >= 0]] = True
        in_use_runs = np.logical_or.reduceat(in_use, self._starts)
        for idx in (~in_use_runs).nonzero()[0].tolist():
            start, end = self._starts[idx], ends[idx]
            first = self._hashes[start]
            if first == _UNUSED:
                continue
            del self._first_of[first]
            length = end - start
            self._hashes[start:end] = [_UNUSED] * length
            self._free.setdefault(length, []).append(start)
            self._given -= length
        self._sweep_at = max(self._sweep_least, 2 * self._given)
