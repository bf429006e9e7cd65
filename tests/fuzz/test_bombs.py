"""Small input that asks for much: refused by name, in a process that may take 1.5 GiB and half a minute at most."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgpack
import pytest
import yaml
from mutations import frames_of, log_of
from targets import AGENTIC, APPLIED, DYNAMO_EVENTS, DYNAMO_REQUESTS, MOONCAKE, NEUTRAL, WEKA

from g2sim.scenarios.run import run_scenario
from g2sim.scenarios.schema import Scenario
from g2sim.scenarios.stream_sources import check_files
from g2sim.scenarios.validate import Options, Validator

MEMORY_BYTES = 1536 * 2**20
CPU_S = 30
SMALL: dict[str, Any] = {
    "engine": {
        "workers": {
            "aggregated": {
                "kv_cache": {"block_size": 16, "capacity": {"type": "fixed", "blocks": 64}},
                "timing": {"type": "fixed", "prefill_ms": 1.0, "decode_ms": 1.0},
            }
        }
    },
    "traffic": {
        "source": {"type": "synthetic", "input_tokens": 64, "output_tokens": 4},
        "load": {"type": "concurrency", "concurrency": 4},
        "stop": {"requests": 5},
    },
}
AGG = "engine.workers.aggregated."


def told(folder: Path, *arguments: object) -> tuple[int, str]:
    """Exit code and stderr of a command in a bounded process."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))

    command = [sys.executable, "-m", "g2sim.scenarios.cli", *map(str, arguments)]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, timeout=300, preexec_fn=limit
    )
    assert "Traceback" not in done.stderr, done.stderr[-2000:]
    assert len(done.stderr) < 10_000 + 2 * sum(len(str(argument)) for argument in arguments)
    return done.returncode, done.stderr


def changed(path: str, value: Any) -> str:
    values = json.loads(json.dumps(SMALL))
    *outer, last = path.split(".")
    inner = values
    for key in outer:
        inner = inner[key]
    inner[last] = value
    return yaml.safe_dump(values)


ALIASES = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)
DIGITS = "9" * 100_000
YAML_BOMBS = {
    "aliases of aliases": (ALIASES, "more than 20000 values"),
    "deep lists": ("a: " + "[" * 100_000, "nested more than 32 deep"),
    "deep mappings": ("a: " + "{x: " * 50_000, "nested more than 32 deep"),
    "a key twice": ("seed: 1\nseed: 2\n", "key 'seed' is given twice"),
    "a long integer": (f"seed: {DIGITS}", "is not a value of type int"),
    "a long hexadecimal integer": (f"seed: 0x{'f' * 100_000}", "got an integer of thousands of digits"),
    "an object of Python": ("seed: !!python/object/apply:os.system ['touch ran']", "python/object/apply"),
    "a megabyte": ("# " + "x" * 1_000_000, "the scenario is too large"),
    "many workers": (changed(AGG + "parallelism", {"replicas": 10**9}), "ranks in all"),
    "many blocks": (changed(AGG + "kv_cache.capacity.blocks", 10**18), "at most 2147483647"),
    "many blocks in all": (changed(AGG + "kv_cache.capacity.blocks", 2**31 - 1), "device blocks in all"),
    "a long prompt": (changed("traffic.source.input_tokens", 10**15), "tokens from 1 to 10000000"),
    "many requests": (changed("traffic.stop.requests", 2**31 - 1), "requests; got 2147483647"),
    "a seed beyond 64 bits": ("seed: 18446744073709551616\n" + yaml.safe_dump(SMALL), "from 0 to 2**64 - 1"),
    "a rate without an interval": (
        changed("traffic.load", {"type": "constant_rate", "requests_per_second": 1e-308}),
        "at most 2**53 ms",
    ),
    "a time that overflows": (changed(AGG + "timing.decode_ms", 1e308), "from 0 to 2**53"),
}


def test_scenarios_that_blow_up_are_refused_with_file_and_line(tmp_path: Path) -> None:
    for name, (text, _) in YAML_BOMBS.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    code, stderr = told(tmp_path, "check", *(f"{name}.yaml" for name in YAML_BOMBS))
    assert code == 2
    lines = stderr.splitlines()
    for name, (_, said) in YAML_BOMBS.items():
        # Some lack sections too, which is told below.
        assert any(f"{name}.yaml" in line and said in line for line in lines), name
    assert {item.suffix for item in tmp_path.iterdir()} == {".yaml"}, "nothing was run"


def row(sample: bytes, line: int, **changes: Any) -> bytes:
    """A sample with members of one row changed."""
    lines = sample.splitlines()
    lines[line] = json.dumps(json.loads(lines[line]) | changes).encode()
    return b"\n".join(lines) + b"\n"


TRACES: dict[str, tuple[bytes, bytes]] = {
    "mooncake": (MOONCAKE, row(MOONCAKE, 0, output_length=10**15)),
    "mooncake-delta": (MOONCAKE, row(MOONCAKE, 1, input_tokens=10**15)),
    "agentic_mooncake": (AGENTIC, row(AGENTIC, 2, input_length=10**15)),
    "applied_compute_agentic": (APPLIED, row(APPLIED, 0, num_turns=10**15)),
    "weka": (WEKA, WEKA.replace(b'"in": 8', b'"in": 1000000000000000')),
    "dynamo": (
        DYNAMO_REQUESTS[0],
        DYNAMO_REQUESTS[0].replace(b'"input_length": 8', b'"input_length": 1000000000000000'),
    ),
}


@pytest.mark.parametrize("name", TRACES)
def test_a_line_too_long_a_value_too_deep_and_a_length_too_large_are_refused(name: str, tmp_path: Path) -> None:
    sample, large = TRACES[name]
    with (tmp_path / "long.jsonl").open("wb") as file:
        file.write(sample)
        file.write(b'{"x": [')
        for _ in range(65 if name == "weka" else 17):
            file.write(b"1," * (2**20 // 2))
    (tmp_path / "deep.jsonl").write_bytes(sample + b'{"x": ' + b"[" * 100_000 + b"\n")
    (tmp_path / "large.jsonl").write_bytes(large)
    code, stderr = told(tmp_path, "check", "--format", name, "long.jsonl", "deep.jsonl", "large.jsonl")
    assert code == 2
    long, deep, wide, *_ = stderr.splitlines()
    rows = sample.count(b"\n")
    assert "long.jsonl: the file is too large" in long or f"long.jsonl:{rows + 1}: the line is too long" in long
    assert f"deep.jsonl:{rows + 1}: values are nested too deeply" in deep
    assert "large.jsonl:" in wide


@pytest.mark.parametrize("sample", [NEUTRAL, DYNAMO_EVENTS], ids=["neutral", "dynamo"])
def test_a_line_of_40_mb_and_a_deep_one_in_a_stream_are_findings(sample: bytes, tmp_path: Path) -> None:
    """What is good around them is checked all the same."""
    path = tmp_path / "n.jsonl"
    with path.open("wb") as file:
        file.write(sample)
        for _ in range(40):
            file.write(b"[" * 2**20)
        file.write(b"\n" + b"[" * 100_000 + b"\n" + b'{"x": ' + b"9" * 100_000 + b"}\n")
    code, stderr = told(tmp_path, "validate", path)
    assert (code, stderr) == (1, "")


MSGPACK_BOMBS = {
    "an array of 2**32 - 1": b"\xdd\xff\xff\xff\xff",
    "a map of 2**32 - 1": b"\xdf\xff\xff\xff\xff",
    "bytes of 2**32 - 1": b"\xc6\xff\xff\xff\xff",
    "arrays in arrays": b"\xdd\x00\x10\x00\x00" * 200_000,
    "100,000 deep": b"\x91" * 100_000,
    "an extension": msgpack.packb([0.0, [msgpack.ExtType(5, b"x")], None]),
    "a time stamp": b"\xd6\xff\x00\x00\x00\x00",
    "a map as a key": b"\x81\x81\x00\x00\x00",
}


def test_msgpack_that_claims_more_than_it_has_is_a_finding_in_logs_and_messages(tmp_path: Path) -> None:
    run_scenario(Scenario.from_dict(SMALL), tmp_path / "run")
    frames = frames_of((tmp_path / "run" / "events.g2log").read_bytes())
    header = {"schema": 1, "program": "g2sim", "version": "1", "seed": 0, "scenario": None}
    header |= {"events": {"cap.msg": [1, "stream", "replayed", "frames"]}}
    files = []
    for name, payload in MSGPACK_BOMBS.items():
        message = ["cap.msg", 0.0, "record", 0, "w0", False, [b"", bytes(8), payload]]
        files += [tmp_path / f"{name}.g2log", tmp_path / f"{name}.g2cap"]
        files[-2].write_bytes(log_of([*frames[:5], payload, *frames[5:]]))
        files[-1].write_bytes(log_of([msgpack.packb(header), msgpack.packb(message)]))
    code, stderr = told(tmp_path, "validate", *files)
    assert (code, stderr) == (1, "")
    code, stderr = told(tmp_path, "report", tmp_path / "100,000 deep.g2log")
    assert code == 1
    assert "deep.g2log: record 4 at byte " in stderr
    validator = Validator(Options())
    check_files(files, validator)
    bad = {
        Path(finding.where.partition(":")[0]).name
        for finding in validator.findings.kept
        if finding.code in ("KV001", "KV002")
    }
    assert bad == {file.name for file in files}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sweep", "s.yaml", "--set", f"traffic.stop.requests=[{'1, 2, ' * 9}{DIGITS}]"], "is not a value of type int"),
        (["sweep", "s.yaml", "--set", f"router.policy={'[' * 50_000}"], "nested more than 32 deep"),
        (["sweep", "s.yaml", *(f"--set=engine.a{n}=0,1" for n in range(60))], "too many points"),
        (["curve", "s.yaml", "--host-blocks", DIGITS], "numbers of blocks"),
        (
            ["run", "s.yaml", "--policy", "dynamo_kv", "--policy-option", f"overlap_score_credit=0x{'f' * 50_000}"],
            "digits",
        ),
        (["run", "s.yaml", "--seed", DIGITS], "--seed"),
        (["run", "s.yaml", "--out", "x" * 5000], "File name too long"),
        (["report", "x" * 5000], "too long"),
        (["check", "x" * 5000], "too long"),
        (["test", "s.yaml", "--junit", "x" * 5000], "too long"),
        (["inspect", "s.yaml", "--at", DIGITS], "not a finite number"),
        (["validate", "s.yaml", "--capacity", f"device={DIGITS}"], "--capacity"),
    ],
)
def test_options_beyond_reason_are_refused(arguments: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(SMALL))
    code, stderr = told(tmp_path, *arguments)
    assert code == 2
    assert said in stderr
    assert [item.name for item in tmp_path.iterdir()] == ["s.yaml"]
