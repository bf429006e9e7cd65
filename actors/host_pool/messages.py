"""What a rank asks of a host pool, and what it is told. The same for a private tier and for the shared pool.

``client`` is the number under which the rank joined.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final

import attrs
import numpy as np

from g2sim.actors.host_pool.transfers import Link
from g2sim.actors.kv.blocks import BlockChain, ChainPart
from g2sim.actors.kv.numbers import Numbers
from g2sim.bus.plain import Plain

_SAME = attrs.cmp_using(eq=np.array_equal)


@attrs.frozen(kw_only=True, slots=True)
class Join:
    """Become a client. Reply: ``tuple[PoolChange, ...]``, the pool as it is, parents before children."""

    client: int
    worker: int
    role: str
    dp_rank: int
    link: Link
    actor: str


@attrs.frozen(kw_only=True, slots=True)
class Retire:
    """Stop being a client: loads under way are cancelled, stores not yet submitted rolled back. Reply: None.

    ``abrupt``: the client's process is gone, so that stores under way have no source any more, and are rolled back too.
    """

    client: int
    abrupt: bool = False


@attrs.frozen(kw_only=True, slots=True)
class Clear:
    """Lose all that is resident or under way to be; every client hears of it. Blocks of transfers under way keep their
    memory until these have ended. Reply: how many resident blocks no load was reading (int)."""

    client: int


class LookUpOutcome(enum.Enum):
    """MISS: nothing to restore. HIT: ``matched`` blocks can be restored. DEFERRED: wait until a transfer has ended."""

    MISS = "miss"
    HIT = "hit"
    DEFERRED = "deferred"


class LookUp(Plain):
    """How far does the pool go on from ``base_blocks`` of the chain? Makes the prompt's blocks recent.

    Attributes:
        latest_store: the request's own last store; while it is under way the answer is DEFERRED.
        loading: blocks that this rank is loading for other requests; matching one gives DEFERRED.
        again: the reply to the same look-up before, unless it was DEFERRED; it is the reply if nothing has changed.
    Reply: ``LookUpReply``.
    """

    __slots__ = ("again", "base_blocks", "chain", "client", "latest_store", "loading")

    def __init__(
        self,
        client: int,
        chain: BlockChain,
        base_blocks: int,
        latest_store: int | None,
        loading: tuple[ChainPart, ...],
        again: LookUpReply | None = None,
    ) -> None:
        self.client: Final = client
        self.chain: Final = chain
        self.base_blocks: Final = base_blocks
        self.latest_store: Final = latest_store
        self.loading: Final = loading
        self.again: Final = again

    def after(self, reply: LookUpReply) -> LookUp:
        """The same look-up, to be asked again after this reply."""
        return LookUp(
            client=self.client,
            chain=self.chain,
            base_blocks=self.base_blocks,
            latest_store=self.latest_store,
            loading=self.loading,
            again=reply,
        )


class LookUpReply(Plain):
    """``matched``: blocks beyond the base that a HIT restores. ``store_landed``: the latest store has ended.

    ``residency`` numbers the state of the pool that this speaks of.
    """

    __slots__ = ("matched", "outcome", "residency", "store_landed")

    def __init__(self, outcome: LookUpOutcome, matched: int, store_landed: bool, residency: int = 0) -> None:
        self.outcome: Final = outcome
        self.matched: Final = matched
        self.store_landed: Final = store_landed
        self.residency: Final = residency


class StoreOutcome(enum.Enum):
    """PRESENT: the pool knows every block. PREPARED: room is taken. RETRY: no room now. NOT_READY: a source is busy."""

    PRESENT = "present"
    PREPARED = "prepared"
    RETRY = "retry"
    NOT_READY = "not_ready"


@attrs.frozen(kw_only=True, slots=True)
class PrepareStore:
    """Take room for the blocks [start, stop) of a chain that the pool does not know; all or nothing.

    Attributes:
        busy_sources: positions among these whose device memory an earlier transfer still reads, int64[n].
    Reply: ``StoreReply``.
    """

    client: int
    request: int
    chain: BlockChain
    start: int
    stop: int
    busy_sources: Numbers = attrs.field(eq=_SAME)


@attrs.frozen(slots=True)
class StoreReply:
    """``positions``: places in the chain of the blocks that will be copied, when PREPARED, ascending, int64[n]."""

    outcome: StoreOutcome
    transfer: int | None
    positions: Numbers = attrs.field(eq=_SAME)


class QueueLoad(Plain):
    """Restore the blocks [start, stop) of a chain, all resident, not before ``from_ms``. Reply: the transfer (int)."""

    __slots__ = ("chain", "client", "from_ms", "request", "start", "stop")

    def __init__(self, client: int, request: int, chain: BlockChain, start: int, stop: int, from_ms: float) -> None:
        self.client: Final = client
        self.request: Final = request
        self.chain: Final = chain
        self.start: Final = start
        self.stop: Final = stop
        self.from_ms: Final = from_ms


class Tick(Plain):
    """Take note of what has ended. Reply: ``TickReply``."""

    __slots__ = ("client",)

    def __init__(self, client: int) -> None:
        self.client: Final = client


@attrs.frozen(slots=True)
class PassBoundary:
    """The end of a pass: tick, submit what was prepared, tick. Reply: ``BoundaryReply``."""

    client: int


class NewsAt(Plain):
    """Before when would the client's pass ends, and ``look_up`` asked again, come to nothing? Reply: time [ms].

    Until then they change nothing but how far bytes have moved, and what is recent, and are told nothing new; inf if
    nothing moves, -inf if there is news by now. That holds until somebody changes what the pool holds or moves; then
    the pool recalls deferred turns (see ``bus.kernel``).

    Who is ``carefree`` takes news later, too (``TakeNews``): the reply is inf, or -inf if it cannot stand by now.
    """

    __slots__ = ("carefree", "client", "look_up")

    def __init__(self, client: int, look_up: LookUp | None = None, carefree: bool = False) -> None:
        self.client: Final = client
        self.look_up: Final = look_up
        self.carefree: Final = carefree


class StandBy(Plain):
    """The client leaves turns out that would come to nothing (``NewsAt``). Reply: None.

    Until ``StandDown`` the pool does what they would have done: at each of ``pass_ends_ms`` it moves bytes, and makes
    the blocks of ``look_up`` recent as a pass starts. Without pass ends they are retries, in every round. ``order`` is
    the actor's place in the order of turns. For who is ``carefree`` it keeps what each of these pass ends would have
    been told.
    """

    __slots__ = ("carefree", "client", "look_up", "order", "pass_ends_ms")

    def __init__(
        self,
        client: int,
        order: int,
        look_up: LookUp | None,
        pass_ends_ms: Sequence[float] = (),
        carefree: bool = False,
    ) -> None:
        self.client: Final = client
        self.order: Final = order
        self.look_up: Final = look_up
        self.pass_ends_ms: Final = pass_ends_ms
        self.carefree: Final = carefree


class TakeNews(Plain):
    """What was the client told at the pass ends that are over, while it stood by, since it last took news?

    Reply: ``list[tuple[int, BoundaryReply]]``, with places in ``pass_ends_ms``, those with anything to tell, in order.
    """

    __slots__ = ("client",)

    def __init__(self, client: int) -> None:
        self.client: Final = client


class StandDown(Plain):
    """The client has turns of its own again. Reply: None."""

    __slots__ = ("client",)

    def __init__(self, client: int) -> None:
        self.client: Final = client


class HostProgress(Plain):
    """Sent by a pool to a client's actor: look again.

    ``due``: a transfer has ended or begun to move since the client last looked, so an idle rank acts at this instant;
    otherwise only residency has changed, which is news for those who follow it.
    """

    __slots__ = ("due",)

    def __init__(self, due: bool) -> None:
        self.due: Final = due


class PoolChange(Plain):
    """Blocks became resident (a run in prompt order) or left the pool.

    For a removal ``parent_hash``, ``start_position`` and ``tokens_hashes`` are empty.
    """

    __slots__ = ("block_hashes", "parent_hash", "start_position", "stored", "tokens_hashes")

    def __init__(
        self,
        stored: bool,
        block_hashes: tuple[int, ...],
        tokens_hashes: tuple[int, ...] = (),
        parent_hash: int | None = None,
        start_position: int = 0,
    ) -> None:
        self.stored: Final = stored
        self.block_hashes: Final = block_hashes
        self.tokens_hashes: Final = tokens_hashes
        self.parent_hash: Final = parent_hash
        self.start_position: Final = start_position


class Completion(Plain):
    """One of the client's own transfers has ended at ``end_ms``."""

    __slots__ = ("end_ms", "is_load", "request", "transfer")

    def __init__(self, transfer: int, request: int, is_load: bool, end_ms: float) -> None:
        self.transfer: Final = transfer
        self.request: Final = request
        self.is_load: Final = is_load
        self.end_ms: Final = end_ms


class TickReply(Plain):
    """What a client had not been told.

    Attributes:
        completions: its own ended transfers, in order of their end.
        progress: any transfer of the pool has ended since the last tick, so sleepers should look again.
        changes: what became resident or left, in order.
    """

    __slots__ = ("changes", "completions", "progress")

    def __init__(self, completions: tuple[Completion, ...], progress: bool, changes: tuple[PoolChange, ...]) -> None:
        self.completions: Final = completions
        self.progress: Final = progress
        self.changes: Final = changes


class BoundaryReply(Plain):
    """The two ticks of a pass boundary, and the stores submitted between them with their ends, where certain [ms]."""

    __slots__ = ("after", "before", "submitted")

    def __init__(self, before: TickReply, submitted: tuple[tuple[int, float | None], ...], after: TickReply) -> None:
        self.before: Final = before
        self.submitted: Final = submitted
        self.after: Final = after


NOTHING = TickReply((), False, ())
"""The reply to a tick that has nothing to tell."""

QUIET = BoundaryReply(NOTHING, (), NOTHING)
"""The reply to a pass boundary at which nothing is under way, to be told or to be submitted."""
