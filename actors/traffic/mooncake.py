"""Mooncake JSON lines: rows of hash ids, optionally grouped into sessions.

Rows of a mooncake-delta file look alike, but a row describes only what its turn adds to the conversation.

Source: kvcache-ai/Mooncake traces; session fields as in the trace replay of NVIDIA Dynamo 1.6.
"""

from __future__ import annotations

import math
import sys
from array import array
from pathlib import Path

from g2sim.actors.traffic.remarks import Remarks
from g2sim.actors.traffic.session_table import MadeSessions, SessionTable
from g2sim.actors.traffic.trace_json import MAX_TOKENS, U32_MAX, Fields, no_rows, row_objects

_USED = frozenset(
    (
        "hash_ids",
        "output_length",
        "output_tokens",
        "input_length",
        "input_tokens",
        "timestamp",
        "created_time",
        "session_id",
        "delay",
        "delay_ms",
        "output_token_ids",
    )
)
_LOWEST_MS = -sys.float_info.max
_NO_TIMESTAMP = math.nan


def load_mooncake(
    path: Path, *, block_size_tokens: int = 512, closed_loop: bool = False, remarks: Remarks | None = None
) -> MadeSessions:
    """Read a file, line by line.

    Args:
        block_size_tokens: tokens that one hash id stands for, >= 1.
        closed_loop: arrivals do not count, so timestamps may be missing.
        remarks: takes note of what was dropped or changed.

    Returns: sessions in the order of their first rows; a row without a session id is a session of its own.
    Raises: ConfigError on anything malformed, with file and line.
    """
    table = SessionTable(block_size_tokens)
    numbers: dict[str, int] = {}
    last_ms = array("d")  # last timestamp seen in each session
    interned: dict[int, int] = {}
    remarks = Remarks(path) if remarks is None else remarks
    first_ms: tuple[float, int] | None = None
    for line, row in row_objects(path):
        hash_ids, prompt_tokens = _prompt(row, block_size_tokens)
        if len(hash_ids) > -(-prompt_tokens // block_size_tokens):
            remarks.add("hash_ids beyond input_length dropped", line)
        remarks.unused(row, _USED, line)
        output_tokens = row.integer("output_length", "output_tokens", high=MAX_TOKENS)
        session_id = row.string("session_id") if row.present("session_id") else f"request_{line}"
        timestamp_ms = _optional_number(row, ("timestamp", "created_time"), _LOWEST_MS)
        delay_ms = _optional_number(row, ("delay", "delay_ms"), 0.0)
        session = numbers.get(session_id)
        if session is None:
            _check_first_row(row, timestamp_ms, delay_ms, closed_loop)
            session = numbers[session_id] = table.begin(session_id, timestamp_ms)
            last_ms.append(_NO_TIMESTAMP)
            if timestamp_ms is not None:
                first_ms = min(first_ms or (timestamp_ms, line), (timestamp_ms, line))
            wait_ms = 0.0
        else:
            wait_ms = _wait_ms(row, last_ms[session], timestamp_ms, delay_ms)
        if timestamp_ms is not None:
            last_ms[session] = timestamp_ms
        table.add_turn(
            session,
            [interned.setdefault(hash_id, len(interned)) for hash_id in hash_ids],
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            delay_ms=wait_ms,
            output_ids=_output_ids(row, output_tokens),
        )
    if not numbers:
        raise no_rows(path)
    if first_ms is not None and first_ms[0] and not closed_loop:
        remarks.add(f"timestamps changed: counted from this one, {first_ms[0]:g} ms", first_ms[1])
    return table.sessions()


def _prompt(row: Fields, block_size_tokens: int) -> tuple[tuple[int, ...], int]:
    """Hash ids and length of a row's prompt."""
    ids = row.integers("hash_ids")
    if not ids:
        raise row.error("hash_ids", got=list(ids), allowed="at least one hash id")
    capacity = len(ids) * block_size_tokens
    length = capacity
    if row.present("input_length", "input_tokens"):
        length = row.integer("input_length", "input_tokens", low=1, high=MAX_TOKENS)
    if length > capacity:
        needed = -(-length // block_size_tokens)
        raise row.error(
            "hash_ids",
            got=f"{len(ids)} ids for input_length {length}",
            allowed=f"{needed} ids or more of {block_size_tokens} tokens each",
            hint="traffic.source.block_size must be the trace's own block size",
        )
    return ids, length


def _optional_number(row: Fields, names: tuple[str, ...], low: float) -> float | None:
    return row.number(*names, low=low) if row.present(*names) else None


def _output_ids(row: Fields, output_tokens: int) -> tuple[int, ...] | None:
    if not row.present("output_token_ids"):
        return None
    ids = row.integers("output_token_ids", high=U32_MAX)
    if len(ids) != output_tokens:
        raise row.error(
            "output_token_ids", got=f"{len(ids)} ids", allowed=f"{output_tokens} ids, as output_length says"
        )
    return ids


def _check_first_row(row: Fields, timestamp_ms: float | None, delay_ms: float | None, closed_loop: bool) -> None:
    if delay_ms:
        raise row.error("delay", got=delay_ms, allowed="0 or nothing on the first row of a session")
    if closed_loop:
        if timestamp_ms is not None and timestamp_ms < 0.0:
            raise row.error("timestamp", got=timestamp_ms, allowed="0 or more in a closed loop")
    elif timestamp_ms is None:
        raise row.error(
            "timestamp",
            problem="missing",
            allowed="a number of ms on the first row of each session",
            hint="a closed loop (traffic.load.type: concurrency) needs none",
        )


def _wait_ms(row: Fields, last_ms: float, timestamp_ms: float | None, delay_ms: float | None) -> float:
    """How long a later turn waits after the end of the turn before it; ``last_ms`` is NaN without a timestamp."""
    if delay_ms is not None:
        return delay_ms
    if timestamp_ms is None:
        return 0.0
    if math.isnan(last_ms):
        raise row.error(
            "timestamp", got=timestamp_ms, allowed="a delay, since no earlier row of this session has a timestamp"
        )
    wait_ms = timestamp_ms - last_ms
    if wait_ms < 0.0:
        raise row.error("timestamp", got=timestamp_ms, allowed=f"{last_ms!r} or more, as the session's row before")
    return wait_ms
