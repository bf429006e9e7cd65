"""The ``router:`` section of a scenario: what is refused, and what comes of what is given."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from router_values import run_values

from g2sim.actors.config import TieBreak
from g2sim.bus.errors import ConfigError
from g2sim.scenarios.schema import Scenario, load_scenario


def scenario(**router: Any) -> Scenario:
    return Scenario.from_dict(run_values("t.jsonl", **router))


def refusal(**router: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        scenario(**router)
    return caught.value


@pytest.mark.parametrize(
    ("router", "field", "said"),
    [
        ({"policy": "kv"}, "router.policy", "allowed: round_robin, random"),
        ({"policy": "least_laoded"}, "router.policy", "did you mean least_loaded?"),
        ({"policy": ""}, "router.policy", "the name of a policy"),
        ({"kv_event_lag_ms": -1}, "router.kv_event_lag_ms", "a number of ms from 0 to 2**53"),
        ({"tie_break": "first"}, "router.tie_break", "lowest, random"),
        ({"options": [1]}, "router.options", "a mapping"),
        ({"options": {"x": 1}}, "router.options.x", "policy round_robin has no such option"),
        ({"policy": "dynamo_kv", "options": {"use_kv_events": False}}, "router.options.use_kv_events", "allowed: true"),
        ({"policy": "dynamo_kv", "options": {"a.b": 1}}, "router.options.'a.b'", "no such option"),
        ({"overlap_score_credit": 1.0}, "router.overlap_score_credit", "only with policy dynamo_kv"),
        ({"policy": "kv_router", "temperature": -1}, "router.temperature", "0 or more"),
        (
            {"policy": "kv_router", "temperature": 1, "options": {"router_temperature": 1}},
            "router.temperature",
            "does not go with options.router_temperature",
        ),
        ({"policy": "kv_router", "prefill_load_model": {"type": "ais"}}, "router.prefill_load_model", "not supported"),
        ({"polcy": "random"}, "router.polcy", "did you mean policy?"),
    ],
)
def test_what_is_wrong_is_named(router: dict[str, Any], field: str, said: str) -> None:
    error = refusal(**router)
    assert error.field == field
    assert said in str(error)


def test_a_bad_option_in_a_file_is_named_with_its_line(tmp_path: Any) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(
        "engine: {workers: {aggregated: {kv_cache: {capacity: {type: fixed, blocks: 8}},\n"
        "  timing: {type: fixed, prefill_ms: 1, decode_ms: 1}}}}\n"
        "router:\n"
        "  policy: dynamo_kv\n"
        "  options:\n"
        "    host_cache_hit_weight: 2\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_scenario(path)
    assert str(caught.value).startswith(f"{path}:6: router.options.host_cache_hit_weight: got 2; allowed: ")


def test_the_defaults_are_rotation_without_lag() -> None:
    router = scenario().deployment.router
    assert (router.policy, router.kv_event_lag_ms, router.tie_break, dict(router.options)) == (
        "round_robin",
        0.0,
        TieBreak.LOWEST,
        {},
    )


def test_the_references_names_and_shortcuts_become_ours() -> None:
    router = scenario(
        policy="kv_router", overlap_score_credit=0.5, temperature=2, options={"router_queue_policy": "wspt"}
    ).deployment.router
    assert router.policy == "dynamo_kv"
    assert router.options["overlap_score_credit"] == 0.5
    assert router.options["router_temperature"] == 2
    assert router.options["router_queue_policy"] == "wspt"
    assert router.options["host_cache_hit_weight"] == 0.75


@pytest.mark.parametrize(
    "router",
    [
        {},
        {"policy": "dynamo_kv", "kv_event_lag_ms": 5, "tie_break": "random", "options": {"router_queue_threshold": 1}},
        {"policy": "session_affinity", "options": {"ttl_ms": 100}},
    ],
)
def test_the_resolved_form_has_every_option_and_gives_the_same_scenario(router: dict[str, Any]) -> None:
    made = scenario(**router)
    resolved = made.resolved()
    assert set(resolved["router"]) == {"policy", "kv_event_lag_ms", "tie_break", "options"}
    assert Scenario.from_resolved(resolved) == made
    assert hash(attrs.evolve(made).deployment.router) == hash(made.deployment.router)
