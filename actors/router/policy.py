"""Placement policies that look at nothing: rotation and chance."""

from __future__ import annotations

from typing import Protocol

import attrs

from g2sim.bus.streams import RandomStream


@attrs.frozen(slots=True)
class Placement:
    """A rank of a worker; both count from 0."""

    worker: int
    dp_rank: int


class PlacementPolicy(Protocol):
    """Chooses where the next request goes."""

    def place(self) -> Placement: ...


class RoundRobin:
    """Strict rotation, blind to everything.

    Workers rotate, and each worker rotates over its own ranks.
    """

    def __init__(self, workers: int, dp_size: int) -> None:
        self._workers = workers
        self._dp_size = dp_size
        self._next_worker = 0
        self._next_rank = [0] * workers

    def place(self) -> Placement:
        worker = self._next_worker
        self._next_worker = (worker + 1) % self._workers
        dp_rank = self._next_rank[worker]
        self._next_rank[worker] = (dp_rank + 1) % self._dp_size
        return Placement(worker, dp_rank)


class UniformRandom:
    """Every (worker, rank) with equal chance, from a named stream."""

    def __init__(self, workers: int, dp_size: int, stream: RandomStream) -> None:
        self._workers = workers
        self._dp_size = dp_size
        self._stream = stream

    def place(self) -> Placement:
        return Placement(*divmod(self._stream.below(self._workers * self._dp_size), self._dp_size))


def make_policy(name: str, workers: int, dp_size: int, stream: RandomStream) -> PlacementPolicy:
    """A policy by name; ``POLICIES`` lists the names. ``stream`` serves its random choices."""
    if name == "random":
        return UniformRandom(workers, dp_size, stream)
    return RoundRobin(workers, dp_size)


POLICIES = ("round_robin", "random")
