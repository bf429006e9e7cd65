"""Agentic Mooncake v2: JSON lines, a header and then one node a line."""

from __future__ import annotations

import enum
from pathlib import Path

from g2sim.actors.traffic.graph import MAX_TIME_MS, AgenticCorpus, Edge, Node, Relation, RequestGraph, Trigger
from g2sim.actors.traffic.remarks import Remarks
from g2sim.actors.traffic.trace_json import MAX_TOKENS, U32_MAX, Fields, row_objects
from g2sim.bus.errors import ConfigError

VERSION = 2

_USED = frozenset(
    (
        "request_id",
        "play_id",
        "session_id",
        "model",
        "input_length",
        "input_tokens",
        "output_length",
        "output_tokens",
        "hash_ids",
        "not_before_ms",
        "recorded_api_time_ms",
        "source_play_ordinal",
        "dependencies",
        "output_token_ids",
    )
)


class _Schema(enum.StrEnum):
    V2 = "dynamo.agentic_mooncake"


class _HashScope(enum.StrEnum):
    LOCAL = "local"


def load_agentic_mooncake(path: Path) -> AgenticCorpus:
    """Read one file, line by line. The corpus notes what has no effect.

    Raises: ConfigError on anything malformed.
    """
    remarks = Remarks(path)
    rows = row_objects(path)
    _, header = next(rows, (1, None))
    if header is None:
        raise ConfigError("", problem="the file is empty", allowed="a v2 header and nodes", where=f"{path}:1")
    if not header.given("schema"):
        hint = "rows without a header are a legacy form that is not supported"
        raise header.error("schema", problem="missing", allowed=f"a header with {_Schema.V2.value!r}", hint=hint)
    header.one_of("schema", _Schema)
    version = header.integer("version")
    if version != VERSION:
        raise header.error("version", got=version, allowed=str(VERSION))
    block_size_tokens = header.integer("block_size", low=1)
    header.one_of("hash_id_scope", _HashScope)
    source = header.child("source")
    source_format, source_digest = source.name("format"), source.name("digest")

    nodes: list[Node] = []
    places: list[str] = []
    for line, row in rows:
        remarks.unused(row, _USED, line)
        nodes.append(_node(row, block_size_tokens))
        places.append(row.where)
    if not nodes:
        raise ConfigError("", problem="a header without nodes", allowed="at least one node", where=header.where)
    graph = RequestGraph.build(block_size_tokens, nodes, places.__getitem__)
    return AgenticCorpus(
        graph=graph.normalised(), source_format=source_format, source_digest=source_digest, notes=remarks.notes()
    )


def _node(row: Fields, block_size_tokens: int) -> Node:
    input_tokens = row.integer("input_length", "input_tokens", low=1, high=MAX_TOKENS)
    output_tokens = row.integer("output_length", "output_tokens", high=MAX_TOKENS)
    hash_ids = row.integers("hash_ids")
    blocks = -(-input_tokens // block_size_tokens)
    if len(hash_ids) != blocks:
        allowed = f"{blocks} ids, one for each block of {block_size_tokens} of the {input_tokens} tokens"
        raise row.error("hash_ids", got=len(hash_ids), allowed=allowed)
    output_token_ids = row.integers("output_token_ids", high=U32_MAX) if row.present("output_token_ids") else None
    if output_token_ids is not None and len(output_token_ids) != output_tokens:
        allowed = f"{output_tokens} ids, as output_length says"
        raise row.error("output_token_ids", got=len(output_token_ids), allowed=allowed)
    return Node(
        request_id=row.name("request_id"),
        play_id=row.name("play_id"),
        session_id=row.name("session_id"),
        model=row.name("model"),
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        hash_ids=hash_ids,
        not_before_ms=row.number("not_before_ms", high=MAX_TIME_MS),
        edges=tuple(map(_edge, row.children("dependencies"))) if row.given("dependencies") else (),
        play_ordinal=row.integer("source_play_ordinal") if row.present("source_play_ordinal") else None,
        recorded_api_ms=(
            row.number("recorded_api_time_ms", high=MAX_TIME_MS) if row.present("recorded_api_time_ms") else None
        ),
        output_token_ids=output_token_ids,
        priority=row.integer("priority", low=-(2**31), high=2**31 - 1) if row.present("priority") else 0,
        strict_priority=row.integer("strict_priority", high=U32_MAX) if row.present("strict_priority") else 0,
        policy_class=row.string("policy_class") if row.present("policy_class") else None,
    )


def _edge(fields: Fields) -> Edge:
    trigger = fields.one_of("trigger", Trigger)
    relation = fields.one_of("relation", Relation)
    if trigger is Trigger.DISPATCH and relation is not Relation.SPAWN:
        raise fields.error("trigger", got=trigger.value, allowed=f"completion, as the relation is {relation.value}")
    return Edge(
        source=fields.name("request_id"),
        trigger=trigger,
        delay_ms=fields.number("delay_ms", high=MAX_TIME_MS),
        relation=relation,
    )
