"""The numbering of blocks against a dict."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from g2sim.actors.kv.blocks import BlockChain
from g2sim.actors.kv.numbers import BlockNumbers, Numbers

PROMPTS = st.lists(st.integers(0, 1), max_size=90)
"""Few tokens, so that prompts share prefixes; longer than two runs."""


def hashes_of(tokens: list[int]) -> list[int]:
    """One hash a block, of all tokens up to it; among them some above 2 ** 63."""
    out, prefix = [], 1
    for token in tokens:
        prefix = (prefix * 2 + token) * 0x9E3779B97F4A7C15 % 2**64
        out.append(prefix)
    return out


@settings(max_examples=200, deadline=None)
@given(st.lists(PROMPTS, max_size=8))
def test_equal_hashes_have_equal_numbers_and_others_have_others(prompts: list[list[int]]) -> None:
    """However prompts share prefixes, and in whatever order they come."""
    numbering, known = BlockNumbers(), dict[int, int]()
    for hashes in map(hashes_of, prompts):
        numbers = numbering.numbers(hashes)
        for hash_, number in zip(hashes, numbers.tolist(), strict=True):
            assert known.setdefault(hash_, number) == number
        assert numbering.hashes(numbers) == hashes
        assert numbering.hashes(numbering.sorted_by_hash(numbers)) == sorted(hashes)
    assert len(set(known.values())) == len(known) == len(numbering)
    assert all(number < numbering.limit for number in known.values())


def test_a_chain_has_numbers_of_each_numbering_that_asks() -> None:
    """Two numberings may differ; the chain answers each of them rightly, in turns."""
    one, other = BlockNumbers(), BlockNumbers()
    other.numbers([7, 8, 9])
    chain = BlockChain((5, 6), (5, 6))
    for numbering in (one, other, one):
        assert numbering.hashes(chain.numbers(numbering)) == [5, 6]
    assert chain.numbers(one) is chain.numbers(one)


class NumberingMachine(RuleBasedStateMachine):
    """Prompts that go on block by block, are dropped and come again, while unused numbers are given again at once."""

    def __init__(self) -> None:
        super().__init__()
        self.numbering = BlockNumbers(sweep_at=0)
        self.prompts: list[tuple[list[int], Numbers]] = []
        self.cached: Numbers = np.full(5, -1, np.int64)
        self.cached_hashes: dict[int, int] = {}  # place -> hash
        self.numbering.keep(self.cached)
        self.loose: dict[int, int] = {}  # number -> hash, what a user says
        self.numbering.add_user(lambda: np.array(list(self.loose), np.int64))

    @rule(tokens=PROMPTS)
    def begin(self, tokens: list[int]) -> None:
        hashes = hashes_of(tokens)
        numbers = np.full(len(hashes) + 3, -1, np.int64)
        numbers[: len(hashes)] = self.numbering.numbers(hashes)
        self.numbering.keep(numbers)
        self.prompts.append((tokens, numbers))

    @precondition(lambda self: self.prompts)
    @rule(data=st.data(), token=st.integers(0, 1))
    def go_on(self, data: st.DataObject, token: int) -> None:
        tokens, numbers = data.draw(st.sampled_from(self.prompts))
        if len(tokens) == len(numbers):
            return
        tokens.append(token)
        at = len(tokens) - 1
        numbers[at] = self.numbering.numbers(hashes_of(tokens)[-1:], int(numbers[at - 1]) if at else -1)[0]

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.prompts.pop(data.draw(st.integers(0, len(self.prompts) - 1)))

    @precondition(lambda self: any(tokens for tokens, _ in self.prompts))
    @rule(data=st.data(), place=st.integers(0, 4), is_loose=st.booleans())
    def cache(self, data: st.DataObject, place: int, is_loose: bool) -> None:
        tokens, numbers = data.draw(st.sampled_from([prompt for prompt in self.prompts if prompt[0]]))
        at = data.draw(st.integers(0, len(tokens) - 1))
        hash_ = hashes_of(tokens)[at]
        if is_loose:
            self.loose = {int(numbers[at]): hash_}
        else:
            self.cached[place] = numbers[at]
            self.cached_hashes[place] = hash_

    @invariant()
    def every_number_in_use_stands_for_its_hash(self) -> None:
        known: dict[int, int] = {}
        held = [(hashes_of(tokens), numbers[: len(tokens)].tolist()) for tokens, numbers in self.prompts]
        held.append((list(self.cached_hashes.values()), [int(self.cached[place]) for place in self.cached_hashes]))
        held.append((list(self.loose.values()), list(self.loose)))
        for hashes, numbers in held:
            for hash_, number in zip(hashes, numbers, strict=True):
                assert known.setdefault(hash_, number) == number
                assert self.numbering.hash_of(number) == hash_
        assert len(set(known.values())) == len(known) <= len(self.numbering)


NumberingMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


class TestNumberingAgainstADict(NumberingMachine.TestCase):  # type: ignore[name-defined,misc]
    pass


def test_numbers_of_nobody_are_given_again() -> None:
    """A long run of short prompts needs no more numbers than a few of them, and what is in use is kept."""
    numbering = BlockNumbers(sweep_at=1000)
    kept = numbering.numbers(hashes_of([0] * 40))
    for prompt in range(2000):
        numbering.numbers(hashes_of([1, *map(int, format(prompt, "011b")), *([0] * 30)]))
    assert numbering.hashes(kept) == hashes_of([0] * 40)
    assert numbering.limit == 4096
    assert len(numbering) < 3000
