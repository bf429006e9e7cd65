"""The shared host pool on the bus."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from g2sim.actors.host_pool.messages import HostProgress
from g2sim.actors.host_pool.pool import HostPool
from g2sim.actors.phases import Phase
from g2sim.bus.kernel import Envelope, Port


@attrs.frozen(slots=True)
class _TransferEvent:
    """Timer of the pool's own: some transfer ends or begins to move."""


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

    quiet = frozenset({_TransferEvent})

    def receive(self, message: Any, port: Port) -> Any:
        asking: int | None = None
        reply: Any = None
        by_timer = type(message) is _TransferEvent
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
