"""The optional compiled build; everything else about the package stands in pyproject.toml.

``G2SIM_COMPILED=1 pip install .`` compiles ``MODULES`` with mypyc. Without the variable nothing is compiled, and no
compiler is needed.
"""

import os
import tomllib
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import SetupError

HERE = Path(__file__).resolve().parent

# The state machines, and what carries their messages: each of them is hot in some workload of benchmarks/workloads.py.
# Not among them are classes that others derive from, such as policies: interpreted ones cannot extend compiled ones.
# Nor are readers of files: compiled code turns a value that is not of its declared type into a TypeError of its own.
# A class whose objects are hot should be a plain one (bus/plain.py): mypyc leaves attrs classes to the interpreter.
MODULES = (
    "actors/handoff/actor.py",
    "actors/host_pool/actor.py",
    "actors/host_pool/messages.py",
    "actors/host_pool/pool.py",
    "actors/host_pool/recency.py",
    "actors/host_pool/transfers.py",
    "actors/kv/blocks.py",
    "actors/kv/lists.py",
    "actors/kv/numbers.py",
    "actors/kv/prompt.py",
    "actors/router/actor.py",
    "actors/router/index.py",
    "actors/router/loads.py",
    "actors/router/messages.py",
    "actors/router/pool.py",
    "actors/router/state.py",
    "actors/traffic/actor.py",
    "actors/worker/actor.py",
    "actors/worker/decode_run.py",
    "actors/worker/deferred_passes.py",
    "actors/worker/device_pool.py",
    "actors/worker/events.py",
    "actors/worker/messages.py",
    "actors/worker/place.py",
    "actors/worker/rank.py",
    "actors/worker/sequence.py",
    "actors/worker/timing.py",
    "bus/codec.py",
    "bus/drivers.py",
    "bus/frames.py",
    "bus/kernel.py",
    "bus/plain.py",
    "bus/record.py",
    "scenarios/report.py",
    "scenarios/request_rows.py",
    "scenarios/statistics.py",
)


class CompiledDistribution(Distribution):
    """Known to hold extension modules before mypyc, which names them, can be imported."""

    def has_ext_modules(self) -> bool:
        return True


class CompileWithMypyc(build_ext):
    """Turns ``MODULES`` into C extensions beside their sources."""

    def finalize_options(self) -> None:
        if self.inplace or self.editable_mode:
            raise SetupError("G2SIM_COMPILED=1 needs a plain install: in an editable one it would hide edited sources")
        self.distribution.ext_modules = self._extensions()
        super().finalize_options()

    def _extensions(self) -> list:
        from mypyc.build import mypycify

        tree = HERE / "build" / "mypyc"
        package = tree / "g2sim"
        package.mkdir(parents=True, exist_ok=True)
        for folder in ("actors", "bus", "scenarios"):
            link = package / folder
            if not link.is_symlink():
                link.symlink_to(HERE / folder, target_is_directory=True)
        os.environ["MYPYPATH"] = str(tree)
        options = ["--config-file=", "--namespace-packages", "--explicit-package-bases", "--ignore-missing-imports"]
        sources = [str(package / module) for module in MODULES]
        return mypycify(
            [*options, "--follow-imports=silent", f"--cache-dir={tree / 'cache'}", *sources],
            group_name="g2sim.bus.compiled",
            target_dir=str(tree / "c"),
        )


wanted = os.environ.get("G2SIM_COMPILED", "0")
if wanted not in ("0", "1"):
    raise SetupError(f"G2SIM_COMPILED is {wanted!r}, allowed: 1 to compile, 0 for pure Python")
if wanted == "1":
    project = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    setup(
        distclass=CompiledDistribution,
        cmdclass={"build_ext": CompileWithMypyc},
        # mypyc reads the types of what the modules import.
        setup_requires=[*project["dependencies"], *project["optional-dependencies"]["compiled"]],
    )
else:
    setup()
