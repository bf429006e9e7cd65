"""Makes the translation of recorded calls importable, and opens what the support table keeps closed."""

import sys
from pathlib import Path

import pytest

from g2sim.scenarios import support

sys.path.insert(0, str(Path(__file__).parents[1] / "oracle"))


@pytest.fixture
def roles_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets separate prefill and decode workers through; no matter once that rule is gone."""
    monkeypatch.setattr(support, "RULES", tuple(rule for rule in support.RULES if rule.id != "disaggregated"))
