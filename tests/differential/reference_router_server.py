"""Answers router cases with the reference's results: one JSON case a line on stdin, one JSON answer a line on stdout.

Runs inside an environment of its own that has ``ai-dynamo`` and ``ai-dynamo-runtime`` 1.6.1; imports nothing of g2sim.
The router writes the cost of each choice into the wheel's log, so that log goes to a file and is read after each case.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from pathlib import Path

os.environ["DYN_LOG"] = "info"
CHANNEL = os.fdopen(os.dup(1), "w")
LOG = tempfile.TemporaryFile("w+b")  # noqa: SIM115
os.dup2(LOG.fileno(), 1)
os.dup2(LOG.fileno(), 2)

from dynamo._core import KvRouterConfig  # noqa: E402
from dynamo.replay import run_trace_replay  # noqa: E402

ANSI = re.compile(r"\x1b\[[0-9;]*m")
KEPT = (
    *("session_id", "turn_index", "arrival_time_ms", "first_admit_ms", "terminal_time_ms", "first_token_ms"),
    *("last_token_ms", "input_length", "requested_output_length", "output_length", "reused_input_tokens"),
    *("first_admission_g1_reused_input_tokens", "first_admission_host_reused_input_tokens"),
    *("decode_reused_input_tokens", "prefill_admit_ms", "source_held_ms", "destination_reserved_ms"),
    *("destination_activated_ms", "decode_admit_ms", "source_released_ms", "admission_count", "readmission_count"),
    "terminal_status",
)
ROUTING = (
    *("pool", "logical_worker_id", "dp_rank", "outcome", "queue_entered_at_ms", "released_at_ms", "queue_wait_ms"),
    *("reported_overlap_tokens", "selected_overlap_blocks", "best_available_overlap_blocks", "overlap_regret_blocks"),
)


def answer(case: dict) -> dict:
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl", delete=False) as trace:
        for row in case["trace"]:
            trace.write(json.dumps(row, separators=(",", ":")) + "\n")
    call = dict(case["call"], trace_format=case["trace_format"], capture_per_request=True)
    call["router_config"] = KvRouterConfig(**call.get("router_config", {}))
    LOG.seek(0)
    LOG.truncate()
    try:
        report = run_trace_replay(trace.name, **call)
    except Exception as error:
        return {"error": str(error)}
    finally:
        Path(trace.name).unlink()
    LOG.seek(0)
    costs: dict[str, list] = {}
    for line in ANSI.sub("", LOG.read().decode()).splitlines():
        if "Selected worker" in line:
            told = dict(re.findall(r"(\w+)=(\S+)", line))
            row = [float(told["logit"]), float(told["effective_cached_blocks"]), int(told["host_pinned_blocks"])]
            costs.setdefault(told["request_id"].strip('"'), []).append(row)
    rows = []
    for row in report.per_request or []:
        plain = {key: row[key] for key in KEPT if key in row}
        plain["routing"] = [{key: hop.get(key) for key in ROUTING} for hop in row["routing_history"] or []]
        history = row["admission_history"]
        plain["admissions"] = [[hop["pool"], hop["at_ms"], hop["reused_input_tokens"]] for hop in history]
        rows.append(plain | {"costs": costs.get(row["uuid"], [])})
    return {"per_request": rows}


if __name__ == "__main__":
    for line in sys.stdin:
        CHANNEL.write(json.dumps(answer(json.loads(line))) + "\n")
        CHANNEL.flush()
