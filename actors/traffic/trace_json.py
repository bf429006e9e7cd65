"""Checked access to the JSON of trace files: every refusal names the file, the line and the field.

Owns: decoding text into values (strictly: no NaN, UTF-8 only, no field given twice) and the type checks that all
trace formats share. Refuses to know: which fields a format has.
"""

from __future__ import annotations

import enum
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import attrs

from g2sim.bus.errors import ConfigError

U64_MAX = 2**64 - 1
U32_MAX = 2**32 - 1

MAX_TOKENS = 10_000_000
"""Longest prompt or answer that a trace may declare [tokens]; the reference's newer versions have the same limit."""

MAX_LINE_BYTES = 16 * 2**20
"""Longest line of a row format [B]: room for the hash ids of a prompt of ``MAX_TOKENS`` in blocks of 16."""

MAX_FILE_BYTES = 64 * 2**20
"""Largest file that is read as a whole [B]; as Python values it takes up to 30 times as much memory."""

_MISSING = object()
_EnumT = TypeVar("_EnumT", bound=enum.StrEnum)
_Path = tuple[str | int, ...]

_JSON_SPACE = re.compile(r"[ \t\n\r]*")
_BLANK = re.compile(r"[^\S\x1c-\x1f]*")  # Unicode white space, to which the four ASCII separators do not belong
_UNDECODABLE = re.compile(r'"(?:[^"\\]|\\.)*"|(NaN|-?Infinity|-?\d{4301,})')


class _RepeatedKeys(dict[str, Any]):
    """A JSON object in which some keys occur more than once; the last value is kept."""

    repeated: frozenset[str]


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) == len(pairs):
        return made
    keys = [key for key, _ in pairs]
    marked = _RepeatedKeys(made)
    marked.repeated = frozenset(key for key in made if keys.count(key) > 1)
    return marked


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


_decoder = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_refuse_constant)


def is_blank(text: str) -> bool:
    """Whether a string holds nothing but white space."""
    return _BLANK.fullmatch(text) is not None


def read_bytes(path: Path) -> bytes:
    """Content of a file. Raises: ConfigError if there is none to read, or more than ``MAX_FILE_BYTES``."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise unreadable(path, error) from None
    if len(data) > MAX_FILE_BYTES:
        hint = "split it into several files: a folder of them is one trace"
        allowed = f"{MAX_FILE_BYTES} bytes"
        raise ConfigError("", problem="the file is too large", allowed=allowed, where=str(path), hint=hint)
    return data


def row_objects(path: Path) -> Iterator[tuple[int, Fields]]:
    """(line number, object) of each line of a row format; blank lines are skipped and keep their number.

    Raises: ConfigError if a line is not one JSON object.
    """
    try:
        file = path.open("rb")
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None
    with file:
        for line, data in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), start=1):
            if len(data) > MAX_LINE_BYTES:
                problem, allowed = "the line is too long", f"{MAX_LINE_BYTES} bytes"
                raise ConfigError("", problem=problem, allowed=allowed, where=f"{path}:{line}")
            text = TraceText.decode(str(path), data, line)
            if is_blank(text.text):
                continue
            row, *more = text.objects()
            if more:
                raise more[0].error(problem="a second object", allowed="one object on a line")
            yield line, row


def no_rows(path: Path) -> ConfigError:
    """What to raise for a file of a row format that has none."""
    return ConfigError("", problem="the file holds no rows", allowed="one JSON object on a line", where=f"{path}:1")


def unreadable(path: Path, error: OSError | ValueError) -> ConfigError:
    """What to raise when a file cannot be opened or read; ValueError is what a path with a NUL gives."""
    reason = error.strerror if isinstance(error, OSError) else error
    return ConfigError("", problem=f"cannot be read ({reason})", allowed="a readable file", where=str(path))


@attrs.define(slots=True, eq=False)
class TraceText:
    """Text of a trace file, or of one of its lines.

    Attributes:
        file: name of the file, for messages.
        text: the characters.
        first_line: number of the text's first line in the file, from 1.
    """

    file: str
    text: str
    first_line: int = 1
    _known_line: tuple[int, int] | None = attrs.field(init=False, default=None)

    @classmethod
    def decode(cls, file: str, data: bytes, first_line: int = 1) -> TraceText:
        """Raises: ConfigError if ``data`` is not UTF-8."""
        try:
            return cls(file, data.decode(), first_line)
        except UnicodeDecodeError as error:
            line = first_line + data.count(b"\n", 0, error.start)
            got = data[error.start : error.end]
            raise ConfigError("", problem="not UTF-8", got=got, where=f"{file}:{line}") from None

    def objects(self) -> Iterator[Fields]:
        """The JSON objects in the text, one after the other, with any white space between them."""
        at = self._skip_space(0)
        while at < len(self.text):
            value, end = self._value(at)
            if not isinstance(value, dict):
                raise ConfigError("", got=value, allowed="a JSON object", where=self.where(at))
            yield Fields(self, at, (), value)
            at = self._skip_space(end)

    def where(self, offset: int) -> str:
        """``file:line`` of a character. Asked for ascending offsets, it looks at the text once."""
        at, line = self._known_line or (0, self.first_line)
        if at > offset:
            at, line = 0, self.first_line
        line += self.text.count("\n", at, offset)
        self._known_line = (offset, line)
        return f"{self.file}:{line}"

    def locate(self, at: int, path: _Path) -> int:
        """Offset of the value at ``path`` inside the JSON value at ``at``, or of the object that lacks a key of it."""
        text = self.text
        for step in path:
            container = at
            at = self._skip_space(at + 1)
            index = 0
            while text[at] not in "]}":
                key: str | int = index
                if isinstance(step, str):
                    key, at = _decoder.raw_decode(text, at)
                    at = self._skip_space(self._skip_space(at) + 1)
                if key == step:
                    break
                at = self._skip_space(_decoder.raw_decode(text, at)[1])
                at = self._skip_space(at + 1) if text[at] == "," else at
                index += 1
            else:
                return container
        return at

    def _skip_space(self, at: int) -> int:
        match = _JSON_SPACE.match(self.text, at)
        return match.end() if match else at

    def _value(self, at: int) -> tuple[Any, int]:
        try:
            return _decoder.raw_decode(self.text, at)
        except json.JSONDecodeError as error:
            bad = min(error.pos, len(self.text.rstrip()))  # text that ends early is at fault where it ends
            column = bad - self.text.rfind("\n", 0, bad)
            problem = f"not JSON: {error.msg} at column {column}"
            raise ConfigError("", problem=problem, where=self.where(bad)) from None
        except RecursionError:
            raise ConfigError("", problem="values are nested too deeply", where=self.where(at)) from None
        except ValueError:  # a constant that JSON lacks, or an integer too long to convert
            found = next((match for match in _UNDECODABLE.finditer(self.text, at) if match[1]), None)
            where = self.where(found.start() if found else at)
            got = found[1][:40] if found else "a number"
            raise ConfigError("", got=got, allowed="a JSON number of at most 4300 digits", where=where) from None


@attrs.frozen(slots=True, eq=False)
class Fields:
    """One JSON object of a trace and where it stands. Unknown keys are never looked at.

    A field may have several spellings; exactly one of them may be given, once.

    Attributes:
        text: the text it was read from.
        at: offset of the outermost JSON value it belongs to.
        path: way from there to this object.
        values: its members.
    """

    text: TraceText
    at: int
    path: _Path
    values: dict[str, Any]

    @property
    def where(self) -> str:
        """``file:line`` of this object."""
        return self.text.where(self.text.locate(self.at, self.path))

    def error(self, *steps: str | int, **details: Any) -> ConfigError:
        """The refusal of a member (or, without ``steps``, of this object). ``details`` as in ``ConfigError``."""
        path = (*self.path, *steps)
        field = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).removeprefix(".")
        try:
            return ConfigError(field, where=self.text.where(self.text.locate(self.at, path)), **details)
        except RecursionError:  # a value that could just be decoded, but not be rendered or skipped from down here
            return ConfigError(field, where=self.text.where(self.at), problem="values are nested too deeply")

    def given(self, *names: str) -> bool:
        """Whether a field is there, be it null."""
        return self._spelling(names) is not None

    def present(self, *names: str) -> bool:
        """Whether a field is there and not null."""
        name = self._spelling(names)
        return name is not None and self.values[name] is not None

    def integer(self, *names: str, low: int = 0, high: int = U64_MAX) -> int:
        name, value = self._member(names)
        if type(value) is not int or not low <= value <= high:
            raise self._wrong(name, got=value, allowed=f"an integer from {low} to {high}")
        return value

    def number(self, *names: str, low: float = 0.0, high: float = sys.float_info.max) -> float:
        name, value = self._member(names)
        if type(value) not in (int, float) or not low <= value <= high:
            raise self._wrong(name, got=value, allowed=f"a number from {low:g} to {high:g}")
        return float(value)

    def string(self, *names: str) -> str:
        name, value = self._member(names)
        return self._checked_string(value, name)

    def name(self, *names: str) -> str:
        """A string that is not blank."""
        name, value = self._member(names)
        return self._checked_name(value, name)

    def one_of(self, field: str, choices: type[_EnumT]) -> _EnumT:
        name, value = self._member((field,))
        try:
            return choices(value)
        except ValueError:
            raise self._wrong(name, got=value, allowed=", ".join(choices)) from None

    def integers(self, field: str, *, high: int = U64_MAX) -> tuple[int, ...]:
        values = self._list(field)
        if values and (set(map(type, values)) != {int} or min(values) < 0 or max(values) > high):
            index = next(i for i, value in enumerate(values) if type(value) is not int or not 0 <= value <= high)
            raise self.error(field, index, got=values[index], allowed=f"an integer from 0 to {high}")
        return tuple(values)

    def numbers(self, field: str, *, high: float = sys.float_info.max) -> tuple[float, ...]:
        values = self._list(field)
        for index, value in enumerate(values):
            if type(value) not in (int, float) or not 0.0 <= value <= high:
                raise self.error(field, index, got=value, allowed=f"a number from 0 to {high:g}")
        return tuple(map(float, values))

    def strings(self, field: str) -> tuple[str, ...]:
        return tuple(self._checked_string(value, field, index) for index, value in enumerate(self._list(field)))

    def names(self, field: str) -> tuple[str, ...]:
        return tuple(self._checked_name(value, field, index) for index, value in enumerate(self._list(field)))

    def child(self, field: str) -> Fields:
        name, value = self._member((field,))
        return self._checked_child(value, name)

    def children(self, field: str) -> list[Fields]:
        return [self._checked_child(value, field, index) for index, value in enumerate(self._list(field))]

    def _spelling(self, names: tuple[str, ...]) -> str | None:
        found = [name for name in names if name in self.values]
        if len(found) > 1:
            raise self.error(found[1], problem=f"is another spelling of {found[0]}", allowed="one of the two")
        if found and isinstance(self.values, _RepeatedKeys) and found[0] in self.values.repeated:
            raise self.error(found[0], problem="given more than once", got=self.values[found[0]], allowed="once")
        return found[0] if found else None

    def _member(self, names: tuple[str, ...]) -> tuple[str, Any]:
        """Spelling and value; ``_MISSING``, which no check lets pass, when it is not there."""
        name = self._spelling(names)
        return (names[0], _MISSING) if name is None else (name, self.values[name])

    def _wrong(self, *steps: str | int, got: object, allowed: str) -> ConfigError:
        if got is _MISSING:
            return self.error(*steps, problem="missing", allowed=allowed)
        return self.error(*steps, got=got, allowed=allowed)

    def _list(self, field: str) -> list[Any]:
        name, value = self._member((field,))
        if not isinstance(value, list):
            raise self._wrong(name, got=value, allowed="a list")
        return value

    def _checked_string(self, value: object, *steps: str | int) -> str:
        if not isinstance(value, str):
            raise self._wrong(*steps, got=value, allowed="a string")
        if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
            raise self.error(*steps, got=value, allowed="a string without unpaired surrogates")
        return value

    def _checked_name(self, value: object, *steps: str | int) -> str:
        text = self._checked_string(value, *steps)
        if is_blank(text):
            raise self.error(*steps, got=text, allowed="a string that is not blank")
        return text

    def _checked_child(self, value: object, *steps: str | int) -> Fields:
        if not isinstance(value, dict):
            raise self._wrong(*steps, got=value, allowed="a JSON object")
        return Fields(self.text, self.at, (*self.path, *steps), value)
