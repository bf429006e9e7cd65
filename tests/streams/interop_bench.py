"""The wheel's services on one side, our own index and router on the other, and our publishers that feed both.

The services listen on all interfaces, on free ports and for seconds; all traffic is on 127.0.0.1.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import time
import urllib.error
import urllib.request
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from g2sim.actors.config import TieBreak, WorkerRole
from g2sim.actors.kv.blocks import BlockChain, sequence_hash, tokens_hash
from g2sim.actors.kv.events import BlocksRemoved, BlocksStored
from g2sim.actors.kv.wire import DEVICE, HOST, STORED, StreamEvent, tier_of
from g2sim.actors.kv.wire_neutral import JOINED, LEFT, Membership
from g2sim.actors.kv.wire_vllm import ReplayLayout, decode_batch
from g2sim.actors.router.dynamo import DynamoKv
from g2sim.actors.router.pool import Pool
from g2sim.actors.router.state import RouterState
from g2sim.bus.streams import RandomStream
from g2sim.scenarios.publish_streams import Outgoing, Publisher
from g2sim.scenarios.validate import BatchArrived, Mode, Options, Source, Validator

BLOCK = 64
MODEL = "m"
WORKERS = ("aggregated-0", "aggregated-1")
TAIL_TOKENS = 30
"""Tokens behind the whole blocks of a prompt."""

# Where the variable is set, as .ci/run does, nothing is skipped: what it names has to work.
_NAMED = os.environ.get("G2SIM_REFERENCE_PYTHON")
REFERENCE = Path(_NAMED or Path(__file__).parents[2] / "build/reference/bin/python").absolute()
needs_reference = pytest.mark.skipif(
    _NAMED is None and not REFERENCE.exists(),
    reason="ai-dynamo-runtime 1.6.1 is missing: make reference, or name its interpreter in G2SIM_REFERENCE_PYTHON",
)

Call = Callable[..., tuple[int, Any]]
"""(method, path, body or nothing) -> status and answer."""


@contextlib.contextmanager
def service(module: str) -> Iterator[Call]:
    """A service of the wheel in a process of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def call(method: str, path: str, body: Any = None) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data=data, method=method, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=15) as reply:
                return reply.status, json.loads(reply.read() or b"null")
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    with subprocess.Popen(
        [REFERENCE, "-m", module, "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**environment, "DYN_LOG": "error"},
    ) as process:
        try:
            _await(lambda: _is_healthy(call, process, module), f"{module} did not come up", seconds=60)
            yield call
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def _is_healthy(call: Call, process: subprocess.Popen[bytes], module: str) -> bool:
    assert process.poll() is None, f"{REFERENCE} -m {module} ended; does it have ai-dynamo-runtime 1.6.1?"
    with contextlib.suppress(OSError):
        return call("GET", "/health")[0] == 200
    return False


def _await(done: Callable[[], bool], problem: str, *, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, problem
        time.sleep(0.02)


class Bench:
    """A service, our own view, and the publishers between them.

    Attributes:
        validator: knows what is true, and in ``dynamo`` what the index should know.
        router: our own router with Dynamo's policy.
        chains: block hash -> tokens hashes of its prefix. ``tokens``: tokens hash -> tokens.
        asked: every prefix that was compared. ``compared``: how many answers were. ``seen``: (worker, tier) with a hit.
    """

    def __init__(self, context: Any, call: Call, layout: ReplayLayout) -> None:
        self.call = call
        self.validator = Validator(Options(mode=Mode.DYNAMO))
        self.validator.begin(Source("published", "vllm", "message"))
        self.router = RouterState(
            Pool(
                role=WorkerRole.AGGREGATED,
                workers=len(WORKERS),
                dp_size=1,
                block_size_tokens=BLOCK,
                max_batched_tokens=8192,
                gpu_blocks=10_000,
                tie_break=TieBreak.LOWEST,
                stream=lambda purpose: RandomStream(0, purpose),
            ),
            DynamoKv(),
        )
        self.chains: dict[int, tuple[int, ...]] = {}
        self.tokens: dict[int, array[int]] = {}
        self.asked: set[tuple[int, ...]] = set()
        self.compared = 0
        self.seen: set[tuple[int, str]] = set()
        self.rng = random.Random("interop")
        self._context, self._layout = context, layout
        self._fed = 0
        self.publishers = [self.publisher() for _ in WORKERS]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for publisher in self.publishers:
            publisher.close()

    def publisher(self) -> Publisher:
        return Publisher(self._context, "127.0.0.1", layout=self._layout)

    def send(self, item: Outgoing, *, lose: bool = False) -> None:
        """Publish a batch, and take it in ourselves; ``lose`` keeps it for the replay socket only."""
        place = WORKERS.index(item.rank[0])
        message = item.message
        events = decode_batch(message.payload, event_id=message.sequence).events
        for event in events:
            self._learn(place, event)
        self._feed(BatchArrived(item.rank[0], 0, message.sequence, events, False))
        self.publishers[place].send(message, lose=lose)

    def leave(self, place: int) -> None:
        self._feed(Membership(kind=LEFT, worker_id=WORKERS[place], dp_rank=None))

    def join(self, place: int) -> None:
        self._feed(Membership(kind=JOINED, worker_id=WORKERS[place], dp_rank=None))

    def serve(self) -> None:
        for publisher in self.publishers:
            publisher.serve()

    def await_subscribers(self) -> None:
        def all_subscribed() -> bool:
            self.serve()
            return all(publisher.subscribers for publisher in self.publishers)

        _await(all_subscribed, "the service did not subscribe")

    def prefixes(self, count: int) -> list[tuple[int, ...]]:
        """The longest prefix that was ever announced, then others drawn at random, those first that were not asked."""
        chains = sorted(set(self.chains.values()), key=lambda chain: (-len(chain), chain))
        others = self.rng.sample(chains[1:], len(chains) - 1)
        others.sort(key=lambda chain: chain in self.asked)
        return [chains[0], *others[: count - 1]]

    def token_ids(self, chain: tuple[int, ...]) -> list[int]:
        return [token for own in chain for token in self.tokens[own]]

    def overlap(self, chain: tuple[int, ...]) -> list[tuple[int, int]]:
        """(device, device and host) leading blocks on each worker, as our index has it."""
        assert self.validator.dynamo is not None
        found = self.validator.dynamo.overlap(chain)
        return [found.get((worker, 0), (0, 0)) for worker in WORKERS]

    def compare(self, what: str, count: int, ask: Callable[[tuple[int, ...]], list[tuple[int, int]]]) -> None:
        """``ask`` for many prefixes, waiting until the service has taken what is on its way."""
        for chain in self.prefixes(count):
            wanted = self.overlap(chain)
            deadline = time.monotonic() + 5
            while (got := ask(chain)) != wanted and time.monotonic() < deadline:
                self.serve()
                time.sleep(0.02)
            assert got == wanted, f"{what}, prefix of {len(chain)} blocks"
            self.compared += 1
            self.asked.add(chain)
            for place, (device, both) in enumerate(wanted):
                self.seen |= {(place, DEVICE)} if device else set()
                self.seen |= {(place, HOST)} if both > device else set()

    def chain_of(self, prefix: tuple[int, ...]) -> BlockChain:
        hashes: list[int] = []
        for own in prefix:
            hashes.append(sequence_hash(hashes[-1] if hashes else None, own))
        return BlockChain(tuple(hashes), prefix)

    def _feed(self, item: BatchArrived | Membership) -> None:
        self._fed += 1
        self.validator.feed(self._fed, item)

    def _learn(self, place: int, event: StreamEvent) -> None:
        """What an event says of chains, and to our router."""
        if event.medium is None:
            return
        who: Any = {"worker": place, "role": "aggregated", "dp_rank": 0, "event_id": event.event_id}
        who["tier"] = tier_of("vllm", event.medium)
        hashes: Any = event.hashes
        if event.kind != STORED:
            self.router.observe([BlocksRemoved(**who, block_hashes=hashes)], 0.0)
            return
        assert event.engine is not None
        tokens, own = event.engine.token_ids, []
        for at in range(0, len(tokens), BLOCK):
            own.append(tokens_hash(tokens[at : at + BLOCK].tobytes()))
            self.tokens[own[-1]] = tokens[at : at + BLOCK]
        parent: Any = event.parent
        above = () if parent is None else self.chains.get(parent)
        for hash_, one in zip(hashes, own, strict=True):
            if above is not None:
                above = self.chains[hash_] = (*above, one)
        stored = BlocksStored(
            **who, parent_hash=parent, start_position=None, block_hashes=hashes, token_hashes=tuple(own)
        )
        self.router.observe([stored], 0.0)
