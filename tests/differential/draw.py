"""Random deployments and traffic, in the recorded form that ``tests/oracle/run.py`` reads.

A case is drawn from its seed alone. The space is wider than the recordings: any pool shapes and sizes, every host tier
arrangement, data parallel ranks, sessions, closed loops, limits, odd bandwidths, pools smaller than a prompt, ties.
"""

from __future__ import annotations

import random
from typing import Any

Case = dict[str, Any]

BLOCK_BYTES = 1_000_000


def draw(seed: int) -> Case:
    """The case of a seed."""
    g = random.Random(f"differential:{seed}")
    bs = g.choice([2, 4, 4, 4, 8])
    separate = g.random() < 0.5
    call: dict[str, Any] = {"trace_block_size": g.choice([bs, bs, bs, bs * 2, 3, 5]), "router_mode": "round_robin"}
    dp = g.choice([1, 1, 1, 1, 2, 3])
    workers = _workers(g)
    if separate:
        prefill, decode = _rank(g, bs), _rank(g, bs)
        _host_tiers(g, bs, prefill, decode)
        _transfer(g, prefill)
        _transfer(g, decode)
        call |= {
            "prefill_engine_args": {"engine": prefill | {"worker_type": "prefill"}, "dp_size": dp},
            "decode_engine_args": {"engine": decode | {"worker_type": "decode"}, "dp_size": g.choice([dp, dp, 1])},
            "num_prefill_workers": workers,
            "num_decode_workers": _workers(g),
        }
        blocks = min(prefill["num_gpu_blocks"], decode["num_gpu_blocks"])
    else:
        rank = _rank(g, bs)
        _host_tiers(g, bs, rank)
        call |= {"extra_engine_args": {"engine": rank, "dp_size": dp}, "num_workers": workers}
        blocks = rank["num_gpu_blocks"]
    trace = _trace(g, bs * blocks, call["trace_block_size"])
    if g.random() < 0.2:
        call["replay_concurrency"] = g.choice([1, 2, 3, 8])
    elif g.random() < 0.2:
        call["arrival_speedup_ratio"] = g.choice([0.5, 2.0, 3.7])
    if g.random() < 0.1:
        call["max_sim_time_ms"] = g.choice([0.0, 3.0, 20.5, 100.0])
    if g.random() < 0.2:
        call |= g.choice(
            [{"sla_ttft_ms": 12.5, "sla_itl_ms": 1.5}, {"sla_e2e_ms": 40.0}, {"sla_ttft_ms": 3.0}, {"sla_itl_ms": 0.9}]
        )
    return {"why": f"drawn from seed {seed}", "trace": trace, "trace_format": "mooncake", "call": call}


def _workers(g: random.Random) -> int:
    return g.choice([1, 1, 2, 2, 3, 4, g.randrange(5, 13)])


def _rank(g: random.Random, bs: int) -> dict[str, Any]:
    rank: dict[str, Any] = {
        "backend": "vllm",
        "num_gpu_blocks": g.choice([3, 4, 5, 6, 8, 10, 14, 20, 40]),
        "block_size": bs,
        "max_num_seqs": g.choice([1, 2, 3, 4, 8, None]),
        "max_num_batched_tokens": g.choice([bs, bs + 1, 2 * bs, 4 * bs, 16 * bs, None]),
        "enable_prefix_caching": True,
        "enable_chunked_prefill": g.random() < 0.85,
        "preemption_mode": g.choice(["lifo", "lifo", "fifo"]),
    }
    if g.random() < 0.6:
        rank["timing_model"] = {
            "type": "fixed",
            "prefill_ms": g.choice([0.0, 0.5, 1.0, 2.0, 3.3]),
            "decode_ms": g.choice([0.0, 0.25, 0.7, 1.0]),
        }
    else:
        rank["timing_model"] = {"type": "polynomial"}
    if g.random() < 0.3:
        rank["speedup_ratio"] = g.choice([0.0, 0.5, 1.7, 3.0])
        rank["decode_speedup_ratio"] = g.choice([0.0, 1.0, 0.3, 2.5])
    if g.random() < 0.1:
        rank["max_model_len"] = g.choice([bs, 3 * bs + 1, 8 * bs])
    return rank


def _host_tiers(g: random.Random, bs: int, *ranks: dict[str, Any]) -> None:
    """Give no, some or all ranks a host tier; shared ones agree on everything that must agree."""
    kind = g.choice(["none", "private", "shared", "shared", "mixed"])
    if kind == "none":
        if g.random() < 0.15:
            for rank in ranks:
                rank["enable_prefix_caching"] = g.random() < 0.3
        return
    pool = {
        "num_host_blocks": g.choice([1, 2, 3, 4, 6, 8, 16, 32]),
        "shared_d2h_bandwidth_gbps": _bandwidth(g),
        "shared_h2d_bandwidth_gbps": _bandwidth(g),
        "kv_layout_id": "layout",
    }
    for rank in ranks:
        scope = {"private": "dp_rank_local", "shared": "cluster_shared"}.get(kind)
        if scope is None:
            scope = g.choice(["dp_rank_local", "cluster_shared", None])
        if scope is None:
            continue
        rank["kv_cache_bytes_per_token"] = BLOCK_BYTES // bs
        rank["native_host_offload"] = pool | {
            "scope": scope,
            "d2h_bandwidth_gbps": _bandwidth(g),
            "h2d_bandwidth_gbps": _bandwidth(g),
            "latency_to_first_byte_ms": g.choice([0.0, 0.0, 0.3, 0.5, 1.0]),
        }
        if scope == "dp_rank_local" and g.random() < 0.5:
            rank["native_host_offload"]["num_host_blocks"] = g.choice([1, 2, 5, 9, 20])


def _bandwidth(g: random.Random) -> float:
    return g.choice([0.0, 0.25, 0.3, 0.5, 1.0, 1.0, 1.7, 4.0, 50.0])


def _transfer(g: random.Random, rank: dict[str, Any]) -> None:
    if g.random() < 0.4:
        return
    rank["kv_transfer_bytes_per_token"] = g.choice([250_000, 100_000, 1, None])
    rank["kv_transfer_bandwidth"] = g.choice([0.0, 0.3, 0.5, 1.0, 7.0])
    rank["kv_transfer_timing_mode"] = g.choice(["full_prompt", "destination_missing"])


def _trace(g: random.Random, pool_tokens: int, trace_block: int) -> list[dict[str, Any]]:
    families = [[g.randrange(1000) for _ in range(12)] for _ in range(g.choice([1, 2, 3, 5]))]
    most = max(1, min(12, pool_tokens // trace_block + g.choice([-2, -1, 0, 1])))
    sessions = [f"s{k}" for k in range(g.choice([2, 4, 8]))] if g.random() < 0.5 else []
    rows: list[dict[str, Any]] = []
    started: set[str] = set()
    at = 0.0
    for _ in range(g.randrange(1, 26)):
        ids = g.choice(families)[: g.randrange(1, most + 1)]
        if g.random() < 0.3:
            ids = [*ids[: g.randrange(len(ids) + 1)], g.randrange(2000, 9000)]
        tokens = g.randrange((len(ids) - 1) * trace_block + 1, len(ids) * trace_block + 1)
        room = max(0, pool_tokens - tokens)
        output = g.choice([0, 1, 1, 2, 3, 5, 9, 17])
        if g.random() < 0.95:
            output = min(output, room)
        row: dict[str, Any] = {
            "timestamp": round(at, 3),
            "input_length": tokens,
            "output_length": output,
            "hash_ids": ids,
        }
        if sessions:
            session = g.choice(sessions)
            row["session_id"] = session
            if session in started and g.random() < 0.6:
                row["delay"] = g.choice([0, 0.0, 1.5, 7.25, 40.0])
            started.add(session)
        rows.append(row)
        at += g.choice([0.0, 0.0, 0.001, 0.1, 0.5, 1.0, 2.0, 3.7, 10.0, 40.0])
    if not sessions and g.random() < 0.2:
        g.shuffle(rows)
    return rows
