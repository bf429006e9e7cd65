"""The trace of a run, read as a viewer reads it."""

from __future__ import annotations

import io
import itertools
import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_process import Cli

from g2sim.scenarios.run import scenario_of_log
from g2sim.scenarios.timeline import write_timeline

RunOf = Callable[[str], Path]
Trace = dict[str, Any]
RUNS = ("demo", "separate")
_READ: dict[Path, Trace] = {}


def trace_of(run: Path) -> Trace:
    if run not in _READ:
        file = io.StringIO()
        write_timeline(run, scenario_of_log(run), file)
        _READ[run] = json.loads(file.getvalue(), parse_constant=pytest.fail)  # NaN is no JSON
    return _READ[run]


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "requests.jsonl").read_text().splitlines()]


def by_kind(trace: Trace) -> dict[str, list[dict[str, Any]]]:
    kinds: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        kinds[event["ph"]].append(event)
    return kinds


def names(trace: Trace) -> tuple[dict[int, str], dict[tuple[int, int], str]]:
    """Names of processes, and of threads."""
    meta = by_kind(trace)["M"]
    processes = {event["pid"]: event["args"]["name"] for event in meta if event["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in meta if e["name"] == "thread_name"}
    return processes, threads


def test_there_is_a_track_for_each_rank_pool_link_and_router(run_of: RunOf) -> None:
    processes, threads = names(trace_of(run_of("separate")))
    assert set(processes.values()) - {"waiting in a router"} == {
        "router prefill",
        "router decode",
        "worker prefill-0",
        "worker prefill-1",
        "worker decode-0",
        "worker decode-1",
        "pool g2",
        "handoff",
    }
    tracks = {(processes[pid], name) for (pid, _), name in threads.items()}
    for worker in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
        assert (f"worker {worker}", f"rank {worker}/0 passes") in tracks
    assert {("pool g2", "store 1"), ("pool g2", "load 1"), ("handoff", "handoff 1")} <= tracks
    assert {("router prefill", "placements"), ("router decode", "placements")} <= tracks


@pytest.mark.parametrize("name", RUNS)
def test_every_event_is_well_formed_and_slices_of_a_thread_do_not_overlap(run_of: RunOf, name: str) -> None:
    trace = trace_of(run_of(name))
    kinds, (processes, threads) = by_kind(trace), names(trace)
    assert kinds.keys() <= {"M", "X", "s", "t", "f", "b", "e", "C"}
    assert len(set(processes.values())) == len(processes)
    assert len(set(threads)) == len(threads)
    for event in trace["traceEvents"]:
        assert event["pid"] in processes
        assert event["ph"] == "M" or event["ts"] >= 0
    slices = defaultdict(list)
    for event in kinds["X"]:
        assert event["dur"] >= 0
        slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert slices.keys() <= threads.keys()
    for spans in slices.values():
        spans.sort()
        assert all(before[1] <= after[0] + 0.001 for before, after in itertools.pairwise(spans))


@pytest.mark.parametrize("name", RUNS)
def test_slices_are_the_passes_and_transfers_of_the_report(run_of: RunOf, name: str) -> None:
    run = run_of(name)
    report = json.loads((run / "report.json").read_text())
    slices = by_kind(trace_of(run))["X"]
    passes = [event for event in slices if event["cat"] == "pass"]
    assert len(passes) == report["totals"]["passes"]
    assert sum(event["args"]["prefill_tokens"] for event in passes) == report["totals"]["prefill_tokens"]
    for kind in ("store", "load"):
        moved = sum(e["args"]["amount"] for e in slices if e["name"].startswith(f"{kind} for") and e["args"]["done"])
        field = {"store": "stored_blocks", "load": "loaded_blocks"}[kind]
        assert moved == sum(pool[field] for pool in report["g2_pools"])
    placed = [event for event in slices if event["cat"] == "placement"]
    assert len(placed) == sum(len(row["routing_history"]) for row in rows_of(run))


@pytest.mark.parametrize("name", RUNS)
def test_a_flow_leads_from_each_placement_to_the_pass_of_the_first_token(run_of: RunOf, name: str) -> None:
    run = run_of(name)
    kinds = by_kind(trace_of(run))
    passes = defaultdict(list)
    for event in kinds["X"]:
        if event["cat"] == "pass":
            passes[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    ends_on = {key: {round(end, 3) for _, end in spans} for key, spans in passes.items()}
    starts = {event["id"]: event for event in kinds["s"]}
    ends = {event["id"]: event for event in kinds["f"]}
    rows = rows_of(run)
    assert len(kinds["s"]) == len(starts)
    assert starts.keys() == {row["request"] for row in rows if row["routing_history"]}
    assert ends.keys() == {row["request"] for row in rows if row["first_token_ms"] is not None}
    for row in (row for row in rows if row["request"] in ends):
        start, end = starts[row["request"]], ends[row["request"]]
        assert end["bp"] == "e"
        assert abs(end["ts"] - row["first_token_ms"] * 1000) <= 0.001
        assert round(end["ts"], 3) in ends_on[end["pid"], end["tid"]]
        assert row["arrival_time_ms"] * 1000 - 0.001 <= start["ts"] <= end["ts"]
    for step in kinds["t"]:
        assert starts[step["id"]]["ts"] <= step["ts"]
        assert step["id"] not in ends or step["ts"] <= ends[step["id"]]["ts"]
    loaded = {row["request"] for row in rows if row["host_load_queued_ms"] is not None}
    assert loaded <= {step["id"] for step in kinds["t"]}


@pytest.mark.parametrize("name", RUNS)
def test_request_tracks_open_and_close_in_turn(run_of: RunOf, name: str) -> None:
    open_phase: dict[int, tuple[str, float]] = {}
    for event in trace_of(run_of(name))["traceEvents"]:
        if event["ph"] == "b":
            assert event["id"] not in open_phase
            open_phase[event["id"]] = event["name"], event["ts"]
        elif event["ph"] == "e":
            phase, since = open_phase.pop(event["id"])
            assert phase == event["name"]
            assert event["ts"] >= since
    assert not open_phase


def test_counters_end_at_the_report_s_levels(run_of: RunOf) -> None:
    run = run_of("demo")
    report = json.loads((run / "report.json").read_text())
    last = {event["name"]: event["args"] for event in by_kind(trace_of(run))["C"]}
    (pool,) = report["g2_pools"]
    assert last["g2 [blocks]"] == {
        "resident": pool["resident_blocks"],
        "store under way": pool["used_blocks"] - pool["resident_blocks"],
    }
    assert {"G1 agg-0/0 [blocks]", "G1 agg-1/0 [blocks]"} <= last.keys()


def test_the_command_writes_the_same_bytes_in_every_process(run_of: RunOf, g2sim: Cli, tmp_path: Path) -> None:
    for seed in (1, 2):
        done = g2sim("timeline", run_of("demo"), "--out", f"{seed}.json", hash_seed=seed)
        assert (done.returncode, done.stdout, done.stderr) == (0, f"{seed}.json\n", "")
    text = (tmp_path / "1.json").read_text()
    assert text == (tmp_path / "2.json").read_text()
    assert json.loads(text) == trace_of(run_of("demo"))
    assert json.loads(text)["otherData"]["scenario"] == "agentx-g2-shared"
