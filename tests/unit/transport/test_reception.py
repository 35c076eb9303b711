"""Messages that arrive at once, of one peer and of all, and the connections over which a peer calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from dips.errors import Busy, RemoteProtocolError
from dips.transport.limits import MASTER_LIMITS, Reception

FEW = replace(MASTER_LIMITS, peer_connections=2, peer_messages=2, messages=3, message_s=60.0)


class Senders:
    """Callers whose messages come when the test says so."""

    def __init__(self) -> None:
        self.reception = Reception(FEW)
        self.reading: list[str] = []  # whose message is read now
        self._come = asyncio.Event()

    @asynccontextmanager
    async def calling(self, *peers: str) -> AsyncIterator[list[asyncio.Task[bytes]]]:
        calls = [asyncio.create_task(self._call(peer)) for peer in peers]
        await self._turn()
        yield calls
        self._come.set()
        assert await asyncio.gather(*calls) == [b"m"] * len(peers)

    async def _call(self, peer: str) -> bytes:
        with self.reception.admit_call(peer, f"{peer}'s"):
            return await self.reception.read_message(peer, lambda: self._read(peer))

    async def _read(self, peer: str) -> bytes:
        self.reading.append(peer)
        await self._come.wait()
        return b"m"

    async def _turn(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)


async def test_a_peer_waits_for_its_own_places() -> None:
    """However many calls it makes, the next peer's message is read at once."""
    senders = Senders()
    async with senders.calling("eve", "eve", "eve", "eve", "west"):
        assert senders.reading == ["eve", "eve", "west"]
    assert sorted(senders.reading) == ["eve"] * 4 + ["west"], "all are read in the end"


async def test_all_together_have_so_many() -> None:
    senders = Senders()
    async with senders.calling("a", "b", "c", "d", "e"):
        assert senders.reading == ["a", "b", "c"]


async def test_a_peer_calls_over_few_connections_at_once() -> None:
    """One more is refused, before its message is read; when one has no call any more, another takes its place."""
    reception = Reception(FEW)
    with reception.admit_call("eve", "1"), reception.admit_call("eve", "1"):
        with reception.admit_call("eve", "2"):
            with pytest.raises(Busy, match="eve calls over more than 2 connections"), reception.admit_call("eve", "3"):
                pass
            with reception.admit_call("west", "3"):
                pass
        with reception.admit_call("eve", "3"):
            pass
    assert reception._peers == {}, "nothing is kept of who has gone"


async def test_a_message_that_does_not_come_loses_its_place() -> None:
    """Whoever sends half of one holds no place for longer than a slow link needs."""
    reception = Reception(replace(FEW, message_s=0.0))
    async with asyncio.timeout(5.0):
        for _ in range(FEW.messages + 1):
            with reception.admit_call("eve", "1"), pytest.raises(RemoteProtocolError, match="within 0 s"):
                await reception.read_message("eve", asyncio.get_running_loop().create_future)
