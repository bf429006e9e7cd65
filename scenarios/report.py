"""The report of a run, as a fold of its event log (contract C3).

Owns: what the summary, the per-rank counts and the host pools' figures mean, the shape of ``report.json`` and
``requests.jsonl``, and the table for people. The same fold runs beside a live run and over a log afterwards.
Refuses to know: files, and how anything it counts was decided.

Names and values of the summary are the reference's. Where a count could be read in two ways the report says which one
it is, in ``DEFINITIONS``.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import attrs
import msgspec
import numpy as np
from tabulate import tabulate

from g2sim.actors.config import DeploymentConfig, HostScope, SlaConfig, WorkerRole
from g2sim.actors.handoff.departures import Departures
from g2sim.actors.handoff.events import (
    DestinationActivated,
    DestinationReserved,
    SourceHeld,
    SourceReleased,
)
from g2sim.actors.host_pool.events import (
    ClearedBlocksFreed,
    ClientRetired,
    HostBlocksEvicted,
    HostPoolCleared,
    LoadFinished,
    LoadQueued,
    StoreDropped,
    StoreLanded,
    StorePrepared,
)
from g2sim.actors.membership.events import RequestLost
from g2sim.actors.router.events import RequestPlaced
from g2sim.actors.router.messages import router_names
from g2sim.actors.traffic.events import (
    AdmissionClosed,
    PlayRecycled,
    PlaySettled,
    PreparationEnded,
    ProfileFinished,
    RequestArrived,
    RequestSkipped,
    TimersPulledForward,
)
from g2sim.actors.traffic.request import RequestStatus
from g2sim.actors.worker.events import (
    CanceledRequestLeft,
    PassEnded,
    PassesEnded,
    RequestAdmitted,
    RequestEnded,
    RequestPreempted,
)
from g2sim.bus.errors import InvariantViolation
from g2sim.bus.events import Record
from g2sim.scenarios.event_plane import EventPlaneFold, event_plane_table
from g2sim.scenarios.events import RunFinished, RunStarted
from g2sim.scenarios.membership import MembershipFold, membership_table
from g2sim.scenarios.phases import PhaseFold
from g2sim.scenarios.plays import PlayFold
from g2sim.scenarios.request_rows import DECODE_POOL, HANDOFF_STEPS, POOL_OF_ROLE, Admission, EndedRequest, RequestTrack
from g2sim.scenarios.router_replicas import REPLICA_EVENTS, ReplicaFold, replicas_table
from g2sim.scenarios.statistics import StreamedDistribution, exact_distribution, meets_sla

SCHEMA = "g2sim.report/1"
SHARED_POOL = "g2"


def private_pool_name(worker: str, dp_rank: int) -> str:
    """Name of one rank's own host pool; ``worker`` is the name of its actor, ``<role>-<number>``."""
    return f"{SHARED_POOL}:{worker}/{dp_rank}"


Report = dict[str, Any]
"""What ``report.json`` holds: plain JSON values."""

RowSink = Callable[[dict[str, Any]], None]
"""Takes the row of each request as it ends."""

DEFINITIONS = {
    "ttft": "first visible token - arrival; the parts in ttft_parts_ms lie between the same two instants",
    "ttst": "second visible token - first, per request",
    "tpot": "(last token - first) / (tokens - 1), one value per request with 2 tokens or more; itl_ms in its row",
    "itl": "every gap between consecutive tokens of every request",
    "e2e_latency": "last visible token - arrival",
    "output_token_throughput_per_user": "1000 / gap of every gap above 0, in tokens per second",
    "prompt_tokens": "of completed requests, booked once to the rank that first admitted them for their prompt: "
    "asked = from_g1 + from_g2 + computed, as the first admission found them",
    "readmission_reused_tokens": "tokens found again after a preemption; in no other count",
    "requests": "requests that a rank admitted at least once; in the totals each counts once",
    "prefix_cache_reused_ratio": "largest reuse of each request over all admissions, per input token; can exceed 1",
    "first_admission_prefix_cache_reused_ratio": "reuse at first admissions / input tokens, one ratio of two sums",
}

RANK_COLUMNS = {
    "requests": "requests",
    "prompt_tokens_asked": "asked\n[tokens]",
    "prompt_tokens_from_g1": "from G1\n[tokens]",
    "prompt_tokens_from_g2": "from G2\n[tokens]",
    "prompt_tokens_computed": "computed\n[tokens]",
    "readmission_reused_tokens": "readmitted\n[tokens]",
    "passes": "passes",
}
"""Field of ``workers`` -> heading in the printed report."""

POOL_COLUMNS = {f"{name}_blocks": name for name in ("capacity", "resident", "used", "stored", "evicted", "loaded")}
"""Field of ``g2_pools`` -> heading in the printed report."""

_TOKENS_AT_A_TIME = 4_096  # where the cost of a call is not felt any more

_PREFILL_ROLE = WorkerRole.PREFILL.value
_DEFINED_ENDS = tuple(status.value for status in RequestStatus)


@attrs.frozen(kw_only=True)
class PoolInfo:
    """One pool of workers, as far as a report needs to know it."""

    role: WorkerRole
    workers: int
    dp_size: int
    gpus_per_worker: int
    block_size_tokens: int
    gpu_blocks: int
    host_tier: bool


@attrs.frozen(kw_only=True)
class RunInfo:
    """What a report takes from the resolved scenario; everything else comes from events.

    Attributes:
        host_pool_blocks: name -> capacity [blocks] of every host pool.
        shared_pool: name of the deployment's one pool, None without one.
        router_replicas: routers of each pool.
    """

    name: str
    seed: int
    version: str
    pools: tuple[PoolInfo, ...]
    sla: SlaConfig | None = None
    host_pool_blocks: Mapping[str, int] = attrs.Factory(dict)
    shared_pool: str | None = None
    router_replicas: int = 1

    @property
    def disaggregated(self) -> bool:
        return self.pools[0].role is not WorkerRole.AGGREGATED

    def gpus_per_worker(self, role: WorkerRole) -> int:
        """GPUs of one worker of a role, 0 for a pool that the deployment does not have."""
        return next((pool.gpus_per_worker for pool in self.pools if pool.role is role), 0)

    @classmethod
    def of(cls, deployment: DeploymentConfig, *, name: str, seed: int, version: str) -> RunInfo:
        """Info of a deployment. Host pools are named as on the bus: "g2", or "g2:<role>-<worker>/<dp_rank>"."""
        blocks: dict[str, int] = {}
        for pool in deployment.pools:
            host = pool.rank.host
            if host is None:
                continue
            if host.scope is HostScope.CLUSTER_SHARED:
                blocks[SHARED_POOL] = host.capacity_blocks
                continue
            for worker in range(pool.workers):
                for dp_rank in range(pool.dp_size):
                    blocks[private_pool_name(f"{pool.role.value}-{worker}", dp_rank)] = host.capacity_blocks
        return cls(
            name=name,
            seed=seed,
            version=version,
            pools=tuple(
                PoolInfo(
                    role=pool.role,
                    workers=pool.workers,
                    dp_size=pool.dp_size,
                    gpus_per_worker=pool.gpus_per_worker,
                    block_size_tokens=pool.rank.block_size_tokens,
                    gpu_blocks=pool.rank.gpu_blocks,
                    host_tier=pool.rank.host is not None,
                )
                for pool in deployment.pools
            ),
            sla=deployment.sla,
            host_pool_blocks=blocks,
            shared_pool=SHARED_POOL if SHARED_POOL in blocks else None,
            router_replicas=deployment.router.replicas,
        )


@attrs.define(slots=True)
class _RankCounts:
    """Counts of one rank, in the order of the report's table; see ``DEFINITIONS``."""

    requests: int = 0
    prompt_tokens_asked: int = 0
    prompt_tokens_from_g1: int = 0
    prompt_tokens_from_g2: int = 0
    prompt_tokens_computed: int = 0
    readmissions: int = 0
    readmission_reused_tokens: int = 0
    preemptions: int = 0
    output_tokens: int = 0
    prefill_tokens: int = 0
    passes: int = 0


class _HostPool:
    """Residency of one host pool [blocks], folded from its events alone.

    ``trusted``: see ``ReportFold``.
    """

    __slots__ = (
        "_capacity",
        "_kept_blocks",
        "_loads",
        "_name",
        "_pending",
        "_pending_blocks",
        "_resident",
        "_resident_blocks",
        "_totals",
    )

    def __init__(self, name: str, capacity_blocks: int, *, trusted: bool) -> None:
        self._name = name
        self._capacity = capacity_blocks
        self._resident_blocks = 0
        self._resident: set[int] | None = None if trusted else set()
        self._pending: dict[int, tuple[int, ...]] = {}  # store transfer -> its blocks
        self._pending_blocks = 0
        self._kept_blocks = 0  # that a clear has left to loads
        self._loads: dict[int, tuple[int, int]] = {}  # load transfer -> (request, blocks)
        self._totals = {"stored_blocks": 0, "evicted_blocks": 0, "loaded_blocks": 0}

    def prepared(self, event: StorePrepared) -> None:
        again = self._resident is not None and not self._resident.isdisjoint(event.block_hashes)
        if again or event.transfer in self._pending:
            raise InvariantViolation(f"{self._name}: store {event.transfer} is known or stores resident blocks again")
        self._pending[event.transfer] = event.block_hashes
        self._pending_blocks += len(event.block_hashes)
        used = self._used_blocks
        if used > self._capacity:
            raise InvariantViolation(f"{self._name}: {used} blocks used of {self._capacity}")

    def landed(self, event: StoreLanded) -> None:
        blocks = self._take_pending(event.transfer)
        self._resident_blocks += len(blocks)
        if self._resident is not None:
            self._resident.update(blocks)
        self._totals["stored_blocks"] += len(blocks)

    def dropped(self, event: StoreDropped) -> None:
        self._take_pending(event.transfer)

    def evicted(self, event: HostBlocksEvicted) -> None:
        self._lose(event.block_hashes)

    def cleared(self, event: HostPoolCleared) -> None:
        self._lose(event.block_hashes)
        self._lose(event.loading_hashes)
        self._kept_blocks += len(event.loading_hashes)

    def freed(self, event: ClearedBlocksFreed) -> None:
        self._kept_blocks -= len(event.block_hashes)

    def _lose(self, block_hashes: tuple[int, ...]) -> None:
        self._resident_blocks -= len(block_hashes)
        if self._resident is not None:
            self._resident.difference_update(block_hashes)
            if len(self._resident) != self._resident_blocks:
                raise InvariantViolation(f"{self._name}: evicted blocks that are not resident")
        self._totals["evicted_blocks"] += len(block_hashes)

    def load_queued(self, event: LoadQueued) -> None:
        absent = self._resident is not None and not self._resident.issuperset(event.block_hashes)
        if absent or event.transfer in self._loads:
            raise InvariantViolation(f"{self._name}: load {event.transfer} is known or loads what is not resident")
        self._loads[event.transfer] = event.request, len(event.block_hashes)

    def load_finished(self, event: LoadFinished) -> int:
        """Returns: the request it was for."""
        if event.transfer not in self._loads:
            raise InvariantViolation(f"{self._name}: load {event.transfer} finished but was never queued")
        request, blocks = self._loads.pop(event.transfer)
        self._totals["loaded_blocks"] += blocks
        return request

    def client_retired(self, event: ClientRetired) -> None:
        for transfer in event.rolled_back_stores:
            self._take_pending(transfer)
        for transfer in event.canceled_loads:
            self._loads.pop(transfer, None)

    def figures(self) -> dict[str, int]:
        return {
            "capacity_blocks": self._capacity,
            "resident_blocks": self._resident_blocks,
            "used_blocks": self._used_blocks,
        }

    @property
    def _used_blocks(self) -> int:
        return self._resident_blocks + self._pending_blocks + self._kept_blocks

    def entry(self) -> dict[str, Any]:
        return {"pool": self._name, **self.figures(), **self._totals}

    def _take_pending(self, transfer: int) -> tuple[int, ...]:
        if transfer not in self._pending:
            raise InvariantViolation(f"{self._name}: store {transfer} ended but was never prepared")
        blocks = self._pending.pop(transfer)
        self._pending_blocks -= len(blocks)
        return blocks


class _TokenGaps:
    """The gaps between the tokens of each request, and their reciprocals.

    Distributions take them in the order of the requests, many at a time; token times wait here until then.
    """

    __slots__ = ("_gaps_ms", "_per_user", "_waiting", "_waiting_tokens")

    def __init__(self) -> None:
        self._gaps_ms, self._per_user = StreamedDistribution(), StreamedDistribution()
        self._waiting: list[array[float]] = []
        self._waiting_tokens = 0

    def add(self, token_times_ms: array[float]) -> None:
        """Take a request's token times [ms], which do not change any more; at least one."""
        self._waiting.append(token_times_ms)
        self._waiting_tokens += len(token_times_ms)
        if self._waiting_tokens >= _TOKENS_AT_A_TIME:
            self._take_waiting()

    def fields(self) -> dict[str, float]:
        """Fields of the summary."""
        self._take_waiting()
        return {
            **self._gaps_ms.result().named("itl_ms"),
            **self._per_user.result().named("output_token_throughput_per_user"),
        }

    def _take_waiting(self) -> None:
        if not self._waiting:
            return
        last_tokens = np.cumsum([len(times) for times in self._waiting]) - 1
        gaps_ms = np.diff(np.concatenate([np.frombuffer(times) for times in self._waiting]))
        gaps_ms = np.delete(gaps_ms, last_tokens[:-1])  # from a request to the next one
        self._waiting.clear()
        self._waiting_tokens = 0
        self._gaps_ms.extend(gaps_ms)
        self._per_user.extend(1000.0 / gaps_ms[gaps_ms > 0.0])


class _Completed:
    """What the summary keeps of completed, admitted requests: samples in order of termination, and sums."""

    def __init__(self, sla: SlaConfig | None) -> None:
        self._sla = sla
        self._requests = self._input_tokens = self._output_tokens = 0
        self._reused_tokens = self._first_reused_tokens = 0
        self._duration_ms = 0.0
        self._good_requests = self._good_tokens = 0
        self._ttft_ms, self._ttst_ms, self._tpot_ms, self._e2e_ms = (array("d") for _ in range(4))
        self._gaps = _TokenGaps()
        self._ttft_parts_ms: dict[str, float] = {}

    def add(self, end: EndedRequest) -> None:
        track = end.track
        tokens = len(track.token_times_ms)
        reused = [admission.event.reused_tokens for admission in track.admissions]
        self._requests += 1
        self._input_tokens += track.arrival.input_tokens
        self._output_tokens += tokens
        self._reused_tokens += max(reused)
        self._first_reused_tokens += reused[0]
        self._duration_ms = max(self._duration_ms, end.terminal_ms)
        if end.ttft_ms is not None and end.e2e_latency_ms is not None:
            self._ttft_ms.append(end.ttft_ms)
            self._e2e_ms.append(end.e2e_latency_ms)
        if end.ttst_ms is not None and end.itl_ms is not None:
            self._ttst_ms.append(end.ttst_ms)
            self._tpot_ms.append(end.itl_ms)
            self._gaps.add(track.token_times_ms)
        for part, spent_ms in (end.ttft_parts_ms() or {}).items():
            self._ttft_parts_ms[part] = self._ttft_parts_ms.get(part, 0.0) + spent_ms
        if self._sla is not None and meets_sla(
            self._sla,
            tokens=tokens,
            ttft_ms=end.ttft_ms,
            e2e_ms=end.e2e_latency_ms,
            lifetime_ms=max(0.0, end.terminal_ms - track.arrival.arrival_ms),
        ):
            self._good_requests += 1
            self._good_tokens += tokens

    def summary(self, measured_ms: Callable[[float], float]) -> dict[str, Any]:
        """Fields of the summary; ``measured_ms``: instant of the last completion -> what counts as duration [ms]."""
        duration_ms = measured_ms(self._duration_ms)
        seconds = max(duration_ms / 1000.0, 1e-9)  # a run of no duration still has finite rates
        all_tokens = self._input_tokens + self._output_tokens
        fields: dict[str, Any] = {
            "completed_requests": self._requests,
            "total_input_tokens": self._input_tokens,
            "total_output_tokens": self._output_tokens,
            "processed_tokens": all_tokens,
            "duration_ms": duration_ms,
            "request_throughput_rps": self._requests / seconds,
            "input_throughput_tok_s": self._input_tokens / seconds,
            "output_throughput_tok_s": self._output_tokens / seconds,
            "total_throughput_tok_s": all_tokens / seconds,
            "prefix_cache_reused_ratio": _ratio(self._reused_tokens, self._input_tokens),
            "first_admission_prefix_cache_reused_ratio": _ratio(self._first_reused_tokens, self._input_tokens),
            "num_ttft_samples": len(self._ttft_ms),
            "num_tpot_samples": len(self._tpot_ms),
            "num_e2e_latency_samples": len(self._e2e_ms),
            **exact_distribution(self._ttft_ms).named("ttft_ms"),
            **exact_distribution(self._ttst_ms).named("ttst_ms"),
            **exact_distribution(self._tpot_ms).named("tpot_ms"),
            **exact_distribution(self._e2e_ms).named("e2e_latency_ms"),
            **self._gaps.fields(),
        }
        if self._sla is not None:
            fields |= {
                "goodput_completed_requests": self._good_requests,
                "goodput_request_throughput_rps": self._good_requests / seconds,
                "goodput_output_throughput_tok_s": self._good_tokens / seconds,
            }
        return fields

    def ttft_parts_mean_ms(self) -> dict[str, float]:
        return {part: spent_ms / len(self._ttft_ms) for part, spent_ms in self._ttft_parts_ms.items()}


class ReportFold:
    """Folds a run's records, in log order, into its report.

    Holds the requests that have not ended, one number per metric of those that completed, token times of the last few
    of them, and the hashes that host pools hold; rows go to ``on_row`` as requests end and are not kept. ``finish`` may
    be called at any time and changes nothing: it gives the report of the log so far.

    Args:
        info: what comes from the resolved scenario.
        on_row: takes each ended request's row; None builds no rows.
        trusted: the records come from actors at work, which answer for their blocks themselves. Otherwise which blocks
            host pools hold is followed, and a record that contradicts it is an error.

    Raises (from ``apply``): InvariantViolation for an order of events that no run can have.
    """

    def __init__(self, info: RunInfo, on_row: RowSink | None = None, *, trusted: bool = False) -> None:
        self._info = info
        self._on_row = on_row
        self._block_size_tokens = info.pools[0].block_size_tokens
        self._dp_size = {pool.role.value: pool.dp_size for pool in info.pools}
        self._ranks = {
            (pool.role.value, worker, dp_rank): _RankCounts()
            for pool in info.pools
            for worker in range(pool.workers)
            for dp_rank in range(pool.dp_size)
        }
        self._pools = {name: _HostPool(name, blocks, trusted=trusted) for name, blocks in info.host_pool_blocks.items()}
        self._now_ms = 0.0
        self._released = 0
        self._live: dict[int, RequestTrack] = {}
        self._closing: dict[int, EndedRequest] = {}
        self._token_times_ms: dict[int, array[float]] = {}  # of requests admitted where tokens are made, not ended
        self._ends = dict.fromkeys(_DEFINED_ENDS, 0)
        self._completed = _Completed(info.sla)
        self._plays = PlayFold()
        self._phases = PhaseFold()
        self._arrivals = 0
        self._departures = Departures[RequestArrived]()
        self._event_plane = EventPlaneFold()
        self._membership = MembershipFold()
        self._largest_rejected_tokens = 0
        self._replicas: ReplicaFold | None = None
        if info.router_replicas > 1:
            roles = [pool.role for pool in info.pools]
            self._replicas = ReplicaFold({role.pool_name: router_names(role, info.router_replicas) for role in roles})
        self._started: RunStarted | None = None
        self._finished: RunFinished | None = None
        self._handlers: dict[type[Any], Callable[[float, Any], None]] = {
            RequestArrived: self._arrived,
            RequestPlaced: self._placed,
            RequestAdmitted: self._admitted,
            RequestPreempted: self._preempted,
            PassEnded: self._pass_ended,
            PassesEnded: self._passes_ended,
            RequestEnded: self._ended,
            RequestSkipped: self._plays.skipped,
            PlaySettled: self._plays.settled,
            PlayRecycled: self._recycled,
            TimersPulledForward: self._phases.shifted,
            PreparationEnded: self._prepared,
            AdmissionClosed: self._admission_closed,
            ProfileFinished: self._phases.done,
            CanceledRequestLeft: self._left_servers,
            StorePrepared: lambda _, event: self._pool(event.pool).prepared(event),
            StoreLanded: lambda _, event: self._pool(event.pool).landed(event),
            StoreDropped: lambda _, event: self._pool(event.pool).dropped(event),
            HostBlocksEvicted: lambda _, event: self._pool(event.pool).evicted(event),
            HostPoolCleared: lambda _, event: self._pool(event.pool).cleared(event),
            ClearedBlocksFreed: lambda _, event: self._pool(event.pool).freed(event),
            ClientRetired: lambda _, event: self._pool(event.pool).client_retired(event),
            LoadQueued: self._load_queued,
            LoadFinished: self._load_finished,
            RunStarted: self._run_started,
            SourceHeld: lambda time_ms, event: self._handoff_step("source_held_ms", time_ms, event.request),
            DestinationReserved: lambda time_ms, event: self._handoff_step(
                "destination_reserved_ms", time_ms, event.request
            ),
            DestinationActivated: lambda time_ms, event: self._handoff_step(
                "destination_activated_ms", time_ms, event.request
            ),
            SourceReleased: self._released_source,
            RunFinished: self._run_finished,
            **self._event_plane.handlers,
            **self._membership.handlers,
            RequestLost: self._lost,
        }

    def event_types(self) -> Iterable[type[Any]]:
        """The events that it has to hear of during a run, which tells runs of passes."""
        return (self._handlers.keys() | (set() if self._replicas is None else REPLICA_EVENTS)) - {PassEnded}

    def apply(self, record: Record) -> None:
        """Take the next record of the log. Events that no report speaks of pass by."""
        if self._replicas is not None:
            self._replicas.apply(record)
        handler = self._handlers.get(type(record.event))
        if handler is None:
            return
        if record.time_ms < self._now_ms:
            raise InvariantViolation(f"time went back from {self._now_ms!r} to {record.time_ms!r} ms")
        self._now_ms = record.time_ms
        handler(record.time_ms, record.event)

    def end_transfer(self, record: Record) -> None:
        """``apply`` for the end of a transfer, which may come late, though before what else is told of its blocks."""
        self._handlers[type(record.event)](record.time_ms, record.event)

    def finish(self) -> Report:
        """The report of everything applied so far."""
        info = self._info
        counts = [(key, attrs.asdict(rank)) for key, rank in self._ranks.items()]
        totals = {name: sum(entry[name] for _, entry in counts) for name in attrs.fields_dict(_RankCounts)}
        totals["requests"] = sum(entry["requests"] for key, entry in counts if key[0] != WorkerRole.DECODE)
        event_plane, membership = self._event_plane.section(), self._membership.section()
        return {
            "schema": SCHEMA,
            "program": "g2sim",
            "version": info.version,
            "seed": info.seed,
            "scenario": info.name,
            "finished": self._finished is not None,
            "stopped_at_limit": None if self._finished is None else self._finished.stopped_at_limit,
            "notes": [*self._notes()],
            "summary": self._summary(),
            "requests": {"released": self._released, **self._ends, "unfinished": len(self._live)},
            "workers": [
                {"pool": POOL_OF_ROLE[role], "worker": worker, "dp_rank": dp_rank, **entry}
                for (role, worker, dp_rank), entry in counts
            ],
            "totals": totals,
            "ttft_parts_mean_ms": self._completed.ttft_parts_mean_ms(),
            "g2_pools": [pool.entry() for pool in self._pools.values()],
            **({} if event_plane is None else {"event_plane": event_plane}),
            **({} if membership is None else {"membership": membership}),
            **({} if self._replicas is None else {"routers": self._replicas.section()}),
            "definitions": dict(DEFINITIONS),
        }

    def _notes(self) -> Iterator[str]:
        for end in (self._started, self._finished):
            yield from () if end is None else end.notes
        prompt_side = self._info.pools[0]
        blocks = -(-self._largest_rejected_tokens // prompt_side.block_size_tokens)
        if blocks > prompt_side.gpu_blocks:
            yield (
                f"requests were rejected that can never run: the largest prompt of them has {blocks} blocks, "
                f"and the G1 of a rank has {prompt_side.gpu_blocks}"
            )

    def _summary(self) -> dict[str, Any]:
        info, end = self._info, self._finished
        prefill_gpus = info.gpus_per_worker(WorkerRole.PREFILL)
        decode_gpus = info.gpus_per_worker(WorkerRole.DECODE) or info.gpus_per_worker(WorkerRole.AGGREGATED)
        fields: dict[str, Any] = {
            "num_requests": self._released,
            "committed_prefill_tokens": sum(rank.prefill_tokens for rank in self._ranks.values()),
            "kv_eviction_policy": "lru",
            "prefill_gpus_per_worker": prefill_gpus,
            "decode_gpus_per_worker": decode_gpus,
            # Known only at the end of a run: a log that was cut short has no such figure.
            "prefill_worker_seconds": None if end is None else end.prefill_worker_seconds,
            "decode_worker_seconds": None if end is None else end.decode_worker_seconds,
            "gpu_hours": None
            if end is None
            else (end.prefill_worker_seconds * prefill_gpus + end.decode_worker_seconds * decode_gpus) / 3600.0,
            **self._completed.summary(self._phases.measured_ms),
            **((self._started.agentic if self._started is not None else None) or {}),
        }
        plays = self._plays.summary(self._phases.start_ms or 0.0)
        in_flight = sum(track.arrival.preparation is None for track in self._live.values())
        fields |= plays | self._phases.summary(plays.get("agentic_play_outcomes", []), in_flight)
        if info.shared_pool is not None:
            fields["g2_domains"] = [self._pool(info.shared_pool).figures()]
        return fields

    # Requests ------------------------------------------------------------------------------------------------------

    def _arrived(self, time_ms: float, event: RequestArrived) -> None:
        if event.request != self._arrivals:
            raise InvariantViolation(f"request {event.request} arrived, expected {self._arrivals}")
        self._arrivals += 1
        self._live[event.request] = RequestTrack(event, time_ms)
        self._phases.arrived(time_ms, event)
        if event.preparation is not None:
            return
        self._released += 1
        if event.play_id is not None:
            self._plays.arrived(time_ms, event)

    def _placed(self, time_ms: float, event: RequestPlaced) -> None:
        self._track(event.request, "placed").placements.append((time_ms, event))

    def _admitted(self, time_ms: float, event: RequestAdmitted) -> None:
        track, rank, pool = self._track(event.request, "admitted"), self._rank(event), POOL_OF_ROLE[event.role]
        if track.admitted_in(pool) is not event.readmission:
            raise InvariantViolation(f"request {event.request}: readmission={event.readmission} in pool {pool}")
        if pool == DECODE_POOL and not track.admissions:
            raise InvariantViolation(f"request {event.request}: admitted for decode but never for its prompt")
        scheduler = event.worker * self._dp_size[event.role] + event.dp_rank
        track.admissions.append(Admission(pool, scheduler, time_ms, event))
        if event.readmission:
            rank.readmissions += 1
            rank.readmission_reused_tokens += event.reused_tokens
            return
        rank.requests += 1
        if event.role != _PREFILL_ROLE:
            self._token_times_ms[event.request] = track.token_times_ms

    def _preempted(self, _: float, event: RequestPreempted) -> None:
        self._track(event.request, "preempted")
        self._rank(event).preemptions += 1

    def _pass_ended(self, time_ms: float, event: PassEnded) -> None:
        if self._passes_gave_tokens(event, 1):
            times_ms = self._token_times_ms
            try:
                for request in event.emitted:
                    times_ms[request].append(time_ms)
            except KeyError as missing:
                raise self._token_without_admission(missing.args[0]) from None

    def _passes_ended(self, _: float, event: PassesEnded) -> None:
        ends_ms = event.ends_ms
        if self._passes_gave_tokens(event, len(ends_ms)):
            times_ms = self._token_times_ms
            try:
                for request in event.emitted:
                    times_ms[request].extend(ends_ms)
            except KeyError as missing:
                raise self._token_without_admission(missing.args[0]) from None

    def _passes_gave_tokens(self, event: PassEnded | PassesEnded, passes: int) -> bool:
        """Count passes that did the same; whether their tokens are visible ones.

        With separate pools decode makes all visible tokens; what a prefill pass produced is dropped.
        """
        rank = self._rank(event)
        rank.passes += passes
        rank.prefill_tokens += event.prefill_tokens * passes
        if not event.emitted or event.role == _PREFILL_ROLE:
            return False
        rank.output_tokens += len(event.emitted) * passes
        return True

    def _token_without_admission(self, request: int) -> InvariantViolation:
        self._track(request, "given a token")
        return InvariantViolation(f"request {request}: given a token before its admission")

    def _ended(self, time_ms: float, event: RequestEnded) -> None:
        track = self._track(event.request, "ended")
        if event.status not in self._ends:
            raise InvariantViolation(f"request {event.request}: unknown status {event.status!r}")
        del self._live[event.request]
        self._token_times_ms.pop(event.request, None)
        if event.status == RequestStatus.REJECTED:
            self._largest_rejected_tokens = max(self._largest_rejected_tokens, track.arrival.input_tokens)
        end = EndedRequest.of(track, event.status, time_ms)
        settled = not self._departures.ended(event, track.arrival)
        self._phases.ended(end, settled=settled)
        if track.arrival.preparation is not None:
            return
        self._ends[event.status] += 1
        if event.status == RequestStatus.COMPLETED and track.admissions:
            self._completed.add(end)
            self._book_prompt(end)
        if track.arrival.play_id is not None:
            self._plays.ended(time_ms, track.arrival, event.status, settled=settled)
        if HANDOFF_STEPS[0] in track.handoff_ms and event.status == RequestStatus.COMPLETED:
            self._closing[event.request] = end
            if HANDOFF_STEPS[-1] not in track.handoff_ms:
                return
        self._write_row(end)

    def _lost(self, _: float, event: RequestLost) -> None:
        """A request was lost with a worker; if it begins anew, what it left there before its end is no news."""
        self._departures.begins_anew(event.request)
        self._membership.lost(event)

    def _left_servers(self, time_ms: float, event: SourceReleased | CanceledRequestLeft) -> None:
        arrival = self._departures.left(event, has_ended=event.request not in self._live)
        if arrival is None:
            return
        self._phases.left(time_ms, arrival)
        if arrival.preparation is None and arrival.play_id is not None and not self._phases.finished:
            self._plays.left(time_ms, arrival)

    def _recycled(self, time_ms: float, event: PlayRecycled) -> None:
        self._phases.recycled(time_ms, event)
        self._plays.recycled(time_ms, event)

    def _admission_closed(self, time_ms: float, event: AdmissionClosed) -> None:
        self._phases.closed(time_ms, event)
        self._plays.closed(event)

    def _prepared(self, time_ms: float, event: PreparationEnded) -> None:
        """What counts starts here: nothing that preparation did does."""
        self._phases.prepared(time_ms, event)
        self._plays.opened(time_ms)
        self._ranks = {key: _RankCounts() for key in self._ranks}

    def _write_row(self, end: EndedRequest) -> None:
        self._closing.pop(end.track.arrival.request, None)
        if self._on_row is not None:
            self._on_row(self._phases.row(end.row(self._block_size_tokens)))

    def _handoff_step(self, name: str, time_ms: float, request: int) -> None:
        """Note an instant of a hand-off. The release can come after the request's end, and its row waits for it."""
        end = self._closing.get(request)
        track = end.track if end is not None else self._track(request, f"handed over ({name})")
        track.handoff_ms.setdefault(name, time_ms)
        if end is not None and name == HANDOFF_STEPS[-1]:
            self._write_row(end)

    def _released_source(self, time_ms: float, event: SourceReleased) -> None:
        # Rows of requests that were canceled do not wait for it, and preparation requests have none.
        if not event.canceled and (event.request in self._live or event.request in self._closing):
            self._handoff_step("source_released_ms", time_ms, event.request)
        self._left_servers(time_ms, event)

    def _book_prompt(self, end: EndedRequest) -> None:
        """Where a completed request's prompt tokens came from, as its first admission for the prompt found them."""
        asked = end.track.arrival.input_tokens
        first = end.admissions_in(decode=False)[0].event
        from_g2 = first.host_tokens or 0
        from_g1 = first.reused_tokens - from_g2
        computed = asked - first.reused_tokens
        if min(from_g1, from_g2, computed) < 0 or first.g1_tokens not in (None, from_g1):
            raise InvariantViolation(f"request {first.request}: {asked} prompt tokens asked, admitted with {first}")
        rank = self._rank(first)
        rank.prompt_tokens_asked += asked
        rank.prompt_tokens_from_g1 += from_g1
        rank.prompt_tokens_from_g2 += from_g2
        rank.prompt_tokens_computed += computed

    # Host pools and the run ----------------------------------------------------------------------------------------

    def _load_queued(self, time_ms: float, event: LoadQueued) -> None:
        self._pool(event.pool).load_queued(event)
        track = self._track(event.request, "loaded")
        if not track.admissions and track.load_queued_ms is None:
            track.load_queued_ms = time_ms

    def _load_finished(self, time_ms: float, event: LoadFinished) -> None:
        request = self._pool(event.pool).load_finished(event)
        track = self._live.get(request)  # may have ended: a canceled request's copy runs on
        if track is not None and not track.admissions:
            track.load_finished_ms = time_ms

    def _run_started(self, _: float, event: RunStarted) -> None:
        if self._started is not None or self._released:
            raise InvariantViolation("the run started twice or after its first request")
        self._started = event
        self._plays.announce(event.play_ids)
        self._phases.begin(event.agentic or {})

    def _run_finished(self, _: float, event: RunFinished) -> None:
        if self._finished is not None:
            raise InvariantViolation("the run finished twice")
        self._finished = event
        for end in list(self._closing.values()):
            self._write_row(end)

    # Look-ups ------------------------------------------------------------------------------------------------------

    def _track(self, request: int, doing: str) -> RequestTrack:
        track = self._live.get(request)
        if track is None:
            when = "after its end" if 0 <= request < self._released else "but never arrived"
            raise InvariantViolation(f"request {request}: {doing} {when}")
        return track

    def _rank(self, event: RequestAdmitted | RequestPreempted | PassEnded | PassesEnded) -> _RankCounts:
        rank = self._ranks.get((event.role, event.worker, event.dp_rank))
        if rank is None:
            raise InvariantViolation(f"no rank {event.role}-{event.worker}/{event.dp_rank} in this deployment")
        return rank

    def _pool(self, name: str) -> _HostPool:
        pool = self._pools.get(name)
        if pool is None:
            raise InvariantViolation(f"no host pool {name!r} in this deployment")
        return pool


def report_text(report: Report) -> str:
    """Text of ``report.json``: sorted keys, shortest round-trip floats.

    Raises: ValueError for NaN or an infinity.
    """
    return json.dumps(report, sort_keys=True, indent=1, allow_nan=False) + "\n"


def row_text(row: dict[str, Any]) -> str:
    """One line of ``requests.jsonl``.

    Raises: ValueError for NaN or an infinity.
    """
    return (_common_text(row) or _encode_row(row)) + "\n"


def _common_text(row: dict[str, Any]) -> str | None:
    """As ``_encode_row``, in half its time; None for a row with anything in it that is not in all others, too."""
    if not _is_common(row):
        return None
    try:
        text: str = _encode_common(row).decode()
    except ValueError:  # a string that is not Unicode
        return None
    return text if text.isascii() and text.isprintable() and "\\" not in text else None


_encode_row = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode
_encode_common = msgspec.json.Encoder(order="sorted").encode


def _is_common(value: dict[str, Any]) -> bool:
    """Whether a row has no values but strings, and those that both writers of JSON write alike."""
    for item in value.values():
        kind = type(item)
        if item is None or kind is int or kind is str or kind is bool:
            continue
        if kind is float:
            # Others are written with an exponent, or cannot be.
            if not (1e-4 <= item < 1e16 or item == 0.0):
                return False
        elif kind is dict:
            if not _is_common(item):
                return False
        elif kind is list:
            for part in item:
                if type(part) is not dict or not _is_common(part):
                    return False
        else:
            return False
    return True


# The table for people ----------------------------------------------------------------------------------------------

_TABLE_COLUMNS = 100
_DECODE_NOTE = "decode ranks receive prompts from the prefill pool and ask for none"


def render_table(report: Report) -> str:
    """The report's main figures as text of at most 100 columns."""
    summary, requests = report["summary"], report["requests"]
    head = [f"g2sim {report['version']}  scenario {report['scenario']}  seed {report['seed']}"]
    if not report["finished"]:
        head.append("the log ends before the run does: figures up to there")
    elif report["stopped_at_limit"]:
        head.append("stopped at the virtual time limit")
    head.append("requests: " + ", ".join(f"{count} {name}" for name, count in requests.items()))
    if "total_trajectories" in summary:
        outcomes = [outcome["status"] for outcome in summary["agentic_play_outcomes"]]
        head.append("plays: " + ", ".join(f"{outcomes.count(s)} {s}" for s in ("completed", "failed", "incomplete")))
    head.append(
        f"duration {summary['duration_ms']:.3f} ms, {summary['request_throughput_rps']:.3f} requests/s, "
        f"{summary['output_throughput_tok_s']:.3f} output tokens/s"
    )
    blocks = ["\n".join(line[:_TABLE_COLUMNS] for line in head), _rank_table(report), _latency_table(report)]
    if report["g2_pools"]:
        blocks.append(_pool_table(report))
    if "event_plane" in report:
        blocks.append(event_plane_table(report["event_plane"]))
    if "membership" in report:
        blocks.append(membership_table(report["membership"]))
    if "routers" in report:
        blocks.append(replicas_table(report["routers"]))
    return "\n\n".join(blocks) + "\n"


def _rank_table(report: Report) -> str:
    names = RANK_COLUMNS
    rows = [
        [f"{rank['pool']}-{rank['worker']}/{rank['dp_rank']}", *(rank[name] for name in names)]
        for rank in report["workers"]
    ]
    rows.append(["sum", *(report["totals"][name] for name in names)])
    table = tabulate(rows, headers=["rank", *names.values()])
    note = f"\n{_DECODE_NOTE}" if any(rank["pool"] == DECODE_POOL for rank in report["workers"]) else ""
    return f"prompt tokens of completed requests\n{table}{note}"


def _latency_table(report: Report) -> str:
    summary = report["summary"]
    columns = ("mean", "median", "p90", "p99", "max")
    rows = [
        [label, samples := summary[f"num_{metric}_samples"]]
        + [summary[f"{column}_{metric}_ms"] if samples else None for column in columns]
        for label, metric in (("TTFT", "ttft"), ("TPOT", "tpot"), ("E2E", "e2e_latency"))
    ]
    headers = ["latency", "samples", *(f"{'p50' if column == 'median' else column} [ms]" for column in columns)]
    table = tabulate(rows, headers=headers, floatfmt=".3f", missingval="-")
    parts = ", ".join(f"{name} {spent_ms:.3f}" for name, spent_ms in report["ttft_parts_mean_ms"].items())
    return f"{table}\nmean TTFT is [ms]: {parts}" if parts else table


def _pool_table(report: Report) -> str:
    rows = [[pool["pool"], *(pool[name] for name in POOL_COLUMNS)] for pool in report["g2_pools"]]
    return tabulate(rows, headers=["G2 pool [blocks]", *POOL_COLUMNS.values()])


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
