"""A publisher that begins anew, and what is lost behind its last message, as the commands tell of them."""

from __future__ import annotations

import json
import signal
import threading
import time
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli_process import start_cli
from stream_cases import checked

pytest.importorskip("zmq", reason="pyzmq is not installed: pip install 'g2sim[zmq]'")

import zmq

from g2sim.actors.kv.wire import STORED, EngineFields, StreamEvent
from g2sim.actors.kv.wire_vllm import Batch, Message, encode_batch, message_frames
from g2sim.scenarios import live_streams
from g2sim.scenarios.live_streams import Endpoint, Listener
from g2sim.scenarios.publish_streams import Publisher
from g2sim.scenarios.stream_sources import MessageReader
from g2sim.scenarios.validate import Source, Validator, Verdict


def message(life: int, number: int, *, ts_s: float = 0.0) -> Message:
    """A batch that stores one block of its own."""
    block = 1000 * life + number
    engine = EngineFields(token_ids=array("I", [block, 0]), block_size=2)
    event = StreamEvent(kind=STORED, medium="GPU", hashes=(block,), engine=engine)
    payload = encode_batch(Batch(ts_s=ts_s or float(block), events=(event,), dp_rank=0))
    return Message(topic=b"", sequence=number, payload=payload)


class Deployment:
    """Two publishers, of which the second gives no replay socket to its listeners, and one command that listens."""

    def __init__(self, folder: Path, command: str, *options: object) -> None:
        self._context = zmq.Context()
        self.publishers = [Publisher(self._context, "127.0.0.1") for _ in range(2)]
        first, second = self.publishers
        streams = [f"w0={first.endpoint}", f"w1={second.endpoint}", "--replay", f"w0={first.replay_endpoint}"]
        self.process = start_cli(folder, command, *streams, *options)
        self.meet()

    def meet(self) -> None:
        self.serve(30, lambda: all(publisher.subscribers for publisher in self.publishers))

    def send(self, life: int, numbers: Iterable[int], lost: Iterable[int] = ()) -> None:
        for number in numbers:
            for publisher in self.publishers:
                publisher.send(message(life, number), lose=number in set(lost))

    def serve(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.process.poll() is None and not until():
            for publisher in self.publishers:
                publisher.serve(1)

    def restart(self) -> None:
        self.serve(0.3)  # real time: what was sent has to reach another process
        ports = [int(p.endpoint.rpartition(":")[2]) for p in self.publishers]
        replay_ports = [int(p.replay_endpoint.rpartition(":")[2]) for p in self.publishers]
        self.close()
        self._context = zmq.Context()
        self.publishers = [
            Publisher(self._context, "127.0.0.1", port=port, replay_port=replay_port)
            for port, replay_port in zip(ports, replay_ports, strict=True)
        ]
        self.meet()

    def end(self) -> tuple[int, str]:
        """Ctrl-C; returns the command's exit code and output."""
        self.serve(0.3)
        self.process.send_signal(signal.SIGINT)
        self.serve(30)
        out, err = self.process.communicate(timeout=30)
        assert "Traceback" not in err, err
        return self.process.returncode, out

    def close(self) -> None:
        for publisher in self.publishers:
            publisher.close()
        self._context.destroy(0)

    def __enter__(self) -> Deployment:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()
        self.close()


def told(verdict: dict[str, Any]) -> tuple[bool, int, list[int], bool | None, int]:
    return (
        verdict["exact"],
        verdict["last_event_id"],
        verdict["restarts"],
        verdict["tail_confirmed"],
        verdict["unknown_ids"],
    )


def test_a_restart_is_noticed_when_its_first_batches_are_lost(tmp_path: Path) -> None:
    with Deployment(tmp_path, "validate", "--json") as deployment:
        deployment.send(1, range(6))
        deployment.restart()
        deployment.send(2, range(5), lost=[0, 1])
        code, out = deployment.end()
    value = json.loads(out)
    assert (code, value["counts"]) == (1, {"KV104 error": 2, "KV105 note": 1})
    fetched, not_fetched = value["verdicts"]
    assert told(fetched) == (True, 4, [5], True, 0)
    assert fetched["blocks"]["device"] == 5
    assert told(not_fetched) == (False, 4, [5], False, 2)
    assert value["streams"][0]["replayed"] - value["streams"][0]["copies"] == 2


def test_a_loss_behind_the_last_message_is_found_in_silence_and_at_the_end(tmp_path: Path) -> None:
    with Deployment(tmp_path, "validate") as deployment:
        deployment.send(1, range(6), lost=[4, 5])
        deployment.serve(30, lambda: 3 in deployment.publishers[0].asked)  # in silence, from the last one on
        deployment.send(1, [6], lost=[6])
        code, out = deployment.end()
    assert code == 0
    assert out.splitlines()[-2:] == [
        "w0/r0: exact; 7 events; device 7, host_pinned 0",
        "w1/r0: exact up to id 3 (not known what came after it); 4 events; device 4, host_pinned 0",
    ]


def test_a_capture_tells_the_same_as_the_listening(tmp_path: Path) -> None:
    capture = tmp_path / "live.g2cap"
    with Deployment(tmp_path, "record", "--out", capture) as deployment:
        deployment.send(1, range(3))
        deployment.restart()
        deployment.send(2, range(6), lost=[0, 5])
        assert deployment.end()[0] == 0
    validator, verdicts = checked(capture)
    assert sorted(finding.code for finding in validator.findings.kept) == ["KV104", "KV104", "KV105"]
    fetched, not_fetched = verdicts
    assert (fetched.reason, fetched.last_event_id, fetched.restarts, fetched.tail_confirmed) == (None, 5, [2], True)
    assert (not_fetched.last_event_id, not_fetched.restarts, not_fetched.tail_confirmed) == (4, [2], False)
    capture.write_bytes(capture.read_bytes()[:-150])  # without its end, nothing is known of the tail
    assert [verdict.tail_confirmed for verdict in checked(capture)[1]] == [False, False]


def test_a_listener_that_was_held_up_takes_what_is_queued_before_it_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    held_up_s = 0.0
    monkeypatch.setattr(live_streams, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + held_up_s))
    context = zmq.Context()
    first, second = publishers = [Publisher(context, "127.0.0.1", history=2) for _ in range(2)]
    endpoints = [
        Endpoint(name=f"w{idx}", live=p.endpoint, replay=p.replay_endpoint) for idx, p in enumerate(publishers)
    ]
    try:
        with Listener(endpoints, threading.Event(), for_s=30, replay_timeout_s=0.1) as listener:
            while not all(publisher.subscribers for publisher in publishers):
                for publisher in publishers:
                    publisher.serve(1)
            first.send(message(1, 0))
            got = listener.messages()
            assert next(got).endpoint.name == "w0"
            held_up_s = 10.0
            for number in range(5):
                second.send(message(1, number))
            assert next(got).endpoint.name == "w1"
            second.serve(100)
            assert second.asked == []
    finally:
        for publisher in publishers:
            publisher.close()
        context.destroy(0)


def test_a_stream_of_which_something_waits_is_neither_silent_nor_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_streams, "SILENCE_S", 0.0)
    monkeypatch.setattr(live_streams, "_HANDED_OUT", 1)
    context = zmq.Context()
    publisher = Publisher(context, "127.0.0.1")
    endpoint = Endpoint(name="w0", live=publisher.endpoint, replay=publisher.replay_endpoint)
    try:
        for count, heard, asked in ((2, 2, set[int]()), (None, 5, {4})):
            with Listener([endpoint], threading.Event(), for_s=0.5, count=count, replay_timeout_s=0.1) as listener:
                (stream,) = listener._streams.values()
                for number in range(5):
                    stream.put(message_frames(message(1, number)))
                assert len(list(listener.messages())) == heard
                publisher.serve(100)
            assert set(publisher.asked) == asked
    finally:
        publisher.close()
        context.destroy(0)


# -- by numbers alone


def fed(*messages: Message) -> tuple[list[str], Verdict]:
    reader, validator = MessageReader("w0"), Validator()
    validator.begin(Source("live", "vllm", "message"))
    for number, given in enumerate(messages):
        item = reader.read(message_frames(given), replayed=False)
        assert item is not None
        validator.feed(number, item)
    (verdict,) = validator.finish()
    return [finding.code for finding in validator.findings.kept], verdict


def test_a_number_that_is_not_above_the_last_is_a_restart() -> None:
    for number in range(3):
        codes, verdict = fed(*(message(1, n) for n in range(3)), message(2, number))
        assert codes == ["KV104", "KV105"][: 1 + (number > 0)]
        assert (verdict.last_event_id, verdict.blocks["device"], verdict.unknown_ids) == (number, 1, number)
        assert (verdict.reason is None) == (number == 0)


def test_the_same_message_again_is_a_repeat_and_one_of_another_time_is_not() -> None:
    assert fed(message(1, 0), message(1, 1), message(1, 1))[0] == ["KV102"]
    codes, verdict = fed(message(1, 0), message(1, 1), message(1, 1, ts_s=7.0))
    assert (codes, verdict.restarts) == (["KV104", "KV105"], [1])


def test_what_is_lost_for_good_is_counted_over_restarts() -> None:
    codes, verdict = fed(message(1, 2), message(1, 5), message(1, 9), message(2, 1), message(2, 4))
    assert sorted(codes) == ["KV101", "KV101", "KV101", "KV104", "KV105", "KV105"]
    assert (verdict.lost_ids, verdict.unknown_ids, verdict.restarts) == (2 + 3 + 2, 2 + 1, [9])
