"""Sessions that are made when they are asked for, so that what a run has not come to, or has left, takes little memory.

Owns: how the turns of a trace are kept. Refuses to know: trace formats, and when turns are ready.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence

import attrs

from g2sim.actors.kv.prompt import RunPrompt
from g2sim.actors.traffic.sessions import Session, Turn

_NO_ARRIVAL = float("nan")
_NO_TURN = -1


@attrs.frozen(slots=True)
class MadeSessions:
    """``number`` sessions, each made anew whenever it is asked for; ``make`` takes its place in file order."""

    number: int
    make: Callable[[int], Session]

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int, /) -> Session:
        return self.make(index)

    def __iter__(self) -> Iterator[Session]:
        return map(self.make, range(self.number))


class SessionTable:
    """Sessions and their turns as columns of numbers: some 50 B a session, 40 B a turn and 4 B an id.

    Sessions are numbered as they begin. Their turns may come in any order between those of other sessions.

    Args:
        run_tokens: tokens that one id of a prompt stands for, >= 1.
    """

    def __init__(self, run_tokens: int) -> None:
        self._run_tokens = run_tokens
        # One entry a session: its name is what lies between the end of the name before it and its own.
        self._names = bytearray()
        self._name_ends = array("Q")
        self._arrivals_ms = array("d")
        self._first_turns = array("q")
        self._last_turns = array("q")
        # One entry a turn, and its ids likewise. A turn knows the next one of its session.
        self._next_turns = array("q")
        self._delays_ms = array("d")
        self._prompt_tokens = array("Q")
        self._output_tokens = array("I")
        self._ids = array("I")
        self._id_ends = array("Q")
        self._output_ids: dict[int, array[int]] = {}  # of the turns whose trace says them

    def begin(self, session_id: str, first_arrival_ms: float | None) -> int:
        """Add a session that has no turns yet. Returns: its number."""
        self._names += session_id.encode()
        self._name_ends.append(len(self._names))
        self._arrivals_ms.append(_NO_ARRIVAL if first_arrival_ms is None else first_arrival_ms)
        self._first_turns.append(_NO_TURN)
        self._last_turns.append(_NO_TURN)
        return len(self._name_ends) - 1

    def add_turn(
        self,
        session: int,
        ids: Sequence[int],
        *,
        prompt_tokens: int,
        output_tokens: int,
        delay_ms: float = 0.0,
        output_ids: Sequence[int] | None = None,
    ) -> None:
        """Add a session's next turn.

        Args:
            ids: of its prompt, as in ``RunPrompt``.
            prompt_tokens: length of the prompt, at most ``len(ids) * run_tokens``.
            output_tokens, delay_ms, output_ids: as in ``Turn``.
        """
        turn = len(self._next_turns)
        before = self._last_turns[session]
        if before == _NO_TURN:
            self._first_turns[session] = turn
        else:
            self._next_turns[before] = turn
        self._last_turns[session] = turn
        self._next_turns.append(_NO_TURN)
        self._delays_ms.append(delay_ms)
        self._prompt_tokens.append(prompt_tokens)
        self._output_tokens.append(output_tokens)
        self._ids.extend(ids)
        self._id_ends.append(len(self._ids))
        if output_ids is not None:
            self._output_ids[turn] = array("I", output_ids)

    def sessions(self) -> MadeSessions:
        """The sessions, in the order in which they began; nothing may be added any more."""
        return MadeSessions(len(self._name_ends), self._session)

    def _session(self, number: int) -> Session:
        name_start = self._name_ends[number - 1] if number else 0
        arrival_ms = self._arrivals_ms[number]
        turns = []
        turn = self._first_turns[number]
        while turn != _NO_TURN:
            turns.append(self._turn(turn))
            turn = self._next_turns[turn]
        return Session(
            session_id=self._names[name_start : self._name_ends[number]].decode(),
            first_arrival_ms=arrival_ms if arrival_ms == arrival_ms else None,  # only NaN differs from itself
            turns=tuple(turns),
        )

    def _turn(self, turn: int) -> Turn:
        id_start = self._id_ends[turn - 1] if turn else 0
        ids = tuple(self._ids[id_start : self._id_ends[turn]])
        output_ids = self._output_ids.get(turn)
        return Turn(
            prompt=RunPrompt(ids, self._run_tokens, self._prompt_tokens[turn]),
            output_tokens=self._output_tokens[turn],
            delay_ms=self._delays_ms[turn],
            output_ids=None if output_ids is None else tuple(output_ids),
        )
