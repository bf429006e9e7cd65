"""JSON Schema of scenario files, made from the tables that check them.

Owns: how tables become JSON Schema (draft 2020-12). Refuses to know: the keys (``layout``), what they mean
(``key_meanings``), what is not supported (``support``). The schema is for editors: it knows keys, types, ranges and
defaults, not what must agree between fields.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from typing import Any

from g2sim.scenarios.fields import ABSENT, REQUIRED, Field, Kind, ListOf, Named, Section, Spec, Variants
from g2sim.scenarios.key_meanings import meaning_of
from g2sim.scenarios.layout import SCENARIO
from g2sim.scenarios.support import RULES

Schema = dict[str, Any]

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def scenario_schema() -> Schema:
    """The schema of a whole file."""
    schema = _schema(SCENARIO, ())
    return {"$schema": _DIALECT, "title": "g2sim scenario", **schema}


def schema_text() -> str:
    """The schema as text, keys in the order of the tables."""
    return json.dumps(scenario_schema(), indent=1, allow_nan=False) + "\n"


def _schema(spec: Spec, path: tuple[str, ...]) -> Schema:
    if isinstance(spec, Kind):
        return dict(spec.schema)
    if isinstance(spec, ListOf):
        return {"type": "array", "items": _schema(spec.item, (*path[:-1], f"{path[-1]}[]"))}
    if isinstance(spec, Named):
        return {"type": "object", "additionalProperties": {"type": "object"}}
    if isinstance(spec, Variants):
        return _variants(spec, path)
    return _section(spec, path, {})


def _section(spec: Section, path: tuple[str, ...], more: Mapping[str, Schema]) -> Schema:
    schema: Schema = {
        "type": ["object", "null"] if spec.nullable else "object",
        "properties": {**more, **{key: _field(field, (*path, key)) for key, field in spec.fields.items()}},
        "additionalProperties": False,
    }
    for key, told in _only_refused(path).items():
        schema["properties"].setdefault(key, told)
    required = [key for key, field in spec.fields.items() if field.default is REQUIRED]
    return schema | ({"required": required} if required else {})


def _field(field: Field, path: tuple[str, ...]) -> Schema:
    takes = f"; {field.kind.allowed}" if isinstance(field.kind, Kind | Named) else ""
    schema = _schema(field.kind, path) | {"description": meaning_of(path) + takes}
    default = field.default
    if default is REQUIRED or default is ABSENT or isinstance(default, Mapping | list):
        return schema
    if default is None and isinstance(field.kind, Kind):
        return schema
    return schema | {"default": default.value if isinstance(default, enum.Enum) else default}


def _variants(spec: Variants, path: tuple[str, ...]) -> Schema:
    """The tag, then for each of its values the keys that go with it; other cases' keys may be null."""
    shown = {name: case for name, case in spec.cases.items() if name not in spec.hidden or name == spec.default}
    tag: Schema = {"enum": list(shown)}
    if spec.default is not REQUIRED:
        tag["default"] = spec.default
    branches = []
    for name, case in shown.items():
        others = [key for other in spec.cases.values() for key in other.fields if key not in case.fields]
        nulls: dict[str, Schema] = {key: {"type": "null"} for key in others}
        given = {"properties": {spec.tag: {"const": name}}}
        branches.append(
            {
                "if": given if name == spec.default else {**given, "required": [spec.tag]},
                "then": _section(case, path, {spec.tag: {}, **nulls}),
            }
        )
    schema: Schema = {"type": "object", "properties": {spec.tag: tag}, "allOf": branches}
    return schema | ({"required": [spec.tag]} if spec.default is REQUIRED else {})


def _only_refused(path: tuple[str, ...]) -> dict[str, Schema]:
    """Keys below ``path`` that are in no table: only a rule of what is not supported knows them."""
    found: dict[str, Schema] = {}
    names = ["*" if idx == 2 and path[:2] == ("engine", "workers") else name for idx, name in enumerate(path)]
    for rule in RULES:
        for pattern in rule.fields:
            *outer, last = pattern.split(".")
            if outer == names:
                found.setdefault(last, {"description": f"not supported: {rule.what}; allowed: {rule.allowed}"})
    return found
