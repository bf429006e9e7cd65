"""Workers that crash and come back: nothing is leaked, every request ends once, every index gets right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_process import run_cli
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from g2sim.actors.handoff.events import DestinationReserved, SourceHeld, SourceReleased
from g2sim.actors.host_pool.events import ClientJoined, ClientRetired
from g2sim.actors.kv.events import BlocksStored
from g2sim.actors.membership.events import CachesCleared, RequestLost, WorkerCrashed, WorkerRestarted, WorkerStateKnown
from g2sim.actors.router.events import RequestPlaced, RequestWaits
from g2sim.actors.traffic.events import RequestSkipped
from g2sim.actors.worker.events import RequestAdmitted, RequestEnded
from g2sim.bus.drivers import InlineDriver, TrioDriver
from g2sim.bus.errors import ConfigError, SimError
from g2sim.bus.events import Record
from g2sim.scenarios import run as runs
from g2sim.scenarios.compare import audited_run
from g2sim.scenarios.deployment import Cluster, build_cluster
from g2sim.scenarios.explain import explain_request
from g2sim.scenarios.report import report_text
from g2sim.scenarios.run import report_of_log, run_scenario
from g2sim.scenarios.schema import Scenario, load_scenario
from g2sim.scenarios.spans import SpanFold
from g2sim.scenarios.state_fold import StateFold
from g2sim.scenarios.stream_sources import check_files
from g2sim.scenarios.time_travel import inspect_run
from g2sim.scenarios.validate import Validator
from g2sim.scenarios.view.data import ViewData

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "scenarios" / "library"
CRASH = LIBRARY / "faults-worker-crash.yaml"

Values = dict[str, Any]


def crash(from_ms: float, until_ms: float, **more: Any) -> Values:
    return {"name": "crash", "type": "worker_crash", "from_ms": from_ms, "until_ms": until_ms, **more}


def values_with(*plan: Values, separate: bool = False, **worker: Any) -> Values:
    """The library's scenario with other faults. ``worker``: replicas, attention_data, host (scope), gpu_blocks."""
    values: Values = yaml.safe_load(CRASH.read_text(encoding="utf-8"))
    values.pop("expect")
    values["faults"] = {"plan": list(plan)}
    one = values["engine"]["workers"]["aggregated"]
    one["parallelism"] = {
        "replicas": worker.get("replicas", 3),
        "attention_data": worker.get("attention_data", 1),
    }
    if "host" in worker:
        rates = {"d2h_bandwidth_gbps": 1.0, "h2d_bandwidth_gbps": 1.0}
        scope = worker["host"]
        one["kv_cache"]["host_offload"] = scope and {"scope": scope, "num_host_blocks": 40, **rates}
    if separate:
        values["engine"] = {
            "mode": "disaggregated",
            "model": "chat-model",
            "workers": {"prefill": one, "decode": one},
            "kv_transfer": {"bytes_per_token": 65536, "bandwidth_gb_per_second": 1.0},
        }
    return values


def ran(values: Values, folder: Path | None = None, driver: Any = InlineDriver) -> tuple[Values, list[Record]]:
    records: list[Record] = []
    scenario = Scenario.from_dict(values, base_dir=LIBRARY)
    result = run_scenario(scenario, folder, verify=True, driver=driver, on_record=records.append)
    return result.report, records


def of(records: list[Record], *kinds: type[Any]) -> list[Any]:
    return [record.event for record in records if isinstance(record.event, kinds)]


def findings(folder: Path) -> list[str]:
    validator = Validator()
    check_files([folder], validator)
    validator.finish()
    return [f"{one.code} {one.problem}" for one in validator.findings.kept]


def assert_at_rest(cluster: Cluster) -> None:
    """Nothing is held, pinned, booked or awaited anywhere."""
    for pool in cluster.host_pools.values():
        pool.check()
        assert pool.transfers_under_way() == []
        assert not any(pins for _, pins in pool.contents().values())
    for worker in cluster.workers.values():
        assert worker.waiting() == []
        for place in worker.places:
            place.rank.pool.check()
            assert place.rank.pool.active_blocks == 0
    for slot in cluster.kernel.slots:
        assert slot.actor.waiting() == [] or not slot.actor.waiting()
        if slot.name.startswith("router-"):
            router: Any = slot.actor
            router._catch_up(slot.port)
            router.state.check()
            assert not any(router.state.pool.loads.requests)


# Properties ----------------------------------------------------------------------------------------------------------


@st.composite
def cases(draw: Any) -> Values:
    separate = draw(st.booleans())
    plan, time_ms = [], 1.0
    for idx in range(draw(st.integers(1, 3))):
        start_ms = time_ms + draw(st.sampled_from([0.5, 10.0, 37.25, 150.0]))
        time_ms = start_ms + draw(st.sampled_from([1.0, 20.0, 200.0]))
        fault: Values = {"name": str(idx), "from_ms": start_ms, "until_ms": time_ms}
        fault["worker"] = draw(st.sampled_from([None, 0]))
        fault["type"] = draw(st.sampled_from(["worker_crash", "worker_crash", "discovery_flap"]))
        if fault["type"] == "worker_crash":
            fault["detect_ms"] = (time_ms - start_ms) * draw(st.sampled_from([0, 0.5, 1]))
            fault["requests"] = draw(st.sampled_from(["fail", "resubmit"]))
        if separate:
            fault["pool"] = draw(st.sampled_from([None, "prefill", "decode"]))
        plan.append(fault)
        if not separate and draw(st.booleans()):
            kind = draw(st.sampled_from(["outage", "publisher_reset", "router_restart"]))
            until_ms = time_ms + draw(st.sampled_from([-0.2, 15.0]))
            plan.append({"name": f"{idx}b", "type": kind, "from_ms": start_ms - 0.5, "until_ms": until_ms})
    values = values_with(
        *plan,
        separate=separate,
        replicas=draw(st.sampled_from([1, 2, 3])),
        attention_data=draw(st.sampled_from([1, 2])),
        host=draw(st.sampled_from([None, "dp_rank_local", "cluster_shared"])),
    )
    policies = ["dynamo_kv", "prefix_affinity"]
    if all(fault["type"] in ("worker_crash", "discovery_flap") for fault in plan):
        policies += ["round_robin", "least_loaded", "session_affinity"]
    values["router"] = {"policy": draw(st.sampled_from(policies)), "kv_event_lag_ms": draw(st.sampled_from([0.0, 4.0]))}
    if values["router"]["policy"] == "dynamo_kv" and draw(st.booleans()):
        values["router"]["options"] = {"router_queue_threshold": 0.5}
    pools = values["engine"]["workers"].values()
    for pool in pools:  # small ones can deadlock on overload whatever happens, as the reference's do
        pool["kv_cache"]["capacity"]["blocks"] = 150
    return values


@settings(
    max_examples=10,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(values=cases())
def test_whatever_crashes_every_request_ends_once_and_nothing_is_left(
    values: Values, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("crash") / "run"
    built: list[Cluster] = []

    def build(*arguments: Any, **keywords: Any) -> Cluster:
        built.append(build_cluster(*arguments, **keywords))
        return built[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "build_cluster", build)
        report, records = ran(values, folder)
    ends = [end.request for end in of(records, RequestEnded)]
    assert sorted(ends) == list(range(160))
    failed = {one.request for one in of(records, RequestLost) if not one.resubmitted}
    assert {end.request for end in of(records, RequestEnded) if end.status == "failed"} == failed
    assert_at_rest(built[0])
    for router in report.get("event_plane", {"routers": []})["routers"]:
        assert router["index_end"] == {"phantom_blocks": 0, "unseen_blocks": 0, "messages_under_way": 0}
        assert router["converged_after_ms"] is not None
    assert report_text(report_of_log(folder).report) == (folder / "report.json").read_text(encoding="utf-8")
    assert findings(folder) == []


# What happens when ---------------------------------------------------------------------------------------------------


def test_the_order_of_a_crash_and_a_return_and_a_stream_that_begins_anew() -> None:
    report, records = ran(values_with(crash(260, 560, worker=0, detect_ms=40)))
    times = {type(one.event): one.time_ms for one in records if isinstance(one.event, WorkerCrashed | WorkerRestarted)}
    assert times == {WorkerCrashed: 260.0, WorkerRestarted: 560.0}
    known = [(one.time_ms, one.event.state) for one in records if isinstance(one.event, WorkerStateKnown)]
    assert known == [(300.0, "removed"), (560.0, "ready")]
    lost = [one for one in records if isinstance(one.event, RequestLost)]
    assert {one.time_ms for one in lost} == {300.0}
    numbers = [one.event.request for one in lost]
    assert numbers == sorted(set(numbers))
    placed = [(one.time_ms, one.event) for one in records if isinstance(one.event, RequestPlaced)]
    on_dead = [event.request for at_ms, event in placed if event.worker == 0 and 260 <= at_ms < 300]
    assert on_dead
    assert set(on_dead) <= set(numbers)
    assert not [event for at_ms, event in placed if event.worker == 0 and 300 <= at_ms < 560]
    assert [event for at_ms, event in placed if event.worker == 0 and at_ms >= 560]
    stream = [(one.time_ms, one.event) for one in records if isinstance(one.event, BlocksStored)]
    of_dead = [(at_ms, event.event_id) for at_ms, event in stream if event.worker == 0]
    assert not [at_ms for at_ms, _ in of_dead if 260 <= at_ms < 560]
    assert min(event_id for at_ms, event_id in of_dead if at_ms >= 560) == 0
    (entry,) = report["membership"]["workers"]
    assert (entry["unknown_ms"], entry["requests_failed"], entry["requests_resubmitted"]) == (40.0, len(lost), 0)
    assert report["requests"]["failed"] == len(lost)


def test_a_shared_pool_lives_on_and_the_worker_that_returns_hears_of_it_first() -> None:
    """Parents come before children, and everything before the worker is placed on again."""
    _, records = ran(values_with(crash(260, 360, worker=0), host="cluster_shared"))
    left = next(idx for idx, one in enumerate(records) if isinstance(one.event, ClientRetired))
    back = next(idx for idx, one in enumerate(records) if isinstance(one.event, ClientJoined) and one.time_ms == 360.0)
    ready = next(
        idx for idx, one in enumerate(records) if isinstance(one.event, WorkerStateKnown) and one.event.state == "ready"
    )
    assert (records[left].time_ms, left < back < ready) == (260.0, True)
    snapshot = [one.event for one in records[back:ready] if isinstance(one.event, BlocksStored)]
    assert sum(len(event.block_hashes) for event in snapshot) > 10
    assert [event.event_id for event in snapshot] == list(range(len(snapshot)))
    known: set[int] = set()
    for event in snapshot:
        assert event.tier == "host_pinned"
        known.update(event.block_hashes)
    held = {event.parent_hash for event in snapshot if event.parent_hash in known}
    seen: set[int | None] = set()
    for event in snapshot:
        assert event.parent_hash not in held or event.parent_hash in seen
        seen.update(event.block_hashes)


def test_a_resubmitted_request_goes_on_behind_the_tokens_that_it_has() -> None:
    report, records = ran(values_with(crash(300, 600, worker=0, requests="resubmit")))
    assert report["requests"]["completed"] == 160
    lost = {one.request: one for one in of(records, RequestLost)}
    assert any(one.tokens for one in lost.values())
    (entry,) = report["membership"]["workers"]
    assert (entry["requests_failed"], entry["requests_resubmitted"]) == (0, len(lost))
    for request in lost:
        placed = [one.event for one in records if isinstance(one.event, RequestPlaced) and one.event.request == request]
        assert len(placed) == 2
        assert placed[1].worker != 0
    rows: list[Values] = []
    run_scenario(
        Scenario.from_dict(values_with(crash(300, 600, worker=0, requests="resubmit")), base_dir=LIBRARY),
        None,
        on_row=rows.append,
    )
    assert all(row["output_length"] == row["requested_output_length"] for row in rows)
    again = [row for row in rows if row["request"] in lost and row["admission_count"] == 2]
    assert again
    assert all(row["readmission_count"] == 1 for row in again)


def test_requests_wait_while_no_worker_is_there_and_join_it_when_it_returns() -> None:
    _, records = ran(values_with(crash(300, 500, requests="resubmit"), replicas=2))
    waits = [one for one in records if isinstance(one.event, RequestWaits)]
    assert len(waits) > 10
    assert {300.0 <= one.time_ms < 500.0 for one in waits} == {True}
    released = {
        one.event.request: one.time_ms
        for one in records
        if isinstance(one.event, RequestPlaced) and one.event.outcome == "queued"
    }
    assert set(released.values()) == {500.0}
    assert released.keys() == {one.event.request for one in waits}


def test_closed_loops_wait_for_the_only_worker() -> None:
    values = values_with(crash(200, 400), replicas=1)
    values["traffic"]["load"] = {"type": "concurrency", "concurrency": 4}
    report, records = ran(values)
    lost = of(records, RequestLost)
    assert len(lost) == report["requests"]["failed"] == 4
    waits = {one.event.request: one.time_ms for one in records if isinstance(one.event, RequestWaits)}
    assert set(waits.values()) == {200.0}
    assert len(waits) == 4
    assert report["requests"]["completed"] == 156


@pytest.mark.parametrize("pool", ["prefill", "decode"])
@pytest.mark.parametrize("requests", ["fail", "resubmit"])
def test_a_hand_off_that_loses_one_side_gives_the_other_back(pool: str, requests: str) -> None:
    """Found by hand-offs that were held or reserved at the crash, with transfers that take their time."""
    values = values_with(
        crash(280, 380, pool=pool, worker=0, detect_ms=30, requests=requests), separate=True, host="cluster_shared"
    )
    values["engine"]["kv_transfer"]["bandwidth_gb_per_second"] = 0.4
    for worker in values["engine"]["workers"].values():
        worker["kv_cache"]["capacity"]["blocks"] = 200
    report, records = ran(values)
    lost = [one.event.request for one in records if isinstance(one.event, RequestLost)]
    before = [one for one in records if one.time_ms <= 280.0]
    held = {one.request for one in of(before, SourceHeld)} - {one.request for one in of(before, SourceReleased)}
    reserved = {one.request for one in of(before, DestinationReserved)} & held
    assert reserved & set(lost)
    assert len(lost) == len(set(lost))
    completed = 160 - (len(lost) if requests == "fail" else 0)
    assert report["requests"]["completed"] == completed


def test_f59_f75_what_depends_on_a_lost_request_is_skipped_and_the_run_drains() -> None:
    values = yaml.safe_load((LIBRARY / "subagent-fan-out.yaml").read_text(encoding="utf-8"))
    for key in ("expect", "variants"):
        values.pop(key, None)
    whole, records = ran(values)
    admitted = next(one for one in records if isinstance(one.event, RequestAdmitted) and one.event.request == 3)
    values["faults"] = {"plan": [crash(admitted.time_ms + 0.01, admitted.time_ms + 5.0)]}
    report, records = ran(values)
    lost = [one.request for one in of(records, RequestLost)]
    assert len(lost) == report["requests"]["failed"] > 0
    names = {
        row.event.name for row in records if type(row.event).__name__ == "RequestArrived" and row.event.request in lost
    }
    skipped = of(records, RequestSkipped)
    assert skipped
    assert {one.because for one in skipped} <= names
    every = report["requests"]["released"] + len(skipped)
    assert every == whole["requests"]["released"]


# Caches that are cleared ---------------------------------------------------------------------------------------------


def clear(at_ms: float, **more: Any) -> Values:
    return {"name": "clear", "type": "cache_clear", "from_ms": at_ms, **more}


@pytest.mark.parametrize(
    ("host", "tier"),
    [
        (None, None),
        ("dp_rank_local", None),
        ("dp_rank_local", "host_pinned"),
        ("cluster_shared", None),
        ("cluster_shared", "device"),
    ],
)
def test_a_clear_takes_what_nobody_uses_and_the_rest_goes_on(
    host: str | None, tier: str | None, tmp_path: Path
) -> None:
    values = values_with(clear(300, tier=tier), host=host)
    _, before = ran(values_with(clear(900), host=host))
    report, records = ran(values, tmp_path / "run")
    assert report["requests"]["completed"] == 160
    cleared = of(records, CachesCleared)
    assert [one.worker for one in cleared] == [0, 1, 2]
    device, kept, lost = (
        sum(getattr(one, name) for one in cleared)
        for name in ("device_dropped_blocks", "device_kept_blocks", "host_dropped_blocks")
    )
    fold = StateFold()
    for record in before:
        if record.time_ms >= 300:
            break
        fold.apply(record)
    resident = sum(1 for pool in fold.pools.values() for held, pins in pool.blocks.values() if held and not pins)
    assert lost == (0 if tier == "device" else resident)
    assert (device > 0) is (tier != "host_pinned")
    on_device = sum(len(rank.device) for rank in fold.ranks.values()) if tier != "host_pinned" else 0
    assert device + kept >= on_device - 3 * 8  # passes under way
    assert findings(tmp_path / "run") == []
    (router,) = report["event_plane"]["routers"]
    assert router["index_end"]["phantom_blocks"] == router["index_end"]["unseen_blocks"] == 0


# Through the command line --------------------------------------------------------------------------------------------


def test_runs_are_verified_valid_and_the_same_bytes_in_any_process_and_driver(tmp_path: Path) -> None:
    logs = []
    for name, driver in (("trio", TrioDriver), ("inline", InlineDriver)):
        run_scenario(load_scenario(CRASH), tmp_path / name, driver=driver)
        logs.append((tmp_path / name / "events.g2log").read_bytes())
    done = run_cli(ROOT, "run", CRASH, "--out", tmp_path / "cli", "--verify", hash_seed=5)
    assert done.returncode == 0, done.stderr
    assert "workers that were away" in done.stdout
    logs.append((tmp_path / "cli" / "events.g2log").read_bytes())
    assert logs[0] == logs[1] == logs[2]
    checked = run_cli(ROOT, "validate", tmp_path / "cli")
    assert (checked.returncode, "exact (changed" in checked.stdout) == (0, True)
    refused = run_cli(ROOT, "publish", tmp_path / "cli")
    assert refused.returncode == 2
    assert "a worker crashes in this run" in refused.stderr


def test_what_is_shown_of_a_run_knows_of_the_crash(tmp_path: Path) -> None:
    """Nothing is left of a dead worker in its index, its lane and its stream, and a lost request's story goes on."""
    values = values_with(crash(260, 560, worker=0, detect_ms=40, requests="resubmit"), host="dp_rank_local")
    _, records = ran(values, tmp_path / "run")
    before, after = (inspect_run(tmp_path / "run", at_ms=at_ms).value["ranks"][0] for at_ms in (299.0, 300.0))
    assert before["g1_blocks"] == before["g2_blocks"] == after["index_g1_blocks"] == after["index_g2_blocks"] == []
    assert before["index_g1_blocks"]
    lost = next(one for one in of(records, RequestLost) if one.tokens)
    shown, _ = explain_request(tmp_path / "run", str(lost.request))
    assert next(one.placed.worker for one in shown.decisions if one.placed is not None) == 0
    assert len(shown.decisions) == 2
    assert any(step.what == "lost: aggregated-0/0 had crashed; it is placed anew" for step in shown.steps[:-1])
    scenario = Scenario.from_dict(values, base_dir=LIBRARY)
    data = ViewData(scenario)
    spans = SpanFold(data)
    log = report_of_log(tmp_path / "run", on_row=data.row, on_record=spans.apply)
    spans.finish()
    streams = [rank["kv"] for rank in data.value(log, "run")["ranks"]]
    assert [(one["missing"], one["repeated"]) for one in streams] == [(0, 0)] * 3
    _, figures = audited_run(scenario)
    assert figures["not_completed"] == 0.0
    assert (figures["hit_rate_real"] or 0.0) <= (figures["hit_rate_unlimited"] or 0.0)


def test_a_run_without_such_faults_has_nothing_of_them(tmp_path: Path) -> None:
    run_scenario(load_scenario(LIBRARY / "faults-outage.yaml"), tmp_path / "run", driver=InlineDriver)
    assert b"mb." not in (tmp_path / "run" / "events.g2log").read_bytes()
    assert "membership" not in report_of_log(tmp_path / "run").report


@pytest.mark.parametrize(
    ("plan", "field", "says"),
    [
        ([crash(0, 10)], "faults.plan[0].from_ms", "above 0"),
        ([crash(10, 10)], "faults.plan[0].until_ms", "above from_ms"),
        ([crash(10, 20, detect_ms=11)], "faults.plan[0].detect_ms", "at most 10"),
        ([crash(10, 20, requests="retry")], "faults.plan[0].requests", "fail, resubmit"),
        ([crash(10, 20, dp_rank=0)], "faults.plan[0].dp_rank", "only with type"),
        ([crash(10, 20, worker=3)], "faults.plan[0].worker", "0 to 2"),
        ([crash(10, 20), crash(20, 30, name="b", worker=1)], "faults.plan[1].from_ms", "crash strikes worker 1"),
        ([clear(10, tier="disk")], "faults.plan[0].tier", "device, host_pinned"),
        ([clear(10, until_ms=20)], "faults.plan[0].until_ms", "only with type"),
        ([clear(10, dp_rank=1)], "faults.plan[0].dp_rank", "0 to 0"),
        ([clear(0)], "faults.plan[0].from_ms", "above 0"),
        ([crash(10, 20), clear(20, worker=0)], "faults.plan[1].from_ms", "crash strikes worker 0"),
        (
            [{"type": "discovery_flap", "from_ms": 10, "until_ms": 9, "worker": 0}],
            "faults.plan[0].until_ms",
            "or later",
        ),
    ],
)
def test_a_bad_fault_is_refused_by_name(plan: list[Values], field: str, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Scenario.from_dict(values_with(*plan), base_dir=LIBRARY)
    assert refused.value.field == field
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("host", "fault", "field", "says"),
    [
        (None, clear(10, tier="host_pinned"), "faults.plan[0].tier", "there is no host tier"),
        ("cluster_shared", clear(10, worker=1), "faults.plan[0].worker", "for all ranks or for none"),
        ("cluster_shared", clear(10, pool="agg"), "faults.plan[0].pool", "tier: device"),
    ],
)
def test_a_clear_of_what_is_not_there_or_not_theirs_is_refused(host: Any, fault: Values, field: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        Scenario.from_dict(values_with(fault, host=host), base_dir=LIBRARY)
    assert refused.value.field == field


def test_a_crash_and_load_sync_are_refused_and_a_policy_that_sees_nothing_is_not() -> None:
    values = values_with(crash(10, 20)) | {"router": {"policy": "least_loaded", "replicas": 2, "load_sync_ms": 5}}
    with pytest.raises(SimError, match="load_sync_ms is not supported"):
        Scenario.from_dict(values, base_dir=LIBRARY)
    report, _ = ran(values_with(crash(10, 20)) | {"router": {"policy": "round_robin"}})
    assert "event_plane" not in report
    assert report["membership"]["workers"][0]["crashed_ms"] == 10.0


@pytest.mark.parametrize("name", ["worker-crash", "discovery-flap", "cache-clear"])
def test_the_resolved_scenario_is_the_scenario(name: str) -> None:
    scenario = load_scenario(LIBRARY / f"faults-{name}.yaml")
    assert scenario.faults is not None
    assert Scenario.from_resolved(scenario.resolved(), base_dir=LIBRARY) == scenario
