"""The event log: damage first, then refusals when writing, then that everything comes back."""

from __future__ import annotations

import errno
import io
import itertools
import math
import os
import random
import re
import struct
import subprocess
import sys
import threading
import tracemalloc
import types
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import attrs
import msgpack
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

import g2sim.actors.host_pool.events
import g2sim.actors.kv.events
import g2sim.actors.router.events
import g2sim.actors.traffic.events
import g2sim.actors.worker.events
import g2sim.scenarios.events  # noqa: F401 - the imports register the events
from g2sim.actors.kv.events import BlocksCleared, BlocksStored
from g2sim.actors.worker.events import PassEnded, PassStarted, RequestQueued
from g2sim.bus import frames as frames_module
from g2sim.bus import log as log_module
from g2sim.bus.codec import INT_MAX, INT_MIN
from g2sim.bus.errors import ConfigError, LogDamaged, ProtocolError, SimError
from g2sim.bus.events import BY_CLASS, BY_TAG, EventType, Record, Row
from g2sim.bus.log import CHUNK_BYTES, MAGIC, MAX_FRAME_BYTES, EventSchema, LogReader, LogWriter

patient = settings(deadline=None)  # the machine is shared
SCENARIO = {"name": "tiny", "workers": [{"rate": 0.5}, {"rate": None}]}


# ---- factories: valid things, so that a test shows only what differs ----


def queued(idx: int = 0, **changes: Any) -> RequestQueued:
    return attrs.evolve(RequestQueued(worker=1, role="agg", dp_rank=0, request=idx), **changes)


def stored(block_hashes: Iterable[int] = (1, 2**64 - 1)) -> BlocksStored:
    hashes = tuple(block_hashes)
    return BlocksStored(
        worker=1,
        role="agg",
        dp_rank=0,
        event_id=3,
        tier="device",
        parent_hash=None,
        start_position=0,
        block_hashes=hashes,
        token_hashes=hashes[::-1],
    )


def record(event: Any = None, **changes: Any) -> Record:
    return altered(Record(1.5, "worker-0", 7, queued() if event is None else event), **changes)


def altered(record: Record, **changes: Any) -> Record:
    """The record with other values of some attributes."""
    return Record(**{name: getattr(record, name) for name in ("time_ms", "source", "cause", "event")} | changes)


RECORDS = (
    record(),
    record(stored(), time_ms=-0.0, source="router"),
    record(stored([]), time_ms=1e300, source="", cause=2**63),
    record(queued(2), source="router"),
    record(BlocksCleared(worker=0, role="décode", dp_rank=0, event_id=4, tier=None), source=""),
    record(),
)


def log_bytes(records: Iterable[Record] = RECORDS, *, events: Iterable[EventType] | None = None, **end: Any) -> bytes:
    """A whole log of these records; its header describes only the events in them."""
    records = tuple(records)
    file = io.BytesIO()
    used = {BY_CLASS[type(item.event)].tag: BY_CLASS[type(item.event)] for item in records}.values()
    writer = LogWriter(file, version="1.2", seed=42, scenario=SCENARIO, events=used if events is None else events)
    for item in records:
        writer.append(item)
    writer.finish(**{"status": "finished", **end})
    return file.getvalue()


def frames_of(data: bytes) -> list[tuple[int, bytes]]:
    """(offset, whole frame) of each frame, found without the code under test."""
    found = []
    offset = len(MAGIC)
    while offset < len(data):
        stop = offset + 8 + int.from_bytes(data[offset : offset + 4], "little")
        found.append((offset, data[offset:stop]))
        offset = stop
    return found


def frame(value: Any) -> bytes:
    payload = value if isinstance(value, bytes) else msgpack.packb(value)
    return struct.pack("<II", len(payload), xxhash.xxh32_intdigest(payload)) + payload


def end_frame(before: bytes, records: int, **changes: Any) -> bytes:
    end = {
        "kind": "end",
        "status": "finished",
        "error": None,
        "records": records,
        "digest": xxhash.xxh3_128_hexdigest(before),
        "draws": {},
        "last_draws": {},
    }
    return frame({**end, **changes})


@attrs.frozen
class Reading:
    """What came out of reading a file to its end or first error."""

    items: list[Any]
    error: Exception | None
    reader: LogReader | None


def read(path: Path, *, raw: bool = False) -> Reading:
    items: list[Any] = []
    try:
        reader = LogReader(path)
    except SimError as error:
        return Reading(items, error, None)
    with reader:
        try:
            items.extend(reader.iter_raw() if raw else reader)  # extend keeps what came before an error
        except SimError as error:
            return Reading(items, error, reader)
    return Reading(items, None, reader)


@pytest.fixture(scope="module")
def read_bytes(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Reading]:
    path = tmp_path_factory.mktemp("logs") / "one.g2log"

    def read_them(data: bytes, *, raw: bool = False) -> Reading:
        path.write_bytes(data)
        return read(path, raw=raw)

    return read_them


ReadBytes = Callable[..., Reading]


def damage(reading: Reading) -> tuple[int, int, str]:
    assert isinstance(reading.error, LogDamaged), reading.error
    return reading.error.record_idx, reading.error.byte_offset, reading.error.problem


@pytest.fixture
def any_event(monkeypatch: pytest.MonkeyPatch) -> type[Any]:
    """An event "test.any" with one untyped field, registered for one test."""

    @attrs.frozen(kw_only=True)
    class Anything:
        count: int = 0
        value: Any

    entry = EventType("test.any", 1, Anything, ("count", "value"), lambda item: (item.count, item.value))
    monkeypatch.setitem(BY_TAG, entry.tag, entry)
    monkeypatch.setitem(BY_CLASS, Anything, entry)
    return Anything


# ---- damaged files ----


def expected_at_cut(data: bytes, cut: int) -> tuple[int, int, str]:
    """What must be said of the first ``cut`` bytes of a log: record number, offset, problem."""
    if cut < len(MAGIC):
        return 0, 0, f"ends inside the magic: {cut} of 8 bytes"
    frame_idx, offset, whole = next(
        ((idx, offset, whole) for idx, (offset, whole) in enumerate(frames_of(data)) if cut < offset + len(whole))
    )
    record_idx = max(0, frame_idx - 1)
    if cut == offset:
        return record_idx, offset, "no end record" if frame_idx else "no header"
    if cut < offset + 8:
        return record_idx, offset, f"ends inside frame header: {cut - offset} of 8 bytes"
    return record_idx, offset, f"ends inside payload: {cut - offset - 8} of {len(whole) - 8} bytes"


@pytest.mark.parametrize("raw", [False, True])
def test_a_log_cut_at_any_byte_gives_its_whole_records_and_says_where_it_ends(read_bytes: ReadBytes, raw: bool) -> None:
    """F88. Every cut: exactly the whole records before it, then the right number, offset and problem; never silence."""
    data = log_bytes()
    whole = read_bytes(data, raw=raw).items
    for cut in range(len(data)):
        reading = read_bytes(data[:cut], raw=raw)
        expected = expected_at_cut(data, cut)
        assert (repr(reading.items), damage(reading)) == (repr(whole[: expected[0]]), expected)
        assert reading.reader is None or reading.reader.end is None


def test_no_flipped_byte_goes_unnoticed(read_bytes: ReadBytes) -> None:
    """Each byte in turn, three ways: a true prefix of the records and then an error, never another record."""
    data = log_bytes()
    for place, mask in itertools.product(range(len(data)), (0x01, 0x80, 0xFF)):
        reading = read_bytes(data[:place] + bytes([data[place] ^ mask]) + data[place + 1 :])
        assert isinstance(reading.error, ConfigError if place < len(MAGIC) else LogDamaged)
        assert repr(tuple(reading.items)) == repr(RECORDS[: len(reading.items)])


@patient
@given(st.data())
def test_no_replaced_stretch_goes_unnoticed(read_bytes: ReadBytes, data: st.DataObject) -> None:
    """Any bytes replaced by any others, of any length."""
    good = log_bytes()
    start = data.draw(st.integers(0, len(good)))
    stop = data.draw(st.integers(start, len(good)))
    bad = good[:start] + data.draw(st.binary(max_size=60)) + good[stop:]
    reading = read_bytes(bad)
    assert repr(tuple(reading.items)) == repr(RECORDS[: len(reading.items)])
    assert (reading.error is None) == (bad == good)


@patient
@given(st.binary(max_size=200))
def test_any_bytes_after_the_magic_end_in_a_typed_error(read_bytes: ReadBytes, tail: bytes) -> None:
    """Nothing but SimError comes out of garbage, also when its checksum is right."""
    assert read_bytes(MAGIC + tail).error is not None
    assert read_bytes(MAGIC + frame(tail)).error is not None
    with_header = MAGIC + frames_of(log_bytes())[0][1]
    assert read_bytes(with_header + tail).error is not None
    assert read_bytes(with_header + frame(tail)).error is not None


@pytest.mark.parametrize(
    ("data", "text"),
    [
        pytest.param(b"name: tiny\n", "this is not a g2sim log", id="text"),
        pytest.param(b"\x89PNG\r\n\x1a\n" + bytes(40), "this is not a g2sim log", id="png"),
        pytest.param(MAGIC.replace(b"\r\n", b"\n") + bytes(40), "copied in text mode", id="CR LF made LF"),
        pytest.param(MAGIC.replace(b"\n", b"\r\n") + bytes(40), "copied in text mode", id="LF made CR LF"),
        pytest.param(b"\x09" + MAGIC[1:] + bytes(40), "copied in text mode", id="eighth bit stripped"),
    ],
)
def test_another_file_is_refused_as_input(read_bytes: ReadBytes, data: bytes, text: str) -> None:
    """Not a log at all is the user's mistake (exit code 2), and text-mode copies are recognised."""
    reading = read_bytes(data)
    assert isinstance(reading.error, ConfigError)
    assert text in str(reading.error)
    assert "one.g2log" in str(reading.error)


@pytest.mark.parametrize(("name", "text"), [("none", "No such file"), (".", "Is a directory"), ("a\0b", "null")])
def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path, name: str, text: str) -> None:
    """A missing file, a directory, an impossible name."""
    with pytest.raises(ConfigError, match=text) as caught:
        LogReader(tmp_path / name)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("header", "error", "text"),
    [
        pytest.param({"program": "g2sim", "schema": 2}, ConfigError, "schema: got 2; allowed: 1", id="other schema"),
        pytest.param({"program": "other", "schema": 1}, LogDamaged, "not a header", id="other program"),
        pytest.param([1, 2], LogDamaged, "not a header: [1, 2]", id="array"),
        pytest.param({"program": "g2sim", "schema": 1}, LogDamaged, "not a header", id="keys missing"),
        pytest.param(
            {"program": "g2sim", "schema": 1, "version": "1", "seed": 1, "scenario": 1, "events": {"a": 3}},
            LogDamaged,
            "not a header",
            id="events malformed",
        ),
        pytest.param(b"\xc1", LogDamaged, "payload is not one msgpack value", id="not msgpack"),
    ],
)
def test_a_header_that_does_not_fit_is_refused(
    read_bytes: ReadBytes, header: Any, error: type[SimError], text: str
) -> None:
    """The checksum is right, the content is not."""
    reading = read_bytes(MAGIC + frame(header))
    assert type(reading.error) is error
    assert text in str(reading.error)


START = MAGIC + frames_of(log_bytes([record()]))[0][1]
GOOD = ["wk.sub", 1.5, "w", 7, 1, "agg", 0, 0]


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize(
    ("value", "problem"),
    [
        pytest.param(b"", "payload is not one msgpack value: ", id="empty"),
        pytest.param(b"\x01\x02", "payload is not one msgpack value: ExtraData", id="two values"),
        pytest.param(msgpack.packb(GOOD)[:-1], "payload is not one msgpack value: ", id="half a value"),
        pytest.param(3, "not an event record: 3", id="scalar"),
        pytest.param([], "not an event record: ()", id="empty array"),
        pytest.param(GOOD[:3], "not an event record: ('wk.sub', 1.5, 'w')", id="too short"),
        pytest.param("abcdefgh", "not an event record: 'abcdefgh'", id="string"),
        pytest.param([*GOOD[:2], 1, *GOOD[3:]], "not an event record: ('wk.sub', 1.5, 1, ", id="source unknown"),
        pytest.param([*GOOD[:2], -1, *GOOD[3:]], "not an event record: ('wk.sub', 1.5, -1, ", id="source negative"),
        pytest.param([*GOOD[:2], "first", *GOOD[3:]], "not an event record: ", id="source named twice"),
        pytest.param([*GOOD[:2], True, *GOOD[3:]], "not an event record: ", id="source boolean"),
        pytest.param([*GOOD[:1], 1, *GOOD[2:]], "not an event record: ('wk.sub', 1, ", id="integer time"),
        pytest.param([*GOOD[:3], 1.0, *GOOD[4:]], "not an event record: ('wk.sub', 1.5, 'w', 1.0, ", id="float cause"),
        pytest.param([{}, *GOOD[1:]], "not an event record: ({}, ", id="tag a map"),
        pytest.param(["no.tag", *GOOD[1:]], "event 'no.tag' is not described in the header", id="tag undescribed"),
        pytest.param(GOOD[:-1], "event wk.sub: 3 values for 4 fields", id="value missing"),
        pytest.param([*GOOD, 1], "event wk.sub: 5 values for 4 fields", id="value too many"),
        pytest.param({"kind": "end"}, "neither an event record nor an end record: {'kind': 'end'}", id="half an end"),
    ],
)
def test_a_frame_with_a_good_checksum_and_bad_content_is_damage(
    read_bytes: ReadBytes, value: Any, problem: str, raw: bool
) -> None:
    """A good record, then one that is none: the first is given, the second is named."""
    before = START + frame([*GOOD[:2], "first", *GOOD[3:]])
    reading = read_bytes(before + frame(value), raw=raw)
    assert len(reading.items) == 1
    record_idx, byte_offset, said = damage(reading)
    assert (record_idx, byte_offset) == (1, len(before))
    assert said.startswith(problem)


def test_a_length_beyond_the_limit_is_refused(read_bytes: ReadBytes) -> None:
    """The limit itself is a length like any other, one more is refused by number."""
    for length, problem in (
        (MAX_FRAME_BYTES, f"ends inside payload: 4 of {MAX_FRAME_BYTES} bytes"),
        (MAX_FRAME_BYTES + 1, f"frame length {MAX_FRAME_BYTES + 1} exceeds limit {MAX_FRAME_BYTES}"),
        (2**32 - 1, f"frame length {2**32 - 1} exceeds limit {MAX_FRAME_BYTES}"),
    ):
        assert damage(read_bytes(START + struct.pack("<II", length, 0) + b"abcd")) == (0, len(START), problem)


def test_a_false_length_allocates_nothing(tmp_path: Path) -> None:
    """A frame that claims 256 MiB in a short file costs one read buffer, not 256 MiB."""
    path = tmp_path / "short.g2log"
    path.write_bytes(START + struct.pack("<II", MAX_FRAME_BYTES, 0) + b"abcd")
    tracemalloc.start()
    try:
        assert read(path).error is not None
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 4 * CHUNK_BYTES


def test_a_stretch_of_zeros_is_damage(read_bytes: ReadBytes) -> None:
    """What a file system leaves after a crash must not look like empty frames."""
    assert damage(read_bytes(START + bytes(4096))) == (0, len(START), "checksum differs")


def test_bytes_after_the_end_record(read_bytes: ReadBytes) -> None:
    """One byte, or a whole second log: all records, the end, then the complaint."""
    data = log_bytes()
    for extra in (b"\0", b"\n", data, bytes(CHUNK_BYTES)):
        reading = read_bytes(data + extra)
        assert repr(tuple(reading.items)) == repr(RECORDS)
        assert damage(reading) == (len(RECORDS), len(data), "bytes after the end record")
        assert reading.reader is not None
        assert reading.reader.end is not None


def test_frames_moved_lost_or_repeated_are_noticed(read_bytes: ReadBytes) -> None:
    """Each frame is good by itself; the end record shows that they are not those that were written."""
    data = log_bytes([record(queued(idx)) for idx in range(5)])
    (_, header), first, *middle, (_, end) = frames_of(data)
    middle_frames = [whole for _, whole in (first, *middle)]

    def put(*order: int) -> bytes:
        return MAGIC + header + b"".join(middle_frames[idx] for idx in order) + end

    assert read_bytes(put(0, 1, 2, 3, 4)).error is None
    changed = put(0, 2, 1, 3, 4)
    count, offset, problem = damage(read_bytes(changed))
    assert (count, offset) == (5, len(changed) - len(end))
    was, now = (xxhash.xxh3_128_hexdigest(whole[: -len(end)]) for whole in (data, changed))
    assert problem == f"digest differs: {was} written, {now} read"
    for order, count in (((0, 1, 2, 3), 4), ((0, 1, 2, 3, 4, 4), 6)):
        changed = put(*order)
        problem = f"record count differs: 5 written, {count} read"
        assert damage(read_bytes(changed)) == (count, len(changed) - len(end), problem)


def test_a_digest_of_another_length_or_type_differs(read_bytes: ReadBytes) -> None:
    """The end record's own content is compared, not trusted."""
    for digest in ("", None, "0" * 32):
        assert damage(read_bytes(START + end_frame(START, 0, digest=digest)))[2].startswith("digest differs")
    assert read_bytes(START + end_frame(START, 0)).error is None
    assert damage(read_bytes(START + end_frame(START, 1)))[2] == "record count differs: 1 written, 0 read"


def test_damage_is_found_beyond_the_first_chunk(read_bytes: ReadBytes) -> None:
    """Offsets and digest stay right when the log is many reads long."""
    many = [record(stored(range(2**63, 2**63 + 500)), source=f"s{idx % 5}") for idx in range(300)]
    data = log_bytes(many)
    assert len(data) > 2 * CHUNK_BYTES
    reading = read_bytes(data)
    assert reading.error is None
    assert reading.items == many
    offset, whole = frames_of(data)[250]
    broken = bytearray(data)
    broken[offset + len(whole) - 1] ^= 1
    assert damage(read_bytes(bytes(broken))) == (249, offset, "checksum differs")
    assert damage(read_bytes(data[: offset + 5])) == (249, offset, "ends inside frame header: 5 of 8 bytes")


# ---- logs of another program version ----


def test_an_event_that_is_not_known_here_is_named_with_its_record(
    read_bytes: ReadBytes, any_event: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Typed reading stops at it; raw reading, which needs no classes, gives it."""
    data = log_bytes([record(), record(any_event(value=(1, "a")))])
    monkeypatch.delitem(BY_TAG, "test.any")
    reading = read_bytes(data)
    assert reading.items == [record()]
    assert isinstance(reading.error, ConfigError)
    offset = frames_of(data)[2][0]
    assert f"record 1 at byte {offset}: event 'test.any' is not known here" in str(reading.error)
    reading = read_bytes(data, raw=True)
    assert reading.error is None
    assert reading.items[1] == ("test.any", 1.5, "worker-0", 7, [0, (1, "a")])


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("change", [{"version": 2}, {"fields": ("count", "worth")}, {"fields": ("count",)}])
def test_an_event_with_another_schema_here_is_named_with_both(
    read_bytes: ReadBytes, any_event: type[Any], monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], raw: bool
) -> None:
    """Neither reading may take values for other fields than they were written as."""
    data = log_bytes([record(), record(any_event(value=1))])
    here = attrs.evolve(BY_TAG["test.any"], **change)
    monkeypatch.setitem(BY_TAG, "test.any", here)
    reading = read_bytes(data, raw=raw)
    assert len(reading.items) == 1
    assert isinstance(reading.error, ConfigError)
    schemas = f"schema 1 (count, value) in the log and {here.version} ({', '.join(here.fields)}) in this program"
    assert f"record 1 at byte {frames_of(data)[2][0]}: event test.any has {schemas}" in str(reading.error)


def test_another_schema_of_an_unused_event_does_no_harm(
    read_bytes: ReadBytes, any_event: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only records matter, not what the header says might have come."""
    data = log_bytes(RECORDS, events=BY_TAG.values())
    monkeypatch.setitem(BY_TAG, "test.any", attrs.evolve(BY_TAG["test.any"], version=2))
    assert read_bytes(data).error is None


# ---- refusals and failures when writing ----


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (math.nan, "event test.any: value: got nan, allowed: a finite number"),
        ((1.0, -math.inf), "event test.any: value[1]: got -inf, allowed: a finite number"),
        (2**64, "event test.any: value: got the integer 18446744073709551616"),
        ({"a": {3: 4}}, "event test.any: value.a: got the key 3 in a dict, allowed: strings"),
        ({1, 2}, "event test.any: value: got a set, which cannot be written"),
        (object(), "event test.any: value: got a object, which cannot be written"),
        ("\ud800", "event test.any: value: got '\\ud800', which has no UTF-8 form"),
    ],
)
def test_a_value_that_cannot_be_written_is_refused_by_event_and_field(
    read_bytes: ReadBytes, any_event: type[Any], value: Any, text: str
) -> None:
    """The refused record leaves no trace: not in the log, nor in the table of sources."""
    file = io.BytesIO()
    writer = LogWriter(file, version="1.2", seed=42, scenario=SCENARIO, events=[BY_TAG["test.any"]])
    good = [record(any_event(value=0), source=source) for source in ("a", "new", "b", "new", "a")]
    writer.append(good[0])
    with pytest.raises(ProtocolError) as caught:
        writer.append(record(any_event(value=value), source="new"))
    assert str(caught.value).startswith(text)
    for item in good[1:]:
        writer.append(item)
    writer.finish("finished")
    assert file.getvalue() == log_bytes(good)
    assert read_bytes(file.getvalue()).items == good


@pytest.mark.parametrize("depth", [600, 1100])
def test_nesting_is_refused_when_written(any_event: type[Any], depth: int) -> None:
    """Not left for the reader to find."""
    value: Any = ()
    for _ in range(depth):
        value = (value,)
    with pytest.raises(ProtocolError, match=r"event test\.any: value\[0\].*nested deeper than 128 levels"):
        log_bytes([record(any_event(value=value))])


@pytest.mark.parametrize(
    "changes",
    [{"time_ms": 3}, {"time_ms": None}, {"source": 0}, {"source": True}, {"source": b"a"}, {"cause": 1.0}],
    ids=str,
)
def test_circumstances_of_the_wrong_type_are_refused(changes: dict[str, Any]) -> None:
    """An integer as source would be read as another source's number."""
    with pytest.raises(ProtocolError, match=r"event wk\.sub: time_ms, source and cause must be"):
        log_bytes([record(source="first"), record(**changes)])


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"time_ms": math.nan}, "event wk.sub: time_ms: got nan"),
        ({"cause": -(2**64)}, "event wk.sub: cause: got the integer -18446744073709551616"),
        ({"source": "\ud800"}, "event wk.sub: source: got '\\ud800'"),
    ],
)
def test_circumstances_that_cannot_be_written_are_refused(changes: dict[str, Any], text: str) -> None:
    """They are named like fields."""
    with pytest.raises(ProtocolError) as caught:
        log_bytes([record(**changes)])
    assert str(caught.value).startswith(text)


def test_an_event_that_the_header_does_not_describe_is_refused(any_event: type[Any]) -> None:
    """A log must describe itself."""
    with pytest.raises(ProtocolError, match="Anything is not among the event types of this log"):
        log_bytes([record(any_event(value=1))], events=[BY_TAG["wk.sub"]])
    with pytest.raises(ProtocolError, match="str is not among the event types"):
        LogWriter(io.BytesIO(), version="1", seed=1, scenario={}).append(record("text"))


def rows_of_runs(order: Iterable[int], first_idx: int, emitted: tuple[int, ...], *, marked: bool) -> list[Row]:
    """Rows of four runs, two of each of two workers, in the given order; passes of a worker are counted."""
    counts = [itertools.count(first_idx) for _ in range(4)]
    runs = [object() if marked else None for _ in range(4)]
    rows: list[Row] = []
    for number, which in enumerate(order):
        idx, time_ms, source = next(counts[which]), number / 3, f"worker-{which % 2}"
        if which < 2:
            values: tuple[Any, ...] = (which, "agg", 0, idx, time_ms, time_ms + 0.1, 5, 5)
            rows.append((time_ms, source, number, PassStarted, values, runs[which]))
        else:
            rows.append((time_ms, source, number, PassEnded, (which, "agg", 0, idx, emitted, 0), runs[which]))
    return rows


def bytes_of_rows(*batches: Iterable[Row]) -> bytes:
    file = io.BytesIO()
    writer = LogWriter(file, version="1.2", seed=42, scenario=SCENARIO)
    for rows in batches:
        writer.append_rows(rows)
    writer.finish("finished")
    return file.getvalue()


@patient
@given(
    st.lists(st.integers(0, 3), max_size=30),
    st.sampled_from([0, 120, 250, 2**16 - 3, 2**32 - 3, -3]),
    st.lists(st.integers(0, 2**33), max_size=40).map(tuple),
    st.integers(0, 30),
)
def test_rows_of_runs_have_the_bytes_of_rows_alone(
    order: list[int], first_idx: int, emitted: tuple[int, ...], cut: int
) -> None:
    marked = rows_of_runs(order, first_idx, emitted, marked=True)
    alone = rows_of_runs(order, first_idx, emitted, marked=False)
    assert bytes_of_rows(marked) == bytes_of_rows(marked[:cut], marked[cut:]) == bytes_of_rows(alone)


def test_what_a_run_cannot_go_on_to_is_refused_by_event_and_field(read_bytes: ReadBytes) -> None:
    """The last of these is counted beyond 64 bits; those before it are written, and so is what follows."""
    file = io.BytesIO()
    writer = LogWriter(file, version="1.2", seed=42, scenario=SCENARIO)
    writer.append(record())
    with pytest.raises(ProtocolError, match=r"event wk\.end: pass_idx: got the integer 18446744073709551616"):
        writer.append_rows(rows_of_runs([2, 3, 2, 3, 2, 3], 2**64 - 2, (1, 2), marked=True))
    writer.append(record())
    writer.finish("finished")
    written = read_bytes(file.getvalue()).items[1:-1]
    assert [one.event.pass_idx for one in written] == [2**64 - 2, 2**64 - 2, 2**64 - 1, 2**64 - 1]


def test_header_and_end_values_are_refused_by_name() -> None:
    """Same rules as for events."""
    with pytest.raises(ProtocolError, match=r"log header: scenario\.workers\[0\]\.rate: got inf"):
        LogWriter(io.BytesIO(), version="1", seed=1, scenario={"workers": [{"rate": math.inf}]})
    with pytest.raises(ProtocolError, match=r"log header: seed: got the integer"):
        LogWriter(io.BytesIO(), version="1", seed=2**70, scenario={})
    with pytest.raises(ProtocolError, match=r"log end record: last_draws\.tie: got the integer"):
        log_bytes(last_draws={"tie": 2**64})


@pytest.mark.parametrize("end", [{"status": "failed"}, {"error": "why"}])
def test_an_error_belongs_to_a_failed_run(end: dict[str, Any]) -> None:
    """Status and error must agree."""
    with pytest.raises(ProtocolError, match="only a failed run has one"):
        log_bytes(**end)


def test_a_record_beyond_the_frame_limit_is_refused(monkeypatch: pytest.MonkeyPatch, any_event: type[Any]) -> None:
    """Else the reader would refuse it. The limit is lowered to make the test cheap."""
    monkeypatch.setattr(frames_module, "MAX_FRAME_BYTES", 1000)
    head_bytes = len(msgpack.packb(["test.any", 1.5, "worker-0", 7, 0, b"x" * 900])) - 900
    log_bytes([record(any_event(value=b"x" * (1000 - head_bytes)))])
    with pytest.raises(ProtocolError, match=r"test\.any: 1001 bytes encoded, allowed at most 1000"):
        log_bytes([record(any_event(value=b"x" * (1001 - head_bytes)))])


def test_nothing_can_be_added_to_a_finished_log() -> None:
    """Neither records nor a second end."""
    file = io.BytesIO()
    writer = LogWriter(file, version="1", seed=1, scenario={})
    writer.finish("finished")
    size = len(file.getvalue())
    for call in (lambda: writer.append(record()), lambda: writer.finish("finished")):
        with pytest.raises(ProtocolError, match="the log is finished"):
            call()
    assert len(file.getvalue()) == size


class Disk(io.RawIOBase):
    """A file with room for ``room_bytes``, that takes at most ``gulp_bytes`` in one write."""

    name = "disk/run.g2log"

    def __init__(self, room_bytes: int, gulp_bytes: int = 1 << 30) -> None:
        self.data = bytearray()
        self.room_bytes = room_bytes
        self.gulp_bytes = gulp_bytes

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        taken = bytes(data[: min(self.gulp_bytes, self.room_bytes - len(self.data))])
        if not taken:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.data += taken
        return len(taken)


def test_a_full_disk_is_an_error_with_path_and_bytes_and_what_is_there_is_readable(read_bytes: ReadBytes) -> None:
    """The write that fails raises; so does every later call; the part on disk is a log cut at that byte."""
    room_bytes = CHUNK_BYTES + 777
    disk = Disk(room_bytes)
    writer = LogWriter(disk, version="1", seed=1, scenario={})
    item = record(stored(range(2**63, 2**63 + 2000)))

    def fill() -> None:
        for _ in range(1000):
            writer.append(item)

    with pytest.raises(SimError) as caught:
        fill()
    text = str(caught.value)
    assert text.startswith(f"disk/run.g2log: cannot write bytes {room_bytes} to ")
    assert text.endswith("of the log: No space left on device")
    for call in (lambda: writer.append(item), lambda: writer.finish("failed", "disk full")):
        with pytest.raises(SimError, match="No space left on device"):
            call()
    assert len(disk.data) == room_bytes
    reading = read_bytes(bytes(disk.data))
    assert isinstance(reading.error, LogDamaged)
    assert len(reading.items) > 20
    assert set(reading.items) == {item}


def test_a_full_disk_is_noticed_at_the_header_and_at_the_end() -> None:
    """The header is written at once; the end record is written by finish."""
    with pytest.raises(SimError, match=r"disk/run\.g2log: cannot write bytes 0 to .*: No space left on device"):
        LogWriter(Disk(0), version="1", seed=1, scenario={})
    data = log_bytes([])
    disk = Disk(len(data) - 1)
    writer = LogWriter(disk, version="1.2", seed=42, scenario=SCENARIO, events=[])
    with pytest.raises(SimError, match=f"cannot write bytes {len(data) - 1} to {len(data)} of the log"):
        writer.finish("finished")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_buffered_file_on_a_full_disk_is_noticed_by_finish() -> None:
    """Python's own buffer may hold a small log back until it is flushed. Closing the file then fails too."""
    said = ""
    with pytest.raises(OSError, match="No space left"), Path("/dev/full").open("wb") as file:
        writer = LogWriter(file, version="1", seed=1, scenario={}, events=[])
        try:
            writer.finish("finished")
        except SimError as error:
            said = str(error)
    assert re.fullmatch(r"/dev/full: cannot flush the log after byte \d+: No space left on device", said)


def test_a_closed_file_is_an_error_not_a_loss() -> None:
    """The caller closed it too early."""
    file = io.BytesIO()
    writer = LogWriter(file, version="1", seed=1, scenario={})
    file.close()
    with pytest.raises(SimError, match=r"<log>: cannot write bytes .* closed file"):
        writer.finish("finished")


def test_a_file_that_takes_nothing_is_an_error_not_a_loop() -> None:
    """As a raw file in non-blocking mode does."""

    class Stuck(Disk):
        def write(self, data: Any) -> int:
            return 0

    with pytest.raises(SimError, match="the file took 0 bytes"):
        LogWriter(Stuck(100), version="1", seed=1, scenario={})


def test_a_file_that_takes_a_few_bytes_at_a_time_gets_them_all() -> None:
    """A raw file may write less than it was given."""
    disk = Disk(1 << 20, gulp_bytes=7)
    writer = LogWriter(disk, version="1.2", seed=42, scenario=SCENARIO, events=[BY_TAG["wk.sub"]])
    writer.append(record())
    writer.finish("finished")
    assert bytes(disk.data) == log_bytes([record()])


# ---- misuse of a reader ----


def test_the_records_can_be_read_once(tmp_path: Path) -> None:
    """A second pass would silently give nothing."""
    path = tmp_path / "one.g2log"
    path.write_bytes(log_bytes())
    with LogReader(path) as reader:
        assert len(list(reader)) == len(RECORDS)
        for again in (iter, LogReader.iter_raw):
            with pytest.raises(ProtocolError, match="can be read once"):
                again(reader)


def test_reading_from_a_closed_reader_is_an_error(tmp_path: Path) -> None:
    """And closing twice is not."""
    path = tmp_path / "one.g2log"
    path.write_bytes(log_bytes())
    with LogReader(path) as reader:
        reader.close()
        with pytest.raises(SimError, match=r"one\.g2log: cannot read the log near byte .* closed file"):
            list(reader)


# ---- what is written comes back ----


def strategy_of(hint: Any) -> st.SearchStrategy[Any]:
    """Values of an annotated type, as far as the log can hold them."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        if len(arguments) == 2 and arguments[1] is ...:
            return st.lists(strategy_of(arguments[0]), max_size=5).map(tuple)
        return st.tuples(*map(strategy_of, arguments))
    if origin in (types.UnionType, typing.Union):
        return st.one_of(*map(strategy_of, arguments))
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin is dict:
        return st.dictionaries(*map(strategy_of, arguments), max_size=5)
    if hint is Any:
        leaves = strategy_of(None | bool | int | float | str | bytes)
        return st.recursive(leaves, lambda inner: st.tuples(inner, inner) | st.dictionaries(strategy_of(str), inner))
    plain: dict[Any, st.SearchStrategy[Any]] = {
        int: st.integers(INT_MIN, INT_MAX),
        float: st.floats(allow_nan=False, allow_infinity=False),
        str: st.text(st.characters(codec="utf-8")),
        bytes: st.binary(),
        bool: st.booleans(),
        type(None): st.none(),
    }
    return plain[hint]


def records_of(entry: EventType) -> st.SearchStrategy[Record]:
    hints = typing.get_type_hints(entry.cls)
    events = st.builds(entry.cls, **{name: strategy_of(hints[name]) for name in entry.fields})
    return st.builds(
        Record, strategy_of(float), st.text(st.characters(codec="utf-8"), max_size=3), strategy_of(int), events
    )


@pytest.mark.parametrize(
    "tag", sorted(tag for tag, entry in BY_TAG.items() if entry.cls.__module__.startswith("g2sim."))
)
@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_every_registered_event_comes_back(read_bytes: ReadBytes, tag: str, data: st.DataObject) -> None:
    """Any values that its annotations allow, equal in type and in the last bit, typed and raw."""
    entry = BY_TAG[tag]
    records = data.draw(st.lists(records_of(entry), max_size=4))
    written = log_bytes(records, events=[entry])
    reading = read_bytes(written)
    assert reading.error is None
    assert repr(reading.items) == repr(records)
    raw = [(tag, item.time_ms, item.source, item.cause, list(entry.values(item.event))) for item in records]
    assert repr(read_bytes(written, raw=True).items) == repr(raw)


def test_header_and_end_come_back(read_bytes: ReadBytes) -> None:
    """The scenario as plain lists and dicts, streams in sorted order."""
    end = {"draws": {"b": 2, "a": 1}, "last_draws": {"b": "0f", "a": 2**64 - 1}}
    data = log_bytes(RECORDS, **end)
    reader = read_bytes(data).reader
    assert reader is not None
    header = reader.header
    assert (header.schema, header.version, header.seed) == (1, "1.2", 42)
    assert repr(header.scenario) == repr(SCENARIO)
    assert list(header.events) == ["kv.clr", "kv.sto", "wk.sub"]
    assert header.events["wk.sub"] == EventSchema(1, ("worker", "role", "dp_rank", "request"))
    assert reader.end is not None
    assert attrs.asdict(reader.end) == {
        "status": "finished",
        "error": None,
        "records": len(RECORDS),
        "digest": xxhash.xxh3_128_hexdigest(data[: frames_of(data)[-1][0]]),
        **end,
    }
    assert list(reader.end.draws) == list(reader.end.last_draws) == ["a", "b"]


def test_a_failed_run_is_a_whole_log(read_bytes: ReadBytes) -> None:
    """Its error is kept, even one that quotes a path that is not Unicode."""
    reader = read_bytes(log_bytes(status="failed", error="cannot open 'a\udcff'")).reader
    assert reader is not None
    assert reader.end is not None
    assert (reader.end.status, reader.end.error) == ("failed", "cannot open 'a\\udcff'")


def test_an_empty_log_is_whole(read_bytes: ReadBytes) -> None:
    """A run may publish nothing."""
    for raw in (False, True):
        reading = read_bytes(log_bytes([]), raw=raw)
        assert (reading.items, reading.error) == ([], None)


def test_the_bytes_are_as_documented() -> None:
    """Built by hand from the description of the format: sources named once, then numbered."""
    sources = ("a", "b", "b", "a", "c")
    header = {
        "schema": 1,
        "program": "g2sim",
        "version": "1.2",
        "seed": 42,
        "scenario": SCENARIO,
        "events": {"wk.sub": [1, "worker", "role", "dp_rank", "request"]},
    }
    expected = b"\x89G2S\r\n\x1a\n" + frame(header)
    for idx, source in enumerate(("a", "b", 1, 0, "c")):
        expected += frame(["wk.sub", 1.5, source, 7, 1, "agg", 0, idx])
    expected += end_frame(expected, 5)
    assert log_bytes([record(queued(idx), source=source) for idx, source in enumerate(sources)]) == expected


@pytest.mark.parametrize("size_bytes", [CHUNK_BYTES + 500_000, 101 * 2**20])
def test_large_records_come_back(read_bytes: ReadBytes, any_event: type[Any], size_bytes: int) -> None:
    """Larger than a chunk, by much, with small ones around."""
    records = [record(), record(any_event(value=random.Random(1).randbytes(1000) * (size_bytes // 1000 + 1))), record()]
    reading = read_bytes(log_bytes(records))
    assert reading.error is None
    assert reading.items == records


@patient
@given(st.lists(st.integers(0, 3000), max_size=40), st.integers(1, 4000))
def test_chunk_borders_change_nothing(read_bytes: ReadBytes, sizes: list[int], chunk_bytes: int) -> None:
    """However reads and writes fall, the same bytes are written and the same records read."""
    records = [record(queued(role="x" * size), source=f"s{size % 3}") for size in sizes]
    data = log_bytes(records, events=[BY_TAG["wk.sub"]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_module, "CHUNK_BYTES", chunk_bytes)
        assert log_bytes(records, events=[BY_TAG["wk.sub"]]) == data
        reading = read_bytes(data)
    assert reading.error is None
    assert reading.items == records


def test_a_pipe_can_be_read() -> None:
    """Reading never seeks."""
    data = log_bytes([record(stored(range(500))) for _ in range(200)])
    source, target = os.pipe()

    def fill() -> None:
        with os.fdopen(target, "wb") as file:
            file.write(data)

    thread = threading.Thread(target=fill)
    thread.start()
    try:
        with LogReader(f"/dev/fd/{source}") as reader:
            assert len(list(reader)) == 200
    finally:
        os.close(source)
        thread.join()


TWIN = """
import hashlib, io
from g2sim.bus.events import Record
from g2sim.bus.log import LogWriter
import g2sim.scenarios.events, {modules}
file = io.BytesIO()
writer = LogWriter(file, version="1", seed=1, scenario={{"b": 1, "a": [True, None]}})
for idx in range(100):
    writer.append(Record(idx / 7, f"s{{idx % 7}}", idx, g2sim.scenarios.events.RunFinished(
        stopped_at_limit=False, prefill_worker_seconds=idx / 3, decode_worker_seconds=-0.0)))
print(writer.finish("finished", draws=dict.fromkeys({{"x", "y", "z"}}, 1)), hashlib.sha256(file.getvalue()).hexdigest())
"""


def test_fresh_processes_write_the_same_bytes() -> None:
    """Whatever the hash seed and the order in which event modules were imported."""
    outputs = {
        subprocess.run(
            [sys.executable, "-c", TWIN.format(modules=f"g2sim.actors.{first}.events, g2sim.actors.{second}.events")],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
        ).stdout
        for seed, first, second in (("1", "kv", "worker"), ("2", "worker", "kv"))
    }
    assert len(outputs) == 1


def test_two_writers_with_the_same_input_write_the_same_bytes_and_another_input_differs() -> None:
    """Equal down to the digest, and a change of the last bit of one float shows in it."""
    assert log_bytes() == log_bytes()
    changed = (altered(RECORDS[0], time_ms=math.nextafter(RECORDS[0].time_ms, 2.0)), *RECORDS[1:])
    assert log_bytes(changed)[-200:] != log_bytes()[-200:]


def test_memory_stays_flat_over_a_large_log(tmp_path: Path) -> None:
    """20 MB written and read, both ways, in a few chunks of memory."""
    path = tmp_path / "large.g2log"
    item = record(stored(range(2**63, 2**63 + 1000)))
    count = 1100

    def write() -> None:
        with path.open("wb") as file:
            writer = LogWriter(file, version="1", seed=1, scenario={})
            for _ in range(count):
                writer.append(item)
            writer.finish("finished")

    def read_typed() -> None:
        with LogReader(path) as reader:
            assert sum(1 for _ in reader) == count

    def read_raw() -> None:
        with LogReader(path) as reader:
            assert sum(1 for _ in reader.iter_raw()) == count

    for job in (write, read_typed, read_raw):
        tracemalloc.start()
        try:
            job()
            peak_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak_bytes < 5 * CHUNK_BYTES, job
    assert path.stat().st_size > 19e6
