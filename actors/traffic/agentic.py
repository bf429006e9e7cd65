"""Driver of agentic traffic: which play starts where and when, and how its requests appear outside.

A corpus goes in; plays run all at once on their recorded offsets, or a few at a time on lanes that share one queue.

Owns: lanes, identities and token numbers of requests, and the events that follow from ends.
Refuses to know: gates and edges (``plays``) and who serves the requests.

Every run of a source play is a ``PlayRun`` made by ``_instance``, started by ``_start`` and described by ``_spec``, and
``_client_finished`` says what its end leads to. These four hold all that snapshots, warmup and profiles vary: the nodes
and gates that are left after a cut, ids, token range and cache of an instance, the clock it starts on, and recycling.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property

from g2sim.actors.kv.prompt import RunPrompt, token_array
from g2sim.actors.traffic.events import PlaySettled, RequestSkipped
from g2sim.actors.traffic.graph import AgenticCorpus, Play, Trigger, lane_name, uuid_of
from g2sim.actors.traffic.plays import NodeMode, NodeRun, PlayMachine, PlayRun
from g2sim.actors.traffic.request import Release, RequestSpec, RequestStatus
from g2sim.bus.errors import ConfigError, ProtocolError


class AgenticDriver:
    """A ``TrafficDriver`` for plays. The key of a release is its node ordinal.

    Args:
        corpus: what a reader returned.
        speedup: divides every gate and every delay, finite and > 0.
        lanes: plays that run at a time, >= 1; None runs all of them from time 0.
    Raises: ConfigError if an argument is out of range.
    """

    def __init__(self, corpus: AgenticCorpus, *, speedup: float = 1.0, lanes: int | None = None) -> None:
        if lanes is not None and (type(lanes) is not int or lanes < 1):
            raise ConfigError("agentic_lanes", got=lanes, allowed="an integer >= 1")
        self.graph = corpus.graph.sped_up(speedup)
        self._machine = PlayMachine()
        self._now_ms = 0.0
        self._token_of = _numbered(block for node in self.graph.nodes for block in node.hash_ids)
        self._sources = {play.play_id: play for play in self.graph.plays}
        self._plays = [self._instance(play) for play in self.graph.plays]
        self._runs = {run.ordinal: run for play in self._plays for run in play.nodes}
        self._queue = deque(self._plays)
        if lanes is None:
            while self._queue:
                self._machine.activate(self._queue.popleft(), start_ms=0.0, base_ms=0.0)
        else:
            for lane in range(min(lanes, len(self._queue))):
                self._start(self._queue.popleft(), lane, 0.0)

    @cached_property
    def graph_digest(self) -> str:
        """Digest of the graph as it is replayed, after normalisation and speed-up."""
        return self.graph.digest()

    @property
    def total_requests(self) -> int:
        return len(self._runs)

    def next_ready_ms(self) -> float | None:
        """The earliest ready time of a request that can be released [ms], None if there is none."""
        return self._machine.next_ready_ms()

    def release(self, now_ms: float) -> list[Release]:
        """Every request with a ready time <= ``now_ms`` [ms], in the order in which it must be routed."""
        self._advance(now_ms)
        return [Release(run.ordinal, run.gate_ms, self._spec(run)) for run in self._machine.sweep(now_ms)]

    def ended(
        self, ends: Sequence[tuple[int, RequestStatus]], now_ms: float, *, busy: Collection[int] = ()
    ) -> list[RequestSkipped | PlaySettled]:
        """Released requests ended at ``now_ms`` [ms], in any order: ends of one instant count in ordinal order.

        Args:
            ends: (key, status) of all requests that end at this point of the instant.
            now_ms: the instant.
            busy: keys among them of which something is left on the servers; ``quiesced`` must follow for them.
        Returns: requests that a failure makes skip, then plays that settle.
        Raises: ProtocolError if a key is unknown or not outstanding.
        """
        self._advance(now_ms)
        events: list[RequestSkipped | PlaySettled] = []
        for key, status in sorted(ends):
            run = self._run(key)
            name = run.node.request_id
            for skipped in self._machine.end(run, status, now_ms):
                events.append(RequestSkipped(name=skipped.node.request_id, play_id=run.play.play_id, because=name))
            if run.play.client_finished:
                self._client_finished(run.play, now_ms)
        return events + self.quiesced([key for key, _ in ends if key not in busy], now_ms)

    def quiesced(self, keys: Iterable[int], now_ms: float) -> list[RequestSkipped | PlaySettled]:
        """Nothing is left on the servers of requests that had ended busy, or end right now.

        Returns: plays that settle.
        """
        self._advance(now_ms)
        events: list[RequestSkipped | PlaySettled] = []
        for key in sorted(keys):
            run = self._run(key)
            self._machine.settle(run)
            if run.play.quiescent:
                events.append(_settled(run.play))
        return events

    def waiting(self) -> list[str]:
        """One line for each request and play that cannot go on by itself."""
        lines = []
        queued = set(self._queue)
        for play in self._plays:
            if play in queued:
                lines.append(f"play {play.play_id!r} waits for a lane")
                continue
            modes = {run.node.request_id: run.mode for run in play.nodes}
            for run in play.nodes:
                if run.mode is NodeMode.DISPATCHED:
                    lines.append(f"request {run.node.request_id!r} was released and has not ended")
                elif run.mode is NodeMode.BLOCKED:
                    lines.append(f"request {run.node.request_id!r} waits for {_open_sources(run, modes)}")
                elif run.busy:
                    lines.append(f"request {run.node.request_id!r} ended and has not left the servers")
        return lines

    def _instance(self, play: Play) -> PlayRun:
        return PlayRun.of(play.play_id, ((ordinal, self.graph.nodes[ordinal]) for ordinal in play.nodes))

    def _start(self, play: PlayRun, lane: int, now_ms: float) -> None:
        """Give a lane to a play. Its first root starts now, whatever the recording says."""
        play.lane = lane
        roots = self._sources[play.play_id].roots
        base_ms = min(self.graph.nodes[root].not_before_ms for root in roots)
        self._machine.activate(play, start_ms=now_ms, base_ms=base_ms)

    def _client_finished(self, play: PlayRun, now_ms: float) -> None:
        if play.lane is not None and self._queue:
            self._start(self._queue.popleft(), play.lane, now_ms)

    def _spec(self, run: NodeRun) -> RequestSpec:
        node = run.node
        return RequestSpec(
            name=node.request_id,
            session_id=node.session_id,
            turn_index=None,
            prompt=RunPrompt(
                ids=tuple(self._token_of[block] for block in node.hash_ids),
                run_tokens=min(self.graph.block_size_tokens, node.input_tokens),
                length=node.input_tokens,
            ),
            output_tokens=node.output_tokens,
            agentic=self.graph.identity(self._sources[run.play.play_id], run.ordinal, run.play.lane),
            uuid=uuid_of(run.ordinal),
            output_ids=token_array(node.output_token_ids),
        )

    def _run(self, key: int) -> NodeRun:
        run = self._runs.get(key)
        if run is None:
            raise ProtocolError(f"key {key!r} was never released")
        return run

    def _advance(self, now_ms: float) -> None:
        if not self._now_ms <= now_ms < math.inf:
            raise ProtocolError(f"time goes from {self._now_ms!r} ms to {now_ms!r} ms")
        self._now_ms = now_ms


def _numbered(values: Iterable[int]) -> dict[int, int]:
    """Distinct values, numbered from 0 in order of first occurrence."""
    numbers: dict[int, int] = {}
    for value in values:
        numbers.setdefault(value, len(numbers))
    return numbers


def _settled(play: PlayRun) -> PlaySettled:
    lane_id = None if play.lane is None else lane_name(play.lane)
    if play.failure is None:
        return PlaySettled(
            play_id=play.play_id, lane_id=lane_id, status="completed", failure_request_id=None, failure_status=None
        )
    failed, status = play.failure
    return PlaySettled(
        play_id=play.play_id,
        lane_id=lane_id,
        status="failed",
        failure_request_id=failed.node.request_id,
        failure_status=status.value,
    )


def _open_sources(run: NodeRun, modes: dict[str, NodeMode]) -> str:
    """The triggers that a blocked node waits for."""
    fired = {
        Trigger.DISPATCH: (NodeMode.DISPATCHED, NodeMode.COMPLETED, NodeMode.FAILED),
        Trigger.COMPLETION: (NodeMode.COMPLETED,),
    }
    return ", ".join(
        f"{edge.trigger} of {edge.source!r}" for edge in run.node.edges if modes[edge.source] not in fired[edge.trigger]
    )
