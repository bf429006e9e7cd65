"""Publishers, replay sockets and subscribers that mean harm: what they send is bounded and counted."""

from __future__ import annotations

import contextlib
import json
import random
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from stream_cases import path_of

pytest.importorskip("zmq", reason="pyzmq is not installed: pip install 'g2sim[zmq]'")

import zmq

from g2sim.actors.kv.wire_vllm import message_frames, replay_request
from g2sim.scenarios import live_streams
from g2sim.scenarios.live_streams import Endpoint, Listener
from g2sim.scenarios.publish_streams import Publisher, outgoing

GOOD = [message_frames(item.message) for item in outgoing(path_of("f06"))]
MEMORY_BYTES = 1536 * 2**20


@contextlib.contextmanager
def sending(send: Callable[[Any, threading.Event], None], kind: int) -> Iterator[str]:
    """A socket of a kind in a thread that sends as it likes; gives its address."""
    context, stop = zmq.Context(), threading.Event()
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 10)
    socket.setsockopt(zmq.SNDTIMEO, 200)
    if kind == zmq.XPUB:
        socket.setsockopt(zmq.XPUB_NODROP, 1)  # it waits for a slow reader, so that all arrives
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    thread = threading.Thread(target=send, args=(socket, stop))
    thread.start()
    try:
        yield f"tcp://127.0.0.1:{port}"
    finally:
        stop.set()
        thread.join()
        context.destroy(0)


def send_all(socket: Any, stop: threading.Event, messages: list[list[bytes]]) -> None:
    """Sends to the first subscriber; one that is slow is waited for."""
    while not socket.poll(50):
        if stop.is_set():
            return
    for message in messages:
        while not stop.is_set():
            try:
                socket.send_multipart(message)
            except zmq.Again:
                continue
            break


def noise(count: int) -> list[list[bytes]]:
    """Messages of wrong parts and random bytes, some of which begin as a batch does."""
    rng = random.Random(1)
    made = []
    for _ in range(count):
        frames = [rng.randbytes(rng.choice((0, 1, 8, 300))) for _ in range(rng.choice((1, 2, 3, 3, 4, 50)))]
        if len(frames) == 3 and rng.random() < 0.7:
            frames[1] = bytes(8)
            frames[2] = rng.choice((b"\x93\x00", b"\xdd\xff\xff\xff\xff", b"\x91" * 900, b"")) + frames[2]
        made.append(frames)
    return made


def test_noise_is_counted_and_what_is_good_in_it_is_checked() -> None:
    messages = [*noise(500), *GOOD]
    with sending(lambda socket, stop: send_all(socket, stop, messages), zmq.XPUB) as address:
        command = [sys.executable, "-m", "g2sim.scenarios.cli", "validate", f"w0={address}", "--from-now", "--json"]
        done = subprocess.run(
            [*command, "--count", str(len(messages))], capture_output=True, text=True, check=False, timeout=60
        )
    assert done.returncode == 1, done.stderr
    value = json.loads(done.stdout)
    assert value["counts"]["KV001 error"] == 500
    assert value["items"] >= len(GOOD)
    assert "Traceback" not in done.stderr


def test_a_flood_of_large_messages_fits_into_little_memory() -> None:
    """1.2 GB of batches that take long to read, to a reader that may have 1.5 GiB of address space with its code."""
    payload = b"\x93\x00\xdd\x00\x01\x00\x00" + b"\xc0" * 65_536 + b"\xc0" + b"\x00" * 4_000_000
    messages = [[b"", idx.to_bytes(8, "big"), payload] for idx in range(300)]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))

    with sending(lambda socket, stop: send_all(socket, stop, messages), zmq.XPUB) as address:
        command = [sys.executable, "-m", "g2sim.scenarios.cli", "validate", f"w0={address}", "--from-now", "--json"]
        done = subprocess.run(
            [*command, "--count", "300"], capture_output=True, text=True, check=False, timeout=100, preexec_fn=limit
        )
    assert done.returncode == 2, done.stderr
    assert json.loads(done.stdout)["counts"]["KV001 error"] == 300


def test_messages_wait_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing more is taken from a socket while as much waits as may."""
    monkeypatch.setattr(live_streams, "MAX_WAITING_BYTES", 50_000)
    messages = [[b"", idx.to_bytes(8, "big"), bytes(10_000)] for idx in range(100)]
    sent = threading.Event()

    def send(socket: Any, stop: threading.Event) -> None:
        send_all(socket, stop, messages)
        sent.set()

    with (
        sending(send, zmq.XPUB) as address,
        Listener([Endpoint(name="w0", live=address)], threading.Event(), count=100) as listener,
    ):
        (stream,) = listener._streams.values()
        assert sent.wait(30)
        time.sleep(0.3)  # for what was sent to be in the sockets, so that more is there than may wait
        most = 0
        for number, got in enumerate(listener.messages()):
            assert got.frames == messages[number]
            most = max(most, stream.waiting_bytes)
    assert number == 99
    assert 10_000 < most < 50_000 + 11_000
    assert stream.waiting_bytes == 0


def test_a_frame_too_large_ends_the_connection_and_the_next_messages_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_streams, "MAX_FRAME_BYTES", 100_000)

    def send(socket: Any, stop: threading.Event) -> None:
        while not stop.is_set():
            for message in ([b"", bytes(8), bytes(200_000)], *[GOOD[0]] * 3):
                with contextlib.suppress(zmq.Again):
                    socket.send_multipart(message)
                stop.wait(0.01)

    with (
        sending(send, zmq.PUB) as address,
        Listener([Endpoint(name="w0", live=address)], threading.Event(), for_s=60, count=4) as listener,
    ):
        got = [message.frames for message in listener.messages()]
    assert [frames for frames in got if frames] == [GOOD[0]] * 4
    assert [] in got


def test_a_replay_socket_that_never_ends_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """It floods with answers that nobody asked for, random bytes and wrong parts; the live stream goes on."""
    monkeypatch.setattr(live_streams, "MAX_WAITING_BYTES", 2_000_000)

    def flood(socket: Any, stop: threading.Event) -> None:
        while not stop.is_set():
            if socket.poll(20):
                who = socket.recv_multipart()[0]
                for idx, frames in enumerate(noise(200) * 50):
                    answer = [b"", *frames] if idx % 2 else [b"", bytes(8), bytes(1000)]
                    with contextlib.suppress(zmq.Again):
                        socket.send_multipart([who, *answer])

    gap = [GOOD[0][0], (9).to_bytes(8, "big"), GOOD[0][2]]
    with (
        sending(flood, zmq.ROUTER) as replay,
        sending(lambda socket, stop: send_all(socket, stop, [gap]), zmq.XPUB) as live,
        Listener([Endpoint(name="w0", live=live, replay=replay)], threading.Event(), count=1) as listener,
    ):
        got = list(listener.messages())
    assert [one.frames for one in got if not one.replayed] == [gap]
    requests = listener.heard["w0"].requests  # for the gap, and at the end
    assert requests == 2
    assert sum(len(frame) for one in got for frame in one.frames) < 2_100_000 * requests


@pytest.mark.parametrize("sure", [3, 4])
def test_an_end_marker_proves_no_end_where_answers_may_have_been_dropped(
    sure: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_streams, "_SURE_REPLAY", sure)

    def answer(socket: Any, stop: threading.Event) -> None:
        while not stop.is_set():
            if socket.poll(20):
                who = socket.recv_multipart()[0]
                for frames in (*GOOD[:4], [b"", b"\xff" * 8, b""]):
                    socket.send_multipart([who, b"", *frames])

    with (
        sending(answer, zmq.ROUTER) as replay,
        Listener([Endpoint(name="w0", live=replay, replay=replay)], threading.Event(), for_s=0) as listener,
    ):
        got = [one.frames for one in listener.messages() if one.replayed]
    assert [frames[1:] for frames in got] == GOOD[:4]
    assert listener.heard["w0"].tail_confirmed == (sure >= 4)


def test_stopping_does_not_wait_for_a_replay_that_drips() -> None:
    stop = threading.Event()

    def drip(socket: Any, over: threading.Event) -> None:
        while not socket.poll(20):
            if over.is_set():
                return
        who = socket.recv_multipart()[0]
        for idx in range(1000):
            if over.wait(0.01):
                return
            if idx == 20:
                stop.set()
            with contextlib.suppress(zmq.Again):
                socket.send_multipart([who, b"", idx.to_bytes(8, "big"), b""])

    gap = [b"", (2000).to_bytes(8, "big"), GOOD[0][2]]
    with (
        sending(drip, zmq.ROUTER) as replay,
        sending(lambda socket, over: send_all(socket, over, [gap]), zmq.XPUB) as live,
        Listener([Endpoint(name="w0", live=live, replay=replay)], stop) as listener,
    ):
        got = list(listener.messages())
    assert 15 <= sum(one.replayed for one in got) < 900


def test_a_subscriber_that_asks_and_never_reads_costs_one_answer() -> None:
    """And a request that is none, or too large, costs nothing."""
    context = zmq.Context()
    publisher = Publisher(context, "127.0.0.1", history=3)
    try:
        for item in outgoing(path_of("f06")):
            publisher.send(item.message)
        rude = context.socket(zmq.DEALER)
        rude.setsockopt(zmq.LINGER, 0)
        rude.connect(publisher.replay_endpoint)
        for frames in ([b"x"], [b"", b"short"], *[replay_request(0)] * 200):
            rude.send_multipart(frames)
        while len(publisher.asked) < 200:
            publisher.serve(100)
        large = context.socket(zmq.DEALER)
        large.setsockopt(zmq.LINGER, 0)
        large.connect(publisher.replay_endpoint)
        large.send_multipart([b"", bytes(1_000_000)])
        polite = context.socket(zmq.DEALER)
        polite.setsockopt(zmq.LINGER, 0)
        polite.connect(publisher.replay_endpoint)
        polite.send_multipart(replay_request(3))
        while len(publisher.asked) < 201:
            publisher.serve(100)
        assert polite.poll(5000)
        assert polite.recv_multipart()[-2] == (3).to_bytes(8, "big")
    finally:
        publisher.close()
        context.destroy(0)
