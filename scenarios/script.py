"""Scripted scenarios: a Python function that submits requests, waits for events, and asserts, in virtual time.

    SCENARIO = "two-workers.yaml"        # or the same content as a mapping; its traffic section is not used

    async def scenario(cluster):
        first = cluster.submit([1, 2, 3])
        await first.end()
        again = cluster.submit([1, 2, 3, 4])
        await again.end()
        assert again.row["reused_input_tokens"] == 3 * cluster.block_size_tokens

Owns: the function's turns on the bus, what it may ask for, how its failure is told. It is an actor like any other, and
its turns are the last of a round, so it sees all that has happened by then. Refuses to know: how requests are served.
"""

from __future__ import annotations

import heapq
import importlib.util
import math
import sys
import traceback
import types
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from g2sim.actors.config import HostScope
from g2sim.actors.kv.blocks import BlockHasher
from g2sim.actors.kv.prompt import OUTPUT_TOKEN_BASE, RunPrompt
from g2sim.actors.phases import Phase
from g2sim.actors.traffic.actor import Begin
from g2sim.actors.traffic.request import Release, RequestSpec, RequestStatus
from g2sim.actors.worker.events import RequestAdmitted, RequestEnded
from g2sim.bus.errors import ConfigError, SimError, shorten
from g2sim.bus.events import BY_CLASS, Record
from g2sim.bus.kernel import Envelope, Port, Subscription
from g2sim.scenarios.deployment import TRAFFIC, Cluster
from g2sim.scenarios.report import SHARED_POOL, private_pool_name
from g2sim.scenarios.schema import ConcurrencyLoad, Scenario, ScriptSource, load_scenario

if TYPE_CHECKING:
    from g2sim.actors.host_pool.pool import HostPool

SCRIPT = "script"
_SHOWN_EVENTS = 5


class ScriptFailed(SimError):
    """The function raised: an assertion that does not hold, or any other exception (``__cause__``)."""


@attrs.frozen
class Script:
    """A scripted scenario: the function, and the file that it comes from as the user wrote it."""

    function: Callable[[ScriptedCluster], Coroutine[Any, Any, None]]
    path: str


@attrs.frozen(slots=True)
class CachedBlocks:
    """Leading blocks of a prompt that a rank holds: in G1, and from there on in the host tier that it can reach."""

    device: int
    host: int


class ScriptedRequest:
    """A submitted request.

    Attributes:
        number: its number in events and reports, None until it is released.
    """

    def __init__(self, cluster: ScriptedCluster, key: int) -> None:
        self._cluster = cluster
        self._key = key
        self._row: dict[str, Any] | None = None
        self.number: int | None = None

    @property
    def row(self) -> dict[str, Any]:
        """Its line of requests.jsonl. Raises: AssertionError if it has not ended."""
        if self._row is None:
            raise AssertionError(f"request {self.number} has not ended")
        return self._row

    async def admitted(self) -> RequestAdmitted:
        """Wait until a rank has taken it from its queue for the first time (or return at once); the event."""
        event: RequestAdmitted = await self._past_or_next(RequestAdmitted)
        return event

    async def end(self) -> dict[str, Any]:
        """Wait until it has ended (or return at once); its row."""
        await self._past_or_next(RequestEnded)
        return self.row

    def cancel(self) -> None:
        """Nobody waits for it any longer: it ends as "canceled" at once, wherever it is; nothing if it has ended.

        Raises: AssertionError if it has not arrived yet.
        """
        cluster = self._cluster
        if self.number is None:
            raise AssertionError("a request that has not arrived cannot be canceled")
        if self._key in cluster._open and cluster._cluster is not None and cluster._port is not None:
            cluster._cluster.traffic.cancel(self.number, cluster._port)

    async def _past_or_next(self, kind: type[Any]) -> Any:
        if self.number is not None:
            for record in self._cluster.records(kind, request=self.number):
                return record.event
        return (await self._cluster._next((kind,), lambda event: event.request == self.number, None)).event


@attrs.frozen(slots=True)
class _Wait:
    """What the function waits for: an event of these types that matches, or a time [ms]."""

    kinds: tuple[type[Any], ...]
    matches: Callable[[Any], bool]
    until_ms: float | None


@attrs.frozen(slots=True)
class _Woken:
    """Something that may have been waited for was published, or the time has come."""


class ScriptedCluster:
    """What a scripted scenario is given. Times are virtual [ms]; whatever is awaited must come from here."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self._hasher = BlockHasher(scenario.deployment.block_size_tokens)
        self._history: list[Record] = []
        self._seen = 0
        self._pending: list[tuple[float, int]] = []
        self._specs: dict[int, RequestSpec] = {}
        self._requests: list[ScriptedRequest] = []
        self._released: list[ScriptedRequest] = []
        self._open: set[int] = set()
        self._turns_of: dict[str, int] = {}
        self._cluster: Cluster | None = None
        self._port: Port | None = None

    # -- for scripts

    @property
    def now_ms(self) -> float:
        return self._port.now_ms if self._port is not None else 0.0

    @property
    def block_size_tokens(self) -> int:
        return self.scenario.deployment.block_size_tokens

    def submit(
        self,
        blocks: Sequence[int],
        *,
        output_tokens: int = 1,
        input_tokens: int | None = None,
        session: str | None = None,
        at_ms: float | None = None,
    ) -> ScriptedRequest:
        """Send a request.

        Args:
            blocks: the prompt, one number per block of the deployment's block size; equal numbers are equal text.
            output_tokens: tokens to generate, 0 = prefill only.
            input_tokens: length of the prompt, if its last block is not full.
            session: conversation that it is the next turn of.
            at_ms: when it arrives; left out, now.
        Raises: ConfigError for values out of range.
        """
        length = self.block_size_tokens * len(blocks) if input_tokens is None else input_tokens
        if any(type(block) is not int or not 0 <= block < OUTPUT_TOKEN_BASE for block in blocks):
            raise ConfigError("blocks", got=list(blocks), allowed=f"integers from 0 to {OUTPUT_TOKEN_BASE - 1}")
        if -(-length // self.block_size_tokens) != len(blocks) or length < 1:
            allowed = f"1 to {self.block_size_tokens} tokens for each of the {len(blocks)} blocks, the others full"
            raise ConfigError("input_tokens", got=length, allowed=allowed)
        if type(output_tokens) is not int or output_tokens < 0:
            raise ConfigError("output_tokens", got=output_tokens, allowed="an integer, 0 or more")
        arrival_ms = self.now_ms if at_ms is None else at_ms
        if not self.now_ms <= arrival_ms < math.inf:
            raise ConfigError("at_ms", got=at_ms, allowed=f"a finite time, not before {self.now_ms!r}, the present")
        key = len(self._requests)
        turn = None
        if session is not None:
            turn = self._turns_of.get(session, 0)
            self._turns_of[session] = turn + 1
        self._specs[key] = RequestSpec(
            name=None,
            session_id=session,
            turn_index=turn,
            prompt=RunPrompt(tuple(blocks), self.block_size_tokens, length),
            output_tokens=output_tokens,
        )
        request = ScriptedRequest(self, key)
        self._requests.append(request)
        heapq.heappush(self._pending, (arrival_ms, key))
        if self._port is not None:
            self._port.send(TRAFFIC, Begin(), phase=Phase.TERMINAL)
        return request

    async def sleep(self, duration_ms: float) -> None:
        """Let time pass."""
        await self.until(self.now_ms + duration_ms)

    async def until(self, time_ms: float) -> None:
        """Go on at a time, after everything else of that instant that is due by then. At once if it is past."""
        if time_ms > self.now_ms:
            await _pause(_Wait((), lambda _: False, time_ms))

    async def event(self, *kinds: type[Any], within_ms: float | None = None, **fields: Any) -> Any:
        """Wait for the next event of these types whose fields have these values; returns the event.

        Events count from where the function last went on, so none of one instant is missed.

        Raises: AssertionError if there is none within ``within_ms``.
        """
        until_ms = None if within_ms is None else self.now_ms + within_ms
        record = await self._next(kinds, lambda event: _has(event, fields), until_ms)
        return record.event

    async def idle(self) -> None:
        """Wait until every request that was submitted has ended."""
        while self._open or self._pending:
            await self._next((RequestEnded,), lambda _: True, None)

    def records(self, *kinds: type[Any], **fields: Any) -> list[Record]:
        """Everything published so far of these types (all, if none is given) whose fields have these values."""
        return [one for one in self._history if (not kinds or type(one.event) in kinds) and _has(one.event, fields)]

    def cached(
        self, blocks: Sequence[int], *, worker: int = 0, role: str | None = None, dp_rank: int = 0
    ) -> CachedBlocks:
        """How much of a prompt of whole blocks a rank holds now.

        Args:
            role: "aggregated", "prefill" or "decode"; left out, the only role or prefill.
        Raises: ConfigError for a rank that does not exist.
        """
        roles = [pool.role.value for pool in self.scenario.deployment.pools]
        role = role if role is not None else roles[0]
        pool = next((pool for pool in self.scenario.deployment.pools if pool.role.value == role), None)
        if pool is None:
            raise ConfigError("role", got=role, allowed=" or ".join(roles))
        if not (0 <= worker < pool.workers and 0 <= dp_rank < pool.dp_size):
            allowed = f"worker 0 to {pool.workers - 1}, rank 0 to {pool.dp_size - 1}"
            raise ConfigError("worker", got=(worker, dp_rank), allowed=allowed)
        if self._cluster is None:
            return CachedBlocks(0, 0)
        prompt = RunPrompt(tuple(blocks), self.block_size_tokens, self.block_size_tokens * len(blocks))
        chain = self._hasher.chain(prompt)
        hashes = chain.sequence_hashes
        name = f"{role}-{worker}"
        device = self._cluster.workers[name].places[dp_rank].rank.cached_blocks(chain)
        host = self._host_pool(pool.rank.host is not None and pool.rank.host.scope, name, dp_rank)
        contents = {} if host is None else host.contents()
        reached = device
        while reached < len(hashes) and contents.get(hashes[reached], (False, 0))[0]:
            reached += 1
        return CachedBlocks(device, reached - device)

    # -- inside

    async def _next(self, kinds: tuple[type[Any], ...], matches: Callable[[Any], bool], until_ms: float | None) -> Any:
        if not kinds:
            raise ConfigError("event", got=(), allowed="at least one type of event")
        for kind in kinds:
            if kind not in BY_CLASS:
                raise ConfigError("event", got=kind, allowed="a type of event (docs/architecture.md)")
        record = await _pause(_Wait(kinds, matches, until_ms))
        if record is None:
            names = " or ".join(kind.__name__ for kind in kinds)
            raise AssertionError(f"no {names} that matches by {until_ms!r} ms")
        return record

    def _host_pool(self, scope: HostScope | bool, name: str, dp_rank: int) -> HostPool | None:
        if self._cluster is None or not scope:
            return None
        pool_name = SHARED_POOL if scope is HostScope.CLUSTER_SHARED else private_pool_name(name, dp_rank)
        return self._cluster.host_pools[pool_name]

    # -- as traffic (TrafficDriver)

    def next_ready_ms(self) -> float | None:
        return self._pending[0][0] if self._pending else None

    def release(self, now_ms: float) -> Sequence[Release]:
        out = []
        while self._pending and self._pending[0][0] <= now_ms:
            arrival_ms, key = heapq.heappop(self._pending)
            request = self._requests[key]
            request.number = len(self._released)
            self._released.append(request)
            self._open.add(key)
            out.append(Release(key, arrival_ms, self._specs.pop(key)))
        return out

    def ended(self, ends: Sequence[tuple[int, RequestStatus]], now_ms: float) -> Sequence[object]:
        self._open.difference_update(key for key, _ in ends)
        return ()

    def waiting(self) -> Sequence[str]:
        return ()

    @property
    def total_requests(self) -> int | None:
        return None

    def take_row(self, row: dict[str, Any]) -> None:
        """Give a request that has ended its row."""
        self._released[row["request"]]._row = row


class ScriptActor:
    """The function's place on the bus. See the module's text."""

    def __init__(self, script: Script, cluster: ScriptedCluster) -> None:
        self._script = script
        self._cluster = cluster
        self._running: Coroutine[Any, Any, None] | None = None
        self._done = False
        self._wait: _Wait | None = None
        self._timer: Envelope | None = None
        self._subscriptions: dict[tuple[type[Any], ...], Subscription] = {}

    def install(self, made: Cluster) -> None:
        """Join a deployment's bus, after all other actors."""
        kernel = made.kernel
        self._cluster._cluster = made
        kernel.add_sink(self._cluster._history.append)
        kernel.post(kernel.register(SCRIPT, self), _Woken(), Phase.SCRIPT, 0.0)

    def receive(self, message: Any, port: Port) -> None:
        cluster = self._cluster
        cluster._port = port
        if self._running is None:
            self._running = self._script.function(cluster)
            self._go_on(None, port)
        while (wait := self._wait) is not None:
            history = cluster._history
            found = None
            while cluster._seen < len(history) and found is None:
                record = history[cluster._seen]
                cluster._seen += 1
                if type(record.event) in wait.kinds and wait.matches(record.event):
                    found = record
            if found is None and (wait.until_ms is None or wait.until_ms > port.now_ms):
                break
            self._go_on(found, port)
        self._listen(port)

    def waiting(self) -> Sequence[str]:
        if self._done or self._wait is None:
            return ()
        names = " or ".join(kind.__name__ for kind in self._wait.kinds)
        frame = getattr(self._running, "cr_frame", None)
        where = self._script.path if frame is None else f"{self._script.path}:{frame.f_lineno}"
        return [f"{where} waits for {names}"]

    def finish(self) -> None:
        """To be called when the run is over. Raises: ScriptFailed if a time limit ended it before the function."""
        if not self._done:
            raise ScriptFailed(f"{self._script.path}: the time limit of the run came before the end of the script")

    def close(self) -> None:
        """Let go of the function."""
        if self._running is not None:
            self._running.close()

    def _go_on(self, record: Record | None, port: Port) -> None:
        """Run the function up to where it waits next."""
        if self._running is None:
            return
        self._wait = None
        try:
            wait = self._running.send(record)
        except StopIteration:
            self._done = True
            return
        except Exception as error:
            raise ScriptFailed(self._told(error, port)) from error
        if type(wait) is not _Wait:
            problem = f"it waits on {type(wait).__name__}; a script may only await what the cluster offers"
            raise ScriptFailed(f"{self._script.path} at {port.now_ms!r} ms: {problem}")
        self._wait = wait

    def _listen(self, port: Port) -> None:
        """Be woken for what is waited for, and for nothing else."""
        if self._timer is not None:
            port.cancel(self._timer)
            self._timer = None
        for subscription in self._subscriptions.values():
            subscription.drain()
            subscription.silent = True
        wait = self._wait
        if wait is None:
            return
        if wait.kinds:
            subscription = self._subscriptions.get(wait.kinds) or self._subscribe(wait.kinds)
            subscription.silent = False
        if wait.until_ms is not None:
            self._timer = port.send_self(_Woken(), phase=Phase.SCRIPT, at_ms=wait.until_ms)

    def _subscribe(self, kinds: tuple[type[Any], ...]) -> Subscription:
        made = self._cluster._cluster
        if made is None:
            raise ScriptFailed(f"{self._script.path}: waits for events before it is on a bus")
        subscription = made.kernel.subscribe(SCRIPT, kinds, wake_message=_Woken(), wake_phase=Phase.SCRIPT)
        self._subscriptions[kinds] = subscription
        return subscription

    def _told(self, error: Exception, port: Port) -> str:
        """Where the function failed, why, and what had happened last."""
        here = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
        where = f"{self._script.path}:{here[-1].lineno}" if here else self._script.path
        said = str(error) or (here[-1].line if here else "") or ""
        lines = [f"{where} at {port.now_ms!r} ms: {type(error).__name__}: {said}"]
        last = self._cluster._history[-_SHOWN_EVENTS:]
        lines += [
            "the last events before it:",
            *(f"  {one.time_ms!r} ms {one.source}: {shorten(one.event, 160)}" for one in last),
        ]
        return "\n".join(lines)


def load_script(path: Path) -> tuple[Scenario, Script]:
    """Reads a scripted scenario; this runs the file's code.

    Raises: ConfigError if it cannot be imported, or lacks ``SCENARIO`` or ``async def scenario``.
    """
    if not path.is_file():
        raise ConfigError("", problem="no such file", where=str(path))
    spec = importlib.util.spec_from_file_location(f"g2sim_script_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError("", problem="cannot be imported", where=str(path))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = getattr(error, "lineno", None) or (frames[-1].lineno if frames else None)
        where = f"{path}:{line}" if line else str(path)
        problem = f"cannot be imported: {type(error).__name__}: {error}"
        raise ConfigError("", problem=problem, where=where) from error
    function = getattr(module, "scenario", None)
    if not callable(function):
        hint = "a scripted scenario has `async def scenario(cluster)`"
        raise ConfigError("scenario", problem="missing", where=str(path), hint=hint)
    return scripted_scenario(getattr(module, "SCENARIO", None), path), Script(function, str(path))


def scripted_scenario(given: Mapping[str, Any] | str | Path | None, path: Path) -> Scenario:
    """The deployment for a script at ``path``, whose requests take the place of the traffic section.

    Args:
        given: the scenario's values, or the path of a scenario file, relative to the script.
    Raises: ConfigError.
    """
    if isinstance(given, str | Path):
        scenario = load_scenario(path.parent / given)
    elif isinstance(given, Mapping):
        values = {key: value for key, value in given.items() if key != "traffic"}
        stop = given.get("traffic", {}).get("stop") if isinstance(given.get("traffic"), Mapping) else None
        source = {"type": "script", "path": path.name}
        values["traffic"] = {"source": source, "load": {}, **({"stop": stop} if stop else {})}
        scenario = Scenario.from_dict({"name": path.stem, **values}, base_dir=path.parent)
    else:
        allowed = "a mapping with the scenario's values, or the path of a scenario file"
        raise ConfigError("SCENARIO", got=given, allowed=allowed, where=str(path))
    traffic = attrs.evolve(scenario.traffic, source=ScriptSource(path=path.name), load=ConcurrencyLoad(), count=None)
    return attrs.evolve(scenario, traffic=traffic)


def _has(event: Any, fields: Mapping[str, Any]) -> bool:
    return all(getattr(event, name) == value for name, value in fields.items())


@types.coroutine
def _pause(wait: _Wait) -> Generator[_Wait, Record | None, Record | None]:
    return (yield wait)


__all__ = [
    "CachedBlocks",
    "Script",
    "ScriptActor",
    "ScriptFailed",
    "ScriptedCluster",
    "ScriptedRequest",
    "load_script",
    "scripted_scenario",
]
