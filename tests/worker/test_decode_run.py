"""Runs of decode passes: counted or worked out pass by pass, a rank does the same."""

from __future__ import annotations

from typing import Any

import attrs
from hypothesis import given
from hypothesis import strategies as st

from g2sim.actors.config import FixedTiming, PolynomialTiming, PreemptionMode, RankConfig, WorkerRole
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


def worked_out(rank: Rank, now_ms: float) -> PassResult:
    try:
        next(rank.run_pass(now_ms))
    except StopIteration as stop:
        result: PassResult = stop.value
        return result
    raise AssertionError("a rank without a host tier asks for something")


def told(rank: Rank, result: PassResult) -> dict[str, Any]:
    changes = list(rank.device_changes)
    rank.drop_changes()
    rank.pool.check()
    fields = {name: getattr(result, name) for name in PassResult.__slots__}
    return fields | {
        "changes": changes,
        "room": rank.pool.available_blocks,
        "running": [s.request for s in rank.running],
    }


@given(configs(), ARRIVALS, st.lists(st.tuples(st.integers(0, 40), st.integers(0, 5)), max_size=3))
def test_a_rank_that_counts_passes_does_what_one_does_that_works_them_out(
    config: RankConfig, arrivals: list[Arrival], cancels: list[tuple[int, int]]
) -> None:
    """In every pass: results, KV changes, room, the running list, and in the end what is waited for."""
    counting, working = (Rank(config, WorkerRole.AGGREGATED) for _ in range(2))
    now_ms = 0.0
    for number in range(60):
        for idx, arrival in enumerate(arrivals):
            if arrival.before_pass == number:
                counting.submit(request(idx, arrival))
                working.submit(request(idx, arrival))
        for before_pass, canceled in cancels:
            if before_pass == number and working.has(canceled):
                assert counting.cancel(canceled) == working.cancel(canceled)
        if not working.ready:
            continue
        expected = worked_out(working, now_ms)
        got = counting.decode_pass(now_ms) or worked_out(counting, now_ms)
        assert told(counting, got) == told(working, expected)
        now_ms = max(now_ms, expected.end_ms)
    assert counting.waiting() == working.waiting()


def test_a_steady_batch_is_counted_until_its_first_request_ends() -> None:
    config = RankConfig(gpu_blocks=16, block_size_tokens=SIZE, timing=FixedTiming(prefill_ms=2.0, decode_ms=1.0))
    rank = Rank(config, WorkerRole.AGGREGATED)
    for idx, outputs in enumerate((5, 9)):
        rank.submit(request(idx, Arrival(0, 6, outputs)))
    counted = []
    now_ms = 0.0
    while rank.ready:
        result = rank.decode_pass(now_ms)
        counted.append(result is not None)
        result = result or worked_out(rank, now_ms)
        now_ms = result.end_ms
    # Prompts, three tokens more for both, the end of the first; then the same for the rest of the second.
    assert counted == [False, True, True, True, False, True, True, True, False]
    assert now_ms == 2.0 + 9 * 1.0 - 1.0
