"""Wall time and memory of g2sim beside the reference's, on the same workloads, in alternating runs.

    python benchmarks/against_reference.py --reference PYTHON [--only 1 2 ...] [--pairs N] [--mooncake FILE] [--json]

``PYTHON`` is an interpreter of an environment that holds the reference (``make reference`` makes one). g2sim is that of
the interpreter which runs this: the compiled build with ``build/compiled/bin/python`` (``make compiled``). Every run is
a process of its own, and the time is that of the replay call, reading of the trace included; CPU time is printed too,
as it suffers less from what else the machine does. The results of each pair must be equal to the last bit. The
reference's KV router decides ties by chance, so there the results are compared once before the pairs, with ours taking
the ranks that the reference took (``tests/differential/run_router.py``).
Exit code 1 if results differ.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tabulate import tabulate
from workloads import Case, cases

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent / "tests"
sys.path[:0] = [str(TESTS / "oracle"), str(TESTS / "differential")]

import run_router  # noqa: E402
from harness import NOT_OURS, same_value  # noqa: E402
from translate import scenario_from_call  # noqa: E402

from g2sim.scenarios.build import is_compiled  # noqa: E402

Run = dict[str, Any]


def run_ours(case: Case, folder: Path, log: bool) -> Run:
    """Time one run in this process."""
    from g2sim.bus.log import LogReader
    from g2sim.scenarios.run import run_scenario
    from g2sim.scenarios.run_folder import log_file
    from g2sim.scenarios.schema import Scenario

    out = folder / "run" if log else None
    started, cpu_s = time.perf_counter(), time.process_time()
    values = scenario_from_call(case["call"], trace_path=case["trace_path"], trace_format=case["trace_format"])
    report = run_scenario(Scenario.from_dict(values), out).report
    found: Run = {"wall_s": time.perf_counter() - started, "cpu_s": time.process_time() - cpu_s}
    found["summary"] = report["summary"]
    status = Path("/proc/self/status").read_text(encoding="ascii")
    found["peak_mib"] = int(status.partition("VmHWM:")[2].split()[0]) / 1024
    if out is not None:
        found["log_mib"] = log_file(out).stat().st_size / 2**20
        with LogReader(log_file(out)) as reader:
            found["events"] = sum(1 for _ in reader.iter_raw())
    return found


def _child(python: str, script: Path, *arguments: str) -> Run:
    settings = {"OPENBLAS_NUM_THREADS": "1", **os.environ}  # as the command has it
    done = subprocess.run(
        [python, str(script), *arguments], stdout=subprocess.PIPE, text=True, check=True, env=settings
    )
    return json.loads(done.stdout)


def write_case(case: Case, folder: Path) -> Path:
    """The case as a file that names its trace, which is written beside it."""
    trace = folder / "trace.jsonl"
    with trace.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in case["trace"])
    case_file = folder / "case.json"
    case_file.write_text(json.dumps({**case, "trace": None, "trace_path": str(trace)}), encoding="utf-8")
    return case_file


def run_apart(case_file: Path, *, log: bool) -> Run:
    """``run_ours`` in a process of its own."""
    with tempfile.TemporaryDirectory(dir=case_file.parent) as folder:
        return _child(sys.executable, HERE / "against_reference.py", "--run", str(case_file), folder, *["log"] * log)


def _difference(expected: Run, got: Run) -> str | None:
    for name, value in expected["summary"].items():
        have = got["summary"].get(name)
        if not NOT_OURS.fullmatch(name) and not same_value(name, value, have, rounded=False):
            return f"{name}: expected {value!r}, got {have!r}"
    return None


def _routed_difference(python: str, case: Case) -> str | None:
    server = [python, str(TESTS / "differential" / "reference_router_server.py")]
    answer = subprocess.run(server, input=json.dumps(case) + "\n", stdout=subprocess.PIPE, text=True, check=True)
    run_router.POLICIES[run_router.Guided.name] = run_router.Guided
    return run_router.compare(case, json.loads(answer.stdout))[1]


def measure(python: str, case: Case, pairs: int) -> dict[str, Any]:
    """The figures of one workload; ``difference`` is None if all results were equal."""
    routed = case["call"]["router_mode"] == "kv_router"
    difference = _routed_difference(python, case) if routed else None
    with tempfile.TemporaryDirectory() as name:
        case_file = write_case(case, Path(name))
        theirs, ours = [], []
        for _ in range(pairs):
            theirs.append(_child(python, HERE / "reference_run.py", str(case_file)))
            ours.append(run_apart(case_file, log=False))
            if difference is None and not routed:
                difference = _difference(theirs[-1], ours[-1])
        logged = run_apart(case_file, log=True)
    figures: dict[str, Any] = {"workload": case["name"]}
    for clock in ("wall", "cpu"):
        key = f"{clock}_s"
        figures |= {
            f"reference_{key}": statistics.median(run[key] for run in theirs),
            key: statistics.median(run[key] for run in ours),
            f"{clock}_ratio": statistics.median(a[key] / b[key] for a, b in zip(ours, theirs, strict=True)),
        }
    return figures | {
        "reference_peak_mib": max(run["peak_mib"] for run in theirs),
        "peak_mib": max(run["peak_mib"] for run in ours),
        "events": logged["events"],
        "events_per_s": logged["events"] / figures["wall_s"],
        "logged_wall_s": logged["wall_s"],
        "logged_cpu_s": logged["cpu_s"],
        "logged_peak_mib": logged["peak_mib"],
        "log_mib": logged["log_mib"],
        "difference": difference,
    }


def main() -> int:
    if sys.argv[1:2] == ["--run"]:
        case = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
        print(json.dumps(run_ours(case, Path(sys.argv[3]), log="log" in sys.argv[4:])))
        return 0
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--reference", required=True, help="interpreter of the reference's environment")
    options.add_argument("--only", nargs="+", metavar="NUMBER", help="numbers of workloads; all by default")
    options.add_argument("--pairs", type=int, default=3, help="paired runs of each workload")
    options.add_argument("--mooncake", type=Path, help="head of the Mooncake conversation trace, for workload 7")
    options.add_argument("--json", action="store_true")
    chosen = options.parse_args()
    build = "compiled" if is_compiled() else "pure Python"
    rows = []
    for number, case in cases(chosen.mooncake).items():
        if chosen.only is None or number in chosen.only:
            rows.append({"number": number, **measure(chosen.reference, case, chosen.pairs)})
            print(f"workload {number} done", file=sys.stderr)
    if chosen.json:
        figures = {"processors": os.cpu_count(), "pairs": chosen.pairs, "build": build, "workloads": rows}
        print(json.dumps(figures, indent=1))
    else:
        print(f"g2sim is {build}")
        print(tabulate([_line(row) for row in rows], headers="keys", floatfmt=".2f"))
    different = [row for row in rows if row["difference"] is not None]
    for row in different:
        print(f"workload {row['number']} is void: {row['difference']}", file=sys.stderr)
    return int(bool(different))


def _line(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "#": row["number"],
        "workload": row["workload"],
        "wall [s]\nreference": row["reference_wall_s"],
        "\ng2sim": row["wall_s"],
        "\nwith log": row["logged_wall_s"],
        "\nratio": row["wall_ratio"],
        "CPU [s]\nreference": row["reference_cpu_s"],
        "\ng2sim ": row["cpu_s"],
        "\nwith log ": row["logged_cpu_s"],
        "\nratio ": row["cpu_ratio"],
        "peak [MiB]\nreference": round(row["reference_peak_mib"]),
        "\ng2sim  ": round(row["peak_mib"]),
        "\nwith log  ": round(row["logged_peak_mib"]),
        "events": row["events"],
        "events/s": round(row["events_per_s"]),
        "log\n[MiB]": row["log_mib"],
        "results": "equal" if row["difference"] is None else "void",
    }


if __name__ == "__main__":
    sys.exit(main())
