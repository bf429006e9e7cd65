"""Rounding as the reference does it."""

from __future__ import annotations

import math


def round_half_away(value: float) -> int:
    """``value`` >= 0 rounded to the nearest integer, halves up (``round`` goes to even, ``+ 0.5`` can carry)."""
    whole = math.floor(value)
    return whole + (value - whole >= 0.5)
