"""Which test shows which field case: the table in docs/reliability.md.

    python tests/field/field_table.py

prints it anew. A test names its cases as F01 in its text, or as ``test_f01_...`` in its name.
"""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
CASES = range(1, 91)

_NAMED = re.compile(r"\bF(\d\d)\b|def test_((?:f\d\d[a-z]?_)+)")

ELSEWHERE = {
    42: "there is no such counter; all that is counted of a host tier is the same at time 0 and later",
    41: "the recorded reference differs as long as the chain is not looked up again, and is followed; both are tests",
    51: "a prompt that fits, but cannot grow, ends the run with a named deadlock, as it ends the reference's",
    63: "surplus ids are ignored, as recorded; too few are refused",
    65: "the smallest of all arrivals counts as 0, as recorded, so a negative one is no fault",
    69: "the reference refuses such a turn, as recorded, so it is not dropped",
}
"""Cases whose outcome here is another one than the case words, and why."""


def shown_by() -> dict[int, list[str]]:
    """Case number -> files whose tests show it."""
    found: dict[int, set[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for match in _NAMED.finditer(path.read_text(encoding="utf-8")):
            numbers = [match[1]] if match[1] else re.findall(r"f(\d\d)", match[2])
            for number in numbers:
                found.setdefault(int(number), set()).add(path.relative_to(TESTS).as_posix())
    return {number: sorted(files) for number, files in sorted(found.items())}


def table() -> str:
    """The table as Markdown."""
    shown = shown_by()
    lines = ["| case | tests | remark |", "|---|---|---|"]
    for number in CASES:
        files = ", ".join(f"`{file}`" for file in shown.get(number, ()))
        lines.append(f"| F{number:02} | {files} | {ELSEWHERE.get(number, '')} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
