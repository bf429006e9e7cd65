"""The request graph of agentic traffic: plays made of nodes, nodes joined by typed edges.

Owns: what nodes and edges are, which graphs are legal, the order of plays and nodes, start normalisation, speed-up,
who a node is in reports, and the graph digest. Refuses to know: file formats, lanes, and what happens at run time.
"""

from __future__ import annotations

import enum
import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import attrs
from blake3 import blake3

from g2sim.actors.traffic.canonical_json import canonical_json
from g2sim.actors.traffic.request import AgenticIdentity
from g2sim.bus.errors import ConfigError

MAX_TIME_MS = 2.0**53
"""Largest time or delay that agentic traffic may hold [ms]: float64 cannot tell milliseconds apart above it."""


class Trigger(enum.StrEnum):
    """What of the source fires an edge. In canonical order."""

    DISPATCH = "dispatch"
    COMPLETION = "completion"


class Relation(enum.StrEnum):
    """Why an edge is there. In canonical order."""

    SEQUENCE = "sequence"
    SPAWN = "spawn"
    JOIN = "join"
    REPLAY_BARRIER = "replay_barrier"


_TRIGGER_RANK = {trigger: rank for rank, trigger in enumerate(Trigger)}
_RELATION_RANK = {relation: rank for rank, relation in enumerate(Relation)}


@attrs.frozen(kw_only=True, slots=True)
class Edge:
    """The node that holds this edge waits for ``source``.

    Attributes:
        source: request id of a node of the same play.
        trigger: whether its dispatch or its completion counts.
        delay_ms: time from the trigger to the earliest dispatch of the waiting node [ms].
        relation: why; only a spawn may wait for a dispatch.
    """

    source: str
    trigger: Trigger
    delay_ms: float
    relation: Relation


def canonical_edges(edges: Iterable[Edge]) -> list[Edge]:
    """Edges by source, trigger, relation and delay."""

    def key(edge: Edge) -> tuple[str, int, int, float]:
        return (edge.source, _TRIGGER_RANK[edge.trigger], _RELATION_RANK[edge.relation], edge.delay_ms)

    return sorted(edges, key=key)


@attrs.frozen(kw_only=True, slots=True)
class Node:
    """One request of a play.

    Attributes:
        request_id: unique in the graph.
        play_id, session_id, model: play, conversation and recorded model.
        input_tokens, output_tokens: lengths; ``output_tokens`` may be 0.
        hash_ids: one id for each block of the prompt, the last of which may be partial.
        not_before_ms: gate, the earliest start [ms].
        edges: what it waits for; an edge may occur twice and then counts twice.
        play_ordinal: position of the play in its source, None where plays go by their ids.
        recorded_api_ms: recorded service time [ms], None if unknown.
        output_token_ids: the tokens it generates, if the trace says which.
        priority, strict_priority, policy_class: authored values; they enter the digest only.
    """

    request_id: str
    play_id: str
    session_id: str
    model: str
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]
    not_before_ms: float
    edges: tuple[Edge, ...] = ()
    play_ordinal: int | None = None
    recorded_api_ms: float | None = None
    output_token_ids: tuple[int, ...] | None = None
    priority: int = 0
    strict_priority: int = 0
    policy_class: str | None = None

    def digest_record(self) -> dict[str, object]:
        """What of the node enters the graph digest, under the names and in the order of the reference."""
        record: dict[str, object] = {"request_id": self.request_id, "play_id": self.play_id}
        if self.play_ordinal is not None:
            record["source_play_ordinal"] = self.play_ordinal
        record |= {
            "session_id": self.session_id,
            "model": self.model,
            "input_length": self.input_tokens,
            "max_output_tokens": self.output_tokens,
            "output_token_ids": self.output_token_ids,
            "replay_key": None if self.output_token_ids is None else self.request_id,
            "hash_ids": self.hash_ids,
            "not_before_ms": self.not_before_ms,
        }
        if self.recorded_api_ms is not None:
            record["recorded_api_time_ms"] = self.recorded_api_ms
        return record | {
            "priority": self.priority,
            "strict_priority": self.strict_priority,
            "policy_class": self.policy_class,
            "dependencies": [
                {
                    "request_id": edge.source,
                    "trigger": edge.trigger,
                    "delay_ms": edge.delay_ms,
                    "relation": edge.relation,
                }
                for edge in canonical_edges(self.edges)
            ],
        }


@attrs.frozen(kw_only=True, slots=True)
class Play:
    """A tree (or forest) of requests that belong together.

    Attributes:
        play_id: its id.
        nodes: ordinals of its nodes, ascending.
        roots: ordinals of those without edges, ascending; at least one.
    """

    play_id: str
    nodes: tuple[int, ...]
    roots: tuple[int, ...]


@attrs.frozen(kw_only=True)
class RequestGraph:
    """A legal graph.

    Attributes:
        block_size_tokens: tokens that one hash id stands for.
        nodes: by request id in byte order; the position is the node ordinal, which settles every tie.
        plays: in play order: by ordinal where plays have one, else by play id in byte order.
    """

    block_size_tokens: int
    nodes: tuple[Node, ...]
    plays: tuple[Play, ...]

    @classmethod
    def build(cls, block_size_tokens: int, nodes: Sequence[Node], where: Callable[[int], str]) -> RequestGraph:
        """Put nodes in order and group them.

        Strings without surrogates sort by code point as their UTF-8 bytes do, so plain comparison is byte order.

        Args:
            block_size_tokens: tokens that one hash id stands for.
            nodes: in file order.
            where: index in ``nodes`` -> "file:line", for messages.
        Raises: ConfigError if a request id is used twice, an edge does not fit, edges form a circle, or play ordinals
            are not complete.
        """
        _check_nodes(nodes, where)
        _check_play_ordinals(nodes, where)
        ordered = tuple(sorted(nodes, key=lambda node: node.request_id))
        members: dict[str, list[int]] = {}
        for ordinal, node in enumerate(ordered):
            members.setdefault(node.play_id, []).append(ordinal)
        plays = [
            Play(play_id=play_id, nodes=tuple(own), roots=tuple(n for n in own if not ordered[n].edges))
            for play_id, own in members.items()
        ]
        plays.sort(key=lambda play: (ordered[play.nodes[0]].play_ordinal or 0, play.play_id))
        return cls(block_size_tokens=block_size_tokens, nodes=ordered, plays=tuple(plays))

    @property
    def source_models(self) -> tuple[str, ...]:
        """The recorded models, sorted."""
        return tuple(sorted({node.model for node in self.nodes}))

    def normalised(self) -> RequestGraph:
        """The graph with every gate moved so that the smallest of the whole graph is 0."""
        first_ms = min(node.not_before_ms for node in self.nodes)
        return self._with_times(lambda ms: ms - first_ms, lambda ms: ms)

    def sped_up(self, speedup: float) -> RequestGraph:
        """The graph with every gate and every edge delay divided by ``speedup``.

        Raises: ConfigError unless ``speedup`` is finite and > 0 and keeps times representable.
        """
        if type(speedup) not in (int, float) or not 0.0 < speedup < float("inf"):
            raise ConfigError("arrival_speedup_ratio", got=speedup, allowed="a finite number > 0")
        if speedup == 1.0:
            return self

        def divided(ms: float) -> float:
            if ms > MAX_TIME_MS * speedup:
                allowed = f"a ratio that leaves every time below {MAX_TIME_MS:g} ms"
                raise ConfigError("arrival_speedup_ratio", got=speedup, allowed=allowed)
            return ms / speedup

        return self._with_times(divided, divided)

    def _with_times(self, gate: Callable[[float], float], delay: Callable[[float], float]) -> RequestGraph:
        nodes = (
            attrs.evolve(
                node,
                not_before_ms=gate(node.not_before_ms),
                edges=tuple(attrs.evolve(edge, delay_ms=delay(edge.delay_ms)) for edge in node.edges),
            )
            for node in self.nodes
        )
        return attrs.evolve(self, nodes=tuple(nodes))

    def digest(self) -> str:
        """BLAKE3 of the graph's canonical JSON, in hex."""
        hasher = blake3(f'{{"block_size":{self.block_size_tokens},"nodes":['.encode())
        for ordinal, node in enumerate(self.nodes):
            hasher.update(("," if ordinal else "").encode() + canonical_json(node.digest_record()).encode())
        return hasher.update(b"]}").hexdigest()

    def topological_rank(self) -> list[int]:
        """Position of each node when the lowest ordinal that waits for none before it is always taken next."""
        ordinal_of = {node.request_id: ordinal for ordinal, node in enumerate(self.nodes)}
        waits = [len(node.edges) for node in self.nodes]
        targets: list[list[int]] = [[] for _ in self.nodes]
        for ordinal, node in enumerate(self.nodes):
            for edge in node.edges:
                targets[ordinal_of[edge.source]].append(ordinal)
        free = [ordinal for ordinal, count in enumerate(waits) if count == 0]  # ascending, so a heap
        ranks = [0] * len(self.nodes)
        for rank in range(len(self.nodes)):
            taken = heapq.heappop(free)
            ranks[taken] = rank
            for target in targets[taken]:
                waits[target] -= 1
                if waits[target] == 0:
                    heapq.heappush(free, target)
        return ranks

    def identity(self, play: Play, ordinal: int, lane: int | None) -> AgenticIdentity:
        """Who a node is in reports. A play with several roots has no root, a node without spawn edge no parent."""
        node = self.nodes[ordinal]
        spawns = (edge.source for edge in node.edges if edge.relation is Relation.SPAWN)
        return AgenticIdentity(
            play_id=node.play_id,
            conversation_id=node.session_id,
            lane_id=None if lane is None else lane_name(lane),
            root_id=self.nodes[play.roots[0]].request_id if len(play.roots) == 1 else None,
            parent_id=min(spawns, default=None),  # smallest id = lowest ordinal
        )


def lane_name(lane: int) -> str:
    """What reports call a lane, numbered from 0."""
    return f"lane:{lane}"


def uuid_of(ordinal: int) -> int:
    """The 128-bit number that reports show for a node."""
    return ordinal + 1


@attrs.frozen(kw_only=True)
class AgenticCorpus:
    """What a reader of agentic traffic returns.

    Attributes:
        graph: after start normalisation, before any speed-up.
        source_format, source_digest: where it came from.
        nested_basis: how inner timestamps of a Weka corpus were read, None for other formats.
        notes: remarks for the user, one line each, on input that was accepted although something is odd.
    """

    graph: RequestGraph
    source_format: str
    source_digest: str
    nested_basis: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def block_size_tokens(self) -> int:
        return self.graph.block_size_tokens

    @property
    def source_models(self) -> tuple[str, ...]:
        return self.graph.source_models


def _check_nodes(nodes: Sequence[Node], where: Callable[[int], str]) -> None:
    index_of: dict[str, int] = {}
    for index, node in enumerate(nodes):
        first = index_of.setdefault(node.request_id, index)
        if first != index:
            allowed = f"an id used once; it stands at {where(first)} too"
            raise ConfigError("request_id", got=node.request_id, allowed=allowed, where=where(index))
    for index, node in enumerate(nodes):
        for number, edge in enumerate(node.edges):
            field = f"dependencies[{number}].request_id"
            source = index_of.get(edge.source)
            if source is None:
                raise ConfigError(field, got=edge.source, allowed="a request of the same play", where=where(index))
            if source == index:
                raise ConfigError(field, got=edge.source, allowed="another request", where=where(index))
            if nodes[source].play_id != node.play_id:
                allowed = f"a request of the same play; this one is of {nodes[source].play_id!r}"
                raise ConfigError(field, got=edge.source, allowed=allowed, where=where(index))
    _check_acyclic(nodes, index_of, where)


def _check_acyclic(nodes: Sequence[Node], index_of: dict[str, int], where: Callable[[int], str]) -> None:
    waits = [len(node.edges) for node in nodes]
    targets: list[list[int]] = [[] for _ in nodes]
    for index, node in enumerate(nodes):
        for edge in node.edges:
            targets[index_of[edge.source]].append(index)
    free = [index for index, count in enumerate(waits) if count == 0]
    for index in free:
        for target in targets[index]:
            waits[target] -= 1
            if waits[target] == 0:
                free.append(target)
    if len(free) == len(nodes):
        return
    # Every node that is left waits for another one that is left, so walking to such a source must come round.
    here = next(index for index, count in enumerate(waits) if count)
    walk: dict[int, str] = {}
    while here not in walk:
        walk[here] = nodes[here].request_id
        here = next(source for edge in nodes[here].edges if waits[source := index_of[edge.source]])
    circle = list(walk.values())[list(walk).index(here) :]
    shown = circle if len(circle) <= 6 else [*circle[:3], "...", *circle[-2:]]
    problem = f"requests wait for each other: {' -> '.join([*shown, circle[0]])}"
    raise ConfigError("dependencies", problem=problem, allowed="no circle", where=where(here))


def _check_play_ordinals(nodes: Sequence[Node], where: Callable[[int], str]) -> None:
    field = "source_play_ordinal"
    first_of: dict[str, int] = {}
    for index, node in enumerate(nodes):
        first = first_of.setdefault(node.play_id, index)
        if node.play_ordinal != nodes[first].play_ordinal:
            allowed = f"one value in a play; {where(first)} has {nodes[first].play_ordinal}"
            raise ConfigError(field, got=node.play_ordinal, allowed=allowed, where=where(index))
    ordinals = {index: nodes[index].play_ordinal for index in first_of.values()}
    if set(ordinals.values()) == {None}:
        return
    taken = Counter(ordinals.values())
    for index, ordinal in ordinals.items():
        if ordinal is None or ordinal >= len(ordinals) or taken[ordinal] > 1:
            allowed = f"0 to {len(ordinals) - 1}, each on one play (or on no play at all)"
            raise ConfigError(field, got=ordinal, allowed=allowed, where=where(index))
