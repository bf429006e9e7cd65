"""The rules that every placement policy keeps, as plays of random happenings through a router without a bus.

Owns: what happens in a play, and what must hold after each step. Refuses to know: where a policy comes from, and runs
of whole deployments.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping

import attrs

from g2sim.actors.config import TieBreak, WorkerRole
from g2sim.actors.kv.events import Tier
from g2sim.actors.router.bench import BLOCK, Streams, agentic, cleared, removed, request, router, stored
from g2sim.actors.router.policy import KvEvent, PlacementPolicy
from g2sim.actors.router.pool import WorkerState
from g2sim.actors.router.state import Decision, Placed, Refused, RouterState, Waits
from g2sim.bus.errors import PolicyError

MakePolicy = Callable[[], PlacementPolicy]

WORKERS, DP_SIZE = 3, 2
STEPS = 70

Step = tuple[str, int, int, int]
"""Action, and three free numbers: a choice (0 to 19), a family of prompts or sessions (0 to 3), a worker."""

_COMMON = {"place": 12, "first": 6, "end": 8, "store": 6, "drop": 3}


@attrs.frozen
class Profile:
    """One kind of play.

    Attributes:
        claim: what a policy shows that comes through it.
        weights: action -> how often, relative to the others.
        late: KV events are heard late, in batches ("hear").
    """

    name: str
    claim: str
    weights: Mapping[str, int]
    late: bool = False


PROFILES = (
    Profile("bookkeeping", "it places on ranks that are there, and pending() is what waits", _COMMON),
    Profile(
        "releases",
        "each queued request is released once, and none is left when nothing is in flight",
        {"place": 20, "first": 6, "end": 6},
    ),
    Profile(
        "cancellation",
        "a request that was canceled while it waited is not released any more",
        {"place": 20, "first": 4, "end": 4, "cancel": 6},
    ),
    Profile(
        "worker loss",
        "nothing goes to a worker that drains or is gone; without any, requests wait",
        {**_COMMON, "drain": 3, "lose": 3, "lose all": 1, "ready": 5},
    ),
    Profile("cleared events", "it goes on after caches were cleared", {**_COMMON, "clear": 4}),
    Profile(
        "lagging events",
        "it stands events that come late, twice, without their parents, or of workers that are gone",
        {**_COMMON, "hear": 4, "orphan": 3, "lose": 1, "ready": 2},
        late=True,
    ),
)


def steps(profile: Profile, seed: int) -> list[Step]:
    """A play's happenings, the same for the same seed."""
    draw = random.Random(f"{profile.name}:{seed}")
    actions = draw.choices(list(profile.weights), list(profile.weights.values()), k=STEPS)
    return [(action, draw.randrange(20), draw.randrange(4), draw.randrange(WORKERS)) for action in actions]


def play(policy: PlacementPolicy, profile: Profile, role: WorkerRole, seed: int) -> list[str]:
    """Carry out one play to its end, where all workers are ready and everything in flight ends.

    Returns: the decisions, in order, as text.
    Raises: PolicyError or InvariantViolation, with a note that says which play it was.
    """
    stage = _Stage(policy, profile, role, seed)
    number = 0
    try:
        for number, step in enumerate(steps(profile, seed)):
            stage.act(float(number), *step)
        stage.finish(float(number + 1))
    except Exception as error:
        error.add_note(f"in play {seed} of {profile.name!r}, {role.value} pool, step {number}")
        raise
    return stage.told


class _Stage:
    def __init__(self, policy: PlacementPolicy, profile: Profile, role: WorkerRole, seed: int) -> None:
        self.told: list[str] = []
        self._state: RouterState = router(
            policy, WORKERS, DP_SIZE, role=role, tie_break=TieBreak.RANDOM, stream=Streams(seed)
        )
        self._role = role.value
        self._late = profile.late
        self._unheard: list[KvEvent] = []
        self._placed: dict[int, int] = {}  # request -> worker
        self._waiting: set[int] = set()
        self._arrived = 0

    def act(self, now_ms: float, action: str, choice: int, family: int, worker: int) -> None:
        state = self._state
        if action == "place":
            self._note([self._arrive(choice, family, now_ms)])
        elif action in ("first", "end"):
            if self._placed:
                picked = sorted(self._placed)[choice % len(self._placed)]
                self._progress(picked, now_ms, is_end=action == "end")
        elif action in ("drain", "ready"):
            self._set(worker, WorkerState.DRAINING if action == "drain" else WorkerState.READY, now_ms)
        elif action == "cancel":
            if self._waiting:
                gone = sorted(self._waiting)[choice % len(self._waiting)]
                self._waiting.remove(gone)
                self._note(state.withdraw(gone, now_ms))
        elif action == "lose":
            self._set(worker, WorkerState.REMOVED, now_ms)
        elif action == "lose all":
            for each in range(WORKERS):
                self._set(each, WorkerState.REMOVED, now_ms)
            self._note([self._arrive(choice, family, now_ms)])
        else:
            self._unheard += self._kv_events(action, choice, family, worker)
            if not self._late or action == "hear":
                self._note(state.observe(self._unheard, now_ms))
                self._unheard = []
        self._check()

    def finish(self, now_ms: float) -> None:
        """Let everything end. Raises: PolicyError if a request is left."""
        self._note(self._state.observe(self._unheard, now_ms))
        for worker in range(WORKERS):
            self._set(worker, WorkerState.READY, now_ms)
        while self._placed:
            self._progress(min(self._placed), now_ms, is_end=False)
            self._progress(min(self._placed), now_ms, is_end=True)
            self._check()
        if self._waiting:
            policy = self._state.policy
            problem = "is never released, although nothing is in flight and every worker is ready"
            if not policy.sees_load:
                problem += "; sees_load is false, so no end of a request is told"
            raise PolicyError(policy.name, problem, request=min(self._waiting), time_ms=now_ms)

    # -- inside

    def _arrive(self, choice: int, family: int, now_ms: float) -> Decision:
        number = self._arrived
        self._arrived += 1
        who = agentic("play", f"c{choice % 3}", parent_id="r0") if family % 2 else None
        prompt = _prompt(choice, family)
        tokens = BLOCK * len(prompt) - choice % 2
        made = request(number, prompt, tokens=tokens, name=f"r{number}", session_id=f"s{family}", agentic=who)
        return self._state.place(made, now_ms)

    def _progress(self, number: int, now_ms: float, *, is_end: bool) -> None:
        if is_end:
            del self._placed[number]
        hear = self._state.ended if is_end else self._state.first_token
        self._note(hear(number, now_ms))

    def _set(self, worker: int, state: WorkerState, now_ms: float) -> None:
        if state is WorkerState.REMOVED:
            self._placed = {one: where for one, where in self._placed.items() if where != worker}
        self._note(self._state.set_worker(worker, state, now_ms))

    def _kv_events(self, action: str, choice: int, family: int, worker: int) -> Iterator[KvEvent]:
        ids, tier, dp_rank = _prompt(choice, family), (Tier.DEVICE, Tier.HOST_PINNED)[choice % 2], choice % DP_SIZE
        if action == "store":
            yield stored(worker, ids, tier=tier, dp_rank=dp_rank, role=self._role)
        elif action == "drop":
            yield removed(worker, ids, len(ids) - 1, tier=tier, dp_rank=dp_rank, role=self._role)
        elif action == "clear":
            yield cleared(worker, tier=(None, *Tier)[choice % 3], dp_rank=dp_rank, role=self._role)
        elif action == "orphan":
            orphan = stored(worker, ids, start=len(ids) - 1, tier=tier, dp_rank=dp_rank, role=self._role)
            yield from (orphan, orphan)

    def _note(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            number = decision.request.request
            if isinstance(decision, Waits):
                self._waiting.add(number)
                self.told.append(f"{number} waits")
                continue
            self._waiting.discard(number)
            if isinstance(decision, Refused):
                self.told.append(f"{number} refused")
                continue
            self._placed[number] = decision.placement.worker
            self.told.append(_told(number, decision))

    def _check(self) -> None:
        self._state.check()
        policy = self._state.policy
        if policy.sees_load and sum(self._state.pool.loads.requests) != len(self._placed):
            raise PolicyError(policy.name, "the router's load does not agree with what was placed: it changed the pool")


def _told(number: int, decision: Placed) -> str:
    costs = [] if decision.why is None else list(decision.why.costs)
    return f"{number} to {decision.placement} overlap {decision.overlap_blocks} costs {costs}"


def _prompt(choice: int, family: int) -> tuple[int, ...]:
    """A prompt's block ids; those of a family share their beginning."""
    return tuple(family * 10 + k for k in range(1 + choice % 5))
