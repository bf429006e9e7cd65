"""How ``g2sim sweep`` scales over processes, and what it costs beside running its points one after the other.

Run: ``python benchmarks/sweep_scaling.py [--scenario FILE] [--seeds N] [--jobs N,N...] [--dask HOST:PORT] [--json]``.
A row is a run of the command in a process of its own: points a second of wall time, and CPU seconds of it and all its
children. "directly" runs the same points in a loop of one process, without a sweep. All must give the same figures.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tabulate import tabulate

from g2sim.scenarios.compare import audited_run, seeded
from g2sim.scenarios.schema import load_scenario

ROOT = Path(__file__).parents[1]
SCENARIO = ROOT / "scenarios" / "library" / "agentx-g2-shared.yaml"


def directly(scenario: Path, seeds: int) -> None:
    """Print mean TTFTs of the points, run without a sweep."""
    loaded = load_scenario(scenario)
    print(json.dumps([audited_run(seeded(loaded, shift))[1]["mean_ttft_ms"] for shift in range(seeds)]))


def measured(command: list[str]) -> tuple[dict[str, float], Any]:
    """Wall and CPU seconds of a command, and the JSON that it prints."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
    wall_s, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(done.stderr)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall_s": wall_s, "cpu_s": cpu_s}, json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scenario", type=Path, default=SCENARIO, help="default: agentx-g2-shared of the library")
    parser.add_argument("--seeds", type=int, default=40, help="points (default: 40)")
    cores = os.cpu_count() or 1
    usual = ",".join(str(2**k) for k in range(cores.bit_length()) if 2**k <= cores)
    parser.add_argument("--jobs", default=usual, help="numbers of processes (default: powers of 2 up to the cores)")
    parser.add_argument("--dask", metavar="HOST:PORT", help="also on this cluster; CPU seconds are then the client's")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--directly", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.directly:
        directly(options.scenario, options.seeds)
        return
    told, expected = measured(
        [__file__, "--directly", "--scenario", str(options.scenario.absolute()), "--seeds", str(options.seeds)]
    )
    rows = [{"how": "directly"} | told]
    policy = load_scenario(options.scenario).deployment.router.policy
    sweep = ["-m", "g2sim.scenarios.cli", "sweep", str(options.scenario.absolute()), "--quiet", "--json"]
    sweep += ["--set", f"router.policy={policy}", "--seeds", str(options.seeds)]
    for how in [
        *(f"--jobs {jobs}" for jobs in options.jobs.split(",")),
        *([f"--dask {options.dask}"] * bool(options.dask)),
    ]:
        told, found = measured([*sweep, *how.split()])
        if [row["values"]["mean_ttft_ms"] for row in found["rows"]] != expected:
            sys.exit(f"{how}: the rows are not those of the points run directly")
        rows.append({"how": how} | told)
    for row in rows:
        row["points_per_s"] = options.seeds / row["wall_s"]
        row["cpu_overhead"] = row["cpu_s"] / rows[0]["cpu_s"] - 1
    if options.json:
        print(json.dumps({"points": options.seeds, "cores": cores, "rows": rows}, indent=1, sort_keys=True))
        return
    print(f"{options.seeds} points of {options.scenario.name}, {cores} cores")
    heads = ["", "wall [s]", "CPU [s]", "points/s", "CPU overhead [%]"]
    cells = [[row["how"], row["wall_s"], row["cpu_s"], row["points_per_s"], 100 * row["cpu_overhead"]] for row in rows]
    print(tabulate(cells, heads, floatfmt=("", ".1f", ".1f", ".1f", ".0f")))


if __name__ == "__main__":
    main()
