"""Small tables and scenarios, so that a test shows only what differs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from g2sim.scenarios import aic_timing

HEADER = "phase,requests,new_tokens,context_tokens,ms"
needs_aic = pytest.mark.skipif(
    find_spec("aiconfigurator_core") is None, reason="needs aiconfigurator-core: pip install 'g2sim[aic]'"
)

PREFILL_ROWS = """\
prefill,1,100,0,10
prefill,1,300,0,30
prefill,1,100,1000,14
prefill,1,300,1000,38
prefill,3,100,0,20
prefill,3,300,0,44
"""
DECODE_ROWS = """\
decode,1,,100,5
decode,1,,200,6
decode,4,,100,8
decode,4,,400,11
"""


def table_text(rows: str = PREFILL_ROWS + DECODE_ROWS) -> str:
    return f"{HEADER}\n{rows}"


def worker(timing: dict[str, Any], **cache: Any) -> dict[str, Any]:
    return {
        "kv_cache": {"block_size": 4, "capacity": {"type": "fixed", "blocks": 4096}, **cache},
        "timing": timing,
    }


def aggregated(timing: dict[str, Any], **cache: Any) -> dict[str, Any]:
    """One worker, one request at a time of 100 prompt tokens and 3 tokens of output."""
    return {
        "name": "timed",
        "engine": {"mode": "aggregated", "workers": {"aggregated": worker(timing, **cache)}},
        "traffic": {
            "source": {"type": "synthetic", "input_tokens": 100, "output_tokens": 3},
            "load": {"type": "concurrency", "concurrency": 1},
            "stop": {"requests": 2},
        },
    }


def on_qwen(values: dict[str, Any], **engine: Any) -> dict[str, Any]:
    """The same, with the model and hardware that tests use."""
    given = {"model": "Qwen/Qwen3-32B", "hardware": "h200_sxm", "backend_version": "0.24.0"}
    return {**values, "engine": {**values["engine"], **given, **engine}}


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def no_aic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if the package were not installed."""
    aic_timing.aic_pass_times.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[0] == "aiconfigurator_core"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "aiconfigurator_core", None)
    yield
    aic_timing.aic_pass_times.cache_clear()
