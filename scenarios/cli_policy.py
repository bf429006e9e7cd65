"""Commands about placement policies."""

from __future__ import annotations

import json
from pathlib import Path

import click

from g2sim.bus.errors import SimError


@click.group()
def policy() -> None:
    """List, begin and check placement policies. docs/write-a-policy.md is the way through them.

    Example: g2sim policy list
    """


@policy.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def list_policies(as_json: bool) -> None:
    """Show the policies that a scenario can name: built-in ones and those of installed packages.

    Example: g2sim policy list
    """
    from tabulate import tabulate

    from g2sim.actors.router.registry import POLICIES
    from g2sim.scenarios.policy_source import installed_policies

    rows = [
        {"name": name, "from": "g2sim", "about": (made.__doc__ or "").strip().partition("\n")[0]}
        for name, made in POLICIES.items()
    ]
    for one in installed_policies():
        package = "?" if one.dist is None else f"{one.dist.name} {one.dist.version}"
        shadowed = "; a built-in policy has this name and is used" if one.name in POLICIES else ""
        rows.append({"name": one.name, "from": package, "about": f"{one.value}{shadowed}"})
    click.echo(json.dumps(rows, sort_keys=True, indent=1) if as_json else tabulate(rows, headers="keys"))


@policy.command("new")
@click.argument("name")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
def new_policy(name: str, folder: Path) -> None:
    """Write the skeleton of policy NAME into DIR: a policy that runs, its tests, and a pyproject.toml.

    Example: g2sim policy new my_policy my-policy
    """
    from g2sim.scenarios.policy_skeleton import write_skeleton

    for file in write_skeleton(name, folder):
        click.echo(file)


@policy.command("check")
@click.argument("target")
@click.option("--policy-option", "options", multiple=True, metavar="OPTION=VALUE", help="An option; may be repeated.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of lines.")
def check(target: str, options: tuple[str, ...], as_json: bool) -> None:
    """Run the conformance suite on TARGET, a policy's name, package.module:Class or FILE.py.

    This runs the policy's code. Exit code 1 if a check fails.

    Example: g2sim policy check my-policy/my_policy.py
    """
    import attrs

    from g2sim.scenarios.policy_check import check_policy
    from g2sim.scenarios.policy_source import parse_choice

    results = check_policy(parse_choice(target, options))
    if as_json:
        click.echo(json.dumps([attrs.asdict(one) | {"ok": one.ok} for one in results], sort_keys=True, indent=1))
    else:
        for one in results:
            click.echo(f"{'ok  ' if one.ok else 'FAIL'}  {one.name}: {one.claim}")
            if one.problem is not None:
                click.echo(f"      {one.problem}")
    failed = sum(not one.ok for one in results)
    if failed:
        raise SimError(f"{target}: {failed} of {len(results)} checks failed")
