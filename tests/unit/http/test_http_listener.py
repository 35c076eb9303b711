"""The HTTP port's listener."""

from __future__ import annotations

import asyncio
import socket
import time

from dips.http.daemon import WAKE_S, LoopWatch
from dips.http.server import bind_socket


def test_a_daemon_that_starts_again_has_its_port_at_once() -> None:
    """Connections that it closed itself hold the port for a minute (TIME_WAIT), and Prometheus has such."""
    listener = bind_socket("127.0.0.1", 0)
    host, port = listener.getsockname()
    with listener, socket.create_connection((host, port)) as scraper:
        listener.setblocking(True)
        listener.accept()[0].close()  # first to close is who waits
        assert scraper.recv(1) == b""
    bind_socket(host, port).close()


async def test_a_loop_that_is_held_up_shows_it() -> None:
    """By as much as its next turn comes late."""
    watch = LoopWatch()
    await asyncio.sleep(0)
    time.sleep(WAKE_S + 0.2)
    await asyncio.sleep(0.01)
    assert 0.2 <= watch.lag.total < 10
    await watch.stop_watching()
