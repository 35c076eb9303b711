"""Processes held by their pidfd: seen when they die, killed as themselves, never taken for another."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dips.master.supervisor import Child, truncate_log
from tests.open_files import nothing_left_open
from tests.waiting import is_alive

SLEEP = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
DEAF = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)",
]


async def up(child: Child, log: Path) -> None:
    while "up" not in log.read_text():
        assert not await child.wait(0.01), "it ended"


async def test_a_child_is_ended_and_reaped(tmp_path: Path) -> None:
    """SIGTERM is enough for one that handles it; its exit code is known and no zombie stays."""
    child = Child.start(SLEEP, tmp_path / "log")
    await up(child, tmp_path / "log")
    await child.end(10.0)
    assert not child.alive
    assert child.code == -signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)
    child.send_signal(signal.SIGKILL)  # to a dead one: nothing


@pytest.mark.parametrize("ends", [True, False])
async def test_no_descriptor_is_left_of_a_child(ends: bool) -> None:
    """A master that starts one again and again would run out of them; nor of one that goes on unwatched."""
    process = subprocess.Popen(SLEEP, stdout=subprocess.DEVNULL)
    try:
        with nothing_left_open():
            child = Child(process.pid, process)
            if ends:
                await child.end(10.0)
            else:
                child.stop_watching()
            assert child.alive is not ends
    finally:
        process.kill()
        process.wait()


async def test_the_next_one_is_seen_to_end_too(tmp_path: Path) -> None:
    """The kernel gives it the descriptor of one that is not watched any more, or has ended."""
    unwatched = subprocess.Popen(SLEEP, stdout=subprocess.DEVNULL)
    Child(unwatched.pid, unwatched).stop_watching()
    try:
        for _ in range(2):
            assert await Child.start(["true"], tmp_path / "log").wait(5.0)
    finally:
        unwatched.kill()
        unwatched.wait()


async def test_what_a_leader_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    """Its group would go on beside the next one's."""
    leaves = ["sh", "-c", f"sleep 600 & echo $! > {tmp_path}/left"]
    for whole in (False, True):
        assert await Child.start(leaves, tmp_path / "log", whole_group=whole).wait(10.0)
        left = int((tmp_path / "left").read_text())
        if not whole:
            assert is_alive(left)
            os.kill(left, signal.SIGKILL)
        async with asyncio.timeout(5.0):
            while is_alive(left):
                await asyncio.sleep(0.01)


async def test_one_that_does_not_hear_is_killed(tmp_path: Path) -> None:
    """After its grace comes SIGKILL, and `end` returns when it is dead."""
    child = Child.start(DEAF, tmp_path / "log")
    await up(child, tmp_path / "log")
    await child.end(0.2)
    assert child.code == -signal.SIGKILL


async def test_another_ones_child_is_adopted(tmp_path: Path) -> None:
    """A process that we did not start is seen when it dies; its exit code is its parent's business."""
    other = subprocess.Popen(SLEEP, stdout=subprocess.DEVNULL)
    child = Child(other.pid, None)
    assert child.adopted and not await child.wait(0.05)
    child.send_signal(signal.SIGKILL)
    assert await child.wait(10.0)
    assert child.code is None
    assert other.wait() == -signal.SIGKILL


async def test_one_that_nobody_could_see_die_is_not_left_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last descriptor went while it was started: whoever asked is told that it is not, so it must not be."""
    seen = list[int]()

    def refuse(pid: int) -> int:
        seen.append(pid)
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    with pytest.raises(OSError, match="too many open files"):
        Child.start(SLEEP, tmp_path / "log")
    with pytest.raises(ProcessLookupError):
        os.kill(seen[0], 0)


async def test_a_dead_number_is_not_adopted() -> None:
    """A process that has ended, and was reaped, is nobody."""
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    with pytest.raises(ProcessLookupError):
        Child(done.pid, None)


def test_a_log_is_bounded(tmp_path: Path) -> None:
    """What another process appends to stays appended to; the content before is kept once."""
    log = tmp_path / "s.log"
    truncate_log(log, 10)
    log.write_bytes(b"x" * 10)
    truncate_log(log, 10)
    assert log.stat().st_size == 10, "as long as it may be"
    log.unlink()
    with log.open("ab", buffering=0) as writer:
        writer.write(b"x" * 20)
        truncate_log(log, 10)
        writer.write(b"new")
        truncate_log(log, 10)
    assert log.read_bytes() == b"new"
    assert (tmp_path / "s.log.1").read_bytes() == b"x" * 20


def test_a_log_that_has_no_room_for_its_copy_leaves_none_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What had come of it took the last room of the disk, and no transaction of the ledger found any more."""
    (log := tmp_path / "s.log").write_bytes(b"x" * 20)

    def fill(source: Path, target: Path) -> None:
        target.write_bytes(source.read_bytes()[:10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("dips.master.supervisor.shutil.copyfile", fill)
    with pytest.raises(OSError, match="No space left"):
        truncate_log(log, 10)
    assert [path.name for path in tmp_path.iterdir()] == ["s.log"] and log.stat().st_size == 20
