"""``--dask``: rows do not depend on where points ran, and survive what happens to workers, client and scheduler."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import yaml
from cli_process import run_cli, start_cli
from hypothesis import given, settings
from hypothesis import strategies as st
from sweep_values import GPU, REQUESTS, refused, scenario_file, trace_file, values

from g2sim.bus.errors import ConfigError, SimError
from g2sim.scenarios.shipped_files import Packer, Unpacked, paths_named
from g2sim.scenarios.sweep import Point, Task
from g2sim.scenarios.yaml_source import Document, read_file

try:
    import distributed
except ImportError:
    distributed = None
on_dask = pytest.mark.skipif(distributed is None, reason="the package distributed (extra dask) is not installed")

LONG = ("--set", f"{GPU}=16,32,48,64", "--set", "traffic.stop.requests=20,200", "--seeds", 2)
"""Points of very different length, on the scenario of ``long_file``."""


class Cluster:
    """A cluster in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.address = self._answer()

    def ask(self, what: str) -> list[int]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        return [int(word) for word in self._answer().split()]

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@contextmanager
def cluster_of(folder: Path, workers: int, how: str, **environment: str) -> Iterator[Cluster]:
    """Workers start in ``folder``, where the scenarios are not."""
    with subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("local_cluster.py")), str(workers), how],
        cwd=folder,
        env=os.environ | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield Cluster(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two worker processes."""
    with cluster_of(tmp_path_factory.mktemp("cluster"), 2, "processes") as started:
        yield started


def long_file(folder: Path) -> None:
    (folder / "s.yaml").write_text(yaml.safe_dump(values(poisson=True) | {"name": "long"}))


@contextmanager
def sweeping(folder: Path, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A sweep of which one point is done."""
    with start_cli(folder, "sweep", "s.yaml", *arguments) as running:
        assert running.stderr is not None
        assert "1/16 runs: " in (line := running.stderr.readline()), line + running.stderr.read()
        yield running


# -- what a cluster is refused for


def test_without_distributed_the_command_that_installs_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    monkeypatch.delitem(sys.modules, "g2sim.scenarios.dask_cluster", raising=False)
    told = refused(capsys, "sweep", str(scenario_file(tmp_path)), "--set", f"{GPU}=8", "--dask", "127.0.0.1:8786")
    assert told == "error: --dask: needs the package distributed; in a checkout of g2sim: pip install '.[dask]'\n"


@pytest.mark.parametrize("command", [("sweep", "--set", f"{GPU}=8"), ("curve", "--host-blocks", "8")])
def test_a_number_of_processes_is_not_for_a_cluster(
    tmp_path: Path, command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    name, *rest = command
    told = refused(capsys, name, str(scenario_file(tmp_path)), *rest, "--dask", "h:1", "--jobs", "2")
    assert "--jobs: not with --dask" in told


@on_dask
@pytest.mark.parametrize("address", ["", "8786", "host", "http://host:1", "host:port", "a b:1"])
def test_an_address_that_is_none_is_refused(tmp_path: Path, address: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = refused(capsys, "sweep", str(scenario_file(tmp_path)), "--set", f"{GPU}=8", "--dask", address)
    assert told.startswith(f"error: --dask: got {address!r}; allowed: HOST:PORT of a Dask scheduler")


@on_dask
@pytest.mark.parametrize("address", ["127.0.0.1:1", "nobody.invalid:8786"])
def test_nobody_there_is_one_message(tmp_path: Path, address: str) -> None:
    said = hasty(tmp_path, address)
    assert said == f"no Dask scheduler answered there within 0.5 s; got '{address}'; start one with: dask scheduler"


@on_dask
def test_what_answers_but_is_no_scheduler_is_one_message(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        said = hasty(tmp_path, f"127.0.0.1:{other.getsockname()[1]}")
    assert said.startswith("no Dask scheduler answered there within 0.5 s")


@on_dask
def test_a_cluster_without_workers_is_one_message(tmp_path: Path) -> None:
    with cluster_of(tmp_path, 0, "threads") as empty:
        assert hasty(tmp_path, empty.address) == "the cluster has no workers; start some: dask worker ADDRESS"


def hasty(folder: Path, address: str) -> str:
    """What a command that waits for half a second says of a cluster."""
    scenario_file(folder)
    limited = (
        "import g2sim.scenarios.dask_cluster as d, g2sim.scenarios.cli as c; d.CONNECT_S = d.WORKERS_S = 0.5; c.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", limited, "sweep", "s.yaml", "--set", f"{GPU}=8", "--csv", "a.csv", "--dask", address],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert not (folder / "a.csv").exists()
    (line,) = done.stderr.splitlines()
    return line.removeprefix("error: --dask: ")


@on_dask
def test_a_worker_with_another_version_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "other" / "g2sim-99.dist-info").mkdir(parents=True)
    (tmp_path / "other" / "g2sim-99.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: g2sim\nVersion: 99\n"
    )
    scenario_file(tmp_path)
    path = os.pathsep.join(filter(None, [str(tmp_path / "other"), os.environ.get("PYTHONPATH")]))
    with cluster_of(tmp_path, 1, "threads", PYTHONPATH=path) as other:
        done = run_cli(tmp_path, "sweep", "s.yaml", "--set", f"{GPU}=8", "--out", "points", "--dask", other.address)
    assert (done.returncode, done.stdout) == (2, "")
    assert " has g2sim 99; allowed: g2sim 0." in done.stderr
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "points").iterdir())


@on_dask
def test_a_worker_that_comes_later_is_looked_at_with_its_first_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from g2sim.scenarios import dask_cluster

    task = make_task(tmp_path, "none.jsonl")
    parcel = task.parcel(Packer())
    worker = SimpleNamespace(address="tcp://late:1", local_directory=str(tmp_path))
    monkeypatch.setattr(dask_cluster.distributed, "get_worker", lambda: worker)
    there = dask_cluster._versions()
    assert dask_cluster._carry_out(lambda task: task.point, task, parcel, {}, there) == task.point
    for name in there:
        found = dask_cluster._carry_out(lambda task: task.point, task, parcel, {}, there | {name: "99"})
        with pytest.raises(ConfigError, match=rf"tcp://late:1 has {name} .*allowed: g2sim"):
            DaskResult(found).of(dask_cluster.DaskCluster("h:1"))


@on_dask
def test_what_goes_wrong_in_a_cluster_is_told_in_our_words() -> None:
    from g2sim.scenarios.dask_cluster import DaskCluster

    died = distributed.KilledWorker("key", "worker", 3)
    gone = distributed.client.FutureCancelledError("key", "reason")
    for error, said in (
        (died, "several workers of h:1 died of the same point"),
        (gone, "the Dask cluster at h:1 went away"),
        (ModuleNotFoundError("No module named 'g2sim.new'"), "a worker cannot load it"),
    ):
        with pytest.raises(SimError, match=said):
            DaskResult(error).of(DaskCluster("h:1"))


class DaskResult:
    """A finished future."""

    def __init__(self, found: object) -> None:
        self._found = found

    def result(self) -> object:
        if isinstance(self._found, BaseException):
            raise self._found
        return self._found

    def of(self, cluster: Any) -> object:
        return cluster._result(self)


# -- files


@on_dask
def test_files_that_cannot_be_sent_are_refused_before_anything_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from g2sim.scenarios import dask_cluster

    monkeypatch.setattr(dask_cluster, "MAX_SENT_BYTES", 10)
    told = refused(capsys, "sweep", str(scenario_file(tmp_path)), "--set", f"{GPU}=8", "--dask", "127.0.0.1:1")
    assert "--dask: the files that the scenario names are too large to be sent; got " in told


def make_task(folder: Path, trace: str, *, climb: str = "") -> Task:
    plain = values()
    plain["traffic"]["source"]["paths"] = [trace]
    path = folder / climb / "s.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(plain))
    return Task(read_file(path), path, Point({}, {}, 0))


@pytest.mark.parametrize("trace", ["t.jsonl", "../t.jsonl", "a/../../t.jsonl", "sub/../t.jsonl", "absolute"])
def test_a_run_elsewhere_needs_nothing_of_where_the_scenario_is(tmp_path: Path, trace: str) -> None:
    home, away = tmp_path / "home", tmp_path / "away"
    away.mkdir()
    (home / "x" / "sub").mkdir(parents=True)
    (home / "x" / "a").mkdir()
    for place in (home, home / "x"):
        trace_file(place / "t.jsonl", REQUESTS)
    written = str(home / "t.jsonl") if trace == "absolute" else trace
    task = make_task(home, written, climb="x")
    here = task.scenario()
    packer = Packer()
    parcel = task.parcel(packer)
    assert len(parcel.files) == 1
    moved = attrs.evolve(task, unpacked=parcel.unpack(away, packer.contents))
    again = attrs.evolve(task, unpacked=parcel.unpack(away, {}))
    assert again == moved, "unpacked once"
    shutil.rmtree(home)
    there = moved.scenario()
    assert there.trace_path is not None
    assert here.trace_path is not None
    assert there.trace_path.resolve().is_relative_to(away.resolve())
    assert len(there.trace_path.read_text().splitlines()) == len(REQUESTS)
    assert (there.name, there.seed) == (here.name, here.seed)
    unpacked = moved.unpacked
    assert unpacked is not None
    assert unpacked.told(f"{there.trace_path}:3: wrong") == f"{here.trace_path}:3: wrong"


def test_a_path_that_leads_nowhere_leads_nowhere_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "away").mkdir()
    trace_file(tmp_path / "away" / "t.jsonl", REQUESTS)
    task = make_task(tmp_path / "home", "../../away/t.jsonl")
    packer = Packer()
    unpacked = task.parcel(packer).unpack(tmp_path / "away", packer.contents)
    assert not Path(unpacked.path("../../t.jsonl")).exists()
    assert Path(unpacked.path("../../t.jsonl")).resolve().is_relative_to(unpacked.root.resolve())


@settings(max_examples=60)
@given(
    st.recursive(
        st.none() | st.integers() | st.text("ab/.", max_size=6),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["path", "paths", "x"]), inner),
        max_leaves=8,
    )
)
def test_only_absolute_paths_are_changed(value: Any) -> None:
    plain = {"x": value}
    unpacked = Unpacked(base="b", root=Path("/away"), depth=0)
    moved = unpacked.document(Document(values=plain)).values
    written, there = list(paths_named(plain)), list(paths_named(moved))
    assert there == [f"/away/absolute{path}" if path.startswith("/") else path for path in written]
    assert json.loads(json.dumps(moved).replace("/away/absolute/", "/")) == plain


# -- a real cluster


@on_dask
def test_the_files_hold_the_same_bytes_as_without_a_cluster(tmp_path: Path, cluster: Cluster) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    scenario_file(folder)
    trace_file(tmp_path / "above.jsonl", REQUESTS[:3])
    (folder / "bad.jsonl").write_text("{\n")
    (folder / "bad table.csv").write_text("a,b\n")
    paths = f"[t.jsonl],[../above.jsonl],['{tmp_path}/above.jsonl'],[bad.jsonl],['{folder}/bad.jsonl'],[none.jsonl]"
    command = ("sweep", "s.yaml", "--set", f"traffic.source.paths={paths}", "--seeds", 2, "--json")
    local = run_cli(folder, *command, "--csv", "local.csv", "--out", "local")
    remote = run_cli(folder, *command, "--csv", "remote.csv", "--out", "remote", "--dask", cluster.address)
    assert (local.returncode, remote.returncode) == (1, 1), remote.stderr
    assert remote.stdout == local.stdout
    assert (folder / "remote.csv").read_bytes() == (folder / "local.csv").read_bytes()
    assert remote.stderr.splitlines()[-6:] == local.stderr.splitlines()[-6:]
    kept = [{file.name: file.read_bytes() for file in (folder / where).iterdir()} for where in ("local", "remote")]
    assert kept[0] == kept[1]
    assert len(kept[0]) == 6


@on_dask
def test_a_curve_runs_on_a_cluster(tmp_path: Path, cluster: Cluster) -> None:
    scenario_file(tmp_path)
    command = ("curve", "s.yaml", "--host-blocks", "0,4", "--json")
    local, remote = (
        run_cli(tmp_path, *command),
        run_cli(tmp_path, *command, "--dask", cluster.address.removeprefix("tcp://")),
    )
    assert (remote.returncode, remote.stdout) == (0, local.stdout), remote.stderr


@on_dask
def test_a_killed_worker_costs_nothing_and_doubles_nothing(tmp_path: Path, cluster: Cluster) -> None:
    long_file(tmp_path)
    victim = cluster.ask("workers")[0]
    with sweeping(tmp_path, *LONG, "--out", "points", "--csv", "a.csv", "--dask", cluster.address) as running:
        os.kill(victim, signal.SIGKILL)
        _, err = running.communicate(timeout=120)
    assert running.returncode == 0, err
    assert [line.split()[1] for line in err.splitlines()] == [f"{done}/16" for done in range(2, 17)]
    assert len({line.partition("runs: ")[2] for line in err.splitlines()}) == 15
    assert len(list((tmp_path / "points").iterdir())) == 16
    assert victim not in cluster.ask("workers")
    whole = run_cli(tmp_path, "sweep", "s.yaml", *LONG, "--csv", "b.csv", "--jobs", 2)
    assert whole.returncode == 0, whole.stderr
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()


@on_dask
def test_an_interrupt_cancels_what_waits_and_keeps_what_is_done(tmp_path: Path, cluster: Cluster) -> None:
    long_file(tmp_path)
    with sweeping(tmp_path, *LONG, "--out", "points", "--csv", "a.csv", "--dask", cluster.address) as running:
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=60)
    assert (running.returncode, out) == (130, "")
    assert err.splitlines()[-1] == "interrupted"
    assert all("runs: " in line or not line for line in err.splitlines()[:-1])
    assert cluster.ask("tasks") == [0]
    finished = len(list((tmp_path / "points").iterdir()))
    assert 1 <= finished < 16
    assert sorted(file.name for file in tmp_path.iterdir()) == ["points", "s.yaml"]
    rest = run_cli(tmp_path, "sweep", "s.yaml", *LONG, "--out", "points", "--dask", cluster.address)
    assert rest.returncode == 0, rest.stderr
    assert f"{finished} of 16 points were there already\n" in rest.stderr


@on_dask
def test_a_scheduler_that_dies_is_one_message(tmp_path: Path) -> None:
    long_file(tmp_path)
    with (
        cluster_of(tmp_path, 1, "threads") as doomed,
        sweeping(tmp_path, *LONG, "--out", "points", "--csv", "a.csv", "--dask", doomed.address) as running,
    ):
        doomed.process.kill()
        out, err = running.communicate(timeout=60)
    assert (running.returncode, out) == (1, "")
    assert err.splitlines()[-1].startswith(f"error: the Dask cluster at {doomed.address} went away")
    assert all("runs: " in line for line in err.splitlines()[:-1])
    assert list((tmp_path / "points").glob("*.json"))
    assert not (tmp_path / "a.csv").exists()
