"""The bus: order of turns, effects and retries, subscriptions, ends, and the two ways to execute actors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from g2sim.bus import kernel as kernel_module
from g2sim.bus.drivers import InlineDriver, TrioDriver
from g2sim.bus.errors import Deadlock, ProtocolError
from g2sim.bus.handoff import Handoff
from g2sim.bus.kernel import Ask, Kernel, Port
from g2sim.bus.streams import RandomStream

DRIVERS = [InlineDriver, TrioDriver]


@attrs.frozen
class Happened:
    """What the tests publish; the kernel takes any object as an event."""

    what: Any


class Scripted:
    """Publishes every message, and does what ``on`` says for it."""

    def __init__(self, on: dict[Any, Callable[[Port], Any]] | None = None, waiting: tuple[str, ...] = ()) -> None:
        self.on = on or {}
        self.lines = waiting

    def receive(self, message: Any, port: Port) -> Any:
        port.publish(Happened(message))
        return self.on.get(message, lambda _: None)(port)

    def waiting(self) -> tuple[str, ...]:
        return self.lines


def record_of(kernel: Kernel) -> list[tuple[float, str, Any]]:
    out: list[tuple[float, str, Any]] = []
    kernel.add_sink(lambda record: out.append((record.time_ms, record.source, record.event.what)))
    return out


def said(kernel: Kernel, driver: Any = InlineDriver) -> list[Any]:
    out = record_of(kernel)
    driver(kernel).run()
    return [what for _, _, what in out]


def post(kernel: Kernel, name: str, message: Any, *, phase: int = 0, at: float = 0.0) -> Any:
    return kernel.post(kernel.slot(name), message, phase, at)


# -- order


def test_turns_go_by_time_then_phase_then_registration_then_sequence() -> None:
    kernel = Kernel()
    kernel.register("a", Scripted())
    kernel.register("b", Scripted())
    for name, message, phase, at in [
        ("b", "late", 0, 2.0),
        ("b", "phase 1, b", 1, 1.0),
        ("a", "phase 1, a first", 1, 1.0),
        ("a", "phase 1, a second", 1, 1.0),
        ("b", "phase 0", 0, 1.0),
    ]:
        post(kernel, name, message, phase=phase, at=at)
    assert said(kernel) == ["phase 0", "phase 1, a first", "phase 1, a second", "phase 1, b", "late"]


def test_an_earlier_phase_of_the_same_instant_belongs_to_the_next_round() -> None:
    kernel = Kernel()
    back = Scripted({"start": lambda port: port.send_self("again", phase=0)})
    kernel.register("a", back)
    post(kernel, "a", "start", phase=5)
    post(kernel, "a", "also in round 0", phase=7)
    assert said(kernel) == ["start", "also in round 0", "again"]


def test_a_timer_that_does_nothing_changes_the_order_of_no_other() -> None:
    """F86."""

    def run(extra: bool) -> list[Any]:
        kernel = Kernel()
        for name in "abc":
            kernel.register(name, Scripted())
        for number in range(6):
            if extra and number == 3:
                post(kernel, "b", "nothing", at=50.0)
            post(kernel, "abc"[number % 3], number, at=50.0)
        return [what for what in said(kernel) if what != "nothing"]

    assert run(extra=True) == run(extra=False)


def test_a_cancelled_message_is_as_if_never_sent_and_makes_no_instant() -> None:
    kernel = Kernel()
    kernel.register("a", Scripted())
    post(kernel, "a", "gone", at=1.0).live = False
    post(kernel, "a", "kept", at=2.0)
    instants: list[Sequence[float]] = []
    kernel.observe_instants(instants.append)
    assert said(kernel) == ["kept"]
    kernel.tell_instants()
    assert instants == [[0.0, 2.0]]


@pytest.mark.parametrize("at", [-1.0, 0.5])
def test_time_never_goes_back(at: float) -> None:
    kernel = Kernel()
    kernel.register("a", Scripted({"go": lambda port: port.send_self("x", phase=0, at_ms=at)}))
    post(kernel, "a", "go", at=1.0)
    with pytest.raises(ProtocolError, match=f"{at} ms, but it is 1.0 ms"):
        InlineDriver(kernel).run()


def test_the_time_limit_is_still_processed_and_nothing_later() -> None:
    kernel = Kernel(time_limit_ms=2.0)
    kernel.register("a", Scripted(waiting=("would wait",)))
    for at in (1.0, 2.0, 2.0000000000000004):
        post(kernel, "a", at, at=at)
    assert said(kernel) == [1.0, 2.0]
    assert kernel.stopped_at_limit


def test_names_are_unique_and_unknown_ones_refused_with_the_known_ones() -> None:
    kernel = Kernel()
    kernel.register("a", Scripted({"go": lambda port: port.send("nobody", 1, phase=0)}))
    with pytest.raises(ProtocolError, match="two actors are called 'a'"):
        kernel.register("a", Scripted())
    post(kernel, "a", "go")
    with pytest.raises(ProtocolError, match="no actor is called 'nobody'; there are: a"):
        InlineDriver(kernel).run()


def test_quiet_with_work_left_is_a_deadlock_that_names_who_waits() -> None:
    kernel = Kernel()
    kernel.register("a", Scripted(waiting=("for godot", "for rain")))
    kernel.register("b", Scripted())
    post(kernel, "b", "x", at=3.0)
    with pytest.raises(Deadlock) as error:
        InlineDriver(kernel).run()
    assert (error.value.time_ms, error.value.waiting) == (3.0, ("a: for godot", "a: for rain"))


def test_an_instant_that_never_ends_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_module, "MAX_TURNS_PER_INSTANT", 50)
    kernel = Kernel()
    kernel.register("spinner", Scripted({"go": lambda port: port.send_self("go", phase=0)}))
    post(kernel, "spinner", "go", at=4.0)
    with pytest.raises(ProtocolError, match=r"time stands still at 4\.0 ms.*spinner"):
        InlineDriver(kernel).run()


# -- effects and retries


class Tries:
    """Has no effect the first ``idle`` times, and asks to be called again."""

    def __init__(self, idle: int) -> None:
        self.idle = idle

    def receive(self, message: Any, port: Port) -> None:
        port.publish(Happened(f"try {self.idle} in round {port._kernel.round}"))
        if self.idle:
            self.idle -= 1
            port.no_effect()
            port.retry("again", phase=9)

    def waiting(self) -> tuple[str, ...]:
        return ()


def test_without_another_effect_a_retry_never_comes_back() -> None:
    kernel = Kernel()
    kernel.register("t", Tries(3))
    post(kernel, "t", "go", phase=9)
    assert said(kernel) == ["try 3 in round 0"]


def test_a_retry_comes_back_at_once_after_an_effect_in_its_own_phase() -> None:
    kernel = Kernel()
    kernel.register("t", Tries(1))
    kernel.register("a", Scripted())
    kernel.register("b", Scripted())
    for name in "tab":
        post(kernel, name, name, phase=9)
    assert said(kernel) == ["try 1 in round 0", "a", "try 0 in round 0", "b"]


def test_a_retry_comes_back_in_the_next_round_if_this_one_had_an_effect_else_at_the_next_instant() -> None:
    kernel = Kernel()
    kernel.register("t", Tries(3))
    kernel.register("a", Scripted())
    post(kernel, "a", "effect", phase=1)
    post(kernel, "t", "go", phase=9)
    post(kernel, "a", "later", phase=1, at=1.0)
    assert said(kernel) == [
        *["effect", "try 3 in round 0", "try 2 in round 1"],
        *["later", "try 1 in round 0", "try 0 in round 1"],
    ]


def test_instants_without_an_effect_are_not_observed() -> None:
    kernel = Kernel()
    kernel.register("t", Tries(1))
    kernel.register("a", Scripted())
    post(kernel, "t", "go", phase=9, at=1.0)
    post(kernel, "a", "x", at=2.0)
    seen: list[Sequence[float]] = []
    kernel.observe_instants(seen.append)
    InlineDriver(kernel).run()
    kernel.tell_instants()
    assert seen == [[0.0, 2.0]]


# -- subscriptions


class Reader:
    """Drains its inbox whenever it is called."""

    inbox: Any

    def receive(self, message: Any, port: Port) -> None:
        got = tuple(record.event.what for record in self.inbox.drain())
        self.got.append((port.now_ms, message, got))

    def __init__(self) -> None:
        self.got: list[tuple[float, Any, Any]] = []

    def waiting(self) -> tuple[str, ...]:
        return ()


def test_a_subscription_that_does_not_wake_waits_in_the_inbox() -> None:
    kernel = Kernel()
    reader = Reader()
    kernel.register("a", Scripted())
    kernel.register("r", reader)
    reader.inbox = kernel.subscribe("r", [Happened], lag_ms=10.0)
    for at in (0.0, 5.0):
        post(kernel, "a", at, at=at)
    for at in (9.0, 10.0, 20.0):
        post(kernel, "r", "look", at=at)
    InlineDriver(kernel).run()
    assert reader.got == [(9.0, "look", ()), (10.0, "look", (0.0,)), (20.0, "look", (5.0,))]


def test_a_waking_subscription_wakes_once_for_all_records_of_an_instant() -> None:
    kernel = Kernel()
    reader = Reader()
    kernel.register("a", Scripted())
    kernel.register("r", reader)
    reader.inbox = kernel.subscribe("r", [Happened], wake_message="wake", wake_phase=3)
    for message, at in (("x", 0.0), ("y", 0.0), ("z", 1.0)):
        post(kernel, "a", message, at=at)
    InlineDriver(kernel).run()
    assert reader.got == [(0.0, "wake", ("x", "y")), (1.0, "wake", ("z",))]
    with pytest.raises(ProtocolError, match="lag_ms"):
        kernel.subscribe("r", [Happened], lag_ms=-1.0)


# -- drivers


class Asker:
    """Asks others as its plan says, as a generator or as a coroutine, and publishes the replies."""

    def __init__(self, name: str, plan: dict[int, list[str]], as_coroutine: bool) -> None:
        self.name = name
        self.plan = plan
        self.as_coroutine = as_coroutine

    def receive(self, message: int, port: Port) -> Any:
        return self._coroutine(message, port) if self.as_coroutine else self._generator(message, port)

    def _generator(self, message: int, port: Port) -> Any:
        for target in self.plan.get(message, ()):
            reply = yield Ask(target, message + 1)
            port.publish(Happened((self.name, message, reply)))
        return f"{self.name}{message}"

    async def _coroutine(self, message: int, port: Port) -> Any:
        for target in self.plan.get(message, ()):
            reply = await port.ask(target, message + 1)
            port.publish(Happened((self.name, message, reply)))
        return f"{self.name}{message}"

    def waiting(self) -> tuple[str, ...]:
        return ()


@settings(max_examples=60, deadline=None)
@given(
    plans=st.lists(
        st.dictionaries(st.integers(0, 3), st.lists(st.integers(1, 3), max_size=3), max_size=4), min_size=4, max_size=4
    ),
    starts=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=6),
    coroutines=st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_both_drivers_give_the_same_turns_for_any_actors(
    plans: list[dict[int, list[int]]], starts: list[tuple[int, int, int]], coroutines: list[bool]
) -> None:
    """Asks go to actors further down, so there is no circle."""
    results = []
    for driver in DRIVERS:
        kernel = Kernel()
        for idx, plan in enumerate(plans):
            targets = {
                message: [f"a{idx + step}" for step in steps if idx + step < 4] for message, steps in plan.items()
            }
            kernel.register(f"a{idx}", Asker(f"a{idx}", targets, coroutines[idx]))
        for idx, message, at in starts:
            post(kernel, f"a{idx}", message, at=float(at))
        record = record_of(kernel)
        driver(kernel).run()
        results.append(record)
    assert results[0] == results[1]


@pytest.mark.parametrize("driver", DRIVERS)
def test_asking_in_a_circle_is_refused_by_name(driver: Any) -> None:
    for plans in ({"a": {0: ["b"]}, "b": {1: ["a"]}}, {"a": {0: ["a"]}, "b": {}}):
        kernel = Kernel()
        for name, plan in plans.items():
            kernel.register(name, Asker(name, plan, False))
        post(kernel, "a", 0)
        with pytest.raises(ProtocolError, match="asks a, which is in the middle of a turn"):
            driver(kernel).run()


class Sleeper:
    async def receive(self, message: Any, port: Port) -> None:
        await trio.sleep(1)

    def waiting(self) -> tuple[str, ...]:
        return ()


@pytest.mark.parametrize("driver", DRIVERS)
def test_an_actor_that_waits_on_anything_but_the_bus_is_refused_by_name_and_time(driver: Any) -> None:
    kernel = Kernel()
    kernel.register("lazy", Sleeper())
    post(kernel, "lazy", 1, at=7.0)
    with pytest.raises((ProtocolError, RuntimeError)) as error:
        driver(kernel).run()
    if driver is TrioDriver:
        assert "lazy waits on something that is not the bus" in str(error.value)
        assert "at 7.0 ms" in str(error.value)


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("asked", [False, True])
def test_an_exception_in_an_actor_reaches_the_caller_as_it_is(driver: Any, asked: bool) -> None:
    def fail(_: Port) -> None:
        raise ZeroDivisionError("boom")

    kernel = Kernel()
    kernel.register("a", Asker("a", {0: ["f"]}, False))
    kernel.register("f", Scripted({0: fail, 1: fail}))
    post(kernel, "a" if asked else "f", 0)
    with pytest.raises(ZeroDivisionError, match="boom"):
        driver(kernel).run()


def test_two_runs_one_after_the_other_start_at_zero() -> None:
    for _ in range(2):
        kernel = Kernel()
        kernel.register("a", Scripted())
        post(kernel, "a", "x", at=1e6)
        out = record_of(kernel)
        TrioDriver(kernel).run()
        assert out == [(1e6, "a", "x")]


@pytest.mark.trio
async def test_a_run_can_join_a_trio_loop_that_is_there() -> None:
    kernel = Kernel()
    kernel.register("a", Asker("a", {0: ["b"]}, True))
    kernel.register("b", Asker("b", {}, False))
    post(kernel, "a", 0)
    out = record_of(kernel)
    await TrioDriver(kernel).run_async()
    assert out == [(0.0, "a", ("a", 0, "b1"))]


def test_a_lost_wake_up_ends_the_run_with_an_error_and_not_never(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel()
    kernel.register("a", Scripted())
    kernel.register("b", Scripted())
    post(kernel, "a", "x", at=1.0)
    post(kernel, "b", "y", at=2.0)
    wake = Handoff.wake

    def drop_second(self: Handoff, value: Any) -> None:
        if self.name != "b" or getattr(value, "message", None) != "y":
            wake(self, value)

    monkeypatch.setattr(Handoff, "wake", drop_second)
    with pytest.raises(ProtocolError, match=r"b has the turn at 2\.0 ms, but nothing is runnable"):
        TrioDriver(kernel).run()


@pytest.mark.trio
async def test_a_handoff_allows_one_park_and_one_wake() -> None:
    handoff = Handoff("h")
    with pytest.raises(ProtocolError, match="nobody is parked"):
        handoff.wake(1)
    got: list[Any] = []

    async def parked() -> None:
        got.append(await handoff.park())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(parked)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(ProtocolError, match="two tasks park"):
            await handoff.park()
        handoff.wake("value")
        with pytest.raises(ProtocolError, match="a second wake"):
            handoff.wake("twice")
    assert got == ["value"]


# -- random streams


def test_a_stream_depends_on_seed_and_name_alone() -> None:
    def draws(seed: int, name: str) -> list[float]:
        stream = RandomStream(seed, name)
        return [stream.unit() for _ in range(4)] + [float(stream.below(1000))]

    assert draws(7, "router:ties") == draws(7, "router:ties")
    assert len({tuple(draws(seed, name)) for seed in (7, 8) for name in ("a:x", "b:x", "a:y")}) == 6
    stream = RandomStream(7, "router:ties")
    stream.unit()
    stream.below(3)
    assert stream.draws == 2
    code = "from g2sim.bus.streams import RandomStream as R; print(R(7, 'a:x').unit())"
    told = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "random")
    }
    assert told == {f"{RandomStream(7, 'a:x').unit()}\n"}
