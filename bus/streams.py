"""Named random streams: one for each (actor, purpose), so that a new draw in one place shifts no other."""

from __future__ import annotations

import random


class RandomStream:
    """A seeded stream of draws that counts them.

    Args:
        seed: the run's seed.
        name: "<actor>:<purpose>". The generator is seeded with the text "<seed>:<name>", which Python hashes with
            SHA-512, so neither PYTHONHASHSEED nor the order of creation matters.
    """

    __slots__ = ("_generator", "draws", "name")

    def __init__(self, seed: int, name: str) -> None:
        self.name = name
        self.draws = 0
        self._generator = random.Random(f"{seed}:{name}")

    def unit(self) -> float:
        """A float in [0, 1)."""
        self.draws += 1
        return self._generator.random()

    def below(self, limit: int) -> int:
        """An integer in [0, limit), ``limit`` >= 1."""
        self.draws += 1
        return self._generator.randrange(limit)

    def fingerprint(self) -> int:
        """A final 64-bit draw, not counted: equal streams that made equal draws give equal fingerprints."""
        return self._generator.getrandbits(64)
