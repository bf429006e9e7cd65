"""Measured pass times from a CSV file.

Owns: the columns, what makes a file malformed, interpolation, and what is said about passes outside the table.
Refuses to know: scenario files, and who measured how (docs/timing.md says how to).

A row is one measured pass; columns in any order, blank lines and lines that start with ``#`` are skipped:

    phase           prefill or decode
    requests        requests in the pass, >= 1
    new_tokens      prefill: prompt tokens that the pass computes, of all its requests; decode: empty
    context_tokens  tokens known before it, of all its requests (prefill: the reused prefixes, 0 or more), or
                    decode: prompt and generated tokens up to and including the ones that the pass computes, >= 1
    ms              duration, finite, 0 or more

Interpolation is linear along one axis at a time: along ``context_tokens`` for every measured pair of requests and new
tokens around the pass, then along ``new_tokens``, then along ``requests``. On a full grid that is multilinear
interpolation; unlike that, it takes grids that are not full, and those of engines are not (few requests with much
context, or many with little). It gives a measured pass its measured time, and needs no fit whose error would have to be
stated. Below the first value of an axis the time at that value is taken; above the last one the last segment goes on in
a straight line, but never down. Passes more than ``WARN_FACTOR`` outside are noted.
"""

from __future__ import annotations

import csv
import math
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import attrs
import blake3

from g2sim.actors.config import ExternalTiming
from g2sim.bus.errors import ConfigError

COLUMNS = ("phase", "requests", "new_tokens", "context_tokens", "ms")
AXES: Mapping[str, Sequence[str]] = {
    "prefill": ("requests", "new_tokens", "context_tokens"),
    "decode": ("requests", "context_tokens"),
}
WARN_FACTOR = 1.25
MAX_FILE_BYTES = 2**26

_CACHED_TIMES = 65_536
_LARGEST = 2**53
_PER_REQUEST: Mapping[str, str] = {"prefill": "new_tokens", "decode": "context_tokens"}
"""The sum to which each request of a pass adds at least one token."""
_DIGITS = re.compile(r"[0-9]{1,16}")
_NUMBER = re.compile(r"[0-9]*\.?[0-9]*([eE][+-]?[0-9]+)?")

Point = tuple[int, ...]
"""Coordinates of a pass along the axes of its phase."""


@attrs.frozen(kw_only=True)
class TableTiming(ExternalTiming):
    """Pass times from a CSV file. ``path``: as the user wrote it, relative to the scenario file."""

    path: str


@attrs.define
class _Axis:
    """Measured values along one axis, ascending, and at each of them the next axis, or the time [ms]."""

    name: str
    at: list[int] = attrs.Factory(list)
    inner: list[_Axis | float] = attrs.Factory(list)


class PassTable:
    """``PassTimes`` of one table. It remembers the farthest passes outside, for ``notes``."""

    def __init__(self, name: str, rows: Mapping[str, Mapping[Point, float]], digest: str) -> None:
        self.name = name
        self.digest = digest
        self.row_count = sum(map(len, rows.values()))
        self._axes = {phase: _nested(sorted(points.items()), AXES[phase]) for phase, points in rows.items() if points}
        self._outside: dict[tuple[str, str, bool], tuple[float, int, int]] = {}
        self._value = lru_cache(_CACHED_TIMES)(self._looked_up)

    @property
    def phases(self) -> tuple[str, ...]:
        """Phases that there are rows of."""
        return tuple(self._axes)

    def prefill_ms(self, requests: int, prompt_tokens: int, prefix_tokens: int) -> float:
        return self._value("prefill", (requests, prompt_tokens - prefix_tokens, prefix_tokens))

    def decode_ms(self, requests: int, known_tokens: int) -> float:
        return self._value("decode", (requests, known_tokens))

    def notes(self) -> tuple[str, ...]:
        """What there is to say about passes so far that were far outside the table."""
        return tuple(
            f"{self.name}: {phase} passes with {axis} {'up' if above else 'down'} to {value}, measured only "
            + (f"up to {end}: extrapolated" if above else f"from {end} on: taken as at {end}")
            for (phase, axis, above), (_, value, end) in sorted(self._outside.items())
        )

    def _looked_up(self, phase: str, point: Point) -> float:
        return self._along(self._axes[phase], phase, point)

    def _along(self, node: _Axis | float, phase: str, point: Point) -> float:
        if not isinstance(node, _Axis):
            return node
        value, rest, at, inner = point[0], point[1:], node.at, node.inner
        place = bisect_left(at, value)
        if place < len(at) and (at[place] == value or place == 0):
            self._seen(phase, node, value, at[place] / value if value else float(at[place]))
            return self._along(inner[place], phase, rest)
        beyond = place == len(at)
        if beyond:
            self._seen(phase, node, value, value / at[-1] if at[-1] else math.inf)
            if len(at) == 1:
                return self._along(inner[0], phase, rest)
            place -= 1
        low, high = self._along(inner[place - 1], phase, rest), self._along(inner[place], phase, rest)
        if beyond:
            return high + max(0.0, high - low) * ((value - at[place]) / (at[place] - at[place - 1]))
        return low + (high - low) * ((value - at[place - 1]) / (at[place] - at[place - 1]))

    def _seen(self, phase: str, axis: _Axis, value: int, factor: float) -> None:
        if factor > WARN_FACTOR:
            above = value > axis.at[-1]
            key = (phase, axis.name, above)
            end = axis.at[-1] if above else axis.at[0]
            self._outside[key] = max(self._outside.get(key, (0.0, 0, 0)), (factor, value, end))


def read_pass_table(path: Path, name: str) -> PassTable:
    """Reads a table; ``name`` is what notes call it.

    Raises: ConfigError with file and line if it cannot be read or is malformed.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) and problem.strerror else str(problem)
        raise ConfigError("", problem=f"cannot read the table: {reason}", where=str(path)) from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError("", problem="the table is too large", allowed=f"{MAX_FILE_BYTES} bytes", where=str(path))
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        line = data.count(b"\n", 0, problem.start) + 1
        raise ConfigError("", problem="the table is not UTF-8 text", where=f"{path}:{line}") from None
    rows: dict[str, dict[Point, float]] = {phase: {} for phase in AXES}
    lines: dict[tuple[str, Point], int] = {}
    for row in _rows(text, str(path)):
        phase, point, duration_ms = row.measured()
        if (phase, point) in lines:
            raise ConfigError("", problem=f"measured before, on line {lines[phase, point]}", where=row.where)
        lines[phase, point] = row.line
        rows[phase][point] = duration_ms
    if not lines:
        raise ConfigError("", problem="the table holds no rows", where=str(path))
    return PassTable(name, rows, blake3.blake3(data).hexdigest()[:16])


@attrs.frozen
class _Row:
    """One line of the table: column -> text."""

    path: str
    line: int
    cells: Mapping[str, str]

    @property
    def where(self) -> str:
        return f"{self.path}:{self.line}"

    def measured(self) -> tuple[str, Point, float]:
        phase = self.cells["phase"]
        if phase not in AXES:
            raise self.error("phase", " or ".join(AXES))
        if phase == "decode" and self.cells["new_tokens"]:
            raise self.error("new_tokens", "nothing in a decode row, whose requests compute one token each")
        values = {"requests": self.integer("requests", 1)}
        for axis in AXES[phase][1:]:
            values[axis] = self.integer(axis, values["requests"] if axis == _PER_REQUEST[phase] else 0)
        point = tuple(values.values())
        return phase, point, self.milliseconds()

    def integer(self, column: str, lowest: int) -> int:
        text = self.cells[column]
        if not _DIGITS.fullmatch(text) or not lowest <= int(text) <= _LARGEST:
            shown = f"{lowest}, one token for each request," if column != "requests" and lowest else str(lowest)
            raise self.error(column, f"an integer from {shown} to 2**53")
        return int(text)

    def milliseconds(self) -> float:
        text = self.cells["ms"]
        try:
            value = float(text) if _NUMBER.fullmatch(text) else math.nan
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise self.error("ms", "a finite number, 0 or more")
        return value

    def error(self, column: str, allowed: str) -> ConfigError:
        return ConfigError(column, got=self.cells[column], allowed=allowed, where=self.where)


def _rows(text: str, path: str) -> Iterator[_Row]:
    header: list[str] | None = None
    for line, content in enumerate(text.split("\n"), start=1):
        content = content.rstrip("\r")
        if not content.strip() or content.startswith("#"):
            continue
        where = f"{path}:{line}"
        try:
            cells = [cell.strip() for cell in next(csv.reader([content], strict=True))]
        except csv.Error as error:
            raise ConfigError("", problem=f"not a line of CSV: {error}", got=content, where=where) from None
        if header is None:
            if sorted(cells) != sorted(COLUMNS):
                problem = "the first line must name the columns"
                raise ConfigError("", problem=problem, got=content, allowed=",".join(COLUMNS), where=where)
            header = cells
            continue
        if len(cells) != len(header):
            problem = f"{len(cells)} values for {len(header)} columns"
            raise ConfigError("", problem=problem, got=content, allowed=",".join(header), where=where)
        yield _Row(path, line, dict(zip(header, cells, strict=True)))


def _nested(points: Sequence[tuple[Point, float]], axes: Sequence[str]) -> _Axis | float:
    """The tree of axes over points that are sorted."""
    if not axes:
        return points[0][1]
    axis = _Axis(axes[0])
    groups: dict[int, list[tuple[Point, float]]] = {}
    for point, duration_ms in points:
        groups.setdefault(point[0], []).append((point[1:], duration_ms))
    for value, group in groups.items():
        axis.at.append(value)
        axis.inner.append(_nested(group, axes[1:]))
    return axis
