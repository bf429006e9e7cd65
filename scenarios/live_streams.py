"""Live KV event streams over ZeroMQ, as vLLM publishes them: listening, and fetching what was lost.

Owns: the sockets of a listener. Refuses to know: what the messages say. Needs pyzmq, imported when used.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import ModuleType, TracebackType
from typing import Any, Final, Self

import attrs

from g2sim.actors.kv.wire import WireError
from g2sim.actors.kv.wire_vllm import MAX_PAYLOAD_BYTES, read_message, read_replay_answer, replay_request
from g2sim.bus.errors import ConfigError

RECEIVE_QUEUE: Final = 100_000
"""Messages that may wait in a socket, as many as vLLM's publisher lets wait."""
_POLL_MS: Final = 100
MAX_REPLAY: Final = 100_000
"""Most answers taken for one replay request."""


def import_zmq() -> ModuleType:
    """pyzmq; raises ConfigError naming the command that installs it."""
    try:
        import zmq
    except ImportError as missing:
        raise ConfigError(
            "", problem="live streams need pyzmq, which is not installed", hint="pip install 'g2sim[zmq]'"
        ) from missing
    return zmq


@attrs.frozen(kw_only=True)
class Endpoint:
    """A stream to listen to.

    Attributes:
        name: the worker's name in findings.
        live, replay: addresses; without a replay address what is lost stays lost.
        dp_rank: rank of batches that name none.
    """

    name: str
    live: str
    replay: str | None = None
    dp_rank: int = 0


@attrs.frozen(slots=True)
class Received:
    """One message: which stream, ms since the start, whether it answered a replay request, frames."""

    endpoint: Endpoint
    time_ms: float
    replayed: bool
    frames: list[bytes]


@contextlib.contextmanager
def interruptible() -> Iterator[threading.Event]:
    """An event that Ctrl-C sets, so that the work in hand is finished instead of broken off."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = signal.signal(signal.SIGINT, lambda *_: stop.set())
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


class Listener:
    """Listens to streams until it is told to stop.

    Args:
        endpoints: the streams.
        stop: ends the listening when set.
        for_s: ends it after this time [s], None for never.
        count: ends it after this many live messages, None for never.
        from_start: ask the replay socket for all it retains before listening on.
        replay_timeout_s: how long an answer may take.
    """

    def __init__(
        self,
        endpoints: list[Endpoint],
        stop: threading.Event,
        *,
        for_s: float | None = None,
        count: int | None = None,
        from_start: bool = True,
        replay_timeout_s: float = 2.0,
    ) -> None:
        self._zmq = zmq = import_zmq()
        self._stop = stop
        self._deadline = None if for_s is None else time.monotonic() + for_s
        self._left = count
        self._from_start = from_start
        self._timeout_s = replay_timeout_s
        self._start = time.monotonic()
        self._context = zmq.Context()
        self._sockets: dict[Any, Endpoint] = {}
        self._expected: dict[str, int | None] = {}
        self._poller = zmq.Poller()
        try:
            for endpoint in endpoints:
                socket = self._context.socket(zmq.SUB)
                socket.setsockopt(zmq.LINGER, 0)
                socket.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE)
                socket.setsockopt(zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES)
                socket.setsockopt(zmq.SUBSCRIBE, b"")
                self._connect(socket, endpoint.live)
                self._poller.register(socket, zmq.POLLIN)
                self._sockets[socket] = endpoint
                self._expected[endpoint.live] = None
        except BaseException:
            self._context.destroy(0)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._context.destroy(0)

    def messages(self) -> Iterator[Received]:
        """What comes, what was lost before what showed the loss."""
        while not self._over():
            for socket, _ in self._poller.poll(_POLL_MS):
                endpoint = self._sockets[socket]
                frames = socket.recv_multipart()
                yield from self._fetch_lost(endpoint, frames)
                yield Received(endpoint, self._now_ms(), False, frames)
                if self._left is not None:
                    self._left -= 1
                if self._over():
                    return

    def _fetch_lost(self, endpoint: Endpoint, frames: list[bytes]) -> Iterator[Received]:
        try:
            number = read_message(frames).sequence
        except WireError:
            return
        expected = self._expected[endpoint.live]
        first = (0 if self._from_start else number) if expected is None else expected
        self._expected[endpoint.live] = max(number + 1, expected or 0)
        if endpoint.replay is None or number <= first:
            return
        yield from self._replay(endpoint, first, number)

    def _replay(self, endpoint: Endpoint, first: int, stop: int) -> Iterator[Received]:
        zmq = self._zmq
        with self._context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES)
            self._connect(socket, endpoint.replay or "")
            socket.send_multipart(replay_request(first))
            for _ in range(MAX_REPLAY):
                if not socket.poll(int(self._timeout_s * 1000)):
                    return
                frames = socket.recv_multipart()
                try:
                    answer = read_replay_answer(frames)
                except WireError:
                    yield Received(endpoint, self._now_ms(), True, frames)
                    continue
                if answer.end:
                    return
                if first <= answer.sequence < stop:  # later ones come live
                    yield Received(endpoint, self._now_ms(), True, frames)

    def _connect(self, socket: Any, address: str) -> None:
        try:
            socket.connect(address)
        except self._zmq.ZMQError as refused:
            allowed = "an address such as tcp://127.0.0.1:5557 or ipc:///path"
            raise ConfigError("endpoint", got=address, problem=str(refused), allowed=allowed) from refused

    def _over(self) -> bool:
        if self._stop.is_set() or (self._left is not None and self._left <= 0):
            return True
        return self._deadline is not None and time.monotonic() >= self._deadline

    def _now_ms(self) -> float:
        return (time.monotonic() - self._start) * 1000.0
