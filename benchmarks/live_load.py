"""A publisher and a listener under load on loopback: is every event received, or missed and said to be missed?

    python benchmarks/live_load.py [--for SECONDS] [--rate BATCHES_PER_S] [--variant NAME ...] [--json FILE] [RUN]

``g2sim publish`` sends the streams of a run (one is made unless RUN names its folder) over and over, and ``g2sim
validate`` listens, each in a process of its own. Without ``--rate`` the rate is ``SHARE`` of what the listener manages
in a trial without pauses. At a quarter of the time the variants do what their names say: ``slow-consumer`` stops the
listener for a while (with a queue of ``SHORT_QUEUE``), ``consumer-restart`` ends it and starts another,
``publisher-restart`` ends the publisher and starts another on the same ports, which does not wait for its listener.
``flood`` has no pauses at all.

Sent is what the publishers say. Received (of which "healed" by a replay), lost, unknown (before a late start) and
restart (behind the last id heard of a publisher that began anew) are what the listener says, and must add up to it;
the rest is "unnoticed". RSS [MiB] is the median of a tenth of the time: after a tenth, after the disturbance, and at
the end. It is flat if it grows by at most ``FLAT`` between the last two. Exit code 1 if anything is unnoticed, a tail
is not confirmed, or memory is not flat.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tabulate import tabulate

from g2sim.scenarios.publish_streams import ranks_of

HERE = Path(__file__).resolve().parent
SCENARIO = HERE.parent / "scenarios" / "library" / "agentx-g2-shared.yaml"
VARIANTS = ("steady", "slow-consumer", "consumer-restart", "publisher-restart", "flood")
SHARE = 0.5
FLAT = (0.05, 8.0)
"""Part and MiB that memory may grow by."""
SHORT_QUEUE = 1000
"""Messages that may wait for the slow consumer: vLLM's 100,000 would hold all that comes while it is stopped."""
TRIAL_S = 5.0
_PERIOD_S = 0.25
_REST_S = 1.5
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / 2**20

Row = dict[str, Any]


class Child:
    """A ``g2sim`` process, its memory over time, and what it says."""

    def __init__(self, folder: Path, command: str, *arguments: object) -> None:
        self._said = folder / f"{command}-{time.monotonic_ns()}"
        line = [sys.executable, "-m", "g2sim.scenarios.cli", command, *map(str, arguments)]
        with self._said.open("wb") as err:
            self.process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=err, text=True)
        self.rss_mib: list[tuple[float, float]] = []
        self.cpu_s = 0.0

    def said(self) -> str:
        """What came on its error stream so far."""
        return self._said.read_text(encoding="utf-8")

    def sample(self) -> None:
        """Note its memory and CPU time, as long as it lives."""
        proc = Path("/proc", str(self.process.pid))
        with contextlib.suppress(OSError, IndexError):
            pages = int((proc / "statm").read_text(encoding="ascii").split()[1])
            fields = (proc / "stat").read_text(encoding="ascii").rpartition(")")[2].split()
            if pages:
                self.cpu_s = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
                self.rss_mib.append((time.monotonic(), pages * _PAGE_MIB))

    def rss_between(self, start_s: float, stop_s: float) -> float | None:
        inside = [mib for at, mib in self.rss_mib if start_s <= at <= stop_s]
        return round(statistics.median(inside), 1) if inside else None

    def interrupt(self) -> str:
        """Ctrl-C; returns what it printed, once it has ended."""
        self.process.send_signal(signal.SIGINT)
        return self.process.communicate(timeout=120)[0]

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


class Load:
    """A publisher, a listener, and those that came before them."""

    def __init__(self, folder: Path, run: Path, rate: float | None, for_s: float) -> None:
        self.folder, self.run, self.for_s = folder, run, for_s
        names = [f"{worker}-r{rank}" for worker, rank in ranks_of(run)]
        live, replay = free_ports(len(names)), free_ports(len(names))
        self._streams = [f"{name}=tcp://127.0.0.1:{live + idx}" for idx, name in enumerate(names)]
        for idx in range(len(names)):
            self._streams += ["--replay", f"tcp://127.0.0.1:{replay + idx}"]
        self._options = ["--port", live, "--replay-port", replay, "--linger", 3600]
        self._options += [] if rate is None else ["--rate", rate]
        self.publishers: list[Child] = []
        self.listeners: list[Child] = []
        self.told: list[Row] = []
        self.start_s = self.stop_s = self.drained_s = 0.0

    def publish(self, for_s: float, wait_s: float, *more: object) -> None:
        options = ["--for", for_s, "--wait", wait_s, *self._options, *more]
        self.publishers.append(Child(self.folder, "publish", self.run, *options))

    def listen(self) -> None:
        self.listeners.append(Child(self.folder, "validate", *self._streams, "--json"))

    def end_listener(self) -> None:
        self.told.append(json.loads(self.listeners[-1].interrupt()))

    def watch(self, until: Callable[[], bool], at_most_s: float) -> None:
        """Take samples until a condition holds."""
        deadline = time.monotonic() + at_most_s
        while not until() and time.monotonic() < deadline:
            for child in (self.publishers[-1], self.listeners[-1]):
                child.sample()
            time.sleep(_PERIOD_S)

    def drained(self) -> bool:
        """Whether the publisher has sent all and the listener has come to rest."""
        if "batches sent" not in self.publishers[-1].said():
            return False
        before_s = self.listeners[-1].cpu_s
        time.sleep(_REST_S)  # its CPU time is what tells
        self.listeners[-1].sample()
        return self.listeners[-1].cpu_s - before_s < 0.2 * _REST_S

    def play(self, variant: str) -> Row:
        """From the start of both to the end of both."""
        self.publish(self.for_s, 60, *(("--queue", SHORT_QUEUE) if variant == "slow-consumer" else ()))
        self.listen()
        self.watch(lambda: bool(self.listeners[0].rss_mib) and "listening" in self.listeners[0].said(), 60)
        self.start_s = time.monotonic()
        self.watch(lambda: False, self.for_s / 4)
        if variant == "slow-consumer":
            self.listeners[0].process.send_signal(signal.SIGSTOP)
            self.watch(lambda: False, min(self.for_s / 6, 20.0))
            self.listeners[0].process.send_signal(signal.SIGCONT)
        elif variant == "consumer-restart":
            self.end_listener()
            self.listen()
        elif variant == "publisher-restart":
            self.publishers[0].interrupt()
            self.publish(max(1.0, self.start_s + self.for_s - time.monotonic()), 0)
        self.watch(lambda: "batches sent" in self.publishers[-1].said(), self.for_s + 60)
        self.stop_s = time.monotonic()
        self.watch(self.drained, 300)
        self.drained_s = time.monotonic() - _REST_S
        self.end_listener()
        self.publishers[-1].interrupt()
        return self.row(variant)

    def row(self, variant: str) -> Row:
        sent = [int(child.said().split(" batches sent")[0].split()[-1]) for child in self.publishers]
        sending_s, taking_s = self.stop_s - self.start_s, self.drained_s - self.start_s
        row = {"variant": variant, "seconds": round(sending_s, 1), "sent": sum(sent)} | account(sent, self.told)
        row["sent/s"] = round(row["sent"] / sending_s)
        row["received/s"] = round(row["received"] / taking_s)
        row["events/s"] = round(row["events"] / taking_s)
        row["flat"] = True
        for name, children in (("publisher", self.publishers), ("listener", self.listeners)):
            tenths_s = [self.start_s + sending_s * idx / 10 for idx in range(11)]
            start, middle, end = (
                child.rss_between(*tenths_s[idx : idx + 2])
                for child, idx in ((children[0], 1), (children[-1], 6), (children[-1], 9))
            )
            row[f"{name} MiB"] = [start, middle, end]
            row["flat"] &= middle is not None and end is not None and is_flat(middle, end)
            row[f"{name} CPU s"] = round(sum(child.cpu_s for child in children), 1)
        row["good"] = row["flat"] and row["unnoticed"] == 0 and row["confirmed"]
        return row

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *_: object) -> None:
        for child in (*self.publishers, *self.listeners):
            child.kill()


def account(sent: list[int], told: list[Row]) -> Row:
    """What the listeners say of what the publishers sent, in batches.

    Args:
        sent: of each publisher, one after the other.
        told: the result of each listener; all but the last say what they know of the time until they ended.
    """
    row: Row = {"unnoticed": 0}
    for value in told:
        ranks, streams = value["verdicts"], value["streams"]
        replayed, copies = (sum(stream[key] for stream in streams) for key in ("replayed", "copies"))
        row["received"] = sum(stream["live"] for stream in streams) + replayed - copies
        row["healed"] = replayed - copies
        for key in ("lost", "unknown"):
            row[key] = sum(rank[f"{key}_ids"] for rank in ranks)
        lives = [[*rank["restarts"], rank["last_event_id"]] for rank in ranks]
        ids = [sum(last + 1 for last in of_life if last is not None) for of_life in zip_longest(*lives)]
        row["restart"] = 0
        row["unnoticed"] += abs(sum(ids) - row["received"] - row["lost"] - row["unknown"])
        row["confirmed"] = all(rank["tail_confirmed"] for rank in ranks)
        row["exact"] = f"{sum(rank['exact'] for rank in ranks)} of {len(ranks)}"
        row["events"] = sum(rank["events"] for rank in ranks)
        row["findings"] = ", ".join(f"{number} {code}" for code, number in value["counts"].items())
    if any(len(life) != len(sent) for life in lives):
        return row | {"unnoticed": max(1, abs(sum(sent) - row["received"]))}  # a restart, or that there was none
    *before, last = zip(sent, ids, strict=True)
    row["restart"] = sum(sent - known for sent, known in before)
    row["unnoticed"] += abs(last[0] - last[1]) + sum(max(0, known - sent) for sent, known in before)
    return row


def is_flat(middle_mib: float, end_mib: float) -> bool:
    part, mib = FLAT
    return end_mib - middle_mib <= max(part * middle_mib, mib)


def free_ports(count: int) -> int:
    """First of so many free ports in a row."""
    while True:
        first = random.randrange(20_000, 60_000)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


def table(rows: Iterable[Row]) -> str:
    def text(value: Any) -> Any:
        return " / ".join(map(str, value)) if isinstance(value, list) else value

    columns = [[key, *(text(row[key]) for row in rows)] for key in next(iter(rows), {})]
    return tabulate(columns, headers="firstrow", tablefmt="github", disable_numparse=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, nargs="?", metavar="RUN", help="run folder or log to publish")
    parser.add_argument("--for", type=float, default=30.0, dest="for_s", help="seconds of each variant (default: 30)")
    parser.add_argument("--rate", type=float, help="batches a second (default: a part of what the listener manages)")
    parser.add_argument("--variant", choices=VARIANTS, action="append", help="only this one")
    parser.add_argument("--json", type=Path, help="file to write the figures to, with all samples of memory")
    options = parser.parse_args()
    rows, samples = [], []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        run = options.run or folder / "run"
        if options.run is None:
            command = [sys.executable, "-m", "g2sim.scenarios.cli", "run", str(SCENARIO), "--out", str(run)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        rate = options.rate
        if rate is None:
            with Load(folder, run, None, TRIAL_S) as load:
                trial = load.play("flood")
            rate = round(SHARE * trial["received/s"])
        for variant in options.variant or VARIANTS:
            with Load(folder, run, None if variant == "flood" else rate, options.for_s) as load:
                rows.append({"rate": "-" if variant == "flood" else rate, **load.play(variant)})
                samples.append({"publisher": load.publishers[-1].rss_mib, "listener": load.listeners[-1].rss_mib})
            print(table([rows[-1]]), flush=True)
    print()
    print(table(rows))
    if options.json is not None:
        values = [row | {"rss_mib": sample} for row, sample in zip(rows, samples, strict=True)]
        options.json.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    return 0 if all(row["good"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
