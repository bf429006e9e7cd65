"""What preparation requests do is no part of the figures of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from instance_cases import play_run, scenario_values, write_play

from g2sim.actors.traffic.events import PreparationEnded, RequestArrived
from g2sim.actors.worker.events import PassEnded, RequestAdmitted


@pytest.mark.parametrize("split", [False, True], ids=["aggregated", "2P2D"])
def test_the_counts_of_ranks_begin_when_warm_up_has_ended(tmp_path: Path, split: bool) -> None:
    load = {"agentic_lanes": 2, "agentic_snapshot": {"seed": 3}, "agentic_warmup": True}
    values = scenario_values(write_play(tmp_path), workers=2, split=split, scope="cluster_shared", load=load)
    run = play_run(values)
    (began,) = (number for number, record in enumerate(run.records) if type(record.event) is PreparationEnded)
    prepared = {
        record.event.request
        for record in run.records
        if type(record.event) is RequestArrived and record.event.preparation is not None
    }
    assert prepared == set(range(len(prepared))) != set()
    admitted = [record.event.request for record in run.records[began:] if type(record.event) is RequestAdmitted]
    assert not prepared.intersection(admitted)
    totals, rows = run.report["totals"], run.rows
    assert totals["requests"] == len(rows) == len(set(admitted)) == run.report["requests"]["released"]
    passes = sum(type(record.event) is PassEnded for record in run.records[began:])
    assert totals["passes"] == passes < sum(type(record.event) is PassEnded for record in run.records)
    assert totals["prompt_tokens_asked"] == sum(row["input_length"] for row in rows)
