"""Runs recorded cases through g2sim: one line a case, equal or the first difference.

    python tests/oracle/run.py CASE.json... | FOLDER...

Exit code 0 if all are equal, 1 if any differs, 2 if there is nothing to run.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from harness import check, load_case


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("paths", nargs="+", type=Path, metavar="CASE_OR_FOLDER")
    options.add_argument("--no-verify", action="store_true", help="do not compare live state with the log")
    chosen = options.parse_args()
    files: list[Path] = []
    for path in chosen.paths:
        files += sorted(path.glob("*.json")) if path.is_dir() else [path]
    different = ran = 0
    for path in files:
        try:
            case = load_case(path)
        except (OSError, json.JSONDecodeError) as error:
            print(f"{path}: cannot be read: {error}", file=sys.stderr)
            return 2
        if not isinstance(case, dict) or not ({"call", "rank"} & case.keys()):
            print(f"{path.name}: not a case")
            continue
        ran += 1
        difference = check(case, verify=not chosen.no_verify)
        different += difference is not None
        print(f"{path.name}: {'equal' if difference is None else difference}")
    print(f"{ran - different} equal, {different} different", file=sys.stderr)
    return 2 if ran == 0 else int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
