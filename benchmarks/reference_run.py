"""Times one workload on the reference: a case file in, one JSON object out. Imports nothing of g2sim.

Runs inside an environment of its own that has ``ai-dynamo`` and ``ai-dynamo-runtime`` 1.6.1.
"""

from __future__ import annotations

import json
import os
import sys
import time

os.environ["RUST_LOG"] = "off"
os.environ["DYN_LOG"] = "off"

from dynamo.replay import run_trace_replay


def main() -> None:
    # The wheel may write to stdout; keep the channel to ourselves.
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with open(sys.argv[1], encoding="utf-8") as file:
        case = json.load(file)
    started, cpu_s = time.perf_counter(), time.process_time()
    report = run_trace_replay(case["trace_path"], trace_format=case["trace_format"], **case["call"])
    wall_s = time.perf_counter() - started
    # A child's maxrss counts from before exec, with its parent's pages; this counts from exec.
    with open("/proc/self/status", encoding="ascii") as status:
        peak_kib = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    found = {"wall_s": wall_s, "cpu_s": time.process_time() - cpu_s, "peak_mib": peak_kib / 1024}
    json.dump(found | {"summary": report.summary}, channel)


if __name__ == "__main__":
    main()
