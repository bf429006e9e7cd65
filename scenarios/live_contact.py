"""Whether a socket of a listener still has its connection, and what a replay socket answers while it has.

Owns: telling a connection that was lost from one that was cut. Refuses to know: what messages say. Needs pyzmq.

libzmq ends a connection on a frame above the socket's largest size, or on bytes that are none of ZeroMQ's, and does not
make it anew; a peer that goes away it tries again at once, and says so. That is how the two are told apart.
"""

from __future__ import annotations

import math
import sys
import time
from types import ModuleType
from typing import Any, Final, Self

import attrs

_RETRY_S: Final = 0.5
"""Time [s] in which libzmq, if it makes a lost connection anew by itself, has begun to do so (it does so at once)."""
_POLL_MS: Final = 100


class Contact:
    """A socket's connection, as its monitor tells of it; to be made before the socket is connected.

    Attributes:
        monitor: a socket that can be read when there is news.
        cut_at: when the lost connection counts as cut [s], unless libzmq tries again; infinite if none is lost.
    """

    def __init__(self, zmq: ModuleType, socket: Any) -> None:
        self._zmq = zmq
        self.monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED)
        self.cut_at = math.inf

    def lost(self) -> bool:
        """Take note of what the monitor says; whether the connection was lost since this was asked last."""
        lost = False
        while self.monitor.poll(0):
            news = self.monitor.recv_multipart()[0]
            is_lost = int.from_bytes(news[:2], sys.byteorder) == self._zmq.EVENT_DISCONNECTED
            self.cut_at = time.monotonic() + _RETRY_S if is_lost else math.inf
            lost |= is_lost
        return lost


@attrs.frozen(slots=True, eq=False)
class ReplayRequest:
    """A socket on which a replay was asked for."""

    socket: Any
    contact: Contact

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.disable_monitor()
        self.contact.monitor.close()
        self.socket.close()

    def answer(self, timeout_s: float, deadline_s: float) -> list[bytes] | None:
        """The frames that come next; no frames if the connection was cut, None if nothing comes in time."""
        until_s = time.monotonic() + timeout_s
        while (now_s := time.monotonic()) < deadline_s and (now_s < until_s or self.contact.cut_at < math.inf):
            if self.socket.poll(_POLL_MS):
                frames: list[bytes] = self.socket.recv_multipart()
                return frames
            self.contact.lost()
            if time.monotonic() >= self.contact.cut_at:
                return []
        return None
