"""Scenario files: from plain values to a checked ``Scenario``, and back.

Owns: the order of the checks, what is built from a scenario, and its resolved form.
Refuses to know: how text becomes values (``yaml_source``), the keys (``layout``) and what must agree between them
(``agreement``), what is not supported (``support``), what runs.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from g2sim.actors.config import (
    DeploymentConfig,
    FixedTiming,
    HandoffConfig,
    HostTierConfig,
    PolynomialTiming,
    PoolConfig,
    RankConfig,
    RouterConfig,
    SlaConfig,
    Timing,
    WorkerRole,
)
from g2sim.actors.router.faults import FaultPlan
from g2sim.actors.traffic.profile import ProfileOptions
from g2sim.bus.errors import ConfigError, shorten
from g2sim.bus.log import LogReader
from g2sim.scenarios import support
from g2sim.scenarios.agreement import settle
from g2sim.scenarios.aic_timing import QUANT_MODES, AicTiming
from g2sim.scenarios.fault_plan import plain_plan, read_plan
from g2sim.scenarios.fields import ABSENT, Reader
from g2sim.scenarios.layout import MOE_PARALLELISM, SCENARIO, TimestampBasis, TraceFormat
from g2sim.scenarios.pass_times import open_pass_times
from g2sim.scenarios.table_timing import TableTiming
from g2sim.scenarios.yaml_source import Document, KeyPath, read_file

__all__ = [
    "ConcurrencyLoad",
    "ConstantRateLoad",
    "Load",
    "PoissonLoad",
    "Scenario",
    "Source",
    "SyntheticSessionSource",
    "SyntheticSource",
    "TimestampBasis",
    "TimestampsLoad",
    "TraceFormat",
    "TraceSource",
    "TrafficConfig",
    "load_scenario",
]

UNNAMED = "unnamed"


@attrs.frozen(kw_only=True)
class TraceSource:
    """Requests from a file.

    Attributes:
        path: file or directory as the user wrote it; relative to the scenario file (see ``Scenario.trace_path``).
        block_size_tokens: tokens per hash id; None = what the file says (agentic_mooncake, weka, dynamo).
        nested_timestamp_basis: for weka, else None.
        strict: refuse what the reader could otherwise set right or leave out.
        shared_prefix_ratio, prefix_groups: for applied_compute_agentic, else 0.
    """

    path: str
    format: TraceFormat
    block_size_tokens: int | None
    nested_timestamp_basis: TimestampBasis | None = None
    strict: bool = False
    shared_prefix_ratio: float = 0.0
    prefix_groups: int = 0

    @property
    def agentic(self) -> bool:
        return self.format.value in support.AGENTIC_FORMATS


@attrs.frozen(kw_only=True)
class SyntheticSource:
    """Independent requests of one size, no two prompts alike."""

    input_tokens: int = 1024
    output_tokens: int = 128


@attrs.frozen(kw_only=True)
class SyntheticSessionSource:
    """Conversations of equal shape.

    Attributes:
        accumulate: each prompt holds the whole conversation so far; otherwise every turn is a new prompt.
        group_seed: seed of the draw that puts conversations into prefix groups.
    """

    new_input_tokens_per_turn: int = 1024
    output_tokens_per_turn: int = 128
    turns: int = 4
    shared_prefix_ratio: float = 0.0
    prefix_groups: int = 0
    inter_turn_delay_ms: float = 0.0
    accumulate: bool = True
    group_seed: int = 0


@attrs.frozen(kw_only=True)
class ScriptSource:
    """Requests that a Python function submits (``g2sim.scenarios.script``); ``path``: its file, for people."""

    path: str


@attrs.frozen(kw_only=True)
class ConcurrencyLoad:
    """A closed loop: at most ``concurrency`` requests (or sessions, if there are any) are open."""

    concurrency: int = 10


@attrs.frozen(kw_only=True)
class PoissonLoad:
    """Random arrivals of requests, or of sessions for synthetic sessions."""

    per_second: float
    seed: int = 42


@attrs.frozen(kw_only=True)
class ConstantRateLoad:
    """One arrival every ``interval_ms``; 0 = all at once."""

    interval_ms: float


@attrs.frozen(kw_only=True)
class TimestampsLoad:
    """Arrivals as in the trace, ``speedup`` times as fast; plays of agentic traffic on lanes if given.

    Attributes:
        snapshot_seed: lanes start in the middle of plays, cut by this seed; None = at their beginning.
        agentic_warmup: preparation requests come first.
        agentic_profile: plays are recycled until the profile ends.
    """

    speedup: float = 1.0
    agentic_lanes: int | None = None
    snapshot_seed: int | None = None
    agentic_warmup: bool = False
    agentic_profile: ProfileOptions | None = None


Source = TraceSource | SyntheticSource | SyntheticSessionSource | ScriptSource
Load = ConcurrencyLoad | PoissonLoad | ConstantRateLoad | TimestampsLoad


@attrs.frozen(kw_only=True)
class TrafficConfig:
    """Where requests come from and when. ``count``: synthetic requests or sessions to make, None for traces."""

    source: Source
    load: Load
    count: int | None = None

    @property
    def agentic(self) -> bool:
        """Whether the traffic is a graph of plays."""
        return isinstance(self.source, TraceSource) and self.source.agentic


@attrs.frozen(kw_only=True)
class Scenario:
    """One checked scenario.

    Attributes:
        name, why: for people.
        seed: of everything random that has no seed of its own.
        model, hardware: names for reports; None if not given.
        base_dir: the directory that relative paths count from.
        faults: what strikes KV events on their way to routers, None for nothing.
    """

    name: str
    why: str
    seed: int
    deployment: DeploymentConfig
    traffic: TrafficConfig
    model: str | None = None
    hardware: str | None = None
    base_dir: Path = Path()
    faults: FaultPlan | None = None

    @property
    def trace_path(self) -> Path | None:
        """The trace file or directory, None for synthetic traffic."""
        source = self.traffic.source
        return self.base_dir / source.path if isinstance(source, TraceSource) else None

    def with_strict_traces(self) -> Scenario:
        """The same scenario, in which a trace's reader refuses what it could set right; as it is without a trace."""
        source = self.traffic.source
        if not isinstance(source, TraceSource):
            return self
        return attrs.evolve(self, traffic=attrs.evolve(self.traffic, source=attrs.evolve(source, strict=True)))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, base_dir: Path = Path()) -> Scenario:
        """The scenario that plain values describe, as a file with the same content would.

        Raises: ConfigError.
        """
        return from_document(Document(values=values), base_dir=base_dir)

    @classmethod
    def from_resolved(cls, values: Mapping[str, Any], *, base_dir: Path = Path()) -> Scenario:
        """The scenario whose ``resolved`` form this is; that form is itself a scenario.

        Its policy may be one that is found by code: it is taken as it is, and nothing of it is loaded.
        """
        return from_document(Document(values=values), base_dir=base_dir, resolved=True)

    @classmethod
    def of_log(cls, reader: LogReader) -> Scenario:
        """What was run, from a log's header. Raises: ConfigError with the log's path."""
        try:
            return cls.from_resolved(reader.header.scenario)
        except ConfigError as error:
            raise error.located(f"{reader.path}: header") from None

    def resolved(self) -> dict[str, Any]:
        """The scenario as plain values with every default filled in; does not depend on ``base_dir``."""
        deployment, router, handoff = self.deployment, self.deployment.router, self.deployment.handoff
        served = [pool.rank.timing.served for pool in deployment.pools if isinstance(pool.rank.timing, AicTiming)]
        return {
            "name": self.name,
            "why": self.why,
            "seed": self.seed,
            "engine": {
                "mode": "disaggregated" if deployment.disaggregated else "aggregated",
                "model": self.model,
                "hardware": self.hardware,
                "backend": "vllm",
                **({"backend_version": served[0].backend_version} if served else {}),
                "workers": {pool.role.value: _plain_worker(pool) for pool in deployment.pools},
                "kv_transfer": None if handoff == HandoffConfig() else _taken(handoff, _HANDOFF_KEYS),
            },
            "traffic": _plain_traffic(self.traffic, deployment.max_virtual_time_ms),
            "router": {
                **_taken(router, _ROUTER_KEYS),
                **({} if router.replicas == 1 else _taken(router, _REPLICA_KEYS)),
                "options": dict(router.options),
            },
            "evaluation": {"sla": None if deployment.sla is None else attrs.asdict(deployment.sla)},
            **({} if self.faults is None else {"faults": plain_plan(self.faults)}),
        }


def load_scenario(path: Path) -> Scenario:
    """Reads and checks a scenario file (YAML, or JSON if it is named so).

    Raises: ConfigError with the file and the line, also if the trace that it names does not exist or pass times that
    come from outside cannot be had.
    """
    return from_file(read_file(path), path)


def from_file(document: Document, path: Path) -> Scenario:
    """As ``load_scenario``, for a file that has been read."""
    name = path.stem.encode(errors="replace").decode()  # a file name need not be text
    scenario = from_document(document, base_dir=path.parent, name=name)
    if scenario.trace_path is not None and not _exists(scenario.trace_path):
        raise document.error(
            ("traffic", "source", "paths", 0),
            problem=f"no such file or directory: {shorten(str(scenario.trace_path), 300)}",
            hint="paths are relative to the scenario file",
        )
    open_pass_times(scenario.deployment, scenario.base_dir, document)  # only to find what is wrong with them
    return scenario


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # no file can have such a name
        return False


def from_document(document: Document, *, base_dir: Path, name: str = UNNAMED, resolved: bool = False) -> Scenario:
    """Checks a document; ``name`` is for scenarios that give none. ``resolved``: see ``Scenario.from_resolved``.

    Raises: ConfigError.
    """
    tree = Reader(document, support.carries).read(SCENARIO)
    refused = sorted(support.refusals(tree).items(), key=lambda one: document.line(one[0]))
    if refused:
        raise ConfigError.of_all([_not_supported(document, path, *why) for path, why in refused])
    settle(tree, document, resolved=resolved)
    if tree["name"] is ABSENT:
        tree["name"] = name
    return _built(tree, base_dir)


def _not_supported(document: Document, path: KeyPath, rule: support.Rule, value: Any) -> ConfigError:
    got = ... if value is ABSENT else value
    return document.error(path, problem=f"not supported: {rule.what}", got=got, allowed=rule.allowed, hint=rule.hint)


# Key path in a mapping of the file -> attribute. Read both ways: to build, and for the resolved form.

_HOST_KEYS: Mapping[KeyPath, str] = {
    ("scope",): "scope",
    ("num_host_blocks",): "capacity_blocks",
    ("d2h_bandwidth_gbps",): "d2h_gb_per_s",
    ("h2d_bandwidth_gbps",): "h2d_gb_per_s",
    ("shared_d2h_bandwidth_gbps",): "shared_d2h_gb_per_s",
    ("shared_h2d_bandwidth_gbps",): "shared_h2d_gb_per_s",
    ("latency_to_first_byte_ms",): "latency_to_first_byte_ms",
    ("kv_layout_id",): "kv_layout_id",
    ("sharing",): "sharing",
}

_RANK_KEYS: Mapping[KeyPath, str] = {
    ("context_length",): "max_model_len_tokens",
    ("scheduler", "max_batched_tokens"): "max_batched_tokens",
    ("scheduler", "max_sequences"): "max_seqs",
    ("scheduler", "chunked_prefill"): "chunked_prefill",
    ("scheduler", "preemption_mode"): "preemption",
    ("kv_cache", "block_size"): "block_size_tokens",
    ("kv_cache", "prefix_caching"): "prefix_caching",
    ("kv_cache", "bytes_per_token"): "kv_bytes_per_token",
    ("kv_cache", "capacity", "blocks"): "gpu_blocks",
    ("timing", "speedup_ratio"): "speedup_ratio",
    ("timing", "decode_speedup_ratio"): "decode_speedup_ratio",
}

_POOL_KEYS: Mapping[KeyPath, str] = {
    ("parallelism", "replicas"): "workers",
    ("parallelism", "tensor"): "tensor_parallel_size",
    ("parallelism", "attention_data"): "dp_size",
}

_FIXED_TIMING_KEYS: Mapping[KeyPath, str] = {("prefill_ms",): "prefill_ms", ("decode_ms",): "decode_ms"}

_HANDOFF_KEYS: Mapping[KeyPath, str] = {
    ("bytes_per_token",): "bytes_per_token",
    ("bandwidth_gb_per_second",): "gb_per_s",
    ("timing_mode",): "timing",
}

_ROUTER_KEYS: Mapping[KeyPath, str] = {
    ("policy",): "policy",
    ("kv_event_lag_ms",): "kv_event_lag_ms",
    ("tie_break",): "tie_break",
}

_REPLICA_KEYS: Mapping[KeyPath, str] = {("replicas",): "replicas", ("load_sync_ms",): "load_sync_ms"}

_TRACE_KEYS: Mapping[KeyPath, str] = {
    ("paths", 0): "path",
    ("format",): "format",
    ("block_size",): "block_size_tokens",
    ("nested_timestamp_basis",): "nested_timestamp_basis",
    ("strict",): "strict",
    ("shared_prefix_ratio",): "shared_prefix_ratio",
    ("prefix_groups",): "prefix_groups",
}

_SESSION_LENGTHS = ("new_input_tokens_per_turn", "output_tokens_per_turn")


def _given(values: Mapping[str, Any], keys: Mapping[KeyPath, str]) -> dict[str, Any]:
    """Attributes from the file's values."""
    return {attribute: _at(values, path) for path, attribute in keys.items()}


def _taken(item: object, keys: Mapping[KeyPath, str]) -> dict[str, Any]:
    """The file's values from attributes."""
    values: dict[str, Any] = {}
    for path, attribute in keys.items():
        inner = values
        for key in path[:-1]:
            inner = inner.setdefault(str(key), {})
        value = getattr(item, attribute)
        inner[str(path[-1])] = value.value if isinstance(value, enum.Enum) else value
    return values


def _at(values: Any, path: KeyPath) -> Any:
    for key in path:
        values = values[key]
    return values


def _built(tree: Mapping[str, Any], base_dir: Path) -> Scenario:
    engine, traffic, router, sla = tree["engine"], tree["traffic"], tree["router"], tree["evaluation"]["sla"]
    handoff = engine["kv_transfer"]
    return Scenario(
        name=tree["name"],
        why=tree["why"],
        seed=tree["seed"],
        model=engine["model"],
        hardware=engine["hardware"],
        base_dir=base_dir,
        faults=read_plan(tree["faults"]),
        deployment=DeploymentConfig(
            pools=tuple(_pool(WorkerRole(role), worker) for role, worker in support.roles(tree)),
            router=RouterConfig(
                **_given(router, _ROUTER_KEYS), **_given(router, _REPLICA_KEYS), options=router["options"]
            ),
            handoff=HandoffConfig() if handoff is None else HandoffConfig(**_given(handoff, _HANDOFF_KEYS)),
            sla=SlaConfig(**sla) if sla is not None and any(sla.values()) else None,
            max_virtual_time_ms=traffic["stop"]["max_virtual_time_ms"],
        ),
        traffic=TrafficConfig(
            source=_source(traffic["source"]), load=_load(traffic["load"]), count=traffic.get("count")
        ),
    )


def _pool(role: WorkerRole, worker: Mapping[str, Any]) -> PoolConfig:
    host = worker["kv_cache"]["host_offload"]
    rank = RankConfig(
        **_given(worker, _RANK_KEYS),
        timing=_timing(worker["timing"]),
        host=None if host is None else HostTierConfig(**_given(host, _HOST_KEYS)),
    )
    return PoolConfig(role=role, rank=rank, **_given(worker, _POOL_KEYS))


def _timing(timing: Mapping[str, Any]) -> Timing:
    if timing["type"] == "fixed":
        return FixedTiming(**_given(timing, _FIXED_TIMING_KEYS))
    if timing["type"] == "table":
        return TableTiming(path=timing["path"])
    return AicTiming(served=timing["served"]) if timing["type"] == "aic" else PolynomialTiming()


def _plain_worker(pool: PoolConfig) -> dict[str, Any]:
    rank, timing = pool.rank, pool.rank.timing
    worker = {**_taken(pool, _POOL_KEYS), **_taken(rank, _RANK_KEYS)}
    worker["kv_cache"]["capacity"]["type"] = "fixed"
    worker["kv_cache"]["host_offload"] = None if rank.host is None else _taken(rank.host, _HOST_KEYS)
    if isinstance(timing, FixedTiming):
        worker["timing"] |= {"type": "fixed", **_taken(timing, _FIXED_TIMING_KEYS)}
    elif isinstance(timing, TableTiming):
        worker["timing"] |= {"type": "table", "path": timing.path}
    elif isinstance(timing, AicTiming):
        worker["timing"] |= {"type": "aic", **{key: getattr(timing.served, key) for key in QUANT_MODES}}
        worker["parallelism"] |= {key: getattr(timing.served, key) for key in MOE_PARALLELISM}
    else:
        worker["timing"]["type"] = "polynomial"
    return worker


def _source(source: Mapping[str, Any]) -> Source:
    if source["type"] == "trace":
        return TraceSource(**_given(source, _TRACE_KEYS))
    if source["type"] == "script":
        return ScriptSource(path=source["path"])
    if source["type"] == "synthetic":
        return SyntheticSource(input_tokens=source["input_tokens"], output_tokens=source["output_tokens"])
    return SyntheticSessionSource(**{key: source[key] for key in _SESSION_LENGTHS}, **source["session"])


def _load(load: Mapping[str, Any]) -> Load:
    if load["type"] == "concurrency":
        return ConcurrencyLoad(concurrency=load["concurrency"])
    if load["type"] == "trace_timestamps":
        snapshot, profile = load["agentic_snapshot"], load["agentic_profile"]
        return TimestampsLoad(
            speedup=load["speedup"],
            agentic_lanes=load["agentic_lanes"],
            snapshot_seed=None if snapshot is None else snapshot["seed"],
            agentic_warmup=load["agentic_warmup"],
            agentic_profile=None if profile is None else ProfileOptions(**profile),
        )
    if load["type"] == "poisson":
        return PoissonLoad(per_second=load["rate"], seed=load["seed"])
    return ConstantRateLoad(interval_ms=load["interval_ms"] if load["rate"] is None else 1000.0 / load["rate"])


def _plain_traffic(traffic: TrafficConfig, max_virtual_time_ms: float | None) -> dict[str, Any]:
    source, load = traffic.source, traffic.load
    unit = "sessions" if isinstance(source, SyntheticSessionSource) else "requests"
    plain_source: dict[str, Any]
    if isinstance(source, TraceSource):
        plain_source = {"type": "trace", **_taken(source, _TRACE_KEYS), "paths": [source.path]}
    elif isinstance(source, ScriptSource):
        plain_source = {"type": "script", "path": source.path}
    elif isinstance(source, SyntheticSource):
        plain_source = {"type": "synthetic", **attrs.asdict(source)}
    else:
        session = attrs.asdict(source)
        lengths = {key: session.pop(key) for key in _SESSION_LENGTHS}
        plain_source = {"type": "synthetic-session", **lengths, "session": session}
    plain_load = attrs.asdict(load)
    if isinstance(load, PoissonLoad):
        plain_load[f"{unit}_per_second"] = plain_load.pop("per_second")
    if isinstance(load, TimestampsLoad):
        seed = plain_load.pop("snapshot_seed")
        plain_load["agentic_snapshot"] = None if seed is None else {"seed": seed}
    return {
        "source": plain_source,
        "load": {"type": _LOAD_TYPES[type(load)], **plain_load},
        "stop": {
            **({} if traffic.count is None else {unit: traffic.count}),
            "max_virtual_time_ms": max_virtual_time_ms,
        },
    }


_LOAD_TYPES: Mapping[type[Load], str] = {
    ConcurrencyLoad: "concurrency",
    PoissonLoad: "poisson",
    ConstantRateLoad: "constant_rate",
    TimestampsLoad: "trace_timestamps",
}
