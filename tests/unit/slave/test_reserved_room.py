"""Room for a snapshot is reserved where the file system can, and never written to be reserved."""

from __future__ import annotations

import ctypes
import errno
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dips.errors import CorruptSnapshot
from dips.ids import VersionId
from dips.protocol.manifest import Layer, Manifest, Parameter
from dips.store import tensorfile
from dips.store.files import make_manifest, reserve_version
from dips.store.tensorfile import Reader, make_header, map_behind, map_new, reserve_file, write_behind
from dips.store.version import MANIFEST_FILE, LayerRecord
from tests.open_files import list_open_files

SIZE = 1 << 22  # bytes


def test_room_is_on_the_disk_before_anything_is_written(tmp_path: Path) -> None:
    """Where the file system reserves; a file that has it keeps it."""
    for _ in range(2):
        reserve_file(tmp_path / "f", SIZE)
    assert (tmp_path / "f").stat().st_blocks * 512 >= SIZE


def test_a_full_disk_is_found(tmp_path: Path) -> None:
    """More than any disk has, and more than a file may have."""
    with pytest.raises(OSError, match=r"No space left|File too large"):
        reserve_file(tmp_path / "f", 1 << 60)
    assert not (tmp_path / "f").stat().st_size


def test_where_nothing_can_be_reserved_nothing_is_written(tmp_path: Path) -> None:
    """A ramfs cannot, like NFS before 4.2: glibc would write each block of 50 GB instead."""
    code = f"from pathlib import Path; from dips.store.tensorfile import reserve_file; reserve_file(Path('f'), {SIZE})"
    shell = 'mount -t ramfs none "$1" && cd "$1" && "$2" -c "$3" && stat -c "%s %b" f'
    words = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", shell, "sh", str(tmp_path), sys.executable]
    if subprocess.run([*words[:4], "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine allows no mounts in a user namespace")
    done = subprocess.run([*words, code], capture_output=True, text=True, check=False)
    assert done.stdout == "0 0\n", done.stdout + done.stderr


def test_room_that_is_not_used_is_released(tmp_path: Path) -> None:
    """What is written ends where its tensors do, however much was reserved, and is a whole file to its reader."""
    reserve_file(tmp_path / "f", SIZE)
    shapes = [("w", (3,))]
    header = make_header({}, shapes)
    size = write_behind(tmp_path / "f", header, 3, [np.ones(3, np.float32)], lambda _: None)
    assert (tmp_path / "f").stat().st_size == size == len(header) + 12
    with Reader(tmp_path / "f") as reader:
        reader.read_into("w", (3,), read := np.zeros(3, np.float32))
    assert read.tolist() == [1.0, 1.0, 1.0]


def test_a_new_file_is_zeros_whatever_was_there(tmp_path: Path) -> None:
    """It has room on the disk for all that is written into its map, and ends there; so does one that was longer."""
    (tmp_path / "f").write_bytes(b"\xff" * 2 * SIZE)
    header = make_header({}, shapes := [("w", (SIZE // 4,))])
    assert not map_new(tmp_path / "f", {}, shapes).any()
    assert (tmp_path / "f").stat().st_size == len(header) + SIZE <= (tmp_path / "f").stat().st_blocks * 512
    assert map_behind(tmp_path / "f", header, 3).tolist() == [0.0, 0.0, 0.0]
    assert (tmp_path / "f").stat().st_size == len(header) + 12


def test_a_file_that_is_refused_is_closed(tmp_path: Path) -> None:
    """Not when its error is forgotten: who looks through many may have few files open."""
    (tmp_path / "f").write_bytes(b"no tensors")
    with pytest.raises(CorruptSnapshot) as refused:
        Reader(tmp_path / "f")
    assert refused.value.__traceback__ is not None
    assert str(tmp_path / "f") not in dict(list_open_files()).values()


def test_a_reservation_that_is_interrupted_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal, as of a profiler, is no full disk."""
    real, calls = tensorfile._LIBC.fallocate, list[int]()

    def interrupted(fd: int, mode: int, offset: int, nbytes: int) -> int:
        calls.append(nbytes)
        if len(calls) > 1:
            return int(real(fd, mode, offset, nbytes))
        ctypes.set_errno(errno.EINTR)
        return -1

    monkeypatch.setattr(tensorfile._LIBC, "fallocate", interrupted)
    reserve_file(tmp_path / "f", SIZE)
    assert calls == [SIZE, SIZE] and (tmp_path / "f").stat().st_size == SIZE


def test_room_for_a_manifest_grows_with_its_parameters(tmp_path: Path) -> None:
    """A disk that is full but for the layers is found before they are written."""
    model = Manifest((Layer("l", tuple(Parameter(f"l.{i}" + "x" * 200, (1,)) for i in range(50))),))
    reserve_version(tmp_path / "v", "r", VersionId(1, 1), model, (0,))
    records = (LayerRecord(0, model.layers[0], "0" * 32, "0" * 32, 1 << 40),)
    manifest = make_manifest(("r", "s", 1), VersionId(1, 1), model, records)
    assert (tmp_path / "v" / MANIFEST_FILE).stat().st_size >= len(manifest.to_json())


def test_tensors_begin_at_a_multiple_of_8_bytes() -> None:
    """Of any header: other readers of safetensors files map them, and refuse what is not aligned."""
    assert {len(make_header({}, [("w" * length, (3,))])) % 8 for length in range(1, 17)} == {0}
