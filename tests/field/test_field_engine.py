"""Field cases about the engine, as whole runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from field_runs import host, row, simulate, worker

from g2sim.bus.log import LogReader
from g2sim.scenarios.run import run_scenario
from g2sim.scenarios.schema import Scenario

ROWS = [row(3.0 * k, [10 * (k % 13) + b for b in range(4)], out=3) for k in range(120)]


def log(folder: Path, name: str, seed: int, policy: str = "random") -> bytes:
    sixteen = worker(gpu_blocks=16, replicas=16, host=host(64, shared=True))
    simulate(folder, ROWS, seed=seed, out=folder / name, router={"policy": policy}, aggregated=sixteen)
    return (folder / name / "events.g2log").read_bytes()


def test_f85_equal_seeds_give_equal_logs_whatever_ran_before_in_the_process(tmp_path: Path) -> None:
    first = log(tmp_path, "a", 7)
    assert log(tmp_path, "b", 8) != first
    assert log(tmp_path, "c", 7) == first


@pytest.mark.parametrize("policy", ["round_robin", "dynamo_kv"])
def test_f74_a_run_from_what_its_log_says_of_the_scenario_gives_the_same_log(tmp_path: Path, policy: str) -> None:
    original = log(tmp_path, "first", 42, policy)
    with LogReader(tmp_path / "first" / "events.g2log") as reader:
        again = Scenario.from_resolved(reader.header.scenario, base_dir=tmp_path)
    run_scenario(again, tmp_path / "second")
    assert (tmp_path / "second" / "events.g2log").read_bytes() == original
