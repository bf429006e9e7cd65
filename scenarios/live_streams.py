"""Live KV event streams over ZeroMQ, as vLLM publishes them: listening, and fetching what was lost.

Owns: the sockets of a listener. Refuses to know: what the messages say, and what is lost (``live_sequence``). Needs
pyzmq, imported when used.

Whoever sends is not trusted. A connection that is cut for a frame above ``MAX_FRAME_BYTES`` is made anew, and a message
without frames stands for what was cut off. A socket holds few messages, and what is taken from it waits here, up to
``MAX_WAITING_BYTES``: beyond that the sender's own queue fills, and what he drops shows as a gap in his numbers. A
replay is bounded in answers, bytes and time.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from types import ModuleType, TracebackType
from typing import Any, Final, Self

import attrs

from g2sim.actors.kv.wire import WireError
from g2sim.actors.kv.wire_vllm import MAX_FRAME_BYTES, Message, read_message, read_replay_answer, replay_request
from g2sim.bus.errors import ConfigError
from g2sim.scenarios.live_contact import Contact, ReplayRequest
from g2sim.scenarios.live_sequence import Answer, Heard

RECEIVE_QUEUE: Final = 16
"""Messages that may wait in a socket, where only their number can be bounded."""
REPLAY_QUEUE: Final = 64
"""The same for answers of a replay. They are taken at once, because its sender drops what does not fit."""
MAX_WAITING: Final = 100_000
"""Messages of all streams that may wait to be handed out, as many as vLLM's publisher lets wait."""
MAX_WAITING_BYTES: Final = 256 * 2**20
"""Their size [B], and that of the answers to one replay request."""
MAX_REPLAY: Final = 100_000
"""Most answers taken for one replay request."""
MAX_REPLAY_S: Final = 60.0
"""Longest time that one replay may take [s]."""
_SURE_REPLAY: Final = 1000
"""Answers that surely fit into the queue of a replay's sender, as it is in ZeroMQ unless it is set."""
_POLL_MS: Final = 100
_TAKEN: Final = 256
"""Messages taken from one socket before the others are looked at."""
_HANDED_OUT: Final = 16
"""Messages of one stream handed out before the sockets are looked at again."""
_FRAME_OVERHEAD_BYTES: Final = 100
SILENCE_S: Final = 1.0
"""Time without a message [s] after which the replay socket is asked whether something was lost behind the last one."""
_MOST_SILENCE_S: Final = 60.0
"""The same [s] at most; it is doubled for a replay socket that does not answer."""
_STALL_S: Final = 0.5
"""Time without a look at the sockets [s] after which no stream counts as silent: this process itself was held up."""
_LAST_S: Final = 3.0
"""Longest time for what is queued at the end, and for a replay once the listening is over [s]."""


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


@attrs.define(slots=True, eq=False)
class _Stream:
    """A stream, and what was taken from its socket and waits to be handed out.

    Attributes:
        ask_at: when to ask the replay socket if it stays silent. ``silence_s``: how long it was silent then.
        behind: whether its socket may hold more.
    """

    endpoint: Endpoint
    heard: Heard
    contact: Contact
    ask_at: float
    silence_s: float = SILENCE_S
    behind: bool = False
    waiting: deque[list[bytes]] = attrs.Factory(deque)
    waiting_bytes: int = 0

    @property
    def queued(self) -> bool:
        """Whether something came that was not handed out: nothing is known of its silence or its end then."""
        return self.behind or bool(self.waiting)

    def put(self, frames: list[bytes]) -> None:
        self.waiting.append(frames)
        self.waiting_bytes += _size_bytes(frames)

    def get(self) -> list[bytes]:
        frames = self.waiting.popleft()
        self.waiting_bytes -= _size_bytes(frames)
        return frames

    def listen_on(self) -> None:
        self.silence_s = SILENCE_S
        self.ask_at = time.monotonic() + SILENCE_S


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
        self._poller = zmq.Poller()
        try:
            for endpoint in endpoints:
                socket = self._context.socket(zmq.SUB)
                socket.setsockopt(zmq.LINGER, 0)
                socket.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE)
                socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
                socket.setsockopt(zmq.SUBSCRIBE, b"")
                heard, contact = Heard(endpoint.replay is not None, from_start), Contact(zmq, socket)
                self._streams[socket] = _Stream(endpoint, heard, contact, self._start + SILENCE_S)
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
            yield from self._take(_POLL_MS)
            yield from self._hand_on()
            quiet = (stream for stream in self._streams.values() if not stream.queued)
            silent = min(quiet, key=lambda stream: stream.ask_at, default=None)
            now = time.monotonic()
            if now - self._looked > _STALL_S:
                for stream in self._streams.values():
                    stream.ask_at = max(stream.ask_at, now + SILENCE_S)
            elif silent is not None and now >= silent.ask_at and not self._over():
                yield from self._ask_silent(silent)
        yield from self._last()

    def _take(self, wait_ms: int) -> Iterator[Received]:
        """Take from the sockets what there is, as far as there is room; wait for it if nothing waits here.

        Gives what stands for messages that were cut off.
        """
        streams = self._streams.values()
        ready = dict(self._poller.poll(0 if any(stream.waiting for stream in streams) else wait_ms))
        self._looked = now = time.monotonic()
        for socket, stream in self._streams.items():
            contact = stream.contact
            if contact.monitor in ready:
                if contact.lost():
                    stream.heard.lost_contact()
            elif now >= contact.cut_at and socket not in ready:
                socket.disconnect(stream.endpoint.live)  # or libzmq takes the connection for one that stands
                self._connect(socket, stream.endpoint.live)
                contact.cut_at = math.inf
                yield self._received(stream, [], replayed=False)
            stream.behind = socket in ready and not self._emptied(socket, stream)

    def _emptied(self, socket: Any, stream: _Stream) -> bool:
        """Take from a socket, and tell whether it has no more; each stream has an equal part of the room."""
        most, most_bytes = MAX_WAITING // len(self._streams), MAX_WAITING_BYTES // len(self._streams)
        for _ in range(_TAKEN):
            if len(stream.waiting) >= most or stream.waiting_bytes >= most_bytes:
                return False
            try:
                stream.put(socket.recv_multipart(self._zmq.NOBLOCK))
            except self._zmq.Again:
                return True
        return False

    def _hand_on(self) -> Iterator[Received]:
        """Some messages of each stream, one after the other of each."""
        for _ in range(_HANDED_OUT):
            some = [stream for stream in self._streams.values() if stream.waiting]
            for stream in some:
                yield from self._hand_out(stream, stream.get())
                stream.listen_on()
                if self._left is not None:
                    self._left -= 1
                    if self._left <= 0:
                        return
            if not some or self._over():
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
        while True:
            perhaps_cut = any(stream.contact.cut_at < math.inf for stream in self._streams.values())
            yield from self._take(_POLL_MS if perhaps_cut else 0)
            queued = any(stream.queued for stream in self._streams.values())
            if not (queued or perhaps_cut) or time.monotonic() >= deadline:
                break
            yield from self._hand_on()
        asked = []
        for stream in self._streams.values():
            first = stream.heard.check_from() if stream.heard.replay and not stream.queued else None
            if first is not None:
                asked.append((stream, first, self._request(stream.endpoint, first)))
        for stream, first, replay in asked:
            yield from self._ask(stream, first, asked=replay)

    # -- the replay socket

    def _ask(
        self, stream: _Stream, first: int | None, *, before: Message | None = None, asked: ReplayRequest | None = None
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
            if len(answers) > _SURE_REPLAY:  # the sender may have dropped what came before the end marker
                stream.heard.tail_confirmed = False
            for frames in taken:
                yield self._received(stream, frames, replayed=True)

    def _request(self, endpoint: Endpoint, first: int) -> ReplayRequest:
        socket = self._context.socket(self._zmq.DEALER)
        socket.setsockopt(self._zmq.LINGER, 0)
        socket.setsockopt(self._zmq.RCVHWM, REPLAY_QUEUE)
        socket.setsockopt(self._zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        contact = Contact(self._zmq, socket)
        self._connect(socket, endpoint.replay or "")
        socket.send_multipart(replay_request(first))
        return ReplayRequest(socket, contact)

    def _answers(self, request: ReplayRequest) -> tuple[list[Answer], bool]:
        """The answers to a request, and whether the end marker came."""
        answers: list[Answer] = []
        taken_bytes = 0
        deadline = time.monotonic() + MAX_REPLAY_S
        while len(answers) < MAX_REPLAY and taken_bytes < MAX_WAITING_BYTES:
            if self._over():  # what is asked at the end has some time, too
                deadline = min(deadline, time.monotonic() + _LAST_S)
            frames = request.answer(self._timeout_s, deadline)
            if frames is None:
                break
            taken_bytes += _size_bytes(frames)
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


def _size_bytes(frames: list[bytes]) -> int:
    return sum(map(len, frames)) + _FRAME_OVERHEAD_BYTES * len(frames)
