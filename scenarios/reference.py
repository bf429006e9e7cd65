"""The pages of docs/reference, written from the code: scenario keys, events, rules of streams, figures, policies.

Owns: how they are laid out. Refuses to know: what they say; that stands beside each event, rule and figure,
and for keys in ``key_meanings``.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

import attrs
import yaml

from g2sim.actors.kv.blocks import BlockChain
from g2sim.actors.router import policy
from g2sim.actors.router.index import Overlap
from g2sim.actors.router.pool import Pool
from g2sim.actors.traffic.request import AgenticIdentity
from g2sim.bus.events import BY_TAG, EventType
from g2sim.scenarios import compare, event_plane, membership, report, report_meanings, router_replicas
from g2sim.scenarios.fields import ABSENT, REQUIRED, Field, Kind, ListOf, Named, Section, Spec, Variants
from g2sim.scenarios.key_meanings import MEANINGS, key_path
from g2sim.scenarios.layout import SCENARIO
from g2sim.scenarios.validate_rules import RULES

_FIELDS = re.compile(r"(\w+(?:, \w+)*): (.*)")
_LITERAL = re.compile(r"``(.+?)``")
_QUOTED_TYPE = re.compile(r"(: |-> )'([^']*)'")
_UNQUOTED = r"\1\2"


def _page(title: str, name: str, text: str) -> Iterator[str]:
    yield f"# {title}\n\nGenerated from the code; do not edit. To write it anew:\n"
    yield f"    python -m g2sim.scenarios.reference {name} > docs/reference/{name}.md\n"
    yield f"{text}\n"


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [heads, ("---",) * len(heads), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def _docstring(cls: type[Any], fields: str = "Attributes") -> tuple[str, dict[str, str]]:
    """What a class says of itself, and of its fields, which stand under a head of this name."""
    text, _, attributes = (inspect.getdoc(cls) or "").partition(f"\n\n{fields}:\n")
    meanings: dict[str, str] = {}
    names: list[str] = []
    for line in inspect.cleandoc(f"\n{attributes}").splitlines():
        if not line.startswith(" ") and (found := _FIELDS.fullmatch(line)):
            names = found[1].split(", ")
            meanings.update(dict.fromkeys(names, found[2]))
        else:
            meanings.update({name: f"{meanings[name]} {line.strip()}" for name in names})
    return _LITERAL.sub(r"`\1`", text), {name: _LITERAL.sub(r"`\1`", said) for name, said in meanings.items()}


def _described(cls: type[Any], heading: str) -> str:
    """What a class of values says of itself, and a table of its fields."""
    text, meanings = _docstring(cls)
    if attrs.has(cls):
        types = {field.name: field.type for field in attrs.fields(cls)}
    else:  # written out in full: its fields are the arguments that it is made of
        types = {name: argument.annotation for name, argument in inspect.signature(cls).parameters.items()}
    fields = [(f"`{name}`", f"`{kind}`", meanings.get(name, "")) for name, kind in types.items() if name[0] != "_"]
    table = f"\n{_table(('field', 'type', 'meaning'), fields)}" if fields else ""
    return f"### {heading}\n\n{text}\n{table}"


def _event(kind: EventType) -> str:
    version = f", version {kind.version}" if kind.version > 1 else ""
    return _described(kind.cls, f"`{kind.tag}` {kind.cls.__name__}{version}")


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
    """What the figures of reports and comparisons mean: by formula, and field by field."""
    about = (
        "First the definitions, as they stand under `definitions` where the figures are printed as JSON; "
        f"then every field. `<stat>` is one of {', '.join(report_meanings.STATISTICS)}; "
        "`[]` stands for each entry of a list, `*` for all keys. Times are virtual."
    )
    parts = list(_page("Figures", "report", about))
    sections: dict[str, Mapping[str, str]] = {
        "Definitions of `report.json`": report.DEFINITIONS,
        "Definitions of `event_plane` in `report.json`": event_plane.DEFINITIONS,
        "Definitions of `membership` in `report.json`": membership.DEFINITIONS,
        "Definitions of `routers` in `report.json`": router_replicas.DEFINITIONS,
        "Definitions of `g2sim compare`": compare.DEFINITIONS,
        "Words of the tables that `g2sim run` and `g2sim report` print": {
            **_words("workers[]", report.RANK_COLUMNS),
            **_words("g2_pools[]", report.POOL_COLUMNS),
        },
        "Fields of `report.json`": report_meanings.REPORT,
        "Fields of a line of `requests.jsonl`": report_meanings.REQUEST,
    }
    for title, definitions in sections.items():
        rows = [(f"`{name}`", text) for name, text in definitions.items()]
        parts.append(f"## {title}\n\n{_table(('figure', 'meaning'), rows)}")
    return "\n".join(parts)


def _words(entry: str, columns: Mapping[str, str]) -> dict[str, str]:
    """Heading of a printed table -> what its field means, and which it is."""
    fields = {heading.partition("\n")[0]: f"{entry}.{name}" for name, heading in columns.items()}
    return {heading: f"{report_meanings.REPORT[field]} (`{field}`)" for heading, field in fields.items()}


_TAG_MEANING = "which of these it is"

_SECTIONS = (
    "",
    "engine.",
    "engine.workers.<role>.",
    "engine.workers.<role>.kv_cache.host_offload.",
    "engine.workers.<role>.timing.",
    "engine.kv_transfer.",
    "traffic.",
    "traffic.source.",
    "traffic.load.",
    "traffic.stop.",
    "router.",
    "evaluation.",
    "expect[].",
    "faults.",
    "faults.recovery.",
    "faults.plan[].",
)
"""Starts of paths, each with a table of its own."""


@attrs.define
class _Key:
    """What the page says of a key: which values of ``type`` it goes with, what it takes, its default in each place."""

    takes: str
    cases: list[str] = attrs.Factory(list)
    defaults: dict[str, str] = attrs.Factory(dict)


def scenario_keys() -> dict[str, _Key]:
    """Every key of a scenario file by its path as ``key_meanings`` spells it, in the order of the tables."""
    keys: dict[str, _Key] = {}
    _collect(SCENARIO, (), "", keys)
    return keys


def _collect(spec: Spec, path: tuple[str, ...], case: str, keys: dict[str, _Key]) -> None:
    if isinstance(spec, ListOf):
        _collect(spec.item, (*path[:-1], f"{path[-1]}[]"), case, keys)
    elif isinstance(spec, Variants):
        _add(keys, (*path, spec.tag), "", spec.names.allowed, spec.default)
        for name, inner in spec.cases.items():
            if name not in spec.hidden or name == spec.default:
                _collect(inner, path, name, keys)
    elif isinstance(spec, Section):
        for field in spec.fields.values():
            _add(keys, (*path, field.key), case, _taken(field), field.default)
            _collect(field.kind, (*path, field.key), "", keys)


def _taken(field: Field) -> str:
    if isinstance(field.kind, Kind | Named | ListOf):
        return field.kind.allowed
    return "a mapping, or null" if isinstance(field.kind, Section) and field.kind.nullable else "a mapping"


def _add(keys: dict[str, _Key], path: tuple[str, ...], case: str, takes: str, default: object) -> None:
    known = keys.setdefault(key_path(path), _Key(takes))
    if case and case not in known.cases:
        known.cases.append(case)
    if default is REQUIRED:
        shown = "required"
    elif default is ABSENT or default is None or isinstance(default, Mapping | list):
        shown = ""
    else:
        shown = f"`{yaml.safe_dump(getattr(default, 'value', default)).splitlines()[0]}`"
    known.defaults.setdefault(shown, "prefill: " if path[:3] == ("engine", "workers", "prefill") else "")


def _key_row(name: str, key: _Key, meaning: str) -> tuple[str, ...]:
    given = f" ({', '.join(key.cases)})" if key.cases else ""
    defaults = ", ".join(f"{where}{shown}" for shown, where in key.defaults.items())
    return f"`{name}`{given}", key.takes, defaults, meaning


def render_scenario() -> str:
    """Every key of a scenario file."""
    about = (
        "Keys under their section, dotted. In brackets: the values of the section's `type` with which the key goes. "
        "A default that is not shown is null, empty, or said by the meaning. What is refused: "
        "[feature-support.md](../feature-support.md). `g2sim schema` prints the same for editors; "
        "[scenario-files.md](../scenario-files.md) shows how to write a file."
    )
    rows: dict[str, list[tuple[str, ...]]] = {section: [] for section in _SECTIONS}
    for path, key in scenario_keys().items():
        section = max((one for one in _SECTIONS if path.startswith(one)), key=len)
        rows[section].append(_key_row(path.removeprefix(section), key, MEANINGS.get(path, _TAG_MEANING)))
    parts = list(_page("Scenario keys", "scenario", about))
    for section in _SECTIONS:
        title = f"`{section.removesuffix('.')}`" if section else "The file"
        parts.append(f"## {title}\n\n{_table(('key', 'takes', 'default', 'meaning'), rows[section])}")
    return "\n".join(parts)


_GIVEN = (policy.RoutedRequest, policy.Candidate, policy.Placement, BlockChain, AgenticIdentity, Overlap)
_GIVES = (policy.Place, policy.Queue, policy.Refuse, policy.Release, policy.Weighing)
_SCORING = ("eligible", "score", "pick")
_POOL_STATE = ("role", "workers", "dp_size", "block_size_tokens", "max_batched_tokens", "gpu_blocks", "stream")
_POOL_CALLS = ("candidates", "candidate", "overlap", "lowest", "ready_places", "is_ready", "place_of")


def _calls(cls: type[Any], names: Iterable[str]) -> str:
    """A table of methods: how they are called, and what they say of themselves."""
    rows = []
    for name in names:
        method = inspect.getattr_static(cls, name)
        signature = str(inspect.signature(method)).replace("(self, ", "(").replace("(self)", "()")
        said = " ".join((inspect.getdoc(method) or "").split())
        rows.append((f"`{name}{_QUOTED_TYPE.sub(_UNQUOTED, signature)}`", _LITERAL.sub(r"`\1`", said)))
    return _table(("call", "meaning"), rows)


def render_policy() -> str:
    """What a placement policy is asked, what it is given, and what it may answer."""
    asked, switches = _docstring(policy.PlacementPolicy)
    hooks = [name for name, member in vars(policy.PlacementPolicy).items() if inspect.isfunction(member)]
    hooks = [name for name in hooks if not name.startswith("_")]
    window = {name: said for name, said in _docstring(Pool, "Args")[1].items() if name in _POOL_STATE}
    about = (
        "`from g2sim.actors.router.policy import Policy` gives the base class; it has a default for every call but "
        "`score`. [write-a-policy.md](../write-a-policy.md) shows how to write one, from nothing."
    )
    return "\n".join(
        [
            *_page("Placement policies", "policy", about),
            f"## What a policy has\n\n{asked}\n",
            _table(("attribute", "meaning"), [(f"`{name}`", said) for name, said in switches.items()]),
            "## What a policy is asked\n\n`Verdict` is `Place`, `Queue` or `Refuse`.\n",
            _calls(policy.PlacementPolicy, hooks),
            "## What `Policy` adds\n\nIts `place` scores every rank that is eligible, and picks the best. "
            "`Score` is a finite number, lower is better, or named parts that are added.\n",
            _calls(policy.Policy, _SCORING),
            "## What a policy is given\n",
            *(_described(cls, f"`{cls.__name__}`") for cls in _GIVEN),
            "KV events, as `observe` gets them, are in [events.md](events.md).\n",
            "### `Pool`\n\n`self.pool`, the policy's window on its pool of workers.\n",
            _table(("attribute", "meaning"), [(f"`{name}`", said) for name, said in window.items()]),
            _calls(Pool, _POOL_CALLS),
            "## What a policy gives\n",
            *(_described(cls, f"`{cls.__name__}`") for cls in _GIVES),
        ]
    )


PAGES: Mapping[str, Callable[[], str]] = {
    "events": render_events,
    "rules": render_rules,
    "report": render_report,
    "scenario": render_scenario,
    "policy": render_policy,
}

if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in PAGES:
        sys.exit(f"usage: python -m g2sim.scenarios.reference {'|'.join(PAGES)}")
    sys.stdout.write(PAGES[sys.argv[1]]())
