"""The page of a run in headless Chromium: it opens without a complaint, says what the report says, and answers."""

from __future__ import annotations

import base64
import itertools
import json
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import Page, find_browser
from view_values import payload_of

from g2sim.bus.log import LogReader, LogWriter
from g2sim.scenarios.run import scenario_of_log
from g2sim.scenarios.run_folder import LOG_NAME
from g2sim.scenarios.view.page import page_of_log

BROWSER = find_browser()
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="needs a Chromium on the path or in $G2SIM_CHROMIUM (apt-get install chromium)"
)

RUNS = ("demo", "separate", "many")
CHARTS = ("overview", "lanes", "passes", "g1", "g2", "links", "hits", "placements", "kv")

Opened = Callable[..., Page]

FIELDS = """
    Object.fromEntries([...document.querySelectorAll("[data-field]")].map((n) => [n.dataset.field, n.textContent]))"""
CELLS = """
    [...document.querySelectorAll("#{} tbody tr")].map((row) => [...row.cells].map((cell) => cell.textContent))"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    assert BROWSER is not None
    with Page(BROWSER, tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def opened(browser: Page, page_of: Callable[[str], str], tmp_path: Path) -> Opened:
    """Opens the page of a run by name; no complaint may have come up, and nothing but the file may be asked for."""

    def open_page(name: str, fragment: str = "") -> Page:
        file = tmp_path / "a page.html"
        file.write_text(page_of(name), encoding="utf-8")
        browser.complaints.clear()
        browser.requested.clear()
        browser.open(file, fragment)
        assert browser.complaints == []
        assert {url.partition("#")[0] for url in browser.requested} <= {file.as_uri(), "about:blank"}
        return browser

    return open_page


def shown(value: float) -> str:
    """A figure as the page writes it: whole numbers as they are, others with three decimals."""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"


@pytest.mark.parametrize("name", RUNS)
def test_figures_on_the_page_are_those_of_the_report(opened: Opened, run_of: Callable[[str], Path], name: str) -> None:
    page = opened(name)
    report = json.loads((run_of(name) / "report.json").read_text())
    fields = page.run(FIELDS)
    assert len(fields) >= 20
    for path, text in fields.items():
        value: Any = report
        for part in path.split("."):
            value = value[part]
        assert text == shown(value), path
    columns = ("requests", *(f"prompt_tokens_{part}" for part in ("asked", "from_g1", "from_g2", "computed")))
    columns += ("readmission_reused_tokens", "preemptions", "passes", "output_tokens")
    entries = [(f"{e['pool']}-{e['worker']}/{e['dp_rank']}", e) for e in report["workers"]]
    assert page.run(CELLS.format("ranks")) == [
        [label, *(shown(entry[column]) for column in columns)] for label, entry in [*entries, ("sum", report["totals"])]
    ]
    summary = report["summary"]
    assert page.run(CELLS.format("latencies")) == [
        [
            word,
            shown(summary[f"num_{metric}_samples"]),
            *(shown(summary[f"{part}_{metric}_ms"]) for part in ("mean", "median", "p90", "p99", "max")),
        ]
        for word, metric in (("TTFT", "ttft"), ("TPOT", "tpot"), ("E2E", "e2e_latency"))
    ]
    pools = ("capacity", "resident", "used", "stored", "evicted", "loaded")
    assert page.run(CELLS.format("pools")) == [
        [pool["pool"], *(shown(pool[f"{column}_blocks"]) for column in pools)] for pool in report["g2_pools"]
    ]
    drawn = page.text("#footer")
    assert f"{report['requests']['released']:,} requests, {report['totals']['passes']:,} passes" in drawn


@pytest.mark.parametrize("name", RUNS)
def test_every_chart_draws_something(opened: Opened, name: str) -> None:
    page = opened(name)
    colours = page.run("""
        Object.fromEntries([...document.querySelectorAll("figure")].map((figure) => {
          const canvas = figure.querySelector("canvas");
          const plot = canvas.getContext("2d").getImageData(118, 0, canvas.width - 128, canvas.height - 20).data;
          const seen = new Map();
          for (let i = 0; i < plot.length; i += 4)
            if (plot[i + 3]) { const c = plot.slice(i, i + 3).join(); seen.set(c, (seen.get(c) || 0) + 1); }
          return [figure.id, seen.size];
        }))""")
    assert tuple(colours) == CHARTS
    assert all(count >= 2 for count in colours.values()), colours
    assert page.run("document.documentElement.scrollWidth <= innerWidth")


def test_a_name_with_markup_stays_text(opened: Opened) -> None:
    page = opened("separate")
    assert page.text("h1") == "separate </script><b>pools</b> & more"
    assert page.run("document.querySelector('h1 b')") is None


def place(page: Page, chart: str, share: float, y: float) -> tuple[float, float]:
    """Where on the screen a share of a chart's time lies."""
    canvas = f"document.querySelector('#{chart} canvas')"
    page.run(f"{canvas}.scrollIntoView({{block: 'center'}})")
    page.frame()
    box = [page.run(f"{canvas}.getBoundingClientRect().{side}") for side in ("left", "top", "width")]
    return box[0] + 118 + share * (box[2] - 128), box[1] + y


def test_hovering_tells_values(opened: Opened) -> None:
    page = opened("demo")
    told = {}
    for chart in CHARTS:
        for share in (0.02, 0.036, 0.0):
            page.mouse("mouseMoved", *place(page, chart, share, 12))
            told[chart] = page.text("#tip")
            if "\n" in told[chart]:
                break
    assert "request 0" in told["lanes"]
    assert "prompt / output" in told["lanes"]
    assert re.search(r"pass on agg-0/0\s+at\s.*scheduled tokens", told["passes"], re.S)
    assert re.search(r"G1 of agg-0/0.*resident\s+\d+ blocks.*capacity\s+96 blocks", told["g1"], re.S)
    assert re.search(r"pool g2.*capacity\s+1,024 blocks", told["g2"], re.S)
    assert "bandwidth\t80 GB/s" in told["links"]
    assert "KV events around here" in told["kv"]
    page.mouse("mouseMoved", 2, 2)
    assert page.run("document.getElementById('tip').hidden")


def test_a_click_selects_a_request_and_shows_how_to_explain_it(opened: Opened, run_of: Callable[[str], Path]) -> None:
    page = opened("demo")
    assert "No request selected" in page.text("#selection")
    page.click(*place(page, "lanes", 0.5, 3.5 * 440 / 31))
    assert page.text("#explain") == f"g2sim explain {run_of('demo')} 3"
    lines = (run_of("demo") / "requests.jsonl").read_text().splitlines()
    row = next(row for row in map(json.loads, lines) if row["request"] == 3)
    assert f"time to first token\t{shown(row['ttft_ms'])} ms" in page.text("#selection")
    assert f"from G1\t{shown(row['first_admission_g1_reused_input_tokens'])} tokens" in page.text("#selection")
    assert page.run("location.hash") == "#request=3"
    page.call("Input.dispatchKeyEvent", type="keyDown", key="Escape")
    assert "No request selected" in page.text("#selection")
    assert page.complaints == []


def test_dragging_zooms_and_the_address_brings_it_back(opened: Opened, run_of: Callable[[str], Path]) -> None:
    page = opened("many", "#request=9000")
    assert "packed into" in page.text("#lanes figcaption")
    start, stop = place(page, "hits", 0.25, 40), place(page, "hits", 0.26, 40)
    page.mouse("mousePressed", *start, button="left", clickCount=1)
    page.mouse("mouseMoved", *stop, button="left", buttons=1)
    page.mouse("mouseReleased", *stop, button="left", clickCount=1)
    page.frame()
    window, lanes, fragment = page.text("#window"), page.text("#lanes figcaption"), page.run("location.hash")
    report = json.loads((run_of("many") / "report.json").read_text())
    total = report["summary"]["duration_ms"]
    first, last = (float(part.replace(",", "")) for part in re.findall(r"([\d,.]+) ms", window))
    assert abs(first / total - 0.25) < 0.005
    assert abs(last / total - 0.26) < 0.005
    again = opened("many", fragment)
    again.frame()
    assert (again.text("#window"), again.text("#lanes figcaption")) == (window, lanes)
    assert again.text("#selection h2") == "Request 9000"
    again.call("Input.dispatchKeyEvent", type="keyDown", key="0")
    again.frame()
    assert again.text("#window").startswith("0.000 ms to")


def test_lanes_can_be_put_in_order(opened: Opened) -> None:
    page = opened("separate")
    for order in ("rank", "session", "ttft", "arrival"):
        page.run(f"document.getElementById('order').value = '{order}'")
        page.run("document.getElementById('order').dispatchEvent(new Event('change'))")
        page.frame()
    assert page.complaints == []


def test_light_and_dark_differ_and_can_be_chosen(opened: Opened) -> None:
    page = opened("demo")
    ground = "getComputedStyle(document.body).backgroundColor"
    page.dark(False)
    light = page.run(ground)
    page.dark(True)
    dark = page.run(ground)
    assert light != dark
    page.run("document.getElementById('theme').click()")
    assert page.run(ground) == light
    page.dark(False)
    page.frame()
    assert page.complaints == []


@pytest.mark.parametrize("records", [0, 1, 200])
def test_a_log_that_ends_early_opens_too(
    browser: Page, run_of: Callable[[str], Path], tmp_path: Path, records: int
) -> None:
    """Nothing to draw, or requests without an end."""
    with LogReader(run_of("demo") / LOG_NAME) as reader, (tmp_path / "cut.g2log").open("wb") as file:
        header = reader.header
        writer = LogWriter(file, version=header.version, seed=header.seed, scenario=header.scenario)
        for record in itertools.islice(reader, records):
            writer.append(record)
        writer.finish("failed", "cut for a test")
    page, _ = page_of_log(tmp_path / "cut.g2log", scenario_of_log(tmp_path / "cut.g2log"))
    (tmp_path / "cut.html").write_text(page, encoding="utf-8")
    browser.complaints.clear()
    browser.open(tmp_path / "cut.html", "#request=0")
    assert browser.complaints == []
    assert "The run failed: cut for a test" in browser.text("#banner")
    if payload_of(page)["report"]["requests"]["completed"] == 0:  # nothing was measured: no figure that looks perfect
        tiles = browser.run("[...document.querySelectorAll('.tile')].map((tile) => tile.innerText.split('\\n'))")
        big = {lines[0]: lines[1] for lines in tiles}
        latencies = ("Time to first token", "Time per output token", "End-to-end latency")
        assert [big[title] for title in ("Duration", *latencies)] == ["-"] * 4
        assert all(cells[2:] == ["-"] * 5 for cells in browser.run(CELLS.format("latencies")))


@pytest.mark.parametrize("width", [1400, 1101, 600])
def test_the_selected_request_fits_its_panel(opened: Opened, width: int) -> None:
    page = opened("separate", "#request=60")
    page.size(width, 1000)
    page.frame()
    fits = page.run(
        "document.getElementById('selection').scrollWidth <= document.getElementById('selection').clientWidth"
    )
    page.size(1400, 1000)
    assert fits


def test_a_note_is_no_error(browser: Page, run_of: Callable[[str], Path], tmp_path: Path) -> None:
    run = run_of("demo")
    page, _ = page_of_log(run, scenario_of_log(run))
    value = payload_of(page)
    value["report"]["notes"] = ["an ordinary remark"]
    data = base64.b64encode(zlib.compress(json.dumps(value).encode())).decode()
    (tmp_path / "noted.html").write_text(re.sub(r'(?<=octet-stream">)[^<]*', data, page), encoding="utf-8")
    browser.open(tmp_path / "noted.html")
    assert browser.text("#notes") == "Note: an ordinary remark"
    assert browser.run("document.getElementById('banner').hidden")
