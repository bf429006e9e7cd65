"""``g2sim sweep``: rows are what single runs say, however run; finished points are neither lost nor repeated."""

from __future__ import annotations

import csv
import json
import os
import signal
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import yaml
from cli_process import run_cli, start_cli
from hypothesis import given
from hypothesis import strategies as st
from sweep_values import GPU, REQUESTS, refused, scenario_file, trace_file, values

from g2sim.bus.errors import ConfigError
from g2sim.scenarios.run import run_scenario
from g2sim.scenarios.schema import Scenario
from g2sim.scenarios.sweep import METRICS, read_settings
from g2sim.scenarios.sweep import sweep as run_sweep


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    return scenario_file(tmp_path)


# -- settings


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["seed"], "PATH=VALUE"),
        (["=1"], "PATH=VALUE"),
        (["engine..mode=1"], "PATH=VALUE"),
        (["engine.mode="], "values with commas"),
        (["engine.mode=a,,b"], "not valid YAML"),
        (["engine.mode=a], more: [b"], "not valid YAML"),
        (["engine.mode=a]\nmore: [b"], "values with commas"),
        (["engine.mode=a # b"], "not valid YAML"),
        (["engine.mode=1,1"], "two of the values are the same"),
        (["engine.mode=.nan"], "must be finite"),
        (["engine.mode=1", "engine.mode=2"], "given twice"),
        (["engine=1", "engine.mode=2"], "inside the other"),
        (["engine.mode=2", "engine=1"], "inside the other"),
        (["why=a,b"], "does not change"),
        (["variants.a.seed=1"], "does not change"),
        (["seed=1,2"], "--seeds"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_settings(settings)
    assert said in str(caught.value)
    assert "--set" in str(caught.value)


@given(st.lists(st.integers() | st.booleans() | st.none() | st.text("abc", min_size=1) | st.lists(st.integers())))
def test_values_are_read_as_yaml_reads_them(given_values: list[Any]) -> None:
    told = {json.dumps(value): value for value in given_values}
    if told:
        assert read_settings([f"a.b={','.join(told)}"]) == {"a.b": list(told.values())}


def test_paths_that_begin_alike_are_not_inside_each_other() -> None:
    assert list(read_settings(["engine.mode=1", "engine.model=2"])) == ["engine.mode", "engine.model"]


def test_too_many_points_are_refused_before_any_runs(scenario: Path) -> None:
    with pytest.raises(ConfigError, match="got 10008; allowed: at most 10000"):
        run_sweep(scenario, {GPU: range(1, 10), "router.policy": range(1112)})


# -- rows


def test_each_row_holds_what_a_run_of_its_scenario_reports(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(yaml.safe_dump(values(poisson=True)))
    told = run_sweep(path, {GPU: [16, 64], "router.policy": ["random", "dynamo_kv"]}, seeds=2)
    points = [(blocks, policy, seed) for blocks in (16, 64) for policy in ("random", "dynamo_kv") for seed in (3, 4)]
    assert [(*row.labels.values(), row.seed) for row in told.rows] == points
    for row, (blocks, policy, seed) in zip(told.rows, points, strict=True):
        same = values(poisson=True) | {"seed": seed, "router": {"policy": policy}}
        same["engine"]["workers"]["aggregated"]["kv_cache"]["capacity"]["blocks"] = blocks
        same["traffic"]["load"]["seed"] = 42 + seed - 3
        report = run_scenario(Scenario.from_dict(same), None).report
        assert row.values is not None
        for name in ("p99_ttft_ms", "mean_tpot_ms", "median_e2e_latency_ms", "total_throughput_tok_s"):
            assert row.values[name] == report["summary"][name], (row, name)
        assert row.values["goodput_rps"] == report["summary"]["goodput_request_throughput_rps"]
    assert len({row.values["mean_ttft_ms"] for row in told.rows if row.values is not None}) > 2


def test_the_files_hold_the_same_bytes_however_points_are_run(scenario: Path) -> None:
    folder = scenario.parent
    command = ("sweep", "s.yaml", "--set", f"{GPU}=8,64", "--set", "traffic.source.strict=false,true", "--seeds", 2)
    told = [
        run_cli(
            folder,
            *(*command, "--json", "--csv", f"{jobs}.csv", "--parquet", f"{jobs}.parquet"),
            *("--jobs", jobs, "--out", f"kept{jobs}"),
            hash_seed=jobs,
        )
        for jobs in (1, 2)
    ]
    assert [done.returncode for done in told] == [0, 0], told[0].stderr
    assert told[0].stdout == told[1].stdout
    assert (folder / "1.csv").read_bytes() == (folder / "2.csv").read_bytes()
    assert (folder / "1.parquet").read_bytes() == (folder / "2.parquet").read_bytes()
    kept = [{file.name: file.read_bytes() for file in (folder / f"kept{jobs}").iterdir()} for jobs in (1, 2)]
    assert kept[0] == kept[1]
    assert len(kept[0]) == 8
    rows = list(csv.DictReader((folder / "1.csv").read_text().splitlines()))
    assert [(row[GPU], row["traffic.source.strict"], row["seed"]) for row in rows[:3]] == [
        ("8", "false", "3"),
        ("8", "false", "4"),
        ("8", "true", "3"),
    ]
    frame = pyarrow.parquet.read_table(folder / "1.parquet").to_pylist()
    assert [(row[GPU], row["traffic.source.strict"], row["seed"]) for row in frame[1:3]] == [
        (8, False, 4),
        (8, True, 3),
    ]
    for row, plain, framed in zip(rows, json.loads(told[0].stdout)["rows"], frame, strict=True):
        assert row["error"] == ""
        for metric in METRICS:
            value = plain["values"][metric.name]
            assert (None if row[metric.name] == "" else float(row[metric.name])) == value == framed[metric.name]


def test_values_of_several_types_are_text_in_columns(scenario: Path) -> None:
    host = "engine.workers.aggregated.kv_cache.host_offload"
    columns = run_sweep(scenario, {host: [None, {"num_host_blocks": 8}], GPU: [5, 6]}).columns()
    assert columns[host] == (str, ["null", "null", '{"num_host_blocks": 8}', '{"num_host_blocks": 8}'])
    assert columns[GPU] == (int, [5, 6, 5, 6])
    kind, errors = columns["error"]
    assert kind is str
    assert [error is None for error in errors] == [False, True, False, True]


# -- failures


def test_a_point_that_fails_is_a_row_and_is_tried_again(scenario: Path) -> None:
    folder = scenario.parent
    trace_file(folder / "good.jsonl", REQUESTS[:2])
    (folder / "bad.jsonl").write_text("{\n")
    command = ("sweep", "s.yaml", "--set", "traffic.source.paths=[bad.jsonl],[good.jsonl],[none.jsonl]")
    done = run_cli(folder, *command, "--csv", "a.csv", "--out", "kept", "--jobs", 2)
    assert done.returncode == 1, done.stderr
    assert "error: 2 of 3 points failed\n" in done.stderr
    bad, good, none = csv.DictReader((folder / "a.csv").read_text().splitlines())
    assert "bad.jsonl" in bad["error"]
    assert (bad["mean_ttft_ms"], good["error"], good["not_completed"]) == ("", "", "0.0")
    assert "no such file" in none["error"]
    assert len(list((folder / "kept").iterdir())) == 1
    trace_file(folder / "bad.jsonl", REQUESTS[:2])
    trace_file(folder / "none.jsonl", REQUESTS[:1])
    again = run_cli(folder, *command, "--out", "kept")
    assert again.returncode == 0, again.stderr
    assert "1 of 3 points were there already\n" in again.stderr
    assert "2/2 runs: " in again.stderr


def test_a_run_that_comes_to_no_end_is_a_row(scenario: Path) -> None:
    told = run_sweep(scenario, {GPU: [5, 6]})
    assert [row.error is None for row in told.rows] == [False, True]
    assert "request 2 waits for 6 GPU blocks, more than the 5 there are" in str(told.rows[0].error)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--set", "engine.workrs.x=1,2"], "did you mean workers?\nwith engine.workrs.x=1"),
        (["--set", f"{GPU}=8", "--csv", "kept.csv"], "--csv: exists already"),
        (["--set", f"{GPU}=8", "--csv", "no/a.csv"], "--csv: cannot be written"),
        (["--set", f"{GPU}=8", "--parquet", "kept.csv"], "--parquet: exists already"),
        (["--set", f"{GPU}=8", "--csv", "a", "--parquet", "./a"], "two outputs are the same file"),
        (["--set", f"{GPU}=8", "--out", "kept.csv"], "--out: cannot be used as a folder"),
        (["--set", f"{GPU}=8", "--out", "no/points"], "--out: cannot be used as a folder"),
    ],
)
def test_bad_input_runs_and_leaves_nothing(
    scenario: Path,
    arguments: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = scenario.parent
    monkeypatch.chdir(folder)
    (folder / "kept.csv").write_text("kept")
    before = sorted(folder.iterdir())
    given_out = [] if "--out" in arguments else ["--out", "points"]
    err = refused(capsys, "sweep", "s.yaml", *arguments, *given_out)
    assert said in err
    assert "runs:" not in err
    assert sorted(folder.iterdir()) == before
    assert (folder / "kept.csv").read_text() == "kept"


# -- finished points


def test_only_what_decides_a_point_makes_it_another_one(scenario: Path) -> None:
    points = scenario.parent / "points"

    def kept(blocks: list[int]) -> int:
        return run_sweep(scenario, {GPU: blocks}, folder=points).kept

    assert kept([8, 16]) == 0
    assert kept([16, 32]) == 1
    scenario.write_text(yaml.safe_dump(values() | {"why": "another", "name": "another"}))
    assert kept([8, 16, 32]) == 3
    trace_file(scenario.parent / "t.jsonl", REQUESTS[:3])
    assert kept([8, 16, 32]) == 0
    changed = values()
    changed["engine"]["workers"]["aggregated"]["kv_cache"]["host_offload"]["num_host_blocks"] = 65
    scenario.write_text(yaml.safe_dump(changed))
    assert kept([8]) == 0


@pytest.mark.parametrize("damage", ["", "{}", '{"values": {}}', '{"values": 1}', "[]"])
def test_a_point_that_cannot_be_read_is_run_again(scenario: Path, damage: str) -> None:
    points = scenario.parent / "points"
    first = run_sweep(scenario, {GPU: [8]}, folder=points)
    (file,) = points.iterdir()
    good = file.read_text()
    file.write_text(damage)
    second = run_sweep(scenario, {GPU: [8]}, folder=points)
    assert second == first
    assert file.read_text() == good


def test_an_interrupt_leaves_finished_points_and_the_next_run_does_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(yaml.safe_dump(values(poisson=True) | {"name": "long"}))
    command = ["sweep", "s.yaml", "--set", f"{GPU}=16,32", "--set", "traffic.stop.requests=20,300", "--seeds", "2"]
    command += ["--jobs", "2", "--out", "points", "--csv", "a.csv"]
    with start_cli(tmp_path, *command, start_new_session=True) as running:
        assert running.stderr is not None
        assert "1/8 runs: " in running.stderr.readline()
        os.killpg(running.pid, signal.SIGINT)
        out, err = running.communicate(timeout=60)
    assert (running.returncode, out) == (130, "")
    assert err.splitlines()[-1] == "interrupted"
    assert "Traceback" not in err
    finished = sorted(file.name for file in (tmp_path / "points").iterdir())
    assert 1 <= len(finished) < 8
    assert all(name.endswith(".json") for name in finished)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["points", "s.yaml"]
    rest = run_cli(tmp_path, *command, "--out", "points", "--json")
    assert rest.returncode == 0, rest.stderr
    assert f"{len(finished)} of 8 points were there already\n" in rest.stderr
    assert f"{8 - len(finished)}/{8 - len(finished)} runs: " in rest.stderr
    whole = run_sweep(path, {GPU: [16, 32], "traffic.stop.requests": [20, 300]}, seeds=2)
    assert json.loads(rest.stdout) == whole.plain()
