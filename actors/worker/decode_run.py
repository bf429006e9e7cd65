"""A run of decode passes: a fixed batch in which every sequence gets one token a pass and none ends.

Owns: how long such a run can last, and which sequences need attention in which of its passes. All others only count, so
a pass costs what it changes, and the counts are written into the sequences when the run is over.
Refuses to know: device memory, pass times, and why a run is cut.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from g2sim.actors.worker.sequence import Sequence

NEVER = 1 << 62


class DecodeRun:
    """See the module's text.

    Args:
        batch: the running list: each sequence has its prompt and all generated tokens but the last one computed.
        passes: how many passes the run can have, fewer than any of the sequences has tokens left.
        block_size_tokens: tokens per block.
        caches_blocks: filled blocks are entered under their hash.

    Attributes:
        emitted: requests that get a token in each pass, in order.
        size: their number.
        known_tokens: prompt and generated tokens of all before the next pass.
        passes_left: how many passes it can still have.
    """

    __slots__ = (
        "_batch",
        "_block_size",
        "_caches_blocks",
        "_due",
        "_passes",
        "emitted",
        "known_tokens",
        "passes_left",
        "size",
    )

    def __init__(self, batch: Items[Sequence], passes: int, block_size_tokens: int, *, caches_blocks: bool) -> None:
        self._batch = tuple(batch)
        self._block_size = block_size_tokens
        self._caches_blocks = caches_blocks
        self._passes = 0
        self.passes_left = passes
        self._due: dict[int, list[int]] = {}
        self.emitted = tuple([seq.request for seq in batch])
        self.size = len(self._batch)
        self.known_tokens = sum(seq.known for seq in batch)
        for place in range(self.size):
            self._watch(place)

    @property
    def is_over(self) -> bool:
        return self.passes_left == 0

    def passes_with(self, blocks: int) -> int:
        """In how many more passes no more than that many blocks are opened."""
        size = self._block_size
        done = self._passes
        # Every sequence opens one block in each stretch of a block's worth of passes.
        first = sorted([seq.block_count * size + 1 - seq.computed - done for seq in self._batch])
        rounds, place = divmod(blocks, self.size)
        return rounds * size + first[place] - 1

    def passes_without(self, hashes: Items[int], position: int) -> int:
        """In how many more passes no sequence fills its block at that position, having begun with ``hashes``."""
        passes = self.passes_left
        for seq in self._batch:
            common = min(position, len(seq.hashes))
            if seq.sealed <= position and (not common or seq.hashes[common - 1] == hashes[common - 1]):
                passes = min(passes, (position + 1) * self._block_size - seq.computed - self._passes - 1)
        return passes

    def due(self) -> list[tuple[Sequence, int]]:
        """Sequences that open or fill a block in the next pass, in order, with their computed tokens after it."""
        places = self._due.get(self._passes + 1)
        if places is None:
            return []
        places.sort()
        return [(seq, seq.computed + self._passes + 1) for seq in map(self._batch.__getitem__, places)]

    def count(self) -> None:
        """A pass is done, and what was due has been seen to."""
        self._passes += 1
        self.passes_left -= 1
        self.known_tokens += self.size
        for place in self._due.pop(self._passes, ()):
            self._watch(place)

    def settle(self) -> None:
        """Write what the run has counted into its sequences."""
        for seq in self._batch:
            seq.computed += self._passes
            seq.generated += self._passes
        self._passes = 0

    def _watch(self, place: int) -> None:
        """Note the next pass in which a sequence opens a block, or fills one."""
        seq, size = self._batch[place], self._block_size
        opens = seq.block_count * size + 1
        fills = (seq.sealed + 1) * size if self._caches_blocks else NEVER
        at = max(min(opens, fills) - seq.computed, self._passes + 1)
        self._due.setdefault(at, []).append(place)
