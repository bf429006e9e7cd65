"""``g2sim schema``, ``check``, ``test`` and expectations of ``run``, as a user meets them."""

from __future__ import annotations

import json
import os
import signal
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from cli_process import REPO, Cli, start_cli
from test_cli_run import SMALL, changed, write

TRACES = REPO / "scenarios" / "library" / "traces"
GOOD = {**SMALL, "expect": [{"report": "requests.completed", "equals": 40}]}
BAD = {**SMALL, "expect": [{"report": "requests.completed", "equals": 41}, {"events": "wk.adm", "at_least": 1}]}
PAIR: dict[str, Any] = {
    **SMALL,
    "variants": {"one": {"engine.workers.aggregated.parallelism.replicas": 1}, "two": {}},
    "expect": [{"report": "totals.passes", "variant": "two", "minus": "one", "above": 0}],
}


def test_schema_prints_one_json_object(g2sim: Cli) -> None:
    done = g2sim("schema")
    assert done.returncode == 0
    assert json.loads(done.stdout)["$schema"].startswith("https://json-schema.org/")


class TestRun:
    def test_expectations_that_hold_are_counted(self, g2sim: Cli, tmp_path: Path) -> None:
        done = g2sim("run", write(tmp_path / "s.yaml", GOOD), "--out", "o")
        assert done.returncode == 0
        assert done.stderr.splitlines()[-1] == "1 of 1 expectations hold"

    def test_one_that_fails_ends_with_1_and_the_run_folder_stays(self, g2sim: Cli, tmp_path: Path) -> None:
        done = g2sim("run", write(tmp_path / "s.yaml", BAD), "--out", "o", "--json", "--quiet")
        assert done.returncode == 1
        assert done.stdout == (tmp_path / "o" / "report.json").read_text()
        assert done.stderr.startswith("error: 1 of 2 expectations failed\n")
        assert "\n  expected: equals 41\n  got: 40\n" in done.stderr
        assert done.stderr.splitlines()[-1] == f"to repeat: g2sim run {tmp_path / 's.yaml'} --out o --overwrite"

    def test_what_is_expected_does_not_change_the_run(self, g2sim: Cli, tmp_path: Path) -> None:
        for number, values in enumerate((GOOD, BAD)):
            (tmp_path / str(number)).mkdir()
            g2sim("run", write(tmp_path / str(number) / "s.yaml", values), "--out", f"o{number}")
        logs = [(tmp_path / f"o{number}" / "events.g2log").read_bytes() for number in (0, 1)]
        assert logs[0] == logs[1]

    def test_every_variant_gets_a_run_folder(self, g2sim: Cli, tmp_path: Path) -> None:
        done = g2sim("run", write(tmp_path / "s.yaml", PAIR), "--out", "o", "--json")
        assert done.returncode == 0
        reports = json.loads(done.stdout)["variants"]
        assert [len(reports[name]["workers"]) for name in ("one", "two")] == [1, 2]
        for name in ("one", "two"):
            assert json.loads((tmp_path / "o" / name / "report.json").read_text()) == reports[name]

    def test_one_variant_alone(self, g2sim: Cli, tmp_path: Path) -> None:
        scenario = write(tmp_path / "s.yaml", PAIR)
        assert g2sim("run", scenario, "--variant", "two", "--out", "o").returncode == 0
        assert [item.name for item in (tmp_path / "o").iterdir()] == ["two"]
        unknown = g2sim("run", scenario, "--variant", "tow")
        assert unknown.returncode == 2
        assert "did you mean two?" in unknown.stderr


class TestCheck:
    def test_good_files_of_every_kind(self, g2sim: Cli, tmp_path: Path) -> None:
        scenario = write(tmp_path / "s.yaml", PAIR)
        script = REPO / "scenarios" / "library" / "restore_on_another_worker.py"
        weka, mooncake = TRACES / "parent-and-explorers.jsonl", TRACES / "chat-sessions.jsonl"
        done = g2sim("check", scenario, script, weka, mooncake)
        assert done.returncode == 0
        assert done.stdout.splitlines() == [
            f"{scenario}: ok, scenario s, 2 variants, 1 expectations",
            f"{script}: ok, script, syntax only",
            f"{weka}: ok, weka trace, 3 plays, 31 requests",
            f"{mooncake}: ok, mooncake trace, 24 sessions",
        ]

    def test_formats_that_do_not_say_what_they_are(self, g2sim: Cli) -> None:
        trace = TRACES / "chat-sessions.jsonl"
        done = g2sim("check", trace, "--format", "mooncake-delta")
        assert done.stdout == f"{trace}: ok, mooncake-delta trace, 24 sessions\n"
        assert g2sim("check", trace, "--format", "dynamo").returncode == 2
        unknown = g2sim("check", trace, "--format", "mooncacke")
        assert unknown.returncode == 2
        assert "did you mean mooncake?" in unknown.stderr

    def test_every_bad_file_is_told_and_nothing_is_run_or_written(self, g2sim: Cli, tmp_path: Path) -> None:
        typo = write(tmp_path / "typo.yaml", changed(SMALL, "rooter", {}))
        trace = tmp_path / "t.jsonl"
        trace.write_text('{"timestamp": 0, "input_length": 4, "output_length": "x", "hash_ids": [1]}\n')
        source = {"type": "trace", "paths": ["t.jsonl"]}
        traced = write(
            tmp_path / "traced.yaml", {**SMALL, "traffic": {"source": source, "load": {"type": "trace_timestamps"}}}
        )
        script = tmp_path / "s.py"
        script.write_text("raise SystemExit('ran')\ndef (:\n")
        good = write(tmp_path / "good.yaml", GOOD)
        before = sorted(tmp_path.iterdir())
        done = g2sim("check", typo, trace, traced, script, good, "missing.jsonl")
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
        assert done.stdout == f"{good}: ok, scenario good, 1 expectations\n"
        lines = done.stderr.splitlines()
        assert [line.split(":")[1].strip() for line in lines[:3]] == [str(typo), str(trace), str(trace)]
        assert "did you mean router?" in lines[0]
        assert lines[3].startswith(f"error: {script}:2: not valid Python")
        assert lines[5] == "error: 5 of 6 files are not good"
        assert sorted(tmp_path.iterdir()) == before


class TestTest:
    def folder(self, tmp_path: Path) -> Path:
        folder = tmp_path / "suite"
        (folder / "deeper").mkdir(parents=True)
        write(folder / "a.yaml", GOOD)
        write(folder / "b.yml", BAD)
        write(folder / "deeper" / "pair.yaml", PAIR)
        (folder / "notes.txt").write_text("not a scenario")
        (folder / "helper.py").write_text("raise SystemExit('ran')")
        return folder

    @pytest.mark.parametrize("jobs", [1, 2])
    def test_a_folder_is_a_suite(self, g2sim: Cli, tmp_path: Path, jobs: int) -> None:
        done = g2sim("test", self.folder(tmp_path), "--jobs", jobs, "--junit", "r.xml")
        assert done.returncode == 1
        heads = [line for line in done.stdout.splitlines() if not line.startswith(" ")]
        names = ("suite/a.yaml", "suite/b.yml", "suite/deeper/pair.yaml")
        assert heads[:3] == [
            f"passed  {tmp_path / names[0]}  (1)",
            f"FAILED  {tmp_path / names[1]}",
            f"passed  {tmp_path / names[2]}  (1)",
        ]
        assert heads[3] == "2 of 3 scenarios passed"
        root = ElementTree.parse(tmp_path / "r.xml").getroot()
        assert [suite.attrib for suite in root] == [
            {"name": str(tmp_path / name), "tests": str(tests), "failures": str(failures), "errors": "0"}
            for name, tests, failures in zip(names, (1, 2, 1), (0, 1, 0), strict=True)
        ]
        (failure,) = root.iter("failure")
        assert "expected: equals 41" in (failure.text or "")
        assert {item.name for item in tmp_path.iterdir()} == {"suite", "r.xml"}

    def test_equal_runs_give_equal_files(self, g2sim: Cli, tmp_path: Path) -> None:
        folder = self.folder(tmp_path)
        for number, jobs in enumerate((1, 2)):
            g2sim("test", folder, "--jobs", jobs, "--junit", f"{number}.xml", hash_seed=number)
        assert (tmp_path / "0.xml").read_bytes() == (tmp_path / "1.xml").read_bytes()

    def test_a_scenario_that_cannot_be_read_is_an_error_and_the_others_run(self, g2sim: Cli, tmp_path: Path) -> None:
        bad = write(tmp_path / "bad.yaml", changed(SMALL, "rooter", {}))
        good = write(tmp_path / "good.yaml", GOOD)
        done = g2sim("test", bad, good, "--jobs", 1, "--junit", "r.xml")
        assert done.returncode == 2
        assert f"passed  {good}" in done.stdout
        assert [suite.get("errors") for suite in ElementTree.parse(tmp_path / "r.xml").getroot()] == ["1", "0"]

    def test_nothing_to_run_and_a_file_in_the_way_are_refused(self, g2sim: Cli, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        assert g2sim("test", "empty").returncode == 2
        (tmp_path / "r.xml").write_text("mine")
        done = g2sim("test", write(tmp_path / "s.yaml", GOOD), "--junit", "r.xml")
        assert done.returncode == 2
        assert done.stderr.startswith("error: --junit: exists already")
        assert (tmp_path / "r.xml").read_text() == "mine"

    def test_ctrl_c_ends_it_with_130_and_leaves_nothing(self, tmp_path: Path) -> None:
        long = changed(SMALL, "traffic.stop.requests", 300_000)
        for name in ("a.yaml", "b.yaml"):
            write(tmp_path / name, long)
        (scratch := tmp_path / "scratch").mkdir()
        command = ["test", "a.yaml", "b.yaml", "--jobs", "2", "--junit", "r.xml"]
        child = start_cli(tmp_path, *command, env=os.environ | {"TMPDIR": str(scratch)})
        deadline = time.monotonic() + 60
        while len(list(scratch.glob("*/*.partial"))) < 2:
            assert time.monotonic() < deadline
            assert child.poll() is None
            time.sleep(0.02)
        child.send_signal(signal.SIGINT)
        _, said = child.communicate(timeout=60)
        assert child.returncode == 130
        assert "Traceback" not in said
        assert {item.name for item in tmp_path.iterdir()} == {"a.yaml", "b.yaml", "scratch"}
        assert list(scratch.iterdir()) == []
