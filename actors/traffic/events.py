"""Events of the traffic actor."""

from __future__ import annotations

from g2sim.bus.events import event


@event("tr.arr")
class RequestArrived:
    """A request became ready and is about to be routed.

    Attributes:
        request: number of the request, from 0 in order of release.
        arrival_ms: reported arrival [ms].
        input_tokens, output_tokens: prompt length and tokens asked for.
        name, session_id, turn_index, uuid: as in ``RequestSpec``; uuid as 32 hex digits.
        play_id, conversation_id, lane_id, root_id, parent_id, cache_id: as in ``AgenticIdentity``.
    """

    request: int
    arrival_ms: float
    input_tokens: int
    output_tokens: int
    name: str | None
    session_id: str | None
    turn_index: int | None
    uuid: str | None
    play_id: str | None
    conversation_id: str | None
    lane_id: str | None
    root_id: str | None
    parent_id: str | None
    cache_id: str | None


@event("tr.skip")
class RequestSkipped:
    """A request of a failed play that will never be dispatched. ``because`` names the request that failed."""

    name: str
    play_id: str
    because: str


@event("tr.play")
class PlaySettled:
    """A play has nothing outstanding and nothing left to dispatch.

    Attributes:
        status: "completed" or "failed".
        failure_request_id, failure_status: the earliest failure, None when completed.
    """

    play_id: str
    lane_id: str | None
    status: str
    failure_request_id: str | None
    failure_status: str | None
