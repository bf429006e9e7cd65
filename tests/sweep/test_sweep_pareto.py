"""``--pareto``: what is marked is what nothing else beats, and the picture shows it."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from xml.etree import ElementTree

import pyarrow.parquet
import pytest
from cli_process import run_cli
from hypothesis import given
from hypothesis import strategies as st
from sweep_values import GPU, refused, scenario_file

from g2sim.scenarios.pareto import marked, read_goals, render_front
from g2sim.scenarios.sweep import Row, Sweep

SVG = "{http://www.w3.org/2000/svg}"
X, Y = "output_throughput_tok_s", "p99_ttft_ms"
PAIRS = st.lists(st.none() | st.tuples(*[st.integers(-4, 4)] * 2), min_size=1, max_size=12)


def sweep_of(pairs: list[tuple[float, float] | None], seeds: int = 1) -> Sweep:
    """Points 0, 1, ... with these figures in each seed."""
    rows = []
    for idx, pair in enumerate(pairs):
        values = None if pair is None else {X: float(pair[0]), Y: float(pair[1]), "imbalance": None}
        rows += [Row({"a.b": idx}, seed, values, "failed" if pair is None else None) for seed in range(seeds)]
    return Sweep(scenario="a<b", axes={"a.b": list(range(len(pairs)))}, rows=tuple(rows))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--pareto", ""], "--pareto: got ''; allowed: mean_ttft_ms, "),
        (["--pareto", "p99_ttft"], "did you mean p99_ttft_ms?"),
        (["--pareto", "++p99_ttft_ms,g1_share"], "--pareto: got '++p99_ttft_ms'"),
        (["--pareto", "p99_ttft_ms"], "two different figures"),
        (["--pareto", "p99_ttft_ms,+p99_ttft_ms"], "two different figures"),
        (["--pareto", "p99_ttft_ms,g1_share,g2_share"], "two different figures"),
        (["--pareto", "g1_share,hit_rate_unlimited"], "+hit_rate_unlimited says that more is better"),
        (["--picture", "a.svg"], "--picture: draws a Pareto front; name its two figures: --pareto X,Y"),
        (["--pareto", "g1_share,g2_share", "--picture", "a.png"], "ends in .svg"),
        (["--pareto", "g1_share,g2_share", "--picture", "a.svg", "--csv", "./a.svg"], "two outputs are the same file"),
    ],
)
def test_goals_that_are_none_are_refused(
    tmp_path: Path,
    arguments: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    scenario_file(tmp_path)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    assert said in refused(capsys, "sweep", "s.yaml", "--set", f"{GPU}=8", *arguments)
    assert sorted(tmp_path.iterdir()) == before


def test_a_sign_turns_a_goal() -> None:
    assert [goal.better for goal in read_goals(f"{X},{Y}")] == ["higher", "lower"]
    assert [goal.better for goal in read_goals(f"-{X}, +{Y}")] == ["lower", "higher"]


@given(PAIRS, st.sampled_from("+-"), st.sampled_from("+-"))
def test_a_point_is_marked_exactly_if_no_other_beats_it(
    pairs: list[tuple[int, int] | None], x_way: str, y_way: str
) -> None:
    def beats(one: tuple[int, int], other: tuple[int, int]) -> bool:
        gains = [(a - b) * (1 if way == "+" else -1) for a, b, way in zip(one, other, (x_way, y_way), strict=True)]
        return min(gains) >= 0 and max(gains) > 0

    found = marked(sweep_of(pairs), read_goals(f"{x_way}{X},{y_way}{Y}"))
    known = [pair for pair in pairs if pair is not None]
    assert list(found.on_front) == [
        None if pair is None else not any(beats(other, pair) for other in known) for pair in pairs
    ]
    picture = ElementTree.fromstring(render_front(found))
    assert len(list(picture.iter(f"{SVG}circle"))) == len(known)


def test_seeds_count_with_their_mean_and_all_of_them() -> None:
    def row(point: int, seed: int, x: float | None, y: float) -> Row:
        return Row({"p": point}, seed, {X: x, Y: y})

    rows = (
        row(0, 1, 10, 1),
        row(0, 2, 30, 3),
        row(1, 1, 20, 2),
        row(1, 2, 20, 2),
        row(2, 1, 99, 0),
        row(2, 2, None, 0),
    )
    found = marked(Sweep(scenario="a", axes={"p": [0, 1, 2]}, rows=rows), read_goals(f"{X},{Y}"))
    assert found.on_front == (True, True, True, True, None, None)
    drawn = ElementTree.fromstring(render_front(found))
    assert {circle[0].text for circle in drawn.iter(f"{SVG}circle")} == {
        f"p={point}, output 20 tokens/s, TTFT p99 2 ms" for point in (0, 1)
    }
    assert [words.text for words in drawn.iter(f"{SVG}text")].count("1") == 1


def test_the_line_is_stairs_that_leave_what_is_beaten_on_one_side() -> None:
    found = marked(sweep_of([(10.0, 1.0), (20.0, 2.0), (15.0, 3.0)]), read_goals(f"{X},{Y}"))
    drawn = ElementTree.fromstring(render_front(found))
    spots = {circle[0].text[:7]: (circle.get("cx"), circle.get("cy")) for circle in drawn.iter(f"{SVG}circle")}
    thick = [line for line in drawn.iter(f"{SVG}line") if line.get("stroke-width") == "2"]
    ends = [tuple(line.get(key) for key in ("x1", "y1", "x2", "y2")) for line in thick]
    (left, low), (right, high) = spots["b=0, ou"], spots["b=1, ou"]
    assert ends == [(right, high, left, high), (left, high, left, low)]


def test_a_picture_of_nothing_but_failures_can_be_drawn() -> None:
    found = marked(sweep_of([None, None], seeds=2), read_goals(f"{X},{Y}"))
    assert found.on_front == (None,) * 4
    assert render_front(found).endswith("</svg>\n")


def test_marks_are_in_every_form_of_the_rows_and_only_if_asked_for(tmp_path: Path) -> None:
    scenario_file(tmp_path)
    command = ("sweep", "s.yaml", "--set", f"{GPU}=5,8,64", "--seeds", 2)
    forms = ("--csv", "a.csv", "--parquet", "a.parquet", "--picture", "a.svg")
    plain = run_cli(tmp_path, *command, "--json")
    done = run_cli(tmp_path, *command, "--pareto", "g1_share,-mean_ttft_ms", *forms, "--json")
    table = run_cli(tmp_path, *command, "--pareto", "g1_share,imbalance")
    assert [run.returncode for run in (plain, done, table)] == [1, 1, 1], "5 blocks are too few"
    told = json.loads(done.stdout)
    assert told.pop("pareto") == {"g1_share": "higher", "mean_ttft_ms": "lower"}
    marks = [row.pop("pareto") for row in told["rows"]]
    assert marks[:2] == [None, None]
    assert marks[4:] == [True, True]
    assert told == json.loads(plain.stdout)
    rows = list(csv.DictReader((tmp_path / "a.csv").read_text().splitlines()))
    assert [row["pareto"] for row in rows] == [{None: "", True: "true", False: "false"}[mark] for mark in marks]
    assert [row["pareto"] for row in pyarrow.parquet.read_table(tmp_path / "a.parquet").to_pylist()] == marks
    assert len(list(ElementTree.parse(tmp_path / "a.svg").iter(f"{SVG}circle"))) == 2
    assert "imbalance" in table.stdout
    assert table.stdout.partition("\n\nAll 2 seeds")[0].splitlines()[-1].endswith("*")
