"""What a placement policy is: the calls it gets, the verdicts it gives, and a base class that does the common part.

Owns: the protocol between a router and its policy. Refuses to know: the bus, and any particular policy.

A policy that scores ranks needs one method::

    class Emptiest(Policy):
        name = "emptiest"

        def score(self, request, candidate):
            return candidate.active_requests          # lower is better; equal scores are a tie

One that does not look at ranks one by one overrides ``place``; one that lets requests wait returns ``Queue`` from it,
and releases them from the hooks. A hook may be a generator: each release is booked before the next is asked for. All
calls are synchronous, at a virtual time that they are given; a policy has no clock, and randomness only from
``pool.stream``. KV events are heard when the router has something else to do; first tokens and ends also while requests
wait.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import attrs

from g2sim.actors.kv.blocks import BlockChain
from g2sim.actors.kv.events import BlocksCleared, BlocksRemoved, BlocksStored
from g2sim.actors.rounding import add_up
from g2sim.actors.traffic.request import AgenticIdentity
from g2sim.bus.errors import PolicyError, shorten

if TYPE_CHECKING:
    from g2sim.actors.router.pool import Pool

MAX_FLOAT = sys.float_info.max

KvEvent = BlocksStored | BlocksRemoved | BlocksCleared


@attrs.frozen(slots=True, order=True)
class Placement:
    """A rank of a worker.

    Attributes:
        worker: number in its pool, from 0.
        dp_rank: number in its worker, from 0.
    """

    worker: int
    dp_rank: int


@attrs.frozen(kw_only=True, slots=True, eq=False)
class RoutedRequest:
    """A request as a router sees it.

    Attributes:
        request: its number in the run.
        prompt_tokens: length of its prompt.
        output_tokens: most tokens that it asks for; it may end earlier.
        chain: hashes of the prompt's whole blocks.
        arrival_ms: when it arrived [ms].
        name: its id in the trace, None in traffic without.
        session_id: its conversation, None in traffic without.
        turn_index: its place in the conversation, from 0.
        agentic: who it is in a play, None outside agentic traffic.
    """

    request: int
    prompt_tokens: int
    output_tokens: int
    chain: BlockChain
    arrival_ms: float
    name: str | None = None
    session_id: str | None = None
    turn_index: int | None = None
    agentic: AgenticIdentity | None = None


@attrs.frozen(slots=True)
class Candidate:
    """A rank that could take a request, as the router believes it to be.

    Attributes:
        placement: the rank.
        device_blocks: length of the prompt's prefix in its device memory.
        host_blocks: blocks that continue this prefix in host memory.
        prefill_tokens: prompt tokens that wait there or are being computed.
        active_blocks: blocks of requests there, if this one came too.
        active_requests: requests there.
        disk_blocks: blocks that continue the hosts' on disk; g2sim has no such tier.
    """

    placement: Placement
    device_blocks: int
    host_blocks: int
    prefill_tokens: int
    active_blocks: int
    active_requests: int
    disk_blocks: int = 0


@attrs.frozen(kw_only=True, slots=True)
class Weighing:
    """Why a rank was chosen, for the log.

    Attributes:
        candidates: all that were looked at, by (worker, rank).
        chosen: position of the chosen one.
        reason: one word for the rule that decided.
        costs: one a candidate, lower is better; empty if the policy does not count.
        parts: name -> one value a candidate; what the costs are made of.
        tied: how many candidates were as good as the best.
    """

    candidates: Sequence[Candidate]
    chosen: int
    reason: str
    costs: Sequence[float] = ()
    parts: Mapping[str, Sequence[float]] = attrs.Factory(dict)
    tied: int = 1


@attrs.frozen(slots=True)
class Place:
    """Verdict: send the request there, now.

    Attributes:
        placement: the rank; its worker must be ready.
        why: what was weighed, for ``g2sim explain``; None from a policy that does not look at ranks.
    """

    placement: Placement
    why: Weighing | None = None


@attrs.frozen(slots=True)
class Queue:
    """Verdict: keep it; the policy will release it from one of its hooks."""


@attrs.frozen(slots=True)
class Refuse:
    """Verdict: nobody will serve it; it ends as "rejected".

    Attributes:
        reason: why, for the log.
    """

    reason: str


Verdict = Place | Queue | Refuse


@attrs.frozen(slots=True)
class Release:
    """A queued request goes to a rank now, or, with a ``Refuse``, nowhere.

    Attributes:
        request: its number, one that waits.
        verdict: where it goes, or why nowhere.
    """

    request: int
    verdict: Place | Refuse


Score = float | Mapping[str, float]
"""A finite number, lower is better; or its named parts, which are added in their order."""


class PlacementPolicy(Protocol):
    """What a router needs of a policy. ``Policy`` has a default for everything.

    Attributes:
        name: short name, for logs and errors.
        sees_blocks: keep an index of KV events for it, and call ``observe``.
        sees_load: book its placements, and call ``prefill_completed`` and ``request_terminal``.
        shares_blocks: in its view of load a block counts once, however many requests have it.
    """

    @property
    def name(self) -> str: ...
    @property
    def sees_blocks(self) -> bool: ...
    @property
    def sees_load(self) -> bool: ...
    @property
    def shares_blocks(self) -> bool: ...

    def start(self, pool: Pool) -> None:
        """Once, before anything else. ``pool`` is the policy's window on its pool of workers."""
        ...

    def place(self, request: RoutedRequest, now_ms: float) -> Verdict:
        """A request arrived. While no worker takes requests they wait in the router; the first that does is told of
        with ``worker_ready``, and then they come here in their order."""
        ...

    def observe(self, events: Sequence[KvEvent], now_ms: float) -> Iterable[Release]:
        """KV events of the pool's ranks were heard, in order; the pool's index has them already."""
        ...

    def prefill_completed(self, request: int, now_ms: float) -> Iterable[Release]:
        """A placed request has its first token (in a prefill pool: its prompt is computed).

        With load sync this and ``request_terminal`` also tell of requests that other replicas placed.
        """
        ...

    def request_terminal(self, request: int, now_ms: float) -> Iterable[Release]:
        """A placed request has ended (in a prefill pool: its blocks are given back)."""
        ...

    def worker_ready(self, worker: int, now_ms: float) -> Iterable[Release]:
        """A worker can be given requests."""
        ...

    def worker_draining(self, worker: int, now_ms: float) -> Iterable[Release]:
        """A worker is given no more requests; it finishes what it has."""
        ...

    def worker_removed(self, worker: int, now_ms: float) -> Iterable[Release]:
        """A worker is gone."""
        ...

    def withdraw(self, request: int, now_ms: float) -> Iterable[Release]:
        """A request that waits in the policy was canceled; it must not be released any more."""
        ...

    def pending(self) -> Sequence[int]:
        """Requests that wait in the policy, in no particular order."""
        ...

    def prefill_tokens(self, request: RoutedRequest, candidate: Candidate) -> int:
        """Prompt tokens that the request will have to compute there; what is booked when it is placed."""
        ...

    def reported_overlap(self, candidate: Candidate) -> int | None:
        """Blocks that the policy believes need no computing there, None if it does not look."""
        ...


class Policy:
    """Base of placement policies: scores every ready rank, takes the best, never queues. See ``PlacementPolicy``.

    Subclasses take their options as keyword arguments of ``__init__``; a ValueError says that one is wrong.
    """

    name: ClassVar[str] = ""
    sees_blocks: bool = True
    sees_load: bool = True
    shares_blocks: bool = True
    pool: Pool

    def start(self, pool: Pool) -> None:
        self.pool = pool

    def eligible(self, request: RoutedRequest, candidate: Candidate) -> bool:
        """Whether the request may go there at all."""
        return True

    def score(self, request: RoutedRequest, candidate: Candidate) -> Score:
        """How bad the rank is for the request."""
        raise NotImplementedError(f"{type(self).__name__} has neither score nor place")

    def place(self, request: RoutedRequest, now_ms: float) -> Verdict:
        candidates = [one for one in self.pool.candidates(request) if self.eligible(request, one)]
        if not candidates:
            return Refuse("no rank is eligible")
        scores = [self.score(request, one) for one in candidates]
        return self.pick(request, candidates, scores, now_ms)

    def pick(
        self,
        request: RoutedRequest,
        candidates: Sequence[Candidate],
        scores: Sequence[Score],
        now_ms: float,
        reason: str = "cost",
    ) -> Place:
        """The candidate with the lowest score; a tie is broken as the scenario says.

        Raises: PolicyError for a score that is not a finite number.
        """
        costs: list[float] = []
        parts: dict[str, list[float]] = {}
        for candidate, score in zip(candidates, scores, strict=True):
            cost: Any = score
            if isinstance(score, Mapping):
                cost = add_up(score.values())
                for part, value in score.items():
                    parts.setdefault(part, []).append(float(value))
            if not is_finite(cost):
                where = f"worker {candidate.placement.worker} rank {candidate.placement.dp_rank}"
                raise PolicyError(
                    self.name,
                    f"the score of {where} is {shorten(score)}, allowed: a finite number",
                    request=request.request,
                    time_ms=now_ms,
                )
            costs.append(float(cost))
        chosen, tied = self.pool.lowest(costs)
        why = Weighing(candidates=candidates, chosen=chosen, reason=reason, costs=costs, parts=parts, tied=tied)
        return Place(candidates[chosen].placement, why)

    def observe(self, events: Sequence[KvEvent], now_ms: float) -> Iterable[Release]:
        return ()

    def prefill_completed(self, request: int, now_ms: float) -> Iterable[Release]:
        return ()

    def request_terminal(self, request: int, now_ms: float) -> Iterable[Release]:
        return ()

    def worker_ready(self, worker: int, now_ms: float) -> Iterable[Release]:
        return ()

    def worker_draining(self, worker: int, now_ms: float) -> Iterable[Release]:
        return ()

    def worker_removed(self, worker: int, now_ms: float) -> Iterable[Release]:
        return ()

    def withdraw(self, request: int, now_ms: float) -> Iterable[Release]:
        return ()

    def pending(self) -> Sequence[int]:
        return ()

    def prefill_tokens(self, request: RoutedRequest, candidate: Candidate) -> int:
        cached = candidate.device_blocks + candidate.host_blocks
        return max(0, request.prompt_tokens - cached * self.pool.block_size_tokens)

    def reported_overlap(self, candidate: Candidate) -> int | None:
        return candidate.device_blocks + candidate.host_blocks if self.sees_blocks else None


def is_finite(value: Any) -> bool:
    """Whether something is a finite number, and a float64 can hold it."""
    return isinstance(value, int | float) and type(value) is not bool and -MAX_FLOAT <= value <= MAX_FLOAT
