"""Field cases about agentic traces, as whole runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from field_runs import BLOCK, Ran, simulate, worker

from g2sim.bus.errors import ConfigError

Values = dict[str, Any]


def play(*requests: Values, **more: Any) -> Values:
    base = {"id": "p", "models": ["m"], "block_size": BLOCK, "hash_id_scope": "local"}
    return {**base, "requests": list(requests), **more}


def turn(t: float, ids: list[int], out: int = 1, **more: Any) -> Values:
    one = {"t": t, "type": "n", "model": "m", "in": BLOCK * len(ids), "out": out, "hash_ids": ids, "api_time": 0.1}
    return one | more


def subagent(t: float, *requests: Values, **more: Any) -> Values:
    marker = {
        "t": t,
        "type": "subagent",
        "agent_id": "a",
        "subagent_type": "x",
        "status": "completed",
        "duration_ms": 3100,
    }
    return marker | {"requests": list(requests)} | more


def run(folder: Path, *plays: Values, **more: Any) -> Ran:
    return simulate(folder, plays, block=None, trace_format="weka", **{"aggregated": worker(gpu_blocks=64), **more})


def test_f69_unknown_keys_are_ignored_and_a_turn_without_lengths_is_named(tmp_path: Path) -> None:
    """The reference refuses such a turn (recorded: error_weka_missing_out), so it is not dropped unasked."""
    extra = {"input_types": ["text"], "stop": "x", "tool_names": []}
    ran = run(tmp_path, play(turn(0.0, [1], **extra), turn(1.0, [1, 2], **extra), title="t"))
    assert ran.column("terminal_status") == ["completed"] * 2
    with pytest.raises(ConfigError) as caught:
        run(tmp_path, play(turn(0.0, [1]), {**turn(1.0, [1, 2]), "in": None, "out": None}))
    assert "trace.jsonl:1" in str(caught.value)
    assert "requests[1]" in str(caught.value)


def test_f70_inner_times_are_relative_or_absolute_but_not_both(tmp_path: Path) -> None:
    def starts(*inner: float) -> list[float]:
        ran = run(
            tmp_path,
            play(
                turn(0.0, [1]),
                subagent(100.0, *(turn(t, [10 + k]) for k, t in enumerate(inner))),
                turn(110.0, [1, 2]),
            ),
        )
        return sorted(ran.column("arrival_time_ms"))

    assert starts(0.5, 3.0) == starts(100.5, 103.0)
    assert all(start == 0.0 or start >= 100_000.0 for start in starts(0.5, 3.0)), "no child before its marker"
    mixed = starts(0.5, 103.0)
    assert min(start for start in mixed if start) >= 100_000.0


def test_f71_an_owner_is_the_turn_before_and_a_subagent_without_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trace\.jsonl:1"):
        run(tmp_path, play(subagent(0.0, turn(0.5, [9])), turn(1.0, [1])))
    # Two turns at one time: the later one in the file owns it. Nobody waits for it when no turn follows.
    ran = run(tmp_path, play(turn(0.0, [1]), turn(0.0, [1, 2]), subagent(1.0, turn(0.5, [9]))))
    assert ran.column("terminal_status") == ["completed"] * 3
    (child,) = [one for one in ran.rows if ":inner:" in one["request_id"]]
    assert child["agentic"]["parent_id"].endswith("outer:1")


def test_f73_subagents_have_ids_of_their_own_beside_their_parents(tmp_path: Path) -> None:
    """So a policy that keeps conversations together spreads them, and one that keeps plays together does not."""
    requests = [turn(0.0, [1, 2])]
    requests += [subagent(1.0 + k, turn(0.5, [10 * k + 10, 11]), agent_id=f"a{k}") for k in range(2)]
    three = worker(gpu_blocks=64, replicas=3)
    ran = run(tmp_path, play(*requests, turn(9.0, [1, 2, 3])), aggregated=three, router={"policy": "session_affinity"})
    conversations = {one["agentic"]["conversation_id"] for one in ran.rows}
    assert len(conversations) == 3
    assert {one["agentic"].get("parent_id") is None for one in ran.rows} == {True, False}


def test_f75_what_depends_on_a_failed_node_is_skipped_and_the_lane_goes_on(tmp_path: Path) -> None:
    """Root, a child that never fits, one that does, and a join; one lane, two such plays."""
    plays = [
        play(
            turn(0.0, [1]),
            subagent(1.0, turn(0.1, list(range(100, 180))), agent_id="a"),
            subagent(1.0, turn(0.1, [7]), agent_id="b"),
            turn(9.0, [1, 2]),
            id=f"p{k}",
        )
        for k in range(2)
    ]
    ran = run(tmp_path, *plays, load={"type": "trace_timestamps", "agentic_lanes": 1})
    status = {one["request_id"].split(":request:")[1] + one["play_id"][-2:]: one["terminal_status"] for one in ran.rows}
    assert status == {
        f"{name}{play_id}": end
        for play_id in ("p0", "p1")
        for name, end in (("outer:0", "completed"), ("outer:1:inner:0", "rejected"), ("outer:2:inner:0", "completed"))
    }
    outcomes = ran.report["summary"]["agentic_play_outcomes"]
    assert [one["status"] for one in outcomes] == ["failed", "failed"]
    assert all(one["failure_request_id"].endswith("outer:1:inner:0") for one in outcomes)
