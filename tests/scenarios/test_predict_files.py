"""Files as ``aisimulate predict`` reads them run as they are: engine, traffic and router, nothing of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from g2sim.scenarios.run import run_scenario
from g2sim.scenarios.schema import load_scenario

PREDICT = Path(__file__).parent / "predict"


def report_of(name: str) -> dict[str, Any]:
    return run_scenario(load_scenario(PREDICT / name), None, verify=True).report


@pytest.mark.parametrize("name", ["pd-local.yaml", "pd-shared.yaml"])
def test_it_holds_the_documented_sections_only(name: str) -> None:
    assert yaml.safe_load((PREDICT / name).read_text()).keys() == {"engine", "traffic", "router"}


def test_local_and_shared_host_tiers_of_separate_pools_run_and_differ_as_they_must() -> None:
    local, shared = report_of("pd-local.yaml"), report_of("pd-shared.yaml")
    for report in (local, shared):
        assert report["requests"]["completed"] == 18
        assert report["totals"]["prompt_tokens_asked"] == 82638
    assert [pool["pool"] for pool in shared["g2_pools"]] == ["g2"]
    assert [pool["pool"] for pool in local["g2_pools"]] == [
        f"g2:{role}-{worker}/0" for role in ("prefill", "decode") for worker in (0, 1)
    ]
    # A chat that comes to the other prefill worker finds its prefix in a pool for all, not in one of its own.
    assert shared["totals"]["prompt_tokens_from_g2"] > local["totals"]["prompt_tokens_from_g2"]
