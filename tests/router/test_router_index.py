"""The index: what it refuses, what the reference's indexer was seen to do, and an obvious model."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from router_values import BLOCK, chain_of, cleared, pool, removed, request, stored, who

from g2sim.actors.kv.blocks import BlockChain
from g2sim.actors.kv.events import BlocksCleared, BlocksRemoved, BlocksStored, Tier
from g2sim.actors.router import index as index_module
from g2sim.actors.router.index import DeviceIndex, HostIndex, bits
from g2sim.actors.router.policy import KvEvent
from g2sim.actors.router.pool import Pool, WorkerState
from g2sim.bus.errors import InvariantViolation

RECORDINGS = Path(__file__).parents[1] / "oracle" / "router"
HOST = "host_pinned"


def depths(index: DeviceIndex, prompt: Sequence[int], places: int = 4) -> list[int]:
    out = [-1] * places
    for held_by, depth, _ in index.fronts(prompt):
        for place in bits(held_by):
            assert out[place] == -1, "a place is named twice"
            out[place] = depth
    assert -1 not in out
    return out


class TestRefusals:
    def test_a_run_whose_parent_this_place_does_not_know_is_refused_as_a_whole_and_forgotten(self) -> None:
        index = DeviceIndex(2)
        assert not index.store(0, 101, [102, 103], [2, 3])
        assert index.store(0, None, [100, 101], [0, 1])
        assert depths(index, [0, 1, 2, 3], 2) == [2, 0]
        assert not index.store(1, 101, [102], [2]), "known to another place only"

    def test_unknown_removals_are_counted_and_the_known_ones_beside_them_applied(self) -> None:
        index = DeviceIndex(1)
        index.store(0, None, [100, 101, 102], [0, 1, 2])
        assert index.remove(0, [77]) == 1
        assert index.remove(0, [77, 102]) == 1
        assert depths(index, [0, 1, 2], 1) == [2]
        host = HostIndex(1)
        host.store(0, None, [100], [0])
        assert host.remove(0, [101, 100]) == 1

    def test_a_host_run_ends_at_the_first_block_that_contradicts_an_edge(self) -> None:
        index = HostIndex(2)
        assert index.store(0, None, [100, 101], [0, 1])
        assert not index.store(1, None, [800, 801], [0, 1]), "other hash for the same block: the first one wins"
        assert index.blocks(1) == 0
        assert not index.store(0, 900, [101, 102], [1, 2]), "one edge for a child"
        assert index.blocks(0) == 2

    def test_a_run_with_a_hash_twice_or_equal_to_its_parent_has_no_effect(self) -> None:
        watched = pool(1)
        for parent, hashes in ((None, (100, 100)), (100, (100,))):
            watched.apply(
                BlocksStored(
                    tier="device",
                    parent_hash=parent,
                    start_position=0,
                    block_hashes=hashes,
                    token_hashes=tuple(range(len(hashes))),
                    **who(0),
                )
            )
        assert watched.overlap(request(0, (0, 1))).device == [0]

    def test_lists_of_different_lengths_are_a_bug_of_the_caller(self) -> None:
        with pytest.raises(ValueError, match="2 block hashes with 1 tokens hashes"):
            DeviceIndex(1).store(0, None, [1, 2], [1])

    def test_check_finds_a_block_without_its_parent(self) -> None:
        index = DeviceIndex(2)
        index.store(0, None, [100, 101], [0, 1])
        index.store(1, None, [100], [0])
        index.check()
        index._root.children[0].places = 0b10
        with pytest.raises(InvariantViolation, match="without its parent"):
            index.check()
        host = HostIndex(1)
        host.store(0, None, [100], [0])
        assert host.hashes(0) == {100}
        host._held[0].clear()
        with pytest.raises(InvariantViolation, match="owners"):
            host.check()


# -- what the reference's indexer was seen to do: steps as in probe_indexer.py, answers from the recording

IDS = tuple(range(8))


def st_(worker: int, first: int, last: int, parent: Any = "auto", tier: str = "device", base: int = 100) -> KvEvent:
    if parent == "auto":
        parent = None if first == 0 else base + first - 1
    tokens = chain_of(IDS).tokens_hashes
    return BlocksStored(
        tier=tier,
        parent_hash=parent,
        start_position=first,
        block_hashes=tuple(range(base + first, base + last + 1)),
        token_hashes=tokens[first : last + 1],
        **who(worker),
    )


def cpu(worker: int, first: int, last: int, parent: Any = "auto", base: int = 100) -> KvEvent:
    return st_(worker, first, last, parent, HOST, base)


def rm(worker: int, *blocks: int, tier: str = "device", base: int = 100) -> KvEvent:
    return BlocksRemoved(tier=tier, block_hashes=tuple(base + block for block in blocks), **who(worker))


OBSERVED: dict[str, list[KvEvent]] = {
    "device_then_host": [st_(1, 0, 2), cpu(1, 3, 4)],
    "host_only_from_root": [cpu(1, 0, 3)],
    "host_covers_device_too": [st_(1, 0, 2), cpu(1, 0, 5)],
    "device_on_one_worker_host_on_other": [st_(1, 0, 3), cpu(2, 4, 6)],
    "host_child_before_parent": [st_(1, 0, 1), cpu(1, 4, 4), cpu(1, 3, 3), cpu(1, 2, 2)],
    "host_parent_evicted_child_stays": [cpu(1, 0, 4), rm(1, 2, tier=HOST), cpu(1, 2, 2)],
    "device_middle_removed": [st_(1, 0, 4), rm(1, 2), st_(1, 2, 2)],
    "device_middle_removed_host_bridge": [st_(1, 0, 4), cpu(1, 2, 2), rm(1, 2)],
    "device_unknown_parent": [st_(1, 2, 3), st_(1, 0, 1), st_(1, 2, 3)],
    "device_parent_known_only_on_other_worker": [st_(1, 0, 1), st_(2, 2, 3), st_(2, 0, 1)],
    "duplicate_store": [st_(1, 0, 1), st_(1, 0, 1), rm(1, 1)],
    "duplicate_store_other_hashes": [st_(1, 0, 1), st_(1, 0, 1, base=500), rm(1, 1), rm(1, 1, base=500)],
    "remove_unknown": [st_(1, 0, 2), rm(1, 77), rm(1, 77, 2), rm(1, 2, 77)],
    "remove_wrong_tier": [st_(1, 0, 1), cpu(1, 0, 1), rm(1, 1, tier=HOST), rm(1, 1)],
    "cleared_reaches_both_tiers": [st_(1, 0, 1), cpu(1, 2, 3), st_(2, 0, 1), cleared(1)],
    "cleared_one_rank": [st_(1, 0, 2), attrs.evolve(st_(1, 0, 1), dp_rank=3), cleared(1, dp_rank=3)],
    "self_reference": [
        BlocksStored(
            tier="device",
            parent_hash=None,
            start_position=0,
            block_hashes=(100, 100),
            token_hashes=chain_of(IDS).tokens_hashes[:2],
            **who(1),
        )
    ],
    "partial_host_hashes_differ_from_device": [
        st_(1, 0, 1),
        cpu(1, 2, 3, parent=601, base=600),
        cpu(1, 2, 3, parent=101, base=650),
    ],
    "host_same_hash_other_parent": [
        st_(1, 0, 1),
        cpu(1, 2, 3, parent=601, base=600),
        cpu(1, 2, 3, parent=101, base=600),
    ],
    "host_hashes_differ_between_workers": [
        cpu(1, 0, 1),
        cpu(2, 0, 1, base=800),
        rm(1, 0, 1, tier=HOST),
        cpu(2, 0, 1, base=800),
    ],
    "device_hashes_differ_between_workers": [st_(1, 0, 1), st_(2, 0, 1, base=800), cpu(2, 2, 2, base=800)],
    "host_conflicting_child": [cpu(1, 0, 1), cpu(1, 1, 2, parent=100, base=700), cpu(2, 0, 2, base=800)],
}


def answer(watched: Pool) -> dict[str, Any]:
    """Overlaps in the form of the recording: blocks for each worker, cumulative over tiers."""
    overlap = watched.overlap(request(0, IDS))
    out: dict[str, Any] = {}
    for worker in range(watched.workers):
        ranks = {rank: watched.place_of(place) for rank, place in enumerate(watched.places) if place.worker == worker}
        found = {
            watched.places[place].dp_rank: (overlap.device[place], overlap.device[place] + overlap.host[place])
            for place in ranks.values()
            if overlap.device[place] + overlap.host[place]
        }
        if found:
            gpu, total = (max(column) for column in zip(*found.values(), strict=True))
            dp = {str(rank): device for rank, (device, _) in found.items()}
            out[str(worker)] = {"gpu": gpu, "cpu": total, "disk": total, "dp": dp}
    return out


SEEN: dict[str, Any] = json.loads((RECORDINGS / "indexer_observations.json").read_text())["scenarios"]


@pytest.mark.parametrize("name", OBSERVED)
def test_what_the_reference_answered_after_each_event(name: str) -> None:
    watched = pool(3, dp_size=4)
    answers = []
    for event in OBSERVED[name]:
        watched.apply(event)
        watched.check()
        answers.append(answer(watched))
    assert answers == SEEN[name]["blocks_after_each_step"]


def run(first: int, last: int, parent: Any = "auto", base: int = 100) -> tuple[int | None, list[int], list[int]]:
    if parent == "auto":
        parent = None if first == 0 else base + first - 1
    return parent, list(range(base + first, base + last + 1)), list(range(first, last + 1))


TREE: dict[str, list[tuple[int, Any]]] = {
    "one run": [(1, run(0, 2))],
    "unknown parent": [(1, run(2, 3))],
    "unknown parent, then the parent": [(1, run(2, 3)), (1, run(0, 1))],
    "parent known only on another worker": [(1, run(0, 1)), (2, run(2, 3))],
    "duplicate store": [(1, run(0, 1)), (1, run(0, 1))],
    "duplicate store, other hashes, old hash removed": [(1, run(0, 1)), (1, run(0, 1, base=500)), (1, [101])],
    "duplicate store, other hashes, new hash removed": [(1, run(0, 1)), (1, run(0, 1, base=500)), (1, [501])],
    "tail removed": [(1, run(0, 3)), (1, [103])],
    "middle removed": [(1, run(0, 3)), (1, [101])],
    "middle removed and stored again": [(1, run(0, 3)), (1, [101]), (1, run(1, 1))],
    "middle removed, all stored again": [(1, run(0, 3)), (1, [101]), (1, run(1, 3))],
    "middle removed, then a child removed": [(1, run(0, 3)), (1, [101]), (1, [103])],
    "unknown removal": [(1, run(0, 1)), (1, [777])],
    "unknown then known in one removal": [(1, run(0, 1)), (1, [777, 101])],
    "removal for a worker never seen": [(1, run(0, 1)), (2, [100])],
    "clear as a bare string": [(1, run(0, 1)), (1, "cleared")],
    "two workers share a prefix": [(1, run(0, 3)), (2, run(0, 1))],
}
TREE_SEEN: dict[str, Any] = json.loads((RECORDINGS / "radix_tree.json").read_text())["cases"]


@pytest.mark.parametrize("name", TREE)
def test_what_the_references_tree_answered(name: str) -> None:
    index = DeviceIndex(3)
    taken = []
    for worker, what in TREE[name]:
        if what == "cleared":
            index.clear(worker)
            taken.append(True)
        elif isinstance(what, list):
            taken.append(index.remove(worker, what) == 0)
        else:
            taken.append(index.store(worker, *what))
        index.check()
    assert taken == [reply == "ok" for reply in TREE_SEEN[name]["answers"]]
    found = {f"{place}:0": depth for place, depth in enumerate(depths(index, list(range(8)), 3)) if depth}
    assert found == TREE_SEEN[name]["scores"]


# -- an obvious model: for each place and tier, the set of prefixes it holds

PLACES = 3
PREFIXES = st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple)


class IndexAgainstModel(RuleBasedStateMachine):
    """Hashes follow from prefixes, as all of g2sim's do."""

    @initialize()
    def start(self) -> None:
        self.pool = pool(PLACES)
        self.held: dict[tuple[int, str], set[tuple[int, ...]]] = {
            (place, tier): set() for place in range(PLACES) for tier in ("device", HOST)
        }

    @rule(
        place=st.integers(0, PLACES - 1), tier=st.sampled_from(["device", HOST]), ids=PREFIXES, start=st.integers(0, 4)
    )
    def store(self, place: int, tier: str, ids: tuple[int, ...], start: int) -> None:
        start = min(start, len(ids) - 1)
        self.pool.apply(stored(place, ids, start=start, tier=tier))
        held = self.held[place, tier]
        if tier == HOST or start == 0 or ids[:start] in held:
            held.update(ids[: stop + 1] for stop in range(start, len(ids)))

    @rule(
        place=st.integers(0, PLACES - 1),
        tier=st.sampled_from(["device", HOST]),
        gone=st.lists(PREFIXES, min_size=1, max_size=3),
    )
    def remove(self, place: int, tier: str, gone: list[tuple[int, ...]]) -> None:
        hashes = tuple(chain_of(ids).sequence_hashes[-1] for ids in gone)
        self.pool.apply(BlocksRemoved(tier=tier, block_hashes=hashes, **who(place)))
        held = self.held[place, tier]
        for ids in gone:
            if ids not in held:
                continue
            below = {other for other in held if other[: len(ids)] == ids} if tier == "device" else {ids}
            held -= below

    @rule(place=st.integers(0, PLACES - 1), tier=st.sampled_from(["device", HOST, None]))
    def clear(self, place: int, tier: str | None) -> None:
        self.pool.apply(BlocksCleared(tier=tier, **who(place)))
        for one in ("device", HOST):
            if tier in (one, None):
                self.held[place, one].clear()

    @invariant()
    def every_prompt_finds_what_the_model_holds(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        for number in range(32):
            ids = tuple(number >> bit & 1 for bit in range(5))
            overlap = self.pool.overlap(request(0, ids))
            for place in range(PLACES):
                device = _walk(ids, 0, self.held[place, "device"])
                assert overlap.device[place] == device
                assert overlap.host[place] == _walk(ids, device, self.held[place, HOST]) - device


def _walk(ids: tuple[int, ...], depth: int, held: set[tuple[int, ...]]) -> int:
    while depth < len(ids) and ids[: depth + 1] in held:
        depth += 1
    return depth


TestIndexAgainstModel = IndexAgainstModel.TestCase
TestIndexAgainstModel.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


# -- any stream at all, against the rule said plainly: a hash may follow any other, on any place

Edges = tuple[dict[tuple[int | None, int], tuple[int, set[int]]], list[dict[int, tuple[int | None, int]]]]
"""(parent, tokens hash) -> (child, its places); and for each place: child -> its edge there."""

RUNS = st.lists(st.tuples(st.integers(100, 105), st.integers(0, 1)), min_size=1, max_size=4)
STEPS = st.one_of(
    st.tuples(st.just("store"), st.integers(1, 2**PLACES - 1), st.sampled_from([None, 100, 101]), RUNS),
    st.tuples(st.just("remove"), st.integers(1, 2**PLACES - 1), st.lists(st.integers(100, 105), min_size=1)),
    st.tuples(st.just("clear"), st.integers(0, PLACES - 1)),
)


def plain_store(known: Edges, place: int, parent: int | None, run_: Sequence[tuple[int, int]]) -> bool:
    edges, keys = known[0], known[1][place]
    for child, tokens_hash in run_:
        key = (parent, tokens_hash)
        if keys.get(child, key) != key or edges.get(key, (child,))[0] != child:
            return False
        edges.setdefault(key, (child, set()))[1].add(place)
        keys[child] = key
        parent = child
    return True


def plain_remove(known: Edges, place: int, hashes: Sequence[int]) -> int:
    edges, keys = known[0], known[1][place]
    unknown = 0
    for child in hashes:
        key = keys.pop(child, None)
        if key is None:
            unknown += 1
            continue
        edges[key][1].remove(place)
        if not edges[key][1]:
            del edges[key]
    return unknown


@given(st.lists(STEPS, max_size=12), st.integers(0, PLACES))
def test_the_host_index_does_with_any_stream_what_the_plain_rule_says(steps: list[Any], looked: int) -> None:
    """``looked``: how many places are asked for their blocks all the time; the others are at the end."""
    index = HostIndex(PLACES)
    known: Edges = ({}, [{} for _ in range(PLACES)])
    for what, where, *more in steps:
        if what == "store":
            parent, run_ = more
            refused = index.store_at(where, parent, *map(list, zip(*run_, strict=True)))
            assert list(bits(refused)) == [one for one in bits(where) if not plain_store(known, one, parent, run_)]
        elif what == "remove":
            assert index.remove_at(where, *more) == sum(plain_remove(known, one, *more) for one in bits(where))
        else:
            index.clear(where)
            plain_remove(known, where, list(known[1][where]))
        index.check()
        for place in range(looked):
            assert index.hashes(place) == known[1][place].keys()
        assert {key: (edge.child, set(bits(edge.places))) for key, edge in index._edges.items()} == known[0]
    assert [index.blocks(place) for place in range(PLACES)] == [len(keys) for keys in known[1]]


Paths = dict[tuple[int, ...], tuple[int, set[int]]]
"""Path of tokens hashes -> (first hash of its last block, places that hold it)."""

DEVICE_STEPS = st.one_of(
    st.tuples(st.just("store"), st.integers(0, PLACES - 1), st.sampled_from([None, *range(100, 106)]), RUNS),
    st.tuples(st.just("remove"), st.integers(0, PLACES - 1), st.lists(st.integers(100, 105), min_size=1)),
    st.tuples(st.just("clear"), st.integers(0, PLACES - 1)),
)


class PlainTree:
    """Block by block; ``handles``: for each place, block hash -> path."""

    def __init__(self) -> None:
        self.nodes: Paths = {}
        self.handles: list[dict[int, tuple[int, ...]]] = [{} for _ in range(PLACES)]

    def store(self, place: int, parent: int | None, run_: Sequence[tuple[int, int]]) -> bool:
        handles = self.handles[place]
        if parent is not None and parent not in handles:
            return False
        path = () if parent is None else handles[parent]
        for block_hash, tokens_hash in run_:
            path = (*path, tokens_hash)
            first, places = self.nodes.setdefault(path, (block_hash, set()))
            places.add(place)
            if first == block_hash:
                handles[block_hash] = path
        return True

    def remove(self, place: int, hashes: Sequence[int]) -> int:
        unknown = 0
        for block_hash in hashes:
            top = self.handles[place].get(block_hash)
            if top is None:
                unknown += 1
                continue
            self.drop(place, top)
        return unknown

    def drop(self, place: int, top: tuple[int, ...]) -> None:
        for path, (first, places) in list(self.nodes.items()):
            if path[: len(top)] != top or place not in places:
                continue
            places.remove(place)
            if self.handles[place].get(first) == path:
                del self.handles[place][first]
            if not places:
                del self.nodes[path]

    def depth(self, place: int, prompt: tuple[int, ...]) -> int:
        held = (place in self.nodes.get(prompt[:stop], (0, ()))[1] for stop in range(1, len(prompt) + 1))
        return sum(itertools.takewhile(bool, held))


@pytest.mark.parametrize("max_run", [1, 2, 64])
@given(steps=st.lists(DEVICE_STEPS, max_size=15))
def test_the_device_index_does_with_any_stream_what_the_plain_rule_says(max_run: int, steps: list[Any]) -> None:
    index, plain = DeviceIndex(PLACES), PlainTree()
    with mock.patch.object(index_module, "_MAX_RUN", max_run):
        for what, place, *more in steps:
            if what == "store":
                parent, run_ = more
                taken = index.store(place, parent, *map(list, zip(*run_, strict=True)))
                assert taken == plain.store(place, parent, run_)
            elif what == "remove":
                assert index.remove(place, *more) == plain.remove(place, *more)
            else:
                index.clear(place)
                plain.drop(place, ())
                plain.handles[place].clear()
            index.check()
            for each in range(PLACES):
                assert index.hashes(each) == plain.handles[each].keys()
    for prompt in itertools.product((0, 1), repeat=5):
        assert depths(index, prompt, PLACES) == [plain.depth(place, prompt) for place in range(PLACES)]
        for _, depth, block_hash in index.fronts(prompt):
            assert block_hash == (plain.nodes[prompt[:depth]][0] if depth else None)


# -- a shared pool: every rank tells its changes, in their order and in the same words, as soon as it hears of them

LOOKS = st.lists(st.integers(0, PLACES), max_size=40)
CHANGES = st.lists(st.tuples(st.booleans(), PREFIXES), min_size=1, max_size=8)


@given(CHANGES, CHANGES, LOOKS)
def test_it_does_not_matter_when_a_router_looks(shared: list[Any], private: list[Any], steps: list[int]) -> None:
    """``steps``: who tells its next event; the last number is a look, which lets one of two pools apply all it has."""
    told = [change(0, *one) for one in shared]
    told += told[::2]  # the same words once more
    streams = [[attrs.evolve(event, worker=place) for event in told] for place in range(PLACES)]
    streams[0] += [change(0, *one) for one in private]
    streams[1][1:1] = [cleared(1)]
    now_and_then, at_once = pool(PLACES), pool(PLACES)
    for step in (*steps, *(place for place in range(PLACES) for _ in streams[place])):
        if step == PLACES:
            now_and_then.check()
        elif streams[step]:
            event = streams[step].pop(0)
            now_and_then.apply(event)
            at_once.apply(event)
            at_once.check()
    for number in range(32):
        prompt = request(0, tuple(number >> bit & 1 for bit in range(5)))
        assert now_and_then.overlap(prompt) == at_once.overlap(prompt)
    for place in range(PLACES):
        assert now_and_then.believed(place, Tier.HOST_PINNED) == at_once.believed(place, Tier.HOST_PINNED)


def change(worker: int, is_store: bool, ids: tuple[int, ...]) -> KvEvent:
    return stored(worker, ids, tier=HOST) if is_store else removed(worker, ids, *range(len(ids)), tier=HOST)


def test_what_is_told_without_a_look_does_not_pile_up() -> None:
    watched = pool(1)
    event = stored(0, (1, 2))
    for _ in range(10_000):
        watched.apply(event)
    assert len(watched._noted) < 5_000
    assert watched.overlap(request(0, (1, 2))).device == [2]


class TestRuns:
    def test_one_place_loses_the_end_of_a_run_and_the_other_keeps_it(self) -> None:
        index = DeviceIndex(2)
        for place in range(2):
            index.store(place, None, [100, 101, 102], [0, 1, 2])
        assert index.remove(0, [102, 101]) == 0
        index.check()
        assert depths(index, [0, 1, 2], 2) == [1, 3]
        assert index.store(1, 101, [103], [3])
        assert depths(index, [0, 1, 3], 2) == [1, 3]

    def test_a_run_that_is_cut_gives_no_handles_to_a_place_that_had_none(self) -> None:
        index = DeviceIndex(2)
        index.store(0, None, [100, 101, 102], [0, 1, 2])
        index.store(1, None, [500, 501, 502], [0, 1, 2])
        assert index.remove(0, [101]) == 0
        assert depths(index, [0, 1, 2], 2) == [1, 3]
        assert index.remove(1, [102]) == 1
        assert index.blocks(1) == 0

    def test_a_prompt_of_many_runs_is_found_whole_and_up_to_where_it_differs(self) -> None:
        index = DeviceIndex(1)
        chain = chain_of(range(500))
        index.store(0, None, chain.sequence_hashes[:200], chain.tokens_hashes[:200])
        for at in range(200, 500):
            index.store(0, chain.sequence_hashes[at - 1], [chain.sequence_hashes[at]], [chain.tokens_hashes[at]])
        index.check()
        for stop in (0, 1, 63, 64, 65, 300, 499, 500):
            prompt = [*chain.tokens_hashes[:stop], 7, 7]
            assert index.fronts(prompt) == [(1, stop, chain.sequence_hashes[stop - 1] if stop else None)]
        assert index.remove(0, chain.sequence_hashes[:100:-1]) == 0
        index.check()
        assert (depths(index, chain.tokens_hashes, 1), index.blocks(0)) == ([101], 101)


class TestLookUp:
    def test_places_of_different_depth_walk_on_together_once_they_meet(self) -> None:
        watched = pool(3)
        for event in (stored(0, (1, 2)), stored(1, (1,)), *(stored(w, (1, 2, 3, 4), tier=HOST) for w in range(3))):
            watched.apply(event)
        overlap = watched.overlap(request(0, (1, 2, 3, 4, 5)))
        assert overlap.device == [2, 1, 0]
        assert overlap.host == [2, 3, 4]

    def test_a_shared_pool_is_seen_through_every_rank_in_any_order(self) -> None:
        """Each rank publishes the whole pool; a snapshot may bring children alone, live events children first."""
        watched = pool(2, dp_size=2)
        for worker in range(2):
            for dp_rank in range(2):
                for start in (2, 1, 0):
                    watched.apply(stored(worker, (1, 2, 3)[: start + 1], start=start, tier=HOST, dp_rank=dp_rank))
        assert watched.overlap(request(0, (1, 2, 3))).host == [3, 3, 3, 3]
        watched.apply(removed(0, (1, 2, 3), 1, tier=HOST, dp_rank=1))
        assert watched.overlap(request(0, (1, 2, 3))).host == [3, 1, 3, 3]

    def test_an_empty_index_and_a_prompt_without_whole_blocks_find_nothing(self) -> None:
        watched = pool(2)
        assert watched.overlap(request(0, (1, 2))).device == [0, 0]
        watched.apply(stored(0, (1, 2)))
        watched.apply(stored(0, (1, 2), tier=HOST))
        short = watched.overlap(request(0, (1,), tokens=BLOCK - 1))
        assert (short.device, short.host) == ([0, 0], [0, 0])

    def test_a_removed_worker_is_forgotten_with_its_ranks(self) -> None:
        watched = pool(2, dp_size=2)
        for dp_rank in range(2):
            watched.apply(stored(0, (1, 2), dp_rank=dp_rank))
            watched.apply(stored(1, (1, 2), dp_rank=dp_rank))
        watched.set_state(0, WorkerState.REMOVED)
        assert watched.overlap(request(0, (1, 2))).device == [0, 0, 2, 2]
        assert [candidate.placement.worker for candidate in watched.candidates(request(0))] == [1, 1]

    def test_memory_is_given_back(self) -> None:
        index, host = DeviceIndex(2), HostIndex(2)
        chain: BlockChain = chain_of(range(50))
        for place in range(2):
            for tier in (index, host):
                assert tier.store(place, None, chain.sequence_hashes, chain.tokens_hashes)
        assert (index.blocks(0), host.blocks(1)) == (50, 50)
        index.remove(0, chain.sequence_hashes[:1])
        index.clear(1)
        for place in range(2):
            host.remove(place, chain.sequence_hashes[::-1])
        assert not index._root.children
        assert not host._edges
        assert not host._children
        assert [index.blocks(place) + host.blocks(place) for place in range(2)] == [0, 0]
