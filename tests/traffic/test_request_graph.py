"""The request graph: canonical text, digests, order, and what makes a graph illegal."""

from __future__ import annotations

import json
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from g2sim.actors.traffic.canonical_json import canonical_json, float_text
from g2sim.actors.traffic.graph import Edge, Node, Relation, RequestGraph, Trigger
from g2sim.actors.traffic.lifecycle import LifecycleDigest, LifecycleEvent
from g2sim.actors.traffic.request import RequestStatus
from g2sim.bus.errors import ConfigError, InvariantViolation


def node(request_id: str, *sources: str, play: str = "p", ordinal: int | None = None, **changes: Any) -> Node:
    edges = tuple(
        Edge(source=source, trigger=Trigger.COMPLETION, delay_ms=0.0, relation=Relation.SEQUENCE) for source in sources
    )
    values: dict[str, Any] = {
        "request_id": request_id,
        "play_id": play,
        "session_id": "s",
        "model": "m",
        "input_tokens": 8,
        "output_tokens": 2,
        "hash_ids": (1, 2),
        "not_before_ms": 0.0,
        "edges": edges,
        "play_ordinal": ordinal,
    }
    return Node(**(values | changes))


def build(*nodes: Node) -> RequestGraph:
    return RequestGraph.build(4, nodes, lambda index: f"f:{index + 1}")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.0"),
        (-0.0, "-0.0"),
        (5.0, "5.0"),
        (750.0, "750.0"),
        (0.1, "0.1"),
        (1e-4, "0.0001"),
        (1.25e-5, "0.0000125"),
        (1e-5, "0.00001"),
        (-1e-5, "-0.00001"),
        (1e-6, "1e-6"),
        (1.5e-7, "1.5e-7"),
        (1e15, "1000000000000000.0"),
        (9007199254740993.0, "9007199254740992.0"),
        (1e16, "1e16"),
        (1.5e16, "1.5e16"),
        (1.7976931348623157e308, "1.7976931348623157e308"),
    ],
)
def test_float_text(value: float, text: str) -> None:
    assert float_text(value) == text


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_float_text_reads_back_and_is_no_integer(value: float) -> None:
    text = float_text(value)
    assert float(text) == value
    assert "." in text or "e" in text


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_digest_holds_no_nan_or_infinity(value: float) -> None:
    with pytest.raises(InvariantViolation):
        float_text(value)


def test_canonical_json_is_compact_and_keeps_characters() -> None:
    value = {"b": [1, 2], "a": None, "c": 'é\u2028"\\\n\x1f/', "d": [], "e": [1.0, 2], "f": Trigger.DISPATCH}
    text = '{"b":[1,2],"a":null,"c":"é\u2028\\"\\\\\\n\\u001f/","d":[],"e":[1.0,2],"f":"dispatch"}'
    assert canonical_json(value) == text
    assert json.loads(text) == value


def test_graph_digest_is_over_the_documented_bytes() -> None:
    """``am_two_roots`` as written out in the specification."""
    tail = '"priority":0,"strict_priority":0,"policy_class":null,"dependencies":[]}'
    both = ",".join(
        f'{{"request_id":"{name}","play_id":"p","session_id":"s","model":"m","input_length":8,"max_output_tokens":2,'
        f'"output_token_ids":null,"replay_key":null,"hash_ids":[1,2],"not_before_ms":{gate},{tail}'
        for name, gate in (("a", "0.0"), ("b", "15.0"))
    )
    digest = "cb7a040fb3c0065b72c048ff5c2794a822cf533735eeb47484772b862ec05054"
    assert blake3(f'{{"block_size":4,"nodes":[{both}]}}'.encode()).hexdigest() == digest
    assert build(node("b", not_before_ms=15.0), node("a")).digest() == digest


def test_every_authored_value_enters_the_digest() -> None:
    plain = build(node("a")).digest()
    changes: list[dict[str, Any]] = [
        {"priority": 1},
        {"strict_priority": 1},
        {"policy_class": ""},
        {"output_token_ids": (1, 2)},
        {"recorded_api_ms": 0.0},
        {"play_ordinal": 0},
        {"model": "n"},
    ]
    digests = {build(node("a", **change)).digest() for change in changes}
    assert len(digests | {plain}) == len(changes) + 1


def test_edges_enter_the_digest_in_canonical_order() -> None:
    edges = [
        Edge(source="a", trigger=Trigger.DISPATCH, delay_ms=9.0, relation=Relation.SPAWN),
        Edge(source="a", trigger=Trigger.COMPLETION, delay_ms=1.0, relation=Relation.SEQUENCE),
        Edge(source="a", trigger=Trigger.COMPLETION, delay_ms=0.0, relation=Relation.JOIN),
        Edge(source="a", trigger=Trigger.COMPLETION, delay_ms=2.0, relation=Relation.JOIN),
        Edge(source="b", trigger=Trigger.DISPATCH, delay_ms=0.0, relation=Relation.SPAWN),
    ]
    forth, back = (build(node("a"), node("b"), node("c", edges=tuple(given))) for given in (edges, edges[::-1]))
    assert forth.digest() == back.digest()
    assert canonical_json(back.nodes[2].digest_record()).count("request_id") == 6


def test_nodes_and_plays_are_in_byte_order() -> None:
    graph = build(node("outer:2", play="é"), node("outer:10", play="z"), node("😀", play="z"), node("\ufb01", play="a"))
    assert [n.request_id for n in graph.nodes] == ["outer:10", "outer:2", "\ufb01", "😀"]
    assert [(play.play_id, play.nodes, play.roots) for play in graph.plays] == [
        ("a", (2,), (2,)),
        ("z", (0, 3), (0, 3)),
        ("é", (1,), (1,)),
    ]


def test_plays_go_by_ordinal_where_they_have_one() -> None:
    graph = build(node("a", play="p", ordinal=1), node("b", play="q", ordinal=0), node("c", "a", play="p", ordinal=1))
    assert [(play.play_id, play.nodes, play.roots) for play in graph.plays] == [("q", (1,), (1,)), ("p", (0, 2), (0,))]


def test_normalisation_moves_the_whole_graph() -> None:
    graph = build(node("a", not_before_ms=7.0), node("b", play="q", not_before_ms=5.5)).normalised()
    assert [n.not_before_ms for n in graph.nodes] == [1.5, 0.0]
    assert graph.normalised() == graph


@pytest.mark.parametrize(
    ("nodes", "where", "field"),
    [
        ([node("a"), node("b"), node("a", play="q")], "f:3", "request_id"),
        ([node("a"), node("b", "a", "z")], "f:2", "dependencies[1].request_id"),
        ([node("a"), node("b", "b")], "f:2", "dependencies[0].request_id"),
        ([node("a"), node("b", "a", play="q")], "f:2", "dependencies[0].request_id"),
        ([node("r"), node("a", "r", "b"), node("b", "c"), node("c", "a")], "f:2", "dependencies"),
        ([node("a", ordinal=0), node("b")], "f:2", "source_play_ordinal"),
        ([node("a", ordinal=0), node("b", play="q", ordinal=0)], "f:1", "source_play_ordinal"),
        ([node("a", ordinal=0), node("b", play="q", ordinal=2)], "f:2", "source_play_ordinal"),
        ([node("a", ordinal=0), node("b", play="q")], "f:2", "source_play_ordinal"),
    ],
)
def test_illegal_graphs_are_refused(nodes: list[Node], where: str, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(*nodes)
    assert (caught.value.where, caught.value.field) == (where, field)


def test_a_circle_is_named_and_a_long_one_cut_short() -> None:
    with pytest.raises(ConfigError, match="wait for each other: a -> b -> c -> a"):
        build(node("r"), node("a", "r", "b"), node("b", "c"), node("c", "a"), node("d", "c"))
    ring = [node(f"n{k}", f"n{(k + 1) % 5000}") for k in range(5000)]
    with pytest.raises(ConfigError, match=r"n0 -> n1 -> n2 -> \.\.\. -> n4998 -> n4999 -> n0"):
        build(*ring)


@pytest.mark.parametrize(
    ("request_id", "event", "status"),
    [
        (None, LifecycleEvent.DISPATCH, None),
        ("a", LifecycleEvent.PLAY_QUIESCENT, None),
        ("a", LifecycleEvent.CAUSAL_TERMINAL, None),
        ("a", LifecycleEvent.QUIESCENT, RequestStatus.COMPLETED),
    ],
)
def test_lifecycle_events_must_be_whole(
    request_id: str | None, event: LifecycleEvent, status: RequestStatus | None
) -> None:
    lifecycle = LifecycleDigest()
    with pytest.raises(InvariantViolation):
        lifecycle.feed(0.0, "p", request_id, event, status)
    assert lifecycle.count == 0
