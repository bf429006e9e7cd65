"""The one place that parks and wakes trio tasks.

Owns: a one-slot hand-off between the task that holds the baton and a parked one.
Refuses to know: what is handed over, and when.

Why not a trio channel: a channel round trip costs 16-25 us here, one low-level switch 4-6 us. The price is
that trio checks little on this level, so this module does: one wake for each park, a fresh ``Outcome`` for each wake,
and a double wake or a double park is a ``ProtocolError`` (trio's own check is an assert and vanishes under ``-O``).
"""

from __future__ import annotations

from typing import Any

import outcome
import trio

from g2sim.bus.errors import ProtocolError


class Handoff:
    """Lets one task wait for one value at a time. ``name`` appears in errors."""

    __slots__ = ("_task", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self._task: trio.lowlevel.Task | None = None

    @property
    def parked(self) -> bool:
        return self._task is not None

    async def park(self) -> Any:
        """Wait until ``wake`` or ``fail`` is called once; returns the value or raises the error.

        Raises: ProtocolError if another task is parked here already.
        """
        if self._task is not None:
            raise ProtocolError(f"{self.name}: two tasks park on one hand-off")
        self._task = trio.lowlevel.current_task()
        try:
            return await trio.lowlevel.wait_task_rescheduled(self._abort)
        finally:
            self._task = None

    def wake(self, value: Any) -> None:
        """Give ``value`` to the parked task. Raises: ProtocolError if nobody is parked, or it was woken already."""
        self._reschedule(outcome.Value(value))

    def fail(self, error: BaseException) -> None:
        """Raise ``error`` in the parked task. Raises: ProtocolError as ``wake``."""
        self._reschedule(outcome.Error(error))

    def _reschedule(self, result: outcome.Outcome[Any]) -> None:
        task = self._task
        if task is None:
            raise ProtocolError(f"{self.name}: woken, but nobody is parked (a second wake for one park?)")
        self._task = None
        trio.lowlevel.reschedule(task, result)

    def _abort(self, _raise_cancel: object) -> trio.lowlevel.Abort:
        self._task = None
        return trio.lowlevel.Abort.SUCCEEDED
