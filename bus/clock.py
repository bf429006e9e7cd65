"""The virtual clock, as trio sees it.

Owns: the translation of virtual milliseconds to trio's seconds, and the detection of a turn that waits on something
other than the bus. Refuses to know: what time it is; the kernel does.
"""

from __future__ import annotations

from collections.abc import Callable

import trio


class VirtualClock(trio.abc.Clock):
    """A clock that never waits.

    trio asks its clock how long to sleep whenever no task is runnable. While a run is under way that can only mean
    that a turn waits for something the bus does not know (``trio.sleep``, an event, I/O), since the task that holds the
    baton is otherwise runnable. ``on_stall`` is called then; it must make a task runnable.
    """

    def __init__(self, now_ms: Callable[[], float], on_stall: Callable[[], None]) -> None:
        self._now_ms = now_ms
        self._on_stall = on_stall

    def start_clock(self) -> None:
        """Nothing to start: virtual time moves only when the kernel says so."""

    def current_time(self) -> float:
        return self._now_ms() / 1000.0

    def deadline_to_sleep_time(self, deadline: float) -> float:
        self._on_stall()
        return 0.0
