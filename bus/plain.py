"""Plain classes: values that are made so often that how they are made counts.

Such a class derives from ``Plain``, and says in ``__slots__`` and ``__init__`` what an attrs class says once. In return
it is made three times as fast, and where its module is compiled it is a native class, whose attributes compiled code
reads at once; attrs classes are left to the interpreter. When to write one: docs/architecture.md.
"""

from __future__ import annotations

from typing import Any


class Plain:
    """A value that nobody changes: equal to those of its class with equal attributes, which its repr names.

    A class that derives from it names its attributes in ``__slots__``, and sets them in ``__init__``, as ``Final``: so
    the type checker sees to it that nobody sets them again.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and attribute_values(self) == attribute_values(other)

    def __hash__(self) -> int:
        return hash((type(self), *attribute_values(self)))

    def __repr__(self) -> str:
        cls = type(self)
        values = [f"{name}={getattr(self, name)!r}" for name in attribute_names(cls)]
        return f"{cls.__qualname__}({', '.join(values)})"


def attribute_names(cls: type[Any]) -> list[str]:
    """What a plain class names in ``__slots__``, sorted. A native class has no slots, but a list of its own."""
    return sorted(cls.__slots__ if hasattr(cls, "__slots__") else cls.__mypyc_attrs__)


def attribute_values(item: Any) -> list[Any]:
    """Values of its attributes, in that order."""
    return [getattr(item, name) for name in attribute_names(type(item))]
