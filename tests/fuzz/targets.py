"""What is fuzzed: every reader of bytes from outside, with valid samples to damage.

A target takes bytes and may end in three ways: it accepts them, it refuses them as bad input (exit code 2), or, for
logs and streams only, it says how far they are good (exit code 1). Everything else is a fault of ours.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import shlex
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import yaml
from mutations import Form

from g2sim.actors.kv import wire_dynamo, wire_neutral
from g2sim.actors.kv.wire import WireError
from g2sim.actors.kv.wire_vllm import (
    Shape,
    decode_batch,
    encode_batch,
    message_frames,
    read_message,
    read_replay_answer,
    read_replay_request,
)
from g2sim.bus.errors import ConfigError, SimError
from g2sim.scenarios.capture import CaptureWriter, StreamOpened
from g2sim.scenarios.cli import main
from g2sim.scenarios.policy_source import parse_choice, with_policy
from g2sim.scenarios.publish_streams import outgoing
from g2sim.scenarios.run import run_scenario
from g2sim.scenarios.schema import Scenario, load_scenario
from g2sim.scenarios.sweep import read_settings
from g2sim.scenarios.table_timing import read_pass_table

REPO = Path(__file__).resolve().parents[2]
LIBRARY = REPO / "scenarios" / "library"
STREAMS = REPO / "tests" / "streams" / "data"


class Fault(Exception):
    """A target ended in a way that it must not."""


@attrs.frozen
class Target:
    """A reader.

    Attributes:
        form: how the values of its samples are found.
        samples: valid input, made when it is asked for.
        read: takes bytes. Raises: SimError of exit code 2 to refuse them; whatever else is a fault.
        weight: how many examples it gets for one of the others; slow targets get fewer.
    """

    name: str
    form: Form
    samples: Callable[[], list[bytes]]
    read: Callable[[bytes], None]
    weight: float = 1.0


@functools.cache
def scratch() -> Path:
    """A folder of this process."""
    folder = Path(tempfile.mkdtemp(prefix="g2sim-fuzz-"))
    (folder / "traces").symlink_to(LIBRARY / "traces")
    return folder


def run_command(arguments: Sequence[str], *, may_fail: bool, named: str | None = None) -> str:
    """Runs a command of the command line in this process. Returns its stdout; raises Fault.

    Args:
        may_fail: exit code 1 is allowed.
        named: what a refusal must name.
    """
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8", newline=""), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main(list(arguments))
    except SystemExit as stop:
        code = stop.code
    out.seek(0)
    text, said = out.read(), err.getvalue()
    if code not in (0, 1, 2) or (code == 1 and not may_fail):
        raise Fault(f"{shlex.join(arguments)}: exit code {code}: {said[:500]}")
    if code == 2 and named is not None and named not in said:
        raise Fault(f"{shlex.join(arguments)}: the refusal does not name {named}: {said[:500]}")
    if code == 2 and (len(said) > 20_000 or "Traceback" in said):
        raise Fault(f"{shlex.join(arguments)}: the refusal is {len(said)} characters: {said[:500]}")
    return text


def commands(name: str, *lines: str, may_fail: bool = False) -> Callable[[bytes], None]:
    """Writes the bytes to a file and runs commands on it; FILE stands for it, OUT for a file to write."""

    def read(data: bytes) -> None:
        file = scratch() / name
        file.write_bytes(data)
        for line in lines:
            words = [str(file) if word == "FILE" else word for word in shlex.split(line)]
            words = [str(scratch() / "out") if word == "OUT" else word for word in words]
            run_command(words, may_fail=may_fail, named=None if may_fail else name)

    return read


def files(*patterns: str, folder: Path = REPO) -> Callable[[], list[bytes]]:
    return lambda: [path.read_bytes() for pattern in patterns for path in sorted(folder.glob(pattern))]


def head(rows: int, *patterns: str) -> Callable[[], list[bytes]]:
    """The first rows of files."""
    return lambda: [b"".join(data.splitlines(keepends=True)[:rows]) for data in files(*patterns)()]


def rows(*values: Any) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


APPLIED = rows(
    {
        "num_turns": 2,
        "input_prompt_length": 10,
        "assistant_response_length": [3, 4],
        "tool_call_output_length": [5, 6],
        "tool_call_latency": [0.5, 0.25],
        "final_assistant_response_length": 4,
    }
)
MOONCAKE = rows(
    {"timestamp": 0, "input_length": 8, "output_length": 2, "hash_ids": [1, 2], "session_id": "s"},
    {"timestamp": 9.5, "input_length": 1024, "output_length": 2, "hash_ids": [1, 2], "output_token_ids": [5, 6]},
    {"delay": 5, "input_tokens": 700, "output_tokens": 0, "hash_ids": [1, 3], "session_id": "s"},
)
AGENTIC = rows(
    {
        "schema": "dynamo.agentic_mooncake",
        "version": 2,
        "block_size": 4,
        "hash_id_scope": "local",
        "source": {"format": "test", "digest": "d"},
    },
    *(
        {
            "request_id": name,
            "play_id": "p",
            "session_id": "s",
            "model": "m",
            "input_length": 8,
            "output_length": 2,
            "hash_ids": [1, 2],
            "not_before_ms": 0.0,
            "recorded_api_time_ms": 2.5,
            "priority": 1,
            "dependencies": [
                {"request_id": one, "trigger": "completion", "delay_ms": 1.5, "relation": "sequence"} for one in after
            ],
        }
        for name, after in (("a", []), ("b", ["a"]), ("c", ["a", "b"]))
    ),
)
_TURN = {"t": 0.5, "type": "s", "model": "m", "in": 8, "out": 1, "hash_ids": [1, 2], "api_time": 0.1, "stop": "x"}
WEKA = rows(
    {
        "id": "p",
        "block_size": 4,
        "hash_id_scope": "local",
        "models": ["m"],
        "tool_tokens": 3,
        "requests": [
            _TURN,
            {
                "type": "subagent",
                "t": 1.0,
                "status": "completed",
                "subagent_type": "x",
                "agent_id": "a",
                "duration_ms": 10,
                "requests": [_TURN | {"t": 1.5}, _TURN | {"t": 2.0}],
            },
            _TURN | {"t": 3.0},
        ],
    }
)


def _served(name: str, start_ms: int, session: str | None) -> dict[str, Any]:
    request = {"request_id": name, "output_tokens": 2, "request_received_ms": start_ms, "total_time_ms": 10}
    request |= {"replay": {"trace_block_size": 4, "input_length": 8, "input_sequence_hashes": [1, 2]}}
    row = {"schema": "dynamo.request.trace.v1", "event_type": "request_end", "event_time_unix_ms": start_ms + 10}
    context = {} if session is None else {"agent_context": {"session_id": session}}
    return row | {"request": request} | context


DYNAMO_REQUESTS = [
    rows(_served("a", 0, None), _served("b", 20, None)),
    rows(
        _served("a", 0, "s"),
        _served("b", 20, "s"),
        _served("c", 5, "t") | {"agent_context": {"session_id": "t", "parent_session_id": "s"}},
        {
            "schema": "dynamo.request.trace.v1",
            "event_type": "tool_end",
            "agent_context": {"session_id": "s"},
            "tool": {"claude": {"source_request_id": "a", "child_session_id": "t", "execution_mode": "blocking"}},
        },
    ),
]
_DYNAMO = {"worker_id": 3, "storage_tier": "device", "residency_domain": "x", "event": {"event_id": 0, "dp_rank": 0}}
_BLOCKS = [{"block_hash": 5, "tokens_hash": 6, "mm_extra_info": None}]
_DATA = [{"stored": {"parent_hash": None, "start_position": 0, "blocks": _BLOCKS}}]
_DATA += [{"removed": {"block_hashes": [5]}}, "cleared"]
DYNAMO_EVENTS = rows(
    *(_DYNAMO | {"event": {"event_id": idx, "dp_rank": 0, "data": data}} for idx, data in enumerate(_DATA))
)
NEUTRAL = rows(
    {"worker_id": "w0", "kind": "Joined"},
    {
        "worker_id": "w0",
        "dp_rank": 0,
        "event_id": 0,
        "ts_ms": 0.5,
        "tier": "Device",
        "kind": "Stored",
        "block_hashes": [1, 2],
        "parent_hash": None,
        "start_position": 0,
        "token_hashes": [7, 8],
        "token_ids": [1, 2, 3, 4],
        "block_size": 2,
        "extra_keys": [["a", None], None],
        "group_idx": 0,
        "replayed": False,
    },
    {"worker_id": "w0", "dp_rank": 0, "event_id": 1, "kind": "Removed", "tier": "HostPinned", "block_hashes": ["0x1f"]},
    {"worker_id": "w0", "dp_rank": 0, "event_id": 2, "kind": "Cleared"},
    {
        "worker_id": "w0",
        "dp_rank": 0,
        "kind": "Snapshot",
        "last_event_id": 2,
        "runs": [{"tier": "Device", "block_hashes": [{"bytes": "00ff"}], "parent_hash": 3, "start_position": 1}],
    },
)


@functools.cache
def batches() -> list[bytes]:
    """vLLM payloads, in both shapes."""
    lines = [line for line in NEUTRAL.splitlines() if b"Stored" in line or b"Cleared" in line or b"Removed" in line]
    path = scratch() / "batches.jsonl"
    path.write_bytes(b"\n".join(lines).replace(b'"0x1f"', b"31") + b"\n")
    return [item.message.payload for shape in Shape for item in outgoing(path, shape=shape)]


_SMALL = """
name: small
engine:
  mode: aggregated
  workers:
    aggregated:
      parallelism: {replicas: 2}
      kv_cache:
        block_size: 4
        bytes_per_token: 1000
        capacity: {type: fixed, blocks: 16}
        host_offload: {scope: cluster_shared, num_host_blocks: 16}
      timing: {type: fixed, prefill_ms: 2.0, decode_ms: 1.0}
traffic:
  source: {type: synthetic-session, new_input_tokens_per_turn: 8, output_tokens_per_turn: 3,
    session: {turns: 2, shared_prefix_ratio: 0.5, prefix_groups: 1, inter_turn_delay_ms: 1.5}}
  load: {type: poisson, sessions_per_second: 100.0}
  stop: {sessions: 3}
router: {policy: dynamo_kv, kv_event_lag_ms: 0.5, replicas: 2, load_sync_ms: 1.0}
faults:
  recovery: {mode: replay, heartbeat_ms: 5.0}
  plan: [{type: loss, from_ms: 0.0, until_ms: 20.0, probability: 0.5}, {type: router_restart, from_ms: 3, until_ms: 4}]
evaluation: {sla: {ttft_ms: 10.0, itl_ms: 5}}
variants:
  other: {router.policy: round_robin, engine.workers.aggregated.kv_cache.host_offload: null}
  again: {seed: 5}
expect:
  - {report: "totals.passes", at_least: 1}
  - {events: KvStored, variant: other, minus: again, since_ms: 0.5, below: 1000}
""".replace("KvStored", "BlocksStored")
_PAIR = """
engine:
  mode: disaggregated
  workers:
    prefill: &w
      scheduler: {max_batched_tokens: 64, max_sequences: 4, chunked_prefill: true, preemption_mode: fifo}
      kv_cache: {block_size: 4, bytes_per_token: 1000, capacity: {type: fixed, blocks: 32}}
      timing: {type: polynomial, speedup_ratio: 2.0}
    decode: *w
  kv_transfer: {bytes_per_token: 1000, bandwidth_gb_per_second: 5.0, timing_mode: full_prompt}
traffic:
  source: {type: synthetic, input_tokens: 20, output_tokens: 3}
  load: {type: constant_rate, interval_ms: 2.0}
  stop: {requests: 3, max_virtual_time_ms: 100}
router: {policy: least_loaded, options: {}}
"""
_PLAYS = """
engine:
  model: m
  workers:
    aggregated:
      kv_cache: {block_size: 4, capacity: {type: fixed, blocks: 64}}
      timing: {type: fixed, prefill_ms: 2.0, decode_ms: 1.0}
traffic:
  source: {type: trace, format: agentic_mooncake, paths: [plays.jsonl]}
  load: {type: trace_timestamps, speedup: 2.0, agentic_lanes: 2, agentic_snapshot: {seed: 3}, agentic_warmup: true,
    agentic_profile: {duration_seconds: 0.05, response_grace_seconds: 0.01, cancel_drain_seconds: 0.01}}
"""


@functools.cache
def scenarios() -> list[bytes]:
    """Small scenarios that run in milliseconds, and those of the library that read nothing else."""
    (scratch() / "plays.jsonl").write_bytes(AGENTIC)
    own = [text.encode() for text in (_SMALL, _PAIR, _PLAYS)]
    return own + [path.read_bytes() for path in sorted(LIBRARY.glob("faults-l*.yaml"))]


@functools.cache
def small_runs() -> list[Path]:
    """Run folders of the small scenarios."""
    made = []
    for idx, data in enumerate(scenarios()[:3]):
        (scratch() / "small.yaml").write_bytes(data)
        made.append(scratch() / f"run-{idx}")
        run_scenario(load_scenario(scratch() / "small.yaml"), made[-1])
    return made


@functools.cache
def logs() -> list[bytes]:
    return [(folder / "events.g2log").read_bytes() for folder in small_runs()]


@functools.cache
def captures() -> list[bytes]:
    path = scratch() / "sample.g2cap"
    with CaptureWriter(path, version="1") as writer:
        writer.opened(StreamOpened(stream="w0", endpoint="tcp://a:1", replay_endpoint=None, dp_rank=0))
        for number, payload in enumerate(batches()):
            frames = [b"kv@pod@m", number.to_bytes(8, "big"), payload]
            writer.message(number / 2, "w0", frames, replayed=False)
            writer.message(number / 2, "w0", [b"", *frames], replayed=True)
    return [path.read_bytes()]


def run_small(data: bytes) -> None:
    """Loads a scenario and runs it for a while; a run may fail by name, but not blow up."""
    path = scratch() / "run.yaml"
    path.write_bytes(data)
    scenario = load_scenario(path)
    try:
        run_scenario(scenario, None)
    except ConfigError:
        raise
    except SimError:
        pass


def read_batch(data: bytes) -> None:
    """Whatever is taken is the same when written and read again."""
    batch = decode_batch(data)
    for shape in Shape:
        try:
            again = encode_batch(batch, shape)
        except WireError as refused:
            raise Fault(f"what was read cannot be written: {refused}") from refused
        # The two shapes name fields that are not known by key and by place.
        if decode_batch(again) != batch and not any(event.more for event in batch.events):
            raise Fault(f"written and read again it differs: {decode_batch(again)} was {batch}")


def read_frames(data: bytes) -> None:
    """Frames, each behind its length in one byte."""
    frames, at = [], 0
    while at < len(data):
        frames.append(data[at + 1 : at + 1 + data[at]])
        at += 1 + data[at]
    for read in (read_message, read_replay_answer, read_replay_request):
        with contextlib.suppress(WireError):
            read(frames)


def frame_samples() -> list[bytes]:
    message = read_message([b"topic", bytes(8), b"\x93\x00\x90\xc0"])
    layouts = (message_frames(message), [b"", *message_frames(message)], [b"", bytes(8)], [b"", b"\xff" * 8, b""])
    return [b"".join(bytes([len(frame)]) + frame for frame in frames) for frames in layouts]


def read_lines(decode: Callable[[Any], Any], encode: Callable[[Any], str], data: bytes) -> None:
    """Each line that is taken, and can be written in its form, is the same when it is read again."""
    for line in data.splitlines():
        try:
            item = decode(json.loads(line))
            text = encode(item)
        except (ValueError, RecursionError, WireError):
            continue
        if (again := decode(json.loads(text))) != item:
            raise Fault(f"written and read again it differs: {again} was {item}")


def option_text(option: Callable[[str], Any]) -> Callable[[bytes], None]:
    """An option of the command line; a system hands out bytes that are no text as surrogates, and none with NUL."""
    return lambda data: option(data.replace(b"\0", b"").decode("utf-8", "surrogateescape"))


def policy_option(text: str) -> None:
    """``--policy TARGET,OPTION=VALUE`` of a built-in policy."""
    scenario = Scenario.from_dict(yaml.safe_load(_PAIR))
    target, *rest = text.split("\x1f")
    if ":" in target.partition(",")[0] or target.partition(",")[0].endswith(".py"):
        return  # that names code, and is meant to run it
    with_policy(scenario, parse_choice(target, rest))


def sweep_setting(text: str) -> None:
    for path, values in read_settings([text]).items():
        for value in values[:2]:
            with contextlib.suppress(ConfigError):
                load_scenario_with(path, value)


def load_scenario_with(path: str, value: Any) -> None:
    """The small scenario with another value at a dotted path, as ``g2sim sweep`` makes it."""
    from g2sim.scenarios.schema import from_file
    from g2sim.scenarios.yaml_source import read_yaml

    document = read_yaml(_PAIR, "small.yaml").overridden({path: value}, ())
    from_file(document, scratch() / "small.yaml")


def of_run(*template: str) -> Callable[[bytes], None]:
    """A command on a small run; TEXT stands for what is fuzzed. Refusals need not name a file."""

    def call(text: str) -> None:
        words = [text if word == "TEXT" else str(small_runs()[0]) if word == "RUN" else word for word in template]
        run_command(words, may_fail=True)

    return option_text(call)


def words(*texts: str) -> Callable[[], list[bytes]]:
    return lambda: [text.encode() for text in texts]


def _trace(name: str, sample: Callable[[], list[bytes]], form: Form = Form.LINES) -> Target:
    suffix = "json" if form is Form.JSON else "jsonl"
    return Target(f"trace-{name}", form, sample, commands(f"t.{suffix}", f"check --format {name} FILE"))


def read_table(data: bytes) -> None:
    """A table, and a time inside, before and behind it."""
    path = scratch() / "table.csv"
    path.write_bytes(data)
    table = read_pass_table(path, "table.csv")
    for tokens in (1, 100, 2**40):
        for value in (
            *([table.prefill_ms(3, tokens + 50, 50)] if "prefill" in table.phases else []),
            *([table.decode_ms(3, tokens)] if "decode" in table.phases else []),
        ):
            if not 0.0 <= value < math.inf:
                raise Fault(f"a pass of {tokens} tokens takes {value} ms")


def publish_lines(data: bytes) -> None:
    path = scratch() / "p.jsonl"
    path.write_bytes(data)
    for item in outgoing(path):
        decode_batch(item.message.payload)


_READ_LOG = (
    "report FILE --json",
    "validate FILE --json",
    "inspect FILE --at 10 --json",
    "inspect FILE",
    "events FILE --worker agg-0",
    "export FILE --prometheus",
    "explain FILE 1",
    "timeline FILE --out OUT --overwrite",
    "view FILE --out OUT --overwrite",
)

TARGETS = [
    Target("scenario-yaml", Form.YAML, scenarios, commands("s.yaml", "check FILE")),
    Target(
        "scenario-json",
        Form.JSON,
        lambda: [json.dumps(yaml.safe_load(data)).encode() for data in scenarios()],
        commands("s.json", "check FILE"),
    ),
    Target("scenario-run", Form.YAML, scenarios, run_small, weight=0.5),
    _trace("mooncake", lambda: [MOONCAKE, *head(3, "tests/oracle/traces/mooncake/*.jsonl")()]),
    _trace("mooncake-delta", lambda: [MOONCAKE]),
    _trace("agentic_mooncake", lambda: [AGENTIC]),
    _trace("applied_compute_agentic", lambda: [APPLIED]),
    _trace("dynamo", lambda: DYNAMO_REQUESTS),
    _trace("weka", lambda: [WEKA], Form.JSON),
    _trace("weka", lambda: [WEKA, WEKA + WEKA.replace(b'"p"', b'"q"')]),
    Target(
        "pass-table",
        Form.TEXT,
        lambda: [b"\n".join(data.splitlines()[:30]) for data in files("tables/*.csv", folder=LIBRARY)()],
        read_table,
    ),
    Target("log", Form.LOG, logs, commands("l.g2log", *_READ_LOG, may_fail=True), weight=0.3),
    Target(
        "log-diff",
        Form.LOG,
        lambda: logs()[:1],
        commands("l.g2log", f"diff {scratch()}/run-0 FILE", may_fail=True),
        weight=0.5,
    ),
    Target("capture", Form.LOG, captures, commands("c.g2cap", "validate FILE --json", may_fail=True)),
    Target(
        "neutral",
        Form.LINES,
        lambda: [NEUTRAL, *files("*.jsonl", folder=STREAMS)()],
        commands("n.jsonl", "validate FILE --json", "validate FILE --mode dynamo --copies counted", may_fail=True),
    ),
    Target(
        "neutral-line",
        Form.LINES,
        lambda: [NEUTRAL],
        functools.partial(read_lines, wire_neutral.decode, wire_neutral.encode),
    ),
    Target(
        "dynamo-events", Form.LINES, lambda: [DYNAMO_EVENTS], commands("d.jsonl", "validate FILE --json", may_fail=True)
    ),
    Target(
        "dynamo-line",
        Form.LINES,
        lambda: [DYNAMO_EVENTS],
        functools.partial(read_lines, wire_dynamo.decode, wire_dynamo.encode),
    ),
    Target("vllm-batch", Form.MSGPACK, batches, read_batch),
    Target("vllm-frames", Form.TEXT, frame_samples, read_frames),
    Target("publish", Form.LINES, lambda: [NEUTRAL.replace(b'"0x1f"', b"31")], publish_lines),
    Target(
        "policy",
        Form.TEXT,
        words(
            "dynamo_kv,overlap_score_weight=2.0,router_temperature=0.5",
            "least_loaded",
            "kv_router\x1frouter_queue_threshold=0.5",
        ),
        option_text(policy_option),
    ),
    Target(
        "sweep-set",
        Form.TEXT,
        words(
            "router.policy=round_robin,least_loaded",
            "engine.workers.prefill.parallelism.replicas=1,2",
            "traffic.stop.requests=[1, 2]",
        ),
        option_text(sweep_setting),
    ),
    Target(
        "host-blocks",
        Form.TEXT,
        words("0,64,1k", "2M"),
        of_run("curve", str(scratch() / "missing.yaml"), "--host-blocks", "TEXT"),
    ),
    Target("inspect-at", Form.TEXT, words("10", "1.5e1", "0"), of_run("inspect", "RUN", "--at", "TEXT")),
    Target("inspect-record", Form.TEXT, words("10", "0"), of_run("inspect", "RUN", "--record", "TEXT")),
    Target(
        "events-topic", Form.TEXT, words("BlocksStored", "kv.sto", "wk"), of_run("events", "RUN", "--topic", "TEXT")
    ),
    Target("events-worker", Form.TEXT, words("agg-0", "aggregated-1/0"), of_run("events", "RUN", "--worker", "TEXT")),
    Target("events-request", Form.TEXT, words("1", "20"), of_run("events", "RUN", "--request", "TEXT")),
    Target("events-since", Form.TEXT, words("1", "20.5"), of_run("events", "RUN", "--since", "TEXT")),
    Target("explain-request", Form.TEXT, words("1", "session_0", "request_1"), of_run("explain", "RUN", "TEXT")),
    Target("capacity", Form.TEXT, words("device=5", "host_pinned=64"), of_run("validate", "RUN", "--capacity", "TEXT")),
    Target("select", Form.TEXT, words("KV001", "KV1,KV2", "residency"), of_run("validate", "RUN", "--select", "TEXT")),
    Target("endpoint", Form.TEXT, words("w0=tcp://127.0.0.1:1", "ipc:///nowhere"), of_run("validate", "TEXT", "RUN")),
    Target(
        "variant",
        Form.TEXT,
        words("other", "again"),
        of_run("run", str(scratch() / "small.yaml"), "--variant", "TEXT", "--seed", "x"),
    ),
]
