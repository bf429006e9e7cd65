"""What a verdict says of a rank whose stream contradicts itself, though no id is missing; and findings told once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from g2sim.scenarios.stream_sources import check_files
from g2sim.scenarios.validate import Options, Validator, Verdict, report_lines, report_value

Line = dict[str, Any]


def stored(number: int, *hashes: int, tier: str = "Device", position: int = 0, parent: int | None = None) -> Line:
    more = {"block_hashes": list(hashes), "parent_hash": parent, "start_position": position}
    return event(number, "Stored", tier) | more


def removed(number: int, *hashes: int, tier: str = "Device") -> Line:
    return event(number, "Removed", tier) | {"block_hashes": list(hashes)}


def event(number: int, kind: str, tier: str | None) -> Line:
    return {"worker_id": "w0", "dp_rank": 0, "event_id": number, "ts_ms": number, "tier": tier, "kind": kind}


def checked(folder: Path, lines: list[Line | str], **options: Any) -> tuple[Validator, Verdict, list[str]]:
    path = folder / "s.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    validator = Validator(Options(**options))
    check_files([path], validator)
    (verdict,) = validator.finish()
    return validator, verdict, report_lines(validator, [verdict])


@pytest.mark.parametrize(
    ("odd", "rule"),
    [
        (removed(2, 9), "KV302 absent-removal"),
        (stored(2, 5, tier="moon"), "KV201 unknown-medium"),
        (stored(2, 5, parent=2, position=7), "KV401 position"),
    ],
)
def test_an_event_that_cannot_be_right_leaves_the_rank_in_doubt(odd: Line, rule: str, tmp_path: Path) -> None:
    validator, verdict, lines = checked(tmp_path, [stored(0, 1, 2), stored(1, 3), odd, removed(3, 3)])
    assert (verdict.reason, verdict.exact) == (None, False)
    assert lines[-1].startswith(f"w0/r0: in doubt since {tmp_path}/s.jsonl:3 ({rule}), though no id is missing; ")
    assert [one["exact"] for one in report_value(validator, [verdict], "0")["verdicts"]] == [False]


def test_what_makes_a_rank_certain_ends_its_doubt(tmp_path: Path) -> None:
    lines = [stored(0, 1, 2), removed(1, 9), event(2, "Cleared", None), stored(3, 4)]
    assert checked(tmp_path, lines)[1].exact
    assert not checked(tmp_path, [*lines, removed(4, 9)])[1].exact


def test_a_rule_that_is_ignored_raises_no_doubt(tmp_path: Path) -> None:
    ignored = Options().codes - {"KV302"}
    assert checked(tmp_path, [stored(0, 1), removed(1, 9)], codes=ignored)[1].exact


def test_a_line_that_cannot_be_read_is_told_beside_the_verdicts(tmp_path: Path) -> None:
    _, verdict, lines = checked(tmp_path, [stored(0, 1), "{", stored(1, 2)])
    assert verdict.exact
    assert lines[-2] == "1 place of the input could not be read: no verdict counts that"


def dynamo(number: int, data: Any) -> Line:
    return {"worker_id": 0, "storage_tier": "device", "event": {"event_id": number, "dp_rank": 0, "data": data}}


def run_of(*hashes: int, position: int = 0, parent: int | None = None) -> Line:
    blocks = [{"block_hash": one, "tokens_hash": one, "mm_extra_info": None} for one in hashes]
    return {"stored": {"parent_hash": parent, "start_position": position, "blocks": blocks}}


@pytest.mark.parametrize("again", [run_of(2, 3, position=1, parent=1), {"removed": {"block_hashes": [1]}}])
def test_an_event_that_comes_twice_in_a_row_is_a_repeat(again: Line, tmp_path: Path) -> None:
    """One number may have several of Dynamo's events, those of a batch; no batch says one thing twice."""
    before = [dynamo(0, run_of(1)), dynamo(1, again)]
    validator, verdict, _ = checked(tmp_path, [*before, before[-1]])
    assert {code for code, _ in validator.findings.counts} == {"KV102"}
    _, once, _ = checked(tmp_path, before)
    assert (verdict.exact, verdict.events, verdict.blocks) == (True, once.events, once.blocks)


def test_other_events_of_a_batch_come_under_its_number(tmp_path: Path) -> None:
    batch = [dynamo(0, run_of(1)), dynamo(0, run_of(2)), dynamo(0, {"removed": {"block_hashes": [1]}})]
    validator, verdict, _ = checked(tmp_path, batch)
    assert not validator.findings.counts
    assert (verdict.events, verdict.blocks["device"]) == (3, 1)


def test_the_words_of_a_finding_are_told_once_a_line(tmp_path: Path) -> None:
    """A run of removals of which every block is absent is one finding in words, and so many in the counts."""
    validator, _, lines = checked(tmp_path, [stored(0, 1, 2, 3), stored(1, 1, 2, 3), stored(2, 1, 2, 3)])
    told = [line for line in lines if "KV301 warning" in line]
    assert len(told) == len(set(told)) == 6
    assert sum(validator.findings.counts.values()) == 6
