"""Runs of decode passes: counted or worked out pass by pass, a rank does the same."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import attrs
from hypothesis import given
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
from g2sim.actors.host_pool.messages import Join, LookUp
from g2sim.actors.host_pool.pool import HostPool
from g2sim.actors.host_pool.transfers import FifoLanes, Link
from g2sim.actors.kv.blocks import BlockHasher
from g2sim.actors.kv.prompt import RunPrompt
from g2sim.actors.worker.rank import PassResult, Rank
from g2sim.actors.worker.sequence import RankRequest

SIZE = 4


@attrs.frozen
class Arrival:
    """A request that comes before a pass."""

    before_pass: int
    prompt_tokens: int
    output_tokens: int


def tier(capacity_blocks: int) -> HostTierConfig:
    return HostTierConfig(scope=HostScope.DP_RANK_LOCAL, capacity_blocks=capacity_blocks)


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


ARRIVALS = st.lists(st.builds(Arrival, st.integers(0, 30), st.integers(1, 14), st.integers(0, 30)), max_size=6)


def request(number: int, arrival: Arrival) -> RankRequest:
    ids = tuple(range(100, 100 + -(-arrival.prompt_tokens // SIZE)))  # prompts share what they can
    prompt = RunPrompt(ids, SIZE, arrival.prompt_tokens)
    return RankRequest(
        request=number,
        prompt=prompt,
        chain=BlockHasher(SIZE).chain(prompt),
        output_tokens=arrival.output_tokens,
        output_base=1000 * number,
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
        return [self.pool.contents(), self.pool._evictable.in_order(), list(self.pool.outbox)]


def told(rank: Rank, result: PassResult) -> dict[str, Any]:
    changes = list(rank.device_changes)
    rank.drop_changes()
    rank.pool.check()
    fields = {name: getattr(result, name) for name in PassResult.__slots__ if name != "only_tokens"}
    return fields | {
        "changes": changes,
        "room": rank.pool.available_blocks,
        "running": [s.request for s in rank.running],
    }


@given(configs(), ARRIVALS, st.lists(st.tuples(st.integers(0, 40), st.integers(0, 5)), max_size=3))
def test_a_rank_that_counts_passes_does_what_one_does_that_works_them_out(
    config: RankConfig, arrivals: list[Arrival], cancels: list[tuple[int, int]]
) -> None:
    """In every pass: results, KV changes, room, the running list, the host tier, and in the end what is waited for."""
    ranks = counting, working = (Rank(config, WorkerRole.AGGREGATED), Rank(config, WorkerRole.AGGREGATED))
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


def test_a_steady_batch_is_counted_until_its_first_request_ends() -> None:
    config = RankConfig(gpu_blocks=16, block_size_tokens=SIZE, timing=FixedTiming(prefill_ms=2.0, decode_ms=1.0))
    rank = Rank(config, WorkerRole.AGGREGATED)
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
    config = RankConfig(
        gpu_blocks=6,
        block_size_tokens=SIZE,
        timing=FixedTiming(prefill_ms=2.0, decode_ms=5.0),
        kv_bytes_per_token=250_000,
        host=tier(16),
    )
    rank = Rank(config, WorkerRole.AGGREGATED)
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
