"""How KV blocks are identified.

A whole block has two hashes: the tokens hash of its own token ids, and the sequence hash of the block with everything
before it. Equal sequence hashes mean equal prefixes. A block that is not full has no hash.

Source: KV router of NVIDIA Dynamo 1.6 (XXH3-64, seed 1337); test vectors in tests/kv/test_blocks.py.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence

import attrs
from xxhash import xxh3_64_intdigest

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
    data, step = array("I", token_ids).tobytes(), 4 * block_size_tokens
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


@attrs.frozen(slots=True, eq=False)
class BlockChain:
    """Identity of a prompt's whole blocks, in prompt order.

    Attributes:
        sequence_hashes: one a whole block, of the prompt up to its end; floor(prompt tokens / block size) of them.
        tokens_hashes: one a whole block, of its own tokens alone.
    """

    sequence_hashes: tuple[int, ...]
    tokens_hashes: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.sequence_hashes)


class BlockHasher:
    """Computes block chains for one block size, remembering what it has hashed before.

    Runs of equal tokens make most blocks of a trace constant, so their tokens hash depends on one id; and turns of
    one conversation repeat their prefix, so the chain is kept per (parent, tokens hash).

    Args:
        block_size_tokens: tokens per block, >= 1.
        memory_limit: entries kept in each cache before it is emptied; a bound on memory, without effect on results.
    """

    def __init__(self, block_size_tokens: int, memory_limit: int = 1_000_000) -> None:
        self.block_size_tokens = block_size_tokens
        self._memory_limit = memory_limit
        self._constant: dict[int, int] = {}
        self._chained: dict[tuple[int, int], int] = {}

    def chain(self, prompt: Prompt) -> BlockChain:
        """The identity of every whole block of ``prompt``."""
        tokens_hashes = self._tokens_hashes(prompt)
        chained = self._chained
        if len(chained) > self._memory_limit:
            chained.clear()
        sequence_hashes: list[int] = []
        parent: int | None = None
        for own in tokens_hashes:
            if parent is None:
                parent = own
            else:
                key = (parent, own)
                found = chained.get(key)
                if found is None:
                    found = chained[key] = xxh3_64_intdigest(_pack_pair(parent, own), HASH_SEED)
                parent = found
            sequence_hashes.append(parent)
        return BlockChain(tuple(sequence_hashes), tuple(tokens_hashes))

    def _tokens_hashes(self, prompt: Prompt) -> list[int]:
        size = self.block_size_tokens
        count = prompt.length // size
        if isinstance(prompt, RunPrompt) and prompt.run_tokens % size == 0:
            per_run = prompt.run_tokens // size
            constant = self._constant
            if len(constant) > self._memory_limit:
                constant.clear()
            out: list[int] = []
            for run_idx in range(-(-count // per_run)):
                token = prompt.ids[run_idx]
                found = constant.get(token)
                if found is None:
                    found = constant[token] = tokens_hash(token.to_bytes(4, "little") * size)
                out.extend([found] * min(per_run, count - len(out)))
            return out
        data = prompt.tokens(0, count * size).astype("<u4", copy=False).tobytes()
        step = 4 * size
        return [tokens_hash(data[at : at + step]) for at in range(0, count * step, step)]
