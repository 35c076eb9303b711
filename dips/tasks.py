"""Background tasks that are not awaited: a failure of one, which is a bug, is reported at once.

asyncio reports it only when the task is collected, so a daemon would continue without the task's work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
Fail = Callable[[BaseException], None]


def start_task(work: Coroutine[Any, Any, T], fail: Fail, name: str | None = None) -> asyncio.Task[T]:
    """Run `work` on the running loop; if it raises, call `fail` with the exception, to end the process."""
    task = asyncio.get_running_loop().create_task(work, name=name)

    def hear_end(ended: asyncio.Task[T]) -> None:
        if not ended.cancelled() and (error := ended.exception()) is not None:
            fail(error)

    task.add_done_callback(hear_end)
    return task
