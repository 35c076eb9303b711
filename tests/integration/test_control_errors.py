"""Errors cross the control flow by class: what a handler raises, its caller raises."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from dips import errors
from dips.errors import Busy, ConfigError, DipsError, LocalProtocolError, RemoteProtocolError, UnavailableMaster
from dips.master.runtime import dial_slave
from dips.transport import control
from dips.transport.endpoints import master_peer
from dips.wire.generated import slave_pb2, slave_pb2_grpc, status_pb2, status_pb2_grpc

Handler = Callable[[], Awaitable[str]]


class Servicer(status_pb2_grpc.StatusServiceServicer):
    def __init__(self, handler: Handler) -> None:
        self.handler = handler

    async def Status(self, request: Any, context: Any) -> status_pb2.StatusReply:  # type: ignore[override]
        return status_pb2.StatusReply(json=await self.handler())


async def ask(handler: Handler, deadline_s: float = 5.0, reports: list[str] | None = None) -> str:
    """Serve one handler on a free port, ask it once, and stop."""
    said = [] if reports is None else reports
    server = control.make_server(lambda method, error: said.append(f"{method}: {error!r}"))
    status_pb2_grpc.add_StatusServiceServicer_to_server(Servicer(handler), server)
    port = control.bind_server(server, "127.0.0.1:0", "master.listen")
    await server.start()
    try:
        async with control.open_channel(master_peer(f"127.0.0.1:{port}", None)) as channel:
            return await status_of(channel, deadline_s)
    finally:
        await server.stop(None)


async def status_of(channel: Any, deadline_s: float) -> str:
    stub = status_pb2_grpc.StatusServiceStub(channel)
    reply = await control.call_method(
        stub.Status,
        status_pb2.StatusRequest(),
        deadline_s=deadline_s,
        peer="the master",
        unavailable=UnavailableMaster,
    )
    return reply.json


def raising(error: Exception) -> Handler:
    async def handler() -> str:
        raise error

    return handler


ALL = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, DipsError)]


@pytest.mark.parametrize("cls", ALL, ids=lambda c: c.__name__)
def test_every_class_crosses(cls: type[DipsError]) -> None:
    """Each error of the table is raised at the other end as itself, with its message."""
    with pytest.raises(cls, match="expected 3, got 4 of röck") as caught:
        asyncio.run(ask(raising(cls("expected 3, got 4 of röck"))))
    assert type(caught.value) is cls


def test_a_bug_of_the_server_is_reported_and_named() -> None:
    """An unexpected exception goes to the server's log, and to the caller as a bug of that method."""
    reports: list[str] = []
    with pytest.raises(LocalProtocolError, match="Status: KeyError"):
        asyncio.run(ask(raising(KeyError("x")), reports=reports))
    assert reports == ["/dips.v1.StatusService/Status: KeyError('x')"]


async def test_a_bug_of_one_call_of_a_stream_is_reported_and_named() -> None:
    """The next call of the stream is answered."""

    class Orders(slave_pb2_grpc.OrderServiceServicer):
        async def Execute(self, request: Any, context: Any) -> slave_pb2.Answer:  # type: ignore[override]
            return {7: slave_pb2.Answer(done=slave_pb2.Done())}[request.number]

    reports = list[str]()
    server = control.make_server(lambda method, error: reports.append(f"{method}: {error!r}"))
    slave_pb2_grpc.add_OrderServiceServicer_to_server(Orders(), server)
    port = control.bind_server(server, "127.0.0.1:0", "slaves.s0.listen")
    await server.start()
    calls = dial_slave("s0", f"127.0.0.1:{port}")
    with pytest.raises(LocalProtocolError, match="KeyError: 6"):
        await asyncio.wait_for(calls.ask(slave_pb2.Order(number=6)), 20)
    assert (await asyncio.wait_for(calls.ask(slave_pb2.Order(number=7)), 20)).HasField("done")
    await calls.close()
    await server.stop(None)
    assert reports == ["/dips.v1.OrderService/Execute: KeyError(6)"]


def test_a_long_message_is_cut_not_lost() -> None:
    """A message longer than a header may be still arrives as its class."""
    with pytest.raises(errors.Busy, match=r"^x{4000}$"):
        asyncio.run(ask(raising(errors.Busy("x" * 100_000))))


def test_a_deadline_is_unavailability() -> None:
    """A peer that is there and does not answer in time is unavailable, with the seconds that were waited."""

    async def never() -> str:
        await asyncio.Event().wait()
        return ""

    with pytest.raises(UnavailableMaster, match=r"did not answer within 0\.2 s"):
        asyncio.run(ask(never, deadline_s=0.2))


def test_nobody_there_is_unavailability() -> None:
    """A closed port is reported as the peer that cannot be reached, within the deadline."""

    async def knock() -> str:
        server = control.make_server(lambda method, error: None)
        port = control.bind_server(server, "127.0.0.1:0", "master.listen")
        await server.start()  # a server that never started keeps its socket
        await server.stop(None)
        async with control.open_channel(master_peer(f"127.0.0.1:{port}", None)) as channel:
            return await status_of(channel, 5.0)

    with pytest.raises(UnavailableMaster, match="the master cannot be reached"):
        asyncio.run(knock())


def test_a_message_too_big_is_refused() -> None:
    """A peer that sends more than MAX_MESSAGE_BYTES breaks the protocol; the bytes are never held."""

    async def huge() -> str:
        return "x" * (control.MAX_MESSAGE_BYTES + 1)

    with pytest.raises(RemoteProtocolError, match="larger than max"):
        asyncio.run(ask(huge))


def test_a_port_in_use_names_the_key() -> None:
    """The second server on a port refuses to start and says which key to mend; it does not share the port."""

    async def twice() -> None:
        first, second = control.make_server(lambda m, e: None), control.make_server(lambda m, e: None)
        port = control.bind_server(first, "127.0.0.1:0", "master.listen")
        await first.start()
        try:
            control.bind_server(second, f"127.0.0.1:{port}", "master.listen")
        finally:
            await first.stop(None)
            await second.stop(None)

    with pytest.raises(ConfigError, match=r"master\.listen: cannot listen on 127\.0\.0\.1"):
        asyncio.run(twice())


async def test_more_calls_than_a_server_takes_at_once_are_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC's own limit comes without a class of ours: whoever is told waits, and does not end for it."""
    monkeypatch.setattr(control, "MAX_CONCURRENT_CALLS", 1)
    asked, answer = asyncio.Event(), asyncio.Event()

    async def answer_later() -> str:
        asked.set()
        await answer.wait()
        return "{}"

    server = control.make_server(lambda method, error: pytest.fail(f"{method}: {error!r}"))
    status_pb2_grpc.add_StatusServiceServicer_to_server(Servicer(answer_later), server)
    port = control.bind_server(server, "127.0.0.1:0", "master.listen")
    await server.start()
    try:
        async with control.open_channel(master_peer(f"127.0.0.1:{port}", None)) as channel:
            first = asyncio.create_task(status_of(channel, 5.0))
            await asked.wait()
            with pytest.raises(Busy, match="limit exceeded"):
                await status_of(channel, 5.0)
            answer.set()
            assert await first == "{}"
    finally:
        await server.stop(None)
