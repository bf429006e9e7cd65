"""What a listener has of one publisher, and what it must ask the replay socket for.

Owns: the publisher's numbers. Refuses to know: sockets, clocks, and what messages say.

A publisher numbers its messages from 0, one by one, and a connection delivers them in order. So a live number above the
next one shows a loss, and one that is not above the last live one shows that the publisher began anew. Two things do
not show by themselves: a loss behind the last message, and a restart after which the numbers happen to go on upwards.
For both, the replay socket is asked from the last known message on, that message included: if it has another message
under that number, or none at or above it, the publisher is not the same any more.

An answer speaks of the publisher as it is when it answers, while live messages of its former life may still be queued.
So an answer proves a restart only when nothing is queued; otherwise the message to compare is kept as a witness and
looked for again. It is also kept from the moment when the connection was lost. Where the publisher does not retain it
any more, nothing is proved: either ids are missing then, or the tail is never called confirmed.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
from xxhash import xxh3_64_intdigest

from g2sim.actors.kv.wire_vllm import Message

Answer = tuple[Message | None, list[bytes]]
"""A replay answer and its frames; None for one that cannot be read."""


@attrs.define(slots=True)
class Heard:
    """One stream as far as it was heard.

    Args:
        replay: whether there is a replay socket. Without one nothing is asked, and no message is judged: several
            publishers may share the stream.
        from_start: whether what came before the first live message is asked for.
    Attributes:
        live, replayed: messages of the live socket, and of the replay socket, that are handed out or were copies.
        copies: live messages that the replay socket had delivered before.
        requests: replay requests.
        anew: whether the next message that is handed out is the first of a publisher that began anew.
        tail_confirmed: whether the replay socket has said that nothing came after the last message.
    """

    replay: bool
    from_start: bool = True
    live: int = 0
    replayed: int = 0
    copies: int = 0
    requests: int = 0
    anew: bool = False
    tail_confirmed: bool = False
    _last: int | None = None
    _payload: bytes = b""
    _last_live: int = -1
    _ahead: dict[int, int] = attrs.Factory(dict)  # replayed, and their live copies may still come: number -> digest
    _witness: tuple[int, bytes] | None = None
    _contact_lost: bool = False
    _retained_from: int = 0  # what is missing below it cannot be had

    def counts(self) -> dict[str, int | bool]:
        """What came, as plain values; see the attributes."""
        names = ("live", "replayed", "copies", "requests", "tail_confirmed")
        return {name: getattr(self, name) for name in names}

    def before(self, message: Message) -> int | None:
        """First number to ask the replay socket for before a live message is handed out; None for nothing."""
        number = message.sequence
        if not self.replay:
            return None
        if self._last is None:
            return 0 if number and self.from_start else None
        if self._restarts(message):
            self._begin_anew()
            return 0 if number else None
        if self._contact_lost or number > max(self._next(), self._retained_from):
            self._contact_lost = False
            return self.check_from()
        return None

    def take(self, message: Message) -> bool:
        """Whether a live message, of which ``before`` was asked, is to be handed out; False for a copy."""
        number = message.sequence
        self.live += 1
        self.tail_confirmed = False
        if not self.replay:
            return True
        self._last_live = number
        copy = self._ahead.pop(number, None)
        if copy is not None:
            self.copies += 1
            return False
        if self._last is None or number > self._last:
            self._last, self._payload = number, message.payload
            self._ahead.clear()
        return True

    def check_from(self) -> int | None:
        """First number to ask for to learn whether something follows the last message, and whether it still stands."""
        if self._witness is not None:
            return self._witness[0]
        if self._last is None and not self.from_start:
            return None
        return self._last or 0

    def answered(
        self, first: int, answers: Sequence[Answer], *, ended: bool, before: Message | None
    ) -> tuple[list[list[bytes]], int | None]:
        """Take the answers to a request.

        Args:
            first: the number that was asked for. ``ended``: the end marker came.
            before: the live message at hand, behind which more may be queued. None: nothing is queued, so the answers
                speak of the publisher that was heard last.
        Returns: frames to hand out, and the number to ask for next, None for nothing.
        """
        self.requests += 1
        self.tail_confirmed = False
        known = [message for message, _ in answers if message is not None]
        if not known:
            if ended and before is not None:
                self._keep_witness()
            elif ended and first:
                return [], 0  # it has nothing so high; if it has anything, it began anew
            return [frames for _, frames in answers], None
        start, same = known[0].sequence, self._compare(known)
        if before is not None:
            missed = ended and start <= before.sequence and not _holds(known, before.sequence, before.payload)
            if same is False or missed:
                self._keep_witness()
                return [], None  # the answers are of another life than what is at hand
        elif same is False:
            if first:
                return [], 0
            self._begin_anew()
        queued = before is not None and start > before.sequence  # what is at hand and queued comes before the answers
        following = before.sequence if before is not None and queued else start
        if same is None and self._last is not None and following <= self._next():
            self._keep_witness()
        else:
            self._witness = None
        if queued:
            self._retained_from = start
            return [], None
        self.tail_confirmed = ended and before is None and self._witness is None
        return [frames for message, frames in answers if message is None or self._new(message)], None

    def lost_contact(self) -> None:
        """The connection was lost: who answers next may have begun anew."""
        self._contact_lost = True
        self._keep_witness()

    def _next(self) -> int:
        return 0 if self._last is None else self._last + 1

    def _keep_witness(self) -> None:
        if self._witness is None and self._last is not None:
            self._witness = (self._last, self._payload)

    def _compare(self, answers: Sequence[Message]) -> bool | None:
        """Whether the answers are of the publisher that was heard; None if what they retain begins later."""
        if self._last is None:
            return None
        number, payload = self._witness or (self._last, self._payload)
        if answers[0].sequence > number:
            return None
        return _holds(answers, number, payload)

    def _restarts(self, message: Message) -> bool:
        number = message.sequence
        if number > (self._last or 0):
            return False
        if number > self._last_live:
            return self._ahead.get(number) != xxh3_64_intdigest(message.payload)
        return number != self._last or message.payload != self._payload

    def _new(self, message: Message) -> bool:
        """Take a replayed message; whether it is new."""
        number = message.sequence
        if self._last is not None and number <= self._last:
            return False
        self.replayed += 1
        self._last, self._payload = number, message.payload
        self._ahead[number] = xxh3_64_intdigest(message.payload)
        return True

    def _begin_anew(self) -> None:
        self.anew = True
        self._last, self._payload, self._last_live = None, b"", -1
        self._witness = None
        self._retained_from = 0
        self._ahead.clear()


def _holds(answers: Sequence[Message], number: int, payload: bytes) -> bool:
    return any(message.sequence == number and message.payload == payload for message in answers)
