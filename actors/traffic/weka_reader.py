"""Weka traces: files to plays as authored, every field checked.

Owns: which files make a corpus and in what order, the checks on each play, the basis of nested timestamps, and the
source digest. Refuses to know: what a play means (``weka_lowering``).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from pathlib import Path

import attrs
from blake3 import blake3

from g2sim.actors.traffic.graph import MAX_TIME_MS
from g2sim.actors.traffic.trace_json import MAX_TOKENS, Fields, TraceText, read_bytes, unreadable
from g2sim.bus.errors import ConfigError

EPS_S = 1e-6
"""Recorded times closer than this count as equal [s]."""

_MAX_S = MAX_TIME_MS / 1000.0


class NestedBasis(enum.StrEnum):
    """What the ``t`` of a subagent's requests counts from: the play's start, or the subagent's own ``t``."""

    ABSOLUTE = "absolute"
    RELATIVE = "relative"
    NOT_APPLICABLE = "not_applicable"


class SubagentStatus(enum.StrEnum):
    """How a subagent ran: the parent waited for it, or it ran in the background."""

    COMPLETED = "completed"
    ASYNC_LAUNCHED = "async_launched"


class _HashScope(enum.StrEnum):
    LOCAL = "local"


class _RequestType(enum.StrEnum):
    N = "n"
    S = "s"


class _EntryType(enum.StrEnum):
    N = "n"
    S = "s"
    SUBAGENT = "subagent"


@attrs.frozen(kw_only=True, slots=True)
class WekaRequest:
    """A request as authored.

    Attributes:
        t_s: recorded start [s]; of a nested request as written, whatever the basis.
        model: recorded model.
        input_tokens, output_tokens: lengths.
        hashes: block hashes, possibly fewer or more than the prompt has blocks.
        api_time_s: recorded service time [s], None if unknown.
    """

    t_s: float
    model: str
    input_tokens: int
    output_tokens: int
    hashes: tuple[int, ...]
    api_time_s: float | None


@attrs.frozen(kw_only=True, slots=True)
class WekaSubagent:
    """A subagent marker and the requests inside it.

    Attributes:
        outer_idx: its place in the play's list of entries.
        t_s: recorded start [s].
        agent_id: its name.
        blocking: whether the parent waited for its end.
        duration_ms: recorded duration [ms], None if unknown.
        requests: the requests inside, may be empty.
    """

    outer_idx: int
    t_s: float
    agent_id: str
    blocking: bool
    duration_ms: int | None
    requests: tuple[WekaRequest, ...]


@attrs.frozen(kw_only=True, slots=True)
class WekaPlay:
    """One trace object.

    Attributes:
        source_name: file name, with the object's number where a file may hold several.
        where: "file:line" of the object, for messages.
        trace_id: its ``id``.
        requests: (place in the list of entries, request) of every outer request; at least one.
        subagents: the markers, each after at least one request in the list of entries.
    """

    source_name: str
    where: str
    trace_id: str
    requests: tuple[tuple[int, WekaRequest], ...]
    subagents: tuple[WekaSubagent, ...]


@attrs.frozen(kw_only=True)
class WekaSource:
    """A whole corpus as authored, in corpus order.

    Attributes:
        block_size_tokens: the one block size of all plays.
        plays: at least one.
        basis: resolved.
        digest: source digest, which covers file names, bytes and the basis.
        notes: one line for each file in which ``models`` lacks a model that is used.
    """

    block_size_tokens: int
    plays: tuple[WekaPlay, ...]
    basis: NestedBasis
    digest: str
    notes: tuple[str, ...]


def read_weka(path: Path, *, basis: str, block_size: int | None, strict: bool) -> WekaSource:
    """Read a ``.json`` file, a ``.jsonl`` file, or every such file below a directory.

    Args:
        path: where the corpus is.
        basis: "absolute", "relative", or "auto" to decide by the timestamps.
        block_size: what the corpus must have as its block size [tokens], None for whatever it has.
        strict: refuse a play whose ``models`` is not empty and lacks a model that is used.
    Raises: ConfigError on anything malformed.
    """
    asked = None if basis == "auto" else _asked_basis(basis)
    reader = _Reader(asked, block_size, strict)
    raw = blake3(b"aisimulate-weka-corpus-v1\0")
    try:
        files = _corpus_files(path)
    except OSError as error:
        raise unreadable(path, error) from None
    for name, file in files:
        data = read_bytes(file)
        for part in (name.encode(), data):
            raw.update(len(part).to_bytes(8, "little") + part)
        reader.read(name, file, data)
    if reader.block_size is None:
        raise ConfigError("", problem="no .json or .jsonl file", allowed="at least one trace", where=str(path))
    resolved = asked or _resolve_basis(reader.plays)
    digest = blake3(b"aisimulate-weka-corpus-semantics-v2\0")
    for text in (raw.hexdigest(), resolved):
        digest.update(len(text).to_bytes(8, "little") + text.encode())
    return WekaSource(
        block_size_tokens=reader.block_size,
        plays=tuple(reader.plays),
        basis=resolved,
        digest=digest.hexdigest(),
        notes=tuple(reader.notes),
    )


def _asked_basis(basis: str) -> NestedBasis:
    if basis in (NestedBasis.ABSOLUTE, NestedBasis.RELATIVE):
        return NestedBasis(basis)
    raise ConfigError("weka_nested_timestamp_basis", got=basis, allowed="auto, absolute or relative")


def _resolve_basis(plays: list[WekaPlay]) -> NestedBasis:
    nested = [sub for play in plays for sub in play.subagents if sub.requests]
    if not nested:
        return NestedBasis.NOT_APPLICABLE
    if any(request.t_s < sub.t_s - EPS_S for sub in nested for request in sub.requests):
        return NestedBasis.RELATIVE
    return NestedBasis.ABSOLUTE


def _corpus_files(path: Path) -> list[tuple[str, Path]]:
    """(name with ``/`` between folders, file) of each file of the corpus, in byte order of the names."""
    if path.is_symlink():
        raise ConfigError("", got=str(path), allowed="a file or directory that is not a symlink", where=str(path))
    if path.is_dir():
        found = [(file.relative_to(path).as_posix(), file) for file in _walk(path) if _kind(file) is not None]
        return sorted(found)
    if not path.exists():
        raise ConfigError("", problem="there is no such file", allowed="a trace file or directory", where=str(path))
    if _kind(path) is None or not path.is_file():
        raise ConfigError("", got=path.name, allowed="a .json file, a .jsonl file or a directory", where=str(path))
    return [(_checked_name(path.name, path), path)]


def _walk(folder: Path) -> Iterator[Path]:
    """Files at any depth. Symlinks are refused: following one may leave the corpus or never end."""
    folders = [folder]
    while folders:
        for entry in folders.pop().iterdir():
            _checked_name(entry.name, entry)
            if entry.is_symlink():
                raise ConfigError("", problem="is a symlink", allowed="files and directories", where=str(entry))
            if entry.is_dir():
                folders.append(entry)
            elif entry.is_file():
                yield entry


def _kind(file: Path) -> str | None:
    suffix = file.suffix.lower()
    return suffix if suffix in (".json", ".jsonl") else None


def _checked_name(name: str, path: Path) -> str:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ConfigError("", got=name, allowed="a file name in UTF-8", where=repr(str(path))) from None
    return name


class _Reader:
    """Reads files one after the other; holds what must agree between them."""

    def __init__(self, basis: NestedBasis | None, block_size: int | None, strict: bool) -> None:
        self._basis = basis
        self._required = None if block_size is None else f"{block_size} (trace_block_size)"
        self._strict = strict
        self.block_size = block_size
        self.plays: list[WekaPlay] = []
        self.notes: list[str] = []

    def read(self, name: str, file: Path, data: bytes) -> None:
        """Append the plays of one file."""
        single = _kind(file) == ".json"
        undeclared: set[str] = set()
        count = 0
        for fields in TraceText.decode(str(file), data).objects():
            if single and count:
                raise fields.error(problem="a second object", allowed="one object in a .json file; use .jsonl for more")
            self.plays.append(self._play(name if single else f"{name}#{count:06d}", fields, undeclared))
            count += 1
        if not count:
            raise ConfigError("", problem="holds no object", allowed="at least one trace", where=f"{file}:1")
        if undeclared:
            self.notes.append(f"{file}: models lacks {', '.join(sorted(undeclared))}, used all the same")

    def _play(self, source_name: str, fields: Fields, undeclared: set[str]) -> WekaPlay:
        trace_id = fields.name("id")
        self._check_block_size(fields)
        fields.one_of("hash_id_scope", _HashScope)
        _check_ignored_counts(fields)
        declared = fields.names("models") if fields.given("models") else ()
        requests: list[tuple[int, WekaRequest]] = []
        subagents: list[WekaSubagent] = []
        for index, entry in enumerate(fields.children("requests")):
            if entry.one_of("type", _EntryType) is not _EntryType.SUBAGENT:
                requests.append((index, self._request(entry, declared, undeclared)))
            elif not requests:
                raise entry.error(problem="a subagent without a request before it", allowed="a request comes first")
            else:
                subagents.append(self._subagent(index, entry, declared, undeclared))
        if not requests:
            raise fields.error("requests", got=[], allowed="at least one entry of type n or s")
        return WekaPlay(
            source_name=source_name,
            where=fields.where,
            trace_id=trace_id,
            requests=tuple(requests),
            subagents=tuple(subagents),
        )

    def _check_block_size(self, fields: Fields) -> None:
        size = fields.integer("block_size", low=1)
        if self.block_size is None:
            self.block_size = size
            self._required = f"{size}, as at {fields.where}"
        if size != self.block_size:
            raise fields.error("block_size", got=size, allowed=self._required)

    def _subagent(self, index: int, fields: Fields, declared: tuple[str, ...], undeclared: set[str]) -> WekaSubagent:
        t_s = fields.number("t", high=_MAX_S)
        status = fields.one_of("status", SubagentStatus)
        fields.string("subagent_type")
        _check_ignored_counts(fields)
        for name in ("total_tokens", "tool_use_count"):
            if fields.present(name):
                fields.integer(name)
        if fields.given("models"):
            fields.strings("models")
        requests = []
        for entry in fields.children("requests"):
            entry.one_of("type", _RequestType)
            request = self._request(entry, declared, undeclared)
            if self._basis is NestedBasis.ABSOLUTE and request.t_s < t_s - EPS_S:
                allowed = f"no earlier than the subagent's t, {t_s!r}, as the times are absolute"
                raise entry.error("t", got=request.t_s, allowed=allowed)
            requests.append(request)
        if status is SubagentStatus.COMPLETED and not requests:
            raise fields.error("requests", got=[], allowed="at least one request in a completed subagent")
        return WekaSubagent(
            outer_idx=index,
            t_s=t_s,
            agent_id=fields.name("agent_id"),
            blocking=status is SubagentStatus.COMPLETED,
            duration_ms=fields.integer("duration_ms") if fields.present("duration_ms") else None,
            requests=tuple(requests),
        )

    def _request(self, fields: Fields, declared: tuple[str, ...], undeclared: set[str]) -> WekaRequest:
        model = fields.name("model")
        if declared and model not in declared:
            if self._strict:
                raise fields.error("model", got=model, allowed=f"one of the play's models: {', '.join(declared)}")
            undeclared.add(model)
        for name in ("think_time", "ttft"):
            if fields.present(name):
                fields.number(name, low=-MAX_TIME_MS)
        for name in ("input_types", "output_types"):
            if fields.given(name):
                fields.strings(name)
        if fields.given("stop"):
            fields.string("stop")
        return WekaRequest(
            t_s=fields.number("t", high=_MAX_S),
            model=model,
            input_tokens=fields.integer("in", low=1, high=MAX_TOKENS),
            output_tokens=fields.integer("out", high=MAX_TOKENS),
            hashes=fields.integers("hash_ids") if fields.given("hash_ids") else (),
            api_time_s=fields.number("api_time", high=_MAX_S) if fields.present("api_time") else None,
        )


def _check_ignored_counts(fields: Fields) -> None:
    for name in ("tool_tokens", "system_tokens"):
        if fields.given(name):
            fields.integer(name)
