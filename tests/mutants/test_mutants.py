"""The list of deliberate faults fits the code. What notices them: python tests/mutants/run.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from mutants import MUTANTS, Mutant

REPO = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_text_that_a_fault_replaces_stands_there_once(mutant: Mutant) -> None:
    assert (REPO / mutant.file).read_text(encoding="utf-8").count(mutant.old) == 1


def test_there_are_enough_of_them_and_each_has_a_name() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 40
