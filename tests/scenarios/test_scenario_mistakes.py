"""Several mistakes of one scenario file are told at once, each as it is told alone."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from pathlib import Path

import pytest
from cli_process import run_cli

from g2sim.bus.errors import ConfigError
from g2sim.scenarios.suite import load_suite

LINES = """\
name: base
seed: 3
engine:
  mode: aggregated
  backend: vllm
  workers:
    aggregated:
      parallelism: {replicas: 2}
      kv_cache:
        block_size: 16
        capacity: {type: fixed, blocks: 64}
      timing: {type: fixed, prefill_ms: 10, decode_ms: 1}
router:
  policy: round_robin
  kv_event_lag_ms: 0
traffic:
  source: {type: synthetic, input_tokens: 16, output_tokens: 2}
  load: {type: constant_rate, interval_ms: 5}
  stop: {requests: 3}
""".splitlines()

MISTAKES = {
    "seed: 3": "seed: -3",
    "block_size: 16": "block_size: banana",
    "blocks: 64}": "blocks: 64, tokens: 3}",
    "type: fixed, prefill_ms": "type: fxed, prefill_ms",
    "kv_event_lag_ms: 0": "kv_event_lag: 0",
    "input_tokens: 16": "input_token: 16",
    "type: constant_rate": "type: closed",
    "requests: 3}": "requests: 0}",
}
UNSUPPORTED = {
    "backend: vllm": "backend: sglang",
    "replicas: 2": "replicas: 0",
    "policy: round_robin": "policy: round_robin\n  prefill_load_model: {type: aic}",
}


def scenario(folder: Path, changes: Collection[tuple[str, str]] = (), more: str = "") -> Path:
    text = "\n".join(LINES) + "\n" + more
    for old, new in changes:
        assert text.count(old) == 1
        text = text.replace(old, new)
    path = folder / "s.yaml"
    path.write_text(text)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_suite(path)
    return str(caught.value)


def test_mistakes_are_told_together_as_they_are_told_alone_in_the_order_of_the_file(tmp_path: Path) -> None:
    load_suite(scenario(tmp_path))
    for kind in (MISTAKES, UNSUPPORTED):
        alone = {change: refusal(scenario(tmp_path, [change])) for change in kind.items()}
        assert len(set(alone.values())) == len(kind)
        assert all("\n" not in told for told in alone.values())
        for changes in [*itertools.combinations(kind.items(), 2), tuple(kind.items())]:
            told = refusal(scenario(tmp_path, changes[::-1]))
            assert told.splitlines() == [alone[change] for change in changes]


def test_a_file_with_mistakes_is_refused_line_by_line(tmp_path: Path) -> None:
    path = scenario(tmp_path, MISTAKES.items())
    for arguments in (["check", path], ["run", path, "--out", tmp_path / "run"]):
        done = run_cli(tmp_path, *arguments)
        assert done.returncode == 2
        assert done.stderr == f"error: {refusal(path)}\n"
        assert [line.partition(": ")[0] for line in done.stderr.splitlines()][1:] == [
            f"{path}:{number}" for number in (10, 11, 12, 15, 17, 18, 19)
        ]
    assert not (tmp_path / "run").exists()


def test_a_key_that_is_missing_beside_a_misspelt_one_is_no_mistake_of_its_own(tmp_path: Path) -> None:
    told = refusal(scenario(tmp_path, [("source:", "sorce:")]))
    assert "\n" not in told
    assert "traffic.sorce: unknown key" in told


def test_a_mistake_in_an_anchor_is_one_however_often_it_is_used(tmp_path: Path) -> None:
    changes = [
        ("mode: aggregated", "mode: disaggregated"),
        ("    aggregated:", "    prefill: &w"),
        ("block_size: 16", "block_size: banana"),
        ("router:", "    decode: *w\nrouter:"),
    ]
    told = refusal(scenario(tmp_path, changes))
    assert "\n" not in told
    assert ":10: engine.workers.prefill.kv_cache.block_size: got 'banana'" in told


def test_of_very_many_mistakes_the_first_are_told(tmp_path: Path) -> None:
    more = "".join(f"key_{number}: 1\n" for number in range(100))
    told = refusal(scenario(tmp_path, more=more)).splitlines()
    assert [f": key_{number}: unknown key" in line for number, line in enumerate(told[:-1])] == [True] * 21
    assert told[-1] == "and 79 more mistakes"


def test_variants_and_expectations_tell_all_theirs(tmp_path: Path) -> None:
    variants = "variants:\n  a: {router.tie_break: x, seed: -1}\n  b: {}\n  c: {engine.backend: sglang}\n"
    told = refusal(scenario(tmp_path, more=variants)).splitlines()
    assert [line.partition(" ")[2].partition(":")[0] for line in told] == ["seed", "router.tie_break", "engine.backend"]
    expect = "expect:\n  - {report: totals.pases, equals: 1}\n  - {events: wk.adm}\n  - {events: wk.amd}\n"
    told = refusal(scenario(tmp_path, more=expect)).splitlines()
    assert [line.partition(" ")[2].partition(":")[0] for line in told] == ["expect[0].report", "expect[2].events"]
