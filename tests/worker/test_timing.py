"""Pass times: exact nanoseconds, the steps of scaling, and the polynomial model."""

from __future__ import annotations

import math
import sys
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from g2sim.actors.config import FixedTiming, PolynomialTiming, RankConfig, Timing
from g2sim.actors.worker.timing import (
    PassTimer,
    nearest_ns,
    polynomial_decode_ms,
    polynomial_prefill_ms,
    scaled_ms,
    seconds_of,
)

FINITE = st.floats(min_value=0.0, allow_nan=False, allow_infinity=False)
MILLISECONDS = st.floats(min_value=0.0, max_value=1e9)


def oracle_ns(seconds: float) -> int:
    """Round half to even on the exact value; that is what ``round`` does to a Fraction."""
    return round(Fraction(seconds) * 10**9)


def oracle_scaled(raw_ms: float, ratio: float) -> float:
    """The steps of scheduler-and-time.md section 1, one a line."""
    n = oracle_ns(raw_ms / 1000.0)
    if ratio > 0 and n > 0:
        n = oracle_ns(oracle_seconds(n) / ratio)
    ms = oracle_seconds(n) * 1000.0
    return oracle_seconds(oracle_ns(ms / 1000.0)) * 1000.0


def oracle_seconds(nanoseconds: int) -> float:
    return float(nanoseconds // 10**9) + float(nanoseconds % 10**9) / 1e9


def timer(timing: Timing, **settings: float) -> PassTimer:
    return PassTimer(RankConfig(gpu_blocks=25, block_size_tokens=4, timing=timing, **settings))


# -- nanoseconds


@pytest.mark.parametrize("seconds", [math.nan, math.inf])
def test_what_is_no_duration_is_refused(seconds: float) -> None:
    """NaN and infinity have no nearest nanosecond; they raise instead of becoming a number."""
    with pytest.raises((ValueError, OverflowError)):
        nearest_ns(seconds)


@given(seconds=FINITE)
@example(seconds=0.0)
@example(seconds=5e-324)
@example(seconds=sys.float_info.max)
@example(seconds=2.0**-10)
@example(seconds=0.5e-9)
def test_nearest_ns_is_the_exact_rounding_of_every_finite_float(seconds: float) -> None:
    """The result is round-half-even of the float's exact value times 10^9, for all finite floats >= 0."""
    assert nearest_ns(seconds) == oracle_ns(seconds)


@given(odd=st.integers(min_value=0, max_value=2**40).map(lambda k: 2 * k + 1))
def test_exact_ties_go_to_the_even_nanosecond(odd: int) -> None:
    """odd / 1024 s is odd * 976562.5 ns, which a float holds exactly: a true tie, and the even neighbour is taken."""
    got = nearest_ns(odd / 1024)
    assert got % 2 == 0
    assert abs(Fraction(got) - Fraction(odd * 1953125, 2)) == Fraction(1, 2)


def test_rounding_the_product_is_not_good_enough() -> None:
    """There are floats for which round(s * 1e9) is off by one; the exact way is not."""
    seconds = next(s for s in (k * 1e-9 + 0.5e-9 for k in range(1, 2000)) if round(s * 1e9) != oracle_ns(s))
    assert nearest_ns(seconds) == oracle_ns(seconds)


@given(nanoseconds=st.integers(min_value=0, max_value=2**70))
def test_seconds_are_whole_seconds_plus_the_rest(nanoseconds: int) -> None:
    """seconds_of adds the two parts as floats, in this order."""
    assert seconds_of(nanoseconds) == oracle_seconds(nanoseconds)


# -- scaling


@given(raw_ms=MILLISECONDS, ratio=st.just(0.0) | st.floats(min_value=1e-3, max_value=1e3))
def test_scaled_ms_follows_its_steps_to_the_last_bit(raw_ms: float, ratio: float) -> None:
    """Two roundings, the division between them, and nothing else."""
    assert scaled_ms(raw_ms, ratio) == oracle_scaled(raw_ms, ratio)


@given(raw_ms=MILLISECONDS)
def test_ratio_0_means_not_scaled(raw_ms: float) -> None:
    """A ratio of 0 gives what a ratio of 1 gives; no division by zero."""
    assert scaled_ms(raw_ms, 0.0) == scaled_ms(raw_ms, 1.0) == oracle_scaled(raw_ms, 1.0)


@pytest.mark.parametrize(
    ("raw_ms", "ratio", "expected_ms"),
    [
        (0.0, 2.0, 0.0),
        (2.0, 0.0, 2.0),
        (3.0, 2.0, 1.5),
        (4e-7, 1.0, 0.0),  # 0.4 ns
        (6e-7, 1.0, 1e-6),  # 0.6 ns
        (1.0, 3.0, 0.333333),  # 333333.33 ns
    ],
)
def test_scaled_durations_worked_by_hand(raw_ms: float, ratio: float, expected_ms: float) -> None:
    """Whole nanoseconds come out: less than half of one is 0, a third of a millisecond is 333333 ns."""
    assert scaled_ms(raw_ms, ratio) == pytest.approx(expected_ms, rel=1e-15)
    assert nearest_ns(scaled_ms(raw_ms, ratio) / 1000.0) == round(Fraction(str(expected_ms)) * 10**6)


# -- models


@pytest.mark.parametrize(
    ("requests", "prompt_tokens", "prefix_tokens", "expected_ms"),
    [
        (1, 8, 8, 0.0),  # nothing new
        (2, 9, 8, 0.0),  # 4 - 4: both means are floored
        (1, 1000, 0, 0.4209989 + 15.18344 + 16.50142),
        (1, 1000, 900, 0.004209989 + 1.518344 + 16.50142),  # x = 100
        (2, 101, 1, 0.004209989 + 1.518344 + 16.50142),  # x = 2 * (50 - 0)
        (3, 10, 2, 4.209989e-07 * 81 + 0.13665096 + 16.50142),  # x = 3 * (3 - 0) = 9, not 3 * 2
    ],
)
def test_the_prefill_polynomial(requests: int, prompt_tokens: int, prefix_tokens: int, expected_ms: float) -> None:
    """4.209989e-07 x^2 + 1.518344e-02 x + 16.50142 at x = requests times the difference of floored means."""
    assert polynomial_prefill_ms(requests, prompt_tokens, prefix_tokens) == pytest.approx(expected_ms, rel=1e-14)


@pytest.mark.parametrize(
    ("known_tokens", "expected_ms"),
    [
        (0, 5.74),
        (25, -1.60875 + 13.5025 + 5.74),  # p = 1/4
        (50, -6.435 + 27.005 + 5.74),  # p = 1/2
        (100, -25.74 + 54.01 + 5.74),  # p = 1
        (250, -25.74 + 54.01 + 5.74),  # shared blocks count more than once; p stops at 1
    ],
)
def test_the_decode_polynomial(known_tokens: int, expected_ms: float) -> None:
    """-25.74 p^2 + 54.01 p + 5.74 at p = known tokens over 100 tokens of capacity, at most 1."""
    assert polynomial_decode_ms(known_tokens, 100) == pytest.approx(expected_ms, rel=1e-14)


def test_each_half_of_a_pass_has_its_own_speed_up() -> None:
    """Prefill is divided by speedup_ratio, decode by its product with decode_speedup_ratio; product 0 is unscaled."""
    fixed = FixedTiming(prefill_ms=3.0, decode_ms=4.0)
    both = timer(fixed, speedup_ratio=2.0, decode_speedup_ratio=4.0)
    assert (both.prefill_ms(1, 8, 0), both.decode_ms(1, 8)) == (1.5, 0.5)
    none = timer(fixed, speedup_ratio=2.0, decode_speedup_ratio=0.0)
    assert (none.prefill_ms(1, 8, 0), none.decode_ms(1, 8)) == (1.5, 4.0)
    unscaled = timer(fixed, speedup_ratio=0.0, decode_speedup_ratio=4.0)
    assert (unscaled.prefill_ms(1, 8, 0), unscaled.decode_ms(1, 8)) == (3.0, 4.0)


@given(known_tokens=st.integers(min_value=0, max_value=300), ratio=st.floats(min_value=0.1, max_value=10.0))
def test_a_timer_scales_the_polynomial_and_remembers_right(known_tokens: int, ratio: float) -> None:
    """Asked twice, a timer gives the scaled polynomial both times, with capacity = blocks times block size."""
    one = timer(PolynomialTiming(), speedup_ratio=ratio)
    decode_ms = oracle_scaled(polynomial_decode_ms(known_tokens, 100), ratio)
    prefill_ms = oracle_scaled(polynomial_prefill_ms(1, known_tokens, 0), ratio)
    for _ in range(2):
        assert one.decode_ms(1, known_tokens) == decode_ms
        assert one.prefill_ms(1, known_tokens, 0) == prefill_ms
