"""The random numbers of the reference's generated traffic: ChaCha with 12 rounds, counted in 32-bit words.

The stream is addressable: any word can be had without those before it. Draws walk through it from word 0.

Source: ChaCha (Bernstein, 2008) with a 64-bit counter and nonce 0; key and draws as in the trace replay of NVIDIA
Dynamo 1.6. Vectors in tests/traffic/test_chacha.py.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]

_CONSTANTS = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)
_BLOCK_WORDS = 16
_READ_AHEAD_WORDS = 1024
_U32 = 0xFFFFFFFF
_U64 = 0xFFFFFFFFFFFFFFFF
_COLUMNS = ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15))
_DIAGONALS = ((0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14))


class ChaCha12:
    """One stream of numbers; ``seed`` is an integer from 0 to 2**64 - 1."""

    def __init__(self, seed: int) -> None:
        self._key = _key(seed)
        self._ahead = np.empty(0, dtype=np.uint32)
        self._ahead_at = 0
        self._position = 0

    def words(self, start: int, count: int) -> Words:
        """Words [start, start + count) of the stream: uint32[count]. Draws are not affected."""
        first, last = start // _BLOCK_WORDS, -(-(start + count) // _BLOCK_WORDS)
        offset = start - first * _BLOCK_WORDS
        return self._blocks(first, last - first)[offset : offset + count]

    def unit(self) -> float:
        """A float in [0, 1) with 53 random bits."""
        low, high = self._draw(), self._draw()
        return float((high << 32 | low) >> 11) * 2.0**-53

    def below(self, limit: int) -> int:
        """An integer in [0, limit), with limit <= 2**32."""
        product = self._draw() * limit
        result, low = product >> 32, product & _U32
        if low > 2**32 - limit and low + (self._draw() * limit >> 32) > _U32:
            result += 1
        return result

    def _draw(self) -> int:
        at = self._position - self._ahead_at
        if at >= len(self._ahead):
            self._ahead_at, at = self._position, 0
            self._ahead = self.words(self._position, _READ_AHEAD_WORDS)
        self._position += 1
        return int(self._ahead[at])

    def _blocks(self, first: int, count: int) -> Words:
        """Words of ``count`` blocks, all computed side by side."""
        counters = np.arange(first, first + count, dtype=np.uint64)
        begin = np.zeros((_BLOCK_WORDS, count), dtype=np.uint32)
        begin[:4] = np.array(_CONSTANTS, dtype=np.uint32)[:, None]
        begin[4:12] = np.array(self._key, dtype=np.uint32)[:, None]
        begin[12] = (counters & np.uint64(_U32)).astype(np.uint32)
        begin[13] = (counters >> np.uint64(32)).astype(np.uint32)
        state = begin.copy()
        for _ in range(6):
            for quarter in (*_COLUMNS, *_DIAGONALS):
                _quarter_round(state, *quarter)
        return (state + begin).T.reshape(-1)


def _quarter_round(state: Words, a: int, b: int, c: int, d: int) -> None:
    for target, other, mixed, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
        state[target] += state[other]
        word = state[mixed] ^ state[target]
        state[mixed] = (word << np.uint32(bits)) | (word >> np.uint32(32 - bits))


def _key(seed: int) -> list[int]:
    """Eight 32-bit words that a 64-bit seed is spread over, by a PCG step each."""
    words = []
    state = seed
    for _ in range(8):
        state = (state * 6364136223846793005 + 11634580027462260723) & _U64
        mixed = ((state >> 18) ^ state) >> 27 & _U32
        turn = state >> 59
        words.append((mixed >> turn | mixed << (-turn & 31)) & _U32)
    return words
