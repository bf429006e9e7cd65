"""The command line in fresh processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
DEMO = REPO / "scenarios" / "library" / "agentx-g2-shared.yaml"

Cli = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def g2sim(tmp_path: Path) -> Cli:
    """Runs ``g2sim`` with arguments in an empty folder."""

    def call(*arguments: object, hash_seed: object = 0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "g2sim.scenarios.cli", *map(str, arguments)],
            cwd=tmp_path,
            env=os.environ | {"PYTHONHASHSEED": str(hash_seed)},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    return call


@pytest.fixture
def demo() -> Path:
    return DEMO
