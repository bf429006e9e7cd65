"""Publishing the same messages over and over, as one valid stream.

Owns: what has to change between two times. Refuses to know: sockets, and where messages come from.

A second time would store what is resident. So all caches of every rank are cleared before it, as an engine does that
resets its prefix cache, and numbers and times go on where they ended.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeVar

from g2sim.actors.kv.wire import CLEARED, StreamEvent, WireError
from g2sim.actors.kv.wire_vllm import Batch, Message, Shape, batch_time_s, decode_batch, encode_batch, with_batch_time
from g2sim.bus.errors import ConfigError
from g2sim.scenarios.publish_streams import Outgoing

_T = TypeVar("_T")

MAX_KEPT_BYTES: Final = 64 * 2**20
"""Messages of one time are kept up to this size [B]; more than that are made anew each time."""
_PAUSE_MS: Final = 1.0
"""From the last message of one time to the clear of the next [ms], so that no rounding can turn them round."""


def repeated(play: Callable[[], Iterator[Outgoing]], times: int | None, shape: Shape) -> Iterator[Outgoing]:
    """The messages of ``play``, so many times or (None) without end, with a clear of every rank in between.

    Raises: ConfigError for a batch whose time cannot be moved.
    """
    if times == 1:
        yield from play()
        return
    numbers: dict[tuple[str, int], tuple[int, int]] = {}
    clears: dict[tuple[str, int], Outgoing] = {}  # the last message of each rank, then a clear behind it
    start_ms = start_s = math.inf
    end_ms = end_s = -math.inf
    kept: list[Outgoing] = []
    kept_bytes = count = 0
    for item in play():
        number, time_s = item.message.sequence, _read(item, batch_time_s)
        low, high = numbers.get(item.rank, (number, number))
        numbers[item.rank] = min(low, number), max(high, number)
        start_ms, end_ms = min(start_ms, item.time_ms), max(end_ms, item.time_ms)
        start_s, end_s = min(start_s, time_s), max(end_s, time_s)
        clears[item.rank] = item
        count, kept_bytes = count + 1, kept_bytes + len(item.message.payload)
        if kept_bytes <= MAX_KEPT_BYTES:
            kept.append(item)
        yield item
    if not count:
        return
    for rank, item in clears.items():
        dp_rank = _read(item, decode_batch).dp_rank
        payload = encode_batch(Batch(ts_s=start_s, events=(StreamEvent(kind=CLEARED),), dp_rank=dp_rank), shape)
        message = Message(topic=item.message.topic, sequence=numbers[rank][0] - 1, payload=payload)
        clears[rank] = Outgoing(rank, start_ms, message)
    span_ms, span_s = end_ms - start_ms + _PAUSE_MS, end_s - start_s + _PAUSE_MS / 1000.0
    for turn in itertools.count(1) if times is None else range(1, times):
        again: Iterable[Outgoing] = kept if len(kept) == count else play()
        for item in itertools.chain(clears.values(), again):
            low, high = numbers[item.rank]
            message = Message(
                topic=item.message.topic,
                sequence=item.message.sequence + turn * (high - low + 2),
                payload=with_batch_time(item.message.payload, _read(item, batch_time_s) + turn * span_s),
            )
            yield Outgoing(item.rank, item.time_ms + turn * span_ms, message)


def _read(item: Outgoing, reader: Callable[[bytes], _T]) -> _T:
    try:
        return reader(item.message.payload)
    except WireError as error:
        raise ConfigError(
            error.place,
            where=f"{item.rank[0]}, message {item.message.sequence}",
            problem=f"{error.problem}; it cannot be published again",
        ) from error
