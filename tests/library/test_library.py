"""The library of scenarios: each meets what it expects, says what it teaches, and is in docs/library.md.

    python tests/library/test_library.py

prints the table of that page.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from g2sim.scenarios import cli_scenarios
from g2sim.scenarios.aic_timing import aic_installed
from g2sim.scenarios.scenario_tests import collect, run_file
from g2sim.scenarios.suite import load_suite

REPO = Path(__file__).parents[2]
LIBRARY = REPO / "scenarios" / "library"
NEEDS_AIC = LIBRARY / "qwen3-32b-2p2d-aic.yaml"
FILES = collect([LIBRARY])
YAML_FILES = [path for path in FILES if path.suffix == ".yaml"]


def why(path: Path) -> str:
    """What a scenario says that it teaches, in one line."""
    if path.suffix == ".py":
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    else:
        text = yaml.safe_load(path.read_text(encoding="utf-8")).get("why", "")
    return " ".join(text.split())


def table() -> str:
    rows = [f"| [{path.stem}](../scenarios/library/{path.name}) | {why(path)} |" for path in FILES]
    return "\n".join(["| scenario | what it teaches |", "|---|---|", *rows])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_runs_and_meets_what_it_expects(path: Path, tmp_path: Path) -> None:
    if path == NEEDS_AIC and not aic_installed():
        pytest.skip("needs g2sim[aic], an extra that is not installed")
    result = run_file(path, tmp_path / "run")
    assert result.skipped is None
    assert not result.failed, result.text


@pytest.mark.parametrize("path", [path for path in YAML_FILES if path != NEEDS_AIC], ids=lambda path: path.stem)
def test_it_expects_more_than_that_requests_complete(path: Path) -> None:
    suite = load_suite(path)
    assert suite.name == path.stem
    assert len({one.figure.text for one in suite.expectations}) >= 3
    if len(suite.runs) > 1:
        compared = {name for one in suite.expectations if one.minus is not None for name in one.variants}
        alone = Counter(one.place for one in suite.expectations if one.minus is None)
        named = {one.variant for one in suite.expectations if one.minus is None and alone[one.place] == 1}
        assert compared | named == set(suite.runs), "a variant of which nothing of its own is expected"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_says_what_it_teaches(path: Path) -> None:
    assert len(why(path)) > 80


def test_the_page_has_the_table() -> None:
    assert len(FILES) >= 15
    page = (REPO / "docs" / "library.md").read_text(encoding="utf-8")
    assert table() in page, f"docs/library.md should have this table:\n{table()}"


def test_every_trace_is_used_and_those_of_others_are_unchanged() -> None:
    used = {
        name
        for path in YAML_FILES
        for name in yaml.safe_load(path.read_text(encoding="utf-8"))["traffic"]["source"].get("paths", [])
    }
    there = {f"traces/{path.name}" for path in (LIBRARY / "traces").iterdir() if path.suffix in (".json", ".jsonl")}
    assert used == there
    digests = {
        "mooncake-conversation.head200.jsonl": "23c130b3e14ca90138372ec992aaa850001554a0576d09b6367cbf05e5f59cbb",
        "weka-trace_0174.json": "3438162ab8d62b4619cb0095c6f1d3fb009b3e7ac36659c5a3dcae45e086901e",
    }
    sources = (LIBRARY / "traces" / "SOURCES.md").read_text(encoding="utf-8")
    for name, digest in digests.items():
        assert hashlib.sha256((LIBRARY / "traces" / name).read_bytes()).hexdigest() == digest
        assert f"| `{name}` |" in sources


@pytest.fixture
def without_aic(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the package were not installed."""
    find_spec = importlib.util.find_spec

    def found(name: str, *arguments: Any) -> Any:
        return None if name == "aiconfigurator_core" else find_spec(name, *arguments)

    monkeypatch.setattr(importlib.util, "find_spec", found)


@pytest.mark.usefixtures("without_aic")
class TestWithoutAic:
    def test_the_suite_skips_what_needs_it_and_says_so(self, tmp_path: Path) -> None:
        junit = tmp_path / "results.xml"
        done = CliRunner().invoke(cli_scenarios.test, [str(NEEDS_AIC), "--junit", str(junit)])
        assert done.exit_code == 0
        assert done.output.splitlines() == [
            f"skipped  {NEEDS_AIC}  (needs g2sim[aic])",
            "0 of 1 scenarios passed, 1 skipped",
        ]
        suite = ElementTree.parse(junit).getroot()[0]
        assert (suite.get("tests"), suite.get("skipped"), suite.get("failures")) == ("1", "1", "0")
        assert suite[0][0].tag == "skipped"
        assert suite[0][0].get("message") == "needs g2sim[aic]"

    def test_what_is_wrong_as_well_is_not_skipped(self, tmp_path: Path) -> None:
        values = yaml.safe_load(NEEDS_AIC.read_text(encoding="utf-8"))
        values["rooter"] = {}
        (tmp_path / "bad.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
        result = run_file(tmp_path / "bad.yaml", tmp_path / "run")
        assert result.bad_input
        assert result.skipped is None


if __name__ == "__main__":
    print(table())
