"""What readers say they dropped or changed, prompts that accumulate, and reruns of generated traffic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from g2sim.actors.kv.prompt import RunPrompt
from g2sim.actors.traffic.applied_compute import load_applied_compute
from g2sim.actors.traffic.dynamo_requests import load_dynamo_requests
from g2sim.actors.traffic.mooncake import load_mooncake
from g2sim.actors.traffic.remarks import Remarks
from g2sim.actors.traffic.request import RequestStatus
from g2sim.actors.traffic.sessions import Session, SessionDriver, Turn
from g2sim.actors.traffic.synthetic import UniquePrompt

Row = dict[str, Any]


def written(path: Path, *rows: Row) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_mooncake_remarks_name_lines(tmp_path: Path) -> None:
    row: Row = {"timestamp": 7, "input_length": 4, "output_length": 1, "hash_ids": [1]}
    odd = row | {"hash_ids": [1, 2], "priority": 3}
    remarks = Remarks(written(tmp_path / "t.jsonl", row, odd, odd, odd, odd, odd | {"timestamp": 5, "a\n": 0}))
    load_mooncake(remarks.path, block_size_tokens=4, remarks=remarks)
    assert remarks.notes() == (
        "t.jsonl:2: 'priority' dropped: it has no effect (also on 3, 4, 5 and 1 more lines)",
        "t.jsonl:2: hash_ids beyond input_length dropped (also on 3, 4, 5 and 1 more lines)",
        "t.jsonl:6: 'a\\n' dropped: it has no effect",
        "t.jsonl:6: timestamps changed: counted from this one, 5 ms",
    )
    quiet = Remarks(written(tmp_path / "q.jsonl", row))
    load_mooncake(quiet.path, block_size_tokens=4, closed_loop=True, remarks=quiet)
    assert quiet.notes() == ()


def test_a_trace_of_many_odd_keys_gives_a_short_list(tmp_path: Path) -> None:
    row: Row = {"timestamp": 0, "output_length": 1, "hash_ids": [1]}
    remarks = Remarks(written(tmp_path / "t.jsonl", *(row | {f"key{number}": 0} for number in range(200))))
    load_mooncake(remarks.path, remarks=remarks)
    notes = remarks.notes()
    assert len(notes) == 51
    assert notes[-1].startswith("t.jsonl:51: further members dropped (also on 52, 53, 54 and 146 more lines)")


def test_other_formats_remark_too(tmp_path: Path) -> None:
    row: Row = {"num_turns": 0, "input_prompt_length": 1, "final_assistant_response_length": 1, "note": "x"}
    row |= {"assistant_response_length": [], "tool_call_output_length": [], "tool_call_latency": []}
    remarks = Remarks(written(tmp_path / "a.jsonl", row))
    load_applied_compute(remarks.path, remarks=remarks)
    assert remarks.notes() == ("a.jsonl:1: 'note' dropped: it has no effect",)
    replay = {"trace_block_size": 4, "input_length": 4, "input_sequence_hashes": [1]}
    request = {"request_id": "a", "output_tokens": 1, "total_time_ms": 1.5, "replay": replay}
    record: Row = {"schema": "dynamo.request.trace.v1", "event_type": "request_end", "event_time_unix_ms": 9}
    remarks = Remarks(written(tmp_path / "d.jsonl", {"event_type": "tool_start"}, record | {"request": request}))
    assert load_dynamo_requests(remarks.path, remarks=remarks).sessions[0].first_arrival_ms == 0.0
    assert remarks.notes() == (
        "d.jsonl:1: a record of type tool_start dropped",
        "d.jsonl:2: request_received_ms is missing: start taken from the time of the event",
        "d.jsonl:2: total_time_ms changed: rounded to whole milliseconds",
    )


def turn(token: int, output_tokens: int, **authored: Any) -> Turn:
    return Turn(prompt=RunPrompt((token,), 4, 4), output_tokens=output_tokens, **authored)


ENDS = st.sampled_from([RequestStatus.COMPLETED, RequestStatus.REJECTED])


@given(turns=st.lists(st.tuples(st.integers(0, 5), ENDS), min_size=1, max_size=6), limit=st.integers(0, 5))
def test_a_prompt_is_the_one_before_it_with_what_was_generated(
    turns: list[tuple[int, RequestStatus]], limit: int
) -> None:
    """A rejected turn was said, but not answered; an answer may be cut short."""
    session = Session(session_id="s", first_arrival_ms=0.0, turns=tuple(turn(9, count) for count, _ in turns))
    driver = SessionDriver([session], accumulating=lambda _, output_tokens: min(limit, output_tokens))
    said: list[int] = []
    for at_ms, (count, status) in enumerate(turns):
        (release,) = driver.release(float(at_ms))
        said += [9] * 4
        assert release.spec.prompt.tokens(0, release.spec.prompt.length).tolist() == said
        assert release.spec.output_ids is not None
        assert len(release.spec.output_ids) == count
        if status is RequestStatus.COMPLETED:
            said += release.spec.output_ids[:limit].tolist()
        driver.ended([(release.key, status)], float(at_ms))


def test_planned_answers_do_not_depend_on_the_order_of_turns_and_authored_ones_take_no_draw() -> None:
    def answers(*sessions: Session, seats: int) -> dict[str | None, list[int]]:
        driver = SessionDriver(sessions, concurrency=seats, accumulating=lambda _, output_tokens: output_tokens)
        found: dict[str | None, list[int]] = {}
        while releases := driver.release(0.0):
            for release in reversed(releases):
                assert release.spec.output_ids is not None
                found.setdefault(release.spec.session_id, []).extend(release.spec.output_ids.tolist())
                driver.ended([(release.key, RequestStatus.COMPLETED)], 0.0)
        return found

    first = Session(
        session_id="a", first_arrival_ms=None, turns=(turn(0, 3), turn(0, 2, output_ids=(7, 8)), turn(1, 4))
    )
    second = Session(session_id="b", first_arrival_ms=None, turns=(turn(0, 5), turn(0, 1)))
    alone, together = answers(first, second, seats=1), answers(first, second, seats=2)
    assert alone == together
    assert alone["a"][3:5] == [7, 8]
    plain = Session(session_id="a", first_arrival_ms=None, turns=(turn(0, 3), turn(1, 4)))
    assert answers(plain, second, seats=1) == {"a": alone["a"][:3] + alone["a"][5:], "b": alone["b"]}


@given(index=st.integers(0, 10**6), start=st.integers(0, 50), count=st.integers(0, 50))
def test_a_part_of_a_unique_prompt_is_what_the_whole_has_there(index: int, start: int, count: int) -> None:
    prompt = UniquePrompt(index, 100)
    assert prompt.tokens(start, start + count).tolist() == prompt.tokens(0, 100)[start : start + count].tolist()


@pytest.mark.parametrize("length", [1, 100])
def test_unique_prompts_differ(length: int) -> None:
    assert len({UniquePrompt(index, length).tokens(0, length).tobytes() for index in range(1000)}) == 1000
