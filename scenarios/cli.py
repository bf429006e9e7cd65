"""The command line.

Owns: which commands there are, and exit codes: 0 done, 1 the run or check failed, 2 bad usage or input, 130
interrupted. stdout is for data, stderr for progress, notes and errors. Refuses to know: how anything is computed; a
command's module is imported when the command is used.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import sys
from importlib.metadata import version
from typing import Any, NoReturn

import click

from g2sim.bus.errors import ConfigError, SimError, shorten
from g2sim.scenarios.build import is_compiled

INTERRUPTED = 130

_BAD_PATHS = frozenset((errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENOTDIR, errno.EISDIR))
"""What a system says of a path that is wrong as the user wrote it."""

COMMANDS = {
    "run": "g2sim.scenarios.cli_run",
    "report": "g2sim.scenarios.cli_run",
    "view": "g2sim.scenarios.cli_view",
    "timeline": "g2sim.scenarios.cli_view",
    "schema": "g2sim.scenarios.cli_scenarios",
    "check": "g2sim.scenarios.cli_scenarios",
    "test": "g2sim.scenarios.cli_scenarios",
    "inspect": "g2sim.scenarios.cli_travel",
    "events": "g2sim.scenarios.cli_travel",
    "diff": "g2sim.scenarios.cli_travel",
    "export": "g2sim.scenarios.cli_travel",
    "compare": "g2sim.scenarios.cli_compare",
    "sweep": "g2sim.scenarios.cli_sweep",
    "curve": "g2sim.scenarios.cli_sweep",
    "explain": "g2sim.scenarios.cli_explain",
    "policy": "g2sim.scenarios.cli_policy",
    "validate": "g2sim.scenarios.cli_streams",
    "rules": "g2sim.scenarios.cli_streams",
    "record": "g2sim.scenarios.cli_streams",
    "publish": "g2sim.scenarios.cli_streams",
}
"""Command -> module in which a click command of that name is defined."""


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(COMMANDS[cmd_name]), cmd_name.replace("-", "_"))
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            _leave_stdout()
            return 0
        return result


def _leave_stdout() -> None:
    """stdout takes no more: keeps the interpreter from complaining when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@click.group(cls=_LazyGroup, context_settings={"max_content_width": 100, "help_option_names": ["-h", "--help"]})
@click.version_option(
    version("g2sim"), prog_name="g2sim", message="%(prog)s %(version)s" + " (compiled)" * is_compiled()
)
def cli() -> None:
    """Simulate an LLM serving deployment with GPU and host KV caches behind routers.

    Example: g2sim run scenarios/library/agentx-g2-shared.yaml
    """


def main(arguments: list[str] | None = None) -> NoReturn:
    """Entry point of the ``g2sim`` command."""
    # No command multiplies matrices, and the threads that numpy would start for that spin for a while.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Text of a file may be none that the terminal can show, and half a surrogate pair is none at all.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code: Any = cli.main(args=arguments, prog_name="g2sim", standalone_mode=False)
    except SimError as error:
        click.echo("\n".join([f"error: {error}", *getattr(error, "__notes__", ())]), err=True)
        sys.exit(error.exit_code)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except OSError as error:
        # Most are told where they happen; these are of a path that no file can have, or of stdout that takes no more.
        place = "" if error.filename is None else f"{shorten(str(error.filename), 200)}: "
        click.echo(f"error: {place}{error.strerror or error}", err=True)
        if error.errno == errno.ENOSPC:
            _leave_stdout()
        sys.exit(ConfigError.exit_code if error.errno in _BAD_PATHS else SimError.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
