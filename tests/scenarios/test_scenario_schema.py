"""Scenarios from plain values: every field's bounds, unknown keys, what must agree, places, and the resolved form."""

from __future__ import annotations

import contextlib
import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import msgpack
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from scenario_values import (
    GONE,
    HOST,
    Values,
    agentic_g2,
    aggregated,
    changed,
    disaggregated,
    leaves,
    profiled,
    refusal,
    sessions,
    traced,
    with_host,
    without_rule,
    worker,
)

from g2sim.actors.config import (
    DeploymentConfig,
    FixedTiming,
    HandoffConfig,
    HostScope,
    HostTierConfig,
    PolynomialTiming,
    PoolConfig,
    PreemptionMode,
    RankConfig,
    Sharing,
    SlaConfig,
    TransferTiming,
    WorkerRole,
)
from g2sim.bus.errors import ConfigError, shorten
from g2sim.scenarios import support
from g2sim.scenarios.schema import (
    ConcurrencyLoad,
    ConstantRateLoad,
    PoissonLoad,
    Scenario,
    SyntheticSessionSource,
    SyntheticSource,
    TimestampBasis,
    TimestampsLoad,
    TraceFormat,
    TraceSource,
    TrafficConfig,
    load_scenario,
)

AGG = "engine.workers.aggregated."
NAN, INF = math.nan, math.inf
NEVER_NUMBERS = [True, False, "8", "x", "", [], {}, [1], NAN, INF, -INF]
BAD = {
    "count": [*NEVER_NUMBERS, None, 0, -1, -(10**30), 10**30, 2.0, 1.5],
    "bounded": [*NEVER_NUMBERS, None, 0, -1, -(10**30), 10**30, 2.0, 1.5],
    "natural": [*NEVER_NUMBERS, None, -1, 10**30, 0.0],
    "at least 2": [*NEVER_NUMBERS, 1, 0, -4, 10**30, 4.0],
    "u64": [*NEVER_NUMBERS, None, -1, 2**64, 1.0],
    "amount": [*NEVER_NUMBERS, None, -1, -1e-300, 10**400],
    "zero or more": [*NEVER_NUMBERS, None, -1, -1e-300, 1e-10, 10**400],
    "positive": [*NEVER_NUMBERS, None, -1, 0, 0.0, -0.0, 10**400],
    "rate": [*NEVER_NUMBERS, None, -1, 0, 1e-300, 10**400],
    "ratio": [*NEVER_NUMBERS, None, -0.1, 1.0000001, 2],
    "bool": [None, 0, 1, 1.0, "yes", "true", "", [], {}],
    "choice": [None, True, False, 0, 1, 1.5, "", "othr", [], {}],
    "text": [None, True, False, 0, 1, 1.5, "", " \t", "a\nb", "a\0b", "\x1b[31m", "\ud800", [], {}],
    "lines": [None, True, 0, 1.5, "a\0b", "\x1b[31m", "\ud800", [], {}],
    "paths": [None, True, 1, "t.jsonl", [], {}, [""], ["t", ""], [1], [None], ["a\0"], [["t"]], ["a", "b"]],
}
GOOD: dict[str, list[Any]] = {
    "count": [1, 2**31 - 1],
    "bounded": [1, 1000],
    "natural": [0, 7],
    "at least 2": [2, 512],
    "u64": [0, 2**64 - 1],
    "amount": [0, 0.0, -0.0, 2, 1.5, 5e-324],
    "zero or more": [0, 0.0, -0.0, 2, 1.5, 1e-9, 1e300],
    "positive": [1, 1e-300, 2.5],
    "rate": [1, 1e-10, 2.5],
    "ratio": [0, 1, 0.5, 5e-324],
    "bool": [True, False],
    "choice": [],
    "text": ["x", " é ", "a b"],
    "lines": ["", "a\nb\tc"],
    "paths": [["a"], ["../b"]],
}


@attrs.frozen
class Case:
    """A field: a scenario that has it, the class of its values, words that it takes besides.

    ``null_is_missing``: null is refused in the name of another field that could be given instead.
    """

    base: Callable[[], Values]
    values: str
    words: tuple[Any, ...] = ()
    null_is_missing: bool = False


NULL = (None,)
HOSTED = "engine.workers.aggregated.kv_cache.host_offload."
SESSION = "traffic.source.session."
FIELDS = {
    "name": Case(aggregated, "text"),
    "why": Case(aggregated, "lines"),
    "seed": Case(aggregated, "u64"),
    "engine.mode": Case(aggregated, "choice", ("aggregated",)),
    "engine.model": Case(aggregated, "text", NULL),
    "engine.hardware": Case(aggregated, "text", NULL),
    "engine.backend": Case(aggregated, "choice", ("vllm",)),
    "engine.context_length": Case(aggregated, "count", ("max",)),
    "engine.enable_chunked_prefill": Case(aggregated, "bool", NULL),
    AGG + "context_length": Case(aggregated, "count", NULL),
    AGG + "parallelism.replicas": Case(aggregated, "bounded"),
    AGG + "parallelism.tensor": Case(aggregated, "count"),
    AGG + "parallelism.attention_data": Case(aggregated, "bounded"),
    AGG + "scheduler.max_batched_tokens": Case(aggregated, "count", NULL),
    AGG + "scheduler.max_sequences": Case(aggregated, "count", NULL),
    AGG + "scheduler.chunked_prefill": Case(aggregated, "bool"),
    AGG + "scheduler.preemption_mode": Case(aggregated, "choice", ("lifo", "fifo")),
    AGG + "kv_cache.block_size": Case(aggregated, "at least 2", NULL),
    AGG + "kv_cache.prefix_caching": Case(aggregated, "bool"),
    AGG + "kv_cache.bytes_per_token": Case(aggregated, "count", ("auto", None)),
    AGG + "kv_cache.capacity.type": Case(aggregated, "choice", ("fixed",)),
    AGG + "kv_cache.capacity.blocks": Case(aggregated, "bounded"),
    HOSTED + "scope": Case(with_host, "choice", ("dp_rank_local", "cluster_shared")),
    HOSTED + "num_host_blocks": Case(with_host, "count"),
    HOSTED + "d2h_bandwidth_gbps": Case(with_host, "zero or more"),
    HOSTED + "h2d_bandwidth_gbps": Case(with_host, "zero or more"),
    HOSTED + "shared_d2h_bandwidth_gbps": Case(with_host, "zero or more"),
    HOSTED + "shared_h2d_bandwidth_gbps": Case(with_host, "zero or more"),
    HOSTED + "latency_to_first_byte_ms": Case(with_host, "amount"),
    HOSTED + "kv_layout_id": Case(with_host, "text", NULL),
    HOSTED + "sharing": Case(with_host, "choice", ("max_min", "equal_share")),
    AGG + "timing.type": Case(aggregated, "choice", ("fixed",)),
    AGG + "timing.prefill_ms": Case(aggregated, "amount"),
    AGG + "timing.decode_ms": Case(aggregated, "amount"),
    AGG + "timing.speedup_ratio": Case(aggregated, "zero or more"),
    AGG + "timing.decode_speedup_ratio": Case(aggregated, "zero or more"),
    "router.policy": Case(aggregated, "text", ("round_robin", "dynamo_kv", "kv_router")),
    "router.kv_event_lag_ms": Case(aggregated, "amount"),
    "router.tie_break": Case(aggregated, "choice", ("lowest", "random")),
    "evaluation.sla.ttft_ms": Case(aggregated, "positive", NULL),
    "evaluation.sla.itl_ms": Case(aggregated, "positive", NULL),
    "evaluation.sla.e2e_ms": Case(aggregated, "positive", NULL),
    "traffic.source.type": Case(aggregated, "choice", ("synthetic",)),
    "traffic.source.input_tokens": Case(aggregated, "bounded"),
    "traffic.source.output_tokens": Case(aggregated, "bounded"),
    "traffic.source.new_input_tokens_per_turn": Case(sessions, "bounded"),
    "traffic.source.output_tokens_per_turn": Case(sessions, "bounded"),
    SESSION + "turns": Case(sessions, "bounded"),
    SESSION + "prefix_groups": Case(sessions, "natural"),
    SESSION + "shared_prefix_ratio": Case(lambda: changed(sessions(), {SESSION + "prefix_groups": 1}), "ratio"),
    SESSION + "inter_turn_delay_ms": Case(sessions, "amount"),
    SESSION + "accumulate": Case(sessions, "bool"),
    SESSION + "group_seed": Case(sessions, "u64"),
    "traffic.source.paths": Case(traced, "paths"),
    "traffic.source.format": Case(traced, "choice", ("mooncake", "mooncake-delta")),
    "traffic.source.block_size": Case(traced, "count", NULL),
    "traffic.source.nested_timestamp_basis": Case(
        lambda: traced("weka"), "choice", (None, "auto", "absolute", "relative")
    ),
    "traffic.source.strict": Case(traced, "bool"),
    "traffic.source.prefix_groups": Case(lambda: traced("applied_compute_agentic", "concurrency"), "natural"),
    "traffic.source.shared_prefix_ratio": Case(
        lambda: changed(traced("applied_compute_agentic", "concurrency"), {"traffic.source.prefix_groups": 2}), "ratio"
    ),
    "traffic.load.type": Case(aggregated, "choice", ("concurrency",)),
    "traffic.load.concurrency": Case(aggregated, "count"),
    "traffic.load.sessions_per_second": Case(sessions, "rate"),
    "traffic.load.seed": Case(sessions, "u64", NULL),
    "traffic.load.interval_ms": Case(
        lambda: changed(aggregated(), {"traffic.load": {"type": "constant_rate"}}), "amount", null_is_missing=True
    ),
    "traffic.load.requests_per_second": Case(
        lambda: changed(aggregated(), {"traffic.load": {"type": "constant_rate"}}), "rate"
    ),
    "traffic.load.speedup": Case(traced, "positive", NULL),
    "traffic.load.agentic_lanes": Case(lambda: traced("weka"), "bounded", NULL),
    "traffic.load.agentic_snapshot.seed": Case(profiled, "u64"),
    "traffic.load.agentic_warmup": Case(profiled, "bool"),
    **{
        f"traffic.load.agentic_profile.{key}_seconds": Case(profiled, kind)
        for kind, keys in (
            ("positive", ("duration", "tree_idle_cap", "global_idle_cap")),
            ("amount", ("response_grace", "cancel_drain")),
        )
        for key in keys
    },
    "traffic.stop.requests": Case(aggregated, "bounded"),
    "traffic.stop.sessions": Case(sessions, "bounded"),
    "traffic.stop.requests_per_load_unit": Case(
        lambda: changed(aggregated(), {"traffic.stop": {}}), "positive", null_is_missing=True
    ),
    "traffic.stop.sessions_per_load_unit": Case(
        lambda: changed(sessions(), {"traffic.stop": {}}), "positive", null_is_missing=True
    ),
    "traffic.stop.max_virtual_time_seconds": Case(aggregated, "positive", NULL),
    "traffic.stop.max_virtual_time_ms": Case(aggregated, "amount", NULL),
}
SECTIONS = {
    "": Case(aggregated, "mapping"),
    "engine": Case(aggregated, "mapping"),
    "engine.workers": Case(aggregated, "mapping"),
    "engine.workers.aggregated": Case(aggregated, "mapping"),
    AGG + "parallelism": Case(aggregated, "mapping"),
    AGG + "scheduler": Case(aggregated, "mapping"),
    AGG + "kv_cache": Case(aggregated, "mapping"),
    AGG + "kv_cache.capacity": Case(aggregated, "mapping"),
    HOST: Case(with_host, "mapping", NULL),
    AGG + "timing": Case(aggregated, "mapping"),
    "traffic": Case(aggregated, "mapping"),
    "traffic.source": Case(aggregated, "mapping"),
    "traffic.source.session": Case(sessions, "mapping"),
    "traffic.load": Case(aggregated, "mapping"),
    "traffic.stop": Case(traced, "mapping", NULL),
    "router": Case(aggregated, "mapping"),
    "router.options": Case(aggregated, "mapping"),
    "evaluation": Case(aggregated, "mapping"),
    "evaluation.sla": Case(aggregated, "mapping", NULL),
}
REQUIRED = [
    *(
        "engine",
        "engine.workers",
        "engine.workers.aggregated",
        "traffic.source",
        "traffic.load",
        HOSTED + "num_host_blocks",
    ),
    *(AGG + "timing.prefill_ms", AGG + "timing.decode_ms", AGG + "kv_cache.capacity.blocks"),
    *("traffic.source.session", "traffic.source.paths", "traffic.load.sessions_per_second", "traffic.stop.requests"),
    "traffic.stop.sessions",
]


def same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and (one == other or one != one)


class TestFields:
    @pytest.mark.parametrize("path", FIELDS)
    def test_bad_values_are_refused_by_field_value_and_what_is_allowed(self, path: str) -> None:
        case = FIELDS[path]
        for value in BAD[case.values]:
            if any(same(value, word) for word in case.words):
                continue
            error = refusal(changed(case.base(), {path: value}))
            assert error.field == path or (case.null_is_missing and value is None), value
            assert f"got {shorten(value)}" in str(error) or "missing" in str(error)
            assert "allowed: " in str(error)

    @pytest.mark.parametrize("path", FIELDS)
    def test_good_values_are_taken_and_come_back(self, path: str) -> None:
        case = FIELDS[path]
        for value in (*GOOD[case.values], *case.words):
            if path == "router.policy" and value not in case.words:
                continue
            scenario = Scenario.from_dict(changed(case.base(), {path: value}))
            assert Scenario.from_resolved(scenario.resolved()) == scenario

    @pytest.mark.parametrize("path", SECTIONS)
    def test_what_is_no_mapping_is_refused(self, path: str) -> None:
        case = SECTIONS[path]
        for value in (None, True, 0, 1.5, "x", "", [], [1]):
            if value in case.words and value is None:
                continue
            error = refusal(changed(case.base(), {path: value}) if path else value)
            if (path, value) == ("engine.workers.aggregated", None):
                assert support.WORKER_COUNT in str(error)
            else:
                assert f"got {value!r}; allowed: a mapping" in str(error)
            assert error.field == path

    @pytest.mark.parametrize("path", REQUIRED)
    def test_a_missing_field_is_named(self, path: str) -> None:
        base = {**FIELDS, **SECTIONS}[path].base()
        error = refusal(changed(base, {path: GONE}))
        assert error.field == path
        assert "missing" in str(error)
        assert "allowed: " in str(error)

    def test_the_tables_of_this_test_know_every_field_of_the_resolved_form(self) -> None:
        forms = [aggregated(), with_host(), sessions(), traced(), traced("weka"), agentic_g2(), profiled()]
        forms.append(changed(aggregated(), {"evaluation.sla.ttft_ms": 1, "traffic.load": {"type": "constant_rate"}}))
        forms[-1]["traffic"]["load"]["interval_ms"] = 1
        paths = {path for form in forms for path in leaves(Scenario.from_dict(form).resolved())}
        sections = {"engine.kv_transfer", HOST, "evaluation.sla"}
        sections |= {"traffic.load.agentic_snapshot", "traffic.load.agentic_profile"}
        assert paths - set(FIELDS) - sections == set()

    def test_whole_numbers_become_floats_and_negative_zero_is_zero(self) -> None:
        scenario = Scenario.from_dict(
            changed(aggregated(), {AGG + "timing.prefill_ms": 3, AGG + "timing.decode_ms": -0.0})
        )
        timing = scenario.deployment.pools[0].rank.timing
        assert isinstance(timing, FixedTiming)
        assert repr((timing.prefill_ms, timing.decode_ms)) == "(3.0, 0.0)"

    def test_huge_values_are_cut_in_messages(self) -> None:
        assert len(str(refusal(changed(aggregated(), {"seed": 10**4000})))) < 250
        assert len(str(refusal(changed(aggregated(), {"x" * 10**5: "y" * 10**5})))) < 400


class TestUnknownKeys:
    @pytest.mark.parametrize(
        ("path", "hint"),
        [
            ("sed", "did you mean seed?"),
            ("wokrers", None),
            ("scheduler", "did you mean engine.workers.aggregated.scheduler?"),
            ("engine.worker", "did you mean workers?"),
            ("engine.tensor", "did you mean workers.aggregated.parallelism.tensor?"),
            (AGG + "sheduler", "did you mean scheduler?"),
            (AGG + "replicas", "did you mean parallelism.replicas?"),
            (AGG + "kv_cache.blocksize", "did you mean block_size?"),
            (AGG + "kv_cache.num_host_blocks", "did you mean host_offload.num_host_blocks?"),
            (AGG + "kv_cache.capacity.block", "did you mean blocks?"),
            (AGG + "timing.prefil_ms", "did you mean prefill_ms?"),
            (HOSTED + "d2h_bandwith_gbps", "did you mean d2h_bandwidth_gbps?"),
            (HOSTED + "zzz", None),
            ("traffic.source.input_token", "did you mean input_tokens?"),
            ("traffic.load.concurency", "did you mean concurrency?"),
            ("traffic.stop.request", "did you mean requests?"),
            ("router.polcy", "did you mean policy?"),
            ("evaluation.sla.tftt_ms", "did you mean ttft_ms?"),
        ],
    )
    def test_a_near_miss_gets_a_hint(self, path: str, hint: str | None) -> None:
        error = refusal(changed(with_host(), {path: 17, **({"evaluation.sla.itl_ms": 1} if "sla" in path else {})}))
        assert error.field == path
        assert "unknown key; got 17; allowed: " in str(error)
        assert error.hint == hint

    @pytest.mark.parametrize("key", [1, None, True, 1.5, ("a",)])
    @pytest.mark.parametrize("where", ["", "engine", AGG + "kv_cache", "traffic.load"])
    def test_a_key_that_is_no_text(self, key: Any, where: str) -> None:
        values = aggregated()
        inner = values
        for part in where.split(".") if where else ():
            inner = inner[part]
        inner[key] = 1
        error = refusal(values)
        assert error.field == where
        assert f"a key must be text; got {key!r}" in str(error)

    @pytest.mark.parametrize(
        ("base", "path", "said"),
        [
            (aggregated, "traffic.load.speedup", "does not go with type concurrency"),
            (traced, "traffic.load.concurrency", "does not go with type trace_timestamps"),
            (aggregated, "traffic.source.paths", "does not go with type synthetic"),
            (
                lambda: changed(aggregated(), {AGG + "timing": {"type": "polynomial"}}),
                AGG + "timing.decode_ms",
                "fixed",
            ),
        ],
    )
    def test_a_key_of_another_variant_is_refused_unless_null(
        self, base: Callable[[], Values], path: str, said: str
    ) -> None:
        error = refusal(changed(base(), {path: 17}))
        assert error.field == path
        assert said in str(error)
        assert "got 17; allowed: only with type " in str(error)
        assert Scenario.from_dict(changed(base(), {path: None})) == Scenario.from_dict(base())


class TestAgreement:
    @pytest.mark.parametrize(
        ("base", "changes", "field", "said"),
        [
            (aggregated, {"engine.workers.prefill": worker()}, "engine.workers.prefill", "allowed: only aggregated"),
            (aggregated, {"engine.workers.decode": worker()}, "engine.workers.decode", "allowed: only aggregated"),
            (aggregated, {"engine.kv_transfer": {}}, "engine.kv_transfer", "does not go with mode aggregated"),
            (aggregated, {AGG + "kv_cache.capacity.bytes": 10**9}, AGG + "kv_cache.capacity.bytes", "got 1000000000"),
            (
                aggregated,
                {AGG + "kv_cache.capacity": {"type": "fixed", "bytes": 3999}},
                AGG + "kv_cache.capacity.bytes",
                "blocks of 4000 bytes",
            ),
            (
                aggregated,
                {AGG + "kv_cache.capacity": {"type": "fixed", "bytes": 4000 * 2**31}},
                AGG + "kv_cache.capacity.bytes",
                "blocks of 4000 bytes",
            ),
            (
                aggregated,
                {AGG + "kv_cache.capacity": {"type": "fixed", "bytes": 9}, AGG + "kv_cache.bytes_per_token": GONE},
                AGG + "kv_cache.bytes_per_token",
                "a capacity in bytes needs",
            ),
            (with_host, {AGG + "kv_cache.prefix_caching": False}, AGG + "kv_cache.prefix_caching", "got False"),
            (
                with_host,
                {AGG + "kv_cache.bytes_per_token": GONE},
                AGG + "kv_cache.bytes_per_token",
                "a host tier needs",
            ),
            (with_host, {AGG + "kv_cache.bytes_per_token": "auto"}, AGG + "kv_cache.bytes_per_token", "got 'auto'"),
            (with_host, {HOSTED + "d2h_bandwidth_gbps": 1e-320}, HOSTED + "d2h_bandwidth_gbps", "got 1e-320"),
            (with_host, {HOSTED + "h2d_bandwidth_gbps": 1e-320}, HOSTED + "h2d_bandwidth_gbps", "got 1e-320"),
            (
                agentic_g2,
                {HOSTED + "shared_d2h_bandwidth_gbps": 1e-320},
                HOSTED + "shared_d2h_bandwidth_gbps",
                "1e-320",
            ),
            (
                agentic_g2,
                {HOSTED + "shared_h2d_bandwidth_gbps": 1e-320},
                HOSTED + "shared_h2d_bandwidth_gbps",
                "1e-320",
            ),
            (agentic_g2, {HOSTED + "kv_layout_id": None}, HOSTED + "kv_layout_id", "got None"),
            (
                aggregated,
                {"evaluation.sla": {"e2e_ms": 5.0, "ttft_ms": 1.0}},
                "evaluation.sla.e2e_ms",
                "does not go with ttft_ms; got 5.0",
            ),
            (
                aggregated,
                {"evaluation.sla": {"e2e_ms": 5, "itl_ms": 1}},
                "evaluation.sla.e2e_ms",
                "does not go with itl",
            ),
            (traced, {"traffic.source.paths": ["a", "b"]}, "traffic.source.paths", "got ['a', 'b']"),
            (
                traced,
                {"traffic.source.nested_timestamp_basis": "auto"},
                "traffic.source.nested_timestamp_basis",
                "weka",
            ),
            (traced, {"traffic.source.prefix_groups": 2}, "traffic.source.prefix_groups", "applied_compute_agentic"),
            (traced, {"traffic.source.shared_prefix_ratio": 0.5}, "traffic.source.shared_prefix_ratio", "got 0.5"),
            (traced, {"traffic.load": {"type": "poisson"}}, "traffic.load.type", "got 'poisson'"),
            (
                traced,
                {"traffic.load": {"type": "constant_rate"}},
                "traffic.load.type",
                "trace_timestamps or concurrency",
            ),
            (traced, {"traffic.load.agentic_lanes": 2}, "traffic.load.agentic_lanes", "got 2"),
            (traced, {"traffic.stop.requests": 5}, "traffic.stop.requests", "only with synthetic traffic"),
            (traced, {"traffic.stop.sessions_per_load_unit": 5}, "traffic.stop.sessions_per_load_unit", "got 5.0"),
            (
                lambda: traced("weka"),
                {"traffic.load": {"type": "concurrency"}},
                "traffic.load.type",
                "trace_timestamps",
            ),
            (
                lambda: traced("agentic_mooncake"),
                {"traffic.load": {"type": "concurrency"}},
                "traffic.load.type",
                "format agentic_mooncake; got 'concurrency'; allowed: trace_timestamps",
            ),
            (lambda: traced("applied_compute_agentic"), {}, "traffic.load.type", "allowed: concurrency"),
            (
                lambda: traced("applied_compute_agentic", "concurrency"),
                {"traffic.source.shared_prefix_ratio": 0.5},
                "traffic.source.prefix_groups",
                "got 0",
            ),
            (sessions, {SESSION + "shared_prefix_ratio": 0.5}, SESSION + "prefix_groups", "got 0; allowed: a positive"),
            (aggregated, {"traffic.load": {"type": "trace_timestamps"}}, "traffic.load.type", "no timestamps"),
            (
                aggregated,
                {"traffic.load": {"type": "poisson"}},
                "traffic.load.requests_per_second",
                "missing; allowed: a finite",
            ),
            (
                aggregated,
                {"traffic.load": {"type": "poisson", "sessions_per_second": 1}},
                "traffic.load.sessions_per_second",
                "only with source type synthetic-session",
            ),
            (sessions, {"traffic.load.requests_per_second": 1}, "traffic.load.requests_per_second", "type synthetic"),
            (
                aggregated,
                {"traffic.load": {"type": "constant_rate"}},
                "traffic.load.requests_per_second",
                "allowed: one of requests_per_second, interval_ms",
            ),
            (
                aggregated,
                {"traffic.load": {"type": "constant_rate", "requests_per_second": 2, "interval_ms": 3}},
                "traffic.load.interval_ms",
                "does not go with requests_per_second; got 3.0",
            ),
            (
                aggregated,
                {"traffic.load": {"type": "poisson", "requests_per_second": 1e-320}},
                "traffic.load.requests_per_second",
                "interval is at most",
            ),
            (aggregated, {"traffic.stop.sessions": 3}, "traffic.stop.sessions", "only with source type"),
            (sessions, {"traffic.stop.requests": 3}, "traffic.stop.requests", "only with source type"),
            (
                aggregated,
                {"traffic.stop.requests_per_load_unit": 3},
                "traffic.stop.requests_per_load_unit",
                "does not go with requests; got 3.0",
            ),
            (
                aggregated,
                {"traffic.stop": {"requests_per_load_unit": 1e300}},
                "traffic.stop.requests_per_load_unit",
                "got 1e+300",
            ),
            (
                aggregated,
                {
                    "traffic.load": {"type": "constant_rate", "interval_ms": 3},
                    "traffic.stop": {"requests_per_load_unit": 2},
                },
                "traffic.stop.requests_per_load_unit",
                "does not go with interval_ms",
            ),
            (aggregated, {"traffic.stop": None}, "traffic.stop.requests", "missing"),
            (
                aggregated,
                {"traffic.stop.max_virtual_time_seconds": 1, "traffic.stop.max_virtual_time_ms": 1},
                "traffic.stop.max_virtual_time_seconds",
                "does not go with",
            ),
            (
                aggregated,
                {"traffic.stop.max_virtual_time_seconds": 1e306},
                "traffic.stop.max_virtual_time_seconds",
                "got 1e+306",
            ),
        ],
    )
    def test_refused(self, base: Callable[[], Values], changes: Values, field: str, said: str) -> None:
        error = refusal(changed(base(), changes))
        assert error.field == field
        assert said in str(error)
        assert "allowed: " in str(error)


class TestWhatIsBuilt:
    def test_defaults_are_those_of_the_reference(self) -> None:
        capacity = {"type": "fixed", "blocks": 9}
        bare = {"kv_cache": {"capacity": capacity}, "timing": {"type": "polynomial"}}
        scenario = Scenario.from_dict({"engine": {"workers": {"aggregated": bare}}})
        assert scenario == Scenario(
            name="unnamed",
            why="",
            seed=0,
            deployment=DeploymentConfig(
                pools=(
                    PoolConfig(
                        role=WorkerRole.AGGREGATED,
                        workers=1,
                        rank=RankConfig(gpu_blocks=9, block_size_tokens=64, timing=PolynomialTiming()),
                    ),
                )
            ),
            traffic=TrafficConfig(source=SyntheticSource(), load=ConcurrencyLoad(concurrency=10), count=100),
        )

    def test_every_field_arrives(self) -> None:
        values = {
            "name": "n",
            "why": "w",
            "seed": 7,
            "engine": {
                "model": "m",
                "hardware": "h",
                "workers": {
                    "aggregated": {
                        "context_length": 5000,
                        "parallelism": {"replicas": 3, "tensor": 4, "attention_data": 5},
                        "scheduler": {
                            "max_batched_tokens": 6,
                            "max_sequences": 7,
                            "chunked_prefill": False,
                            "preemption_mode": "fifo",
                        },
                        "kv_cache": {
                            "block_size": 8,
                            "bytes_per_token": 9,
                            "capacity": {"type": "fixed", "bytes": 8 * 9 * 10 + 71},
                            "host_offload": {
                                "scope": "cluster_shared",
                                "num_host_blocks": 11,
                                "d2h_bandwidth_gbps": 12,
                                "h2d_bandwidth_gbps": 13,
                                "shared_d2h_bandwidth_gbps": 14,
                                "shared_h2d_bandwidth_gbps": 15,
                                "latency_to_first_byte_ms": 16,
                                "kv_layout_id": "layout",
                                "sharing": "equal_share",
                            },
                        },
                        "timing": {
                            "type": "fixed",
                            "prefill_ms": 17,
                            "decode_ms": 18,
                            "speedup_ratio": 19,
                            "decode_speedup_ratio": 20,
                        },
                    }
                },
            },
            "traffic": {
                "source": {
                    "type": "trace",
                    "paths": ["t"],
                    "block_size": 21,
                    "strict": True,
                },
                "load": {"type": "trace_timestamps", "speedup": 22},
                "stop": {"max_virtual_time_seconds": 0.5},
            },
            "evaluation": {"sla": {"ttft_ms": 23, "itl_ms": 24}},
        }
        host = HostTierConfig(
            scope=HostScope.CLUSTER_SHARED,
            capacity_blocks=11,
            d2h_gb_per_s=12.0,
            h2d_gb_per_s=13.0,
            shared_d2h_gb_per_s=14.0,
            shared_h2d_gb_per_s=15.0,
            latency_to_first_byte_ms=16.0,
            kv_layout_id="layout",
            sharing=Sharing.EQUAL_SHARE,
        )
        rank = RankConfig(
            gpu_blocks=10,
            block_size_tokens=8,
            max_model_len_tokens=5000,
            max_seqs=7,
            max_batched_tokens=6,
            chunked_prefill=False,
            preemption=PreemptionMode.FIFO,
            speedup_ratio=19.0,
            decode_speedup_ratio=20.0,
            timing=FixedTiming(prefill_ms=17.0, decode_ms=18.0),
            kv_bytes_per_token=9,
            host=host,
        )
        pool = PoolConfig(role=WorkerRole.AGGREGATED, workers=3, rank=rank, dp_size=5, tensor_parallel_size=4)
        source = TraceSource(path="t", format=TraceFormat.MOONCAKE, block_size_tokens=21, strict=True)
        expected = Scenario(
            name="n",
            why="w",
            seed=7,
            model="m",
            hardware="h",
            base_dir=Path("/b"),
            deployment=DeploymentConfig(
                pools=(pool,), sla=SlaConfig(ttft_ms=23.0, itl_ms=24.0), max_virtual_time_ms=500.0
            ),
            traffic=TrafficConfig(source=source, load=TimestampsLoad(speedup=22.0)),
        )
        before = copy.deepcopy(values)
        assert Scenario.from_dict(values, base_dir=Path("/b")) == expected
        assert values == before
        assert expected.trace_path == Path("/b/t")

    @pytest.mark.parametrize(("size", "blocks"), [(4000, 1), (7999, 1), (8000, 2), (4000 * 2**25, 2**25)])
    def test_a_capacity_in_bytes_is_whole_blocks(self, size: int, blocks: int) -> None:
        values = changed(aggregated(), {AGG + "kv_cache.capacity": {"type": "fixed", "bytes": size}})
        assert Scenario.from_dict(values).deployment.pools[0].rank.gpu_blocks == blocks

    def test_layout_id_of_a_shared_tier_has_a_default_and_a_private_one_has_none(self) -> None:
        for scope, layout in (("cluster_shared", "default"), ("dp_rank_local", None)):
            host = Scenario.from_dict(with_host(scope)).deployment.pools[0].rank.host
            assert host is not None
            assert host.kv_layout_id == layout

    def test_a_worker_can_narrow_what_the_engine_says(self) -> None:
        values = changed(aggregated(), {"engine.context_length": 100, "engine.enable_chunked_prefill": False})
        rank = Scenario.from_dict(values).deployment.pools[0].rank
        assert (rank.max_model_len_tokens, rank.chunked_prefill) == (100, False)
        values = changed(values, {AGG + "context_length": 50, AGG + "scheduler": {"chunked_prefill": True}})
        rank = Scenario.from_dict(values).deployment.pools[0].rank
        assert (rank.max_model_len_tokens, rank.chunked_prefill) == (50, True)

    @pytest.mark.parametrize("limits", [{}, None, {"ttft_ms": None}])
    def test_no_limit_is_no_sla(self, limits: Values | None) -> None:
        assert Scenario.from_dict(changed(aggregated(), {"evaluation.sla": limits})).deployment.sla is None

    @pytest.mark.parametrize(
        ("trace_format", "load", "block_size", "basis"),
        [
            ("mooncake", "concurrency", 512, None),
            ("mooncake-delta", "trace_timestamps", 512, None),
            ("applied_compute_agentic", "concurrency", 512, None),
            ("agentic_mooncake", "trace_timestamps", None, None),
            ("weka", "trace_timestamps", None, TimestampBasis.AUTO),
        ],
    )
    def test_defaults_of_traces(self, trace_format: str, load: str, block_size: int | None, basis: Any) -> None:
        scenario = Scenario.from_dict(traced(trace_format, load))
        source = scenario.traffic.source
        assert isinstance(source, TraceSource)
        assert (source.block_size_tokens, source.nested_timestamp_basis) == (block_size, basis)
        assert scenario.traffic.agentic == (trace_format in ("agentic_mooncake", "weka"))
        assert scenario.traffic.count is None

    @pytest.mark.parametrize("basis", TimestampBasis)
    def test_a_basis_that_is_given_stays(self, basis: TimestampBasis) -> None:
        source = Scenario.from_dict(changed(traced("weka"), {"traffic.source.nested_timestamp_basis": str(basis)}))
        assert isinstance(source.traffic.source, TraceSource)
        assert source.traffic.source.nested_timestamp_basis is basis

    @pytest.mark.parametrize(
        ("load", "stop", "count", "built"),
        [
            ({"type": "poisson", "requests_per_second": 4}, {"requests": 9}, 9, PoissonLoad(per_second=4.0, seed=42)),
            (
                {"type": "poisson", "requests_per_second": 2.5, "seed": 3},
                {"requests_per_load_unit": 1},
                3,
                PoissonLoad(per_second=2.5, seed=3),
            ),
            ({"concurrency": 4}, {"requests_per_load_unit": 0.1}, 1, ConcurrencyLoad(concurrency=4)),
            ({"concurrency": 4}, {"requests_per_load_unit": 2.6}, 10, ConcurrencyLoad(concurrency=4)),
            (
                {"type": "constant_rate", "requests_per_second": 1000 / 7.5},
                {"requests": 1},
                1,
                ConstantRateLoad(interval_ms=7.499999999999999),
            ),
            ({"type": "constant_rate", "interval_ms": 7.5}, {"requests": 1}, 1, ConstantRateLoad(interval_ms=7.5)),
            ({"type": "constant_rate", "interval_ms": 0}, {"requests": 1}, 1, ConstantRateLoad(interval_ms=0.0)),
        ],
    )
    def test_synthetic_loads(self, load: Values, stop: Values, count: int, built: Any) -> None:
        scenario = Scenario.from_dict(changed(aggregated(), {"traffic.load": load, "traffic.stop": stop}))
        assert (scenario.traffic.load, scenario.traffic.count) == (built, count)

    def test_sessions(self) -> None:
        traffic = Scenario.from_dict(sessions()).traffic
        assert traffic == TrafficConfig(
            source=SyntheticSessionSource(
                new_input_tokens_per_turn=1024, output_tokens_per_turn=128, turns=4, accumulate=True, group_seed=0
            ),
            load=PoissonLoad(per_second=2.0, seed=42),
            count=3,
        )


class TestDisaggregated:
    def test_a_role_that_is_missing_or_too_many(self) -> None:
        for role in ("prefill", "decode"):
            error = refusal(changed(disaggregated(), {f"engine.workers.{role}": GONE}))
            assert error.field == f"engine.workers.{role}"
            assert support.WORKER_COUNT in str(error)
        error = refusal(changed(disaggregated(), {"engine.workers.aggregated": worker()}))
        assert error.field == "engine.workers.aggregated"
        assert "allowed: only prefill and decode" in str(error)

    @pytest.mark.parametrize("role", ["prefill", "decode"])
    @pytest.mark.parametrize("count", [0, -1, True, False, 2.0, "2", None, NAN, []])
    def test_worker_counts_are_checked_role_by_role(self, role: str, count: Any) -> None:
        path = f"engine.workers.{role}.parallelism.replicas"
        error = refusal(changed(disaggregated(), {path: count}))
        assert error.field == path
        assert f"got {count!r}; allowed: any positive integer number of workers per role" in str(error)

    @pytest.mark.parametrize(
        ("key", "prefill", "decode"),
        [
            ("kv_cache.block_size", 4, 8),
            ("kv_cache.bytes_per_token", 1000, 2000),
            ("parallelism.tensor", 1, 2),
            ("kv_cache.host_offload.kv_layout_id", "a", "b"),
            ("kv_cache.host_offload.num_host_blocks", 8, 9),
            ("kv_cache.host_offload.shared_d2h_bandwidth_gbps", 1.0, 2.0),
            ("kv_cache.host_offload.shared_h2d_bandwidth_gbps", 1.0, 2.0),
            ("kv_cache.host_offload.sharing", "max_min", "equal_share"),
        ],
    )
    def test_roles_of_one_pool_must_agree(self, key: str, prefill: Any, decode: Any) -> None:
        paths = {f"engine.workers.prefill.{key}": prefill, f"engine.workers.decode.{key}": decode}
        values = changed(disaggregated(), paths)
        error = refusal(values)
        assert error.field == f"engine.workers.decode.{key}"
        assert f"must agree; got {decode!r}; allowed: {prefill}, as in engine.workers.prefill.{key}" in str(error)
        if key != "kv_cache.block_size":
            for role in ("prefill", "decode"):
                private = f"engine.workers.{role}.kv_cache.host_offload.scope"
                Scenario.from_dict(changed(values, {private: "dp_rank_local"}))
                if not key.startswith("kv_cache.host_offload"):
                    Scenario.from_dict(changed(values, {f"engine.workers.{role}.kv_cache.host_offload": None}))

    def test_links_and_device_sizes_may_differ(self) -> None:
        host = "engine.workers.decode.kv_cache.host_offload."
        changes = {host + "d2h_bandwidth_gbps": 1, host + "latency_to_first_byte_ms": 1}
        changes |= {
            "engine.workers.decode.kv_cache.capacity.blocks": 3,
            "engine.workers.decode.parallelism.replicas": 5,
        }
        prefill, decode = Scenario.from_dict(changed(disaggregated(), changes)).deployment.pools
        assert (prefill.role, prefill.workers, decode.role, decode.workers) == ("prefill", 2, "decode", 5)

    def test_defaults_that_depend_on_the_role(self) -> None:
        values = changed(disaggregated(), {"engine.enable_chunked_prefill": False})
        ranks = [pool.rank for pool in Scenario.from_dict(values).deployment.pools]
        assert [(rank.max_seqs, rank.chunked_prefill) for rank in ranks] == [(1, False), (256, True)]

    @pytest.mark.parametrize(
        ("handoff", "built"),
        [
            (None, HandoffConfig()),
            ({}, HandoffConfig(bytes_per_token=1000, timing=TransferTiming.DESTINATION_MISSING)),
            (
                {"bandwidth_gb_per_second": 0, "timing_mode": "full_prompt"},
                HandoffConfig(bytes_per_token=1000, timing=TransferTiming.FULL_PROMPT),
            ),
            (
                {"bytes_per_token": 7, "bandwidth_gb_per_second": 2},
                HandoffConfig(bytes_per_token=7, gb_per_s=2.0, timing=TransferTiming.DESTINATION_MISSING),
            ),
        ],
    )
    def test_handoff(self, handoff: Values | None, built: HandoffConfig) -> None:
        scenario = Scenario.from_dict(changed(disaggregated(), {"engine.kv_transfer": handoff}))
        assert scenario.deployment.handoff == built
        assert Scenario.from_resolved(scenario.resolved()) == scenario

    @pytest.mark.parametrize(
        ("key", "bad"),
        [
            ("bytes_per_token", [0, -1, 1.0, True, "8", 10**30]),
            ("bandwidth_gb_per_second", [-1, NAN, INF, True, "8"]),
            ("timing_mode", ["half", None, 1]),
        ],
    )
    def test_handoff_that_is_refused(self, key: str, bad: list[Any]) -> None:
        for value in bad:
            error = refusal(changed(disaggregated(), {f"engine.kv_transfer.{key}": value}))
            assert error.field == f"engine.kv_transfer.{key}"
            assert f"got {shorten(value)}" in str(error)

    def test_handoff_that_does_not_know_its_bytes(self) -> None:
        changes: Values = {"engine.kv_transfer": {"bandwidth_gb_per_second": 1, "bytes_per_token": "auto"}}
        for role in ("prefill", "decode"):
            changes[f"engine.workers.{role}.kv_cache.host_offload"] = None
        changes["engine.workers.prefill.kv_cache.bytes_per_token"] = GONE
        error = refusal(changed(disaggregated(), changes))
        assert error.field == "engine.kv_transfer.bytes_per_token"
        assert "got 'auto'; allowed: a positive integer" in str(error)


TEXT = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=6).filter(str.strip)
COUNTS = st.integers(1, 1000)
FLOATS = st.just(0.0) | st.floats(1e-6, 1e9)
POSITIVE = st.floats(1e-3, 1e9)


@st.composite
def scenarios(draw: st.DrawFn) -> Values:
    """Valid scenarios with all kinds of traffic, both modes."""

    def maybe(values: Values) -> Values:
        return {key: draw(value) for key, value in values.items() if draw(st.booleans())}

    def host() -> Values | None:
        links = ("d2h_bandwidth_gbps", "h2d_bandwidth_gbps", "shared_d2h_bandwidth_gbps", "shared_h2d_bandwidth_gbps")
        if draw(st.booleans()):
            return None
        fields: Values = {**dict.fromkeys(links, st.just(0) | POSITIVE), "kv_layout_id": TEXT}
        fields |= {"sharing": st.sampled_from(["max_min", "equal_share"]), "latency_to_first_byte_ms": FLOATS}
        return {"scope": draw(st.sampled_from(list(HostScope))).value, "num_host_blocks": draw(COUNTS), **maybe(fields)}

    def one_worker(tier: Values | None) -> Values:
        fixed = {"type": "fixed", "prefill_ms": draw(FLOATS), "decode_ms": draw(FLOATS)}
        timing = draw(st.sampled_from([fixed, {"type": "polynomial"}]))
        sizes = draw(st.sampled_from([{"blocks": 9}, {"bytes": 64 * 10**6}]))
        return {
            "parallelism": {"replicas": draw(COUNTS), **maybe({"tensor": st.just(2), "attention_data": st.just(1)})},
            "scheduler": maybe(
                {
                    "max_batched_tokens": st.none() | COUNTS,
                    "max_sequences": st.none() | COUNTS,
                    "chunked_prefill": st.booleans(),
                    "preemption_mode": st.sampled_from(["lifo", "fifo"]),
                }
            ),
            "kv_cache": {
                "block_size": block_size,
                "bytes_per_token": 1000,
                "capacity": {"type": "fixed", **sizes},
                "host_offload": tier,
                **({} if tier else maybe({"prefix_caching": st.booleans()})),
            },
            "timing": timing | maybe({"speedup_ratio": FLOATS, "decode_speedup_ratio": FLOATS}),
            **maybe({"context_length": st.none() | COUNTS}),
        }

    block_size = draw(st.integers(2, 600))
    mode = draw(st.sampled_from(["aggregated", "disaggregated"]))
    tier = host()
    if mode == "aggregated":
        workers = {"aggregated": one_worker(tier)}
    else:
        workers = {"prefill": one_worker(tier), "decode": one_worker(tier if draw(st.booleans()) else None)}
        for each in workers.values():
            each["parallelism"]["tensor"] = 1
    engine = {"mode": mode, "model": "m", "workers": workers, **maybe({"hardware": TEXT, "context_length": COUNTS})}
    if mode == "disaggregated":
        modes = st.sampled_from(["full_prompt", "destination_missing"])
        transfer = {"bytes_per_token": COUNTS, "bandwidth_gb_per_second": st.just(0) | POSITIVE, "timing_mode": modes}
        engine["kv_transfer"] = maybe(transfer)
    kind = draw(st.sampled_from(["synthetic", "synthetic-session", *TraceFormat]))
    unit = "sessions" if kind == "synthetic-session" else "requests"
    rate = {f"{unit}_per_second": draw(POSITIVE)}
    loads: list[Values] = [
        {"type": "concurrency", **maybe({"concurrency": COUNTS})},
        {"type": "poisson", **rate, **maybe({"seed": st.integers(0, 2**64 - 1)})},
        {"type": "constant_rate", **rate},
        {"type": "constant_rate", "interval_ms": draw(FLOATS)},
    ]
    stop: Values = maybe({"max_virtual_time_ms": FLOATS}) or maybe({"max_virtual_time_seconds": POSITIVE})
    if kind in ("synthetic", "synthetic-session"):
        groups = {"prefix_groups": draw(COUNTS), "shared_prefix_ratio": draw(st.floats(0, 1))}
        shape = maybe({"turns": COUNTS, "accumulate": st.booleans(), "group_seed": st.integers(0, 2**64 - 1)})
        source: Values = {"type": kind, **({"session": shape | groups} if kind != "synthetic" else {})}
        load = draw(st.sampled_from(loads))
        ratio = load["type"] == "concurrency" and draw(st.booleans())
        stop |= {f"{unit}_per_load_unit": draw(st.floats(0.1, 9))} if ratio else {unit: draw(COUNTS)}
    else:
        agentic = kind in support.AGENTIC_FORMATS
        source = {"type": "trace", "paths": [draw(TEXT)], "format": str(kind), **maybe({"strict": st.booleans()})}
        source |= maybe({"block_size": COUNTS})
        load = {
            "type": "trace_timestamps",
            **maybe({"speedup": POSITIVE, **({"agentic_lanes": COUNTS} if agentic else {})}),
        }
        if "agentic_lanes" in load and draw(st.booleans()):
            load |= {
                "agentic_snapshot": {"seed": draw(st.integers(0, 2**64 - 1))},
                **maybe({"agentic_warmup": st.booleans()}),
            }
            if draw(st.booleans()):
                load["agentic_profile"] = maybe({"duration_seconds": st.floats(1, 9), "cancel_drain_seconds": FLOATS})
        if kind == "applied_compute_agentic":
            load = loads[0]
        stop = {} if agentic else stop
        if kind == "mooncake-delta" and mode == "disaggregated":
            source["format"] = "mooncake"
    sla = draw(st.sampled_from([None, {"e2e_ms": 3.0}, {"ttft_ms": 1.0}, {"ttft_ms": 1.0, "itl_ms": 2.5}]))
    return {
        **maybe({"name": TEXT, "why": TEXT, "seed": st.integers(0, 2**64 - 1)}),
        "engine": engine,
        "traffic": {"source": source, "load": load, "stop": stop},
        "evaluation": {"sla": sla},
    }


def plain(value: Any) -> bool:
    """Only what JSON and msgpack have; subclasses such as enumerations do not count."""
    if type(value) is dict:
        return all(type(key) is str and plain(inner) for key, inner in value.items())
    if type(value) is list:
        return all(map(plain, value))
    return value is None or type(value) in (bool, int, float, str)


class TestResolved:
    @given(scenarios())
    def test_the_resolved_form_is_a_scenario_and_gives_an_equal_one(self, values: Values) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(support, "RULES", without_rule("disaggregated"))
            scenario = Scenario.from_dict(values, base_dir=Path("b"))
            resolved = scenario.resolved()
            assert plain(resolved)
            for form in (
                resolved,
                json.loads(json.dumps(resolved, allow_nan=False)),
                msgpack.unpackb(msgpack.packb(resolved)),
            ):
                assert Scenario.from_resolved(form, base_dir=Path("b")) == scenario
                assert Scenario.from_resolved(form).resolved() == resolved

    def test_every_default_is_filled_in(self) -> None:
        resolved = Scenario.from_dict(with_host("cluster_shared")).resolved()
        assert resolved == {
            "name": "unnamed",
            "why": "",
            "seed": 0,
            "engine": {
                "mode": "aggregated",
                "model": None,
                "hardware": None,
                "backend": "vllm",
                "workers": {
                    "aggregated": {
                        "context_length": None,
                        "parallelism": {"replicas": 2, "tensor": 1, "attention_data": 1},
                        "scheduler": {
                            "max_batched_tokens": 8192,
                            "max_sequences": 256,
                            "chunked_prefill": True,
                            "preemption_mode": "lifo",
                        },
                        "kv_cache": {
                            "block_size": 4,
                            "prefix_caching": True,
                            "bytes_per_token": 1000,
                            "capacity": {"type": "fixed", "blocks": 64},
                            "host_offload": {
                                "scope": "cluster_shared",
                                "num_host_blocks": 8,
                                "d2h_bandwidth_gbps": 32.0,
                                "h2d_bandwidth_gbps": 32.0,
                                "shared_d2h_bandwidth_gbps": 80.0,
                                "shared_h2d_bandwidth_gbps": 80.0,
                                "latency_to_first_byte_ms": 0.0,
                                "kv_layout_id": "default",
                                "sharing": "max_min",
                            },
                        },
                        "timing": {
                            "type": "fixed",
                            "prefill_ms": 2.0,
                            "decode_ms": 1.0,
                            "speedup_ratio": 1.0,
                            "decode_speedup_ratio": 1.0,
                        },
                    }
                },
                "kv_transfer": None,
            },
            "traffic": {
                "source": {"type": "synthetic", "input_tokens": 1024, "output_tokens": 128},
                "load": {"type": "concurrency", "concurrency": 10},
                "stop": {"requests": 3, "max_virtual_time_ms": None},
            },
            "router": {"policy": "round_robin", "kv_event_lag_ms": 0.0, "tie_break": "lowest", "options": {}},
            "evaluation": {"sla": None},
        }

    def test_it_follows_a_scenario_that_a_program_changes(self) -> None:
        scenario = attrs.evolve(Scenario.from_dict(aggregated()), seed=5, why="other")
        assert scenario.resolved()["seed"] == 5
        assert Scenario.from_resolved(scenario.resolved()) == scenario

    def test_it_does_not_depend_on_the_directory(self) -> None:
        here, there = (Scenario.from_dict(traced(), base_dir=Path(name)) for name in ("a", "b"))
        assert here != there
        assert here.resolved() == there.resolved()


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.sampled_from(["fixed", "auto"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)
PLACES = st.sampled_from(sorted({*FIELDS, *SECTIONS} - {""}))


@given(
    st.sampled_from([aggregated, with_host, sessions, traced, agentic_g2, disaggregated]), PLACES, JUNK, st.booleans()
)
def test_any_damage_gives_a_scenario_or_a_config_error(
    base: Callable[[], Values], path: str, junk: Any, opened: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if opened:
            patch.setattr(support, "RULES", without_rule("disaggregated"))
        values = base()
        inner: Any = values
        *outer, last = path.split(".")
        for key in outer:
            inner = inner.setdefault(key, {})
            if not isinstance(inner, dict):
                return
        inner[last] = junk
        with contextlib.suppress(ConfigError):
            scenario = Scenario.from_dict(values)
            assert Scenario.from_resolved(scenario.resolved()) == scenario


BROKEN: dict[str, Values] = {
    "unknown key": changed(aggregated(), {AGG + "kv_cache.blocksize": 4}),
    "bool for int": changed(aggregated(), {AGG + "parallelism.tensor": True}),
    "bool for text": changed(aggregated(), {"name": False}),
    "text for int": changed(aggregated(), {AGG + "kv_cache.block_size": "8"}),
    "null": changed(aggregated(), {AGG + "timing.prefill_ms": None}),
    "float for int": changed(aggregated(), {AGG + "scheduler.max_sequences": 2.0}),
    "list for mapping": changed(aggregated(), {"engine.workers": []}),
    "missing": changed(aggregated(), {AGG + "timing.decode_ms": GONE}),
    "not supported": changed(aggregated(), {"engine.backend": "sglang"}),
    "unsupported key": changed(aggregated(), {AGG + "kv_cache.kvcr": {"bandwidth_gbps": 1.0}}),
    "worker count": changed(agentic_g2(), {AGG + "parallelism.replicas": 0}),
    "agreement": changed(with_host(), {AGG + "kv_cache.prefix_caching": False}),
    "variant": changed(aggregated(), {"traffic.load.speedup": 2.0}),
}


class TestFiles:
    @pytest.mark.parametrize("name", BROKEN)
    def test_yaml_json_and_values_give_the_same_message_apart_from_the_place(self, name: str, tmp_path: Path) -> None:
        values = BROKEN[name]
        said = str(refusal(values))
        for file, text in (("s.yaml", yaml.safe_dump(values)), ("s.json", json.dumps(values, indent=2))):
            path = tmp_path / file
            path.write_text(text)
            with pytest.raises(ConfigError) as caught:
                load_scenario(path)
            where = caught.value.where
            assert where is not None
            assert str(caught.value) == f"{where}: {said}"
            source, line = where.rsplit(":", 1)
            assert source == str(path)
            key = caught.value.field.split(".")[-1]
            assert name == "missing" or text.splitlines()[int(line) - 1].strip().strip('"').startswith(key)

    def test_the_line_is_that_of_the_nested_key(self, tmp_path: Path) -> None:
        path = tmp_path / "s.yaml"
        path.write_text(
            "engine:\n"
            "  workers:\n"
            "    aggregated:\n"
            "      timing: {type: fixed, prefill_ms: 2, decode_ms: 1}\n"
            "      kv_cache:\n"
            "        # a comment\n"
            "        capacity:\n"
            "          type: fixed\n"
            "          blocks: -4\n"
        )
        with pytest.raises(ConfigError) as caught:
            load_scenario(path)
        assert str(caught.value) == (
            f"{path}:9: engine.workers.aggregated.kv_cache.capacity.blocks: got -4; "
            "allowed: a positive integer number of blocks, or null"
        )

    def test_a_missing_key_is_said_to_be_where_its_mapping_is(self, tmp_path: Path) -> None:
        path = tmp_path / "s.yaml"
        path.write_text("name: x\nengine:\n  workers:\n    aggregated:\n      timing:\n        type: fixed\n")
        with pytest.raises(ConfigError) as caught:
            load_scenario(path)
        assert caught.value.field == AGG + "timing.prefill_ms"
        assert caught.value.where == f"{path}:5"

    @pytest.mark.parametrize(
        ("line", "hint"),
        [
            ("name: on", "YAML reads the bare word on as a boolean; put it in quotes to mean text"),
            ("name: No", "YAML reads the bare word No as a boolean; put it in quotes to mean text"),
            ("seed: yes", "YAML reads the bare word yes as a boolean; put it in quotes to mean text"),
            ("name: true", None),
            ("seed: 1e3", "YAML 1.1 reads 1e3 as text; a number with an exponent is written like 1.0e+3 there"),
            ("seed: '3'", "this is text; write a number without quotes"),
            ("seed: off", "YAML reads the bare word off as a boolean; put it in quotes to mean text"),
            ("seed: three", None),
        ],
    )
    def test_what_yaml_makes_of_bare_words_is_said(self, line: str, hint: str | None, tmp_path: Path) -> None:
        path = tmp_path / "s.yaml"
        path.write_text(f"{line}\nengine: {{}}\n")
        with pytest.raises(ConfigError) as caught:
            load_scenario(path)
        assert caught.value.where == f"{path}:1"
        assert caught.value.hint == hint

    def test_a_trace_is_found_beside_the_scenario(self, tmp_path: Path) -> None:
        folder = tmp_path / "deep"
        folder.mkdir()
        path = folder / "s.yaml"
        path.write_text(yaml.safe_dump(changed(traced(), {"traffic.source.paths": ["../t.jsonl"]})))
        with pytest.raises(ConfigError, match="no such file or directory") as caught:
            load_scenario(path)
        assert caught.value.field == "traffic.source.paths[0]"
        assert f"no such file or directory: '{folder}/../t.jsonl'; paths are relative" in str(caught.value)
        line = int(str(caught.value.where).rsplit(":", 1)[1])
        assert "../t.jsonl" in path.read_text().splitlines()[line - 1]
        (tmp_path / "t.jsonl").touch()
        scenario = load_scenario(path)
        assert scenario.base_dir == folder
        assert scenario.trace_path is not None
        assert scenario.trace_path.samefile(tmp_path / "t.jsonl")

    def test_an_absolute_trace_path_stays(self, tmp_path: Path) -> None:
        trace = tmp_path / "t.jsonl"
        trace.touch()
        path = tmp_path / "s.yaml"
        path.write_text(yaml.safe_dump(changed(traced(), {"traffic.source.paths": [str(trace)]})))
        assert load_scenario(path).trace_path == trace

    def test_a_scenario_without_a_name_is_named_after_its_file(self, tmp_path: Path) -> None:
        path = tmp_path / "my-run.yaml"
        path.write_text(yaml.safe_dump(aggregated()))
        assert load_scenario(path).name == "my-run"
        path.write_text(yaml.safe_dump({**aggregated(), "name": "own"}))
        assert load_scenario(path).name == "own"
        assert Scenario.from_dict(aggregated()).name == "unnamed"

    def test_the_resolved_form_can_be_a_file(self, tmp_path: Path) -> None:
        scenario = Scenario.from_dict(agentic_g2(), base_dir=tmp_path)
        (tmp_path / "t.jsonl").touch()
        for name, text in (
            ("r.json", json.dumps(scenario.resolved())),
            ("r.yaml", yaml.safe_dump(scenario.resolved())),
        ):
            (tmp_path / name).write_text(text)
            assert load_scenario(tmp_path / name) == scenario
