"""Distributions and the goodput rule of the report, as plain arithmetic.

Owns: the two kinds of distribution the reference implementation reports, in its order of floating-point operations
(results are compared with its recordings bit for bit), and what makes a request count as good.
Refuses to know: events, requests, and which metric uses which kind.

Sources: g2sim's description of the reference replay (``ai-dynamo-runtime`` 1.6.1), checked against its recordings;
Welford 1962 for the running moments; Masson, Rim, Lee 2019 ("DDSketch") for the sketch.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt

from g2sim.actors.config import SlaConfig
from g2sim.actors.rounding import add_up, round_half_away
from g2sim.bus.errors import InvariantViolation

_PERCENTILES = {"median": 50, "p75": 75, "p90": 90, "p95": 95, "p99": 99}

_ACCURACY = 0.001  # the sketch's relative accuracy, "alpha" in the paper
_GAMMA = (1 + _ACCURACY) / (1 - _ACCURACY)
_LOG_GAMMA = math.log1p(2 * _ACCURACY / (1 - _ACCURACY))
_BIN_MIDDLE = 2.0 / (1.0 + _GAMMA)


@attrs.frozen(slots=True)
class Distribution:
    """What a report says of a set of samples, in their unit; all zeros for none."""

    mean: float = 0.0
    min: float = 0.0
    max: float = 0.0
    median: float = 0.0
    p75: float = 0.0
    p90: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    std: float = 0.0

    def named(self, metric: str) -> dict[str, float]:
        """The fields under the report's keys, ``mean_<metric>`` and so on."""
        return {f"{name}_{metric}": value for name, value in attrs.asdict(self).items()}


def exact_distribution(samples: Sequence[float]) -> Distribution:
    """Distribution of samples that are all kept: nearest rank, population std.

    The mean adds from left to right. Percentile q is ``sorted[round(float(n - 1) * q / 100)]``, halves away from zero,
    without interpolation. The reference adds the squares of std in an order of its own, so std agrees to 1e-12 only.
    """
    count = len(samples)
    if count == 0:
        return Distribution()
    mean = add_up(samples) / count
    ordered = sorted(samples)
    return Distribution(
        mean=mean,
        min=ordered[0],
        max=ordered[-1],
        std=math.sqrt(add_up((sample - mean) * (sample - mean) for sample in samples) / count),
        **{name: ordered[round_half_away(float(count - 1) * q / 100)] for name, q in _PERCENTILES.items()},
    )


class StreamedDistribution:
    """Distribution of samples that are not kept: exact min and max, Welford's moments, percentiles from a sketch.

    Bin k of the sketch holds the values in (gamma**(k-1), gamma**k] and answers with a value that is within 0.1 % of
    each of them, so a percentile can lie outside [min, max]. Zeros are counted apart.
    """

    __slots__ = ("_bins", "_count", "_max", "_mean", "_min", "_squares", "_zeros")

    def __init__(self) -> None:
        self._count = 0
        self._mean = 0.0
        self._squares = 0.0  # Welford's M2: sum of squared deviations
        self._min = math.inf
        self._max = -math.inf
        self._zeros = 0
        self._bins: dict[int, int] = {}

    @property
    def count(self) -> int:
        return self._count

    def extend(self, samples: Sequence[float] | npt.NDArray[np.float64]) -> None:
        """Take samples, each >= 0 and finite, in this order. Grouping into calls makes no difference but to the cost.

        A call costs what some hundred samples do. Samples are mostly equal to others, and the bins see each value of a
        call once.

        Raises: InvariantViolation for a sample out of range; nothing is taken then.
        """
        array = np.asarray(samples, dtype=np.float64)
        if not array.size:
            return
        found, found_times = np.unique(array, return_counts=True)
        values: list[float] = found.tolist()
        smallest, largest = values[0], values[-1]  # NaN is sorted to the end
        if not 0.0 <= smallest <= largest < math.inf:
            raise InvariantViolation(f"samples from {smallest!r} to {largest!r}, each must be >= 0 and finite")
        if not smallest == largest == self._mean:  # such samples would leave the moments as they are
            self._add_moments(array.tolist())
        self._count += len(array)
        self._min = min(self._min, smallest)
        self._max = max(self._max, largest)
        times: list[int] = found_times.tolist()
        if smallest == 0.0:
            self._zeros += times[0]
            del values[0], times[0]
        bins = self._bins
        for value, count in zip(values, times, strict=True):
            key = math.ceil(math.log(value) / _LOG_GAMMA)
            bins[key] = bins.get(key, 0) + count

    def _add_moments(self, samples: list[float]) -> None:
        # This loop is the cost of a report: one pass per token gap, local names only. Floats divide by floats sooner.
        mean, squares, number = self._mean, self._squares, float(self._count)
        for sample in samples:
            number += 1.0
            deviation = sample - mean
            mean += deviation / number
            squares += deviation * (sample - mean)
        self._mean, self._squares = mean, squares

    def result(self) -> Distribution:
        """The distribution of what was taken so far."""
        if self._count == 0:
            return Distribution()
        keys = sorted(self._bins)
        totals = list(itertools.accumulate((self._bins[key] for key in keys), initial=self._zeros))[1:]

        def percentile(q: int) -> float:
            if self._count == 1:
                return self._min
            rank = self._rank(q)
            if rank < self._zeros:
                return 0.0
            key = keys[bisect.bisect_right(totals, rank)]  # the first whose running total exceeds the rank
            return math.exp(key * _LOG_GAMMA) * _BIN_MIDDLE

        return Distribution(
            mean=self._mean,
            min=self._min,
            max=self._max,
            std=math.sqrt(self._squares / self._count),
            **{name: percentile(q) for name, q in _PERCENTILES.items()},
        )

    def _rank(self, q: int) -> int:
        """Rank of the sample that answers percentile q, from 0; at least two samples.

        The reference picks the nearest rank first, asks its sketch for the fraction in the middle of that rank's
        step, and the sketch turns the fraction into a rank again.
        """
        span = self._count - 1
        nearest = round_half_away(span * q / 100)
        fraction = 1.0 if nearest >= span else (nearest + 0.5) / span
        return math.floor(fraction * span)


def meets_sla(sla: SlaConfig, *, tokens: int, ttft_ms: float | None, e2e_ms: float | None, lifetime_ms: float) -> bool:
    """Whether a completed request keeps every limit that is set.

    Args:
        sla: the limits.
        tokens: tokens it produced.
        ttft_ms, e2e_ms: first and last token since arrival, None without tokens.
        lifetime_ms: end since arrival; judges a request without tokens, and only under a pure e2e limit.
    """
    if ttft_ms is None or e2e_ms is None:
        return sla.ttft_ms is None and sla.itl_ms is None and sla.e2e_ms is not None and lifetime_ms <= sla.e2e_ms
    return (
        (sla.ttft_ms is None or ttft_ms <= sla.ttft_ms)
        and (sla.e2e_ms is None or e2e_ms <= sla.e2e_ms)
        and (sla.itl_ms is None or tokens < 2 or (e2e_ms - ttft_ms) / (tokens - 1.0) <= sla.itl_ms)
    )
