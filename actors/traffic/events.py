"""Events of the traffic actor."""

from __future__ import annotations

from typing import Any

from g2sim.bus.events import event


@event("tr.arr", version=2)
class RequestArrived:
    """A request became ready and is about to be routed.

    Attributes:
        request: number of the request, from 0 in order of release.
        arrival_ms: reported arrival [ms].
        input_tokens, output_tokens: prompt length and tokens asked for.
        name, session_id, turn_index, uuid: as in ``RequestSpec``; uuid as 32 hex digits.
        play_id, conversation_id, lane_id, root_id, parent_id, cache_id: as in ``AgenticIdentity``.
        preparation: as in ``RequestSpec``.
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
    preparation: str | None = None


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
        status: "completed", "failed", or "incomplete" when the run closed before all of it was dispatched.
        failure_request_id, failure_status: the earliest failure, None when completed.
    """

    play_id: str
    lane_id: str | None
    status: str
    failure_request_id: str | None
    failure_status: str | None


@event("tr.inst")
class PlayRecycled:
    """A lane that became free has started another instance of a source play.

    Attributes:
        play_id, lane_id: the instance, and the lane by its name.
        play: the instance as the report's ``agentic_snapshots`` have it.
    """

    play_id: str
    lane_id: str
    play: dict[str, Any]


@event("tr.shift")
class TimersPulledForward:
    """Everything waited for timers only, so they were moved forward.

    Attributes:
        play_id: whose timers, None = all plays'.
        shifted_by_ms: by how much [ms].
        timer_count: how many.
    """

    play_id: str | None
    shifted_by_ms: float
    timer_count: int


@event("tr.prep")
class PreparationEnded:
    """Preparation is over. If it succeeded, what counts starts now, with caches and routers as they are.

    Attributes:
        failure_request: hex uuid of the preparation request that failed, None if all succeeded.
        failure_reason: why it failed.
    """

    failure_request: str | None = None
    failure_reason: str | None = None


@event("tr.close")
class AdmissionClosed:
    """The profile dispatches nothing from here on.

    Attributes:
        never_issued: requests that were taken out, because they were not dispatched yet.
        censored: the plays that they belong to.
    """

    never_issued: int
    censored: tuple[str, ...]


@event("tr.done")
class ProfileFinished:
    """No client waits for anything: the measured part is over."""
