"""Field cases about routers, as whole runs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from field_runs import host, row, simulate, worker

from g2sim.actors.kv.events import BlocksCleared
from g2sim.actors.router.events import PlacementWeighed
from g2sim.actors.worker.events import RequestAdmitted


def test_f06_a_prefix_that_left_g1_is_still_worth_a_worker_that_has_it_on_the_host(tmp_path: Path) -> None:
    """w0 has [1..3] on the host only; the request goes there for it, and restores it."""
    rows = [row(0, [1, 2, 3]), row(100, [1, 2, 3, *range(20, 25)]), row(110, range(30, 38)), row(120, range(40, 48))]
    rows.append(row(200, [1, 2, 3, 9]))
    ran = simulate(
        tmp_path,
        rows,
        router={"policy": "prefix_affinity", "options": {"host_weight": 0.9}},
        aggregated=worker(gpu_blocks=8, host=host(32), replicas=2),
    )
    places = [one["routing_history"][0]["logical_worker_id"] for one in ran.rows]
    last = ran.of(PlacementWeighed)[-1]
    assert last.device_blocks == (0, 0)
    assert last.host_blocks[places[0]] == 3
    assert last.host_blocks[1 - places[0]] == 0
    assert places[-1] == places[0]
    assert ran.rows[-1]["first_admission_host_reused_input_tokens"] == 12


@pytest.mark.parametrize("policy", ["least_loaded", "power_of_two", "prefix_affinity", "random"])
def test_f54_equal_workers_share_what_comes(tmp_path: Path, policy: str) -> None:
    """40 requests that never overlap in time; ties by a named seeded stream, equal for equal seeds."""
    rows = [row(50.0 * k, [k]) for k in range(40)]
    tie = {} if policy in ("random",) else {"tie_break": "random"}

    def places(seed: int) -> list[int]:
        ran = simulate(
            tmp_path, rows, seed=seed, router={"policy": policy, **tie}, aggregated=worker(gpu_blocks=64, replicas=4)
        )
        return [one["routing_history"][0]["logical_worker_id"] for one in ran.rows]

    assert places(7) == places(7) != places(8)
    assert min(Counter(places(7)).values()) >= 5
    assert len(Counter(places(7))) == 4


@pytest.mark.parametrize("policy", ["least_loaded", "dynamo_kv", "prefix_affinity"])
def test_f55_prompts_shorter_than_a_block_are_spread_by_load(tmp_path: Path, policy: str) -> None:
    rows = [row(0.0, [k], out=50, tokens=3) for k in range(12)]
    ran = simulate(tmp_path, rows, router={"policy": policy}, aggregated=worker(gpu_blocks=64, replicas=4))
    counts = Counter(one["routing_history"][0]["logical_worker_id"] for one in ran.rows)
    assert [counts[k] for k in range(4)] == [3, 3, 3, 3]


def test_f13_the_clear_of_an_idle_worker_is_known_at_once(tmp_path: Path) -> None:
    """Idle for most of the time, cleared at 100; the router is asked at 200 and at 5000."""
    rows = [row(at_ms, [1, 2, 3, 4]) for at_ms in (0.0, 200.0, 5000.0)]
    plan = [{"name": "reset", "type": "cache_clear", "from_ms": 100}]
    ran = simulate(
        tmp_path, rows, router={"policy": "prefix_affinity"}, faults={"plan": plan}, aggregated=worker(gpu_blocks=64)
    )
    assert ran.times_of(BlocksCleared) == [100.0]
    (cleared,) = ran.of(BlocksCleared)
    assert cleared.event_id == 1
    assert [one.device_blocks for one in ran.of(PlacementWeighed)] == [(0,), (0,), (4,)]
    assert [one.reused_tokens for one in ran.of(RequestAdmitted)] == [0, 0, 12]


def test_f57_a_flap_in_discovery_leaves_what_the_router_knows_of_a_worker(tmp_path: Path) -> None:
    """w0 has 10 requests and w1 5; w0 drops out and comes back in the same instant; 6 more arrive then."""
    rows = [row(0.0, [99], out=1)]  # the first arrival is at 0, when no fault can begin
    rows += [row(float(at), [k], out=400) for k, at in enumerate([10] * 5 + [30] * 10 + [60] * 6)]
    plan = [
        {"name": "only-w1", "type": "discovery_flap", "from_ms": 5, "until_ms": 20, "worker": 0},
        {"name": "only-w0", "type": "discovery_flap", "from_ms": 25, "until_ms": 40, "worker": 1},
        {"name": "flap", "type": "discovery_flap", "from_ms": 60, "until_ms": 60, "worker": 0},
    ]
    ran = simulate(
        tmp_path,
        rows,
        router={"policy": "least_loaded"},
        faults={"plan": plan},
        aggregated=worker(gpu_blocks=2048, replicas=2, max_sequences=32),
    )
    weighed = ran.of(PlacementWeighed)[1:]
    assert [(one.workers, one.chosen) for one in weighed[:15]] == [((1,), 0)] * 5 + [((0,), 0)] * 10
    assert [one.active_requests for one in weighed[15:]] == [(10, load) for load in (5, 6, 7, 8, 9, 10)]
    assert [one.workers[one.chosen] for one in weighed[15:20]] == [1] * 5
    assert weighed[20].tied == 2
    assert ran.report["requests"]["completed"] == 22
    flap = ran.report["membership"]["workers"][2]
    assert (flap["fault"], flap["removed_ms"], flap["ready_ms"], flap["crashed_ms"]) == ("flap", 60.0, 60.0, None)


def test_f56_sessions_without_anything_in_flight_are_spread_and_stay(tmp_path: Path) -> None:
    """8 sessions of 20 turns, one turn at a time over all sessions: first turns spread, later ones stay."""
    rows = [
        row(100.0 * (8 * turn + session), [100 * session + b for b in range(turn + 1)])
        for turn in range(20)
        for session in range(8)
    ]
    ran = simulate(
        tmp_path,
        rows,
        router={"policy": "prefix_affinity", "tie_break": "random"},
        seed=3,
        aggregated=worker(gpu_blocks=512, replicas=2),
    )
    places = [one["routing_history"][0]["logical_worker_id"] for one in ran.rows]
    assert 3 <= sum(places[:8]) <= 5
    for session in range(8):
        assert len(set(places[session::8])) == 1


def test_an_eviction_is_known_at_the_next_decision(tmp_path: Path) -> None:
    """An eviction on an idle worker is in the index at the next decision, however long it idled."""
    rows = [row(0, [1, 2, 3]), row(10, range(20, 26)), row(5000, [1, 2, 3, 4])]
    ran = simulate(tmp_path, rows, router={"policy": "prefix_affinity"}, aggregated=worker(gpu_blocks=6, replicas=1))
    assert ran.of(PlacementWeighed)[-1].device_blocks[0] == 0
    assert ran.rows[2]["reused_input_tokens"] == 0
