"""Field cases about the scheduler, liveness and the load driver, as whole runs."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from field_runs import BLOCK, host, row, simulate, worker

from g2sim.actors.worker.events import RequestPreempted
from g2sim.bus.errors import ConfigError, Deadlock
from g2sim.scenarios.report import report_text

ROLES = [("aggregated",), ("prefill", "decode")]


def test_f49_a_waiter_starts_when_room_is_freed_without_a_transfer(tmp_path: Path) -> None:
    """r0 has all its blocks on the host when it ends: nothing is copied, and r1 starts at that very instant."""
    rows = [row(0, range(8)), row(100, [*range(7), 60]), row(100.5, range(20, 28))]
    ran = simulate(tmp_path, rows, aggregated=worker(gpu_blocks=8, host=host(32), prefill_ms=10.0))
    assert ran.rows[2]["first_admit_ms"] == ran.rows[1]["terminal_time_ms"]


@pytest.mark.parametrize("roles", ROLES)
def test_f50_steps_that_take_no_time_are_steps(tmp_path: Path, roles: tuple[str, ...]) -> None:
    rows = [row(10.0 * (k // 5), [20 * k + b for b in range(3)], out=3) for k in range(50)]
    tier = host(64, d2h_ms=0.0, h2d_ms=0.0)
    workers = {role: worker(gpu_blocks=64, host=tier, prefill_ms=0.0, decode_ms=0.0) for role in roles}
    ran = simulate(tmp_path, rows, **workers)
    assert [one["terminal_time_ms"] for one in ran.rows] == [one["timestamp"] for one in rows]
    assert set(ran.column("terminal_status")) == {"completed"}
    json.loads(report_text(ran.report), parse_constant=lambda text: pytest.fail(text))


def test_f51_a_request_that_never_fits_ends_and_blocks_nobody(tmp_path: Path) -> None:
    """G1=16: 20 blocks of prompt are refused. 16 whose output needs a 17th end the run, as they do the reference's."""
    rows = [row(0, range(20)), row(0, [50, 51])]
    ran = simulate(tmp_path, rows, aggregated=worker(gpu_blocks=16, host=host(1024)))
    assert ran.column("terminal_status") == ["rejected", "completed"]
    rows = [row(0, range(16), out=10), row(0, [50, 51])]
    with pytest.raises(Deadlock) as caught:
        simulate(tmp_path, rows, aggregated=worker(gpu_blocks=16, host=host(1024)))
    assert "aggregated-0: request 0 waits for 17 GPU blocks, more than the 16 there are" in caught.value.waiting


@pytest.mark.parametrize("host_blocks", [0, 64])
@pytest.mark.parametrize("count", [2, 30])
def test_f52_preemption_is_no_ring(tmp_path: Path, host_blocks: int, count: int) -> None:
    """G1=20: requests of 8 blocks that grow by 5 more. All end, the oldest always makes progress."""
    rows = [row(0.0, [100 * k + b for b in range(8)], out=20) for k in range(count)]
    tier = host(host_blocks, d2h_ms=0.1, h2d_ms=0.1) if host_blocks else None
    ran = simulate(tmp_path, rows, aggregated=worker(gpu_blocks=20, host=tier))
    assert set(ran.column("terminal_status")) == {"completed"}
    assert len(ran.of(RequestPreempted)) < 3 * count
    assert all(event.request != 0 for event in ran.of(RequestPreempted))


def test_f59_the_session_of_a_failed_request_ends_and_frees_its_place(tmp_path: Path) -> None:
    """Cap 1: the first turn of A never fits, its second is skipped, and B has both of its turns."""
    rows = [
        row(0, range(40), session_id="A"),
        row(0, [*range(40), 41], session_id="A", delay=1.0),
        row(0, [60], session_id="B"),
        row(0, [60, 61], session_id="B", delay=1.0),
    ]
    for turn in rows[1::2]:
        del turn["timestamp"]
    ran = simulate(tmp_path, rows, load={"type": "concurrency", "concurrency": 1}, aggregated=worker(gpu_blocks=16))
    ended = {(one["session_id"], one["turn_index"]): one["terminal_status"] for one in ran.rows}
    assert ended["A", 0] == "rejected"
    assert ended.get(("A", 1), "skipped") != "completed"
    assert (ended["B", 0], ended["B", 1]) == ("completed", "completed")


def test_f60_the_cap_counts_sessions_with_their_pauses(tmp_path: Path) -> None:
    rows = []
    for session in range(4):
        for turn in range(3):
            one = row(0, [10 * session + b for b in range(turn + 1)], out=9, session_id=f"s{session}")
            if turn:
                del one["timestamp"]
                one["delay"] = 100.0
            rows.append(one)
    ran = simulate(tmp_path, rows, load={"type": "concurrency", "concurrency": 2}, aggregated=worker(gpu_blocks=64))
    spans = []
    for session in range(4):
        own = [one for one in ran.rows if one["session_id"] == f"s{session}"]
        spans.append((own[0]["arrival_time_ms"], own[-1]["terminal_time_ms"]))
    for start_ms, _ in spans:
        assert sum(begin <= start_ms < end for begin, end in spans) <= 2
    assert spans[2][0] == min(spans[0][1], spans[1][1])


@pytest.mark.parametrize("roles", ROLES)
def test_f61_the_cap_holds_for_every_deployment(tmp_path: Path, roles: tuple[str, ...]) -> None:
    rows = [row(0, [10 * k, 10 * k + 1], out=8) for k in range(12)]
    workers = {role: worker(gpu_blocks=64) for role in roles}
    ran = simulate(tmp_path, rows, load={"type": "concurrency", "concurrency": 2}, **workers)
    edges = sorted(edge for one in ran.rows for edge in ((one["arrival_time_ms"], 1), (one["terminal_time_ms"], -1)))
    assert max(itertools.accumulate(step for _, step in edges)) == 2


def test_f67_rows_are_run_by_time_and_equal_times_keep_their_order(tmp_path: Path) -> None:
    rows = [row(t, [k + 1]) for k, t in enumerate([300.0, 100.0, 100.0, 200.0])]
    ran = simulate(tmp_path, rows, aggregated=worker(gpu_blocks=64, max_sequences=1))
    order = sorted(ran.rows, key=lambda one: one["first_admit_ms"])
    assert [one["arrival_time_ms"] for one in order] == [0.0, 0.0, 100.0, 200.0]
    assert [one["request"] for one in order][:2] == sorted(one["request"] for one in order[:2])


def test_f58_a_trace_of_other_blocks_than_the_workers_is_refused_or_converted(tmp_path: Path) -> None:
    """Ids of 8 tokens on workers with blocks of 4: each id is two blocks, and hits are found."""
    rows = [row(0, [1, 2], tokens=16), row(100, [1, 2, 3], tokens=24)]
    ran = simulate(tmp_path, rows, block=8, aggregated=worker(gpu_blocks=64))
    assert ran.rows[1]["reused_input_tokens"] == 16


def test_f63_too_few_hash_ids_are_refused_with_line_and_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trace\.jsonl:2: .*2 ids for input_length 9'; allowed: 3 ids"):
        simulate(tmp_path, [row(0, [1, 2]), row(0, [1, 2], tokens=9)], aggregated=worker(gpu_blocks=8))


def test_f63_surplus_hash_ids_are_ignored_as_the_reference_does(tmp_path: Path) -> None:
    """Recorded (mooncake_surplus_hashes): what a prompt does not reach is not part of it."""
    rows = [row(0, [1, 2, 3], tokens=3), row(100, [1, 2, 3], tokens=8), row(200, [1, 2, 7], tokens=12)]
    ran = simulate(tmp_path, rows, aggregated=worker(gpu_blocks=8))
    assert ran.column("reused_input_tokens") == [0, 0, 8]


@pytest.mark.parametrize("value", [None, "abc", float("nan")])
def test_f65_a_bad_arrival_time_is_refused_with_line_and_value(tmp_path: Path, value: object) -> None:
    rows = [row(0, [1]), {**row(0, [2]), "timestamp": value}, row(100, [3])]
    with pytest.raises(ConfigError) as caught:
        simulate(tmp_path, rows, aggregated=worker(gpu_blocks=8))
    assert "trace.jsonl:2" in str(caught.value)
    assert ("timestamp" if value is None else str(value).lower()) in str(caught.value).lower()


def test_f64_a_part_filled_block_is_never_shared(tmp_path: Path) -> None:
    rows = [row(0, [1, 2], tokens=6), row(100, [1, 2], tokens=8), row(200, [1, 2, 3], tokens=12)]
    ran = simulate(tmp_path, rows, aggregated=worker(gpu_blocks=64))
    assert ran.column("reused_input_tokens") == [0, BLOCK, 2 * BLOCK]


def test_f66_the_first_arrival_is_time_zero(tmp_path: Path) -> None:
    rows = [row(1_787_000_000_000 + t, [k]) for k, t in enumerate([0, 1000, 2500])]
    ran = simulate(tmp_path, rows, aggregated=worker(gpu_blocks=64))
    assert ran.column("arrival_time_ms") == [0.0, 1000.0, 2500.0]


def test_f68_lengths_of_zero(tmp_path: Path) -> None:
    for bad in ({"input_length": 0, "output_length": 5, "hash_ids": []}, {"input_length": 0, "output_length": 0}):
        with pytest.raises(ConfigError, match=r"trace\.jsonl:2"):
            simulate(tmp_path, [row(0, [1]), {"timestamp": 0, "hash_ids": [], **bad}], aggregated=worker(gpu_blocks=8))


def test_f72_a_context_that_shrinks_is_taken_as_written(tmp_path: Path) -> None:
    prompts = [list(range(1, 11)), [1, 2, 3, 20], [1, 2, 3, 20, 21]]
    rows = [row(0, ids, session_id="s") for ids in prompts]
    for turn in rows[1:]:
        del turn["timestamp"]
        turn["delay"] = 10.0
    ran = simulate(tmp_path, rows, aggregated=worker(gpu_blocks=64))
    assert ran.column("input_length") == [40, 16, 20]
    assert ran.column("reused_input_tokens") == [0, 3 * BLOCK, 4 * BLOCK]


def test_f49_waiting_without_a_pending_event_is_an_error_that_names_the_request(tmp_path: Path) -> None:
    with pytest.raises(Deadlock) as caught:
        simulate(
            tmp_path,
            [row(0, range(16))],
            aggregated=worker(gpu_blocks=64, max_batched_tokens=32, chunked_prefill=False),
        )
    assert any("request 0 waits" in line for line in caught.value.waiting)
