"""What a request of a run may be called, and which one is meant.

Owns: the words for a request, and the refusal of those that mean none or several. Refuses to know: the terminal.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import attrs

from g2sim.actors.traffic.events import RequestArrived
from g2sim.bus.errors import ConfigError, LogDamaged, close_to
from g2sim.scenarios import events as _events_of_runs  # noqa: F401  (a reader knows the events that are imported)
from g2sim.scenarios.run_log import open_run

_SHOWN = 20


@attrs.define
class _Meant:
    """Requests that a word means: the one of that number, and those of that name or uuid."""

    number: int | None = None
    named: list[int] = attrs.Factory(list)


def find_requests(path: Path, words: Sequence[str], field: str) -> list[int]:
    """Numbers of the requests that words mean in a run, as far as its log is good.

    Args:
        path: the log, or the run folder that holds it.
        words: each a number, a name of the traffic's own, SESSION/TURN, or a uuid with or without dashes. A number
            that the run has is one, whatever else is called so.
        field: what errors call a word.
    Raises: ConfigError for a word that means no request, or several, and if there is no log; LogDamaged if not even its
        header can be read.
    """
    meant = {word: _Meant() for word in words}
    uuids: dict[str | None, str] = {word.replace("-", "").lower(): word for word in words}
    names: dict[str, None] = {}
    arrived, known = 0, ""
    with open_run(path) as reader:
        try:
            for record in reader:
                event = record.event
                if not isinstance(event, RequestArrived):
                    continue
                arrived += 1
                own = _names(event)
                names.update(own)
                for word in meant.keys() & {*own, uuids.get(event.uuid)}:
                    meant[word].named.append(event.request)
                if (word := str(event.request)) in meant:
                    meant[word].number = event.request
                    if all(one.number is not None for one in meant.values()):
                        break
        except LogDamaged:
            known = " in the part of the log that is good"
    numbers = f"0 to {arrived - 1}" if arrived else "none: no request arrived"
    return [_only(meant[word], word, field, numbers + known, names) for word in words]


def _names(event: RequestArrived) -> dict[str, None]:
    """What a user may call it beside its number and its uuid: its own name, its session and turn as ``s12/2``."""
    names = [event.name]
    if event.session_id is not None and event.turn_index is not None:
        names.append(f"{event.session_id}/{event.turn_index}")
    return {name: None for name in names if name is not None}


def _only(meant: _Meant, word: str, field: str, allowed: str, names: dict[str, None]) -> int:
    if meant.number is not None:
        return meant.number
    if len(meant.named) == 1:
        return meant.named[0]
    if meant.named:
        several = ", ".join(map(str, meant.named[:_SHOWN]))
        raise ConfigError(field, got=word, problem="several have this name", allowed=several)
    if names:
        allowed += f", or a name such as {next(reversed(names))}"
    turns = [name for name in names if name.startswith(f"{word}/")]
    hint = f"the session has {', '.join(turns[:5])}" if turns else close_to(word, names)
    raise ConfigError(field, got=word, allowed=allowed, hint=hint)
