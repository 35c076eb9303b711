"""The ordered outbox: effects leave in their order, nothing behind a Record before it is durable (why.md 29).

All records that lie ready when the writer is free become one transaction: group commit, so a slow disk costs waiting
and never order. What an effect means, whoever gave `leave` knows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar, cast

from dips.protocol.records import Record

Item = TypeVar("Item")


class Outbox(Generic[Item]):
    """`write` makes records durable, `leave` lets any other item out and returns at once."""

    def __init__(self, write: Callable[[Sequence[Record]], Awaitable[None]], leave: Callable[[Item], None]) -> None:
        self._write, self._leave = write, leave
        self._queue: asyncio.Queue[Item | Record] = asyncio.Queue()

    def put(self, item: Item | Record) -> None:
        """Add at the end; returns at once."""
        self._queue.put_nowait(item)

    async def run(self) -> None:
        """Let items out until cancelled; raises what `write` raised, and then nothing more may leave."""
        while True:
            batch = [await self._queue.get()]
            while not self._queue.empty():
                batch.append(self._queue.get_nowait())
            await self._let_out(batch)
            for _ in batch:
                self._queue.task_done()

    async def empty(self) -> None:
        """Return when everything that was put has left."""
        await self._queue.join()

    def rest(self) -> list[Item | Record]:
        """Take out what has not left, for those who wait for it."""
        left = []
        while not self._queue.empty():
            left.append(self._queue.get_nowait())
        return left

    async def _let_out(self, batch: list[Item | Record]) -> None:
        first = next((i for i, item in enumerate(batch) if isinstance(item, Record)), len(batch))
        for item in batch[:first]:
            self._leave(cast(Item, item))
        records = [item for item in batch[first:] if isinstance(item, Record)]
        if records:
            await self._write(records)
        for item in batch[first:]:
            if not isinstance(item, Record):
                self._leave(item)
