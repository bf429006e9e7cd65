"""JSON text exactly as the reference writes it, for digests over records.

Owns: the one rendering whose bytes enter a digest. Refuses to know: which records there are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from g2sim.bus.errors import InvariantViolation

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def canonical_json(value: object) -> str:
    """Compact JSON: keys in the order given, non-ASCII characters as they are, floats as in ``float_text``."""
    if isinstance(value, float):
        return float_text(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{_encode(key)}:{canonical_json(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        if set(map(type, value)) == {int}:  # hash lists are long; the encoder renders integers alike, and faster
            return _encode(value)
        return "[" + ",".join(map(canonical_json, value)) + "]"
    return _encode(value)


def float_text(value: float) -> str:
    """The shortest decimal that reads back as ``value``, always with a fraction or an exponent.

    Plain notation from 1e-5 up to 1e16, otherwise an exponent without sign padding: ``5.0``, ``0.00001``, ``1.5e16``,
    ``1e-6``. Python's ``repr`` finds the same digits and differs below 1e-4 and in how it writes exponents.
    """
    if not math.isfinite(value):
        raise InvariantViolation(f"a digest must not hold {value!r}")
    mantissa, has_exponent, exponent = repr(value).partition("e")
    if not has_exponent:
        return mantissa
    if int(exponent) == -5:
        sign = "-" if value < 0 else ""
        return f"{sign}0.0000{mantissa.removeprefix('-').replace('.', '')}"
    return f"{mantissa}e{int(exponent)}"
