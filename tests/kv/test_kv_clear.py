"""What is announced of a clear."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from g2sim.actors.kv.events import removed_by_clear

BLOCKS = st.lists(st.integers(0, 5), unique=True, max_size=4)


@given(told=st.sets(st.integers(0, 5)), changes=st.lists(st.tuples(st.booleans(), BLOCKS), max_size=6))
def test_subscribers_are_told_of_what_they_know_and_of_nothing_else(
    told: set[int], changes: list[tuple[bool, list[int]]]
) -> None:
    """However much of a tier's history is untold at a clear, the removal is of what was announced, each block once."""
    resident = set(told)
    untold = []
    for stored, blocks in changes:
        possible = [block for block in blocks if (block in resident) is not stored]
        resident = resident | set(possible) if stored else resident - set(possible)
        untold.append((stored, possible))
    removed = removed_by_clear(untold, sorted(resident))
    assert sorted(removed) == sorted(told)
