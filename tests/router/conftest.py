"""Puts the oracle harness on the path of these tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "oracle"))
