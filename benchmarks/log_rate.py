"""Rates of writing and reading event logs: records/s and MB/s, for small and for larger records.

Run: ``python benchmarks/log_rate.py [--records N] [--rounds N]``. The best round counts. Building the events that are
written is not timed; building those that are read is, in the "read" column.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

from g2sim.actors.kv.events import BlocksStored
from g2sim.actors.worker.events import RequestQueued
from g2sim.bus.events import Record
from g2sim.bus.log import LogReader, LogWriter


def queued(idx: int) -> RequestQueued:
    return RequestQueued(worker=idx % 8, role="decode", dp_rank=0, request=idx)


def stored(idx: int, block_count: int, rng: random.Random) -> BlocksStored:
    return BlocksStored(
        worker=idx % 8,
        role="decode",
        dp_rank=0,
        event_id=idx,
        tier="device",
        parent_hash=rng.getrandbits(64),
        start_position=idx % 1000,
        block_hashes=tuple(rng.getrandbits(64) for _ in range(block_count)),
        token_hashes=tuple(rng.getrandbits(64) for _ in range(block_count)),
    )


def write(path: Path, records: list[Record]) -> None:
    with path.open("wb") as file:
        writer = LogWriter(file, version="0", seed=1, scenario={})
        for record in records:
            writer.append(record)
        writer.finish("finished")


def read_raw(path: Path) -> None:
    with LogReader(path) as reader:
        deque(reader.iter_raw(), maxlen=0)


def read(path: Path) -> None:
    with LogReader(path) as reader:
        deque(reader, maxlen=0)


def best_s(rounds: int, job: Callable[[], None]) -> float:
    """Shortest wall time of a job [s]."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        job()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=200_000, help="number of small records (default: 200000)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each measurement (default: 3)")
    options = parser.parse_args()
    rng = random.Random("log_rate")
    shapes: list[tuple[str, int, Callable[[int], object]]] = [
        ("wk.sub", options.records, queued),
        ("kv.sto, 8 blocks", options.records // 4, lambda idx: stored(idx, 8, rng)),
        ("kv.sto, 128 blocks", options.records // 40, lambda idx: stored(idx, 128, rng)),
    ]
    print(f"{'event':20}{'B/record':>10}{'':>4}{'write':>20}{'read raw':>20}{'read':>20}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rate.g2log")
        for name, count, make in shapes:
            records = [Record(idx * 0.37, f"decode-{idx % 8}", idx, make(idx)) for idx in range(count)]
            times_s = [
                best_s(options.rounds, partial(write, path, records)),
                best_s(options.rounds, partial(read_raw, path)),
                best_s(options.rounds, partial(read, path)),
            ]
            size_mb = path.stat().st_size / 1e6
            rates = "".join(f"{f'{count / s / 1e3:.0f} k/s {size_mb / s:.0f} MB/s':>20}" for s in times_s)
            print(f"{name:20}{size_mb * 1e6 / count:10.0f}{'':4}{rates}")


if __name__ == "__main__":
    main()
