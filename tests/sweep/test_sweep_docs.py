"""The commands of docs/sweeps.md, in order; outputs go to a temporary folder, scenarios are the repository's."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMANDS = re.findall(r"^    (g2sim .*)$", (ROOT / "docs" / "sweeps.md").read_text(encoding="utf-8"), re.MULTILINE)


def test_documented_commands_work(tmp_path: Path) -> None:
    assert {command.split()[1] for command in COMMANDS} == {"sweep", "curve"}
    for command in COMMANDS:
        words = [word.replace("runs/", f"{tmp_path}/") for word in shlex.split(command)[1:]]
        start = [sys.executable, "-m", "g2sim.scenarios.cli"]
        done = subprocess.run([*start, *words], cwd=ROOT, capture_output=True, text=True, env=os.environ, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curve.csv", "curve.svg", "points", "policies.csv"]
    assert len(list((tmp_path / "points").iterdir())) == 4
