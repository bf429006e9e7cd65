"""Checking event streams: every rank's state, the rules between ranks, and the verdict.

Owns: which rank an event belongs to, what is set aside by spelling, hash agreement, and the report. Refuses to know:
files, sockets, and how lines and messages are read (``stream_sources``).
"""

from __future__ import annotations

import enum
import itertools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs
import msgspec

from g2sim.actors.kv.blocks import sequence_hash, tokens_hashes
from g2sim.actors.kv.wire import (
    CLEARED,
    DEVICE,
    HASH_KINDS,
    HASH_RULE,
    HOST,
    MODELLED_TIERS,
    OTHER,
    REMOVED,
    STORED,
    TIERS,
    EngineFields,
    Hash,
    StreamEvent,
    hash_key,
    hash_keys,
    tier_table,
)
from g2sim.actors.kv.wire_neutral import JOINED, Membership, Snapshot
from g2sim.bus.errors import shorten
from g2sim.scenarios.validate_dynamo import DynamoView, Known
from g2sim.scenarios.validate_pools import PoolAudit, RankId
from g2sim.scenarios.validate_rules import BY_CODE, DOUBTS, UNREAD, Finding, Findings, Severity, choose
from g2sim.scenarios.validate_state import Change, Delivery, Place, Placed, RankState, describe, show

REPORT_SCHEMA: Final = 1
IDENTITY_MEMORY: Final = 200_000
"""Blocks whose content is remembered to compare hashes; the memory is emptied when full, so that it is bounded."""


class Copies(enum.StrEnum):
    """Whether a block stored twice has two copies; AUTO counts them in vLLM's form, as vLLM expects."""

    AUTO = "auto"
    COUNTED = "counted"
    LOGICAL = "logical"


class Mode(enum.StrEnum):
    """TRUE: residency as it is. DYNAMO: also what Dynamo's index would know, with the difference."""

    TRUE = "true"
    DYNAMO = "dynamo"


@attrs.frozen(kw_only=True)
class Options:
    """How to check.

    Attributes:
        codes: rules that are switched on. ``keep``: findings kept with their text, for each of them.
        strict: refuse a run whose position contradicts its parent, instead of believing the position.
        capacities: tier -> most blocks a rank; what a run log's header says comes first.
        shared_host: all ranks see one host pool and must agree on it at the end.
    """

    mode: Mode = Mode.TRUE
    codes: frozenset[str] = attrs.Factory(choose)
    copies: Copies = Copies.AUTO
    strict: bool = False
    capacities: dict[str, int] = attrs.Factory(dict)
    shared_host: bool = False
    keep: int = 100


class BatchArrived(msgspec.Struct, gc=False):
    """A vLLM batch from a named publisher. ``number`` is its sequence number.

    Attributes:
        anew: it is the first of a publisher that is known to have begun anew.
    """

    worker_id: str | int
    dp_rank: int
    number: int
    events: tuple[StreamEvent, ...]
    replayed: bool
    anew: bool = False


@attrs.frozen(slots=True)
class StreamEnded:
    """The listening to a live stream of these ranks ended.

    Attributes:
        tail_confirmed: the replay socket has said that nothing came after the last message.
    """

    ranks: tuple[tuple[str | int, int], ...]
    tail_confirmed: bool


@attrs.frozen(slots=True)
class LogRecord:
    """A record of a run log that is no KV event."""

    tag: str
    values: Sequence[Any]


@attrs.frozen(slots=True)
class LogSettings:
    """What a run log's header says: role -> block size, device blocks and host blocks."""

    device_blocks: dict[str, int]
    host_blocks: dict[str, int]
    block_sizes: dict[str, int]


@attrs.frozen(slots=True)
class Bad:
    """Something that cannot be read. ``code`` is KV001 or KV002."""

    code: str
    problem: str


Item = StreamEvent | BatchArrived | StreamEnded | Membership | Snapshot | LogRecord | LogSettings | Bad


@attrs.frozen(slots=True)
class Source:
    """A stream being read. ``unit`` names places in it: "line" or "record"."""

    name: str
    form: str
    unit: str

    def place(self, number: int | str) -> str:
        return f"{self.name}:{number}" if self.unit == "line" else f"{self.name}: {self.unit} {number}"


@attrs.define(slots=True)
class _Rank:
    """A rank, its present incarnation, and what earlier ones left behind."""

    state: RankState
    kinds: set[type]
    left: bool = False
    tail_confirmed: bool | None = None
    past_events: int = 0
    past_changes: list[Change] = attrs.Factory(list)
    doubt: tuple[int, Place, str] | None = None  # renewals of the state at that time, where, which rule


@attrs.frozen(kw_only=True)
class Verdict:
    """What can be said of one rank at the end.

    Attributes:
        reason: why its state is not exact, None when it is; ``since`` says where that began.
        doubt: the first finding since its state was certain after which nobody can say what it holds, though no id is
            missing; None without one. What has neither a reason nor a doubt is exact.
        last_event_id: the id up to which it speaks, None when nothing is known.
        tail_confirmed: whether it is known that nothing came after that id; None where the end of a file is the end.
        restarts: last known ids of publishers that began anew; the first of them.
        lost_ids: how many ids are missing for good. ``unknown_ids``: how many were before the start of the stream.
        blocks: copies by tier.
        dynamo: in mode dynamo, what Dynamo's index knows of each tier.
    """

    worker: str | int
    dp_rank: int
    reason: str | None
    since: str | None
    doubt: str | None
    left: bool
    last_event_id: int | None
    tail_confirmed: bool | None
    restarts: list[int]
    lost_ids: int
    unknown_ids: int
    events: int
    blocks: dict[str, int]
    dynamo: dict[str, Known] | None
    gaps: list[tuple[int, int]]
    changes: list[tuple[str, str | None]]

    @property
    def exact(self) -> bool:
        return self.reason is None and self.doubt is None

    def text(self) -> str:
        name = publisher(self.worker, self.dp_rank)
        held = ", ".join(f"{tier} {count}" for tier, count in self.blocks.items())
        state = "exact" if self.reason is None else f"not exact since {self.since}: {self.reason}"
        if self.reason is None and self.doubt is not None:
            state = f"in doubt since {self.doubt}, though no id is missing"
        elif self.exact and self.tail_confirmed is False:
            state = f"exact up to id {self.last_event_id} (not known what came after it)"
        gone = ", has left" if self.left else ""
        turns = len(self.changes) - 1
        back = "" if turns < 1 else f" (changed {'once' if turns == 1 else f'{turns} times'})"
        if self.dynamo is not None:
            held += "; Dynamo's index: " + ", ".join(f"{tier} {known.text()}" for tier, known in self.dynamo.items())
        return f"{name}: {state}{back}; {self.events} events; {held}{gone}"


def publisher(worker: str | int, rank: int) -> str:
    """How a rank is named in findings and verdicts."""
    return f"{worker}/r{rank}"


class Validator:
    """Takes items in the order of delivery; see ``Item``.

    Attributes:
        findings: what was found so far.
        dynamo: what Dynamo's index would know, in that mode.
        tiers: number of events by tier, or by what was set aside and why.
    """

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or Options()
        self.findings = Findings(self.options.codes, self.options.keep)
        self.tiers: Counter[str] = Counter()
        self.items = 0
        self._ranks: dict[tuple[str | int, int], _Rank] = {}
        self._source = Source("", "neutral", "line")
        self._table = TIERS["neutral"]
        self._place: Place = (self._source, 0)
        self._settings = LogSettings({}, {}, {})
        self._pools: PoolAudit | None = None
        self._hashes_checked = not self.options.codes.isdisjoint(("KV901", "KV902", "KV903", "KV905"))
        self._chain_checked = "KV904" in self.options.codes
        self._contents: dict[Hash, Any] = {}
        # What has a content behind a parent. Nearly every block has one child, of the content that is known of it, and
        # is in the first; None there, and all roots, are looked up in the second.
        self._children: dict[Hash, Hash | None] = {}
        self._names: dict[tuple[Hash | None, Any], Hash] = {}
        self._plays: dict[Hash, str] = {}
        self._modes: set[str] = set()
        self.dynamo = DynamoView(self._say) if self.options.mode is Mode.DYNAMO else None

    # -- input

    def begin(self, source: Source) -> None:
        """What follows comes from this source."""
        self._source = source
        self._table = TIERS[source.form]
        self._modes.add(self._copies())
        self._set(LogSettings({}, {}, {}))

    def end(self, place: int) -> None:
        """The source is read."""
        self._place = (self._source, place)
        if self._pools is not None:
            self._pools.finish(self._place)
            self._pools = None

    def feed(self, place: int, item: Item) -> None:
        """Take one item; ``place`` is its line or record."""
        self.items += 1
        self._place = where = (self._source, place)
        _TAKE[type(item)](self, where, item)

    def _log_record(self, where: Place, item: LogRecord) -> None:
        if self._pools is not None:
            self._pools.feed(where, item.tag, item.values)

    def _ended(self, where: Place, item: StreamEnded) -> None:
        for key in item.ranks:
            self._ranks[key].tail_confirmed = item.tail_confirmed

    def _bad(self, where: Place, item: Bad) -> None:
        self._say(item.code, where, None, None, item.problem)

    # -- output

    def state(self, worker: str | int, rank: int = 0) -> RankState:
        """State of a rank; raises KeyError for one never heard of."""
        return self._ranks[worker, rank].state

    def ranks(self) -> list[tuple[str | int, int]]:
        return list(self._ranks)

    def overlap(self, chain: Sequence[Hash], tier: str | None = None) -> dict[tuple[str | int, int], int]:
        """How many leading blocks of a chain each rank holds."""
        return {key: rank.state.match(chain, tier) for key, rank in self._ranks.items()}

    def finish(self) -> list[Verdict]:
        """The stream is over: settle what is open, and say what is known of each rank."""
        for rank in self._ranks.values():
            rank.state.finish(self._place)
        if self.options.shared_host:
            self._compare_hosts()
        return [self._verdict(key, rank) for key, rank in sorted(self._ranks.items(), key=lambda kv: str(kv[0]))]

    def copies_used(self) -> list[str]:
        return sorted(self._modes)

    # -- events

    def _event(self, where: Place, event: StreamEvent) -> None:
        worker = event.worker_id
        if worker is None:
            self._say("KV003", where, None, event, "no worker_id; refused, it is not given to any worker")
            return
        key = (worker, event.dp_rank or 0)
        rank = self._ranks.get(key)
        if rank is None or rank.left:
            rank = self._rank(where, key, event)
        placed = self._placed(where, key, rank, event)
        shared = self._source.form == "dynamo"
        if event.event_id is None:
            return
        if self.dynamo is not None:
            self.dynamo.deliver(where, key, event.event_id, (event,), self._source.form)
        rank.state.deliver(Delivery(event.event_id, placed, where, event.replayed), shared_numbers=shared)
        if self._pools is not None and placed and placed[0][1] == HOST and event.kind != CLEARED:
            self._pools.announced(where, key, event.kind == STORED, event.hashes)  # type: ignore[arg-type]

    def _batch(self, where: Place, batch: BatchArrived) -> None:
        key = (batch.worker_id, batch.dp_rank)
        rank = self._ranks.get(key)
        if rank is None or rank.left:
            rank = self._rank(where, key, None)
        if self.dynamo is not None:
            self.dynamo.deliver(where, key, batch.number, batch.events, self._source.form)
        events = batch.events
        placed = self._placed(where, key, rank, events[0]) if len(events) == 1 else ()
        if len(events) > 1:
            placed = self._all_placed(where, key, rank, events)
        rank.tail_confirmed = False
        rank.state.receive(Delivery(batch.number, placed, where, batch.replayed), anew=batch.anew)

    def _all_placed(
        self, where: Place, key: tuple[str | int, int], rank: _Rank, events: Sequence[StreamEvent]
    ) -> tuple[Placed, ...]:
        return tuple([placed for event in events for placed in self._placed(where, key, rank, event)])

    def _placed(self, where: Place, key: tuple[str | int, int], rank: _Rank, event: StreamEvent) -> tuple[Placed, ...]:
        """The event with its tier and keys, or nothing if it is set aside. Its id counts in either case."""
        kind, engine = event.kind, event.engine
        tier = self._table.get(event.medium)
        remote = engine is not None and engine.locality is not None and engine.locality != "LOCAL"
        if tier not in MODELLED_TIERS or kind not in (STORED, REMOVED) or event.group_idx or remote:
            return self._cleared_or_aside(where, key, event, tier)
        self.tiers[tier] += 1
        parent = event.parent
        hashes, above = hash_keys(event.hashes), None if parent is None else hash_key(parent)
        if not (hashes is event.hashes and int in rank.kinds) and not rank.kinds.issuperset(map(type, event.hashes)):
            rank.kinds.update(map(type, event.hashes))
            if len(rank.kinds) > 1:
                names = " and ".join(sorted(HASH_KINDS[kind] for kind in rank.kinds))
                self._say("KV004", where, key, event, f"{names}; {HASH_RULE}")
        if kind == STORED:
            if event.cache_id is not None:
                self._check_plays(where, key, event)
            if self._source.form == "log":
                if self._chain_checked:
                    self._check_chain(where, key, event)
            elif self._hashes_checked and (engine is not None or event.tokens_hashes):
                self._check_content(where, key, event, hashes, above)
        return ((event, tier, hashes, above),)

    def _cleared_or_aside(
        self, where: Place, key: tuple[str | int, int], event: StreamEvent, tier: str | None
    ) -> tuple[Placed, ...]:
        """A clear with its tier, None for all; or nothing, because the event is set aside."""
        kind, medium, engine = event.kind, event.medium, event.engine
        if kind == OTHER:
            self.tiers[f"set aside: tag {shorten(event.tag, 40)}"] += 1
            if event.tag != "Ignored":
                self._say("KV005", where, key, event, f"tag {shorten(event.tag, 40)} is not known; set aside")
            return ()
        if kind == CLEARED and medium is None:
            tier = None
        elif tier is None:
            self.tiers[f"set aside: medium {shorten(medium, 40)}"] += 1
            self._say("KV201", where, key, event, f"medium {shorten(medium, 40)} is not in the table; set aside")
            return ()
        if kind == CLEARED and self._source.form == "dynamo":
            tier = None  # Dynamo's cleared drops the worker on every tier, whatever tier is written beside it
        if tier is not None and tier not in MODELLED_TIERS:
            self.tiers[f"set aside: medium {shorten(medium, 40)}"] += 1
            self._say("KV202", where, key, event, f"tier {tier} is not followed; set aside")
            return ()
        if kind == CLEARED:
            self.tiers["cleared"] += 1
            return ((event, tier, (), None),)
        what = f"group {event.group_idx}" if event.group_idx else f"locality {engine.locality if engine else ''}"
        self.tiers[f"set aside: {what}"] += 1
        self._say("KV203", where, key, event, f"{what}; set aside")
        return ()

    def _rank(self, where: Place, key: tuple[str | int, int], event: StreamEvent | None) -> _Rank:
        rank = self._ranks.get(key)
        if rank is None:
            rank = self._ranks[key] = _Rank(self._new_state(key), set())
        elif rank.left:
            self._say("KV613", where, key, event, "the worker has left and has not joined again; taken as joined")
            self._start_anew(key, rank)
        return rank

    def _set(self, settings: LogSettings) -> None:
        """What a log's header says holds for that log only."""
        self._settings = settings
        self._pools = PoolAudit(self._say_pool, settings.host_blocks) if self._source.form == "log" else None
        for key, rank in self._ranks.items():
            rank.state.limit(self._capacities(key))

    def _capacities(self, key: tuple[str | int, int]) -> dict[str, int]:
        role = str(key[0]).rpartition("-")[0]
        capacities = dict(self.options.capacities)
        for tier, known in ((DEVICE, self._settings.device_blocks), (HOST, self._settings.host_blocks)):
            if role in known:
                capacities[tier] = known[role]
        return capacities

    def _new_state(self, key: tuple[str | int, int]) -> RankState:
        def report(code: str, place: Place, event: StreamEvent | None, problem: str, severity: Severity | None) -> None:
            self._say(code, place, key, event, problem, severity)

        counted = self._copies() == Copies.COUNTED
        return RankState(report, counted=counted, strict=self.options.strict, capacities=self._capacities(key))

    def _copies(self) -> Copies:
        if self.options.copies is not Copies.AUTO:
            return self.options.copies
        return Copies.COUNTED if self._source.form == "vllm" else Copies.LOGICAL

    def _start_anew(self, key: tuple[str | int, int], rank: _Rank) -> None:
        before = rank.state
        rank.past_events += before.events
        rank.past_changes += before.changes
        del rank.past_changes[100:]
        rank.state = self._new_state(key)
        rank.state.lost_ids, rank.state.unknown_ids = before.lost_ids, before.unknown_ids
        rank.state.restarts = before.restarts
        rank.kinds = set()
        rank.left = False
        rank.doubt = None

    def _membership(self, where: Place, item: Membership) -> None:
        keys = [key for key in self._ranks if key[0] == item.worker_id and item.dp_rank in (None, key[1])]
        here = [key for key in keys if not self._ranks[key].left]
        who = (item.worker_id, item.dp_rank or 0)
        if item.kind == JOINED:
            for key in here:
                if self._ranks[key].state.events:
                    self._say("KV612", where, key, None, "joins while it is there; taken as new")
                    self._ranks[key].state.finish(where)
            for key in keys:
                self._start_anew(key, self._ranks[key])
                if self.dynamo is not None:
                    self.dynamo.forget(key)
            return
        if not here:
            self._say("KV611", where, who, None, "leaves but is not there")
        for key in here:
            rank = self._ranks[key]
            rank.state.finish(where)
            self._start_anew(key, rank)
            rank.left = True
            if self.dynamo is not None:
                self.dynamo.forget(key)

    def _snapshot(self, where: Place, item: Snapshot) -> None:
        key = (item.worker_id, item.dp_rank)
        rank = self._ranks.get(key)
        if rank is None or rank.left:
            rank = self._rank(where, key, None)
        rank.state.restore(self._all_placed(where, key, rank, item.runs), item.last_event_id, where)
        if self.dynamo is not None:
            self.dynamo.restore(where, key, item.runs, item.last_event_id, self._source.form)

    # -- hash agreement

    def _check_chain(self, where: Place, key: tuple[str | int, int], event: StreamEvent) -> None:
        """In our own logs a block hash is the chain hash of its parent and its tokens hash."""
        above = event.parent
        for hash_, own in zip(event.hashes, event.tokens_hashes, strict=False):
            if sequence_hash(above, own) != hash_:  # type: ignore[arg-type]
                self._say("KV904", where, key, event, f"block {show(hash_)} is not the chain hash of its content")
                return
            above = hash_

    def _check_content(
        self,
        where: Place,
        key: tuple[str | int, int],
        event: StreamEvent,
        hashes: tuple[Hash, ...],
        above: Hash | None,
    ) -> None:
        """A hash stands for one content behind one parent, and the other way round."""
        engine = event.engine
        contents: list[Any] = list(event.tokens_hashes)
        if engine is not None:
            size, tokens = engine.block_size or 0, engine.token_ids
            named = engine.lora_id is not None or engine.lora_name is not None
            if tokens and size:
                hashed = tokens_hashes(tokens, size)
                if len(tokens) != size * len(event.hashes):
                    text = f"{len(tokens)} token ids for {len(event.hashes)} blocks of {size}"
                    self._say("KV905", where, key, event, text)
                    del hashed[len(tokens) // size :]
                if contents and not named and not engine.extra_keys and contents != hashed:
                    self._say("KV903", where, key, event, "the tokens hashes are not those of the token ids")
                contents = hashed
            elif tokens:
                self._say("KV905", where, key, event, f"{len(tokens)} token ids and no block size")
            if named or engine.extra_keys:
                contents = _identities(contents, engine)
        if not contents:
            return
        known, children = self._contents, self._children
        if len(known) > IDENTITY_MEMORY:
            known.clear()
            children.clear()
            self._names.clear()
        linked = event.parent is not None or event.root
        # Nearly every run agrees with what is known. That is seen without a loop; setdefault can be asked twice.
        if len(contents) == len(hashes) and list(map(known.setdefault, hashes, contents)) == contents:
            if above is not None:
                parents, below = (above, *hashes), hashes
            else:
                parents, below = hashes, hashes[1:]
            root_agrees = above is not None or not linked or self._named(None, contents[0], hashes[0]) == hashes[0]
            if root_agrees and tuple(map(children.setdefault, parents, below)) == below:
                return
        for hash_, content in zip(hashes, contents, strict=False):
            seen = known.setdefault(hash_, content)
            if seen != content:
                self._say("KV901", where, key, event, f"block {show(hash_)} was announced with other content")
            if linked:
                name = self._named(above, content, hash_)
                if name != hash_:
                    text = f"block {show(hash_)} has the content and the parent of block {show(name)}"
                    self._say("KV902", where, key, event, text)
            above, linked = hash_, True

    def _named(self, above: Hash | None, content: Any, hash_: Hash) -> Hash:
        """The block that has a content behind a parent; this one from here on, if there was none."""
        known = self._contents
        if above is not None:
            child = self._children.setdefault(above, hash_ if known[hash_] == content else None)
            if child is not None and known[child] == content:
                return child
        return self._names.setdefault((above, content), hash_)

    def _check_plays(self, where: Place, key: tuple[str | int, int], event: StreamEvent) -> None:
        if len(self._plays) > IDENTITY_MEMORY:
            self._plays.clear()
        mine = event.cache_id or ""
        for hash_ in map(hash_key, event.hashes):
            owner = self._plays.setdefault(hash_, mine)
            if owner != mine:
                text = f"block {show(hash_)} of cache id {mine} was announced under cache id {owner}"
                self._say("KV812", where, key, event, text)
                return

    def _compare_hosts(self) -> None:
        here = {key: rank.state for key, rank in self._ranks.items() if not rank.left}
        if len(here) < 2:
            return
        first_key = min(here, key=str)
        wanted = here[first_key].resident(HOST)
        for key, state in here.items():
            differ = state.resident(HOST) ^ wanted
            if differ:
                few = ", ".join(sorted(map(show, differ))[:3])
                text = f"{len(differ)} host blocks differ from {publisher(*first_key)}, e.g. {few}"
                self._say("KV704", self._place, key, None, text)

    # -- findings

    def _say(
        self,
        code: str,
        where: Place,
        key: tuple[str | int, int] | None,
        event: StreamEvent | None,
        problem: str,
        severity: Severity | None = None,
    ) -> None:
        severity = severity or BY_CODE[code].severity
        if code in DOUBTS and severity is not Severity.NOTE and key is not None:
            self._doubt(code, where, key)
        if self.findings.counted(code, severity):
            source, number = where
            self.findings.keep(
                Finding(
                    code=code,
                    severity=severity,
                    where=source.place(number),
                    publisher=None if key is None else publisher(*key),
                    event=None if event is None else describe(event),
                    problem=problem,
                )
            )

    def _doubt(self, code: str, where: Place, key: tuple[str | int, int]) -> None:
        rank = self._ranks.get(key)
        if rank is not None and code in self.findings.codes:
            renewals = rank.state.renewals
            if rank.doubt is None or rank.doubt[0] != renewals:
                rank.doubt = renewals, where, code

    def _say_pool(self, code: str, place: Place, rank: RankId | None, problem: str) -> None:
        self._say(code, place, rank, None, problem)

    def _verdict(self, key: tuple[str | int, int], rank: _Rank) -> Verdict:
        state = rank.state
        changes = [(c.place[0].place(c.place[1]), c.reason) for c in rank.past_changes + state.changes]
        return Verdict(
            worker=key[0],
            dp_rank=key[1],
            reason=state.reason(),
            since=None if state.exact or not changes else changes[-1][0],
            doubt=_doubt_text(rank),
            left=rank.left,
            last_event_id=state.last_number,
            tail_confirmed=rank.tail_confirmed,
            restarts=state.restarts,
            lost_ids=state.lost_ids,
            unknown_ids=state.unknown_ids,
            events=rank.past_events + state.events,
            blocks=dict(state.copies),
            dynamo=None if self.dynamo is None else self.dynamo.known(key, state.resident),
            gaps=state.open_gaps(),
            changes=changes,
        )


def _doubt_text(rank: _Rank) -> str | None:
    if rank.doubt is None or rank.doubt[0] != rank.state.renewals:
        return None
    _, (source, number), code = rank.doubt
    return f"{source.place(number)} ({code} {BY_CODE[code].name})"


def _identities(contents: list[Any], engine: EngineFields) -> list[Any]:
    """Contents of blocks together with what else tells blocks apart."""
    if engine.lora_id is not None or engine.lora_name is not None:
        contents = [(own, engine.lora_id, engine.lora_name) for own in contents]
    extra = engine.extra_keys
    return list(zip(contents, itertools.chain(extra, itertools.repeat(None)), strict=False)) if extra else contents


_TAKE: Final[dict[type, Callable[[Validator, Place, Any], None]]] = {
    StreamEvent: Validator._event,
    LogRecord: Validator._log_record,
    BatchArrived: Validator._batch,
    StreamEnded: Validator._ended,
    Membership: Validator._membership,
    Snapshot: Validator._snapshot,
    LogSettings: lambda validator, _, settings: validator._set(settings),
    Bad: Validator._bad,
}


def report_value(validator: Validator, verdicts: Sequence[Verdict], version: str) -> dict[str, Any]:
    """The whole result as plain values."""
    findings = validator.findings
    return {
        "schema": REPORT_SCHEMA,
        "version": version,
        "mode": validator.options.mode.value,
        "copies": validator.copies_used(),
        "placement": "strict" if validator.options.strict else "lenient",
        "hash_rule": HASH_RULE,
        "clean": findings.count(Severity.ERROR, Severity.WARNING) == 0,
        "items": validator.items,
        "events_by_tier": dict(sorted(validator.tiers.items())),
        "counts": {f"{code} {severity}": number for (code, severity), number in sorted(findings.counts.items())},
        "findings": [attrs.asdict(finding, value_serializer=lambda _i, _a, value: value) for finding in findings.kept],
        "verdicts": [attrs.asdict(verdict) | {"exact": verdict.exact} for verdict in verdicts],
    }


def report_json(value: dict[str, Any]) -> str:
    return json.dumps(value, sort_keys=True, indent=1, allow_nan=False) + "\n"


def report_lines(validator: Validator, verdicts: Sequence[Verdict], *, most: int = 50) -> list[str]:
    """The result for people: findings, then counts, then one verdict a rank."""
    findings = validator.findings
    lines = [finding.text() for finding in findings.kept[:most]]
    total = sum(findings.counts.values())
    if total > len(lines):
        lines.append(f"... {total - len(lines)} more; --json has up to {validator.options.keep} of each rule")
    if lines:
        lines.append("")
    for (code, severity), number in sorted(findings.counts.items()):
        lines.append(f"{code} {BY_CODE[code].name}: {number} {severity}{'' if number == 1 else 's'}")
    by_tier = ", ".join(f"{tier} {count}" for tier, count in sorted(validator.tiers.items())) or "none"
    lines.append(f"events by tier: {by_tier}")
    placement = "strict" if validator.options.strict else "lenient"
    copies = " and ".join(validator.copies_used()) or "logical"
    lines.append(f"mode {validator.options.mode}, copies {copies}, placement {placement}")
    if any("medium" in tier for tier in validator.tiers):
        lines.append("tiers by form and spelling:")
        grouped = itertools.groupby(tier_table(), key=lambda row: (row[0], row[2]))
        lines += [f"  {form} {tier}: {' '.join(row[1] for row in rows)}" for (form, tier), rows in grouped]
    if validator.findings.of("KV004"):
        lines.append(f"hash rule: {HASH_RULE}")
    lines.append("")
    unread = sum(number for (code, _), number in findings.counts.items() if code in UNREAD)
    if unread:
        lines.append(
            f"{unread} {'place' if unread == 1 else 'places'} of the input could not be read: no verdict counts that"
        )
    lines += [verdict.text() for verdict in verdicts]
    return lines
