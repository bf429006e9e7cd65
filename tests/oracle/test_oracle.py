"""Every recorded case of the reference is equal to the last bit (see harness.py for the forms)."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from harness import HERE, Difference, check, load_case, run, same_value

from g2sim.bus.drivers import TrioDriver
from g2sim.bus.errors import Deadlock

CASES = sorted(path for folder in ("g2", "sched", "events", "differential") for path in (HERE / folder).glob("*.json"))
AGENTIC = sorted(
    path
    for path in (HERE / "workload").glob("*.json")
    if re.match(r"(error_)?(am|weka|real_weka|snapshot|warmup|profile)_", path.name)
)
SESSIONS = sorted(
    path
    for path in (HERE / "workload").glob("*.json")
    if path.stem.removeprefix("error_")
    .removeprefix("real_")
    .startswith(("mooncake_", "applied_", "synthetic_", "unknown_"))
)
DRAWN = json.loads((HERE / "session_formats.json").read_text(encoding="utf-8"))
GIVES_UP = [path for path in CASES if "error" in load_case(path).get("expected", {})]


def name(path: Path) -> str:
    return f"{path.parent.name}-{path.stem}"


@pytest.mark.parametrize("path", CASES, ids=name)
def test_a_recorded_case_is_equal_to_the_last_bit(path: Path) -> None:
    """Rows, summary, host domains, KV events and host transfers; live state and log agree at every pass end."""
    difference = check(load_case(path))
    assert difference is None, str(difference)


@pytest.mark.parametrize("path", AGENTIC, ids=name)
def test_a_recorded_agentic_case_is_equal_or_refused_as_recorded(path: Path) -> None:
    """Plays on lanes, Weka lowering, ids, digests and lifecycle; malformed traces are refused.

    Two differ on purpose: a model that a play's own list leaves out is a note, and refused only when strict; and
    recycled plays may run over a host tier on any number of workers.
    """
    case = load_case(path)
    if path.stem == "error_profile_g2_two_aggregated_workers":
        assert run(case).error is None
        return
    if path.stem in ("error_weka_model_not_declared", "error_real_weka_trace_0291"):
        outcome = run(case, verify=False)
        assert outcome.error is None
        assert outcome.report is not None
        assert any("models" in note for note in outcome.report["notes"])
        return
    # Holding live state against the log costs milliseconds a pass, too much for tens of thousands of them.
    difference = check(case, verify=not path.stem.startswith("real_"))
    assert difference is None, str(difference)


@pytest.mark.parametrize("path", SESSIONS, ids=name)
def test_a_recorded_session_case_is_equal_or_refused_as_recorded(path: Path) -> None:
    """Rows, sessions, accumulating prompts, generated arrivals and prefix groups; malformed traces are refused."""
    difference = check(load_case(path), verify=not path.stem.startswith("real_"))
    assert difference is None, str(difference)


@pytest.mark.parametrize("case", DRAWN, ids=lambda case: f"{case['trace_format']}-{case['seed']}")
def test_a_drawn_case_of_a_session_format_is_equal_or_refused_as_recorded(case: dict[str, Any]) -> None:
    """Random traces and generated traffic, also on separate roles (``record_session_formats.py``)."""
    difference = check(case)
    assert difference is None, str(difference)


def test_the_recordings_hold_every_kind_of_case() -> None:
    """A folder that was not copied must not pass for want of cases."""
    counts = {folder: sum(path.parent.name == folder for path in CASES) for folder in ("g2", "sched", "events")}
    assert counts == {"g2": 60, "sched": 66, "events": 40}
    assert len(AGENTIC) > 80
    assert len(SESSIONS) == 74
    finished = Counter(case["trace_format"] for case in DRAWN if "expected" in case)
    formats = ("mooncake", "mooncake-delta", "applied_compute_agentic", "synthetic", "dynamo", "agentic_mooncake")
    assert set(finished) == set(formats)
    assert min(finished.values()) >= 3


@pytest.mark.parametrize("path", GIVES_UP, ids=name)
def test_where_the_reference_gives_up_the_deadlock_names_who_waits_and_for_what(path: Path) -> None:
    error = run(load_case(path)).error
    assert isinstance(error, Deadlock)
    assert any("request " in line and " waits for " in line for line in error.waiting)


@pytest.mark.parametrize("stem", ["g2/mix_shared_four", "g2/pd_two_two_shared", "sched/mix_fifo_sessions"])
def test_the_trio_driver_gives_the_recorded_results_too(stem: str) -> None:
    case = load_case(HERE / f"{stem}.json")
    inline, trio = run(case), run(case, driver=TrioDriver)
    assert trio.records == inline.records
    assert trio.report == inline.report


def test_std_fields_have_a_tolerance_and_nothing_else_has() -> None:
    assert same_value("std_ttft_ms", 1.0, 1.0 + 1e-13, rounded=False)
    assert not same_value("std_ttft_ms", 1.0, 1.0 + 1e-11, rounded=False)
    assert not same_value("mean_ttft_ms", 1.0, 1.0 + 2e-16, rounded=False)
    assert not same_value("num_requests", 1, 1.0, rounded=False)


def test_a_changed_recording_is_reported_with_field_request_expected_and_got() -> None:
    """The comparison can fail: a single bit in one row, one missing row, one summary field, one KV event."""
    case = load_case(HERE / "g2" / "restore_shared.json")
    case["expected"]["per_request"][2]["first_token_ms"] = 204.00000000000003
    difference = check(case)
    assert isinstance(difference, Difference)
    assert (difference.expected, difference.got) == (204.00000000000003, 204.0)
    assert "request 2" in difference.what
    assert "first_token_ms" in difference.what
    del case["expected"]["per_request"][2]
    assert "number of requests" in str(check(case))
    case = load_case(HERE / "sched" / "single_request.json")
    case["expected"]["summary"]["total_output_tokens"] += 1
    assert "summary.total_output_tokens" in str(check(case))
    case = load_case(HERE / "events" / "e0015.json")
    case["expected"]["kv_events"][0]["event"]["event_id"] = 7
    assert "KV event 0" in str(check(case))


def test_run_py_prints_one_line_a_case_and_exits_1_on_a_difference(tmp_path: Path) -> None:
    good = HERE / "g2" / "restore_shared.json"
    case = load_case(good)
    case["expected"]["per_request"][0]["ttft_ms"] = 3.0
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps(case))
    done = subprocess.run(
        [sys.executable, HERE / "run.py", good, bad], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "restore_shared.json: equal",
        "bad.json: request 0 (arrival 0.0): ttft_ms: expected 3.0, got 2.0",
    ]
    command = [sys.executable, HERE / "run.py", tmp_path / "none.json"]
    missing = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert missing.returncode == 2
    assert "Traceback" not in missing.stderr
