"""Placement policies side by side on one scenario: the runs, their figures, and paired differences over seeds.

Owns: which figures are compared and what the differences mean. Refuses to know: the terminal, and drawing.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from g2sim.bus.errors import ConfigError, SimError
from g2sim.scenarios.placement_audit import PlacementAudit
from g2sim.scenarios.policy_source import parse_choice, with_policy
from g2sim.scenarios.processes import Progress, outcomes
from g2sim.scenarios.report import Report
from g2sim.scenarios.request_rows import DECODE_POOL
from g2sim.scenarios.run import program_version, run_scenario
from g2sim.scenarios.schema import PoissonLoad, Scenario, SyntheticSessionSource, load_scenario

SCHEMA = "g2sim.compare/1"
LEVEL = 0.95
"""Of the confidence intervals."""


@attrs.frozen
class Metric:
    """A figure of a run. ``better``: "lower", "higher", or "" when it does not depend on the policy."""

    name: str
    label: str
    unit: str
    better: str


def _latency(metric: str, label: str) -> Iterator[Metric]:
    for column, short in (("mean", "mean"), ("median", "p50"), ("p90", "p90"), ("p99", "p99")):
        yield Metric(f"{column}_{metric}_ms", f"{label} {short}", "ms", "lower")


METRICS = (
    *_latency("ttft", "TTFT"),
    *_latency("tpot", "TPOT"),
    *_latency("e2e_latency", "E2E"),
    Metric("good_share", "requests within SLA", "%", "higher"),
    Metric("goodput_rps", "goodput", "requests/s", "higher"),
    Metric("g1_share", "prompt tokens from G1", "%", "higher"),
    Metric("g2_share", "prompt tokens from G2", "%", "higher"),
    Metric("computed_share", "prompt tokens computed", "%", "lower"),
    Metric("hit_rate_unlimited", "hit rate, unlimited cache", "%", ""),
    Metric("hit_rate_best", "hit rate, best placement", "%", "higher"),
    Metric("hit_rate_real", "hit rate, real", "%", "higher"),
    Metric("regret_blocks", "overlap regret", "blocks", "lower"),
    Metric("imbalance", "load imbalance", "max/mean", "lower"),
    Metric("not_completed", "requests not completed", "requests", "lower"),
)

DEFINITIONS = {
    "within SLA": "completed requests that keep every limit of evaluation.sla, of all that arrived; goodput, a second",
    "hit rate": "prompt tokens not computed. Unlimited: shared with any earlier arrival. Best: what some rank could "
    "have used when the request was placed, as far as KV events were published. Real: what the first admission found, "
    "which can be more than best when blocks came while it waited",
    "overlap regret": "blocks that the best rank could have used more than the chosen one, mean of all placements",
    "load imbalance": "computed prompt tokens of the busiest rank over the mean of its pool; 1 is even",
    "difference": "policy minus baseline for the same seed; mean of the seeds and its Student t interval",
}


@attrs.frozen
class Run:
    """What one run gave: metric -> value; None where there is nothing to measure."""

    policy: str
    seed: int
    values: Mapping[str, float | None]


@attrs.frozen
class Difference:
    """Policy minus baseline over the same seeds.

    Attributes:
        half_width: of the confidence interval; None for fewer than two seeds, and where all give the same, as such a
            sample says nothing of other traffic.
    """

    policy: str
    metric: str
    mean: float
    half_width: float | None

    @property
    def is_clear(self) -> bool:
        """The interval does not hold 0."""
        return self.half_width is not None and abs(self.mean) > self.half_width


@attrs.frozen(kw_only=True)
class Comparison:
    """All runs, by seed and then policy; the first policy is the baseline."""

    scenario: str
    policies: tuple[str, ...]
    seeds: tuple[int, ...]
    runs: tuple[Run, ...]

    def values(self, policy: str, metric: str) -> list[float]:
        """One value a seed; empty if there is nothing to measure in one of them."""
        found = [run.values[metric] for run in self.runs if run.policy == policy]
        return [] if None in found else [value for value in found if value is not None]

    @property
    def seeds_differ(self) -> bool:
        """Whether a figure of some policy depends on the seed."""
        ofs = [[run.values for run in self.runs if run.policy == policy] for policy in self.policies]
        return any(values != runs[0] for runs in ofs for values in runs)

    def mean(self, policy: str, metric: str) -> float | None:
        values = self.values(policy, metric)
        return statistics.fmean(values) if values else None

    def difference(self, policy: str, metric: str) -> Difference | None:
        """None where there is nothing to measure."""
        ours, base = self.values(policy, metric), self.values(self.policies[0], metric)
        if not ours or not base:
            return None
        gaps = [one - other for one, other in zip(ours, base, strict=True)]
        return Difference(policy, metric, statistics.fmean(gaps), half_width(gaps))

    def plain(self) -> dict[str, Any]:
        """As plain JSON values."""
        gaps = [self.difference(policy, metric.name) for policy in self.policies[1:] for metric in METRICS]
        return {
            "schema": SCHEMA,
            "program": "g2sim",
            "version": program_version(),
            "scenario": self.scenario,
            "seeds": list(self.seeds),
            "baseline": self.policies[0],
            "policies": list(self.policies),
            "metrics": {metric.name: attrs.asdict(metric) for metric in METRICS},
            "definitions": DEFINITIONS,
            "confidence_level": LEVEL,
            "runs": [attrs.asdict(run) for run in self.runs],
            "means": {p: {m.name: self.mean(p, m.name) for m in METRICS} for p in self.policies},
            "differences": [attrs.asdict(gap) | {"is_clear": gap.is_clear} for gap in gaps if gap is not None],
        }


def compare(
    path: Path, policies: Sequence[str], *, seeds: int = 1, jobs: int = 1, progress: Progress | None = None
) -> Comparison:
    """Run a scenario under every policy with ``seeds`` seeds, from the scenario's own on.

    Args:
        policies: targets, as ``parse_choice`` takes them; with one, the scenario's own is the baseline.
        jobs: processes that run at a time; the result does not depend on it.
    Raises: ConfigError; the error of a run that fails, with a note that says how to repeat it.
    """
    scenario = load_scenario(path)
    if len(policies) == 1:
        policies = [scenario.deployment.router.policy, *policies]
    if len(set(policies)) < len(policies):
        raise ConfigError("--policy", problem="two of them are the same", got=", ".join(policies))
    for policy in policies:
        _chosen(scenario, policy)
    numbers = tuple(scenario.seed + k for k in range(seeds))
    tasks = [(str(path), policy, k) for k in range(seeds) for policy in policies]
    runs = []
    for idx, outcome in outcomes(_run, tasks, jobs):
        _, policy, k = tasks[idx]
        if isinstance(outcome, str):
            error = SimError(outcome)
            error.add_note(f"in the run under {policy} with seed {numbers[k]}")
            raise error
        runs.append(Run(policy, numbers[k], outcome))
        if progress is not None:
            progress(len(runs), len(tasks), f"{policy}, seed {numbers[k]}")
    return Comparison(scenario=scenario.name, policies=tuple(policies), seeds=numbers, runs=tuple(runs))


def seeded(scenario: Scenario, shift: int) -> Scenario:
    """The scenario with its seed, and the seeds of its traffic, moved on by ``shift``."""
    traffic = scenario.traffic
    if isinstance(traffic.load, PoissonLoad):
        traffic = attrs.evolve(traffic, load=attrs.evolve(traffic.load, seed=traffic.load.seed + shift))
    if isinstance(traffic.source, SyntheticSessionSource):
        source = attrs.evolve(traffic.source, group_seed=traffic.source.group_seed + shift)
        traffic = attrs.evolve(traffic, source=source)
    return attrs.evolve(scenario, seed=scenario.seed + shift, traffic=traffic)


def _chosen(scenario: Scenario, policy: str) -> Scenario:
    own = policy == scenario.deployment.router.policy
    return scenario if own else with_policy(scenario, parse_choice(policy))


def _run(task: tuple[str, str, int]) -> dict[str, float | None] | str:
    """The figures of one run, or what its error says (errors do not travel between processes)."""
    path, policy, shift = task
    scenario = seeded(_chosen(load_scenario(Path(path)), policy), shift)
    try:
        return audited_run(scenario)[1]
    except SimError as error:
        return str(error)


def audited_run(scenario: Scenario) -> tuple[Report, dict[str, float | None]]:
    """The report of a run that writes nothing, and its figures (metric -> value). Raises: as ``run_scenario``."""
    audit = PlacementAudit(scenario.deployment)
    result = run_scenario(scenario, None, on_record=audit.on_record, on_request=audit.on_request)
    return result.report, figures(result.report, audit)


def figures(report: Report, audit: PlacementAudit) -> dict[str, float | None]:
    """Metric -> value of one run; shares and rates in percent."""
    summary, totals, ends = report["summary"], report["totals"], report["requests"]
    values: dict[str, float | None] = dict.fromkeys(metric.name for metric in METRICS)
    for samples, metric in (("ttft", "ttft"), ("tpot", "tpot"), ("e2e_latency", "e2e_latency")):
        if summary[f"num_{samples}_samples"]:
            values |= {f"{column}_{metric}_ms": summary[f"{column}_{metric}_ms"] for column in _COLUMNS}
    if "goodput_completed_requests" in summary and ends["released"]:
        values["good_share"] = 100.0 * summary["goodput_completed_requests"] / ends["released"]
        values["goodput_rps"] = summary["goodput_request_throughput_rps"]
    if asked := totals["prompt_tokens_asked"]:
        for share in ("from_g1", "from_g2", "computed"):
            values[f"{share.removeprefix('from_')}_share"] = 100.0 * totals[f"prompt_tokens_{share}"] / asked
    for name, value in audit.figures().items():
        values[name] = 100.0 * value if name.startswith("hit_rate") else value
    computed = [rank["prefill_tokens"] for rank in report["workers"] if rank["pool"] != DECODE_POOL]
    if any(computed):
        values["imbalance"] = max(computed) / statistics.fmean(computed)
    values["not_completed"] = float(ends["released"] - ends["completed"])
    return values


_COLUMNS = ("mean", "median", "p90", "p99")


@attrs.frozen
class Mean:
    """Mean over seeds, with half the width of its interval (see ``half_width``)."""

    value: float
    half_width: float | None

    def __str__(self) -> str:
        return f"{self.value:.3f}" + ("" if self.half_width is None else f" \u00b1 {self.half_width:.3f}")


def mean_of(values: Sequence[float | None]) -> Mean | None:
    """None if there is nothing to measure under one of the seeds."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    return Mean(statistics.fmean(known), half_width(known))


def half_width(values: Sequence[float]) -> float | None:
    """Half the width of the Student t interval of a mean; None for fewer than two different values."""
    if len(set(values)) < 2:
        return None
    return t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


@functools.cache
def t_quantile(freedom: int) -> float:
    """Quantile (1 + LEVEL) / 2 of Student's t distribution with ``freedom`` degrees of freedom, to 1e-9.

    The distribution function for whole degrees is a finite sum in theta = atan(t / sqrt(freedom)) (Abramowitz and
    Stegun 26.7.3 and 26.7.4), inverted by bisection.
    """

    def inside(t: float) -> float:
        """Probability that |T| <= t."""
        theta = math.atan(t / math.sqrt(freedom))
        cosine = math.cos(theta)
        odd = freedom % 2
        term = total = cosine if odd else 1.0
        for k in range(2 + odd, freedom, 2):
            term *= (k - 1) / k * cosine * cosine
            total += term
        if not odd:
            return math.sin(theta) * total
        return 2 / math.pi * (theta + (math.sin(theta) * total if freedom > 1 else 0.0))

    low, high = 0.0, 1e3
    while high - low > 1e-10:
        middle = (low + high) / 2
        if inside(middle) < LEVEL:
            low = middle
        else:
            high = middle
    return (low + high) / 2
