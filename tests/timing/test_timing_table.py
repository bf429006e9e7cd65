"""Tables of pass times: what is refused, where; interpolation, by hand and against an independent oracle; notes."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from timing_values import DECODE_ROWS, HEADER, PREFILL_ROWS, table_text, written

from g2sim.bus.errors import ConfigError
from g2sim.scenarios.table_timing import MAX_FILE_BYTES, WARN_FACTOR, PassTable, read_pass_table

ROW = "prefill,1,100,0,10\n"


def table(tmp_path: Path, rows: str = PREFILL_ROWS + DECODE_ROWS) -> PassTable:
    return read_pass_table(written(tmp_path / "t.csv", table_text(rows)), "t.csv")


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_pass_table(path, "t.csv")
    return str(caught.value)


# -- what is refused


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("warmup,1,100,0,10", "phase: got 'warmup'; allowed: prefill or decode"),
        (",1,100,0,10", "phase: got ''; allowed: prefill or decode"),
        ("prefill,0,100,0,10", "requests: got '0'; allowed: an integer from 1 to 2**53"),
        ("prefill,-1,100,0,10", "requests: got '-1'"),
        ("prefill,1.5,100,0,10", "requests: got '1.5'"),
        ("prefill,1_0,100,0,10", "requests: got '1_0'"),
        ("prefill,\u0661,100,0,10", "requests: got '\u0661'"),
        ("prefill,9007199254740993,100,0,10", "requests: got '9007199254740993'"),
        ("prefill,,100,0,10", "requests: got ''"),
        ("prefill,1,0,0,10", "new_tokens: got '0'; allowed: an integer from 1, one token for each request, to 2**53"),
        ("prefill,4,3,0,10", "new_tokens: got '3'; allowed: an integer from 4, one token for each request, to 2**53"),
        ("prefill,1,100,,10", "context_tokens: got ''; allowed: an integer from 0 to 2**53"),
        ("decode,1,1,100,10", "new_tokens: got '1'; allowed: nothing in a decode row"),
        ("decode,4,,3,10", "context_tokens: got '3'; allowed: an integer from 4, one token for each request, to 2**53"),
        ("prefill,1,100,0,-1", "ms: got '-1'; allowed: a finite number, 0 or more"),
        ("prefill,1,100,0,nan", "ms: got 'nan'"),
        ("prefill,1,100,0,inf", "ms: got 'inf'"),
        ("prefill,1,100,0,1e999", "ms: got '1e999'"),
        ("prefill,1,100,0,1_0", "ms: got '1_0'"),
        ("prefill,1,100,0,.", "ms: got '.'"),
        ("prefill,1,100,0,", "ms: got ''"),
        ("prefill,1,100,0", f"4 values for 5 columns; got 'prefill,1,100,0'; allowed: {HEADER}"),
        ("prefill,1,100,0,10,x", "6 values for 5 columns"),
        ('prefill,1,100,0,"10', "not a line of CSV"),
        ('prefill,1,100,0,"10"x', "not a line of CSV"),
        ("prefill,1,0100,0,11", "measured before, on line 3"),
    ],
)
def test_a_bad_row_is_refused_with_its_line_value_and_what_is_allowed(tmp_path: Path, row: str, said: str) -> None:
    """Line 5 holds it: a comment, the header, a good row and a blank line come before."""
    path = written(tmp_path / "t.csv", f"# a comment\n{HEADER}\n{ROW}\n{row}\n")
    assert refusal(path).startswith(f"{path}:5: {said}")


@pytest.mark.parametrize(
    "header",
    [
        "phase,requests,new_tokens,context_tokens",
        f"{HEADER},note",
        "phase,requests,new_tokens,context_tokens,us",
        "phase,requests,new_tokens,ms,ms",
        "prefill,1,100,0,10",
    ],
)
def test_the_first_line_must_name_each_column_once(tmp_path: Path, header: str) -> None:
    path = written(tmp_path / "t.csv", f"\n{header}\n{ROW}")
    assert refusal(path) == f"{path}:2: the first line must name the columns; got {header!r}; allowed: {HEADER}"


@pytest.mark.parametrize("text", ["", "# nothing\n", f"{HEADER}\n"])
def test_a_table_without_rows_is_refused(tmp_path: Path, text: str) -> None:
    path = written(tmp_path / "t.csv", text)
    assert refusal(path) == f"{path}: the table holds no rows"


def test_a_file_that_is_no_text_is_refused_with_the_line(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(f"{HEADER}\n".encode() + b"prefill,\xff,1,0,1\n")
    assert refusal(path) == f"{path}:2: the table is not UTF-8 text"


def test_a_file_that_cannot_be_read_or_is_too_large_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path) == f"{tmp_path}: cannot read the table: Is a directory"
    path = tmp_path / "t.csv"
    with path.open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    assert refusal(path) == f"{path}: the table is too large; allowed: {MAX_FILE_BYTES} bytes"


# -- what is taken


def test_columns_come_in_any_order_with_spaces_quotes_and_windows_line_ends(tmp_path: Path) -> None:
    header = "\ufeffms, context_tokens ,phase,new_tokens,requests"
    text = "\r\n".join([header, "# c", "", '7.5,100, decode,,"1"', "1e1,0,prefill,9,2", ""])
    made = read_pass_table(written(tmp_path / "t.csv", text), "t.csv")
    assert (made.phases, made.row_count) == (("prefill", "decode"), 2)
    assert (made.decode_ms(1, 100), made.prefill_ms(2, 9, 0)) == (7.5, 10.0)


def test_a_measured_pass_takes_its_measured_time(tmp_path: Path) -> None:
    made = table(tmp_path)
    for line in (PREFILL_ROWS + DECODE_ROWS).splitlines():
        phase, requests, new_tokens, context_tokens, ms = line.split(",")
        if phase == "prefill":
            context = int(context_tokens)
            assert made.prefill_ms(int(requests), context + int(new_tokens), context) == float(ms)
        else:
            assert made.decode_ms(int(requests), int(context_tokens)) == float(ms)
    assert made.notes() == ()


def test_between_measured_passes_times_are_linear_along_one_axis_after_the_other(tmp_path: Path) -> None:
    """One request, 200 new tokens, 500 before: 12 at 100 new tokens, 34 at 300, so 23.

    Two requests, 150 new tokens, none before: one request 15, three requests 26, so 20.5.
    Two decoding requests with 150 tokens: one request 5.5, four requests 8.5; a third of the way 6.5.
    """
    made = table(tmp_path)
    assert made.prefill_ms(1, 700, 500) == 23.0
    assert made.prefill_ms(2, 150, 0) == 20.5
    assert made.decode_ms(2, 150) == pytest.approx(6.5, rel=1e-15)
    assert made.notes() == ()


def test_below_the_first_value_times_stay_as_they_are(tmp_path: Path) -> None:
    """60 tokens count as 100; 85 as well, which is near enough to go without a note."""
    made = table(tmp_path)
    assert made.prefill_ms(1, 85, 0) == 10.0
    assert made.notes() == ()
    assert made.prefill_ms(1, 60, 0) == 10.0
    assert made.prefill_ms(1, 70, 0) == 10.0
    assert made.notes() == (
        "t.csv: prefill passes with new_tokens down to 60, measured only from 100 on: taken as at 100",
    )


def test_above_the_last_value_the_last_segment_goes_on(tmp_path: Path) -> None:
    """One request: a tenth of a millisecond a token; 375 is 1.25 times 300 and without a note, 376 is beyond."""
    made = table(tmp_path)
    assert made.prefill_ms(1, 375, 0) == 37.5
    assert made.notes() == ()
    assert made.prefill_ms(1, 376, 0) == pytest.approx(37.6, rel=1e-15)
    assert made.prefill_ms(1, 600, 0) == 60.0
    assert made.prefill_ms(1, 500, 0) == 50.0
    assert made.notes() == ("t.csv: prefill passes with new_tokens up to 600, measured only up to 300: extrapolated",)


def test_a_falling_last_segment_is_not_extended_downwards(tmp_path: Path) -> None:
    made = table(tmp_path, "decode,1,,100,9\ndecode,1,,200,7\n")
    assert made.decode_ms(1, 150) == 8.0
    assert made.decode_ms(1, 10**9) == 7.0


def test_an_axis_with_one_value_is_constant_and_noted_off_that_value(tmp_path: Path) -> None:
    """Three requests were measured without prefixes only; between one and three requests that matters."""
    made = table(tmp_path)
    assert made.prefill_ms(3, 1100, 1000) == 20.0
    assert made.prefill_ms(2, 600, 500) == (12.0 + 20.0) / 2
    assert made.notes() == (
        "t.csv: prefill passes with context_tokens up to 1000, measured only up to 0: extrapolated",
    )


def test_more_requests_than_measured(tmp_path: Path) -> None:
    """Decode at 100 tokens: 1 ms a request, so 12 ms for 8; both phases and both directions have notes of their own."""
    made = table(tmp_path)
    assert made.decode_ms(8, 100) == 12.0
    made.decode_ms(1, 10)
    made.prefill_ms(30, 300, 0)
    assert [note.split(", ")[0] for note in made.notes()] == [
        "t.csv: decode passes with context_tokens down to 10",
        "t.csv: decode passes with requests up to 8",
        "t.csv: prefill passes with requests up to 30",
    ]


@st.composite
def grids(draw: st.DrawFn) -> tuple[list[list[int]], dict[tuple[int, ...], float]]:
    """A full grid of prefill passes."""
    sizes = ((1, 4), (4, 50), (0, 60))
    axes = [sorted(draw(st.sets(st.integers(*size), min_size=1, max_size=4))) for size in sizes]
    times = st.floats(min_value=0.0, max_value=1e4)
    return axes, {point: draw(times) for point in itertools.product(*axes)}


@given(grid=grids(), shares=st.tuples(*[st.fractions(min_value=0, max_value=1)] * 3))
def test_on_a_full_grid_it_is_multilinear(
    tmp_path_factory: pytest.TempPathFactory,
    grid: tuple[list[list[int]], dict[tuple[int, ...], float]],
    shares: tuple[float, float, float],
) -> None:
    """The oracle weighs the corners of the cell by products, which is another way to say it."""
    axes, values = grid
    point = [int(axis[0] + share * (axis[-1] - axis[0])) for axis, share in zip(axes, shares, strict=True)]
    expected = 0.0
    for corner, ms in values.items():
        weight = 1.0
        for axis, at, x in zip(axes, corner, point, strict=True):
            below = max(value for value in axis if value <= x)
            above = min(value for value in axis if value >= x)
            share = (x - below) / (above - below) if above > below else 0.0
            weight *= 1.0 - share if at == below else share if at == above else 0.0
        expected += weight * ms
    rows = "".join(f"prefill,{a},{b},{c},{ms!r}\n" for (a, b, c), ms in values.items())
    made = table(tmp_path_factory.mktemp("grid"), rows)
    requests, new_tokens, prefix = point
    assert made.prefill_ms(requests, new_tokens + prefix, prefix) == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert made.notes() == ()


@given(known_tokens=st.integers(min_value=1, max_value=5000), requests=st.integers(min_value=1, max_value=50))
def test_times_are_never_negative_and_far_passes_are_noted(
    tmp_path_factory: pytest.TempPathFactory, known_tokens: int, requests: int
) -> None:
    made = table(tmp_path_factory.mktemp("far"), DECODE_ROWS)
    assert made.decode_ms(requests, known_tokens) >= 5.0
    far = requests > 4 * WARN_FACTOR or known_tokens * WARN_FACTOR < 100 or known_tokens > 400 * WARN_FACTOR
    assert not far or made.notes()
