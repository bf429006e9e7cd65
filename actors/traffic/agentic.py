"""Driver of agentic traffic: which play starts where and when, and how its requests appear outside.

A corpus goes in; plays run all at once on their recorded offsets, or a few at a time on lanes that share one queue.

Owns: lanes, identities and token numbers of requests.
Refuses to know: gates and edges (``plays``), what ends lead to (``play_driver``), and snapshots (``instances``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import cached_property

from g2sim.actors.kv.prompt import RunPrompt, token_array
from g2sim.actors.traffic.graph import AgenticCorpus, Play, uuid_of
from g2sim.actors.traffic.play_driver import PlayDriver
from g2sim.actors.traffic.plays import NodeRun, PlayRun
from g2sim.actors.traffic.request import RequestSpec
from g2sim.bus.errors import ConfigError


class AgenticDriver(PlayDriver):
    """A ``TrafficDriver`` for the plays of a corpus, each of which runs once.

    Args:
        corpus: what a reader returned.
        speedup: divides every gate and every delay, finite and > 0.
        lanes: plays that run at a time, >= 1; None runs all of them from time 0.
    Raises: ConfigError if an argument is out of range.
    """

    def __init__(self, corpus: AgenticCorpus, *, speedup: float = 1.0, lanes: int | None = None) -> None:
        if lanes is not None and (type(lanes) is not int or lanes < 1):
            raise ConfigError("agentic_lanes", got=lanes, allowed="an integer >= 1")
        super().__init__()
        self.graph = corpus.graph.sped_up(speedup)
        self._token_of = _numbered(block for node in self.graph.nodes for block in node.hash_ids)
        self._sources = {play.play_id: play for play in self.graph.plays}
        for play in self.graph.plays:
            self._add(self._instance(play))
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


def _numbered(values: Iterable[int]) -> dict[int, int]:
    """Distinct values, numbered from 0 in order of first occurrence."""
    numbers: dict[int, int] = {}
    for value in values:
        numbers.setdefault(value, len(numbers))
    return numbers
