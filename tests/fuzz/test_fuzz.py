"""Every reader of bytes from outside, with some hundred damaged samples each; ``make fuzz COUNT=...`` for more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).with_name("fuzz.py")


def test_every_damaged_sample_is_taken_or_refused_as_bad_input() -> None:
    """In a process of its own, whose memory and processor time are bounded."""
    command = [sys.executable, FUZZ, "--count", "60", "--first", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 of 35 targets have a fault" in done.stdout


def test_a_fault_is_found_shrunk_and_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A reader that breaks on a byte 0xff, among damaged samples without one."""
    monkeypatch.syspath_prepend(str(FUZZ.parent))
    import fuzz as tool
    from mutations import Form
    from targets import Target

    def read(data: bytes) -> None:
        if b"\xff" in data:
            raise KeyError("broken")

    target = Target("t", Form.TEXT, lambda: [b"a sample of text"], read)
    ran, data, fault = tool.fuzz(target, 2000, 1)
    assert isinstance(fault, KeyError)
    assert data is not None
    assert b"\xff" in data
    assert ran < 2000
    assert tool.fuzz(Target("t", Form.TEXT, lambda: [b"x"], lambda _: None), 50, 1) == (50, None, None)
