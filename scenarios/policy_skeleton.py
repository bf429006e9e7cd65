"""The skeleton of a policy package: a policy that runs, its tests, and what makes it installable.

Owns: the files' text. Refuses to know: the terminal.
"""

from __future__ import annotations

import importlib.util
import keyword
import re
import shutil
from pathlib import Path

from g2sim.bus.errors import ConfigError
from g2sim.scenarios.policy_source import GROUP, is_built_in

_NAME = re.compile(r"[a-z][a-z0-9_]{0,59}")

_POLICY = '''"""A placement policy for g2sim: the rank with the fewest requests in flight."""

from __future__ import annotations

from collections.abc import Mapping

from g2sim.actors.router.policy import Candidate, Policy, RoutedRequest


class {cls}(Policy):
    """Says of every rank how bad it is for a request; the router sends it to the best.

    Args:
        request_weight: price of a request that is in flight there.
    """

    name = "{name}"

    def __init__(self, *, request_weight: float = 1.0) -> None:
        if request_weight < 0:
            raise ValueError(f"request_weight: got {{request_weight}}, allowed: 0 or more")
        self.request_weight = request_weight

    def score(self, request: RoutedRequest, candidate: Candidate) -> Mapping[str, float]:
        return {{"requests": self.request_weight * candidate.active_requests}}
'''

_TESTS = '''"""Tests of {cls}. ``request(7, (1, 2, 3))`` is request 7, whose prompt has the blocks 1, 2 and 3."""

from __future__ import annotations

import pytest
from {name} import {cls}

from g2sim.actors.router.bench import request, router
from g2sim.actors.router.state import Placed
from g2sim.scenarios.policy_check import check_policy
from g2sim.scenarios.policy_source import PolicyChoice


def test_the_emptier_of_two_workers_is_taken() -> None:
    state = router({cls}(), workers=2)
    placed = [state.place(request(number, (number,)), now_ms=0.0) for number in range(2)]
    assert [one.placement.worker for one in placed if isinstance(one, Placed)] == [0, 1]


def test_a_negative_weight_is_refused() -> None:
    with pytest.raises(ValueError):
        {cls}(request_weight=-1.0)


def test_it_keeps_the_rules_of_placement_policies() -> None:
    results = check_policy(PolicyChoice("{name}:{cls}"))
    assert [(result.name, result.problem) for result in results if not result.ok] == []
'''

_PROJECT = """[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{project}"
version = "0.1.0"
requires-python = ">=3.11"
dependencies = ["g2sim"]

[project.entry-points."{group}"]
{name} = "{name}:{cls}"

[tool.setuptools]
py-modules = ["{name}"]
"""


def write_skeleton(name: str, folder: Path) -> list[Path]:
    """Write the package into a folder that does not exist yet or is empty; all of it or nothing.

    Args:
        name: of the policy and its module.
    Returns: the files.
    Raises: ConfigError for a name that cannot be used, or a folder that is in the way.
    """
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise ConfigError("NAME", got=name, allowed="small letters, digits and _, beginning with a letter")
    if is_built_in(name):
        raise ConfigError("NAME", got=name, allowed="a name that no built-in policy has")
    if importlib.util.find_spec(name) is not None:
        raise ConfigError("NAME", got=name, allowed="a name that no importable module has")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError("DIR", problem=f"{folder} is there already", allowed="a new or empty folder")
    partial = folder.with_name(f"{folder.name}.partial")
    words = {
        "name": name,
        "cls": "".join(word.capitalize() for word in name.split("_")),
        "project": name.replace("_", "-").strip("-"),
        "group": GROUP,
    }
    files = {f"{name}.py": _POLICY, f"test_{name}.py": _TESTS, "pyproject.toml": _PROJECT}
    try:
        partial.mkdir(parents=True)
        for file, text in files.items():
            (partial / file).write_text(text.format(**words))
        partial.rename(folder)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise ConfigError("DIR", problem=f"{folder} cannot be written: {error.strerror}") from error
    return [folder / file for file in files]
