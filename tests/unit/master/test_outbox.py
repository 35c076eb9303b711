"""The outbox: order, and nothing behind a record before it is durable."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from dips.master.outbox import Outbox
from dips.protocol.records import Record, RoundReserved


class Disk:
    """Writes when told that it may."""

    def __init__(self) -> None:
        self.may = asyncio.Event()
        self.asked = asyncio.Event()
        self.transactions: list[list[Record]] = []
        self.fails = False

    async def write(self, records: Sequence[Record]) -> None:
        self.asked.set()
        await self.may.wait()
        if self.fails:
            raise OSError("disk full")
        self.transactions.append(list(records))


def row(number: int) -> RoundReserved:
    return RoundReserved(number, 0.0)


@asynccontextmanager
async def running(outbox: Outbox[str]) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(outbox.run())
    yield task
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_nothing_behind_a_record_leaves_before_it_is_durable() -> None:
    """What stands before the record leaves; what stands behind it waits for the disk, however long."""
    disk, left = Disk(), list[str]()
    outbox: Outbox[str] = Outbox(disk.write, left.append)
    for item in ("before", row(1), "after"):
        outbox.put(item)
    async with running(outbox):
        await disk.asked.wait()
        assert left == ["before"]
        disk.may.set()
        await outbox.empty()
    assert left == ["before", "after"]


async def test_records_that_lie_ready_are_one_transaction() -> None:
    """Records of several steps share one fsync, in their order, and order holds for all the rest."""
    disk, left = Disk(), list[str]()
    disk.may.set()
    outbox: Outbox[str] = Outbox(disk.write, left.append)
    for item in (row(1), "a", row(2), row(3), "b", "c"):
        outbox.put(item)
    async with running(outbox):
        await outbox.empty()
    assert disk.transactions == [[row(1), row(2), row(3)]]
    assert left == ["a", "b", "c"]


async def test_what_comes_while_the_disk_is_busy_waits_its_turn() -> None:
    """Items put during a write leave after it, and their records are the next transaction."""
    disk, left = Disk(), list[str]()
    outbox: Outbox[str] = Outbox(disk.write, left.append)
    outbox.put(row(1))
    async with running(outbox):
        await disk.asked.wait()
        for item in ("a", row(2), "b"):
            outbox.put(item)
        await asyncio.sleep(0)
        assert left == []
        disk.may.set()
        await outbox.empty()
    assert disk.transactions == [[row(1)], [row(2)]]
    assert left == ["a", "b"]


async def test_a_failed_record_lets_nothing_out() -> None:
    """When a record cannot be written the outbox ends with the disk's error, and what stood behind it stays."""
    disk, left = Disk(), list[str]()
    disk.fails = True
    disk.may.set()
    outbox: Outbox[str] = Outbox(disk.write, left.append)
    outbox.put(row(1))
    outbox.put("a lie")
    with pytest.raises(OSError, match="disk full"):
        await outbox.run()
    outbox.put("later")
    assert left == [] and outbox.rest() == ["later"]
