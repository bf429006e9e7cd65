"""A request as one rank's scheduler sees it."""

from __future__ import annotations

import enum
from collections.abc import Collection
from typing import Final

import numpy as np

from g2sim.actors.kv.blocks import BlockChain, ChainPart, chained, hashes_of_bytes
from g2sim.actors.kv.events import Tier
from g2sim.actors.kv.numbers import NO_NUMBERS, BlockNumbers, Numbers, lengthened
from g2sim.actors.kv.prompt import OUTPUT_TOKEN_BASE, Prompt, TokenArray
from g2sim.actors.worker.device_pool import Reservation


class RankRequest:
    """What a rank is given to do.

    Attributes:
        request: number of the request in the run.
        prompt: its tokens.
        chain: identity of its whole blocks.
        output_tokens: tokens to generate here.
        output_base: id of the first generated token; ids of one request are consecutive, and no other request's.
        output_ids: the tokens to generate, uint32[output_tokens], where traffic says which; None = as ``output_base``.
        admitted_in: roles of pools that have admitted it before it was lost with a worker.
    """

    __slots__ = ("admitted_in", "chain", "output_base", "output_ids", "output_tokens", "prompt", "request")

    def __init__(
        self,
        request: int,
        prompt: Prompt,
        chain: BlockChain,
        output_tokens: int,
        output_base: int,
        output_ids: TokenArray | None = None,
        admitted_in: frozenset[str] = frozenset(),
    ) -> None:
        self.request: Final = request
        self.prompt: Final = prompt
        self.chain: Final = chain
        self.output_tokens: Final = output_tokens
        self.output_base: Final = output_base
        self.output_ids: Final = output_ids
        self.admitted_in: Final = admitted_in


class SequenceState(enum.Enum):
    """Where a sequence is. QUEUED: waiting queue. CONNECTOR: connector queue. RUNNING: running list. HELD: a prefill
    source whose blocks wait for the decode side. ENDED: it has left the rank."""

    QUEUED = "queued"
    CONNECTOR = "connector"
    RUNNING = "running"
    HELD = "held"
    ENDED = "ended"


_BLOCKS_AHEAD = 32

EVERY_BLOCK = 1 << 62
"""As a number of leading blocks: all that there are and will be."""


class Load:
    """A restore of one sequence: ``reservation`` until it is done.

    Attributes:
        part: blocks that travel.
        device_tokens: tokens found in G1 at look-up.
        prefix_blocks: G1 blocks plus travelling ones.
        footprint_blocks: blocks of everything known when the load began.
        cleared: the device was cleared since, so that nobody else will find what it brings.
    """

    __slots__ = ("cleared", "device_tokens", "done", "footprint_blocks", "part", "prefix_blocks", "reservation")

    def __init__(
        self,
        reservation: Reservation,
        part: ChainPart,
        device_tokens: int,
        prefix_blocks: int,
        footprint_blocks: int,
    ) -> None:
        self.reservation = reservation
        self.part = part
        self.device_tokens = device_tokens
        self.prefix_blocks = prefix_blocks
        self.footprint_blocks = footprint_blocks
        self.cleared = False
        self.done = False

    @property
    def tail_blocks(self) -> int:
        """Blocks the sequence will still need beyond what the load brings."""
        return max(0, self.footprint_blocks - self.prefix_blocks)


class Sequence:
    """Tokens, blocks and progress of one request on one rank.

    Args:
        order, handoff: see the attributes.
        block_size_tokens: tokens per block.
        numbering: numbers its blocks.

    Attributes:
        answer_tokens: tokens to generate before it ends here; the model's limit may leave fewer than were asked for.
        computed: tokens that have KV.
        generated: tokens produced so far; all of them are known, the last one is computed by the next pass.
        hashes, tokens_hashes: identities of known whole blocks, prompt first, generated ones as they fill.
        numbers: the same blocks' numbers, and maybe those of some that follow.
        block_count: blocks of device memory that it has.
        sealed: leading blocks that are cached under their hash, or are not to be.
        order: the rank's running number; "reservation order".
        store_cursor: prompt blocks that the host tier has been offered, or is not to be.
        latest_store: the last store, while it may be under way.
    """

    __slots__ = (
        "_block_size",
        "_blocks",
        "_next_hashes",
        "_numbering",
        "answer_tokens",
        "asleep",
        "block_count",
        "chain",
        "computed",
        "generated",
        "handoff",
        "hashes",
        "latest_store",
        "load",
        "numbers",
        "order",
        "output_base",
        "output_ids",
        "output_tokens",
        "preempted",
        "prompt",
        "prompt_tokens",
        "request",
        "sealed",
        "state",
        "store_cursor",
        "tokens_hashes",
        "was_admitted",
    )

    def __init__(
        self, given: RankRequest, order: int, handoff: int | None, block_size_tokens: int, numbering: BlockNumbers
    ) -> None:
        self.request = given.request
        self.prompt = given.prompt
        self.prompt_tokens = given.prompt.length
        self.chain = given.chain
        self.output_tokens = self.answer_tokens = given.output_tokens
        self.output_base = given.output_base
        self.output_ids = given.output_ids
        self.order = order
        self.handoff = handoff
        self.state = SequenceState.QUEUED
        self.computed = 0
        self.generated = 0
        self.hashes = list(given.chain.sequence_hashes)
        self.tokens_hashes = list(given.chain.tokens_hashes)
        self.numbers = given.chain.numbers(numbering)
        self._numbering = numbering
        self._block_size = block_size_tokens
        self._next_hashes: list[tuple[int, int]] = []  # tokens hash and hash of blocks to come, the next one last
        self._blocks = NO_NUMBERS
        self.block_count = 0
        self.sealed = 0
        self.store_cursor = 0
        self.latest_store: int | None = None
        self.load: Load | None = None
        self.asleep = False
        self.preempted = False
        self.was_admitted = False

    @property
    def blocks(self) -> Numbers:
        """Its device memory, in order; to be read before it gets or loses some."""
        return self._blocks[: self.block_count]

    def block(self, position: int) -> int:
        """The device memory of one of its blocks."""
        return int(self._blocks[position])

    def add_blocks(self, blocks: Numbers) -> None:
        """It has this device memory, too."""
        stop = self.block_count + len(blocks)
        self._make_room(stop)
        self._blocks[self.block_count : stop] = blocks
        self.block_count = stop

    def add_block(self, block: int) -> None:
        """It has this block of device memory, too."""
        self._make_room(self.block_count + 1)
        self._blocks[self.block_count] = block
        self.block_count += 1

    def _make_room(self, blocks: int) -> None:
        if blocks > len(self._blocks):
            self._blocks = lengthened(self._blocks, 2 * blocks)

    @property
    def known(self) -> int:
        """Prompt and generated tokens."""
        return self.prompt_tokens + self.generated

    @property
    def materialised(self) -> bool:
        """The whole prompt has KV although the sequence is not running: a hand-off's destination."""
        return self.computed >= self.prompt_tokens

    def keep_from(self, tiers: Collection[Tier]) -> None:
        """Its KV is of before a clear of these tiers: until it begins anew, nothing of it is to get there any more."""
        if Tier.DEVICE in tiers:
            self.sealed = EVERY_BLOCK
            if self.load is not None:
                self.load.cleared = True
        if Tier.HOST_PINNED in tiers:
            self.store_cursor = EVERY_BLOCK

    @property
    def kept_from(self) -> frozenset[Tier]:
        """See ``keep_from``."""
        progress = ((Tier.DEVICE, self.sealed), (Tier.HOST_PINNED, self.store_cursor))
        return frozenset([tier for tier, blocks in progress if blocks == EVERY_BLOCK])

    def begin_anew(self) -> None:
        """Its blocks have been given back."""
        self.block_count = 0
        self.sealed = 0
        if self.store_cursor == EVERY_BLOCK:
            self.store_cursor = 0

    def learn_next_hash(self) -> None:
        """Identify the next block, which has just been filled with generated tokens."""
        if not self._next_hashes:
            self._hash_ahead()
        own, hash_ = self._next_hashes.pop()
        self.tokens_hashes.append(own)
        self.hashes.append(hash_)

    def _hash_ahead(self) -> None:
        """Work out the identities of the next blocks: what will be generated is known, and many cost little more."""
        size, position = self._block_size, len(self.hashes)
        start = position * size
        whole_blocks = (self.prompt_tokens + self.output_tokens) // size
        stop = min(position + _BLOCKS_AHEAD, whole_blocks) * size
        first_output = max(start, self.prompt_tokens) - self.prompt_tokens
        last_output = stop - self.prompt_tokens
        if self.output_ids is not None:
            data = self.output_ids[first_output:last_output].astype("<u4", copy=False).tobytes()
        else:
            base = OUTPUT_TOKEN_BASE + self.output_base
            data = np.arange(base + first_output, base + last_output, dtype="<u4").tobytes()
        if start < self.prompt_tokens:
            data = self.prompt.tokens(start, self.prompt_tokens).astype("<u4", copy=False).tobytes() + data
        own_hashes = hashes_of_bytes(data, 4 * size)
        hashes = chained(self.hashes[-1] if position else None, own_hashes)
        parent = int(self.numbers[position - 1]) if position else -1
        self.numbers = np.concatenate((self.numbers[:position], self._numbering.numbers(hashes, parent)))
        self._numbering.keep(self.numbers)
        self._next_hashes = list(zip(own_hashes, hashes, strict=True))
        self._next_hashes.reverse()
