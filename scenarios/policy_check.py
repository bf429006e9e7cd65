"""The conformance suite of placement policies: random plays, fresh processes, and runs of whole deployments.

Owns: which checks there are and what they report. Refuses to know: the terminal.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs

from g2sim.actors.config import WorkerRole
from g2sim.actors.router.conformance import PROFILES, MakePolicy, Profile, play
from g2sim.actors.router.registry import make_policy
from g2sim.bus.drivers import InlineDriver, TrioDriver
from g2sim.bus.errors import PolicyError, SimError, raised
from g2sim.bus.events import Record
from g2sim.scenarios.policy_source import PolicyChoice, find_policy, settled_policy, with_policy

SEEDS = 4


@attrs.frozen
class CheckResult:
    """One check: its name, what it claims, and what is wrong (None if it holds)."""

    name: str
    claim: str
    problem: str | None

    @property
    def ok(self) -> bool:
        return self.problem is None


def check_policy(choice: PolicyChoice, *, fresh_processes: bool = True) -> list[CheckResult]:
    """Run the suite on a policy.

    Args:
        fresh_processes: also compare processes with different hash seeds.
    Raises: ConfigError if the policy cannot be found or made.
    """
    target = choice.target or "round_robin"
    make = _maker(choice)
    told: dict[str, list[str]] = {}

    def play_profile(profile: Profile) -> Callable[[], None]:
        return lambda: told.update({profile.name: _told(make, profile)})

    checks = [(profile.name, profile.claim, play_profile(profile)) for profile in PROFILES]
    claim = "the same happenings give the same decisions"
    checks.append(("determinism", claim, lambda: _same_again(make, target, told)))
    if fresh_processes:
        checks.append(("fresh processes", f"{claim}, whatever the hash seed", lambda: _same_elsewhere(choice, target)))
    claim = "whole deployments, with and without lag of KV events, serve every request, and both drivers agree"
    checks.append(("runs", claim, lambda: _runs(choice)))
    return [CheckResult(name, claim, _problem(check)) for name, claim, check in checks]


def play_digest(choice: PolicyChoice) -> str:
    """Digest of the decisions in all plays."""
    make = _maker(choice)
    return hashlib.sha256("\n".join(line for one in PROFILES for line in _told(make, one)).encode()).hexdigest()


def _maker(choice: PolicyChoice) -> MakePolicy:
    name, options = settled_policy(choice.target or "round_robin", choice.options, code=True)
    made = find_policy(name)
    return lambda: make_policy(name, options, made)


def _problem(check: Callable[[], None]) -> str | None:
    try:
        check()
    except SimError as error:
        return " ".join([str(error), *getattr(error, "__notes__", ())])
    except Exception as error:  # of the policy: not every call of it is guarded by the router
        return " ".join([raised(error), *getattr(error, "__notes__", ())])
    return None


def _told(make: MakePolicy, profile: Profile) -> list[str]:
    """The decisions in all plays of a profile."""
    plays = itertools.product(WorkerRole, range(SEEDS))
    return [line for role, seed in plays for line in play(make(), profile, role, seed)]


def _same_again(make: MakePolicy, target: str, told: Mapping[str, Sequence[str]]) -> None:
    """Plays what could be played again. A policy that draws from the module's stream shows here."""
    before = random.getstate()
    random.seed(1)
    try:
        for profile in PROFILES:
            first = told.get(profile.name)
            if first is not None and first != (second := _told(make, profile)):
                one, other = next(pair for pair in itertools.zip_longest(first, second) if pair[0] != pair[1])
                raise PolicyError(target, f"decided {one!r}, and played again {other!r}: draw from pool.stream only")
    finally:
        random.setstate(before)


def _same_elsewhere(choice: PolicyChoice, target: str) -> None:
    digests = []
    for hash_seed in ("1", "2"):
        command = [sys.executable, "-m", __name__, json.dumps([choice.target, dict(choice.options)])]
        environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise PolicyError(target, f"failed in a fresh process: {done.stderr.strip().splitlines()[-1]}")
        digests.append(done.stdout)
    if digests[0] != digests[1]:
        raise PolicyError(target, "decides otherwise under another hash seed: does it go over a set, or use hash()?")


def _runs(choice: PolicyChoice) -> None:
    from g2sim.scenarios.run import run_scenario
    from g2sim.scenarios.schema import Scenario

    with TemporaryDirectory(prefix="g2sim-policy-check-") as folder:
        trace = Path(folder) / _TRACE_NAME
        trace.write_text("".join(f"{json.dumps(row)}\n" for row in _small_trace()))
        for disaggregated, lag_ms in itertools.product((False, True), (0.0, 40.0)):
            values = _small_deployment(disaggregated, lag_ms)
            scenario = with_policy(Scenario.from_dict(values, base_dir=trace.parent), choice)
            records: list[list[Record]] = [[], []]
            run_scenario(scenario, None, driver=InlineDriver, on_record=records[0].append)
            result = run_scenario(scenario, None, driver=TrioDriver, on_record=records[1].append)
            ends = result.report["requests"]
            where = f"in a {values['engine']['mode']} run with {lag_ms} ms of lag"
            name = scenario.deployment.router.policy
            if records[0] != records[1]:
                raise PolicyError(name, f"two equal runs differ {where}: it keeps something between runs")
            if ends["completed"] + ends["rejected"] != ends["released"]:
                raise PolicyError(name, f"not every request was served {where}: {ends}")


_TRACE_NAME = "policy-check.jsonl"


def _small_trace() -> Iterator[dict[str, Any]]:
    """Twelve conversations of three turns; three of them begin alike."""
    for turn in range(3):
        for talk in range(12):
            ids = [talk % 4, *range(100 + talk * 10, 104 + talk * 10 + turn)]
            at_ms = turn * 120.0 + talk * 4.0
            yield {"timestamp": at_ms, "input_length": 16 * len(ids), "output_length": 6, "hash_ids": ids}


def _small_deployment(disaggregated: bool, lag_ms: float) -> dict[str, Any]:
    """Two workers a role, whose GPU caches are too small for the trace."""
    worker = {
        "parallelism": {"replicas": 2},
        "scheduler": {"max_batched_tokens": 256, "max_sequences": 4},
        "kv_cache": {
            "block_size": 16,
            "bytes_per_token": 1024,
            "capacity": {"type": "fixed", "blocks": 32},
            "host_offload": {"scope": "dp_rank_local", "num_host_blocks": 64},
        },
        "timing": {"type": "fixed", "prefill_ms": 10.0, "decode_ms": 1.0},
    }
    mode = "disaggregated" if disaggregated else "aggregated"
    roles = ("prefill", "decode") if disaggregated else ("aggregated",)
    return {
        "name": "policy-check",
        "engine": {"mode": mode, "workers": dict.fromkeys(roles, worker)},
        "router": {"kv_event_lag_ms": lag_ms},
        "traffic": {
            "source": {"type": "trace", "format": "mooncake", "paths": [_TRACE_NAME], "block_size": 16},
            "load": {"type": "trace_timestamps"},
        },
    }


if __name__ == "__main__":
    print(play_digest(PolicyChoice(*json.loads(sys.argv[1]))))
