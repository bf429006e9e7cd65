"""Runs in processes of this machine, for commands that run a scenario many times, and how far they are.

Owns: starting, ending and interrupting the processes, and the progress bar. Refuses to know: what they compute.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context
from typing import TypeVar

import attrs
import click

from g2sim.bus.errors import SimError

Task = TypeVar("Task")
Outcome = TypeVar("Outcome")

Progress = Callable[[int, int, str], None]
"""Called after every run with: runs done, runs in all, what was run."""

_BAR = 24


@attrs.frozen
class Processes:
    """Carries out tasks in up to ``jobs`` processes of this machine. (``DaskCluster`` does so on others.)"""

    jobs: int = 1

    def outcomes(
        self, work: Callable[[Task], Outcome], tasks: Sequence[Task]
    ) -> Generator[tuple[int, Outcome], None, None]:
        """(position of the task, what ``work`` gives for it), in the order in which they are done.

        Raises: as ``outcomes``.
        """
        yield from outcomes(work, tasks, self.jobs, as_they_come=True)


def outcomes(
    work: Callable[[Task], Outcome], tasks: Sequence[Task], jobs: int, *, as_they_come: bool = False
) -> Iterator[tuple[int, Outcome]]:
    """(position of the task, what ``work`` gives for it), in the order of the tasks.

    Args:
        work: a function of a module; with more than one job it, tasks and outcomes travel between processes.
        jobs: processes at a time; 1 is this one.
        as_they_come: in the order in which they are done.
    Raises: SimError if a process is killed, and what ``work`` raises.
    """
    if jobs == 1:
        yield from enumerate(map(work, tasks))
        return
    # Spawned, so that a process begins as a fresh one does, whatever the parent has loaded.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_leave_interrupts) as pool:
        try:
            futures = {pool.submit(work, task): idx for idx, task in enumerate(tasks)}
            for future in as_completed(futures) if as_they_come else futures:
                yield futures[future], future.result()
        except BrokenProcessPool:
            raise SimError("a process that ran a scenario was killed; fewer --jobs need less memory") from None
        finally:
            # Runs under way are of no use any more. Futures are not cancelled: a pool that breaks trips on those.
            for child in active_children():
                child.terminate()


def _leave_interrupts() -> None:
    """Ctrl-C reaches every process of a terminal; the parent ends the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class ProgressBar:
    """How many runs are done, on stderr: one line that is rewritten on a terminal, a line a run elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._shown = False

    def __call__(self, done: int, total: int, what: str) -> None:
        full = _BAR * done // total
        text = f"[{'#' * full}{'.' * (_BAR - full)}] {done}/{total} runs: {what}"
        click.echo(f"\r{text}\x1b[K" if self._terminal else text, nl=not self._terminal, err=True)
        self._shown = self._terminal

    def done(self) -> None:
        if self._shown:
            click.echo(err=True)
