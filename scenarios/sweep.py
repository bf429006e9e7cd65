"""A scenario run at many points: other values at some of its fields, and other seeds.

Owns: which points there are, what a row of figures holds, and how finished points are kept and found again.
Refuses to know: the terminal, and what the fields mean.

A point is kept as a file named after all that decides its figures: the values of the scenario with the changes, the
seed, the contents of the files that it names, and the version of the program. A change to any of these makes it another
point. Not looked at: the code of installed placement policies, and the version of the performance model.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import itertools
import json
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO, TypeVar

import attrs

from g2sim.bus.errors import ConfigError, SimError
from g2sim.scenarios.compare import LEVEL, Mean, Metric, audited_run, mean_of, seeded
from g2sim.scenarios.compare import METRICS as COMPARED
from g2sim.scenarios.output_file import new_text_file
from g2sim.scenarios.processes import Processes, Progress
from g2sim.scenarios.run import program_version
from g2sim.scenarios.schema import Scenario, from_file
from g2sim.scenarios.shipped_files import Packer, Parcel, Unpacked, files_under, paths_named
from g2sim.scenarios.suite import FIXED_KEYS
from g2sim.scenarios.yaml_source import Document, read_file, read_yaml

SCHEMA = "g2sim.sweep/1"
POINT_SCHEMA = "g2sim.sweep-point/1"
MAX_POINTS = 10_000

_RATES = (
    Metric("request_throughput_rps", "throughput", "requests/s", "higher"),
    Metric("output_throughput_tok_s", "output", "tokens/s", "higher"),
    Metric("total_throughput_tok_s", "all tokens", "tokens/s", "higher"),
)
METRICS = (*COMPARED, *_RATES)
"""Figures of a row. Those of ``compare`` are explained there, the rates in ``definitions`` of a report."""

Figures = dict[str, float | None]
Outcome = TypeVar("Outcome")


@attrs.frozen
class Point:
    """One run of a sweep.

    Attributes:
        labels: what the point is called by: column -> value.
        changes: dotted path of the scenario -> value in place of the file's.
        shift: how far all seeds are moved on from the scenario's.
    """

    labels: Mapping[str, Any]
    changes: Mapping[str, Any]
    shift: int


@attrs.frozen
class Task:
    """A point with all that its run needs; can go to another machine.

    Attributes:
        document: the scenario as its file has it.
        path: that file, for names and for what paths are relative to; it is not read.
        unpacked: where the files stand that the scenario names, None where it says.
    """

    document: Document
    path: Path
    point: Point
    unpacked: Unpacked | None = None

    def parcel(self, packer: Packer) -> Parcel:
        """The files that the scenario names. Raises: OSError."""
        return packer.parcel(self.changed.values, self.path.parent)

    @property
    def changed(self) -> Document:
        """The scenario of the point, but for its seed."""
        return self.document.overridden(self.point.changes, ("--set",))

    def scenario(self) -> Scenario:
        """Raises: ConfigError."""
        document, path = self.changed, self.path
        if self.unpacked is not None:
            document, path = self.unpacked.document(document), self.unpacked.folder / path.name
        return seeded(from_file(document, path), self.point.shift)

    def told(self, error: SimError) -> str:
        """What an error of the run says, wherever it ran."""
        return str(error) if self.unpacked is None else self.unpacked.told(str(error))


class Runner(Protocol):
    """Where the points run: ``Processes`` of this machine, or a ``DaskCluster``."""

    def outcomes(
        self, work: Callable[[Task], Outcome], tasks: Sequence[Task]
    ) -> Generator[tuple[int, Outcome], None, None]:
        """(position of the task, what ``work`` gives for it), in the order in which they are done; each once."""


IN_THIS_PROCESS = Processes()


@attrs.frozen
class Row:
    """What became of a point: metric -> value (None where there is nothing to measure), or the error that ended it."""

    labels: Mapping[str, Any]
    seed: int
    values: Mapping[str, float | None] | None
    error: str | None = None

    def value(self, metric: str) -> float | None:
        """None also if the point failed."""
        return None if self.values is None else self.values[metric]


@attrs.frozen(kw_only=True)
class Sweep:
    """Rows in the order of their points.

    Attributes:
        axes: column -> its values.
        kept: how many of the rows were found in the folder.
        goals: two figures, each with the way in which it is better; None if nobody asked for a Pareto front.
        on_front: whether a row's combination is on their front, None for one without these figures.
    """

    scenario: str
    axes: Mapping[str, Sequence[Any]]
    rows: tuple[Row, ...]
    kept: int = 0
    goals: tuple[Metric, Metric] | None = None
    on_front: tuple[bool | None, ...] = ()

    @property
    def failed(self) -> list[Row]:
        return [row for row in self.rows if row.values is None]

    @property
    def seeds(self) -> list[int]:
        return sorted({row.seed for row in self.rows})

    @property
    def combinations(self) -> list[tuple[Row, ...]]:
        """The rows of each combination of values: one a seed, next to each other."""
        seeds = len(self.seeds)
        return [self.rows[start : start + seeds] for start in range(0, len(self.rows), seeds)]

    def means(self, metric: str) -> list[Mean | None]:
        """For each combination, None if a run of it failed or had nothing to measure."""
        return [mean_of([row.value(metric) for row in rows]) for rows in self.combinations]

    @property
    def seeds_differ(self) -> bool:
        """Whether a figure of some combination depends on the seed."""
        return any(row.values != rows[0].values for rows in self.combinations for row in rows)

    @property
    def short_columns(self) -> list[str]:
        """The columns by the last keys of their paths, as long as these differ."""
        short = [column.rpartition(".")[2] for column in self.axes]
        return short if len(set(short)) == len(short) else list(self.axes)

    def plain(self) -> dict[str, Any]:
        """As plain JSON values; does not depend on which rows were kept from an earlier sweep."""
        rows = [attrs.asdict(row) for row in self.rows]
        plain: dict[str, Any] = {
            "schema": SCHEMA,
            "program": "g2sim",
            "version": program_version(),
            "scenario": self.scenario,
            "axes": {column: list(values) for column, values in self.axes.items()},
            "metrics": {metric.name: attrs.asdict(metric) for metric in METRICS},
            "rows": rows,
        }
        if len(self.seeds) > 1:
            means = {metric.name: self.means(metric.name) for metric in METRICS}
            plain["confidence_level"] = LEVEL
            plain["points"] = [
                {
                    "labels": dict(runs[0].labels),
                    "means": {
                        name: None if (mean := of[k]) is None else attrs.asdict(mean) for name, of in means.items()
                    },
                }
                for k, runs in enumerate(self.combinations)
            ]
        if self.goals is not None:
            plain["pareto"] = {goal.name: goal.better for goal in self.goals}
            for row, mark in zip(rows, self.on_front, strict=True):
                row["pareto"] = mark
        return plain

    def write_csv(self, file: TextIO) -> None:
        """A header, then a line a row; empty where there is nothing to measure."""
        table = csv.writer(file, lineterminator="\n")
        columns = self.columns()
        table.writerow(columns)
        for values in zip(*(values for _, values in columns.values()), strict=True):
            table.writerow([json.dumps(value) if isinstance(value, bool) else value for value in values])

    def columns(self) -> dict[str, tuple[type, list[Any]]]:
        """The table of ``write_csv`` by column: type of its values and these, None where there is nothing.

        Values of a field that are not all of one plain type are text, as in the CSV file.
        """
        names = {column: [row.labels[column] for row in self.rows] for column in self.axes}
        table: dict[str, tuple[type, list[Any]]] = {}
        for column, values in (names | {"seed": [row.seed for row in self.rows]}).items():
            kind = _kind(values)
            table[column] = (kind, [cell(value) for value in values] if kind is str else values)
        for metric in METRICS:
            table[metric.name] = (float, [(row.values or {}).get(metric.name) for row in self.rows])
        if self.goals is not None:
            table["pareto"] = (bool, list(self.on_front))
        return table | {"error": (str, [row.error for row in self.rows])}


def _kind(values: Sequence[Any]) -> type:
    kinds = {type(value) for value in values}
    if kinds in ({bool}, {float}) or (kinds == {int} and all(abs(value) < 2**63 for value in values)):
        return kinds.pop()
    return str


def cell(value: Any) -> str:
    """A value of a scenario in one cell of a table: text as it is, all else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def read_settings(settings: Sequence[str]) -> dict[str, list[Any]]:
    """Dotted path -> values, from PATH=VALUE,VALUE... texts; the values are written as in a YAML list.

    Raises: ConfigError.
    """
    axes: dict[str, list[Any]] = {}
    for setting in settings:
        path, equals, text = setting.partition("=")
        path = path.strip()
        if not equals or not all(path.split(".")):
            raise ConfigError("--set", got=setting, allowed="PATH=VALUE,VALUE... with a dotted path of the scenario")
        option = f"--set {path}"
        if path in axes:
            raise ConfigError(option, problem="given twice", hint="give all values to one --set")
        if (inside := next((other for other in axes if _overlap(path, other)), None)) is not None:
            raise ConfigError(option, problem=f"one of it and {inside} is inside the other")
        if path.partition(".")[0] in (*FIXED_KEYS, "why"):
            raise ConfigError(option, problem="does not change what a run does")
        if path == "seed":
            raise ConfigError(option, problem="is not for --set", hint="--seeds runs every point with several seeds")
        read = read_yaml(f"values: [{text}]", option).values
        values = read["values"]
        if len(read) > 1 or not isinstance(values, list) or not values:
            raise ConfigError(option, got=text, allowed="values with commas between them, as in a YAML list")
        try:
            distinct = {json.dumps(value, sort_keys=True, allow_nan=False) for value in values}
        except ValueError:
            raise ConfigError(option, problem="numbers must be finite", got=text) from None
        if len(distinct) < len(values):
            raise ConfigError(option, problem="two of the values are the same", got=text)
        axes[path] = values
    return axes


def _overlap(path: str, other: str) -> bool:
    return f"{path}.".startswith(f"{other}.") or f"{other}.".startswith(f"{path}.")


def sweep(
    path: Path,
    axes: Mapping[str, Sequence[Any]],
    *,
    seeds: int = 1,
    runner: Runner = IN_THIS_PROCESS,
    folder: Path | None = None,
    progress: Progress | None = None,
) -> Sweep:
    """Run a scenario with every combination of values (dotted path -> values); the last path and the seed turn fastest.

    Arguments, errors: as ``run_points``.
    """
    count = seeds
    for values in axes.values():
        count *= len(values)
    if count > MAX_POINTS:
        raise ConfigError("--set", problem="too many points", got=count, allowed=f"at most {MAX_POINTS}")
    combinations = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    points = [Point(changes, changes, shift) for changes in combinations for shift in range(seeds)]
    return run_points(path, axes, points, runner=runner, folder=folder, progress=progress)


def run_points(
    path: Path,
    axes: Mapping[str, Sequence[Any]],
    points: Sequence[Point],
    *,
    runner: Runner = IN_THIS_PROCESS,
    folder: Path | None = None,
    progress: Progress | None = None,
) -> Sweep:
    """Run a scenario at each point. A point that fails is a row with its error, and the others go on.

    Args:
        runner: where points run; the rows do not depend on it.
        folder: where finished points are kept; those that are there are not run again. Failed ones are.
    Raises: ConfigError if the scenario cannot be read, is wrong at every point (the first one's error), or ``folder``
        cannot be used; SimError if ``runner`` fails.
    """
    document = read_file(path)
    tasks = [Task(document, path, point) for point in points]
    first = _first_good(tasks)
    rows: dict[int, Row] = {}

    def settle(idx: int, values: Figures | None, error: str | None = None) -> None:
        rows[idx] = Row(points[idx].labels, first.seed + points[idx].shift, values, error)

    files: dict[int, Path] = {}
    if folder is not None:
        _make(folder)
        digests: dict[Path, str] = {}
        files = {idx: folder / f"{_key(task, digests)}.json" for idx, task in enumerate(tasks)}
        for idx, file in files.items():
            if (values := _kept(file)) is not None:
                settle(idx, values)
    missing = [idx for idx in range(len(points)) if idx not in rows]
    kept = len(rows)
    with contextlib.closing(runner.outcomes(_run, [tasks[idx] for idx in missing])) as found:
        for place, outcome in found:
            idx = missing[place]
            if isinstance(outcome, str):
                settle(idx, None, outcome)
            else:
                if folder is not None:
                    _keep(files[idx], points[idx], first.seed + points[idx].shift, outcome)
                settle(idx, outcome)
            if progress is not None:
                what = told(points[idx].labels, rows[idx].seed)
                progress(len(rows) - kept, len(missing), what if rows[idx].error is None else f"{what}: failed")
    return Sweep(scenario=first.name, axes=axes, rows=tuple(rows[idx] for idx in range(len(points))), kept=kept)


def told(labels: Mapping[str, Any], seed: int) -> str:
    """A point in words."""
    return ", ".join([*(f"{label}={cell(value)}" for label, value in labels.items()), f"seed {seed}"])


def _first_good(tasks: Sequence[Task]) -> Scenario:
    """The scenario, not shifted, of the first point at which it is right: a misspelt path is wrong at every one."""
    first: ConfigError | None = None
    for task in tasks:
        try:
            return attrs.evolve(task, point=attrs.evolve(task.point, shift=0)).scenario()
        except ConfigError as error:
            if first is None:
                first = error
                first.add_note("with " + ", ".join(f"{key}={cell(value)}" for key, value in task.point.changes.items()))
    assert first is not None, "a sweep has points"
    raise first


def _run(task: Task) -> Figures | str:
    """The figures of one point, or what its error says (errors do not travel between processes)."""
    try:
        report, values = audited_run(task.scenario())
    except SimError as error:
        return task.told(error)
    return values | {rate.name: report["summary"][rate.name] for rate in _RATES}


# -- finished points


def _make(folder: Path) -> None:
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        problem = f"cannot be used as a folder ({error.strerror})"
        raise ConfigError("--out", problem=problem, got=str(folder)) from None


def _key(task: Task, digests: dict[Path, str]) -> str:
    """``digests``: file -> digest of its content, of those that were read."""
    values = {key: value for key, value in task.changed.values.items() if key not in (*FIXED_KEYS, "why")}
    contents = []
    try:
        for written in paths_named(values):
            for file in files_under(task.path.parent / written):
                if file not in digests:
                    with file.open("rb") as stream:
                        digests[file] = hashlib.file_digest(stream, "sha256").hexdigest()
                contents.append(digests[file])
    except OSError:
        contents.append("unreadable")  # the point's run says what is wrong
    decides = [POINT_SCHEMA, program_version(), values, task.point.shift, contents]
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:32]


def _kept(file: Path) -> Figures | None:
    """Figures of a finished point; None if there are none, or they cannot be read: the point is run then."""
    try:
        point = json.loads(file.read_text(encoding="utf-8"))
        return {metric.name: point["values"][metric.name] for metric in METRICS}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _keep(file: Path, point: Point, seed: int, values: Figures) -> None:
    content = {"schema": POINT_SCHEMA, "point": dict(point.labels), "seed": seed, "values": values}
    with new_text_file(file, overwrite=True) as out:
        out.write(json.dumps(content, sort_keys=True, indent=1, allow_nan=False) + "\n")
