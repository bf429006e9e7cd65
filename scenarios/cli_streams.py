"""Commands for event streams: validate, rules, record, publish."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from g2sim.bus.errors import ConfigError
from g2sim.scenarios.cli_reading import reads_runs

if TYPE_CHECKING:
    from g2sim.scenarios.live_streams import Endpoint
    from g2sim.scenarios.validate import Validator

_LOOPBACK = "127.0.0.1"


def _capacity(value: str) -> tuple[str, int]:
    """TIER=BLOCKS."""
    tier, _, blocks = value.partition("=")
    if tier not in ("device", "host_pinned") or not blocks.isdecimal() or not int(blocks):
        raise click.BadParameter(f"got {value!r}, allowed: device=BLOCKS or host_pinned=BLOCKS")
    return tier, int(blocks)


def _listening(for_help: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The options of a command that listens to live streams; ``for_help`` is the help of --for."""
    options = (
        click.option(
            "--replay",
            multiple=True,
            metavar="[NAME=]ADDRESS",
            help="Replay socket of the live stream NAME, or of the next in order.",
        ),
        click.option("--for", "for_s", type=click.FloatRange(min=0), help=for_help),
        click.option("--count", type=click.IntRange(min=1), help="Live messages to take."),
        click.option(
            "--from-now", is_flag=True, help="Do not ask a replay socket for what came before the first live message."
        ),
    )

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


@click.command()
@click.argument("streams", metavar="STREAM...", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
@click.option("--select", multiple=True, metavar="RULES", help="Only these rules: codes, starts of codes, families.")
@click.option("--ignore", multiple=True, metavar="RULES", help="All rules but these.")
@click.option(
    "--mode",
    type=click.Choice(["true", "dynamo"]),
    default="true",
    show_default=True,
    help="Residency as it is; or also what Dynamo's index would know, with the difference.",
)
@click.option(
    "--copies",
    type=click.Choice(["auto", "counted", "logical"]),
    default="auto",
    show_default=True,
    help="A block stored twice has two copies, or one; auto counts them for vLLM streams.",
)
@click.option(
    "--placement",
    type=click.Choice(["lenient", "strict"]),
    default="lenient",
    show_default=True,
    help="Believe a position that contradicts the parent, or refuse the event.",
)
@click.option(
    "--capacity",
    type=_capacity,
    metavar="TIER=BLOCKS",
    multiple=True,
    help="Most blocks of a rank's tier; a run log knows its own.",
)
@click.option("--shared-host", is_flag=True, help="All ranks announce one host pool: they must agree on it at the end.")
@_listening("Seconds to listen to live streams.")
@reads_runs("streams")
def validate(
    streams: tuple[str, ...],
    as_json: bool,
    select: tuple[str, ...],
    ignore: tuple[str, ...],
    mode: str,
    copies: str,
    placement: str,
    capacity: tuple[tuple[str, int], ...],
    shared_host: bool,
    replay: tuple[str, ...],
    for_s: float | None,
    count: int | None,
    from_now: bool,
) -> None:
    """Check KV event streams against the contract; exit code 1 if an error or warning was found.

    STREAM is a run folder or event log, a capture of g2sim record, neutral or Dynamo JSON lines, or a live vLLM
    publisher as [NAME=]tcp://HOST:PORT. Live streams are listened to until --for, --count or Ctrl-C.

    Example: g2sim validate runs/demo --json
    """
    from g2sim.scenarios.run import program_version
    from g2sim.scenarios.stream_sources import check_files
    from g2sim.scenarios.validate import Copies, Mode, Options, Validator, report_json, report_lines, report_value
    from g2sim.scenarios.validate_rules import Severity, choose

    options = Options(
        mode=Mode(mode),
        codes=choose(select, ignore),
        copies=Copies(copies),
        strict=placement == "strict",
        capacities=dict(capacity),
        shared_host=shared_host,
    )
    validator = Validator(options)
    live = [stream for stream in streams if "://" in stream]
    files = [Path(stream) for stream in streams if "://" not in stream]
    if live and files:
        raise ConfigError("STREAM", problem="files and live streams cannot be checked together", got=live[0])
    if not live:
        for option, given in (
            ("--replay", replay),
            ("--for", for_s is not None),
            ("--count", count),
            ("--from-now", from_now),
        ):
            if given:
                raise ConfigError(option, problem="goes with live streams, and these are files", got=" ".join(streams))
    heard: list[dict[str, Any]] = []
    if live:
        good, heard = _listen(validator, endpoints_of(live, replay), for_s, count, from_start=not from_now)
    else:
        good = check_files(files, validator)
    verdicts = validator.finish()
    value = report_value(validator, verdicts, program_version()) | {"streams": heard}
    click.echo(report_json(value) if as_json else "\n".join(report_lines(validator, verdicts)), nl=not as_json)
    if not good:
        raise ConfigError("STREAM", problem="nothing in it could be read as an event", got=" ".join(streams))
    sys.exit(1 if validator.findings.count(Severity.ERROR, Severity.WARNING) else 0)


def _listen(
    validator: Validator, endpoints: list[Endpoint], for_s: float | None, count: int | None, *, from_start: bool
) -> tuple[int, list[dict[str, Any]]]:
    """Feed live streams to a validator. Returns how many items were good, and what came of each stream."""
    from g2sim.scenarios.live_streams import Listener, interruptible
    from g2sim.scenarios.stream_sources import MessageReader
    from g2sim.scenarios.validate import Bad, Source

    readers = {endpoint.name: MessageReader(endpoint.name, endpoint.dp_rank) for endpoint in endpoints}
    validator.begin(Source("live", "vllm", "message"))
    good = number = 0
    with (
        interruptible() as stop,
        Listener(endpoints, stop, for_s=for_s, count=count, from_start=from_start) as listener,
    ):
        click.echo(f"listening to {', '.join(e.live for e in endpoints)}; Ctrl-C ends it with a verdict", err=True)
        for number, got in enumerate(listener.messages()):
            reader = readers[got.endpoint.name]
            reader.anew = reader.anew or got.anew
            item = reader.read(got.frames, replayed=got.replayed)
            if item is not None:
                validator.feed(number, item)
                good += type(item) is not Bad
        for name, heard in listener.heard.items():
            validator.feed(number, readers[name].ended(tail_confirmed=heard.tail_confirmed))
    validator.end(number)
    return good, [{"stream": name} | heard.counts() for name, heard in listener.heard.items()]


def endpoints_of(live: list[str], replay: tuple[str, ...]) -> list[Endpoint]:
    """Streams from ``[NAME=]ADDRESS`` arguments; raises ConfigError."""
    from g2sim.scenarios.live_streams import Endpoint

    named: dict[str, str] = {}
    for stream in live:
        name, address = _named(stream)
        if name in named:
            raise ConfigError("STREAM", problem="two streams have one name", got=name)
        named[name] = address
    replays: dict[str, str] = {}
    for idx, given in enumerate(replay):
        name, address = _named(given)
        if name == address.partition("://")[2]:  # no name: the next stream's
            if idx >= len(named):
                raise ConfigError("--replay", got=given, problem="there are fewer live streams than replay sockets")
            name = list(named)[idx]
        if name not in named:
            raise ConfigError("--replay", got=given, allowed=f"one of the streams {', '.join(named)}")
        replays[name] = address
    return [Endpoint(name=name, live=address, replay=replays.get(name)) for name, address in named.items()]


def _named(text: str) -> tuple[str, str]:
    name, equals, address = text.partition("=")
    if not equals or "://" in name:
        name, address = "", text
    if not address.startswith(("tcp://", "ipc://")) or not address.partition("://")[2]:
        raise ConfigError("STREAM", got=text, allowed="[NAME=]tcp://HOST:PORT or [NAME=]ipc://PATH")
    return name or address.partition("://")[2], address


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the table as JSON.")
@click.option("--tiers", is_flag=True, help="Print which spelling of a medium is which tier, instead of the rules.")
def rules(as_json: bool, tiers: bool) -> None:
    """List the rules that g2sim validate checks.

    Example: g2sim rules --tiers
    """
    from tabulate import tabulate

    from g2sim.actors.kv.wire import HASH_RULE, tier_table
    from g2sim.scenarios.validate_rules import rule_rows

    if tiers:
        rows = [dict(zip(("form", "spelling", "tier"), row, strict=True)) for row in tier_table()]
    else:
        rows = rule_rows()
    if as_json:
        click.echo(json.dumps(rows, sort_keys=True, indent=1))
        return
    click.echo(tabulate(rows, headers="keys", tablefmt="plain"))
    if tiers:
        click.echo(f"\nany other spelling is counted and set aside\nhash rule: {HASH_RULE}")


@click.command()
@click.argument("streams", metavar="STREAM...", nargs=-1, required=True)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Capture file to write.")
@_listening("Seconds to listen.")
def record(
    streams: tuple[str, ...],
    out: Path,
    replay: tuple[str, ...],
    for_s: float | None,
    count: int | None,
    from_now: bool,
) -> None:
    """Record live KV event streams to a capture file, with arrival times, until --for, --count or Ctrl-C.

    Example: g2sim record w0=tcp://127.0.0.1:5557 --replay tcp://127.0.0.1:5657 --out w0.g2cap --for 60
    """
    from g2sim.scenarios.capture import CaptureWriter, StreamOpened
    from g2sim.scenarios.live_streams import Listener, interruptible
    from g2sim.scenarios.run import program_version

    endpoints = endpoints_of(list(streams), replay)
    with (
        interruptible() as stop,
        Listener(endpoints, stop, for_s=for_s, count=count, from_start=not from_now) as listener,
    ):
        try:
            writer = CaptureWriter(out, version=program_version())
        except OSError as failure:
            raise ConfigError("--out", got=str(out), problem=f"cannot write it: {failure.strerror}") from failure
        with writer:
            for endpoint in endpoints:
                writer.opened(
                    StreamOpened(
                        stream=endpoint.name,
                        endpoint=endpoint.live,
                        replay_endpoint=endpoint.replay,
                        dp_rank=endpoint.dp_rank,
                    )
                )
            click.echo(f"recording {', '.join(e.live for e in endpoints)}; Ctrl-C ends it", err=True)
            for got in listener.messages():
                writer.message(got.time_ms, got.endpoint.name, got.frames, replayed=got.replayed, anew=got.anew)
            for name, heard in listener.heard.items():
                writer.ended(listener.now_ms(), name, tail_confirmed=heard.tail_confirmed)
    click.echo(f"{writer.messages} messages in {out}", err=True)


@click.command()
@click.argument("path", metavar="FILE|RUN", type=click.Path(path_type=Path))
@click.option(
    "--speed", type=click.FloatRange(min=0, min_open=True), help="Pace: 1 is real time.  [default: no pauses]"
)
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), help="Pace: batches a second, of all ranks.")
@click.option(
    "--repeat",
    type=click.IntRange(min=1),
    help="Times to publish it, with a clear of all caches in between.  [default: 1, or what --for takes]",
)
@click.option("--for", "for_s", type=click.FloatRange(min=0), help="Seconds to publish at most, repeating it.")
@click.option(
    "--bind", default=_LOOPBACK, show_default=True, help="Address to listen on; others than loopback expose it."
)
@click.option(
    "--port", type=click.IntRange(0, 65535), default=5557, show_default=True, help="First live port; 0 for free ones."
)
@click.option(
    "--replay-port",
    type=click.IntRange(0, 65535),
    default=5657,
    show_default=True,
    help="First replay port; 0 for free ones.",
)
@click.option(
    "--history", type=click.IntRange(min=0), default=10_000, show_default=True, help="Batches kept for replays."
)
@click.option(
    "--queue",
    type=click.IntRange(min=1),
    default=100_000,
    show_default=True,
    help="Messages that may wait for one subscriber; it loses what comes beyond.",
)
@click.option(
    "--shape", type=click.Choice(["map", "array"]), default="map", show_default=True, help="How events are written."
)
@click.option(
    "--replay-layout",
    type=click.Choice(["topic", "seq"]),
    default="topic",
    show_default=True,
    help="Frames of a replay answer.",
)
@click.option(
    "--block-size",
    type=click.IntRange(min=2),
    default=16,
    show_default=True,
    help="Tokens a block where a file does not say.",
)
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(min=0),
    default=0.0,
    help="Seconds to wait for a subscriber on every rank.",
)
@click.option(
    "--linger",
    "linger_s",
    type=click.FloatRange(min=0),
    default=0.0,
    help="Seconds to go on answering replay requests.",
)
@reads_runs("path")
def publish(
    path: Path,
    speed: float | None,
    rate: float | None,
    repeat: int | None,
    for_s: float | None,
    bind: str,
    port: int,
    replay_port: int,
    history: int,
    queue: int,
    shape: str,
    replay_layout: str,
    block_size: int,
    wait_s: float,
    linger_s: float,
) -> None:
    """Publish each rank's KV events over ZeroMQ as vLLM does, with a replay socket each.

    FILE|RUN is a run folder or event log, a scenario (which is run first), a capture, or JSON lines. Prints one line a
    rank with its addresses.

    Example: g2sim publish runs/demo --wait 30 --linger 10

    Example of a long stream: g2sim publish runs/demo --wait 30 --for 600 --rate 2000 --linger 10
    """
    from g2sim.actors.kv.wire_vllm import ReplayLayout, Shape
    from g2sim.scenarios.live_streams import import_zmq, interruptible
    from g2sim.scenarios.publish_streams import Publishers, outgoing, ranks_of
    from g2sim.scenarios.repeat_streams import repeated

    if speed is not None and rate is not None:
        raise ConfigError("--rate", got=rate, allowed="--speed or --rate, not both")
    import_zmq()
    with contextlib.ExitStack() as stack:
        if path.suffix in (".yaml", ".yml"):
            path = _run_first(path, Path(stack.enter_context(tempfile.TemporaryDirectory()), "run"))
        ranks = ranks_of(path)
        if not ranks:
            raise ConfigError("FILE|RUN", got=str(path), problem="it holds no KV event")
        stop = stack.enter_context(interruptible())
        publishers = stack.enter_context(
            Publishers(
                ranks,
                address=bind,
                port=port,
                replay_port=replay_port,
                history=history,
                queue=queue,
                layout=ReplayLayout(replay_layout),
            )
        )
        for (worker, rank), one in publishers.by_rank.items():
            click.echo(f"{worker}/r{rank} live {one.endpoint} replay {one.replay_endpoint}")
        sys.stdout.flush()
        publishers.serve(wait_s, lambda: stop.is_set() or all(p.subscribers for p in publishers.by_rank.values()))
        times = repeat if repeat is not None or for_s is not None else 1
        messages = repeated(lambda: outgoing(path, shape=Shape(shape), block_size=block_size), times, Shape(shape))
        deadline = math.inf if for_s is None else time.monotonic() + for_s
        sent = publishers.play(
            messages, speed=speed, rate=rate, stop=lambda: stop.is_set() or time.monotonic() >= deadline
        )
        click.echo(f"{sent} batches sent", err=True)
        publishers.serve(linger_s, stop.is_set)


def _run_first(scenario: Path, folder: Path) -> Path:
    """Run a scenario into a folder; returns the folder."""
    from g2sim.scenarios.run import run_scenario
    from g2sim.scenarios.schema import load_scenario

    run_scenario(load_scenario(scenario), folder)
    return folder
