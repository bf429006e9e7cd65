"""Cancellations that meet something else in the same instant, or what a hand-off has left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from instance_cases import play_run, write_play
from test_profile_cancel import timed_out

from g2sim.actors.handoff.events import DestinationActivated, SourceHeld, SourceReleased
from g2sim.actors.router.events import RequestPlaced, RequestWaits
from g2sim.actors.worker.events import CanceledRequestLeft, PassEnded, RequestEnded
from g2sim.bus.drivers import InlineDriver
from g2sim.scenarios.policy_source import PolicyChoice, with_policy
from g2sim.scenarios.run import run_scenario
from g2sim.scenarios.script import Script, scripted_scenario


def play(
    function: Any, *, split: bool, decode_ms: float = 1.0, at_most: int | None = None, token_ms: float = 0.0
) -> None:
    """One worker a role, blocks of 4 tokens, 10 ms a prefill pass.

    Args:
        at_most: of a policy that lets requests wait.
        token_ms: what the hand-off of a token takes.
    """
    worker = {
        "kv_cache": {"block_size": 4, "capacity": {"type": "fixed", "blocks": 32}},
        "timing": {"type": "fixed", "prefill_ms": 10.0, "decode_ms": decode_ms},
        "scheduler": {"max_sequences": 8, "max_batched_tokens": 64},
    }
    mode, roles = ("disaggregated", ("prefill", "decode")) if split else ("aggregated", ("aggregated",))
    values: dict[str, Any] = {"engine": {"mode": mode, "workers": dict.fromkeys(roles, worker)}}
    if token_ms:
        values["engine"]["kv_transfer"] = {"bytes_per_token": round(token_ms * 1e6), "bandwidth_gb_per_second": 1.0}
    scenario = scripted_scenario(values, Path(__file__))
    if at_most is not None:
        scenario = with_policy(scenario, PolicyChoice("loaded_policy:Hesitant", {"at_most": at_most}))
    run_scenario(scenario, None, verify=True, driver=InlineDriver, script=Script(function, "races.py"))


@pytest.mark.parametrize("split", [False, True], ids=["aggregated", "1P1D"])
def test_a_request_that_ends_before_its_cancellation_arrives_has_completed(split: bool) -> None:
    """Decode passes take no time, so the request ends in the round in which the script sees its prompt computed."""

    async def scenario(cluster: Any) -> None:
        request = cluster.submit([1, 2], output_tokens=3)
        await cluster.event(SourceHeld if split else PassEnded)
        request.cancel()
        assert (await request.end())["terminal_status"] == "completed"
        assert cluster.now_ms == 10.0
        await cluster.sleep(5.0)
        await cluster.submit([7]).end()

    play(scenario, split=split, decode_ms=0.0)


@pytest.mark.parametrize("split", [False, True], ids=["aggregated", "1P1D"])
def test_a_second_cancellation_in_one_instant_changes_nothing(split: bool) -> None:
    async def scenario(cluster: Any) -> None:
        request = cluster.submit([1, 2], output_tokens=9)
        await cluster.sleep(12.5)
        request.cancel()
        request.cancel()
        assert (await request.end())["terminal_status"] == "canceled"
        assert len(cluster.records(RequestEnded)) == 1

    play(scenario, split=split)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_request_that_its_router_releases_on_the_way_is_canceled_behind_the_router(role: str) -> None:
    """The end of the first lets the second go, which the router hears of when it is asked about the second."""

    async def scenario(cluster: Any) -> None:
        first, second = cluster.submit([1, 2], output_tokens=30), cluster.submit([3, 4], output_tokens=30)
        if role == "decode":
            await cluster.event(RequestWaits, request=1, pool="decode")
        await cluster.sleep(0.5)
        first.cancel()
        second.cancel()
        assert (await first.end())["terminal_status"] == "canceled"
        assert (await second.end())["terminal_status"] == "canceled"
        assert cluster.records(RequestPlaced, request=1, pool="decode") or role == "prefill"
        await cluster.submit([5]).end()

    play(scenario, split=True, at_most=1)


def test_a_source_that_is_released_after_a_cancellation_is_no_part_of_the_request_any_more() -> None:
    """The prefill worker computes another prompt when the destination becomes active, so the source has to wait."""

    async def scenario(cluster: Any) -> None:
        request = cluster.submit([1, 2], output_tokens=9)
        other = cluster.submit([3, 4], at_ms=5.0)
        await cluster.event(DestinationActivated, request=0)
        await cluster.sleep(0.5)
        request.cancel()
        row = await request.end()
        assert (row["terminal_status"], row.get("source_released_ms")) == ("canceled", None)
        await other.end()
        (released,) = cluster.records(SourceReleased, request=0)
        (left,) = cluster.records(CanceledRequestLeft, request=0)
        assert left.time_ms < released.time_ms

    play(scenario, split=True, token_ms=0.25)


@pytest.mark.parametrize("cutoff_ms", [41.5, 166.2, 191.3, 222.9, 260.2])
def test_what_computes_a_canceled_request_keeps_it_on_the_servers(tmp_path: Path, cutoff_ms: float) -> None:
    """Also if its source was released long before: only the end of the pass gives the rest back."""
    values = timed_out(
        write_play(tmp_path), cutoff_ms, split=True, scope="cluster_shared", policy="round_robin", busy=True
    )
    run = play_run(values)
    ends = [record.event for record in run.records if isinstance(record.event, RequestEnded)]
    staying = [end for end in ends if end.status == "canceled" and end.leaves_later]
    assert run.report["summary"]["agentic_profile"]["unsettled_server_requests"] == len(staying)
