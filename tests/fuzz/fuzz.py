"""Fuzzing of every reader of bytes from outside.

    python tests/fuzz/fuzz.py [--count N] [--first SEED] [--target NAME] [--atheris SECONDS]

For each target N examples are made by damaging valid samples (``mutations``), and read (``targets``). An example must
be taken or refused as bad input, within ``CPU_S`` of processor time and ``MEMORY_BYTES`` of address space. The first
one that is not is shrunk, kept as a file and printed. With --atheris the same examples are chosen by coverage, until
the seconds are over; that needs ``pip install atheris``.
"""

from __future__ import annotations

import argparse
import random
import resource
import secrets
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from hypothesis import HealthCheck, Phase, given, seed, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from mutations import damaged  # noqa: E402
from targets import TARGETS, Target, scratch  # noqa: E402

from g2sim.bus.errors import SimError  # noqa: E402

CPU_S = 20.0
"""Processor time that one example may take [s]; the inputs are of a few kB, and take milliseconds."""
MEMORY_BYTES = 3 * 2**30


class TooMuchWork(BaseException):
    """An example took more than ``CPU_S``; no ``Exception``, so that nobody takes it for bad input."""


def limit() -> None:
    """Bounds this process: memory for good, processor time for each example."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise TooMuchWork(f"more than {CPU_S} s")

    signal.signal(signal.SIGVTALRM, stop)


def attempt(target: Target, data: bytes) -> None:
    """Reads one example; returns if it is taken or refused as it should be."""
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_S)
    try:
        target.read(data)
    except SimError as refused:
        if refused.exit_code != 2 or not str(refused):
            raise
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


_BATCH = 100
"""Examples after which hypothesis begins anew; it remembers all that it has drawn, and memory is bounded."""


def examples(target: Target, count: int, first: int, run: Callable[[bytes], None]) -> None:
    """Calls ``run`` with ``count`` damaged samples; hypothesis shrinks one that raises."""
    samples = target.samples()

    @seed(first)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @given(st.randoms(use_true_random=False), st.integers(0, len(samples) - 1))
    def one(rng: random.Random, idx: int) -> None:
        run(damaged(rng, samples[idx], target.form, samples))

    one()


def fuzz(target: Target, count: int, first: int) -> tuple[int, bytes | None, BaseException | None]:
    """How many examples ran, and the shrunk one that is a fault, with what it raised."""
    ran, last = 0, b""

    def run(data: bytes) -> None:
        nonlocal ran, last
        ran += 1
        try:
            attempt(target, data)
        except BaseException:
            last = data
            raise

    try:
        for done in range(0, count, _BATCH):
            examples(target, min(_BATCH, count - done), first + done, run)
    except KeyboardInterrupt:
        raise
    except BaseException as fault:
        return ran, last, fault
    return ran, None, None


def guided(target: Target, seconds: int) -> None:
    """Runs one target under atheris, which ends the process."""
    import atheris

    samples = target.samples()

    def one(data: bytes) -> None:
        source = atheris.FuzzedDataProvider(data)

        class Choices(random.Random):
            def random(self) -> float:
                return source.ConsumeIntInRange(0, 2**32 - 1) / 2**32

            def getrandbits(self, bits: int) -> int:
                return source.ConsumeIntInRange(0, (1 << bits) - 1)

        rng = Choices()
        attempt(target, damaged(rng, rng.choice(samples), target.form, samples))

    atheris.instrument_all()
    atheris.Setup([sys.argv[0], f"-max_total_time={seconds}", "-rss_limit_mb=0", "-timeout=60"], one)
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300, help="examples of each target")
    parser.add_argument("--first", type=int, default=None, help="seed; a fresh one is drawn and printed")
    parser.add_argument("--target", action="append", help="only these")
    parser.add_argument("--atheris", type=int, metavar="SECONDS", help="choose by coverage, one target")
    options = parser.parse_args()
    chosen = [target for target in TARGETS if options.target is None or target.name in options.target]
    first = secrets.randbelow(2**32) if options.first is None else options.first
    limit()
    if options.atheris is not None:
        guided(chosen[0], options.atheris)
    faults = 0
    for target in chosen:
        started = time.process_time()
        ran, data, fault = fuzz(target, max(1, int(options.count * target.weight)), first)
        print(f"{target.name:28}{ran:8} examples{time.process_time() - started:8.1f} CPU s", flush=True)
        if fault is not None and data is not None:
            faults += 1
            kept = scratch() / f"fault-{target.name}"
            kept.write_bytes(data)
            print(f"  FAULT {type(fault).__name__}: {str(fault)[:1500]}\n  input ({len(data)} bytes): {kept}")
            frame = fault.__traceback__
            while frame is not None and frame.tb_next is not None:
                frame = frame.tb_next
            if frame is not None:
                print(f"  at {frame.tb_frame.f_code.co_filename}:{frame.tb_lineno}")
            print(f"  again: python tests/fuzz/fuzz.py --first {first} --count {options.count} --target {target.name}")
    print(f"seed {first}: {faults} of {len(chosen)} targets have a fault")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
