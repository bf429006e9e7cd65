"""The scheduler of one rank: a vLLM-style continuous batch over one GPU KV cache, with an optional host tier.

Owns: queues, the running list, what a pass does, and the rank's side of a prefill/decode hand-off.
Refuses to know: the bus and the clock (time is an argument), and whether its host tier is private or shared.

A pass happens, in state, at its start; callers show its results at its end. Where the host tier has to be asked, the
methods are generators that yield one of the messages of ``host_pool.messages`` and are sent the reply.

Source: vLLM scheduler of aisimulate-core 0.13.0; recordings in tests/oracle.
"""

from __future__ import annotations

import enum
import itertools
import sys
from collections import deque
from collections.abc import Callable, Collection, Generator, MutableSequence
from typing import Any, Final

import attrs

from g2sim.actors.config import HostScope, PreemptionMode, RankConfig, WorkerRole
from g2sim.actors.host_pool.messages import (
    NOTHING,
    QUIET,
    BoundaryReply,
    LookUp,
    LookUpOutcome,
    LookUpReply,
    PassBoundary,
    PoolChange,
    PrepareStore,
    QueueLoad,
    StoreOutcome,
    StoreReply,
    Tick,
    TickReply,
)
from g2sim.actors.kv.blocks import BlockChain, ChainPart, consecutive
from g2sim.actors.kv.events import Tier, removed_by_clear
from g2sim.actors.kv.numbers import NO_NUMBERS, BlockNumbers, Numbers
from g2sim.actors.traffic.request import RequestStatus
from g2sim.actors.worker.decode_run import DecodeRun
from g2sim.actors.worker.device_pool import DevicePool, Reservation
from g2sim.actors.worker.messages import (
    DestinationIsReserved,
    HandoffReply,
    HandoffReport,
    SourceIsHeld,
    SourceIsRejected,
)
from g2sim.actors.worker.sequence import EVERY_BLOCK, Load, RankRequest, Sequence, SequenceState
from g2sim.actors.worker.timing import PassTimer, PassTimes
from g2sim.bus.errors import InvariantViolation
from g2sim.bus.plain import Plain

HostTalk = Generator[Any, Any, None]
NO_LIMIT = sys.maxsize


@attrs.define
class StoredRun:
    """Blocks of one sequence that became resident on the device, as the first copies of their hashes.

    Nobody changes one; to have that checked would triple its cost.
    """

    parent_hash: int | None
    start_position: int
    block_hashes: tuple[int, ...]
    tokens_hashes: tuple[int, ...]


@attrs.define
class RemovedBlocks:
    """Hashes whose last device copy was evicted, in order. Nobody changes one, as with ``StoredRun``."""

    block_hashes: tuple[int, ...]


DeviceChange = StoredRun | RemovedBlocks


class Admission(Plain):
    """A sequence entered the running list. ``g1_tokens`` and ``host_tokens`` are None on a readmission."""

    __slots__ = ("g1_tokens", "host_tokens", "readmission", "request", "reused_tokens")

    def __init__(
        self, request: int, reused_tokens: int, g1_tokens: int | None, host_tokens: int | None, readmission: bool
    ) -> None:
        self.request: Final = request
        self.reused_tokens: Final = reused_tokens
        self.g1_tokens: Final = g1_tokens
        self.host_tokens: Final = host_tokens
        self.readmission: Final = readmission


class Ending(Plain):
    """A request ended in a pass."""

    __slots__ = ("request", "status")

    def __init__(self, request: int, status: RequestStatus) -> None:
        self.request: Final = request
        self.status: Final = status


class PassResult:
    """What one pass of one rank did.

    Attributes:
        emitted: requests that produced a token, in order.
        endings: requests that ended, in order.
        only_tokens: it is one of a run of decode passes, which do nothing else.
    """

    __slots__ = (
        "admissions",
        "compute_start_ms",
        "emitted",
        "end_ms",
        "endings",
        "only_tokens",
        "preempted",
        "prefill_tokens",
        "reports",
        "scheduled_requests",
        "scheduled_tokens",
    )

    def __init__(self) -> None:
        self.admissions: list[Admission] = []
        self.preempted: list[int] = []
        self.emitted: tuple[int, ...] = ()
        self.endings: list[Ending] = []
        self.reports: list[HandoffReport] = []
        self.scheduled_requests = 0
        self.scheduled_tokens = 0
        self.prefill_tokens = 0
        self.compute_start_ms = 0.0
        self.end_ms = 0.0
        self.only_tokens = False

    @property
    def is_pass(self) -> bool:
        """Whether anything was admitted, scheduled or put out; a preemption alone does not count."""
        return bool(self.scheduled_requests or self.admissions or self.endings or self.emitted)

    @property
    def progress(self) -> bool:
        """Whether anything happened that counts, hand-offs included."""
        return self.is_pass or bool(self.reports) or bool(self.preempted)


class _Give(enum.Enum):
    DONE = "done"
    BLOCKED = "blocked"
    PREEMPTED_ITSELF = "preempted itself"


class _Share:
    """What one sequence was given in the pass under way."""

    __slots__ = ("prefix", "prompt", "tokens")

    def __init__(self, tokens: int, prompt: int, prefix: int) -> None:
        self.tokens = tokens
        self.prompt = prompt
        self.prefix = prefix


class _Pass:
    """Selection state of the pass under way; the last three describe its prefill batch for the timing model.

    ``run``: the run of decode passes that it is one of so far; those who run have no shares yet.
    """

    __slots__ = ("any_preempted", "budget", "prefill_requests", "prefix_tokens", "prompt_tokens", "run", "shares")

    def __init__(self, budget: int, run: DecodeRun | None) -> None:
        self.budget = budget if run is None else budget - run.size
        self.run = run
        self.shares: dict[Sequence, _Share] = {}
        self.any_preempted = False
        self.prefill_requests = 0
        self.prompt_tokens = 0
        self.prefix_tokens = 0


class _Blocked:
    """Why nobody was admitted by the last pass that tried.

    Until a command, news of a transfer, or a pass that is not one of a run of decode passes, what it found can change
    in few ways only; ``Rank._is_blocked`` looks at these.

    Attributes:
        head: who was considered and had no room; None if nobody was considered.
        found: blocks of it that were on the device, and how many of them active, when that many had been evicted.
        look_up: what its host tier is to be asked again, None if it was not looked up there.
    """

    __slots__ = ("evicted_blocks", "found", "head", "look_up")

    def __init__(
        self,
        head: Sequence | None = None,
        found: tuple[int, int] = (0, 0),
        evicted_blocks: int = 0,
        look_up: LookUp | None = None,
    ) -> None:
        self.head = head
        self.found = found
        self.evicted_blocks = evicted_blocks
        self.look_up = look_up


class _Destination:
    """A pending destination; ``tried_at`` is the capacity generation at which its reservation was last refused."""

    __slots__ = ("handoff", "sequence", "tried_at")

    def __init__(self, handoff: int, sequence: Sequence) -> None:
        self.handoff = handoff
        self.sequence = sequence
        self.tried_at: int | None = None


class Rank:
    """See the module's text.

    Args:
        config: the rank's settings.
        role: what its pool does.
        client: its number at its host tier; no meaning without one.
        pass_times: answers for a timing from outside, None for the models that are built in.
        numbering: numbers blocks; shared with others of a deployment, or None for one of its own.

    Attributes:
        boundary: what its host tier is to be asked at each pass end, None without a tier.
        notes_changes: somebody hears of what the device holds; if not, ``device_changes`` and ``restored`` stay empty.
        canceled_left: canceled requests whose restores have ended, so that all they held is given back.
    """

    def __init__(
        self,
        config: RankConfig,
        role: WorkerRole,
        client: int = 0,
        pass_times: PassTimes | None = None,
        numbering: BlockNumbers | None = None,
    ) -> None:
        self.config = config
        self.role = role
        self.client = client
        self._pass_times = pass_times
        self._numbering = BlockNumbers() if numbering is None else numbering
        self.pool = DevicePool(config.gpu_blocks, self._numbering)
        self.running: list[Sequence] = []
        self.queue: deque[Sequence] = deque()
        self._connector_places: list[Sequence] = []
        self.device_changes: list[DeviceChange] = []
        self.host_changes: list[PoolChange] = []
        self.restored: list[DeviceChange] = []
        self.notes_changes = True
        self._decode_run: DecodeRun | None = None
        self._blocked: _Blocked | None = None
        self._answer: LookUpReply | None = None
        self._timer = PassTimer(config, pass_times)
        self._block_size = config.block_size_tokens
        self._max_seqs = config.max_seqs if config.max_seqs is not None else NO_LIMIT
        self._budget = config.max_batched_tokens if config.max_batched_tokens is not None else NO_LIMIT
        self._has_host = config.host is not None
        self.boundary = PassBoundary(client) if self._has_host else None
        self._holds = config.host is not None and config.host.scope is HostScope.CLUSTER_SHARED
        self._next_order = 0
        self._fence_ms = 0.0
        self._copy_out_ends_ms: dict[int, float] = {}
        self._loads: dict[int, Sequence] = {}
        self._loading: tuple[ChainPart, ...] = ()
        self.canceled_left: list[int] = []
        # Prefill/decode hand-off.
        self._generation = 0
        self._held: dict[int, Sequence] = {}
        self._pending: deque[_Destination] = deque()
        self._reserved: dict[int, tuple[Sequence, Reservation]] = {}
        self._materialised: list[Sequence] = []
        self._retry_due = False

    def fresh(self) -> Rank:
        """A rank with the same settings that has done nothing yet."""
        return Rank(self.config, self.role, self.client, self._pass_times, self._numbering)

    def requests(self) -> list[int]:
        """Requests that are running, or wait for it."""
        return [seq.request for seq in (*self.running, *self.connector, *self.queue)]

    def leaving(self) -> list[int]:
        """Canceled requests that have not been named by ``take_left``."""
        restored = [seq.request for seq in self._loads.values() if seq.state is SequenceState.ENDED]
        return [*self.canceled_left, *restored]

    def drop_changes(self) -> None:
        """Forget the changes that have been shown, or that nobody wants to see."""
        self.device_changes.clear()
        self.host_changes.clear()
        self.restored.clear()

    # -- commands

    def submit(self, given: RankRequest, handoff: int | None = None) -> None:
        """Put a request at the end of the waiting queue."""
        self._blocked = None
        self.queue.append(self._new_sequence(given, handoff))

    @property
    def connector(self) -> list[Sequence]:
        """The connector queue: sequences that wait for a transfer, or have waited for one, in their order.

        A place is kept while its owner is elsewhere, until everything before it has gone: a sequence that is admitted,
        preempted and then waits for a transfer again stands where it stood.
        """
        return [seq for seq in self._connector_places if seq.state is SequenceState.CONNECTOR]

    @property
    def ready(self) -> bool:
        """Whether a pass is worth starting."""
        return bool(self.running or self.queue) or self._retry_due or any(not seq.asleep for seq in self.connector)

    def clear(self, tiers: Collection[Tier]) -> tuple[int, int]:
        """Lose what is cached on the device, if that is among ``tiers``; the host tier is to be told by the caller.

        What is in use stays with its users, and nobody else finds it. A sequence that has KV, or waits for some, adds
        nothing to a cleared tier any more, unless it begins anew.

        Returns: device blocks that are free memory at once, and those that are with their last use.
        """
        self._blocked = None
        dropped: list[int] = []
        in_use: list[int] = []
        if Tier.DEVICE in tiers:
            dropped, in_use = map(self._numbering.hashes, self.pool.clear())
            untold = [(type(change) is StoredRun, change.block_hashes) for change in self.device_changes]
            self.device_changes.clear()
            gone = removed_by_clear(untold, dropped + in_use)
            if gone and self.notes_changes:
                self.device_changes.append(RemovedBlocks(gone))
            self._loading = ()
        destinations = [pending.sequence for pending in self._pending] + [seq for seq, _ in self._reserved.values()]
        with_kv = [seq for seq in (*self.running, *self.queue, *self.connector) if seq.block_count]
        for seq in (*with_kv, *self._loads.values(), *destinations):
            seq.keep_from(tiers)
        for seq in self.connector:
            seq.asleep = seq.asleep and seq.load is not None  # others may wait for a store that will not land
        return len(dropped), len(in_use)

    # -- hand-off

    @property
    def wants_reservation(self) -> bool:
        """Whether ``try_reservation`` has anything to do: something has changed since it was refused."""
        return self._retry_due or (bool(self._pending) and self._pending[0].tried_at != self._generation)

    @property
    def is_stuck(self) -> bool:
        """Whether a pass would come to nothing as the last one did, until a command or the host tier changes that."""
        return not self.running and self._blocked is not None and not self.wants_reservation

    @property
    def is_carefree(self) -> bool:
        """Whether nobody waits here, so that news of the host tier changes nothing for a run of decode passes."""
        return not (self.queue or self._connector_places or self._pending or self._loads or self._retry_due)

    @property
    def blocked_look_up(self) -> LookUp | None:
        """What a pass asks the host tier again, to find that the first of those who wait is blocked as before."""
        return None if self._blocked is None else self._blocked.look_up

    def reserve_destination(self, handoff: int, given: RankRequest, *, idle: bool) -> HandoffReply:
        """Join the pending destinations; tried at once on an ``idle`` rank, else at the next pass end."""
        sequence = self._new_sequence(given, handoff)
        limit = self.config.max_model_len_tokens
        if limit is not None and sequence.prompt_tokens >= limit:
            return HandoffReply(refused=f"a prompt of {sequence.prompt_tokens} tokens, but max_model_len is {limit}")
        blocks = self._blocks(sequence.prompt_tokens)
        if blocks > self.config.gpu_blocks:
            return HandoffReply(refused=f"a prompt of {blocks} blocks, but there are {self.config.gpu_blocks}")
        self._blocked = None
        self._pending.append(_Destination(handoff, sequence))
        return HandoffReply(reports=self.try_reservation() if idle else ())

    def try_reservation(self) -> tuple[HandoffReport, ...]:
        """Reserve for the oldest pending destination if something has changed since it was refused; at most one."""
        self._retry_due = False
        if not self._pending:
            return ()
        head = self._pending[0]
        if len(self.running) >= self._max_seqs:
            head.tried_at = self._generation
            return ()
        if head.tried_at == self._generation:
            return ()
        head.tried_at = self._generation
        sequence = head.sequence
        blocks = self._blocks(sequence.prompt_tokens)
        found = self._match(sequence)[0]
        reserved = self.pool.reserve(self._primaries(sequence, 0, found), blocks - found)
        if reserved is None:
            return ()
        reservation, removed = reserved
        self._note_removed(removed)
        if self.pool.still_copied_out(reservation.fresh):
            # The memory is still being read; the end of that copy is progress, and then this is tried again.
            self.pool.cancel(reservation)
            return ()
        self._blocked = None
        self._pending.popleft()
        self._reserved[head.handoff] = (sequence, reservation)
        return (DestinationIsReserved(head.handoff, sequence.request, blocks - found),)

    def activate_destination(self, handoff: int, cleared: Collection[Tier] = ()) -> int:
        """Turn a reservation into the request's blocks and queue it by its order of reservation. Returns the request.

        To be followed by ``try_reservation``. ``cleared``: as in ``ActivateDestination``.
        """
        self._blocked = None
        sequence, reservation = self._reserved.pop(handoff)
        sequence.keep_from(cleared)
        active = self.pool.active_blocks
        self._materialise(sequence, reservation, self._blocks(sequence.prompt_tokens), self.device_changes)
        sequence.computed = sequence.prompt_tokens
        _insert_by_order(self.queue, sequence)
        _insert_by_order(self._materialised, sequence)
        if self.pool.active_blocks < active:
            self._generation += 1
        return sequence.request

    def release_source(self, handoff: int) -> int:
        """Give the blocks of a held source back. Returns the request. To be followed by ``try_reservation``."""
        self._blocked = None
        sequence = self._held.pop(handoff)
        self._release_blocks(sequence)
        self._generation += 1
        return sequence.request

    # -- cancellation

    def has(self, request: int) -> bool:
        """Whether a queued, restoring or running sequence is this request's."""
        return self._find(request) is not None

    def computes(self, request: int) -> bool:
        """Whether it is in the running list, so that a pass in flight may be computing it."""
        return any(seq.request == request for seq in self.running)

    def cancel(self, request: int) -> bool:
        """Take a request off this rank for good, between its passes. To be followed by ``try_reservation``.

        Returns: whether all it held is given back. Blocks that a restore is filling are not, until it has ended;
        ``take_left`` names the request then.
        """
        seq = self._find(request)
        if seq is None:
            raise InvariantViolation(f"request {request} is canceled on a rank that does not have it")
        self._settle_run()
        self._blocked = None
        if seq.state is SequenceState.RUNNING:
            self.running.remove(seq)
        else:
            self._unqueue(seq)
        seq.state = SequenceState.ENDED
        self._generation += 1
        self._release_blocks(seq)
        return seq.load is None or seq.load.done

    def abandon(self, handoff: int) -> int | None:
        """Drop a held source, a pending destination or a reserved one. To be followed by ``try_reservation``.

        Returns: the request whose source was held, None if none was.
        """
        if handoff in self._held:
            return self.release_source(handoff)
        self._blocked = None
        reserved = self._reserved.pop(handoff, None)
        if reserved is not None:
            self.pool.cancel(reserved[1])
        else:
            self._pending = deque(pending for pending in self._pending if pending.handoff != handoff)
        self._generation += 1
        return None

    def take_left(self) -> list[int]:
        """What is in ``canceled_left``, which is empty then."""
        left, self.canceled_left = self.canceled_left, []
        return left

    def _find(self, request: int) -> Sequence | None:
        here = (*self.running, *self.queue, *self.connector)
        return next((seq for seq in here if seq.request == request), None)

    # -- the pass

    def decode_pass(self, now_ms: float, ask: Callable[[LookUp], LookUpReply]) -> PassResult | None:
        """``run_pass`` for two common cases, in which nobody is admitted.

        Every running sequence decodes, none ends, and nothing else happens; or nobody runs, and who waits can still not
        be admitted.

        Returns None if it is neither; what was done until that was found out, ``run_pass`` would have done first.

        Args:
            ask: asks the host tier.
        """
        waiting = bool(self.queue or self._connector_places)
        if waiting and self._blocked is None:
            return None
        if waiting and not self.running:
            return self._idle_pass(now_ms) if self._is_blocked(ask) else None
        run = self._run_with_room()
        if run is None or (waiting and not self._is_blocked(ask)):
            return None
        result = PassResult()
        self._decode(run, now_ms, result)
        return result

    def plan_decode_passes(self, end_ms: float, most: int) -> list[float]:
        """Ends [ms] of the decode passes that would follow one that ends at ``end_ms``, the last one that has begun.

        They follow each other as long as nothing comes between that changes this rank, or is news from its host tier.
        Empty if anything but one of them would follow, or the first of those who wait might find something else.

        Args:
            most: plan no more than that many.
        """
        run = self._decode_run
        if run is None or self.wants_reservation:
            return []
        passes = min(most, run.passes_left, run.passes_with(self._blocks_to_open()))
        if self.queue or self._connector_places:
            passes = min(passes, self._passes_blocked(run))
        if passes < 1:
            return []
        fixed_ms, start_ms = self._timer.fixed_decode_ms, self.compute_start_ms(end_ms)
        if fixed_ms is not None and start_ms == end_ms:
            ends_ms = list(itertools.accumulate(itertools.repeat(fixed_ms, passes), initial=end_ms))
            if ends_ms[-1] > ends_ms[-2]:  # else too short to move the clock, from some pass on
                return ends_ms[1:]
        ends_ms = []
        known_tokens, size = run.known_tokens, run.size
        decode_ms = self._timer.decode_ms
        for _ in range(passes):
            next_ms = start_ms + decode_ms(size, known_tokens)
            if next_ms <= end_ms:
                break
            ends_ms.append(next_ms)
            end_ms = start_ms = next_ms
            known_tokens += size
        return ends_ms

    def _blocks_to_open(self) -> int:
        """How many blocks decode passes can open with nobody preempted, and no copy-out to be waited for."""
        if self.pool.copy_outs and not self._holds:
            return 0
        return self.pool.available_blocks

    def _passes_blocked(self, run: DecodeRun) -> int:
        """In how many more passes of a run nothing changes for who waits, as far as the device goes.

        See ``_is_blocked``, which has found that nothing has changed by the pass that has begun.
        """
        blocked = self._blocked
        if blocked is None:
            return 0
        head = blocked.head
        if head is None or not self.config.prefix_caching:
            return NO_LIMIT
        found, active = blocked.found
        passes = NO_LIMIT
        if active < found:  # the others stay in use
            passes = run.passes_with(self.pool.blocks_before_eviction_of(head.numbers[:found]))
        if found < len(head.hashes):
            passes = min(passes, run.passes_without(head.hashes, found))
        return passes

    def take_decode_passes(self, passes: int) -> None:
        """Carry out that many of the planned passes: what ``decode_pass`` would do at their starts."""
        run = self._decode_run
        if run is None:
            raise InvariantViolation("decode passes are taken without a run of them")
        for _ in range(passes):
            for seq, after in run.due():
                self._extend(seq, after)
            run.count()

    def _run_with_room(self) -> DecodeRun | None:
        """The run that the next pass is one of, with room made for its tokens; None if it is to be more, or less."""
        run = self._decode_run
        if run is None or run.is_over:
            self._settle_run()
            run = self._decode_run = self._new_run()
            if run is None:
                return None
        due = run.due()
        if due:
            opening = [after for seq, after in due if after > seq.block_count * self._block_size]
            if len(opening) > self.pool.available_blocks:
                self._settle_run()  # somebody has to be preempted
                return None
            for seq, after in due:
                self._extend(seq, after)
        return run

    def _decode(self, run: DecodeRun, now_ms: float, result: PassResult) -> None:
        """Let everybody in the run have a token, and work out how long the pass takes."""
        start_ms = self.compute_start_ms(now_ms)
        result.only_tokens = True
        result.emitted = run.emitted
        result.scheduled_requests = result.scheduled_tokens = run.size
        result.compute_start_ms = start_ms
        result.end_ms = start_ms + self._timer.decode_ms(run.size, run.known_tokens)
        run.count()

    def _leave_run(self, work: _Pass) -> None:
        """More than a token each is to happen in a pass: write down what the run has done up to here, this pass too."""
        if work.run is None:
            return
        work.run = None
        self._settle_run()
        for seq in self.running:
            seq.computed += 1
            work.shares[seq] = _Share(1, 0, seq.prompt_tokens)

    def _idle_pass(self, now_ms: float) -> PassResult:
        result = PassResult()
        result.compute_start_ms = result.end_ms = self.compute_start_ms(now_ms)
        return result

    def _is_blocked(self, ask: Callable[[LookUp], LookUpReply]) -> bool:
        """Whether admitting would come to nothing again, for the same reason as last time.

        A run of decode passes takes memory and gives none back. It may evict blocks that the first in the queue was to
        reuse, or fill one that it can reuse. Its host tier is asked as a pass would ask it, which makes blocks recent;
        if it answers something else, the pass that follows takes that answer.
        """
        blocked = self._blocked
        if blocked is None:
            return False
        head = blocked.head
        if head is not None and self.config.prefix_caching:
            if self.pool.evicted_blocks != blocked.evicted_blocks:
                if self._match(head) != blocked.found:
                    return False
                blocked.evicted_blocks = self.pool.evicted_blocks
            found = blocked.found[0]
            if found < len(head.hashes) and self.pool.holds(int(head.numbers[found])):
                return False
        if blocked.look_up is None:
            return True
        reply = ask(blocked.look_up)
        if reply is blocked.look_up.again:
            return True
        same = reply == blocked.look_up.again
        if same:
            blocked.look_up = blocked.look_up.after(reply)
        else:
            self._answer = reply
        return same

    def _new_run(self) -> DecodeRun | None:
        """A run of the running list, None if a pass of it would be more than one token each."""
        running = self.running
        if self.role is WorkerRole.PREFILL or not 0 < len(running) <= self._budget:
            return None
        passes = NO_LIMIT
        size, has_host = self._block_size, self._has_host
        for seq in running:
            generated = seq.generated
            if generated == 0 or seq.computed != seq.prompt_tokens + generated - 1:
                return None
            if has_host and seq.store_cursor < seq.prompt_tokens // size:
                return None  # still to be offered to the host tier
            passes = min(passes, seq.answer_tokens - generated - 1)
        if passes < 1:
            return None
        return DecodeRun(running, passes, size, caches_blocks=self.config.prefix_caching)

    def _extend(self, seq: Sequence, after: int) -> None:
        """Let a decoding sequence open or fill the block that its next token needs; there is room."""
        size = self._block_size
        if after > seq.block_count * size:
            block, removed = self.pool.allocate_one()
            if removed >= 0 and self.notes_changes:
                self.device_changes.append(RemovedBlocks((self._numbering.hash_of(removed),)))
            seq.add_block(block)
            if self.pool.copy_outs:
                self._wait_for_copies(seq.blocks[-1:])
        if after // size > seq.sealed and self.config.prefix_caching:
            self._seal_next(seq)

    def _settle_run(self) -> None:
        """End the run of decode passes: its sequences say again how far they are."""
        if self._decode_run is not None:
            self._decode_run.settle()
            self._decode_run = None

    def run_pass(self, now_ms: float) -> Generator[Any, Any, PassResult]:
        """Decide and carry out one pass that starts at ``now_ms``; results become visible at ``result.end_ms``."""
        self._blocked = None
        result = PassResult()
        work = _Pass(self._budget, self._run_with_room())
        running = self.running
        idx = 0
        while work.run is None and idx < len(running) and work.budget > 0:
            outcome = self._give(running[idx], None, work, result)
            if outcome is _Give.DONE:
                idx += 1
            elif outcome is _Give.BLOCKED:
                break
            # A sequence that preempted itself has left the list, so idx names the next one already.
        if self.queue or self._connector_places:
            yield from self._admit(now_ms, work, result)
        if work.run is not None:
            self._decode(work.run, now_ms, result)
            return result
        if self._has_host:
            for seq in running:
                known_blocks = min(seq.computed, seq.prompt_tokens) // self._block_size
                if known_blocks > seq.store_cursor and seq in work.shares:
                    yield from self._offer_to_host(seq, known_blocks)
        self._finish(now_ms, work, result)
        return result

    def _admit(self, now_ms: float, work: _Pass, result: PassResult) -> HostTalk:
        size = self._block_size
        config = self.config
        while not work.any_preempted and len(self.running) < self._max_seqs and (work.budget > 0 or not self._has_host):
            seq = self._next_candidate()
            if seq is None:
                self._blocked = _Blocked()
                return
            if config.max_model_len_tokens is not None and seq.prompt_tokens >= config.max_model_len_tokens:
                self._leave_run(work)
                self._reject(seq, result)
                continue
            cached_tokens = 0
            if not seq.materialised:
                found, active = self._match(seq)
                device_tokens = found * size
                on_device = (found, active)
                look_up: LookUp | None = None
                reply: LookUpReply | None = None
                matched = 0
                if self._has_host:
                    if seq.load is not None and seq.load.done:
                        found = active = seq.load.prefix_blocks
                    elif seq.load is not None:
                        self._sleep(seq)
                        continue
                    else:
                        look_up = self._look_up(seq, found)
                        reply, self._answer = self._answer or (yield look_up), None
                        if reply.store_landed:
                            seq.latest_store = None
                        if reply.outcome is LookUpOutcome.DEFERRED:
                            self._sleep(seq)
                            continue
                        matched = reply.matched
                if not seq.preempted and self._blocks(seq.known) > config.gpu_blocks:
                    self._leave_run(work)
                    self._reject(seq, result)
                    continue
                if seq.generated < seq.output_tokens:
                    most = (seq.known - 1) // size
                    if found > most:
                        found = most
                        active = min(active, most)
                cached_tokens = found * size
                available = self.pool.available_blocks
                own = seq.load.prefix_blocks if seq.load is not None else 0
                needed = max(0, self._blocks(seq.known) - max(active, own))
                if matched:
                    available = max(0, available - self._headroom())
                if needed > available:
                    again = look_up.after(reply) if look_up is not None and reply is not None else None
                    self._blocked = _Blocked(seq, on_device, self.pool.evicted_blocks, again)
                    return
                if matched:
                    if not (yield from self._start_load(seq, device_tokens, matched, now_ms)):
                        return
                    self._sleep(seq)
                    continue
            self._leave_run(work)
            if self._give(seq, cached_tokens, work, result) is not _Give.DONE:
                return
            self._enter_running(seq, cached_tokens, result)
            if work.shares[seq].tokens == 0 and work.budget == 0:
                return
        if len(self.running) >= self._max_seqs:
            self._blocked = _Blocked()

    def _enter_running(self, seq: Sequence, reused_tokens: int, result: PassResult) -> None:
        self._unqueue(seq)
        self.running.append(seq)
        g1_tokens: int | None = reused_tokens
        host_tokens: int | None = 0
        if seq.load is not None:
            g1_tokens = min(seq.load.device_tokens, reused_tokens)
            host_tokens = reused_tokens - g1_tokens
            if seq.store_cursor != EVERY_BLOCK:
                seq.store_cursor = reused_tokens // self._block_size
            seq.load = None
        if seq.was_admitted or not self._has_host:
            g1_tokens = host_tokens = None
        result.admissions.append(Admission(seq.request, reused_tokens, g1_tokens, host_tokens, seq.was_admitted))
        seq.was_admitted = True
        seq.preempted = False
        seq.state = SequenceState.RUNNING

    def _finish(self, now_ms: float, work: _Pass, result: PassResult) -> None:
        """Produce tokens, let finished sequences go, and work out how long the pass takes."""
        start_ms = self.compute_start_ms(now_ms)
        prefill_ms = 0.0
        if work.prefill_requests and self.role is not WorkerRole.DECODE:
            prefill_ms = self._timer.prefill_ms(work.prefill_requests, work.prompt_tokens, work.prefix_tokens)
        finished: list[Sequence] = []
        ready: list[Sequence] = []
        decoding = 0
        decoding_tokens = 0
        aggregated = self.role is WorkerRole.AGGREGATED
        for seq in self.running:
            known = seq.prompt_tokens + seq.generated
            if seq.computed < known:
                continue
            if seq.generated >= seq.answer_tokens:
                finished.append(seq)
                continue
            ready.append(seq)
            share = work.shares.get(seq)
            if not (aggregated and seq.generated == 0 and share is not None and share.prompt > 0):
                decoding += 1
                decoding_tokens += known
        decode_ms = 0.0
        if decoding and self.role is not WorkerRole.PREFILL:
            decode_ms = self._timer.decode_ms(decoding, decoding_tokens)
        rejected, result.endings = result.endings, []
        for seq in finished:
            self._complete(seq, result)
            result.endings.append(Ending(seq.request, RequestStatus.COMPLETED))
        for seq in ready:
            seq.generated += 1
            if seq.generated >= seq.answer_tokens:
                self._complete(seq, result)
                result.endings.append(Ending(seq.request, RequestStatus.COMPLETED))
        result.emitted = tuple([seq.request for seq in ready])
        result.endings.extend(rejected)
        for share in work.shares.values():
            result.scheduled_tokens += share.tokens
            if share.prompt > 0:
                result.prefill_tokens += share.tokens
        result.scheduled_requests = len(work.shares)
        result.compute_start_ms = start_ms
        # Two additions in this order: the reference's results depend on it to the last bit.
        decode_start_ms = start_ms + prefill_ms
        result.end_ms = decode_start_ms + decode_ms

    # -- giving tokens

    def _give(self, seq: Sequence, cached_tokens: int | None, work: _Pass, result: PassResult) -> _Give:
        """Give a sequence its share of the budget; ``cached_tokens`` only when it comes from a queue."""
        known = seq.prompt_tokens + seq.generated
        before = seq.computed if seq.computed > 0 or cached_tokens is None else cached_tokens
        rest = known - before
        prompt_before = min(before, seq.prompt_tokens)
        if not self.config.chunked_prefill and 0 < seq.prompt_tokens - prompt_before > work.budget:
            return _Give.BLOCKED
        want = min(rest, work.budget)
        if want == 0 and rest > 0:
            return _Give.BLOCKED
        after = before + want
        size = self._block_size
        reuse_blocks = before // size if seq.computed == 0 else 0
        while -(-after // size) > seq.block_count and not self._allocate(seq, after, reuse_blocks):
            victim = self._preempt(result)
            if victim is None:
                return _Give.BLOCKED
            work.any_preempted = True
            share = work.shares.pop(victim, None)
            if share is not None:
                work.budget += share.tokens
                if share.prompt > 0:
                    work.prefill_requests -= 1
                    work.prompt_tokens -= share.prefix + share.prompt
                    work.prefix_tokens -= share.prefix
            if victim is seq:
                return _Give.PREEMPTED_ITSELF
        seq.computed = after
        if after // size > seq.sealed and self.config.prefix_caching:
            self._seal(seq, after // size)
        prompt = min(after, seq.prompt_tokens) - prompt_before
        work.shares[seq] = _Share(want, prompt, prompt_before)
        if prompt > 0:
            work.prefill_requests += 1
            work.prompt_tokens += prompt_before + prompt
            work.prefix_tokens += prompt_before
        work.budget -= want
        return _Give.DONE

    def _allocate(self, seq: Sequence, target_tokens: int, reuse_blocks: int) -> bool:
        """Blocks for ``target_tokens``; the first ``reuse_blocks`` of a new sequence are cache hits."""
        have = seq.block_count
        hit_count = max(0, reuse_blocks - have)
        hits = self._primaries(seq, have, have + hit_count)
        allocated = self.pool.allocate(hits, self._blocks(target_tokens) - have - hit_count)
        if allocated is None:
            return False
        blocks, removed = allocated
        self._note_removed(removed)
        seq.add_blocks(blocks)
        if hit_count:
            seq.sealed = max(seq.sealed, have + hit_count)
        self._wait_for_copies(blocks[hit_count:])
        return True

    def _wait_for_copies(self, blocks: Numbers) -> None:
        """Compute with memory that has been taken anew must not start before it is read no more."""
        for transfer in self.pool.still_copied_out(blocks):
            self._raise_fence(transfer)

    def _primaries(self, seq: Sequence, start: int, stop: int) -> Numbers:
        """The copies that a sequence's blocks from ``start`` to ``stop`` are to use, which have been found."""
        return self.pool.primaries(seq.numbers[start:stop]) if start < stop else NO_NUMBERS

    def _seal(self, seq: Sequence, stop: int) -> None:
        """Enter the blocks up to ``stop`` under their hashes."""
        start = seq.sealed
        for _ in range(len(seq.hashes), stop):
            seq.learn_next_hash()
        fresh = self.pool.cache(seq.blocks[start:stop], seq.numbers[start:stop])
        seq.sealed = stop
        if self.notes_changes:
            self.device_changes += _stored_runs(seq, start, fresh)

    def _seal_next(self, seq: Sequence) -> None:
        """``_seal`` a single block."""
        position = seq.sealed
        if position == len(seq.hashes):
            seq.learn_next_hash()
        is_first = self.pool.cache_one(seq.block(position), int(seq.numbers[position]))
        seq.sealed = position + 1
        if is_first and self.notes_changes:
            self.device_changes += _stored_runs(seq, position, [0])

    def _preempt(self, result: PassResult) -> Sequence | None:
        if not self.running:
            return None
        victim = self.running.pop(-1 if self.config.preemption is PreemptionMode.LIFO else 0)
        if victim.latest_store is not None:
            self._raise_fence(victim.latest_store)
        victim.state = SequenceState.QUEUED
        victim.preempted = True
        victim.computed = 0
        self._release_blocks(victim)
        self.queue.appendleft(victim)
        self._generation += 1
        result.preempted.append(victim.request)
        return victim

    def _complete(self, seq: Sequence, result: PassResult) -> None:
        self.running.remove(seq)
        self._blocked = None
        self._generation += 1
        if self.role is WorkerRole.PREFILL and seq.handoff is not None:
            seq.state = SequenceState.HELD
            self._held[seq.handoff] = seq
            result.reports.append(SourceIsHeld(seq.handoff, seq.request, seq.kept_from))
            return
        seq.state = SequenceState.ENDED
        self._release_blocks(seq)

    def _reject(self, seq: Sequence, result: PassResult) -> None:
        """Take a sequence out of its queue for good. ``_finish`` puts these endings behind the others."""
        self._unqueue(seq)
        if seq.block_count:
            raise InvariantViolation(f"request {seq.request} is rejected while it owns blocks")
        seq.state = SequenceState.ENDED
        result.endings.append(Ending(seq.request, RequestStatus.REJECTED))
        if seq.handoff is not None:
            result.reports.append(SourceIsRejected(seq.handoff, seq.request))

    def _release_blocks(self, seq: Sequence) -> None:
        self.pool.release(seq.blocks)
        seq.begin_anew()

    # -- queues

    def _next_candidate(self) -> Sequence | None:
        """The sequence whose turn it is to be admitted, None to stop."""
        while self._materialised and not (
            self._materialised[0].state is SequenceState.QUEUED and self._materialised[0].materialised
        ):
            self._materialised.pop(0)
        if self._pending or (self.role is WorkerRole.DECODE and self._has_host and self._materialised):
            return self._materialised[0] if self._materialised else None
        places = self._connector_places
        while places and places[0].state is not SequenceState.CONNECTOR:
            places.pop(0)
        for seq in places:
            if seq.state is SequenceState.CONNECTOR and not seq.asleep:
                return seq
        return self.queue[0] if self.queue else None

    def _unqueue(self, seq: Sequence) -> None:
        if seq.state is not SequenceState.CONNECTOR:
            self.queue.remove(seq)
        seq.asleep = False

    def _sleep(self, seq: Sequence) -> None:
        """Let a sequence wait for a transfer, in its place in the connector queue."""
        if seq.state is not SequenceState.CONNECTOR:
            self._unqueue(seq)
            seq.state = SequenceState.CONNECTOR
            if seq not in self._connector_places:
                self._connector_places.append(seq)
        seq.asleep = True

    # -- host tier

    def _look_up(self, seq: Sequence, base_blocks: int) -> LookUp:
        return LookUp(
            client=self.client,
            chain=seq.chain,
            base_blocks=base_blocks,
            latest_store=seq.latest_store,
            loading=self._loading,
        )

    def _start_load(self, seq: Sequence, device_tokens: int, matched: int, now_ms: float) -> Generator[Any, Any, bool]:
        base = device_tokens // self._block_size
        reserved = self.pool.reserve(self._primaries(seq, 0, base), matched)
        if reserved is None:
            return False
        reservation, removed = reserved
        self._note_removed(removed)
        from_ms = now_ms
        for transfer in self.pool.still_copied_out(reservation.fresh):
            from_ms = max(from_ms, self._copy_out_ends_ms[transfer])
        transfer = yield QueueLoad(
            client=self.client,
            request=seq.request,
            chain=seq.chain,
            start=base,
            stop=base + matched,
            from_ms=from_ms,
        )
        part = ChainPart(seq.chain, base, base + matched)
        seq.load = Load(reservation, part, device_tokens, base + matched, self._blocks(seq.known))
        self._loads[transfer] = seq
        self._loading = (*self._loading, part)
        return True

    def _headroom(self) -> int:
        """Blocks that are spoken for although nobody has reserved them: rests of prompts under way, tails of loads."""
        rest = 0
        for seq in self.running:
            if seq.computed < seq.prompt_tokens:
                rest += max(0, self._blocks(seq.known) - seq.block_count)
        for seq in self.connector:
            if seq.load is not None:
                rest += seq.load.tail_blocks
        return rest

    def _offer_to_host(self, seq: Sequence, stop: int) -> HostTalk:
        """Store what the pass adds, up to ``stop``, to the whole prompt blocks that the tier has been offered."""
        start = seq.store_cursor
        pool = self.pool
        busy = pool.copied_out(seq.blocks[start:stop]) + start
        reply: StoreReply = yield PrepareStore(
            client=self.client, request=seq.request, chain=seq.chain, start=start, stop=stop, busy_sources=busy
        )
        if reply.outcome is StoreOutcome.PRESENT:
            seq.store_cursor = stop
        elif reply.outcome is StoreOutcome.PREPARED:
            if reply.transfer is None:
                raise InvariantViolation(f"store of request {seq.request} is prepared without a transfer")
            pool.begin_copy_out(seq.blocks[reply.positions], reply.transfer, hold=self._holds)
            seq.latest_store = reply.transfer
            seq.store_cursor = stop

    def end_pass(self, reply: BoundaryReply) -> None:
        """The host tier's part of a pass end: its reply to ``boundary``, when the pass's results become visible."""
        if reply is QUIET:
            return
        self._take_note(reply.before)
        for transfer, end_ms in reply.submitted:
            if end_ms is not None:
                self._copy_out_ends_ms[transfer] = end_ms
        self._take_note(reply.after)

    def tick(self) -> HostTalk:
        """Hear from the host tier while no pass is in flight."""
        reply: TickReply = yield Tick(self.client)
        self._take_note(reply)

    def _take_note(self, reply: TickReply) -> None:
        if reply is NOTHING:
            return
        self._blocked = None
        self.host_changes.extend(reply.changes)
        for completion in reply.completions:
            if not completion.is_load:
                self.pool.end_copy_out(completion.transfer)
                self._copy_out_ends_ms.pop(completion.transfer, None)
        for completion in reply.completions:
            if completion.is_load:
                self._finish_load(self._loads.pop(completion.transfer))
        if reply.progress:
            for seq in self.connector:
                seq.asleep = False
            if self._pending:
                self._generation += 1
                self._retry_due = True

    def _finish_load(self, seq: Sequence) -> None:
        load = seq.load
        if load is None:
            raise InvariantViolation(f"request {seq.request} has no load to finish")
        if not load.cleared:
            self._loading = tuple([part for part in self._loading if part is not load.part])
        if seq.state is SequenceState.ENDED:
            self.pool.cancel(load.reservation)
            load.done = True
            self.canceled_left.append(seq.request)
            self._generation += 1
            return
        self._materialise(seq, load.reservation, load.prefix_blocks, self.restored)
        load.done = True

    def _materialise(self, seq: Sequence, reservation: Reservation, stop: int, changes: list[DeviceChange]) -> None:
        """Turn a reservation for the first ``stop`` blocks into the sequence's blocks, whole ones cached."""
        pool = self.pool
        seq.add_blocks(pool.activate_hits(reservation))
        start = seq.block_count
        seq.add_blocks(pool.take_private(reservation, stop - start))
        whole = min(stop, len(seq.chain))
        if self.config.prefix_caching and max(start, seq.sealed) < whole:
            fresh = pool.cache(seq.blocks[start:whole], seq.numbers[start:whole])
            if self.notes_changes:
                changes += _stored_runs(seq, start, fresh)
        seq.sealed = max(seq.sealed, whole)

    def _raise_fence(self, transfer: int) -> None:
        """Compute must not start before this copy-out has ended; unknown ends belong to shared pools, which hold."""
        end_ms = self._copy_out_ends_ms.get(transfer)
        if end_ms is not None and end_ms > self._fence_ms:
            self._fence_ms = end_ms

    def compute_start_ms(self, now_ms: float) -> float:
        """When a pass that starts now can compute [ms]."""
        return max(now_ms, self._fence_ms) if self._has_host else now_ms

    # -- small things

    def _new_sequence(self, given: RankRequest, handoff: int | None) -> Sequence:
        sequence = Sequence(given, self._next_order, handoff, self._block_size, self._numbering)
        sequence.answer_tokens = self.config.answer_tokens(given.prompt.length, given.output_tokens)
        sequence.was_admitted = self.role in given.admitted_in
        self._next_order += 1
        return sequence

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_size)

    def _match(self, seq: Sequence) -> tuple[int, int]:
        return self.pool.match(seq.numbers[: len(seq.hashes)]) if self.config.prefix_caching else (0, 0)

    def _note_removed(self, numbers: Numbers) -> None:
        if len(numbers) and self.notes_changes:
            self.device_changes.append(RemovedBlocks(tuple(self._numbering.hashes(numbers))))

    # -- for people and checks

    def cached_blocks(self, chain: BlockChain) -> int:
        """How many leading blocks of a prompt are cached on the device."""
        return self.pool.match(chain.numbers(self._numbering))[0]

    def cached_hashes(self) -> set[int]:
        """Hashes of all blocks that are cached on the device."""
        return set(self._numbering.hashes(self.pool.resident_numbers()))

    def waiting(self) -> list[str]:
        """One line for each request on this rank, and what it waits for."""
        self._settle_run()
        room = f"{self.pool.available_blocks} of {self.config.gpu_blocks} GPU blocks available"
        lines = [
            f"request {seq.request} holds {seq.block_count} blocks for its hand-off" for seq in self._held.values()
        ]
        for seq, _ in self._reserved.values():
            lines.append(f"request {seq.request} waits for its KV, its blocks are reserved")
        for head in self._pending:
            needed = self._blocks(head.sequence.prompt_tokens)
            lines.append(f"request {head.sequence.request} waits for a reservation of {needed} GPU blocks ({room})")
        lines += [
            f"request {seq.request} is running, {seq.answer_tokens - seq.generated} tokens left" for seq in self.running
        ]
        for seq in [*self.connector, *self.queue]:
            needed = self._blocks(seq.known)
            if seq.load is not None and not seq.load.done:
                lines.append(f"request {seq.request} waits for {len(seq.load.part)} blocks from the host tier")
            elif seq.asleep:
                lines.append(f"request {seq.request} waits for a host transfer to end")
            elif not self.config.chunked_prefill and seq.prompt_tokens > self._budget:
                lines.append(
                    f"request {seq.request} waits for a pass with a budget of {seq.prompt_tokens} tokens; the budget "
                    f"is {self._budget} and chunked prefill is off"
                )
            elif needed > self.config.gpu_blocks:
                lines.append(
                    f"request {seq.request} waits for {needed} GPU blocks, more than the {self.config.gpu_blocks} "
                    "there are"
                )
            else:
                lines.append(f"request {seq.request} waits for {needed} GPU blocks ({seq.block_count} its own; {room})")
        return lines


def _insert_by_order(sequences: MutableSequence[Sequence], new: Sequence) -> None:
    """Put a sequence before the first one with a larger order number."""
    at = next((idx for idx, other in enumerate(sequences) if other.order > new.order), len(sequences))
    sequences.insert(at, new)


def _stored_runs(seq: Sequence, start: int, fresh: list[int] | Numbers) -> list[DeviceChange]:
    """One change for each contiguous run of positions; ``fresh`` counts them from ``start``."""
    return [
        StoredRun(
            seq.hashes[start + first - 1] if start + first else None,
            start + first,
            tuple(seq.hashes[start + first : start + stop]),
            tuple(seq.tokens_hashes[start + first : start + stop]),
        )
        for first, stop in consecutive(fresh)
    ]
