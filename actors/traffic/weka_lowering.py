"""From a recorded agent session to a request graph: who waits for whom, and for how long.

A Weka play lists requests with times and block hashes; conversations, forks and subagents are implicit. Here they are
found (chains of growing prompts), joined up and turned into nodes with typed edges.

Owns: all rules of that inference. Refuses to know: files and field names.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import pairwise

import attrs
from blake3 import blake3

from g2sim.actors.rounding import round_half_away
from g2sim.actors.traffic.graph import Edge, Node, Relation, Trigger
from g2sim.actors.traffic.weka_reader import EPS_S, NestedBasis, WekaPlay, WekaRequest, WekaSubagent

PREAMBLE_OUTPUT_TOKENS = 64
"""A first request with a longer answer than this is no preamble if any later prompt holds a block of it."""

SEAM_GAP_S = 3600.0
"""After a longer pause than this [s], an edited prompt must keep ``SEAM_OVERLAP`` of its blocks to go on."""

SEAM_OVERLAP = 0.5


@attrs.frozen(slots=True, eq=False)
class Unit:
    """A request with its place in the play.

    Attributes:
        source_id: unique in the play.
        order: its index in the list it stands in.
        start_s, end_s: recorded start and end, in the play's time [s].
        hashes: the prompt's block hashes.
        request: the rest, as authored.
    """

    source_id: str
    order: int
    start_s: float
    end_s: float
    hashes: tuple[int, ...]
    request: WekaRequest


@attrs.define(eq=False)
class Chain:
    """Requests that seem to continue one another.

    Attributes:
        index: number of the chain, in order of creation.
        fork, fork_depth: the request of another chain that it branched off from, and how many leading hashes they
            share; None and 0 for a chain that shares nothing.
        units: the requests.
        tail: the last of them that has hashes.
        spliced: whether its requests were moved to another chain.
    """

    index: int
    fork: Unit | None = None
    fork_depth: int = 0
    units: list[Unit] = attrs.field(factory=list)
    tail: Unit | None = None
    spliced: bool = False

    def append(self, unit: Unit) -> None:
        self.units.append(unit)
        if unit.hashes:
            self.tail = unit


@attrs.frozen(slots=True, eq=False)
class Conversation:
    """A chain as it enters the graph.

    Attributes:
        session_id: its name.
        units: requests in the order in which they follow one another; at least one.
        fork: the request that it was started from, None if unknown.
    """

    session_id: str
    units: list[Unit]
    fork: Unit | None


_Arc = tuple[Unit, Unit, Trigger, float, Relation]  # target, source, trigger, delay [s], relation


def lower_play(play: WekaPlay, ordinal: int, block_size_tokens: int, basis: NestedBasis) -> list[Node]:
    """The nodes of one play.

    Args:
        play: as authored.
        ordinal: its position in the corpus.
        block_size_tokens: block size of the corpus.
        basis: what nested times count from.
    """
    namespace = f"weka:{blake3(play.source_name.encode()).hexdigest()[:16]}"
    outer = [_unit(f"outer:{index}", index, request.t_s, request) for index, request in play.requests]
    scopes = [_conversations(outer, f"{namespace}:session:root", None)]
    conversation_of = {unit: conversation for conversation in scopes[0] for unit in conversation.units}
    arcs: list[_Arc] = []
    for subagent in play.subagents:
        if not subagent.requests:
            continue
        owner = outer[bisect_left(outer, subagent.outer_idx, key=lambda unit: unit.order) - 1]
        prefix = f"{namespace}:session:subagent:{subagent.outer_idx}:{subagent.agent_id}"
        scopes.append(_conversations(_inner_units(subagent, basis), prefix, owner))
        if subagent.blocking:
            arcs += _join_arcs(subagent, scopes[-1], conversation_of[owner])
    conversations = [conversation for scope in scopes for conversation in scope]
    for scope in scopes:
        arcs += _barrier_arcs(scope)
    for conversation in conversations:
        arcs += _chain_arcs(conversation)
    arcs += _anchor_arcs(conversations, {arc[0] for arc in arcs})

    # No two arcs agree in target, source and relation: a request stands in one conversation, follows one request of
    # it and starts at most one conversation; a barrier names each conversation once, a join each subagent's ends once.
    edges: defaultdict[str, list[Edge]] = defaultdict(list)
    for target, source, trigger, delay_s, relation in arcs:
        edge = Edge(
            source=f"{namespace}:request:{source.source_id}",
            trigger=trigger,
            delay_ms=to_ms(delay_s),
            relation=relation,
        )
        edges[target.source_id].append(edge)
    start_s = min(unit.start_s for conversation in conversations for unit in conversation.units)
    names = _HashNames(play.source_name, block_size_tokens)
    return [
        Node(
            request_id=(request_id := f"{namespace}:request:{unit.source_id}"),
            play_id=f"{namespace}:play:{play.trace_id}",
            session_id=conversation.session_id,
            model=unit.request.model,
            input_tokens=unit.request.input_tokens,
            output_tokens=unit.request.output_tokens,
            hash_ids=names.of(request_id, unit.request),
            not_before_ms=to_ms(unit.start_s - start_s),
            edges=tuple(edges[unit.source_id]),
            play_ordinal=ordinal,
            recorded_api_ms=None if unit.request.api_time_s is None else to_ms(unit.request.api_time_s),
        )
        for conversation in conversations
        for unit in conversation.units
    ]


def to_ms(seconds: float) -> float:
    """Milliseconds of a recorded duration, rounded half away from zero to whole nanoseconds; 0 if it is negative."""
    return float(round_half_away(max(seconds, 0.0) * 1e9)) / 1e6


def _unit(source_id: str, order: int, start_s: float, request: WekaRequest) -> Unit:
    return Unit(source_id, order, start_s, start_s + (request.api_time_s or 0.0), request.hashes, request)


def _inner_units(subagent: WekaSubagent, basis: NestedBasis) -> list[Unit]:
    marker_s = subagent.t_s
    return [
        _unit(
            f"outer:{subagent.outer_idx}:inner:{index}",
            index,
            marker_s + request.t_s if basis is NestedBasis.RELATIVE else max(request.t_s, marker_s),
            request,
        )
        for index, request in enumerate(subagent.requests)
    ]


def _by_start(units: Iterable[Unit]) -> list[Unit]:
    return sorted(units, key=lambda unit: (unit.start_s, unit.order, unit.source_id))


# Conversations


def _conversations(units: Sequence[Unit], session_id: str, fork: Unit | None) -> list[Conversation]:
    """The main conversation, then the others, of requests that stand in one list.

    Args:
        units: the requests, at least one.
        session_id: name of the main conversation.
        fork: what the main conversation was started from.
    """
    preamble, rest = _split_preamble(_by_start(units))
    chains = _detect_chains(rest)
    _repair_seams(chains)
    # Chain 0 holds the first request and forks from nothing, so it is never spliced; the others were created in the
    # order of their first requests, and splicing appends.
    main, *others = (chain for chain in chains if not chain.spliced)
    return [
        Conversation(session_id, _by_start([*preamble, *main.units]), fork),
        *(Conversation(f"{session_id}:worker:{k}", chain.units, chain.fork) for k, chain in enumerate(others)),
    ]


def _split_preamble(units: list[Unit]) -> tuple[list[Unit], list[Unit]]:
    """Take out a first request that shares no prefix with any later one (a title, a quota check)."""
    first, others = units[0], units[1:]
    if not others or not first.hashes or any(other.hashes[:1] == first.hashes[:1] for other in others):
        return [], units
    if first.request.output_tokens > PREAMBLE_OUTPUT_TOKENS:
        later = {block for other in others for block in other.hashes}
        if not later.isdisjoint(first.hashes):
            return [], units
    return [first], others


def _detect_chains(units: Iterable[Unit]) -> list[Chain]:
    """Distribute requests, given by start, over chains whose prompts grow."""
    chains: list[Chain] = []
    for unit in units:
        tails = [(chain, chain.tail) for chain in chains if chain.tail is not None]
        if not chains:
            chains.append(Chain(0))
        if not unit.hashes or not tails:
            chains[0].append(unit)
            continue
        chain = _extended_chain(unit, tails)
        if chain is None:
            chain = Chain(len(chains), *_fork_point(unit, (tail for _, tail in tails)))
            chains.append(chain)
        chain.append(unit)
    return chains


def _extended_chain(unit: Unit, tails: Iterable[tuple[Chain, Unit]]) -> Chain | None:
    """The chain that ``unit`` goes on: the whole of its last prompt is kept, by the same model, after its end."""
    longest = 0
    found = None
    for chain, tail in tails:
        length = len(tail.hashes)
        if (
            length > longest
            and tail.request.model == unit.request.model
            and tail.end_s <= unit.start_s + EPS_S
            and tail.hashes == unit.hashes[:length]
        ):
            longest, found = length, chain
    return found


def _fork_point(unit: Unit, tails: Iterable[Unit]) -> tuple[Unit | None, int]:
    """The request that ``unit`` branches off from, if any, and how many leading hashes they share."""
    found, best = None, (0, 0)
    for tail in tails:
        depth = common_prefix(tail.hashes, unit.hashes)
        if depth and (depth, len(tail.hashes)) > best:
            found, best = tail, (depth, len(tail.hashes))
    return found, best[0]


def _repair_seams(chains: Sequence[Chain]) -> None:
    """Undo forks that are the same conversation going on with an edited prompt."""
    home = {unit.source_id: chain for chain in chains for unit in chain.units}
    forks: defaultdict[str, list[Chain]] = defaultdict(list)
    tails: dict[str, Unit] = {}

    def register(chain: Chain, tail: Unit) -> None:
        forks[tail.source_id].append(chain)
        tails[tail.source_id] = tail

    for chain in chains:
        if chain.fork is not None:
            register(chain, chain.fork)
    pending = set(forks)
    while pending:
        tail = tails[min(pending)]
        pending.discard(tail.source_id)
        owner = home[tail.source_id]
        live = [chain for chain in forks[tail.source_id] if not chain.spliced]
        heirs = [chain for chain in live if _goes_on(tail, chain)]
        if owner.tail is not tail or not heirs:
            continue
        heir = min(heirs, key=lambda chain: (-chain.fork_depth, chain.index))
        for unit in heir.units:
            owner.append(unit)
            home[unit.source_id] = owner
        heir.spliced = True
        new_tail = owner.tail
        for chain in live:
            first = chain.units[0]
            if not chain.spliced and new_tail.start_s <= first.start_s + EPS_S:
                # At least the first block is shared: chains that fork from one another all begin with the same.
                chain.fork, chain.fork_depth = new_tail, common_prefix(new_tail.hashes, first.hashes)
                register(chain, new_tail)
                pending.add(new_tail.source_id)


def _goes_on(tail: Unit, chain: Chain) -> bool:
    first = chain.units[0]
    edited_after_long_pause = (
        first.start_s - tail.end_s > SEAM_GAP_S and chain.fork_depth / max(1, len(tail.hashes)) < SEAM_OVERLAP
    )
    return (
        tail.end_s <= first.start_s + EPS_S
        and first.request.model == tail.request.model
        and not edited_after_long_pause
    )


def common_prefix(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """How many leading entries agree. Bisection, because comparing slices is so much faster than entries."""
    low, high = 0, min(len(left), len(right))
    if high and left[0] != right[0]:
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


# Edges


def _chain_arcs(conversation: Conversation) -> Iterator[_Arc]:
    """Each request follows the one before; the first follows what it was forked from."""
    for before, unit in pairwise(conversation.units):
        yield unit, before, Trigger.COMPLETION, unit.start_s - before.end_s, Relation.SEQUENCE
    first, fork = conversation.units[0], conversation.fork
    if fork is None:
        return
    if first.start_s < fork.end_s:
        yield first, fork, Trigger.DISPATCH, first.start_s - fork.start_s, Relation.SPAWN
    else:
        yield first, fork, Trigger.COMPLETION, first.start_s - fork.end_s, Relation.SPAWN


def _barrier_arcs(scope: Sequence[Conversation]) -> Iterator[_Arc]:
    """Keep the recorded order between conversations side by side: a request waits for what had ended before it.

    Of each other conversation that is the request that had ended last, unless one of them started after its end.
    """
    by_end = [sorted(c.units, key=lambda unit: (unit.end_s, unit.start_s, unit.source_id)) for c in scope]
    for index, conversation in enumerate(scope):
        others = [units for k, units in enumerate(by_end) if k != index]
        for unit in conversation.units:
            ended = (_last_ended(units, unit.start_s) for units in others)
            frontier = [before for before in ended if before is not None]
            latest_s = max((before.start_s for before in frontier), default=0.0)
            for before in frontier:
                if not (before.start_s < latest_s and before.end_s <= latest_s + EPS_S):
                    yield unit, before, Trigger.COMPLETION, 0.0, Relation.REPLAY_BARRIER


def _last_ended(by_end: Sequence[Unit], now_s: float) -> Unit | None:
    ended = bisect_right(by_end, now_s + EPS_S, key=lambda unit: unit.end_s)
    return next((by_end[k] for k in range(ended - 1, -1, -1) if by_end[k].start_s < now_s), None)


def _join_arcs(subagent: WekaSubagent, inner: Sequence[Conversation], owner: Conversation) -> Iterator[_Arc]:
    """The owner's first request after the subagent's end waits for the end of each of its conversations."""
    if subagent.duration_ms is not None:
        end_s = subagent.t_s + subagent.duration_ms / 1000.0
    else:
        end_s = max(subagent.t_s, *(unit.end_s for conversation in inner for unit in conversation.units))
    later = (unit for unit in owner.units if unit.order > subagent.outer_idx and unit.start_s + EPS_S >= end_s)
    target = min(later, key=lambda unit: unit.order, default=None)
    if target is None:
        return
    for conversation in inner:
        last = conversation.units[-1]
        yield target, last, Trigger.COMPLETION, target.start_s - last.end_s, Relation.JOIN


def _anchor_arcs(conversations: Sequence[Conversation], waiting: Set[Unit]) -> Iterator[_Arc]:
    """A conversation that waits for nothing starts as long after the play's root as recorded."""
    root = conversations[0].units[0]
    for conversation in conversations:
        first = conversation.units[0]
        if first is not root and first not in waiting:
            yield first, root, Trigger.DISPATCH, first.start_s - root.start_s, Relation.SPAWN


# Block identities


class _HashNames:
    """64-bit ids for the blocks of one play: equal authored hashes agree inside it, and never with another play."""

    def __init__(self, source_name: str, block_size_tokens: int) -> None:
        self._source_name = source_name
        self._block_size_tokens = block_size_tokens
        self._authored: dict[int, int] = {}
        self._meaning: dict[int, str] = {}

    def of(self, request_id: str, request: WekaRequest) -> tuple[int, ...]:
        """One id for each block of a prompt. Blocks without authored hash and partial last blocks are private."""
        whole, rest = divmod(request.input_tokens, self._block_size_tokens)
        ids = [self._authored.get(block) or self._name_authored(block) for block in request.hashes[:whole]]
        for block in range(len(ids), whole):
            ids.append(self._name("weka-full-block", f"private:missing:{request_id}:{block}"))
        if rest:
            ids.append(self._name("weka-partial-tail", f"{request_id}:{whole}:{request.input_tokens}"))
        return tuple(ids)

    def _name_authored(self, block: int) -> int:
        return self._authored.setdefault(block, self._name("weka-full-block", f"source:{self._source_name}:{block}"))

    def _name(self, domain: str, meaning: str) -> int:
        nonce = 0
        while True:
            digest = blake3(f"{domain}\0{meaning}\0{nonce}".encode()).digest(length=8)
            value = int.from_bytes(digest, "little")
            if self._meaning.setdefault(value, meaning) == meaning:
                return value
            nonce += 1
