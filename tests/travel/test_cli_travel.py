"""``g2sim inspect``, ``events``, ``diff`` and ``export`` as a user meets them, and the commands of the docs."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet
import pytest
from cli_process import run_cli
from click.testing import CliRunner
from travel_runs import write_run

from g2sim.scenarios.cli_travel import events
from g2sim.scenarios.run_folder import LOG_NAME

REPO = Path(__file__).resolve().parents[2]
DOCS = (REPO / "docs" / "time-travel.md").read_text()


def events_of(run: Path, *options: str) -> list[dict]:
    """What ``g2sim events`` prints, without a process of its own."""
    done = CliRunner().invoke(events, [str(run), *options], catch_exceptions=False)
    assert done.exit_code == 0
    return [json.loads(line) for line in done.stdout.splitlines()]


class TestInspect:
    def test_table_and_json_speak_of_the_same_state(self, plain: Path, tmp_path: Path) -> None:
        table = run_cli(tmp_path, "inspect", plain, "--at", 30)
        value = json.loads(run_cli(tmp_path, "inspect", plain, "--at", 30, "--json", hash_seed=1).stdout)
        assert table.returncode == 0
        assert table.stdout.startswith(f"at 30.0 ms, after record {value['record']}\n")
        for rank in value["ranks"]:
            assert re.search(rf"^{rank['rank']} +{len(rank['g1_blocks'])}/12 ", table.stdout, re.MULTILINE)

    @pytest.mark.parametrize(
        ("options", "told"),
        [
            (["--at", "-1"], "--at"),
            (["--at", "nan"], "--at"),
            (["--at", "1", "--record", "1"], "does not go with --at"),
            (["--record", "100000"], "the log has"),
        ],
    )
    def test_bad_options_exit_2(self, plain: Path, tmp_path: Path, options: list[str], told: str) -> None:
        done = run_cli(tmp_path, "inspect", plain, *options)
        assert done.returncode == 2
        assert told in done.stderr
        assert "Traceback" not in done.stderr

    def test_a_cut_log_exits_1_after_the_state(self, plain: Path, tmp_path: Path) -> None:
        data = (plain / LOG_NAME).read_bytes()
        (tmp_path / "cut.g2log").write_bytes(data[: len(data) // 2])
        done = run_cli(tmp_path, "inspect", "cut.g2log")
        assert done.returncode == 1
        assert "last record: #" in done.stdout
        assert "cut.g2log: record" in done.stderr


class TestEvents:
    def test_without_filters_it_is_the_whole_log_in_order(self, plain: Path, tmp_path: Path) -> None:
        rows = events_of(plain)
        assert [row["record"] for row in rows] == list(range(len(rows)))
        assert rows[0]["event"] == "run.begin"
        assert rows[-1]["event"] == "run.end"

    def test_each_filter_keeps_what_it_names_and_together_they_all_hold(self, plain: Path, tmp_path: Path) -> None:
        rows = events_of(plain)
        filters = {
            ("--topic", "kv"): lambda row: row["event"].startswith("kv."),
            ("--topic", "RequestAdmitted"): lambda row: row["event"] == "wk.adm",
            ("--request", "3"): lambda row: row.get("request") == 3 or 3 in row.get("emitted", ()),
            ("--worker", "agg-1"): lambda row: row.get("worker") == 1,
            ("--since", "20", "--until", "40"): lambda row: 20 <= row["time_ms"] <= 40,
            ("--topic", "wk.adm", "--topic", "wk.fin", "--request", "1", "--request", "2"): (
                lambda row: row["event"] in ("wk.adm", "wk.fin") and row["request"] in (1, 2)
            ),
            ("--topic", "wk", "--request", "0", "--worker", "agg-0/0"): (
                lambda row: (
                    row["event"][:3] == "wk."
                    and row["worker"] == 0
                    and 0 in (row.get("request"), *row.get("emitted", ()))
                )
            ),
        }
        for options, keeps in filters.items():
            kept = events_of(plain, *options)
            assert kept == [row for row in rows if keeps(row)], options
            assert kept, options

    @pytest.mark.parametrize(
        ("options", "told"),
        [
            (["--topic", "wk.amd"], "did you mean wk.adm?"),
            (["--worker", "agg-7"], "did you mean agg-"),
            (["--request", "-1"], "--request"),
            (["--request", "3", "--request", "nobody"], "error: --request: got 'nobody'; allowed: 0 to "),
            (["--request", "999999"], "error: --request: got '999999'; allowed: 0 to "),
            (["--request", "03"], "error: --request: got '03'; allowed: 0 to "),
            (["--since", "20", "--until", "10"], "error: --until: got 10.0; allowed: a time from --since 20.0 on"),
        ],
    )
    def test_words_that_mean_nothing_exit_2(self, plain: Path, tmp_path: Path, options: list[str], told: str) -> None:
        done = run_cli(tmp_path, "events", plain, *options)
        assert done.returncode == 2
        assert told in done.stderr
        assert done.stdout == ""

    def test_a_reader_that_goes_away_is_no_error(self, plain: Path, tmp_path: Path) -> None:
        command = (
            f"{shlex.quote(sys.executable)} -m g2sim.scenarios.cli events {plain} | head -1; echo ${{PIPESTATUS[0]}}"
        )
        done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == "0"
        assert done.stderr == ""


class TestDiff:
    def test_a_run_equals_its_repetition(self, plain: Path, tmp_path: Path) -> None:
        again = write_run(tmp_path, "again")
        done = run_cli(tmp_path, "diff", plain, again)
        assert done.returncode == 0
        assert done.stdout == "the runs are equal: scenario, every record, report\n"

    def test_two_policies_part_at_a_record_and_in_the_report(self, plain: Path, late: Path, tmp_path: Path) -> None:
        done = run_cli(tmp_path, "diff", plain, late)
        assert done.returncode == 1
        assert "router.policy: 'round_robin' -> 'dynamo_kv'" in done.stdout
        value = json.loads(run_cli(tmp_path, "diff", plain, late, "--json", hash_seed=1).stdout)
        first = value["first_difference"]
        rows = [events_of(run) for run in (plain, late)]
        idx = next(idx for idx, pair in enumerate(zip(*rows, strict=False)) if pair[0] != pair[1])
        assert first["record"] == idx
        assert [first["left"][-1], first["right"][-1]] == [rows[0][idx], rows[1][idx]]
        reports = [json.loads((run / "report.json").read_text()) for run in (plain, late)]
        for path, pair in value["report"].items():
            if "[" not in path:
                places = reports
                for key in path.split("."):
                    places = [place[key] for place in places]
                assert places == pair

    def test_a_log_that_goes_on_longer_differs_where_the_other_ends(self, plain: Path, tmp_path: Path) -> None:
        data = (plain / LOG_NAME).read_bytes()
        (tmp_path / "cut.g2log").write_bytes(data[: len(data) // 2])
        done = run_cli(tmp_path, "diff", plain, "cut.g2log")
        assert done.returncode == 1
        assert "cut.g2log: the log has ended before" in done.stdout
        assert "error: cut.g2log: record" in done.stderr


class TestExport:
    def test_prometheus_has_the_figures_of_the_report(self, plain: Path, tmp_path: Path) -> None:
        done = run_cli(tmp_path, "export", plain, "--prometheus")
        report = json.loads((plain / "report.json").read_text())
        sample = re.compile(r'[a-z][a-z0-9_]*\{([a-z_]+="[^"]*",?)+\} \S+')
        samples = {}
        for line in done.stdout.splitlines():
            assert re.fullmatch(r"# TYPE [a-z0-9_]+ gauge", line) or sample.fullmatch(line), line
            name, _, number = line.rpartition(" ")
            samples[name] = number
        run = 'scenario="travel",seed="0"'
        assert float(samples[f"g2sim_summary_mean_ttft_ms{{{run}}}"]) == report["summary"]["mean_ttft_ms"]
        assert samples[f'g2sim_requests{{{run},status="completed"}}'] == "12"
        assert samples[f'g2sim_g2_stored_blocks{{{run},pool="g2"}}'] == str(report["g2_pools"][0]["stored_blocks"])
        ranks = [name for name in samples if name.startswith("g2sim_rank_passes")]
        assert len(ranks) == 2

    def test_parquet_has_every_event_and_every_request(self, plain: Path, tmp_path: Path) -> None:
        done = run_cli(tmp_path, "export", plain, "--parquet", "--out", "pq")
        assert done.returncode == 0, done.stderr
        requests = pyarrow.parquet.read_table(tmp_path / "pq" / "requests.parquet").to_pylist()
        rows = [json.loads(line) for line in (plain / "requests.jsonl").read_text().splitlines()]
        assert [row["ttft_ms"] for row in requests] == [row["ttft_ms"] for row in rows]
        assert [json.loads(row["ttft_parts_ms"]) for row in requests] == [row["ttft_parts_ms"] for row in rows]
        told = events_of(plain, "--topic", "kv.sto")
        table = pyarrow.parquet.read_table(tmp_path / "pq" / "events" / "kv.sto.parquet")
        assert str(table.schema.field("parent_hash").type) == "uint64"
        assert [{"event": "kv.sto", **row} for row in table.to_pylist()] == told
        counts = [pyarrow.parquet.read_metadata(path).num_rows for path in (tmp_path / "pq" / "events").iterdir()]
        assert sum(counts) == len(events_of(plain))

    @pytest.mark.parametrize(("form", "names"), [("neutral", ("aggregated-0", "aggregated-1")), ("dynamo", ("0", "1"))])
    def test_kv_events_as_lines_are_the_stream_that_the_log_has(
        self, form: str, names: tuple[str, str], plain: Path, tmp_path: Path
    ) -> None:
        done = run_cli(tmp_path, "export", plain, "--kv-events", form, "--out", "kv.jsonl")
        assert (done.returncode, done.stdout) == (0, "kv.jsonl\n"), done.stderr
        lines, log = (run_cli(tmp_path, "validate", path) for path in ("kv.jsonl", plain))
        assert lines.returncode == log.returncode == 0, lines.stdout
        verdicts = log.stdout.splitlines()[-2:]
        for name, renamed in zip(("aggregated-0", "aggregated-1"), names, strict=True):
            verdicts = [line.replace(f"{name}/", f"{renamed}/") for line in verdicts]
        assert lines.stdout.splitlines()[-2:] == verdicts
        assert len((tmp_path / "kv.jsonl").read_text().splitlines()) == len(events_of(plain, "--topic", "kv"))
        assert run_cli(tmp_path, "export", plain, "--kv-events", form).stdout == (tmp_path / "kv.jsonl").read_text()

    def test_kv_events_of_a_cut_log_go_as_far_as_it_is_good(self, plain: Path, tmp_path: Path) -> None:
        whole = run_cli(tmp_path, "export", plain, "--kv-events", "neutral").stdout
        log = (plain / LOG_NAME).read_bytes()
        (tmp_path / "cut.g2log").write_bytes(log[: len(log) // 2])
        done = run_cli(tmp_path, "export", "cut.g2log", "--kv-events", "neutral")
        assert done.returncode == 1
        assert "error: cut.g2log" in done.stderr
        assert done.stdout
        assert whole.startswith(done.stdout)
        assert len(done.stdout) < len(whole)

    def test_a_run_with_a_crash_has_no_dynamo_lines(self, tmp_path: Path) -> None:
        crash = REPO / "scenarios" / "library" / "faults-worker-crash.yaml"
        assert run_cli(tmp_path, "run", crash, "--out", "run", "--quiet").returncode == 0
        neutral = run_cli(tmp_path, "export", "run", "--kv-events", "neutral", "--out", "kv.jsonl")
        assert neutral.returncode == 0
        assert {"Left", "Joined"} < {
            json.loads(line)["kind"] for line in (tmp_path / "kv.jsonl").read_text().splitlines()
        }
        assert run_cli(tmp_path, "validate", "kv.jsonl").returncode == 0
        done = run_cli(tmp_path, "export", "run", "--kv-events", "dynamo", "--out", "dynamo.jsonl")
        assert done.returncode == 2
        assert "a worker crashes in this run" in done.stderr
        assert not (tmp_path / "dynamo.jsonl").exists()

    @pytest.mark.parametrize(
        ("options", "told"),
        [
            ([], "one of --prometheus, --parquet and --kv-events"),
            (["--prometheus", "--parquet"], "one of --prometheus, --parquet and --kv-events"),
            (["--prometheus", "--kv-events", "dynamo"], "one of --prometheus, --parquet and --kv-events"),
            (["--kv-events", "vllm"], "'neutral', 'dynamo'"),
            (["--parquet"], "the folder to write"),
            (["--prometheus", "--out", "mine"], "exists already"),
            (["--parquet", "--out", "folder"], "exists already"),
            (["--parquet", "--out", "folder", "--overwrite"], "is not a folder of Parquet files"),
        ],
    )
    def test_what_is_unclear_or_in_the_way_exits_2(
        self, plain: Path, tmp_path: Path, options: list[str], told: str
    ) -> None:
        (tmp_path / "mine").write_text("mine")
        (tmp_path / "folder").mkdir()
        done = run_cli(tmp_path, "export", plain, *options)
        assert done.returncode == 2
        assert told in done.stderr
        assert (tmp_path / "mine").read_text() == "mine"
        assert {item.name for item in tmp_path.iterdir()} == {"mine", "folder"}

    def test_without_pyarrow_it_says_what_to_install(self, plain: Path, tmp_path: Path) -> None:
        (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['pyarrow'] = None\n")
        hidden = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
        done = run_cli(tmp_path, "export", plain, "--parquet", "--out", "pq", environment=hidden)
        assert done.returncode == 2
        assert "pip install '.[parquet]'" in done.stderr


class TestDocs:
    COMMANDS = re.findall(r"^    (g2sim .*)$", DOCS, re.MULTILINE)

    def test_every_command_shown_works(self, tmp_path: Path) -> None:
        library = tmp_path / "scenarios" / "library"
        shutil.copytree(REPO / "scenarios" / "library", library, ignore=shutil.ignore_patterns("*.py"))
        for command in self.COMMANDS:
            done = run_cli(tmp_path, *shlex.split(command)[1:])
            assert done.returncode == (1 if " diff " in command else 0), (command, done.stderr)
