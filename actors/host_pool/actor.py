"""The shared host pool on the bus."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import attrs

from g2sim.actors.host_pool.messages import (
    Clear,
    HostProgress,
    Join,
    LookUp,
    PrepareStore,
    QueueLoad,
    Retire,
    StandBy,
    StandDown,
)
from g2sim.actors.host_pool.pool import HostPool
from g2sim.actors.phases import Phase
from g2sim.bus.kernel import Envelope, Port


@attrs.frozen(slots=True)
class _TransferEvent:
    """Timer of the pool's own: some transfer ends or begins to move."""


_AGE_MATTERS = frozenset({LookUp, PrepareStore, QueueLoad, Clear, Join, Retire, StandDown})
"""Messages that make blocks recent, or may evict old ones."""


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
        self._standing: dict[int, tuple[int, Sequence[int]]] = {}
        self._stood_in_round = (-1.0, -1)
        self._stood_in_turn = -1

    quiet = frozenset({_TransferEvent})

    def receive(self, message: Any, port: Port) -> Any:
        asking: int | None = None
        reply: Any = None
        kind = type(message)
        if kind is StandBy:
            return self._may_stand_by(message)
        if self._standing and kind in _AGE_MATTERS:
            self._stand_in(port)
        if kind is StandDown:
            self._standing.pop(message.client, None)
            return None
        by_timer = kind is _TransferEvent
        if by_timer:
            # Idle ranks look now, and that moves the pool. When all are busy nobody looks before a pass ends, so the
            # pool does not move either, and this timer stays spent.
            self._timer = None
            port.no_effect()
        else:
            reply = self.pool.serve(message, port.now_ms)
            asking = message.client
            asker = self.pool.actor_of(asking)
            if asker is not None:
                self._told.discard(asker)
            if port.others_defer and kind is not LookUp and not self.pool.at_rest:
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

    def _may_stand_by(self, message: StandBy) -> bool:
        client, look_up = message.client, message.look_up
        if self.pool.actor_of(client) in self._told or not self.pool.would_answer_again(look_up):
            return False
        if look_up is not None:
            self._standing[client] = (message.order, look_up.chain.sequence_hashes)
        return True

    def _stand_in(self, port: Port) -> None:
        """Make recent what those who stand by would have asked for since the last turn that did so.

        Each of them would have had a retry in every round, in its place, and again after every pass that has started.
        So who comes before the turn at work has asked last, and before them those whose retry is still to come in this
        round: they asked in the round before, and before all that was asked in this one.
        """
        if port.turn_idx == self._stood_in_turn:
            return
        this_round = (port.now_ms, port.round)
        passed: list[Sequence[int]] = []
        ahead: list[Sequence[int]] = []
        for order, keys in sorted(self._standing.values(), key=itemgetter(0)):
            (passed if port.is_before(Phase.START, order) else ahead).append(keys)
        if this_round != self._stood_in_round:
            for keys in ahead:
                self.pool.make_recent(keys)
        for keys in passed:
            self.pool.make_recent(keys)
        self._stood_in_round, self._stood_in_turn = this_round, port.turn_idx

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
