"""Turns that actors put off: taken in time, in place, and as if they had not been."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from g2sim.actors.worker.events import PassStarted
from g2sim.bus import kernel as kernel_module
from g2sim.bus.drivers import InlineDriver
from g2sim.bus.errors import ProtocolError
from g2sim.bus.events import Record, Row, signal
from g2sim.bus.kernel import Envelope, Kernel, Port, Subscription

END, LOOK, START = 2, 5, 11


@signal
class Ticked:
    who: int
    number: int


@signal
class Started:
    who: int


@signal
class Poked:
    who: int


class Ticker:
    """Ends a piece of work and starts the next, ``times`` times; publishes at each end that ``shows`` wants shown."""

    def __init__(self, who: int, period_ms: float, times: int, shows: int, *, defers: bool) -> None:
        self.who, self.period_ms, self.times, self.shows, self.defers = who, period_ms, times, shows, defers
        self.started = self.ended = 0
        self.ends_ms: list[float] = []
        self.first = 0
        self.end: Envelope | None = None
        self.between = self.deferring = False
        self.seen: list[tuple[float, int, int]] = []
        self.port: Any = None

    def receive(self, message: str, port: Port) -> None:
        self.port = port
        if self.deferring:
            port.recall_own()
        if message == "start":
            self._start(port)
        elif message == "end":
            self._over(lambda event: port.publish(event))
            if self.started < self.times:
                port.send_self("start", phase=START)
        else:
            self.seen.append((port.now_ms, self.started, self.ended))
            port.publish(Poked(who=self.who))

    def waiting(self) -> Sequence[str]:
        return ()

    def _start(self, port: Port) -> None:
        self.started += 1
        port.publish(Started(who=self.who))
        end_ms = port.now_ms + self.period_ms
        ends_ms = [end_ms]
        if self.defers and port.may_defer(Ticked, Started):
            while len(ends_ms) <= self.times - self.started:
                ends_ms.append(ends_ms[-1] + self.period_ms)
        if len(ends_ms) > 1:
            self.ends_ms, self.first, self.between, self.deferring = ends_ms, 0, False, True
            port.defer(self)
        self.end = port.send_self("end", phase=END, at_ms=ends_ms[-1])

    def _over(self, publish: Callable[[Ticked], None]) -> None:
        self.ended += 1
        if self.ended % self.shows == 0:
            publish(Ticked(who=self.who, number=self.ended))

    def take(self) -> None:
        port = self.port
        if self.between and (port.now_ms > self.ends_ms[self.first - 1] or port.has_passed(START)):
            self.between = False
            self._start_late(self.ends_ms[self.first - 1])
        over: list[float] = []
        for end_ms in self.ends_ms[self.first :]:
            if not (end_ms < port.now_ms or (end_ms == port.now_ms and port.has_passed(END))):
                break
            over.append(end_ms)
            self._over(lambda event, end_ms=end_ms: port.publish_late(end_ms, END, event))  # type: ignore[misc]
            self.between = end_ms == port.now_ms and not port.has_passed(START)
            if not self.between:
                self._start_late(end_ms)
        self.first += len(over)
        if over:
            port.pass_instants(over)

    def _start_late(self, time_ms: float) -> None:
        self.started += 1
        self.port.publish_late(time_ms, START, Started(who=self.who))

    def stop(self) -> None:
        self.deferring = False
        assert self.end is not None
        if not self.between and self.ends_ms[self.first] == self.end.time_ms:
            return
        self.port.cancel(self.end)
        if self.between:
            self.port.send_self("start", phase=START)
        else:
            self.end = self.port.send_self("end", phase=END, at_ms=self.ends_ms[self.first])


class Reader:
    inbox: Subscription

    def __init__(self) -> None:
        self.read: list[tuple[float, str, int, int]] = []

    def receive(self, message: Any, port: Port) -> None:
        if message != "read":
            port.send(message, "poke", phase=0)  # in the next round, if this is a later phase
            return
        self.read += [(port.now_ms, one.source, one.event.who, one.event.number) for one in self.inbox.drain()]

    def waiting(self) -> Sequence[str]:
        return ()


class Retrier:
    """Retries so many times after each message, and notes when that was."""

    def __init__(self) -> None:
        self.left = 0
        self.tries: list[tuple[float, int]] = []

    def receive(self, message: Any, port: Port) -> None:
        if message != "again":
            self.left = message
        self.tries.append((port.now_ms, port.round))
        self.left -= 1
        if self.left > 0:
            port.retry("again", phase=START)

    def waiting(self) -> Sequence[str]:
        return ()


@attrs.frozen
class Play:
    """Tickers (period, times, shows), and what else happens: (time, phase, what, to)."""

    tickers: list[tuple[int, int, int]]
    happens: list[tuple[int, int, str, int]]

    def run(self, *, defers: bool) -> Any:
        kernel = Kernel()
        before, reader, after = Retrier(), Reader(), Retrier()
        kernel.register("before", before)
        tickers = [Ticker(who, *ticker, defers=defers) for who, ticker in enumerate(self.tickers)]
        for ticker in tickers[::2]:
            kernel.register(f"ticker {ticker.who}", ticker)
        kernel.register("reader", reader)
        for ticker in tickers[1::2]:
            kernel.register(f"ticker {ticker.who}", ticker)
        kernel.register("after", after)
        reader.inbox = kernel.subscribe("reader", [Ticked])
        record: list[Any] = []
        kernel.add_sink(record.append, [Ticked, Started, Poked], may_be_late=True)
        instants: list[float] = []
        kernel.observe_instants(lambda times_ms: instants.extend(times_ms[1:]))
        for ticker in tickers:
            kernel.post(kernel.slot(f"ticker {ticker.who}"), "start", START, 0.0)
        for time_ms, phase, what, to in self.happens:
            if what == "poke":
                kernel.post(kernel.slot(f"ticker {to % len(tickers)}"), "poke", phase, float(time_ms))
            elif what == "echo":
                kernel.post(kernel.slot("reader"), f"ticker {to % len(tickers)}", phase, float(time_ms))
            elif what == "read":
                kernel.post(kernel.slot("reader"), "read", phase, float(time_ms))
            else:
                kernel.post(kernel.slot(("before", "after")[to % 2]), 1 + to % 4, phase, float(time_ms))
        kernel.post(kernel.slot("reader"), "read", LOOK, 1e6)
        InlineDriver(kernel).run()
        kernel.tell_instants()
        return record, reader.read, instants, [one.seen for one in tickers], before.tries, after.tries


plays = st.builds(
    Play,
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 12), st.integers(1, 3)), min_size=1, max_size=4),
    st.lists(
        st.tuples(
            st.integers(0, 20),
            st.sampled_from([0, END, LOOK, START, 12]),
            st.sampled_from(["poke", "echo", "read", "retry"]),
            st.integers(0, 7),
        ),
        max_size=10,
    ),
)


@settings(deadline=None, max_examples=400)
@given(plays)
def test_deferred_turns_are_as_if_taken_by_messages(play: Play) -> None:
    assert play.run(defers=True) == play.run(defers=False)


@settings(deadline=None, max_examples=200)
@given(plays)
def test_telling_instants_between_turns_takes_nothing_from_the_next_one(play: Play) -> None:
    """They are told, and deferred turns taken for it, after a turn as of that turn; the next one takes them again."""
    with mock.patch.object(kernel_module, "_MAX_INSTANTS", 1):
        assert play.run(defers=True) == play.run(defers=False)


def test_turns_are_deferred_at_all() -> None:
    """Else the property above says nothing: a run of ten costs two turns, one for its start and one for its end."""
    kernel = Kernel()
    kernel.register("ticker", Ticker(0, 1.0, 10, 1, defers=True))
    kernel.post(kernel.slot("ticker"), "start", START, 0.0)
    InlineDriver(kernel).run()
    assert (kernel.turn_idx, kernel.now_ms) == (2, 10.0)


class Asks:
    def __init__(self) -> None:
        self.allowed: list[bool] = []

    def receive(self, message: Any, port: Port) -> None:
        self.allowed.append(port.may_defer(Ticked))

    def waiting(self) -> Sequence[str]:
        return ()


def _add_sink(kernel: Kernel) -> None:
    kernel.add_sink(lambda record: None, [Ticked])


def _add_waking_subscription(kernel: Kernel) -> None:
    kernel.subscribe("other", [Ticked], wake_message="x", wake_phase=0)


@pytest.mark.parametrize(
    ("hears", "allowed"),
    [
        (lambda kernel: None, True),
        (lambda kernel: kernel.subscribe("other", [Ticked], lag_ms=3.0), True),
        (lambda kernel: kernel.add_sink(lambda record: None), True),  # it is a signal, which is no part of the record
        (_add_sink, False),
        (lambda kernel: kernel.add_sink(lambda record: None, [Ticked], may_be_late=True), True),
        (_add_waking_subscription, False),
    ],
)
def test_turns_are_deferred_only_if_nobody_has_to_hear_at_once(hears: Callable[[Kernel], None], allowed: bool) -> None:
    kernel, asks = Kernel(), Asks()
    kernel.register("asks", asks)
    kernel.register("other", Asks())
    hears(kernel)
    kernel.post(kernel.slot("asks"), "go", 0, 1.0)
    InlineDriver(kernel).run()
    assert asks.allowed == [allowed]


def test_nothing_is_deferred_while_a_retry_is_parked() -> None:
    kernel, asks = Kernel(), Asks()
    kernel.register("asks", asks)
    kernel.register("retrier", Retrier())
    kernel.post(kernel.slot("retrier"), 9, START, 1.0)
    kernel.post(kernel.slot("asks"), "go", 12, 1.0)
    InlineDriver(kernel).run()
    assert asks.allowed == [False]


class Teller:
    """Publishes what is to come late, in one turn: as runs, or each event alone."""

    def __init__(self, runs: list[tuple[int, list[int], list[float]]], *, by_run: bool) -> None:
        self.runs, self.by_run = runs, by_run

    def receive(self, message: Any, port: Port) -> None:
        for phase, times, ends_ms in self.runs:
            times_ms = [float(time) for time in sorted(times)]
            ends_ms = ends_ms[: len(times_ms)]
            values = [(0, "decode", 0, 7 + idx, 1.0, end_ms, 3, 2) for idx, end_ms in enumerate(ends_ms)]
            if self.by_run:
                port.publish_late_run(times_ms, phase, PassStarted, values[0], 3, [(5, ends_ms)])
            else:
                for time_ms, one in zip(times_ms, values, strict=True):
                    port.publish_late_values(time_ms, phase, PassStarted, one)

    def waiting(self) -> Sequence[str]:
        return ()


def told(runs: list[tuple[int, list[int], list[float]]], *, by_run: bool) -> tuple[list[Row], list[Record]]:
    """Rows and records of two tellers, which tell the same."""
    kernel = Kernel()
    rows: list[Row] = []
    records: list[Record] = []
    kernel.add_row_sink(rows.extend)
    kernel.add_sink(records.append, [PassStarted], may_be_late=True)
    for name in ("first", "second"):
        kernel.register(name, Teller(runs, by_run=by_run))
        kernel.post(kernel.slot(name), "tell", 0, 50.0)
    InlineDriver(kernel).run()
    kernel.tell_instants()
    return rows, records


late_runs = st.integers(1, 6).flatmap(
    lambda size: st.tuples(
        st.sampled_from([END, START]),
        st.lists(st.integers(0, 9), min_size=size, max_size=size),
        st.lists(st.floats() | st.integers(1, 2), min_size=size, max_size=size),
    )
)


@settings(deadline=None)
@given(st.lists(late_runs, max_size=4))
def test_a_run_of_late_events_is_as_if_each_were_published_alone(
    runs: list[tuple[int, list[int], list[float]]],
) -> None:
    rows, records = told(runs, by_run=True)
    alone_rows, alone_records = told(runs, by_run=False)
    assert repr([row[:5] for row in rows]) == repr([row[:5] for row in alone_rows])  # NaN is not equal to itself
    assert repr(records) == repr(alone_records)
    assert {row[5] for row in alone_rows} <= {None}
    by_run: dict[object, list[Row]] = {}
    for row in rows:
        by_run.setdefault(row[5], []).append(row)
    alone = by_run.pop(None, [])
    assert all(type(row[4][5]) is float and math.isfinite(row[4][5]) for one in by_run.values() for row in one)
    assert len(by_run) == 2 * sum(
        len(times) > 1 and all(type(end) is float and math.isfinite(end) for end in ends) and math.isfinite(sum(ends))
        for _, times, ends in runs
    )
    assert len(alone) + sum(map(len, by_run.values())) == len(rows)
    for one in by_run.values():
        assert len({row[1] for row in one}) == 1
        assert [row[4][3] for row in one] == [7 + idx for idx in range(len(one))]


def test_a_run_with_a_float_too_few_is_refused() -> None:
    kernel = Kernel()
    slot = kernel.register("a", Asks())
    with pytest.raises(ProtocolError, match=r"a: 1 values for 2 events in place 4"):
        slot.port.publish_late_run([1.0, 2.0], END, PassStarted, (0, "decode", 0, 1, 1.0, 2.0, 3, 2), 3, [(4, [1.0])])
