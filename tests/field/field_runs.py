"""Runs small deployments for field cases, and keeps what they leave behind."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from g2sim.bus.drivers import InlineDriver
from g2sim.bus.events import Record
from g2sim.scenarios.run import run_scenario
from g2sim.scenarios.schema import Scenario
from g2sim.scenarios.state_fold import StateFold

Values = dict[str, Any]

BLOCK = 4
"""Tokens per block. With 250,000 bytes per token a block takes 1 ms at 1 GB/s."""


@attrs.frozen
class Ran:
    """``blocks``: request -> hashes of its whole prompt blocks."""

    report: Values
    rows: list[Values]
    records: list[Record]
    blocks: dict[int, tuple[int, ...]]

    def of(self, *kinds: type[Any]) -> list[Any]:
        return [record.event for record in self.records if isinstance(record.event, kinds)]

    def times_of(self, kind: type[Any]) -> list[float]:
        return [record.time_ms for record in self.records if isinstance(record.event, kind)]

    def column(self, field: str) -> list[Any]:
        return [row[field] for row in self.rows]

    def state(self) -> Values:
        """Residency, pins and queues at the end, from the log alone."""
        fold = StateFold()
        for record in self.records:
            fold.apply(record)
        return fold.snapshot()


def row(at_ms: float, ids: Sequence[int], out: int = 1, *, tokens: int | None = None, **more: Any) -> Values:
    """A prompt with one block for each id; an extra token keeps all of them reusable when it comes back."""
    length = BLOCK * len(ids) if tokens is None else tokens
    return {"timestamp": at_ms, "input_length": length, "output_length": out, "hash_ids": list(ids), **more}


def worker(
    *,
    gpu_blocks: int,
    host: Values | None = None,
    replicas: int = 1,
    prefill_ms: float = 1.0,
    decode_ms: float = 1.0,
    block: int = BLOCK,
    **scheduler: Any,
) -> Values:
    return {
        "parallelism": {"replicas": replicas},
        "scheduler": {"max_batched_tokens": 512, "max_sequences": 16, **scheduler},
        "kv_cache": {
            "block_size": block,
            "bytes_per_token": 1_000_000 // block,
            "capacity": {"type": "fixed", "blocks": gpu_blocks},
            "host_offload": host,
        },
        "timing": {"type": "fixed", "prefill_ms": prefill_ms, "decode_ms": decode_ms},
    }


def host(blocks: int, *, d2h_ms: float = 1.0, h2d_ms: float = 1.0, shared: bool = False, **more: Any) -> Values:
    """A host tier; ``d2h_ms`` and ``h2d_ms``: what one block takes."""
    scope = "cluster_shared" if shared else "dp_rank_local"
    rates = {"d2h_bandwidth_gbps": _rate(d2h_ms), "h2d_bandwidth_gbps": _rate(h2d_ms)}
    return {"scope": scope, "num_host_blocks": blocks, **rates, **more}


def _rate(block_ms: float) -> float:
    return 1.0 / block_ms if block_ms else 0.0


def simulate(
    folder: Path,
    rows: Sequence[Values],
    *,
    load: Values | None = None,
    router: Values | None = None,
    faults: Values | None = None,
    handoff: Values | None = None,
    out: Path | None = None,
    seed: int = 0,
    block: int | None = BLOCK,
    trace_format: str = "mooncake",
    **workers: Values,
) -> Ran:
    """Runs the rows of a trace, live state checked against the log at every pass end. Keywords: role -> its worker."""
    (folder / "trace.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    mode = "disaggregated" if "prefill" in workers else "aggregated"
    values: Values = {
        "name": "field",
        "seed": seed,
        "engine": {"mode": mode, "workers": workers, "model": "m"},
        "router": router or {},
        "traffic": {
            "source": {"type": "trace", "format": trace_format, "paths": ["trace.jsonl"], "block_size": block},
            "load": load or {"type": "trace_timestamps"},
        },
        **({} if faults is None else {"faults": faults}),
    }
    if handoff is not None:
        values["engine"]["kv_transfer"] = handoff
    kept: list[Values] = []
    records: list[Record] = []
    blocks: dict[int, tuple[int, ...]] = {}
    result = run_scenario(
        Scenario.from_dict(values, base_dir=folder),
        out,
        verify=True,
        driver=InlineDriver,
        on_row=kept.append,
        on_record=records.append,
        on_request=lambda one: blocks.__setitem__(one.request, one.chain.sequence_hashes),
    )
    return Ran(result.report, sorted(kept, key=lambda one: one["request"]), records, blocks)
