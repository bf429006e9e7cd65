"""What a request may be called: a number, a name of the traffic's own, a session and turn, a uuid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from g2sim.actors.traffic.events import RequestArrived
from g2sim.bus.errors import ConfigError
from g2sim.bus.events import BY_CLASS, Record
from g2sim.bus.log import LogWriter
from g2sim.scenarios.request_names import find_requests

UUID = "00112233445566778899aabbccddeeff"
NOTHING = dict.fromkeys(field for field in BY_CLASS[RequestArrived].fields)
ARRIVALS: tuple[dict[str, Any], ...] = (
    {"name": "first"},
    {"name": "0"},
    {"name": "twice", "session_id": "s", "turn_index": 0},
    {"name": "twice", "session_id": "s", "turn_index": 1},
    {"name": "s/1", "uuid": UUID},
    {"name": "17"},
)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "run.g2log"
    with path.open("wb") as file:
        writer = LogWriter(file, version="1", seed=1, scenario={}, events=[BY_CLASS[RequestArrived]])
        for number, given in enumerate(ARRIVALS):
            event = RequestArrived(
                **NOTHING | {"request": number, "arrival_ms": 0.0, "input_tokens": 1, "output_tokens": 1} | given
            )
            writer.append(Record(time_ms=0.0, source="traffic", cause=0, event=event))
        writer.finish("finished")
    return path


@pytest.mark.parametrize(
    ("words", "numbers"),
    [
        (["3"], [3]),
        (["5", "0", "5"], [5, 0, 5]),
        (["0"], [0]),  # request 1 is called so, but the run has a request of this number
        (["17"], [5]),  # no request has this number
        (["first", "4"], [0, 4]),
        (["s/0"], [2]),
        ([UUID], [4]),
        (["00112233-4455-6677-8899-AABBCCDDEEFF"], [4]),
    ],
)
def test_words_that_mean_one_request(log: Path, words: list[str], numbers: list[int]) -> None:
    assert find_requests(log, words, "--request") == numbers


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("6", "--request: got '6'; allowed: 0 to 5, or a name such as 17"),
        ("-1", "--request: got '-1'; allowed: 0 to 5"),
        ("\N{SUPERSCRIPT TWO}", "allowed: 0 to 5"),
        ("9" * 5000, "allowed: 0 to 5"),
        ("", "--request: got ''; allowed: 0 to 5"),
        ("-", "allowed: 0 to 5"),
        ("frist", "did you mean first?"),
        ("s", "the session has s/0, s/1"),
        ("twice", "--request: several have this name; got 'twice'; allowed: 2, 3"),
        ("s/1", "several have this name; got 's/1'; allowed: 3, 4"),
    ],
)
def test_words_that_mean_none_or_several_are_refused(log: Path, word: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_requests(log, ["3", word], "--request")
    assert told in str(caught.value)


def test_a_log_that_is_cut_knows_the_requests_before_the_cut(log: Path) -> None:
    data = log.read_bytes()
    log.write_bytes(data[: data.rindex(b"17")])
    assert find_requests(log, ["4"], "--request") == [4]
    with pytest.raises(ConfigError, match="allowed: 0 to 4 in the part of the log that is good, or a name such as s/1"):
        find_requests(log, ["5"], "--request")
