"""Which records of a log somebody wants to see.

Owns: the filters of ``g2sim events`` and their words. Refuses to know: files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import attrs

from g2sim.actors.worker.events import PassEnded
from g2sim.bus.errors import ConfigError, close_to
from g2sim.bus.events import BY_CLASS, Record
from g2sim.scenarios.records import event_tags
from g2sim.scenarios.request_rows import POOL_OF_ROLE
from g2sim.scenarios.schema import Scenario

_ROLE_OF_POOL = {pool: role for role, pool in POOL_OF_ROLE.items()}


@attrs.frozen(kw_only=True)
class EventFilter:
    """What is wanted; an empty set or None wants everything.

    Attributes:
        tags: wire tags.
        ranks: (role, worker, dp_rank), dp_rank None for each of the worker.
        requests: numbers.
        since_ms, until_ms: first and last time [ms].
    """

    tags: frozenset[str]
    ranks: frozenset[tuple[str, int, int | None]]
    requests: frozenset[int]
    since_ms: float | None
    until_ms: float | None

    @classmethod
    def of(
        cls,
        scenario: Callable[[], Scenario],
        topics: tuple[str, ...],
        workers: tuple[str, ...],
        requests: Sequence[int],
        since_ms: float | None,
        until_ms: float | None,
    ) -> Self:
        """A filter from words; ``scenario`` gives the run's.

        Raises: ConfigError for a type or a worker that does not exist, and for an end before the beginning.
        """
        if since_ms is not None and until_ms is not None and until_ms < since_ms:
            raise ConfigError("--until", got=until_ms, allowed=f"a time from --since {since_ms!r} on")
        tags: set[str] = set()
        for word in topics:
            try:
                tags.update(event_tags(word))
            except ConfigError as error:
                raise ConfigError(
                    "--topic", problem=error.problem, got=word, allowed=error.allowed, hint=error.hint
                ) from None
        known = _rank_names(scenario()) if workers else {}
        for name in workers:
            if name not in known:
                raise ConfigError("--worker", got=name, allowed=", ".join(known), hint=close_to(name, known))
        return cls(
            tags=frozenset(tags),
            ranks=frozenset(known[name] for name in workers),
            requests=frozenset(requests),
            since_ms=since_ms,
            until_ms=until_ms,
        )

    def takes(self, record: Record) -> bool:
        event = record.event
        return (
            (not self.tags or BY_CLASS[type(event)].tag in self.tags)
            and (self.since_ms is None or record.time_ms >= self.since_ms)
            and not self.is_past(record)
            and (not self.requests or self._about_request(event))
            and (not self.ranks or self._about_rank(event))
        )

    def is_past(self, record: Record) -> bool:
        """Whether this record and all that follow it are too late."""
        return self.until_ms is not None and record.time_ms > self.until_ms

    def _about_request(self, event: Any) -> bool:
        if isinstance(event, PassEnded):
            return not self.requests.isdisjoint(event.emitted)
        return getattr(event, "request", None) in self.requests

    def _about_rank(self, event: Any) -> bool:
        role = getattr(event, "role", None) or _ROLE_OF_POOL.get(getattr(event, "pool", ""))
        worker, dp_rank = getattr(event, "worker", None), getattr(event, "dp_rank", None)
        return (role, worker, dp_rank) in self.ranks or (role, worker, None) in self.ranks


def _rank_names(scenario: Scenario) -> dict[str, tuple[str, int, int | None]]:
    """Names of workers and ranks, by role (``aggregated-0``) and by the short names of reports (``agg-0/0``)."""
    names: dict[str, tuple[str, int, int | None]] = {}
    for pool in scenario.deployment.pools:
        role = pool.role.value
        for worker in range(pool.workers):
            for word in (role, POOL_OF_ROLE[role]):
                names[f"{word}-{worker}"] = (role, worker, None)
                for dp_rank in range(pool.dp_size):
                    names[f"{word}-{worker}/{dp_rank}"] = (role, worker, dp_rank)
    return names
