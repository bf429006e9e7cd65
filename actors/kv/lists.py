"""What numberings and indexes of blocks ask of lists."""

from __future__ import annotations

_AT_ONCE = 32


def common_items(left: list[int], left_start: int, right: list[int], right_start: int) -> int:
    """How many items two lists have in common, from there on."""
    count = min(len(left) - left_start, len(right) - right_start)
    if left[left_start : left_start + count] == right[right_start : right_start + count]:
        return count
    for at in range(0, count, _AT_ONCE):
        stop = min(at + _AT_ONCE, count)
        if left[left_start + at : left_start + stop] != right[right_start + at : right_start + stop]:
            return next(idx for idx in range(at, stop) if left[left_start + idx] != right[right_start + idx])
    return count
