"""``g2sim run`` and ``g2sim report`` as a user meets them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from cli_process import Cli, start_cli
from harness import HERE, case_scenario, load_case

from g2sim.bus.log import LogReader
from g2sim.scenarios import run as _events_of_runs  # noqa: F401  (a reader knows the events that are imported)

SMALL = {
    "engine": {
        "workers": {
            "aggregated": {
                "parallelism": {"replicas": 2},
                "kv_cache": {"block_size": 16, "capacity": {"type": "fixed", "blocks": 64}},
                "timing": {"type": "fixed", "prefill_ms": 10.0, "decode_ms": 1.0},
            }
        }
    },
    "traffic": {
        "source": {"type": "synthetic", "input_tokens": 64, "output_tokens": 4},
        "load": {"type": "concurrency", "concurrency": 4},
        "stop": {"requests": 40},
    },
}


def write(path: Path, values: object) -> Path:
    path.write_text(yaml.safe_dump(values))
    return path


def changed(values: dict, path: str, value: object) -> dict:
    out = json.loads(json.dumps(values))
    *outer, last = path.split(".")
    target = out
    for key in outer:
        target = target.setdefault(key, {})
    target[last] = value
    return out


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("engine.workers.aggregated.parallelism.replicas", 0, "got 0; allowed: any positive integer number of workers"),
        ("engine.workers.aggregated.kv_cache.block_size", "x", "got 'x'"),
        ("engine.workers.aggregated.kv_cahce", {}, "kv_cache"),
        ("traffic.source.paths", ["missing.jsonl"], "paths"),
    ],
)
def test_bad_input_exits_2_with_one_message_and_leaves_nothing(
    g2sim: Cli, tmp_path: Path, path: str, value: object, told: str
) -> None:
    scenario = write(tmp_path / "bad.yaml", changed(SMALL, path, value))
    done = g2sim("run", scenario, "--out", tmp_path / "out")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"error: {scenario}:")
    assert told in done.stderr
    assert {item.name for item in tmp_path.iterdir()} == {"bad.yaml"}


def test_a_bad_trace_row_is_named_by_file_and_line_and_nothing_is_left(g2sim: Cli, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"timestamp": 0, "input_length": 4, "output_length": 1, "hash_ids": [1]}\n'
        '{"timestamp": 1, "input_length": 4, "output_length": 1.5, "hash_ids": [1]}\n'
    )
    values = SMALL | {
        "traffic": {
            "source": {"type": "trace", "format": "mooncake", "paths": ["trace.jsonl"], "block_size": 4},
            "load": {"type": "trace_timestamps"},
        }
    }
    done = g2sim("run", write(tmp_path / "s.yaml", values))
    assert done.returncode == 2
    assert f"{trace}:2: output_length: got 1.5; allowed: an integer" in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["nosuch"],
        ["run"],
        ["run", "missing.yaml"],
        ["run", "x.yaml", "--seed", "-1"],
        ["report", "nowhere"],
        ["report"],
    ],
)
def test_bad_usage_exits_2_without_a_traceback(g2sim: Cli, arguments: list[str]) -> None:
    done = g2sim(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_the_demo_shows_that_the_other_worker_restored_the_prefix(g2sim: Cli, demo: Path, tmp_path: Path) -> None:
    """The table, the folder's three files, and the same report from the log alone, byte for byte."""
    out = tmp_path / "a folder with späce"
    done = g2sim("run", demo, "--out", out, "--verify")
    assert done.returncode == 0, done.stderr
    assert "from G2" in done.stdout
    assert "G2 pool [blocks]" in done.stdout
    assert "live state and log agree at" in done.stderr
    assert {item.name for item in out.iterdir()} == {"events.g2log", "report.json", "requests.jsonl"}
    report = json.loads((out / "report.json").read_text())
    assert all(worker["prompt_tokens_from_g2"] > 0 for worker in report["workers"])
    assert report["totals"]["prompt_tokens_from_g2"] > report["totals"]["prompt_tokens_from_g1"]
    with LogReader(out / "events.g2log") as reader:
        stores, loads = [], []
        for record in reader:
            kind = type(record.event).__name__
            if kind == "StorePrepared":
                stores.append(record.event)
            elif kind == "LoadQueued":
                loads.append(record.event)
    owner = {block: store.worker for store in stores for block in store.block_hashes}
    assert any(owner[block] != load.worker for load in loads for block in load.block_hashes)
    again = g2sim("report", out, "--json")
    assert again.returncode == 0
    assert again.stdout == (out / "report.json").read_text()
    assert g2sim("report", out).stdout == done.stdout


def test_quiet_and_json(g2sim: Cli, tmp_path: Path) -> None:
    scenario = write(tmp_path / "s.yaml", SMALL)
    done = g2sim("run", scenario, "--quiet", "--json", "--seed", 5)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (tmp_path / "runs" / "s" / "report.json").read_text()
    assert json.loads(done.stdout)["seed"] == 5


def test_existing_output_is_kept_unless_overwritten(g2sim: Cli, tmp_path: Path) -> None:
    scenario, out = write(tmp_path / "s.yaml", SMALL), tmp_path / "out"
    assert g2sim("run", scenario, "--out", out).returncode == 0
    before = (out / "events.g2log").read_bytes()
    refused = g2sim("run", scenario, "--out", out, "--seed", 9)
    assert refused.returncode == 2
    assert "--overwrite" in refused.stderr
    assert "to repeat" not in refused.stderr
    assert (out / "events.g2log").read_bytes() == before
    assert g2sim("run", scenario, "--out", out, "--seed", 9, "--overwrite").returncode == 0
    assert (out / "events.g2log").read_bytes() != before
    other = tmp_path / "precious"
    other.mkdir()
    (other / "file").write_text("x")
    refused = g2sim("run", scenario, "--out", other, "--overwrite")
    assert refused.returncode == 2
    assert (other / "file").read_text() == "x"
    assert not (tmp_path / "precious.partial").exists()


def test_without_out_a_free_folder_is_taken(g2sim: Cli, tmp_path: Path) -> None:
    scenario = write(tmp_path / "s.yaml", SMALL)
    assert g2sim("run", scenario).returncode == g2sim("run", scenario).returncode == 0
    assert {item.name for item in (tmp_path / "runs").iterdir()} == {"s", "s-2"}


def test_a_deadlock_exits_1_names_who_waits_and_leaves_a_log_that_says_why(g2sim: Cli, tmp_path: Path) -> None:
    stuck = changed(SMALL, "engine.workers.aggregated.scheduler", {"chunked_prefill": False, "max_batched_tokens": 32})
    scenario, out = write(tmp_path / "stuck.yaml", stuck), tmp_path / "out"
    done = g2sim("run", scenario, "--out", out)
    assert done.returncode == 1
    assert "deadlock" in done.stderr
    assert "request 0 waits for a pass with a budget of 64 tokens; the budget is 32" in done.stderr
    assert done.stderr.endswith(f"\nto repeat: g2sim run {scenario} --seed 0 --out {out} --overwrite\n")
    assert [item.name for item in out.iterdir()] == ["events.g2log"]
    told = g2sim("report", out)
    assert told.returncode == 1
    assert "request 0 waits for" in told.stderr


def test_a_cut_log_is_reported_up_to_the_cut(g2sim: Cli, tmp_path: Path) -> None:
    scenario, out = write(tmp_path / "s.yaml", SMALL), tmp_path / "out"
    assert g2sim("run", scenario, "--out", out).returncode == 0
    log = out / "events.g2log"
    data = log.read_bytes()
    log.write_bytes(data[: len(data) // 2])
    done = g2sim("report", out)
    assert done.returncode == 1
    assert "the log ends before the run does" in done.stdout
    assert f"{log}: record " in done.stderr
    assert " at byte " in done.stderr
    assert "Traceback" not in done.stderr


def test_an_interrupted_run_exits_130_and_leaves_nothing(tmp_path: Path) -> None:
    scenario = write(tmp_path / "s.yaml", changed(SMALL, "traffic.stop.requests", 2_000_000))
    with start_cli(tmp_path, "run", scenario, "--out", "out") as process:
        deadline = time.monotonic() + 60
        while not (tmp_path / "out.partial").exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stderr.endswith("interrupted\n")
    assert {item.name for item in tmp_path.iterdir()} == {"s.yaml"}


def test_a_closed_pipe_is_no_error(g2sim: Cli, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert g2sim("run", write(tmp_path / "s.yaml", SMALL), "--out", out).returncode == 0
    command = f"{sys.executable} -m g2sim.scenarios.cli report {out} --json | true"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stderr == ""


@pytest.mark.parametrize("stem", ["error_weka_model_not_declared", "error_real_weka_trace_0291"])
def test_a_model_that_a_trace_does_not_declare_is_a_note_and_strictly_an_error(
    g2sim: Cli, tmp_path: Path, stem: str
) -> None:
    scenario = tmp_path / "s.yaml"
    values = case_scenario(load_case(HERE / "workload" / f"{stem}.json"), tmp_path).resolved()
    scenario.write_text(yaml.safe_dump(values))
    strict = g2sim("run", scenario, "--out", tmp_path / "strict", "--strict-traces")
    assert strict.returncode == 2
    assert "models" in strict.stderr
    assert not (tmp_path / "strict").exists()
    done = g2sim("run", scenario, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("models") == 1, "one note a file"
