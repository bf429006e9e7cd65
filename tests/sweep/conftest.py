"""A scenario to sweep."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from sweep_values import REQUESTS, trace_file, values


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    """A scenario file with its trace."""
    trace_file(tmp_path / "t.jsonl", REQUESTS)
    path = tmp_path / "s.yaml"
    path.write_text(yaml.safe_dump(values()))
    return path
