"""The base class, the common types and the small sections of the configuration files."""

from __future__ import annotations

import re
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from dips.codecs import PULL_CODECS, Codec
from dips.errors import ConfigError
from dips.identity.names import PeerRole
from dips.identity.paths import TlsFiles

# ---- section --------------------------------------------------------------------------------------------------------


STALL_HEARTBEATS = 15  # who owes bytes and is silent for so long has stalled, at both ends of a lane: 30 s by default


def _require_updates(codec: Codec) -> Codec:
    if codec not in PULL_CODECS:
        raise ValueError(f"expected one of {', '.join(PULL_CODECS)}: {codec} is for pushes only")
    return codec


PullCodec = Annotated[Codec, AfterValidator(_require_updates)]
LogLevel = Literal["debug", "info", "warning", "error"]


class Section(BaseModel):
    """A mapping in a configuration file; unknown keys are rejected by name."""

    model_config = ConfigDict(extra="forbid", frozen=True)


# ---- addresses ------------------------------------------------------------------------------------------------------


def host_port(address: str) -> tuple[str, int]:
    """Split `host:port` (IPv6 hosts in brackets). Raises ConfigError for anything else."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535:  # `²` is a digit for Python
        raise ConfigError(f"expected an address like 127.0.0.1:7800, got {address!r}")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Return whether `host` is `localhost` or a loopback address, so that traffic to it stays on this machine."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


# ---- http -----------------------------------------------------------------------------------------------------------


class HttpKey(Section):
    """The address of the HTTP port: a key of `master`, of each of `slaves`, and of the cluster file."""

    http: str | None = None  # host:port; null: no port. Off loopback it uses TLS by the key `tls`


class HttpTokenKey(Section):
    """The token of those who read HTTP ports without a certificate: a key of both files."""

    http_token: Path | None = None  # the file with it; null: certificates only


# ---- tls ------------------------------------------------------------------------------------------------------------


CERTIFICATE = ".crt"


def _read_certificate(value: Any) -> Any:
    """Return the path of a certificate, or False for `tls: off`, as YAML reads it; refuse everything else."""
    if value is False or (isinstance(value, str | Path) and str(value).endswith(CERTIFICATE)):
        return value
    raise ValueError(
        "expected the path of a certificate, as in `tls: certs/{name}.{role}.crt` (`dips certs` makes them), or "
        "`tls: off` for plain text on loopback"
    )


class TlsKey(Section):
    """The key `tls`: the certificate of a process, or plain text. Required, so that plain text is never a default."""

    # `{name}` and `{role}` are those of the process; its key, ca.crt and crl.pem lie beside its certificate (TlsFiles).
    tls: Annotated[Path | Literal[False], BeforeValidator(_read_certificate)] = Field(None, validate_default=True)

    def tls_files(self, name: str, role: PeerRole) -> TlsFiles | None:
        """Return the certificate files of a process; None: plain text."""
        return TlsFiles.of(self.tls, name, role) if self.tls else None
