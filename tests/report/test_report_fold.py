"""What the report's figures mean, in small streams worked by hand, and which streams it refuses."""

from __future__ import annotations

import itertools
import json
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_streams import (
    admitted,
    arrived,
    ended,
    fold,
    pass_ended,
    placed,
    pool_info,
    run_finished,
    run_info,
    served,
    started,
)

from g2sim.actors.config import (
    DeploymentConfig,
    HostScope,
    HostTierConfig,
    PoolConfig,
    RankConfig,
    SlaConfig,
    WorkerRole,
)
from g2sim.actors.handoff.events import DestinationActivated, DestinationReserved, SourceHeld, SourceReleased
from g2sim.actors.host_pool.events import (
    ClientRetired,
    HostBlocksEvicted,
    LoadFinished,
    LoadQueued,
    StoreLanded,
    StorePrepared,
)
from g2sim.actors.traffic.request import RequestStatus
from g2sim.actors.worker.events import PassStarted, RequestPreempted
from g2sim.bus.errors import InvariantViolation
from g2sim.bus.events import Record
from g2sim.scenarios.report import ReportFold, RunInfo, report_text, row_text
from g2sim.scenarios.request_rows import HANDOFF_STEPS
from g2sim.scenarios.statistics import StreamedDistribution

CLIENT = {"worker": 0, "role": "aggregated", "dp_rank": 0}


def strict(text: str) -> Any:
    """JSON as a parser reads it that knows no NaN and no infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def preempted(request: int) -> RequestPreempted:
    return RequestPreempted(request=request, **CLIENT)


def prepared(transfer: int, *blocks: int, pool: str = "g2") -> StorePrepared:
    return StorePrepared(pool=pool, request=0, transfer=transfer, block_hashes=blocks, **CLIENT)


def landed(transfer: int) -> StoreLanded:
    return StoreLanded(pool="g2", transfer=transfer, ended_ms=0.0)


def evicted(*blocks: int) -> HostBlocksEvicted:
    return HostBlocksEvicted(pool="g2", block_hashes=blocks)


def loading(transfer: int, *blocks: int, request: int = 0) -> LoadQueued:
    return LoadQueued(
        pool="g2", request=request, transfer=transfer, block_hashes=blocks, completes_at_ms=None, **CLIENT
    )


def loaded(transfer: int) -> LoadFinished:
    return LoadFinished(pool="g2", transfer=transfer, ended_ms=0.0)


# Zero, one, two tokens; no time; no requests -----------------------------------------------------------------------


def test_answers_of_no_one_and_two_tokens_have_only_the_figures_that_exist() -> None:
    """F77: time per token exists from two tokens on; what does not exist is null and in no sample count."""
    report, rows = fold(run_info(), *served(0), *served(1, 3.0), *served(2, 4.0, 6.0, at=3.0))
    assert [row["output_length"] for row in rows] == [0, 1, 2]
    assert [row["ttft_ms"] for row in rows] == [None, 3.0, 1.0]
    assert [row["e2e_latency_ms"] for row in rows] == [None, 3.0, 3.0]
    assert [row["ttst_ms"] for row in rows] == [row["itl_ms"] for row in rows] == [None, None, 2.0]
    summary = report["summary"]
    assert [summary[f"num_{metric}_samples"] for metric in ("ttft", "tpot", "e2e_latency")] == [2, 1, 2]
    assert (summary["mean_ttft_ms"], summary["mean_tpot_ms"], summary["mean_itl_ms"]) == (2.0, 2.0, 2.0)
    assert strict(report_text(report)) == report
    assert [strict(row_text(row)) for row in rows] == rows


def test_a_run_that_takes_no_time_has_finite_rates() -> None:
    """F77, F50: rates are over at least a nanosecond, as in the reference; gaps of 0 give no rate per user."""
    summary = fold(run_info(), *served(0, 0.0, 0.0), *served(1, 0.0, 0.0))[0]["summary"]
    assert (summary["duration_ms"], summary["request_throughput_rps"]) == (0.0, 2 / 1e-9)
    assert summary["max_itl_ms"] == summary["max_output_token_throughput_per_user"] == 0.0
    strict(report_text(fold(run_info(), *served(0, 0.0, 0.0))[0]))


def test_a_run_without_requests_is_all_zeros() -> None:
    report, rows = fold(run_info(sla=SlaConfig(e2e_ms=1.0)), (0.0, run_finished()))
    assert rows == []
    numbers = {key: value for key, value in report["summary"].items() if not key.endswith("gpus_per_worker")}
    assert set(numbers.values()) == {0, "lru"}
    assert report["requests"] == dict.fromkeys(
        ("released", "completed", "rejected", "failed", "canceled", "unfinished"), 0
    )
    assert set(report["totals"].values()) == {0}
    strict(report_text(report))


# Definitions -------------------------------------------------------------------------------------------------------


def test_gaps_and_time_per_token_have_different_names() -> None:
    """F78: tokens at 0, 10, 20, 220 are 73.33 ms per token, and gaps of 10, 10 and 200."""
    report, rows = fold(run_info(), *served(0, 0.0, 10.0, 20.0, 220.0))
    summary = report["summary"]
    assert rows[0]["itl_ms"] == summary["mean_tpot_ms"] == summary["max_tpot_ms"] == 220 / 3
    assert (summary["min_itl_ms"], summary["max_itl_ms"]) == (10.0, 200.0)
    assert summary["p99_itl_ms"] == pytest.approx(200.0, rel=1e-3)
    assert {"tpot", "itl"} <= report["definitions"].keys()


def test_the_first_token_counts_and_a_length_limit_cuts_only_what_was_made() -> None:
    """F79: one of 50, one of 1, and one that asked for 9 and was cut at 3."""
    stream = [*served(0, *map(float, range(1, 51))), *served(1, 50.0), *served(2, 50.0, 51.0, 52.0, out=9)]
    report, rows = fold(run_info(), *sorted(stream, key=lambda item: item[0]))
    assert [row["output_length"] for row in rows] == [50, 1, 3]
    assert [row["requested_output_length"] for row in rows] == [50, 1, 9]
    assert report["summary"]["total_output_tokens"] == report["totals"]["output_tokens"] == 54


def test_hits_count_once_and_what_a_readmission_finds_has_its_own_counter() -> None:
    """F80: asked 40, of which 24 in G1 and 8 in G2 at the first admission; 44 found again later change none of it."""
    stream = [
        *[(0.0, arrived(0, tokens=40)), (0.0, placed(0))],
        (5.0, admitted(0, reused=32, g1_tokens=24, host_tokens=8)),
        (6.0, pass_ended(0)),
        (7.0, preempted(0)),
        (8.0, admitted(0, reused=44, readmission=True)),
        *[(9.0, pass_ended(0)), (9.0, ended(0))],
    ]
    report, (row,) = fold(run_info(pool_info(host_tier=True)), *stream)
    rank = report["workers"][0]
    tokens = {key.removeprefix("prompt_tokens_"): rank[key] for key in rank if key.startswith("prompt_tokens_")}
    assert tokens == {"asked": 40, "from_g1": 24, "from_g2": 8, "computed": 8}
    assert (rank["requests"], rank["readmissions"], rank["readmission_reused_tokens"], rank["preemptions"]) == (
        1,
        1,
        44,
        1,
    )
    assert report["totals"] == {key: value for key, value in rank.items() if key in report["totals"]}
    assert (row["reused_input_tokens"], row["admission_count"], row["readmission_count"]) == (44, 2, 1)
    assert row["first_admission_g1_reused_input_tokens"] == 24
    assert row["first_admission_host_reused_input_tokens"] == 8
    assert report["summary"]["first_admission_prefix_cache_reused_ratio"] == 32 / 40
    assert report["summary"]["prefix_cache_reused_ratio"] == 44 / 40


def test_the_headline_rate_is_a_ratio_of_sums_over_first_admissions() -> None:
    """F81: 0 of 4 and 396 of 400 tokens are 99/101, not the mean 0.495; a later find does not count."""

    def request(number: int, tokens: int, *reused: int) -> list[tuple[float, Any]]:
        begun = [(0.0, arrived(number, tokens=tokens)), (0.0, placed(number))]
        for k, found in enumerate(reused):
            begun += [(float(k), admitted(number, reused=found, readmission=k > 0)), (float(k), preempted(number))]
        return [*begun, (9.0, pass_ended(number)), (9.0, ended(number))]

    two = fold(run_info(), *request(0, 4, 0)[:-2], *request(1, 400, 396), (9.0, pass_ended(0)), (9.0, ended(0)))[0]
    assert two["summary"]["first_admission_prefix_cache_reused_ratio"] == 99 / 101
    again = fold(run_info(), *request(0, 32, 0, 32))[0]
    assert again["summary"]["first_admission_prefix_cache_reused_ratio"] == 0.0
    assert again["totals"]["prompt_tokens_from_g1"] == 0


def test_the_parts_of_the_time_to_first_token_add_up() -> None:
    """F82: 5 ms queue, 8 ms host load, 12 ms prefill, 1 ms first step, aggregated and with separate pools."""
    queued = [
        *[(0.0, prepared(1, 7)), (0.0, landed(1)), (10.0, arrived(0, at=10.0, tokens=40, out=1))],
        *[(15.0, loading(2, 7)), (23.0, loaded(2))],
    ]
    host = {"host_pool_blocks": {"g2": 8}, "shared_pool": "g2"}
    aggregated = [*queued, (23.0, placed(0)), (23.0, admitted(0)), (36.0, pass_ended(0)), (36.0, ended(0))]
    report, (row,) = fold(run_info(**host), *aggregated)
    assert row["ttft_parts_ms"] == {"queue": 5.0, "host_load": 8.0, "restored_wait": 0.0, "prefill": 13.0}
    assert sum(row["ttft_parts_ms"].values()) == row["ttft_ms"] == 26.0
    assert report["ttft_parts_mean_ms"] == row["ttft_parts_ms"]
    source: dict[str, Any] = {"request": 0, "handoff": 1, "worker": 0, "role": "prefill", "dp_rank": 0}
    target = source | {"role": "decode"}
    separate = [
        *[*queued, (24.0, placed(0, pool="prefill")), (24.0, admitted(0, role="prefill"))],
        *[(30.0, SourceHeld(**source)), (30.0, placed(0, pool="decode"))],
        *[(31.0, DestinationReserved(fresh_blocks=1, **target)), (34.0, DestinationActivated(**target))],
        *[(34.0, SourceReleased(canceled=False, **source)), (36.0, admitted(0, role="decode"))],
        *[(37.0, pass_ended(0, role="decode")), (37.0, ended(0, role="decode"))],
    ]
    _, (row,) = fold(run_info(pool_info("prefill"), pool_info("decode"), **host), *separate)
    parts = {"queue": 5.0, "host_load": 8.0, "restored_wait": 1.0, "prefill": 6.0}
    parts |= {"reservation": 1.0, "transfer": 3.0, "decode_queue": 2.0, "decode": 1.0}
    assert row["ttft_parts_ms"] == parts
    assert sum(parts.values()) == row["ttft_ms"] == 27.0


def test_the_instants_behind_the_parts_are_in_the_row_so_that_no_digit_is_lost() -> None:
    at, queued, done, admit, first = 0.1, 0.7, 1.9, 2.3, 1000.3
    stream = [
        *[(0.0, prepared(1, 7)), (0.0, landed(1)), (at, arrived(0, at=at)), (at, placed(0)), (queued, loading(2, 7))],
        *[(done, loaded(2)), (admit, admitted(0)), (first, pass_ended(0)), (first, ended(0))],
    ]
    _, (row,) = fold(run_info(host_pool_blocks={"g2": 8}), *stream)
    names = ("arrival_time_ms", "host_load_queued_ms", "host_load_finished_ms", "first_admit_ms", "first_token_ms")
    instants = [Fraction(row[name]) for name in names]
    assert instants == sorted(instants)
    steps = [later - earlier for earlier, later in itertools.pairwise(instants)]
    assert float(sum(steps)) == row["ttft_ms"]
    assert [float(step) for step in steps] == list(row["ttft_parts_ms"].values())


def test_a_request_without_an_end_is_counted_and_appears_nowhere_else() -> None:
    """At a time limit: its tokens are no output, its prompt was not asked for; the pass that ended did happen."""
    stream = [
        *[(0.0, arrived(0)), (0.0, placed(0)), (0.0, admitted(0)), (5.0, pass_ended(0, prefill_tokens=8))],
        (6.0, run_finished(decode=0.006, limit=True)),
    ]
    report, rows = fold(run_info(), *stream)
    summary = report["summary"]
    assert rows == []
    assert (summary["num_requests"], summary["completed_requests"], summary["total_output_tokens"]) == (1, 0, 0)
    assert summary["committed_prefill_tokens"] == 8
    assert (report["requests"]["unfinished"], report["totals"]["prompt_tokens_asked"]) == (1, 0)
    assert (report["finished"], report["stopped_at_limit"]) == (True, True)


@pytest.mark.parametrize("status", ["rejected", "failed", "canceled"])
def test_only_completed_requests_enter_the_summary_but_every_end_has_a_row(status: str) -> None:
    """A rejected request was routed and has its worker; a cancelled one keeps the tokens it made."""
    stream = [*served(0, 2.0), *[(2.0, arrived(1, at=1.0)), (2.0, placed(1, worker=1))]]
    if status == "canceled":
        stream += [(2.0, admitted(1, worker=1)), (3.0, pass_ended(1, worker=1))]
    report, rows = fold(run_info(pool_info(workers=2)), *stream, (4.0, ended(1, status, worker=1)))
    assert (report["requests"]["completed"], report["requests"][status]) == (1, 1)
    assert (report["summary"]["num_requests"], report["summary"]["completed_requests"]) == (2, 1)
    assert report["summary"]["duration_ms"] == 2.0
    assert (rows[1]["terminal_status"], rows[1]["decode_worker_idx"], rows[1]["terminal_time_ms"]) == (status, 1, 4.0)
    assert rows[1]["output_length"] == (status == "canceled")


def test_with_separate_pools_decode_makes_the_visible_tokens_and_prompts_are_booked_to_prefill() -> None:
    """What a prefill pass produced is dropped; scheduler numbers are worker * dp_size + rank; GPUs are per role."""
    pools = pool_info("prefill", dp_size=2, gpus_per_worker=2), pool_info("decode", workers=2, gpus_per_worker=4)
    source: dict[str, Any] = {"request": 0, "handoff": 1, "worker": 0, "role": "prefill", "dp_rank": 1}
    target: dict[str, Any] = {"request": 0, "handoff": 1, "worker": 1, "role": "decode", "dp_rank": 0}
    stream = [
        *[(0.0, arrived(0, tokens=9)), (0.0, placed(0, pool="prefill", dp_rank=1, scheduler=1))],
        *[(1.0, admitted(0, role="prefill", dp_rank=1, reused=4)), (5.0, pass_ended(0, role="prefill"))],
        *[(5.0, SourceHeld(**source)), (5.0, placed(0, pool="decode", worker=1))],
        *[(5.25, DestinationReserved(fresh_blocks=1, **target)), (5.75, DestinationActivated(**target))],
        (6.0, admitted(0, role="decode", worker=1)),
        *[(time_ms, pass_ended(0, role="decode", worker=1)) for time_ms in (7.0, 8.0)],
        *[(8.0, ended(0, role="decode", worker=1)), (9.0, SourceReleased(canceled=False, **source))],
        (9.0, run_finished(prefill=3600.0, decode=7200.0)),
    ]
    report, (row,) = fold(run_info(*pools), *stream)
    assert [row[name] for name in HANDOFF_STEPS] == [5.0, 5.25, 5.75, 9.0]
    assert list(row["ttft_parts_ms"].values()) == [1.0, 0.0, 0.0, 4.0, 0.25, 0.5, 0.25, 1.0]
    assert sum(row["ttft_parts_ms"].values()) == row["ttft_ms"]
    assert (row["output_length"], row["first_token_ms"], row["ttft_ms"]) == (2, 7.0, 7.0)
    assert (row["prefill_worker_idx"], row["decode_worker_idx"]) == (1, 1)
    assert (row["prefill_admit_ms"], row["decode_admit_ms"]) == (1.0, 6.0)
    assert (row["reused_input_tokens"], row["decode_reused_input_tokens"]) == (4, 0)
    booked = {
        (rank["pool"], rank["worker"], rank["dp_rank"]): rank["prompt_tokens_asked"] for rank in report["workers"]
    }
    assert booked == {("prefill", 0, 0): 0, ("prefill", 0, 1): 9, ("decode", 0, 0): 0, ("decode", 1, 0): 0}
    assert (report["totals"]["requests"], report["totals"]["output_tokens"]) == (1, 2)
    summary = report["summary"]
    assert (summary["prefill_gpus_per_worker"], summary["decode_gpus_per_worker"]) == (2, 4)
    assert summary["gpu_hours"] == (3600.0 * 2 + 7200.0 * 4) / 3600.0


def test_a_decode_placement_that_never_fits_is_in_the_history_and_not_the_requests_rank() -> None:
    stream = [
        *[(0.0, arrived(0)), (0.0, placed(0, pool="prefill")), (0.0, admitted(0, role="prefill"))],
        *[(5.0, placed(0, pool="decode")), (5.0, ended(0, "failed", role="decode"))],
    ]
    _, (row,) = fold(run_info(pool_info("prefill"), pool_info("decode")), *stream)
    assert [entry["pool"] for entry in row["routing_history"]] == ["prefill", "decode"]
    assert (row["prefill_worker_idx"], row["decode_worker_idx"], row["ttft_parts_ms"]) == (0, None, None)


def test_a_placement_that_waited_tells_when_and_how_long_and_what_overlap_it_passed_up() -> None:
    event = placed(0, outcome="queued", queued_at_ms=1.0, overlap_blocks=5, best_overlap_blocks=6)
    _, (row,) = fold(run_info(), (1.0, arrived(0, at=1.0)), (10.0, event), (12.0, ended(0, "rejected")))
    assert row["routing_history"] == [
        {
            "pool": "agg",
            "logical_worker_id": 0,
            "scheduler_id": 0,
            "dp_rank": 0,
            "outcome": "queued",
            "queue_entered_at_ms": 1.0,
            "released_at_ms": 10.0,
            "queue_wait_ms": 9.0,
            "reported_overlap_tokens": 20,
            "selected_overlap_blocks": 5,
            "best_available_overlap_blocks": 6,
            "overlap_regret_blocks": 1,
        }
    ]


# Host pools --------------------------------------------------------------------------------------------------------

SHARED = {"host_pool_blocks": {"g2": 4}, "shared_pool": "g2"}


def test_a_host_pools_figures_follow_from_its_events() -> None:
    """Pending counts as used; an evicted block leaves; a retired client's stores are rolled back."""
    stream = [
        *[(0.0, arrived(0)), (0.0, prepared(1, 10, 11)), (0.0, prepared(2, 12)), (1.0, landed(1)), (2.0, evicted(10))],
        *[(3.0, loading(3, 11)), (4.0, loaded(3)), (5.0, prepared(4, 13, 14))],
    ]
    report, _ = fold(run_info(**SHARED), *stream)
    figures = {"capacity_blocks": 4, "resident_blocks": 1, "used_blocks": 4}
    assert report["summary"]["g2_domains"] == [figures]
    moved = {"stored_blocks": 2, "evicted_blocks": 1, "loaded_blocks": 1}
    assert report["g2_pools"] == [{"pool": "g2", **figures, **moved}]
    retired = ClientRetired(pool="g2", canceled_loads=(), rolled_back_stores=(2, 4), **CLIENT)
    rest, _ = fold(run_info(**SHARED), *stream, (6.0, retired))
    assert rest["summary"]["g2_domains"] == [{"capacity_blocks": 4, "resident_blocks": 1, "used_blocks": 1}]


def test_a_store_that_lands_and_a_load_that_ends_after_their_request_still_count() -> None:
    stream = [
        *[(0.0, arrived(0)), (0.0, prepared(1, 10)), (0.0, landed(1)), (0.0, prepared(2, 11)), (0.0, loading(3, 10))],
        *[(1.0, ended(0, "canceled")), (2.0, landed(2)), (3.0, loaded(3)), (3.0, run_finished())],
    ]
    report, (row,) = fold(run_info(**SHARED), *stream)
    assert report["g2_pools"][0]["resident_blocks"] == 2
    assert report["g2_pools"][0]["loaded_blocks"] == 1
    assert (row["host_load_queued_ms"], row["host_load_finished_ms"]) == (0.0, None)


def test_private_pools_are_reported_each_and_are_no_domain_of_the_deployment() -> None:
    blocks = {"g2:aggregated-0/0": 4, "g2:aggregated-0/1": 4}
    report, _ = fold(run_info(host_pool_blocks=blocks), (0.0, prepared(1, 5, pool="g2:aggregated-0/1")))
    assert [(pool["pool"], pool["used_blocks"]) for pool in report["g2_pools"]] == [*zip(blocks, (0, 1), strict=True)]
    assert "g2_domains" not in report["summary"]


# The fold as a fold ------------------------------------------------------------------------------------------------


def test_a_log_that_was_cut_gives_the_report_so_far_and_says_so() -> None:
    report, rows = fold(run_info(), *served(0, 1.0, 2.0))
    assert (report["finished"], report["stopped_at_limit"]) == (False, None)
    assert report["summary"]["gpu_hours"] is None
    assert report["summary"]["decode_worker_seconds"] is None
    assert len(rows) == report["summary"]["completed_requests"] == 1


def test_asking_for_the_report_at_any_moment_changes_nothing() -> None:
    """The report after n records is that of a fold of n records, whether or not it was asked for before."""
    stream = [
        *served(0, 1.0, 2.0),
        (2.0, arrived(1, at=2.0, name="a", play_id="p", uuid=f"{1:032x}")),
        *[(2.0, placed(1)), (2.0, admitted(1)), (3.0, pass_ended(1)), (3.0, ended(1)), (4.0, run_finished())],
    ]
    often = ReportFold(run_info())
    for count, (time_ms, event) in enumerate(stream, 1):
        often.apply(Record(time_ms, "test", 0, event))
        assert report_text(often.finish()) == report_text(fold(run_info(), *stream[:count])[0])


def test_what_the_run_found_out_about_its_traffic_is_in_the_report() -> None:
    """Fields of the traffic go into the summary as they are, remarks on the input beside it."""
    report, _ = fold(run_info(), started(agentic={"weka_nested_timestamp_basis": "absolute"}, notes=("odd",)))
    assert report["summary"]["weka_nested_timestamp_basis"] == "absolute"
    assert report["notes"] == ["odd"]
    assert fold(run_info())[0]["notes"] == []


def test_events_that_no_report_speaks_of_pass_by() -> None:
    passing = PassStarted(
        pass_idx=0, compute_start_ms=0.0, end_ms=1.0, scheduled_tokens=1, scheduled_requests=1, **CLIENT
    )
    assert fold(run_info(), (0.0, passing)) == fold(run_info())


def test_run_info_of_a_deployment_names_every_host_pool() -> None:
    """A private tier has one pool for each rank of each worker, a shared one only one; seconds count in its role."""
    private = HostTierConfig(scope=HostScope.DP_RANK_LOCAL, capacity_blocks=5)
    shared = HostTierConfig(scope=HostScope.CLUSTER_SHARED, capacity_blocks=9)

    def info(prefill: HostTierConfig | None, decode: HostTierConfig | None) -> RunInfo:
        pools = tuple(
            PoolConfig(
                role=role,
                workers=2,
                dp_size=dp_size,
                tensor_parallel_size=4,
                rank=RankConfig(gpu_blocks=64, block_size_tokens=16, host=host),
            )
            for role, dp_size, host in ((WorkerRole.PREFILL, 1, prefill), (WorkerRole.DECODE, 2, decode))
        )
        return RunInfo.of(DeploymentConfig(pools=pools), name="n", seed=1, version="0")

    local = info(private, None)
    assert local.host_pool_blocks == {"g2:prefill-0/0": 5, "g2:prefill-1/0": 5}
    assert (local.shared_pool, local.disaggregated) == (None, True)
    assert [(pool.host_tier, pool.gpus_per_worker) for pool in local.pools] == [(True, 4), (False, 8)]
    both = info(shared, shared)
    assert (dict(both.host_pool_blocks), both.shared_pool) == ({"g2": 9}, "g2")


BEGUN = [(0.0, arrived(0)), (0.0, placed(0)), (0.0, admitted(0))]


@pytest.mark.parametrize(
    ("stream", "problem"),
    [
        ([*served(0, 1.0), (2.0, ended(0))], "request 0: ended after its end"),
        ([*served(0, 1.0), (2.0, pass_ended(0))], "request 0: given a token after its end"),
        ([*served(0, 1.0), (2.0, admitted(0, readmission=True))], "request 0: admitted after its end"),
        ([*served(0, 1.0), (2.0, placed(0))], "request 0: placed after its end"),
        ([(0.0, admitted(3))], "request 3: admitted but never arrived"),
        ([(0.0, pass_ended(3))], "request 3: given a token but never arrived"),
        ([(0.0, ended(3))], "request 3: ended but never arrived"),
        ([*BEGUN[:2], (1.0, pass_ended(0))], "request 0: given a token before its admission"),
        ([(0.0, arrived(1))], "request 1 arrived, expected 0"),
        ([*BEGUN, (0.0, arrived(0))], "request 0 arrived, expected 1"),
        ([*BEGUN, (1.0, admitted(0))], "request 0: readmission=False in pool agg"),
        ([*BEGUN[:2], (1.0, admitted(0, readmission=True))], "request 0: readmission=True in pool agg"),
        ([*BEGUN, (1.0, ended(0, "lost"))], "request 0: unknown status 'lost'"),
        ([*BEGUN[:2], (1.0, admitted(0, reused=9)), (2.0, ended(0))], "request 0: 8 prompt tokens asked"),
        ([*BEGUN, (1.0, pass_ended(0, worker=4))], "no rank aggregated-4/0 in this deployment"),
        ([(5.0, arrived(0)), (4.0, placed(0))], "time went back from 5.0 to 4.0 ms"),
        ([started(), started()], "the run started twice or after its first request"),
        ([*BEGUN, started()], "the run started twice or after its first request"),
        ([(5.0, run_finished()), (5.0, run_finished())], "the run finished twice"),
        ([(0.0, prepared(1, 5, pool="g3"))], "no host pool 'g3' in this deployment"),
        ([(0.0, prepared(1, 1, 2, 3, 4, 5))], "g2: 5 blocks used of 4"),
        ([(0.0, prepared(1, 5)), (0.0, prepared(1, 6))], "g2: store 1 is known"),
        ([(0.0, prepared(1, 5)), (0.0, landed(1)), (0.0, prepared(2, 5))], "g2: store 2 is known or stores resident"),
        ([(0.0, landed(1))], "g2: store 1 ended but was never prepared"),
        ([(0.0, prepared(1, 5)), (0.0, evicted(5))], "g2: evicted blocks that are not resident"),
        ([*BEGUN, (0.0, loading(1, 5))], "g2: load 1 is known or loads what is not resident"),
        ([(0.0, loaded(1))], "g2: load 1 finished but was never queued"),
    ],
)
def test_an_impossible_order_of_events_is_refused(stream: list[tuple[float, Any]], problem: str) -> None:
    with pytest.raises(InvariantViolation, match=problem):
        fold(run_info(**SHARED), *stream)


def test_a_decode_admission_without_one_for_the_prompt_is_refused() -> None:
    stream = [(0.0, arrived(0)), (0.0, placed(0, pool="decode")), (0.0, admitted(0, role="decode"))]
    with pytest.raises(InvariantViolation, match="admitted for decode but never for its prompt"):
        fold(run_info(pool_info("prefill"), pool_info("decode")), *stream)


def test_a_figure_that_is_not_a_number_is_refused_as_text() -> None:
    with pytest.raises(ValueError):
        report_text({"x": float("nan")})
    with pytest.raises(ValueError):
        row_text({"x": float("inf")})


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from([1e-4, 9.999e-5, 1e16, 9999999999999998.0, -0.0, 5e-324, 2**63, 2**64, -(2**63) - 1])
    | st.text(max_size=3)
    | st.sampled_from(["\ud800", "\x7f", "\n"])
    | st.sampled_from(list(RequestStatus)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('ab"\\é\x7f', max_size=2), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=500)
@given(st.dictionaries(st.text("abc", max_size=3), json_values, max_size=5))
def test_a_row_has_the_text_that_the_standard_library_gives(row: dict[str, Any]) -> None:
    """Most rows are written by a quicker writer, which would write some values in another way, or without refusal."""
    try:
        expected = json.dumps(row, sort_keys=True, separators=(",", ":"), allow_nan=False) + "\n"
    except ValueError:
        with pytest.raises(ValueError):
            row_text(row)
    else:
        assert row_text(row) == expected


def test_finished_requests_are_forgotten() -> None:
    """F76: what is held is the open requests, one number for each metric, and some token times; never rows."""
    folding = ReportFold(run_info())
    for number in range(50):
        for time_ms, event in served(number, number + 1.0, number + 1.5, at=float(number)):
            folding.apply(Record(time_ms + number, "test", 0, event))
    assert (folding._live, folding._token_times_ms) == ({}, {})
    assert folding.finish()["summary"]["completed_requests"] == 50


@pytest.mark.parametrize("tokens_of_each", [(1, 2, 9000, 3, 0, 700), (40,) * 300, (4095, 1, 2, 2), (5000, 5000)])
def test_token_gaps_are_those_within_each_request_in_order_of_the_ends(tokens_of_each: tuple[int, ...]) -> None:
    """A plain model takes one gap after the other; zeros among them have no reciprocal."""
    folding = ReportFold(run_info())
    now_ms, gaps = 0.0, StreamedDistribution()
    per_user = StreamedDistribution()
    for number, tokens in enumerate(tokens_of_each):
        events: list[tuple[float, Any]] = [(now_ms, arrived(number)), (now_ms, placed(number))]
        events.append((now_ms, admitted(number)))
        before_ms = None
        for token in range(tokens):
            now_ms += 0.1 * ((7 * token + number) % 5)
            events.append((now_ms, pass_ended(number)))
            if before_ms is not None:
                gap_ms = now_ms - before_ms
                gaps.extend([gap_ms])
                per_user.extend([1000.0 / gap_ms] if gap_ms > 0.0 else [])
            before_ms = now_ms
        for time_ms, event in [*events, (now_ms, ended(number))]:
            folding.apply(Record(time_ms, "test", 0, event))
        if number % 2:
            folding.finish()  # asked in between, it must not change what follows
    summary = folding.finish()["summary"]
    expected = gaps.result().named("itl_ms") | per_user.result().named("output_token_throughput_per_user")
    assert {name: summary[name] for name in expected} == expected
