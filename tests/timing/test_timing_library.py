"""The library's scenario on a table, through the command line, and the commands of docs/timing.md."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from g2sim.scenarios.run import run_scenario
from g2sim.scenarios.schema import Scenario, load_scenario

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "scenarios" / "library"
COMMAND = re.compile(r"^    (g2sim .*|python .*)$", re.MULTILINE)


def commands() -> list[str]:
    return COMMAND.findall((ROOT / "docs" / "timing.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize("command", commands())
def test_documented_commands_work(tmp_path: Path, command: str) -> None:
    """Output goes to a temporary folder; paths are those of the repository."""
    if "aic" in command and find_spec("aiconfigurator_core") is None:
        pytest.skip("needs aiconfigurator-core: pip install 'g2sim[aic]'")
    words = [word.replace("runs/", f"{tmp_path}/") for word in shlex.split(command.split(">")[0])]
    start = [sys.executable, *(["-m", "g2sim.scenarios.cli"] if words[0] == "g2sim" else [])]
    done = subprocess.run([*start, *words[1:]], cwd=ROOT, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_there_are_documented_commands() -> None:
    assert any("qwen3-32b-table.yaml" in command for command in commands())
    assert any("qwen3-32b-2p2d-aic.yaml" in command for command in commands())


def test_the_scenario_on_a_table_stays_inside_it_and_uses_the_shared_pool(tmp_path: Path) -> None:
    result = run_scenario(load_scenario(LIBRARY / "qwen3-32b-table.yaml"), tmp_path / "run", verify=True)
    (note,) = result.notes
    assert note.startswith("aggregated pass times: table tables/qwen3-32b-h200-tp2.csv, ")
    report = json.loads((tmp_path / "run" / "report.json").read_text(encoding="utf-8"))
    assert report["requests"]["completed"] == report["requests"]["released"] == 96
    assert report["totals"]["prompt_tokens_from_g2"] > 0


def test_both_scenarios_say_why_and_the_one_on_the_model_can_be_read_as_values() -> None:
    for name in ("qwen3-32b-table", "qwen3-32b-2p2d-aic"):
        values = yaml.safe_load((LIBRARY / f"{name}.yaml").read_text(encoding="utf-8"))
        assert values["name"] == name
        assert "functional_only" in values["why"]
    for worker in values["engine"]["workers"].values():
        worker["kv_cache"] |= {"capacity": {"type": "fixed", "blocks": 11742}, "bytes_per_token": 131072}
    scenario = Scenario.from_dict(values, base_dir=LIBRARY)
    assert [(pool.role.value, pool.workers) for pool in scenario.deployment.pools] == [("prefill", 2), ("decode", 2)]
