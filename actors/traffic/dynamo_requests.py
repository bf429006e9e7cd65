"""``dynamo`` request traces: records of what a frontend served, either independent or of agents' sessions.

Source: request traces of NVIDIA Dynamo 1.6 (schema ``dynamo.request.trace.v1``); recordings in
tests/oracle/session_formats.json.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import attrs

from g2sim.actors.rounding import round_half_away
from g2sim.actors.traffic.graph import MAX_TIME_MS, AgenticCorpus, Edge, Node, Relation, RequestGraph, Trigger
from g2sim.actors.traffic.remarks import Remarks
from g2sim.actors.traffic.session_table import SessionTable
from g2sim.actors.traffic.sessions import Sessions
from g2sim.actors.traffic.trace_json import MAX_TOKENS, Fields, no_rows, row_objects
from g2sim.bus.errors import ConfigError

SOURCE_FORMAT = "dynamo.request.trace.v1"
_USED = frozenset(("request_id", "model", "output_tokens", "request_received_ms", "total_time_ms", "replay"))
_LAST_MS = int(MAX_TIME_MS)


class _Schema(enum.StrEnum):
    V1 = SOURCE_FORMAT


class _EventType(enum.StrEnum):
    REQUEST_END = "request_end"
    REQUEST_PAYLOAD = "request_payload"
    TOOL_START = "tool_start"
    TOOL_END = "tool_end"
    TOOL_ERROR = "tool_error"


class _ExecutionMode(enum.StrEnum):
    BLOCKING = "blocking"
    BACKGROUND = "background"


@attrs.frozen(kw_only=True, slots=True, eq=False)
class _Request:
    """A served request; times are whole milliseconds of one clock."""

    request_id: str
    model: str
    start_ms: int
    end_ms: int
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]
    session_id: str | None
    parent_session_id: str | None
    where: str


@attrs.frozen(kw_only=True, slots=True)
class _ToolCall:
    """A tool call of ``session_id`` that ran the session ``child_id``."""

    session_id: str
    child_id: str
    source_id: str
    consumer_id: str | None
    where: str

    def refused(self, field: str, got: str, allowed: str) -> ConfigError:
        return ConfigError(f"tool.claude.{field}", got=got, allowed=allowed, where=self.where)


@attrs.frozen(kw_only=True)
class DynamoTrace:
    """What a file holds: independent requests, or a graph of agents' requests.

    Attributes:
        sessions: one of one turn for each independent request, by start; empty if there is a graph.
        corpus: the graph, None if the requests are independent.
    """

    sessions: Sessions
    corpus: AgenticCorpus | None


def load_dynamo_requests(path: Path, *, block_size: int | None = None, remarks: Remarks | None = None) -> DynamoTrace:
    """Read one file, line by line.

    Args:
        block_size: trace block size that every record must have [tokens], None for whatever the first one has.
        remarks: takes note of what was dropped or changed.
    Raises: ConfigError on anything malformed, with file and line.
    """
    requests: dict[str, _Request] = {}
    calls: list[_ToolCall] = []
    tools = 0
    remarks = Remarks(path) if remarks is None else remarks
    for line, row in row_objects(path):
        record = row.child("event") if row.present("event") else row
        event_type = record.one_of("event_type", _EventType)
        if event_type in (_EventType.REQUEST_PAYLOAD, _EventType.TOOL_START):
            remarks.add(f"a record of type {event_type} dropped", line)
            continue
        record.one_of("schema", _Schema)
        if event_type is not _EventType.REQUEST_END:
            tools += 1
            if record.child("tool").present("claude"):
                calls.append(_call(record))
            continue
        block_size, request = _request(record, block_size)
        _remark(record.child("request"), line, remarks)
        first = requests.setdefault(request.request_id, request)
        if first is not request:
            allowed = f"an id used once; it stands at {first.where} too"
            raise record.child("request").error("request_id", got=request.request_id, allowed=allowed)
    if not requests or block_size is None:
        raise no_rows(path)
    ordered = sorted(requests.values(), key=lambda request: (request.start_ms, request.end_ms, request.request_id))
    without = next((request for request in requests.values() if request.session_id is None), None)
    if without is None:
        return DynamoTrace(sessions=(), corpus=_graph(ordered, calls, tools, block_size))
    stray = next((request for request in requests.values() if request.session_id is not None), None)
    if stray is not None:
        problem = f"given, but not at {without.where}"
        raise ConfigError("agent_context", problem=problem, allowed="on every request, or on none", where=stray.where)
    return DynamoTrace(sessions=_independent(ordered, block_size), corpus=None)


def _request(record: Fields, block_size: int | None) -> tuple[int, _Request]:
    event_ms = record.integer("event_time_unix_ms", high=_LAST_MS)
    request = record.child("request")
    replay = request.child("replay")
    own_size = replay.integer("trace_block_size", low=1)
    if own_size != (block_size or own_size):
        raise replay.error("trace_block_size", got=own_size, allowed=f"{block_size}, one size for the whole trace")
    input_tokens = replay.integer("input_length", low=1, high=MAX_TOKENS)
    hash_ids = replay.integers("input_sequence_hashes")
    blocks = -(-input_tokens // own_size)
    if len(hash_ids) < blocks:
        allowed = f"{blocks} of {own_size} tokens each for the {input_tokens} tokens"
        raise replay.error("input_sequence_hashes", got=f"{len(hash_ids)} hashes", allowed=allowed)
    took_ms = request.number("total_time_ms", high=MAX_TIME_MS) if request.present("total_time_ms") else None
    whole_ms = None if took_ms is None else round_half_away(took_ms)
    received = request.present("request_received_ms")
    start_ms = request.integer("request_received_ms", high=_LAST_MS) if received else event_ms - (whole_ms or 0)
    context = record.child("agent_context") if record.present("agent_context") else None
    parent = None
    if context is not None and context.present("parent_session_id"):
        parent = context.name("parent_session_id")
    return own_size, _Request(
        request_id=request.name("request_id"),
        model=request.name("model") if request.present("model") else "unknown",
        start_ms=start_ms,
        end_ms=start_ms + whole_ms if received and whole_ms is not None else event_ms,
        input_tokens=input_tokens,
        output_tokens=request.integer("output_tokens", high=MAX_TOKENS),
        hash_ids=hash_ids,
        session_id=None if context is None else context.name("session_id"),
        parent_session_id=parent,
        where=record.where,
    )


def _remark(request: Fields, line: int, remarks: Remarks) -> None:
    remarks.unused(request, _USED, line)
    if request.present("total_time_ms") and not request.number("total_time_ms").is_integer():
        remarks.add("total_time_ms changed: rounded to whole milliseconds", line)
    if not request.present("request_received_ms"):
        remarks.add("request_received_ms is missing: start taken from the time of the event", line)


def _call(record: Fields) -> _ToolCall:
    claude = record.child("tool").child("claude")
    if claude.present("execution_mode"):
        claude.one_of("execution_mode", _ExecutionMode)
    return _ToolCall(
        session_id=record.child("agent_context").name("session_id"),
        child_id=claude.name("child_session_id"),
        source_id=claude.name("source_request_id"),
        consumer_id=claude.name("consumer_request_id") if claude.present("consumer_request_id") else None,
        where=record.where,
    )


def _independent(requests: Sequence[_Request], block_size_tokens: int) -> Sessions:
    first_ms = requests[0].start_ms
    interned: dict[int, int] = {}
    table = SessionTable(block_size_tokens)
    for number, request in enumerate(requests, start=1):
        table.add_turn(
            table.begin(f"request_{number}", float(request.start_ms - first_ms)),
            [interned.setdefault(hash_id, len(interned)) for hash_id in request.hash_ids],
            prompt_tokens=request.input_tokens,
            output_tokens=request.output_tokens,
        )
    return table.sessions()


def _graph(
    requests: Sequence[_Request], calls: Sequence[_ToolCall], tools: int, block_size_tokens: int
) -> AgenticCorpus:
    edges = _edges(requests, calls)
    play_of = _plays(requests, edges)
    first_ms = requests[0].start_ms
    nodes = []
    for request in requests:
        blocks = -(-request.input_tokens // block_size_tokens)
        if len(request.hash_ids) != blocks:
            allowed = f"{blocks}, one for each block of {block_size_tokens} of the {request.input_tokens} tokens"
            got = f"{len(request.hash_ids)} hashes"
            raise ConfigError("request.replay.input_sequence_hashes", got=got, allowed=allowed, where=request.where)
        own = tuple(edges[request.request_id].values())
        nodes.append(
            Node(
                request_id=request.request_id,
                play_id=play_of[request.request_id],
                session_id=request.session_id or "",
                model=request.model,
                input_tokens=request.input_tokens,
                output_tokens=request.output_tokens,
                hash_ids=request.hash_ids,
                not_before_ms=0.0 if own else float(request.start_ms - first_ms),
                edges=own,
            )
        )
    graph = RequestGraph.build(block_size_tokens, nodes, lambda index: requests[index].where)
    return AgenticCorpus(
        graph=graph.normalised(), source_format=SOURCE_FORMAT, source_digest=f"requests:{len(requests)};tools:{tools}"
    )


_Edges = dict[str, dict[tuple[str, Trigger], Edge]]


def _edges(requests: Sequence[_Request], calls: Sequence[_ToolCall]) -> _Edges:
    """Edges of each request by source and trigger; the first one of a kind counts.

    Sessions are sequences. A child session starts on the dispatch of a request of its parent and joins one: those that
    a tool call names, else the latest that had started, and the earliest that starts after its end.
    """
    edges: _Edges = {request.request_id: {} for request in requests}

    def add(source: _Request, target: _Request, trigger: Trigger, relation: Relation) -> None:
        since_ms = source.start_ms if trigger is Trigger.DISPATCH else source.end_ms
        if target.start_ms < since_ms:
            problem = f"starts {since_ms - target.start_ms} ms too early to follow {source.request_id!r}"
            allowed = f"{since_ms} ms or later ({relation})"
            raise ConfigError("request", problem=problem, got=target.start_ms, allowed=allowed, where=target.where)
        delay_ms = float(target.start_ms - since_ms)
        edge = Edge(source=source.request_id, trigger=trigger, delay_ms=delay_ms, relation=relation)
        edges[target.request_id].setdefault((source.request_id, trigger), edge)

    by_id = {request.request_id: request for request in requests}
    by_session: dict[str, list[_Request]] = {}
    for request in requests:
        by_session.setdefault(request.session_id or "", []).append(request)
    for call in calls:
        _check_call(call, by_id)
    caller_of = {call.child_id: call for call in reversed(calls)}
    for own in by_session.values():
        for before, after in pairwise(own):
            add(before, after, Trigger.COMPLETION, Relation.SEQUENCE)
    for session_id in sorted(by_session):
        child = by_session[session_id]
        parent_id = next((request.parent_session_id for request in child if request.parent_session_id), None)
        if parent_id is None:
            continue
        first = child[0]
        if (parent := by_session.get(parent_id)) is None:
            field, allowed = "agent_context.parent_session_id", "a session that has requests"
            raise ConfigError(field, got=parent_id, allowed=allowed, where=first.where)
        by_end = sorted(child, key=lambda request: (request.end_ms, request.start_ms, request.request_id))
        if (caller := caller_of.get(session_id)) is None:
            started = (request for request in reversed(parent) if request.start_ms <= first.start_ms)
            source = next(started, None)
            target = next((request for request in parent if request.start_ms >= by_end[-1].end_ms), None)
        else:
            source = by_id[caller.source_id]
            target = None if caller.consumer_id is None else by_id[caller.consumer_id]
            if source not in parent:
                allowed = f"a request of {parent_id!r}, the parent of {session_id!r}"
                raise caller.refused("source_request_id", caller.source_id, allowed)
        if source is not None:
            add(source, first, Trigger.DISPATCH, Relation.SPAWN)
        if target is not None:
            ended = [request for request in by_end if request.end_ms <= target.start_ms]
            if ended:
                add(ended[-1], target, Trigger.COMPLETION, Relation.JOIN)
    return edges


def _check_call(call: _ToolCall, by_id: dict[str, _Request]) -> None:
    for field, request_id in (("source_request_id", call.source_id), ("consumer_request_id", call.consumer_id)):
        if request_id is not None and (request_id not in by_id or by_id[request_id].session_id != call.session_id):
            raise call.refused(field, request_id, f"a request of session {call.session_id!r}")


def _plays(requests: Sequence[_Request], edges: _Edges) -> dict[str, str]:
    """Request id -> play id: requests that edges join are one play, named after its earliest root."""
    joined = {request.request_id: request.request_id for request in requests}

    def top(request_id: str) -> str:
        while joined[request_id] != request_id:
            joined[request_id] = request_id = joined[joined[request_id]]
        return request_id

    for target, own in edges.items():
        for source, _ in own:
            joined[top(source)] = top(target)
    names: dict[str, str] = {}
    for request in sorted(requests, key=lambda request: (request.start_ms, request.request_id)):
        if not edges[request.request_id]:
            names.setdefault(top(request.request_id), f"dynamo-play:{request.request_id}")
    return {request.request_id: names.get(top(request.request_id), "") for request in requests}
