"""What a router is asked."""

from __future__ import annotations

import attrs

from g2sim.actors.worker.sequence import RankRequest


@attrs.frozen(slots=True)
class PlaceRequest:
    """Choose a rank for a request, and send it there."""

    given: RankRequest


@attrs.frozen(slots=True)
class ChooseRank:
    """Choose a rank for a request. Reply: ``Placement``; the asker sends the request there."""

    given: RankRequest
