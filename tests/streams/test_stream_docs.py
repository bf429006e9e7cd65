"""Every command that docs/validate.md shows is run, with a publisher of ours for the deployment that it speaks of."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
from cli_process import start_cli
from test_stream_live import playing

from g2sim.scenarios.publish_streams import outgoing

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```sh\n(.*?)```", (ROOT / "docs/validate.md").read_text(encoding="utf-8"), re.DOTALL)
COMMANDS = [shlex.split(line) for block in BLOCKS for line in block.splitlines()]
HOST = "tcp://10.0.0.5"


def ended(process: subprocess.Popen[str]) -> str:
    try:
        out, err = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert process.returncode == 0, err
    return out


def g2sim(arguments: list[str], folder: Path) -> str:
    return ended(start_cli(folder, *arguments))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a reader stands: in the repository, with an empty folder for runs."""
    made = tmp_path_factory.mktemp("reader")
    (made / "scenarios").symlink_to(ROOT / "scenarios")
    return made


def shown(*start: str) -> list[str]:
    """The one command that starts so."""
    (found,) = [command for command in COMMANDS if command[: len(start)] == list(start)]
    return found


def test_the_commands_are_those_that_are_run_here() -> None:
    """Whoever adds a command adds a test of it."""
    assert [command[:2] for command in COMMANDS] == [
        *(["pip", "install"], ["g2sim", "record"], ["g2sim", "validate"]),
        ["g2sim", "validate"],
        *(["g2sim", "run"], ["g2sim", "validate"]),
        *(["g2sim", "publish"], ["g2sim", "validate"]),
        *(["g2sim", "rules"], ["g2sim", "rules"]),
    ]


def test_the_extra_that_is_installed_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert shown("pip")[-1] == ".[zmq]"
    assert "zmq" in extras


def test_the_run_that_stands_in_for_a_deployment(folder: Path) -> None:
    g2sim(shown("g2sim", "run")[1:], folder)
    out = g2sim(shown("g2sim", "validate", "runs/demo")[1:], folder)
    assert "aggregated-1/r0: exact" in out
    assert "Dynamo's index" in out


def test_rules_are_printed(folder: Path) -> None:
    assert "KV101" in g2sim(["rules"], folder)
    assert "'CPU_TIER1'" in g2sim(["rules", "--tiers"], folder)


def local(command: list[str], live: str, replay: str, count: int) -> list[str]:
    """A command for a deployment, for a publisher of ours and as many messages as it sends."""
    said = [word.replace(f"{HOST}:5557", live).replace(f"{HOST}:5657", replay) for word in command]
    assert live in " ".join(said)
    said[said.index("--for") + 1] = "30"
    return [*said, "--count", str(count)]


def test_record_and_validate_a_deployment(folder: Path) -> None:
    lines = ROOT / "tests/streams/data/f06.jsonl"
    with playing(lines) as ((_, live, replay),):
        g2sim(local(shown("g2sim", "record"), live, replay, 4)[1:], folder)
    out = g2sim(shown("g2sim", "validate", "w0.g2cap")[1:], folder)
    assert "w0/r0: exact; 4 events; device 0, host_pinned 2; Dynamo's index: device 0, host_pinned 2" in out
    with playing(lines) as ((_, live, replay),):
        out = g2sim(local(shown("g2sim", "validate", f"w0={HOST}:5557"), live, replay, 4)[1:], folder)
    assert "w0/r0: exact; 4 events; device 0, host_pinned 2" in out


def test_publish_and_validate_in_two_terminals(folder: Path) -> None:
    """On free ports, where the page has the usual ones."""
    if not (folder / "runs/demo").exists():
        g2sim(shown("g2sim", "run")[1:], folder)
    publisher = start_cli(folder, *shown("g2sim", "publish")[1:], "--port", "0", "--replay-port", "0")
    try:
        assert publisher.stdout is not None
        rows = [publisher.stdout.readline().split() for _ in range(2)]
        command = shown("g2sim", "validate", "tcp://127.0.0.1:5557")
        ports = {
            f"tcp://127.0.0.1:{base + row}": rows[row][at] for base, at in ((5557, 2), (5657, 4)) for row in (0, 1)
        }
        said = [ports.get(word, word) for word in command]
        said[said.index("--for") + 1] = "30"
        out = g2sim([*said[1:], "--count", str(sum(1 for _ in outgoing(folder / "runs/demo")))], folder)
        assert out.count(": exact; ") == 2
    finally:
        publisher.terminate()
        publisher.communicate()
