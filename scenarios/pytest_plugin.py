"""Scripted scenarios in a test suite of your own.

# conftest.py
pytest_plugins = ["g2sim.scenarios.pytest_plugin"]

# test_my_policy.py
def test_it_follows_the_prefix(run_script):
    async def scenario(cluster):
        await cluster.submit([1, 2, 3]).end()
        again = cluster.submit([1, 2, 3, 4])
        await again.end()
        assert again.row["reused_input_tokens"] == 3 * cluster.block_size_tokens

    run_script(scenario, "two-workers.yaml", policy="prefix_affinity")
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, Protocol

import attrs
import pytest

from g2sim.scenarios.policy_source import parse_choice, with_policy
from g2sim.scenarios.run import RunResult, run_scenario
from g2sim.scenarios.script import Script, ScriptedCluster, ScriptFailed, scripted_scenario


class RunScript(Protocol):
    def __call__(
        self,
        function: Callable[[ScriptedCluster], Coroutine[Any, Any, None]],
        scenario: Mapping[str, Any] | str | Path,
        *,
        policy: str | None = None,
        seed: int | None = None,
        folder: Path | None = None,
    ) -> RunResult: ...


@pytest.fixture
def run_script(request: pytest.FixtureRequest) -> RunScript:
    """Runs a scripted scenario, with the actors' state compared with the log all the while.

    Arguments: the function; the deployment, as a mapping or as a path relative to the test's file; ``policy``: another
    router policy, as ``g2sim run --policy`` takes it; ``seed``; ``folder``: where a run folder goes. An assertion of
    the function fails the test as its own.
    """

    def run(
        function: Callable[[ScriptedCluster], Coroutine[Any, Any, None]],
        scenario: Mapping[str, Any] | str | Path,
        *,
        policy: str | None = None,
        seed: int | None = None,
        folder: Path | None = None,
    ) -> RunResult:
        made = scripted_scenario(scenario, request.path)
        if policy is not None:
            made = with_policy(made, parse_choice(policy))
        if seed is not None:
            made = attrs.evolve(made, seed=seed)
        try:
            return run_scenario(made, folder, verify=True, script=Script(function, request.path.name))
        except ScriptFailed as failed:
            if failed.__cause__ is not None:
                raise failed.__cause__ from None
            raise

    return run
