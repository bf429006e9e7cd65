"""Events of a run as a whole."""

from __future__ import annotations

from g2sim.bus.events import event


@event("run.end")
class RunFinished:
    """The deployment came to rest, or its time limit was reached.

    Attributes:
        stopped_at_limit: the virtual time limit ended the run.
        prefill_worker_seconds, decode_worker_seconds: time provided by the pools [worker s], summed instant by
            instant while requests were outstanding; an aggregated pool counts as decode.
    """

    stopped_at_limit: bool
    prefill_worker_seconds: float
    decode_worker_seconds: float
