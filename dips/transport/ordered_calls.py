"""Calls of one method that reach a peer in the order in which they are made, and are answered in any order.

gRPC keeps no order between calls (of 100 that are made at once the ninth arrives as the fifteenth), and it reports the
arrival of a unary call only with its answer (`initial_metadata` of grpc.aio returns with the reply). Within a stream
order is kept, as in HTTP/2; so all calls of one connection are one stream, in which they are numbered. After a break
all calls without a reply are sent again, first on the next stream and in the same order. The peer must therefore
recognise repetitions; a reply to a withdrawn call is dropped.

The server's half is `answer_in_order`, which gate.py puts before a handler.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol, cast

from google.protobuf.message import Message
from grpc import ChannelConnectivity, StatusCode, aio

from dips.errors import Busy, DipsError, RemoteProtocolError, Unavailable, class_named
from dips.printable import make_printable
from dips.transport.endpoints import Endpoint
from dips.wire.generated.slave_pb2 import Answer, OrderError, OrderReply

RECONNECT_PAUSE_S = 0.1  # between the end of a stream and the next one
MOST_UNANSWERED = 4_096  # calls of one stream that a server processes at once; the next is read when one is answered
BROKEN = frozenset({StatusCode.OK, StatusCode.INTERNAL, StatusCode.UNKNOWN})  # of a write after its stream's end
MAX_WHY = 4_000  # characters of an error


class NobodyListens(Exception):
    """The peer's address refuses connections."""


class AnyCalls(Protocol):
    """Calls of one method of one peer: `OrderedCalls`, or the simulation's, whose messages may be lost."""

    async def ask(self, request: Message, *, needs_listener: bool = False) -> Answer: ...
    async def close(self) -> None: ...


@dataclass(eq=False, slots=True)
class _Call:
    request: Message
    reply: asyncio.Future[Answer]
    needs_listener: bool


class OrderedCalls:
    """Calls of one method of one peer; `open_stream` is the stub's method on `channel`.

    `to_error` converts the status of a failed stream: after Unavailable and Busy the next stream may succeed.
    """

    def __init__(
        self,
        channel: aio.Channel,
        open_stream: Callable[[], Any],
        peer: Endpoint,
        to_error: Callable[[aio.AioRpcError], DipsError],
    ) -> None:
        self._channel, self._open_stream, self._peer, self._to_error = channel, open_stream, peer, to_error
        self._waiting: dict[_Call, None] = {}  # calls without a reply, in the order in which they were made
        self._unsent: deque[_Call] = deque()
        self._news = asyncio.Event()  # a call was made, or the stream has ended
        self._refused = False  # the last attempt to connect was refused
        self._closed = False
        self._carrying: asyncio.Task[None] | None = None

    async def ask(self, request: Message, *, needs_listener: bool = False) -> Answer:
        """Return the reply, however many connections it takes; raise the peer's error.

        Cancelling withdraws the call. With `needs_listener` NobodyListens is raised as soon as the peer's address
        refuses connections.
        """
        if self._closed:
            raise self._closed_error()
        if needs_listener and self._refused:
            raise NobodyListens
        call = _Call(request, asyncio.get_running_loop().create_future(), needs_listener)
        self._waiting[call] = None
        self._unsent.append(call)
        self._news.set()
        if self._carrying is None or self._carrying.done():
            self._carrying = asyncio.create_task(self._carry_calls(), name=f"calls to {self._peer}")
        try:
            return await call.reply
        finally:
            self._waiting.pop(call, None)
            if not self._waiting:
                self._unsent.clear()  # while no connection stands nobody else takes withdrawn calls from there

    async def close(self) -> None:
        """Fail all calls, and those to come, with Unavailable; close the channel."""
        self._closed = True
        if self._carrying is not None:
            self._carrying.cancel()
            await asyncio.wait([self._carrying])
        self._fail_calls(self._waiting, self._closed_error())
        await self._channel.close()

    def _closed_error(self) -> Unavailable:
        return Unavailable(f"the connection to {self._peer} is closed")

    # ---- one stream after another ------------------------------------------------------------------------------------

    async def _carry_calls(self) -> None:
        try:
            while True:
                await self._until_asked()
                await self._connect()
                await self._use_stream()
                await asyncio.sleep(RECONNECT_PAUSE_S)
        except Exception as error:
            self._fail_calls(self._waiting, error)
            raise

    async def _until_asked(self) -> None:
        while not self._waiting:
            self._news.clear()
            await self._news.wait()

    async def _connect(self) -> None:
        """Return when the channel is connected; meanwhile calls that need a listener fail as soon as there is none."""
        while (state := self._channel.get_state(try_to_connect=True)) is not ChannelConnectivity.READY:
            if state is ChannelConnectivity.TRANSIENT_FAILURE:
                self._refused = True
                self._fail_calls((call for call in self._waiting if call.needs_listener), NobodyListens())
            await self._channel.wait_for_state_change(state)
        self._refused = False

    async def _use_stream(self) -> None:
        """Send waiting and new calls until the stream ends."""
        shown, stream = self._shown_certificate(), self._open_stream()
        sent: dict[int, _Call] = {}
        self._unsent = deque(self._waiting)
        reading = asyncio.create_task(self._take_replies(stream, sent))
        reading.add_done_callback(lambda _: self._news.set())
        try:
            places = count(1)
            while not reading.done() and self._shown_certificate() is shown:
                while self._unsent and not reading.done():
                    call = self._unsent.popleft()
                    if call in self._waiting:
                        place = next(places)
                        sent[place] = call
                        await stream.write(call.request)
                self._news.clear()
                if not reading.done():
                    await self._news.wait()
            if reading.done():
                reading.result()
        except (aio.AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError):
            if (task := asyncio.current_task()) and task.cancelling():
                raise
            await self._hear_end(stream)  # it is over, even if a closed channel has cancelled it
        finally:
            stream.cancel()
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)  # its status tells how the stream ended

    async def _take_replies(self, stream: Any, sent: dict[int, _Call]) -> None:
        while (reply := await stream.read()) is not aio.EOF:
            call = sent.pop(reply.place, None)
            if call is None:
                what = f"{self._peer} replied to {reply.place}, which was not asked on this stream"
                self._fail_calls(self._waiting, RemoteProtocolError(what))
                return
            if call.reply.done():
                continue  # it was withdrawn
            if reply.HasField("error"):
                call.reply.set_exception(_error_of(reply.error, self._peer))
            else:
                call.reply.set_result(reply.answer)
        await self._hear_end(stream)

    async def _hear_end(self, stream: Any) -> None:
        """Fail the waiting calls if the next stream would end for the same reason."""
        code = await stream.code()
        details, trailing = await stream.details(), await stream.trailing_metadata()
        error = self._to_error(aio.AioRpcError(code, aio.Metadata(), trailing, details))
        if code not in BROKEN and not isinstance(error, Unavailable | Busy):
            self._fail_calls(self._waiting, error)

    def _fail_calls(self, calls: Any, error: Exception) -> None:
        for call in list(calls):
            if not call.reply.done():
                call.reply.set_exception(error)

    def _shown_certificate(self) -> object:
        """Return our present certificate: a stream that was opened with another must not outlive it."""
        return self._peer.tls.read_current() if self._peer.tls is not None else None


def _error_of(told: OrderError, peer: Endpoint) -> DipsError:
    cls, why = class_named(told.error), make_printable(told.why)
    if cls is None:
        return RemoteProtocolError(f"{peer} answered {told.error[:64]!r}, which no Di-PS does: {why}")
    return cls(why or cls.__name__)


# ---- the server's half -----------------------------------------------------------------------------------------------


async def answer_in_order(
    requests: AsyncIterator[Any],
    context: aio.ServicerContext[Any, Any],
    answer: Callable[[Any], Awaitable[Any]],
) -> None:
    """Begin to answer each request when all before it have begun, and send each reply as soon as it is there.

    `answer` returns the reply or a DipsError; an exception of it ends the stream.
    """
    replies: asyncio.Queue[OrderReply | None] = asyncio.Queue()
    room = asyncio.Semaphore(MOST_UNANSWERED)

    async def answer_request(place: int, request: Any) -> None:
        result = await answer(request)
        replies.put_nowait(_reply_of(place, result))
        room.release()

    async def read_requests() -> None:
        places = count(1)
        async with asyncio.TaskGroup() as calls:  # tasks begin in the order in which they are created
            async for request in requests:
                await room.acquire()
                calls.create_task(answer_request(next(places), request))

    reading = asyncio.create_task(read_requests())
    reading.add_done_callback(lambda _: replies.put_nowait(None))
    try:
        while (reply := await replies.get()) is not None:
            await context.write(reply)
        await reading
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from group
    finally:
        reading.cancel()
        await asyncio.wait([reading])


def _reply_of(place: int, result: Message | DipsError) -> OrderReply:
    if isinstance(result, DipsError):
        return OrderReply(place=place, error=OrderError(error=_told_class(result), why=str(result)[:MAX_WHY]))
    return OrderReply(place=place, answer=cast(Answer, result))


def _told_class(error: DipsError) -> str:
    """Return the nearest class that the other end knows by name."""
    return next(cls.__name__ for cls in type(error).__mro__ if class_named(cls.__name__) is not None)
