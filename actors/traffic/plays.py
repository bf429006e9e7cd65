"""Plays at run time: which node waits, which is ready when, and what a failure does.

Owns: gates, edges, the ready queue and the modes of nodes. Refuses to know: which plays run on which lane or when they
start, what a request looks like, and who is told.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Iterable, Iterator

import attrs

from g2sim.actors.traffic.graph import Node, Trigger
from g2sim.actors.traffic.request import RequestStatus
from g2sim.bus.errors import ProtocolError


class NodeMode(enum.Enum):
    """Where a node is in its life."""

    BLOCKED = "blocked"
    READY = "ready"
    DISPATCHED = "dispatched"
    COMPLETED = "completed"
    FAILED = "failed"
    SKIPPED = "skipped"
    CENSORED = "censored"


class NodeInput(enum.Enum):
    """What can happen to a node."""

    UNBLOCK = "unblock"
    DISPATCH = "dispatch"
    COMPLETE = "complete"
    FAIL = "fail"
    SKIP = "skip"
    CENSOR = "censor"


NEXT_MODE = {
    (NodeMode.BLOCKED, NodeInput.UNBLOCK): NodeMode.READY,
    (NodeMode.BLOCKED, NodeInput.SKIP): NodeMode.SKIPPED,
    (NodeMode.READY, NodeInput.DISPATCH): NodeMode.DISPATCHED,
    (NodeMode.READY, NodeInput.SKIP): NodeMode.SKIPPED,
    (NodeMode.BLOCKED, NodeInput.CENSOR): NodeMode.CENSORED,
    (NodeMode.READY, NodeInput.CENSOR): NodeMode.CENSORED,
    (NodeMode.DISPATCHED, NodeInput.COMPLETE): NodeMode.COMPLETED,
    (NodeMode.DISPATCHED, NodeInput.FAIL): NodeMode.FAILED,
}
"""Every legal step; anything else is a ProtocolError."""


@attrs.define(eq=False, slots=True)
class NodeRun:
    """A node of a running play.

    Attributes:
        ordinal: its number among all nodes of the run, which settles ties; also the handle drivers give out.
        node: what it asks for, with gate and delays as they shall be used.
        play: the play it belongs to.
        waits: edges that have not fired.
        gate_ms: earliest dispatch, as far as known [ms].
        mode: where it is in its life.
        busy: dispatched, and something of it is left on the servers.
        fires: for each trigger the nodes that wait for it, with the delay [ms], in ordinal order.
    """

    ordinal: int
    node: Node
    play: PlayRun = attrs.field(repr=False)
    waits: int
    gate_ms: float = 0.0
    mode: NodeMode = NodeMode.BLOCKED
    busy: bool = False
    fires: dict[Trigger, list[tuple[NodeRun, float]]] = attrs.field(repr=False, factory=dict)

    def step(self, happened: NodeInput) -> None:
        """Raises: ProtocolError if it cannot happen now."""
        mode = NEXT_MODE.get((self.mode, happened))
        if mode is None:
            raise ProtocolError(f"request {self.node.request_id!r} is {self.mode.value}: cannot {happened.value}")
        self.mode = mode


@attrs.define(eq=False, slots=True)
class PlayRun:
    """A running play.

    Attributes:
        play_id: its id.
        lane: the lane it holds, None without lanes.
        nodes: in ordinal order.
        incomplete: nodes that have not completed.
        outstanding: nodes dispatched whose end was not seen.
        unsettled: nodes dispatched that have left something on the servers.
        failure: the first failure.
        censored: some node was taken out before it was dispatched because the run closes.
        idle_since_ms: when it was activated, or its last outstanding node ended; None while one is outstanding [ms].
    """

    play_id: str
    lane: int | None = None
    nodes: list[NodeRun] = attrs.field(factory=list)
    incomplete: int = 0
    outstanding: int = 0
    unsettled: int = 0
    failure: tuple[NodeRun, RequestStatus] | None = None
    censored: bool = False
    idle_since_ms: float | None = None

    @classmethod
    def of(cls, play_id: str, members: Iterable[tuple[int, Node]]) -> PlayRun:
        """A play that was not activated yet.

        Args:
            play_id: its id.
            members: (ordinal, node), ascending; every edge of a node names another one of them.
        """
        play = cls(play_id)
        play.nodes = [NodeRun(ordinal, node, play, len(node.edges)) for ordinal, node in members]
        play.incomplete = len(play.nodes)
        by_id = {run.node.request_id: run for run in play.nodes}
        for run in play.nodes:
            for edge in run.node.edges:
                by_id[edge.source].fires.setdefault(edge.trigger, []).append((run, edge.delay_ms))
        return play

    @property
    def client_finished(self) -> bool:
        """Whether no request of it will be dispatched or end any more."""
        return self.outstanding == 0 and (self.incomplete == 0 or self.failure is not None or self.censored)

    @property
    def has_ready(self) -> bool:
        """Whether some node waits for its gate only."""
        return any(run.mode is NodeMode.READY for run in self.nodes)

    @property
    def quiescent(self) -> bool:
        """Whether it is client-finished and nothing of it is left on the servers."""
        return self.client_finished and self.unsettled == 0


class PlayMachine:
    """Moves the nodes of activated plays on. Times are absolute [ms]."""

    def __init__(self) -> None:
        self._ready: list[tuple[float, int, NodeRun]] = []

    def activate(self, play: PlayRun, start_ms: float, base_ms: float) -> None:
        """Start a play's clock.

        Args:
            play: not activated before.
            start_ms: now.
            base_ms: the gate that counts as ``start_ms``; smaller ones do too.
        """
        play.idle_since_ms = start_ms
        for run in play.nodes:
            run.gate_ms = start_ms + max(0.0, run.node.not_before_ms - base_ms)
            if run.waits == 0:
                self._unblock(run)

    def next_ready_ms(self) -> float | None:
        """Gate of the first ready node, None if there is none."""
        while self._ready and not _is_current(*self._ready[0]):
            heapq.heappop(self._ready)
        return self._ready[0][0] if self._ready else None

    def sweep(self, now_ms: float) -> Iterator[NodeRun]:
        """Dispatch every node that is ready at ``now_ms``, in order of (gate, ordinal); ``gate_ms`` is its arrival.

        What a dispatch releases at once is part of the same sweep.
        """
        while (ready_ms := self.next_ready_ms()) is not None and ready_ms <= now_ms:
            _, _, run = heapq.heappop(self._ready)
            run.step(NodeInput.DISPATCH)
            run.busy = True
            run.play.outstanding += 1
            run.play.idle_since_ms = None
            run.play.unsettled += 1
            self._fire(run, Trigger.DISPATCH, ready_ms)
            yield run

    def end(self, run: NodeRun, status: RequestStatus, now_ms: float) -> list[NodeRun]:
        """The client saw the end of a dispatched node.

        Returns: the nodes that its failure makes skip, in ordinal order.
        Raises: ProtocolError if the node is not dispatched.
        """
        play = run.play
        if status is RequestStatus.COMPLETED:
            run.step(NodeInput.COMPLETE)
            self._ended_one(play, now_ms)
            play.incomplete -= 1
            self._fire(run, Trigger.COMPLETION, now_ms)
            return []
        run.step(NodeInput.FAIL)
        self._ended_one(play, now_ms)
        if play.failure is not None:
            return []
        play.failure = (run, status)
        skipped = [other for other in play.nodes if other.mode in (NodeMode.BLOCKED, NodeMode.READY)]
        for other in skipped:
            other.step(NodeInput.SKIP)
        return skipped

    def censor(self, play: PlayRun) -> int:
        """Take out every node that was not dispatched. Returns how many."""
        waiting = [run for run in play.nodes if run.mode in (NodeMode.BLOCKED, NodeMode.READY)]
        for run in waiting:
            run.step(NodeInput.CENSOR)
        play.censored = play.censored or bool(waiting)
        return len(waiting)

    def pull_forward(self, plays: Iterable[PlayRun], now_ms: float) -> tuple[float, int]:
        """Move the timers of idle plays so that the first of them is due.

        Timers are gates of ready nodes, and those of blocked nodes that lie in the future.

        Returns: by how much [ms], and how many; (0, 0) if nothing lies in the future.
        """
        timers = [
            run
            for play in plays
            for run in play.nodes
            if run.mode is NodeMode.READY or (run.mode is NodeMode.BLOCKED and run.gate_ms > now_ms)
        ]
        first_ms = min((run.gate_ms for run in timers), default=now_ms)
        if first_ms <= now_ms:
            return 0.0, 0
        shift_ms = first_ms - now_ms
        for run in timers:
            run.gate_ms -= shift_ms
            if run.mode is NodeMode.READY:
                heapq.heappush(self._ready, (run.gate_ms, run.ordinal, run))
        return shift_ms, len(timers)

    def _ended_one(self, play: PlayRun, now_ms: float) -> None:
        play.outstanding -= 1
        if play.outstanding == 0:
            play.idle_since_ms = now_ms

    def settle(self, run: NodeRun) -> None:
        """Nothing of an ended node is left on the servers.

        Raises: ProtocolError if it did not end, or was settled before.
        """
        if not run.busy or run.mode is NodeMode.DISPATCHED:
            raise ProtocolError(f"request {run.node.request_id!r} is {run.mode.value}: cannot settle")
        run.busy = False
        run.play.unsettled -= 1

    def _fire(self, run: NodeRun, trigger: Trigger, at_ms: float) -> None:
        if run.play.failure is not None or run.play.censored:
            return  # whatever waited was taken out
        for target, delay_ms in run.fires.get(trigger, ()):
            target.gate_ms = max(target.gate_ms, at_ms + delay_ms)
            target.waits -= 1
            if target.waits == 0:
                self._unblock(target)

    def _unblock(self, run: NodeRun) -> None:
        run.step(NodeInput.UNBLOCK)
        heapq.heappush(self._ready, (run.gate_ms, run.ordinal, run))


def _is_current(ready_ms: float, _: int, run: NodeRun) -> bool:
    """Whether an entry of the ready queue still says when its node is due."""
    return run.mode is NodeMode.READY and run.gate_ms == ready_ms
