"""The ``faults`` of a scenario: what must agree in them, and both ways between plain values and a plan.

Refuses to know: single fields (``layout``), and what a fault does (``g2sim.actors.router``).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from g2sim.actors.config import HostScope, WorkerRole
from g2sim.actors.kv.events import Tier
from g2sim.actors.router.faults import Fault, FaultKind, FaultPlan, RecoveryConfig
from g2sim.actors.router.registry import make_policy
from g2sim.scenarios.fields import ABSENT
from g2sim.scenarios.layout import FAULT
from g2sim.scenarios.policy_source import is_built_in
from g2sim.scenarios.support import roles
from g2sim.scenarios.yaml_source import Document, KeyPath

Values = dict[str, Any]


def settle_faults(tree: Values, document: Document) -> None:
    """Checks the faults of a checked tree, and names those that have no name: ``<type>-<position>``.

    Raises: ConfigError.
    """
    router = tree["router"]
    plan = tree["faults"]["plan"]
    if not plan:
        raise document.error(("faults", "plan"), got=plan, allowed="a list of at least one fault")
    looks = may_see_blocks(router["policy"], router["options"])
    if not looks and not all(FaultKind(fault["type"]).is_membership for fault in plan):
        raise document.error(
            ("faults",),
            problem=f"policy {router['policy']} does not look at KV events, so no fault can reach it",
            allowed="a router.policy that looks at KV events, such as dynamo_kv",
        )
    ranks = {
        WorkerRole(role).pool_name: (worker["parallelism"]["replicas"], worker["parallelism"]["attention_data"])
        for role, worker in roles(tree)
    }
    limit_ms = tree["traffic"]["stop"]["max_virtual_time_ms"]
    names: set[str] = set()
    for idx, fault in enumerate(plan):
        at = ("faults", "plan", idx)
        if fault["name"] is ABSENT:
            fault["name"] = f"{fault['type']}-{idx}"
        if fault["name"] in names:
            raise document.error((*at, "name"), problem="two faults have this name", got=fault["name"])
        names.add(fault["name"])
        if fault["type"] == FaultKind.DISCOVERY_FLAP:
            if fault["until_ms"] < fault["from_ms"]:
                allowed = f"from_ms {fault['from_ms']}, or later"
                raise document.error((*at, "until_ms"), got=fault["until_ms"], allowed=allowed)
        elif "until_ms" in fault and not fault["until_ms"] > fault["from_ms"]:
            raise document.error((*at, "until_ms"), got=fault["until_ms"], allowed=f"above from_ms {fault['from_ms']}")
        if limit_ms is not None and _stop_ms(fault) > limit_ms:
            key = "until_ms" if "until_ms" in fault else "from_ms"
            raise document.error((*at, key), got=fault[key], allowed=f"at most the virtual time limit, {limit_ms}")
        if fault["pool"] is not None and fault["pool"] not in ranks:
            raise document.error((*at, "pool"), got=fault["pool"], allowed=f"{', '.join(ranks)}, or null for all")
        struck = [counts for pool, counts in ranks.items() if fault["pool"] in (None, pool)]
        for key, counts in (("worker", [one[0] for one in struck]), ("dp_rank", [one[1] for one in struck])):
            number = fault.get(key)
            if number is not None and number >= max(counts):
                raise document.error((*at, key), got=number, allowed=f"0 to {max(counts) - 1}, or null for all")
        if fault["type"] == FaultKind.LAG:
            if fault["lag_max_ms"] is None:
                fault["lag_max_ms"] = fault["lag_ms"]
            if fault["lag_max_ms"] < fault["lag_ms"]:
                raise document.error(
                    (*at, "lag_max_ms"), got=fault["lag_max_ms"], allowed=f"at least lag_ms, {fault['lag_ms']}"
                )
        if fault["type"] == FaultKind.CACHE_CLEAR:
            _check_tier(fault, at, tree, document)
    _settle_membership(plan, ranks, router, document)


def may_see_blocks(policy: str, options: Mapping[str, Any]) -> bool:
    """Whether a policy looks at KV events; of one that is found by code that is known when the run has made it."""
    return not is_built_in(policy) or make_policy(policy, options).sees_blocks


def _stop_ms(fault: Values) -> float:
    """When a fault is over; one that is of an instant has no ``until_ms``."""
    return float(fault["until_ms"] if "until_ms" in fault else fault["from_ms"])


def _check_tier(fault: Values, at: KeyPath, tree: Values, document: Document) -> None:
    """A shared host pool can only be cleared for all of its ranks, and there must be something to clear."""
    if fault["tier"] == Tier.DEVICE:
        return
    hosts = [
        worker["kv_cache"]["host_offload"]
        for role, worker in roles(tree)
        if fault["pool"] in (None, WorkerRole(role).pool_name)
    ]
    if fault["tier"] is not None and not any(hosts):
        raise document.error((*at, "tier"), problem="there is no host tier", got=fault["tier"], allowed=Tier.DEVICE)
    part = next((key for key in ("worker", "dp_rank", "pool") if fault[key] is not None), None)
    if part is not None and any(host and host["scope"] == HostScope.CLUSTER_SHARED for host in hosts):
        raise document.error(
            (*at, part),
            problem="the host pool is shared, so it is cleared for all ranks or for none",
            got=fault[part],
            allowed=f"tier: {Tier.DEVICE}, or no pool, worker and dp_rank",
        )


def _settle_membership(
    plan: Sequence[Values], ranks: Mapping[str, tuple[int, int]], router: Values, document: Document
) -> None:
    """Checks the faults that strike workers: one at a time for each worker."""
    taken: dict[tuple[str, int], list[tuple[float, float, str]]] = {}
    for idx, fault in enumerate(plan):
        at, start_ms, stop_ms = ("faults", "plan", idx), fault["from_ms"], _stop_ms(fault)
        if not FaultKind(fault["type"]).is_membership:
            continue
        if not start_ms > 0.0:
            raise document.error((*at, "from_ms"), got=start_ms, allowed="above 0: at 0 workers begin")
        if fault["type"] == FaultKind.WORKER_CRASH:
            if fault["detect_ms"] > stop_ms - start_ms:
                raise document.error(
                    (*at, "detect_ms"),
                    got=fault["detect_ms"],
                    allowed=f"at most {stop_ms - start_ms}, until_ms - from_ms: it is found out before the restart",
                )
            if router["load_sync_ms"] is not None:
                raise document.error(
                    (*at, "type"),
                    problem="a crash with router.load_sync_ms is not supported",
                    got=fault["type"],
                    allowed="leave router.load_sync_ms out",
                )
        struck = [
            (pool, worker)
            for pool, (workers, _) in ranks.items()
            for worker in range(workers)
            if fault["pool"] in (None, pool) and fault["worker"] in (None, worker)
        ]
        for pool, worker in struck:
            others = taken.setdefault((pool, worker), [])
            at_once = [name for begun_ms, over_ms, name in others if start_ms <= over_ms and begun_ms <= stop_ms]
            if at_once:
                raise document.error(
                    (*at, "from_ms"),
                    problem=f"{at_once[0]} strikes worker {worker} of pool {pool} at that time too",
                    got=start_ms,
                    allowed="one fault at a time that strikes a worker",
                )
            others.append((start_ms, stop_ms, fault["name"]))


def read_plan(values: Mapping[str, Any] | None) -> FaultPlan | None:
    """The plan of settled values."""
    if values is None:
        return None
    return FaultPlan(
        faults=tuple(
            Fault(
                kind=fault["type"],
                **{"until_ms": _stop_ms(fault)} | {key: value for key, value in fault.items() if key != "type"},
            )
            for fault in values["plan"]
        ),
        recovery=RecoveryConfig(**values["recovery"]),
    )


def plain_plan(plan: FaultPlan) -> Values:
    """Values that describe a plan."""
    return {
        "recovery": _plain(plan.recovery, attrs.fields_dict(RecoveryConfig)),
        "plan": [{"type": fault.kind.value, **_plain(fault, FAULT.cases[fault.kind].fields)} for fault in plan.faults],
    }


def _plain(item: object, names: Mapping[str, Any]) -> Values:
    values = {name: getattr(item, name) for name in names}
    return {name: value.value if isinstance(value, enum.Enum) else value for name, value in values.items()}
