"""What an agent leaves behind for the next one in its directory."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import structlog
from structlog.testing import capture_logs

from dips.client.agent import agent
from dips.client.agent.account import NO_INCARNATION, PastIncarnation
from dips.client.agent.agent import FILE, IncarnationFile


def incarnations(directory: Path, run: str = "run", cluster: str = "west") -> IncarnationFile:
    return IncarnationFile(directory, run, cluster, structlog.get_logger())


def test_the_next_agent_reads_what_the_last_one_saved(tmp_path: Path) -> None:
    """The newest incarnation counts; another run's or cluster's is none of ours; nothing else lies about."""
    assert incarnations(tmp_path).read_former() == NO_INCARNATION
    mine = incarnations(tmp_path)
    mine.save_incarnation(PastIncarnation(1, 10))
    mine.save_incarnation(PastIncarnation(2, 7))
    assert incarnations(tmp_path).read_former() == PastIncarnation(2, 7)
    assert incarnations(tmp_path, run="other").read_former() == NO_INCARNATION
    assert incarnations(tmp_path, cluster="east").read_former() == NO_INCARNATION
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


@pytest.mark.parametrize("content", ["", "[]", "7", '{"inc": 1}', '{"inc": "x", "tokens_consumed": 1}', "\xff"])
def test_a_broken_file_is_said_and_passed_over(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE).write_bytes(content.encode("latin-1"))
    with capture_logs() as logs:
        assert incarnations(tmp_path).read_former() == NO_INCARNATION
    assert [line["event"] for line in logs] == ["incarnation_not_read"]


def test_a_disk_that_fails_costs_no_training(tmp_path: Path) -> None:
    """It is said once, and again after it was mended."""
    mine = incarnations(tmp_path / "gone")
    with capture_logs() as logs:
        mine.save_incarnation(PastIncarnation(1, 1))
        mine.save_incarnation(PastIncarnation(1, 2))
        (tmp_path / "gone").mkdir()
        mine.save_incarnation(PastIncarnation(1, 3))
        (tmp_path / "gone" / FILE).unlink()
        (tmp_path / "gone").rmdir()
        mine.save_incarnation(PastIncarnation(1, 4))
    assert [line["event"] for line in logs] == ["incarnation_not_written"] * 2


def test_a_disk_that_says_nothing_holds_up_no_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is waited for once, and said once; when it answers, the newest incarnation is on it."""
    monkeypatch.setattr(agent, "SAVE_S", 0.1)
    silent, mine = tmp_path / "incarnation.new", incarnations(tmp_path)
    os.mkfifo(silent)  # whoever opens it to write waits for a reader
    with capture_logs() as logs:
        mine.save_incarnation(PastIncarnation(1, 1))
        monkeypatch.setattr(agent, "SAVE_S", 60.0)
        for tokens in (2, 3):
            mine.save_incarnation(PastIncarnation(1, tokens))
    assert [line["event"] for line in logs] == ["incarnation_not_written"]
    assert '"tokens_consumed": 1' in silent.read_text()
    until = time.monotonic() + 30
    while (tmp_path / FILE).is_fifo() or incarnations(tmp_path).read_former() != PastIncarnation(1, 3):
        assert time.monotonic() < until
        time.sleep(0.01)
