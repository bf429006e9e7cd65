"""A router's view of its pool of workers: topology, where blocks are believed to be, load, and how ties are broken.

Owns: the index, the load tracker and who is ready. A policy reads it; only the router (``state``) changes it.
Refuses to know: policies, and the bus.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from g2sim.actors.config import TieBreak, WorkerRole
from g2sim.actors.kv.blocks import BlockChain
from g2sim.actors.kv.events import BlocksCleared, BlocksRemoved, BlocksStored, Tier
from g2sim.actors.router.index import DeviceIndex, HostIndex, Overlap, bits
from g2sim.actors.router.loads import LoadTracker
from g2sim.actors.router.policy import Candidate, KvEvent, Placement, RoutedRequest
from g2sim.bus.streams import RandomStream

_MAX_NOTED = 4096
"""KV events that wait to be applied; a bound on memory."""


class WorkerState(enum.Enum):
    """READY takes requests, DRAINING finishes what it has, REMOVED is gone."""

    READY = "ready"
    DRAINING = "draining"
    REMOVED = "removed"


class Pool:
    """See the module's text. A rank's place is worker * dp_size + dp_rank.

    Args:
        role: what the workers do.
        workers: how many there are.
        dp_size: ranks of each.
        block_size_tokens: tokens per block.
        max_batched_tokens: token budget of a rank's pass, None without limit.
        gpu_blocks: device blocks of a rank.
        tie_break: which of several equally good candidates is taken.
        stream: gives the router's random stream for a purpose, as in ``stream("tie")``.
    """

    def __init__(
        self,
        *,
        role: WorkerRole,
        workers: int,
        dp_size: int,
        block_size_tokens: int,
        max_batched_tokens: int | None,
        gpu_blocks: int,
        tie_break: TieBreak,
        stream: Callable[[str], RandomStream],
    ) -> None:
        self.role = role
        self.workers = workers
        self.dp_size = dp_size
        self.block_size_tokens = block_size_tokens
        self.max_batched_tokens = max_batched_tokens
        self.gpu_blocks = gpu_blocks
        self.tie_break = tie_break
        self.stream = stream
        self.places = tuple(Placement(*divmod(place, dp_size)) for place in range(workers * dp_size))
        self.loads = LoadTracker(len(self.places))
        self._device = DeviceIndex(len(self.places))
        self._host = HostIndex(len(self.places))
        self._noted: list[KvEvent] = []
        self._states = [WorkerState.READY] * workers

    def blank(self) -> Pool:
        """A view of the same workers that knows nothing yet."""
        return Pool(
            role=self.role,
            workers=self.workers,
            dp_size=self.dp_size,
            block_size_tokens=self.block_size_tokens,
            max_batched_tokens=self.max_batched_tokens,
            gpu_blocks=self.gpu_blocks,
            tie_break=self.tie_break,
            stream=self.stream,
        )

    # -- for policies

    def ready_places(self) -> list[int]:
        """Places of workers that take requests, lowest first."""
        if WorkerState.DRAINING not in self._states and WorkerState.REMOVED not in self._states:
            return list(range(len(self.places)))
        return [place for place in range(len(self.places)) if self.is_ready(place // self.dp_size)]

    @property
    def has_ready(self) -> bool:
        """Whether any worker takes requests."""
        return WorkerState.READY in self._states

    def is_ready(self, worker: int) -> bool:
        """Whether a worker takes requests."""
        return self._states[worker] is WorkerState.READY

    def place_of(self, placement: Placement) -> int:
        """A rank's position in lists of one entry a rank: worker * dp_size + dp_rank."""
        return placement.worker * self.dp_size + placement.dp_rank

    def overlap(self, request: RoutedRequest) -> Overlap:
        """Where the request's prompt is believed to be."""
        return self.overlap_of(request.chain)

    def overlap_of(self, chain: BlockChain) -> Overlap:
        """Where a chain of blocks is believed to be, from its first block on."""
        self._catch_up()
        hashes = chain.tokens_hashes
        fronts = self._device.fronts(hashes)
        overlap = Overlap([0] * len(self.places), [0] * len(self.places))
        for places, depth, _ in fronts:
            if depth:
                for place in bits(places):
                    overlap.device[place] = depth
        self._host.extend(fronts, hashes, overlap.host)
        return overlap

    def candidates(self, request: RoutedRequest, overlap: Overlap | None = None) -> list[Candidate]:
        """Every rank of a ready worker, by (worker, rank); ``overlap`` is what was found earlier, None looks now."""
        if overlap is None:
            overlap = self.overlap(request)
        return [self._candidate(request, overlap, place) for place in self.ready_places()]

    def candidate(self, request: RoutedRequest, placement: Placement) -> Candidate:
        """One rank."""
        return self._candidate(request, self.overlap(request), self.place_of(placement))

    def lowest(self, costs: Sequence[float]) -> tuple[int, int]:
        """Position of the lowest cost, and how many share it. Equal ones are decided as ``tie_break`` says."""
        best = min(costs)
        tied = costs.count(best)
        if tied == 1 or self.tie_break is TieBreak.LOWEST:
            return costs.index(best), tied
        equal = [position for position, cost in enumerate(costs) if cost == best]
        return equal[self.stream("tie").below(tied)], tied

    # -- for the router

    def apply(self, *events: KvEvent) -> None:
        """Take note of KV events of the pool's ranks. What contradicts the index is dropped, as Dynamo does."""
        self._noted.extend(events)
        if len(self._noted) > _MAX_NOTED:
            self._catch_up()

    def believed(self, place: int, tier: Tier) -> AbstractSet[int]:
        """Hashes of the blocks that a rank is believed to hold."""
        self._catch_up()
        return self._tier(tier).hashes(place)

    def set_state(self, worker: int, state: WorkerState) -> None:
        """A worker became ready, drains or is gone; what was known of one that is gone is forgotten."""
        self._states[worker] = state
        if state is WorkerState.REMOVED:
            self._catch_up()
            for dp_rank in range(self.dp_size):
                place = worker * self.dp_size + dp_rank
                self._device.clear(place)
                self._host.clear(place)
                self.loads.forget(place)

    def check(self) -> None:
        """Raises: InvariantViolation if a part contradicts itself."""
        self._catch_up()
        self._device.check()
        self._host.check()
        self.loads.check()

    def _catch_up(self) -> None:
        """Apply what was noted: device events one by one, host events as changes of all ranks that tell the same.

        Each rank's events stay in order. Those of different ranks do not depend on each other in the host tier, as
        block hashes follow from prefixes.
        """
        if not self._noted:
            return
        noted, self._noted = self._noted, []
        changes: list[tuple[KvEvent, int]] = []
        found: dict[Any, int] = {}
        last = [-1] * len(self.places)
        for event in noted:
            place = event.worker * self.dp_size + event.dp_rank
            if isinstance(event, BlocksCleared):
                if event.tier != Tier.HOST_PINNED:
                    self._device.clear(place)
                if event.tier == Tier.DEVICE:
                    continue
            elif event.tier == Tier.DEVICE:
                if isinstance(event, BlocksRemoved):
                    self._device.remove(place, event.block_hashes)
                elif _is_sane(event):
                    self._device.store(place, event.parent_hash, event.block_hashes, event.token_hashes)
                continue
            change = _identity(event)
            idx = found.get(change, -1)
            if idx > last[place]:
                changes[idx] = event, changes[idx][1] | 1 << place
            else:
                idx = found[change] = len(changes)
                changes.append((event, 1 << place))
            last[place] = idx
        for event, places in changes:
            if isinstance(event, BlocksStored):
                if _is_sane(event):
                    self._host.store_at(places, event.parent_hash, event.block_hashes, event.token_hashes)
            elif isinstance(event, BlocksRemoved):
                self._host.remove_at(places, event.block_hashes)
            else:
                for place in bits(places):
                    self._host.clear(place)

    def _tier(self, tier: str) -> DeviceIndex | HostIndex:
        return self._device if tier == Tier.DEVICE else self._host

    def _candidate(self, request: RoutedRequest, overlap: Overlap, place: int) -> Candidate:
        loads = self.loads
        return Candidate(
            self.places[place],
            overlap.device[place],
            overlap.host[place],
            loads.prefill_tokens[place],
            loads.blocks_with(place, request.chain.sequence_hashes),
            loads.requests[place],
        )


def _is_sane(run: BlocksStored) -> bool:
    """Whether no block of a run comes twice or is its own parent."""
    hashes = run.block_hashes
    return run.parent_hash not in hashes and len(set(hashes)) == len(hashes)


def _identity(event: KvEvent) -> Any:
    """Equal for events of the same change, of which the ranks of a shared pool tell in the same words."""
    if isinstance(event, BlocksStored):
        return event.parent_hash, id(event.block_hashes), id(event.token_hashes)
    return id(event.block_hashes) if isinstance(event, BlocksRemoved) else id(event)
