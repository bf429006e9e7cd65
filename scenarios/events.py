"""Events of a run as a whole."""

from __future__ import annotations

from typing import Any

from g2sim.bus.events import event


@event("run.begin")
class RunStarted:
    """What the run found out about its traffic before it began.

    Attributes:
        agentic: fields for the report's summary (graph digest, models, timestamp basis), None outside agentic traffic.
        play_ids: plays in the order in which outcomes are listed.
        notes: remarks on input that was accepted although something is odd.
    """

    agentic: dict[str, Any] | None
    play_ids: tuple[str, ...]
    notes: tuple[str, ...]


@event("run.end", version=2)
class RunFinished:
    """The deployment came to rest, or its time limit was reached.

    Attributes:
        stopped_at_limit: the virtual time limit ended the run.
        prefill_worker_seconds, decode_worker_seconds: time provided by the pools [worker s], summed instant by
            instant while requests were outstanding; an aggregated pool counts as decode.
        notes: remarks on what came up during the run.
    """

    stopped_at_limit: bool
    prefill_worker_seconds: float
    decode_worker_seconds: float
    notes: tuple[str, ...] = ()
