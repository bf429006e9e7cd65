"""docs/write-a-policy.md does what it says: every command, in order, and the policy beats round_robin."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from cli_process import REPO
from policy_values import CHATS, cli

PAGE = (REPO / "docs" / "write-a-policy.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"```(sh|python)\n(.*?)```", re.DOTALL)


def test_the_page_leads_to_a_policy_that_beats_round_robin(tmp_path: Path) -> None:
    (tmp_path / "scenarios").symlink_to(REPO / "scenarios")
    ran = 0
    for language, text in BLOCK.findall(PAGE):
        if language == "python":
            (tmp_path / "warm-first" / "warm_first.py").write_text(text)
            continue
        for line in text.splitlines():
            words = shlex.split(line)
            if words[0] == "g2sim":
                done = cli(tmp_path, *words[1:])
            else:
                assert words[0] == "python"
                done = subprocess.run(
                    [sys.executable, *words[1:], "-p", "no:cacheprovider"],
                    cwd=tmp_path,
                    env=os.environ,
                    capture_output=True,
                    text=True,
                    check=False,
                )
            assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
            ran += 1
    assert ran >= 5
    assert cli(tmp_path, "run", CHATS, "--out", "runs/rotation").returncode == 0
    warm, rotation = (
        json.loads((tmp_path / "runs" / run / "report.json").read_text())["summary"] for run in ("warm", "rotation")
    )
    assert warm["mean_ttft_ms"] < 0.7 * rotation["mean_ttft_ms"]
    assert warm["mean_e2e_latency_ms"] < rotation["mean_e2e_latency_ms"]
