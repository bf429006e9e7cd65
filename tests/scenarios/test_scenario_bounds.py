"""How large a run a scenario may ask for: just that much is taken, one more is refused by field."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from scenario_values import Values, aggregated, changed, profiled, refusal, sessions, worker

from g2sim.scenarios.bounds import MAX_DEVICE_BLOCKS, MAX_LANES, MAX_RANKS, MAX_REQUESTS, MAX_ROUTERS
from g2sim.scenarios.schema import Scenario

AGG = "engine.workers.aggregated."
SESSION = "traffic.source.session."


def one_block() -> Values:
    return changed(aggregated(), {AGG + "kv_cache.capacity.blocks": 1, AGG + "parallelism.replicas": 1})


def two_roles() -> Values:
    roles = {"prefill": worker(), "decode": worker()}
    return changed(one_block(), {"engine.mode": "disaggregated", "engine.workers": roles})


@pytest.mark.parametrize(
    ("base", "field", "most"),
    [
        (one_block, AGG + "parallelism.replicas", MAX_RANKS),
        (one_block, AGG + "parallelism.attention_data", MAX_RANKS),
        (one_block, AGG + "kv_cache.capacity.blocks", MAX_DEVICE_BLOCKS),
        (two_roles, "engine.workers.decode.parallelism.replicas", MAX_RANKS - 2),
        (one_block, "router.replicas", MAX_ROUTERS),
        (one_block, "traffic.stop.requests", MAX_REQUESTS),
        (one_block, "traffic.source.input_tokens", 10_000_000),
        (one_block, "traffic.source.output_tokens", 10_000_000),
        (profiled, "traffic.load.agentic_lanes", MAX_LANES),
        (lambda: changed(sessions(), {SESSION + "turns": 10}), "traffic.stop.sessions", 2**27 // 2560),
        (lambda: changed(sessions(), {"traffic.stop.sessions": 1}), SESSION + "turns", 10_000_000 // 1152),
    ],
)
def test_the_most_is_taken_and_one_more_refused(base: Callable[[], Values], field: str, most: int) -> None:
    Scenario.from_dict(changed(base(), {field: most}))
    error = refusal(changed(base(), {field: most + 1}))
    assert error.field.startswith(field.rpartition(".")[0].partition("stop")[0])
    assert f"allowed: {'at most' if error.problem else 'an integer'}" in str(error)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (AGG + "timing.prefill_ms", 2.0**53 + 2),
        (AGG + "timing.decode_ms", 1e308),
        (AGG + "timing.speedup_ratio", 1e-10),
        (AGG + "timing.speedup_ratio", 1e-308),
        ("router.kv_event_lag_ms", 1e17),
        ("traffic.stop.max_virtual_time_ms", 1e300),
        ("traffic.stop.max_virtual_time_seconds", 1e14),
    ],
)
def test_times_that_would_overflow_are_refused(field: str, value: float) -> None:
    error = refusal(changed(aggregated(), {field: value}))
    assert error.field == field
    assert f"got {value!r}; allowed: a" in str(error)
