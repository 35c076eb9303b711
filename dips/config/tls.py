"""The key `tls` of both files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from dips.config.section import Section
from dips.identity.names import PeerRole
from dips.identity.paths import TlsFiles

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
