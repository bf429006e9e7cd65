"""What the page of a run holds: its report as it is, and compact columns to draw from.

Owns: the columns, their units and how much detail is kept. Refuses to know: how they are drawn.

Times are whole microseconds from the start of the run, which is the precision at which the page shows them; columns
whose name starts with ``d_`` hold differences to the entry before. -1 stands for "there is none". Everything else is
whole as well, so the page is the same bytes for the same log.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from g2sim.actors.config import DeploymentConfig, HostScope, PoolConfig, WorkerRole
from g2sim.actors.kv.blocks import reusable_blocks, whole_blocks
from g2sim.actors.kv.events import BlocksCleared, BlocksStored, Tier
from g2sim.actors.router.events import PlacementWeighed, RequestPlaced
from g2sim.actors.traffic.events import RequestArrived
from g2sim.actors.traffic.request import RequestStatus
from g2sim.actors.worker.events import RequestAdmitted, RequestPreempted
from g2sim.bus.errors import InvariantViolation
from g2sim.scenarios.report import SHARED_POOL, private_pool_name
from g2sim.scenarios.run import LogReport
from g2sim.scenarios.schema import Scenario
from g2sim.scenarios.spans import HANDOFF, LOAD, PHASES, STORE, KvEvent, Pass, SpanSink, Transfer, rank_name

MAX_PASSES = 400_000
"""Passes drawn one by one; of a longer run, neighbours are added up in groups."""
MAX_LEVEL_POINTS = 300_000
"""Changes of G1 and G2 residency drawn one by one; of a longer run, lowest and highest of short intervals."""
MAX_KV_POINTS = 300_000
"""Changes by KV events drawn one by one; of a longer run, sums over short intervals."""

UNFINISHED = "unfinished"
_STATUSES = (*(status.value for status in RequestStatus), UNFINISHED)
_KV_KINDS = ("g1_stored", "g1_removed", "g2_stored", "g2_removed")
_NONE = -1

Column = npt.NDArray[np.int64]


def whole_us(time_ms: float) -> int:
    """A time in whole microseconds."""
    return round(time_ms * 1000.0)


@attrs.define(slots=True)
class _Request:
    """A request while its columns are filled; -1 where nothing is known."""

    arrival_us: int
    input_tokens: int
    session: int
    label: str
    phases: list[int] = attrs.Factory(list)  # phase, rank, start [us], end [us], and so on
    rank: int = _NONE
    admit_us: int = _NONE
    from_g1: int = _NONE
    from_g2: int = _NONE
    preemptions: int = 0
    end_us: int = _NONE
    status: int = _STATUSES.index(UNFINISHED)
    output_tokens: int = _NONE
    ttft_us: int = _NONE
    e2e_us: int = _NONE
    itl_us: int = _NONE


class _Series:
    """Columns of whole numbers that grow together."""

    def __init__(self, *names: str) -> None:
        self.columns = {name: array("q") for name in names}
        self._arrays = tuple(self.columns.values())

    def add(self, *values: int) -> None:
        for column, value in zip(self._arrays, values, strict=True):
            column.append(value)

    def __len__(self) -> int:
        return len(self._arrays[0])


@attrs.define(slots=True)
class _Publisher:
    """KV events of one rank: counts by kind of event [blocks], and how its numbering went."""

    events: int = 0
    next_id: int = 0
    missing: int = 0
    repeated: int = 0
    clears: int = 0
    blocks: dict[str, int] = attrs.Factory(lambda: dict.fromkeys(_KV_KINDS, 0))


class ViewData(SpanSink):
    """Collects spans and rows of a run of this scenario; ``value`` puts them together for the page."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._deployment = deployment = scenario.deployment
        self._block_size = deployment.block_size_tokens
        self._ranks = {
            rank_name(pool.role.value, worker, dp_rank): number
            for number, (pool, worker, dp_rank) in enumerate(_all_ranks(deployment))
        }
        self._private_pools = {
            private_pool_name(f"{pool.role.value}-{worker}", dp_rank): (
                rank_name(pool.role.value, worker, dp_rank),
                pool,
            )
            for pool, worker, dp_rank in _all_ranks(deployment)
        }
        self._requests: list[_Request] = []
        self._sessions: dict[str, int] = {}
        self._passes = [_Series("start", "end", "tokens", "requests", "prefill", "emitted") for _ in self._ranks]
        self._links: dict[tuple[str, str], _Series] = {}
        self._device = [_Series("at", "blocks") for _ in self._ranks]
        self._host: dict[str, _Series] = {}
        self._placements = _Series("at", "request", "rank", "waited", "overlap", "best", "found")
        self._unfound: dict[tuple[int, int], int] = {}  # (request, rank) -> its placement, not yet admitted
        # (request, pool) -> blocks believed to be at the chosen rank, and at the best one
        self._believed: dict[tuple[int, str], tuple[int | None, int | None]] = {}
        self._publishers = [_Publisher() for _ in self._ranks]
        self._kv = {kind: _Series("at", "blocks") for kind in _KV_KINDS}
        self._last_us = 0

    # -- requests

    def arrived(self, time_ms: float, event: RequestArrived) -> None:
        session = event.play_id if event.session_id is None else event.session_id
        number = _NONE if session is None else self._sessions.setdefault(session, len(self._sessions))
        turn = "" if event.turn_index is None else f"turn {event.turn_index}"
        self._requests.append(
            _Request(whole_us(event.arrival_ms), event.input_tokens, number, event.name if event.name else turn)
        )
        self._seen(time_ms)

    def phase(self, request: int, name: str, rank: str | None, start_ms: float, end_ms: float) -> None:
        entry = self._requests[request]
        number = _NONE if rank is None else self._ranks[rank]
        entry.phases += (PHASES.index(name), number, whole_us(start_ms), whole_us(end_ms))

    def preempted(self, time_ms: float, event: RequestPreempted) -> None:
        self._requests[event.request].preemptions += 1

    def weighed(self, event: PlacementWeighed) -> None:
        believed = event.believed_blocks
        self._believed[event.request, event.pool] = believed[event.chosen], max(believed)

    def placed(self, time_ms: float, event: RequestPlaced) -> None:
        role = next(role for role in WorkerRole if role.pool_name == event.pool)
        rank = self._ranks[rank_name(role.value, event.worker, event.dp_rank)]
        if self._requests[event.request].rank == _NONE:
            self._requests[event.request].rank = rank
        # A decode rank is sent what it lacks, so what it found says nothing of the router's belief.
        if role is not WorkerRole.DECODE:
            self._unfound[event.request, rank] = len(self._placements)
        # Unlike the overlap that a policy reports, the account of a placement has whole blocks without any weight.
        believed = self._believed.pop((event.request, event.pool), (event.overlap_blocks, event.best_overlap_blocks))
        overlap, best = (_NONE, _NONE) if event.overlap_blocks is None else believed
        self._placements.add(
            whole_us(time_ms),
            event.request,
            rank,
            0 if event.queued_at_ms is None else whole_us(time_ms) - whole_us(event.queued_at_ms),
            _NONE if overlap is None else overlap,
            _NONE if best is None else best,
            _NONE,
        )

    def admitted(self, time_ms: float, event: RequestAdmitted) -> None:
        entry, rank = self._requests[event.request], self._ranks[rank_name(event.role, event.worker, event.dp_rank)]
        if entry.admit_us == _NONE:
            entry.admit_us = whole_us(time_ms)
            entry.rank = rank
            entry.from_g2 = event.host_tokens or 0
            entry.from_g1 = event.reused_tokens - entry.from_g2
        placement = self._unfound.pop((event.request, rank), None)
        if placement is not None:
            self._placements.columns["found"][placement] = event.reused_tokens // self._block_size

    def ended(self, time_ms: float, request: int, status: str | None) -> None:
        entry = self._requests[request]
        self._seen(time_ms)
        if status is not None:
            entry.end_us = whole_us(time_ms)
            entry.status = _STATUSES.index(status)

    def row(self, row: dict[str, Any]) -> None:
        """Take the row of a request that ended, as in ``requests.jsonl``."""
        entry = self._requests[row["request"]]
        entry.output_tokens = row["output_length"]
        entry.ttft_us, entry.e2e_us, entry.itl_us = (
            _NONE if row[name] is None else whole_us(row[name]) for name in ("ttft_ms", "e2e_latency_ms", "itl_ms")
        )

    # -- ranks, caches, links

    def passed(self, span: Pass, first_tokens: list[int]) -> None:
        started, ended = span.started, span.ended
        self._passes[self._ranks[span.rank]].add(
            whole_us(span.start_ms),
            whole_us(span.end_ms),
            started.scheduled_tokens,
            started.scheduled_requests,
            ended.prefill_tokens,
            len(ended.emitted),
        )
        self._seen(span.end_ms)

    def transferred(self, span: Transfer) -> None:
        series = self._links.get((span.link, span.kind))
        if series is None:
            series = self._links[span.link, span.kind] = _Series("start", "end", "amount", "request", "done")
        series.add(whole_us(span.start_ms), whole_us(span.end_ms), span.amount, span.request, int(span.done))

    def device_blocks(self, time_ms: float, rank: str, resident: int) -> None:
        self._device[self._ranks[rank]].add(whole_us(time_ms), resident)

    def host_blocks(self, time_ms: float, pool: str, resident: int, used: int) -> None:
        self._host.setdefault(pool, _Series("at", "blocks", "used")).add(whole_us(time_ms), resident, used)

    def kv_event(self, time_ms: float, rank: str, event: KvEvent) -> None:
        publisher = self._publishers[self._ranks[rank]]
        publisher.events += 1
        publisher.missing += max(0, event.event_id - publisher.next_id)
        publisher.repeated += event.event_id < publisher.next_id
        publisher.next_id = max(publisher.next_id, event.event_id + 1)
        if isinstance(event, BlocksCleared):
            publisher.clears += 1
            return
        tier = "g1" if event.tier == Tier.DEVICE else "g2"
        kind = f"{tier}_stored" if isinstance(event, BlocksStored) else f"{tier}_removed"
        publisher.blocks[kind] += len(event.block_hashes)
        self._kv[kind].add(whole_us(time_ms), len(event.block_hashes))

    def crashed(self, time_ms: float, rank: str) -> None:
        self._publishers[self._ranks[rank]].next_id = 0

    def _seen(self, time_ms: float) -> None:
        self._last_us = max(self._last_us, whole_us(time_ms))

    # -- the value

    def value(self, log: LogReport, run: str) -> dict[str, Any]:
        """Everything the page shows, as plain values.

        Args:
            run: how the user named the run; stands in the commands that the page shows.
        """
        deployment = self._deployment
        passes = sum(len(series) for series in self._passes)
        group = -(-passes // MAX_PASSES) if passes else 1
        levels = [*self._device, *self._host.values()]
        every = sum(len(series) for series in levels) > MAX_LEVEL_POINTS
        bins = MAX_LEVEL_POINTS // (3 * len(levels)) if every else None
        return {
            "run": run,
            "why": self._scenario.why,
            "damage": None if log.damage is None else str(log.damage),
            "failure": log.failure,
            "end_us": self._last_us,
            "block_size_tokens": self._block_size,
            "router": {
                "policy": deployment.router.policy,
                "kv_event_lag_ms": deployment.router.kv_event_lag_ms,
            },
            "report": log.report,
            "phases": PHASES,
            "statuses": _STATUSES,
            "ranks": [
                {"name": name, "gpu_blocks": pool.rank.gpu_blocks, "kv": attrs.asdict(publisher)}
                for name, publisher, (pool, _, _) in zip(
                    self._ranks, self._publishers, _all_ranks(deployment), strict=True
                )
            ],
            "sessions": list(self._sessions),
            "requests": self._request_columns(),
            "passes": [_pass_columns(series, group) for series in self._passes],
            "pass_group": group,
            "links": self._link_entries(),
            "g1": [_level_columns(series, self._last_us, bins) for series in self._device],
            "g2": [
                {
                    "pool": pool["pool"],
                    "label": self._pool_label(pool["pool"]),
                    **_level_columns(self._host_series(pool["pool"]), self._last_us, bins),
                }
                for pool in log.report["g2_pools"]
            ],
            "placements": {
                name: _differences(column) if name == "at" else column.tolist()
                for name, column in self._placements.columns.items()
            }
            | {
                name: [count(self._requests[r].input_tokens, self._block_size) for r in self._placed_requests()]
                for name, count in (("whole", whole_blocks), ("usable", reusable_blocks))
            },
            "kv": self._kv_columns(),
        }

    def _placed_requests(self) -> array[int]:
        return self._placements.columns["request"]

    def _host_series(self, pool: str) -> _Series:
        return self._host.get(pool) or _Series("at", "blocks", "used")

    def _request_columns(self) -> dict[str, Any]:
        requests = self._requests
        names = [field.name for field in attrs.fields(_Request) if field.name not in ("arrival_us", "phases")]
        return {
            "d_arrival_us": _differences([entry.arrival_us for entry in requests]),
            **{name: [getattr(entry, name) for entry in requests] for name in names},
            "phase_count": [len(entry.phases) // 4 for entry in requests],
            "phase": [phase for entry in requests for phase in entry.phases[0::4]],
            "phase_rank": [rank for entry in requests for rank in entry.phases[1::4]],
            # Phases follow each other without a gap: the first one's start, then lengths.
            "phase_start_us": [entry.phases[2] if entry.phases else _NONE for entry in requests],
            "phase_us": [
                end - start
                for entry in requests
                for start, end in zip(entry.phases[2::4], entry.phases[3::4], strict=True)
            ],
        }

    def _link_entries(self) -> list[dict[str, Any]]:
        order = [SHARED_POOL, *self._private_pools, HANDOFF]
        return [
            {
                "label": self._pool_label(link),
                "kind": kind,
                "unit": "tokens" if kind == HANDOFF else "blocks",
                "bytes_per_unit": self._bytes_per_unit(link, kind),
                "gb_per_s": self._limit_gb_per_s(link, kind),
                "d_start": _differences(series.columns["start"]),
                "length": [
                    end - start for start, end in zip(series.columns["start"], series.columns["end"], strict=True)
                ],
                **{name: series.columns[name].tolist() for name in ("amount", "request", "done")},
            }
            for (link, kind), series in sorted(
                self._links.items(), key=lambda item: (order.index(item[0][0]), item[0][1])
            )
        ]

    def _bytes_per_unit(self, link: str, kind: str) -> int | None:
        if kind == HANDOFF:
            return self._deployment.handoff.bytes_per_token
        rank = self._host_pool(link).rank
        return None if rank.kv_bytes_per_token is None else rank.kv_bytes_per_token * rank.block_size_tokens

    def _host_pool(self, name: str) -> PoolConfig:
        """The workers whose host tier is the pool of this name, or a part of it."""
        if name == SHARED_POOL:
            return next(pool for pool in self._deployment.pools if pool.rank.host is not None)
        return self._private_pools[name][1]

    def _pool_label(self, name: str) -> str:
        """A pool's short name: a private one goes by its rank."""
        return f"{SHARED_POOL} {self._private_pools[name][0]}" if name in self._private_pools else name

    def _limit_gb_per_s(self, link: str, kind: str) -> float | None:
        """Bandwidth of a link as a whole, None for no limit."""
        if kind == HANDOFF:
            return None  # each hand-off has the configured bandwidth to itself
        host = self._host_pool(link).rank.host
        if host is None:
            raise InvariantViolation(f"pool {link!r} belongs to workers without a host tier")
        if host.scope is HostScope.CLUSTER_SHARED:
            limit = {STORE: host.shared_d2h_gb_per_s, LOAD: host.shared_h2d_gb_per_s}[kind]
        else:
            limit = {STORE: host.d2h_gb_per_s, LOAD: host.h2d_gb_per_s}[kind]
        return limit or None

    def _kv_columns(self) -> dict[str, dict[str, list[int]]]:
        every = sum(len(series) for series in self._kv.values()) > MAX_KV_POINTS
        width_us = max(1, self._last_us * len(self._kv) // MAX_KV_POINTS) if every else 1
        return {kind: _sum_columns(series, width_us) for kind, series in self._kv.items()}


def _all_ranks(deployment: DeploymentConfig) -> Iterable[tuple[PoolConfig, int, int]]:
    """(pool, worker, dp_rank) of every rank, in the report's order."""
    return (
        (pool, worker, dp_rank)
        for pool in deployment.pools
        for worker in range(pool.workers)
        for dp_rank in range(pool.dp_size)
    )


def _differences(values: Sequence[int] | Column) -> list[int]:
    steps: list[int] = np.diff(np.asarray(values, dtype=np.int64), prepend=0).tolist()
    return steps


def _pass_columns(series: _Series, group: int) -> dict[str, list[int]]:
    """Columns of a rank's passes; of ``group`` neighbours the sums, from the first one's start to the last one's end.

    ``busy`` is the time in which a pass ran, which in a group can be less than its length.
    """
    columns = {name: np.asarray(column, dtype=np.int64) for name, column in series.columns.items()}
    firsts = np.arange(0, len(series), group)
    ends = columns["end"][np.minimum(firsts + group, len(series)) - 1] if len(series) else firsts
    starts = columns["start"][firsts]
    sums = {
        name: np.add.reduceat(values, firsts).tolist() if len(series) else []
        for name, values in (
            ("busy", columns["end"] - columns["start"]),
            ("count", np.ones(len(series), dtype=np.int64)),
            *((name, columns[name]) for name in ("tokens", "requests", "prefill", "emitted")),
        )
    }
    return {"d_start": _differences(starts), "length": (ends - starts).tolist(), **sums}


def _level_columns(series: _Series, end_us: int, bins: int | None) -> dict[str, list[int]]:
    """Columns of a level that changes in steps.

    With ``bins`` only the lowest, the highest and the last value in each of so many intervals are kept.
    """
    columns = {name: np.asarray(column, dtype=np.int64) for name, column in series.columns.items()}
    if bins is not None and len(series) > 3 * bins:
        at, blocks = columns["at"], columns["blocks"]
        number = np.minimum(at * bins // max(end_us, 1), bins - 1)
        keep: set[int] = set()
        for part in np.split(np.arange(len(at)), np.flatnonzero(np.diff(number)) + 1):
            keep |= {int(part[blocks[part].argmin()]), int(part[blocks[part].argmax()]), int(part[-1])}
        chosen = np.asarray(sorted(keep))
        columns = {name: values[chosen] for name, values in columns.items()}
    return {f"d_{name}": _differences(values) for name, values in columns.items()}


def _sum_columns(series: _Series, width_us: int) -> dict[str, list[int]]:
    """Columns of amounts, added up over intervals of this width, where the first one of the interval stands."""
    at, blocks = (np.asarray(series.columns[name], dtype=np.int64) for name in ("at", "blocks"))
    _, firsts = np.unique(at // width_us, return_index=True)
    sums: list[int] = np.add.reduceat(blocks, firsts).tolist() if len(at) else []
    return {"d_at": _differences(at[firsts]), "blocks": sums}
