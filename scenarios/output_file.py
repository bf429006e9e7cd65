"""Files that a command writes: whole or not at all, and never over another one unasked."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO, TextIO, cast

from g2sim.bus.errors import ConfigError, OutputFailed


def check_picture(path: Path | None) -> None:
    """Raises: ConfigError for a picture whose name is not that of an SVG file."""
    if path is not None and path.suffix != ".svg":
        raise ConfigError("--picture", got=str(path), allowed="a file name that ends in .svg")


@contextmanager
def new_text_file(path: Path, *, overwrite: bool, option: str = "--out") -> Iterator[TextIO]:
    """As ``new_binary_file``, for UTF-8 text."""
    with _new_file(path, overwrite, option, mode="w", encoding="utf-8", newline="\n") as file:
        yield cast(TextIO, file)


@contextmanager
def new_binary_file(path: Path, *, overwrite: bool, option: str = "--out") -> Iterator[BinaryIO]:
    """Opens a file that takes its place at ``path`` when the block ends without an error.

    It is written as ``<path>.partial``. ``option`` is where the user named it, for errors.
    Raises: ConfigError if ``path`` exists and ``overwrite`` is not set, or no file can be made there; OutputFailed if
        the file takes no more. Nothing is left of it then.
    """
    with _new_file(path, overwrite, option, mode="wb") as file:
        yield cast(BinaryIO, file)


@contextmanager
def _new_file(path: Path, overwrite: bool, option: str, **opening: Any) -> Iterator[IO[Any]]:
    if path.is_dir():
        raise ConfigError(option, problem="is a folder", got=str(path), allowed="the name of a file")
    if os.path.lexists(path) and not overwrite:
        raise ConfigError(option, problem="exists already", got=str(path), hint="choose another, or add --overwrite")
    partial = path.with_name(f"{path.name}.partial")
    try:
        file = partial.open(**opening)
    except OSError as error:
        raise ConfigError(option, problem=f"cannot be written ({error.strerror})", got=str(path)) from None
    try:
        with file:
            yield file
        partial.replace(path)
    except BaseException as problem:
        partial.unlink(missing_ok=True)
        if isinstance(problem, OSError):
            raise OutputFailed(f"{path}: cannot be written: {problem.strerror or problem}") from problem
        raise
