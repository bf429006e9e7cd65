"""aiconfigurator-core itself: its conventions against recorded results of the reference, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import attrs
import pytest
import yaml
from timing_values import aggregated, needs_aic, on_qwen, written

from g2sim.actors.worker.timing import scaled_ms
from g2sim.bus.errors import ConfigError
from g2sim.scenarios.aic_timing import AicModel, AicRefused, AicTiming, aic_pass_times, kv_memory, literal_version
from g2sim.scenarios.run import report_of_log, run_scenario
from g2sim.scenarios.schema import Scenario, load_scenario

pytestmark = needs_aic

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "scenarios" / "library"
RECORDED = "0.12."
"""Releases of the package whose numbers are in this file."""

QWEN = AicModel(
    model="Qwen/Qwen3-32B",
    hardware="h200_sxm",
    backend_version="0.24.0",
    tensor=2,
    attention_data=1,
    moe_tensor=1,
    moe_expert=1,
    block_size_tokens=64,
)
WORKER = "engine.workers.aggregated"

recorded_release = pytest.mark.skipif(
    find_spec("aiconfigurator_core") is not None and not version("aiconfigurator-core").startswith(RECORDED),
    reason=f"numbers were recorded with aiconfigurator-core {RECORDED}x",
)


@pytest.mark.parametrize(
    ("changes", "field", "said"),
    [
        ({"model": "Qwen/Qwen3-33B"}, "engine.model", "did you mean Qwen/Qwen3-32B?"),
        ({"model": "."}, "engine.model", "absolute path of a directory"),
        ({"hardware": "h200"}, "engine.hardware", "allowed: a100_sxm, "),
        ({"backend_version": "0.1.0"}, "engine.backend_version", "allowed: current, "),
        ({"gemm_quant_mode": "fp7"}, "engine.gemm_quant_mode", "got 'fp7'; allowed: bfloat16, "),
    ],
)
@pytest.mark.parametrize("asker", ["timing", "capacity"])
def test_what_it_does_not_know_is_refused_by_field_and_value(
    tmp_path: Path, changes: dict[str, Any], field: str, said: str, asker: str
) -> None:
    timed = aggregated({"type": "aic"})
    sized = aggregated({"type": "polynomial"}, capacity={"type": "default"})
    values = on_qwen(timed if asker == "timing" else sized, **changes)
    path = written(tmp_path / "s.yaml", yaml.safe_dump(values, sort_keys=False))
    with pytest.raises(ConfigError) as caught:
        load_scenario(path)
    assert caught.value.field == field
    assert said in str(caught.value)
    assert str(caught.value).startswith(f"{path}:")


def test_a_format_of_one_worker_is_refused_where_it_stands(tmp_path: Path) -> None:
    values = on_qwen(aggregated({"type": "aic", "kvcache_quant_mode": "fp7"}), kvcache_quant_mode="fp8")
    with pytest.raises(ConfigError) as caught:
        load_scenario(written(tmp_path / "s.yaml", yaml.safe_dump(values, sort_keys=False)))
    assert caught.value.field == f"{WORKER}.timing.kvcache_quant_mode"
    assert "got 'fp7'; allowed: bfloat16, int8, fp8" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tensor": 3}, "num_heads 64 should be divisible by tp_size 3"),
        ({"model": "Qwen/Qwen3-30B-A3B", "tensor": 4}, "Parallelism width mismatch"),
    ],
)
def test_a_parallelism_that_the_model_cannot_have_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(AicRefused, match=said):
        aic_pass_times(attrs.evolve(QWEN, **changes))


def test_a_model_that_does_not_fit_has_no_room_for_kv() -> None:
    with pytest.raises(AicRefused, match="no KV budget"):
        kv_memory(
            attrs.evolve(QWEN, model="Qwen/Qwen3-235B-A22B", tensor=1),
            batched_tokens=8192,
            sequences=256,
            memory_fraction=0.9,
        )


def test_versions_that_move_are_written_down_as_numbers() -> None:
    for alias in (None, "current"):
        values = on_qwen(aggregated({"type": "aic"}), backend_version=alias)
        timing = Scenario.from_dict(values).deployment.pools[0].rank.timing
        assert isinstance(timing, AicTiming)
        assert timing.served.backend_version == literal_version(attrs.evolve(QWEN, backend_version=None))
        assert timing.served.backend_version not in (None, "current")


def test_nothing_of_it_is_imported_to_read_a_scenario_that_does_not_need_it() -> None:
    code = (
        "import sys; from pathlib import Path; from g2sim.scenarios.schema import load_scenario; "
        f"load_scenario(Path({str(LIBRARY / 'agentx-g2-shared.yaml')!r})); "
        "assert not [name for name in sys.modules if name.startswith('aiconfigurator')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# -- numbers


@recorded_release
def test_prefill_times_and_memory_are_those_of_the_reference() -> None:
    """Source: ``aisimulate predict`` 0.13.0.dev202610270000000085, two requests of 1001 and 3002 tokens in one pass
    (TTFT 209.346466), one of 2003 with 1536 in the cache (28.400009), and its number of blocks of 64 tokens.
    """
    times = aic_pass_times(QWEN)
    assert scaled_ms(times.prefill_ms(2, 4003, 0), 1.0) == 209.34646600000002
    assert scaled_ms(times.prefill_ms(1, 2003, 1536), 1.0) == pytest.approx(28.400009, abs=5e-10)
    memory = kv_memory(QWEN, batched_tokens=8192, sequences=256, memory_fraction=0.9)
    assert (memory.tokens // 64, memory.bytes_per_token) == (11742, 131072)


@recorded_release
def test_decode_times_have_not_moved() -> None:
    """Not the reference's: its release computes decode attention in another way (docs/timing.md)."""
    assert aic_pass_times(QWEN).decode_ms(2, 4005) == pytest.approx(11.37855027, abs=1e-8)


def test_longer_passes_take_longer() -> None:
    times = aic_pass_times(QWEN)
    assert times.prefill_ms(1, 1024, 0) < times.prefill_ms(1, 4096, 0) < times.prefill_ms(1, 8192, 0)
    assert times.prefill_ms(1, 4096, 2048) < times.prefill_ms(1, 4096, 0)
    assert times.decode_ms(8, 8 * 512) < times.decode_ms(8, 8 * 8192) < times.decode_ms(64, 64 * 8192)


def test_the_library_scenario_runs_and_its_log_needs_no_package(tmp_path: Path) -> None:
    """Two workers in each pool take part, prefixes come back from the shared pool, and a process that cannot import
    the package rebuilds the same report.
    """
    scenario = load_scenario(LIBRARY / "qwen3-32b-2p2d-aic.yaml")
    assert all(pool.rank.gpu_blocks > 1000 for pool in scenario.deployment.pools)
    assert {pool.rank.kv_bytes_per_token for pool in scenario.deployment.pools} == {131072}
    assert scenario.deployment.handoff.bytes_per_token == 131072
    assert Scenario.from_resolved(scenario.resolved()).deployment == scenario.deployment
    rows: list[dict[str, Any]] = []
    result = run_scenario(scenario, tmp_path / "run", on_row=rows.append)
    assert {row["terminal_status"] for row in rows} == {"completed"}
    for pool in ("prefill", "decode"):
        assert {row[f"{pool}_worker_idx"] for row in rows} == {0, 1}
    assert result.report["totals"]["prompt_tokens_from_g2"] > 0
    assert [pool["capacity_blocks"] for pool in result.report["g2_pools"]] == [32768]
    assert result.notes[0].startswith("prefill pass times: aiconfigurator-core ")
    assert report_of_log(tmp_path / "run").report == result.report
    code = (
        "import sys; sys.modules['aiconfigurator_core'] = None; "
        "from pathlib import Path; from g2sim.scenarios.run import report_of_log; "
        "from g2sim.scenarios.report import report_text; "
        f"sys.stdout.write(report_text(report_of_log(Path({str(tmp_path / 'run')!r})).report))"
    )
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert said == (tmp_path / "run" / "report.json").read_text(encoding="utf-8")


@recorded_release
def test_the_example_table_is_what_the_script_writes() -> None:
    spec = spec_from_file_location("aic_table", ROOT / "benchmarks" / "aic_table.py")
    assert spec is not None
    assert spec.loader is not None
    script = module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.table("Qwen/Qwen3-32B", "h200_sxm", 2) == (LIBRARY / "tables" / "qwen3-32b-h200-tp2.csv").read_text(
        encoding="utf-8"
    )
