"""The placement rule of the KV router of NVIDIA Dynamo 1.6.1: cost, ties by temperature, and the queue.

Owns: the settings and what they mean. Refuses to know: who calls.

The order of floating-point operations is the reference's. Recordings: tests/oracle/router; probes of the wheel.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import attrs

from g2sim.actors.config import WorkerRole
from g2sim.actors.rounding import add_up
from g2sim.actors.router.index import Overlap
from g2sim.actors.router.policy import (
    Candidate,
    Place,
    Policy,
    Queue,
    Refuse,
    Release,
    RoutedRequest,
    Verdict,
    Weighing,
    is_finite,
)
from g2sim.actors.router.pool import Pool
from g2sim.bus.errors import ConfigError

NO_LIMIT = float(2**64 - 1)
"""Token budget of a rank without a limit, for the question whether it is busy."""

QUEUE_POLICIES = ("fcfs", "lcfs", "wspt")


def _option(default: Any, allowed: str, test: Any) -> Any:
    def check(_: object, field: attrs.Attribute[Any], value: Any) -> None:
        if not test(value):
            raise ConfigError(field.name, got=value, allowed=allowed)

    return attrs.field(default=default, validator=check)


def _amount(default: float | None) -> Any:
    if default is None:
        return _option(None, "a finite number, 0 or more, or null", lambda v: v is None or (is_finite(v) and v >= 0))
    return _option(default, "a finite number, 0 or more", lambda v: is_finite(v) and v >= 0)


def _weight(default: float) -> Any:
    return _option(default, "a number from 0 to 1", lambda v: is_finite(v) and 0 <= v <= 1)


def _switch(default: bool) -> Any:
    return _option(default, "true or false", lambda v: type(v) is bool)


def _fixed(default: Any) -> Any:
    """Something that an offline replay does not do: only the value that leaves it off is taken."""
    text = {True: "true", False: "false", None: "null"}.get(default, default)
    return _option(
        default, f"{text}; nothing else has a meaning here", lambda v: type(v) is type(default) and v == default
    )


@attrs.frozen(kw_only=True)
class KvSettings:
    """Settings by the names of ``KvRouterConfig``, with its defaults; see router.md, section 2.

    Attributes:
        overlap_score_weight: older name of prefill_load_scale, and wins over it; 0 also sets the credit to 0.
        overlap_score_credit, overlap_score_credit_decay, prefill_load_scale, decode_active_request_weight,
            host_cache_hit_weight, disk_cache_hit_weight: see ``weigh``. There is no disk tier.
        router_temperature: 0 takes the lowest cost, above it draws by softmax.
        router_track_active_blocks, router_track_prefill_tokens: whether these parts of the load count.
        router_assume_kv_reuse: a block that several requests have counts once.
        router_queue_threshold: a rank is busy with more pending prompt tokens than this share of a pass's budget, and
            requests wait while all are; null never.
        router_queue_policy: who waits least: fcfs, lcfs, wspt (the shortest uncached prompt).
    """

    overlap_score_weight: float | None = _amount(None)
    overlap_score_credit: float = _amount(1.0)
    overlap_score_credit_decay: float = _amount(0.0)
    prefill_load_scale: float = _amount(1.0)
    decode_active_request_weight: float = _amount(0.0)
    host_cache_hit_weight: float = _weight(0.75)
    disk_cache_hit_weight: float = _weight(0.25)
    router_temperature: float = _amount(0.0)
    router_track_active_blocks: bool = _switch(True)
    router_track_prefill_tokens: bool = _switch(True)
    router_assume_kv_reuse: bool = _switch(True)
    router_queue_threshold: float | None = _amount(None)
    router_queue_policy: str = _option("fcfs", ", ".join(QUEUE_POLICIES), lambda v: v in QUEUE_POLICIES)
    use_kv_events: bool = _fixed(True)
    router_ttl_secs: float = _fixed(120.0)
    router_approximate_cache_policy: str = _fixed("ttl")
    router_predicted_ttl_secs: float | None = _fixed(None)
    router_track_output_blocks: bool = _fixed(False)
    router_prefill_load_model: str = _fixed("none")
    router_policy_config: str | None = _fixed(None)
    router_prefill_policy: str | None = _fixed(None)
    router_decode_policy: str | None = _fixed(None)
    router_event_threads: int = _fixed(4)
    router_replica_sync: bool = _fixed(False)
    use_remote_indexer: bool = _fixed(False)
    serve_indexer: bool = _fixed(False)
    enable_session_prefix_index: bool = _fixed(False)
    shared_cache_multiplier: float | None = _fixed(None)
    shared_cache_type: str = _fixed("none")
    router_tracking_hash: str = _fixed("public-xxh3-v1")
    router_tracking_key_file: str | None = _fixed(None)
    router_tracking_key_id: str | None = _fixed(None)
    conditional_disagg_enabled: bool = _fixed(False)
    conditional_disagg_policy: str = _fixed("isl_bounding")
    conditional_disagg_eff_isl_threshold: int = _fixed(2048)
    conditional_disagg_eff_isl_ratio_threshold: float = _fixed(0.7)
    conditional_disagg_prefill_busy_threshold: float | None = _fixed(None)
    conditional_disagg_decode_busy_threshold: float | None = _fixed(None)

    @property
    def scale(self) -> float:
        """What multiplies the prefill part."""
        return self.prefill_load_scale if self.overlap_score_weight is None else self.overlap_score_weight

    @property
    def credit(self) -> float:
        """What a device block is worth."""
        return 0.0 if self.overlap_score_weight == 0.0 else self.overlap_score_credit

    def weighted_hit(self, candidate: Candidate) -> float:
        """Cached blocks of a rank; a device block counts 1 whatever the credit."""
        return (
            candidate.device_blocks
            + self.host_cache_hit_weight * candidate.host_blocks
            + self.disk_cache_hit_weight * candidate.disk_blocks
        )

    def for_role(self, role: WorkerRole) -> KvSettings:
        """The settings that Dynamo derives for one pool of a deployment."""
        if role is WorkerRole.PREFILL:
            return attrs.evolve(self, router_track_active_blocks=False)
        if role is WorkerRole.DECODE:
            return attrs.evolve(
                self,
                overlap_score_weight=None,
                prefill_load_scale=self.scale,
                overlap_score_credit=0.0,
                router_assume_kv_reuse=False,
                router_track_prefill_tokens=False,
            )
        return self


SAVINGS = ("hit", "credit")
"""Parts of the log's account that say what caches save: the cost has them in its prefill, and they are not added."""


@attrs.frozen(slots=True)
class Costs:
    """Costs in blocks, one entry a candidate; ``total`` = prefill + decode + requests, added in this order.

    Attributes:
        credit: what caches save, before it is taken off the prompt.
        prefill: prompt tokens to compute, those that wait there included, net of the credit.
        decode: blocks in use, with those of the request.
        requests: charge for requests in flight.
    """

    credit: list[float]
    prefill: list[float]
    decode: list[float]
    requests: list[float]
    total: list[float]


def weigh(
    settings: KvSettings,
    candidates: Sequence[Candidate],
    prompt_tokens: int,
    block_size_tokens: int,
    *,
    as_decode: bool = False,
) -> Costs:
    """What each candidate would cost.

    Args:
        as_decode: without prefill tracking take the credit off the decode part, as Dynamo's selection service does and
            its replay does not.
    """
    costs = Costs([], [], [], [], [])
    size = float(block_size_tokens)
    blocks = -(-prompt_tokens // block_size_tokens)
    least = min((one.prefill_tokens for one in candidates), default=0)
    for one in candidates:
        raw, decay = 0.0, 1.0
        if settings.router_track_prefill_tokens:
            raw = (one.prefill_tokens + prompt_tokens) / size
            excess = (one.prefill_tokens - least) / size / blocks
            decay = 1.0 / (1.0 + settings.overlap_score_credit_decay * excess)
        credit = 0.0
        if settings.credit:
            credit = (
                settings.credit * decay * one.device_blocks
                + settings.host_cache_hit_weight * one.host_blocks
                + settings.disk_cache_hit_weight * one.disk_blocks
            )
        decode = float(one.active_blocks) if settings.router_track_active_blocks else 0.0
        if as_decode and not settings.router_track_prefill_tokens:
            decode = max(0.0, decode - credit)
        costs.credit.append(credit)
        costs.prefill.append(settings.scale * max(0.0, raw - credit))
        costs.decode.append(decode)
        costs.requests.append(settings.decode_active_request_weight * one.active_requests)
        costs.total.append(costs.prefill[-1] + decode + costs.requests[-1])
    return costs


def softmax_position(costs: Sequence[float], temperature: float, draw: float) -> int:
    """Position drawn with weights exp(-normalised cost / temperature); ``draw`` is uniform in [0, 1)."""
    low, high = min(costs), max(costs)
    if low == high:
        weights = [1.0] * len(costs)
    else:
        weights = [math.exp(-((cost - low) / (high - low)) / temperature) for cost in costs]
    rest = draw * add_up(weights)
    for position, weight in enumerate(weights):
        rest -= weight
        if rest < 0.0:
            return position
    return len(costs) - 1


@attrs.frozen(slots=True)
class _Waiting:
    request: RoutedRequest
    overlap: Overlap


class DynamoKv(Policy):
    """The rule of Dynamo's KV router: its cost function, ties by temperature, and queue.

    Options are those of ``KvSettings``.
    """

    name = "dynamo_kv"

    def __init__(self, **options: Any) -> None:
        self.settings = KvSettings(**options)
        self._queue: list[tuple[float, int, _Waiting]] = []
        self._asked = 0

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        return attrs.asdict(KvSettings())

    def start(self, pool: Pool) -> None:
        super().start(pool)
        self.settings = self.settings.for_role(pool.role)
        self.shares_blocks = self.settings.router_assume_kv_reuse
        # The router of decode ranks gives no credit, and keeps no index.
        self.sees_blocks = pool.role is not WorkerRole.DECODE
        budget, threshold = pool.max_batched_tokens, self.settings.router_queue_threshold
        self._busy_above = math.inf if threshold is None else threshold * (NO_LIMIT if budget is None else budget)

    def place(self, request: RoutedRequest, now_ms: float) -> Verdict:
        waiting = _Waiting(request, self.pool.overlap(request))
        candidates = self._candidates(waiting)
        if self.settings.router_queue_threshold is not None and (self._queue or self._all_busy(candidates)):
            self._asked += 1
            heapq.heappush(self._queue, (self._rank(waiting, candidates, now_ms), self._asked, waiting))
            return Queue()
        return self._choose(waiting, candidates)

    def prefill_completed(self, request: int, now_ms: float) -> Iterable[Release]:
        return self._drain() if self._queue else ()

    def request_terminal(self, request: int, now_ms: float) -> Iterable[Release]:
        return self._drain() if self._queue else ()

    def worker_ready(self, worker: int, now_ms: float) -> Iterable[Release]:
        return self._drain()

    def worker_removed(self, worker: int, now_ms: float) -> Iterable[Release]:
        return self._drain()

    def withdraw(self, request: int, now_ms: float) -> Iterable[Release]:
        self._queue = [entry for entry in self._queue if entry[2].request.request != request]
        heapq.heapify(self._queue)
        return self._drain() if self._queue else ()

    def pending(self) -> Sequence[int]:
        return [waiting.request.request for _, _, waiting in self._queue]

    def prefill_tokens(self, request: RoutedRequest, candidate: Candidate) -> int:
        if not self.settings.router_track_prefill_tokens:
            return 0
        return max(0, request.prompt_tokens - self._cached_tokens(candidate))

    def reported_overlap(self, candidate: Candidate) -> int:
        return math.floor(self.settings.weighted_hit(candidate) + 0.5)

    # -- inside

    def _cached_tokens(self, candidate: Candidate) -> int:
        return math.floor(self.settings.weighted_hit(candidate) * self.pool.block_size_tokens + 0.5)

    def _candidates(self, waiting: _Waiting) -> list[Candidate]:
        every = self.pool.candidates(waiting.request, waiting.overlap)
        return [one for one in every if self.eligible(waiting.request, one)]

    def _all_busy(self, candidates: Sequence[Candidate]) -> bool:
        return all(one.prefill_tokens > self._busy_above for one in candidates)

    def _drain(self) -> Iterator[Release]:
        while self._queue:
            waiting = self._queue[0][2]
            candidates = self._candidates(waiting)
            if self._all_busy(candidates):
                return
            heapq.heappop(self._queue)
            yield Release(waiting.request.request, self._choose(waiting, candidates))

    def _rank(self, waiting: _Waiting, candidates: Sequence[Candidate], now_ms: float) -> float:
        """Place in the queue; the lowest goes first, the earlier of equals."""
        policy = self.settings.router_queue_policy
        if policy == "fcfs":
            return 0.0
        if policy == "lcfs":
            return -now_ms
        best = max(map(self._cached_tokens, candidates), default=0)
        return -1.0 / max(1, waiting.request.prompt_tokens - best)

    def _choose(self, waiting: _Waiting, candidates: Sequence[Candidate]) -> Place | Refuse:
        if not candidates:
            return Refuse("no rank is eligible")
        costs = weigh(self.settings, candidates, waiting.request.prompt_tokens, self.pool.block_size_tokens)
        temperature = self.settings.router_temperature
        if temperature > 0.0 and len(candidates) > 1:
            chosen = softmax_position(costs.total, temperature, self.pool.stream("softmax").unit())
            reason, tied = "softmax", costs.total.count(costs.total[chosen])
        else:
            chosen, tied = self.pool.lowest(costs.total)
            reason = "cost"
        why = Weighing(
            candidates=candidates,
            chosen=chosen,
            reason=reason,
            costs=costs.total,
            parts={
                "hit": [self.settings.weighted_hit(one) for one in candidates],
                "credit": costs.credit,
                "prefill": costs.prefill,
                "decode": costs.decode,
                "requests": costs.requests,
            },
            tied=tied,
        )
        return Place(candidates[chosen].placement, why)
