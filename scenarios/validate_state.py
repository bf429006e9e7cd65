"""Residency of one rank as its event stream tells it, and the order its events belong in.

Owns: which blocks a rank holds on each tier and where they sit in their sequence; gaps, late events and repeats; since
when the state is exact. Refuses to know: files, wire forms, other ranks.

Events are applied in the order of their ids. While ids are missing, what comes later is applied at once and can be
taken back, so that a missing event that arrives after all takes its proper place. ``WINDOW`` bounds how much can be
taken back; a gap older than that is given up. Memory is bounded by residency and by that window.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise, repeat, takewhile
from typing import Any, Final

import attrs
import msgspec

from g2sim.actors.kv.wire import (
    CLEARED,
    DEVICE,
    HOST,
    REMOVED,
    STORED,
    Hash,
    StreamEvent,
    hash_key,
)
from g2sim.bus.errors import shorten
from g2sim.scenarios.validate_rules import Severity

WINDOW: Final = 10_000
"""Deliveries that can wait for a missing one; as many as vLLM keeps for a replay."""
RECENT: Final = 256
"""Deliveries remembered to tell a repeat from a reused id."""
MOST_CHANGES: Final = 100
"""Changes between exact and not exact that are kept, and restarts."""

Place = tuple[Any, int]
"""Source and line or record in it."""

Entry = tuple[int | None, Hash | None, int, int]
"""Position in blocks, parent while there is no position, copies on the device, copies on the host. Replaced, never
changed, so that equal ones can be shared."""

Placed = tuple[StreamEvent, str | None, tuple[Hash, ...], Hash | None]
"""An event, its tier (None for all), and the keys (``hash_keys``) of its blocks and of its parent."""

Report = Callable[[str, Place, StreamEvent | None, str, Severity | None], None]
"""Takes code, place, event, problem, and a severity when it is not the rule's own."""

Contents = tuple[Any, ...]
"""What a delivery says of blocks: one entry an event, or the entry itself if there is one event."""

Undo = list[tuple[dict[Any, Any], Any, Any]]


class Delivery(msgspec.Struct, gc=False):
    """Events that share one id: one event, or the batch of a vLLM publisher."""

    number: int
    events: tuple[Placed, ...]
    place: Place
    replayed: bool = False


@attrs.define(slots=True)
class _Step:
    """A delivery that was applied while ids below it were missing, and what it takes to take it back."""

    delivery: Delivery
    undo: Undo = attrs.Factory(list)
    findings: list[tuple[Any, ...]] = attrs.Factory(list)
    before: tuple[Any, ...] = ()


@attrs.frozen(slots=True)
class Change:
    """From ``place`` on the state is exact, or is not for a reason."""

    place: Place
    reason: str | None


class RankState:
    """One rank of one worker.

    Args:
        report: takes findings.
        counted: a block listed twice has two copies; otherwise a second store of it has no effect.
        strict: a run whose position contradicts its parent is refused; otherwise its position is believed.
        capacities: tier -> most blocks, for tiers whose capacity is known.
    Attributes:
        blocks: hash -> entry, for every resident block.
        changes: when the state became exact and when not; the first is the start.
        covered: deliveries dropped because a snapshot covers them. ``recoveries``: snapshots applied.
        renewals: times when all that was known was given up for something certain: a clear, a snapshot, a restart.
        lost_ids: how many ids were given up. ``unknown_ids``: the same of those before a late start.
        restarts: last ids known of publishers that began anew, the first of them.
    """

    def __init__(self, report: Report, *, counted: bool, strict: bool, capacities: dict[str, int]) -> None:
        self.blocks: dict[Hash, Entry] = {}
        self.copies = {DEVICE: 0, HOST: 0}
        self.events = 0
        self.covered = 0
        self.recoveries = 0
        self.renewals = 0
        self.lost_ids = self.unknown_ids = 0
        self.restarts: list[int] = []
        self.changes: list[Change] = []
        self.missing: list[tuple[int, int, Place, bool]] = []  # first, last, place where seen, late start
        self.next_number: int | None = None
        self._report = report
        self._counted = counted
        self._strict = strict
        self._capacities = capacities
        self._over: set[str] = set()  # tiers found over their capacity, until they are below it again
        self._waiting: dict[Hash, Hash | tuple[Hash, ...]] = {}  # a child alone is there without a tuple
        self._unplaced = 0
        self._steps: deque[_Step] = deque()
        self._held: list[Delivery] = []  # taken back, in falling order of number
        self._moot: deque[tuple[int, int]] = deque(maxlen=1000)
        self._lost: str | None = None
        self._tainted: str | None = None
        self._covered_to = -1
        self._first: tuple[int, Contents] | None = None
        self._recent: deque[tuple[int, Contents]] = deque(maxlen=RECENT)
        self._step: _Step | None = None
        self._last_ms: float | None = None
        self._last_live = -1

    # -- what is known

    @property
    def exact(self) -> bool:
        return not self.missing and self._lost is None and self._tainted is None

    def reason(self) -> str | None:
        """Why the state is not exact."""
        if self.missing:
            first, last, _, late = self.missing[0]
            span = f"{first}" if first == last else f"{first}..{last}"
            return f"late start, ids {span} are not known" if late else f"ids {span} are missing"
        return self._lost or self._tainted

    @property
    def last_number(self) -> int | None:
        """The highest id so far."""
        return None if self.next_number is None else self.next_number - 1

    def open_gaps(self) -> list[tuple[int, int]]:
        """Missing ids as ranges, late starts left out."""
        return [(first, last) for first, last, _, late in self.missing if not late]

    def match(self, chain: Sequence[Hash], tier: str | None = None) -> int:
        """How many leading blocks of a chain are resident in their places, on a tier or (None) on any."""
        self.settle()
        for idx, hash_ in enumerate(chain):
            entry = self.blocks.get(hash_key(hash_))
            if entry is None or entry[0] != idx:
                return idx
            if tier is not None and not entry[2 if tier == DEVICE else 3]:
                return idx
        return len(chain)

    def resident(self, tier: str) -> set[Hash]:
        """Block hashes on a tier, placed or not."""
        self.settle()
        at = 2 if tier == DEVICE else 3
        return {hash_ for hash_, entry in self.blocks.items() if entry[at]}

    def sizes(self) -> tuple[int, int]:
        """Number of nodes and of look-up entries held; both 0 for an empty rank."""
        return len(self.blocks), len(self._waiting)

    def limit(self, capacities: dict[str, int]) -> None:
        """Other capacities hold from here on."""
        self._capacities = capacities
        self._over.clear()

    # -- order

    def receive(self, delivery: Delivery, *, anew: bool = False) -> None:
        """Take the next message of a publisher that sends its numbers in order, each once.

        So a live one that is not above the last live one shows that the publisher began anew, unless it is the very
        same message again. ``anew``: that is known already.
        """
        live = not delivery.replayed
        if live and delivery.number <= self._last_live and not self._repeats_last(delivery):
            anew = True
        if anew and self.next_number is not None:
            self._restart(delivery)
        if live:
            self._last_live = delivery.number
        self.deliver(delivery)

    def deliver(self, delivery: Delivery, *, shared_numbers: bool = False) -> None:
        """Take what came next. ``shared_numbers``: events of one batch come one by one under one number."""
        number, expected = delivery.number, self.next_number
        if number == expected and not self.missing and not self._held:
            self.next_number = number + 1
            self._recent.append((number, _contents(delivery)))
            self._apply(delivery, None)
            return
        if number <= self._covered_to:
            self.covered += 1
            return
        if expected is None:
            self._first = (number, _contents(delivery))
            if number:
                self._report("KV105", delivery.place, _head(delivery), f"the stream begins at id {number}", None)
                self.missing.append((0, number - 1, delivery.place, True))
            self._take(delivery)
        elif number >= expected:
            if number > expected:
                self.missing.append((expected, number - 1, delivery.place, False))
            self._take(delivery)
        elif shared_numbers and number == expected - 1 and not self._is_repeat(delivery):
            self._take(delivery, again=True)
        elif (gap := self._gap_of(number)) is not None:
            self._take_late(delivery, gap)
        else:
            self._refuse_old(delivery)
        self._mark(delivery.place)

    def settle(self) -> None:
        """Apply again what was taken back for a late event."""
        while self._held:
            self._apply_step(self._held.pop())
        if not self.missing:
            self._confirm()

    def finish(self, place: Place) -> None:
        """The stream, or this worker's part of it, is over: what is missing now stays missing."""
        self.settle()
        self._give_up(len(self.missing), "")
        self._confirm()

    def restore(self, runs: Iterable[Placed], last_number: int, place: Place) -> None:
        """Replace the state by a snapshot that ends with ``last_number``."""
        if self.next_number is not None and last_number < self.next_number - 1:
            problem = f"the snapshot ends with {last_number}, events up to {self.next_number - 1} were applied"
            self._report("KV622", place, None, problem, None)
        self.settle()
        self._give_up(len(self.missing), "a snapshot replaced the state")
        self._confirm()
        self._clear_all(None)
        self._renew()
        self._moot.clear()
        self.recoveries += 1
        for run, tier, hashes, parent in runs:
            if run.parent is not None and parent not in self.blocks:
                self._report("KV621", place, run, f"parent {show(run.parent)} comes later or not at all", None)
            self._stored(run, tier or DEVICE, hashes, parent, place, None, quiet=True)
        self._covered_to = last_number
        self.next_number = last_number + 1
        self._recent.clear()
        self._mark(place)

    def _take(self, delivery: Delivery, *, again: bool = False) -> None:
        if not again:
            self.next_number = delivery.number + 1
        self._recent.append((delivery.number, _contents(delivery)))
        self.settle()
        if self.missing:
            self._apply_step(delivery)
        else:
            self._apply(delivery, None)

    def _apply_step(self, delivery: Delivery) -> None:
        step = _Step(delivery)
        step.before = (dict(self.copies), set(self._over), self._unplaced, self._tainted)
        self._step = step
        self._apply(delivery, step.undo)
        self._step = None
        if not self.missing:  # a clear has made what is missing irrelevant
            self._confirm()
            self._emit(step)
            return
        self._steps.append(step)
        if len(self._steps) + len(self._held) > WINDOW:
            self._emit(self._steps.popleft())
            oldest = (self._steps[0].delivery if self._steps else self._held[-1]).number
            older = sum(1 for _ in takewhile(lambda gap: gap[1] < oldest, self.missing))
            if older:
                self._give_up(older, f"no longer waited for after {WINDOW} later ones")
                if not self.missing:
                    self._confirm()

    def _take_late(self, delivery: Delivery, gap: int) -> None:
        number = delivery.number
        first, last, place, late_start = self.missing[gap]
        while self._steps and self._steps[-1].delivery.number > number:
            step = self._steps.pop()
            for mapping, key, old in reversed(step.undo):
                if old is None:
                    mapping.pop(key, None)
                else:
                    mapping[key] = old
            self.copies, self._over, self._unplaced, self._tainted = step.before
            self._held.append(step.delivery)
        while self._held and self._held[-1].number < number:  # taken back for an even earlier one
            self._apply_step(self._held.pop())
        parts = [(first, number - 1, place, late_start), (number + 1, last, place, late_start)]
        self.missing[gap : gap + 1] = [part for part in parts if part[0] <= part[1]]
        event = _head(delivery)
        severity = Severity.NOTE if delivery.replayed else None
        if event is not None and event.kind == CLEARED:
            self._report("KV601", delivery.place, event, f"id {number} came after {self.next_number}", severity)
        problem = f"id {number} came after id {(self.next_number or 0) - 1} and took its place"
        self._report("KV106", delivery.place, event, problem, severity)
        self._recent.append((number, _contents(delivery)))
        self._apply_step(delivery)
        if not self.missing:
            self.settle()

    def _refuse_old(self, delivery: Delivery) -> None:
        number = delivery.number
        event = _head(delivery)
        for first, last in self._moot:
            if first <= number <= last:
                problem = f"id {number} came after its gap was given up"
                harmless = self.exact
                self._report("KV107", delivery.place, event, problem, Severity.NOTE if harmless else None)
                return
        remembered = self._recent if self._first is None else (*self._recent, self._first)
        seen = [contents for known, contents in remembered if known == number]
        if _contents(delivery) in seen:
            self._report("KV102", delivery.place, event, f"id {number} came before with the same content", None)
        elif number == 0 and self.next_number != 1:
            self._restart(delivery)
            self._first = (0, _contents(delivery))
            self._take(delivery)
        elif seen:
            self._report("KV103", delivery.place, event, f"id {number} came before with other content", None)
            self._tainted = self._tainted or f"id {number} has two contents"
        else:
            expected = self.next_number
            self._report("KV102", delivery.place, event, f"id {number} is below the expected id {expected}", None)

    def _is_repeat(self, delivery: Delivery) -> bool:
        """Whether what came last under this number was the same; no batch says one thing twice."""
        contents = _contents(delivery)
        for number, known in reversed(self._recent):
            if number != delivery.number:
                break
            if known == contents:
                return True
        return False

    def _repeats_last(self, delivery: Delivery) -> bool:
        """Whether a delivery is the last live one again, with its time."""
        times = [event.ts_ms for event, *_ in delivery.events]
        same = delivery.number == self._last_live and (not times or times[-1] == self._last_ms)
        return same and (delivery.number, _contents(delivery)) in self._recent

    def _restart(self, delivery: Delivery) -> None:
        """The publisher starts anew with a delivery, or before it: forget everything."""
        last = (self.next_number or 0) - 1
        problem = f"id {delivery.number} follows id {last}; taken as a restart with empty caches"
        self._report("KV104", delivery.place, _head(delivery), problem, None)
        if len(self.restarts) < MOST_CHANGES:
            self.restarts.append(last)
        self.settle()
        self._give_up(len(self.missing), "the publisher started anew")
        self._confirm()
        self._clear_all(None)
        self._renew()
        self._moot.clear()
        self._covered_to = self._last_live = -1
        self.next_number = self._first = self._last_ms = None
        self._recent.clear()

    def _gap_of(self, number: int) -> int | None:
        for idx, (first, last, _, _) in enumerate(self.missing):
            if first <= number <= last:
                return idx
        return None

    def _give_up(self, count: int, why: str) -> None:
        """The first ``count`` gaps will not be filled."""
        for first, last, place, late in self.missing[:count]:
            span = f"id {first}" if first == last else f"ids {first}..{last}"
            if late:
                self.unknown_ids += last - first + 1
            else:
                self.lost_ids += last - first + 1
                self._report("KV101", place, None, f"{span} missing{f', {why}' if why else ''}", None)
            self._lost = self._lost or (f"late start, {span} not known" if late else f"{span} missing")
            self._moot.append((first, last))
        del self.missing[:count]

    def _confirm(self) -> None:
        """Nothing is missing below what was applied, so none of it will be taken back."""
        while self._steps:
            self._emit(self._steps.popleft())

    def _emit(self, step: _Step) -> None:
        for finding in step.findings:
            self._report(*finding)

    def _find(
        self, code: str, place: Place, event: StreamEvent | None, problem: str, severity: Severity | None = None
    ) -> None:
        """Report a finding, or keep it with the step while the step can still be taken back."""
        if self._step is None:
            self._report(code, place, event, problem, severity)
        else:
            self._step.findings.append((code, place, event, problem, severity))

    def _mark(self, place: Place) -> None:
        reason = self.reason()
        if not self.changes or (self.changes[-1].reason is None) != (reason is None):
            self.changes.append(Change(place, reason))
            if len(self.changes) > MOST_CHANGES:
                del self.changes[1]

    # -- residency

    def _apply(self, delivery: Delivery, undo: Undo | None) -> None:
        place = delivery.place
        if not self.changes:
            self._mark(place)
        for event, tier, hashes, parent in delivery.events:
            self.events += 1
            kind, ts_ms = event.kind, event.ts_ms
            if ts_ms is not None and not delivery.replayed:
                last_ms, self._last_ms = self._last_ms, ts_ms
                if last_ms is not None and ts_ms < last_ms and undo is None:
                    self._find("KV108", place, event, f"{ts_ms!r} ms follows {last_ms!r} ms")
            if kind == STORED:
                self._stored(event, tier or DEVICE, hashes, parent, place, undo)
            elif kind == REMOVED:
                self._removed(event, tier or DEVICE, hashes, place, undo)
            elif kind == CLEARED:
                self._cleared(event, tier, place, undo, delivery.number)

    def _stored(
        self,
        event: StreamEvent,
        tier: str,
        hashes: tuple[Hash, ...],
        parent: Hash | None,
        place: Place,
        undo: Undo | None,
        *,
        quiet: bool = False,
    ) -> None:
        distinct = set(hashes)
        if parent in distinct or len(distinct) != len(hashes):
            what = "names one of its blocks as parent" if parent in hashes else "lists a block twice"
            self._find("KV402", place, event, f"the run {what}; refused")
            self._taint(f"a refused store at {place[1]}", place)
            return
        blocks, waiting = self.blocks, self._waiting
        position = event.position
        if parent is not None:
            above = blocks.get(parent)
            if above is None:
                if tier == DEVICE and not quiet:
                    severity = None if self.exact else Severity.NOTE
                    text = f"parent {show(parent)} is not resident; the run is kept, unattached"
                    self._find("KV403", place, event, text, severity)
            elif above[0] is not None:
                if position is None:
                    position = above[0] + 1
                elif position != above[0] + 1:
                    text = f"parent {show(parent)} sits at position {above[0]}, so its child cannot be at {position}"
                    if self._refuse("KV401", place, event, text):
                        return
        elif event.root:
            if position is None:
                position = 0
            elif position and self._refuse("KV401", place, event, f"a run without a parent cannot be at {position}"):
                return
        elif position is None:
            if not quiet and not blocks.keys() >= distinct:
                self._find("KV405", place, event, "neither parent nor position; held as unplaced")
        elif position:
            self._find("KV406", place, event, f"no parent, yet at position {position}; the position is believed")
        if self._strict and position is not None:
            for idx, hash_ in enumerate(hashes):
                known = blocks.get(hash_)
                if known is not None and known[0] is not None and known[0] != position + idx:
                    text = f"{show(hash_)} sits at position {known[0]}, not {position + idx}"
                    self._refuse("KV404", place, event, text)
                    return
        device = tier == DEVICE
        if undo is None and blocks.keys().isdisjoint(distinct) and waiting.keys().isdisjoint(distinct):
            # All are new, and nothing waits for one of them: what the other branch does, without a look at each.
            if position is not None:
                blocks.update(zip(hashes, _entries(position, len(hashes), device), strict=True))
            elif hashes:
                parents = (parent, *hashes[:-1])
                entries = zip(repeat(None), parents, repeat(int(device)), repeat(int(not device)), strict=False)
                blocks.update(zip(hashes, entries, strict=True))
                self._unplaced += len(hashes)
                waiting.update(pairwise(hashes))
                if parent is not None:
                    self._wait(parent, hashes[0], None)
            added = len(hashes)
        else:
            added = self._stored_one_by_one(event, hashes, parent, position, device, place, undo)
        self.copies[tier] += added
        capacity = self._capacities.get(tier)
        if capacity is not None and self.copies[tier] > capacity and tier not in self._over:
            self._over.add(tier)
            self._find("KV501", place, event, f"{tier} holds {self.copies[tier]} blocks, capacity {capacity}")

    def _stored_one_by_one(
        self,
        event: StreamEvent,
        hashes: tuple[Hash, ...],
        parent: Hash | None,
        position: int | None,
        device: bool,
        place: Place,
        undo: Undo | None,
    ) -> int:
        """Store a run's blocks, of which some are resident, wait or are waited for. Returns how many copies came."""
        blocks, waiting = self.blocks, self._waiting
        added = 0
        above_hash = parent
        for hash_ in hashes:
            old = blocks.get(hash_)
            if old is None:
                above = above_hash if position is None else None
                new: Entry = (position, above, 1, 0) if device else (position, above, 0, 1)
                added += 1
                if position is None:
                    self._unplaced += 1
                    if above_hash is not None:
                        self._wait(above_hash, hash_, undo)
            else:
                new = self._again(old, hash_, position, above_hash, device, event, place, undo)
                added += new[2] + new[3] - old[2] - old[3]
            if undo is not None:
                undo.append((blocks, hash_, old))
            blocks[hash_] = new
            if new[0] is not None and hash_ in waiting:
                self._resolve(hash_, new[0], undo)
            above_hash = hash_
            if position is not None:
                position += 1
            elif new[0] is not None:  # a block of the run has a place already, so those behind it have one too
                position = new[0] + 1
        return added

    def _again(
        self,
        old: Entry,
        hash_: Hash,
        position: int | None,
        parent: Hash | None,
        device: bool,
        event: StreamEvent,
        place: Place,
        undo: Undo | None,
    ) -> Entry:
        """The entry of a block that is resident on this or another tier and is stored (again)."""
        old_position, old_parent, on_device, on_host = old
        if position is not None:
            if old_position is None:
                self._unplaced -= 1
                if old_parent is not None:
                    self._unwait(old_parent, hash_, undo)
            elif position != old_position:
                self._find("KV404", place, event, f"{show(hash_)} sits at position {old_position}, not {position}")
            old_position = position
        elif old_position is None and parent is not None and parent != old_parent:
            if old_parent is not None:
                self._unwait(old_parent, hash_, undo)
            self._wait(parent, hash_, undo)
        if old_position is not None:
            old_parent = None
        elif parent is not None:
            old_parent = parent
        if (on_device if device else on_host) and not self._counted:
            tier = DEVICE if device else HOST
            self._find("KV301", place, event, f"{show(hash_)} is resident on {tier}")
            return old_position, old_parent, on_device, on_host
        return old_position, old_parent, on_device + device, on_host + (not device)

    def _refuse(self, code: str, place: Place, event: StreamEvent, text: str) -> bool:
        """Report a contradiction about places. Whether the event is refused for it."""
        self._find(code, place, event, f"{text}; {'refused' if self._strict else 'the position is believed'}")
        if self._strict:
            self._taint(f"a refused store at {place[1]}", place)
        return self._strict

    def _renew(self) -> None:
        """All that was in doubt is known for certain."""
        self._lost = self._tainted = None
        self.renewals += 1

    def _taint(self, why: str, place: Place) -> None:
        self._tainted = self._tainted or why
        if self._step is None:
            self._mark(place)

    def _removed(
        self, event: StreamEvent, tier: str, hashes: tuple[Hash, ...], place: Place, undo: Undo | None
    ) -> None:
        blocks = self.blocks
        at = 2 if tier == DEVICE else 3
        absent: list[Hash] = []
        for hash_ in hashes:
            old = blocks.get(hash_)
            if old is None or not old[at]:
                absent.append(hash_)
                continue
            if undo is not None:
                undo.append((blocks, hash_, old))
            position, parent, on_device, on_host = old
            if on_device + on_host > 1:
                blocks[hash_] = (position, parent, on_device - (at == 2), on_host - (at == 3))
                continue
            del blocks[hash_]
            if position is None:
                self._unplaced -= 1
                if parent is not None:
                    self._unwait(parent, hash_, undo)
        self.copies[tier] -= len(hashes) - len(absent)
        if absent:
            severity = None if self.exact else Severity.NOTE
            names = ", ".join(map(show, absent[:5])) + (", ..." if len(absent) > 5 else "")
            for _ in absent:  # one finding a block in the count, one text for all
                self._find("KV302", place, event, f"not resident on {tier}: {names}", severity)
        if self._over and self.copies[tier] <= self._capacities.get(tier, 0):
            self._over.discard(tier)

    def _cleared(self, event: StreamEvent, tier: str | None, place: Place, undo: Undo | None, number: int) -> None:
        if tier is None:
            self._clear_all(undo)
            # Whatever was missed before, the rank is empty now. A clear is never taken back: nothing below it is
            # missing any more.
            self._give_up(sum(gap[1] < number for gap in self.missing), "before a clear of all tiers")
            self._renew()
            self._mark(place)
            return
        keep = 3 if tier == DEVICE else 2
        for hash_, old in list(self.blocks.items()):
            position, parent, on_device, on_host = old
            if undo is not None:
                undo.append((self.blocks, hash_, old))
            if old[keep]:
                self.blocks[hash_] = (position, parent, 0, on_host) if keep == 3 else (position, parent, on_device, 0)
                continue
            del self.blocks[hash_]
            if position is None:
                self._unplaced -= 1
                if parent is not None:
                    self._unwait(parent, hash_, undo)
        self.copies[tier] = 0
        self._over.discard(tier)

    def _clear_all(self, undo: Undo | None) -> None:
        if undo is not None:
            undo += [(self.blocks, key, entry) for key, entry in self.blocks.items()]
            undo += [(self._waiting, key, children) for key, children in self._waiting.items()]
        self.blocks.clear()
        self._waiting.clear()
        self.copies = {DEVICE: 0, HOST: 0}
        self._over.clear()
        self._unplaced = 0

    # -- runs without a position: they wait for the block before them

    def _wait(self, parent: Hash, child: Hash, undo: Undo | None) -> None:
        old = self._waiting.get(parent)
        if undo is not None:
            undo.append((self._waiting, parent, old))
        self._waiting[parent] = child if old is None else (*_children(old), child)

    def _unwait(self, parent: Hash, child: Hash, undo: Undo | None) -> None:
        old = self._waiting.get(parent)
        if old == child:
            left: tuple[Hash, ...] = ()
        elif type(old) is tuple and child in old:
            left = tuple([item for item in old if item != child])
        else:
            return
        if undo is not None:
            undo.append((self._waiting, parent, old))
        if left:
            self._waiting[parent] = left if len(left) > 1 else left[0]
        else:
            del self._waiting[parent]

    def _resolve(self, hash_: Hash, position: int, undo: Undo | None) -> None:
        """Give a place to everything that waits for ``hash_``, which sits at ``position``."""
        todo = [(hash_, position)]
        while todo:
            parent, at = todo.pop()
            children = self._waiting.pop(parent, None)
            if children is None:
                continue
            if undo is not None:
                undo.append((self._waiting, parent, children))
            for child in _children(children):
                old = self.blocks[child]
                if undo is not None:
                    undo.append((self.blocks, child, old))
                self.blocks[child] = (at + 1, None, *old[2:])
                self._unplaced -= 1
                todo.append((child, at + 1))


def _children(waiting: Hash | tuple[Hash, ...]) -> tuple[Hash, ...]:
    return waiting if isinstance(waiting, tuple) else (waiting,)


_SHARED: Final[tuple[list[Entry], list[Entry]]] = ([], [])
_MOST_SHARED: Final = 65_536


def _entries(position: int, count: int, device: bool) -> Iterable[Entry]:
    """Entries of ``count`` blocks from ``position`` on, with one copy each on a tier.

    Those of usual positions are made once: nearly all blocks have such an entry, and it is larger than their hash.
    """
    known, stop = _SHARED[device], position + count
    if stop > len(known):
        first = position if stop > _MOST_SHARED else len(known)
        fresh = zip(range(first, stop), repeat(None), repeat(int(device)), repeat(int(not device)))
        if stop > _MOST_SHARED:
            return fresh
        known.extend(fresh)
    return known[position:stop]


def show(value: Hash) -> str:
    """A hash for people: integers as they are, bytes and text cut short."""
    if isinstance(value, bytes):
        return f"bytes:{value.hex() if len(value) <= 8 else value.hex()[:16] + '...'}"
    return str(value) if isinstance(value, int) else shorten(value, 24)


def describe(event: StreamEvent) -> str:
    """One event in short."""
    number = "" if event.event_id is None else f"#{event.event_id} "
    if event.kind == CLEARED:
        return f"{number}Cleared {event.medium or 'all tiers'}"
    if event.kind not in (STORED, REMOVED):
        return f"{number}{shorten(event.tag, 40)}"
    names = ",".join(map(show, event.hashes[:4])) + (
        f",... {len(event.hashes)} in all" if len(event.hashes) > 4 else ""
    )
    text = f"{number}{event.kind.capitalize()} {event.medium or 'no medium'} [{names}]"
    if event.kind == REMOVED:
        return text
    parent = "-" if event.parent is None else show(event.parent)
    return f"{text} parent {parent} position {'-' if event.position is None else event.position}"


def _head(delivery: Delivery) -> StreamEvent | None:
    return delivery.events[0][0] if delivery.events else None


def _contents(delivery: Delivery) -> Contents:
    """What tells a repeat from a reused id. Tokens are left out: they follow from the hashes, and are long."""
    events = delivery.events
    if len(events) == 1:
        event = events[0][0]
        return (event.kind, event.medium, event.hashes, event.parent, event.position)
    return tuple([(event.kind, event.medium, event.hashes, event.parent, event.position) for event, *_ in events])
