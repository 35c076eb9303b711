"""What a slave's process leaves in its directory for the next one: who it was."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from dips.slave import registration
from dips.slave.registration import FILE, LastProcess
from dips.telemetry.logs import configure_log


def last_process(directory: Path) -> LastProcess:
    """As of a process that has just taken the directory's lock."""
    directory.mkdir(exist_ok=True)
    (directory / ".lock").touch()
    return LastProcess(directory, directory / ".lock", configure_log("slave", "s"))


def test_the_next_process_in_a_directory_knows_who_was_there(tmp_path: Path) -> None:
    """The first in a directory knows of nobody; the last one that has an incarnation counts."""
    assert last_process(tmp_path).read_nonce() == ""
    last_process(tmp_path).keep_nonce("first")
    last_process(tmp_path).keep_nonce("second")
    assert last_process(tmp_path).read_nonce() == "second"


def test_a_copy_of_a_directory_proves_nothing(tmp_path: Path) -> None:
    """The process before may live on in the original, which it holds."""
    last_process(tmp_path / "held").keep_nonce("first")
    shutil.copytree(tmp_path / "held", tmp_path / "copy")
    assert last_process(tmp_path / "copy").read_nonce() == ""


def test_a_clone_of_a_disk_proves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files have the same numbers, and the process before may live on the machine that was cloned: the clone took
    its place, and with its older snapshots the run went back.
    """
    last_process(tmp_path).keep_nonce("first")
    with monkeypatch.context() as cloned:
        cloned.setattr(registration, "read_boot_id", lambda: "another start, of another machine")
        assert last_process(tmp_path).read_nonce() == ""
    assert last_process(tmp_path).read_nonce() == "first"


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"nonce": 7, "lock_inode": 1}', "\x00" * 9, '{"nonce": "'])
def test_what_is_not_such_a_file_names_nobody(tmp_path: Path, text: str) -> None:
    """A torn or foreign file costs its slave two heartbeats, and no start."""
    last_process(tmp_path)
    (tmp_path / FILE).write_text(text)
    assert last_process(tmp_path).read_nonce() == ""


def test_a_name_too_long_is_nobodys(tmp_path: Path) -> None:
    """It would be refused as a message, for ever."""
    last_process(tmp_path).keep_nonce("n" * 64)
    assert last_process(tmp_path).read_nonce() == "n" * 64
    last_process(tmp_path).keep_nonce("n" * 65)
    assert last_process(tmp_path).read_nonce() == ""


def test_a_name_that_is_no_text_is_nobodys(tmp_path: Path) -> None:
    """No message holds it: its slave would end at each start, until somebody removes the file."""
    last_process(tmp_path).keep_nonce("first")
    kept = json.loads((tmp_path / FILE).read_text())
    (tmp_path / FILE).write_text(json.dumps({**kept, "nonce": ["first"]}))
    assert last_process(tmp_path).read_nonce() == ""


def test_a_disk_that_cannot_be_written_costs_no_start(tmp_path: Path) -> None:
    """Its successor waits as if it came from elsewhere."""
    last = last_process(tmp_path)
    (tmp_path / "process.new").mkdir()
    last.keep_nonce("first")
    assert last.read_nonce() == ""


def test_a_directory_that_is_made_anew_names_its_process_again(tmp_path: Path) -> None:
    """Its lock is another file; and a disk that was full may have room by the next registration."""
    last = last_process(tmp_path / "s")
    last.keep_nonce("first")
    shutil.rmtree(tmp_path / "s")
    last_process(tmp_path / "s")
    last.keep_nonce("first")
    assert last_process(tmp_path / "s").read_nonce() == "first"
