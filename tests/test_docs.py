"""README.md and docs/ are true: links lead somewhere, commands exist with the options shown, and output is real."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs
import click
import pytest
from cli_process import run_cli

from g2sim.actors.router.policy import Candidate, Place, PlacementPolicy, Policy, RoutedRequest, Weighing
from g2sim.bus.events import BY_TAG
from g2sim.scenarios.cli import COMMANDS, cli
from g2sim.scenarios.reference import PAGES as REFERENCE
from g2sim.scenarios.validate_rules import RULES

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", *DOCS]
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"^ {4}(g2sim .*)$", re.MULTILINE)
INLINE = re.compile(r"`(g2sim [^`]+)`")


def page_id(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def commands_in(text: str) -> Iterator[str]:
    """Every g2sim command of a page: in fenced blocks, in indented ones, and inside sentences."""
    for language, block in FENCE.findall(text):
        if language in ("", "sh", "console"):
            for line in block.splitlines():
                if line.removeprefix("$ ").startswith("g2sim "):
                    yield line.removeprefix("$ ")
    outside = FENCE.sub("", text)
    yield from INDENTED.findall(outside)
    yield from (shown.replace("\n", " ") for shown in INLINE.findall(outside))


def parse(line: str) -> None:
    """Raise click.UsageError unless the words of a command name a command and options that it has."""
    words = shlex.split(line.partition(" > ")[0])[1:]
    command: click.Command = cli
    context = click.Context(command, info_name="g2sim")
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        name, found, words = command.resolve_command(context, words)
        assert found is not None
        command, context = found, click.Context(found, info_name=name, parent=context)
    command.make_parser(context).parse_args(args=words)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_to_files_of_the_repository(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        path = (page.parent / target.partition("#")[0]).resolve()
        assert ROOT in path.parents, f"{page_id(page)}: {target} is outside the repository"
        assert path.exists(), f"{page_id(page)}: {target} leads nowhere"


def test_readme_and_the_map_lead_to_every_page() -> None:
    for start in (ROOT / "README.md", ROOT / "docs" / "index.md"):
        links = LINK.findall(start.read_text(encoding="utf-8"))
        reached = {(start.parent / target.partition("#")[0]).resolve() for target in links if "://" not in target}
        missing = {page for page in DOCS if page.name != "index.md" and page.parent == ROOT / "docs"} - reached
        assert not missing, f"{page_id(start)} does not lead to {sorted(map(page_id, missing))}"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_commands_exist_with_the_options_shown(page: Path) -> None:
    for line in commands_in(page.read_text(encoding="utf-8")):
        try:
            parse(line)
        except click.UsageError as error:
            pytest.fail(f"{page_id(page)}: {line}: {error.format_message()}")


@pytest.mark.parametrize(
    "line", ["g2sim rum FILE", "g2sim run FILE --ouput X", "g2sim policy knew A B", "g2sim --nope"]
)
def test_a_command_that_does_not_exist_is_found(line: str) -> None:
    with pytest.raises(click.UsageError):
        parse(line)


def commands_of(group: click.Group, context: click.Context) -> Iterator[tuple[str, click.Context]]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        inner = click.Context(command, info_name=name, parent=context, terminal_width=100)
        yield inner.command_path, inner
        if isinstance(command, click.Group):
            yield from commands_of(command, inner)


def test_every_help_fits_and_has_an_example_that_parses() -> None:
    found = dict(commands_of(cli, click.Context(cli, info_name="g2sim")))
    assert {f"g2sim {name}" for name in COMMANDS} | {"g2sim policy new"} <= set(found)
    for path, context in found.items():
        shown = context.command.get_help(context)
        assert max(map(len, shown.splitlines())) <= 100, path
        _, _, examples = shown.partition("Example")
        example = " ".join(examples.partition("\n\n")[0].split())
        assert example.startswith(": g2sim "), f"{path} --help shows no example"
        parse(example[2:])


def test_every_command_is_shown_somewhere() -> None:
    shown = {line.split()[1] for page in PAGES for line in commands_in(page.read_text(encoding="utf-8"))}
    assert shown >= set(COMMANDS)


@pytest.mark.parametrize("name", REFERENCE)
def test_reference_pages_are_current(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "g2sim.scenarios.reference", name], env=os.environ, capture_output=True, check=True
    )
    assert done.stdout == (ROOT / "docs" / "reference" / f"{name}.md").read_bytes()


def test_reference_pages_name_every_event_and_rule() -> None:
    events = (ROOT / "docs" / "reference" / "events.md").read_text(encoding="utf-8")
    rules = (ROOT / "docs" / "reference" / "rules.md").read_text(encoding="utf-8")
    known = {tag for tag, kind in BY_TAG.items() if kind.cls.__module__.startswith("g2sim.")}
    assert set(re.findall(r"^### `(\S+)`", events, re.MULTILINE)) == known
    assert set(re.findall(r"^\| (KV\d+) ", rules, re.MULTILINE)) == {rule.code for rule in RULES}
    assert "| `preparation` | `str \\| None` | as in `RequestSpec`. |" in events


def test_the_page_of_policies_says_what_every_call_and_field_means() -> None:
    page = (ROOT / "docs" / "reference" / "policy.md").read_text(encoding="utf-8")
    rows = [line.removesuffix(" |").rpartition(" | ") for line in page.splitlines() if line.startswith("| `")]
    assert [name for name, _, meaning in rows if not meaning.strip()] == []
    shown = {re.match(r"\| `(\w+)", name)[1] for name, _, _ in rows}  # type: ignore[index]
    assert shown >= {name for name in (*vars(Policy), *vars(PlacementPolicy)) if not name.startswith("_")}
    assert shown >= {field.name for cls in (RoutedRequest, Candidate, Place, Weighing) for field in attrs.fields(cls)}


@pytest.mark.parametrize("name", ["README.md", "docs/tutorial.md", "docs/size-a-pool.md"])
def test_a_page_shows_real_output(name: str, tmp_path: Path) -> None:
    """Lines below ``$ g2sim ...`` are lines of its output, in order; an excerpt may leave lines out."""
    (tmp_path / "scenarios").symlink_to(ROOT / "scenarios")
    shown = 0
    text = (ROOT / name).read_text(encoding="utf-8")
    for block in (block for language, block in FENCE.findall(text) if language == "console"):
        for part in block.removeprefix("$ ").split("\n$ "):
            command, *lines = part.rstrip("\n").split("\n")
            done = run_cli(tmp_path, *shlex.split(command)[1:])
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
            rest = iter(done.stdout.splitlines())
            for line in lines:
                assert line in rest, f"{name}: {command} does not print, at this place: {line}"
                shown += 1
    assert shown > 15
    if name == "docs/size-a-pool.md":
        assert (tmp_path / "runs" / "pool.svg").read_bytes() == (ROOT / "docs" / "images" / "pool.svg").read_bytes()
