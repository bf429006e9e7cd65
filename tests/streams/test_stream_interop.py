"""End to end: what we publish, the services of NVIDIA Dynamo 1.6.1 understand as our own index and router do.

Needs an interpreter with ``ai-dynamo-runtime`` 1.6.1 (``make reference``).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from interop_bench import BLOCK, MODEL, TAIL_TOKENS, WORKERS, Bench, needs_reference, service

from g2sim.actors.kv.wire import CLEARED, DEVICE, HOST, REMOVED, StreamEvent
from g2sim.actors.kv.wire_vllm import Batch, Message, ReplayLayout, Shape, decode_batch, encode_batch
from g2sim.actors.router.policy import RoutedRequest
from g2sim.actors.router.pool import WorkerState
from g2sim.actors.router.state import Placed
from g2sim.scenarios.publish_streams import Outgoing, outgoing
from g2sim.scenarios.run import run_scenario
from g2sim.scenarios.schema import load_scenario

pytestmark = needs_reference
LIBRARY = Path(__file__).parents[2] / "scenarios" / "library"
CHECKPOINTS = 8
PREFIXES = 60
"""Asked for at each of twelve points."""


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two workers with one host pool between them, too small for the trace, so that blocks leave either tier."""
    folder = tmp_path_factory.mktemp("interop")
    text = (LIBRARY / "agentx-g2-shared.yaml").read_text(encoding="utf-8")
    assert "num_host_blocks: 1024" in text
    (folder / "small.yaml").write_text(text.replace("num_host_blocks: 1024", "num_host_blocks: 160"), encoding="utf-8")
    (folder / "traces").symlink_to(LIBRARY / "traces")
    run_scenario(load_scenario(folder / "small.yaml"), folder / "run")
    return folder / "run"


@pytest.fixture
def context() -> Iterator[Any]:
    made = zmq.Context()
    try:
        yield made
    finally:
        made.destroy(0)


def read(item: Outgoing) -> tuple[StreamEvent, ...]:
    return decode_batch(item.message.payload).events


class TestIndexer:
    """Device and host overlap of each worker, with both shapes of events and both layouts of replay answers."""

    @pytest.mark.parametrize(("shape", "layout"), [(Shape.MAP, ReplayLayout.TOPIC), (Shape.ARRAY, ReplayLayout.SEQ)])
    def test_it_agrees_with_our_index(self, shape: Shape, layout: ReplayLayout, run_folder: Path, context: Any) -> None:
        batches = list(outgoing(run_folder, shape=shape))
        with service("dynamo.indexer") as call, Bench(context, call, layout) as bench:
            for place in range(len(WORKERS)):
                self.register(bench, place)
            bench.await_subscribers()
            self.play(bench, batches)
            self.lose_some(bench, batches)
            assert not bench.validator.findings.kept
            removed = {event.medium for item in batches for event in read(item) if event.kind == REMOVED}
            assert removed == {"GPU", "CPU"}
            assert bench.seen == {(place, tier) for place in range(len(WORKERS)) for tier in (DEVICE, HOST)}
            self.clear(bench)
            self.leave_and_rejoin(bench, batches)
            assert len(bench.asked) >= 500
            assert bench.compared >= 600

    def register(self, bench: Bench, place: int) -> None:
        one = bench.publishers[place]
        body = {"instance_id": place + 1, "endpoint": one.endpoint, "model_name": MODEL, "block_size": BLOCK}
        status, text = bench.call("POST", "/register", body | {"replay_endpoint": one.replay_endpoint})
        assert status == 201, text

    def compare(self, bench: Bench, what: str) -> None:
        def ask(chain: tuple[int, ...]) -> list[tuple[int, int]]:
            status, body = bench.call("POST", "/query", {"token_ids": bench.token_ids(chain), "model_name": MODEL})
            assert status == 200, body
            rows = {int(key): (row["gpu"] // BLOCK, row["cpu"] // BLOCK) for key, row in body["instances"].items()}
            return [rows.get(place + 1, (0, 0)) for place in range(len(WORKERS))]

        bench.compare(what, PREFIXES, ask)

    def play(self, bench: Bench, batches: list[Outgoing]) -> None:
        """Most of the run, compared at several points."""
        part = len(batches) * 3 // 4
        for number, item in enumerate(batches[:part]):
            bench.send(item)
            if number % (part // CHECKPOINTS + 1) == part // CHECKPOINTS:
                self.compare(bench, f"after batch {number}")
        self.compare(bench, "at three quarters")

    def lose_some(self, bench: Bench, batches: list[Outgoing]) -> None:
        """The rest, of which every fifth batch is lost and fetched from the replay socket."""
        rest = batches[len(batches) * 3 // 4 :]
        for number, item in enumerate(rest):
            last = all(later.rank != item.rank for later in rest[number + 1 :])
            bench.send(item, lose=number % 5 == 0 and not last)
        self.compare(bench, "after gaps")
        assert all(publisher.asked for publisher in bench.publishers)

    def clear(self, bench: Bench) -> None:
        payload = encode_batch(Batch(ts_s=1.0, events=(StreamEvent(kind=CLEARED),), dp_rank=0))
        number = bench.validator.state(WORKERS[0]).next_number
        assert number
        bench.send(Outgoing((WORKERS[0], 0), 0.0, Message(topic=b"", sequence=number, payload=payload)))
        self.compare(bench, "after a clear")
        assert all(bench.overlap(chain)[0] == (0, 0) for chain in bench.asked)
        assert any(bench.overlap(chain)[1] != (0, 0) for chain in bench.asked)

    def leave_and_rejoin(self, bench: Bench, batches: list[Outgoing]) -> None:
        """The second worker leaves, and comes back with numbers from 0 and what it stored first."""
        assert bench.call("POST", "/unregister", {"instance_id": 2, "model_name": MODEL})[0] == 200
        bench.leave(1)
        self.compare(bench, "after a worker has left")
        assert all(bench.overlap(chain)[1] == (0, 0) for chain in bench.asked)
        bench.publishers[1].close()
        bench.publishers[1] = bench.publisher()
        bench.join(1)
        self.register(bench, 1)
        bench.await_subscribers()
        for item in [batch for batch in batches if batch.rank[0] == WORKERS[1]][:20]:
            bench.send(item)
        self.compare(bench, "after it has joined again")
        assert any(bench.overlap(chain)[1] != (0, 0) for chain in bench.chains.values())


class TestSelectionService:
    """Overlap of each tier, and the worker that is chosen, idle and under load."""

    def test_it_places_as_our_router_does(self, run_folder: Path, context: Any) -> None:
        batches = list(outgoing(run_folder))
        with service("dynamo.select_service") as call, Bench(context, call, ReplayLayout.TOPIC) as bench:
            for place, one in enumerate(bench.publishers):
                body = {"worker_id": place + 1, "model_name": MODEL, "endpoint": f"http://127.0.0.1:{place + 1}"}
                body |= {"block_size": BLOCK, "kv_events_endpoints": {"0": one.endpoint}, "total_kv_blocks": 10_000}
                body |= {"replay_endpoint": one.replay_endpoint, "max_num_batched_tokens": 8192}
                status, text = call("POST", "/workers", body)
                assert status == 201, text
            bench.await_subscribers()
            chosen: set[int] = set()
            for part in range(4):
                for item in batches[part * len(batches) // 4 : (part + 1) * len(batches) // 4]:
                    bench.send(item)
                self.compare_overlap(bench, f"after part {part}")
                chosen |= self.compare_choices(bench)
                self.load_and_compare(bench)
            assert chosen == {0, 1}
            assert len(bench.asked) >= 100
            assert call("DELETE", "/workers/1")[0] == 200
            bench.router.set_worker(0, WorkerState.REMOVED, 0.0)
            assert self.compare_choices(bench) == {1}

    def compare_overlap(self, bench: Bench, what: str) -> None:
        def ask(chain: tuple[int, ...]) -> list[tuple[int, int]]:
            body = {"model_name": MODEL, "token_ids": bench.token_ids(chain)}
            status, answer = bench.call("POST", "/overlap_scores", body)
            assert status == 200, answer
            rows = {row["worker_id"]: row for row in answer["workers"]}
            device = [rows.get(place + 1, {}).get("device_blocks", 0) for place in range(len(WORKERS))]
            more = [rows.get(place + 1, {}).get("host_pinned_extension_blocks", 0) for place in range(len(WORKERS))]
            return [(own, own + beyond) for own, beyond in zip(device, more, strict=True)]

        bench.compare(what, 30, ask)

    def request(self, bench: Bench, number: int, prefix: tuple[int, ...]) -> tuple[RoutedRequest, dict[str, Any]]:
        """A request for a prefix and some tokens more, in our form and in the service's."""
        token_ids = bench.token_ids(prefix) + list(range(TAIL_TOKENS))
        own = RoutedRequest(
            request=number,
            prompt_tokens=len(token_ids),
            output_tokens=4,
            chain=bench.chain_of(prefix),
            arrival_ms=0.0,
        )
        return own, {"model_name": MODEL, "token_ids": token_ids}

    def compare_choices(self, bench: Bench, count: int = 20) -> set[int]:
        """Ask both for many prefixes. Ties are the service's to decide. Returns who was chosen without one."""
        chosen = set()
        for prefix in bench.prefixes(count):
            own, body = self.request(bench, 1_000_000, prefix)
            best = self.best(bench, own)
            status, answer = bench.call("POST", "/select", body)
            assert status == 200, answer
            assert answer["worker_id"] - 1 in best
            if len(best) == 1:
                chosen |= best
        return chosen

    def best(self, bench: Bench, own: RoutedRequest) -> set[int]:
        """Workers of the lowest cost, nothing booked."""
        verdict: Any = bench.router.policy.place(own, 0.0)
        costs = verdict.why.costs
        return {
            one.placement.worker for one, cost in zip(verdict.why.candidates, costs, strict=True) if cost == min(costs)
        }

    def load_and_compare(self, bench: Bench) -> None:
        """Book requests on both sides, compare what that makes of the next choices, and end them."""
        booked = 0
        for prefix in bench.prefixes(30):
            own, body = self.request(bench, booked, prefix)
            if len(self.best(bench, own)) > 1 or booked == 5:
                continue
            placed = bench.router.place(own, 0.0)
            assert isinstance(placed, Placed)
            assert placed.why is not None
            status, answer = bench.call("POST", "/select_and_reserve", body | {"selection_id": f"r{booked}"})
            assert status == 200, answer
            tokens = bench.router.policy.prefill_tokens(own, placed.why.candidates[placed.why.chosen])
            assert (answer["worker_id"] - 1, answer["effective_prefill_tokens"]) == (placed.placement.worker, tokens)
            booked += 1
            self.compare_choices(bench, 5)
        assert booked == 5
        for number in range(booked):
            assert bench.call("DELETE", f"/reservations/r{number}")[0] == 200
            bench.router.ended(number, 0.0)
