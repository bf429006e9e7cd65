"""Plain classes do what attrs classes did for those who use them, and each is written out as it should be."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any, Final

import pytest

from g2sim.actors.handoff import actor as _handoff  # noqa: F401  # it knows the others
from g2sim.bus.plain import Plain, attribute_names
from g2sim.bus.record import Record
from g2sim.scenarios import run as _run  # noqa: F401

PLAIN = [cls for cls in Plain.__subclasses__() if cls.__module__.startswith("g2sim.")]


class Pair(Plain):
    __slots__ = ("left", "right")

    def __init__(self, left: Any, right: Any = None) -> None:
        self.left: Final = left
        self.right: Final = right


class Other(Plain):
    __slots__ = ("left", "right")

    def __init__(self, left: Any, right: Any) -> None:
        self.left: Final = left
        self.right: Final = right


def test_equal_are_those_of_one_class_with_equal_values() -> None:
    assert Pair(1, "a") == Pair(left=1, right="a")
    assert hash(Pair(1, "a")) == hash(Pair(1, "a"))
    assert Pair(1, "a") != Pair(1, "b")
    assert Pair(1, "a") != Pair("a", 1)
    assert Pair(1, "a") != Other(1, "a")
    assert Pair(1) != (1, None)
    assert len({Pair(1), Pair(1), Pair(2), Other(1, None)}) == 3


def test_repr_names_the_attributes() -> None:
    assert repr(Pair(1, Pair("a"))) == "Pair(left=1, right=Pair(left='a', right=None))"
    assert repr(Record(1.5, "router", 7, None)) == "Record(cause=7, event=None, source='router', time_ms=1.5)"


def test_there_are_plain_classes() -> None:
    assert len(PLAIN) > 20


@pytest.mark.parametrize("cls", PLAIN, ids=lambda cls: cls.__qualname__)
def test_each_is_written_out_as_it_should_be(cls: type[Any]) -> None:
    """``__slots__`` and the arguments are the same names, and ``self.x`` is set to ``x``, once, as ``Final``."""
    arguments = list(inspect.signature(cls).parameters)
    assert attribute_names(cls) == sorted(arguments)
    made = ast.parse(textwrap.dedent(inspect.getsource(cls.__init__)))
    function = made.body[0]
    assert isinstance(function, ast.FunctionDef)
    assert [ast.unparse(line) for line in function.body] == [f"self.{name}: Final = {name}" for name in arguments]
    values = {name: object() for name in arguments}
    item = cls(**values)
    assert {name: getattr(item, name) for name in arguments} == values
    assert not hasattr(item, "__dict__")
