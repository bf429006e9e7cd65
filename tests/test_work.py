"""How much work a run is, in function calls: a count that the machine's load does not move."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

from translate import scenario_from_call
from workloads import cases, session_rows

from g2sim.bus.drivers import InlineDriver
from g2sim.scenarios.run import run_scenario
from g2sim.scenarios.schema import Scenario

CALLS_PER_PASS = 88
"""Admissions, transfers and the report included; CPython 3.11 makes 78 (docs/performance.md)."""


def work_of(sessions: int, tmp_path: Path) -> tuple[int, int]:
    """(calls of Python functions, passes) of benchmark workload 2 with fewer sessions, the log off."""
    path = tmp_path / f"{sessions}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in session_rows(sessions)), encoding="utf-8")
    values = scenario_from_call(cases()["2"]["call"], trace_path=str(path), trace_format="mooncake")
    scenario = Scenario.from_dict(values)
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        report = run_scenario(scenario, None, driver=InlineDriver).report
    finally:
        sys.setprofile(before)
    return calls, report["totals"]["passes"]


def test_a_pass_is_few_calls_and_more_sessions_are_in_proportion(tmp_path: Path) -> None:
    work_of(2, tmp_path)  # what is imported late is imported now
    few, few_passes = work_of(10, tmp_path)
    many, many_passes = work_of(20, tmp_path)
    assert few < CALLS_PER_PASS * few_passes
    assert many / few < 1.1 * many_passes / few_passes
