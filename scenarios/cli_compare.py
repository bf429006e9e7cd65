"""The command that puts placement policies side by side."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from g2sim.bus.errors import ConfigError

if TYPE_CHECKING:
    from g2sim.scenarios.compare import Comparison


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--policy",
    "policies",
    multiple=True,
    required=True,
    metavar="TARGET[,OPTION=VALUE...]",
    help="A policy, as for run; repeat it. The first is the baseline; with one, the scenario's own is.",
)
@click.option("--seeds", type=click.IntRange(1, 1000), default=1, show_default=True, help="Runs of each policy.")
@click.option("--jobs", type=click.IntRange(1, 256), default=1, show_default=True, help="Processes at a time.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@click.option("--picture", type=click.Path(path_type=Path), metavar="FILE.svg", help="Also draw it.")
@click.option("--overwrite", is_flag=True, help="Replace the picture if it exists.")
@click.option("--quiet", is_flag=True, help="Print nothing on stderr but errors.")
def compare(
    file: Path,
    policies: tuple[str, ...],
    seeds: int,
    jobs: int,
    as_json: bool,
    picture: Path | None,
    overwrite: bool,
    quiet: bool,
) -> None:
    """Run the scenario in FILE under several placement policies, with equal seeds, and compare them.

    Prints one table of latencies, goodput, cache hits, load imbalance and overlap regret, and the differences to the
    first policy, seed by seed, with 95 % confidence intervals. This runs the policies' code.

    Example: g2sim compare scenarios/library/chats-private-g2.yaml --policy round_robin --policy dynamo_kv
    """
    from g2sim.scenarios.compare import compare as run_all
    from g2sim.scenarios.compare_picture import render_picture
    from g2sim.scenarios.output_file import check_picture, new_text_file
    from g2sim.scenarios.processes import ProgressBar

    check_picture(picture)
    if picture is not None and not picture.absolute().parent.is_dir():
        raise ConfigError("--picture", problem=f"no such folder: {picture.parent}")
    with contextlib.ExitStack() as files:
        drawing = None
        if picture is not None:
            # Begun first, so that one that cannot be written is refused early.
            drawing = files.enter_context(new_text_file(picture, overwrite=overwrite, option="--picture"))
        progress = None if quiet else ProgressBar()
        try:
            told = run_all(file, policies, seeds=seeds, jobs=jobs, progress=progress)
        finally:
            if progress is not None:
                progress.done()
        if drawing is not None:
            drawing.write(render_picture(told))
    click.echo(json.dumps(told.plain(), sort_keys=True, indent=1, allow_nan=False) if as_json else _tables(told))


def _tables(told: Comparison) -> str:
    from tabulate import tabulate

    from g2sim.scenarios.compare import METRICS

    shown = [metric for metric in METRICS if any(told.values(policy, metric.name) for policy in told.policies)]
    labels = [f"{metric.label} [{metric.unit}]" for metric in shown]
    seeds = (
        f"seed {told.seeds[0]}" if len(told.seeds) == 1 else f"means of {len(told.seeds)} seeds from {told.seeds[0]}"
    )
    rows = [
        [label, *(_number(told.mean(policy, metric.name)) for policy in told.policies)]
        for label, metric in zip(labels, shown, strict=True)
    ]
    right = ("left", *("right" for _ in told.policies))
    parts = [
        f"{told.scenario}, {seeds}",
        tabulate(rows, headers=["", *told.policies], colalign=right, disable_numparse=True),
    ]
    rows = [
        [label, *(_gap(told, policy, metric.name) for policy in told.policies[1:])]
        for label, metric in zip(labels, shown, strict=True)
        if metric.better
    ]
    parts += [
        f"difference to {told.policies[0]} for the same seed" + (", 95 % interval" if told.seeds_differ else ""),
        tabulate(rows, headers=["", *told.policies[1:]], colalign=right[:-1], disable_numparse=True),
    ]
    if told.seeds_differ:
        parts.append("* the interval does not hold 0; without interval: every seed gives the same")
    elif len(told.seeds) > 1:
        parts.append(same_for_all(told.seeds))
    return "\n\n".join(parts)


def same_for_all(seeds: Sequence[int]) -> str:
    """What is said in place of intervals where no figure depends on the seed."""
    return (
        f"All {len(seeds)} seeds give the same: neither this traffic nor these policies draw anything. "
        "Traffic that is generated does (scenarios/library/generated-chats.yaml)."
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _gap(told: Comparison, policy: str, metric: str) -> str:
    gap = told.difference(policy, metric)
    if gap is None:
        return "-"
    if gap.half_width is None:
        return f"{gap.mean:+.3f}"
    return f"{gap.mean:+.3f} \u00b1 {gap.half_width:.3f} {'*' if gap.is_clear else ' '}"
