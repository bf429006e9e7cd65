"""KV events in Dynamo's normal form: one router event as JSON, as its indexers dump and apply it.

Owns: the text, both ways. Refuses to know: files.
``{"worker_id", "storage_tier", "residency_domain", "event": {"event_id", "dp_rank", "data"}}``, where data is
``{"stored": {parent_hash, start_position, blocks: [{block_hash, tokens_hash, mm_extra_info}]}}``,
``{"removed": {"block_hashes": [...]}}`` or ``"cleared"``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, UnsetType

from g2sim.actors.kv.wire import (
    CLEARED,
    MAX_HASHES,
    REMOVED,
    STORED,
    U64_MAX,
    StreamEvent,
    WireError,
    check_count,
    check_optional,
    frozen,
    thawed,
)
from g2sim.bus.errors import shorten

_OUTER: Final = frozenset(("worker_id", "storage_tier", "event"))
_INNER: Final = frozenset(("event_id", "dp_rank", "data"))
_INTEGERS: Final = frozenset((int,))
_OBJECTS: Final = frozenset((dict,))


# -- what a line usually is, for the quick way of reading: a part of what ``decode`` allows, and nothing else

_Count = Annotated[int, msgspec.Meta(ge=0)]  # a bound of 2**64 - 1 cannot be said here
_Count32 = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]


class _Part(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    pass


class _Block(_Part):
    block_hash: _Count
    tokens_hash: _Count
    mm_extra_info: None = None


class _Stored(_Part):
    blocks: Annotated[tuple[_Block, ...], msgspec.Meta(max_length=MAX_HASHES)]
    parent_hash: _Count | None = None
    start_position: _Count32 | None = None


class _Removed(_Part):
    block_hashes: Annotated[tuple[_Count, ...], msgspec.Meta(max_length=MAX_HASHES)]


class _Data(_Part):
    stored: _Stored | UnsetType = UNSET
    removed: _Removed | UnsetType = UNSET


class _Event(_Part):
    event_id: _Count
    data: _Data
    dp_rank: _Count32 | None = None


class _Line(_Part):
    event: _Event
    worker_id: _Count | None = None
    storage_tier: str | None = None
    residency_domain: str | UnsetType = UNSET


_read: Final = msgspec.json.Decoder(_Line).decode


def encode(event: StreamEvent) -> str:
    """One line of JSON, without the line end; raises WireError for what the form cannot say."""
    outer, inner, mm = {}, {}, None
    for key, value in event.more:
        if key == "mm_extra_info":
            mm = value
        elif key.startswith("event."):
            inner[key[6:]] = thawed(value)
        else:
            outer[key] = thawed(value)
    if type(event.worker_id) is not int:
        raise WireError("worker_id", f"got {shorten(event.worker_id)}, allowed: a number")
    if any(type(item) is not int for item in event.hashes) or type(event.parent) not in (int, type(None)):
        raise WireError("block_hash", "Dynamo's form has integer hashes only")
    data: Any
    if event.kind == STORED:
        if len(event.tokens_hashes) != len(event.hashes):
            raise WireError("tokens_hash", f"{len(event.tokens_hashes)} for {len(event.hashes)} blocks")
        infos = (None,) * len(event.hashes) if mm is None else mm
        blocks = [
            {"block_hash": block, "tokens_hash": tokens, "mm_extra_info": thawed(info)}
            for block, tokens, info in zip(event.hashes, event.tokens_hashes, infos, strict=True)
        ]
        data = {"stored": {"parent_hash": event.parent, "start_position": event.position, "blocks": blocks}}
    elif event.kind == REMOVED:
        data = {"removed": {"block_hashes": list(event.hashes)}}
    elif event.kind == CLEARED:
        data = "cleared"
    else:
        raise WireError("data", f"Dynamo's form has no {event.tag or event.kind!r}")
    lead = {"worker_id": event.worker_id, "storage_tier": event.medium}
    return json.dumps(
        {**lead, **outer, "event": {"event_id": event.event_id, "dp_rank": event.dp_rank, "data": data, **inner}}
    )


def decode_quickly(line: bytes) -> StreamEvent | None:
    """Event from a line that stores or removes blocks and says nothing unusual; None for all others, good or bad."""
    try:
        outer = _read(line)
    except (msgspec.MsgspecError, RecursionError):
        return None
    inner = outer.event
    worker, event_id, stored, removed = outer.worker_id, inner.event_id, inner.data.stored, inner.data.removed
    own: tuple[int, ...] = ()
    parent = position = None
    if stored is not UNSET and removed is UNSET:
        kind, parent, position = STORED, stored.parent_hash, stored.start_position
        hashes = tuple([block.block_hash for block in stored.blocks])
        own = tuple([block.tokens_hash for block in stored.blocks])
    elif removed is not UNSET and stored is UNSET:
        kind, hashes = REMOVED, removed.block_hashes
    else:
        return None
    if max(worker or 0, event_id, parent or 0, *hashes, *own) > U64_MAX:
        return None
    return StreamEvent(
        kind=kind,
        worker_id=worker,
        medium=outer.storage_tier,
        event_id=event_id,
        dp_rank=inner.dp_rank or 0,
        hashes=hashes,
        tokens_hashes=own,
        parent=parent,
        position=position,
        root=parent is None and kind == STORED,
        more=() if outer.residency_domain is UNSET else (("residency_domain", outer.residency_domain),),
    )


def decode(value: Any) -> StreamEvent:
    """Event from a parsed line; raises WireError with the place."""
    if type(value) is not dict:
        raise WireError("", f"got {shorten(value)}, allowed: an object")
    inner = value.get("event")
    if type(inner) is not dict:
        raise WireError("event", f"got {shorten(inner)}, allowed: an object")
    more = [(key, frozen(item, key[:40])) for key, item in value.items() if key not in _OUTER]
    if not inner.keys() <= _INNER:
        more += [(f"event.{key}", frozen(inner[key], f"event.{key[:40]}")) for key in inner if key not in _INNER]
    worker = value.get("worker_id")
    if worker is not None:
        check_count(worker, "worker_id")
    rank = inner.get("dp_rank", 0)
    common: dict[str, Any] = {
        "worker_id": worker,
        "medium": check_optional(value.get("storage_tier"), str, "storage_tier"),
        "event_id": check_count(inner.get("event_id"), "event.event_id"),
        "dp_rank": check_count(0 if rank is None else rank, "event.dp_rank", limit=2**32 - 1),
    }
    data = inner.get("data")
    if data == "cleared" or (type(data) is dict and data == {"cleared": None}):
        return StreamEvent(kind=CLEARED, more=tuple(more), **common)
    if type(data) is not dict or len(data) != 1 or type(body := next(iter(data.values()))) is not dict:
        raise WireError("event.data", f"got {shorten(data)}, allowed: stored, removed or cleared")
    if "removed" in data:
        hashes = _array(body.get("block_hashes"), "event.data.removed.block_hashes")
        if not _are_counts(hashes):
            for idx, item in enumerate(hashes):
                check_count(item, f"event.data.removed.block_hashes[{idx}]")
        return StreamEvent(kind=REMOVED, hashes=tuple(hashes), more=tuple(more), **common)
    if "stored" not in data:
        raise WireError("event.data", f"got {shorten(data)}, allowed: stored, removed or cleared")
    place = "event.data.stored"
    blocks = _array(body.get("blocks"), f"{place}.blocks")
    made, tokens, infos = _columns(blocks, f"{place}.blocks")
    if infos is not None:
        more.append(("mm_extra_info", infos))
    parent, position = body.get("parent_hash"), body.get("start_position")
    return StreamEvent(
        kind=STORED,
        hashes=made,
        tokens_hashes=tokens,
        parent=None if parent is None else check_count(parent, f"{place}.parent_hash"),
        position=None if position is None else check_count(position, f"{place}.start_position", limit=2**32 - 1),
        root=parent is None,
        more=tuple(more),
        **common,
    )


def _columns(blocks: list[Any], place: str) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Any, ...] | None]:
    """Hashes, tokens hashes and multimodal information of a stored run's blocks; None if no block has the last."""
    if set(map(type, blocks)) <= _OBJECTS:
        made = tuple([block.get("block_hash") for block in blocks])
        tokens = tuple([block.get("tokens_hash") for block in blocks])
        bare = [block.get("mm_extra_info") for block in blocks].count(None) == len(blocks)
        if bare and _are_counts(made) and _are_counts(tokens):
            return made, tokens, None
    infos: list[Any] = []
    for idx, block in enumerate(blocks):
        if type(block) is not dict:
            raise WireError(f"{place}[{idx}]", f"got {shorten(block)}, allowed: an object")
        check_count(block.get("block_hash"), f"{place}[{idx}].block_hash")
        check_count(block.get("tokens_hash"), f"{place}[{idx}].tokens_hash")
        infos.append(frozen(block.get("mm_extra_info"), f"{place}[{idx}].mm_extra_info"))
    return made, tokens, tuple(infos)


def _are_counts(values: Sequence[Any]) -> bool:
    """Whether all are integers of 0 .. 2**64 - 1."""
    return not values or (_INTEGERS.issuperset(map(type, values)) and min(values) >= 0 and max(values) <= U64_MAX)


def _array(value: Any, place: str) -> list[Any]:
    if type(value) is not list or len(value) > MAX_HASHES:
        raise WireError(place, f"got {shorten(value)}, allowed: an array of at most {MAX_HASHES}")
    return value
