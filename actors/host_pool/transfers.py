"""Transfers between device and host memory, and how they share bandwidth.

Owns: when a transfer ends. Refuses to know: what is transferred, and who waits for it.

Bytes move at ``gb_per_s * 1e6`` bytes/ms (decimal GB/s); 0 means unlimited. Latency to the first byte is added before a
transfer moves; while it waits it takes no share of any bandwidth.

The order of float operations is part of the contract: the reference subtracts progress at each instant at which it
looks, so ``FairLinks.advance`` must be called at the same instants (see docs/architecture.md).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from typing import Protocol

import attrs

from g2sim.bus.errors import InvariantViolation


class Direction(enum.IntEnum):
    """Which way bytes go. The values order completions of one instant: stores before loads."""

    DEVICE_TO_HOST = 0
    HOST_TO_DEVICE = 1


@attrs.frozen(kw_only=True, slots=True)
class Link:
    """One rank's own connection to a host pool: bytes/ms in each direction, and the latency to the first byte [ms]."""

    d2h_bytes_per_ms: float
    h2d_bytes_per_ms: float
    latency_ms: float

    def rate(self, direction: Direction) -> float:
        return self.d2h_bytes_per_ms if direction is Direction.DEVICE_TO_HOST else self.h2d_bytes_per_ms


def bytes_per_ms(gb_per_s: float) -> float:
    """Rate of a bandwidth in decimal GB/s; 0 is unlimited."""
    return math.inf if gb_per_s == 0.0 else gb_per_s * 1e6


class Transport(Protocol):
    """Moves transfers of one pool."""

    def submit(
        self,
        transfer: int,
        client: int,
        link: Link,
        direction: Direction,
        size_bytes: int,
        now_ms: float,
        from_ms: float,
    ) -> float | None:
        """Start a transfer that may not move before ``from_ms`` + latency. Returns its end if that is certain."""
        ...

    def advance(self, now_ms: float) -> list[tuple[float, int]]:
        """Move everything to ``now_ms``. Returns (end [ms], transfer) of what has ended, in no particular order."""
        ...

    def next_event_ms(self) -> float | None:
        """When something ends or begins to move next, as things stand."""
        ...

    def remove(self, transfer: int) -> None:
        """Forget a transfer that is under way."""
        ...

    def restart(self) -> None:
        """Forget what was moved before; nothing is under way."""
        ...


class FifoLanes:
    """Private scope: one lane per direction, transfers one after the other. Ends are certain from the start."""

    def __init__(self) -> None:
        self._lane_free_ms = {Direction.DEVICE_TO_HOST: 0.0, Direction.HOST_TO_DEVICE: 0.0}
        self._ends_ms: dict[int, float] = {}

    def submit(
        self,
        transfer: int,
        client: int,
        link: Link,
        direction: Direction,
        size_bytes: int,
        now_ms: float,
        from_ms: float,
    ) -> float:
        rate = link.rate(direction)
        start_ms = max(self._lane_free_ms[direction], from_ms + link.latency_ms)
        end_ms = start_ms + (0.0 if rate == math.inf else size_bytes / rate)
        self._lane_free_ms[direction] = end_ms
        self._ends_ms[transfer] = end_ms
        return end_ms

    def advance(self, now_ms: float) -> list[tuple[float, int]]:
        done = [(end_ms, transfer) for transfer, end_ms in self._ends_ms.items() if end_ms <= now_ms]
        for _, transfer in done:
            del self._ends_ms[transfer]
        return done

    def next_event_ms(self) -> float | None:
        return min(self._ends_ms.values(), default=None)

    def remove(self, transfer: int) -> None:
        del self._ends_ms[transfer]

    def restart(self) -> None:
        self._lane_free_ms = dict.fromkeys(Direction, 0.0)


class Job:
    """A transfer on a fair link. ``bytes_left`` is a float: it shrinks by elapsed time times rate."""

    __slots__ = ("bytes_left", "client", "direction", "link_rate", "ready_ms", "transfer")

    def __init__(
        self, transfer: int, client: int, direction: Direction, ready_ms: float, size_bytes: int, link_rate: float
    ) -> None:
        self.transfer = transfer
        self.client = client
        self.direction = direction
        self.ready_ms = ready_ms
        self.bytes_left = float(size_bytes)
        self.link_rate = link_rate


ShareRule = Callable[[Sequence[Job], float], list[float]]


def equal_share(jobs: Sequence[Job], pool_rate: float) -> list[float]:
    """Rates [bytes/ms] of jobs that move in one direction: the smaller of two equal shares, unused parts are lost.

    Source: aisimulate-core 0.13.0 (``g2/no_redistribution`` among the recordings).
    """
    of_client = _count_by_client(jobs)
    pool_share = pool_rate / len(jobs)
    return [min(job.link_rate / of_client[job.client], pool_share) for job in jobs]


def max_min(jobs: Sequence[Job], pool_rate: float) -> list[float]:
    """Max-min fair rates [bytes/ms] of jobs that move in one direction, by progressive filling.

    A client's link is divided equally among its jobs. Clients whose link is the tightest constraint are fixed first,
    what they leave of the pool is divided among the rest, until the pool itself is the tightest.

    Source: Bertsekas and Gallager, Data Networks, section 6.5.2.
    """
    of_client = _count_by_client(jobs)
    open_share = {job.client: job.link_rate / of_client[job.client] for job in jobs}
    share: dict[int, float] = {}
    pool_left = pool_rate
    jobs_left = len(jobs)
    while open_share:
        pool_share = pool_left / jobs_left
        tightest = min(open_share.values())
        if tightest >= pool_share:
            share.update(dict.fromkeys(open_share, pool_share))
            break
        for client in [client for client, own in open_share.items() if own == tightest]:
            share[client] = open_share.pop(client)
            pool_left -= tightest * of_client[client]
            jobs_left -= of_client[client]
    return [share[job.client] for job in jobs]


def _count_by_client(jobs: Sequence[Job]) -> dict[int, int]:
    counts: dict[int, int] = {}
    for job in jobs:
        counts[job.client] = counts.get(job.client, 0) + 1
    return counts


class FairLinks:
    """Shared scope: transfers of all clients move at once and share the pool's bandwidth by a rule.

    Args:
        d2h_bytes_per_ms, h2d_bytes_per_ms: the pool's own bandwidth; the directions do not disturb each other.
        rule: ``max_min`` or ``equal_share``.
    """

    def __init__(self, d2h_bytes_per_ms: float, h2d_bytes_per_ms: float, rule: ShareRule) -> None:
        self._pool_rate = {Direction.DEVICE_TO_HOST: d2h_bytes_per_ms, Direction.HOST_TO_DEVICE: h2d_bytes_per_ms}
        self._rule = rule
        self._clock_ms = 0.0
        self._jobs: list[Job] = []
        self._next_event_ms: float | None = None
        self._rates: list[float | None] = []

    def submit(
        self,
        transfer: int,
        client: int,
        link: Link,
        direction: Direction,
        size_bytes: int,
        now_ms: float,
        from_ms: float,
    ) -> None:
        ready_ms = max(now_ms, from_ms + link.latency_ms)
        self._jobs.append(Job(transfer, client, direction, ready_ms, size_bytes, link.rate(direction)))
        self._look_ahead()

    def advance(self, now_ms: float) -> list[tuple[float, int]]:
        target_ms = max(now_ms, self._clock_ms)
        if not self._jobs:
            self._clock_ms = target_ms
            return []
        if self._flow_on(target_ms):
            return []
        done: list[tuple[float, int]] = []
        while True:
            plan = self._plan()
            event_ms = min((when for _, _, when in plan), default=None)
            next_ms = target_ms if event_ms is None else min(event_ms, target_ms)
            elapsed_ms = next_ms - self._clock_ms
            for job, rate, when in plan:
                if rate is None:
                    continue
                left = 0.0 if when <= next_ms else job.bytes_left - elapsed_ms * rate
                # inf * 0 gives NaN: an unlimited job has nothing left whenever it is looked at.
                job.bytes_left = 0.0 if left != left else max(left, 0.0)
            self._clock_ms = next_ms
            ended = [job for job in self._jobs if job.ready_ms <= next_ms and job.bytes_left == 0.0]
            if ended:
                done.extend((next_ms, job.transfer) for job in ended)
                self._jobs = [job for job in self._jobs if job.ready_ms > next_ms or job.bytes_left != 0.0]
            if event_ms is None or event_ms > target_ms:
                break
            if next_ms == target_ms and not ended and all(when > target_ms for _, _, when in self._plan()):
                break
        self._look_ahead()
        return done

    def _flow_on(self, target_ms: float) -> bool:
        """``advance`` if nothing ends or begins to move until then, so that rates stay as they are. False if not."""
        next_event_ms = self._next_event_ms
        if next_event_ms is None or next_event_ms <= target_ms:
            return False
        elapsed_ms = target_ms - self._clock_ms
        if elapsed_ms == 0.0:
            return True
        jobs = self._jobs
        left_bytes: list[float] = []
        soonest_ms = math.inf
        for job, rate in zip(jobs, self._rates, strict=True):
            left = job.bytes_left
            when = job.ready_ms
            if rate is not None:
                left -= elapsed_ms * rate
                if left <= 0.0:
                    return False
                when = target_ms + left / rate
            left_bytes.append(left)
            if when < soonest_ms:
                soonest_ms = when
        for job, left in zip(jobs, left_bytes, strict=True):
            job.bytes_left = left
        self._clock_ms = target_ms
        self._next_event_ms = soonest_ms
        return True

    def _look_ahead(self) -> None:
        plan = self._plan()
        self._rates = [rate for _, rate, _ in plan]
        self._next_event_ms = min((when for _, _, when in plan), default=None)

    def next_event_ms(self) -> float | None:
        return self._next_event_ms

    def remove(self, transfer: int) -> None:
        self._jobs = [job for job in self._jobs if job.transfer != transfer]
        self._look_ahead()

    def restart(self) -> None:
        """Nothing to forget: a share of bandwidth depends on nothing but the transfers under way."""

    def _plan(self) -> list[tuple[Job, float | None, float]]:
        """Each job with its rate (None while its latency runs) and the time of its next event, as things stand."""
        clock_ms = self._clock_ms
        moving: dict[Direction, list[Job]] = {}
        for job in self._jobs:
            if job.ready_ms <= clock_ms:
                moving.setdefault(job.direction, []).append(job)
        rates: dict[int, float] = {}
        for direction, jobs in moving.items():
            for job, rate in zip(jobs, self._rule(jobs, self._pool_rate[direction]), strict=True):
                if not rate > 0.0:
                    raise InvariantViolation(
                        f"transfer {job.transfer} of client {job.client} moves at {rate!r} bytes/ms"
                    )
                rates[job.transfer] = rate
        out: list[tuple[Job, float | None, float]] = []
        for job in self._jobs:
            own = rates.get(job.transfer)
            out.append((job, own, job.ready_ms if own is None else clock_ms + job.bytes_left / own))
        return out
