"""Runs that end badly: killed, out of disk, two at once. Nothing that was finished is lost, nothing false is shown."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml
from cli_process import Cli, start_cli

LONG = {
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
        "stop": {"requests": 6_000},
    },
}


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "long.yaml"
    path.write_text(yaml.safe_dump(LONG))
    return path


def started(scenario: Path, out: Path, limit_bytes: int | None = None) -> subprocess.Popen[str]:
    def limit() -> None:
        if limit_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))

    return start_cli(out.parent, "run", scenario, "--out", out, "--quiet", preexec_fn=limit)


def wait_for_log(partial: Path, size_bytes: int) -> None:
    log, deadline = partial / "events.g2log", time.monotonic() + 60.0
    while time.monotonic() < deadline:
        if log.exists() and log.stat().st_size > size_bytes:
            return
        time.sleep(0.02)
    pytest.fail(f"{log} did not grow")


def test_a_killed_run_leaves_a_log_that_is_reported_as_far_as_it_is_good(
    g2sim: Cli, scenario: Path, tmp_path: Path
) -> None:
    with started(scenario, tmp_path / "out") as process:
        wait_for_log(tmp_path / "out.partial", 50_000)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
    assert not (tmp_path / "out").exists()
    told = g2sim("report", tmp_path / "out.partial", "--json")
    assert told.returncode == 1
    assert "events.g2log: record " in told.stderr
    assert " at byte " in told.stderr
    assert "Traceback" not in told.stderr
    report = json.loads(told.stdout)
    assert report["finished"] is False
    rows = [line for line in (tmp_path / "out.partial" / "requests.jsonl").read_text().split("\n") if line]
    assert report["requests"]["completed"] > 0
    # A finished request is in the log before its row is written, and both are written in order.
    assert all(json.loads(line)["terminal_status"] == "completed" for line in rows[:-1])
    again = g2sim("run", scenario, "--out", tmp_path / "out", "--quiet")
    assert again.returncode == 2, "the rest of the killed run is in the way, and is not thrown away unasked"
    assert "--overwrite" in again.stderr


def test_a_full_disk_ends_the_run_with_the_path_and_loses_nothing(g2sim: Cli, scenario: Path, tmp_path: Path) -> None:
    with started(scenario, tmp_path / "out", limit_bytes=150_000) as process:
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1, stderr
    assert "events.g2log" in stderr or "requests.jsonl" in stderr
    assert "Traceback" not in stderr
    assert not (tmp_path / "out").exists()
    assert stderr.endswith(f"what was written until then: g2sim report {tmp_path / 'out.partial'}\n")
    told = g2sim("report", tmp_path / "out.partial", "--json")
    assert told.returncode == 1
    assert json.loads(told.stdout)["requests"]["completed"] > 0


def test_two_runs_into_one_folder_do_not_mix(g2sim: Cli, scenario: Path, tmp_path: Path) -> None:
    with started(scenario, tmp_path / "out") as process:
        wait_for_log(tmp_path / "out.partial", 0)
        second = g2sim("run", scenario, "--out", tmp_path / "out", "--quiet")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert second.returncode == 2
    assert "Traceback" not in second.stderr
    assert process.returncode == 130
    assert {item.name for item in tmp_path.iterdir()} == {"long.yaml"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_refused(g2sim: Cli, scenario: Path, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    done = g2sim("run", scenario, "--out", closed / "out")
    assert done.returncode == 2
    assert str(closed) in done.stderr
