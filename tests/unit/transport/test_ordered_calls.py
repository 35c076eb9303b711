"""Streams of calls that end in the middle: what waits is sent again, and nothing is left unheard."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

import pytest
from grpc import ChannelConnectivity, StatusCode, aio

from dips.errors import Denied, DipsError, RemoteProtocolError, UnavailableSlave
from dips.transport import ordered_calls
from dips.transport.endpoints import slave_peer
from dips.transport.ordered_calls import OrderedCalls, answer_in_order
from dips.wire.generated.slave_pb2 import Answer, Done, Order, OrderReply


class ReadyChannel:
    """A connection that stands until it is closed."""

    closed = False

    def get_state(self, try_to_connect: bool = False) -> ChannelConnectivity:
        return ChannelConnectivity.READY

    async def close(self) -> None:
        self.closed = True


class ScriptedStream:
    """Replies to what is written; with `broken` it is over, as a write finds first; with `refused` it only ends."""

    cancelled = False

    def __init__(self, broken: bool = False, place: int = 1, refused: bool = False) -> None:
        self._broken, self._place, self._refused, self._asked = broken, place, refused, asyncio.Event()

    async def write(self, request: Order) -> None:
        if self._broken:
            await asyncio.sleep(0)  # the reader has begun
            raise asyncio.InvalidStateError("the call is over")
        self._asked.set()

    async def read(self) -> Any:
        if self._broken:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:  # as grpc.aio does, whose calls end by their own status
                error = aio.AioRpcError(StatusCode.UNAVAILABLE, aio.Metadata(), aio.Metadata(), "reset")
                raise error from None
        await self._asked.wait()
        self._asked.clear()
        if self._refused:
            return aio.EOF
        return OrderReply(place=self._place, answer=Answer(done=Done()))

    async def code(self) -> StatusCode:
        if self._refused:
            return StatusCode.PERMISSION_DENIED
        return StatusCode.UNAVAILABLE if self._broken else StatusCode.OK

    async def details(self) -> str:
        return "reset"

    async def trailing_metadata(self) -> aio.Metadata:
        return aio.Metadata()

    def cancel(self) -> None:
        self.cancelled = True


def calls_on(*streams: ScriptedStream) -> OrderedCalls:
    return calls_by(ReadyChannel(), list(streams))


def calls_by(channel: Any, left: list[ScriptedStream]) -> OrderedCalls:
    """Each stream is taken from `left` when it is opened."""
    return OrderedCalls(channel, lambda: left.pop(0), slave_peer("s", "127.0.0.1:1", None), _to_error)


def _to_error(error: aio.AioRpcError) -> DipsError:
    return (Denied if error.code() is StatusCode.PERMISSION_DENIED else UnavailableSlave)(error.details())


async def test_a_stream_that_breaks_is_replaced_without_a_word() -> None:
    """The call goes out on the next one; no task's exception is left for nobody."""
    unheard = list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unheard.append(context))
    calls = calls_on(ScriptedStream(broken=True), ScriptedStream())
    async with asyncio.timeout(20):
        assert (await calls.ask(Order())).HasField("done")
    await calls.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    gc.collect()
    await asyncio.sleep(0)
    assert unheard == []


class AwayChannel(ReadyChannel):
    """A connection that is never there."""

    def get_state(self, try_to_connect: bool = False) -> ChannelConnectivity:
        return ChannelConnectivity.CONNECTING

    async def wait_for_state_change(self, last: ChannelConnectivity) -> None:
        await asyncio.Event().wait()


async def test_what_is_withdrawn_while_the_peer_is_away_is_forgotten() -> None:
    """A slave that registers and is not reached is sent a Ping every ten seconds: each was kept, for weeks."""
    calls = calls_by(AwayChannel(), [])
    for _ in range(3):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.0):
                await calls.ask(Order())
    assert not calls._unsent
    await calls.close()


async def test_a_reply_to_nothing_is_the_peers_fault() -> None:
    """Who waits is told so, and the next call finds a new stream."""
    calls = calls_on(ScriptedStream(place=7), ScriptedStream())
    async with asyncio.timeout(20):
        with pytest.raises(RemoteProtocolError, match="replied to 7, which was not asked"):
            await calls.ask(Order())
        assert (await calls.ask(Order())).HasField("done")
    await calls.close()


async def test_no_stream_is_opened_while_nobody_asks() -> None:
    """One has ended with the call that it carried: the peer is left alone until the next call, and after the end."""
    channel, last = ReadyChannel(), ScriptedStream()
    calls = calls_by(channel, left := [ScriptedStream(place=7), last])
    async with asyncio.timeout(20):
        with pytest.raises(RemoteProtocolError):
            await calls.ask(Order())
        await asyncio.sleep(2 * ordered_calls.RECONNECT_PAUSE_S)
        assert len(left) == 1
        assert (await calls.ask(Order())).HasField("done") and not left
    assert not channel.closed and not last.cancelled
    await calls.close()
    assert channel.closed and last.cancelled, "a server learns that its caller is gone"


async def test_streams_that_break_at_once_follow_each_other_with_a_pause() -> None:
    """A peer that is falling over is not flooded with connections meanwhile."""
    left = [ScriptedStream(broken=True) for _ in range(99)]
    calls = calls_by(ReadyChannel(), left)
    asking = asyncio.create_task(calls.ask(Order()))
    await asyncio.sleep(2.5 * ordered_calls.RECONNECT_PAUSE_S)
    assert 96 <= len(left) < 99
    asking.cancel()
    await calls.close()


@pytest.mark.parametrize("broken", [False, True])
async def test_a_stream_that_is_refused_fails_who_waits(broken: bool) -> None:
    """The next one would be refused as well: the caller hears why, instead of waiting while streams come and go; also
    if it is a write that finds the stream over.
    """
    calls = calls_on(*(ScriptedStream(broken, refused=True) for _ in range(9)))
    async with asyncio.timeout(20):
        with pytest.raises(Denied):
            await calls.ask(Order())
    await calls.close()


async def test_a_bug_fails_who_waits() -> None:
    """And the next call begins anew: nobody waits for a stream that is carried no more."""
    calls = calls_on()
    async with asyncio.timeout(20):
        for _ in range(2):
            with pytest.raises(IndexError):
                await calls.ask(Order())
    await calls.close()


async def test_a_server_begins_no_more_calls_than_it_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next is read when one is answered: a peer that asks without end fills no memory."""
    monkeypatch.setattr(ordered_calls, "MOST_UNANSWERED", 2)
    begun, replies, may_end = list[int](), list[Any](), asyncio.Semaphore(0)

    async def requests() -> AsyncIterator[int]:
        for number in range(5):
            yield number

    async def answer(request: int) -> Answer:
        begun.append(request)
        await may_end.acquire()
        return Answer(done=Done())

    class Caller:
        async def write(self, reply: Any) -> None:
            replies.append(reply)

    caller: Any = Caller()
    async with asyncio.timeout(20):
        serving = asyncio.create_task(answer_in_order(requests(), caller, answer))
        for answered in range(4):
            while len(replies) < answered or len(begun) < min(5, answered + 2):
                await asyncio.sleep(0)
            for _ in range(9):
                await asyncio.sleep(0)
            assert len(begun) == min(5, answered + 2)
            may_end.release()
        may_end.release()
        await serving
    assert len(replies) == 5


async def test_what_a_caller_asked_ends_when_it_is_gone() -> None:
    """A reply that cannot be written ends the others' answers, too: nobody would hear them."""

    async def requests() -> AsyncIterator[int]:
        for number in range(3):
            yield number
        await asyncio.Event().wait()

    async def answer(request: int) -> Answer:
        if request:
            await asyncio.Event().wait()
        return Answer(done=Done())

    class GoneCaller:
        async def write(self, reply: Any) -> None:
            raise ConnectionResetError("it is gone")

    caller: Any = GoneCaller()
    async with asyncio.timeout(20):
        with pytest.raises(ConnectionResetError):
            await answer_in_order(requests(), caller, answer)
    assert asyncio.all_tasks() == {asyncio.current_task()}
