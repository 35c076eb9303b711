"""The keys of a daemon's HTTP port, which serves probes, metrics, and on the master the page."""

from __future__ import annotations

from pathlib import Path

from pydantic import model_validator

from dips.config.section import Section


class HttpKeys(Section):
    """The HTTP keys of `master`, of each of `slaves`, and of the cluster file."""

    http: str | None = None  # host:port; null: no port. Off loopback it uses TLS by the key `tls`
    http_token: Path | None = None  # file with the token of readers without a certificate; null: certificates only

    @model_validator(mode="after")
    def _require_port(self) -> HttpKeys:
        if self.http_token is not None and self.http is None:
            raise ValueError("http_token: nothing is served without `http: HOST:PORT`")
        return self
