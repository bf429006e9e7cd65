"""The pages of docs/reference, written from the code: event types, rules of streams, figures of reports.

Owns: how they are laid out. Refuses to know: what they say; that stands beside each event, rule and figure.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

import attrs

from g2sim.bus.events import BY_TAG, EventType
from g2sim.scenarios import compare, event_plane, report
from g2sim.scenarios.validate_rules import RULES

_FIELDS = re.compile(r"(\w+(?:, \w+)*): (.*)")
_LITERAL = re.compile(r"``(.+?)``")


def _page(title: str, name: str, text: str) -> Iterator[str]:
    yield f"# {title}\n\nGenerated from the code; do not edit. To write it anew:\n"
    yield f"    python -m g2sim.scenarios.reference {name} > docs/reference/{name}.md\n"
    yield f"{text}\n"


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [heads, ("---",) * len(heads), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def _docstring(cls: type[Any]) -> tuple[str, dict[str, str]]:
    """What a class says of itself, and of its fields."""
    text, _, attributes = (inspect.getdoc(cls) or "").partition("\n\nAttributes:\n")
    meanings: dict[str, str] = {}
    names: list[str] = []
    for line in inspect.cleandoc(f"\n{attributes}").splitlines():
        if not line.startswith(" ") and (found := _FIELDS.fullmatch(line)):
            names = found[1].split(", ")
            meanings.update(dict.fromkeys(names, found[2]))
        else:
            meanings.update({name: f"{meanings[name]} {line.strip()}" for name in names})
    return _LITERAL.sub(r"`\1`", text), {name: _LITERAL.sub(r"`\1`", said) for name, said in meanings.items()}


def _event(kind: EventType) -> str:
    text, meanings = _docstring(kind.cls)
    fields = [(f"`{field.name}`", f"`{field.type}`", meanings.get(field.name, "")) for field in attrs.fields(kind.cls)]
    version = f", version {kind.version}" if kind.version > 1 else ""
    table = f"\n{_table(('field', 'type', 'meaning'), fields)}" if fields else ""
    return f"### `{kind.tag}` {kind.cls.__name__}{version}\n\n{text}\n{table}"


def render_events() -> str:
    """Every event type that a run can log, module by module."""
    kinds = [kind for kind in BY_TAG.values() if kind.cls.__module__.startswith("g2sim.")]
    kinds.sort(key=lambda kind: kind.cls.__module__)
    about = (
        "Records of a log also have `time_ms`, `source` (the actor) and `cause` (its turn). `g2sim events` prints them."
    )
    parts = list(_page("Events", "events", about))
    for module, members in groupby(kinds, key=lambda kind: kind.cls.__module__):
        said = _LITERAL.sub(r"`\1`", inspect.getdoc(sys.modules[module]) or "")
        parts += [f"## {module.removeprefix('g2sim.')}\n\n{said}\n", *map(_event, members)]
    return "\n".join(parts)


def render_rules() -> str:
    """The rules of ``g2sim validate``."""
    about = "`g2sim validate` fails for errors and warnings; notes do not count. `g2sim rules` prints the same table."
    rows = [(rule.code, rule.name, rule.family, rule.severity.value, rule.text) for rule in RULES]
    return "\n".join(
        [
            *_page("Rules of KV event streams", "rules", about),
            _table(("rule", "name", "family", "severity", "a finding means"), rows),
        ]
    )


def render_report() -> str:
    """What the figures of reports and comparisons mean."""
    parts = list(_page("Figures", "report", "As they stand under `definitions` where the figures are printed as JSON."))
    sections: dict[str, Mapping[str, str]] = {
        "`report.json`": report.DEFINITIONS,
        "`event_plane` in `report.json`": event_plane.DEFINITIONS,
        "`g2sim compare`": compare.DEFINITIONS,
    }
    for title, definitions in sections.items():
        rows = [(f"`{name}`", text) for name, text in definitions.items()]
        parts.append(f"## {title}\n\n{_table(('figure', 'meaning'), rows)}")
    return "\n".join(parts)


PAGES: Mapping[str, Callable[[], str]] = {"events": render_events, "rules": render_rules, "report": render_report}

if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in PAGES:
        sys.exit(f"usage: python -m g2sim.scenarios.reference {'|'.join(PAGES)}")
    sys.stdout.write(PAGES[sys.argv[1]]())
