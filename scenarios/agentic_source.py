"""From agentic traffic in a scenario to its driver, and what the report says of it from the start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs

from g2sim.actors.traffic.agentic import AgenticDriver
from g2sim.actors.traffic.agentic_mooncake import load_agentic_mooncake
from g2sim.actors.traffic.graph import AgenticCorpus
from g2sim.actors.traffic.instances import SnapshotDriver
from g2sim.actors.traffic.weka import load_weka
from g2sim.scenarios.schema import TimestampBasis, TimestampsLoad, TraceFormat, TraceSource


def read_corpus(source: TraceSource, path: Path) -> AgenticCorpus:
    """Read a trace of plays. Raises: ConfigError with file and line."""
    if source.format is TraceFormat.WEKA:
        basis = source.nested_timestamp_basis or TimestampBasis.AUTO
        return load_weka(path, basis=basis.value, block_size=source.block_size_tokens, strict=source.strict)
    return load_agentic_mooncake(path)


def agentic_driver(corpus: AgenticCorpus, load: TimestampsLoad) -> AgenticDriver | SnapshotDriver:
    """The driver that a load asks for. Raises: ConfigError if it does not go with the corpus."""
    if load.snapshot_seed is None or load.agentic_lanes is None:
        return AgenticDriver(corpus, speedup=load.speedup, lanes=load.agentic_lanes)
    return SnapshotDriver(
        corpus,
        seed=load.snapshot_seed,
        lanes=load.agentic_lanes,
        speedup=load.speedup,
        warmup=load.agentic_warmup,
        profile=load.agentic_profile,
    )


def play_ids(corpus: AgenticCorpus, driver: AgenticDriver | SnapshotDriver) -> tuple[str, ...]:
    """Plays in the order in which outcomes are listed, as far as they are known."""
    if isinstance(driver, SnapshotDriver):
        return driver.play_ids
    return tuple(play.play_id for play in corpus.graph.plays)


def agentic_facts(
    corpus: AgenticCorpus,
    driver: AgenticDriver | SnapshotDriver,
    load: TimestampsLoad,
    *,
    trace_format: TraceFormat,
    model: str | None,
) -> dict[str, Any]:
    """Fields for the report's summary.

    Instances, preparation and profile are described as they are before the run; ``phases`` folds in what happens.
    """
    graph, models = corpus.graph, list(corpus.source_models)
    described = {
        "source": {"format": corpus.source_format, "digest": corpus.source_digest},
        "graph_digest": driver.graph_digest,
        "block_size": corpus.block_size_tokens,
        "node_count": len(graph.nodes),
        "play_count": len(graph.plays),
        "source_models": models,
    }
    facts: dict[str, Any] = {
        "agentic_graph": described,
        "agentic_model_projection": {
            "policy": "project_to_configured_target",
            "source_models": models,
            "target_model": model,
        },
        "agentic_input_format": trace_format.value,
        "agentic_qualification": "functional_only",
    }
    if load.agentic_lanes is not None:
        facts["agentic_lanes"] = load.agentic_lanes
    if corpus.nested_basis is not None:
        facts["weka_nested_timestamp_basis"] = str(corpus.nested_basis)
    if isinstance(driver, SnapshotDriver):
        facts["agentic_snapshots"] = driver.described()
        if driver.prepares:
            facts["agentic_phases"] = driver.preparation_described()
        if load.agentic_profile is not None:
            facts["agentic_profile"] = attrs.asdict(load.agentic_profile)
    return facts
