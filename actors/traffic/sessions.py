"""Session workloads: conversations whose turns follow one another, in an open or a closed loop.

Owns: when a turn is ready, given how the turn before it ended. Refuses to know: where sessions come from.

Source: workload driver of aisimulate-core 0.13.0; recordings in tests/oracle/sched and tests/oracle/workload.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import attrs

from g2sim.actors.kv.prompt import Prompt
from g2sim.actors.traffic.request import Release, RequestSpec, RequestStatus


@attrs.frozen(kw_only=True, slots=True)
class Turn:
    """One request of a session; ``delay_ms`` is the wait after the end of the turn before (0 for the first)."""

    prompt: Prompt
    output_tokens: int
    delay_ms: float = 0.0
    uuid: int | None = None


@attrs.frozen(kw_only=True, slots=True)
class Session:
    """Turns of one conversation; ``first_arrival_ms`` is its first turn's arrival, None if it has none."""

    session_id: str
    first_arrival_ms: float | None
    turns: tuple[Turn, ...]


class SessionDriver:
    """Releases the turns of sessions.

    Open loop: a session's first turn is ready at its arrival (the earliest one is 0), divided by ``speedup``; a later
    turn is ready when the turn before it has ended and its delay, divided by ``speedup``, has passed.
    Closed loop (``concurrency`` seats): arrivals and speed-up do not count. A session holds a seat from its first turn
    to the end of its last, pauses included; each freed seat starts the next session at that instant.

    Args:
        sessions: in file order, which breaks ties.
        speedup: divides arrivals and delays, > 0; ignored in a closed loop.
        concurrency: seats of a closed loop, >= 1; None is an open loop.
        named: report session ids and turns even if every session has one turn.
    """

    def __init__(
        self,
        sessions: Sequence[Session],
        *,
        speedup: float = 1.0,
        concurrency: int | None = None,
        named: bool = False,
    ) -> None:
        self._sessions = tuple(sessions)
        self._speedup = speedup
        self._concurrency = concurrency
        self._named = named or concurrency is not None or any(len(session.turns) > 1 for session in self._sessions)
        self._ready: list[tuple[float, int, int]] = []
        self._next_session = 0
        self._seats_taken = 0
        self._turns_of_key: dict[int, tuple[int, int]] = {}
        self._next_key = 0
        if concurrency is None:
            arrivals_ms = [session.first_arrival_ms or 0.0 for session in self._sessions]
            first_ms = min(arrivals_ms, default=0.0)
            self._ready = [((arrival - first_ms) / speedup, idx, 0) for idx, arrival in enumerate(arrivals_ms)]
            heapq.heapify(self._ready)
        else:
            self._fill_seats(0.0)

    @property
    def total_requests(self) -> int | None:
        return sum(len(session.turns) for session in self._sessions)

    def next_ready_ms(self) -> float | None:
        return self._ready[0][0] if self._ready else None

    def release(self, now_ms: float) -> list[Release]:
        out = []
        while self._ready and self._ready[0][0] <= now_ms:
            ready_ms, session_idx, turn_idx = heapq.heappop(self._ready)
            key = self._next_key
            self._next_key += 1
            self._turns_of_key[key] = (session_idx, turn_idx)
            session = self._sessions[session_idx]
            turn = session.turns[turn_idx]
            spec = RequestSpec(
                name=None,
                session_id=session.session_id if self._named else None,
                turn_index=turn_idx if self._named else None,
                prompt=turn.prompt,
                output_tokens=turn.output_tokens,
                uuid=turn.uuid,
            )
            out.append(Release(key, ready_ms if self._concurrency is None else now_ms, spec))
        return out

    def ended(self, ends: Sequence[tuple[int, RequestStatus]], now_ms: float) -> Sequence[object]:
        for key, status in ends:
            session_idx, turn_idx = self._turns_of_key.pop(key)
            turns = self._sessions[session_idx].turns
            goes_on = status in (RequestStatus.COMPLETED, RequestStatus.REJECTED) and turn_idx + 1 < len(turns)
            if goes_on:
                delay_ms = turns[turn_idx + 1].delay_ms
                if self._concurrency is None:
                    delay_ms /= self._speedup
                heapq.heappush(self._ready, (now_ms + delay_ms, session_idx, turn_idx + 1))
            elif self._concurrency is not None:
                self._seats_taken -= 1
                self._fill_seats(now_ms)
        return ()

    def waiting(self) -> Sequence[str]:
        return ()

    def _fill_seats(self, now_ms: float) -> None:
        while self._seats_taken < (self._concurrency or 0) and self._next_session < len(self._sessions):
            heapq.heappush(self._ready, (now_ms, self._next_session, 0))
            self._next_session += 1
            self._seats_taken += 1
