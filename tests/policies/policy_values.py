"""Policies written as files for these tests, and the command line in fresh processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

REPO = Path(__file__).parents[2]
LIBRARY = REPO / "scenarios" / "library"
CHATS = LIBRARY / "chats-private-g2.yaml"

Done = subprocess.CompletedProcess
Call = Callable[..., "Done[str]"]

PREAMBLE = "import random\nfrom g2sim.actors.router.policy import *\n"


def write_policy(path: Path, body: str) -> Path:
    """A module with a class ``Own``, whose body this is."""
    lines = [f"    {line}\n" for line in body.strip().splitlines()]
    path.write_text(f"{PREAMBLE}class Own(Policy):\n    name = 'own'\n{''.join(lines)}")
    return path


def cli(folder: Path, *arguments: object, hash_seed: int = 0, path: Path | None = None) -> Done[str]:
    """``g2sim`` in a folder; ``path`` is a further folder of packages."""
    environment = os.environ | {"PYTHONHASHSEED": str(hash_seed)}
    if path is not None:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), str(path)]))
    command = [sys.executable, "-m", "g2sim.scenarios.cli", *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
