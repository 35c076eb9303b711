"""The HTTP port's listener."""

from __future__ import annotations

import socket

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
