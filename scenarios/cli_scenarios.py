"""Commands for scenario files: schema, check, test."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path

import click

from g2sim.bus.errors import ConfigError, SimError, close_to


@click.command()
def schema() -> None:
    """Print the JSON Schema of scenario files, for editors.

    It knows the keys, what each takes, and the defaults; 'g2sim check' knows also what must agree between them.

    Example: g2sim schema > g2sim.schema.json
    """
    from g2sim.scenarios.json_schema import schema_text

    click.echo(schema_text(), nl=False)


@click.command()
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--block-size",
    type=click.IntRange(1),
    default=512,
    show_default=True,
    help="Tokens that a hash id of a trace stands for, in formats that do not say.",
)
@click.option("--format", "trace_format", metavar="NAME", help="All files are traces of this format.")
def check(files: tuple[Path, ...], block_size: int, trace_format: str | None) -> None:
    """Check scenario files and traces, without running anything.

    FILE is a scenario (YAML or JSON), checked with its variants, expectations and the trace that it names; or a trace
    (.jsonl, a .json file or folder of a Weka corpus): mooncake, agentic_mooncake and weka tell themselves apart, other
    formats need --format. A Python script is not run: only its syntax is checked. Requests whose prompts no worker can
    hold are noted.

    Example: g2sim check scenarios/library/*.yaml
    """
    from g2sim.scenarios.check import check_file
    from g2sim.scenarios.schema import TraceFormat

    names = [str(name) for name in TraceFormat]
    if trace_format is not None and trace_format not in names:
        hint = close_to(trace_format, names)
        raise ConfigError("--format", got=trace_format, allowed=", ".join(names), hint=hint)
    kind = None if trace_format is None else TraceFormat(trace_format)
    bad = 0
    for file in files:
        try:
            checked = check_file(file, trace_format=kind, block_size_tokens=block_size)
            click.echo(f"{file}: ok, {checked.about}")
            for note in checked.notes:
                click.echo(f"note: {file}: {note}", err=True)
        except ConfigError as error:
            if len(files) == 1:
                raise
            bad += 1
            click.echo(f"error: {error}", err=True)
    if bad:
        raise ConfigError(
            "", problem="it is not good" if len(files) == 1 else f"{bad} of {len(files)} files are not good"
        )


@click.command()
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--jobs", type=click.IntRange(1, 256), help="Scenarios to run at a time.  [default: one a processor]")
@click.option("--junit", type=click.Path(path_type=Path), help="File to write the results to as JUnit XML.")
@click.option("--overwrite", is_flag=True, help="Replace the JUnit file if it exists.")
def test(paths: tuple[Path, ...], jobs: int | None, junit: Path | None, overwrite: bool) -> None:
    """Run scenarios as tests: each must run, and meet what it expects.

    PATH is a scenario, a scripted scenario (whose code is run), or a folder: its .yaml and .yml files and its scripts.
    A scenario that needs the extra g2sim[aic] is skipped where that is missing. Exit code 1 if a scenario failed, 2 if
    one could not be read.

    Example: g2sim test scenarios/library --jobs 4 --junit results.xml
    """
    from g2sim.scenarios.output_file import new_text_file
    from g2sim.scenarios.scenario_tests import collect, junit_text, run_tests

    files = collect(paths)
    results = []
    with ExitStack() as stack:
        xml = (
            None if junit is None else stack.enter_context(new_text_file(junit, overwrite=overwrite, option="--junit"))
        )
        for result in stack.enter_context(closing(run_tests(files, jobs))):
            results.append(result)
            click.echo(result.text)
        if xml is not None:
            xml.write(junit_text(results))
    failed = sum(result.failed for result in results)
    skipped = sum(result.skipped is not None for result in results)
    passed = len(results) - failed - skipped
    click.echo(f"{passed} of {len(results)} scenarios passed{f', {skipped} skipped' if skipped else ''}")
    if any(result.bad_input for result in results):
        raise ConfigError("", problem="a scenario could not be read")
    if failed:
        raise SimError(f"{failed} of {len(results)} scenarios failed")
