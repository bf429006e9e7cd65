"""The swarm finds a planted fault, says how to repeat it, and does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import swarm
from shrinking import shrink

from g2sim.actors.host_pool.pool import HostPool


@pytest.fixture
def lost_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some pins are not given back."""
    unpin = HostPool._unpin
    monkeypatch.setattr(HostPool, "_unpin", lambda pool, hashes: unpin(pool, [one for one in hashes if one % 5]))


def test_f90_a_planted_fault_is_found_and_its_seed_fails_again(lost_pins: Any) -> None:
    failing = next(seed for seed in range(1, 200) if swarm.try_seed(seed).problem is not None)
    assert swarm.try_seed(failing) == swarm.try_seed(failing)
    case = swarm.draw_case(failing)
    smaller = shrink(case, swarm.smaller, lambda one: swarm.try_case(one).problem is not None)
    assert len(smaller.trace) <= len(case.trace)


def test_without_it_the_same_seeds_are_clean() -> None:
    assert [swarm.try_seed(seed).problem for seed in range(1, 9)] == [None] * 8


FOUND = sorted((Path(__file__).parent / "found").glob("*.json"))


@pytest.mark.parametrize("path", FOUND, ids=lambda path: path.stem)
def test_what_the_swarm_once_found_is_clean(path: Path) -> None:
    outcome = swarm.try_case(swarm.read_case(path))
    assert (outcome.how, outcome.problem) == ("done", None)


def test_a_case_is_drawn_from_its_seed_alone() -> None:
    assert swarm.draw_case(5) == swarm.draw_case(5) != swarm.draw_case(6)
