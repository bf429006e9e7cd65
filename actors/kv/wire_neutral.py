"""KV events as neutral JSON lines, one event a line in delivery order, and the lines that say more than events can.

Owns: the text, both ways. Refuses to know: files.

``{"worker_id":"w0","dp_rank":0,"event_id":0,"ts_ms":0,"tier":"Device","kind":"Stored","block_hashes":[1,2],
"parent_hash":null,"start_position":0}``. ``tier`` null is the device, and all tiers in a ``Cleared`` event. A block
hash is an integer, hex text, or ``{"bytes": "<hex>"}``. Optional keys: token_hashes, token_ids, block_size, lora_id,
lora_name, extra_keys, group_idx, cache_id, replayed. Lines beyond events: ``"kind": "Joined"`` and ``"Left"``
(worker_id, with or without dp_rank), and ``"Snapshot"`` (worker_id, dp_rank, last_event_id, runs: [{tier,
block_hashes, parent_hash, start_position}]), which replaces what was known of a rank.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from typing import Any, Final

import attrs

from g2sim.actors.kv.wire import (
    CLEARED,
    I64_MIN,
    MAX_HASHES,
    OTHER,
    REMOVED,
    STORED,
    U64_MAX,
    EngineFields,
    Hash,
    StreamEvent,
    WireError,
    check_count,
    check_hash,
    check_optional,
    frozen,
    thawed,
)
from g2sim.bus.errors import shorten

JOINED: Final = "joined"
LEFT: Final = "left"

_KINDS: Final = {"Stored": STORED, "Removed": REMOVED, "Cleared": CLEARED}
_NAMES: Final = {kind: name for name, kind in _KINDS.items()}
_ENGINE: Final = ("token_ids", "block_size", "lora_id", "lora_name", "extra_keys")
_LEAD: Final = frozenset(
    ("worker_id", "dp_rank", "event_id", "ts_ms", "tier", "kind", "block_hashes", "parent_hash", "start_position")
)
_OTHER: Final = frozenset(("worker_id", "dp_rank", "event_id", "ts_ms", "tier", "kind"))
_KNOWN: Final = _LEAD | {*_ENGINE, "token_hashes", "group_idx", "cache_id", "replayed"}
_integers: Final = frozenset((int,))


@attrs.frozen(kw_only=True, slots=True)
class Membership:
    """A worker (or one of its ranks) joined or left. ``kind`` is JOINED or LEFT."""

    kind: str
    worker_id: str | int
    dp_rank: int | None


@attrs.frozen(kw_only=True, slots=True)
class Snapshot:
    """All that a rank holds, as stored runs, up to and including ``last_event_id``."""

    worker_id: str | int
    dp_rank: int
    last_event_id: int
    runs: tuple[StreamEvent, ...]


Line = StreamEvent | Membership | Snapshot


def encode(line: Line) -> str:
    """One line of JSON, without the line end; raises WireError for what the form cannot say."""
    return json.dumps(_value(line), separators=(",", ":"))


def decode(value: Any) -> Line:
    """Line from a parsed JSON object; raises WireError with the place."""
    if type(value) is not dict:
        raise WireError("", f"got {shorten(value)}, allowed: an object")
    get = value.get
    name = get("kind")
    kind = _KINDS.get(name) if type(name) is str else None
    worker = get("worker_id")
    if worker is not None and type(worker) not in (str, int):
        raise WireError("worker_id", f"got {shorten(worker)}, allowed: text or a number")
    if kind is None:
        return _other(value, name, worker)
    event_id, rank, ts_ms, medium = get("event_id"), get("dp_rank"), get("ts_ms"), get("tier")
    if type(event_id) is not int or not 0 <= event_id <= U64_MAX:
        check_count(event_id, "event_id")
    if rank is not None and (type(rank) is not int or not 0 <= rank < 2**32):
        check_count(rank, "dp_rank", limit=2**32 - 1)
    if ts_ms is not None:
        check_optional(ts_ms, (int, float), "ts_ms")
    if medium is not None and type(medium) is not str:
        check_optional(medium, str, "tier")
    # Keys beyond the nine of the form are rare; their absence is seen by counting.
    rest: dict[str, Any] = {} if value.keys() <= _LEAD else _rest(value)
    if kind == CLEARED:
        return StreamEvent(
            kind=kind, worker_id=worker, dp_rank=rank, event_id=event_id, ts_ms=ts_ms, medium=medium, **rest
        )
    hashes = _hashes(get("block_hashes"))
    parent, position = get("parent_hash"), get("start_position")
    if parent is not None and (type(parent) is not int or not 0 <= parent <= U64_MAX):
        parent = _hash(parent, "parent_hash")
    if position is not None and (type(position) is not int or not 0 <= position < 2**32):
        check_count(position, "start_position", limit=2**32 - 1)
    return StreamEvent(
        kind=kind,
        worker_id=worker,
        dp_rank=rank,
        event_id=event_id,
        ts_ms=ts_ms,
        medium=medium,
        hashes=hashes,
        parent=parent,
        position=position,
        root=kind == STORED and parent is None and position == 0,
        **rest,
    )


def _hashes(value: Any) -> tuple[Hash, ...]:
    if type(value) is not list or len(value) > MAX_HASHES:
        raise WireError("block_hashes", f"got {shorten(value)}, allowed: an array of at most {MAX_HASHES} hashes")
    if _integers.issuperset(map(type, value)) and (not value or (min(value) >= I64_MIN and max(value) <= U64_MAX)):
        return tuple(value)
    return tuple(_hash(item, f"block_hashes[{idx}]") for idx, item in enumerate(value))


def _hash(value: Any, place: str) -> Hash:
    if type(value) is dict and value.keys() == {"bytes"} and type(value["bytes"]) is str:
        try:
            return check_hash(bytes.fromhex(value["bytes"]), place)
        except ValueError:
            raise WireError(place, f"got {shorten(value)}, allowed: bytes as hex text") from None
    return check_hash(value, place)


def _rest(value: dict[str, Any]) -> dict[str, Any]:
    """Fields of the event that come from optional keys."""
    out: dict[str, Any] = {}
    get = value.get
    tokens_hashes = get("token_hashes")
    if tokens_hashes is not None:
        if type(tokens_hashes) is not list or len(tokens_hashes) > MAX_HASHES:
            raise WireError("token_hashes", f"got {shorten(tokens_hashes)}, allowed: an array of integers")
        out["tokens_hashes"] = tuple(
            check_count(item, f"token_hashes[{idx}]") for idx, item in enumerate(tokens_hashes)
        )
    out["group_idx"] = check_optional(get("group_idx"), int, "group_idx")
    out["cache_id"] = check_optional(get("cache_id"), str, "cache_id")
    out["replayed"] = bool(check_optional(get("replayed"), bool, "replayed"))
    if any(key in value for key in _ENGINE):
        tokens = get("token_ids")
        tokens = [] if tokens is None else tokens
        extra = get("extra_keys")
        if type(tokens) is not list or type(extra) not in (list, type(None)):
            raise WireError("token_ids", "allowed: token_ids and extra_keys as arrays")
        out["engine"] = EngineFields(
            token_ids=array(
                "I", [check_count(item, f"token_ids[{i}]", limit=2**32 - 1) for i, item in enumerate(tokens)]
            ),
            block_size=None if get("block_size") is None else check_count(get("block_size"), "block_size", limit=2**31),
            lora_id=check_optional(get("lora_id"), int, "lora_id"),
            lora_name=check_optional(get("lora_name"), str, "lora_name"),
            extra_keys=None if extra is None else frozen(extra, "extra_keys"),
        )
    out["more"] = tuple((key, frozen(item, key[:40])) for key, item in value.items() if key not in _KNOWN)
    return out


def _other(value: dict[str, Any], name: Any, worker: Any) -> Line:
    if type(name) is not str or not name or len(name) > 128:
        raise WireError("kind", f"got {shorten(name)}, allowed: Stored, Removed, Cleared, Joined, Left or Snapshot")
    rank = value.get("dp_rank")
    if rank is not None:
        check_count(rank, "dp_rank", limit=2**32 - 1)
    if name in ("Joined", "Left", "Snapshot"):
        if worker is None:
            raise WireError("worker_id", f"a {name} line needs one")
        if name != "Snapshot":
            return Membership(kind=name.lower(), worker_id=worker, dp_rank=rank)
        return _snapshot(value, worker, 0 if rank is None else rank)
    more = tuple((key, frozen(item, key[:40])) for key, item in value.items() if key not in _OTHER)
    event_id = value.get("event_id")
    return StreamEvent(
        kind=OTHER,
        tag=name,
        worker_id=worker,
        dp_rank=rank,
        event_id=None if event_id is None else check_count(event_id, "event_id"),
        ts_ms=check_optional(value.get("ts_ms"), (int, float), "ts_ms"),
        medium=check_optional(value.get("tier"), str, "tier"),
        more=more,
    )


def _snapshot(value: dict[str, Any], worker: str | int, rank: int) -> Snapshot:
    runs = value.get("runs")
    if type(runs) is not list or len(runs) > MAX_HASHES:
        raise WireError("runs", f"got {shorten(runs)}, allowed: an array of runs")
    last = check_count(value.get("last_event_id"), "last_event_id")
    made = []
    for idx, run in enumerate(runs):
        if type(run) is not dict:
            raise WireError(f"runs[{idx}]", f"got {shorten(run)}, allowed: an object")
        whole = {**run, "kind": "Stored", "worker_id": worker, "dp_rank": rank, "event_id": last, "replayed": True}
        try:
            event = decode(whole)
        except WireError as error:
            raise error.inside(f"runs[{idx}]") from None
        made.append(event)
    return Snapshot(worker_id=worker, dp_rank=rank, last_event_id=last, runs=tuple(made))  # type: ignore[arg-type]


def _hash_value(value: Hash | None) -> Any:
    return {"bytes": value.hex()} if isinstance(value, bytes) else value


def _run_value(event: StreamEvent) -> dict[str, Any]:
    return {
        "tier": event.medium,
        "block_hashes": [_hash_value(item) for item in event.hashes],
        "parent_hash": _hash_value(event.parent),
        "start_position": event.position,
    }


def _value(line: Line) -> dict[str, Any]:
    if isinstance(line, Membership):
        rank = {} if line.dp_rank is None else {"dp_rank": line.dp_rank}
        return {"worker_id": line.worker_id, **rank, "kind": line.kind.capitalize()}
    if isinstance(line, Snapshot):
        return {
            "worker_id": line.worker_id,
            "dp_rank": line.dp_rank,
            "kind": "Snapshot",
            "last_event_id": line.last_event_id,
            "runs": [_run_value(run) | _optional(run, replayed=False) for run in line.runs],
        }
    lead: dict[str, Any] = {"worker_id": line.worker_id, "dp_rank": line.dp_rank, "event_id": line.event_id}
    lead |= {"ts_ms": line.ts_ms, "tier": line.medium}
    if line.kind == OTHER:
        if line.tag is None:
            raise WireError("kind", "an event of another kind needs its tag")
        return lead | {"kind": line.tag} | {key: thawed(item) for key, item in line.more}
    lead["kind"] = _NAMES[line.kind]
    if line.kind != CLEARED:
        lead["block_hashes"] = [_hash_value(item) for item in line.hashes]
    if line.kind == STORED or (line.parent, line.position) != (None, None):
        lead |= {"parent_hash": _hash_value(line.parent), "start_position": line.position}
    return lead | _optional(line, replayed=line.replayed)


def _optional(event: StreamEvent, *, replayed: bool) -> dict[str, Any]:
    out: dict[str, Any] = {}
    if event.tokens_hashes:
        out["token_hashes"] = list(event.tokens_hashes)
    if event.engine is not None:
        engine = event.engine
        shown: dict[str, Callable[[], Any]] = {
            "token_ids": lambda: list(engine.token_ids),
            "block_size": lambda: engine.block_size,
            "lora_id": lambda: engine.lora_id,
            "lora_name": lambda: engine.lora_name,
            "extra_keys": lambda: None if engine.extra_keys is None else thawed(engine.extra_keys),
        }
        out |= {key: value for key, make in shown.items() if (value := make()) is not None}
    for key in ("group_idx", "cache_id"):
        if getattr(event, key) is not None:
            out[key] = getattr(event, key)
    if replayed:
        out["replayed"] = True
    return out | {key: thawed(item) for key, item in event.more}
