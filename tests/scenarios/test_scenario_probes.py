"""Recorded calls of the reference: what it refuses and takes, in our words; and every recorded run has a scenario."""

from __future__ import annotations

import json
from typing import Any

import pytest
from scenario_values import ORACLE, Values, refusal
from translate import call_from_rank, scenario_from_call

from g2sim.bus.errors import shorten
from g2sim.scenarios.schema import Scenario

SCHEDULER: dict[str, Any] = json.loads((ORACLE / "sched-validation.json").read_text())
PROBES = {name: probe for name, probe in SCHEDULER.items() if not name.startswith("row ") and name != "empty trace"}
HOST: dict[str, Any] = {
    probe["name"]: probe for probe in json.loads((ORACLE / "g2-validation.json").read_text())["checks"]
}
RUNS = sorted(path for part in ("g2", "sched", "workload") for path in (ORACLE / part).glob("*.json"))

SAID: dict[str, tuple[str, Any]] = {
    "engine.num_gpu_blocks": ("kv_cache.capacity.blocks", ...),
    "engine.block_size": ("kv_cache.block_size", ...),
    "engine.max_num_seqs": ("scheduler.max_sequences", ...),
    "engine.max_num_batched_tokens": ("scheduler.max_batched_tokens", ...),
    "engine.max_model_len": ("context_length", ...),
    "engine.speedup_ratio": ("timing.speedup_ratio", ...),
    "engine.decode_speedup_ratio": ("timing.decode_speedup_ratio", ...),
    "engine.enable_prefix_caching": ("kv_cache.prefix_caching", ...),
    "engine.preemption_mode": ("scheduler.preemption_mode", ...),
    "engine.worker_type": ("worker_type", ...),
    "engine.backend": ("engine.backend", ...),
    "engine.kv_transfer_bytes_per_token": ("kv_transfer.bytes_per_token", ...),
    "engine.kv_transfer_bandwidth": ("kv_transfer.bandwidth_gb_per_second", ...),
    "engine.kv_transfer_timing_mode": ("kv_transfer.timing_mode", ...),
    "engine.prefill_schedule_interval": ("scheduler.prefill_schedule_interval", ...),
    "engine.prefill_decode_interval": ("scheduler.prefill_decode_interval", ...),
    "engine.kv_cache_bytes_per_token": ("kv_cache.bytes_per_token", ...),
    "engine.aic_nextn_accept_rates": ("engine.nextn_accepted", ...),
    "engine.unknown_key": ("unknown_key", ...),
    "engine.emit_kv_token_ids without emit_kv_events": ("emit_kv_token_ids", True),
    "timing fixed without decode_ms": ("timing.decode_ms", None),
    "timing fixed negative": ("timing.prefill_ms", -1.0),
    "timing unknown": ("timing.path", None),  # table is a type of ours, and needs one
    "timing external unknown": ("timing.type", "external"),
    "num_workers 0": ("aggregated.parallelism.replicas", 0),
    "replay_concurrency 0": ("traffic.load.concurrency", 0),
    "arrival_speedup_ratio 0": ("traffic.load.speedup", 0.0),
    "arrival_speedup_ratio negative": ("traffic.load.speedup", -1.0),
    "trace_block_size 0": ("traffic.source.block_size", 0),
    "max_sim_time_ms negative": ("traffic.stop.max_virtual_time_ms", -1.0),
    "sla e2e with ttft": ("evaluation.sla.e2e_ms", 5.0),
    "sla ttft 0": ("evaluation.sla.ttft_ms", 0.0),
    "wrapper unknown key": ("aggregated.replicas", 2),
    "wrapper dp_size 0": ("parallelism.attention_data", 0),
    "pd prefill workers 0": ("prefill.parallelism.replicas", 0),
    "pd decode workers 0": ("decode.parallelism.replicas", 0),
    "pd block sizes differ": ("decode.kv_cache.block_size", 8),
    "pd backends differ": ("decode.backend", "sglang"),
    "pd with aggregated too": ("workers.aggregated", None),
    "pd prefill alone": ("workers.decode", None),
    "pd roles swapped": ("prefill.worker_type", "decode"),
    "num_host_blocks zero": ("num_host_blocks", 0),
    "num_host_blocks negative": ("num_host_blocks", -1),
    "num_host_blocks missing": ("num_host_blocks", None),
    "d2h_bandwidth_gbps negative": ("host_offload.d2h_bandwidth_gbps", -1.0),
    "h2d_bandwidth_gbps negative": ("host_offload.h2d_bandwidth_gbps", -1.0),
    "latency_to_first_byte_ms negative": ("latency_to_first_byte_ms", -1.0),
    "d2h_bandwidth_gbps so small that a copy would never end": ("host_offload.d2h_bandwidth_gbps", 1e-320),
    "h2d_bandwidth_gbps so small that a copy would never end": ("host_offload.h2d_bandwidth_gbps", 1e-320),
    "shared_d2h_bandwidth_gbps negative": ("shared_d2h_bandwidth_gbps", -1.0),
    "shared_h2d_bandwidth_gbps negative": ("shared_h2d_bandwidth_gbps", -1.0),
    "shared without a layout id": ("kv_layout_id", None),
    "shared with a blank layout id": ("kv_layout_id", "  "),
    "scope worker_local": ("host_offload.scope", "worker_local"),
    "scope unknown": ("host_offload.scope", "other"),
    "unknown field": ("host_offload.other", 1),
    "bytes per token missing": ("kv_cache.bytes_per_token", None),
    "bytes per token zero": ("kv_cache.bytes_per_token", 0),
    "prefix caching off": ("kv_cache.prefix_caching", False),
    "backend sglang": ("engine.backend", "sglang"),
    "backend trtllm": ("engine.backend", "trtllm"),
    "speculative tokens": ("engine.nextn", 1),
    "state cache beside the host tier": ("kv_cache.state_cache", {"bytes_per_request": 100}),
    "block_size one": ("kv_cache.block_size", 1),
    "third tier without the host tier": ("kv_cache.g3_offload", {"scope": "worker_local", "num_g3_blocks": 8}),
    "roles differ in layout id": ("decode.kv_cache.host_offload.kv_layout_id", "layout-b"),
    "roles differ in capacity": ("decode.kv_cache.host_offload.num_host_blocks", 9),
    "roles differ in shared bandwidth": ("decode.kv_cache.host_offload.shared_d2h_bandwidth_gbps", 10.0),
    "roles differ in block bytes": ("decode.kv_cache.bytes_per_token", 125000),
    "roles differ in block size": ("decode.kv_cache.block_size", 8),
    "roles differ in tensor parallel size": ("decode.parallelism.tensor", 2),
}
"""Probe -> end of the field that our message names, and the value in it (None: there is none to show)."""

NOT_SUPPORTED = {
    "state cache alone": "state_cache",
    "speculative tokens without the host tier": "nextn",
    "third tier above the host tier": "g3_offload",
}
"""Taken by the reference, refused by us by name."""

OPTIONS_REFUSED = {
    *("error_am_concurrency", "error_am_no_execution_model", "error_am_zero_lanes", "error_weka_concurrency"),
    *("error_mooncake_bad_speedup", "error_mooncake_with_lanes", "error_mooncake_zero_block_size"),
    *("error_mooncake_zero_concurrency", "error_unknown_format", "error_applied_compute_timestamps"),
    *("error_profile_negative_grace", "error_profile_with_time_limit", "error_profile_without_snapshot"),
    *("error_profile_zero_duration", "error_snapshot_negative_seed", "error_snapshot_unknown_key"),
    *("error_snapshot_without_lanes", "error_warmup_without_snapshot"),
    *("error_synthetic_no_load", "error_synthetic_two_loads", "error_synthetic_zero_input", "error_synthetic_ratio"),
}
"""Recorded refusals that are about options; all others are about rows of a trace, which nobody reads here."""


def translated(call: Values, trace_format: str | None = "mooncake") -> Values:
    return scenario_from_call(call, trace_path="t.jsonl", trace_format=trace_format)


def expected(name: str) -> tuple[str, Any]:
    key = name.split("=")[0]
    field, value = SAID[key]
    return field, json.loads(name.split("=", 1)[1]) if value is ... else value


class TestProbes:
    @pytest.mark.parametrize("name", [*PROBES, *(name for name, probe in HOST.items() if not probe["accepted"])])
    def test_what_the_reference_refuses_is_refused_by_field_and_value(self, name: str) -> None:
        field, value = expected(name)
        error = refusal(translated({**PROBES, **HOST}[name]["call"]))
        assert error.field.endswith(field)
        assert "allowed: " in str(error)
        if value is not None:
            assert f"got {shorten(value)}" in str(error)

    @pytest.mark.parametrize("name", [name for name, probe in HOST.items() if probe["accepted"]])
    def test_what_the_reference_takes_is_taken(self, name: str) -> None:
        values = translated(HOST[name]["call"])
        if name in NOT_SUPPORTED:
            error = refusal(values)
            assert error.field.endswith(NOT_SUPPORTED[name])
            assert "not supported" in str(error)
        else:
            scenario = Scenario.from_dict(values)
            assert Scenario.from_resolved(scenario.resolved()) == scenario

    def test_every_probe_is_in_the_table_of_this_test(self) -> None:
        refused = {*(name.split("=")[0] for name in PROBES), *(name for name in HOST if not HOST[name]["accepted"])}
        assert refused == set(SAID)


@pytest.mark.parametrize("path", RUNS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_recorded_run_can_be_described(path: Any) -> None:
    recorded = json.loads(path.read_text())
    call = {**recorded.get("synthetic", {}), **recorded["call"]}
    values = translated(call, recorded["trace_format"])
    if path.stem in OPTIONS_REFUSED:
        refusal(values)
    else:
        scenario = Scenario.from_dict(values)
        assert Scenario.from_resolved(scenario.resolved()) == scenario
        split = "prefill_engine_args" in call or call.get("spec", {}).get("topology", {}).get("kind") == "disaggregated"
        assert len(scenario.deployment.pools) == (2 if split else 1)


def test_names_and_numbers_of_a_call_arrive() -> None:
    rank = {
        "backend": "vllm",
        "num_gpu_blocks": 11,
        "block_size": 12,
        "max_num_seqs": 13,
        "max_num_batched_tokens": 14,
        "max_model_len": 15,
        "enable_chunked_prefill": False,
        "preemption_mode": "fifo",
        "kv_cache_bytes_per_token": 16,
        "speedup_ratio": 1.25,
        "decode_speedup_ratio": 1.5,
        "emit_kv_events": True,
        "timing_model": {"type": "fixed", "prefill_ms": 2.0, "decode_ms": 1.0},
        "native_host_offload": {"num_host_blocks": 17, "d2h_bandwidth_gbps": 0.5},
    }
    call = call_from_rank(rank, max_sim_time_ms=24.1, arrival_speedup_ratio=2.5, trace_block_size=18, sla_e2e_ms=9.0)
    resolved = Scenario.from_dict(translated(call)).resolved()
    (worker,) = resolved["engine"]["workers"].values()
    assert worker["context_length"] == 15
    assert list(worker["scheduler"].values()) == [14, 13, False, "fifo"]
    assert worker["kv_cache"]["capacity"]["blocks"] == 11
    assert (worker["kv_cache"]["block_size"], worker["kv_cache"]["bytes_per_token"]) == (12, 16)
    assert worker["kv_cache"]["host_offload"]["num_host_blocks"] == 17
    assert worker["kv_cache"]["host_offload"]["d2h_bandwidth_gbps"] == 0.5
    assert worker["kv_cache"]["host_offload"]["sharing"] == "equal_share"
    assert (worker["timing"]["speedup_ratio"], worker["timing"]["decode_speedup_ratio"]) == (1.25, 1.5)
    assert resolved["traffic"]["stop"]["max_virtual_time_ms"] == 24.1
    assert resolved["traffic"]["load"] == {
        "type": "trace_timestamps",
        "speedup": 2.5,
        "agentic_lanes": None,
        "agentic_snapshot": None,
        "agentic_warmup": False,
        "agentic_profile": None,
    }
    assert resolved["traffic"]["source"]["block_size"] == 18
    assert resolved["evaluation"]["sla"]["e2e_ms"] == 9.0


def test_the_seats_of_a_call_are_256_for_every_role() -> None:
    """Scenario files give a prefill worker one seat; calls of the reference do not."""
    arguments = {"engine": {"num_gpu_blocks": 8}}
    call = {"prefill_engine_args": arguments, "decode_engine_args": arguments}
    pools = Scenario.from_dict(translated(call)).deployment.pools
    assert [(pool.rank.max_seqs, pool.rank.block_size_tokens, pool.workers) for pool in pools] == [(256, 64, 1)] * 2
