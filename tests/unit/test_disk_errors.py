"""What a disk refuses is told with the file's name, also where the kernel was given a descriptor alone."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dips.data.documents import make_tokenizer, write_tokens
from dips.files import PidLock, named_in_errors, sync_path, write_synced
from dips.store import tensorfile

FULL = Path("/dev/full")  # a write to it fails as on a full disk


def write_tensor(path: Path) -> None:
    tensorfile.write_tensors(path, {}, (("w", (2,)),), [np.zeros(2, np.float32)])


def write_text(path: Path) -> None:
    write_tokens([Path(__file__)], "text", make_tokenizer("bytes", None), path, lambda _: None)


@pytest.mark.parametrize("write", [lambda path: write_synced(path, b"x"), write_tensor, write_text])
def test_a_full_disk(write: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorfile, "_reserve_space", lambda *_: None)  # as where nothing can be reserved
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        write(FULL)


def test_a_file_that_finds_no_room(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=rf"File too large: '{tmp_path}/a'") as raised:
        tensorfile.reserve_file(tmp_path / "a", 1 << 62)
    assert raised.value.errno == errno.EFBIG


def test_a_disk_that_does_not_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match=f"Input/output error: '{tmp_path}'"):
        sync_path(tmp_path)


def test_what_has_a_name_or_no_number_stays() -> None:
    for error in (FileNotFoundError(errno.ENOENT, "gone", "b"), OSError("a sentence")):
        told = str(error)
        with pytest.raises(OSError) as raised, named_in_errors("a"):
            raise error
        assert str(raised.value) == told


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ESTALE])
def test_a_lock_whose_file_was_removed(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS says that a handle is stale where another host has removed the file, or its directory."""
    lock = PidLock(tmp_path / "lock", busy="", advice="")
    assert lock.is_in_place()

    def gone(*_: object) -> os.stat_result:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", gone)
        assert not lock.is_in_place()
        number = errno.EIO
        with pytest.raises(OSError, match="Input/output"):
            lock.is_in_place()
    lock.close()
    assert not lock.is_in_place()
