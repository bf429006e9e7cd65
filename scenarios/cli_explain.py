"""The command that says why a request went where it went."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from g2sim.scenarios.cli_reading import reads_runs

if TYPE_CHECKING:
    from g2sim.actors.router.events import PlacementWeighed
    from g2sim.scenarios.explain import Decision, Explanation


@click.command()
@click.argument("run_path", metavar="RUN", type=click.Path(path_type=Path))
@click.argument("request", metavar="REQUEST")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
@reads_runs("run_path")
def explain(run_path: Path, request: str, as_json: bool) -> None:
    """Explain the placement of REQUEST in RUN, and what came of it, from the log alone.

    REQUEST is its number, its name in the trace, its session and turn as in s12/2, or its uuid. Numbers are of one run:
    under another policy another request may have it.

    Shows every candidate with what the router believed of its caches and load, each part of its cost, and ties; then
    what happened, and why less was found in the caches than the router had reported.

    Example: g2sim explain runs/demo 17
    """
    from g2sim.scenarios.explain import explain_request

    told, damage = explain_request(run_path, request)
    if as_json:
        click.echo(json.dumps(told.plain(), sort_keys=True, indent=1, allow_nan=False))
    else:
        click.echo("\n\n".join(_parts(told)))
    if damage is not None:
        raise damage


def _parts(told: Explanation) -> Iterator[str]:
    from g2sim.actors.kv.blocks import whole_blocks

    arrival, block = told.arrival, told.block_size_tokens
    name = "" if arrival.name is None else f" ({arrival.name})"
    session = "" if arrival.session_id is None else f", session {arrival.session_id}"
    if session and arrival.turn_index is not None:
        session += f" turn {arrival.turn_index}"
    yield (
        f"request {arrival.request}{name}{session}: {arrival.input_tokens} prompt tokens, "
        f"{whole_blocks(arrival.input_tokens, block)} whole blocks of {block}; "
        f"{arrival.output_tokens} output tokens asked for; arrived at {arrival.arrival_ms:.3f} ms"
    )
    for decision in told.decisions:
        yield _decision(decision, told)
    yield "what happened [ms]\n" + "\n".join(f"{step.time_ms:14.3f}  {step.what}" for step in told.steps)
    looking = {decision.pool for decision in told.decisions if decision.weighed is not None}
    for reuse in told.reuse:
        host = "" if reuse.host_tokens is None else f" + {reuse.host_tokens} from G2"
        believed = (reuse.device_blocks + reuse.host_blocks) * block
        line = f"found {reuse.g1_tokens} from G1{host}; computed {reuse.computed_tokens}"
        if reuse.pool in looking:
            blocks = f"{reuse.device_blocks} blocks on the device + {reuse.host_blocks} in host memory"
            line = f"believed {blocks} = {believed} tokens; {line}"
        line = f"{reuse.pool}: {line}"
        yield "\n  ".join([line, *reuse.reasons])
    if not told.finished:
        yield "the log ends before the request does"


def _decision(decision: Decision, told: Explanation) -> str:
    weighed, placed = decision.weighed, decision.placed
    policy = told.policy if weighed is None else weighed.policy
    head = f"{decision.pool} router, policy {policy}"
    if decision.placed_ms is None:
        return f"{head}: waits since {decision.waited_from_ms:.3f} ms"
    at = f"at {decision.placed_ms:.3f} ms"
    if decision.waited_from_ms is not None:
        at += f" after {decision.placed_ms - decision.waited_from_ms:.3f} ms in the router"
    if placed is None:
        return f"{head}: refused {at}: {decision.refused}"
    head += f": worker {placed.worker} rank {placed.dp_rank}, {at}"
    if weighed is None:
        return f"{head}; it weighs no candidates"
    return f"{head}, by {weighed.reason}\n{_candidates(weighed)}\n{_tie(weighed, told.tie_break)}"


def _candidates(weighed: PlacementWeighed) -> str:
    from tabulate import tabulate

    from g2sim.scenarios.explain import COST_UNITS, cost_terms

    best = min(weighed.costs, default=None)
    terms = cost_terms(weighed)
    columns: dict[str, list[Any]] = {
        "worker/rank": [f"{w}/{r}" for w, r in zip(weighed.workers, weighed.dp_ranks, strict=True)],
        "device\n[blocks]": list(weighed.device_blocks),
        "host\n[blocks]": list(weighed.host_blocks),
        "in prefill\n[tokens]": list(weighed.prefill_tokens),
        "active\n[blocks]": list(weighed.active_blocks),
        "active\n[requests]": list(weighed.active_requests),
        **{f"{name}\n(part)": list(values) for name, values in zip(weighed.part_names, weighed.parts, strict=True)},
    }
    if weighed.costs:
        columns["cost"] = list(weighed.costs)
    marks = ["chosen" if k == weighed.chosen else "" for k in range(len(weighed.workers))]
    if weighed.tied > 1:
        marks = [
            ", ".join(filter(None, [mark, "tied" if weighed.costs[k] == best else ""])) for k, mark in enumerate(marks)
        ]
    table = tabulate({**columns, "": marks}, headers="keys", floatfmt=".10g")
    if not terms:
        return table
    unit = f" [{COST_UNITS[weighed.policy]}]" if weighed.policy in COST_UNITS else ""
    others = [name for name in weighed.part_names if name not in terms]
    not_added = f" (not added: {', '.join(others)})" if others else ""
    return f"{table}\ncost{unit} = {' + '.join(terms)}{not_added}"


def _tie(weighed: PlacementWeighed, tie_break: str) -> str:
    if weighed.tied <= 1:
        return "no tie"
    how = "the lowest (worker, rank)" if tie_break == "lowest" else "one drawn from the router's stream"
    return f"tie of {weighed.tied}: {how if weighed.reason != 'softmax' else 'softmax drew one'}"
