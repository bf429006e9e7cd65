"""The command line, the Python API and raw JSON are answered by one set of rules, in the same words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from g2sim.bus.errors import ConfigError
from g2sim.scenarios.cli import main
from g2sim.scenarios.schema import Scenario

WORKER: dict[str, Any] = {
    "parallelism": {"replicas": 2},
    "kv_cache": {
        "block_size": 4,
        "bytes_per_token": 1000,
        "capacity": {"type": "fixed", "blocks": 64},
        "host_offload": {"num_host_blocks": 64, "scope": "cluster_shared"},
    },
    "timing": {"type": "fixed", "prefill_ms": 2.0, "decode_ms": 1.0},
}

REFUSED: list[tuple[str, Any]] = [
    *(("engine.workers.prefill.parallelism.replicas", count) for count in (0, -3, True, False, 2.0, "2", None)),
    *(("engine.workers.decode.parallelism.replicas", count) for count in (0, -1, True, 1.5, "two")),
    ("engine.workers.decode.parallelism.replicas", ...),
    ("engine.backend", "sglang"),
    ("engine.backend", "trtllm"),
    ("engine.mode", "online"),
    ("engine.workers.prefill.parallelism.attention_data", 2),
    ("engine.workers.decode.parallelism.attention_data", 2),
    ("engine.workers.prefill.startup_seconds", 3.0),
    ("planner", {"type": "load"}),
    ("engine.nextn", 1),
    ("engine.workers.decode.kv_cache.g3_offload", {"scope": "worker_local", "num_g3_blocks": 8}),
    ("engine.workers.prefill.kv_cache.host_offload.scope", "rack"),
    ("traffic.load.agentic_profile", {"duration_seconds": 0}),
    ("traffic.load.agentic_snapshot", {"seed": -1}),
    ("traffic.load.agentic_lanes", None),
]


def to_yaml(values: Any) -> str:
    """YAML with keys in the order given, which messages show."""
    return yaml.safe_dump(values, sort_keys=False)


def scenario_with(path: str, value: Any) -> dict[str, Any]:
    """Agentic traffic over a shared G2 on separate roles, with one field changed; ``...`` leaves it out."""
    load = {"type": "trace_timestamps", "agentic_lanes": 2, "agentic_snapshot": {"seed": 1}, "agentic_profile": {}}
    values: dict[str, Any] = {
        "engine": {"model": "m", "mode": "disaggregated", "workers": {"prefill": WORKER, "decode": WORKER}},
        "traffic": {"source": {"type": "trace", "format": "weka", "paths": ["corpus"]}, "load": load},
    }
    values = json.loads(json.dumps(values))
    *outer, last = path.split(".")
    target = values
    for key in outer:
        target = target[key]
    target.pop(last, None)
    if value is not ...:
        target[last] = value
    return values


def test_what_is_changed_below_is_otherwise_taken() -> None:
    assert len(Scenario.from_dict(scenario_with("name", "ok")).deployment.pools) == 2


@pytest.mark.parametrize(("path", "value"), REFUSED, ids=lambda item: str(item))
def test_cli_api_and_raw_json_refuse_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], path: str, value: Any
) -> None:
    values = scenario_with(path, value)
    with pytest.raises(ConfigError) as caught:
        Scenario.from_dict(values)
    message = str(caught.value)
    assert caught.value.field is not None
    assert path.startswith(caught.value.field) or caught.value.field.startswith(path) or value is None
    assert "allowed: " in message
    if path.endswith("replicas"):
        assert "any positive integer number of workers per role" in message
    for name, dump in (("spec.json", json.dumps), ("spec.yaml", to_yaml)):
        file = tmp_path / name
        file.write_text(dump(values))
        with pytest.raises(SystemExit) as ended:
            main(["run", str(file), "--out", str(tmp_path / "out")])
        said = capsys.readouterr()
        assert ended.value.code == 2
        assert said.out == ""
        assert without_place(said.err, file) == message
        assert not (tmp_path / "out").exists()


def without_place(stderr: str, file: Path) -> str:
    """The error message without "error: file:line: "."""
    (line,) = [line for line in stderr.splitlines() if line.startswith("error: ")]
    rest = line.removeprefix(f"error: {file}:")
    number, _, message = rest.partition(": ")
    return message if number.isdigit() else rest.strip()
