"""Writes run folders with whichever build of g2sim the interpreter holds.

    PYTHON tests/compiled/write_runs.py FOLDER

Into ``FOLDER`` go the runs of the library of scenarios, and those of recorded cases of the reference, or what g2sim
says of a case that it refuses. The last line of stdout says which build it was. Paths are part of what is written, so
two builds are compared by writing into the same folder.
"""

from __future__ import annotations

import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO / "tests" / "oracle"))

from harness import HERE, case_scenario, load_case  # noqa: E402

from g2sim.bus.errors import SimError  # noqa: E402
from g2sim.scenarios.aic_timing import aic_installed  # noqa: E402
from g2sim.scenarios.build import is_compiled  # noqa: E402
from g2sim.scenarios.run import run_scenario  # noqa: E402
from g2sim.scenarios.scenario_tests import collect, run_file  # noqa: E402

LIBRARY = REPO / "scenarios" / "library"


def main(folder: Path) -> None:
    for path in collect([LIBRARY]):
        if not path.stem.endswith("-aic") or aic_installed():
            said = run_file(path, folder / path.stem).text
            (folder / f"{path.stem}.txt").write_text(said, encoding="utf-8")
    for path in sorted(path for kind in ("g2", "sched", "events") for path in (HERE / kind).glob("*.json")):
        name = f"{path.parent.name}-{path.stem}"
        given = folder / "traces" / name
        given.mkdir(parents=True)
        try:
            run_scenario(case_scenario(load_case(path), given), folder / name)
        except SimError as error:
            (folder / f"{name}.txt").write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
    print("compiled" if is_compiled() else "pure Python")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
