"""``g2sim explain``: what a log says of one placement, and why less was found than the router had believed."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from cli_process import LIBRARY
from policy_values import CHATS, cli

from g2sim.actors.router.events import PlacementWeighed
from g2sim.bus.errors import ConfigError
from g2sim.scenarios.explain import Explanation, cost_terms, explain_request
from g2sim.scenarios.policy_check import _TRACE_NAME, _small_deployment, _small_trace
from g2sim.scenarios.policy_source import PolicyChoice, with_policy
from g2sim.scenarios.run import run_scenario
from g2sim.scenarios.schema import Scenario, load_scenario

sys.path.insert(0, str(Path(__file__).parents[1] / "router"))
from router_values import row, run_values, separate, worker

Values = dict[str, Any]
KV = {"policy": "dynamo_kv"}


def ran(folder: Path, rows: list[Values], *, apart: bool = False, change: Values | None = None, **router: Any) -> Path:
    """Run a trace on one worker a role with 8 GPU blocks, unless ``change`` says otherwise."""
    (folder / "t.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in rows))
    values = run_values("t.jsonl", **router)
    one = worker(1, capacity={"type": "fixed", "blocks": 8})
    one["scheduler"]["max_sequences"] = 1
    values["engine"]["workers"]["aggregated"] = one | (change or {})
    if apart:
        values = separate(values)
    run_scenario(Scenario.from_dict(values, base_dir=folder), folder / "run")
    return folder / "run"


def told(run: Path, request: object) -> Explanation:
    explanation, damage = explain_request(run, str(request))
    assert damage is None
    return explanation


# -- refused


def test_a_request_that_is_not_there_is_refused(tmp_path: Path) -> None:
    run = ran(tmp_path, [row(0, [1])])
    done = cli(tmp_path, "explain", run, "1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: REQUEST: got '1'; allowed: 0 to 0\n"
    for wanted in ("-1", "x", ""):
        with pytest.raises(ConfigError, match="allowed: 0 to 0"):
            explain_request(run, wanted)
    with pytest.raises(ConfigError, match="cannot read the log"):
        explain_request(tmp_path / "nothing", "0")


def test_a_request_can_be_meant_by_its_name_if_only_one_has_it(tmp_path: Path) -> None:
    run_scenario(load_scenario(LIBRARY / "agentx-g2-shared.yaml"), tmp_path / "run")
    name = told(tmp_path / "run", 3).arrival.name
    assert name is not None
    assert told(tmp_path / "run", name).arrival.request == 3
    with pytest.raises(ConfigError, match="did you mean"):
        explain_request(tmp_path / "run", f"{name}x")


# -- why less, or more, than believed


def test_a_turn_of_a_session_is_a_name(tmp_path: Path) -> None:
    rows = [row(0, [1], session_id="s"), {**row(0, [2], session_id="s"), "delay": 5.0}, row(0, [3], session_id="other")]
    for one in rows[1:2]:
        del one["timestamp"]
    run = ran(tmp_path, rows)
    assert told(run, "s/1").arrival.turn_index == 1
    assert told(run, "other/0").arrival.session_id == "other"
    with pytest.raises(ConfigError, match=r"or a name such as .*; the session has s/0, s/1$"):
        explain_request(run, "s")


@pytest.mark.parametrize(
    ("context", "why"),
    [
        (None, "rejected with 0 tokens: its prompt has 9 blocks, and the G1 of a rank has 8"),
        (8, "rejected with 0 tokens: the model's context has 8 tokens, and the answer needs one of them"),
    ],
)
def test_a_request_that_can_never_run_is_told_why(context: int | None, why: str, tmp_path: Path) -> None:
    change = None if context is None else {"context_length": context}
    run = ran(tmp_path, [row(0, range(9)), row(1, [50])], change=change)
    assert told(run, 0).steps[-1].what == why
    (note,) = json.loads((run / "report.json").read_text())["notes"]
    assert note.endswith(": the largest prompt of them has 9 blocks, and the G1 of a rank has 8")
    assert told(run, 1).steps[-1].what.startswith("completed")


def test_a_stale_event_is_blamed_when_the_router_had_not_heard_of_the_removal(tmp_path: Path) -> None:
    """At 1050 ms a router with 1000 ms of lag knows that blocks came at 10 ms, not that they left from 110 ms on."""
    rows = [row(0, [1, 2, 3, 4]), row(100, [11, 12, 13, 14, 15]), row(1050, [1, 2, 3, 4])]
    (reuse,) = told(ran(tmp_path, rows, kv_event_lag_ms=1000.0, **KV), 2).reuse
    assert (reuse.device_blocks, reuse.g1_tokens, reuse.computed_tokens) == (4, 8, 8)
    (reason,) = reuse.reasons
    assert reason == (
        "stale event: 2 of 4 blocks were of no use at the placement already, from block 2 on, "
        "which left device at 111.000 ms; KV events reach the router 1000 ms late"
    )


def test_an_eviction_is_blamed_when_the_blocks_left_while_the_request_waited(tmp_path: Path) -> None:
    """One request runs at a time: the long prompt before it in the queue takes the blocks."""
    rows = [
        row(0, [1, 2, 3, 4]),
        row(100, [8, 9]),
        row(101, [11, 12, 13]),
        row(102, [1, 2, 3, 4]),
    ]
    (reuse,) = told(ran(tmp_path, rows, **KV), 3).reuse
    assert (reuse.device_blocks, reuse.g1_tokens) == (4, 8)
    (reason,) = reuse.reasons
    assert reason.startswith("eviction: 2 of 4 blocks were of no use any more at the admission, from block 2 on, which")


def test_a_fully_cached_prompt_computes_its_last_block(tmp_path: Path) -> None:
    (reuse,) = told(ran(tmp_path, [row(0, [1, 2, 3, 4]), row(100, [1, 2, 3, 4])], **KV), 1).reuse
    assert (reuse.device_blocks, reuse.g1_tokens, reuse.computed_tokens) == (4, 12, 4)
    assert reuse.reasons == ("a prompt's last token is never taken from a cache: its block is computed",)


def test_more_than_believed_is_said_when_the_router_had_not_heard_yet(tmp_path: Path) -> None:
    rows = [row(0, [1, 2, 3, 4]), row(100, [1, 2, 3, 4, 5])]
    (reuse,) = told(ran(tmp_path, rows, kv_event_lag_ms=1000.0, **KV), 1).reuse
    assert (reuse.device_blocks, reuse.g1_tokens) == (0, 16)
    assert reuse.reasons == ("more than believed: 4 blocks came while it waited, or the router had not heard of them",)


@pytest.mark.parametrize("disaggregated", [False, True])
@pytest.mark.parametrize("lag_ms", [0.0, 40.0])
def test_every_difference_has_a_reason_and_every_token_is_accounted_for(
    disaggregated: bool, lag_ms: float, tmp_path: Path
) -> None:
    (tmp_path / _TRACE_NAME).write_text("".join(f"{json.dumps(one)}\n" for one in _small_trace()))
    values = _small_deployment(disaggregated, lag_ms)
    for pool in values["engine"]["workers"].values():
        pool["kv_cache"]["host_offload"]["num_host_blocks"] = 16
    scenario = with_policy(Scenario.from_dict(values, base_dir=tmp_path), PolicyChoice("prefix_affinity"))
    run_scenario(scenario, tmp_path / "run")
    less = 0
    for number in range(36):
        explained = told(tmp_path / "run", number)
        (reuse,) = explained.reuse
        assert reuse.g1_tokens + (reuse.host_tokens or 0) + reuse.computed_tokens == explained.arrival.input_tokens
        believed = reuse.device_blocks + reuse.host_blocks
        found = (reuse.g1_tokens + (reuse.host_tokens or 0)) // 16
        assert bool(reuse.reasons) is (believed != found)
        assert not any("were not used" in reason for reason in reuse.reasons)
        less += found < believed
    assert less >= 5


# -- what is shown


def test_a_tie_a_wait_and_every_candidate_are_shown(tmp_path: Path) -> None:
    two = {"parallelism": {"replicas": 2}}
    run = ran(tmp_path, [row(0, [1, 2]), row(0, [3])], change=two, options={"router_queue_threshold": 0}, **KV)
    done = cli(tmp_path, "explain", run, "0")
    assert done.returncode == 0, done.stderr
    assert "agg router, policy dynamo_kv: worker 0 rank 0, at 0.000 ms, by cost" in done.stdout
    assert "tie of 2: the lowest (worker, rank)" in done.stdout
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith(("0/0", "1/0"))]
    assert [line[0] for line in lines] == ["0/0", "1/0"]
    assert lines[0][-2:] == ["chosen,", "tied"]
    assert lines[1][-1] == "tied"


def weighed(
    part_names: tuple[str, ...], parts: Sequence[tuple[float, ...]], costs: tuple[float, ...]
) -> PlacementWeighed:
    zeros = (0,) * len(costs)
    return PlacementWeighed(
        request=0,
        pool="agg",
        policy="mine",
        reason="cost",
        chosen=0,
        tied=1,
        workers=tuple(range(len(costs))),
        dp_ranks=zeros,
        device_blocks=zeros,
        host_blocks=zeros,
        prefill_tokens=zeros,
        active_blocks=zeros,
        active_requests=zeros,
        costs=costs,
        part_names=part_names,
        parts=tuple(parts),
        overlap_hash=None,
    )


@pytest.mark.parametrize(
    ("names", "parts", "costs", "terms"),
    [
        (("hit", "a", "b"), [(9.0, 8.0), (1.0, 2.0), (3.0, 3.0)], (4.0, 5.0), ("a", "b")),
        (("hit", "a"), [(9.0, 8.0), (1.0, 2.0)], (10.0, 10.0), ("hit", "a")),
        (("a", "b"), [(1.0, 2.0), (3.0, 3.0)], (4.0, 6.0), ()),
        (("a",), [(1.0, 2.0)], (), ()),
        ((), [], (4.0, 5.0), ()),
    ],
)
def test_only_parts_that_add_up_for_every_candidate_are_said_to(
    names: tuple[str, ...], parts: list[tuple[float, ...]], costs: tuple[float, ...], terms: tuple[str, ...]
) -> None:
    assert cost_terms(weighed(names, parts, costs)) == terms


def test_what_a_cost_is_made_of_is_told_apart_from_what_is_not_added(tmp_path: Path) -> None:
    done = cli(tmp_path, "explain", ran(tmp_path, [row(0, [1, 2]), row(20, [1, 2])], **KV), "1")
    lines = done.stdout.splitlines()
    head = next(k for k, line in enumerate(lines) if line.startswith("worker/rank"))
    assert lines[head].count(" prefill") == 2
    assert "in prefill" in lines[head]
    assert lines[head + 1].count("(part)") == 5
    assert "cost [blocks] = prefill + decode + requests (not added: hit, credit)" in lines


def test_a_wait_in_the_router_is_shown(tmp_path: Path) -> None:
    run = ran(tmp_path, [row(0, [1, 2]), row(1, [3])], options={"router_queue_threshold": 0}, **KV)
    (decision,) = told(run, 1).decisions
    assert (decision.waited_from_ms, decision.placed_ms) == (1.0, 10.0)
    assert "after 9.000 ms in the router" in cli(tmp_path, "explain", run, "1").stdout


def test_separate_pools_have_a_decision_each(tmp_path: Path) -> None:
    run = ran(tmp_path, [row(0, [1, 2, 3]), row(50, [1, 2, 3])], apart=True, **KV)
    explained = told(run, 1)
    assert [decision.pool for decision in explained.decisions] == ["prefill", "decode"]
    assert [reuse.pool for reuse in explained.reuse] == ["prefill"]
    text = cli(tmp_path, "explain", run, "1").stdout
    for said in ("prefill router, policy dynamo_kv", "decode router, policy dynamo_kv", "KV arrived on decode-0/0"):
        assert said in text


def test_a_policy_that_does_not_weigh_is_said_to(tmp_path: Path) -> None:
    done = cli(tmp_path, "explain", ran(tmp_path, [row(0, [1])]), "0")
    assert "policy round_robin: worker 0 rank 0, at 0.000 ms; it weighs no candidates" in done.stdout
    assert "completed with 4 tokens" in done.stdout


def test_a_cut_log_is_explained_as_far_as_it_is_good_and_the_log_alone_is_enough(tmp_path: Path) -> None:
    run_scenario(with_policy(load_scenario(CHATS), PolicyChoice("prefix_affinity")), tmp_path / "run")
    log = tmp_path / "elsewhere.g2log"
    data = (tmp_path / "run" / "events.g2log").read_bytes()
    log.write_bytes(data)
    whole = [cli(tmp_path, "explain", path, "60", "--json", hash_seed=k).stdout for k, path in enumerate(("run", log))]
    assert whole[0] == whole[1]
    explained = json.loads(whole[0])
    assert (explained["schema"], explained["finished"]) == ("g2sim.explain/1", True)
    log.write_bytes(data[: len(data) // 2])
    cut = cli(tmp_path, "explain", log, "3")
    assert cut.returncode == 1
    assert cut.stdout.startswith("request 3, session ")
    assert "record " in cut.stderr
