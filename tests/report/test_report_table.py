"""The table for people: what it shows, and that it fits a terminal."""

from __future__ import annotations

from typing import Any

from report_streams import (
    admitted,
    arrived,
    ended,
    fold,
    pass_ended,
    placed,
    pool_info,
    run_finished,
    run_info,
    served,
    started,
)

from g2sim.scenarios.report import render_table


def lines_of(report: dict[str, Any]) -> list[str]:
    lines = render_table(report).splitlines()
    assert max(map(len, lines)) <= 100
    return lines


def row_of(lines: list[str], *start: str) -> list[str]:
    """The cells of the table row that starts with these."""
    rows = [line.split() for line in lines]
    return next(row[len(start) :] for row in rows if row[: len(start)] == [*start])


def test_the_table_shows_where_prompt_tokens_came_from_by_rank_and_in_sum() -> None:
    stream = [
        *[(0.0, arrived(0, tokens=40)), (0.0, placed(0, worker=1))],
        *[(0.0, admitted(0, worker=1, reused=32, g1_tokens=24, host_tokens=8)), (4.0, pass_ended(0, worker=1))],
        *[(5.0, ended(0, worker=1)), (5.0, run_finished(decode=0.01))],
    ]
    info = run_info(pool_info(workers=2, host_tier=True), host_pool_blocks={"g2": 64}, shared_pool="g2")
    lines = lines_of(fold(info, *stream)[0])
    assert lines[0] == "g2sim 0  scenario test  seed 7"
    assert lines[1] == "requests: 1 released, 1 completed, 0 rejected, 0 failed, 0 canceled, 0 unfinished"
    assert row_of(lines, "agg-0/0") == ["0", "0", "0", "0", "0", "0", "0"]
    assert row_of(lines, "agg-1/0") == ["1", "40", "24", "8", "8", "0", "1"]
    assert row_of(lines, "sum") == ["1", "40", "24", "8", "8", "0", "1"]
    assert row_of(lines, "g2") == ["64", "0", "0", "0", "0", "0"]
    assert row_of(lines, "TTFT") == ["1", "4.000", "4.000", "4.000", "4.000", "4.000"]
    assert row_of(lines, "E2E") == ["1", "4.000", "4.000", "4.000", "4.000", "4.000"]
    assert "mean TTFT is [ms]: queue 0.000, host_load 0.000, restored_wait 0.000, prefill 4.000" in lines
    assert any("[tokens]" in line for line in lines)


def test_large_figures_and_long_names_fit_a_hundred_columns() -> None:
    info = run_info(
        pool_info("prefill", workers=10, dp_size=2),
        pool_info("decode", workers=120),
        name="a-scenario-with-a-name-" * 9,
        host_pool_blocks={f"g2:prefill-{worker}/{rank}": 10**8 for worker in range(10) for rank in range(2)},
    )
    report, _ = fold(info, (0.0, run_finished()))
    for entry in (*report["workers"], report["totals"]):
        entry |= {name: 10**9 - 1 for name in entry if name not in ("pool", "worker", "dp_rank")}
    summary = report["summary"]
    summary |= {name: 123456789.0123 for name in summary if name.endswith("_ms")}
    assert any("decode ranks receive prompts" in line for line in lines_of(report))


def test_a_run_that_is_not_whole_says_so() -> None:
    assert lines_of(fold(run_info(), *served(0, 1.0))[0])[1] == "the log ends before the run does: figures up to there"
    limited = fold(run_info(), *served(0, 1.0), (2.0, run_finished(limit=True)))[0]
    assert lines_of(limited)[1] == "stopped at the virtual time limit"


def test_an_agentic_run_has_one_line_of_plays() -> None:
    lines = lines_of(fold(run_info(), started("a", "b"), (0.0, run_finished()))[0])
    assert "plays: 0 completed, 0 failed, 2 incomplete" in lines


def test_a_table_without_a_host_tier_or_requests_has_no_empty_parts() -> None:
    text = render_table(fold(run_info(), (0.0, run_finished()))[0])
    (row,) = [line.split() for line in text.splitlines() if line.startswith("TTFT")]
    assert row == ["TTFT", "0", *["-"] * 5], "no sample is no 0"
    assert "G2 pool" not in text
    assert "mean TTFT" not in text
    assert text.endswith("\n")
    assert not text.endswith("\n\n")
