from __future__ import annotations

from pathlib import Path

import pytest
from travel_runs import LAG_MS, write_run


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder; its routers would hear at once."""
    return write_run(tmp_path_factory.mktemp("travel"), "plain")


@pytest.fixture(scope="session")
def late(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a KV router that hears ``LAG_MS`` late."""
    return write_run(tmp_path_factory.mktemp("travel"), "late", policy="dynamo_kv", kv_event_lag_ms=LAG_MS)
