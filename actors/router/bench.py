"""Routers, requests and KV events made of small numbers: what policies are tried out with, away from any run.

A prompt is written as the ids of its blocks: ``request(7, (1, 2, 3))`` has three blocks, and shares two with
``request(8, (1, 2, 9))``. Owns: how such values are built. Refuses to know: any policy, and the bus.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from g2sim.actors.config import TieBreak, WorkerRole
from g2sim.actors.kv.blocks import BlockChain, sequence_hash, tokens_hash
from g2sim.actors.kv.events import BlocksCleared, BlocksRemoved, BlocksStored
from g2sim.actors.router.policy import PlacementPolicy, RoutedRequest
from g2sim.actors.router.pool import Pool
from g2sim.actors.router.state import RouterState
from g2sim.actors.traffic.request import AgenticIdentity
from g2sim.bus.streams import RandomStream

BLOCK = 4
"""Tokens per block."""


class Streams:
    """Random streams of one router; remembers which were asked for."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.made: dict[str, RandomStream] = {}

    def __call__(self, purpose: str) -> RandomStream:
        return self.made.setdefault(purpose, RandomStream(self.seed, purpose))


def pool(workers: int = 2, dp_size: int = 1, **change: Any) -> Pool:
    values: dict[str, Any] = {
        "role": WorkerRole.AGGREGATED,
        "block_size_tokens": BLOCK,
        "max_batched_tokens": 64,
        "gpu_blocks": 64,
        "tie_break": TieBreak.LOWEST,
        "stream": Streams(),
    }
    return Pool(workers=workers, dp_size=dp_size, **{**values, **change})


def router(policy: PlacementPolicy, workers: int = 2, dp_size: int = 1, **change: Any) -> RouterState:
    return RouterState(pool(workers, dp_size, **change), policy)


def chain_of(ids: Sequence[int]) -> BlockChain:
    """Identity of a prompt whose k-th block is made of tokens ``ids[k]``."""
    tokens = [tokens_hash(struct.pack("<I", block) * BLOCK) for block in ids]
    hashes: list[int] = []
    for own in tokens:
        hashes.append(sequence_hash(hashes[-1] if hashes else None, own))
    return BlockChain(tuple(hashes), tuple(tokens))


def request(number: int, ids: Sequence[int] = (1, 2, 3), *, tokens: int | None = None, **change: Any) -> RoutedRequest:
    """A request whose prompt has one block for each id, and ``tokens`` tokens if that is not a whole number of them."""
    values: dict[str, Any] = {
        "prompt_tokens": BLOCK * len(ids) if tokens is None else tokens,
        "output_tokens": 4,
        "chain": chain_of(ids if tokens is None else ids[: tokens // BLOCK]),
        "arrival_ms": 0.0,
    }
    return RoutedRequest(request=number, **{**values, **change})


def agentic(play: str = "p", conversation: str = "c", **change: Any) -> AgenticIdentity:
    return AgenticIdentity(play_id=play, conversation_id=conversation, **change)


def who(worker: int, dp_rank: int = 0, role: str = "aggregated") -> dict[str, Any]:
    return {"worker": worker, "role": role, "dp_rank": dp_rank, "event_id": 0}


def stored(
    worker: int, ids: Sequence[int], *, start: int = 0, tier: str = "device", dp_rank: int = 0, role: str = "aggregated"
) -> BlocksStored:
    """Blocks ``start``.. of the prompt ``ids`` became resident."""
    chain = chain_of(ids)
    return BlocksStored(
        tier=tier,
        parent_hash=chain.sequence_hashes[start - 1] if start else None,
        start_position=start,
        block_hashes=chain.sequence_hashes[start:],
        token_hashes=chain.tokens_hashes[start:],
        **who(worker, dp_rank, role),
    )


def removed(
    worker: int, ids: Sequence[int], *blocks: int, tier: str = "device", dp_rank: int = 0, role: str = "aggregated"
) -> BlocksRemoved:
    """These blocks of the prompt ``ids`` left."""
    hashes = chain_of(ids).sequence_hashes
    return BlocksRemoved(tier=tier, block_hashes=tuple(hashes[k] for k in blocks), **who(worker, dp_rank, role))


def cleared(worker: int, *, tier: str | None = None, dp_rank: int = 0, role: str = "aggregated") -> BlocksCleared:
    return BlocksCleared(tier=tier, **who(worker, dp_rank, role))
