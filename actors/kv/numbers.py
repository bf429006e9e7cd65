"""Small numbers for block hashes, so that what is known of blocks can stand in arrays.

A number is a name within one process: it stands for one sequence hash for as long as anybody may use it, and maybe for
another one later. No result depends on which number a block has, so whoever needs one may have a numbering of its own;
those who share one need not look hashes up.

Owns: which hash has which number, and when a number may be given again.
Refuses to know: who uses numbers, and for what.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]
"""Numbers of blocks, positions or device blocks, in an array that can index others."""

NO_NUMBERS: Numbers = np.empty(0, np.int64)

_LEAST = 1 << 12


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
        "_free",
        "_hashes",
        "_most_arrays",
        "_number_of",
        "_sweep_at",
        "_sweep_least",
        "_users",
        "limit",
    )

    def __init__(self, sweep_at: int = 1 << 16) -> None:
        self.limit = _LEAST
        self._sweep_least = self._sweep_at = sweep_at
        self._number_of: dict[int, int] = {}
        self._hashes: list[int] = []  # by number; of one that is not in use, the last hash it stood for
        self._free: list[int] = []
        self._arrays: list[weakref.ref[Any]] = []
        self._most_arrays = 1024
        self._users: list[Callable[[], Numbers]] = []

    def __len__(self) -> int:
        """How many hashes have a number."""
        return len(self._number_of)

    def keep(self, numbers: Numbers) -> None:
        """The numbers in this array are in use for as long as it exists, or a slice of it; those below 0 are none.

        It must not be a slice itself. Others, which are not in use, may be freed now.
        """
        if len(self._arrays) >= self._most_arrays:
            self._arrays = [known for known in self._arrays if known() is not None]
            self._most_arrays = max(1024, 2 * len(self._arrays))
        self._arrays.append(weakref.ref(numbers))
        if len(self._number_of) > self._sweep_at:
            self._sweep()

    def add_user(self, in_use: Callable[[], Numbers]) -> None:
        """``in_use`` is asked for numbers that are in use, from now on."""
        self._users.append(in_use)

    def number(self, hash_: int) -> int:
        """The number of one hash. It has to be in an array that is kept before ``keep`` or ``numbers`` is called."""
        number = self._number_of.get(hash_)
        if number is not None:
            return number
        if self._free:
            number = self._free.pop()
            self._hashes[number] = hash_
        else:
            number = len(self._hashes)
            self._hashes.append(hash_)
            if number == self.limit:
                self.limit *= 2
        self._number_of[hash_] = number
        return number

    def numbers(self, hashes: Sequence[int]) -> Numbers:
        """The numbers of hashes, in an array that is kept."""
        known = self._number_of
        try:
            found = [known[hash_] for hash_ in hashes]
        except KeyError:
            found = [self.number(hash_) for hash_ in hashes]
        numbers = np.frombuffer(array("q", found), np.int64)
        self.keep(numbers)
        return numbers

    def hash_of(self, number: int) -> int:
        """What a number that is in use stands for."""
        return self._hashes[number]

    def hashes(self, numbers: Numbers) -> list[int]:
        """What numbers stand for, in their order."""
        return list(map(self._hashes.__getitem__, numbers.tolist()))

    def sorted_by_hash(self, numbers: Numbers) -> Numbers:
        """The same numbers, those with smaller hashes first."""
        return numbers[np.frombuffer(array("Q", self.hashes(numbers)), np.uint64).argsort()]

    def _sweep(self) -> None:
        """Free the numbers that are not in use. It costs as much as giving a part of them did."""
        given = len(self._hashes)
        in_use = np.zeros(given, np.bool_)
        arrays = [known() for known in self._arrays]
        for numbers in (*[one for one in arrays if one is not None], *[ask() for ask in self._users]):
            in_use[numbers[numbers >= 0]] = True
        in_use[self._free] = True
        unused = (~in_use).nonzero()[0].tolist()
        for number in unused:
            del self._number_of[self._hashes[number]]
        self._free += reversed(unused)
        self._sweep_at = max(self._sweep_least, 2 * len(self._number_of))
