"""The log's level may change while the process runs, also for loggers that were bound before."""

from __future__ import annotations

import errno
import io
import json
import logging

import pytest
import structlog

from dips.errors import ConfigError
from dips.telemetry import logs


@pytest.mark.parametrize("nth", ["one test", "the next"])
def test_a_log_ends_with_the_test_that_configured_it(nth: str) -> None:
    """tests/conftest.py puts it back: the stream is closed by then, and a level would silence the tests that follow."""
    assert not structlog.is_configured() and logs._LevelledLogger.level == logging.INFO, nth
    logs.configure_log("slave", "s0", "error")
    assert logs._LevelledLogger.level == logging.ERROR


def test_a_level_holds_from_the_next_line_on(capsys: pytest.CaptureFixture[str]) -> None:
    log = logs._LevelledLogger(None, [lambda *_: said.append(_[2]["event"]) or _raise_drop()], {})
    said: list[str] = []
    for level in ("error", "warning", "info", "debug"):
        logs.set_level(level)
        for name in ("debug", "info", "warning", "error"):
            getattr(log, name)(f"{name} at {level}")
    assert said == [
        *("error at error", "warning at warning", "error at warning"),
        *(f"{name} at info" for name in ("info", "warning", "error")),
        *(f"{name} at debug" for name in ("debug", "info", "warning", "error")),
    ]


def test_what_strangers_cause_is_told_now_and_then() -> None:
    """The first of a kind at once, then one a second with the number of those between."""
    now = [0.0]
    with structlog.testing.capture_logs() as lines:
        seldom = logs.SeldomWarnings(structlog.get_logger(), lambda: now[0])
        for second in (0.0, 0.5, 0.9, 1.0, 1.5, 3.0, 9.0):
            now[0] = second
            seldom.warning("full", at=second)
        seldom.warning("refused", at=now[0])
    assert [(line["event"], line["at"], line.get("left_out")) for line in lines] == [
        ("full", 0.0, None), ("full", 1.0, 2), ("full", 3.0, 1), ("full", 9.0, None), ("refused", 9.0, None)
    ]  # fmt: skip


def _raise_drop() -> dict[str, str]:
    raise structlog.DropEvent


def test_a_word_that_is_no_level_is_refused() -> None:
    assert logs.check_level(None) is None and logs.check_level("WARNING") == "WARNING"
    with pytest.raises(ConfigError, match="expected debug, info, warning or error, got 'loud'"):
        logs.check_level("loud")


class FullDisk(io.StringIO):
    """Takes nothing while it is full."""

    full = True

    def flush(self) -> None:
        if self.full:
            self.seek(0)
            self.truncate()
            raise OSError(errno.ENOSPC, "no space left on the device")


def test_lines_that_cannot_be_written_end_nothing_and_are_counted() -> None:
    """Who logs is in the middle of something; the next line that is written says how many are missing."""
    disk = FullDisk()
    stream = logs.LogStream(disk)
    stream.write("one\n")
    stream.write("two\n")
    disk.full = False
    stream.write("three\n")
    stream.write("four\n")
    assert disk.getvalue() == "2 lines of this log could not be written\nthree\nfour\n"
    disk.close()
    stream.write("five\n")


@pytest.mark.parametrize("form", ["json", "console"])
def test_a_line_is_one_line_but_for_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    """In the format that the environment names; a peer's text begins no line of its own."""
    monkeypatch.setenv(logs.FORMAT, form)
    log = logs.configure_log("slave", "s0")
    try:
        raise KeyError("x")
    except KeyError as error:
        log.error("call failed", said="a\nb", exc_info=error)
    (line, *more) = capsys.readouterr().err.splitlines()
    assert "\\nb" in line and line.startswith("{") is (form == "json")
    if form == "json":
        assert not more and json.loads(line)["exception"].splitlines()[-1] == "KeyError: 'x'"
    else:
        assert more[-1].endswith("KeyError: 'x'")
