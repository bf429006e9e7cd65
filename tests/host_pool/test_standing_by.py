"""Clients that stand by: the pool's ages, and so what it evicts, are as if they had asked again and again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attrs
from hypothesis import given, settings
from hypothesis import strategies as st

from g2sim.actors.host_pool.actor import HostPoolActor
from g2sim.actors.host_pool.events import HostBlocksEvicted
from g2sim.actors.host_pool.messages import (
    HostProgress,
    Join,
    LookUp,
    PassBoundary,
    PrepareStore,
    StandBy,
    StandDown,
    Tick,
)
from g2sim.actors.host_pool.pool import HostPool
from g2sim.actors.host_pool.transfers import FairLinks, Link, max_min
from g2sim.actors.kv.blocks import BlockChain
from g2sim.actors.phases import Phase
from g2sim.bus.drivers import InlineDriver
from g2sim.bus.kernel import Kernel, Port

CAPACITY = 6
"""Two chains, so that what was asked for last but one is evicted."""
LINK = Link(d2h_bytes_per_ms=math.inf, h2d_bytes_per_ms=math.inf, latency_ms=0.0)
CHAINS = [
    BlockChain(tuple(range(10 * first, 10 * first + 3)), tuple(range(10 * first, 10 * first + 3)))
    for first in range(1, 7)
]


class Client:
    """Looks chains up and stores them in turns of its own, or is blocked and asks for one over and over."""

    def __init__(self, number: int, *, stands_by: bool) -> None:
        self.number = number
        self.stands_by = stands_by
        self.blocked_on: BlockChain | None = None
        self.again: Any = None
        self.deferring = False
        self.is_due = False
        self.port: Any = None

    def receive(self, message: Any, port: Port) -> None:
        self.port = port
        if self.deferring:
            port.recall_own()
        if type(message) is HostProgress:
            port.call("pool", Tick(self.number))
            if not message.due:
                port.no_effect()
        elif message == "again":
            self._ask_again(port)
        else:
            what, chain = message
            if what == "look up":
                port.call("pool", self._look_up(chain))
            elif what == "store":
                port.call("pool", self._look_up(chain))
                store = PrepareStore(
                    client=self.number, request=0, chain=chain, start=0, stop=3, busy_sources=frozenset()
                )
                port.call("pool", store)
                port.call("pool", PassBoundary(self.number))
            elif what == "block" and self.blocked_on is None:
                self.blocked_on, self.again = chain, None
                if not self.is_due:
                    port.send_self("again", phase=Phase.START)
                    self.is_due = True
            elif what == "free":
                self.blocked_on = None

    def waiting(self) -> Sequence[str]:
        return ()

    def take(self) -> None:
        pass

    def stop(self) -> None:
        self.deferring = False
        self.port.call("pool", StandDown(self.number))
        self.port.park_again("again", Phase.START)

    def _look_up(self, chain: BlockChain, again: Any = None) -> LookUp:
        return LookUp(
            client=self.number, chain=chain, base_blocks=0, latest_store=None, loading=frozenset(), again=again
        )

    def _ask_again(self, port: Port) -> None:
        port.no_effect()
        self.is_due = self.blocked_on is not None
        if self.blocked_on is None:
            return
        self.again = port.call("pool", self._look_up(self.blocked_on, self.again))
        port.call("pool", PassBoundary(self.number))
        stands_by = StandBy(self.number, port.order, self._look_up(self.blocked_on, self.again))
        if self.stands_by and port.may_defer() and port.call("pool", stands_by):
            port.defer(self)
            self.deferring = True
        else:
            port.retry("again", phase=Phase.START)


@attrs.frozen
class Play:
    """(time, phase, client, what, chain), in the order of sending."""

    happens: list[tuple[int, Phase, int, str, int]]

    def run(self, *, stands_by: bool) -> tuple[list[tuple[float, tuple[int, ...]]], list[int], int]:
        kernel = Kernel()
        pool = HostPool("pool", CAPACITY, 1, FairLinks(math.inf, math.inf, max_min), shared=True)
        kernel.register("pool", HostPoolActor(pool))
        for number in range(4):
            kernel.register(f"client {number}", Client(number, stands_by=stands_by))
            pool.join(
                Join(client=number, worker=number, role="aggregated", dp_rank=0, link=LINK, actor=f"client {number}")
            )
        evicted: list[tuple[float, tuple[int, ...]]] = []
        kernel.add_sink(lambda record: evicted.append((record.time_ms, record.event.block_hashes)), [HostBlocksEvicted])
        for first, chain in enumerate(CHAINS[:4]):
            kernel.post(kernel.slot("client 0"), ("store", chain), Phase.START, 0.25 + first / 8)
        for time_ms, phase, client, what, chain in self.happens:
            kernel.post(kernel.slot(f"client {client}"), (what, CHAINS[chain]), phase, float(time_ms))
        # Ages matter when somebody asks: by then all who stand by have asked.
        kernel.post(kernel.slot("client 3"), ("look up", BlockChain((), ())), Phase.START, 100.0)
        InlineDriver(kernel).run()
        return evicted, pool._evictable.in_order(), kernel.turn_idx


turns = st.tuples(
    st.integers(2, 4),
    st.just(Phase.START),
    st.integers(0, 3),
    st.sampled_from(["look up", "look up", "store"]),
    st.integers(2, 5),
)
commands = st.tuples(
    st.integers(1, 4),
    st.sampled_from([Phase.SUBMIT, Phase.START, Phase.HANDOFF]),
    st.integers(0, 3),
    st.sampled_from(["block", "block", "free"]),
    st.integers(2, 5),
)


@settings(deadline=None, max_examples=500)
@given(st.lists(turns, max_size=8), st.lists(commands, min_size=1, max_size=5))
def test_ages_are_as_if_they_had_asked(turns: list[Any], commands: list[Any]) -> None:
    play = Play([*commands, *turns])
    asked, stood_by = play.run(stands_by=False), play.run(stands_by=True)
    assert stood_by[:2] == asked[:2]


def test_who_stands_by_has_no_turns() -> None:
    """Else the property above says nothing. 9: four stores, a block, and four look-ups; and a first retry."""
    looks = [(time_ms, Phase.START, 0, "look up", 0) for time_ms in range(2, 6)]
    play = Play([(1, Phase.SUBMIT, 2, "block", 1), *looks])
    assert play.run(stands_by=False)[2] > play.run(stands_by=True)[2]
