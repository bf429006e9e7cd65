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
        tick_after_pass_ends: ranks that a pass end made due are told before requests arrive at that instant
            (aggregated deployments), not in the next round.
    """

    def __init__(self, pool: HostPool, *, tick_after_pass_ends: bool) -> None:
        self.pool = pool
        self._tick_after_pass_ends = tick_after_pass_ends
        self._told: set[str] = set()
        self._timer: Envelope | None = None
        self._timer_ms: float | None = None

    def receive(self, message: Any, port: Port) -> Any:
        asker: str | None = None
        reply: Any = None
        if type(message) is _TransferEvent:
            # Moving bytes shows nobody anything; what it ends is shown by the ranks that hear of it.
            self._timer = self._timer_ms = None
            self.pool.advance(port.now_ms)
            port.no_effect()
        else:
            reply = self.pool.serve(message, port.now_ms)
            asker = self.pool.actor_of(message.client) if self.pool.is_client(message.client) else None
            if asker is not None:
                self._told.discard(asker)
        outbox = self.pool.outbox
        if outbox:
            for event in outbox:
                port.publish(event)
            outbox.clear()
        self._tell_the_others(asker, port)
        self._set_timer(port)
        return reply

    def waiting(self) -> Sequence[str]:
        return self.pool.transfers_under_way()

    def _tell_the_others(self, asker: str | None, port: Port) -> None:
        for client in self.pool.untold():
            actor = self.pool.actor_of(client)
            if actor == asker or actor in self._told:
                continue
            self._told.add(actor)
            after = self._tick_after_pass_ends and Phase.TICK < port.phase <= Phase.TICK_AFTER
            port.send(actor, HostProgress(), phase=Phase.TICK_AFTER if after else Phase.TICK)

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
