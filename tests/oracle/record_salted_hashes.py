"""Record how Dynamo (ai-dynamo-runtime 1.6.1) hashes blocks with an adapter, a cache salt or multimodal objects.

Run in an environment that has the wheel, pyzmq and msgspec: ``python record_salted_hashes.py > salted_hashes.json``.
Two parts: ``hashes`` from the wheel's own function, and ``indexer``: event batches sent to its standalone indexer on
loopback, with what its dump holds after each. Tests need neither this script nor the wheel.
"""

from __future__ import annotations

import json
import os
import random
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from typing import Any

BLOCK = 4
MM = "ab" * 32  # as vLLM names a multimodal object


def stored(hashes: list[int], parent: int | None, medium: str = "GPU", **more: Any) -> dict[str, Any]:
    event = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent}
    event |= {"token_ids": [own for own in hashes for _ in range(BLOCK)], "block_size": BLOCK, "lora_id": None}
    return event | {"medium": medium, "lora_name": None} | more


def removed(hashes: list[int], medium: str = "GPU") -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium}


CLEARED = {"type": "AllBlocksCleared"}


def mm(*hashes: int) -> dict[str, Any]:
    return {"mm_objects": [{"mm_hash": own, "offsets": [[0, 1]]} for own in hashes]}


CPU = {"medium": "CPU"}
SALT, OTHER = {"cache_salt": "s"}, {"cache_salt": "t"}
TWICE = [[stored([1], None, **SALT)], [stored([1], None, **OTHER)]]
CASES: dict[str, list[list[dict[str, Any]]]] = {
    "plain": [[stored([1, 2], None)]],
    "adapter name": [[stored([1, 2], None, lora_name="abc")], [stored([3], 2)]],
    "empty adapter name": [[stored([1], None, lora_name="")]],
    "adapter id alone": [[stored([1], None, lora_id=7)]],
    "adapter name and id": [[stored([1], None, lora_id=7, lora_name="abc")]],
    "salt": [[stored([1, 2], None, **SALT)], [stored([3], 2)], [stored([4], 3, **CPU)]],
    "salt in one batch": [[stored([1], None, **SALT), stored([2], 1), stored([3], 2)]],
    "salt, then another": [[stored([1], None, **SALT)], [stored([2], 1, **OTHER)], [stored([3], 2)]],
    "salt, then an empty one": [[stored([1], None, **SALT)], [stored([2], 1, cache_salt="")], [stored([3], 2)]],
    "salt, then null": [[stored([1], None, **SALT)], [stored([2], 1, cache_salt=None)]],
    "salt below a plain block": [[stored([1], None)], [stored([2], 1, **SALT)], [stored([3], 2)], [stored([4], 1)]],
    "salt and adapter": [[stored([1], None, lora_name="abc", **SALT)], [stored([2], 1)]],
    "salt that is no text": [[stored([1], None, cache_salt=5), stored([2], None)]],
    "salt of a block that has gone": [[stored([1], None, **SALT)], [removed([1])], [stored([2], 1, **CPU)]],
    "salt of a block that has gone from one tier": [
        [stored([1], None, **SALT), stored([1], None, "CPU")],
        [removed([1])],
        [stored([2], 1, **CPU)],
    ],
    "salt of a host block whose parent is not there": [[stored([2], 1, "CPU", **SALT)], [stored([3], 2, **CPU)]],
    "salt before a clear": [[stored([1], None, **SALT)], [CLEARED], [stored([2], 1, **CPU)]],
    "salt of a refused run": [[stored([2], 1, **SALT)], [stored([3], 2, **CPU)]],
    "two salts": [*TWICE, [stored([2], 1)], [stored([3], 1, **CPU)], [stored([4], 1, **SALT)], [stored([5], 4)]],
    "two salts, in one batch": [*TWICE, [stored([2], 1), stored([9], None)]],
    "two salts, the block goes": [*TWICE, [removed([1])], [stored([1], None)], [stored([2], 1)]],
    "two salts on two tiers": [[stored([1], None, **SALT)], [stored([1], None, "CPU", **OTHER)], [stored([2], 1)]],
    "two salts on two tiers, one goes": [
        [stored([1], None, **SALT)],
        [stored([1], None, "CPU", **OTHER)],
        [removed([1], "CPU")],
        [stored([2], 1)],
    ],
    "one salt on two tiers, one goes": [
        [stored([1], None, **SALT)],
        [stored([1], None, "CPU", **SALT)],
        [removed([1])],
        [stored([2], 1, **CPU)],
    ],
    "two salts on two tiers, both go": [
        [stored([1], None, **SALT)],
        [stored([1], None, "CPU", **OTHER)],
        [removed([1])],
        [removed([1], "CPU")],
        [stored([1], None)],
        [stored([2], 1)],
    ],
    "two salts, the block goes twice": [*TWICE, [removed([1])], [removed([1])], [stored([1], None)], [stored([2], 1)]],
    "two salts before a clear": [*TWICE, [CLEARED], [stored([1], None)], [stored([2], 1)]],
    "salt twice, the block goes once": [
        [stored([1], None, **SALT)],
        [stored([1], None, **SALT)],
        [removed([1])],
        [stored([2], 1, **CPU)],
    ],
    "salt, and a removal on the other tier": [[stored([1], None, **SALT)], [removed([1], "CPU")], [stored([2], 1)]],
    "salt, and a removal on a tier set aside": [[stored([1], None, **SALT)], [removed([1], "HBM")], [stored([2], 1)]],
    "salt on a tier set aside": [[stored([1], None, "HBM", **SALT)], [stored([2], 1, **CPU)]],
    "salt on disk": [
        [stored([1], None, "DISK", **SALT)],
        [stored([2], 1, **CPU)],
        [removed([1])],
        [stored([3], 1, **CPU)],
    ],
    "salted and plain": [[stored([1], None, **SALT)], [stored([1], None)], [stored([2], 1)]],
    "plain and salted": [[stored([1], None)], [stored([1], None, **SALT)], [stored([2], 1)]],
    "salt in extra keys": [[stored([1, 2], None, extra_keys=[["s"], None])]],
    "salt in extra keys of all blocks": [[stored([1, 2], None, extra_keys=[["s"], ["s"]])]],
    "adapter in extra keys": [[stored([1], None, lora_name="abc", extra_keys=[["abc"]])]],
    "adapter and salt in extra keys": [[stored([1], None, lora_name="abc", extra_keys=[["abc", "s"]])]],
    "multimodal object in extra keys": [[stored([1], None, extra_keys=[[[MM, 0]]])]],
    "multimodal name in extra keys": [[stored([1], None, extra_keys=[[MM]])]],
    "number in extra keys": [[stored([1], None, extra_keys=[[5]])]],
    "multimodal information": [[stored([1, 2], None, block_mm_infos=[mm(5), None])]],
    "multimodal objects": [[stored([1, 2], None, block_mm_infos=[mm(9, 5), mm(5, 9)])], [stored([3], 2)]],
    "multimodal information and salt": [[stored([1], None, block_mm_infos=[mm(5)], lora_name="abc", **SALT)]],
}


def hash_cases(count: int) -> list[dict[str, Any]]:
    from dynamo._core import compute_block_hash_for_seq

    rng = random.Random("salted hashes")
    words = [None, "", "abc", "s", "ß", "adapter/with-a-name-that-is-longer-than-sixteen-bytes", "x" * 300]
    out = []
    for _ in range(count):
        size, blocks = rng.choice([1, 2, 4, 16, 64]), rng.randrange(4)
        tokens = [
            rng.choice([rng.randrange(2**32), rng.randrange(9)]) for _ in range(size * blocks + rng.randrange(size))
        ]
        infos = rng.choice(
            [
                None,
                [
                    rng.choice([None, mm(*(rng.randrange(2**64) for _ in range(rng.randrange(3))))])
                    for _ in range(blocks)
                ],
            ]
        )
        lora_name, salt = rng.choice(words), rng.choice(words)
        hashes = compute_block_hash_for_seq(tokens, size, infos, lora_name, None, salt)
        mm_hashes = infos and [[own["mm_hash"] for own in info["mm_objects"]] if info else [] for info in infos]
        case = {"token_ids": tokens, "block_size": size, "mm_hashes": mm_hashes, "lora_name": lora_name}
        out.append(case | {"cache_salt": salt, "hashes": hashes})
    return out


class Indexer:
    """The wheel's standalone indexer in a process of its own."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dynamo.indexer", "--port", str(self._port)],
            stdout=subprocess.DEVNULL,
            env={**os.environ, "DYN_LOG": "error"},
        )
        deadline = time.monotonic() + 60
        while True:
            try:
                self.call("GET", "/health")
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def call(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{self._port}{path}", data, headers, method=method)
        with urllib.request.urlopen(request, timeout=15) as reply:
            return json.loads(reply.read() or b"null")

    def blocks(self, worker: int) -> list[list[Any]]:
        """(tier, block hash, tokens hash) of all that it knows of a worker, sorted."""
        found = []
        for group in self.call("GET", "/dump").values():
            for row in group["events"]:
                if row["worker_id"] == worker:
                    blocks = row["event"]["data"].get("stored", {}).get("blocks", [])
                    found += [[row["storage_tier"], own["block_hash"], own["tokens_hash"]] for own in blocks]
        return sorted(found)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(10)


def settled(read: Callable[[], Any]) -> Any:
    """What ``read`` gives once it has not changed for a while."""
    last, since = read(), time.monotonic()
    while time.monotonic() - since < 0.4:
        time.sleep(0.03)
        if (now := read()) != last:
            last, since = now, time.monotonic()
    return last


def indexer_cases() -> list[dict[str, Any]]:
    import msgspec
    import zmq

    out = []
    indexer = Indexer()
    context = zmq.Context()
    try:
        for worker, (name, batches) in enumerate(CASES.items(), 1):
            with context.socket(zmq.XPUB) as socket_:
                port = socket_.bind_to_random_port("tcp://127.0.0.1")
                body = {"instance_id": worker, "endpoint": f"tcp://127.0.0.1:{port}", "model_name": "m"}
                indexer.call("POST", "/register", body | {"block_size": BLOCK})
                socket_.recv()  # it has subscribed
                steps = []
                for number, events in enumerate(batches):
                    payload = msgspec.msgpack.encode([1.5, events, 0])
                    socket_.send_multipart([b"", struct.pack(">Q", number), payload])
                    known = settled(lambda worker=worker: indexer.blocks(worker))  # type: ignore[misc]
                    steps.append({"events": events, "known": known})
                indexer.call("POST", "/unregister", {"instance_id": worker, "model_name": "m"})
            out.append({"name": name, "steps": steps})
    finally:
        context.destroy(0)
        indexer.close()
    return out


if __name__ == "__main__":
    print('{"wheel": "ai-dynamo-runtime 1.6.1",')
    for part, rows in (("hashes", hash_cases(60)), ("indexer", indexer_cases())):
        print(f'"{part}": [')
        print(",\n".join(json.dumps(row, separators=(",", ":")) for row in rows))
        print("]," if part == "hashes" else "]")
    print("}")
