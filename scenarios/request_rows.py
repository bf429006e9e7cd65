"""One request as a report sees it: what events said of it, and its row in ``requests.jsonl``.

Owns: the definitions of a request's times, reuse and histories (names and values as in the reference's per-request
records, plus the instants that split the time to first token).
Refuses to know: the order in which events arrive, and anything about other requests.
"""

from __future__ import annotations

import uuid
from array import array
from typing import Any, Final

from g2sim.actors.config import WorkerRole
from g2sim.actors.router.events import RequestPlaced
from g2sim.actors.traffic.events import RequestArrived
from g2sim.actors.worker.events import RequestAdmitted

POOL_OF_ROLE = {role.value: role.pool_name for role in WorkerRole}
"""Worker role -> short pool name, as in admission and routing histories."""

DECODE_POOL = WorkerRole.DECODE.pool_name
PREFILL_POOL = WorkerRole.PREFILL.pool_name


HANDOFF_STEPS = ("source_held_ms", "destination_reserved_ms", "destination_activated_ms", "source_released_ms")
"""Instants of a hand-off, in order, by the names that rows use."""


class Admission:
    """One admission: its pool, number of the scheduler in that pool, instant [ms] and event."""

    __slots__ = ("at_ms", "event", "pool", "scheduler")

    def __init__(self, pool: str, scheduler: int, at_ms: float, event: RequestAdmitted) -> None:
        self.pool: Final = pool
        self.scheduler: Final = scheduler
        self.at_ms: Final = at_ms
        self.event: Final = event


class RequestTrack:
    """A request that has not ended.

    Attributes:
        arrival: the event that released it.
        dispatched_at_ms: when that was published [ms].
        token_times_ms: instants of its visible tokens: float64[tokens].
        placements: (instant [ms], event) of each placement.
        load_queued_ms, load_finished_ms: restore from G2 that came before the first admission, None without one.
        handoff_ms: instants of the hand-off by the names that rows use, as far as it got [ms].
    """

    __slots__ = (
        "admissions",
        "arrival",
        "dispatched_at_ms",
        "handoff_ms",
        "load_finished_ms",
        "load_queued_ms",
        "placements",
        "token_times_ms",
    )

    def __init__(self, arrival: RequestArrived, dispatched_at_ms: float) -> None:
        self.arrival = arrival
        self.dispatched_at_ms = dispatched_at_ms
        self.token_times_ms = array("d")
        self.placements: list[tuple[float, RequestPlaced]] = []
        self.admissions: list[Admission] = []
        self.load_queued_ms: float | None = None
        self.load_finished_ms: float | None = None
        self.handoff_ms: dict[str, float] = {}

    def admitted_in(self, pool: str) -> bool:
        return pool in [admission.pool for admission in self.admissions]


class EndedRequest:
    """A request with its end, and the times that follow from its tokens; None where there is nothing to measure.

    Attributes:
        ttft_ms, e2e_latency_ms: first and last visible token since the arrival, floored at 0.
        ttst_ms: second token since the first.
        itl_ms: mean gap between its tokens, (last - first) / (tokens - 1). The summary calls this ``tpot``.
    """

    __slots__ = (
        "e2e_latency_ms",
        "first_token_ms",
        "itl_ms",
        "last_token_ms",
        "status",
        "terminal_ms",
        "track",
        "ttft_ms",
        "ttst_ms",
    )

    def __init__(
        self,
        track: RequestTrack,
        status: str,
        terminal_ms: float,
        first_token_ms: float | None,
        last_token_ms: float | None,
        ttft_ms: float | None,
        ttst_ms: float | None,
        e2e_latency_ms: float | None,
        itl_ms: float | None,
    ) -> None:
        self.track: Final = track
        self.status: Final = status
        self.terminal_ms: Final = terminal_ms
        self.first_token_ms: Final = first_token_ms
        self.last_token_ms: Final = last_token_ms
        self.ttft_ms: Final = ttft_ms
        self.ttst_ms: Final = ttst_ms
        self.e2e_latency_ms: Final = e2e_latency_ms
        self.itl_ms: Final = itl_ms

    @staticmethod
    def of(track: RequestTrack, status: str, terminal_ms: float) -> EndedRequest:
        times, arrival_ms = track.token_times_ms, track.arrival.arrival_ms
        first = times[0] if times else None
        last = times[-1] if times else None
        return EndedRequest(
            track=track,
            status=status,
            terminal_ms=terminal_ms,
            first_token_ms=first,
            last_token_ms=last,
            ttft_ms=None if first is None else max(0.0, first - arrival_ms),
            ttst_ms=times[1] - times[0] if len(times) >= 2 else None,
            e2e_latency_ms=None if last is None else max(0.0, last - arrival_ms),
            itl_ms=(times[-1] - times[0]) / float(len(times) - 1) if len(times) >= 2 else None,
        )

    def admissions_in(self, *, decode: bool) -> list[Admission]:
        """Admissions on decode ranks, or on the ranks that compute prompts (aggregated, prefill)."""
        return [admission for admission in self.track.admissions if (admission.pool == DECODE_POOL) is decode]

    def ttft_parts_ms(self) -> dict[str, float] | None:
        """Time to first token by what it was spent on [ms], None without tokens.

        The parts are differences of consecutive instants, from the arrival to the first token, so no time is counted
        twice or left out: ``queue`` up to the restore or else the admission, ``host_load`` the copy from G2,
        ``restored_wait`` from its end to the admission, then ``prefill``. With separate pools that ends when the source
        is held, and ``reservation``, ``transfer``, ``decode_queue`` and ``decode`` follow, up to the instants at which
        the destination is reserved, activated and admitted. Preemptions count where they happen.
        """
        track = self.track
        if self.first_token_ms is None or not track.admissions:
            return None
        admitted_ms = track.admissions[0].at_ms
        loading_ms = admitted_ms if track.load_queued_ms is None else track.load_queued_ms
        loaded_ms = loading_ms if track.load_finished_ms is None else track.load_finished_ms
        parts = {
            "queue": loading_ms - track.arrival.arrival_ms,
            "host_load": loaded_ms - loading_ms,
            "restored_wait": admitted_ms - loaded_ms,
        }
        decode = self.admissions_in(decode=True)
        if decode:
            held_ms, reserved_ms, activated_ms = [track.handoff_ms[name] for name in HANDOFF_STEPS[:3]]
            decoding_ms = decode[0].at_ms
            parts["prefill"] = held_ms - admitted_ms
            parts["reservation"] = reserved_ms - held_ms
            parts["transfer"] = activated_ms - reserved_ms
            parts["decode_queue"] = decoding_ms - activated_ms
            parts["decode"] = self.first_token_ms - decoding_ms
        else:
            parts["prefill"] = self.first_token_ms - admitted_ms
        return parts

    def row(self, block_size_tokens: int) -> dict[str, Any]:
        """The request's row."""
        track, arrival = self.track, self.track.arrival
        prompt_side, decode_side = self.admissions_in(decode=False), self.admissions_in(decode=True)
        placed = {event.pool: event for _, event in track.placements}
        prefill, aggregated = placed.get(PREFILL_POOL), placed.get(WorkerRole.AGGREGATED.pool_name)
        decode_scheduler = decode_side[0].scheduler if decode_side else None
        first = prompt_side[0].event if prompt_side else None
        row: dict[str, Any] = {
            "request": arrival.request,
            "session_id": arrival.session_id,
            "turn_index": arrival.turn_index,
            "uuid": None if arrival.uuid is None else str(uuid.UUID(arrival.uuid)),
            "arrival_time_ms": arrival.arrival_ms,
            "dispatched_at_ms": None if arrival.play_id is None else track.dispatched_at_ms,
            "first_admit_ms": track.admissions[0].at_ms if track.admissions else None,
            "first_token_ms": self.first_token_ms,
            "last_token_ms": self.last_token_ms,
            "terminal_time_ms": self.terminal_ms,
            "terminal_status": self.status,
            "ttft_ms": self.ttft_ms,
            "ttft_parts_ms": self.ttft_parts_ms(),
            "ttst_ms": self.ttst_ms,
            "e2e_latency_ms": self.e2e_latency_ms,
            "itl_ms": self.itl_ms,
            "input_length": arrival.input_tokens,
            "requested_output_length": arrival.output_tokens,
            "output_length": len(track.token_times_ms),
            "reused_input_tokens": max((admission.event.reused_tokens for admission in prompt_side), default=0),
            "first_admission_g1_reused_input_tokens": None if first is None else first.g1_tokens,
            "first_admission_host_reused_input_tokens": None if first is None else first.host_tokens,
            "decode_reused_input_tokens": max(
                (admission.event.reused_tokens for admission in decode_side), default=None
            ),
            "host_load_queued_ms": track.load_queued_ms,
            "host_load_finished_ms": track.load_finished_ms,
            "prefill_worker_idx": None if prefill is None else prefill.scheduler,
            # A decode placement counts once the rank took the request; one that can never fit there has none.
            "decode_worker_idx": decode_scheduler if aggregated is None else aggregated.scheduler,
            "prefill_admit_ms": prompt_side[0].at_ms if prefill is not None and prompt_side else None,
            "source_held_ms": track.handoff_ms.get("source_held_ms"),
            "destination_reserved_ms": track.handoff_ms.get("destination_reserved_ms"),
            "destination_activated_ms": track.handoff_ms.get("destination_activated_ms"),
            "decode_admit_ms": decode_side[0].at_ms if decode_side else None,
            "source_released_ms": track.handoff_ms.get("source_released_ms"),
            "prefill_route_overlap_tokens": _overlap_tokens(prefill, block_size_tokens),
            "decode_route_overlap_tokens": _overlap_tokens(placed.get(DECODE_POOL), block_size_tokens),
            "admission_history": _admission_history(track.admissions),
            "admission_count": len(track.admissions),
            "readmission_count": sum(admission.event.readmission for admission in track.admissions),
            "routing_history": [_routing(at_ms, event, block_size_tokens) for at_ms, event in track.placements],
        }
        if arrival.play_id is not None:
            row |= {"request_id": arrival.name, "play_id": arrival.play_id, "agentic": _identity(arrival)}
        return row


def _identity(arrival: RequestArrived) -> dict[str, str]:
    """Who an agentic request is; unknown parts are left out.

    A play with a cache of its own is an instance of a source play, and its requests have instance ids made of the
    play's id and their own (workloads 8.4). The row's ``request_id`` stays the source's.
    """
    name = arrival.name if arrival.cache_id is None else f"{arrival.play_id}:request:{arrival.name}"
    parts = {
        "request_id": name,
        "play_id": arrival.play_id,
        "conversation_id": arrival.conversation_id,
        "lane_id": arrival.lane_id,
        "root_id": arrival.root_id,
        "parent_id": arrival.parent_id,
        "cache_id": arrival.cache_id,
    }
    return {key: value for key, value in parts.items() if value is not None}


def _admission_history(admissions: list[Admission]) -> list[dict[str, Any]]:
    seen: dict[str, int] = {}
    history = []
    for ordinal, admission in enumerate(admissions):
        in_pool = seen.get(admission.pool, 0)
        seen[admission.pool] = in_pool + 1
        history.append(
            {
                "admission_ordinal": ordinal,
                "pool_admission_ordinal": in_pool,
                "pool": admission.pool,
                "at_ms": admission.at_ms,
                "reused_input_tokens": admission.event.reused_tokens,
                "g1_reused_input_tokens": admission.event.g1_tokens,
                "host_reused_input_tokens": admission.event.host_tokens,
                "is_readmission": admission.event.readmission,
            }
        )
    return history


def _routing(released_ms: float, event: RequestPlaced, block_size_tokens: int) -> dict[str, Any]:
    selected, best = event.overlap_blocks, event.best_overlap_blocks
    waited_from_ms = event.queued_at_ms
    return {
        "pool": event.pool,
        "logical_worker_id": event.worker,
        "scheduler_id": event.scheduler,
        "dp_rank": event.dp_rank,
        "outcome": event.outcome,
        "queue_entered_at_ms": waited_from_ms,
        "released_at_ms": None if waited_from_ms is None else released_ms,
        "queue_wait_ms": 0.0 if waited_from_ms is None else released_ms - waited_from_ms,
        "reported_overlap_tokens": _overlap_tokens(event, block_size_tokens),
        "selected_overlap_blocks": selected,
        "best_available_overlap_blocks": best,
        "overlap_regret_blocks": None if selected is None or best is None else best - selected,
    }


def _overlap_tokens(event: RequestPlaced | None, block_size_tokens: int) -> int | None:
    """Overlap that the router reported for a placement; 0 from a policy that does not look, None without placement."""
    return None if event is None else (event.overlap_blocks or 0) * block_size_tokens
