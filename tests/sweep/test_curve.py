"""``g2sim curve``: its sizes are those of the runs, 0 is no host tier, and the picture shows the rows."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from cli_process import run_cli
from sweep_values import refused, scenario_file, values

from g2sim.scenarios.curve import GPU, HOST, curve, render_curve
from g2sim.scenarios.run import run_scenario
from g2sim.scenarios.schema import Scenario
from g2sim.scenarios.sweep import Row, Sweep

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    return scenario_file(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--host-blocks", ""], "--host-blocks: got ''"),
        (["--host-blocks", "1,,2"], "numbers of blocks from 0 on"),
        (["--host-blocks", "-1"], "numbers of blocks from 0 on"),
        (["--host-blocks", "1.5k"], "numbers of blocks from 0 on"),
        (["--host-blocks", "1K"], "k is 1000"),
        (["--host-blocks", "1k,1000"], "two of the sizes are the same"),
        (
            ["--host-blocks", "0", "--gpu-blocks", "0,1"],
            "numbers of blocks from 1 on",
        ),
        (["--host-blocks", "0", "--picture", "a.png"], "ends in .svg"),
        (["--host-blocks", "0", "--picture", "a.svg", "--gpu-blocks", "1,2,3,4,5,6,7"], "at most 6 of them"),
    ],
)
def test_sizes_that_are_none_are_refused(
    scenario: Path,
    arguments: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(scenario.parent)
    before = sorted(scenario.parent.iterdir())
    assert said in refused(capsys, "curve", "s.yaml", *arguments)
    assert sorted(scenario.parent.iterdir()) == before


def test_a_scenario_without_host_tier_is_refused_with_the_key_to_give(
    scenario: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = values()
    del plain["engine"]["workers"]["aggregated"]["kv_cache"]["host_offload"]
    scenario.write_text(yaml.safe_dump(plain))
    told = refused(capsys, "curve", str(scenario), "--host-blocks", "0,8")
    assert "s.yaml has no host tier; give engine.workers.aggregated.kv_cache.host_offload" in told


def test_rows_are_the_runs_with_these_sizes_and_the_picture_has_a_spot_for_each(scenario: Path) -> None:
    folder = scenario.parent
    done = run_cli(
        folder,
        *("curve", "s.yaml", "--host-blocks", "1k,0,4", "--gpu-blocks", "64,6"),
        *("--csv", "a.csv", "--picture", "a.svg"),
    )
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader((folder / "a.csv").read_text().splitlines()))
    sizes = [(gpu, host) for gpu in (6, 64) for host in (0, 4, 1000)]
    assert [(int(row[GPU]), int(row[HOST])) for row in rows] == sizes
    from_g2 = []
    for row, (gpu, host) in zip(rows, sizes, strict=True):
        same = values()
        cache = same["engine"]["workers"]["aggregated"]["kv_cache"]
        cache["capacity"]["blocks"] = gpu
        cache["host_offload"] = (cache["host_offload"] | {"num_host_blocks": host}) if host else None
        report = run_scenario(Scenario.from_dict(same, base_dir=folder), None).report
        assert float(row["mean_ttft_ms"]) == report["summary"]["mean_ttft_ms"]
        asked = report["totals"]["prompt_tokens_asked"]
        assert float(row["g2_share"]) == 100.0 * report["totals"]["prompt_tokens_from_g2"] / asked
        from_g2.append(float(row["g2_share"]))
    assert from_g2[0] == 0.0 < from_g2[2]
    picture = ElementTree.fromstring((folder / "a.svg").read_text())
    spots = [circle[0].text for circle in picture.iter(f"{SVG}circle")]
    assert len(spots) == 4 * len(sizes)
    assert f"{from_g2[2]:.3f} with 1000 blocks, G1 6 blocks" in spots


def test_the_sizes_of_both_roles_change_together(tmp_path: Path) -> None:
    apart = values(poisson=True)
    apart["engine"] = {
        "mode": "disaggregated",
        "workers": dict.fromkeys(("prefill", "decode"), apart["engine"]["workers"]["aggregated"]),
    }
    for worker in apart["engine"]["workers"].values():
        worker["kv_cache"]["host_offload"] |= {"scope": "cluster_shared", "kv_layout_id": "one"}
    path = tmp_path / "s.yaml"
    path.write_text(yaml.safe_dump(apart))
    told = curve(path, [0, 8], [32])
    assert [row.error for row in told.rows] == [None, None]
    assert [dict(row.labels) for row in told.rows] == [{GPU: 32, HOST: 0}, {GPU: 32, HOST: 8}]


def test_several_seeds_give_means_with_the_interval_of_student(tmp_path: Path) -> None:
    """Of three values; the quantile is that of printed tables."""
    path = tmp_path / "s.yaml"
    path.write_text(yaml.safe_dump(values(poisson=True)))
    arguments = ("curve", path, "--host-blocks", "0,8", "--seeds", 3, "--quiet")
    told = json.loads(run_cli(tmp_path, *arguments, "--json").stdout)
    table = run_cli(tmp_path, *arguments, "--picture", "a.svg", hash_seed=5).stdout
    assert told["confidence_level"] == 0.95
    assert "means of 3 seeds from " in table
    spots = [circle[0].text for circle in ElementTree.parse(tmp_path / "a.svg").iter(f"{SVG}circle")]
    for size, point in zip((0, 8), told["points"], strict=True):
        assert point["labels"] == {HOST: size}
        for name in ("mean_ttft_ms", "p99_ttft_ms", "output_throughput_tok_s"):
            found = [row["values"][name] for row in told["rows"] if row["labels"] == point["labels"]]
            assert len(set(found)) == 3
            mean = sum(found) / 3
            half = 4.30265 * math.sqrt(sum((value - mean) ** 2 for value in found) / 2) / math.sqrt(3)
            assert point["means"][name] == pytest.approx({"value": mean, "half_width": half}, rel=1e-5)
            shown = f"{point['means'][name]['value']:.3f} \u00b1 {point['means'][name]['half_width']:.3f}"
            assert shown in table
            assert name == "output_throughput_tok_s" or f"{shown} with {size} blocks" in spots


def test_seeds_that_change_nothing_give_no_interval(scenario: Path) -> None:
    done = run_cli(scenario.parent, "curve", "s.yaml", "--host-blocks", "8", "--seeds", 2, "--quiet")
    assert "All 2 seeds give the same: " in done.stdout
    assert "\u00b1" not in done.stdout


def test_a_failed_run_leaves_a_hole_in_the_picture_and_seeds_are_averaged() -> None:
    def row(host: int, seed: int, share: float | None) -> Row:
        found = None
        if share is not None:
            found = dict.fromkeys(("g1_share", "g2_share", "hit_rate_unlimited", "mean_ttft_ms", "p99_ttft_ms"), share)
        return Row({HOST: host}, seed, found, "failed" if found is None else None)

    rows = (row(0, 1, 10.0), row(0, 2, 20.0), row(8, 1, 30.0), row(8, 2, None), row(16, 1, 30.0), row(16, 2, 40.0))
    picture = ElementTree.fromstring(render_curve(Sweep(scenario="a<b", axes={HOST: [0, 8, 16]}, rows=rows)))
    told = [circle[0].text for circle in picture.iter(f"{SVG}circle")]
    assert told == [
        *("30.000 \u00b1 127.062 with 0 blocks", "70.000 \u00b1 127.062 with 16 blocks"),
        *(("15.000 \u00b1 63.531 with 0 blocks", "35.000 \u00b1 63.531 with 16 blocks") * 3),
    ]


def test_a_picture_of_nothing_but_failures_can_be_drawn() -> None:
    rows = (Row({HOST: 0}, 1, None, "failed"),)
    assert render_curve(Sweep(scenario="a", axes={HOST: [0]}, rows=rows)).endswith("</svg>\n")
