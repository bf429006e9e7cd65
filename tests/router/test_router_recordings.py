"""Recorded replays of the reference's KV router: rows, placements, costs and overlaps are equal to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import HERE, check, load_case, run

from g2sim.bus.drivers import TrioDriver

CASES = sorted(path for path in (HERE / "router").glob("*.json") if "call" in load_case(path))


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_a_recorded_replay_is_equal(path: Path) -> None:
    """Workers by first use, as the reference decides ties by chance; live state and log agree at every pass end."""
    difference = check(load_case(path))
    assert difference is None, str(difference)


def test_all_recordings_are_there() -> None:
    assert sum(path.stem.startswith("live_") for path in CASES) == 8
    assert len(CASES) == 60 + 8


@pytest.mark.parametrize("stem", ["queue_wspt", "host_shared_three_workers", "disagg_two_prefill_two_decode"])
def test_the_trio_driver_gives_the_same_records(stem: str) -> None:
    case = load_case(HERE / "router" / f"{stem}.json")
    assert run(case, driver=TrioDriver).records == run(case).records


def test_a_changed_recording_is_reported() -> None:
    """The comparison can fail: in a time, a placement, a cost, a summary field, the number of hops or of rows."""
    path = HERE / "router" / "disagg_two_prefill_two_decode.json"

    def told(change: Callable[[Any, Any], object]) -> str:
        case = load_case(path)
        change(case["expected"]["per_request"], case["expected"]["summary"])
        return str(check(case))

    assert "first_token_ms" in told(lambda rows, _: rows[0].update(first_token_ms=11.000000000000002))
    assert "routing_history" in told(lambda rows, _: rows[2]["routing_history"][1].update(worker="A"))
    assert "router" in told(lambda rows, _: rows[1]["router"][0].update(cost=6.000000000000001))
    assert "routing_history" in told(lambda rows, _: rows[1]["routing_history"].pop())
    assert "summary.mean_ttft_ms" in told(lambda _, summary: summary.update(mean_ttft_ms=1.0))
    assert "number of requests" in told(lambda rows, _: rows.pop())
    assert told(lambda *_: None) == "None"


def test_a_tie_must_be_one_of_the_recorded_outcomes() -> None:
    case = load_case(HERE / "router" / "tie_idle_again.json")
    assert check(case) is None
    for one in case["expected"]["any_of"]:
        one["outcome"]["per_request"][0]["terminal_time_ms"] = 1.0
    assert "terminal_time_ms" in str(check(case))
