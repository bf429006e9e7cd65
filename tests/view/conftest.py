"""Runs, each made once, and the command line in fresh processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from view_values import make_run

from g2sim.scenarios import cli
from g2sim.scenarios.run import scenario_of_log
from g2sim.scenarios.view.page import page_of_log


@pytest.fixture(scope="session")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a run by name; nothing may be written into it."""
    made: dict[str, Path] = {}

    def give(name: str) -> Path:
        if name not in made:
            made[name] = make_run(name, tmp_path_factory.mktemp(name) / "run")
        return made[name]

    return give


@pytest.fixture(scope="session")
def page_of(run_of: Callable[[str], Path]) -> Callable[[str], str]:
    """The page of a run by name."""
    pages: dict[str, str] = {}

    def give(name: str) -> str:
        if name not in pages:
            run = run_of(name)
            pages[name], _ = page_of_log(run, scenario_of_log(run))
        return pages[name]

    return give


@pytest.fixture
def within(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Runs ``g2sim`` with arguments in an empty folder, in this process; returns exit code, stdout and stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(SystemExit) as stop:
            cli.main([str(argument) for argument in arguments])
        told = capsys.readouterr()
        return int(stop.value.code or 0), told.out, told.err

    return call
