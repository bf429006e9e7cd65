"""Workloads that are timed on the reference and on g2sim, in the form of the recorded cases (``tests/oracle``).

Fixed pass times of 20 / 8 ms, blocks of 16 tokens, 2,000 GPU blocks a worker, links of 32 GB/s and a pool of 80 GB/s.
The plays have blocks of 64 tokens, as public Weka traces have: with 16 their longest prompts would not fit.
The Mooncake conversations have 8,192 GPU blocks for the same reason; with 2,000 the reference ends with an error.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Case = dict[str, Any]
TURNS = 4
PLAY_BLOCK = 64
MAX_PLAY_BLOCKS = 1_560
"""Longest prompt of a play: some 100k tokens."""


def rank(host_blocks: int, scope: str, **more: Any) -> dict[str, Any]:
    """Arguments of one rank, as the reference takes them."""
    host = {
        "num_host_blocks": host_blocks,
        "scope": scope,
        "d2h_bandwidth_gbps": 32.0,
        "h2d_bandwidth_gbps": 32.0,
        "shared_d2h_bandwidth_gbps": 80.0,
        "shared_h2d_bandwidth_gbps": 80.0,
        "latency_to_first_byte_ms": 0.0,
        "kv_layout_id": "x",
    }
    engine = {
        "backend": "vllm",
        "num_gpu_blocks": 2000,
        "block_size": 16,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 8192,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "kv_cache_bytes_per_token": 131072,
        "timing_model": {"type": "fixed", "prefill_ms": 20.0, "decode_ms": 8.0},
        "native_host_offload": host,
    }
    return {"engine": engine | more}


SHARED = rank(20_000, "cluster_shared")
PRIVATE = rank(5_000, "dp_rank_local")


def session_rows(sessions: int, shift_ms: float = 0.0) -> list[dict[str, Any]]:
    """Mooncake rows of sessions that begin 250 ms apart, with 4 turns whose prompts grow by 1,024 tokens.

    Args:
        shift_ms: moves each turn by this much more than the one before, so that no two requests arrive at once.
    """
    rows = []
    next_id = 1
    for session in range(sessions):
        ids: list[int] = []
        for turn in range(TURNS):
            ids += range(next_id, next_id + 2)
            next_id += 2
            rows.append(
                {
                    "timestamp": session * 250 + turn * (6000 + shift_ms),
                    "input_length": 1024 * (turn + 1),
                    "output_length": 256,
                    "hash_ids": list(ids),
                }
            )
    return sorted(rows, key=lambda row: row["timestamp"])


def grouped_rows(sessions: int) -> list[dict[str, Any]]:
    """Mooncake rows of sessions of 4 turns a second apart; half of each 1,024-token prompt is one of 16 prefixes."""
    rows = []
    for session in range(sessions):
        for turn in range(TURNS):
            row: dict[str, Any] = {
                "session_id": f"s{session}",
                "input_length": 1024,
                "output_length": 256,
                "hash_ids": [session % 16, 16 + session * TURNS + turn],
            }
            rows.append(row | ({"delay": 1000} if turn else {"timestamp": 0}))
    return rows


def plays(count: int, seed: int = 8) -> list[dict[str, Any]]:
    """Weka plays of 60 to 150 requests: contexts grow from some 15k to at most 100k tokens, and some have subagents."""
    rng = random.Random(seed)
    return [_play(rng, f"play-{number}") for number in range(count)]


def _play(rng: random.Random, name: str) -> dict[str, Any]:
    left = rng.randint(60, 150)
    clock_s = 0.0
    ids = itertools.count(1)
    context: list[int] = []
    entries: list[dict[str, Any]] = []
    while left > 0:
        grown = rng.randint(4, 30) if context else rng.randint(200, 300)
        if len(context) + grown > MAX_PLAY_BLOCKS:
            del context[rng.randint(200, 400) :]
        context += itertools.islice(ids, grown)
        entries.append(_call(rng, clock_s, context))
        left -= 1
        clock_s = round(clock_s + entries[-1]["api_time"] + rng.uniform(0.5, 10), 3)
        if rng.random() < 0.08 and (calls := min(left, rng.randint(3, 12))):
            entries.append(_subagent(rng, clock_s, f"agent-{len(entries)}", calls, ids))
            left -= calls
            clock_s = round(clock_s + entries[-1]["duration_ms"] / 1000 + 0.5, 3)
    return {"id": name, "models": ["m"], "block_size": PLAY_BLOCK, "hash_id_scope": "local", "requests": entries}


def _subagent(rng: random.Random, t_s: float, name: str, calls: int, ids: Iterator[int]) -> dict[str, Any]:
    clock_s = t_s
    context: list[int] = []
    inner: list[dict[str, Any]] = []
    for _ in range(calls):
        context += itertools.islice(ids, rng.randint(4, 60) if context else rng.randint(100, 200))
        inner.append(_call(rng, clock_s, context))
        clock_s = round(clock_s + inner[-1]["api_time"] + rng.uniform(0.5, 4), 3)
    return {
        "t": t_s,
        "type": "subagent",
        "agent_id": name,
        "subagent_type": "Explore",
        "status": "completed",
        "duration_ms": round((clock_s - t_s) * 1000),
        "requests": inner,
    }


def _call(rng: random.Random, t_s: float, context: list[int]) -> dict[str, Any]:
    tokens = PLAY_BLOCK * len(context) - rng.randrange(PLAY_BLOCK)
    output = rng.randint(60, 900)
    return {
        "t": t_s,
        "type": "n",
        "model": "m",
        "in": tokens,
        "out": output,
        "hash_ids": list(context),
        "api_time": output / 64,  # a pace of 64 tokens a second
    }


def _aggregated(arguments: dict[str, Any], router: str, workers: int = 4) -> dict[str, Any]:
    return {
        "extra_engine_args": arguments,
        "num_workers": workers,
        "router_mode": router,
        "trace_block_size": 512,
    }


def _separate(**more: Any) -> dict[str, Any]:
    """Two prefill and two decode workers on one pool, with a hand-off at 50 GB/s."""
    call: dict[str, Any] = {"router_mode": "round_robin"}
    handoff = {"kv_transfer_bytes_per_token": 131072, "kv_transfer_bandwidth": 50.0} | more
    for role in ("prefill", "decode"):
        arguments = rank(20_000, "cluster_shared", worker_type=role, **handoff)
        call |= {f"{role}_engine_args": arguments, f"num_{role}_workers": 2}
    return call


def cases(mooncake: Path | None = None) -> dict[str, Case]:
    """The workloads by number; 7 only with ``mooncake``, the head of the public conversation trace."""
    closed_loop = _aggregated(SHARED, "round_robin") | {"replay_concurrency": 32}
    sessions, apart = session_rows(400), session_rows(400, shift_ms=0.25)
    found = {
        "1": _case("short sessions, closed loop of 32", closed_loop, grouped_rows(400)),
        "2": _case("Mooncake sessions, shared", _aggregated(SHARED, "round_robin"), sessions),
        "3": _case("as 2, KV router", _aggregated(SHARED, "kv_router"), apart),
        "4": _case("as 2, private tiers", _aggregated(PRIVATE, "round_robin"), sessions),
        "5": _case("as 2, 2 prefill + 2 decode", _separate() | {"trace_block_size": 512}, sessions),
        "6": _case("10,000 requests, KV router", _aggregated(SHARED, "kv_router", 8), session_rows(2500, 0.25)),
    }
    lanes = _separate(block_size=PLAY_BLOCK) | {"agentic_lanes": 8, "execution_model": "m"}
    found["8"] = {**_case("agentic plays on 8 lanes, 2P2D", lanes, plays(16)), "trace_format": "weka"}
    if mooncake is not None:
        rows = [json.loads(line) for line in mooncake.read_text(encoding="utf-8").splitlines()]
        roomy = rank(20_000, "cluster_shared", num_gpu_blocks=8192)
        found["7"] = _case("Mooncake conversations", _aggregated(roomy, "round_robin"), rows)
    return found


def _case(name: str, call: dict[str, Any], trace: list[dict[str, Any]]) -> Case:
    return {"name": name, "call": call, "trace_format": "mooncake", "trace": trace}
