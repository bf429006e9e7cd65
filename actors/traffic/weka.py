"""Weka traces (recorded coding-agent sessions) as an agentic corpus."""

from __future__ import annotations

from pathlib import Path

from g2sim.actors.traffic.graph import AgenticCorpus, RequestGraph
from g2sim.actors.traffic.weka_lowering import lower_play
from g2sim.actors.traffic.weka_reader import read_weka


def load_weka(path: Path, *, basis: str = "auto", block_size: int | None = None, strict: bool = False) -> AgenticCorpus:
    """Read a ``.json`` file, a ``.jsonl`` file or a directory of them.

    Args:
        path: where the corpus is.
        basis: what nested timestamps count from: "auto", "absolute" or "relative".
        block_size: block size that the corpus must have [tokens], None for whatever it has.
        strict: refuse a model that its play's non-empty ``models`` lacks; otherwise it is noted.
    Raises: ConfigError on anything malformed.
    """
    source = read_weka(path, basis=basis, block_size=block_size, strict=strict)
    nodes = []
    places = []
    for ordinal, play in enumerate(source.plays):
        lowered = lower_play(play, ordinal, source.block_size_tokens, source.basis)
        nodes += lowered
        places += [play.where] * len(lowered)
    graph = RequestGraph.build(source.block_size_tokens, nodes, places.__getitem__)
    return AgenticCorpus(
        graph=graph.normalised(),
        source_format="weka",
        source_digest=source.digest,
        nested_basis=source.basis,
        notes=source.notes,
    )
