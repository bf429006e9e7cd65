"""The order of eviction against a list that is kept in order at every step."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from g2sim.actors.host_pool import recency
from g2sim.actors.host_pool.recency import Recency
from g2sim.actors.kv.numbers import Numbers
from g2sim.bus.errors import InvariantViolation

LIMIT = 8
BLOCKS = st.integers(min_value=0, max_value=LIMIT - 1)


def numbers(blocks: Collection[int]) -> Numbers:
    return np.array(list(blocks), np.int64)


PROMPTS = tuple(map(numbers, ((3, 1, 4), (3, 1, 5, 2), (6, 0), (7,), (), (0, 1, 2, 3, 4, 5, 6, 7))))
STEPS = st.one_of(
    st.tuples(st.just("touch"), st.sampled_from(PROMPTS)),
    st.tuples(st.just("add"), st.lists(BLOCKS, unique=True, max_size=8)),
    st.tuples(st.just("add prompt"), st.sampled_from(PROMPTS)),
    st.tuples(st.just("remove"), st.lists(BLOCKS, unique=True, max_size=3)),
    st.tuples(st.just("take"), st.integers(0, 3), st.frozensets(BLOCKS, max_size=5)),
    st.tuples(st.just("take all")),
    st.tuples(st.just("look")),
    st.tuples(st.just("grow")),
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
@given(steps=st.lists(STEPS, min_size=5, max_size=40), at_once=st.sampled_from([0, 1, 64]))
def test_any_steps_leave_the_order_that_one_gets_step_by_step(steps: list[tuple[Any, ...]], at_once: int) -> None:
    """Whenever the order is found anew, and however many blocks of it are looked at together."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recency, "_AT_ONCE", at_once)
        take_steps(steps)


def take_steps(steps: list[tuple[Any, ...]]) -> None:
    limit = LIMIT
    blocks, model = Recency(limit), Model()
    for kind, *more in steps:
        if kind == "touch":
            blocks.touch(more[0])
            model.make_youngest(more[0][::-1].tolist())
        elif kind == "add":
            new = [block for block in more[0] if block not in model.order]
            blocks.add(numbers(new))
            model.order += new
        elif kind == "add prompt" and not set(more[0].tolist()) & set(model.order):  # the very array that is touched
            blocks.add(more[0])
            model.order += more[0].tolist()
        elif kind == "remove":
            blocks.remove(numbers(more[0]))
            model.remove(more[0])
        elif kind == "take":
            count, spared = more
            oldest = [block for block in model.order if block not in spared][:count]
            taken = blocks.take_oldest(count, numbers(spared))
            if len(oldest) == count:
                assert taken is not None
                assert taken.tolist() == oldest
                model.remove(oldest)
            else:
                assert taken is None
        elif kind == "take all":
            assert blocks.take_all().tolist() == model.order
            model.order = []
        elif kind == "look":
            assert blocks.in_order().tolist() == model.order
        elif kind == "grow":
            limit *= 2
            blocks.grow(limit)
        assert len(blocks) == len(model.order)
        assert {block for block in range(LIMIT) if block in blocks} == set(model.order)
        assert set(blocks.are_here().nonzero()[0].tolist()) == set(model.order)
        assert len(blocks.are_here()) == limit
    assert blocks.in_order().tolist() == model.order


def test_what_is_spared_keeps_its_place_where_the_order_is_used_up() -> None:
    """Of 0 .. 5, found as an order when 0 goes, 1 and 3 are spared, and 6 and 7 are new: 2, 4, 5 and 6 go."""
    blocks = Recency(LIMIT)
    blocks.add(numbers(range(6)))
    taken = blocks.take_oldest(1, numbers(()))
    assert taken is not None
    assert taken.tolist() == [0]
    blocks.add(numbers((6, 7)))
    taken = blocks.take_oldest(4, numbers((1, 3)))
    assert taken is not None
    assert taken.tolist() == [2, 4, 5, 6]
    assert blocks.in_order().tolist() == [1, 3, 7]
    taken = blocks.take_oldest(2, numbers(()))
    assert taken is not None
    assert taken.tolist() == [1, 3]


def test_asking_again_and_again_for_one_prompt_is_one_touch() -> None:
    """A blocked request asks at every pass."""
    blocks = Recency(LIMIT)
    blocks.add(numbers((1, 2, 3)))
    prompt = numbers((1, 2))
    for _ in range(1000):
        blocks.touch(prompt)
    assert blocks._clock == 5
    assert blocks.in_order().tolist() == [3, 2, 1]


def test_blocks_that_are_lost_stop_the_run() -> None:
    """A count that is wrong is an error, not a search without end."""
    blocks = Recency(LIMIT)
    blocks.add(numbers((1, 2, 3)))
    blocks._here[2] = False
    with pytest.raises(InvariantViolation, match="has lost blocks"):
        blocks.take_oldest(3, numbers(()))
