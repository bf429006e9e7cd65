"""What a router knows of where blocks are: a prefix tree for the device, an edge set for host memory.

Owns: both structures, how KV events change them and how a prompt is looked up. Ranks are plain numbers ("places") here.
Refuses to know: workers, policies, time, and where events come from.

The rules are those of the indexer of NVIDIA Dynamo 1.6.1, odd ones included: what it refuses is refused here, so that a
stream which a real router would misread is misread in the same way. Recordings: tests/oracle/router.
"""

from __future__ import annotations

from collections.abc import Iterable, KeysView, Sequence

import attrs

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


class _Node:
    """A block with its prefix. ``places``: bit set of those that hold it; ``block_hash``: the first one given to it."""

    __slots__ = ("block_hash", "children", "places", "tokens_hash", "up")

    def __init__(self, block_hash: int | None, tokens_hash: int, up: _Node | None) -> None:
        self.block_hash = block_hash
        self.tokens_hash = tokens_hash
        self.up = up
        self.places = 0
        self.children: dict[int, _Node] = {}


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
        self._root = _Node(None, 0, None)
        self._handles: list[dict[int, _Node]] = [{} for _ in range(places)]

    def blocks(self, place: int) -> int:
        """Handles that a place has; blocks it holds, unless it uses hashes of its own."""
        return len(self._handles[place])

    def hashes(self, place: int) -> KeysView[int]:
        """Those handles; a view, which follows what happens."""
        return self._handles[place].keys()

    def store(self, place: int, parent: int | None, block_hashes: Sequence[int], tokens_hashes: Sequence[int]) -> bool:
        """A run of blocks became resident. False, and nothing is changed, if this place does not know ``parent``."""
        handles = self._handles[place]
        node = self._root if parent is None else handles.get(parent)
        if node is None:
            return False
        bit = 1 << place
        for block_hash, tokens_hash in zip(block_hashes, tokens_hashes, strict=True):
            child = node.children.get(tokens_hash)
            if child is None:
                child = node.children[tokens_hash] = _Node(block_hash, tokens_hash, node)
            child.places |= bit
            if child.block_hash == block_hash:
                handles[block_hash] = child
            node = child
        return True

    def remove(self, place: int, block_hashes: Iterable[int]) -> int:
        """Blocks left, and with each of them all that follow it. Returns how many hashes were unknown."""
        handles = self._handles[place]
        unknown = 0
        for block_hash in block_hashes:
            node = handles.get(block_hash)
            if node is None:
                unknown += 1
                continue
            self._drop(node, place)
            if node.places == 0 and node.up is not None:
                del node.up.children[node.tokens_hash]
        return unknown

    def clear(self, place: int) -> None:
        """A place holds nothing any more."""
        for node in list(self._root.children.values()):
            if node.places >> place & 1:
                self._drop(node, place)
                if node.places == 0:
                    del self._root.children[node.tokens_hash]
        self._handles[place].clear()

    def fronts(self, tokens_hashes: Sequence[int]) -> list[Front]:
        """How far each place gets along a prompt: fronts of rising depth that together name every place once."""
        found: list[Front] = []
        alive = self._all
        node = self._root
        depth = 0
        for tokens_hash in tokens_hashes:
            child = node.children.get(tokens_hash)
            if child is None:
                break
            still = alive & child.places
            if still != alive:
                found.append((alive ^ still, depth, node.block_hash))
                alive = still
                if not still:
                    return found
            node = child
            depth += 1
        found.append((alive, depth, node.block_hash))
        return found

    def check(self) -> None:
        """Raises: InvariantViolation if the tree contradicts itself."""
        stack = [self._root]
        while stack:
            node = stack.pop()
            for tokens_hash, child in node.children.items():
                if child.tokens_hash != tokens_hash or child.up is not node:
                    raise InvariantViolation(f"device index: block {child.block_hash} hangs in the wrong place")
                if not child.places or (node is not self._root and child.places & ~node.places):
                    raise InvariantViolation(f"device index: block {child.block_hash} is held without its parent")
                stack.append(child)
        for place, handles in enumerate(self._handles):
            for block_hash, node in handles.items():
                if node.block_hash != block_hash or not node.places >> place & 1:
                    raise InvariantViolation(f"device index: place {place} has a handle {block_hash} for nothing")

    def _drop(self, node: _Node, place: int) -> None:
        """Take a place off a node and everything below it."""
        bit = 1 << place
        handles = self._handles[place]
        stack = [node]
        while stack:
            node = stack.pop()
            node.places ^= bit
            if node.block_hash is not None and handles.get(node.block_hash) is node:
                del handles[node.block_hash]
            for child in list(node.children.values()):
                if child.places & bit:
                    stack.append(child)
                    if child.places == bit:
                        del node.children[child.tokens_hash]


class _Edge:
    """A block that follows another: ``child`` is its hash, ``places`` the bit set of those that hold it."""

    __slots__ = ("child", "places")

    def __init__(self, child: int) -> None:
        self.child = child
        self.places = 0


_Key = tuple[int | None, int]


class HostIndex:
    """Edges (parent's hash or None, tokens hash) -> child's hash. No parent need be there, and order does not matter.

    Edges are common to all places and the first child's hash wins: a place that stores the same block under another
    hash is not seen until the last owner of the edge has gone. A place keeps the first edge for a child's hash.

    Args:
        places: number of places.
    """

    def __init__(self, places: int) -> None:
        self._edges: dict[_Key, _Edge] = {}
        self._keys: list[dict[int, _Key]] = [{} for _ in range(places)]

    def blocks(self, place: int) -> int:
        """Blocks that a place holds."""
        return len(self._keys[place])

    def hashes(self, place: int) -> KeysView[int]:
        """Those blocks; a view, which follows what happens."""
        return self._keys[place].keys()

    def store(self, place: int, parent: int | None, block_hashes: Sequence[int], tokens_hashes: Sequence[int]) -> bool:
        """A run of blocks became resident. False if one contradicts an edge; it ends the run, and the rest is lost."""
        keys = self._keys[place]
        bit = 1 << place
        for block_hash, tokens_hash in zip(block_hashes, tokens_hashes, strict=True):
            key = (parent, tokens_hash)
            edge = self._edges.get(key)
            if keys.get(block_hash, key) != key or (edge is not None and edge.child != block_hash):
                return False
            if edge is None:
                edge = self._edges[key] = _Edge(block_hash)
            edge.places |= bit
            keys[block_hash] = key
            parent = block_hash
        return True

    def remove(self, place: int, block_hashes: Iterable[int]) -> int:
        """Blocks left. Returns how many hashes were unknown."""
        unknown = 0
        for block_hash in block_hashes:
            key = self._keys[place].pop(block_hash, None)
            if key is None:
                unknown += 1
            else:
                self._drop(key, 1 << place)
        return unknown

    def clear(self, place: int) -> None:
        """A place holds nothing any more."""
        for key in self._keys[place].values():
            self._drop(key, 1 << place)
        self._keys[place].clear()

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
            if not walking:
                if next_idx == len(waiting):
                    return
                depth = waiting[next_idx][1]
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
        owned: dict[_Key, int] = {}
        for place, keys in enumerate(self._keys):
            for block_hash, key in keys.items():
                edge = self._edges.get(key)
                if edge is None or edge.child != block_hash:
                    raise InvariantViolation(f"host index: place {place} holds {block_hash} without an edge")
                owned[key] = owned.get(key, 0) | 1 << place
        if owned != {key: edge.places for key, edge in self._edges.items()}:
            raise InvariantViolation("host index: an edge has owners that do not hold its block")

    def _drop(self, key: _Key, bit: int) -> None:
        edge = self._edges[key]
        edge.places ^= bit
        if not edge.places:
            del self._edges[key]


def bits(places: int) -> Iterable[int]:
    """Numbers of the set bits, lowest first."""
    while places:
        low = places & -places
        yield low.bit_length() - 1
        places ^= low
