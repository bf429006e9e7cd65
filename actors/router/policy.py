"""Placement policies that look at nothing: rotation and chance."""

from __future__ import annotations

from collections.abc import Callable
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
    """Strict rotation over workers, blind to everything; each worker rotates over its own ranks."""

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


class FlatRoundRobin:
    """Strict rotation over (worker, rank) pairs, the ranks of worker 0 first."""

    def __init__(self, workers: int, dp_size: int) -> None:
        self._dp_size = dp_size
        self._places = workers * dp_size
        self._next = 0

    def place(self) -> Placement:
        placement = Placement(*divmod(self._next, self._dp_size))
        self._next = (self._next + 1) % self._places
        return placement


class UniformRandom:
    """Every (worker, rank) with equal chance, from a named stream."""

    def __init__(self, workers: int, dp_size: int, stream: RandomStream) -> None:
        self._workers = workers
        self._dp_size = dp_size
        self._stream = stream

    def place(self) -> Placement:
        return Placement(*divmod(self._stream.below(self._workers * self._dp_size), self._dp_size))


def make_policy(
    name: str, workers: int, dp_size: int, stream: Callable[[], RandomStream], *, flat: bool
) -> PlacementPolicy:
    """A policy by name; ``POLICIES`` lists the names.

    Args:
        stream: gives the stream for random choices.
        flat: rotate over all ranks of the pool instead of over workers (prefill and decode pools).
    """
    if name == "random":
        return UniformRandom(workers, dp_size, stream())
    return FlatRoundRobin(workers, dp_size) if flat else RoundRobin(workers, dp_size)


POLICIES = ("round_robin", "random")
