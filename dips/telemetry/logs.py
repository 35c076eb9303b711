"""Structured logs: one line per event and effect, with ids; for people on a terminal, JSON elsewhere."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

import structlog
from structlog.typing import EventDict

from dips.printable import make_lines_printable, make_printable

Log = structlog.stdlib.BoundLogger


def warn_of_certificates(log: Log) -> Callable[[str], None]:
    """Take what is wrong with renewed files while the former ones stay in use; the same event in every daemon."""
    return lambda problem: log.warning("certificate", problem=problem)


def configure_log(role: str, name: str, level: str = "info") -> Log:
    """Set up this process's log on standard error and return its logger, bound to who we are."""
    terminal = sys.stderr.isatty()
    renderer = structlog.dev.ConsoleRenderer() if terminal else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _make_printable,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    log: Log = structlog.get_logger().bind(role=role, name=name)
    return log


def _make_printable(_: Any, __: str, event: EventDict) -> EventDict:
    """What peers say is a field of many events; only a traceback, which is ours, has lines."""
    for key, value in event.items():
        if isinstance(value, str):
            event[key] = make_lines_printable(value) if key == "exception" else make_printable(value)
        elif isinstance(value, BaseException):
            event[key] = make_printable(repr(value))
    return event
