"""One rank's scheduler driven directly: no bus, and a host tier that says what a test wants."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Generator
from typing import Any

import attrs
import numpy as np
import pytest

from g2sim.actors.config import FixedTiming, HostScope, HostTierConfig, PreemptionMode, RankConfig, WorkerRole
from g2sim.actors.host_pool.messages import (
    NOTHING,
    BoundaryReply,
    Completion,
    LookUp,
    LookUpOutcome,
    LookUpReply,
    PassBoundary,
    PrepareStore,
    QueueLoad,
    StoreOutcome,
    StoreReply,
    Tick,
    TickReply,
)
from g2sim.actors.kv.blocks import BlockHasher
from g2sim.actors.kv.events import Tier
from g2sim.actors.kv.numbers import NO_NUMBERS
from g2sim.actors.kv.prompt import RunPrompt
from g2sim.actors.traffic.request import RequestStatus
from g2sim.actors.traffic.trace_json import MAX_TOKENS
from g2sim.actors.worker.rank import Admission, Ending, PassResult, Rank, RemovedBlocks, StoredRun
from g2sim.actors.worker.sequence import RankRequest
from g2sim.bus.errors import InvariantViolation

SIZE = 4
MISS = LookUpReply(LookUpOutcome.MISS, 0, True)
COMPLETED, REJECTED = RequestStatus.COMPLETED, RequestStatus.REJECTED
RETRY = StoreReply(StoreOutcome.RETRY, None, NO_NUMBERS)
PRESENT = StoreReply(StoreOutcome.PRESENT, None, NO_NUMBERS)


def config(gpu_blocks: int = 8, *, host: HostScope | None = None, **changes: Any) -> RankConfig:
    made = RankConfig(
        gpu_blocks=gpu_blocks,
        block_size_tokens=SIZE,
        timing=FixedTiming(prefill_ms=2.0, decode_ms=1.0),
        kv_bytes_per_token=1000,
        host=None if host is None else HostTierConfig(scope=host, capacity_blocks=8),
    )
    return attrs.evolve(made, **changes)


def prepared(transfer: int, *positions: int) -> StoreReply:
    return StoreReply(StoreOutcome.PREPARED, transfer, np.array(positions, np.int64))


def rank_of(gpu_blocks: int = 8, *, role: WorkerRole = WorkerRole.AGGREGATED, **changes: Any) -> Rank:
    return Rank(config(gpu_blocks, **changes), role)


def request(number: int, prompt_tokens: int, output_tokens: int = 1, *, ids: tuple[int, ...] = ()) -> RankRequest:
    """``ids``: one a block; left out, they are the request's own."""
    blocks = -(-prompt_tokens // SIZE)
    own = tuple(1000 * (number + 1) + block for block in range(blocks))
    prompt = RunPrompt(ids or own, SIZE, prompt_tokens)
    return RankRequest(
        request=number,
        prompt=prompt,
        chain=BlockHasher(SIZE).chain(prompt),
        output_tokens=output_tokens,
        output_base=1000 * number,
    )


class FakeHost:
    """Answers look-ups and stores from queues, and keeps what it was asked."""

    def __init__(self, *, look_ups: list[LookUpReply] | None = None, stores: list[StoreReply] | None = None) -> None:
        self.asked: list[Any] = []
        self.look_ups = look_ups or []
        self.stores = stores or []
        self.boundary = BoundaryReply(NOTHING, (), NOTHING)
        self.tick = NOTHING
        self._transfers = itertools.count(70)

    def reply(self, message: Any) -> Any:
        self.asked.append(message)
        if isinstance(message, LookUp):
            return self.look_ups.pop(0) if self.look_ups else MISS
        if isinstance(message, PrepareStore):
            return self.stores.pop(0) if self.stores else PRESENT
        if isinstance(message, QueueLoad):
            return next(self._transfers)
        if isinstance(message, PassBoundary):
            return self.boundary
        assert isinstance(message, Tick)
        return self.tick

    def kinds(self) -> list[str]:
        asked, self.asked = self.asked, []
        return [type(message).__name__ for message in asked]

    def talk(self, steps: Generator[Any, Any, Any]) -> Any:
        reply: Any = None
        while True:
            try:
                message = steps.send(reply)
            except StopIteration as stop:
                return stop.value
            reply = self.reply(message)


def never(message: Any) -> Any:
    raise AssertionError(f"a rank without a host tier asks {message}")


def run_pass(rank: Rank, now_ms: float = 0.0, host: FakeHost | None = None) -> PassResult:
    """One whole pass, its end included; without a host nothing may be asked."""
    result = rank.decode_pass(now_ms, never if host is None else host.reply)
    if host is None:
        if result is None:
            with pytest.raises(StopIteration) as stop:
                next(rank.run_pass(now_ms))
            result = stop.value.value
        assert rank.boundary is None
    else:
        result = result or host.talk(rank.run_pass(now_ms))
        rank.end_pass(host.reply(rank.boundary))
    assert isinstance(result, PassResult)
    rank.pool.check()
    return result


def admitted(result: PassResult) -> list[tuple[int, int]]:
    return [(admission.request, admission.reused_tokens) for admission in result.admissions]


# -- refused


def test_who_waits_takes_no_memory_for_what_it_may_generate() -> None:
    """The largest answers that a trace may ask for, of many requests that have not begun."""
    rank = rank_of()
    rank.submit(request(0, 4))
    tracemalloc.start()
    try:
        for number in range(1, 201):
            rank.submit(request(number, 4, MAX_TOKENS))
        assert tracemalloc.get_traced_memory()[0] < 200 * 10_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("prompt_tokens", "limits"),
    [(33, {}), (20, {"max_model_len_tokens": 20}), (9, {"gpu_blocks": 2})],
    ids=["more_than_the_pool", "at_max_model_len", "small_pool"],
)
def test_a_prompt_that_never_fits_is_rejected_by_number(prompt_tokens: int, limits: dict[str, Any]) -> None:
    """At the head of the queue it is rejected in an empty pass that ends at once; nothing is admitted or kept."""
    rank = rank_of(**limits)
    rank.submit(request(7, prompt_tokens))
    result = run_pass(rank, 5.0)
    assert (result.emitted, result.endings) == ((), [Ending(7, REJECTED)])
    assert result.end_ms == 5.0
    assert result.admissions == []
    assert rank.waiting() == []
    assert not rank.ready


def test_a_rejection_does_not_hold_up_the_queue() -> None:
    """What stands behind a rejected prompt is admitted in the same pass; the rejection comes last in the endings."""
    rank = rank_of(4)
    rank.submit(request(0, 17))
    rank.submit(request(1, 8))
    result = run_pass(rank)
    assert (result.emitted, result.endings) == ((1,), [Ending(1, COMPLETED), Ending(0, REJECTED)])
    assert result.end_ms == 2.0


@pytest.mark.parametrize(
    ("prompt_tokens", "limits", "why"),
    [
        (33, {}, "a prompt of 9 blocks, but there are 8"),
        (20, {"max_model_len_tokens": 20}, "a prompt of 20 tokens, but max_model_len is 20"),
    ],
)
def test_a_destination_that_never_fits_is_refused_with_both_numbers(
    prompt_tokens: int, limits: dict[str, Any], why: str
) -> None:
    """A decode rank refuses such a hand-off at once and names the prompt's size and the limit."""
    rank = rank_of(role=WorkerRole.DECODE, **limits)
    reply = rank.reserve_destination(3, request(0, prompt_tokens), idle=True)
    assert reply.refused == why
    assert reply.reports == ()
    assert rank.waiting() == []


def test_a_completion_of_an_unknown_load_is_an_error() -> None:
    """A host tier that reports a load nobody began does not pass unnoticed."""
    rank = rank_of(host=HostScope.CLUSTER_SHARED)
    host = FakeHost()
    host.tick = TickReply((Completion(5, 0, True, 1.0),), True, ())
    with pytest.raises((KeyError, InvariantViolation)):
        host.talk(rank.tick())


# -- passes


def test_a_single_request_takes_a_prefill_and_then_decode_passes() -> None:
    """The first token comes at the end of the prefill pass, each later one a decode pass after it."""
    rank = rank_of()
    rank.submit(request(0, 9, 3))
    first, second, third = run_pass(rank), run_pass(rank, 2.0), run_pass(rank, 3.0)
    assert [first.end_ms, second.end_ms, third.end_ms] == [2.0, 3.0, 4.0]
    assert [(done.emitted, done.endings) for done in (first, second)] == [((0,), [])] * 2
    assert (third.emitted, third.endings) == ((0,), [Ending(0, COMPLETED)])
    assert (first.prefill_tokens, second.prefill_tokens) == (9, 0)
    assert first.admissions == [Admission(0, 0, None, None, False)]


def test_zero_output_ends_with_the_prompt_and_without_a_token() -> None:
    """A request for no output is completed by the pass that computes its last prompt token and emits nothing."""
    rank = rank_of()
    rank.submit(request(0, 9, 0))
    result = run_pass(rank)
    assert (result.emitted, result.endings) == ((), [Ending(0, COMPLETED)])
    assert result.end_ms == 2.0
    assert rank.pool.active_blocks == 0
    rank.submit(request(1, 8, 0, ids=(1000, 1001)))
    again = run_pass(rank, 2.0)
    assert admitted(again) == [(1, 8)]  # nothing is to be generated, so nothing is recomputed
    assert (again.emitted, again.endings) == ((), [Ending(1, COMPLETED)])
    assert again.end_ms == 2.0


def test_with_chunked_prefill_off_a_prompt_above_the_budget_blocks() -> None:
    """The pass comes to nothing, the queue stands still behind it, and waiting() names prompt and budget."""
    rank = rank_of(chunked_prefill=False, max_batched_tokens=8)
    rank.submit(request(0, 9))
    rank.submit(request(1, 4))
    result = run_pass(rank, 3.0)
    assert not result.progress
    assert result.end_ms == 3.0
    assert rank.waiting() == [
        "request 0 waits for a pass with a budget of 9 tokens; the budget is 8 and chunked prefill is off",
        "request 1 waits for 1 GPU blocks (0 its own; 8 of 8 GPU blocks available)",
    ]


def test_with_chunked_prefill_a_prompt_is_computed_in_budgets() -> None:
    """9 tokens in budgets of 8: 8 without a token, then 1 and the first token."""
    rank = rank_of(max_batched_tokens=8)
    rank.submit(request(0, 9))
    first, second = run_pass(rank), run_pass(rank, 2.0)
    assert (first.scheduled_tokens, first.emitted, first.endings) == (8, (), [])
    assert (second.scheduled_tokens, second.emitted, second.endings) == (1, (0,), [Ending(0, COMPLETED)])
    assert second.end_ms == 4.0


def test_a_chunked_prompt_enters_only_if_all_of_it_would_fit() -> None:
    """The head of the queue asks for its whole length; without that much room nobody is admitted, however short."""
    rank = rank_of(4, max_batched_tokens=8)
    rank.submit(request(0, 7, 5))
    rank.submit(request(1, 12))
    rank.submit(request(2, 4))
    assert admitted(run_pass(rank)) == [(0, 0)]
    assert rank.waiting() == [
        "request 0 is running, 4 tokens left",
        "request 1 waits for 3 GPU blocks (0 its own; 2 of 4 GPU blocks available)",
        "request 2 waits for 1 GPU blocks (0 its own; 2 of 4 GPU blocks available)",
    ]


def running_three(mode: PreemptionMode) -> Rank:
    """Requests 0, 1, 2 with prompts of 7, 8 and 6 tokens fill six blocks and have one token each."""
    rank = rank_of(6, preemption=mode)
    for number, prompt_tokens in enumerate((7, 8, 6)):
        rank.submit(request(number, prompt_tokens, 9))
    assert admitted(run_pass(rank)) == [(0, 0), (1, 0), (2, 0)]
    return rank


def test_fifo_preemption_passes_over_a_bystander() -> None:
    """Request 1 needs a block and takes it from the oldest, 0; the list shrinks before the index, so 2 gets nothing."""
    rank = running_three(PreemptionMode.FIFO)
    result = run_pass(rank, 2.0)
    assert result.preempted == [0]
    assert (result.emitted, result.endings) == ((1,), [])
    assert (result.scheduled_requests, result.scheduled_tokens) == (1, 1)
    assert result.admissions == []
    later = run_pass(rank, 3.0)
    assert later.emitted == (1, 2)


def test_lifo_preemption_takes_the_newest() -> None:
    """The same with lifo: 2 gives way, 0 and 1 go on, and in that pass nobody is admitted."""
    rank = running_three(PreemptionMode.LIFO)
    result = run_pass(rank, 2.0)
    assert result.preempted == [2]
    assert result.emitted == (0, 1)
    assert result.admissions == []


def test_the_only_running_request_preempts_itself() -> None:
    """When it outgrows the pool there is no other victim; it then waits for more blocks than there are."""
    rank = rank_of(2)
    rank.submit(request(0, 8, 3))
    run_pass(rank)
    result = run_pass(rank, 2.0)
    assert result.preempted == [0]
    assert (result.emitted, result.endings) == ((), [])
    assert rank.waiting() == ["request 0 waits for 3 GPU blocks, more than the 2 there are"]
    assert not run_pass(rank, 2.0).progress


def test_a_preempted_request_finds_its_own_blocks_and_generated_ones() -> None:
    """Readmission reuses what is left in the cache, blocks of generated tokens included, up to the recompute cap."""
    rank = rank_of(3, preemption=PreemptionMode.FIFO)
    rank.submit(request(0, 3, 9))
    rank.submit(request(1, 4, 3))
    run_pass(rank)
    second = run_pass(rank, 2.0)  # 0 fills its first block with a generated token; 1 opens its second: 3 blocks
    assert second.emitted == (0, 1)
    third = run_pass(rank, 3.0)  # 0 needs a second block: it is the oldest itself
    assert third.preempted == [0]
    assert (third.emitted, third.endings) == ((1,), [Ending(1, COMPLETED)])
    assert admitted(run_pass(rank, 4.0)) == [(0, 4)]


def test_the_tail_of_a_prompt_is_evicted_first_every_time() -> None:
    """F40 on a rank: G1=3; a prompt over three blocks, one of one block, the first again: 2 blocks hit, 200 times."""
    for _ in range(200):
        rank = rank_of(3)
        rank.submit(request(0, 12, ids=(1, 2, 3)))
        run_pass(rank)
        rank.device_changes.clear()
        rank.submit(request(1, 4, ids=(9,)))
        run_pass(rank, 2.0)
        removed = rank.device_changes[0]
        assert isinstance(removed, RemovedBlocks)
        assert removed.block_hashes == request(0, 12, ids=(1, 2, 3)).chain.sequence_hashes[2:]
        rank.submit(request(2, 12, ids=(1, 2, 3)))
        assert admitted(run_pass(rank, 4.0)) == [(2, 8)]


def test_four_blocks_of_identical_tokens_take_four_blocks() -> None:
    """F18(b) on a rank: repeated text is four blocks in use and one stored run of four hashes."""
    rank = rank_of(5)
    rank.submit(request(0, 16, 2, ids=(7, 7, 7, 7)))
    run_pass(rank)
    assert rank.pool.active_blocks == 4
    (run,) = rank.device_changes
    assert isinstance(run, StoredRun)
    assert (run.parent_hash, run.start_position, len(set(run.block_hashes))) == (None, 0, 4)


def test_a_later_request_of_the_same_pass_hits_what_the_first_computes() -> None:
    """A block is visible from the scheduling decision on; an aligned prompt still recomputes its last block."""
    rank = rank_of()
    rank.submit(request(0, 8, 2, ids=(1, 2)))
    rank.submit(request(1, 9, 2, ids=(1, 2, 3)))
    rank.submit(request(2, 8, 2, ids=(1, 2)))
    assert admitted(run_pass(rank)) == [(0, 0), (1, 8), (2, 4)]


# -- the host tier


def test_a_pass_asks_for_look_ups_then_stores_then_the_boundary() -> None:
    """Look-up with the device run as base, store of the whole prompt blocks computed, boundary at the pass end."""
    rank, host = rank_of(host=HostScope.CLUSTER_SHARED), FakeHost()
    rank.submit(request(0, 9))
    run_pass(rank, 0.0, host)
    look_up, store, boundary = host.asked
    assert isinstance(look_up, LookUp)
    assert (look_up.base_blocks, look_up.latest_store, look_up.loading) == (0, None, ())
    assert isinstance(store, PrepareStore)
    assert (store.request, store.start, store.stop, store.busy_sources.tolist()) == (0, 0, 2, [])
    assert boundary == PassBoundary(0)


def test_a_rank_without_a_host_tier_asks_nothing() -> None:
    """Neither passes nor pass ends yield anything, and admissions say nothing of tiers."""
    rank = rank_of()
    rank.submit(request(0, 9))
    assert run_pass(rank).admissions == [Admission(0, 0, None, None, False)]


def test_a_refused_store_is_offered_again_and_a_known_one_is_not() -> None:
    """After RETRY the next pass offers the same blocks; after PRESENT it offers none."""
    rank, host = rank_of(host=HostScope.CLUSTER_SHARED), FakeHost(stores=[RETRY, PRESENT])
    rank.submit(request(0, 9, 4))
    offers = []
    for now_ms in (0.0, 2.0, 3.0):
        run_pass(rank, now_ms, host)
        offers.append([(m.start, m.stop) for m in host.asked if isinstance(m, PrepareStore)])
        host.asked.clear()
    assert offers == [[(0, 2)], [(0, 2)], []]


def test_each_chunk_is_a_store_of_its_own() -> None:
    """The cursor moves with PREPARED, so the second chunk offers only what it has added."""
    host = FakeHost(stores=[prepared(0, 0, 1), prepared(1, 2)])
    rank = rank_of(host=HostScope.CLUSTER_SHARED, max_batched_tokens=8)
    rank.submit(request(0, 13, 2))
    run_pass(rank, 0.0, host)
    run_pass(rank, 2.0, host)
    assert [(m.start, m.stop) for m in host.asked if isinstance(m, PrepareStore)] == [(0, 2), (2, 3)]
    assert rank.pool.copy_outs.keys() == {0, 1}


def test_a_hit_is_loaded_awaited_and_counted() -> None:
    """HIT: blocks are reserved and loaded, the request sleeps; after the completion it is admitted with its reuse."""
    host = FakeHost(look_ups=[LookUpReply(LookUpOutcome.HIT, 2, True)])
    rank = rank_of(host=HostScope.CLUSTER_SHARED)
    given = request(0, 9)
    rank.submit(given)
    empty = run_pass(rank, 0.0, host)
    assert not empty.progress
    assert host.kinds() == ["LookUp", "QueueLoad", "PassBoundary"]
    assert rank.pool.active_blocks == 2
    assert rank.waiting() == ["request 0 waits for 2 blocks from the host tier"]
    assert not rank.ready

    host.tick = TickReply((Completion(70, 0, True, 2.0),), True, ())
    host.talk(rank.tick())
    assert rank.restored == [StoredRun(None, 0, given.chain.sequence_hashes, given.chain.tokens_hashes)]
    assert rank.ready
    host.kinds()
    result = run_pass(rank, 2.0, host)
    assert host.kinds() == ["PassBoundary"]  # no second look-up, and what was restored is not stored again
    assert result.admissions == [Admission(0, 8, 0, 8, False)]
    assert (result.scheduled_tokens, result.end_ms) == (1, 4.0)


def test_a_hit_without_room_stays_in_the_queue() -> None:
    """The whole known length must fit beside what runs; otherwise nothing is loaded and the queue stops there."""
    host = FakeHost(look_ups=[MISS, LookUpReply(LookUpOutcome.HIT, 2, True)])
    rank = rank_of(4, host=HostScope.CLUSTER_SHARED)
    rank.submit(request(0, 8, 4))
    rank.submit(request(1, 9))
    assert admitted(run_pass(rank, 0.0, host)) == [(0, 0)]
    assert "QueueLoad" not in host.kinds()
    assert rank.waiting()[1] == "request 1 waits for 3 GPU blocks (0 its own; 2 of 4 GPU blocks available)"


def test_a_deferred_request_lets_others_by_and_wakes_with_any_progress() -> None:
    """DEFERRED: it sleeps in the connector queue, the next one is admitted; progress makes it look up again, first."""
    host = FakeHost(look_ups=[LookUpReply(LookUpOutcome.DEFERRED, 0, True)])
    rank = rank_of(host=HostScope.CLUSTER_SHARED)
    rank.submit(request(0, 9))
    rank.submit(request(1, 9))
    assert admitted(run_pass(rank, 0.0, host)) == [(1, 0)]
    assert rank.waiting() == ["request 0 waits for a host transfer to end"]
    assert not rank.ready
    host.talk(rank.tick())
    assert not rank.ready  # nothing has ended
    host.tick = TickReply((), True, ())
    host.talk(rank.tick())
    assert rank.ready
    rank.submit(request(2, 4))
    assert admitted(run_pass(rank, 5.0, host)) == [(0, 0), (2, 0)]


@pytest.mark.parametrize("cleared", [False, True])
def test_what_is_computed_after_a_clear_is_cached_when_the_request_begins_anew(cleared: bool) -> None:
    """Without a clear a preempted request finds a block of its own; with one none; what it redoes is cached."""
    rank = rank_of(3, preemption=PreemptionMode.FIFO)
    rank.submit(request(0, 3, 9))
    rank.submit(request(1, 4, 3))
    run_pass(rank)
    if cleared:
        assert rank.clear({Tier.DEVICE}) == (0, 1)
        assert rank.device_changes == []  # the only store had not been shown
    assert run_pass(rank, 2.0).emitted == (0, 1)  # 0 fills its first block
    assert rank.pool.resident_blocks == (0 if cleared else 2)
    assert run_pass(rank, 3.0).preempted == [0]
    rank.device_changes.clear()
    assert admitted(run_pass(rank, 4.0)) == [(0, 0 if cleared else 4)]
    assert [type(change) for change in rank.device_changes] == ([StoredRun] if cleared else [])
    assert rank.pool.resident_blocks == (1 if cleared else 2)


def test_a_clear_wakes_who_waits_for_a_store_that_will_not_land() -> None:
    """DEFERRED, then a clear: the request looks up again at once, finds nothing and computes."""
    host = FakeHost(look_ups=[LookUpReply(LookUpOutcome.DEFERRED, 0, True)])
    rank = rank_of(host=HostScope.CLUSTER_SHARED)
    rank.submit(request(0, 9))
    run_pass(rank, 0.0, host)
    assert not rank.ready
    rank.clear({Tier.HOST_PINNED})
    assert rank.ready
    assert admitted(run_pass(rank, 5.0, host)) == [(0, 0)]


def test_a_load_under_way_at_a_clear_is_its_requests_own() -> None:
    """The same prompt comes again meanwhile: it does not wait for that load, and finds nothing of it on the device."""
    host = FakeHost(look_ups=[LookUpReply(LookUpOutcome.HIT, 2, True)])
    rank = rank_of(host=HostScope.CLUSTER_SHARED)
    rank.submit(request(0, 9, ids=(1, 2, 3)))
    run_pass(rank, 0.0, host)
    rank.clear(frozenset(Tier))
    assert not rank.ready  # it waits on, for its own load
    host.asked.clear()
    rank.submit(request(1, 9, ids=(1, 2, 3)))
    assert admitted(run_pass(rank, 1.0, host)) == [(1, 0)]
    assert [message.loading for message in host.asked if isinstance(message, LookUp)] == [()]
    host.tick = TickReply((Completion(70, 0, True, 2.0),), True, ())
    host.talk(rank.tick())
    assert rank.restored == []
    host.asked.clear()
    assert admitted(run_pass(rank, 3.0, host)) == [(0, 8)]
    assert not [message for message in host.asked if isinstance(message, PrepareStore)]
    assert rank.pool.available_blocks == rank.config.gpu_blocks


def test_a_private_store_fences_whoever_takes_its_memory() -> None:
    """The copy reads two blocks until 50; a request that takes them at 10 is admitted at once and computes from 50."""
    host = FakeHost(stores=[prepared(0, 0, 1)])
    host.boundary = BoundaryReply(NOTHING, ((0, 50.0),), NOTHING)
    rank = rank_of(2, host=HostScope.DP_RANK_LOCAL)
    rank.submit(request(0, 8))
    run_pass(rank, 0.0, host)
    host.boundary = BoundaryReply(NOTHING, (), NOTHING)
    rank.submit(request(1, 8))
    result = run_pass(rank, 10.0, host)
    assert admitted(result) == [(1, 0)]
    assert (result.compute_start_ms, result.end_ms) == (50.0, 52.0)


def test_a_shared_store_holds_its_sources_until_it_is_told() -> None:
    """The same with a shared tier: no fence, the memory is simply not there until the completion is delivered."""
    host = FakeHost(stores=[prepared(0, 0, 1)])
    rank = rank_of(2, host=HostScope.CLUSTER_SHARED)
    rank.submit(request(0, 8))
    run_pass(rank, 0.0, host)
    rank.submit(request(1, 8))
    assert not run_pass(rank, 10.0, host).is_pass
    assert rank.waiting() == ["request 1 waits for 2 GPU blocks (0 its own; 0 of 2 GPU blocks available)"]
    host.tick = TickReply((Completion(0, 0, False, 50.0),), True, ())
    host.talk(rank.tick())
    result = run_pass(rank, 50.0, host)
    assert admitted(result) == [(1, 0)]
    assert (result.compute_start_ms, result.end_ms) == (50.0, 52.0)


def test_a_running_copy_is_not_a_source_for_another_one() -> None:
    """Blocks that an earlier transfer still reads are named as busy in the next offer."""
    host = FakeHost(stores=[prepared(0, 0, 1)])
    rank = rank_of(host=HostScope.CLUSTER_SHARED)
    rank.submit(request(0, 9, ids=(1, 2, 3)))
    run_pass(rank, 0.0, host)
    host.kinds()
    rank.submit(request(1, 13, ids=(1, 2, 4, 5)))
    assert admitted(run_pass(rank, 2.0, host)) == [(1, 8)]
    (offer,) = [message for message in host.asked if isinstance(message, PrepareStore)]
    assert (offer.start, offer.stop, offer.busy_sources.tolist()) == (0, 3, [0, 1])


def test_waiting_names_hand_off_states() -> None:
    """A pending destination, a reserved one and a held source each say what they wait for."""
    decode = rank_of(2, role=WorkerRole.DECODE)
    assert decode.reserve_destination(0, request(0, 8), idle=True).reports
    assert decode.reserve_destination(1, request(1, 4), idle=True).reports == ()
    assert decode.waiting() == [
        "request 0 waits for its KV, its blocks are reserved",
        "request 1 waits for a reservation of 1 GPU blocks (0 of 2 GPU blocks available)",
    ]
    prefill = rank_of(role=WorkerRole.PREFILL)
    prefill.submit(request(2, 9), handoff=5)
    run_pass(prefill)
    assert prefill.waiting() == ["request 2 holds 3 blocks for its hand-off"]
    prefill.release_source(5)
    assert prefill.waiting() == []
