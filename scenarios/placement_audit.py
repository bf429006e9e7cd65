"""How good placements were, against what was there: three hit rates and the regret, while a run goes on.

Owns: their definitions. Refuses to know: policies, and what routers believe: KV events count when they are published,
without any router's lag.
"""

from __future__ import annotations

from typing import Any

import attrs

from g2sim.actors.config import DeploymentConfig, TieBreak, WorkerRole
from g2sim.actors.kv.blocks import BlockChain, reusable_blocks
from g2sim.actors.kv.events import BlocksCleared, BlocksRemoved, BlocksStored
from g2sim.actors.membership.events import WorkerCrashed, WorkerRestarted
from g2sim.actors.router.events import RequestPlaced
from g2sim.actors.router.policy import Placement
from g2sim.actors.router.pool import Pool, WorkerState
from g2sim.actors.worker.events import RequestAdmitted
from g2sim.actors.worker.sequence import RankRequest
from g2sim.bus.events import Record


@attrs.define(slots=True)
class _Prompt:
    tokens: int
    chain: BlockChain
    unlimited_blocks: int


class PlacementAudit:
    """Watches one run; ``on_request`` and ``on_record`` are for ``run_scenario``.

    Sums are over requests that a rank admitted for their prompt, in prompt tokens:

    - ``unlimited``: the longest prefix that a prompt shares with those that arrived before it, as if all caches were
      one and held everything; no placement matters.
    - ``best``: the longest prefix that any rank of the pool could have used when the request was placed, its device and
      the host memory after it.
    - ``real``: what the first admission found. More than ``best`` when blocks came while the request waited.

    At most all blocks but the one with the last token count, as this one is always computed. ``regret_blocks`` is best
    minus what the chosen rank could have used at the placement.
    """

    def __init__(self, deployment: DeploymentConfig) -> None:
        config = next(pool for pool in deployment.pools if pool.role is not WorkerRole.DECODE)
        self._role = config.role
        self._block_size = deployment.block_size_tokens
        self._pool = Pool(
            role=config.role,
            workers=config.workers,
            dp_size=config.dp_size,
            block_size_tokens=self._block_size,
            max_batched_tokens=None,
            gpu_blocks=config.rank.gpu_blocks,
            tie_break=TieBreak.LOWEST,
            stream=_no_stream,
        )
        self._seen: set[int] = set()
        self._arrived: dict[int, _Prompt] = {}
        self._placed: dict[int, tuple[int, int]] = {}  # request -> usable blocks: (best, at the chosen rank)
        self._tokens = self._real_tokens = self._best_blocks = self._unlimited_blocks = 0
        self._regret_blocks = self._admitted = 0

    def on_request(self, request: RankRequest) -> None:
        if request.request in self._arrived:  # placed anew after a crash, before any rank admitted it
            return
        hashes = request.chain.sequence_hashes
        shared = next((depth for depth, block in enumerate(hashes) if block not in self._seen), len(hashes))
        self._seen.update(hashes)
        tokens = request.prompt.length
        self._arrived[request.request] = _Prompt(tokens, request.chain, self._usable(shared, tokens))

    def on_record(self, record: Record) -> None:
        event = record.event
        kind = type(event)
        if kind is BlocksStored or kind is BlocksRemoved or kind is BlocksCleared:
            if event.role == self._role:
                self._pool.apply(event)
        elif kind is WorkerCrashed or kind is WorkerRestarted:
            if event.role == self._role:
                state = WorkerState.REMOVED if kind is WorkerCrashed else WorkerState.READY
                self._pool.set_state(event.worker, state)
        elif kind is RequestPlaced:
            if event.pool == self._role.pool_name:
                self._place(event)
        elif kind is RequestAdmitted and event.role == self._role and not event.readmission:
            self._admit(event)

    def figures(self) -> dict[str, float]:
        """The rates per prompt token, and the mean regret [blocks] a request; zeros for a run without requests."""
        tokens, size = max(1, self._tokens), self._block_size
        return {
            "hit_rate_unlimited": self._unlimited_blocks * size / tokens,
            "hit_rate_best": self._best_blocks * size / tokens,
            "hit_rate_real": self._real_tokens / tokens,
            "regret_blocks": self._regret_blocks / max(1, self._admitted),
        }

    def _usable(self, blocks: int, tokens: int) -> int:
        return min(blocks, reusable_blocks(tokens, self._block_size))

    def _place(self, event: RequestPlaced) -> None:
        prompt = self._arrived[event.request]
        overlap = self._pool.overlap_of(prompt.chain)
        usable = [
            self._usable(device + host, prompt.tokens)
            for device, host in zip(overlap.device, overlap.host, strict=True)
        ]
        self._placed[event.request] = max(usable), usable[self._pool.place_of(Placement(event.worker, event.dp_rank))]

    def _admit(self, event: RequestAdmitted) -> None:
        prompt, (best, chosen) = self._arrived.pop(event.request), self._placed.pop(event.request)
        self._admitted += 1
        self._tokens += prompt.tokens
        self._real_tokens += event.reused_tokens
        self._unlimited_blocks += prompt.unlimited_blocks
        self._best_blocks += best
        self._regret_blocks += best - chosen


def _no_stream(purpose: str) -> Any:
    raise AssertionError(f"an audit draws nothing, but was asked for {purpose}")
