"""What tests of all folders may ask for."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from cli_process import DEMO, Cli, run_cli


@pytest.fixture
def g2sim(tmp_path: Path) -> Cli:
    """Runs ``g2sim`` with arguments in an empty folder, in a process of its own."""
    return partial(run_cli, tmp_path)


@pytest.fixture
def demo() -> Path:
    """The scenario of the README."""
    return DEMO
