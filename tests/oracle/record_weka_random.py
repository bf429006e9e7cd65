"""Record graph digests of small random Weka corpora with the reference (ai-dynamo-runtime 1.6.1).

Run in an environment that has it: ``python record_weka_random.py SEED... > weka_random.json``. The corpora are
stored with their digests, so tests need neither this script nor the reference. The seeds that are in use were picked so
that each rule of the lowering changes the digest of at least two corpora.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

ENGINE = {
    "backend": "vllm",
    "num_gpu_blocks": 4000,
    "block_size": 4,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 8192,
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
    "kv_cache_bytes_per_token": 1000,
    "timing_model": {"type": "fixed", "prefill_ms": 2.0, "decode_ms": 1.0},
}


def request(rng: random.Random, t: float, seen: list[list[int]]) -> dict[str, Any]:
    """Its hashes go on from an earlier request's, edit them, or are new."""
    earlier = rng.choice(seen) if seen and rng.random() < 0.9 else []
    kept = rng.randrange(len(earlier) + 1) if rng.random() < 0.5 else len(earlier)
    hashes = earlier[:kept] + [rng.randrange(9) for _ in range(rng.randrange(4))]
    seen.append(hashes)
    made = {
        "t": t,
        "type": "n",
        "model": rng.choice("mmmmz"),
        "in": max(1, 4 * len(hashes) + rng.choice([0, 0, -1, 5])),
    }
    made |= {"out": rng.choice([1, 1, 64, 65]), "hash_ids": hashes}
    if rng.random() < 0.8:
        made["api_time"] = rng.randrange(20) / 4
    return made


def play(rng: random.Random, name: str) -> dict[str, Any]:
    span = rng.choice([12, 40, 40, 40000])
    starts = sorted(rng.randrange(span) / 4 for _ in range(rng.randrange(2, 9)))
    if rng.random() < 0.1:
        rng.shuffle(starts)
    seen: list[list[int]] = []
    entries: list[dict[str, Any]] = []
    for t in starts:
        entries.append(request(rng, t, seen))
        if rng.random() < 0.25:
            known = list(seen) if rng.random() < 0.3 else []
            inner = [request(rng, rng.randrange(30) / 4, known) for _ in range(rng.randrange(1, 5))]
            marker = {"t": t + rng.randrange(4) / 4, "type": "subagent", "agent_id": "a", "subagent_type": "E"}
            marker |= {"status": rng.choice(["completed", "completed", "async_launched"]), "requests": inner}
            if rng.random() < 0.4:
                marker["duration_ms"] = rng.randrange(6000)
            entries.append(marker)
    return {"id": name, "block_size": 4, "hash_id_scope": "local", "requests": entries}


def corpus(seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [play(rng, f"p{k}") for k in range(rng.choice([1, 1, 2]))]


def text_of(plays: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in plays)


def main() -> None:
    from dynamo.replay import run_trace_replay  # type: ignore[import-not-found]

    cases = []
    for seed in map(int, sys.argv[1:]):
        plays = corpus(seed)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.jsonl"
            path.write_text(text_of(plays), encoding="utf-8")
            try:
                report = run_trace_replay(
                    str(path), extra_engine_args={"engine": ENGINE}, trace_format="weka", execution_model="t",
                    weka_nested_timestamp_basis="relative", agentic_lanes=1,
                )  # fmt: skip
            except Exception as error:
                print(f"seed {seed}: {error}", file=sys.stderr)
                continue
        graph = report.summary["agentic_graph"]
        cases.append({"seed": seed, "graph_digest": graph["graph_digest"], "source": graph["source"], "plays": plays})
    json.dump(cases, sys.stdout, separators=(",", ":"))
    print()


if __name__ == "__main__":
    main()
