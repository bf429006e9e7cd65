"""The way of a message from a rank to a router, with the faults that strike it.

Owns: which faults strike a message, and when its copies arrive. Refuses to know: what is in it, and how losses are made
good.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from g2sim.actors.router.faults import Fault, FaultKind
from g2sim.bus.streams import RandomStream


@attrs.frozen(slots=True)
class Passage:
    """What became of a message.

    Attributes:
        due_ms: when each copy arrives [ms]; empty if it is lost.
        struck_by: faults that had a part in it.
    """

    due_ms: tuple[float, ...]
    struck_by: tuple[Fault, ...]


class Line:
    """See the module's text.

    Messages of a rank keep their order whatever they are delayed by, as on a connection; only reordering breaks it.

    Args:
        faults: faults that strike messages; others are ignored.
        lag_ms: what every message takes [ms].
        stream: gives the random stream for a purpose; each fault draws from ``fault:<its name>``.
    """

    def __init__(self, faults: Sequence[Fault], lag_ms: float, stream: Callable[[str], RandomStream]) -> None:
        self._faults = tuple(faults)
        self._lag_ms = lag_ms
        self._stream = stream
        self._last_due_ms: dict[tuple[int, int], float] = {}

    def carry(self, worker: int, dp_rank: int, now_ms: float) -> Passage:
        """Send a message of a rank. Faults strike in the order in which they are listed."""
        due_ms = now_ms + self._lag_ms
        held_ms = 0.0
        copies = 1
        struck_by: list[Fault] = []
        for fault in self._faults:
            if not fault.from_ms <= now_ms < fault.until_ms or not fault.strikes(worker, dp_rank):
                continue
            kind = fault.kind
            if kind is FaultKind.LAG:
                due_ms += fault.lag_ms
                if fault.lag_max_ms > fault.lag_ms:
                    due_ms += (fault.lag_max_ms - fault.lag_ms) * self._stream(f"fault:{fault.name}").unit()
            elif kind is FaultKind.OUTAGE:
                return Passage((), (*struck_by, fault))
            elif kind not in _BY_CHANCE or not self._struck(fault):
                continue
            elif kind is FaultKind.LOSS:
                return Passage((), (*struck_by, fault))
            elif kind is FaultKind.DUPLICATION:
                copies += 1
            else:
                held_ms += fault.hold_ms
            struck_by.append(fault)
        rank = (worker, dp_rank)
        due_ms = self._last_due_ms[rank] = max(due_ms, self._last_due_ms.get(rank, 0.0))
        return Passage((due_ms + held_ms,) * copies, tuple(struck_by))

    def _struck(self, fault: Fault) -> bool:
        return self._stream(f"fault:{fault.name}").unit() < fault.probability


_BY_CHANCE = (FaultKind.LOSS, FaultKind.DUPLICATION, FaultKind.REORDERING)
