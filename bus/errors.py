"""Error types shared by every part of g2sim.

Owns: the hierarchy, and how a message is put together from typed fields.
Refuses to know: who raises what. ``exit_code`` is the process exit status the command line uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

_SHOWN_MISTAKES = 20
"""Mistakes that are told beside the first."""

_Item = TypeVar("_Item")
_Read = TypeVar("_Read")


class SimError(Exception):
    """Root of all errors that g2sim raises on purpose."""

    exit_code = 1


class ConfigError(SimError):
    """The user's input is wrong: a scenario, a trace, an option or an argument.

    Args:
        field: dotted path of the field, as written by the user ("" when the whole input is meant).
        got: the offending value, rendered with ``repr`` unless it is already a sentence.
        allowed: what is allowed instead.
        where: "file:line" or "file" when the input came from a file.
        hint: the likely mend.
        others: further mistakes of the same input; a line each.
    """

    exit_code = 2

    def __init__(
        self,
        field: str,
        *,
        problem: str | None = None,
        got: object = ...,
        allowed: str | None = None,
        where: str | None = None,
        hint: str | None = None,
        others: Sequence[ConfigError] = (),
    ) -> None:
        self.field = field
        self.problem = problem
        self.got = got
        self.allowed = allowed
        self.where = where
        self.hint = hint
        self.others = tuple(others)
        super().__init__("\n".join([self._text(), *self._further()]))

    @classmethod
    def of_all(cls, errors: Sequence[ConfigError]) -> ConfigError:
        """The first of several mistakes of one input, which tells of the others too."""
        first, *rest = errors
        further = [one for error in rest for one in (error._changed(others=()), *error.others)]
        return first._changed(others=(*first.others, *further)) if further else first

    def _changed(self, **fields: Any) -> ConfigError:
        names = ("problem", "got", "allowed", "where", "hint", "others")
        return ConfigError(self.field, **{name: getattr(self, name) for name in names} | fields)

    def _further(self) -> list[str]:
        more = len(self.others) - _SHOWN_MISTAKES
        return [*map(str, self.others[:_SHOWN_MISTAKES]), *([f"and {more} more mistakes"] if more > 0 else [])]

    def _text(self) -> str:
        parts = []
        if self.problem is not None:
            parts.append(self.problem)
        if self.got is not ...:
            parts.append(f"got {shorten(self.got)}")
        if self.allowed is not None:
            parts.append(f"allowed: {self.allowed}")
        if self.hint is not None:
            parts.append(self.hint)
        text = "; ".join(parts)
        if self.field:
            text = f"{self.field}: {text}"
        if self.where:
            text = f"{self.where}: {text}"
        return text

    def located(self, where: str) -> ConfigError:
        """The same error with a place, if it has none yet."""
        if self.where is not None:
            return self
        return self._changed(where=where)


def read_all(read: Callable[[_Item], _Read], items: Iterable[_Item]) -> list[_Read]:
    """What ``read`` makes of each item. Raises: ConfigError with the mistakes of all items."""
    found, mistakes = [], []
    for item in items:
        try:
            found.append(read(item))
        except ConfigError as mistake:
            mistakes.append(mistake)
    if mistakes:
        raise ConfigError.of_all(mistakes)
    return found


class ProtocolError(SimError):
    """An actor or a driver broke the rules of the bus."""


class InvariantViolation(SimError):
    """A state that must never be was seen: a bug of ours."""


class PolicyError(SimError):
    """A placement policy misbehaved.

    Args:
        policy: its name.
        request: the request it was asked about, or None.
        time_ms: virtual time.
        problem: what it did, with the value.
    """

    def __init__(self, policy: str, problem: str, *, request: object = None, time_ms: float | None = None) -> None:
        self.policy = policy
        self.problem = problem
        self.request = request
        self.time_ms = time_ms
        about = "" if request is None else f", request {request}"
        when = "" if time_ms is None else f" at {time_ms!r} ms"
        super().__init__(f"policy {policy}{about}{when}: {problem}")


class Deadlock(SimError):
    """Nothing is due, yet work is left.

    Args:
        time_ms: the virtual time at which everything fell quiet.
        waiting: one line for each actor and request that waits, and for what.
    """

    def __init__(self, time_ms: float, waiting: Sequence[str]) -> None:
        self.time_ms = time_ms
        self.waiting = tuple(waiting)
        lines = "".join(f"\n  {line}" for line in self.waiting)
        super().__init__(f"deadlock at {time_ms!r} ms: nothing is due and {len(self.waiting)} wait:{lines}")


class LogDamaged(SimError):
    """A log file ends early or holds a record that does not check.

    Args:
        path: the file.
        record_idx: number of the first bad record, from 0.
        byte_offset: where its frame starts.
        problem: what is wrong with it.
    """

    def __init__(self, path: str, record_idx: int, byte_offset: int, problem: str) -> None:
        self.path = path
        self.record_idx = record_idx
        self.byte_offset = byte_offset
        self.problem = problem
        super().__init__(f"{path}: record {record_idx} at byte {byte_offset}: {problem}")


class OutputFailed(SimError):
    """A file that is being written takes nothing more: the disk is full, or it was taken away."""


class LogMismatch(SimError):
    """Live state and the fold of the log differ, or two logs that must be equal are not."""


def raised(error: BaseException) -> str:
    """What an exception from foreign code says, with the file and line that raised it."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    place, step = "", error.__traceback__
    while step is not None:
        file = step.tb_frame.f_code.co_filename
        if not file.startswith("<frozen "):  # the importer
            place = f" ({file}:{step.tb_lineno})"
        step = step.tb_next
    return text if isinstance(error, SyntaxError) else text + place  # that says itself where it is


def shorten(value: object, limit: int = 80) -> str:
    """``repr`` of a value, cut to ``limit`` characters so that one bad field cannot fill a screen."""
    try:
        text = repr(value)
    except ValueError:  # Python prints no integer of more than sys.get_int_max_str_digits() digits
        text = "an integer of thousands of digits" if isinstance(value, int) else f"a {type(value).__name__} with one"
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def close_to(value: object, known: Iterable[str]) -> str | None:
    """A did-you-mean hint for a word that is not among the known ones, or None."""
    if not isinstance(value, str):
        return None
    import difflib  # only a message needs it, and every command imports this module

    close = difflib.get_close_matches(value[:100], list(known), n=1)
    return f"did you mean {close[0]}?" if close else None
