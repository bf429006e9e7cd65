"""Reading event streams: run logs, captures, neutral and Dynamo JSON lines.

Owns: telling the kinds apart, and turning lines and records into items of the check. Refuses to know: rules.

Nothing in a file can stop the reading: a line or record that is not good becomes a ``Bad`` item with its place, and a
file that ends early gives what is whole and then says so. Only a file that cannot be opened, or is of none of the
kinds, is refused.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

import attrs
import msgspec

# Imported for their events, whose schema a log is compared with.
import g2sim.actors.host_pool.events
import g2sim.actors.kv.events
import g2sim.actors.membership.events
import g2sim.actors.traffic.events
import g2sim.actors.worker.events  # noqa: F401
from g2sim.actors.kv import wire_dynamo, wire_neutral
from g2sim.actors.kv.wire import CLEARED, REMOVED, STORED, StreamEvent, WireError
from g2sim.actors.kv.wire_neutral import JOINED, LEFT, Membership
from g2sim.actors.kv.wire_vllm import MAX_FRAME_BYTES, decode_batch, read_message, read_replay_answer
from g2sim.bus.errors import ConfigError, LogDamaged, shorten
from g2sim.bus.log import MAGIC, LogReader
from g2sim.scenarios.capture import ANEW, ENDED, MESSAGE, OPENED
from g2sim.scenarios.garbage import rare_collections
from g2sim.scenarios.run_folder import log_file
from g2sim.scenarios.validate import (
    Bad,
    BatchArrived,
    Item,
    LogRecord,
    LogSettings,
    Source,
    StreamEnded,
    Validator,
)
from g2sim.scenarios.validate_pools import POOL_TAGS

MAX_LINE_BYTES: Final = 16 * 2**20
READ_AHEAD: Final = 16
"""Items decoded in one go and then checked in one go: a sixth faster, as each loop alone fits the processor's caches.
Few, because they are held at once and one can be a batch of ``MAX_PAYLOAD_BYTES``."""

Located = tuple[int, Item]
"""Line or record number, and what is there."""


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


_careful: Final = json.JSONDecoder(parse_constant=_refuse_constant)
_quick: Final = msgspec.json.Decoder().decode


def _parse(line: bytes) -> Any:
    """The JSON value that a line is. Raises ValueError or RecursionError.

    What the quick reader refuses is read again: the careful one allows somewhat more, and says better what is wrong.
    """
    try:
        return _quick(line)
    except (msgspec.MsgspecError, RecursionError):
        pass
    text = line.decode().strip()
    try:
        value, stop = _careful.scan_once(text, 0)  # type: ignore[attr-defined]
    except StopIteration:
        raise ValueError("there is no value" if not text else "the value is not complete") from None
    if stop != len(text):
        raise ValueError(f"more text behind the value at column {stop + 1}")
    return value


def open_stream(path: Path) -> tuple[Source, Iterator[Located]]:
    """A file or run folder as a source and its items.

    Raises: ConfigError if there is nothing to read, or it is none of the kinds.
    """
    path = log_file(path)
    try:
        file = path.open("rb")
    except (OSError, ValueError) as failure:
        reason = getattr(failure, "strerror", None) or str(failure)
        raise ConfigError("", where=str(path), problem=f"cannot read the stream: {reason}") from failure
    if not file.seekable():
        file.close()
        problem = "is no file that can be read twice"
        raise ConfigError("", where=str(path), problem=problem, hint="write it to a file first")
    head = file.read(len(MAGIC))
    if head == MAGIC:
        file.close()
        reader = LogReader(path)
        if MESSAGE in reader.header.events:
            return Source(str(path), "vllm", "record"), _capture(reader)
        return Source(str(path), "log", "record"), _run_log(reader)
    try:
        file.seek(0)
        form = json_form(file)
        file.seek(0)
    except BaseException:
        file.close()
        raise
    if form == "records":
        file.close()
        hint = "give the run itself, or what g2sim export --kv-events neutral writes"
        raise ConfigError("", where=str(path), problem="these are lines of g2sim events", hint=hint)
    if form is None:
        file.close()
        if not head:
            raise ConfigError("", where=str(path), problem="the stream is empty")
        allowed = "a g2sim event log or run folder, a capture, neutral JSON lines, Dynamo router events as JSON lines"
        raise ConfigError("", where=str(path), problem="this is no event stream that is known here", allowed=allowed)
    return Source(str(path), form, "line"), _lines(file, form)


def check_files(paths: Sequence[Path], validator: Validator) -> int:
    """Feed files to a validator, one after the other. Returns how many items were good."""
    good = 0
    for path in paths:
        source, items = open_stream(path)
        validator.begin(source)
        number = 0
        feed = validator.feed
        with rare_collections():
            while ahead := list(itertools.islice(items, READ_AHEAD)):
                for number, item in ahead:
                    feed(number, item)
                    if type(item) is not Bad:
                        good += 1
        validator.end(number)
    return good


# -- JSON lines


def json_form(file: BinaryIO) -> str | None:
    """Form of the first JSON object, within the first lines, that has one; None if there is none.

    "neutral" and "dynamo" are KV event streams, "records" are lines of ``g2sim events``.
    """
    for _ in range(100):
        line = file.readline(MAX_LINE_BYTES + 1)
        if not line:
            break
        try:
            value = _parse(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            if "event" in value and "kind" not in value:
                return "records" if isinstance(value["event"], str) else "dynamo"
            if "kind" in value:
                return "neutral"
    return None


def _dynamo_line(line: bytes) -> StreamEvent:
    return wire_dynamo.decode_quickly(line) or wire_dynamo.decode(_parse(line))


def _neutral_line(line: bytes) -> wire_neutral.Line:
    return wire_neutral.decode(_parse(line))


def _lines(file: BinaryIO, form: str) -> Iterator[Located]:
    read: Callable[[bytes], wire_neutral.Line] = _dynamo_line if form == "dynamo" else _neutral_line
    with file:
        number = 0
        while True:
            line = file.readline(MAX_LINE_BYTES + 1)
            if not line:
                return
            number += 1
            if len(line) > MAX_LINE_BYTES:
                yield number, Bad("KV001", f"the line is longer than {MAX_LINE_BYTES} bytes")
                while line and not line.endswith(b"\n"):
                    line = file.readline(MAX_LINE_BYTES)
                continue
            try:
                item = read(line)
            except WireError as error:
                yield number, Bad("KV001", str(error))
            except (ValueError, RecursionError) as error:
                if line.strip():
                    cut = "; the file ends inside it" if not line.endswith(b"\n") else ""
                    yield number, Bad("KV001", f"not JSON: {shorten(str(error) or type(error).__name__)}{cut}")
            else:
                yield number, item


# -- logs


def _run_log(reader: LogReader) -> Iterator[Located]:
    with reader:
        number = -1
        may_crash = "mb.crash" in reader.header.events
        here: set[str | int | None] = set()  # workers that have published something, so that they can leave
        yield 0, settings_of(reader.header.scenario)
        try:
            for number, (tag, time_ms, _, _, values) in enumerate(reader.iter_raw()):
                if (event_of := LOG_EVENTS.get(tag)) is not None:
                    event = event_of(time_ms, values)
                    if may_crash:
                        here.add(event.worker_id)
                    yield number, event
                elif tag in POOL_TAGS:
                    yield number, LogRecord(tag, values)
                elif tag in _MEMBERSHIP:
                    worker, role, _ = values
                    if f"{role}-{worker}" in here:
                        yield number, Membership(kind=_MEMBERSHIP[tag], worker_id=f"{role}-{worker}", dp_rank=None)
        except LogDamaged as damage:
            yield number + 1, Bad("KV002", f"byte {damage.byte_offset}: {damage.problem}")
        except (TypeError, ValueError, AttributeError) as error:
            # The frames check, yet a value is not what the event's schema promises.
            yield number, Bad("KV002", f"the record's values are not an event's: {error}")


def _stored(time_ms: float, values: Sequence[Any]) -> StreamEvent:
    worker, role, dp_rank, event_id, tier, parent, position, hashes, tokens_hashes = values
    return StreamEvent(
        kind=STORED,
        worker_id=f"{role}-{worker}",
        dp_rank=dp_rank,
        event_id=event_id,
        ts_ms=time_ms,
        medium=tier,
        hashes=hashes,
        parent=parent,
        position=position,
        root=parent is None and position == 0,
        tokens_hashes=tokens_hashes,
    )


def _removed(time_ms: float, values: Sequence[Any]) -> StreamEvent:
    worker, role, dp_rank, event_id, tier, hashes = values
    return StreamEvent(
        kind=REMOVED,
        worker_id=f"{role}-{worker}",
        dp_rank=dp_rank,
        event_id=event_id,
        ts_ms=time_ms,
        medium=tier,
        hashes=hashes,
    )


def _cleared(time_ms: float, values: Sequence[Any]) -> StreamEvent:
    worker, role, dp_rank, event_id, tier = values
    return StreamEvent(
        kind=CLEARED, worker_id=f"{role}-{worker}", dp_rank=dp_rank, event_id=event_id, ts_ms=time_ms, medium=tier
    )


LOG_EVENTS: Final[dict[str, Callable[[float, Sequence[Any]], StreamEvent]]] = {
    "kv.sto": _stored,
    "kv.rem": _removed,
    "kv.clr": _cleared,
}
"""Tag of a run log's KV record -> (time [ms], field values) to the neutral value."""

_MEMBERSHIP: Final = {"mb.crash": LEFT, "mb.start": JOINED}
"""Tag of a run log's record of a worker that crashed or restarted -> what that means for its streams."""


def settings_of(scenario: Any) -> LogSettings:
    """Capacities and block sizes by role, as far as a log's header says them."""
    out = LogSettings({}, {}, {})
    try:
        workers = scenario["engine"]["workers"]
        for role, worker in workers.items():
            cache = worker["kv_cache"]
            blocks = cache["capacity"].get("blocks")
            if type(blocks) is int:
                out.device_blocks[role] = blocks
            out.block_sizes[role] = cache["block_size"]
            host = cache.get("host_offload")
            if host is not None:
                out.host_blocks[role] = host["num_host_blocks"]
    except (KeyError, TypeError, AttributeError):
        pass  # a header of another make: capacities are then not checked
    return out


# -- vLLM messages


@attrs.define(slots=True)
class MessageReader:
    """Turns the messages of one vLLM stream into items.

    Args:
        name: the worker's name, unless the topic says one (``kv@<pod>@<model>``).
        dp_rank: the rank of batches that name none.
    Attributes:
        anew: the next batch is the first of a publisher that began anew.
    """

    name: str
    dp_rank: int = 0
    anew: bool = False
    _ranks: set[tuple[str | int, int]] = attrs.Factory(set)

    def read(self, frames: Sequence[bytes], *, replayed: bool) -> Item | None:
        """One message, or none for a connection that was cut; returns None for the end marker of a replay."""
        if not frames:
            where = "replay of stream" if replayed else "stream"
            problem = f"a frame of more than {MAX_FRAME_BYTES} bytes, or one that is not ZeroMQ's"
            return Bad("KV001", f"{where} {self.name}: the connection was cut by {problem}; what it held is not known")
        try:
            message = read_replay_answer(frames) if replayed else read_message(frames)
        except WireError as error:
            return Bad("KV001", f"stream {self.name}: {error}")
        if message.end:
            return None
        number = message.sequence
        try:
            batch = decode_batch(message.payload, event_id=number, replayed=replayed)
        except WireError as error:
            return Bad("KV001", f"stream {self.name}: {error.inside(f'batch {number}')}")
        worker = self._worker(message.topic) if message.topic else self.name
        rank = self.dp_rank if batch.dp_rank is None else batch.dp_rank
        self._ranks.add((worker, rank))
        anew, self.anew = self.anew, False
        return BatchArrived(worker, rank, number, batch.events, replayed, anew)

    def ended(self, *, tail_confirmed: bool) -> StreamEnded:
        """The listening ended."""
        return StreamEnded(tuple(sorted(self._ranks, key=str)), tail_confirmed)

    def _worker(self, topic: bytes) -> str:
        if topic.startswith(b"kv@"):
            pod = topic.split(b"@")[1].decode(errors="replace")
            if pod:
                return pod
        return self.name


def _capture(reader: LogReader) -> Iterator[Located]:
    readers: dict[str, MessageReader] = {}
    with reader:
        number = -1
        try:
            for number, (tag, _, _, _, values) in enumerate(reader.iter_raw()):
                if tag == MESSAGE:
                    stream, replayed, frames = values
                    messages = readers.get(stream)
                    if messages is None:
                        messages = readers[stream] = MessageReader(str(stream))
                    item = messages.read(frames, replayed=bool(replayed))
                    if item is not None:
                        yield number, item
                elif tag == OPENED:
                    readers[values[0]] = MessageReader(values[0], values[3])
                elif tag == ANEW:
                    readers[values[0]].anew = True
                elif tag == ENDED:
                    yield number, readers[values[0]].ended(tail_confirmed=values[1])
        except LogDamaged as damage:
            yield number + 1, Bad("KV002", f"byte {damage.byte_offset}: {damage.problem}")
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            yield number, Bad("KV002", f"the record's values are not a message's: {error}")
