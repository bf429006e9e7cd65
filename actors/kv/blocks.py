"""How KV blocks are identified.

A whole block has two hashes: the tokens hash of its own token ids, and the sequence hash of the block with everything
before it. Equal sequence hashes mean equal prefixes. A block that is not full has no hash.

Source: KV router of NVIDIA Dynamo 1.6 (XXH3-64, seed 1337); test vectors in tests/kv/test_blocks.py.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from typing import Any, Final

from xxhash import xxh3_64_intdigest

from g2sim.actors.kv.numbers import BlockNumbers, Numbers
from g2sim.actors.kv.prompt import Prompt, RunPrompt

HASH_SEED = 1337

_pack_pair = struct.Struct("<QQ").pack


def tokens_hash(token_bytes: bytes) -> int:
    """Hash of one block's token ids, given as little-endian uint32 bytes."""
    return xxh3_64_intdigest(token_bytes, HASH_SEED)


def namespace_seed(lora_name: str | None, cache_salt: str | None) -> int:
    """Seed of the tokens hashes of an adapter's and a cache salt's blocks; ``HASH_SEED`` without either.

    Source: recordings of the reference, tests/oracle/salted_hashes.json.
    """
    seed = HASH_SEED
    if lora_name:
        seed += xxh3_64_intdigest(lora_name.encode(errors="surrogatepass"), 0)
    if cache_salt:
        seed += xxh3_64_intdigest(cache_salt.encode(errors="surrogatepass"), 1)
    return seed & 0xFFFFFFFFFFFFFFFF


def tokens_hashes(token_ids: Sequence[int], block_size_tokens: int, seed: int = HASH_SEED) -> list[int]:
    """Hash of each block's token ids, which are 0 .. 2**32 - 1; a last block may have fewer tokens than the others."""
    return hashes_of_bytes(array("I", token_ids).tobytes(), 4 * block_size_tokens, seed)


def hashes_of_bytes(data: bytes, step: int, seed: int = HASH_SEED) -> list[int]:
    """Tokens hash of every ``step`` bytes of token ids."""
    hashes: list[int] = []
    for at in range(0, len(data), step):  # a comprehension is slower for the few blocks of an event
        hashes.append(xxh3_64_intdigest(data[at : at + step], seed))
    return hashes


def multimodal_hash(token_ids: Sequence[int], mm_hashes: Sequence[int], seed: int = HASH_SEED) -> int:
    """Hash of one block that shows multimodal objects, given by their 64-bit hashes."""
    objects = array("Q", sorted(mm_hashes))
    return xxh3_64_intdigest(array("I", token_ids).tobytes() + objects.tobytes(), seed)


def sequence_hash(parent_hash: int | None, own_tokens_hash: int) -> int:
    """Hash of a block with its prefix; ``parent_hash`` is the previous block's sequence hash, None for block 0."""
    if parent_hash is None:
        return own_tokens_hash
    return xxh3_64_intdigest(_pack_pair(parent_hash, own_tokens_hash), HASH_SEED)


def whole_blocks(prompt_tokens: int, block_size_tokens: int) -> int:
    """Blocks of a prompt that have an identity: what a router can believe in and a cache can hold."""
    return prompt_tokens // block_size_tokens


def reusable_blocks(prompt_tokens: int, block_size_tokens: int) -> int:
    """Blocks of a prompt that a cache can save: the last token is always computed, so its block is."""
    return (prompt_tokens - 1) // block_size_tokens


def consecutive(positions: Sequence[int] | Numbers) -> list[tuple[int, int]]:
    """Runs of ascending positions without a gap, each as (first, last + 1)."""
    if not len(positions):
        return []
    first, last = int(positions[0]), int(positions[-1])
    if last - first == len(positions) - 1:
        return [(first, last + 1)]
    runs: list[tuple[int, int]] = []
    start = stop = -1
    for position in map(int, positions):
        if position != stop:
            if stop >= 0:
                runs.append((start, stop))
            start = position
        stop = position + 1
    if stop >= 0:
        runs.append((start, stop))
    return runs


class BlockChain:
    """Identity of a prompt's whole blocks, in prompt order.

    Attributes:
        sequence_hashes: one a whole block, of the prompt up to its end; floor(prompt tokens / block size) of them.
        tokens_hashes: one a whole block, of its own tokens alone.
    """

    __slots__ = ("_numbered", "sequence_hashes", "tokens_hashes")

    def __init__(self, sequence_hashes: tuple[int, ...], tokens_hashes: tuple[int, ...]) -> None:
        self.sequence_hashes: Final = sequence_hashes
        self.tokens_hashes: Final = tokens_hashes
        self._numbered: tuple[BlockNumbers, Numbers] | None = None

    def __len__(self) -> int:
        return len(self.sequence_hashes)

    def numbers(self, numbering: BlockNumbers) -> Numbers:
        """Its blocks' numbers; they are kept while it exists. Nobody changes the array."""
        known = self._numbered
        if known is not None and known[0] is numbering:
            return known[1]
        numbers = numbering.numbers(self.sequence_hashes)
        self._numbered = (numbering, numbers)
        return numbers


class ChainPart:
    """The blocks [start, stop) of a chain. Nobody changes one."""

    __slots__ = ("chain", "start", "stop")

    def __init__(self, chain: BlockChain, start: int, stop: int) -> None:
        self.chain = chain
        self.start = start
        self.stop = stop

    def __len__(self) -> int:
        return self.stop - self.start


class BlockHasher:
    """Computes block chains for one block size, remembering what it has hashed before.

    The blocks of a run of equal tokens have one tokens hash, and turns of one conversation begin with the same runs; so
    the sequence hashes of a run's blocks are kept per (sequence hash before it, token, blocks).

    Args:
        block_size_tokens: tokens per block, >= 1.
        memory_limit: hashes kept before they are forgotten; a bound on memory, without effect on results.
    """

    def __init__(self, block_size_tokens: int, memory_limit: int = 250_000) -> None:
        self.block_size_tokens = block_size_tokens
        self._memory_limit = memory_limit
        self._constant: dict[int, int] = {}
        self._runs: dict[tuple[int | None, int, int], tuple[int, ...]] = {}

    def chain(self, prompt: Prompt) -> BlockChain:
        """The identity of every whole block of ``prompt``."""
        size = self.block_size_tokens
        count = prompt.length // size
        if isinstance(prompt, RunPrompt) and prompt.run_tokens % size == 0:
            return self._chain_of_runs(prompt.ids, prompt.run_tokens // size, count)
        hashes = hashes_of_bytes(prompt.tokens(0, count * size).astype("<u4", copy=False).tobytes(), 4 * size)
        return BlockChain(tuple(chained(None, hashes)), tuple(hashes))

    def _chain_of_runs(self, tokens: Sequence[int], run_blocks: int, count: int) -> BlockChain:
        """The chain of ``count`` blocks, where each token fills ``run_blocks`` of them."""
        runs, constant = self._runs, self._constant
        if len(runs) * run_blocks > self._memory_limit:
            runs.clear()
        if len(constant) > self._memory_limit:
            constant.clear()
        sequence_hashes: list[int] = []
        own_hashes: list[int] = []
        parent: int | None = None
        for token in tokens[: -(-count // run_blocks)]:
            own = constant.get(token)
            if own is None:
                own = constant[token] = tokens_hash(token.to_bytes(4, "little") * self.block_size_tokens)
            blocks = min(run_blocks, count - len(own_hashes))
            own_hashes += [own] * blocks
            run = runs.get((parent, token, run_blocks))
            if run is None:
                run = tuple(chained(parent, own_hashes[-blocks:]))
                if blocks == run_blocks:
                    runs[parent, token, run_blocks] = run
            sequence_hashes += run[:blocks]
            parent = run[-1]
        return BlockChain(tuple(sequence_hashes), tuple(own_hashes))


def chained(parent: int | None, own_hashes: Sequence[int]) -> list[int]:
    """Sequence hashes of blocks with these tokens hashes, which follow the block ``parent``."""
    # As ``sequence_hash``, without its call, and with integers left as objects: this is the cost of a new prompt.
    pack, digest = _pack_pair, xxh3_64_intdigest
    seed: Any = HASH_SEED
    hash_: Any = parent
    own: Any
    hashes: list[int] = []
    for own in own_hashes:
        hash_ = own if hash_ is None else digest(pack(hash_, own), seed)
        hashes.append(hash_)
    return hashes
