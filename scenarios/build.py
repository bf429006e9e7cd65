"""Which build of the package this is.

Owns: telling whether the hot modules are compiled; ``setup.py`` says which ones can be.
"""

from __future__ import annotations

import importlib.util
from importlib.machinery import EXTENSION_SUFFIXES


def is_compiled() -> bool:
    """Whether the hot modules come from C extensions, not from their Python sources."""
    kernel = importlib.util.find_spec("g2sim.bus.kernel")
    return kernel is not None and str(kernel.origin).endswith(tuple(EXTENSION_SUFFIXES))
