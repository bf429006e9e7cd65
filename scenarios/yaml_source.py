"""Text of a scenario file to plain values, with the line of every key.

Owns: YAML and JSON reading within fixed bounds, and saying where something stands in the file.
Refuses to know: what the keys mean. Nothing here builds objects or runs code: only mappings, lists, text, numbers,
booleans and null come out.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import yaml

from g2sim.bus.errors import ConfigError, shorten

MAX_FILE_BYTES = 256 * 1024
MAX_DEPTH = 32
MAX_VALUES = 20_000

KeyPath = tuple[str | int, ...]

_PLAIN_KEY = re.compile(r"[A-Za-z0-9_-]{1,60}")
_TAG = "tag:yaml.org,2002:"
_SCALARS = frozenset({_TAG + name for name in ("null", "bool", "int", "float", "str")})
_DECIMAL = re.compile(r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F_]+|0b[01_]+)")
_NUMBER = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?")
_JSON_TOKEN = re.compile(r'\s*("(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+)', re.DOTALL)


@attrs.frozen
class Place:
    """Where a value stands: its line, counted from 1, and its unquoted text (None for all that is no bare word)."""

    line: int
    text: str | None = None


@attrs.frozen(kw_only=True)
class Document:
    """Plain values and where they came from.

    Attributes:
        values: the top-level mapping.
        source: file name for messages, None for values that come from a program.
        places: key path -> place; empty for values that come from a program.
    """

    values: Mapping[str, Any]
    source: str | None = None
    places: Mapping[KeyPath, Place] = attrs.field(factory=dict)

    def where(self, path: KeyPath) -> str | None:
        """ "file:line" of a key path, or of the nearest mapping around it that is in the file."""
        if self.source is None:
            return None
        return f"{self.source}:{line}" if (line := self.line(path)) else self.source

    def line(self, path: KeyPath) -> int:
        """Line of a key path, or of the nearest mapping around it that is in the file; 0 if none is."""
        steps = (self.places.get(path[:length]) for length in range(len(path), 0, -1))
        return next((place.line for place in steps if place is not None), 0)

    def raw(self, path: KeyPath) -> Any:
        """What the user wrote at a key path, ``...`` if nothing: just what an error takes as ``got``."""
        value: Any = self.values
        for key in path:
            if not isinstance(value, Mapping) or key not in value:
                return ...
            value = value[key]
        return value

    def overridden(self, changes: Mapping[str, Any], given_at: KeyPath) -> Document:
        """This document with other values at dotted paths; they stand where ``changes`` stands, at ``given_at``."""
        values: dict[str, Any] = dict(self.values)
        places = dict(self.places)
        for dotted_path, value in changes.items():
            *outer, last = dotted_path.split(".")
            inner = values
            for key in outer:
                there = inner.get(key)
                inner[key] = dict(there) if isinstance(there, Mapping) else {}
                inner = inner[key]
            inner[last] = value
            path, from_path = (*outer, last), (*given_at, dotted_path)
            for old in [place for place in places if place[: len(path)] == path]:
                del places[old]
            for new in [place for place in places if place[: len(from_path)] == from_path]:
                places[*path, *new[len(from_path) :]] = places[new]
        return attrs.evolve(self, values=values, places=places)

    def error(
        self,
        path: KeyPath,
        *,
        problem: str | None = None,
        got: object = ...,
        allowed: str | None = None,
        hint: str | None = None,
    ) -> ConfigError:
        """The error to raise about the value at ``path``; says so where YAML made something else of what was meant."""
        if isinstance(got, enum.Enum):
            got = got.value
        if hint is None:
            hint = _misread(got, self.places.get(path))
        return ConfigError(dotted(path), problem=problem, got=got, allowed=allowed, where=self.where(path), hint=hint)


def dotted(path: KeyPath) -> str:
    """``engine.workers.aggregated``, ``paths[0]``; odd keys are quoted and cut."""
    text = ""
    for key in path:
        if isinstance(key, int):
            text += f"[{key}]"
        else:
            shown = key if _PLAIN_KEY.fullmatch(key) else shorten(key, 60)
            text += f".{shown}" if text else shown
    return text


def read_file(path: Path) -> Document:
    """Reads a ``.json`` file as JSON and any other as YAML.

    Raises: ConfigError if the file cannot be read, is too large, is not text, or not one well-formed mapping.
    """
    source = str(path)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) and problem.strerror else str(problem)
        raise ConfigError("", problem=f"cannot read the scenario: {reason}", where=source) from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError("", problem="the scenario is too large", allowed=f"{MAX_FILE_BYTES} bytes", where=source)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        line = data.count(b"\n", 0, problem.start) + 1
        raise ConfigError("", problem="the scenario is not UTF-8 text", where=f"{source}:{line}") from None
    return read_json(text, source) if path.suffix.lower() == ".json" else read_yaml(text, source)


def read_yaml(text: str, source: str) -> Document:
    """Raises: ConfigError with file and line if the text is not one YAML mapping within the bounds."""
    try:
        return _YamlReader(text, source).document()
    except yaml.MarkedYAMLError as problem:
        mark = problem.problem_mark or problem.context_mark
        where = source if mark is None else f"{source}:{mark.line + 1}"
        said = "; ".join(part for part in (problem.context, problem.problem) if part)
        raise ConfigError("", problem=f"not valid YAML: {said}", where=where) from None
    except yaml.YAMLError as problem:
        raise ConfigError("", problem=f"not valid YAML: {shorten(str(problem), 200)}", where=source) from None


def read_json(text: str, source: str) -> Document:
    """Raises: ConfigError with file and line if the text is not one JSON object within the bounds."""
    try:
        json.loads(text)
    except json.JSONDecodeError as problem:
        where = f"{source}:{problem.lineno}"
        raise ConfigError("", problem=f"not valid JSON: {problem.msg} at column {problem.colno}", where=where) from None
    except RecursionError:
        raise _too_deep(source) from None
    except ValueError as problem:
        raise ConfigError("", problem=f"not valid JSON: {problem}", where=source) from None
    return _JsonReader(text, source).document()


@attrs.define
class _Node:
    """A value with the facts about it; mappings hold ``key -> (line of the key, node)``."""

    value: Any
    line: int
    text: str | None = None
    size: int = 1
    depth: int = 0


class _Builder:
    """What both readers share: the bounds, joining parts to mappings and lists, and the document at the end."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.size = 0

    def fail(self, line: int, problem: str, *, hint: str | None = None) -> ConfigError:
        return ConfigError("", problem=problem, hint=hint, where=f"{self.source}:{line}")

    def count(self, size: int, depth: int, line: int) -> None:
        """Books ``size`` more values that reach down to ``depth``."""
        self.size += size
        if self.size > MAX_VALUES:
            raise self.fail(line, f"more than {MAX_VALUES} values", hint="aliases count as often as they are used")
        if depth > MAX_DEPTH:
            raise _too_deep(f"{self.source}:{line}")

    def entry(self, entries: dict[str, tuple[int, _Node]], key: str, line: int, node: _Node) -> None:
        if key in entries:
            raise self.fail(line, f"key {shorten(key)} is given twice; first on line {entries[key][0]}")
        entries[key] = (line, node)

    def joined(self, value: Any, parts: list[_Node], line: int) -> _Node:
        size = 1 + sum(part.size for part in parts)
        return _Node(value, line, size=size, depth=1 + max((part.depth for part in parts), default=0))

    def finish(self, root: _Node) -> Document:
        if not isinstance(root.value, dict):
            raise self.fail(root.line, "a scenario is one mapping of keys to values")
        places: dict[KeyPath, Place] = {}
        return Document(values=self._plain(root, (), places), source=self.source, places=places)

    def _plain(self, node: _Node, path: KeyPath, places: dict[KeyPath, Place]) -> Any:
        if isinstance(node.value, dict):
            for key, (line, part) in node.value.items():
                places[*path, key] = Place(line, part.text)
            return {key: self._plain(part, (*path, key), places) for key, (_, part) in node.value.items()}
        if isinstance(node.value, list):
            for idx, part in enumerate(node.value):
                places[*path, idx] = Place(part.line, part.text)
            return [self._plain(part, (*path, idx), places) for idx, part in enumerate(node.value)]
        return node.value


class _YamlReader(_Builder):
    """Builds from parse events, so that the bounds hold while the text is read and not only after it."""

    def __init__(self, text: str, source: str) -> None:
        super().__init__(source)
        self.loader: Any = yaml.SafeLoader(text)
        self.anchors: dict[str | None, _Node | None] = {}

    def document(self) -> Document:
        self.loader.get_event()  # start of the stream
        if isinstance(self.loader.peek_event(), yaml.StreamEndEvent):
            raise ConfigError("", problem="the scenario is empty", where=self.source)
        self.loader.get_event()  # start of the document
        root = self.node(0)
        self.loader.get_event()  # end of the document
        after = self.loader.get_event()
        if not isinstance(after, yaml.StreamEndEvent):
            raise self.fail(after.start_mark.line + 1, "a second YAML document; a scenario file holds one")
        return self.finish(root)

    def node(self, depth: int) -> _Node:
        event = self.loader.get_event()
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            known = self.anchors.get(event.anchor)
            if known is None:
                what = "inside its own anchor" if event.anchor in self.anchors else "without an anchor before it"
                raise self.fail(line, f"alias *{shorten(event.anchor)[1:-1]} {what}")
            self.count(known.size, depth + known.depth, line)
            return known
        self.count(1, depth, line)
        if event.anchor is not None:
            self.anchors[event.anchor] = None
        if isinstance(event, yaml.ScalarEvent):
            node = self.scalar(event, line)
        elif event.tag not in (None, "!", _TAG + "map", _TAG + "seq"):
            raise self.fail(line, f"tag {shorten(event.tag)} is not allowed in a scenario")
        elif isinstance(event, yaml.MappingStartEvent):
            node = self.mapping(depth, line)
        else:
            items = []
            while not isinstance(self.loader.peek_event(), yaml.SequenceEndEvent):
                items.append(self.node(depth + 1))
            self.loader.get_event()
            node = self.joined(items, items, line)
        if event.anchor is not None:
            self.anchors[event.anchor] = node
        return node

    def mapping(self, depth: int, line: int) -> _Node:
        entries: dict[str, tuple[int, _Node]] = {}
        parts: list[_Node] = []
        merged: tuple[int, _Node] | None = None
        while not isinstance(self.loader.peek_event(), yaml.MappingEndEvent):
            event = self.loader.peek_event()
            key_line = event.start_mark.line + 1
            if self.is_merge(event):
                self.loader.get_event()
                parts.append(self.node(depth + 1))
                if merged is not None:
                    raise self.fail(key_line, f"key '<<' is given twice; first on line {merged[0]}")
                merged = (key_line, parts[-1])
                continue
            key = self.node(depth + 1)
            if not isinstance(key.value, str):
                hint = _misread(key.value, Place(key_line, key.text))
                shown = "a mapping or list" if isinstance(key.value, dict | list) else shorten(key.value)
                raise self.fail(key_line, f"a key must be text, got {shown}", hint=hint)
            parts.append(self.node(depth + 1))
            self.entry(entries, key.value, key_line, parts[-1])
        self.loader.get_event()
        if merged is not None:
            for key_text, taken in self.merge(*merged):
                entries.setdefault(key_text, taken)
        return self.joined(entries, parts, line)

    def is_merge(self, event: Any) -> bool:
        return isinstance(event, yaml.ScalarEvent) and event.value == "<<" and event.tag is None and event.implicit[0]

    def merge(self, line: int, node: _Node) -> Iterator[tuple[str, tuple[int, _Node]]]:
        for base in node.value if isinstance(node.value, list) else [node]:
            if not isinstance(base.value, dict):
                raise self.fail(line, "'<<' merges mappings only")
            yield from base.value.items()

    def scalar(self, event: Any, line: int) -> _Node:
        tag = event.tag
        if tag in (None, "!"):
            tag = self.loader.resolve(yaml.ScalarNode, event.value, event.implicit)
        text = event.value if event.style is None and event.tag is None else None
        shown = shorten(event.value)
        if tag == _TAG + "timestamp":
            raise self.fail(line, f"YAML reads {shown[1:-1]} as a date; put it in quotes to mean text")
        if tag not in _SCALARS:
            raise self.fail(line, f"{shown} has the tag {shorten(tag)}, which is not allowed in a scenario")
        if text is not None and (
            (tag == _TAG + "int" and not _DECIMAL.fullmatch(text)) or (tag == _TAG + "float" and ":" in text)
        ):
            raise self.fail(
                line,
                f"YAML 1.1 reads {shown[1:-1]} as an octal or base-60 number",
                hint="write a plain decimal number, or put it in quotes to mean text",
            )
        try:
            value = self.loader.construct_object(yaml.ScalarNode(tag, event.value, event.start_mark, event.end_mark))
        except (ValueError, KeyError, IndexError):
            raise self.fail(line, f"{shown} is not a value of type {tag.removeprefix(_TAG)}") from None
        return _Node(value, line, text)


class _JsonReader(_Builder):
    """Walks the tokens of text that is known to be well-formed, for the lines and the duplicate keys."""

    def __init__(self, text: str, source: str) -> None:
        super().__init__(source)
        self.text = text
        self.at = 0
        self.line = 1

    def document(self) -> Document:
        return self.finish(self.node(self.token(), 0))

    def token(self) -> str:
        match = _JSON_TOKEN.match(self.text, self.at)
        if match is None:
            raise self.fail(self.line, "not valid JSON")
        self.line += self.text.count("\n", self.at, match.start(1))
        self.at = match.end()
        return match[1]

    def node(self, token: str, depth: int) -> _Node:
        line = self.line
        self.count(1, depth, line)
        if token not in "{[":
            return _Node(json.loads(token), line, None if token.startswith('"') else token)
        parts: list[_Node] = []
        entries: dict[str, tuple[int, _Node]] = {}
        while (head := self.token()) not in "}]":
            if head == ",":
                head = self.token()
            if token == "{":
                key, key_line = json.loads(head), self.line
                self.token()  # the colon
                parts.append(self.node(self.token(), depth + 1))
                self.entry(entries, key, key_line, parts[-1])
            else:
                parts.append(self.node(head, depth + 1))
        return self.joined(entries if token == "{" else parts, parts, line)


def _too_deep(where: str) -> ConfigError:
    return ConfigError("", problem=f"nested more than {MAX_DEPTH} deep", where=where)


def _misread(got: object, place: Place | None) -> str | None:
    """What YAML 1.1 makes of a bare word that was perhaps meant otherwise."""
    text = place.text if place is not None else None
    if type(got) is bool and text is not None and text.lower() not in ("true", "false"):
        return f"YAML reads the bare word {text} as a boolean; put it in quotes to mean text"
    if type(got) is str and _NUMBER.fullmatch(got):
        if text is not None:
            return f"YAML 1.1 reads {text} as text; a number with an exponent is written like 1.0e+3 there"
        return "this is text; write a number without quotes"
    return None
