"""Wiring: from a checked scenario to actors on a bus.

Owns: which actors there are, their names and order, and who hears what. Refuses to know: how any of them decides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
from numpy.typing import NDArray

from g2sim.actors.config import DeploymentConfig, HostScope, HostTierConfig, PoolConfig, Sharing, WorkerRole
from g2sim.actors.handoff.actor import HandoffCoordinator
from g2sim.actors.host_pool.actor import HostPoolActor
from g2sim.actors.host_pool.pool import HostPool
from g2sim.actors.host_pool.transfers import FairLinks, FifoLanes, Link, bytes_per_ms, equal_share, max_min
from g2sim.actors.kv.blocks import BlockHasher
from g2sim.actors.kv.numbers import BlockNumbers
from g2sim.actors.membership.actor import MembershipActor
from g2sim.actors.phases import Phase
from g2sim.actors.router.actor import RouterActor
from g2sim.actors.router.faults import FaultPlan, OnCrash
from g2sim.actors.router.messages import router_names
from g2sim.actors.router.policy import PlacementPolicy
from g2sim.actors.router.pool import Pool
from g2sim.actors.router.registry import PolicyClass, make_policy
from g2sim.actors.router.state import RouterState
from g2sim.actors.traffic import actor as traffic
from g2sim.actors.traffic.events import PreparationEnded, ProfileFinished
from g2sim.actors.traffic.request import TrafficDriver
from g2sim.actors.worker import actor as workers
from g2sim.actors.worker.place import RankPlace
from g2sim.actors.worker.rank import Rank
from g2sim.actors.worker.timing import PassTimes
from g2sim.bus.errors import ConfigError
from g2sim.bus.events import Record
from g2sim.bus.kernel import Kernel
from g2sim.scenarios.events import RunFinished
from g2sim.scenarios.report import SHARED_POOL, private_pool_name

if TYPE_CHECKING:
    from g2sim.actors.router.feed import RouterFeed

RUN_SOURCE = "run"
TRAFFIC = "traffic"
HANDOFF = "handoff"
MEMBERSHIP = "membership"

_SHARE_RULES = {Sharing.MAX_MIN: max_min, Sharing.EQUAL_SHARE: equal_share}


class _WorkerSeconds:
    """Time that the pools provide, summed instant by instant.

    The reference adds at each instant at which something happens, so the last bit depends on the instants.
    """

    def __init__(self, deployment: DeploymentConfig) -> None:
        self.prefill = 0.0
        self.decode = 0.0
        self._prefill_workers = sum(pool.workers for pool in deployment.pools if pool.role is WorkerRole.PREFILL)
        self._from_ms = -math.inf
        self._until_ms = math.inf
        self._decode_workers = sum(pool.workers for pool in deployment.pools if pool.role is not WorkerRole.PREFILL)

    def hear(self, record: Record) -> None:
        """What counts starts when preparation has ended, and is over when nobody waits for anything."""
        if type(record.event) is PreparationEnded:
            self.prefill = self.decode = 0.0
            self._from_ms = record.time_ms
        elif type(record.event) is ProfileFinished:
            self._until_ms = record.time_ms

    def add(self, times_ms: Sequence[float]) -> None:
        instants_ms = np.array(times_ms)
        counts = (self._from_ms < instants_ms[1:]) & (instants_ms[1:] <= self._until_ms)
        passed_ms = np.diff(instants_ms)[counts]
        self.prefill = _added_up(self.prefill, self._prefill_workers * passed_ms / 1000.0)
        self.decode = _added_up(self.decode, self._decode_workers * passed_ms / 1000.0)


def _added_up(start: float, values: NDArray[np.float64]) -> float:
    """``start`` and the values, added one after the other."""
    return float(np.add.accumulate(np.concatenate(([start], values)))[-1])


@attrs.frozen(kw_only=True)
class Cluster:
    """A deployment on its bus, ready to run.

    Attributes:
        workers: by actor name, in order.
        host_pools: every host pool by its name in events.
        feeds: of the routers, in a run with faults.
    """

    kernel: Kernel
    workers: Mapping[str, workers.WorkerActor]
    host_pools: Mapping[str, HostPool]
    traffic: traffic.TrafficActor
    feeds: tuple[RouterFeed, ...]
    _seconds: _WorkerSeconds

    def close(self) -> None:
        """Let actors tell what they have kept for later; to be called once, after the driver has returned.

        Raises: InvariantViolation for a router's index that does not get right, in a run with faults.
        """
        for name, worker in self.workers.items():
            worker.tell_passes(self.kernel.slot(name).port)
        self.kernel.tell_instants()
        for feed in self.feeds:
            feed.publish_end()

    def publish_end(self, notes: tuple[str, ...] = ()) -> None:
        """Publish that the run is over, with what is to be noted; to be called once, after ``close``."""
        self.kernel.publish(
            RUN_SOURCE,
            RunFinished(
                stopped_at_limit=self.kernel.stopped_at_limit,
                prefill_worker_seconds=self._seconds.prefill,
                decode_worker_seconds=self._seconds.decode,
                notes=notes,
            ),
        )


def build_cluster(
    deployment: DeploymentConfig,
    driver: TrafficDriver,
    *,
    seed: int,
    pass_times: Mapping[WorkerRole, PassTimes] | None = None,
    policy_class: PolicyClass | None = None,
    faults: FaultPlan | None = None,
) -> Cluster:
    """Put a deployment and its traffic on a new bus.

    Args:
        pass_times: answer for the roles with external timing.
        policy_class: of the placement policy, None for a built-in one.
        faults: what strikes KV events on their way to routers, and workers.
    Raises: ConfigError for a fault of a router that does not look at KV events.
    """
    kernel = Kernel(seed=seed, time_limit_ms=deployment.max_virtual_time_ms)
    host_pools: dict[str, HostPool] = {}
    numbering = BlockNumbers()
    shared = next((pool for pool in deployment.pools if _is_shared(pool.rank.host)), None)
    if shared is not None:
        pool = _shared_pool(shared, numbering)
        host_pools[SHARED_POOL] = pool
        kernel.register(SHARED_POOL, HostPoolActor(pool))

    coordinator = HANDOFF if deployment.disaggregated else None
    routers: dict[WorkerRole, list[str]] = {}
    policies: dict[WorkerRole, PlacementPolicy] = {}
    feeds: list[RouterFeed] = []
    for config in deployment.pools:
        names = routers[config.role] = router_names(config.role, deployment.router.replicas)
        for name in names:
            state = _router_state(deployment, config, kernel, name, policy_class)
            policies[config.role] = state.policy
            router = RouterActor(state=state, workers=_names(config), coordinator=coordinator)
            kernel.register(name, router)
            router.subscribe(kernel, name, deployment.router, faults)
            if router.feed is not None:
                feeds.append(router.feed)
    _check_faults(faults, {role.pool_name: policy for role, policy in policies.items()})
    made: dict[str, workers.WorkerActor] = {}
    next_client = 0
    for config in deployment.pools:
        for worker, name in enumerate(_names(config)):
            made[name] = _worker(
                name,
                worker,
                config,
                next_client,
                host_pools,
                numbering,
                coordinator,
                watched=policies[config.role].sees_blocks,
                pass_times=(pass_times or {}).get(config.role),
            )
            kernel.register(name, made[name])
            next_client += config.dp_size

    if coordinator is not None:
        kernel.register(
            coordinator,
            HandoffCoordinator(
                config=deployment.handoff,
                block_size_tokens=deployment.block_size_tokens,
                workers={config.role: _names(config) for config in deployment.pools},
                routers=routers,
                listening=[role for role, policy in policies.items() if policy.sees_load],
            ),
        )

    source = traffic.TrafficActor(
        driver=driver,
        hasher=BlockHasher(deployment.block_size_tokens),
        fronts=routers[WorkerRole.AGGREGATED] if coordinator is None else [coordinator],
        front_phase=Phase.REPORT if coordinator else Phase.PLACE,
        # A coordinator first hears what workers report of the hand-off that it is to drop.
        cancel_phase=Phase.HANDOFF if coordinator else Phase.PLACE,
    )
    kernel.register(TRAFFIC, source)
    source.ends = kernel.subscribe(
        TRAFFIC,
        traffic.watched_events(driver, disaggregated=deployment.disaggregated),
        wake_message=traffic.RequestsEnded(),
        wake_phase=Phase.TERMINAL,
    )
    if faults is not None and faults.membership:
        membership = MembershipActor(
            faults=faults.membership,
            workers={config.role: _names(config) for config in deployment.pools},
            routers=routers,
            coordinator=coordinator,
            traffic=TRAFFIC,
        )
        kernel.register(MEMBERSHIP, membership)
        membership.start(kernel, MEMBERSHIP)
        source.keeps_requests = any(fault.requests is OnCrash.RESUBMIT for fault in faults.membership)
    for name in made:
        kernel.post(kernel.slot(name), workers.Begin(), Phase.HOST_POOL, 0.0)
    kernel.post(kernel.slot(TRAFFIC), traffic.Begin(), Phase.TERMINAL, 0.0)

    seconds = _WorkerSeconds(deployment)
    kernel.observe_instants(seconds.add)
    kernel.add_sink(seconds.hear, (PreparationEnded, ProfileFinished))
    return Cluster(
        kernel=kernel, workers=made, host_pools=host_pools, traffic=source, feeds=tuple(feeds), seconds=seconds
    )


def _check_faults(faults: FaultPlan | None, policies: Mapping[str, PlacementPolicy]) -> None:
    """Raises: ConfigError for a fault that can reach nobody. Whether a policy looks is known when it has started."""
    looking = [pool for pool, policy in policies.items() if policy.sees_blocks]
    for fault in () if faults is None else faults.faults:
        if fault.kind.is_membership:
            continue
        if not looking or fault.pool not in (None, *looking):
            who = "no router looks" if fault.pool is None else f"the {fault.pool} router does not look"
            raise ConfigError(
                "faults.plan",
                problem=f"{fault.name}: {who} at KV events, so no fault can reach it",
                allowed=", ".join(looking) or "a router.policy that looks at KV events, such as dynamo_kv",
            )


def _names(config: PoolConfig) -> list[str]:
    return [f"{config.role.value}-{worker}" for worker in range(config.workers)]


def _router_state(
    deployment: DeploymentConfig, config: PoolConfig, kernel: Kernel, name: str, policy_class: PolicyClass | None
) -> RouterState:
    rank = config.rank
    pool = Pool(
        role=config.role,
        workers=config.workers,
        dp_size=config.dp_size,
        block_size_tokens=rank.block_size_tokens,
        max_batched_tokens=rank.max_batched_tokens,
        gpu_blocks=rank.gpu_blocks,
        tie_break=deployment.router.tie_break,
        stream=lambda purpose: kernel.stream(f"{name}:{purpose}"),
    )
    return RouterState(pool, make_policy(deployment.router.policy, deployment.router.options, policy_class))


def _is_shared(host: HostTierConfig | None) -> bool:
    return host is not None and host.scope is HostScope.CLUSTER_SHARED


def _block_bytes(config: PoolConfig) -> int:
    return config.rank.block_size_tokens * (config.rank.kv_bytes_per_token or 0)


def _shared_pool(config: PoolConfig, numbering: BlockNumbers) -> HostPool:
    host: Any = config.rank.host
    links = FairLinks(
        bytes_per_ms(host.shared_d2h_gb_per_s), bytes_per_ms(host.shared_h2d_gb_per_s), _SHARE_RULES[host.sharing]
    )
    return HostPool(SHARED_POOL, host.capacity_blocks, _block_bytes(config), links, shared=True, numbering=numbering)


def _worker(
    name: str,
    worker: int,
    config: PoolConfig,
    first_client: int,
    host_pools: dict[str, HostPool],
    numbering: BlockNumbers,
    coordinator: str | None,
    *,
    watched: bool,
    pass_times: PassTimes | None,
) -> workers.WorkerActor:
    host = config.rank.host
    places = []
    for dp_rank in range(config.dp_size):
        own_pool = None
        if host is not None and not _is_shared(host):
            pool_name = private_pool_name(name, dp_rank)
            own_pool = HostPool(
                pool_name,
                host.capacity_blocks,
                _block_bytes(config),
                FifoLanes(),
                shared=False,
                numbering=numbering,
            )
            host_pools[pool_name] = own_pool
        rank = Rank(config.rank, config.role, first_client + dp_rank, pass_times, numbering)
        places.append(RankPlace(worker, config.role.value, dp_rank, rank, own_pool))
    link = None
    if host is not None:
        link = Link(
            d2h_bytes_per_ms=bytes_per_ms(host.d2h_gb_per_s),
            h2d_bytes_per_ms=bytes_per_ms(host.h2d_gb_per_s),
            latency_ms=host.latency_to_first_byte_ms,
        )
    return workers.WorkerActor(
        name=name,
        worker=worker,
        role=config.role.value,
        places=places,
        shared_pool=SHARED_POOL if _is_shared(host) else None,
        link=link,
        coordinator=coordinator,
        watched=watched,
    )
