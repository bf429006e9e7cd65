"""The commands: validate on files, rules, what is refused, and exit codes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_process import run_cli
from stream_cases import DATA, path_of

from g2sim.scenarios import cli, live_streams
from g2sim.scenarios.capture import CaptureWriter
from g2sim.scenarios.validate_rules import RULES

Run = Callable[..., tuple[int, str, str]]
COMMANDS = ("validate", "rules", "record", "publish")


@pytest.fixture
def g2sim(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command; returns exit code, stdout and stderr."""
    for command in COMMANDS:
        monkeypatch.setitem(cli.COMMANDS, command, "g2sim.scenarios.cli_streams")

    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            cli.main([str(argument) for argument in arguments])
        text = capsys.readouterr()
        assert "Traceback" not in text.err
        return int(stop.value.code or 0), text.out, text.err

    return run


def test_a_clean_stream_is_exit_code_0(g2sim: Run) -> None:
    code, out, _ = g2sim("validate", path_of("f06"))
    assert code == 0
    assert "w0/r0: exact; 4 events; device 0, host_pinned 2" in out


def test_findings_are_exit_code_1_with_file_and_line(g2sim: Run) -> None:
    code, out, _ = g2sim("validate", path_of("f03"))
    assert code == 1
    assert f"{path_of('f03')}:5: KV401 error: w0/r0: parent 2 sits at position 1" in out


def test_notes_alone_are_exit_code_0(g2sim: Run) -> None:
    code, out, _ = g2sim("validate", path_of("f04"))
    assert code == 0
    assert "not exact since" in out


def test_json_is_one_strict_object(g2sim: Run) -> None:
    code, out, _ = g2sim("validate", path_of("f14"), "--json")
    value = json.loads(out, parse_constant=pytest.fail)
    assert code == 0
    assert value["clean"] is True
    assert value["verdicts"][0]["exact"] is True
    assert [len(value["verdicts"][0]["changes"]), value["counts"]] == [3, {"KV106 note": 1}]


def test_rules_are_chosen_by_code_family_and_name(g2sim: Run) -> None:
    assert g2sim("validate", path_of("f03"), "--ignore", "KV4")[0] == 0
    assert g2sim("validate", path_of("f03"), "--ignore", "parent")[0] == 0
    assert g2sim("validate", path_of("f03"), "--select", "position,gap")[0] == 1
    code, _, err = g2sim("validate", path_of("f03"), "--select", "KV999")
    assert code == 2
    assert "g2sim rules" in err


def test_strict_placement_and_copies_are_options(g2sim: Run) -> None:
    assert "a refused store" in g2sim("validate", path_of("f03"), "--placement", "strict")[1]
    assert "KV302 absent-removal: 2 errors" in g2sim("validate", path_of("f01"), "--copies", "logical")[1]
    assert "KV302 absent-removal: 1 error" in g2sim("validate", path_of("f01"), "--copies", "counted")[1]


def test_capacity_is_an_option(g2sim: Run) -> None:
    assert g2sim("validate", path_of("f10"), "--capacity", "host_pinned=4")[0] == 0
    assert g2sim("validate", path_of("f10_wrong"), "--capacity", "host_pinned=4")[0] == 1
    assert g2sim("validate", path_of("f10"), "--capacity", "moon=4")[0] == 2


def test_rules_are_listed(g2sim: Run) -> None:
    code, out, _ = g2sim("rules")
    assert code == 0
    assert all(rule.code in out for rule in RULES)
    assert [row["code"] for row in json.loads(g2sim("rules", "--json")[1])] == [rule.code for rule in RULES]
    assert "'CPU_TIER1'" in g2sim("rules", "--tiers")[1]


def test_codes_and_names_are_unique() -> None:
    assert len({rule.code for rule in RULES}) == len({rule.name for rule in RULES}) == len(RULES)


@pytest.mark.parametrize(
    "content",
    [b"", b"\n\n", b"hello\n", b'{"a": 1}\n', b"[1]\n", b"\x00\xff" * 50, b"\x89G2S\r\n\x1a\n", b"[" * 100_000],
    ids=["empty", "blank", "text", "other object", "array", "binary", "log header cut", "deep"],
)
def test_unusable_input_is_refused(content: bytes, g2sim: Run, tmp_path: Path) -> None:
    path = tmp_path / "stream"
    path.write_bytes(content)
    code, _, err = g2sim("validate", path)
    assert code in (1, 2)
    assert code == 2 or "G2S" in repr(content)
    assert str(path) in err


def test_a_missing_file_is_refused(g2sim: Run, tmp_path: Path) -> None:
    assert g2sim("validate", str(tmp_path / "nothing"))[0] == 2


HOSTILE = [
    b"not json",
    b'{"kind":"Stored"',
    b'{"kind":"Stored","worker_id":"w0","event_id":1,"block_hashes":[NaN]}',
    b'{"kind":"Stored","worker_id":"w0","event_id":-1,"block_hashes":[1]}',
    b'{"kind":"Stored","worker_id":"w0","event_id":1e400,"block_hashes":[1]}',
    b'{"kind":"Stored","worker_id":["w0"],"event_id":1,"block_hashes":[1]}',
    b'{"kind":"Stored","worker_id":"w0","event_id":1,"block_hashes":{"a":1}}',
    b'{"kind":"Stored","worker_id":"w0","event_id":1,"block_hashes":[true]}',
    b'{"kind":"Stored","worker_id":"w0","event_id":1,"block_hashes":["xyz"]}',
    b'{"kind":"Stored","worker_id":"w0","event_id":1,"block_hashes":[1],"start_position":-1}',
    b'{"kind":5}',
    b'{"kind":"Snapshot","worker_id":"w0","last_event_id":3,"runs":[{"block_hashes":7}]}',
    b"[" * 200_000,
    b"9" * 10_000,
    b'{"kind":"Removed"} {}',
    b"\xff\xfe",
]


def test_each_hostile_line_is_one_finding_with_its_number(g2sim: Run, tmp_path: Path) -> None:
    first = path_of("f06").read_bytes()
    path = tmp_path / "hostile.jsonl"
    path.write_bytes(first + b"".join(text + b"\n" for text in HOSTILE))
    code, out, _ = g2sim("validate", path, "--select", "KV001", "--json")
    assert code == 1
    places = [finding["where"].rpartition(":")[2] for finding in json.loads(out)["findings"]]
    assert places == [str(5 + number) for number in range(len(HOSTILE))]


def test_a_line_without_end_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, g2sim: Run) -> None:
    from g2sim.scenarios import stream_sources

    monkeypatch.setattr(stream_sources, "MAX_LINE_BYTES", 1000)
    path = tmp_path / "long.jsonl"
    path.write_bytes(path_of("f06").read_bytes() + b'{"a":"' + b"x" * 5000 + b'"}\n' + path_of("f17").read_bytes())
    code, out, _ = g2sim("validate", path)
    assert code == 1
    assert f"{path}:5: KV001 error: the line is longer than 1000 bytes" in out
    assert "w0/r3: exact" in out


def test_dynamo_lines_are_read_and_share_numbers(g2sim: Run, tmp_path: Path) -> None:
    def router_event(number: int, data: object, tier: str = "device") -> str:
        inner = {"event_id": number, "dp_rank": 0, "data": data}
        return json.dumps({"worker_id": 1, "storage_tier": tier, "residency_domain": "worker", "event": inner})

    def run(parent: int | None, *blocks: int) -> object:
        made = [{"block_hash": block, "tokens_hash": block + 1000, "mm_extra_info": None} for block in blocks]
        return {"stored": {"parent_hash": parent, "start_position": None, "blocks": made}}

    path = tmp_path / "dynamo.jsonl"
    lines = [
        router_event(0, run(None, 1, 2)),
        router_event(0, run(2, 3)),
        router_event(1, run(3, 4), "host_pinned"),
        router_event(2, {"removed": {"block_hashes": [3]}}),
    ]
    path.write_text("\n".join(lines))
    code, out, _ = g2sim("validate", path)
    assert code == 0, out
    assert "1/r0: exact; 4 events; device 2, host_pinned 1" in out
    path.write_text("\n".join([*lines, router_event(3, "cleared", "device")]))
    assert "device 0, host_pinned 0" in g2sim("validate", path)[1]


def test_several_files_are_one_stream(g2sim: Run, tmp_path: Path) -> None:
    lines = path_of("f12").read_bytes().splitlines(keepends=True)
    (tmp_path / "a").write_bytes(b"".join(lines[:5]))
    (tmp_path / "b").write_bytes(b"".join(lines[5:-2]))
    code, out, _ = g2sim("validate", tmp_path / "a", tmp_path / "b")
    assert code == 0, out


@pytest.fixture
def streams(tmp_path: Path) -> dict[str, Path]:
    """A file of each form that is no run."""
    paths = {"neutral JSON lines": path_of("f06")}
    paths["Dynamo router events"] = tmp_path / "dynamo.jsonl"
    paths["Dynamo router events"].write_text(json.dumps({"worker_id": 1, "event": {"data": "cleared"}}))
    paths["capture of g2sim record"] = tmp_path / "one.g2cap"
    with CaptureWriter(paths["capture of g2sim record"], version="0"):
        pass
    return paths


@pytest.mark.parametrize("command", ["report", "view", "timeline", "inspect", "diff", "explain", "events"])
def test_a_stream_that_is_no_run_is_refused_by_name_with_the_command_that_reads_it(
    command: str, g2sim: Run, streams: dict[str, Path], tmp_path: Path
) -> None:
    before = sorted(tmp_path.iterdir())
    for what, path in streams.items():
        more = {"diff": [path], "explain": ["0"]}.get(command, [])
        code, out, err = g2sim(command, path, *more)
        assert (code, out) == (2, "")
        assert f"{path}: this is a" in err
        assert what in err
        assert f"not a run; run g2sim validate {path}" in err
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    "arguments",
    [
        ["validate"],
        ["validate", "tcp://"],
        ["validate", "udp://127.0.0.1:1"],
        ["validate", "tcp://127.0.0.1:1", "file"],
        ["validate", "a=tcp://127.0.0.1:1", "a=tcp://127.0.0.1:2"],
        ["validate", "a=tcp://127.0.0.1:1", "--replay", "b=tcp://127.0.0.1:2"],
        ["validate", "tcp://127.0.0.1:1", "--count", "0"],
        ["validate", "x", "--copies", "twice"],
        ["validate", str(DATA / "f01.jsonl"), "--replay", "w0=tcp://127.0.0.1:2"],
        ["validate", str(DATA / "f01.jsonl"), "--from-now"],
        ["validate", str(DATA / "f01.jsonl"), "--for", "0"],
        ["validate", str(DATA / "f01.jsonl"), "--select", "KV101", "--ignore", "KV1"],
        ["record", "tcp://127.0.0.1:1"],
        ["publish", "/nowhere"],
        ["publish", str(DATA / "f01.jsonl"), "--speed", "0"],
    ],
    ids=" ".join,
)
def test_bad_usage_is_exit_code_2(arguments: list[str], g2sim: Run) -> None:
    code, _, err = g2sim(*arguments)
    assert code == 2
    assert err


def test_without_pyzmq_the_message_says_how_to_install_it(g2sim: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    for arguments in (["validate", "tcp://127.0.0.1:1"], ["record", "tcp://127.0.0.1:1", "--out", "/tmp/never"]):
        code, _, err = g2sim(*arguments)
        assert code == 2
        assert "pip install '.[zmq]'" in err
    assert g2sim("publish", path_of("f06"))[0] == 2


def test_files_are_checked_without_pyzmq(g2sim: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    assert g2sim("validate", path_of("f06"))[0] == 0
    assert live_streams.RECEIVE_QUEUE


def test_output_does_not_depend_on_the_hash_seed() -> None:
    files = sorted(DATA.glob("*.jsonl"))
    outputs = [
        run_cli(DATA, "validate", *files, "--shared-host", "--json", hash_seed=seed).stdout for seed in ("0", "1")
    ]
    assert outputs[0]
    assert outputs[0] == outputs[1]


def test_the_lines_of_events_are_told_apart_from_a_stream(g2sim: Run, tmp_path: Path) -> None:
    (tmp_path / "all.jsonl").write_text('{"record":0,"time_ms":0.0,"source":"run","cause":0,"event":"run.begin"}\n')
    code, _, err = g2sim("validate", str(tmp_path / "all.jsonl"))
    assert code == 2
    assert "all.jsonl: these are lines of g2sim events; give the run itself, or what g2sim export --kv-events" in err


def test_an_empty_file_is_called_empty(g2sim: Run, tmp_path: Path) -> None:
    (tmp_path / "none.jsonl").touch()
    code, _, err = g2sim("validate", str(tmp_path / "none.jsonl"))
    assert (code, err) == (2, f"error: {tmp_path / 'none.jsonl'}: the stream is empty\n")


def test_a_pipe_is_refused(g2sim: Run, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    writer = os.open(tmp_path / "pipe", os.O_RDWR)
    try:
        code, _, err = g2sim("validate", str(tmp_path / "pipe"))
    finally:
        os.close(writer)
    assert code == 2
    assert "is no file that can be read twice; write it to a file first" in err
