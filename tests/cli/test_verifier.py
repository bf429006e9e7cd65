"""``--verify`` on caches that are too large to be compared whole each time: what it sees, and when."""

from __future__ import annotations

from typing import Any

import pytest

from g2sim.actors.host_pool.messages import PoolChange
from g2sim.actors.host_pool.pool import RESIDENT, HostPool
from g2sim.actors.kv.blocks import BlockChain
from g2sim.actors.kv.numbers import NO_NUMBERS, Numbers
from g2sim.actors.worker.device_pool import DevicePool
from g2sim.bus.drivers import InlineDriver
from g2sim.bus.errors import InvariantViolation
from g2sim.scenarios.run import run_scenario
from g2sim.scenarios.schema import Scenario

OTHER = BlockChain((1,), (1,))
"""A block that no request has."""


def run(*, requests: int = 60) -> int:
    tier = {"scope": "cluster_shared", "num_host_blocks": 20_000, "d2h_bandwidth_gbps": 0.0, "h2d_bandwidth_gbps": 0.0}
    cache = {
        "block_size": 4,
        "bytes_per_token": 1,
        "capacity": {"type": "fixed", "blocks": 8_000},
        "host_offload": tier,
    }
    worker = {
        "parallelism": {"replicas": 2},
        "kv_cache": cache,
        "scheduler": {"max_batched_tokens": 4096},
        "timing": {"type": "fixed", "prefill_ms": 1.0, "decode_ms": 1.0},
    }
    values = {
        "engine": {"mode": "aggregated", "workers": {"aggregated": worker}},
        "traffic": {
            "source": {"type": "synthetic", "input_tokens": 400, "output_tokens": 2},
            "load": {"type": "concurrency", "concurrency": 2},
            "stop": {"requests": requests},
        },
    }
    return run_scenario(Scenario.from_dict(values), None, verify=True, driver=InlineDriver).checkpoints


def test_a_right_run_is_verified() -> None:
    assert run() > 60


def test_a_block_that_is_lost_without_an_event_is_missed_in_the_number_of_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache, stored = DevicePool.cache, 0

    def losing(pool: DevicePool, blocks: Numbers, numbers: Numbers) -> Numbers:
        nonlocal stored
        before, stored = stored, stored + len(blocks)
        first = cache(pool, blocks, numbers)
        if before < 4_000 <= stored:
            pool._primary[pool.resident_numbers()[-1]] = -1
            pool.resident_blocks -= 1
        return first

    monkeypatch.setattr(DevicePool, "cache", losing)
    with pytest.raises(InvariantViolation, match="blocks in G1"):
        run()


def test_a_block_that_becomes_another_is_seen_at_the_latest_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    advance, done = HostPool.advance, False

    def swapping(pool: HostPool, now_ms: float) -> None:
        nonlocal done
        advance(pool, now_ms)
        book = pool._book
        if not done and book.used_blocks > 3_000:
            done = True
            oldest = pool._evictable.take_oldest(1, NO_NUMBERS)
            assert oldest is not None
            book.take_out(oldest)
            other = pool._numbers(OTHER)
            run = PoolChange(stored=True, block_hashes=OTHER.sequence_hashes, tokens_hashes=OTHER.tokens_hashes)
            book.begin_store(-1, other, [run])
            book.states[other] = RESIDENT
            pool._evictable.add(other)

    monkeypatch.setattr(HostPool, "advance", swapping)
    with pytest.raises(InvariantViolation, match="blocks differ"):
        run()


def test_a_change_that_events_speak_of_is_seen_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare, calls = HostPool.prepare_store, 0

    def forgetful(pool: HostPool, message: Any, now_ms: float) -> Any:
        nonlocal calls
        reply = prepare(pool, message, now_ms)
        calls += 1
        if calls == 40:
            pool._book.pins[pool._numbers(message.chain)[0]] = 1
        return reply

    monkeypatch.setattr(HostPool, "prepare_store", forgetful)
    with pytest.raises(InvariantViolation, match=r"g2: 1 blocks differ"):
        run()
