"""A rank with what its worker knows of it."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

from g2sim.actors.host_pool.pool import HostPool
from g2sim.actors.worker.rank import PassResult, Rank
from g2sim.bus.errors import InvariantViolation


def _no_host(message: Any) -> Any:
    raise InvariantViolation(f"a rank that is not on the bus asks its host tier ({type(message).__name__})")


class RankPlace:
    """One rank with what the worker knows of it.

    Attributes:
        own_pool: its private host tier; None when it has none or uses the shared pool.
        ask: asks its host tier; there from the first turn on.
        who: the fields that name it in its events.
        named: their values, which come first in each of its events.
        emitted, times_ms: passes of one run of decode passes that have ended and are not told yet: the requests that
            got a token in each, and the ends of the passes. Always empty where nobody hears of runs.
    """

    __slots__ = (
        "ask",
        "dp_rank",
        "emitted",
        "named",
        "next_event_id",
        "own_pool",
        "pass_idx",
        "rank",
        "times_ms",
        "who",
    )

    def __init__(self, worker: int, role: str, dp_rank: int, rank: Rank, own_pool: HostPool | None) -> None:
        self.who: dict[str, Any] = {"worker": worker, "role": role, "dp_rank": dp_rank}
        self.named = (worker, role, dp_rank)
        self.dp_rank = dp_rank
        self.rank = rank
        self.own_pool = own_pool
        self.ask: Callable[[Any], Any] = _no_host
        self.next_event_id = 0
        self.pass_idx = 0
        self.emitted: tuple[int, ...] = ()
        self.times_ms = array("d")

    def pass_started(
        self, result: PassResult, compute_start_ms: float, end_ms: float, ahead: int = 0
    ) -> tuple[Any, ...]:
        """Values of ``PassStarted`` for the next pass, in wire order, or for one before which ``ahead`` others end."""
        return (
            *self.named,
            self.pass_idx + ahead,
            compute_start_ms,
            end_ms,
            result.scheduled_tokens,
            result.scheduled_requests,
        )

    def pass_ended(self, result: PassResult, emitted: tuple[int, ...]) -> tuple[Any, ...]:
        """Values of ``PassEnded`` for the pass in flight, in wire order."""
        return (*self.named, self.pass_idx, emitted, result.prefill_tokens)
