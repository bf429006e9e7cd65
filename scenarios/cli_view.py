"""Commands that show a run: an HTML page, and a trace for a trace viewer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from g2sim.bus.errors import ConfigError, SimError
from g2sim.scenarios.cli_reading import reads_runs
from g2sim.scenarios.run_folder import log_file

if TYPE_CHECKING:
    from g2sim.scenarios.run import LogReport


def _of_run(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The argument and the options of a command that writes one file about a run, by default called ``name``."""
    parts = (
        click.argument("run_path", metavar="RUN", type=click.Path(path_type=Path)),
        click.option(
            "--out", type=click.Path(path_type=Path), help=f"File to write.  [default: {name} in the run folder]"
        ),
        click.option("--overwrite", is_flag=True, help="Replace the file if it exists."),
    )

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        for part in reversed(parts):
            command = part(command)
        return command

    return decorate


@click.command()
@_of_run("view.html")
@reads_runs("run_path")
def view(run_path: Path, out: Path | None, overwrite: bool) -> None:
    """Write a page that shows RUN, a run folder or an event log, in a browser.

    The page is one file that opens offline: requests, passes, G1 and G2 residency, links, hits, placements and KV
    events over time, with the figures of the report. A log that was cut or damaged is shown as far as it is good,
    with exit code 1.

    Example: g2sim view runs/demo
    """
    from g2sim.scenarios.output_file import new_text_file
    from g2sim.scenarios.run import scenario_of_log
    from g2sim.scenarios.view.page import page_of_log

    scenario = scenario_of_log(run_path)
    file = _output(run_path, out, "view.html")
    with new_text_file(file, overwrite=overwrite) as target:
        page, log = page_of_log(run_path, scenario)
        target.write(page)
    _written(file, log)


@click.command()
@_of_run("timeline.json")
@reads_runs("run_path")
def timeline(run_path: Path, out: Path | None, overwrite: bool) -> None:
    """Write a trace of RUN, a run folder or an event log, for ui.perfetto.dev or chrome://tracing.

    A track per rank, pool link and router, with an arrow from each placement to the request's first token. A log
    that was cut or damaged is drawn as far as it is good, with exit code 1.

    Example: g2sim timeline runs/demo --out demo-timeline.json
    """
    from g2sim.scenarios.output_file import new_text_file
    from g2sim.scenarios.run import scenario_of_log
    from g2sim.scenarios.timeline import write_timeline

    scenario = scenario_of_log(run_path)
    file = _output(run_path, out, "timeline.json")
    with new_text_file(file, overwrite=overwrite) as target:
        log = write_timeline(run_path, scenario, target)
    _written(file, log)


def _output(run: Path, wanted: Path | None, name: str) -> Path:
    """Where a file about a run goes: as wanted, else into its folder, or beside its log under the log's name."""
    if wanted is None:
        return run / name if run.is_dir() else run.with_suffix(f".{name}")
    if wanted.exists() and wanted.samefile(log_file(run)):
        raise ConfigError("--out", problem="is the log that is to be read", got=str(wanted))
    return wanted


def _written(file: Path, log: LogReport) -> None:
    click.echo(file)
    if log.damage is not None:
        raise log.damage
    if log.failure is not None:
        raise SimError(f"the run failed: {log.failure}")
