"""What stands between processes: a TCP proxy that fails on demand, and behind it one that reads gRPC.

    client ══▶ Wire (bytes: hold, cut, delay, flip) ══▶ Interpreter (calls: lose the answer, hold at a gate) ══▶ server

A wire forwards until it is held or cut. Held, it takes no byte in that direction and loses none: what a network does
that drops packets, since TCP sends them again. Cut, it resets its connections; refusing, the new ones too. The
interpreter knows a call by its method and an order by its body; it carries answers and errors as they are. So a call
whose request was forwarded and carried out can lose its answer with the connection, at exactly that moment.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import grpc
from grpc import aio

from dips.transport import control
from dips.wire.generated.slave_pb2 import Order, OrderReply, SlaveRegistered
from tests.chaos.certificates import LineEnds

T = TypeVar("T")
BLOCK = 1 << 16
ORDERS = "/Execute"  # the method that is a stream
UP, DOWN = "up", "down"  # from client to server, and back


class Loop:
    """An event loop in a thread of its own; everything of this file lives on it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._helper = ThreadPoolExecutor(1)  # a handshake that explains a silence; here, since it outlives its test
        self._helper.submit(bool).result()
        self._loop.set_default_executor(self._helper)
        self._thread = threading.Thread(target=self._loop.run_forever, name="wires")
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], within_s: float = 20.0) -> T:
        """Do something on the loop and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(within_s)

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        self.run(_cancel_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._helper.shutdown()
        self._loop.close()


async def _cancel_all() -> None:
    tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Wire:
    """A TCP proxy from one port to another address."""

    def __init__(self, loop: Loop, listen: str, target: str) -> None:
        self.listen, self._target, self._loop = listen, target, loop
        self._gates: dict[str, asyncio.Event] = {}
        self._connections: set[asyncio.StreamWriter] = set()
        self._refusing = False
        self._delay_s = 0.0
        self._flip_every = 0  # bytes, 0: never
        self.flipped = self.connected = 0
        loop.run(self._open())

    # ---- what a test does, from its own thread ----------------------------------------------------------------------

    def hold(self, *ways: str) -> None:
        """Let no byte pass in these directions (both if none is named) until `heal`."""
        self._loop.run(self._set_gates(ways or (UP, DOWN), False))

    def cut(self, refuse: bool = False) -> None:
        """Reset every connection; `refuse`: the new ones too, until `heal`."""
        self._refusing = refuse
        self._loop.run(self.reset())

    def delay(self, seconds: float) -> None:
        """Every piece takes so much longer, each way."""
        self._delay_s = seconds

    def flip(self, every: int) -> None:
        """Turn one bit around every so many bytes that come from the client."""
        self._flip_every = every

    def heal(self) -> None:
        """Forward as ever."""
        self._refusing, self._delay_s, self._flip_every = False, 0.0, 0
        self._loop.run(self._set_gates((UP, DOWN), True))

    def close(self) -> None:
        self.heal()
        self._loop.run(self._close())

    # ---- on the loop -------------------------------------------------------------------------------------------------

    async def reset(self) -> None:
        for writer in list(self._connections):
            writer.transport.abort()

    async def _open(self) -> None:
        self._gates = {UP: asyncio.Event(), DOWN: asyncio.Event()}
        await self._set_gates((UP, DOWN), True)
        host, port = self.listen.rsplit(":", 1)
        self._server = await asyncio.start_server(self._serve, host, int(port), limit=BLOCK)

    async def _close(self) -> None:
        self._server.close()
        await self.reset()
        await self._server.wait_closed()

    async def _set_gates(self, ways: tuple[str, ...], opened: bool) -> None:
        for way in ways:
            self._gates[way].set() if opened else self._gates[way].clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        try:
            if not self._refusing:
                await self._join(reader, writer)
        except OSError:
            pass  # nobody listens behind us now: the client sees its connection end
        finally:
            self._connections.discard(writer)
            writer.transport.abort()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = self._target.rsplit(":", 1)
        far_reader, far_writer = await asyncio.open_connection(host, int(port), limit=BLOCK)
        self.connected += 1
        self._connections.add(far_writer)
        pumps = [
            asyncio.create_task(self._pump(reader, far_writer, UP)),
            asyncio.create_task(self._pump(far_reader, writer, DOWN)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            self._connections.discard(far_writer)
            far_writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str) -> None:
        passed = 0
        while data := await reader.read(BLOCK):
            if self._delay_s:
                await asyncio.sleep(self._delay_s)
            await self._gates[way].wait()
            if way == UP and self._flip_every:
                passed += len(data)
                if passed >= self._flip_every:
                    data, passed = self._flipped(data), 0
            writer.write(data)
            await writer.drain()
        writer.write_eof()

    def _flipped(self, data: bytes) -> bytes:
        self.flipped += 1
        at = len(data) // 2
        return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]


class Trap:
    """Waits for one call; what becomes of it is the test's to say."""

    def __init__(self, loop: Loop, kind: str, when: str, skip: int) -> None:
        """`when`: "before" the request is forwarded, or "after" the answer came and before it is handed on."""
        self.kind, self.when, self.skip = kind, when, skip
        self._loop, self._caught, self._word = loop, threading.Event(), loop.run(_future())

    def caught(self, within_s: float = 60.0) -> None:
        """Return when a call is held here."""
        assert self._caught.wait(within_s), f"no {self.kind} came within {within_s:g} s"

    def release(self, forward: bool = True) -> None:
        """Let it go on; not `forward`: the connection is reset, the request or the answer never arrives."""
        self._loop.run(self._say(forward))

    async def _say(self, forward: bool) -> None:
        if not self._word.done():
            self._word.set_result(forward)

    async def hold(self) -> bool:
        self._caught.set()
        return await asyncio.shield(self._word)


async def _future() -> asyncio.Future[bool]:
    return asyncio.get_running_loop().create_future()


class Interpreter:
    """A gRPC server that asks another one the same, byte for byte; `rename` puts our addresses into Register.

    With certificates it stands for the server towards the caller, and for the caller towards the server.
    """

    def __init__(
        self, loop: Loop, target: str, ends: LineEnds, rename: Callable[[SlaveRegistered], None] | None = None
    ) -> None:
        self._loop, self._target, self._ends, self._rename = loop, target, ends, rename
        self._traps: list[Trap] = []
        self.seen: dict[str, int] = {}
        self.wire: Wire | None = None  # in front of us; reset when an answer is lost
        self.port = loop.run(self._open())

    def trap(self, kind: str, when: str = "before", skip: int = 0) -> Trap:
        """Hold the next call of this method, or order of this body; `skip` lets so many of them pass first."""
        trap = Trap(self._loop, kind, when, skip)
        self._traps.append(trap)
        return trap

    def lose_answer(self, kind: str) -> Trap:
        """Forward the next such call, and reset the connection when its answer is here."""
        trap = self.trap(kind, "after")
        trap.release(forward=False)
        return trap

    def retarget(self, target: str) -> None:
        """Ask somebody else from now on."""
        self._loop.run(self._retarget(target))

    def close(self) -> None:
        for trap in self._traps:
            trap.release(forward=False)
        self._loop.run(self._close())

    async def _retarget(self, target: str) -> None:
        old, self._channel = self._channel, control.open_channel(self._ends.dial(target))
        await old.close()

    async def _open(self) -> int:
        self._channel = control.open_channel(self._ends.dial(self._target))
        self._server = aio.server(options=control._SERVER_OPTIONS)
        self._server.add_generic_rpc_handlers((_Everything(self._carry, self._carry_orders),))
        port = control.bind_server(self._server, "127.0.0.1:0", "interpreter", self._ends.guard)
        await self._server.start()
        return port

    async def _close(self) -> None:
        await self._server.stop(0)
        await self._channel.close()

    async def _carry(self, method: str, request: bytes, context: Any) -> bytes:
        kind = _kind(method, request)
        trap = await self._take_request(kind, context)
        if self._rename and kind == "Register":
            said = SlaveRegistered.FromString(request)
            self._rename(said)
            request = said.SerializeToString()
        answer = await self._asked(method, request, context)
        await self._take_answer(trap, context)
        return answer

    async def _take_request(self, kind: str, context: Any) -> Trap | None:
        """Count it, and hold it if it is trapped before it is forwarded; return its trap."""
        self.seen[kind] = self.seen.get(kind, 0) + 1
        trap = self._caught_by(kind)
        if trap and trap.when == "before" and not await trap.hold():
            await self._lose(context)
        return trap

    async def _take_answer(self, trap: Trap | None, context: Any) -> None:
        if trap and trap.when == "after" and not await trap.hold():
            await self._lose(context)

    async def _carry_orders(self, method: str, requests: AsyncIterator[bytes], context: Any) -> None:
        """A stream of orders: each is a call of its own. One that is held here holds none of those behind it."""
        stream = self._channel.stream_stream(method)()
        sending, replying = asyncio.Lock(), asyncio.Lock()
        asked: dict[int, tuple[int, Trap | None]] = {}  # by place there: place here

        async def send_order(place: int, request: bytes) -> None:
            async with sending:  # in their order, but for what is held
                kind = _kind(method, request)
                held = any(trap.kind == kind and trap.when == "before" and not trap.skip for trap in self._traps)
                if not held:
                    await forward(place, request, await self._take_request(kind, context))
            if held:
                trap = await self._take_request(kind, context)
                async with sending:
                    await forward(place, request, trap)

        async def forward(place: int, request: bytes, trap: Trap | None) -> None:
            asked[len(asked) + 1] = place, trap
            await stream.write(request)

        async def send_reply(reply: OrderReply) -> None:
            reply.place, trap = asked[reply.place]
            await self._take_answer(trap, context)
            async with replying:
                await _finish(context.write(reply.SerializeToString()))

        async def read_orders() -> None:
            place = 0
            async for request in requests:
                place += 1
                tasks.create_task(send_order(place, request))
            raise _StreamEnded

        async def read_replies() -> None:
            while (reply := await stream.read()) is not aio.EOF:
                tasks.create_task(send_reply(OrderReply.FromString(reply)))
            raise _StreamEnded

        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(read_orders())
                tasks.create_task(read_replies())
        except* (_StreamEnded, aio.AioRpcError, aio.AbortError, aio.UsageError, asyncio.InvalidStateError):
            pass
        finally:
            stream.cancel()
        with suppress(aio.AbortError, aio.UsageError):  # it may have been aborted by who lost an answer
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the line leads elsewhere now")

    def _caught_by(self, kind: str) -> Trap | None:
        for trap in self._traps:
            if trap.kind == kind:
                if trap.skip:
                    trap.skip -= 1
                    return None
                self._traps.remove(trap)
                return trap
        return None

    async def _asked(self, method: str, request: bytes, context: Any) -> bytes:
        call = self._channel.unary_unary(method)(request, timeout=context.time_remaining())
        try:
            answer: bytes = await call
        except aio.AioRpcError as error:
            await context.abort(error.code(), error.details() or "", tuple(error.trailing_metadata() or ()))
            raise
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) and task.cancelling():
                raise
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the line leads elsewhere now")  # retarget closed it
            raise
        return answer

    async def _lose(self, context: Any) -> None:
        """The connection breaks; the caller sees no answer, only its end."""
        assert self.wire is not None
        await self.wire.reset()
        await context.abort(grpc.StatusCode.UNAVAILABLE, "nobody reads this: the connection is reset")


class _StreamEnded(Exception):
    """One end of a stream of orders has gone."""


async def _finish(writing: Coroutine[Any, Any, None]) -> None:
    """Write to the end even if cancelled: gRPC cannot abort a call during a write, and leaves it open."""
    task = asyncio.ensure_future(writing)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


class _Everything(grpc.GenericRpcHandler):  # type: ignore[misc, unused-ignore]
    def __init__(
        self,
        carry: Callable[[str, bytes, Any], Coroutine[Any, Any, bytes]],
        carry_orders: Callable[[str, AsyncIterator[bytes], Any], Coroutine[Any, Any, None]],
    ) -> None:
        self._carry, self._carry_orders = carry, carry_orders

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        method = details.method

        async def stream(requests: AsyncIterator[bytes], context: Any) -> None:
            await self._carry_orders(method, requests, context)

        if method.endswith(ORDERS):
            return grpc.stream_stream_rpc_method_handler(stream)

        async def handler(request: bytes, context: Any) -> bytes:
            return await self._carry(method, request, context)

        return grpc.unary_unary_rpc_method_handler(handler)


def _kind(method: str, request: bytes) -> str:
    """ "FinishPush", "Register", … or the body of an order: "apply", "commit", …"""
    name = method.rsplit("/", 1)[1]
    return str(Order.FromString(request).WhichOneof("body")) if method.endswith(ORDERS) else name


class CutLine:
    """A wire with an interpreter behind it: what a peer dials instead of a gRPC server."""

    def __init__(
        self,
        loop: Loop,
        listen: str,
        target: str,
        ends: LineEnds,
        rename: Callable[[SlaveRegistered], None] | None = None,
    ) -> None:
        self.calls = Interpreter(loop, target, ends, rename)
        self.wire = self.calls.wire = Wire(loop, listen, f"127.0.0.1:{self.calls.port}")

    def close(self) -> None:
        self.wire.close()
        self.calls.close()
