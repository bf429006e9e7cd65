"""Making placement policies: the ones that come along by name, and any class from its options.

Owns: the names, and what counts as an option. Refuses to know: where a name, an option or a class was found.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from g2sim.actors.router.builtin import (
    LeastLoaded,
    ParentAware,
    PowerOfTwo,
    PrefixAffinity,
    Random,
    RoundRobin,
    SessionAffinity,
)
from g2sim.actors.router.dynamo import DynamoKv
from g2sim.actors.router.policy import PlacementPolicy
from g2sim.bus.errors import ConfigError, PolicyError, close_to, raised

PolicyClass = Callable[..., PlacementPolicy]
"""Options as keyword arguments -> policy."""

POLICIES: dict[str, PolicyClass] = {
    policy.name: policy
    for policy in (
        RoundRobin,
        Random,
        LeastLoaded,
        PowerOfTwo,
        PrefixAffinity,
        SessionAffinity,
        ParentAware,
        DynamoKv,
    )
}

OTHER_NAMES = {"kv_router": "dynamo_kv"}
"""Other names of policies, as the reference has them."""

_NEEDED = sorted(name for name in vars(PlacementPolicy) if not name.startswith("_"))


def canonical_name(name: str) -> str:
    """The name under which a policy is known here. Raises: ConfigError for field ``policy``."""
    name = OTHER_NAMES.get(name, name)
    if name not in POLICIES:
        raise ConfigError("policy", got=name, allowed=", ".join(POLICIES), hint=close_to(name, POLICIES))
    return name


def default_options(made: PolicyClass) -> dict[str, Any]:
    """All options of a policy with their defaults; ``...`` for one that must be given.

    They are what the class method ``defaults`` says, else the keyword-only parameters of the constructor.
    Raises: ConfigError for field ``policy`` if a class tells neither.
    """
    own = getattr(made, "defaults", None)
    try:
        if own is not None:
            return dict(own())
        parameters = inspect.signature(made).parameters.values()
    except Exception as error:
        raise ConfigError("policy", problem=f"the options of {made!r} cannot be told: {raised(error)}") from error
    return {
        one.name: ... if one.default is one.empty else one.default for one in parameters if one.kind is one.KEYWORD_ONLY
    }


def make_policy(name: str, options: Mapping[str, Any], made: PolicyClass | None = None) -> PlacementPolicy:
    """A new policy: the built-in one of that name, or one of class ``made``, which ``name`` stands for in messages.

    Raises: ConfigError for field ``policy`` or ``options.<name of the option>``, also for a ValueError or TypeError of
        the constructor; PolicyError for any other exception of it.
    """
    if made is None:
        name = canonical_name(name)
        made = POLICIES[name]
    known = default_options(made)
    for option in options:
        if option not in known:
            raise ConfigError(
                f"options.{option}",
                problem=f"policy {name} has no such option",
                got=options[option],
                allowed=", ".join(known) or "none",
                hint=close_to(option, known),
            )
    missing = [option for option, default in known.items() if default is ... and option not in options]
    if missing:
        raise ConfigError(f"options.{missing[0]}", problem=f"policy {name} needs this option")
    try:
        policy = made(**options)
    except ConfigError as error:
        raise ConfigError(
            f"options.{error.field}", problem=error.problem, got=error.got, allowed=error.allowed, hint=error.hint
        ) from None
    except (ValueError, TypeError) as error:
        raise ConfigError("options", problem=f"policy {name} does not take them: {raised(error)}") from error
    except Exception as error:
        raise PolicyError(name, f"cannot be made: {raised(error)}") from error
    lacking = [attribute for attribute in _NEEDED if not hasattr(policy, attribute)]
    if lacking:
        raise ConfigError(
            "policy",
            problem=f"{name} is no placement policy: it lacks {', '.join(lacking)}",
            hint="make it a subclass of g2sim.actors.router.policy.Policy",
        )
    if not isinstance(policy.name, str) or not policy.name.strip():
        raise ConfigError("policy", problem=f"{name} has no name", got=policy.name, allowed="name = a non-blank text")
    return policy
