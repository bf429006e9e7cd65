"""Differential test of the KV router: random cases through the reference and through ours, compared bit for bit.

    python tests/differential/run_router.py --reference PYTHON [--first SEED] [--count N] [--keep FOLDER]

The reference decides equal costs by chance. So it runs first, and ours is told which of its own equally good ranks to
take: a choice of the reference that is no best one of ours is a difference, and so is any time, admission, cost,
overlap or queue time that is not equal. Exit code 1 on any difference; it may take a seed several tries to show it
again, so the reference's answer is kept with the case.
"""

from __future__ import annotations

import argparse
import json
import random
import secrets
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "oracle")]

from draw import Case, draw  # noqa: E402
from harness import Outcome, run  # noqa: E402

from g2sim.actors.router.dynamo import DynamoKv  # noqa: E402
from g2sim.actors.router.events import PlacementWeighed  # noqa: E402
from g2sim.actors.router.policy import Place, Placement, RoutedRequest  # noqa: E402
from g2sim.actors.router.registry import POLICIES  # noqa: E402
from g2sim.bus.errors import Deadlock, PolicyError  # noqa: E402

Row = dict[str, Any]
Who = tuple[str | None, int | None, float | None]
"""A request in both worlds: session and turn, or else its arrival time, which is unique."""

WANTED: dict[tuple[str, Who], Placement] = {}
"""What the reference chose, by pool and request."""


class Guided(DynamoKv):
    """Our policy, with ties decided as the reference did."""

    def _choose(self, waiting: Any, candidates: Any) -> Any:
        verdict = super()._choose(waiting, candidates)
        request: RoutedRequest = waiting.request
        who = (request.session_id, request.turn_index, request.arrival_ms if request.session_id is None else None)
        wanted = WANTED.get((self.pool.role.pool_name, who))
        if wanted is None or not isinstance(verdict, Place) or verdict.why is None:
            return verdict
        costs = dict(zip((one.placement for one in candidates), verdict.why.costs, strict=True))
        if costs[wanted] != min(costs.values()):
            raise ValueError(f"the reference took {wanted}, ours are {costs}")
        return Place(wanted, attrs.evolve(verdict.why, chosen=list(costs).index(wanted)))


def draw_router(seed: int) -> Case:
    """The deployment and traffic of ``draw``, with a KV router; arrivals differ, so that requests can be told apart."""
    case, g = draw(seed), random.Random(f"router:{seed}")
    call = {
        key: value for key, value in case["call"].items() if not key.startswith("sla_") and key != "max_sim_time_ms"
    }
    config: Row = {}
    for option, share, values in (
        ("overlap_score_credit", 0.35, [0.0, 0.5, 1.0, 1.7, 3.0]),
        ("overlap_score_credit_decay", 0.3, [0.3, 1.0, 4.0, 10.0]),
        ("prefill_load_scale", 0.35, [0.0, 0.7, 1.0, 3.0]),
        ("overlap_score_weight", 0.1, [0.0, 0.5, 2.0]),
        ("decode_active_request_weight", 0.3, [0.3, 1.0, 5.0]),
        ("host_cache_hit_weight", 0.5, [0.0, 0.1, 0.3, 0.33, 0.5, 0.9, 1.0]),
        ("router_track_active_blocks", 0.15, [False]),
        ("router_track_prefill_tokens", 0.15, [False]),
        ("router_assume_kv_reuse", 0.2, [False]),
        ("router_queue_threshold", 0.6, [0.0, 0.25, 0.5, 0.9, 1.0, 2.0]),
        ("router_queue_policy", 0.8, ["fcfs", "lcfs", "wspt"]),
    ):
        if g.random() < share:
            config[option] = g.choice(values)
    if g.random() < 0.3:
        call["kv_event_lag_ms"] = g.choice([0.0, 0.5, 1.0, 3.0, 10.0, 40.0])
    last_ms = None
    for row in sorted(case["trace"], key=lambda row: row["timestamp"]):
        if last_ms is not None and row["timestamp"] <= last_ms:
            row["timestamp"] = round(last_ms + g.choice([0.0001, 0.0003, 0.5]), 4)
        last_ms = row["timestamp"]
    return case | {"call": call | {"router_mode": "kv_router", "router_config": config}}


def compare(case: Case, expected: Row) -> tuple[str, str | None]:
    """How a case went, and the first difference."""
    WANTED.clear()
    if "error" in expected:
        outcome = run(case, verify=False)
        if outcome.error is None or (isinstance(outcome.error, Deadlock) and outcome.error.waiting):
            return "gave up", None
        return "different", f"the reference: {expected['error']}; ours: {outcome.error}"
    for row in expected["per_request"]:
        if row["terminal_status"] == "failed" and not row["admissions"] and row["routing"][0]["outcome"] == "queued":
            # The reference loses a request that it releases while another rank of the worker has a copy to hear of.
            return "lost by the reference", None
        for hop in row["routing"]:
            WANTED[hop["pool"], _who(row)] = Placement(hop["logical_worker_id"], hop["dp_rank"])
    outcome = run(case, verify=False)
    if outcome.error is not None:
        kind = "" if isinstance(outcome.error, PolicyError) else f"{type(outcome.error).__name__}: "
        return "different", f"{kind}{outcome.error}"
    return _compare_rows(expected["per_request"], outcome)


def _compare_rows(expected: Sequence[Row], outcome: Outcome) -> tuple[str, str | None]:
    costs: dict[int, list[Any]] = {}
    for record in outcome.records:
        event = record.event
        if isinstance(event, PlacementWeighed):
            hit = event.parts[event.part_names.index("hit")][event.chosen]
            told = [event.costs[event.chosen], hit, event.host_blocks[event.chosen]]
            costs.setdefault(event.request, []).append(told)
    rows = {_who(row): row for row in outcome.rows}
    if len(rows) != len(expected):
        return "different", f"{len(expected)} rows expected, got {len(rows)}"
    for row in expected:
        own = rows[_who(row)]
        for field, value in row.items():
            if field == "costs":
                have: Any = costs.get(own["request"], [])
            elif field == "routing":
                have = [{key: hop[key] for key in value[0]} for hop in own["routing_history"]] if value else []
            elif field == "admissions":
                have = [[hop["pool"], hop["at_ms"], hop["reused_input_tokens"]] for hop in own["admission_history"]]
            else:
                have = own[field]
            if have != value:
                return "different", f"request {_who(row)}: {field}: expected {value}, got {have}"
    return "equal", None


def _who(row: Row) -> Who:
    session = row["session_id"]
    return session, row["turn_index"], row["arrival_time_ms"] if session is None else None


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--reference", required=True, help="interpreter of the reference's environment")
    options.add_argument("--first", type=int, help="first seed; a fresh one by default")
    options.add_argument("--count", type=int, default=300)
    options.add_argument("--keep", type=Path, default=Path("build/differential"), help="folder for different cases")
    chosen = options.parse_args()
    first = secrets.randbelow(2**40) if chosen.first is None else chosen.first
    print(f"seeds {first} to {first + chosen.count - 1}", flush=True)
    POLICIES[Guided.name] = Guided
    server = [chosen.reference, str(HERE / "reference_router_server.py")]
    counts: dict[str, int] = {}
    with subprocess.Popen(server, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reference:
        assert reference.stdin is not None
        assert reference.stdout is not None
        for seed in range(first, first + chosen.count):
            case = draw_router(seed)
            reference.stdin.write(json.dumps(case) + "\n")
            reference.stdin.flush()
            expected = json.loads(reference.stdout.readline())
            how, difference = compare(case, expected)
            counts[how] = counts.get(how, 0) + 1
            if difference is not None:
                print(f"seed {seed}: {difference}", flush=True)
                chosen.keep.mkdir(parents=True, exist_ok=True)
                kept = chosen.keep / f"router_{seed}.json"
                kept.write_text(json.dumps(case | {"guided": expected}, indent=1) + "\n", encoding="utf-8")
        reference.stdin.close()
    print(f"{chosen.count} cases: {', '.join(f'{count} {how}' for how, count in sorted(counts.items()))}")
    return int("different" in counts)


if __name__ == "__main__":
    sys.exit(main())
