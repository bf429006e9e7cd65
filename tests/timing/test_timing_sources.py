"""Pass times from outside in a scenario: fields, errors with their place, runs worked out by hand, notes, the log."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from timing_values import DECODE_ROWS, PREFILL_ROWS, aggregated, no_aic, on_qwen, table_text, worker, written

from g2sim.actors.config import ExternalTiming, RankConfig
from g2sim.actors.worker.timing import PassTimer
from g2sim.bus.errors import ConfigError, InvariantViolation, SimError
from g2sim.scenarios.aic_timing import AicPassTimes, AicTiming
from g2sim.scenarios.run import report_of_log, run_scenario
from g2sim.scenarios.schema import Scenario, load_scenario
from g2sim.scenarios.table_timing import TableTiming

__all__ = ["no_aic"]

TABLE = {"type": "table", "path": "t.csv"}
TIMING = "engine.workers.aggregated.timing"
INSTALL = "pip install 'g2sim[aic]'"


def folder(tmp_path: Path, values: dict[str, Any], rows: str = PREFILL_ROWS + DECODE_ROWS) -> Path:
    """A scenario file beside a table."""
    written(tmp_path / "t.csv", table_text(rows))
    return written(tmp_path / "s.yaml", yaml.safe_dump(values, sort_keys=False))


def refusal(read: Callable[[], object]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        read()
    return caught.value


def line_of(path: Path, key: str) -> int:
    lines = path.read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.strip().startswith(f"{key}:"))


def disaggregated() -> dict[str, Any]:
    values = aggregated(TABLE)
    workers = {"prefill": worker(TABLE), "decode": worker(TABLE)}
    return {**values, "engine": {"mode": "disaggregated", "workers": workers}}


# -- what is refused


@pytest.mark.parametrize("path", [None, "", " ", 1, True, [], "a\nb"])
def test_a_table_needs_a_path(path: object) -> None:
    error = refusal(lambda: Scenario.from_dict(aggregated({"type": "table", "path": path})))
    assert (error.field, error.allowed) == (f"{TIMING}.path", "a path")


def test_a_table_without_a_path_and_a_path_without_a_table() -> None:
    assert "missing" in str(refusal(lambda: Scenario.from_dict(aggregated({"type": "table"}))))
    error = refusal(lambda: Scenario.from_dict(aggregated({"type": "polynomial", "path": "t.csv"})))
    assert (error.field, error.allowed) == (f"{TIMING}.path", "only with type table")


def test_formats_go_with_the_performance_model_only() -> None:
    error = refusal(lambda: Scenario.from_dict(aggregated({**TABLE, "gemm_quant_mode": "fp8"})))
    assert (error.field, error.allowed) == (f"{TIMING}.gemm_quant_mode", "only with type aic or default")


def test_types_that_are_offered() -> None:
    error = refusal(lambda: Scenario.from_dict(aggregated({"type": "measured"})))
    assert (error.field, error.allowed) == (f"{TIMING}.type", "fixed, polynomial, table, aic")


def test_a_table_that_is_not_there_is_refused_where_the_scenario_names_it(tmp_path: Path) -> None:
    path = folder(tmp_path, aggregated({"type": "table", "path": "u.csv"}))
    said = f"{path}:{line_of(path, 'path')}: {TIMING}.path: no such file: {tmp_path / 'u.csv'}; got 'u.csv'; "
    assert str(refusal(lambda: load_scenario(path))) == f"{said}paths are relative to the scenario file"


def test_a_malformed_table_is_refused_when_the_scenario_is_read(tmp_path: Path) -> None:
    path = folder(tmp_path, aggregated(TABLE), rows="prefill,1,100,0,soon\n")
    assert str(refusal(lambda: load_scenario(path))).startswith(f"{tmp_path / 't.csv'}:2: ms: got 'soon'")


@pytest.mark.parametrize(
    ("values", "rows", "role", "phase"),
    [
        (aggregated(TABLE), PREFILL_ROWS, "aggregated", "decode"),
        (aggregated(TABLE), DECODE_ROWS, "aggregated", "prefill"),
        (disaggregated(), PREFILL_ROWS, "decode", "decode"),
        (disaggregated(), DECODE_ROWS, "prefill", "prefill"),
    ],
)
def test_a_role_needs_rows_of_its_phases(
    tmp_path: Path, values: dict[str, Any], rows: str, role: str, phase: str
) -> None:
    path = folder(tmp_path, values, rows)
    error = refusal(lambda: load_scenario(path))
    assert error.field == f"engine.workers.{role}.timing.path"
    assert f"the table has no {phase} rows, which {role} workers need; got 't.csv'" in str(error)


@pytest.mark.parametrize("key", ["model", "hardware"])
@pytest.mark.parametrize("name", ["aic", "default"])
def test_the_performance_model_needs_a_model_and_hardware(name: str, key: str) -> None:
    values = on_qwen(aggregated({"type": name}), **{key: None})
    error = refusal(lambda: Scenario.from_dict(values))
    assert (error.field, error.problem) == (f"engine.{key}", f"missing, and {TIMING}.type {name} needs it")
    assert (error.hint is not None) == (name == "default")


@pytest.mark.parametrize("key", ["max_batched_tokens", "max_sequences"])
def test_an_estimated_capacity_needs_limits(key: str) -> None:
    values = on_qwen(aggregated({"type": "polynomial"}, capacity={"type": "default"}))
    values["engine"]["workers"]["aggregated"]["scheduler"] = {key: None}
    error = refusal(lambda: Scenario.from_dict(values))
    assert (error.field, error.got) == (f"engine.workers.aggregated.scheduler.{key}", None)


@pytest.mark.parametrize("fraction", [0, -0.5, 1.01, True, "0.9", math.nan])
def test_a_memory_fraction_is_above_0_and_up_to_1(fraction: object) -> None:
    capacity = {"type": "default", "memory_fraction": fraction}
    error = refusal(lambda: Scenario.from_dict(on_qwen(aggregated({"type": "polynomial"}, capacity=capacity))))
    assert (error.field.split(".")[-1], error.allowed) == ("memory_fraction", "a number above 0, up to 1")


def test_a_memory_fraction_does_not_go_with_a_fixed_capacity() -> None:
    capacity = {"type": "fixed", "blocks": 9, "memory_fraction": 0.9}
    error = refusal(lambda: Scenario.from_dict(aggregated({"type": "polynomial"}, capacity=capacity)))
    assert error.allowed == "only with type default"


# -- without the package


@pytest.mark.usefixtures("no_aic")
class TestWithoutThePackage:
    @pytest.mark.parametrize("timing", [{"type": "aic"}, {"type": "default"}, {}])
    def test_pass_times_are_refused_with_the_command_that_installs_it(
        self, tmp_path: Path, timing: dict[str, Any]
    ) -> None:
        path = folder(tmp_path, on_qwen(aggregated(timing)))
        error = refusal(lambda: load_scenario(path))
        assert (error.field, error.exit_code) == (f"{TIMING}.type", 2)
        assert (error.allowed, error.hint) == ("fixed, polynomial or table", INSTALL)
        assert "needs the package aiconfigurator-core" in str(error)
        assert error.got == timing.get("type", "default")
        assert str(error).startswith(f"{path}:{line_of(path, 'timing') + len(timing)}: ")

    def test_so_is_an_estimated_capacity(self, tmp_path: Path) -> None:
        path = folder(tmp_path, on_qwen(aggregated(TABLE, capacity={"type": "default"})))
        error = refusal(lambda: load_scenario(path))
        assert error.field == "engine.workers.aggregated.kv_cache.capacity.type"
        assert (error.allowed, error.hint) == ("fixed", INSTALL)

    def test_so_are_the_kv_bytes_of_a_token(self, tmp_path: Path) -> None:
        values = on_qwen(aggregated({"type": "aic"}, host_offload={"num_host_blocks": 8}))
        error = refusal(lambda: load_scenario(folder(tmp_path, values)))
        assert error.field == "engine.workers.aggregated.kv_cache.bytes_per_token"
        assert (error.allowed, error.hint) == ("a positive integer", INSTALL)

    def test_a_program_hears_it_when_it_runs_the_scenario(self, tmp_path: Path) -> None:
        scenario = Scenario.from_dict(on_qwen(aggregated({"type": "aic"})))
        error = refusal(lambda: run_scenario(scenario, tmp_path / "run"))
        assert (error.field, error.hint) == (f"{TIMING}.type", INSTALL)
        assert list(tmp_path.iterdir()) == []

    def test_a_resolved_scenario_is_read_without_it(self) -> None:
        """The report of a run is rebuilt from the log, whose header holds this form."""
        timing = {"type": "default", "gemm_quant_mode": "fp8"}
        values = on_qwen(aggregated(timing), comm_quant_mode="half")
        values["engine"]["workers"]["aggregated"]["parallelism"] = {"tensor": 2, "moe_expert": 2}
        scenario = Scenario.from_dict(values)
        made = scenario.deployment.pools[0].rank.timing
        assert isinstance(made, AicTiming)
        assert made.served.gemm_quant_mode == "fp8"
        assert made.served.comm_quant_mode == "half"
        assert (made.served.tensor, made.served.moe_tensor, made.served.moe_expert) == (2, 1, 2)
        assert scenario.resolved()["engine"]["workers"]["aggregated"]["timing"]["type"] == "aic"
        assert Scenario.from_resolved(scenario.resolved()) == scenario

    def test_a_format_of_one_worker_goes_before_that_of_the_engine(self) -> None:
        timing = {"type": "aic", "gemm_quant_mode": "fp8"}
        made = Scenario.from_dict(on_qwen(aggregated(timing), gemm_quant_mode="fp8_block")).deployment.pools[0].rank
        assert isinstance(made.timing, AicTiming)
        assert made.timing.served.gemm_quant_mode == "fp8"


# -- runs


def test_a_run_on_a_table_takes_its_times(tmp_path: Path) -> None:
    """Prefill of 100 tokens takes 10 ms. Decode at 101 and 102 tokens: 5.01 and 5.02 ms. Then the second request.

    The report says where the times come from, and is rebuilt from the log without the table.
    """
    path = folder(tmp_path, aggregated(TABLE))
    rows: list[dict[str, Any]] = []
    result = run_scenario(load_scenario(path), tmp_path / "run", on_row=rows.append)
    assert [row["ttft_ms"] for row in rows] == pytest.approx([10.0, 10.0], rel=1e-12)
    assert [row["e2e_latency_ms"] for row in rows] == pytest.approx([20.03, 20.03], rel=1e-12)
    (note,) = result.notes
    assert re.fullmatch(r"aggregated pass times: table t\.csv, 10 rows, digest [0-9a-f]{16}", note)
    (tmp_path / "t.csv").unlink()
    rebuilt = report_of_log(tmp_path / "run").report
    assert rebuilt == result.report
    assert rebuilt["notes"] == [note]


def test_speed_up_divides_the_times_of_a_table(tmp_path: Path) -> None:
    path = folder(tmp_path, aggregated({**TABLE, "speedup_ratio": 2.0, "decode_speedup_ratio": 5.0}))
    rows: list[dict[str, Any]] = []
    run_scenario(load_scenario(path), None, on_row=rows.append)
    assert rows[0]["ttft_ms"] == pytest.approx(5.0, rel=1e-12)
    assert rows[0]["e2e_latency_ms"] == pytest.approx(5.0 + 10.03 / 10.0, rel=1e-9)


def test_passes_outside_the_table_are_noted_at_the_end_and_in_the_report(tmp_path: Path) -> None:
    values = aggregated(TABLE)
    values["traffic"]["source"]["input_tokens"] = 900
    path = folder(tmp_path, values)
    results = [run_scenario(load_scenario(path), tmp_path / name) for name in ("a", "b")]
    assert results[0].notes[1:] == (
        "t.csv: decode passes with context_tokens up to 902, measured only up to 200: extrapolated",
        "t.csv: prefill passes with new_tokens up to 900, measured only up to 300: extrapolated",
    )
    assert list(results[0].notes) == results[0].report["notes"] == report_of_log(tmp_path / "a").report["notes"]
    assert results[0].digest == results[1].digest


def test_roles_take_their_own_rows_of_one_table(tmp_path: Path) -> None:
    """First token: prefill 10 ms, then a decode pass at 100 tokens, which makes it again, of 5 ms."""
    rows: list[dict[str, Any]] = []
    result = run_scenario(load_scenario(folder(tmp_path, disaggregated())), None, on_row=rows.append)
    assert rows[0]["ttft_ms"] == 15.0
    assert [note.split(" ")[0] for note in result.notes] == ["prefill", "decode"]


def test_a_scenario_with_a_table_comes_back_from_its_resolved_form() -> None:
    scenario = Scenario.from_dict(aggregated({**TABLE, "speedup_ratio": 3.0}))
    timing = scenario.resolved()["engine"]["workers"]["aggregated"]["timing"]
    assert timing == {"type": "table", "path": "t.csv", "speedup_ratio": 3.0, "decode_speedup_ratio": 1.0}
    assert Scenario.from_resolved(scenario.resolved()) == scenario
    assert scenario != Scenario.from_dict(aggregated({**TABLE, "speedup_ratio": 3.0, "path": "u.csv"}))


# -- the rank's side


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1e-9])
def test_times_that_are_no_times_end_the_run_by_name(bad: float) -> None:
    class Bad:
        def prefill_ms(self, requests: int, prompt_tokens: int, prefix_tokens: int) -> float:
            return bad

        def decode_ms(self, requests: int, known_tokens: int) -> float:
            return bad

    timer = PassTimer(RankConfig(gpu_blocks=1, block_size_tokens=4, timing=ExternalTiming()), Bad())
    for ask in (lambda: timer.prefill_ms(1, 2, 0), lambda: timer.decode_ms(1, 2)):
        with pytest.raises(SimError, match=re.escape(f"a pass that takes {bad!r} ms; pass times must be finite")):
            ask()


def test_an_external_timing_that_nobody_answers_for_is_a_bug() -> None:
    with pytest.raises(InvariantViolation, match="nobody answers for TableTiming"):
        PassTimer(RankConfig(gpu_blocks=1, block_size_tokens=4, timing=TableTiming(path="t.csv")))


def test_the_performance_model_is_asked_for_means_and_once() -> None:
    """Prefill: means rounded down, prefix included. Decode: what precedes the token that is computed."""
    asked: list[tuple[int, ...]] = []

    def prefill_ms(*batch: int) -> float:
        asked.append(batch)
        return -1.0 if batch[0] == 9 else 2.0

    def decode_ms(*batch: int) -> float:
        asked.append(batch)
        return 3.0

    times = AicPassTimes(prefill_ms, decode_ms)
    assert [times.prefill_ms(2, 4003, 1025), times.prefill_ms(2, 4002, 1024), times.decode_ms(2, 4005)] == [2, 2, 3]
    assert asked == [(2, 2001, 512), (2, 2001)]
    assert times.prefill_ms(9, 90, 0) == 0.0
    assert times.prefill_ms(3, 10, 9) == 0.0
    assert len(asked) == 3


def test_a_question_that_the_performance_model_cannot_answer_ends_the_run_with_its_words() -> None:
    def nothing(*batch: int) -> float:
        raise KeyError("no data")

    times = AicPassTimes(nothing, nothing)
    with pytest.raises(SimError, match=r"aiconfigurator-core has no decode time .*\(2, 4\): 'no data'"):
        times.decode_ms(2, 10)
