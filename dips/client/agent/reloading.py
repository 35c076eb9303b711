"""The agent looks at its cluster file while it runs: the log's level may change, of all else it says why not."""

from __future__ import annotations

import asyncio
from pathlib import Path

from dips.config import ClusterFile, load_cluster
from dips.config.watching import ConfigWatch, describe_keys, keep_watching
from dips.tasks import Fail, start_task
from dips.telemetry import logs

CHANGEABLE = ("log_level",)


def watch_file(file: Path, config: ClusterFile, log: logs.Log, fixed_level: bool, fail: Fail) -> asyncio.Task[None]:
    """Begin to look; no signal hurries it: SIGHUP ends a job whose terminal is gone. `fail` hears of our bugs in it."""
    report = lambda problem: log.warning("cluster file", problem=problem)  # noqa: E731

    def apply(new: ClusterFile, keys: list[str]) -> None:
        if not fixed_level:
            logs.set_level(new.log_level)
        log.info("cluster file taken over", changed=describe_keys(new, keys))

    return start_task(keep_watching(ConfigWatch(file, config, load_cluster, CHANGEABLE, report), apply), fail)
