"""Whatever says "durable" outlives a power cut: content first, then names, then the statement."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import IO

import numpy as np
import pytest

from dips.config import load_run
from dips.errors import CorruptSnapshot
from dips.files import sync_path, write_aside
from dips.ids import GENESIS, VersionId
from dips.master import genesis
from dips.slave import snapshot_mirror
from dips.slave.snapshot_mirror import SnapshotMirror
from dips.store.files import (
    promote_if_ours,
    promote_version,
    read_manifest,
    stage_version,
    staged_path,
    write_version,
)
from dips.store.mirror import MARKER, SEEN, MirrorStore, bring_back, copy_out
from dips.store.version import digest_of
from tests.damage import flip_bit
from tests.power_cut import PowerCut, fell_behind
from tests.unit.slave.test_mirror import LAYERS, LOG, V1, V2, nothing, written
from tests.unit.slave.test_snapshots import MANIFEST, arrays, opened


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A slave's directory with v1@r1 and v2@r5, and an empty mirror beside it."""
    written(tmp_path / "s", V1, V2)
    (tmp_path / "mirror").mkdir()
    return tmp_path / "s"


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[PowerCut]]:
    """Call `recorded(record, …)` when all is made that was there before."""
    made: list[PowerCut] = []
    yield made
    for one in made:
        assert one.early == [], "renamed before it was on the disk"
        one.close()


def recorded(record: list[PowerCut], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PowerCut:
    record.append(PowerCut(tmp_path, monkeypatch))
    return record[0]


def store_of(tmp_path: Path) -> MirrorStore:
    return MirrorStore(str(tmp_path / "mirror"), "r", "s", of=tmp_path / "s")


def stage(disk: Path, version: VersionId, seed: int) -> None:
    """A version that waits for its row, as `dips recover` writes it."""
    aside = disk / f".unfinished-{version}"
    aside.mkdir()
    flat = (part[index] for index in LAYERS for part in (arrays(LAYERS, seed), arrays(LAYERS, 6)))
    write_version(aside, ("r", "s", 4), version, MANIFEST, LAYERS, flat)
    stage_version(aside, version)


def test_the_recorder_finds_what_it_is_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that no fsync followed, a buffer that was not flushed, a name after its directory's, an early rename."""
    (tmp_path / "old").write_text("before")
    cut = PowerCut(tmp_path, monkeypatch)
    (tmp_path / "old").write_text("after")
    assert cut.find_lost(tmp_path / "old") == ["content old"]
    with (tmp_path / "buffered").open("wb") as file:
        file.write(b"in the buffer")
        os.fsync(file.fileno())
    sync_path(tmp_path)
    assert cut.find_lost(tmp_path / "buffered") == ["content buffered"]
    sync_path(tmp_path / "buffered")
    (tmp_path / "buffered").rename(tmp_path / "named")
    assert cut.find_lost(tmp_path / "named") == ["name named"] and cut.would_return(tmp_path / "buffered")
    assert cut.early == []
    (tmp_path / "hasty").write_text("x")
    (tmp_path / "hasty").rename(tmp_path / "whole")
    assert cut.early == ["content hasty"]
    cut.close()


def test_a_snapshot(disk: Path, tmp_path: Path, record: list[PowerCut], monkeypatch: pytest.MonkeyPatch) -> None:
    """Written, in the place of a damaged one, staged, and given its name."""
    v3, v4 = VersionId(3, 6), VersionId(4, 7)
    snapshots = opened(disk)
    flip_bit(disk / str(V2), "theta.")
    cut = recorded(record, tmp_path, monkeypatch)
    for version in (v3, V2):
        snapshots.write_snapshot(version, arrays(LAYERS, 3), arrays(LAYERS, 4))
        assert cut.find_lost(disk / str(version)) == []
    for seed in (1, 5):  # another try's goes
        stage(disk, v4, seed)
    assert cut.find_lost(staged_path(disk, v4)) == []
    promote_version(disk, v4)
    assert cut.find_lost(disk / str(v4)) == [] and not cut.would_return(staged_path(disk, v4))
    stage(disk, v4, 7)
    promote_version(disk, v4)
    assert not list(disk.glob(".unfinished*")), "what was there before takes no room"
    snapshots.delete_snapshots((V1,))
    assert not cut.would_return(disk / str(V1))
    snapshots.close()


def test_a_new_directory(tmp_path: Path, record: list[PowerCut], monkeypatch: pytest.MonkeyPatch) -> None:
    """A slave makes its own at its first start."""
    cut = recorded(record, tmp_path, monkeypatch)
    with closing(opened(tmp_path / "new")) as snapshots:
        snapshots.write_snapshot(V1, arrays(LAYERS, 1), arrays(LAYERS, 2))
        assert cut.find_lost(tmp_path / "new" / str(V1)) == []


def test_an_initial_model(disk: Path, tmp_path: Path, record: list[PowerCut], monkeypatch: pytest.MonkeyPatch) -> None:
    """What `dips seed` brings is kept."""
    snapshots = opened(disk)
    cut = recorded(record, tmp_path, monkeypatch)
    snapshots.keep_initial(arrays(LAYERS, 0))
    assert cut.find_lost(disk / str(GENESIS)) == []
    snapshots.close()


def test_a_recovered_version(
    disk: Path, tmp_path: Path, record: list[PowerCut], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `dips recover` brings, before the slave says that it has it."""
    snapshots, v3, theta = opened(disk), VersionId(3, 6), arrays(LAYERS, 0)
    cut = recorded(record, tmp_path, monkeypatch)
    snapshots.keep_model(v3, theta, tuple(digest_of(flat) for flat in theta.values()))
    assert cut.find_lost(disk / str(v3)) == []
    snapshots.close()


def test_a_copy_in_the_mirror(
    disk: Path, tmp_path: Path, record: list[PowerCut], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its model and its manifest, the folders that hold them, the mirror's marker, and the note of it beside the
    snapshots; a second copy of a version, too. And nothing of the one before is left to bless half of it."""
    cut = recorded(record, tmp_path, monkeypatch)
    store, at_manifest = store_of(tmp_path), list[list[str]]()
    write_file = store.write_file

    def seen(name: str, content: bytes) -> None:
        at_manifest.append(cut.find_lost(tmp_path / "mirror/r/s" / name.rpartition("/")[0] / "00000.safetensors"))
        write_file(name, content)

    manifest = tmp_path / "mirror/r/s" / str(V1) / "manifest.json"
    create_file = store.create_file

    def alone(name: str, size: int) -> AbstractContextManager[IO[bytes]]:
        assert not manifest.exists(), "that of the copy before"
        return create_file(name, size)

    monkeypatch.setattr(store, "write_file", seen)
    monkeypatch.setattr(store, "create_file", alone)
    for _ in range(2):
        copy_out(store, disk, V1, nothing)
        assert cut.find_lost(tmp_path / "mirror/r/s" / str(V1)) == []
    assert all("content" not in lost for at in at_manifest for lost in at) and len(at_manifest) == 2
    assert cut.find_lost(tmp_path / "mirror/r/s" / MARKER) == cut.find_lost(disk / SEEN) == []
    flip_bit(disk / str(V1), "momentum.")
    with pytest.raises(CorruptSnapshot):
        copy_out(store, disk, V1, nothing)
    assert snapshot_mirror.list_copies(store, "r", "s", LOG).whole == ()
    assert not manifest.exists()


def test_what_comes_back_from_a_mirror(
    disk: Path, tmp_path: Path, record: list[PowerCut], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot on a new machine, and one in the place of a damaged one, which stays beside it."""
    store = store_of(tmp_path)
    for version in (V1, V2):
        copy_out(store, disk, version, nothing)
    shutil.rmtree(disk / str(V1))
    flip_bit(disk / str(V2), "theta.")
    cut = recorded(record, tmp_path, monkeypatch)
    mirror = SnapshotMirror(store_of(tmp_path), disk, "r", "s", LOG, time.monotonic)
    assert mirror.restore(()).versions == (V2, V1)
    for name in (V1, V2, f"damaged-{V2}"):
        assert cut.find_lost(disk / str(name)) == []


@pytest.mark.parametrize("file", ["00000.safetensors", "manifest.json"])
def test_a_restore_that_is_cut_off_leaves_nothing_that_is_believed(
    disk: Path, tmp_path: Path, record: list[PowerCut], monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    """Killed behind each fsync, of the files, of the directory, of the name: whole under its name, or not there; and
    the next start brings it back."""
    store = store_of(tmp_path)
    copy_out(store, disk, V2, nothing)
    text = (disk / str(V2) / file).read_bytes()
    calls = list[int]()
    for at in range(1, 20):
        shutil.rmtree(disk)
        disk.mkdir()
        with monkeypatch.context() as patch:
            cut = PowerCut(tmp_path, patch)
            fell = fell_behind(at, patch, lambda: bring_back(store, disk, "r", "s", V2, nothing))
            assert cut.early == []
            named = disk / str(V2)
            assert not named.exists() or cut._find_lost_below(named) == []
            cut.close()
        if not fell:
            break
        calls.append(at)
        with closing(opened(disk)) as snapshots:
            held = snapshots.complete_versions()
            again = SnapshotMirror(store_of(tmp_path), disk, "r", "s", LOG, time.monotonic)
            assert again.restore(held).versions == ((V2,) if not held else ())
            assert snapshots.complete_versions() == (V2,)
        assert (disk / str(V2) / file).read_bytes() == text
    assert len(calls) == 3 + len(LAYERS) + 4, "the mirror's note; layers, manifest, their names, rename, its directory"


def test_only_a_snapshot_of_the_slaves_own_layers_is_promoted(disk: Path) -> None:
    """One of other layers waits for its row; one of the same layers as what is there is not needed."""
    for layers, promoted in (((0, 1), False), (LAYERS, False), ((0, 1), True)):
        shutil.rmtree(staged_path(disk, V1), ignore_errors=True)
        aside = disk / f".unfinished-{V1}"
        aside.mkdir()
        flat = (part[index] for index in layers for part in (arrays(LAYERS, 5), arrays(LAYERS, 6)))
        write_version(aside, ("r", "s", 1), V1, MANIFEST, layers, flat)
        stage_version(aside, V1)
        assert promote_if_ours(disk, V1, (0, 1) if promoted else LAYERS) == promoted
        assert staged_path(disk, V1).exists() != promoted


def test_half_a_snapshot_has_no_digest(disk: Path) -> None:
    """Its manifest alone would be taken for it."""
    with (disk / str(V1) / "00000.safetensors").open("r+b") as file:
        file.truncate(100)
    with pytest.raises(CorruptSnapshot, match=r"expected \d+ bytes, got 100"):
        read_manifest(disk / str(V1))


def test_what_dips_init_writes_and_a_master_brings_back(
    tmp_path: Path, record: list[PowerCut], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The initial model and what lies beside it, here and from the mirror."""
    (tmp_path / "mirror").mkdir()
    (tmp_path / "dips.yaml").write_text(
        "shared: {run: r}\ntls: off\nmaster: {directory: m, mirror: mirror}\n"
        "slaves: [{name: s, master: '127.0.0.1:1', directory: s}]\n"
    )
    config = load_run(tmp_path / "dips.yaml")
    cut = recorded(record, tmp_path, monkeypatch)
    genesis.make_run(config, {"a.w": np.ones(3, np.float32)})
    for name in (genesis.INITIAL_SHARED, genesis.INITIAL_VERSION):
        assert cut.find_lost(tmp_path / "m" / name) == []
    shutil.rmtree(tmp_path / "m" / "initial")
    genesis.fetch_initial(MirrorStore(str(tmp_path / "mirror"), "r", "master"), "r", tmp_path / "m")
    for name in (genesis.INITIAL_SHARED, genesis.INITIAL_VERSION):
        assert cut.find_lost(tmp_path / "m" / name) == []


def test_what_is_written_aside(tmp_path: Path, record: list[PowerCut], monkeypatch: pytest.MonkeyPatch) -> None:
    """`write_aside` leaves content to its body, and the name is its own."""
    cut = recorded(record, tmp_path, monkeypatch)
    with write_aside(tmp_path / "out") as aside:
        aside.write_text("all of it")
        sync_path(aside)
    assert cut.find_lost(tmp_path / "out") == []
