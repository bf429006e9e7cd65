"""The kernel of the bus: what happens next, and who hears of it.

Owns: virtual time, the heap of envelopes and their order, turns, subscriptions, random streams, the end of a run.
Refuses to know: trio (see ``drivers``), files (sinks get records), and anything about LLMs.

Order. Envelopes are taken by ``(time_ms, round, phase, recipient, sequence)``. Within one instant the phases are
drained in order; an envelope for an earlier phase than the one at work belongs to the next *round* of the same
instant, so an instant is a loop over the phases that ends when a round brings nothing new. ``recipient`` is the actor's
place in the order of registration: a stable identity, so ties never depend on who happened to send first.

Effects. A turn has an effect unless it says otherwise (``Port.no_effect``). ``Port.retry`` parks a message until
something else happens: it comes back at once after an effect in its own phase, else in the next round, which begins if
this one had an effect or left a message for it, else at the next instant.

Deferred turns. An actor that knows its next turns, and that they concern nobody, may put them off (``Port.defer``).
They are taken together when somebody needs them: the actor itself, whoever reads the record in order, or whoever
recalls them, which a parked retry does. What they publish comes at its own time and place, before anything that is
published later.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Generator, Iterable, Sequence
from itertools import repeat
from typing import Any, Final, Protocol

from g2sim.bus.asking import answer_to
from g2sim.bus.errors import Deadlock, InvariantViolation, ProtocolError
from g2sim.bus.events import BY_CLASS, SIGNALS, Record, Row
from g2sim.bus.plain import Plain
from g2sim.bus.streams import RandomStream

_MAX_INSTANTS = 4096
"""Instants that wait to be told to observers; a bound on memory."""
MAX_TURNS_PER_INSTANT = 5_000_000
"""More turns than this at one instant is a loop that never lets time pass."""


class Ask(Plain):
    """Yielded by an actor's ``receive`` to run ``target``'s turn inside its own; the reply is sent back in."""

    __slots__ = ("message", "target")

    def __init__(self, target: str, message: Any) -> None:
        self.target: Final = target
        self.message: Final = message


Turn = Generator[Ask, Any, Any]


class _Resumable(dict[type[Any], bool]):
    def __missing__(self, cls: type[Any]) -> bool:
        found = self[cls] = issubclass(cls, (Generator, Coroutine))
        return found


RESUMABLE = _Resumable()
"""Type of what ``receive`` returns -> whether it is a turn that is not over yet. It is asked by what a type can do, as
each compiled generator has a type of its own."""


class Actor(Protocol):
    """A state machine on the bus.

    ``receive`` handles one message during one turn. It may be a plain function that returns the reply, a generator that
    yields ``Ask`` and returns the reply, or an ``async def`` that awaits ``port.ask``. It never waits on anything else.

    An actor may have an attribute ``quiet``: types of messages whose turns the bus runs without waking its task.
    """

    def receive(self, message: Any, port: Port) -> Turn | Any: ...

    def waiting(self) -> Sequence[str]:
        """One line for each thing this actor still waits for; empty when it is at rest."""
        ...


class Deferred(Protocol):
    """Turns that an actor has put off, all of them in first rounds of their instants."""

    def take(self) -> None:
        """Take those that would be over before the turn at work; see ``Port.has_passed``, ``Port.publish_late``."""
        ...

    def stop(self) -> None:
        """Go on by messages; called once, after ``take``."""
        ...


class Envelope:
    """A message on its way. ``live`` turns false when it is cancelled; it then counts as never sent."""

    __slots__ = ("live", "message", "phase", "slot", "time_ms")

    def __init__(self, slot: Slot, message: Any, time_ms: float, phase: int) -> None:
        self.slot = slot
        self.message = message
        self.time_ms = time_ms
        self.phase = phase
        self.live = True


class Slot:
    """An actor's place on the bus. ``quiet``: see ``Actor``."""

    __slots__ = ("actor", "in_turn", "name", "order", "port", "quiet")

    def __init__(self, name: str, order: int, actor: Actor, kernel: Kernel) -> None:
        self.name = name
        self.order = order
        self.actor = actor
        self.in_turn = False
        self.port = Port(kernel, self)
        self.quiet: frozenset[type[Any]] = getattr(actor, "quiet", frozenset())


class Listener(Protocol):
    """Takes records of some event types as they are published, in the turn of whoever publishes them."""

    def deliver(self, record: Record) -> None: ...


class Subscription:
    """Records of some event types on their way to one actor.

    They wait in an inbox until the actor drains it during a turn. A waking subscription also sends the actor a message
    at the time of delivery, one for all records that arrive at one (time, round).

    Attributes:
        silent: what is published from now on does not wake the actor, although the subscription has a wake phase.
    """

    __slots__ = ("_inbox", "_kernel", "_lag_ms", "_slot", "_wake_message", "_wake_phase", "_woken_for", "silent")

    def __init__(self, kernel: Kernel, slot: Slot, lag_ms: float, wake_message: Any, wake_phase: int | None) -> None:
        self._kernel = kernel
        self._slot = slot
        self._lag_ms = lag_ms
        self._wake_message = wake_message
        self._wake_phase = wake_phase
        self.silent = False
        self._woken_for: Envelope | None = None
        self._inbox: deque[tuple[float, Record]] = deque()

    def deliver(self, record: Record) -> None:
        due_ms = record.time_ms + self._lag_ms
        self._inbox.append((due_ms, record))
        if self._wake_phase is None or self.silent:
            return
        last = self._woken_for
        if last is None or last.time_ms != due_ms:
            self._woken_for = self._kernel.post(self._slot, self._wake_message, self._wake_phase, due_ms)

    def rouse(self) -> None:
        """End silence: a subscription with a wake phase wakes its actor for what is on its way, too."""
        self.silent = False
        if self._wake_phase is not None:
            for due_ms in dict.fromkeys(due_ms for due_ms, _ in self._inbox):
                self._woken_for = self._kernel.post(self._slot, self._wake_message, self._wake_phase, due_ms)

    @property
    def wakes(self) -> bool:
        """Whether its actor is sent a message when something arrives."""
        return self._wake_phase is not None

    def deliver_late(self, record: Record) -> None:
        """Take a record of a deferred turn, after which nothing has been delivered yet; for one that does not wake."""
        self._inbox.append((record.time_ms + self._lag_ms, record))

    def drain(self) -> list[Record]:
        """Every record that is due by now, in the order of publication."""
        if self._kernel.deferred:
            self._kernel.take_deferred()
        now_ms = self._kernel.now_ms
        inbox = self._inbox
        self._woken_for = None
        out = []
        while inbox and inbox[0][0] <= now_ms:
            out.append(inbox.popleft()[1])
        return out


class Port:
    """What an actor may do during its turn."""

    __slots__ = ("_kernel", "_slot")

    def __init__(self, kernel: Kernel, slot: Slot) -> None:
        self._kernel = kernel
        self._slot = slot

    @property
    def now_ms(self) -> float:
        return self._kernel.now_ms

    @property
    def phase(self) -> int:
        """The phase at work."""
        return self._kernel.phase

    def send(self, to: str, message: Any, *, phase: int, at_ms: float | None = None) -> Envelope:
        """Post a message for now or later.

        Raises: ProtocolError for an unknown actor, or a time that is past or infinite.
        """
        kernel = self._kernel
        return kernel.post(kernel.slot(to), message, phase, kernel.now_ms if at_ms is None else at_ms)

    def send_self(self, message: Any, *, phase: int, at_ms: float | None = None) -> Envelope:
        """Post a message to this actor."""
        kernel = self._kernel
        return kernel.post(self._slot, message, phase, kernel.now_ms if at_ms is None else at_ms)

    def cancel(self, envelope: Envelope) -> None:
        """Take a message back. Harmless when it was delivered already."""
        envelope.live = False

    def retry(self, message: Any, *, phase: int) -> None:
        """Get ``message`` again, in ``phase``, once something else has had an effect; this turn then has had none."""
        kernel = self._kernel
        if kernel.deferred:
            kernel.recall()
        kernel.turn_has_effect = False
        kernel.retries.append(Envelope(self._slot, message, kernel.now_ms, phase))

    def no_effect(self) -> None:
        """Declare that this turn changed nothing that others could see."""
        self._kernel.turn_has_effect = False

    def ask(self, to: str, message: Any) -> Turn:
        """Run another actor's turn inside this one: ``await port.ask(...)``, or ``yield from`` it in a generator."""
        return answer_to(Ask(to, message))

    def call(self, to: str, message: Any) -> Any:
        """``ask`` for a turn that is a plain function, of an actor whose ``receive`` is one for this message.

        Raises: ProtocolError if it is not, or if that actor is in the middle of a turn.
        """
        kernel, own = self._kernel, self._slot
        slot = kernel.slot(to)
        if slot.in_turn or slot is own:
            raise ProtocolError(f"{own.name} asks {to}, which is in the middle of a turn of its own")
        before, own.in_turn = own.in_turn, True
        try:
            reply = slot.actor.receive(message, slot.port)
        finally:
            own.in_turn = before
        if RESUMABLE[type(reply)]:
            reply.close()
            raise ProtocolError(
                f"{own.name} calls {to}, whose turn for a {type(message).__name__} is no plain function"
            )
        return reply

    def publish(self, event: Any) -> None:
        """Make an event part of the record, and hand it to its subscribers."""
        self._kernel.publish(self._slot.name, event)

    def hears(self, event_type: type[Any]) -> bool:
        """Whether anybody is handed events of this type; one that nobody hears need not be made."""
        return self._kernel.hearers[event_type].anybody

    def publish_values(self, event_type: type[Any], values: tuple[Any, ...]) -> None:
        """``publish`` for an event of a type in the record, given by its values in wire order.

        The event itself is made only if somebody wants more than its values, which the log does not.
        """
        self._kernel.publish_values(self._slot.name, event_type, values)

    def may_defer(self, *event_types: type[Any]) -> bool:
        """Whether turns may be put off that publish nothing but events of these types.

        Not while a retry is parked, as it looks at every instant, and not if somebody hears of them who must at once.
        """
        kernel = self._kernel
        return not kernel.retries and all(map(kernel.may_be_late, event_types))

    def defer(self, deferred: Deferred) -> None:
        """Put off turns, until they are recalled. To be called once ``may_defer`` has allowed it."""
        self._kernel.deferred[self._slot] = deferred

    @property
    def time_limit_ms(self) -> float:
        """The run does not move past this time."""
        limit_ms = self._kernel.time_limit_ms
        return math.inf if limit_ms is None else limit_ms

    def recall(self, but: Collection[str] = ()) -> None:
        """Let all actors take their deferred turns up to here, and those not named in ``but`` go on by messages."""
        if self._kernel.deferred:
            self._kernel.recall(but)

    def recall_own(self) -> None:
        """``recall`` for this actor."""
        kernel = self._kernel
        kernel.take_deferred()
        kernel.deferred.pop(self._slot).stop()

    def has_passed(self, phase: int, order: int | None = None) -> bool:
        """Whether a turn in that phase of the first round of this instant would be over by now.

        Args:
            order: of the actor whose turn it is; None for this one.
        """
        return self._kernel.round > 0 or self.is_before(phase, self._slot.order if order is None else order)

    def count_passed(self, times_ms: Sequence[float], phase: int, order: int, first: int = 0) -> int:
        """How many of these times, in order, are instants in whose first round a turn in that phase would be over.

        Args:
            order: of the actor whose turn it is.
            first: that many are known to be.
        """
        now_ms = self.now_ms
        stop = bisect_left(times_ms, now_ms, first)
        if stop < len(times_ms) and times_ms[stop] == now_ms and self.has_passed(phase, order):
            stop += 1
        return stop

    def is_before(self, phase: int, order: int) -> bool:
        """Whether a turn in that phase of this round, of the actor with that ``order``, would be over by now."""
        kernel = self._kernel
        return (phase, order) < (kernel.phase, kernel.at_work)

    @property
    def order(self) -> int:
        """This actor's place in the order of turns."""
        return self._slot.order

    @property
    def round(self) -> int:
        """The round of this instant."""
        return self._kernel.round

    @property
    def turn_idx(self) -> int:
        """The number of the turn at work."""
        return self._kernel.turn_idx

    def park_again(self, message: Any, phase: int) -> None:
        """Go on with retries that were put off: what ``retry`` would have come to by now."""
        kernel = self._kernel
        if self.is_before(phase, self._slot.order):
            kernel.retries.append(Envelope(self._slot, message, kernel.now_ms, phase))
        else:
            self.send_self(message, phase=phase)

    def publish_late(self, time_ms: float, phase: int, event: Any, order: int | None = None) -> None:
        """``publish`` for a deferred turn at that time, in that phase.

        Args:
            order: of the actor whose turn it is, which has asked this one; None for this one.
        """
        slot, late = self._slot, self._kernel.late
        turn_of = slot.order if order is None else order
        late.append((time_ms, phase, turn_of, len(late), slot.name, type(event), (), event, None))

    def publish_late_values(self, time_ms: float, phase: int, event_type: type[Any], values: tuple[Any, ...]) -> None:
        """``publish_values`` for a deferred turn at that time, in that phase."""
        slot, late = self._slot, self._kernel.late
        late.append((time_ms, phase, slot.order, len(late), slot.name, event_type, values, None, None))

    def publish_late_run(
        self,
        times_ms: Sequence[float],
        phase: int,
        event_type: type[Any],
        first: tuple[Any, ...],
        counted: int,
        floats: Sequence[tuple[int, Sequence[float]]] = (),
    ) -> None:
        """``publish_late_values`` for a run of deferred turns, one at each of these times, all in that phase.

        Args:
            first: the first event's values, which are those of all others too, but for what follows.
            counted: place of an integer in them that grows by one from event to event.
            floats: place of a float in them, and what stands there in each event; for any number of places.
        """
        slot, late = self._slot, self._kernel.late
        total = len(times_ms)
        if total == 1:
            self.publish_late_values(times_ms[0], phase, event_type, first)
            return
        columns: list[Iterable[Any]] = [repeat(value) for value in first]
        columns[counted] = range(first[counted], first[counted] + total)
        alike = _all_finite(times_ms)
        for place, column in floats:
            if len(column) != total:
                raise ProtocolError(f"{slot.name}: {len(column)} values for {total} events in place {place}")
            columns[place] = column
            alike = alike and (column is times_ms or _all_finite(column))
        late += zip(
            times_ms,
            repeat(phase),
            repeat(slot.order),
            range(len(late), len(late) + total),
            repeat(slot.name),
            repeat(event_type),
            zip(*columns, strict=False),
            repeat(None),
            repeat(_Run() if alike else None),
            strict=False,
        )

    def pass_instants(self, times_ms: Sequence[float]) -> None:
        """Say at which instants the deferred turns that are being taken have had an effect; in order, up to now."""
        self._kernel.pass_instants(times_ms)

    def stream(self, purpose: str) -> RandomStream:
        """This actor's random stream for one purpose."""
        return self._kernel.stream(f"{self._slot.name}:{purpose}")


class _Run:
    """Stands for a run of rows, see ``Row``."""

    __slots__ = ()


_FLOAT: frozenset[type[Any]] = frozenset({float})


def _all_finite(numbers: Sequence[float]) -> bool:
    """Whether they are finite floats, none of a subclass. Those whose sum is too large count as not finite."""
    return _FLOAT.issuperset(map(type, numbers)) and math.isfinite(sum(numbers))


Sink = Callable[[Record], None]
RowSink = Callable[[Sequence[Row]], None]
# A time as Any: compiled code would take the number out of its object, and make another one for the row.
_Late = tuple[Any, int, int, int, str, type[Any], tuple[Any, ...], Any, Any]
"""What a deferred turn publishes: time [ms], phase, order of its actor, a number that keeps the order within the turn,
source, type of the event, its values and None, or nothing and the event, and the run it is of (see ``Row``)."""
InstantObserver = Callable[[Sequence[float]], None]


class Hearers:
    """Who is handed events of one type.

    Attributes:
        row_sinks: they get its values.
        sinks: they get records: first sinks, then subscriptions, each in the order of addition.
        late_sinks: the same, as they take records of deferred turns.
        anybody: there is one of them.
        may_be_late: none of them has to hear of an event at once.
        after_late: one of them may be late, so that what deferred turns publish has to be told before.
        counted: a turn that publishes such an event counts as one that publishes, see ``Record``.
    """

    __slots__ = ("after_late", "anybody", "counted", "late_sinks", "may_be_late", "row_sinks", "sinks")

    def __init__(
        self,
        row_sinks: Sequence[RowSink],
        sinks: Sequence[tuple[Sink, bool]],
        listeners: Sequence[Listener],
        *,
        in_record: bool,
    ) -> None:
        self.row_sinks = tuple(row_sinks)
        subscriptions = [one for one in listeners if isinstance(one, Subscription)]
        patient = [one for one in subscriptions if not one.wakes]
        self.sinks: tuple[Sink, ...] = (*[sink for sink, _ in sinks], *[one.deliver for one in listeners])
        self.late_sinks: tuple[Sink, ...] = (*[sink for sink, _ in sinks], *[one.deliver_late for one in patient])
        self.anybody = bool(self.row_sinks or self.sinks)
        self.may_be_late = all(late for _, late in sinks) and len(patient) == len(listeners)
        self.after_late = bool(self.row_sinks or subscriptions) or any(late for _, late in sinks)
        # What a sink hears beside the record must not change the record.
        self.counted = in_record or bool(listeners)


class _HearersByType(dict[type[Any], Hearers]):
    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self._kernel = kernel

    def __missing__(self, event_type: type[Any]) -> Hearers:
        found = self[event_type] = self._kernel.find_hearers(event_type)
        return found


class Kernel:
    """Everything about a run that does not depend on how actors are executed.

    Args:
        seed: seed of all random streams.
        time_limit_ms: the run stops before it would move past this time; None = no limit.
    """

    def __init__(self, *, seed: int = 0, time_limit_ms: float | None = None) -> None:
        self.seed = seed
        self.time_limit_ms = time_limit_ms
        self.now_ms = 0.0
        self.phase = -1
        self.round = 0
        self.turn_idx = 0
        self.turn_has_effect = True
        self.stopped_at_limit = False
        self.retries: list[Envelope] = []
        self.deferred: dict[Slot, Deferred] = {}
        self.late: list[_Late] = []
        self.at_work = -1
        self.slots: list[Slot] = []
        self.streams: dict[str, RandomStream] = {}
        self._by_name: dict[str, Slot] = {}
        self._heap: list[tuple[float, int, int, int, int, Envelope]] = []
        self._sequence = 0
        self._round_had_effect = False
        self._instant_first_turn = 0
        self._last_effect_ms = 0.0
        self._instants: list[float] = []
        self._told_instant_ms = 0.0
        self._sinks: list[tuple[Sink, frozenset[type[Any]] | None, bool]] = []
        self._row_sinks: list[RowSink] = []
        self._turn_observers: list[Callable[[], None]] = []
        self._instant_observers: list[InstantObserver] = []
        self._subscriptions: dict[type[Any], list[Listener]] = {}
        self._cause = -1
        self._cause_turn = -1
        self._taken = False
        self.hearers = _HearersByType(self)

    # -- set-up

    def register(self, name: str, actor: Actor) -> Slot:
        """Add an actor. The order of registration decides ties within a phase."""
        if name in self._by_name:
            raise ProtocolError(f"two actors are called {name!r}")
        slot = Slot(name, len(self.slots), actor, self)
        self.slots.append(slot)
        self._by_name[name] = slot
        return slot

    def subscribe(
        self,
        name: str,
        event_types: Iterable[type[Any]],
        *,
        lag_ms: float = 0.0,
        wake_message: Any = None,
        wake_phase: int | None = None,
    ) -> Subscription:
        """Deliver events of these types to an actor, ``lag_ms`` after publication.

        With ``wake_phase`` the actor is also sent ``wake_message`` in that phase when something arrives.
        """
        if not lag_ms >= 0.0:
            raise ProtocolError(f"subscription of {name}: lag_ms is {lag_ms!r}, allowed: >= 0")
        subscription = Subscription(self, self.slot(name), lag_ms, wake_message, wake_phase)
        self.listen(event_types, subscription)
        return subscription

    def listen(self, event_types: Iterable[type[Any]], listener: Listener) -> None:
        """Hand events of these types to ``listener`` as they are published."""
        for cls in event_types:
            self._subscriptions.setdefault(cls, []).append(listener)
        self._forget_hearers()

    def add_sink(
        self, sink: Sink, event_types: Iterable[type[Any]] | None = None, *, may_be_late: bool = False
    ) -> None:
        """Hand every record but signals to ``sink``, in order; with ``event_types`` only events of these types.

        With ``may_be_late`` it may be handed records of deferred turns late, though before all later ones.
        """
        self._sinks.append((sink, None if event_types is None else frozenset(event_types), may_be_late))
        self._forget_hearers()

    def add_row_sink(self, sink: RowSink) -> None:
        """Hand every record but signals to ``sink`` as rows, in order, some at a time; those of deferred turns late."""
        self._row_sinks.append(sink)
        self._forget_hearers()

    def observe_turns(self, observer: Callable[[], None]) -> None:
        """Call ``observer`` after every turn but deferred ones. Observers change nothing."""
        self._turn_observers.append(observer)

    def observe_instants(self, observer: InstantObserver) -> None:
        """Call ``observer(times_ms)`` with the instants at which something has had an effect, in order.

        They are told some at a time, and late, and the first of each call is the last one of the call before; 0.0 comes
        first of all. ``tell_instants`` tells those that are left.
        """
        self._instant_observers.append(observer)

    def slot(self, name: str) -> Slot:
        try:
            return self._by_name[name]
        except KeyError:
            known = ", ".join(self._by_name)
            raise ProtocolError(f"no actor is called {name!r}; there are: {known}") from None

    def stream(self, name: str) -> RandomStream:
        found = self.streams.get(name)
        if found is None:
            found = self.streams[name] = RandomStream(self.seed, name)
        return found

    # -- during turns

    def post(self, slot: Slot, message: Any, phase: int, time_ms: float) -> Envelope:
        now_ms = self.now_ms
        if now_ms < time_ms < math.inf:
            round_idx = 0
        elif time_ms == now_ms:
            round_idx = self.round if phase >= self.phase else self.round + 1
        else:
            problem = f"message for {slot.name} at {time_ms!r} ms, but it is {now_ms!r} ms"
            raise ProtocolError(f"{problem}; allowed: that or a later, finite time")
        envelope = Envelope(slot, message, time_ms, phase)
        self._sequence = sequence = self._sequence + 1
        heapq.heappush(self._heap, (time_ms, round_idx, phase, slot.order, sequence, envelope))
        return envelope

    def publish(self, source: str, event: Any) -> None:
        hearers = self.hearers[type(event)]
        if hearers.anybody:
            self._begin_to_publish(hearers)
            if hearers.row_sinks:
                kind = type(event)
                self._hand_out_row(hearers, source, kind, BY_CLASS[kind].values(event))
            if hearers.sinks:
                record = Record(self.now_ms, source, self._cause, event)
                for hear in hearers.sinks:
                    hear(record)

    def publish_values(self, source: str, event_type: type[Any], values: tuple[Any, ...]) -> None:
        """See ``Port.publish_values``."""
        hearers = self.hearers[event_type]
        if hearers.anybody:
            self._begin_to_publish(hearers)
            if hearers.row_sinks:
                self._hand_out_row(hearers, source, event_type, values)
            if hearers.sinks:
                record = Record(self.now_ms, source, self._cause, BY_CLASS[event_type].build(values))
                for hear in hearers.sinks:
                    hear(record)

    def _begin_to_publish(self, hearers: Hearers) -> None:
        # Within one turn no more of them are over than when they were taken first.
        if self.late or (self.deferred and hearers.after_late and not self._taken):
            self.take_deferred()
        if self._cause_turn != self.turn_idx and hearers.counted:
            self._cause_turn = self.turn_idx
            self._cause += 1

    def _hand_out_row(self, hearers: Hearers, source: str, event_type: type[Any], values: tuple[Any, ...]) -> None:
        rows = ((self.now_ms, source, self._cause, event_type, values, None),)
        for take in hearers.row_sinks:
            take(rows)

    def find_hearers(self, event_type: type[Any]) -> Hearers:
        """Who is handed events of a type; ``hearers`` remembers it."""
        in_record = event_type not in SIGNALS
        sinks = [
            (sink, may_be_late)
            for sink, wanted, may_be_late in self._sinks
            if (in_record if wanted is None else event_type in wanted)
        ]
        listeners = self._subscriptions.get(event_type, ())
        return Hearers(self._row_sinks if in_record else (), sinks, listeners, in_record=in_record)

    def may_be_late(self, event_type: type[Any]) -> bool:
        """Whether none of those who hear events of a type has to hear of them at once."""
        return self.hearers[event_type].may_be_late

    # -- deferred turns

    def take_deferred(self) -> None:
        """Let actors take those of their deferred turns that would be over, and publish what comes of them."""
        self._taken = True
        for deferred in self.deferred.values():
            deferred.take()
        if not self.late:
            return
        late, self.late = self.late, []
        late.sort()
        rows: list[Row] = []
        cause = self._cause
        last_ms: Any = None
        last_phase, last_order, new_turn = -1, -1, False
        for time_ms, phase, order, _, source, event_type, values, event, run in late:
            hearers = self.hearers[event_type]
            if order != last_order or time_ms != last_ms or phase != last_phase:
                last_ms, last_phase, last_order = time_ms, phase, order
                new_turn = True
            if new_turn and hearers.counted:
                new_turn = False
                cause += 1
            if hearers.row_sinks:
                if event is not None:
                    values = BY_CLASS[event_type].values(event)
                rows.append((time_ms, source, cause, event_type, values, run))
            if hearers.late_sinks:
                if event is None:
                    event = BY_CLASS[event_type].build(values)
                record = Record(time_ms, source, cause, event)
                for hear in hearers.late_sinks:
                    hear(record)
        self._cause = cause
        self._cause_turn = -1
        if rows:
            for take in self._row_sinks:
                take(rows)

    def recall(self, but: Collection[str] = ()) -> None:
        """Let all actors take their deferred turns, and those not named in ``but`` go on by messages."""
        self.take_deferred()
        recalled = [(slot, one) for slot, one in self.deferred.items() if slot.name not in but]
        for slot, _ in recalled:
            del self.deferred[slot]
        for _, one in recalled:
            one.stop()

    def pass_instants(self, times_ms: Sequence[float]) -> None:
        """See ``Port.pass_instants``."""
        self._instants.extend(times_ms)
        if self.round == 0 and times_ms[-1] == self.now_ms:
            self._round_had_effect = True

    def tell_instants(self) -> None:
        """Tell observers of the instants up to now that they have not been told of; during a turn, or after the run."""
        self.take_deferred()
        told_ms = self._told_instant_ms
        times_ms = [told_ms, *sorted({time_ms for time_ms in self._instants if time_ms > told_ms})]
        self._instants.clear()
        self._told_instant_ms = times_ms[-1]
        for observer in self._instant_observers:
            observer(times_ms)

    # -- for drivers

    def next_envelope(self) -> Envelope | None:
        """Move on to the next turn; None when the run is over.

        Raises: Deadlock if nothing is due and an actor still waits; ProtocolError if time stands still for ever.
        """
        heap = self._heap
        while True:
            while heap and not heap[0][5].live:
                heapq.heappop(heap)
            if heap and heap[0][1] == self.round and heap[0][0] == self.now_ms:
                envelope = heapq.heappop(heap)[5]
                if self.turn_idx - self._instant_first_turn > MAX_TURNS_PER_INSTANT:
                    raise ProtocolError(
                        f"time stands still at {self.now_ms!r} ms: {MAX_TURNS_PER_INSTANT} turns in {self.round + 1} "
                        f"rounds; the next one is {envelope.slot.name}'s, in phase {envelope.phase}"
                    )
                self.phase = envelope.phase
                self.at_work = envelope.slot.order
                self.turn_has_effect = True
                self._taken = False
                return envelope
            same_instant = bool(heap) and heap[0][0] == self.now_ms
            if same_instant or (self.retries and self._round_had_effect):
                self._start_round(self.round + 1)
            elif heap:
                time_ms = heap[0][0]
                if self.time_limit_ms is not None and time_ms > self.time_limit_ms:
                    self.stopped_at_limit = True
                    return None
                self._advance(time_ms)
            else:
                self._check_at_rest()
                return None

    def finish_turn(self) -> None:
        """To be called once after each turn that ``next_envelope`` gave."""
        self.turn_idx += 1
        if self.turn_has_effect:
            self._round_had_effect = True
            if self.retries:
                self._bring_back([envelope for envelope in self.retries if envelope.phase == self.phase])
            if self.now_ms != self._last_effect_ms:
                self._last_effect_ms = self.now_ms
                self._instants.append(self.now_ms)
                if len(self._instants) > _MAX_INSTANTS:
                    self.tell_instants()
        for turn_observer in self._turn_observers:
            turn_observer()

    # -- inside

    def _forget_hearers(self) -> None:
        self.hearers.clear()

    def _start_round(self, round_idx: int) -> None:
        self.round = round_idx
        self.phase = -1
        self._round_had_effect = False
        self._bring_back(self.retries)

    def _bring_back(self, retries: list[Envelope]) -> None:
        if not retries:
            return
        self.retries = [envelope for envelope in self.retries if envelope not in retries]
        for envelope in retries:
            envelope.time_ms = self.now_ms
            self._sequence += 1
            entry = (self.now_ms, self.round, envelope.phase, envelope.slot.order, self._sequence, envelope)
            heapq.heappush(self._heap, entry)

    def _advance(self, time_ms: float) -> None:
        if not time_ms > self.now_ms:
            raise InvariantViolation(f"time goes from {self.now_ms!r} to {time_ms!r} ms")
        self.now_ms = time_ms
        self._instant_first_turn = self.turn_idx
        self._start_round(0)

    def _check_at_rest(self) -> None:
        waiting = [f"{slot.name}: {line}" for slot in self.slots for line in slot.actor.waiting()]
        if waiting:
            raise Deadlock(self.now_ms, waiting)
