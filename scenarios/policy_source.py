"""Where placement policies come from: the built-in names, installed packages, modules and files.

Owns: how a policy is named, how its code is found, and which names a scenario file may use. Reading a scenario file or
a log runs no code that it names itself: a file can name built-in policies and those that installed packages offer as
entry points; modules and ``.py`` files are for the command line, and a log's policy is not loaded at all.
Refuses to know: what a policy does.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import attrs

from g2sim.actors.router.registry import OTHER_NAMES, POLICIES, PolicyClass, default_options, make_policy
from g2sim.bus.errors import ConfigError, close_to, raised
from g2sim.scenarios.yaml_source import read_yaml

if TYPE_CHECKING:
    from g2sim.scenarios.schema import Scenario

GROUP = "g2sim.placement_policies"
"""Entry points group under which a package offers policies: name = "module:Class"."""

TARGETS = "a built-in name, the name of an installed policy, package.module:Class, FILE.py or FILE.py:Class"


@attrs.frozen
class PolicyChoice:
    """A policy as the command line names it; ``target`` None means the scenario's own.

    Attributes:
        options: as given; the others have their defaults.
    """

    target: str | None
    options: Mapping[str, Any] = attrs.field(factory=dict)


def parse_choice(text: str | None, options: Sequence[str] = ()) -> PolicyChoice:
    """A choice from TARGET[,OPTION=VALUE...] and further OPTION=VALUE texts; values are written as in YAML.

    Raises: ConfigError.
    """
    target, *inline = [None] if text is None else text.split(",")
    if target is not None and not target.strip():
        raise ConfigError("--policy", got=text, allowed=TARGETS)
    values: dict[str, Any] = {}
    for option in (*inline, *options):
        key, equals, value = option.partition("=")
        if not equals or not key.strip() or "\n" in option:
            raise ConfigError("--policy-option", got=option, allowed="OPTION=VALUE")
        if key.strip() in values:
            raise ConfigError(f"--policy-option {key.strip()}", problem="given twice")
        values[key.strip()] = read_yaml(f"value: {value}", f"--policy-option {key.strip()}").values["value"]
    return PolicyChoice(target, values)


def is_built_in(name: str) -> bool:
    return OTHER_NAMES.get(name, name) in POLICIES


def names_code(target: str) -> bool:
    """Whether a target is a module or a file, and no plain name."""
    return ":" in target or target.endswith(".py")


def installed_policies() -> list[EntryPoint]:
    """Policies that installed packages offer, by name; none is loaded."""
    return sorted(entry_points(group=GROUP), key=lambda one: (one.name, one.value))


def find_policy(target: str) -> PolicyClass | None:
    """The class that a target means, None for a built-in policy. Runs the code that defines it.

    Raises: ConfigError for field ``policy``.
    """
    if is_built_in(target):
        return None
    path, _, attribute = target.rpartition(":") if not target.endswith(".py") else (target, "", "")
    if path.endswith(".py"):
        return _class_in(_module_of_file(Path(path), target), attribute, target)
    if path:
        _search_also(Path.cwd())
        return _class_in(_imported(target, path), attribute, target)
    found = [one for one in installed_policies() if one.name == target]
    if not found:
        known = [*POLICIES, *(one.name for one in installed_policies())]
        hint = close_to(target, known) or "for code give --policy package.module:Class or FILE.py"
        raise ConfigError("policy", got=target, allowed=", ".join(known), hint=hint)
    if len({one.value for one in found}) > 1:
        who = " and ".join(one.value for one in found)
        raise ConfigError("policy", problem=f"several installed packages offer {target}: {who}")
    module, _, attribute = found[0].value.partition(":")
    return _class_in(_imported(target, module.strip()), attribute.strip(), target)


def settled_policy(target: str, options: Mapping[str, Any], *, code: bool) -> tuple[str, dict[str, Any]]:
    """A policy's name as a scenario keeps it, and all its options.

    Args:
        code: modules and files are allowed.
    Raises: ConfigError for field ``policy`` or ``options.<option>``; PolicyError if it cannot be made.
    """
    target = OTHER_NAMES.get(target, target)
    if names_code(target) and not code:
        raise ConfigError(
            "policy",
            problem="a scenario file runs no code",
            got=target,
            allowed=", ".join([*POLICIES, *(one.name for one in installed_policies())]),
            hint=f"run it with --policy {target}",
        )
    made = find_policy(target)
    make_policy(target, options, made)
    complete = default_options(POLICIES[target] if made is None else made) | dict(options)
    for option, value in complete.items():
        if not _is_plain(value):
            allowed = "numbers, text, booleans, null, and lists and mappings of them"
            raise ConfigError(f"options.{option}", got=value, allowed=allowed)
    return target, complete


def with_policy(scenario: Scenario, choice: PolicyChoice) -> Scenario:
    """The scenario under a policy that the command line chose.

    Options of the scenario's own policy stay as the scenario has them, unless given anew.
    Raises: ConfigError, that names the option of the command line.
    """
    router = scenario.deployment.router
    target = router.policy if choice.target is None else OTHER_NAMES.get(choice.target, choice.target)
    kept = router.options if target == router.policy else {}
    try:
        target, options = settled_policy(target, {**kept, **choice.options}, code=True)
    except ConfigError as error:
        field = "--policy"
        if error.field.startswith("options"):
            field = f"--policy-option{error.field.removeprefix('options').replace('.', ' ', 1)}"
        raise ConfigError(
            field, problem=error.problem, got=error.got, allowed=error.allowed, hint=error.hint
        ) from error
    router = attrs.evolve(router, policy=target, options=options)
    return attrs.evolve(scenario, deployment=attrs.evolve(scenario.deployment, router=router))


def _imported(target: str, module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise ConfigError("policy", problem=f"{target} cannot be loaded: {raised(error)}") from error


def _module_of_file(path: Path, target: str) -> ModuleType:
    try:
        is_there = path.is_file()
    except OSError:  # no file can have such a name
        is_there = False
    if not is_there:
        raise ConfigError("policy", problem=f"no such file: {path}", allowed=TARGETS)
    _search_also(path.parent.resolve())
    name = f"g2sim_policy_file_{path.stem}"
    spec: Any = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError("policy", problem=f"{target} cannot be loaded: {raised(error)}") from error
    return module


def _search_also(folder: Path) -> None:
    """Modules there can be imported; those that can be already come first."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _class_in(module: ModuleType, attribute: str, target: str) -> PolicyClass:
    """The class of that name, or the only policy that a module defines."""
    own = [
        name
        for name, value in vars(module).items()
        if inspect.isclass(value) and value.__module__ == module.__name__ and hasattr(value, "place")
    ]
    if not attribute:
        if len(own) != 1:
            told = f"defines {len(own)} policies" + (f": {', '.join(own)}" if own else "")
            raise ConfigError("policy", problem=f"{target} {told}", hint=f"name one: {target}:Class")
        attribute = own[0]
    made: Any = getattr(module, attribute, None)
    if not inspect.isclass(made):
        problem = f"{target}: {attribute} is {'not there' if made is None else 'no class'}"
        raise ConfigError("policy", problem=problem, allowed=", ".join(own) or None, hint=close_to(attribute, own))
    return cast(PolicyClass, made)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(type(key) is str and _is_plain(inner) for key, inner in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)
