"""Values on disk: what the codec refuses, and that what it takes comes back exactly."""

from __future__ import annotations

import collections
import contextlib
import datetime
import enum
import math
import struct
import tracemalloc
from typing import Any
from unittest import mock

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from g2sim.bus import codec as codec_module
from g2sim.bus.codec import (
    INT_MAX,
    INT_MIN,
    LONG,
    MAX_DEPTH,
    AlikeTuples,
    LongTuples,
    PayloadRefused,
    ValueRefused,
    decode,
    encode,
    pack_plain,
)

patient = settings(deadline=None)  # the machine is shared


class Level(enum.IntEnum):
    HIGH = 7


class Place(enum.StrEnum):
    NEAR = "near"


class Large(enum.Enum):
    """Not a subclass of int, so it may not be written, although msgspec would."""

    ONE = 2**40


Pair = collections.namedtuple("Pair", "a b")

finite = st.floats(allow_nan=False, allow_infinity=False)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(INT_MIN, INT_MAX)
    | finite
    | st.text(st.characters(codec="utf-8"))
    | st.binary()
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=6)
        | st.lists(inner, max_size=6).map(tuple)
        | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=6)
    ),
    max_leaves=30,
)


def with_tuples(value: Any) -> Any:
    """The same value with every list a tuple, as it must come back."""
    if isinstance(value, list | tuple):
        return tuple(with_tuples(item) for item in value)
    if isinstance(value, dict):
        return {key: with_tuples(item) for key, item in value.items()}
    return value


def nested(depth: int, wrap: Any = lambda inner: (inner,)) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = wrap(value)
    return value


def float_of_bits(bits: int) -> float:
    return float(struct.unpack(">d", bits.to_bytes(8, "big"))[0])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        pytest.param(math.nan, "got nan, allowed: a finite number", id="nan"),
        pytest.param(("t", 1, -math.inf), "[2]: got -inf", id="inf in a record"),
        pytest.param(("t", (1, 2.5, math.inf)), "[1][2]: got inf", id="inf in a tuple"),
        pytest.param({"rates": {"low": [0.5, math.nan]}}, "rates.low[1]: got nan", id="nan in a dict"),
        pytest.param(float_of_bits(0x7FF0000000000001), "got nan", id="signalling nan"),
        pytest.param(float_of_bits(0xFFFFFFFFFFFFFFFF), "got nan", id="nan with all bits set"),
        pytest.param((1, 2**64), "[1]: got the integer 18446744073709551616, allowed", id="2^64"),
        pytest.param(("t", (0, -(2**63) - 1)), "[1][1]: got the integer -9223372036854775809", id="below int64"),
        pytest.param({1: "one"}, "got the key 1 in a dict, allowed: strings", id="int key"),
        pytest.param(("t", {"a": {2: 3}}), "[1].a: got the key 2", id="int key inside"),
        pytest.param({b"k": 1}, "got the key b'k' in a dict", id="bytes key"),
        pytest.param({None: 1}, "got the key None in a dict", id="None key"),
        pytest.param({("a",): 1}, "got the key ('a',) in a dict", id="tuple key"),
        pytest.param(("t", {1, 2}), "[1]: got a set, which cannot be written", id="set"),
        pytest.param(("t", (frozenset(),)), "[1][0]: got a frozenset", id="frozenset in a tuple"),
        pytest.param([bytearray(b"x")], "[0]: got a bytearray", id="bytearray"),
        pytest.param((memoryview(b"x"),), "[0]: got a memoryview", id="memoryview"),
        pytest.param((datetime.datetime(2025, 1, 1, tzinfo=datetime.UTC),), "[0]: got a datetime", id="datetime"),
        pytest.param((msgpack.ExtType(3, b"x"),), "[0]: got a ExtType", id="extension"),
        pytest.param((msgpack.Timestamp(3),), "[0]: got a Timestamp", id="timestamp"),
        pytest.param((Pair(1, 2),), "[0]: got a Pair", id="named tuple"),
        pytest.param((collections.OrderedDict(a=1),), "[0]: got a OrderedDict", id="dict subclass"),
        pytest.param((np.int64(3),), "[0]: got a int64", id="numpy integer"),
        pytest.param((np.zeros(2),), "[0]: got a ndarray", id="numpy array"),
        pytest.param((1 + 2j,), "[0]: got a complex", id="complex"),
        pytest.param((object,), "[0]: got a type", id="class"),
        pytest.param(("t", ("a\ud800",)), "[1][0]: got 'a\\ud800', which has no UTF-8 form", id="lone surrogate"),
        pytest.param({"\ud800": 1}, "got '\\ud800', which has no UTF-8 form", id="lone surrogate as key"),
    ],
)
def test_a_value_that_cannot_come_back_is_refused_where_it_stands(value: Any, text: str) -> None:
    """F89. Refused when written, with the way to the offending value."""
    with pytest.raises(ValueRefused) as caught:
        encode(value)
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 600, 1100])
@pytest.mark.parametrize("wrap", [lambda v: (v,), lambda v: [v], lambda v: {"k": v}], ids=["tuple", "list", "dict"])
def test_nesting_beyond_the_bound_is_refused_when_written(depth: int, wrap: Any) -> None:
    """Deeper than MAX_DEPTH is refused, whatever the containers, with a message that fits on a line."""
    for value in (nested(depth, wrap), ("tag", nested(depth - 1, wrap))):
        with pytest.raises(ValueRefused, match=f"nested deeper than {MAX_DEPTH} levels") as caught:
            encode(value)
        assert len(str(caught.value)) < 200


def test_a_value_that_contains_itself_is_refused() -> None:
    """A cycle is just very deep nesting."""
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(ValueRefused, match="nested deeper"):
        encode(cycle)


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"\x01\x02", id="two values"),
        pytest.param(b"\x92\x01", id="half an array"),
        pytest.param(b"\xdd\xff\xff\xff\xff", id="array of 4 G"),
        pytest.param(b"\xc6\xff\xff\xff\xff", id="4 GiB of bytes"),
        pytest.param(b"\xc1", id="a byte that msgpack never uses"),
        pytest.param(b"\xa2\xc3\x28", id="a string that is not UTF-8"),
        pytest.param(b"\xd4\x05\x00", id="an extension"),
        pytest.param(b"\x81\x01\x02", id="an integer key"),
        pytest.param(b"\x91" * 5000 + b"\x01", id="nesting beyond msgpack's own stack"),
    ],
)
def test_bytes_that_are_not_one_value_are_refused(payload: bytes) -> None:
    """Only whole single values are decoded, and a false length allocates nothing."""
    with pytest.raises(PayloadRefused):
        decode(payload)


@patient
@given(st.binary(max_size=40))
def test_decoding_any_bytes_gives_a_value_or_the_one_error(payload: bytes) -> None:
    """No other exception can come out of decode."""
    with contextlib.suppress(PayloadRefused):
        decode(payload)


@patient
@given(values)
def test_every_cut_of_an_encoding_is_refused(value: Any) -> None:
    """No proper prefix of an encoded value is a value."""
    payload = encode(value)
    for cut in range(len(payload)):
        with pytest.raises(PayloadRefused):
            decode(payload[:cut])


@patient
@given(values)
def test_what_is_taken_comes_back(value: Any) -> None:
    """Round trip, exact in type and in the last bit, with lists as tuples; ``lists`` gives lists instead."""
    payload = encode(value)
    assert repr(decode(payload)) == repr(with_tuples(value))
    assert encode(decode(payload, lists=True)) == payload == encode(with_tuples(value))
    assert encode(("tag", 1.5, with_tuples(value))) == b"\x93" + encode("tag") + encode(1.5) + payload


@patient
@given(st.integers(0, 2**64 - 1) | st.integers(0x7FE0 << 48, 2**63 - 1) | st.integers(0xFFE0 << 48, 2**64 - 1))
def test_every_float64_either_comes_back_bit_for_bit_or_is_refused(bits: int) -> None:
    """Bits of exponent 0x7ff are refused, alone and inside a record; all others survive, -0.0 and subnormals too."""
    value = float_of_bits(bits)
    finite_bits = bits >> 52 & 0x7FF != 0x7FF
    for whole, get in ((value, lambda out: out), (("t", (1, value)), lambda out: out[1][1])):
        if finite_bits:
            assert struct.pack(">d", get(decode(encode(whole)))) == bits.to_bytes(8, "big")
        else:
            with pytest.raises(ValueRefused):
                encode(whole)


@pytest.mark.parametrize("value", [-0.0, 0.0, 5e-324, 1.7976931348623157e308, -1.7976931348623157e308, 0.1])
def test_known_floats_survive(value: float) -> None:
    """The examples one thinks of first."""
    assert repr(decode(encode(value))) == repr(value)


@pytest.mark.parametrize(
    "value",
    [
        b"\xcb\x7f\xf0\x00",
        0xCB7FF00000000000,
        "\x7f",
        (0xCBFFF8, b"\xcb\xff\xff"),
        1.7e308,
    ],
)
def test_data_that_looks_like_an_infinity_is_not_one(value: Any) -> None:
    """The quick test for NaN looks at bytes; integers, bytes and huge floats that hold the pattern are let through."""
    assert decode(encode(value)) == value


def test_strings_and_bytes_stay_apart() -> None:
    """Same characters, different types, before and after."""
    assert repr(decode(encode(("ab", b"ab", {"k": b""}, "")))) == repr(("ab", b"ab", {"k": b""}, ""))


def test_integer_limits() -> None:
    """The whole range of uint64 and int64, booleans kept apart from 0 and 1."""
    value = (0, INT_MAX, INT_MIN, 2**63, -1, True, False)
    assert repr(decode(encode(value))) == repr(value)


@pytest.mark.parametrize("wrap", [lambda v: (v,), lambda v: [v], lambda v: {"k": v}], ids=["tuple", "list", "dict"])
def test_nesting_at_the_bound_comes_back(wrap: Any) -> None:
    """MAX_DEPTH levels are fine."""
    value = nested(MAX_DEPTH, wrap)
    assert decode(encode(value)) == with_tuples(value)


def test_members_of_scalar_enumerations_are_written_as_plain_values() -> None:
    """Their kin too: what comes back is equal to what was written, and plain."""
    value = decode(encode((Level.HIGH, Place.NEAR, {Place.NEAR: np.float64(0.1)}, (Place.NEAR,))))
    assert repr(value) == repr((7, "near", {"near": 0.1}, ("near",)))


def test_a_refusal_leaves_nothing_behind() -> None:
    """The packer is shared: after an error in the middle of a value the next value is untouched by it."""
    for bad in ((1, 2, 2**64), ("abc", "\ud800"), (1.0, math.nan)):
        with pytest.raises(ValueRefused):
            encode(bad)
        assert encode((1, "a")) == b"\x92\x01\xa1a"


anything = (
    scalars
    | st.floats()
    | st.lists(scalars | st.floats(), max_size=3).map(tuple)
    | st.sampled_from(
        [Level.HIGH, Place.NEAR, Pair(1, 2), {1, 2}, bytearray(b"x"), INT_MAX + 1, "\ud800", (Pair(1, 2),)]
    )
    | values
)


def quickly(alike: AlikeTuples, value: tuple[Any, ...]) -> bytes | None:
    """What a writer of records comes to without ``encode``."""
    plain = alike.prove(value)
    try:
        return None if plain is None else pack_plain((*plain,))
    except (OverflowError, ValueError):
        return None


@patient
@given(st.lists(st.lists(anything, max_size=3).map(tuple), min_size=1, max_size=4), st.randoms())
def test_tuples_like_one_before_are_encoded_alike_or_not_at_all(sorts: list[tuple[Any, ...]], random: Any) -> None:
    alike = AlikeTuples(LongTuples())
    for value in [random.choice(sorts) for _ in range(10)]:
        quick = quickly(alike, value)
        try:
            payload = encode(value)
        except ValueRefused:
            assert quick is None
        else:
            assert quick in (None, payload)
            alike.learn(value)


@patient
@given(st.lists(scalars | st.lists(st.integers(INT_MIN, INT_MAX), max_size=40).map(tuple), max_size=20).map(tuple))
def test_a_plain_tuple_is_encoded_once_one_like_it_was(value: tuple[Any, ...]) -> None:
    alike = AlikeTuples(LongTuples())
    alike.learn(value)
    for _ in range(2):
        assert quickly(alike, value) == encode(value)


@patient
@given(st.lists(st.lists(anything | st.lists(anything, max_size=3).map(tuple), max_size=3).map(tuple), max_size=4))
def test_what_compiled_code_finds_in_loops_interpreted_code_finds_too(values: list[tuple[Any, ...]]) -> None:
    found = []
    for loops in (False, True):
        with mock.patch.object(codec_module, "_LOOPS", loops):
            alike = AlikeTuples(LongTuples())
            for value in values:
                found.append((loops, quickly(alike, value), codec_module._all_plain(value)))
                alike.learn(value)
            found += [(loops, quickly(alike, value), True) for value in values]
    half = len(found) // 2
    assert [one[1:] for one in found[:half]] == [one[1:] for one in found[half:]]


hashes = st.integers(2**32, INT_MAX)
among_hashes = hashes | st.sampled_from([0, 2**32 - 1, -1, 0xCF, True, None, 1.5, math.inf, "\xcf" * 9, b"\xcf" * 8])
unwritable = st.sampled_from(
    [INT_MAX + 1, INT_MIN - 1, "\ud800", {1}, (1,), [1], Place.NEAR, Large.ONE, Pair(1, 2), object()]
)


@patient
@given(st.lists(hashes, min_size=LONG, max_size=40), st.lists(among_hashes | unwritable, max_size=2), st.randoms())
def test_a_long_tuple_has_the_bytes_it_always_has_or_none(many: list[int], others: list[Any], random: Any) -> None:
    """Whatever stands among the hashes, and wherever; the second time it is remembered."""
    items: list[Any] = [*many, *others]
    random.shuffle(items)
    long_tuple, long_tuples = tuple(items), LongTuples()
    raws = [long_tuples.encode(long_tuple) for _ in range(2)]
    quick = {None if raw is None else bytes(raw) for raw in raws}
    try:
        expected = encode(long_tuple)
    except ValueRefused:
        assert quick == {None}
    else:
        # A float, what is nested, or of a class of its own, is for ``encode`` to judge.
        assert quick == {expected} or (quick == {None} and {*map(type, others)} - {type(None), bool, int, str, bytes})


@pytest.mark.parametrize("count", [LONG, 65_535, 65_536])
def test_long_tuples_of_hashes_are_taken_at_every_size(count: int) -> None:
    """The bytes before the first item differ."""
    items = tuple(range(2**63, 2**63 + count))
    raw = LongTuples().encode(items)
    assert raw is not None
    assert bytes(raw) == encode(items)


def test_what_long_tuples_remember_is_bounded_and_never_another_tuple_s() -> None:
    """Tuples that live shortly, so that their numbers are used again."""
    long_tuples = LongTuples()
    tracemalloc.start()
    try:
        for first in range(2**40, 2**40 + 5000):
            items = (*range(first, first + 100),)
            assert long_tuples.encode(items) is long_tuples.encode(items)
            raw = long_tuples.encode(items)
            assert raw is not None
            assert bytes(raw) == encode(items)
        assert tracemalloc.get_traced_memory()[1] < 4 * 2**20
    finally:
        tracemalloc.stop()
