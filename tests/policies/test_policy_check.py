"""``g2sim policy new`` and ``policy check``: each rule is broken once, and found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from policy_values import cli, write_policy

from g2sim.bus.errors import ConfigError
from g2sim.scenarios.policy_check import check_policy
from g2sim.scenarios.policy_skeleton import write_skeleton
from g2sim.scenarios.policy_source import PolicyChoice

BROKEN = {
    "draws from the module's stream": (
        "def score(self, request, candidate): return random.random()",
        {"determinism": "draw from pool.stream only", "runs": "two equal runs differ"},
    ),
    "goes over a set": (
        "def place(self, request, now_ms):\n"
        "    names = {f'w{one.worker}': one for one in self.pool.places if self.pool.is_ready(one.worker)}\n"
        "    return Place(names[next(iter(set(names)))]) if names else Refuse('nobody')",
        {"fresh processes": "under another hash seed"},
    ),
    "forgets a request": (
        "def __init__(self): self.kept = []\n"
        "def pending(self): return self.kept\n"
        "def place(self, request, now_ms):\n"
        "    if request.request != 3: return super().place(request, now_ms)\n"
        "    self.kept = [3]\n"
        "    return Queue()",
        {"releases": "request 3 at 70.0 ms: is never released"},
    ),
    "hides what waits": (
        "def place(self, request, now_ms): return Queue()",
        {"bookkeeping": "pending() is [], waiting are [0]"},
    ),
    "releases twice": (
        "def __init__(self): self.kept = None\n"
        "def pending(self): return [] if self.kept is None else [self.kept.request]\n"
        "def place(self, request, now_ms):\n"
        "    if self.kept is not None: return super().place(request, now_ms)\n"
        "    self.kept = request\n"
        "    return Queue()\n"
        "def prefill_completed(self, request, now_ms):\n"
        "    kept, self.kept = self.kept, None\n"
        "    if kept is not None:\n"
        "        yield Release(kept.request, super().place(kept, now_ms))\n"
        "        yield Release(kept.request, super().place(kept, now_ms))",
        {"releases": "which is placed already"},
    ),
    "keeps what was canceled": (
        "def __init__(self): self.kept = []\n"
        "def pending(self): return [one.request for one in self.kept]\n"
        "def place(self, request, now_ms):\n"
        "    if request.request % 3 != 1: return super().place(request, now_ms)\n"
        "    self.kept.append(request)\n"
        "    return Queue()\n"
        "def request_terminal(self, request, now_ms):\n"
        "    while self.kept:\n"
        "        one = self.kept.pop()\n"
        "        yield Release(one.request, super().place(one, now_ms))",
        {"cancellation": "pending() is"},
    ),
    "sends to a worker that is gone": (
        "def place(self, request, now_ms): return Place(self.pool.places[request.request % 6])",
        {"worker loss": "this worker takes no requests"},
    ),
    "fails without any worker": (
        "def worker_removed(self, worker, now_ms):\n    self.first = min(self.pool.ready_places())\n    return ()",
        {"worker loss": "ValueError: min() arg is an empty sequence"},
    ),
    "does not know cleared": (
        "def observe(self, events, now_ms):\n    for event in events: event.block_hashes\n    return ()",
        {"cleared events": "'BlocksCleared' object has no attribute 'block_hashes'"},
    ),
    "counts on order": (
        "def __init__(self): self.seen = set()\n"
        "def observe(self, events, now_ms):\n"
        "    for event in events:\n"
        "        key = (event.worker, event.dp_rank, getattr(event, 'parent_hash', None))\n"
        "        if key[2] is not None: raise ValueError('a block without its parent')\n"
        "    return ()",
        {"lagging events": "a block without its parent"},
    ),
    "changes the pool": (
        "def place(self, request, now_ms):\n"
        "    verdict = super().place(request, now_ms)\n"
        "    if isinstance(verdict, Place): self.pool.loads.end(request.request - 1)\n"
        "    return verdict",
        {"bookkeeping": "it changed the pool"},
    ),
}
EMPTIEST = "\ndef score(self, request, candidate): return candidate.active_requests"


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_rule_is_found(what: str, tmp_path: Path) -> None:
    body, expected = BROKEN[what]
    path = write_policy(tmp_path / "own.py", body if "def score" in body else body + EMPTIEST)
    results = check_policy(PolicyChoice(str(path)), fresh_processes="fresh processes" in expected)
    problems = {result.name: result.problem for result in results}
    for name, said in expected.items():
        assert said in (problems[name] or ""), problems


def test_a_failed_check_exits_1_and_says_which_play(tmp_path: Path) -> None:
    write_policy(tmp_path / "own.py", BROKEN["hides what waits"][0])
    done = cli(tmp_path, "policy", "check", "own.py")
    assert done.returncode == 1
    assert "FAIL  bookkeeping: " in done.stdout
    assert "in play 0 of 'bookkeeping', aggregated pool, step " in done.stdout
    assert done.stderr.startswith("error: own.py: ")


def test_check_refuses_what_it_cannot_find_and_prints_json(tmp_path: Path) -> None:
    done = cli(tmp_path, "policy", "check", "nobody")
    assert (done.returncode, done.stdout) == (2, "")
    done = cli(tmp_path, "policy", "check", "round_robin", "--json")
    assert done.returncode == 0, done.stderr
    assert all(one["ok"] for one in json.loads(done.stdout))


@pytest.mark.parametrize("name", ["Upper", "1st", "a-b", "class", "dynamo_kv", "random", "json", "", "../x"])
def test_a_name_that_cannot_be_used_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        write_skeleton(name, tmp_path / "new")
    assert caught.value.field == "NAME"
    assert not list(tmp_path.iterdir())


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("x")
    with pytest.raises(ConfigError, match="is there already"):
        write_skeleton("mine", tmp_path)
    assert [item.name for item in tmp_path.iterdir()] == ["kept"]


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    files = write_skeleton("mine_too", tmp_path / "new")
    assert sorted(file.name for file in files) == ["mine_too.py", "pyproject.toml", "test_mine_too.py"]
    assert "class MineToo(Policy)" in files[0].read_text()
    assert [item.name for item in tmp_path.iterdir()] == ["new"]
