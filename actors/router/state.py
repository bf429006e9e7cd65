"""A router without its bus: asks the policy, checks and books what it says, and keeps the requests that wait.

Owns: the contract between a router and its policy. A policy that breaks it ends the run with a PolicyError that says
what it did; every decision that leaves here is one that the pool can carry out.
Refuses to know: how decisions are carried out, and where signals come from.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, KeysView, Sequence
from typing import Any, Final

import attrs

from g2sim.actors.router.loads import Booking
from g2sim.actors.router.policy import (
    Candidate,
    KvEvent,
    Place,
    Placement,
    PlacementPolicy,
    Queue,
    Refuse,
    Release,
    RoutedRequest,
    Weighing,
    is_finite,
)
from g2sim.actors.router.pool import Pool, WorkerState
from g2sim.bus.errors import PolicyError, SimError, raised, shorten
from g2sim.bus.plain import Plain


class Placed(Plain):
    """A request goes to a rank.

    Attributes:
        queued_at_ms: when it began to wait [ms], None if it did not.
        overlap_blocks, best_overlap_blocks: what the policy believes is cached there, and at best anywhere; None from a
            policy that does not look.
        why: the policy's account, None from a policy that does not weigh.
    """

    __slots__ = ("best_overlap_blocks", "overlap_blocks", "placement", "queued_at_ms", "request", "why")

    def __init__(
        self,
        request: RoutedRequest,
        placement: Placement,
        queued_at_ms: float | None,
        overlap_blocks: int | None,
        best_overlap_blocks: int | None,
        why: Weighing | None,
    ) -> None:
        self.request: Final = request
        self.placement: Final = placement
        self.queued_at_ms: Final = queued_at_ms
        self.overlap_blocks: Final = overlap_blocks
        self.best_overlap_blocks: Final = best_overlap_blocks
        self.why: Final = why


@attrs.frozen(slots=True)
class Waits:
    """A request waits in the policy."""

    request: RoutedRequest


@attrs.frozen(slots=True)
class Refused:
    """Nobody will serve a request."""

    request: RoutedRequest
    reason: str


Decision = Placed | Waits | Refused


@attrs.frozen(slots=True)
class _Waiting:
    request: RoutedRequest
    since_ms: float


class RouterState:
    """See the module's text.

    Args:
        pool: the router's view of its workers.
        policy: who decides; it is started here.
    Raises: PolicyError if it cannot start.
    """

    def __init__(self, pool: Pool, policy: PlacementPolicy) -> None:
        self.pool = pool
        self.policy = policy
        self._waiting: dict[int, _Waiting] = {}
        self._unserved: OrderedDict[int, _Waiting] = OrderedDict()
        self._of_peers: set[int] = set()
        self._guarded("start", None, 0.0, policy.start, pool)
        pool.loads.shares_blocks = policy.shares_blocks

    @property
    def waiting(self) -> Sequence[int]:
        """Requests that wait, in the policy or, while no worker takes requests, for one that does."""
        return [*self._waiting, *self._unserved]

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting or self._unserved)

    def place(self, request: RoutedRequest, now_ms: float) -> Decision:
        """A request arrived. The policy is not asked while no worker takes requests."""
        if not self.pool.has_ready:
            self._unserved[request.request] = _Waiting(request, now_ms)
            return Waits(request)
        return self._place(request, None, now_ms)

    def observe(self, events: Sequence[KvEvent], now_ms: float) -> list[Decision]:
        """KV events of the pool's ranks became known."""
        self.pool.apply(*events)
        return self._released("observe", None, now_ms, self.policy.observe, events)

    @property
    def awaiting(self) -> KeysView[int]:
        """Requests of which ``first_token`` would be news."""
        return self.pool.loads.awaiting

    def peer_placed(self, request: int, booking: Booking) -> None:
        """Another replica placed a request."""
        self._of_peers.add(request)
        self.pool.loads.book(request, booking.place, booking.prefill_tokens, booking.hashes)

    def first_token(self, request: int, now_ms: float, *, from_peer: bool = False) -> list[Decision]:
        """A request's prompt is computed. Nothing happens if that is no news.

        ``from_peer``: this is news of other replicas' requests, and of no others.
        """
        if (request in self._of_peers) is not from_peer or not self.pool.loads.first_token(request):
            return []
        return self._released("prefill_completed", request, now_ms, self.policy.prefill_completed, request)

    def ended(self, request: int, now_ms: float, *, from_peer: bool = False) -> list[Decision]:
        """A request is over. Nothing happens if it was not placed here, or with ``from_peer`` by another replica."""
        if (request in self._of_peers) is not from_peer:
            return []
        self._of_peers.discard(request)
        if not self.pool.loads.end(request):
            return []
        return self._released("request_terminal", request, now_ms, self.policy.request_terminal, request)

    def withdraw(self, request: int, now_ms: float) -> list[Decision]:
        """A request that waits here was canceled. Returns what its going releases."""
        if self._unserved.pop(request, None) is not None:
            return []
        del self._waiting[request]
        return self._released("withdraw", request, now_ms, self.policy.withdraw, request)

    def set_worker(self, worker: int, state: WorkerState, now_ms: float) -> list[Decision]:
        """A worker became ready, drains or is gone, and with it what was placed there."""
        self.pool.set_state(worker, state)
        hooks = {
            WorkerState.READY: self.policy.worker_ready,
            WorkerState.DRAINING: self.policy.worker_draining,
            WorkerState.REMOVED: self.policy.worker_removed,
        }
        decisions = self._released(f"worker_{state.value}", None, now_ms, hooks[state], worker)
        while self._unserved and self.pool.has_ready:
            _, waiting = self._unserved.popitem(last=False)
            decision = self._place(waiting.request, waiting.since_ms, now_ms)
            if not isinstance(decision, Waits):  # which is no news
                decisions.append(decision)
        return decisions

    def check(self) -> None:
        """Raises: InvariantViolation, or PolicyError if the policy holds other requests than it was given."""
        self.pool.check()
        pending = self.policy.pending()
        if sorted(pending) != sorted(self._waiting):
            raise PolicyError(
                self.policy.name, f"pending() is {shorten(sorted(pending))}, waiting are {sorted(self._waiting)}"
            )

    # -- inside

    def _error(self, problem: str, request: int | None, now_ms: float) -> PolicyError:
        return PolicyError(self.policy.name, problem, request=request, time_ms=now_ms)

    def _guarded(self, what: str, request: int | None, now_ms: float, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except SimError:
            raise
        except Exception as error:
            raise self._error(f"{what} raised {raised(error)}", request, now_ms) from error

    def _released(
        self, what: str, subject: int | None, now_ms: float, hook: Callable[..., Iterable[Release]], argument: Any
    ) -> list[Decision]:
        """What a hook releases; each is booked before the next is asked for."""
        releases = self._guarded(what, subject, now_ms, hook, argument, now_ms)
        if type(releases) is tuple and not releases:
            return []
        decisions: list[Decision] = []
        steps = self._guarded(what, subject, now_ms, iter, releases)
        while (release := self._guarded(what, subject, now_ms, next, steps, None)) is not None:
            if not isinstance(release, Release):
                raise self._error(f"{what} gave {shorten(release)}, allowed: Release", subject, now_ms)
            waiting = self._waiting.get(release.request)
            if waiting is None:
                placed = release.request in self.pool.loads
                whence = "is placed already" if placed else "does not wait here"
                raise self._error(f"{what} released request {release.request!r}, which {whence}", subject, now_ms)
            decisions.append(self._settled(what, waiting.request, release.verdict, waiting.since_ms, now_ms))
            del self._waiting[release.request]
        return decisions

    def _place(self, request: RoutedRequest, since_ms: float | None, now_ms: float) -> Decision:
        """Ask the policy; ``since_ms``: when the request began to wait here, None if it did not."""
        verdict = self._guarded("place", request.request, now_ms, self.policy.place, request, now_ms)
        if isinstance(verdict, Queue):
            self._waiting[request.request] = _Waiting(request, now_ms if since_ms is None else since_ms)
            return Waits(request)
        return self._settled("place", request, verdict, since_ms, now_ms)

    def _settled(
        self, what: str, request: RoutedRequest, verdict: Any, since_ms: float | None, now_ms: float
    ) -> Decision:
        """A verdict that is final, checked and booked."""
        if isinstance(verdict, Refuse):
            if not isinstance(verdict.reason, str):
                told = f"{what} refused because of {shorten(verdict.reason)}, allowed: a text"
                raise self._error(told, request.request, now_ms)
            return Refused(request, verdict.reason)
        if not isinstance(verdict, Place):
            raise self._error(f"{what} gave {shorten(verdict)}, allowed: a verdict", request.request, now_ms)
        policy, why = self.policy, verdict.why
        placement = self._checked(what, request, verdict, now_ms)
        overlap = best = None
        if policy.sees_blocks or policy.sees_load:
            candidates = self.pool.candidates(request) if why is None else why.candidates
            chosen = next(one for one in candidates if one.placement == placement)
            overlap = self._reported(request, chosen, now_ms)
            if overlap is not None:
                best = max(self._reported(request, one, now_ms) or 0 for one in candidates)
            if policy.sees_load:
                self._book(request, chosen, now_ms)
        return Placed(
            request=request,
            placement=placement,
            queued_at_ms=since_ms,
            overlap_blocks=overlap,
            best_overlap_blocks=best,
            why=why,
        )

    def _checked(self, what: str, request: RoutedRequest, verdict: Place, now_ms: float) -> Placement:
        """Raises: PolicyError unless the placement is a rank that takes requests, and the account fits it."""
        problem = self._problem_of(verdict)
        if problem is not None:
            told = f"{what} chose {shorten(verdict.placement)}{problem}"
            raise self._error(told, request.request, now_ms)
        return verdict.placement

    def _problem_of(self, verdict: Place) -> str | None:
        """What is wrong with a choice, as the rest of the sentence that tells it; None if nothing is."""
        placement, why, pool = verdict.placement, verdict.why, self.pool
        if not isinstance(placement, Placement):
            return ", allowed: a Placement"
        for name, limit in (("worker", pool.workers), ("dp_rank", pool.dp_size)):
            value = getattr(placement, name)
            if type(value) is not int or not 0 <= value < limit:
                return f", allowed: {name} 0 to {limit - 1}"
        if not pool.is_ready(placement.worker):
            return ", but this worker takes no requests"
        if why is None:
            return None
        if not 0 <= why.chosen < len(why.candidates) or why.candidates[why.chosen].placement != placement:
            return f", but its account says otherwise: {why.chosen!r}"
        for name, values in (("costs", why.costs), *why.parts.items()):
            if values and len(values) != len(why.candidates):
                return f" by {len(values)} {name} for {len(why.candidates)} candidates"
            for value in values:
                if not is_finite(value):
                    return f" by {shorten(value)} among its {name}, allowed: finite numbers"
        return None

    def _reported(self, request: RoutedRequest, candidate: Candidate, now_ms: float) -> int | None:
        if not self.policy.sees_blocks and self.policy.reported_overlap(candidate) is None:
            return None
        return self._count("reported_overlap", request, now_ms, self.policy.reported_overlap, candidate)

    def _book(self, request: RoutedRequest, chosen: Candidate, now_ms: float) -> None:
        tokens = self._count("prefill_tokens", request, now_ms, self.policy.prefill_tokens, request, chosen)
        self.pool.loads.book(
            request.request, self.pool.place_of(chosen.placement), tokens, request.chain.sequence_hashes
        )

    def _count(self, what: str, request: RoutedRequest, now_ms: float, call: Callable[..., Any], *args: Any) -> int:
        value = self._guarded(what, request.request, now_ms, call, *args)
        if type(value) is not int or value < 0:
            raise self._error(f"{what} gave {shorten(value)}, allowed: an integer, 0 or more", request.request, now_ms)
        return value
