"""Routers in whole runs: faults first, then what they know and when, the queue, and the record of each decision."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
from router_values import BLOCK, at, chain_of, row, run_values, separate

from g2sim.actors.kv.events import BlocksRemoved, BlocksStored, Tier
from g2sim.actors.router import registry
from g2sim.actors.router.events import PlacementWeighed, RequestPlaced, RequestRefused, RequestWaits
from g2sim.actors.router.policy import Place, Policy, Queue, Refuse, Release, RoutedRequest, Verdict
from g2sim.actors.traffic.events import RequestArrived
from g2sim.actors.worker.events import PassEnded, PassGave, RequestEnded
from g2sim.bus.drivers import InlineDriver, TrioDriver
from g2sim.bus.errors import Deadlock, PolicyError
from g2sim.bus.events import Record
from g2sim.bus.kernel import Kernel
from g2sim.scenarios.deployment import build_cluster
from g2sim.scenarios.run import LOG_NAME, report_of_log, run_scenario
from g2sim.scenarios.schema import Scenario
from g2sim.scenarios.traffic_source import open_traffic


@attrs.frozen
class Outcome:
    records: list[Record]
    rows: list[dict[str, Any]]

    def of(self, *kinds: type[Any]) -> list[Record]:
        return [record for record in self.records if isinstance(record.event, kinds)]

    def places(self, pool: str = "agg") -> list[tuple[int, int]]:
        events = [record.event for record in self.of(RequestPlaced) if record.event.pool == pool]
        return [(event.worker, event.dp_rank) for event in sorted(events, key=lambda event: event.request)]


def scenario(tmp_path: Path, trace: Sequence[dict[str, Any]], values: dict[str, Any]) -> Scenario:
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(one) + "\n" for one in trace))
    return Scenario.from_dict(values, base_dir=tmp_path)


def simulate(
    tmp_path: Path,
    trace: Sequence[dict[str, Any]],
    *,
    driver: Any = InlineDriver,
    pools: bool = False,
    change: dict[str, Any] | None = None,
    seed: int = 0,
    out: Path | None = None,
    **router: Any,
) -> Outcome:
    """Run a trace on two workers (or two of each role), checking live state against the log at every pass end."""
    values = run_values("trace.jsonl", **router)
    if pools:
        values = separate(values)
    for path, value in (change or {}).items():
        inner = values["engine"]["workers"]
        *outer, last = path.split(".")
        for key in outer:
            inner = inner.setdefault(key, {})
        inner[last] = value
    records: list[Record] = []
    rows: list[dict[str, Any]] = []
    made = attrs.evolve(scenario(tmp_path, trace, values), seed=seed)
    run_scenario(made, out, verify=True, driver=driver, on_record=records.append, on_row=rows.append)
    return Outcome(records, rows)


def use(monkeypatch: pytest.MonkeyPatch, policy: type[Policy]) -> str:
    """Makes a policy known by its name."""
    monkeypatch.setitem(registry.POLICIES, policy.name, policy)
    return policy.name


SOME = [row(0, [1, 2, 3, 4]), row(1, [11, 12, 13, 14]), row(100, [1, 2, 3, 4, 5]), row(100.5, [11, 12, 13, 14, 20])]


class TestFaultyPolicies:
    def test_the_run_ends_with_a_policy_error_and_its_log_says_why(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Astray(Policy):
            name = "astray"

            def place(self, request: RoutedRequest, now_ms: float) -> Verdict:
                return Place(at(request.request))

        with pytest.raises(PolicyError) as caught:
            simulate(tmp_path, SOME, out=tmp_path / "out", policy=use(monkeypatch, Astray))
        assert str(caught.value).startswith("policy astray, request 2 at 100.0 ms: place chose Placement(worker=2")
        assert caught.value.exit_code == 1
        told = report_of_log(tmp_path / "out")
        assert told.failure == str(caught.value)

    @pytest.mark.parametrize("pools", [False, True])
    def test_a_request_that_is_never_released_is_a_deadlock_that_names_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pools: bool
    ) -> None:
        class Keeper(Policy):
            name = "keeper"

            def place(self, request: RoutedRequest, now_ms: float) -> Verdict:
                return Queue() if request.request else Place(at(0))

        with pytest.raises(Deadlock) as caught:
            simulate(tmp_path, SOME[:2], pools=pools, policy=use(monkeypatch, Keeper))
        router = "router-prefill" if pools else "router-agg"
        assert f"{router}: request 1 waits for policy keeper" in caught.value.waiting

    @pytest.mark.parametrize("pools", [False, True])
    def test_a_release_with_a_faulty_verdict_names_the_hook(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pools: bool
    ) -> None:
        class Twice(Policy):
            name = "twice"

            def place(self, request: RoutedRequest, now_ms: float) -> Verdict:
                return Queue() if request.request == 1 else Place(at(0))

            def prefill_completed(self, request: int, now_ms: float) -> Iterable[Release]:
                return [Release(1, Place(at(0)))] * 2

        with pytest.raises(PolicyError, match="prefill_completed released request 1, which is placed already"):
            simulate(tmp_path, SOME, pools=pools, policy=use(monkeypatch, Twice))


class TestRefusals:
    @pytest.mark.parametrize(("pools", "role"), [(False, "aggregated"), (True, "prefill"), (True, "decode")])
    def test_a_refused_request_ends_as_rejected_and_the_rest_goes_on(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pools: bool, role: str
    ) -> None:
        class Picky(Policy):
            name = "picky"

            def place(self, request: RoutedRequest, now_ms: float) -> Verdict:
                if request.request == 1 and self.pool.role.value == role:
                    return Refuse("not today")
                return super().place(request, now_ms)

            def score(self, request: RoutedRequest, candidate: Any) -> float:
                return candidate.active_requests

        outcome = simulate(tmp_path, SOME, pools=pools, policy=use(monkeypatch, Picky))
        (refused,) = outcome.of(RequestRefused)
        assert (refused.event.request, refused.event.reason) == (1, "not today")
        ends = {record.event.request: record.event for record in outcome.of(RequestEnded)}
        assert (ends[1].status, ends[1].worker, ends[1].role) == ("rejected", None, role)
        assert {request: end.status for request, end in ends.items() if request != 1} == dict.fromkeys(
            (0, 2, 3), "completed"
        )
        statuses = sorted(one["terminal_status"] for one in outcome.rows)
        assert statuses == ["completed"] * 3 + ["rejected"]

    @pytest.mark.parametrize("pools", [False, True])
    def test_a_waiting_request_can_be_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pools: bool
    ) -> None:
        class Late(Policy):
            name = "late"

            def place(self, request: RoutedRequest, now_ms: float) -> Verdict:
                return Queue() if request.request == 1 and self.pool.role.value != "decode" else Place(at(0))

            def request_terminal(self, request: int, now_ms: float) -> Iterable[Release]:
                goes = request == 0 and self.pool.role.value != "decode"
                return [Release(1, Refuse("too late"))] if goes else []

        outcome = simulate(tmp_path, SOME, pools=pools, policy=use(monkeypatch, Late))
        assert [record.event.request for record in outcome.of(RequestWaits)] == [1]
        assert [one["terminal_status"] for one in outcome.rows if one["request"] == 1] == ["rejected"]


HOST = {
    "aggregated.kv_cache.capacity.blocks": 40,
    "aggregated.kv_cache.bytes_per_token": 250_000,
    "aggregated.scheduler.max_batched_tokens": 4096,
    "aggregated.kv_cache.host_offload": {
        "scope": "dp_rank_local",
        "num_host_blocks": 200,
        "d2h_bandwidth_gbps": 100.0,
        "h2d_bandwidth_gbps": 100.0,
    },
}
MOVED_OUT = [
    row(0, range(61, 65), out=2),
    row(1, [1, 2, *range(200, 218)], out=60),
    row(20, range(1, 5), out=2),
    row(40, range(300, 339), out=2),
    row(150, range(1, 5), out=2),
]
"""After this one worker has blocks 1..4 in host memory only, and the other 1..2 on the device."""


SHARED = HOST | {
    "aggregated.kv_cache.host_offload": HOST["aggregated.kv_cache.host_offload"]
    | {"scope": "cluster_shared", "kv_layout_id": "one"}
}
IN_THE_POOL = [
    row(0, range(1, 5), out=2),
    row(30, range(300, 339), out=2),
    row(60, range(400, 439), out=2),
    row(100, [1, 2, 90], out=2),
    row(130, [91], out=100),
    row(140, range(1, 5), out=2),
]
"""After this blocks 1..4 are in the shared pool, 1..2 also on the device of worker 0, which has a request to serve."""


class TestKnowledge:
    def test_a_request_goes_to_the_host_blocks_and_elsewhere_when_the_router_does_not_hear_of_that_tier(
        self, tmp_path: Path
    ) -> None:
        heard = simulate(tmp_path, MOVED_OUT, change=HOST, policy="dynamo_kv")
        last = heard.of(PlacementWeighed)[-1].event
        assert last.host_blocks[last.chosen] == 4
        assert last.device_blocks[last.chosen] == 0
        deaf = self.without_host_events(tmp_path, MOVED_OUT, HOST)
        assert [one for one in deaf if one[0] == 4] != [one for one in enumerate(heard.places()) if one[0] == 4]
        assert dict(deaf)[4] != heard.places()[4]
        assert [place for request, place in deaf if request < 4] == heard.places()[:4]

    def test_blocks_in_a_shared_pool_are_known_of_every_worker_and_send_a_request_to_the_idle_one(
        self, tmp_path: Path
    ) -> None:
        """Device blocks alone speak for worker 0; that worker 1 can restore all four from the pool outweighs them."""
        heard = simulate(tmp_path, IN_THE_POOL, change=SHARED, policy="dynamo_kv")
        last = heard.of(PlacementWeighed)[-1].event
        assert (last.device_blocks, last.host_blocks) == ((2, 0), (2, 4))
        assert heard.places()[5] == (1, 0)
        (row_of_last,) = [one for one in heard.rows if one["request"] == 5]
        assert row_of_last["first_admission_host_reused_input_tokens"] == 3 * BLOCK
        deaf = self.without_host_events(tmp_path, IN_THE_POOL, SHARED)
        assert deaf[:5] == list(enumerate(heard.places()[:5]))
        assert deaf[5] == (5, (0, 0))

    def without_host_events(
        self, tmp_path: Path, trace: list[dict[str, Any]], change: dict[str, Any]
    ) -> list[tuple[int, tuple[int, int]]]:
        values = run_values("trace.jsonl", policy="dynamo_kv")
        for path, value in change.items():
            inner = values["engine"]["workers"]
            *outer, last = path.split(".")
            for key in outer:
                inner = inner.setdefault(key, {})
            inner[last] = value
        made = scenario(tmp_path, trace, values)
        cluster = build_cluster(made.deployment, open_traffic(made).driver, seed=0)
        router: Any = cluster.kernel.slot("router-agg").actor
        router._kv = DeviceOnly(router._kv)
        placed: list[tuple[int, tuple[int, int]]] = []

        def note(record: Record) -> None:
            if isinstance(record.event, RequestPlaced):
                placed.append((record.event.request, (record.event.worker, record.event.dp_rank)))

        cluster.kernel.add_sink(note)
        InlineDriver(cluster.kernel).run()
        return placed

    @pytest.mark.parametrize(("lag_ms", "overlap"), [(0.0, 4), (10.0, 4), (10.5, 0)])
    def test_kv_events_lag_and_load_does_not(self, tmp_path: Path, lag_ms: float, overlap: int) -> None:
        """Blocks of the first prompt are stored at 10; the second request is placed at 20, when the first has ended."""
        outcome = simulate(
            tmp_path, [row(0, [1, 2, 3, 4]), row(20, [1, 2, 3, 4, 5])], policy="dynamo_kv", kv_event_lag_ms=lag_ms
        )
        second = outcome.of(PlacementWeighed)[1].event
        assert max(second.device_blocks) == overlap
        assert (second.prefill_tokens, second.active_requests) == ((0, 0), (0, 0))

    def test_a_placement_counts_at_once(self, tmp_path: Path) -> None:
        outcome = simulate(tmp_path, [row(0, [k]) for k in range(4)], policy="least_loaded")
        assert outcome.places() == [(0, 0), (1, 0), (0, 0), (1, 0)]

    def test_an_index_is_kept_only_for_policies_that_look(self, tmp_path: Path) -> None:
        for policy, subscribes in (("round_robin", False), ("least_loaded", False), ("dynamo_kv", True)):
            made = scenario(tmp_path, SOME, run_values("trace.jsonl", policy=policy))
            kernel: Kernel = build_cluster(made.deployment, open_traffic(made).driver, seed=0).kernel
            assert bool(kernel._subscriptions.get(BlocksStored)) is subscribes
            assert bool(kernel._subscriptions.get(PassGave)) is (policy != "round_robin")

    def test_prefill_and_decode_are_placed_by_routers_of_their_own(self, tmp_path: Path) -> None:
        outcome = simulate(tmp_path, SOME, pools=True, policy="dynamo_kv")
        sources = {(record.source, record.event.pool) for record in outcome.of(RequestPlaced)}
        assert sources == {("router-prefill", "prefill"), ("router-decode", "decode")}
        assert len(outcome.of(RequestPlaced)) == 8
        weighed = [record.event for record in outcome.of(PlacementWeighed)]
        assert any(max(event.device_blocks) for event in weighed if event.pool == "prefill")
        assert not any(max(event.device_blocks) for event in weighed if event.pool == "decode")

    def test_a_rejected_and_a_failed_request_leave_no_load_behind(self, tmp_path: Path) -> None:
        big = {"prefill.kv_cache.capacity.blocks": 8, "decode.kv_cache.capacity.blocks": 6}
        trace = [row(0, range(9)), row(1, range(20, 27)), row(2, range(40, 43)), row(200, range(60, 63))]
        outcome = simulate(tmp_path, trace, pools=True, change=big, policy="dynamo_kv")
        assert [one["terminal_status"] for one in sorted(outcome.rows, key=lambda one: one["request"])] == [
            "rejected",
            "failed",
            "completed",
            "completed",
        ]
        for record in outcome.of(PlacementWeighed):
            if record.event.request == 3:
                assert record.event.active_requests == (0, 0)
                assert record.event.prefill_tokens == (0, 0)


class DeviceOnly:
    """A subscription that loses the events of host memory."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def drain(self) -> list[Record]:
        return [record for record in self._inner.drain() if record.event.tier == Tier.DEVICE]


QUEUED = {"policy": "dynamo_kv", "options": {"router_queue_threshold": 0.5}}


class TestQueue:
    def test_a_request_waits_in_the_record_until_it_is_placed(self, tmp_path: Path) -> None:
        trace = [row(0, range(12)), row(1, range(20, 32)), row(2, range(40, 44))]
        outcome = simulate(tmp_path, trace, change={"aggregated.parallelism.replicas": 1}, **QUEUED)
        waits = [(record.time_ms, record.event.request) for record in outcome.of(RequestWaits)]
        assert waits == [(1.0, 1), (2.0, 2)]
        placed = [
            (record.time_ms, record.event.request, record.event.outcome, record.event.queued_at_ms)
            for record in outcome.of(RequestPlaced)
        ]
        assert placed[0] == (0.0, 0, "immediate", None)
        assert placed[1] == (10.0, 1, "queued", 1.0)
        hop = next(one["routing_history"][0] for one in outcome.rows if one["request"] == 1)
        assert (hop["queue_entered_at_ms"], hop["released_at_ms"], hop["queue_wait_ms"]) == (1.0, 10.0, 9.0)

    def test_a_released_request_joins_the_pass_of_that_instant(self, tmp_path: Path) -> None:
        trace = [row(0, range(12)), row(1, range(20, 24))]
        outcome = simulate(tmp_path, trace, change={"aggregated.parallelism.replicas": 1}, **QUEUED)
        assert [one["first_admit_ms"] for one in sorted(outcome.rows, key=lambda one: one["request"])] == [0.0, 10.0]

    def test_the_prefill_queue_lets_the_handoff_go_on_when_it_releases(self, tmp_path: Path) -> None:
        trace = [row(0, range(12)), row(1, range(20, 32)), row(2, range(40, 44)), row(3, range(60, 70))]
        outcome = simulate(tmp_path, trace, pools=True, change={"prefill.parallelism.replicas": 1}, **QUEUED)
        waited = [record.event for record in outcome.of(RequestPlaced) if record.event.outcome == "queued"]
        assert {event.pool for event in waited} == {"prefill"}
        assert len(waited) == 3
        assert all(one["terminal_status"] == "completed" for one in outcome.rows)

    def test_a_decode_queue_holds_the_source_until_it_releases(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class OneByOne(Policy):
            name = "one_by_one"

            def start(self, pool: Any) -> None:
                super().start(pool)
                self.queue: list[int] = []

            def place(self, request: RoutedRequest, now_ms: float) -> Verdict:
                if self.pool.role.value == "decode" and self.pool.loads.requests[0]:
                    self.queue.append(request.request)
                    return Queue()
                return Place(at(0))

            def request_terminal(self, request: int, now_ms: float) -> Iterable[Release]:
                if self.queue:
                    yield Release(self.queue.pop(0), Place(at(0)))

            def pending(self) -> list[int]:
                return self.queue

        trace = [row(0, [1, 2], out=40), row(1, [11, 12])]
        outcome = simulate(tmp_path, trace, pools=True, policy=use(monkeypatch, OneByOne))
        first, second = sorted(outcome.rows, key=lambda one: one["request"])
        assert second["source_held_ms"] < second["destination_reserved_ms"] == first["terminal_time_ms"]
        assert second["terminal_status"] == "completed"


class TestRecord:
    @pytest.mark.parametrize("pools", [False, True])
    def test_every_decision_has_one_joinable_account_and_the_log_tells_it_all(
        self, tmp_path: Path, pools: bool
    ) -> None:
        """Recomputed from other records alone: loads of each candidate, the cost's parts, the tie, the choice."""
        trace = [row(k * 3.5, [k % 3, 10 + k % 5, 20 + k], out=1 + k % 7) for k in range(24)]
        outcome = simulate(tmp_path, trace, pools=pools, policy="dynamo_kv")
        accounts = {(one.event.request, one.event.pool): one for one in outcome.of(PlacementWeighed)}
        placements = outcome.of(RequestPlaced)
        assert len(accounts) == len(placements) == len(trace) * (2 if pools else 1)
        for placed in placements:
            account = accounts[placed.event.request, placed.event.pool]
            assert (account.time_ms, account.cause, account.source) == (placed.time_ms, placed.cause, placed.source)
            event = account.event
            assert (event.workers[event.chosen], event.dp_ranks[event.chosen]) == (
                placed.event.worker,
                placed.event.dp_rank,
            )
            parts = dict(zip(event.part_names, event.parts, strict=True))
            for k, cost in enumerate(event.costs):
                assert cost == parts["prefill"][k] + parts["decode"][k] + parts["requests"][k]
            assert event.tied == event.costs.count(min(event.costs))
            assert event.chosen == event.costs.index(min(event.costs))
        if not pools:
            self.audit_loads(outcome)

    def audit_loads(self, outcome: Outcome) -> None:
        tokens = {record.event.request: record.event.input_tokens for record in outcome.of(RequestArrived)}
        where: dict[int, int] = {}
        pending: dict[int, int] = {}
        for record in outcome.records:
            event = record.event
            if isinstance(event, PlacementWeighed):
                for worker in range(2):
                    mine = [request for request, own in where.items() if own == worker]
                    assert event.active_requests[worker] == len(mine)
                    assert event.prefill_tokens[worker] == sum(pending.get(request, 0) for request in mine)
                chosen = event.chosen
                where[event.request] = event.workers[chosen]
                pending[event.request] = tokens[event.request] - BLOCK * event.device_blocks[chosen]
            elif isinstance(event, PassEnded):
                for request in event.emitted:
                    pending.pop(request, None)
            elif isinstance(event, RequestEnded):
                where.pop(event.request)
                pending.pop(event.request, None)

    def test_overlaps_are_what_events_had_told(self, tmp_path: Path) -> None:
        """Folding the KV events before a decision into plain sets of hashes gives its overlaps, on a tight device."""
        trace = [row(k * 17.25, [k // 2 % 3, 10 + k // 2 % 2, 20 + k], out=2) for k in range(24)]
        change = {"aggregated.kv_cache.capacity.blocks": 6}
        outcome = simulate(tmp_path, trace, policy="dynamo_kv", change=change)
        assert outcome.of(BlocksRemoved)
        interned: dict[int, int] = {}
        for one in trace:
            for block in one["hash_ids"]:
                interned.setdefault(block, len(interned))
        held: list[set[int]] = [set(), set()]
        for record in outcome.records:
            event = record.event
            if isinstance(event, BlocksStored):
                held[event.worker].update(event.block_hashes)
            elif isinstance(event, BlocksRemoved):
                held[event.worker].difference_update(event.block_hashes)
            elif isinstance(event, PlacementWeighed):
                hashes = chain_of([interned[block] for block in trace[event.request]["hash_ids"]]).sequence_hashes
                expected = [
                    next((k for k, block_hash in enumerate(hashes) if block_hash not in held[worker]), len(hashes))
                    for worker in range(2)
                ]
                assert list(event.device_blocks) == expected
        assert any(max(record.event.device_blocks) for record in outcome.of(PlacementWeighed))

    @pytest.mark.parametrize("pools", [False, True])
    def test_both_drivers_and_two_runs_give_the_same_log(self, tmp_path: Path, pools: bool) -> None:
        trace = [row(k * 2.5, [k % 3, 10 + k % 5, 20 + k], out=1 + k % 4) for k in range(16)]
        options = {"router_queue_threshold": 0.2, "router_queue_policy": "wspt"}
        digests = set()
        for number, driver in enumerate((InlineDriver, TrioDriver, TrioDriver)):
            out = tmp_path / f"out{number}"
            simulate(
                tmp_path,
                trace,
                driver=driver,
                pools=pools,
                out=out,
                policy="dynamo_kv",
                tie_break="random",
                options=options,
            )
            digests.add(_log_bytes(out))
        assert len(digests) == 1

    def test_another_seed_breaks_ties_otherwise(self, tmp_path: Path) -> None:
        trace = [row(k * 100.0, [k]) for k in range(12)]
        runs = [
            simulate(tmp_path, trace, seed=seed, policy="dynamo_kv", tie_break="random").places() for seed in (0, 0, 1)
        ]
        assert runs[0] == runs[1] != runs[2]

    @pytest.mark.parametrize("policy", sorted(registry.POLICIES))
    @pytest.mark.parametrize("pools", [False, True])
    def test_every_policy_serves_everything(self, tmp_path: Path, policy: str, pools: bool) -> None:
        trace = [row(k * 2.5, [k % 3, 10 + k % 5], session_id=f"s{k % 4}") for k in range(16)]
        outcome = simulate(tmp_path, trace, pools=pools, policy=policy)
        assert len(outcome.rows) == 16
        assert all(one["terminal_status"] == "completed" for one in outcome.rows)


def _log_bytes(folder: Path) -> bytes:
    return (folder / LOG_NAME).read_bytes()
