"""Placement policies that come with g2sim, but for Dynamo's (``dynamo``).

Blind ones (rotation, chance), ones that look at load, at caches, at who a request belongs to.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import attrs

from g2sim.actors.config import WorkerRole
from g2sim.actors.router.policy import (
    Candidate,
    Place,
    Placement,
    Policy,
    Refuse,
    Release,
    RoutedRequest,
    Verdict,
    Weighing,
    is_finite,
)
from g2sim.actors.router.pool import Pool
from g2sim.bus.errors import ConfigError

NOBODY = Refuse("no worker takes requests")


class RoundRobin(Policy):
    """Strict rotation, blind to everything.

    With one pool it goes over workers, and each worker over its own ranks; a prefill or decode pool is rotated rank by
    rank, the ranks of worker 0 first.

    Source: offline replay of aisimulate-core 0.13.0.
    """

    name = "round_robin"
    sees_blocks = False
    sees_load = False

    def start(self, pool: Pool) -> None:
        super().start(pool)
        self._flat = pool.role is not WorkerRole.AGGREGATED
        self._next = 0
        self._next_rank = [0] * pool.workers

    def place(self, request: RoutedRequest, now_ms: float) -> Verdict:
        dp_size = self.pool.dp_size
        steps = self.pool.workers * (dp_size if self._flat else 1)
        for _ in range(steps):
            step = self._next
            self._next = (step + 1) % steps
            worker = step // dp_size if self._flat else step
            if not self.pool.is_ready(worker):
                continue
            if self._flat:
                return Place(Placement(worker, step % dp_size))
            dp_rank = self._next_rank[worker]
            self._next_rank[worker] = (dp_rank + 1) % dp_size
            return Place(Placement(worker, dp_rank))
        return NOBODY


class Random(Policy):
    """Every rank with equal chance."""

    name = "random"
    sees_blocks = False
    sees_load = False

    def place(self, request: RoutedRequest, now_ms: float) -> Verdict:
        places = self.pool.ready_places()
        if not places:
            return NOBODY
        return Place(self.pool.places[places[self.pool.stream("placement").below(len(places))]])


class LeastLoaded(Policy):
    """The rank with the fewest requests in flight."""

    name = "least_loaded"
    sees_blocks = False

    def score(self, request: RoutedRequest, candidate: Candidate) -> float:
        return candidate.active_requests


class PowerOfTwo(Policy):
    """Of two ranks drawn at random, the one with fewer requests in flight."""

    name = "power_of_two"
    sees_blocks = False

    def place(self, request: RoutedRequest, now_ms: float) -> Verdict:
        drawn = self.pool.candidates(request)
        if not drawn:
            return NOBODY
        if len(drawn) > 2:
            stream = self.pool.stream("placement")
            first = stream.below(len(drawn))
            second = stream.below(len(drawn) - 1)
            drawn = [drawn[position] for position in sorted((first, second + (second >= first)))]
        return self.pick(request, drawn, [one.active_requests for one in drawn], now_ms)


class PrefixAffinity(Policy):
    """The rank that has to compute the least, counted in blocks, with a price on the load it has already.

    Args:
        device_weight, host_weight: what a cached block saves, in blocks.
        request_weight: price of a request in flight, in blocks.
        prefill_weight: price of a block's worth of prompt tokens that still wait there.
    """

    name = "prefix_affinity"

    def __init__(
        self,
        *,
        device_weight: float = 1.0,
        host_weight: float = 0.75,
        request_weight: float = 1.0,
        prefill_weight: float = 1.0,
    ) -> None:
        self._device_weight = amount("device_weight", device_weight)
        self._host_weight = amount("host_weight", host_weight)
        self._request_weight = amount("request_weight", request_weight)
        self._prefill_weight = amount("prefill_weight", prefill_weight)

    def score(self, request: RoutedRequest, candidate: Candidate) -> Mapping[str, float]:
        block = self.pool.block_size_tokens
        cached = self._device_weight * candidate.device_blocks + self._host_weight * candidate.host_blocks
        return {
            "compute": max(0.0, request.prompt_tokens / block - cached),
            "prefill_queue": self._prefill_weight * (candidate.prefill_tokens / block),
            "requests": self._request_weight * candidate.active_requests,
        }


@attrs.define(slots=True)
class _Binding:
    placement: Placement
    in_flight: int = 0
    idle_since_ms: float = 0.0


class _Affinity(Policy):
    """Requests with a common key go where the first of them went, as long as that rank is not much fuller than others.

    Args:
        ttl_ms: a key with nothing in flight is forgotten after this time [ms]; None never.
        slack_requests: how many more requests in flight than the emptiest rank the bound one may have.
    """

    sees_blocks = False

    def __init__(self, *, ttl_ms: float | None = None, slack_requests: int = 4) -> None:
        if ttl_ms is not None:
            amount("ttl_ms", ttl_ms)
        if type(slack_requests) is not int or slack_requests < 0:
            raise ConfigError("slack_requests", got=slack_requests, allowed="an integer, 0 or more")
        self._ttl_ms = ttl_ms
        self._slack = slack_requests
        self._bindings: dict[Hashable, _Binding] = {}
        self._key_of: dict[int, Hashable] = {}

    def key(self, request: RoutedRequest) -> Hashable | None:
        """What binds a request to others; None = nothing."""
        raise NotImplementedError

    def preferred(self, request: RoutedRequest, now_ms: float) -> tuple[Placement, str] | None:
        """The rank that the request should go to, and why; None if there is none."""
        key = self.key(request)
        binding = self._bindings.get(key)
        if binding is None:
            return None
        if self._ttl_ms is not None and not binding.in_flight and now_ms - binding.idle_since_ms >= self._ttl_ms:
            del self._bindings[key]
            return None
        return binding.placement, "bound"

    def place(self, request: RoutedRequest, now_ms: float) -> Verdict:
        candidates = self.pool.candidates(request)
        if not candidates:
            return NOBODY
        loads = [one.active_requests for one in candidates]
        wanted = self.preferred(request, now_ms)
        verdict = self.pick(request, candidates, loads, now_ms, reason="least_loaded")
        if wanted is not None:
            placement, reason = wanted
            for chosen, one in enumerate(candidates):
                if one.placement == placement and one.active_requests <= min(loads) + self._slack:
                    why = Weighing(
                        candidates=candidates, chosen=chosen, reason=reason, costs=[float(load) for load in loads]
                    )
                    verdict = Place(placement, why)
        self._bind(request, verdict.placement)
        return verdict

    def request_terminal(self, request: int, now_ms: float) -> Iterable[Release]:
        binding = self._bindings.get(self._key_of.pop(request, None))
        if binding is not None:
            binding.in_flight -= 1
            binding.idle_since_ms = now_ms
        return ()

    def worker_removed(self, worker: int, now_ms: float) -> Iterable[Release]:
        gone = [key for key, binding in self._bindings.items() if binding.placement.worker == worker]
        for key in gone:
            del self._bindings[key]
        return ()

    def _bind(self, request: RoutedRequest, placement: Placement) -> None:
        key = self.key(request)
        if key is None:
            return
        binding = self._bindings.get(key)
        if binding is None:
            binding = self._bindings[key] = _Binding(placement)
        binding.placement = placement
        binding.in_flight += 1
        self._key_of[request.request] = key


class SessionAffinity(_Affinity):
    """A session (in agentic traffic a conversation) stays on the rank of its first request, softly.

    Options and limits: ``_Affinity``.
    Source: session affinity of the router of NVIDIA Dynamo, whose idle time starts when the last request ends too.
    """

    name = "session_affinity"

    def key(self, request: RoutedRequest) -> Hashable | None:
        return session_key(request)


class ParentAware(_Affinity):
    """Session affinity, and the first request of a subagent prefers the rank of the request that spawned it.

    Source: idea of Dynamo's pull requests 12073 and 14521.
    """

    name = "parent_aware"

    def __init__(self, *, ttl_ms: float | None = None, slack_requests: int = 4) -> None:
        super().__init__(ttl_ms=ttl_ms, slack_requests=slack_requests)
        self._place_of: dict[tuple[str, str], Placement] = {}

    def key(self, request: RoutedRequest) -> Hashable | None:
        return session_key(request)

    def preferred(self, request: RoutedRequest, now_ms: float) -> tuple[Placement, str] | None:
        own = super().preferred(request, now_ms)
        who = request.agentic
        if own is not None or who is None or who.parent_id is None:
            return own
        parent = self._place_of.get((who.play_id, who.parent_id))
        return None if parent is None else (parent, "parent")

    def _bind(self, request: RoutedRequest, placement: Placement) -> None:
        super()._bind(request, placement)
        if request.agentic is not None and request.name is not None:
            self._place_of[request.agentic.play_id, request.name] = placement


def session_key(request: RoutedRequest) -> Hashable | None:
    """Who a request's conversation is: one of a play, or a plain session; None if its traffic knows none."""
    if request.agentic is not None:
        return request.agentic.play_id, request.agentic.conversation_id
    return request.session_id


def amount(option: str, value: Any) -> float:
    """An option that must be a finite number, 0 or more. Raises: ConfigError."""
    if not is_finite(value) or value < 0:
        raise ConfigError(option, got=value, allowed="a finite number, 0 or more")
    return float(value)
