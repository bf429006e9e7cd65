"""What g2sim does not support: one table of rules, run on every scenario and printed as docs/feature-support.md.

Owns: the rules. A rule that is deleted opens what it gates, as far as the code behind it exists.
Refuses to know: types and ranges (``layout``), agreement between fields (``agreement``). A rule sees values that passed
the former, and keys that are in no table because only a rule knows them, as they were written.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs

from g2sim.scenarios.aic_timing import QUANT_MODES
from g2sim.scenarios.fields import ABSENT
from g2sim.scenarios.yaml_source import KeyPath

Tree = Mapping[str, Any]
"""A scenario as plain values with defaults filled in; ABSENT where a default depends on other fields."""

Test = Callable[[Any], bool]
"""Whether a value is supported."""

AGENTIC_FORMATS = ("agentic_mooncake", "weka", "dynamo")
"""Formats whose traces hold plays. A dynamo trace may hold independent requests instead, under the same conditions."""
WORKER_COUNT = "any positive integer number of workers per role"


@attrs.frozen(kw_only=True)
class Rule:
    """One thing that is not supported.

    Attributes:
        id: stable name.
        what: the thing, so that "not supported: <what>" reads well.
        fields: path -> test of its value; ``*`` stands for each role, ``#`` for each item of a list. The rule refuses
            the first value that fails.
        allowed: what is taken instead.
        when: whether the rule applies to a scenario at all.
        gate: "agentic-g2" for the conditions of agentic traffic over a host tier, else "general".
        hint: the likely mend.
    """

    id: str
    what: str
    fields: Mapping[str, Test]
    allowed: str
    when: Callable[[Tree], bool] = lambda _: True
    gate: str = "general"
    hint: str | None = None

    def refused(self, tree: Tree) -> Iterator[tuple[KeyPath, Any]]:
        """Path and value of everything in the scenario that this rule refuses."""
        if self.when(tree):
            for pattern, supported in self.fields.items():
                for path, value in _matches(tree, pattern.split(".")):
                    if not supported(value):
                        yield path, value


def refusals(tree: Tree) -> dict[KeyPath, tuple[Rule, Any]]:
    """All that is refused: path -> the first rule, in the order of the table, that refuses it; and the value."""
    found: dict[KeyPath, tuple[Rule, Any]] = {}
    for rule in RULES:
        for path, value in rule.refused(tree):
            found.setdefault(path, (rule, value))
    return found


def carries(path: KeyPath) -> bool:
    """Whether some rule looks at this key."""
    names = [str(key) for key in path]
    if names[:2] == ["engine", "workers"] and len(names) > 3:
        names[2] = "*"
    pattern = ".".join(names)
    return any(pattern in rule.fields for rule in RULES)


def is_agentic(tree: Tree) -> bool:
    """Whether the traffic is a graph of plays."""
    return tree["traffic"]["source"].get("format") in AGENTIC_FORMATS


def has_host_tier(tree: Tree) -> bool:
    """Whether any role has a host tier (G2)."""
    return any(worker["kv_cache"]["host_offload"] is not None for _, worker in roles(tree))


def roles(tree: Tree) -> Iterator[tuple[str, dict[str, Any]]]:
    """The roles that are there, with their worker mappings."""
    for role in ("aggregated", "prefill", "decode"):
        if (worker := tree["engine"]["workers"][role]) is not None:
            yield role, worker


def uses_performance_model(tree: Tree) -> bool:
    """Whether any role's pass times or KV capacity come from the performance model."""
    return any(
        worker["timing"]["type"] in ("aic", "default") or worker["kv_cache"]["capacity"]["type"] == "default"
        for _, worker in roles(tree)
    )


def only(*values: object) -> Test:
    """Supported: null and these values (types count: 0 is not false, but 0.0 is 0)."""

    def test(value: Any) -> bool:
        return value is None or any(isinstance(value, bool) == isinstance(one, bool) and value == one for one in values)

    return test


def any_but(*values: object) -> Test:
    def test(value: Any) -> bool:
        return value not in values

    return test


def worker_count(value: Any) -> bool:
    """Left out is fine here: it means 1."""
    return value is ABSENT or (type(value) is int and value >= 1)


def _unset(*keys: str) -> dict[str, Test]:
    return dict.fromkeys(keys, only())


def _agentic_over_g2(tree: Tree) -> bool:
    return is_agentic(tree) and has_host_tier(tree)


def _matches(tree: Any, names: list[str], path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    if not names:
        yield path, tree
    elif isinstance(tree, Mapping):
        for key in tree if names[0] == "*" else names[:1]:
            if key in tree:
                yield from _matches(tree[key], names[1:], (*path, key))
    elif isinstance(tree, list) and names[0] == "#":
        for idx, item in enumerate(tree):
            yield from _matches(item, names[1:], (*path, idx))


_WORKER = "engine.workers.*."
_CACHE = _WORKER + "kv_cache."
_TIMING = _WORKER + "timing."
_SPECULATION = {"engine.speculation": only(), "engine.nextn": only(0), "engine.nextn_accepted": only()}
_STATIC = {_WORKER + "startup_seconds": only(0), "planner": only()}
_G3 = {_CACHE + "g3_offload": only()}

RULES: tuple[Rule, ...] = (
    Rule(
        id="worker-count",
        what="a worker count that is not a positive integer",
        fields={_WORKER + "parallelism.replicas": worker_count},
        allowed=WORKER_COUNT,
        gate="agentic-g2",
    ),
    Rule(
        id="agentic-g2-worker-count",
        what="agentic traffic over a host tier on a number of workers that is left out",
        fields={_WORKER + "parallelism.replicas": any_but(ABSENT)},
        allowed=WORKER_COUNT,
        when=_agentic_over_g2,
        gate="agentic-g2",
    ),
    Rule(
        id="agentic-g2-backend",
        what="agentic traffic over a host tier on a backend other than vLLM",
        fields={"engine.backend": only("vllm")},
        allowed="vllm",
        when=_agentic_over_g2,
        gate="agentic-g2",
    ),
    Rule(
        id="agentic-g2-attention-dp",
        what="agentic traffic over a host tier with attention data parallelism",
        fields={_WORKER + "parallelism.attention_data": only(1)},
        allowed="1 on every role",
        when=_agentic_over_g2,
        gate="agentic-g2",
        hint="use more workers instead",
    ),
    Rule(
        id="agentic-g2-static-pools",
        what="agentic traffic over a host tier with pools that change during the run",
        fields=_STATIC,
        allowed="static pools: no startup time, no planner",
        when=_agentic_over_g2,
        gate="agentic-g2",
    ),
    Rule(
        id="agentic-g2-speculation",
        what="agentic traffic over a host tier with speculative decoding",
        fields=_SPECULATION,
        allowed="no speculation: leave it out",
        when=_agentic_over_g2,
        gate="agentic-g2",
    ),
    Rule(
        id="agentic-g2-g3",
        what="agentic traffic over a host tier with a third tier (G3)",
        fields=_G3,
        allowed="no third tier: leave it out",
        when=_agentic_over_g2,
        gate="agentic-g2",
    ),
    Rule(
        id="attention-ffn-disaggregation",
        what="attention/FFN disaggregation",
        fields={"engine.mode": any_but("afd"), "engine.afd": only()},
        allowed="aggregated",
    ),
    Rule(
        id="backend",
        what="a backend other than vLLM",
        fields={"engine.backend": only("vllm")},
        allowed="vllm",
    ),
    Rule(
        id="unused-performance-model",
        what="a setting of the performance model in a scenario that does not use it",
        fields={
            **_unset("engine.backend_version", *(f"engine.{key}" for key in QUANT_MODES)),
            **{_WORKER + f"parallelism.{key}": only(1) for key in ("moe_tensor", "moe_expert")},
        },
        allowed="leave it out",
        when=lambda tree: not uses_performance_model(tree),
        hint="pass times of type aic use the model, and a KV capacity of type default",
    ),
    Rule(
        id="performance-model",
        what="another method or source of the performance model",
        fields={
            **_unset(*(_TIMING + key for key in ("estimation_mode", "fallback_policy", "estimator_config"))),
            **_unset(*(_TIMING + key for key in ("systems_paths", "database_mode", "transfer_policy"))),
            **_unset(*(_TIMING + key for key in ("fpm_parquet_path", "attention_backend"))),
            _TIMING + "forward_model": only("op_level"),
            **_unset("engine.fpm_profile", "engine.enable_shared_layer", "engine.strict_provenance"),
            **_unset("engine.wideep_num_slots", "engine.moe_kernel_source", "engine.attention_backend"),
            **_unset("engine.transfer_policy", "engine.systems_paths", "engine.systems_path"),
            "engine.decoder_replay": only(False),
            "engine.enable_eplb": only(False),
            "engine.moe_backend": only("default"),
            "engine.database_mode": only("SILICON"),
            "engine.estimation_mode": only("auto"),
            "engine.fallback_policy": only("deny"),
            "engine.estimator_config": only({}),
        },
        allowed="leave it out",
    ),
    Rule(
        id="cuda-graph-memory",
        what="memory set aside for CUDA graphs",
        fields={_CACHE + "capacity.cuda_graph_reserved_bytes": only(0)},
        allowed="0, or leave it out",
        hint="capacity.memory_fraction can leave room for them",
    ),
    Rule(
        id="parallelism",
        what="pipeline and context parallelism",
        fields={_WORKER + f"parallelism.{key}": only(1) for key in ("pipeline", "prefill_context", "decode_context")},
        allowed="1, or leave it out",
    ),
    Rule(
        id="prefill-interval",
        what="spacing out prefills",
        fields={
            _WORKER + "scheduler.prefill_schedule_interval": only(1),
            _WORKER + "scheduler.prefill_decode_interval": only(0),
        },
        allowed="prefill_schedule_interval 1, prefill_decode_interval 0: leave them out",
    ),
    Rule(
        id="third-tier",
        what="a third tier (G3)",
        fields=_G3,
        allowed="no third tier: leave it out",
    ),
    Rule(
        id="peer-fetch",
        what="fetching from a peer's host tier (KVCR)",
        fields=_unset(_CACHE + "kvcr"),
        allowed="leave it out",
        hint="host_offload.scope cluster_shared gives all workers one pool",
    ),
    Rule(
        id="state-cache",
        what="hybrid models with a state cache",
        fields=_unset(_CACHE + "state_cache", _CACHE + "prefix_match_unit"),
        allowed="leave it out",
    ),
    Rule(
        id="speculation",
        what="speculative decoding",
        fields=_SPECULATION,
        allowed="leave it out",
    ),
    Rule(
        id="static-pools",
        what="pools that change during the run",
        fields=_STATIC,
        allowed="static pools: no startup time, no planner",
    ),
    Rule(
        id="worker-type",
        what="naming a role inside a worker",
        fields=_unset(_WORKER + "worker_type"),
        allowed="leave it out",
        hint="the role is the key under engine.workers",
    ),
    Rule(
        id="worker-hardware",
        what="hardware of single roles",
        fields=_unset(_WORKER + "hardware"),
        allowed="engine.hardware",
    ),
    Rule(
        id="frontend",
        what="frontends, tokenization, encoders and vision",
        fields={
            _WORKER + "host_loop": only(False),
            **_unset(*(_WORKER + key for key in ("frontend", "host_profile", "vision"))),
            **_unset("engine.tokenization", "engine.workers.encoder", "traffic.source.images"),
        },
        allowed="leave it out",
    ),
    Rule(
        id="prefill-load-model",
        what="a model of how prefill load wears off in a router",
        fields={"router.prefill_load_model": only({}, {"type": "none"})},
        allowed="leave it out",
    ),
    Rule(
        id="cached-prefix",
        what="prompts that are cached before the run starts",
        fields={"traffic.source.cached_prefix_tokens": only(0)},
        allowed="0, or leave it out",
    ),
    Rule(
        id="agentic-model",
        what="agentic traffic without the name of the model that serves it",
        fields={"engine.model": lambda value: value is not None},
        allowed="any name, for instance the one of the trace",
        when=is_agentic,
    ),
    Rule(
        id="agentic-time-limit",
        what="a virtual time limit on agentic traffic",
        fields=_unset("traffic.stop.max_virtual_time_seconds", "traffic.stop.max_virtual_time_ms"),
        allowed="leave it out",
        when=is_agentic,
    ),
    Rule(
        id="agentic-warmup-policy",
        what="another way to warm agentic traffic up",
        fields={"traffic.load.agentic_warmup_policy": only("repeated_prefixes")},
        allowed="repeated_prefixes, or leave it out",
    ),
    Rule(
        id="execution",
        what="limits on the computer that runs the simulation",
        fields={"execution": only({}, {"resources": {}})},
        allowed="leave it out",
    ),
)

_HEAD = """\
# What is supported

Generated from the table in `scenarios/support.py`; do not edit. To write it anew:

    python -m g2sim.scenarios.support > docs/feature-support.md

The same table is run on every scenario. What it refuses ends with exit code 2 and a message that names the field, the
value and what is allowed; nothing is ignored silently. A value that switches a feature off (null, false, 0, 1) is fine.
"""

_AGENTIC = """
## Agentic traffic over a host tier (G2)

Agentic traffic (`agentic_mooncake`, `weka`, `dynamo`) with `kv_cache.host_offload` on any role runs offline, on any
positive integer number of workers per role, under these conditions. Results are qualified as `functional_only`.
"""

_GENERAL = """
## All scenarios
"""


def render_feature_support() -> str:
    """The text of docs/feature-support.md."""
    return (
        _HEAD
        + _AGENTIC
        + _rendered([rule for rule in RULES if rule.gate == "agentic-g2"])
        + _GENERAL
        + _rendered([rule for rule in RULES if rule.gate == "general"])
    )


def _rendered(rules: list[Rule]) -> str:
    lines = ["", "| rule | not supported | fields | allowed |", "|---|---|---|---|"]
    for rule in rules:
        fields = ", ".join(f"`{pattern.replace('*', '<role>').replace('.#', '[]')}`" for pattern in rule.fields)
        allowed = rule.allowed + (f" ({rule.hint})" if rule.hint else "")
        lines.append(f"| {rule.id} | {rule.what} | {fields} | {allowed} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(render_feature_support())
