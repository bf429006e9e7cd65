"""Captures: live KV event streams on disk, message by message as they came, with arrival times.

Owns: the capture's records. Refuses to know: sockets, and what the messages say.

A capture is an event log (``g2sim.bus.log``) with event types of its own:

- ``cap.open [stream, endpoint, replay_endpoint, dp_rank]``: a stream that was listened to. ``stream`` is its name,
  ``dp_rank`` the rank to assume for batches that name none.
- ``cap.msg [stream, replayed, frames]``: one message of it, frames as received; ``replayed`` if it was an answer of
  the replay socket. No frames: the connection was cut by one that was too large, or was none of ZeroMQ's.
- ``cap.anew [stream]``: its publisher began anew; the next message is the first one known of its new life.
- ``cap.end [stream, tail_confirmed]``: the listening ended; ``tail_confirmed`` if the replay socket has said that
  nothing came after the last message.

``time_ms`` counts from the start of the recording. A capture that was cut is good up to its last whole record.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import attrs

from g2sim.bus.events import Record, event_type
from g2sim.bus.log import LogWriter

OPENED: Final = "cap.open"
MESSAGE: Final = "cap.msg"
ANEW: Final = "cap.anew"
ENDED: Final = "cap.end"
_SOURCE: Final = "record"


@attrs.frozen(kw_only=True, slots=True)
class StreamOpened:
    """See the module's text."""

    stream: str
    endpoint: str
    replay_endpoint: str | None
    dp_rank: int


@attrs.frozen(kw_only=True, slots=True)
class MessageCaptured:
    """See the module's text."""

    stream: str
    replayed: bool
    frames: tuple[bytes, ...]


@attrs.frozen(kw_only=True, slots=True)
class PublisherBeganAnew:
    """See the module's text."""

    stream: str


@attrs.frozen(kw_only=True, slots=True)
class ListeningEnded:
    """See the module's text."""

    stream: str
    tail_confirmed: bool


# Not registered: the log of a run describes all registered events, and none of these can occur in one.
TYPES: Final = (
    event_type(OPENED, 1, StreamOpened),
    event_type(MESSAGE, 1, MessageCaptured),
    event_type(ANEW, 1, PublisherBeganAnew),
    event_type(ENDED, 1, ListeningEnded),
)


class CaptureWriter:
    """Writes a capture to a new file, which appears under its name at once and is good up to what was written.

    Args:
        path: the file; it must not exist.
        version: version of this program.
    """

    def __init__(self, path: Path, *, version: str) -> None:
        self._file = path.open("xb")
        self._log = LogWriter(self._file, version=version, seed=0, scenario=None, events=TYPES)
        self.messages = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._log.finish("finished")
            else:
                self._log.finish("failed", str(error) or type(error).__name__)
        finally:
            self._file.close()

    def opened(self, stream: StreamOpened) -> None:
        self._log.append(Record(0.0, _SOURCE, 0, stream))

    def ended(self, time_ms: float, stream: str, *, tail_confirmed: bool) -> None:
        self._log.append(Record(time_ms, _SOURCE, 0, ListeningEnded(stream=stream, tail_confirmed=tail_confirmed)))

    def message(
        self, time_ms: float, stream: str, frames: Sequence[bytes], *, replayed: bool, anew: bool = False
    ) -> None:
        if anew:
            self._log.append(Record(time_ms, _SOURCE, 0, PublisherBeganAnew(stream=stream)))
        self._log.append(
            Record(time_ms, _SOURCE, 0, MessageCaptured(stream=stream, replayed=replayed, frames=tuple(frames)))
        )
        self.messages += 1
