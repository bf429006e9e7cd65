"""Field cases about requests that are aborted while copies run, as scripted scenarios."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from field_runs import host, worker

from g2sim.actors.host_pool.events import LoadQueued, StoreLanded, StorePrepared
from g2sim.scenarios.run import run_scenario
from g2sim.scenarios.script import Script, ScriptFailed, scripted_scenario


def play(function: Any, **workers: Any) -> Any:
    mode = "disaggregated" if "prefill" in workers else "aggregated"
    scenario = scripted_scenario({"name": "abort", "engine": {"mode": mode, "workers": workers}}, Path(__file__))
    return run_scenario(scenario, None, verify=True, script=Script(function, "abort.py"))


@pytest.mark.parametrize("shared", [False, True])
def test_f28_a_reader_waits_for_the_end_of_a_store_whose_writer_was_aborted(shared: bool) -> None:
    """6 blocks at 10 ms each; the writer is aborted 20 ms into its store, the reader comes at 25 ms."""

    async def scenario(cluster: Any) -> None:
        prompt = list(range(6))
        writer = cluster.submit(prompt, output_tokens=200)
        stored = await cluster.event(StorePrepared)
        await cluster.sleep(20.0)
        writer.cancel()
        assert (await writer.end())["terminal_status"] == "canceled"
        for filler in range(2):  # pushes the blocks out of G1
            await cluster.submit([100 * (filler + 1) + block for block in range(8)]).end()
        reader = cluster.submit([*prompt, 7])
        await reader.end()
        landed = [one for one in cluster.records(StoreLanded) if one.event.transfer == stored.transfer]
        assert landed[0].event.ended_ms <= reader.row["first_admit_ms"]
        assert reader.row["first_admission_host_reused_input_tokens"] == 24
        assert reader.row["first_admit_ms"] <= landed[0].event.ended_ms + 200.0

    play(scenario, aggregated=worker(gpu_blocks=8, host=host(64, d2h_ms=10.0, shared=shared)))


@pytest.mark.parametrize("shared", [False, True])
def test_f32_an_abort_during_a_store_leaks_nothing(shared: bool) -> None:
    """100 rounds: after each, nothing runs, and the host holds all six blocks of the prompt or none."""

    async def scenario(cluster: Any) -> None:
        for number in range(100):
            prompt = [10 * number + block for block in range(6)]
            request = cluster.submit(prompt, output_tokens=200)
            await cluster.event(StorePrepared)
            await cluster.sleep(30.0)
            request.cancel()
            assert (await request.end())["terminal_status"] == "canceled"
            await cluster.sleep(100.0)
            made = cluster._cluster
            (place,) = made.workers["aggregated-0"].places
            assert not place.rank.running
            assert not place.rank.queue
            assert place.rank.pool.active_blocks == 0
            assert place.rank.pool.reserved_blocks == 0
            (pool,) = made.host_pools.values()
            assert pool.used_blocks == pool.resident_blocks <= 64
        assert len(cluster.records(StorePrepared)) == len(cluster.records(StoreLanded)) == 100
        assert not cluster.records(LoadQueued)

    play(scenario, aggregated=worker(gpu_blocks=16, host=host(64, d2h_ms=10.0, shared=shared)))


def test_a_request_that_has_not_arrived_cannot_be_canceled() -> None:
    async def scenario(cluster: Any) -> None:
        cluster.submit([1], at_ms=5.0).cancel()

    with pytest.raises(ScriptFailed, match="has not arrived"):
        play(scenario, aggregated=worker(gpu_blocks=16))


@pytest.mark.parametrize("delay_ms", [0.0, 0.5, 1.5, 3.0, 4.5, 6.0, 9.0])
def test_a_cancellation_at_any_time_of_a_hand_off_gives_everything_back(delay_ms: float) -> None:
    async def scenario(cluster: Any) -> None:
        request = cluster.submit(list(range(6)), output_tokens=4)
        await cluster.sleep(delay_ms)
        if request.number is None:
            await cluster.sleep(0.1)
        request.cancel()
        await request.end()
        await cluster.sleep(100.0)
        for actor in cluster._cluster.workers.values():
            for place in actor.places:
                assert place.rank.pool.active_blocks == 0
        assert (await cluster.submit(list(range(6)), output_tokens=4).end())["terminal_status"] == "completed"

    play(scenario, prefill=worker(gpu_blocks=16, host=host(64)), decode=worker(gpu_blocks=16, host=host(64)))


@pytest.mark.parametrize("delay_ms", [0.5, 5.0, 20.0, 60.0])
def test_a_canceled_request_is_no_load_for_any_router(delay_ms: float) -> None:
    """In its queue, in a pass, during the hand-off, or while it decodes."""

    async def scenario(cluster: Any) -> None:
        cluster.submit(list(range(12)), output_tokens=4)
        request = cluster.submit(list(range(20, 32)), output_tokens=40)
        await cluster.sleep(delay_ms)
        request.cancel()
        await cluster.idle()
        await cluster.sleep(100.0)
        kernel = cluster._cluster.kernel
        for name in ("router-prefill", "router-decode"):
            await cluster.submit([99], output_tokens=1).end()
            loads = kernel.slot(name).actor.state.pool.loads
            assert request.number not in loads, name

    role = worker(gpu_blocks=32, prefill_ms=10.0, max_sequences=1, max_batched_tokens=16)
    workers = {"prefill": role, "decode": role}
    values = {"name": "abort", "engine": {"mode": "disaggregated", "workers": workers}}
    values["router"] = {"policy": "least_loaded"}
    scenario_of = scripted_scenario(values, Path(__file__))
    run_scenario(scenario_of, None, verify=True, script=Script(scenario, "abort.py"))
