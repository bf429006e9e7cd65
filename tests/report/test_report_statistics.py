"""Distributions against numbers worked by hand and against slow, obvious models; the goodput rule as a table."""

from __future__ import annotations

import math
from decimal import ROUND_HALF_UP, Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from g2sim.actors.config import SlaConfig
from g2sim.actors.rounding import add_up, round_half_away
from g2sim.bus.errors import InvariantViolation
from g2sim.scenarios.statistics import (
    Distribution,
    StreamedDistribution,
    exact_distribution,
    meets_sla,
)

QUANTILES = {"median": 50, "p75": 75, "p90": 90, "p95": 95, "p99": 99}
SAMPLES = st.lists(st.floats(0.0, 1e9), max_size=60)
POSITIVE = st.lists(st.floats(1e-6, 1e9), min_size=1, max_size=60)


def streamed(samples: list[float], cuts: int = 1) -> Distribution:
    """The streamed distribution of samples given in ``cuts`` calls."""
    stream = StreamedDistribution()
    for cut in range(cuts):
        stream.extend(samples[len(samples) * cut // cuts : len(samples) * (cut + 1) // cuts])
    assert stream.count == len(samples)
    return stream.result()


def half_up(value: Fraction) -> int:
    return int((Decimal(value.numerator) / Decimal(value.denominator)).quantize(Decimal(1), ROUND_HALF_UP))


def test_no_samples_give_zeros_in_every_field() -> None:
    assert exact_distribution([]) == Distribution() == streamed([])
    assert set(Distribution().named("x").values()) == {0.0}


@pytest.mark.parametrize("make", [exact_distribution, streamed])
def test_one_sample_is_every_figure_of_its_distribution(make: object) -> None:
    assert callable(make)
    figures = make([7.25]).named("x")
    assert figures.pop("std_x") == 0.0
    assert set(figures.values()) == {7.25}


def test_exact_figures_of_eight_samples_worked_by_hand() -> None:
    """Mean 40/8; deviations 9 1 1 1 0 0 4 16 = 32/8. Ranks: 3.5 -> 4, 5.25 -> 5, 6.3 -> 6, 6.65 -> 7, 6.93 -> 7."""
    assert exact_distribution([9.0, 4.0, 5.0, 2.0, 4.0, 7.0, 5.0, 4.0]) == Distribution(
        mean=5.0, min=2.0, max=9.0, median=5.0, p75=5.0, p90=7.0, p95=9.0, p99=9.0, std=2.0
    )


def test_the_exact_median_of_an_even_number_is_the_upper_one_without_interpolation() -> None:
    assert exact_distribution([1.0, 2.0]).median == 2.0
    assert exact_distribution([1.0, 2.0, 3.0, 4.0]).median == 3.0


def test_sums_run_from_left_to_right_without_compensation() -> None:
    """1e16 swallows a following 1; Python's own ``sum`` keeps both from 3.12 on."""
    assert add_up([1e16, 1.0, 1.0]) == 1e16
    assert add_up([1.0, 1.0, 1e16]) == 1e16 + 2
    assert exact_distribution([1e16, 1.0, 1.0]).mean == 1e16 / 3


@pytest.mark.parametrize(
    ("value", "whole"),
    [(0.0, 0), (0.49999999999999994, 0), (0.5, 1), (1.5, 2), (2.5, 3), (4503599627370497.0, 2**52 + 1)],
)
def test_halves_round_away_from_zero_and_nothing_else_does(value: float, whole: int) -> None:
    assert round_half_away(value) == whole


@given(SAMPLES.filter(bool))
def test_exact_percentiles_are_samples_at_the_nearest_rank(samples: list[float]) -> None:
    figures = exact_distribution(samples)
    for name, q in QUANTILES.items():
        assert getattr(figures, name) == sorted(samples)[half_up(Fraction((len(samples) - 1) * q, 100))]
    assert (figures.min, figures.max) == (min(samples), max(samples))
    mean = sum(map(Fraction, samples)) / len(samples)
    assert figures.mean == pytest.approx(float(mean), rel=1e-12)
    variance = sum((Fraction(sample) - mean) ** 2 for sample in samples) / len(samples)
    assert figures.std == pytest.approx(math.sqrt(variance), rel=1e-9, abs=1e-6 * figures.max)


def test_equal_gaps_of_one_have_a_streamed_median_just_below_one() -> None:
    """The bin of 1 has number 0 and middle 2/(1 + gamma) = 1 - 0.001: below the minimum, as in the recordings."""
    figures = streamed([1.0, 1.0])
    assert (figures.mean, figures.min, figures.max, figures.std) == (1.0, 1.0, 1.0, 0.0)
    assert {figures.median, figures.p75, figures.p99} == {0.9989999999999999}


def test_streamed_percentiles_of_six_samples_worked_by_hand() -> None:
    """Span 5: ranks 2.5 -> 3, 3.75 -> 4, 4.5 -> 5, 5, 5. Fractions 3.5/5, 4.5/5, 1: samples 3, 4 and 5 from 0."""
    figures = streamed([50.0, 10.0, 0.0, 40.0, 30.0, 20.0])
    assert figures.median == pytest.approx(30.0, rel=1e-3)
    assert figures.p75 == pytest.approx(40.0, rel=1e-3)
    assert figures.p90 == pytest.approx(50.0, rel=1e-3)
    assert figures.min == 0.0


def test_many_values_answer_alike_however_they_are_grouped() -> None:
    """25,000 values and as many zeros, at once and by 500: they go to their bins at different times."""
    values = [float(number) if number % 2 else 0.0 for number in range(50_000)]
    at_once, grouped = StreamedDistribution(), StreamedDistribution()
    at_once.extend(values)
    for start in range(0, len(values), 500):
        grouped.extend(values[start : start + 500])
    result = at_once.result()
    assert result == grouped.result() == at_once.result()
    assert (result.min, result.p75) == (0.0, pytest.approx(25_000, rel=1e-3))


def test_zeros_are_counted_apart_and_answer_with_zero() -> None:
    figures = streamed([0.0] * 9 + [8.0])
    assert (figures.median, figures.p75, figures.min, figures.mean) == (0.0, 0.0, 0.0, 0.8)
    assert figures.p99 == pytest.approx(8.0, rel=1e-3)
    assert streamed([0.0, 0.0]) == Distribution()


def test_figures_span_eight_decades_without_losing_small_samples() -> None:
    """The reference keeps 9,000 bins apart (tried on it: passes of 1 us interrupted by one of 100 s)."""
    figures = streamed([0.001] * 36 + [100000.001] * 3)
    assert figures.median == pytest.approx(0.0010007527598287491, rel=1e-15)
    assert figures.p99 == pytest.approx(100007.78757306481, rel=1e-15)


@given(POSITIVE.filter(lambda samples: len(samples) > 1))
def test_streamed_percentiles_are_within_a_thousandth_of_the_exact_ones(samples: list[float]) -> None:
    """The sketch's guarantee, 0.1 % of the sample at the rank, whatever the samples."""
    exact, figures = exact_distribution(samples), streamed(samples)
    for name in QUANTILES:
        assert getattr(figures, name) == pytest.approx(getattr(exact, name), rel=1.0000001e-3)
    assert (figures.min, figures.max) == (exact.min, exact.max)


@given(SAMPLES)
def test_streamed_moments_follow_the_recurrence_one_sample_at_a_time(samples: list[float]) -> None:
    """Bit for bit Welford's recurrence, and close to the exact moments."""
    mean = squares = 0.0
    for count, sample in enumerate(samples, 1):
        before = sample - mean
        mean = mean + before / count
        squares = squares + before * (sample - mean)
    figures, exact = streamed(samples), exact_distribution(samples)
    assert figures.mean == mean
    assert figures.std == (math.sqrt(squares / len(samples)) if samples else 0.0)
    assert figures.mean == pytest.approx(exact.mean, rel=1e-9)
    assert figures.std == pytest.approx(exact.std, rel=1e-6, abs=1e-6 * (exact.max + 1))


@given(SAMPLES, st.integers(1, 7))
def test_how_samples_are_grouped_into_calls_makes_no_difference(samples: list[float], cuts: int) -> None:
    assert streamed(samples, cuts) == streamed(samples)


@pytest.mark.parametrize("wrong", [-1e-9, math.inf, math.nan])
def test_a_sample_out_of_range_is_refused_and_nothing_of_its_batch_is_taken(wrong: float) -> None:
    stream = StreamedDistribution()
    stream.extend([2.0])
    with pytest.raises(InvariantViolation, match="must be >= 0 and finite"):
        stream.extend([wrong, 3.0])
    assert stream.result() == streamed([2.0])


@given(st.floats(0.0, 1e9), st.integers(1, 40), SAMPLES)
def test_samples_equal_to_the_mean_count_and_move_nothing(same: float, times: int, others: list[float]) -> None:
    """The recurrence, where a call brings nothing but the mean so far."""
    stream = StreamedDistribution()
    for batch in ([same], [same] * times, others):
        stream.extend(batch)
    mean = squares = 0.0
    for count, sample in enumerate([same] * (times + 1) + others, 1):
        before = sample - mean
        mean = mean + before / count
        squares = squares + before * (sample - mean)
    figures = stream.result()
    assert stream.count == 1 + times + len(others)
    assert (figures.mean, figures.std) == (mean, math.sqrt(squares / stream.count))


FIRST_10_LAST_30 = {"tokens": 11, "ttft_ms": 10.0, "e2e_ms": 30.0, "lifetime_ms": 30.0}
ONE_TOKEN = {"tokens": 1, "ttft_ms": 10.0, "e2e_ms": 10.0, "lifetime_ms": 10.0}
NO_TOKEN = {"tokens": 0, "ttft_ms": None, "e2e_ms": None, "lifetime_ms": 10.0}


@pytest.mark.parametrize(
    ("request_", "limits", "good"),
    [
        (FIRST_10_LAST_30, {"ttft_ms": 10.0, "itl_ms": 2.0}, True),
        (FIRST_10_LAST_30, {"ttft_ms": 9.999}, False),
        (FIRST_10_LAST_30, {"itl_ms": 1.999}, False),
        (FIRST_10_LAST_30, {"e2e_ms": 30.0}, True),
        (FIRST_10_LAST_30, {"e2e_ms": 29.999}, False),
        (ONE_TOKEN, {"ttft_ms": 10.0, "itl_ms": 0.001}, True),
        (NO_TOKEN, {"e2e_ms": 10.0}, True),
        (NO_TOKEN, {"e2e_ms": 9.999}, False),
        (NO_TOKEN, {"ttft_ms": 100.0, "e2e_ms": 100.0}, False),
        (NO_TOKEN, {"itl_ms": 100.0}, False),
        (NO_TOKEN, {}, False),
    ],
)
def test_a_request_is_good_when_it_keeps_every_limit(request_: dict, limits: dict, good: bool) -> None:
    """A single token has no gap to judge; without tokens only a pure e2e limit can be kept, by the request's end."""
    assert meets_sla(SlaConfig(**limits), **request_) is good
