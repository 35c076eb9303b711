"""Tasks that nobody awaits: when one fails, which is our bug, that is heard at once.

asyncio tells of it only when the task is collected, so a daemon would go on without what the task did.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
Fail = Callable[[BaseException], None]


def start_task(work: Coroutine[Any, Any, T], fail: Fail, name: str | None = None) -> asyncio.Task[T]:
    """Begin `work` on the running loop; if it raises, `fail` is called with what: it ends the process."""
    task = asyncio.get_running_loop().create_task(work, name=name)

    def hear_end(ended: asyncio.Task[T]) -> None:
        if not ended.cancelled() and (error := ended.exception()) is not None:
            fail(error)

    task.add_done_callback(hear_end)
    return task
