"""Cost of the router's index: look-ups, updates and whole decisions, with the reference's RadixTree beside it.

    python benchmarks/router_index.py [--reference PYTHON] [--workers 8] [--blocks 20000] [--prompt-blocks 64]

Each worker holds its blocks as conversations of the prompt's length, half of them under a prefix that all workers
share, and as many again in host memory. ``--reference`` is an interpreter of an environment that holds the reference;
its tree knows the device tier only, and its times include the calls from Python.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from g2sim.actors.config import TieBreak, WorkerRole
from g2sim.actors.kv.blocks import BlockChain, sequence_hash
from g2sim.actors.kv.events import BlocksStored, Tier
from g2sim.actors.router.dynamo import DynamoKv
from g2sim.actors.router.index import DeviceIndex, HostIndex
from g2sim.actors.router.policy import RoutedRequest
from g2sim.actors.router.pool import Pool
from g2sim.actors.router.state import RouterState
from g2sim.bus.streams import RandomStream

Chain = tuple[list[int], list[int]]
"""Sequence hashes and tokens hashes of one conversation."""

SHARED_SHARE = 0.25
"""How much of a conversation is the common prefix, in those that have it."""

REFERENCE = """
import json, os, sys, time
os.environ["DYN_LOG"] = "off"
from dynamo._core import RadixTree
channel = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
data = json.load(sys.stdin)
tree = RadixTree()
events = [(worker, json.dumps({"event_id": 0, "dp_rank": 0, "data": body}).encode()) for worker, body in data["events"]]
begun = time.perf_counter()
for worker, event in events:
    tree.apply_event(worker, event)
store = (time.perf_counter() - begun) / data["stored"]
found = []
for prompt in data["prompts"]:
    begun = time.perf_counter()
    tree.find_matches(prompt)
    found.append(time.perf_counter() - begun)
scores = [sorted([worker, depth] for (worker, _), depth in tree.find_matches(prompt).scores.items())
          for prompt in data["prompts"][:50]]
json.dump({"store": store, "find": found, "scores": scores}, channel)
"""


def conversations(workers: int, blocks: int, length: int, draw: random.Random) -> list[list[Chain]]:
    """For each worker, chains that together hold ``blocks`` blocks."""
    common = [draw.getrandbits(64) for _ in range(int(length * SHARED_SHARE))]
    out = []
    for _ in range(workers):
        mine = []
        for number in range(-(-blocks // length)):
            head = common if number % 2 else []
            tokens = head + [draw.getrandbits(64) for _ in range(length - len(head))]
            hashes: list[int] = []
            for own in tokens:
                hashes.append(sequence_hash(hashes[-1] if hashes else None, own))
            mine.append((hashes, tokens))
        out.append(mine)
    return out


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--reference", help="interpreter of the reference's environment")
    options.add_argument("--workers", type=int, default=8)
    options.add_argument("--blocks", type=int, default=20_000, help="blocks a worker, in each tier")
    options.add_argument("--prompt-blocks", type=int, default=64)
    options.add_argument("--seed", type=int, default=0)
    chosen = options.parse_args()
    draw = random.Random(chosen.seed)
    held = conversations(chosen.workers, chosen.blocks, chosen.prompt_blocks, draw)
    device, host = DeviceIndex(chosen.workers), HostIndex(chosen.workers)
    stored = chosen.workers * -(-chosen.blocks // chosen.prompt_blocks) * chosen.prompt_blocks

    def each(index: DeviceIndex | HostIndex) -> None:
        for place, mine in enumerate(held):
            for hashes, tokens in mine:
                index.store(place, None, hashes, tokens)

    rows = [("store a block, device", _timed(lambda: each(device)) / stored)]
    prompts = [tokens for mine in held for _, tokens in mine]
    draw.shuffle(prompts)
    prompts = prompts[:2000]
    rows += _spread("look up, device only", [_timed(lambda p=p: device.fronts(p)) for p in prompts])
    rows.append(("store a block, host", _timed(lambda: each(host)) / stored))

    def look_up(prompt: Sequence[int]) -> None:
        extension = [0] * chosen.workers
        host.extend(device.fronts(prompt), prompt, extension)

    rows += _spread("look up, both tiers", [_timed(lambda p=p: look_up(p)) for p in prompts])
    shared = HostIndex(chosen.workers)
    for mine in held:
        for place in range(chosen.workers):
            for hashes, tokens in mine[: len(mine) // chosen.workers]:
                shared.store(place, None, hashes, tokens)
    nothing = DeviceIndex(chosen.workers)
    in_pool = [tokens for mine in held for _, tokens in mine[: len(mine) // chosen.workers]]

    def look_up_shared(prompt: Sequence[int]) -> None:
        shared.extend(nothing.fronts(prompt), prompt, [0] * chosen.workers)

    rows += _spread("look up, a shared pool has all of it", [_timed(lambda p=p: look_up_shared(p)) for p in in_pool])
    rows += _spread("a decision of dynamo_kv, both tiers", _decisions(held, chosen.prompt_blocks))
    reference = None
    if chosen.reference:
        reference = _reference(chosen.reference, held, prompts, stored)
        rows.append(("reference: store a block, device", reference["store"]))
        rows += _spread("reference: look up, device only", reference["find"])
        ours = [sorted([place, depth] for place, depth in _depths(device, prompt)) for prompt in prompts[:50]]
        if ours != reference["scores"]:
            print("the reference finds other overlaps", file=sys.stderr)
            return 1

    def remove() -> None:
        for place, mine in enumerate(held):
            for hashes, _ in mine:
                for block_hash in reversed(hashes):
                    device.remove(place, (block_hash,))

    rows.append(("remove a block, device", _timed(remove) / stored))
    where = f"{chosen.prompt_blocks}-block prompts, {chosen.workers} workers x {chosen.blocks} blocks a tier"
    print(where)
    for name, seconds in rows:
        print(f"{name:<48}{seconds * 1e6:9.2f} us")
    return 0


def _decisions(held: list[list[Chain]], length: int) -> list[float]:
    """Seconds of each placement, with 32 requests in flight on a worker; booking and account are included."""
    pool = Pool(
        role=WorkerRole.AGGREGATED,
        workers=len(held),
        dp_size=1,
        block_size_tokens=16,
        max_batched_tokens=8192,
        gpu_blocks=1,
        tie_break=TieBreak.LOWEST,
        stream=lambda purpose: RandomStream(0, purpose),
    )
    for worker, mine in enumerate(held):
        for hashes, tokens in mine:
            for tier in Tier:
                pool.apply(
                    BlocksStored(
                        worker=worker,
                        role="aggregated",
                        dp_rank=0,
                        event_id=0,
                        tier=tier.value,
                        parent_hash=None,
                        start_position=0,
                        block_hashes=tuple(hashes),
                        token_hashes=tuple(tokens),
                    )
                )
    state = RouterState(pool, DynamoKv())
    seconds = []
    for number in range(2000):
        hashes, tokens = held[number % len(held)][number // len(held) % len(held[0])]
        request = RoutedRequest(
            request=number,
            prompt_tokens=16 * length,
            output_tokens=100,
            chain=BlockChain(tuple(hashes), tuple(tokens)),
            arrival_ms=0.0,
        )
        seconds.append(_timed(lambda request=request: state.place(request, 0.0)))
        state.first_token(number, 0.0)
        state.ended(number - 32 * len(held), 0.0)
    return seconds


def _depths(index: DeviceIndex, prompt: Sequence[int]) -> list[tuple[int, int]]:
    return [
        (place, depth)
        for places, depth, _ in index.fronts(prompt)
        for place in range(places.bit_length())
        if depth and places >> place & 1
    ]


def _timed(call: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def _spread(name: str, seconds: list[float]) -> list[tuple[str, float]]:
    ordered = sorted(seconds)
    return [(f"{name}, median", statistics.median(ordered)), (f"{name}, p99", ordered[int(len(ordered) * 0.99)])]


def _reference(python: str, held: list[list[Chain]], prompts: list[list[int]], stored: int) -> dict[str, Any]:
    events = [
        (
            worker,
            {
                "stored": {
                    "parent_hash": None,
                    "blocks": [
                        {"block_hash": block, "tokens_hash": own} for block, own in zip(hashes, tokens, strict=True)
                    ],
                }
            },
        )
        for worker, mine in enumerate(held)
        for hashes, tokens in mine
    ]
    body = json.dumps({"events": events, "prompts": prompts, "stored": stored})
    done = subprocess.run([python, "-c", REFERENCE], input=body, capture_output=True, text=True, check=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


if __name__ == "__main__":
    sys.exit(main())
