"""Prompts as token ids, without storing them one by one.

Only equality of token ids matters to a cache, so a trace's hash ids stand for runs of equal tokens.
Generated tokens live in the upper half of the 32-bit id space (see ``OUTPUT_TOKEN_BASE``), interned ids in the lower,
unless traffic says which tokens a request generates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import attrs
import numpy as np
import numpy.typing as npt

from g2sim.bus.errors import InvariantViolation

OUTPUT_TOKEN_BASE = 1 << 31
"""Smallest id of a generated token. Interned prompt ids stay below, so no trace ever matches generated text."""

TokenArray = npt.NDArray[np.uint32]


def token_array(ids: Sequence[int] | None) -> TokenArray | None:
    """Token ids as an array, if there are any."""
    return None if ids is None else np.array(ids, dtype=np.uint32)


class Prompt(Protocol):
    """A prompt of ``length`` tokens."""

    @property
    def length(self) -> int: ...

    def tokens(self, start: int, stop: int) -> TokenArray:
        """Token ids of positions [start, stop): uint32[stop - start]."""
        ...


@attrs.frozen(slots=True)
class RunPrompt:
    """A prompt made of runs: ``ids[k]`` repeated ``run_tokens`` times, the whole cut to ``length``.

    Attributes:
        ids: interned ids, each below ``OUTPUT_TOKEN_BASE``.
        run_tokens: tokens that one id stands for (the trace's block size), >= 1.
        length: prompt length in tokens, at most ``len(ids) * run_tokens``.
    """

    ids: tuple[int, ...]
    run_tokens: int
    length: int

    def tokens(self, start: int, stop: int) -> TokenArray:
        if not 0 <= start <= stop <= self.length:
            raise InvariantViolation(f"prompt slice [{start}, {stop}) of {self.length} tokens")
        first = start // self.run_tokens
        last = -(-stop // self.run_tokens)
        runs = np.repeat(np.asarray(self.ids[first:last], dtype=np.uint32), self.run_tokens)
        offset = first * self.run_tokens
        return runs[start - offset : stop - offset]


@attrs.frozen(slots=True, eq=False)
class ArrayPrompt:
    """A prompt given token by token: ``ids`` is uint32[length]."""

    ids: TokenArray

    @property
    def length(self) -> int:
        return len(self.ids)

    def tokens(self, start: int, stop: int) -> TokenArray:
        if not 0 <= start <= stop <= len(self.ids):
            raise InvariantViolation(f"prompt slice [{start}, {stop}) of {len(self.ids)} tokens")
        return self.ids[start:stop]


def continued_prompt(prompt: Prompt, output_base: int, output_ids: TokenArray | None, tokens: int) -> ArrayPrompt:
    """A prompt followed by the first ``tokens`` tokens that were generated for it; which, says ``RankRequest``."""
    generated = np.arange(tokens, dtype=np.uint32) + np.uint32(OUTPUT_TOKEN_BASE + output_base)
    if output_ids is not None:
        generated = output_ids[:tokens]
    return ArrayPrompt(np.concatenate([prompt.tokens(0, prompt.length), generated]))
