"""Field cases whose streams come from runs, go to a router, or are published: each test is one case and its outcome."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zmq
from stream_cases import DEVICE, HOST, checked, path_of

from g2sim.actors.config import TieBreak, WorkerRole
from g2sim.actors.handoff.events import DestinationActivated
from g2sim.actors.host_pool.events import LoadQueued, StoreLanded
from g2sim.actors.kv.blocks import BlockChain
from g2sim.actors.kv.events import BlocksCleared, BlocksRemoved, BlocksStored
from g2sim.actors.kv.wire import CLEARED, STORED, EngineFields, StreamEvent, tier_of
from g2sim.actors.kv.wire_vllm import Batch, Message, encode_batch
from g2sim.actors.router.dynamo import DynamoKv
from g2sim.actors.router.events import PlacementWeighed
from g2sim.actors.router.policy import RoutedRequest
from g2sim.actors.router.pool import Pool
from g2sim.actors.router.state import Placed, RouterState
from g2sim.actors.worker.events import RequestAdmitted
from g2sim.bus.events import Record
from g2sim.bus.streams import RandomStream
from g2sim.scenarios.publish_streams import Publisher, outgoing
from g2sim.scenarios.run import run_scenario
from g2sim.scenarios.schema import Scenario
from g2sim.scenarios.state_fold import StateFold
from g2sim.scenarios.stream_sources import MessageReader, open_stream
from g2sim.scenarios.validate import BatchArrived, Source, Validator

# -- a router that hears a file


class Router:
    """Our router with Dynamo's policy, told what a file of neutral lines says of workers w0, w1, ..."""

    def __init__(self, name: str, *, workers: int = 1, dp_size: int = 1) -> None:
        pool = Pool(
            role=WorkerRole.AGGREGATED,
            workers=workers,
            dp_size=dp_size,
            block_size_tokens=4,
            max_batched_tokens=64,
            gpu_blocks=64,
            tie_break=TieBreak.LOWEST,
            stream=lambda purpose: RandomStream(0, purpose),
        )
        self.state = RouterState(pool, DynamoKv())
        self._events = [item for _, item in open_stream(path_of(name))[1] if isinstance(item, StreamEvent)]

    def hear(self, count: int | None = None) -> Router:
        """The next events, or all that are left."""
        count = len(self._events) if count is None else count
        for event in self._events[:count]:
            who: Any = {"worker": int(str(event.worker_id)[1:]), "role": "aggregated", "dp_rank": event.dp_rank}
            who |= {
                "event_id": event.event_id,
                "tier": None if event.medium is None else tier_of("neutral", event.medium),
            }
            hashes: Any = event.hashes
            if event.kind == CLEARED:
                heard: Any = BlocksCleared(**who)
            elif event.kind == STORED:
                place: Any = {"parent_hash": event.parent, "start_position": event.position}
                heard = BlocksStored(**who, **place, block_hashes=hashes, token_hashes=hashes)
            else:
                heard = BlocksRemoved(**who, block_hashes=hashes)
            self.state.observe([heard], float(event.ts_ms or 0))
        del self._events[:count]
        return self

    def ask(self, chain: Sequence[int], now_ms: float = 0.0) -> Placed:
        """Where a request for these blocks goes; nothing stays booked."""
        blocks = BlockChain(tuple(chain), tuple(chain))
        request = RoutedRequest(
            request=0, prompt_tokens=4 * len(chain), output_tokens=1, chain=blocks, arrival_ms=now_ms
        )
        placed = self.state.place(request, now_ms)
        assert isinstance(placed, Placed)
        self.state.ended(0, now_ms)
        return placed


def test_f06_the_worker_with_the_host_copy_is_chosen() -> None:
    placed = Router("f06", workers=2).hear(3).ask([1, 2, 3])
    assert placed.placement.worker == 0
    assert placed.why is not None
    assert [(one.device_blocks, one.host_blocks) for one in placed.why.candidates] == [(0, 3), (0, 0)]


def test_f11_the_worker_that_was_not_cleared_is_chosen() -> None:
    router = Router("f11", workers=2).hear(5)
    assert router.ask([1, 2, 3]).placement.worker == 1
    placed = router.hear().ask([1, 2, 3])
    assert placed.why is not None
    assert [one.device_blocks for one in placed.why.candidates] == [1, 3]


def test_f13_the_clear_of_an_idle_worker_goes_out_at_once() -> None:
    """The clear is a message of its own, at its own time; a request that comes 100 ms later finds nothing."""
    times = [(item.time_ms, item.message.sequence) for item in outgoing(path_of("f13"))]
    assert times == [(50.0, 0), (100.0, 1)]
    router = Router("f13")
    assert router.hear(1).ask([1, 2], 60.0).overlap_blocks == 2
    assert router.hear().ask([1, 2], 200.0).overlap_blocks == 0


def test_f17_the_rank_that_holds_the_prefix_is_chosen_and_has_its_own_load() -> None:
    router = Router("f17", dp_size=4).hear()
    placed = router.ask([21, 22, 23, 24])
    assert (placed.placement.worker, placed.placement.dp_rank) == (0, 2)
    assert placed.why is not None
    assert [one.device_blocks for one in placed.why.candidates] == [0, 0, 4, 0]
    chain = BlockChain((21, 22, 23, 24), (21, 22, 23, 24))
    router.state.place(RoutedRequest(request=1, prompt_tokens=16, output_tokens=1, chain=chain, arrival_ms=0.0), 0.0)
    again = router.ask([91, 92])
    assert again.why is not None
    assert [one.active_requests for one in again.why.candidates] == [0, 0, 1, 0]


# -- runs

Row = tuple[float, Sequence[int], int]
"""(arrival [ms], hash ids of the whole blocks, output tokens)."""


class Ran:
    """A run of Mooncake rows with 4-token blocks, checked turn by turn against the workers' own books."""

    def __init__(self, folder: Path, rows: Sequence[Row], workers: dict[str, Any], **more: Any) -> None:
        lines = [
            {"timestamp": at, "input_length": 4 * len(ids) + 1, "hash_ids": [*ids, 900 + row], "output_length": output}
            for row, (at, ids, output) in enumerate(rows)
        ]
        trace = folder / "trace.jsonl"
        trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
        mode = "aggregated" if "aggregated" in workers else "disaggregated"
        source = {"type": "trace", "format": "mooncake", "paths": [str(trace)], "block_size": 4}
        scenario = Scenario.from_dict(
            {
                "name": "field",
                "engine": {"mode": mode, "workers": workers},
                "traffic": {"source": source, "load": {"type": "trace_timestamps"}},
                **more,
            },
            base_dir=folder,
        )
        self.records: list[Record] = []
        self.fold = StateFold()
        result = run_scenario(scenario, folder / "run", verify=True, on_record=self._take)
        assert result.checkpoints
        self.validator, self.verdicts = checked(folder / "run")

    def _take(self, record: Record) -> None:
        self.records.append(record)
        self.fold.apply(record)

    def all(self, kind: type) -> list[Any]:
        return [record.event for record in self.records if isinstance(record.event, kind)]

    def found(self) -> list[tuple[int, int]]:
        """(device, host) blocks that each request found, in order of admission."""
        return [(event.g1_tokens // 4, (event.host_tokens or 0) // 4) for event in self.all(RequestAdmitted)]


def worker(g1: int, g2: int, *, replicas: int = 1, shared: bool = False) -> dict[str, Any]:
    host = {"scope": "cluster_shared" if shared else "dp_rank_local", "num_host_blocks": g2}
    return {
        "parallelism": {"replicas": replicas},
        "scheduler": {"max_sequences": 4, "max_batched_tokens": 256},
        "kv_cache": {
            "block_size": 4,
            "bytes_per_token": 250_000,
            "capacity": {"type": "fixed", "blocks": g1},
            "host_offload": {**host, "d2h_bandwidth_gbps": 1.0, "h2d_bandwidth_gbps": 1.0},
        },
        "timing": {"type": "fixed", "prefill_ms": 2.0, "decode_ms": 1.0},
    }


def distinct(count: int, blocks: int, *, every_ms: float, start_ms: float = 0.0) -> list[Row]:
    """Prompts that share nothing."""
    return [(start_ms + every_ms * row, [100 * row + at + 1 for at in range(blocks)], 2) for row in range(count)]


def test_f07_every_path_into_a_tier_is_announced(tmp_path: Path) -> None:
    """Fresh compute, write-through, eviction, load from the pool and hand-off; the log alone gives the residency."""
    rows = distinct(6, 6, every_ms=40.0) + distinct(6, 6, every_ms=40.0, start_ms=400.0)
    prefill = worker(16, 64, replicas=2, shared=True)
    ran = Ran(tmp_path, rows, {"prefill": prefill, "decode": worker(16, 64, replicas=2, shared=True)})
    for kind in (StoreLanded, LoadQueued, DestinationActivated):
        assert ran.all(kind), kind
    assert any(event.tier == "device" for event in ran.all(BlocksRemoved))
    assert not ran.validator.findings.kept
    assert all(verdict.reason is None for verdict in ran.verdicts)
    told = {(f"{role}-{number}", rank): held for (role, number, rank), held in ran.fold.ranks.items()}
    assert told.keys() == set(ran.validator.ranks())
    for (name, rank), held in told.items():
        state = ran.validator.state(name, rank)
        assert (state.resident(DEVICE), state.resident(HOST)) == (held.device, held.host)


def test_f19_a_shared_prefix_is_not_removed_when_the_tree_branches(tmp_path: Path) -> None:
    rows: list[Row] = [(0.0, (1, 2, 3, 4), 2), (100.0, (1, 2, 5, 6), 2), (200.0, (1, 2, 3, 4), 2)]
    ran = Ran(tmp_path, rows, {"aggregated": worker(64, 64)})
    assert not ran.all(BlocksRemoved)
    assert ran.found() == [(0, 0), (2, 0), (4, 0)]
    first, second = [event.block_hashes for event in ran.all(BlocksStored) if event.tier == "device"]
    for chain in (first, first[:2] + second):
        assert ran.validator.overlap(chain, DEVICE) == {("aggregated-0", 0): 4}


def test_f23_the_router_promises_what_the_host_can_serve(tmp_path: Path) -> None:
    """Here the host's unit of transfer is one block, so of A = [1,2,3,4] prompt [1,2,3,9] is served three."""
    rows: list[Row] = [(0.0, (1, 2, 3, 4), 1)]
    rows += [(at, (int(at), int(at) + 1, int(at) + 2, int(at) + 3), 1) for at in (100.0, 200.0)]
    rows += [(1000.0, (1, 2, 3, 9), 1)]
    rows += [(at, (int(at), int(at) + 1, int(at) + 2, int(at) + 3), 1) for at in (1100.0, 1200.0)]
    rows += [(2000.0, (1, 2, 3, 4, 5), 1)]
    ran = Ran(tmp_path, rows, {"aggregated": worker(6, 64)}, router={"policy": "dynamo_kv"})
    promised = [(event.device_blocks[0], event.host_blocks[0]) for event in ran.all(PlacementWeighed)]
    assert promised == ran.found()
    assert (promised[3], promised[6]) == ((0, 3), (0, 4))


def test_f30_a_small_host_tier_goes_on_taking_stores(tmp_path: Path) -> None:
    ran = Ran(tmp_path, distinct(40, 8, every_ms=50.0), {"aggregated": worker(64, 16)})
    stored = sum(len(event.block_hashes) for event in ran.all(BlocksStored) if event.tier == HOST)
    assert stored == 40 * 8
    assert not ran.validator.findings.kept  # a running audit of the capacities in the log's header among them
    assert len(ran.validator.state("aggregated-0").resident(HOST)) == 16


def test_f36_what_is_written_to_the_host_is_found_there(tmp_path: Path) -> None:
    rows = distinct(10, 8, every_ms=100.0) + distinct(10, 8, every_ms=100.0, start_ms=2000.0)
    ran = Ran(tmp_path, rows, {"aggregated": worker(16, 256)})
    assert ran.found() == [(0, 0)] * 10 + [(0, 8)] * 10
    stored = [hash_ for event in ran.all(BlocksStored) if event.tier == HOST for hash_ in event.block_hashes]
    assert len(stored) == len(set(stored)) == 80
    assert ran.validator.state("aggregated-0").resident(HOST) == set(stored)
    chains = [event.block_hashes for event in ran.all(BlocksStored) if event.tier == DEVICE][:10]
    for chain in chains:
        assert ran.validator.overlap(chain, HOST) == {("aggregated-0", 0): 8}


# -- a publisher whose subscriber is slow


def test_f20_what_a_slow_subscriber_loses_is_seen_as_gaps() -> None:
    """500 messages for one that has room for 8 and does not read: the publisher ends anyhow, and the loss is named."""
    context = zmq.Context()
    publisher = Publisher(context, "127.0.0.1", queue=8)
    slow = context.socket(zmq.SUB)
    try:
        slow.setsockopt(zmq.LINGER, 0)
        slow.setsockopt(zmq.RCVHWM, 8)
        slow.setsockopt(zmq.RCVBUF, 4096)
        slow.setsockopt(zmq.SUBSCRIBE, b"")
        slow.connect(publisher.endpoint)
        while not publisher.subscribers:
            publisher.serve(10)
        for number in range(500):
            publisher.send(long_message(number))
        validator, reader, got, number = Validator(), MessageReader("w0"), 0, 0
        validator.begin(Source("slow", "vllm", "message"))
        while number < 500:
            if not slow.poll(300):  # room again: what comes next shows what was lost
                publisher.send(long_message(500))
                assert slow.poll(5000)
            item = reader.read(slow.recv_multipart(), replayed=False)
            assert isinstance(item, BatchArrived)
            validator.feed(got, item)
            got, number = got + 1, item.number
        lost = [one for first, last in validator.state("w0").open_gaps() for one in range(first, last + 1)]
        assert lost
        assert got + len(lost) == 501
        (verdict,) = validator.finish()
        assert verdict.reason is not None
        assert {finding.code for finding in validator.findings.kept} == {"KV101"}
    finally:
        slow.close()
        publisher.close()
        context.destroy(0)


def long_message(number: int) -> Message:
    """One block of 20,000 tokens, so that few messages fill the buffers below the queues."""
    engine = EngineFields(token_ids=array("I", [number, *range(100_000, 119_999)]), block_size=20_000)
    event = StreamEvent(kind=STORED, medium="GPU", hashes=(number,), engine=engine)
    payload = encode_batch(Batch(ts_s=1.0, events=(event,), dp_rank=0))
    return Message(topic=b"", sequence=number, payload=payload)
