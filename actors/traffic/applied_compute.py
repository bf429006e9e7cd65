"""``applied_compute_agentic`` traces: one row describes a session of an agent that calls tools.

Source: trace replay of NVIDIA Dynamo 1.6; recordings in tests/oracle/workload.
"""

from __future__ import annotations

from itertools import accumulate, count, islice
from pathlib import Path

from g2sim.actors.traffic.remarks import Remarks
from g2sim.actors.traffic.session_table import MadeSessions, SessionTable
from g2sim.actors.traffic.synthetic import shared_blocks
from g2sim.actors.traffic.trace_json import MAX_TOKENS, Fields, no_rows, row_objects

_ARRAYS = ("assistant_response_length", "tool_call_output_length", "tool_call_latency")
_USED = frozenset((*_ARRAYS, "num_turns", "input_prompt_length", "final_assistant_response_length"))
_MAX_LATENCY_S = 1e300
"""Largest latency [s] that is still finite in milliseconds."""


def load_applied_compute(
    path: Path,
    *,
    block_size_tokens: int = 512,
    shared_prefix_ratio: float = 0.0,
    prefix_groups: int = 0,
    remarks: Remarks | None = None,
) -> MadeSessions:
    """Read a file, line by line.

    A turn's prompt holds the initial prompt and every answer and tool output before it, and the same block of a session
    has the same id in all of its turns.

    Args:
        block_size_tokens: tokens that one block id stands for, >= 1.
        shared_prefix_ratio: part of the initial prompt's blocks that sessions of one prefix group share, 0 to 1.
        prefix_groups: groups that rows are dealt to by their line, 0 = nothing is shared.
        remarks: takes note of what was dropped.
    Returns: sessions in file order, without arrivals: they run in a closed loop.
    Raises: ConfigError on anything malformed, with file and line.
    """
    fresh = count()
    prefixes: dict[int, list[int]] = {}
    table = SessionTable(block_size_tokens)
    for line, row in row_objects(path):
        lengths, outputs, delays_ms = _turns(row)
        if remarks is not None:
            remarks.unused(row, _USED, line)
        ids: list[int] = []
        if prefix_groups:
            shared = shared_blocks(-(-lengths[0] // block_size_tokens), shared_prefix_ratio)
            prefix = prefixes.setdefault((line - 1) % prefix_groups, [])
            prefix += islice(fresh, max(0, shared - len(prefix)))
            ids = prefix[:shared]
        ids = [*ids, *islice(fresh, -(-lengths[-1] // block_size_tokens) - len(ids))]
        session = table.begin(f"applied_compute_agentic_session_{line}", None)
        for length, output_tokens, delay_ms in zip(lengths, outputs, delays_ms, strict=True):
            table.add_turn(
                session,
                ids[: -(-length // block_size_tokens)],
                prompt_tokens=length,
                output_tokens=output_tokens,
                delay_ms=delay_ms,
            )
    sessions = table.sessions()
    if not sessions:
        raise no_rows(path)
    return sessions


def _turns(row: Fields) -> tuple[list[int], list[int], list[float]]:
    """Prompt lengths, output lengths and delays [ms] of a row's turns, the final one included."""
    number = row.integer("num_turns")
    first = row.integer("input_prompt_length", low=1, high=MAX_TOKENS)
    final = row.integer("final_assistant_response_length", high=MAX_TOKENS)
    answers = row.integers("assistant_response_length", high=MAX_TOKENS)
    tools = row.integers("tool_call_output_length", high=MAX_TOKENS)
    latencies_s = row.numbers("tool_call_latency", high=_MAX_LATENCY_S)
    for field, values in zip(_ARRAYS, (answers, tools, latencies_s), strict=True):
        if len(values) != number:
            raise row.error(field, got=f"{len(values)} values", allowed=f"{number} values, as num_turns says")
    lengths = list(accumulate((answer + tool for answer, tool in zip(answers, tools, strict=True)), initial=first))
    if lengths[-1] > MAX_TOKENS:
        raise row.error(problem=f"a prompt of {lengths[-1]} tokens", allowed=f"at most {MAX_TOKENS}")
    return lengths, [*answers, final], [0.0, *(1000.0 * latency_s for latency_s in latencies_s)]
