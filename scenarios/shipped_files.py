"""The files that a scenario names, as parcels for a machine that does not have them.

Owns: which keys name files, what is sent, where it stands at the other end, and that messages read as if nothing had
been moved. Refuses to know: how parcels travel.

A relative path keeps its text: the parcel is unpacked below a folder in which it leads to the same content. Only
absolute paths are other ones there.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from g2sim.scenarios.yaml_source import Document

_KEYS = ("path", "paths")
_ABSOLUTE = "absolute"


def paths_named(value: Any, *, is_path: bool = False) -> Iterator[str]:
    """The texts at keys ``path`` and ``paths`` of plain values, keys in order."""
    if isinstance(value, Mapping):
        for key in sorted(value):
            yield from paths_named(value[key], is_path=key in _KEYS)
    elif isinstance(value, list):
        for item in value:
            yield from paths_named(item, is_path=is_path)
    elif is_path and isinstance(value, str) and "\0" not in value:
        yield value


def files_under(path: Path) -> Iterator[Path]:
    """The file at ``path``, or all files of the folder there, in order."""
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            yield file


@attrs.frozen
class Parcel:
    """What is sent for one scenario.

    Attributes:
        base: the scenario's folder, as the user gave it.
        paths: all paths that are named, as written in the scenario.
        folders: those that are folders.
        files: (path as written, path below it, "" for a file itself) -> digest of the content.
    """

    base: str
    paths: tuple[str, ...]
    folders: tuple[str, ...]
    files: tuple[tuple[str, str, str], ...]

    @property
    def digests(self) -> tuple[str, ...]:
        """Of the contents, each once."""
        return tuple(dict.fromkeys(digest for _, _, digest in self.files))

    def unpack(self, folder: Path, contents: Mapping[str, bytes]) -> Unpacked:
        """The files below ``folder``, made there unless they are there already.

        Args:
            contents: digest -> content.
        Raises: OSError.
        """
        name = hashlib.sha256(repr((self.paths, self.folders, self.files)).encode()).hexdigest()[:16]
        there = Unpacked(self.base, folder / name, max(map(_climb, self.paths), default=0))
        if there.root.exists():
            return there
        partial = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=folder))
        try:
            fresh = attrs.evolve(there, root=partial)
            fresh.folder.mkdir(parents=True)
            for path in self.folders:
                os.makedirs(fresh.path(path), exist_ok=True)  # noqa: PTH103 - a Path would drop "x/.."
            for path, below, digest in self.files:
                file = os.path.join(fresh.path(path), below) if below else fresh.path(path)  # noqa: PTH118
                os.makedirs(os.path.dirname(file), exist_ok=True)  # noqa: PTH103, PTH120
                Path(file).write_bytes(contents[digest])
            partial.rename(there.root)
        except OSError:
            if not there.root.exists():  # else another thread was quicker
                raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return there


@attrs.frozen
class Unpacked:
    """Where the files of a parcel stand.

    Attributes:
        base: the scenario's folder where it came from.
        root: the folder of all that was unpacked.
        depth: folders between it and the scenario's, so that ``..`` stays below it.
    """

    base: str
    root: Path
    depth: int

    @property
    def folder(self) -> Path:
        """Stands for the scenario's folder."""
        return self.root.joinpath("base", *map(str, range(self.depth)))

    def path(self, written: str) -> str:
        """Where a path of the scenario leads."""
        return f"{self.root / _ABSOLUTE}{written}" if written.startswith("/") else f"{self.folder}/{written}"

    def document(self, document: Document) -> Document:
        """The scenario with its absolute paths changed."""
        return attrs.evolve(document, values=self._moved(document.values))

    def _moved(self, value: Any, *, is_path: bool = False) -> Any:
        if isinstance(value, Mapping):
            return {key: self._moved(item, is_path=key in _KEYS) for key, item in value.items()}
        if isinstance(value, list):
            return [self._moved(item, is_path=is_path) for item in value]
        return self.path(value) if is_path and isinstance(value, str) and value.startswith("/") else value

    def told(self, message: str) -> str:
        """A message with the paths where the files came from."""
        base = "" if self.base == "." else f"{self.base}/"
        return message.replace(f"{self.root / _ABSOLUTE}/", "/").replace(f"{self.folder}/", base)


def _climb(path: str) -> int:
    """How far a relative path leads above where it starts."""
    level = lowest = 0
    for part in path.split("/"):
        level += {"..": -1, ".": 0, "": 0}.get(part, 1)
        lowest = min(lowest, level)
    return 0 if path.startswith("/") else -lowest


class Packer:
    """Makes parcels; each file is read once. Raises: OSError where a file cannot be read."""

    def __init__(self) -> None:
        self._digests: dict[Path, str] = {}
        self.contents: dict[str, bytes] = {}

    def parcel(self, values: Mapping[str, Any], base: Path) -> Parcel:
        """What the scenario with these values needs; a path that leads nowhere is left out."""
        written = list(dict.fromkeys(paths_named(values)))
        files = [
            (path, "" if file == base / path else str(file.relative_to(base / path)), self._digest(file))
            for path in written
            for file in files_under(base / path)
        ]
        return Parcel(
            str(base), tuple(written), tuple(path for path in written if (base / path).is_dir()), tuple(files)
        )

    def _digest(self, file: Path) -> str:
        if file not in self._digests:
            content = file.read_bytes()
            self._digests[file] = digest = hashlib.sha256(content).hexdigest()
            self.contents[digest] = content
        return self._digests[file]
