"""The agentic driver: gates, edges, lanes and failures, against rules worked out from the graph alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from g2sim.actors.traffic.agentic import AgenticDriver
from g2sim.actors.traffic.events import PlaySettled, RequestSkipped
from g2sim.actors.traffic.graph import AgenticCorpus, Edge, Node, Relation, RequestGraph, Trigger
from g2sim.actors.traffic.plays import NEXT_MODE, NodeInput, NodeMode, NodeRun, PlayRun
from g2sim.actors.traffic.request import RequestStatus, TrafficDriver
from g2sim.bus.errors import ConfigError, ProtocolError

DONE, REJECTED, FAILED = RequestStatus.COMPLETED, RequestStatus.REJECTED, RequestStatus.FAILED
SEQUENCE, SPAWN = Relation.SEQUENCE, Relation.SPAWN


def edge(source: str, delay_ms: float = 0.0, trigger: Trigger = Trigger.COMPLETION) -> Edge:
    relation = SPAWN if trigger is Trigger.DISPATCH else SEQUENCE
    return Edge(source=source, trigger=trigger, delay_ms=delay_ms, relation=relation)


def node(request_id: str, *edges: Edge, gate_ms: float = 0.0, play: str = "p", **changes: Any) -> Node:
    values: dict[str, Any] = {
        "request_id": request_id,
        "play_id": play,
        "session_id": "s",
        "model": "m",
        "input_tokens": 8,
        "output_tokens": 1,
        "hash_ids": (1, 2),
        "not_before_ms": gate_ms,
        "edges": edges,
    }
    return Node(**(values | changes))


def corpus(*nodes: Node, block_size_tokens: int = 4) -> AgenticCorpus:
    graph = RequestGraph.build(block_size_tokens, nodes, lambda index: f"test:{index}")
    return AgenticCorpus(graph=graph, source_format="test", source_digest="")


def driver(*nodes: Node, lanes: int | None = None) -> AgenticDriver:
    return AgenticDriver(corpus(*nodes), lanes=lanes)


def released(traffic: AgenticDriver, now_ms: float) -> list[tuple[str | None, float]]:
    return [(release.spec.name, release.arrival_ms) for release in traffic.release(now_ms)]


def key(traffic: AgenticDriver, name: str) -> int:
    return [node.request_id for node in traffic.graph.nodes].index(name)


def end(traffic: AgenticDriver, now_ms: float, *names: str, status: RequestStatus = DONE) -> Sequence[object]:
    return traffic.ended([(key(traffic, name), status) for name in names], now_ms)


def test_it_is_a_traffic_driver() -> None:
    traffic: TrafficDriver = driver(node("a"))
    assert (traffic.total_requests, traffic.next_ready_ms(), traffic.waiting()) == (1, 0.0, [])


@pytest.mark.parametrize("lanes", [0, -1, True, 1.0, "2"])
def test_lanes_must_be_a_positive_integer(lanes: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        AgenticDriver(corpus(node("a")), lanes=lanes)
    assert (caught.value.field, caught.value.got) == ("agentic_lanes", lanes)


@pytest.mark.parametrize("speedup", [0.0, -1.0, math.inf, math.nan, True, "2", 1e-320])
def test_speed_up_must_be_finite_positive_and_bearable(speedup: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        AgenticDriver(corpus(node("a", gate_ms=1.0)), speedup=speedup)
    assert (caught.value.field, caught.value.got) == ("arrival_speedup_ratio", speedup)


def test_a_node_waits_for_its_gate_and_for_every_edge() -> None:
    traffic = driver(node("a"), node("b", edge("a", 2.0), gate_ms=10.0), node("c", edge("a", 2.0), edge("b", 1.0)))
    assert released(traffic, 0.0) == [("a", 0.0)]
    assert traffic.next_ready_ms() is None
    end(traffic, 3.0, "a")
    assert traffic.next_ready_ms() == 10.0
    assert released(traffic, 9.5) == []
    assert released(traffic, 10.0) == [("b", 10.0)]
    end(traffic, 10.5, "b")
    assert released(traffic, 12.0) == [("c", 11.5)]


def test_a_spawn_on_dispatch_with_delay_0_is_part_of_the_same_sweep() -> None:
    """Order is (ready time, ordinal); a child comes after its parent even if its ordinal is smaller."""
    traffic = driver(node("a", edge("c", trigger=Trigger.DISPATCH)), node("b", edge("c", 1.0)), node("c"), node("d"))
    assert released(traffic, 0.0) == [("c", 0.0), ("a", 0.0), ("d", 0.0)]


def test_a_late_release_fires_at_the_ready_time() -> None:
    """What counts for the child is when its parent was ready, not when somebody asked."""
    traffic = driver(node("a", gate_ms=1.0), node("b", edge("a", 2.0, Trigger.DISPATCH)))
    assert released(traffic, 5.0) == [("a", 1.0), ("b", 3.0)]


def test_an_edge_given_twice_counts_twice() -> None:
    traffic = driver(node("a"), node("b", edge("a", 1.0), edge("a", 4.0)))
    traffic.release(0.0)
    end(traffic, 2.0, "a")
    assert released(traffic, 6.0) == [("b", 6.0)]


def test_a_lane_counts_gates_from_its_activation() -> None:
    traffic = driver(
        node("a", gate_ms=5.0),
        node("b", gate_ms=7.0, play="q"),
        node("c", gate_ms=20.0, play="q"),
        node("d", edge("b"), gate_ms=6.0, play="q"),
        lanes=1,
    )
    assert traffic.waiting() == ["play 'q' waits for a lane"]
    assert released(traffic, 0.0) == [("a", 0.0)]
    assert end(traffic, 4.0, "a") == [
        PlaySettled(play_id="p", lane_id="lane:0", status="completed", failure_request_id=None, failure_status=None)
    ]
    assert released(traffic, 4.0) == [("b", 4.0)]
    assert traffic.next_ready_ms() == 17.0
    end(traffic, 5.0, "b")
    assert released(traffic, 5.0) == [("d", 5.0)]


def test_lanes_are_refilled_in_ordinal_order_of_the_last_ends() -> None:
    """Two plays end in one instant, reported the wrong way round: the one with the smaller ordinal is served first."""
    traffic = driver(*(node(f"r{k}", play=f"p{k}") for k in range(4)), lanes=2)
    traffic.release(0.0)
    settled = end(traffic, 1.0, "r1", "r0")
    assert [event.play_id for event in settled if isinstance(event, PlaySettled)] == ["p0", "p1"]
    lanes = {
        release.spec.name: release.spec.agentic and release.spec.agentic.lane_id for release in traffic.release(1.0)
    }
    assert lanes == {"r2": "lane:0", "r3": "lane:1"}


def test_a_failure_skips_what_was_not_dispatched_and_waits_for_the_rest() -> None:
    traffic = driver(
        node("a"), node("b"), node("c", edge("a")), node("d", edge("b")), node("e", gate_ms=9.0), node("z", play="q"),
        lanes=1,
    )  # fmt: skip
    assert released(traffic, 0.0) == [("a", 0.0), ("b", 0.0)]
    assert end(traffic, 1.0, "b", status=REJECTED) == [
        RequestSkipped(name=name, play_id="p", because="b") for name in ("c", "d", "e")
    ]
    assert traffic.next_ready_ms() is None
    assert traffic.waiting() == ["request 'a' was released and has not ended", "play 'q' waits for a lane"]
    assert end(traffic, 2.0, "a", status=FAILED) == [
        PlaySettled(play_id="p", lane_id="lane:0", status="failed", failure_request_id="b", failure_status="rejected")
    ]
    assert released(traffic, 2.0) == [("z", 2.0)]


def test_of_two_failures_in_an_instant_the_smaller_ordinal_counts() -> None:
    traffic = driver(node("a"), node("b"), node("c", edge("a")))
    traffic.release(0.0)
    skipped, settled = traffic.ended([(1, REJECTED), (0, FAILED)], 1.0)
    assert skipped == RequestSkipped(name="c", play_id="p", because="a")
    assert isinstance(settled, PlaySettled)
    assert (settled.failure_request_id, settled.failure_status) == ("a", "failed")


def test_a_completion_counts_if_its_ordinal_is_before_the_failure() -> None:
    """In one instant the completion of a releases c, then b fails: c is skipped while ready."""
    traffic = driver(node("a"), node("b"), node("c", edge("a")))
    traffic.release(0.0)
    events = traffic.ended([(1, REJECTED), (0, DONE)], 1.0)
    assert [type(event) for event in events] == [RequestSkipped, PlaySettled]
    assert (traffic.next_ready_ms(), traffic.release(5.0)) == (None, [])


def test_a_play_settles_when_the_servers_are_done_and_its_lane_goes_on_before() -> None:
    traffic = driver(node("a"), node("b", play="q"), lanes=1)
    traffic.release(0.0)
    assert traffic.ended([(0, DONE)], 1.0, busy=[0]) == []
    assert released(traffic, 1.0) == [("b", 1.0)]
    assert traffic.waiting()[0] == "request 'a' ended and has not left the servers"
    (settled,) = traffic.quiesced([0], 2.0)
    assert isinstance(settled, PlaySettled)
    assert settled.play_id == "p"


def test_misuse_is_a_protocol_error() -> None:
    traffic = driver(node("a"), node("b", edge("a")))
    with pytest.raises(ProtocolError, match="never released"):
        traffic.ended([(7, DONE)], 0.0)
    with pytest.raises(ProtocolError, match="'b' is blocked: cannot complete"):
        end(traffic, 0.0, "b")
    traffic.release(0.0)
    end(traffic, 1.0, "a")
    with pytest.raises(ProtocolError, match="'a' is completed: cannot fail"):
        end(traffic, 1.0, "a", status=FAILED)
    with pytest.raises(ProtocolError, match="'a' is completed: cannot settle"):
        traffic.quiesced([0], 1.0)
    for now_ms in (0.5, math.nan, math.inf):
        with pytest.raises(ProtocolError, match="time goes"):
            traffic.release(now_ms)


def test_every_mode_and_input_is_a_step_or_an_error() -> None:
    play = PlayRun("p")
    for mode in NodeMode:
        for happened in NodeInput:
            run = NodeRun(0, node("a"), play, 0, mode=mode)
            if (mode, happened) in NEXT_MODE:
                run.step(happened)
                assert run.mode is NEXT_MODE[mode, happened]
            else:
                with pytest.raises(ProtocolError, match=f"is {mode.value}: cannot {happened.value}"):
                    run.step(happened)


def test_identities() -> None:
    traffic = driver(
        node("a", session_id="main"),
        node("c", edge("b", trigger=Trigger.DISPATCH), edge("a", trigger=Trigger.DISPATCH), session_id="sub"),
        node("b", edge("a", trigger=Trigger.DISPATCH)),
        node("x", play="q"),
        node("y", play="q"),
        lanes=2,
    )
    specs = {release.spec.name: release.spec for release in traffic.release(0.0)}
    found = {name: (spec.uuid, attrs.astuple(spec.agentic)) for name, spec in specs.items() if spec.agentic}
    assert found == {
        "a": (1, ("p", "main", "lane:0", "a", None, None)),
        "b": (2, ("p", "s", "lane:0", "a", "a", None)),
        "c": (3, ("p", "sub", "lane:0", "a", "a", None)),
        "x": (4, ("q", "s", "lane:1", None, None, None)),
        "y": (5, ("q", "s", "lane:1", None, None, None)),
    }
    assert {(spec.session_id, spec.turn_index) for spec in specs.values()} == {
        ("main", None),
        ("sub", None),
        ("s", None),
    }


def test_a_prompt_shorter_than_a_block_is_one_run() -> None:
    (release,) = AgenticDriver(corpus(node("a", input_tokens=3, hash_ids=(9,)), block_size_tokens=2**60)).release(0.0)
    assert release.spec.prompt.tokens(0, 3).tolist() == [0, 0, 0]


TIMES_MS = st.sampled_from([0.0, 0.1, 0.3, 1.0, 2.5, 7.0]) | st.floats(0.0, 50.0)


@st.composite
def graphs(draw: st.DrawFn) -> tuple[Node, ...]:
    """Some plays of some nodes; a node may wait for nodes that were made before it, ids are shuffled."""
    count = draw(st.integers(1, 12))
    ids = draw(st.permutations([f"n{k:02d}" for k in range(count)]))
    nodes: list[Node] = []
    for request_id in ids:
        play = draw(st.sampled_from("pqr"))
        sources = [other.request_id for other in nodes if other.play_id == play]
        edges = [
            edge(source, draw(TIMES_MS), draw(st.sampled_from(Trigger)))
            for source in draw(st.lists(st.sampled_from(sources), max_size=3) if sources else st.just([]))
        ]
        nodes.append(node(request_id, *edges, gate_ms=draw(TIMES_MS), play=play))
    return tuple(nodes)


def next_instant_ms(traffic: AgenticDriver, due: dict[int, float]) -> float | None:
    ready_ms = traffic.next_ready_ms()
    return min([*due.values(), *([] if ready_ms is None else [ready_ms])], default=None)


@settings(max_examples=200, deadline=None)
@given(nodes=graphs(), lanes=st.none() | st.integers(1, 3), fates=st.data())
def test_random_plays(nodes: tuple[Node, ...], lanes: int | None, fates: st.DataObject) -> None:
    """Each node is released once, at the time its gate and edges say, or skipped after a failure and never released."""
    traffic = driver(*nodes, lanes=lanes)
    by_id = {n.request_id: n for n in nodes}
    dispatched: dict[str, float] = {}
    completed: dict[str, float] = {}
    skipped: set[str] = set()
    failed_plays: set[str] = set()
    settled: list[str] = []
    started: dict[str, float] = {}
    due: dict[int, float] = {}
    freed_ms = 0.0
    while (now_ms := next_instant_ms(traffic, due)) is not None:
        ends = [(k, fates.draw(st.sampled_from([DONE] * 8 + [REJECTED]))) for k, ms in due.items() if ms == now_ms]
        for k, status in sorted(ends):
            del due[k]
            n = traffic.graph.nodes[k]
            if status is DONE and n.play_id not in failed_plays:
                completed[n.request_id] = now_ms
            elif status is not DONE:
                failed_plays.add(n.play_id)
        for event in traffic.ended(ends, now_ms) if ends else ():
            if isinstance(event, RequestSkipped):
                assert event.name not in dispatched
                skipped.add(event.name)
            elif isinstance(event, PlaySettled):
                settled.append(event.play_id)
                assert event.status == ("failed" if event.play_id in failed_plays else "completed")
                freed_ms = now_ms
        for release in traffic.release(now_ms):
            name = release.spec.name
            assert name is not None
            n = by_id[name]
            assert name not in dispatched
            assert name not in skipped
            assert n.play_id not in failed_plays
            assert release.arrival_ms <= now_ms
            dispatched[name] = release.arrival_ms
            base_ms = 0.0
            if lanes is not None:
                started.setdefault(n.play_id, freed_ms)
                base_ms = min(m.not_before_ms for m in nodes if m.play_id == n.play_id and not m.edges)
            fired = {Trigger.DISPATCH: dispatched, Trigger.COMPLETION: completed}
            gate_ms = started.get(n.play_id, 0.0) + max(0.0, n.not_before_ms - base_ms)
            assert release.arrival_ms == max([gate_ms, *(fired[e.trigger][e.source] + e.delay_ms for e in n.edges)])
            due[release.key] = now_ms + fates.draw(TIMES_MS)
        if lanes is not None:
            assert len(set(started) - set(settled)) <= lanes
    assert set(dispatched) | skipped == set(by_id)
    assert sorted(settled) == sorted({n.play_id for n in nodes})
    assert traffic.waiting() == []


@settings(max_examples=100, deadline=None)
@given(nodes=graphs(), speedup=st.sampled_from([1.0, 2.0, 0.7, 1000.0]))
def test_speed_up_divides_and_1_is_identity(nodes: tuple[Node, ...], speedup: float) -> None:
    graph = corpus(*nodes).graph
    fast = graph.sped_up(speedup)
    for before, after in zip(graph.nodes, fast.nodes, strict=True):
        assert after.not_before_ms == before.not_before_ms / speedup
        assert [e.delay_ms for e in after.edges] == [e.delay_ms / speedup for e in before.edges]
    assert (fast.digest() == graph.digest()) == (fast == graph)
    assert speedup != 1.0 or fast == graph


@settings(max_examples=100, deadline=None)
@given(nodes=graphs(), data=st.data())
def test_order_in_the_file_does_not_matter(nodes: tuple[Node, ...], data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(nodes))
    assert corpus(*shuffled).graph == corpus(*nodes).graph
