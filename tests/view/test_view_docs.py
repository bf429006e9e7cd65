"""The commands of docs/view.md, in order."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from g2sim.scenarios import cli
from g2sim.scenarios.spans import PHASES

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "view.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^    g2sim (.*)$", TEXT, re.MULTILINE)


def test_documented_commands_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert {command.split()[0] for command in COMMANDS} == {"run", "view", "timeline"}
    for command in COMMANDS:
        with pytest.raises(SystemExit) as stop:
            cli.main([word.replace("runs/", f"{tmp_path}/") for word in shlex.split(command)])
        assert not stop.value.code, command
    assert (tmp_path / "look" / "view.html").stat().st_size > 10_000
    assert json.loads((tmp_path / "look-timeline.json").read_text())["traceEvents"]


def test_every_phase_has_words_and_a_colour_on_the_page() -> None:
    folder = ROOT / "scenarios" / "view"
    words, style = (folder / "model.js").read_text(), (folder / "page.css").read_text()
    for phase in PHASES:
        assert re.search(rf"\b{phase}: \"", words)
        assert f"--{phase}: light-dark(" in style
