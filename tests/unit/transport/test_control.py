"""Channels to peers whose certificate, or address, changes."""

from __future__ import annotations

import asyncio
import gc
import weakref
from pathlib import Path
from typing import Any, cast

import pytest
from grpc import ChannelConnectivity

from dips.identity.names import PeerRole
from dips.identity.tls_files import LoadedTls
from dips.transport import control
from dips.transport.control import RenewingChannel
from dips.transport.tls import TlsSource, make_server_credentials
from tests.enrolled import Enrolled

LOADED = cast(LoadedTls, object())


class Source:
    def read_current(self) -> LoadedTls:
        return LOADED


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
