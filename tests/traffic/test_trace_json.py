"""Checked access to trace JSON: places and the rules on keys, whatever the format."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from g2sim.actors.traffic.trace_json import Fields, TraceText, is_blank
from g2sim.bus.errors import ConfigError


def fields(text: str) -> Fields:
    (only,) = TraceText("f", text).objects()
    return only


@pytest.mark.parametrize(
    ("text", "blank"),
    [("", True), (" \t\r\n", True), ("\u00a0\u2003\x0c", True), ("\x1f", False), ("\u200b", False), (" a ", False)],
)
def test_blank_is_what_unicode_calls_white_space(text: str, blank: bool) -> None:
    assert is_blank(text) is blank


def test_lines_are_right_in_any_order_of_asking() -> None:
    text = TraceText("f", "a\nb\nc\nd", first_line=10)
    assert [text.where(offset) for offset in (6, 2, 2, 0, 4)] == ["f:13", "f:11", "f:11", "f:10", "f:12"]


VALUES = st.recursive(
    st.none() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(below for key, item in items for below in paths(item, (*path, key)))]


@given(value=st.dictionaries(st.text(max_size=3), VALUES, max_size=4), indent=st.sampled_from([None, 0, 2]))
def test_every_path_is_located(value: dict[str, Any], indent: int | None) -> None:
    """The text at the place that is found is the value that the path leads to."""
    written = "\n " + json.dumps(value, indent=indent)
    text = TraceText("f", written)
    for path in paths(value):
        target = value
        for step in path:
            target = target[step]
        at = text.locate(2, path)
        assert json.JSONDecoder().raw_decode(written, at)[0] == target


def test_a_missing_key_is_located_at_its_object() -> None:
    found = fields('{"a": 1,\n "b": {\n  "c": 2}}')
    with pytest.raises(ConfigError) as caught:
        found.child("b").integer("d")
    assert (caught.value.where, caught.value.field, caught.value.problem) == ("f:2", "b.d", "missing")
    assert caught.value.allowed == "an integer from 0 to 18446744073709551615"


def test_a_field_is_given_once_under_one_spelling() -> None:
    assert fields('{"x": 1, "x": 2, "a": 3}').integer("a", "b") == 3
    assert fields('{"b": 3}').integer("a", "b") == 3
    for text, field in (('{"a": 1, "b": 1}', "b"), ('{"b": 1, "b": 1}', "b"), ('{"b": 1, "b": null}', "b")):
        with pytest.raises(ConfigError) as caught:
            fields(text).present("a", "b")
        assert caught.value.field == field


def test_given_and_present_differ_for_null() -> None:
    found = fields('{"a": null, "b": 0}')
    assert [(found.given(name), found.present(name)) for name in "abc"] == [(True, False), (True, True), (False, False)]


def test_text_that_ends_early_is_at_fault_on_its_last_line() -> None:
    with pytest.raises(ConfigError) as caught:
        fields('{"a": [1,\n2\n\n')
    assert caught.value.where == "f:2"
    assert str(caught.value.problem).endswith("at column 2")
