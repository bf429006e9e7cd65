"""The table of field cases is whole and current."""

from __future__ import annotations

from pathlib import Path

from field_table import CASES, shown_by, table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"


def test_every_case_is_shown_by_a_test() -> None:
    assert sorted(shown_by()) == list(CASES)


def test_the_page_has_the_table() -> None:
    assert table() in PAGE.read_text(encoding="utf-8"), "python tests/field/field_table.py prints it anew"
