"""Preparation: requests that bring the history of snapshots into the caches before the measured part starts.

Owns: which requests each lane sends, one after another, and when preparation is over.
Refuses to know: what they look like, and what comes after.

Source: workloads 9; checked against the reference's recordings.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import attrs

from g2sim.actors.traffic.events import PreparationEnded
from g2sim.actors.traffic.graph import RequestGraph
from g2sim.actors.traffic.request import RequestStatus
from g2sim.actors.traffic.snapshot import Instance
from g2sim.bus.errors import ProtocolError

WARMUP_REQUESTS = 10
"""Requests that each lane sends after its primers."""


@attrs.frozen(kw_only=True)
class PreparationRequest:
    """One preparation request: the whole input of a source node, and one output token.

    Attributes:
        key: handle, negative; ascending by lane and then by place on it.
        index: number among all of them, from 0.
        phase: "primer" or "warmup".
        number: place on its lane, from 0.
        instance, source: whose input it has: instance, and ordinal of the source node.
    """

    key: int
    index: int
    phase: str
    number: int
    instance: Instance
    source: int

    @property
    def label(self) -> str:
        """Its name within its play."""
        return f"{self.phase}:{self.number}"

    @property
    def uuid(self) -> int:
        """The 128-bit number that reports show."""
        return 2**127 + self.index


class Preparation:
    """See the module's text.

    Args:
        graph: the source.
        instances: the first instance of each lane, in lane order.
    """

    def __init__(self, graph: RequestGraph, instances: Sequence[Instance]) -> None:
        lists = [_lane(graph, instance) for instance in instances]
        self.total = sum(len(sources) for sources in lists)
        self.requests: list[PreparationRequest] = []
        self._ready: list[tuple[float, PreparationRequest]] = []
        self._next: dict[int, PreparationRequest] = {}
        for instance, sources in zip(instances, lists, strict=True):
            lane = []
            for number, (phase, source) in enumerate(sources):
                index = len(self.requests)
                lane.append(
                    PreparationRequest(
                        key=index - self.total,
                        index=index,
                        phase=phase,
                        number=number,
                        instance=instance,
                        source=source,
                    )
                )
                self.requests.append(lane[-1])
            self._ready.append((0.0, lane[0]))
            self._next |= {before.key: after for before, after in itertools.pairwise(lane)}
        self._out: set[int] = set()
        self._busy: set[int] = set()
        self._completed = 0
        self._failure: PreparationEnded | None = None
        self.over = False

    @property
    def quiet(self) -> bool:
        """Whether nothing of it is under way, at the client or on the servers."""
        return not self._out and not self._busy

    @property
    def stops_the_run(self) -> bool:
        """Whether nothing measured will follow, or has not begun."""
        return not self.over or self._failure is not None

    def skip(self) -> None:
        """There is no preparation in this run."""
        self.over = True
        self.total = 0
        self.requests.clear()
        self._ready.clear()

    def next_ready_ms(self) -> float | None:
        """When the next request is ready [ms], None if one must end first."""
        return min((ready_ms for ready_ms, _ in self._ready), default=None)

    def release(self, now_ms: float) -> list[tuple[float, PreparationRequest]]:
        """What is ready, with the instant at which it became so [ms], in lane order."""
        due = [entry for entry in self._ready if entry[0] <= now_ms]
        self._ready = [entry for entry in self._ready if entry[0] > now_ms]
        self._out.update(request.key for _, request in due)
        return sorted(due, key=lambda entry: (entry[0], entry[1].index))

    def ended(self, key: int, status: RequestStatus, now_ms: float, *, busy: bool) -> None:
        """A request ended; ``busy``: ``quiesced`` must follow. After a failure nothing more becomes ready."""
        if key not in self._out:
            raise ProtocolError(f"preparation request {key} ended and was not out")
        self._out.remove(key)
        if busy:
            self._busy.add(key)
        if status is not RequestStatus.COMPLETED:
            if self._failure is None:
                request = self.requests[key + self.total]
                reason = f"preparation request ended with {status.value.capitalize()}"
                self._failure = PreparationEnded(failure_request=f"{request.uuid:032x}", failure_reason=reason)
            self._ready.clear()
            return
        self._completed += 1
        if self._failure is None and (after := self._next.get(key)) is not None:
            self._ready.append((now_ms, after))

    def quiesced(self, key: int) -> None:
        """Nothing is left on the servers of a request."""
        self._busy.discard(key)

    def conclude(self, *, settled: bool) -> PreparationEnded | None:
        """How it ended, if it has; ``settled``: nothing is left on the servers."""
        if not settled or self._out or (self._failure is None and self._completed < self.total):
            return None
        self.over = True
        return self._failure or PreparationEnded()

    def waiting(self) -> list[str]:
        """One line for each request that was released and has not ended."""
        return [f"preparation request {self.requests[key + self.total].label} has not ended" for key in self._out]


def _lane(graph: RequestGraph, instance: Instance) -> list[tuple[str, int]]:
    """(phase, source) of a lane's requests. A lane without primers repeats its earliest remaining node."""
    primers = instance.cut.primers
    earliest = min(instance.cut.delay_ms, key=lambda number: (graph.nodes[number].not_before_ms, number))
    repeated = primers or (earliest,)
    warmups = [("warmup", repeated[number % len(repeated)]) for number in range(WARMUP_REQUESTS)]
    return [*(("primer", number) for number in primers), *warmups]
