"""Puts each deliberate fault into a copy of the tree, and prints what noticed it.

    python tests/mutants/run.py [--only TEXT] [--jobs N] [--seeds N]

First the tests that are named beside the fault are run, up to the first failure, and then the swarm. Exit code 1 if a
fault is noticed by neither.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPO = HERE.parents[1]
sys.path.insert(0, str(HERE))

from mutants import MUTANTS, Mutant  # noqa: E402

_TIMEOUT_S = 300


def noticed(mutant: Mutant, seeds: int) -> str | None:
    """What notices a fault: a test's name, or the seed of the swarm; None if nothing does."""
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name) / "tree"
        for part in ("actors", "bus", "scenarios", "tests", "docs", "pyproject.toml", "README.md"):
            source = REPO / part
            if source.is_dir():
                shutil.copytree(source, tree / part, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.exists():
                tree.mkdir(exist_ok=True)
                shutil.copy(source, tree / part)
        file = tree / mutant.file
        text = file.read_text(encoding="utf-8")
        if text.count(mutant.old) != 1:
            raise ValueError(f"{mutant.name}: the text stands {text.count(mutant.old)} times in {mutant.file}")
        file.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
        package = Path(name) / "types" / "g2sim"
        package.mkdir(parents=True)
        for part in ("actors", "bus", "scenarios"):
            (package / part).symlink_to(tree / part)
        environment = os.environ | {"PYTHONPATH": str(package.parent), "PYTHONDONTWRITEBYTECODE": "1"}
        pytest = ["-m", "pytest", "-x", "-q", *mutant.tests.split()]
        told = _run(pytest, tree, environment)
        found = re.search(r"^(?:FAILED|ERROR) (\S+)", told, re.MULTILINE)
        if found is not None:
            return found[1]
        told = _run(["tests/swarm/swarm.py", "--first", "1", "--count", str(seeds), "--jobs", "1"], tree, environment)
        found = re.search(r"^seed (\d+): (.*)", told, re.MULTILINE)
        return None if found is None else f"swarm, seed {found[1]}: {found[2][:60]}"


def _run(arguments: list[str], tree: Path, environment: dict[str, str]) -> str:
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=tree,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return f"FAILED no-end-within-{_TIMEOUT_S}-s"
    return done.stdout + done.stderr


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--only", default="", help="faults whose name contains this text")
    options.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options.add_argument("--seeds", type=int, default=100, help="runs of the swarm")
    chosen = options.parse_args()
    picked = [mutant for mutant in MUTANTS if chosen.only in mutant.name]
    started = time.monotonic()
    missed = 0
    with ThreadPoolExecutor(chosen.jobs) as pool:
        for mutant, what in zip(picked, pool.map(lambda one: noticed(one, chosen.seeds), picked), strict=True):
            missed += what is None
            print(f"{mutant.name:62} {what or 'NOT NOTICED'}", flush=True)
    print(f"{len(picked)} faults in {time.monotonic() - started:.0f} s: {missed} not noticed")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
