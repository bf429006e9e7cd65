"""The keyword form of the reference replay, as recorded in the oracle files, turned into our scenario form.

Owns: names. Nothing is checked, and nothing unknown is dropped: it is carried over, for our checks to refuse.
Used by tests only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

Values = dict[str, Any]

WORKER_PATHS = {
    "max_model_len": "context_length",
    "max_num_seqs": "scheduler.max_sequences",
    "max_num_batched_tokens": "scheduler.max_batched_tokens",
    "enable_chunked_prefill": "scheduler.chunked_prefill",
    "preemption_mode": "scheduler.preemption_mode",
    "prefill_schedule_interval": "scheduler.prefill_schedule_interval",
    "prefill_decode_interval": "scheduler.prefill_decode_interval",
    "num_gpu_blocks": "kv_cache.capacity.blocks",
    "block_size": "kv_cache.block_size",
    "enable_prefix_caching": "kv_cache.prefix_caching",
    "kv_cache_bytes_per_token": "kv_cache.bytes_per_token",
    "g3_offload": "kv_cache.g3_offload",
    "state_cache": "kv_cache.state_cache",
    "prefix_match_unit": "kv_cache.prefix_match_unit",
    "speedup_ratio": "timing.speedup_ratio",
    "decode_speedup_ratio": "timing.decode_speedup_ratio",
    "tensor_parallel_size": "parallelism.tensor",
    "dp_size": "parallelism.attention_data",
    "startup_time": "startup_seconds",
}

TRANSFER_KEYS = {
    "kv_transfer_bytes_per_token": "bytes_per_token",
    "kv_transfer_bandwidth": "bandwidth_gb_per_second",
    "kv_transfer_timing_mode": "timing_mode",
}

CALL_PATHS = {
    "execution_model": "engine.model",
    "router_mode": "router.policy",
    "kv_event_lag_ms": "router.kv_event_lag_ms",
    "router_config": "router.options",
    "trace_block_size": "traffic.source.block_size",
    "weka_nested_timestamp_basis": "traffic.source.nested_timestamp_basis",
    "trace_shared_prefix_ratio": "traffic.source.shared_prefix_ratio",
    "trace_num_prefix_groups": "traffic.source.prefix_groups",
    "agentic_lanes": "traffic.load.agentic_lanes",
    "agentic_snapshot": "traffic.load.agentic_snapshot",
    "agentic_warmup": "traffic.load.agentic_warmup",
    "agentic_profile": "traffic.load.agentic_profile",
    "max_sim_time_ms": "traffic.stop.max_virtual_time_ms",
    "sla_ttft_ms": "evaluation.sla.ttft_ms",
    "sla_itl_ms": "evaluation.sla.itl_ms",
    "sla_e2e_ms": "evaluation.sla.e2e_ms",
}

IGNORED_BY_REPLAY = ("use_kv_events", "router_predicted_ttl_secs", "router_track_output_blocks")
"""Router settings that have no effect in an offline replay; ours are refused unless they are off."""

ONLY_ABOUT_OUTPUT = ("capture_per_request", "trace_format", "report_jsonl_path", "capture_planner_details")


def scenario_from_call(call: Mapping[str, Any], *, trace_path: str | None, trace_format: str | None) -> Values:
    """The scenario that a recorded call describes.

    Args:
        call: arguments of ``run_trace_replay``, or of ``run_synthetic_trace_replay`` (with input_tokens, output_tokens
            and request_count among them), or ``spec`` and ``traffic`` of the other recorded build.
        trace_path: the trace, as ``traffic.source.paths`` is to say it; not used for synthetic traffic.
        trace_format: its format; "synthetic" or None for synthetic traffic.
    """
    if "spec" in call:
        call = call_from_spec(call["spec"], call["traffic"])
    rest = {key: value for key, value in call.items() if key not in ONLY_ABOUT_OUTPUT and value is not None}
    scenario: Values = {"name": "recorded", "engine": _engine(rest)}
    if "input_tokens" in rest or "new_input_tokens_per_turn" in rest:
        scenario["traffic"] = _synthetic(rest)
    else:
        source = {"type": "trace", "paths": [trace_path], "format": trace_format}
        scenario["traffic"] = {"source": source, "load": _trace_load(rest)}
    if "router_config" in rest:
        settings = rest["router_config"].items()
        rest["router_config"] = {key: value for key, value in settings if key not in IGNORED_BY_REPLAY}
    for key, value in rest.items():
        _put(scenario, CALL_PATHS.get(key, key), value)
    return scenario


def call_from_rank(rank: Mapping[str, Any], **call: Any) -> Values:
    """The call for one bare rank dict, as the recordings of KV events have it."""
    return {"extra_engine_args": {"engine": dict(rank)}, "num_workers": 1, "router_mode": "round_robin", **call}


def call_from_spec(spec: Mapping[str, Any], traffic: Mapping[str, Any]) -> Values:
    """The call that says the same as a ``spec`` and its ``traffic``."""
    topology, engine = spec["topology"], spec["engine"]
    call: Values = {"router_mode": spec["adapters"]["placement"]["provider"]}
    call["max_sim_time_ms"] = spec["max_sim_time_ms"]
    call |= {f"sla_{key}": value for key, value in spec["sla"].items()}
    if topology["kind"] == "aggregated":
        call |= {"num_workers": topology["workers"]["initial_workers"], "extra_engine_args": _arguments(engine)}
    for role in ("prefill", "decode"):
        if role in topology:
            call[f"num_{role}_workers"] = topology[role]["initial_workers"]
            call[f"{role}_engine_args"] = _arguments(engine[role])
    names = {"isl": "new_input_tokens_per_turn", "osl": "output_tokens_per_turn", "concurrency": "replay_concurrency"}
    told_elsewhere = ("source_type", "load_type", "trace_paths", "trace_format")
    return call | {names.get(key, key): value for key, value in traffic.items() if key not in told_elsewhere}


def _arguments(engine: Mapping[str, Any]) -> Values:
    return {"engine": engine["rank"], **{key: value for key, value in engine.items() if key != "rank"}}


def _engine(rest: Values) -> Values:
    engine: Values = {"mode": "aggregated", "workers": {}}
    if "prefill_engine_args" in rest or "decode_engine_args" in rest:
        engine["mode"] = "disaggregated"
    roles = (
        ("extra", "num_workers", "aggregated"),
        *((role, f"num_{role}_workers", role) for role in ("prefill", "decode")),
    )
    for prefix, count, role in roles:
        arguments, workers = rest.pop(f"{prefix}_engine_args", None), rest.pop(count, 1)
        if arguments is not None:
            engine["workers"][role] = _worker(arguments, workers, role, engine)
    return engine


def _worker(arguments: Mapping[str, Any], workers: object, role: str, engine: Values) -> Values:
    rank = {"num_gpu_blocks": 16384, "max_num_seqs": 256, **arguments["engine"]}
    worker: Values = {"parallelism": {"replicas": workers}, "kv_cache": {"capacity": {"type": "fixed"}}}
    worker["timing"] = dict(rank.pop("timing_model", {"type": "polynomial"}))
    backend = rank.pop("backend", "vllm")
    if backend != engine.setdefault("backend", backend):
        worker["backend"] = backend  # ours is one for all roles
    if rank.get("worker_type") == role:
        del rank["worker_type"]
    if isinstance(rank.get("emit_kv_events"), bool):
        del rank["emit_kv_events"]  # ours are always published
    for key, ours in (("aic_nextn", "nextn"), ("aic_nextn_accept_rates", "nextn_accepted")):
        if rank.get(key) is not None:
            engine[ours] = rank.pop(key)
    if rank.get("native_host_offload") is not None:
        host = worker["kv_cache"]["host_offload"] = {"sharing": "equal_share", **rank.pop("native_host_offload")}
        if host.get("scope") == "cluster_shared":
            host.setdefault("kv_layout_id", None)  # ours has a default, the reference none
    transfer = {ours: rank.pop(key) for key, ours in TRANSFER_KEYS.items() if key in rank}
    if transfer and role != "decode":  # the reference ignores those of decode ranks
        rate = transfer.get("bandwidth_gb_per_second")
        if transfer.get("bytes_per_token") is None and type(rate) in (int, float) and 0 < rate < math.inf:
            transfer["bandwidth_gb_per_second"] = None  # no size, no delay; ours takes the size of the KV cache
        engine["kv_transfer"] = {"timing_mode": "full_prompt", **transfer}
    for key, value in (*rank.items(), *((key, value) for key, value in arguments.items() if key != "engine")):
        _put(worker, WORKER_PATHS.get(key, key), value)
    return worker


def _trace_load(rest: Values) -> Values:
    speedup = rest.pop("arrival_speedup_ratio", 1.0)
    if (concurrency := rest.pop("replay_concurrency", None)) is not None:
        return {"type": "concurrency", "concurrency": concurrency}  # a closed loop ignores the speed-up
    return {"type": "trace_timestamps", "speedup": speedup}


def _synthetic(rest: Values) -> Values:
    accumulates = "new_input_tokens_per_turn" in rest
    shape: Values = {}
    for key, ours, default in (
        ("turns_per_session", "turns", 1),
        ("shared_prefix_ratio", "shared_prefix_ratio", 0.0),
        ("num_prefix_groups", "prefix_groups", 0),
        ("inter_turn_delay_ms", "inter_turn_delay_ms", 0.0),
    ):
        shape[ours] = rest.pop(key, default)
    sessions = accumulates or shape != {
        "turns": 1,
        "shared_prefix_ratio": 0,
        "prefix_groups": 0,
        "inter_turn_delay_ms": 0,
    }
    unit = "sessions" if sessions else "requests"
    tokens = {
        "input_tokens": rest.pop("new_input_tokens_per_turn" if accumulates else "input_tokens"),
        "output_tokens": rest.pop("output_tokens_per_turn" if accumulates else "output_tokens"),
    }
    source: Values = {"type": "synthetic", **tokens}
    if sessions:
        source = {"type": "synthetic-session", "session": shape}
        source |= {
            "new_input_tokens_per_turn": tokens["input_tokens"],
            "output_tokens_per_turn": tokens["output_tokens"],
        }
        shape |= {"accumulate": accumulates, "group_seed": 0 if accumulates else 42}
    traffic = {"source": source, "stop": {unit: rest.pop("request_count")}}
    seed = rest.pop("arrival_seed", 42)
    loads = []
    if "replay_concurrency" in rest:
        loads.append({"type": "concurrency", "concurrency": rest.pop("replay_concurrency")})
        rest.pop("arrival_speedup_ratio", None)  # a closed loop ignores the speed-up
    if "request_rate" in rest:
        loads.append({"type": "poisson", f"{unit}_per_second": rest.pop("request_rate"), "seed": seed})
    if "arrival_interval_ms" in rest:
        interval = rest.pop("arrival_interval_ms")
        # the reference goes through a rate; only 0 has none
        rate = {f"{unit}_per_second": 1000.0 / interval} if interval else {"interval_ms": interval}
        loads.append({"type": "constant_rate", **rate})
    if loads:
        traffic["load"] = {key: value for load in reversed(loads) for key, value in load.items()}
    return traffic


def _put(values: Values, path: str, value: object) -> None:
    *outer, last = path.split(".")
    for key in outer:
        values = values.setdefault(key, {})
    values[last] = value
