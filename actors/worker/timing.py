"""How long a pass takes.

Every modelled duration is a whole number of nanoseconds, reached by the steps of ``scaled_ms`` and no others; the
reference's results depend on them to the last bit.

Source: pass times of aisimulate-core 0.13.0, measured on ai-dynamo-runtime 1.6.1.
"""

from __future__ import annotations

from g2sim.actors.config import FixedTiming, PolynomialTiming, RankConfig, Timing

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


class PassTimer:
    """Durations of the two parts of a pass, for one rank."""

    def __init__(self, config: RankConfig) -> None:
        self._timing: Timing = config.timing
        self._prefill_ratio = config.speedup_ratio
        self._decode_ratio = config.speedup_ratio * config.decode_speedup_ratio
        self._capacity_tokens = config.gpu_blocks * config.block_size_tokens
        self._cache: dict[tuple[float, float], float] = {}

    def prefill_ms(self, requests: int, prompt_tokens: int, prefix_tokens: int) -> float:
        """Length of the prefill part [ms].

        Args:
            requests: entries with prompt tokens in this pass, >= 1.
            prompt_tokens: over those, prompt tokens known after this pass (prefix included).
            prefix_tokens: over those, prompt tokens known before it.
        """
        timing = self._timing
        if isinstance(timing, FixedTiming):
            return self._scaled(timing.prefill_ms, self._prefill_ratio)
        return self._scaled(polynomial_prefill_ms(requests, prompt_tokens, prefix_tokens), self._prefill_ratio)

    def decode_ms(self, known_tokens: int) -> float:
        """Length of the decode part [ms]; ``known_tokens`` is the sum over all decoding requests."""
        timing = self._timing
        if isinstance(timing, FixedTiming):
            return self._scaled(timing.decode_ms, self._decode_ratio)
        return self._scaled(polynomial_decode_ms(known_tokens, self._capacity_tokens), self._decode_ratio)

    def _scaled(self, raw_ms: float, ratio: float) -> float:
        key = (raw_ms, ratio)
        found = self._cache.get(key)
        if found is None:
            if len(self._cache) >= _CACHED_DURATIONS:
                self._cache.clear()
            found = self._cache[key] = scaled_ms(raw_ms, ratio)
        return found


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
    "PolynomialTiming",
    "nearest_ns",
    "polynomial_decode_ms",
    "polynomial_prefill_ms",
    "scaled_ms",
    "seconds_of",
]
