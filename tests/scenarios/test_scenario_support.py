"""The support table: every row refuses what it says and says so, inactive values pass, and the document agrees."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from scenario_values import (
    GONE,
    HOST,
    Values,
    agentic_g2,
    aggregated,
    changed,
    disaggregated,
    refusal,
    traced,
    with_host,
    without_rule,
)

from g2sim.bus.errors import ConfigError, shorten
from g2sim.scenarios import support
from g2sim.scenarios.schema import Scenario, load_scenario

DOCUMENT = Path(__file__).parents[2] / "docs" / "feature-support.md"
RULES = {rule.id: rule for rule in support.RULES}
REPLICAS = "engine.workers.aggregated.parallelism.replicas"

BAD: dict[str, Any] = {
    "engine.mode": "disaggregated",
    "engine.backend": "sglang",
    "engine.model": None,
    "engine.workers.*.parallelism.replicas": 0,
    "engine.workers.*.parallelism.attention_data": 2,
    "engine.backend_version": "0.24.0",
    **{f"engine.{part}_quant_mode": "fp8" for part in ("gemm", "moe", "fmha", "kvcache", "comm")},
    **{f"engine.workers.*.parallelism.{key}": 2 for key in ("moe_tensor", "moe_expert")},
    "traffic.source.format": "dynamo",
    "traffic.stop.max_virtual_time_seconds": 1.0,
    "traffic.stop.max_virtual_time_ms": 1.0,
}
"""Values to be refused of fields that are in a table; keys that only a rule knows get a mapping."""

OTHER_BAD: dict[tuple[str, str], Any] = {
    ("attention-ffn-disaggregation", "engine.mode"): "afd",
    ("agentic-g2-worker-count", "engine.workers.*.parallelism.replicas"): GONE,
}

SUBSUMED = {
    "agentic-g2-backend": ["backend"],
    "agentic-g2-static-pools": ["static-pools"],
    "agentic-g2-speculation": ["speculation"],
    "agentic-g2-g3": ["third-tier"],
}
"""Conditions of agentic traffic over a host tier that stand even if the general rule behind them is opened."""

INACTIVE: dict[str, list[Any]] = {
    "engine.nextn": [0],
    "engine.decoder_replay": [False],
    "engine.enable_eplb": [False],
    "engine.moe_backend": ["default"],
    "engine.database_mode": ["SILICON"],
    "engine.estimation_mode": ["auto"],
    "engine.fallback_policy": ["deny"],
    "engine.estimator_config": [{}],
    "engine.workers.*.host_loop": [False],
    "engine.workers.*.startup_seconds": [0, 0.0],
    "engine.workers.*.timing.forward_model": ["op_level"],
    "engine.workers.*.kv_cache.capacity.cuda_graph_reserved_bytes": [0],
    "engine.workers.*.scheduler.prefill_schedule_interval": [1],
    "engine.workers.*.scheduler.prefill_decode_interval": [0],
    **{f"engine.workers.*.parallelism.{key}": [1] for key in ("pipeline", "prefill_context", "decode_context")},
    "traffic.source.cached_prefix_tokens": [0],
    "traffic.load.agentic_warmup": [False],
    "traffic.load.agentic_warmup_policy": ["repeated_prefixes"],
    "router.prefill_load_model": [{}, {"type": "none"}],
    "execution": [{}, {"resources": {}}],
}
"""Values, besides null, that switch a feature off and are taken."""

OTHERS = [
    0,
    1,
    -1,
    2,
    0.5,
    False,
    True,
    "",
    "x",
    [],
    {},
    {"type": "x"},
    "auto",
    "deny",
    "default",
    "SILICON",
    "op_level",
]

ROWS = [(rule.id, pattern) for rule in support.RULES for pattern in rule.fields if rule.id != "worker-crash"]
"""A fault that is a worker's crash is refused in tests/faults."""


def base(rule: support.Rule) -> Values:
    if rule.gate == "agentic-g2":
        return agentic_g2()
    return traced("weka") if rule.id.startswith("agentic") else traced()


def where(pattern: str) -> str:
    return pattern.replace("*", "aggregated")


class TestRows:
    @pytest.mark.parametrize(("rule_id", "pattern"), ROWS)
    def test_what_a_row_names_is_refused(self, rule_id: str, pattern: str) -> None:
        rule = RULES[rule_id]
        bad = OTHER_BAD.get((rule_id, pattern), BAD.get(pattern, {"some": "thing"}))
        values = changed(base(rule), {where(pattern): bad})
        if pattern.endswith(".type"):  # other keys of this mapping go with another type
            values = changed(values, {where(pattern).removesuffix(".type"): {"type": bad}})
        error = refusal(values)
        assert error.field == where(pattern)
        assert error.problem == f"not supported: {rule.what}"
        assert error.allowed == rule.allowed
        assert error.hint == rule.hint
        assert bad is GONE or f"got {shorten(bad)}" in str(error)

    @pytest.mark.parametrize(("rule_id", "pattern"), [row for row in ROWS if row[1] not in BAD])
    def test_only_inactive_values_are_taken(self, rule_id: str, pattern: str) -> None:
        values, inactive = base(RULES[rule_id]), [None, *INACTIVE.get(pattern, [])]
        for value in inactive:
            assert Scenario.from_dict(changed(values, {where(pattern): value})) == Scenario.from_dict(values)
        for value in OTHERS:
            if not any(type(value) is type(one) and value == one for one in inactive):
                assert refusal(changed(values, {where(pattern): value})).field == where(pattern)

    def test_ids_are_unique_and_gates_known(self) -> None:
        assert len(RULES) == len(support.RULES)
        assert {rule.gate for rule in support.RULES} == {"agentic-g2", "general"}

    @pytest.mark.parametrize(("key", "asker"), [("timing", "timing"), ("kv_cache", "kv_cache.capacity")])
    def test_leaving_out_what_has_a_default_that_needs_a_model_says_so(self, key: str, asker: str) -> None:
        error = refusal(changed(aggregated(), {f"engine.workers.aggregated.{key}": GONE}))
        assert error.field == "engine.model"
        assert f"missing, and engine.workers.aggregated.{asker}.type default needs it" in str(error)
        assert "default is what a scenario gets that leaves the type out" in str(error)

    def test_zero_is_not_false(self) -> None:
        assert refusal(changed(aggregated(), {"engine.decoder_replay": 0})).field == "engine.decoder_replay"
        assert refusal(changed(aggregated(), {"engine.nextn": False})).field == "engine.nextn"
        Scenario.from_dict(changed(aggregated(), {"engine.nextn": 0, "engine.decoder_replay": False}))


class TestAgenticTrafficOverAHostTier:
    @pytest.mark.parametrize("trace_format", ["weka", "agentic_mooncake"])
    @pytest.mark.parametrize("scope", ["cluster_shared", "dp_rank_local"])
    @pytest.mark.parametrize("workers", [1, 2, 3, 7, 100, 50_000])
    def test_any_positive_number_of_workers_is_taken(self, trace_format: str, scope: str, workers: int) -> None:
        values = changed(agentic_g2(trace_format), {REPLICAS: workers, f"{HOST}.scope": scope})
        assert Scenario.from_dict(values).deployment.pools[0].workers == workers

    @pytest.mark.parametrize(
        "count",
        [
            0,
            -1,
            -7,
            True,
            False,
            1.0,
            2.0,
            0.5,
            float("nan"),
            float("inf"),
            "2",
            "two",
            "",
            None,
            [],
            [2],
            {},
            {"n": 2},
        ],
    )
    def test_every_other_count_is_refused(self, count: Any) -> None:
        for values in (agentic_g2(), with_host(), aggregated()):
            error = refusal(changed(values, {REPLICAS: count}))
            assert error.field == REPLICAS
            assert f"got {count!r}; allowed: any positive integer number of workers per role" in str(error)

    def test_a_count_that_is_left_out_is_refused_here_and_one_elsewhere(self) -> None:
        error = refusal(changed(agentic_g2(), {REPLICAS: GONE}))
        assert error.field == REPLICAS
        assert "allowed: any positive integer number of workers per role" in str(error)
        for values in (aggregated(), with_host(), traced("weka")):
            assert Scenario.from_dict(changed(values, {REPLICAS: GONE})).deployment.pools[0].workers == 1

    def test_a_count_beyond_reason_is_refused_with_the_bound(self) -> None:
        error = refusal(changed(agentic_g2(), {REPLICAS: 2**31}))
        assert error.field == REPLICAS
        assert "any positive integer number of workers per role, up to 2147483647" in str(error)

    @pytest.mark.parametrize(
        "base_values",
        [aggregated, with_host, traced, lambda: traced("weka"), lambda: traced("agentic_mooncake")],
    )
    def test_attention_dp_is_refused_only_here(self, base_values: Callable[[], Values]) -> None:
        data_parallel = {"engine.workers.aggregated.parallelism.attention_data": 2}
        assert Scenario.from_dict(changed(base_values(), data_parallel)).deployment.pools[0].dp_size == 2
        error = refusal(changed(agentic_g2(), data_parallel))
        assert error.field == "engine.workers.aggregated.parallelism.attention_data"
        assert "got 2; allowed: 1 on every role" in str(error)

    @pytest.mark.parametrize("rule_id", SUBSUMED)
    def test_conditions_hold_when_the_general_rule_is_opened(
        self, rule_id: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(support, "RULES", without_rule(*SUBSUMED[rule_id]))
        for pattern in RULES[rule_id].fields:
            bad = {where(pattern): BAD.get(pattern, {"some": "thing"})}
            assert refusal(changed(agentic_g2(), bad)).problem == f"not supported: {RULES[rule_id].what}"
            Scenario.from_dict(changed(traced("weka"), bad))

    @pytest.mark.parametrize("role", ["prefill", "decode"])
    def test_every_role_is_looked_at(self, role: str) -> None:
        values = disaggregated()
        values["traffic"] = agentic_g2()["traffic"]
        values["engine"]["model"] = "m"
        for count in (1, 3, 9):
            path = f"engine.workers.{role}.parallelism.replicas"
            pools = Scenario.from_dict(changed(values, {path: count})).deployment.pools
            assert [pool.workers for pool in pools if pool.role == role] == [count]
        for key, bad in (
            ("parallelism.attention_data", 2),
            ("parallelism.replicas", 0),
            ("parallelism.replicas", GONE),
            ("startup_seconds", 3.0),
            ("kv_cache.g3_offload", {"scope": "worker_local", "num_g3_blocks": 8}),
        ):
            error = refusal(changed(values, {f"engine.workers.{role}.{key}": bad}))
            assert error.field == f"engine.workers.{role}.{key}"
        only_there = changed(values, {f"engine.workers.{role}.kv_cache.host_offload": None})
        other = "decode" if role == "prefill" else "prefill"
        error = refusal(changed(only_there, {f"engine.workers.{role}.parallelism.attention_data": 2}))
        assert "agentic traffic over a host tier" in str(error), f"a host tier on {other} is enough"


class TestGates:
    def test_the_first_rule_of_the_table_speaks(self) -> None:
        values = changed(aggregated(), {"engine.backend": "sglang", "execution": {"x": 1}, REPLICAS: 0})
        assert refusal(values).field == REPLICAS
        assert refusal(changed(values, {REPLICAS: 1})).field == "engine.backend"
        assert refusal(changed(values, {REPLICAS: 1, "engine.backend": "vllm"})).field == "execution"

    def test_a_refusal_has_its_line(self, tmp_path: Path) -> None:
        path = tmp_path / "s.yaml"
        values = changed(aggregated(), {"engine.workers.aggregated.kv_cache.g3_offload": {"scope": "worker_local"}})
        path.write_text(yaml.safe_dump(values))
        with pytest.raises(ConfigError) as caught:
            load_scenario(path)
        line = next(number for number, text in enumerate(path.read_text().splitlines(), 1) if "g3_offload" in text)
        assert caught.value.where == f"{path}:{line}"


class TestDocument:
    def test_it_is_what_the_table_says(self) -> None:
        assert DOCUMENT.read_text(encoding="utf-8") == support.render_feature_support()

    def test_every_rule_is_in_it_once(self) -> None:
        lines = support.render_feature_support().splitlines()
        for rule in support.RULES:
            rows = [line for line in lines if line.startswith(f"| {rule.id} |")]
            assert len(rows) == 1
            assert rows[0].count("|") == 5
            assert rule.what in rows[0]
            for pattern in rule.fields:
                assert f"`{pattern.replace('*', '<role>').replace('.#', '[]')}`" in rows[0]
