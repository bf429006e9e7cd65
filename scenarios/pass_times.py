"""Pass times that come from outside: who answers for which role of a deployment.

Owns: opening the sources, what is noted about them, and where in a scenario file their errors belong.
Refuses to know: how a source answers (``aic_timing``, ``table_timing``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from g2sim.actors.config import DeploymentConfig, WorkerRole
from g2sim.actors.worker.timing import PassTimes
from g2sim.bus.errors import ConfigError
from g2sim.scenarios.aic_timing import PACKAGE, QUANT_MODES, AicRefused, AicTiming, aic_pass_times, package_version
from g2sim.scenarios.table_timing import PassTable, TableTiming, read_pass_table
from g2sim.scenarios.yaml_source import Document, KeyPath

_NEEDED_PHASES: Mapping[WorkerRole, Sequence[str]] = {
    WorkerRole.AGGREGATED: ("prefill", "decode"),
    WorkerRole.PREFILL: ("prefill",),
    WorkerRole.DECODE: ("decode",),
}

_WITHOUT_MODEL: Mapping[str | int, str] = {
    "timing": "fixed, polynomial or table",
    "capacity": "fixed",
    "bytes_per_token": "a positive integer",
}
"""What can be given in place of an answer of the performance model."""


@attrs.frozen(kw_only=True)
class PassTimeSources:
    """The sources of one run.

    Attributes:
        of_role: who answers, for the roles whose timing is external.
        notes: where their times come from.
    """

    of_role: Mapping[WorkerRole, PassTimes]
    notes: tuple[str, ...]
    _tables: Sequence[PassTable]

    def late_notes(self) -> tuple[str, ...]:
        """What came up during the run."""
        return tuple(note for table in self._tables for note in table.notes())


def open_pass_times(deployment: DeploymentConfig, base_dir: Path, document: Document | None = None) -> PassTimeSources:
    """Open what the deployment's roles take their pass times from.

    Args:
        base_dir: the directory that paths of tables count from.
        document: gives errors their place in the scenario file.
    Raises: ConfigError.
    """
    document = document if document is not None else Document(values={})
    of_role: dict[WorkerRole, PassTimes] = {}
    tables: dict[str, PassTable] = {}
    notes: list[str] = []
    for pool in deployment.pools:
        timing, at = pool.rank.timing, ("engine", "workers", pool.role.value, "timing")
        if isinstance(timing, AicTiming):
            try:
                of_role[pool.role] = aic_pass_times(timing.served)
                package = package_version()
            except AicRefused as refused:
                got = document.raw((*at, "type"))
                if got is ...:
                    got = "default" if document.values else "aic"
                raise aic_error(document, refused, (*at, "type"), got) from None
            served = timing.served
            notes.append(
                f"{pool.role} pass times: {PACKAGE} {package}, {served.model} on {served.hardware}, "
                f"vLLM {served.backend_version or 'current'}, tensor {served.tensor}"
            )
        elif isinstance(timing, TableTiming):
            table = tables.get(timing.path) or _table(timing, base_dir, document, (*at, "path"))
            tables[timing.path] = table
            for phase in _NEEDED_PHASES[pool.role]:
                if phase not in table.phases:
                    problem = f"the table has no {phase} rows, which {pool.role} workers need"
                    raise document.error((*at, "path"), problem=problem, got=timing.path)
            of_role[pool.role] = table
            notes.append(f"{pool.role} pass times: table {timing.path}, {table.row_count} rows, digest {table.digest}")
    return PassTimeSources(of_role=of_role, notes=tuple(notes), tables=tuple(tables.values()))


def aic_error(document: Document, refused: AicRefused, at: KeyPath, got: str) -> ConfigError:
    """The error about what the performance model does not take.

    Args:
        at, got: path and value of the key under ``engine.workers`` that asks for the model, which is at fault unless
            another is.
    """
    key, allowed = refused.key, refused.allowed
    value: object = got
    if key in QUANT_MODES:
        own: KeyPath = (*at[:3], "timing", str(key))
        at = own if document.raw(own) not in (..., None) else ("engine", str(key))
    elif key is not None:
        at = ("engine", key)
    elif allowed is None and refused.hint is not None:
        allowed = _WITHOUT_MODEL[at[-1] if at[-1] == "bytes_per_token" else at[-2]]
    if key is not None:
        value = document.raw(at)
    return document.error(at, problem=refused.problem, got=value, allowed=allowed, hint=refused.hint)


def _table(timing: TableTiming, base_dir: Path, document: Document, at: KeyPath) -> PassTable:
    path = base_dir / timing.path
    if not path.is_file():
        hint = "paths are relative to the scenario file"
        raise document.error(at, problem=f"no such file: {path}", got=timing.path, hint=hint)
    return read_pass_table(path, timing.path)
