"""What a deployment is made of, as plain values.

Owns: the vocabulary of configuration inside the simulation. Refuses to know: where the values come from; checks that
concern users (types, ranges, places in files) are made in ``g2sim.scenarios`` before one of these is built.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import attrs


class WorkerRole(enum.StrEnum):
    """What a pool of workers does. The values are the ones that reports and scenario files use."""

    AGGREGATED = "aggregated"
    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def pool_name(self) -> str:
        """Short name of the pool in admission and routing histories."""
        return "agg" if self is WorkerRole.AGGREGATED else self.value


class PreemptionMode(enum.StrEnum):
    """Which running request gives way when blocks run out: the newest (lifo) or the oldest (fifo)."""

    LIFO = "lifo"
    FIFO = "fifo"


class HostScope(enum.StrEnum):
    """Whose a host tier is: each data-parallel rank's own, or one pool for the whole deployment."""

    DP_RANK_LOCAL = "dp_rank_local"
    CLUSTER_SHARED = "cluster_shared"


class Sharing(enum.StrEnum):
    """How concurrent transfers divide the bandwidth of a shared pool."""

    MAX_MIN = "max_min"
    EQUAL_SHARE = "equal_share"


@attrs.frozen(kw_only=True)
class FixedTiming:
    """Passes of constant length: one duration for the prefill part, one for the decode part [ms]."""

    prefill_ms: float
    decode_ms: float


@attrs.frozen(kw_only=True)
class PolynomialTiming:
    """The reference's built-in polynomial pass times; it has no parameters."""


@attrs.frozen(kw_only=True)
class ExternalTiming:
    """Pass times from outside the domain. Subclasses are plain values that say which; a rank is handed what answers
    (``g2sim.actors.worker.timing.PassTimes``).
    """


Timing = FixedTiming | PolynomialTiming | ExternalTiming


@attrs.frozen(kw_only=True)
class HostTierConfig:
    """The host-memory tier (G2) of a role.

    Attributes:
        capacity_blocks: blocks the tier holds; per rank when private, of the whole deployment when shared.
        d2h_gb_per_s, h2d_gb_per_s: bandwidth of one rank's own link [decimal GB/s], 0 = unlimited.
        shared_d2h_gb_per_s, shared_h2d_gb_per_s: bandwidth of the shared pool, 0 = unlimited; no meaning when private.
        latency_to_first_byte_ms: delay before a transfer's first byte [ms].
        kv_layout_id: name of the KV layout; roles that share a pool must agree on it.
        sharing: how concurrent transfers divide the pool's bandwidth; no meaning when private.
    """

    scope: HostScope
    capacity_blocks: int
    d2h_gb_per_s: float = 32.0
    h2d_gb_per_s: float = 32.0
    shared_d2h_gb_per_s: float = 80.0
    shared_h2d_gb_per_s: float = 80.0
    latency_to_first_byte_ms: float = 0.0
    kv_layout_id: str | None = None
    sharing: Sharing = Sharing.MAX_MIN


class TransferTiming(enum.StrEnum):
    """What a prefill/decode hand-off is charged for: the whole prompt, or the blocks the destination lacks."""

    FULL_PROMPT = "full_prompt"
    DESTINATION_MISSING = "destination_missing"


@attrs.frozen(kw_only=True)
class RankConfig:
    """One scheduler with its own GPU KV cache (G1). ``None`` limits mean "no limit"."""

    gpu_blocks: int
    block_size_tokens: int
    max_model_len_tokens: int | None = None
    max_seqs: int | None = 256
    max_batched_tokens: int | None = 8192
    prefix_caching: bool = True
    chunked_prefill: bool = True
    preemption: PreemptionMode = PreemptionMode.LIFO
    speedup_ratio: float = 1.0
    decode_speedup_ratio: float = 1.0
    timing: Timing = PolynomialTiming()
    kv_bytes_per_token: int | None = None
    host: HostTierConfig | None = None

    def answer_tokens(self, prompt_tokens: int, output_tokens: int) -> int:
        """Tokens that a completed request has generated, of the ``output_tokens`` that were asked for."""
        if self.max_model_len_tokens is None:
            return output_tokens
        return max(0, min(output_tokens, self.max_model_len_tokens - prompt_tokens))

    def refusal(self, prompt_tokens: int) -> str | None:
        """Why a rank can never run a prompt, which then ends as "rejected"; None if it can."""
        limit = self.max_model_len_tokens
        if limit is not None and prompt_tokens >= limit:
            return f"the model's context has {limit} tokens, and the answer needs one of them"
        blocks = -(-prompt_tokens // self.block_size_tokens)
        if blocks > self.gpu_blocks:
            return f"its prompt has {blocks} blocks, and the G1 of a rank has {self.gpu_blocks}"
        return None


@attrs.frozen(kw_only=True)
class PoolConfig:
    """Workers of one role: ``workers`` of them, each with ``dp_size`` ranks and one clock."""

    role: WorkerRole
    workers: int
    rank: RankConfig
    dp_size: int = 1
    tensor_parallel_size: int = 1

    @property
    def gpus_per_worker(self) -> int:
        return self.dp_size * self.tensor_parallel_size


@attrs.frozen(kw_only=True)
class HandoffConfig:
    """Prefill/decode hand-off: bytes moved per token and the link's rate; no bandwidth means no delay."""

    bytes_per_token: int | None = None
    gb_per_s: float | None = None
    timing: TransferTiming = TransferTiming.FULL_PROMPT


@attrs.frozen(kw_only=True)
class SlaConfig:
    """Limits that a request must keep to count as good [ms]; either the first two or the last."""

    ttft_ms: float | None = None
    itl_ms: float | None = None
    e2e_ms: float | None = None


class TieBreak(enum.StrEnum):
    """Which of several equally good ranks a router takes: the lowest (worker, rank), or any, by its random stream."""

    LOWEST = "lowest"
    RANDOM = "random"


@attrs.frozen(kw_only=True)
class RouterConfig:
    """How requests are placed; each pool has routers of its own.

    Attributes:
        policy: name of the placement policy.
        kv_event_lag_ms: KV events reach a router this much later [ms].
        replicas: routers of each pool; requests are dealt to them in rotation.
        load_sync_ms: a replica hears of the others' requests this much later [ms]; None never.
        options: the policy's options that were given.
    """

    policy: str = "round_robin"
    kv_event_lag_ms: float = 0.0
    replicas: int = 1
    load_sync_ms: float | None = None
    tie_break: TieBreak = TieBreak.LOWEST
    options: Mapping[str, Any] = attrs.field(factory=dict, hash=False)


@attrs.frozen(kw_only=True)
class DeploymentConfig:
    """A whole deployment: one aggregated pool, or a prefill and a decode pool."""

    pools: tuple[PoolConfig, ...]
    router: RouterConfig = RouterConfig()
    handoff: HandoffConfig = HandoffConfig()
    sla: SlaConfig | None = None
    max_virtual_time_ms: float | None = None

    @property
    def block_size_tokens(self) -> int:
        return self.pools[0].rank.block_size_tokens

    @property
    def disaggregated(self) -> bool:
        return self.pools[0].role is not WorkerRole.AGGREGATED
