"""The keys of a daemon's HTTP port: probes, metrics, and on the master the page."""

from __future__ import annotations

from pathlib import Path

from pydantic import model_validator

from dips.config.section import Section


class HttpKeys(Section):
    """Of `master`, of each of `slaves`, and of the cluster file."""

    http: str | None = None  # host:port; null: nowhere. Off loopback it speaks TLS with the section `tls`
    http_token: Path | None = None  # file with the token of readers who have no certificate; null: none may read so

    @model_validator(mode="after")
    def _require_port(self) -> HttpKeys:
        if self.http_token is not None and self.http is None:
            raise ValueError("http_token: nothing is served without `http: HOST:PORT`")
        return self
