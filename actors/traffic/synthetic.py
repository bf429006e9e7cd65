"""Generated requests and sessions of one shape, and when they arrive.

Source: synthetic workloads of the trace replay of NVIDIA Dynamo 1.6; recordings in tests/oracle.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Sequence
from itertools import accumulate, repeat

import attrs
import numpy as np

from g2sim.actors.kv.prompt import RunPrompt, TokenArray
from g2sim.actors.rounding import round_half_away
from g2sim.actors.traffic.chacha import ChaCha12
from g2sim.actors.traffic.session_table import MadeSessions
from g2sim.actors.traffic.sessions import Session, Turn


def plain_requests(
    number: int, *, input_tokens: int, output_tokens: int, arrivals_ms: Sequence[float] | None
) -> MadeSessions:
    """``number`` independent requests, no two prompts alike; ``arrivals_ms`` has one entry each, None = closed loop."""

    def make(index: int) -> Session:
        return Session(
            session_id=f"request_{index}",
            first_arrival_ms=None if arrivals_ms is None else arrivals_ms[index],
            turns=(Turn(prompt=UniquePrompt(index, input_tokens), output_tokens=output_tokens, uuid=index + 1),),
        )

    return MadeSessions(number, make)


@attrs.frozen(slots=True)
class UniquePrompt:
    """A prompt that shares nothing with those of other indices.

    Token j of request i is the low half of splitmix64's finaliser at (i << 32 ^ j), 0 replaced by 1.
    """

    index: int
    length: int

    def tokens(self, start: int, stop: int) -> TokenArray:
        x = (np.uint64(self.index) << np.uint64(32)) ^ np.arange(start, stop, dtype=np.uint64)
        x += np.uint64(0x9E3779B97F4A7C15)
        x ^= x >> np.uint64(30)
        x *= np.uint64(0xBF58476D1CE4E5B9)
        x ^= x >> np.uint64(27)
        x *= np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
        ids = (x & np.uint64(0xFFFFFFFF)).astype(np.uint32)
        ids[ids == 0] = 1
        return ids


@attrs.frozen(kw_only=True)
class SessionShape:
    """What all generated sessions have in common.

    Attributes:
        turns: turns of a session, >= 1.
        input_tokens, output_tokens: of each turn; where prompts accumulate, of what the turn adds.
        delay_ms: from the end of a turn to the next.
        block_size_tokens: granularity of shared prefixes.
        shared_prefix_ratio: part of a turn's blocks, rounded half up, that it has in common with its prefix group.
        prefix_groups: number of groups, 0 = nothing is shared.
        group_seed: of the draw that puts each session into a group.
    """

    turns: int
    input_tokens: int
    output_tokens: int
    delay_ms: float = 0.0
    block_size_tokens: int
    shared_prefix_ratio: float = 0.0
    prefix_groups: int = 0
    group_seed: int = 0


def sessions(number: int, shape: SessionShape, arrivals_ms: Sequence[float] | None) -> MadeSessions:
    """``number`` sessions of one shape; ``arrivals_ms`` has one entry each, None = closed loop."""
    draws = ChaCha12(shape.group_seed)
    blocks = -(-shape.input_tokens // shape.block_size_tokens)
    shares = shape.prefix_groups > 0 and shape.shared_prefix_ratio > 0.0
    shared = shared_blocks(blocks, shape.shared_prefix_ratio) if shares else 0
    own = blocks - shared
    prefix_of_group: dict[int, int] = {}
    prefix_ids, own_ids = array("Q"), array("Q")  # of each session, the first id of its prefix and of what is its own
    fresh_id = 0
    for _ in range(number):
        if shares:
            group = draws.below(shape.prefix_groups)
            if group not in prefix_of_group:
                prefix_of_group[group] = fresh_id
                fresh_id += shared
            prefix_ids.append(prefix_of_group[group])
        own_ids.append(fresh_id)
        fresh_id += own * shape.turns

    def make(index: int) -> Session:
        prefix = range(prefix_ids[index], prefix_ids[index] + shared) if shares else ()
        turns = tuple(
            Turn(
                prompt=RunPrompt(
                    ids=(*prefix, *range(own_ids[index] + turn * own, own_ids[index] + (turn + 1) * own)),
                    run_tokens=min(shape.block_size_tokens, shape.input_tokens),
                    length=shape.input_tokens,
                ),
                output_tokens=shape.output_tokens,
                delay_ms=shape.delay_ms if turn else 0.0,
            )
            for turn in range(shape.turns)
        )
        arrival_ms = None if arrivals_ms is None else arrivals_ms[index]
        return Session(session_id=f"session_{index}", first_arrival_ms=arrival_ms, turns=turns)

    return MadeSessions(number, make)


def shared_blocks(blocks: int, ratio: float) -> int:
    """How many of ``blocks`` leading blocks are shared, for a ratio from 0 to 1; halves round up."""
    return min(blocks, round_half_away(blocks * ratio))


def constant_arrivals_ms(number: int, interval_ms: float) -> array[float]:
    """Arrivals ``interval_ms`` apart, from 0; 0 = a burst, all at once.

    The gap goes through a rate, as in the reference, so it can differ from the interval in the last digit.
    """
    gap_ms = 1000.0 / (1000.0 / interval_ms) if interval_ms > 0.0 else 0.0
    return array("d", accumulate(repeat(gap_ms, number - 1), initial=0.0))


def poisson_arrivals_ms(number: int, per_second: float, seed: int) -> array[float]:
    """Arrivals of a Poisson process, the first at 0: gaps are -(1000 / rate) ln(u), with one draw u each."""
    draws = ChaCha12(seed)
    scale_ms = -(1000.0 / per_second)
    gaps_ms = (scale_ms * math.log(max(1.0 - draws.unit(), sys.float_info.min)) for _ in range(number - 1))
    return array("d", accumulate(gaps_ms, initial=0.0))
