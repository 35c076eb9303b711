"""The slave looks at its run file while it runs: the log's level may change, of all else of its own it says why not."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from dips.config import RunFile, load_run
from dips.config.watching import ConfigWatch, describe_keys, keep_watching
from dips.tasks import Fail, start_task
from dips.telemetry import logs

CHANGEABLE = ("log_level",)


def watch_file(
    file: Path, config: RunFile, name: str, log: logs.Log, fixed_level: bool, fail: Fail
) -> asyncio.Task[None]:
    """Begin to look; SIGHUP hurries it. `fixed_level`: the command line named the log's level.

    `fail` hears of what ends it, which is our bug.
    """
    others = ("clusters", "limits.*", "master.*", *(f"slaves.{s.name}.*" for s in config.slaves if s.name != name))
    report = lambda problem: log.warning("run file", problem=problem)  # noqa: E731

    def apply(new: RunFile, keys: list[str]) -> None:
        if not fixed_level:
            logs.set_level(new.log_level)
        log.info("run file taken over", changed=describe_keys(new, keys))

    hurry = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hurry.set)
    watch = ConfigWatch(file, config, load_run, CHANGEABLE, report, others)
    return start_task(keep_watching(watch, apply, hurry), fail)
