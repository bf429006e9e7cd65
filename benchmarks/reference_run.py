"""Times one workload on the reference: a case file in, one JSON object out. Imports nothing of g2sim.

Runs inside an environment of its own that has ``ai-dynamo`` and ``ai-dynamo-runtime`` 1.6.1.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

os.environ["RUST_LOG"] = "off"
os.environ["DYN_LOG"] = "off"

from dynamo.replay import run_trace_replay


def main() -> None:
    # The wheel may write to stdout; keep the channel to ourselves.
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    case = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    started, cpu_s = time.perf_counter(), time.process_time()
    report = run_trace_replay(case["trace_path"], trace_format=case["trace_format"], **case["call"])
    wall_s = time.perf_counter() - started
    # A child's maxrss counts from before exec, with its parent's pages; this counts from exec.
    status = Path("/proc/self/status").read_text(encoding="ascii")
    peak_kib = int(status.partition("VmHWM:")[2].split()[0])
    found = {"wall_s": wall_s, "cpu_s": time.process_time() - cpu_s, "peak_mib": peak_kib / 1024}
    json.dump(found | {"summary": report.summary}, channel)


if __name__ == "__main__":
    main()
