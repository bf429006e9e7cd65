"""A request as traffic describes it, and the contract between a traffic driver and its actor."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import attrs

from g2sim.actors.kv.prompt import Prompt, TokenArray


class RequestStatus(enum.StrEnum):
    """How a request ended. Values as in reports."""

    COMPLETED = "completed"
    REJECTED = "rejected"
    FAILED = "failed"
    CANCELED = "canceled"


@attrs.frozen(kw_only=True, slots=True)
class AgenticIdentity:
    """Who a request is in agentic traffic. ``None`` = the report leaves the field out.

    Attributes:
        play_id: its play.
        conversation_id: its conversation in the play.
        lane_id: the lane that the play runs in, None outside load control by lanes.
        root_id: the request that began the play, None if several did.
        parent_id: the request that spawned it, None if none did.
        cache_id: the namespace of blocks of an instance of a play, None where plays run as they stand in the trace.
    """

    play_id: str
    conversation_id: str
    lane_id: str | None = None
    root_id: str | None = None
    parent_id: str | None = None
    cache_id: str | None = None


@attrs.frozen(kw_only=True, slots=True)
class RequestSpec:
    """What is asked for.

    Attributes:
        name: the request's own id in its trace, None for rows that have none.
        session_id, turn_index: conversation and turn (from 0), None where reports show null.
        prompt: its tokens.
        output_tokens: tokens to generate, 0 = prefill only.
        agentic: identity in a play, None outside agentic traffic.
        preparation: "primer:<i>" or "warmup:<i>" for a request that warms the caches up before the measured part of
            a run, with its number on its lane; else None.
        uuid: 128-bit number that reports show for agentic and plain synthetic requests, else None.
        output_ids: the tokens it generates, uint32[output_tokens], where traffic says which; else None.
    """

    name: str | None
    session_id: str | None
    turn_index: int | None
    prompt: Prompt
    output_tokens: int
    agentic: AgenticIdentity | None = None
    uuid: int | None = None
    output_ids: TokenArray | None = attrs.field(default=None, eq=False)
    preparation: str | None = None


@attrs.frozen(slots=True)
class Cancel:
    """A released request, by key, that nobody waits for any longer; its end follows."""

    key: int


@attrs.frozen(slots=True)
class Release:
    """A request that became ready.

    Attributes:
        key: the driver's own handle, given back in ``ended``.
        arrival_ms: the reported arrival (ready time, or the current instant in a closed loop) [ms].
    """

    key: int
    arrival_ms: float
    spec: RequestSpec


class TrafficDriver(Protocol):
    """Says which requests are ready when. Pure: no clock, no randomness; time only as arguments [ms]."""

    def next_ready_ms(self) -> float | None:
        """The earliest time at which ``release`` would return something, None if nothing is scheduled."""
        ...

    def release(self, now_ms: float) -> Sequence[Release]:
        """Everything with a ready time <= now, in the order in which it must be routed. Each is returned once."""
        ...

    def ended(self, ends: Sequence[tuple[int, RequestStatus]], now_ms: float) -> Sequence[object]:
        """Take note that released requests (by key) ended now, in this order.

        Returns: traffic events that follow (skipped requests, settled plays), to be published in this order.
        """
        ...

    def waiting(self) -> Sequence[str]:
        """One line for each thing that still waits and cannot become ready by itself; empty when all is done."""
        ...

    @property
    def total_requests(self) -> int | None:
        """Requests this traffic will release if nothing fails, None when it cannot know; for progress only."""
        ...


@runtime_checkable
class LoadControl(Protocol):
    """What a driver has besides, if it acts on its own: it prepares, recycles plays, or closes the run."""

    @property
    def prepares(self) -> bool:
        """Whether it has to know when the servers have settled."""
        ...

    def control(self, now_ms: float, *, settled: bool) -> Sequence[object]:
        """To be called at every instant at which requests ended or ``next_ready_ms`` is due, before ``release``.

        Args:
            now_ms: the instant.
            settled: nothing is left on the servers of requests that have ended, host transfers included.
        Returns: traffic events to be published, and ``Cancel``, in this order.
        """
        ...
