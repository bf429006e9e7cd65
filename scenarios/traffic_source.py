"""From the traffic section of a scenario to a traffic driver."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from g2sim.actors.config import PoolConfig, RankConfig, WorkerRole
from g2sim.actors.traffic.applied_compute import load_applied_compute
from g2sim.actors.traffic.dynamo_requests import load_dynamo_requests
from g2sim.actors.traffic.graph import MAX_TIME_MS, AgenticCorpus
from g2sim.actors.traffic.mooncake import load_mooncake
from g2sim.actors.traffic.remarks import Remarks
from g2sim.actors.traffic.request import TrafficDriver
from g2sim.actors.traffic.sessions import AnswerTokens, SessionDriver, Sessions, prompt_lengths
from g2sim.actors.traffic.synthetic import (
    SessionShape,
    constant_arrivals_ms,
    plain_requests,
    poisson_arrivals_ms,
    sessions,
)
from g2sim.bus.errors import ConfigError, InvariantViolation
from g2sim.scenarios.agentic_source import agentic_driver, agentic_facts, play_ids, read_corpus
from g2sim.scenarios.schema import (
    ConcurrencyLoad,
    ConstantRateLoad,
    Load,
    PoissonLoad,
    Scenario,
    ScriptSource,
    SyntheticSessionSource,
    SyntheticSource,
    TimestampsLoad,
    TraceFormat,
    TraceSource,
)


@attrs.frozen(kw_only=True)
class Traffic:
    """A driver with what the report and the user should know of it.

    Attributes:
        agentic: fields for the report's summary, None outside agentic traffic.
        play_ids: plays in the order in which outcomes are listed.
        notes: remarks on input that was accepted although something is odd.
        prompt_tokens: how many tokens a request answers -> tokens of every prompt; of plays, as they are in the trace.
    """

    driver: TrafficDriver
    agentic: dict[str, Any] | None = None
    play_ids: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    prompt_tokens: Callable[[AnswerTokens], Iterable[int]] = lambda _: ()


def open_traffic(scenario: Scenario) -> Traffic:
    """Read what the scenario's traffic needs. Raises: ConfigError for a bad trace, with file and line."""
    source = scenario.traffic.source
    if isinstance(source, ScriptSource):
        problem = "a script's requests come from its run, not from a scenario file"
        raise ConfigError("traffic.source.type", problem=problem, got="script", hint="g2sim run FILE.py")
    if isinstance(source, TraceSource):
        return _trace(scenario, source)
    return _synthetic(scenario, source)


def prompts_too_large(scenario: Scenario, traffic: Traffic) -> Iterator[str]:
    """A note for each role at whose workers requests will be rejected because of their prompts, or will fail."""
    pools = scenario.deployment.pools

    def refusing(tokens: int) -> PoolConfig | None:
        return next((pool for pool in pools if pool.rank.refusal(tokens) is not None), None)

    def answer_tokens(tokens: int, asked: int) -> int:
        return 0 if refusing(tokens) is not None else _answering_rank(scenario).answer_tokens(tokens, asked)

    prompts = array("q", traffic.prompt_tokens(answer_tokens))
    for pool in pools:
        refused = [tokens for tokens in prompts if refusing(tokens) is pool]
        if refused:
            largest = max(refused)
            yield (
                f"{len(refused)} of {len(prompts)} requests can never run on {pool.role} workers; the largest has "
                f"{largest} prompt tokens: {pool.rank.refusal(largest)}"
            )


def _trace(scenario: Scenario, source: TraceSource) -> Traffic:
    path = scenario.trace_path
    if path is None:
        raise InvariantViolation("a trace source has no path")
    if source.format is TraceFormat.DYNAMO:
        return _dynamo(scenario, source, path)
    if source.agentic:
        return _agentic(scenario, source.format, read_corpus(source, path))
    block_size_tokens = source.block_size_tokens or 512
    remarks = Remarks(path)
    if source.format is TraceFormat.APPLIED_COMPUTE_AGENTIC:
        conversations: Sessions = load_applied_compute(
            path,
            block_size_tokens=block_size_tokens,
            shared_prefix_ratio=source.shared_prefix_ratio,
            prefix_groups=source.prefix_groups,
            remarks=remarks,
        )
    else:
        closed_loop = isinstance(scenario.traffic.load, ConcurrencyLoad)
        conversations = load_mooncake(
            path, block_size_tokens=block_size_tokens, closed_loop=closed_loop, remarks=remarks
        )
    accumulate = source.format is TraceFormat.MOONCAKE_DELTA
    return _session_traffic(scenario, conversations, accumulate=accumulate, notes=remarks.notes())


def _dynamo(scenario: Scenario, source: TraceSource, path: Path) -> Traffic:
    """A dynamo trace says itself whether it holds plays; loads that do not go with what it holds are refused here."""
    remarks = Remarks(path)
    trace = load_dynamo_requests(path, block_size=source.block_size_tokens, remarks=remarks)
    load = scenario.traffic.load
    if trace.corpus is not None:
        if isinstance(load, ConcurrencyLoad):
            problem = "does not go with a dynamo trace whose requests have an agent_context"
            raise ConfigError("traffic.load.type", problem=problem, got="concurrency", allowed="trace_timestamps")
        return _agentic(scenario, source.format, attrs.evolve(trace.corpus, notes=remarks.notes()))
    if isinstance(load, TimestampsLoad) and load.agentic_lanes is not None:
        problem = "does not go with a dynamo trace whose requests have no agent_context"
        raise ConfigError("traffic.load.agentic_lanes", problem=problem, got=load.agentic_lanes, allowed="leave it out")
    return _session_traffic(scenario, trace.sessions, notes=remarks.notes())


def _agentic(scenario: Scenario, trace_format: TraceFormat, corpus: AgenticCorpus) -> Traffic:
    load = scenario.traffic.load
    if not isinstance(load, TimestampsLoad):
        raise InvariantViolation("agentic traffic without a timestamps load")
    driver = agentic_driver(corpus, load)
    facts = agentic_facts(corpus, driver, load, trace_format=trace_format, model=scenario.model)
    projected = [model for model in corpus.source_models if model != scenario.model]
    notes = corpus.notes
    if projected:
        models = ", ".join(map(repr, projected))
        notes = (*notes, f"requests recorded with {models} are projected to {scenario.model!r}")
    return Traffic(
        driver=driver,
        agentic=facts,
        play_ids=play_ids(corpus, driver),
        notes=notes,
        prompt_tokens=lambda _: (node.input_tokens for node in corpus.graph.nodes),
    )


def _session_traffic(
    scenario: Scenario,
    made: Sessions,
    *,
    accumulate: bool = False,
    named: bool | None = None,
    notes: tuple[str, ...] = (),
) -> Traffic:
    load = scenario.traffic.load
    driver = SessionDriver(
        made,
        speedup=load.speedup if isinstance(load, TimestampsLoad) else 1.0,
        concurrency=load.concurrency if isinstance(load, ConcurrencyLoad) else None,
        named=named,
        accumulating=_answering_rank(scenario).answer_tokens if accumulate else None,
    )
    return Traffic(
        driver=driver,
        notes=notes,
        prompt_tokens=lambda answer_tokens: prompt_lengths(made, answer_tokens if accumulate else None),
    )


def _answering_rank(scenario: Scenario) -> RankConfig:
    """What the ranks that generate answers are like."""
    return next(pool.rank for pool in scenario.deployment.pools if pool.role is not WorkerRole.PREFILL)


def _synthetic(scenario: Scenario, source: SyntheticSource | SyntheticSessionSource) -> Traffic:
    count = scenario.traffic.count or 0
    arrivals_ms = _arrivals_ms(scenario.traffic.load, count)
    if isinstance(source, SyntheticSource):
        made = plain_requests(
            count, input_tokens=source.input_tokens, output_tokens=source.output_tokens, arrivals_ms=arrivals_ms
        )
        return _session_traffic(scenario, made, named=False)
    shape = SessionShape(
        turns=source.turns,
        input_tokens=source.new_input_tokens_per_turn,
        output_tokens=source.output_tokens_per_turn,
        delay_ms=source.inter_turn_delay_ms,
        block_size_tokens=_answering_rank(scenario).block_size_tokens,
        shared_prefix_ratio=source.shared_prefix_ratio,
        prefix_groups=source.prefix_groups,
        group_seed=source.group_seed,
    )
    return _session_traffic(scenario, sessions(count, shape, arrivals_ms), accumulate=source.accumulate, named=True)


def _arrivals_ms(load: Load, count: int) -> Sequence[float] | None:
    """Arrivals of generated requests or sessions, None in a closed loop."""
    if isinstance(load, PoissonLoad):
        arrivals_ms = poisson_arrivals_ms(count, load.per_second, load.seed)
    elif isinstance(load, ConstantRateLoad):
        arrivals_ms = constant_arrivals_ms(count, load.interval_ms)
    else:
        return None
    if arrivals_ms[-1] > MAX_TIME_MS:
        problem = f"the last arrival is at {arrivals_ms[-1]:g} ms"
        raise ConfigError("traffic.load", problem=problem, allowed=f"a rate that keeps it below {MAX_TIME_MS:g} ms")
    return arrivals_ms
