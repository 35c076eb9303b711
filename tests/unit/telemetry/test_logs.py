"""The log's level may change while the process runs, also for loggers that were bound before."""

from __future__ import annotations

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


def _raise_drop() -> dict[str, str]:
    raise structlog.DropEvent


def test_a_word_that_is_no_level_is_refused() -> None:
    assert logs.check_level(None) is None and logs.check_level("WARNING") == "WARNING"
    with pytest.raises(ConfigError, match="expected debug, info, warning or error, got 'loud'"):
        logs.check_level("loud")
