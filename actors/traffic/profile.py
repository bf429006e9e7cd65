"""The clock of a profile: until when plays are recycled, how long requests may go on, and when waiting is cut short.

Owns: deadlines and idle guards. Refuses to know: what a play is made of, and what is done about them.

Source: workloads 10; checked against the reference's recordings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from g2sim.actors.traffic.plays import PlayRun


@attrs.frozen(kw_only=True)
class ProfileOptions:
    """How long a profile goes on. All in seconds; the report shows them as they are."""

    duration_seconds: float = 3600.0
    response_grace_seconds: float = 30.0
    cancel_drain_seconds: float = 10.0
    tree_idle_cap_seconds: float = 300.0
    global_idle_cap_seconds: float = 10.0


@attrs.frozen(kw_only=True)
class Deadlines:
    """Instants at which a profile that starts at ``start_ms`` changes [ms]."""

    start_ms: float
    cutoff_ms: float
    grace_end_ms: float
    drain_end_ms: float

    @classmethod
    def of(cls, options: ProfileOptions, start_ms: float) -> Deadlines:
        cutoff_ms = start_ms + options.duration_seconds * 1000.0
        grace_end_ms = cutoff_ms + options.response_grace_seconds * 1000.0
        drain_end_ms = grace_end_ms + options.cancel_drain_seconds * 1000.0
        return cls(start_ms=start_ms, cutoff_ms=cutoff_ms, grace_end_ms=grace_end_ms, drain_end_ms=drain_end_ms)


class Profile:
    """See the module's text.

    Attributes:
        closed: the cutoff has passed; nothing is dispatched any more.
        finished: nobody waits for anything any more.
    """

    def __init__(self, options: ProfileOptions) -> None:
        self._tree_cap_ms = options.tree_idle_cap_seconds * 1000.0
        self._global_cap_ms = options.global_idle_cap_seconds * 1000.0
        self._options = options
        self._deadlines = Deadlines.of(options, 0.0)
        self._last_control_ms = 0.0
        self._canceled = False
        self.closed = False
        self.finished = False

    @property
    def cutoff_ms(self) -> float:
        """Nothing is dispatched at this instant or later [ms]."""
        return self._deadlines.cutoff_ms

    def open(self, now_ms: float) -> None:
        """The measured clock starts."""
        self._deadlines = Deadlines.of(self._options, now_ms)
        self._last_control_ms = now_ms

    def takes_grace_end(self, now_ms: float) -> bool:
        """Whether it is time to cancel what is left; True once."""
        if self._canceled or now_ms < self._deadlines.grace_end_ms:
            return False
        self._canceled = True
        return True

    def idle(self, plays: Sequence[PlayRun], now_ms: float) -> Iterator[tuple[str | None, list[PlayRun]]]:
        """Plays whose timers are to be pulled forward: each that idles for long by itself, then all together.

        How long anything has been idle is read before the first of them is acted on.

        Args:
            plays: the current play of each lane.
            now_ms: the instant.
        Returns: (play id, None = all; the plays).
        """
        self._last_control_ms = now_ms
        due = [play for play in plays if play.idle_since_ms is not None and now_ms >= self._tree_due_ms(play)]
        all_due = self._all_due_ms(plays)
        for play in due:
            yield play.play_id, [play]
        if all_due is not None and now_ms >= all_due:
            yield None, list(plays)

    def next_control_ms(self, plays: Sequence[PlayRun]) -> float | None:
        """The next instant at which this clock wants to be looked at [ms], None if there is none."""
        if self.finished:
            return None
        if self.closed:
            outstanding = any(play.outstanding for play in plays)
            if not outstanding:
                return self._last_control_ms
            return None if self._canceled else self._deadlines.grace_end_ms
        times = [self.cutoff_ms]
        idle = [play for play in plays if play.idle_since_ms is not None and play.has_ready]
        times += [self._tree_due_ms(play) for play in idle]
        all_due = self._all_due_ms(plays)
        if idle and all_due is not None:
            times.append(all_due)
        return max(self._last_control_ms, min(times))

    def _tree_due_ms(self, play: PlayRun) -> float:
        return (play.idle_since_ms or 0.0) + self._tree_cap_ms

    def _all_due_ms(self, plays: Sequence[PlayRun]) -> float | None:
        """When the global guard is due; None while anything is outstanding."""
        if any(play.outstanding for play in plays):
            return None
        since = [play.idle_since_ms for play in plays if play.idle_since_ms is not None]
        return max(since, default=0.0) + self._global_cap_ms
