"""The log is the record: reports and states come back from it alone."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from harness import HERE, case_scenario, load_case
from hypothesis import given, settings
from hypothesis import strategies as st

from g2sim.bus.drivers import InlineDriver, TrioDriver
from g2sim.bus.errors import LogDamaged, SimError
from g2sim.bus.events import Record
from g2sim.bus.log import LogReader
from g2sim.scenarios.report import report_text, row_text
from g2sim.scenarios.run import LOG_NAME, report_of_log, run_scenario
from g2sim.scenarios.state_fold import StateFold, Verifier

STEMS = [
    "g2/mix_shared_four",
    "g2/mix_local_three",
    "g2/dp_two_shared",
    "g2/pd_two_two_shared",
    "g2/pd_decode_preemption_restores",
    "sched/mix_pd_two_two",
    "sched/pd_rejections",
    "sched/time_limit",
    "workload/weka_two_plays_shared_g2_two_workers",
    "workload/am_failed_play",
]


def run_into(stem: str, folder: Path, driver: Any = InlineDriver, **more: Any) -> Path:
    run_scenario(case_scenario(load_case(HERE / f"{stem}.json"), folder), folder / "run", driver=driver, **more)
    return folder / "run"


@pytest.mark.parametrize("stem", STEMS)
def test_the_report_rebuilt_from_the_log_is_the_runs_own_to_the_byte(stem: str, tmp_path: Path) -> None:
    run = run_into(stem, tmp_path)
    rows: list[dict[str, Any]] = []
    rebuilt = report_of_log(run, rows.append)
    assert rebuilt.damage is rebuilt.failure is None
    assert report_text(rebuilt.report) == (run / "report.json").read_text()
    assert "".join(map(row_text, rows)) == (run / "requests.jsonl").read_text()
    for row in rows:
        json.dumps(row, allow_nan=False)


ALL = sorted(path for folder in ("g2", "sched") for path in (HERE / folder).glob("*.json"))


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_the_trio_shell_and_the_inline_driver_write_the_same_bytes(path: Path, tmp_path: Path) -> None:
    """Runs that end in a deadlock included: their logs hold the error."""
    logs = []
    for driver in (InlineDriver, TrioDriver):
        folder = tmp_path / driver.__name__
        folder.mkdir()
        scenario = case_scenario(load_case(path), tmp_path)
        try:
            run_scenario(scenario, folder / "run", driver=driver)
        except SimError:
            assert "error" in load_case(path)["expected"]
        logs.append((folder / "run" / LOG_NAME).read_bytes())
    assert logs[0] == logs[1]


class _Snapshots:
    """Fold of a live run after each record."""

    def __init__(self) -> None:
        self.fold = StateFold()
        self.states: list[dict[str, Any]] = []

    def __call__(self, record: Record) -> None:
        self.fold.apply(record)
        self.states.append(self.fold.snapshot())


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[bytes, list[dict[str, Any]], list[int]]]:
    """Log bytes, state after each record, and the offset behind each record, for two runs."""
    out = {}
    for stem in ("g2/mix_shared_two_tight", "g2/pd_two_two_shared"):
        folder = tmp_path_factory.mktemp("live")
        snapshots = _Snapshots()
        run = run_into(stem, folder, on_record=snapshots)
        data = (run / LOG_NAME).read_bytes()
        out[stem] = (data, snapshots.states, [])
    return out


@pytest.mark.parametrize("stem", ["g2/mix_shared_two_tight", "g2/pd_two_two_shared"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_folding_a_log_cut_anywhere_gives_the_live_state_at_its_last_whole_record(
    live: dict[str, tuple[bytes, list[dict[str, Any]], list[int]]], stem: str, data: st.DataObject
) -> None:
    log, states, _ = live[stem]
    cut = data.draw(st.integers(len(log) // 3, len(log) - 1))
    with tempfile.NamedTemporaryFile(suffix=".g2log") as file:
        file.write(log[:cut])
        file.flush()
        fold, count = StateFold(), 0
        with LogReader(file.name) as reader, pytest.raises(LogDamaged) as damage:
            for record in reader:
                fold.apply(record)
                count += 1
        assert damage.value.record_idx == count
    assert fold.snapshot() == states[count - 1]


@pytest.mark.parametrize("stem", STEMS)
def test_live_state_and_fold_agree_at_every_turn(stem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only at pass ends: after every turn, for each worker at rest, and all pools."""
    checked = 0

    def every_turn(self: Verifier) -> None:
        nonlocal checked
        checked += 1
        self._passes_ended.clear()
        self.finish()

    monkeypatch.setattr(Verifier, "turn_ended", every_turn)
    run_into(stem, tmp_path, verify=True)
    assert checked > 10
