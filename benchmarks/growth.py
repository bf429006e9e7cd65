"""How time and memory of a run grow with its requests.

    python benchmarks/growth.py [--requests 10000 100000] [--json]

Sessions of workload 6 (`benchmarks/workloads.py`: 4 growing turns, 8 workers, one shared pool, KV router) begin at a
constant rate, so what is under way at once does not depend on how many there are. Every run is a process of its own and
writes its run folder, log and rows included.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from against_reference import run_apart, write_case
from tabulate import tabulate
from workloads import TURNS, Case, cases, session_rows


def measure(case: Case, requests: int) -> dict[str, Any]:
    """Time and peak memory of one run of the case with so many requests."""
    with tempfile.TemporaryDirectory() as name:
        found = run_apart(write_case({**case, "trace": session_rows(requests // TURNS, 0.25)}, Path(name)), log=True)
    completed = found["summary"]["completed_requests"]
    figures = {key: found[key] for key in ("wall_s", "cpu_s", "peak_mib", "log_mib", "events")}
    return {"requests": completed, **figures, "cpu_ms_per_request": found["cpu_s"] / completed * 1000}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--requests", type=int, nargs="+", default=[10_000, 100_000])
    options.add_argument("--json", action="store_true")
    chosen = options.parse_args()
    case = cases()["6"]
    rows = [measure(case, requests) for requests in chosen.requests]
    print(json.dumps(rows) if chosen.json else tabulate(rows, headers="keys", floatfmt=".2f"))


if __name__ == "__main__":
    main()
