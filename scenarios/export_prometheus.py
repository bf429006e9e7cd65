"""A run's report in the Prometheus text format, with the names in snake case and units in them.

Owns: which figures become which metrics. Refuses to know: how they were counted (``report``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from g2sim.scenarios.report import Report

_PREFIX = "g2sim"


def prometheus_text(report: Report) -> str:
    """One gauge for each number of the report; ranks, host pools and statuses are labels. Ends with a line end."""
    run = {"scenario": report["scenario"], "seed": str(report["seed"])}
    metrics: dict[str, list[str]] = {}

    def add(name: str, value: Any, **labels: str) -> None:
        if isinstance(value, int | float):
            text = str(int(value)) if isinstance(value, bool) else repr(value)
            metrics.setdefault(f"{_PREFIX}_{name}", []).append(f"{_labels({**run, **labels})} {text}")

    add("run_finished", report["finished"])
    for name, value in report["summary"].items():
        add(f"summary_{name}", value)
    for status, value in report["requests"].items():
        add("requests", value, status=status)
    for part, value in report["ttft_parts_mean_ms"].items():
        add("ttft_part_mean_ms", value, part=part)
    for rank in report["workers"]:
        labels = {key: str(rank[key]) for key in ("pool", "worker", "dp_rank")}
        for name, value in rank.items():
            if name not in labels:
                add(f"rank_{name}", value, **labels)
    for pool in report["g2_pools"]:
        for name, value in pool.items():
            add(f"g2_{name}", value, pool=pool["pool"])
    lines = []
    for name, samples in metrics.items():
        lines += [f"# TYPE {name} gauge", *(f"{name}{sample}" for sample in samples)]
    return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
