"""What a router has sent where and not heard the end of.

Owns: pending prompt tokens, blocks and requests of each rank ("place"), by what the router itself booked.
Refuses to know: what the ranks really do, and how a policy weighs the numbers.

Source: load tracking of the router of NVIDIA Dynamo 1.6.1: booked when placed, prompt tokens until the first token,
blocks and the request until the end.
"""

from __future__ import annotations

from collections.abc import KeysView, Sequence
from typing import Final

from g2sim.bus.errors import InvariantViolation, ProtocolError
from g2sim.bus.plain import Plain


class Booking(Plain):
    """What a request counts for; ``hashes``: sequence hashes of its whole prompt blocks."""

    __slots__ = ("hashes", "place", "prefill_tokens")

    def __init__(self, place: int, prefill_tokens: int, hashes: Sequence[int]) -> None:
        self.place: Final = place
        self.prefill_tokens: Final = prefill_tokens
        self.hashes: Final = hashes


class LoadTracker:
    """See the module's text.

    Args:
        places: number of places.
        shares_blocks: count a block once a place, however many requests have it in their prompts. Fixed once something
            is booked.

    Attributes:
        prefill_tokens, requests: per place: prompt tokens booked by requests without a first token, and requests.
    """

    def __init__(self, places: int, *, shares_blocks: bool = True) -> None:
        self.prefill_tokens = [0] * places
        self.requests = [0] * places
        self.shares_blocks = shares_blocks
        self._users: list[dict[int, int]] = [{} for _ in range(places)]
        self._unshared = [0] * places
        self._bookings: dict[int, Booking] = {}
        self._no_token_yet: dict[int, Booking] = {}

    def __contains__(self, request: int) -> bool:
        return request in self._bookings

    @property
    def awaiting(self) -> KeysView[int]:
        """Booked requests without a first token."""
        return self._no_token_yet.keys()

    def booking(self, request: int) -> Booking:
        """What a booked request counts for."""
        return self._bookings[request]

    def blocks(self, place: int) -> int:
        """Blocks of all requests of a place."""
        return len(self._users[place]) + self._unshared[place]

    def blocks_with(self, place: int, hashes: Sequence[int]) -> int:
        """What ``blocks`` would be with one more request; ``hashes``: sequence hashes of its whole prompt blocks.

        Prompts are booked whole, so the blocks of one that are in use form a prefix: a binary search finds its end.
        """
        users = self._users[place]
        low, high = 0, len(hashes) if users else 0
        while low < high:
            middle = (low + high) // 2
            if hashes[middle] in users:
                low = middle + 1
            else:
                high = middle
        return len(users) + self._unshared[place] + len(hashes) - low

    def book(self, request: int, place: int, prefill_tokens: int, hashes: Sequence[int]) -> None:
        """A request was sent to a place.

        Raises: ProtocolError if it is booked already.
        """
        if request in self._bookings:
            raise ProtocolError(f"load tracker: request {request} is booked twice")
        booking = self._bookings[request] = self._no_token_yet[request] = Booking(place, prefill_tokens, hashes)
        self.prefill_tokens[place] += prefill_tokens
        self.requests[place] += 1
        if not self.shares_blocks:
            self._unshared[place] += len(hashes)
            return
        users = self._users[place]
        for block_hash in booking.hashes:
            users[block_hash] = users.get(block_hash, 0) + 1

    def first_token(self, request: int) -> bool:
        """A request's prompt is computed. False if that is no news."""
        booking = self._no_token_yet.pop(request, None)
        if booking is None:
            return False
        self.prefill_tokens[booking.place] -= booking.prefill_tokens
        return True

    def end(self, request: int) -> bool:
        """A request is over. False if it was not booked."""
        self.first_token(request)
        booking = self._bookings.pop(request, None)
        if booking is None:
            return False
        place = booking.place
        self.requests[place] -= 1
        if not self.shares_blocks:
            self._unshared[place] -= len(booking.hashes)
            return True
        users = self._users[place]
        for block_hash in booking.hashes:
            left = users[block_hash] - 1
            if left:
                users[block_hash] = left
            else:
                del users[block_hash]
        return True

    def forget(self, place: int) -> None:
        """A place is gone, with everything that was sent there."""
        for request in [request for request, booking in self._bookings.items() if booking.place == place]:
            self.end(request)

    def check(self) -> None:
        """Raises: InvariantViolation if the sums are not those of the bookings."""
        for place in range(len(self.requests)):
            mine = [booking for booking in self._bookings.values() if booking.place == place]
            pending = sum(booking.prefill_tokens for booking in self._no_token_yet.values() if booking.place == place)
            hashes = [block_hash for booking in mine for block_hash in booking.hashes]
            told = (self.requests[place], self.prefill_tokens[place], self.blocks(place))
            true = (len(mine), pending, len(set(hashes)) if self.shares_blocks else len(hashes))
            if told != true:
                raise InvariantViolation(f"load tracker: place {place} has {told}, its bookings are {true}")
