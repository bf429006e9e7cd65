"""What is told about workers that crash, and how they answer."""

from __future__ import annotations

import attrs

from g2sim.actors.kv.events import Tier
from g2sim.actors.router.pool import WorkerState


@attrs.frozen(slots=True)
class Crash:
    """Told to a worker: its process dies. Reply: None."""

    fault: str


@attrs.frozen(slots=True)
class Restart:
    """Told to a worker that has crashed: its new process begins, empty. Reply: None."""

    fault: str


@attrs.frozen(slots=True)
class ClearCaches:
    """Told to a worker: its cached blocks are lost; none that is in use is found again. Reply: None.

    Attributes:
        dp_rank: of this rank only, None for all.
    """

    fault: str
    dp_rank: int | None
    tiers: frozenset[Tier]


@attrs.frozen(slots=True)
class CachesAreCleared:
    """Told to the hand-off coordinator: sources that these workers (by actor) hold are of before a clear. Reply: None.

    ``dp_rank``: on this rank of each only, None for all.
    """

    actors: tuple[str, ...]
    dp_rank: int | None
    tiers: frozenset[Tier]


@attrs.frozen(slots=True)
class TakeLost:
    """Told to a worker that has crashed. Reply: ``tuple[LostRequest, ...]``, told once.

    These are the requests that were on it, and that were sent there since; not hand-offs that wait for a transfer.
    """


@attrs.frozen(slots=True)
class LostRequest:
    """A request and the rank that it was lost on."""

    request: int
    worker: int
    role: str
    dp_rank: int


@attrs.frozen(slots=True)
class WorkersAreDown:
    """Told to the hand-off coordinator: transfers from and to these workers (by actor) have broken off. Reply: None."""

    actors: tuple[str, ...]


@attrs.frozen(slots=True)
class WorkersAreLost:
    """Told to the hand-off coordinator: these workers are known to be gone. Reply: ``tuple[LostRequest, ...]``, the
    requests whose hand-off cannot go on; all else that it held is given back."""

    actors: tuple[str, ...]


@attrs.frozen(slots=True)
class WorkersAreBack:
    """Told to the hand-off coordinator: these workers have restarted. Reply: None."""

    actors: tuple[str, ...]


@attrs.frozen(slots=True)
class WorkerNews:
    """Told to a router: what is known of a worker from here on. Reply: None."""

    worker: int
    state: WorkerState
    fault: str


@attrs.frozen(slots=True)
class SendAgain:
    """Told to traffic: submit a request anew.

    Attributes:
        role: of the pool that it was lost in.
        tokens: tokens that it was given, which become part of its prompt.
        admitted_in: roles of the pools that have admitted it.
    """

    request: int
    role: str
    tokens: int
    admitted_in: frozenset[str]
