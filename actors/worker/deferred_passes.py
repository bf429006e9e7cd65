"""Passes of a worker that concern nobody else while they last, taken together when somebody needs them.

Owns: which of them are over, and when what they did is told. Refuses to know: what a pass does (``rank``), and what
ends them (the worker's next message, or a recall; see ``bus.kernel``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from g2sim.actors.host_pool.messages import BoundaryReply
from g2sim.actors.phases import Phase
from g2sim.actors.worker.events import PassEnded, PassesEnded, PassStarted
from g2sim.actors.worker.place import RankPlace
from g2sim.actors.worker.rank import PassResult
from g2sim.bus.events import BY_CLASS
from g2sim.bus.kernel import Port

MOST_PASSES = 64
"""Passes that are planned at once; planning more is in vain if something comes between."""


def _place_of(field: str, event_type: type[Any]) -> int:
    """Where the value of a field stands among those of its event."""
    return BY_CLASS[event_type].fields.index(field)


_PASS_ENDED = _place_of("pass_idx", PassEnded)
_PASS_STARTED = _place_of("pass_idx", PassStarted)
_COMPUTE_START_MS = _place_of("compute_start_ms", PassStarted)
_END_MS = _place_of("end_ms", PassStarted)


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

    def changes(self, end_ms: float) -> None:
        """The pass in flight ends: show what it has changed."""
        rank = self._place.rank
        if rank.device_changes or rank.host_changes or rank.restored:
            self._show_changes(end_ms)

    def ends(self, ends_ms: Sequence[float]) -> None:
        """The pass in flight and those after it end at these times; what they have changed is shown."""
        place, begun = self._place, self._begun
        if self._ends:
            values = place.pass_ended(begun, begun.emitted)
            self._port.publish_late_run(ends_ms, Phase.PASS_END, PassEnded, values, _PASS_ENDED)
        if self._runs:
            place.times_ms.extend(ends_ms)
        place.pass_idx += len(ends_ms)

    def starts(self, ahead: int, starts_ms: Sequence[float], ends_ms: Sequence[float]) -> None:
        """Passes start, each at one of ``starts_ms``, and will end at ``ends_ms``.

        Args:
            ahead: how many passes that are not shown to have ended come before the first of them.
        """
        if not self._starts:
            return
        place, rank = self._place, self._place.rank
        compute_ms = starts_ms
        if rank.compute_start_ms(starts_ms[0]) != starts_ms[0]:
            compute_ms = [rank.compute_start_ms(start_ms) for start_ms in starts_ms]
        values = place.pass_started(self._begun, compute_ms[0], ends_ms[0], ahead)
        times = ((_COMPUTE_START_MS, compute_ms), (_END_MS, ends_ms))
        self._port.publish_late_run(starts_ms, Phase.START, PassStarted, values, _PASS_STARTED, times)


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

    __slots__ = ("_at", "_begun", "_ends_ms", "_go_on", "_place", "_port", "_show", "_take_news")

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
        # How many passes have ended, and how many have begun: one more, except between an end and the start after it.
        self._at = 0
        self._begun = 1

    def take(self) -> None:
        port, ends_ms, first, begun = self._port, self._ends_ms, self._at, self._begun
        if begun == first and ends_ms[first - 1] == port.now_ms and not port.has_passed(Phase.START):
            return
        stop = port.count_passed(ends_ms, Phase.PASS_END, port.order, first)
        if stop == first and begun > first:
            return
        over = ends_ms[first:stop]
        news: Sequence[tuple[int, BoundaryReply]] = ()
        to_begin = stop + 1
        if over:
            if over[-1] == port.now_ms and not port.has_passed(Phase.START):
                to_begin = stop
            port.pass_instants(over)
            if self._take_news is not None:
                news = self._take_news(first, stop)
        self._at, self._begun = stop, to_begin
        show = self._show
        if show is None:
            self._carry_out(begun, to_begin, news)
            self._place.times_ms.extend(over)
            self._place.pass_idx += len(over)
            return
        self._carry_out_showing(show, first, begun, news)
        if to_begin > begun:
            show.starts(begun - first, ends_ms[begun - 1 : to_begin - 1], ends_ms[begun:to_begin])
        if over:
            show.ends(over)

    def _carry_out(self, begun: int, to_begin: int, news: Sequence[tuple[int, BoundaryReply]]) -> None:
        """Let passes begin, and the rank hear the news at the ends of those before, where nobody hears of changes."""
        rank = self._place.rank
        for place, reply in news:
            rank.take_decode_passes(place + 1 - begun)
            begun = place + 1
            rank.end_pass(reply)
            rank.drop_changes()
        rank.take_decode_passes(to_begin - begun)

    def _carry_out_showing(
        self, show: LateShow, first: int, begun: int, news: Sequence[tuple[int, BoundaryReply]]
    ) -> None:
        """``_carry_out`` where somebody hears of what a pass has changed, at its end."""
        rank, ends_ms = self._place.rank, self._ends_ms
        told = dict(news)
        for place in range(first, self._at):
            if begun == place:
                rank.take_decode_passes(1)
                begun += 1
            if place in told:
                rank.end_pass(told[place])
            show.changes(ends_ms[place])
        rank.take_decode_passes(self._begun - begun)

    def stop(self) -> None:
        self._go_on(None if self._begun == self._at else self._ends_ms[self._at])


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
