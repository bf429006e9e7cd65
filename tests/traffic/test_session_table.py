"""Sessions in columns are the sessions that were put in, and a driver releases them as a plain sort says."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from g2sim.actors.kv.prompt import RunPrompt
from g2sim.actors.traffic.mooncake import load_mooncake
from g2sim.actors.traffic.request import RequestStatus
from g2sim.actors.traffic.session_table import SessionTable
from g2sim.actors.traffic.sessions import Session, SessionDriver, Turn
from g2sim.actors.traffic.synthetic import SessionShape, plain_requests, sessions
from g2sim.bus import log
from g2sim.scenarios.run import run_scenario
from g2sim.scenarios.schema import Scenario

RUN_TOKENS = 4
IDS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5)
TURNS = st.tuples(
    st.integers(0, 4),
    IDS,
    st.integers(0, 9),
    st.floats(0.0, 1e6),
    st.none() | st.lists(st.integers(0, 2**32 - 1), max_size=3),
)
ARRIVALS = st.lists(st.none() | st.floats(-1e6, 1e6), min_size=5, max_size=5)

BYTES_PER_REQUEST = 250
"""Of a request that waits or has ended; a row of 3 ids takes 105 B, and 566 B if it is kept as objects."""

BYTES_PER_REQUEST_OF_A_RUN = 400
"""At the peak of a run that has ended most of its requests: what the trace takes, and four samples in the report.

It is 263 B here. What a process did before moves the peak of a run by some 100 kB, so runs must differ by far more.
"""


@given(arrivals=ARRIVALS, turns=st.lists(TURNS, max_size=20))
def test_a_table_gives_back_what_was_put_in(
    arrivals: list[float | None], turns: list[tuple[int, list[int], int, float, list[int] | None]]
) -> None:
    """Turns of different sessions come mixed, and names may be of any length."""
    table = SessionTable(RUN_TOKENS)
    names = ["", "a", "é" * 3, "request_1", "日本"]
    for name, arrival_ms in zip(names, arrivals, strict=True):
        table.begin(name, arrival_ms)
    expected: list[list[Turn]] = [[] for _ in names]
    for session, ids, output_tokens, delay_ms, output_ids in turns:
        prompt = RunPrompt(tuple(ids), RUN_TOKENS, len(ids) * RUN_TOKENS - 1)
        authored = None if output_ids is None else tuple(output_ids)
        expected[session].append(
            Turn(prompt=prompt, output_tokens=output_tokens, delay_ms=delay_ms, output_ids=authored)
        )
        table.add_turn(
            session,
            ids,
            prompt_tokens=prompt.length,
            output_tokens=output_tokens,
            delay_ms=delay_ms,
            output_ids=output_ids,
        )
    made = table.sessions()
    plain = [
        Session(session_id=name, first_arrival_ms=arrival_ms, turns=tuple(own))
        for name, arrival_ms, own in zip(names, arrivals, expected, strict=True)
    ]
    assert len(made) == len(plain)
    assert list(made) == plain
    assert [made[index] for index in reversed(range(5))] == plain[::-1]


@given(
    arrivals=st.lists(st.sampled_from([-3.0, 0.0, 0.1, 0.2, 0.30000000000000004, 7.0]), min_size=1, max_size=12),
    speedup=st.sampled_from([0.3, 1.0, 3.0, 1e300]),
)
def test_an_open_loop_releases_sessions_by_ready_time_and_then_by_their_place(
    arrivals: list[float], speedup: float
) -> None:
    driver = SessionDriver(
        plain_requests(len(arrivals), input_tokens=1, output_tokens=1, arrivals_ms=arrivals), speedup=speedup
    )
    assert driver.total_requests == len(arrivals)
    got = []
    while (now_ms := driver.next_ready_ms()) is not None:
        for release in driver.release(now_ms):
            assert release.spec.uuid is not None
            got.append((release.arrival_ms, release.spec.uuid - 1))
            driver.ended([(release.key, RequestStatus.COMPLETED)], now_ms)
    first_ms = min(arrivals)
    assert got == sorted(((arrival_ms - first_ms) / speedup, index) for index, arrival_ms in enumerate(arrivals))


@given(
    shape=st.builds(
        SessionShape,
        turns=st.integers(1, 3),
        input_tokens=st.integers(1, 40),
        output_tokens=st.just(1),
        block_size_tokens=st.just(8),
        shared_prefix_ratio=st.sampled_from([0.0, 0.5, 1.0]),
        prefix_groups=st.integers(0, 3),
    )
)
def test_generated_ids_are_given_in_the_order_of_first_use(shape: SessionShape) -> None:
    """So that they are what a trace with the same prompts would be read as."""
    ids = [
        id_
        for session in sessions(6, shape, None)
        for turn in session.turns
        if isinstance(turn.prompt, RunPrompt)
        for id_ in turn.prompt.ids
    ]
    first_seen = list(dict.fromkeys(ids))
    assert first_seen == list(range(len(first_seen)))


def _held_after(folder: Path, requests: int) -> int:
    """Bytes that a trace and its driver hold once all requests have ended."""
    path = folder / f"{requests}.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for number in range(requests):
            row = {"timestamp": number, "output_length": 1, "hash_ids": [3 * number, 3 * number + 1, 3 * number + 2]}
            file.write(json.dumps(row) + "\n")
    tracemalloc.start()
    try:
        driver = SessionDriver(load_mooncake(path))
        while (now_ms := driver.next_ready_ms()) is not None:
            driver.ended([(release.key, RequestStatus.COMPLETED) for release in driver.release(now_ms)], now_ms)
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def test_a_request_that_waits_or_has_ended_takes_little_memory(tmp_path: Path) -> None:
    _held_after(tmp_path, 10)
    few, many = _held_after(tmp_path, 500), _held_after(tmp_path, 4500)
    assert many - few < 4000 * BYTES_PER_REQUEST


def _peak_of_run(folder: Path, requests: int) -> int:
    """Most bytes that a run with its log holds at once, of requests with one and the same prompt, one at a time."""
    path = folder / f"same-{requests}.jsonl"
    row = {"output_length": 8, "input_length": 16, "hash_ids": [5]}
    path.write_text("".join(json.dumps(row | {"timestamp": 100 * n}) + "\n" for n in range(requests)), encoding="utf-8")
    worker = {
        "kv_cache": {"block_size": 4, "capacity": {"type": "fixed", "blocks": 64}},
        "timing": {"type": "fixed", "prefill_ms": 2.0, "decode_ms": 1.0},
    }
    source = {"type": "trace", "format": "mooncake", "paths": [str(path)], "block_size": 16}
    scenario = Scenario.from_dict(
        {
            "engine": {"mode": "aggregated", "workers": {"aggregated": worker}},
            "traffic": {"source": source, "load": {"type": "trace_timestamps"}},
        }
    )
    tracemalloc.start()
    try:
        run_scenario(scenario, folder / f"run-{requests}")
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_the_peak_of_a_run_hardly_grows_with_its_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "CHUNK_BYTES", 4096)  # what is not written yet is not to grow here
    _peak_of_run(tmp_path, 10)  # what is imported late is imported now
    few, many = _peak_of_run(tmp_path, 800), _peak_of_run(tmp_path, 3200)
    assert many - few < 2400 * BYTES_PER_REQUEST_OF_A_RUN
