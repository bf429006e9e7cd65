"""A scenario file with all that it says: variants of the scenario, and what is expected of their runs.

Owns: how variants follow from the file, and the order of checks. Refuses to know: what an expectation means
(``expectations``), how a scenario is checked (``schema``) and run (``run``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import attrs

from g2sim.bus.errors import ConfigError, SimError, close_to, read_all
from g2sim.scenarios import support
from g2sim.scenarios.expectations import Expectation, Verdict, judge, read_expectations
from g2sim.scenarios.fields import Reader
from g2sim.scenarios.layout import SCENARIO
from g2sim.scenarios.run_folder import log_file
from g2sim.scenarios.schema import Scenario, from_file
from g2sim.scenarios.yaml_source import Document, read_file

FIXED_KEYS = ("name", "variants", "expect")
_VARIANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,59}")


class ExpectationFailed(SimError):
    """A run is not what its scenario expects; ``verdicts`` are all that were reached."""

    def __init__(self, verdicts: list[Verdict]) -> None:
        self.verdicts = verdicts
        failed = [verdict.told for verdict in verdicts if verdict.told is not None]
        super().__init__("\n".join([f"{len(failed)} of {len(verdicts)} expectations failed", *failed]))


@attrs.frozen(kw_only=True)
class Suite:
    """What a scenario file holds.

    Attributes:
        name: the scenario's.
        runs: variant -> scenario, in the order of the file; None -> scenario if the file has no variants.
    """

    name: str
    runs: Mapping[str | None, Scenario]
    expectations: tuple[Expectation, ...]

    def only(self, variant: str | None) -> Suite:
        """With one variant alone; None leaves all. Raises: ConfigError for one that there is not."""
        if variant is None:
            return self
        if variant not in self.runs:
            names = [name for name in self.runs if name is not None]
            allowed = ", ".join(names) or "the scenario has no variants"
            raise ConfigError("--variant", got=variant, allowed=allowed, hint=close_to(variant, names))
        return attrs.evolve(self, runs={variant: self.runs[variant]})

    def judge(self, folders: Mapping[str | None, Path]) -> list[Verdict]:
        """What became of the expectations that speak of these runs (variant -> run folder)."""
        return judge(self.expectations, {variant: log_file(folder) for variant, folder in folders.items()})


def load_suite(path: Path) -> Suite:
    """Reads and checks a scenario file as ``load_scenario`` does, with its variants and expectations.

    Raises: ConfigError.
    """
    document = read_file(path)
    base = from_file(document, path)
    tree = Reader(document, support.carries).read(SCENARIO)
    runs: dict[str | None, Scenario] = {None: base}
    if tree["variants"]:
        variants = read_all(lambda name: _variant(document, path, base, name), tree["variants"])
        runs = dict(zip(tree["variants"], variants, strict=True))
    return Suite(name=base.name, runs=runs, expectations=tuple(read_expectations(document, tree, runs)))


def _variant(document: Document, path: Path, base: Scenario, name: str) -> Scenario:
    place = ("variants", name)
    if not _VARIANT_NAME.fullmatch(name):
        allowed = "letters, digits, '_', '.' and '-': it names a folder"
        raise document.error(place, problem="not a name for a variant", got=name, allowed=allowed)
    changes = document.values["variants"][name]
    for key in changes:
        if key.partition(".")[0] in FIXED_KEYS:
            raise document.error((*place, key), problem="is the same for all variants", hint="leave it out")
    scenario = from_file(document.overridden(changes, place), path)
    return attrs.evolve(scenario, name=f"{base.name}-{name}")
