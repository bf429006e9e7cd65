"""How much work a run or a check is, in function calls: a count that the machine's load does not move."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import validate_rate
from translate import scenario_from_call
from workloads import cases, session_rows

from g2sim.bus.drivers import InlineDriver
from g2sim.scenarios.run import run_scenario
from g2sim.scenarios.schema import Scenario
from g2sim.scenarios.stream_sources import check_files
from g2sim.scenarios.validate import Validator

CALLS_PER_SESSION = 12_500
"""Admissions, passes, transfers and the report included; CPython 3.11 makes 11,300 (docs/performance.md)."""

CALLS_PER_EVENT = {"vllm-tokens": 23, "vllm": 25, "dynamo": 15, "neutral": 16.5, "log": 18}
"""Of a checked stream; CPython 3.11 makes a tenth less (docs/performance.md)."""


def calls_of(work: Callable[[], Any]) -> int:
    """Calls of Python functions that some work makes."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return calls


def work_of(sessions: int, tmp_path: Path) -> int:
    """Calls of Python functions of benchmark workload 2 with fewer sessions, the log off."""
    path = tmp_path / f"{sessions}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in session_rows(sessions)), encoding="utf-8")
    values = scenario_from_call(cases()["2"]["call"], trace_path=str(path), trace_format="mooncake")
    scenario = Scenario.from_dict(values)
    return calls_of(lambda: run_scenario(scenario, None, driver=InlineDriver))


def test_a_session_is_few_calls_and_more_of_them_are_in_proportion(tmp_path: Path) -> None:
    work_of(2, tmp_path)  # what is imported late is imported now
    few, many = work_of(20, tmp_path), work_of(40, tmp_path)
    assert few < CALLS_PER_SESSION * 20
    assert many < 2.2 * few


@pytest.mark.parametrize("form", validate_rate.FORMS)
def test_an_event_of_a_checked_stream_is_few_calls(form: str, tmp_path: Path) -> None:
    calls = []
    for idx, count in enumerate((500, 500, 1500)):  # twice the first, so that what is imported late does not count
        path = tmp_path / str(idx)
        validate_rate.write(path, form, count, live_runs=20)
        calls.append(calls_of(functools.partial(check_files, [path], Validator())))
    assert calls[2] - calls[1] < CALLS_PER_EVENT[form] * 1000
