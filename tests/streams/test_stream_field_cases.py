"""Field cases of section 1 that concern streams: each test is one case, with its input and the stated outcome."""

from __future__ import annotations

import random

import pytest
from stream_cases import DEVICE, HOST, Steps, checked, fed, line, path_of

from g2sim.scenarios.validate import Copies, report_lines
from g2sim.scenarios.validate_rules import Severity


def test_f01_counted_copies_end_with_the_last_removal() -> None:
    steps = Steps("f01", copies=Copies.COUNTED)
    assert steps.take(3).match([1, 2, 3], DEVICE) == 3
    assert steps.take(1).match([1, 2, 3], DEVICE) == 2
    verdicts = steps.finish()
    assert steps.codes() == ["KV302 error"]
    assert "f01.jsonl:5" in steps.texts()[0]
    assert any("copies counted" in text for text in report_lines(steps.validator, verdicts))


def test_f01_logical_copies_end_with_the_first_removal() -> None:
    steps = Steps("f01", copies=Copies.LOGICAL)
    assert steps.take(3).match([1, 2, 3], DEVICE) == 2
    verdicts = steps.finish()
    assert steps.codes() == ["KV301 warning", "KV302 error", "KV302 error"]
    assert any("copies logical" in text for text in report_lines(steps.validator, verdicts))


def test_f02_a_block_of_two_chunks_stays_until_both_are_gone() -> None:
    steps = Steps("f02", copies=Copies.COUNTED)
    assert steps.take(3).resident(HOST) == {3, 4, 5, 6}
    assert steps.match(range(1, 7)) == 0
    assert steps.take(1).resident(HOST) == set()
    steps.finish()
    assert steps.codes() == []


@pytest.mark.parametrize(("strict", "match"), [(True, 3), (False, 4)])
def test_f03_a_position_that_contradicts_the_parent_is_reported(strict: bool, match: int) -> None:
    steps = Steps("f03", strict=strict).take()
    assert steps.match([1, 2, 3, 4], DEVICE) == match
    assert steps.codes() == ["KV401 error"]
    assert "parent 2 sits at position 1, so its child cannot be at 3" in steps.texts()[0]


def test_f04_a_late_subscriber_keeps_an_unattached_run() -> None:
    steps = Steps("f04")
    assert steps.take(2).match(range(7, 14)) == 0
    assert steps.resident() == {11, 12, 13}
    assert steps.take(1).match(range(7, 14)) == 7
    (verdict,) = steps.finish()
    assert sorted(steps.codes()) == ["KV105 note", "KV403 note"]
    assert verdict.gaps == []
    assert verdict.reason == "late start, ids 0..39 not known"


def test_f05_the_table_decides_what_a_medium_is() -> None:
    steps = Steps("f05")
    verdicts = steps.finish()
    assert steps.validator.tiers == {
        DEVICE: 2,
        HOST: 3,
        "set aside: medium 'DISK'": 1,
        "set aside: medium 'moon'": 1,
    }
    assert sum(steps.validator.tiers.values()) == 7
    assert steps.resident(DEVICE) == {1, 2}
    assert steps.resident(HOST) == {3, 4, 5}
    assert steps.codes() == ["KV202 note", "KV201 warning"]
    lines = report_lines(steps.validator, verdicts)
    assert any(text.startswith("  neutral host_pinned: ") and " 'CPU_TIER1'" in text for text in lines)
    assert max(map(len, lines)) < 200


def test_f06_a_removal_leaves_the_other_tier() -> None:
    steps = Steps("f06").take(3)
    assert (steps.match([1, 2, 3], DEVICE), steps.match([1, 2, 3], HOST)) == (0, 3)
    assert steps.take(1).match([1, 2, 3], HOST) == 2
    assert steps.codes() == []


def test_f08_an_unplaced_host_run_takes_its_place_from_the_device_chain() -> None:
    steps = Steps("f08")
    assert steps.take(1).match([1, 2, 3]) == 0
    assert steps.resident(HOST) == {1, 2}
    assert steps.take(1).match([1, 2, 3], HOST) == 2
    assert steps.take(1).match([1, 2, 3], HOST) == 2
    assert steps.resident(DEVICE) == set()
    steps.finish()
    assert steps.codes() == ["KV405 note"]


def test_f09_a_store_after_a_removal_in_one_tick_counts() -> None:
    steps = Steps("f09").take()
    assert steps.resident(HOST) == {8, 9}
    assert steps.validator.state("w0").blocks[9] == (1, None, 0, 1)
    assert steps.match([8, 9]) == 2
    assert steps.codes() == []


def test_f10_the_removal_that_makes_room_comes_first() -> None:
    good = Steps("f10", capacities={HOST: 4})
    good.finish()
    assert good.codes() == []
    wrong = Steps("f10_wrong", capacities={HOST: 4})
    wrong.finish()
    assert wrong.codes() == ["KV501 error"]
    assert "holds 6 blocks, capacity 4" in wrong.texts()[0]


def test_f11_a_clear_of_all_tiers_empties_one_worker() -> None:
    steps = Steps("f11").take(5)
    chain = [1, 2, 3]
    assert steps.validator.overlap(chain) == {("w0", 0): 0, ("w1", 0): 3}
    assert steps.resident(DEVICE) | steps.resident(HOST) == set()
    assert steps.resident(HOST, "w1") == {1, 2, 3}
    assert steps.take(1).match(chain) == 1
    assert steps.codes() == []


def test_f12_a_clear_takes_its_place_by_id() -> None:
    steps = Steps("f12").take(12)
    assert steps.validator.state("w0").open_gaps() == [(11, 11)]
    assert steps.take(1).resident() == {2}
    (verdict,) = steps.finish()
    assert (verdict.reason, verdict.gaps) == (None, [])
    assert steps.codes() == ["KV601 warning", "KV106 warning"]


def test_f14_a_gap_is_one_finding_and_heals_by_a_replay() -> None:
    steps = Steps("f14").take(3)
    state = steps.validator.state("w0")
    assert state.open_gaps() == [(2, 2)]
    assert not state.exact
    assert (steps.match([1, 2, 3]), steps.match([1, 2, 4])) == (3, 3)
    steps.take(1)
    assert state.exact
    assert (steps.match([1, 2, 3]), steps.match([1, 2, 4])) == (2, 3)
    (verdict,) = steps.finish()
    assert verdict.reason is None
    places = [(place.rpartition(":")[2], reason) for place, reason in verdict.changes]
    assert places == [("1", None), ("3", "ids 2 are missing"), ("4", None)]
    assert steps.codes() == ["KV106 note"]


def test_f14_a_gap_that_stays_open_names_worker_rank_and_id() -> None:
    steps = Steps("f14").take(3)
    (verdict,) = steps.validator.finish()
    assert steps.codes() == ["KV101 error"]
    assert "f14.jsonl:3: KV101 error: w0/r0: id 2 missing" in steps.texts()[0]
    assert "f14.jsonl:3" in verdict.text()
    assert "not exact" in verdict.text()


def test_f15_a_worker_that_joins_again_starts_anew() -> None:
    steps = Steps("f15")
    (verdict,) = steps.finish()
    assert steps.codes() == []
    assert steps.resident() == {1, 2, 3}
    assert (verdict.reason, verdict.events) == (None, 10)


def test_f16_a_snapshot_covers_what_was_queued() -> None:
    steps = Steps("f16")
    steps.finish()
    state = steps.validator.state("w0")
    assert (state.recoveries, state.covered) == (1, 2)
    assert steps.resident() == {1, 2, 3}
    assert state.exact
    assert steps.codes() == []


def test_f17_ranks_are_kept_apart() -> None:
    steps = Steps("f17").take()
    chain = [21, 22, 23, 24]
    assert steps.validator.overlap(chain) == {("w0", rank): 4 if rank == 2 else 0 for rank in range(4)}


def test_f18_a_block_that_is_its_own_parent_is_refused() -> None:
    steps = Steps("f18")
    steps.finish()
    assert steps.codes() == ["KV402 error", "KV402 error"]
    assert "#3" in steps.texts()[0]
    assert "#4" in steps.texts()[1]
    assert steps.resident() == {1, 2, 3, 4}


@pytest.mark.parametrize("kind", ["integers", "bytes8", "bytes32", "hex"])
def test_f21_every_kind_of_hash_gives_the_same_matches(kind: str) -> None:
    numbers = [5, 127, 128, 2**63, 1]
    convert = {
        "integers": lambda value: value,
        "bytes8": lambda value: value.to_bytes(8, "big"),
        "bytes32": lambda value: bytes(24) + value.to_bytes(8, "big"),
        "hex": lambda value: f"{value:016X}",
    }[kind]
    steps = Steps(f"f21_{kind}")
    chain = [convert(value) for value in numbers]
    matches = [steps.take(1).match(chain) for _ in range(5)]
    assert matches == [2, 3, 5, 2, 5]
    assert steps.codes() == []


def test_f21_mixed_kinds_are_reported_and_never_equal() -> None:
    steps = Steps("f21_mixed")
    steps.finish()
    assert steps.codes() == ["KV004 error"]
    assert "kinds are never equal" in steps.texts()[0]
    assert steps.resident() == {5, (5).to_bytes(8, "big")}


def test_f22_an_adapter_makes_another_block() -> None:
    steps = Steps("f22")
    steps.finish()
    assert steps.codes() == []
    assert steps.resident() == {1, 2, 11, 12}
    wrong = Steps("f22_wrong")
    wrong.finish()
    assert wrong.codes() == ["KV901 error", "KV901 error"]


def test_f24_nothing_is_left_of_removed_blocks() -> None:
    rng = random.Random("f24")
    chains = 20_000

    def lines():
        number = 0
        held: list[list[int]] = []
        for chain in range(chains):
            hashes = [8 * chain + at for at in range(8)]
            yield line(number, hashes=hashes)
            number += 1
            held.append(hashes)
            if len(held) > 16:
                gone = held.pop(rng.randrange(len(held)))
                rng.shuffle(gone)
                yield line(number, "Removed", gone)
                number += 1
        for gone in held:
            yield line(number, "Removed", reversed(gone))
            number += 1

    peak = 0
    validator = fed([])
    from g2sim.actors.kv import wire_neutral

    for place, value in enumerate(lines()):
        validator.feed(place, wire_neutral.decode(value))
        if place % 50 == 0:
            peak = max(peak, validator.state("w0").sizes()[0])
    assert validator.state("w0").sizes() == (0, 0)
    assert peak <= 17 * 8
    assert not validator.findings.kept


def test_f25_lines_without_a_worker_are_refused_by_number() -> None:
    validator, verdicts = checked(path_of("f25"))
    refused = [finding.where.rpartition(":")[2] for finding in validator.findings.of("KV003")]
    assert refused == ["3", "4", "6"]
    assert validator.state("w0").resident(DEVICE) == {1, 3}
    assert validator.state("w1").resident(DEVICE) == {1}
    assert [verdict.gaps for verdict in verdicts] == [[], []]
    assert validator.findings.count(Severity.ERROR) == 4  # and the gap that the refused line leaves in w0
