"""Frames of the event log while they gather in memory: the part of writing a log that every event goes through.

Owns: event records as bytes, and the names of sources that have been written. Refuses to know: files, and what begins
and ends a log. The format is told in ``g2sim.bus.log``.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable
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
        types, aliases, pending = self._types, self._aliases, self._pending
        for time_ms, source, cause, cls, values in rows:
            found = types.get(cls)
            if found is None:
                raise ProtocolError(f"{cls.__qualname__} is not among the event types of this log")
            entry, tag, alike = found
            alias = aliases.get(source)
            payload: bytes | None = None
            if alias is not None and type(time_ms) is float and type(cause) is int and -math.inf < time_ms < math.inf:
                plain = alike.prove(values)
                if plain is not None:
                    try:
                        payload = pack_plain((tag, time_ms, alias, cause, *plain))
                    except (OverflowError, ValueError):
                        payload = None
            if payload is None:
                payload = self._encode(entry, alike, time_ms, source, cause, values)
            size = len(payload)
            # As ``add``, without its call.
            if size > MAX_FRAME_BYTES:
                raise _too_long(tag, size)
            pending += _pack_frame(size, xxh32_intdigest(payload))
            pending += payload
            if len(pending) >= self.limit_bytes:
                self._full()
                pending = self._pending
            if alias is None:
                aliases[source] = len(aliases)
            self.records += 1

    def _encode(
        self, entry: EventType, alike: AlikeTuples, time_ms: Any, source: Any, cause: Any, values: tuple[Any, ...]
    ) -> bytes:
        """Payload of a record that may have to be refused, or is unlike the last one of its type."""
        alias = self._aliases.get(source)
        # Exact types: an integer as source would read back as another source, and time is float64 by contract.
        if type(time_ms) is not float or type(cause) is not int or (alias is None and type(source) is not str):
            raise ProtocolError(
                f"event {entry.tag}: time_ms, source and cause must be a float, a str and an int: "
                f"got {shorten((time_ms, source, cause))}"
            )
        value = (entry.tag, time_ms, source if alias is None else alias, cause, *values)
        try:
            payload = encode(value)
        except ValueRefused as refused:
            raise _refused_record(entry, refused) from refused
        if alias is not None:
            alike.learn(values)
        return payload


def _too_long(what: str, size: int) -> ProtocolError:
    return ProtocolError(f"{what}: {size} bytes encoded, allowed at most {MAX_FRAME_BYTES}")


def _refused_record(entry: EventType, refused: ValueRefused) -> ProtocolError:
    """The same refusal, naming event and field instead of a place in an array."""
    path = refused.path
    if path:
        path = ((*LEAD, *entry.fields)[int(path[0])], *path[1:])
    return ProtocolError(f"event {entry.tag}: {ValueRefused(path, refused.problem)}")
