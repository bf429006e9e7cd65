"""Runs of decode passes: counted or worked out pass by pass, a rank does the same."""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from g2sim.actors.config import (
    FixedTiming,
    HostScope,
    HostTierConfig,
    PolynomialTiming,
    PreemptionMode,
    RankConfig,
    WorkerRole,
)
from g2sim.actors.host_pool.messages import Join, LookUp, NewsAt
from g2sim.actors.host_pool.pool import HostPool
from g2sim.actors.host_pool.transfers import FifoLanes, Link
from g2sim.actors.kv.blocks import BlockHasher
from g2sim.actors.kv.prompt import ArrayPrompt
from g2sim.actors.worker.rank import PassResult, Rank
from g2sim.actors.worker.sequence import RankRequest

SIZE = 4


@attrs.frozen
class Arrival:
    """A request that comes before a pass: the beginning of a text, carried on as the text goes, or else."""

    before_pass: int
    prompt_tokens: int
    output_tokens: int
    text: int = 0
    goes_on: bool = False


def tier(capacity_blocks: int) -> HostTierConfig:
    return HostTierConfig(scope=HostScope.DP_RANK_LOCAL, capacity_blocks=capacity_blocks)


def fixed(gpu_blocks: int, decode_ms: float, host: HostTierConfig | None = None) -> RankConfig:
    """Passes of a known length: prompts take 2 ms."""
    return RankConfig(
        gpu_blocks=gpu_blocks,
        block_size_tokens=SIZE,
        timing=FixedTiming(prefill_ms=2.0, decode_ms=decode_ms),
        kv_bytes_per_token=250_000,
        host=host,
    )


@st.composite
def configs(draw: st.DrawFn) -> RankConfig:
    return RankConfig(
        gpu_blocks=draw(st.integers(4, 24)),
        block_size_tokens=SIZE,
        timing=draw(st.sampled_from([FixedTiming(prefill_ms=2.0, decode_ms=0.7), PolynomialTiming()])),
        max_seqs=draw(st.sampled_from([1, 2, 4, None])),
        max_batched_tokens=draw(st.sampled_from([2, 5, 64, None])),
        max_model_len_tokens=draw(st.sampled_from([None, 20])),
        prefix_caching=draw(st.booleans()),
        preemption=draw(st.sampled_from(list(PreemptionMode))),
        kv_bytes_per_token=250_000,
        host=draw(st.none() | st.integers(1, 12).map(tier)),
    )


ARRIVALS = st.lists(
    st.builds(Arrival, st.integers(0, 30), st.integers(1, 40), st.integers(0, 30), st.integers(0, 2), st.booleans()),
    max_size=7,
)


def request(number: int, arrival: Arrival) -> RankRequest:
    end = arrival.prompt_tokens + arrival.output_tokens
    text = np.arange(100 * arrival.text, 100 * arrival.text + end, dtype=np.uint32)
    prompt = ArrayPrompt(text[: arrival.prompt_tokens])
    return RankRequest(
        request=number,
        prompt=prompt,
        chain=BlockHasher(SIZE).chain(prompt),
        output_tokens=arrival.output_tokens,
        output_base=1000 * number,
        output_ids=text[arrival.prompt_tokens :] if arrival.goes_on else None,
    )


class Host:
    """A private tier of one rank, or none."""

    def __init__(self, rank: Rank) -> None:
        self.pool: HostPool | None = None
        self.asked: list[Any] = []
        host = rank.config.host
        if host is not None:
            self.pool = HostPool("g2", host.capacity_blocks, 1_000_000, FifoLanes(), shared=False)
            link = Link(d2h_bytes_per_ms=1e6, h2d_bytes_per_ms=5e5, latency_ms=0.1)
            self.pool.join(Join(client=0, worker=0, role="aggregated", dp_rank=0, link=link, actor="worker-0"))

    def ask(self, message: Any) -> Any:
        assert self.pool is not None
        self.asked.append(message)
        return self.pool.serve(message, self.now_ms)

    def run_pass(self, rank: Rank, now_ms: float, *, counts: bool) -> PassResult:
        """One pass; its end has to follow."""
        self.now_ms = now_ms
        return (rank.decode_pass(now_ms, self.ask) if counts else None) or self.talk(rank.run_pass(now_ms))

    def end_pass(self, rank: Rank, now_ms: float) -> None:
        self.now_ms = now_ms
        if self.pool is not None:
            rank.end_pass(self.ask(rank.boundary))

    def next_event_ms(self) -> float | None:
        return None if self.pool is None else self.pool.next_event_ms()

    def tick(self, rank: Rank, now_ms: float) -> None:
        self.now_ms = now_ms
        self.talk(rank.tick())

    def talk(self, steps: Generator[Any, Any, Any]) -> Any:
        reply: Any = None
        try:
            while True:
                reply = self.ask(steps.send(reply))
        except StopIteration as stop:
            return stop.value

    def told(self) -> list[Any]:
        """Its blocks, those to be evicted first in front, and what has happened in it."""
        if self.pool is None:
            return []
        self.pool.check()
        return [self.pool.contents(), self.pool.eviction_order(), list(self.pool.outbox)]


def seen(rank: Rank) -> list[Any]:
    """KV changes since the last look, room, and who runs."""
    changes = list(rank.device_changes)
    rank.drop_changes()
    rank.pool.check()
    return [changes, rank.pool.available_blocks, [s.request for s in rank.running]]


def told(rank: Rank, result: PassResult) -> list[Any]:
    return [{name: getattr(result, name) for name in PassResult.__slots__ if name != "only_tokens"}, seen(rank)]


class WorkingRank(Rank):
    """Works every pass out, one sequence after the other."""

    def _new_run(self) -> None:
        return None


CANCELS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 5)), max_size=3)


@given(configs(), ARRIVALS, CANCELS)
def test_a_rank_that_counts_passes_does_what_one_does_that_works_them_out(
    config: RankConfig, arrivals: list[Arrival], cancels: list[tuple[int, int]]
) -> None:
    """In every pass: results, KV changes, room, the running list, the host tier, and in the end what is waited for."""
    ranks = counting, working = (Rank(config, WorkerRole.AGGREGATED), WorkingRank(config, WorkerRole.AGGREGATED))
    hosts = (Host(counting), Host(working))
    now_ms = 0.0
    for number in range(60):
        for idx, arrival in enumerate(arrivals):
            if arrival.before_pass == number:
                for rank in ranks:
                    rank.submit(request(idx, arrival))
        for before_pass, canceled in cancels:
            if before_pass == number and working.has(canceled):
                assert counting.cancel(canceled) == working.cancel(canceled)
        if not working.ready:
            next_ms = hosts[1].next_event_ms()
            if next_ms is not None:
                now_ms = max(now_ms, next_ms)
                for rank, host in zip(ranks, hosts, strict=True):
                    host.tick(rank, now_ms)
            continue
        got, expected = (
            host.run_pass(rank, now_ms, counts=rank is counting) for rank, host in zip(ranks, hosts, strict=True)
        )
        assert told(counting, got) == told(working, expected)
        now_ms = max(now_ms, expected.end_ms)
        for rank, host in zip(ranks, hosts, strict=True):
            host.end_pass(rank, now_ms)
        assert hosts[0].told() == hosts[1].told()
        assert counting.ready == working.ready
    assert counting.waiting() == working.waiting()


class Planner:
    """A rank whose passes are planned, and taken without asking its host tier, as far as they come to nothing there."""

    def __init__(self, config: RankConfig) -> None:
        self.rank = Rank(config, WorkerRole.AGGREGATED)
        self.host = Host(self.rank)
        self.planned_ms: list[float] = []
        self.taken = 0

    def run_pass(self, now_ms: float) -> tuple[float, PassResult | None]:
        """The end of the next pass, and its result unless it was planned."""
        if self.planned_ms:
            self.rank.take_decode_passes(1)
            self.taken += 1
            return self.planned_ms.pop(0), None
        result = self.host.run_pass(self.rank, now_ms, counts=True)
        if result.only_tokens:
            news_at_ms = math.inf
            if self.host.pool is not None:
                news_at_ms = self.host.pool.news_at_ms(NewsAt(0, self.rank.blocked_look_up))
            if result.end_ms < news_at_ms:
                planned_ms = self.rank.plan_decode_passes(result.end_ms, 8)
                self.planned_ms = [end_ms for end_ms in planned_ms if end_ms < news_at_ms]
        return result.end_ms, result

    def end_pass(self, now_ms: float) -> None:
        if not self.planned_ms:
            self.host.end_pass(self.rank, now_ms)


def run_planned(config: RankConfig, arrivals: list[Arrival], cancels: list[tuple[int, int]]) -> int:
    """Compare a rank that plans with one that works every pass out. Returns how many planned passes it has taken."""
    working = WorkingRank(config, WorkerRole.AGGREGATED)
    host, planner = Host(working), Planner(config)
    now_ms = 0.0
    for number in range(60):
        comes = [idx for idx, arrival in enumerate(arrivals) if arrival.before_pass == number]
        goes = [canceled for before_pass, canceled in cancels if before_pass == number]
        if comes or goes:
            planner.planned_ms.clear()
        for idx in comes:
            for rank in (working, planner.rank):
                rank.submit(request(idx, arrivals[idx]))
        for canceled in goes:
            if working.has(canceled):
                assert planner.rank.cancel(canceled) == working.cancel(canceled)
        if not working.ready:
            next_ms = host.next_event_ms()
            if next_ms is not None:
                now_ms = max(now_ms, next_ms)
                host.tick(working, now_ms)
                planner.host.tick(planner.rank, now_ms)
            continue
        expected = host.run_pass(working, now_ms, counts=False)
        end_ms, got = planner.run_pass(now_ms)
        assert end_ms == expected.end_ms
        if got is None:
            assert list(expected.emitted) == [seq.request for seq in planner.rank.running]
            assert [*expected.admissions, *expected.endings, *expected.preempted] == []
            assert seen(planner.rank) == seen(working)
        else:
            assert told(planner.rank, got) == told(working, expected)
        now_ms = max(now_ms, end_ms)
        host.end_pass(working, now_ms)
        planner.end_pass(now_ms)
        assert planner.host.told() == host.told()
        assert planner.rank.ready == working.ready
    assert planner.rank.waiting() == working.waiting()
    return planner.taken


@settings(deadline=None, max_examples=300)
@given(configs(), ARRIVALS, CANCELS)
def test_planned_passes_are_those_that_come(
    config: RankConfig, arrivals: list[Arrival], cancels: list[tuple[int, int]]
) -> None:
    run_planned(config, arrivals, cancels)


BIG_TIER = tier(40)
BLOCKED = [Arrival(0, 14, 20), Arrival(0, 6, 20), Arrival(2, 26, 2)]
"""The last one has no room as long as the others run."""


@pytest.mark.parametrize("host", [None, BIG_TIER])
def test_passes_are_planned_while_who_waits_is_blocked(host: HostTierConfig | None) -> None:
    assert run_planned(fixed(14, 5.0, host), BLOCKED, []) > 10


def test_no_pass_is_planned_that_may_wait_for_a_copy_out() -> None:
    """The first request's blocks are still being stored when the second needs the memory of one of them."""
    assert run_planned(fixed(7, 0.5, BIG_TIER), [Arrival(0, 20, 1), Arrival(0, 7, 20, text=1)], []) > 0


def test_passes_are_planned_up_to_an_eviction_of_what_the_first_in_the_queue_would_use() -> None:
    """Ten blocks: four of a prompt that is carried on, three of the one that runs, and three free ones."""
    rank = Rank(fixed(10, 1.0), WorkerRole.AGGREGATED)
    host = Host(rank)
    rank.submit(request(0, Arrival(0, 16, 1)))
    host.run_pass(rank, 0.0, counts=True)
    rank.submit(request(1, Arrival(0, 12, 28, text=1)))
    host.run_pass(rank, 2.0, counts=True)
    rank.submit(request(2, Arrival(0, 36, 1)))
    for now_ms in (4.0, 5.0):
        result = host.run_pass(rank, now_ms, counts=True)
    assert result.only_tokens
    # The free blocks have room for 12 tokens, and this pass has taken the second.
    assert len(rank.plan_decode_passes(result.end_ms, 64)) == 4 * 3 - 2


def test_a_steady_batch_is_counted_until_its_first_request_ends() -> None:
    rank = Rank(fixed(16, 1.0), WorkerRole.AGGREGATED)
    host = Host(rank)
    for idx, outputs in enumerate((5, 9)):
        rank.submit(request(idx, Arrival(0, 6, outputs)))
    counted = []
    now_ms = 0.0
    while rank.ready:
        result = host.run_pass(rank, now_ms, counts=True)
        counted.append(result.only_tokens)
        now_ms = result.end_ms
    # Prompts, three tokens more for both, the end of the first; then the same for the rest of the second.
    assert counted == [False, True, True, True, False, True, True, True, False]
    assert now_ms == 2.0 + 9 * 1.0 - 1.0


def test_who_has_no_room_is_not_looked_up_from_the_start_in_each_pass() -> None:
    """Its prompt is in the host tier; while the one before it decodes, a pass asks whether that is still so."""
    rank = Rank(fixed(6, 5.0, tier(16)), WorkerRole.AGGREGATED)
    host = Host(rank)
    rank.submit(request(0, Arrival(0, 13, 9)))
    rank.submit(request(1, Arrival(0, 24, 1)))
    now_ms = 0.0
    while rank.ready:
        result = host.run_pass(rank, now_ms, counts=True)
        now_ms = max(now_ms, result.end_ms)
        host.end_pass(rank, now_ms)
    look_ups = [message for message in host.asked if type(message) is LookUp]
    # From the start: when it comes, once the store of the first prompt has landed, and when there is room.
    assert [message.again is not None for message in look_ups[:-2]] == [False, False, True, False, *[True] * 5]
    assert [message.again for message in look_ups[-2:]] == [None, None]
