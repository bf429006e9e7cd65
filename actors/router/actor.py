"""A router on the bus."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from g2sim.actors.phases import Phase
from g2sim.actors.router.events import RequestPlaced
from g2sim.actors.router.messages import ChooseRank, PlaceRequest
from g2sim.actors.router.policy import Placement, PlacementPolicy
from g2sim.actors.worker.messages import SubmitRequest
from g2sim.bus.errors import ProtocolError
from g2sim.bus.kernel import Port


class RouterActor:
    """Places requests on the ranks of one pool.

    Args:
        pool: the pool's short name in events.
        workers: actor names, by worker number.
        dp_size: ranks per worker.
        policy: who chooses.
    """

    def __init__(self, *, pool: str, workers: Sequence[str], dp_size: int, policy: PlacementPolicy) -> None:
        self._pool = pool
        self._workers = tuple(workers)
        self._dp_size = dp_size
        self._policy = policy

    def receive(self, message: Any, port: Port) -> Placement:
        kind = type(message)
        if kind is not PlaceRequest and kind is not ChooseRank:
            raise ProtocolError(f"router: no use for a {kind.__name__}")
        placement = self._policy.place()
        port.publish(
            RequestPlaced(
                request=message.given.request,
                pool=self._pool,
                worker=placement.worker,
                dp_rank=placement.dp_rank,
                scheduler=placement.worker * self._dp_size + placement.dp_rank,
                outcome="immediate",
                queued_at_ms=None,
                overlap_blocks=None,
                best_overlap_blocks=None,
            )
        )
        if kind is PlaceRequest:
            port.send(
                self._workers[placement.worker], SubmitRequest(placement.dp_rank, message.given), phase=Phase.SUBMIT
            )
        return placement

    def waiting(self) -> Sequence[str]:
        return ()
