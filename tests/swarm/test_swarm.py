"""The swarm finds a planted fault, says how to repeat it, and does; and it draws all that there is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import swarm
from audits import Outcome
from draws import FAULTS, LOADED_POLICY, OPTIONS, SEE_BLOCKS, Case, draw_case
from shrinking import shrink
from swarm import read_case, smaller, try_case, try_seed

from g2sim.actors.host_pool.pool import HostPool
from g2sim.actors.router.faults import FaultKind, RecoveryMode
from g2sim.actors.router.registry import POLICIES
from g2sim.scenarios.layout import TraceFormat


@pytest.fixture
def lost_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some pins are not given back."""
    unpin = HostPool._unpin

    def lose(pool: HostPool, transfer: Any) -> None:
        transfer.block_hashes = tuple(hash_ for hash_ in transfer.block_hashes if hash_ % 5)
        unpin(pool, transfer)

    monkeypatch.setattr(HostPool, "_unpin", lose)


def test_f90_a_planted_fault_is_found_and_its_seed_fails_again(lost_pins: Any) -> None:
    failing = next(seed for seed in range(1, 200) if try_seed(seed).problem is not None)
    assert try_seed(failing) == try_seed(failing)
    case = draw_case(failing)
    shrunk = shrink(case, smaller, lambda one: try_case(one).problem is not None)
    assert len(shrunk.trace) <= len(case.trace)


def test_without_it_the_same_seeds_are_clean() -> None:
    assert [try_seed(seed).problem for seed in range(1, 9)] == [None] * 8


FOUND = sorted((Path(__file__).parent / "found").glob("*.json"))


@pytest.mark.parametrize("path", FOUND, ids=lambda path: path.stem)
def test_what_the_swarm_once_found_is_clean(path: Path) -> None:
    outcome = try_case(read_case(path))
    assert (outcome.how, outcome.problem) == ("done", None)


def test_a_case_is_drawn_from_its_seed_alone() -> None:
    assert draw_case(5) == draw_case(5) != draw_case(6)


def test_everything_that_there_is_is_drawn() -> None:
    """Every kind of fault and recovery, policy, trace format and load; several of each together."""
    cases = [draw_case(seed) for seed in range(700)]
    scenarios = [case.scenario for case in cases]
    plans = [scenario["faults"] for scenario in scenarios if "faults" in scenario]
    assert set(FAULTS) == set(FaultKind)
    assert {fault["type"] for plan in plans for fault in plan["plan"]} == set(FaultKind)
    assert {plan["recovery"]["mode"] for plan in plans} == set(RecoveryMode)
    assert any(_overlap(plan["plan"]) for plan in plans)
    assert any(scenario["router"].get("replicas", 1) > 1 for scenario in scenarios if "faults" in scenario)
    assert (
        {scenario["router"]["policy"] for scenario in scenarios} == set(POLICIES) > set(OPTIONS) > set(SEE_BLOCKS[1:])
    )
    assert LOADED_POLICY in {case.policy[0] for case in cases if case.policy}
    sources = [scenario["traffic"]["source"] for scenario in scenarios]
    assert {one["format"] for one in sources if one["type"] == "trace"} == set(TraceFormat)
    assert {one["type"] for one in sources} == {"trace", "synthetic", "synthetic-session", "script"}
    loads = [scenario["traffic"]["load"] for scenario in scenarios]
    assert {load["type"] for load in loads if load} == {"trace_timestamps", "concurrency", "poisson", "constant_rate"}
    for control in ("agentic_lanes", "agentic_snapshot", "agentic_warmup", "agentic_profile"):
        assert any(load.get(control) for load in loads)


def _overlap(plan: list[dict[str, Any]]) -> bool:
    return any(
        one is not other and one["from_ms"] < other["until_ms"] and other["from_ms"] < one["until_ms"]
        for one in plan
        for other in plan
    )


def test_the_command_prints_what_repeats_a_failure(tmp_path: Path) -> None:
    """A case that no audit accepts, kept as the swarm keeps it, fails again by the command that it prints."""
    case = draw_case(5)
    kept = swarm.keep(5, Outcome("failed", "ConfigError: planted"), tmp_path)
    assert read_case(kept) == case
    broken = Case(case.scenario | {"seed": -1}, case.trace)
    swarm.write_case(kept, broken, "planted")
    command = [sys.executable, "tests/swarm/swarm.py", "--case", str(kept)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout[:17]) == (1, "ConfigError: seed")
    assert json.loads(kept.read_text())["why"] == "planted"
