"""Running a scenario: the one path from a checked scenario to a run folder, and from a log to a report.

Owns: what a run folder holds and how it appears (whole, or not at all). Refuses to know: the command line.

A run folder holds ``events.g2log``, ``requests.jsonl`` and ``report.json``. It is written beside its final place, under
the name ``<folder>.partial``, and renamed when it is whole. A run that fails leaves its log, which says why; a run that
is killed, or finds the disk full, leaves ``<folder>.partial``, whose log is good up to its last whole record.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import attrs

from g2sim.actors.host_pool.events import OF_TRANSFER_ENDS
from g2sim.actors.membership.events import MEMBERSHIP_TAGS
from g2sim.actors.router.events import EVENT_PLANE_TAGS, LOAD_SYNC_TAGS
from g2sim.actors.traffic.events import RequestArrived
from g2sim.actors.worker.events import RequestEnded
from g2sim.actors.worker.sequence import RankRequest
from g2sim.bus.drivers import InlineDriver, TrioDriver
from g2sim.bus.errors import ConfigError, InvariantViolation, LogDamaged, OutputFailed, SimError
from g2sim.bus.events import BY_TAG, Record, Row
from g2sim.bus.kernel import Kernel
from g2sim.bus.log import LogWriter
from g2sim.scenarios.deployment import RUN_SOURCE, build_cluster
from g2sim.scenarios.events import RunStarted
from g2sim.scenarios.garbage import rare_collections
from g2sim.scenarios.pass_times import open_pass_times
from g2sim.scenarios.policy_source import find_policy
from g2sim.scenarios.report import Report, ReportFold, RunInfo, report_text, row_text
from g2sim.scenarios.run_folder import LOG_NAME, REPORT_NAME, ROWS_NAME
from g2sim.scenarios.run_log import open_run
from g2sim.scenarios.schema import Scenario
from g2sim.scenarios.script import Script, ScriptActor, ScriptedCluster
from g2sim.scenarios.state_fold import Verifier
from g2sim.scenarios.traffic_source import Traffic, open_traffic

Progress = Callable[[float, int, int, int | None], None]
"""Called now and then with: virtual time [ms], requests arrived, requests ended, requests in all (None = unknown)."""

_PROGRESS_EVERY = 20
"""Arrivals and ends between two calls."""


@attrs.frozen(kw_only=True)
class RunResult:
    """What a finished run gives back.

    Attributes:
        report: the content of ``report.json``.
        digest: digest of the event log, None if no log was written.
        checkpoints: comparisons of live state and log that were made and held; 0 without ``verify``.
    """

    report: Report
    digest: str | None
    checkpoints: int

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on the input, where pass times come from, and what came up during the run."""
        return tuple(self.report["notes"])


def program_version() -> str:
    """Version of the installed package."""
    return version("g2sim")


def run_scenario(
    scenario: Scenario,
    folder: Path | None,
    *,
    overwrite: bool = False,
    verify: bool = False,
    progress: Progress | None = None,
    on_row: Callable[[dict[str, Any]], None] | None = None,
    on_record: Callable[[Record], None] | None = None,
    on_request: Callable[[RankRequest], None] | None = None,
    driver: type[TrioDriver] | type[InlineDriver] = TrioDriver,
    script: Script | None = None,
) -> RunResult:
    """Run a scenario and write its run folder.

    Args:
        folder: where the run folder goes; None writes nothing.
        overwrite: replace what is at ``folder``.
        verify: compare the actors' own state with the fold of the log at every pass end and at the end.
        progress: see ``Progress``.
        on_row, on_record: take each request's row and each record, as they go into the files.
        on_request: takes each request as it arrives, with its prompt's identity, which is in no record.
        driver: how actors are executed; the result is the same.
        script: submits the requests, instead of the scenario's traffic.
    Raises: ConfigError for bad input or an output that is in the way, Deadlock and other SimErrors for a failed run.
    """
    scripted = None if script is None else ScriptedCluster(scenario)
    traffic = open_traffic(scenario) if scripted is None else Traffic(driver=scripted)
    sources = open_pass_times(scenario.deployment, scenario.base_dir)
    notes = (*traffic.notes, *sources.notes)
    cluster = build_cluster(
        scenario.deployment,
        traffic.driver,
        seed=scenario.seed,
        pass_times=sources.of_role,
        policy_class=find_policy(scenario.deployment.router.policy),
        faults=scenario.faults,
    )
    kernel = cluster.kernel
    actor = None
    if script is not None and scripted is not None:
        actor = ScriptActor(script, scripted)
    verifier = Verifier(cluster.workers, cluster.host_pools) if verify else None
    outputs = _Outputs(folder, overwrite)
    try:
        take_rows = outputs.open(scenario)

        def add_row(row: dict[str, Any]) -> None:
            outputs.add_row(row)
            if scripted is not None:
                scripted.take_row(row)
            if on_row is not None:
                on_row(row)

        rows_wanted = folder is not None or scripted is not None or on_row is not None
        info = _run_info(scenario, scenario.seed, program_version())
        fold = ReportFold(info, add_row if rows_wanted else None, trusted=True)
        if take_rows is not None:
            kernel.add_row_sink(take_rows)
        if verifier is not None:
            kernel.add_sink(verifier.record)
            kernel.observe_turns(verifier.turn_ended)
        if on_record is not None:
            kernel.add_sink(on_record)
        cluster.traffic.on_request = on_request
        if progress is not None:
            kernel.add_sink(_ProgressSink(progress, traffic.driver.total_requests), (RequestArrived, RequestEnded))
        if actor is not None:
            actor.install(cluster)
        told = frozenset(fold.event_types())
        kernel.add_sink(fold.apply, told.difference(OF_TRANSFER_ENDS))
        kernel.add_sink(fold.end_transfer, OF_TRANSFER_ENDS, may_be_late=True)
        kernel.publish(RUN_SOURCE, RunStarted(agentic=traffic.agentic, play_ids=traffic.play_ids, notes=notes))
        try:
            with rare_collections():
                driver(kernel).run()
            if actor is not None:
                actor.finish()
            if verifier is not None:
                verifier.finish()
            cluster.close()
        except (ConfigError, OutputFailed):
            raise
        except SimError as error:
            outputs.fail(str(error), kernel)
            raise
        cluster.publish_end(sources.late_notes())
        report = fold.finish()
        digest = outputs.finish(report, kernel)
    except OutputFailed as error:
        outputs.leave(error)
        raise
    except BaseException:
        outputs.discard()
        raise
    finally:
        if actor is not None:
            actor.close()
    return RunResult(
        report=report,
        digest=digest,
        checkpoints=verifier.checkpoints if verifier else 0,
    )


@attrs.frozen(kw_only=True)
class LogReport:
    """A report rebuilt from a log.

    Attributes:
        report: what the whole records say.
        damage: why the log could not be read to its end, None if it could.
        failure: why the run failed, None if it did not.
    """

    report: Report
    damage: LogDamaged | None
    failure: str | None


def scenario_of_log(path: Path) -> Scenario:
    """What was run, from the header of the log that ``path`` means. Raises: as ``report_of_log``."""
    with open_run(path) as reader:
        return Scenario.of_log(reader)


def report_of_log(
    path: Path,
    on_row: Callable[[dict[str, Any]], None] | None = None,
    on_record: Callable[[Record], None] | None = None,
) -> LogReport:
    """The report of a run, rebuilt from its log alone.

    Args:
        path: the log, or the run folder that holds it.
        on_row: takes the row of each request, as it went into ``requests.jsonl``.
        on_record: takes each record, after the report has.
    Raises: ConfigError if there is no log at ``path``; LogDamaged if not even its header can be read.
    """
    damage: LogDamaged | None = None
    with open_run(path) as reader:
        header = reader.header
        scenario = Scenario.of_log(reader)
        fold = ReportFold(_run_info(scenario, header.seed, header.version), on_row)
        try:
            for record in reader:
                fold.apply(record)
                if on_record is not None:
                    on_record(record)
        except LogDamaged as error:
            damage = error
        end = reader.end
    failure = end.error if end is not None and end.status == "failed" else None
    return LogReport(report=fold.finish(), damage=damage, failure=failure)


def _run_info(scenario: Scenario, seed: int, program: str) -> RunInfo:
    return RunInfo.of(scenario.deployment, name=scenario.name, seed=seed, version=program)


class _ProgressSink:
    def __init__(self, progress: Progress, total: int | None) -> None:
        self._progress = progress
        self._total = total
        self._arrived = 0
        self._ended = 0

    def __call__(self, record: Record) -> None:
        if type(record.event) is RequestArrived:
            self._arrived += 1
        else:
            self._ended += 1
        if (self._arrived + self._ended) % _PROGRESS_EVERY == 0 or self._ended == self._total:
            self._progress(record.time_ms, self._arrived, self._ended, self._total)


class _Outputs:
    """The run folder while it is written; without a folder nothing is written.

    Exactly one of ``finish``, ``fail`` and ``discard`` ends it.
    """

    def __init__(self, folder: Path | None, overwrite: bool) -> None:
        self._folder = folder
        self._overwrite = overwrite
        self._log: LogWriter | None = None
        self._files = ExitStack()
        self._made = False

    def open(self, scenario: Scenario) -> Callable[[Sequence[Row]], None] | None:
        """Make the folder and its files. Returns what takes the log's rows. Raises: ConfigError if it cannot be."""
        folder = self._folder
        if folder is None:
            return None
        self._partial = folder.with_name(f"{folder.name}.partial")
        _check_room(folder, self._overwrite)
        self._made = True
        try:
            _make_partial(self._partial, self._overwrite)
        except ConfigError:
            self._made = False
            raise
        log_file = self._files.enter_context((self._partial / LOG_NAME).open("wb"))
        self._rows = self._files.enter_context((self._partial / ROWS_NAME).open("w", encoding="utf-8"))
        absent = [] if scenario.faults else [EVENT_PLANE_TAGS]
        if scenario.faults is None or not scenario.faults.membership:
            absent.append(MEMBERSHIP_TAGS)
        if scenario.deployment.router.load_sync_ms is None:
            absent.append(LOAD_SYNC_TAGS)
        self._log = LogWriter(
            log_file,
            version=program_version(),
            seed=scenario.seed,
            scenario=scenario.resolved(),
            events=[kind for kind in BY_TAG.values() if not kind.tag.startswith(tuple(absent))],
        )
        return self._log.append_rows

    def add_row(self, row: dict[str, Any]) -> None:
        if self._log is not None:
            text = row_text(row)
            try:
                self._rows.write(text)
            except OSError as problem:
                raise _cannot_write(self._partial / ROWS_NAME, problem) from problem

    def finish(self, report: Report, kernel: Kernel) -> str | None:
        """Write what is left and put the folder in its place. Returns the log's digest."""
        if self._log is None:
            return None
        with _written(self._partial / REPORT_NAME):
            (self._partial / REPORT_NAME).write_text(report_text(report), encoding="utf-8")
        digest = self._end_log("finished", None, kernel)
        self._put_in_place()
        return digest

    def fail(self, error: str, kernel: Kernel) -> None:
        """Keep the log of a failed run, which says why it failed, and nothing else."""
        if self._log is None:
            return
        self._end_log("failed", error, kernel)
        (self._partial / ROWS_NAME).unlink()
        self._put_in_place()

    def leave(self, error: OutputFailed) -> None:
        """Leave what could be written as it is, and say where."""
        with suppress(OSError, SimError):
            if self._log is not None:
                self._log.flush()
        with suppress(OSError):
            self._files.close()
        error.add_note(f"what was written until then: g2sim report {shlex.quote(str(self._partial))}")

    def discard(self) -> None:
        """Leave nothing behind."""
        with suppress(OSError):  # what a file still holds need not fit
            self._files.close()
        if self._made:
            shutil.rmtree(self._partial, ignore_errors=True)

    def _end_log(self, status: Literal["finished", "failed"], error: str | None, kernel: Kernel) -> str:
        if self._log is None:
            raise InvariantViolation("there is no log to end")
        draws = {name: stream.draws for name, stream in kernel.streams.items()}
        last_draws = {name: stream.fingerprint() for name, stream in kernel.streams.items()}
        digest = self._log.finish(status, error, draws, last_draws)
        with _written(self._partial):
            self._files.close()
        return digest

    def _put_in_place(self) -> None:
        if self._folder is None:
            raise InvariantViolation("there is no place to put the run folder")
        if self._overwrite and self._folder.exists():
            shutil.rmtree(self._folder)
        self._partial.rename(self._folder)


@contextmanager
def _written(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise _cannot_write(path, problem) from problem


def _cannot_write(path: Path, problem: OSError) -> OutputFailed:
    return OutputFailed(f"{path}: cannot be written: {problem.strerror or problem}")


def _check_room(folder: Path, overwrite: bool) -> None:
    if folder.exists():
        if not overwrite:
            raise ConfigError(
                "--out", problem="exists already", got=str(folder), hint="choose another, or add --overwrite"
            )
        if not (folder / LOG_NAME).exists():
            raise ConfigError("--out", problem="is not a run folder, so it is not replaced", got=str(folder))


def _make_partial(partial: Path, overwrite: bool) -> None:
    try:
        if overwrite and partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
    except FileExistsError:
        raise ConfigError(
            "--out",
            problem=f"{partial} exists: another run is writing there, or was killed",
            hint="look at it with 'g2sim report', then remove it or add --overwrite",
        ) from None
    except OSError as error:
        raise ConfigError("--out", problem=f"cannot be written ({error.strerror})", got=str(partial)) from None
