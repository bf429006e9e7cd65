"""Record random runs of session formats, generated traffic and dynamo traces with the reference (ai-dynamo 1.6.1).

Run in an environment that has it: ``python record_session_formats.py SEED... > session_formats.json``. A case is stored
with what went in and what came out, in the form that ``harness.py`` reads, so tests need neither this script nor the
reference. Fields that no rule of these formats touches are left out.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["DYN_LOG"] = "off"

Values = dict[str, Any]

ROW_FIELDS = (
    *("session_id", "turn_index", "arrival_time_ms", "first_admit_ms"),
    *("terminal_time_ms", "input_length", "output_length", "reused_input_tokens", "terminal_status"),
)
SUMMARY_FIELDS = ("num_requests", "total_input_tokens", "total_output_tokens", "duration_ms", "agentic_graph")


def engine(rng: random.Random, **settings: Any) -> Values:
    return {
        "backend": "vllm",
        "num_gpu_blocks": rng.choice([24, 40, 4000]),
        "block_size": 4,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 8192,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "kv_cache_bytes_per_token": 1000,
        "timing_model": {"type": "fixed", "prefill_ms": 2.0, "decode_ms": 1.0},
        **settings,
    }


def deployment(rng: random.Random, **settings: Any) -> Values:
    rank = engine(rng, **settings)
    if rng.random() < 0.3:
        roles = {f"{role}_engine_args": {"engine": rank | {"worker_type": role}} for role in ("prefill", "decode")}
        return {**roles, "num_prefill_workers": 1, "num_decode_workers": 1, "router_mode": "round_robin"}
    return {"extra_engine_args": {"engine": rank}, "num_workers": rng.choice([1, 1, 2]), "router_mode": "round_robin"}


def mooncake_rows(rng: random.Random) -> list[Values]:
    """Some rows of some sessions, in any order; ids are few, so that prompts meet each other and authored answers."""
    rows: list[Values] = []
    clocks = {name: float(rng.randrange(30)) for name in "abcd"}
    for _ in range(rng.randrange(3, 14)):
        name = rng.choice("abcd")
        clocks[name] += rng.randrange(20)
        hashes = [rng.randrange(6) for _ in range(rng.randrange(1, 5))]
        row: Values = {"timestamp": clocks[name], "session_id": name, "hash_ids": hashes}
        row["output_length"] = rng.choice([0, 1, 3, 9])
        if rng.random() < 0.5:
            row["input_length"] = rng.randrange(1, 4 * len(hashes) + 1)
        if rng.random() < 0.3:
            row["output_token_ids"] = [rng.randrange(4)] * row["output_length"]
        if rng.random() < 0.2:
            del row["session_id"]
        rows.append(row)
    return rows


def mooncake(rng: random.Random, trace_format: str) -> Values:
    limit = rng.choice([None, None, 30])
    call = deployment(rng, max_model_len=limit) | {"trace_block_size": 4, "trace_format": trace_format}
    call |= rng.choice([{"replay_concurrency": 2}, {"arrival_speedup_ratio": 2.0}, {}])
    return {"trace_format": trace_format, "trace": mooncake_rows(rng), "call": call}


def applied_compute(rng: random.Random) -> Values:
    rows = []
    for _ in range(rng.randrange(1, 5)):
        turns = rng.randrange(4)
        row: Values = {"num_turns": turns, "input_prompt_length": rng.randrange(1, 20)}
        row["assistant_response_length"] = [rng.randrange(6) for _ in range(turns)]
        row["tool_call_output_length"] = [rng.randrange(9) for _ in range(turns)]
        row["tool_call_latency"] = [rng.randrange(20) / 1000 for _ in range(turns)]
        row["final_assistant_response_length"] = rng.randrange(4)
        rows.append(row)
    call = deployment(rng) | {"trace_format": "applied_compute_agentic", "trace_block_size": rng.choice([3, 4, 8])}
    call |= {"replay_concurrency": rng.choice([1, 2]), "trace_num_prefix_groups": rng.choice([1, 2, 3])}
    call["trace_shared_prefix_ratio"] = rng.choice([0.0, 0.3, 0.5, 1.0])
    return {"trace_format": "applied_compute_agentic", "trace": rows, "call": call}


def synthetic(rng: random.Random) -> Values:
    shape = {"input_tokens": rng.randrange(1, 40), "output_tokens": rng.randrange(1, 5), "request_count": 12}
    call = deployment(rng)
    if rng.random() < 0.6:
        call |= {"turns_per_session": rng.randrange(1, 4), "inter_turn_delay_ms": float(rng.randrange(9))}
        call |= {"num_prefix_groups": rng.randrange(1, 5), "shared_prefix_ratio": rng.choice([0.25, 0.5, 0.7])}
    loads: list[Values] = [{"replay_concurrency": 3}, {"arrival_interval_ms": 0.0}, {"arrival_interval_ms": 3.3}]
    loads += [{"request_rate": rng.choice([0.3, 7.0, 333.3]), "arrival_seed": rng.randrange(2**64)}] * 4
    return {"trace_format": "synthetic", "synthetic": shape, "call": call | rng.choice(loads)}


def agentic_mooncake(rng: random.Random) -> Values:
    """Requests without edges whose answers are authored, so that later prompts can meet them."""
    header = {"schema": "dynamo.agentic_mooncake", "version": 2, "block_size": 4, "hash_id_scope": "local"}
    rows: list[Values] = [header | {"source": {"format": "test", "digest": "d"}}]
    for number in range(rng.randrange(2, 9)):
        hashes = [rng.randrange(4) for _ in range(rng.randrange(1, 5))]
        row: Values = {"request_id": f"r{number}", "play_id": "p", "session_id": "s", "model": "m"}
        row |= {"input_length": 4 * len(hashes), "output_length": rng.choice([0, 3, 9]), "hash_ids": hashes}
        row |= {
            "not_before_ms": float(rng.randrange(60)),
            "output_token_ids": [rng.randrange(4)] * row["output_length"],
        }
        rows.append(row)
    call = deployment(rng) | {"trace_format": "agentic_mooncake", "execution_model": "target"}
    return {"trace_format": "agentic_mooncake", "trace": rows, "call": call}


def dynamo(rng: random.Random) -> Values:
    with_sessions = rng.random() < 0.8
    parents = {name: rng.choice("abcd"[: "abcd".index(name)] + "z" * (rng.random() < 0.03)) for name in "bcd"}
    free_at = dict.fromkeys("abcd", 1000)
    names: dict[str, str] = {}
    rows: list[Values] = []
    for number in range(rng.randrange(2, 12)):
        name = "a" if number == 0 else rng.choice("abcd")
        start = free_at[name] + rng.randrange(20)
        took = rng.choice([None, 0.5, 2.5, 10.0, 14.0])
        end = start + round(took or 0) + 1
        free_at[name] = end - rng.choice([0] * 15 + [8])
        names[f"r{number}"] = name
        hashes = [rng.randrange(5) for _ in range(rng.randrange(1, 5))]
        request: Values = {"request_id": f"r{number}", "output_tokens": rng.randrange(4)}
        if rng.random() < 0.8:
            request |= {"request_received_ms": start, "model": rng.choice("mn")}
        if took is not None:
            request["total_time_ms"] = took
        length = 4 * len(hashes) - rng.randrange(4)
        request["replay"] = {"trace_block_size": 4, "input_length": length, "input_sequence_hashes": hashes}
        row: Values = {"schema": "dynamo.request.trace.v1", "event_type": "request_end"}
        row |= {"event_time_unix_ms": end, "request": request}
        if with_sessions:
            row["agent_context"] = {"session_id": name}
            if name != "a":
                row["agent_context"]["parent_session_id"] = parents[name]
        rows.append({"event": row} if rng.random() < 0.2 else row)
    if with_sessions:
        rows += [tool_call(rng, child, parents[child], names) for child in "bcd" if rng.random() < 0.5]
        rng.shuffle(rows)
    call = deployment(rng) | {"trace_format": "dynamo", "execution_model": "target"}
    if with_sessions and rng.random() < 0.3:
        call["agentic_lanes"] = rng.choice([1, 2])
    return {"trace_format": "dynamo", "trace": rows, "call": call}


def tool_call(rng: random.Random, child: str, parent: str, names: dict[str, str]) -> Values:
    """A call that ran the child's session; now and then it names requests of other sessions, or none at all."""
    asked = [request for request, name in names.items() if name == parent or rng.random() < 0.03] or ["r99"]
    source = rng.randrange(len(asked))
    claude = {"source_request_id": asked[source], "child_session_id": child}
    if source + 1 < len(asked) or rng.random() < 0.05:
        claude["consumer_request_id"] = asked[-1]
    claude["execution_mode"] = rng.choice(["blocking", "background"])
    tool = {"tool_call_id": "t", "tool_class": "agent", "claude": claude}
    tool |= {"started_at_unix_ms": 1000, "ended_at_unix_ms": 1001}
    row = {"schema": "dynamo.request.trace.v1", "event_type": rng.choice(["tool_end", "tool_error"])}
    return row | {"event_time_unix_ms": 1001, "agent_context": {"session_id": parent}, "tool": tool}


KINDS: tuple[Callable[[random.Random], Values], ...] = (
    lambda rng: mooncake(rng, "mooncake-delta"),
    lambda rng: mooncake(rng, "mooncake"),
    applied_compute,
    synthetic,
    agentic_mooncake,
    dynamo,
    dynamo,
)


def drawn(seed: int) -> Values:
    rng = random.Random(seed)
    case = {"seed": seed} | KINDS[seed % len(KINDS)](rng)
    case["call"] = {key: value for key, value in case["call"].items() if value is not None}
    return case


def recorded(seed: int) -> Values:
    from dynamo.replay import run_synthetic_trace_replay, run_trace_replay

    case = drawn(seed)
    call = case["call"] | {"capture_per_request": True}
    try:
        if "synthetic" in case:
            report = run_synthetic_trace_replay(**case["synthetic"], **call)
        else:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "trace.jsonl"
                path.write_text("".join(json.dumps(row) + "\n" for row in case["trace"]), encoding="utf-8")
                report = run_trace_replay([str(path)], **call)
    except Exception as error:
        return case | {"condition": str(error).replace(folder, "") if "trace" in case else str(error)}
    fields = (*ROW_FIELDS, "request_id", "play_id") if "agentic_graph" in report.summary else ROW_FIELDS
    rows = [{key: row[key] for key in fields if key in row} for row in report.per_request]
    case["expected"] = {
        "summary": {key: report.summary[key] for key in SUMMARY_FIELDS if key in report.summary},
        "per_request": sorted(rows, key=lambda row: (row["arrival_time_ms"], json.dumps(row, sort_keys=True))),
    }
    return case


if __name__ == "__main__":
    cases = (json.dumps(recorded(int(seed)), separators=(",", ":")) for seed in sys.argv[1:])
    sys.stdout.write("[" + ",\n".join(cases) + "]\n")
