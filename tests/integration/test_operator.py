"""What an operator types, against a run of real processes: replay, verify, history, drain, readmit, recover."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dips.master import journal
from dips.master.journal import replay_journal
from dips.master.ledger import Ledger
from dips.store.version import THETA
from tests.damage import flip_bit
from tests.integration import cluster_harness as harness
from tests.integration.train_constant import tensors

HERE = Path(__file__).parent
TINY = str(HERE / "train_tiny.py")


LAST = 5  # the version with which a run ends
PACE = 15  # inner steps of a round, a third of a second: a run that goes on while commands run makes few versions
DRAINED_PACE = 3  # a drain mostly meets a round that is open


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A run that has come to its end, whose master and slaves still serve; whoever changes it takes a copy."""
    directory = tmp_path_factory.mktemp("trained")
    with harness.Run(directory, tensors(), shared={"penalty": {"gates": []}, "stop": {"versions": LAST}}) as run:
        run.start_servers()
        run.wait(run.start_cluster("west", [sys.executable, TINY, "steps", str(directory / "out")]), 60)
        yield run


@pytest.fixture
def copy(trained: Any, tmp_path: Path) -> Path:
    """The run file, the ledger and the snapshots of that run, for a test that harms them."""
    shutil.copy(trained.file, tmp_path)
    for name in ("master", *trained.slaves):
        shutil.copytree(trained.directory / name, tmp_path / name)
    return tmp_path


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Any]:
    """One that does not end while a test looks at it."""
    with harness.Run(tmp_path, tensors(), shared={"penalty": {"gates": []}}) as run:
        yield run


def say(program: str, *words: str, code: int = 0) -> str:
    """Run a command as a process of its own; return what it said."""
    main = {"dips": "dips.cli", "dips-master": "dips.master.app", "dips-slave": "dips.slave.app"}[program]
    command = [sys.executable, "-c", f"from {main} import main; main()", *words]
    done = subprocess.run(command, cwd=harness.ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == code, f"{program} {words}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


@pytest.mark.timeout(180)
def test_a_whole_run_is_decided_again(tmp_path: Path) -> None:
    """The journal of a real master gives the same effects, while it runs and after it was killed and replaced."""
    with harness.Run(tmp_path, tensors(), shared={"penalty": {"gates": []}}) as run, run.ledger() as ledger:
        master = run.start_master()
        run.start_slaves()
        west = run.start_cluster("west", [sys.executable, TINY, "steps", str(tmp_path / "out")], steps=PACE)
        run.until(lambda: len(ledger.read_history(100)) >= 2, 60, "two rounds")
        assert "the same effects" in say("dips-master", "replay", str(tmp_path / "master" / "journal-1-1.jsonl"))
        master.kill()
        second, at = run.start_master(), len(made(ledger))
        run.until(lambda: len(made(ledger)) >= at + 2, 90, "two versions of the second master")
        west.terminate()
        assert second.terminate() == 0
    done = replay_journal(tmp_path / "master")
    assert [one.term for one in done] == [1, 2]
    assert not any(one.differs or one.other_code for one in done)
    assert not done[1].torn and min(one.events for one in done) > 20
    shown = say("dips-master", "replay", str(journal.list_segments(tmp_path / "master")[1]), "--show")
    assert "VersionCommitted(" in shown and "OrderAnswered(" in shown


@pytest.mark.timeout(180)
def test_snapshots_are_verified(trained: Any, copy: Path) -> None:
    """All intact; one bit of θ changed in the newest: 65, the slave is named, and what the run would go back to."""
    newest, before = (next(path.name for path in (copy / "ps0").glob(f"v{n}@*")) for n in (LAST, LAST - 1))
    intact = f"the newest durable version {newest} is intact on all slaves"
    assert intact in say("dips", "verify", "--config", str(trained.file))
    words = ("verify", "--config", str(copy / "dips.yaml"))
    assert intact in say("dips", *words)
    flip_bit(copy / "ps1" / newest, THETA)
    said = " ".join(say("dips", *words, code=65).split())
    assert f"the newest durable version {newest} is not intact (ps1: " in said
    assert f"would be rolled back to {before}" in said
    assert f"{newest} is intact on ps0" in say("dips", *words, "--slave", "ps0")
    shutil.rmtree(copy / "ps1" / newest)
    assert "missing" in say("dips", *words, code=65)
    say("dips", *words, "--slave", "ps9", code=78)


@pytest.mark.timeout(180)
def test_another_manifest_is_not_believed(copy: Path) -> None:
    """A snapshot that agrees with its own manifest, and whose manifest is not the ledger's, is not intact."""
    (newest,) = (copy / "ps0").glob(f"v{LAST}@*")
    path, words = newest / "manifest.json", ("verify", "--config", str(copy / "dips.yaml"))
    path.write_text(path.read_text().replace('"sinc": 1', '"sinc": 2'))
    assert "its manifest hashes to" in say("dips", *words, code=65)
    (copy / "master" / "ledger.sqlite").rename(copy / "elsewhere.sqlite")
    assert "held against their own manifests only" in say("dips", *words)


@pytest.mark.timeout(180)
def test_history_shows_versions_and_parents(trained: Any) -> None:
    """Every version names its parent, its tokens and whose pushes it holds."""
    config = ("--config", str(trained.file))
    lines = [json.loads(line) for line in say("dips", "history", *config, "--json").splitlines()]
    made = [line for line in lines if line["version"]]
    assert [line["version"].partition("@")[0] for line in made] == [f"v{i}" for i in range(1, LAST + 1)]
    assert [line["parent"] for line in made] == ["v0@r0", *(line["version"] for line in made[:-1])]
    assert all(line["tokens"] > 0 and line["folds"][0]["push"]["cluster"] == "west" for line in made)
    table = say("dips", "history", *config, "--last", "3")
    assert "v5@r" in table and "v2@r" in table and "v1@r" not in table


@pytest.mark.timeout(180)
def test_a_drained_slave_costs_no_round(run: Any, tmp_path: Path) -> None:
    """Drained while a cluster trains, then stopped and started: every round is applied, none is skipped."""
    run.start_master()
    slaves = run.start_slaves()
    west = run.start_cluster("west", [sys.executable, TINY, "steps", str(tmp_path / "out")], steps=DRAINED_PACE)
    with run.ledger() as ledger:
        run.until(lambda: len(ledger.read_history(100)) >= 2, 60, "two rounds")
        assert "ps0 is drained" in say("dips", "drain", "ps0", "--config", str(run.file))
        status = json.loads(say("dips", "status", "--config", str(run.file), "--json"))
        assert (status["slaves"]["ps0"]["state"], status["round"]["state"]) == ("draining", "idle")
        count = len(ledger.read_history(100))
        time.sleep(1.0)
        assert len(ledger.read_history(100)) == count  # it stays drained: its heartbeats do not make it register
    assert slaves[0].terminate() == 0
    run.start_slave("ps0")
    with run.ledger() as ledger:
        run.until(lambda: len(made(ledger)) >= count + 2, 60, "two more")
        assert {r.kind for r in ledger.read_history(100)[: count + 2]} == {"applied"} and west.code is None
    assert "has never joined" in say("dips", "cluster", "readmit", "east", "--config", str(run.file), code=78)
    assert "west is not quarantined" in say("dips", "cluster", "readmit", "west", "--config", str(run.file), code=1)
    assert "none of this run" in say("dips", "drain", "ps7", "--config", str(run.file), code=78)


@pytest.mark.timeout(180)
def test_all_slaves_are_drained_for_one_outage(run: Any, tmp_path: Path) -> None:
    """`dips drain --all` while a cluster trains, then all are stopped and started: no round is skipped."""
    run.start_master()
    slaves = run.start_slaves()
    west = run.start_cluster("west", [sys.executable, TINY, "steps", str(tmp_path / "out")], steps=DRAINED_PACE)
    with run.ledger() as ledger:
        run.until(lambda: len(ledger.read_history(100)) >= 2, 60, "two rounds")
    assert "all slaves are drained" in say("dips", "drain", "--all", "--config", str(run.file))
    status = json.loads(say("dips", "status", "--config", str(run.file), "--json"))
    assert {slave["state"] for slave in status["slaves"].values()} == {"draining"}
    for process in slaves:
        assert process.terminate() == 0
    with run.ledger() as ledger:
        count = len(ledger.read_history(100))
        run.start_slaves()
        run.until(lambda: len(made(ledger)) >= count + 2, 60, "two more")
        assert {r.kind for r in ledger.read_history(100)[: count + 2]} == {"applied"} and west.code is None
    assert "all slaves" in say("dips", "history", "--audit", "--config", str(run.file))
    assert "one of them" in say("dips", "drain", "ps0", "--all", "--config", str(run.file), code=78)
    assert "one of them" in say("dips", "drain", "--config", str(run.file), code=78)


@pytest.mark.timeout(180)
def test_a_finished_run_is_extended(tmp_path: Path) -> None:
    """Refused while it would end at once; then it goes on to the new end, also under a new master and file.

    The script hears of every version, and its progress is of the new target.
    """
    shared = {"penalty": {"gates": []}, "stop": {"versions": 2}}
    with harness.Run(tmp_path, tensors(), shared=shared) as run, run.ledger() as ledger:
        master, config = run.start_master(), ("--config", str(run.file))
        run.start_slaves()
        out = tmp_path / "out"
        run.wait(run.start_cluster("west", [sys.executable, TINY, "logged", str(out)]), 60)
        assert "the run would end at once: 2 outer steps are made" in say(
            "dips", "set", "stop.versions=2", *config, code=1
        )
        told = say("dips", "set", "stop.versions=4", "stop.tokens=100000", *config)
        assert "goes on until 100,000 tokens or 4 versions" in told and "finished at v2@r2" in told
        assert master.terminate() == 0
        run.start_master()
        run.wait(run.start_cluster("west", [sys.executable, TINY, "logged", str(out)]), 60)
        assert made(ledger) == [f"v{n}@r{n}" for n in range(1, 5)]
        status = json.loads(say("dips", "status", "--config", str(run.file), "--json"))
    assert status["finished"] == "v4@r4" and status["targets"]["tokens"] == 100_000
    lines = [json.loads(line) for line in out.read_text().splitlines() if line.startswith("{")]
    assert [line["dips/heard"] for line in lines if "dips/heard" in line] == [1.0, 2.0, 3.0, 4.0]
    last = [line for line in lines if "dips/loss" in line][-1]
    assert last["dips/loss"] == 1.5 and last["dips/accepted"] == 2.0 and 0 < last["dips/progress"] < 0.01
    shown = say("dips", "history", "--config", str(run.file))
    assert "extended" in shown and "until 100,000 tokens or 4 versions; it was finished at v2@r2" in " ".join(
        shown.split()
    )


@pytest.mark.timeout(240)
def test_a_restored_ledger_is_recovered(tmp_path: Path) -> None:
    """An old ledger is put back: the master does not serve it; after `recover` the run goes on under new names."""
    with harness.Run(tmp_path, tensors(), shared={"penalty": {"gates": []}}) as run:
        master, slaves = run.start_master(), run.start_slaves()
        ledger_file, backup = tmp_path / "master" / "ledger.sqlite", tmp_path / "backup.sqlite"
        west = run.start_cluster("west", [sys.executable, TINY, "steps", str(tmp_path / "out")], steps=PACE)
        with run.ledger() as ledger:
            run.until(lambda: len(made(ledger)) >= 2, 60, "two versions")
            ledger._db.execute("VACUUM INTO ?", (str(backup),))
            kept = made_in(backup)  # versions go on while the copy is made
            run.until(lambda: len(made(ledger)) >= len(kept) + 3, 60, "three more")
        words = ("recover", "--config", str(run.file), "--yes")
        assert "in use by another master" in say("dips-master", *words, code=78)
        for process in (west, master, *slaves):
            process.terminate()
        for old in ledger_file.parent.glob("ledger.sqlite*"):
            old.unlink()
        shutil.copyfile(backup, ledger_file)

        master, slaves = run.start_master(), run.start_slaves()
        run.until(lambda: master.code is not None, 60, "the master refuses to serve")
        assert master.code in (75, 78) and "dips-master recover" in master.log.read_text()
        for process in slaves:
            process.terminate()

        told = say("dips-master", "recover", "--config", str(run.file), "--yes", "--adopt", "v1@r1", code=78)
        assert "v1@r1 is not newer than this ledger" in told
        newest = max((p.name for p in (tmp_path / "ps0").glob("v*")), key=lambda n: int(n[1:].partition("@")[0]))
        told = say("dips-master", *words, "--adopt", newest)
        assert f"the run goes on from {newest}, adopted" in told
        run.start_servers()
        run.start_cluster("west", [sys.executable, TINY, "steps", str(tmp_path / "again")], steps=PACE)
        with run.ledger() as ledger:
            at = len(made(ledger))
            run.until(lambda: len(made(ledger)) >= at + 2, 90, "two versions after the recovery")
            after = made(ledger)
            state = ledger.read_state()
        assert (tmp_path / "again").read_text().startswith(f"incarnation {newest}\n")
        assert after[: len(kept)] == kept and after[len(kept)] == newest
        assert int(after[len(kept) + 1].partition("@r")[2]) > 1000
        assert state.term > 1001 and {p.inc > 1000 for p in (*state.slaves, *state.clusters)} == {True}


def made_in(file: Path) -> list[str]:
    with contextlib.closing(Ledger.open(file, readonly=True)) as ledger:
        return made(ledger)


def made(ledger: Any) -> list[str]:
    return [str(r.version) for r in ledger.read_history(1000) if r.version]
