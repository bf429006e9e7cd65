"""Plays in the report: outcomes, trajectories and the lifecycle digest, against recordings of the reference."""

from __future__ import annotations

from typing import Any

import pytest
from blake3 import blake3
from report_streams import (
    admitted,
    arrived,
    ended,
    fold,
    pass_ended,
    placed,
    pool_info,
    recorded_names,
    recorded_stream,
    recording,
    run_info,
    served,
    started,
)

from g2sim.actors.traffic.events import PlaySettled, RequestSkipped
from g2sim.bus.errors import InvariantViolation
from g2sim.scenarios.report import Report

LATER = {"agentic_phases", "agentic_profile"}
"""Warmup and profile runs need events that do not exist yet."""
RECORDED = [
    name
    for name in recorded_names("workload")
    if "agentic_graph" in (summary := recording("workload", name)["expected"]["summary"]) and not LATER & summary.keys()
]
WAVES = {
    "am_same_instant_order": {"r10": 0.1, "r2": 0.2, "r1": 0.3},  # r1 is released by the dispatch of r2
    "am_zero_output_cached": {"c": 1},  # released by the end of b, which takes no time
}
EXACT = (
    "agentic_lifecycle_event_count",
    "agentic_lifecycle_digest",
    "agentic_play_outcomes",
    "total_trajectories",
    "completed_trajectories",
    "incomplete_trajectories",
)


def settled(play_id: str, status: str = "completed", request: str | None = None, why: str | None = None) -> PlaySettled:
    return PlaySettled(play_id=play_id, lane_id=None, status=status, failure_request_id=request, failure_status=why)


def agentic(request: int, name: str, *, play: str = "p", at: float = 0.0, **change: Any) -> Any:
    return arrived(request, at=at, name=name, play_id=play, conversation_id="s", uuid=f"{request + 1:032x}", **change)


def lifecycle_digest(*lines: str) -> str:
    """Digest of lifecycle lines, each given from its ``at_ms`` on."""
    start = '{"schema":"aisimulate.agentic.lifecycle.v1","ordinal":'
    body = "".join(f"{start}{ordinal},{line}}}\n" for ordinal, line in enumerate(lines))
    return blake3(b"aisimulate-agentic-lifecycle-v1\0" + body.encode()).hexdigest()


def play_events(case: dict[str, Any]) -> list[tuple[float, Any]]:
    """What the recorded outcomes say that the traffic published."""
    dispatched = {request["request_id"] for request in case["expected"]["per_request"]}
    events: list[tuple[float, Any]] = []
    for outcome in case["expected"]["summary"]["agentic_play_outcomes"]:
        play_id, failed = outcome["play_id"], outcome.get("failure_request_id")
        if failed is not None:
            events += [
                (outcome["causal_terminal_ms"], RequestSkipped(name=row["request_id"], play_id=play_id, because=failed))
                for row in case["trace"]
                if row.get("play_id") == play_id and row["request_id"] not in dispatched
            ]
        settle = settled(play_id, outcome["status"], failed, outcome.get("failure_status"))
        events.append((outcome["settled_at_ms"], settle))
    return events


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_agentic_run_gives_the_recorded_play_fields(name: str) -> None:
    """Outcomes, trajectories and the digest over every dispatch, end, skip and settled play, and all row fields."""
    case = recording("workload", name)
    expected = case["expected"]["summary"]
    requests = sorted(
        case["expected"]["per_request"], key=lambda request: (request["terminal_time_ms"], request["uuid"])
    )
    token_times = [
        [request["first_token_ms"], *[request["last_token_ms"]] * (request["output_length"] - 1)]
        if request["output_length"]
        else []
        for request in requests
    ]
    stream = recorded_stream(requests, token_times, play_events=play_events(case), waves=WAVES.get(name, {}))
    play_ids = [outcome["play_id"] for outcome in expected["agentic_play_outcomes"]]
    graph = {"agentic_graph": expected["agentic_graph"]}
    report, rows = fold(run_info(pool_info(workers=2)), started(*play_ids, agentic=graph), *stream)
    summary = report["summary"]
    for key in (*EXACT, *graph):
        assert summary[key] == expected[key], key
    # The recorded digits of these are cut to twelve; a snapshot's trajectories begin with its activation, not told yet.
    for key in (key for key in expected if "_trajectory_" in key and not name.startswith("snapshot_")):
        assert summary[key] == pytest.approx(expected[key], rel=1e-11), key
    for row, request in zip(rows, requests, strict=True):
        assert {key: row[key] for key in request} == request


def test_the_digest_of_two_roots_is_made_of_the_seven_lines_that_the_reference_writes() -> None:
    digest = lifecycle_digest(
        '"at_ms":0.0,"play_id":"p","request_id":"a","event":"dispatch"',
        '"at_ms":3.0,"play_id":"p","request_id":"a","event":"causal_terminal","status":"completed"',
        '"at_ms":3.0,"play_id":"p","request_id":"a","event":"quiescent"',
        '"at_ms":15.0,"play_id":"p","request_id":"b","event":"dispatch"',
        '"at_ms":18.0,"play_id":"p","request_id":"b","event":"causal_terminal","status":"completed"',
        '"at_ms":18.0,"play_id":"p","request_id":"b","event":"quiescent"',
        '"at_ms":18.0,"play_id":"p","event":"play_quiescent"',
    )
    assert recording("workload", "am_two_roots")["expected"]["summary"]["agentic_lifecycle_digest"] == digest


def agentic_run(*more: tuple[float, Any]) -> Report:
    """Two plays of two requests each, all running from 0; ``more`` says how they end."""
    begun: list[tuple[float, Any]] = []
    for number, (play, name) in enumerate((("p", "a"), ("p", "b"), ("q", "a"), ("q", "b"))):
        begun += [(0.0, agentic(number, name, play=play)), (0.0, placed(number)), (0.0, admitted(number))]
    return fold(run_info(), *begun, *more)[0]


DISPATCHES = [
    f'"at_ms":0.0,"play_id":"{play}","request_id":"{name}","event":"dispatch"' for play in "pq" for name in "ab"
]


def test_ends_of_one_hand_over_are_written_by_ordinal_before_any_quiescence() -> None:
    """Worker 1's request ends first in the log; a skip follows the failure that caused it; a play its last request."""
    summary = agentic_run(
        (5.0, ended(2)),
        (5.0, ended(0, "failed")),
        (5.0, ended(1)),
        (5.0, RequestSkipped(name="c", play_id="p", because="a")),
        (5.0, settled("p", "failed", "a", "failed")),
    )["summary"]
    end = '"event":"causal_terminal","status":"{}"'.format
    assert summary["agentic_lifecycle_digest"] == lifecycle_digest(
        *DISPATCHES,
        f'"at_ms":5.0,"play_id":"p","request_id":"a",{end("failed")}',
        '"at_ms":5.0,"play_id":"p","request_id":"c","event":"skipped"',
        f'"at_ms":5.0,"play_id":"p","request_id":"b",{end("completed")}',
        f'"at_ms":5.0,"play_id":"q","request_id":"a",{end("completed")}',
        '"at_ms":5.0,"play_id":"p","request_id":"a","event":"quiescent"',
        '"at_ms":5.0,"play_id":"p","request_id":"b","event":"quiescent"',
        '"at_ms":5.0,"play_id":"p","event":"play_quiescent"',
        '"at_ms":5.0,"play_id":"q","request_id":"a","event":"quiescent"',
    )
    assert summary["agentic_lifecycle_event_count"] == 12


@pytest.mark.parametrize("between", [(5.0, settled("p")), (5.0, agentic(4, "d", play="q", at=5.0)), None])
def test_a_second_hand_over_at_one_instant_is_told_by_what_the_traffic_said_between(between: Any) -> None:
    first = [(5.0, ended(0)), (5.0, ended(1))]
    told = [] if between is None else [between]
    one, other = agentic_run(*first, *told, (5.0, ended(2))), agentic_run(*first, (5.0, ended(2)), *told)
    differ = one["summary"]["agentic_lifecycle_digest"] != other["summary"]["agentic_lifecycle_digest"]
    assert differ is (between is not None)


def test_outcomes_of_failed_and_unfinished_plays_leave_unknown_fields_out() -> None:
    """The earliest failure counts, by instant and then by ordinal; a play that never settled is incomplete."""
    report = agentic_run((3.0, ended(1, "rejected")), (4.0, ended(3, "failed")), (4.0, ended(2, "canceled")))
    assert report["summary"]["agentic_play_outcomes"] == [
        {
            "play_id": "p",
            "status": "incomplete",
            "causal_terminal_ms": 3.0,
            "failure_request_id": "b",
            "failure_status": "rejected",
        },
        {
            "play_id": "q",
            "status": "incomplete",
            "causal_terminal_ms": 4.0,
            "failure_request_id": "a",
            "failure_status": "canceled",
        },
    ]
    assert report["summary"]["completed_trajectories"] == 0
    assert report["summary"]["mean_trajectory_e2e_latency_ms"] == 0.0


def test_plays_are_listed_as_announced_also_those_that_never_began() -> None:
    stream = [(0.0, agentic(0, "a", play="z")), (0.0, agentic(1, "a", play="b"))]
    report, _ = fold(run_info(), started("a", "b"), *stream)
    outcomes = report["summary"]["agentic_play_outcomes"]
    assert [outcome["play_id"] for outcome in outcomes] == ["a", "b", "z"]
    assert outcomes[0] == {"play_id": "a", "status": "incomplete"}


def test_without_plays_there_are_no_play_fields() -> None:
    plain = fold(run_info(), *served(0, 1.0))[0]["summary"]
    assert not [key for key in plain if "trajector" in key or "agentic" in key]


@pytest.mark.parametrize(
    ("stream", "problem"),
    [
        ([(0.0, settled("p"))], "play p settled but never began"),
        ([(0.0, agentic(0, "a")), (1.0, settled("p")), (1.0, settled("p"))], "play p settled twice"),
        (
            [(0.0, agentic(0, "a")), (1.0, RequestSkipped(name="c", play_id="p", because="b"))],
            "request c was skipped because of b, which did not end",
        ),
        ([(0.0, arrived(0, play_id="p"))], "request 0 is in a play but has no name"),
    ],
)
def test_an_impossible_order_of_play_events_is_refused(stream: list[tuple[float, Any]], problem: str) -> None:
    with pytest.raises(InvariantViolation, match=problem):
        fold(run_info(), *stream)


def test_an_instance_of_a_play_has_request_ids_of_its_own_and_unknown_identities_are_left_out() -> None:
    """The row keeps the source's request id, so that rows of several instances can be compared."""
    _, (plain, instance) = fold(
        run_info(),
        *[(0.0, agentic(0, "a")), (0.0, placed(0)), (0.0, admitted(0)), (1.0, pass_ended(0)), (1.0, ended(0))],
        *[
            (1.0, agentic(1, "a", play="P1", at=1.0, cache_id="P1:cache", lane_id="lane:0")),
            (1.0, ended(1, "rejected")),
        ],
    )
    assert plain["agentic"] == {"request_id": "a", "play_id": "p", "conversation_id": "s"}
    assert instance["agentic"] == {
        "request_id": "P1:request:a",
        "play_id": "P1",
        "conversation_id": "s",
        "lane_id": "lane:0",
        "cache_id": "P1:cache",
    }
    assert (instance["request_id"], instance["play_id"]) == ("a", "P1")
    assert (instance["uuid"], instance["dispatched_at_ms"]) == ("00000000-0000-0000-0000-000000000002", 1.0)
