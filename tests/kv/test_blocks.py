"""Block identity: chains of hashes, and the prompts that they are computed from."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from g2sim.actors.kv.blocks import BlockChain, BlockHasher, sequence_hash, tokens_hash
from g2sim.actors.kv.prompt import OUTPUT_TOKEN_BASE, ArrayPrompt, Prompt, RunPrompt
from g2sim.bus.errors import InvariantViolation

SMALL_IDS = st.integers(min_value=0, max_value=5)
IDS = st.lists(SMALL_IDS | st.integers(min_value=0, max_value=OUTPUT_TOKEN_BASE - 1), min_size=1, max_size=6)


def array(tokens: Sequence[int]) -> ArrayPrompt:
    return ArrayPrompt(np.asarray(tokens, dtype=np.uint32))


def chain_of(tokens: Sequence[int], size: int = 4) -> BlockChain:
    return BlockHasher(size).chain(array(tokens))


def slow_chain(tokens: Sequence[int], size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The definition, word by word: (sequence hashes, tokens hashes)."""
    sequence: list[int] = []
    own: list[int] = []
    for block in range(len(tokens) // size):
        text = b"".join(struct.pack("<I", token) for token in tokens[block * size : (block + 1) * size])
        own.append(xxhash.xxh3_64(text, seed=1337).intdigest())
        if block == 0:
            sequence.append(own[0])
        else:
            pair = struct.pack("<Q", sequence[-1]) + struct.pack("<Q", own[-1])
            sequence.append(xxhash.xxh3_64(pair, seed=1337).intdigest())
    return tuple(sequence), tuple(own)


def expanded(ids: Sequence[int], run_tokens: int, length: int) -> list[int]:
    return [token for token in ids for _ in range(run_tokens)][:length]


@st.composite
def run_prompts(draw: st.DrawFn) -> RunPrompt:
    ids = draw(IDS)
    run_tokens = draw(st.integers(min_value=1, max_value=12))
    length = draw(st.integers(min_value=1, max_value=len(ids) * run_tokens))
    return RunPrompt(tuple(ids), run_tokens, length)


# -- prompts


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (0, 6), (3, 2), (6, 6)])
@pytest.mark.parametrize("prompt", [RunPrompt((7, 8), 3, 5), array([7, 7, 7, 8, 8])], ids=["runs", "array"])
def test_a_slice_outside_the_prompt_is_refused_by_name(prompt: Prompt, start: int, stop: int) -> None:
    """A slice that leaves [0, length] is an error that names the slice and the length; nothing is clipped."""
    with pytest.raises(InvariantViolation) as caught:
        prompt.tokens(start, stop)
    assert f"[{start}, {stop})" in str(caught.value)
    assert "5 tokens" in str(caught.value)


@given(prompt=run_prompts(), data=st.data())
def test_a_slice_of_runs_equals_the_slice_of_the_expanded_tokens(prompt: RunPrompt, data: st.DataObject) -> None:
    """Any slice of a RunPrompt and of the ArrayPrompt with the same tokens is that slice of the plain token list."""
    tokens = expanded(prompt.ids, prompt.run_tokens, prompt.length)
    start = data.draw(st.integers(min_value=0, max_value=prompt.length))
    stop = data.draw(st.integers(min_value=start, max_value=prompt.length))
    for form in (prompt, array(tokens)):
        got = form.tokens(start, stop)
        assert got.dtype == np.uint32
        assert got.tolist() == tokens[start:stop]
        assert form.length == len(tokens)


# -- chains


def test_a_partial_block_has_no_hash() -> None:
    """A prompt shorter than a block has no identity, and the tail of a longer one adds none."""
    assert len(chain_of([1, 2, 3])) == 0
    assert chain_of([1, 2, 3, 4, 9, 9, 9]).sequence_hashes == chain_of([1, 2, 3, 4]).sequence_hashes


def test_prefixes_that_differ_give_other_hashes_to_equal_blocks() -> None:
    """The same tokens after another prefix keep their tokens hash and get another sequence hash."""
    one, other = chain_of([1] * 4 + [5] * 4), chain_of([2] * 4 + [5] * 4)
    assert one.tokens_hashes[1] == other.tokens_hashes[1]
    assert one.sequence_hashes[1] != other.sequence_hashes[1]


def test_the_vector_of_one_block() -> None:
    """Tokens 1, 2, 3, 4 hash to the recorded number, as tokens and as block 0 of a sequence."""
    assert chain_of([1, 2, 3, 4]).sequence_hashes == (14643705804678351452,)
    assert tokens_hash(struct.pack("<4I", 1, 2, 3, 4)) == 14643705804678351452
    assert sequence_hash(None, 14643705804678351452) == 14643705804678351452


@pytest.mark.parametrize("prompt", [RunPrompt((0, 1, 2), 4, 12), array([0] * 4 + [1] * 4 + [2] * 4)])
def test_the_vectors_of_a_chain(prompt: Prompt) -> None:
    """Blocks 0000, 1111, 2222 have the recorded tokens and sequence hashes, whichever way the prompt is given."""
    got = BlockHasher(4).chain(prompt)
    assert got.tokens_hashes == (13277122834585657784, 17197628134376687251, 11189908752501997813)
    assert got.sequence_hashes == (13277122834585657784, 960476856703368838, 9323102142534520437)
    assert sequence_hash(got.sequence_hashes[1], got.tokens_hashes[2]) == got.sequence_hashes[2]


@pytest.mark.parametrize("run_tokens", [1, 4, 16])
def test_four_blocks_of_identical_tokens_are_four_blocks(run_tokens: int) -> None:
    """F18(b): repeated text gives one tokens hash and four different block hashes, so no block is its own parent."""
    got = BlockHasher(4).chain(RunPrompt((7,) * (16 // run_tokens), run_tokens, 16))
    assert len(set(got.tokens_hashes)) == 1
    assert len(set(got.sequence_hashes)) == 4


@given(prompt=run_prompts(), size=st.integers(min_value=1, max_value=6))
def test_a_chain_equals_the_definition_carried_out_slowly(prompt: RunPrompt, size: int) -> None:
    """Runs that the block size divides, runs that it does not, and plain tokens all give the defined hashes."""
    tokens = expanded(prompt.ids, prompt.run_tokens, prompt.length)
    hasher = BlockHasher(size)
    for form in (prompt, array(tokens)):
        got = hasher.chain(form)
        assert (got.sequence_hashes, got.tokens_hashes) == slow_chain(tokens, size)


@given(prompts=st.lists(run_prompts(), max_size=8), size=st.integers(min_value=1, max_value=4))
def test_a_memory_limit_changes_no_result(prompts: list[RunPrompt], size: int) -> None:
    """A hasher that forgets after every entry gives the chains of one that never forgets, in any order of prompts."""
    forgetful, mindful = BlockHasher(size, memory_limit=0), BlockHasher(size)
    for prompt in [*prompts, *prompts]:
        one, other = forgetful.chain(prompt), mindful.chain(prompt)
        assert (one.sequence_hashes, one.tokens_hashes) == (other.sequence_hashes, other.tokens_hashes)
