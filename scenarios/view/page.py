"""The page of a run: one HTML file that needs nothing else.

The page's own parts lie beside this module as files. Data go in deflated and in base64, so that no text of a scenario
can end the script it stands in; the browser inflates them by itself.
"""

from __future__ import annotations

import base64
import html
import importlib.resources
import json
import re
import zlib
from pathlib import Path
from typing import Any

from g2sim.scenarios.run import LogReport, report_of_log
from g2sim.scenarios.schema import Scenario
from g2sim.scenarios.spans import SpanFold
from g2sim.scenarios.view.data import ViewData

_SCRIPTS = ("model.js", "charts.js", "tokens.js", "tables.js", "page.js")


def page_of_log(path: Path, scenario: Scenario) -> tuple[str, LogReport]:
    """The page of a run, and what its log says of it.

    Args:
        path: a run folder or a log; the page shows it as it is given, in commands.
        scenario: what was run, see ``scenario_of_log``.
    Raises: as ``report_of_log``.
    """
    data = ViewData(scenario)
    spans = SpanFold(data)
    log = report_of_log(path, on_row=data.row, on_record=spans.apply)
    spans.finish()
    return _page(f"{scenario.name} - g2sim", data.value(log, str(path))), log


def _page(title: str, value: dict[str, Any]) -> str:
    parts = importlib.resources.files(__package__)
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    filled = {
        "title": html.escape(title),
        "style": parts.joinpath("page.css").read_text("utf-8"),
        "script": "\n".join(parts.joinpath(name).read_text("utf-8") for name in _SCRIPTS),
        "data": base64.b64encode(zlib.compress(text.encode("utf-8"), 9)).decode("ascii"),
    }
    # In one go, so that a title with braces in it stays as it is.
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: filled[mark[1]], parts.joinpath("page.html").read_text("utf-8"))
