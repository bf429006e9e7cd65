"""Small valid scenarios as plain values, and changes to them, so that a test shows only what differs."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from g2sim.bus.errors import ConfigError
from g2sim.scenarios import support
from g2sim.scenarios.schema import Scenario

Values = dict[str, Any]
GONE = object()
ORACLE = Path(__file__).parents[1] / "oracle"
HOST = "engine.workers.aggregated.kv_cache.host_offload"


def worker(**changes: Any) -> Values:
    made: Values = {
        "parallelism": {"replicas": 2},
        "kv_cache": {"block_size": 4, "bytes_per_token": 1000, "capacity": {"type": "fixed", "blocks": 64}},
        "timing": {"type": "fixed", "prefill_ms": 2.0, "decode_ms": 1.0},
    }
    return made | changes


def aggregated() -> Values:
    """Two workers without a host tier, synthetic requests."""
    return {
        "engine": {"mode": "aggregated", "workers": {"aggregated": worker()}},
        "traffic": {"source": {"type": "synthetic"}, "load": {"type": "concurrency"}, "stop": {"requests": 3}},
    }


def with_host(scope: str = "dp_rank_local") -> Values:
    return changed(aggregated(), {HOST: {"scope": scope, "num_host_blocks": 8}})


def traced(trace_format: str = "mooncake", load: str = "trace_timestamps") -> Values:
    source = {"type": "trace", "paths": ["t.jsonl"], "format": trace_format}
    values = changed(aggregated(), {"traffic": {"source": source, "load": {"type": load}}})
    return changed(values, {"engine.model": "m"})


def profiled() -> Values:
    control = {"agentic_lanes": 2, "agentic_snapshot": {"seed": 1}, "agentic_warmup": True, "agentic_profile": {}}
    return changed(traced("weka"), {f"traffic.load.{key}": value for key, value in control.items()})


def sessions() -> Values:
    source = {"type": "synthetic-session", "session": {}}
    traffic = {"source": source, "load": {"type": "poisson", "sessions_per_second": 2.0}, "stop": {"sessions": 3}}
    return changed(aggregated(), {"traffic": traffic})


def agentic_g2(trace_format: str = "weka") -> Values:
    return changed(traced(trace_format), {HOST: {"scope": "cluster_shared", "num_host_blocks": 8}})


def disaggregated() -> Values:
    host = {"scope": "cluster_shared", "num_host_blocks": 8}
    values = changed(aggregated(), {"engine.mode": "disaggregated", "engine.workers": {}})
    for role in ("prefill", "decode"):
        values = changed(values, {f"engine.workers.{role}": worker()})
        values = changed(values, {f"engine.workers.{role}.kv_cache.host_offload": host})
    return values


def changed(values: Values, changes: dict[str, Any]) -> Values:
    """A copy with dotted paths set; GONE takes a key away."""
    made = copy.deepcopy(values)
    for path, value in changes.items():
        *outer, last = path.split(".")
        inner = made
        for key in outer:
            inner = inner.setdefault(key, {})
        if value is GONE:
            inner.pop(last, None)
        else:
            inner[last] = copy.deepcopy(value)
    return made


def refusal(values: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        Scenario.from_dict(values)
    assert caught.value.exit_code == 2
    return caught.value


def without_rule(*ids: str) -> tuple[support.Rule, ...]:
    return tuple(rule for rule in support.RULES if rule.id not in ids)


def leaves(values: Values, path: str = "") -> Iterator[str]:
    """Dotted paths of everything that is not a mapping."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}"
