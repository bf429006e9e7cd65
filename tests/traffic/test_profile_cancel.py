"""A profile's end cancels what is under way, wherever it is; everything is given back exactly once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from instance_cases import scenario_values, write_play

from g2sim.actors.handoff.events import DestinationActivated, DestinationReserved, SourceHeld, SourceReleased
from g2sim.actors.traffic.events import ProfileFinished, RequestArrived
from g2sim.actors.worker.events import CanceledRequestLeft, RequestEnded
from g2sim.bus.drivers import InlineDriver
from g2sim.bus.events import Record
from g2sim.scenarios.deployment import build_cluster
from g2sim.scenarios.schema import Scenario
from g2sim.scenarios.state_fold import Verifier
from g2sim.scenarios.traffic_source import open_traffic


def run_to_rest(values: dict[str, Any]) -> list[Record]:
    """Run, with live state held against the log; afterwards every rank and pool must be at rest and consistent."""
    scenario = Scenario.from_dict(values)
    cluster = build_cluster(scenario.deployment, open_traffic(scenario).driver, seed=0)
    records: list[Record] = []
    verifier = Verifier(cluster.workers, cluster.host_pools)
    cluster.kernel.add_sink(records.append)
    cluster.kernel.add_sink(verifier.record)
    cluster.kernel.observe_turns(verifier.turn_ended)
    InlineDriver(cluster.kernel).run()
    verifier.finish()
    for worker in cluster.workers.values():
        for place in worker.places:
            rank = place.rank
            assert rank.waiting() == []
            assert rank.pool.active_blocks == 0
            rank.pool.check()
    for pool in cluster.host_pools.values():
        assert pool.transfers_under_way() == []
        pool.check()
    return records


def timed_out(path: Path, cutoff_ms: float, *, split: bool, scope: str, policy: str, busy: bool) -> dict[str, Any]:
    """A profile that ends, without grace, in the middle of whatever happens at ``cutoff_ms``."""
    load = {
        "agentic_lanes": 6 if busy else 2,
        "agentic_snapshot": {"seed": 3},
        "agentic_profile": {"duration_seconds": cutoff_ms / 1000.0, "response_grace_seconds": 0.0},
    }
    values = scenario_values(path, workers=2, split=split, scope=scope, load=load)
    for worker in values["engine"]["workers"].values():
        host = worker["kv_cache"]["host_offload"]
        host |= {"h2d_bandwidth_gbps": 0.005, "d2h_bandwidth_gbps": 0.05}
    if split:
        values["engine"]["kv_transfer"] = {"bytes_per_token": 1000, "bandwidth_gb_per_second": 0.005}
    if busy:
        for worker in values["engine"]["workers"].values():
            worker["timing"]["prefill_ms"] = 15.0  # so that a router makes requests wait
    if split and busy:
        values["engine"]["workers"]["decode"]["timing"]["decode_ms"] = 40.0  # so that prompts queue for decode blocks
    values["router"] = {"policy": policy}
    if policy == "dynamo_kv":
        values["router"]["options"] = {"router_queue_threshold": 0.01}
    return values


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
@pytest.mark.parametrize("policy", ["round_robin", "dynamo_kv"])
@pytest.mark.parametrize("scope", ["cluster_shared", "dp_rank_local"])
@pytest.mark.parametrize("split", [False, True], ids=["aggregated", "2P2D"])
def test_whatever_is_under_way_is_given_back_once(
    tmp_path: Path, split: bool, scope: str, policy: str, busy: bool
) -> None:
    path = write_play(tmp_path)
    canceled = 0
    for cutoff_ms in (41.5, 191.3, 260.2):
        records = run_to_rest(timed_out(path, cutoff_ms, split=split, scope=scope, policy=policy, busy=busy))
        ends = Counter(record.event.request for record in records if isinstance(record.event, RequestEnded))
        assert set(ends.values()) <= {1}
        stopped = [e for record in records if isinstance(e := record.event, RequestEnded) and e.status == "canceled"]
        later = {end.request for end in stopped if end.leaves_later}
        left = Counter(record.event.request for record in records if isinstance(record.event, CanceledRequestLeft))
        assert left == Counter(later)
        held = Counter(record.event.request for record in records if isinstance(record.event, SourceHeld))
        freed = Counter(record.event.request for record in records if isinstance(record.event, SourceReleased))
        assert held == freed
        assert sum(isinstance(record.event, ProfileFinished) for record in records) == 1
        canceled += len(stopped)
    assert canceled > 0


@pytest.mark.parametrize("load_sync_ms", [None, 0.0, 13.0])
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
@pytest.mark.parametrize("split", [False, True], ids=["aggregated", "2P2D"])
def test_a_cancellation_reaches_the_router_replica_that_has_the_request(
    tmp_path: Path, split: bool, busy: bool, load_sync_ms: float | None
) -> None:
    path = write_play(tmp_path)
    places: set[str] = set()
    for cutoff_ms in (41.5, 122.3, 222.9):
        values = timed_out(path, cutoff_ms, split=split, scope="cluster_shared", policy="dynamo_kv", busy=busy)
        values["router"] |= {"replicas": 3, "load_sync_ms": load_sync_ms}
        records = run_to_rest(values)
        ends = Counter(record.event.request for record in records if isinstance(record.event, RequestEnded))
        assert set(ends.values()) == {1}
        places |= places_of_canceled(records)
    assert places


def test_requests_were_canceled_in_every_place(tmp_path: Path) -> None:
    """Queued at a router, restoring, computed, source held, destination reserved, and decoded after a hand-off."""
    path = write_play(tmp_path)
    places: set[str] = set()
    for split, busy, cutoff_ms in (
        *((False, True, cutoff_ms) for cutoff_ms in (41.5, 103.7, 166.2, 222.9, 301.3)),
        *((True, True, cutoff_ms) for cutoff_ms in (41.5, 122.3, 260.2)),
        *((True, False, cutoff_ms) for cutoff_ms in (41.5, 103.7, 166.2, 222.9)),
    ):
        values = timed_out(path, cutoff_ms, split=split, scope="cluster_shared", policy="dynamo_kv", busy=busy)
        places |= places_of_canceled(run_to_rest(values))
    assert places >= {"router", "restoring", "computed", "held", "reserved"}


def places_of_canceled(records: list[Record]) -> set[str]:
    """Where canceled requests were, by what had happened to them."""
    happened: dict[int, set[str]] = {}
    for record in records:
        event: Any = record.event
        if (request := getattr(event, "request", None)) is not None and not isinstance(event, RequestEnded):
            happened.setdefault(request, set()).add(type(event).__name__)
    places = set()
    for record in records:
        event = record.event
        if not isinstance(event, RequestEnded) or event.status != "canceled":
            continue
        seen = happened[event.request]
        if SourceHeld.__name__ in seen and DestinationActivated.__name__ not in seen:
            places.add("reserved" if DestinationReserved.__name__ in seen else "held")
        elif "RequestPlaced" not in seen:
            places.add("router")
        elif event.leaves_later:
            places.add("computed" if "RequestAdmitted" in seen else "restoring")
    return places


@pytest.mark.parametrize("cutoff_ms", [41.5, 191.3, 260.2])
def test_what_ends_within_the_grace_releases_nothing(tmp_path: Path, cutoff_ms: float) -> None:
    """Its successors were taken out at the cutoff: nothing arrives later, and nothing is canceled."""
    values = timed_out(
        write_play(tmp_path), cutoff_ms, split=False, scope="cluster_shared", policy="round_robin", busy=True
    )
    values["traffic"]["load"]["agentic_profile"]["response_grace_seconds"] = 60.0
    records = run_to_rest(values)
    arrivals = [record.time_ms for record in records if isinstance(record.event, RequestArrived)]
    ends = [record for record in records if isinstance(record.event, RequestEnded)]
    assert max(arrivals) < cutoff_ms < max(record.time_ms for record in ends)
    assert len(ends) == len(arrivals)
    assert {record.event.status for record in ends} == {"completed"}
