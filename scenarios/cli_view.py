"""Commands that show a run: an HTML page, and a trace for a trace viewer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from g2sim.bus.errors import SimError

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
def view(run_path: Path, out: Path | None, overwrite: bool) -> None:
    """Write a page that shows RUN, a run folder or an event log, in a browser.

    The page is one file that opens offline: requests, passes, G1 and G2 residency, links, hits, placements and KV
    events over time, with the figures of the report. A log that was cut or damaged is shown as far as it is good,
    with exit code 1.

    Example: g2sim view runs/demo
    """
    from g2sim.scenarios.output_file import check_new_file, new_text_file
    from g2sim.scenarios.view.page import page_of_log

    file = out if out is not None else _beside(run_path, "view.html")
    check_new_file(file, overwrite=overwrite)
    page, log = page_of_log(run_path)
    with new_text_file(file, overwrite=overwrite) as target:
        target.write(page)
    _written(file, log)


@click.command()
@_of_run("timeline.json")
def timeline(run_path: Path, out: Path | None, overwrite: bool) -> None:
    """Write a trace of RUN, a run folder or an event log, for ui.perfetto.dev or chrome://tracing.

    A track per rank, pool link and router, with an arrow from each placement to the request's first token. A log
    that was cut or damaged is drawn as far as it is good, with exit code 1.

    Example: g2sim timeline runs/demo --out demo-timeline.json
    """
    from g2sim.scenarios.output_file import new_text_file
    from g2sim.scenarios.timeline import write_timeline

    file = out if out is not None else _beside(run_path, "timeline.json")
    with new_text_file(file, overwrite=overwrite) as target:
        log = write_timeline(run_path, target)
    _written(file, log)


def _beside(run: Path, name: str) -> Path:
    """Where a file about a run goes: into its folder, or beside its log under the log's name."""
    return run / name if run.is_dir() else run.with_suffix(f".{name}")


def _written(file: Path, log: LogReport) -> None:
    click.echo(file)
    if log.damage is not None:
        raise log.damage
    if log.failure is not None:
        raise SimError(f"the run failed: {log.failure}")
