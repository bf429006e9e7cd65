"""An event in the record. Apart from ``events``, whose decorators cannot be compiled."""

from __future__ import annotations

from typing import Any, Final

from g2sim.bus.plain import Plain


class Record(Plain):
    """One published event with its circumstances.

    Attributes:
        time_ms: virtual time of publication [ms].
        source: name of the actor that published it.
        cause: number of the turn in which it was published, among those that have published anything.
        event: the event itself.
    """

    __slots__ = ("cause", "event", "source", "time_ms")

    def __init__(self, time_ms: float, source: str, cause: int, event: Any) -> None:
        self.time_ms: Final = time_ms
        self.source: Final = source
        self.cause: Final = cause
        self.event: Final = event
