"""What tests of event streams may ask for."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_process import DEMO

from g2sim.scenarios.run import run_scenario
from g2sim.scenarios.schema import load_scenario


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of the README."""
    folder = tmp_path_factory.mktemp("live") / "demo"
    run_scenario(load_scenario(DEMO), folder)
    return folder
