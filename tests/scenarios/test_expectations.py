"""Expectations and variants: refused when no run could meet them, judged from logs, told with what led there."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from scenario_values import HOST, aggregated, changed, with_host

from g2sim.bus.errors import ConfigError
from g2sim.bus.log import LogReader
from g2sim.scenarios.expectations import EventFigure, ReportFigure, Verdict, led_to
from g2sim.scenarios.records import Links, event_tags, numbered
from g2sim.scenarios.run import run_scenario
from g2sim.scenarios.run_folder import LOG_NAME
from g2sim.scenarios.schema import Scenario, load_scenario
from g2sim.scenarios.suite import Suite, load_suite

Values = dict[str, Any]
VARIANTS = {"local": {f"{HOST}.scope": "dp_rank_local"}, "shared": {f"{HOST}.scope": "cluster_shared"}}


def suite_of(tmp_path: Path, values: Values) -> Suite:
    path = tmp_path / "s.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return load_suite(path)


def refused(tmp_path: Path, values: Values) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        suite_of(tmp_path, values)
    assert caught.value.where is not None
    return caught.value


def expecting(*entries: Values, base: Values | None = None, **more: Any) -> Values:
    return {**(base or aggregated()), "expect": list(entries), **more}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three requests of 8 + 2 tokens on two workers."""
    made = tmp_path_factory.mktemp("run") / "r"
    values = changed(aggregated(), {"traffic.source": {"type": "synthetic", "input_tokens": 8, "output_tokens": 2}})
    run_scenario(Scenario.from_dict(values), made)
    return made


def judged(folder: Path, tmp_path: Path, entry: Values) -> Verdict:
    (verdict,) = suite_of(tmp_path, expecting(entry)).judge({None: folder})
    return verdict


class TestRefused:
    @pytest.mark.parametrize(
        ("entry", "field", "said"),
        [
            ({"report": "totals.pases", "equals": 1}, "expect[0].report", "did you mean totals.passes?"),
            ({"report": "ttft.mean_ttft_ms", "above": 1}, "expect[0].report", "did you mean summary.mean_ttft_ms?"),
            ({"report": "workers[2].passes", "above": 1}, "expect[0].report", "no such report field"),
            ({"report": "workers.0.passes", "above": 1}, "expect[0].report", "no such report field"),
            ({"report": "totals.passes"}, "expect[0]", "one of equals, at_least"),
            ({"equals": 1}, "expect[0]", "report: PATH, or events: TYPE"),
            ({"report": "totals.passes", "events": "wk.adm", "equals": 1}, "expect[0]", "do not go together"),
            ({"report": "totals.passes", "where": {"a": 1}, "equals": 1}, "expect[0].where", "events only"),
            ({"events": "RequestAdmited"}, "expect[0].events", "did you mean RequestAdmitted?"),
            ({"events": "wk.adm", "where": {"reqest": 1}}, "expect[0].where.reqest", "did you mean request?"),
            ({"events": "wk.adm", "variant": "a"}, "expect[0].variant", "the scenario has none"),
            ({"events": "wk.adm", "at_leats": 1}, "expect[0].at_leats", "did you mean at_least?"),
            ({"events": "wk.adm", "at_least": "3"}, "expect[0].at_least", "a finite number"),
            ({"events": "wk.adm", "equals": [1]}, "expect[0].equals", "text, a number"),
        ],
    )
    def test_an_entry_that_no_run_can_meet(self, tmp_path: Path, entry: Values, field: str, said: str) -> None:
        error = refused(tmp_path, expecting(entry))
        assert error.field == field
        assert said in str(error)

    @pytest.mark.parametrize(
        ("entry", "field", "said"),
        [
            ({"events": "wk.adm", "variant": "shred"}, "expect[0].variant", "did you mean shared?"),
            ({"events": "wk.adm", "minus": "local"}, "expect[0]", "minus needs the variant"),
            ({"events": "wk.adm", "since_ms": 5, "until_ms": 4}, "expect[0].until_ms", "a time from since_ms, 5.0, on"),
            ({"events": "wk.adm", "variant": "local", "minus": "shared"}, "expect[0]", "says nothing of the value"),
        ],
    )
    def test_an_entry_about_variants(self, tmp_path: Path, entry: Values, field: str, said: str) -> None:
        error = refused(tmp_path, expecting(entry, base=with_host(), variants=VARIANTS))
        assert error.field == field
        assert said in str(error)

    def test_a_field_of_the_event_plane(self, tmp_path: Path) -> None:
        """It is there if the run has faults, and for the routers that they strike."""
        path = "event_plane.routers[0].misinformed"
        assert "no such report field" in str(refused(tmp_path, expecting({"report": path, "equals": 0})))
        plan = [{"type": "outage", "until_ms": 5.0}]
        struck = {"faults": {"plan": plan}, "router": {"policy": "dynamo_kv"}}
        assert suite_of(tmp_path, expecting({"report": path, "equals": 0}, **struck)).expectations
        wrong = refused(tmp_path, expecting({"report": "event_plane.routers[0].misinfromed", "equals": 0}, **struck))
        assert f"did you mean {path}?" in str(wrong)
        other = refused(tmp_path, expecting({"report": "event_plane.routers[1].misinformed", "equals": 0}, **struck))
        assert "no such report field" in str(other)

    @pytest.mark.parametrize(
        ("variants", "said"),
        [
            ({"a/b": {}}, "names a folder"),
            ({"..": {}}, "names a folder"),
            ({"a": {"name": "x"}}, "is the same for all variants"),
            ({"a": {"expect": []}}, "is the same for all variants"),
            ({"a": [1]}, "a mapping of dotted keys"),
            ({"a": {"engine.workers.aggregated.kv_cahce.block_size": 4}}, "did you mean kv_cache?"),
            ({"a": {"engine.workers.aggregated.parallelism.replicas": 0}}, "any positive integer number of workers"),
        ],
    )
    def test_a_variant(self, tmp_path: Path, variants: Any, said: str) -> None:
        assert said in str(refused(tmp_path, {**aggregated(), "variants": variants}))

    def test_a_bad_value_in_a_variant_is_told_by_its_own_line(self, tmp_path: Path) -> None:
        error = refused(tmp_path, {**aggregated(), "variants": {"a": {}, "b": {"router.tie_break": "x"}}})
        lines = (tmp_path / "s.yaml").read_text().splitlines()
        number = 1 + next(idx for idx, line in enumerate(lines) if "tie_break" in line)
        assert error.where == f"{tmp_path / 's.yaml'}:{number}"
        assert error.field == "router.tie_break"

    def test_the_other_readers_of_scenarios_see_a_typo_too(self, tmp_path: Path) -> None:
        path = tmp_path / "s.yaml"
        path.write_text(yaml.safe_dump(expecting({"report": "totals.passes", "at_leats": 1})))
        with pytest.raises(ConfigError, match="did you mean at_least"):
            load_scenario(path)


class TestVariants:
    def test_each_is_the_scenario_with_its_values_in_their_places(self, tmp_path: Path) -> None:
        suite = suite_of(tmp_path, {"name": "n", **with_host(), "variants": VARIANTS})
        assert [scenario.name for scenario in suite.runs.values()] == ["n-local", "n-shared"]
        for name, scenario in suite.runs.items():
            plain = changed(with_host(), VARIANTS[name or ""])
            assert scenario.deployment == Scenario.from_dict(plain).deployment

    def test_an_entry_without_a_variant_is_expected_of_each(self, tmp_path: Path) -> None:
        values = expecting({"report": "requests.completed", "equals": 3}, base=with_host(), variants=VARIANTS)
        assert [one.variant for one in suite_of(tmp_path, values).expectations] == ["local", "shared"]

    def test_a_difference_is_one_figure_minus_the_other(self, tmp_path: Path) -> None:
        variants = {"few": {"traffic.stop.requests": 2}, "many": {"traffic.stop.requests": 5}}
        entry = {"report": "requests.completed", "variant": "many", "minus": "few"}
        base = changed(aggregated(), {"traffic.source.input_tokens": 8, "traffic.source.output_tokens": 2})
        values = expecting({**entry, "equals": 3}, {**entry, "below": 3}, base=base, variants=variants)
        suite = suite_of(tmp_path, values)
        folders = {name: tmp_path / str(name) for name in suite.runs}
        for name, scenario in suite.runs.items():
            run_scenario(scenario, folders[name])
        good, bad = suite.judge(folders)
        assert good.holds
        assert bad.told is not None
        assert "got: 3 = 5 (many) - 2 (few)" in bad.told
        assert "led there in many:" in bad.told
        assert "led there in few:" in bad.told
        assert suite.only("few").judge({"few": folders["few"]}) == []


class TestJudging:
    @settings(deadline=None, max_examples=20)
    @given(bound=st.integers(0, 6), key=st.sampled_from(["equals", "at_least", "at_most", "above", "below"]))
    def test_every_bound_means_what_it_says(
        self, folder: Path, tmp_path_factory: pytest.TempPathFactory, bound: int, key: str
    ) -> None:
        means = {"equals": "eq", "at_least": "ge", "at_most": "le", "above": "gt", "below": "lt"}
        holds = getattr(operator, means[key])(3, bound)
        for figure in ({"report": "requests.completed"}, {"events": "RequestEnded"}):
            verdict = judged(folder, tmp_path_factory.mktemp("j"), {**figure, key: bound})
            assert verdict.holds is holds

    @pytest.mark.parametrize(
        ("entry", "holds"),
        [
            ({"events": "wk.fin", "where": {"status": "completed"}, "equals": 3}, True),
            ({"events": "wk.fin", "where": {"status": "failed"}}, False),
            ({"events": "wk", "where": {"worker": 1}, "at_least": 4}, True),
            ({"events": "wk.adm", "where": {"readmission": 0}}, False),  # false is not 0
            ({"events": "wk.end", "where": {"emitted": [1]}}, True),
            ({"events": "tr.arr", "since_ms": 0.5, "equals": 0}, True),
            ({"events": "tr.arr", "until_ms": 0, "equals": 3}, True),
            ({"report": "finished", "equals": True}, True),
            ({"report": "finished", "equals": 1}, False),
            ({"report": "stopped_at_limit", "equals": None}, False),
            ({"report": "workers[1].requests", "at_least": 1}, True),
            ({"report": "notes", "above": 1}, False),
        ],
    )
    def test_figures(self, folder: Path, tmp_path: Path, entry: Values, holds: bool) -> None:
        assert judged(folder, tmp_path, entry).holds is holds

    def test_a_failed_one_says_expected_got_and_what_led_there(self, folder: Path, tmp_path: Path) -> None:
        told = judged(folder, tmp_path, {"events": "RequestEnded", "where": {"request": 1}, "at_least": 2}).told
        assert told is not None
        lines = told.splitlines()
        assert lines[0].startswith(f"{tmp_path / 's.yaml'}:")
        assert lines[0].endswith("expect[0]: number of RequestEnded with request 1")
        assert lines[1:3] == ["  expected: at least 2", "  got: 1"]
        names = [line.split(": ")[1].split()[0] for line in lines[4:]]
        assert names == ["RequestArrived", "RequestPlaced", "RequestQueued", "RequestAdmitted", "RequestEnded"]


class TestWhatLedThere:
    def test_of_a_count_it_is_the_last_one_counted(self, folder: Path) -> None:
        figure = EventFigure("wk.sub", event_tags("wk.sub"), (("request", 0),), None, None)
        assert type(led_to(folder / LOG_NAME, figure)[-1].record.event).__name__ == "RequestQueued"

    def test_of_a_count_of_none_it_is_the_nearest_of_its_types(self, folder: Path) -> None:
        figure = EventFigure("wk.sub", event_tags("wk.sub"), (("request", 99),), None, None)
        assert type(led_to(folder / LOG_NAME, figure)[-1].record.event).__name__ == "RequestQueued"
        none = EventFigure("wk.pre", event_tags("wk.pre"), (), None, None)
        assert type(led_to(folder / LOG_NAME, none)[-1].record.event).__name__ == "RunFinished"

    @pytest.mark.parametrize(
        ("path", "event"),
        [("requests.completed", "RequestEnded"), ("requests.released", "RequestArrived"), ("finished", "RunFinished")],
    )
    def test_of_a_report_field_it_is_the_record_that_gave_it_its_final_value(
        self, folder: Path, path: str, event: str
    ) -> None:
        last = led_to(folder / LOG_NAME, ReportFigure(path))[-1]
        with LogReader(folder / LOG_NAME) as reader:
            same = [one.idx for one in numbered(reader) if type(one.record.event).__name__ == event]
        assert last.idx == same[-1]

    def test_of_a_field_that_never_changed_it_is_nothing(self, folder: Path) -> None:
        assert led_to(folder / LOG_NAME, ReportFigure("seed")) == []

    def test_a_chain_goes_back_in_time_and_ends(self, folder: Path) -> None:
        links = Links()
        with LogReader(folder / LOG_NAME) as reader:
            count = 0
            for record in reader:
                links.add(record)
                count += 1
        for idx in range(count):
            chain = links.chain(idx, length=count)
            assert chain[-1] == idx
            assert chain == sorted(set(chain))
