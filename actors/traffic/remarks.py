"""Remarks on a trace that was taken, although not as it stands: what was dropped or changed, and on which lines."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import attrs

from g2sim.actors.traffic.trace_json import Fields
from g2sim.bus.errors import shorten

_SHOWN_LINES = 4
_MOST_KINDS = 50


@attrs.define
class Remarks:
    """Collects remarks by line; equal ones become one note, so that a long trace gives a short list.

    Attributes:
        path: the trace.
    """

    path: Path
    _lines: dict[str, list[int]] = attrs.field(factory=dict)
    _counts: dict[str, int] = attrs.field(factory=dict)

    def add(self, what: str, line: int) -> None:
        """``what`` happened to the row on this line."""
        if what not in self._counts and len(self._counts) >= _MOST_KINDS:
            what = "further members dropped"
        self._counts[what] = self._counts.get(what, 0) + 1
        if self._counts[what] <= _SHOWN_LINES:
            self._lines.setdefault(what, []).append(line)

    def unused(self, row: Fields, used: Iterable[str], line: int) -> None:
        """Note every member of a row that is not looked at."""
        for key in sorted(row.values.keys() - used):
            self.add(f"{shorten(key)} dropped: it has no effect", line)

    def notes(self) -> tuple[str, ...]:
        """One line for each remark, by its first line in the trace."""
        ordered = sorted(self._lines.items(), key=lambda item: (item[1][0], item[0]))
        return tuple(f"{self.path.name}:{lines[0]}: {what}{self._further(what, lines)}" for what, lines in ordered)

    def _further(self, what: str, lines: list[int]) -> str:
        if len(lines) == 1:
            return ""
        more = self._counts[what] - len(lines)
        return f" (also on {', '.join(map(str, lines[1:]))}{f' and {more} more lines' if more else ''})"
