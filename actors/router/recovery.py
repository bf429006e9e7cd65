"""The two ends of a numbered stream of KV events: a rank that can answer for it, and a router that notices gaps.

Owns: sequence numbers, gaps, replays and snapshots. Refuses to know: time, faults, and the index that events go into.

A router applies a rank's messages in the order of their numbers. A number that it knows is stale; one that is too high
waits, and the router asks the rank for what is missing. The rank answers with the missing events, or, if it has not
kept them or was asked for it, with a snapshot: clear everything, then store what is resident, parents first. What
arrives meanwhile waits, and is dropped if the answer covers it.

Source: event plane of NVIDIA Dynamo's router, as far as documented. Unlike there a rank's blocks are kept until the
snapshot comes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import attrs

from g2sim.actors.kv.events import BlocksCleared, BlocksRemoved, BlocksStored, Tier
from g2sim.actors.router.faults import RecoveryMode
from g2sim.actors.router.policy import KvEvent


@attrs.frozen(slots=True)
class Answer:
    """A rank's answer.

    Attributes:
        mode: what ``events`` are: all from the first that was asked for, or a snapshot.
        last: number of the last event that is covered.
        epoch: how often the rank had begun to count anew.
    """

    mode: RecoveryMode
    events: tuple[KvEvent, ...]
    last: int
    epoch: int


@attrs.frozen(slots=True)
class _Block:
    parent_hash: int | None
    position: int
    tokens_hash: int


class Publisher:
    """A rank's end: numbers its events, keeps the latest for replays, and knows what is resident.

    Args:
        worker, role, dp_rank: the rank.
        history_events: how many events it keeps.
        epoch: how often the rank has begun to count anew, in an earlier process of its worker.
    """

    def __init__(self, *, worker: int, role: str, dp_rank: int, history_events: int, epoch: int = 0) -> None:
        self._who: dict[str, Any] = {"worker": worker, "role": role, "dp_rank": dp_rank}
        self._history: deque[KvEvent] = deque(maxlen=history_events)
        self._blocks: dict[str, dict[int, _Block]] = {tier.value: {} for tier in Tier}
        self._event_id = -1
        self._began_empty = True
        self.epoch = epoch
        self.last = -1

    def publish(self, event: KvEvent) -> int:
        """Take the rank's next event; returns its number."""
        if isinstance(event, BlocksStored):
            parent, held = event.parent_hash, self._blocks[event.tier]
            for offset, (block_hash, tokens_hash) in enumerate(
                zip(event.block_hashes, event.token_hashes, strict=True)
            ):
                held[block_hash] = _Block(parent, event.start_position + offset, tokens_hash)
                parent = block_hash
        elif isinstance(event, BlocksRemoved):
            for block_hash in event.block_hashes:
                self._blocks[event.tier].pop(block_hash, None)
        else:
            for tier, held in self._blocks.items():
                if event.tier in (None, tier):
                    held.clear()
        self._event_id = event.event_id
        self._history.append(event)
        self.last += 1
        return self.last

    def reset(self) -> None:
        """Count from 0 again, with an empty history; blocks stay."""
        self._history.clear()
        self._began_empty = False
        self.epoch += 1
        self.last = -1

    def resident(self, tier: Tier) -> set[int]:
        """Hashes of the resident blocks."""
        return set(self._blocks[tier.value])

    def answer(self, first: int, mode: RecoveryMode) -> Answer:
        """What the rank says to a router that has everything before number ``first``."""
        missing = self.last + 1 - first
        kept = 0 <= missing <= len(self._history) and (first > 0 or self._began_empty)
        if mode is RecoveryMode.REPLAY and kept:
            events = tuple(self._history)[len(self._history) - missing :]
            return Answer(mode, events, self.last, self.epoch)
        return Answer(RecoveryMode.SNAPSHOT, self._snapshot(), self.last, self.epoch)

    def cleared(self) -> BlocksCleared:
        """The event that makes an index forget this rank."""
        return BlocksCleared(tier=None, event_id=self._event_id, **self._who)

    def _snapshot(self) -> tuple[KvEvent, ...]:
        events: list[KvEvent] = [self.cleared()]
        for tier, held in self._blocks.items():
            for block_hash, block in sorted(held.items(), key=lambda item: (item[1].position, item[0])):
                events.append(
                    BlocksStored(
                        tier=tier,
                        event_id=self._event_id,
                        parent_hash=block.parent_hash,
                        start_position=block.position,
                        block_hashes=(block_hash,),
                        token_hashes=(block.tokens_hash,),
                        **self._who,
                    )
                )
        return tuple(events)


class Receiver:
    """A router's end of one rank's stream.

    Args:
        epoch: messages from before the rank's ``epoch``-th count are stale: they belong to a connection that was given
            up. A rank that counts anew within a connection is not told apart from one that repeats itself.

    Attributes:
        last: number up to which everything is applied.
        asking: an answer is awaited; nothing is applied until it comes.
    """

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._held: dict[int, tuple[int, KvEvent]] = {}
        self._announced: dict[int, int] = {}  # epoch -> highest number heard of
        self.last = -1
        self.asking = False

    def hear(self, sequence: int, epoch: int, event: KvEvent | None) -> bool:
        """A message came; None: only word that ``sequence`` is the rank's last number. False if it was stale."""
        if epoch < self._epoch or sequence <= self.last or sequence in self._held:
            return event is None
        self._announced[epoch] = max(sequence, self._announced.get(epoch, -1))
        if event is not None:
            self._held[sequence] = epoch, event
        return True

    def ready(self) -> list[KvEvent]:
        """Events that can be applied, in order."""
        events: list[KvEvent] = []
        while not self.asking and self.last + 1 in self._held:
            self.last += 1
            events.append(self._held.pop(self.last)[1])
        return events

    @property
    def missing(self) -> int | None:
        """The first number that is missing, None without a gap that is to be asked about; after ``ready``."""
        if self.asking or max(self._announced.values(), default=-1) <= self.last:
            return None
        return self.last + 1

    def answered(self, answer: Answer) -> Sequence[KvEvent]:
        """The answer came; returns its events, which are to be applied before what is then ready."""
        self.asking = False
        self.last = answer.last
        self._epoch = max(self._epoch, answer.epoch)
        self._held = {
            sequence: held for sequence, held in self._held.items() if sequence > self.last and held[0] >= self._epoch
        }
        self._announced = {epoch: number for epoch, number in self._announced.items() if epoch >= self._epoch}
        return answer.events
