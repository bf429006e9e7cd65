"""The reference names every field that a report or a request's line has, and none that they do not have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from g2sim.scenarios.report_meanings import REPORT, REQUEST, key_of, paths
from g2sim.scenarios.run import run_scenario
from g2sim.scenarios.schema import Scenario, load_scenario
from g2sim.scenarios.yaml_source import read_file

LIBRARY = Path(__file__).parents[2] / "scenarios" / "library"
NAMES = (
    "2p2d-shared-pool",
    "recycled-plays",
    "warm-up",
    "faults-loss",
    "faults-worker-crash",
    "faults-cache-clear",
    "weka-coding-session",
)

ELSEWHERE = {
    "summary.agentic_play_outcomes[].failure_request_id",
    "summary.agentic_play_outcomes[].failure_status",
    *(f"summary.agentic_profile.idle_shifts[].{name}" for name in ("at_ms", "play_id", "shifted_by_ms", "timer_count")),
}
"""Fields of runs in which something failed, or nobody had anything to do."""


@pytest.fixture(scope="module")
def found() -> tuple[set[str], set[str]]:
    """Paths in the reports and rows of runs that between them have all sections."""
    reports: set[str] = set()
    rows: set[str] = set()
    values: Any = read_file(LIBRARY / "chats-private-g2.yaml").values
    replicated = Scenario.from_dict({**values, "router": {**values["router"], "replicas": 2}}, base_dir=LIBRARY)
    for scenario in (*(load_scenario(LIBRARY / f"{name}.yaml") for name in NAMES), replicated):
        result = run_scenario(scenario, None, on_row=lambda row: rows.update(paths(row)))
        reports.update(paths(result.report))
    return reports, rows


def test_every_field_has_a_meaning(found: tuple[set[str], set[str]]) -> None:
    for seen, meanings in zip(found, (REPORT, REQUEST), strict=True):
        assert {path for path in seen if key_of(path, meanings) is None} == set()


def test_every_meaning_is_of_a_field(found: tuple[set[str], set[str]]) -> None:
    spoken = {key_of(path, meanings) for seen, meanings in zip(found, (REPORT, REQUEST), strict=True) for path in seen}
    assert {*REPORT, *REQUEST} - spoken == ELSEWHERE
