"""Scripted scenarios: what goes wrong first, then what a script can do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trio
from cli_process import run_cli

from g2sim.actors.host_pool.events import LoadFinished
from g2sim.actors.router.events import RequestPlaced
from g2sim.actors.traffic.events import RequestArrived
from g2sim.actors.worker.events import PassEnded, RequestEnded
from g2sim.bus.drivers import InlineDriver, TrioDriver
from g2sim.bus.errors import ConfigError, Deadlock
from g2sim.scenarios.report import report_text
from g2sim.scenarios.run import RunResult, report_of_log, run_scenario
from g2sim.scenarios.schema import Scenario
from g2sim.scenarios.script import CachedBlocks, Script, ScriptFailed, scripted_scenario

pytest_plugins = ["g2sim.scenarios.pytest_plugin"]

BLOCK = 4


def deployment(replicas: int = 2, blocks: int = 16, host_blocks: int = 64, **router: Any) -> dict[str, Any]:
    """Blocks of 4 tokens that take 1 ms to copy; 10 ms prefill and 1 ms decode passes."""
    tier = {
        "scope": "cluster_shared",
        "num_host_blocks": host_blocks,
        "d2h_bandwidth_gbps": 1.0,
        "h2d_bandwidth_gbps": 1.0,
    }
    cache = {"block_size": BLOCK, "bytes_per_token": 250_000, "capacity": {"type": "fixed", "blocks": blocks}}
    worker = {
        "parallelism": {"replicas": replicas},
        "scheduler": {"max_batched_tokens": 256, "max_sequences": 8},
        "kv_cache": cache | {"host_offload": tier},
        "timing": {"type": "fixed", "prefill_ms": 10.0, "decode_ms": 1.0},
    }
    return {"engine": {"mode": "aggregated", "workers": {"aggregated": worker}}, "router": router}


def run(function: Any, values: dict[str, Any] | None = None, **options: Any) -> RunResult:
    scenario = scripted_scenario(values or deployment(), Path(__file__))
    return run_scenario(scenario, options.pop("folder", None), script=Script(function, "script.py"), **options)


# -- what goes wrong


def test_an_assertion_fails_the_run_with_line_time_and_the_events_before_it() -> None:
    async def scenario(cluster: Any) -> None:
        await cluster.submit([1, 2]).end()
        assert cluster.now_ms == 11.0

    with pytest.raises(ScriptFailed) as caught:
        run(scenario)
    text = str(caught.value)
    assert text.startswith("script.py:")
    assert "at 10.0 ms: AssertionError" in text
    assert "RequestEnded" in text
    assert isinstance(caught.value.__cause__, AssertionError)
    assert caught.value.exit_code == 1


def test_an_event_that_does_not_come_is_a_deadlock_that_names_the_line() -> None:
    async def scenario(cluster: Any) -> None:
        await cluster.event(RequestEnded, request=7)

    with pytest.raises(Deadlock) as caught:
        run(scenario)
    line = scenario.__code__.co_firstlineno + 1
    assert f"script: script.py:{line} waits for RequestEnded" in caught.value.waiting


def test_an_event_that_does_not_come_in_time_is_an_assertion() -> None:
    async def scenario(cluster: Any) -> None:
        cluster.submit([1])
        await cluster.event(RequestEnded, within_ms=9.0)

    with pytest.raises(ScriptFailed, match=r"no RequestEnded that matches by 9\.0 ms"):
        run(scenario)


def test_a_script_may_only_await_the_cluster() -> None:
    async def scenario(cluster: Any) -> None:
        await trio.lowlevel.checkpoint()

    with pytest.raises(ScriptFailed, match="may only await what the cluster offers"):
        run(scenario)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"blocks": []}, "input_tokens"),
        ({"blocks": [-1]}, "blocks"),
        ({"blocks": [1.0]}, "blocks"),
        ({"blocks": [2**31]}, "blocks"),
        ({"blocks": [1, 2], "input_tokens": 4}, "input_tokens"),
        ({"blocks": [1, 2], "input_tokens": 9}, "input_tokens"),
        ({"blocks": [1], "output_tokens": -1}, "output_tokens"),
        ({"blocks": [1], "at_ms": -1.0}, "at_ms"),
        ({"blocks": [1], "at_ms": float("nan")}, "at_ms"),
        ({"blocks": [1], "at_ms": float("inf")}, "at_ms"),
    ],
)
def test_bad_requests_are_refused(arguments: dict[str, Any], field: str) -> None:
    async def scenario(cluster: Any) -> None:
        cluster.submit(**arguments)

    with pytest.raises(ScriptFailed) as caught:
        run(scenario)
    assert isinstance(caught.value.__cause__, ConfigError)
    assert caught.value.__cause__.field == field


def test_a_time_limit_that_comes_before_the_end_of_the_script_fails_it() -> None:
    async def scenario(cluster: Any) -> None:
        await cluster.until(1000.0)

    with pytest.raises(ScriptFailed, match="time limit"):
        run(scenario, deployment() | {"traffic": {"stop": {"max_virtual_time_ms": 10.0}}})


def test_a_scenario_file_cannot_name_a_script(tmp_path: Path) -> None:
    values = deployment() | {"traffic": {"source": {"type": "script", "path": "x.py"}, "load": {}}}
    with pytest.raises(ConfigError, match=r"traffic\.source\.type: .*g2sim run FILE\.py"):
        run_scenario(Scenario.from_dict(values), None)


# -- what a script can do


def test_requests_are_served_and_their_rows_come_back() -> None:
    told: list[Any] = []

    async def scenario(cluster: Any) -> None:
        first = cluster.submit([1, 2, 3], output_tokens=3)
        admitted = await first.admitted()
        told.append((admitted.worker, cluster.now_ms))
        row = await first.end()
        told.append((row["terminal_status"], row["output_length"], cluster.now_ms))
        later = cluster.submit([1, 2, 3, 4], at_ms=50.0)
        assert later.number is None
        with pytest.raises(AssertionError, match="has not ended"):
            assert later.row
        await cluster.idle()
        told.append((later.number, later.row["arrival_time_ms"], later.row["reused_input_tokens"]))
        assert await later.end() is later.row

    result = run(scenario, deployment(replicas=1))
    assert told == [(0, 0.0), ("completed", 3, 12.0), (1, 50.0, 3 * BLOCK)]
    assert result.report["requests"]["completed"] == 2


def test_time_passes_only_as_the_script_says() -> None:
    times: list[float] = []

    async def scenario(cluster: Any) -> None:
        times.append(cluster.now_ms)
        await cluster.sleep(2.5)
        times.append(cluster.now_ms)
        await cluster.until(1.0)
        times.append(cluster.now_ms)
        await cluster.until(100.0)
        times.append(cluster.now_ms)

    run(scenario)
    assert times == [0.0, 2.5, 2.5, 100.0]


def test_no_event_of_one_instant_is_missed() -> None:
    seen: list[int] = []

    async def scenario(cluster: Any) -> None:
        for _ in range(4):
            cluster.submit([1])
        for _ in range(4):
            seen.append((await cluster.event(RequestEnded)).request)

    run(scenario)
    assert sorted(seen) == [0, 1, 2, 3]


def test_events_during_a_sleep_are_past_but_on_record() -> None:
    async def scenario(cluster: Any) -> None:
        cluster.submit([1])
        await cluster.sleep(40.0)
        (ended,) = cluster.records(RequestEnded, request=0)
        assert ended.time_ms == 10.0
        again = cluster.submit([1])
        assert (await cluster.event(RequestEnded)).request == 1 == again.number
        assert len(cluster.records()) > len(cluster.records(PassEnded, RequestArrived)) > 0

    run(scenario)


def test_residency_is_there_to_ask_for() -> None:
    """Computed on one worker; the other one restores it from the shared pool."""

    async def scenario(cluster: Any) -> None:
        prompt = [1, 2, 3]
        assert cluster.cached(prompt) == CachedBlocks(0, 0)
        await cluster.submit(prompt).end()
        await cluster.sleep(10.0)
        assert cluster.cached(prompt) == CachedBlocks(3, 0)
        assert cluster.cached(prompt, worker=1) == CachedBlocks(0, 3)
        again = cluster.submit([*prompt, 4])
        await cluster.event(LoadFinished)
        row = await again.end()
        assert row["first_admission_host_reused_input_tokens"] == 12
        assert cluster.cached([*prompt, 4], worker=1) == CachedBlocks(4, 0)
        with pytest.raises(ConfigError, match="worker"):
            cluster.cached(prompt, worker=2)
        with pytest.raises(ConfigError, match="role"):
            cluster.cached(prompt, role="prefill")

    run(scenario)


def test_sessions_count_their_turns() -> None:
    async def scenario(cluster: Any) -> None:
        for turn in range(3):
            row = await cluster.submit([1, turn + 2], session="chat").end()
            assert (row["session_id"], row["turn_index"]) == ("chat", turn)
        places = {record.event.worker for record in cluster.records(RequestPlaced)}
        assert len(places) == 1

    run(scenario, deployment(policy="session_affinity"))


def test_both_drivers_and_the_log_tell_the_same(tmp_path: Path) -> None:
    async def scenario(cluster: Any) -> None:
        for k in range(6):
            await cluster.submit([k % 2, 7, 8]).admitted()
            await cluster.sleep(0.5)
        await cluster.idle()

    results = [
        run(scenario, folder=tmp_path / driver.__name__, verify=True, driver=driver)
        for driver in (TrioDriver, InlineDriver)
    ]
    assert results[0].digest == results[1].digest
    assert results[0].checkpoints > 0
    rebuilt = report_of_log(tmp_path / "TrioDriver")
    assert report_text(rebuilt.report) == report_text(results[0].report)


# -- from a file, and in a suite


FILE = """
from g2sim.actors.worker.events import RequestEnded

SCENARIO = {scenario!r}

async def scenario(cluster):
    await cluster.submit([1, 2, 3]).end()
    again = cluster.submit([1, 2, 3, 4])
    await again.end()
    assert again.row["reused_input_tokens"] == {expected} * cluster.block_size_tokens, again.row
"""


def test_a_file_is_run_reported_and_the_same_whatever_the_hash_seed(tmp_path: Path) -> None:
    (tmp_path / "deployment.yaml").write_text(json.dumps(deployment()))
    file = tmp_path / "twice.py"
    file.write_text(FILE.format(scenario="deployment.yaml", expected=3))
    logs = []
    for seed in ("1", "2"):
        done = run_cli(tmp_path, "run", file, "--out", tmp_path / seed, "--verify", hash_seed=seed)
        assert done.returncode == 0, done.stderr
        logs.append((tmp_path / seed / "events.g2log").read_bytes())
    assert logs[0] == logs[1]
    told = run_cli(tmp_path, "report", tmp_path / "1", "--json")
    assert told.returncode == 0, told.stderr
    assert json.loads(told.stdout)["requests"]["completed"] == 2


def test_a_file_whose_assertion_fails_exits_1_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "wrong.py"
    file.write_text(FILE.format(scenario=deployment(), expected=2))
    done = run_cli(tmp_path, "run", file, "--out", tmp_path / "out")
    assert done.returncode == 1
    line = FILE.splitlines().index(next(text for text in FILE.splitlines() if "assert" in text)) + 1
    assert f"error: {file}:{line} at " in done.stderr
    assert "Traceback" not in done.stderr
    assert run_cli(tmp_path, "report", tmp_path / "out").returncode == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("SCENARIO = {}\n", "scenario: missing"),
        ("async def scenario(cluster): pass\n", "SCENARIO: got None"),
        ("import nothing_of_that_name\n", ":1: cannot be imported: ModuleNotFoundError"),
        ("x = = 1\n", ":1: cannot be imported: SyntaxError"),
        ("SCENARIO = 'none.yaml'\nasync def scenario(cluster): pass\n", "none.yaml"),
        ("SCENARIO = {'engine': {'mod': 1}}\nasync def scenario(cluster): pass\n", "engine.mod"),
    ],
)
def test_a_file_that_is_no_script_exits_2(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "bad.py"
    file.write_text(text)
    done = run_cli(tmp_path, "run", file, "--out", tmp_path / "out")
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_the_library_script_of_the_docs_page(tmp_path: Path) -> None:
    docs = Path(__file__).parents[2] / "docs" / "scripted-scenarios.md"
    command = next(line for line in docs.read_text().splitlines() if line.startswith("    g2sim run")).split()
    assert command[:2] == ["g2sim", "run"]
    done = run_cli(tmp_path, "run", Path(__file__).parents[2] / command[2], "--out", tmp_path / "out", "--verify")
    assert done.returncode == 0, done.stderr


def test_in_a_suite(run_script: Any) -> None:
    async def scenario(cluster: Any) -> None:
        await cluster.submit([1, 2, 3]).end()
        again = cluster.submit([1, 2, 3, 4])
        await again.end()
        assert again.row["first_admission_g1_reused_input_tokens"] == 3 * cluster.block_size_tokens

    run_script(scenario, deployment(), policy="prefix_affinity")
    with pytest.raises(AssertionError):
        run_script(scenario, deployment(), policy="round_robin")
