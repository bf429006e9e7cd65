"""What must hold of every run of the swarm. Letters are those of docs/reliability.md."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs
from draws import CANCELED_ON, TRACE_NAME, Case, Values

from g2sim.actors.config import WorkerRole
from g2sim.actors.traffic.events import RequestArrived, RequestSkipped
from g2sim.actors.worker.events import RequestAdmitted, RequestEnded
from g2sim.bus.drivers import InlineDriver, TrioDriver
from g2sim.bus.errors import ConfigError, Deadlock, SimError
from g2sim.bus.events import BY_CLASS
from g2sim.bus.log import LogReader
from g2sim.scenarios.policy_source import PolicyChoice, with_policy
from g2sim.scenarios.report import report_text
from g2sim.scenarios.run import RunResult, report_of_log, run_scenario
from g2sim.scenarios.run_folder import REPORT_NAME, log_file
from g2sim.scenarios.schema import Scenario
from g2sim.scenarios.script import Script, ScriptedCluster, ScriptedRequest
from g2sim.scenarios.state_fold import StateFold
from g2sim.scenarios.stream_sources import check_files
from g2sim.scenarios.validate import Mode, Options, Validator
from g2sim.scenarios.validate_rules import Severity

Driver = type[TrioDriver] | type[InlineDriver]


@attrs.frozen
class Outcome:
    """How a case went.

    Attributes:
        how: "done", "at its limit", "stuck" (a named deadlock), "refused" or "failed".
        problem: what is wrong, None if nothing is.
        digest: of the log, None if there is none.
    """

    how: str
    problem: str | None
    digest: str | None = None


def audit(case: Case, *, again: bool = True) -> Outcome:
    """Run a case by plain calls, with every audit on; ``again``: and by the trio driver, which must write the same."""
    with _prepared(case) as (folder, scenario):
        out = folder / "run"
        report = None
        try:
            result = _run(case, scenario, out, InlineDriver, verify=True)
        except Deadlock as stuck:
            how, problem = "stuck", None if stuck.waiting else f"D: {stuck}"
        except ConfigError as error:
            # Whether a play can be cut, or lasts at all, is known only when it is read, or run.
            expected = error.field.startswith("traffic.load.agentic_")
            return Outcome("refused", None if expected else f"ConfigError: {error}")
        except SimError as error:
            return Outcome("failed", f"{type(error).__name__}: {error}")
        else:
            report = result.report
            how = "at its limit" if report["stopped_at_limit"] else "done"
            problem = _told_again(out) or _unheard(case, scenario, report) or _index(report, at_rest=how == "done")
        problem = problem or _log(out, report, at_rest=how == "done") or _streams(out)
        digest = _digest(out)
    if again and problem is None and digest != trio_digest(case):
        problem = "F: plain calls and trio tasks give other bytes"
    return Outcome(how, problem, digest)


def trio_digest(case: Case) -> str:
    """Digest of the log that the trio driver writes."""
    with _prepared(case) as (folder, scenario):
        try:
            _run(case, scenario, folder / "again", TrioDriver, verify=False)
        except Deadlock:
            pass
        return _digest(folder / "again")


@contextmanager
def _prepared(case: Case) -> Iterator[tuple[Path, Scenario]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / TRACE_NAME).write_text("".join(json.dumps(row) + "\n" for row in case.trace), encoding="utf-8")
        scenario = Scenario.from_dict(case.scenario, base_dir=folder)
        if case.policy is not None:
            scenario = with_policy(scenario, PolicyChoice(*case.policy))
        yield folder, scenario


def _run(case: Case, scenario: Scenario, out: Path, driver: Driver, *, verify: bool) -> RunResult:
    return run_scenario(scenario, out, verify=verify, driver=driver, script=_script(case))


def _digest(out: Path) -> str:
    return hashlib.sha256(log_file(out).read_bytes()).hexdigest()


def _script(case: Case) -> Script | None:
    """Submits the rows of a case, and cancels requests: ``row`` after a while, or the next one that ``on`` is about."""
    cancels = case.cancels
    if cancels is None:
        return None
    kinds = {kind.__name__: kind for kind in BY_CLASS if kind.__name__ in CANCELED_ON}

    async def scenario(cluster: ScriptedCluster) -> None:
        requests = [cluster.submit(**row) for row in case.trace]
        for cancel in cancels:
            if "row" in cancel:
                request: ScriptedRequest | None = requests[cancel["row"] % len(requests)]
            else:
                try:
                    number = (await cluster.event(kinds[cancel["on"]], within_ms=cancel["within_ms"])).request
                except AssertionError:
                    continue
                request = next((one for one in requests if one.number == number), None)
            await cluster.sleep(cancel["after_ms"])
            if request is not None and request.number is not None:
                request.cancel()

    return Script(scenario, "script.py")


def _told_again(out: Path) -> str | None:
    if (out / REPORT_NAME).read_text(encoding="utf-8") != report_text(report_of_log(out).report):
        return "the report rebuilt from the log is another one"
    return None


def _unheard(case: Case, scenario: Scenario, report: Values) -> str | None:
    """Without a log many turns are deferred."""
    result = run_scenario(scenario, None, driver=InlineDriver, script=_script(case))
    return None if result.report == report else "the report is another one if nobody hears of each pass"


def _index(report: Values, *, at_rest: bool) -> str | None:
    """With faults, every router's index is right when the run is at rest, and the report says since when."""
    for router in report.get("event_plane", {}).get("routers", ()) if at_rest else ():
        end = router["index_end"]
        if end is None or any(end.values()) or router["converged_after_ms"] is None:
            return f"the index of router {router['pool']} does not get right: {end}"
    return None


def _log(out: Path, report: Values | None, *, at_rest: bool) -> str | None:
    fold = StateFold()
    ends: Counter[str] = Counter()
    preparing: set[int] = set()
    last_ms = 0.0
    with LogReader(log_file(out)) as reader:
        for record in reader:
            if record.time_ms < last_ms:
                return f"F: time goes from {last_ms!r} to {record.time_ms!r} ms"
            last_ms = record.time_ms
            fold.apply(record)
            event = record.event
            if type(event) is RequestArrived and event.preparation is not None:
                preparing.add(event.request)
            elif type(event) is RequestEnded and event.request not in preparing:
                ends[event.status] += 1
            elif type(event) is RequestAdmitted and not event.readmission and event.role != WorkerRole.DECODE:
                ends["admitted"] += event.request not in preparing
            ends["skipped"] += type(event) is RequestSkipped
    for name, pool in fold.pools.items():
        if any(pins < 0 for _, pins in pool.blocks.values()):
            return f"C: pool {name} has negative pins"
        if at_rest and (
            pool.transfers or pool.kept or any(not resident or pins for resident, pins in pool.blocks.values())
        ):
            return f"C: pool {name} is not at rest at the end"
    if at_rest and any(rank.running or rank.waiting for rank in fold.ranks.values()):
        return "C: a rank is not at rest at the end"
    return None if report is None else _ends(report, ends, at_rest=at_rest)


def _ends(report: Values, ends: Counter[str], *, at_rest: bool) -> str | None:
    """Every request that was released ended as the report counts it, and every one of a play is accounted for."""
    skipped, admitted = ends.pop("skipped", 0), ends.pop("admitted", 0)
    counts = dict(report["requests"])
    released, unfinished = counts.pop("released"), counts.pop("unfinished")
    if ends.total() + unfinished != released or any(counts[how] != ends[how] for how in counts | ends):
        return f"E: the log has {dict(ends)}, the report {report['requests']}"
    if report["totals"]["requests"] != admitted:
        return f"E: {admitted} requests were admitted, the report has {report['totals']}"
    if at_rest and unfinished:
        return f"E: {unfinished} requests have not ended"
    summary = report["summary"]
    if at_rest and "agentic_graph" in summary and "agentic_snapshots" not in summary:
        nodes = summary["agentic_graph"]["node_count"]
        if released + skipped != nodes:
            return f"E: of {nodes} requests of plays, {released} were released and {skipped} skipped"
        if any(play["status"] == "incomplete" for play in summary["agentic_play_outcomes"]):
            return "E: a play is incomplete at rest"
    return None


def _streams(out: Path) -> str | None:
    """No rule of the validator is broken, in either mode; what Dynamo's index would not know is no error."""
    told = []
    for mode in Mode:
        validator = Validator(Options(mode=mode))
        check_files([out], validator)
        verdicts = validator.finish()
        inexact = [verdict.text() for verdict in verdicts if verdict.reason is not None]
        findings = [one for one in validator.findings.kept if one.severity is not Severity.NOTE]
        told.append([str(one) for one in findings if not one.code.startswith("KV95")] + inexact)
    if told[0] != told[1]:
        return f"G: the modes differ: {told}"
    return f"G: {told[0][0]}" if told[0] else None
