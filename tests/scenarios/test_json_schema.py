"""The published JSON Schema says what the tables say, value by value."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from scenario_values import agentic_g2, aggregated, changed, disaggregated, sessions, traced, with_host

from g2sim.scenarios.fields import Field, Kind, ListOf, Refused, Section, Spec, Variants
from g2sim.scenarios.json_schema import scenario_schema, schema_text
from g2sim.scenarios.key_meanings import MEANINGS
from g2sim.scenarios.layout import SCENARIO
from g2sim.scenarios.reference import render_scenario, scenario_keys
from g2sim.scenarios.schema import Scenario

SCHEMA = Draft202012Validator(scenario_schema())
LIBRARY = Path(__file__).parents[2] / "scenarios" / "library"
WORKER = "engine.workers.aggregated"

SCALARS = [
    None,
    True,
    False,
    0,
    1,
    2,
    -1,
    0.5,
    -0.5,
    1.5,
    10**20,
    2**53,
    2**31,
    "",
    " ",
    "auto",
    "max",
    "vllm",
    "x",
    "aic",
]


def kinds(spec: Spec, path: str = "") -> Iterator[Any]:
    if isinstance(spec, Kind):
        yield pytest.param(spec, id=path)
    elif isinstance(spec, ListOf):
        yield from kinds(spec.item, f"{path}[]")
    elif isinstance(spec, Section):
        for key, field in spec.fields.items():
            yield from kinds(field.kind, f"{path}.{key}")
    elif isinstance(spec, Variants):
        for name, case in spec.cases.items():
            yield from kinds(case, f"{path}[{name}]")


def taken(kind: Kind, value: Any) -> bool:
    try:
        kind.read(value)
    except Refused:
        return False
    return True


def hidden(kind: Kind, value: Any) -> bool:
    """Words that are taken, so that a rule can refuse them by name, but not advertised."""
    return value in ("sglang", "trtllm", "afd", "dynamo") and "enum" in kind.schema


CHECKED = [kind for kind in kinds(SCENARIO) if not kind.id.endswith(".replicas")]
"""All kinds but the one that a support rule checks instead."""


def test_it_is_a_schema_and_its_text_is_its_own() -> None:
    Draft202012Validator.check_schema(scenario_schema())
    assert json.loads(schema_text()) == scenario_schema()


@pytest.mark.parametrize("kind", CHECKED)
def test_every_kind_and_its_schema_take_the_same_values(kind: Kind) -> None:
    schema = Draft202012Validator(kind.schema)
    for value in [*SCALARS, [], {}, ["x"]]:
        assert schema.is_valid(value) == taken(kind, value) or hidden(kind, value), value


@given(value=st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text("a0 ", max_size=3)))
def test_every_kind_and_its_schema_take_the_same_drawn_values(value: Any) -> None:
    assume(not (isinstance(value, float) and value.is_integer()))  # JSON Schema takes 1.0 for an integer
    for parameter in CHECKED:
        kind = parameter.values[0]
        assert Draft202012Validator(kind.schema).is_valid(value) == taken(kind, value), (parameter.id, value)


@pytest.mark.parametrize(
    "values",
    [aggregated(), with_host(), with_host("cluster_shared"), traced(), sessions(), agentic_g2(), disaggregated()],
)
def test_good_scenarios_and_their_resolved_forms_are_valid(values: dict[str, Any]) -> None:
    SCHEMA.validate(values)
    SCHEMA.validate(Scenario.from_dict(values).resolved())


@pytest.mark.parametrize("path", sorted(LIBRARY.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_library_is_valid(path: Path) -> None:
    SCHEMA.validate(yaml.safe_load(path.read_text()))


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({f"{WORKER}.kv_cahce": {}}, "engine.workers.aggregated"),
        ({"rooter": {}}, ""),
        ({f"{WORKER}.parallelism.replicas": 0}, "engine.workers.aggregated.parallelism.replicas"),
        ({f"{WORKER}.timing": {"type": "fixed", "prefill_ms": 1}}, "engine.workers.aggregated.timing"),
        ({f"{WORKER}.timing": {"type": "polynomial", "prefill_ms": 1}}, "engine.workers.aggregated.timing.prefill_ms"),
        ({"traffic.load": {"type": "poison"}}, "traffic.load.type"),
        ({"traffic.source": {"type": "script", "path": "x"}}, "traffic.source.type"),
        ({"expect": [{"report": "totals.passes", "at_leats": 1}]}, "expect.0"),
        ({"expect": {"report": "totals.passes"}}, "expect"),
        ({"variants": {"a": 3}}, "variants.a"),
    ],
)
def test_what_is_wrong_is_found_where_it_is(changes: dict[str, Any], place: str) -> None:
    errors = list(SCHEMA.iter_errors(changed(aggregated(), changes)))
    assert place in {".".join(map(str, error.absolute_path)) for error in errors}


def test_keys_that_only_a_rule_knows_are_known_and_say_so() -> None:
    """The same file stays quiet in an editor and in a run: planner: null is fine, and so it is here."""
    SCHEMA.validate(changed(aggregated(), {"planner": None, f"{WORKER}.kv_cache.g3_offload": None}))
    assert "not supported" in scenario_schema()["properties"]["planner"]["description"]


def test_a_default_that_editors_show_is_the_default() -> None:
    load = scenario_schema()["properties"]["traffic"]["properties"]["load"]
    assert load["properties"]["type"]["default"] == "concurrency"
    assert scenario_schema()["properties"]["seed"]["default"] == SCENARIO.fields["seed"].default
    assert isinstance(SCENARIO.fields["seed"], Field)


def test_every_key_has_a_meaning_which_editors_and_the_reference_show() -> None:
    """Whoever adds a key to the tables says in key_meanings what it means."""
    tags = {path for path in scenario_keys() if path.rpartition(".")[2] == "type"}
    assert set(scenario_keys()) - tags == set(MEANINGS)
    worker = scenario_schema()["properties"]["engine"]["properties"]["workers"]["properties"]["prefill"]
    sequences = worker["properties"]["scheduler"]["properties"]["max_sequences"]
    assert sequences["description"] == (
        "requests that run on a rank at the same time at most; a positive integer, or null for no limit"
    )
    page = render_scenario()
    assert "| `scheduler.max_sequences` | a positive integer, or null for no limit | `256`, prefill: `1` |" in page
    assert "| `lag_ms` (lag) | a number of ms from 0 to 2**53 | required |" in page
