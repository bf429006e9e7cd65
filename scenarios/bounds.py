"""How large a run may be.

Owns: the bounds on what a scenario of a few lines can ask for, so that a slip of a digit is refused by name instead of
eating the machine's memory. Refuses to know: the bounds of single fields (``layout``), and of traces (their readers).

Sizes are of CPython 3.11 on x86-64, measured with runs of 1,000 to 100,000 of each.
"""

from __future__ import annotations

from typing import Any

from g2sim.actors.traffic.trace_json import MAX_TOKENS
from g2sim.scenarios.fields import COUNT_MAX
from g2sim.scenarios.support import roles
from g2sim.scenarios.yaml_source import Document, KeyPath

MAX_RANKS = 100_000
"""Ranks of all workers; each takes about 20 kB."""
MAX_DEVICE_BLOCKS = 2**26
"""G1 blocks of all ranks; each takes about 80 bytes, whether it is used or not."""
MAX_ROUTERS = 10_000
"""Replicas of a router."""
MAX_REQUESTS = 10_000_000
"""Generated requests, or turns of generated sessions; each takes about 300 bytes from the start."""
MAX_PROMPT_BLOCKS = 2**27
"""Prompt blocks of all generated sessions; each takes about 36 bytes from the start."""
MAX_LANES = 10_000
"""Lanes of agentic traffic; each holds a play."""


def check_sizes(tree: dict[str, Any], document: Document) -> None:
    """Raises: ConfigError for the first field of a settled tree that makes the run too large."""

    def check(amount: int, most: int, what: str, *path: str) -> None:
        if amount > most:
            at: KeyPath = path
            raise document.error(at, problem=f"{amount} {what}", got=document.raw(at), allowed=f"at most {most}")

    ranks = blocks = 0
    for role, worker in roles(tree):
        parallelism = worker["parallelism"]
        own = parallelism["replicas"] * parallelism["attention_data"]
        at = ("engine", "workers", role)
        wide = "replicas" if parallelism["replicas"] >= parallelism["attention_data"] else "attention_data"
        check(ranks := ranks + own, MAX_RANKS, "ranks in all", *at, "parallelism", wide)
        blocks += own * worker["kv_cache"]["capacity"]["blocks"]
        check(blocks, MAX_DEVICE_BLOCKS, "device blocks in all", *at, "kv_cache", "capacity", "blocks")
    check(tree["router"]["replicas"], MAX_ROUTERS, "replicas", "router", "replicas")
    traffic = tree["traffic"]
    source, load = traffic["source"], traffic["load"]
    check(load.get("agentic_lanes") or 0, MAX_LANES, "lanes", "traffic", "load", "agentic_lanes")
    if "count" not in traffic:
        return
    if source["type"] == "synthetic":
        check(traffic["count"], MAX_REQUESTS, "requests", "traffic", "stop", "requests")
        return
    turns = source["session"]["turns"]
    check(traffic["count"] * turns, MAX_REQUESTS, "turns in all", "traffic", "stop", "sessions")
    tokens = source["new_input_tokens_per_turn"]
    if source["session"]["accumulate"]:
        whole = turns * (tokens + source["output_tokens_per_turn"])
        check(
            whole, MAX_TOKENS, "tokens in a session's last prompt and answer", "traffic", "source", "session", "turns"
        )
    block_size = min((worker["kv_cache"]["block_size"] for _, worker in roles(tree)), default=COUNT_MAX)
    made = traffic["count"] * turns * -(-tokens // block_size)
    check(made, MAX_PROMPT_BLOCKS, "prompt blocks of all turns", "traffic", "source", "new_input_tokens_per_turn")
