"""Rate and memory of ``g2sim validate``: one million events in each form, against the budget of 15 s.

Run: ``python benchmarks/validate_rate.py [--events N] [--form FORM]... [--json]``. Each form is checked in a process of
its own, three times with ``--repeat 3``, of which the quickest counts. "live" is how many blocks are resident at the
end, whatever the length of the stream.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from array import array
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
from tabulate import tabulate

from g2sim.actors.kv.blocks import sequence_hash, tokens_hash
from g2sim.actors.kv.events import BlocksRemoved, BlocksStored
from g2sim.actors.kv.wire_vllm import Message, message_frames
from g2sim.bus.events import Record
from g2sim.bus.log import LogWriter
from g2sim.scenarios.capture import CaptureWriter, StreamOpened
from g2sim.scenarios.stream_sources import check_files
from g2sim.scenarios.validate import Mode, Options, Validator

FORMS = ("vllm-tokens", "vllm", "dynamo", "neutral", "log")
WORKERS = 8
BLOCKS = 4
BLOCK_TOKENS = 16
VOCABULARY = 128_000

Told = tuple[BlocksStored | BlocksRemoved, "array[int]"]
"""An event and its tokens."""


def events(count: int, live_runs: int) -> Iterator[Told]:
    """Stores of runs of ``BLOCKS`` blocks in chains of four, each removed once ``live_runs`` younger ones are there.

    With each its token ids, drawn from a vocabulary as large as a model's.
    """
    draw = random.Random("validate_rate")
    number = [0] * WORKERS
    held: list[deque[tuple[int, ...]]] = [deque() for _ in range(WORKERS)]
    tails: list[tuple[int | None, int]] = [(None, 0)] * WORKERS
    none = array("I")
    for idx in range(count):
        worker = idx % WORKERS
        who = {"worker": worker, "role": "aggregated", "dp_rank": 0, "event_id": number[worker]}
        number[worker] += 1
        if len(held[worker]) > live_runs:
            gone = held[worker].popleft()
            yield BlocksRemoved(tier="device", block_hashes=gone, **who), none  # type: ignore[arg-type]
            continue
        parent, position = tails[worker]
        tokens = array("I", draw.choices(range(VOCABULARY), k=BLOCKS * BLOCK_TOKENS))
        data, step = tokens.tobytes(), 4 * BLOCK_TOKENS
        own_hashes = tuple([tokens_hash(data[at : at + step]) for at in range(0, len(data), step)])
        hashes, above = [], parent
        for own in own_hashes:
            above = sequence_hash(above, own)
            hashes.append(above)
        stored = BlocksStored(
            tier="device",
            parent_hash=parent,
            start_position=position,
            block_hashes=tuple(hashes),
            token_hashes=own_hashes,
            **who,  # type: ignore[arg-type]
        )
        yield stored, tokens
        held[worker].append(tuple(hashes))
        tails[worker] = (above, position + BLOCKS) if position < 3 * BLOCKS else (None, 0)


def write(path: Path, form: str, count: int, live_runs: int = 2000) -> None:
    """A stream of ``count`` events; ``live_runs`` as in ``events``."""
    made = events(count, live_runs)
    if form == "log":
        with path.open("wb") as out:
            writer = LogWriter(out, version="0", seed=1, scenario={})
            for idx, (event, _) in enumerate(made):
                writer.append(Record(idx * 0.01, f"aggregated-{event.worker}", idx, event))
            writer.finish("finished")
    elif form in ("neutral", "dynamo"):
        line_of = _neutral if form == "neutral" else _dynamo
        with path.open("w") as file:
            for event, _ in made:
                file.write(json.dumps(line_of(event)) + "\n")
    else:
        _write_capture(path, made, with_tokens=form == "vllm-tokens")


def _neutral(event: BlocksStored | BlocksRemoved) -> dict[str, Any]:
    line = {"worker_id": f"w{event.worker}", "dp_rank": 0, "event_id": event.event_id, "ts_ms": 0, "tier": "Device"}
    if isinstance(event, BlocksRemoved):
        return line | {"kind": "Removed", "block_hashes": event.block_hashes}
    place = {"parent_hash": event.parent_hash, "start_position": event.start_position}
    return line | {"kind": "Stored", "block_hashes": event.block_hashes, **place}


def _dynamo(event: BlocksStored | BlocksRemoved) -> dict[str, Any]:
    if isinstance(event, BlocksRemoved):
        data: dict[str, Any] = {"removed": {"block_hashes": event.block_hashes}}
    else:
        pairs = zip(event.block_hashes, event.token_hashes, strict=True)
        blocks = [{"block_hash": block, "tokens_hash": own, "mm_extra_info": None} for block, own in pairs]
        data = {"stored": {"parent_hash": event.parent_hash, "start_position": None, "blocks": blocks}}
    inner = {"event_id": event.event_id, "dp_rank": 0, "data": data}
    return {"worker_id": event.worker, "storage_tier": "device", "residency_domain": "worker", "event": inner}


def _write_capture(path: Path, made: Iterator[Told], *, with_tokens: bool) -> None:
    """One event a batch, which is the most work for an event. Without token ids a first run has no known place."""
    with CaptureWriter(path, version="0") as capture:
        for worker in range(WORKERS):
            capture.opened(
                StreamOpened(stream=f"w{worker}", endpoint="tcp://127.0.0.1:1", replay_endpoint=None, dp_rank=0)
            )
        for idx, (event, tokens) in enumerate(made):
            if isinstance(event, BlocksRemoved):
                fields: dict[str, Any] = {"type": "BlockRemoved", "block_hashes": event.block_hashes, "medium": "GPU"}
            else:
                fields = {"type": "BlockStored", "block_hashes": event.block_hashes}
                fields["parent_block_hash"] = event.parent_hash
                fields["token_ids"] = list(tokens) if with_tokens else []
                fields |= {"block_size": BLOCK_TOKENS, "lora_id": None, "medium": "GPU", "lora_name": None}
            payload = msgpack.packb([idx * 1e-5, [fields], 0])
            message = Message(topic=b"", sequence=event.event_id, payload=payload)
            capture.message(idx * 0.01, f"w{event.worker}", message_frames(message), replayed=False)


def check(path: Path, mode: str) -> None:
    """In a process of its own, so that its memory is its own; prints one JSON object."""
    validator = Validator(Options(mode=Mode(mode)))
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    check_files([path], validator)
    verdicts = validator.finish()
    cpu_s, wall_s = time.process_time() - start_cpu_s, time.perf_counter() - start_s
    count = sum(verdict.events for verdict in verdicts)
    row = {
        "events": count,
        "file_mb": round(path.stat().st_size / 1e6, 1),
        "wall_s": round(wall_s, 2),
        "cpu_s": round(cpu_s, 2),
        "events_per_s": round(count / wall_s),
        "cpu_s_per_million": round(cpu_s / count * 1e6, 2),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6, 1),
        "live_blocks": sum(sum(verdict.blocks.values()) for verdict in verdicts),
        "exact_ranks": sum(verdict.reason is None for verdict in verdicts),
        "findings": sum(validator.findings.counts.values()),
    }
    print(json.dumps(row))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=1_000_000, help="events in each form (default: 1000000)")
    parser.add_argument("--form", choices=FORMS, action="append", help="only this form")
    parser.add_argument("--mode", choices=[mode.value for mode in Mode], default="true", help="as of g2sim validate")
    parser.add_argument("--repeat", type=int, default=1, help="checks of each form; the quickest counts (default: 1)")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    parser.add_argument("--check", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.check is not None:
        check(options.check, options.mode)
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for form in options.form or FORMS:
            path = Path(folder, form)
            write(path, form, options.events)
            command = [sys.executable, __file__, "--check", str(path), "--mode", options.mode]
            runs = [
                json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
                for _ in range(options.repeat)
            ]
            rows.append({"form": form} | min(runs, key=lambda row: row["cpu_s"]))
            path.unlink()
    print(json.dumps(rows, indent=1) if options.json else tabulate(rows, headers="keys", tablefmt="plain"))


if __name__ == "__main__":
    main()
