"""Tasks that nobody awaits: how their ends are heard."""

from __future__ import annotations

import asyncio

from dips.tasks import start_task


async def test_what_fails_is_heard_and_what_ends_or_is_cancelled_is_not() -> None:
    """`fail` gets the error itself, once, as soon as the task is over."""
    heard = list[BaseException]()

    async def work(error: Exception | None) -> None:
        if error is not None:
            raise error

    broken = OSError("the disk is full")
    ended = [start_task(work(error), heard.append) for error in (None, broken)]
    cancelled = start_task(asyncio.sleep(60), heard.append)
    cancelled.cancel()
    await asyncio.wait([*ended, cancelled])
    await asyncio.sleep(0)
    assert heard == [broken]
