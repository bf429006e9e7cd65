"""The shared host pool on the bus."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import attrs

from g2sim.actors.host_pool.messages import (
    NOTHING,
    BoundaryReply,
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
    TakeNews,
)
from g2sim.actors.host_pool.pool import ROUNDING_MS, HostPool
from g2sim.actors.kv.blocks import BlockChain
from g2sim.actors.phases import Phase
from g2sim.bus.errors import InvariantViolation
from g2sim.bus.kernel import Envelope, Port


@attrs.frozen(slots=True)
class _TransferEvent:
    """Timer of the pool's own: some transfer ends or begins to move."""


@attrs.frozen(slots=True)
class _CatchUp:
    """Timer of the pool's own: what carefree clients that stand by have done may have moved the other timer."""


_IN_A_PASS = frozenset({PrepareStore, StandDown})
"""Messages of clients that have a pass in flight right after, so that they hear of news at its end."""
_AGE_MATTERS = frozenset({LookUp, PrepareStore, QueueLoad, Clear, Join, Retire, StandDown})
"""Messages that make blocks recent or may evict old ones. The end of a transfer does, too: nobody stands by so long."""


class _Stander:
    """A client that stands by: how many of its ``pass_ends_ms`` have moved bytes, and started passes that look up.

    ``news``: see ``TakeNews``.
    """

    __slots__ = ("actor", "carefree", "chain", "client", "looked_up", "moved", "news", "order", "pass_ends_ms")

    def __init__(self, message: StandBy, actor: str) -> None:
        self.client = message.client
        self.actor = actor
        self.carefree = message.carefree
        self.news: list[tuple[int, BoundaryReply]] = []
        self.order = message.order
        self.pass_ends_ms = message.pass_ends_ms
        self.chain = None if message.look_up is None else message.look_up.chain
        self.moved = 0
        self.looked_up = 0


def publish_outbox(pool: HostPool, port: Port) -> None:
    """Publish what a pool has left to be published."""
    for event in pool.outbox:
        port.publish(event)
    pool.outbox.clear()


def end_pass_late(pool: HostPool, client: int, time_ms: float, order: int, port: Port) -> BoundaryReply | None:
    """The end of a client's pass that was put off, at that time: its reply, None if it tells nothing.

    Args:
        order: of the actor whose turn it would have been.
    """
    reply = pool.boundary(client, time_ms)
    for event in pool.outbox:
        port.publish_late(time_ms, Phase.PASS_END, event, order)
    pool.outbox.clear()
    return None if reply.before is NOTHING else reply


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
        self._next_pass_end_ms = math.inf  # of those who stand by, the first that has not moved bytes
        self._carefree: set[str] = set()  # actors of those who stand by so
        self._catch_up: Envelope | None = None
        self._stood_in_round = (-1.0, -1)
        self._stood_in_turn = -1

    quiet = frozenset({_TransferEvent, _CatchUp})

    def receive(self, message: Any, port: Port) -> Any:
        kind = type(message)
        if self._next_pass_end_ms <= port.now_ms and self._move_for_standers(port):
            self._set_timers(port)
        if kind is NewsAt:
            return self._news_at_ms(message, port)
        if kind is TakeNews:
            stander = self._standers[message.client]
            news, stander.news = stander.news, []
            return news
        if kind is StandBy:
            self._stand_by(message, port)
            return None
        if self._standers and kind in _AGE_MATTERS:
            self._look_up_for_standers(port)
        asking: int | None = None
        reply: Any = None
        by_timer = kind is _TransferEvent
        if by_timer:
            # Idle ranks look now, and that moves the pool. When all are busy nobody looks before a pass ends, so the
            # pool does not move either, and this timer stays spent.
            self._timer = None
            port.no_effect()
        elif kind is _CatchUp:
            self._catch_up = None
            port.no_effect()
            self._set_timers(port)
            return None
        elif kind is StandDown:
            asking = message.client
            self._stand_down(asking)
        else:
            state_idx = self.pool.state_idx
            reply = self.pool.serve(message, port.now_ms)
            asking = message.client
            asker = self.pool.actor_of(asking)
            if asker is not None:
                self._told.discard(asker)
            if self.pool.state_idx != state_idx:
                port.recall(but=self._carefree)
        publish_outbox(self.pool, port)
        for client in self.pool.clients() if by_timer else self.pool.untold():
            if client != asking:
                self._tell(client, by_timer, port)
            elif self._carefree and kind not in _IN_A_PASS and self.pool.actor_of(client) not in self._told:
                port.recall()  # it may be idle, and is to be told at the next turn, be it one that is put off
        self._set_timers(port)
        return reply

    def waiting(self) -> Sequence[str]:
        return self.pool.transfers_under_way()

    # -- those who stand by

    def _news_at_ms(self, message: NewsAt, port: Port) -> float:
        """See ``NewsAt``. A client's turns are news to others, too, as long as they have to be told something."""
        told, pool = self._told, self.pool
        if not message.carefree and pool.actor_of(message.client) in told:
            return -math.inf
        for client in pool.untold():
            if pool.actor_of(client) not in told and not (message.carefree and client == message.client):
                return -math.inf
        if message.carefree:
            next_ms = pool.next_event_ms()
            if next_ms is not None and next_ms - ROUNDING_MS <= port.now_ms:
                return -math.inf
        return pool.news_at_ms(message)

    def _stand_by(self, message: StandBy, port: Port) -> None:
        actor = self.pool.actor_of(message.client)
        if actor is None:
            raise InvariantViolation(f"{self.pool.name}: client {message.client} stands by, but has not joined")
        self._standers[message.client] = _Stander(message, actor)
        if message.pass_ends_ms:
            self._next_pass_end_ms = min(self._next_pass_end_ms, message.pass_ends_ms[0])
        if message.carefree:
            self._carefree.add(actor)
            self._set_catch_up(port)

    def _stand_down(self, client: int) -> None:
        stander = self._standers.pop(client)
        self._carefree.discard(stander.actor)
        if stander.news:
            raise InvariantViolation(f"{self.pool.name}: client {client} leaves without its news")

    def _move_for_standers(self, port: Port) -> bool:
        """Let those who stand by have the pass ends that are over, and bytes move: see ``transfers`` on why at each.

        Returns: whether there was anything to do.
        """
        over: list[tuple[float, int, int, _Stander]] = []
        next_ms = math.inf
        for stander in self._standers.values():
            moved = stander.moved
            stop = port.count_passed(stander.pass_ends_ms, Phase.PASS_END, stander.order, moved)
            if stop != moved:
                stander.moved = stop
                order = stander.order
                over += [(stander.pass_ends_ms[place], order, place, stander) for place in range(moved, stop)]
                if stander.carefree:
                    self._told.discard(stander.actor)
            if stop < len(stander.pass_ends_ms) and stander.pass_ends_ms[stop] < next_ms:
                next_ms = stander.pass_ends_ms[stop]
        self._next_pass_end_ms = next_ms
        if not over or self.pool.at_rest:
            return False
        for time_ms, _, place, stander in sorted(over, key=itemgetter(0, 1)):
            if stander.carefree:
                self._end_pass_of(stander, place, port)
                continue
            state_idx = self.pool.state_idx
            self.pool.advance(time_ms)
            if self.pool.state_idx != state_idx:
                raise InvariantViolation(f"{self.pool.name}: a transfer ended while all who look stood by")
        return True

    def _end_pass_of(self, stander: _Stander, place: int, port: Port) -> None:
        """What the end of a pass would have come to for who stands by without a care.

        Others that are to be told something have passes in flight, so they do nothing when they are, and look later.
        """
        pool = self.pool
        reply = end_pass_late(pool, stander.client, stander.pass_ends_ms[place], stander.order, port)
        if reply is not None:
            stander.news.append((place, reply))
        self._told.discard(stander.actor)
        for client in pool.untold():
            actor = pool.actor_of(client)
            if client != stander.client and actor is not None:
                self._told.add(actor)

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
        asked: list[tuple[int, float, int, BlockChain]] = []
        for stander in self._standers.values():
            order, chain, ends_ms = stander.order, stander.chain, stander.pass_ends_ms
            if chain is None:
                continue
            if ends_ms:
                stop = port.count_passed(ends_ms, Phase.START, order, stander.looked_up)
                if stop != stander.looked_up:
                    stander.looked_up = stop
                    start_ms = ends_ms[stop - 1]
                    asked.append((2 if start_ms == now_ms and round_idx == 0 else 0, start_ms, order, chain))
            elif port.is_before(Phase.START, order):
                asked.append((3, now_ms, order, chain))
            elif is_new_round:
                asked.append((1, now_ms, order, chain))
        for *_, wanted in sorted(asked, key=itemgetter(0, 1, 2)):
            self.pool.make_recent(wanted)

    def _tell(self, client: int, by_timer: bool, port: Port) -> None:
        actor = self.pool.actor_of(client)
        if actor is None or actor in self._told:
            return
        self._told.add(actor)
        if actor in self._carefree:
            return  # it has a pass in flight, and looks when that ends
        due = by_timer or self.pool.has_progress(client)
        # What a pass end lets end is heard of before requests arrive at that instant, not in the next round.
        after = Phase.TICK < port.phase <= Phase.TICK_AFTER
        port.send(actor, HostProgress(due), phase=Phase.TICK_AFTER if after else Phase.TICK)

    def _set_timers(self, port: Port) -> None:
        next_ms = self.pool.next_event_ms()
        if next_ms != self._timer_ms:
            if self._timer is not None:
                port.cancel(self._timer)
            self._timer_ms = next_ms
            self._timer = None
            if next_ms is not None:
                self._timer = port.send_self(_TransferEvent(), phase=Phase.HOST_POOL, at_ms=max(next_ms, port.now_ms))
        if self._carefree or self._catch_up is not None:
            self._set_catch_up(port)

    def _set_catch_up(self, port: Port) -> None:
        """See to it that the timer is right while pass ends of carefree clients move bytes, and end transfers.

        Just before a transfer ends: their last pass ends before that have moved its end a little. If some more come
        in between, their clients go on by messages. And when it has ended: then the first pass end tells it.
        """
        next_ms, now_ms = self.pool.next_event_ms(), port.now_ms
        at_ms: float | None = None
        if next_ms is not None and self._carefree:
            coming_ms = {
                stander.actor: stander.pass_ends_ms[stander.moved]
                for stander in self._standers.values()
                if stander.carefree and stander.moved < len(stander.pass_ends_ms)
            }
            if next_ms - ROUNDING_MS > now_ms:
                at_ms = next_ms - ROUNDING_MS
            elif next_ms > now_ms:
                between = {actor for actor, end_ms in coming_ms.items() if end_ms < next_ms}
                if between:
                    port.recall(but=self._carefree - between)
            else:
                at_ms = min(coming_ms.values(), default=None)
        planned = self._catch_up
        if planned is not None:
            if planned.live and planned.time_ms == at_ms:
                return
            port.cancel(planned)
            self._catch_up = None
        if at_ms is not None:
            self._catch_up = port.send_self(_CatchUp(), phase=Phase.TICK_AFTER, at_ms=at_ms)
