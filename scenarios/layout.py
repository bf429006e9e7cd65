"""The layout of a scenario file: which keys there are, what each takes, and its default.

Owns: the tables. They are a superset of the configuration of ``aisimulate predict``; its names and defaults are kept.
Refuses to know: how fields depend on each other (``agreement``), what is not supported (``support``).

A table takes every value that the reference knows; those that g2sim does not support are refused by ``support``, and
are not advertised in messages. Enumerated values become members of their enumeration.
"""

from __future__ import annotations

import enum
import math

import attrs

from g2sim.actors.config import HostScope, PreemptionMode, Sharing, TieBreak, TransferTiming
from g2sim.actors.kv.events import Tier
from g2sim.actors.router.faults import FaultKind, OnCrash, RecoveryMode
from g2sim.actors.traffic.graph import MAX_TIME_MS
from g2sim.actors.traffic.profile import ProfileOptions
from g2sim.actors.traffic.trace_json import MAX_TOKENS
from g2sim.scenarios.aic_timing import DEFAULT_MEMORY_FRACTION, QUANT_MODES
from g2sim.scenarios.fields import (
    ABSENT,
    EXACT_MAX,
    U64_MAX,
    Field,
    ListOf,
    Named,
    Section,
    Variants,
    boolean,
    choice,
    integer,
    list_of,
    mapping,
    number,
    or_null,
    scalar,
    section,
    text,
    unchecked,
    zero_or,
)


class TraceFormat(enum.StrEnum):
    """Formats of trace files."""

    MOONCAKE = "mooncake"
    MOONCAKE_DELTA = "mooncake-delta"
    AGENTIC_MOONCAKE = "agentic_mooncake"
    APPLIED_COMPUTE_AGENTIC = "applied_compute_agentic"
    WEKA = "weka"
    DYNAMO = "dynamo"


class TimestampBasis(enum.StrEnum):
    """What times inside a Weka subagent count from; auto finds out."""

    AUTO = "auto"
    ABSOLUTE = "absolute"
    RELATIVE = "relative"


MOE_PARALLELISM = ("moe_tensor", "moe_expert")

_COUNT = integer("a positive integer", 1)
_NATURAL = integer("an integer, 0 or more", 0)
_LIMIT = integer("a positive integer, or null for no limit", 1, EXACT_MAX, literals={None: None})
_TOKENS = integer("a positive integer number of tokens", 1, EXACT_MAX)
_LENGTH = integer(f"an integer number of tokens from 1 to {MAX_TOKENS}", 1, MAX_TOKENS)
BLOCKS = integer("a positive integer number of blocks", 1)
_BYTES = integer("a positive integer number of bytes", 1, EXACT_MAX)
_SEED = integer("an integer from 0 to 2**64 - 1", 0, U64_MAX)
_BYTES_PER_TOKEN = integer("a positive integer, or auto", 1, EXACT_MAX, literals={"auto": None, None: None})
_RATIO = number("a number from 0 to 1", 0.0, 1.0)
_AMOUNT = number("a finite number, 0 or more", 0.0)
_POSITIVE = number("a finite number above 0", 0.0, above=True)
_MS = number("a number of ms from 0 to 2**53", 0.0, MAX_TIME_MS)
_POSITIVE_MS = number("a number of ms above 0, up to 2**53", 0.0, MAX_TIME_MS, above=True)
_SECONDS = number("a number of seconds from 0 to 2**43", 0.0, 2.0**43)
_POSITIVE_SECONDS = number("a number of seconds above 0, up to 2**43", 0.0, 2.0**43, above=True)
_SPEEDUP = zero_or("a finite number from 1e-9 on, or 0 for no scaling", 1e-9)
BANDWIDTH = zero_or("a finite number of GB/s from 1e-9 on, 0 for no limit", 1e-9)
_TRUE_FALSE = boolean()
_LABEL = or_null(text("non-blank text"))

_HOST_TIER = section(
    Field("scope", choice(*HostScope), HostScope.DP_RANK_LOCAL),
    Field("num_host_blocks", BLOCKS),
    Field("d2h_bandwidth_gbps", BANDWIDTH, 32.0),
    Field("h2d_bandwidth_gbps", BANDWIDTH, 32.0),
    Field("shared_d2h_bandwidth_gbps", BANDWIDTH, 80.0),
    Field("shared_h2d_bandwidth_gbps", BANDWIDTH, 80.0),
    Field("latency_to_first_byte_ms", _MS, 0.0),
    Field("kv_layout_id", or_null(text("non-blank text")), ABSENT),
    Field("sharing", choice(*Sharing), Sharing.MAX_MIN),
    nullable=True,
)

_SPEEDUPS = (Field("speedup_ratio", _SPEEDUP, 1.0), Field("decode_speedup_ratio", _SPEEDUP, 1.0))

_QUANT_MODES = tuple(Field(key, _LABEL, None) for key in QUANT_MODES)

_TIMING = Variants(
    cases={
        "fixed": section(Field("prefill_ms", _MS), Field("decode_ms", _MS), *_SPEEDUPS),
        "polynomial": section(*_SPEEDUPS),
        "table": section(Field("path", text("a path")), *_SPEEDUPS),
        "aic": section(*_QUANT_MODES, *_SPEEDUPS),
        "default": section(*_QUANT_MODES, *_SPEEDUPS),
    },
    default="default",
    hidden=("default",),
)

_CAPACITY = Variants(
    cases={
        "fixed": section(
            Field("blocks", or_null(BLOCKS), None),
            Field("bytes", or_null(_BYTES), None),
        ),
        "default": section(
            Field(
                "memory_fraction",
                number("a number above 0, up to 1", 0.0, 1.0, above=True, null=DEFAULT_MEMORY_FRACTION),
                DEFAULT_MEMORY_FRACTION,
            )
        ),
    },
    default="default",
)


def _worker(max_sequences: int) -> Section:
    return section(
        Field("context_length", _LIMIT, None),
        Field(
            "parallelism",
            section(
                Field("replicas", unchecked(_COUNT), ABSENT),  # checked by the rule worker-count
                Field("tensor", _COUNT, 1),
                Field("attention_data", _COUNT, 1),
                *(Field(key, integer(_COUNT.allowed, 1, literals={None: 1}), 1) for key in MOE_PARALLELISM),
            ),
            {},
        ),
        Field(
            "scheduler",
            section(
                Field("max_batched_tokens", _LIMIT, 8192),
                Field("max_sequences", _LIMIT, max_sequences),
                Field("chunked_prefill", _TRUE_FALSE, ABSENT),
                Field("preemption_mode", choice(*PreemptionMode), PreemptionMode.LIFO),
            ),
            {},
        ),
        Field(
            "kv_cache",
            section(
                Field("block_size", integer("an integer, 2 or more", 2, EXACT_MAX, literals={None: 64}), 64),
                Field("prefix_caching", _TRUE_FALSE, True),
                Field("bytes_per_token", _BYTES_PER_TOKEN, None),
                Field("capacity", _CAPACITY, {}),
                Field("host_offload", _HOST_TIER, None),
            ),
            {},
        ),
        Field("timing", _TIMING, {}),
        nullable=True,
    )


_ENGINE = section(
    Field("mode", choice("aggregated", "disaggregated", hidden=("afd",)), "aggregated"),
    Field("model", _LABEL, None),
    Field("hardware", _LABEL, None),
    Field("backend", choice("vllm", hidden=("sglang", "trtllm")), "vllm"),
    Field("backend_version", _LABEL, None),
    *_QUANT_MODES,
    Field("context_length", integer("a positive integer, or max", 1, EXACT_MAX, literals={"max": None}), "max"),
    Field("enable_chunked_prefill", or_null(_TRUE_FALSE), None),
    Field(
        "workers",
        section(
            Field("aggregated", _worker(256), None),
            Field("prefill", _worker(1), None),
            Field("decode", _worker(256), None),
        ),
    ),
    Field(
        "kv_transfer",
        section(
            Field("bytes_per_token", _BYTES_PER_TOKEN, None),
            Field("bandwidth_gb_per_second", or_null(BANDWIDTH), None),
            Field("timing_mode", choice(*TransferTiming), TransferTiming.DESTINATION_MISSING),
            nullable=True,
        ),
        None,
    ),
)

PREFIX_GROUPS = (Field("shared_prefix_ratio", _RATIO, 0.0), Field("prefix_groups", _NATURAL, 0))

_SOURCE = Variants(
    cases={
        "trace": section(
            Field("paths", list_of(text("a path"), "a list of one path")),
            Field("format", choice(*TraceFormat), TraceFormat.MOONCAKE),
            Field("block_size", or_null(_TOKENS), None),
            Field("nested_timestamp_basis", or_null(choice(*TimestampBasis)), None),
            Field("strict", _TRUE_FALSE, False),
            *PREFIX_GROUPS,
        ),
        "synthetic": section(Field("input_tokens", _LENGTH, 1024), Field("output_tokens", _LENGTH, 128)),
        "synthetic-session": section(
            Field("new_input_tokens_per_turn", _LENGTH, 1024),
            Field("output_tokens_per_turn", _LENGTH, 128),
            Field(
                "session",
                section(
                    Field("turns", _COUNT, 4),
                    *PREFIX_GROUPS,
                    Field("inter_turn_delay_ms", _MS, 0.0),
                    Field("accumulate", _TRUE_FALSE, True),
                    Field("group_seed", _SEED, 0),
                ),
            ),
        ),
        "script": section(Field("path", text("a path"))),
    },
    default="synthetic",
    hidden=("script",),
)

_SLA = section(*(Field(key, or_null(_POSITIVE), None) for key in ("ttft_ms", "itl_ms", "e2e_ms")), nullable=True)

_MAY_BE_ZERO = ("response_grace_seconds", "cancel_drain_seconds")

_RATES = (
    Field("requests_per_second", or_null(_POSITIVE), None),
    Field("sessions_per_second", or_null(_POSITIVE), None),
)

_PROFILE = section(
    *(
        Field(option.name, _SECONDS if option.name in _MAY_BE_ZERO else _POSITIVE_SECONDS, option.default)
        for option in attrs.fields(ProfileOptions)
    ),
    nullable=True,
)

_LOAD = Variants(
    cases={
        "concurrency": section(Field("concurrency", _COUNT, 10)),
        "poisson": section(*_RATES, Field("seed", integer(_SEED.allowed, 0, U64_MAX, literals={None: 42}), 42)),
        "constant_rate": section(*_RATES, Field("interval_ms", or_null(_MS), None)),
        "trace_timestamps": section(
            Field("speedup", number("a finite number above 0", 0.0, above=True, null=1.0), 1.0),
            Field("agentic_lanes", or_null(_COUNT), None),
            Field("agentic_snapshot", section(Field("seed", _SEED), nullable=True), None),
            Field("agentic_warmup", _TRUE_FALSE, False),
            Field("agentic_profile", _PROFILE, None),
        ),
    },
    default="concurrency",
)

STOP = section(
    *(Field(key, or_null(_COUNT), None) for key in ("requests", "sessions")),
    *(Field(f"{key}_per_load_unit", or_null(_POSITIVE), None) for key in ("requests", "sessions")),
    Field("max_virtual_time_seconds", or_null(_POSITIVE_SECONDS), None),
    Field("max_virtual_time_ms", or_null(_MS), None),
    nullable=True,
)

ROUTER_SHORTCUTS = {
    "overlap_score_credit": "overlap_score_credit",
    "prefill_load_scale": "prefill_load_scale",
    "temperature": "router_temperature",
}
"""Keys beside ``router.options`` that set an option of policy dynamo_kv."""

_ROUTER = section(
    Field("policy", text("the name of a policy"), "round_robin"),
    Field("kv_event_lag_ms", _MS, 0.0),
    Field("replicas", _COUNT, 1),
    Field("load_sync_ms", or_null(_MS), None),
    Field("tie_break", choice(*TieBreak), TieBreak.LOWEST),
    Field("options", mapping("a mapping of options of the policy"), {}),
    *(Field(key, or_null(_AMOUNT), None) for key in ROUTER_SHORTCUTS),
)

_ANY_NUMBER = number("a finite number", -math.inf)

BOUNDS = ("equals", "at_least", "at_most", "above", "below")
"""Keys of an expectation that bound what it is about."""

_EXPECTATION = section(
    Field("report", text("the path of a report field, such as totals.passes"), None),
    Field("events", text("a type of event: RequestAdmitted or wk.adm"), None),
    Field("where", mapping("a mapping of fields of the event to their values"), {}),
    Field("since_ms", _MS, None),
    Field("until_ms", _MS, None),
    Field("variant", text("the name of a variant"), None),
    Field("minus", text("the name of a variant"), None),
    Field(BOUNDS[0], scalar(), ABSENT),
    *(Field(key, _ANY_NUMBER, ABSENT) for key in BOUNDS[1:]),
)

_CHANCE = number("a number above 0, up to 1", 0.0, 1.0, above=True)

_BEGUN = (Field("name", text("non-blank text"), ABSENT), Field("from_ms", _MS, 0.0))
_OF_POOL = Field("pool", or_null(choice("agg", "prefill", "decode")), None)
_OF_WORKER = Field("worker", or_null(_NATURAL), None)
_OF_RANK = Field("dp_rank", or_null(_NATURAL), None)
_STRUCK = (*_BEGUN, Field("until_ms", _MS), _OF_POOL)
_STRUCK_WORKER = (*_STRUCK, _OF_WORKER)
_STRUCK_RANK = (*_STRUCK_WORKER, _OF_RANK)

FAULT = Variants(
    cases={
        FaultKind.LAG: section(*_STRUCK_RANK, Field("lag_ms", _MS), Field("lag_max_ms", or_null(_MS), None)),
        FaultKind.LOSS: section(*_STRUCK_RANK, Field("probability", _CHANCE)),
        FaultKind.DUPLICATION: section(*_STRUCK_RANK, Field("probability", _CHANCE)),
        FaultKind.REORDERING: section(*_STRUCK_RANK, Field("probability", _CHANCE), Field("hold_ms", _POSITIVE_MS)),
        FaultKind.OUTAGE: section(*_STRUCK_RANK),
        FaultKind.ROUTER_RESTART: section(*_STRUCK),
        FaultKind.PUBLISHER_RESET: section(*_STRUCK_RANK),
        FaultKind.WORKER_CRASH: section(
            *_STRUCK_WORKER, Field("detect_ms", _MS, 0.0), Field("requests", choice(*OnCrash), OnCrash.FAIL)
        ),
        FaultKind.DISCOVERY_FLAP: section(*_STRUCK_WORKER),
        FaultKind.CACHE_CLEAR: section(
            *_BEGUN, _OF_POOL, _OF_WORKER, _OF_RANK, Field("tier", or_null(choice(*Tier)), None)
        ),
    },
)
"""One fault; ``settle`` gives it a name."""

_FAULTS = section(
    Field(
        "recovery",
        section(
            Field("mode", choice(*RecoveryMode), RecoveryMode.REPLAY),
            Field("latency_ms", _MS, 1.0),
            Field("patience_ms", _MS, 0.0),
            Field("history_events", _NATURAL, 10_000),
            Field("heartbeat_ms", number("a number of ms from 0.001 to 2**53", 0.001, MAX_TIME_MS), 100.0),
        ),
        {},
    ),
    Field("plan", ListOf(FAULT)),
    nullable=True,
)

SCENARIO = section(
    Field("name", text("non-blank text"), ABSENT),
    Field("why", text("text", blank=True, lines=True), ""),
    Field("seed", _SEED, 0),
    Field("engine", _ENGINE),
    Field(
        "traffic",
        section(Field("source", _SOURCE), Field("load", _LOAD), Field("stop", STOP, {})),
        {"source": {}, "load": {}, "stop": {"requests": 100}},
    ),
    Field("router", _ROUTER, {}),
    Field("evaluation", section(Field("sla", _SLA, None)), {}),
    Field("variants", Named("a mapping of dotted keys of this file to other values"), {}),
    Field("expect", ListOf(_EXPECTATION), []),
    Field("faults", _FAULTS, None),
)
