"""Live KV event streams over ZeroMQ, as vLLM publishes them: listening, and fetching what was lost.

Owns: the sockets of a listener. Refuses to know: what the messages say, and what is lost (``live_sequence``). Needs
pyzmq, imported when used.

Whoever sends is not trusted. libzmq ends a connection for good when a frame is above ``MAX_FRAME_BYTES`` or is none of
ZeroMQ's; it is made anew here, and a message without frames stands for what was cut off.
"""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import ModuleType, TracebackType
from typing import Any, Final, Self

import attrs

from g2sim.actors.kv.wire import WireError
from g2sim.actors.kv.wire_vllm import MAX_FRAME_BYTES, Message, read_message, read_replay_answer, replay_request
from g2sim.bus.errors import ConfigError
from g2sim.scenarios.live_sequence import Answer, Heard

RECEIVE_QUEUE: Final = 100_000
"""Messages that may wait in a socket, as many as vLLM's publisher lets wait."""
_POLL_MS: Final = 100
MAX_REPLAY: Final = 100_000
"""Most answers taken for one replay request."""
SILENCE_S: Final = 1.0
"""Time without a message [s] after which the replay socket is asked whether something was lost behind the last one."""
_MOST_SILENCE_S: Final = 60.0
"""The same [s] at most; it is doubled for a replay socket that does not answer."""
_STALL_S: Final = 0.5
"""Time without a look at the sockets [s] after which no stream counts as silent: this process itself was held up."""
_LAST_S: Final = 3.0
"""Longest time for what is queued at the end [s]."""
_RETRY_S: Final = 0.5
"""Time [s] in which libzmq, if it makes a lost connection anew by itself, has begun to do so (it does so at once)."""


def import_zmq() -> ModuleType:
    """pyzmq; raises ConfigError naming the command that installs it."""
    try:
        import zmq
    except ImportError as missing:
        hint = "in a checkout of g2sim: pip install '.[zmq]'"
        raise ConfigError("", problem="live streams need pyzmq, which is not installed", hint=hint) from missing
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
    """One message: which stream, ms since the start, whether it answered a replay request, frames.

    Attributes:
        frames: none where the connection was cut, for a frame that was too large or none of ZeroMQ's.
        anew: it is the first of a publisher that began anew.
    """

    endpoint: Endpoint
    time_ms: float
    replayed: bool
    frames: list[bytes]
    anew: bool = False


class _Contact:
    """A socket's connection, as its monitor tells of it.

    A peer that goes away is tried again by libzmq at once, which says so. It gives up where it could not read what
    came: that is a cut.

    Attributes:
        monitor: a socket that can be read when there is news.
        cut_at: when the lost connection counts as cut, unless libzmq tries again; infinite while there is one.
    """

    def __init__(self, zmq: ModuleType, socket: Any) -> None:
        self._zmq = zmq
        self.monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED)
        self.cut_at = math.inf

    def lost(self) -> bool:
        """Take note of what the monitor says; whether the connection was lost since this was asked last."""
        lost = False
        while self.monitor.poll(0):
            news = self.monitor.recv_multipart()[0]
            is_lost = int.from_bytes(news[:2], sys.byteorder) == self._zmq.EVENT_DISCONNECTED
            self.cut_at = time.monotonic() + _RETRY_S if is_lost else math.inf
            lost |= is_lost
        return lost


@attrs.define(slots=True, eq=False)
class _Stream:
    """``ask_at``: when to ask the replay socket if it stays silent; ``silence_s``: how long it was silent then."""

    endpoint: Endpoint
    heard: Heard
    contact: _Contact
    ask_at: float
    silence_s: float = SILENCE_S

    def listen_on(self) -> None:
        self.silence_s = SILENCE_S
        self.ask_at = time.monotonic() + SILENCE_S


@attrs.frozen(slots=True, eq=False)
class _Request:
    """A socket on which a replay was asked for."""

    socket: Any
    contact: _Contact

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.disable_monitor()
        self.contact.monitor.close()
        self.socket.close()


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

    What was lost is asked for when a number shows it, when a stream has been silent for ``SILENCE_S``, and at the end.

    Args:
        endpoints: the streams.
        stop: ends the listening when set.
        for_s: ends it after this time [s], None for never.
        count: ends it after this many live messages, None for never; those that are queued then are left.
        from_start: ask the replay socket for all it retains before listening on.
        replay_timeout_s: how long an answer may take.
    Attributes:
        heard: what was heard of each stream, by its name.
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
        self._left = count
        self._timeout_s = replay_timeout_s
        self._start = time.monotonic()
        self._deadline = None if for_s is None else self._start + for_s
        self._looked = self._start
        self._context = zmq.Context()
        self._streams: dict[Any, _Stream] = {}
        self._monitors: dict[Any, _Stream] = {}
        self._poller = zmq.Poller()
        try:
            for endpoint in endpoints:
                socket = self._context.socket(zmq.SUB)
                socket.setsockopt(zmq.LINGER, 0)
                socket.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE)
                socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
                socket.setsockopt(zmq.SUBSCRIBE, b"")
                heard, contact = Heard(endpoint.replay is not None, from_start), _Contact(zmq, socket)
                self._streams[socket] = stream = _Stream(endpoint, heard, contact, self._start + SILENCE_S)
                self._monitors[contact.monitor] = stream
                self._connect(socket, endpoint.live)
                self._poller.register(contact.monitor, zmq.POLLIN)
                self._poller.register(socket, zmq.POLLIN)
        except BaseException:
            self._context.destroy(0)
            raise
        self.heard = {stream.endpoint.name: stream.heard for stream in self._streams.values()}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._context.destroy(0)

    def messages(self) -> Iterator[Received]:
        """What comes, what was lost before what showed the loss."""
        while not self._over():
            yield from self._come(_POLL_MS)
            silent = min(self._streams.values(), key=lambda stream: stream.ask_at)
            now = time.monotonic()
            if now - self._looked > _STALL_S:
                for stream in self._streams.values():
                    stream.ask_at = max(stream.ask_at, now + SILENCE_S)
            elif now >= silent.ask_at and not self._over():
                yield from self._ask_silent(silent)
        yield from self._last()

    def _come(self, wait_ms: int) -> Iterator[Received]:
        """One message of each stream that has one, and what was cut off."""
        ready = dict(self._poller.poll(wait_ms))
        self._looked = now = time.monotonic()
        for socket, stream in self._streams.items():
            if now >= stream.contact.cut_at and socket not in ready and stream.contact.monitor not in ready:
                socket.disconnect(stream.endpoint.live)  # or libzmq takes the connection for one that stands
                self._connect(socket, stream.endpoint.live)
                stream.contact.cut_at = math.inf
                yield self._received(stream, [], replayed=False)
        for socket in ready:
            if socket in self._monitors:
                stream = self._monitors[socket]
                if stream.contact.lost():
                    stream.heard.lost_contact()
                continue
            stream = self._streams[socket]
            yield from self._hand_out(stream, socket.recv_multipart())
            stream.listen_on()
            if self._left is not None:
                self._left -= 1
                if self._left <= 0:
                    return

    def _hand_out(self, stream: _Stream, frames: list[bytes]) -> Iterator[Received]:
        """A live message, after what it shows to be lost."""
        try:
            message = read_message(frames)
        except WireError:
            yield self._received(stream, frames, replayed=False)
            return
        first = stream.heard.before(message)
        if first is not None:
            yield from self._ask(stream, first, before=message)
        if stream.heard.take(message):
            yield self._received(stream, frames, replayed=False)

    def _ask_silent(self, stream: _Stream) -> Iterator[Received]:
        first = stream.heard.check_from() if stream.heard.replay else None
        if first is not None:
            yield from self._ask(stream, first)
        if first is None or stream.heard.tail_confirmed:
            stream.listen_on()
        else:
            stream.silence_s = min(2 * stream.silence_s, _MOST_SILENCE_S)
            stream.ask_at = time.monotonic() + stream.silence_s

    def _last(self) -> Iterator[Received]:
        """What is queued, and what was lost behind it; streams with more in the queue are left as they are."""
        deadline = time.monotonic() + (_LAST_S if self._left is None else 0.0)
        while (more := dict(self._poller.poll(0))) or self._perhaps_cut():
            if time.monotonic() >= deadline:
                break
            yield from self._come(0 if more else _POLL_MS)
        asked = []
        for socket, stream in self._streams.items():
            first = stream.heard.check_from() if stream.heard.replay and socket not in more else None
            if first is not None:
                asked.append((stream, first, self._request(stream.endpoint, first)))
        for stream, first, replay in asked:
            yield from self._ask(stream, first, asked=replay)

    def _perhaps_cut(self) -> bool:
        return any(stream.contact.cut_at < math.inf for stream in self._streams.values())

    # -- the replay socket

    def _ask(
        self, stream: _Stream, first: int | None, *, before: Message | None = None, asked: _Request | None = None
    ) -> Iterator[Received]:
        """Ask for everything from a number on, on a socket where that was ``asked`` already, or a new one.

        Args:
            before: the live message at hand; None if nothing is queued.
        """
        while first is not None:
            with asked or self._request(stream.endpoint, first) as request:
                answers, ended = self._answers(request)
            asked = None
            taken, first = stream.heard.answered(first, answers, ended=ended, before=before)
            for frames in taken:
                yield self._received(stream, frames, replayed=True)

    def _request(self, endpoint: Endpoint, first: int) -> _Request:
        socket = self._context.socket(self._zmq.DEALER)
        socket.setsockopt(self._zmq.LINGER, 0)
        socket.setsockopt(self._zmq.RCVHWM, 0)
        socket.setsockopt(self._zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        contact = _Contact(self._zmq, socket)
        self._connect(socket, endpoint.replay or "")
        socket.send_multipart(replay_request(first))
        return _Request(socket, contact)

    def _answers(self, request: _Request) -> tuple[list[Answer], bool]:
        """The answers to a request, and whether the end marker came."""
        answers: list[Answer] = []
        while len(answers) < MAX_REPLAY and (frames := self._answer(request)) is not None:
            try:
                answer = read_replay_answer(frames)
            except WireError:
                answers.append((None, frames))
                if not frames:
                    break
                continue
            if answer.end:
                return answers, True
            answers.append((answer, frames))
        return answers, False

    def _answer(self, request: _Request) -> list[bytes] | None:
        """What comes next; no frames if the connection was cut, None if nothing comes."""
        socket, contact = request.socket, request.contact
        until = time.monotonic() + self._timeout_s
        while time.monotonic() < until or contact.cut_at < math.inf:
            if socket.poll(_POLL_MS):
                frames: list[bytes] = socket.recv_multipart()
                return frames
            contact.lost()
            if time.monotonic() >= contact.cut_at:
                return []
        return None

    # -- both

    def _received(self, stream: _Stream, frames: list[bytes], *, replayed: bool) -> Received:
        anew, stream.heard.anew = stream.heard.anew, False
        return Received(stream.endpoint, self.now_ms(), replayed, frames, anew)

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

    def now_ms(self) -> float:
        return (time.monotonic() - self._start) * 1000.0
