"""A router and its policy: what a faulty policy may not do, then what a good one can rely on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from router_values import at, pool, rank_of, removed, request, router, stored

from g2sim.actors.router.policy import (
    Candidate,
    Place,
    Placement,
    Policy,
    Queue,
    Refuse,
    Release,
    RoutedRequest,
    Verdict,
    Weighing,
)
from g2sim.actors.router.pool import WorkerState
from g2sim.actors.router.state import Placed, Refused, RouterState, Waits
from g2sim.bus.errors import InvariantViolation, PolicyError


class Scripted(Policy):
    """Does what a test says."""

    name = "scripted"

    def __init__(
        self,
        place: Callable[[RoutedRequest], Any] = lambda _: Place(at(0)),
        release: Callable[[int], Iterable[Any]] = lambda _: (),
    ) -> None:
        self._place = place
        self._release = release

    def place(self, request: RoutedRequest, now_ms: float) -> Verdict:
        verdict: Verdict = self._place(request)
        return verdict

    def request_terminal(self, request: int, now_ms: float) -> Iterable[Release]:
        return self._release(request)


class Scored(Policy):
    name = "scored"

    def __init__(self, score: Callable[[Candidate], Any]) -> None:
        self._score = score

    def score(self, request: RoutedRequest, candidate: Candidate) -> Any:
        return self._score(candidate)


def fails(_: object) -> Any:
    raise KeyError("gone")


def weighing(chosen: int = 0, **change: Any) -> Weighing:
    candidates = [Candidate(at(worker), 0, 0, 0, 0, 0) for worker in range(2)]
    return Weighing(candidates=candidates, chosen=chosen, reason="test", **change)


def placing(*, worker: Any = 0, dp_rank: Any = 0, why: Weighing | None = None) -> Scripted:
    return Scripted(lambda _: Place(Placement(worker, dp_rank), why))


FAULTY: dict[str, tuple[Policy, str]] = {
    "exception": (Scripted(fails), "place raised KeyError: 'gone'"),
    "no method at all": (Policy(), "NotImplementedError: Policy has neither score nor place"),
    "nothing": (Scripted(lambda _: None), "place gave None, allowed: a verdict"),
    "placement instead of verdict": (Scripted(lambda _: at(0)), "place gave Placement"),
    "release from place": (Scripted(lambda one: Release(one.request, Place(at(0)))), "place gave Release"),
    "worker too large": (placing(worker=2), "allowed: worker 0 to 1"),
    "worker below 0": (placing(worker=-1), "allowed: worker 0 to 1"),
    "worker is a bool": (placing(worker=True), "allowed: worker 0 to 1"),
    "worker is a float": (placing(worker=0.0), "allowed: worker 0 to 1"),
    "worker is text": (placing(worker="0"), "allowed: worker 0 to 1"),
    "rank too large": (placing(dp_rank=1), "allowed: dp_rank 0 to 0"),
    "rank is None": (placing(dp_rank=None), "allowed: dp_rank 0 to 0"),
    "tuple for a placement": (Scripted(lambda _: Place((0, 0))), "allowed: a Placement"),  # type: ignore[arg-type]
    "account of another rank": (placing(why=weighing(1)), "its account says otherwise: 1"),
    "account out of range": (placing(why=weighing(2)), "its account says otherwise: 2"),
    "cost that is not a number": (placing(why=weighing(costs=[0.0, math.nan])), "nan among its costs"),
    "one cost too few": (placing(why=weighing(costs=[0.0])), "1 costs for 2 candidates"),
    "one part too many": (placing(why=weighing(parts={"x": [1.0, 2.0, 3.0]})), "3 x for 2 candidates"),
    "score nan": (Scored(lambda _: math.nan), "the score of worker 0 rank 0 is nan, allowed: a finite number"),
    "score infinite": (Scored(lambda _: -math.inf), "is -inf"),
    "score None": (Scored(lambda _: None), "is None"),
    "score text": (Scored(lambda _: "1"), "is '1'"),
    "score bool": (Scored(lambda _: True), "is True"),
    "score too large": (Scored(lambda _: 10**400), "the score of worker 0"),
    "part nan": (Scored(lambda _: {"load": 1.0, "cache": math.nan}), "'cache': nan"),
    "part text": (Scored(lambda _: {"load": "x"}), "TypeError"),
}


@pytest.mark.parametrize("what", FAULTY)
def test_a_faulty_verdict_ends_the_run_with_policy_request_time_and_value(what: str) -> None:
    policy, problem = FAULTY[what]
    with pytest.raises(PolicyError) as caught:
        router(policy).place(request(17), 2.5)
    error = caught.value
    assert (error.policy, error.request, error.time_ms) == (policy.name, 17, 2.5)
    assert problem in str(error)
    assert str(error).startswith(f"policy {policy.name}, request 17 at 2.5 ms: ")


class TestFaultyHooks:
    def state(self, release: Callable[[int], Iterable[Any]]) -> RouterState:
        """Request 1 is placed, 2 waits."""
        state = router(Scripted(lambda one: Place(at(0)) if one.request == 1 else Queue(), release))
        assert isinstance(state.place(request(1), 0.0), Placed)
        assert isinstance(state.place(request(2), 1.0), Waits)
        return state

    @pytest.mark.parametrize(
        ("release", "problem"),
        [
            (lambda _: [Release(3, Place(at(0)))], "released request 3, which does not wait here"),
            (lambda _: [Release(1, Place(at(0)))], "released request 1, which does not wait here"),
            (lambda _: [Release(2, Place(at(0)))] * 2, "released request 2, which is placed already"),
            (lambda _: [Release(2, Queue())], "gave Queue(), allowed: a verdict"),  # type: ignore[arg-type]
            (lambda _: [Place(at(0))], "request_terminal gave Place"),
            (lambda _: [Release(2, Place(at(9)))], "allowed: worker 0 to 1"),
            (lambda _: None, "TypeError"),
            (lambda _: 5, "TypeError"),
            (fails, "request_terminal raised KeyError: 'gone'"),
            (lambda _: (fails(number) for number in [1]), "request_terminal raised KeyError: 'gone'"),
        ],
    )
    def test_a_faulty_release_names_hook_and_value(self, release: Callable[[int], Any], problem: str) -> None:
        with pytest.raises(PolicyError) as caught:
            self.state(release).ended(1, 7.0)
        assert problem in str(caught.value)
        assert caught.value.time_ms == 7.0

    def test_a_policy_that_cannot_start_says_so(self) -> None:
        class Broken(Policy):
            name = "broken"

            def start(self, pool: Any) -> None:
                raise ValueError("no")

        with pytest.raises(PolicyError, match="start raised ValueError: no"):
            router(Broken())

    @pytest.mark.parametrize("value", [-1, 1.0, None, True, "1"])
    def test_counts_must_be_integers(self, value: Any) -> None:
        policy = Scored(lambda one: one.active_requests)
        policy.prefill_tokens = lambda request, candidate: value  # type: ignore[method-assign]
        with pytest.raises(PolicyError, match="prefill_tokens gave"):
            router(policy).place(request(1), 0.0)
        other = Scored(lambda one: one.active_requests)
        if value is None:
            other.sees_blocks = True
        other.reported_overlap = lambda candidate: value  # type: ignore[method-assign]
        if value is not None:
            with pytest.raises(PolicyError, match="reported_overlap gave"):
                router(other).place(request(1), 0.0)

    def test_an_error_of_ours_stays_what_it_is(self) -> None:
        def broken(_: object) -> Any:
            raise InvariantViolation("ours")

        with pytest.raises(InvariantViolation):
            router(Scripted(broken)).place(request(1), 0.0)

    def test_check_compares_what_waits(self) -> None:
        state = router(Scripted(lambda _: Queue()))
        state.check()
        state.place(request(5), 0.0)
        with pytest.raises(PolicyError, match=r"pending\(\) is \[\], waiting are \[5\]"):
            state.check()

    def test_a_worker_that_takes_no_requests_cannot_be_chosen(self) -> None:
        for gone in (WorkerState.DRAINING, WorkerState.REMOVED):
            state = router(Scripted())
            state.set_worker(0, gone, 0.0)
            with pytest.raises(PolicyError, match="this worker takes no requests"):
                state.place(request(1), 0.0)


class TestGoodPolicies:
    def test_scores_may_have_parts_which_are_added_in_order(self) -> None:
        state = router(Scored(lambda one: {"a": 0.1, "b": 0.2, "c": float(one.active_requests)}))
        decision = state.place(request(1), 0.0)
        assert isinstance(decision, Placed)
        assert decision.why is not None
        assert list(decision.why.costs) == [0.1 + 0.2] * 2
        assert dict(decision.why.parts) == {"a": [0.1, 0.1], "b": [0.2, 0.2], "c": [0.0, 0.0]}
        assert (decision.why.tied, decision.why.chosen) == (2, 0)
        assert rank_of(state.place(request(2), 0.0)) == (1, 0)

    def test_what_nobody_is_eligible_for_is_refused(self) -> None:
        policy = Scored(lambda _: 0)
        policy.eligible = lambda request, candidate: False  # type: ignore[method-assign]
        decision = router(policy).place(request(1), 0.0)
        assert isinstance(decision, Refused)
        assert decision.reason == "no rank is eligible"

    def test_each_release_is_booked_before_the_next_is_asked_for(self) -> None:
        seen: list[list[int]] = []

        class Draining(Policy):
            name = "draining"

            def start(self, pool: Any) -> None:
                super().start(pool)
                self.queue: list[int] = []

            def place(self, request: RoutedRequest, now_ms: float) -> Verdict:
                if request.request == 1:
                    return Place(at(0))
                self.queue.append(request.request)
                return Queue()

            def request_terminal(self, request: int, now_ms: float) -> Iterable[Release]:
                while self.queue:
                    seen.append(list(self.pool.loads.requests))
                    yield Release(self.queue.pop(), Place(at(1)))

            def pending(self) -> list[int]:
                return self.queue

        state = router(Draining())
        for number in (1, 2, 3):
            state.place(request(number), float(number))
            state.check()
        decisions = state.ended(1, 9.0)
        assert [(one.request.request, one.queued_at_ms) for one in decisions if isinstance(one, Placed)] == [
            (3, 3.0),
            (2, 2.0),
        ]
        assert seen == [[0, 0], [0, 1]]
        state.check()

    def test_a_waiting_request_can_be_refused(self) -> None:
        state = router(
            Scripted(lambda one: Queue() if one.request else Place(at(0)), lambda _: [Release(1, Refuse("no"))])
        )
        state.place(request(0), 0.0)
        state.place(request(1), 0.0)
        (decision,) = state.ended(0, 1.0)
        assert decision == Refused(decision.request, "no")
        assert not state.waiting

    def test_a_placement_without_account_is_booked_and_reports_what_the_index_says(self) -> None:
        state = router(Scripted(lambda _: Place(at(1))))
        state.observe([stored(0, (1, 2)), stored(1, (1,))], 0.0)
        decision = state.place(request(1, (1, 2, 3)), 0.0)
        assert isinstance(decision, Placed)
        assert (decision.overlap_blocks, decision.best_overlap_blocks) == (1, 2)
        assert state.pool.loads.prefill_tokens == [0, 8]

    def test_signals_of_foreign_requests_call_no_hook(self) -> None:
        state = router(Scripted(release=fails))
        assert state.ended(99, 0.0) == []
        assert state.first_token(99, 0.0) == []

    def test_a_first_token_is_told_once_and_an_end_once(self) -> None:
        told: list[tuple[str, int, float]] = []

        class Hearing(Scripted):
            def prefill_completed(self, request: int, now_ms: float) -> Iterable[Release]:
                told.append(("first", request, now_ms))
                return ()

            def request_terminal(self, request: int, now_ms: float) -> Iterable[Release]:
                told.append(("end", request, now_ms))
                return ()

        state = router(Hearing())
        state.place(request(1), 0.0)
        for now_ms in (1.0, 2.0):
            state.first_token(1, now_ms)
        for now_ms in (3.0, 4.0):
            state.ended(1, now_ms)
        assert told == [("first", 1, 1.0), ("end", 1, 3.0)]

    def test_events_reach_the_index_before_the_policy(self) -> None:
        seen: list[list[int]] = []

        class Watching(Scored):
            def observe(self, events: Any, now_ms: float) -> Iterable[Release]:
                seen.append(self.pool.overlap(request(0, (1, 2))).device)
                return ()

        state = router(Watching(lambda _: 0))
        state.observe([stored(1, (1, 2))], 0.0)
        state.observe([removed(1, (1, 2), 1)], 1.0)
        assert seen == [[0, 2], [0, 1]]

    def test_worker_hooks_can_release_and_a_removed_worker_loses_its_load(self) -> None:
        class Holding(Scripted):
            def worker_ready(self, worker: int, now_ms: float) -> Iterable[Release]:
                return [Release(2, Place(at(worker)))]

        state = router(Holding(lambda one: Place(at(0)) if one.request == 1 else Queue()))
        state.place(request(1), 0.0)
        state.set_worker(0, WorkerState.REMOVED, 1.0)
        assert state.pool.loads.requests == [0, 0]
        assert state.ended(1, 2.0) == []
        state.place(request(2), 3.0)
        assert [rank_of(one) for one in state.set_worker(0, WorkerState.READY, 4.0)] == [(0, 0)]


def test_a_request_that_no_worker_takes_waits_for_the_first_that_does() -> None:
    asked: list[int] = []

    def choose(one: RoutedRequest) -> Any:
        asked.append(one.request)
        return Queue() if one.request == 3 else Place(at(1))

    class Queuing(Scripted):
        def pending(self) -> list[int]:
            return [3] if 3 in asked else []

    state = router(Queuing(choose))
    for worker, gone in enumerate((WorkerState.REMOVED, WorkerState.DRAINING)):
        state.set_worker(worker, gone, 1.0)
    for number in (1, 2, 3, 4):
        assert isinstance(state.place(request(number), 2.0 + number), Waits)
    assert (asked, state.waiting, state.has_waiting) == ([], [1, 2, 3, 4], True)
    assert state.withdraw(2, 7.0) == []
    state.check()
    released = state.set_worker(1, WorkerState.READY, 8.0)
    assert [(one.request.request, one.queued_at_ms) for one in released if isinstance(one, Placed)] == [
        (1, 3.0),
        (4, 6.0),
    ]
    assert (asked, state.waiting) == ([1, 3, 4], [3])
    state.check()


def test_ready_places_follow_the_states_of_workers() -> None:
    some = pool(3, dp_size=2)
    assert some.ready_places() == [0, 1, 2, 3, 4, 5]
    some.set_state(1, WorkerState.DRAINING)
    assert some.ready_places() == [0, 1, 4, 5]
    some.set_state(1, WorkerState.READY)
    assert some.ready_places() == [0, 1, 2, 3, 4, 5]
