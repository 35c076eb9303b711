"""What a snapshot guarantees: every byte and every name is on the disk before it is reported, and is checked."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import structlog
import xxhash

from dips.errors import CorruptSnapshot
from dips.ids import VersionId
from dips.protocol.manifest import Manifest
from dips.slave.snapshots import Snapshots
from dips.store.version import MOMENTUM, THETA
from tests.damage import flip_bit
from tests.disk_calls import DiskCalls

MANIFEST = Manifest.from_shapes([("a.w", (4,))])
V1 = VersionId(1, 1)
Arrays = dict[int, np.ndarray]


def opened(path: Path) -> Snapshots:
    """A slave's directory, bound to one layer of four zeros."""
    zeros = np.zeros(4, np.float32)
    snapshots = Snapshots(path, "r", "s", None, structlog.get_logger())
    snapshots.bind_layers(MANIFEST, (0,), [xxhash.xxh3_128_hexdigest(zeros.tobytes())], sinc=1)
    return snapshots


def filled(value: float) -> Arrays:
    return {0: np.full(4, value, np.float32)}


def test_a_snapshot_is_on_the_disk_before_its_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Model, manifest and their names, then the rename, then the directory that holds the new name: nothing else."""
    snapshots = opened(tmp_path / "d")
    journal = DiskCalls(tmp_path / "d", monkeypatch)
    snapshots.write_snapshot(V1, filled(1.0), filled(2.0))
    assert journal.calls == [
        "fsync .unfinished-v1@r1/00000.safetensors",
        "fsync .unfinished-v1@r1/manifest.json",
        "fsync .unfinished-v1@r1",
        "rename .unfinished-v1@r1 v1@r1",
        "fsync .",
    ]
    snapshots.close()


def test_a_snapshot_has_lost_its_name_on_the_disk_before_it_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A half-removed one is never found under the name of a whole one."""
    snapshots = opened(tmp_path / "d")
    snapshots.write_snapshot(V1, filled(1.0), filled(2.0))
    journal = DiskCalls(tmp_path / "d", monkeypatch)
    snapshots.delete_snapshots((V1,))
    assert journal.calls == ["rename v1@r1 .unfinished-old-v1@r1", "fsync .", "remove .unfinished-old-v1@r1"]
    snapshots.close()


@pytest.mark.parametrize("part", [THETA, MOMENTUM])
@pytest.mark.parametrize("how", ["read", "complete"])
def test_one_wrong_bit_of_either_is_found(tmp_path: Path, part: str, how: str) -> None:
    """θ and m have digests of their own, and a Load compares both, as does whoever lists what is whole."""
    snapshots = opened(tmp_path / "d")
    snapshots.write_snapshot(V1, filled(1.0), filled(2.0))
    flip_bit(tmp_path / "d" / str(V1), part)
    if how == "complete":
        snapshots.close()
        snapshots = opened(tmp_path / "d")
        assert snapshots.complete_versions() == ()
    else:
        with pytest.raises(CorruptSnapshot, match="expected xxh3-128"):
            snapshots.read_snapshot(V1, filled(0.0), filled(0.0))
    snapshots.close()


@pytest.mark.parametrize("name", ["t", "s"])
def test_a_snapshot_of_another_slave_is_not_loaded(tmp_path: Path, name: str) -> None:
    """Copied into this directory by mistake, it has the right version, run and layers, and another slave's name."""
    other = Snapshots(tmp_path / "o", "r", name, None, structlog.get_logger())
    other.bind_layers(MANIFEST, (0,), [""], sinc=1)
    other.write_snapshot(V1, filled(1.0), filled(2.0))
    other.close()
    snapshots = opened(tmp_path / "d")
    shutil.copytree(tmp_path / "o" / str(V1), tmp_path / "d" / str(V1))
    if name == "s":
        snapshots.read_snapshot(V1, filled(0.0), filled(0.0))
    else:
        with pytest.raises(CorruptSnapshot, match="of slave t"):
            snapshots.read_snapshot(V1, filled(0.0), filled(0.0))
    snapshots.close()
