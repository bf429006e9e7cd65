"""What a request of a run may be called, and which one is meant.

Owns: the words for a request, and the refusal of those that mean none or several. Refuses to know: the terminal.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from g2sim.actors.traffic.events import RequestArrived
from g2sim.bus.errors import ConfigError, LogDamaged, close_to
from g2sim.scenarios import events as _events_of_runs  # noqa: F401  (a reader knows the events that are imported)
from g2sim.scenarios.run_log import open_run

_UUID_DIGITS = 32
_SHOWN = 20


def _names(event: RequestArrived) -> Iterator[str]:
    """What a user may call it beside its number and its uuid: its own name, its session and turn as ``s12/2``."""
    if event.name is not None:
        yield event.name
    if event.session_id is not None and event.turn_index is not None:
        yield f"{event.session_id}/{event.turn_index}"


class RequestFinder:
    """Finds the request that a word means while the arrivals of a log pass by.

    Args:
        wanted: a number, a name of the traffic's own, SESSION/TURN, or a uuid with or without dashes.
    """

    def __init__(self, wanted: str) -> None:
        self.wanted = wanted
        self._number = int(wanted) if is_number(wanted) else None
        self._uuid = wanted.replace("-", "").lower()
        self._meant: list[int] = []
        self._arrived = 0
        self._names: dict[str, None] = {}

    def arrived(self, event: RequestArrived) -> bool:
        """Takes note of a request; whether it is one that is meant."""
        self._arrived += 1
        names = dict.fromkeys(_names(event))
        self._names.update(names)
        if self._number is not None:
            meant = event.request == self._number
        else:
            meant = self.wanted in names or event.uuid == self._uuid
        if meant:
            self._meant.append(event.request)
        return meant

    def number(self, field: str) -> int:
        """The one that is meant; ``field`` is what errors call the word.

        Raises: ConfigError if it means no request, or several.
        """
        if len(self._meant) > 1:
            several = ", ".join(map(str, self._meant[:_SHOWN]))
            raise ConfigError(field, got=self.wanted, problem="several have this name", allowed=several)
        if self._meant:
            return self._meant[0]
        allowed = f"0 to {self._arrived - 1}" if self._arrived else "none: no request arrived in this log"
        if self._names:
            allowed += f", or a name such as {next(reversed(self._names))}"
        turns = [name for name in self._names if name.startswith(f"{self.wanted}/")]
        hint = f"the session has {', '.join(turns[:5])}" if turns else close_to(self.wanted, self._names)
        raise ConfigError(field, got=self.wanted, allowed=allowed, hint=hint)


def is_number(word: str) -> bool:
    """Whether it is the number of a request; a uuid can be all digits too."""
    return word.isdecimal() and len(word) < _UUID_DIGITS


def find_requests(path: Path, words: Iterable[str], field: str) -> list[int]:
    """Numbers of the requests that words mean in a run, as far as its log is good.

    Numbers are taken as they are; the log is read if there are other words.
    Raises: ConfigError for words that mean no request, or several, and if there is no log.
    """
    finders = [RequestFinder(word) for word in words]
    named = [finder for finder in finders if not is_number(finder.wanted)]
    if named:
        with open_run(path) as reader, contextlib.suppress(LogDamaged):
            for record in reader:
                if isinstance(record.event, RequestArrived):
                    for finder in named:
                        finder.arrived(record.event)
    return [int(one.wanted) if one not in named else one.number(field) for one in finders]
