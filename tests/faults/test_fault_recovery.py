"""Both ends of a numbered stream: gaps, replays, snapshots, stale messages; and the line between them."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from g2sim.actors.config import TieBreak, WorkerRole
from g2sim.actors.kv.events import BlocksCleared, BlocksRemoved, BlocksStored, Tier
from g2sim.actors.router.faults import Fault, FaultKind, RecoveryMode
from g2sim.actors.router.line import Line
from g2sim.actors.router.policy import KvEvent
from g2sim.actors.router.pool import Pool
from g2sim.actors.router.recovery import Answer, Publisher, Receiver
from g2sim.bus.streams import RandomStream

DEVICE, HOST = Tier.DEVICE, Tier.HOST_PINNED
WHO: dict[str, Any] = {"worker": 0, "role": "aggregated", "dp_rank": 0}


def stored(event_id: int, hashes: list[int], parent: int | None = None, pos: int = 0, tier: Tier = DEVICE) -> KvEvent:
    """A block's tokens hash is its block hash + 1000."""
    return BlocksStored(
        event_id=event_id,
        tier=tier.value,
        parent_hash=parent,
        start_position=pos,
        block_hashes=tuple(hashes),
        token_hashes=tuple(one + 1000 for one in hashes),
        **WHO,
    )


def removed(event_id: int, hashes: list[int], tier: Tier = DEVICE) -> KvEvent:
    return BlocksRemoved(event_id=event_id, tier=tier.value, block_hashes=tuple(hashes), **WHO)


def blank_pool() -> Pool:
    return Pool(
        role=WorkerRole.AGGREGATED,
        workers=1,
        dp_size=1,
        block_size_tokens=4,
        max_batched_tokens=None,
        gpu_blocks=64,
        tie_break=TieBreak.LOWEST,
        stream=lambda name: RandomStream(0, name),
    )


class Router:
    """An index behind a receiver, as a router has it; ``held_by`` says what it believes."""

    def __init__(self) -> None:
        self.pool = blank_pool()
        self.receiver = Receiver(0)

    def hear(self, sequence: int, event: KvEvent | None, epoch: int = 0) -> bool:
        fresh = self.receiver.hear(sequence, epoch, event)
        self.apply(self.receiver.ready())
        return fresh

    def ask(self, publisher: Publisher, mode: RecoveryMode = RecoveryMode.REPLAY) -> Answer:
        answer = publisher.answer(self.receiver.last + 1, mode)
        self.receiver.asking = True
        return answer

    def answered(self, answer: Answer) -> None:
        self.apply([*self.receiver.answered(answer), *self.receiver.ready()])

    def apply(self, events: list[KvEvent]) -> None:
        for event in events:
            self.pool.apply(event)
        self.pool.check()

    def holds(self, tier: Tier = DEVICE) -> set[int]:
        return set(self.pool.believed(0, tier))


def publisher_of(*events: KvEvent, history: int = 100) -> Publisher:
    publisher = Publisher(**WHO, history_events=history)
    for event in events:
        publisher.publish(event)
    return publisher


def test_f11_a_clear_empties_every_tier_and_a_later_store_is_taken() -> None:
    router = Router()
    router.hear(0, stored(0, [1, 2, 3]))
    router.hear(1, stored(1, [1, 2, 3], tier=HOST))
    router.hear(2, BlocksCleared(event_id=2, tier=None, **WHO))
    assert router.holds() == router.holds(HOST) == set()
    router.hear(3, stored(3, [1]))
    assert router.holds() == {1}


def test_f12_a_clear_that_is_overtaken_is_applied_in_its_place() -> None:
    """#10, #12, #11 clear: {2} in the end, one open gap in between, never {} after #12 or {1, 2}."""
    router = Router()
    router.receiver.last = 9
    router.hear(10, stored(10, [1]))
    router.hear(12, stored(12, [2]))
    assert (router.holds(), router.receiver.missing) == ({1}, 11)
    router.hear(11, BlocksCleared(event_id=11, tier=None, **WHO))
    assert (router.holds(), router.receiver.missing) == ({2}, None)


def test_f14_one_lost_event_is_one_gap_and_costs_nothing_else() -> None:
    """Blocks 1 and 2 are never dropped; what follows the gap waits for the replay."""
    events = [stored(0, [1, 2]), stored(1, [3], 2, 2), removed(2, [3]), stored(3, [4], 2, 2)]
    publisher, router = publisher_of(*events), Router()
    for sequence in (0, 1, 3):
        router.hear(sequence, events[sequence])
    assert (router.holds(), router.receiver.missing) == ({1, 2, 3}, 2)
    router.answered(router.ask(publisher))
    assert (router.holds(), router.receiver.missing) == ({1, 2, 4}, None)


def test_f15_a_publisher_that_counts_anew_is_no_gap_and_no_repeat_once_it_is_known() -> None:
    publisher, router = publisher_of(*(stored(k, [10 + k]) for k in range(8))), Router()
    for sequence in range(8):
        router.hear(sequence, stored(sequence, [10 + sequence]))
    publisher.reset()
    assert publisher.publish(removed(8, list(range(10, 18)))) == 0
    assert not router.hear(0, removed(8, list(range(10, 18)))), "taken for a repeat: the router cannot know"
    router.receiver = Receiver(publisher.epoch)
    router.answered(router.ask(publisher))
    assert router.holds() == set()
    for event in (stored(9, [1, 2]), stored(10, [3], 2, 2)):
        assert router.hear(publisher.publish(event), event, publisher.epoch)
    assert (router.holds(), router.receiver.missing) == ({1, 2, 3}, None)
    assert not router.hear(20, stored(7, [99]), epoch=0), "from the connection before"


def test_f16_a_snapshot_covers_what_waited_and_there_is_one_recovery() -> None:
    router = Router()
    router.receiver.last = 54
    router.hear(56, removed(56, [7]))
    assert router.receiver.missing == 55
    router.receiver.asking = True
    router.hear(57, removed(57, [8]))
    router.hear(58, stored(58, [4], 3, 3))
    snapshot = (BlocksCleared(event_id=57, tier=None, **WHO), stored(57, [1, 2, 3]))
    router.answered(Answer(RecoveryMode.SNAPSHOT, snapshot, 57, 0))
    assert (router.holds(), router.receiver.missing) == ({1, 2, 3, 4}, None)
    router.hear(59, removed(59, [4]))
    assert (router.holds(), router.receiver.missing, router.receiver.last) == ({1, 2, 3}, None, 59)


def test_a_loss_with_nothing_behind_it_shows_with_a_heartbeat_also_while_an_answer_is_awaited() -> None:
    events = [stored(0, [1]), stored(1, [2]), stored(2, [3])]
    publisher, router = publisher_of(*events[:2]), Router()
    router.hear(0, events[0])
    assert router.hear(1, None)
    assert router.receiver.missing == 1
    answer = router.ask(publisher)
    publisher.publish(events[2])
    router.hear(2, None)
    router.answered(answer)
    assert (router.holds(), router.receiver.missing) == ({1, 2}, 2)


@pytest.mark.parametrize(
    ("history", "reset", "first", "mode"),
    [
        (4, False, 0, RecoveryMode.REPLAY),
        (3, False, 0, RecoveryMode.SNAPSHOT),
        (3, False, 1, RecoveryMode.REPLAY),
        (0, False, 4, RecoveryMode.REPLAY),
        (0, False, 3, RecoveryMode.SNAPSHOT),
        (4, False, 5, RecoveryMode.SNAPSHOT),
        (4, True, 0, RecoveryMode.SNAPSHOT),
    ],
)
def test_a_rank_that_cannot_replay_so_far_back_sends_a_snapshot(
    history: int, reset: bool, first: int, mode: RecoveryMode
) -> None:
    publisher = publisher_of(*(stored(k, [k + 1]) for k in range(4)), history=history)
    if reset:
        publisher.reset()
    assert publisher.answer(first, RecoveryMode.REPLAY).mode is mode
    assert publisher.answer(first, RecoveryMode.SNAPSHOT).mode is RecoveryMode.SNAPSHOT


def test_a_snapshot_has_both_tiers_and_parents_first() -> None:
    publisher = publisher_of(stored(0, [1, 2]), stored(1, [2], 1, 1, HOST), stored(2, [1], tier=HOST), removed(3, [2]))
    router = Router()
    router.answered(router.ask(publisher, RecoveryMode.SNAPSHOT))
    assert (router.holds(), router.holds(HOST)) == ({1}, {1, 2})


@st.composite
def streams(draw: Any) -> list[KvEvent]:
    """What a rank may publish: chains that grow and shrink at their tails on two tiers, and clears."""
    held: dict[Tier, list[int]] = {DEVICE: [], HOST: []}
    events: list[KvEvent] = []
    for event_id in range(draw(st.integers(1, 25))):
        tier = draw(st.sampled_from([DEVICE, HOST]))
        chain = held[tier]
        action = draw(st.integers(0, 9))
        if action == 0:
            events.append(BlocksCleared(event_id=event_id, tier=tier.value, **WHO))
            chain.clear()
        elif action < 4 and chain:
            events.append(removed(event_id, [chain.pop()], tier))
        else:
            block = len(chain) + 1
            events.append(stored(event_id, [block], chain[-1] if chain else None, len(chain), tier))
            chain.append(block)
    return events


@given(streams(), st.randoms(use_true_random=False), st.sampled_from(RecoveryMode), st.integers(0, 30))
def test_whatever_is_lost_doubled_or_shuffled_the_index_gets_right(
    events: list[KvEvent], chance: random.Random, mode: RecoveryMode, history: int
) -> None:
    publisher, router = publisher_of(history=history), Router()
    under_way: list[tuple[int, int, KvEvent | None]] = []
    answers: list[Answer] = []
    for event in events:
        if chance.random() < 0.1:
            publisher.reset()
            router.receiver = Receiver(publisher.epoch)
            answers = [router.ask(publisher, mode)]
        message = publisher.publish(event), publisher.epoch, event
        under_way += [message] * chance.choice([0, 1, 1, 2])
        chance.shuffle(under_way)
        while under_way and chance.random() < 0.6:
            sequence, epoch, heard = under_way.pop()
            router.hear(sequence, heard, epoch)
        if answers and chance.random() < 0.5:
            router.answered(answers.pop())
        if router.receiver.missing is not None:
            answers.append(router.ask(publisher, mode))
    for sequence, epoch, heard in under_way:
        router.hear(sequence, heard, epoch)
    router.hear(publisher.last, None, publisher.epoch)
    rounds = 0
    while answers or router.receiver.missing is not None:
        router.answered(answers.pop() if answers else router.ask(publisher, mode))
        rounds += 1
        assert rounds <= 2
    assert router.holds(DEVICE) == publisher.resident(DEVICE)
    assert router.holds(HOST) == publisher.resident(HOST)


def line(*faults: Fault, lag_ms: float = 0.0) -> Line:
    made: dict[str, RandomStream] = {}
    return Line(faults, lag_ms, lambda name: made.setdefault(name, RandomStream(1, name)))


def fault(kind: FaultKind, **change: Any) -> Fault:
    return Fault(**{"name": kind.value, "kind": kind, "from_ms": 10.0, "until_ms": 20.0, **change})


def test_a_fault_strikes_from_its_beginning_until_just_before_its_end_and_only_whom_it_names() -> None:
    cut = line(fault(FaultKind.OUTAGE, worker=1), lag_ms=2.0)
    assert cut.carry(1, 0, 9.5).due_ms == (11.5,)
    assert cut.carry(1, 0, 10.0).due_ms == ()
    assert cut.carry(0, 0, 10.0).due_ms == (12.0,)
    assert cut.carry(1, 0, 20.0).due_ms == (22.0,)


def test_messages_keep_their_order_when_a_lag_ends_and_lose_it_only_to_reordering() -> None:
    slow = line(fault(FaultKind.LAG, lag_ms=30.0, lag_max_ms=30.0))
    assert [slow.carry(0, 0, at_ms).due_ms for at_ms in (19.0, 20.0, 60.0)] == [(49.0,), (49.0,), (60.0,)]
    drawn = line(fault(FaultKind.LAG, lag_ms=1.0, lag_max_ms=50.0))
    due = [drawn.carry(0, 0, 10.0 + k / 10).due_ms[0] for k in range(90)]
    assert due == sorted(due)
    assert len(set(due)) > 3
    shuffled = line(fault(FaultKind.REORDERING, hold_ms=5.0, probability=0.5))
    due = [shuffled.carry(0, 0, 10.0 + k / 10).due_ms[0] for k in range(90)]
    assert due != sorted(due)


def test_each_fault_draws_from_a_stream_of_its_own_and_only_while_it_is_active() -> None:
    loss = fault(FaultKind.LOSS, probability=0.5)
    alone = line(loss)
    beside = line(fault(FaultKind.DUPLICATION, probability=0.5), loss)
    times = [float(k) / 4 for k in range(100)]
    lost = [not alone.carry(0, 0, at_ms).due_ms for at_ms in times]
    assert [not beside.carry(0, 0, at_ms).due_ms for at_ms in times] == lost
    assert any(lost)
    assert not any(lost[:40])
    assert not any(lost[80:])
