"""KV events as vLLM publishes them over ZeroMQ: frames, msgpack batches, replay requests and answers.

Owns: the bytes, both ways. Refuses to know: sockets.

Live message: topic, sequence number (8 bytes, big-endian), payload. Payload: ``[seconds, [event, ...], rank or nil]``.
An event is a tagged array (older vLLM) or a map with the tag under "type" (since mid 2026); both are read, either is
written. Replay request: empty delimiter, first wanted number. Answers: empty delimiter, topic (vLLM 0.26 and later
only), number, payload; the last one has the number -1 and an empty payload.

What is written is what vLLM writes: fields without a default always, the others when they differ from it.
"""

from __future__ import annotations

import enum
import math
import struct
from array import array
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final

import msgpack
import msgspec

from g2sim.actors.kv.wire import (
    CLEARED,
    MAX_HASH_BYTES,
    MAX_HASHES,
    NO_TOKENS,
    OTHER,
    REMOVED,
    STORED,
    EngineFields,
    Hash,
    StreamEvent,
    WireError,
    check_count,
    check_hash,
    check_optional,
    frozen,
    thawed,
)
from g2sim.bus.errors import shorten

MAX_PAYLOAD_BYTES: Final = 64 * 2**20
MAX_FRAME_BYTES: Final = 16 * 2**20
"""Largest frame taken from a socket [B]. A batch that stores a prompt of a million tokens has about 8 MB."""
MAX_TOPIC_BYTES: Final = 4096
END_OF_REPLAY: Final = b"\xff" * 8
_INTEGERS: Final = frozenset((int,))
_NUMBER: Final = struct.Struct(">Q")
_START: Final = struct.Struct(">BBd")  # array of 3, 64-bit float, seconds

_STORED: Final = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "locality",
)
_REMOVED: Final = (
    "block_hashes",
    "medium",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "locality",
)
_FIELDS: Final = {"BlockStored": _STORED, "BlockRemoved": _REMOVED, "AllBlocksCleared": ()}
_KEYS: Final = {tag: frozenset(("type", *fields)) for tag, fields in _FIELDS.items()}
_GROUP: Final = frozenset(("group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality"))
_NO_GROUP: Final = (None, None, None)
_ALWAYS: Final = {"BlockStored": 7, "BlockRemoved": 2, "AllBlocksCleared": 0}
"""How many of the fields have no default and are always written."""
_TAGS: Final = {STORED: "BlockStored", REMOVED: "BlockRemoved", CLEARED: "AllBlocksCleared"}


class Shape(enum.StrEnum):
    """How an event is written."""

    ARRAY = "array"
    MAP = "map"


class ReplayLayout(enum.StrEnum):
    """Whether a replay answer has a topic frame (vLLM 0.26 and later) or not."""

    SEQ = "seq"
    TOPIC = "topic"


class Batch(msgspec.Struct, kw_only=True, frozen=True, gc=False):
    """One payload. ``ts_s`` is in seconds; ``dp_rank`` None means that the publisher does not say."""

    ts_s: int | float
    events: tuple[StreamEvent, ...]
    dp_rank: int | None


class Message(msgspec.Struct, kw_only=True, frozen=True, gc=False):
    """The frames of a live message or a replay answer. ``topic`` None: the layout has none. ``end``: end of replay."""

    topic: bytes | None
    sequence: int
    payload: bytes
    end: bool = False


# -- what a batch can be, for the quick way of reading: a part of what ``_read_event`` allows, and nothing else

_Rank = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
_HashBytes = Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_HASH_BYTES)]
_Hashes = Annotated[tuple[int | _HashBytes, ...], msgspec.Meta(max_length=MAX_HASHES)]


class _Stored(msgspec.Struct, tag_field="type", tag="BlockStored", forbid_unknown_fields=True, gc=False):
    block_hashes: _Hashes
    parent_block_hash: int | _HashBytes | None = None
    token_ids: list[int] | None = None
    block_size: Annotated[int, msgspec.Meta(ge=0, le=2**31)] | None = None
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: tuple[Any, ...] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None


class _Removed(msgspec.Struct, tag_field="type", tag="BlockRemoved", forbid_unknown_fields=True, gc=False):
    block_hashes: _Hashes
    medium: str | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None


class _Cleared(msgspec.Struct, tag_field="type", tag="AllBlocksCleared", forbid_unknown_fields=True, gc=False):
    pass


class _StoredRow(_Stored, array_like=True, tag="BlockStored"):
    pass


class _RemovedRow(_Removed, array_like=True, tag="BlockRemoved"):
    pass


class _ClearedRow(_Cleared, array_like=True, tag="AllBlocksCleared"):
    pass


_read_maps: Final = msgspec.msgpack.Decoder(
    tuple[
        int | float,
        Annotated[tuple[_Stored | _Removed | _Cleared, ...], msgspec.Meta(max_length=MAX_HASHES)],
        _Rank | None,
    ]
).decode
_read_rows: Final = msgspec.msgpack.Decoder(
    tuple[
        int | float,
        Annotated[tuple[_StoredRow | _RemovedRow | _ClearedRow, ...], msgspec.Meta(max_length=MAX_HASHES)],
        _Rank | None,
    ]
).decode


# -- frames


def message_frames(message: Message) -> list[bytes]:
    """Frames of a live message."""
    return [message.topic or b"", _NUMBER.pack(message.sequence), message.payload]


def read_message(frames: Sequence[bytes]) -> Message:
    """Live message from its frames; raises WireError."""
    if len(frames) != 3:
        raise WireError("frames", f"got {len(frames)}, allowed: 3 (topic, sequence number, payload)")
    topic, number, payload = frames
    return Message(topic=topic, sequence=_checked(topic, number, payload), payload=payload)


def replay_request(first: int) -> list[bytes]:
    """Frames that ask for everything from a number on, for a DEALER socket."""
    return [b"", _NUMBER.pack(first)]


def read_replay_request(frames: Sequence[bytes]) -> int:
    """First wanted number, from the frames behind the sender's identity; raises WireError."""
    if len(frames) != 2 or frames[0]:
        raise WireError("request", f"got {len(frames)} frames, allowed: an empty one and a sequence number")
    return _checked(b"", frames[1], b"")


def replay_answer(message: Message, layout: ReplayLayout) -> list[bytes]:
    """Frames of one answer, without the identity that a ROUTER socket puts in front."""
    topic = [message.topic or b""] if layout is ReplayLayout.TOPIC else []
    number = END_OF_REPLAY if message.end else _NUMBER.pack(message.sequence)
    return [b"", *topic, number, b"" if message.end else message.payload]


def read_replay_answer(frames: Sequence[bytes]) -> Message:
    """One answer in either layout; raises WireError."""
    if not 3 <= len(frames) <= 4 or frames[0]:
        raise WireError("answer", f"got {len(frames)} frames, allowed: an empty one, topic or not, number, payload")
    topic = frames[1] if len(frames) == 4 else None
    number, payload = frames[-2], frames[-1]
    sequence = _checked(topic or b"", number, payload)
    if number == END_OF_REPLAY:
        if payload:
            raise WireError("answer", "the end marker has a payload")
        return Message(topic=topic, sequence=0, payload=b"", end=True)
    return Message(topic=topic, sequence=sequence, payload=payload)


def _checked(topic: bytes, number: bytes, payload: bytes) -> int:
    """The sequence number that a frame says, provided that this and the other frames have sizes that are allowed."""
    if len(topic) > MAX_TOPIC_BYTES:
        raise WireError("topic", f"got {len(topic)} bytes, allowed: at most {MAX_TOPIC_BYTES}")
    if len(number) != _NUMBER.size:
        raise WireError("sequence", f"got {len(number)} bytes, allowed: {_NUMBER.size}")
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise WireError("payload", f"got {len(payload)} bytes, allowed: at most {MAX_PAYLOAD_BYTES}")
    return int.from_bytes(number, "big")


# -- batches


def encode_batch(batch: Batch, shape: Shape = Shape.MAP) -> bytes:
    """Payload of a batch; raises WireError for an event that vLLM's form cannot say."""
    events = [_event_value(event, shape, f"events[{idx}]") for idx, event in enumerate(batch.events)]
    try:
        payload: bytes = msgpack.packb([batch.ts_s, events, batch.dp_rank])
    except (OverflowError, ValueError) as error:  # an integer of more than 64 bits, or half a surrogate pair
        raise WireError("batch", f"msgpack cannot say it: {error}") from error
    return payload


def decode_batch(payload: bytes, *, event_id: int | None = None, replayed: bool = False) -> Batch:
    """Batch from its payload. The events get the batch's number, time and rank.

    Raises: WireError, with the place inside the batch; nothing of a bad batch is kept, as Dynamo keeps nothing.
    """
    quick = _quick_batch(payload, event_id, replayed)
    return _careful_batch(payload, event_id, replayed) if quick is None else quick


def _quick_batch(payload: bytes, event_id: int | None, replayed: bool) -> Batch | None:
    """A batch of the three kinds without anything beyond their fields; None for all others, good or bad."""
    try:
        # The byte behind array, float64 and array says whether the first event seems to be an array as well.
        first = payload[11] if payload[10] < 0xDC else payload[13 if payload[10] == 0xDC else 15]
        has_rows = 0x90 <= first <= 0x9F or first in (0xDC, 0xDD)
        ts_s, rows, dp_rank = (_read_rows if has_rows else _read_maps)(payload)
        ts_ms = ts_s * 1000.0
        if not math.isfinite(ts_ms):
            return None
        events = []
        for row in rows:
            events.append(_quick_event(row, dp_rank, event_id, ts_ms, replayed))
    except (msgspec.MsgspecError, WireError, OverflowError, IndexError, RecursionError):
        return None
    return Batch(ts_s=ts_s, events=tuple(events), dp_rank=dp_rank)


def _quick_event(
    row: _Stored | _Removed | _Cleared, dp_rank: int | None, event_id: int | None, ts_ms: float, replayed: bool
) -> StreamEvent:
    if isinstance(row, _Stored):
        parent, extra = row.parent_block_hash, row.extra_keys
        tokens = array("I", row.token_ids) if row.token_ids else NO_TOKENS
        return StreamEvent(
            kind=STORED,
            dp_rank=dp_rank,
            event_id=event_id,
            ts_ms=ts_ms,
            medium=row.medium,
            hashes=row.block_hashes,
            parent=parent,
            root=parent is None and bool(tokens),
            group_idx=row.group_idx,
            replayed=replayed,
            engine=EngineFields(
                token_ids=tokens,
                block_size=row.block_size or 0,
                lora_id=row.lora_id,
                lora_name=row.lora_name,
                extra_keys=None if extra is None else frozen(extra, "extra_keys"),
                spec_kind=row.kv_cache_spec_kind,
                sliding_window=row.kv_cache_spec_sliding_window,
                locality=row.locality,
            ),
        )
    if isinstance(row, _Cleared):
        return StreamEvent(kind=CLEARED, dp_rank=dp_rank, event_id=event_id, ts_ms=ts_ms, replayed=replayed)
    group = (row.kv_cache_spec_kind, row.kv_cache_spec_sliding_window, row.locality)
    return StreamEvent(
        kind=REMOVED,
        dp_rank=dp_rank,
        event_id=event_id,
        ts_ms=ts_ms,
        medium=row.medium,
        hashes=row.block_hashes,
        group_idx=row.group_idx,
        replayed=replayed,
        engine=None
        if group == _NO_GROUP
        else EngineFields(spec_kind=group[0], sliding_window=group[1], locality=group[2]),
    )


def _careful_batch(payload: bytes, event_id: int | None, replayed: bool) -> Batch:
    """Any batch, value by value; see ``decode_batch``."""
    try:
        value = msgpack.unpackb(payload, use_list=False, ext_hook=_refuse_extension, timestamp=0)
    except (ValueError, TypeError, RecursionError) as error:
        text = str(error) or "bytes are not one value"
        raise WireError("payload", f"not msgpack: {type(error).__name__}: {shorten(text)}") from error
    if type(value) is not tuple or len(value) != 3:
        got = f"{len(value)} elements" if type(value) is tuple else f"a {type(value).__name__}"
        raise WireError("batch", f"got {got}, allowed: an array of 3 (seconds, events, rank)")
    ts_s, events, dp_rank = value
    if type(events) is not tuple or len(events) > MAX_HASHES:
        raise WireError("batch[1]", f"got {shorten(events)}, allowed: an array of at most {MAX_HASHES} events")
    if dp_rank is not None:
        check_count(dp_rank, "batch[2]", limit=2**32 - 1)
    ts_ms = ts_s * 1000.0 if type(ts_s) in (int, float) else math.nan  # an integer of msgpack has 64 bits
    if not math.isfinite(ts_ms):
        raise WireError("batch[0]", f"got {shorten(ts_s)}, allowed: seconds as a finite number")
    made: list[StreamEvent] = []
    for item in events:
        try:
            made.append(_read_event(item, dp_rank, event_id, ts_ms, replayed))
        except WireError as error:
            raise error.inside(f"events[{len(made)}]") from None
    return Batch(ts_s=ts_s, events=tuple(made), dp_rank=dp_rank)


def batch_time_s(payload: bytes) -> float:
    """Time in a payload, without reading the rest; raises WireError unless it is a float of 64 bits, as vLLM writes."""
    if len(payload) > _START.size:
        array_of_3, float_64, ts_s = _START.unpack_from(payload)
        if (array_of_3, float_64) == (0x93, 0xCB) and math.isfinite(ts_s):
            return float(ts_s)
    raise WireError("batch[0]", "allowed: seconds as a finite float of 64 bits")


def with_batch_time(payload: bytes, ts_s: float) -> bytes:
    """A payload of which ``batch_time_s`` is known, with another time."""
    return _START.pack(0x93, 0xCB, ts_s) + payload[_START.size :]


def _event_value(event: StreamEvent, shape: Shape, place: str) -> Any:
    if event.kind == OTHER:
        if event.tag is None:
            raise WireError(place, "an event of another kind needs its tag")
        more = dict(event.more)
        if "fields" in more:
            return [event.tag, *thawed(more["fields"])]
        return {"type": event.tag, **{key: thawed(item) for key, item in event.more}}
    tag = _TAGS[event.kind]
    values = _field_values(event, place)
    fields, always = _FIELDS[tag], _ALWAYS[tag]
    beyond = [(key, thawed(item)) for key, item in event.more]
    if shape is Shape.MAP:
        written = {name: values[name] for name in fields[:always]}
        written |= {name: values[name] for name in fields[always:] if values[name] is not None}
        return {"type": tag, **written, **dict(beyond)}
    row = [values[name] for name in fields]
    if beyond:
        return [tag, *row, *(item for _, item in beyond)]
    while len(row) > always and row[-1] is None:
        row.pop()
    return [tag, *row]


def _field_values(event: StreamEvent, place: str) -> dict[str, Any]:
    engine = event.engine or EngineFields()
    common = {
        "medium": event.medium,
        "group_idx": event.group_idx,
        "kv_cache_spec_kind": engine.spec_kind,
        "kv_cache_spec_sliding_window": engine.sliding_window,
        "locality": engine.locality,
        "block_hashes": [_wire_hash(item, place) for item in event.hashes],
    }
    if event.kind != STORED:
        return common
    return common | {
        "parent_block_hash": None if event.parent is None else _wire_hash(event.parent, place),
        "token_ids": list(engine.token_ids),
        "block_size": 0 if engine.block_size is None else engine.block_size,
        "lora_id": engine.lora_id,
        "lora_name": engine.lora_name,
        "extra_keys": None if engine.extra_keys is None else thawed(engine.extra_keys),
    }


def _wire_hash(value: Hash, place: str) -> int | bytes:
    if isinstance(value, str):
        raise WireError(f"{place}.block_hashes", f"vLLM's form has no hex text: {shorten(value)}")
    return value


def _read_event(value: Any, dp_rank: int | None, event_id: int | None, ts_ms: float, replayed: bool) -> StreamEvent:
    beyond: list[tuple[str, Any]] = []
    if type(value) is dict:
        fields = value
        tag = value.get("type")
        known = _KEYS.get(tag) if type(tag) is str else None
        if known is None:
            beyond = [(key, item) for key, item in value.items() if key != "type"]
        elif not value.keys() <= known:
            beyond = [(key, item) for key, item in value.items() if key not in known]
    elif type(value) is tuple and value:
        tag, *row = value
        names = _FIELDS.get(tag) if type(tag) is str else None
        if names is None:
            fields, beyond = {}, [("fields", row)]
        else:
            fields = dict(zip(names, row, strict=False))
            beyond = [(f"@{idx}", row[idx]) for idx in range(len(names), len(row))]
    else:
        raise WireError("", f"got {shorten(value)}, allowed: a tagged array or a map with a type")
    if type(tag) is not str or len(tag) > 128:
        raise WireError("type", f"got {shorten(tag)}, allowed: an event tag")
    more = tuple((key, frozen(item, key[:40])) for key, item in beyond) if beyond else ()
    if tag not in _FIELDS:
        return StreamEvent(
            kind=OTHER, tag=tag, dp_rank=dp_rank, event_id=event_id, ts_ms=ts_ms, replayed=replayed, more=more
        )
    if tag == "AllBlocksCleared":
        return StreamEvent(kind=CLEARED, dp_rank=dp_rank, event_id=event_id, ts_ms=ts_ms, replayed=replayed, more=more)
    get = fields.get
    stored = tag == "BlockStored"
    medium, parent, group_idx, engine = get("medium"), None, None, None
    if medium is not None and type(medium) is not str:
        check_optional(medium, str, "medium")
    # Most events say nothing of groups: one look for all of it.
    group: tuple[str | None, int | None, str | None] = _NO_GROUP
    if not fields.keys().isdisjoint(_GROUP):
        group_idx, group = check_optional(get("group_idx"), int, "group_idx"), _group(get)
    if stored:
        engine = _engine(get, group)
        parent = get("parent_block_hash")
        if parent is not None and type(parent) is not int:
            _hash(parent, "parent_block_hash")
    elif group != _NO_GROUP:
        engine = EngineFields(spec_kind=group[0], sliding_window=group[1], locality=group[2])
    return StreamEvent(
        kind=STORED if stored else REMOVED,
        dp_rank=dp_rank,
        event_id=event_id,
        ts_ms=ts_ms,
        medium=medium,
        hashes=_hashes(get("block_hashes")),
        parent=parent,
        # A run with tokens and without a parent begins a prompt; an offload placeholder has neither.
        root=parent is None and engine is not None and bool(engine.token_ids),
        group_idx=group_idx,
        replayed=replayed,
        engine=engine,
        more=more,
    )


def _hashes(value: Any) -> tuple[Hash, ...]:
    if type(value) is not tuple or len(value) > MAX_HASHES:
        raise WireError("block_hashes", f"got {shorten(value)}, allowed: an array of at most {MAX_HASHES} hashes")
    if not _INTEGERS.issuperset(map(type, value)):  # integers of msgpack have 64 bits
        for idx, item in enumerate(value):
            _hash(item, f"block_hashes[{idx}]")
    return value


def _hash(value: Any, place: str) -> Hash:
    if type(value) is str:
        raise WireError(place, f"got {shorten(value)}, allowed: an integer or bytes")
    return check_hash(value, place)


def _group(get: Callable[[str], Any]) -> tuple[str | None, int | None, str | None]:
    """Kind of attention, sliding window and locality."""
    return (
        check_optional(get("kv_cache_spec_kind"), str, "kv_cache_spec_kind"),
        check_optional(get("kv_cache_spec_sliding_window"), int, "kv_cache_spec_sliding_window"),
        check_optional(get("locality"), str, "locality"),
    )


def _engine(get: Callable[[str], Any], group: tuple[str | None, int | None, str | None]) -> EngineFields:
    tokens, extra, size = get("token_ids"), get("extra_keys"), get("block_size")
    lora_id, lora_name = get("lora_id"), get("lora_name")
    if tokens is not None and type(tokens) is not tuple:
        raise WireError("token_ids", f"got {shorten(tokens)}, allowed: an array of integers")
    try:
        token_ids = array("I", tokens or ())
    except (TypeError, ValueError, OverflowError):
        raise WireError("token_ids", "a token id is not an integer of 0 .. 2**32 - 1") from None
    if extra is not None:
        if type(extra) is not tuple:
            raise WireError("extra_keys", f"got {shorten(extra)}, allowed: an array, one entry a block")
        extra = frozen(extra, "extra_keys")
    if type(size) is not int or not 0 <= size <= 2**31:
        size = 0 if size is None else check_count(size, "block_size", limit=2**31)
    if lora_id is not None:
        check_optional(lora_id, int, "lora_id")
    if lora_name is not None:
        check_optional(lora_name, str, "lora_name")
    return EngineFields(
        token_ids=token_ids,
        block_size=size,
        lora_id=lora_id,
        lora_name=lora_name,
        extra_keys=extra,
        spec_kind=group[0],
        sliding_window=group[1],
        locality=group[2],
    )


def _refuse_extension(code: int, _data: bytes) -> Any:
    raise ValueError(f"extension type {code}")
