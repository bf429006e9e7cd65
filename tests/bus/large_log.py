"""A large log, cut and flipped in drawn places: never a wrong record, never a lost one, and the place is told.

    python tests/bus/large_log.py [--megabytes 100] [--places 50] [--seed 1]

Frames are found without the code under test. A cut log must give the records that are whole before the cut, and then
name the record and byte where it ends; a flipped one those before the frame with the flipped byte, and that frame.
"""

from __future__ import annotations

import argparse
import bisect
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from g2sim.actors.kv.events import BlocksStored
from g2sim.bus.errors import LogDamaged
from g2sim.bus.events import Record
from g2sim.bus.log import MAGIC, LogReader, LogWriter


def records(rng: random.Random) -> Iterator[Record]:
    """Records of many sizes, without end."""
    number = 0
    while True:
        hashes = tuple(rng.getrandbits(64) for _ in range(rng.choice((1, 1, 2, 8, 64))))
        event = BlocksStored(
            worker=number % 7,
            role="aggregated",
            dp_rank=0,
            event_id=number,
            tier="device",
            parent_hash=None,
            start_position=0,
            block_hashes=hashes,
            token_hashes=hashes,
        )
        yield Record(float(number), f"aggregated-{number % 7}", number, event)
        number += 1


def write(path: Path, size_bytes: int, rng: random.Random) -> None:
    """A whole log of about so many bytes."""
    with path.open("wb") as file:
        writer = LogWriter(file, version="1", seed=1, scenario={})
        for record in records(rng):
            writer.append(record)
            if record.cause % 1000 == 0 and file.tell() >= size_bytes:
                break
        writer.finish("finished")


def frame_starts(data: bytes) -> list[int]:
    """Offset of each frame: the header's, one for each record, and the end's."""
    starts, at = [], len(MAGIC)
    while at < len(data):
        starts.append(at)
        at += 8 + int.from_bytes(data[at : at + 4], "little")
    return starts


def read(path: Path) -> tuple[int, int]:
    """Records read before the damage, and the byte that is named; each record is checked against its number."""
    count = 0
    try:
        with LogReader(path) as reader:
            for _, time_ms, _, cause, values in reader.iter_raw():
                if (time_ms, cause, values[3]) != (count, count, count):
                    raise AssertionError(f"record {count} is another one")
                count += 1
    except LogDamaged as damage:
        return count, damage.byte_offset
    raise AssertionError("the damage went unnoticed")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--places", type=int, default=50, help="of each kind")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    started = time.process_time()
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.g2log"
        write(path, options.megabytes * 1_000_000, rng)
        data = path.read_bytes()
        starts = frame_starts(data)
        total = len(starts) - 2
        for kind in ("cut", "flip"):
            for _ in range(options.places):
                place, mask = rng.randrange(starts[1], len(data)), 1 << rng.randrange(8)
                frame = bisect.bisect_right(starts, place) - 1
                if kind == "cut":
                    path.write_bytes(data[:place])
                else:
                    path.write_bytes(data[:place] + bytes([data[place] ^ mask]) + data[place + 1 :])
                found = read(path)
                if found != (frame - 1, starts[frame]):
                    wrong += 1
                    told = f"{found[0]} records, damage at byte {found[1]}"
                    print(f"{kind} at byte {place}, in the frame of record {frame - 1} at {starts[frame]}: {told}")
    spent_s = time.process_time() - started
    print(f"{len(data) / 1e6:.0f} MB, {total} records, {options.places} cuts, {options.places} flips: {wrong} wrong")
    print(f"{spent_s:.0f} CPU s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
