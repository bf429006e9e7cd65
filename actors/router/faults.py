"""Faults: what can go wrong with workers, and between a rank that publishes KV events and a router. Plain values."""

from __future__ import annotations

import enum

import attrs

from g2sim.actors.kv.events import Tier


class FaultKind(enum.StrEnum):
    """What a fault does from its beginning to its end."""

    LAG = "lag"
    """Messages take longer, in their order."""
    LOSS = "loss"
    """Some messages are lost."""
    DUPLICATION = "duplication"
    """Some messages come twice."""
    REORDERING = "reordering"
    """Some messages are held up and overtaken."""
    OUTAGE = "outage"
    """All messages are lost."""
    ROUTER_RESTART = "router_restart"
    """The router forgets where blocks are, and hears nothing until the end; then it asks every rank."""
    PUBLISHER_RESET = "publisher_reset"
    """Ranks number their messages from 0 again; at the end the router is told, and asks them."""
    WORKER_CRASH = "worker_crash"
    """A worker's process dies, and at the end another takes its place, empty."""
    DISCOVERY_FLAP = "discovery_flap"
    """Routers do not find a worker, which goes on; they keep what they know of it, and send it nothing new."""
    CACHE_CLEAR = "cache_clear"
    """Ranks lose, at one instant, the cached blocks that nobody uses."""

    @property
    def is_membership(self) -> bool:
        """Whether it strikes workers, and not messages or streams."""
        return self in (FaultKind.WORKER_CRASH, FaultKind.DISCOVERY_FLAP, FaultKind.CACHE_CLEAR)


class OnCrash(enum.StrEnum):
    """What becomes of the requests of a worker that has crashed."""

    FAIL = "fail"
    """They end as "failed"."""
    RESUBMIT = "resubmit"
    """They are placed anew, with the tokens that they were given so far as part of their prompts."""


class RecoveryMode(enum.StrEnum):
    """What a router asks a rank for: the events it missed, or everything that is resident."""

    REPLAY = "replay"
    SNAPSHOT = "snapshot"


@attrs.frozen(kw_only=True)
class Fault:
    """One fault, active at from_ms <= time < until_ms.

    Attributes:
        pool, worker, dp_rank: whom it strikes: "agg", "prefill" or "decode"; None = all.
        probability: that a message is struck (loss, duplication, reordering).
        lag_ms, lag_max_ms: delay of a message [ms], drawn uniformly between them (lag); equal = fixed.
        hold_ms: how long a message is held up [ms] (reordering).
        detect_ms: from a crash until routers know, and its requests end or are placed anew [ms].
        requests: what becomes of them.
        tier: what is cleared, None both tiers (cache_clear).
    """

    name: str
    kind: FaultKind
    from_ms: float
    until_ms: float
    pool: str | None = None
    worker: int | None = None
    dp_rank: int | None = None
    probability: float = 1.0
    lag_ms: float = 0.0
    lag_max_ms: float = 0.0
    hold_ms: float = 0.0
    detect_ms: float = 0.0
    requests: OnCrash = OnCrash.FAIL
    tier: Tier | None = None

    def workers_of(self, pool: str, workers: int) -> list[int]:
        """The workers that it is about, of a pool with so many."""
        if self.pool not in (None, pool):
            return []
        return [worker for worker in range(workers) if self.worker in (None, worker)]

    def strikes(self, worker: int, dp_rank: int) -> bool:
        """Whether it is about this rank of the fault's pool."""
        return self.worker in (None, worker) and self.dp_rank in (None, dp_rank)


@attrs.frozen(kw_only=True)
class RecoveryConfig:
    """How a router gets back what it missed.

    Attributes:
        mode: a rank that cannot replay so far back sends a snapshot instead.
        latency_ms: from the question to the answer; what is answered is as of the question.
        patience_ms: how long a gap may stay open before the router asks; messages behind it wait.
        history_events: events that a rank keeps for replays.
        heartbeat_ms: a rank one of whose messages was lost tells its last number at the next multiple of this.
    """

    mode: RecoveryMode = RecoveryMode.REPLAY
    latency_ms: float = 1.0
    patience_ms: float = 0.0
    history_events: int = 10_000
    heartbeat_ms: float = 100.0


@attrs.frozen(kw_only=True)
class FaultPlan:
    """All faults of a run; names are unique."""

    faults: tuple[Fault, ...]
    recovery: RecoveryConfig = RecoveryConfig()

    @property
    def stops_ms(self) -> float:
        """When the last fault is over."""
        return max(fault.until_ms for fault in self.faults)

    @property
    def membership(self) -> tuple[Fault, ...]:
        """The faults that strike workers."""
        return tuple(fault for fault in self.faults if fault.kind.is_membership)

    def of_pool(self, pool: str) -> FaultPlan:
        """The faults that concern one pool's router."""
        return attrs.evolve(self, faults=tuple(fault for fault in self.faults if fault.pool in (None, pool)))
