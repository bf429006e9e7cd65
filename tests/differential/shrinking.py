"""Making a failing case smaller, for the differential test and the swarm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

_Case = TypeVar("_Case")
_Row = TypeVar("_Row")


def shrink(case: _Case, smaller: Callable[[_Case], Iterable[_Case]], fails: Callable[[_Case], bool]) -> _Case:
    """The case after taking the first of its ``smaller`` ones that still fails, for as long as there is one."""
    improved = True
    while improved:
        improved = False
        for candidate in smaller(case):
            if fails(candidate):
                case, improved = candidate, True
                break
    return case


def fewer_rows(rows: list[_Row]) -> Iterator[list[_Row]]:
    """The rows without a stretch of them, long stretches first; never none."""
    step = len(rows) // 2
    while step >= 1:
        for start in range(0, len(rows), step):
            rest = rows[:start] + rows[start + step :]
            if rest:
                yield rest
        step //= 2
