"""How long a pass takes.

Every modelled duration is a whole number of nanoseconds, reached by the steps of ``scaled_ms`` and no others; the
reference's results depend on them to the last bit.

Source: pass times of aisimulate-core 0.13.0, measured on ai-dynamo-runtime 1.6.1.
"""

from __future__ import annotations

import math
from typing import Protocol

import attrs

from g2sim.actors.config import FixedTiming, PolynomialTiming, RankConfig
from g2sim.bus.errors import InvariantViolation, SimError

NS_PER_S = 1_000_000_000

_CACHED_DURATIONS = 65_536


def nearest_ns(seconds: float) -> int:
    """Nearest whole nanosecond to the exact value of ``seconds``, ties to even; exact for every finite float."""
    numerator, denominator = seconds.as_integer_ratio()
    whole, rest = divmod(numerator * NS_PER_S, denominator)
    if 2 * rest > denominator or (2 * rest == denominator and whole & 1):
        whole += 1
    return whole


def seconds_of(nanoseconds: int) -> float:
    """Seconds of a whole number of nanoseconds, added from whole seconds and the rest."""
    whole, rest = divmod(nanoseconds, NS_PER_S)
    return float(whole) + float(rest) / 1e9


def scaled_ms(raw_ms: float, ratio: float) -> float:
    """A modelled duration after speed-up [ms].

    Args:
        raw_ms: what the timing model says [ms], >= 0.
        ratio: divides it; 0 means "not scaled".
    """
    nanoseconds = nearest_ns(raw_ms / 1000.0)
    if ratio > 0.0 and nanoseconds > 0:
        nanoseconds = nearest_ns(seconds_of(nanoseconds) / ratio)
    rounded_ms = seconds_of(nanoseconds) * 1000.0
    return seconds_of(nearest_ns(rounded_ms / 1000.0)) * 1000.0


class PassTimes(Protocol):
    """What a timing model says, before speed-up and rounding: pure functions of a pass."""

    def prefill_ms(self, requests: int, prompt_tokens: int, prefix_tokens: int) -> float:
        """Length of the prefill part [ms], finite and not negative.

        Args:
            requests: entries with prompt tokens in this pass, >= 1.
            prompt_tokens: over those, prompt tokens known after this pass (prefix included).
            prefix_tokens: over those, prompt tokens known before it.
        """

    def decode_ms(self, requests: int, known_tokens: int) -> float:
        """Length of the decode part [ms], finite and not negative.

        Args:
            requests: decoding requests, >= 1.
            known_tokens: over those, prompt and generated tokens, the ones being computed included.
        """


class PassTimer:
    """Durations of the two parts of a pass, for one rank.

    Args:
        pass_times: answers for an ``ExternalTiming``, None for the models that are built in.

    Attributes:
        fixed_decode_ms: length of every decode part [ms], None if it depends on the batch.
    """

    def __init__(self, config: RankConfig, pass_times: PassTimes | None = None) -> None:
        self._times = pass_times if pass_times is not None else _built_in(config)
        self._prefill_ratio = config.speedup_ratio
        self._decode_ratio = config.speedup_ratio * config.decode_speedup_ratio
        self._prefill: dict[float, float] = {}
        self._decode: dict[float, float] = {}
        self.fixed_decode_ms = self.decode_ms(1, 1) if isinstance(self._times, _FixedTimes) else None

    def prefill_ms(self, requests: int, prompt_tokens: int, prefix_tokens: int) -> float:
        """Length of the prefill part [ms]; arguments as in ``PassTimes``."""
        raw_ms = self._times.prefill_ms(requests, prompt_tokens, prefix_tokens)
        found = self._prefill.get(raw_ms)
        return found if found is not None else _remembered(self._prefill, raw_ms, self._prefill_ratio)

    def decode_ms(self, requests: int, known_tokens: int) -> float:
        """Length of the decode part [ms]; arguments as in ``PassTimes``."""
        raw_ms = self._times.decode_ms(requests, known_tokens)
        found = self._decode.get(raw_ms)
        return found if found is not None else _remembered(self._decode, raw_ms, self._decode_ratio)


def _remembered(cache: dict[float, float], raw_ms: float, ratio: float) -> float:
    if not 0.0 <= raw_ms < math.inf:
        raise SimError(f"a pass that takes {raw_ms!r} ms; pass times must be finite and not negative")
    if len(cache) >= _CACHED_DURATIONS:
        cache.clear()
    scaled = cache[raw_ms] = scaled_ms(raw_ms, ratio)
    return scaled


def _built_in(config: RankConfig) -> PassTimes:
    if isinstance(config.timing, FixedTiming):
        return _FixedTimes(config.timing)
    if isinstance(config.timing, PolynomialTiming):
        return _PolynomialTimes(config.gpu_blocks * config.block_size_tokens)
    raise InvariantViolation(f"nobody answers for {config.timing!r}")


@attrs.frozen
class _FixedTimes:
    timing: FixedTiming

    def prefill_ms(self, requests: int, prompt_tokens: int, prefix_tokens: int) -> float:
        return self.timing.prefill_ms

    def decode_ms(self, requests: int, known_tokens: int) -> float:
        return self.timing.decode_ms


@attrs.frozen
class _PolynomialTimes:
    capacity_tokens: int

    def prefill_ms(self, requests: int, prompt_tokens: int, prefix_tokens: int) -> float:
        return polynomial_prefill_ms(requests, prompt_tokens, prefix_tokens)

    def decode_ms(self, requests: int, known_tokens: int) -> float:
        return polynomial_decode_ms(known_tokens, self.capacity_tokens)


def polynomial_prefill_ms(requests: int, prompt_tokens: int, prefix_tokens: int) -> float:
    """``PolynomialTiming`` for the prefill part [ms]: both means are floored before they are subtracted."""
    new_tokens = max(0, prompt_tokens // requests - prefix_tokens // requests)
    if new_tokens == 0:
        return 0.0
    x = float(requests * new_tokens)
    return max(0.0, 4.209989e-07 * (x * x) + 1.518344e-02 * x + 1.650142e01)


def polynomial_decode_ms(known_tokens: int, capacity_tokens: int) -> float:
    """``PolynomialTiming`` for the decode part [ms]; blocks that requests share count once for each of them."""
    p = min(float(known_tokens) / float(capacity_tokens), 1.0)
    return max(-25.74 * (p * p) + 54.01 * p + 5.74, 1.0)


__all__ = [
    "PassTimer",
    "PassTimes",
    "PolynomialTiming",
    "nearest_ns",
    "polynomial_decode_ms",
    "polynomial_prefill_ms",
    "scaled_ms",
    "seconds_of",
]
