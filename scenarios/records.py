"""Records of an event log for people: choosing them, showing them, and what led to one.

Owns: the words for event types, a record as a line of text or as JSON, and the chain of records before one.
Refuses to know: what the events mean for a report or a state.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from g2sim.bus.errors import ConfigError, close_to, shorten
from g2sim.bus.events import BY_CLASS, BY_TAG, Record
from g2sim.bus.log import LogReader
from g2sim.scenarios import run as _event_types_of_runs  # noqa: F401  (a reader knows the events that are imported)

CHAIN_LENGTH = 5
_EVENT_COLUMNS = 200


def event_tags(word: str) -> tuple[str, ...]:
    """Wire tags that a word means: a tag (``wk.adm``), what is before its dot (``wk``), a type (``RequestAdmitted``).

    Raises: ConfigError, with field "", for a word that means none.
    """
    tags = [tag for tag, kind in BY_TAG.items() if word in (tag, tag.partition(".")[0], kind.cls.__name__)]
    if not tags:
        families = sorted({tag.partition(".")[0] for tag in BY_TAG})
        hint = close_to(word, [*BY_TAG, *(kind.cls.__name__ for kind in BY_TAG.values()), *families])
        allowed = f"{', '.join(families)}, one tag such as wk.adm, or a type such as RequestAdmitted"
        raise ConfigError("", problem="no such type of event", got=word, allowed=allowed, hint=hint)
    return tuple(sorted(tags))


def event_value(event: Any) -> dict[str, Any]:
    """The fields of an event as plain values."""
    kind = BY_CLASS[type(event)]
    return dict(zip(kind.fields, kind.values(event), strict=True))


def record_value(idx: int, record: Record) -> dict[str, Any]:
    """A record as one flat mapping: its number in the log, its circumstances, its event's tag and fields."""
    head = {"record": idx, "event": BY_CLASS[type(record.event)].tag, "time_ms": record.time_ms}
    return {**head, "source": record.source, "cause": record.cause, **event_value(record.event)}


def record_line(idx: int, record: Record) -> str:
    """A record as one line, cut where it gets long."""
    fields = ", ".join(f"{name}={_short(value)}" for name, value in event_value(record.event).items())
    text = f"#{idx} {record.time_ms!r} ms {record.source}: {type(record.event).__name__} {fields}"
    return text if len(text) <= _EVENT_COLUMNS else f"{text[: _EVENT_COLUMNS - 3]}..."


def _short(value: Any) -> str:
    if isinstance(value, tuple) and len(value) > 3:
        return f"({len(value)} values)"
    return shorten(value, 40)


class Links:
    """Which record led to which, as records go by in log order.

    What led to a record is the latest before it about the same request, else about the same transfer, else the one
    before it in its turn, else the latest about the same rank, else from the same source.
    """

    def __init__(self) -> None:
        self._before = array("q")
        self._latest: dict[tuple[Any, ...], int] = {}

    def add(self, record: Record) -> None:
        """Take the next record."""
        idx = len(self._before)
        keys = _keys(record)
        self._before.append(next((self._latest[key] for key in keys if key in self._latest), -1))
        self._latest.update(dict.fromkeys(keys, idx))

    def chain(self, idx: int, length: int = CHAIN_LENGTH) -> list[int]:
        """Numbers of a record and of those that led to it, the earliest first."""
        found: list[int] = []
        while idx >= 0 and len(found) < length:
            found.append(idx)
            idx = self._before[idx]
        return found[::-1]


def _keys(record: Record) -> list[tuple[Any, ...]]:
    """What a record is about, the most telling first."""
    event = record.event
    keys: list[tuple[Any, ...]] = []
    if (request := getattr(event, "request", None)) is not None:
        keys.append(("request", request))
    if (transfer := getattr(event, "transfer", None)) is not None:
        keys.append(("transfer", event.pool, transfer))
    keys.append(("turn", record.cause))
    if getattr(event, "dp_rank", None) is not None and hasattr(event, "role"):
        keys.append(("rank", event.role, event.worker, event.dp_rank))
    keys.append(("source", record.source))
    return keys


@attrs.frozen(kw_only=True)
class Numbered:
    """A record with its number in the log."""

    idx: int
    record: Record

    @property
    def line(self) -> str:
        return record_line(self.idx, self.record)


def numbered(reader: LogReader) -> Iterator[Numbered]:
    for idx, record in enumerate(reader):
        yield Numbered(idx=idx, record=record)


def chain_of(log: Path, idx: int, length: int = CHAIN_LENGTH) -> list[Numbered]:
    """Record ``idx`` of a log and those that led to it (see ``Links``), the earliest first."""
    links = Links()
    with LogReader(log) as reader:
        for place, record in enumerate(reader):
            links.add(record)
            if place == idx:
                break
    return records_at(log, links.chain(idx, length))


def records_at(log: Path, numbers: Sequence[int]) -> list[Numbered]:
    """The records with these numbers, in log order."""
    if not numbers:
        return []
    wanted, last = set(numbers), max(numbers)
    found = []
    with LogReader(log) as reader:
        for one in numbered(reader):
            if one.idx in wanted:
                found.append(one)
            if one.idx >= last:
                break
    return found
