"""Malformed agentic traces: each is refused with file, line and field, and none gives anything but a ConfigError."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import agentic_cases as cases
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from g2sim.actors.traffic.agentic_mooncake import load_agentic_mooncake
from g2sim.actors.traffic.weka import load_weka
from g2sim.bus.errors import ConfigError

Row = dict[str, Any]

DEEP = "[" * 100_000 + "]" * 100_000
HUGE = "9" * 5000


def weka_request(**changes: Any) -> Row:
    return {"t": 0, "type": "s", "model": "m", "in": 8, "out": 1, "hash_ids": [1, 2]} | changes


def weka_subagent(**changes: Any) -> Row:
    inner = [weka_request(t=1.5)]
    return {
        "t": 1, "type": "subagent", "agent_id": "a", "subagent_type": "E", "status": "completed", "requests": inner
    } | changes  # fmt: skip


def weka_play(**changes: Any) -> Row:
    return {"id": "p", "block_size": 4, "hash_id_scope": "local", "requests": [weka_request()]} | changes


def header(**changes: Any) -> Row:
    source = {"format": "f", "digest": "d"}
    return {
        "schema": "dynamo.agentic_mooncake", "version": 2, "block_size": 4, "hash_id_scope": "local", "source": source
    } | changes  # fmt: skip


def node(**changes: Any) -> Row:
    return {
        "request_id": "a", "play_id": "p", "session_id": "s", "model": "m", "input_length": 8, "output_length": 2,
        "hash_ids": [1, 2], "not_before_ms": 0,
    } | changes  # fmt: skip


def edge(**changes: Any) -> Row:
    return {"request_id": "a", "trigger": "completion", "delay_ms": 1, "relation": "sequence"} | changes


def raw(row: Row, old: str, new: str) -> str:
    """A row with a piece of its text replaced, for what ``json.dumps`` would not write."""
    text = json.dumps(row)
    assert old in text
    return text.replace(old, new)


def written(path: Path, *rows: Any) -> Path:
    """A file with a line for each row: bytes and strings as they are, anything else as JSON."""
    with path.open("wb") as file:
        for row in rows:
            text = row if isinstance(row, (bytes, str)) else json.dumps(row)
            file.write((text if isinstance(text, bytes) else text.encode()) + b"\n")
    return path


def refusal_if_any(load: Callable[[Path], object], path: Path) -> ConfigError | None:
    try:
        load(path)
    except ConfigError as error:
        return error
    return None


def refusal(load: Callable[[Path], object], path: Path) -> ConfigError:
    error = refusal_if_any(load, path)
    assert error is not None
    return error


WEKA_ROWS: dict[str, tuple[Row | str | bytes, str]] = {
    "no object": ("[]", ""),
    "a number": ("3", ""),
    "cut off": (json.dumps(weka_play())[:-5], ""),
    "a comma after the object": (json.dumps(weka_play()) + ",", ""),
    "byte order mark": (b"\xef\xbb\xbf" + json.dumps(weka_play()).encode(), ""),
    "latin-1": (json.dumps(weka_play()).encode().replace(b'"p"', b'"\xe9"'), ""),
    "nested too deeply": (raw(weka_play(totals=0), '"totals": 0', f'"totals": {DEEP}'), ""),
    "NaN": (raw(weka_play(), '"t": 0', '"t": NaN'), ""),
    "Infinity in an ignored field": (raw(weka_play(totals=0), '"totals": 0', '"totals": -Infinity'), ""),
    "too many digits": (raw(weka_play(), '"t": 0', f'"t": {HUGE}'), ""),
    "id is a number": (weka_play(id=3), "id"),
    "id twice": (raw(weka_play(), '"id": "p"', '"id": "p", "id": "p"'), "id"),
    "id with half a surrogate pair": (raw(weka_play(), '"p"', '"\\ud800"'), "id"),
    "block_size is true": (weka_play(block_size=True), "block_size"),
    "block_size beyond 64 bit": (weka_play(block_size=2**64), "block_size"),
    "no hash_id_scope": ({k: v for k, v in weka_play().items() if k != "hash_id_scope"}, "hash_id_scope"),
    "models null": (weka_play(models=None), "models"),
    "models holds a blank": (weka_play(models=["m", " "]), "models[1]"),
    "models holds a number": (weka_play(models=["m", 3]), "models[1]"),
    "tool_tokens negative": (weka_play(tool_tokens=-1), "tool_tokens"),
    "system_tokens null": (weka_play(system_tokens=None), "system_tokens"),
    "requests is an object": (weka_play(requests={}), "requests"),
    "an entry is a list": (weka_play(requests=[weka_request(), []]), "requests[1]"),
    "type is a list": (weka_play(requests=[weka_request(type=["s"])]), "requests[0].type"),
    "type twice": (raw(weka_play(), '"type": "s"', '"type": "s", "type": "s"'), "requests[0].type"),
    "t is a string": (weka_play(requests=[weka_request(t="0")]), "requests[0].t"),
    "t is true": (weka_play(requests=[weka_request(t=True)]), "requests[0].t"),
    "t overflows": (raw(weka_play(), '"t": 0', '"t": 1e999'), "requests[0].t"),
    "t beyond milliseconds": (weka_play(requests=[weka_request(t=1e300)]), "requests[0].t"),
    "t is a large integer": (weka_play(requests=[weka_request(t=10**400)]), "requests[0].t"),
    "model blank": (weka_play(requests=[weka_request(model="\u00a0")]), "requests[0].model"),
    "in is a float": (weka_play(requests=[weka_request(**{"in": 8.0})]), "requests[0].in"),
    "in beyond reason": (weka_play(requests=[weka_request(**{"in": 10**18})]), "requests[0].in"),
    "out is null": (weka_play(requests=[weka_request(out=None)]), "requests[0].out"),
    "hash_ids null": (weka_play(requests=[weka_request(hash_ids=None)]), "requests[0].hash_ids"),
    "a negative hash": (weka_play(requests=[weka_request(hash_ids=[1, -1])]), "requests[0].hash_ids[1]"),
    "a hash beyond 64 bit": (weka_play(requests=[weka_request(hash_ids=[2**64])]), "requests[0].hash_ids[0]"),
    "a hash is true": (weka_play(requests=[weka_request(hash_ids=[1, True])]), "requests[0].hash_ids[1]"),
    "think_time is a string": (weka_play(requests=[weka_request(think_time="x")]), "requests[0].think_time"),
    "input_types holds a number": (weka_play(requests=[weka_request(input_types=[1])]), "requests[0].input_types[0]"),
    "stop is null": (weka_play(requests=[weka_request(stop=None)]), "requests[0].stop"),
    "agent_id is a number": (weka_play(requests=[weka_request(), weka_subagent(agent_id=3)]), "requests[1].agent_id"),
    "no subagent_type": (
        weka_play(requests=[weka_request(), {k: v for k, v in weka_subagent().items() if k != "subagent_type"}]),
        "requests[1].subagent_type",
    ),
    "duration_ms is a float": (
        weka_play(requests=[weka_request(), weka_subagent(duration_ms=1.5)]),
        "requests[1].duration_ms",
    ),
    "no inner requests": (
        weka_play(requests=[weka_request(), weka_subagent(requests=None, status="async_launched")]),
        "requests[1].requests",
    ),
    "an inner request lacks out": (
        weka_play(requests=[weka_request(), weka_subagent(requests=[{"t": 1, "type": "s", "model": "m", "in": 8}])]),
        "requests[1].requests[0].out",
    ),
    "a circle of waits": (
        weka_play(requests=[weka_request(t=5), weka_subagent(t=0, requests=[weka_request()]), weka_request(t=2)]),
        "dependencies",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WEKA_ROWS)
def test_weka_row_is_refused(name: str, tmp_path: Path) -> None:
    row, field = WEKA_ROWS[name]
    path = written(tmp_path / "trace.jsonl", weka_play(), "", row)
    error = refusal(load_weka, path)
    assert (error.where, error.field) == (f"{path}:3", field)


MOONCAKE_ROWS: dict[str, tuple[Row | str | bytes, str]] = {
    "no object": ("[]", ""),
    "cut off": (json.dumps(node(request_id="b"))[:-1], ""),
    "two on a line": (json.dumps(node(request_id="b")) * 2, ""),
    "a second header": (header(), "input_length"),
    "white space that is none in JSON": ("\x1f", ""),
    "invalid UTF-8": (b'{"request_id": "\xff"}', ""),
    "nested too deeply": (raw(node(x=0), '"x": 0', f'"x": {DEEP}'), ""),
    "NaN": (raw(node(), '"not_before_ms": 0', '"not_before_ms": NaN'), ""),
    "both spellings": (node(request_id="b", input_tokens=8), "input_tokens"),
    "a key twice": (raw(node(), '"model": "m"', '"model": "m", "model": "m"'), "model"),
    "input_length is a float": (node(input_length=8.0), "input_length"),
    "input_length null": (node(input_length=None), "input_length"),
    "no output_length": ({k: v for k, v in node().items() if k != "output_length"}, "output_length"),
    "output_length beyond reason": (node(output_length=2**62), "output_length"),
    "hash_ids null": (node(hash_ids=None), "hash_ids"),
    "a hash is a string": (node(hash_ids=[1, "2"]), "hash_ids[1]"),
    "session_id is a list": (node(session_id=["s"]), "session_id"),
    "not_before_ms is a string": (node(not_before_ms="0"), "not_before_ms"),
    "not_before_ms beyond milliseconds": (node(not_before_ms=1e17), "not_before_ms"),
    "source_play_ordinal negative": (node(source_play_ordinal=-1), "source_play_ordinal"),
    "as many ids as output tokens": (node(output_token_ids=[1]), "output_token_ids"),
    "an output token beyond 32 bit": (node(output_token_ids=[1, 2**32]), "output_token_ids[1]"),
    "priority beyond 32 bit": (node(priority=2**31), "priority"),
    "strict_priority negative": (node(strict_priority=-1), "strict_priority"),
    "policy_class is a number": (node(policy_class=1), "policy_class"),
    "dependencies null": (node(dependencies=None), "dependencies"),
    "a dependency is a string": (node(dependencies=[edge(), "a"]), "dependencies[1]"),
    "an edge without delay": (
        node(dependencies=[{k: v for k, v in edge().items() if k != "delay_ms"}]),
        "dependencies[0].delay_ms",
    ),
    "an unknown trigger": (node(dependencies=[edge(trigger="Completion")]), "dependencies[0].trigger"),
    "an unknown relation": (node(dependencies=[edge(), edge(relation="x")]), "dependencies[1].relation"),
    "an edge to nobody": (
        node(request_id="b", dependencies=[edge(), edge(request_id="z")]),
        "dependencies[1].request_id",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MOONCAKE_ROWS)
def test_agentic_mooncake_row_is_refused(name: str, tmp_path: Path) -> None:
    row, field = MOONCAKE_ROWS[name]
    path = written(tmp_path / "trace.jsonl", header(), "\t\u00a0", node(), row)
    error = refusal(load_agentic_mooncake, path)
    assert (error.where, error.field) == (f"{path}:4", field)


@pytest.mark.parametrize(
    ("first", "field"),
    [
        (header(schema="x"), "schema"),
        (header(version=2.0), "version"),
        (header(block_size=None), "block_size"),
        (header(source=[]), "source"),
        (header(source={"format": "f"}), "source.digest"),
        (header(source={"format": "\t", "digest": "d"}), "source.format"),
        (node(), "schema"),
        ("{", ""),
    ],
)
def test_agentic_mooncake_header_is_refused(first: Row | str, field: str, tmp_path: Path) -> None:
    path = written(tmp_path / "trace.jsonl", first, node())
    error = refusal(load_agentic_mooncake, path)
    assert (error.where, error.field) == (f"{path}:1", field)


def test_a_json_file_names_the_line_of_the_field(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(weka_play(requests=[weka_request(), weka_request(t=-1)]), indent=1), encoding="utf-8")
    error = refusal(load_weka, path)
    place, _, line = str(error.where).rpartition(":")
    assert place == str(path)
    assert path.read_text(encoding="utf-8").splitlines()[int(line) - 1].strip() == '"t": -1,'
    assert (error.field, error.got) == ("requests[1].t", -1)


@pytest.mark.parametrize("content", [b"", b" \n\t\n"])
@pytest.mark.parametrize(
    ("name", "load"), [("t.json", load_weka), ("t.jsonl", load_weka), ("t", load_agentic_mooncake)]
)
def test_empty_files_are_refused(name: str, load: Callable[[Path], object], content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    assert str(refusal(load, tmp_path / name).where).startswith(str(tmp_path / name))


@pytest.mark.parametrize("load", [load_weka, load_agentic_mooncake])
@pytest.mark.parametrize("name", ["missing.jsonl", "missing/trace.jsonl", "\0", "x" * 5000])
def test_paths_without_file_are_refused(load: Callable[[Path], object], name: str, tmp_path: Path) -> None:
    assert refusal(load, tmp_path / name).where == str(tmp_path / name)


def test_a_directory_is_no_agentic_mooncake_file(tmp_path: Path) -> None:
    assert refusal(load_agentic_mooncake, tmp_path).where == str(tmp_path)


def test_a_weka_directory_without_traces_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "notes.md", weka_play())
    assert refusal(load_weka, tmp_path).where == str(tmp_path)


def test_weka_symlinks_are_refused(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    real = written(corpus / "a.json", weka_play())
    for link, target in (("link.json", real), ("link", corpus)):
        (tmp_path / link).symlink_to(target)
        assert refusal(load_weka, tmp_path / link).where == str(tmp_path / link)
    for target in (real, tmp_path, tmp_path / "nothing"):
        link_inside = corpus / "notes.md"
        link_inside.symlink_to(target)
        assert refusal(load_weka, corpus).where == str(link_inside)
        link_inside.unlink()


def test_an_agentic_mooncake_symlink_is_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(written(tmp_path / "trace.jsonl", header(), node()))
    assert load_agentic_mooncake(tmp_path / "link").graph.nodes[0].request_id == "a"


def test_weka_file_names_must_be_utf8(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"\xff.json")).write_text(json.dumps(weka_play()), encoding="utf-8")
    assert refusal(load_weka, tmp_path).allowed == "a file name in UTF-8"


def test_an_empty_file_in_a_weka_directory_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "a.json", weka_play())
    (tmp_path / "b.jsonl").touch()
    assert refusal(load_weka, tmp_path).where == f"{tmp_path / 'b.jsonl'}:1"


@pytest.mark.parametrize("basis", ["", "Absolute", "not_applicable"])
def test_an_unknown_basis_is_refused(basis: str, tmp_path: Path) -> None:
    path = written(tmp_path / "trace.jsonl", weka_play())
    error = refusal(lambda path: load_weka(path, basis=basis), path)
    assert (error.field, error.got) == ("weka_nested_timestamp_basis", basis)


def test_what_looks_odd_but_is_allowed(tmp_path: Path) -> None:
    """Unknown keys, even twice; nulls where a field is optional; several objects on a line; any case of extension."""
    request = weka_request(api_time=None, ttft=None, think_time=-1, extra=[1], agent_id=3)
    marker = weka_subagent(duration_ms=None, total_tokens=None, tool_use_count=None, models=["other"])
    play = json.dumps(weka_play(requests=[request, marker], totals=None, models=[]))
    path = written(tmp_path / "trace.JSONL", play + play[:-1] + ', "x": 1, "x": 1e999}')
    assert len(load_weka(path).graph.plays) == 2
    optional = dict.fromkeys(("priority", "strict_priority", "policy_class", "output_token_ids", "source_play_ordinal"))
    row = json.dumps(node(recorded_api_time_ms=None, **optional)) + "\r"
    assert load_agentic_mooncake(written(tmp_path / "am", header(x=1), row)).graph.nodes[0].priority == 0


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.just(2**64) | st.just(10**30),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=3,
)


def spots(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(spot for key, item in items for spot in spots(item, (*path, key)))]


def replaced(value: Any, path: tuple[Any, ...], junk: Any) -> Any:
    if not path:
        return junk
    made = value.copy()
    made[path[0]] = replaced(value[path[0]], path[1:], junk)
    return made


WEKA_SAMPLE = cases.case("weka_subagent_join")["trace"]
MOONCAKE_SAMPLE = cases.case("am_edges")["trace"]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.parametrize(("sample", "load"), [(WEKA_SAMPLE, load_weka), (MOONCAKE_SAMPLE, load_agentic_mooncake)])
def test_any_replaced_value_loads_or_is_refused(
    sample: list[Row], load: Callable[[Path], object], data: st.DataObject, tmp_path: Path
) -> None:
    changed = replaced(sample, data.draw(st.sampled_from(spots(sample)[1:])), data.draw(JUNK))
    path = written(tmp_path / "trace.jsonl", *changed)
    error = refusal_if_any(load, path)
    assert error is None or str(error.where).startswith(f"{path}:")


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(start=st.integers(0, 10_000), length=st.integers(0, 40), patch=st.binary(max_size=6))
@pytest.mark.parametrize(("sample", "load"), [(WEKA_SAMPLE, load_weka), (MOONCAKE_SAMPLE, load_agentic_mooncake)])
def test_any_patched_bytes_load_or_are_refused(
    sample: list[Row], load: Callable[[Path], object], start: int, length: int, patch: bytes, tmp_path: Path
) -> None:
    path = written(tmp_path / "trace.jsonl", *sample)
    whole = path.read_bytes()
    start %= len(whole)
    path.write_bytes(whole[:start] + patch + whole[start + length :])
    error = refusal_if_any(load, path)
    assert error is None or str(error.where).startswith(f"{path}:")
