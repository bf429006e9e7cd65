"""Commands that look into a run afterwards: inspect, events, diff, export."""

from __future__ import annotations

import json
import math
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from g2sim.bus.errors import ConfigError, SimError
from g2sim.scenarios.cli_reading import reads_runs

if TYPE_CHECKING:
    from g2sim.scenarios.run_diff import Changes, RunDiff


class _TimeMs(click.FloatRange):
    """A time in milliseconds: 0 or more, and finite."""

    name = "ms"

    def __init__(self) -> None:
        super().__init__(min=0)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        time_ms = float(super().convert(value, param, ctx))
        if not math.isfinite(time_ms):
            self.fail(f"{value} is not a finite number of ms", param, ctx)
        return time_ms


_RUN = click.argument("run_path", metavar="RUN", type=click.Path(path_type=Path))
_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
_SHOWN_CHANGES = 40


@click.command()
@_RUN
@click.option("--at", "at_ms", type=_TimeMs(), metavar="MS", help="After all events up to this time [ms].")
@click.option("--record", type=click.IntRange(min=0), metavar="N", help="After the record of this number.")
@_JSON
@reads_runs("run_path")
def inspect(run_path: Path, at_ms: float | None, record: int | None, as_json: bool) -> None:
    """Show the state of RUN at an instant: G1, G2, queues, and what routers know of the tiers.

    RUN is a run folder or an event log. Without --at and --record it is the state at the end. The table counts blocks
    and lists requests; --json lists the blocks too.

    Example: g2sim inspect runs/demo --at 202.0
    """
    from g2sim.scenarios.time_travel import inspect_run

    if at_ms is not None and record is not None:
        raise ConfigError("--record", problem="does not go with --at", got=record)
    moment = inspect_run(run_path, at_ms=at_ms, record=record)
    if as_json:
        click.echo(json.dumps(moment.value, sort_keys=True))
    else:
        click.echo(_state_table(moment.value), nl=False)
        if moment.record is not None:
            click.echo(f"last record: {moment.record.line}")
    if moment.damage is not None:
        raise moment.damage


@click.command()
@_RUN
@click.option("--topic", multiple=True, metavar="TYPE", help="Only these types: wk.adm, a family wk, RequestAdmitted.")
@click.option("--worker", multiple=True, metavar="NAME", help="Only of these workers or ranks: prefill-0, decode-1/0.")
@click.option("--request", multiple=True, metavar="REQUEST", help="Only about these: a number, a name, s12/2, a uuid.")
@click.option("--since", "since_ms", type=_TimeMs(), metavar="MS", help="Only from this time on [ms].")
@click.option("--until", "until_ms", type=_TimeMs(), metavar="MS", help="Only up to this time [ms].")
@reads_runs("run_path")
def events(
    run_path: Path,
    topic: tuple[str, ...],
    worker: tuple[str, ...],
    request: tuple[str, ...],
    since_ms: float | None,
    until_ms: float | None,
) -> None:
    """Print the events of RUN, a run folder or an event log, as JSON lines in the order in which they happened.

    Filters of one kind add up, filters of different kinds must all hold.

    Example: g2sim events runs/demo --topic RequestAdmitted --request 3
    """
    from g2sim.scenarios.event_filter import EventFilter
    from g2sim.scenarios.records import numbered, record_value
    from g2sim.scenarios.request_names import find_requests
    from g2sim.scenarios.run_log import open_run
    from g2sim.scenarios.schema import Scenario

    requests = find_requests(run_path, request, "--request") if request else ()
    with open_run(run_path) as reader:
        wanted = EventFilter.of(lambda: Scenario.of_log(reader), topic, worker, requests, since_ms, until_ms)
        for one in numbered(reader):
            if wanted.is_past(one.record):
                break
            if wanted.takes(one.record):
                click.echo(json.dumps(record_value(one.idx, one.record), separators=(",", ":")))


@click.command()
@click.argument("left", metavar="RUN", type=click.Path(path_type=Path))
@click.argument("right", metavar="RUN", type=click.Path(path_type=Path))
@_JSON
@reads_runs("left", "right")
def diff(left: Path, right: Path, as_json: bool) -> None:
    """Show where two runs part, and what came of it: exit code 1 if they differ.

    Prints what differs between the scenarios, the first record that differs with the events that led to it in each run,
    and then the differences between the reports.

    Example: g2sim diff runs/shared runs/local
    """
    from g2sim.scenarios.run_diff import diff_runs

    found = diff_runs(left, right)
    if as_json:
        click.echo(json.dumps(_diff_value(found), sort_keys=True))
    else:
        click.echo("\n".join(_diff_lines(found, (str(left), str(right)))))
    if found.damage is not None:
        raise found.damage
    if not found.equal:
        raise click.exceptions.Exit(1)


@click.command()
@_RUN
@click.option("--prometheus", is_flag=True, help="The report's figures in the Prometheus text format.")
@click.option("--parquet", is_flag=True, help="Requests and events as a folder of Parquet files (extra parquet).")
@click.option(
    "--kv-events",
    type=click.Choice(("neutral", "dynamo")),
    help="Each rank's KV events as JSON lines: g2sim's own, or Dynamo's router events.",
)
@click.option("--out", type=click.Path(path_type=Path), help="File to write (else stdout), or folder of Parquet files.")
@click.option("--overwrite", is_flag=True, help="Replace what is there.")
@reads_runs("run_path")
def export(
    run_path: Path, prometheus: bool, parquet: bool, kv_events: str | None, out: Path | None, overwrite: bool
) -> None:
    """Write RUN, a run folder or an event log, for other programs.

    A log that was cut or damaged is exported as far as it is good, with exit code 1.

    Example: g2sim export runs/demo --prometheus --out demo.prom
    """
    if prometheus + parquet + (kv_events is not None) != 1:
        allowed = "one of --prometheus, --parquet and --kv-events"
        raise ConfigError("", problem="what to write is not clear", allowed=allowed)
    damage: SimError | None
    if parquet:
        from g2sim.scenarios.export_parquet import write_parquet

        if out is None:
            raise ConfigError("--out", problem="missing", allowed="the folder to write")
        damage = write_parquet(run_path, out, overwrite=overwrite)
    elif kv_events is not None:
        from g2sim.scenarios.export_kv_events import write_kv_events

        with _output(out, overwrite) as file:
            damage = write_kv_events(run_path, kv_events, file.write)
    else:
        from g2sim.scenarios.export_prometheus import prometheus_text
        from g2sim.scenarios.run import report_of_log

        rebuilt = report_of_log(run_path)
        damage = rebuilt.damage
        with _output(out, overwrite) as file:
            file.write(prometheus_text(rebuilt.report))
    if out is not None:
        click.echo(out)
    if damage is not None:
        raise damage


def _output(out: Path | None, overwrite: bool) -> AbstractContextManager[TextIO]:
    """The file to write, or stdout."""
    from g2sim.scenarios.output_file import new_text_file

    if out is None:
        return nullcontext(sys.stdout)
    return new_text_file(out, overwrite=overwrite)


def _state_table(value: dict[str, Any]) -> str:
    from tabulate import tabulate

    ranks = [
        [
            rank["rank"],
            f"{len(rank['g1_blocks'])}/{rank['g1_capacity_blocks']}",
            len(rank["index_g1_blocks"]),
            len(rank["g2_blocks"]),
            len(rank["index_g2_blocks"]),
            _numbers(rank["running"]),
            _numbers(rank["waiting"]),
        ]
        for rank in value["ranks"]
    ]
    heads = ["rank", "G1\n[blocks]", "G1 in\nindex", "G2 heard\n[blocks]", "G2 in\nindex", "running", "waiting"]
    blocks = [
        f"at {value['time_ms']!r} ms, after record {value['record']}",
        f"open requests: {_numbers(value['open_requests'])}; ended: "
        + (", ".join(f"{count} {status}" for status, count in value["ended"].items()) or "none"),
        tabulate(ranks, headers=heads),
    ]
    if value["g2_pools"]:
        names = ("resident_blocks", "pending_blocks", "pinned_blocks", "transfers")
        rows = [
            [pool["pool"], pool["capacity_blocks"], *(len(pool[name]) for name in names)] for pool in value["g2_pools"]
        ]
        short = [name.removesuffix("_blocks") for name in names]
        blocks.append(tabulate(rows, headers=["G2 pool [blocks]", "capacity", *short]))
    waits = "; ".join(f"{router['pool']} {_numbers(router['waiting'])}" for router in value["routers"])
    blocks.append(f"waiting in routers: {waits}; KV events on their way to them: {value['kv_events_not_yet_heard']}")
    return "\n\n".join(blocks) + "\n"


def _numbers(numbers: list[int], most: int = 8) -> str:
    """Requests by number; long lists are cut."""
    if not numbers:
        return "-"
    more = f" and {len(numbers) - most} more" if len(numbers) > most else ""
    return " ".join(map(str, numbers[:most])) + more


def _diff_value(found: RunDiff) -> dict[str, Any]:
    from g2sim.scenarios.records import record_value

    chains = [[record_value(one.idx, one.record) for one in chain] for chain in found.chains]
    return {
        "equal": found.equal,
        "first_difference": None
        if found.record_idx is None
        else {"record": found.record_idx, "fields": found.fields, "left": chains[0], "right": chains[1]},
        "scenario": found.scenario,
        "report": found.report,
    }


def _diff_lines(found: RunDiff, names: tuple[str, str]) -> list[str]:
    if found.equal:
        return ["the runs are equal: scenario, every record, report"]
    lines = _change_lines("scenario", found.scenario)
    if found.record_idx is None:
        lines.append("every record is equal")
    else:
        lines.append(f"first difference: record {found.record_idx}")
        lines += [f"  {path}: {_pair(pair)}" for path, pair in found.fields.items()]
        for name, chain in zip(names, found.chains, strict=True):
            lines.append(f"what led there in {name}:" if chain else f"{name}: the log has ended before")
            lines += [f"  {one.line}" for one in chain]
    return lines + _change_lines("report", found.report)


def _change_lines(what: str, changes: Changes) -> list[str]:
    if not changes:
        return [f"{what}: equal"]
    shown = list(changes.items())[:_SHOWN_CHANGES]
    lines = [f"{what}: {len(changes)} differences", *(f"  {path}: {_pair(pair)}" for path, pair in shown)]
    if len(changes) > len(shown):
        lines.append(f"  and {len(changes) - len(shown)} more: --json shows all")
    return lines


def _pair(pair: tuple[Any, Any]) -> str:
    from g2sim.bus.errors import shorten

    left, right = pair
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in pair)
    change = f" ({right - left:+g})" if numbers else ""
    return f"{shorten(left, 60)} -> {shorten(right, 60)}{change}"
