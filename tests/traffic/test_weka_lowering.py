"""Weka lowering by hand-worked plays: which request waits for which, and for how long."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from g2sim.actors.traffic import weka_lowering
from g2sim.actors.traffic.graph import AgenticCorpus, Node, RequestGraph
from g2sim.actors.traffic.weka import load_weka
from g2sim.actors.traffic.weka_lowering import common_prefix, to_ms

Entry = dict[str, Any]


def ask(t: float, hashes: list[int], *, took: float = 1.0, out: int = 1, model: str = "m") -> Entry:
    """A request of one block a hash that starts at ``t`` and takes ``took`` [s]."""
    return {
        "t": t,
        "type": "n",
        "model": model,
        "in": 4 * len(hashes) or 4,
        "out": out,
        "api_time": took,
        "hash_ids": hashes,
    }


def agent(t: float, *requests: Entry, status: str = "completed", **changes: Any) -> Entry:
    marker = {"t": t, "type": "subagent", "agent_id": "a", "subagent_type": "E", "status": status}
    return marker | {"requests": list(requests)} | changes


def corpus(folder: Path, *plays: list[Entry], basis: str = "auto") -> AgenticCorpus:
    path = folder / "trace.jsonl"
    rows = (
        {"id": f"p{k}", "block_size": 4, "hash_id_scope": "local", "requests": play} for k, play in enumerate(plays)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return load_weka(path, basis=basis)


def short(text: str) -> str:
    return text.split(":", 3)[3]


def waits(graph: RequestGraph) -> dict[str, list[str]]:
    """Source id -> "relation source trigger+delay", sorted."""
    return {
        short(node.request_id): sorted(
            f"{edge.relation} {short(edge.source)} {edge.trigger}+{edge.delay_ms:g}" for edge in node.edges
        )
        for node in graph.nodes
    }


def sessions(graph: RequestGraph) -> dict[str, str]:
    return {short(node.request_id): short(node.session_id) for node in graph.nodes}


def test_names_and_identities(tmp_path: Path) -> None:
    """The worked example: names start with the digest of the file name, hashes 1, 2, 3 get documented ids."""
    assert blake3(b"one.json").hexdigest().startswith("20e43c811ed8b275")
    path = tmp_path / "one.json"
    requests = [ask(0.0, [1, 2], took=0.5), ask(1.25, [1, 2, 3])]
    path.write_text(json.dumps({"id": "A", "block_size": 4, "hash_id_scope": "local", "requests": requests}))
    first, second = load_weka(path).graph.nodes
    assert first.request_id == "weka:20e43c811ed8b275:request:outer:0"
    assert (first.play_id, first.session_id) == ("weka:20e43c811ed8b275:play:A", "weka:20e43c811ed8b275:session:root")
    assert second.hash_ids == (15933378692301663553, 2622290016556710755, 17332136653821787121)
    assert (first.hash_ids, first.play_ordinal) == (second.hash_ids[:2], 0)
    assert (second.not_before_ms, second.edges[0].delay_ms, second.recorded_api_ms) == (1250.0, 750.0, 1000.0)


def test_plays_go_by_file_and_nodes_by_name(tmp_path: Path) -> None:
    """The second object's names sort before the first's."""
    graph = corpus(tmp_path, [ask(0.0, [1])], [ask(5.0, [1])]).graph
    assert [play.nodes for play in graph.plays] == [(1,), (0,)]
    assert [node.not_before_ms for node in graph.nodes] == [0.0, 0.0]
    assert graph.nodes[0].hash_ids != graph.nodes[1].hash_ids


def test_a_growing_prompt_is_one_conversation(tmp_path: Path) -> None:
    graph = corpus(tmp_path, [ask(0.0, [1]), ask(3.0, [1, 2]), ask(3.5, [1, 2, 3], took=9.0), ask(20.0, [])]).graph
    assert waits(graph) == {
        "outer:0": [],
        "outer:1": ["sequence outer:0 completion+2000"],
        "outer:2": ["replay_barrier outer:0 completion+0", "spawn outer:1 dispatch+500"],
        "outer:3": ["replay_barrier outer:2 completion+0", "sequence outer:1 completion+16000"],
    }
    assert sessions(graph)["outer:2"] == "root:worker:0"


def test_a_request_that_shares_nothing_is_anchored_to_the_root(tmp_path: Path) -> None:
    graph = corpus(tmp_path, [ask(0.0, [1], took=9.0), ask(2.0, [7]), ask(9.5, [1, 2])]).graph
    assert waits(graph) == {
        "outer:0": [],
        "outer:1": ["spawn outer:0 dispatch+2000"],
        "outer:2": ["replay_barrier outer:1 completion+0", "sequence outer:0 completion+500"],
    }


@pytest.mark.parametrize(("gap_s", "kept", "spliced"), [(3599.0, 1, True), (3601.0, 1, False), (3601.0, 2, True)])
def test_an_edited_prompt_goes_on_unless_late_and_little_is_kept(
    gap_s: float, kept: int, spliced: bool, tmp_path: Path
) -> None:
    """The limits of seam repair: an hour, and half of the blocks (four here)."""
    edited = [*[1, 2, 3, 4][:kept], 9]
    graph = corpus(tmp_path, [ask(0.0, [1, 2]), ask(2.0, [1, 2, 3, 4]), ask(3.0 + gap_s, edited)]).graph
    assert sessions(graph)["outer:2"] == ("root" if spliced else "root:worker:0")


def test_a_model_switch_is_a_fork(tmp_path: Path) -> None:
    graph = corpus(tmp_path, [ask(0.0, [1]), ask(2.0, [1, 2], model="z"), ask(4.0, [1, 3])]).graph
    assert sessions(graph) == {"outer:0": "root", "outer:1": "root:worker:0", "outer:2": "root"}


@pytest.mark.parametrize(("out", "reused", "is_preamble"), [(64, True, True), (65, True, False), (65, False, True)])
def test_a_preamble_is_short_or_never_seen_again(out: int, reused: bool, is_preamble: bool, tmp_path: Path) -> None:
    """A preamble belongs to the root conversation, whose next request follows it."""
    second = [1, 9] if reused else [1, 2]
    graph = corpus(tmp_path, [ask(0.0, [8, 9], out=out), ask(2.0, second), ask(4.0, [*second, 3])]).graph
    assert sessions(graph)["outer:1"] == ("root" if is_preamble else "root:worker:0")


def test_a_subagent_is_spawned_and_joined(tmp_path: Path) -> None:
    """Relative times; the join waits for the first request at or after the recorded duration."""
    play = [
        ask(0.0, [1], took=4.0),
        agent(1.0, ask(0.5, [7]), ask(2.0, [7, 8]), duration_ms=7500),
        ask(5.0, [1, 2]),
        ask(8.5, [1, 2, 3]),
    ]
    loaded = corpus(tmp_path, play)
    assert loaded.nested_basis == "relative"
    assert waits(loaded.graph) == {
        "outer:0": [],
        "outer:1:inner:0": ["spawn outer:0 dispatch+1500"],
        "outer:1:inner:1": ["sequence outer:1:inner:0 completion+500"],
        "outer:2": ["sequence outer:0 completion+1000"],
        "outer:3": ["join outer:1:inner:1 completion+4500", "sequence outer:2 completion+2500"],
    }
    assert sessions(loaded.graph)["outer:1:inner:1"] == "subagent:1:a"


def test_a_background_subagent_is_not_joined(tmp_path: Path) -> None:
    """Absolute times; its owner is the request listed before it, here already over."""
    play = [ask(0.0, [1]), agent(2.0, ask(2.0, [7]), status="async_launched"), ask(9.0, [1, 2])]
    loaded = corpus(tmp_path, play)
    assert loaded.nested_basis == "absolute"
    assert waits(loaded.graph)["outer:1:inner:0"] == ["spawn outer:0 completion+1000"]
    assert waits(loaded.graph)["outer:2"] == ["sequence outer:0 completion+8000"]


def test_an_inner_request_a_hair_before_its_marker_starts_with_it(tmp_path: Path) -> None:
    play = [ask(0.0, [1]), agent(2.0, ask(2.0 - 9e-7, [7]))]
    for basis in ("auto", "absolute"):
        loaded = corpus(tmp_path, play, basis=basis)
        assert loaded.nested_basis == "absolute"
        assert loaded.graph.nodes[1].not_before_ms == 2000.0


def test_without_inner_requests_no_basis_applies(tmp_path: Path) -> None:
    loaded = corpus(tmp_path, [ask(0.0, [1]), agent(2.0, status="async_launched")])
    assert (loaded.nested_basis, len(loaded.graph.nodes)) == ("not_applicable", 1)


def test_missing_hashes_and_partial_blocks_are_private(tmp_path: Path) -> None:
    """9 tokens of block 4 with one hash: one shared block, one private, one private tail; a surplus hash is ignored."""
    same = {"t": 0.0, "type": "n", "model": "m", "in": 9, "out": 1, "hash_ids": [1]}
    longer = same | {"t": 1.0, "in": 8, "hash_ids": [1, 2, 3]}
    first, second, third = corpus(tmp_path, [same, same | {"t": 0.5}, longer]).graph.nodes
    assert [len(node.hash_ids) for node in (first, second, third)] == [3, 3, 2]
    assert first.hash_ids[0] == second.hash_ids[0] == third.hash_ids[0]
    assert len({*first.hash_ids, *second.hash_ids, *third.hash_ids}) == 6


def test_files_of_a_directory_are_in_byte_order_of_their_paths(tmp_path: Path) -> None:
    names = ["b.json", "a/z.json", "a.json", "a/b/c.JSON", "é.json", "B.json", "a-.json"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        row = {"id": name, "block_size": 4, "hash_id_scope": "local", "requests": [ask(0.0, [1])]}
        (tmp_path / name).write_text(json.dumps(row), encoding="utf-8")
    found = [play.play_id.split(":play:")[1] for play in load_weka(tmp_path).graph.plays]
    assert found == sorted(names, key=str.encode)


def test_colliding_ids_move_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two identities whose first 64 bits agree: the one that comes second is named with the next nonce."""

    def agreeing(data: bytes) -> object:
        return blake3(b"same" if data.endswith(b"\x000") else data)

    monkeypatch.setattr(weka_lowering, "blake3", agreeing)
    first, second = corpus(tmp_path, [ask(0.0, [1, 2]), ask(2.0, [1, 2])]).graph.nodes
    assert first.hash_ids == second.hash_ids
    assert len(set(first.hash_ids)) == 2


@pytest.mark.parametrize(
    ("seconds", "ms"), [(-1.0, 0.0), (0.0, 0.0), (1.25, 1250.0), (0.5e-9, 1e-6), (0.4e-9, 0.0), (0.1 + 0.2, 300.0)]
)
def test_seconds_become_whole_nanoseconds(seconds: float, ms: float) -> None:
    assert to_ms(seconds) == ms


@given(st.lists(st.integers(0, 2), max_size=9), st.lists(st.integers(0, 2), max_size=9))
def test_common_prefix(left: list[int], right: list[int]) -> None:
    length = common_prefix(tuple(left), tuple(right))
    assert left[:length] == right[:length]
    assert length == min(len(left), len(right)) or left[length] != right[length]


TIMES_S = st.integers(0, 40).map(lambda quarter: quarter / 4)
REQUESTS = st.builds(
    ask,
    TIMES_S,
    st.lists(st.integers(0, 3), max_size=5),
    took=TIMES_S,
    out=st.sampled_from([0, 1, 64, 65]),
    model=st.sampled_from("mmz"),
)


@st.composite
def plays(draw: st.DrawFn) -> list[Entry]:
    """Outer requests by start, some followed by a subagent with relative times."""
    entries: list[Entry] = []
    for request in sorted(draw(st.lists(REQUESTS, min_size=1, max_size=7)), key=lambda entry: float(entry["t"])):
        entries.append(request)
        inner = draw(st.lists(REQUESTS, max_size=4))
        if inner:
            status = draw(st.sampled_from(["completed", "async_launched"]))
            entries.append(agent(request["t"], *inner, status=status))
    return entries


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(play=plays())
def test_lowered_plays_hang_together(play: list[Entry], tmp_path: Path) -> None:
    """Every request becomes one node, the play has one root, no edge occurs twice, none points to a later start."""
    graph = corpus(tmp_path, play, basis="relative").graph
    authored = sum(len(entry["requests"]) if entry["type"] == "subagent" else 1 for entry in play)
    assert len(graph.nodes) == authored
    (only,) = graph.plays
    assert len(only.roots) == 1
    by_id: dict[str, Node] = {node.request_id: node for node in graph.nodes}
    for node in graph.nodes:
        assert len({(e.source, e.trigger, e.relation) for e in node.edges}) == len(node.edges)
        assert len(node.hash_ids) == -(-node.input_tokens // 4)
        for e in node.edges:
            assert by_id[e.source].not_before_ms <= node.not_before_ms
