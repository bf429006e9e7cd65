"""Rounding and sums as the reference does them, to the last bit the same on every Python."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from functools import reduce


def add_up(values: Iterable[float]) -> float:
    """Sum from left to right in float64; of integers, an integer.

    Not ``sum``: from Python 3.12 on it compensates, which changes last bits.
    """
    return reduce(operator.add, values, 0)


def round_half_away(value: float) -> int:
    """``value`` >= 0 rounded to the nearest integer, halves up (``round`` goes to even, ``+ 0.5`` can carry)."""
    whole = math.floor(value)
    return whole + (value - whole >= 0.5)
