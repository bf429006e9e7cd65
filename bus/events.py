"""Typed events: how a class becomes a log record and comes back.

Owns: the ``@event`` decorator, the registry of wire tags, and the check that a tag is used once.
Refuses to know: which events there are. Roles declare theirs in their own ``events`` module.

An event is a past fact. It carries only what happened; time, source and cause are added by the bus
when it is published (see ``Record``).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, dataclass_transform

import attrs

from g2sim.bus.errors import ProtocolError
from g2sim.bus.record import Record as Record

_EventT = TypeVar("_EventT")


@attrs.frozen
class EventType:
    """What the log needs to know of one event class.

    Attributes:
        tag: short stable name on the wire.
        version: schema version of this event, raised when its fields change.
        cls: the frozen attrs class.
        fields: field names in wire order.
        values: event -> tuple of field values in wire order.
        by_position: the class takes its values by position, in that order, which is quicker than by name.
    """

    tag: str
    version: int
    cls: type[Any]
    fields: tuple[str, ...]
    values: Callable[[Any], tuple[Any, ...]]
    by_position: bool = False

    def build(self, values: Sequence[Any]) -> Any:
        """Event from field values in wire order, as the log reader gives them (arrays inside a value are tuples)."""
        if len(values) != len(self.fields):
            raise ProtocolError(f"event {self.tag}: {len(values)} values for {len(self.fields)} fields")
        if self.by_position:
            return self.cls(*values)
        return self.cls(**dict(zip(self.fields, values, strict=True)))


def event_type(tag: str, version: int, cls: type[Any]) -> EventType:
    """What the log needs of an attrs class; registers nothing."""
    fields = attrs.fields(cls)
    names = tuple(field.name for field in fields)
    by_position = not any(field.kw_only for field in fields)
    if len(names) == 1:
        single: Callable[[Any], Any] = operator.attrgetter(*names)
        return EventType(tag, version, cls, names, lambda item: (single(item),), by_position)
    values = operator.attrgetter(*names) if names else lambda _: ()
    return EventType(tag, version, cls, names, values, by_position)


Row = tuple[float, str, int, type[Any], tuple[Any, ...], object]
"""A record of which only the event's values are there: time [ms], source, cause, type of the event, values in wire
order, and the run it is of. See ``Record``.

Rows of one run are of one source and type, and what can be done with one of them can be done with all: they differ in
finite floats and in one integer that counts them (see ``Port.publish_late_run``). None: of no run."""


BY_TAG: dict[str, EventType] = {}
BY_CLASS: dict[type[Any], EventType] = {}


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(attrs.field,))
def event(tag: str, *, version: int = 1) -> Callable[[type[_EventT]], type[_EventT]]:
    """Class decorator: makes a frozen, slotted attrs class and registers its wire tag.

    Type checkers take it for a keyword-only one; by position, in wire order, is for those who have all values in a row.

    Raises: ProtocolError if the tag is taken.
    """

    def decorate(cls: type[_EventT]) -> type[_EventT]:
        if tag in BY_TAG:
            raise ProtocolError(f"event tag {tag!r} is taken by {BY_TAG[tag].cls.__name__}")
        made = attrs.frozen(slots=True)(cls)
        entry = event_type(tag, version, made)
        BY_TAG[tag] = entry
        BY_CLASS[made] = entry
        return made

    return decorate


SIGNALS: set[type[Any]] = set()


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(attrs.field,))
def signal(cls: type[_EventT]) -> type[_EventT]:
    """Class decorator: makes an attrs class as ``event`` does, whose events are part of no record and in no log.

    They tell those who ask for them what the record says as well, in another way.
    """
    made = attrs.frozen(kw_only=True, slots=True)(cls)
    SIGNALS.add(made)
    return made
