"""What a router knows of where blocks are: a prefix tree for the device, an edge set for host memory.

Owns: both structures, how KV events change them and how a prompt is looked up. Ranks are plain numbers ("places") here.
Refuses to know: workers, policies, time, and where events come from.

The rules are those of the indexer of NVIDIA Dynamo 1.6.1, odd ones included: what it refuses is refused here, so that a
stream which a real router would misread is misread in the same way. Recordings: tests/oracle/router.
"""

from __future__ import annotations

from collections.abc import Iterable, KeysView, Sequence
from collections.abc import Set as AbstractSet

import attrs

from g2sim.actors.kv.lists import common_items
from g2sim.bus.errors import InvariantViolation


@attrs.frozen(slots=True)
class Overlap:
    """How much of a prompt each place is believed to hold, in blocks; one entry a place.

    Attributes:
        device: length of the prefix in device memory.
        host: blocks that continue it in host memory.
    """

    device: list[int]
    host: list[int]


Front = tuple[int, int, int | None]
"""(places, depth, hash): these places (a bit set) hold ``depth`` leading blocks, the last of which has this hash."""


_MAX_RUN = 64
"""Blocks of a run in the tree; a bound on the work of looking for one in it."""


class _Run:
    """Blocks that follow one another, all held by the same places; no two have the same hash.

    Attributes:
        block_hashes: the first hash that was given to each block. ``tokens_hashes``: of the same blocks.
        places: bit set of those that hold them.
        up: the run before it, None for the root. ``children``: runs that follow, by their first tokens hash.
    """

    __slots__ = ("block_hashes", "children", "places", "tokens_hashes", "up")

    def __init__(self, block_hashes: list[int], tokens_hashes: list[int], places: int, up: _Run | None) -> None:
        self.block_hashes = block_hashes
        self.tokens_hashes = tokens_hashes
        self.places = places
        self.up = up
        self.children: dict[int, _Run] = {}


class DeviceIndex:
    """A tree over tokens hashes. What a place holds is closed: with a block it holds all blocks before it.

    Block hashes only serve as handles, for parents and removals: the first hash under which a block was stored is its
    handle. A place that stores a known block under another hash holds it, but has no handle for it.

    One departure: when a block leaves a place and comes back, the reference sometimes finds again what lay below it on
    branches of their own (and once in a while for a wrong place). Here, as documented, it has to be stored again.

    Args:
        places: number of places.
    """

    def __init__(self, places: int) -> None:
        self._all = (1 << places) - 1
        self._root = _Run([], [], 0, None)
        self._handles: list[dict[int, _Run]] = [{} for _ in range(places)]

    def blocks(self, place: int) -> int:
        """Handles that a place has; blocks it holds, unless it uses hashes of its own."""
        return len(self._handles[place])

    def hashes(self, place: int) -> KeysView[int]:
        """Those handles; a view, which follows what happens."""
        return self._handles[place].keys()

    def store(self, place: int, parent: int | None, block_hashes: Sequence[int], tokens_hashes: Sequence[int]) -> bool:
        """A run of blocks became resident. False, and nothing is changed, if this place does not know ``parent``.

        Raises: ValueError if there are not as many tokens hashes as blocks.
        """
        end = len(block_hashes)
        if len(tokens_hashes) != end:
            raise ValueError(f"{end} block hashes with {len(tokens_hashes)} tokens hashes")
        handles = self._handles[place]
        run = self._root
        at = 0
        if parent is not None:
            found = handles.get(parent)
            if found is None:
                return False
            run = found
            at = _position(run, parent) + 1
        bit = 1 << place
        hashes, tokens = list(block_hashes), list(tokens_hashes)
        start = 0
        while start < end:
            if at == len(run.tokens_hashes):
                child = run.children.get(tokens[start])
                if child is None:
                    self._grow(place, run, hashes[start:], tokens[start:])
                    return True
                run, at = child, 0
            count = common_items(run.tokens_hashes, at, tokens, start)
            if not count or (not run.places & bit and count < len(run.tokens_hashes)):
                self._split(run, at + count)
            if count:
                run.places |= bit
                for known, block_hash in zip(run.block_hashes[at : at + count], hashes[start:], strict=False):
                    if known == block_hash:
                        handles[block_hash] = run
            at += count
            start += count
        return True

    def remove(self, place: int, block_hashes: Iterable[int]) -> int:
        """Blocks left, and with each of them all that follow it. Returns how many hashes were unknown."""
        handles = self._handles[place]
        bit = 1 << place
        unknown = 0
        for block_hash in block_hashes:
            run = handles.get(block_hash)
            if run is None:
                unknown += 1
                continue
            if run.block_hashes[-1] == block_hash and run.places == bit and not run.children:
                del handles[block_hash], run.block_hashes[-1]
                tokens_hash = run.tokens_hashes.pop()
                if run.tokens_hashes:
                    continue
            else:
                at = _position(run, block_hash)
                if at:
                    run = self._split(run, at)
                self._drop(run, place)
                if run.places:
                    continue
                tokens_hash = run.tokens_hashes[0]
            if run.up is not None:
                del run.up.children[tokens_hash]
        return unknown

    def clear(self, place: int) -> None:
        """A place holds nothing any more."""
        for run in list(self._root.children.values()):
            if run.places >> place & 1:
                self._drop(run, place)
                if run.places == 0:
                    del self._root.children[run.tokens_hashes[0]]
        self._handles[place].clear()

    def fronts(self, tokens_hashes: Sequence[int]) -> list[Front]:
        """How far each place gets along a prompt: fronts of rising depth that together name every place once."""
        found: list[Front] = []
        prompt = list(tokens_hashes)
        alive = self._all
        run = self._root
        block_hash: int | None = None
        depth = 0
        while depth < len(prompt):
            child = run.children.get(prompt[depth])
            if child is None:
                break
            still = alive & child.places
            if still != alive:
                found.append((alive ^ still, depth, block_hash))
                alive = still
                if not still:
                    return found
            run = child
            count = common_items(run.tokens_hashes, 0, prompt, depth)
            depth += count
            block_hash = run.block_hashes[count - 1]
            if count < len(run.tokens_hashes):
                break
        found.append((alive, depth, block_hash))
        return found

    def check(self) -> None:
        """Raises: InvariantViolation if the tree contradicts itself."""
        stack = [self._root]
        while stack:
            run = stack.pop()
            for tokens_hash, child in run.children.items():
                hashes = child.block_hashes
                if not 0 < len(set(hashes)) == len(hashes) == len(child.tokens_hashes) <= _MAX_RUN:
                    raise InvariantViolation(f"device index: a run of blocks {hashes}")
                if child.tokens_hashes[0] != tokens_hash or child.up is not run:
                    raise InvariantViolation(f"device index: block {hashes[0]} hangs in the wrong place")
                if not child.places or (run is not self._root and child.places & ~run.places):
                    raise InvariantViolation(f"device index: block {hashes[0]} is held without its parent")
                stack.append(child)
        for place, handles in enumerate(self._handles):
            for block_hash, run in handles.items():
                if block_hash not in run.block_hashes or not run.places >> place & 1:
                    raise InvariantViolation(f"device index: place {place} has a handle {block_hash} for nothing")

    def _grow(self, place: int, run: _Run, block_hashes: list[int], tokens_hashes: list[int]) -> None:
        """Blocks that nobody holds follow the last one of a run, or the root."""
        bit = 1 << place
        handles = self._handles[place]
        start = 0
        end = len(block_hashes)
        if run.places == bit and not run.children:  # so it is not the root
            while start < end and len(run.block_hashes) < _MAX_RUN and block_hashes[start] not in run.block_hashes:
                handles[block_hashes[start]] = run
                run.block_hashes.append(block_hashes[start])
                run.tokens_hashes.append(tokens_hashes[start])
                start += 1
        while start < end:
            hashes = block_hashes[start : start + _MAX_RUN]
            if len(set(hashes)) < len(hashes):
                del hashes[1:]
            run, up = _Run(hashes, tokens_hashes[start : start + len(hashes)], bit, run), run
            up.children[tokens_hashes[start]] = run
            handles.update(dict.fromkeys(hashes, run))
            start += len(hashes)

    def _split(self, run: _Run, at: int) -> _Run:
        """Let a run end before its block ``at``. Returns the rest."""
        rest = _Run(run.block_hashes[at:], run.tokens_hashes[at:], run.places, run)
        rest.children, run.children = run.children, {rest.tokens_hashes[0]: rest}
        for child in rest.children.values():
            child.up = rest
        del run.block_hashes[at:], run.tokens_hashes[at:]
        for place in bits(run.places):
            handles = self._handles[place]
            for block_hash in rest.block_hashes:
                if handles.get(block_hash) is run:
                    handles[block_hash] = rest
        return rest

    def _drop(self, run: _Run, place: int) -> None:
        """Take a place off a run and everything below it."""
        bit = 1 << place
        handles = self._handles[place]
        stack = [run]
        while stack:
            run = stack.pop()
            run.places ^= bit
            for block_hash in run.block_hashes:
                if handles.get(block_hash) is run:
                    del handles[block_hash]
            for child in list(run.children.values()):
                if child.places & bit:
                    stack.append(child)
                    if child.places == bit:
                        del run.children[child.tokens_hashes[0]]


def _position(run: _Run, block_hash: int) -> int:
    """Where in a run a block is."""
    hashes = run.block_hashes
    return len(hashes) - 1 if hashes[-1] == block_hash else hashes.index(block_hash)


_Key = tuple[int | None, int]


class _Edge:
    """A block that follows another, or begins a prompt.

    Attributes:
        key: hash of the block before it, None without one, and its tokens hash.
        child: its hash. ``places``: bit set of those that hold it.
        other: another edge with the same child, which places hold that do not hold this one; None in any sane stream.
    """

    __slots__ = ("child", "key", "other", "places")

    def __init__(self, key: _Key, child: int, other: _Edge | None) -> None:
        self.key = key
        self.child = child
        self.other = other
        self.places = 0


class HostIndex:
    """Edges (parent's hash or None, tokens hash) -> child's hash. No parent need be there, and order does not matter.

    Edges are common to all places and the first child's hash wins: a place that stores the same block under another
    hash is not seen until the last owner of the edge has gone. A place keeps the first edge for a child's hash.

    Ranks with a shared pool tell the same changes, so a change may be that of several places at once (a bit set).

    Args:
        places: number of places.
    """

    def __init__(self, places: int) -> None:
        self._edges: dict[_Key, _Edge] = {}
        self._children: dict[int, _Edge] = {}
        # What a place holds is kept for those of which it has been asked: a router never asks.
        self._asked = 0
        self._held: list[set[int]] = [set() for _ in range(places)]

    def blocks(self, place: int) -> int:
        """Blocks that a place holds."""
        return len(self.hashes(place))

    def hashes(self, place: int) -> AbstractSet[int]:
        """Those blocks; a view, which follows what happens."""
        bit = 1 << place
        if not self._asked & bit:
            self._asked |= bit
            self._held[place].update(edge.child for edge in self._edges.values() if edge.places & bit)
        return self._held[place]

    def store(self, place: int, parent: int | None, block_hashes: Sequence[int], tokens_hashes: Sequence[int]) -> bool:
        """A run of blocks became resident. False if one contradicts an edge; it ends the run, and the rest is lost."""
        return not self.store_at(1 << place, parent, block_hashes, tokens_hashes)

    def store_at(
        self, places: int, parent: int | None, block_hashes: Sequence[int], tokens_hashes: Sequence[int]
    ) -> int:
        """``store`` for each of ``places``. Returns those whose run has ended early."""
        edges, children = self._edges, self._children
        refused = 0
        for stored, (block_hash, tokens_hash) in enumerate(zip(block_hashes, tokens_hashes, strict=True)):
            key = (parent, tokens_hash)
            edge = edges.get(key)
            known = children.get(block_hash)
            if (edge is not known or (edge is not None and edge.other is not None)) and (
                ending := _contradicted(edge, known, block_hash) & places
            ):
                refused |= ending
                places ^= ending
                self._hold(ending, block_hashes[:stored])
                if not places:
                    return refused
            if edge is None:
                edge = edges[key] = children[block_hash] = _Edge(key, block_hash, known)
            edge.places |= places
            parent = block_hash
        self._hold(places, block_hashes)
        return refused

    def remove(self, place: int, block_hashes: Sequence[int]) -> int:
        """Blocks left. Returns how many hashes were unknown."""
        return self.remove_at(1 << place, block_hashes)

    def remove_at(self, places: int, block_hashes: Sequence[int]) -> int:
        """``remove`` for each of ``places``. Returns how many hashes were unknown, added up."""
        edges, children = self._edges, self._children
        unknown = len(block_hashes) * places.bit_count()
        for block_hash in block_hashes:
            edge = children.get(block_hash)
            if edge is None:
                continue
            if edge.other is not None:
                unknown -= self._remove_any(places, edge)
                continue
            leaving = edge.places & places
            unknown -= leaving.bit_count()
            edge.places ^= leaving
            if not edge.places:
                del edges[edge.key]
                del children[block_hash]
        for place in bits(places & self._asked):
            self._held[place].difference_update(block_hashes)
        return unknown

    def clear(self, place: int) -> None:
        """A place holds nothing any more."""
        self.remove(place, tuple(self.hashes(place)))

    def extend(self, fronts: Iterable[Front], tokens_hashes: Sequence[int], extension: list[int]) -> None:
        """Go on where ``fronts`` (of rising depth) end; add to ``extension`` what each place gains.

        Places that stand at the same block walk on together, so a shared pool costs one walk and not one a place.
        """
        edges = self._edges
        if not edges:
            return
        waiting = list(fronts)
        start = {place: depth for places, depth, _ in waiting for place in bits(places)}
        end = len(tokens_hashes)
        depth = waiting[0][1]
        walking: dict[int | None, int] = {}
        next_idx = 0
        while depth < end:
            while next_idx < len(waiting) and waiting[next_idx][1] == depth:
                places, _, block_hash = waiting[next_idx]
                walking[block_hash] = walking.get(block_hash, 0) | places
                next_idx += 1
            stop = waiting[next_idx][1] if next_idx < len(waiting) else end
            if not walking:
                depth = stop
                continue
            if len(walking) == 1:  # most often all go on together
                block_hash, places = walking.popitem()
                while depth < stop:
                    edge = edges.get((block_hash, tokens_hashes[depth]))
                    if edge is None or edge.places & places != places:
                        break
                    block_hash = edge.child
                    depth += 1
                walking[block_hash] = places
                if depth == stop:
                    continue
            tokens_hash = tokens_hashes[depth]
            going_on: dict[int | None, int] = {}
            for block_hash, places in walking.items():
                edge = edges.get((block_hash, tokens_hash))
                if edge is not None and (still := places & edge.places):
                    going_on[edge.child] = going_on.get(edge.child, 0) | still
                    places ^= still
                for place in bits(places):
                    extension[place] += depth - start[place]
            walking = going_on
            depth += 1
        for places in walking.values():
            for place in bits(places):
                extension[place] += depth - start[place]

    def check(self) -> None:
        """Raises: InvariantViolation if edges and owners contradict each other."""
        held: list[set[int]] = [set() for _ in self._held]
        edges: dict[_Key, _Edge] = {}
        for child, first in self._children.items():
            for edge in _all_of(first):
                edges[edge.key] = edge
                for place in bits(edge.places):
                    if edge.child != child or child in held[place]:
                        raise InvariantViolation(f"host index: place {place} holds {child} twice")
                    held[place].add(child)
        if any(self._asked >> place & 1 and held[place] != kept for place, kept in enumerate(self._held)):
            raise InvariantViolation("host index: an edge has owners that do not hold its block")
        if edges != self._edges or not all(edge.places for edge in edges.values()):
            raise InvariantViolation("host index: an edge that no place holds")

    def _hold(self, places: int, block_hashes: Sequence[int]) -> None:
        for place in bits(places & self._asked):
            self._held[place].update(block_hashes)

    def _remove_any(self, places: int, first: _Edge) -> int:
        """Take places off all edges with one child. Returns how many of them held it."""
        left: _Edge | None = None
        known = 0
        for edge in _all_of(first):
            leaving = edge.places & places
            known += leaving.bit_count()
            edge.places ^= leaving
            if edge.places:
                edge.other, left = left, edge
            else:
                del self._edges[edge.key]
        if left is None:
            del self._children[first.child]
        else:
            self._children[first.child] = left
        return known


def _all_of(edge: _Edge | None) -> list[_Edge]:
    """The edge and the others with its child."""
    found = []
    while edge is not None:
        found.append(edge)
        edge = edge.other
    return found


def _contradicted(edge: _Edge | None, known: _Edge | None, child: int) -> int:
    """Places which a store of ``child`` under ``edge`` contradicts; ``known``: an edge with this child."""
    if edge is not None and edge.child != child:
        return -1
    places = 0
    for other in _all_of(known):
        if other is not edge:
            places |= other.places
    return places


def bits(places: int) -> Iterable[int]:
    """Numbers of the set bits, lowest first."""
    while places:
        low = places & -places
        yield low.bit_length() - 1
        places ^= low
