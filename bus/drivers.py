"""Two ways to execute the actors of a kernel: as trio tasks, or by plain calls.

Both give the same turns in the same order, so the same log, byte for byte; a test holds them to it.

In the trio driver one *baton* goes round: the task that has it takes the next envelope from the kernel and wakes the
recipient's task with it, or goes on by itself when it is the recipient. No two actors are ever runnable at once, so the
order in which trio runs its tasks (shuffled on purpose) cannot matter. The turn of an actor that is asked runs inside
the asker's, in the asker's task: it can wait on nothing but further asks, so it needs no task of its own. For the same
reason a *quiet* turn, one of the frequent kinds that an actor names, runs in the task that has the baton.
"""

from __future__ import annotations

from typing import Any

import trio

from g2sim.bus.clock import VirtualClock
from g2sim.bus.errors import ProtocolError
from g2sim.bus.handoff import Handoff
from g2sim.bus.kernel import RESUMABLE, Ask, Envelope, Kernel, Slot

_STOP = object()


class TrioDriver:
    """Runs each actor as a trio task. ``run`` needs no running trio loop; ``run_async`` joins an existing one."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._main = Handoff("driver")
        self._handoffs: dict[Slot, Handoff] = {}
        self._at_work: Slot | None = None
        self._nursery: trio.Nursery | None = None
        self._lost: ProtocolError | None = None

    def run(self) -> None:
        """Run to the end on a virtual clock. Raises whatever an actor or the kernel raised."""
        clock = VirtualClock(lambda: self._kernel.now_ms, self._stalled)
        try:
            trio.run(self.run_async, clock=clock)
        except BaseExceptionGroup as group:
            # Ctrl-C strikes any task, at any line; outside a turn the nursery wraps it.
            if group.subgroup(KeyboardInterrupt) is not None:
                raise KeyboardInterrupt from group
            raise

    async def run_async(self) -> None:
        error: BaseException | None = None
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            for slot in self._kernel.slots:
                await nursery.start(self._shell, slot)
            try:
                first = self._kernel.next_envelope()
                if first is not None:
                    self._at_work = first.slot
                    self._handoffs[first.slot].wake(first)
                    await self._main.park()
                for handoff in self._handoffs.values():
                    handoff.wake(_STOP)
            except BaseException as caught:
                error = caught
                nursery.cancel_scope.cancel()
        if error is None:
            error = self._lost
        if error is not None:
            raise error

    async def _shell(self, slot: Slot, task_status: trio.TaskStatus[None]) -> None:
        handoff = self._handoffs[slot] = Handoff(slot.name)
        task_status.started()
        while (work := await handoff.park()) is not _STOP:
            try:
                self._take_turns(slot, work)
            except trio.Cancelled:
                raise
            except BaseException as error:
                if self._main.parked:
                    self._main.fail(error)
                elif isinstance(error, KeyboardInterrupt):
                    raise
                return  # else the run is ending for another reason, and this is what comes of it

    def _take_turns(self, slot: Slot, envelope: Envelope) -> None:
        kernel = self._kernel
        upcoming: Envelope | None = envelope
        while upcoming is not None:
            at_work, message = upcoming.slot, upcoming.message
            if at_work is not slot and type(message) not in at_work.quiet:
                break
            perform(kernel, at_work, message)
            kernel.finish_turn()
            if not self._main.parked:
                return  # the run was cancelled, or interrupted, from outside: the baton ends here
            upcoming = kernel.next_envelope()
        if upcoming is None:
            self._at_work = None
            self._main.wake(None)
        else:
            self._at_work = upcoming.slot
            self._handoffs[upcoming.slot].wake(upcoming)

    def _stalled(self) -> None:
        who = "nobody" if self._at_work is None else self._at_work.name
        error = ProtocolError(
            f"{who} has the turn at {self._kernel.now_ms!r} ms, but nothing is runnable: a wake-up was "
            "lost, or the turn waits on something that is not the bus"
        )
        if self._main.parked:
            self._main.fail(error)
        elif self._nursery is not None and self._lost is None:
            self._lost = error
            self._nursery.cancel_scope.cancel()


class InlineDriver:
    """Runs each turn as a plain call. For tests, and where no task is wanted."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def run(self) -> None:
        kernel = self._kernel
        while (envelope := kernel.next_envelope()) is not None:
            perform(kernel, envelope.slot, envelope.message)
            kernel.finish_turn()


def perform(kernel: Kernel, slot: Slot, message: Any) -> Any:
    """Run one actor's turn, and inside it the turns of those it asks. Returns its reply."""
    result = slot.actor.receive(message, slot.port)
    if not RESUMABLE[type(result)]:
        return result
    slot.in_turn = True
    reply = None
    try:
        while True:
            ask = result.send(reply)
            reply = perform(kernel, _asked_slot(kernel, slot, ask), ask.message)
    except StopIteration as stop:
        return stop.value
    finally:
        result.close()  # a turn that fails half-way must not linger until it is collected elsewhere
        slot.in_turn = False


def _asked_slot(kernel: Kernel, asker: Slot, ask: Any) -> Slot:
    if type(ask) is not Ask:
        raise ProtocolError(
            f"{asker.name} waits on something that is not the bus ({type(ask).__name__}) at {kernel.now_ms!r} ms: an "
            "actor may only publish, send and ask (no trio.sleep, no trio events, no I/O)"
        )
    target = kernel.slot(ask.target)
    if target.in_turn or target is asker:
        raise ProtocolError(f"{asker.name} asks {target.name}, which is in the middle of a turn of its own")
    return target
