"""Addresses in the configuration files."""

from __future__ import annotations

from ipaddress import ip_address

from dips.errors import ConfigError


def host_port(address: str) -> tuple[str, int]:
    """Split `host:port` (IPv6 hosts in brackets). Raises ConfigError for anything else."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"expected an address like 127.0.0.1:7800, got {address!r}")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Return whether `host` is `localhost` or a loopback address, so that traffic to it stays on this machine."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
