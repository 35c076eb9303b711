"""Waits of tests until something holds, which is looked at again and again, up to a limit at which they fail; and what
they often wait for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

FIRST_PAUSE_S, PAUSE_S = 0.0005, 0.01  # short at first, and then twice as long each time
TURN_S = 0.001  # on an event loop, whose tasks may go on to what is awaited next


def until(holds: Callable[[], object], what: object = "", within_s: float = 20.0, pause_s: float = PAUSE_S) -> None:
    """Wait until `holds()`; fail with `what`, which is called if it is a function, after `within_s`."""
    end, pause = time.monotonic() + within_s, FIRST_PAUSE_S
    while not holds():
        assert time.monotonic() < end, f"not within {within_s:g} s: {what() if callable(what) else what}"
        time.sleep(pause)
        pause = min(2 * pause, pause_s)


async def eventually(holds: Callable[[], object], within_s: float = 20.0) -> None:
    """Wait until `holds()` while the event loop runs; raise TimeoutError after `within_s`."""
    async with asyncio.timeout(within_s):
        while not holds():
            await asyncio.sleep(TURN_S)


def is_alive(pid: int) -> bool:
    """Whether a process runs: it is neither gone nor a zombie that its reaper has not seen yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
