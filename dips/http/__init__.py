"""The HTTP port of every daemon: probes, Prometheus' metrics and the master's page, read-only.

Opened by `dips.daemon.open_http`; the server itself is imported only by processes with `http` in their configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.core import Metric

from dips.telemetry.metrics import Status


@dataclass(frozen=True, slots=True)
class HttpSubject:
    """The daemon behind a port: `read` and `explain_unready` are called on its loop, `look` on a separate thread."""

    run: str
    role: str
    read: Callable[[], Status]
    collect: Callable[[Status], Iterable[Metric]]
    explain_unready: Callable[[], str]  # why it cannot do its work now; empty: it can
    directories: Mapping[str, Path] = field(default_factory=dict)  # configuration key → directory
    look: Callable[[], dict[str, Any]] = dict
