"""Reading scenario text: what is refused, where errors are said to be, and that hostile text is cheap to refuse."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from g2sim.bus.errors import ConfigError
from g2sim.scenarios.yaml_source import (
    MAX_DEPTH,
    MAX_FILE_BYTES,
    MAX_VALUES,
    Document,
    Place,
    dotted,
    read_file,
    read_json,
    read_yaml,
)


def yaml_error(text: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        read_yaml(text, "s.yaml")
    return caught.value


def json_error(text: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        read_json(text, "s.json")
    return caught.value


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGE_BOMB = "a: &a {k0: 1, k1: 1, k2: 1, k3: 1}\n" + "".join(
    f"{new}: &{new} {{<<: [{', '.join([f'*{old}'] * 10)}]}}\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("", None, "empty"),
        ("# only a comment\n", None, "empty"),
        ("---\n...\n", 2, "one mapping"),
        ("- a\n- b\n", 1, "one mapping"),
        ("just text\n", 1, "one mapping"),
        ("a: 1\n---\nb: 2\n", 2, "second YAML document"),
        ("a: 1\nb:\n  c: 1\n  d: 2\n  c: 3\n", 5, "key 'c' is given twice; first on line 3"),
        ("a: 1\n'a': 2\n", 2, "given twice; first on line 1"),
        ("a: {b: 1, b: 1}\n", 1, "given twice"),
        ("a: 1\n1: 2\n", 2, "a key must be text, got 1"),
        ("a: 1\nnull: 2\n", 2, "a key must be text, got None"),
        ("on: 2\n", 1, "YAML reads the bare word on as a boolean"),
        ("a: 1\n? [x, y]\n: 2\n", 2, "a key must be text, got a mapping or list"),
        ("? {x: y}\n: 2\n", 1, "a key must be text, got a mapping or list"),
        ("a: *b\n", 1, "alias *b without an anchor before it"),
        ("a: &a\n  - *a\n", 2, "alias *a inside its own anchor"),
        ("a: &a {<<: *a}\n", 1, "alias *a inside its own anchor"),
        ("a: {<<: 3}\n", 1, "merges mappings only"),
        ("b: &b {c: 1}\na:\n  <<: *b\n  <<: *b\n", 4, "key '<<' is given twice; first on line 3"),
        ("a: !!python/object/apply:os.getcwd []\n", 1, "not allowed"),
        ("a: !!python/name:os.getcwd x\n", 1, "not allowed"),
        ("a: !!python/none\n", 1, "not allowed"),
        ("a: !custom 3\n", 1, "not allowed"),
        ("a: !!binary aGk=\n", 1, "not allowed"),
        ("a: !!set {x}\n", 1, "not allowed"),
        ("a: !!omap [x: 1]\n", 1, "not allowed"),
        ("a: !!int x\n", 1, "not a value of type int"),
        ("a: !!int ''\n", 1, "not a value of type int"),
        ("a: !!float x\n", 1, "not a value of type float"),
        ("a: !!bool maybe\n", 1, "not a value of type bool"),
        ("a: 1\nb: 2024-01-31\n", 2, "as a date; put it in quotes"),
        ("a: =\n", 1, "not allowed"),
        ("a: 010\n", 1, "octal or base-60"),
        ("a: 1:30\n", 1, "octal or base-60"),
        ("a: 1:30.5\n", 1, "octal or base-60"),
        (f"a: {'9' * 5000}\n", 1, "not a value of type int"),
        ("a: [1, 2\n", 2, "not valid YAML"),
        ("a: 1\n b: 2\n", 2, "not valid YAML"),
        ("a:\n\t- 1\n", 2, "not valid YAML"),
        ("a: 'open\n", 2, "not valid YAML"),
        ("a: %x\n", 1, "not valid YAML"),
        ("a: \x00\n", None, "not valid YAML"),
        ("a: \x07\n", None, "not valid YAML"),
        (BOMB, 5, f"more than {MAX_VALUES} values"),
        (MERGE_BOMB, 5, f"more than {MAX_VALUES} values"),
        (f"a: [{'1,' * MAX_VALUES}]\n", 1, f"more than {MAX_VALUES} values"),
        (f"a: {'[' * 100_000}\n", 1, f"nested more than {MAX_DEPTH} deep"),
        ("- " * 100_000 + "\n", 1, f"nested more than {MAX_DEPTH} deep"),
        ("? " * 100_000 + "\n", 1, f"nested more than {MAX_DEPTH} deep"),
        ("{a: " * 100_000 + "\n", 1, f"nested more than {MAX_DEPTH} deep"),
        (
            "a: &a [[[[[[[[[[x]]]]]]]]]]\nb: &b [[[[[[[[[[*a]]]]]]]]]]\nc: [[[[[[[[[[[[*b]]]]]]]]]]]]\n",
            3,
            "nested more",
        ),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_bad_yaml_is_refused_with_its_line(text: str, line: int | None, said: str) -> None:
    error = yaml_error(text)
    assert said in str(error)
    assert error.where == ("s.yaml" if line is None else f"s.yaml:{line}")


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("", 1, "not valid JSON"),
        ("[1]", 1, "one mapping"),
        ("3", 1, "one mapping"),
        ('{"a": 1,\n "b": {"c": 1,\n "c": 2}}', 3, "key 'c' is given twice; first on line 2"),
        ('{"a": 1,\n}', 2, "not valid JSON"),
        ("{'a': 1}", 1, "not valid JSON"),
        ('{"a": 1} {"b": 2}', 1, "not valid JSON"),
        (f'{{"a": {"9" * 5000}}}', None, "not valid JSON"),
        (f'{{"a": {"[" * 100_000}', None, "nested more than"),
        (f'{{"a": {"[" * 40}{"]" * 40}}}', 1, "nested more than"),
        (f'{{"a": [{",".join("1" * MAX_VALUES)}]}}', 1, f"more than {MAX_VALUES} values"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_bad_json_is_refused_with_its_line(text: str, line: int | None, said: str) -> None:
    error = json_error(text)
    assert said in str(error)
    assert error.where == ("s.json" if line is None else f"s.json:{line}")


@pytest.mark.parametrize(
    "text",
    [BOMB, MERGE_BOMB, "- " * 100_000, "[" * 200_000, "a: " + "x\n " * 80_000],
    ids=["aliases", "merges", "block depth", "flow depth", "long text"],
)
def test_hostile_yaml_is_dealt_with_at_once(text: str) -> None:
    """The bound is generous because the machine is shared; without limits these take minutes or all memory."""
    start = time.process_time()
    with contextlib.suppress(ConfigError):
        read_yaml(text, "s.yaml")
    assert time.process_time() - start < 5.0


def test_an_error_of_yaml_itself_never_shows() -> None:
    """Random damage to a valid file gives a document or a ConfigError."""
    text = "a: &x {b: [1, 2.5, 'three', \"four\"], c: no}\nd: *x\ne:\n  - <<: *x\n    f: |\n      text\n"
    stream = random.Random(7)
    for _ in range(1500):
        at, length = stream.randrange(len(text)), stream.randrange(4)
        damage = "".join(stream.choice(":-[]{}&*!|>'\"%@`#,?\n\t xa0\\\x85\ufeff\ud800") for _ in range(length))
        damaged = text[:at] + damage + text[at + stream.randrange(4) :]
        for read in (read_yaml, read_json):
            with contextlib.suppress(ConfigError):
                read(damaged, "s")


def test_no_code_runs(tmp_path: Path) -> None:
    made = tmp_path / "made"
    for tag in ("python/object/apply:os.mkdir", "python/object/new:os.mkdir"):
        yaml_error(f"a: !!{tag} ['{made}']\n")
    assert not made.exists()


def test_every_key_and_item_has_the_line_on_which_it_stands() -> None:
    text = "\n".join(
        [
            "# a comment",
            "engine:",
            "  workers: {aggregated: {",
            "    a: 1}}",
            "list:",
            "- x",
            "-",
            "  y",
            "long: >",
            "  text",
            "  more",
            "last: 'quoted'",
        ]
    )
    document = read_yaml(text, "s.yaml")
    lines = {dotted(path): place.line for path, place in document.places.items()}
    assert lines == {
        "engine": 2,
        "engine.workers": 3,
        "engine.workers.aggregated": 3,
        "engine.workers.aggregated.a": 4,
        "list": 5,
        "list[0]": 6,
        "list[1]": 8,
        "long": 9,
        "last": 12,
    }
    assert document.places["last",] == Place(12, None)
    assert document.places["engine", "workers", "aggregated", "a"].text == "1"
    assert document.where(("engine", "workers", "aggregated", "b", "c")) == "s.yaml:3"
    assert document.where(("other",)) == "s.yaml"


def test_json_has_lines_too() -> None:
    document = read_json('{"a": {"b":\n [1,\n\n {"c": "d\\n\\"}{"}]},\n "e": []}', "s.json")
    assert document.values == {"a": {"b": [1, {"c": 'd\n"}{'}]}, "e": []}
    lines = {dotted(path): place.line for path, place in document.places.items()}
    assert lines == {"a": 1, "a.b": 1, "a.b[0]": 2, "a.b[1]": 4, "a.b[1].c": 4, "e": 5}


def test_values_that_yaml_11_reads_as_everybody_expects() -> None:
    text = "a: 1_000\nb: 0x10\nc: 1.5e+3\nd: .inf\ne: ~\nf: 'no'\ng: no\nh: 1e3\ni: -0\nj: 0b11\nk: !!str 12\nl: '<<'\n"
    read = [1000, 16, 1500.0, math.inf, None, "no", False, "1e3", 0, 3, "12", "<<"]
    assert read_yaml(text, "s").values == dict(zip("abcdefghijkl", read, strict=True))


def test_aliases_and_merges_expand_and_own_keys_win() -> None:
    text = "base: &b {x: 1, y: 2}\nmore: &m {y: 3, z: 4}\na: *b\nc:\n  y: 5\n  <<: [*b, *m]\n'<<': 7\n"
    document = read_yaml(text, "s")
    assert document.values["a"] == {"x": 1, "y": 2}
    assert document.values["c"] == {"y": 5, "x": 1, "z": 4}
    assert document.values["<<"] == 7
    assert document.places["c", "z"].line == 2
    assert document.places["c", "y"].line == 5


def test_an_anchor_can_be_given_anew() -> None:
    assert read_yaml("a: &x 1\nb: *x\nc: &x 2\nd: *x\n", "s").values == {"a": 1, "b": 1, "c": 2, "d": 2}


def test_as_many_values_and_levels_as_the_bounds_say_are_read() -> None:
    """Each key and each value counts, and so do the mapping and the list."""
    assert len(read_yaml(f"a: [{'1,' * (MAX_VALUES - 3)}]\n", "s").values["a"]) == MAX_VALUES - 3
    yaml_error(f"a: [{'1,' * (MAX_VALUES - 2)}]\n")
    read_json(f'{{"a": [{",".join("1" * (MAX_VALUES - 2))}]}}', "s")
    json_error(f'{{"a": [{",".join("1" * (MAX_VALUES - 1))}]}}')
    for mapping in (False, True):
        opened, closed = ('{"b":', "}") if mapping else ("[", "]")
        within, beyond = (f'{{"a": {opened * depth}1{closed * depth}}}' for depth in (MAX_DEPTH - 1, MAX_DEPTH))
        read_json(within, "s")
        json_error(beyond)
        read_yaml(within, "s")
        yaml_error(beyond)


def test_aliases_count_with_all_that_they_stand_for() -> None:
    """The list of ten counts eleven; each alias of it counts eleven more."""
    text = f"a: &a [{'1,' * 10}]\nb: [{{}}]\n"
    room = (MAX_VALUES - 15) // 11
    read_yaml(text.format("*a," * room), "s")
    yaml_error(text.format("*a," * (room + 1)))
    inner = MAX_DEPTH // 2
    text = f"a: &a {'[' * inner}1{']' * inner}\nb: {{}}\n"
    outer = MAX_DEPTH - 1 - inner
    read_yaml(text.format("[" * outer + "*a" + "]" * outer), "s")
    yaml_error(text.format("[" * (outer + 1) + "*a" + "]" * (outer + 1)))


SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5))
TREES = st.dictionaries(
    st.text(max_size=5),
    st.recursive(
        SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner), max_leaves=8
    ),
    max_size=4,
)


@given(TREES)
def test_reads_what_the_ordinary_readers_read(values: dict[str, Any]) -> None:
    text = json.dumps(values, indent=1)
    assert read_json(text, "s").values == values
    dumped = yaml.safe_dump(values, allow_unicode=False)
    assert read_yaml(dumped, "s").values == yaml.safe_load(dumped)


class TestFiles:
    def test_what_cannot_be_read(self, tmp_path: Path) -> None:
        (tmp_path / "folder").mkdir()
        for name in ("missing.yaml", "folder", "nul\0.yaml"):
            with pytest.raises(ConfigError, match="cannot read the scenario") as caught:
                read_file(tmp_path / name)
            assert caught.value.where == str(tmp_path / name)

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
    def test_a_file_without_permission(self, tmp_path: Path) -> None:
        path = tmp_path / "s.yaml"
        path.write_text("a: 1")
        path.chmod(0)
        with pytest.raises(ConfigError, match="Permission denied"):
            read_file(path)

    def test_too_large(self, tmp_path: Path) -> None:
        path = tmp_path / "s.yaml"
        path.write_bytes(b"a: 1\n#" + b"x" * (MAX_FILE_BYTES - 6))
        assert read_file(path).values == {"a": 1}
        path.write_bytes(b"a: 1\n#" + b"x" * (MAX_FILE_BYTES - 5))
        with pytest.raises(ConfigError, match=f"too large; allowed: '?{MAX_FILE_BYTES} bytes"):
            read_file(path)

    def test_endless(self) -> None:
        with pytest.raises(ConfigError, match="too large"):
            read_file(Path("/dev/zero"))

    def test_not_text(self, tmp_path: Path) -> None:
        path = tmp_path / "s.yaml"
        path.write_bytes(b"a: 1\nb: \xff\n")
        with pytest.raises(ConfigError, match="not UTF-8") as caught:
            read_file(path)
        assert caught.value.where == f"{path}:2"

    def test_a_byte_order_mark_is_no_key(self, tmp_path: Path) -> None:
        for name, text in (("s.yaml", "a: 1"), ("s.json", '{"a": 1}')):
            (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
            assert read_file(tmp_path / name).values == {"a": 1}

    def test_the_name_tells_json_from_yaml(self, tmp_path: Path) -> None:
        for name, read in (("s.JSON", 1000.0), ("s.yaml", "1e3"), ("s.yml", "1e3"), ("s", "1e3")):
            (tmp_path / name).write_text('{"a": 1e3}')
            assert read_file(tmp_path / name).values == {"a": read}


def test_odd_keys_are_quoted_and_cut_in_messages() -> None:
    assert dotted(("a", 0, "b-c_1")) == "a[0].b-c_1"
    assert dotted(("a b", "\n\x1b[31m", "x" * 100)) == r"'a b'.'\n\x1b[31m'." + "'" + "x" * 56 + "..."


def test_values_from_a_program_have_no_place() -> None:
    document = Document(values={"a": {"b": 1}})
    assert document.where(("a", "b")) is None
    assert document.raw(("a", "b")) == 1
    assert document.raw(("a", "c")) is ...
    assert document.raw(("a", "b", "c")) is ...
