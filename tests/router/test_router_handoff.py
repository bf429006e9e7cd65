"""The hand-off coordinator where routers are concerned: what is forgotten when, and in which order."""

from __future__ import annotations

from typing import Any

import pytest
from router_values import at, chain_of

from g2sim.actors.config import HandoffConfig, WorkerRole
from g2sim.actors.handoff.actor import HandoffCoordinator, _Handoff, _Step
from g2sim.actors.kv.prompt import RunPrompt
from g2sim.actors.router.messages import PlaceRequest, RankChosen, RankIsPending, RankReply, RequestIsOver
from g2sim.actors.traffic.request import RequestSpec
from g2sim.actors.worker.messages import (
    HandoffReply,
    ReleaseSource,
    SourceIsHeld,
    SourceIsRejected,
    SubmitRequest,
    WorkerReport,
)
from g2sim.actors.worker.sequence import RankRequest
from g2sim.bus.kernel import Ask


def coordinator(*listening: WorkerRole) -> HandoffCoordinator:
    return HandoffCoordinator(
        config=HandoffConfig(),
        block_size_tokens=4,
        workers={WorkerRole.PREFILL: ["prefill-0"], WorkerRole.DECODE: ["decode-0"]},
        routers={WorkerRole.PREFILL: ["router-prefill"], WorkerRole.DECODE: ["router-decode"]},
        listening=listening,
    )


def arrived(request: int) -> PlaceRequest:
    prompt = RunPrompt(ids=(1, 2), run_tokens=4, length=8)
    given = RankRequest(request=request, prompt=prompt, chain=chain_of((1, 2)), output_tokens=4, output_base=0)
    spec = RequestSpec(name=None, session_id=None, turn_index=None, prompt=prompt, output_tokens=4)
    return PlaceRequest(given, spec, 0.0)


def under_way(one: HandoffCoordinator, number: int, dp_rank: int) -> Any:
    handoff = one._handoffs[number] = _Handoff(number, arrived(number))
    handoff.source = at(0, dp_rank)
    return handoff


class Silent:
    """A port on which nothing is published or sent; replies come from a table."""

    now_ms = 1.0

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send_self(self, message: Any, **_: Any) -> None:
        self.sent.append(message)

    def publish(self, event: Any) -> None:
        self.sent.append(event)


def drive(turn: Any, *replies: Any) -> list[Any]:
    """What a turn asks, in order; it is given ``replies``."""
    asked: list[Any] = []
    waiting = list(replies)
    reply = None
    while True:
        try:
            ask = turn.send(reply)
        except StopIteration:
            assert not waiting
            return asked
        assert isinstance(ask, Ask)
        asked.append((ask.target, ask.message))
        reply = waiting.pop(0)


def test_a_pass_end_is_heard_rank_by_rank_parked_actions_before_results() -> None:
    """Found by replays with data parallel prefill ranks: not all parked actions of a worker come first."""
    one = coordinator()
    handoffs = {number: under_way(one, number, dp_rank) for number, dp_rank in ((1, 1), (5, 1), (6, 0), (7, 2), (8, 0))}
    one._parked["prefill-0"] = [(1, _Step.RELEASE, handoffs[1])]
    reports = (SourceIsHeld(8, 8), SourceIsRejected(6, 6), SourceIsRejected(5, 5), SourceIsRejected(7, 7))
    one._hear(WorkerReport("prefill-0", reports))
    assert [(step, handoff.number) for step, handoff in one._actions] == [
        (_Step.RESERVE, 8),
        (_Step.CLEAR_AWAY, 6),
        (_Step.RELEASE, 1),
        (_Step.CLEAR_AWAY, 5),
        (_Step.CLEAR_AWAY, 7),
    ]
    assert not one._parked


def test_a_request_is_over_for_the_prefill_router_when_its_source_is_released() -> None:
    one = coordinator(WorkerRole.PREFILL)
    handoff = under_way(one, 1, 0)
    port: Any = Silent()
    asked = drive(one._release(_Step.RELEASE, handoff, port), HandoffReply(), RankReply(None, ()))
    assert asked == [("prefill-0", ReleaseSource(0, 1, False)), ("router-prefill", RequestIsOver(1))]
    assert not one._handoffs


def test_a_busy_source_is_parked_and_the_router_hears_nothing_yet() -> None:
    one = coordinator(WorkerRole.PREFILL)
    handoff = under_way(one, 1, 3)
    port: Any = Silent()
    drive(one._release(_Step.RELEASE, handoff, port), HandoffReply(busy=True))
    assert one._parked == {"prefill-0": [(3, _Step.RELEASE, handoff)]}
    assert one.waiting() == ["request 1: release waits for prefill-0"]


def test_the_decode_router_forgets_a_failed_request_although_its_source_is_busy() -> None:
    one = coordinator(WorkerRole.DECODE)
    handoff = under_way(one, 1, 0)
    handoff.destination = at(0)
    port: Any = Silent()
    asked = drive(one._release(_Step.CANCEL_SOURCE, handoff, port), RankReply(None, ()), HandoffReply(busy=True))
    assert asked == [("router-decode", RequestIsOver(1)), ("prefill-0", ReleaseSource(0, 1, True))]
    again = drive(one._release(_Step.CANCEL_SOURCE, handoff, port), HandoffReply())
    assert again == [("prefill-0", ReleaseSource(0, 1, True))], "told once"


@pytest.mark.parametrize("listening", [(), (WorkerRole.DECODE,)])
def test_routers_that_do_not_look_at_load_are_told_nothing(listening: tuple[WorkerRole, ...]) -> None:
    one = coordinator(*listening)
    handoff = under_way(one, 1, 0)
    port: Any = Silent()
    assert drive(one._release(_Step.RELEASE, handoff, port), HandoffReply()) == [
        ("prefill-0", ReleaseSource(0, 1, False))
    ]


def test_a_request_that_waits_in_a_router_goes_on_when_the_router_says_where() -> None:
    one = coordinator()
    port: Any = Silent()
    handoff = one._handoffs[1] = _Handoff(1, arrived(1))
    drive(one._submit(handoff, port), RankReply(RankIsPending(), ()))
    assert one.waiting() == ["request 1 waits for a prefill rank"]
    chosen = RankChosen(WorkerRole.PREFILL, 1, at(0, 2))
    ((target, message),) = drive(one.receive(chosen, port), None)
    assert (target, type(message), message.dp_rank, message.handoff) == ("prefill-0", SubmitRequest, 2, 1)
    assert one.waiting() == []


def test_what_a_router_releases_beside_its_answer_goes_first() -> None:
    one = coordinator()
    port: Any = Silent()
    first, second = (_Handoff(number, arrived(number)) for number in (1, 2))
    one._handoffs.update({1: first, 2: second})
    drive(one._submit(first, port), RankReply(RankIsPending(), ()))
    released = RankChosen(WorkerRole.PREFILL, 1, at(0, 1))
    asked = drive(one._submit(second, port), RankReply(at(0, 0), (released,)), None, None)
    assert [getattr(message, "handoff", None) for _, message in asked] == [None, 1, 2]
