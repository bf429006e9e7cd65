"""Session workloads: conversations whose turns follow one another, in an open or a closed loop.

Owns: when a turn is ready, given how the turn before it ended, and what it sends where prompts accumulate.
Refuses to know: where sessions come from.

Source: workload driver of aisimulate-core 0.13.0; recordings in tests/oracle/sched and tests/oracle/workload.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Protocol

import attrs
import numpy as np

from g2sim.actors.kv.prompt import ArrayPrompt, Prompt, TokenArray, token_array
from g2sim.actors.traffic.chacha import ChaCha12
from g2sim.actors.traffic.request import Release, RequestSpec, RequestStatus


@attrs.frozen(kw_only=True, slots=True)
class Turn:
    """One request of a session.

    Attributes:
        prompt: its whole prompt, or only what it adds where prompts accumulate.
        output_tokens: tokens to generate.
        delay_ms: the wait after the end of the turn before (0 for the first).
        uuid: see ``RequestSpec``.
        output_ids: the tokens it generates, if the trace says which.
    """

    prompt: Prompt
    output_tokens: int
    delay_ms: float = 0.0
    uuid: int | None = None
    output_ids: tuple[int, ...] | None = None


@attrs.frozen(kw_only=True, slots=True)
class Session:
    """Turns of one conversation; ``first_arrival_ms`` is its first turn's arrival, None if it has none."""

    session_id: str
    first_arrival_ms: float | None
    turns: tuple[Turn, ...]


class Sessions(Protocol):
    """Sessions in file order, each of one turn or more. A session may be made anew whenever it is asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Session: ...

    def __iter__(self) -> Iterator[Session]: ...


OUTPUT_PLAN_SEED = 0xD37A0A7E5EED
"""Seed of the stream that all generated tokens of a trace are taken from, as in the reference."""

AnswerTokens = Callable[[int, int], int]
"""(prompt tokens, tokens asked for) -> tokens that a completed request has generated."""


class Accumulation:
    """What the turns of some sessions send and generate. Turns of one session follow one another.

    Tokens that are not authored come from one random stream, session by session and turn by turn, so that they do not
    depend on the order in which turns run.

    Args:
        sessions: in file order.
        answer_tokens: how many tokens a turn generates if it completes.
    """

    def __init__(self, sessions: Sessions, answer_tokens: AnswerTokens) -> None:
        self._answer_tokens = answer_tokens
        self._plan = ChaCha12(OUTPUT_PLAN_SEED)
        planned = (sum(map(_planned_tokens, session.turns)) for session in sessions)
        self._plan_at = array("Q", accumulate(planned, initial=0))  # of each session's current turn
        self._said: dict[int, TokenArray] = {}

    def prompt(self, session_idx: int, turn: Turn) -> ArrayPrompt:
        """The prompt of a session's next turn."""
        new = turn.prompt
        ids = new.tokens(0, new.length)
        if (said := self._said.get(session_idx)) is not None:
            ids = np.concatenate((said, ids))
        self._said[session_idx] = ids
        return ArrayPrompt(ids)

    def output_ids(self, session_idx: int, turn: Turn) -> TokenArray:
        """The tokens that a session's current turn generates if it is not cut short: uint32[output_tokens]."""
        if (authored := token_array(turn.output_ids)) is not None:
            return authored
        return self._plan.words(self._plan_at[session_idx], turn.output_tokens)

    def ended(self, session_idx: int, turn: Turn, *, completed: bool, goes_on: bool) -> None:
        """A session's turn is over. What it generated belongs to what was said, if it completed and a turn follows."""
        said = self._said[session_idx]
        if not goes_on:
            del self._said[session_idx]
        elif completed:
            count = self._answer_tokens(len(said), turn.output_tokens)
            answer = self.output_ids(session_idx, turn)
            self._said[session_idx] = np.concatenate((said, answer[:count]))
        self._plan_at[session_idx] += _planned_tokens(turn)


def _planned_tokens(turn: Turn) -> int:
    """Draws that a turn takes from the stream of generated tokens."""
    return turn.output_tokens if turn.output_ids is None else 0


def prompt_lengths(sessions: Iterable[Session], answer_tokens: AnswerTokens | None) -> Iterator[int]:
    """Tokens of every prompt, session by session, if no request is cut short.

    Args:
        answer_tokens: as ``SessionDriver`` takes ``accumulating``; 0 for a request that is rejected.
    """
    for session in sessions:
        said = 0
        for turn in session.turns:
            tokens = said + turn.prompt.length
            yield tokens
            if answer_tokens is not None:
                said = tokens + answer_tokens(tokens, turn.output_tokens)


class SessionDriver:
    """Releases the turns of sessions.

    Open loop: a session's first turn is ready at its arrival (the earliest one is 0), divided by ``speedup``; a later
    turn is ready when the turn before it has ended and its delay, divided by ``speedup``, has passed.
    Closed loop (``concurrency`` seats): arrivals and speed-up do not count. A session holds a seat from its first turn
    to the end of its last, pauses included; each freed seat starts the next session at that instant.

    Of a session that is not under way only its arrival is kept here, in numbers: memory does not grow with its turns.

    Args:
        sessions: in file order, which breaks ties.
        speedup: divides arrivals and delays, > 0; ignored in a closed loop.
        concurrency: seats of a closed loop, >= 1; None is an open loop.
        named: whether to report session ids and turns; None = in a closed loop, or if a session has several turns.
        accumulating: how many tokens a completed request has generated, where each prompt holds the turns before it
            (``Accumulation``); None where every prompt is whole.
    """

    def __init__(
        self,
        sessions: Sessions,
        *,
        speedup: float = 1.0,
        concurrency: int | None = None,
        named: bool | None = None,
        accumulating: AnswerTokens | None = None,
    ) -> None:
        self._sessions = sessions
        self._speedup = speedup
        self._concurrency = concurrency
        self._total_requests = 0
        arrivals_ms = array("d")
        for session in sessions:
            self._total_requests += len(session.turns)
            arrivals_ms.append(session.first_arrival_ms or 0.0)
        several_turns = self._total_requests > len(sessions)
        self._named = concurrency is not None or several_turns if named is None else named
        self._ready: list[tuple[float, int, int]] = []
        self._under_way: dict[int, Session] = {}
        self._begun = 0
        self._seats_taken = 0
        self._turns_of_key: dict[int, tuple[int, int]] = {}
        self._next_key = 0
        self._said = None if accumulating is None else Accumulation(sessions, accumulating)
        if concurrency is None:
            first_ms = min(arrivals_ms, default=0.0)
            self._first_ready_ms = array("d", [(arrival_ms - first_ms) / speedup for arrival_ms in arrivals_ms])
            self._in_order = np.argsort(self._first_ready_ms, kind="stable").astype(np.uint32)
            self._await_next_session()
        else:
            self._fill_seats(0.0)

    @property
    def total_requests(self) -> int | None:
        return self._total_requests

    def next_ready_ms(self) -> float | None:
        return self._ready[0][0] if self._ready else None

    def release(self, now_ms: float) -> list[Release]:
        out = []
        while self._ready and self._ready[0][0] <= now_ms:
            ready_ms, session_idx, turn_idx = heapq.heappop(self._ready)
            key = self._next_key
            self._next_key += 1
            self._turns_of_key[key] = (session_idx, turn_idx)
            if turn_idx == 0:
                self._under_way[session_idx] = self._sessions[session_idx]
                if self._concurrency is None:
                    self._await_next_session()
            session = self._under_way[session_idx]
            turn = session.turns[turn_idx]
            said = self._said
            spec = RequestSpec(
                name=None,
                session_id=session.session_id if self._named else None,
                turn_index=turn_idx if self._named else None,
                prompt=turn.prompt if said is None else said.prompt(session_idx, turn),
                output_tokens=turn.output_tokens,
                uuid=turn.uuid,
                output_ids=token_array(turn.output_ids) if said is None else said.output_ids(session_idx, turn),
            )
            out.append(Release(key, ready_ms if self._concurrency is None else now_ms, spec))
        return out

    def ended(self, ends: Sequence[tuple[int, RequestStatus]], now_ms: float) -> Sequence[object]:
        for key, status in ends:
            session_idx, turn_idx = self._turns_of_key.pop(key)
            turns = self._under_way[session_idx].turns
            goes_on = status in (RequestStatus.COMPLETED, RequestStatus.REJECTED) and turn_idx + 1 < len(turns)
            if self._said is not None:
                completed = status is RequestStatus.COMPLETED
                self._said.ended(session_idx, turns[turn_idx], completed=completed, goes_on=goes_on)
            if goes_on:
                delay_ms = turns[turn_idx + 1].delay_ms
                if self._concurrency is None:
                    delay_ms /= self._speedup
                heapq.heappush(self._ready, (now_ms + delay_ms, session_idx, turn_idx + 1))
                continue
            del self._under_way[session_idx]
            if self._concurrency is not None:
                self._seats_taken -= 1
                self._fill_seats(now_ms)
        return ()

    def waiting(self) -> Sequence[str]:
        return ()

    def _await_next_session(self) -> None:
        """Schedule the first turn of the earliest session that was not scheduled yet: one is enough to know of."""
        if self._begun < len(self._sessions):
            session_idx = int(self._in_order[self._begun])
            heapq.heappush(self._ready, (self._first_ready_ms[session_idx], session_idx, 0))
            self._begun += 1

    def _fill_seats(self, now_ms: float) -> None:
        while self._seats_taken < (self._concurrency or 0) and self._begun < len(self._sessions):
            heapq.heappush(self._ready, (now_ms, self._begun, 0))
            self._begun += 1
            self._seats_taken += 1
