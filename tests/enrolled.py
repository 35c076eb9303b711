"""An authority that enrolls as its tests ask, and files of certificates."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

from cryptography import x509

from dips.identity import certificates
from dips.identity.authority import Authority
from dips.identity.certificates import utc_now
from dips.identity.names import PeerRole, make_identity
from dips.identity.paths import REVOCATIONS, ROOT, TlsFiles


class Enrolled:
    """An authority that enrolls as its tests ask."""

    def __init__(self, directory: Path, run: str = "july") -> None:
        self.directory, self.run = directory, run
        self.authority = Authority.create(directory / "ca", run)
        link_authority(directory)

    def enroll(self, name: str, role: PeerRole, life: timedelta = timedelta(days=90)) -> TlsFiles:
        identity, key = make_identity(name, role, self.run), certificates.new_key()
        certificate = self.authority.issue(certificates.make_request(identity, key), identity.label, life)
        return self._write(identity.label, certificate, key)

    def enroll_ending(self, name: str, role: PeerRole, left: timedelta = timedelta(hours=1)) -> TlsFiles:
        """Enroll with a certificate of 30 days that ends soon."""
        identity, key, authority = make_identity(name, role, self.run), certificates.new_key(), self.authority
        life, request = timedelta(days=30), certificates.make_request(identity, key)
        signed = certificates.sign_request(request, authority.root, authority._key, utc_now() + left - life, life)
        serial, until = f"{signed.serial_number:x}", signed.not_valid_after_utc.isoformat()
        authority._append({"san": identity.san, "serial": serial, "until": until})
        return self._write(identity.label, signed, key)

    def _write(self, label: str, certificate: x509.Certificate, key: certificates.Key) -> TlsFiles:
        files = self.files_of(label)
        certificates.write_public(files.cert, certificates.to_pem(certificate))
        certificates.write_private(files.key, certificates.key_to_pem(key))
        return files

    def files_of(self, label: str) -> TlsFiles:
        """Where those of a name are, or will be."""
        return TlsFiles.beside(self.directory / f"{label}.crt")


def link_authority(directory: Path) -> None:
    """Put ca.crt and crl.pem of the authority in `ca/` beside the certificates: what it revokes counts at once."""
    for name in (ROOT, REVOCATIONS):
        (directory / name).symlink_to(Path("ca") / name)


def enroll_all(directory: Path, run: str, peers: Iterable[tuple[str, PeerRole]]) -> dict[str, Any]:
    """Enroll these with a new authority in `directory`; return the keys of run file and cluster files that say so."""
    enrolled = Enrolled(directory, run)
    for name, role in peers:
        enrolled.enroll(name, role)
    return {"tls": str(directory / "{name}.{role}.crt")}
