"""How time and memory of a run grow with its requests.

    python benchmarks/growth.py [--requests 10000 100000] [--json]

Sessions of workload 6 (`benchmarks/workloads.py`: 4 growing turns, 8 workers, one shared pool, KV router) begin at a
constant rate, so what is under way at once does not depend on how many there are. Every run is a process of its own and
writes its run folder, log and rows included.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from against_reference import run_ours
from tabulate import tabulate
from workloads import TURNS, cases, session_rows


def measure(requests: int, folder: Path) -> dict[str, Any]:
    """Time and peak memory of one run, in this process."""
    trace = folder / "trace.jsonl"
    with trace.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in session_rows(requests // TURNS, 0.25))
    found = run_ours({**cases()["6"], "trace_path": str(trace)}, folder, log=True)
    return {"requests": found["summary"]["completed_requests"]} | {
        key: found[key] for key in ("wall_s", "cpu_s", "peak_mib", "log_mib", "events")
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--requests", type=int, nargs="+", default=[10_000, 100_000])
    options.add_argument("--json", action="store_true")
    options.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.in_process:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measure(chosen.requests[0], Path(folder))))
        return
    rows = []
    for requests in chosen.requests:
        child = [sys.executable, __file__, "--in-process", "--requests", str(requests)]
        row = json.loads(subprocess.run(child, stdout=subprocess.PIPE, check=True, text=True).stdout)
        rows.append(row | {"cpu_ms_per_request": row["cpu_s"] / row["requests"] * 1000})
    print(json.dumps(rows) if chosen.json else tabulate(rows, headers="keys", floatfmt=".2f"))


if __name__ == "__main__":
    main()
