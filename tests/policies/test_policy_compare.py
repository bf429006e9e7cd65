"""``g2sim compare``: its figures are those of single runs, its rates are what they say, its intervals are Student's."""

from __future__ import annotations

import builtins
import json
import math
import os
import signal
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import attrs
import pytest
import yaml
from cli_process import start_cli
from policy_values import CHATS, cli, write_policy

from g2sim.actors.router.registry import POLICIES
from g2sim.bus.errors import ConfigError, SimError
from g2sim.scenarios.compare import METRICS, Comparison, Run, compare, half_width, seeded, t_quantile
from g2sim.scenarios.compare_picture import render_picture
from g2sim.scenarios.placement_audit import PlacementAudit
from g2sim.scenarios.policy_source import PolicyChoice, with_policy
from g2sim.scenarios.run import run_scenario
from g2sim.scenarios.schema import PoissonLoad, SyntheticSessionSource, load_scenario

WORKER = {
    "parallelism": {"replicas": 2},
    "kv_cache": {"block_size": 4, "capacity": {"type": "fixed", "blocks": 64}},
    "timing": {"type": "fixed", "prefill_ms": 10.0, "decode_ms": 1.0},
}


def scenario_file(folder: Path, rows: list[tuple[float, list[int]]] | None = None, *, apart: bool = False) -> Path:
    """A scenario of two workers a role: the rows as (arrival [ms], block ids), or random arrivals."""
    roles = ("prefill", "decode") if apart else ("aggregated",)
    source: dict[str, Any] = {"type": "synthetic", "input_tokens": 16, "output_tokens": 3}
    traffic: dict[str, Any] = {"source": source, "load": {"type": "poisson", "requests_per_second": 150.0}}
    traffic["stop"] = {"requests": 20}
    if rows is not None:
        lines = [
            {"timestamp": at_ms, "input_length": 4 * len(ids), "output_length": 2, "hash_ids": ids}
            for at_ms, ids in rows
        ]
        (folder / "t.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        source = {"type": "trace", "format": "mooncake", "paths": ["t.jsonl"], "block_size": 4}
        traffic = {"source": source, "load": {"type": "trace_timestamps"}}
    values = {
        "seed": 3,
        "engine": {"mode": "disaggregated" if apart else "aggregated", "workers": dict.fromkeys(roles, WORKER)},
        "traffic": traffic,
        "evaluation": {"sla": {"ttft_ms": 12.0, "itl_ms": 5.0}},
    }
    path = folder / "scenario.yaml"
    path.write_text(yaml.safe_dump(json.loads(json.dumps(values))))
    return path


# -- refused


@pytest.mark.parametrize(
    ("policies", "said"),
    [
        (["round_robin", "round_robin"], "two of them are the same"),
        (["round_robin"], "two of them are the same"),
        (["nobody", "random"], "got 'nobody'"),
        (["dynamo_kv,host_weight=1", "random"], "policy dynamo_kv has no such option"),
        (["dynamo_kv,1", "random"], "OPTION=VALUE"),
    ],
)
def test_policies_that_cannot_be_compared_are_refused(policies: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        compare(scenario_file(tmp_path), policies)
    assert said in str(caught.value)


def test_a_picture_that_cannot_be_written_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "kept.svg").write_text("kept")
    for picture, said in (("a.png", "ends in .svg"), ("kept.svg", "--overwrite"), ("no/a.svg", "no such folder: no")):
        done = cli(tmp_path, "compare", CHATS, "--policy", "random", "--picture", picture)
        assert (done.returncode, done.stdout) == (2, "")
        assert said in done.stderr
        assert "runs:" not in done.stderr
    assert (tmp_path / "kept.svg").read_text() == "kept"


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_policy_at_fault_is_named_with_its_run(jobs: int, tmp_path: Path) -> None:
    own = write_policy(tmp_path / "own.py", "def score(self, request, candidate): return 1 / (5 - request.request)")
    with pytest.raises(SimError) as caught:
        compare(scenario_file(tmp_path), ["round_robin", str(own)], jobs=jobs)
    assert caught.value.exit_code == 1
    assert "policy own, request 5 at " in str(caught.value)
    assert caught.value.__notes__ == [f"in the run under {own} with seed 3"]


def test_an_interrupt_ends_all_processes_without_a_traceback(tmp_path: Path) -> None:
    command = ["compare", CHATS, "--policy", "random", "--seeds", "50", "--jobs", "2"]
    with start_cli(tmp_path, *command, start_new_session=True) as running:
        assert running.stderr is not None
        assert "1/100 runs: " in running.stderr.readline()
        os.killpg(running.pid, signal.SIGINT)
        out, err = running.communicate(timeout=60)
    assert (running.returncode, out) == (130, "")
    assert err.splitlines()[-1] == "interrupted"
    assert "Traceback" not in err


# -- figures


def test_the_rates_of_a_worked_example(tmp_path: Path) -> None:
    """Round robin: requests 0 and 2 on worker 0, 1 and 3 on worker 1; the prompts have 16, 16, 20 and 16 tokens.

    Request 2 shares 4 blocks with request 1, which worker 1 holds: best 4, real 0. Request 3 repeats request 1 on the
    same worker: all 4 blocks are there, and the last is computed anyway: best and real 3. Unlimited is 4 + 3.
    """
    rows = [(0.0, [1, 2, 3, 4]), (1.0, [11, 12, 13, 14]), (100.0, [11, 12, 13, 14, 15]), (200.0, [11, 12, 13, 14])]
    told = compare(scenario_file(tmp_path, rows), ["round_robin", "prefix_affinity"])
    worked = {
        "hit_rate_unlimited": 100 * 28 / 68,
        "hit_rate_best": 100 * 28 / 68,
        "hit_rate_real": 100 * 12 / 68,
        "regret_blocks": 4 / 4,
        "g1_share": 100 * 12 / 68,
        "computed_share": 100 * 56 / 68,
        "good_share": 100.0,
        "imbalance": 36 / 28,
        "not_completed": 0.0,
    }
    for name, value in worked.items():
        assert told.mean("round_robin", name) == pytest.approx(value), name
    assert told.mean("prefix_affinity", "hit_rate_real") == pytest.approx(100 * 28 / 68)
    assert told.mean("prefix_affinity", "regret_blocks") == 0.0
    gap = told.difference("prefix_affinity", "hit_rate_real")
    assert gap is not None
    assert (gap.mean, gap.half_width) == (pytest.approx(100 * 16 / 68), None)


def test_the_unlimited_rate_is_what_the_traces_ids_say_and_bounds_the_others(tmp_path: Path) -> None:
    scenario = with_policy(load_scenario(CHATS), PolicyChoice("least_loaded"))
    audit = PlacementAudit(scenario.deployment)
    rows: list[dict[str, Any]] = []
    run_scenario(scenario, None, on_record=audit.on_record, on_request=audit.on_request, on_row=rows.append)
    figures = audit.figures()
    assert figures["hit_rate_unlimited"] >= figures["hit_rate_best"] > figures["hit_rate_real"] > 0
    reused = sum(row["admission_history"][0]["reused_input_tokens"] for row in rows)
    asked = sum(row["input_length"] for row in rows)
    assert figures["hit_rate_real"] == reused / asked
    # A trace hash id is 512 tokens; the last one of a prompt can be shorter, and turns repeat it only if it is whole.
    assert scenario.trace_path is not None
    sessions: dict[str, int] = {}
    shared = 0
    for line in scenario.trace_path.read_text().splitlines():
        row = json.loads(line)
        previous = sessions.get(row["session_id"])
        shared += (512 * 4 if sessions else 0) if previous is None else previous // 64 * 64
        sessions[row["session_id"]] = row["input_length"]
    assert figures["hit_rate_unlimited"] * asked == pytest.approx(shared, rel=0.02)


def test_latencies_are_those_of_the_single_runs_and_jobs_change_nothing(tmp_path: Path) -> None:
    path = scenario_file(tmp_path)
    arguments = ["compare", path, "--policy", "round_robin", "--policy", "random", "--seeds", "3", "--json"]
    one = cli(tmp_path, *arguments, "--picture", "one.svg")
    two = cli(tmp_path, *arguments, "--jobs", "2", "--picture", "two.svg", hash_seed=5)
    assert one.returncode == two.returncode == 0, one.stderr + two.stderr
    assert one.stdout == two.stdout
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert one.stderr.splitlines()[0] == "[####....................] 1/6 runs: round_robin, seed 3"
    told = json.loads(one.stdout)
    assert (told["schema"], told["seeds"], told["baseline"]) == ("g2sim.compare/1", [3, 4, 5], "round_robin")
    single = cli(tmp_path, "run", path, "--policy", "random", "--json", "--quiet")
    summary = json.loads(single.stdout)["summary"]
    (first,) = [run["values"] for run in told["runs"] if (run["policy"], run["seed"]) == ("random", 3)]
    for metric in METRICS:
        if metric.unit == "ms":
            assert first[metric.name] == summary[metric.name]
    means = [run["values"]["mean_ttft_ms"] for run in told["runs"] if run["policy"] == "round_robin"]
    assert len(set(means)) == 3, "arrivals follow the seed"


def test_the_seeds_of_traffic_move_along(tmp_path: Path) -> None:
    scenario = load_scenario(scenario_file(tmp_path))
    traffic = attrs.evolve(
        scenario.traffic, load=PoissonLoad(per_second=1.0, seed=40), source=SyntheticSessionSource(group_seed=9)
    )
    moved = seeded(attrs.evolve(scenario, traffic=traffic), 2)
    assert (moved.seed, moved.traffic.load, moved.traffic.source) == (
        5,
        PoissonLoad(per_second=1.0, seed=42),
        SyntheticSessionSource(group_seed=11),
    )


def test_one_policy_is_compared_with_the_scenarios_own_and_pools_can_be_separate(tmp_path: Path) -> None:
    told = compare(scenario_file(tmp_path, apart=True), ["least_loaded"])
    assert told.policies == ("round_robin", "least_loaded")
    assert told.mean("least_loaded", "not_completed") == 0.0
    assert told.mean("least_loaded", "imbalance") is not None


# -- differences


def test_nothing_adds_floats_with_sum_whose_last_bits_depend_on_the_version_of_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = builtins.sum

    def sum_of_others(values: Iterable[Any], start: Any = 0) -> Any:
        found = list(values)
        assert not any(isinstance(value, float) for value in (*found, start)), found
        return total(found, start)

    own = write_policy(tmp_path / "own.py", "def score(self, r, c): return {'a': c.active_blocks / 3, 'b': 0.1}")
    path = scenario_file(tmp_path)
    monkeypatch.setattr(builtins, "sum", sum_of_others)
    told = compare(path, [*POLICIES, "dynamo_kv,router_temperature=0.7", str(own)], seeds=2)
    assert told.mean(str(own), "mean_ttft_ms") is not None
    run_scenario(load_scenario(path), tmp_path / "run")


def test_quantiles_are_those_of_printed_tables() -> None:
    table = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 7: 2.365, 9: 2.262, 29: 2.045, 120: 1.980}
    for freedom, value in table.items():
        assert round(t_quantile(freedom), 3) == value


def test_an_interval_of_four_values_is_worked_by_hand() -> None:
    values = [1.0, 2.0, 4.0, 9.0]
    assert statistics.stdev(values) == pytest.approx(math.sqrt(38 / 3))
    assert half_width(values) == pytest.approx(3.182446 * math.sqrt(38 / 3) / 2)
    assert half_width([1.0]) is None
    assert half_width([1.0, 1.0, 1.0]) is None, "equal values say nothing of other traffic"


def made_up(values: dict[str, list[float | None]]) -> Comparison:
    """A comparison whose every figure of a policy is this, one a seed."""
    seeds = tuple(range(len(next(iter(values.values())))))
    runs = tuple(
        Run(policy, seed, {metric.name: values[policy][seed] for metric in METRICS})
        for seed in seeds
        for policy in values
    )
    return Comparison(scenario="made up", policies=tuple(values), seeds=seeds, runs=runs)


def test_differences_are_paired_by_seed() -> None:
    """Seeds differ by far more than the policies do; pairs show it."""
    told = made_up({"base": [10.0, 200.0, 3000.0], "ours": [11.0, 201.5, 3001.0], "none": [1.0, None, 2.0]})
    gap = told.difference("ours", "mean_ttft_ms")
    assert gap is not None
    assert gap.mean == pytest.approx(3.5 / 3)
    assert gap.is_clear
    assert told.difference("none", "mean_ttft_ms") is None
    json.dumps(told.plain(), allow_nan=False)


# -- the picture


@pytest.mark.parametrize("values", [[0.0, 0.0], [None, None], [1e-6, 2e-6], [33.0, 1.0], [-0.0, 0.3]])
def test_the_picture_is_xml_whose_coordinates_are_on_it(values: list[float | None]) -> None:
    name = "<a & b>, a name that is much too long for the label"
    root = ElementTree.fromstring(render_picture(made_up({name: values, "b": values[::-1]})))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    texts = [element.text or "" for element in root.iter() if element.tag.endswith("title")]
    assert name in texts
    for element in root.iter():
        for key, limit in (("x", width), ("x1", width), ("x2", width), ("cx", width), ("y", height), ("cy", height)):
            assert 0.0 <= float(element.attrib.get(key, 0.0)) <= limit, element.attrib
