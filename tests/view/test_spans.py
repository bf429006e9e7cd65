"""Spans of random deployments against the report and the rows of the same run, which share no code with them."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from typing import Any

import pytest
from draw import draw
from harness import Outcome, run

from g2sim.actors.host_pool.events import LoadFinished, StoreLanded
from g2sim.actors.traffic.events import RequestArrived
from g2sim.actors.worker.events import PassEnded, RequestEnded
from g2sim.bus.errors import InvariantViolation
from g2sim.scenarios.spans import HANDOFF, LOAD, PHASES, STORE, Pass, SpanFold, SpanSink, Transfer
from g2sim.scenarios.state_fold import StateFold

SEEDS = range(40)


class Kept(SpanSink):
    """Everything a fold finds."""

    def __init__(self) -> None:
        self.phases: dict[int, list[tuple[str, float, float]]] = defaultdict(list)
        self.passes: list[tuple[Pass, list[int]]] = []
        self.transfers: list[Transfer] = []
        self.device: dict[str, int] = {}
        self.host: dict[str, tuple[int, int]] = {}
        self.ends: dict[int, tuple[float, str | None]] = {}

    def phase(self, request: int, name: str, rank: str | None, start_ms: float, end_ms: float) -> None:
        assert name in PHASES
        self.phases[request].append((name, start_ms, end_ms))

    def passed(self, span: Pass, first_tokens: list[int]) -> None:
        self.passes.append((span, first_tokens))

    def transferred(self, span: Transfer) -> None:
        assert span.start_ms <= span.end_ms
        self.transfers.append(span)

    def device_blocks(self, time_ms: float, rank: str, resident: int) -> None:
        self.device[rank] = resident

    def host_blocks(self, time_ms: float, pool: str, resident: int, used: int) -> None:
        self.host[pool] = resident, used

    def ended(self, time_ms: float, request: int, status: str | None) -> None:
        assert request not in self.ends
        self.ends[request] = time_ms, status


def folded(outcome: Outcome, records: int | None = None) -> Kept:
    kept = Kept()
    fold = SpanFold(kept)
    for record in outcome.records[:records]:
        fold.apply(record)
    fold.finish()
    return kept


_RUNS: dict[int, Outcome] = {}


def outcome_of(seed: int) -> Outcome:
    if seed not in _RUNS:
        _RUNS[seed] = run(draw(seed), verify=False)
    return _RUNS[seed]


@pytest.mark.parametrize("seed", SEEDS)
def test_phases_fill_the_life_of_a_request_and_split_its_ttft_as_the_report_does(seed: int) -> None:
    outcome = outcome_of(seed)
    kept = folded(outcome)
    arrivals = {r.event.request: r.event.arrival_ms for r in outcome.records if type(r.event) is RequestArrived}
    assert kept.phases.keys() == arrivals.keys() == kept.ends.keys()
    for request, phases in kept.phases.items():
        assert phases[0][1] == arrivals[request]
        assert all(before[2] == after[1] for before, after in itertools.pairwise(phases))
        assert phases[-1][2] == max(kept.ends[request][0], arrivals[request])
    for row in outcome.rows:
        assert kept.ends[row["request"]] == (row["terminal_time_ms"], row["terminal_status"])
        if row["ttft_parts_ms"] is not None:
            _compare_parts(kept.phases[row["request"]], row)


def _compare_parts(phases: list[tuple[str, float, float]], row: dict[str, Any]) -> None:
    spent: dict[str, float] = defaultdict(float)
    for name, start_ms, end_ms in phases:
        length_ms = min(end_ms, row["first_token_ms"]) - start_ms
        if length_ms > 0.0:
            spent["queue" if name == "router" else name] += length_ms
    if "preempted" in spent:
        return  # the report counts the wait where it happens, spans name it
    if "decode" not in row["ttft_parts_ms"]:
        assert spent.pop("decode", 0.0) == 0.0
    for name, expected_ms in row["ttft_parts_ms"].items():
        assert math.isclose(spent[name], expected_ms, rel_tol=1e-9, abs_tol=1e-6), (name, spent, row)


@pytest.mark.parametrize("seed", SEEDS)
def test_passes_transfers_and_levels_add_up_to_the_report(seed: int) -> None:
    outcome = outcome_of(seed)
    if outcome.report is None:
        assert outcome.error is not None
        return
    kept = folded(outcome)
    for entry in outcome.report["workers"]:
        rank = f"{entry['pool']}-{entry['worker']}/{entry['dp_rank']}"
        own = [span for span, _ in kept.passes if span.rank == rank]
        assert len(own) == entry["passes"]
        assert sum(span.ended.prefill_tokens for span in own) == entry["prefill_tokens"]
        assert all(before.end_ms <= after.start_ms for before, after in itertools.pairwise(own))
    for pool in outcome.report["g2_pools"]:
        moved = {
            kind: sum(t.amount for t in kept.transfers if (t.link, t.kind, t.done) == (pool["pool"], kind, True))
            for kind in (STORE, LOAD)
        }
        assert moved == {STORE: pool["stored_blocks"], LOAD: pool["loaded_blocks"]}
        assert kept.host.get(pool["pool"], (0, 0)) == (pool["resident_blocks"], pool["used_blocks"])
    first = {request: span.end_ms for span, requests in kept.passes for request in requests}
    assert first == {
        row["request"]: row["first_token_ms"] for row in outcome.rows if row["first_token_ms"] is not None
    } | {request: time_ms for request, time_ms in first.items() if kept.ends[request][1] is None}


@pytest.mark.parametrize("seed", SEEDS)
def test_g1_levels_are_the_sizes_of_the_sets_that_the_verifier_folds(seed: int) -> None:
    outcome = outcome_of(seed)
    half = len(outcome.records) // 2
    for records in (half, len(outcome.records)):
        state = StateFold()
        for record in outcome.records[:records]:
            state.apply(record)
        pools = {"aggregated": "agg", "prefill": "prefill", "decode": "decode"}
        expected = {f"{pools[role]}-{worker}/{rank}": len(s.device) for (role, worker, rank), s in state.ranks.items()}
        kept = folded(outcome, records)
        assert {rank: expected[rank] for rank in kept.device} == kept.device
        assert not any(size for rank, size in expected.items() if rank not in kept.device)


@pytest.mark.parametrize("seed", SEEDS[::4])
def test_a_log_may_end_after_any_record(seed: int) -> None:
    """Every request that arrived has an end, without a status if the log has none."""
    outcome = outcome_of(seed)
    for records in range(0, len(outcome.records), max(1, len(outcome.records) // 25)):
        kept = folded(outcome, records)
        seen = [record.event for record in outcome.records[:records]]
        ended = {event.request: event.status for event in seen if type(event) is RequestEnded}
        arrived = {event.request for event in seen if type(event) is RequestArrived}
        assert {request: status for request, (_, status) in kept.ends.items()} == dict.fromkeys(arrived) | ended


def test_the_seeds_cover_every_phase_and_kind_of_transfer() -> None:
    kept = [folded(outcome_of(seed)) for seed in SEEDS]
    lasting = {name for k in kept for phases in k.phases.values() for name, start, end in phases if end > start}
    # Round robin never makes a request wait in the router.
    assert lasting >= set(PHASES) - {"router", "restored_wait", "decode_queue"}
    assert {t.kind for k in kept for t in k.transfers} == {STORE, LOAD, HANDOFF}


def test_transfers_of_a_private_lane_do_not_overlap() -> None:
    """One after the other, as the tier moves them: what a link carries at a time is then right."""
    lanes = defaultdict(list)
    for seed in SEEDS:
        for t in folded(outcome_of(seed)).transfers:
            if ":" in t.link:
                lanes[seed, t.link, t.kind].append((t.start_ms, t.end_ms))
    assert sum(map(len, lanes.values())) > 100
    for spans in lanes.values():
        spans.sort()
        assert all(before[1] <= after[0] + 1e-9 for before, after in itertools.pairwise(spans))


@pytest.mark.parametrize("kind", [RequestEnded, PassEnded, LoadFinished, StoreLanded])
def test_an_end_of_what_never_began_is_refused_by_name(kind: type[Any]) -> None:
    record = next(record for seed in SEEDS for record in outcome_of(seed).records if type(record.event) is kind)
    with pytest.raises(InvariantViolation, match=f"{kind.__name__} at .* ms: nothing before it speaks of"):
        SpanFold(Kept()).apply(record)
