"""The report against recordings of the reference, field by field, and the definitions that are ours."""

from __future__ import annotations

import json
from typing import Any

import pytest
from report_streams import (
    ORACLE,
    fold,
    pass_ended,
    recorded_info,
    recorded_names,
    recorded_stream,
    recording,
    run_finished,
)

TOKEN_TIMES = json.loads((ORACLE / "report" / "token_times.json").read_text())
DP_SCHED = ("dp_lockstep",)
NOT_TOLD = {"power_w", "power_coverage"}
"""Fields of the reference that we leave out."""
HANDOFF = {"source_held_ms", "destination_reserved_ms", "destination_activated_ms", "source_released_ms"}
"""Instants that no event tells yet."""
OTHER_ORDER = {"std_ttft_ms", "std_ttst_ms", "std_tpot_ms", "std_e2e_latency_ms"}
"""The reference adds these squares in an order that depends on its sort."""


def same_order(case: dict[str, Any], name: str) -> tuple[list[dict[str, Any]], list[list[float]]]:
    """Recorded requests in order of termination, with their token times."""
    requests = case["expected"]["per_request"]
    return [requests[k] for k, _ in TOKEN_TIMES[name]], [times for _, times in TOKEN_TIMES[name]]


def finish_of(summary: dict[str, Any]) -> Any:
    return run_finished(prefill=summary["prefill_worker_seconds"], decode=summary["decode_worker_seconds"])


def check_rows(rows: list[dict[str, Any]], requests: list[dict[str, Any]]) -> None:
    assert len(rows) == len(requests)
    for row, request in zip(rows, requests, strict=True):
        for key in request.keys() - HANDOFF - {"route", "admissions", "dp_ranks"}:
            assert row[key] == request[key], key
        history = row["admission_history"]
        for entry, expected in zip(history, request["admissions"], strict=True):
            if isinstance(expected, list):
                names = ("pool", "at_ms", "reused_input_tokens", "is_readmission")
                assert [entry[name] for name in names] == expected
            else:
                assert {name: value for name, value in entry.items() if name in expected} == expected
        route = [[entry["pool"], entry["logical_worker_id"], entry["dp_rank"]] for entry in row["routing_history"]]
        assert route == request.get("route", route)


@pytest.mark.parametrize("name", [name for name in TOKEN_TIMES if name in recorded_names("sched")])
def test_a_recorded_run_gives_the_recorded_summary_and_rows(name: str) -> None:
    """From the same tokens and ends the whole summary is the reference's to the last bit, and so is every row."""
    case = recording("sched", name)
    expected = case["expected"]["summary"]
    requests, token_times = same_order(case, name)
    stream = recorded_stream(requests, token_times, unfinished=expected["num_requests"] - len(requests))
    computed = pass_ended(role=recorded_info(case).pools[0].role, prefill_tokens=expected["committed_prefill_tokens"])
    end_ms = stream[-1][0]
    report, rows = fold(recorded_info(case), *stream, (end_ms, computed), (end_ms, finish_of(expected)))
    summary = report["summary"]
    assert summary.keys() == expected.keys() - NOT_TOLD
    for key in summary.keys() - OTHER_ORDER:
        assert summary[key] == expected[key], key
    for key in OTHER_ORDER:
        assert summary[key] == pytest.approx(expected[key], rel=1e-12), key
    check_rows(rows, requests)


@pytest.mark.parametrize(
    ("folder", "name"), [*(("sched", name) for name in DP_SCHED), *(("g2", name) for name in recorded_names("g2"))]
)
def test_a_recorded_run_without_token_times_gives_what_does_not_depend_on_them(folder: str, name: str) -> None:
    """Rows, token counts and reuse ratios, with a host tier, shared or private, and data-parallel ranks."""
    case = recording(folder, name)
    expected = case["expected"]["summary"]
    requests = sorted(case["expected"]["per_request"], key=lambda request: request["terminal_time_ms"])
    first_and_last = [
        [request["first_token_ms"], *[request["last_token_ms"]] * (request["output_length"] - 1)]
        for request in requests
    ]
    info = recorded_info(case)
    report, rows = fold(info, *recorded_stream(requests, first_and_last, dp_size=info.pools[0].dp_size))
    for key in ("completed_requests", "total_input_tokens", "total_output_tokens", "duration_ms"):
        assert report["summary"][key] == expected[key]
    for key in ("prefix_cache_reused_ratio", "first_admission_prefix_cache_reused_ratio"):
        assert report["summary"][key] == expected[key]
    check_rows(rows, [{key: value for key, value in row.items() if key != "ttst_ms"} for row in requests])
    totals = report["totals"]
    assert totals["prompt_tokens_asked"] == expected["total_input_tokens"]
    assert totals["prompt_tokens_from_g2"] == sum(
        request.get("first_admission_host_reused_input_tokens") or 0 for request in requests
    )
    found = totals["prompt_tokens_from_g1"] + totals["prompt_tokens_from_g2"]
    assert found / totals["prompt_tokens_asked"] == expected["first_admission_prefix_cache_reused_ratio"]
