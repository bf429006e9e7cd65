"""What a listener makes of a publisher's numbers, against publishers that lose, fall silent and begin anew."""

from __future__ import annotations

from collections import deque

from hypothesis import example, given
from hypothesis import strategies as st

from g2sim.actors.kv.wire_vllm import Message
from g2sim.scenarios.live_sequence import Answer, Heard

Life = list[Message]


class World:
    """A publisher that retains ``history`` messages, its queue to one listener, and what the listener hands out."""

    def __init__(self, history: int, *, notices: bool) -> None:
        self.history = history
        self.notices = notices
        self.heard = Heard(replay=True)
        self.life: Life = []
        self.lives = 1
        self.queue: deque[Message] = deque()
        self.handed: list[Life] = [[]]

    def publish(self, count: int, *, lost: bool) -> None:
        for _ in range(count):
            number = len(self.life)
            message = Message(topic=b"", sequence=number, payload=b"%d:%d" % (self.lives, number))
            self.life.append(message)
            if not lost:
                self.queue.append(message)

    def restart(self) -> None:
        if self.queue and not self.queue[0].payload.startswith(b"%d:" % self.lives):
            self.take(len(self.queue))  # two restarts within what is queued cannot be told apart
        self.life = []
        self.lives += 1
        if self.notices:
            self.heard.lost_contact()

    def take(self, most: int) -> None:
        for _ in range(min(most, len(self.queue))):
            message = self.queue.popleft()
            first = self.heard.before(message)
            if first is not None:
                self.ask(first, message)
            if self.heard.take(message):
                self.hand_out(message)

    def quiet(self) -> None:
        self.take(len(self.queue))
        first = self.heard.check_from()
        assert first is not None
        self.ask(first, None)

    def ask(self, first: int | None, before: Message | None) -> None:
        while first is not None:
            retained = self.life[max(0, len(self.life) - self.history) :]
            answers: list[Answer] = [(message, [message.payload]) for message in retained if message.sequence >= first]
            known = {message.payload: message for message in retained}
            taken, first = self.heard.answered(first, answers, ended=True, before=before)
            for frames in taken:
                self.hand_out(known[frames[0]])

    def hand_out(self, message: Message) -> None:
        if self.heard.anew:
            self.heard.anew = False
            self.handed.append([])
        self.handed[-1].append(message)


Step = tuple[str, int]
STEPS = st.lists(
    st.tuples(st.sampled_from(["send", "lose", "take", "quiet", "restart"]), st.integers(1, 6)), max_size=25
)


def played(steps: list[Step], history: int, *, notices: bool) -> World:
    world = World(history, notices=notices)
    for what, count in steps:
        if what == "restart":
            world.restart()
        elif what == "take":
            world.take(count)
        elif what == "quiet":
            world.quiet()
        else:
            world.publish(count, lost=what == "lose")
    world.quiet()
    return world


@given(STEPS)
def test_with_all_retained_the_last_life_is_heard_whole(steps: list[Step]) -> None:
    world = played(steps, 10_000, notices=True)
    if world.life:
        assert world.handed[-1] == world.life
        assert world.heard.tail_confirmed
    for life in world.handed:
        numbers = [message.sequence for message in life]
        assert numbers == sorted(set(numbers))
    assert len(world.handed) <= world.lives


@given(STEPS, st.integers(0, 4))
@example([("send", 6), ("take", 6), ("restart", 1), ("lose", 6), ("send", 1)], 1)
@example([("send", 1), ("take", 6), ("restart", 1), ("lose", 2), ("quiet", 1)], 1)
def test_what_is_without_a_gap_and_confirmed_is_the_whole_life(steps: list[Step], history: int) -> None:
    world = played(steps, history, notices=True)
    heard = world.handed[-1]
    if world.heard.tail_confirmed and [message.sequence for message in heard] == list(range(len(heard))):
        assert heard == world.life


@given(STEPS, st.integers(0, 4), st.booleans())
def test_lives_are_never_mixed_while_numbers_tell_them_apart(steps: list[Step], history: int, notices: bool) -> None:
    world = played(steps, history, notices=notices)
    for life in world.handed:
        numbers = [message.sequence for message in life]
        assert numbers == sorted(set(numbers))
    assert len(world.handed) <= world.lives


def test_the_same_message_twice_is_handed_on_and_no_restart() -> None:
    world = World(10, notices=False)
    world.publish(2, lost=False)
    world.queue.append(world.life[-1])
    world.take(3)
    assert [len(life) for life in world.handed] == [3]


def test_without_a_replay_socket_nothing_is_asked_or_judged() -> None:
    heard = Heard(replay=False)
    for number in (5, 3, 3, 9):
        message = Message(topic=b"", sequence=number, payload=b"")
        assert heard.before(message) is None
        assert heard.take(message)
    assert heard.counts() == {"live": 4, "replayed": 0, "copies": 0, "requests": 0, "tail_confirmed": False}


def test_from_now_leaves_out_what_came_before_but_not_what_a_restart_lost() -> None:
    heard = Heard(replay=True, from_start=False)
    assert heard.check_from() is None
    message = Message(topic=b"", sequence=7, payload=b"a")
    assert heard.before(message) is None
    assert heard.take(message)
    assert heard.before(Message(topic=b"", sequence=2, payload=b"b")) == 0


def test_a_replay_socket_that_does_not_answer_confirms_nothing() -> None:
    heard = Heard(replay=True)
    heard.take(Message(topic=b"", sequence=0, payload=b"a"))
    assert heard.answered(0, [], ended=False, before=None) == ([], None)
    assert not heard.tail_confirmed
    assert heard.answered(0, [(None, [b"?"])], ended=False, before=None) == ([[b"?"]], None)
    assert not heard.tail_confirmed
