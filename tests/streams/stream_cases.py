"""Small event streams for tests: files in data/, and what a validator makes of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from g2sim.actors.kv import wire_neutral
from g2sim.actors.kv.wire import Hash
from g2sim.scenarios.stream_sources import check_files, open_stream
from g2sim.scenarios.validate import Options, Source, Validator, Verdict

DATA = Path(__file__).parent / "data"
DEVICE, HOST = "device", "host_pinned"


def path_of(name: str) -> Path:
    return DATA / f"{name}.jsonl"


class Steps:
    """A file fed line by line, so that a test can look between lines."""

    def __init__(self, name: str, **options: Any) -> None:
        self.validator = Validator(Options(**options))
        source, items = open_stream(path_of(name))
        self.validator.begin(source)
        self._items = list(items)
        self._at = 0

    def take(self, count: int | None = None) -> Steps:
        """Feed the next lines, or all that are left."""
        stop = len(self._items) if count is None else self._at + count
        for number, item in self._items[self._at : stop]:
            self.validator.feed(number, item)
        self._at = stop
        return self

    def match(self, chain: Iterable[Hash], tier: str | None = None, worker: str = "w0", rank: int = 0) -> int:
        return self.validator.state(worker, rank).match(list(chain), tier)

    def resident(self, tier: str = DEVICE, worker: str = "w0") -> set[Hash]:
        return self.validator.state(worker).resident(tier)

    def finish(self) -> list[Verdict]:
        self.take()
        return self.validator.finish()

    def codes(self) -> list[str]:
        """Codes and severities found so far, in order."""
        return [f"{finding.code} {finding.severity}" for finding in self.validator.findings.kept]

    def texts(self) -> list[str]:
        return [finding.text() for finding in self.validator.findings.kept]


def checked(path: Path, **options: Any) -> tuple[Validator, list[Verdict]]:
    validator = Validator(Options(**options))
    check_files([path], validator)
    return validator, validator.finish()


def line(event_id: int, kind: str = "Stored", hashes: Iterable[Any] = (), **more: Any) -> dict[str, Any]:
    """A neutral line of worker w0 as plain values."""
    made: dict[str, Any] = {"worker_id": "w0", "dp_rank": 0, "event_id": event_id, "ts_ms": 0, "tier": "Device"}
    made["kind"] = kind
    if kind != "Cleared":
        made["block_hashes"] = list(hashes)
    if kind == "Stored":
        made |= {"parent_hash": None, "start_position": 0}
    return made | more


def fed(lines: Iterable[dict[str, Any]], form: str = "neutral", **options: Any) -> Validator:
    """A validator that was given neutral lines."""
    validator = Validator(Options(**options))
    validator.begin(Source("lines", form, "line"))
    for number, value in enumerate(lines, 1):
        validator.feed(number, wire_neutral.decode(json.loads(json.dumps(value))))
    return validator
