"""Synthetic requests of one size, and when they arrive.

Source: synthetic workloads of the trace replay of NVIDIA Dynamo 1.6; recordings in tests/oracle.
"""

from __future__ import annotations

import numpy as np

from g2sim.actors.kv.prompt import ArrayPrompt
from g2sim.actors.traffic.sessions import Session, Turn


def plain_requests(
    count: int, *, input_tokens: int, output_tokens: int, arrivals_ms: list[float] | None
) -> list[Session]:
    """``count`` independent requests, no two prompts alike; ``arrivals_ms`` has one entry each, None = closed loop."""
    return [
        Session(
            session_id=f"request_{index}",
            first_arrival_ms=None if arrivals_ms is None else arrivals_ms[index],
            turns=(Turn(prompt=_unique_prompt(index, input_tokens), output_tokens=output_tokens, uuid=index + 1),),
        )
        for index in range(count)
    ]


def constant_arrivals_ms(count: int, interval_ms: float) -> list[float]:
    """Arrivals ``interval_ms`` apart, from 0; 0 = all at once.

    The gap goes through a rate, as in the reference, so it can differ from the interval in the last digit.
    """
    gap_ms = 1000.0 / (1000.0 / interval_ms) if interval_ms > 0.0 else 0.0
    out = []
    at_ms = 0.0
    for _ in range(count):
        out.append(at_ms)
        at_ms += gap_ms
    return out


def _unique_prompt(index: int, length: int) -> ArrayPrompt:
    """Token j of request i is the low half of splitmix64's finaliser at (i << 32 ^ j), 0 replaced by 1."""
    x = (np.uint64(index) << np.uint64(32)) ^ np.arange(length, dtype=np.uint64)
    x += np.uint64(0x9E3779B97F4A7C15)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    ids = (x & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    ids[ids == 0] = 1
    return ArrayPrompt(ids)
