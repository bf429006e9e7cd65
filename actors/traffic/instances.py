"""Driver of snapshots: lanes that start in the middle of plays, warm up, and recycle plays for as long as a profile is.

Owns: which instance runs on which lane, when the measured clock starts, and recycling.
Refuses to know: what a cut leaves (``snapshot``), deadlines and idle guards (``profile``), preparation requests
(``warmup``), gates and edges (``plays``).

Source: workloads 8 to 10; checked against the reference's recordings.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import attrs

from g2sim.actors.kv.prompt import RunPrompt, token_array
from g2sim.actors.traffic.events import (
    AdmissionClosed,
    PlayRecycled,
    PlaySettled,
    ProfileFinished,
    RequestSkipped,
    TimersPulledForward,
)
from g2sim.actors.traffic.graph import AgenticCorpus, Node, lane_name
from g2sim.actors.traffic.play_driver import PlayDriver, settled
from g2sim.actors.traffic.plays import NodeMode, NodeRun, PlayRun
from g2sim.actors.traffic.profile import Profile, ProfileOptions
from g2sim.actors.traffic.request import AgenticIdentity, Cancel, Release, RequestSpec, RequestStatus
from g2sim.actors.traffic.snapshot import Instance, InstanceMaker
from g2sim.actors.traffic.warmup import Preparation, PreparationRequest
from g2sim.bus.errors import ConfigError


class NoProgress(ConfigError):
    """A profile recycles plays without end in one instant."""


class SnapshotDriver(PlayDriver):
    """A ``TrafficDriver`` with ``LoadControl``. See the module's text.

    Args:
        corpus: what a reader returned.
        seed: of the cuts, 0 to 2**64 - 1.
        lanes: plays that run at a time, >= 1.
        speedup: divides every remaining delay, finite and > 0.
        warmup: run preparation requests first.
        profile: recycle plays, and close the run; None runs one instance a lane.
    Raises: ConfigError if a cut is not possible.
    """

    def __init__(
        self,
        corpus: AgenticCorpus,
        *,
        seed: int,
        lanes: int,
        speedup: float = 1.0,
        warmup: bool = False,
        profile: ProfileOptions | None = None,
    ) -> None:
        super().__init__()
        self.graph = corpus.graph
        self.lanes = lanes
        self._speedup = speedup
        self._sped_up = corpus.graph.sped_up(speedup)
        self._maker = InstanceMaker(corpus.graph, seed=seed, lanes=lanes)
        self._instance_of: dict[str, Instance] = {}
        self._source_of: dict[int, int] = {}
        self._profile = None if profile is None else Profile(profile)
        self._cursor = lanes
        self._current = [self._add_instance(lane % len(self.graph.plays), lane, 0) for lane in range(lanes)]
        self._preparation = Preparation(self.graph, [self._instance_of[play.play_id] for play in self._current])
        self._recycled_at_ms = -1.0
        self._recycled = 0
        if not warmup:
            self._preparation.skip()
            self._open(0.0)

    @property
    def prepares(self) -> bool:
        """Whether the barrier after preparation is still to come."""
        return not self._preparation.over

    @property
    def graph_digest(self) -> str:
        """Digest of the graph, before any speed-up."""
        return self._maker.digest

    @property
    def play_ids(self) -> tuple[str, ...]:
        """The first instance of each lane."""
        return tuple(play.play_id for play in self._plays)

    @property
    def total_requests(self) -> int | None:
        """None for a profile, which does not know."""
        return None if self._profile is not None else len(self._runs) + self._preparation.total

    def described(self) -> list[dict[str, Any]]:
        """The instances so far, as reports list them."""
        return [self._maker.described(instance) for instance in self._instance_of.values()]

    def preparation_described(self) -> list[dict[str, Any]]:
        """The preparation requests, lane by lane, as reports list them before anything happened."""
        return [
            {
                "phase": request.phase,
                "lane_id": request.instance.lane,
                "source_request_id": self.graph.nodes[request.source].request_id,
                "identity": {
                    "request_id": f"{request.instance.play_id}:{request.label}",
                    **{key: value for key, value in attrs.asdict(self._identity(request)).items() if value},
                },
                "uuid": f"{request.uuid:032x}",
                "input_length": self.graph.nodes[request.source].input_tokens,
                "max_output_tokens": 1,
            }
            for request in self._preparation.requests
        ]

    # -- TrafficDriver and LoadControl

    def next_ready_ms(self) -> float | None:
        """The earliest time at which ``control`` or ``release`` does something [ms], None if there is none."""
        if self.prepares:
            return self._preparation.next_ready_ms()
        if self._preparation.stops_the_run:
            return None
        ready_ms = self._machine.next_ready_ms()
        if self._profile is None:
            return ready_ms
        if not self._profile.closed and any(play.client_finished for play in self._current):
            return self._now_ms
        control_ms = self._profile.next_control_ms(self._current)
        return min((ms for ms in (ready_ms, control_ms) if ms is not None), default=None)

    def control(self, now_ms: float, *, settled: bool) -> list[object]:
        """See ``LoadControl``. Raises: NoProgress if plays of no duration are recycled for ever."""
        self._advance(now_ms)
        events: list[object] = []
        if self.prepares:
            outcome = self._preparation.conclude(settled=settled and self._preparation.quiet)
            if outcome is None:
                return events
            events.append(outcome)
            if outcome.failure_request is not None:
                return events
            self._open(now_ms)
        if self._profile is not None:
            self._control_profile(self._profile, now_ms, events)
        return events

    def release(self, now_ms: float) -> list[Release]:
        """See ``TrafficDriver``."""
        if not self.prepares:
            return super().release(now_ms)
        self._advance(now_ms)
        return [
            Release(request.key, ready_ms, self._preparation_spec(request))
            for ready_ms, request in self._preparation.release(now_ms)
        ]

    def ended(
        self, ends: Sequence[tuple[int, RequestStatus]], now_ms: float, *, busy: Collection[int] = ()
    ) -> list[RequestSkipped | PlaySettled]:
        """See ``PlayDriver.ended``; preparation requests lead to no events."""
        for key, status in sorted(end for end in ends if end[0] < 0):
            self._preparation.ended(key, status, now_ms, busy=key in busy)
        return super().ended([end for end in ends if end[0] >= 0], now_ms, busy=busy)

    def quiesced(self, keys: Iterable[int], now_ms: float) -> list[RequestSkipped | PlaySettled]:
        """See ``PlayDriver.quiesced``. After the end of a profile nobody counts what leaves the servers."""
        keys = list(keys)
        for key in keys:
            if key < 0:
                self._preparation.quiesced(key)
        events = super().quiesced([key for key in keys if key >= 0], now_ms)
        return [] if self._profile is not None and self._profile.finished else events

    def waiting(self) -> list[str]:
        """See ``TrafficDriver``."""
        return self._preparation.waiting() if self._preparation.stops_the_run else super().waiting()

    # -- inside

    def _add_instance(self, source: int, lane: int, ordinal: int) -> PlayRun:
        instance = self._maker.make(source, lane, ordinal)
        first = len(self._runs)
        members = [(number, self._remaining(instance, number)) for number in instance.cut.delay_ms]
        play = PlayRun.of(instance.play_id, ((first + idx, node) for idx, (_, node) in enumerate(members)))
        play.lane = lane
        self._instance_of[play.play_id] = instance
        self._source_of.update((first + idx, number) for idx, (number, _) in enumerate(members))
        self._add(play)
        return play

    def _remaining(self, instance: Instance, number: int) -> Node:
        cut = instance.cut
        edges = self._maker.remaining_edges(cut, self._sped_up.nodes[number])
        gate_ms = cut.delay_ms[number] / self._speedup
        if self._profile is not None and number in cut.driven:
            gate_ms = 0.0
        return attrs.evolve(self.graph.nodes[number], edges=tuple(edges), not_before_ms=gate_ms)

    def _open(self, now_ms: float) -> None:
        if self._profile is not None:
            self._profile.open(now_ms)
        for play in self._current:
            self._machine.activate(play, start_ms=now_ms, base_ms=0.0)

    def _control_profile(self, profile: Profile, now_ms: float, events: list[object]) -> None:
        if not profile.closed and now_ms >= profile.cutoff_ms:
            self._close(profile, events)
        if not profile.closed:
            for lane, play in enumerate(self._current):
                if play.client_finished:
                    events.append(self._recycle(lane, now_ms))
            for play_id, plays in profile.idle(self._current, now_ms):
                shift_ms, timers = self._machine.pull_forward(plays, now_ms)
                if timers:
                    events.append(TimersPulledForward(play_id=play_id, shifted_by_ms=shift_ms, timer_count=timers))
            return
        outstanding = [run for run in self._runs.values() if run.mode is NodeMode.DISPATCHED]
        if outstanding and profile.takes_grace_end(now_ms):
            events.extend(Cancel(run.ordinal) for run in outstanding)
        elif not outstanding and not profile.finished:
            profile.finished = True
            events.append(ProfileFinished())

    def _close(self, profile: Profile, events: list[object]) -> None:
        profile.closed = True
        censored = [play for play in self._plays if not play.client_finished]
        never_issued = sum(self._machine.censor(play) for play in censored)
        cut_short = tuple(play.play_id for play in censored if play.censored)
        events.append(AdmissionClosed(never_issued=never_issued, censored=cut_short))
        events.extend(settled(play) for play in censored if play.quiescent)

    def _recycle(self, lane: int, now_ms: float) -> PlayRecycled:
        if now_ms != self._recycled_at_ms:
            self._recycled_at_ms, self._recycled = now_ms, 0
        self._recycled += 1
        if self._recycled > len(self.graph.plays) * self.lanes:
            problem = f"plays are recycled without end at {now_ms!r} ms: they take no time"
            raise NoProgress("traffic.load.agentic_profile", problem=problem, hint="a trace whose plays last")
        before = self._instance_of[self._current[lane].play_id]
        play = self._add_instance(self._cursor % len(self.graph.plays), lane, before.ordinal + 1)
        self._cursor += 1
        self._current[lane] = play
        self._machine.activate(play, start_ms=now_ms, base_ms=0.0)
        described = self._maker.described(self._instance_of[play.play_id])
        return PlayRecycled(play_id=play.play_id, lane_id=lane_name(lane), play=described)

    def _client_finished(self, play: PlayRun, now_ms: float) -> None:
        """Lanes are served by ``control``, in their order."""

    def _spec(self, run: NodeRun) -> RequestSpec:
        instance, number = self._instance_of[run.play.play_id], self._source_of[run.ordinal]
        identity = self._maker.identity(instance, number)
        return RequestSpec(
            name=run.node.request_id,
            session_id=identity.conversation_id,
            turn_index=None,
            prompt=self._prompt(instance, run.node),
            output_tokens=run.node.output_tokens,
            agentic=identity,
            uuid=self._maker.uuid(instance, number),
            output_ids=token_array(run.node.output_token_ids),
        )

    def _preparation_spec(self, request: PreparationRequest) -> RequestSpec:
        node, identity = self.graph.nodes[request.source], self._identity(request)
        return RequestSpec(
            name=node.request_id,
            session_id=identity.conversation_id,
            turn_index=None,
            prompt=self._prompt(request.instance, node),
            output_tokens=1,
            agentic=identity,
            uuid=request.uuid,
            preparation=request.label,
        )

    def _identity(self, request: PreparationRequest) -> AgenticIdentity:
        return self._maker.identity(request.instance, request.source)

    def _prompt(self, instance: Instance, node: Node) -> RunPrompt:
        return RunPrompt(
            ids=self._maker.tokens(instance, node),
            run_tokens=min(self.graph.block_size_tokens, node.input_tokens),
            length=node.input_tokens,
        )
