"""Commands that run a scenario and show its report."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from g2sim.bus.errors import ConfigError, OutputFailed, SimError
from g2sim.scenarios.cli_reading import reads_runs

if TYPE_CHECKING:
    from g2sim.scenarios.report import Report
    from g2sim.scenarios.schema import Scenario
    from g2sim.scenarios.script import Script

_RUNS = Path("runs")


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="Run folder to write.  [default: runs/<scenario name>]")
@click.option("--overwrite", is_flag=True, help="Replace the run folder if it exists.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON instead of a table.")
@click.option("--seed", type=click.IntRange(0, 2**64 - 1), help="Seed of the run, instead of the scenario's.")
@click.option("--variant", metavar="NAME", help="Run this variant of the scenario only.")
@click.option("--policy", metavar="TARGET", help="Placement policy, instead of the scenario's. Runs its code.")
@click.option("--policy-option", "options", multiple=True, metavar="OPTION=VALUE", help="An option of the policy.")
@click.option("--strict-traces", is_flag=True, help="Refuse what a trace's reader could set right or leave out.")
@click.option("--verify", is_flag=True, help="Compare the actors' state with the log at every pass end.")
@click.option("--quiet", is_flag=True, help="Print nothing on stderr but errors.")
def run(
    file: Path,
    out: Path | None,
    overwrite: bool,
    as_json: bool,
    seed: int | None,
    variant: str | None,
    policy: str | None,
    options: tuple[str, ...],
    strict_traces: bool,
    verify: bool,
    quiet: bool,
) -> None:
    """Run the scenario in FILE and print its report.

    FILE is a scenario (YAML, or JSON), or a Python file with a scripted scenario, whose code is run.

    Writes a run folder with the event log (events.g2log), the report (report.json) and one line a request
    (requests.jsonl). A scenario with variants gets a run folder for each, inside that folder. Exit code 1 if what the
    scenario expects does not hold.

    --policy takes a built-in name, the name of an installed policy, package.module:Class, FILE.py or FILE.py:Class.

    Example: g2sim run scenarios/library/agentx-g2-shared.yaml --out runs/demo --verify
    """
    import attrs

    from g2sim.scenarios.policy_source import parse_choice, with_policy
    from g2sim.scenarios.report import render_table, report_text
    from g2sim.scenarios.suite import ExpectationFailed, Suite, load_suite

    script = None
    if file.suffix == ".py":
        from g2sim.scenarios.script import load_script

        scenario, script = load_script(file)
        suite = Suite(name=scenario.name, runs={None: scenario}, expectations=()).only(variant)
    else:
        suite = load_suite(file).only(variant)
    base = out if out is not None else _free_folder(_RUNS / suite.name, overwrite)
    folders = {name: base if name is None else base / name for name in suite.runs}
    repeat, rest = ["g2sim", "run", str(file)], [] if variant is None else ["--variant", variant]
    rest += [] if policy is None else ["--policy", policy]
    rest += [part for option in options for part in ("--policy-option", option)]
    rest += [*(["--strict-traces"] if strict_traces else []), *(["--verify"] if verify else [])]
    rest += [] if out is None else ["--out", str(out), "--overwrite"]
    reports = {}
    for name, scenario in suite.runs.items():
        chosen = scenario if seed is None else attrs.evolve(scenario, seed=seed)
        if policy is not None or options:
            chosen = with_policy(chosen, parse_choice(policy, options))
        if strict_traces:
            chosen = chosen.with_strict_traces()
        again = [*repeat, "--seed", str(chosen.seed), *rest]
        reports[name] = _run(chosen, folders[name], overwrite, verify, quiet, script, again)
        if not as_json:
            click.echo(render_table(reports[name]), nl=False)
    if as_json:
        click.echo(report_text(reports.get(None, {"variants": reports})), nl=False)
    verdicts = suite.judge(folders)
    if not all(verdict.holds for verdict in verdicts):
        error = ExpectationFailed(verdicts)
        error.add_note(f"to repeat: {shlex.join([*repeat, *([] if seed is None else ['--seed', str(seed)]), *rest])}")
        raise error
    if verdicts:
        _note(quiet, f"{len(verdicts)} of {len(verdicts)} expectations hold")


def _run(
    scenario: Scenario,
    folder: Path,
    overwrite: bool,
    verify: bool,
    quiet: bool,
    script: Script | None,
    repeat: list[str],
) -> Report:
    """Run one scenario, with what there is to say on stderr; ``repeat`` is the command that repeats it."""
    from g2sim.scenarios.run import run_scenario

    _note(quiet, f"{scenario.name}: seed {scenario.seed}, run folder {folder}")
    progress = None if quiet else _Progress()
    try:
        result = run_scenario(scenario, folder, overwrite=overwrite, verify=verify, progress=progress, script=script)
    except SimError as error:
        if progress is not None:
            progress.done()
        if not isinstance(error, ConfigError | OutputFailed):
            error.add_note(f"to repeat: {shlex.join(repeat)}")
        raise
    if progress is not None:
        progress.done()
    for note in result.notes:
        _note(quiet, f"note: {note}")
    if verify:
        _note(quiet, f"verified: live state and log agree at {result.checkpoints} checkpoints")
    _note(quiet, f"log digest {result.digest}")
    return result.report


@click.command()
@click.argument("run_path", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON instead of a table.")
@reads_runs("run_path")
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
