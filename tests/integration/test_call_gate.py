"""A server's gate on a real port: size of a method, rate of a peer, unknown methods; each counted by its reason."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from dips.errors import Busy, RemoteProtocolError, UnavailableMaster
from dips.telemetry.refusals import refusals_by_reason
from dips.transport import control
from dips.transport.endpoints import master_peer
from dips.transport.limits import MASTER_LIMITS, MIB, ServerLimits
from dips.wire.generated import cluster_pb2
from dips.wire.generated.cluster_pb2_grpc import ClusterServiceStub
from dips.wire.generated.cluster_pb2_grpc import add_ClusterServiceServicer_to_server as add_clusters
from tests.integration.test_mutual_tls import Clusters


@asynccontextmanager
async def gated(limits: ServerLimits) -> AsyncIterator[tuple[Any, aio.Channel]]:
    """A server with these limits, and what asks it for a Join of so many bytes."""
    server = control.make_server(lambda method, error: pytest.fail(f"{method}: {error!r}"), None, limits)
    add_clusters(Clusters(), server)
    peer = master_peer(f"127.0.0.1:{control.bind_server(server, '127.0.0.1:0', 'master.listen')}", None)
    await server.start()
    channel = control.open_channel(peer)

    async def join(nbytes: int = 0) -> Any:
        asked = cluster_pb2.ClusterJoined(cluster="west", nonce="x" * nbytes)
        method = ClusterServiceStub(channel).Join
        return await control.call_method(method, asked, deadline_s=10.0, peer=peer, unavailable=UnavailableMaster)

    join.address = peer.address  # type: ignore[attr-defined]
    yield join, channel
    await channel.close()
    await server.stop(0)


@asynccontextmanager
async def gated_stranger(join: Any) -> AsyncIterator[aio.Channel]:
    """Another connection to the same server: without certificates another peer."""
    async with aio.insecure_channel(join.address) as channel:
        yield channel


def counted(reason: str) -> int:
    return refusals_by_reason().get(reason, 0)


async def test_a_question_that_is_too_large() -> None:
    """1 MiB for every method: what is larger does not even reach us."""
    before = counted("unheard")
    async with gated(MASTER_LIMITS) as (join, _):
        assert await join(MIB - 100)
        with pytest.raises(RemoteProtocolError, match="larger than max"):
            await join(MIB)
        assert await join()
    assert counted("unheard") == before + 1


async def test_what_is_no_message() -> None:
    """Its sender is told, and it is counted as what a peer says wrongly."""
    before = counted("remote_protocol")
    async with gated(MASTER_LIMITS) as (join, channel):
        with pytest.raises(aio.AioRpcError, match="9 bytes came that are no message of it") as raised:
            await channel.unary_unary("/dips.v1.ClusterService/Join")(b"\xff" * 9, timeout=10.0)
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert await join()
    assert counted("remote_protocol") == before + 1


async def test_messages_that_never_come_hold_up_nobody() -> None:
    """A peer's calls wait for its own places: another's is answered beside them."""
    async with (
        gated(replace(MASTER_LIMITS, peer_messages=2, messages=3)) as (join, _),
        gated_stranger(join) as stranger,
    ):
        silent = [stranger.stream_unary("/dips.v1.ClusterService/Join")() for _ in range(5)]
        for call in silent:
            await call.wait_for_connection()
        assert await join()
        for call in silent:
            call.cancel()


async def test_calls_that_come_too_fast() -> None:
    """They are told to wait, which agents and slaves do; a moment later the next one passes."""
    before = counted("rate")
    async with gated(replace(MASTER_LIMITS, peer_calls_per_s=0.001, peer_calls_at_once=3.0)) as (join, _):
        for _ in range(3):
            await join()
        with pytest.raises(Busy, match=r"127.0.0.1:\d+ makes more than 0.001 calls a second: wait and ask again"):
            await join()
    assert counted("rate") == before + 1


async def test_a_method_that_is_not_served() -> None:
    before = counted("unknown_method")
    async with gated(MASTER_LIMITS) as (_, channel):
        with pytest.raises(aio.AioRpcError) as raised:
            await channel.unary_unary("/dips.v1.ClusterService/Shutdown")(b"", timeout=10.0)
        assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert counted("unknown_method") == before + 1


async def test_a_health_check_is_answered_and_no_watch() -> None:
    """A stream of answers for one question is of a kind that no method here has: nobody holds one open."""
    server = control.make_server(lambda method, error: pytest.fail(f"{method}: {error!r}"), None, MASTER_LIMITS)
    await control.serve_health(server, ("",))
    port = control.bind_server(server, "127.0.0.1:0", "master.listen")
    await server.start()
    async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(aio.AioRpcError, match="UNIMPLEMENTED"):
            await stub.Watch(health_pb2.HealthCheckRequest()).read()
    await server.stop(0)
