"""Mode dynamo: where Dynamo's index would know less than is true, and that it agrees where nothing is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgpack
import pytest
from stream_cases import DEVICE, HOST, Steps, checked, fed, line, path_of

from g2sim.actors.kv import wire_dynamo
from g2sim.actors.kv.wire_vllm import decode_batch
from g2sim.scenarios import cli
from g2sim.scenarios.run import run_scenario
from g2sim.scenarios.schema import load_scenario
from g2sim.scenarios.validate import BatchArrived, Copies, Mode, Options, Source, Validator
from g2sim.scenarios.validate_dynamo import Known

LIBRARY = Path(__file__).parents[2] / "scenarios" / "library"


def dynamo(lines: list[dict[str, Any]]) -> Validator:
    return fed(lines, mode=Mode.DYNAMO)


def known(validator: Validator) -> dict[str, int]:
    assert validator.dynamo is not None
    told = validator.dynamo.known(("w0", 0), validator.state("w0").resident)
    return {tier: one.blocks for tier, one in told.items()}


def codes(validator: Validator) -> list[str]:
    return [finding.code for finding in validator.findings.kept]


def test_a_removal_in_the_middle_forgets_what_is_below() -> None:
    validator = dynamo([line(0, hashes=[1, 2, 3]), line(1, "Removed", [2])])
    assert codes(validator) == ["KV955"]
    assert known(validator) == {DEVICE: 1, HOST: 0}
    assert validator.state("w0").resident(DEVICE) == {1, 3}


def test_a_removal_that_lists_the_head_first_forgets_nothing_else() -> None:
    validator = dynamo([line(0, hashes=[1, 2, 3]), line(1, "Removed", [1, 2, 3])])
    assert not codes(validator)
    assert known(validator) == {DEVICE: 0, HOST: 0}


def test_f01_a_copy_is_no_second_block_for_dynamo() -> None:
    steps = Steps("f01", mode=Mode.DYNAMO, copies=Copies.COUNTED).take(3)
    assert steps.match([1, 2, 3]) == 3
    (verdict,) = steps.validator.finish()
    assert "device 3, host_pinned 0; Dynamo's index: device 2 (1 missing), host_pinned 0" in verdict.text()


def test_f03_a_wrong_parent_gives_dynamo_the_wrong_chain() -> None:
    steps = Steps("f03", mode=Mode.DYNAMO).take()
    assert steps.validator.dynamo is not None
    assert steps.validator.dynamo.overlap([1, 2, 3, 4]) == {("w0", 0): (2, 2)}
    assert steps.match([1, 2, 3, 4]) == 4


def test_f05_dynamo_drops_a_spelling_that_it_does_not_know() -> None:
    steps = Steps("f05", mode=Mode.DYNAMO).take()
    assert [f.problem for f in steps.validator.findings.of("KV954")] == ["medium 'moon': dropped before the index"]


def test_f04_a_child_of_an_unknown_parent_is_refused_for_good() -> None:
    steps = Steps("f04", mode=Mode.DYNAMO).take()
    assert [f.code for f in steps.validator.findings.of("KV952")] == ["KV952"] * 2
    assert known(steps.validator) == {DEVICE: 4, HOST: 0}
    assert steps.match(range(7, 14)) == 7


def test_f08_a_host_run_without_a_parent_is_taken_for_the_start_of_a_prompt() -> None:
    steps = Steps("f08", mode=Mode.DYNAMO).take()
    assert steps.validator.dynamo is not None
    assert steps.validator.dynamo.overlap([1, 2, 3]) == {("w0", 0): (0, 2)}


def test_f14_a_late_event_is_stale_for_dynamo() -> None:
    steps = Steps("f14", mode=Mode.DYNAMO).take()
    assert [f.code for f in steps.validator.findings.of("KV951")] == ["KV951"]
    assert steps.validator.dynamo is not None
    assert steps.validator.dynamo.overlap([1, 2, 3]) == {("w0", 0): (3, 3)}
    assert steps.match([1, 2, 3]) == 2


def test_the_first_hash_of_a_host_edge_wins() -> None:
    tokens = {"tier": "HostPinned", "token_hashes": [70]}
    validator = dynamo([line(0, hashes=[1], **tokens), line(0, hashes=[2], worker_id="w1", **tokens)])
    assert "KV953" in codes(validator)
    assert validator.dynamo is not None
    assert validator.dynamo.overlap([70]) == {("w0", 0): (0, 1), ("w1", 0): (0, 0)}


@pytest.mark.parametrize(
    ("events", "code"),
    [
        ([["BlockStored", [b"x" * 8], None, [1, 2], 2]], "KV951"),
        ([["BlockStored", [1], None, [1, 2], 2], {"type": "Weird"}], "KV951"),
        ([["BlockStored", [1], None, [1, 2], 2, None, "gpu"]], "KV954"),
        ([["BlockStored", [1], None, [1, 2], 2, None, "GPU", None, None, 1]], "KV954"),
        ([["BlockStored", [1], None, [], 0, None, "CPU", None]], "KV954"),
        ([["BlockStored", [1], None, [1, 2], 2, None, "GPU", None, None, 0, "sliding_window"]], "KV954"),
    ],
    ids=["bytes hash", "unknown tag", "medium", "group", "placeholder", "sliding window"],
)
def test_filters_before_the_index(events: list[Any], code: str) -> None:
    validator = Validator(Options(mode=Mode.DYNAMO))
    validator.begin(Source("capture", "vllm", "record"))
    batch = decode_batch(msgpack.packb([1.0, events, 0]), event_id=0)
    validator.feed(0, BatchArrived("w0", 0, 0, batch.events, False))
    assert code in codes(validator)
    assert known(validator) == {DEVICE: 0, HOST: 0}


def test_clear_leave_and_join_empty_the_index() -> None:
    left, joined = {"worker_id": "w0", "kind": "Left"}, {"worker_id": "w0", "kind": "Joined"}
    validator = dynamo([line(0, hashes=[1]), line(1, "Cleared", tier=None), line(2, hashes=[2])])
    assert known(validator) == {DEVICE: 1, HOST: 0}
    validator = dynamo([line(0, hashes=[1]), left, joined, line(0, hashes=[2, 3])])
    assert known(validator) == {DEVICE: 2, HOST: 0}
    assert not validator.findings.kept


def test_the_verdict_shows_the_difference() -> None:
    validator = dynamo([line(0, hashes=[1, 2, 3]), line(1, "Removed", [1])])
    (verdict,) = validator.finish()
    assert "device 2, host_pinned 0; Dynamo's index: device 0 (2 missing), host_pinned 0" in verdict.text()
    late = dynamo([line(0, hashes=[1, 2]), line(2, hashes=[4]), line(1, "Removed", [2], replayed=True)])
    (verdict,) = late.finish()
    assert verdict.dynamo == {DEVICE: Known(blocks=3, missing=0, stale=1), HOST: Known(blocks=0, missing=0, stale=0)}


def test_the_command_says_both_and_its_mode(capsys: pytest.CaptureFixture[str]) -> None:
    value = {}
    for mode in ("true", "dynamo"):
        with pytest.raises(SystemExit) as stop:
            cli.main(["validate", str(path_of("f04")), "--mode", mode, "--json"])
        value[mode] = json.loads(capsys.readouterr().out)
        assert (stop.value.code, value[mode]["mode"]) == (int(mode == "dynamo"), mode)
    assert value["true"]["verdicts"][0]["dynamo"] is None
    told = value["dynamo"]["verdicts"][0]["dynamo"]
    assert told == {DEVICE: {"blocks": 4, "missing": 3, "stale": 0}, HOST: {"blocks": 0, "missing": 0, "stale": 0}}


def test_a_run_of_our_own_is_known_to_dynamo_in_full(tmp_path: Path) -> None:
    """Unless a device block left while blocks below it stayed, which the contract forbids."""
    run_scenario(load_scenario(LIBRARY / "agentx-g2-shared.yaml"), tmp_path / "run")
    validator, verdicts = checked(tmp_path / "run", mode=Mode.DYNAMO)
    assert not validator.findings.kept
    for verdict in verdicts:
        assert verdict.dynamo is not None
        assert {tier: one.blocks for tier, one in verdict.dynamo.items()} == verdict.blocks
        assert not any(one.missing or one.stale for one in verdict.dynamo.values())


def test_router_events_have_no_numbers_to_check() -> None:
    """A dump of the wheel's indexer is not in the order of its numbers."""
    validator = Validator(Options(mode=Mode.DYNAMO))
    validator.begin(Source("dump", "dynamo", "line"))
    for number, event_id in enumerate((5, 3)):
        blocks = [{"block_hash": event_id, "tokens_hash": event_id, "mm_extra_info": None}]
        data = {"stored": {"parent_hash": None, "start_position": None, "blocks": blocks}}
        inner = {"event_id": event_id, "dp_rank": 0, "data": data}
        validator.feed(number, wire_dynamo.decode({"worker_id": 1, "storage_tier": "device", "event": inner}))
    assert validator.dynamo is not None
    assert validator.dynamo.overlap([3]) == {(1, 0): (1, 1)}
    assert not validator.findings.of("KV951")
