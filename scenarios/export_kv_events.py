"""The KV events of a run as JSON lines, for indexes and checkers of other makes.

Owns: how a run's workers and tiers are spelled in the two forms. Refuses to know: the forms themselves
(``g2sim.actors.kv.wire_neutral`` and ``wire_dynamo``).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from g2sim.actors.kv import wire_dynamo, wire_neutral
from g2sim.actors.kv.wire import DEVICE, HOST, StreamEvent
from g2sim.actors.kv.wire_neutral import Membership
from g2sim.bus.errors import ConfigError, SimError
from g2sim.scenarios.run_log import open_run
from g2sim.scenarios.stream_sources import open_stream
from g2sim.scenarios.validate import Bad

_NEUTRAL_TIERS: Final = {DEVICE: "Device", HOST: "HostPinned"}


def write_kv_events(run_path: Path, form: str, write: Callable[[str], object]) -> SimError | None:
    """Write a line an event, in the order in which ranks published.

    Neutral lines name workers as the log does, and say which left and joined. Dynamo's form numbers them: those of
    the first role from 0, those of the second behind them.

    Args:
        form: "neutral" or "dynamo".
        write: takes text.

    Returns: what is wrong with a damaged log, after everything up to there has been written.
    Raises: ConfigError for what is no run, or cannot be said in the form.
    """
    with open_run(run_path) as reader:
        workers = reader.header.scenario["engine"]["workers"]
    line_of = _neutral if form == "neutral" else _dynamo(workers)
    source, items = open_stream(run_path)
    for number, item in items:
        if type(item) is Bad:
            return SimError(f"{source.place(number)}: {item.problem}")
        if isinstance(item, StreamEvent | Membership):
            write(f"{line_of(item)}\n")
    return None


def _neutral(item: StreamEvent | Membership) -> str:
    if isinstance(item, StreamEvent):
        item = msgspec.structs.replace(item, medium=None if item.medium is None else _NEUTRAL_TIERS[item.medium])
    return wire_neutral.encode(item)


def _dynamo(workers: dict[str, Any]) -> Callable[[StreamEvent | Membership], str]:
    names = [f"{role}-{number}" for role, one in workers.items() for number in range(one["parallelism"]["replicas"])]
    numbers = {name: number for number, name in enumerate(names)}

    def line_of(item: StreamEvent | Membership) -> str:
        if isinstance(item, Membership):
            raise ConfigError("--kv-events", got="dynamo", problem="a worker crashes in this run", allowed="neutral")
        return wire_dynamo.encode(msgspec.structs.replace(item, worker_id=numbers[str(item.worker_id)]))

    return line_of
