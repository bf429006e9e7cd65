"""The commands of docs/sweeps.md, in order; outputs go to a temporary folder, scenarios are the repository's."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from cli_process import REPO, run_cli

COMMANDS = re.findall(r"^    (g2sim .*)$", (REPO / "docs" / "sweeps.md").read_text(encoding="utf-8"), re.MULTILINE)


def test_documented_commands_work(tmp_path: Path) -> None:
    assert {command.split()[1] for command in COMMANDS} == {"sweep", "curve"}
    for command in COMMANDS:
        words = [word.replace("runs/", f"{tmp_path}/") for word in shlex.split(command)[1:]]
        done = run_cli(REPO, *words)
        assert done.returncode == 0, done.stderr
        assert done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("curve.csv", "curve.svg", "front.svg", "points", "policies.csv"),
    ]
    assert len(list((tmp_path / "points").iterdir())) == 4
