"""`dips rebalance`: layers go to other slaves bit for bit, or nothing has changed, wherever it is interrupted."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
import yaml
from typer.testing import CliRunner

from dips import cli
from dips.config import load_run
from dips.errors import ConfigError, CorruptSnapshot, DipsError, FailedDisk
from dips.files import PidLock
from dips.ids import VersionId
from dips.master import genesis
from dips.master.ledger import Ledger
from dips.outer_step import nesterov_step
from dips.protocol.enums import Role
from dips.protocol.manifest import Manifest
from dips.protocol.records import IncarnationGiven, RoundReserved, ScoreHistory, VersionCommitted
from dips.slave import staging
from dips.slave.snapshots import Snapshots
from dips.store import tensorfile
from dips.store.files import read_layer, read_manifest, staged_path
from dips.store.version import digest_of
from tests.damage import flip_bit
from tests.guillotine import Guillotine, Killed
from tests.power_cut import PowerCut

V1, V2, V3 = VersionId(1, 1), VersionId(2, 3), VersionId(3, 4)
SHAPES = {f"block.{i}.w": (3 + i, 2) for i in range(6)} | {"head.b": (1,)}
Arrays = dict[int, np.ndarray]


@pytest.fixture(autouse=True)
def own_log() -> None:
    """A test before this one may have left a log that writes to its own, closed file."""
    structlog.reset_defaults()


def tensors() -> dict[str, np.ndarray]:
    return {name: np.full(shape, 0.5, np.float32) for name, shape in SHAPES.items()}


def part(version: VersionId, salt: int, layers: tuple[int, ...], model: Manifest) -> Arrays:
    """θ or m of a version: numbers that no other layer, version or part has."""
    return {
        i: np.random.default_rng([version.version, salt, i]).standard_normal(model.layers[i].numel).astype(np.float32)
        for i in layers
    }


class StoppedRun:
    """A run of stopped daemons at v2@r3, with v1@r1 before it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write_file(self, name: str, slaves: int, run: str = "r", **options: Any) -> Path:
        """A run file of `slaves` slaves; `options` are keys of each."""
        one = {"master": "127.0.0.1:1", "initial_model": "m/initial", **options}
        content = {
            "shared": {"run": run},
            "master": {"listen": "127.0.0.1:1", "directory": "m"},
            "slaves": [{"name": f"s{i}", "directory": f"s{i}", **one} for i in range(slaves)],
            "tls": False,
        }
        path = self.path / name
        path.write_text(yaml.safe_dump(content))
        for i in range(slaves):
            (self.path / f"s{i}").mkdir(exist_ok=True)
        return path

    def make(self) -> StoppedRun:
        two = self.write_file("two.yaml", 2)
        self.write_file("three.yaml", 3)
        genesis.make_run(load_run(two), tensors())
        with closing(self.ledger()) as ledger:
            ledger.start_term()
            ledger.write_records([IncarnationGiven(Role.SLAVE, f"s{i}", 4 + i, "n") for i in range(2)])
        self.commit(V1, VersionId(0, 0))
        self.commit(V2, V1)
        return self

    def ledger(self, readonly: bool = False) -> Ledger:
        return Ledger.open(self.path / "m" / genesis.LEDGER, readonly=readonly)

    def commit(self, version: VersionId, parent: VersionId, durable: bool = True) -> None:
        """An outer step: its snapshots on every disk, and its row."""
        with closing(self.ledger()) as ledger:
            row = ledger.run_row()
            model, digests = Manifest.from_json(row.manifest), []
            for name, layers in row.placement:
                with closing(self.slave(name)) as snapshots:
                    if durable:
                        digest = snapshots.write_snapshot(
                            version, part(version, 1, layers, model), part(version, 2, layers, model)
                        )
                        digests.append((name, digest))
            ledger.write_records(
                [
                    RoundReserved(version.round, 0.0),
                    VersionCommitted(
                        version, parent, durable, (), (), nesterov_step(1.0, 0.7, 0.8), 0.1, False, tuple(digests), (),
                        ScoreHistory((), ()), 0.0,
                    ),
                ]
            )  # fmt: skip

    def slave(self, name: str) -> Snapshots:
        """A slave's process, as it stands when the master has told it its layers."""
        snapshots = Snapshots(self.path / name, "r", name, self.path / "m" / genesis.INITIAL, structlog.get_logger())
        self.offered = snapshots.complete_versions()
        with closing(self.ledger(readonly=True)) as ledger:
            row = ledger.run_row()
        layers = dict(row.placement)[name]
        snapshots.bind_layers(Manifest.from_json(row.manifest), layers, [row.genesis[i] for i in layers], 9)
        return snapshots

    def placement(self) -> Mapping[str, tuple[int, ...]]:
        with closing(self.ledger(readonly=True)) as ledger:
            return dict(ledger.run_row().placement)

    def read_all(self, version: VersionId) -> tuple[Arrays, Arrays]:
        """θ and m as the slaves of the ledger's placement serve them."""
        found: tuple[Arrays, Arrays] = ({}, {})
        with closing(self.ledger(readonly=True)) as ledger:
            model = Manifest.from_json(ledger.run_row().manifest)
        for name, layers in self.placement().items():
            with closing(self.slave(name)) as snapshots:
                assert version in self.offered, f"{name} offers {self.offered}"
                mine = [{i: np.empty(model.layers[i].numel, np.float32) for i in layers} for _ in range(2)]
                snapshots.read_snapshot(version, *mine)
            for into, arrays in zip(found, mine, strict=True):
                into.update(arrays)
        return found

    def assert_intact(self, version: VersionId = V2) -> None:
        """Every layer of θ and m is what was committed, to the bit."""
        with closing(self.ledger(readonly=True)) as ledger:
            model = Manifest.from_json(ledger.run_row().manifest)
        everything = tuple(range(len(model.layers)))
        for salt, found in zip((1, 2), self.read_all(version), strict=True):
            expected = part(version, salt, everything, model)
            assert {i: a.tobytes() for i, a in found.items()} == {i: a.tobytes() for i, a in expected.items()}

    def dips(self, *words: str) -> str:
        """Type a word of `dips`; raise what it raises."""
        done = CliRunner().invoke(cli.cli, list(words), catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.stdout

    def rebalance(self, new: str, *words: str) -> str:
        return self.dips("rebalance", "--config", str(self.path / new), *words)


@pytest.fixture(name="run")
def made_run(tmp_path: Path) -> StoppedRun:
    return StoppedRun(tmp_path).make()


def entries(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir() if p.name != ".lock")


def test_two_three_two_bit_for_bit(run: StoppedRun) -> None:
    """θ and m are the same on three slaves and on two again; the ledger tells it, numbers go on, disks are clean."""
    told = run.rebalance("three.yaml")
    assert "s2" in told and "memory" in told and "moved: " in told
    assert sorted(run.placement()) == ["s0", "s1", "s2"]
    run.assert_intact()
    assert all(entries(run.path / f"s{i}") == [str(V2)] for i in range(3))
    run.commit(V3, V2)
    run.dips("verify", "--config", str(run.path / "three.yaml"))

    told = run.rebalance("two.yaml", "--old", str(run.path / "three.yaml"))
    assert sorted(run.placement()) == ["s0", "s1"]
    run.assert_intact(V3)
    assert entries(run.path / "s2") == []
    run.dips("verify", "--config", str(run.path / "two.yaml"))
    with closing(run.ledger()) as ledger:
        state = ledger.read_state()
    assert [v.version for v in state.versions if not v.retired] == [VersionId(0, 0), V3]
    assert {p.name: p.inc for p in state.slaves} == {"s0": 6, "s1": 7, "s2": 2}  # two rebalances above 4, 5 and 0
    assert state.row.removed == (("s2", V3),)
    rows = [
        json.loads(line)
        for line in run.dips("history", "--config", str(run.path / "two.yaml"), "--json").split("\n")
        if line
    ]
    assert [(r["kind"], r["version"]) for r in rows] == [
        ("applied", "v1@r1"), ("applied", "v2@r3"), ("rebalanced", "v2@r3"), ("applied", "v3@r4"),
        ("rebalanced", "v3@r4"),
    ]  # fmt: skip
    assert "from s0, s1 to s0 (" in run.dips("history", "--config", str(run.path / "two.yaml"))


def test_a_slave_that_keeps_its_layers_keeps_its_file(run: StoppedRun) -> None:
    """A rebalance onto the same slaves copies nothing and writes no row."""
    before = {i: (run.path / f"s{i}" / str(V2) / "manifest.json").stat().st_ino for i in range(2)}
    assert "moved: 0 of" in run.rebalance("two.yaml")
    assert {i: (run.path / f"s{i}" / str(V2) / "manifest.json").stat().st_ino for i in range(2)} == before
    with closing(run.ledger()) as ledger:
        assert ledger.read_rebalances() == []


def test_a_slave_may_change_its_directory(run: StoppedRun) -> None:
    """The same names elsewhere: layers stay with their slave, and are copied."""
    moved = yaml.safe_load((run.path / "two.yaml").read_text())
    for slave in moved["slaves"]:
        slave["directory"] = f"elsewhere-{slave['name']}"
        (run.path / slave["directory"]).mkdir()
    (run.path / "moved.yaml").write_text(yaml.safe_dump(moved))
    with pytest.raises(ConfigError, match=r"not in the directory of every slave: s0 holds nothing; s1 holds nothing"):
        run.rebalance("moved.yaml")
    before = run.placement()
    run.rebalance("moved.yaml", "--old", str(run.path / "two.yaml"))
    assert run.placement() == before
    assert entries(run.path / "s0") == [] and entries(run.path / "elsewhere-s0") == [str(V2)]


def test_what_was_before_may_be_kept(run: StoppedRun) -> None:
    """--keep-old: under names that nobody reads and nobody deletes."""
    run.rebalance("three.yaml", "--keep-old")
    assert entries(run.path / "s0") == ["old-v1@r1", "old-v2@r3", "v2@r3"]
    run.assert_intact()


def test_what_was_kept_before_stays_beside_it(run: StoppedRun) -> None:
    """There and back at one version with --keep-old: the second one finds its name taken, behind the row."""
    run.rebalance("three.yaml", "--keep-old")
    run.rebalance("two.yaml", "--keep-old", "--old", str(run.path / "three.yaml"))
    assert entries(run.path / "s0") == ["old-v1@r1", "old-v2@r3", "old-v2@r3-2", "v2@r3"]
    assert sorted(run.placement()) == ["s0", "s1"]
    run.assert_intact()


def test_a_dry_run_changes_nothing(run: StoppedRun) -> None:
    """It prints the plan, also while master and slaves run."""
    lock = PidLock(run.path / "s0" / ".lock", busy="", advice="")
    with closing(run.ledger()), closing(lock):
        assert "→ s2" in run.rebalance("three.yaml", "--dry-run")
    assert sorted(run.placement()) == ["s0", "s1"]
    assert entries(run.path / "s2") == [] and entries(run.path / "s0") == [str(V1), str(V2)]


def test_before_the_first_version(tmp_path: Path) -> None:
    """v0@r0 is the initial model: only the row is written, and each new slave reads its layers from it."""
    run = StoppedRun(tmp_path)
    genesis.make_run(load_run(run.write_file("two.yaml", 2)), tensors())
    run.write_file("three.yaml", 3)
    run.rebalance("three.yaml")
    assert sorted(run.placement()) == ["s0", "s1", "s2"]
    for name, layers in run.placement().items():
        with closing(run.slave(name)) as snapshots:
            theta = {i: np.empty(site_model(run).layers[i].numel, np.float32) for i in layers}
            snapshots.read_snapshot(VersionId(0, 0), theta, {i: np.empty_like(a) for i, a in theta.items()})
            assert all((a == 0.5).all() for a in theta.values())


def site_model(run: StoppedRun) -> Manifest:
    with closing(run.ledger(readonly=True)) as ledger:
        return Manifest.from_json(ledger.run_row().manifest)


def test_what_is_not_on_the_disks_is_undone(run: StoppedRun) -> None:
    """`durability: async`: a version that no disk has goes back to the newest durable one, as at any start."""
    run.commit(V3, V2, durable=False)
    assert f"undone, since they are not on every disk: {V3}" in run.rebalance("three.yaml")
    run.assert_intact()
    with closing(run.ledger()) as ledger:
        state = ledger.read_state()
    assert state.versions[-1].version == V2 and [v.version for v in state.undone] == [V3]


# ---- interrupted -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("new", "words"), [("three.yaml", ()), ("one.yaml", ("--old", "two.yaml"))])
def test_killed_anywhere_the_run_is_whole(tmp_path: Path, new: str, words: tuple[str, ...]) -> None:
    """Before the row the old placement serves, after it the new one; the repeated command finishes either."""
    made = StoppedRun(tmp_path / "made")
    made.path.mkdir()
    made.make().write_file("one.yaml", 1)
    expected, seen = load_run(made.path / new), set[bool]()
    for at in range(1, 200):
        run = StoppedRun(tmp_path / f"killed-{at}")
        shutil.copytree(made.path, run.path)
        arguments = [w if w.startswith("--") else str(run.path / w) for w in words]
        with pytest.MonkeyPatch.context() as patch:
            guillotine = Guillotine(patch, at)
            try:
                run.rebalance(new, *arguments)
            except Killed:
                pass
            if not guillotine.fell:
                break
        done = set(run.placement()) == {s.name for s in expected.slaves}
        seen.add(done)
        assert done or set(run.placement()) == {"s0", "s1"}
        if at % 2:
            run.assert_intact()  # the daemons are started first: they finish what they find
        run.rebalance(new, *arguments)
        assert set(run.placement()) == {s.name for s in expected.slaves}
        run.assert_intact()
        for i in range(3):
            assert entries(run.path / f"s{i}") == ([str(V2)] if i < len(expected.slaves) else [])
        with closing(run.ledger(readonly=True)) as ledger:
            assert len(ledger.read_rebalances()) == 1
        shutil.rmtree(run.path)
    else:
        pytest.fail("it never came to an end")
    assert seen == {True, False} and at > 10


def test_what_it_wrote_outlives_a_power_cut(run: StoppedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """The staged snapshots, before the row that makes them the run's; their names, before the command says so."""
    cut, at_row = PowerCut(run.path, monkeypatch), list[list[str]]()
    write_records = Ledger.write_records

    def seen(ledger: Ledger, records: Any, wall: float | None = None) -> None:
        staged = list(run.path.glob("s*/.rebalanced-*"))
        at_row.append([lost for path in staged for lost in cut.find_lost(path)] if len(staged) == 3 else ["all"])
        write_records(ledger, records, wall)

    monkeypatch.setattr(Ledger, "write_records", seen)
    run.rebalance("three.yaml")
    assert at_row == [[]] and cut.early == []
    for i in range(3):
        assert cut.find_lost(run.path / f"s{i}" / str(V2)) == []
        assert not cut.would_return(run.path / f"s{i}" / f".rebalanced-{V2}")
        assert not cut.would_return(run.path / f"s{i}" / str(V1))
    cut.close()


def test_interrupted_and_the_run_went_on(run: StoppedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a killed try had staged of an older version is nobody's: slaves pass it by, the next try deletes it."""
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "start_term", lambda self: (_ for _ in ()).throw(Killed()))
        with pytest.raises(Killed):
            run.rebalance("three.yaml")
    assert entries(run.path / "s2") == [".rebalanced-v2@r3"]
    run.assert_intact()
    run.commit(V3, V2)
    run.rebalance("three.yaml")
    run.assert_intact(V3)
    assert entries(run.path / "s2") == [str(V3)] and entries(run.path / "s0") == [str(V3)]


# ---- refused ---------------------------------------------------------------------------------------------------------


def remove_slave_directory(run: StoppedRun) -> None:
    shutil.rmtree(run.path / "s1")


def damage_model(run: StoppedRun) -> None:
    flip_bit(run.path / "s1" / str(V2), "momentum.")


def lose_head(run: StoppedRun) -> None:
    shutil.rmtree(run.path / "s1" / str(V2))


def forget_new_directory(run: StoppedRun) -> None:
    (run.path / "s2").rmdir()


def take_two_directories_for_one(run: StoppedRun) -> None:
    text = (run.path / "three.yaml").read_text()
    (run.path / "three.yaml").write_text(text.replace("directory: s2", "directory: s1"))


def other_run(run: StoppedRun) -> None:
    run.write_file("three.yaml", 3, run="another")


def other_options(run: StoppedRun) -> None:
    raw = yaml.safe_load((run.path / "three.yaml").read_text())
    raw["shared"]["outer"] = {"lr": 0.1}
    (run.path / "three.yaml").write_text(yaml.safe_dump(raw))


def too_little_memory(run: StoppedRun) -> None:
    run.write_file("three.yaml", 3, memory_bytes=1000)


def too_many_slaves(run: StoppedRun) -> None:
    run.write_file("three.yaml", 9)


def foreign_snapshot(run: StoppedRun) -> None:
    path = run.path / "s1" / str(V2) / "manifest.json"
    path.write_text(path.read_text().replace('"run": "r"', '"run": "foreign"'))


def old_ledger(run: StoppedRun) -> None:
    with closing(run.slave("s0")) as snapshots:
        layers = run.placement()["s0"]
        arrays = part(V3, 1, layers, site_model(run))
        snapshots.write_snapshot(VersionId(9, 90), arrays, arrays)


@pytest.mark.parametrize(
    ("spoil", "error", "told"),
    [
        (remove_slave_directory, ConfigError, r"slaves\.s1\.directory: .*s1 is not here: mount it, or make it"),
        (damage_model, CorruptSnapshot, r"s1/v2@r3/\d+\.safetensors: .*expected xxh3-128"),
        (lose_head, ConfigError, r"v2@r3, the newest durable version, is not .*: s1 holds v1@r1; restore it"),
        (forget_new_directory, ConfigError, r"slaves\.s2\.directory: .*s2 is not here"),
        (take_two_directories_for_one, ConfigError, r"s1 is said to be of s1 and of s2"),
        (other_run, ConfigError, r"is the ledger of run 'r', the run file's shared\.run is 'another'"),
        (other_options, ConfigError, r"shared\.outer\.lr: the run has 0\.7, this file 0\.1: put the options back"),
        (too_little_memory, ConfigError, r"slaves\.s0: slots, pinned.* x 28 B = .*it may have 1000 B"),
        (too_many_slaves, ConfigError, r"expected at most 7, one for each layer of the model, got 9"),
        (foreign_snapshot, ConfigError, r"is a snapshot of run 'foreign', expected run 'r'"),
        (old_ledger, ConfigError, r"s0 holds a version of round 90.*this ledger is an old copy"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_bad_input_changes_nothing(run: StoppedRun, spoil: Any, error: type[DipsError], told: str) -> None:
    """It is said what is wrong and where; ledger and directories are as before."""
    spoil(run)
    before = {p: p.stat().st_ino for p in run.path.rglob("*") if p.name not in (".lock", "ledger.sqlite.lock")}
    with pytest.raises(error, match=told):
        run.rebalance("three.yaml")
    assert sorted(run.placement()) == ["s0", "s1"]
    after = {p: p.stat().st_ino for p in run.path.rglob("*") if p.name not in (".lock", "ledger.sqlite.lock")}
    assert {p for p in before if "-wal" not in p.name and "-shm" not in p.name} == {
        p for p in after if "-wal" not in p.name and "-shm" not in p.name
    }


def test_old_slaves_that_the_new_file_does_not_name(run: StoppedRun) -> None:
    """Where their layers lie is said by --old, or the command asks for it."""
    run.write_file("one.yaml", 1)
    with pytest.raises(ConfigError, match=r"s1 holds layers, and the new run file does not say where: name its run"):
        run.rebalance("one.yaml")


def test_everybody_who_runs_is_named(run: StoppedRun) -> None:
    """Master and slaves, with their pids, in one message."""
    locks = [PidLock(run.path / name / ".lock", busy="", advice="") for name in ("s0", "s2")]
    with closing(run.ledger()), pytest.raises(ConfigError) as refused:
        run.rebalance("three.yaml")
    for lock in locks:
        lock.close()
    pid = os.getpid()
    assert f"in use by another master (pid {pid})" in str(refused.value)
    assert all(f"{name} runs on {run.path / name} (pid {pid})" in str(refused.value) for name in ("s0", "s2"))
    assert "s1" not in str(refused.value)


def test_a_copy_is_read_back_before_the_row(run: StoppedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that keeps something else than was written is found while the old snapshots are still there."""
    real = staging.stage_version

    def rots(aside: Path, version: VersionId) -> None:
        real(aside, version)
        flip_bit(staged_path(aside.parent, version), "theta.")

    monkeypatch.setattr(staging, "stage_version", rots)
    with pytest.raises(CorruptSnapshot, match=r"\.rebalanced-v2@r3/\d+\.safetensors: theta\."):
        run.rebalance("three.yaml")
    assert entries(run.path / "s2") == []
    run.assert_intact()


def test_what_stays_where_it_is_is_read_as_well(run: StoppedRun) -> None:
    """s1 keeps its file; a damaged one is found before its older versions, its only substitute, are given up."""
    moved = yaml.safe_load((run.path / "two.yaml").read_text())
    moved["slaves"][0]["directory"] = "elsewhere"
    (run.path / "elsewhere").mkdir()
    (run.path / "moved.yaml").write_text(yaml.safe_dump(moved))
    damage_model(run)
    with pytest.raises(CorruptSnapshot, match=r"s1/v2@r3/\d+\.safetensors: momentum\."):
        run.rebalance("moved.yaml", "--old", str(run.path / "two.yaml"))
    assert entries(run.path / "s0") == entries(run.path / "s1") == [str(V1), str(V2)]


def test_a_full_disk_gives_its_room_back(run: StoppedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found before the first byte is copied, and what was reserved elsewhere is free again."""
    real, seen = tensorfile._reserve_space, list[int]()

    def fills_up(fd: int, size: int) -> None:
        seen.append(size)
        if len(seen) == 3:
            raise OSError(28, "No space left on device")
        real(fd, size)

    monkeypatch.setattr(tensorfile, "_reserve_space", fills_up)
    with pytest.raises(FailedDisk, match=r"the run is as it was: .*No space left"):
        run.rebalance("three.yaml")
    assert len(seen) == 3, "something was written before all was reserved"
    assert [entries(run.path / f"s{i}") for i in range(3)] == [[str(V1), str(V2)], [str(V1), str(V2)], []]
    run.assert_intact()


@pytest.fixture(autouse=True)
def _quiet_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")


# ---- layers of another host ------------------------------------------------------------------------------------------


class OtherHost:
    """Layers of V2 as another host's slaves would send them; `calls` are the layers of each request."""

    def __init__(self, run: StoppedRun) -> None:
        with closing(run.ledger(readonly=True)) as ledger:
            self.model = Manifest.from_json(ledger.run_row().manifest)
        everything = tuple(range(len(self.model.layers)))
        self.parts = [part(V2, salt, everything, self.model) for salt in (1, 2)]
        self.calls: list[list[int]] = []
        self.damages = False

    def fetch(self, layers: Mapping[int, tuple[np.ndarray, np.ndarray]]) -> dict[int, tuple[str, str]]:
        self.calls.append(list(layers))
        for index, flats in layers.items():
            for flat, held in zip(flats, self.parts, strict=True):
                flat[:] = held[index]
            if self.damages:
                flats[1].view(np.uint8)[0] ^= 1
        return {i: (digest_of(self.parts[0][i]), digest_of(self.parts[1][i])) for i in layers}

    def stage(self, run: StoppedRun, slave: str, layers: tuple[int, ...], sinc: int = 9) -> str:
        owner = ("r", slave, sinc)
        planned = staging.plan_fetch(owner, V2, run.path / slave, self.model, layers, self.fetch)
        return staging.stage_parts([planned], {})[slave]


def test_layers_come_from_here_and_from_another_host(run: StoppedRun) -> None:
    """What the directory has is copied, the rest fetched; the version beside it stays; a second try copies nothing."""
    host = OtherHost(run)
    own = dict(run.placement())["s0"]
    foreign = next(i for i in range(len(host.model.layers)) if i not in own)
    layers = tuple(sorted({own[0], foreign}))
    before = entries(run.path / "s0")
    digest = host.stage(run, "s0", layers)
    assert host.calls == [[foreign]]
    staged = read_manifest(staged_path(run.path / "s0", V2))
    assert staged.digest == digest and [record.index for record in staged.layers] == list(layers)
    for record in staged.layers:
        theta, momentum = (np.empty(record.layer.numel, np.float32) for _ in range(2))
        read_layer(staged_path(run.path / "s0", V2), staged, record, theta, momentum)
        assert theta.tobytes() == host.parts[0][record.index].tobytes()
        assert momentum.tobytes() == host.parts[1][record.index].tobytes()
    assert host.stage(run, "s0", layers, sinc=10) == digest and len(host.calls) == 1, "staged by the first try"
    assert entries(run.path / "s0") == sorted([*before, f".rebalanced-{V2}"])
    run.assert_intact()


def test_fetched_layers_whose_digest_differs_are_not_staged(run: StoppedRun) -> None:
    (run.path / "s2").mkdir(exist_ok=True)
    host = OtherHost(run)
    host.damages = True
    with pytest.raises(CorruptSnapshot, match=r"layer .* of v2@r3: expected θ and m of xxh3-128"):
        host.stage(run, "s2", (0, 1))
    assert entries(run.path / "s2") == []
    host.damages = False
    host.stage(run, "s2", (0, 1))
    assert entries(run.path / "s2") == [f".rebalanced-{V2}"]


def test_a_full_disk_before_anything_is_fetched(run: StoppedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for all is reserved first: nothing travels in vain, and nothing is left."""
    (run.path / "s2").mkdir(exist_ok=True)
    host = OtherHost(run)

    def full(fd: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensorfile, "_reserve_space", full)
    with pytest.raises(FailedDisk, match=r"the run is as it was: .*No space left"):
        host.stage(run, "s2", (0,))
    assert host.calls == [] and entries(run.path / "s2") == []


def test_many_layers_are_fetched_some_at_a_time(run: StoppedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    (run.path / "s2").mkdir(exist_ok=True)
    monkeypatch.setattr(staging, "FETCHED", 2)
    host = OtherHost(run)
    host.stage(run, "s2", (0, 1, 2))
    assert host.calls == [[0, 1], [2]]
