"""Checking files without running anything: scenarios, traces, and the syntax of scripts.

Owns: telling what kind a file is. Refuses to know: what makes one good; the readers do.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs

from g2sim.actors.traffic.agentic_mooncake import load_agentic_mooncake
from g2sim.actors.traffic.applied_compute import load_applied_compute
from g2sim.actors.traffic.dynamo_requests import load_dynamo_requests
from g2sim.actors.traffic.graph import AgenticCorpus
from g2sim.actors.traffic.mooncake import load_mooncake
from g2sim.actors.traffic.remarks import Remarks
from g2sim.actors.traffic.sessions import Sessions
from g2sim.actors.traffic.trace_json import read_bytes, row_objects
from g2sim.actors.traffic.weka import load_weka
from g2sim.bus.errors import ConfigError
from g2sim.scenarios.schema import TraceFormat, TrafficConfig
from g2sim.scenarios.suite import load_suite
from g2sim.scenarios.traffic_source import Traffic, open_traffic, prompts_too_large


@attrs.frozen
class Checked:
    """What a good file is, in a few words, and remarks on what will happen in its runs."""

    about: str
    notes: tuple[str, ...] = ()


def check_file(path: Path, *, trace_format: TraceFormat | None = None, block_size_tokens: int = 512) -> Checked:
    """Check a file, and say what it is.

    Args:
        trace_format: the file is a trace of this format; None: what it looks like.
        block_size_tokens: tokens that a hash id of a Mooncake trace stands for.
    Raises: ConfigError for a file that is not good.
    """
    try:
        return _checked(path, trace_format, block_size_tokens)
    except ConfigError as error:
        raise error.located(str(path)) from None


def _checked(path: Path, trace_format: TraceFormat | None, block_size_tokens: int) -> Checked:
    if trace_format is not None:
        return Checked(_trace(path, trace_format, block_size_tokens))
    if path.suffix == ".py":
        return Checked(_script(path))
    if path.is_dir() or path.suffix == ".jsonl":
        return Checked(_trace(path, None, block_size_tokens))
    if path.suffix == ".json" and isinstance(head := _json(path), dict) and "requests" in head:
        return Checked(_trace(path, None, block_size_tokens))
    return _scenario(path)


def _scenario(path: Path) -> Checked:
    suite = load_suite(path)
    opened: list[tuple[TrafficConfig, Traffic]] = []
    notes: list[str] = []
    for variant, scenario in suite.runs.items():
        traffic = next((traffic for config, traffic in opened if config == scenario.traffic), None)
        if traffic is None:
            traffic = open_traffic(scenario)
            opened.append((scenario.traffic, traffic))
        name = "" if variant is None else f"variant {variant}: "
        notes += [f"{name}{note}" for note in prompts_too_large(scenario, traffic)]
    parts = [f"scenario {suite.name}"]
    if None not in suite.runs:
        parts.append(f"{len(suite.runs)} variants")
    parts.append(f"{len(suite.expectations)} expectations")
    return Checked(", ".join(parts), tuple(notes))


def _trace(path: Path, kind: TraceFormat | None, block_size_tokens: int) -> str:
    if kind is None:
        kind = TraceFormat.WEKA if path.is_dir() or path.suffix == ".json" else _row_format(path)
    corpus: AgenticCorpus | None = None
    sessions: Sessions = ()
    if kind is TraceFormat.WEKA:
        corpus = load_weka(path)
    elif kind is TraceFormat.AGENTIC_MOONCAKE:
        corpus = load_agentic_mooncake(path)
    elif kind is TraceFormat.DYNAMO:
        trace = load_dynamo_requests(path, block_size=None, remarks=Remarks(path))
        corpus, sessions = trace.corpus, trace.sessions
    elif kind is TraceFormat.APPLIED_COMPUTE_AGENTIC:
        sessions = load_applied_compute(path, block_size_tokens=block_size_tokens)
    else:
        sessions = load_mooncake(path, block_size_tokens=block_size_tokens)
    if corpus is None:
        return f"{kind} trace, {len(sessions)} sessions"
    return f"{kind} trace, {len(corpus.graph.plays)} plays, {len(corpus.graph.nodes)} requests"


def _row_format(path: Path) -> TraceFormat:
    """What the first row of a trace looks like; a row that is none of the known is for the reader to refuse."""
    try:
        _, first = next(row_objects(path))
        keys = first.values
    except (ConfigError, StopIteration):
        keys = {}
    if "requests" in keys:
        return TraceFormat.WEKA
    return TraceFormat.AGENTIC_MOONCAKE if "schema" in keys else TraceFormat.MOONCAKE


def _script(path: Path) -> str:
    try:
        compile(path.read_bytes(), str(path), "exec")
    except OSError as error:
        raise ConfigError("", problem=f"cannot read the script: {error.strerror}", where=str(path)) from None
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        where = f"{path}:{line}" if line else str(path)
        raise ConfigError("", problem=f"not valid Python: {getattr(error, 'msg', error)}", where=where) from None
    return "script, syntax only"


def _json(path: Path) -> Any:
    try:
        return json.loads(read_bytes(path))
    except (ConfigError, ValueError, RecursionError):
        return None
