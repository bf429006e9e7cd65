"""Waiting for the answer to a question.

Apart from the kernel, as a compiled build leaves this to the interpreter: a compiled generator cannot be awaited.
"""

from __future__ import annotations

import types
from collections.abc import Generator
from typing import TypeVar

_QuestionT = TypeVar("_QuestionT")


@types.coroutine
def answer_to(question: _QuestionT) -> Generator[_QuestionT, object, object]:
    """What whoever runs the turn sends back for ``question``: for ``await`` and for ``yield from``."""
    return (yield question)
