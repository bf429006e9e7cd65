"""The generator against the reference's recorded words, keys and draws."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from g2sim.actors.traffic.chacha import ChaCha12
from g2sim.actors.traffic.synthetic import constant_arrivals_ms, poisson_arrivals_ms, shared_blocks

VECTORS = {
    0: ("cd2c6f7f bb2a3fb2 8e27697b c6017c94", [0.7311134158637046, 0.7734601843532382, 0.025844634233355035]),
    42: ("222724a2 86cc7763 3fad517d 8af00a13", [0.5265574090027738, 0.5427252099031439, 0.6364650991438949]),
    2**63 + 5: ("50c21f21 0be39538 28bbd3d7 89ae26bc", [0.046441389321224213, 0.5378135880825845, 0.28165397714297846]),
}


@pytest.mark.parametrize("seed", VECTORS)
def test_words_and_unit_floats(seed: int) -> None:
    words, floats = VECTORS[seed]
    stream = ChaCha12(seed)
    assert [f"{word:08x}" for word in stream.words(0, 4)] == words.split()
    assert [stream.unit() for _ in floats] == floats


def test_integers_below() -> None:
    draws, few = ChaCha12(42), ChaCha12(0)
    assert [draws.below(5) for _ in range(20)] == [0, 2, 1, 2, 4, 3, 4, 2, 4, 0, 3, 2, 1, 3, 0, 4, 3, 0, 2, 0]
    assert [few.below(2) for _ in range(10)] == [1, 1, 1, 1, 1, 0, 1, 1, 1, 0]


@pytest.mark.parametrize(
    ("seed", "arrivals_ms"),
    [
        (42, [0.0, 74.77246176406965, 153.01953951913882, 254.207536844964]),
        (0, [0.0, 131.34656085983016, 279.830017158607, 282.44846465390964]),
        (2**63 + 5, [0.0, 4.755438684414878, 81.93413671256084, 115.0145267163843]),
    ],
)
def test_poisson_arrivals(seed: int, arrivals_ms: list[float]) -> None:
    assert poisson_arrivals_ms(4, 10.0, seed).tolist() == arrivals_ms


def test_constant_arrivals_and_bursts() -> None:
    assert constant_arrivals_ms(3, 7.5).tolist() == [0.0, 7.499999999999999, 14.999999999999998]
    assert constant_arrivals_ms(3, 0.0).tolist() == [0.0, 0.0, 0.0]
    assert constant_arrivals_ms(1, 7.5).tolist() == poisson_arrivals_ms(1, 10.0, 42).tolist() == [0.0]


@given(seed=st.integers(0, 2**64 - 1), start=st.integers(0, 5000), count=st.integers(0, 60))
def test_any_part_of_a_stream_can_be_had_alone(seed: int, start: int, count: int) -> None:
    stream = ChaCha12(seed)
    assert np.array_equal(stream.words(start, count), stream.words(0, start + count)[start:])


def test_draws_go_on_beyond_what_is_read_ahead() -> None:
    stream, limit = ChaCha12(7), 2**32
    assert [stream.below(limit) for _ in range(3000)] == stream.words(0, 3000).tolist()


def test_blocks_beyond_the_low_word_of_the_counter_differ() -> None:
    stream = ChaCha12(0)
    assert not np.array_equal(stream.words(0, 16), stream.words(16 * 2**32, 16))


@given(blocks=st.integers(0, 10**6), ratio=st.floats(0, 1))
def test_shared_blocks_are_some_of_the_blocks(blocks: int, ratio: float) -> None:
    assert 0 <= shared_blocks(blocks, ratio) <= blocks
    assert abs(shared_blocks(blocks, ratio) - blocks * ratio) <= 0.5


def test_halves_of_shared_blocks_round_up() -> None:
    assert [shared_blocks(blocks, 0.5) for blocks in (1, 2, 3, 4, 5)] == [1, 1, 2, 2, 3]
