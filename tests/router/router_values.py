"""Builds routers, requests and events for these tests, so that a test shows only what differs."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

from g2sim.actors.config import TieBreak, WorkerRole
from g2sim.actors.kv.blocks import BlockChain, sequence_hash, tokens_hash
from g2sim.actors.kv.events import BlocksCleared, BlocksRemoved, BlocksStored
from g2sim.actors.router.policy import Placement, PlacementPolicy, RoutedRequest
from g2sim.actors.router.pool import Pool
from g2sim.actors.router.state import Decision, Placed, RouterState
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


def rank_of(decision: Decision) -> tuple[int, int]:
    """Where a placed request went."""
    assert isinstance(decision, Placed), decision
    return decision.placement.worker, decision.placement.dp_rank


def at(worker: int, dp_rank: int = 0) -> Placement:
    return Placement(worker, dp_rank)


def run_values(trace: str, **router: Any) -> dict[str, Any]:
    """A small aggregated scenario over a mooncake trace: 10 ms prefill passes, 1 ms decode passes, 2 workers."""
    return {
        "name": "router",
        "engine": {
            "mode": "aggregated",
            "workers": {"aggregated": worker(2)},
        },
        "traffic": {
            "source": {"type": "trace", "paths": [trace], "format": "mooncake", "block_size": BLOCK},
            "load": {"type": "trace_timestamps"},
        },
        "router": router,
    }


def worker(replicas: int, **kv_cache: Any) -> dict[str, Any]:
    return {
        "parallelism": {"replicas": replicas},
        "scheduler": {"max_batched_tokens": 64, "max_sequences": 8},
        "kv_cache": {"block_size": BLOCK, "capacity": {"type": "fixed", "blocks": 64}, **kv_cache},
        "timing": {"type": "fixed", "prefill_ms": 10.0, "decode_ms": 1.0},
    }


def separate(values: Mapping[str, Any], prefill: int = 2, decode: int = 2) -> dict[str, Any]:
    """The scenario on separate prefill and decode workers."""
    engine = {"mode": "disaggregated", "workers": {"prefill": worker(prefill), "decode": worker(decode)}}
    return {**values, "engine": engine}


def row(at_ms: float, ids: Sequence[int], out: int = 4, **change: Any) -> dict[str, Any]:
    return {
        "timestamp": at_ms,
        "input_length": BLOCK * len(ids),
        "output_length": out,
        "hash_ids": list(ids),
        **change,
    }
