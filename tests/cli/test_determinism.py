"""Determinism from outside: fresh processes, other hash seeds, trio's own shuffled task order."""

from __future__ import annotations

from pathlib import Path

import yaml
from cli_process import Cli
from test_cli_run import SMALL, changed


def test_ten_processes_with_ten_hash_seeds_write_one_log(g2sim: Cli, demo: Path, tmp_path: Path) -> None:
    """F83, F84: trio shuffles its task order in each of them, and text has another hash."""
    logs = set()
    for hash_seed in range(10):
        out = tmp_path / str(hash_seed)
        assert g2sim("run", demo, "--out", out, "--quiet", hash_seed=hash_seed).returncode == 0
        logs.add(tuple(file.read_bytes() for file in sorted(out.iterdir())))
    assert len(logs) == 1


def test_another_seed_of_a_scenario_that_draws_gives_another_log(g2sim: Cli, tmp_path: Path) -> None:
    scenario = tmp_path / "s.yaml"
    scenario.write_text(yaml.safe_dump(changed(SMALL, "router", {"policy": "random"})))

    def run(name: str, seed: int, hash_seed: object) -> tuple[bytes, bytes]:
        out = tmp_path / name
        assert g2sim("run", scenario, "--out", out, "--seed", seed, hash_seed=hash_seed).returncode == 0
        return (out / "events.g2log").read_bytes(), (out / "requests.jsonl").read_bytes()

    first = run("a", 7, 0)
    assert run("b", 7, "random") == first
    assert run("c", 8, 0)[1] != first[1], "another seed places requests elsewhere"


def test_generated_conversations_are_the_same_in_every_process(g2sim: Cli, tmp_path: Path) -> None:
    """Poisson arrivals, prefix groups and planned answers are drawn from streams of their own."""
    session = {"turns": 3, "shared_prefix_ratio": 0.5, "prefix_groups": 2}
    source = {"type": "synthetic-session", "new_input_tokens_per_turn": 32, "output_tokens_per_turn": 9}
    load = {"type": "poisson", "sessions_per_second": 50.0}
    traffic = {"source": source | {"session": session}, "load": load, "stop": {"sessions": 6}}
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(changed(SMALL, "traffic", traffic)))
    logs = set()
    for hash_seed in (0, "random"):
        out = tmp_path / str(hash_seed)
        assert g2sim("run", "s.yaml", "--out", out, "--verify", hash_seed=hash_seed).returncode == 0
        logs.add(tuple(file.read_bytes() for file in sorted(out.iterdir())))
    assert len(logs) == 1


def test_arrivals_beyond_the_clock_are_refused(g2sim: Cli, tmp_path: Path) -> None:
    source = {"type": "synthetic", "input_tokens": 8, "output_tokens": 1}
    load = {"type": "poisson", "requests_per_second": 2e-13}
    traffic = {"source": source, "load": load, "stop": {"requests": 30}}
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(changed(SMALL, "traffic", traffic)))
    done = g2sim("run", "s.yaml", "--out", "out")
    assert done.returncode == 2
    assert "traffic.load: the last arrival is at " in done.stderr
    assert not (tmp_path / "out").exists()
