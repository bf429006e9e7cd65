"""The order of things at one instant.

The bus drains these phases in order, again and again, until a round brings nothing new (see ``bus.kernel``). The order
is the reference's: in an aggregated deployment arrivals come before passes start, so that a request that arrives at a
pass end joins the next pass; with prefill and decode pools an arrival is only reported, and handed over a round later.
"""

from __future__ import annotations

import enum


class Phase(enum.IntEnum):
    """Phases of one round, first to last."""

    FAULT = -1
    """Workers crash, are found dead, restart, or drop out of discovery."""
    HOST_POOL = 0
    """A shared pool's transfers end or begin to move."""
    TICK = 1
    """Idle ranks hear of ended transfers."""
    PASS_END = 2
    """Passes end, and their results become visible; workers in order."""
    TICK_AFTER = 3
    """Idle ranks hear of transfers that those pass ends let end."""
    REPORT = 4
    """The hand-off coordinator hears of ended passes and of arrivals."""
    TRANSFER_END = 5
    """Hand-off transfers end, in the order of their numbers."""
    HANDOFF = 6
    """The coordinator works off its queue of actions."""
    TERMINAL = 7
    """Traffic hears of requests that have ended."""
    ARRIVAL = 8
    """Requests become ready."""
    PLACE = 9
    """Routers place them."""
    SUBMIT = 10
    """Ranks queue them."""
    START = 11
    """Idle workers start passes, one pass at a time, the first ready worker first."""
    SCRIPT = 12
    """A scripted scenario goes on, with all of the round behind it."""
