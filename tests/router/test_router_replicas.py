"""Several router replicas: who gets which request, what each knows of the others, and what that costs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import yaml
from cli_process import run_cli
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from router_values import row, run_values, separate, worker

from g2sim.actors.handoff.events import SourceReleased
from g2sim.actors.router.events import FaultBegan, PlacementShared, PlacementWeighed, RequestPlaced, SharingEnded
from g2sim.actors.worker.events import RequestEnded
from g2sim.bus.drivers import InlineDriver
from g2sim.bus.errors import ConfigError
from g2sim.bus.events import Record
from g2sim.bus.log import LogReader
from g2sim.scenarios.report import report_text
from g2sim.scenarios.run import report_of_log, run_scenario
from g2sim.scenarios.schema import Scenario, load_scenario

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "scenarios" / "library"
Values = dict[str, Any]


@attrs.frozen
class Ran:
    report: Values
    records: list[Record]

    def of(self, *kinds: type[Any]) -> list[Any]:
        return [record.event for record in self.records if isinstance(record.event, kinds)]

    def places(self, pool: str = "agg") -> list[int]:
        """Workers by number of request."""
        events = [event for event in self.of(RequestPlaced) if event.pool == pool]
        return [event.worker for event in sorted(events, key=lambda event: event.request)]

    def column(self, name: str, pool: str = "agg") -> list[Any]:
        return [one[name] for one in self.report["routers"]["replicas"] if one["pool"] == pool]


def values_of(path: Path, rows: Sequence[Values], *, workers: int = 4, pools: bool = False, **router: Any) -> Values:
    (path / "trace.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    values = run_values("trace.jsonl", **router)
    if pools:
        return separate(values, workers, workers)
    values["engine"]["workers"]["aggregated"] = worker(workers)
    return values


def ran(values: Values, base_dir: Path, out: Path | None = None) -> Ran:
    """A run whose live state is held against the log at every pass end."""
    records: list[Record] = []
    scenario = Scenario.from_dict(values, base_dir=base_dir)
    result = run_scenario(scenario, out, verify=True, driver=InlineDriver, on_record=records.append)
    return Ran(result.report, records)


def simulate(path: Path, rows: Sequence[Values], **router: Any) -> Ran:
    return ran(values_of(path, rows, **router), path)


ALL_AT_ONCE = [row(0, [10 * k, 10 * k + 1]) for k in range(4)]


# The scenario --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("router", "field"),
    [
        *(({"replicas": bad}, "router.replicas") for bad in (0, -1, 1.5, "2", True, None, 10**30)),
        *(({"replicas": 2, "load_sync_ms": bad}, "router.load_sync_ms") for bad in (-1, "1", True, float("nan"))),
        ({"load_sync_ms": 5}, "router.load_sync_ms"),
        ({"replicas": 1, "load_sync_ms": 0}, "router.load_sync_ms"),
    ],
)
def test_what_is_wrong_is_named(router: Values, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Scenario.from_dict(run_values("t.jsonl", **router))
    assert caught.value.field == field


@pytest.mark.parametrize("router", [{"replicas": 3}, {"replicas": 2, "load_sync_ms": 2.5}])
def test_the_resolved_form_gives_the_same_scenario(router: Values) -> None:
    made = Scenario.from_dict(run_values("t.jsonl", **router))
    assert made.resolved()["router"].items() >= {"load_sync_ms": None, **router}.items()
    assert Scenario.from_resolved(made.resolved()) == made


def test_one_replica_leaves_no_trace(tmp_path: Path) -> None:
    logs = []
    for name, router in (("plain", {}), ("one", {"replicas": 1, "load_sync_ms": None})):
        values = values_of(tmp_path, ALL_AT_ONCE, policy="dynamo_kv", **router)
        result = ran(values, tmp_path, tmp_path / name)
        logs.append((tmp_path / name / "events.g2log").read_bytes())
        assert {record.source for record in result.records if isinstance(record.event, RequestPlaced)} == {"router-agg"}
        assert "routers" not in result.report
    assert logs[0] == logs[1]
    assert b"sync.share" not in logs[0]
    with LogReader(tmp_path / "one" / "events.g2log") as reader:
        assert set(reader.header.scenario["router"]) == {"policy", "kv_event_lag_ms", "tie_break", "options"}


# Views ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lag_ms", [0, 1, 50])
@pytest.mark.parametrize("load_sync_ms", [None, 0, 1, 50])
@pytest.mark.parametrize("pools", [False, True])
def test_f62_routers_that_have_not_heard_of_each_other_pick_the_same_worker(
    tmp_path: Path, lag_ms: float, load_sync_ms: float | None, pools: bool
) -> None:
    """4 routers, 4 idle workers, one request at each router at the same time."""
    router = {"policy": "dynamo_kv", "kv_event_lag_ms": lag_ms, "load_sync_ms": load_sync_ms}
    one = simulate(tmp_path, ALL_AT_ONCE, pools=pools, replicas=4, **router)
    for pool in ("prefill", "decode") if pools else ("agg",):
        heard = load_sync_ms == 0
        assert one.places(pool) == ([0, 1, 2, 3] if heard else [0, 0, 0, 0])
        assert one.column("router", pool) == [f"router-{pool}/{k}" for k in range(4)]
        assert one.column("placements", pool) == [1, 1, 1, 1]
        assert one.column("skew_requests_mean", pool) == one.column("skew_requests_max", pool)
        assert one.column("skew_requests_max", pool) == ([0, 0, 0, 0] if heard else [0, 1, 2, 3])
        assert one.column("misled", pool) == ([0, 0, 0, 0] if heard else [0, 1, 1, 1])


NO_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)
RUNS = settings(
    max_examples=10,
    deadline=None,
    phases=NO_SHRINKING,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
REQUESTS = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 2), st.integers(1, 5), st.integers(1, 9)),
    min_size=2,
    max_size=16,
    unique_by=lambda one: one[0],
)
"""Arrival time, family of prompts, blocks and tokens of each; no two at one time, when replicas act in their order."""


def rows_of(requests: list[tuple[int, int, int, int]]) -> list[Values]:
    return [
        row(at_ms, [100 * family + k for k in range(blocks)], out=out)
        for at_ms, family, blocks, out in sorted(requests)
    ]


@RUNS
@given(
    requests=REQUESTS,
    replicas=st.integers(2, 4),
    load_sync_ms=st.sampled_from([None, 0, 1, 7.5, 30]),
    pools=st.booleans(),
)
def test_a_replica_knows_its_own_load_at_once_and_that_of_others_as_late_as_is_said(
    tmp_path: Path,
    requests: list[tuple[int, int, int, int]],
    replicas: int,
    load_sync_ms: float | None,
    pools: bool,
) -> None:
    """Every view at every decision, counted from the log in the plainest way."""
    rows = rows_of(requests)
    result = simulate(tmp_path, rows, pools=pools, policy="least_loaded", replicas=replicas, load_sync_ms=load_sync_ms)
    spans: dict[tuple[str, int], list[tuple[int, Record]]] = {}
    for idx, record in enumerate(result.records):
        event: Any = record.event
        pool = "decode" if pools else "agg"
        if isinstance(event, RequestPlaced | SourceReleased):
            pool = event.pool if isinstance(event, RequestPlaced) else "prefill"
            spans.setdefault((pool, event.request), []).append((idx, record))
        elif isinstance(event, RequestEnded):
            spans[pool, event.request].append((idx, record))
    for idx, record in enumerate(result.records):
        weighed: Any = record.event
        if not isinstance(weighed, PlacementWeighed):
            continue

        def has_heard(replica: str, when: tuple[int, Record], idx: int = idx, now: Record = record) -> bool:
            late_ms = 0.0 if replica == now.source else load_sync_ms
            return when[0] < idx and late_ms is not None and when[1].time_ms + late_ms <= now.time_ms

        counted = [0] * len(weighed.workers)
        for (pool, _), (placed, over) in spans.items():
            replica = placed[1].source
            if pool == weighed.pool and has_heard(replica, placed) and not has_heard(replica, over):
                chosen: Any = placed[1].event
                counted[chosen.worker] += 1
        assert weighed.active_requests == tuple(counted)
    shares = [event.request for event in result.of(PlacementShared)]
    assert len(shares) == (0 if load_sync_ms is None else len(rows) * (1 + pools))
    assert len(result.of(SharingEnded)) == (len(rows) if pools and load_sync_ms is not None else 0)


@RUNS
@given(
    requests=REQUESTS,
    replicas=st.integers(2, 5),
    policy=st.sampled_from(["least_loaded", "prefix_affinity", "dynamo_kv"]),
    pools=st.booleans(),
    lag_ms=st.sampled_from([0, 3]),
)
def test_replicas_that_hear_of_everything_at_once_are_as_good_as_one(
    tmp_path: Path,
    requests: list[tuple[int, int, int, int]],
    replicas: int,
    policy: str,
    pools: bool,
    lag_ms: float,
) -> None:
    rows = rows_of(requests)
    setting = {"pools": pools, "policy": policy, "kv_event_lag_ms": lag_ms}
    one = simulate(tmp_path, rows, **setting)
    several = simulate(tmp_path, rows, replicas=replicas, load_sync_ms=0, **setting)
    assert several.of(PlacementWeighed) == one.of(PlacementWeighed)
    for pool in ("prefill", "decode") if pools else ("agg",):
        assert several.places(pool) == one.places(pool)
        assert set(several.column("misled", pool)) <= {0, None}
        assert set(several.column("skew_requests_max", pool)) <= {0, None}


QUEUES: Values = {"policy": "dynamo_kv", "options": {"router_queue_threshold": 0.2}}
"""Requests wait as long as more than a fifth of a pass is believed to wait on every rank."""


@pytest.mark.parametrize("pools", [False, True])
def test_a_request_that_waits_is_released_by_news_that_was_under_way_before(tmp_path: Path, pools: bool) -> None:
    """Replica 1 hears at 20 of a placement at 0, and at 30 of its first token at 10; nothing else could wake it."""
    rows = [row(0, range(8)), row(20, range(20, 28))]
    result = simulate(tmp_path, rows, workers=1, pools=pools, replicas=2, load_sync_ms=20, **QUEUES)
    placed = [record for record in result.records if isinstance(record.event, RequestPlaced)]
    first: Any = next(record for record in placed if record.event.request == 1)  # type: ignore[attr-defined]
    assert (first.source[-2:], first.time_ms) == ("/1", 30.0)
    assert (first.event.outcome, first.event.queued_at_ms) == ("queued", 20.0)
    assert result.report["requests"]["completed"] == 2


@pytest.mark.parametrize(("load_sync_ms", "waits"), [(None, False), (0, True), (3, True), (200, False)])
def test_requests_wait_only_for_load_that_their_replica_has_heard_of(
    tmp_path: Path, load_sync_ms: float | None, waits: bool
) -> None:
    rows = [row(5 * k, range(20 * k, 20 * k + 8), out=3) for k in range(8)]
    result = simulate(tmp_path, rows, workers=1, replicas=8, load_sync_ms=load_sync_ms, **QUEUES)
    assert result.report["requests"]["completed"] == 8
    assert any(event.outcome == "queued" for event in result.of(RequestPlaced)) is waits


def test_policies_and_random_streams_are_a_replicas_own(tmp_path: Path) -> None:
    rotation = simulate(tmp_path, ALL_AT_ONCE, policy="round_robin", replicas=2)
    assert rotation.places() == [0, 0, 1, 1]
    assert rotation.column("skew_requests_max") == rotation.column("misled") == [None, None]
    ran(values_of(tmp_path, ALL_AT_ONCE, policy="random", replicas=2), tmp_path, tmp_path / "run")
    with LogReader(tmp_path / "run" / "events.g2log") as reader:
        assert sum(1 for _ in reader)
        assert reader.end is not None
        draws = reader.end.draws
    assert {name for name in draws if name.startswith("router")} == {
        "router-agg/0:placement",
        "router-agg/1:placement",
    }


# Faults --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("load_sync_ms", [None, 4.0])
@pytest.mark.parametrize("kind", ["router-restart", "loss"])
def test_faults_strike_every_replica_and_each_index_gets_right(kind: str, load_sync_ms: float | None) -> None:
    values = yaml.safe_load((LIBRARY / f"faults-{kind}.yaml").read_text(encoding="utf-8"))
    values["router"] |= {"replicas": 3, "load_sync_ms": load_sync_ms}
    result = ran(values, LIBRARY)
    routers = result.report["event_plane"]["routers"]
    assert [one["pool"] for one in routers] == ["agg/0", "agg/1", "agg/2"]
    assert [event.pool for event in result.of(FaultBegan)] == ["agg/0", "agg/1", "agg/2"]
    assert [one["placements"] for one in routers] == result.column("placements") == [54, 53, 53]
    for one in routers:
        assert one["converged_after_ms"] is not None
        assert one["index_end"] == {"phantom_blocks": 0, "unseen_blocks": 0, "messages_under_way": 0}
    if kind == "loss":
        assert len({one["messages_lost"] for one in routers}) > 1  # drawn for each


# Determinism ---------------------------------------------------------------------------------------------------------


def test_every_hash_seed_writes_the_same_run_and_the_log_alone_gives_its_report(tmp_path: Path) -> None:
    rows = [row(3 * (k // 4), [100 * (k % 5) + j for j in range(k % 4 + 1)], out=6) for k in range(40)]
    router = {"policy": "dynamo_kv", "tie_break": "random", "kv_event_lag_ms": 2, "replicas": 3, "load_sync_ms": 2.5}
    values = values_of(tmp_path, rows, pools=True, **router)
    file = tmp_path / "scenario.json"
    file.write_text(json.dumps(values))
    seen = []
    for hash_seed in ("1", "2"):
        out = tmp_path / hash_seed
        done = run_cli(tmp_path, "run", file, "--out", out, "--verify", hash_seed=hash_seed)
        assert done.returncode == 0, done.stderr
        assert "router-decode/2" in done.stdout
        seen.append([(out / name).read_bytes() for name in ("events.g2log", "report.json", "requests.jsonl")])
    assert seen[0] == seen[1]
    assert report_text(report_of_log(tmp_path / "1").report).encode() == seen[0][1]
    run_scenario(load_scenario(file), tmp_path / "trio")
    assert (tmp_path / "trio" / "events.g2log").read_bytes() == seen[0][0]
