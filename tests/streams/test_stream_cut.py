"""A frame too large ends a connection: it is made anew, and what was cut off is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from stream_cases import checked

pytest.importorskip("zmq", reason="pyzmq is not installed: pip install 'g2sim[zmq]'")

from test_stream_restart import Deployment, told

from g2sim.actors.kv.wire_vllm import MAX_FRAME_BYTES, Message

TOO_LARGE = Message(topic=b"", sequence=3, payload=bytes(MAX_FRAME_BYTES + 1))


def cut(deployment: Deployment, *, keep: bool) -> None:
    """Three batches, one too large, of which the listener is rid when all are back; ``keep`` it for replays."""
    deployment.send(1, range(3))
    for publisher in deployment.publishers:
        publisher.send(TOO_LARGE)
        if not keep:
            publisher._kept.pop()
    gone = set()

    def both_gone() -> bool:
        gone.update(idx for idx, publisher in enumerate(deployment.publishers) if not publisher.subscribers)
        return len(gone) == len(deployment.publishers)

    deployment.serve(30, both_gone)
    deployment.meet()


def test_what_comes_after_a_frame_too_large_is_heard(tmp_path: Path) -> None:
    with Deployment(tmp_path, "validate", "--json") as deployment:
        cut(deployment, keep=True)
        deployment.send(1, range(4, 7))
        code, out = deployment.end()
    value = json.loads(out)
    assert (code, set(value["counts"])) == (1, {"KV001 error", "KV101 error"})
    told_of = [finding["problem"] for finding in value["findings"] if finding["code"] == "KV001"]
    for start in ("stream w0: the connection was cut", "replay of stream w0: the", "stream w1: the connection was cut"):
        assert any(problem.startswith(start) for problem in told_of)
    assert [told(verdict) for verdict in value["verdicts"]] == [(False, 6, [], True, 0), (False, 6, [], False, 0)]
    assert [verdict["lost_ids"] for verdict in value["verdicts"]] == [1, 1]


@pytest.mark.parametrize("keep", [True, False])
def test_a_frame_too_large_at_the_end_is_no_clean_end(tmp_path: Path, *, keep: bool) -> None:
    """It is told even where the publisher says that there was no such batch, and in captures."""
    capture = tmp_path / "live.g2cap"
    with Deployment(tmp_path, "record", "--out", capture) as deployment:
        cut(deployment, keep=keep)
        assert deployment.end()[0] == 0
    validator, verdicts = checked(capture)
    assert {finding.code for finding in validator.findings.kept} == {"KV001"}
    assert [verdict.last_event_id for verdict in verdicts] == [2, 2]
    assert [verdict.tail_confirmed for verdict in verdicts] == [not keep, False]
