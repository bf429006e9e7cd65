"""Clients that stand by: the pool's ages, and so what it evicts, are as if they had asked again and again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from g2sim.actors.host_pool.actor import HostPoolActor
from g2sim.actors.host_pool.events import OF_TRANSFER_ENDS, HostBlocksEvicted, StoreLanded
from g2sim.actors.host_pool.messages import (
    NOTHING,
    HostProgress,
    Join,
    LookUp,
    NewsAt,
    PassBoundary,
    PrepareStore,
    StandBy,
    StandDown,
    TakeNews,
    Tick,
    TickReply,
)
from g2sim.actors.host_pool.pool import HostPool
from g2sim.actors.host_pool.transfers import FairLinks, Link, max_min
from g2sim.actors.kv.blocks import BlockChain
from g2sim.actors.kv.numbers import NO_NUMBERS
from g2sim.actors.phases import Phase
from g2sim.bus.drivers import InlineDriver
from g2sim.bus.events import Record
from g2sim.bus.kernel import Kernel, Port

CAPACITY = 6
"""Two chains, so that what was asked for last but one is evicted."""
UNLIMITED = Link(d2h_bytes_per_ms=math.inf, h2d_bytes_per_ms=math.inf, latency_ms=0.0)
CHAINS = [
    BlockChain(tuple(range(10 * first, 10 * first + 3)), tuple(range(10 * first, 10 * first + 3)))
    for first in range(1, 7)
]
NO_CHAIN = BlockChain((), ())
STARTS, IS_OVER = "a pass starts", "a pass is over"


class Client:
    """Looks chains up and stores them in turns of its own, or is blocked and asks for one over and over.

    A client that runs has passes of ``pass_ms``, and asks at the start of each; others retry. One that runs and asks
    for nothing is carefree. ``told``: what it was told, and when.
    """

    def __init__(self, number: int, *, stands_by: bool) -> None:
        self.number = number
        self.stands_by = stands_by
        self.blocked_on: BlockChain | None = None
        self.again: Any = None
        self.deferring = False
        self.carefree = False
        self.told: list[tuple[float, TickReply]] = []
        self.is_due = False
        self.port: Any = None
        self.pass_ms = self.until_ms = 0.0
        self.end: Any = None
        self.ends_ms: list[float] = []
        self.over = 0
        self.stood_by = 0

    def receive(self, message: Any, port: Port) -> None:
        self.port = port
        if self.deferring and self.carefree and type(message) is HostProgress:
            port.no_effect()
            return
        if self.deferring:
            port.recall_own()
        if type(message) is HostProgress:
            if self.pass_ms:
                port.no_effect()
                return
            self._note(port.now_ms, port.call("pool", Tick(self.number)))
            if not message.due:
                port.no_effect()
        elif message == "again":
            self._ask_again(port)
        elif message == STARTS:
            self._start(port)
        elif message == IS_OVER:
            self._end_pass(port)
            port.send_self(STARTS, phase=Phase.START)
        else:
            self._obey(*message, port)

    def _obey(self, what: str, chain: BlockChain, pass_ms: float, port: Port) -> None:
        if what == "look up":
            port.call("pool", self._look_up(chain))
        elif what == "store":
            port.call("pool", self._look_up(chain))
            store = PrepareStore(client=self.number, request=0, chain=chain, start=0, stop=3, busy_sources=NO_NUMBERS)
            port.call("pool", store)
            self._end_pass(port)
        elif what == "run" and not self.is_due and not self.pass_ms:
            self.pass_ms, self.until_ms = pass_ms, port.now_ms + 9.0
            self.blocked_on, self.again = chain, None
            port.send_self(STARTS, phase=Phase.START)
        elif what == "run without a care" and not self.is_due and not self.pass_ms:
            self.pass_ms, self.until_ms = pass_ms, port.now_ms + 9.0
            port.send_self(STARTS, phase=Phase.START)
        elif what == "block" and self.blocked_on is None:
            self.blocked_on, self.again = chain, None
            if not self.is_due and not self.pass_ms:
                port.send_self("again", phase=Phase.START)
                self.is_due = True
        elif what == "free":
            self.blocked_on = None

    def waiting(self) -> Sequence[str]:
        return ()

    def _end_pass(self, port: Port) -> None:
        reply = port.call("pool", PassBoundary(self.number))
        self._note(port.now_ms, reply.before)
        self._note(port.now_ms, reply.after)

    def _note(self, time_ms: float, told: TickReply) -> None:
        if told is not NOTHING:
            self.told.append((time_ms, told))

    def take(self) -> None:
        over = self.port.count_passed(self.ends_ms, Phase.PASS_END, self.port.order, self.over)
        if self.carefree and over != self.over:
            self.over = over
            for place, reply in self.port.call("pool", TakeNews(self.number)):
                self._note(self.ends_ms[place], reply.before)

    def stop(self) -> None:
        self.deferring = False
        self.port.call("pool", StandDown(self.number))
        if not self.pass_ms:
            self.port.park_again("again", Phase.START)
            return
        over = self.port.count_passed(self.ends_ms, Phase.PASS_END, self.port.order)
        started = self.port.count_passed(self.ends_ms, Phase.START, self.port.order)
        if over != started:
            self.port.cancel(self.end)
            self.port.send_self(STARTS, phase=Phase.START)
        elif self.end.time_ms != self.ends_ms[over]:
            self.port.cancel(self.end)
            self.end = self.port.send_self(IS_OVER, phase=Phase.PASS_END, at_ms=self.ends_ms[over])

    def _look_up(self, chain: BlockChain, again: Any = None) -> LookUp:
        return LookUp(client=self.number, chain=chain, base_blocks=0, latest_store=None, loading=(), again=again)

    def _ask_again(self, port: Port) -> None:
        port.no_effect()
        self.is_due = self.blocked_on is not None
        if self.blocked_on is None:
            return
        self.again = port.call("pool", self._look_up(self.blocked_on, self.again))
        self._end_pass(port)
        look_up = self._look_up(self.blocked_on, self.again)
        if self.stands_by and port.may_defer() and port.call("pool", NewsAt(self.number, look_up)) == math.inf:
            self._stand_by(look_up, [], port)
        else:
            port.retry("again", phase=Phase.START)

    def _start(self, port: Port) -> None:
        look_up = None
        if self.blocked_on is not None:
            self.again = port.call("pool", self._look_up(self.blocked_on, self.again))
            look_up = self._look_up(self.blocked_on, self.again)
        ends_ms = [port.now_ms + self.pass_ms]
        if ends_ms[0] > self.until_ms:
            self.pass_ms = 0.0
            return
        if self.stands_by and port.may_defer(*OF_TRANSFER_ENDS):
            news_at_ms = port.call("pool", NewsAt(self.number, look_up, look_up is None))
            while len(ends_ms) < 8 and ends_ms[-1] + self.pass_ms < min(news_at_ms, self.until_ms):
                ends_ms.append(ends_ms[-1] + self.pass_ms)
        if len(ends_ms) > 1:
            self._stand_by(look_up, ends_ms, port)
        self.end = port.send_self(IS_OVER, phase=Phase.PASS_END, at_ms=ends_ms[-1])

    def _stand_by(self, look_up: LookUp | None, ends_ms: list[float], port: Port) -> None:
        self.carefree = bool(ends_ms) and look_up is None
        port.call("pool", StandBy(self.number, port.order, look_up, ends_ms[:-1], self.carefree))
        port.defer(self)
        self.deferring = True
        self.ends_ms = ends_ms
        self.over = 0
        self.stood_by += 1


@attrs.frozen
class Passed:
    """Published by who has nothing to do with the pool."""


class Clock:
    """Publishes something every now and then."""

    def receive(self, message: Any, port: Port) -> None:
        port.no_effect()
        port.publish(Passed())

    def waiting(self) -> Sequence[str]:
        return ()


@attrs.frozen
class Play:
    """(time, phase, client, what, chain, length of its passes [ms]), in the order of sending.

    ``bytes_per_ms``: of each client's link; the pool has two thirds of it.
    """

    happens: list[tuple[float, Phase, int, str, int, float]]
    bytes_per_ms: float = math.inf

    def run(self, *, stands_by: bool) -> tuple[list[Any], tuple[int, ...], list[Any], int]:
        """Returns evictions and ends of transfers with their times, blocks by age, what clients were told, and how
        often they stood by."""
        kernel = Kernel()
        rate = self.bytes_per_ms
        link = Link(d2h_bytes_per_ms=rate, h2d_bytes_per_ms=rate, latency_ms=0.0 if rate == math.inf else 0.3)
        pool = HostPool("pool", CAPACITY, 1, FairLinks(rate / 1.5, rate / 1.5, max_min), shared=True)
        kernel.register("pool", HostPoolActor(pool))
        clients = [Client(number, stands_by=stands_by) for number in range(4)]
        for client in clients:
            name = f"client {client.number}"
            kernel.register(name, client)
            pool.join(Join(client=client.number, worker=client.number, role="r", dp_rank=0, link=link, actor=name))
        seen: list[Any] = []

        def see(record: Record) -> None:
            assert not seen or record.time_ms >= seen[-1][0], "late, and after what is later"
            seen.append((record.time_ms, record.event))

        kernel.add_sink(
            see,
            [HostBlocksEvicted, StoreLanded],
            may_be_late=True,
        )
        kernel.add_sink(see, [Passed])
        kernel.register("clock", Clock())
        for quarters in range(8, 60):
            kernel.post(kernel.slot("clock"), None, Phase.SCRIPT, quarters / 4)
        for first in range(4):
            kernel.post(kernel.slot("client 0"), ("store", CHAINS[first], 0.0), Phase.START, 0.25 + first / 8)
        for time_ms, phase, number, what, chain, pass_ms in self.happens:
            kernel.post(kernel.slot(f"client {number}"), (what, CHAINS[chain], pass_ms), phase, float(time_ms))
        # Ages matter when somebody asks: by then all who stand by have asked.
        kernel.post(kernel.slot("client 3"), ("look up", NO_CHAIN, 0.0), Phase.START, 100.0)
        InlineDriver(kernel).run()
        told = [client.told for client in clients]
        return seen, pool.eviction_order(), told, sum(client.stood_by for client in clients)


TIMES = st.integers(2, 4) | st.integers(20, 90).map(lambda tenths: tenths / 10 + 0.05)
turns = st.tuples(
    TIMES,
    st.just(Phase.START),
    st.integers(0, 3),
    st.sampled_from(["look up", "look up", "store"]),
    st.sampled_from([2, 3, 4, 2, 3, 5]),
    st.just(0.0),
)
commands = st.tuples(
    st.integers(1, 4),
    st.sampled_from([Phase.SUBMIT, Phase.START, Phase.HANDOFF]),
    st.integers(0, 3),
    st.sampled_from(["block", "block", "run", "run", "run without a care", "free"]),
    st.sampled_from([2, 3, 4, 2, 3, 5]),
    st.sampled_from([0.5, 1.0, 1 / 3, 0.7]),
)
runs = st.tuples(
    st.integers(1, 2),
    st.just(Phase.SUBMIT),
    st.sampled_from(["run", "run without a care", "run without a care"]),
    st.sampled_from([2, 3, 4]),
    st.sampled_from([0.5, 1.0, 1 / 3, 0.7, 4.0]),
)
all_run = st.tuples(runs, runs, runs, runs).map(
    lambda found: [(time_ms, phase, number, *rest) for number, (time_ms, phase, *rest) in enumerate(found)]
)
"""Transfers end only at pass ends then."""
rates = st.sampled_from([math.inf, math.inf, 7.0, 1.3, 0.4])


@settings(deadline=None, max_examples=800)
@given(st.lists(turns, min_size=2, max_size=8), st.lists(commands, min_size=1, max_size=5) | all_run, rates)
def test_all_is_as_if_they_had_asked(turns: list[Any], commands: list[Any], rate: float) -> None:
    """What is evicted, how old blocks are, when transfers end, and what clients are told when, to the last bit."""
    play = Play([*commands, *turns], rate)
    asked, stood_by = play.run(stands_by=False), play.run(stands_by=True)
    assert stood_by[:3] == asked[:3]


@pytest.mark.parametrize(("what", "times", "rate"), [("block", 1, math.inf), ("run", 5, math.inf), ("run", 5, 0.4)])
def test_who_stands_by_has_no_turns(what: str, times: int, rate: float) -> None:
    """Else the property above says nothing."""
    play = Play(
        [(1, Phase.SUBMIT, 2, what, 1, 0.1), *((t, Phase.START, 0, "look up", 0, 0.0) for t in range(2, 6))], rate
    )
    assert play.run(stands_by=True)[3] >= times


@pytest.mark.parametrize("pass_ms", [1 / 3, 0.7, 0.1])
@pytest.mark.parametrize("others", ["idle", "run"])
def test_transfers_end_as_if_the_carefree_had_looked(pass_ms: float, others: str) -> None:
    """Their looks move the ends of transfers by a rounding, and end them if all have passes in flight."""
    stores = [(3 + idx, Phase.START, 0, "store", idx % 5 + 1, 0.0) for idx in range(5)]
    runs = [(1, Phase.SUBMIT, number, "run without a care", 0, pass_ms * number) for number in (1, 2)]
    if others == "run":
        runs += [(1, Phase.SUBMIT, number, "run without a care", 0, 0.31 + number) for number in (0, 3)]
    news = 0
    for tenths in range(9, 60):
        play = Play([*runs, *stores], tenths / 10)
        asked, stood_by = play.run(stands_by=False), play.run(stands_by=True)
        assert stood_by[:3] == asked[:3], tenths
        news += len(stood_by[2][1])
    assert news


@pytest.mark.parametrize("tenths", range(9, 40))
def test_a_pass_that_ends_just_before_a_transfer_moves_its_end(tenths: int) -> None:
    """So little before that its client can no longer be waited for."""
    store = (2, Phase.START, 0, "store", 4, 0.0)
    landed = [
        event.ended_ms for _, event in Play([store], tenths / 10).run(stands_by=False)[0] if type(event) is StoreLanded
    ]
    for share in range(1, 8):
        pass_ms = (landed[-1] - 1.0 - share / 8000) / 9
        play = Play([(1, Phase.SUBMIT, 1, "run without a care", 0, pass_ms), store], tenths / 10)
        asked, stood_by = play.run(stands_by=False), play.run(stands_by=True)
        assert stood_by[:3] == asked[:3], share
