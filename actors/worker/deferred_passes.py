"""Passes of a worker that concern nobody else while they last, taken together when somebody needs them.

Owns: which of them are over, and when what they did is told. Refuses to know: what a pass does (``rank``), and what
ends them (the worker's next message, or a recall; see ``bus.kernel``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from g2sim.actors.phases import Phase
from g2sim.actors.worker.place import RankPlace
from g2sim.bus.kernel import Port

MOST_PASSES = 64
"""Passes that are planned at once; planning more is in vain if something comes between."""


class DeferredPasses:
    """See the module's text; what the kernel calls ``Deferred``.

    Args:
        place: the worker's only rank, which has begun a decode pass, with what is known of its run.
        ends_ms: end of that pass, and of those that follow [ms], from ``Rank.plan_decode_passes``.
        show: publishes the rank's KV events as of a time, None if nobody hears of them.
        go_on: called at the end with the end of the pass in flight, None if the last one has just ended.
    """

    __slots__ = ("_at", "_between", "_ends_ms", "_go_on", "_place", "_port", "_show")

    def __init__(
        self,
        place: RankPlace,
        ends_ms: Sequence[float],
        port: Port,
        show: Callable[[float], None] | None,
        go_on: Callable[[float | None], None],
    ) -> None:
        self._place = place
        self._ends_ms = ends_ms
        self._port = port
        self._show = show
        self._go_on = go_on
        self._at = 0
        self._between = False

    def take(self) -> None:
        port, rank, ends_ms, first = self._port, self._place.rank, self._ends_ms, self._at
        now_ms = port.now_ms
        if self._between:
            if ends_ms[first - 1] == now_ms and not port.has_passed(Phase.START):
                return
            self._between = False
            rank.take_decode_passes(1)
        stop = port.count_passed(ends_ms, Phase.PASS_END, port.order, first)
        if stop == first:
            return
        over = ends_ms[first:stop]
        self._between = over[-1] == now_ms and not port.has_passed(Phase.START)
        self._at = stop
        self._place.times_ms.extend(over)
        self._place.pass_idx += len(over)
        port.pass_instants(over)
        if self._show is None:
            rank.take_decode_passes(len(over) - self._between)
            return
        for end_ms in over:
            self._show(end_ms)
            if end_ms != over[-1] or not self._between:
                rank.take_decode_passes(1)

    def stop(self) -> None:
        self._go_on(None if self._between else self._ends_ms[self._at])


class DeferredRetries:
    """Retries of a worker that would come to nothing: there is nothing to take.

    Args:
        stand_down: called at the end.
    """

    __slots__ = ("stop",)

    def __init__(self, stand_down: Callable[[], None]) -> None:
        self.stop = stand_down

    def take(self) -> None:
        pass
