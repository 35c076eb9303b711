"""The log's level may change while the process runs, also for loggers that were bound before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dips.errors import ConfigError
from dips.telemetry import logs


@pytest.fixture(autouse=True)
def level_of_before() -> Iterator[None]:
    before = logs._LevelledLogger.level
    yield
    logs._LevelledLogger.level = before


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
    import structlog

    raise structlog.DropEvent


def test_a_word_that_is_no_level_is_refused() -> None:
    assert logs.check_level(None) is None and logs.check_level("WARNING") == "WARNING"
    with pytest.raises(ConfigError, match="expected debug, info, warning or error, got 'loud'"):
        logs.check_level("loud")
