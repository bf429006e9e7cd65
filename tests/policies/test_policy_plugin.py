"""Policies from files, modules and installed packages: found, run, and named when they are at fault."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from policy_values import CHATS, cli, write_policy

from g2sim.actors.router.events import PlacementWeighed
from g2sim.bus.errors import ConfigError, PolicyError
from g2sim.bus.events import Record
from g2sim.scenarios.policy_source import PolicyChoice, find_policy, parse_choice, with_policy
from g2sim.scenarios.run import report_of_log, run_scenario
from g2sim.scenarios.schema import Scenario, load_scenario

LAST = """
def __init__(self, *, shift: int = 0):
    self.shift = shift
def score(self, request, candidate):
    return -candidate.placement.worker + self.shift
"""


@pytest.fixture(scope="module")
def chats() -> Scenario:
    return load_scenario(CHATS)


def workers_of(report: dict[str, Any]) -> list[int]:
    return [worker["worker"] for worker in report["workers"] if worker["requests"]]


# -- refused


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("nobody", "got 'nobody'; allowed: round_robin, "),
        ("dynamo_vk", "did you mean dynamo_kv?"),
        ("missing.py", "no such file: missing.py"),
        (f"{'long' * 100}.py", "no such file: long"),
        ("no_such_package.mod:Own", "cannot be loaded: ModuleNotFoundError"),
        ("json:JSONDecoder", "is no placement policy: it lacks name, "),
        ("json:Own", "Own is not there"),
        ("json:loads", "loads is no class"),
        ("builtins:int", "the options of <class 'int'> cannot be told: ValueError"),
        ("json:", "defines 0 policies"),
        ("", "package.module:Class"),
    ],
)
def test_a_target_that_is_no_policy_is_refused(target: str, said: str, chats: Scenario) -> None:
    with pytest.raises(ConfigError) as caught:
        with_policy(chats, parse_choice(target))
    assert caught.value.field == "--policy"
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("class Own(", "never closed"),
        ("import nothing_of_this_name", "nothing_of_this_name"),
        ("x = 1\nx / 0\n", "ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("", "defines 0 policies"),
        ("from g2sim.actors.router.policy import *\nclass A(Policy): pass\nclass B(Policy): pass", "2 policies: A, B"),
        ("from g2sim.actors.router.policy import *\nclass A(Policy): pass", "has no name"),
        ("class A:\n name = 'a'\n def place(self, request, now_ms): pass", "it lacks observe, "),
    ],
)
def test_a_file_that_holds_no_policy_is_refused(text: str, said: str, tmp_path: Path, chats: Scenario) -> None:
    path = tmp_path / "broken.py"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        with_policy(chats, PolicyChoice(str(path)))
    assert said in str(caught.value)
    assert "broken" in str(caught.value)


@pytest.mark.parametrize(
    ("constructor", "options", "error", "said"),
    [
        ("*, a=1", {"b": 2}, ConfigError, "--policy-option b: policy {} has no such option; got 2; allowed: a"),
        ("*, a", {}, ConfigError, "--policy-option a: policy {} needs this option"),
        ("*, a=1): raise ValueError('a is odd'", {"a": 3}, ConfigError, "does not take them: ValueError: a is odd ("),
        ("*, a=1): raise KeyError('a'", {}, PolicyError, "cannot be made: KeyError: 'a' ("),
        ("*, a=(1, 2)", {}, ConfigError, "--policy-option a: got (1, 2); allowed: numbers, text"),
    ],
)
def test_a_bad_option_is_named(
    constructor: str, options: dict[str, Any], error: type[Exception], said: str, tmp_path: Path, chats: Scenario
) -> None:
    path = write_policy(tmp_path / "own.py", f"def __init__(self, {constructor}): pass")
    if "raise" in constructor:
        path = write_policy(tmp_path / "own.py", f"def __init__(self, {constructor})")
    with pytest.raises(error) as caught:
        with_policy(chats, PolicyChoice(str(path), options))
    assert said.format(path) in str(caught.value)


@pytest.mark.parametrize("text", ["a", "=1", "a=1\nb=2"])
def test_an_option_without_a_value_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="OPTION=VALUE"):
        parse_choice("dynamo_kv", [text])


def test_a_scenario_file_runs_no_code(tmp_path: Path) -> None:
    """A file or module that it names is refused unread, with the way to mean it."""
    (tmp_path / "own.py").write_text("import pathlib; pathlib.Path('ran').touch()")
    for target in ("own.py", f"{tmp_path}/own.py:Own", "own:Own"):
        file = tmp_path / "s.yaml"
        file.write_text(CHATS.read_text().replace("policy: round_robin", f"policy: '{target}'"))
        done = cli(tmp_path, "run", file)
        assert done.returncode == 2
        assert f"s.yaml:25: router.policy: a scenario file runs no code; got '{target[:40]}" in done.stderr
        assert f"run it with --policy {target}" in done.stderr
    assert {item.name for item in tmp_path.iterdir()} == {"own.py", "s.yaml"}


# -- found


def test_values_of_options_are_written_as_in_yaml() -> None:
    choice = parse_choice("x.py,a=1,b=true", ["c=2.5", "d=word", "e=[1, 2]", "f=null"])
    assert choice == PolicyChoice("x.py", {"a": 1, "b": True, "c": 2.5, "d": "word", "e": [1, 2], "f": None})


def test_options_of_the_scenarios_policy_stay_unless_it_is_another(chats: Scenario) -> None:
    one = with_policy(chats, PolicyChoice("dynamo_kv", {"host_cache_hit_weight": 0.5}))
    two = with_policy(one, PolicyChoice(None, {"router_temperature": 1}))
    three = with_policy(two, PolicyChoice("kv_router"))
    for scenario in (two, three):
        options = scenario.deployment.router.options
        assert (options["host_cache_hit_weight"], options["router_temperature"]) == (0.5, 1)
    assert with_policy(two, PolicyChoice("least_loaded")).deployment.router.options == {}


@pytest.mark.parametrize("form", ["{folder}/own.py", "own.py:Own", "pack.mod:Own"])
def test_a_file_and_a_module_are_run_and_reported_without_them(form: str, tmp_path: Path) -> None:
    source = write_policy(tmp_path / "own.py", LAST)
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "mod.py").write_text(source.read_text())
    target = form.format(folder=tmp_path)
    done = cli(tmp_path, "run", CHATS, "--policy", target, "--policy-option", "shift=3", "--out", "out", "--json")
    assert done.returncode == 0, done.stderr
    assert workers_of(json.loads(done.stdout)) == [3]
    source.unlink()
    (tmp_path / "pack" / "mod.py").unlink()
    again = cli(tmp_path, "report", "out", "--json")
    assert (again.returncode, again.stdout) == (0, done.stdout)


def test_the_log_says_which_policy_with_which_options(tmp_path: Path, chats: Scenario) -> None:
    path = write_policy(tmp_path / "own.py", LAST)
    scenario = with_policy(chats, PolicyChoice(str(path)))
    run_scenario(scenario, tmp_path / "run")
    resolved = Scenario.from_resolved(scenario.resolved())
    assert resolved.deployment.router == scenario.deployment.router
    assert resolved.deployment.router.options == {"shift": 0}
    assert report_of_log(tmp_path / "run").failure is None


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            "def score(self, request, candidate):\n    return 1 / (request.request - 2)",
            "raised ZeroDivisionError",
        ),
        ("def place(self, request, now_ms):\n    return Place(Placement(9, 0))", "allowed: worker 0 to 3"),
        ("def score(self, request, candidate):\n    return float('nan')", "is nan, allowed: a finite number"),
        ("def place(self, request, now_ms):\n    return Refuse(None)", "refused because of None"),
    ],
)
def test_a_faulty_policy_ends_the_run_with_its_place_and_how_to_repeat_it(body: str, said: str, tmp_path: Path) -> None:
    write_policy(tmp_path / "own.py", body)
    done = cli(tmp_path, "run", CHATS, "--policy", "own.py", "--out", "out", "--quiet")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    error, repeat = done.stderr.splitlines()
    assert error.startswith("error: policy own, request ")
    assert said in error
    if "ZeroDivision" in said:
        assert "own.py:6)" in error
    assert repeat.endswith("--policy own.py --out out --overwrite")


def test_an_account_of_made_up_candidates_is_recorded_as_it_is(tmp_path: Path, chats: Scenario) -> None:
    body = """
def place(self, request, now_ms):
    made_up = [Candidate(self.pool.places[0], 900, 0, 0, 0, 0)]
    return Place(self.pool.places[0], Weighing(candidates=made_up, chosen=0, reason="because"))
"""
    path = write_policy(tmp_path / "own.py", body)
    weighed: list[PlacementWeighed] = []

    def note(record: Record) -> None:
        if isinstance(record.event, PlacementWeighed):
            weighed.append(record.event)

    run_scenario(with_policy(chats, PolicyChoice(str(path))), None, on_record=note)
    assert {(one.device_blocks, one.overlap_hash) for one in weighed} == {((900,), None)}


def test_an_installed_package_is_found_by_entry_point_from_file_and_option(tmp_path: Path) -> None:
    """A package of its own is built from the skeleton, installed elsewhere, and named as installed policies are."""
    assert cli(tmp_path, "policy", "new", "far_away", "package").returncode == 0
    install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run(
        [sys.executable, *install, "--target", tmp_path / "site", tmp_path / "package"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    listed = json.loads(cli(tmp_path, "policy", "list", "--json", path=tmp_path / "site").stdout)
    assert {"name": "far_away", "from": "far-away 0.1.0", "about": "far_away:FarAway"} in listed
    file = tmp_path / "s.yaml"
    file.write_text(CHATS.read_text().replace("policy: round_robin", "policy: far_away"))
    for folder in ("traces", "tables"):
        (tmp_path / folder).symlink_to(CHATS.parent / folder)
    by_file = cli(tmp_path, "run", file, "--json", "--out", "one", path=tmp_path / "site")
    assert by_file.returncode == 0, by_file.stderr
    named = ["run", CHATS, "--policy", "far_away", "--json", "--out", "two"]
    by_option = cli(tmp_path, *named, path=tmp_path / "site", hash_seed=7)
    assert by_option.stdout == by_file.stdout
    assert (tmp_path / "one" / "events.g2log").read_bytes() == (tmp_path / "two" / "events.g2log").read_bytes()
    without = cli(tmp_path, "run", file)
    assert without.returncode == 2
    assert "router.policy: got 'far_away'" in without.stderr


def test_a_built_in_policy_needs_no_class() -> None:
    assert find_policy("kv_router") is None
