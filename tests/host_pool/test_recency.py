"""The order of eviction against a list that is kept in order at every step."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from g2sim.actors.host_pool.recency import Recency

BLOCKS = st.integers(min_value=0, max_value=7)
PROMPTS = ((3, 1, 4), (3, 1, 5, 2), (6, 0), (7,), (0, 1, 2, 3, 4, 5, 6, 7))
STEPS = st.one_of(
    st.tuples(st.just("touch"), st.sampled_from(PROMPTS)),
    st.tuples(st.just("add"), st.lists(BLOCKS, unique=True, max_size=8)),
    st.tuples(st.just("add prompt"), st.sampled_from(PROMPTS)),
    st.tuples(st.just("remove"), st.lists(BLOCKS, max_size=3)),
    st.tuples(st.just("take"), st.integers(0, 3), st.frozensets(BLOCKS, max_size=5)),
    st.tuples(st.just("take all")),
    st.tuples(st.just("look")),
)


class Model:
    """Blocks, oldest first."""

    def __init__(self) -> None:
        self.order: list[int] = []

    def make_youngest(self, blocks: list[int]) -> None:
        for block in blocks:
            if block in self.order:
                self.order.remove(block)
                self.order.append(block)

    def remove(self, blocks: list[int]) -> None:
        self.order = [block for block in self.order if block not in blocks]


@settings(max_examples=300, deadline=None)
@given(steps=st.lists(STEPS, min_size=5, max_size=40), most_noted=st.sampled_from([-1000, 0, 9, 4096]))
def test_any_steps_leave_the_order_that_one_gets_step_by_step(steps: list[tuple[Any, ...]], most_noted: int) -> None:
    """Whenever the notes are sorted in: at every step, now and then, or when the oldest blocks are used up."""
    recency, model = Recency(most_noted), Model()
    for kind, *more in steps:
        if kind == "touch":
            recency.touch(more[0])
            model.make_youngest(list(reversed(more[0])))
        elif kind == "add":
            new = [block for block in more[0] if block not in model.order]
            recency.add(new)
            model.order += sorted(new)
        elif kind == "add prompt" and not set(more[0]) & set(model.order):  # the very object that is touched
            recency.add(more[0])
            model.order += sorted(more[0])
        elif kind == "remove":
            recency.remove(more[0])
            model.remove(more[0])
        elif kind == "take":
            count, spared = more
            oldest = [block for block in model.order if block not in spared][:count]
            expected = oldest if len(oldest) == count else None
            assert recency.take_oldest(count, spared) == expected
            model.remove(expected or [])
        elif kind == "take all":
            assert list(recency.take_all()) == model.order
            model.order = []
        elif kind == "look":
            assert list(recency.in_order()) == model.order
        assert len(recency) == len(model.order)
        assert {block for block in range(8) if block in recency} == set(model.order)
    assert list(recency.in_order()) == model.order


def test_a_prompt_that_is_touched_again_and_again_is_noted_once() -> None:
    """A blocked request asks at every pass: that must not grow."""
    recency = Recency()
    recency.add([1, 2, 3])
    prompt = (1, 2)
    for _ in range(1000):
        recency.touch(prompt)
    assert len(recency._notes) == 2
    assert recency.in_order() == (3, 2, 1)
    assert not recency._notes
