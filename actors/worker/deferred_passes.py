"""Passes of a worker that concern nobody else while they last, taken together when somebody needs them.

Owns: which of them are over, and when what they did is told. Refuses to know: what a pass does (``rank``), and what
ends them (the worker's next message, or a recall; see ``bus.kernel``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from g2sim.actors.host_pool.messages import BoundaryReply
from g2sim.actors.phases import Phase
from g2sim.actors.worker.events import PassEnded, PassesEnded, PassStarted
from g2sim.actors.worker.place import RankPlace
from g2sim.actors.worker.rank import PassResult
from g2sim.bus.kernel import Port

MOST_PASSES = 64
"""Passes that are planned at once; planning more is in vain if something comes between."""


class LateShow:
    """Publishes what shows of deferred passes, each at its time.

    Args:
        place: as below.
        begun: the pass that has begun, which all others are like.
        port: of the worker.
        show_changes: publishes the rank's KV events, as of that time [ms].
    """

    __slots__ = ("_begun", "_ends", "_place", "_port", "_runs", "_show_changes", "_starts")

    def __init__(self, place: RankPlace, begun: PassResult, port: Port, show_changes: Callable[[float], None]) -> None:
        self._place = place
        self._begun = begun
        self._port = port
        self._show_changes = show_changes
        self._starts = port.hears(PassStarted)
        self._ends = port.hears(PassEnded)
        self._runs = port.hears(PassesEnded)

    def end(self, end_ms: float) -> None:
        """The pass in flight ends."""
        place, begun = self._place, self._begun
        rank = place.rank
        if rank.device_changes or rank.host_changes or rank.restored:
            self._show_changes(end_ms)
        if self._ends:
            self._port.publish_late_values(end_ms, Phase.PASS_END, PassEnded, place.pass_ended(begun, begun.emitted))
        if self._runs:
            place.times_ms.append(end_ms)
        place.pass_idx += 1

    def start(self, start_ms: float, end_ms: float) -> None:
        """The next one starts, and will end at ``end_ms``."""
        if self._starts:
            place = self._place
            values = place.pass_started(self._begun, place.rank.compute_start_ms(start_ms), end_ms)
            self._port.publish_late_values(start_ms, Phase.START, PassStarted, values)


class DeferredPasses:
    """See the module's text; what the kernel calls ``Deferred``.

    Args:
        place: the worker's only rank, which has begun a decode pass, with what is known of its run.
        ends_ms: end of that pass, and of those that follow [ms], from ``Rank.plan_decode_passes``.
        show: publishes what shows of the passes; None if nobody hears of it.
        take_news: says what its host tier has told at the ends of passes that are over, as ``TakeNews`` does: at those
            of ``ends_ms`` from the first place it is given, up to the second; None if it has told nothing.
        go_on: called at the end with the end of the pass in flight, None if the last one has just ended.
    """

    __slots__ = ("_at", "_between", "_ends_ms", "_go_on", "_place", "_port", "_show", "_take_news")

    def __init__(
        self,
        place: RankPlace,
        ends_ms: Sequence[float],
        port: Port,
        show: LateShow | None,
        take_news: Callable[[int, int], Sequence[tuple[int, BoundaryReply]]] | None,
        go_on: Callable[[float | None], None],
    ) -> None:
        self._place = place
        self._ends_ms = ends_ms
        self._port = port
        self._show = show
        self._take_news = take_news
        self._go_on = go_on
        self._at = 0
        self._between = False

    def take(self) -> None:
        port, ends_ms, first = self._port, self._ends_ms, self._at
        if self._between:
            if ends_ms[first - 1] == port.now_ms and not port.has_passed(Phase.START):
                return
            self._between = False
            self._start(first)
        stop = port.count_passed(ends_ms, Phase.PASS_END, port.order, first)
        if stop == first:
            return
        over = ends_ms[first:stop]
        self._at = stop
        self._between = over[-1] == port.now_ms and not port.has_passed(Phase.START)
        port.pass_instants(over)
        news = () if self._take_news is None else self._take_news(first, stop)
        rank = self._place.rank
        show = self._show
        if show is None:
            self._place.times_ms.extend(over)
            self._place.pass_idx += len(over)
            for place, reply in news:
                rank.take_decode_passes(place - first)
                first = place
                rank.end_pass(reply)
                rank.drop_changes()
            rank.take_decode_passes(stop - first - self._between)
            return
        told = dict(news)
        for place in range(first, stop):
            if place in told:
                rank.end_pass(told[place])
            show.end(ends_ms[place])
            if place + 1 != stop or not self._between:
                self._start(place + 1)

    def _start(self, idx: int) -> None:
        """The pass starts that ends at ``ends_ms[idx]``."""
        self._place.rank.take_decode_passes(1)
        if self._show is not None:
            self._show.start(self._ends_ms[idx - 1], self._ends_ms[idx])

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
