"""Placement policies by name.

Owns: the names, and making a policy from its name and options. Refuses to know: where those were written.
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
from g2sim.bus.errors import ConfigError, close_to

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


def canonical_name(name: str) -> str:
    """The name under which a policy is known here. Raises: ConfigError for field ``policy``."""
    name = OTHER_NAMES.get(name, name)
    if name not in POLICIES:
        raise ConfigError("policy", got=name, allowed=", ".join(POLICIES), hint=close_to(name, POLICIES))
    return name


def default_options(name: str) -> dict[str, Any]:
    """All options of a policy with their defaults."""
    made = POLICIES[canonical_name(name)]
    own = getattr(made, "defaults", None)
    if own is not None:
        return dict(own())
    parameters = inspect.signature(made).parameters.values()
    return {one.name: one.default for one in parameters if one.kind is one.KEYWORD_ONLY}


def make_policy(name: str, options: Mapping[str, Any]) -> PlacementPolicy:
    """A new policy. Raises: ConfigError for field ``policy`` or ``options.<name of the option>``."""
    name = canonical_name(name)
    known = default_options(name)
    for option in options:
        if option not in known:
            raise ConfigError(
                f"options.{option}",
                problem=f"policy {name} has no such option",
                got=options[option],
                allowed=", ".join(known) or "none",
                hint=close_to(option, known),
            )
    try:
        return POLICIES[name](**options)
    except ConfigError as error:
        raise ConfigError(
            f"options.{error.field}", problem=error.problem, got=error.got, allowed=error.allowed, hint=error.hint
        ) from None
