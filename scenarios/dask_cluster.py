"""The points of a sweep on the workers of a Dask cluster.

Needs distributed (extra ``dask``), which only this module imports.

Owns: the connection, which workers will do, and what travels. Refuses to know: what a point computes.

The contents of the files that a scenario names travel with its tasks, as tasks of their own: what a task gives is made
again when the worker that held it dies, where data put on workers would be lost. Dask runs a task again whose worker
died; a point is one future, so its outcome is handed out once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import platform
import re
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import attrs

from g2sim.bus.errors import ConfigError, SimError
from g2sim.scenarios.shipped_files import Packer, Parcel
from g2sim.scenarios.sweep import Outcome, Task

try:
    import distributed
except ImportError:
    raise ConfigError(
        "--dask", problem="needs the package distributed", hint="in a checkout of g2sim: pip install '.[dask]'"
    ) from None

CONNECT_S: Final = 10.0
WORKERS_S: Final = 10.0
MAX_SENT_BYTES: Final = 256 * 2**20
_ADDRESS: Final = re.compile(r"((tcp|tls|ws|wss)://)?[^\s/]+:[0-9]{1,5}")
_EQUAL: Final = ("g2sim", "Python", "numpy")
"""What must be the same everywhere, as it decides the figures; of the last two, the first two numbers."""


@attrs.frozen
class DaskCluster:
    """Carries out the points of a sweep on the cluster whose scheduler is at ``address``."""

    address: str

    def outcomes(
        self, work: Callable[[Task], Outcome], tasks: Sequence[Task]
    ) -> Generator[tuple[int, Outcome], None, None]:
        """(position of the task, what ``work`` gives for it), in the order in which they are done.

        Raises: ConfigError if the cluster cannot be reached, has no worker, or one with another version, and if files
            cannot be sent; SimError if the cluster goes away, or workers die of a task. Tasks that wait are cancelled.
        """
        if not tasks:
            return
        parcels, contents = _packed(tasks)
        with _silent(), _connected(self.address) as client:
            _check_workers(client)
            sent = {digest: client.submit(_content, content, pure=False) for digest, content in contents.items()}
            waiting = {}
            for idx, (task, parcel) in enumerate(zip(tasks, parcels, strict=True)):
                needs = {digest: sent[digest] for digest in parcel.digests}
                waiting[client.submit(_carry_out, work, task, parcel, needs, _versions(), pure=False)] = idx
            try:
                for future in distributed.as_completed(list(waiting), loop=client.loop):
                    yield waiting.pop(future), self._result(future)
                    future.release()
            finally:
                if client.status == "running":
                    client.cancel([*waiting, *sent.values()])

    def _result(self, future: Any) -> Any:
        try:
            found = future.result()
        except distributed.KilledWorker:
            raise SimError(f"several workers of {self.address} died of the same point; more memory may help") from None
        except (distributed.client.FutureCancelledError, distributed.comm.CommClosedError):
            raise SimError(f"the Dask cluster at {self.address} went away, or cancelled the points") from None
        except (ImportError, AttributeError) as error:
            raise _differs("a worker", f"cannot load it ({error})") from None
        if isinstance(found, _Refused):
            raise _differs(found.worker, found.has)
        return found


@attrs.frozen
class _Refused:
    """A worker that will not do, and what it has instead."""

    worker: str
    has: str


def _packed(tasks: Sequence[Task]) -> tuple[list[Parcel], dict[str, bytes]]:
    """The parcel of each task, and digest -> content of all files."""
    packer = Packer()
    try:
        parcels = [task.parcel(packer) for task in tasks]
    except OSError as error:
        problem = f"a file of the scenario cannot be sent ({error.strerror})"
        raise ConfigError("--dask", problem=problem, got=str(error.filename)) from None
    if (size := sum(map(len, packer.contents.values()))) > MAX_SENT_BYTES:
        problem = "the files that the scenario names are too large to be sent"
        raise ConfigError("--dask", problem=problem, got=f"{size} bytes", allowed=f"at most {MAX_SENT_BYTES} bytes")
    return parcels, packer.contents


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Dask logs and warns of all that is told here as one error."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def _connected(address: str) -> Iterator[Any]:
    if not _ADDRESS.fullmatch(address):
        raise ConfigError("--dask", got=address, allowed="HOST:PORT of a Dask scheduler, or tls://HOST:PORT")
    try:
        # A client waits without limit for the greeting of whoever took its connection.
        asyncio.run(asyncio.wait_for(_greet(address), CONNECT_S))
        client = distributed.Client(address, timeout=CONNECT_S, set_as_default=False)
    except (OSError, ValueError, RuntimeError, TypeError):  # not all are of the net: what answers may be anything
        problem = f"no Dask scheduler answered there within {CONNECT_S:g} s"
        raise ConfigError("--dask", problem=problem, got=address, hint="start one with: dask scheduler") from None
    try:
        yield client
    finally:
        client.close(timeout=2)


async def _greet(address: str) -> None:
    """Raises: ValueError if it is a worker that answers; what the connection raises."""
    arguments = distributed.Security().get_connection_args("client")
    where = distributed.core.coerce_to_address(address)
    async with distributed.core.rpc(where, connection_args=arguments, timeout=CONNECT_S) as there:
        if (await there.identity())["type"] != "Scheduler":
            raise ValueError


def _check_workers(client: Any) -> None:
    """Before anything is sent. A worker that comes later is looked at with its first task."""
    try:
        client.wait_for_workers(1, timeout=WORKERS_S)
    except TimeoutError:
        raise ConfigError(
            "--dask", problem="the cluster has no workers", hint="start some: dask worker ADDRESS"
        ) from None
    # Functions of the standard library, which a worker without g2sim has too.
    found = {
        "g2sim": client.run(version, "g2sim", on_error="return"),
        "Python": client.run(platform.python_version, on_error="return"),
        "numpy": client.run(version, "numpy", on_error="return"),
    }
    for name, here in _versions().items():
        for worker, there in sorted(found[name].items()):
            if isinstance(there, PackageNotFoundError):
                raise _differs(worker, f"has no {name}")
            if isinstance(there, str) and _decisive(name, there) != here:  # else it has gone meanwhile
                raise _differs(worker, f"has {name} {there}")


def _versions() -> dict[str, str]:
    found = (version("g2sim"), platform.python_version(), version("numpy"))
    return {name: _decisive(name, text) for name, text in zip(_EQUAL, found, strict=True)}


def _decisive(name: str, text: str) -> str:
    return text if name == "g2sim" else ".".join(text.split(".")[:2])


def _differs(worker: str, has: str) -> ConfigError:
    needed = ", ".join(f"{name} {text}" for name, text in _versions().items())
    return ConfigError(
        "--dask", problem=f"{worker} {has}", allowed=f"{needed}, as here: figures must not depend on where"
    )


# -- on a worker


def _content(content: bytes) -> bytes:
    return content


def _carry_out(
    work: Callable[[Task], Any], task: Task, parcel: Parcel, contents: dict[str, bytes], versions: dict[str, str]
) -> Any:
    worker = distributed.get_worker()
    for name, here in _versions().items():
        if versions[name] != here:
            return _Refused(worker.address, f"has {name} {here}")
    unpacked = parcel.unpack(Path(worker.local_directory), contents)
    return work(attrs.evolve(task, unpacked=unpacked))
