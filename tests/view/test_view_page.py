"""The page of a run without a browser: what it holds, and the command that writes it."""

from __future__ import annotations

import itertools
import json
import re
import resource
import shutil
from collections.abc import Callable
from operator import lt
from pathlib import Path

import numpy as np
import pytest
from cli_process import Cli, run_cli
from hypothesis import given
from hypothesis import strategies as st
from view_values import payload_of

from g2sim.bus.log import LogReader, LogWriter
from g2sim.scenarios.cli_explain import _parts
from g2sim.scenarios.explain import explain_request
from g2sim.scenarios.run import scenario_of_log
from g2sim.scenarios.run_folder import LOG_NAME
from g2sim.scenarios.view import data
from g2sim.scenarios.view.page import page_of_log

RunOf = Callable[[str], Path]
PageOf = Callable[[str], str]
Within = Callable[..., tuple[int, str, str]]
RUNS = ("demo", "separate", "many")
OVERLAPS = ("selected_overlap_blocks", "best_available_overlap_blocks")


@pytest.mark.parametrize("name", RUNS)
def test_the_page_holds_the_report_and_columns_that_add_up_to_it(run_of: RunOf, page_of: PageOf, name: str) -> None:
    run = run_of(name)
    value = payload_of(page_of(name))
    report = json.loads((run / "report.json").read_text())
    assert value["report"] == report
    for rank, passes, entry in zip(value["ranks"], value["passes"], report["workers"], strict=True):
        assert rank["name"] == f"{entry['pool']}-{entry['worker']}/{entry['dp_rank']}"
        assert sum(passes["count"]) == entry["passes"]
        assert sum(passes["prefill"]) == entry["prefill_tokens"]
    requests, completed = value["requests"], value["statuses"].index("completed")
    done = [r for r, status in enumerate(requests["status"]) if status == completed]
    totals = report["totals"]
    assert sum(requests["from_g1"][r] for r in done) == totals["prompt_tokens_from_g1"]
    assert sum(requests["from_g2"][r] for r in done) == totals["prompt_tokens_from_g2"]
    assert sum(requests["input_tokens"][r] for r in done) == totals["prompt_tokens_asked"]
    assert sum(requests["output_tokens"]) == totals["output_tokens"]
    assert sum(requests["preemptions"]) == totals["preemptions"]
    for level, pool in zip(value["g2"], report["g2_pools"], strict=True):
        assert (sum(level["d_blocks"]), sum(level["d_used"])) == (pool["resident_blocks"], pool["used_blocks"])
    for kind, field in (("store", "stored_blocks"), ("load", "loaded_blocks")):
        moved = sum(
            amount
            for link in value["links"]
            if link["kind"] == kind
            for amount, is_done in zip(link["amount"], link["done"], strict=True)
            if is_done
        )
        assert moved == sum(pool[field] for pool in report["g2_pools"])


@pytest.mark.parametrize("name", RUNS)
def test_request_columns_are_the_rows_in_whole_microseconds(run_of: RunOf, page_of: PageOf, name: str) -> None:
    run = run_of(name)
    value = payload_of(page_of(name))
    requests, placements = value["requests"], value["placements"]
    arrivals = np.cumsum(requests["d_arrival_us"])
    rows = [json.loads(line) for line in (run / "requests.jsonl").read_text().splitlines()]
    assert len(rows) == len(requests["status"])
    placed: dict[int, list[tuple[int, int]]] = {}
    for request, overlap, best in zip(placements["request"], placements["overlap"], placements["best"], strict=True):
        placed.setdefault(request, []).append((overlap, best))
    for row in rows:
        r = row["request"]
        assert abs(arrivals[r] / 1000 - row["arrival_time_ms"]) <= 0.0005
        assert abs(requests["ttft_us"][r] / 1000 - row["ttft_ms"]) <= 0.0005
        assert value["statuses"][requests["status"][r]] == row["terminal_status"]
        assert requests["admit_us"][r] == data.whole_us(row["first_admit_ms"])
        # A policy may report less than whole blocks for those in host memory; the page shows whole ones.
        for entry, shown in zip(row["routing_history"], placed[r], strict=True):
            assert all((blocks == -1) is (entry[key] is None) for key, blocks in zip(OVERLAPS, shown, strict=True))
            assert all(blocks >= (entry[key] or 0) for key, blocks in zip(OVERLAPS, shown, strict=True) if blocks >= 0)


@pytest.mark.parametrize("name", RUNS)
def test_the_page_is_one_file_that_asks_for_nothing(page_of: PageOf, name: str) -> None:
    page = page_of(name)
    assert page.startswith("<!doctype html>")
    text = re.sub(r'(?<=octet-stream">)[^<]*', "", page)
    assert not re.findall(r"https?:|//cdn|\bimport\b|@import|<link[^>]*stylesheet|\bsrc=|url\(|fetch\(|XMLHttp", text)
    assert "default-src 'none'" in text
    assert "{{" not in text
    assert text.count("<script") == text.count("</script>") == 2
    assert len(page) < 3_000_000


def test_a_name_with_markup_is_shown_as_text(page_of: PageOf) -> None:
    page = page_of("separate")
    assert "<title>separate &lt;/script&gt;&lt;b&gt;pools&lt;/b&gt; &amp; more - g2sim</title>" in page
    assert "<b>pools</b>" not in page


def test_the_page_knows_what_routers_counted_on_and_what_ranks_found(page_of: PageOf) -> None:
    value = payload_of(page_of("separate"))
    placements, ranks = value["placements"], value["ranks"]
    on_decode = [ranks[rank]["name"].startswith("decode") for rank in placements["rank"]]
    found = placements["found"]
    assert all((blocks == -1) is decode for blocks, decode in zip(found, on_decode, strict=True))
    assert max(found) > 0
    assert all(f <= u for f, u in zip(found, placements["usable"], strict=True))
    assert value["router"] == {"policy": "dynamo_kv", "kv_event_lag_ms": 50.0}
    assert all((rank["kv"]["missing"], rank["kv"]["repeated"]) == (0, 0) for rank in ranks)
    for kind, changes in value["kv"].items():
        assert sum(changes["blocks"]) == sum(rank["kv"]["blocks"][kind] for rank in ranks)


def test_the_page_and_explain_count_the_same_blocks(run_of: RunOf, page_of: PageOf) -> None:
    """Of each placement by overlap: whole blocks of the prompt, and those that the router counted on."""
    placements = payload_of(page_of("separate"))["placements"]
    assert any(map(lt, placements["usable"], placements["whole"]))
    rows = zip(*(placements[key] for key in ("request", "overlap", "whole", "found")), strict=True)
    for request, overlap, whole, found in [row for row in rows if row[3] >= 0][:12]:
        told, _ = explain_request(run_of("separate"), str(request))
        assert f"{whole} whole blocks" in next(_parts(told))
        reuse, block = told.reuse[0], told.block_size_tokens
        assert overlap == reuse.device_blocks + reuse.host_blocks <= whole
        assert found == (reuse.g1_tokens + (reuse.host_tokens or 0)) // block


# Level of detail ----------------------------------------------------------------------------------------------------


def series(*names: str, rows: list[tuple[int, ...]]) -> data._Series:
    made = data._Series(*names)
    for row in rows:
        made.add(*row)
    return made


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9), st.integers(0, 99)), max_size=60), st.integers(1, 70))
def test_grouped_passes_keep_every_sum(drawn: list[tuple[int, int, int]], group: int) -> None:
    rows, now = [], 0
    for gap, length, tokens in drawn:
        rows.append((now + gap, now + gap + length, tokens, 1, tokens // 2, 1))
        now += gap + length
    made = data._pass_columns(series("start", "end", "tokens", "requests", "prefill", "emitted", rows=rows), group)
    assert sum(made["count"]) == len(rows)
    assert sum(made["busy"]) == sum(length for _, length, _ in drawn)
    assert sum(made["tokens"]) == sum(tokens for *_, tokens in drawn)
    starts = np.cumsum(made["d_start"]).tolist()
    assert starts == [row[0] for row in rows[::group]]
    assert [a + b for a, b in zip(starts, made["length"], strict=True)][-1:] == [row[1] for row in rows[-1:]]
    assert all(count <= group for count in made["count"])


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 50)), min_size=1, max_size=200), st.integers(1, 20))
def test_thinned_levels_keep_extremes_and_the_last_value_of_each_interval(
    drawn: list[tuple[int, int]], bins: int
) -> None:
    times = np.cumsum([step for step, _ in drawn]).tolist()
    rows = list(zip(times, [level for _, level in drawn], strict=True))
    made = data._level_columns(series("at", "blocks", rows=rows), times[-1], bins)
    at, levels = np.cumsum(made["d_at"]).tolist(), np.cumsum(made["d_blocks"]).tolist()
    kept = list(zip(at, levels, strict=True))
    assert len(kept) <= max(3 * bins, 0) or kept == rows
    assert kept[-1] == rows[-1]
    assert set(kept) <= set(rows)
    number = [min(time * bins // max(times[-1], 1), bins - 1) for time in times]
    for interval in set(number):
        inside = [row for row, n in zip(rows, number, strict=True) if n == interval]
        left = [level for time, level in kept if min(time * bins // max(times[-1], 1), bins - 1) == interval]
        assert (min(left), max(left)) == (min(v for _, v in inside), max(v for _, v in inside))


def test_a_longer_run_is_thinned_and_keeps_its_sums(run_of: RunOf, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of("separate")
    monkeypatch.setattr(data, "MAX_PASSES", 500)
    monkeypatch.setattr(data, "MAX_LEVEL_POINTS", 300)
    value = payload_of(page_of_log(run, scenario_of_log(run))[0])
    assert value["pass_group"] > 1
    assert sum(len(passes["count"]) for passes in value["passes"]) <= 500 + len(value["passes"])
    assert sum(sum(passes["count"]) for passes in value["passes"]) == value["report"]["totals"]["passes"]
    assert sum(len(level["d_at"]) for level in value["g1"] + value["g2"]) <= 300


def test_a_longer_run_s_kv_events_are_added_up(run_of: RunOf, page_of: PageOf, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of("separate")
    whole = payload_of(page_of("separate"))["kv"]
    monkeypatch.setattr(data, "MAX_KV_POINTS", 400)
    thin = payload_of(page_of_log(run, scenario_of_log(run))[0])["kv"]
    for kind, changes in whole.items():
        assert len(changes["d_at"]) == len(changes["blocks"])
        assert sum(thin[kind]["blocks"]) == sum(changes["blocks"])
        assert len(thin[kind]["blocks"]) <= 101
    assert len(thin["g1_stored"]["blocks"]) < len(whole["g1_stored"]["blocks"])


# The command --------------------------------------------------------------------------------------------------------


def test_the_file_goes_into_the_run_folder_and_is_the_same_in_every_process(
    run_of: RunOf, g2sim: Cli, tmp_path: Path
) -> None:
    shutil.copytree(run_of("demo"), tmp_path / "run")
    done = g2sim("view", "run")
    assert (done.returncode, done.stdout, done.stderr) == (0, "run/view.html\n", "")
    again = g2sim("view", "run", "--out", "other.html", hash_seed=99)
    assert again.returncode == 0
    assert (tmp_path / "run" / "view.html").read_bytes() == (tmp_path / "other.html").read_bytes()
    beside = g2sim("view", Path("run") / LOG_NAME)
    assert beside.stdout == "run/events.view.html\n"
    # The page says how the run was named, and is the same otherwise.
    page, of_log = (payload_of((tmp_path / "run" / name).read_text()) for name in ("view.html", "events.view.html"))
    assert (page.pop("run"), of_log.pop("run")) == ("run", "run/events.g2log")
    assert page == of_log


@pytest.mark.parametrize("verb", ["view", "timeline"])
def test_what_is_in_the_way_is_not_replaced_unasked(run_of: RunOf, within: Within, tmp_path: Path, verb: str) -> None:
    run = run_of("demo")
    target = tmp_path / "here"
    target.write_text("mine")
    code, _, told = within(verb, run, "--out", target)
    assert code == 2
    assert "--out: exists already" in told
    assert target.read_text() == "mine"
    assert within(verb, run, "--out", target, "--overwrite")[0] == 0
    assert target.read_text() != "mine"
    log = tmp_path / "copy.g2log"
    shutil.copy(run / LOG_NAME, log)
    code, _, told = within(verb, log, "--out", log, "--overwrite")
    assert code == 2
    assert "is the log that is to be read" in told
    assert log.read_bytes() == (run / LOG_NAME).read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"here", "copy.g2log"}


@pytest.mark.parametrize("verb", ["view", "timeline"])
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nowhere"], "cannot read the log"),
        (["RUN", "--out", "no/such/folder/file"], "--out: cannot be written (No such file or directory)"),
        (["RUN", "--out", "."], "--out: is a folder"),
        (["noise"], "this is not a g2sim log"),
        ([], "Missing argument 'RUN'"),
    ],
)
def test_bad_input_exits_2_and_leaves_nothing(
    run_of: RunOf, within: Within, tmp_path: Path, verb: str, arguments: list[str], expected: str
) -> None:
    (tmp_path / "noise").write_text("not a log at all")
    code, out, told = within(verb, *(run_of("demo") if word == "RUN" else word for word in arguments))
    assert (code, out) == (2, "")
    assert expected in told
    assert {path.name for path in tmp_path.iterdir()} == {"noise"}


@pytest.mark.parametrize("share", [0.02, 0.5, 0.97])
def test_a_cut_log_is_shown_as_far_as_it_is_good(run_of: RunOf, within: Within, tmp_path: Path, share: float) -> None:
    whole = (run_of("demo") / LOG_NAME).read_bytes()
    (tmp_path / "cut.g2log").write_bytes(whole[: int(len(whole) * share)])
    code, _, told = within("view", "cut.g2log")
    assert code == 1
    assert "cut.g2log: record" in told
    value = payload_of((tmp_path / "cut.view.html").read_text())
    assert value["damage"] in told
    assert value["report"]["finished"] is False
    open_requests = value["requests"]["status"].count(value["statuses"].index("unfinished"))
    assert open_requests == value["report"]["requests"]["unfinished"]
    assert within("timeline", "cut.g2log")[0] == 1
    json.loads((tmp_path / "cut.timeline.json").read_text())


def test_a_failed_run_is_shown_with_its_error(run_of: RunOf, within: Within, tmp_path: Path) -> None:
    """The log of a run that failed is whole and says why."""
    with LogReader(run_of("demo") / LOG_NAME) as reader, (tmp_path / "failed.g2log").open("wb") as file:
        header = reader.header
        writer = LogWriter(file, version=header.version, seed=header.seed, scenario=header.scenario)
        for record in itertools.islice(reader, 400):
            writer.append(record)
        writer.finish("failed", "a worker broke the rules")
    code, _, told = within("view", "failed.g2log")
    assert code == 1
    assert "error: the run failed: a worker broke the rules" in told
    value = payload_of((tmp_path / "failed.view.html").read_text())
    assert (value["failure"], value["damage"]) == ("a worker broke the rules", None)


@pytest.mark.parametrize("verb", ["view", "timeline"])
def test_a_full_disk_ends_with_the_path_and_leaves_nothing(run_of: RunOf, tmp_path: Path, verb: str) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    done = run_cli(tmp_path, verb, run_of("demo"), "--out", "page", preexec_fn=limit)
    assert (done.returncode, done.stderr) == (1, "error: page: cannot be written: File too large\n")
    assert not list(tmp_path.iterdir())
