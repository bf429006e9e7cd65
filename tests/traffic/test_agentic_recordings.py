"""Agentic readers, lowering and driver against what the reference recorded, to the last bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import agentic_cases as cases
import attrs
import pytest

from g2sim.actors.traffic.agentic import AgenticDriver
from g2sim.actors.traffic.agentic_mooncake import load_agentic_mooncake
from g2sim.actors.traffic.graph import canonical_edges
from g2sim.actors.traffic.lifecycle import LifecycleDigest, LifecycleEvent
from g2sim.actors.traffic.request import RequestStatus
from g2sim.actors.traffic.weka import load_weka
from g2sim.bus.errors import ConfigError

REPLAYED = cases.names("am_*", "weka_*", "real_weka_*")
CUT = cases.names("snapshot_*", "warmup_*")
RANDOM = json.loads((cases.ORACLE / "weka_random.json").read_text(encoding="utf-8"))
REFUSED_ELSEWHERE = {"error_am_concurrency", "error_weka_concurrency", "error_am_no_execution_model"}
"""Combinations of options, which the scenario refuses; the traces are fine."""


def sped_up(recorded: cases.Case) -> float:
    """What the recorded digest covers: snapshot runs report the graph before speed-up."""
    given = cases.options(recorded)
    return 1.0 if "agentic_snapshot" in given else given.get("arrival_speedup_ratio", 1.0)


@pytest.mark.parametrize("name", REPLAYED + CUT)
def test_graph_is_the_recorded_one(name: str, tmp_path: Path) -> None:
    recorded = cases.case(name)
    corpus = cases.load(recorded, tmp_path)
    graph = corpus.graph.sped_up(sped_up(recorded))
    summary = recorded["expected"]["summary"]
    assert {
        "source": {"format": corpus.source_format, "digest": corpus.source_digest},
        "graph_digest": graph.digest(),
        "block_size": corpus.block_size_tokens,
        "node_count": len(graph.nodes),
        "play_count": len(graph.plays),
        "source_models": list(corpus.source_models),
    } == summary["agentic_graph"]
    assert corpus.nested_basis == summary.get("weka_nested_timestamp_basis")
    assert corpus.notes == ()


@pytest.mark.parametrize("name", cases.names("lowered/*"))
def test_lowered_nodes_are_the_recorded_ones(name: str, tmp_path: Path) -> None:
    recorded = cases.case(name)
    graph = cases.load(recorded, tmp_path).graph.sped_up(sped_up(recorded))
    table = json.loads((cases.ORACLE / "workload" / "lowered" / f"{name}.json").read_text(encoding="utf-8"))
    rows = [
        {
            "request_id": node.request_id,
            "play_id": node.play_id,
            "source_play_ordinal": node.play_ordinal,
            "session_id": node.session_id,
            "input_length": node.input_tokens,
            "max_output_tokens": node.output_tokens,
            "hash_ids": list(node.hash_ids),
            "not_before_ms": node.not_before_ms,
            "recorded_api_time_ms": node.recorded_api_ms,
            "dependencies": [
                {"request_id": e.source, "trigger": e.trigger, "delay_ms": e.delay_ms, "relation": e.relation}
                for e in canonical_edges(node.edges)
            ],
        }
        for node in graph.nodes
    ]
    assert rows == table["nodes"]
    assert graph.block_size_tokens == table["block_size"]


@pytest.mark.parametrize("recorded", RANDOM, ids=lambda recorded: str(recorded["seed"]))
def test_random_corpora_have_the_recorded_digest(recorded: cases.Case, tmp_path: Path) -> None:
    """Picked by ``record_weka_random.py`` so that every rule of the lowering matters to at least two."""
    path = cases.lay_out({"trace": recorded["plays"], "trace_name": "trace.jsonl"}, tmp_path)
    corpus = load_weka(path, basis="relative")
    assert {"format": corpus.source_format, "digest": corpus.source_digest} == recorded["source"]
    assert corpus.graph.digest() == recorded["graph_digest"]


@pytest.mark.parametrize("name", REPLAYED)
def test_driver_releases_what_was_recorded(name: str, tmp_path: Path) -> None:
    """Recorded ends go in; arrivals, identities, outcomes and the lifecycle digest must come out as recorded."""
    recorded = cases.case(name)
    given = cases.options(recorded)
    records = {record["request_id"]: record for record in recorded["expected"]["per_request"]}
    ends = {key: (r["terminal_time_ms"], RequestStatus(r["terminal_status"])) for key, r in records.items()}
    driver = AgenticDriver(
        cases.load(recorded, tmp_path),
        speedup=given.get("arrival_speedup_ratio", 1.0),
        lanes=given.get("agentic_lanes"),
    )
    replay = cases.Replay(driver, ends)
    replay.run()

    seen = {release.spec.name: recorded_form(release) for release in replay.releases}
    assert seen == {key: {field: record[field] for field in seen[key]} for key, record in records.items()}
    summary = recorded["expected"]["summary"]
    assert driver.graph_digest == summary["agentic_graph"]["graph_digest"]
    assert list(replay.outcomes.values()) == summary["agentic_play_outcomes"]
    assert replay.lifecycle.count == summary["agentic_lifecycle_event_count"]
    assert replay.lifecycle.hexdigest() == summary["agentic_lifecycle_digest"]
    assert driver.waiting() == []


def recorded_form(release: Any) -> dict[str, Any]:
    """A release with the keys and values that reports use."""
    spec = release.spec
    identity = {key: value for key, value in attrs.asdict(spec.agentic).items() if value is not None}
    return {
        "request_id": spec.name,
        "play_id": spec.agentic.play_id,
        "session_id": spec.session_id,
        "turn_index": spec.turn_index,
        "agentic": {"request_id": spec.name, **identity},
        "arrival_time_ms": release.arrival_ms,
        "dispatched_at_ms": release.arrival_ms,
        "input_length": spec.prompt.length,
        "requested_output_length": spec.output_tokens,
        "uuid": f"{spec.uuid:032x}"[:8] + "-" + "-".join(f"{spec.uuid:032x}"[i:j] for i, j in UUID_PARTS),
    }


UUID_PARTS = ((8, 12), (12, 16), (16, 20), (20, 32))


@pytest.mark.parametrize("name", cases.names("error_am_*", "error_weka_*", "error_real_weka_*"))
def test_what_the_reference_refuses_is_refused(name: str, tmp_path: Path) -> None:
    recorded = cases.case(name)
    if name in REFUSED_ELSEWHERE:
        cases.load(recorded, tmp_path)
        return
    with pytest.raises(ConfigError) as caught:
        AgenticDriver(cases.load(recorded, tmp_path), lanes=cases.options(recorded).get("agentic_lanes"))
    error = caught.value
    if name == "error_am_zero_lanes":
        assert (error.field, error.got) == ("agentic_lanes", 0)
        return
    file = cases.lay_out(recorded, tmp_path)
    place, _, line = str(error.where).rpartition(":") if name != "error_weka_extension" else (error.where, "", "1")
    assert place == str(file)
    assert line.isdecimal()
    assert error.allowed


@pytest.mark.parametrize(
    ("name", "line", "field"),
    [
        ("error_am_blank_request_id", 2, "request_id"),
        ("error_am_cross_play", 3, "dependencies[0].request_id"),
        ("error_am_cycle", 2, "dependencies"),
        ("error_am_duplicate_id", 3, "request_id"),
        ("error_am_empty_provenance", 1, "source.format"),
        ("error_am_hash_count_small", 2, "hash_ids"),
        ("error_am_negative_edge_delay", 3, "dependencies[0].delay_ms"),
        ("error_am_ordinal_gap", 3, "source_play_ordinal"),
        ("error_am_sequence_on_dispatch", 3, "dependencies[0].trigger"),
        ("error_weka_block_size_assertion", 1, "block_size"),
        ("error_weka_failed_subagent", 1, "requests[1].status"),
        ("error_weka_inner_before_marker", 1, "requests[1].requests[0].t"),
        ("error_weka_mixed_block_sizes", 2, "block_size"),
        ("error_weka_negative_t", 1, "requests[0].t"),
    ],
)
def test_refusals_name_line_and_field(name: str, line: int, field: str, tmp_path: Path) -> None:
    recorded = cases.case(name)
    with pytest.raises(ConfigError) as caught:
        cases.load(recorded, tmp_path)
    assert (caught.value.where, caught.value.field) == (f"{cases.lay_out(recorded, tmp_path)}:{line}", field)


def test_undeclared_models_are_noted_once_a_file() -> None:
    """A published trace whose subagent uses a model that ``models`` lacks: refused by the reference, noted by us."""
    path = cases.ORACLE / "traces" / "weka" / "trace_0291.json"
    corpus = load_weka(path)
    assert corpus.notes == (f"{path}: models lacks claude-haiku-4-5-20251001, used all the same",)
    patched = load_weka(path.with_name("trace_0291.models-patched.json"))
    assert patched.notes == ()
    assert corpus.source_models == patched.source_models == ("claude-haiku-4-5-20251001", "claude-opus-4-5-20251101")
    with pytest.raises(ConfigError) as caught:
        load_weka(path, strict=True)
    assert caught.value.field == "requests[16].requests[0].model"
    assert caught.value.got == "claude-haiku-4-5-20251001"


def test_tokens_are_numbered_by_first_occurrence_in_ordinal_order(tmp_path: Path) -> None:
    """The worked example: nodes b, a, c in file order are numbered as a, b, c."""
    header = {"schema": "dynamo.agentic_mooncake", "version": 2, "block_size": 4, "hash_id_scope": "local"}
    rows = [header | {"source": {"format": "t", "digest": "d"}}]
    for name, ids in (("b", [50, 3]), ("a", [7, 2**64 - 1]), ("c", [50, 1])):
        rows.append(
            {"request_id": name, "play_id": "p", "session_id": "s", "model": "m", "input_length": 7}
            | {"output_length": 1, "hash_ids": ids, "not_before_ms": 0}
        )
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    releases = AgenticDriver(load_agentic_mooncake(path)).release(0.0)
    tokens = {release.spec.name: release.spec.prompt.tokens(0, 7).tolist() for release in releases}
    assert tokens == {"a": [0] * 4 + [1] * 3, "b": [2] * 4 + [3] * 3, "c": [2] * 4 + [4] * 3}


def test_lifecycle_vector() -> None:
    """The seven lines written out in the specification of ``am_two_roots``."""
    lifecycle = LifecycleDigest()
    for start_ms, name in ((0.0, "a"), (15.0, "b")):
        lifecycle.feed(start_ms, "p", name, LifecycleEvent.DISPATCH)
        lifecycle.feed(start_ms + 3.0, "p", name, LifecycleEvent.CAUSAL_TERMINAL, RequestStatus.COMPLETED)
        lifecycle.feed(start_ms + 3.0, "p", name, LifecycleEvent.QUIESCENT)
    before = lifecycle.copy()
    lifecycle.feed(18.0, "p", None, LifecycleEvent.PLAY_QUIESCENT)
    summary = cases.case("am_two_roots")["expected"]["summary"]
    assert (lifecycle.count, lifecycle.hexdigest()) == (7, summary["agentic_lifecycle_digest"])
    assert (before.count, before.hexdigest() == lifecycle.hexdigest()) == (6, False)
