"""``g2sim`` in a process of its own, as a user starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
LIBRARY = REPO / "scenarios" / "library"
DEMO = LIBRARY / "agentx-g2-shared.yaml"
COMMAND = (sys.executable, "-m", "g2sim.scenarios.cli")

Done = subprocess.CompletedProcess
Cli = Callable[..., "Done[str]"]


def run_cli(
    folder: Path,
    *arguments: object,
    hash_seed: object = 0,
    environment: Mapping[str, str] | None = None,
    **options: Any,
) -> Done[str]:
    """``g2sim`` with arguments in a folder, until it has ended.

    Args:
        environment: variables beside those of the tests.
        options: as ``subprocess.run`` takes them.
    """
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        cwd=folder,
        env=os.environ | {"PYTHONHASHSEED": str(hash_seed)} | dict(environment or {}),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        **options,
    )


def start_cli(folder: Path, *arguments: object, **options: Any) -> subprocess.Popen[str]:
    """The same without waiting, with pipes for what it says; ``options`` are those of ``subprocess.Popen``."""
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
