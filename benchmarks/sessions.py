"""Wall time and turns per second of the Mooncake session workload: 400 sessions of 4 growing turns over one pool.

python benchmarks/sessions.py [--sessions N] [--log] [--driver trio|inline] [--json]
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

from g2sim.bus.drivers import InlineDriver, TrioDriver
from g2sim.bus.kernel import Kernel
from g2sim.scenarios.run import run_scenario
from g2sim.scenarios.schema import Scenario


def write_trace(path: Path, sessions: int, turns: int = 4, step_tokens: int = 1024, block: int = 512) -> None:
    """Sessions 250 ms apart whose prompts grow by ``step_tokens`` a turn; 256 output tokens each."""
    next_id = 1
    rows = []
    for session in range(sessions):
        ids: list[int] = []
        for turn in range(turns):
            while len(ids) * block < step_tokens * (turn + 1):
                ids.append(next_id)
                next_id += 1
            rows.append(
                {
                    "timestamp": session * 250 + turn * 6000,
                    "input_length": step_tokens * (turn + 1),
                    "output_length": 256,
                    "hash_ids": list(ids),
                }
            )
    rows.sort(key=lambda row: row["timestamp"])
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def scenario(trace: Path, workers: int) -> Scenario:
    """Fixed timing 20 / 8 ms, block 16, 2,000 GPU blocks a worker, 20,000 host blocks, links 32, pool 80 GB/s."""
    worker = {
        "parallelism": {"replicas": workers},
        "scheduler": {"max_batched_tokens": 8192, "max_sequences": 64},
        "kv_cache": {
            "block_size": 16,
            "bytes_per_token": 131072,
            "capacity": {"type": "fixed", "blocks": 2000},
            "host_offload": {"scope": "cluster_shared", "num_host_blocks": 20000},
        },
        "timing": {"type": "fixed", "prefill_ms": 20.0, "decode_ms": 8.0},
    }
    source = {"type": "trace", "format": "mooncake", "paths": [str(trace)], "block_size": 512}
    return Scenario.from_dict(
        {
            "name": "sessions",
            "engine": {"workers": {"aggregated": worker}},
            "traffic": {"source": source, "load": {"type": "trace_timestamps"}},
        }
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--sessions", type=int, default=400)
    options.add_argument("--workers", type=int, default=4)
    options.add_argument("--driver", choices=["trio", "inline"], default="trio")
    options.add_argument("--log", action="store_true", help="write the run folder too")
    options.add_argument("--json", action="store_true")
    chosen = options.parse_args()
    turns = 0
    finish_turn = Kernel.finish_turn

    def counted(kernel: Kernel) -> None:
        nonlocal turns
        turns += 1
        finish_turn(kernel)

    Kernel.finish_turn = counted  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.jsonl"
        write_trace(trace, chosen.sessions)
        driver = TrioDriver if chosen.driver == "trio" else InlineDriver
        started = time.perf_counter()
        result = run_scenario(
            scenario(trace, chosen.workers), Path(folder) / "run" if chosen.log else None, driver=driver
        )
        wall_s = time.perf_counter() - started
        log_bytes = (Path(folder) / "run" / "events.g2log").stat().st_size if chosen.log else 0
    figures = {
        "requests": result.report["summary"]["num_requests"],
        "output_tokens": result.report["summary"]["total_output_tokens"],
        "wall_s": round(wall_s, 3),
        "turns": turns,
        "turns_per_s": round(turns / wall_s),
        "log_mib": round(log_bytes / 2**20, 1),
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }
    print(json.dumps(figures) if chosen.json else "\n".join(f"{name:14} {value}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
