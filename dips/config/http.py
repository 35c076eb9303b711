"""The keys of a daemon's HTTP port, which serves probes, metrics, and on the master the page."""

from __future__ import annotations

from pathlib import Path

from dips.config.section import Section


class HttpKey(Section):
    """The address of the HTTP port: a key of `master`, of each of `slaves`, and of the cluster file."""

    http: str | None = None  # host:port; null: no port. Off loopback it uses TLS by the key `tls`


class HttpTokenKey(Section):
    """The token of those who read HTTP ports without a certificate: a key of both files."""

    http_token: Path | None = None  # the file with it; null: certificates only
