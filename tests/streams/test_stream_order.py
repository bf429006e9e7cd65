"""Order of delivery: whatever comes late, twice or never, the state is that of the ids in order, or is not exact."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_cases import DEVICE, HOST, fed, line

from g2sim.scenarios import validate_state
from g2sim.scenarios.validate import Copies, Validator

SHORT_WINDOW = 8


def history(seed: int, length: int) -> list[dict[str, Any]]:
    """A stream with every kind of event, with and without places, right and wrong."""
    rng = random.Random(f"{seed}:history")
    out = []
    for number in range(length):
        tier = rng.choice(["Device", "HostPinned"])
        hashes = [rng.randrange(12) for _ in range(rng.randint(1, 3))]
        kind = rng.choices(["Stored", "Removed", "Cleared"], [6, 4, 0.4])[0]
        more: dict[str, Any] = {"tier": tier if kind != "Cleared" else rng.choice([None, tier])}
        if kind == "Stored":
            more["parent_hash"] = rng.choice([None, rng.randrange(12)])
            more["start_position"] = rng.choice([None, 0, 1, 2])
        out.append(line(number, kind, hashes, **more))
    return out


def waiting_in(state: validate_state.RankState) -> dict[Any, tuple[Any, ...]]:
    """Parent -> blocks that wait for it."""
    return {parent: validate_state._children(waiting) for parent, waiting in state._waiting.items()}


def state_of(validator: Validator) -> Any:
    """All of a rank's state that anything later can depend on."""
    state = validator.state("w0")
    state.settle()
    waiting = {parent: sorted(children) for parent, children in waiting_in(state).items()}
    return dict(state.blocks), state.copies, waiting, state._unplaced, state.exact, state._tainted is None


def told(validator: Validator) -> list[tuple[str, str]]:
    """Findings about the state, whatever the order in which they were reported."""
    return sorted((f.code, f.problem) for f in validator.findings.kept if not f.code.startswith(("KV1", "KV6")))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 40), st.randoms(use_true_random=False), st.sampled_from(Copies))
def test_any_order_of_delivery_gives_the_state_of_the_ids_in_order(
    seed: int, length: int, rng: random.Random, copies: Copies
) -> None:
    lines = history(seed, length)
    shuffled = [*lines]
    for at in range(1, length):  # a few steps late at most, and the first stays first
        other = max(1, at - rng.randrange(6))
        shuffled[at], shuffled[other] = shuffled[other], shuffled[at]
    repeats = [rng.choice(lines) for _ in range(2)]
    for strict in (False, True):
        straight = fed(lines, copies=copies, strict=strict)
        late = fed([*shuffled, *repeats], copies=copies, strict=strict)
        assert state_of(late) == state_of(straight)
        straight.finish()
        late.finish()
        if any(item["kind"] == "Cleared" and item["tier"] is None for item in lines):
            continue  # what is overtaken by such a clear has no effect, and is not looked at
        assert told(late) == told(straight)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10_000), st.integers(3, 30), st.data())
def test_lost_events_leave_the_state_not_exact_until_they_come(seed: int, length: int, data: st.DataObject) -> None:
    lines = [item for item in history(seed, length) if item["kind"] != "Cleared"]
    lines = [item | {"event_id": number} for number, item in enumerate(lines)]
    if len(lines) < 3:
        return
    lost = data.draw(st.sets(st.integers(1, len(lines) - 2), min_size=1, max_size=4))
    validator = fed([item for item in lines if item["event_id"] not in lost])
    state = validator.state("w0")
    assert not state.exact
    assert {number for first, last in state.open_gaps() for number in range(first, last + 1)} == lost
    from g2sim.actors.kv import wire_neutral

    for number in data.draw(st.permutations(sorted(lost))):
        validator.feed(1000 + number, wire_neutral.decode(lines[number] | {"replayed": True}))
    assert state_of(validator) == state_of(fed(lines))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 60), st.sampled_from(Copies))
def test_counts_and_waiting_blocks_follow_from_the_entries(seed: int, length: int, copies: Copies) -> None:
    state = fed(history(seed, length), copies=copies).state("w0")
    unplaced = {hash_: entry for hash_, entry in state.blocks.items() if entry[0] is None}
    waiting: dict[Any, set[Any]] = {}
    for hash_, entry in unplaced.items():
        if entry[1] is not None:
            waiting.setdefault(entry[1], set()).add(hash_)
    assert {parent: set(children) for parent, children in waiting_in(state).items()} == waiting
    assert all(len(set(children)) == len(children) for children in waiting_in(state).values())
    assert state._unplaced == len(unplaced)
    counts = {tier: sum(entry[at] for entry in state.blocks.values()) for tier, at in ((DEVICE, 2), (HOST, 3))}
    assert state.copies == counts


def test_a_gap_older_than_the_window_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate_state, "WINDOW", SHORT_WINDOW)
    lines = [line(number, hashes=[number]) for number in range(20) if number != 3]
    validator = fed([*lines, line(3, hashes=[3])])
    state = validator.state("w0")
    assert not state.exact
    assert len(state._steps) == 0
    (verdict,) = validator.finish()
    assert verdict.reason == "id 3 missing"
    assert [f.code for f in validator.findings.kept] == ["KV101", "KV107"]
    assert 3 not in state.resident(DEVICE)


def test_a_late_event_behind_which_a_whole_window_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate_state, "WINDOW", SHORT_WINDOW)
    lines = [line(number, hashes=[number]) for number in (0, *range(3, 3 + SHORT_WINDOW))]
    validator = fed([*lines, line(1, hashes=[1])])
    (verdict,) = validator.finish()
    assert verdict.reason == "id 2 missing"
    assert validator.state("w0").resident(DEVICE) == {0, 1, *range(3, 3 + SHORT_WINDOW)}


def test_a_clear_of_all_tiers_makes_the_state_exact_again() -> None:
    validator = fed([line(0, hashes=[1]), line(2, hashes=[2]), line(3, "Cleared", tier=None), line(4, hashes=[3])])
    (verdict,) = validator.finish()
    assert verdict.reason is None
    assert [f.code for f in validator.findings.kept] == ["KV101"]
    assert validator.state("w0").resident(DEVICE) == {3}


def test_a_clear_of_one_tier_does_not() -> None:
    lines = [line(0, hashes=[1]), line(2, hashes=[1], tier="HostPinned"), line(3, "Cleared", tier="Device")]
    validator = fed(lines)
    (verdict,) = validator.finish()
    assert verdict.reason == "id 1 missing"
    assert validator.state("w0").resident(HOST) == {1}
    assert validator.state("w0").resident(DEVICE) == set()


def test_repeats_reused_ids_and_restarts_are_told_apart() -> None:
    first, second = line(0, hashes=[1]), line(1, hashes=[2], parent_hash=1, start_position=1)
    repeat = fed([first, second, second, first])
    repeat.finish()
    assert [f.code for f in repeat.findings.kept] == ["KV102", "KV102"]
    assert repeat.state("w0").exact
    reused = fed([first, second, line(1, hashes=[9])])
    (verdict,) = reused.finish()
    assert [f.code for f in reused.findings.kept] == ["KV103"]
    assert verdict.reason == "id 1 has two contents"
    restart = fed([first, second, line(0, hashes=[7]), line(1, hashes=[8], parent_hash=7, start_position=1)])
    restart.finish()
    assert [f.code for f in restart.findings.kept] == ["KV104"]
    assert restart.state("w0").resident(DEVICE) == {7, 8}


def test_a_huge_gap_costs_nothing() -> None:
    validator = fed([line(0, hashes=[1]), line(2**63, hashes=[2])])
    (verdict,) = validator.finish()
    assert verdict.reason == f"ids 1..{2**63 - 1} missing"


def test_membership_is_checked() -> None:
    joined, left = {"worker_id": "w0", "kind": "Joined"}, {"worker_id": "w0", "kind": "Left"}
    validator = fed([left, joined, line(0, hashes=[1]), joined, line(0, hashes=[2]), left, line(0, hashes=[3]), left])
    verdicts = validator.finish()
    assert [f.code for f in validator.findings.kept] == ["KV611", "KV612", "KV613"]
    assert [(verdict.left, verdict.events) for verdict in verdicts] == [(True, 3)]


def snapshot(last: int, *runs: tuple[list[int], int | None, int]) -> dict[str, Any]:
    made = [
        {"tier": "Device", "block_hashes": hashes, "parent_hash": parent, "start_position": position}
        for hashes, parent, position in runs
    ]
    return {"worker_id": "w0", "dp_rank": 0, "kind": "Snapshot", "last_event_id": last, "runs": made}


def test_a_snapshot_lists_parents_first_and_is_not_behind() -> None:
    right = fed([snapshot(5, ([1], None, 0), ([2], 1, 1)), line(6, hashes=[3], parent_hash=2, start_position=2)])
    right.finish()
    assert not right.findings.kept
    assert right.state("w0").match([1, 2, 3]) == 3
    wrong = fed([snapshot(5, ([2], 1, 1), ([1], None, 0))])
    wrong.finish()
    assert [f.code for f in wrong.findings.kept] == ["KV621"]
    behind = fed([line(number, hashes=[number]) for number in range(5)] + [snapshot(2, ([1], None, 0))])
    behind.finish()
    assert [f.code for f in behind.findings.kept] == ["KV622"]


def test_ranks_that_share_a_host_pool_must_agree_at_the_end() -> None:
    stores = [line(0, hashes=[1, 2], tier="HostPinned"), line(0, hashes=[1], tier="HostPinned", worker_id="w1")]
    apart = fed(stores)
    apart.finish()
    assert not apart.findings.kept
    shared = fed(stores, shared_host=True)
    shared.finish()
    assert [f.code for f in shared.findings.kept] == ["KV704"]
    assert "1 host blocks differ" in shared.findings.kept[0].problem


def test_one_block_under_two_cache_ids_is_found() -> None:
    validator = fed([line(0, hashes=[1], cache_id="a"), line(0, hashes=[1], cache_id="b", worker_id="w1")])
    validator.finish()
    assert [f.code for f in validator.findings.kept] == ["KV812"]


def test_hash_agreement_where_tokens_are_given() -> None:
    tokens = {"token_ids": [1, 2, 3, 4], "block_size": 2}
    good = [line(0, hashes=[1, 2], **tokens), line(0, hashes=[1, 2], worker_id="w1", **tokens)]
    assert not fed(good).findings.kept
    other_hash = fed([*good, line(0, hashes=[8, 9], worker_id="w2", **tokens)])
    assert [f.code for f in other_hash.findings.kept] == ["KV902"]
    wrong_hashes = fed([line(0, hashes=[1, 2], token_hashes=[5, 6], **tokens)])
    assert [f.code for f in wrong_hashes.findings.kept] == ["KV903"]
    too_many = fed([line(0, hashes=[1], **tokens)])
    assert [f.code for f in too_many.findings.kept] == ["KV905"]


def test_a_run_takes_its_place_from_a_block_that_has_one() -> None:
    unplaced = {"tier": "HostPinned", "parent_hash": None, "start_position": None}
    validator = fed([line(0, hashes=[1, 2]), line(1, hashes=[2, 3], **unplaced)])
    assert validator.state("w0").match([1, 2, 3]) == 3
    assert validator.state("w0").match([1, 2, 3], HOST) == 0


def test_time_that_goes_back_is_reported() -> None:
    validator = fed([line(0, hashes=[1], ts_ms=5), line(1, hashes=[2], ts_ms=5), line(2, hashes=[3], ts_ms=4.5)])
    assert [f.code for f in validator.findings.kept] == ["KV108"]
