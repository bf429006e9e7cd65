"""Wire forms: what is decoded and encoded again is the same, bytes are vLLM's, and nothing hostile gets through."""

from __future__ import annotations

import json
import struct
from array import array
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from g2sim.actors.kv import wire_dynamo, wire_neutral, wire_vllm
from g2sim.actors.kv.wire import (
    CLEARED,
    OTHER,
    REMOVED,
    STORED,
    EngineFields,
    StreamEvent,
    WireError,
    frozen,
    hash_key,
    hash_keys,
    thawed,
    tier_of,
)
from g2sim.actors.kv.wire_neutral import Membership, Snapshot
from g2sim.actors.kv.wire_vllm import (
    Batch,
    Message,
    ReplayLayout,
    Shape,
    decode_batch,
    encode_batch,
    message_frames,
    read_message,
    read_replay_answer,
    read_replay_request,
    replay_answer,
    replay_request,
)

U64 = st.integers(0, 2**64 - 1)
NUMBERS = st.integers(-(2**63), 2**64 - 1)
RAW = st.binary(min_size=1, max_size=32)
HEX = st.text("0123456789abcdefABCDEF", min_size=1, max_size=64)
WORDS = st.none() | st.text(max_size=8)
SMALL = st.none() | st.integers(0, 7)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=5,
).map(lambda value: frozen(value, ""))
TOKEN_LISTS = st.lists(st.integers(0, 2**32 - 1), max_size=6)
TOKENS = TOKEN_LISTS.map(lambda ids: array("I", ids))


def beyond(*taken: str) -> st.SearchStrategy[tuple[tuple[str, Any], ...]]:
    """Fields that the form does not know, by names that it does not use."""
    names = st.text(min_size=1, max_size=6).map(lambda name: f"x_{name}")
    return st.dictionaries(names, PLAIN, max_size=2).map(lambda fields: tuple(fields.items()))


@st.composite
def vllm_events(draw: st.DrawFn, shape: Shape) -> StreamEvent:
    """Events that vLLM's form can say."""
    kind = draw(st.sampled_from([STORED, REMOVED, CLEARED, OTHER]))
    more = draw(beyond()) if shape is Shape.MAP else ()
    if kind == OTHER:
        if shape is Shape.ARRAY:
            more = (("fields", draw(st.lists(PLAIN, max_size=3).map(tuple))),)
        return StreamEvent(kind=OTHER, tag=draw(st.sampled_from(["Weird", "Ignored", ""])), more=more)
    if kind == CLEARED:
        return StreamEvent(kind=CLEARED, more=more)
    hashes = draw(st.lists(draw(st.sampled_from([NUMBERS, RAW])), max_size=4).map(tuple))
    tail = {
        "spec_kind": draw(st.none() | st.just("full_attention")),
        "sliding_window": draw(SMALL),
        "locality": draw(st.sampled_from([None, "LOCAL", "REMOTE"])),
    }
    engine: EngineFields | None = EngineFields(**tail)
    parent, root = None, False
    if kind == STORED:
        parent = draw(st.none() | NUMBERS | RAW)
        engine = EngineFields(
            token_ids=draw(TOKENS),
            block_size=draw(st.integers(0, 64)),
            lora_id=draw(SMALL),
            lora_name=draw(WORDS),
            extra_keys=draw(st.none() | st.lists(PLAIN, max_size=2).map(tuple)),
            **tail,
        )
        root = parent is None and bool(engine.token_ids)
    elif set(tail.values()) == {None}:
        engine = None
    return StreamEvent(
        kind=kind,
        medium=draw(WORDS),
        hashes=hashes,
        parent=parent,
        root=root,
        group_idx=draw(SMALL),
        engine=engine,
        more=more,
    )


@pytest.mark.parametrize("shape", Shape)
def test_vllm_batches_come_back_as_they_were(shape: Shape) -> None:
    @settings(max_examples=150, deadline=None)
    @given(st.lists(vllm_events(shape), max_size=3), st.floats(0, 2e9), SMALL)
    def check(events: list[StreamEvent], ts_s: float, rank: int | None) -> None:
        placed = tuple(replace(event, dp_rank=rank, event_id=9, ts_ms=ts_s * 1000.0) for event in events)
        batch = Batch(ts_s=ts_s, events=placed, dp_rank=rank)
        payload = encode_batch(batch, shape)
        assert decode_batch(payload, event_id=9) == batch
        assert encode_batch(decode_batch(payload), shape) == payload

    check()


# What a value of some field can be: of the right type or not, inside its bounds or not.
ANY_FIELD = (
    PLAIN.map(thawed)
    | TOKEN_LISTS
    | st.lists(RAW | NUMBERS | WORDS, max_size=3)
    | st.sampled_from([2**32, 2**31 + 1, -1, b""])
)
FIELD_NAMES = st.sampled_from(["type", *wire_vllm._FIELDS["BlockStored"], "x_else"])


@pytest.mark.parametrize("shape", Shape)
def test_the_quick_reader_of_batches_says_what_the_careful_one_says(shape: Shape) -> None:
    taken = set()

    @settings(max_examples=300, deadline=None)
    @given(vllm_events(shape), FIELD_NAMES, ANY_FIELD, st.integers(0, 12), st.booleans(), st.data())
    def check(event: StreamEvent, name: str, value: Any, at: int, change: bool, data: st.DataObject) -> None:
        payload = encode_batch(Batch(ts_s=1.5, events=(event,), dp_rank=0), shape)
        if change:
            _, (fields,), _ = msgpack.unpackb(payload)
            if shape is Shape.MAP:
                fields[name] = value
            else:
                fields[at : at + 1] = [value]
            payload = msgpack.packb([1.5, [fields], data.draw(SMALL | st.just(2**32))])
        quick = wire_vllm._quick_batch(payload, 3, False)
        taken.add((quick is not None, change))
        if quick is not None:
            careful = wire_vllm._careful_batch(payload, 3, False)
            assert repr(quick) == repr(careful)

    check()
    assert taken >= {(True, False), (False, True)}


STORED_FIELDS = [[101, -3], None, [1, 2, 3, 4], 2, None, "GPU", None]


def publisher_bytes(event: dict[str, Any], shape: str) -> bytes:
    """A batch as the publisher of the router recordings writes it."""
    order = {
        "BlockStored": (
            *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
            *("extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"),
        ),
        "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    }.get(event["type"], ())
    last = max((idx for idx, name in enumerate(order) if name in event), default=-1)
    row = [event["type"], *(event.get(name) for name in order[: last + 1])]
    return msgpack.packb([1.5, [event if shape == "map" else row], 0])


@pytest.mark.parametrize("shape", Shape)
@pytest.mark.parametrize(
    "event",
    [
        dict(
            zip(
                [
                    "type",
                    "block_hashes",
                    "parent_block_hash",
                    "token_ids",
                    "block_size",
                    "lora_id",
                    "medium",
                    "lora_name",
                ],
                ["BlockStored", *STORED_FIELDS],
                strict=True,
            )
        ),
        {"type": "BlockStored", "block_hashes": [2**64 - 1], "parent_block_hash": 7, "token_ids": [9] * 4}
        | {"block_size": 4, "lora_id": None, "medium": "CPU", "lora_name": None, "extra_keys": None, "group_idx": 1},
        {"type": "BlockRemoved", "block_hashes": [1, 2], "medium": "CPU"},
        {"type": "AllBlocksCleared"},
    ],
    ids=["stored", "stored-group", "removed", "cleared"],
)
def test_bytes_are_those_of_the_oracle_publisher(event: dict[str, Any], shape: Shape) -> None:
    payload = publisher_bytes(event, shape.value)
    written = encode_batch(decode_batch(payload), shape)
    if "extra_keys" in event and shape is Shape.MAP:
        payload = publisher_bytes({key: item for key, item in event.items() if key != "extra_keys"}, "map")
    assert written == payload


def one(*events: Any, rank: Any = 0, tail: tuple[Any, ...] = ()) -> bytes:
    return msgpack.packb([1.5, list(events), rank, *tail])


ARRAY = ["BlockStored", *STORED_FIELDS]
ACCEPTED = {
    "array cut after block_size": one(ARRAY[:5]),
    "everything up to cache-spec fields": one([*ARRAY, None, 0, "full_attention", None]),
    "locality at the end": one([*ARRAY, None, 0, "full_attention", None, "LOCAL"]),
    "two fields after locality": one([*ARRAY, None, 0, "full_attention", None, "LOCAL", None, "future"]),
    "map with unknown field": one({"type": "BlockStored", "block_hashes": [1], "future": 1}),
    "map without medium": one({"type": "BlockRemoved", "block_hashes": [1]}),
    "null rank": one(ARRAY, rank=None),
    "hash as bytes": one(["BlockStored", [b"\x01" * 32], 100, [1, 2], 2]),
    "unknown tag beside a good event": one({"type": "Weird"}, ARRAY),
}
REFUSED = {
    "batch of two elements": msgpack.packb([1.5, []]),
    "batch of four elements": one(ARRAY, tail=("x",)),
    "batch as map": msgpack.packb({"ts": 1.5, "events": [], "data_parallel_rank": 0}),
    "not msgpack": b"garbage",
    "empty": b"",
    "only a length": b"\xdd\xff\xff\xff\xff",
    "nested": b"\x91" * 5000 + b"\xc0",
    "extension": msgpack.packb([1.5, [msgpack.ExtType(4, b"x")], 0]),
    "not UTF-8": b"\x93\x00\x91\x92\xa1\xff\x90\xc0",
    "integer keys": msgpack.packb([1.5, [{1: 2}], 0]),
    "time as text": msgpack.packb(["now", [], 0]),
    "NaN time": msgpack.packb([float("nan"), [], 0]),
    "huge time": msgpack.packb([1e308, [], 0]),
    "negative rank": one(ARRAY, rank=-1),
    "boolean rank": one(ARRAY, rank=True),
    "event is a number": one(5),
    "event is empty": one([]),
    "tag is a number": one([5]),
    "hashes as text": one(["BlockStored", "abc", None, [], 0]),
    "hash as text": one(["BlockStored", ["abc"], None, [], 0]),
    "hash as float": one(["BlockRemoved", [1.0], "GPU"]),
    "hash is too long": one(["BlockRemoved", [b"x" * 1000], "GPU"]),
    "parent as text": one(["BlockStored", [1], "abc", [], 0]),
    "token too large": one(["BlockStored", [1], None, [2**32], 1]),
    "token as text": one(["BlockStored", [1], None, ["a"], 1]),
    "negative block size": one(["BlockStored", [1], None, [1], -1]),
    "medium as a number": one(["BlockRemoved", [1], 7]),
    "deep extra keys": one(
        ["BlockStored", [1], None, [], 0, None, "GPU", None, msgpack.unpackb(b"\x91" * 20 + b"\xc0")]
    ),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_shapes_that_the_reference_or_vllm_knows_are_read(name: str) -> None:
    batch = decode_batch(ACCEPTED[name])
    assert batch.events
    again = encode_batch(batch, Shape.MAP if name.startswith("map") else Shape.ARRAY)
    assert decode_batch(again) == batch


@pytest.mark.parametrize("name", REFUSED)
def test_malformed_payloads_are_refused_with_a_place(name: str) -> None:
    with pytest.raises(WireError) as caught:
        decode_batch(REFUSED[name])
    assert caught.value.place
    assert len(str(caught.value)) < 400


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_raise_nothing_but_wire_errors(payload: bytes) -> None:
    for read in (
        decode_batch,
        lambda data: read_message([data, data[:8], data]),
        lambda data: read_replay_answer([b"", data]),
    ):
        try:
            read(payload)
        except WireError:
            pass


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_flipped_byte_raises_nothing_but_wire_errors(data: st.DataObject) -> None:
    payload = bytearray(data.draw(st.sampled_from(sorted(ACCEPTED.values()))))
    payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    try:
        batch = decode_batch(bytes(payload))
    except WireError:
        return
    encode_batch(batch, Shape.ARRAY if batch.events and not isinstance(batch.events[0].more, dict) else Shape.MAP)


def test_frames_of_live_messages_requests_and_answers() -> None:
    message = Message(topic=b"kv@w0@m", sequence=7, payload=b"p")
    assert message_frames(message) == [b"kv@w0@m", struct.pack(">Q", 7), b"p"]
    assert read_message(message_frames(message)) == message
    assert replay_request(5) == [b"", struct.pack(">Q", 5)]
    assert read_replay_request(replay_request(5)) == 5
    assert replay_answer(message, ReplayLayout.TOPIC) == [b"", b"kv@w0@m", struct.pack(">Q", 7), b"p"]
    assert replay_answer(message, ReplayLayout.SEQ) == [b"", struct.pack(">Q", 7), b"p"]
    end = Message(topic=b"", sequence=0, payload=b"", end=True)
    assert replay_answer(end, ReplayLayout.SEQ) == [b"", b"\xff" * 8, b""]
    assert read_replay_answer(replay_answer(end, ReplayLayout.TOPIC)) == end
    assert read_replay_answer(replay_answer(message, ReplayLayout.SEQ)) == replace(message, topic=None)


@pytest.mark.parametrize("frames", [[], [b"", b"1", b""], [b"t", b"12345678"], [b"x" * 9999, b"12345678", b""]])
def test_odd_frames_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        read_message(frames)
    with pytest.raises(WireError):
        read_replay_request(frames)
    with pytest.raises(WireError):
        read_replay_answer(frames)


# -- neutral

ANY_HASH = st.sampled_from([NUMBERS, RAW, HEX]).flatmap(lambda kind: st.lists(kind, max_size=4).map(tuple))


@st.composite
def neutral_lines(draw: st.DrawFn) -> wire_neutral.Line:
    worker = draw(st.text(max_size=4) | st.integers(0, 2**64 - 1))
    kind = draw(st.sampled_from([STORED, REMOVED, CLEARED, "joined", "left", "snapshot"]))
    rank = draw(SMALL)
    if kind in ("joined", "left"):
        return Membership(kind=kind, worker_id=worker, dp_rank=rank)
    event = StreamEvent(
        kind=STORED if kind == "snapshot" else kind,
        worker_id=worker,
        dp_rank=rank,
        event_id=draw(U64),
        ts_ms=draw(st.none() | st.integers(0, 9) | st.floats(0, 1e12)),
        medium=draw(WORDS),
        cache_id=draw(WORDS),
        group_idx=draw(SMALL),
        replayed=draw(st.booleans()),
        more=draw(beyond()),
    )
    if kind != CLEARED:
        event = replace(event, hashes=draw(ANY_HASH))
    if kind in (STORED, "snapshot"):
        parent, position = draw(st.none() | U64 | RAW | HEX), draw(SMALL)
        event = replace(event, parent=parent, position=position, root=parent is None and position == 0)
        event = replace(event, tokens_hashes=draw(st.lists(U64, max_size=3).map(tuple)))
        if draw(st.booleans()):
            event = replace(event, engine=EngineFields(token_ids=draw(TOKENS), block_size=draw(SMALL)))
    if kind == "snapshot":
        last, rank = draw(U64), draw(st.integers(0, 3))
        run = replace(event, event_id=last, dp_rank=rank, ts_ms=None, replayed=True)
        return Snapshot(worker_id=worker, dp_rank=rank, last_event_id=last, runs=(run,))
    return event


@settings(max_examples=200, deadline=None)
@given(neutral_lines())
def test_neutral_lines_come_back_as_they_were(line: wire_neutral.Line) -> None:
    text = wire_neutral.encode(line)
    again = wire_neutral.decode(json.loads(text))
    assert again == line
    assert wire_neutral.encode(again) == text


def test_the_neutral_line_of_the_description_is_written_to_the_letter() -> None:
    text = (
        '{"worker_id":"w0","dp_rank":0,"event_id":0,"ts_ms":0,"tier":"Device","kind":"Stored","block_hashes":[1,2],'
        '"parent_hash":null,"start_position":0}'
    )
    assert wire_neutral.encode(wire_neutral.decode(json.loads(text))) == text


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=6,
)
KEYS = ["worker_id", "dp_rank", "event_id", "ts_ms", "tier", "block_hashes", "parent_hash", "start_position"]


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from([*KEYS, "kind", "runs", "token_ids", "event", "storage_tier"]), JSON_VALUES))
def test_odd_json_raises_nothing_but_wire_errors(value: dict[str, Any]) -> None:
    for kind in ("Stored", "Removed", "Cleared", "Snapshot", "Joined", value.get("kind")):
        for decode in (wire_neutral.decode, wire_dynamo.decode):
            try:
                decode(value | {"kind": kind})
            except WireError:
                pass


# -- Dynamo

DUMPED = (
    '{"worker_id": 1, "storage_tier": "host_pinned", "residency_domain": "worker", "event": {"event_id": 7, '
    '"dp_rank": 0, "data": {"stored": {"parent_hash": 102, "start_position": null, "blocks": [{"block_hash": 103, '
    '"tokens_hash": 16024980976528976948, "mm_extra_info": null}]}}}}'
)


def test_the_event_that_the_wheel_dumps_is_written_to_the_letter() -> None:
    event = wire_dynamo.decode(json.loads(DUMPED))
    inner = json.loads(DUMPED)
    written = json.loads(wire_dynamo.encode(event))
    assert written == inner
    assert list(written["event"]) == list(inner["event"])


COUNTS = st.none() | U64 | st.integers(-2, 2**70)


@st.composite
def dynamo_lines(draw: st.DrawFn) -> dict[str, Any]:
    """Lines of which most are good, and which say what they say in the usual way or not."""
    block = st.fixed_dictionaries(
        {"block_hash": U64, "tokens_hash": U64}, optional={"mm_extra_info": st.none() | st.just({"mm_objects": []})}
    )
    stored = st.fixed_dictionaries(
        {"blocks": st.lists(block, max_size=3)}, optional={"parent_hash": COUNTS, "start_position": SMALL}
    )
    removed = st.fixed_dictionaries({"block_hashes": st.lists(U64, max_size=3)})
    data = draw(
        st.fixed_dictionaries({"stored": stored})
        | st.fixed_dictionaries({"removed": removed})
        | st.sampled_from(["cleared", {"cleared": None}, {}, {"stored": {"blocks": []}, "removed": None}])
    )
    inner = {"event_id": draw(U64), "dp_rank": draw(SMALL), "data": data}
    line = {"worker_id": draw(COUNTS), "storage_tier": draw(WORDS), "residency_domain": "worker", "event": inner}
    holder = draw(st.sampled_from([line, inner, data, next(iter(data.values()), None) if data != "cleared" else None]))
    if isinstance(holder, dict) and draw(st.booleans()):
        holder[draw(st.sampled_from([*holder, "more"]))] = draw(JSON_VALUES | COUNTS)
    elif isinstance(holder, dict) and holder and draw(st.booleans()):
        del holder[draw(st.sampled_from(sorted(holder)))]
    return line


def test_the_quick_reader_of_dynamo_lines_says_what_the_plain_one_says() -> None:
    taken = set()

    @settings(max_examples=300, deadline=None)
    @given(dynamo_lines())
    def check(line: dict[str, Any]) -> None:
        quick = wire_dynamo.decode_quickly(json.dumps(line).encode())
        taken.add(quick and quick.kind)
        if quick is not None:
            assert repr(quick) == repr(wire_dynamo.decode(line))

    check()
    assert taken >= {STORED, REMOVED, None}


@pytest.mark.parametrize("data", ["cleared", {"cleared": None}, {"removed": {"block_hashes": [1]}}])
def test_dynamo_events_without_blocks(data: Any) -> None:
    value = {"worker_id": 1, "storage_tier": "device", "event": {"event_id": 0, "data": data}}
    event = wire_dynamo.decode(value)
    assert (event.dp_rank, event.kind) == (0, REMOVED if isinstance(data, dict) and "removed" in data else CLEARED)
    assert wire_dynamo.decode(json.loads(wire_dynamo.encode(event))) == event


def test_a_medium_is_looked_up_by_its_exact_spelling() -> None:
    assert [tier_of("vllm", medium) for medium in (None, "", "GPU", "CPU", "DISK")] == [
        "device",
        "device",
        "device",
        "host_pinned",
        "disk",
    ]
    assert [tier_of("vllm", medium) for medium in ("gpu", "HOST", "host_pinned", "HostPinned")] == [None] * 4


def test_hash_keys_follow_the_printed_rule() -> None:
    assert hash_keys((-1, 5)) == (2**64 - 1, 5)
    assert hash_key("0xAB") == hash_key("ab")
    assert len({hash_key(5), hash_key(b"\x05"), hash_key("05")}) == 3
