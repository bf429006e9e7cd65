"""The state at an instant is what a slow and obvious reading of the log says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from travel_runs import LAG_MS

from g2sim.bus.errors import ConfigError
from g2sim.bus.log import LogReader
from g2sim.scenarios.records import Numbered, numbered, record_value
from g2sim.scenarios.run_folder import LOG_NAME
from g2sim.scenarios.time_travel import inspect_run

RANKS = ("aggregated-0/0", "aggregated-1/0")


def log_of(run: Path) -> list[Numbered]:
    with LogReader(run / LOG_NAME) as reader:
        return list(numbered(reader))


def residency(records: list[Numbered], rank: str, tier: str) -> list[int]:
    """Blocks of a rank's tier, by its KV events."""
    held: set[int] = set()
    for one in records:
        value = record_value(one.idx, one.record)
        if not value["event"].startswith("kv.") or f"{value['role']}-{value['worker']}/{value['dp_rank']}" != rank:
            continue
        if value["tier"] == tier:
            held = (
                held | set(value["block_hashes"]) if value["event"] == "kv.sto" else held - set(value["block_hashes"])
            )
    return sorted(held)


def check(state: dict[str, Any], before: list[Numbered], heard: list[Numbered]) -> None:
    for rank in state["ranks"]:
        name = rank["rank"]
        assert rank["g1_blocks"] == residency(before, name, "device")
        assert rank["g2_blocks"] == residency(before, name, "host_pinned")
        assert rank["index_g1_blocks"] == residency(heard, name, "device")
        assert rank["index_g2_blocks"] == residency(heard, name, "host_pinned")
    tags = [record_value(one.idx, one.record) for one in before]
    arrived = {value["request"] for value in tags if value["event"] == "tr.arr"}
    ended = {value["request"] for value in tags if value["event"] == "wk.fin"}
    assert state["open_requests"] == sorted(arrived - ended)
    assert sum(state["ended"].values()) == len(ended)
    queued = {request for rank in state["ranks"] for request in rank["running"] + rank["waiting"]}
    assert queued <= set(state["open_requests"])
    (pool,) = state["g2_pools"]
    assert len(pool["resident_blocks"]) + len(pool["pending_blocks"]) <= pool["capacity_blocks"]
    assert set(pool["pinned_blocks"]) <= set(pool["resident_blocks"])


@settings(deadline=None, max_examples=25)
@given(at_ms=st.floats(0, 120))
def test_at_an_instant_everything_up_to_it_has_happened_and_the_index_is_as_late_as_it_is(
    late: Path, at_ms: float
) -> None:
    records = log_of(late)
    state = inspect_run(late, at_ms=at_ms).value
    before = [one for one in records if one.record.time_ms <= at_ms]
    check(state, before, [one for one in before if one.record.time_ms + LAG_MS <= at_ms])


@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_after_a_record_that_one_has_happened_and_the_next_has_not(plain: Path, data: st.DataObject) -> None:
    records = log_of(plain)
    idx = data.draw(st.integers(0, len(records) - 1))
    moment = inspect_run(plain, record=idx)
    assert moment.record is not None
    assert moment.record.idx == moment.value["record"] == idx
    check(moment.value, records[: idx + 1], records[: idx + 1])


def test_the_run_has_what_these_tests_are_about(plain: Path) -> None:
    tags = {record_value(one.idx, one.record)["event"] for one in log_of(plain)}
    assert {"kv.sto", "kv.rem", "hp.prep", "hp.load", "wk.adm"} <= tags


def test_before_the_first_record_there_is_nothing_and_after_the_last_everything(plain: Path) -> None:
    end = inspect_run(plain)
    assert end.value["ended"] == {"completed": 12}
    assert end.value["open_requests"] == []
    assert inspect_run(plain, at_ms=1e12).value["ranks"] == end.value["ranks"]


def test_a_record_that_the_log_does_not_have_is_refused(plain: Path) -> None:
    count = len(log_of(plain))
    with pytest.raises(ConfigError, match=f"0 to {count - 1}: the log has {count} records"):
        inspect_run(plain, record=count)


def test_a_cut_log_gives_the_state_up_to_the_cut_and_says_so(plain: Path, tmp_path: Path) -> None:
    data = (plain / LOG_NAME).read_bytes()
    cut = tmp_path / "cut.g2log"
    cut.write_bytes(data[: len(data) * 2 // 3])
    moment = inspect_run(cut)
    assert moment.damage is not None
    assert moment.value["record"] == moment.damage.record_idx - 1
    assert inspect_run(cut, record=10).damage is None
