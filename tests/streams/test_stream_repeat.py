"""Publishing the same messages over and over: a valid stream, at the pace that was asked for."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Iterator
from pathlib import Path

import attrs
import msgpack
import msgspec
import pytest
from cli_process import Cli, start_cli
from stream_cases import HOST, checked, path_of

pytest.importorskip("zmq", reason="pyzmq is not installed: pip install 'g2sim[zmq]'")

from g2sim.actors.kv.wire_vllm import Shape, batch_time_s, message_frames
from g2sim.bus.errors import ConfigError
from g2sim.scenarios import publish_streams, repeat_streams
from g2sim.scenarios.capture import CaptureWriter
from g2sim.scenarios.publish_streams import Outgoing, Publishers, outgoing
from g2sim.scenarios.repeat_streams import repeated
from g2sim.scenarios.stream_sources import MessageReader
from g2sim.scenarios.validate import Source, Validator


def made(path: Path, times: int, shape: Shape = Shape.MAP) -> list[Outgoing]:
    return list(repeated(lambda: outgoing(path, shape=shape), times, shape))


def validated(messages: list[Outgoing]) -> Validator:
    validator = Validator()
    validator.begin(Source("live", "vllm", "message"))
    readers = {item.rank: MessageReader(item.rank[0]) for item in messages}
    for number, item in enumerate(messages):
        got = readers[item.rank].read(message_frames(item.message), replayed=False)
        assert got is not None
        validator.feed(number, got)
    return validator


@pytest.mark.parametrize("shape", Shape)
def test_a_run_over_and_over_is_a_clean_stream(run_folder: Path, shape: Shape) -> None:
    wanted, _ = checked(run_folder)
    once = list(outgoing(run_folder))
    messages = made(run_folder, 3, shape)
    assert len(messages) == 3 * len(once) + 2 * 2
    validator = validated(messages)
    verdicts = validator.finish()
    assert not validator.findings.kept
    assert validator.tiers["cleared"] == 4
    for verdict in verdicts:
        assert verdict.reason is None
        of_rank = [item for item in messages if item.rank == (verdict.worker, verdict.dp_rank)]
        assert [item.message.sequence for item in of_rank] == list(range(len(of_rank)))
        times = [batch_time_s(item.message.payload) for item in of_rank]
        assert times == sorted(times)
        for tier in ("device", HOST):
            assert validator.state(verdict.worker).resident(tier) == wanted.state(verdict.worker).resident(tier)
    assert [item.time_ms for item in messages] == sorted(item.time_ms for item in messages)


def test_messages_that_are_not_kept_are_made_again(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = made(run_folder, 2)
    monkeypatch.setattr(repeat_streams, "MAX_KEPT_BYTES", 10_000)
    assert made(run_folder, 2) == wanted


def test_gaps_stay_gaps_and_a_late_start_goes_on(tmp_path: Path) -> None:
    lines = path_of("f06").read_text().splitlines(keepends=True)
    path = tmp_path / "late.jsonl"
    path.write_text(lines[1] + lines[3])
    assert [item.message.sequence for item in made(path, 3)] == [1, 3, 4, 5, 7, 8, 9, 11]


def test_a_batch_whose_time_cannot_be_moved_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "odd.g2cap"
    message = next(outgoing(path_of("f06"))).message
    odd = msgspec.structs.replace(message, payload=msgpack.packb([7, *msgpack.unpackb(message.payload)[1:]]))
    with CaptureWriter(path, version="0") as writer:
        writer.message(0.0, "w0", message_frames(odd), replayed=False)
    assert len(made(path, 1)) == 1
    with pytest.raises(ConfigError, match=r"w0, message 0: batch\[0\]"):
        made(path, 2)


@pytest.mark.parametrize(("pace", "wanted_s"), [({"rate": 4.0}, 0.75), ({"speed": 0.5}, 6.0), ({}, 0.0)])
def test_pace(pace: dict[str, float], wanted_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        now = 0.0

        def monotonic(self) -> float:
            return self.now

        def sleep(self, seconds: float) -> None:
            self.now += seconds

    clock = Clock()
    monkeypatch.setattr(publish_streams, "time", clock)
    messages = [attrs.evolve(item, time_ms=1000.0 * idx) for idx, item in enumerate(outgoing(path_of("f06")))]
    with Publishers([messages[0].rank]) as publishers:
        assert publishers.play(iter(messages), stop=lambda: False, **pace) == 4
    assert math.isclose(clock.now, wanted_s, abs_tol=1e-9)


@pytest.fixture
def publishing(run_folder: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """A publisher that would go on for a minute, and the arguments for who listens to it."""
    options = ["--port", 0, "--replay-port", 0, "--wait", 20, "--for", 60, "--rate", 4000, "--linger", 20]
    process = start_cli(tmp_path, "publish", run_folder, *options)
    try:
        assert process.stdout is not None
        rows = [process.stdout.readline().split() for _ in range(2)]
        streams = [f"{row[0].partition('/')[0]}={row[2]}" for row in rows]
        yield process, [*streams, *(word for row in rows for word in ("--replay", row[4]))]
    finally:
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=30)


def test_an_endless_stream_is_clean_as_commands(
    publishing: tuple[subprocess.Popen[str], list[str]], tmp_path: Path
) -> None:
    process, arguments = publishing
    validate = start_cli(tmp_path, "validate", *arguments, "--for", 1, "--json")
    out, err = validate.communicate(timeout=60)
    assert validate.returncode == 0, err
    value = json.loads(out)
    assert value["events_by_tier"]["cleared"] >= 2
    assert [verdict["exact"] for verdict in value["verdicts"]] == [True, True]
    assert process.poll() is None


def test_pace_is_one_of_two(g2sim: Cli) -> None:
    done = g2sim("publish", path_of("f06"), "--speed", 1, "--rate", 1)
    assert (done.returncode, "not both" in done.stderr) == (2, True)
