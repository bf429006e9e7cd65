"""Policies written as files for these tests, and the command line in fresh processes."""

from __future__ import annotations

import os
from pathlib import Path

from cli_process import LIBRARY, Done, run_cli

CHATS = LIBRARY / "chats-private-g2.yaml"

PREAMBLE = "import random\nfrom g2sim.actors.router.policy import *\n"


def write_policy(path: Path, body: str) -> Path:
    """A module with a class ``Own``, whose body this is."""
    lines = [f"    {line}\n" for line in body.strip().splitlines()]
    path.write_text(f"{PREAMBLE}class Own(Policy):\n    name = 'own'\n{''.join(lines)}")
    return path


def cli(folder: Path, *arguments: object, hash_seed: int = 0, path: Path | None = None) -> Done[str]:
    """``g2sim`` in a folder; ``path`` is a further folder of packages."""
    environment = {}
    if path is not None:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(path)]))
    return run_cli(folder, *arguments, hash_seed=hash_seed, environment=environment)
