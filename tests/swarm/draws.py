"""What the swarm runs: a case is drawn from its seed alone.

Deployments are those of the differential test, made more extreme. Most draws are tables of weights or of functions, so
that another fault, traffic or policy is one more entry.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import attrs
from draw import draw
from traces import PLAYS, SESSIONS, Trace
from translate import scenario_from_call

from g2sim.actors.kv.events import Tier
from g2sim.actors.router.faults import FaultKind, OnCrash
from g2sim.actors.router.registry import POLICIES, make_policy

Values = dict[str, Any]
Draw = random.Random

TRACE_NAME = "trace.jsonl"
LOADED_POLICY = "loaded_policy:Hesitant"
SEE_BLOCKS = tuple(sorted(name for name in POLICIES if make_policy(name, {}).sees_blocks))


@attrs.frozen
class Case:
    """One run.

    Attributes:
        scenario: its values.
        trace: objects of the trace's lines; of a script, what it submits.
        policy: (target, options) that the command line would name instead of the scenario's policy.
        cancels: None, or what a script cancels: {row, after_ms}, or {on, within_ms, after_ms} for the request that the
            next event of type ``on`` is about.
    """

    scenario: Values
    trace: list[Values]
    policy: tuple[str, Values] | None = None
    cancels: list[Values] | None = None


def draw_case(seed: int) -> Case:
    """The case of a seed."""
    drawn, g = draw(seed), random.Random(f"swarm:{seed}")
    values = scenario_from_call(drawn["call"], trace_path=TRACE_NAME, trace_format="mooncake")
    values |= {"name": "swarm", "seed": g.randrange(2**32)}
    case = Case(values, drawn["trace"])
    case = _chosen(g, TRAFFIC)(g, case)
    if g.random() < 0.2:
        _make_extreme(g, case.scenario)
    _bound_profile(case.scenario)
    case = _routed(g, case)
    if case.scenario["router"]["policy"] in SEE_BLOCKS and g.random() < 0.6:
        _add_faults(g, case.scenario)
    return case


def _chosen(g: Draw, table: dict[Any, int]) -> Any:
    return g.choices(list(table), list(table.values()))[0]


# Traffic -------------------------------------------------------------------------------------------------------------


def _rows(g: Draw, case: Case) -> Case:
    return case


def _bursts(g: Draw, case: Case) -> Case:
    """Few instants for all arrivals, so that much happens at once."""
    instants = [g.choice([0.0, 1.0, 2.0, 2.0000000001, 40.0]) for _ in range(g.randrange(1, 4))]
    at_ms = sorted(g.choice(instants) for _ in case.trace)
    rows = [row | {"timestamp": arrival_ms} for row, arrival_ms in zip(case.trace, at_ms, strict=True)]
    for row in rows:
        if "delay" in row:
            row["delay"] = 0.0
    return attrs.evolve(case, trace=rows)


def _sessions(g: Draw, case: Case) -> Case:
    """A trace of another format without plays, open or closed loop."""
    trace = SESSIONS[g.choice(list(SESSIONS))](g, _trace_block(g, case))
    closed = trace.format == "applied_compute_agentic" or g.random() < 0.3
    load: Values = {"type": "trace_timestamps"}
    if closed:
        load = {"type": "concurrency", "concurrency": g.choice([1, 2, 5])}
    if trace.format == "dynamo":
        _fit_for_plays(case)
    case = _with_trace(case, trace, load)
    if trace.format == "applied_compute_agentic" and g.random() < 0.5:
        case.scenario["traffic"]["source"] |= {"shared_prefix_ratio": g.choice([0.3, 1.0]), "prefix_groups": 2}
    return case


def _generated(g: Draw, case: Case) -> Case:
    """Generated requests or conversations, under every load that there is for them."""
    sessions = g.random() < 0.6
    unit = "sessions" if sessions else "requests"
    tokens = g.randrange(1, 24), g.choice([1, 2, 5])
    source: Values = {"type": "synthetic", "input_tokens": tokens[0], "output_tokens": tokens[1]}
    if sessions:
        source = {
            "type": "synthetic-session",
            "new_input_tokens_per_turn": tokens[0],
            "output_tokens_per_turn": tokens[1],
            "session": {
                "turns": g.randrange(1, 4),
                "shared_prefix_ratio": g.choice([0.0, 0.5, 1.0]),
                "prefix_groups": g.choice([1, 2]),
                "inter_turn_delay_ms": g.choice([0.0, 2.5, 30.0]),
                "accumulate": g.random() < 0.6,
                "group_seed": g.randrange(9),
            },
        }
    load = g.choice(
        [
            {"type": "concurrency", "concurrency": g.choice([1, 2, 7])},
            {"type": "poisson", f"{unit}_per_second": g.choice([30.0, 1000.0, 1e9]), "seed": g.randrange(99)},
            {"type": "constant_rate", f"{unit}_per_second": g.choice([50.0, 2000.0])},
            {"type": "constant_rate", "interval_ms": g.choice([0.0, 0.7, 12.0])},
        ]
    )
    stop = case.scenario["traffic"].get("stop", {}) | {unit: g.randrange(1, 16)}
    traffic = {"source": source, "load": load, "stop": stop}
    return attrs.evolve(case, trace=[], scenario=case.scenario | {"traffic": traffic})


def _plays(g: Draw, case: Case) -> Case:
    """Plays, on their recorded times, on lanes, cut by a snapshot, warmed up, and recycled until a profile ends."""
    _fit_for_plays(case)
    trace = PLAYS[g.choice(list(PLAYS))](g, _trace_block(g, case))
    for worker in _workers(case.scenario):
        if g.random() < 0.8:
            worker["kv_cache"]["capacity"]["blocks"] = g.choice([12, 20, 30, 60])
    load: Values = {"type": "trace_timestamps", "speedup": g.choice([1.0, 1.0, 0.5, 3.0])}
    if (control := g.choice(["none", "lanes", "snapshot", "warm-up", "profile", "profile", "all"])) != "none":
        load["agentic_lanes"] = g.choice([1, 2, 2, 3])
    if control not in ("none", "lanes"):
        load["agentic_snapshot"] = {"seed": g.randrange(99)}
    if control in ("warm-up", "all"):
        load["agentic_warmup"] = True
    if control in ("profile", "all"):
        load["agentic_profile"] = {
            "duration_seconds": g.choice([0.004, 0.02, 0.06, 0.12]),
            "response_grace_seconds": g.choice([0.0, 0.0, 0.0005, 0.003, 1.0]),
            "cancel_drain_seconds": g.choice([0.0, 10.0]),
            "tree_idle_cap_seconds": g.choice([0.0007, 0.01, 300.0]),
            "global_idle_cap_seconds": g.choice([0.0004, 0.005, 10.0]),
        }
    case = _with_trace(case, trace, load)
    if trace.format == "weka":
        case.scenario["traffic"]["source"]["nested_timestamp_basis"] = "relative"
    return case


def _scripted(g: Draw, case: Case) -> Case:
    """A script submits the rows, and cancels some of them: after a while, or when something happens to them."""
    size = next(iter(_workers(case.scenario)))["kv_cache"]["block_size"]
    trace_size = case.scenario["traffic"]["source"]["block_size"]
    rows: list[Values] = []
    for row in case.trace:
        blocks = row["hash_ids"]
        if trace_size != size:
            blocks = [one * 8 + part for one in blocks for part in range(-(-trace_size // size))]
        length = min(row["input_length"], len(blocks) * size)
        submitted = {"blocks": blocks[: -(-length // size)], "input_tokens": length}
        submitted |= {"output_tokens": row["output_length"], "at_ms": row["timestamp"]}
        rows.append(submitted | ({"session": row["session_id"]} if "session_id" in row else {}))
    cancels: list[Values] = []
    for _ in range(g.randrange(1, 10)):
        if g.random() < 0.3:
            cancels.append({"row": g.randrange(len(rows)), "after_ms": g.choice([0.0, 0.25, 1.0, 3.3, 20.0])})
        else:
            within_ms = g.choice([5.0, 30.0, 100.0])
            cancels.append({"on": g.choice(CANCELED_ON), "within_ms": within_ms, "after_ms": g.choice([0.0, 0.0, 0.3])})
    case.scenario["traffic"] = {"source": {"type": "script", "path": "script.py"}, "load": {}}
    return attrs.evolve(case, trace=rows, cancels=cancels)


CANCELED_ON = (
    *("RequestArrived", "RequestWaits", "RequestPlaced", "RequestQueued", "RequestAdmitted", "RequestPreempted"),
    *("LoadQueued", "StorePrepared", "StorePutOff", "RequestEnded"),
    *("SourceHeld", "DestinationReserved", "TransferStarted", "DestinationActivated", "SourceReleased"),
)
"""Events on which a script cancels the request that they are about."""

TRAFFIC: dict[Callable[[Draw, Case], Case], int] = {
    _rows: 30,
    _bursts: 10,
    _sessions: 12,
    _generated: 8,
    _plays: 25,
    _scripted: 15,
}
"""What a case's traffic is, with weights."""


def _trace_block(g: Draw, case: Case) -> int:
    """Tokens of a block of the trace; mostly those of a block of the deployment."""
    size: int = next(iter(_workers(case.scenario)))["kv_cache"]["block_size"]
    return g.choice([size, size, size, size + 1, 2 * size])


def _with_trace(case: Case, trace: Trace, load: Values) -> Case:
    source: Values = {"type": "trace", "paths": [TRACE_NAME], "format": trace.format}
    if trace.block_size is not None:
        source["block_size"] = trace.block_size
    stop = case.scenario["traffic"].get("stop")
    traffic = {"source": source, "load": load, **({"stop": stop} if stop else {})}
    return attrs.evolve(case, trace=trace.rows, scenario=case.scenario | {"traffic": traffic})


def _fit_for_plays(case: Case) -> None:
    """What traffic of plays asks of a deployment."""
    case.scenario["engine"]["model"] = "m"
    case.scenario["traffic"].pop("stop", None)
    workers = list(_workers(case.scenario))
    if any(worker["kv_cache"].get("host_offload") for worker in workers):
        for worker in workers:
            worker["parallelism"]["attention_data"] = 1


# Deployments ---------------------------------------------------------------------------------------------------------


def _workers(scenario: Values) -> list[Values]:
    return list(scenario["engine"]["workers"].values())


def _make_extreme(g: Draw, scenario: Values) -> None:
    """Links that hardly move or take no time, pools of a block or two, passes that take none or very long."""
    bandwidth = [0.0, 1e-9, 1e-4, 1e6, 1e300]
    hosts = [host for worker in _workers(scenario) if (host := worker["kv_cache"].get("host_offload"))]
    shared = {f"shared_{way}_bandwidth_gbps": g.choice(bandwidth) for way in ("d2h", "h2d")}
    host_blocks = g.choice([None, 1, 2])
    for host in hosts:
        host |= shared | {f"{way}_bandwidth_gbps": g.choice(bandwidth) for way in ("d2h", "h2d")}
        host["latency_to_first_byte_ms"] = g.choice([0.0, 1e-9, 7.0, 1e6])
        if host_blocks is not None:
            host["num_host_blocks"] = host_blocks
    handoff = scenario["engine"].get("kv_transfer")
    if handoff is not None:
        handoff["bandwidth_gb_per_second"] = g.choice(bandwidth)
        if handoff["bytes_per_token"] is None:  # a rate without a size is refused
            handoff["bytes_per_token"] = g.choice([1, 250_000])
    for worker in _workers(scenario):
        if g.random() < 0.3:
            worker["kv_cache"]["capacity"]["blocks"] = g.choice([1, 2])
        if g.random() < 0.4:
            times = {"prefill_ms": g.choice([0.0, 1e-9, 1e5]), "decode_ms": g.choice([0.0, 1e-9, 1e4])}
            worker["timing"] = {"type": "fixed", **times}


def _bound_profile(scenario: Values) -> None:
    """A profile recycles plays for as long as it lasts, so prompts take some time where it says when it ends."""
    if "agentic_profile" in scenario["traffic"]["load"]:
        for worker in _workers(scenario):
            if worker["timing"]["type"] == "fixed":
                worker["timing"]["prefill_ms"] = max(0.25, worker["timing"]["prefill_ms"])


# Routers -------------------------------------------------------------------------------------------------------------


def _routed(g: Draw, case: Case) -> Case:
    name = g.choice([*sorted(POLICIES), *SEE_BLOCKS, *SEE_BLOCKS])
    router: Values = {"policy": name, "tie_break": g.choice(["lowest", "random"])}
    if name in OPTIONS and g.random() < 0.6:
        router["options"] = {key: g.choice(values) for key, values in OPTIONS[name].items() if g.random() < 0.5}
    if g.random() < 0.4:
        router["kv_event_lag_ms"] = g.choice([0.0, 0.5, 3.0, 40.0])
    if g.random() < 0.3:
        router["replicas"] = g.choice([2, 3])
        if g.random() < 0.6:
            router["load_sync_ms"] = g.choice([0.0, 0.5, 13.0])
    policy = None
    if g.random() < 0.1:
        policy = LOADED_POLICY, {"at_most": g.choice([1, 2, 5]), "refuses": g.choice([0, 0, 4])}
    return attrs.evolve(case, scenario=case.scenario | {"router": router}, policy=policy)


_WEIGHTS = (0.0, 0.5, 3.0)
_BOUND: dict[str, tuple[Any, ...]] = {"ttl_ms": (None, 0.0, 4.0), "slack_requests": (0, 1, 4)}

OPTIONS: dict[str, dict[str, tuple[Any, ...]]] = {
    "prefix_affinity": dict.fromkeys(("device_weight", "host_weight", "request_weight", "prefill_weight"), _WEIGHTS),
    "session_affinity": _BOUND,
    "parent_aware": _BOUND,
    "dynamo_kv": {
        "router_queue_threshold": (0.0, 0.5, 2.0),
        "router_queue_policy": ("fcfs", "lcfs", "wspt"),
        "router_temperature": (0.0, 0.7),
        "overlap_score_credit_decay": (0.0, 0.5),
        "host_cache_hit_weight": (0.0, 1.0),
        "decode_active_request_weight": (0.0, 2.0),
        "router_track_active_blocks": (True, False),
        "router_assume_kv_reuse": (True, False),
    },
}
"""Values of options that are drawn, by policy."""


# Faults --------------------------------------------------------------------------------------------------------------


def _lag(g: Draw) -> Values:
    lag_ms = g.choice([0.0, 0.3, 4.0, 60.0])
    return {"lag_ms": lag_ms, "lag_max_ms": g.choice([None, lag_ms + 5.0])}


def _by_chance(g: Draw) -> Values:
    return {"probability": g.choice([0.2, 0.6, 1.0])}


def _held_up(g: Draw) -> Values:
    return _by_chance(g) | {"hold_ms": g.choice([0.1, 2.0, 25.0])}


def _crash(g: Draw) -> Values:
    """``detect_ms`` is a share of the crash's time, until that is drawn."""
    return {"detect_ms": g.choice([0.0, 0.4, 1.0]), "requests": g.choice(list(OnCrash))}


def _nothing_else(g: Draw) -> Values:
    return {}


FAULTS: dict[str, Callable[[Draw], Values]] = {
    FaultKind.LAG: _lag,
    FaultKind.LOSS: _by_chance,
    FaultKind.DUPLICATION: _by_chance,
    FaultKind.REORDERING: _held_up,
    FaultKind.OUTAGE: _nothing_else,
    FaultKind.ROUTER_RESTART: _nothing_else,
    FaultKind.PUBLISHER_RESET: _nothing_else,
    FaultKind.WORKER_CRASH: _crash,
    FaultKind.DISCOVERY_FLAP: _nothing_else,
    FaultKind.CACHE_CLEAR: lambda g: {"tier": g.choice([None, *map(str, Tier)])},
}
"""Every type of fault, with the draw of the keys that only it has."""

_WITHOUT = {
    "worker": (FaultKind.ROUTER_RESTART,),
    "dp_rank": (FaultKind.ROUTER_RESTART, FaultKind.WORKER_CRASH, FaultKind.DISCOVERY_FLAP),
}


def _add_faults(g: Draw, scenario: Values) -> None:
    """One to four faults, which may overlap, within or around the time that the traffic takes."""
    limit_ms = scenario["traffic"].get("stop", {}).get("max_virtual_time_ms")
    span_ms = g.choice([5.0, 30.0, 100.0])
    roles = scenario["engine"]["workers"]
    pools = ["prefill"] if "prefill" in roles else ["agg"]
    if "decode" in roles and scenario["router"]["policy"] != "dynamo_kv":  # its decode router keeps no index
        pools.append("decode")
    plan: list[Values] = []
    for _ in range(g.choice([1, 1, 2, 3, 4])):
        kind = g.choice(list(FAULTS))
        fault: Values = {"type": str(kind), **FAULTS[kind](g)}
        fault["from_ms"] = g.choice([0.0, round(g.uniform(0.0, span_ms), 1)])
        fault["until_ms"] = fault["from_ms"] + g.choice([0.01, 1.0, span_ms / 3.0, 2.0 * span_ms])
        if g.random() < 0.3:
            fault["pool"] = g.choice(pools)
        for key, counts in (("worker", "replicas"), ("dp_rank", "attention_data")):
            if kind not in _WITHOUT[key] and g.random() < 0.3:
                fault[key] = g.randrange(min(worker["parallelism"].get(counts, 1) for worker in roles.values()))
        if FaultKind(kind).is_membership:
            fault["from_ms"] += 0.5
            fault["until_ms"] += 0.5
            if "detect_ms" in fault:
                fault["detect_ms"] *= fault["until_ms"] - fault["from_ms"]
            if not _goes(fault, plan, scenario):
                continue
        if limit_ms is None or fault.get("until_ms", fault["from_ms"]) <= limit_ms:
            plan.append(fault)
    recovery = {
        "mode": g.choice(["replay", "snapshot"]),
        "latency_ms": g.choice([0.0, 0.3, 1.0, 15.0]),
        "patience_ms": g.choice([0.0, 0.0, 0.4, 6.0]),
        "history_events": g.choice([0, 2, 20, 10_000]),
        "heartbeat_ms": g.choice([1.0, 7.0, 100.0]),
    }
    if plan:
        scenario["faults"] = {"recovery": recovery, "plan": plan}


def _goes(fault: Values, plan: list[Values], scenario: Values) -> bool:
    """Whether a fault of a whole worker may be added to a plan."""
    if "load_sync_ms" in scenario["router"] and fault["type"] == FaultKind.WORKER_CRASH:
        return False
    if fault["type"] == FaultKind.CACHE_CLEAR:
        workers = scenario["engine"]["workers"].values()
        hosts = [worker["kv_cache"].get("host_offload") for worker in workers]
        if fault["tier"] != Tier.DEVICE and fault.keys() & {"pool", "worker", "dp_rank"}:
            fault["tier"] = str(Tier.DEVICE)  # one pool of several ranks, perhaps
        if fault["tier"] == Tier.HOST_PINNED and not any(hosts):
            return False
        fault["until_ms"] = fault["from_ms"]
    others = [one for one in plan if FaultKind(one["type"]).is_membership]
    fits = all(
        one.get("until_ms", one["from_ms"]) < fault["from_ms"] or fault["until_ms"] < one["from_ms"] for one in others
    )
    if fault["type"] == FaultKind.CACHE_CLEAR:
        del fault["until_ms"]
    return fits
