"""Where two runs part: the first record that differs, and the differences in their reports.

Owns: what counts as a difference. Refuses to know: how it is printed.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import attrs

from g2sim.bus.errors import LogDamaged
from g2sim.bus.events import Record
from g2sim.bus.log import LogReader
from g2sim.scenarios.records import Numbered, chain_of, record_value
from g2sim.scenarios.run import report_of_log
from g2sim.scenarios.run_folder import log_file
from g2sim.scenarios.run_log import open_run

Changes = dict[str, tuple[Any, Any]]
"""Path -> value in the first and in the second run, None where a run has none."""


@attrs.frozen(kw_only=True)
class RunDiff:
    """How two runs differ.

    Attributes:
        scenario, report: paths of the resolved scenarios and of the reports that differ.
        record_idx: number of the first record that differs, None if the records are equal.
        fields: fields of that record that differ; empty if one log has ended.
        chains: for each run, that record and those that led to it, the earliest first; empty if its log has ended.
        damage: the first log that could not be read to its end, None if both could.
    """

    scenario: Changes
    report: Changes
    record_idx: int | None
    fields: Changes
    chains: tuple[list[Numbered], list[Numbered]]
    damage: LogDamaged | None

    @property
    def equal(self) -> bool:
        return not self.scenario and not self.report and self.record_idx is None


def diff_runs(left: Path, right: Path) -> RunDiff:
    """Compare two runs by their logs.

    Args:
        left, right: logs, or run folders that hold them.
    Raises: ConfigError if one is no log; LogDamaged if not even its header can be read.
    """
    with open_run(left) as one, open_run(right) as other:
        scenario = _changes(one.header.scenario, other.header.scenario)
        pairs = enumerate(zip_longest(_whole(one), _whole(other)))
        idx, found = next(((idx, pair) for idx, pair in pairs if pair[0] != pair[1]), (None, None))
    reports = [report_of_log(path) for path in (left, right)]
    damage = next((report.damage for report in reports if report.damage is not None), None)
    if idx is None or found is None:
        nothing: tuple[list[Numbered], list[Numbered]] = ([], [])
        return RunDiff(
            scenario=scenario,
            report=_changes(*(report.report for report in reports)),
            record_idx=None,
            fields={},
            chains=nothing,
            damage=damage,
        )
    values = [{} if record is None else record_value(idx, record) for record in found]
    logs = log_file(left), log_file(right)
    chains = [[] if record is None else chain_of(log, idx) for log, record in zip(logs, found, strict=True)]
    return RunDiff(
        scenario=scenario,
        report=_changes(*(report.report for report in reports)),
        record_idx=idx,
        fields=_changes(*values) if all(values) else {},
        chains=(chains[0], chains[1]),
        damage=damage,
    )


def _whole(reader: LogReader) -> Iterator[Record]:
    """The records up to the end or the damage, which ``report_of_log`` tells."""
    try:
        yield from reader
    except LogDamaged:
        return


def _changes(left: Any, right: Any) -> Changes:
    flat = [dict(_leaves(value)) for value in (left, right)]
    paths = list(dict.fromkeys([*flat[0], *flat[1]]))
    pairs = {path: (flat[0].get(path), flat[1].get(path)) for path in paths}
    return {path: pair for path, pair in pairs.items() if _differs(*pair)}


def _differs(left: Any, right: Any) -> bool:
    return type(left) is not type(right) or bool(left != right)


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and value:
        for idx, inner in enumerate(value):
            yield from _leaves(inner, f"{path}[{idx}]")
    else:
        yield path, value
