"""Simulation testing of the simulator: random deployments, traffic, policies and faults, with every audit on.

    python tests/swarm/swarm.py [--first SEED] [--count N] [--jobs N] [--keep FOLDER] [--case FILE]

A case is drawn from its seed alone (``draws``). What is checked of each (``audits``; letters: docs/reliability.md):

A  residency rebuilt from the log equals the actors' own, at every pass end and at the end
B  nothing ever holds more than its capacity; C  pins and pending copies are never negative, and gone at rest
D  work that waits with nothing due is an error that names it; E  every request ends once, or the run says it did not
F  the same bytes twice: by plain calls, and by trio tasks in another process, under another hash seed
G  all rules of the validator hold for the run's streams, in both modes

and the report rebuilt from the log is the report, and after faults every router's index gets right. The first failure
is shrunk, and kept as a file that ``--case`` takes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import secrets
import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any, TypeVar

import attrs

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "oracle"), str(HERE.parent / "differential")]

from audits import Outcome, audit, trio_digest  # noqa: E402
from draws import Case, draw_case  # noqa: E402
from shrinking import fewer_rows, shrink  # noqa: E402

CHUNK_SEEDS = 64
LONGEST_S = 30
"""A case that takes more processor time does not end."""

_Result = TypeVar("_Result")


def try_case(case: Case, *, again: bool = True) -> Outcome:
    """How a case went; a crash is something wrong."""
    try:
        return audit(case, again=again)
    except Exception as error:
        return Outcome("crash", f"{type(error).__name__}: {error}")


def try_seed(seed: int) -> Outcome:
    """How the case of a seed went, by plain calls and by trio tasks."""
    return try_case(draw_case(seed))


def _half(seed: int) -> Outcome:
    return _ending(lambda: try_case(draw_case(seed), again=False))


def _other_half(seed: int) -> str:
    try:
        return _ending(lambda: trio_digest(draw_case(seed)))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _ending(work: Callable[[], _Result]) -> _Result:
    def too_long(*_: object) -> None:
        raise TimeoutError(f"no end within {LONGEST_S} s")

    signal.signal(signal.SIGVTALRM, too_long)
    signal.setitimer(signal.ITIMER_VIRTUAL, LONGEST_S)
    try:
        return work()
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def smaller(case: Case) -> Iterator[Case]:
    """Cases with fewer rows, without this or that, or with fewer workers."""
    for rest in fewer_rows(case.trace):
        yield attrs.evolve(case, trace=rest)
    for cancels in fewer_rows(case.cancels or []):
        yield attrs.evolve(case, cancels=cancels)
    if case.policy is not None:
        yield attrs.evolve(case, policy=None)
    scenario = case.scenario
    for plan in fewer_rows(scenario.get("faults", {}).get("plan", [])):
        yield attrs.evolve(case, scenario=scenario | {"faults": scenario["faults"] | {"plan": plan}})
    if scenario["router"] != {"policy": "round_robin"} and "faults" not in scenario:
        yield attrs.evolve(case, scenario=scenario | {"router": {"policy": "round_robin"}})
    for path in _PLAINER:
        plainer = _without(scenario, path)
        if plainer is not None:
            yield attrs.evolve(case, scenario=plainer)
    engine = scenario["engine"]
    for role, worker in engine["workers"].items():
        for key, count in worker.get("parallelism", {}).items():
            if type(count) is int and count > 1:
                fewer = worker | {"parallelism": worker["parallelism"] | {key: count - 1}}
                workers = engine["workers"] | {role: fewer}
                yield attrs.evolve(case, scenario=scenario | {"engine": engine | {"workers": workers}})


_PLAINER = (
    ("faults",),
    ("faults", "recovery"),
    *(("router", key) for key in ("options", "kv_event_lag_ms", "load_sync_ms", "replicas", "tie_break")),
    *(("traffic", "load", f"agentic_{key}") for key in ("profile", "warmup", "snapshot", "lanes")),
    ("traffic", "load", "speedup"),
    ("traffic", "stop", "max_virtual_time_ms"),
    ("evaluation",),
    ("engine", "kv_transfer"),
)
"""What a scenario may be without."""


def _without(values: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any] | None:
    """The values without what is at the path, None if nothing is there."""
    key, *rest = path
    if not isinstance(values, dict) or key not in values:
        return None
    if not rest:
        return {name: value for name, value in values.items() if name != key}
    inner = _without(values[key], tuple(rest))
    return None if inner is None else values | {key: inner}


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--first", type=int, help="first seed; a fresh one by default")
    options.add_argument("--count", type=int, default=300)
    options.add_argument("--jobs", type=int, default=multiprocessing.cpu_count())
    options.add_argument("--keep", type=Path, default=Path("build/swarm"), help="folder for shrunk cases")
    options.add_argument("--case", type=Path, help="run a kept case, and nothing else")
    chosen = options.parse_args()
    if chosen.case is not None:
        outcome = try_case(read_case(chosen.case))
        print(outcome.problem or outcome.how)
        return int(outcome.problem is not None)
    first = secrets.randbelow(2**40) if chosen.first is None else chosen.first
    print(f"seeds {first} to {first + chosen.count - 1}", flush=True)
    started = time.monotonic()
    counts: Counter[str] = Counter()
    bad: list[tuple[int, Outcome]] = []
    for seed, outcome in _outcomes(first, chosen.count, chosen.jobs):
        if outcome.problem is None:
            counts[outcome.how] += 1
        else:
            bad.append((seed, outcome))
            print(f"seed {seed}: {outcome.problem}", flush=True)
    told = ", ".join(f"{count} {how}" for how, count in sorted(counts.items())) or "none good"
    print(f"{chosen.count} cases in {time.monotonic() - started:.1f} s: {told}; {len(bad)} with a fault")
    if bad:
        seed, outcome = bad[0]
        repeat = ["python", "tests/swarm/swarm.py", "--first", str(seed), "--count", "1"]
        print(f"to repeat: {shlex.join(repeat)}", flush=True)
        kept = keep(seed, outcome, chosen.keep)
        print(f"shrunk: {shlex.join([*repeat[:2], '--case', str(kept)])}")
    return int(bool(bad))


def _outcomes(first: int, count: int, jobs: int) -> Iterator[tuple[int, Outcome]]:
    """Both halves of every seed, each in processes with a hash seed of its own, one half after the other."""
    with _pool(jobs, "1") as one, _pool(jobs, "2") as other:
        for start in range(first, first + count, CHUNK_SEEDS * jobs):
            seeds = range(start, min(start + CHUNK_SEEDS * jobs, first + count))
            outcomes = one.map(_half, seeds, chunksize=4)
            compared = [seed for seed, outcome in zip(seeds, outcomes, strict=True) if outcome.digest is not None]
            digests = dict(zip(compared, other.map(_other_half, compared, chunksize=4), strict=True))
            for seed, outcome in zip(seeds, outcomes, strict=True):
                if outcome.problem is None and digests.get(seed) != outcome.digest:
                    problem = f"F: trio tasks and another hash seed give another log: {digests.get(seed)}"
                    outcome = attrs.evolve(outcome, problem=problem)
                yield seed, outcome


def _pool(jobs: int, hash_seed: str) -> Pool:
    """Processes that start with this hash seed."""
    before = os.environ.get("PYTHONHASHSEED")
    os.environ["PYTHONHASHSEED"] = hash_seed
    try:
        return multiprocessing.get_context("spawn").Pool(jobs)
    finally:
        if before is None:
            del os.environ["PYTHONHASHSEED"]
        else:
            os.environ["PYTHONHASHSEED"] = before


def keep(seed: int, outcome: Outcome, folder: Path) -> Path:
    """Shrink the case of a seed that went so, and write it into a folder. Returns its file."""

    kind = _kind(outcome)

    def fails(case: Case) -> bool:
        return _kind(_ending(lambda: try_case(case, again=kind == "F"))) == kind

    case = draw_case(seed)
    if kind != "TimeoutError" and fails(case):
        case = shrink(case, smaller, fails)
    path = folder / f"seed-{seed}.json"
    write_case(path, case, outcome.problem)
    return path


def _kind(outcome: Outcome) -> str:
    return (outcome.problem or "").partition(":")[0]


def write_case(path: Path, case: Case, why: str | None) -> None:
    """Write a case, so that ``read_case`` gives it again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"why": why, **attrs.asdict(case)}, indent=1) + "\n", encoding="utf-8")


def read_case(path: Path) -> Case:
    """A case from a file: a mapping with the attributes of ``Case``, and perhaps ``why``."""
    kept = json.loads(path.read_text(encoding="utf-8"))
    kept["policy"] = kept.get("policy") and tuple(kept["policy"])
    return Case(**{key: value for key, value in kept.items() if key != "why"})


if __name__ == "__main__":
    sys.exit(main())
