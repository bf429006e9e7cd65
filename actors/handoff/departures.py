"""Which requests the servers still hold something of after their end.

Owns: the rule, which traffic and reports follow alike. Refuses to know: what is held, and where.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from g2sim.actors.handoff.events import SourceReleased, leaves_with
from g2sim.actors.worker.events import CanceledRequestLeft, RequestEnded

_Kept = TypeVar("_Kept")


class Departures(Generic[_Kept]):
    """Requests from their end until nothing is left of them on the servers, each with what is kept of it."""

    def __init__(self) -> None:
        self._staying: dict[int, tuple[_Kept, type[Any]]] = {}  # with the event with which it leaves
        self._released_early: set[int] = set()

    @property
    def any_stay(self) -> bool:
        """Whether the servers hold something of a request that has ended."""
        return bool(self._staying)

    def ended(self, end: RequestEnded, kept: _Kept) -> bool:
        """A request has ended. Whether something of it is left, so that ``left`` will give ``kept`` back."""
        leaving = leaves_with(end)
        if end.request in self._released_early:
            self._released_early.remove(end.request)
            if leaving is SourceReleased:
                leaving = None
        if leaving is None:
            return False
        self._staying[end.request] = kept, leaving
        return True

    def left(self, event: SourceReleased | CanceledRequestLeft, *, has_ended: bool) -> _Kept | None:
        """A server has let go of a request. Gives what was kept of it if nothing is left then, else None."""
        if not has_ended:
            self._released_early.add(event.request)
            return None
        kept, leaving = self._staying.get(event.request, (None, None))
        if leaving is type(event):
            del self._staying[event.request]
            return kept
        return None

    def begins_anew(self, request: int) -> None:
        """What a request left before its end, and before it was submitted again, is no news."""
        self._released_early.discard(request)
