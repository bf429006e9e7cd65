"""From the traffic section of a scenario to a traffic driver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from g2sim.actors.traffic.mooncake import load_mooncake
from g2sim.actors.traffic.request import TrafficDriver
from g2sim.actors.traffic.sessions import Session, SessionDriver
from g2sim.actors.traffic.synthetic import constant_arrivals_ms, plain_requests
from g2sim.bus.errors import ConfigError, InvariantViolation
from g2sim.scenarios.schema import (
    ConcurrencyLoad,
    ConstantRateLoad,
    Scenario,
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
    """

    driver: TrafficDriver
    agentic: Mapping[str, Any] | None = None
    play_ids: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def open_traffic(scenario: Scenario) -> Traffic:
    """Read what the scenario's traffic needs. Raises: ConfigError for a bad trace, with file and line."""
    source = scenario.traffic.source
    if isinstance(source, TraceSource):
        return _trace(scenario, source)
    if isinstance(source, SyntheticSource):
        return Traffic(driver=_plain_synthetic(scenario, source))
    raise ConfigError("traffic.source.type", got="synthetic-session", allowed="synthetic or trace, so far")


def _trace(scenario: Scenario, source: TraceSource) -> Traffic:
    path = scenario.trace_path
    if path is None:
        raise InvariantViolation("a trace source has no path")
    if source.format is TraceFormat.MOONCAKE:
        block_size = source.block_size_tokens or 512
        sessions = load_mooncake(
            path,
            block_size_tokens=block_size,
            closed_loop=isinstance(scenario.traffic.load, ConcurrencyLoad),
        )
        return Traffic(driver=_session_driver(scenario, sessions))
    if source.format is TraceFormat.WEKA or source.format is TraceFormat.AGENTIC_MOONCAKE:
        from g2sim.scenarios.agentic_source import open_agentic

        return open_agentic(scenario, source, path)
    raise ConfigError(
        "traffic.source.format", got=source.format.value, allowed="mooncake, weka or agentic_mooncake, so far"
    )


def _session_driver(scenario: Scenario, sessions: list[Session]) -> SessionDriver:
    load = scenario.traffic.load
    return SessionDriver(
        sessions,
        speedup=load.speedup if isinstance(load, TimestampsLoad) else 1.0,
        concurrency=load.concurrency if isinstance(load, ConcurrencyLoad) else None,
    )


def _plain_synthetic(scenario: Scenario, source: SyntheticSource) -> SessionDriver:
    count = scenario.traffic.count or 0
    load = scenario.traffic.load
    arrivals_ms = None
    if isinstance(load, ConstantRateLoad):
        arrivals_ms = constant_arrivals_ms(count, load.interval_ms)
    elif not isinstance(load, ConcurrencyLoad):
        raise ConfigError("traffic.load.type", got="poisson", allowed="constant_rate or concurrency, so far")
    sessions = plain_requests(
        count, input_tokens=source.input_tokens, output_tokens=source.output_tokens, arrivals_ms=arrivals_ms
    )
    return _session_driver(scenario, sessions)
