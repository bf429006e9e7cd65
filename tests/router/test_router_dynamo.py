"""Dynamo's policy: settings that are refused, the recorded costs, temperature, the queue, roles."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
from router_values import BLOCK, at, chain_of, pool, rank_of, request, router, stored

from g2sim.actors.config import TieBreak, WorkerRole
from g2sim.actors.kv.blocks import BlockChain, sequence_hash, tokens_hash
from g2sim.actors.router.dynamo import DynamoKv, KvSettings, softmax_position, weigh
from g2sim.actors.router.policy import Candidate, RoutedRequest
from g2sim.actors.router.registry import make_policy
from g2sim.actors.router.state import Placed, Refused, Waits
from g2sim.bus.errors import ConfigError

RECORDED = json.loads((Path(__file__).parents[1] / "oracle" / "router" / "cost_cases.json").read_text())
CASES: dict[str, Any] = RECORDED["cases"]


class TestSettings:
    @pytest.mark.parametrize(
        ("option", "bad"),
        [
            ("overlap_score_credit", -1),
            ("overlap_score_credit", math.nan),
            ("overlap_score_credit", None),
            ("overlap_score_credit", True),
            ("overlap_score_credit_decay", math.inf),
            ("prefill_load_scale", "1"),
            ("overlap_score_weight", -0.5),
            ("host_cache_hit_weight", 1.5),
            ("disk_cache_hit_weight", -0.1),
            ("router_temperature", -1e-9),
            ("decode_active_request_weight", 10**400),
            ("router_queue_threshold", -1),
            ("router_queue_policy", "fifo"),
            ("router_queue_policy", None),
            ("router_track_active_blocks", 1),
            ("router_assume_kv_reuse", "yes"),
            ("use_kv_events", False),
            ("router_track_output_blocks", True),
            ("router_predicted_ttl_secs", 5.0),
            ("router_prefill_load_model", "ais"),
            ("router_policy_config", "rules.yaml"),
            ("router_replica_sync", True),
            ("conditional_disagg_enabled", True),
            ("shared_cache_type", "hicache"),
        ],
    )
    def test_a_bad_option_is_named_with_its_value_and_what_is_allowed(self, option: str, bad: object) -> None:
        with pytest.raises(ConfigError) as caught:
            make_policy("dynamo_kv", {option: bad})
        assert caught.value.field == f"options.{option}"
        assert "got " in str(caught.value)
        assert "allowed: " in str(caught.value)

    def test_an_unknown_option_gets_a_hint(self) -> None:
        with pytest.raises(ConfigError, match="did you mean router_temperature") as caught:
            make_policy("kv_router", {"router_temprature": 1.0})
        assert "policy dynamo_kv has no such option" in str(caught.value)

    def test_the_defaults_are_the_references(self) -> None:
        """Names and values of KvRouterConfig's signature in ai-dynamo-runtime 1.6.1, typed in from there."""
        assert DynamoKv.defaults() == {
            "overlap_score_weight": None,
            "host_cache_hit_weight": 0.75,
            "disk_cache_hit_weight": 0.25,
            "router_temperature": 0.0,
            "use_kv_events": True,
            "router_replica_sync": False,
            "router_track_active_blocks": True,
            "router_track_output_blocks": False,
            "router_assume_kv_reuse": True,
            "router_track_prefill_tokens": True,
            "router_prefill_load_model": "none",
            "router_ttl_secs": 120.0,
            "router_approximate_cache_policy": "ttl",
            "router_queue_threshold": None,
            "router_event_threads": 4,
            "router_queue_policy": "fcfs",
            "use_remote_indexer": False,
            "serve_indexer": False,
            "enable_session_prefix_index": False,
            "shared_cache_multiplier": None,
            "shared_cache_type": "none",
            "router_predicted_ttl_secs": None,
            "conditional_disagg_enabled": False,
            "conditional_disagg_policy": "isl_bounding",
            "conditional_disagg_eff_isl_threshold": 2048,
            "conditional_disagg_eff_isl_ratio_threshold": 0.7,
            "conditional_disagg_prefill_busy_threshold": None,
            "conditional_disagg_decode_busy_threshold": None,
            "overlap_score_credit": 1.0,
            "overlap_score_credit_decay": 0.0,
            "prefill_load_scale": 1.0,
            "decode_active_request_weight": 0.0,
            "router_policy_config": None,
            "router_prefill_policy": None,
            "router_decode_policy": None,
            "router_tracking_hash": "public-xxh3-v1",
            "router_tracking_key_file": None,
            "router_tracking_key_id": None,
        }
        for option, value in DynamoKv.defaults().items():
            make_policy("dynamo_kv", {option: value})

    def test_the_older_name_of_the_scale_wins_and_zero_cancels_the_credit(self) -> None:
        assert KvSettings(overlap_score_weight=3.0, prefill_load_scale=2.0).scale == 3.0
        assert KvSettings(overlap_score_weight=3.0).credit == 1.0
        assert (KvSettings(overlap_score_weight=0.0).scale, KvSettings(overlap_score_weight=0.0).credit) == (0.0, 0.0)

    def test_the_roles_of_a_separate_deployment_derive_settings(self) -> None:
        given = KvSettings(overlap_score_weight=2.0, router_queue_threshold=0.5)
        assert given.for_role(WorkerRole.AGGREGATED) == given
        prefill, decode = given.for_role(WorkerRole.PREFILL), given.for_role(WorkerRole.DECODE)
        assert (prefill.router_track_active_blocks, prefill.scale, prefill.credit) == (False, 2.0, 1.0)
        assert (decode.credit, decode.router_assume_kv_reuse, decode.router_track_prefill_tokens) == (0.0, False, False)
        assert decode.router_track_active_blocks


# -- the 21 recorded costs, from events and reservations up

TOKENS, OTHER, THIRD = tuple(range(32)), tuple(range(1000, 1032)), tuple(range(2000, 2012))
EVENTS_OF = {
    "nothing cached": (),
    "device, host and disk on one worker": "chain",
    "host and disk weight 1": "chain",
}
PENDING = {
    "pending prefill on 1": [(OTHER, False)],
    "finished prefill on 1": [(OTHER, True)],
    "two running on 1, weight 5": [(OTHER, True), (THIRD, True)],
    "same prompt running on 1": [(TOKENS, True)],
    "same prompt running on 1, no reuse": [(TOKENS, True)],
    "cached prompt pending on 1 is booked net of its hit": [(TOKENS, False)],
    "no prefill tracking": [(OTHER, False)],
    "no prefill tracking, credit 0": [(OTHER, False)],
}


class Forced(DynamoKv):
    """The policy with a single rank allowed, as ``allowed_worker_ids`` does it."""

    only: int | None = None

    def eligible(self, request: RoutedRequest, candidate: Candidate) -> bool:
        return self.only is None or candidate.placement.worker == self.only


def prompt(number: int, tokens: tuple[int, ...]) -> RoutedRequest:
    own = [
        tokens_hash(struct.pack("<4I", *tokens[start : start + BLOCK]))
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK)
    ]
    hashes: list[int] = []
    for one in own:
        hashes.append(sequence_hash(hashes[-1] if hashes else None, one))
    chain = BlockChain(tuple(hashes), tuple(own))
    return RoutedRequest(request=number, prompt_tokens=len(tokens), output_tokens=4, chain=chain, arrival_ms=0.0)


@pytest.mark.parametrize("name", CASES)
def test_the_recorded_cost_of_each_worker(name: str) -> None:
    """The selection service scores like a decode router when it does not track prefill; else as a replay does."""
    case = CASES[name]
    policy = Forced(**case["config"])
    state = router(policy, workers=2)
    whole = prompt(0, TOKENS).chain
    held = EVENTS_OF.get(name, "device 3, host 6")
    disk = 0
    if held == "chain":
        place_blocks(state.pool, whole, 0, 0, 2, "device")
        place_blocks(state.pool, whole, 0, 2, 4, "host_pinned")
        place_blocks(state.pool, whole, 1, 0, 3, "device")
        disk = 2
    elif held:
        place_blocks(state.pool, whole, 0, 0, 3, "device")
        place_blocks(state.pool, whole, 1, 0, 6, "host_pinned")
    policy.only = 0
    for number, (tokens, done) in enumerate(PENDING.get(name, [])):
        state.place(prompt(number, tokens), 0.0)
        if done:
            state.first_token(number, 0.0)
    assert [len(tokens) for tokens, _ in PENDING.get(name, [])] == [tokens for _, tokens, _ in case["reservations"]]
    asked = prompt(99, TOKENS[: case["prompt_tokens"]])
    found = state.pool.candidates(asked)
    rows = [
        Candidate(
            one.placement,
            one.device_blocks,
            one.host_blocks,
            one.prefill_tokens,
            one.active_blocks,
            one.active_requests,
            disk_blocks=disk if one.placement.worker == 0 else 0,
        )
        for one in found
    ]
    for worker, row in enumerate(rows):
        told = case["workers"][str(worker + 1)]
        overlap = told["overlap_blocks"]
        assert (row.device_blocks, row.host_blocks, row.disk_blocks) == tuple(overlap.values())
        if case["config"].get("router_track_prefill_tokens", True):
            assert row.prefill_tokens == told["active_prefill_tokens"]
        assert (row.active_blocks, row.active_requests) == (told["decode_blocks_with_request"], told["active_requests"])
        alone = weigh(policy.settings, [row], asked.prompt_tokens, BLOCK, as_decode=True)
        assert alone.total == [told["cost"]]
    together = weigh(policy.settings, rows, asked.prompt_tokens, BLOCK, as_decode=True)
    picks = [case["picks_of_20"][str(worker + 1)] for worker in range(2)]
    chosen, tied = state.pool.lowest(together.total)
    assert picks[chosen] > 0
    assert (tied == 2) is (min(picks) > 0)


def place_blocks(watched: Any, chain: BlockChain, worker: int, start: int, stop: int, tier: str) -> None:
    watched.apply(
        type(stored(0, (1,)))(
            worker=worker,
            role="aggregated",
            dp_rank=0,
            event_id=0,
            tier=tier,
            parent_hash=chain.sequence_hashes[start - 1] if start else None,
            start_position=start,
            block_hashes=chain.sequence_hashes[start:stop],
            token_hashes=chain.tokens_hashes[start:stop],
        )
    )


def test_there_are_21_recorded_costs() -> None:
    assert len(CASES) == 21


class TestWeights:
    def test_decay_divides_the_excess_by_the_requests_blocks_rounded_up(self) -> None:
        """18 tokens are 5 blocks: excess (16 - 0) / 4 / 5 = 0.8, decay 1 / (1 + 3 * 0.8)."""
        rows = [Candidate(at(0), 4, 0, 16, 8, 1), Candidate(at(1), 0, 0, 0, 4, 0)]
        costs = weigh(KvSettings(overlap_score_credit_decay=3.0), rows, 18, BLOCK)
        assert costs.credit == [4 / (1 + 3 * 0.8), 0.0]
        assert costs.prefill == [(16 + 18) / 4 - 4 / (1 + 3 * 0.8), 4.5]
        assert costs.total == [costs.prefill[0] + 8, 8.5]

    def test_a_host_block_is_booked_and_reported_by_its_weight_with_halves_rounded_up(self) -> None:
        policy = DynamoKv(host_cache_hit_weight=0.5)
        state = router(policy, workers=1)
        for start, stop, tier in ((0, 1, "device"), (1, 4, "host_pinned")):
            state.observe([stored(0, (1, 2, 3, 4)[:stop], start=start, tier=tier)], 0.0)
        decision = state.place(request(1, (1, 2, 3, 4)), 0.0)
        assert isinstance(decision, Placed)
        assert decision.overlap_blocks == 3, "1 + 0.5 * 3 = 2.5"
        assert state.pool.loads.prefill_tokens == [16 - 10]

    def test_decode_ranks_are_weighed_by_blocks_alone_and_report_no_overlap(self) -> None:
        state = router(DynamoKv(), role=WorkerRole.DECODE)
        assert not state.policy.sees_blocks
        first = state.place(request(1, (1, 2)), 0.0)
        assert isinstance(first, Placed)
        assert (first.overlap_blocks, first.best_overlap_blocks) == (0, 0)
        assert rank_of(state.place(request(2, (1, 2)), 0.0)) == (1, 0), "equal blocks are charged again"
        assert first.why is not None
        assert list(first.why.costs) == [2.0, 2.0]


class TestTemperature:
    def test_equal_costs_have_equal_weights(self) -> None:
        assert [softmax_position([3.0, 3.0], 1.0, draw) for draw in (0.0, 0.49, 0.51, 0.999)] == [0, 0, 1, 1]

    def test_weights_are_exponentials_of_the_normalised_cost(self) -> None:
        """Costs 8 and 10 at temperature 1 weigh 1 and 1/e: the first has a share of 0.7311."""
        share = 1 / (1 + math.exp(-1))
        assert softmax_position([8.0, 10.0], 1.0, share - 1e-9) == 0
        assert softmax_position([8.0, 10.0], 1.0, share + 1e-9) == 1

    def test_a_low_temperature_takes_the_lowest_cost_and_nothing_overflows(self) -> None:
        for draw in (0.0, 0.5, 1 - 2**-53):
            assert softmax_position([9.0, 8.0, 100.0], 1e-300, draw) == 1

    def test_it_draws_from_a_stream_of_its_own(self) -> None:
        state = router(DynamoKv(router_temperature=1.0))
        placed = [state.place(request(number, (number,)), 0.0) for number in range(20)]
        assert {rank_of(one)[0] for one in placed} == {0, 1}
        assert state.pool.stream("softmax").draws == 20
        assert all(isinstance(one, Placed) and one.why is not None and one.why.reason == "softmax" for one in placed)


class TestQueue:
    """A budget of 64 tokens; blocks of 4."""

    def queued(self, **options: Any) -> tuple[Any, list[Any]]:
        """One rank with 12 blocks of prompt pending, and requests 2, 3, 4 of 9, 3 and 5 blocks that arrived then."""
        state = router(DynamoKv(router_queue_threshold=0.5, **options), workers=1)
        assert rank_of(state.place(request(1, range(100, 112)), 0.0)) == (0, 0)
        waits = [
            state.place(request(number, range(number * 100, number * 100 + size)), float(number))
            for number, size in ((2, 9), (3, 3), (4, 5))
        ]
        return state, waits

    @pytest.mark.parametrize(
        ("policy", "first", "then"),
        [("fcfs", [2], [3, 4]), ("lcfs", [4, 3], [2]), ("wspt", [3, 4], [2])],
    )
    def test_requests_wait_and_are_released_in_the_order_of_the_policy(
        self, policy: str, first: list[int], then: list[int]
    ) -> None:
        """32 tokens are the limit: 9 blocks fill it, 5 blocks do not, 5 and 3 do not, then 9 are too many."""
        state, waits = self.queued(router_queue_policy=policy)
        assert all(isinstance(one, Waits) for one in waits)
        assert list(state.waiting) == [2, 3, 4]
        state.check()
        released = state.first_token(1, 10.0)
        assert [one.request.request for one in released] == first + ([] if policy == "fcfs" else then)
        if policy == "fcfs":
            assert [one.request.request for one in state.first_token(2, 20.0)] == then
        assert [one.queued_at_ms for one in released] == [float(one.request.request) for one in released]
        assert not state.waiting
        state.check()

    def test_the_limit_itself_is_not_busy(self) -> None:
        state = router(DynamoKv(router_queue_threshold=0.75), workers=1)
        state.place(request(1, range(12)), 0.0)
        assert rank_of(state.place(request(2, range(20, 24)), 0.0)) == (0, 0), "48 of 48 tokens"
        assert isinstance(state.place(request(3, range(30, 34)), 0.0), Waits)

    def test_any_pending_prompt_is_too_much_at_threshold_0_even_without_a_budget(self) -> None:
        state = router(DynamoKv(router_queue_threshold=0), workers=1, max_batched_tokens=None)
        state.place(request(1, (1,)), 0.0)
        assert isinstance(state.place(request(2, (2,)), 0.0), Waits)
        other = router(DynamoKv(router_queue_threshold=1.0), workers=1, max_batched_tokens=None)
        for number in range(10):
            assert isinstance(other.place(request(number, range(100)), 0.0), Placed)

    def test_a_free_worker_does_not_let_a_newcomer_pass_the_queue(self) -> None:
        state = router(DynamoKv(router_queue_threshold=0.5), workers=1)
        state.place(request(1, range(12)), 0.0)
        state.place(request(2, range(20, 24)), 0.0)
        state.pool.loads.first_token(1)  # behind the policy's back: free, but nothing was drained
        assert isinstance(state.place(request(3, range(30, 34)), 1.0), Waits)

    def test_the_overlap_of_a_waiting_request_is_the_one_at_its_arrival(self) -> None:
        state = router(DynamoKv(router_queue_threshold=0.5), workers=1)
        state.place(request(1, range(12)), 0.0)
        state.place(request(2, range(12)), 1.0)
        state.observe([stored(0, range(12))], 10.0)
        (released,) = state.first_token(1, 10.0)
        assert isinstance(released, Placed)
        assert (released.overlap_blocks, state.pool.loads.prefill_tokens) == (0, [48])

    def test_an_end_releases_too_and_the_shortest_counts_what_is_cached(self) -> None:
        state = router(DynamoKv(router_queue_threshold=0, router_queue_policy="wspt"), workers=1)
        state.observe([stored(0, range(8))], 0.0)
        state.place(request(1, (50,)), 0.0)
        state.place(request(2, (60, 61, 62)), 1.0)
        state.place(request(3, range(9)), 2.0)
        assert [one.request.request for one in state.ended(1, 3.0)] == [3], "9 blocks, 8 of them cached"
        assert [one.request.request for one in state.ended(3, 4.0)] == [2]

    def test_nobody_eligible_is_refused(self) -> None:
        policy = Forced()
        state = router(policy)
        policy.only = 7
        decision = state.place(request(1), 0.0)
        assert isinstance(decision, Refused)
        assert decision.reason == "no rank is eligible"


class TestTies:
    def test_the_lowest_rank_is_taken_and_the_tie_recorded(self) -> None:
        state = router(DynamoKv(), workers=2, dp_size=2)
        decision = state.place(request(1), 0.0)
        assert rank_of(decision) == (0, 0)
        assert isinstance(decision, Placed)
        assert decision.why is not None
        assert decision.why.tied == 4

    def test_a_random_tie_draws_once_from_its_stream_and_only_for_a_tie(self) -> None:
        state = router(DynamoKv(), workers=3, tie_break=TieBreak.RANDOM)
        seen = set()
        for number in range(30):
            seen.add(rank_of(state.place(request(number, (number,)), 0.0)))
            state.ended(number, 0.0)
        assert len(seen) == 3
        assert state.pool.stream("tie").draws == 30
        state.observe([stored(2, chain_ids)], 0.0)
        assert rank_of(state.place(request(99, chain_ids), 0.0)) == (2, 0)
        assert state.pool.stream("tie").draws == 30

    def test_equal_seeds_make_equal_choices(self) -> None:
        choices = []
        for _ in range(2):
            state = router(DynamoKv(), workers=4, tie_break=TieBreak.RANDOM)
            choices.append([rank_of(state.place(request(number, (number,)), 0.0)) for number in range(20)])
        assert choices[0] == choices[1]


chain_ids = (7, 8, 9)


def test_the_pool_helper_keeps_blocks_apart() -> None:
    """What these tests stand on: equal ids are equal blocks, and only then."""
    assert chain_of((1, 2)).sequence_hashes[0] == chain_of((1, 3)).sequence_hashes[0]
    assert chain_of((1, 2)).sequence_hashes[1] != chain_of((3, 2)).sequence_hashes[1]
    assert pool().places == (at(0), at(1))
