"""The lifecycle of agentic traffic: what happened to which request of which play, as one digest.

Owns: the events, their canonical lines and the digest over them. Refuses to know: where events come from, and their
order, which is the caller's business.
"""

from __future__ import annotations

import enum

from blake3 import blake3

from g2sim.actors.traffic.canonical_json import canonical_json
from g2sim.actors.traffic.request import RequestStatus
from g2sim.bus.errors import InvariantViolation

SCHEMA = "aisimulate.agentic.lifecycle.v1"


class LifecycleEvent(enum.StrEnum):
    """``causal_terminal`` is the end that the client sees, ``quiescent`` the release of everything on the servers."""

    DISPATCH = "dispatch"
    CAUSAL_TERMINAL = "causal_terminal"
    QUIESCENT = "quiescent"
    SKIPPED = "skipped"
    PLAY_QUIESCENT = "play_quiescent"


class LifecycleDigest:
    """Takes events in order, keeps their number and a running BLAKE3."""

    def __init__(self) -> None:
        self._hasher = blake3(b"aisimulate-agentic-lifecycle-v1\0")
        self._count = 0

    @property
    def count(self) -> int:
        """Number of events so far."""
        return self._count

    def hexdigest(self) -> str:
        """BLAKE3 over the events so far, in hex. More events may follow."""
        return self._hasher.hexdigest()

    def copy(self) -> LifecycleDigest:
        """An independent digest that has taken the same events."""
        twin = LifecycleDigest()
        twin._hasher = self._hasher.copy()
        twin._count = self._count
        return twin

    def feed(
        self,
        at_ms: float,
        play_id: str,
        request_id: str | None,
        event: LifecycleEvent,
        status: RequestStatus | None = None,
    ) -> None:
        """Append one event.

        Args:
            at_ms: when it happened, on the absolute clock [ms].
            play_id: the play.
            request_id: id of the request in its source, None for events of a play.
            event: what happened.
            status: of a causal terminal, else None.
        Raises: InvariantViolation if the event does not fit with the presence of request and status.
        """
        if (request_id is None) != (event is LifecycleEvent.PLAY_QUIESCENT):
            raise InvariantViolation(f"lifecycle event {event} of play {play_id!r} with request {request_id!r}")
        if (status is None) == (event is LifecycleEvent.CAUSAL_TERMINAL):
            raise InvariantViolation(f"lifecycle event {event} of request {request_id!r} with status {status!r}")
        record: dict[str, object] = {"schema": SCHEMA, "ordinal": self._count, "at_ms": at_ms, "play_id": play_id}
        if request_id is not None:
            record["request_id"] = request_id
        record["event"] = event
        if status is not None:
            record["status"] = status
        self._hasher.update(f"{canonical_json(record)}\n".encode())
        self._count += 1
