"""What must agree between the fields of a scenario.

Owns: checks that look at more than one field. They also replace what depends on other fields, so that the tree is
complete after them.
Refuses to know: single fields (``layout``), what is not supported (``support``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs

from g2sim.actors.config import HostScope
from g2sim.actors.router.registry import OTHER_NAMES
from g2sim.actors.traffic.graph import MAX_TIME_MS
from g2sim.bus.errors import ConfigError, InvariantViolation
from g2sim.scenarios.aic_timing import (
    MOVING_VERSIONS,
    QUANT_MODES,
    AicModel,
    AicRefused,
    aic_installed,
    kv_bytes_per_token,
    kv_memory,
    literal_version,
)
from g2sim.scenarios.bounds import check_sizes
from g2sim.scenarios.fault_plan import settle_faults
from g2sim.scenarios.fields import ABSENT, COUNT_MAX
from g2sim.scenarios.layout import (
    BLOCKS,
    MOE_PARALLELISM,
    PREFIX_GROUPS,
    ROUTER_SHORTCUTS,
    STOP,
    TimestampBasis,
    TraceFormat,
)
from g2sim.scenarios.pass_times import aic_error
from g2sim.scenarios.policy_source import is_built_in, settled_policy
from g2sim.scenarios.support import AGENTIC_FORMATS, WORKER_COUNT
from g2sim.scenarios.yaml_source import Document, KeyPath, dotted

Values = dict[str, Any]


def settle(tree: Values, document: Document, *, resolved: bool = False) -> None:
    """Checks and completes a tree that the tables and the support rules have passed.

    Args:
        resolved: the tree was completed when it was run, with a policy that need not be at hand.

    Raises: ConfigError.
    """
    agreement = _Agreement(document)
    agreement.engine(tree["engine"])
    agreement.traffic(tree["traffic"])
    agreement.router(tree["router"], resolved=resolved)
    agreement.sla(tree["evaluation"]["sla"])
    check_sizes(tree, document)
    if tree["faults"] is not None:
        settle_faults(tree, document)


@attrs.frozen
class _Agreement:
    document: Document

    def fail(self, *path: str, problem: str | None = None, got: object = ..., allowed: str) -> ConfigError:
        return self.document.error(path, problem=problem, got=got, allowed=allowed)

    def written(self, *path: str) -> Any:
        return self.document.raw(path)

    def engine(self, engine: Values) -> None:
        mode, workers, handoff = engine["mode"], engine["workers"], engine["kv_transfer"]
        needed = ("aggregated",) if mode == "aggregated" else ("prefill", "decode")
        for role, worker in workers.items():
            at = ("engine", "workers", role)
            if worker is None and role in needed:
                raise self.fail(*at, problem=f"missing, and mode {mode} needs it", allowed=f"a mapping; {WORKER_COUNT}")
            if worker is not None and role not in needed:
                raise self.fail(*at, problem=f"does not go with mode {mode}", allowed=f"only {' and '.join(needed)}")
        if mode == "aggregated" and handoff is not None:
            raise self.fail("engine", "kv_transfer", problem=f"does not go with mode {mode}", allowed="leave it out")
        models = {role: self.worker(role, workers[role], engine) for role in needed}
        if mode == "disaggregated":
            self.roles(workers["prefill"], workers["decode"])
        if handoff is not None:
            self.handoff(handoff, workers["prefill"], models["prefill"])

    def worker(self, role: str, worker: Values, engine: Values) -> AicModel | None:
        """Returns what the performance model is asked about, None if this worker does not use it."""
        at, parallelism = ("engine", "workers", role), worker["parallelism"]
        if parallelism["replicas"] is ABSENT:
            parallelism["replicas"] = 1
        if parallelism["replicas"] > COUNT_MAX:
            allowed = f"{WORKER_COUNT}, up to {COUNT_MAX}"
            raise self.fail(*at, "parallelism", "replicas", got=parallelism["replicas"], allowed=allowed)
        if worker["context_length"] is None:
            worker["context_length"] = engine["context_length"]
        if worker["scheduler"]["chunked_prefill"] is ABSENT:
            common = engine["enable_chunked_prefill"]
            worker["scheduler"]["chunked_prefill"] = True if role == "decode" or common is None else common
        cache, at_cache = worker["kv_cache"], (*at, "kv_cache")
        model = self.performance_model(worker, engine, at)
        if cache["capacity"]["type"] == "default":
            self.estimated_capacity(worker, model, at)
        else:
            self.capacity(cache, at_cache, model)
        if (host := cache["host_offload"]) is None:
            return model
        if not cache["prefix_caching"]:
            problem = "a host tier needs prefix caching"
            raise self.fail(*at_cache, "prefix_caching", problem=problem, got=False, allowed="true")
        self.token_bytes(cache, at_cache, "a host tier", model)
        self.host(host, at_cache)
        return model

    def performance_model(self, worker: Values, engine: Values, at: tuple[str, ...]) -> AicModel | None:
        timing, parallelism, cache = worker["timing"], worker["parallelism"], worker["kv_cache"]
        asker = (*at, "timing", "type")
        if timing["type"] not in ("aic", "default"):
            if cache["capacity"]["type"] != "default":
                return None
            asker = (*at, "kv_cache", "capacity", "type")
        got = timing["type"] if "timing" in asker else "default"
        for key in ("model", "hardware"):
            if engine[key] is None:
                hint = "default is what a scenario gets that leaves the type out" if got == "default" else None
                problem = f"missing, and {dotted(asker)} {got} needs it"
                raise self.document.error(("engine", key), problem=problem, allowed="non-blank text", hint=hint)
        served = AicModel(
            model=engine["model"],
            hardware=engine["hardware"],
            backend_version=engine["backend_version"],
            block_size_tokens=cache["block_size"],
            **{key: parallelism[key] for key in ("tensor", "attention_data", *MOE_PARALLELISM)},
            **{key: timing.get(key) or engine[key] for key in QUANT_MODES},
        )
        if served.backend_version in MOVING_VERSIONS and aic_installed():
            with self.asking(asker, got):
                served = attrs.evolve(served, backend_version=literal_version(served))
        if timing["type"] in ("aic", "default"):
            timing |= {"type": "aic", "served": served}
        return served

    @contextmanager
    def asking(self, asker: KeyPath, got: str) -> Iterator[None]:
        """Turns what the performance model refuses into an error about the scenario."""
        try:
            yield
        except AicRefused as refused:
            raise aic_error(self.document, refused, asker, got) from None

    def estimated_capacity(self, worker: Values, model: AicModel | None, at: tuple[str, ...]) -> None:
        cache, limits, asker = worker["kv_cache"], worker["scheduler"], (*at, "kv_cache", "capacity", "type")
        for key in ("max_batched_tokens", "max_sequences"):
            if limits[key] is None:
                problem = "a KV capacity of type default needs a limit"
                raise self.fail(*at, "scheduler", key, problem=problem, got=None, allowed="a positive integer")
        if model is None:
            raise InvariantViolation(f"{dotted(asker)}: there is no model to ask about")
        with self.asking(asker, "default"):
            memory = kv_memory(
                model,
                batched_tokens=limits["max_batched_tokens"],
                sequences=limits["max_sequences"],
                memory_fraction=cache["capacity"]["memory_fraction"],
            )
        blocks = memory.tokens // cache["block_size"]
        if not 1 <= blocks <= COUNT_MAX:
            problem = f"there is room for {memory.tokens} tokens"
            raise self.fail(*asker, problem=problem, got="default", allowed=f"room for 1 to {COUNT_MAX} blocks")
        cache["capacity"] = {"type": "fixed", "blocks": blocks, "bytes": None}
        if cache["bytes_per_token"] is None:
            cache["bytes_per_token"] = memory.bytes_per_token

    def capacity(self, cache: Values, at: Sequence[str], model: AicModel | None) -> None:
        blocks, size = cache["capacity"]["blocks"], cache["capacity"]["bytes"]
        path = (*at, "capacity", "blocks" if size is None else "bytes")
        if size is None and blocks is None:
            problem = "missing; type fixed needs blocks or bytes"
            raise self.fail(*path, problem=problem, got=self.written(*path), allowed=BLOCKS.allowed)
        if size is None:
            return
        if blocks is not None:
            raise self.fail(*path, problem="does not go with blocks", got=size, allowed="one of the two")
        block_bytes = cache["block_size"] * self.token_bytes(cache, at, "a capacity in bytes", model)
        if not 1 <= size // block_bytes <= COUNT_MAX:
            raise self.fail(*path, got=size, allowed=f"1 to {COUNT_MAX} blocks of {block_bytes} bytes")
        cache["capacity"]["blocks"] = size // block_bytes

    def token_bytes(self, cache: Values, at: Sequence[str], user: str, model: AicModel | None) -> int:
        """KV bytes of one token; left out, the performance model tells if the worker uses it."""
        if cache["bytes_per_token"] is None and model is not None:
            with self.asking((*at, "bytes_per_token"), "auto"):
                cache["bytes_per_token"] = kv_bytes_per_token(model)
        size: int | None = cache["bytes_per_token"]
        if size is None:
            path, problem = (*at, "bytes_per_token"), f"{user} needs the KV bytes of one token"
            raise self.fail(*path, problem=problem, got=self.written(*path), allowed="a positive integer")
        return size

    def host(self, host: Values, at_cache: Sequence[str]) -> None:
        at, shared = (*at_cache, "host_offload"), host["scope"] == HostScope.CLUSTER_SHARED
        if host["kv_layout_id"] is ABSENT:
            host["kv_layout_id"] = "default" if shared else None
        if shared and host["kv_layout_id"] is None:
            allowed = "non-blank text; left out, it is 'default'"
            raise self.fail(*at, "kv_layout_id", problem="a shared tier needs one", got=None, allowed=allowed)

    def roles(self, prefill: Values, decode: Values) -> None:
        """The roles hand blocks to each other, and use one pool if both have a shared tier."""
        self.equal(prefill, decode, [("kv_cache", "block_size")], "both roles")
        hosts = [worker["kv_cache"]["host_offload"] for worker in (prefill, decode)]
        if all(host is not None and host["scope"] == HostScope.CLUSTER_SHARED for host in hosts):
            keys = (
                "kv_layout_id",
                "num_host_blocks",
                "shared_d2h_bandwidth_gbps",
                "shared_h2d_bandwidth_gbps",
                "sharing",
            )
            paths: list[KeyPath] = [("kv_cache", "bytes_per_token"), ("parallelism", "tensor")]
            paths += [("kv_cache", "host_offload", key) for key in keys]
            self.equal(prefill, decode, paths, "roles that share a host tier")

    def equal(self, prefill: Values, decode: Values, paths: Iterable[KeyPath], who: str) -> None:
        for path in paths:
            wanted: Any = prefill
            got: Any = decode
            for key in path:
                wanted, got = wanted[key], got[key]
            if wanted != got:
                there, at = (("engine", "workers", role, *path) for role in ("prefill", "decode"))
                allowed = f"{wanted}, as in {dotted(there)}"
                raise self.document.error(at, problem=f"{who} must agree", got=got, allowed=allowed)

    def handoff(self, handoff: Values, prefill: Values, model: AicModel | None) -> None:
        handoff["bandwidth_gb_per_second"] = handoff["bandwidth_gb_per_second"] or None
        if handoff["bytes_per_token"] is None:
            cache = prefill["kv_cache"]
            if handoff["bandwidth_gb_per_second"] and model is not None:
                self.token_bytes(cache, ("engine", "workers", "prefill", "kv_cache"), "a hand-off", model)
            handoff["bytes_per_token"] = cache["bytes_per_token"]
        if handoff["bandwidth_gb_per_second"] and handoff["bytes_per_token"] is None:
            path = ("engine", "kv_transfer", "bytes_per_token")
            problem = "auto takes kv_cache.bytes_per_token of the prefill workers, which is not given"
            raise self.fail(*path, problem=problem, got=self.written(*path), allowed="a positive integer")

    def traffic(self, traffic: Values) -> None:
        stop = traffic["stop"] = traffic["stop"] or dict.fromkeys(STOP.fields)
        if (seconds := stop["max_virtual_time_seconds"]) is not None:
            at = ("traffic", "stop", "max_virtual_time_seconds")
            if stop["max_virtual_time_ms"] is not None:
                raise self.fail(
                    *at, problem="does not go with max_virtual_time_ms", got=seconds, allowed="one of the two"
                )
            stop["max_virtual_time_ms"] = seconds * 1000.0
        if traffic["source"]["type"] == "trace":
            self.trace(traffic["source"], traffic["load"], stop)
        elif traffic["source"]["type"] != "script":
            traffic["count"] = self.synthetic(traffic["source"], traffic["load"], stop)

    def trace(self, source: Values, load: Values, stop: Values) -> None:
        at, trace_format = ("traffic", "source"), source["format"]
        agentic, applied = trace_format in AGENTIC_FORMATS, trace_format == TraceFormat.APPLIED_COMPUTE_AGENTIC
        if len(source["paths"]) != 1:
            raise self.fail(*at, "paths", got=source["paths"], allowed="a list of exactly one path")
        if source["block_size"] is None and not agentic:
            source["block_size"] = 512
        if trace_format != TraceFormat.WEKA:
            self.unset(source, ["nested_timestamp_basis"], at, "format weka")
        elif source["nested_timestamp_basis"] is None:
            source["nested_timestamp_basis"] = TimestampBasis.AUTO
        if not applied:
            keys = [field.key for field in PREFIX_GROUPS]
            self.unset(source, keys, at, f"format {TraceFormat.APPLIED_COMPUTE_AGENTIC}")
        self.groups(source, at)
        loads = [
            *([] if applied else ["trace_timestamps"]),
            *([] if agentic and trace_format != TraceFormat.DYNAMO else ["concurrency"]),
        ]
        if load["type"] not in loads:
            problem = f"does not go with a trace of format {trace_format}"
            raise self.fail("traffic", "load", "type", problem=problem, got=load["type"], allowed=" or ".join(loads))
        if not agentic:
            keys = ["agentic_lanes", "agentic_snapshot", "agentic_warmup", "agentic_profile"]
            self.unset(load, keys, ("traffic", "load"), f"format {' or '.join(AGENTIC_FORMATS)}")
        elif load["type"] == "trace_timestamps":
            self.load_control(load)
        counts = [key for key in STOP.fields if not key.startswith("max_virtual_time")]
        self.unset(stop, counts, ("traffic", "stop"), "synthetic traffic; a trace ends by itself")

    def load_control(self, load: Values) -> None:
        at = ("traffic", "load")
        if load["agentic_snapshot"] is None:
            self.unset(load, ["agentic_warmup", "agentic_profile"], at, "agentic_snapshot")
        if load["agentic_lanes"] is None:
            self.unset(load, ["agentic_snapshot"], at, "agentic_lanes")

    def unset(self, values: Values, keys: Iterable[str], at: Sequence[str], where: str) -> None:
        for key in keys:
            if values.get(key):
                raise self.fail(*at, key, got=values[key], allowed=f"only with {where}")

    def groups(self, values: Values, at: Sequence[str]) -> None:
        if values["shared_prefix_ratio"] and not values["prefix_groups"]:
            problem = "a shared_prefix_ratio above 0 needs groups that share"
            raise self.fail(*at, "prefix_groups", problem=problem, got=0, allowed="a positive integer")

    def synthetic(self, source: Values, load: Values, stop: Values) -> int:
        """How many requests, or sessions, are made. Sets the load's rate per second, None for a bare interval."""
        sessions = source["type"] == "synthetic-session"
        unit, other = ("sessions", "requests") if sessions else ("requests", "sessions")
        other_source = f"source type {'synthetic' if sessions else 'synthetic-session'}"
        at_load, at_stop = ("traffic", "load"), ("traffic", "stop")
        if sessions:
            self.groups(source["session"], ("traffic", "source", "session"))
        if load["type"] == "trace_timestamps":
            problem, allowed = "synthetic traffic has no timestamps", "concurrency, poisson, constant_rate"
            raise self.fail(*at_load, "type", problem=problem, got=load["type"], allowed=allowed)
        self.unset(load, [f"{other}_per_second"], at_load, other_source)
        self.unset(stop, [other, f"{other}_per_load_unit"], at_stop, other_source)
        amount: float | None = load.get("concurrency")
        if load["type"] != "concurrency":
            keys = [f"{unit}_per_second", *(["interval_ms"] if load["type"] == "constant_rate" else [])]
            self.exactly_one(load, keys, at_load)
            amount = load["rate"] = load[keys[0]]
            if amount is not None and not 1000.0 / amount <= MAX_TIME_MS:
                raise self.fail(*at_load, keys[0], got=amount, allowed="a rate whose interval is at most 2**53 ms")
        ratio_key = f"{unit}_per_load_unit"
        self.exactly_one(stop, [unit, ratio_key], at_stop)
        count: int | None = stop[unit]
        if count is not None:
            return count
        if amount is None:
            raise self.fail(*at_stop, ratio_key, problem="does not go with interval_ms", allowed=unit)
        total: float = stop[ratio_key] * amount
        if total > COUNT_MAX:
            raise self.fail(*at_stop, ratio_key, got=stop[ratio_key], allowed=f"at most {COUNT_MAX} {unit} in all")
        return max(1, math.floor(total + 0.5))

    def exactly_one(self, values: Values, keys: Sequence[str], at: Sequence[str]) -> None:
        given = [key for key in keys if values[key] is not None]
        allowed = f"one of {', '.join(keys)}" if len(keys) > 1 else "a finite number above 0"
        if not given:
            raise self.fail(*at, keys[0], problem="missing", got=self.written(*at, keys[0]), allowed=allowed)
        if len(given) > 1:
            raise self.fail(
                *at, given[1], problem=f"does not go with {given[0]}", got=values[given[1]], allowed=allowed
            )

    def router(self, router: Values, *, resolved: bool) -> None:
        """Completes the options of the policy, whose shortcuts become options."""
        at = ("router",)
        options = router["options"]
        if router["replicas"] == 1 and router["load_sync_ms"] is not None:
            allowed = "only with router.replicas 2 or more"
            raise self.fail(*at, "load_sync_ms", got=router["load_sync_ms"], allowed=allowed)
        for key, option in ROUTER_SHORTCUTS.items():
            if (value := router.pop(key)) is None:
                continue
            if OTHER_NAMES.get(router["policy"], router["policy"]) != "dynamo_kv":
                raise self.fail(*at, key, got=value, allowed="only with policy dynamo_kv")
            if option in options:
                raise self.fail(*at, key, problem=f"does not go with options.{option}", allowed="one of the two")
            options[option] = value
        if resolved and not is_built_in(router["policy"]):
            return
        try:
            router["policy"], router["options"] = settled_policy(router["policy"], options, code=False)
        except ConfigError as error:
            raise self.document.error(
                (*at, *error.field.split(".", 1)),
                problem=error.problem,
                got=error.got,
                allowed=error.allowed,
                hint=error.hint,
            ) from None

    def sla(self, sla: Values | None) -> None:
        if sla is None or sla["e2e_ms"] is None:
            return
        for key in ("ttft_ms", "itl_ms"):
            if sla[key] is not None:
                allowed = "either e2e_ms, or ttft_ms and itl_ms"
                path = ("evaluation", "sla", "e2e_ms")
                raise self.fail(*path, problem=f"does not go with {key}", got=sla["e2e_ms"], allowed=allowed)
