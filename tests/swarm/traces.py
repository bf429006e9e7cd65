"""Small random traces of every format, as the objects of their lines. Times are short: plays last milliseconds."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import attrs
from record_weka_random import corpus

Values = dict[str, Any]

OUTPUTS = (0, 1, 1, 2, 3, 5, 9)


@attrs.frozen
class Trace:
    """Lines of a trace; ``block_size`` is what a scenario has to say of its blocks, None if the lines say it."""

    rows: list[Values]
    format: str
    block_size: int | None = None


def weka(g: random.Random, block_size: int) -> Trace:
    """Plays with subagents, of the kind whose graph digests were recorded, at a hundredth of their times."""
    rows = corpus(g.randrange(2**32))
    scale = g.choice([0.001, 0.01, 0.01])
    for row in rows:
        row["block_size"] = block_size
        for entry in row["requests"]:
            for one in (entry, *entry.get("requests", ())):
                one["t"] *= scale
                if "api_time" in one:
                    one["api_time"] *= scale
                if "out" in one:
                    one["out"] = min(one["out"], g.choice(OUTPUTS))
                    one["in"] = max(1, block_size * len(one["hash_ids"]) - g.randrange(block_size))
            if "duration_ms" in entry:
                entry["duration_ms"] = round(entry["duration_ms"] * scale)
    return Trace(rows, "weka")


def agentic_mooncake(g: random.Random, block_size: int) -> Trace:
    """Plays of a root session and others that it spawns, some of which join it again."""
    header = {"schema": "dynamo.agentic_mooncake", "version": 2, "block_size": block_size, "hash_id_scope": "local"}
    rows: list[Values] = [header | {"source": {"format": "swarm", "digest": "d"}}]
    gap_ms = g.choice([0.0, 0.5, 5.0, 20.0])
    common = [g.randrange(50) for _ in range(3)]
    for play in range(g.choice([1, 1, 2, 3])):
        at_ms = g.choice([0.0, 0.0, g.uniform(0.0, 30.0)])
        last: dict[str, Values] = {}
        for number in range(g.randrange(1, 8)):
            session = g.choice([*last, f"p{play}-s{len(last)}"])
            before = last.get(session)
            edges = []
            ids: list[int] = common[: g.randrange(4)]
            if before is not None:
                edges.append(_edge(g, before, "completion", "sequence", gap_ms))
                ids = before["hash_ids"]
                for other in last.values():
                    if other is not before and g.random() < 0.4:
                        edges.append(_edge(g, other, "completion", "join", gap_ms))
            elif last:
                parent = g.choice(list(last.values()))
                edges.append(_edge(g, parent, g.choice(["dispatch", "completion"]), "spawn", gap_ms))
            ids = ids[: g.randrange(len(ids) + 1)] if g.random() < 0.15 else ids  # a compaction
            ids = [*ids, *(g.randrange(50, 999) for _ in range(g.randrange(0 if ids else 1, 3)))]
            at_ms += g.choice([0.0, gap_ms, 2.5 * gap_ms])
            last[session] = {
                "request_id": f"p{play}-r{number}",
                "play_id": f"p{play}",
                "session_id": session,
                "model": g.choice(["m", "m", "n"]),
                "input_length": len(ids) * block_size - g.randrange(block_size),
                "output_length": g.choice(OUTPUTS),
                "hash_ids": ids,
                "not_before_ms": at_ms,
                "recorded_api_time_ms": g.choice([0.0, 1.0, 4.5]),
                "dependencies": edges,
            }
            rows.append(last[session])
    return Trace(rows, "agentic_mooncake")


def _edge(g: random.Random, source: Values, trigger: str, relation: str, gap_ms: float) -> Values:
    delay_ms = g.choice([0.0, 0.0, gap_ms])
    return {"request_id": source["request_id"], "trigger": trigger, "relation": relation, "delay_ms": delay_ms}


def dynamo_plays(g: random.Random, block_size: int) -> Trace:
    """Records of sessions of agents; a child session runs beside a request of its parent."""
    rows: list[Values] = []
    at_ms = 1_000

    def session(name: str, parent: str | None, at_ms: int, ids: list[int], depth: int) -> int:
        for _ in range(g.randrange(1, 4)):
            ids = [*ids, *(g.randrange(900) for _ in range(g.randrange(0 if ids else 1, 3)))]
            took_ms = g.choice([1, 1, 3, 8])
            rows.append(_dynamo_row(g, block_size, f"r{len(rows)}", ids, at_ms, took_ms))
            rows[-1]["agent_context"] = {"session_id": name} | ({"parent_session_id": parent} if parent else {})
            end_ms = at_ms + took_ms
            if depth < 2 and g.random() < 0.3:
                end_ms = max(end_ms, session(f"{name}.{len(rows)}", name, at_ms + g.choice([0, 1]), ids, depth + 1))
            at_ms = end_ms + g.choice([0, 1, 10])
        return at_ms

    for play in range(g.choice([1, 1, 2])):
        at_ms = session(f"s{play}", None, at_ms, [], 0)
    return Trace(rows, "dynamo")


def dynamo_requests(g: random.Random, block_size: int) -> Trace:
    """Records of independent requests."""
    rows, families, at_ms = [], [[g.randrange(900) for _ in range(6)] for _ in range(3)], 0
    for number in range(g.randrange(1, 16)):
        at_ms += g.choice([0, 0, 1, 4])
        ids = g.choice(families)[: g.randrange(1, 7)]
        rows.append(_dynamo_row(g, block_size, f"r{number}", ids, at_ms, g.choice([0, 2])))
    return Trace(rows, "dynamo")


def _dynamo_row(g: random.Random, block_size: int, name: str, ids: list[int], at_ms: int, took_ms: int) -> Values:
    length = len(ids) * block_size - g.randrange(block_size)
    replay = {"trace_block_size": block_size, "input_length": length, "input_sequence_hashes": ids}
    times = {"request_received_ms": at_ms, "total_time_ms": took_ms}
    return {
        "schema": "dynamo.request.trace.v1",
        "event_type": "request_end",
        "event_time_unix_ms": at_ms + took_ms,
        "request": {"request_id": name, "model": "m", "output_tokens": g.choice(OUTPUTS), **times, "replay": replay},
    }


def applied_compute(g: random.Random, block_size: int) -> Trace:
    """Sessions of an agent that calls tools."""
    rows = []
    for _ in range(g.randrange(1, 7)):
        turns = g.randrange(0, 4)
        rows.append(
            {
                "num_turns": turns,
                "input_prompt_length": g.randrange(1, 5 * block_size),
                "assistant_response_length": [g.choice(OUTPUTS) for _ in range(turns)],
                "tool_call_output_length": [g.randrange(2 * block_size) for _ in range(turns)],
                "tool_call_latency": [g.choice([0.0, 0.001, 0.02]) for _ in range(turns)],
                "final_assistant_response_length": g.choice(OUTPUTS),
            }
        )
    return Trace(rows, "applied_compute_agentic", block_size)


def mooncake_delta(g: random.Random, block_size: int) -> Trace:
    """Conversations whose rows hold what their turn adds."""
    rows: list[Values] = []
    at_ms = 0.0
    started: set[str] = set()
    for _ in range(g.randrange(1, 14)):
        session = f"s{g.randrange(4)}"
        ids = [g.randrange(30 if session not in started else 900) for _ in range(g.randrange(1, 3))]
        length = len(ids) * block_size - g.randrange(block_size)
        row = {"timestamp": at_ms, "input_length": length, "output_length": g.choice(OUTPUTS), "hash_ids": ids}
        row["session_id"] = session
        if session in started and g.random() < 0.7:
            row["delay"] = g.choice([0.0, 1.5, 12.0])
        started.add(session)
        rows.append(row)
        at_ms += g.choice([0.0, 0.5, 3.0])
    return Trace(rows, "mooncake-delta", block_size)


PLAYS: dict[str, Callable[[random.Random, int], Trace]] = {
    "weka": weka,
    "agentic_mooncake": agentic_mooncake,
    "dynamo plays": dynamo_plays,
}
"""Traces of plays, by name."""

SESSIONS: dict[str, Callable[[random.Random, int], Trace]] = {
    "dynamo requests": dynamo_requests,
    "applied_compute_agentic": applied_compute,
    "mooncake-delta": mooncake_delta,
}
"""Traces of requests and sessions, by name; plain Mooncake rows are drawn by the differential test."""
