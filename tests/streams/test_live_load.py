"""The sums of benchmarks/live_load.py: nothing that was lost can go unnoticed there."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from live_load import account, is_flat


def told(
    last: int, *, live: int, replayed: int = 0, copies: int = 0, lost: int = 0, unknown: int = 0, restarts: Any = ()
) -> dict[str, Any]:
    """What ``g2sim validate --json`` says of one stream."""
    rank = {"restarts": list(restarts), "last_event_id": last, "lost_ids": lost, "unknown_ids": unknown}
    rank |= {"tail_confirmed": True, "exact": True, "events": live}
    stream = {"live": live, "replayed": replayed, "copies": copies}
    return {"verdicts": [rank], "streams": [stream], "counts": {}}


def test_what_adds_up_is_noticed() -> None:
    row = account([100], [told(99, live=90, replayed=12, copies=5, lost=2, unknown=1)])
    assert (row["received"], row["healed"], row["lost"], row["unknown"], row["unnoticed"]) == (97, 7, 2, 1, 0)


@pytest.mark.parametrize(
    "value", [told(98, live=99), told(99, live=99), told(99, live=98, lost=1)], ids=["tail", "between", "not all said"]
)
def test_one_batch_that_nothing_tells_of_is_unnoticed(value: dict[str, Any]) -> None:
    assert account([100], [value])["unnoticed"] == 1


def test_what_a_restart_took_along_is_noticed_and_a_restart_that_is_not_seen_is_not() -> None:
    row = account([50, 30], [told(29, live=70, restarts=[39])])
    assert (row["restart"], row["unnoticed"]) == (10, 0)
    assert account([50, 30], [told(29, live=30)])["unnoticed"] > 0
    assert account([80], [told(29, live=70, restarts=[39])])["unnoticed"] > 0


def test_each_of_two_listeners_has_to_add_up() -> None:
    good, short = told(39, live=40), told(39, live=39)
    assert account([100], [good, told(99, live=20, unknown=80)])["unnoticed"] == 0
    assert account([100], [short, told(99, live=20, unknown=80)])["unnoticed"] == 1


def test_memory_may_shrink() -> None:
    assert is_flat(100.0, 60.0)
    assert is_flat(100.0, 108.0)
    assert not is_flat(100.0, 109.0)
    assert is_flat(1000.0, 1050.0)
