"""The policies that come along: each does what its name says, and all keep the rules."""

from __future__ import annotations

from typing import Any

import pytest
from router_values import agentic, at, pool, rank_of, request, router, stored

from g2sim.actors.config import TieBreak, WorkerRole
from g2sim.actors.router.policy import PlacementPolicy
from g2sim.actors.router.pool import WorkerState
from g2sim.actors.router.registry import POLICIES, canonical_name, default_options, make_policy
from g2sim.actors.router.state import Placed, Waits
from g2sim.bus.errors import ConfigError
from g2sim.scenarios.policy_check import check_policy
from g2sim.scenarios.policy_source import PolicyChoice


def named(
    name: str, workers: int = 2, dp_size: int = 1, *, options: dict[str, Any] | None = None, **change: Any
) -> Any:
    return router(make_policy(name, options or {}), workers, dp_size, **change)


class TestRegistry:
    def test_an_unknown_policy_is_refused_with_a_hint_and_the_known_ones(self) -> None:
        with pytest.raises(ConfigError, match="did you mean round_robin") as caught:
            make_policy("roundrobin", {})
        assert all(name in str(caught.value) for name in POLICIES)

    @pytest.mark.parametrize(
        ("policy", "option", "bad"),
        [
            ("round_robin", "anything", 1),
            ("prefix_affinity", "host_weight", -1),
            ("prefix_affinity", "device_weight", "1"),
            ("session_affinity", "ttl_ms", -1.0),
            ("session_affinity", "slack_requests", 1.5),
            ("parent_aware", "slack_requests", True),
        ],
    )
    def test_a_bad_option_is_named(self, policy: str, option: str, bad: object) -> None:
        with pytest.raises(ConfigError) as caught:
            make_policy(policy, {option: bad})
        assert caught.value.field == f"options.{option}"
        assert "allowed: " in str(caught.value)

    def test_the_references_name_is_taken(self) -> None:
        assert canonical_name("kv_router") == "dynamo_kv"

    @pytest.mark.parametrize("name", POLICIES)
    def test_defaults_can_be_given(self, name: str) -> None:
        made = make_policy(name, default_options(POLICIES[name]))
        assert made.name == name


class TestBlind:
    def test_round_robin_goes_over_workers_and_each_worker_over_its_ranks(self) -> None:
        state = named("round_robin", 2, 2)
        assert [rank_of(state.place(request(k), 0.0)) for k in range(5)] == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 0)]

    def test_round_robin_of_a_prefill_or_decode_pool_goes_over_ranks(self) -> None:
        for role in (WorkerRole.PREFILL, WorkerRole.DECODE):
            state = named("round_robin", 2, 2, role=role)
            assert [rank_of(state.place(request(k), 0.0)) for k in range(5)] == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 0)]

    def test_round_robin_passes_over_workers_that_drain(self) -> None:
        state = named("round_robin", 3)
        state.set_worker(1, WorkerState.DRAINING, 0.0)
        assert [rank_of(state.place(request(k), 0.0))[0] for k in range(4)] == [0, 2, 0, 2]

    def test_random_reaches_every_rank_by_its_own_stream(self) -> None:
        state = named("random", 2, 2)
        assert {rank_of(state.place(request(k), 0.0)) for k in range(40)} == {(0, 0), (0, 1), (1, 0), (1, 1)}
        assert set(state.pool.stream.made) == {"placement"}
        assert state.pool.stream("placement").draws == 40

    @pytest.mark.parametrize("name", ["round_robin", "random"])
    def test_they_neither_look_nor_book_nor_weigh(self, name: str) -> None:
        state = named(name)
        decision = state.place(request(1), 0.0)
        assert isinstance(decision, Placed)
        assert (decision.overlap_blocks, decision.why, 1 in state.pool.loads) == (None, None, False)


class TestLoad:
    def test_least_loaded_takes_the_fewest_requests_and_hears_of_ends(self) -> None:
        state = named("least_loaded", 3)
        assert [rank_of(state.place(request(k), 0.0))[0] for k in range(4)] == [0, 1, 2, 0]
        state.ended(1, 1.0)
        assert rank_of(state.place(request(9), 1.0)) == (1, 0)

    def test_power_of_two_never_takes_the_fullest_of_three_and_draws_two(self) -> None:
        state = named("power_of_two", 3)
        state.pool.loads.book(99, 0, 0, ())
        for number in range(30):
            decision = state.place(request(number), 0.0)
            assert rank_of(decision) != (0, 0)
            assert isinstance(decision, Placed)
            assert decision.why is not None
            assert len(decision.why.candidates) == 2
            state.ended(number, 0.0)
        assert state.pool.stream("placement").draws == 60

    def test_power_of_two_of_one_or_two_ranks_draws_nothing(self) -> None:
        for workers in (1, 2):
            state = named("power_of_two", workers)
            state.place(request(1), 0.0)
            assert not state.pool.stream.made


class TestPrefixAffinity:
    def test_a_prompt_returns_to_its_prefix_until_the_load_outweighs_it(self) -> None:
        state = named("prefix_affinity")
        state.observe([stored(1, (1, 2, 3, 4))], 0.0)
        placed = []
        for number in range(6):
            placed.append(rank_of(state.place(request(number, (1, 2, 3, 4)), 0.0))[0])
            state.first_token(number, 0.0)
        assert placed == [1, 1, 1, 1, 0, 1]

    def test_host_blocks_count_by_their_weight(self) -> None:
        for weight, expected in ((0.75, 0), (0.25, 1)):
            state = named("prefix_affinity", options={"host_weight": weight})
            state.observe([stored(0, (1, 2, 3, 4), tier="host_pinned"), stored(1, (1, 2))], 0.0)
            decision = state.place(request(1, (1, 2, 3, 4)), 0.0)
            assert rank_of(decision) == (expected, 0)
            assert isinstance(decision, Placed)
            assert (decision.overlap_blocks, decision.best_overlap_blocks) == ((4, 4) if expected == 0 else (2, 4))


class TestAffinity:
    def test_a_session_stays_although_others_are_emptier_and_moves_when_its_rank_is_much_fuller(self) -> None:
        state = named("session_affinity", options={"slack_requests": 2})
        assert rank_of(state.place(request(0, session_id="a"), 0.0)) == (0, 0)
        assert [rank_of(state.place(request(k, session_id="a"), 0.0))[0] for k in (1, 2)] == [0, 0]
        decision = state.place(request(3, session_id="a"), 0.0)
        assert rank_of(decision) == (1, 0)
        assert isinstance(decision, Placed)
        assert decision.why is not None
        assert decision.why.reason == "least_loaded"
        assert rank_of(state.place(request(4, session_id="a"), 0.0)) == (1, 0), "bound to the new rank"

    def test_idle_time_starts_when_the_last_request_ends(self) -> None:
        state = named("session_affinity", options={"ttl_ms": 10.0})
        state.place(request(0, session_id="a"), 0.0)
        state.place(request(1), 0.0)
        state.place(request(2), 0.0)
        assert state.pool.loads.requests == [2, 1]
        state.ended(0, 100.0)
        state.place(request(3), 100.0)
        assert state.pool.loads.requests == [2, 1]
        assert rank_of(state.place(request(4, session_id="a"), 109.9)) == (0, 0)
        state.ended(4, 110.0)
        decision = state.place(request(5, session_id="a"), 120.0)
        assert rank_of(decision) == (1, 0), "forgotten at 120: idle for 10 ms"

    def test_requests_without_session_go_to_the_emptiest(self) -> None:
        state = named("session_affinity")
        assert [rank_of(state.place(request(k), 0.0))[0] for k in range(3)] == [0, 1, 0]

    def test_conversations_of_different_plays_are_different_sessions(self) -> None:
        state = named("session_affinity")
        state.place(request(0, agentic=agentic("p", "c")), 0.0)
        assert rank_of(state.place(request(1, agentic=agentic("q", "c")), 0.0)) == (1, 0)
        assert rank_of(state.place(request(2, agentic=agentic("p", "c")), 0.0)) == (0, 0)

    def test_a_removed_worker_frees_its_sessions(self) -> None:
        state = named("session_affinity")
        state.place(request(0, session_id="a"), 0.0)
        state.set_worker(0, WorkerState.REMOVED, 1.0)
        assert rank_of(state.place(request(1, session_id="a"), 2.0)) == (1, 0)

    def test_a_subagent_starts_where_its_parent_is_and_stays_there(self) -> None:
        state = named("parent_aware", 3)
        state.place(request(0, name="other", agentic=agentic("p", "x")), 0.0)
        assert rank_of(state.place(request(1, name="root", agentic=agentic("p", "main")), 0.0)) == (1, 0)
        child = state.place(request(2, name="sub-1", agentic=agentic("p", "sub", parent_id="root")), 0.0)
        assert rank_of(child) == (1, 0)
        assert child.why.reason == "parent"
        again = state.place(request(3, name="sub-2", agentic=agentic("p", "sub")), 0.0)
        assert (rank_of(again), again.why.reason) == ((1, 0), "bound")

    def test_a_parent_of_another_play_or_one_never_seen_is_no_parent(self) -> None:
        state = named("parent_aware", 2)
        state.place(request(0, name="root", agentic=agentic("p", "main")), 0.0)
        stranger = state.place(request(1, name="sub", agentic=agentic("q", "sub", parent_id="root")), 0.0)
        assert rank_of(stranger) == (1, 0)
        orphan = state.place(request(2, name="sub", agentic=agentic("p", "sub2", parent_id="nobody")), 0.0)
        assert orphan.why.reason == "least_loaded"


# -- what holds for all of them

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "dynamo_kv": [
        {},
        {"router_queue_threshold": 0.1, "router_queue_policy": "wspt"},
        {"router_queue_threshold": 0, "router_queue_policy": "lcfs", "router_temperature": 0.5},
    ],
}
ALL = [(name, options) for name in POLICIES for options in OPTIONS.get(name, [{}])]


@pytest.mark.parametrize(("name", "options"), ALL, ids=lambda value: str(value)[:40])
def test_every_policy_passes_the_conformance_suite(name: str, options: dict[str, Any]) -> None:
    results = check_policy(PolicyChoice(name, options), fresh_processes=name in ("dynamo_kv", "session_affinity"))
    assert [(result.name, result.problem) for result in results if not result.ok] == []
    assert len(results) >= 7


@pytest.mark.parametrize("name", POLICIES)
def test_without_a_ready_worker_a_request_waits(name: str) -> None:
    policy: PlacementPolicy = make_policy(name, {})
    state = router(policy, 1)
    state.set_worker(0, WorkerState.DRAINING, 0.0)
    assert isinstance(state.place(request(1), 0.0), Waits)
    assert [rank_of(one) for one in state.set_worker(0, WorkerState.READY, 1.0)] == [(0, 0)]
    assert rank_of(state.place(request(2), 1.0)) == (0, 0)


def test_a_tie_goes_to_the_lowest_rank_or_to_the_stream() -> None:
    lowest = named("least_loaded", 4)
    assert [rank_of(lowest.place(request(k), 0.0))[0] for k in range(4)] == [0, 1, 2, 3]
    drawn = named("least_loaded", 4, tie_break=TieBreak.RANDOM)
    first = [rank_of(drawn.place(request(k), 0.0))[0] for k in range(4)]
    assert sorted(first) == [0, 1, 2, 3]
    assert drawn.pool.stream("tie").draws == 3, "the last one is no tie"
    assert at(0) == pool().places[0]
