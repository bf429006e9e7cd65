"""Blocks of adapters, cache salts and multimodal objects have the hashes that the reference gives them (recordings)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgpack
import pytest

from g2sim.actors.kv.blocks import multimodal_hash, namespace_seed, tokens_hashes
from g2sim.actors.kv.wire import DEVICE, HOST
from g2sim.actors.kv.wire_vllm import decode_batch
from g2sim.scenarios.validate import BatchArrived, Mode, Options, Source, Validator

RECORDED = json.loads((Path(__file__).parents[1] / "oracle/salted_hashes.json").read_text())


def test_hashes_are_those_of_the_reference() -> None:
    seen = set()
    for case in RECORDED["hashes"]:
        seed, size = namespace_seed(case["lora_name"], case["cache_salt"]), case["block_size"]
        tokens = case["token_ids"][: len(case["hashes"]) * size]
        made = tokens_hashes(tokens, size, seed)
        for idx, objects in enumerate(case["mm_hashes"] or ()):
            if objects:
                made[idx] = multimodal_hash(tokens[idx * size : (idx + 1) * size], objects, seed)
                seen.add("multimodal")
        assert made == case["hashes"]
        seen |= {key for key in ("lora_name", "cache_salt") if made and case[key]}
    assert seen == {"multimodal", "lora_name", "cache_salt"}


def known(validator: Validator) -> list[list[Any]]:
    """(tier, block hash, tokens hash) of what the view has stored: what is in the index under its handle."""
    view = validator.dynamo
    assert view is not None
    rank = view._ranks["w0", 0]
    device = [
        [DEVICE, own, run.tokens_hashes[run.block_hashes.index(own)]]
        for own, run in view.device._handles[rank.place].items()
    ]
    host = [[HOST, edge.child, edge.key[1]] for edge in view.host._edges.values() if edge.places >> rank.place & 1]
    return sorted(device + host)


# The reference's tree keeps a node for each content of one handle; ours, as documented, one handle a block hash.
TWO_CONTENTS = {"two salts", "two salts, in one batch", "two salts, the block goes", "two salts, the block goes twice"}
TWO_CONTENTS |= {"two salts before a clear", "salted and plain", "plain and salted"}


@pytest.mark.parametrize("case", RECORDED["indexer"], ids=lambda case: case["name"])
def test_the_view_knows_what_the_indexer_knows(case: dict[str, Any]) -> None:
    validator = Validator(Options(mode=Mode.DYNAMO))
    validator.begin(Source("recorded", "vllm", "message"))
    for number, step in enumerate(case["steps"]):
        batch = decode_batch(msgpack.packb([1.5, step["events"], 0]), event_id=number)
        validator.feed(number, BatchArrived("w0", 0, number, batch.events, False))
        followed = [row for row in step["known"] if row[0] in (DEVICE, HOST)]
        if case["name"] in TWO_CONTENTS:
            assert {row[1] for row in known(validator)} <= {row[1] for row in followed}
            rows = [row for row in followed if row[1] != 1]
            assert [row for row in known(validator) if row[1] != 1] == rows
        else:
            assert known(validator) == followed
