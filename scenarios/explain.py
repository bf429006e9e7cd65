"""Why a request went where it went, and what came of it: a fold of the event log for one request.

Owns: which events tell of a request, and how what a router believed to be cached is held against what was there.
Refuses to know: files but the log, and how it is shown.

The hashes of what a router believed in are found by walking from ``PlacementWeighed.overlap_hash`` to its parents in
the KV events before it. The truth is the same events without the router's lag. A pass makes room at its start and
publishes that at its end, so what an admission met is known when its pass has ended.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from g2sim.actors.config import WorkerRole
from g2sim.actors.handoff.events import (
    DestinationActivated,
    DestinationReserved,
    HandoffFailed,
    SourceHeld,
    SourceReleased,
    TransferStarted,
)
from g2sim.actors.host_pool.events import LoadFinished, LoadQueued
from g2sim.actors.kv.blocks import reusable_blocks
from g2sim.actors.kv.events import BlocksCleared, BlocksRemoved, BlocksStored, Tier
from g2sim.actors.membership.events import RequestLost, WorkerCrashed
from g2sim.actors.rounding import add_up
from g2sim.actors.router.dynamo import SAVINGS, DynamoKv
from g2sim.actors.router.events import PlacementWeighed, RequestPlaced, RequestRefused, RequestWaits
from g2sim.actors.traffic.events import RequestArrived
from g2sim.actors.traffic.request import RequestStatus
from g2sim.actors.worker.events import PassEnded, RequestAdmitted, RequestEnded, RequestPreempted, RequestQueued
from g2sim.bus.errors import LogDamaged
from g2sim.bus.events import Record
from g2sim.scenarios import events as _events_of_runs  # noqa: F401  (a reader knows the events that are imported)
from g2sim.scenarios.request_names import find_requests
from g2sim.scenarios.request_rows import POOL_OF_ROLE
from g2sim.scenarios.run_log import open_run
from g2sim.scenarios.schema import Scenario

SCHEMA = "g2sim.explain/1"

COST_UNITS = {DynamoKv.name: "blocks"}
"""Policy -> unit of its costs; other policies count in units of their own."""

_ROLE_OF_POOL = {pool: role for role, pool in POOL_OF_ROLE.items()}
_Rank = tuple[str, int, int]
"""Role, worker, dp rank."""


@attrs.define(slots=True)
class Decision:
    """One placement of the request.

    Attributes:
        waited_from_ms: when it began to wait in the router, None if it did not.
        placed_ms: when it was placed or refused, None if the log ends before.
        weighed: the policy's account, None from a policy that does not weigh.
        placed: where it went, None if it was refused.
    """

    pool: str
    waited_from_ms: float | None = None
    placed_ms: float | None = None
    weighed: PlacementWeighed | None = None
    placed: RequestPlaced | None = None
    refused: str | None = None


@attrs.frozen(slots=True)
class Step:
    """Something that happened to the request."""

    time_ms: float
    what: str


@attrs.frozen(kw_only=True, slots=True)
class Reuse:
    """What the router reported of the chosen rank's caches, and what the first admission there found.

    Attributes:
        device_blocks, host_blocks: as the router believed.
        g1_tokens, host_tokens, computed_tokens: how the prompt came about; a rank without host tier has no host_tokens.
        reasons: why less, or more, was found than believed.
    """

    pool: str
    device_blocks: int
    host_blocks: int
    g1_tokens: int
    host_tokens: int | None
    computed_tokens: int
    reasons: tuple[str, ...]


@attrs.define(slots=True)
class Explanation:
    """What a log says of one request. ``finished``: its end is in the log."""

    arrival: RequestArrived
    block_size_tokens: int
    policy: str
    tie_break: str
    lag_ms: float
    decisions: list[Decision] = attrs.Factory(list)
    steps: list[Step] = attrs.Factory(list)
    reuse: list[Reuse] = attrs.Factory(list)
    finished: bool = False

    def plain(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {"schema": SCHEMA, **attrs.asdict(self)}


def explain_request(path: Path, wanted: str) -> tuple[Explanation, LogDamaged | None]:
    """Explain one request of a run.

    Args:
        path: the log, or the run folder that holds it.
        wanted: the request, by a word that ``find_requests`` takes.
    Returns: the explanation, and why the log could not be read to its end (None if it could).
    Raises: ConfigError if there is no log or no such request; LogDamaged if not even its header can be read.
    """
    damage: LogDamaged | None = None
    (number,) = find_requests(path, [wanted], "REQUEST")
    with open_run(path) as reader:
        scenario = Scenario.of_log(reader)
        fold = _ExplainFold(scenario, number)
        try:
            for record in reader:
                fold.apply(record)
        except LogDamaged as error:
            damage = error
    return fold.finish(), damage


def cost_terms(weighed: PlacementWeighed) -> tuple[str, ...]:
    """The parts that add up to every candidate's cost; none if there are none that do."""
    columns = dict(zip(weighed.part_names, weighed.parts, strict=True))
    without_savings = tuple(name for name in columns if name not in SAVINGS)
    for terms in (without_savings, weighed.part_names):
        sums = [add_up(row) for row in zip(*(columns[name] for name in terms), strict=True)]
        if len(sums) == len(weighed.costs) and all(map(math.isclose, sums, weighed.costs)):
            return terms
    return ()


@attrs.define(slots=True)
class _Tier:
    """What one tier of one rank holds, and when blocks left it last [ms]."""

    resident: set[int] = attrs.Factory(set)
    left_ms: dict[int, float] = attrs.Factory(dict)

    def leave(self, blocks: Sequence[int], time_ms: float) -> None:
        self.resident.difference_update(blocks)
        self.left_ms.update(dict.fromkeys(blocks, time_ms))


@attrs.define(slots=True)
class _Look:
    """A first admission: what its rank has found, and what of the believed blocks can have been there."""

    pool: str
    rank: _Rank
    reused_tokens: int
    host_tokens: int | None
    held: dict[str, set[int]]


class _ExplainFold:
    """Takes the records of a log in order; see the module's text."""

    def __init__(self, scenario: Scenario, number: int) -> None:
        self._scenario = scenario
        self._number = number
        self._found: Explanation | None = None
        self._parents: dict[int, int | None] = {}
        self._tiers: dict[tuple[_Rank, str], _Tier] = {}
        self._loads: dict[tuple[str, int], int] = {}
        # Pool -> believed hashes, how many of them were of use, why the next was not.
        self._believed: dict[str, tuple[list[int], int, str]] = {}
        self._looks: list[_Look] = []
        self._tokens = 0
        self._handlers: dict[type[Any], Callable[[float, Any], None]] = {
            RequestArrived: self._arrived,
            BlocksStored: self._stored,
            BlocksRemoved: self._removed,
            BlocksCleared: self._cleared,
            WorkerCrashed: self._crashed,
            LoadFinished: self._load_finished,
            PassEnded: self._pass_ended,
        }
        self._own: dict[type[Any], Callable[[float, Any], str | None]] = {
            PlacementWeighed: self._weighed,
            RequestPlaced: self._placed,
            RequestWaits: self._waits,
            RequestRefused: self._refused,
            RequestQueued: lambda _, event: f"queued on {_name(event)}",
            LoadQueued: self._load_queued,
            RequestAdmitted: self._admitted,
            RequestPreempted: lambda _, event: f"preempted on {_name(event)}: its blocks there are given up",
            SourceHeld: lambda _, event: f"prompt computed; {_name(event)} holds it for the hand-off",
            DestinationReserved: lambda _, event: f"{_name(event)} reserved, {event.fresh_blocks} blocks to be moved",
            TransferStarted: lambda _, event: f"transfer of {event.tokens} tokens, until {event.end_ms:.3f} ms",
            DestinationActivated: lambda _, event: f"KV arrived on {_name(event)}",
            SourceReleased: lambda _, event: f"{_name(event)} gave the prompt's blocks back",
            HandoffFailed: lambda _, event: f"hand-off to {_name(event)} failed: {event.reason}",
            RequestLost: lambda _, event: (
                f"lost: {_name(event)} had crashed" + ("; it is placed anew" if event.resubmitted else "")
            ),
            RequestEnded: self._ended,
        }

    def apply(self, record: Record) -> None:
        event, time_ms = record.event, record.time_ms
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(time_ms, event)
        elif self._found is not None and getattr(event, "request", None) == self._number:
            own = self._own.get(type(event))
            what = None if own is None else own(time_ms, event)
            if what is not None:
                self._found.steps.append(Step(time_ms, what))

    def finish(self) -> Explanation:
        while self._looks:
            self._settle(self._looks.pop(0))
        return self._explained

    # -- the request

    def _arrived(self, _: float, event: RequestArrived) -> None:
        if event.request != self._number or self._found is not None:
            return
        deployment = self._scenario.deployment
        self._found = Explanation(
            arrival=event,
            block_size_tokens=deployment.block_size_tokens,
            policy=deployment.router.policy,
            tie_break=deployment.router.tie_break.value,
            lag_ms=deployment.router.kv_event_lag_ms,
        )

    def _decision(self, pool: str) -> Decision:
        decisions = self._explained.decisions
        if not decisions or decisions[-1].pool != pool or decisions[-1].placed_ms is not None:
            decisions.append(Decision(pool))
        return decisions[-1]

    @property
    def _explained(self) -> Explanation:
        if self._found is None:
            raise AssertionError("handlers of the request run after its arrival")
        return self._found

    def _waits(self, time_ms: float, event: RequestWaits) -> str:
        self._decision(event.pool).waited_from_ms = time_ms
        return f"waits in the {event.pool} router"

    def _weighed(self, _: float, event: PlacementWeighed) -> None:
        self._decision(event.pool).weighed = event

    def _placed(self, time_ms: float, event: RequestPlaced) -> str:
        decision = self._decision(event.pool)
        decision.placed_ms, decision.placed = time_ms, event
        weighed = decision.weighed
        hashes: list[int] = []
        block = None if weighed is None else weighed.overlap_hash
        while block is not None:
            hashes.append(block)
            block = self._parents.get(block)
        hashes.reverse()
        rank = (_ROLE_OF_POOL[event.pool], event.worker, event.dp_rank)
        held: dict[str, set[int]] = {tier: self._held(rank, tier).resident for tier in Tier}
        usable = _usable(held, hashes)
        gone = self._gone(rank, held, hashes, usable) if usable < len(hashes) else ""
        self._believed[event.pool] = hashes, usable, gone
        return f"placed by the {event.pool} router on worker {event.worker} rank {event.dp_rank}"

    def _refused(self, time_ms: float, event: RequestRefused) -> str:
        decision = self._decision(event.pool)
        decision.placed_ms, decision.refused = time_ms, event.reason
        return f"refused by the {event.pool} router: {event.reason}"

    def _load_queued(self, _: float, event: LoadQueued) -> str:
        self._loads[event.pool, event.transfer] = len(event.block_hashes)
        return f"restore of {len(event.block_hashes)} blocks from {event.pool} begins"

    def _load_finished(self, time_ms: float, event: LoadFinished) -> None:
        blocks = self._loads.pop((event.pool, event.transfer), None)
        if blocks is not None:
            self._explained.steps.append(Step(time_ms, f"restore of {blocks} blocks is complete"))

    def _admitted(self, _: float, event: RequestAdmitted) -> str:
        pool, rank = POOL_OF_ROLE[event.role], (event.role, event.worker, event.dp_rank)
        if event.readmission:
            return f"admitted again on {_name(event)}: {event.reused_tokens} known tokens found"
        host = event.host_tokens
        g1 = event.reused_tokens - (host or 0)
        computed = self._explained.arrival.input_tokens - event.reused_tokens
        if event.role != WorkerRole.DECODE:
            held: dict[str, set[int]] = {tier: set(self._held(rank, tier).resident) for tier in Tier}
            self._looks.append(_Look(pool, rank, event.reused_tokens, host, held))
        restored = "" if host is None else f", {host} restored from G2"
        return f"admitted on {_name(event)}: {g1} prompt tokens from G1{restored}, {computed} to compute"

    def _decision_of(self, pool: str) -> Decision:
        return next(one for one in reversed(self._explained.decisions) if one.pool == pool)

    def _settle(self, look: _Look) -> None:
        weighed = self._decision_of(look.pool).weighed
        chosen = 0 if weighed is None else weighed.chosen
        self._explained.reuse.append(
            Reuse(
                pool=look.pool,
                device_blocks=0 if weighed is None else weighed.device_blocks[chosen],
                host_blocks=0 if weighed is None else weighed.host_blocks[chosen],
                g1_tokens=look.reused_tokens - (look.host_tokens or 0),
                host_tokens=look.host_tokens,
                computed_tokens=self._explained.arrival.input_tokens - look.reused_tokens,
                reasons=() if weighed is None else tuple(self._reasons(look)),
            )
        )

    def _pass_ended(self, time_ms: float, event: PassEnded) -> None:
        while self._looks and self._looks[0].rank == (event.role, event.worker, event.dp_rank):
            self._settle(self._looks.pop(0))
        if self._found is None or event.role == WorkerRole.PREFILL or self._number not in event.emitted:
            return
        self._tokens += 1
        if self._tokens == 1:
            self._found.steps.append(Step(time_ms, "first token"))

    def _ended(self, _: float, event: RequestEnded) -> str:
        self._explained.finished = True
        return f"{event.status} with {self._tokens} tokens{self._why_rejected(event)}"

    def _why_rejected(self, event: RequestEnded) -> str:
        if event.status != RequestStatus.REJECTED or event.worker is None:
            return ""
        rank = next(pool.rank for pool in self._scenario.deployment.pools if pool.role.value == event.role)
        refusal = rank.refusal(self._explained.arrival.input_tokens)
        return "" if refusal is None else f": {refusal}"

    # -- what is where

    def _held(self, rank: _Rank, tier: str) -> _Tier:
        return self._tiers.setdefault((rank, tier), _Tier())

    def _stored(self, _: float, event: BlocksStored) -> None:
        parent = event.parent_hash
        for block in event.block_hashes:
            self._parents[block] = parent
            parent = block
        self._held(_rank_of(event), event.tier).resident.update(event.block_hashes)

    def _removed(self, time_ms: float, event: BlocksRemoved) -> None:
        self._leave(event, event.tier, event.block_hashes, time_ms)

    def _cleared(self, time_ms: float, event: BlocksCleared) -> None:
        for tier in Tier if event.tier is None else (event.tier,):
            self._leave(event, tier, tuple(self._held(_rank_of(event), tier).resident), time_ms)

    def _crashed(self, time_ms: float, event: WorkerCrashed) -> None:
        crashed = event.role, event.worker
        for look in [look for look in self._looks if look.rank[:2] == crashed]:
            self._looks.remove(look)
            self._settle(look)
        for (rank, _), held in self._tiers.items():
            if rank[:2] == crashed:
                held.left_ms.update(dict.fromkeys(held.resident, time_ms))
                held.resident.clear()

    def _leave(self, event: BlocksRemoved | BlocksCleared, tier: str, blocks: Sequence[int], time_ms: float) -> None:
        rank = _rank_of(event)
        held = self._held(rank, tier)
        held.resident.difference_update(blocks)
        held.left_ms.update(dict.fromkeys(blocks, time_ms))
        for look in self._looks:
            if look.rank == rank:
                look.held[tier].difference_update(blocks)

    def _reasons(self, look: _Look) -> list[str]:
        """Why the rank found less, or more, than its router believed."""
        hashes, at_placement, gone = self._believed[look.pool]
        block_size = self._explained.block_size_tokens
        found = look.reused_tokens // block_size
        most = reusable_blocks(self._explained.arrival.input_tokens, block_size)
        if found > len(hashes):
            more = found - len(hashes)
            return [f"more than believed: {more} blocks came while it waited, or the router had not heard of them"]
        if found == len(hashes):
            return []
        reasons = []
        struck = "" if self._scenario.faults is None else ", or not at all: the scenario has faults"
        if at_placement < len(hashes):
            reasons.append(
                f"stale event: {len(hashes) - at_placement} of {len(hashes)} blocks were of no use at the placement "
                f"already, from block {at_placement} on, {gone}; "
                f"KV events reach the router {self._explained.lag_ms:g} ms late{struck}"
            )
        held = min(at_placement, _usable(look.held, hashes))
        if held < at_placement:
            reasons.append(
                f"eviction: {at_placement - held} of {len(hashes)} blocks were of no use any more at the admission, "
                f"from block {held} on, {self._gone(look.rank, look.held, hashes, held)}"
            )
        if found == most < held:
            reasons.append("a prompt's last token is never taken from a cache: its block is computed")
        elif found < held:
            reasons.append(f"{held - found} blocks were there and were not used")
        return reasons

    def _gone(self, rank: _Rank, held: Mapping[str, set[int]], hashes: Sequence[int], position: int) -> str:
        """Why the block at a position is of no use; ``held`` is what each tier holds."""
        gap = next((place for place, block in enumerate(hashes) if block not in held[Tier.DEVICE]), position)
        told = [f"which lies behind a gap in {Tier.DEVICE} at block {gap}"] if gap < position else []
        for tier in Tier:
            left_ms = self._held(rank, tier).left_ms.get(hashes[position])
            if hashes[position] not in held[tier] and left_ms is not None:
                told.append(f"which left {tier} at {left_ms:.3f} ms")
        return " and ".join(told) or "which never came"


def _name(event: Any) -> str:
    return f"{event.role}-{event.worker}/{event.dp_rank}"


def _rank_of(event: Any) -> _Rank:
    return event.role, event.worker, event.dp_rank


def _usable(held: Mapping[str, set[int]], hashes: Sequence[int]) -> int:
    """How many of the hashes, from the first on, a rank could use: a run on the device, then one in host memory."""
    depth = 0
    for tier in Tier:
        while depth < len(hashes) and hashes[depth] in held[tier]:
            depth += 1
    return depth
