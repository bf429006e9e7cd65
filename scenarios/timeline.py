"""A run as a trace for ui.perfetto.dev and chrome://tracing (Trace Event Format, JSON object form).

Owns: which tracks there are, and what stands on them. Refuses to know: what begins and ends a span (``spans``).

Processes: one for each router, each worker (a thread a rank, with its passes), and each link. Transfers that overlap
go on lanes of their own, since slices of one thread must nest. A request is an asynchronous track, one slice a phase,
in the worker it is on. A flow leads from a request's placement, by way of its transfers, to the pass that made its
first token. Counters show G1 and G2 residency [blocks].

Events are written in log order, so a slice stands where it ends; viewers order them by their time. ``ts`` and ``dur``
are microseconds with three decimals: pass times are whole nanoseconds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TextIO

from g2sim.actors.config import WorkerRole
from g2sim.actors.router.events import RequestPlaced
from g2sim.actors.traffic.events import RequestArrived
from g2sim.scenarios.run import LogReport, report_of_log
from g2sim.scenarios.schema import Scenario
from g2sim.scenarios.spans import STORE, Pass, SpanFold, SpanSink, Transfer, rank_name

_ROLE_OF_POOL = {role.pool_name: role.value for role in WorkerRole}


def write_timeline(path: Path, scenario: Scenario, file: TextIO) -> LogReport:
    """Write the trace of a run. Returns what its log says of it.

    Args:
        path: a run folder or a log.
        scenario: what was run, see ``scenario_of_log``.
    Raises: as ``report_of_log``.
    """
    sink = _Trace(file)
    spans = SpanFold(sink)
    file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
    log = report_of_log(path, on_record=spans.apply)
    spans.finish()
    about = {
        "program": "g2sim",
        "version": log.report["version"],
        "scenario": scenario.name,
        "seed": log.report["seed"],
    }
    file.write(f'\n],"otherData":{_encode(about)}}}\n')
    return log


def _us(time_ms: float) -> float:
    return round(time_ms * 1000.0, 3)


class _Tracks:
    """Numbers of processes and threads, announced when they are first used."""

    def __init__(self, trace: _Trace) -> None:
        self._trace = trace
        self._pids: dict[str, int] = {}
        self._tids: dict[tuple[int, str], int] = {}

    def process(self, name: str) -> int:
        pid = self._pids.get(name)
        if pid is None:
            pid = self._pids[name] = len(self._pids) + 1
            self._trace.write({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
            self._trace.write({"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}})
        return pid

    def thread(self, process: str, name: str) -> dict[str, int]:
        pid = self.process(process)
        tid = self._tids.get((pid, name))
        if tid is None:
            tid = self._tids[pid, name] = len(self._tids) + 1
            self._trace.write({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}})
        return {"pid": pid, "tid": tid}


class _Trace(SpanSink):
    """Writes spans as trace events as they end."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._separator = ""
        self._tracks = _Tracks(self)
        self._lanes: dict[tuple[str, str], list[float]] = {}  # end of the last transfer on each lane [us]
        self._flows: set[int] = set()  # requests whose flow has begun and not ended
        self._names: dict[int, str] = {}

    def write(self, event: dict[str, Any]) -> None:
        self._file.write(self._separator + _encode(event))
        self._separator = ",\n"

    # -- spans

    def arrived(self, time_ms: float, event: RequestArrived) -> None:
        self._names[event.request] = f"request {event.request}" + (f" {event.name}" if event.name else "")

    def placed(self, time_ms: float, event: RequestPlaced) -> None:
        track = self._tracks.thread(f"router {event.pool}", "placements")
        since_us = _us(time_ms if event.queued_at_ms is None else event.queued_at_ms)
        rank = rank_name(_ROLE_OF_POOL[event.pool], event.worker, event.dp_rank)
        args = {
            "request": event.request,
            "rank": rank,
            "queued_us": round(_us(time_ms) - since_us, 3),
            "overlap_blocks": event.overlap_blocks,
            "best_overlap_blocks": event.best_overlap_blocks,
        }
        # Waits overlap, so they are arguments and the slice is the instant of the placement.
        self._slice(track, f"{event.request} to {rank}", "placement", _us(time_ms), _us(time_ms), args)
        if event.request not in self._flows:
            self._flows.add(event.request)
            self._flow("s", event.request, track, _us(time_ms))

    def phase(self, request: int, name: str, rank: str | None, start_ms: float, end_ms: float) -> None:
        if end_ms <= start_ms:
            return
        pid = self._tracks.process(_worker_of(rank) if rank is not None else "waiting in a router")
        for mark, time_ms in (("b", start_ms), ("e", end_ms)):
            self.write(
                {
                    "ph": mark,
                    "cat": "request",
                    "id": request,
                    "name": name,
                    "pid": pid,
                    "tid": 0,
                    "ts": _us(time_ms),
                    **({"args": {"request": self._names[request]}} if mark == "b" else {}),
                }
            )

    def passed(self, span: Pass, first_tokens: list[int]) -> None:
        track = self._tracks.thread(_worker_of(span.rank), f"rank {span.rank} passes")
        args = {
            "pass_idx": span.started.pass_idx,
            "compute_start_us": _us(span.started.compute_start_ms),
            "own_end_us": _us(span.started.end_ms),
            "scheduled_tokens": span.started.scheduled_tokens,
            "scheduled_requests": span.started.scheduled_requests,
            "prefill_tokens": span.ended.prefill_tokens,
            "tokens_made": len(span.ended.emitted),
        }
        name = "prefill" if span.ended.prefill_tokens else "decode"
        self._slice(track, name, "pass", _us(span.start_ms), _us(span.end_ms), args)
        for request in first_tokens:
            self._flows.discard(request)
            self._flow("f", request, track, _us(span.end_ms))

    def transferred(self, span: Transfer) -> None:
        start_us, end_us = _us(span.start_ms), _us(span.end_ms)
        lane = self._lane(span, start_us, end_us)
        name = span.kind if span.link == span.kind else f"pool {span.link}"
        track = self._tracks.thread(name, f"{span.kind} {lane}")
        args = {"request": span.request, "rank": span.rank, "amount": span.amount, "done": span.done}
        self._slice(track, f"{span.kind} for {span.request}", "transfer", start_us, end_us, args)
        if span.request in self._flows and span.kind != STORE:
            self._flow("t", span.request, track, start_us)

    def device_blocks(self, time_ms: float, rank: str, resident: int) -> None:
        self._counter(_worker_of(rank), f"G1 {rank} [blocks]", time_ms, {"resident": resident})

    def host_blocks(self, time_ms: float, pool: str, resident: int, used: int) -> None:
        values = {"resident": resident, "store under way": used - resident}
        self._counter(f"pool {pool}", f"{pool} [blocks]", time_ms, values)

    def ended(self, time_ms: float, request: int, status: str | None) -> None:
        self._flows.discard(request)
        del self._names[request]

    # -- events

    def _slice(self, track: dict[str, int], name: str, cat: str, start_us: float, end_us: float, args: Any) -> None:
        duration_us = round(end_us - start_us, 3)
        self.write({"ph": "X", "name": name, "cat": cat, **track, "ts": start_us, "dur": duration_us, "args": args})

    def _flow(self, mark: str, request: int, track: dict[str, int], at_us: float) -> None:
        bound = {"bp": "e"} if mark == "f" else {}  # ends at the slice around it, not at the next one
        self.write(
            {"ph": mark, "cat": "first token", "name": "first token", "id": request, **track, "ts": at_us, **bound}
        )

    def _counter(self, process: str, name: str, time_ms: float, values: dict[str, int]) -> None:
        pid = self._tracks.process(process)
        self.write({"ph": "C", "name": name, "pid": pid, "ts": _us(time_ms), "args": values})

    def _lane(self, span: Transfer, start_us: float, end_us: float) -> int:
        """The first lane that is free for a transfer."""
        ends = self._lanes.setdefault((span.link, span.kind), [])
        for lane, free_us in enumerate(ends):
            if free_us <= start_us:
                ends[lane] = end_us
                return lane + 1
        ends.append(end_us)
        return len(ends)


def _worker_of(rank: str) -> str:
    return f"worker {rank.rpartition('/')[0]}"


_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
