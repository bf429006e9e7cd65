"""Builds requests and scenarios for these tests, so that a test shows only what differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from g2sim.actors.router.bench import (
    BLOCK,
    Streams,
    agentic,
    chain_of,
    cleared,
    pool,
    removed,
    request,
    router,
    stored,
    who,
)
from g2sim.actors.router.policy import Placement
from g2sim.actors.router.state import Decision, Placed

__all__ = [
    "BLOCK",
    "Streams",
    "agentic",
    "at",
    "chain_of",
    "cleared",
    "pool",
    "rank_of",
    "removed",
    "request",
    "router",
    "row",
    "run_values",
    "separate",
    "stored",
    "who",
    "worker",
]


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
