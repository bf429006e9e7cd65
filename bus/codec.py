"""Values as bytes: the dialect of msgpack that the event log is written in.

Owns: which values may be written, and the refusal of all others at the moment of writing, with the place of the
value inside what was written. What passes comes back bit for bit, with lists turned into tuples.
Refuses to know: events, frames, files.

Allowed: None, booleans, integers of -2**63 .. 2**64-1, finite floats, strings, bytes (kept apart from strings),
tuples and lists, and dicts with string keys, nested up to ``MAX_DEPTH``. A member of a string, integer or float
enumeration, or any other subclass of a scalar type, is written as its plain value.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from types import FunctionType
from typing import Any, Final

import msgpack
import msgspec

from g2sim.bus.errors import ProtocolError, shorten

MAX_DEPTH: Final = 128
"""Most levels of arrays and maps in one encoded value, the outermost included. msgpack itself stops at 511."""

INT_MIN: Final = -(2**63)
INT_MAX: Final = 2**64 - 1

_PLAIN: Final = frozenset((type(None), bool, int, float, str, bytes))
_PLAIN_OR_TUPLE: Final = _PLAIN | {tuple}
_PLAIN_BUT_FLOAT: Final = _PLAIN - {float}
_pack: Final = msgpack.Packer().pack
pack_plain: Final = msgspec.msgpack.Encoder().encode
"""As ``encode``, three times as fast, for what ``AlikeTuples`` has proven. It takes much else that must be refused."""
# A float64 is the byte 0xcb and eight big-endian bytes, and an exponent of all ones means infinity or NaN. Other data
# can look the same, so a match only asks for a closer look; no match proves that every float is finite.
_maybe_not_finite: Final = re.compile(rb"\xcb[\x7f\xff][\xf0-\xff]").search
LONG: Final = 16
"""Fewest items of a tuple that is worth being looked up in ``LongTuples``."""
_REMEMBERED_ITEMS: Final = 32_768
_MOST_SHAPES: Final = 64
"""Most lists of types that are expected of the values of one event type; a bound on memory."""
_INF: Final = math.inf


class ValueRefused(ProtocolError):
    """A value cannot be written.

    Args:
        path: index or key at each level, from the outside in, down to the offending value.
        problem: what is wrong with it.
    """

    def __init__(self, path: tuple[int | str, ...], problem: str) -> None:
        self.path = path
        self.problem = problem
        place = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).removeprefix(".")
        if len(place) > 80:
            place = f"{place[:77]}..."
        super().__init__(f"{place}: {problem}" if place else problem)


class PayloadRefused(ProtocolError):
    """Bytes are not exactly one value of the dialect."""


def encode(value: Any) -> bytes:
    """Bytes of one value; equal values of equal types give equal bytes.

    Quick for a tuple of scalars and of tuples of scalars, which is what records are; anything else is walked.
    Raises: ValueRefused.
    """
    if type(value) is tuple:
        for idx, item in enumerate(value):
            kind = type(item)
            if kind not in _PLAIN and not (kind is tuple and _PLAIN.issuperset(map(type, item))):
                _check_items(((idx, item),), 1)
    else:
        _check(value, 0)
    try:
        payload: bytes = _pack(value)
    except (OverflowError, ValueError) as error:  # an integer out of range, or a string that is not Unicode
        _check(value, 0)
        raise ValueRefused((), str(error)) from error
    if _maybe_not_finite(payload):
        _check(value, 0)
    return payload


# Compiled, a loop over items takes less than a third of the time of ``map``; interpreted, more than twice its time.
_LOOPS: Final = not isinstance(encode, FunctionType)


def _all_plain(items: tuple[Any, ...]) -> bool:
    """Whether all items are of plain types, and none is a float."""
    if not _LOOPS:
        return _PLAIN_BUT_FLOAT.issuperset(map(type, items))
    for item in items:
        kind = type(item)
        if kind is not int and kind not in _PLAIN_BUT_FLOAT:
            return False
    return True


def _are_of(items: tuple[Any, ...], kinds: list[type[Any]]) -> bool:
    """Whether the items are of these types, in this order."""
    if len(items) != len(kinds):
        return False
    for idx, expected in enumerate(kinds):
        kind = type(items[idx])
        if kind is not expected:
            return False
    return True


class LongTuples:
    """Long tuples as bytes, remembered for a while, as the same block hashes stand in several records.

    What is remembered has at most ``_REMEMBERED_ITEMS`` items in all.
    """

    __slots__ = ("_known", "_room")

    def __init__(self) -> None:
        # By identity: a tuple that is remembered lives on, so no other one can have its number.
        self._known: dict[int, tuple[tuple[Any, ...], msgspec.Raw]] = {}
        self._room = _REMEMBERED_ITEMS

    def encode(self, items: tuple[Any, ...]) -> msgspec.Raw | None:
        """The bytes that ``encode`` gives for a tuple of ``LONG`` items or more; None if it has to be asked."""
        known = self._known.get(id(items))
        if known is not None:
            return known[1]
        try:
            payload: bytes = pack_plain(items)
        except (OverflowError, TypeError, ValueError):
            return None
        if not _all_plain(items):
            return None
        raw = msgspec.Raw(payload)
        self._room -= len(items)
        if self._room < 0:
            self._known.clear()
            self._room = _REMEMBERED_ITEMS - len(items)
        if self._room >= 0:
            self._known[id(items)] = (items, raw)
        return raw


class AlikeTuples:
    """Proves of tuples, most of which have items of the same types as some before, that ``pack_plain`` may have them.

    Args:
        long_tuples: what encodes long tuples in them, for several of these.
    """

    __slots__ = ("_floats", "_kinds", "_known", "_long_tuples", "_tuples")

    def __init__(self, long_tuples: LongTuples) -> None:
        # Those of the last tuple; others are looked up by a key that costs more to make.
        self._kinds: list[type[Any]] = []
        self._floats: list[int] = []
        self._tuples: list[int] = []
        self._known: dict[tuple[type[Any], ...], tuple[list[int], list[int]]] = {}
        self._long_tuples = long_tuples

    def prove(self, value: tuple[Any, ...]) -> tuple[Any, ...] | list[Any] | None:
        """What ``pack_plain`` may have in its place: it gives the bytes that ``encode`` gives, or raises as below.

        None if ``encode`` has to be asked, be it for a refusal. OverflowError and ValueError mean the same.
        """
        expected = _are_of(value, self._kinds) if _LOOPS else [*map(type, value)] == self._kinds
        if not expected and not self._recall([*map(type, value)]):
            return None
        for idx in self._floats:
            number: float = value[idx]
            if not -_INF < number < _INF:
                return None
        spliced: list[Any] | None = None
        for idx in self._tuples:
            items: tuple[Any, ...] = value[idx]
            if len(items) >= LONG:
                raw = self._long_tuples.encode(items)
                if raw is None:
                    return None
                if spliced is None:
                    spliced = [*value]
                spliced[idx] = raw
            elif not (len(items) == 1 and type(items[0]) is int) and not _all_plain(items):
                return None
        return value if spliced is None else spliced

    def learn(self, value: tuple[Any, ...]) -> None:
        """Expect tuples like this one, which ``encode`` has taken, too."""
        kinds = (*map(type, value),)
        if _PLAIN_OR_TUPLE.issuperset(kinds) and len(self._known) < _MOST_SHAPES:
            floats = [idx for idx, kind in enumerate(kinds) if kind is float]
            self._known[kinds] = (floats, [idx for idx, kind in enumerate(kinds) if kind is tuple])

    def _recall(self, kinds: list[type[Any]]) -> bool:
        """Whether tuples of items of these types are expected."""
        known = self._known.get((*kinds,))
        if known is None:
            return False
        self._kinds = kinds
        self._floats, self._tuples = known
        return True


def decode(payload: bytes, *, lists: bool = False) -> Any:
    """The one value that the bytes are.

    Args:
        payload: the bytes, no more and no fewer than one value.
        lists: arrays become lists, not tuples.
    Raises: PayloadRefused.
    """
    try:
        return msgpack.unpackb(payload, use_list=lists, strict_map_key=True, ext_hook=_refuse_extension)
    except (ValueError, TypeError, RecursionError) as error:
        raise PayloadRefused(f"{type(error).__name__}: {error}") from error


def _check(value: Any, depth: int) -> None:
    """Raise ValueRefused for the first thing in ``value``, itself ``depth`` levels down, that cannot be written."""
    if value is None or isinstance(value, bool | bytes):
        return
    if isinstance(value, int):
        if not INT_MIN <= value <= INT_MAX:
            raise ValueRefused((), f"got the integer {shorten(value)}, allowed {INT_MIN}..{INT_MAX}")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueRefused((), f"got {value!r}, allowed: a finite number")
    elif isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueRefused((), f"got {ascii(value)[:80]}, which has no UTF-8 form") from None
    elif type(value) in (tuple, list):  # exact: msgpack takes some subclasses, its ExtType for one, as other things
        _check_items(enumerate(value), depth + 1)
    elif type(value) is dict:
        for key in value:
            if not isinstance(key, str):
                raise ValueRefused((), f"got the key {shorten(key)} in a dict, allowed: strings")
            _check(key, depth)
        _check_items(value.items(), depth + 1)
    else:
        raise ValueRefused((), f"got a {type(value).__qualname__}, which cannot be written")


def _check_items(items: Iterable[tuple[int | str, Any]], depth: int) -> None:
    """``_check`` every item of a container whose items are ``depth`` levels down."""
    if depth > MAX_DEPTH:
        raise ValueRefused((), f"nested deeper than {MAX_DEPTH} levels")
    for key, item in items:
        try:
            _check(item, depth)
        except ValueRefused as refused:
            raise ValueRefused((key, *refused.path), refused.problem) from None


def _refuse_extension(code: int, _data: bytes) -> Any:
    raise ValueError(f"extension type {code}")
