"""The paths of a certificate's files; apart from their readers, since a training process only names them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dips.identity.names import PeerRole

ROOT, REVOCATIONS = "ca.crt", "crl.pem"  # beside each certificate, as in the authority's directory


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of the trusted authorities, our certificate, its key, and the revocations, which need not exist."""

    ca: Path
    cert: Path
    key: Path
    crl: Path

    @classmethod
    def beside(cls, cert: Path) -> TlsFiles:
        """Return the files beside a certificate. A Secret of cert-manager (ca.crt, tls.crt, tls.key) has these names
        already.
        """
        return cls(cert.with_name(ROOT), cert, cert.with_suffix(".key"), cert.with_name(REVOCATIONS))

    @classmethod
    def of(cls, cert: Path, name: str, role: PeerRole) -> TlsFiles:
        """Return the files of one process: its name and role stand for `{name}` and `{role}`, so one key of the run
        file serves all its daemons.
        """
        return cls.beside(Path(str(cert).replace("{name}", name).replace("{role}", role)))


def renewal_of(certificate: Path, end: str) -> Path:
    """Return the path of a renewal's key, request or certificate: `west.cluster.renewal.key` of `west.cluster.crt`."""
    return certificate.with_name(certificate.with_suffix("").name + ".renewal" + end)
