"""What a worker is told."""

from __future__ import annotations

import attrs

from g2sim.actors.worker.sequence import RankRequest


@attrs.frozen(slots=True)
class SubmitRequest:
    """Queue a request on one rank."""

    dp_rank: int
    given: RankRequest
