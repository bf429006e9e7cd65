"""Run logs: the simulator's own are clean, and each wrong record is found by its rule."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs
import pytest
from stream_cases import HOST, checked

from g2sim.actors.host_pool import events as hp
from g2sim.actors.kv.blocks import sequence_hash
from g2sim.actors.kv.events import BlocksCleared, BlocksRemoved, BlocksStored
from g2sim.actors.traffic.events import RequestArrived
from g2sim.bus.events import Record
from g2sim.bus.log import LogReader, LogWriter
from g2sim.scenarios.run import run_scenario
from g2sim.scenarios.schema import load_scenario
from g2sim.scenarios.state_fold import StateFold
from g2sim.scenarios.stream_sources import check_files
from g2sim.scenarios.validate import Validator

LIBRARY = Path(__file__).parents[2] / "scenarios" / "library"
SCENARIO = {
    "engine": {
        "workers": {
            "aggregated": {
                "kv_cache": {
                    "block_size": 4,
                    "capacity": {"blocks": 4, "type": "fixed"},
                    "host_offload": {"num_host_blocks": 4},
                }
            }
        }
    }
}
TOKENS = (11, 12, 13, 14)
CHAIN = [TOKENS[0]]
for own in TOKENS[1:]:
    CHAIN.append(sequence_hash(CHAIN[-1], own))
G2 = {"pool": "g2"}


def who(worker: int) -> dict[str, Any]:
    return {"worker": worker, "role": "aggregated", "dp_rank": 0}


def stored(worker: int, event_id: int, start: int, stop: int, tier: str = HOST) -> BlocksStored:
    return BlocksStored(
        **who(worker),
        event_id=event_id,
        tier=tier,
        parent_hash=CHAIN[start - 1] if start else None,
        start_position=start,
        block_hashes=tuple(CHAIN[start:stop]),
        token_hashes=TOKENS[start:stop],
    )


def arrival(request: int, cache_id: str | None) -> RequestArrived:
    names = [field.name for field in attrs.fields(RequestArrived)]
    values = dict.fromkeys(names) | {"request": request, "arrival_ms": 0.0, "input_tokens": 8, "output_tokens": 1}
    return RequestArrived(**values | {"cache_id": cache_id})


def join(worker: int) -> hp.ClientJoined:
    return hp.ClientJoined(**G2, **who(worker))


def prepare(worker: int, request: int, transfer: int, start: int, stop: int) -> hp.StorePrepared:
    return hp.StorePrepared(
        **G2, **who(worker), request=request, transfer=transfer, block_hashes=tuple(CHAIN[start:stop])
    )


def land(transfer: int) -> hp.StoreLanded:
    return hp.StoreLanded(**G2, transfer=transfer, ended_ms=1.0)


def load(worker: int, request: int, transfer: int, stop: int) -> hp.LoadQueued:
    blocks = tuple(CHAIN[:stop])
    return hp.LoadQueued(
        **G2, **who(worker), request=request, transfer=transfer, block_hashes=blocks, completes_at_ms=None
    )


def good() -> list[Any]:
    """Two workers on one pool: the first stores, both announce; a third joins and is told what is there."""
    return [
        join(0),
        join(1),
        arrival(0, "play-a"),
        prepare(0, 0, 0, 0, 2),
        stored(0, 0, 0, 2, "device"),
        land(0),
        stored(1, 0, 0, 2),
        stored(0, 1, 0, 2),
        join(2),
        stored(2, 0, 0, 2),
        prepare(0, 0, 1, 2, 4),
        land(1),
        hp.HostBlocksEvicted(**G2, block_hashes=(CHAIN[1],)),
        *(event for worker, number in ((0, 2), (1, 1), (2, 1)) for event in told_later(worker, number)),
    ]


def told_later(worker: int, number: int) -> list[Any]:
    removed = BlocksRemoved(**who(worker), event_id=number + 1, tier=HOST, block_hashes=(CHAIN[1],))
    return [stored(worker, number, 2, 4), removed]


def clear(*unused: int, loading: tuple[int, ...] = ()) -> hp.HostPoolCleared:
    blocks, read = (tuple(CHAIN[at] for at in places) for places in (unused, loading))
    return hp.HostPoolCleared(**G2, block_hashes=blocks, loading_hashes=read)


def gone(worker: int, event_id: int) -> BlocksRemoved:
    return BlocksRemoved(**who(worker), event_id=event_id, tier=HOST, block_hashes=(CHAIN[1], CHAIN[0]))


def cleared() -> list[Any]:
    """A clear under a load of one block and a store of two; then a block is stored anew while these run."""
    return [
        *good()[:8],
        load(1, 0, 7, 1),
        prepare(0, 0, 1, 2, 4),
        clear(1, loading=(0,)),
        gone(0, 2),
        gone(1, 1),
        prepare(0, 0, 2, 0, 1),
        hp.LoadFinished(**G2, transfer=7, ended_ms=1.0),
        hp.ClearedBlocksFreed(**G2, block_hashes=(CHAIN[0],)),
        hp.StoreDropped(**G2, transfer=1, ended_ms=1.0),
        land(2),
        stored(0, 3, 0, 1),
        stored(1, 2, 0, 1),
        prepare(1, 0, 3, 1, 4),
    ]


def after_clear(index: int, *instead: Any) -> list[Any]:
    events = cleared()
    events[index : index + 1] = instead
    return events


def written(path: Path, events: Iterable[Any]) -> Path:
    with path.open("wb") as file:
        writer = LogWriter(file, version="0", seed=1, scenario=SCENARIO)
        for number, event in enumerate(events):
            writer.append(Record(float(number), "test", number, event))
        writer.finish("finished")
    return path


def codes_of(tmp_path: Path, events: Iterable[Any]) -> list[str]:
    validator, _ = checked(written(tmp_path / "events.g2log", events))
    return [finding.code for finding in validator.findings.kept]


def changed(index: int, *instead: Any) -> list[Any]:
    events = good()
    events[index : index + 1] = instead
    return events


@pytest.mark.parametrize("events", [good(), cleared()], ids=["good", "cleared"])
def test_a_right_log_has_no_finding(events: list[Any], tmp_path: Path) -> None:
    assert codes_of(tmp_path, events) == []


WRONG = {
    "a host store before its copy has ended": ([*good()[:4], stored(0, 0, 0, 2)], "KV801"),
    "a change that the pool did not make": ([*good()[:4], stored(0, 0, 3, 4)], "KV701"),
    "changes in another order": (
        [
            *good()[:13],
            BlocksRemoved(**who(1), event_id=1, tier=HOST, block_hashes=(CHAIN[1],)),
            *told_later(0, 2),
            *told_later(2, 1),
        ],
        "KV702",
    ),
    "a joiner that is not told all": (changed(9, stored(2, 0, 0, 1)), "KV623"),
    "a rank that stays behind": (good()[:-1], "KV703"),
    "more blocks than the pool has room for": (changed(10, prepare(0, 0, 1, 1, 4), prepare(0, 0, 9, 0, 1)), "KV502"),
    "an evicted block that is not there": (
        changed(12, hp.HostBlocksEvicted(**G2, block_hashes=(99,)), good()[12]),
        "KV503",
    ),
    "an evicted block that is pinned": (changed(12, load(0, 0, 7, 2), good()[12]), "KV503"),
    "a load of another play's blocks": (changed(12, arrival(1, "play-b"), load(1, 1, 7, 1), good()[12]), "KV811"),
    "a block hash that is not its content's": (
        changed(4, attrs.evolve(stored(0, 0, 0, 2, "device"), token_hashes=(TOKENS[0], 5))),
        "KV904",
    ),
    "a device block stored twice": (
        changed(4, stored(0, 0, 0, 2, "device"), stored(0, 1, 0, 2, "device")),
        "KV301",
    ),
    "a tier with more blocks than it has room for": (
        [stored(0, 0, 0, 4, "device"), BlocksCleared(**who(0), event_id=1, tier=HOST), *over_the_top()]
        if (over_the_top := lambda: [attrs.evolve(stored(0, 2, 0, 1, "device"), block_hashes=(5,), token_hashes=(5,))])
        else [],
        "KV501",
    ),
    "a missing event": (changed(7), "KV101"),
    "a store before the removals of a clear": (after_clear(11), "KV702"),
    "a clear that a rank says nothing of": (cleared()[:12], "KV703"),
    "a store of before a clear": (after_clear(18, stored(0, 3, 2, 4)), "KV701"),
    "a store that lands although a clear took it": (after_clear(16, land(1), stored(0, 3, 2, 4)), "KV701"),
    "more blocks than a clear has left room for": (after_clear(13, prepare(0, 0, 2, 0, 2)), "KV502"),
    "memory that is freed while a load reads it": (after_clear(10, clear(1, 0)), "KV503"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_log_is_found_out(name: str, tmp_path: Path) -> None:
    events, code = WRONG[name]
    assert code in codes_of(tmp_path, events)


@pytest.fixture(scope="module")
def library_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "demo"
    run_scenario(load_scenario(LIBRARY / "agentx-g2-shared.yaml"), folder)
    return folder


def test_the_library_run_is_clean_and_its_residency_is_the_folds(library_run: Path) -> None:
    validator, verdicts = checked(library_run)
    assert not validator.findings.kept
    assert all(verdict.reason is None for verdict in verdicts)
    fold = StateFold()
    with LogReader(library_run / "events.g2log") as reader:
        for record in reader:
            fold.apply(record)
    for (role, worker, rank), told in fold.ranks.items():
        state = validator.state(f"{role}-{worker}", rank)
        assert (state.resident("device"), state.resident(HOST)) == (told.device, told.host)


def test_a_cut_log_is_checked_as_far_as_it_goes(library_run: Path, tmp_path: Path) -> None:
    whole = (library_run / "events.g2log").read_bytes()
    for cut in (7, len(whole) // 2):
        path = tmp_path / f"cut{cut}.g2log"
        path.write_bytes(whole[:-cut])
        validator, verdicts = checked(path)
        assert [f.code for f in validator.findings.kept if f.code != "KV703"] == ["KV002"]
        assert verdicts


def test_capacities_of_a_log_hold_for_that_log_only(tmp_path: Path) -> None:
    """The worker goes on in JSON lines, which say nothing of room, and then in a log that has less of it."""
    validator = Validator()
    log = written(tmp_path / "a.g2log", [stored(0, 0, 0, 2, "device")])
    more = tmp_path / "more.jsonl"
    line = {"worker_id": "aggregated-0", "event_id": 1, "tier": "Device", "kind": "Stored", "parent_hash": CHAIN[1]}
    more.write_text(json.dumps(line | {"block_hashes": list(range(1, 9)), "start_position": 2}) + "\n")
    again = written(
        tmp_path / "b.g2log", [attrs.evolve(stored(0, 2, 0, 1, "device"), block_hashes=(9,), token_hashes=(9,))]
    )
    check_files([log, more], validator)
    assert not validator.findings.kept
    check_files([again], validator)
    assert [finding.problem for finding in validator.findings.kept] == ["device holds 11 blocks, capacity 4"]
