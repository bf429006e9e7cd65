"""A run as Parquet files, and tables of runs. Needs pyarrow (extra ``parquet``), which only this module imports.

Owns: the files and their columns. Refuses to know: what events and rows mean.

A folder gets ``requests.parquet``, a row a request with what is nested as JSON text, and ``events/<tag>.parquet`` for
each event type that the run has: ``record``, ``time_ms``, ``source``, ``cause``, then the event's fields.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from g2sim.bus.errors import ConfigError, LogDamaged, OutputFailed
from g2sim.bus.events import Record
from g2sim.scenarios.records import record_value
from g2sim.scenarios.run import report_of_log

try:
    import pyarrow
    import pyarrow.parquet
except ImportError:
    raise ConfigError(
        "--parquet", problem="needs the package pyarrow", hint="in a checkout of g2sim: pip install '.[parquet]'"
    ) from None


def write_parquet(run: Path, folder: Path, *, overwrite: bool) -> LogDamaged | None:
    """Write the files of a run, as far as its log is good, to ``folder``, which appears when it is whole.

    Returns: why the log could not be read to its end, None if it could.
    Raises: ConfigError if ``folder`` is in the way, OutputFailed if it cannot be written.
    """
    if folder.exists() and not overwrite:
        raise ConfigError("--out", problem="exists already", got=str(folder), hint="choose another, or add --overwrite")
    if folder.exists() and not (folder / "requests.parquet").exists():
        raise ConfigError("--out", problem="is not a folder of Parquet files, so it is not replaced", got=str(folder))
    partial = folder.with_name(f"{folder.name}.partial")
    try:
        (partial / "events").mkdir(parents=True)
    except FileExistsError:
        raise ConfigError("--out", problem=f"{partial} exists: remove it first") from None
    except OSError as error:
        raise ConfigError("--out", problem=f"cannot be written ({error.strerror})", got=str(folder)) from None
    try:
        damage = _write_all(run, partial)
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
    except BaseException as problem:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(problem, OSError):
            raise OutputFailed(f"{folder}: cannot be written: {problem.strerror or problem}") from problem
        raise
    return damage


def write_table(file: BinaryIO, columns: Mapping[str, tuple[type, Sequence[Any]]]) -> None:
    """Write one table: column -> type of its values (bool, int, float or str), and these; None is null."""
    kinds = {bool: pyarrow.bool_(), int: pyarrow.int64(), float: pyarrow.float64(), str: pyarrow.string()}
    arrays = {name: pyarrow.array(values, kinds[kind]) for name, (kind, values) in columns.items()}
    pyarrow.parquet.write_table(pyarrow.table(arrays), file)


def _write_all(run: Path, folder: Path) -> LogDamaged | None:
    rows: list[dict[str, Any]] = []
    tables: dict[str, list[dict[str, Any]]] = {}
    numbers = itertools.count()

    def add(record: Record) -> None:
        value = record_value(next(numbers), record)
        tables.setdefault(value.pop("event"), []).append(_flat(value))

    damage = report_of_log(run, rows.append, add).damage
    _write(folder / "requests.parquet", [_flat(row) for row in rows])
    for tag, values in sorted(tables.items()):
        _write(folder / "events" / f"{tag}.parquet", values)
    return damage


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    pyarrow.parquet.write_table(pyarrow.table(_columns(rows)), path)


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    return {key: json.dumps(value) if isinstance(value, dict | list) else value for key, value in row.items()}


def _columns(rows: list[dict[str, Any]]) -> dict[str, Any]:
    names = list(dict.fromkeys(name for row in rows for name in row))
    return {name: _column(name, [row.get(name) for row in rows]) for name in names}


def _column(name: str, values: list[Any]) -> Any:
    """A column. Hashes are unsigned 64-bit numbers, whatever those of this run happen to be."""
    kind = None
    if name.endswith("_hash"):
        kind = pyarrow.uint64()
    elif name.endswith("_hashes"):
        kind = pyarrow.list_(pyarrow.uint64())
    return pyarrow.array(values, kind)
