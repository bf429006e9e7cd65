"""Frames of the event log while they gather in memory: the part of writing a log that every event goes through.

Owns: event records as bytes, and the names of sources that have been written. Refuses to know: files, and what begins
and ends a log. The format is told in ``g2sim.bus.log``.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from xxhash import xxh32_intdigest

from g2sim.bus.codec import AlikeTuples, LongTuples, ValueRefused, encode, pack_plain
from g2sim.bus.errors import ProtocolError, shorten
from g2sim.bus.events import EventType

MAX_FRAME_BYTES: Final = 256 * 2**20
"""Longest payload that is written or read [B], so that a damaged length cannot ask for 4 GiB."""
FRAME: Final = struct.Struct("<II")
LEAD: Final = ("tag", "time_ms", "source", "cause")
_pack_frame: Final = FRAME.pack
_INF: Final = math.inf

_AnyRow = tuple[Any, Any, Any, Any, tuple[Any, ...], Any]
"""As ``g2sim.bus.events.Row``, with things in it that may have to be refused."""


class _AlikeRows:
    """How rows of one run are encoded, once the first of them has been.

    Attributes:
        raws: places in a record of values that the first one's bytes stand for in all of them, with these bytes.
    """

    __slots__ = ("alias", "raws", "tag")

    def __init__(self, tag: str, alias: int, values: Sequence[Any], plain: Sequence[Any]) -> None:
        self.tag = tag
        self.alias = alias
        self.raws: list[tuple[int, Any]] = []
        if plain is not values:
            self.raws += [(len(LEAD) + place, raw) for place, raw in enumerate(plain) if raw is not values[place]]


class Frames:
    """See the module's text.

    Args:
        types: the event types that may be added.
        start: what comes before the first frame.
        limit_bytes: how much may gather before it is to be written.
        full: called when that much has gathered; it takes it, or raises.

    Attributes:
        records: how many event records have been added.
    """

    __slots__ = ("_aliases", "_full", "_pending", "_types", "limit_bytes", "records")

    def __init__(self, types: Iterable[EventType], start: bytes, limit_bytes: int, full: Callable[[], None]) -> None:
        long_tuples = LongTuples()
        self._types: dict[Any, tuple[EventType, str, AlikeTuples]] = {
            entry.cls: (entry, entry.tag, AlikeTuples(long_tuples)) for entry in types
        }
        self._aliases: dict[Any, int] = {}
        self._pending = bytearray(start)
        self._full = full
        self.limit_bytes = limit_bytes
        self.records = 0

    def take(self) -> bytearray:
        """What has gathered, which is forgotten here."""
        taken, self._pending = self._pending, bytearray()
        return taken

    def add(self, payload: bytes, what: str) -> None:
        """Add one frame. Raises: ProtocolError if it is too long, naming it by ``what``."""
        size = len(payload)
        if size > MAX_FRAME_BYTES:
            raise _too_long(what, size)
        pending = self._pending
        pending += _pack_frame(size, xxh32_intdigest(payload))
        pending += payload
        if len(pending) >= self.limit_bytes:
            self._full()

    def add_rows(self, rows: Iterable[Any]) -> None:
        """Add event records; those before one that is refused.

        Args:
            rows: see ``g2sim.bus.events.Row``; not so declared, as anything in them may have to be refused.
        Raises: ProtocolError, naming event and field.
        """
        pending = self._pending
        runs: dict[object, _AlikeRows] = {}
        row: _AnyRow
        for row in rows:
            time_ms, _source, cause, _cls, values, run = row
            alike = None if run is None else runs.get(run)
            payload: bytes
            if alike is None:
                payload = self._encode(row, runs)
            else:
                record: Any = (alike.tag, time_ms, alike.alias, cause)
                record += values  # quicker than an unpacked tuple
                if alike.raws:
                    record = [*record]
                    for place, raw in alike.raws:
                        record[place] = raw
                try:
                    payload = pack_plain(record)
                except (OverflowError, ValueError):
                    payload = self._encode(row, {})
            size = len(payload)
            # As ``add``, without its call.
            if size > MAX_FRAME_BYTES:
                raise _too_long(self._types[row[3]][1], size)
            pending += _pack_frame(size, xxh32_intdigest(payload))
            pending += payload
            if len(pending) >= self.limit_bytes:
                self._full()
                pending = self._pending
            self.records += 1

    def _encode(self, row: _AnyRow, runs: dict[object, _AlikeRows]) -> bytes:
        """Payload of a record that may have to be refused; says in ``runs`` how others of its run are encoded."""
        time_ms, source, cause, cls, values, run = row
        found = self._types.get(cls)
        if found is None:
            raise ProtocolError(f"{cls.__qualname__} is not among the event types of this log")
        entry, tag, alike = found
        alias = self._aliases.get(source)
        if alias is None or type(time_ms) is not float or type(cause) is not int or not -_INF < time_ms < _INF:
            return self._encode_carefully(entry, row)
        plain = alike.prove(values)
        if plain is not None:
            record: Any = (tag, time_ms, alias, cause)
            record += plain if plain is values else (*plain,)
            try:
                payload: bytes = pack_plain(record)
            except (OverflowError, ValueError):
                return self._encode_carefully(entry, row)
            if run is not None:
                runs[run] = _AlikeRows(tag, alias, values, plain)
            return payload
        payload = self._encode_carefully(entry, row)
        alike.learn(values)
        return payload

    def _encode_carefully(self, entry: EventType, row: _AnyRow) -> bytes:
        """Payload of a record that is new in some way, or is to be refused."""
        time_ms, source, cause, _cls, values, _run = row
        alias = self._aliases.get(source)
        # Exact types: an integer as source would read back as another source, and time is float64 by contract.
        if type(time_ms) is not float or type(cause) is not int or (alias is None and type(source) is not str):
            raise ProtocolError(
                f"event {entry.tag}: time_ms, source and cause must be a float, a str and an int: "
                f"got {shorten((time_ms, source, cause))}"
            )
        try:
            payload = encode((entry.tag, time_ms, source if alias is None else alias, cause, *values))
        except ValueRefused as refused:
            raise _refused_record(entry, refused) from refused
        if alias is None and len(payload) <= MAX_FRAME_BYTES:
            self._aliases[source] = len(self._aliases)
        return payload


def _too_long(what: str, size: int) -> ProtocolError:
    return ProtocolError(f"{what}: {size} bytes encoded, allowed at most {MAX_FRAME_BYTES}")


def _refused_record(entry: EventType, refused: ValueRefused) -> ProtocolError:
    """The same refusal, naming event and field instead of a place in an array."""
    path = refused.path
    if path:
        path = ((*LEAD, *entry.fields)[int(path[0])], *path[1:])
    return ProtocolError(f"event {entry.tag}: {ValueRefused(path, refused.problem)}")
