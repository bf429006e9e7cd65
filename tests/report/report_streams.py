"""Builds event streams for the report's tests: valid events with defaults, and streams made from recordings."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from g2sim.actors.config import SlaConfig, WorkerRole
from g2sim.actors.router.events import RequestPlaced
from g2sim.actors.traffic.events import PlaySettled, RequestArrived, RequestSkipped
from g2sim.actors.worker.events import PassEnded, RequestAdmitted, RequestEnded
from g2sim.bus.events import Record
from g2sim.scenarios.events import RunFinished, RunStarted
from g2sim.scenarios.report import PoolInfo, Report, ReportFold, RunInfo

ORACLE = Path(__file__).parents[1] / "oracle"
ROLES = {"agg": "aggregated", "prefill": "prefill", "decode": "decode"}


def pool_info(role: str = "aggregated", **change: Any) -> PoolInfo:
    values = {
        "workers": 1,
        "dp_size": 1,
        "gpus_per_worker": 1,
        "block_size_tokens": 4,
        "gpu_blocks": 64,
        "host_tier": False,
    }
    return PoolInfo(role=WorkerRole(role), **{**values, **change})


def run_info(*pools: PoolInfo, **change: Any) -> RunInfo:
    return RunInfo(**{"name": "test", "seed": 7, "version": "0", "pools": pools or (pool_info(),), **change})


def arrived(request: int, *, at: float = 0.0, tokens: int = 8, out: int = 2, **change: Any) -> RequestArrived:
    names = ("name", "session_id", "turn_index", "uuid", "play_id", "conversation_id", "lane_id", "root_id")
    values = dict.fromkeys((*names, "parent_id", "cache_id"))
    return RequestArrived(
        request=request, arrival_ms=at, input_tokens=tokens, output_tokens=out, **{**values, **change}
    )


def placed(request: int, *, pool: str = "agg", worker: int = 0, dp_rank: int = 0, **change: Any) -> RequestPlaced:
    values = {
        "scheduler": worker,
        "outcome": "immediate",
        "queued_at_ms": None,
        "overlap_blocks": None,
        "best_overlap_blocks": None,
    }
    return RequestPlaced(request=request, pool=pool, worker=worker, dp_rank=dp_rank, **{**values, **change})


def admitted(request: int, *, role: str = "aggregated", reused: int = 0, **change: Any) -> RequestAdmitted:
    values = {"worker": 0, "dp_rank": 0, "g1_tokens": None, "host_tokens": None, "readmission": False}
    return RequestAdmitted(request=request, role=role, reused_tokens=reused, **{**values, **change})


def pass_ended(*emitted: int, role: str = "aggregated", worker: int = 0, prefill_tokens: int = 0) -> PassEnded:
    return PassEnded(worker=worker, role=role, dp_rank=0, pass_idx=0, emitted=emitted, prefill_tokens=prefill_tokens)


def ended(request: int, status: str = "completed", *, role: str = "aggregated", worker: int = 0) -> RequestEnded:
    return RequestEnded(worker=worker, role=role, dp_rank=0, request=request, status=status)


def run_finished(*, prefill: float = 0.0, decode: float = 0.0, limit: bool = False) -> RunFinished:
    return RunFinished(stopped_at_limit=limit, prefill_worker_seconds=prefill, decode_worker_seconds=decode)


def started(*play_ids: str, agentic: dict[str, Any] | None = None, notes: tuple[str, ...] = ()) -> tuple[float, Any]:
    return 0.0, RunStarted(agentic=agentic, play_ids=play_ids, notes=notes)


def fold(info: RunInfo, *timed: tuple[float, Any]) -> tuple[Report, list[dict[str, Any]]]:
    """Report and rows of a stream of (instant [ms], event)."""
    rows: list[dict[str, Any]] = []
    folding = ReportFold(info, rows.append)
    for time_ms, event in timed:
        folding.apply(Record(time_ms, "test", 0, event))
    return folding.finish(), rows


def served(request: int, *token_ms: float, at: float = 0.0, tokens: int = 8, out: int | None = None) -> list[Any]:
    """One aggregated request, admitted on arrival, that ends with its last token (or on arrival without any)."""
    return [
        (at, arrived(request, at=at, tokens=tokens, out=len(token_ms) if out is None else out)),
        (at, placed(request)),
        (at, admitted(request)),
        *((time_ms, pass_ended(request)) for time_ms in token_ms),
        (token_ms[-1] if token_ms else at, ended(request)),
    ]


def recording(folder: str, name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((ORACLE / folder / f"{name}.json").read_text())
    return loaded


def recorded_names(folder: str) -> list[str]:
    """Recordings of aggregated runs that ended, not of runs that the reference gave up.

    Hand-offs have more instants than a recording has rows for; tests/oracle checks those end to end.
    """
    cases = {path.stem: json.loads(path.read_text()) for path in sorted((ORACLE / folder).glob("*.json"))}
    return [
        name
        for name, case in cases.items()
        if "summary" in case.get("expected", {}) and "num_prefill_workers" not in case["call"]
    ]


def recorded_info(case: dict[str, Any], **change: Any) -> RunInfo:
    """Run info of a recorded call."""
    call = case["call"]
    pools = []
    for role, engine, workers in (
        ("aggregated", "extra_engine_args", "num_workers"),
        ("prefill", "prefill_engine_args", "num_prefill_workers"),
        ("decode", "decode_engine_args", "num_decode_workers"),
    ):
        if engine in call:
            rank, dp_size = call[engine]["engine"], call[engine].get("dp_size", 1)
            pools.append(
                pool_info(
                    role,
                    workers=call.get(workers, 1),
                    dp_size=dp_size,
                    gpus_per_worker=dp_size,
                    block_size_tokens=rank["block_size"],
                    gpu_blocks=rank["num_gpu_blocks"],
                    host_tier="native_host_offload" in rank,
                )
            )
    limits = {key: call.get(f"sla_{key}") for key in ("ttft_ms", "itl_ms", "e2e_ms")}
    sla = SlaConfig(**limits) if any(limits.values()) else None
    return run_info(*pools, sla=sla, **change)


def recorded_stream(
    requests: list[dict[str, Any]],
    token_times_ms: list[list[float]],
    *,
    dp_size: int = 1,
    unfinished: int = 0,
    play_events: Sequence[tuple[float, RequestSkipped | PlaySettled]] = (),
    waves: Mapping[str, float] = MappingProxyType({}),
) -> list[tuple[float, Any]]:
    """A stream that says of each request what was recorded.

    At one instant a run shows tokens and ends of passes, then what follows from the ends, then arrivals, placements and
    admissions, then the results of passes that take no time. Passes are not recorded: each token has one of its own.

    Args:
        requests: recorded requests in order of termination, ``token_times_ms`` beside them.
        dp_size: ranks of a worker.
        unfinished: requests to add at the end that never end.
        play_events: what the traffic said after ends.
        waves: request id -> place among the dispatches of its instant, where ordinals do not tell: 1 follows all the
            results of passes that take no time, a fraction only shifts it among arrivals.
    """
    timed: list[tuple[float, int, float, Any]] = []
    wave = [waves.get(request.get("request_id", ""), 0.0) for request in requests]
    arrivals = sorted(
        range(len(requests)), key=lambda k: (requests[k]["arrival_time_ms"], wave[k], requests[k].get("uuid", ""))
    )
    instant_plays = set()
    for number, k in enumerate(arrivals):
        request = requests[k]
        places, admissions, at = _places(request, dp_size), _admissions(request), request["arrival_time_ms"]
        begun = {at, *(entry["at_ms"] for entry in admissions)}
        late = 10 * int(wave[k])
        timed.append((at, late + 4, number, _arrival(number, request)))
        for pool, (worker, dp_rank) in places.items():
            index = request["prefill_worker_idx" if pool == "prefill" else "decode_worker_idx"]
            event = placed(number, pool=pool, scheduler=index or 0, worker=worker, dp_rank=dp_rank)
            timed.append((at, late + 5, number, event))
        for entry in admissions:
            worker, dp_rank = places[entry["pool"]]
            event = admitted(
                number,
                role=ROLES[entry["pool"]],
                worker=worker,
                dp_rank=dp_rank,
                reused=entry["reused_input_tokens"],
                g1_tokens=entry.get("g1_reused_input_tokens"),
                host_tokens=entry.get("host_reused_input_tokens"),
                readmission=entry["is_readmission"],
            )
            timed.append((entry["at_ms"], late + 6 if entry["at_ms"] == at else 6, number, event))
        pool = list(places)[-1]
        for time_ms in token_times_ms[k]:
            event = pass_ended(number, role=ROLES[pool], worker=places[pool][0])
            timed.append((time_ms, 7 if time_ms in begun else 0, k, event))
        end_ms = request["terminal_time_ms"]
        end = ended(number, request["terminal_status"], role=ROLES[pool], worker=places[pool][0])
        timed.append((end_ms, 8 if end_ms in begun else 1, k, end))
        if end_ms in begun:
            instant_plays.add(request.get("play_id"))
    for number in range(len(requests), len(requests) + unfinished):
        at = requests[arrivals[-1]]["arrival_time_ms"]
        timed.append((at, 4, number, arrived(number, at=at)))
    for time_ms, event in play_events:
        timed.append((time_ms, 9 if event.play_id in instant_plays else 2, 0, event))
    return [(time_ms, event) for time_ms, _, _, event in sorted(timed, key=lambda item: item[:3])]


def _arrival(number: int, request: dict[str, Any]) -> RequestArrived:
    identity = dict(request.get("agentic") or {})
    if identity:
        identity |= {"name": request["request_id"], "uuid": uuid.UUID(request["uuid"]).hex}
        del identity["request_id"]
    return arrived(
        number,
        at=request["arrival_time_ms"],
        tokens=request["input_length"],
        out=request.get("requested_output_length", request["output_length"]),
        session_id=request.get("session_id"),
        turn_index=request.get("turn_index"),
        **identity,
    )


def _places(request: dict[str, Any], dp_size: int) -> dict[str, tuple[int, int]]:
    """Pool -> (worker, rank), from whichever form the recording has."""
    if "route" in request:
        return {pool: (worker, dp_rank) for pool, worker, dp_rank in request["route"]}
    schedulers = {"prefill": request.get("prefill_worker_idx"), "decode": request["decode_worker_idx"]}
    if schedulers["prefill"] is None:
        schedulers = {"agg": request["decode_worker_idx"]}
    return {pool: divmod(scheduler, dp_size) for pool, scheduler in schedulers.items()}


def _admissions(request: dict[str, Any]) -> list[dict[str, Any]]:
    """Admissions as objects; one without reuse where the recording only has the first admission's time."""
    if "admissions" not in request:
        if request["first_admit_ms"] is None:
            return []
        reused = request["reused_input_tokens"]
        host = request.get("first_admission_host_reused_input_tokens")
        return [
            {
                "pool": "agg",
                "at_ms": request["first_admit_ms"],
                "reused_input_tokens": reused,
                "g1_reused_input_tokens": None if host is None else reused - host,
                "host_reused_input_tokens": host,
                "is_readmission": False,
            }
        ]
    names = ("pool", "at_ms", "reused_input_tokens", "is_readmission")
    return [
        entry if isinstance(entry, dict) else dict(zip(names, entry, strict=True)) for entry in request["admissions"]
    ]
