"""Commands that run a scenario and show its report."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import click

from g2sim.bus.errors import ConfigError, OutputFailed, SimError

_RUNS = Path("runs")


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="Run folder to write.  [default: runs/<scenario name>]")
@click.option("--overwrite", is_flag=True, help="Replace the run folder if it exists.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON instead of a table.")
@click.option("--seed", type=click.IntRange(0, 2**64 - 1), help="Seed of the run, instead of the scenario's.")
@click.option("--verify", is_flag=True, help="Compare the actors' state with the log at every pass end.")
@click.option("--quiet", is_flag=True, help="Print nothing on stderr but errors.")
def run(
    file: Path, out: Path | None, overwrite: bool, as_json: bool, seed: int | None, verify: bool, quiet: bool
) -> None:
    """Run the scenario in FILE and print its report.

    FILE is a scenario (YAML, or JSON), or a Python file with a scripted scenario, whose code is run.

    Writes a run folder with the event log (events.g2log), the report (report.json) and one line a request
    (requests.jsonl).

    Example: g2sim run scenarios/library/agentx-g2-shared.yaml --out runs/demo --verify
    """
    import attrs

    from g2sim.scenarios.report import render_table, report_text
    from g2sim.scenarios.run import run_scenario
    from g2sim.scenarios.schema import load_scenario

    script = None
    if file.suffix == ".py":
        from g2sim.scenarios.script import load_script

        scenario, script = load_script(file)
    else:
        scenario = load_scenario(file)
    if seed is not None:
        scenario = attrs.evolve(scenario, seed=seed)
    folder = out if out is not None else _free_folder(_RUNS / scenario.name, overwrite)
    _note(quiet, f"{scenario.name}: seed {scenario.seed}, run folder {folder}")
    progress = None if quiet else _Progress()
    try:
        result = run_scenario(scenario, folder, overwrite=overwrite, verify=verify, progress=progress, script=script)
    except SimError as error:
        if progress is not None:
            progress.done()
        if not isinstance(error, ConfigError | OutputFailed):
            repeat = ["g2sim", "run", str(file), "--seed", str(scenario.seed), *(["--verify"] if verify else [])]
            if out is not None:
                repeat += ["--out", str(out), "--overwrite"]
            error.add_note(f"to repeat: {shlex.join(repeat)}")
        raise
    if progress is not None:
        progress.done()
    for note in result.notes:
        _note(quiet, f"note: {note}")
    if verify:
        _note(quiet, f"verified: live state and log agree at {result.checkpoints} checkpoints")
    _note(quiet, f"log digest {result.digest}")
    click.echo(report_text(result.report) if as_json else render_table(result.report), nl=False)


@click.command()
@click.argument("run_path", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON instead of a table.")
def report(run_path: Path, as_json: bool) -> None:
    """Rebuild the report of RUN, a run folder or an event log, from the log alone.

    A log that was cut or damaged is reported as far as it is good, with exit code 1.

    Example: g2sim report runs/demo --json
    """
    from g2sim.scenarios.report import render_table, report_text
    from g2sim.scenarios.run import report_of_log

    rebuilt = report_of_log(run_path)
    click.echo(report_text(rebuilt.report) if as_json else render_table(rebuilt.report), nl=False)
    if rebuilt.damage is not None:
        raise rebuilt.damage
    if rebuilt.failure is not None:
        raise SimError(f"the run failed: {rebuilt.failure}")


class _Progress:
    """One line on stderr that shows how far a run is: rewritten on a terminal, a line a tenth elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._tenths = 0
        self._shown = False

    def __call__(self, time_ms: float, arrived: int, ended: int, total: int | None) -> None:
        text = f"{ended} of {total if total is not None else arrived} requests ended at {time_ms / 1000.0:.3f} s"
        if self._terminal:
            click.echo(f"\r{text}\x1b[K", nl=False, err=True)
            self._shown = True
        elif total and ended * 10 // total > self._tenths:
            self._tenths = ended * 10 // total
            click.echo(text, err=True)

    def done(self) -> None:
        if self._shown:
            click.echo(err=True)


def _free_folder(wanted: Path, overwrite: bool) -> Path:
    """The wanted folder, or the first of <wanted>-2, <wanted>-3, ... that is free."""
    folder, number = wanted, 2
    while not overwrite and (folder.exists() or folder.with_name(f"{folder.name}.partial").exists()):
        folder = wanted.with_name(f"{wanted.name}-{number}")
        number += 1
    return folder


def _note(quiet: bool, text: str) -> None:
    if not quiet:
        click.echo(text, err=True)
