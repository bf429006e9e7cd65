"""Checking plain values against small tables of fields.

Owns: the kinds of values, each with its JSON Schema, and walking mappings along a table: types, ranges, defaults,
unknown keys.
Refuses to know: what a field means and how fields depend on each other (``schema``), what is supported (``support``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import attrs

from g2sim.bus.errors import ConfigError, close_to
from g2sim.scenarios.yaml_source import Document, KeyPath

COUNT_MAX = 2**31 - 1
EXACT_MAX = 2**53
U64_MAX = 2**64 - 1

REQUIRED = object()
"""Default of a field that must be given."""

ABSENT = object()
"""Default of a field whose default depends on other fields; whoever checks those replaces it."""

Literals = Mapping[str | None, Any]

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")


class Refused(Exception):
    """A kind does not take a value. The argument is a hint, or None."""

    def __init__(self, hint: str | None = None) -> None:
        self.hint = hint
        super().__init__(hint)


@attrs.frozen
class Kind:
    """A kind of single values.

    Attributes:
        allowed: what is taken, in words, for messages.
        read: value -> value to use. Raises Refused.
        schema: JSON Schema of the values that ``read`` takes, as far as JSON Schema can say it.
    """

    allowed: str
    read: Callable[[Any], Any]
    schema: Mapping[str, Any]


@attrs.frozen
class Field:
    """One key of a mapping; ``default`` is read like a given value unless it is REQUIRED, ABSENT or None."""

    key: str
    kind: Spec
    default: Any = REQUIRED


@attrs.frozen(kw_only=True)
class Section:
    """A mapping with fixed keys; ``nullable``: null stands for "there is none"."""

    fields: Mapping[str, Field]
    nullable: bool = False

    @property
    def allowed(self) -> str:
        return f"a mapping of {', '.join(self.fields)}" + (", or null" if self.nullable else "")


@attrs.frozen(kw_only=True)
class Variants:
    """A mapping whose other keys depend on one key, ``tag``; ``hidden`` cases are taken but not advertised."""

    cases: Mapping[str, Section]
    default: Any = REQUIRED
    tag: str = "type"
    hidden: tuple[str, ...] = ()

    @property
    def names(self) -> Kind:
        """The kind of the tag."""
        shown = [case for case in self.cases if case not in self.hidden]
        return choice(*shown, hidden=self.hidden)

    @property
    def allowed(self) -> str:
        return f"a mapping with {self.tag} one of {self.names.allowed}"


@attrs.frozen
class ListOf:
    """A list of mappings that each follow ``item``."""

    item: Section | Variants

    @property
    def allowed(self) -> str:
        return "a list of mappings"


@attrs.frozen
class Named:
    """A mapping of names of the user's choice to mappings; somebody else checks what is in those."""

    allowed: str


Spec = Kind | Section | Variants | ListOf | Named


def section(*fields: Field, nullable: bool = False) -> Section:
    return Section(fields={field.key: field for field in fields}, nullable=nullable)


def integer(allowed: str, low: int, high: int = COUNT_MAX, *, literals: Literals | None = None) -> Kind:
    """Whole numbers in low..high; ``literals`` are further values taken, with what they stand for."""
    taken = literals or {}

    def read(value: Any) -> Any:
        if (value is None or type(value) is str) and value in taken:
            return taken[value]
        if type(value) is not int or value < low:
            raise Refused
        if value > high:
            raise Refused(f"at most {high}")
        return value

    return Kind(allowed, read, _any_of({"type": "integer", "minimum": low, "maximum": high}, taken))


def number(allowed: str, low: float, high: float = math.inf, *, above: bool = False, null: float | None = None) -> Kind:
    """Finite numbers in low..high, or above ``low`` if ``above``, as floats; ``null`` is what null stands for."""

    def read(value: Any) -> float:
        if value is None and null is not None:
            return null
        if type(value) not in (int, float):
            raise Refused
        try:
            read_value = float(value)
        except OverflowError:
            raise Refused("too large for a float64") from None
        if not math.isfinite(read_value) or not low <= value <= high or (above and read_value == low):
            raise Refused
        return read_value + 0.0  # no negative zero

    bounds = {"exclusiveMinimum" if above else "minimum": low, "maximum": high}
    bounds = {word: bound for word, bound in bounds.items() if math.isfinite(bound)}
    return Kind(allowed, read, _any_of({"type": "number", **bounds}, () if null is None else (None,)))


def zero_or(allowed: str, low: float) -> Kind:
    """0, or a finite number from ``low`` on, as floats: of ratios and rates by which something is divided."""
    numbers = number(allowed, low)
    return Kind(
        allowed,
        lambda value: 0.0 if type(value) in (int, float) and value == 0 else numbers.read(value),
        {"anyOf": [numbers.schema, {"const": 0}]},
    )


def choice(*values: str, hidden: Sequence[str] = ()) -> Kind:
    """One of some words; members of an enumeration are given back as members. ``hidden`` ones are not advertised."""
    taken = {str(value): value for value in (*values, *hidden)}

    def read(value: Any) -> Any:
        if not isinstance(value, str) or value not in taken:
            raise Refused(close_to(value, values))
        return taken[value]

    return Kind(", ".join(values), read, {"enum": [str(value) for value in values]})


def boolean() -> Kind:
    def read(value: Any) -> bool:
        if type(value) is not bool:
            raise Refused
        return value

    return Kind("true or false", read, {"type": "boolean"})


def text(allowed: str, *, blank: bool = False, lines: bool = False) -> Kind:
    """Text without control characters; ``lines`` lets line ends and tabs through."""

    def read(value: Any) -> str:
        if type(value) is not str or not (blank or value.strip()):
            raise Refused
        if _CONTROL.search(value) or (not lines and ("\n" in value or "\t" in value)):
            raise Refused("no control characters")
        return value

    return Kind(allowed, read, {"type": "string"} if blank else {"type": "string", "pattern": r"\S"})


def list_of(kind: Kind, allowed: str) -> Kind:
    def read(value: Any) -> list[Any]:
        if not isinstance(value, list | tuple) or not value:
            raise Refused
        return [kind.read(item) for item in value]

    return Kind(allowed, read, {"type": "array", "items": kind.schema, "minItems": 1})


def mapping(allowed: str) -> Kind:
    """A mapping with text keys; somebody else checks what is in it."""

    def read(value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise Refused
        return dict(value)

    return Kind(allowed, read, {"type": "object"})


def or_null(kind: Kind) -> Kind:
    def read(value: Any) -> Any:
        return None if value is None else kind.read(value)

    return Kind(f"{kind.allowed}, or null", read, _any_of(kind.schema, (None,)))


def _any_of(schema: Mapping[str, Any], values: Collection[str | None]) -> Mapping[str, Any]:
    """Schema of what another one takes and of these values."""
    return {"anyOf": [schema, {"enum": list(values)}]} if values else schema


def unchecked(like: Kind) -> Kind:
    """Any value; somebody else checks that it is one that ``like`` takes."""
    return Kind(like.allowed, lambda value: value, like.schema)


def scalar() -> Kind:
    """A single value of any type."""

    def read(value: Any) -> Any:
        if not (value is None or type(value) in (str, bool, int, float)):
            raise Refused
        return value

    return Kind("text, a number, true, false or null", read, {"type": ["string", "number", "boolean", "null"]})


@attrs.frozen
class Reader:
    """Walks a document along tables.

    Attributes:
        document: the values and their places.
        carried: key path -> whether this key, though in no table, is to be handed on as it is.
    """

    document: Document
    carried: Callable[[KeyPath], bool]
    _mistakes: dict[tuple[Any, ...], tuple[int, ConfigError]] = attrs.field(factory=dict, init=False)

    def read(self, spec: Spec) -> Any:
        """The document's values with all defaults filled in.

        Raises: ConfigError with all mistakes, in the order of the file. A key that is missing beside one that does not
            belong there is none: it is perhaps that one, misspelt.
        """
        found = self._value(spec, self.document.values, ())
        if self._mistakes:
            in_order = sorted(self._mistakes.values(), key=lambda mistake: mistake[0])
            raise ConfigError.of_all([error for _, error in in_order])
        return found

    def _refuse(self, path: KeyPath, **about: Any) -> None:
        """Take note of a mistake; one in an anchor's mapping is one, however often that is used."""
        error, line = self.document.error(path, **about), self.document.line(path)
        one = (line, path[-1], error.problem, error.allowed) if line else path
        self._mistakes.setdefault(one, (line, error))

    def _value(self, spec: Spec, value: Any, path: KeyPath) -> Any:
        if isinstance(spec, Kind):
            try:
                return spec.read(value)
            except Refused as refused:
                return self._refuse(path, got=value, allowed=spec.allowed, hint=refused.hint)
        if value is None and isinstance(spec, Section) and spec.nullable:
            return None
        if isinstance(spec, ListOf):
            if not isinstance(value, list | tuple):
                return self._refuse(path, got=value, allowed=spec.allowed)
            return [self._value(spec.item, item, (*path, idx)) for idx, item in enumerate(value)]
        if not isinstance(value, Mapping):
            return self._refuse(path, got=value, allowed=spec.allowed)
        for key in value:
            if not isinstance(key, str):
                return self._refuse(path, problem="a key must be text", got=key)
        if isinstance(spec, Named):
            return {key: self._value(mapping(spec.allowed), item, (*path, key)) for key, item in value.items()}
        if isinstance(spec, Section):
            return self._section(spec, value, path)
        case = value.get(spec.tag, spec.default)
        if case is REQUIRED:
            return self._refuse((*path, spec.tag), problem="missing", allowed=spec.names.allowed)
        case = self._value(spec.names, case, (*path, spec.tag))
        if case is None:
            return None
        return {spec.tag: case, **self._section(spec.cases[case], value, path, variants=spec, case=case)}

    def _section(
        self,
        spec: Section,
        value: Mapping[str, Any],
        path: KeyPath,
        *,
        variants: Variants | None = None,
        case: str = "",
    ) -> dict[str, Any]:
        result: dict[str, Any] = {}
        strange = False
        for key in value:
            if key in spec.fields or (variants is not None and key == variants.tag):
                continue
            if self.carried((*path, key)):
                result[key] = value[key]
            elif variants is not None and (homes := _homes(variants, key)):
                if value[key] is not None:
                    strange = True
                    self._refuse(
                        (*path, key),
                        problem=f"does not go with {variants.tag} {case}",
                        got=value[key],
                        allowed=f"only with {variants.tag} {' or '.join(homes)}",
                    )
            else:
                strange = True
                self._unknown(spec, key, value[key], path, variants)
        for key, field in spec.fields.items():
            here = (*path, key)
            if key in value:
                result[key] = self._value(field.kind, value[key], here)
            elif field.default is REQUIRED:
                if not strange:
                    self._refuse(here, problem="missing", allowed=field.kind.allowed)
            elif field.default is ABSENT or field.default is None:
                result[key] = field.default
            else:
                result[key] = self._value(field.kind, field.default, here)
        return result

    def _unknown(self, spec: Section, key: str, value: Any, path: KeyPath, variants: Variants | None) -> None:
        known = [*([variants.tag] if variants else []), *spec.fields]
        deeper = [inner for inner in _key_paths(spec) if inner.endswith(f".{key}")]
        hint = f"did you mean {deeper[0]}?" if deeper else close_to(key, known)
        self._refuse((*path, key), problem="unknown key", got=value, allowed=", ".join(known), hint=hint)


def _homes(variants: Variants, key: str) -> Sequence[str]:
    return [case for case, spec in variants.cases.items() if key in spec.fields]


def _key_paths(spec: Spec) -> Iterator[str]:
    if isinstance(spec, Variants):
        for case in spec.cases.values():
            yield from _key_paths(case)
    elif isinstance(spec, Section):
        for key, field in spec.fields.items():
            yield key
            yield from (f"{key}.{inner}" for inner in _key_paths(field.kind))
