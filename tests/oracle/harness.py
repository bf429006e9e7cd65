"""Runs recorded cases of the reference through g2sim and finds the first difference.

Owns: the recorded forms (``g2``, ``sched``, ``workload``, ``events``, ``router``) and how our results are put into
them. Used by the tests, by ``tests/oracle/run.py`` and by the differential tests.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from g2sim.actors.host_pool import events as hp
from g2sim.actors.kv.blocks import BlockHasher
from g2sim.actors.kv.events import BlocksRemoved, BlocksStored
from g2sim.actors.router.events import PlacementWeighed
from g2sim.actors.traffic.mooncake import load_mooncake
from g2sim.bus.drivers import InlineDriver
from g2sim.bus.errors import ConfigError, Deadlock, SimError
from g2sim.bus.events import Record
from g2sim.scenarios.run import run_scenario
from g2sim.scenarios.schema import Scenario

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from translate import call_from_rank, scenario_from_call  # noqa: E402

Case = dict[str, Any]
Row = dict[str, Any]

NOT_OURS = re.compile(r"power_\w+|wall_time_ms|processed_\w+_per_s|prediction_provenance")
"""Summary fields that are about wall clocks or power, or name the reference's own estimators."""

STD_TOLERANCE = 1e-12
"""Relative tolerance of the std fields: the reference adds squares in an order of its own."""


@attrs.frozen
class Difference:
    """Where a result departs from a recording."""

    what: str
    expected: Any
    got: Any

    def __str__(self) -> str:
        return f"{self.what}: expected {self.expected!r}, got {self.got!r}"


@attrs.frozen
class Outcome:
    """What a run gave: report and rows and records, or the error it ended with."""

    report: dict[str, Any] | None
    rows: list[Row]
    records: list[Record]
    error: SimError | None


def load_case(path: Path) -> Case:
    return json.loads(path.read_text(encoding="utf-8"))


def check(case: Case, *, verify: bool = True) -> Difference | None:
    """Run a case and compare; None if equal. It is run again with nobody who hears of each pass."""
    outcome = run(case, verify=verify)
    unheard = run(case, verify=False, heard=False)
    if (unheard.report, unheard.rows, type(unheard.error)) != (outcome.report, outcome.rows, type(outcome.error)):
        return Difference("a run without records", "the same report and rows", "others")
    if "rank" in case:
        return _compare_events(case, outcome)
    expected = case.get("expected")
    if _is_router_case(case):
        return _compare_router(case, outcome)
    if expected is None:
        return _compare_refusal(case, outcome)
    if "error" in expected:
        # The reference gives up on such a run; ours must name who waits for what.
        if isinstance(outcome.error, Deadlock) and outcome.error.waiting:
            return None
        return Difference("end of the run", "a Deadlock that names the waiting requests", _ending(outcome))
    if outcome.error is not None or outcome.report is None:
        return Difference("end of the run", "a finished run", _ending(outcome))
    return _compare_rows(expected["per_request"], outcome.rows) or _compare_summary(
        expected["summary"], outcome.report["summary"], rounded=case.get("oracle") is not None
    )


def run(case: Case, *, verify: bool = True, heard: bool = True, driver: Any = InlineDriver) -> Outcome:
    """Run a case of any form; errors of ours are part of the outcome. Not ``heard``: without records."""
    rows: list[Row] = []
    records: list[Record] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            scenario = case_scenario(case, Path(folder))
            result = run_scenario(
                scenario,
                None,
                verify=verify,
                driver=driver,
                on_row=rows.append,
                on_record=records.append if heard else None,
            )
        except SimError as error:
            return Outcome(None, rows, records, error)
    return Outcome(result.report, rows, records, None)


def case_scenario(case: Case, folder: Path) -> Scenario:
    """The scenario of a case; its trace is written into ``folder``."""
    if "rank" in case:
        case = case | {"call": call_from_rank(case["rank"], trace_block_size=4), "trace_format": "mooncake"}
    path = write_trace(case, folder)
    trace_format = case.get("trace_format")
    values = scenario_from_call(
        {**case.get("synthetic", {}), **case["call"]},
        trace_path=None if path is None else str(path),
        trace_format=None if trace_format == "synthetic" else trace_format,
    )
    return Scenario.from_dict(values, base_dir=folder)


def write_trace(case: Case, folder: Path) -> Path | None:
    """The case's trace as a file or directory: rows as compact JSON in stored key order, strings as literal lines."""
    if "trace_path" in case:
        return HERE / case["trace_path"]
    if "files" in case:
        root = folder / case.get("trace_name", "corpus")
        for name, content in case["files"].items():
            target = root / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(_file_text(content), encoding="utf-8")
        return root
    if "trace" not in case or case.get("trace_format") == "synthetic":
        return None
    target = folder / case.get("trace_name", "trace.jsonl")
    target.write_text(_file_text(case["trace"]), encoding="utf-8")
    return target


def _file_text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        lines = (row if isinstance(row, str) else json.dumps(row, separators=(",", ":")) for row in content)
        return "".join(f"{line}\n" for line in lines)
    return json.dumps(content, separators=(",", ":")) + "\n"


def _ending(outcome: Outcome) -> str:
    return "a finished run" if outcome.error is None else f"{type(outcome.error).__name__}: {outcome.error}"


def _compare_refusal(case: Case, outcome: Outcome) -> Difference | None:
    if isinstance(outcome.error, ConfigError):
        return None
    return Difference("input", f"refused ({case.get('condition', 'see the case')})", _ending(outcome))


# -- summary and rows


def _compare_summary(expected: Mapping[str, Any], got: Mapping[str, Any], *, rounded: bool) -> Difference | None:
    for name, value in expected.items():
        if NOT_OURS.fullmatch(name) or same_value(name, value, got.get(name, ...), rounded=rounded):
            continue
        return Difference(f"summary.{name}", value, got.get(name, "nothing"))
    return None


def same_value(name: str, expected: Any, got: Any, *, rounded: bool) -> bool:
    """Whether a summary value counts as equal: to the last bit, but for std fields and recordings with 12 digits."""
    if got == expected and type(got) is type(expected):
        return True
    if not isinstance(expected, float) or not isinstance(got, float):
        return False
    if rounded and float(f"{got:.12g}") == expected:
        return True
    return name.startswith("std_") and abs(got - expected) <= STD_TOLERANCE * max(1.0, abs(expected))


def _compare_rows(expected: list[Row], got: list[Row]) -> Difference | None:
    """Rows are matched within one arrival time; which of two equal requests is which does not matter."""
    if len(expected) != len(got):
        return Difference("number of requests with an end", len(expected), len(got))
    free: dict[float, list[Row]] = {}
    for row in got:
        free.setdefault(row["arrival_time_ms"], []).append(row)
    for idx, wanted in enumerate(expected):
        candidates = free.get(wanted["arrival_time_ms"], [])
        if not candidates:
            return Difference(f"request {idx}: arrival_time_ms", wanted["arrival_time_ms"], sorted(free))
        best = min(candidates, key=lambda row: sum(1 for _ in _row_differences(wanted, row)))
        difference = next(_row_differences(wanted, best), None)
        if difference is not None:
            field, want, have = difference
            return Difference(f"request {idx} (arrival {wanted['arrival_time_ms']!r}): {field}", want, have)
        candidates.remove(best)
        if not candidates:
            del free[wanted["arrival_time_ms"]]
    return None


def _row_differences(expected: Row, got: Row) -> Iterator[tuple[str, Any, Any]]:
    for field, value in expected.items():
        have = _field(field, value, got)
        if have != value:
            yield field, value, have


def _field(field: str, like: Any, row: Row) -> Any:
    """A field of our row in the form of the recording."""
    if field == "admissions":
        history = row["admission_history"]
        if like and isinstance(like[0], list):
            return [[a["pool"], a["at_ms"], a["reused_input_tokens"], a["is_readmission"]] for a in history]
        if len(history) != len(like):
            return history
        return [{key: entry.get(key) for key in wanted} for wanted, entry in zip(like, history, strict=True)]
    if field == "route":
        return [[r["pool"], r["logical_worker_id"], r["dp_rank"]] for r in row["routing_history"]]
    if field == "dp_ranks":
        return [r["dp_rank"] for r in row["routing_history"]]
    return row.get(field)


# -- routers


def _is_router_case(case: Case) -> bool:
    expected = case.get("expected", {})
    outcomes = [one["outcome"] for one in expected.get("any_of", ())] or [expected]
    return any("routing_history" in row for outcome in outcomes for row in outcome.get("per_request", ()))


def _compare_router(case: Case, outcome: Outcome) -> Difference | None:
    """Where equal costs were decided by chance, one of the outcomes that were seen must be equal."""
    if outcome.error is not None or outcome.report is None:
        return Difference("end of the run", "a finished run", _ending(outcome))
    got = router_rows(outcome, exact=case["call"]["router_mode"] == "round_robin")
    expected = case["expected"]
    first: Difference | None = None
    for wanted in [one["outcome"] for one in expected.get("any_of", ())] or [expected]:
        difference = _compare_router_rows(wanted["per_request"], got) or _compare_summary(
            wanted["summary"], outcome.report["summary"], rounded=False
        )
        if difference is None:
            return None
        first = first or difference
    return first


def _compare_router_rows(expected: list[Row], got: list[Row]) -> Difference | None:
    if len(expected) != len(got):
        return Difference("number of requests with an end", len(expected), len(got))
    for idx, (wanted, row) in enumerate(zip(expected, got, strict=True)):
        for field, value in wanted.items():
            have = row[field]
            if field == "routing_history" and len(have) == len(value):
                have = [{key: hop[key] for key in want} for want, hop in zip(value, have, strict=True)]
            if have != value:
                return Difference(f"request {idx} (arrival {wanted['arrival_time_ms']!r}): {field}", value, have)
    return None


def router_rows(outcome: Outcome, *, exact: bool) -> list[Row]:
    """Our rows by arrival, in the form of the router recordings.

    Workers are letters and ranks numbers by first use, each pool apart, unless ``exact``.
    """
    weighed: dict[int, list[Row]] = {}
    for record in outcome.records:
        event = record.event
        if isinstance(event, PlacementWeighed):
            parts = dict(zip(event.part_names, event.parts, strict=True))
            weighed.setdefault(event.request, []).append(
                {
                    "cost": event.costs[event.chosen],
                    "effective_cached_blocks": parts["hit"][event.chosen],
                    "host_pinned_blocks": event.host_blocks[event.chosen],
                    "worker_type": "replay",
                }
            )
    workers: dict[str, dict[int, str]] = {}
    ranks: dict[tuple[str, int], dict[int, int]] = {}
    rows = []
    for row in sorted(outcome.rows, key=lambda row: row["arrival_time_ms"]):
        history = []
        for hop in row["routing_history"]:
            worker, pool = hop["logical_worker_id"], workers.setdefault(hop["pool"], {})
            named = {"worker": worker}
            if not exact:
                mine = ranks.setdefault((hop["pool"], worker), {})
                named = {
                    "worker": pool.setdefault(worker, chr(ord("A") + len(pool))),
                    "dp_rank": mine.setdefault(hop["dp_rank"], len(mine)),
                }
            history.append(hop | named)
        rows.append(row | {"routing_history": history, "router": weighed.get(row["request"], [])})
    return rows


# -- KV events


def _compare_events(case: Case, outcome: Outcome) -> Difference | None:
    if outcome.error is not None:
        return Difference("end of the run", "a finished run", _ending(outcome))
    known = _prompt_hashes(case)
    expected = _renamed(case["expected"]["kv_events"], known)
    got = _renamed([_kv_event(r) for r in outcome.records if isinstance(r.event, BlocksStored | BlocksRemoved)], known)
    return _first_difference("KV event", expected, got) or _first_difference(
        "host offload event",
        [_plain_host_event(e) for e in case["expected"]["host_offload_events"] if _is_timed(e)],
        _host_events(outcome.records),
    )


def _first_difference(what: str, expected: list[Any], got: list[Any]) -> Difference | None:
    for idx, (want, have) in enumerate(zip(expected, got, strict=False)):
        if want != have:
            return Difference(f"{what} {idx}", want, have)
    if len(expected) != len(got):
        return Difference(f"number of {what}s", len(expected), len(got))
    return None


def _prompt_hashes(case: Case) -> set[int]:
    hasher = BlockHasher(case["rank"]["block_size"])
    with tempfile.TemporaryDirectory() as folder:
        path = write_trace(case, Path(folder))
        assert path is not None
        sessions = load_mooncake(path, block_size_tokens=4)
    return {
        hash_ for session in sessions for turn in session.turns for hash_ in hasher.chain(turn.prompt).sequence_hashes
    }


def _kv_event(record: Record) -> dict[str, Any]:
    event: Any = record.event
    body: dict[str, Any] = {"dp_rank": event.dp_rank, "event_id": event.event_id}
    if event.tier != "device":
        body["tier"] = event.tier
    if isinstance(event, BlocksRemoved):
        body["data"] = {"removed": {"block_hashes": list(event.block_hashes)}}
    else:
        stored: dict[str, Any] = {
            "parent_hash": event.parent_hash,
            "blocks": [
                {"block_hash": block, "tokens_hash": tokens}
                for block, tokens in zip(event.block_hashes, event.token_hashes, strict=True)
            ],
        }
        if event.tier != "device":
            stored["start_position"] = event.start_position
        body["data"] = {"stored": stored}
    return {"event": body, "observed_at_ms": record.time_ms}


def _renamed(events: list[dict[str, Any]], known: set[int]) -> list[dict[str, Any]]:
    """Hashes of blocks with generated tokens, which differ from run to run, replaced by their order of appearance."""
    names: dict[int, str] = {}

    def name(hash_: int | None) -> int | str | None:
        return hash_ if hash_ is None or hash_ in known else names.setdefault(hash_, f"generated {len(names)}")

    out = json.loads(json.dumps(events))
    for item in out:
        data = item["event"]["data"]
        if "removed" in data:
            data["removed"]["block_hashes"] = [name(hash_) for hash_ in data["removed"]["block_hashes"]]
            continue
        data["stored"]["parent_hash"] = name(data["stored"]["parent_hash"])
        for block in data["stored"]["blocks"]:
            if block["block_hash"] not in known:
                block["tokens_hash"] = None
            block["block_hash"] = name(block["block_hash"])
    return out


def _is_timed(entry: dict[str, Any]) -> bool:
    return entry["event"]["event"] != "store_block_mappings"


def _plain_host_event(entry: dict[str, Any]) -> dict[str, Any]:
    return {"at_ms": entry["observed_at_ms"], "request": entry["request_id"], **entry["event"]}


def _host_events(records: list[Record]) -> list[dict[str, Any]]:
    """Our host pool events in the reference's form; a completed transfer's blocks come from where it began."""
    out: list[dict[str, Any]] = []
    begun: dict[int, tuple[str, list[int]]] = {}
    evicted: list[dict[str, Any]] = []
    for record in records:
        event = record.event
        at: dict[str, Any] = {"at_ms": record.time_ms}
        if isinstance(event, hp.HostBlocksEvicted):
            evicted = [at | {"event": "evicted", "block_hash": block} for block in event.block_hashes]
        elif isinstance(event, hp.StorePrepared | hp.LoadQueued):
            request, blocks = f"r{event.request}", list(event.block_hashes)
            begun[event.transfer] = (request, blocks)
            body = at | {"request": request, "transfer_id": event.transfer, "block_hashes": blocks}
            if isinstance(event, hp.LoadQueued):
                out.append(body | {"event": "load_queued", "completes_at_ms": event.completes_at_ms})
            else:
                out.extend(victim | {"request": request} for victim in evicted)
                evicted = []
                out.append(body | {"event": "store_prepared"})
        elif isinstance(event, hp.StorePutOff):
            out.append(
                at
                | {
                    "request": f"r{event.request}",
                    "event": "capacity_retry",
                    "block_hashes": list(event.block_hashes),
                    "structurally_unfittable": event.never_fits,
                }
            )
        elif isinstance(event, hp.StoreSubmitted | hp.StoreLanded | hp.LoadFinished):
            request, blocks = begun[event.transfer]
            body = at | {"request": request, "transfer_id": event.transfer, "block_hashes": blocks}
            if isinstance(event, hp.StoreSubmitted):
                out.append(body | {"event": "store_submitted", "completes_at_ms": event.completes_at_ms})
            else:
                kind = "load" if isinstance(event, hp.LoadFinished) else "store"
                out.append(body | {"event": f"{kind}_completed", "at_ms": event.ended_ms})
    return out
