"""What a run folder holds, by name. Apart from ``run``, so that those who only read logs need not load what runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

LOG_NAME: Final = "events.g2log"
REPORT_NAME: Final = "report.json"
ROWS_NAME: Final = "requests.jsonl"


def log_file(path: Path) -> Path:
    """The event log that a path means: itself, or the one in a run folder."""
    return path / LOG_NAME if os.path.isdir(path) else path  # noqa: PTH112 - unlike Path's, takes any path
