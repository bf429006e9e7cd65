"""The kernel: what is refused, how a run ends, and in which order turns are taken."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from g2sim.actors.worker.events import PassesEnded, RequestQueued
from g2sim.bus import kernel as kernel_module
from g2sim.bus.clock import VirtualClock
from g2sim.bus.drivers import InlineDriver, TrioDriver
from g2sim.bus.errors import Deadlock, ProtocolError
from g2sim.bus.events import Record, Row
from g2sim.bus.kernel import Envelope, Kernel, Port, Subscription

Receive = Callable[[Any, Port], Any]
patient = settings(deadline=None)  # the machine is shared


@attrs.frozen
class Rang:
    """An event. The kernel takes any class; only the log wants registered ones."""

    bell: int


@attrs.frozen
class Knocked:
    door: int


class Script:
    """An actor whose turns are a plain function, and that waits for whatever it is told to wait for."""

    def __init__(self, receive: Receive = lambda message, port: None, waiting: Sequence[str] = ()) -> None:
        self._receive = receive
        self._waiting = waiting

    def receive(self, message: Any, port: Port) -> Any:
        return self._receive(message, port)

    def waiting(self) -> Sequence[str]:
        return self._waiting


def bus(**receives: Receive) -> Kernel:
    """A kernel with actors called like the keywords, in that order."""
    kernel = Kernel()
    for name, receive in receives.items():
        kernel.register(name, Script(receive))
    return kernel


def noted(log: list[Any]) -> Receive:
    """A turn that only notes its message."""
    return lambda message, port: log.append(message)


def placed(log: list[Any], kernel: Kernel) -> Receive:
    """A turn that notes its message with time, round and phase."""
    return lambda message, port: log.append((message, kernel.now_ms, kernel.round, kernel.phase))


def post(kernel: Kernel, name: str, message: Any, *, phase: int = 0, at_ms: float = 0.0) -> Envelope:
    return kernel.post(kernel.slot(name), message, phase, at_ms)


def idle(message: Any, port: Port) -> None:
    port.no_effect()


# ---- refusals ----


def test_two_actors_of_one_name_are_refused() -> None:
    kernel = bus(a=idle)
    with pytest.raises(ProtocolError, match="two actors are called 'a'"):
        kernel.register("a", Script())


def test_an_unknown_recipient_is_refused_and_the_known_ones_are_listed() -> None:
    kernel = bus(a=lambda message, port: port.send("c", 1, phase=0), b=idle)
    post(kernel, "a", "go")
    with pytest.raises(ProtocolError, match="no actor is called 'c'; there are: a, b"):
        InlineDriver(kernel).run()
    with pytest.raises(ProtocolError, match="no actor is called 'c'"):
        kernel.subscribe("c", [Rang])


@pytest.mark.parametrize("at_ms", [4.0, math.nextafter(5.0, 0.0), -1.0, -math.inf, math.nan, math.inf])
def test_a_message_for_the_past_or_for_never_is_refused_with_actor_and_both_times(at_ms: float) -> None:
    kernel = bus(a=lambda message, port: port.send_self("late", phase=0, at_ms=at_ms))
    post(kernel, "a", "go", at_ms=5.0)
    with pytest.raises(ProtocolError, match=r"message for a at .* ms, but it is 5\.0 ms") as caught:
        InlineDriver(kernel).run()
    assert repr(at_ms) in str(caught.value)
    assert kernel.now_ms == 5.0


@pytest.mark.parametrize("lag_ms", [-1.0, math.nan])
def test_a_negative_lag_is_refused(lag_ms: float) -> None:
    with pytest.raises(ProtocolError, match="subscription of a: lag_ms is"):
        bus(a=idle).subscribe("a", [Rang], lag_ms=lag_ms)


@pytest.mark.parametrize("again", [0, 1], ids=["same-round", "next-round"])
def test_a_loop_that_never_lets_time_pass_is_refused_with_time_actor_and_phase(
    monkeypatch: pytest.MonkeyPatch, again: int
) -> None:
    """Both a loop within a round and one that goes through rounds."""
    monkeypatch.setattr(kernel_module, "MAX_TURNS_PER_INSTANT", 20)
    turns: list[int] = []

    def loop(message: Any, port: Port) -> None:
        turns.append(1)
        port.send_self("more", phase=1 - again if len(turns) % 2 else 1)

    kernel = bus(a=loop)
    post(kernel, "a", "go", phase=1, at_ms=7.0)
    with pytest.raises(ProtocolError, match=r"time stands still at 7\.0 ms: 20 turns in \d+ rounds; .* a's, in phase"):
        InlineDriver(kernel).run()
    assert len(turns) == 21


def test_the_bound_on_turns_counts_each_instant_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_module, "MAX_TURNS_PER_INSTANT", 20)
    seen: list[Any] = []
    kernel = bus(a=noted(seen))
    for number in range(100):
        post(kernel, "a", number, at_ms=float(number // 20))
    InlineDriver(kernel).run()
    assert seen == list(range(100))


def test_quiet_with_unfinished_work_is_a_deadlock_that_lists_actor_and_line() -> None:
    kernel = Kernel()
    kernel.register("pump", Script(waiting=["request 3 waits for blocks", "request 4 waits behind 3"]))
    kernel.register("rested", Script())
    kernel.register("door", Script(waiting=["a visitor"]))
    post(kernel, "pump", "go", at_ms=2.5)
    with pytest.raises(Deadlock) as caught:
        InlineDriver(kernel).run()
    lines = ("pump: request 3 waits for blocks", "pump: request 4 waits behind 3", "door: a visitor")
    assert caught.value.waiting == lines
    assert caught.value.time_ms == 2.5
    assert caught.value.exit_code == 1
    assert str(caught.value).splitlines() == [
        "deadlock at 2.5 ms: nothing is due and 3 wait:",
        *(f"  {line}" for line in lines),
    ]


def test_a_retry_without_any_effect_ends_in_a_deadlock_not_in_a_loop() -> None:
    kernel = Kernel()
    turns: list[float] = []

    def try_again(message: Any, port: Port) -> None:
        turns.append(port.now_ms)
        port.retry("again", phase=0)

    kernel.register("a", Script(try_again, waiting=["a seat"]))
    post(kernel, "a", "go")
    with pytest.raises(Deadlock, match="a: a seat"):
        InlineDriver(kernel).run()
    assert turns == [0.0]


# ---- order ----


def test_turns_are_ordered_by_time_round_phase_registration_and_sequence() -> None:
    """A hand-worked instant: the worst posting order gives the order of the rule."""
    seen: list[Any] = []
    kernel = bus(first=noted(seen), second=noted(seen))
    for message, name, phase, at_ms in [
        ("later", "first", 0, 2.0),
        ("phase 3", "first", 3, 1.0),
        ("phase 2, second, 1st", "second", 2, 1.0),
        ("phase 2, first, 1st", "first", 2, 1.0),
        ("phase 2, second, 2nd", "second", 2, 1.0),
        ("phase 2, first, 2nd", "first", 2, 1.0),
        ("sooner", "second", 9, 0.5),
    ]:
        post(kernel, name, message, phase=phase, at_ms=at_ms)
    InlineDriver(kernel).run()
    assert seen == [
        "sooner",
        "phase 2, first, 1st",
        "phase 2, first, 2nd",
        "phase 2, second, 1st",
        "phase 2, second, 2nd",
        "phase 3",
        "later",
    ]


def test_an_earlier_phase_of_the_same_instant_belongs_to_the_next_round() -> None:
    seen: list[Any] = []
    kernel = bus()

    def receive(message: Any, port: Port) -> None:
        placed(seen, kernel)(message, port)
        if message == "go":
            port.send_self("earlier phase", phase=1)
            port.send_self("own phase", phase=2)
            port.send_self("later phase", phase=3)

    kernel.register("a", Script(receive))
    post(kernel, "a", "go", phase=2, at_ms=4.0)
    post(kernel, "a", "waits its turn", phase=5, at_ms=4.0)
    InlineDriver(kernel).run()
    assert seen == [
        ("go", 4.0, 0, 2),
        ("own phase", 4.0, 0, 2),
        ("later phase", 4.0, 0, 3),
        ("waits its turn", 4.0, 0, 5),
        ("earlier phase", 4.0, 1, 1),
    ]


@attrs.frozen
class Plan:
    """A message that sends others: (recipient, phase, delay) each."""

    name: str
    children: tuple[tuple[int, int, float, Plan], ...]


def plans(depth: int) -> st.SearchStrategy[Any]:
    child = st.just([]) if depth == 0 else plans(depth - 1)
    return st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 3), st.sampled_from([0.0, 0.0, 0.5, 1.0]), child), max_size=3
    )


def numbered(rows: Any, counter: list[int]) -> tuple[tuple[int, int, float, Plan], ...]:
    out = []
    for recipient, phase, delay_ms, rest in rows:
        counter[0] += 1
        name = f"m{counter[0]}"
        out.append((recipient, phase, delay_ms, Plan(name, numbered(rest, counter))))
    return tuple(out)


def expected_order(roots: tuple[tuple[int, int, float, Plan], ...]) -> list[str]:
    """Slow, obvious model: a list of all pending messages, the least key is next."""
    pending = [(at_ms, 0, phase, to, idx, plan) for idx, (to, phase, at_ms, plan) in enumerate(roots)]
    sequence = len(pending)
    order = []
    while pending:
        best = min(pending, key=lambda row: row[:5])
        pending.remove(best)
        now_ms, round_idx, phase, _, _, plan = best
        order.append(plan.name)
        for to, child_phase, delay_ms, child in plan.children:
            at_ms = now_ms + delay_ms
            rounds = 0 if at_ms > now_ms else round_idx + (child_phase < phase)
            pending.append((at_ms, rounds, child_phase, to, sequence, child))
            sequence += 1
    return order


@patient
@given(plans(3))
def test_any_tree_of_messages_is_taken_in_the_order_of_the_model(rows: Any) -> None:
    roots = numbered(rows, [0])
    seen: list[str] = []

    def receive(message: Plan, port: Port) -> None:
        seen.append(message.name)
        for to, phase, delay_ms, child in message.children:
            port.send(str(to), child, phase=phase, at_ms=port.now_ms + delay_ms)

    kernel = Kernel()
    for name in "012":
        kernel.register(name, Script(receive))
    for to, phase, at_ms, plan in roots:
        post(kernel, str(to), plan, phase=phase, at_ms=at_ms)
    InlineDriver(kernel).run()
    assert seen == expected_order(roots)


@pytest.mark.parametrize("place", range(7))
@pytest.mark.parametrize("phase", [0, 1, 2])
def test_one_more_timer_that_does_nothing_leaves_the_others_in_order(place: int, phase: int) -> None:
    """F86: six timers at t=50 keep their order wherever a seventh that does nothing is put among them."""

    def order(*, extra: bool) -> list[Any]:
        seen: list[Any] = []
        kernel = bus(a=noted(seen), b=noted(seen), nothing=idle)
        for number in range(7):
            if extra and number == place:
                post(kernel, "nothing", None, phase=phase, at_ms=50.0)
            if number < 6:
                post(kernel, "ab"[number % 2], number, phase=1, at_ms=50.0)
        InlineDriver(kernel).run()
        return seen

    assert order(extra=True) == order(extra=False) == [0, 2, 4, 1, 3, 5]


def test_a_thousand_timers_at_one_time_go_off_in_the_order_in_which_they_were_set() -> None:
    """F87: and the time is that of each of them."""
    seen: list[Any] = []
    kernel = bus(a=lambda message, port: seen.append((message, port.now_ms)))
    for number in range(1000):
        post(kernel, "a", number, at_ms=3.25)
    InlineDriver(kernel).run()
    assert seen == [(number, 3.25) for number in range(1000)]


def test_a_time_too_close_to_now_to_differ_is_now() -> None:
    """F87: 1e-9 ms after 1e9 ms is the same float, so the same instant; after 0 it is a later one."""
    seen: list[Any] = []
    kernel = bus()

    def receive(message: Any, port: Port) -> None:
        placed(seen, kernel)(message, port)
        if message == "go":
            port.send_self("soon", phase=0, at_ms=port.now_ms + 1e-9)

    kernel.register("a", Script(receive))
    post(kernel, "a", "go", phase=1)
    post(kernel, "a", "go", phase=1, at_ms=1e9)
    InlineDriver(kernel).run()
    assert seen == [("go", 0.0, 0, 1), ("soon", 1e-9, 0, 0), ("go", 1e9, 0, 1), ("soon", 1e9, 1, 0)]


# ---- cancelling ----


def test_a_cancelled_envelope_counts_as_never_sent() -> None:
    """It is not delivered, and time does not go there for its sake."""
    seen: list[Any] = []
    kernel = bus(a=noted(seen))
    post(kernel, "a", "stays", at_ms=1.0)
    port = kernel.slot("a").port
    port.cancel(post(kernel, "a", "same time", at_ms=1.0))
    port.cancel(post(kernel, "a", "in between", at_ms=0.5))
    port.cancel(post(kernel, "a", "last", at_ms=9.0))
    InlineDriver(kernel).run()
    assert seen == ["stays"]
    assert kernel.now_ms == 1.0


def test_cancelling_what_was_delivered_is_harmless() -> None:
    seen: list[Any] = []
    kernel = bus(a=noted(seen))
    envelope = post(kernel, "a", "once")
    InlineDriver(kernel).run()
    kernel.slot("a").port.cancel(envelope)
    post(kernel, "a", "twice")
    InlineDriver(kernel).run()
    assert seen == ["once", "twice"]


def test_an_actor_can_take_back_a_message_of_the_instant_at_work() -> None:
    seen: list[Any] = []

    def receive(message: Any, port: Port) -> None:
        seen.append(message)
        if message == "go":
            port.cancel(port.send_self("taken back", phase=0))
            port.cancel(port.send_self("taken back, next round", phase=-1))

    kernel = bus(a=receive)
    post(kernel, "a", "go")
    InlineDriver(kernel).run()
    assert seen == ["go"]
    assert kernel.round == 0


# ---- effects, retries and observers ----


def tries(kernel: Kernel, seen: list[Any], *, phase: int) -> Receive:
    """An actor that tries again and again, each time without an effect, until it has been told to stop."""

    def receive(message: Any, port: Port) -> None:
        seen.append((message, kernel.now_ms, kernel.round, kernel.phase))
        port.retry("again", phase=phase)

    return receive


def run_retries(*others: tuple[str, int, float]) -> list[Any]:
    """Places at which an actor that tries in phase 2 at t=1 gets its turns, beside turns (kind, phase, time)."""
    kernel, seen = Kernel(), []
    kernel.register("a", Script(tries(kernel, seen, phase=2)))
    kernel.register("effect", Script())
    kernel.register("nothing", Script(idle))
    post(kernel, "a", "go", phase=2, at_ms=1.0)
    for name, phase, at_ms in others:
        post(kernel, name, "x", phase=phase, at_ms=at_ms)
    InlineDriver(kernel).run()
    return seen


GO = ("go", 1.0, 0, 2)


def test_a_retry_comes_back_at_once_after_an_effect_in_its_own_phase() -> None:
    """Once in the same round, and once more in the next one, since the round had an effect."""
    assert run_retries(("effect", 2, 1.0)) == [GO, ("again", 1.0, 0, 2), ("again", 1.0, 1, 2)]


@pytest.mark.parametrize("phase", [0, 3])
def test_a_retry_comes_back_in_the_next_round_after_an_effect_in_another_phase(phase: int) -> None:
    """Whether the effect came before or after the try within the round."""
    assert run_retries(("effect", phase, 1.0)) == [GO, ("again", 1.0, 1, 2)]


@pytest.mark.parametrize("phase", [0, 2, 3])
def test_a_retry_does_not_come_back_without_an_effect(phase: int) -> None:
    assert run_retries(("nothing", phase, 1.0)) == [GO]


@pytest.mark.parametrize("name", ["effect", "nothing"])
def test_a_retry_comes_back_at_the_next_instant_whatever_happens_there(name: str) -> None:
    seen = run_retries((name, 3, 2.0))
    assert seen[:2] == [GO, ("again", 2.0, 0, 2)]
    assert seen[2:] == ([("again", 2.0, 1, 2)] if name == "effect" else [])


def test_a_round_that_only_a_message_opens_brings_retries_back_too() -> None:
    """The round before it had no effect, but there is a next round, so a retry gets its chance."""

    def two_rounds(message: Any, port: Port) -> None:
        port.no_effect()
        if message == "x":
            port.send_self("next round", phase=0)

    kernel, seen = Kernel(), []
    kernel.register("a", Script(tries(kernel, seen, phase=2)))
    kernel.register("b", Script(two_rounds))
    post(kernel, "a", "go", phase=2, at_ms=1.0)
    post(kernel, "b", "x", phase=3, at_ms=1.0)
    InlineDriver(kernel).run()
    assert seen == [GO, ("again", 1.0, 1, 2)]


def test_instant_observers_hear_only_of_instants_with_an_effect_and_of_each_once() -> None:
    heard: list[Sequence[float]] = []
    kernel = bus(effect=lambda message, port: None, nothing=idle)
    kernel.observe_instants(heard.append)
    for name, at_ms in [
        ("effect", 0.0),
        ("nothing", 1.0),
        ("nothing", 2.0),
        ("effect", 2.0),
        ("effect", 2.0),
        ("nothing", 3.0),
        ("effect", 4.5),
        ("nothing", 6.0),
    ]:
        post(kernel, name, "x", at_ms=at_ms)
    InlineDriver(kernel).run()
    kernel.tell_instants()
    assert heard == [[0.0, 2.0, 4.5]]
    kernel.tell_instants()
    assert heard[1:] == [[4.5]]


def test_turn_observers_are_called_after_every_turn_with_an_effect_or_without() -> None:
    ends: list[int] = []
    kernel = bus(effect=lambda message, port: None, nothing=idle)
    kernel.observe_turns(lambda: ends.append(kernel.turn_idx))
    for name in ("effect", "nothing", "effect"):
        post(kernel, name, "x")
    InlineDriver(kernel).run()
    assert ends == [1, 2, 3]


# ---- the end of a run ----


def test_what_is_due_exactly_at_the_time_limit_is_still_done_and_nothing_after_it() -> None:
    seen: list[Any] = []
    kernel = Kernel(time_limit_ms=5.0)
    kernel.register("a", Script(noted(seen), waiting=["the one that is cut off"]))
    for at_ms in (4.0, 5.0, math.nextafter(5.0, 6.0), 6.0):
        post(kernel, "a", at_ms, at_ms=at_ms)
    InlineDriver(kernel).run()
    assert seen == [4.0, 5.0]
    assert kernel.stopped_at_limit
    assert kernel.now_ms == 5.0


def test_a_run_that_ends_before_its_limit_did_not_stop_there() -> None:
    kernel = Kernel(time_limit_ms=5.0)
    kernel.register("a", Script())
    post(kernel, "a", "x", at_ms=5.0)
    InlineDriver(kernel).run()
    assert not kernel.stopped_at_limit


def test_a_cancelled_envelope_after_the_limit_does_not_make_a_run_stop_there() -> None:
    kernel = Kernel(time_limit_ms=5.0)
    kernel.register("a", Script())
    kernel.slot("a").port.cancel(post(kernel, "a", "x", at_ms=6.0))
    InlineDriver(kernel).run()
    assert not kernel.stopped_at_limit


def test_a_bus_without_messages_is_over_at_once() -> None:
    kernel = bus(a=idle)
    InlineDriver(kernel).run()
    TrioDriver(kernel).run()
    assert kernel.now_ms == 0.0
    assert kernel.turn_idx == 0


# ---- records and subscriptions ----


def test_a_record_carries_time_source_and_the_number_of_its_turn() -> None:
    records: list[Record] = []

    def ring(message: Any, port: Port) -> None:
        for bell in message:
            port.publish(Rang(bell))

    kernel = bus(a=ring, b=ring)
    kernel.add_sink(records.append)
    post(kernel, "b", [3], at_ms=1.0)
    post(kernel, "a", [1, 2], at_ms=1.0)
    InlineDriver(kernel).run()
    assert records == [Record(1.0, "a", 0, Rang(1)), Record(1.0, "a", 0, Rang(2)), Record(1.0, "b", 1, Rang(3))]


def listening(
    *, lag_ms: float, wake_phase: int | None, ring_at: Sequence[float], look_at: Sequence[float]
) -> list[Any]:
    """What a listener that drains at its turns gets: (time, message, times of the records) for each turn."""
    kernel, heard = Kernel(), []
    box: list[Subscription] = []

    def listen(message: Any, port: Port) -> None:
        heard.append((port.now_ms, message, [record.time_ms for record in box[0].drain()]))

    kernel.register("bell", Script(lambda message, port: port.publish(message)))
    kernel.register("ear", Script(listen))
    box.append(kernel.subscribe("ear", [Rang], lag_ms=lag_ms, wake_message="rang", wake_phase=wake_phase))
    for number, at_ms in enumerate(ring_at):
        post(kernel, "bell", Rang(number), phase=1, at_ms=at_ms)
        post(kernel, "bell", Knocked(number), phase=1, at_ms=at_ms)  # nobody listens to these
    for at_ms in look_at:
        post(kernel, "ear", "look", phase=5, at_ms=at_ms)
    InlineDriver(kernel).run()
    return heard


def test_a_subscription_that_does_not_wake_holds_its_records_until_they_are_drained() -> None:
    heard = listening(lag_ms=0.0, wake_phase=None, ring_at=[1.0, 2.0, 4.0], look_at=[3.0, 3.0, 4.0])
    assert heard == [(3.0, "look", [1.0, 2.0]), (3.0, "look", []), (4.0, "look", [4.0])]


def test_a_lagging_record_is_drained_from_exactly_its_due_time_on() -> None:
    before = math.nextafter(11.0, 0.0)
    heard = listening(lag_ms=10.0, wake_phase=None, ring_at=[1.0, 2.0], look_at=[10.0, before, 11.0, 20.0])
    assert heard == [(10.0, "look", []), (before, "look", []), (11.0, "look", [1.0]), (20.0, "look", [2.0])]


def test_a_waking_subscription_wakes_its_actor_when_a_record_is_due() -> None:
    heard = listening(lag_ms=10.0, wake_phase=3, ring_at=[1.0, 2.0], look_at=[])
    assert heard == [(11.0, "rang", [1.0]), (12.0, "rang", [2.0])]


@pytest.mark.parametrize("lag_ms", [0.0, 10.0])
def test_many_records_of_one_time_and_round_wake_once(lag_ms: float) -> None:
    heard = listening(lag_ms=lag_ms, wake_phase=3, ring_at=[1.0, 1.0, 1.0], look_at=[])
    assert heard == [(1.0 + lag_ms, "rang", [1.0, 1.0, 1.0])]


def test_records_of_a_later_round_wake_again() -> None:
    heard = listening(lag_ms=0.0, wake_phase=0, ring_at=[1.0, 1.0], look_at=[])
    assert heard == [(1.0, "rang", [1.0, 1.0])]
    kernel, seen = Kernel(), []
    box: list[Subscription] = []

    def ring(message: Any, port: Port) -> None:
        port.publish(Rang(message))
        if message == 1:
            port.send_self(2, phase=0)

    def listen(message: Any, port: Port) -> None:
        seen.append((kernel.round, [record.event.bell for record in box[0].drain()]))

    kernel.register("bell", Script(ring))
    kernel.register("ear", Script(listen))
    box.append(kernel.subscribe("ear", [Rang], wake_message="rang", wake_phase=3))
    post(kernel, "bell", 1, phase=1)
    InlineDriver(kernel).run()
    assert seen == [(0, [1]), (1, [2])]


def test_records_drained_early_leave_the_wake_up_empty_handed() -> None:
    """Draining in another turn takes the records; the wake-up that was on its way still comes, with nothing."""
    heard = listening(lag_ms=0.0, wake_phase=6, ring_at=[1.0], look_at=[1.0])
    assert heard == [(1.0, "look", [1.0]), (1.0, "rang", [])]


# ---- the clock ----


def test_the_clock_shows_the_kernels_time_in_seconds_and_never_sleeps() -> None:
    """F87: also for a deadline in the past, at no distance, and at none at all."""
    stalls: list[float] = []
    clock = VirtualClock(lambda: 2500.0, lambda: stalls.append(1.0))
    clock.start_clock()
    assert clock.current_time() == 2.5
    for deadline in (1.0, 2.5, 2.5 + 1e-9, 1e9, math.inf):
        assert clock.deadline_to_sleep_time(deadline) == 0.0
    assert len(stalls) == 5


def test_actors_see_trios_time_follow_the_bus() -> None:
    times: list[tuple[float, float]] = []
    kernel = bus(a=lambda message, port: times.append((port.now_ms, trio.current_time())))
    for at_ms in (0.0, 1.5, 1e7):
        post(kernel, "a", "x", at_ms=at_ms)
    TrioDriver(kernel).run()
    assert times == [(0.0, 0.0), (1.5, 0.0015), (1e7, 1e4)]


@patient
@given(st.lists(st.floats(0.0, 1e12), max_size=30), st.integers(0, 2**32))
def test_time_never_goes_back(times: list[float], seed: int) -> None:
    """F87: whatever is posted, from outside or by turns."""
    seen: list[float] = []
    generator = random.Random(seed)

    def receive(message: Any, port: Port) -> None:
        seen.append(port.now_ms)
        if message:
            port.send_self(message - 1, phase=generator.randrange(3), at_ms=port.now_ms + generator.choice([0.0, 1e-9]))

    kernel = bus(a=receive)
    for at_ms in times:
        post(kernel, "a", 2, at_ms=at_ms)
    InlineDriver(kernel).run()
    assert seen == sorted(seen)
    assert len(seen) == 3 * len(times)


def test_a_sink_for_some_event_types_hears_of_no_others_and_what_nobody_hears_need_not_be_made() -> None:
    kernel = bus(a=idle)
    port = kernel.slot("a").port
    assert not port.hears(Rang)
    heard: list[Any] = []
    kernel.add_sink(lambda record: heard.append(record.event), [Rang])
    assert port.hears(Rang)
    assert not port.hears(Knocked)
    for event in (Rang(1), Knocked(2), Rang(3)):
        port.publish(event)
    assert heard == [Rang(1), Rang(3)]
    kernel.subscribe("a", [Knocked])
    assert port.hears(Knocked)


@pytest.mark.parametrize("given_by_values", [False, True])
@pytest.mark.parametrize("a_signal_is_heard", [False, True])
def test_an_event_given_by_its_values_is_published_as_itself_and_signals_to_sinks_take_no_number(
    given_by_values: bool, a_signal_is_heard: bool
) -> None:
    run = PassesEnded(worker=0, role="decode", dp_rank=0, ends_ms=array("d", [1.0]), emitted=(), prefill_tokens=0)

    def receive(message: Any, port: Port) -> None:
        port.publish(run)
        if message != "signal only":
            event = RequestQueued(worker=0, role="decode", dp_rank=0, request=message)
            if given_by_values:
                port.publish_values(RequestQueued, (0, "decode", 0, message))
            else:
                port.publish(event)

    kernel = bus(a=receive)
    rows: list[Row] = []
    records: list[Record] = []
    signals: list[Record] = []
    kernel.add_row_sink(rows.extend)
    kernel.add_sink(records.append)
    if a_signal_is_heard:
        kernel.add_sink(signals.append, [PassesEnded])
    for at_ms, message in ((1.0, 7), (2.0, "signal only"), (3.0, 8)):
        post(kernel, "a", message, at_ms=at_ms)
    InlineDriver(kernel).run()
    expected = [(1.0, "a", 0, 7), (3.0, "a", 1, 8)]
    assert rows == [(*head, RequestQueued, (0, "decode", 0, request), None) for *head, request in expected]
    assert records == [
        Record(time_ms, source, cause, RequestQueued(worker=0, role="decode", dp_rank=0, request=request))
        for time_ms, source, cause, request in expected
    ]
    assert [record.time_ms for record in signals] == ([1.0, 2.0, 3.0] if a_signal_is_heard else [])
