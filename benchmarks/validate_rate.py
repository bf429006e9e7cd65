"""Rate and memory of ``g2sim validate``: one million events in each form, against the budget of 15 s.

Run: ``python benchmarks/validate_rate.py [--events N] [--form FORM]``. Each form runs in a process of its own; "live
blocks" is how many blocks are resident at once, whatever the length of the stream.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from g2sim.actors.kv.blocks import sequence_hash
from g2sim.actors.kv.events import BlocksRemoved, BlocksStored
from g2sim.actors.kv.wire_vllm import Batch, Message, decode_batch, encode_batch, message_frames
from g2sim.bus.events import Record
from g2sim.bus.log import LogWriter
from g2sim.scenarios.capture import CaptureWriter, StreamOpened
from g2sim.scenarios.publish_streams import standin_tokens
from g2sim.scenarios.stream_sources import check_files
from g2sim.scenarios.validate import Validator

FORMS = ("neutral", "log", "capture")
WORKERS = 8
BLOCKS = 4


def events(count: int, live_runs: int = 2000) -> Iterator[BlocksStored | BlocksRemoved]:
    """Stores of runs of ``BLOCKS`` blocks in chains of four, each removed once ``live_runs`` younger ones are there."""
    number = [0] * WORKERS
    held: list[deque[tuple[int, ...]]] = [deque() for _ in range(WORKERS)]
    tails: list[tuple[int | None, int]] = [(None, 0)] * WORKERS
    token = 0
    for idx in range(count):
        worker = idx % WORKERS
        who = {"worker": worker, "role": "aggregated", "dp_rank": 0, "event_id": number[worker]}
        number[worker] += 1
        if len(held[worker]) > live_runs:
            gone = held[worker].popleft()
            yield BlocksRemoved(tier="device", block_hashes=gone, **who)  # type: ignore[arg-type]
            continue
        parent, position = tails[worker]
        tokens_hashes = tuple(range(token + 1, token + 1 + BLOCKS))
        token += BLOCKS
        hashes, above = [], parent
        for own in tokens_hashes:
            above = sequence_hash(above, own)
            hashes.append(above)
        yield BlocksStored(
            tier="device",
            parent_hash=parent,
            start_position=position,
            block_hashes=tuple(hashes),
            token_hashes=tokens_hashes,
            **who,  # type: ignore[arg-type]
        )
        held[worker].append(tuple(hashes))
        tails[worker] = (above, position + BLOCKS) if position < 3 * BLOCKS else (None, 0)


def write(path: Path, form: str, count: int) -> None:
    if form == "neutral":
        with path.open("w") as file:
            for event in events(count):
                line = {"worker_id": f"w{event.worker}", "dp_rank": 0, "event_id": event.event_id, "ts_ms": 0}
                line |= {"tier": "Device", "block_hashes": list(event.block_hashes)}
                if isinstance(event, BlocksStored):
                    line |= {"kind": "Stored", "parent_hash": event.parent_hash}
                    line |= {"start_position": event.start_position}
                else:
                    line["kind"] = "Removed"
                file.write(json.dumps(line) + "\n")
        return
    if form == "log":
        with path.open("wb") as out:
            writer = LogWriter(out, version="0", seed=1, scenario={})
            for idx, event in enumerate(events(count)):
                writer.append(Record(idx * 0.01, f"aggregated-{event.worker}", idx, event))
            writer.finish("finished")
        return
    with CaptureWriter(path, version="0") as capture:
        for worker in range(WORKERS):
            capture.opened(
                StreamOpened(stream=f"w{worker}", endpoint="tcp://127.0.0.1:1", replay_endpoint=None, dp_rank=0)
            )
        for idx, event in enumerate(events(count)):
            stored = isinstance(event, BlocksStored)
            fields = {"type": "BlockStored" if stored else "BlockRemoved", "block_hashes": event.block_hashes}
            fields["medium"] = "GPU"
            if isinstance(event, BlocksStored):
                fields |= {"parent_block_hash": event.parent_hash, "block_size": 16, "lora_id": None}
                fields["token_ids"] = [token for own in event.token_hashes for token in standin_tokens(own, 16)]
            from msgpack import packb

            batch = decode_batch(packb([idx * 1e-5, [fields], 0]))
            payload = encode_batch(Batch(ts_s=batch.ts_s, events=batch.events, dp_rank=0))
            message = Message(topic=b"", sequence=event.event_id, payload=payload)
            capture.message(idx * 0.01, f"w{event.worker}", message_frames(message), replayed=False)


def check(path: Path) -> None:
    """In a process of its own, so that its memory is its own."""
    validator = Validator()
    start, start_cpu = time.perf_counter(), time.process_time()
    check_files([path], validator)
    verdicts = validator.finish()
    spent_s, cpu_s = time.perf_counter() - start, time.process_time() - start_cpu
    blocks = sum(sum(verdict.blocks.values()) for verdict in verdicts)
    exact = sum(verdict.reason is None for verdict in verdicts)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    found = sum(validator.findings.counts.values())
    count = sum(verdict.events for verdict in verdicts)
    print(f"{count} events, {spent_s:.1f} s (CPU {cpu_s:.1f} s), {count / spent_s / 1e3:.0f} k events/s, ", end="")
    print(f"peak {peak_mb:.0f} MB, {blocks} live blocks, {exact} of {len(verdicts)} exact, {found} findings")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=1_000_000, help="events in each form (default: 1000000)")
    parser.add_argument("--form", choices=FORMS, action="append", help="only this form")
    parser.add_argument("--check", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.check is not None:
        check(options.check)
        return
    with tempfile.TemporaryDirectory() as folder:
        for form in options.form or FORMS:
            path = Path(folder, form)
            write(path, form, options.events)
            print(f"{form:10}{path.stat().st_size / 1e6:8.0f} MB  ", end="", flush=True)
            subprocess.run([sys.executable, __file__, "--check", str(path)], check=True)
            path.unlink()


if __name__ == "__main__":
    main()
