"""What daemons write is theirs alone; what is not theirs is left to its group, and refused if everybody may write."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dips import files
from dips.errors import ConfigError
from dips.files import (
    keep_files_private,
    make_private_directory,
    make_private_file,
    require_private,
    sync_path,
    umask_given,
    write_aside,
)
from tests.open_files import nothing_left_open


@pytest.fixture(autouse=True)
def umask_of_a_shell(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = os.umask(0o022)
    monkeypatch.setattr(files, "_given", -1)
    yield
    os.umask(before)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_files_are_private_and_those_of_others_are_not(tmp_path: Path) -> None:
    """The umask that we were started with is handed on, however often ours is set."""
    assert umask_given() == -1
    keep_files_private()
    keep_files_private()
    (tmp_path / "ours").write_text("")
    (tmp_path / "directory").mkdir()
    script = "import sys; open(sys.argv[1], 'w')"
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "theirs")], check=True, umask=umask_given())
    assert [mode_of(tmp_path / name) for name in ("ours", "directory", "theirs")] == [0o600, 0o700, 0o644]


def test_a_private_file_is_a_new_one(tmp_path: Path) -> None:
    """Whoever has opened what was there before does not see the secret that is written next."""
    os.umask(0)
    (tmp_path / "token").write_text("old")
    with (tmp_path / "token").open() as opened_before:
        make_private_file(tmp_path / "token")
        (tmp_path / "token").write_text("secret")
        assert mode_of(tmp_path / "token") == 0o600 and opened_before.read() == "old"


def test_of_two_that_write_one_output_none_publishes_the_others_half(tmp_path: Path) -> None:
    """A second `dips export` of one output began anew what the first one wrote, and the first one put that in its
    place half full.
    """
    first, second = write_aside(tmp_path / "out"), write_aside(tmp_path / "out")
    first.__enter__().write_text("all of it")
    (aside := second.__enter__()).write_text("half")
    with pytest.raises(FileExistsError, match="another process writes to it, too"):
        first.__exit__(None, None, None)
    assert list(tmp_path.iterdir()) == [aside]
    second.__exit__(None, None, None)
    assert (tmp_path / "out").read_text() == "half" and list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_what_is_made_durable_is_closed(tmp_path: Path) -> None:
    """A daemon syncs for months: a descriptor left by each would end it."""
    with nothing_left_open():
        sync_path(tmp_path)
        make_private_file(tmp_path / "token")
        with write_aside(tmp_path / "out"):
            pass


def test_a_directory_is_taken_from_all_others(tmp_path: Path) -> None:
    for before in (0o777, 0o755, 0o700):
        (tmp_path / "state").mkdir(exist_ok=True)
        (tmp_path / "state").chmod(before)
        make_private_directory(tmp_path / "state", "directory")
        assert mode_of(tmp_path / "state") == 0o700


def test_a_directory_of_everybody_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a cluster file in /tmp, whose `directory` is `.` by default, an agent of root took /tmp from all others. A
    tmpfs that is mounted for a daemon alone, as by `docker run --tmpfs`, has the same mode.
    """
    make_private_directory(tmp_path, "directory")
    tmp_path.chmod(0o1777)
    make_private_directory(tmp_path, "directory")
    assert mode_of(tmp_path) == 0o1700
    tmp_path.chmod(0o1777)
    monkeypatch.setattr("dips.files._EVERYBODYS", (os.path.realpath(tmp_path),))
    with pytest.raises(ConfigError, match=r"directory: .* is everybody's \(mode 1777\): name a directory in it"):
        make_private_directory(tmp_path, "directory")
    assert mode_of(tmp_path) == 0o1777


def test_a_directory_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A volume that belongs to root and a group is as it should be; one where everybody may write is not."""
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    tmp_path.chmod(0o2770)
    make_private_directory(tmp_path, "directory")
    assert mode_of(tmp_path) == 0o2770
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match=r"directory: everybody on this machine may write in .* chmod o-rwx it"):
        make_private_directory(tmp_path, "directory")


def test_a_secret_that_lies_open(tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("x")
    for mode in (0o600, 0o440):
        secret.chmod(mode)
        require_private(secret, "token")
    secret.chmod(0o644)
    with pytest.raises(ConfigError, match=r"token: .*token can be read by everybody .*mode 644.*: chmod 600 it"):
        require_private(secret, "token")
