"""What commands that read runs say of records that are whole, yet contradict each other."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from typing import Any, TypeVar

from g2sim.bus.errors import InvariantViolation, SimError, raised

_Command = TypeVar("_Command", bound=Callable[..., Any])


def reads_runs(*arguments: str) -> Callable[[_Command], _Command]:
    """Decorates a command whose ``arguments`` are runs or event streams.

    Every record of a log is checked for damage, and none for what it says: a log may be made by another program. Where
    a fold of it cannot go on, that is told as an error of the log, with the place in the code for the case that the
    fault is there.
    """

    def decorate(command: _Command) -> _Command:
        @functools.wraps(command)
        def call(**given: Any) -> Any:
            try:
                return command(**given)
            except (
                struct.error,
                LookupError,
                TypeError,
                ValueError,
                AttributeError,
                ArithmeticError,
                RecursionError,
                InvariantViolation,
            ) as error:
                runs = [given[name] for name in arguments]
                named = " ".join(str(one) for run in runs for one in (run if isinstance(run, tuple) else (run,)))
                problem = "the records do not fit together as those of a run do"
                raise SimError(f"{named}: {problem}: {raised(error)}") from error

        return call  # type: ignore[return-value]

    return decorate
