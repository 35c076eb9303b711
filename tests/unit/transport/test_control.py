"""Channels to peers whose certificate, or address, changes."""

from __future__ import annotations

import asyncio
import gc
import weakref
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from grpc import ChannelConnectivity, aio

from dips.identity.names import PeerRole
from dips.identity.tls_files import LoadedTls
from dips.transport import control
from dips.transport.control import RenewingChannel
from dips.transport.tls import TlsSource, make_server_credentials
from tests.enrolled import Enrolled
from tests.open_files import list_open_files
from tests.waiting import eventually

LOADED = cast(LoadedTls, object())


class Source:
    loaded = LOADED

    def read_current(self) -> LoadedTls:
        return self.loaded


class Opened:
    """A channel in a state that the test sets."""

    def __init__(self, state: ChannelConnectivity) -> None:
        self.state, self.closed = state, False

    def get_state(self, try_to_connect: bool = False) -> ChannelConnectivity:
        return self.state

    async def wait_for_state_change(self, last: ChannelConnectivity) -> None:
        await asyncio.Event().wait()

    async def close(self, grace: float | None = None) -> None:
        self.closed = True


async def test_a_channel_that_finds_nobody_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC looks up a name that is not there ever more seldom: a pod that was away for a minute was found half a minute
    after it had come back, when the leases of all clusters had run out.
    """
    lost, fine, now = ChannelConnectivity.TRANSIENT_FAILURE, ChannelConnectivity.READY, [0.0]
    left = [first := Opened(lost), second := Opened(fine)]
    open_next = cast(Any, lambda loaded: left.pop(0))
    channel = RenewingChannel(cast(TlsSource, Source()), open_next, lambda: now[0])
    for now[0] in (0.0, control.REDIAL_S - 0.1):
        assert channel.get_state() is lost
    now[0] = control.REDIAL_S
    assert channel.get_state() is fine
    await asyncio.sleep(0)
    assert first.closed, "its calls have failed"
    now[0] = 1e6
    assert channel.get_state() is fine and not second.closed
    second.state = lost
    now[0] += control.REDIAL_S - 0.1
    assert channel.get_state() is lost, "it had not failed before"
    second.state = fine
    monkeypatch.setattr(control, "REDIAL_S", 0.01)
    await channel.wait_for_state_change(fine)  # whoever waits looks again


def list_sockets() -> set[tuple[int, str]]:
    return {opened for opened in list_open_files() if opened[1].startswith("socket:")}


@pytest.mark.parametrize("withdrawn", [True, False])
async def test_a_channel_that_is_closed_leaves_no_former_connection(withdrawn: bool) -> None:
    """A call was open when the certificate was renewed: its connection stayed, and pinged its peer, until the process
    ended, also if whoever closed had withdrawn the call, and the call until its deadline if not.
    """
    begun, source = asyncio.Event(), Source()

    async def answer_never(request: bytes, context: Any) -> bytes:
        begun.set()
        await asyncio.Event().wait()
        return b""

    server, handler = aio.server(), grpc.unary_unary_rpc_method_handler(cast(Any, answer_never))
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("it", {"Ask": handler})])
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    before, own = list_sockets(), [("grpc.use_local_subchannel_pool", 1)]

    async def close_under_way() -> grpc.StatusCode:
        channel = RenewingChannel(cast(TlsSource, source), lambda _: aio.insecure_channel(address, options=own))
        asking = channel.unary_unary("/it/Ask")(b"", timeout=60.0)
        await begun.wait()
        source.loaded = cast(LoadedTls, object())
        channel.get_state()
        await asyncio.sleep(0)
        if withdrawn:
            asking.cancel()
        await channel.close()
        assert not channel._closing and channel.get_state() is ChannelConnectivity.SHUTDOWN
        return cast(grpc.StatusCode, await asking.code())

    async with asyncio.timeout(20.0):
        assert await close_under_way() is grpc.StatusCode.CANCELLED
        gc.collect()
        await eventually(lambda: not list_sockets() - before)
    await server.stop(None)


def test_a_server_that_ends_may_still_be_asked_for_its_certificate(tmp_path: Path) -> None:
    """gRPC's core asks through a bare pointer for whoever connects in that moment: a process whose server had ended
    died by SIGSEGV, one in twenty under load.
    """

    def note_handshake() -> None: ...

    called = weakref.ref(note_handshake)
    files = Enrolled(tmp_path).enroll("s0", PeerRole.SLAVE)
    make_server_credentials(TlsSource(files, "s0", PeerRole.SLAVE, "july", pytest.fail), note_handshake)
    del note_handshake
    gc.collect()
    assert called() is not None
