"""Opening the event log of a run, and saying what else a file is.

Owns: the refusal of streams where a run is wanted. Refuses to know: what a run's events mean.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

from g2sim.bus.errors import ConfigError
from g2sim.bus.log import LogReader
from g2sim.scenarios.capture import MESSAGE
from g2sim.scenarios.run_folder import log_file
from g2sim.scenarios.stream_sources import json_form

_JSON_FORMS: Final[dict[str | None, str]] = {
    "neutral": "a KV event stream in neutral JSON lines",
    "dynamo": "a stream of Dynamo router events in JSON lines",
}


def open_run(path: Path) -> LogReader:
    """A reader for the event log of a run: the file, or the log in a run folder.

    Raises: as ``LogReader``; ConfigError, with the command that reads it, for an event stream that is no run's log.
    """
    file = log_file(path)
    try:
        reader = LogReader(file)
    except ConfigError:
        with contextlib.suppress(OSError, ValueError), file.open("rb") as lines:
            if what := _JSON_FORMS.get(json_form(lines)):
                raise _stream(file, what) from None
        raise
    if MESSAGE in reader.header.events:
        reader.close()
        raise _stream(file, "a capture of g2sim record")
    return reader


def _stream(file: Path, what: str) -> ConfigError:
    return ConfigError("", where=str(file), problem=f"this is {what}, not a run", hint=f"run g2sim validate {file}")
