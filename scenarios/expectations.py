"""Expectations of a scenario: what ``expect`` says, and whether the logs of its runs meet it.

Owns: the meaning of an expectation, measuring it, and telling which events led to what was found instead.
Refuses to know: how runs are made (``suite``).

An expectation bounds a *figure* of one run: a field of its report, or how many events of a type it has. With ``minus``
it bounds the difference of that figure between two variants of the scenario.
"""

from __future__ import annotations

import operator
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from g2sim.actors.config import PoolConfig
from g2sim.actors.membership.events import CachesCleared, WorkerStateKnown
from g2sim.actors.router.events import FaultBegan, IndexCompared
from g2sim.actors.router.faults import Fault, FaultKind
from g2sim.bus.errors import ConfigError, InvariantViolation, close_to, read_all, shorten
from g2sim.bus.events import BY_CLASS, BY_TAG, Record
from g2sim.bus.log import LogReader
from g2sim.scenarios.fault_plan import may_see_blocks
from g2sim.scenarios.fields import ABSENT
from g2sim.scenarios.layout import BOUNDS
from g2sim.scenarios.records import Numbered, chain_of, event_tags, numbered
from g2sim.scenarios.report import Report, ReportFold, RunInfo
from g2sim.scenarios.run import report_of_log
from g2sim.scenarios.schema import Scenario
from g2sim.scenarios.yaml_source import Document, KeyPath, dotted

MISSING = object()
"""What a report says of a path that it does not have."""

_STEP = re.compile(r"\[(\d+)\]|([^.\[\]]+)")
_SEARCH_POINTS = 64

_HOLDS: Mapping[str, Callable[[Any, Any], bool]] = {
    "at_least": operator.ge,
    "at_most": operator.le,
    "above": operator.gt,
    "below": operator.lt,
}


@attrs.frozen
class ReportFigure:
    """A field of the report, by its path: ``totals.passes``, ``workers[0].passes``."""

    path: str

    @property
    def text(self) -> str:
        return self.path


@attrs.frozen
class EventFigure:
    """How many events of some types there are whose fields have these values, at times from..to [ms]."""

    word: str
    tags: tuple[str, ...]
    fields: tuple[tuple[str, Any], ...]
    since_ms: float | None
    until_ms: float | None

    @property
    def text(self) -> str:
        where = ", ".join(f"{name} {_shown(value)}" for name, value in self.fields)
        since = "" if self.since_ms is None else f" from {self.since_ms!r} ms"
        until = "" if self.until_ms is None else f" until {self.until_ms!r} ms"
        return f"number of {self.word}{f' with {where}' if where else ''}{since}{until}"

    def counts(self, record: Record) -> bool:
        """Whether a record is one of those counted."""
        event = record.event
        return (
            BY_CLASS[type(event)].tag in self.tags
            and (self.since_ms is None or record.time_ms >= self.since_ms)
            and (self.until_ms is None or record.time_ms <= self.until_ms)
            and all(_same(getattr(event, name), value) for name, value in self.fields)
        )


Figure = ReportFigure | EventFigure


@attrs.frozen(kw_only=True)
class Expectation:
    """One entry of ``expect``.

    Attributes:
        place: "file:line: expect[i]", or what of it is known.
        variant: the variant of whose run it speaks, None where there are none.
        minus: the variant whose figure is taken off, None without.
        bounds: (key, value) as written, at least one.
    """

    place: str
    figure: Figure
    variant: str | None
    minus: str | None
    bounds: tuple[tuple[str, Any], ...]

    @property
    def text(self) -> str:
        about = "" if self.variant is None else f" of {self.variant}"
        minus = "" if self.minus is None else f" minus that of {self.minus}"
        return f"{self.figure.text}{about}{minus}"

    @property
    def wanted(self) -> str:
        return " and ".join(f"{key.replace('_', ' ')} {_shown(_plain(value))}" for key, value in self.bounds)

    @property
    def variants(self) -> tuple[str | None, ...]:
        """The runs that it needs."""
        return (self.variant,) if self.minus is None else (self.variant, self.minus)


@attrs.frozen(kw_only=True)
class Verdict:
    """Whether an expectation holds; ``told`` says expected, got and what led there if it does not."""

    expectation: Expectation
    told: str | None

    @property
    def holds(self) -> bool:
        return self.told is None


# Reading -----------------------------------------------------------------------------------------------------------


def read_expectations(
    document: Document, tree: Mapping[str, Any], runs: Mapping[str | None, Scenario]
) -> list[Expectation]:
    """The expectations of a scenario's checked tree.

    Args:
        runs: variant -> scenario, or None -> scenario if there are no variants. An entry that names no variant is an
            expectation of each.
    Raises: ConfigError for those that no run can meet: a report field, event, field or variant that does not exist.
    """
    entries = tree["expect"]
    found = read_all(lambda idx: list(_expected(document, entries[idx], ("expect", idx), runs)), range(len(entries)))
    return [one for of_entry in found for one in of_entry]


def _expected(
    document: Document, entry: Mapping[str, Any], path: KeyPath, runs: Mapping[str | None, Scenario]
) -> Iterator[Expectation]:
    """What one entry expects, of each run that it speaks of."""
    figure = _figure(document, entry, path)
    if entry["minus"] is not None and entry["variant"] is None:
        raise document.error(path, problem="minus needs the variant that it is taken from", allowed="variant: NAME")
    bounds = tuple((key, entry[key]) for key in BOUNDS if entry[key] is not ABSENT)
    if not bounds and isinstance(figure, EventFigure) and entry["minus"] is None:
        bounds = (("at_least", 1),)
    if not bounds:
        raise document.error(path, problem="says nothing of the value", allowed=f"one of {', '.join(BOUNDS)}")
    names = [name for name in runs if name is not None]
    for key in ("variant", "minus"):
        if entry[key] is not None and entry[key] not in names:
            allowed = ", ".join(names) or "no variant: the scenario has none"
            hint = close_to(entry[key], names)
            raise document.error((*path, key), got=entry[key], allowed=allowed, hint=hint)
    of = list(runs) if entry["variant"] is None else [entry["variant"]]
    for variant in of:
        if isinstance(figure, ReportFigure):
            _check_field(document, figure, (*path, "report"), runs[variant])
        place = f"{document.where(path)}: " if document.source is not None else ""
        yield Expectation(
            place=f"{place}{dotted(path)}", figure=figure, variant=variant, minus=entry["minus"], bounds=bounds
        )


def _figure(document: Document, entry: Mapping[str, Any], path: KeyPath) -> Figure:
    given = [key for key in ("report", "events") if entry[key] is not None]
    if len(given) != 1:
        problem = "what is expected of is missing" if not given else "report and events do not go together"
        raise document.error(path, problem=problem, allowed="report: PATH, or events: TYPE")
    if given == ["report"]:
        for key in ("where", "since_ms", "until_ms"):
            if entry[key]:
                raise document.error((*path, key), problem="goes with events only", got=entry[key])
        return ReportFigure(entry["report"])
    word = entry["events"]
    try:
        tags = event_tags(word)
    except ConfigError as error:
        raise document.error(
            (*path, "events"), problem=error.problem, got=word, allowed=error.allowed, hint=error.hint
        ) from None
    for tag in tags:
        for name in entry["where"]:
            known = BY_TAG[tag].fields
            if name not in known:
                hint = close_to(name, known)
                problem = f"no such field of {tag}"
                raise document.error((*path, "where", name), problem=problem, allowed=", ".join(known), hint=hint)
    since_ms, until_ms = entry["since_ms"], entry["until_ms"]
    if since_ms is not None and until_ms is not None and until_ms < since_ms:
        raise document.error((*path, "until_ms"), got=until_ms, allowed=f"a time from since_ms, {since_ms!r}, on")
    wanted = []
    for name, value in entry["where"].items():
        items = value if isinstance(value, list) else [value]
        if any(isinstance(item, list | dict) for item in items):
            raise document.error((*path, "where", name), got=value, allowed="a single value, or a list of them")
        wanted.append((name, tuple(items) if isinstance(value, list) else value))
    return EventFigure(word, tags, tuple(wanted), since_ms, until_ms)


def _check_field(document: Document, figure: ReportFigure, path: KeyPath, scenario: Scenario) -> None:
    """Refuses a path that no report of this scenario can have. What plays add to the summary only a run knows."""
    report = _outline(scenario)
    if _at(report, figure.path) is not MISSING or (scenario.traffic.agentic and figure.path.startswith("summary.")):
        return
    if figure.path.startswith("ttft_parts_mean_ms."):
        return
    known = list(_paths(report))
    last = figure.path.rpartition(".")[2]
    hint = close_to(figure.path, known)
    if (elsewhere := next((one for one in known if one.rpartition(".")[2] == last), None)) is not None:
        hint = f"did you mean {elsewhere}?"
    allowed = f"a path that starts with {', '.join(report)}"
    raise document.error(path, problem="no such report field", got=figure.path, allowed=allowed, hint=hint)


def _outline(scenario: Scenario) -> Report:
    """The report of a run in which nothing has happened, but that its faults, if any, have struck nothing."""
    fold = ReportFold(_info(scenario, scenario.seed))
    router = scenario.deployment.router
    sees_blocks = may_see_blocks(router.policy, router.options)
    for fault in () if scenario.faults is None else scenario.faults.faults:
        for config in scenario.deployment.pools:
            pool, events = config.role.pool_name, list[Any]()
            if sees_blocks and fault.pool in (None, pool):
                events.append(FaultBegan(pool=pool, fault=fault.name, kind=fault.kind.value))
                events.append(IndexCompared(pool=pool, phantom_blocks=0, unseen_blocks=0, under_way=0))
            if fault.kind.is_membership:
                events += _struck(fault, config)
            for event in events:
                fold.apply(Record(time_ms=0.0, source=pool, cause=0, event=event))
    return fold.finish()


def _struck(fault: Fault, config: PoolConfig) -> Iterator[Any]:
    """One event for each worker or rank of a pool that the report will have something of."""
    pool = config.role.pool_name
    for worker in fault.workers_of(pool, config.workers):
        if fault.kind is not FaultKind.CACHE_CLEAR:
            yield WorkerStateKnown(pool=pool, worker=worker, state="ready", fault=fault.name)
            continue
        for dp_rank in range(config.dp_size):
            if fault.strikes(worker, dp_rank):
                yield CachesCleared(
                    worker=worker,
                    role=config.role.value,
                    dp_rank=dp_rank,
                    fault=fault.name,
                    device_dropped_blocks=0,
                    device_kept_blocks=0,
                    host_dropped_blocks=0,
                )


def _info(scenario: Scenario, seed: int) -> RunInfo:
    return RunInfo.of(scenario.deployment, name=scenario.name, seed=seed, version="")


def _paths(value: Any, path: str = "") -> Iterable[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _paths(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and value:
        for idx, inner in enumerate(value):
            yield from _paths(inner, f"{path}[{idx}]")
    else:
        yield path


def _at(report: Report, path: str) -> Any:
    """The report's value at a path, MISSING if it has none."""
    value: Any = report
    steps = list(_STEP.finditer(path))
    if re.sub(r"[.]", "", path) != "".join(step[0] for step in steps):
        return MISSING
    for step in steps:
        if step[1] is not None:
            if not isinstance(value, list) or int(step[1]) >= len(value):
                return MISSING
            value = value[int(step[1])]
        elif not isinstance(value, dict) or step[2] not in value:
            return MISSING
        else:
            value = value[step[2]]
    return value


# Judging -----------------------------------------------------------------------------------------------------------


def judge(expectations: Sequence[Expectation], logs: Mapping[str | None, Path]) -> list[Verdict]:
    """Measure what is expected of, and compare.

    Args:
        logs: variant (None without variants) -> event log of its run. Expectations about other variants are left out.
    """
    asked = [one for one in expectations if all(variant in logs for variant in one.variants)]
    values: dict[tuple[str | None, Figure], Any] = {}
    for variant, log in logs.items():
        figures = list(dict.fromkeys(one.figure for one in asked if variant in one.variants))
        if figures:
            values.update(((variant, figure), value) for figure, value in _measured(log, figures).items())
    return [_verdict(one, values, logs) for one in asked]


def _measured(log: Path, figures: Sequence[Figure]) -> dict[Figure, Any]:
    events = [figure for figure in figures if isinstance(figure, EventFigure)]
    values: dict[Figure, Any] = dict.fromkeys(events, 0)

    def count(record: Record) -> None:
        for figure in events:
            values[figure] += figure.counts(record)

    report = report_of_log(log, on_record=count).report
    values.update((figure, _at(report, figure.path)) for figure in figures if isinstance(figure, ReportFigure))
    return values


def _fold(reader: LogReader) -> ReportFold:
    return ReportFold(_info(Scenario.of_log(reader), reader.header.seed))


def _verdict(
    one: Expectation, values: Mapping[tuple[str | None, Figure], Any], logs: Mapping[str | None, Path]
) -> Verdict:
    parts = [values[variant, one.figure] for variant in one.variants]
    if one.minus is None:
        got, said = parts[0], _shown(parts[0])
    elif all(_is_number(part) for part in parts):
        got = parts[0] - parts[1]
        said = f"{_shown(got)} = {_shown(parts[0])} ({one.variant}) - {_shown(parts[1])} ({one.minus})"
    else:
        got, said = MISSING, f"no difference: {_shown(parts[0])} ({one.variant}), {_shown(parts[1])} ({one.minus})"
    if all(_bound_holds(key, got, bound) for key, bound in one.bounds):
        return Verdict(expectation=one, told=None)
    lines = [f"{one.place}: {one.text}", f"  expected: {one.wanted}", f"  got: {said}"]
    for variant in one.variants:
        about = "" if variant is None else f" in {variant}"
        lines.append(f"  the events that led there{about}:")
        lines += [f"    {event.line}" for event in led_to(logs[variant], one.figure)] or ["    none"]
    return Verdict(expectation=one, told="\n".join(lines))


def _bound_holds(key: str, got: Any, bound: Any) -> bool:
    if key == "equals":
        return _same(got, bound)
    return _is_number(got) and _HOLDS[key](got, bound)


def _same(got: Any, wanted: Any) -> bool:
    """Equality in which numbers are numbers, and true is not 1."""
    if isinstance(got, tuple) and isinstance(wanted, tuple):
        return len(got) == len(wanted) and all(map(_same, got, wanted))
    return isinstance(got, bool) == isinstance(wanted, bool) and bool(got == wanted)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _plain(value: Any) -> Any:
    """A bound as people write it: bounds are read as floats."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _shown(value: Any) -> str:
    if value is MISSING:
        return "nothing: the report has no such field"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return shorten(value)


# What led there ----------------------------------------------------------------------------------------------------


def led_to(log: Path, figure: Figure) -> list[Numbered]:
    """The record that made a figure what it is at the end, and those that led to it, the earliest first.

    For a count that is the last event counted; if there is none, the last of its types with other values in its fields,
    else the last of all. For a report field it is the last record found after which the field has its final value and
    before which it had another.
    """
    idx = _last_change(log, figure) if isinstance(figure, ReportFigure) else _last_counted(log, figure)
    return [] if idx is None else chain_of(log, idx)


def _last_counted(log: Path, figure: EventFigure) -> int | None:
    counted = near = last = None
    with LogReader(log) as reader:
        for one in numbered(reader):
            last = one.idx
            if figure.counts(one.record):
                counted = one.idx
            elif BY_CLASS[type(one.record.event)].tag in figure.tags:
                near = one.idx
    return next((idx for idx in (counted, near, last) if idx is not None), None)


def _last_change(log: Path, figure: ReportFigure) -> int | None:
    """Narrowed down in passes over the log that each look at the field in ``_SEARCH_POINTS`` places."""
    with LogReader(log) as reader:
        count = sum(1 for _ in reader)
    low, high = -1, count - 1  # numbers of records after which the field is looked at; -1: before the first
    while high - low > 1:
        step = max(1, (high - low) // _SEARCH_POINTS)
        points = sorted({*range(low, high, step), high})
        seen = _values_after(log, figure, points)
        final = seen[-1]
        other = next((place for place in reversed(range(len(points))) if not _same(seen[place], final)), None)
        if other is None:
            return None
        low, high = points[other], points[other + 1]
    return high if high >= 0 else None


def _values_after(log: Path, figure: ReportFigure, points: Sequence[int]) -> list[Any]:
    """The field's value after each of these records; ``points`` ascend."""
    values: list[Any] = []
    with LogReader(log) as reader:
        fold = _fold(reader)
        if points[0] < 0:
            values.append(_at(fold.finish(), figure.path))
        for one in numbered(reader):
            fold.apply(one.record)
            place = bisect_left(points, one.idx)
            if place < len(points) and points[place] == one.idx:
                values.append(_at(fold.finish(), figure.path))
            if one.idx >= points[-1]:
                break
    if len(values) != len(points):
        raise InvariantViolation(f"{log} became shorter while it was read")
    return values
