"""What an event stream says of KV blocks, whatever form it came in.

Owns: the neutral event value that every wire form is decoded to and encoded from, the tables that say which spelling
of a medium is which tier, and the rule by which block hashes are equal. Refuses to know: bytes, sockets, files, and
whether a stream is right.

The value is lossless: it keeps the spelling of the medium, the kind of each hash, and whatever a form says beyond the
common fields. Nothing unknown is guessed at; it is kept by its spelling, and whoever reads the stream sets it aside.
"""

from __future__ import annotations

import math
import re
from array import array
from typing import Any, Final

import msgspec

from g2sim.bus.errors import SimError, shorten

Hash = int | bytes | str
"""A block hash as written: an integer of -2**63 .. 2**64-1, a byte string, or hex text."""

HASH_RULE: Final = (
    "hashes are equal when they are of one kind (integer, bytes, hex text) and have one value; a negative integer is "
    "the unsigned one with the same 64 bits, hex text is compared in lower case without 0x; kinds are never equal"
)

HASH_KINDS: Final[dict[type, str]] = {int: "integer", bytes: "bytes", str: "hex text"}

STORED: Final = "stored"
REMOVED: Final = "removed"
CLEARED: Final = "cleared"
OTHER: Final = "other"

DEVICE: Final = "device"
HOST: Final = "host_pinned"
DISK: Final = "disk"
EXTERNAL: Final = "external"

MODELLED_TIERS: Final = (DEVICE, HOST)

VLLM_MEDIA: Final[dict[str | None, str]] = {
    None: DEVICE,
    "": DEVICE,
    "GPU": DEVICE,
    "DEVICE": DEVICE,
    "CPU": HOST,
    "CPU_PINNED": HOST,
    "CPU_TIER1": HOST,
    "CPU_TIER2": DISK,
    "DISK": DISK,
    "STORAGE": DISK,
    "NVME": DISK,
    "EXTERNAL": EXTERNAL,
    "REMOTE": EXTERNAL,
}
"""Medium of a vLLM event -> tier, as Dynamo 1.6.1 reads it. Case matters."""

DYNAMO_TIERS: Final[dict[str | None, str]] = {None: DEVICE, **{tier: tier for tier in (DEVICE, HOST, DISK, EXTERNAL)}}
"""``storage_tier`` of a Dynamo event -> tier."""

NEUTRAL_TIERS: Final[dict[str | None, str]] = VLLM_MEDIA | {
    "Device": DEVICE,
    "HostPinned": HOST,
    "device": DEVICE,
    "host_pinned": HOST,
}
"""``tier`` of a neutral line -> tier: its own two names, those of the event log, and vLLM's media."""

TIERS: Final = {"vllm": VLLM_MEDIA, "dynamo": DYNAMO_TIERS, "neutral": NEUTRAL_TIERS, "log": NEUTRAL_TIERS}
"""Form -> its table. A spelling that is not in it is set aside."""

U64_MAX: Final = 2**64 - 1
I64_MIN: Final = -(2**63)
MAX_HASHES: Final = 1_000_000
"""Most block hashes in one event, and most events in one batch."""
MAX_HASH_BYTES: Final = 128

_MASK: Final = U64_MAX
_HEX: Final = re.compile(r"(0[xX])?[0-9a-fA-F]+\Z").match


class WireError(SimError):
    """Bytes or text are not what a wire form allows.

    Args:
        place: where inside the message, as ``events[3].block_hashes``; "" for the whole.
        problem: what is wrong there, with the value.
    """

    exit_code = 2

    def __init__(self, place: str, problem: str) -> None:
        self.place = place
        self.problem = problem
        super().__init__(f"{place}: {problem}" if place else problem)

    def inside(self, outer: str) -> WireError:
        """The same error with an outer place in front."""
        return WireError(f"{outer}.{self.place}" if self.place else outer, self.problem)


NO_TOKENS: Final = array("I")


# The values of this module are made by the million: a msgspec struct takes a fifth of the time that an attrs class
# does, and without gc the collector need not look at it. No value holds itself.
class EngineFields(msgspec.Struct, kw_only=True, frozen=True, gc=False):
    """What only an engine says of a stored run: its tokens, and what else is part of a block's identity.

    Attributes:
        token_ids: tokens of all listed blocks, one after the other, as unsigned integers of 32 bits; never changed.
        block_size: tokens per block; 0 in placeholders of vLLM's offloading connector.
        lora_id, lora_name: adapter.
        extra_keys: per block, cache salt, multimodal hashes and the like, as plain values.
        spec_kind, sliding_window: kind of attention of the block's group.
        locality: "LOCAL", "REMOTE" or None; storage tiers only.
    """

    token_ids: array[int] = msgspec.field(default_factory=lambda: NO_TOKENS)
    block_size: int | None = None
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: tuple[Any, ...] | None = None
    spec_kind: str | None = None
    sliding_window: int | None = None
    locality: str | None = None


class StreamEvent(msgspec.Struct, kw_only=True, frozen=True, gc=False):
    """One KV event as its form says it.

    Attributes:
        kind: STORED, REMOVED, CLEARED, or OTHER for a tag that is not known; ``tag`` then has its spelling.
        worker_id: the publisher, as text or number; None when the form does not say (vLLM: the socket does).
        dp_rank: data-parallel rank, None when not said.
        event_id: number of the event, or of its batch (vLLM); None when not said.
        ts_ms: time stamp [ms], None when not said.
        medium: spelling of the tier, None when not said.
        hashes: block hashes in the order listed.
        parent: hash of the block before the run; None for "none" and for "not said", which ``root`` tells apart.
        position: place of the first block in its sequence, in blocks; None when not said.
        root: the form says that the run begins a sequence.
        tokens_hashes: tokens hash per block; empty when not said.
        group_idx: KV cache group of hybrid models.
        cache_id: namespace of the play the blocks belong to; g2sim's own.
        replayed: the event came by a replay or a snapshot, not live.
        engine: what only engines say, None when nothing.
        more: fields beyond these, by name, as plain values; part of the value, so nothing is lost.
    """

    kind: str
    worker_id: str | int | None = None
    dp_rank: int | None = None
    event_id: int | None = None
    ts_ms: int | float | None = None
    medium: str | None = None
    hashes: tuple[Hash, ...] = ()
    parent: Hash | None = None
    position: int | None = None
    root: bool = False
    tokens_hashes: tuple[int, ...] = ()
    group_idx: int | None = None
    cache_id: str | None = None
    replayed: bool = False
    engine: EngineFields | None = None
    tag: str | None = None
    more: tuple[tuple[str, Any], ...] = ()


def tier_of(form: str, medium: str | None) -> str | None:
    """Tier that a medium's spelling means in a form, None when the form's table does not have it."""
    return TIERS[form].get(medium)


def tier_table() -> list[tuple[str, str, str]]:
    """The mapping as rows (form, spelling, tier), for printing."""
    return [
        (
            form,
            "(none)" if spelling is None else repr(spelling),
            tier + ("" if tier in MODELLED_TIERS else ", set aside"),
        )
        for form, table in TIERS.items()
        if form != "log"
        for spelling, tier in table.items()
    ]


def hash_keys(hashes: tuple[Hash, ...]) -> tuple[Hash, ...]:
    """Hashes as keys that are equal exactly when ``HASH_RULE`` says so; the same tuple for integers of 0 and above."""
    try:
        if min(hashes) >= 0:  # type: ignore[operator]
            return hashes
    except (TypeError, ValueError):  # not all integers, or none at all
        pass
    return tuple(map(hash_key, hashes))


def hash_key(value: Hash) -> Hash:
    """One hash as a key, see ``hash_keys``."""
    if isinstance(value, int):
        return value if value >= 0 else value & _MASK
    if isinstance(value, str):
        return value.lower().removeprefix("0x")
    return value


def check_hash(value: Any, place: str) -> Hash:
    """``value`` if it can be a block hash; raises WireError."""
    kind = type(value)
    if kind is int:
        if I64_MIN <= value <= U64_MAX:
            return value  # type: ignore[no-any-return]
    elif kind is bytes:
        if 1 <= len(value) <= MAX_HASH_BYTES:
            return value  # type: ignore[no-any-return]
    elif kind is str and len(value) <= 2 * MAX_HASH_BYTES + 2 and _HEX(value):
        return value  # type: ignore[no-any-return]
    raise WireError(place, f"got {shorten(value)}, allowed: a 64-bit integer, bytes or hex text")


def check_count(value: Any, place: str, *, limit: int = U64_MAX) -> int:
    """``value`` if it is an integer of 0 .. limit; raises WireError."""
    if type(value) is not int or not 0 <= value <= limit:
        raise WireError(place, f"got {shorten(value)}, allowed: an integer from 0 to {limit}")
    return value


def check_optional(value: Any, kind: type | tuple[type, ...], place: str) -> Any:
    """``value`` if it is None or of exactly one of the types; raises WireError."""
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if value is None or type(value) in kinds:
        if type(value) is float and not math.isfinite(value):
            raise WireError(place, f"got {value!r}, allowed: a finite number")
        return value
    raise WireError(place, f"got {shorten(value)}, allowed: {' or '.join(k.__name__ for k in kinds)}, or nothing")


def frozen(value: Any, place: str, depth: int = 0) -> Any:
    """A plain value with its lists as tuples and its maps as ``FrozenMap``; raises WireError for what is not plain."""
    if value is None or isinstance(value, bool | int | str | bytes):
        return value
    if isinstance(value, float):
        return check_optional(value, float, place)
    if depth > 16:
        raise WireError(place, "nested deeper than 16 levels")
    if isinstance(value, list | tuple):
        return tuple(frozen(item, place, depth + 1) for item in value)
    if isinstance(value, dict) and all(type(key) is str for key in value):
        return FrozenMap(tuple((key, frozen(item, place, depth + 1)) for key, item in value.items()))
    raise WireError(place, f"got a {type(value).__qualname__}, which no form carries")


class FrozenMap(msgspec.Struct, frozen=True):
    """A map inside a frozen value, in the order written."""

    items: tuple[tuple[str, Any], ...]


def thawed(value: Any) -> Any:
    """The value that ``frozen`` was given, with lists for arrays."""
    if isinstance(value, tuple):
        return [thawed(item) for item in value]
    if isinstance(value, FrozenMap):
        return {key: thawed(item) for key, item in value.items}
    return value
