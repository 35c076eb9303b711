"""Structured logs: one line for each event and effect, with ids; formatted for people on a terminal, JSON elsewhere."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from math import inf
from typing import Any, ClassVar, TextIO, cast

import structlog
from structlog.typing import EventDict

from dips.errors import ConfigError
from dips.printable import make_lines_printable, make_printable

Log = structlog.stdlib.BoundLogger


FORMAT = "DIPS_LOG_FORMAT"  # environment variable: console or json
LEVELS = ("debug", "info", "warning", "error")


class _LevelledLogger(structlog.make_filtering_bound_logger(logging.DEBUG)):  # type: ignore[misc]
    """A logger that checks the level at each call, so that it may change while the process runs: one comparison."""

    level: ClassVar[int] = logging.INFO

    def debug(self, event: str, *args: Any, **fields: Any) -> Any:
        return super().debug(event, *args, **fields) if self.level <= logging.DEBUG else None

    def info(self, event: str, *args: Any, **fields: Any) -> Any:
        return super().info(event, *args, **fields) if self.level <= logging.INFO else None

    def warning(self, event: str, *args: Any, **fields: Any) -> Any:
        return super().warning(event, *args, **fields) if self.level <= logging.WARNING else None


class LogStream:
    """Standard error, which may be a full disk or a closed pipe: a line that cannot be written raises nothing.

    A failing log must not end the work of its caller. The next line that can be written reports how many were lost.
    """

    def __init__(self, file: TextIO) -> None:
        self._file, self._lost = file, 0

    def write(self, line: str) -> None:
        told = f"{self._lost} lines of this log could not be written\n" if self._lost else ""
        try:
            self._file.write(told + line)
            self._file.flush()
            self._lost = 0
        except (OSError, ValueError):  # ValueError: it is closed
            self._lost += 1

    def flush(self) -> None:
        """Do nothing: each line is flushed as it is written."""


SELDOM_S = 1.0


class SeldomWarnings:
    """Warnings that anybody who reaches a port can cause: at most one of each kind in SELDOM_S, or they fill a disk."""

    def __init__(self, log: Log, clock: Callable[[], float] = time.monotonic) -> None:
        self._log, self._clock = log, clock
        self._told: dict[str, tuple[float, int]] = {}  # event → when it was written last, and those left out since

    def warning(self, event: str, **fields: Any) -> None:
        now, (told_at, left_out) = self._clock(), self._told.get(event, (-inf, 0))
        if now - told_at < SELDOM_S:
            self._told[event] = told_at, left_out + 1
            return
        self._told[event] = now, 0
        self._log.warning(event, **fields, **({"left_out": left_out} if left_out else {}))


def set_level(level: str) -> None:
    """Set the level of this process's log: debug, info, warning or error."""
    _LevelledLogger.level = logging.getLevelNamesMapping()[level.upper()]


def check_level(given: str | None) -> str | None:
    """Return the level of a command line; raise ConfigError if it is none."""
    if given is not None and given.lower() not in LEVELS:
        raise ConfigError(f"--log-level: expected {', '.join(LEVELS[:-1])} or {LEVELS[-1]}, got {given!r}")
    return given


def configure_log(role: str, name: str, level: str = "info") -> Log:
    """Set up this process's log on standard error and return its logger, bound to role and name.

    Lines are formatted for people on a terminal, as JSON elsewhere, or as the variable FORMAT says.
    """
    set_level(level)
    terminal = sys.stderr.isatty()
    console = os.environ.get(FORMAT, "console" if terminal else "json") == "console"
    renderer = structlog.dev.ConsoleRenderer(colors=terminal) if console else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _make_printable,
            renderer,
        ],
        wrapper_class=_LevelledLogger,
        logger_factory=structlog.WriteLoggerFactory(file=cast(TextIO, LogStream(sys.stderr))),
        cache_logger_on_first_use=True,
    )
    log: Log = structlog.get_logger().bind(role=role, name=name)
    return log


def _make_printable(_: Any, __: str, event: EventDict) -> EventDict:
    """Make fields printable, since many contain text of peers; only a traceback may have several lines."""
    for key, value in event.items():
        if isinstance(value, str):
            event[key] = make_lines_printable(value) if key == "exception" else make_printable(value)
        elif isinstance(value, BaseException):
            event[key] = make_printable(repr(value))
    return event
