"""A play whose contents come back after they have left G1, and the runs in which it is played more than once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs

from g2sim.actors.kv.events import BlocksStored
from g2sim.actors.worker.events import RequestAdmitted
from g2sim.bus.drivers import InlineDriver
from g2sim.bus.events import Record
from g2sim.scenarios.run import run_scenario
from g2sim.scenarios.schema import Scenario

CONTENTS = 6
"""Prompts that take turns: a multiple of 2 and 3, so that round robin brings each back to the worker it was on."""

NODES = 41
"""Requests of the play: no multiple of 2 or 3, so that the next play meets other workers."""

BLOCKS = 8
"""Blocks of a prompt; G1 holds little more than one, so that the next content of a worker displaces the last."""


@attrs.frozen
class PlayedRun:
    """Report, rows in order of their ends, and records of a run."""

    report: dict[str, Any]
    rows: list[dict[str, Any]]
    records: list[Record]

    def plays(self) -> dict[str, list[dict[str, Any]]]:
        """Rows by play instance, by arrival."""
        plays: dict[str, list[dict[str, Any]]] = {}
        for row in sorted(self.rows, key=lambda row: (row["arrival_time_ms"], row["request_id"])):
            plays.setdefault(row["play_id"], []).append(row)
        return plays


def write_play(folder: Path) -> Path:
    """One play, a chain of requests."""
    header = {
        "schema": "dynamo.agentic_mooncake",
        "version": 2,
        "block_size": 4,
        "hash_id_scope": "local",
        "source": {"format": "test", "digest": "d"},
    }
    rows: list[dict[str, Any]] = [header]
    for number in range(NODES):
        content = number % CONTENTS
        edge = {"request_id": f"r{number - 1:02}", "trigger": "completion", "delay_ms": 20.0, "relation": "sequence"}
        rows.append(
            {
                "request_id": f"r{number:02}",
                "play_id": "p",
                "session_id": f"s{content}",
                "model": "m",
                "input_length": BLOCKS * 4,
                "output_length": 2,
                "hash_ids": [content * 100 + block for block in range(BLOCKS)],
                "not_before_ms": number * 40.0,
                "recorded_api_time_ms": 5.0,
                "dependencies": [edge] if number else [],
            }
        )
    path = folder / "play.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def scenario_values(path: Path, *, workers: int, split: bool, scope: str, load: dict[str, Any]) -> dict[str, Any]:
    """A deployment of ``workers`` a role, with G2 of the given scope, that serves the play."""

    def worker() -> dict[str, Any]:
        host: dict[str, Any] = {"num_host_blocks": 4000, "scope": scope}
        return {
            "parallelism": {"replicas": workers},
            "scheduler": {"max_sequences": 8, "max_batched_tokens": 512},
            "timing": {"type": "fixed", "prefill_ms": 2.0, "decode_ms": 1.0},
            "kv_cache": {
                "block_size": 4,
                "bytes_per_token": 1000,
                "capacity": {"type": "fixed", "blocks": BLOCKS + 2},
                "host_offload": host,
            },
        }

    roles = ("prefill", "decode") if split else ("aggregated",)
    return {
        "name": "instances",
        "engine": {
            "model": "m",
            "mode": "disaggregated" if split else "aggregated",
            "workers": {role: worker() for role in roles},
        },
        "traffic": {
            "source": {"type": "trace", "paths": [str(path)], "format": "agentic_mooncake"},
            "load": {"type": "trace_timestamps", **load},
        },
    }


def play_run(values: dict[str, Any], *, verify: bool = True) -> PlayedRun:
    """Run a scenario."""
    rows: list[dict[str, Any]] = []
    records: list[Record] = []
    result = run_scenario(
        Scenario.from_dict(values),
        None,
        verify=verify,
        driver=InlineDriver,
        on_row=rows.append,
        on_record=records.append,
    )
    return PlayedRun(result.report, rows, records)


def leaks(run: PlayedRun) -> list[str]:
    """Requests that found blocks of another play: the first of each content in its play must find nothing at all."""
    found = []
    for play_id, rows in run.plays().items():
        seen: set[str] = set()
        for row in rows:
            if row["session_id"] not in seen and row["reused_input_tokens"]:
                found.append(f"{row['request_id']} of {play_id} reuses {row['reused_input_tokens']} tokens")
            seen.add(row["session_id"])
    return found


def restored_tokens(rows: list[dict[str, Any]]) -> int:
    """Tokens that the requests' first admissions found in G2."""
    return sum(row["first_admission_host_reused_input_tokens"] for row in rows)


def stored_token_hashes(run: PlayedRun) -> set[int]:
    """Token hashes of first blocks that were announced, in any tier."""
    return {
        hash_
        for record in run.records
        if isinstance(record.event, BlocksStored) and record.event.start_position == 0
        for hash_ in record.event.token_hashes[:1]
    }


def admissions(run: PlayedRun) -> int:
    """Admissions of the whole run."""
    return sum(isinstance(record.event, RequestAdmitted) for record in run.records)
