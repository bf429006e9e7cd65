"""No play instance finds blocks of another one, in any tier, on any worker; inside each, G2 is of use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from instance_cases import CONTENTS, leaks, play_run, restored_tokens, scenario_values, stored_token_hashes, write_play

from g2sim.actors.traffic.graph import Node
from g2sim.actors.traffic.snapshot import Instance, InstanceMaker

SNAPSHOT: dict[str, Any] = {"agentic_lanes": 4, "agentic_snapshot": {"seed": 3}}
PROFILE: dict[str, Any] = {
    "agentic_lanes": 1,
    "agentic_snapshot": {"seed": 3},
    "agentic_profile": {"duration_seconds": 5.0, "response_grace_seconds": 1.0},
}
DEPLOYMENTS = [(2, False), (3, False), (2, True)]


@pytest.mark.parametrize("load", [SNAPSHOT, PROFILE], ids=["snapshot", "profile"])
@pytest.mark.parametrize("scope", ["cluster_shared", "dp_rank_local"])
@pytest.mark.parametrize(("workers", "split"), DEPLOYMENTS, ids=["2 aggregated", "3 aggregated", "2P2D"])
def test_a_later_play_reuses_nothing_of_an_earlier_one(
    tmp_path: Path, workers: int, split: bool, scope: str, load: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also its own mutant: without the namespace of an instance the same run leaks, so that this can fail."""
    values = scenario_values(write_play(tmp_path), workers=workers, split=split, scope=scope, load=load)
    run = play_run(values)
    plays = run.plays()
    assert len(plays) >= 3
    assert leaks(run) == []
    whole = [rows for rows in plays.values() if len(rows) > 3 * CONTENTS]
    assert len(whole) >= 2
    for rows in whole:
        assert rows[0]["first_admission_g1_reused_input_tokens"] == 0
        assert rows[0]["first_admission_host_reused_input_tokens"] == 0
        assert restored_tokens(rows) > 0
        assert len({row["agentic"]["cache_id"] for row in rows}) == 1
    assert len({rows[0]["agentic"]["cache_id"] for rows in plays.values()}) == len(plays)
    firsts = len(stored_token_hashes(run))
    assert firsts == sum(len({row["session_id"] for row in rows}) for rows in plays.values())

    def without_namespace(self: InstanceMaker, instance: Instance, node: Node) -> tuple[int, ...]:
        return tuple(block for block in node.hash_ids)

    monkeypatch.setattr(InstanceMaker, "tokens", without_namespace)
    mutant = play_run(values, verify=False)
    assert leaks(mutant)
    assert len(stored_token_hashes(mutant)) == CONTENTS
