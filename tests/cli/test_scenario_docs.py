"""What docs/scenario-files.md shows works."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from cli_process import REPO, Cli

TEXT = (REPO / "docs" / "scenario-files.md").read_text()
COMMANDS = re.findall(r"^    (g2sim .*)$", TEXT, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_shown_works(g2sim: Cli, command: str) -> None:
    words = shlex.split(command.partition(" > ")[0])[1:]
    done = g2sim(*(REPO / word if word.startswith("scenarios/") else word for word in words))
    assert done.returncode == 0, done.stderr


def test_the_scenario_shown_meets_what_it_expects(g2sim: Cli, tmp_path: Path) -> None:
    (shown,) = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    scenario = tmp_path / "demo.yaml"
    scenario.write_text(shown.replace("traces/", f"{REPO}/scenarios/library/traces/"))
    done = g2sim("run", scenario, "--out", "o")
    assert done.returncode == 0, done.stderr
    assert done.stderr.endswith("5 of 5 expectations hold\n")
