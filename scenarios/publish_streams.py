"""Publishing KV events as vLLM does: one live socket and one replay socket for each rank.

Owns: turning logs and files into numbered batches, and the publisher's sockets. Refuses to know: who listens. Needs
pyzmq, imported when used.

Token ids: vLLM sends tokens, our logs hold their hashes. A block whose tokens are not known is sent with stand-in
tokens made from its tokens hash, equal for equal blocks and different for different ones, so an index built from them
has the same shape; a query must use the same stand-ins (``standin_tokens``).
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import attrs
import msgspec

from g2sim.actors.kv.wire import CLEARED, DEVICE, HOST, STORED, EngineFields, Hash, StreamEvent, WireError, tier_of
from g2sim.actors.kv.wire_vllm import (
    MAX_TOPIC_BYTES,
    Batch,
    Message,
    ReplayLayout,
    Shape,
    encode_batch,
    message_frames,
    read_message,
    read_replay_request,
    replay_answer,
)
from g2sim.bus.errors import ConfigError
from g2sim.bus.log import MAGIC, LogReader
from g2sim.scenarios.capture import MESSAGE
from g2sim.scenarios.live_streams import import_zmq
from g2sim.scenarios.run_folder import log_file
from g2sim.scenarios.stream_sources import LOG_EVENTS, open_stream, settings_of
from g2sim.scenarios.validate import Bad, LogSettings

HISTORY: Final = 10_000
"""Batches kept for replays, as many as vLLM keeps."""
QUEUE: Final = 100_000
"""Messages that may wait for one subscriber, as many as vLLM's high-water mark."""
_MOST_SERVED: Final = 64
"""Subscriptions, and requests, that are taken note of before something is sent again."""
_MEDIA: Final = {DEVICE: "GPU", HOST: "CPU"}


@attrs.frozen(slots=True)
class Outgoing:
    """One message to send. ``rank``: (worker name, dp rank)."""

    rank: tuple[str, int]
    time_ms: float
    message: Message


def standin_tokens(tokens_hash: int, block_size: int) -> list[int]:
    """Token ids that stand for a block of which only a 64-bit hash is known; one to one for two tokens or more."""
    value = tokens_hash & 0xFFFFFFFFFFFFFFFF
    if block_size < 2:
        raise ConfigError("block_size", got=block_size, allowed="2 or more, to make token ids from hashes")
    return [value & 0xFFFFFFFF, value >> 32, *(0 for _ in range(block_size - 2))]


def outgoing(path: Path, *, shape: Shape = Shape.MAP, block_size: int = 16) -> Iterator[Outgoing]:
    """Everything that a run log, a capture or a JSON lines file has to publish, in order.

    A run's events of one rank and turn are one batch, as an engine's step is; a line is a batch of its own and keeps
    its event id as number; a capture's live messages go out as they came.

    Raises: ConfigError for a file that cannot be published.
    """
    file = log_file(path)
    if not _is_log(file):
        yield from _lines(file, shape, block_size)
    elif _is_capture(file):
        yield from _captured(file)
    else:
        yield from _run(file, shape)


def ranks_of(path: Path) -> list[tuple[str, int]]:
    """The ranks that a file will publish for, in order of first appearance.

    Raises: ConfigError for a file that cannot be published; JSON lines are encoded for that, to find it before anything
    is sent.
    """
    file = log_file(path)
    if not _is_log(file) or _is_capture(file):
        return list(dict.fromkeys(item.rank for item in outgoing(file)))
    with LogReader(file) as reader:
        ranks: dict[tuple[str, int], None] = {}
        for tag, _, _, _, values in reader.iter_raw():
            if tag in LOG_EVENTS:
                worker, role, dp_rank = values[:3]
                ranks[f"{role}-{worker}", dp_rank] = None
            elif tag == "mb.crash":
                problem = "a worker crashes in this run, and its stream would end there"
                raise ConfigError("", where=str(file), problem=problem, allowed="a run without worker_crash faults")
        return list(ranks)


def _is_log(file: Path) -> bool:
    try:
        with file.open("rb") as start:
            return start.read(len(MAGIC)) == MAGIC
    except OSError as failure:
        raise ConfigError("", where=str(file), problem=f"cannot read it: {failure.strerror}") from failure


def _is_capture(file: Path) -> bool:
    with LogReader(file) as reader:
        return MESSAGE in reader.header.events


def _captured(path: Path) -> Iterator[Outgoing]:
    with LogReader(path) as reader:
        for tag, time_ms, _, _, values in reader.iter_raw():
            if tag == MESSAGE and not values[1]:
                try:
                    message = read_message(values[2])
                except WireError:
                    continue  # it was no message of the protocol; nobody could have read it
                yield Outgoing((values[0], 0), time_ms, message)


def _lines(path: Path, shape: Shape, block_size: int) -> Iterator[Outgoing]:
    source, items = open_stream(path)
    for number, item in items:
        if type(item) is Bad:
            raise ConfigError("", where=source.place(number), problem=item.problem)
        if not isinstance(item, StreamEvent):
            continue
        if item.worker_id is None or item.event_id is None:
            raise ConfigError("worker_id", where=source.place(number), problem="needed to publish an event")
        rank = (str(item.worker_id), item.dp_rank or 0)
        try:
            event = _engine_event(item, source.form, block_size)
            batch = Batch(ts_s=(item.ts_ms or 0) / 1000.0, events=(event,), dp_rank=rank[1])
            payload = encode_batch(batch, shape)
        except WireError as error:
            raise ConfigError(error.place, where=source.place(number), problem=error.problem) from error
        yield Outgoing(rank, float(item.ts_ms or 0), Message(topic=b"", sequence=item.event_id, payload=payload))


def _run(path: Path, shape: Shape) -> Iterator[Outgoing]:
    with LogReader(path) as reader:
        settings: LogSettings = settings_of(reader.header.scenario)
        numbers: dict[tuple[str, int], int] = {}
        open_batch: list[StreamEvent] = []
        turn: tuple[Any, ...] | None = None

        def flush() -> Iterator[Outgoing]:
            if not open_batch or turn is None:
                return
            rank, time_ms, _ = turn
            number = numbers.get(rank, 0)
            numbers[rank] = number + 1
            payload = encode_batch(Batch(ts_s=time_ms / 1000.0, events=tuple(open_batch), dp_rank=rank[1]), shape)
            yield Outgoing(rank, time_ms, Message(topic=b"", sequence=number, payload=payload))
            open_batch.clear()

        for tag, time_ms, _, cause, values in reader.iter_raw():
            event_of = LOG_EVENTS.get(tag)
            if event_of is None:
                continue
            worker, role, dp_rank = values[:3]
            this = ((f"{role}-{worker}", dp_rank), time_ms, cause)
            if this != turn:
                yield from flush()
                turn = this
            event = event_of(time_ms, values)
            open_batch.append(_engine_event(event, "log", settings.block_sizes.get(role, 16)))
        yield from flush()


def _engine_event(event: StreamEvent, form: str, block_size: int) -> StreamEvent:
    """The event in vLLM's words: its media, and tokens for a stored run."""
    tier = tier_of(form, event.medium)
    medium = event.medium if tier is None else _MEDIA.get(tier, event.medium)
    if event.kind == CLEARED and event.medium is not None and tier is not None:
        raise WireError("tier", "vLLM's form can only clear all tiers at once")
    if event.kind != STORED:
        return msgspec.structs.replace(event, medium=medium)
    engine = event.engine or EngineFields()
    size = engine.block_size or block_size
    tokens = engine.token_ids
    if not tokens:
        known = event.tokens_hashes or tuple(map(_number, event.hashes))
        tokens = array("I", [token for own in known for token in standin_tokens(own, size)])
    return msgspec.structs.replace(
        event, medium=medium, more=(), engine=msgspec.structs.replace(engine, token_ids=tokens, block_size=size)
    )


def _number(hash_: Hash) -> int:
    if isinstance(hash_, int):
        return hash_
    return int.from_bytes(hash_[:8], "big") if isinstance(hash_, bytes) else int(hash_[-16:], 16)


class Publisher:
    """The sockets of one rank.

    Args:
        context: a zmq context.
        address: address to bind to; ``port`` and ``replay_port`` 0 for free ones.
        history: batches kept for replays.
        queue: messages that may wait for one subscriber; it loses what comes beyond, and nothing ever blocks.
    Attributes:
        endpoint, replay_endpoint: addresses that others connect to.
        asked: first numbers of the replay requests so far.
    """

    def __init__(
        self,
        context: Any,
        address: str,
        *,
        port: int = 0,
        replay_port: int = 0,
        history: int = HISTORY,
        queue: int = QUEUE,
        layout: ReplayLayout = ReplayLayout.TOPIC,
    ) -> None:
        zmq = import_zmq()
        self.layout = layout
        self.asked: list[int] = []
        self.subscribers = 0
        self._kept: deque[Message] = deque(maxlen=history)
        self._live = context.socket(zmq.XPUB)  # PUB that also tells of subscriptions
        self._replay = context.socket(zmq.ROUTER)
        for socket in (self._live, self._replay):
            socket.setsockopt(zmq.LINGER, 1000)
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_TOPIC_BYTES + 1)  # for subscriptions and requests
        self._live.setsockopt(zmq.SNDHWM, queue)
        # Room for one answer: who asks again without reading loses what does not fit, and nobody else anything.
        self._replay.setsockopt(zmq.SNDHWM, history + 1)
        self.endpoint = self._bind(self._live, address, port)
        self.replay_endpoint = self._bind(self._replay, address, replay_port)

    def _bind(self, socket: Any, address: str, port: int) -> str:
        zmq = import_zmq()
        where = f"[{address}]" if ":" in address else address
        try:
            if ":" in address:
                socket.setsockopt(zmq.IPV6, 1)
            socket.bind(f"tcp://{where}:{port or '*'}")
        except zmq.ZMQError as refused:
            raise ConfigError("--bind", got=f"{address}:{port}", problem=str(refused)) from refused
        return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))

    def send(self, message: Message, *, lose: bool = False) -> None:
        """Send one message; ``lose`` keeps it for replays but does not send it, as a full queue would."""
        self._kept.append(message)
        if not lose:
            self._live.send_multipart(message_frames(message))

    def serve(self, wait_ms: int = 0) -> None:
        """Take note of subscriptions and answer replay requests that are there, or come within a time."""
        for _ in range(_MOST_SERVED):
            if not self._live.poll(0):
                break
            change = self._live.recv()
            self.subscribers += {b"\x01": 1, b"\x00": -1}.get(change[:1], 0)
        for _ in range(_MOST_SERVED):
            if not self._replay.poll(wait_ms):
                break
            wait_ms = 0
            who, *frames = self._replay.recv_multipart()
            try:
                first = read_replay_request(frames)
            except WireError:
                continue  # not a request; there is nobody to tell
            self.asked.append(first)
            topic = b""
            for message in self._kept:
                if message.sequence >= first:
                    self._replay.send_multipart([who, *replay_answer(message, self.layout)])
                    topic = message.topic or b""
            end = Message(topic=topic, sequence=0, payload=b"", end=True)
            self._replay.send_multipart([who, *replay_answer(end, self.layout)])

    def close(self) -> None:
        self._live.close()
        self._replay.close()


class Publishers:
    """All ranks of what is published; sockets are made for every rank before anything is sent."""

    def __init__(
        self,
        ranks: list[tuple[str, int]],
        *,
        address: str = "127.0.0.1",
        port: int = 0,
        replay_port: int = 0,
        history: int = HISTORY,
        queue: int = QUEUE,
        layout: ReplayLayout = ReplayLayout.TOPIC,
    ) -> None:
        self._context = import_zmq().Context()
        self.by_rank: dict[tuple[str, int], Publisher] = {}
        try:
            for idx, rank in enumerate(ranks):
                self.by_rank[rank] = Publisher(
                    self._context,
                    address,
                    port=port + idx if port else 0,
                    replay_port=replay_port + idx if replay_port else 0,
                    history=history,
                    queue=queue,
                    layout=layout,
                )
        except BaseException:
            self._context.destroy(0)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for publisher in self.by_rank.values():
            publisher.close()
        self._context.term() if kind is None else self._context.destroy(0)

    def serve(self, seconds: float, until: Callable[[], bool]) -> None:
        """Serve all ranks for a time, or until a condition holds."""
        deadline = time.monotonic() + seconds
        while not until():
            for publisher in self.by_rank.values():
                publisher.serve()
            left = deadline - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(0.005, left))

    def play(
        self,
        messages: Iterator[Outgoing],
        *,
        speed: float | None = None,
        rate: float | None = None,
        stop: Callable[[], bool],
    ) -> int:
        """Send messages, as fast as they go unless they are paced. Returns how many.

        Args:
            speed: how many times as fast as their times say.
            rate: how many a second, in all.
        """
        sent = 0
        start: float | None = None
        first_ms = 0.0
        for item in messages:
            if start is None:
                start, first_ms = time.monotonic(), item.time_ms
            due = start
            if speed is not None:
                due += (item.time_ms - first_ms) / 1000.0 / speed
            elif rate is not None:
                due += sent / rate
            ahead_s = due - time.monotonic()
            if ahead_s > 0:
                self.serve(ahead_s, stop)
            elif sent % 64 == 0:
                for publisher in self.by_rank.values():
                    publisher.serve()
            if stop():
                break
            self.by_rank[item.rank].send(item.message)
            sent += 1
        return sent
