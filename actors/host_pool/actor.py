"""The shared host pool on the bus."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import attrs

from g2sim.actors.host_pool.messages import (
    Clear,
    HostProgress,
    Join,
    LookUp,
    NewsAt,
    PrepareStore,
    QueueLoad,
    Retire,
    StandBy,
    StandDown,
)
from g2sim.actors.host_pool.pool import HostPool
from g2sim.actors.phases import Phase
from g2sim.bus.errors import InvariantViolation
from g2sim.bus.kernel import Envelope, Port


@attrs.frozen(slots=True)
class _TransferEvent:
    """Timer of the pool's own: some transfer ends or begins to move."""


_AGE_MATTERS = frozenset({LookUp, PrepareStore, QueueLoad, Clear, Join, Retire, StandDown})
"""Messages that make blocks recent or may evict old ones. The end of a transfer does, too: nobody stands by so long."""


class _Stander:
    """A client that stands by: how many of its ``pass_ends_ms`` have moved bytes, and started passes that look up."""

    __slots__ = ("keys", "looked_up", "moved", "order", "pass_ends_ms")

    def __init__(self, message: StandBy) -> None:
        self.order = message.order
        self.pass_ends_ms = message.pass_ends_ms
        self.keys = None if message.look_up is None else message.look_up.chain.sequence_hashes
        self.moved = 0
        self.looked_up = 0


class HostPoolActor:
    """Answers ranks, moves transfers on time, and tells ranks that something has ended.

    Args:
        pool: the pool's state.
    """

    def __init__(self, pool: HostPool) -> None:
        self.pool = pool
        self._told: set[str] = set()
        self._timer: Envelope | None = None
        self._timer_ms: float | None = None
        self._standers: dict[int, _Stander] = {}
        self._stood_in_round = (-1.0, -1)
        self._stood_in_turn = -1

    quiet = frozenset({_TransferEvent})

    def receive(self, message: Any, port: Port) -> Any:
        kind = type(message)
        if kind is NewsAt:
            return self._news_at_ms(message)
        if kind is StandBy:
            self._standers[message.client] = _Stander(message)
            return None
        if self._standers:
            self._move_for_standers(port)
            if kind in _AGE_MATTERS:
                self._look_up_for_standers(port)
        asking: int | None = None
        reply: Any = None
        by_timer = kind is _TransferEvent
        if by_timer:
            # Idle ranks look now, and that moves the pool. When all are busy nobody looks before a pass ends, so the
            # pool does not move either, and this timer stays spent.
            self._timer = None
            port.no_effect()
        elif kind is StandDown:
            del self._standers[message.client]
            asking = message.client
        else:
            state_idx = self.pool.state_idx
            reply = self.pool.serve(message, port.now_ms)
            asking = message.client
            asker = self.pool.actor_of(asking)
            if asker is not None:
                self._told.discard(asker)
            if self.pool.state_idx != state_idx:
                port.recall()
        outbox = self.pool.outbox
        if outbox:
            for event in outbox:
                port.publish(event)
            outbox.clear()
        for client in self.pool.clients() if by_timer else self.pool.untold():
            if client != asking:
                self._tell(client, by_timer, port)
        self._set_timer(port)
        return reply

    def waiting(self) -> Sequence[str]:
        return self.pool.transfers_under_way()

    def _news_at_ms(self, message: NewsAt) -> float:
        """See ``NewsAt``. A client's turns are news to others, too, as long as they have to be told something."""
        told = self._told
        if self.pool.actor_of(message.client) in told:
            return -math.inf
        if any(self.pool.actor_of(client) not in told for client in self.pool.untold()):
            return -math.inf
        return self.pool.news_at_ms(message)

    def _move_for_standers(self, port: Port) -> None:
        """Let bytes move at each pass end of those who stand by that is over: see ``transfers`` on why at each."""
        instants_ms: set[float] = set()
        for stander in self._standers.values():
            stop = port.count_passed(stander.pass_ends_ms, Phase.PASS_END, stander.order, stander.moved)
            if stop != stander.moved:
                instants_ms.update(stander.pass_ends_ms[stander.moved : stop])
                stander.moved = stop
        if not instants_ms or self.pool.next_event_ms() is None:
            return
        state_idx = self.pool.state_idx
        for time_ms in sorted(instants_ms):
            self.pool.advance(time_ms)
        if self.pool.state_idx != state_idx:
            raise InvariantViolation(f"{self.pool.name}: a transfer ended while all who look stood by")

    def _look_up_for_standers(self, port: Port) -> None:
        """Make recent what those who stand by would have asked for since the last turn that did so.

        Who puts passes off has asked at the start of each. Who retries has asked in every round, in its place, and
        again after every pass that has started. So retries that come before the turn at work have asked last; those
        that are still to come in this round asked in the round before, and before all that was asked in this one.
        """
        if port.turn_idx == self._stood_in_turn:
            return
        now_ms, round_idx = port.now_ms, port.round
        this_round = (now_ms, round_idx)
        is_new_round = this_round != self._stood_in_round
        self._stood_in_round, self._stood_in_turn = this_round, port.turn_idx
        asked: list[tuple[int, float, int, Sequence[int]]] = []
        for stander in self._standers.values():
            order, keys, ends_ms = stander.order, stander.keys, stander.pass_ends_ms
            if keys is None:
                continue
            if ends_ms:
                stop = port.count_passed(ends_ms, Phase.START, order, stander.looked_up)
                if stop != stander.looked_up:
                    stander.looked_up = stop
                    start_ms = ends_ms[stop - 1]
                    asked.append((2 if start_ms == now_ms and round_idx == 0 else 0, start_ms, order, keys))
            elif port.is_before(Phase.START, order):
                asked.append((3, now_ms, order, keys))
            elif is_new_round:
                asked.append((1, now_ms, order, keys))
        for *_, wanted in sorted(asked, key=itemgetter(0, 1, 2)):
            self.pool.make_recent(wanted)

    def _tell(self, client: int, by_timer: bool, port: Port) -> None:
        actor = self.pool.actor_of(client)
        if actor is None or actor in self._told:
            return
        self._told.add(actor)
        due = by_timer or self.pool.has_progress(client)
        # What a pass end lets end is heard of before requests arrive at that instant, not in the next round.
        after = Phase.TICK < port.phase <= Phase.TICK_AFTER
        port.send(actor, HostProgress(due), phase=Phase.TICK_AFTER if after else Phase.TICK)

    def _set_timer(self, port: Port) -> None:
        next_ms = self.pool.next_event_ms()
        if next_ms == self._timer_ms:
            return
        if self._timer is not None:
            port.cancel(self._timer)
        self._timer_ms = next_ms
        self._timer = None
        if next_ms is not None:
            self._timer = port.send_self(_TransferEvent(), phase=Phase.HOST_POOL, at_ms=max(next_ms, port.now_ms))
