"""The commands that run a scenario at many points: sweeps over its fields, and curves over cache sizes."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from g2sim.bus.errors import ConfigError, SimError

if TYPE_CHECKING:
    from g2sim.scenarios.processes import Progress
    from g2sim.scenarios.sweep import Runner, Sweep

_BLOCKS = re.compile(r"([0-9]{1,12})([kM]?)")
_HEAD_WIDTH = 11
"""Columns of a table's heading, which goes on in further lines, so that a table fits a terminal."""
_UNITS = {"": 1, "k": 1000, "M": 1_000_000}
_TABLE = (
    "g1_share",
    "g2_share",
    "mean_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "mean_e2e_latency_ms",
    "output_throughput_tok_s",
    "goodput_rps",
)

_Command = TypeVar("_Command", bound=Callable[..., Any])


def _shared_options(command: _Command) -> _Command:
    for option in (
        click.option("--quiet", is_flag=True, help="Print nothing on stderr but errors."),
        click.option("--overwrite", is_flag=True, help="Replace files that exist."),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table."),
        click.option("--csv", "csv_path", type=click.Path(path_type=Path), metavar="FILE", help="Also write all rows."),
        click.option(
            "--parquet",
            "parquet_path",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="Also write all rows as a Parquet file (extra parquet).",
        ),
        click.option(
            "--out",
            type=click.Path(path_type=Path),
            metavar="DIR",
            help="Keep finished points there; those that are there already are not run again.",
        ),
        click.option("--dask", metavar="HOST:PORT", help="Run on the Dask cluster with that scheduler (extra dask)."),
        click.option("--jobs", type=click.IntRange(1, 256), help="Processes at a time.  [default: 1]"),
        click.option("--seeds", type=click.IntRange(1, 1000), default=1, show_default=True, help="Runs of each point."),
    ):
        command = option(command)
    return command


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--set",
    "settings",
    multiple=True,
    required=True,
    metavar="PATH=VALUE,...",
    help="A dotted path of the scenario and its values, as in a YAML list; repeat it for every combination.",
)
@_shared_options
@click.option(
    "--pareto",
    metavar="X,Y",
    help="Mark the points that no other beats in both figures; +NAME: more is better, -NAME: less is.",
)
@click.option("--picture", type=click.Path(path_type=Path), metavar="FILE.svg", help="Also draw --pareto.")
def sweep(
    file: Path,
    settings: tuple[str, ...],
    seeds: int,
    jobs: int | None,
    dask: str | None,
    out: Path | None,
    pareto: str | None,
    picture: Path | None,
    **output: Any,
) -> None:
    """Run the scenario in FILE with every combination of values of some of its fields.

    Prints a row a run, and of several seeds the means with 95 % intervals. A run that fails is a row with its error,
    and makes the exit code 1.

    Example: g2sim sweep scenarios/library/agentx-g2-shared.yaml --set router.policy=round_robin,dynamo_kv
    """
    from g2sim.scenarios.output_file import check_picture
    from g2sim.scenarios.pareto import marked, read_goals, render_front
    from g2sim.scenarios.sweep import read_settings
    from g2sim.scenarios.sweep import sweep as run_all

    check_picture(picture)
    if picture is not None and pareto is None:
        raise ConfigError("--picture", problem="draws a Pareto front", hint="name its two figures: --pareto X,Y")
    goals = None if pareto is None else read_goals(pareto)
    axes, runner = read_settings(settings), _runner(jobs, dask)

    def run(progress: Progress | None) -> Sweep:
        found = run_all(file, axes, seeds=seeds, runner=runner, folder=out, progress=progress)
        return found if goals is None else marked(found, goals)

    _carry_out(run, picture=picture, draw=render_front, **output)


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--host-blocks", required=True, metavar="N,...", help="Capacities of a host pool (G2); 0: none. 2k is 2000."
)
@click.option("--gpu-blocks", metavar="N,...", help="Capacities of a rank's GPU cache (G1) [default: the scenario's].")
@_shared_options
@click.option("--picture", type=click.Path(path_type=Path), metavar="FILE.svg", help="Also draw it.")
def curve(
    file: Path,
    host_blocks: str,
    gpu_blocks: str | None,
    seeds: int,
    jobs: int | None,
    dask: str | None,
    out: Path | None,
    picture: Path | None,
    **output: Any,
) -> None:
    """Run the scenario in FILE with several sizes of its caches: what a larger G1 or G2 is worth.

    Prints cache hits by tier and latencies; of several seeds the means too, with 95 % intervals. The scenario must have
    a host tier.

    Example: g2sim curve scenarios/library/agentx-g2-shared.yaml --host-blocks 0,64,1k --picture curve.svg
    """
    from g2sim.scenarios.curve import MAX_LINES, render_curve
    from g2sim.scenarios.curve import curve as run_all
    from g2sim.scenarios.output_file import check_picture

    check_picture(picture)
    host = _blocks("--host-blocks", host_blocks, 0)
    gpu = None if gpu_blocks is None else _blocks("--gpu-blocks", gpu_blocks, 1)
    if picture is not None and gpu is not None and len(gpu) > MAX_LINES:
        raise ConfigError("--gpu-blocks", problem="too many for one picture", allowed=f"at most {MAX_LINES} of them")
    runner = _runner(jobs, dask)
    _carry_out(
        lambda progress: run_all(file, host, gpu, seeds=seeds, runner=runner, folder=out, progress=progress),
        picture=picture,
        draw=render_curve,
        **output,
    )


def _runner(jobs: int | None, dask: str | None) -> Runner:
    """Where points run. Raises: ConfigError."""
    if dask is None:
        from g2sim.scenarios.processes import Processes

        return Processes(jobs or 1)
    if jobs is not None:
        raise ConfigError(
            "--jobs", problem="not with --dask", hint="the cluster's workers decide how many run at a time"
        )
    from g2sim.scenarios.dask_cluster import DaskCluster

    return DaskCluster(dask)


def _blocks(option: str, text: str, least: int) -> list[int]:
    """Capacities, smallest first. Raises: ConfigError."""
    matches = [_BLOCKS.fullmatch(part.strip()) for part in text.split(",")]
    sizes = sorted(int(match[1]) * _UNITS[match[2]] for match in matches if match is not None)
    if None in matches or sizes[0] < least:
        allowed = f"numbers of blocks from {least} on, with commas between them; k is 1000 and M a million"
        raise ConfigError(option, got=text, allowed=allowed)
    if len(set(sizes)) < len(sizes):
        raise ConfigError(option, problem="two of the sizes are the same", got=text)
    return sizes


def _carry_out(
    run: Callable[[Progress | None], Sweep],
    *,
    csv_path: Path | None,
    parquet_path: Path | None,
    picture: Path | None,
    draw: Callable[[Sweep], str],
    as_json: bool,
    overwrite: bool,
    quiet: bool,
) -> None:
    """Runs, writes files and prints. Files are begun first, so that one that cannot be written is refused early."""
    from g2sim.scenarios.output_file import new_binary_file, new_text_file
    from g2sim.scenarios.processes import ProgressBar

    named = [path for path in (csv_path, parquet_path, picture) if path is not None]
    if len({path.absolute() for path in named}) < len(named):
        raise ConfigError("", problem="two outputs are the same file", got=str(named[0]))
    with contextlib.ExitStack() as files:
        writers: list[Callable[[Sweep], object]] = []
        if csv_path is not None:
            table = files.enter_context(new_text_file(csv_path, overwrite=overwrite, option="--csv"))
            writers.append(lambda found: found.write_csv(table))
        if parquet_path is not None:
            from g2sim.scenarios.export_parquet import write_table

            frame = files.enter_context(new_binary_file(parquet_path, overwrite=overwrite, option="--parquet"))
            writers.append(lambda found: write_table(frame, found.columns()))
        if picture is not None:
            drawing = files.enter_context(new_text_file(picture, overwrite=overwrite, option="--picture"))
            writers.append(lambda found: drawing.write(draw(found)))
        bar = None if quiet else ProgressBar()
        try:
            found = run(bar)
        finally:
            if bar is not None:
                bar.done()
        for write in writers:
            write(found)
    _tell(found, as_json, quiet)


def _tell(found: Sweep, as_json: bool, quiet: bool) -> None:
    """Prints the rows. Raises: SimError if one of them failed."""
    if found.kept and not quiet:
        click.echo(f"{found.kept} of {len(found.rows)} points were there already", err=True)
    click.echo(json.dumps(found.plain(), sort_keys=True, indent=1, allow_nan=False) if as_json else _table(found))
    if failed := found.failed:
        from g2sim.scenarios.sweep import told

        error = SimError(f"{len(failed)} of {len(found.rows)} points failed")
        for row in failed[:5]:
            error.add_note(f"{told(row.labels, row.seed)}: {row.error}")
        if len(failed) > 5:
            error.add_note("...")
        raise error


def _table(found: Sweep) -> str:
    from textwrap import wrap

    from tabulate import tabulate

    from g2sim.scenarios.cli_compare import same_for_all
    from g2sim.scenarios.compare import LEVEL
    from g2sim.scenarios.sweep import METRICS, cell

    metrics = {metric.name: metric for metric in METRICS}
    asked = [*_TABLE, *(goal.name for goal in found.goals or () if goal.name not in _TABLE)]
    shown = [name for name in asked if any((row.values or {}).get(name) is not None for row in found.rows)]
    heads = [*found.short_columns, "seed", *(f"{metrics[name].label} [{metrics[name].unit}]" for name in shown)]
    rows = [
        [*map(cell, row.labels.values()), str(row.seed), *(_figure(row.values, name) for name in shown)]
        for row in found.rows
    ]
    if found.goals is not None:
        heads.append("Pareto")
        rows = [[*row, "*" if mark else ""] for row, mark in zip(rows, found.on_front, strict=True)]

    def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
        heads = ["\n".join(wrap(head, _HEAD_WIDTH, break_long_words=False, break_on_hyphens=False)) for head in heads]
        return tabulate(rows, headers=heads, colalign=["right"] * len(heads), disable_numparse=True)

    parts = [found.scenario, table(heads, rows)]
    seeds, names = found.seeds, len(found.axes)
    if len(seeds) > 1 and found.seeds_differ:
        means = zip(*(found.means(name) for name in shown), strict=True)
        rows = [
            [*map(cell, runs[0].labels.values()), *("-" if mean is None else str(mean) for mean in of)]
            for runs, of in zip(found.combinations, means, strict=True)
        ]
        parts.append(f"means of {len(seeds)} seeds from {seeds[0]}, {LEVEL:.0%} interval")
        parts.append(table([*heads[:names], *heads[names + 1 : names + 1 + len(shown)]], rows))
        parts.append("without interval: every seed gives the same; -: a run failed, or had nothing to measure")
    elif len(seeds) > 1:
        parts.append(same_for_all(seeds))
    return "\n\n".join(parts)


def _figure(values: Any, name: str) -> str:
    if values is None:
        return "failed"
    return "-" if values[name] is None else f"{values[name]:.3f}"
