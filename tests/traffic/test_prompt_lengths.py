"""What ``g2sim check`` says of prompts that fit nowhere is what the run then does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_process import LIBRARY, run_cli

from g2sim.actors.traffic.events import RequestArrived
from g2sim.actors.worker.events import RequestEnded
from g2sim.bus.events import Record
from g2sim.scenarios.check import check_file
from g2sim.scenarios.run import run_scenario
from g2sim.scenarios.schema import Scenario, load_scenario
from g2sim.scenarios.traffic_source import open_traffic

SESSIONS = {
    "type": "synthetic-session",
    "new_input_tokens_per_turn": 7,
    "output_tokens_per_turn": 1,
    "session": {"turns": 4, "accumulate": True},
}
ROWS = [
    {"session_id": "a", "timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [1, 2, 3]},
    {"session_id": "a", "delay": 1, "input_length": 8, "output_length": 1, "hash_ids": [4, 5]},
    {"session_id": "a", "delay": 1, "input_length": 4, "output_length": 1, "hash_ids": [6]},
    {
        "session_id": "b",
        "timestamp": 2,
        "input_length": 30,
        "output_length": 1,
        "hash_ids": [7, 8, 9, 10, 11, 12, 13, 14],
    },
]


def scenario_file(folder: Path, source: dict[str, Any], *, blocks: int, context: int | None, apart: bool) -> Path:
    (folder / "t.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    worker = {
        "context_length": context,
        "kv_cache": {"block_size": 4, "capacity": {"type": "fixed", "blocks": blocks}},
        "timing": {"type": "fixed", "prefill_ms": 2.0, "decode_ms": 1.0},
    }
    timed = source["type"] == "trace"
    load = {"type": "trace_timestamps"} if timed else {"type": "poisson", "sessions_per_second": 300.0}
    roles = ("prefill", "decode") if apart else ("aggregated",)
    values = {
        "engine": {"mode": "disaggregated" if apart else "aggregated", "workers": dict.fromkeys(roles, worker)},
        "traffic": {"source": source, "load": load, "stop": {} if timed else {"sessions": 3}},
    }
    path = folder / "s.json"
    path.write_text(json.dumps(values))
    return path


def lengths_and_rejected(scenario: Scenario) -> tuple[list[int], list[int]]:
    """Prompt lengths [tokens] of a run, and those of them that were rejected."""
    tokens: dict[int, int] = {}
    rejected: list[int] = []

    def look(record: Record) -> None:
        if isinstance(record.event, RequestArrived):
            tokens[record.event.request] = record.event.input_tokens
        elif isinstance(record.event, RequestEnded) and record.event.status == "rejected":
            rejected.append(tokens[record.event.request])

    run_scenario(scenario, None, on_record=look)
    return sorted(tokens.values()), sorted(rejected)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(("blocks", "context"), [(64, None), (8, None), (7, None), (4, None), (2, None), (64, 17)])
@pytest.mark.parametrize("kind", ["mooncake", "mooncake-delta", "synthetic-session"])
def test_the_note_counts_what_the_run_rejects(
    tmp_path: Path, kind: str, blocks: int, context: int | None, apart: bool
) -> None:
    source = SESSIONS if kind == "synthetic-session" else {"type": "trace", "format": kind, "paths": ["t.jsonl"]}
    if source is not SESSIONS:
        source["block_size"] = 4
    path = scenario_file(tmp_path, source, blocks=blocks, context=context, apart=apart)
    lengths, rejected = lengths_and_rejected(load_scenario(path))
    notes = check_file(path).notes
    if not rejected:
        assert notes == ()
        return
    (note,) = notes
    head = f"{len(rejected)} of {len(lengths)} requests can never run on {'prefill' if apart else 'aggregated'} workers"
    assert note.startswith(f"{head}; the largest has {rejected[-1]} prompt tokens: ")


@pytest.mark.parametrize("name", ["chats-private-g2", "generated-chats", "agentx-g2-shared", "subagent-fan-out"])
def test_prompts_are_as_long_as_in_the_run(name: str) -> None:
    scenario = load_scenario(LIBRARY / f"{name}.yaml")
    answering = scenario.deployment.pools[-1].rank
    lengths, rejected = lengths_and_rejected(scenario)
    assert rejected == []
    assert sorted(open_traffic(scenario).prompt_tokens(answering.answer_tokens)) == lengths


def test_a_note_is_no_error(tmp_path: Path) -> None:
    path = scenario_file(tmp_path, SESSIONS, blocks=2, context=None, apart=False)
    done = run_cli(tmp_path, "check", path)
    assert done.returncode == 0
    assert done.stdout == f"{path}: ok, scenario s, 0 expectations\n"
    assert done.stderr.startswith(
        f"note: {path}: 9 of 12 requests can never run on aggregated workers; the largest has "
    )
    assert done.stderr.endswith(" blocks, and the G1 of a rank has 2\n")
