"""The compiled build writes the same bytes as pure Python: every file of the same runs."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
COMPILED = os.environ.get("G2SIM_COMPILED_PYTHON")


def written(python: str, folder: Path) -> tuple[str, dict[str, bytes]]:
    """Which build an interpreter holds, and the content of each file that its runs leave."""
    folder.mkdir()
    # The sources on the path of these tests would hide what the interpreter has installed.
    hiding = () if python == sys.executable else ("PYTHONPATH",)
    environment = {name: value for name, value in os.environ.items() if name not in hiding}
    command = [python, REPO / "tests" / "compiled" / "write_runs.py", folder]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    found = {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }
    shutil.rmtree(folder)
    return done.stdout.splitlines()[-1], found


@pytest.mark.skipif(COMPILED is None, reason="no compiled build is named in G2SIM_COMPILED_PYTHON: make test-compiled")
def test_every_file_of_a_run_has_the_same_bytes(tmp_path: Path) -> None:
    """Logs, reports and rows of the library's scenarios and of recorded cases, and what is said of those that fail."""
    pure_build, pure = written(sys.executable, tmp_path / "runs")
    compiled_build, compiled = written(str(COMPILED), tmp_path / "runs")
    assert (pure_build, compiled_build) == ("pure Python", "compiled")
    assert sum(name.endswith(".g2log") for name in pure) > 150
    assert pure.keys() == compiled.keys()
    assert [name for name, content in pure.items() if compiled[name] != content] == []


def test_the_modules_to_compile_exist() -> None:
    for node in ast.parse((REPO / "setup.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MODULES":
            modules = ast.literal_eval(node.value)
            break
    assert modules == tuple(sorted(set(modules)))
    assert [module for module in modules if not (REPO / module).is_file()] == []
