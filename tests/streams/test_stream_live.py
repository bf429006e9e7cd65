"""Live streams on loopback: publish, listen, fetch what was lost, record, and end with a verdict."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_process import start_cli
from stream_cases import HOST, checked, path_of

pytest.importorskip("zmq", reason="pyzmq is not installed: pip install 'g2sim[zmq]'")

from g2sim.actors.kv.wire_vllm import ReplayLayout, Shape, decode_batch, message_frames
from g2sim.bus.errors import ConfigError
from g2sim.scenarios.capture import MessageCaptured
from g2sim.scenarios.live_streams import Endpoint, Listener
from g2sim.scenarios.publish_streams import Publisher, Publishers, outgoing, ranks_of, standin_tokens
from g2sim.scenarios.stream_sources import MessageReader
from g2sim.scenarios.validate import BatchArrived, Source, Validator


@contextlib.contextmanager
def playing(
    path: Path, *, lose: Callable[[int], bool] = lambda _: False, **options: Any
) -> Iterator[list[tuple[tuple[str, int], str, str]]]:
    """Publishes a file in a thread as soon as every rank has a subscriber, and answers replays until left."""
    ready, stop = threading.Event(), threading.Event()
    places: list[tuple[tuple[str, int], str, str]] = []
    failures: list[BaseException] = []

    def publish() -> None:
        try:
            with Publishers(ranks_of(path), **options) as publishers:
                places.extend((rank, p.endpoint, p.replay_endpoint) for rank, p in publishers.by_rank.items())
                ready.set()
                publishers.serve(10, lambda: stop.is_set() or all(p.subscribers for p in publishers.by_rank.values()))
                for number, item in enumerate(outgoing(path)):
                    publishers.by_rank[item.rank].send(item.message, lose=lose(number))
                    for publisher in publishers.by_rank.values():
                        publisher.serve()
                publishers.serve(30, stop.is_set)
        except BaseException as error:
            failures.append(error)
            ready.set()

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        assert ready.wait(10)
        yield places
    finally:
        stop.set()
        thread.join(20)
    assert not thread.is_alive()
    assert not failures


def listened(places: list[tuple[tuple[str, int], str, str]], count: int, *, replay: bool = True) -> Validator:
    endpoints = [
        Endpoint(name=f"{worker}", live=live, replay=again if replay else None) for (worker, _), live, again in places
    ]
    validator = Validator()
    validator.begin(Source("live", "vllm", "message"))
    readers = {endpoint.name: MessageReader(endpoint.name) for endpoint in endpoints}
    with Listener(endpoints, threading.Event(), for_s=20, count=count) as listener:
        for number, got in enumerate(listener.messages()):
            item = readers[got.endpoint.name].read(got.frames, replayed=got.replayed)
            assert item is not None
            validator.feed(number, item)
    return validator


def test_what_is_published_is_what_the_run_log_says(run_folder: Path) -> None:
    wanted, _ = checked(run_folder)
    total = sum(1 for _ in outgoing(run_folder))
    with playing(run_folder) as places:
        validator = listened(places, total)
    verdicts = validator.finish()
    assert not validator.findings.kept
    assert [verdict.reason for verdict in verdicts] == [None, None]
    for worker in ("aggregated-0", "aggregated-1"):
        for tier in ("device", HOST):
            assert validator.state(worker).resident(tier) == wanted.state(worker).resident(tier)


@pytest.mark.parametrize("layout", ReplayLayout)
def test_what_is_lost_is_fetched_from_the_replay_socket(run_folder: Path, layout: ReplayLayout) -> None:
    wanted, _ = checked(run_folder)
    total = sum(1 for _ in outgoing(run_folder))
    lost = {3, 4, 5, 20, total // 2}
    with playing(run_folder, lose=lambda number: number in lost, layout=layout) as places:
        validator = listened(places, total - len(lost))
    validator.finish()
    assert not validator.findings.kept  # fetched before what showed the loss, so nothing was out of order
    assert validator.state("aggregated-0").resident(HOST) == wanted.state("aggregated-0").resident(HOST)


def test_without_a_replay_socket_a_loss_is_a_gap(run_folder: Path) -> None:
    total = sum(1 for _ in outgoing(run_folder))
    with playing(run_folder, lose=lambda number: number == 3) as places:
        validator = listened(places, total - 1, replay=False)
    verdicts = validator.finish()
    assert [f.code for f in validator.findings.kept if f.severity != "note"] == ["KV101"]
    assert sum(verdict.reason is not None for verdict in verdicts) == 1


def test_a_late_listener_asks_for_what_came_before() -> None:
    import zmq

    context = zmq.Context()
    publisher = Publisher(context, "127.0.0.1")
    messages = [item.message for item in outgoing(path_of("f06"))]
    for message in messages[:3]:
        publisher.send(message)
    stop, done = threading.Event(), threading.Event()

    def publish() -> None:
        while not stop.is_set() and not publisher.subscribers:
            publisher.serve(5)
        publisher.send(messages[3])
        while not stop.is_set():
            publisher.serve(5)
        done.set()

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        validator = listened([(("w0", 0), publisher.endpoint, publisher.replay_endpoint)], 1)
    finally:
        stop.set()
        thread.join(10)
        publisher.close()
        context.destroy(0)
    assert done.is_set()
    assert publisher.asked[0] == 0
    assert validator.state("w0").exact
    assert validator.state("w0").match([1, 2, 3], HOST) == 2


def test_history_is_bounded() -> None:
    import zmq

    context = zmq.Context()
    publisher = Publisher(context, "127.0.0.1", history=2)
    try:
        for item in outgoing(path_of("f06")):
            publisher.send(item.message)
        assert [message.sequence for message in publisher._kept] == [2, 3]
    finally:
        publisher.close()
        context.destroy(0)


def test_a_malformed_message_is_a_finding_and_not_a_crash() -> None:
    reader = MessageReader("w0")
    validator = Validator()
    validator.begin(Source("live", "vllm", "message"))
    good = next(outgoing(path_of("f06"))).message
    frames = [message_frames(good), [b""], [b"", b"\0" * 8, b"garbage"], [b"", b"short", b""]]
    for number, given in enumerate(frames):
        item = reader.read(given, replayed=False)
        assert item is not None
        validator.feed(number, item)
    assert [f.code for f in validator.findings.kept] == ["KV001"] * 3
    assert "message 1" in validator.findings.kept[0].where


def test_the_topic_of_llm_d_names_the_worker() -> None:
    message = next(outgoing(path_of("f06"))).message
    item = MessageReader("socket").read([b"kv@pod-7@model", *message_frames(message)[1:]], replayed=False)
    assert isinstance(item, BatchArrived)
    assert item.worker_id == "pod-7"


def test_standin_tokens_are_one_to_one_and_known_tokens_are_kept() -> None:
    assert standin_tokens(2**64 - 1, 4) == [2**32 - 1, 2**32 - 1, 0, 0]
    assert standin_tokens(1, 2) != standin_tokens(2**32, 2)
    with pytest.raises(ConfigError):
        standin_tokens(1, 1)
    batch = decode_batch(next(outgoing(path_of("f22"), shape=Shape.ARRAY)).message.payload)
    assert batch.events[0].engine is not None
    assert batch.events[0].engine.token_ids.tolist() == list(range(8))


def test_publish_record_and_validate_work_as_commands(run_folder: Path, tmp_path: Path) -> None:
    capture = tmp_path / "live.g2cap"
    publish = start_cli(tmp_path, "publish", run_folder, "--port", 0, "--replay-port", 0, "--wait", 20, "--linger", 0.5)
    record: subprocess.Popen[str] | None = None
    try:
        assert publish.stdout is not None
        rows = [publish.stdout.readline().split() for _ in range(2)]
        streams = [f"{row[0].partition('/')[0]}={row[2]}" for row in rows]
        assert all("127.0.0.1" in stream for stream in streams)
        replays = [word for row in rows for word in ("--replay", row[4])]
        total = sum(1 for _ in outgoing(run_folder))
        record = start_cli(tmp_path, "record", *streams, *replays, "--out", capture, "--count", total, "--for", 30)
        _, err = record.communicate(timeout=60)
        assert record.returncode == 0, err
        assert publish.communicate(timeout=60)[1].strip().endswith("batches sent")
        assert publish.returncode == 0
    finally:
        for process in (publish, record):
            if process is not None and process.poll() is None:
                process.kill()
                process.communicate()
    validator, verdicts = checked(capture)
    assert not validator.findings.kept
    assert len(verdicts) == 2
    again = list(outgoing(capture))
    assert sorted(item.message.payload for item in again) == sorted(
        item.message.payload for item in outgoing(run_folder)
    )
    cut = tmp_path / "cut.g2cap"
    cut.write_bytes(capture.read_bytes()[:-100])
    assert [f.code for f in checked(cut)[0].findings.kept if f.severity == "error"] == ["KV002"]


def test_ctrl_c_ends_with_a_full_verdict(tmp_path: Path) -> None:
    with playing(path_of("f06")) as places:
        process = start_cli(tmp_path, "validate", f"w0={places[0][1]}", "--replay", places[0][2], "--json")
        try:
            assert process.stderr is not None
            assert "Ctrl-C" in process.stderr.readline()
            time.sleep(1.0)  # real time: another process has to receive what is sent
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=30)
        finally:
            if process.poll() is None:
                process.kill()
                process.communicate()
    assert process.returncode == 0, err
    (verdict,) = json.loads(out)["verdicts"]
    assert (verdict["exact"], verdict["events"]) == (True, 4)


def test_a_capture_does_not_change_what_a_run_log_describes() -> None:
    from g2sim.bus.events import BY_CLASS, BY_TAG

    assert MessageCaptured not in BY_CLASS
    assert not any(tag.startswith("cap.") for tag in BY_TAG)
