"""The load tracker: misuse, and an obvious model."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from g2sim.actors.router.loads import LoadTracker
from g2sim.bus.errors import InvariantViolation, ProtocolError

PLACES = 2


def test_a_request_is_booked_once() -> None:
    loads = LoadTracker(1)
    loads.book(1, 0, 8, (1, 2))
    with pytest.raises(ProtocolError, match="request 1 is booked twice"):
        loads.book(1, 0, 8, (1, 2))


def test_signals_of_unknown_requests_change_nothing() -> None:
    loads = LoadTracker(1)
    assert not loads.first_token(7)
    assert not loads.end(7)
    loads.check()


def test_check_finds_a_wrong_sum() -> None:
    loads = LoadTracker(1)
    loads.book(1, 0, 8, (1, 2))
    loads.prefill_tokens[0] = 7
    with pytest.raises(InvariantViolation, match="place 0"):
        loads.check()


def test_prompt_tokens_stay_until_the_first_token_and_the_rest_until_the_end() -> None:
    loads = LoadTracker(1)
    loads.book(1, 0, 8, (1, 2))
    loads.book(2, 0, 4, (1, 3))
    assert (loads.prefill_tokens, loads.blocks(0), loads.requests) == ([12], 3, [2])
    assert loads.first_token(1)
    assert not loads.first_token(1), "only the first one counts"
    assert (loads.prefill_tokens, loads.blocks(0), loads.requests) == ([4], 3, [2])
    assert loads.end(1)
    assert (loads.prefill_tokens, loads.blocks(0), loads.requests) == ([4], 2, [1])
    assert loads.end(2), "an end without a token takes the prompt tokens along"
    assert (loads.prefill_tokens, loads.blocks(0), loads.requests) == ([0], 0, [0])


def test_a_place_that_is_gone_takes_its_requests_along() -> None:
    loads = LoadTracker(2)
    loads.book(1, 0, 8, (1, 2))
    loads.book(2, 1, 8, (1, 2))
    loads.forget(0)
    assert (loads.requests, 1 in loads, 2 in loads) == ([0, 1], False, True)
    assert not loads.end(1)
    loads.check()


class LoadsAgainstModel(RuleBasedStateMachine):
    """Prompts are paths in a binary tree, so that they share prefixes as prompts do."""

    @initialize(shares=st.booleans())
    def start(self, shares: bool) -> None:
        self.shares = shares
        self.loads = LoadTracker(PLACES, shares_blocks=shares)
        self.flying: dict[int, tuple[int, int, tuple[int, ...], bool]] = {}
        self.next = 0

    @rule(place=st.integers(0, PLACES - 1), tokens=st.integers(0, 50), path=st.lists(st.integers(0, 1), max_size=6))
    def book(self, place: int, tokens: int, path: list[int]) -> None:
        hashes = hashes_of(path)
        self.loads.book(self.next, place, tokens, hashes)
        self.flying[self.next] = (place, tokens, hashes, True)
        self.next += 1

    @rule(number=st.integers(0, 30))
    def first_token(self, number: int) -> None:
        known = self.flying.get(number)
        assert self.loads.first_token(number) is (known is not None and known[3])
        if known is not None:
            self.flying[number] = (*known[:3], False)

    @rule(number=st.integers(0, 30))
    def end(self, number: int) -> None:
        assert self.loads.end(number) is (self.flying.pop(number, None) is not None)

    @invariant()
    def sums_are_those_of_the_model(self) -> None:
        if not hasattr(self, "loads"):
            return
        self.loads.check()
        assert set(self.loads.awaiting) == {number for number, one in self.flying.items() if one[3]}
        for place in range(PLACES):
            mine = [one for one in self.flying.values() if one[0] == place]
            assert self.loads.requests[place] == len(mine)
            assert self.loads.prefill_tokens[place] == sum(one[1] for one in mine if one[3])
            for number in range(16):
                own = hashes_of([number >> bit & 1 for bit in range(4)])
                blocks = [block for one in mine for block in one[2]] + list(own)
                assert self.loads.blocks_with(place, own) == len(set(blocks) if self.shares else blocks)


def hashes_of(path: list[int]) -> tuple[int, ...]:
    """A name for each prefix of a path."""
    return tuple(int("1" + "".join(map(str, path[: stop + 1])), 2) for stop in range(len(path)))


TestLoadsAgainstModel = LoadsAgainstModel.TestCase
TestLoadsAgainstModel.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
