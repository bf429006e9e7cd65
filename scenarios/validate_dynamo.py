"""What the index of NVIDIA Dynamo 1.6.1 would know from a stream, and where that is less than what is true.

Owns: Dynamo's way with batch numbers, its filters before the index, and the findings where something gets lost. The
index itself is the router's. Refuses to know: true residency.

Everything here happens in the order of delivery: Dynamo drops a number at or below the last one, and skips a gap. A
stream without tokens and tokens hashes (neutral lines may have neither) is indexed by its block hashes instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs

from g2sim.actors.kv.blocks import multimodal_hash, namespace_seed, tokens_hashes
from g2sim.actors.kv.wire import (
    CLEARED,
    DEVICE,
    HOST,
    OTHER,
    STORED,
    TIERS,
    U64_MAX,
    Hash,
    StreamEvent,
    hash_key,
    hash_keys,
    thawed,
)
from g2sim.actors.router.index import DeviceIndex, HostIndex, bits
from g2sim.bus.errors import shorten
from g2sim.scenarios.validate_state import Place, show

MAX_RANKS: Final = 256
SALT_MEMORY: Final = 1_000_000
"""Most salted blocks of a rank that are remembered."""
RankKey = tuple[str | int, int]

Say = Callable[[str, Place, RankKey | None, StreamEvent | None, str], None]
"""Takes code, place, rank, event and problem."""

_FULL: Final = frozenset((None, "full_attention", "mla_attention", "sink_full_attention"))


@attrs.frozen(kw_only=True)
class Known:
    """What the index knows of one tier of a rank, in blocks.

    Attributes:
        blocks: blocks it believes to be there.
        missing: resident blocks that it does not know. ``stale``: blocks it knows that are not resident.
    """

    blocks: int
    missing: int
    stale: int

    def text(self) -> str:
        differ = [f"{count} {name}" for name, count in (("missing", self.missing), ("stale", self.stale)) if count]
        return f"{self.blocks} ({', '.join(differ)})" if differ else str(self.blocks)


class _Rank:
    """``place`` in the index; ``last``: number of the last batch; ``kinds``: group -> attention, told by stores.

    ``salts``: cache salt of the blocks that have one, for children that do not say theirs; None if it had two, which
    only a clear forgets. Emptied when it is full.
    """

    __slots__ = ("kinds", "last", "place", "salts")

    def __init__(self, place: int) -> None:
        self.place = place
        self.last = -1
        self.kinds: dict[int, str] = {}
        self.salts: dict[Hash, str | None] = {}

    def salt_of(self, event: StreamEvent, hashes: tuple[Hash, ...]) -> str | None:
        """Cache salt of a stored run, "" for none; None if it should be its parent's, which had two."""
        salt: str | None = _own_salt(event) or ""
        salts = self.salts
        if not salt and salts and event.parent is not None:
            salt = salts.get(hash_key(event.parent), "")
        if salt:
            if len(salts) > SALT_MEMORY:
                salts.clear()
            for hash_ in hashes:
                if salts.setdefault(hash_, salt) != salt:
                    salts[hash_] = None
        elif salt is not None and salts:
            salts.update(dict.fromkeys(salts.keys() & hashes))
        return salt

    def forget_salts(self, hashes: tuple[Hash, ...]) -> None:
        """Blocks were removed, from whichever tier."""
        if self.salts:
            for hash_ in hashes:
                if self.salts.get(hash_) is not None:
                    del self.salts[hash_]


class DynamoView:
    """Dynamo's index over all ranks of a stream.

    Args:
        say: takes findings.
    """

    def __init__(self, say: Say) -> None:
        self.device = DeviceIndex(MAX_RANKS)
        self.host = HostIndex(MAX_RANKS)
        self._say = say
        self._ranks: dict[RankKey, _Rank] = {}
        self._refused: set[RankKey] = set()

    def deliver(self, where: Place, key: RankKey, number: int, events: Sequence[StreamEvent], form: str) -> None:
        """Take one batch, or event, as Dynamo would."""
        rank = self._rank(where, key)
        if rank is None:
            return
        first = events[0] if events else None
        if form != "dynamo":  # those events have passed the numbering and the reading already
            if number <= rank.last:
                self._say("KV951", where, key, first, f"number {number} is not above {rank.last}: ignored as stale")
                return
            for event in events:
                problem = _poison(event)
                if problem is not None:
                    self._say("KV951", where, key, event, f"{problem}: the whole batch is dropped")
                    return
        rank.last = number
        for event in events:
            self._apply(where, key, rank, event, form)

    def forget(self, key: RankKey) -> None:
        """The worker was unregistered."""
        rank = self._ranks.get(key)
        if rank is not None:
            self._clear(rank)
            rank.last = -1
            rank.kinds.clear()

    def restore(self, where: Place, key: RankKey, runs: Sequence[StreamEvent], last: int, form: str) -> None:
        """A snapshot replaces the rank."""
        rank = self._rank(where, key)
        if rank is not None:
            self._clear(rank)
            for run in runs:
                self._apply(where, key, rank, run, form)
            rank.last = last

    def known(self, key: RankKey, resident: Callable[[str], set[Hash]]) -> dict[str, Known]:
        """What the index knows of a rank, by tier, against what is ``resident`` there."""
        rank = self._ranks.get(key)
        out = {}
        for tier, index in ((DEVICE, self.device), (HOST, self.host)):
            have = set() if rank is None else set(index.hashes(rank.place))
            true = resident(tier)
            out[tier] = Known(blocks=len(have), missing=len(true - have), stale=len(have - true))
        return out

    def overlap(self, tokens_hashes: Sequence[int]) -> dict[RankKey, tuple[int, int]]:
        """(device, device and host) leading blocks of a prompt on each rank."""
        fronts = self.device.fronts(tokens_hashes)
        gained = [0] * MAX_RANKS
        self.host.extend(fronts, tokens_hashes, gained)
        depths = {place: depth for places, depth, _ in fronts for place in bits(places)}
        return {key: (depths[rank.place], depths[rank.place] + gained[rank.place]) for key, rank in self._ranks.items()}

    def _rank(self, where: Place, key: RankKey) -> _Rank | None:
        rank = self._ranks.get(key)
        if rank is None:
            if len(self._ranks) < MAX_RANKS:
                rank = self._ranks[key] = _Rank(len(self._ranks))
            elif key not in self._refused:
                self._refused.add(key)
                self._say("KV954", where, key, None, f"more than {MAX_RANKS} ranks; this one is not followed")
        return rank

    def _clear(self, rank: _Rank) -> None:
        self.device.clear(rank.place)
        self.host.clear(rank.place)
        rank.salts.clear()

    def _apply(self, where: Place, key: RankKey, rank: _Rank, event: StreamEvent, form: str) -> None:
        if event.kind == CLEARED:
            self._clear(rank)
            return
        if event.kind == OTHER:
            return
        tier = TIERS[form].get(event.medium)
        aside = _aside(rank, event, tier)
        if aside is not None:
            self._say("KV954", where, key, event, f"{aside}: dropped before the index")
            return
        hashes: Any = hash_keys(event.hashes)
        if event.kind == STORED:
            if tier in (DEVICE, HOST):
                self._store(where, key, rank, event, hashes, tier == DEVICE)
            return
        rank.forget_salts(hashes)
        if tier == HOST:
            self.host.remove(rank.place, hashes)
        elif tier == DEVICE:
            known = self.device.hashes(rank.place)
            left = len(known) - sum(hash_ in known for hash_ in set(hashes))
            self.device.remove(rank.place, hashes)
            if below := left - len(known):
                self._say("KV955", where, key, event, f"{below} blocks below are forgotten with it")

    def _store(self, where: Place, key: RankKey, rank: _Rank, event: StreamEvent, hashes: Any, on_device: bool) -> None:
        salt = rank.salt_of(event, hashes)
        if salt is None:
            text = f"parent {show(event.parent or 0)} has had two cache salts: dropped before the index"
            self._say("KV954", where, key, event, text)
            return
        own = _local_hashes(event, salt)
        if len(own) < len(hashes):
            text = f"tokens for {len(own)} of {len(hashes)} blocks: the rest is dropped"
            self._say("KV954", where, key, event, text)
        parent: Any = None if event.parent is None else hash_key(event.parent)
        index: DeviceIndex | HostIndex = self.device if on_device else self.host
        if index.store(rank.place, parent, hashes[: len(own)], own):
            return
        if on_device:
            text = f"the index does not know parent {show(parent)} of this rank: the run is refused for good"
            self._say("KV952", where, key, event, text)
        else:
            text = "an edge with another child hash, or the same child elsewhere, ends the run"
            self._say("KV953", where, key, event, text)


def _aside(rank: _Rank, event: StreamEvent, tier: str | None) -> str | None:
    """Why an event does not reach the index."""
    if tier is None:
        return f"medium {shorten(event.medium, 40)}"
    engine = event.engine
    if engine is not None and engine.locality not in (None, "LOCAL"):
        return f"locality {shorten(engine.locality, 40)}"
    group = event.group_idx or 0
    if event.kind == STORED and engine is not None and engine.spec_kind is not None:
        rank.kinds[group] = engine.spec_kind
    kind = rank.kinds.get(group)
    if kind not in _FULL or (group and kind is None):
        return f"group {group} of kind {kind or 'unknown'}"
    hashes = hash_keys(event.hashes)
    if event.kind == STORED and (
        len(set(hashes)) != len(hashes) or (event.parent is not None and hash_key(event.parent) in hashes)
    ):
        return "a block twice in a run, or its own parent"
    return None


def _poison(event: StreamEvent) -> str | None:
    """What in an event makes Dynamo drop its whole batch."""
    if event.kind == OTHER and event.tag != "Ignored":
        return f"tag {shorten(event.tag, 40)}"
    if not isinstance(_own_salt(event), str | None):
        return "a cache salt that is no text"
    hashes: tuple[Hash, ...] = event.hashes if event.parent is None else (*event.hashes, event.parent)
    if any(type(item) is not int for item in hashes):
        return "a hash that is not an integer"
    return None


def _local_hashes(event: StreamEvent, salt: str | None) -> list[int]:
    """The hash of each block's own content, as far as there are tokens for it.

    Adapter id and extra keys do not matter: the reference looks at the adapter's name, the salt and multimodal
    information alone (tests/oracle/salted_hashes.json).
    """
    engine = event.engine
    if event.tokens_hashes:
        return list(event.tokens_hashes[: len(event.hashes)])
    if engine is None:
        return [item for item in hash_keys(event.hashes) if isinstance(item, int)]
    size, tokens = engine.block_size or 0, engine.token_ids
    if not size:
        return []
    count = min(len(event.hashes), len(tokens) // size)
    seed = namespace_seed(engine.lora_name, salt)
    hashes = tokens_hashes(tokens[: count * size], size, seed)
    for idx, objects in enumerate(_mm_hashes(event)[:count]):
        if objects:
            hashes[idx] = multimodal_hash(tokens[idx * size : (idx + 1) * size], objects, seed)
    return hashes


def _own_salt(event: StreamEvent) -> Any:
    return dict(event.more).get("cache_salt") if event.more else None


def _mm_hashes(event: StreamEvent) -> list[list[int]]:
    """Hashes of the multimodal objects in each block; what is not written as the reference does is left out."""
    infos = thawed(dict(event.more).get("block_mm_infos")) if event.more else None
    if not isinstance(infos, list):
        return []
    rows = [info.get("mm_objects") if isinstance(info, dict) else None for info in infos]
    return [
        [own["mm_hash"] for own in row if isinstance(own, dict) and _is_u64(own.get("mm_hash"))]
        if isinstance(row, list)
        else []
        for row in rows
    ]


def _is_u64(value: Any) -> bool:
    return type(value) is int and 0 <= value <= U64_MAX
