"""FreeDisk on a slave's disk: known soon, asked by one thread at a time, and a disk that hangs holds up nobody."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

from dips.slave import metrics
from dips.slave.metrics import DiskRoom, FreeDisk, count_snapshots
from dips.telemetry.metrics import DiskLooks


def test_a_disk_that_hangs_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread waits for it, however often it is asked; when it answers, the room is known."""
    asked, answers, known = [], threading.Event(), shutil.disk_usage(tmp_path)

    def hang(directory: Path) -> object:
        asked.append(directory)
        assert answers.wait(10)
        return known

    monkeypatch.setattr(metrics.shutil, "disk_usage", hang)
    room = DiskRoom(tmp_path)
    assert [room.read_room() for _ in range(5)] == [FreeDisk()] * 5
    [waiting] = [t for t in threading.enumerate() if t.name == "disk-room"]
    answers.set()
    waiting.join(10)
    assert room.read_room() == FreeDisk(known.free, known.total) and asked == [tmp_path]


def test_a_disk_that_is_gone_has_no_room_that_is_known(tmp_path: Path) -> None:
    room = DiskRoom(tmp_path / "gone")
    room.read_room()
    for thread in [t for t in threading.enumerate() if t.name == "disk-room"]:
        thread.join(10)
    assert room.read_room() == FreeDisk()


def test_what_only_looks_like_a_version_does_not_end_the_looks_at_a_disk(tmp_path: Path) -> None:
    """A person's archive beside the snapshots is no snapshot; the next scrapes get what is there then."""
    (tmp_path / "v1@r1.tar").write_bytes(b"kept by a person")
    (tmp_path / "v1@r1").mkdir()
    (tmp_path / "v1@r1" / "layer").write_bytes(b"four")
    looks = DiskLooks(lambda: count_snapshots(tmp_path))
    assert looks.read_newest() == {"snapshots": 1, "snapshot_bytes": 4}
    (tmp_path / "v2@r2").mkdir()
    assert looks.read_newest() == {"snapshots": 2, "snapshot_bytes": 4}
    looks.close()


def test_a_disk_that_answers_with_an_error_is_looked_at_again(tmp_path: Path) -> None:
    """As one of a network whose server starts anew: free space would stand still in all later scrapes, and no alert of
    a disk that fills would ever fire.
    """
    directory = tmp_path / "s"
    (tmp_path / "disk" / "v1@r1").mkdir(parents=True)
    directory.symlink_to("n" * 300)  # no name of a file is as long
    looks = DiskLooks(lambda: {"looked": True, **count_snapshots(directory)})
    assert looks.read_newest() == {"looked": True}
    directory.unlink()
    directory.symlink_to(tmp_path / "disk")
    assert looks.read_newest() == {"looked": True, "snapshots": 1, "snapshot_bytes": 0}
    looks.close()
