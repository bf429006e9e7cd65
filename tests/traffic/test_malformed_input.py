"""Malformed traces of every format through the command line: exit code 2, one message with file and line, no output."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from g2sim.scenarios.cli import main

Row = dict[str, Any]
Content = list[Row | str] | bytes

MOONCAKE: Row = {"timestamp": 0, "input_length": 8, "output_length": 2, "hash_ids": [1, 2], "session_id": "s"}
APPLIED: Row = {
    "num_turns": 1,
    "input_prompt_length": 10,
    "assistant_response_length": [3],
    "tool_call_output_length": [5],
    "tool_call_latency": [0.5],
    "final_assistant_response_length": 4,
}
HEADER: Row = {"schema": "dynamo.agentic_mooncake", "version": 2, "block_size": 4, "hash_id_scope": "local"}
HEADER |= {"source": {"format": "test", "digest": "d"}}
NODE: Row = {"request_id": "a", "play_id": "p", "session_id": "s", "model": "m", "input_length": 8, "output_length": 2}
NODE |= {"hash_ids": [1, 2], "not_before_ms": 0.0}
PLAY: Row = {"id": "p", "block_size": 4, "hash_id_scope": "local"}
PLAY |= {"requests": [{"t": 0, "type": "s", "model": "m", "in": 8, "out": 1, "hash_ids": [1, 2]}]}


def record(request_id: str = "a", start_ms: int = 0, session: str | None = None, **changes: Any) -> Row:
    request = {"request_id": request_id, "output_tokens": 2, "request_received_ms": start_ms, "total_time_ms": 10}
    request |= {"replay": {"trace_block_size": 4, "input_length": 8, "input_sequence_hashes": [1, 2]}}
    row: Row = {"schema": "dynamo.request.trace.v1", "event_type": "request_end", "event_time_unix_ms": start_ms + 10}
    row |= {"request": request | changes.pop("request", {})} | changes
    return row if session is None else row | {"agent_context": {"session_id": session}}


def tool(source: str, child: str = "t", context: str = "s", **claude: Any) -> Row:
    row: Row = {"schema": "dynamo.request.trace.v1", "event_type": "tool_end", "agent_context": {"session_id": context}}
    return row | {"tool": {"claude": {"source_request_id": source, "child_session_id": child, **claude}}}


def edge(request_id: str) -> Row:
    return {"request_id": request_id, "trigger": "completion", "delay_ms": 0, "relation": "sequence"}


def replay(**changes: Any) -> Row:
    sample: Row = record()["request"]["replay"]
    return {"replay": sample | changes}


VALID: dict[str, list[Row]] = {
    "mooncake": [MOONCAKE],
    "mooncake-delta": [MOONCAKE],
    "applied_compute_agentic": [APPLIED],
    "agentic_mooncake": [HEADER, NODE],
    "weka": [PLAY],
    "dynamo": [record()],
}

EVERY: dict[str, Callable[[list[Row]], Content]] = {
    "cut off": lambda rows: (json.dumps(rows[-1])[:-2]).encode(),
    "NaN": lambda rows: [*rows[:-1], json.dumps(rows[-1])[:-1] + ', "x": NaN}'],
    "an integer of 5,000 digits": lambda rows: [*rows[:-1], json.dumps(rows[-1])[:-1] + f', "x": {"9" * 5000}}}'],
    "a list": lambda rows: [*rows[:-1], "[1, 2]"],
    "a number": lambda rows: [*rows[:-1], "7"],
    "nested too deeply": lambda rows: [*rows[:-1], json.dumps(rows[-1])[:-1] + f', "x": {"[" * 100_000}'],
    "UTF-16": lambda rows: "\n".join(map(json.dumps, rows)).encode("utf-16"),
    "Latin-1": lambda rows: json.dumps(rows[-1] | {"x": "ä"}, ensure_ascii=False).encode("latin-1"),
    "a byte order mark": lambda rows: b"\xef\xbb\xbf" + json.dumps(rows[0]).encode(),
    "bytes that are no text": lambda rows: bytes(range(128, 256)),
    "zeros": lambda rows: bytes(100),
    "empty": lambda rows: b"",
    "blank lines": lambda rows: b"\n \n\t\n",
    "10 MB in one line": lambda rows: b'{"x": "' + b"a" * 10_000_000,
    "a comma too many": lambda rows: [*rows[:-1], json.dumps(rows[-1])[:-1] + ",}"],
}
"""Damage that any format can have."""

ROWS: dict[str, dict[str, tuple[Content, int]]] = {
    "mooncake": {
        "a negative hash": ([MOONCAKE, MOONCAKE | {"hash_ids": [-1, 2]}], 2),
        "a hash beyond 64 bit": ([MOONCAKE, MOONCAKE | {"hash_ids": [2**64, 2]}], 2),
        "a length that is true": ([MOONCAKE | {"input_length": True}], 1),
        "a length beyond reason": ([MOONCAKE | {"output_length": 10**12}], 1),
        "a length that is text": ([MOONCAKE | {"output_length": "2"}], 1),
        "an infinite timestamp": ([json.dumps(MOONCAKE).replace('"timestamp": 0', '"timestamp": 1e999')], 1),
        "a timestamp that is text": ([MOONCAKE, "", MOONCAKE | {"timestamp": "1"}], 3),
        "a session that is a list": ([MOONCAKE | {"session_id": []}], 1),
        "a field twice": ([json.dumps(MOONCAKE)[:-1] + ', "output_length": 3}'], 1),
        "two objects on a line": ([json.dumps(MOONCAKE) * 2], 1),
        "hashes too few for the length": ([MOONCAKE | {"input_length": 2000}], 1),
    },
    "mooncake-delta": {
        "an authored token beyond 32 bit": ([MOONCAKE | {"output_token_ids": [1, 2**32]}], 1),
        "authored tokens of another number": ([MOONCAKE, MOONCAKE | {"output_token_ids": [1]}], 2),
        "time that goes back": ([MOONCAKE | {"timestamp": 5}, MOONCAKE], 2),
        "a first row with a delay": ([MOONCAKE | {"delay": 1.5}], 1),
    },
    "applied_compute_agentic": {
        "an array too long": ([APPLIED, APPLIED | {"tool_call_latency": [0.5, 0.5]}], 2),
        "an array that is null": ([APPLIED | {"assistant_response_length": None}], 1),
        "a latency below zero": ([APPLIED | {"tool_call_latency": [-0.5]}], 1),
        "a latency beyond milliseconds": ([APPLIED | {"tool_call_latency": [1e306]}], 1),
        "a latency that is text": ([APPLIED | {"tool_call_latency": ["1"]}], 1),
        "a prompt of nothing": ([APPLIED | {"input_prompt_length": 0}], 1),
        "a conversation beyond reason": ([APPLIED | {"tool_call_output_length": [10_000_000]}], 1),
        "turns that are a float": ([APPLIED | {"num_turns": 1.0}], 1),
        "no final answer": ([{key: value for key, value in APPLIED.items() if not key.startswith("final")}], 1),
    },
    "agentic_mooncake": {
        "an id twice": ([HEADER, NODE, NODE], 3),
        "a cycle": (
            [HEADER, NODE | {"dependencies": [edge("b")]}, NODE | {"request_id": "b", "dependencies": [edge("a")]}],
            2,
        ),
        "an edge to nobody": ([HEADER, NODE | {"dependencies": [edge("z")]}], 2),
        "no header": ([NODE], 1),
    },
    "weka": {
        "a subagent in a subagent": ([PLAY, PLAY | {"requests": [{"type": "subagent", "t": 0}]}], 2),
        "another block size": ([PLAY, PLAY | {"block_size": 8}], 2),
    },
    "dynamo": {
        "another schema": ([record(schema="dynamo.request.trace.v2")], 1),
        "an unknown event": ([record(), record(event_type="request_start")], 2),
        "an id twice": ([record(), record()], 2),
        "no time of the event": ([record(event_time_unix_ms=None)], 1),
        "a start that is a float": ([record(request={"request_received_ms": 1.5})], 1),
        "a service time below zero": ([record(request={"total_time_ms": -1})], 1),
        "no output tokens": ([record(request={"output_tokens": None})], 1),
        "no replay": ([record(request={"replay": None})], 1),
        "hashes too few": ([record(request=replay(input_length=9))], 1),
        "hashes too many for a graph": ([record(session="s", request=replay(input_length=4))], 1),
        "two block sizes": ([record(), record("b", request=replay(trace_block_size=8))], 2),
        "a context on some": ([record(), record("b", session="s")], 2),
        "a session that is blank": ([record(session=" ")], 1),
        "turns that overlap": ([record(session="s"), record("b", 5, session="s")], 2),
        "an unknown parent": ([record(agent_context={"session_id": "s", "parent_session_id": "z"})], 1),
        "a tool call of nobody": ([record(session="s"), tool("z")], 2),
        "a tool call of another session": ([record(session="s"), record("b", session="t"), tool("b")], 3),
        "a tool that ran in no known way": ([record(session="s"), tool("a", execution_mode="x")], 2),
        "a child older than its call": (
            [
                record(start_ms=50, session="s"),
                record("b", 5, agent_context={"session_id": "t", "parent_session_id": "s"}),
                tool("a"),
            ],
            2,
        ),
        "no request at all": ([tool("a")], 1),
    },
}
"""Rows that only one format can have, and the line at fault."""

CASES = [(name, damage, make(rows), None) for name, rows in VALID.items() for damage, make in EVERY.items()]
CASES += [(name, what, content, line) for name, rows in ROWS.items() for what, (content, line) in rows.items()]


def scenario(folder: Path, trace_format: str, path: str = "trace.jsonl", **load: Any) -> Path:
    kind = "concurrency" if trace_format == "applied_compute_agentic" else "trace_timestamps"
    worker = {
        "parallelism": {"replicas": 1},
        "kv_cache": {"block_size": 4, "capacity": {"type": "fixed", "blocks": 64}},
        "timing": {"type": "fixed", "prefill_ms": 2.0, "decode_ms": 1.0},
    }
    values = {
        "engine": {"mode": "aggregated", "model": "m", "workers": {"aggregated": worker}},
        "traffic": {
            "source": {"type": "trace", "paths": [path], "format": trace_format},
            "load": {"type": kind, **load},
        },
    }
    file = folder / "scenario.json"
    file.write_text(json.dumps(values), encoding="utf-8")
    return file


def write(path: Path, content: Content) -> None:
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        lines = (row if isinstance(row, str) else json.dumps(row) for row in content)
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


Refused = Callable[[Path], str]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """Runs a scenario; gives the one message with which it is refused."""

    def call(file: Path) -> str:
        before = sorted(file.parent.iterdir())
        with pytest.raises(SystemExit) as stop:
            main(["run", str(file), "--out", str(file.parent / "out"), "--quiet"])
        shown = capsys.readouterr()
        assert (stop.value.code, shown.out) == (2, "")
        assert sorted(file.parent.iterdir()) == before
        assert shown.err.startswith("error: ")
        assert shown.err.count("\n") == 1
        return shown.err.removeprefix("error: ")

    return call


@pytest.mark.parametrize(
    ("trace_format", "content", "line"),
    [pytest.param(name, content, line, id=f"{name}: {what}") for name, what, content, line in CASES],
)
def test_a_malformed_trace_is_refused_with_file_and_line(
    trace_format: str, content: Content, line: int | None, tmp_path: Path, refused: Refused
) -> None:
    write(tmp_path / "trace.jsonl", content)
    message = refused(scenario(tmp_path, trace_format))
    place = f"{tmp_path / 'trace.jsonl'}:"
    assert message.startswith(f"{place}{'' if line is None else f'{line}: '}"), message
    assert message[len(place)].isdigit()
    assert len(message) < 1000


@pytest.mark.parametrize("trace_format", VALID)
def test_what_is_varied_above_is_accepted_as_it_stands(trace_format: str, tmp_path: Path) -> None:
    write(tmp_path / "trace.jsonl", list(VALID[trace_format]))
    arguments = ["run", str(scenario(tmp_path, trace_format)), "--out", str(tmp_path / "out"), "--quiet"]
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 0


@pytest.mark.parametrize("trace_format", VALID)
@pytest.mark.parametrize("path", ["missing.jsonl", "missing/trace.jsonl", ".", "x" * 5000, "\0"])
def test_what_is_no_file_is_refused(trace_format: str, path: str, tmp_path: Path, refused: Refused) -> None:
    message = refused(scenario(tmp_path, trace_format, path))
    assert str(tmp_path) in message
    assert len(message) < 1000


@pytest.mark.parametrize(
    ("content", "load"),
    [
        ([record(session="s")], {"type": "concurrency"}),
        ([record()], {"agentic_lanes": 1}),
    ],
)
def test_a_load_that_does_not_go_with_what_a_dynamo_trace_holds(
    content: Content, load: Row, tmp_path: Path, refused: Refused
) -> None:
    write(tmp_path / "trace.jsonl", content)
    assert "agent_context" in refused(scenario(tmp_path, "dynamo", **load))
