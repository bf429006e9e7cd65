"""The state of a run at an instant, or after one record, folded from its log.

Owns: what is shown of a state: each rank's tiers and queues, the host pools, what routers know, what is open.
Refuses to know: how state follows from events (``state_fold``), how it is printed.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import attrs

from g2sim.actors.kv.events import BlocksCleared, BlocksRemoved, BlocksStored
from g2sim.actors.membership.events import WorkerStateKnown
from g2sim.actors.router.events import RequestPlaced, RequestRefused, RequestWaits
from g2sim.actors.router.pool import WorkerState
from g2sim.actors.worker.events import RequestEnded
from g2sim.bus.errors import ConfigError, LogDamaged
from g2sim.bus.events import Record
from g2sim.scenarios.records import Numbered, numbered
from g2sim.scenarios.report import RunInfo
from g2sim.scenarios.request_rows import POOL_OF_ROLE
from g2sim.scenarios.run_log import open_run
from g2sim.scenarios.schema import Scenario
from g2sim.scenarios.state_fold import RankState, StateFold

_KV_EVENTS = (BlocksStored, BlocksRemoved, BlocksCleared)


class IndexFold:
    """Blocks that routers may believe each rank to hold: KV events, once they are ``lag_ms`` old.

    A router takes KV events up when it acts next, so this is what it would decide on at that instant.
    """

    def __init__(self, lag_ms: float) -> None:
        self._lag_ms = lag_ms
        self._fold = StateFold()
        self._coming: deque[Record] = deque()

    def apply(self, record: Record) -> None:
        event = record.event
        if isinstance(event, _KV_EVENTS):
            self._coming.append(record)
        elif isinstance(event, WorkerStateKnown) and event.state == WorkerState.REMOVED.value:
            gone = event.pool, event.worker
            for role, worker, dp_rank in list(self._fold.ranks):
                if (POOL_OF_ROLE[role], worker) == gone:
                    del self._fold.ranks[role, worker, dp_rank]
            coming = [one for one in self._coming if (POOL_OF_ROLE[one.event.role], one.event.worker) != gone]
            self._coming = deque(coming)

    def at(self, now_ms: float) -> tuple[dict[tuple[str, int, int], RankState], int]:
        """Ranks as known at an instant [ms], which must not go back, and how many KV events are still to be heard."""
        while self._coming and self._coming[0].time_ms + self._lag_ms <= now_ms:
            self._fold.apply(self._coming.popleft())
        return self._fold.ranks, len(self._coming)


@attrs.frozen(kw_only=True)
class Moment:
    """A state.

    Attributes:
        time_ms: the instant asked for, or that of the record asked for.
        record: the last record that is part of it, None before the first.
        value: the state as plain values, see docs/time-travel.md.
        damage: why the log could not be read up to there, None if it could.
    """

    time_ms: float
    record: Numbered | None
    value: dict[str, Any]
    damage: LogDamaged | None


def inspect_run(path: Path, *, at_ms: float | None = None, record: int | None = None) -> Moment:
    """The state of a run after everything up to an instant [ms], or after the record of this number.

    Args:
        path: the log, or the run folder that holds it.
    Raises: ConfigError if the run has no such instant or record, or there is no log at ``path``.
    """
    fold, waiting = StateFold(), dict[int, str]()
    last: Numbered | None = None
    damage: LogDamaged | None = None
    with open_run(path) as reader:
        scenario = Scenario.of_log(reader)
        index = IndexFold(scenario.deployment.router.kv_event_lag_ms)
        try:
            for one in numbered(reader):
                if (record is not None and one.idx > record) or (at_ms is not None and one.record.time_ms > at_ms):
                    break
                fold.apply(one.record)
                index.apply(one.record)
                _note_waiting(waiting, one.record.event)
                last = one
        except LogDamaged as error:
            damage = error
    if record is not None and (last is None or last.idx != record) and damage is None:
        count = 0 if last is None else last.idx + 1
        raise ConfigError("--record", got=record, allowed=f"0 to {count - 1}: the log has {count} records")
    time_ms = at_ms if at_ms is not None else 0.0 if last is None else last.record.time_ms
    value = _value(scenario, fold, index, waiting, time_ms)
    value["record"] = None if last is None else last.idx
    return Moment(time_ms=time_ms, record=last, value=value, damage=damage)


def _note_waiting(waiting: dict[int, str], event: Any) -> None:
    """Keep which requests wait in which router."""
    if isinstance(event, RequestWaits):
        waiting[event.request] = event.pool
    elif isinstance(event, RequestPlaced | RequestRefused | RequestEnded):
        waiting.pop(event.request, None)


def _value(
    scenario: Scenario, fold: StateFold, index: IndexFold, waiting: dict[int, str], time_ms: float
) -> dict[str, Any]:
    deployment = scenario.deployment
    known, unheard = index.at(time_ms)
    capacities = RunInfo.of(deployment, name=scenario.name, seed=scenario.seed, version="").host_pool_blocks
    ranks = []
    for pool in deployment.pools:
        for worker in range(pool.workers):
            for dp_rank in range(pool.dp_size):
                place = (pool.role.value, worker, dp_rank)
                state, told = fold.ranks.get(place, RankState()), known.get(place, RankState())
                ranks.append(
                    {
                        "rank": f"{pool.role.value}-{worker}/{dp_rank}",
                        "g1_capacity_blocks": pool.rank.gpu_blocks,
                        "g1_blocks": sorted(state.device),
                        "g2_blocks": sorted(state.host),
                        "running": sorted(state.running),
                        "waiting": sorted(state.waiting),
                        "index_g1_blocks": sorted(told.device),
                        "index_g2_blocks": sorted(told.host),
                    }
                )
    pools = []
    for name, capacity in capacities.items():
        pool_state = fold.pools.get(name)
        blocks = {} if pool_state is None else pool_state.blocks
        pools.append(
            {
                "pool": name,
                "capacity_blocks": capacity,
                "resident_blocks": sorted(hash_ for hash_, (resident, _) in blocks.items() if resident),
                "pending_blocks": sorted(hash_ for hash_, (resident, _) in blocks.items() if not resident),
                "pinned_blocks": sorted(hash_ for hash_, (_, pins) in blocks.items() if pins),
                "cleared_blocks": [] if pool_state is None else sorted(pool_state.kept.elements()),
                "transfers": [] if pool_state is None else sorted(pool_state.transfers),
            }
        )
    routers = []
    for pool in deployment.pools:
        name = pool.role.pool_name
        routers.append({"pool": name, "waiting": sorted(request for request, at in waiting.items() if at == name)})
    return {
        "time_ms": time_ms,
        "ranks": ranks,
        "g2_pools": pools,
        "routers": routers,
        "kv_events_not_yet_heard": unheard,
        "open_requests": sorted(fold.open_requests),
        "ended": dict(sorted(fold.ended.items())),
    }
