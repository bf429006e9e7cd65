"""Differential test against the reference: random cases through both, every field compared bit for bit.

    python tests/differential/run.py --reference PYTHON [--first SEED] [--count N] [--jobs N] [--keep FOLDER]

``PYTHON`` is an interpreter of an environment that holds the reference (``make reference`` makes one). A run on which
the reference gives up must be a named Deadlock, or a clean finish, on ours. The first difference is shrunk and written
as a case file that ``tests/oracle/run.py`` reads. Exit code 1 on any difference.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "oracle")]

from draw import Case, draw  # noqa: E402
from harness import Difference, check, run  # noqa: E402
from shrinking import fewer_rows, shrink  # noqa: E402

from g2sim.bus.errors import ConfigError, Deadlock  # noqa: E402


class Reference:
    """The reference in a process of its own; restarted when it dies."""

    def __init__(self, python: str) -> None:
        self._python = python
        self._process: subprocess.Popen[str] | None = None

    def __call__(self, case: Case) -> dict[str, Any]:
        """Results of a case, or {"error": text}; a dead or silent process counts as giving up."""
        if self._process is None:
            self._process = subprocess.Popen(
                [self._python, str(HERE / "reference_server.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(case) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self.close()
            return {"error": "the reference died"}
        return json.loads(line)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                pipe.close()
            self._process = None


def compare(case: Case, reference: Callable[[Case], dict[str, Any]]) -> tuple[str, Difference | None]:
    """How a case went ("equal", "gave up", "refused") and the first difference."""
    expected = reference(case)
    if "error" not in expected:
        return "equal", check(case | {"expected": expected}, verify=False)
    outcome = run(case, verify=False)
    if outcome.error is None or (isinstance(outcome.error, Deadlock) and outcome.error.waiting):
        return "gave up", None
    if isinstance(outcome.error, ConfigError):
        return "refused", None
    return "gave up", Difference(
        "end of the run", expected["error"], f"{type(outcome.error).__name__}: {outcome.error}"
    )


def _smaller(case: Case) -> Iterator[Case]:
    """Cases with fewer rows, fewer workers, fewer options."""
    trace, call = case["trace"], case["call"]
    for rest in fewer_rows(trace):
        yield case | {"trace": rest}
    for key, value in call.items():
        if key.startswith("num_") and value > 1:
            for fewer in {1, value // 2, value - 1}:
                yield case | {"call": call | {key: fewer}}
        if key in ("replay_concurrency", "arrival_speedup_ratio", "max_sim_time_ms") or key.startswith("sla_"):
            yield case | {"call": {name: other for name, other in call.items() if name != key}}
        if key.endswith("_engine_args"):
            if value.get("dp_size", 1) > 1:
                yield case | {"call": call | {key: value | {"dp_size": value["dp_size"] - 1}}}
            for name in ("native_host_offload", "max_model_len", "speedup_ratio", "decode_speedup_ratio"):
                if name in value["engine"]:
                    engine = {other: own for other, own in value["engine"].items() if other != name}
                    yield case | {"call": call | {key: value | {"engine": engine}}}
    for idx, row in enumerate(trace):
        for key, simpler in (("output_length", 1), ("session_id", None), ("delay", None)):
            if row.get(key) not in (simpler, None):
                fewer_keys = {name: value for name, value in row.items() if name != key}
                changed = fewer_keys if simpler is None else row | {key: simpler}
                yield case | {"trace": [*trace[:idx], changed, *trace[idx + 1 :]]}


@attrs.frozen
class Found:
    seed: int
    how: str
    difference: str | None


_reference: Reference | None = None


def _start_worker(python: str) -> None:
    global _reference
    _reference = Reference(python)


def _try_seed(seed: int) -> Found:
    assert _reference is not None
    case = draw(seed)
    try:
        how, difference = compare(case, _reference)
    except Exception as error:
        return Found(seed, "crash", f"{type(error).__name__}: {error}")
    return Found(seed, how, None if difference is None else str(difference))


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--reference", required=True, help="interpreter of the reference's environment")
    options.add_argument("--first", type=int, help="first seed; a fresh one by default")
    options.add_argument("--count", type=int, default=300)
    options.add_argument("--jobs", type=int, default=multiprocessing.cpu_count())
    options.add_argument("--keep", type=Path, default=Path("build/differential"), help="folder for shrunk cases")
    chosen = options.parse_args()
    first = secrets.randbelow(2**40) if chosen.first is None else chosen.first
    print(f"seeds {first} to {first + chosen.count - 1}", flush=True)
    started = time.monotonic()
    counts: dict[str, int] = {}
    bad: list[Found] = []
    context = multiprocessing.get_context("spawn")
    with context.Pool(chosen.jobs, _start_worker, (chosen.reference,)) as pool:
        seeds = range(first, first + chosen.count)
        for found in pool.imap(_try_seed, seeds, chunksize=8):
            if found.difference is not None:
                bad.append(found)
                print(f"seed {found.seed}: {found.difference}", flush=True)
            else:
                counts[found.how] = counts.get(found.how, 0) + 1
    wall_s = time.monotonic() - started
    told = ", ".join(f"{count} {how}" for how, count in sorted(counts.items())) or "0 equal"
    print(f"{chosen.count} cases in {wall_s:.1f} s: {told}; {len(bad)} different")
    if bad:
        print(f"shrunk case: {_write_shrunk(bad[0].seed, chosen.reference, chosen.keep)}")
        print(f"to repeat: python tests/differential/run.py --reference PYTHON --first {bad[0].seed} --count 1")
    return int(bool(bad))


def _write_shrunk(seed: int, python: str, folder: Path) -> Path:
    reference = Reference(python)

    def differs(case: Case) -> bool:
        try:
            return compare(case, reference)[1] is not None
        except Exception:
            return True

    try:
        case = shrink(draw(seed), _smaller, differs)
        expected = reference(case)
    finally:
        reference.close()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"seed_{seed}.json"
    path.write_text(json.dumps(case | {"expected": expected}, indent=1) + "\n", encoding="utf-8")
    return path


if __name__ == "__main__":
    sys.exit(main())
