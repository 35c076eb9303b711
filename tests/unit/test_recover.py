"""`dips recover --lost-ledger`: a saved model makes up for a lost ledger, and for a slave's directory besides; nothing
is written while anybody serves. tests/integration/test_recover.py recovers over the lanes.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
import yaml
from safetensors.numpy import save_file
from structlog.testing import capture_logs
from typer.testing import CliRunner

from dips.cli import cli
from dips.commands import recovering
from dips.config import RunFile, load_run
from dips.errors import ConfigError, FailedDisk
from dips.ids import GENESIS, VersionId
from dips.master import genesis
from dips.master.ledger import Ledger
from dips.master.restore import SPARE
from dips.outer_step import nesterov_step
from dips.protocol.coordinator import Coordinator
from dips.protocol.effects import Effect, Exit
from dips.protocol.events import SlaveRegistered
from dips.protocol.manifest import Manifest
from dips.protocol.records import RoundReserved, ScoreHistory, VersionCommitted
from dips.slave import snapshot_mirror
from dips.slave.snapshots import Snapshots
from dips.slave.staging import Rebuild
from dips.store import tensorfile
from dips.store.files import read_manifest
from dips.store.mirror import MirrorStore, copy_out
from tests.damage import load_parameters
from tests.guillotine import Guillotine, Killed
from tests.power_cut import PowerCut
from tests.run_files import write_run_file

V1 = VersionId(1, 1)
SHAPES = {"a.w": (3,), "b.w": (2, 2)}


def tensors(value: float) -> dict[str, np.ndarray]:
    return {name: np.full(shape, value, np.float32) for name, shape in SHAPES.items()}


@pytest.fixture
def config(tmp_path: Path) -> RunFile:
    """A run of two slaves at v1@r1: θ is 1 and m is 5 everywhere, both lie on both disks."""
    config = load_run(write_run_file(tmp_path))
    row = genesis.make_run(config, tensors(0.0))
    manifest = Manifest.from_json(row.manifest)
    for name, layers in row.placement:
        disk = opened(config, name)
        disk.bind_layers(manifest, layers, [row.genesis[i] for i in layers], 1)
        flat = {i: np.ones(manifest.layers[i].numel, np.float32) for i in layers}
        disk.write_snapshot(V1, flat, {i: 5 * array for i, array in flat.items()})
        disk.close()
    with closing(Ledger.open(genesis.ledger_path(config), wall=time.time)) as ledger:
        ledger.start_term()
        made = VersionCommitted(
            V1, GENESIS, True, (), (), nesterov_step(1.0, 0.7, 0.8), 1.0, False, (), (), ScoreHistory((), (1.0,)), 0.0
        )
        ledger.write_records([RoundReserved(1, 0.0), made])
    save_file(tensors(2.0), tmp_path / "saved.safetensors")
    return config


def opened(config: RunFile, name: str) -> Snapshots:
    section = config.slave_section(name)
    return Snapshots(section.directory, "r", name, section.initial_model, structlog.get_logger())


def recover(tmp_path: Path, *words: str) -> Any:
    file, model = str(tmp_path / "dips.yaml"), str(tmp_path / "saved.safetensors")
    return CliRunner().invoke(
        cli, ["recover", "--lost-ledger", "--config", file, "--model", model, *(words or ("--yes",))]
    )


def content(config: RunFile, version: VersionId) -> Mapping[str, np.ndarray]:
    """All parameters and momentum of a version, by the names of the slaves' files."""
    files = [load_parameters(s.directory / str(version)) for s in config.slaves]
    return {name: array for file in files for name, array in file.items()}


def test_a_lost_directory_loses_momentum_and_nothing_else(config: RunFile, tmp_path: Path) -> None:
    """The new version has the file's θ everywhere, the living slave's momentum, and 0 for the lost layers."""
    shutil.rmtree(config.master.directory)
    shutil.rmtree(config.slave_section("s1").directory)
    done = recover(tmp_path)
    assert done.exit_code == 0, done.output
    assert "s1: 1 layers, no snapshot is left: momentum 0" in done.output
    head = head_of(config)
    found = content(config, head)
    (lost,) = [name for name, shape in SHAPES.items() if not found[f"momentum.{name}"].any()]
    (kept,) = SHAPES.keys() - {lost}
    assert all((found[f"theta.{name}"] == 2.0).all() for name in SHAPES)
    assert (found[f"momentum.{kept}"] == 5.0).all()
    with closing(Ledger.open(genesis.ledger_path(config), readonly=True)) as ledger:
        state, (*_, newest) = ledger.read_state(), ledger.read_history()
        assert set(ledger.read_digests()) == {(head.round, "s0"), (head.round, "s1")}
    assert [v.version for v in state.versions] == [GENESIS, head] and state.versions[-1].durable
    assert newest.recovered == f"from {tmp_path / 'saved.safetensors'}: layers {lost[0]} lost their momentum"
    told = CliRunner().invoke(cli, ["history", "--config", str(tmp_path / "dips.yaml")], env={"COLUMNS": "200"})
    assert "recovered: from" in told.output and "lost their momentum" in told.output
    verified = CliRunner().invoke(cli, ["verify", "--config", str(tmp_path / "dips.yaml")])
    assert verified.exit_code == 0, verified.output


def test_a_ledger_that_is_here_is_not_lost(config: RunFile, tmp_path: Path) -> None:
    """The other way needs no directories, and no daemon stopped."""
    before = genesis.ledger_path(config).read_bytes()
    done = recover(tmp_path)
    assert isinstance(done.exception, ConfigError) and "leave out --lost-ledger" in str(done.exception)
    assert genesis.ledger_path(config).read_bytes() == before
    words = ["recover", "--lost-ledger", "--master", "127.0.0.1:1", "--model", str(tmp_path / "saved.safetensors")]
    done = CliRunner().invoke(cli, words)
    assert isinstance(done.exception, ConfigError) and "give --config FILE" in str(done.exception)


def test_a_lost_ledger_begins_anew_above_every_name(config: RunFile, tmp_path: Path) -> None:
    """History is gone, momentum is not; rounds and incarnations are above all that were used."""
    shutil.rmtree(config.master.directory)
    done = recover(tmp_path)
    assert done.exit_code == 0, done.output
    with closing(Ledger.open(genesis.ledger_path(config), readonly=True)) as ledger:
        state = ledger.read_state()
    head = state.versions[-1].version
    assert head.version == 1 and head.round > 1 + SPARE and state.incarnations_above >= SPARE
    found = content(config, head)
    assert all((found[f"theta.{name}"] == 2.0).all() and (found[f"momentum.{name}"] == 5.0).all() for name in SHAPES)


def test_a_lost_ledger_reads_the_model_once(config: RunFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its row and version 0 are made of one reading: a file that is changed meanwhile cannot tell them apart."""
    shutil.rmtree(config.master.directory)
    read, files = recovering._read_tensors, list[Path]()

    def seen(model: Path) -> Any:
        files.append(model)
        return read(model)

    monkeypatch.setattr(recovering, "_read_tensors", seen)
    done = recover(tmp_path)
    assert done.exit_code == 0, done.output
    assert len(files) == 1
    assert all((config.master.directory / name).exists() for name in (genesis.INITIAL_SHARED, genesis.INITIAL_VERSION))
    assert not (config.master.directory / recovering.ASIDE).exists()


def mirrored(config: RunFile, tmp_path: Path, *names: str) -> RunFile:
    """The same run, with mirrors of these slaves that hold what their disks do."""
    (tmp_path / "mirror").mkdir()
    raw = yaml.safe_load((tmp_path / "dips.yaml").read_text())
    for slave in (slave for slave in raw["slaves"] if slave["name"] in names):
        slave["mirror"] = "mirror"
        store = MirrorStore(str(tmp_path / "mirror"), "r", slave["name"])
        copy_out(store, tmp_path / slave["name"], V1, lambda _: None)
    (tmp_path / "dips.yaml").write_text(yaml.safe_dump(raw))
    return load_run(tmp_path / "dips.yaml")


def test_mirrors_of_slaves_are_no_reason_to_refuse(config: RunFile, tmp_path: Path) -> None:
    """The run's own copies lie there: momentum comes back from them, and rounds begin above theirs."""
    config = mirrored(config, tmp_path, "s0", "s1")
    (tmp_path / "mirror/r/s0/v2000@r5000").mkdir()
    for lost in (config.master.directory, config.slave_section("s1").directory):
        shutil.rmtree(lost)
    done = recover(tmp_path)
    assert done.exit_code == 0, done.output
    head = head_of(config)
    assert head.round > 5000 + SPARE
    found = content(config, head)
    assert all((found[f"theta.{name}"] == 2.0).all() and (found[f"momentum.{name}"] == 5.0).all() for name in SHAPES)
    assert refused_by_the_master(config) == []


def test_a_disk_that_fills_in_a_restore_ends_no_recovery(
    config: RunFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its own disk refuses is told as that, and the operator is asked, as where the mirror fails."""
    config = mirrored(config, tmp_path, "s1")
    shutil.rmtree(config.slave_section("s1").directory)
    shutil.rmtree(config.master.directory)

    def fill_disk(*_: Any) -> None:
        raise FailedDisk("s1: File too large")

    monkeypatch.setattr(snapshot_mirror, "bring_back", fill_disk)
    done = recover(tmp_path)
    assert done.exit_code == 0 and "(its mirror: s1: File too large)" in done.output


def test_a_mirror_that_cannot_be_read(config: RunFile, tmp_path: Path) -> None:
    """It may hold rounds that a new ledger would give again."""
    config = mirrored(config, tmp_path, "s1")
    (tmp_path / "mirror").rename(tmp_path / "unmounted")
    shutil.rmtree(config.master.directory)
    refused = recover(tmp_path)
    assert isinstance(refused.exception, ConfigError)
    assert "rounds that only a mirror shows must not be given again; mount it" in str(refused.exception)
    assert not genesis.ledger_path(config).exists() and not list(config.master.directory.glob(".recovering"))


def test_snapshots_of_other_layers_give_no_momentum(config: RunFile, tmp_path: Path) -> None:
    """A ledger that begins anew may place other layers than the lost one, which a rebalance had changed."""
    first, second = (config.slave_section(name).directory / str(V1) for name in ("s0", "s1"))
    first.rename(tmp_path / "aside")
    second.rename(first)
    (tmp_path / "aside").rename(second)
    for path, name in ((first, "s0"), (second, "s1")):
        manifest = path / "manifest.json"
        manifest.write_text(re.sub('"slave": "s[01]"', f'"slave": "{name}"', manifest.read_text()))
    shutil.rmtree(config.master.directory)
    done = recover(tmp_path)
    assert done.exit_code == 0, done.output
    assert done.output.count("no snapshot is left: momentum 0") == 2


def test_no_with_a_lost_ledger_makes_none(config: RunFile, tmp_path: Path) -> None:
    """The plan needs a ledger to look at; it is built aside."""
    shutil.rmtree(config.master.directory)
    file, model = str(tmp_path / "dips.yaml"), str(tmp_path / "saved.safetensors")
    done = CliRunner().invoke(cli, ["recover", "--lost-ledger", "--config", file, "--model", model], input="n\n")
    assert done.exit_code == 1 and "momentum of v1@r1" in done.output
    assert [path.name for path in config.master.directory.iterdir()] == ["ledger.sqlite.lock"]


# ---- interrupted -----------------------------------------------------------------------------------------------------


def head_of(config: RunFile) -> VersionId:
    with closing(Ledger.open(genesis.ledger_path(config), readonly=True)) as ledger:
        return ledger.read_state().versions[-1].version


def refused_by_the_master(config: RunFile) -> list[Exit]:
    """What a master that is started now ends with, when the slaves register with what their disks hold."""
    with closing(Ledger.open(genesis.ledger_path(config), readonly=True)) as ledger:
        state = ledger.read_state()
    coordinator = Coordinator(state, Manifest.from_json(state.row.manifest), config.make_options(), 0.0)
    effects = list[Effect]()
    for name, _ in state.row.placement:
        with closing(opened(config, name)) as disk:
            held = disk.complete_versions()
        register = SlaveRegistered(1, name, f"n-{name}", "r", "h:1", ("h:2",), 0, None, None, held, 2, "")
        effects += coordinator.step(register, 0.0)
    return [effect for effect in effects if isinstance(effect, Exit)]


def slaves_learn_their_layers(config: RunFile) -> None:
    """As in Registered."""
    with closing(Ledger.open(genesis.ledger_path(config), readonly=True)) as ledger:
        row = ledger.run_row()
    for name, layers in row.placement:
        with closing(opened(config, name)) as disk:
            disk.bind_layers(Manifest.from_json(row.manifest), layers, [row.genesis[i] for i in layers], 2)


def assert_recovered(config: RunFile) -> None:
    """θ is the file's everywhere, s0's momentum is there, s1's is 0, and the ledger says so of these very bytes."""
    with closing(Ledger.open(genesis.ledger_path(config), readonly=True)) as ledger:
        (*_, newest), digests, row = ledger.read_history(), ledger.read_digests(), ledger.run_row()
    head = head_of(config)
    found, model = content(config, head), Manifest.from_json(row.manifest)
    for name, layers in row.placement:
        directory = config.slave_section(name).directory
        assert read_manifest(directory / str(head)).digest == digests[head.round, name]
        assert not [path.name for path in directory.iterdir() if path.name.startswith((".unfinished", ".rebalanced"))]
        for parameter in (p.name for layer in layers for p in model.layers[layer].parameters):
            assert (found[f"theta.{parameter}"] == 2.0).all()
            assert (found[f"momentum.{parameter}"] == (5.0 if name == "s0" else 0.0)).all()
    ((_, lost),) = (placed for placed in row.placement if placed[0] == "s1")
    (layer,) = (model.layers[index].name for index in lost)
    assert newest.recovered is not None and newest.recovered.endswith(f"layers {layer} lost their momentum")


def test_killed_anywhere_nothing_half_done_is_believed(config: RunFile, tmp_path: Path) -> None:
    """Before the row there is no ledger; after it the slaves, or the repeated command, find the version."""
    shutil.rmtree(config.slave_section("s1").directory)
    shutil.rmtree(config.master.directory)
    shutil.copytree(tmp_path, made := tmp_path.with_name(f"{tmp_path.name}-made"))
    seen = set[bool]()
    for at in range(1, 200):
        shutil.rmtree(tmp_path)
        shutil.copytree(made, tmp_path)
        with pytest.MonkeyPatch.context() as patch:
            guillotine = Guillotine(patch, at)
            try:
                done = recover(tmp_path)
            except Killed:
                pass
            if not guillotine.fell:
                assert done.exit_code == 0, done.output
                break
        committed = genesis.ledger_path(config).exists()
        seen.add(committed)
        if committed:
            assert refused_by_the_master(config) == []
            slaves_learn_their_layers(config)
            assert_recovered(config)
            continue
        again = recover(tmp_path)
        assert again.exit_code == 0, again.output
        assert_recovered(config)
    else:
        pytest.fail("it never came to an end")
    assert seen == {True, False} and at > 8
    assert_recovered(config)


def test_what_it_wrote_outlives_a_power_cut(config: RunFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is staged, before its row; its names, the ledger's and the initial model's, before the command says done."""
    shutil.rmtree(config.master.directory)
    cut, at_row = PowerCut(tmp_path, monkeypatch), list[list[str]]()
    write_records = Ledger.write_records

    def seen(ledger: Ledger, records: Any, wall: float | None = None) -> None:
        if any(isinstance(record, VersionCommitted) for record in records):
            staged = [path for s in config.slaves for path in s.directory.glob(".rebalanced-*")]
            at_row.append([lost for path in staged for lost in cut.find_lost(path)] if len(staged) == 2 else ["both"])
        write_records(ledger, records, wall)

    monkeypatch.setattr(Ledger, "write_records", seen)
    done = recover(tmp_path)
    assert done.exit_code == 0, done.output
    assert at_row == [[]] and cut.early == []
    head = head_of(config)
    for slave in config.slaves:
        assert cut.find_lost(slave.directory / str(head)) == []
        assert not cut.would_return(slave.directory / f".rebalanced-{head}")
    for name in (genesis.LEDGER, genesis.INITIAL_SHARED, genesis.INITIAL_VERSION):
        assert cut.find_lost(config.master.directory / name) == []
    cut.close()


def test_what_was_killed_behind_its_row_is_finished(config: RunFile, tmp_path: Path) -> None:
    """The same command gives the staged snapshots their names, and makes no version more."""
    shutil.rmtree(config.slave_section("s1").directory)
    shutil.rmtree(config.master.directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rebuild, "place_version", lambda *_: (_ for _ in ()).throw(Killed()))
        with pytest.raises(Killed):
            recover(tmp_path)
    head = head_of(config)
    staged = config.slaves[1].directory / f".rebalanced-{head}" / "manifest.json"
    whole = staged.read_bytes()
    staged.write_bytes(whole[:-1])
    with capture_logs() as logs:
        recovering.recover_run(config, tmp_path / "saved.safetensors", structlog.get_logger(), lambda _: False)
    assert [line["event"] for line in logs] == ["snapshot_passed_over"] and staged.exists()
    staged.write_bytes(whole)
    opened(config, "s1").close()  # its directory is locked no more
    done = recover(tmp_path)
    assert done.exit_code == 0 and f"note: {head} had its row; its snapshots have their names now" in done.output
    assert head_of(config) == head
    assert_recovered(config)


def test_a_full_disk_leaves_the_run_as_it_was(config: RunFile, tmp_path: Path) -> None:
    """Found before any slave's disk is written; what was reserved is free again."""
    shutil.rmtree(config.master.directory)
    real, seen, initial = tensorfile._reserve_space, list[int](), len(SHAPES)  # layers of v0@r0, for the ledger

    def fills_up(fd: int, size: int) -> None:
        seen.append(size)
        if len(seen) == initial + 2:
            raise OSError(28, "No space left on device")
        real(fd, size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensorfile, "_reserve_space", fills_up)
        done = recover(tmp_path)
    assert isinstance(done.exception, FailedDisk) and "the run is as it was: " in str(done.exception)
    assert len(seen) == initial + 2, "something was written before all was reserved"
    for slave in config.slaves:
        assert {path.name for path in slave.directory.iterdir()} == {".lock", str(V1)}
    assert not genesis.ledger_path(config).exists()


def test_it_is_refused_while_anybody_serves(config: RunFile, tmp_path: Path) -> None:
    """The sentence names who serves, by pid, and what to stop; nothing was written."""
    before = genesis.ledger_path(config).read_bytes()
    with closing(opened(config, "s1")), closing(Ledger.open(genesis.ledger_path(config))):
        done = recover(tmp_path)
    assert isinstance(done.exception, ConfigError)
    assert "the master (pid " in str(done.exception) and "slave s1 (pid " in str(done.exception)
    assert str(done.exception).endswith("still serve this run: stop the master and all slaves first")
    assert genesis.ledger_path(config).read_bytes() == before


@pytest.mark.parametrize(
    ("saved", "problem"),
    [
        ({**tensors(1.0), "b.w": np.ones((2, 2), np.float16)}, "expected parameters in float32, got: b.w is float16"),
        ({**tensors(1.0), "b.w": np.full((2, 2), np.nan, np.float32)}, "not finite: b.w"),
    ],
)
def test_a_file_that_is_no_model_is_refused(
    config: RunFile, tmp_path: Path, saved: dict[str, np.ndarray], problem: str
) -> None:
    """What is of another type, or not finite, is named; nothing was written."""
    shutil.rmtree(config.master.directory)
    save_file(saved, tmp_path / "saved.safetensors")
    done = recover(tmp_path)
    assert isinstance(done.exception, ConfigError) and problem in str(done.exception)
    assert not list(tmp_path.glob("s*/.rebalanced*")) and not genesis.ledger_path(config).exists()
