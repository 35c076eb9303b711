"""Snapshots on a real disk: whole or not there, verified, ours, one slave a directory; and their export."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

import numpy as np
import pytest
import structlog
import xxhash
from safetensors.numpy import load_file
from structlog.testing import capture_logs

from dips.errors import ConfigError, CorruptSnapshot, FailedDisk, LocalProtocolError, Stale
from dips.ids import GENESIS, VersionId
from dips.outer.kernel_pool import WorkMeter
from dips.protocol.manifest import Manifest
from dips.slave import export
from dips.slave import snapshots as snapshots_module
from dips.slave.export import export_snapshot
from dips.slave.ports import READ_AT_START
from dips.slave.snapshots import MOST_READS, Snapshots
from dips.store import files, tensorfile
from dips.store.files import ASIDE, read_layer, write_version
from dips.store.version import MANIFEST_FILE, MOMENTUM, THETA, LayerRecord, VersionManifest, digest_of
from tests.damage import flip_bit, load_parameters
from tests.disk_calls import DiskCalls
from tests.open_files import list_open_files, nothing_left_open

MANIFEST = Manifest.from_shapes(
    [("a.0.10.w", (2, 3)), ("a.0.2.b", (2,)), ("b.w", (4, 1)), ("empty.w", (0,)), ("scale", ())]
)
V1, V2 = VersionId(1, 1), VersionId(2, 5)
NBYTES = 2 * sum(layer.nbytes for layer in MANIFEST.layers)  # of θ and m
Arrays = dict[int, np.ndarray]


def arrays(layers: tuple[int, ...], seed: int) -> Arrays:
    rng = np.random.default_rng(seed)
    return {i: rng.standard_normal(MANIFEST.layers[i].numel).astype(np.float32) for i in layers}


def tensors(flat: Arrays) -> dict[str, np.ndarray]:
    """Parameters by name, from the layers' flat arrays."""
    found = {}
    for i, array in flat.items():
        layer = MANIFEST.layers[i]
        for parameter, at in zip(layer.parameters, layer.param_offsets(), strict=True):
            found[parameter.name] = array[at : at + parameter.numel].reshape(parameter.shape)
    return found


def write_initial(root: Path, theta: Arrays) -> None:
    """The first model, as `dips init` writes it."""
    (root / str(GENESIS)).mkdir(parents=True)
    write_version(root / str(GENESIS), ("r", "", 0), GENESIS, MANIFEST, theta, theta.values(), momentum=False)


def opened(path: Path, name: str = "s", layers: tuple[int, ...] = (0, 1, 2, 3), run: str = "r") -> Snapshots:
    """A slave's snapshots, bound to layers whose genesis is `arrays(layers, 0)`, in `path`/initial."""
    initial, every = path.parent / "initial", arrays((0, 1, 2, 3), 0)
    if not initial.exists():
        write_initial(initial, every)
    snapshots = Snapshots(path, run, name, initial, structlog.get_logger())
    genesis = [xxhash.xxh3_128_hexdigest(every[i].tobytes()) for i in layers]
    snapshots.bind_layers(MANIFEST, layers, genesis, sinc=4)
    return snapshots


def read(snapshots: Snapshots, version: VersionId, layers: tuple[int, ...] = (0, 1, 2, 3)) -> tuple[Arrays, Arrays]:
    theta, momentum = arrays(layers, 98), arrays(layers, 99)
    snapshots.read_snapshot(version, theta, momentum)
    return theta, momentum


def same(mine: Arrays, other: Arrays) -> bool:
    return {i: a.tobytes() for i, a in mine.items()} == {i: a.tobytes() for i, a in other.items()}


def reopened(snapshots: Snapshots, path: Path) -> Snapshots:
    snapshots.close()
    return opened(path)


def test_what_is_written_is_read_by_the_next_process(tmp_path: Path) -> None:
    """θ and m come back bit for bit after a restart, under names that safetensors itself reads."""
    path = tmp_path / "s"
    snapshots, theta, momentum = opened(path), arrays((0, 1, 2, 3), 1), arrays((0, 1, 2, 3), 2)
    digest = snapshots.write_snapshot(V1, theta, momentum)
    assert digest == xxhash.xxh3_128_hexdigest((path / "v1@r1" / "manifest.json").read_bytes())
    assert snapshots.complete_versions() == (V1,)
    again = reopened(snapshots, path)
    assert again.complete_versions() == (V1,)
    theta_read, momentum_read = read(again, V1)
    assert same(theta_read, theta)
    assert same(momentum_read, momentum)
    stored = load_parameters(path / "v1@r1")
    np.testing.assert_array_equal(stored["theta.a.0.2.b"], tensors(theta)["a.0.2.b"])
    np.testing.assert_array_equal(stored["momentum.b.w"], tensors(momentum)["b.w"])
    assert stored["theta.scale"].shape == ()
    again.close()


def test_version_zero_is_the_initial_model(tmp_path: Path) -> None:
    """v0@r0 needs no snapshot: θ is the model of `dips init`, whatever its order in the file, and m is 0."""
    snapshots = opened(tmp_path / "s", layers=(0, 2, 3))
    theta, momentum = read(snapshots, GENESIS, (0, 2, 3))
    expected = arrays((0, 1, 2, 3), 0)
    assert same(theta, {i: expected[i] for i in (0, 2, 3)})
    assert all(not m.any() for m in momentum.values())
    assert snapshots.complete_versions() == ()
    snapshots.close()


def test_another_initial_model_is_refused(tmp_path: Path) -> None:
    """A model whose bytes differ from those of `dips init` never becomes θ (guards invariant 7)."""
    snapshots = opened(tmp_path / "s")
    other = arrays((0, 1, 2, 3), 0)
    other[1] = other[1] + np.float32(1e-7)
    shutil.rmtree(tmp_path / "initial")
    write_initial(tmp_path / "initial", other)
    with pytest.raises(FileNotFoundError, match=r"initial/v0@r0: layer b is not this run's first model"):
        read(snapshots, GENESIS)
    shutil.rmtree(tmp_path / "initial")
    write_initial(tmp_path / "initial", arrays((0, 1, 2, 3), 0))
    flip_bit(tmp_path / "initial" / str(GENESIS), THETA)
    with pytest.raises(CorruptSnapshot, match=r"00000\.safetensors: theta\.a\.0: expected xxh3-128"):
        read(snapshots, GENESIS)
    snapshots.close()


def _truncate(path: Path) -> None:
    os.truncate(path / "00000.safetensors", 300)


def _flip(path: Path, part: str) -> None:
    flip_bit(path, part)


def _change(path: Path, **fields: object) -> None:
    raw = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**raw, **fields}))


DAMAGE = {
    "truncated": (_truncate, "bytes, got 300"),
    "one bit of θ flipped": (lambda p: _flip(p, THETA), "theta.a.0: expected xxh3-128"),
    "one bit of m flipped": (lambda p: _flip(p, MOMENTUM), "momentum.a.0: expected xxh3-128"),
    "no manifest": (lambda p: (p / "manifest.json").unlink(), "no whole version"),
    "no model": (lambda p: (p / "00000.safetensors").unlink(), "no whole version"),
    "torn manifest": (lambda p: (p / "manifest.json").write_text('{"format": 1,'), "no version's manifest"),
    "of another format": (
        lambda p: _change(p, format=2),
        "a file for each layer, got format 2",
    ),
    "of another run": (lambda p: _change(p, run="other"), "in run other"),
    "of another slave": (lambda p: _change(p, slave="t"), "of slave t"),
    "of another version": (lambda p: _change(p, version="v9@r9"), "got v9@r9"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_or_foreign_snapshot_is_passed_over_loudly(tmp_path: Path, name: str) -> None:
    """It is not offered, not read, not deleted, and logged once; the one before it still is (row 7 of §9)."""
    damage, reason = DAMAGE[name]
    path = tmp_path / "s"
    snapshots = opened(path)
    for version in (V1, V2):
        snapshots.write_snapshot(version, arrays((0, 1, 2, 3), 1), arrays((0, 1, 2, 3), 2))
    damage(path / str(V2))
    snapshots.close()
    with capture_logs() as logs:
        again = opened(path)
        assert again.complete_versions() == (V1,)
        assert again.complete_versions() == (V1,)
    logged = [line for line in logs if line["event"] == "snapshot_passed_over"]
    assert [(line["version"], line["log_level"]) for line in logged] == [("v2@r5", "error")]
    assert reason in logged[0]["reason"]
    with pytest.raises(CorruptSnapshot):
        read(again, V2)
    assert (path / str(V2)).exists()
    again.close()


def test_archives_are_read_when_they_are_wanted(tmp_path: Path) -> None:
    """However many versions are kept, a start reads the newest two; an older one is named as not read, not mapped,
    and offered once it was asked for and every digest agrees.
    """
    path, versions = tmp_path / "s", [VersionId(n, n) for n in range(1, 9)]
    snapshots = opened(path)
    for version in versions:
        snapshots.write_snapshot(version, arrays((0, 1, 2, 3), version.round), arrays((0, 1, 2, 3), 2))
    assert (snapshots.complete_versions(), snapshots.unread_versions()) == (tuple(versions), ())
    again = reopened(snapshots, path)
    assert again.complete_versions() == (*versions[-2:],)
    assert again.unread_versions() == (*versions[:-2],)
    assert again._meter.nbytes == 2 * 2 * sum(MANIFEST.layers[i].nbytes for i in range(4))
    assert again.map_theta(versions[2]) is None
    for rotten in versions[:2]:
        flip_bit(path / str(rotten), THETA)
    with capture_logs() as logs:
        assert again.complete_versions((versions[1], versions[2])) == (versions[2], *versions[-2:])
        assert again.complete_versions((versions[1],)) == (versions[2], *versions[-2:])
    assert [line["event"] for line in logs] == ["snapshot_passed_over"]
    assert again.unread_versions() == (versions[0], *versions[3:-2])
    assert again.map_theta(versions[2]) is not None
    read(again, versions[3])
    assert versions[3] in again.complete_versions(), "a load has verified it"
    with pytest.raises(CorruptSnapshot):
        read(again, versions[0])
    assert again.unread_versions() == (*versions[4:-2],)
    again.close()


def test_a_layer_s_file_is_opened_once_to_verify_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """θ and m are read one behind the other."""
    snapshots, headers = opened(tmp_path / "s"), list[str]()
    snapshots.write_snapshot(V1, arrays((0, 1, 2, 3), 1), arrays((0, 1, 2, 3), 2))
    check_header = files.check_header

    def count(source: IO[bytes], manifest: VersionManifest, record: LayerRecord, where: str) -> int:
        headers.append(record.file)
        return check_header(source, manifest, record, where)

    monkeypatch.setattr(files, "check_header", count)
    again = reopened(snapshots, tmp_path / "s")
    assert again.complete_versions() == (V1,)
    assert headers == [f"{i:05d}.safetensors" for i in range(4)]
    again.close()


def test_a_version_is_verified_a_piece_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An archive is read while all banks are in use: θ of the largest layer beside them is not in the sum that a slave
    prints, and by which its container is sized (docs/architecture.md#invariant-11).
    """
    monkeypatch.setattr(files, "PIECE_BYTES", 1 << 16)
    large = Manifest.from_shapes([("w", (1 << 20,))])
    theta = np.zeros(1 << 20, np.float32)
    write_version(tmp_path, ("r", "s", 1), V1, large, (0,), (theta, theta))
    manifest, read = files.read_manifest(tmp_path), list[int]()
    tracemalloc.start()
    files.read_through(tmp_path, manifest, read.append)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(read) == 2 * theta.nbytes and peak < theta.nbytes / 4


def test_the_newest_that_are_whole_are_read(tmp_path: Path) -> None:
    """Newest by round, since a rollback gives lower numbers again; a damaged one is passed over for the next."""
    path, versions = tmp_path / "s", [VersionId(5, 5), VersionId(6, 6), VersionId(4, 7), VersionId(5, 8)]
    snapshots = opened(path)
    for version in versions:
        snapshots.write_snapshot(version, arrays((0, 1, 2, 3), 1), arrays((0, 1, 2, 3), 2))
    flip_bit(path / str(versions[2]), MOMENTUM)
    again = reopened(snapshots, path)
    assert again.complete_versions() == (versions[3], versions[1])[:: 1 if versions[3] < versions[1] else -1]
    assert again.unread_versions() == (versions[0],)
    again.close()


def test_a_version_of_another_slave_is_not_deleted(tmp_path: Path) -> None:
    """The master knows an old one by its name alone, and takes it for garbage: a person decides."""
    path, versions = tmp_path / "s", [VersionId(n, n) for n in range(1, 5)]
    snapshots = opened(path)
    for version in versions:
        snapshots.write_snapshot(version, arrays((0, 1, 2, 3), 1), arrays((0, 1, 2, 3), 2))
    _change(path / str(versions[0]), slave="t")
    again = reopened(snapshots, path)
    assert again.complete_versions() == (*versions[2:],)
    again.delete_snapshots((versions[0], versions[1]))
    assert sorted(p.name for p in path.glob("v*")) == ["v1@r1", "v3@r3", "v4@r4"]
    again.close()


@pytest.mark.parametrize("part", [THETA, MOMENTUM])
def test_damage_after_the_start_is_found_when_read(tmp_path: Path, part: str) -> None:
    """Every read verifies: what rotted since it was written raises, and is offered no more."""
    path = tmp_path / "s"
    snapshots = opened(path)
    snapshots.write_snapshot(V1, arrays((0, 1, 2, 3), 1), arrays((0, 1, 2, 3), 2))
    _flip(path / str(V1), part)
    with pytest.raises(CorruptSnapshot, match="expected xxh3-128"):
        read(snapshots, V1)
    assert snapshots.complete_versions() == ()
    snapshots.close()


def test_a_snapshot_of_other_layers_is_refused(tmp_path: Path) -> None:
    """A slave that holds other layers now does not take an old snapshot for its own."""
    path = tmp_path / "s"
    snapshots = opened(path, layers=(0, 1))
    snapshots.write_snapshot(V1, arrays((0, 1), 1), arrays((0, 1), 2))
    snapshots.close()
    again = opened(path, layers=(0, 2))
    with pytest.raises(CorruptSnapshot, match=r"expected the layers \[0, 2\]"):
        read(again, V1, (0, 2))
    again.close()


def test_an_unfinished_write_is_never_a_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed before the rename: the next start removes the half, says so, and offers what was whole before."""
    path = tmp_path / "s"
    snapshots = opened(path)
    snapshots.write_snapshot(V1, arrays((0, 1, 2, 3), 1), arrays((0, 1, 2, 3), 2))
    shutil.copytree(path / str(V1), path / ".unfinished-v2@r5")
    snapshots.close()
    with capture_logs() as logs:
        again = opened(path)
    assert [line["event"] for line in logs] == ["snapshot_unfinished"]
    assert again.complete_versions() == (V1,)
    assert not (path / ".unfinished-v2@r5").exists()
    again.close()


def test_a_full_disk_leaves_no_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the disk is full the write raises, removes what it had begun, and what was complete stays complete."""
    path = tmp_path / "s"
    snapshots = opened(path)
    snapshots.write_snapshot(V1, arrays((0, 1, 2, 3), 1), arrays((0, 1, 2, 3), 2))

    def full(fd: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensorfile, "_reserve_space", full)
    with pytest.raises(OSError, match="No space left"):
        snapshots.write_snapshot(V2, arrays((0, 1, 2, 3), 3), arrays((0, 1, 2, 3), 4))
    with pytest.raises(OSError, match="No space left"):
        snapshots.reserve_room(V2, 2 * sum(layer.nbytes for layer in MANIFEST.layers))
    assert snapshots.complete_versions() == (V1,)
    assert sorted(p.name for p in path.iterdir()) == [".lock", "v1@r1"]
    (path / "v1@r1" / "manifest.json").write_text("{")
    with pytest.raises(OSError, match="No space left"):
        snapshots.write_snapshot(V1, arrays((0, 1, 2, 3), 1), arrays((0, 1, 2, 3), 2))
    assert snapshots.complete_versions() == (), "it was to be replaced because it is damaged, and could not be"
    snapshots.close()


def test_a_snapshot_that_is_wanted_no_more_is_given_up_at_its_next_piece(tmp_path: Path) -> None:
    """Its round was aborted: gigabytes are not written to their end, each piece of which counts as work done."""
    snapshots, written = opened(tmp_path / "s"), list[int]()

    def is_wanted() -> bool:
        written.append(snapshots._meter.nbytes)
        return len(written) < 2

    with pytest.raises(Stale, match="v1@r1 is wanted no more"):
        snapshots.write_snapshot(V1, arrays((0, 1, 2, 3), 1), arrays((0, 1, 2, 3), 2), is_wanted)
    assert written == [MANIFEST.layers[0].nbytes, 2 * MANIFEST.layers[0].nbytes]
    assert [path.name for path in (tmp_path / "s").iterdir()] == [".lock"]
    snapshots.close()


def test_a_file_that_goes_while_sizes_are_read_leaves_no_directory_open(tmp_path: Path) -> None:
    """A link that leads nowhere has no size either; the error that is raised must not hold the listing."""
    (tmp_path / files.MANIFEST_FILE).write_text("{}")
    (tmp_path / "gone").symlink_to("nowhere")
    with nothing_left_open(), pytest.raises(CorruptSnapshot, match="is no whole version"):
        files.read_manifest(tmp_path)


def test_a_snapshot_of_one_file_is_refused_in_a_sentence(tmp_path: Path) -> None:
    """As Di-PS wrote it once: it says what to do."""
    path = tmp_path / "s"
    snapshots = opened(path)
    snapshots.write_snapshot(V1, arrays((0, 1, 2, 3), 1), arrays((0, 1, 2, 3), 2))
    _change(path / str(V1), files={"model.safetensors": 568})
    with pytest.raises(CorruptSnapshot, match=r"with one model.safetensors; go on with the Di-PS that wrote it, or"):
        read(snapshots, V1)
    snapshots.close()


def test_a_repeated_write_replaces(tmp_path: Path) -> None:
    """A snapshot written again under its name holds the last bytes."""
    snapshots = opened(tmp_path / "s")
    for seed in (1, 5):
        snapshots.write_snapshot(V1, arrays((0, 1, 2, 3), seed), arrays((0, 1, 2, 3), seed + 1))
    theta, _ = read(snapshots, V1)
    assert same(theta, arrays((0, 1, 2, 3), 5))
    snapshots.close()


def test_delete_removes_what_is_named_only(tmp_path: Path) -> None:
    """Retired versions go, a missing one is fine, the others stay."""
    path = tmp_path / "s"
    snapshots = opened(path)
    for version in (V1, V2):
        snapshots.write_snapshot(version, arrays((0, 1, 2, 3), 1), arrays((0, 1, 2, 3), 2))
    snapshots.delete_snapshots((V1, VersionId(7, 7)))
    assert snapshots.complete_versions() == (V2,)
    assert sorted(p.name for p in path.iterdir()) == [".lock", "v2@r5"]
    snapshots.close()


@contextmanager
def as_nobody(*owned: Path) -> Iterator[None]:
    """Be a user who owns these, and may not remove what root has protected; tests may run as root, who may."""
    user = os.geteuid()
    if user == 0:
        for path in owned:
            os.chown(path, 65534, -1)
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


@contextmanager
def directory_of_a_user() -> Iterator[Path]:
    """The directory of a slave with V1 and V2, as a user whom modes bind."""
    with TemporaryDirectory() as made:  # pytest's own are closed to others
        path = Path(made) / "s"
        path.parent.chmod(0o777)
        snapshots, theta = opened(path), arrays((0, 1, 2, 3), 1)
        for version in (V1, V2):
            snapshots.write_snapshot(version, theta, theta)
        snapshots.close()
        with as_nobody(path, *path.rglob("*")):
            yield path


def test_a_snapshot_that_cannot_be_removed_holds_nothing_up() -> None:
    """Root has brought it back from a backup: the others go, the slave starts again, and when it may be removed it
    goes, too.
    """
    with directory_of_a_user() as path:
        (path / str(V1)).chmod(0o555)
        snapshots, theta = opened(path), arrays((0, 1, 2, 3), 1)
        with pytest.raises(OSError, match="Permission denied"):
            snapshots.delete_snapshots((V1, V2))
        left = path / f"{ASIDE}old-{V1}"
        assert sorted(path.iterdir()) == [path / ".lock", left]
        snapshots.write_snapshot(V1, theta, theta)
        with capture_logs() as logs:
            snapshots = reopened(snapshots, path)
        assert [(line["path"], line["remedy"]) for line in logs] == [(str(left), "remove it")]
        left.chmod(0o755)
        snapshots.delete_snapshots((V1,))
        assert [p.name for p in path.iterdir()] == [".lock"]
        snapshots.close()


def test_what_a_disk_has_removed_by_half_goes_with_the_next() -> None:
    """It has lost its name, and nobody would ask for it again until its slave's next start: 50 GB for each."""
    with directory_of_a_user() as path:
        (path / str(V1)).chmod(0o555)
        snapshots = opened(path)
        with pytest.raises(OSError, match="Permission denied"):
            snapshots.delete_snapshots((V1,))
        (path / f"{ASIDE}old-{V1}").chmod(0o755)
        snapshots.delete_snapshots((V2,))
        assert [p.name for p in path.iterdir()] == [".lock"]
        snapshots.close()


def test_what_a_disk_has_removed_by_half_does_not_keep_a_version_from_being_replaced() -> None:
    """It lies where the version goes that is replaced: no other one could be written until its slave's next start."""
    with directory_of_a_user() as path:
        (path / str(V1)).chmod(0o555)
        snapshots, first, second = opened(path), arrays((0, 1, 2, 3), 1), arrays((0, 1, 2, 3), 2)
        with pytest.raises(OSError, match="Permission denied"):
            snapshots.delete_snapshots((V1,))
        (path / f"{ASIDE}old-{V1}").chmod(0o755)
        for theta in (first, second):
            snapshots.write_snapshot(V1, theta, theta)
        assert same(read(snapshots, V1)[0], second)
        assert sorted(p.name for p in path.iterdir()) == [".lock", str(V1), str(V2)]
        snapshots.close()


def test_what_a_disk_refuses_for_a_moment_is_not_taken_for_damaged() -> None:
    """The run would be rolled back to the version before: a slave says what it holds once the disk has answered, or
    has refused again and again; the same for a load, after which it says that it holds the version still.
    """
    with directory_of_a_user() as path:
        layer = next((path / str(V2)).glob("*.safetensors"))
        snapshots = opened(path)
        layer.chmod(0)
        with pytest.raises(OSError, match=f"Permission denied: .*{V2}'"):
            snapshots.complete_versions()
        layer.chmod(0o600)
        assert snapshots.complete_versions() == (V1, V2)
        for _ in range(MOST_READS):
            layer.chmod(0)
            with pytest.raises(OSError, match="Permission denied"):
                read(snapshots, V2)
            layer.chmod(0o600)
            assert (snapshots.complete_versions(), snapshots.unread_versions()) == ((V1, V2), ())
        snapshots = reopened(snapshots, path)
        layer.chmod(0)
        for _ in range(MOST_READS - 1):
            with pytest.raises(OSError, match="Permission denied"):
                snapshots.complete_versions()
        assert (snapshots.complete_versions(), snapshots.unread_versions()) == ((V1,), ())
        layer.chmod(0o600)
        assert snapshots.complete_versions() == (V1, V2), "somebody has repaired it"
        snapshots.close()


def test_what_a_disk_refused_to_read_is_written_anew() -> None:
    """Its size and manifest are as they were: that it is durable was told of a snapshot that nobody could read."""
    with directory_of_a_user() as path:
        layer = next((path / str(V2)).glob("*.safetensors"))
        snapshots, theta = opened(path), arrays((0, 1, 2, 3), 1)
        assert V2 in snapshots.complete_versions()
        layer.chmod(0)
        with pytest.raises(OSError, match="Permission denied"):
            read(snapshots, V2)
        snapshots.write_snapshot(V2, theta, theta)
        assert same(read(snapshots, V2)[0], theta)
        snapshots.close()


def test_a_first_model_that_a_disk_refuses_for_a_moment_is_looked_at_again() -> None:
    """Its slave would say until its end that it has none, and that somebody must run `dips seed`."""
    with TemporaryDirectory() as made:  # pytest's own are closed to others
        path = Path(made) / "s"
        path.parent.chmod(0o777)
        opened(path).close()
        initial = path.parent / "initial"
        manifest = initial / str(GENESIS) / MANIFEST_FILE
        manifest.chmod(0)
        with as_nobody(path, *path.rglob("*"), initial, *initial.rglob("*")):
            snapshots = opened(path)
            assert not snapshots.holds_initial()
            manifest.chmod(0o600)
            assert snapshots.holds_initial()
            read(snapshots, GENESIS)
            snapshots.close()


def test_a_first_model_that_cannot_be_looked_for_holds_up_no_registration() -> None:
    """As in a directory of another user, or on a network's disk that answers with an error: its slave would ask the
    master for ever, and never say that it has the head, or that it waits for `dips seed`.
    """
    with TemporaryDirectory() as made:  # pytest's own are closed to others
        path = Path(made) / "s"
        path.parent.chmod(0o777)
        opened(path).close()
        initial = path.parent / "initial"
        initial.chmod(0)
        with as_nobody(path, *path.rglob("*"), initial, *initial.rglob("*")), capture_logs() as logs:
            snapshots = Snapshots(path, "r", "s", initial, structlog.get_logger())
            assert not snapshots.holds_initial()
            assert "Permission denied" in logs[-1]["found"]
            initial.chmod(0o700)
            assert snapshots.holds_initial()
            snapshots.close()


def test_each_deletion_is_told_as_work(tmp_path: Path) -> None:
    """A mirror that has caught up lets ten of 50 GB go at once: a slave that deletes is told from one that hangs."""
    snapshots, seen = opened(tmp_path / "s"), list[int]()
    for version in (V1, V2):
        snapshots.write_snapshot(version, arrays((0, 1, 2, 3), 1), arrays((0, 1, 2, 3), 2))
    rmtree = shutil.rmtree

    def remove(path: Path) -> None:
        seen.append(snapshots._meter.nbytes)
        rmtree(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "rmtree", remove)
        snapshots.delete_snapshots((V1, V2))
    seen.append(snapshots._meter.nbytes)
    assert len(seen) == 3 and seen[0] < seen[1] < seen[2]
    snapshots.close()


def test_reading_says_how_far_it_is(tmp_path: Path) -> None:
    """When a slave starts, it verifies each snapshot and then reads one: both tell bytes done and in all."""
    written = opened(tmp_path / "s")
    theta, momentum = arrays((0, 1, 2, 3), 1), arrays((0, 1, 2, 3), 2)
    written.write_snapshot(V1, theta, momentum)
    written.close()
    snapshots, seen = opened(tmp_path / "s"), list[tuple[str, int, int, float] | None]()
    meter = snapshots._meter
    add = meter.add

    def look(nbytes: int) -> None:
        add(nbytes)
        seen.append(meter.read_progress())

    meter.add = look  # type: ignore[method-assign]
    assert snapshots.complete_versions() == (V1,)
    verified, before = seen[-1], len(seen)
    snapshots.read_snapshot(V1, theta, momentum)
    begun, read = seen[before], seen[-1]
    nbytes = sum(array.nbytes for array in (*theta.values(), *momentum.values()))
    assert verified is not None and read is not None and begun is not None
    assert verified[:3] == (f"verifies {V1}", nbytes, nbytes)
    assert read[:3] == (f"reads {V1}", nbytes, nbytes) and begun[1] < nbytes
    assert meter.read_progress() is None
    snapshots.close()


def test_a_mapped_snapshot_outlives_its_deletion(tmp_path: Path) -> None:
    """A slow reader keeps the bytes of a version that is retired, replaced or deleted under it
    (docs/rationale.md#19)."""
    snapshots = opened(tmp_path / "s")
    theta, momentum = arrays((0, 1, 2, 3), 1), arrays((0, 1, 2, 3), 2)
    snapshots.write_snapshot(V1, theta, momentum)
    mapped = snapshots.map_theta(V1)
    assert mapped is not None
    assert not any(a.flags.writeable for a in mapped.values() if a.size)
    snapshots.write_snapshot(V1, momentum, theta)
    replaced = snapshots.map_theta(V1)
    shutil.copytree(tmp_path / "s" / "v1@r1", tmp_path / "s" / ".rebalanced-v1@r1")  # by a rebalance that failed
    snapshots.delete_snapshots((V1,))
    assert list(tmp_path.glob("s/*v1*")) == []
    assert same(mapped, theta)
    assert replaced is not None
    assert same(replaced, momentum)
    assert snapshots.map_theta(V1) is None
    snapshots.close()


def test_readers_of_a_version_share_its_maps(tmp_path: Path) -> None:
    """Each had maps of its own, one a layer: with some hundred readers a slave had none left of the 65,530 of a
    process, which its memory and threads need, too.
    """
    snapshots = opened(tmp_path / "s")
    snapshots.write_snapshot(V1, arrays((0, 1, 2, 3), 1), arrays((0, 1, 2, 3), 2))
    count = lambda: Path("/proc/self/maps").read_text().count(str(tmp_path))  # noqa: E731
    readers = [snapshots.map_theta(V1)]
    mapped = count()
    readers += [snapshots.map_theta(V1) for _ in range(9)]
    assert count() == mapped >= 4
    assert all(reader is not None and same(reader, arrays((0, 1, 2, 3), 1)) for reader in readers)
    readers.clear()
    assert count() == 0
    snapshots.close()


def test_what_is_not_known_to_be_whole_is_not_mapped(tmp_path: Path) -> None:
    """A snapshot is mapped after it was written or verified by this process, and passed over if its file is damaged."""
    path = tmp_path / "s"
    snapshots = opened(path)
    snapshots.write_snapshot(V1, arrays((0, 1, 2, 3), 1), arrays((0, 1, 2, 3), 2))
    again = reopened(snapshots, path)
    assert again.map_theta(V1) is None
    assert again.complete_versions() == (V1,)
    assert again.map_theta(V1) is not None
    os.truncate(path / "v1@r1" / "00000.safetensors", 100)
    with capture_logs() as logs:
        assert again.map_theta(V1) is None
    assert [line["event"] for line in logs] == ["snapshot_not_mapped"]
    again.close()


def test_momentum_is_mapped_with_the_digests_of_both(tmp_path: Path) -> None:
    """Of what this process has written or verified; a damaged file is passed over."""
    path, theta, momentum = tmp_path / "s", arrays((0, 1, 2, 3), 1), arrays((0, 1, 2, 3), 2)
    snapshots = opened(path)
    snapshots.write_snapshot(V1, theta, momentum)
    mapped = snapshots.map_momentum(V1)
    assert mapped is not None and same(mapped[0], momentum)
    assert mapped[1] == tuple(digest_of(part[i]) for i in range(4) for part in (theta, momentum))
    again = reopened(snapshots, path)
    assert again.map_momentum(V1) is None
    assert again.complete_versions() == (V1,) and again.map_momentum(V1) is not None
    os.truncate(path / "v1@r1" / "00000.safetensors", 100)
    with capture_logs() as logs:
        assert again.map_momentum(V1) is None
    assert [line["event"] for line in logs] == ["snapshot_not_mapped"]
    again.close()


def test_version_zero_is_mapped(tmp_path: Path) -> None:
    """v0@r0 comes from the initial model: of all its layers those that this slave holds."""
    snapshots = opened(tmp_path / "s", layers=(0, 1))
    mapped = snapshots.map_theta(GENESIS)
    assert mapped is not None
    assert same(mapped, {i: arrays((0, 1, 2, 3), 0)[i] for i in (0, 1)})
    snapshots.close()


@pytest.mark.parametrize("by_others", [False, True])
def test_a_directory_that_is_removed_is_made_anew_and_locked(tmp_path: Path, by_others: bool) -> None:
    """The next write is there and is served; what turns up under an old name is read before it is believed, nobody
    else may have the directory, and no file of the former one stays open. Also if somebody, as the mirror, has made it.
    """
    path = tmp_path / "s"
    snapshots = opened(path)
    snapshots.write_snapshot(V1, arrays((0, 1, 2, 3), 1), arrays((0, 1, 2, 3), 2))
    path.rename(tmp_path / "gone")
    if by_others:
        path.mkdir()
    snapshots.write_snapshot(V2, arrays((0, 1, 2, 3), 3), arrays((0, 1, 2, 3), 4))
    assert not [name for _, name in list_open_files() if "/gone" in name]
    shutil.copytree(tmp_path / "gone" / str(V1), path / str(V1))
    flip_bit(path / str(V1), THETA)
    assert snapshots.complete_versions() == (V2,)
    with pytest.raises(ConfigError, match="is held by another running slave"):
        opened(path)
    snapshots.close()


def test_a_slave_whose_directory_was_removed_can_say_what_it_holds(tmp_path: Path) -> None:
    """A new master asks before anything is written again: there is no snapshot, and the directory is there and held."""
    path = tmp_path / "s"
    snapshots = opened(path)
    snapshots.write_snapshot(V1, arrays((0, 1, 2, 3), 1), arrays((0, 1, 2, 3), 2))
    shutil.rmtree(path)
    assert snapshots.unread_versions() == (), "as a pull of an older version asks"
    shutil.rmtree(path)
    assert (snapshots.complete_versions(), snapshots.unread_versions()) == ((), ())
    with pytest.raises(ConfigError, match="is held by another running slave"):
        opened(path)
    snapshots.close()


def test_room_is_reserved_for_all_that_is_written(tmp_path: Path) -> None:
    """Each layer's file has its size from then on, with space on the disk, and the manifest no less than it takes."""
    path = tmp_path / "s"
    snapshots = opened(path)
    snapshots.reserve_room(V1, NBYTES)
    reserved = {file.name: file.stat() for file in (path / f"{files.ASIDE}{V1}").iterdir()}
    snapshots.write_snapshot(V1, arrays((0, 1, 2, 3), 1), arrays((0, 1, 2, 3), 2))
    written = {file.name: file.stat().st_size for file in (path / str(V1)).iterdir()}
    listing = written.pop("manifest.json")
    assert reserved.pop("manifest.json").st_size >= listing
    assert {name: stat.st_size for name, stat in reserved.items()} == written
    assert all(stat.st_blocks * 512 >= stat.st_size for stat in reserved.values())
    snapshots.close()


def test_room_that_is_released_leaves_nothing(tmp_path: Path) -> None:
    """Of a round that was aborted: the disk has it again at once, not at the next start."""
    snapshots = opened(tmp_path / "s")
    snapshots.reserve_room(V1, NBYTES)
    assert len(list((tmp_path / "s").iterdir())) == 2, "the lock and the room"
    snapshots.release_room(V1)
    assert [path.name for path in (tmp_path / "s").iterdir()] == [".lock"]
    snapshots.close()


def test_a_second_slave_on_the_directory_is_refused(tmp_path: Path) -> None:
    """The directory is held as long as its slave runs: a second process gets an error that names it."""
    snapshots = opened(tmp_path / "s")
    with pytest.raises(ConfigError, match=f"{tmp_path / 's'} is held by another running slave"):
        opened(tmp_path / "s")
    snapshots.close()
    opened(tmp_path / "s").close()


@pytest.mark.parametrize(("number", "kind"), [(errno.EROFS, FailedDisk), (errno.EACCES, ConfigError)])
def test_a_disk_that_fails_at_a_start_is_no_wrong_configuration(
    number: int, kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 78 systemd would not start the slave again when its disk has room, or may be written again."""
    snapshots, why = opened(tmp_path / "s"), re.escape(os.strerror(number))

    def fails(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(snapshots_module, "PidLock", fails)
    with pytest.raises(kind, match=f"directory: {tmp_path}/s: cannot be written: {why}"):
        opened(tmp_path / "s")
    (tmp_path / "s").rename(tmp_path / "gone")
    with pytest.raises(OSError, match=why):
        snapshots.complete_versions()


def test_writing_before_the_layers_are_known_is_a_bug(tmp_path: Path) -> None:
    """Without Registered nobody knows what the bytes are."""
    snapshots = Snapshots(tmp_path / "s", "r", "s", tmp_path / "none", structlog.get_logger())
    with pytest.raises(LocalProtocolError):
        snapshots.write_snapshot(V1, arrays((0,), 1), arrays((0,), 1))
    with pytest.raises(LocalProtocolError):
        snapshots.read_snapshot(GENESIS, arrays((0,), 1), arrays((0,), 1))
    snapshots.close()


# ---- export --------------------------------------------------------------------------------------------


def two_slaves(tmp_path: Path) -> tuple[list[Path], dict[VersionId, Arrays]]:
    """Two slaves with v1@r1 and v2@r5; the second lacks v3@r6."""
    directories = [tmp_path / "s0", tmp_path / "s1"]
    thetas = {v: arrays((0, 1, 2, 3), v.version) for v in (V1, V2, VersionId(3, 6))}
    for directory, layers in zip(directories, ((0, 3), (1, 2)), strict=True):
        snapshots = opened(directory, directory.name, layers)
        for version, theta in thetas.items():
            if version.version < 3 or directory == directories[0]:
                snapshots.write_snapshot(version, {i: theta[i] for i in layers}, arrays(layers, 9))
        snapshots.close()
    return directories, thetas


@pytest.mark.parametrize(("asked", "given"), [(None, V2), (V1, V1)])
def test_export_assembles_a_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: VersionId | None, given: VersionId
) -> None:
    """The newest version complete on all slaves, or the named one, under the model's own names and shapes; durably.

    What only looks like a version has no name to export it by.
    """
    directories, thetas = two_slaves(tmp_path)
    for directory in directories:
        shutil.copytree(directory / str(V1), directory / f"{V1}.aside")
    output = tmp_path / "out" / "model.safetensors"
    output.parent.mkdir()
    disk = DiskCalls(output.parent, monkeypatch)
    assert export_snapshot(directories, asked, output) == given
    aside = ".unfinished-model.safetensors"
    assert disk.calls == [f"fsync {aside}", f"rename {aside} model.safetensors", "fsync ."]
    assert output.stat().st_mode & 0o777 == 0o600, "a model is its owner's"
    found, expected = load_file(output), tensors(thetas[given])
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(found[name], tensor)
        assert found[name].shape == tensor.shape
    assert [p.name for p in output.parent.iterdir()] == ["model.safetensors"]


def test_export_refuses_what_is_incomplete(tmp_path: Path) -> None:
    """A version that a slave lacks, a missing slave, a foreign one: each is named, and nothing is written."""
    directories, _ = two_slaves(tmp_path)
    output = tmp_path / "00000.safetensors"
    with pytest.raises(ConfigError, match=r"v3@r6 is gone, or never was.*v1@r1, v2@r5"):
        export_snapshot(directories, VersionId(3, 6), output)
    with pytest.raises(ConfigError, match="layers 1, 2 of 4 are in none"):
        export_snapshot(directories[:1], V2, output)
    shutil.copytree(directories[0], tmp_path / "copy")
    with pytest.raises(ConfigError, match=r"layer a\.0 is in"):
        export_snapshot([*directories, tmp_path / "copy"], V2, output)
    with pytest.raises(ConfigError, match="there is none"):
        export_snapshot([*directories, tmp_path / "nowhere"], None, output)
    with pytest.raises(ConfigError, match="got none"):
        export_snapshot([], None, output)
    _change(directories[1] / str(V2), run="other")
    with pytest.raises(ConfigError, match="different runs"):
        export_snapshot(directories, V2, output)
    assert not output.exists()


def test_export_verifies_digests(tmp_path: Path) -> None:
    """Bytes that do not have their digest are never exported, and no half file remains."""
    directories, _ = two_slaves(tmp_path)
    flip_bit(directories[0] / str(V2), THETA)
    with pytest.raises(CorruptSnapshot, match="expected xxh3-128"):
        export_snapshot(directories, V2, tmp_path / "00000.safetensors")
    assert sorted(p.name for p in tmp_path.glob("*.safetensors")) == []


def test_an_export_that_finds_no_room_is_the_disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And ends with 74, as over the network: with 78, as if the run file were wrong, nothing tries it again."""
    directories, _ = two_slaves(tmp_path)

    def fill(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tensorfile, "_reserve_space", fill)
    with pytest.raises(FailedDisk, match=r"model\.safetensors: cannot be written: No space left"):
        export_snapshot(directories, V2, tmp_path / "model.safetensors")


def test_a_version_that_is_deleted_while_it_is_exported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message is about the version, not about the output, and says how to have one that stays; no half file
    remains.
    """
    directories, _ = two_slaves(tmp_path)

    def read_slowly(*args: object) -> None:
        read_layer(*args)  # type: ignore[arg-type]
        shutil.rmtree(directories[1] / str(V2), ignore_errors=True)

    monkeypatch.setattr(export, "read_layer", read_slowly)
    with pytest.raises(ConfigError, match=f"s1/{V2}/00001.safetensors .*deleted meanwhile.*--master") as refused:
        export_snapshot(directories, V2, tmp_path / "model.safetensors")
    assert "cannot be written" not in str(refused.value)
    assert not list(tmp_path.glob("*model.safetensors"))


def test_a_disk_lags_behind_by_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large file is on the disk each SYNC_BYTES, not at its end alone: the last fsync is short."""
    sizes = list[int]()
    monkeypatch.setattr(tensorfile, "PIECE_BYTES", 400)
    monkeypatch.setattr(tensorfile, "SYNC_BYTES", 1000)
    monkeypatch.setattr(os, "fdatasync", lambda file: sizes.append(os.lseek(file, 0, os.SEEK_CUR) // 1000))
    tensorfile.write_tensors(tmp_path / "m", {}, [("w", (1000,))], [np.zeros(1000, np.float32)])
    assert sizes == [1, 2, 3, 4]


def test_tensors_are_read_in_any_order(tmp_path: Path) -> None:
    """A model file has the order of whoever saved it, and safetensors' own library sorts by size."""
    tensorfile.write_tensors(
        tmp_path / "m", {}, [("b", (2, 2)), ("a", (3,))], [np.arange(4, dtype=np.float32), np.ones(3, np.float32)]
    )
    a, b = np.zeros(3, np.float32), np.zeros(4, np.float32)
    with tensorfile.Reader(tmp_path / "m") as reader:
        reader.read_into("a", (3,), a)
        reader.read_into("b", (2, 2), b)
        with pytest.raises(CorruptSnapshot, match=r"tensor 'b': expected .*\[4\]"):
            reader.read_into("b", (4,), b)
    assert (a.tolist(), b.tolist()) == ([1, 1, 1], [0, 1, 2, 3])


def test_files_that_are_written_lag_behind_by_the_same_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many small layers are synced as soon as there are SYNC_BYTES of them, and what is left at the end."""
    monkeypatch.setattr(files, "SYNC_BYTES", 1000)
    for name in "abcd":
        (tmp_path / name).touch()
    queue, journal = files.SyncQueue(), DiskCalls(tmp_path, monkeypatch)
    synced = list[list[str]]()
    for name, nbytes in (("a", 400), ("b", 600), ("c", 999), ("d", 0)):
        queue.add_file(tmp_path / name, nbytes)
        synced.append(sorted(journal.calls))
    assert synced == [[], ["fsync a", "fsync b"], ["fsync a", "fsync b"], ["fsync a", "fsync b"]]
    for _ in range(2):
        queue.sync_files()
        assert sorted(journal.calls) == ["fsync a", "fsync b", "fsync c", "fsync d"]


# ---- recovered versions ----------------------------------------------------------------------------------------------


def test_a_recovered_version_has_the_momentum_of_the_newest_whole_one(tmp_path: Path) -> None:
    """A damaged one is passed over, and one of other layers; without any m is 0. What it returns is for the ledger."""
    layers, made, v3 = (0, 1), VersionId(4, 9), VersionId(3, 6)
    snapshots = opened(tmp_path / "s")
    snapshots.write_snapshot(v3, arrays((0, 1, 2, 3), 5), arrays((0, 1, 2, 3), 6))  # of a former placement
    snapshots.close()
    snapshots = opened(tmp_path / "s", layers=layers)
    for version, seed in ((V1, 1), (V2, 3)):
        snapshots.write_snapshot(version, arrays(layers, seed), arrays(layers, seed + 1))
    flip_bit(tmp_path / "s" / str(V2), "momentum.")
    snapshots.close()
    snapshots = opened(tmp_path / "s", layers=layers)
    theta = arrays(layers, 7)
    digests = tuple(xxhash.xxh3_128_hexdigest(theta[i].tobytes()) for i in layers)
    digest, momentum_of = snapshots.keep_model(made, theta, digests)
    assert momentum_of == V1 and made in snapshots.complete_versions()
    found = read(snapshots, made, layers)
    assert same(found[0], theta) and same(found[1], arrays(layers, 2))
    assert digest == files.read_manifest(tmp_path / "s" / str(made)).digest
    with pytest.raises(CorruptSnapshot, match=r"layer a\.0 of v5@r10: expected xxh3-128 0"):
        snapshots.keep_model(VersionId(5, 10), theta, ("0" * 32,) * 2)
    assert not list((tmp_path / "s").glob("*v5@r10"))
    snapshots.close()
    with_nothing = opened(tmp_path / "t", layers=layers)
    assert with_nothing.keep_model(made, theta, digests)[1] is None
    assert not any(flat.any() for flat in read(with_nothing, made, layers)[1].values())
    with_nothing.close()


def test_a_recovered_version_has_no_momentum_of_what_a_rollback_has_undone(tmp_path: Path) -> None:
    """Undone versions lie on the disk until a later one is durable: m of a model that had diverged went on with a θ of
    before. Where nothing else is left it is better than none.
    """
    layers, undone, theta = (0, 1), VersionId(3, 6), arrays((0, 1), 7)
    digests = tuple(digest_of(flat) for flat in theta.values())
    snapshots = opened(tmp_path / "s", layers=layers)
    for version in (V2, undone):
        snapshots.write_snapshot(version, arrays(layers, 1), arrays(layers, version.version))
    made = VersionId(3, 7)  # the successor of V2, the head since that rollback
    assert snapshots.keep_model(made, theta, digests)[1] == V2
    assert same(read(snapshots, made, layers)[1], arrays(layers, V2.version))
    snapshots.delete_snapshots((V2, made))
    assert snapshots.keep_model(made, theta, digests)[1] == undone
    snapshots.close()


@pytest.mark.parametrize("version", [GENESIS, V1])
def test_what_is_brought_is_read_back_before_it_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: VersionId
) -> None:
    """A disk that changes a bit of what was written to it leaves no version here: the model can be brought again."""
    real, theta = snapshots_module.read_manifest, arrays((0, 1, 2, 3), 0)
    snapshots = opened(tmp_path / "s")

    def keep() -> None:
        if version == GENESIS:
            snapshots.keep_initial(theta)
        else:
            snapshots.keep_model(version, theta, tuple(digest_of(flat) for flat in theta.values()))

    def damage(folder: Path) -> VersionManifest:
        flip_bit(folder, THETA)
        return real(folder)

    with monkeypatch.context() as patch:
        patch.setattr(snapshots_module, "read_manifest", damage)
        with pytest.raises(CorruptSnapshot, match=r"theta\.a\.0: expected xxh3-128"):
            keep()
    assert [path.name for path in (tmp_path / "s").iterdir()] == [".lock"]
    keep()
    assert same(read(snapshots, version)[0], theta)
    snapshots.close()


# ---- looked at by a person -------------------------------------------------------------------------------------------


def test_a_version_is_verified_as_a_slave_does(tmp_path: Path) -> None:
    """By whose it is, by the ledger's digest of its manifest and by all its bytes; one that went meanwhile is none."""
    root, pieces = tmp_path / "s", list[int]()
    snapshots = opened(root)
    digest = snapshots.write_snapshot(V1, arrays((0, 1, 2, 3), 1), arrays((0, 1, 2, 3), 2))
    snapshots.close()

    def problem(run: str = "r", slave: str = "s", digest: str | None = None) -> str:
        checked = files.check_version(root, run, slave, V1, digest, pieces.append)
        assert checked is not None
        return checked.problem

    assert files.check_version(root, "r", "s", V1, digest, pieces.append) == files.Checked(V1, NBYTES, "")
    assert sum(pieces) == NBYTES
    assert "of slave s" in problem(slave="t") and "run r" in problem(run="q")
    assert "the ledger says 0" in problem(digest="0")
    flip_bit(root / str(V1), MOMENTUM)
    assert "momentum.a.0: expected xxh3-128" in problem()
    files.delete_version(root / str(V1))
    assert files.check_version(root, "r", "s", V1, digest, pieces.append) is None


def test_a_version_that_goes_while_sizes_are_read_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slave deletes one in each round: `dips verify` beside it would end with a traceback."""
    root = tmp_path / "s"
    for version in (V1, V2):
        (root / str(version)).mkdir(parents=True)
        (root / str(version) / "0").write_bytes(b"123")
    find_versions = files.find_versions

    def find_and_delete(root: Path) -> dict[VersionId, Path]:
        found = find_versions(root)
        files.delete_version(found[V1])
        return found

    monkeypatch.setattr(files, "find_versions", find_and_delete)
    assert files.version_sizes(root) == {V1: 0, V2: 3}
    assert files.check_version(root, "r", "s", V1, None, lambda _: None) is None


def test_what_is_no_version_is_not_listed(tmp_path: Path) -> None:
    """Neither the first model, which is no snapshot, nor what a person has put aside beside one."""
    root = tmp_path / "s"
    snapshots = opened(root)
    snapshots.keep_initial(arrays((0, 1, 2, 3), 0))
    for version in (V2, V1):
        snapshots.write_snapshot(version, arrays((0, 1, 2, 3), 1), arrays((0, 1, 2, 3), 2))
    snapshots.close()
    shutil.copytree(root / str(V1), root / f"{V1}.damaged")
    assert list(files.find_complete(root)) == [V1, V2]
    size = sum(file.stat().st_size for file in (root / str(V1)).iterdir())
    assert files.version_sizes(root) == {V1: size, V2: size}


# ---- staged by a rebalance ------------------------------------------------------------------------------------------


def stage(root: Path, version: VersionId, layers: tuple[int, ...]) -> None:
    """Leaves a version of these layers staged in a slave's root, as `dips rebalance` does."""
    (aside := root / "aside").mkdir()
    flat = [part[i] for i in layers for part in (arrays(layers, 1), arrays(layers, 2))]
    write_version(aside, ("r", "s", 4), version, MANIFEST, layers, flat)
    files.stage_version(aside, version)


def test_a_staged_version_is_offered_before_the_layers_are_known(tmp_path: Path) -> None:
    """A slave registers with it: the master, which may have written the row, is to name its layers."""
    opened(tmp_path / "s").close()
    stage(tmp_path / "s", V1, (0, 1))
    with closing(Snapshots(tmp_path / "s", "r", "s", None, structlog.get_logger())) as unbound:
        assert unbound.complete_versions() == (V1,)
    with closing(opened(tmp_path / "s")) as of_others:
        assert of_others.complete_versions() == ()
    with closing(opened(tmp_path / "s", layers=(0, 1))) as promoted:
        assert promoted.complete_versions() == (V1,)
        assert same(read(promoted, V1, (0, 1))[1], arrays((0, 1), 2))


def test_a_promoted_version_is_read_before_it_is_offered(tmp_path: Path) -> None:
    """Also if the one of the former layers, which it replaces, was found whole."""
    snapshots = opened(tmp_path / "s")
    snapshots.write_snapshot(V1, arrays((0, 1, 2, 3), 1), arrays((0, 1, 2, 3), 2))
    stage(tmp_path / "s", V1, (0, 1))
    flip_bit(tmp_path / "s" / f"{files.STAGED}{V1}", MOMENTUM)
    assert snapshots.complete_versions() == (V1,)
    genesis = [digest_of(arrays((0, 1, 2, 3), 0)[i]) for i in (0, 1)]
    snapshots.bind_layers(MANIFEST, (0, 1), genesis, sinc=4)
    assert snapshots.complete_versions() == ()
    snapshots.close()


# ---- archives --------------------------------------------------------------------------------------------------------


def test_a_hundred_archived_versions_cost_nothing_at_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a slave reads before it registers is the same with two versions and with a hundred: files and bytes."""
    real, read_at_start = snapshots_module.read_manifest, dict[int, tuple[int, int]]()
    opened(tmp_path / "made").close()
    for count in (2, 100):
        root = tmp_path / str(count)
        snapshots = opened(root)
        for number in range(1, count + 1):
            snapshots.write_snapshot(VersionId(number, number), arrays((0, 1, 2, 3), 1), arrays((0, 1, 2, 3), 2))
        snapshots.close()
        manifests, meter = list[Path](), WorkMeter()

        def seen(folder: Path, manifests: list[Path] = manifests) -> VersionManifest:
            manifests.append(folder)
            return real(folder)

        with monkeypatch.context() as patch:
            patch.setattr(snapshots_module, "read_manifest", seen)
            begun = time.perf_counter()
            starting = Snapshots(root, "r", "s", tmp_path / "initial", structlog.get_logger(), meter)
            complete, unread = starting.complete_versions(), starting.unread_versions()
            print(f"{count} versions: {time.perf_counter() - begun:.4f} s, {meter.nbytes} bytes")
        starting.close()
        assert len(complete) == READ_AT_START and len(unread) == count - READ_AT_START
        read_at_start[count] = len(manifests), meter.nbytes
    assert read_at_start[2] == read_at_start[100] and read_at_start[2][1] > 0


def test_of_deletions_that_fail_the_first_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All are tried; the others say the same again when they are tried again."""
    snapshots = opened(tmp_path / "s")
    for version in (V1, V2):
        snapshots.write_snapshot(version, arrays((0, 1, 2, 3), 1), arrays((0, 1, 2, 3), 2))

    def fail(path: Path) -> None:
        raise OSError(f"{path.name} stays")

    monkeypatch.setattr(shutil, "rmtree", fail)
    with pytest.raises(OSError, match=f"old-{V1} stays"):
        snapshots.delete_snapshots((V1, V2))
    snapshots.close()
