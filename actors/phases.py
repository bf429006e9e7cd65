"""The order of things at one instant.

The bus drains these phases in order, again and again, until a round brings nothing new (see ``bus.kernel``). The order
is the reference's: arrivals come before passes start, so that a request that arrives at a pass end joins the next pass.
"""

from __future__ import annotations

import enum


class Phase(enum.IntEnum):
    """Phases of one round, first to last."""

    HOST_POOL = 0
    """A shared pool's transfers end or begin to move."""
    TICK = 1
    """Idle ranks hear of ended transfers."""
    PASS_END = 2
    """Passes end, and their results become visible; workers in order."""
    TICK_AFTER = 3
    """Idle ranks hear of transfers that those pass ends let end (aggregated deployments only)."""
    TERMINAL = 6
    """Traffic hears of requests that have ended."""
    ARRIVAL = 7
    """Requests become ready."""
    PLACE = 8
    """Routers place them."""
    SUBMIT = 9
    """Ranks queue them."""
    START = 10
    """Idle workers start passes, one pass at a time, the first ready worker first."""
