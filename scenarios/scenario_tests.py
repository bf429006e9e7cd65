"""Scenarios as a test suite: finding them, running them in processes side by side, and the JUnit file.

Owns: what passes and what fails. Refuses to know: what an expectation means (``expectations``), how runs are made
(``run``).
"""

from __future__ import annotations

import ast
import multiprocessing
import os
import re
import signal
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import attrs

from g2sim.bus.errors import ConfigError, SimError
from g2sim.scenarios.aic_timing import EXTRA, INSTALL, aic_installed
from g2sim.scenarios.run import run_scenario
from g2sim.scenarios.script import load_script
from g2sim.scenarios.suite import load_suite

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@attrs.frozen(kw_only=True)
class TestResult:
    """What became of one scenario file.

    Attributes:
        file: as found.
        cases: (what was checked, None or why it failed), in the order of the file; a run that expects nothing is one.
        bad_input: the file could not be read, or is not good.
        skipped: why it was not run, None if it was.
    """

    __test__ = False  # not a test of pytest's

    file: str
    cases: tuple[tuple[str, str | None], ...]
    bad_input: bool = False
    skipped: str | None = None

    @property
    def failed(self) -> bool:
        return any(told is not None for _, told in self.cases)

    @property
    def text(self) -> str:
        """One line if it passed or was skipped, else what failed below it."""
        if self.skipped is not None:
            return f"skipped  {self.file}  ({self.skipped})"
        if not self.failed:
            return f"passed  {self.file}  ({len(self.cases)})"
        told = [line for _, told in self.cases if told is not None for line in told.splitlines()]
        return "\n".join([f"FAILED  {self.file}", *(f"  {line}" for line in told)])


def collect(paths: Sequence[Path]) -> list[Path]:
    """Files to run: those given, and of a folder its scenarios and scripts, by name.

    Raises: ConfigError if there is nothing to run.
    """
    found: dict[Path, None] = {}
    for path in paths:
        if not path.is_dir():
            found[path] = None
            continue
        inside = sorted(file for file in path.rglob("*") if file.suffix in (".yaml", ".yml", ".py"))
        found.update((file, None) for file in inside if file.suffix != ".py" or _is_script(file))
    if not found:
        raise ConfigError("PATH", problem="no scenario in it", got=" ".join(map(str, paths)))
    return list(found)


def _is_script(path: Path) -> bool:
    """Whether a Python file has ``async def scenario``; its code is not run."""
    try:
        body = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return False
    return any(isinstance(one, ast.AsyncFunctionDef) and one.name == "scenario" for one in body)


def run_tests(files: Sequence[Path], jobs: int | None) -> Generator[TestResult, None, None]:
    """Run scenarios, ``jobs`` at a time (None: one a processor); results come in the order of ``files``.

    Nothing is left behind, also when the caller stops early.
    """
    jobs = min(jobs or os.cpu_count() or 1, len(files))
    with tempfile.TemporaryDirectory(prefix="g2sim-test-") as scratch:
        folders = [Path(scratch) / str(number) for number in range(len(files))]
        if jobs == 1:
            yield from map(run_file, files, folders)
            return
        spawn = multiprocessing.get_context("spawn")
        executor = ProcessPoolExecutor(jobs, mp_context=spawn, initializer=_quiet_interrupt)
        try:
            futures = [executor.submit(run_file, *item) for item in zip(files, folders, strict=True)]
            for file, future in zip(files, futures, strict=True):
                yield _result(file, future)
        except BaseException:
            for process in multiprocessing.active_children():
                process.terminate()
            raise
        finally:
            executor.shutdown(cancel_futures=True)


def _quiet_interrupt() -> None:
    """Ctrl-C reaches every process of the terminal; the first one speaks for all."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _result(file: Path, future: Future[TestResult]) -> TestResult:
    try:
        return future.result()
    except BrokenProcessPool:
        return TestResult(file=str(file), cases=(("run", f"{file}: a process that ran scenarios was killed"),))


def run_file(file: Path, folder: Path) -> TestResult:
    """Run one file, with its run folders in ``folder``."""
    name = str(file)
    try:
        if file.suffix == ".py":
            scenario, script = load_script(file)
            run_scenario(scenario, folder, script=script)
            return TestResult(file=name, cases=(("run", None),))
        suite = load_suite(file)
        folders = {variant: folder if variant is None else folder / variant for variant in suite.runs}
        for variant, scenario in suite.runs.items():
            run_scenario(scenario, folders[variant])
        verdicts = suite.judge(folders)
    except SimError as error:
        if isinstance(error, ConfigError) and error.hint == INSTALL and not aic_installed():
            return TestResult(file=name, cases=(), skipped=f"needs {EXTRA}")
        return TestResult(file=name, cases=(("run", str(error)),), bad_input=isinstance(error, ConfigError))
    cases = [(f"{one.expectation.text}: {one.expectation.wanted}", one.told) for one in verdicts]
    return TestResult(file=name, cases=tuple(cases) or (("run", None),))


def junit_text(results: Sequence[TestResult]) -> str:
    """Results as JUnit XML: a suite a file, a case an expectation. It has no times: equal runs give equal bytes."""
    root = ElementTree.Element("testsuites", name="g2sim")
    for result in results:
        kind = "error" if result.bad_input else "failure"
        count = sum(told is not None for _, told in result.cases)
        file = _xml(result.file)
        numbers = {
            "name": file,
            "tests": str(len(result.cases)),
            "failures": "0",
            "errors": "0",
            f"{kind}s": str(count),
        }
        if result.skipped is not None:
            numbers |= {"tests": "1", "skipped": "1"}
        suite = ElementTree.SubElement(root, "testsuite", numbers)
        for name, told in result.cases:
            case = ElementTree.SubElement(suite, "testcase", classname=file, name=_xml(name))
            if told is not None:
                wrong = ElementTree.SubElement(case, kind, message=_xml(told.splitlines()[0]))
                wrong.text = _xml(told)
        if result.skipped is not None:
            case = ElementTree.SubElement(suite, "testcase", classname=file, name="run")
            ElementTree.SubElement(case, "skipped", message=_xml(result.skipped))
    ElementTree.indent(root)
    return f"{ElementTree.tostring(root, encoding='unicode', xml_declaration=True)}\n"


def _xml(text: str) -> str:
    return _NOT_XML.sub("?", text)
