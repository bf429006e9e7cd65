"""Snapshots: where a play is cut, what is left of it, and who its requests are.

Owns: the seeded cut, the state that history leaves behind, ids and token ranges of play instances.
Refuses to know: time of a run, lanes that become free, and who serves requests.

An *instance* is one run of a source play, on a lane, numbered on that lane from 0. No two instances of a run share an
id, a cache or a token, so that nothing of one can be found in any tier for another.

Source: workloads 6.5, 8 and 10.1; checked against the reference's recordings.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import attrs
from blake3 import blake3

from g2sim.actors.kv.prompt import OUTPUT_TOKEN_BASE
from g2sim.actors.traffic.canonical_json import canonical_json
from g2sim.actors.traffic.graph import Edge, Node, Play, Relation, RequestGraph, Trigger, canonical_edges
from g2sim.actors.traffic.request import AgenticIdentity
from g2sim.bus.errors import ConfigError

KEY_SCHEMA = "aisimulate.agentic.snapshot.v1"


@attrs.frozen(kw_only=True)
class Cut:
    """A source play, cut at an instant of its recording.

    Attributes:
        at_ms: the instant; what was recorded before it is history and is not executed [ms].
        first_ms, last_ms: smallest and largest recorded start of the play [ms].
        history: ordinals of historical nodes.
        delay_ms: for each remaining node, ascending, the rest of its recorded delay [ms].
        driven: remaining nodes that wait for other remaining nodes and for no historical sequence or spawn edge.
        primers: for each conversation with history and remaining nodes its last historical node, in order of the
            conversations' ids.
    """

    at_ms: float
    first_ms: float
    last_ms: float
    history: frozenset[int]
    delay_ms: dict[int, float]
    driven: frozenset[int]
    primers: tuple[int, ...]


@attrs.frozen(kw_only=True)
class Instance:
    """One run of a source play. ``slot`` numbers its token range."""

    play: Play
    play_id: str
    lane: int
    ordinal: int
    slot: int
    cut: Cut

    @property
    def cache_id(self) -> str:
        """Name of the instance's namespace of blocks."""
        return f"{self.play_id}:cache"

    def request_id(self, source_id: str) -> str:
        """What a source request is called in this instance."""
        return f"{self.play_id}:request:{source_id}"

    def conversation_id(self, source_id: str) -> str:
        """What a source conversation is called in this instance."""
        return f"{self.play_id}:conversation:{source_id}"


class InstanceMaker:
    """Makes the instances of a run.

    Args:
        graph: after start normalisation, before any speed-up.
        seed: of the cuts, 0 to 2**64 - 1.
        lanes: number of lanes.
    """

    def __init__(self, graph: RequestGraph, *, seed: int, lanes: int) -> None:
        self.graph = graph
        self.seed = seed
        self.lanes = lanes
        self._ordinal_of = {node.request_id: ordinal for ordinal, node in enumerate(graph.nodes)}
        self._ranks = {play.play_id: _ranks(graph, play) for play in graph.plays}
        self._stride = max(1, *(len(ranks) for ranks in self._ranks.values()))

    @cached_property
    def digest(self) -> str:
        """Digest of the graph."""
        return self.graph.digest()

    def make(self, source: int, lane: int, ordinal: int) -> Instance:
        """Play number ``source`` as the ``ordinal``-th on ``lane``. Only the first of a lane has history.

        Raises: ConfigError if history would depend on what is left, or the run has no token range left.
        """
        play = self.graph.plays[source]
        slot = ordinal * self.lanes + lane
        if (slot + 1) * self._stride > OUTPUT_TOKEN_BASE:
            problem = f"play instance {slot} would need prompt tokens above {OUTPUT_TOKEN_BASE}"
            raise ConfigError(
                "traffic.load.agentic_profile", problem=problem, hint="a shorter duration, or fewer lanes"
            )
        return Instance(
            play=play,
            play_id=f"agentic-v1:{self.digest}:{self.seed}:{lane}:{ordinal}",
            lane=lane,
            ordinal=ordinal,
            slot=slot,
            cut=self._cut(play, lane, ordinal),
        )

    def tokens(self, instance: Instance, node: Node) -> tuple[int, ...]:
        """One token id for each block of a prompt, out of the instance's own range."""
        base, ranks = instance.slot * self._stride, self._ranks[instance.play.play_id]
        return tuple(base + ranks[block] for block in node.hash_ids)

    def uuid(self, instance: Instance, ordinal: int) -> int:
        """The 128-bit number that reports show for a node of an instance."""
        return instance.slot * (len(self.graph.nodes) + 1) + ordinal + 1

    def identity(self, instance: Instance, ordinal: int) -> AgenticIdentity:
        """Who a node of an instance is. Its root and parent are instance ids, also where they are history."""
        source = self.graph.identity(instance.play, ordinal, instance.lane)
        return AgenticIdentity(
            play_id=instance.play_id,
            conversation_id=instance.conversation_id(source.conversation_id),
            lane_id=source.lane_id,
            root_id=None if source.root_id is None else instance.request_id(source.root_id),
            parent_id=None if source.parent_id is None else instance.request_id(source.parent_id),
            cache_id=instance.cache_id,
        )

    def described(self, instance: Instance) -> dict[str, Any]:
        """The instance as reports list it, but for what all instances share (schema and graph)."""
        nodes, cut = self.graph.nodes, instance.cut
        return {
            "seed": self.seed,
            "lane_id": instance.lane,
            "play_ordinal": instance.ordinal,
            "source_play_id": instance.play.play_id,
            "play_id": instance.play_id,
            "cache_id": instance.cache_id,
            "t_star_ms": cut.at_ms,
            "recorded_start_ms": cut.first_ms,
            "recorded_last_start_ms": cut.last_ms,
            "requests": [self._described_node(instance, ordinal) for ordinal in instance.play.nodes],
            "primers": [
                {
                    "source_request_id": nodes[ordinal].request_id,
                    "request_id": instance.request_id(nodes[ordinal].request_id),
                    "conversation_id": instance.conversation_id(nodes[ordinal].session_id),
                    "input_length": nodes[ordinal].input_tokens,
                }
                for ordinal in cut.primers
            ],
        }

    def _described_node(self, instance: Instance, ordinal: int) -> dict[str, Any]:
        node, cut = self.graph.nodes[ordinal], instance.cut
        historical = ordinal in cut.history
        pending = [] if historical else [edge.source for edge in canonical_edges(self.remaining_edges(cut, node))]
        return {
            "source_request_id": node.request_id,
            "identity": {
                "request_id": instance.request_id(node.request_id),
                **{key: value for key, value in attrs.asdict(self.identity(instance, ordinal)).items() if value},
            },
            "recorded_start_ms": node.not_before_ms,
            "recorded_end_ms": None if node.recorded_api_ms is None else node.not_before_ms + node.recorded_api_ms,
            "historical": historical,
            "remaining_delay_ms": cut.delay_ms.get(ordinal, 0.0),
            "pending_dependencies": [instance.request_id(source) for source in pending],
        }

    def remaining_edges(self, cut: Cut, node: Node) -> list[Edge]:
        """The edges of a node whose source is not history."""
        return [edge for edge in node.edges if self._ordinal_of[edge.source] not in cut.history]

    def _cut(self, play: Play, lane: int, ordinal: int) -> Cut:
        nodes = self.graph.nodes
        starts = [nodes[number].not_before_ms for number in play.nodes]
        first_ms, last_ms = min(starts), max(starts)
        at_ms = first_ms
        if ordinal == 0:
            key = canonical_json([KEY_SCHEMA, self.seed, self.digest, play.play_id, lane, ordinal])
            bits = int.from_bytes(blake3(key.encode()).digest()[:8], "little")
            at_ms = first_ms + (0.25 + 0.5 * ((bits >> 11) / 2.0**53)) * (last_ms - first_ms)
        history = frozenset(number for number in play.nodes if nodes[number].not_before_ms < at_ms)
        delay_ms: dict[int, float] = {}
        driven = set()
        for number in play.nodes:
            node = nodes[number]
            if number in history:
                self._check_history(node, history)
                continue
            due_ms = max(0.0, node.not_before_ms - at_ms)
            past = [edge for edge in node.edges if self._ordinal_of[edge.source] in history]
            for edge in past:
                source = nodes[self._ordinal_of[edge.source]]
                fired_ms = source.not_before_ms
                if edge.trigger is Trigger.COMPLETION:
                    fired_ms += source.recorded_api_ms or 0.0
                due_ms = max(due_ms, fired_ms + edge.delay_ms - at_ms)
            delay_ms[number] = due_ms
            if len(past) < len(node.edges) and not any(
                edge.relation in (Relation.SEQUENCE, Relation.SPAWN) for edge in past
            ):
                driven.add(number)
        return Cut(
            at_ms=at_ms,
            first_ms=first_ms,
            last_ms=last_ms,
            history=history,
            delay_ms=delay_ms,
            driven=frozenset(driven),
            primers=self._primers(play, history),
        )

    def _check_history(self, node: Node, history: frozenset[int]) -> None:
        for edge in node.edges:
            if self._ordinal_of[edge.source] not in history:
                problem = (
                    f"request {node.request_id!r} was recorded before the cut, and waits for {edge.source!r}, "
                    "which was recorded after it"
                )
                raise ConfigError("traffic.load.agentic_snapshot", problem=problem, hint="another seed")

    def _primers(self, play: Play, history: frozenset[int]) -> tuple[int, ...]:
        nodes = self.graph.nodes
        remaining = {nodes[number].session_id for number in play.nodes if number not in history}
        last: dict[str, int] = {}
        for number in history:
            session = nodes[number].session_id
            if session in remaining:
                rank = self._topological_rank
                last[session] = max(
                    last.get(session, number), number, key=lambda one: (nodes[one].not_before_ms, rank[one])
                )
        return tuple(last[session] for session in sorted(last))

    @cached_property
    def _topological_rank(self) -> Sequence[int]:
        return self.graph.topological_rank()


def _ranks(graph: RequestGraph, play: Play) -> dict[int, int]:
    """Distinct hash ids of a play, numbered in order of first occurrence over its nodes."""
    ranks: dict[int, int] = {}
    for ordinal in play.nodes:
        for block in graph.nodes[ordinal].hash_ids:
            ranks.setdefault(block, len(ranks))
    return ranks
