"""Answers cases with the reference's results: one JSON case a line on stdin, one JSON answer a line on stdout.

Runs inside an environment of its own that has ``ai-dynamo`` and ``ai-dynamo-runtime`` 1.6.1; imports nothing of g2sim.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ["RUST_LOG"] = "off"
os.environ["DYN_LOG"] = "off"

from dynamo.replay import run_trace_replay


def answer(case: dict) -> dict:
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl", delete=False) as trace:
        for row in case["trace"]:
            trace.write(json.dumps(row, separators=(",", ":")) + "\n")
    call = dict(case["call"], trace_format=case["trace_format"])
    try:
        # Capture orders requests by random ids, which moves the last bit of means: take the summary from a run without.
        plain = run_trace_replay(trace.name, **call)
        captured = run_trace_replay(trace.name, **call, capture_per_request=True)
    except Exception as error:
        return {"error": str(error)}
    finally:
        Path(trace.name).unlink()
    rows = [plain_row(row) for row in captured.per_request or []]
    return {"summary": plain.summary, "per_request": rows}


def plain_row(row: dict) -> dict:
    """A row without random ids, in the form of the ``sched`` recordings."""
    out = {key: value for key, value in row.items() if key in KEPT}
    out["route"] = [[r["pool"], r["logical_worker_id"], r["dp_rank"]] for r in row["routing_history"]]
    out["admissions"] = [
        {key: value for key, value in entry.items() if key in ADMISSION} for entry in row["admission_history"]
    ]
    return out


KEPT = {
    "session_id", "turn_index", "arrival_time_ms", "first_admit_ms", "terminal_time_ms", "first_token_ms",
    "last_token_ms", "ttft_ms", "ttst_ms", "e2e_latency_ms", "itl_ms", "input_length", "requested_output_length",
    "output_length", "reused_input_tokens", "first_admission_g1_reused_input_tokens",
    "first_admission_host_reused_input_tokens", "decode_reused_input_tokens", "prefill_worker_idx",
    "decode_worker_idx", "prefill_admit_ms", "source_held_ms", "destination_reserved_ms", "destination_activated_ms",
    "decode_admit_ms", "source_released_ms", "admission_count", "readmission_count", "terminal_status",
}  # fmt: skip
ADMISSION = {
    "pool", "at_ms", "reused_input_tokens", "g1_reused_input_tokens", "host_reused_input_tokens", "is_readmission",
}  # fmt: skip


def main() -> None:
    # The wheel may write to stdout; keep the channel to ourselves.
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        channel.write(json.dumps(answer(json.loads(line))) + "\n")
        channel.flush()


if __name__ == "__main__":
    main()
