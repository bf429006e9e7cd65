"""The drivers: what an actor may not do, what is noticed when the machinery fails, and that both do the same."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from typing import Any

import attrs
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from g2sim.bus.drivers import InlineDriver, TrioDriver
from g2sim.bus.errors import Deadlock, ProtocolError
from g2sim.bus.events import Record
from g2sim.bus.handoff import Handoff
from g2sim.bus.kernel import Ask, Kernel, Port

Driver = type[TrioDriver] | type[InlineDriver]
both = pytest.mark.parametrize("driver", [TrioDriver, InlineDriver])
patient = settings(deadline=None)  # the machine is shared


class Boom(Exception):
    pass


@attrs.frozen
class Noted:
    """An event. The bus takes any class; only the log wants registered ones."""

    text: str


class Actor:
    """An actor that is one function."""

    def __init__(self, receive: Callable[[Any, Port], Any], waiting: Sequence[str] = ()) -> None:
        self._receive = receive
        self._waiting = waiting

    def receive(self, message: Any, port: Port) -> Any:
        return self._receive(message, port)

    def waiting(self) -> Sequence[str]:
        return self._waiting


def bus(**receives: Callable[[Any, Port], Any]) -> Kernel:
    """A kernel with actors called like the keywords; the first one gets the message "go" at 2.5 ms."""
    kernel = Kernel()
    for name, receive in receives.items():
        kernel.register(name, Actor(receive))
    kernel.post(kernel.slots[0], "go", 0, 2.5)
    return kernel


def asks(target: str) -> Callable[[Any, Port], Any]:
    async def receive(message: Any, port: Port) -> Any:
        return await port.ask(target, message)

    return receive


def nothing(message: Any, port: Port) -> None:
    pass


# ---- refusals ----


@both
def test_an_actor_that_asks_itself_is_refused_by_name(driver: Driver) -> None:
    with pytest.raises(ProtocolError, match="a asks a, which is in the middle of a turn of its own"):
        driver(bus(a=asks("a"))).run()


@both
def test_a_cycle_of_asks_is_refused_with_the_names_of_the_pair_that_closes_it(driver: Driver) -> None:
    with pytest.raises(ProtocolError, match="c asks a, which is in the middle of a turn of its own"):
        driver(bus(a=asks("b"), b=asks("c"), c=asks("a"))).run()


@both
def test_asking_an_unknown_actor_is_refused_with_the_known_ones(driver: Driver) -> None:
    with pytest.raises(ProtocolError, match="no actor is called 'z'; there are: a, b"):
        driver(bus(a=asks("z"), b=nothing)).run()


@both
def test_a_generator_that_yields_anything_but_a_question_is_refused(driver: Driver) -> None:
    def receive(message: Any, port: Port) -> Generator[Any, Any, None]:
        yield "not a question"

    with pytest.raises(ProtocolError, match=r"a waits on something that is not the bus \(str\) at 2\.5 ms"):
        driver(bus(a=receive)).run()


@pytest.fixture
def complaints(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[str]]]:
    """Collects garbage, and gives what the interpreter printed about things that could not end properly."""
    heard: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda about: heard.append(repr(about.exc_value)))

    def collect() -> list[str]:
        gc.collect()
        return heard

    yield collect
    gc.collect()


WAITS: dict[str, Callable[[], Awaitable[Any]]] = {
    "sleep": lambda: trio.sleep(1),
    "sleep of nothing": lambda: trio.sleep(0),
    "sleep of almost nothing": lambda: trio.sleep(1e-9),
    "deadline that is now": lambda: trio.sleep_until(trio.current_time()),
    "sleep for ever": lambda: trio.sleep_forever(),
    "event": lambda: trio.Event().wait(),
    "checkpoint": lambda: trio.lowlevel.checkpoint(),
    "thread": lambda: trio.to_thread.run_sync(int),
}


waits = pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS.keys())


def waiting_bus(wait: Callable[[], Awaitable[Any]]) -> Kernel:
    async def receive(message: Any, port: Port) -> None:
        await wait()

    return bus(a=asks("sleeper"), sleeper=receive)


@waits
def test_an_actor_that_waits_on_trio_is_refused_with_its_name_and_the_time(
    wait: Callable[[], Awaitable[Any]], complaints: Callable[[], list[str]]
) -> None:
    """F87: sleeps and threads neither hold the clock nor let it jump: they end the run, in its own turn or asked."""
    message = r"^sleeper waits on something that is not the bus .* at 2\.5 ms"
    with pytest.raises(ProtocolError, match=message):
        TrioDriver(waiting_bus(wait)).run()
    kernel = waiting_bus(wait)
    kernel.post(kernel.slot("sleeper"), "go", -1, 2.5)
    with pytest.raises(ProtocolError, match=message):
        TrioDriver(kernel).run()


@pytest.mark.parametrize(
    "wait",
    [pytest.param(wait, id=name) for name, wait in WAITS.items()],
)
def test_a_turn_that_is_refused_is_closed_in_its_own_task(
    wait: Callable[[], Awaitable[Any]], complaints: Callable[[], list[str]]
) -> None:
    """Left to the garbage collector, a half-finished trio.sleep makes the interpreter complain on stderr."""
    with pytest.raises(ProtocolError):
        TrioDriver(waiting_bus(wait)).run()
    assert complaints() == []


@both
@pytest.mark.parametrize("kind", [Boom, ValueError, RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["turn", "generator", "coroutine", "asked", "asked twice over"])
def test_an_error_in_an_actor_reaches_the_caller_as_it_is(
    driver: Driver, where: str, kind: type[BaseException]
) -> None:
    """Not wrapped, not in a group, whether raised in a plain turn, after an answer, or in an asked turn."""
    error = kind("bad")

    def fails(message: Any, port: Port) -> None:
        raise error

    def fails_as_generator(message: Any, port: Port) -> Generator[Ask, Any, None]:
        yield from port.ask("b", "?")
        raise error

    async def fails_as_coroutine(message: Any, port: Port) -> None:
        await port.ask("b", "?")
        raise error

    kernel = {
        "turn": bus(a=fails),
        "generator": bus(a=fails_as_generator, b=nothing),
        "coroutine": bus(a=fails_as_coroutine, b=nothing),
        "asked": bus(a=asks("b"), b=fails),
        "asked twice over": bus(a=asks("b"), b=asks("c"), c=fails),
    }[where]
    with pytest.raises(kind) as caught:
        driver(kernel).run()
    assert caught.value is error
    assert kernel.now_ms == 2.5


@both
def test_an_error_of_the_kernel_reaches_the_caller_too(driver: Driver) -> None:
    kernel = bus(a=nothing)
    kernel.register("b", Actor(nothing, waiting=["a seat"]))
    with pytest.raises(Deadlock, match="b: a seat"):
        driver(kernel).run()


@both
def test_an_error_of_a_sink_reaches_the_caller_too(driver: Driver) -> None:
    def full(record: Record) -> None:
        raise Boom("disk full")

    kernel = bus(a=lambda message, port: port.publish(Noted("x")))
    kernel.add_sink(full)
    with pytest.raises(Boom, match="disk full"):
        driver(kernel).run()


# ---- hand-offs ----


@pytest.mark.trio
async def test_waking_when_nobody_is_parked_is_refused() -> None:
    handoff = Handoff("door")
    with pytest.raises(ProtocolError, match="door: woken, but nobody is parked"):
        handoff.wake(1)
    with pytest.raises(ProtocolError, match="door: woken, but nobody is parked"):
        handoff.fail(Boom())


@pytest.mark.trio
async def test_a_second_wake_for_one_park_is_refused_and_the_first_one_holds() -> None:
    handoff = Handoff("door")
    got: list[Any] = []

    async def wait() -> None:
        got.append(await handoff.park())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        handoff.wake(1)
        with pytest.raises(ProtocolError, match="door: woken, but nobody is parked"):
            handoff.wake(2)
        with pytest.raises(ProtocolError, match="door: woken, but nobody is parked"):
            handoff.fail(Boom())
    assert got == [1]


@pytest.mark.trio
async def test_a_second_park_is_refused_and_the_first_one_holds() -> None:
    handoff = Handoff("door")
    got: list[Any] = []

    async def wait() -> None:
        got.append(await handoff.park())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(ProtocolError, match="door: two tasks park on one hand-off"):
            await handoff.park()
        assert handoff.parked
        handoff.wake(1)
    assert got == [1]


@pytest.mark.trio
async def test_each_park_gets_the_value_or_the_error_of_its_own_wake() -> None:
    handoff = Handoff("door")
    got: list[Any] = []

    async def wait() -> None:
        got.append(await handoff.park())
        with pytest.raises(Boom):
            await handoff.park()
        got.append(await handoff.park())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        for act in (lambda: handoff.wake(1), lambda: handoff.fail(Boom()), lambda: handoff.wake(None)):
            await trio.testing.wait_all_tasks_blocked()
            act()
    assert got == [1, None]
    assert not handoff.parked


@pytest.mark.trio
async def test_a_cancelled_park_leaves_the_hand_off_free() -> None:
    handoff = Handoff("door")
    with trio.CancelScope() as scope:
        scope.cancel()
        await handoff.park()
    assert scope.cancelled_caught
    assert not handoff.parked
    with pytest.raises(ProtocolError, match="nobody is parked"):
        handoff.wake(1)


# ---- lost wake-ups ----

LOST = """
import os, sys
from g2sim.bus.clock import VirtualClock
from g2sim.bus.drivers import TrioDriver
from g2sim.bus.errors import ProtocolError
from g2sim.bus.handoff import Handoff
from g2sim.bus.kernel import Kernel

class Actor:
    def __init__(self, receive):
        self.receive = receive
    def waiting(self):
        return ()

async def first(message, port):
    await port.ask("second", "?")
    port.send("third", "go", phase=0, at_ms=5.0)

kernel = Kernel()
for name, receive in (("first", first), ("second", lambda m, p: 1), ("third", lambda m, p: None)):
    kernel.register(name, Actor(receive))
kernel.post(kernel.slot("first"), "go", 0, 2.5)

dropped, wakes, stalls = int(sys.argv[1]), 0, 0
real_wake, real_sleep = Handoff.wake, VirtualClock.deadline_to_sleep_time

def wake(self, value):
    global wakes
    wakes += 1
    if wakes != dropped:
        real_wake(self, value)

def deadline_to_sleep_time(self, deadline):
    global stalls
    stalls += 1
    if stalls > 100:
        print("hangs", flush=True)
        os._exit(3)
    return real_sleep(self, deadline)

Handoff.wake, VirtualClock.deadline_to_sleep_time = wake, deadline_to_sleep_time
try:
    TrioDriver(kernel).run()
    print(f"finished after {wakes} wakes")
except ProtocolError as error:
    print(error)
"""


def with_a_lost_wake(number: int) -> str:
    """What a little run comes to in which one wake-up gets lost; a run that hangs says so."""
    done = subprocess.run(
        [sys.executable, "-c", LOST, str(number)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stderr == ""
    return done.stdout.strip()


LOST_WAKES = {
    1: ("the first turn", "first", "2.5"),
    2: ("the next turn", "third", "5.0"),
    3: ("the end", None, "5.0"),
    4: ("the first stop", None, "5.0"),
    5: ("the second stop", None, "5.0"),
    6: ("the last stop", None, "5.0"),
}


def test_the_little_run_has_as_many_wake_ups_as_the_next_test_loses() -> None:
    assert with_a_lost_wake(0) == f"finished after {len(LOST_WAKES)} wakes"


@pytest.mark.parametrize(
    "number",
    [pytest.param(number, id=what) for number, (what, _, _) in LOST_WAKES.items()],
)
def test_a_lost_wake_up_ends_the_run_with_an_error_and_no_hang(number: int) -> None:
    """Whichever it is; the error gives the time, and the actor that has the turn if there is one."""
    _, actor, time_ms = LOST_WAKES[number]
    said = with_a_lost_wake(number)
    assert f"{time_ms} ms" in said
    assert "a wake-up was lost" in said
    if actor is not None:
        assert said.startswith(f"{actor} has the turn")


# ---- what runs give ----


@both
def test_questions_may_nest_and_answers_come_back_in_every_style(driver: Driver) -> None:
    answers: list[Any] = []

    async def top(message: Any, port: Port) -> None:
        answers.append(await port.ask("middle", 1))
        answers.append(await port.ask("middle", 10))

    def middle(message: int, port: Port) -> Generator[Ask, Any, int]:
        left = yield from port.ask("bottom", message)
        right = yield Ask("bottom", message + 1)
        return left + right

    driver(bus(top=top, middle=middle, bottom=lambda message, port: message * 100)).run()
    assert answers == [300, 2100]


@both
def test_everything_an_asked_turn_publishes_belongs_to_the_turn_of_the_asker(driver: Driver) -> None:
    records: list[Record] = []

    async def top(message: Any, port: Port) -> None:
        port.publish(Noted("before"))
        await port.ask("bottom", "?")
        port.publish(Noted("after"))

    kernel = bus(top=top, bottom=lambda message, port: port.publish(Noted("asked")))
    kernel.add_sink(records.append)
    driver(kernel).run()
    assert records == [
        Record(2.5, source, 0, Noted(text))
        for source, text in (("top", "before"), ("bottom", "asked"), ("top", "after"))
    ]
    assert kernel.turn_idx == 1


class QuietActor(Actor):
    """Messages that are numbers wake nobody."""

    quiet = frozenset({int})


def test_quiet_turns_are_those_of_their_actor_and_wake_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    woken: list[str] = []
    wake = Handoff.wake
    monkeypatch.setattr(Handoff, "wake", lambda self, value: (woken.append(self.name), wake(self, value))[1])
    told: list[tuple[str, Any]] = []

    def count(message: Any, port: Port) -> Generator[Ask, Any, None]:
        told.append(("counter", message))
        if message != "stop":
            yield Ask("other", "?")
            port.send("counter", message + 1 if message < 3 else "stop", phase=0, at_ms=port.now_ms + 1.0)

    def begin(message: Any, port: Port) -> None:
        if message == "go":
            port.send("counter", 1, phase=0)

    kernel = bus(other=begin)
    kernel.register("counter", QuietActor(count))
    TrioDriver(kernel).run()
    assert told == [("counter", 1), ("counter", 2), ("counter", 3), ("counter", "stop")]
    assert woken == ["other", "counter", "driver", "other", "counter"]
    assert (kernel.now_ms, kernel.turn_idx) == (5.5, 5)


def test_a_quiet_turn_that_waits_on_trio_is_refused_like_any_other() -> None:
    async def receive(message: Any, port: Port) -> None:
        await trio.sleep(1)

    kernel = bus(a=lambda message, port: port.send("b", 1, phase=0))
    kernel.register("b", QuietActor(receive))
    with pytest.raises(ProtocolError, match="b waits on something that is not the bus"):
        TrioDriver(kernel).run()


@both
def test_the_second_of_two_runs_in_one_process_starts_at_zero(driver: Driver) -> None:
    """F87: nothing of the first run's time is left, neither on the bus nor in trio."""
    for _ in range(2):
        times: list[Any] = []

        def receive(message: Any, port: Port, times: list[Any] = times) -> None:
            times.append((port.now_ms, trio.current_time() if driver is TrioDriver else None))

        kernel = bus(a=receive)
        kernel.post(kernel.slot("a"), "at once", 0, 0.0)
        assert kernel.now_ms == 0.0
        driver(kernel).run()
        assert times == ([(0.0, 0.0), (2.5, 0.0025)] if driver is TrioDriver else [(0.0, None), (2.5, None)])


@pytest.mark.trio
async def test_a_bus_runs_inside_a_loop_that_is_there_already_and_beside_other_tasks() -> None:
    """On that loop's own clock: an hour of virtual time takes none of it."""
    times: list[float] = []
    others: list[int] = []

    def receive(message: Any, port: Port) -> None:
        times.append(port.now_ms)
        if len(times) < 50:
            port.send_self("more", phase=0, at_ms=port.now_ms + 3_600_000.0)

    async def other() -> None:
        for number in range(20):
            others.append(number)
            await trio.lowlevel.checkpoint()

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(other)
            nursery.start_soon(TrioDriver(bus(a=receive)).run_async)
    assert len(times) == 50
    assert others == list(range(20))


@pytest.mark.trio
async def test_an_error_comes_out_of_a_loop_that_is_there_already_as_it_is() -> None:
    def receive(message: Any, port: Port) -> None:
        raise Boom("bad")

    with pytest.raises(Boom, match="bad"):
        await TrioDriver(bus(a=receive, b=nothing)).run_async()


@pytest.mark.trio
async def test_cancelling_a_run_from_outside_ends_all_its_tasks() -> None:
    tasks = trio.lowlevel.current_statistics().tasks_living
    with trio.CancelScope() as scope:

        def receive(message: Any, port: Port) -> None:
            scope.cancel()
            port.send("b", "more", phase=0)

        def back(message: Any, port: Port) -> None:
            port.send("a", "more", phase=0, at_ms=port.now_ms + 1.0)

        await TrioDriver(bus(a=receive, b=back)).run_async()
    assert scope.cancelled_caught
    assert trio.lowlevel.current_statistics().tasks_living == tasks


def test_ctrl_c_at_any_moment_ends_a_run_with_keyboard_interrupt() -> None:
    """Also when trio has to put it off and hand it to its main task, as it does inside its own code."""

    @trio.lowlevel.enable_ki_protection
    def interrupted(message: Any, port: Port) -> None:
        signal.raise_signal(signal.SIGINT)
        port.send("b", "go", phase=0)

    def on_and_on(message: Any, port: Port) -> None:
        port.send(
            "c" if message == "go" else "b", "more" if message == "go" else "go", phase=0, at_ms=port.now_ms + 1.0
        )

    kernel = bus(a=interrupted, b=on_and_on, c=on_and_on)
    kernel.time_limit_ms = 1e5
    with pytest.raises(KeyboardInterrupt):
        TrioDriver(kernel).run()
    assert not kernel.stopped_at_limit


@pytest.mark.parametrize("parks", range(1, 6))
def test_ctrl_c_between_turns_ends_a_run_with_keyboard_interrupt(monkeypatch: pytest.MonkeyPatch, parks: int) -> None:
    seen = 0
    park = Handoff.park

    async def interrupted(handoff: Handoff) -> Any:
        nonlocal seen
        seen += handoff.name != "driver"
        if seen == parks:
            seen += 1
            signal.raise_signal(signal.SIGINT)
        return await park(handoff)

    def to_and_fro(message: str, port: Port) -> None:
        port.send("a" if message == "b" else "b", "a" if message == "b" else "b", phase=0, at_ms=port.now_ms + 1.0)

    kernel = bus(a=to_and_fro, b=to_and_fro)
    kernel.time_limit_ms = 1e5
    monkeypatch.setattr(Handoff, "park", interrupted)
    with pytest.raises(KeyboardInterrupt):
        TrioDriver(kernel).run()
    assert not kernel.stopped_at_limit


# ---- both drivers do the same ----


@attrs.frozen
class Step:
    """One thing an actor does. What is asked of an actor that cannot ask is left out."""

    kind: str
    to: int = 0
    phase: int = 0
    delay_ms: float = 0.0
    program: tuple[Step, ...] = ()


SIMPLE = st.builds(Step, kind=st.sampled_from(["publish", "draw", "no_effect", "retry"]), phase=st.integers(0, 2))
LEAVES = st.lists(SIMPLE, max_size=2).map(tuple)


def linked(inner: st.SearchStrategy[tuple[Step, ...]]) -> st.SearchStrategy[tuple[Step, ...]]:
    link = st.builds(
        Step,
        kind=st.sampled_from(["send", "ask", "ask"]),
        to=st.integers(0, 4),
        phase=st.integers(0, 2),
        delay_ms=st.sampled_from([0.0, 0.0, 0.25, 1.0]),
        program=inner,
    )
    return st.lists(st.one_of(SIMPLE, link), max_size=4).map(tuple)


PROGRAMS = st.recursive(LEAVES, linked, max_leaves=12)


class Machine:
    """An actor that does what messages say, in one of the three styles."""

    def __init__(self, number: int, style: str) -> None:
        self.number = number
        self.style = style
        self.total = 0
        self.retries = 3

    def waiting(self) -> Sequence[str]:
        return ()

    def receive(self, message: tuple[Step, ...], port: Port) -> Any:
        return {"plain": self._plain, "generator": self._generate, "coroutine": self._wait}[self.style](message, port)

    def _plain(self, message: tuple[Step, ...], port: Port) -> int:
        for step in message:
            self._do(step, port)
        return self.total

    def _generate(self, message: tuple[Step, ...], port: Port) -> Generator[Ask, Any, int]:
        for step in message:
            if self._may_ask(step):
                self.total += yield from port.ask(str(step.to), step.program)
            self._do(step, port)
        return self.total

    async def _wait(self, message: tuple[Step, ...], port: Port) -> int:
        for step in message:
            if self._may_ask(step):
                self.total += await port.ask(str(step.to), step.program)
            self._do(step, port)
        return self.total

    def _may_ask(self, step: Step) -> bool:
        """Questions only go up, so that there is no cycle of them."""
        return step.kind == "ask" and step.to > self.number

    def _do(self, step: Step, port: Port) -> None:
        self.total += 1
        if step.kind == "draw":
            self.total += port.stream("dice").below(1000)
        elif step.kind == "no_effect":
            port.no_effect()
        elif step.kind == "retry" and self.retries:
            self.retries -= 1
            port.no_effect()
            port.retry((Step("publish"),), phase=step.phase)
        elif step.kind == "send":
            port.send(str(step.to), step.program, phase=step.phase, at_ms=port.now_ms + step.delay_ms)
        else:
            port.publish(Noted(f"{step.kind} {self.total}"))


def outcome(driver: Driver, styles: Sequence[str], starts: Sequence[tuple[int, tuple[Step, ...]]]) -> Any:
    kernel = Kernel(seed=3)
    records: list[Record] = []
    instants: list[Sequence[float]] = []
    kernel.add_sink(records.append)
    kernel.observe_instants(instants.append)
    for number, style in enumerate(styles):
        kernel.register(str(number), Machine(number, style))
    listener = kernel.subscribe("0", [Noted], lag_ms=0.25, wake_message=(Step("draw"),), wake_phase=1)
    for to, program in starts:
        kernel.post(kernel.slot(str(to)), program, 0, 0.0)
    kernel.time_limit_ms = 5.0
    driver(kernel).run()
    kernel.tell_instants()
    draws = {name: (stream.draws, stream.fingerprint()) for name, stream in kernel.streams.items()}
    left = len(listener.drain())
    totals = [slot.actor.total for slot in kernel.slots]  # type: ignore[attr-defined]
    return records, instants, kernel.turn_idx, kernel.now_ms, draws, left, totals


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.sampled_from(["plain", "generator", "coroutine"]), min_size=5, max_size=5),
    st.lists(st.tuples(st.integers(0, 4), PROGRAMS), min_size=1, max_size=4),
)
def test_both_drivers_give_any_little_system_the_same_records(
    styles: list[str], starts: list[tuple[int, tuple[Step, ...]]]
) -> None:
    """And the same turns, times, instants, draws and answers, whatever order trio runs its tasks in."""
    assert outcome(TrioDriver, styles, starts) == outcome(InlineDriver, styles, starts)


def test_the_style_in_which_an_actor_is_written_does_not_show() -> None:
    """A generator and a coroutine that do the same give the same records."""
    program = (Step("publish"), Step("ask", to=3, program=(Step("draw"), Step("publish"))), Step("publish"))
    seen = [
        outcome(driver, [style] * 5, [(0, program)])
        for driver in (TrioDriver, InlineDriver)
        for style in ("generator", "coroutine")
    ]
    assert all(one == seen[0] for one in seen)
    assert [record.source for record in seen[0][0]][:3] == ["0", "3", "0"]
