"""The wheel holds everything, puts one name into an environment, and works from an empty one."""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a clean copy, so that neither the build's leavings nor a stale build get into it."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    subprocess.run(["git", "-C", REPO, "checkout-index", "-a", f"--prefix={source}/"], check=True)
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", folder, source]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_every_package_and_nothing_outside_g2sim(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"g2sim", next(n for n in names if "dist-info" in n).split("/")[0]}
    for top in ("actors", "bus", "scenarios"):
        for path in (REPO / top).rglob("*"):
            relative = path.relative_to(REPO).as_posix()
            if path.suffix in (".py", ".yaml", ".jsonl", ".csv", ".html", ".css", ".js") or path.name == "py.typed":
                assert f"g2sim/{relative}" in names, f"{relative} is missing: is its package listed in pyproject.toml?"


def test_the_wheel_runs_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    """Its own dependencies are enough, and the library of scenarios comes along."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel]
    done = subprocess.run(install, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    command = python.with_name("g2sim")
    told = subprocess.run([command, "--version"], capture_output=True, text=True, check=True, timeout=60)
    assert told.stdout.startswith("g2sim ")
    where = "import importlib.resources as r; print(r.files('g2sim.scenarios.library') / 'agentx-g2-shared.yaml')"
    found = subprocess.run([python, "-c", where], capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    assert str(tmp_path) in found
    run = subprocess.run(
        [command, "run", found], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert "3 completed" in run.stdout
