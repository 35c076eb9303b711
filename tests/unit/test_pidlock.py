"""The pid lock: held by one, named by its holder, free when the holder lets go or dies."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dips.errors import ConfigError, DipsError, treatment_of
from dips.files import UNKNOWN, PidLock, lock_holder

HOLD = """
import sys, time
from pathlib import Path
from dips.files import PidLock
lock = PidLock(Path(sys.argv[1]), busy="b", advice="a")
print("held", flush=True)
time.sleep(60)
"""


def take(path: Path) -> PidLock:
    return PidLock(path, busy=f"{path}: in use", advice="stop it first")


def test_a_second_holder_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    """The refusal says what is in use, by which process, and what to do."""
    path = tmp_path / "a.lock"
    lock = take(path)
    with pytest.raises(ConfigError, match=rf"a\.lock: in use \(pid {os.getpid()}\): stop it first"):
        take(path)
    lock.close()
    take(path).close()


@pytest.mark.parametrize(("number", "code"), [(errno.ENOSYS, 78), (errno.EOPNOTSUPP, 78), (errno.ENOLCK, 74)])
def test_a_file_system_without_locks_is_told(
    number: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Lustre's without `flock`: a master or agent there ended with a traceback, `Function not implemented`, that
    names no file. After 78 nobody starts it again, as is right unless the lock server of NFS comes later.
    """

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(DipsError, match=r"a\.lock: its file system does not lock files \(") as told:
        take(tmp_path / "a.lock")
    assert treatment_of(told.value).exit_code == code


def test_a_lock_that_nobody_holds_names_nobody(tmp_path: Path) -> None:
    """What a process wrote before it let go is not believed, nor is a file that never was locked."""
    path = tmp_path / "a.lock"
    assert lock_holder(path) == ""
    lock = take(path)
    assert lock_holder(path) == str(os.getpid())
    lock.close()
    assert path.read_text() == f"{os.getpid()}\n"
    assert lock_holder(path) == ""


def test_a_holder_that_has_not_written_its_pid_is_unknown(tmp_path: Path) -> None:
    """Between locking and writing the file is empty: held, by an unknown process."""
    path = tmp_path / "a.lock"
    lock = take(path)
    path.write_text("")
    assert lock_holder(path) == UNKNOWN
    lock.close()


def test_a_new_holder_replaces_the_pid_of_a_former_one(tmp_path: Path) -> None:
    """Whatever its length: what remained of it would be shown as another process."""
    path = tmp_path / "a.lock"
    path.write_text("99999999999\n")
    lock = take(path)
    assert lock_holder(path) == str(os.getpid())
    lock.close()


def test_the_kernel_releases_the_lock_of_a_killed_process(tmp_path: Path) -> None:
    """SIGKILL leaves the file and its pid behind, and frees the lock."""
    path = tmp_path / "a.lock"
    child = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE)
    with child:
        assert child.stdout is not None and child.stdout.readline() == b"held\n"
        assert lock_holder(path) == str(child.pid)
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert lock_holder(path) == ""
    take(path).close()
