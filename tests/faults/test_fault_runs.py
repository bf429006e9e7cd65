"""Faults of the event plane in whole runs: indexes get right again, and the report says what it cost."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_process import run_cli
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from g2sim.actors.kv.events import Tier
from g2sim.actors.router import events as ev
from g2sim.bus.drivers import InlineDriver, TrioDriver
from g2sim.bus.errors import ConfigError
from g2sim.bus.events import Record
from g2sim.bus.log import LogReader
from g2sim.scenarios.deployment import build_cluster
from g2sim.scenarios.policy_source import PolicyChoice, with_policy
from g2sim.scenarios.report import report_text
from g2sim.scenarios.run import report_of_log, run_scenario
from g2sim.scenarios.schema import Scenario, load_scenario
from g2sim.scenarios.state_fold import StateFold
from g2sim.scenarios.traffic_source import open_traffic

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "scenarios" / "library"
KINDS = ("lag", "loss", "duplication", "reordering", "outage", "router-restart", "publisher-reset")
COMMAND = re.compile(r"^    (g2sim .*)$", re.MULTILINE)

Values = dict[str, Any]


def values_of(kind: str) -> Values:
    values: Values = yaml.safe_load((LIBRARY / f"faults-{kind}.yaml").read_text(encoding="utf-8"))
    return values


def without_faults() -> Values:
    values = values_of("loss")
    del values["faults"]
    return values


def with_faults(*plan: Values, **recovery: Any) -> Values:
    return {**values_of("loss"), "faults": {"recovery": recovery, "plan": list(plan)}}


def ran(values: Values, driver: Any = InlineDriver) -> tuple[Values, list[Record]]:
    """Report and records of a run, live state checked against the log at every pass end."""
    records: list[Record] = []
    scenario = Scenario.from_dict(values, base_dir=LIBRARY)
    result = run_scenario(scenario, None, verify=True, driver=driver, on_record=records.append)
    return result.report, records


# The library ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=KINDS)
def library_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """(kind, run folder) of each library scenario, with live state checked against the log."""
    out = tmp_path_factory.mktemp("library") / "run"
    run_scenario(load_scenario(LIBRARY / f"faults-{request.param}.yaml"), out, verify=True, driver=InlineDriver)
    return request.param, out


def router_of(report: Values) -> Values:
    (router,) = report["event_plane"]["routers"]
    return dict(router)


def test_library_scenarios_converge_and_show_what_they_say(library_run: tuple[str, Path]) -> None:
    kind, folder = library_run
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    router, (fault,) = router_of(report), report["event_plane"]["faults"]
    assert report["requests"]["completed"] == report["requests"]["released"] == 160
    assert router["index_end"] == {"phantom_blocks": 0, "unseen_blocks": 0, "messages_under_way": 0}
    assert fault["kind"] == kind.replace("-", "_")
    took_ms, struck, stale = router["converged_after_ms"], fault["messages"], router["messages_stale"]
    shown = {
        "lag": struck > 100 and 0.0 < took_ms <= 60.0 and router["phantom_blocks"] > 0 < router["unseen_blocks"],
        "loss": router["messages_lost"] > 50 and router["replays"] > 10 and 0.0 < took_ms <= 70.0,
        "duplication": stale == struck > 50 and router["misinformed"] == took_ms == 0,
        "reordering": router["gaps"] > 10 and router["recoveries"] == 0 and took_ms <= 8.0,
        "outage": (router["gaps"], router["snapshots"], took_ms) == (1, 1, 5.0) and router["chosen_phantom_blocks"] > 0,
        "router-restart": (router["snapshots"], took_ms) == (3, 20.0) and router["chosen_unseen_blocks"] > 30,
        "publisher-reset": stale > 10 and (router["snapshots"], took_ms) == (1, 5.0),
    }
    assert shown[kind], (router, fault)


def test_the_log_alone_gives_the_same_report(library_run: tuple[str, Path]) -> None:
    _, folder = library_run
    assert report_text(report_of_log(folder).report) == (folder / "report.json").read_text(encoding="utf-8")


def test_faults_cost_overlap_that_a_sound_event_plane_gives() -> None:
    """The same traffic: requests reuse less when the router is misinformed, and nothing else is different."""
    reused = {}
    for kind in ("duplication", "router-restart"):
        reused[kind] = ran(values_of(kind))[0]["summary"]["prefix_cache_reused_ratio"]
    sound = ran(without_faults())[0]["summary"]["prefix_cache_reused_ratio"]
    assert reused["duplication"] == sound > reused["router-restart"]


# Properties ----------------------------------------------------------------------------------------------------------

NO_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)
"""A run takes too long to try hundreds of smaller ones; the falsifying plan is small enough."""

TIMES = st.integers(0, 900).flatmap(lambda start: st.tuples(st.just(start), st.integers(start + 1, 1000)))


@st.composite
def plans(draw: Any) -> Values:
    plan = []
    for _ in range(draw(st.integers(1, 4))):
        start, end = draw(TIMES)
        kind = draw(st.sampled_from([one.replace("-", "_") for one in KINDS]))
        fault: Values = {"type": kind, "from_ms": start, "until_ms": end}
        if kind in ("loss", "duplication", "reordering"):
            fault["probability"] = draw(st.sampled_from([0.1, 0.5, 1.0]))
        if kind == "reordering":
            fault["hold_ms"] = draw(st.sampled_from([0.5, 20.0]))
        if kind == "lag":
            fault |= {"lag_ms": draw(st.sampled_from([0, 3])), "lag_max_ms": draw(st.sampled_from([3, 40]))}
        if kind != "router_restart":
            fault["worker"] = draw(st.sampled_from([None, 0, 2]))
        plan.append(fault)
    recovery = {
        "mode": draw(st.sampled_from(["replay", "snapshot"])),
        "latency_ms": draw(st.sampled_from([0, 7])),
        "patience_ms": draw(st.sampled_from([0, 5])),
        "history_events": draw(st.sampled_from([0, 10, 1000])),
        "heartbeat_ms": draw(st.sampled_from([0.1, 100])),
    }
    return {"recovery": recovery, "plan": plan}


@settings(max_examples=6, deadline=None, phases=NO_SHRINKING, suppress_health_check=[HealthCheck.too_slow])
@given(plans(), st.sampled_from([0.0, 4.0]), st.booleans())
def test_every_index_converges_whatever_the_faults(faults: Values, lag_ms: float, separate: bool) -> None:
    values = without_faults() | {"faults": faults, "router": {"policy": "dynamo_kv", "kv_event_lag_ms": lag_ms}}
    if separate:
        one = values["engine"]["workers"]["aggregated"]
        pools = {role: {**one, "parallelism": {"replicas": count}} for role, count in (("prefill", 3), ("decode", 3))}
        values["engine"] = {"mode": "disaggregated", "model": "chat-model", "workers": pools}
    report, records = ran(values)
    assert report["requests"]["completed"] == 160
    routers = report["event_plane"]["routers"]
    assert [one["pool"] for one in routers] == (["prefill"] if separate else ["agg"])
    for router in routers:
        assert router["index_end"] == {"phantom_blocks": 0, "unseen_blocks": 0, "messages_under_way": 0}
        assert router["converged_after_ms"] is not None
        assert router["placements"] == 160
    ends = [record.event for record in records if type(record.event).__name__ == "RequestEnded"]
    assert len({end.request for end in ends}) == len(ends) == 160


def test_an_index_that_has_converged_is_the_residency_of_the_log() -> None:
    """Rebuilt from the workers' events alone, tier by tier."""
    scenario = Scenario.from_dict(values_of("loss"), base_dir=LIBRARY)
    cluster = build_cluster(scenario.deployment, open_traffic(scenario).driver, seed=7, faults=scenario.faults)
    fold = StateFold()
    cluster.kernel.add_sink(fold.apply)
    InlineDriver(cluster.kernel).run()
    (feed,) = cluster.feeds
    for (_, worker, _), state in fold.ranks.items():
        assert set(feed._pool.believed(worker, Tier.DEVICE)) == state.device != set()
        assert set(feed._pool.believed(worker, Tier.HOST_PINNED)) == state.host != set()


def test_faults_that_never_strike_change_no_placement() -> None:
    quiet = with_faults({"type": "outage", "from_ms": 5000, "until_ms": 6000})
    placed = [
        [record.event for record in ran(values)[1] if isinstance(record.event, ev.RequestPlaced)]
        for values in (quiet, without_faults())
    ]
    assert placed[0] == placed[1]
    assert router_of(ran(quiet)[0])["misinformed"] == 0


def test_both_drivers_and_every_hash_seed_write_one_log_and_another_seed_another(tmp_path: Path) -> None:
    file = LIBRARY / "faults-loss.yaml"
    logs = []
    for name, driver in (("trio", TrioDriver), ("inline", InlineDriver)):
        run_scenario(load_scenario(file), tmp_path / name, driver=driver)
        logs.append((tmp_path / name / "events.g2log").read_bytes())
    for hash_seed, more in ((3, ()), (4, ("--seed", 8))):
        out = tmp_path / f"{hash_seed}{len(more)}"
        assert run_cli(ROOT, "run", file, "--out", out, "--quiet", *more, hash_seed=hash_seed).returncode == 0
        logs.append((out / "events.g2log").read_bytes())
    assert logs[0] == logs[1] == logs[2] != logs[3]
    with LogReader(tmp_path / "trio" / "events.g2log") as reader:
        assert sum(1 for _ in reader) > 1000
        assert reader.end is not None
        assert reader.end.draws["router-agg:fault:lossy-bus"] > 50


def test_a_run_without_faults_has_nothing_of_them(tmp_path: Path) -> None:
    result = run_scenario(Scenario.from_dict(without_faults(), base_dir=LIBRARY), tmp_path / "run")
    assert "event_plane" not in result.report
    header, _, _ = (tmp_path / "run" / "events.g2log").read_bytes().partition(b"returning-chats.jsonl")
    assert b"ep.hit" not in (tmp_path / "run" / "events.g2log").read_bytes()
    assert b"recovery" not in header


def test_requests_that_wait_in_the_router_are_released_whatever_the_events_do() -> None:
    """One prefill at a time for each worker; the router is woken by late KV events and by load alike."""
    values = values_of("lag") | {"router": {"policy": "dynamo_kv", "options": {"router_queue_threshold": 0.0}}}
    report, records = ran(values)
    assert report["requests"]["completed"] == 160
    queued = [one for one in records if isinstance(one.event, ev.RequestPlaced) and one.event.outcome == "queued"]
    assert len(queued) > 20


def test_a_router_of_a_pool_without_faults_is_not_spoken_of() -> None:
    values = with_faults({**GOOD, "until_ms": 500, "pool": "decode"})
    one = values["engine"]["workers"]["aggregated"]
    values["engine"] = {"mode": "disaggregated", "model": "m", "workers": {"prefill": one, "decode": one}}
    report, _ = ran(values | {"router": {"policy": "prefix_affinity"}})
    assert router_of(report)["pool"] == "decode"
    assert router_of(report)["messages_lost"] > 10


def test_a_fault_of_a_router_that_does_not_look_is_refused(tmp_path: Path) -> None:
    """Dynamo's router of decode ranks keeps no index."""
    values = with_faults({**GOOD, "name": "deaf", "pool": "decode"})
    one = values["engine"]["workers"]["aggregated"]
    values["engine"] = {"mode": "disaggregated", "model": "m", "workers": {"prefill": one, "decode": one}}
    with pytest.raises(ConfigError, match="deaf: the decode router does not look at KV events"):
        run_scenario(Scenario.from_dict(values, base_dir=LIBRARY), tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_a_policy_from_the_command_line_is_looked_at_when_it_is_there(tmp_path: Path) -> None:
    """One that is found by code may look at KV events; one that does not is refused, whatever the file says."""
    scenario = Scenario.from_dict(with_faults(GOOD), base_dir=LIBRARY)
    loaded = with_policy(scenario, PolicyChoice("g2sim.actors.router.builtin:PrefixAffinity"))
    result = run_scenario(loaded, tmp_path / "run", driver=InlineDriver)
    assert report_text(report_of_log(tmp_path / "run").report) == report_text(result.report)
    with pytest.raises(ConfigError, match=r"loss-0: no router looks at KV events.*allowed: a router\.policy"):
        run_scenario(with_policy(scenario, PolicyChoice("round_robin")), tmp_path / "deaf")


# Refused --------------------------------------------------------------------------------------------------------------

GOOD: Values = {"type": "loss", "from_ms": 0, "until_ms": 10, "probability": 0.5}


@pytest.mark.parametrize(
    ("change", "field", "says"),
    [
        ({"type": "worker_crash"}, "faults.plan[0].probability", "only with type loss"),
        ({"until_ms": 0}, "faults.plan[0].until_ms", "above from_ms"),
        ({"from_ms": -1}, "faults.plan[0].from_ms", "a number of ms from 0 to 2**53"),
        ({"probability": 0}, "faults.plan[0].probability", "above 0"),
        ({"probability": True}, "faults.plan[0].probability", "above 0"),
        ({"worker": 3}, "faults.plan[0].worker", "0 to 2"),
        ({"dp_rank": 1}, "faults.plan[0].dp_rank", "0 to 0"),
        ({"pool": "decode"}, "faults.plan[0].pool", "agg"),
        ({"type": "los"}, "faults.plan[0].type", "loss"),
        ({"hold_ms": 3}, "faults.plan[0].hold_ms", "reordering"),
        ({"name": " "}, "faults.plan[0].name", "non-blank"),
        ({"probabilty": 1}, "faults.plan[0].probabilty", "probability"),
    ],
)
def test_a_bad_fault_is_refused_by_name(change: Values, field: str, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Scenario.from_dict(with_faults({**GOOD, **change}), base_dir=LIBRARY)
    assert refused.value.field == field
    assert says in str(refused.value)


def test_what_does_not_go_together_is_refused() -> None:
    crash = {"type": "worker_crash", "from_ms": 0, "until_ms": 10}
    slow = {"type": "lag", "from_ms": 0, "until_ms": 10, "lag_ms": 5, "lag_max_ms": 4}
    bad: list[tuple[Values, str, str]] = [
        (with_faults(crash), "faults.plan[0].from_ms", "at 0 workers begin"),
        (with_faults(slow), "faults.plan[0].lag_max_ms", "at least lag_ms"),
        (with_faults(), "faults.plan", "at least one fault"),
        (with_faults({**GOOD, "name": "a"}, {**GOOD, "name": "a"}), "faults.plan[1].name", "two faults"),
        (with_faults(GOOD, heartbeat_ms=0), "faults.recovery.heartbeat_ms", "a number of ms from 0.001"),
        (with_faults(GOOD, mode="none"), "faults.recovery.mode", "replay, snapshot"),
        (with_faults(GOOD) | {"router": {"policy": "round_robin"}}, "faults", "does not look at KV events"),
    ]
    limited = with_faults(GOOD)
    limited["traffic"] = {**limited["traffic"], "stop": {"max_virtual_time_ms": 5}}
    bad.append((limited, "faults.plan[0].until_ms", "virtual time limit"))
    for values, field, says in bad:
        with pytest.raises(ConfigError) as refused:
            Scenario.from_dict(values, base_dir=LIBRARY)
        assert refused.value.field == field
        assert says in str(refused.value)


def test_a_bad_fault_exits_2_with_file_and_line(tmp_path: Path) -> None:
    text = (LIBRARY / "faults-loss.yaml").read_text(encoding="utf-8").replace("probability: 0.3", "probability: 3")
    (tmp_path / "bad.yaml").write_text(text, encoding="utf-8")
    done = run_cli(ROOT, "run", tmp_path / "bad.yaml", "--out", tmp_path / "out")
    assert done.returncode == 2
    assert "bad.yaml:" in done.stderr
    assert "faults.plan[0].probability: got 3" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_the_resolved_scenario_is_the_scenario(kind: str) -> None:
    scenario = load_scenario(LIBRARY / f"faults-{kind}.yaml")
    assert scenario.faults is not None
    assert Scenario.from_resolved(scenario.resolved(), base_dir=LIBRARY) == scenario


# The page -------------------------------------------------------------------------------------------------------------


def commands() -> list[str]:
    return COMMAND.findall((ROOT / "docs" / "faults.md").read_text(encoding="utf-8"))


def test_the_commands_of_the_page_work(tmp_path: Path) -> None:
    assert len(commands()) >= 2
    for command in commands():
        words = [word.replace("runs/", f"{tmp_path}/") for word in shlex.split(command)][1:]
        done = run_cli(ROOT, *words)
        assert done.returncode == 0, done.stderr
        assert done.stdout


def test_the_page_names_every_kind_of_fault_and_every_library_scenario() -> None:
    page = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    for kind in KINDS:
        assert f"`{kind.replace('-', '_')}`" in page
        assert f"faults-{kind}.yaml" in page
