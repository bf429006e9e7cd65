"""Simulation testing of the simulator: random deployments, traffic and policies, with every audit on.

    python tests/swarm/swarm.py [--first SEED] [--count N] [--jobs N] [--keep FOLDER]

A case is drawn from its seed alone. What is checked of each (letters as in docs/reliability.md):

A  residency rebuilt from the log equals the actors' own, at every pass end and at the end
B  nothing ever holds more than its capacity; C  pins and pending copies are never negative, and gone at rest
D  work that waits with nothing due is an error that names it; E  every request ends once, or the run says it did not
F  the same bytes twice, by the trio driver and by plain calls; G  all rules of the validator hold for the run's streams

and the report rebuilt from the log is the report. The first failure is shrunk, and kept as a scenario with its trace.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import secrets
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "oracle"), str(HERE.parent / "differential")]

from draw import draw  # noqa: E402
from shrinking import fewer_rows, shrink  # noqa: E402
from translate import scenario_from_call  # noqa: E402

from g2sim.actors.router.registry import POLICIES  # noqa: E402
from g2sim.bus.drivers import InlineDriver, TrioDriver  # noqa: E402
from g2sim.bus.errors import Deadlock, SimError  # noqa: E402
from g2sim.bus.log import LogReader  # noqa: E402
from g2sim.scenarios.report import report_text  # noqa: E402
from g2sim.scenarios.run import RunResult, report_of_log, run_scenario  # noqa: E402
from g2sim.scenarios.run_folder import log_file  # noqa: E402
from g2sim.scenarios.schema import Scenario  # noqa: E402
from g2sim.scenarios.state_fold import StateFold  # noqa: E402
from g2sim.scenarios.stream_sources import check_files  # noqa: E402
from g2sim.scenarios.validate import Validator  # noqa: E402
from g2sim.scenarios.validate_rules import Severity  # noqa: E402

Values = dict[str, Any]


@attrs.frozen
class Case:
    """A scenario, with the rows of its trace."""

    scenario: Values
    trace: list[Values]


def draw_case(seed: int) -> Case:
    """The case of a seed: a deployment and traffic of the differential test's kind, behind a router of any policy."""
    drawn, g = draw(seed), random.Random(f"swarm:{seed}")
    values = scenario_from_call(drawn["call"], trace_path="trace.jsonl", trace_format="mooncake")
    router: Values = {"policy": g.choice(sorted(POLICIES)), "tie_break": g.choice(["lowest", "random"])}
    if g.random() < 0.4:
        router["kv_event_lag_ms"] = g.choice([0.0, 0.5, 3.0, 40.0])
    if router["policy"] == "dynamo_kv" and g.random() < 0.5:
        router["options"] = {
            "router_queue_threshold": g.choice([0.0, 0.5, 2.0]),
            "router_queue_policy": g.choice(["fcfs", "lcfs", "wspt"]),
        }
    return Case(values | {"router": router, "seed": g.randrange(2**32)}, drawn["trace"])


def audit(case: Case) -> tuple[str, str | None]:
    """How a case went ("done", "at its limit", "stuck"), and what is wrong, None if nothing is."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in case.trace), encoding="utf-8")
        scenario = Scenario.from_dict(case.scenario, base_dir=folder)
        out = folder / "run"
        try:
            result = run_scenario(scenario, out, verify=True, driver=InlineDriver)
        except Deadlock as stuck:
            how, problem = "stuck", None if stuck.waiting else f"D: {stuck}"
        except SimError as error:
            return "failed", f"{type(error).__name__}: {error}"
        else:
            how = "at its limit" if result.report["stopped_at_limit"] else "done"
            problem = _told_again(result, out) or _ends(result.report, at_rest=how == "done")
        return how, problem or _log(out, at_rest=how == "done") or _streams(out) or _again(scenario, out, folder)


def _told_again(result: RunResult, out: Path) -> str | None:
    if report_text(report_of_log(out).report) != report_text(result.report):
        return "the report rebuilt from the log is another one"
    return None


def _ends(report: Values, *, at_rest: bool) -> str | None:
    counts = dict(report["requests"])
    released, unfinished = counts.pop("released"), counts["unfinished"]
    if sum(counts.values()) != released or (at_rest and unfinished):
        return f"E: of {released} requests, {report['requests']}"
    return None


def _log(out: Path, *, at_rest: bool) -> str | None:
    fold = StateFold()
    with LogReader(log_file(out)) as reader:
        for record in reader:
            fold.apply(record)
    for name, pool in fold.pools.items():
        if any(pins < 0 for _, pins in pool.blocks.values()):
            return f"C: pool {name} has negative pins"
        if at_rest and (pool.transfers or any(not resident or pins for resident, pins in pool.blocks.values())):
            return f"C: pool {name} is not at rest at the end"
    if at_rest and any(rank.running or rank.waiting for rank in fold.ranks.values()):
        return "C: a rank is not at rest at the end"
    return None


def _streams(out: Path) -> str | None:
    validator = Validator()
    check_files([out], validator)
    verdicts = validator.finish()
    for finding in validator.findings.kept:
        if finding.severity is Severity.ERROR:
            return f"G: {finding}"
    inexact = [verdict.text() for verdict in verdicts if verdict.reason is not None]
    return f"G: {inexact[0]}" if inexact else None


def _again(scenario: Scenario, out: Path, folder: Path) -> str | None:
    try:
        run_scenario(scenario, folder / "again", driver=TrioDriver)
    except Deadlock:
        pass
    if log_file(out).read_bytes() != log_file(folder / "again").read_bytes():
        return "F: plain calls and trio tasks give other bytes"
    return None


def smaller(case: Case) -> Iterator[Case]:
    """Cases with fewer rows, fewer workers, a plainer router."""
    for rest in fewer_rows(case.trace):
        yield attrs.evolve(case, trace=rest)
    router = case.scenario["router"]
    for plainer in ({"policy": "round_robin"}, {"policy": router["policy"]}):
        if router != plainer:
            yield attrs.evolve(case, scenario=case.scenario | {"router": plainer})
    engine = case.scenario["engine"]
    for role, worker in engine["workers"].items():
        for key, count in worker.get("parallelism", {}).items():
            if type(count) is int and count > 1:
                fewer = worker | {"parallelism": worker["parallelism"] | {key: count - 1}}
                workers = engine["workers"] | {role: fewer}
                yield attrs.evolve(case, scenario=case.scenario | {"engine": engine | {"workers": workers}})


def try_seed(seed: int) -> tuple[int, str, str | None]:
    """(seed, how it went, what is wrong); a crash is something wrong."""
    try:
        how, problem = audit(draw_case(seed))
    except Exception as error:
        return seed, "crash", f"{type(error).__name__}: {error}"
    return seed, how, problem


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--first", type=int, help="first seed; a fresh one by default")
    options.add_argument("--count", type=int, default=300)
    options.add_argument("--jobs", type=int, default=multiprocessing.cpu_count())
    options.add_argument("--keep", type=Path, default=Path("build/swarm"), help="folder for shrunk cases")
    chosen = options.parse_args()
    first = secrets.randbelow(2**40) if chosen.first is None else chosen.first
    print(f"seeds {first} to {first + chosen.count - 1}", flush=True)
    started = time.monotonic()
    counts: dict[str, int] = {}
    bad: list[int] = []
    with multiprocessing.get_context("spawn").Pool(chosen.jobs) as pool:
        for seed, how, problem in pool.imap(try_seed, range(first, first + chosen.count), chunksize=8):
            if problem is None:
                counts[how] = counts.get(how, 0) + 1
            else:
                bad.append(seed)
                print(f"seed {seed}: {problem}", flush=True)
    told = ", ".join(f"{count} {how}" for how, count in sorted(counts.items())) or "none good"
    print(f"{chosen.count} cases in {time.monotonic() - started:.1f} s: {told}; {len(bad)} with a fault")
    if bad:
        print(f"shrunk to: {_keep(bad[0], chosen.keep)}")
        repeat = ["python", "tests/swarm/swarm.py", "--first", str(bad[0]), "--count", "1"]
        print(f"to repeat: {shlex.join(repeat)}")
    return int(bool(bad))


def _keep(seed: int, folder: Path) -> Path:
    def fails(case: Case) -> bool:
        try:
            return audit(case)[1] is not None
        except Exception:
            return True

    case = shrink(draw_case(seed), smaller, fails)
    place = folder / f"seed-{seed}"
    place.mkdir(parents=True, exist_ok=True)
    (place / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in case.trace), encoding="utf-8")
    path = place / "scenario.json"
    path.write_text(json.dumps(case.scenario, indent=1) + "\n", encoding="utf-8")
    return path


if __name__ == "__main__":
    sys.exit(main())
