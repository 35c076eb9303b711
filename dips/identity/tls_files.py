"""The certificate files of a daemon, verified before they are used.

gRPC only reports "Socket closed" for any problem with them, so errors here name the file, the problem and the remedy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from cryptography import x509
from cryptography.exceptions import InvalidSignature

from dips.errors import ConfigError, Denied
from dips.identity import certificates
from dips.identity.certificates import utc_now
from dips.identity.names import PeerIdentity, PeerRole
from dips.identity.paths import TlsFiles, renewal_of


@dataclass(frozen=True, slots=True)
class LoadedTls:
    """The contents of the files, read and verified together."""

    identity: PeerIdentity
    ca: bytes
    cert: bytes
    key: bytes
    since: datetime  # when it was signed
    until: datetime
    revoked: frozenset[int]  # serial numbers
    authorities: tuple[x509.Certificate, ...] = ()  # the certificates in `ca`
    lists: tuple[x509.CertificateRevocationList, ...] = ()  # which have these serial numbers

    def trusts(self, certificate: x509.Certificate) -> bool:
        """Whether one of the authorities has signed this certificate."""
        return any(_is_signed(certificate, authority) for authority in self.authorities)

    def find_signer(self, revocations: x509.CertificateRevocationList) -> x509.Certificate | None:
        """Return the authority that has signed this list; None if it is none of ours."""
        return _find_signer(revocations, self.authorities)

    def with_lists(self, lists: tuple[x509.CertificateRevocationList, ...]) -> LoadedTls:
        """Return the same with other revocation lists."""
        return replace(self, lists=lists, revoked=_list_serials(lists))

    def keep_revoked(self, former: Iterable[x509.CertificateRevocationList]) -> LoadedTls:
        """Return the same with those former lists, too, that revoke more, whose authority is trusted, and that no later
        list of that authority has replaced.
        """
        listed = _list_serials(self.lists)
        present = [(self.find_signer(crl), crl.last_update_utc) for crl in self.lists]
        kept = tuple(
            crl
            for crl in former
            if not _list_serials([crl]) <= listed
            and (ours := self.find_signer(crl)) is not None
            and not any(signer == ours and at > crl.last_update_utc for signer, at in present)
        )
        return replace(self, lists=(*self.lists, *kept), revoked=self.revoked | _list_serials(kept))


def load_tls(files: TlsFiles, now: datetime | None = None) -> LoadedTls:
    """Read and verify the files; raise ConfigError naming the file and the remedy."""
    now = now or utc_now()
    authorities = certificates.parse_certificates(certificates.read_pem(files.ca, "tls"), files.ca, "tls")
    ca = b"".join(map(certificates.to_pem, authorities))  # without the file's comments: Python's ssl takes ASCII only
    cert, key, certificate = _read_pair(files)
    certificates.check_validity(certificate, now, f"tls: {files.cert}")
    _check_signed(certificate, authorities, files, now)
    try:
        identity = certificates.identity_of(certificate)
    except Denied as error:
        raise ConfigError(f"tls: {files.cert}: {error}") from error
    lists = read_lists(files, authorities)
    revoked = _list_serials(lists)
    if certificate.serial_number in revoked:
        raise ConfigError(f"tls: {files.cert} is revoked by {files.crl}: ask for a new one by `dips certs request`")
    since, until = certificates.signed_at(certificate), certificate.not_valid_after_utc
    return LoadedTls(identity, ca, cert, key, since, until, revoked, tuple(authorities), lists)


def _read_pair(files: TlsFiles) -> tuple[bytes, bytes, x509.Certificate]:
    """Return certificate and key in PEM, and the certificate; raise ConfigError if they do not belong together.

    A process that starts while they are renewed may read one of each, or come between the two renames
    (`dips certs renew`), so it reads twice, and takes the new certificate where the key is the new one already.
    """
    for _ in range(2):
        cert = certificates.read_pem(files.cert, "tls")
        certificate = certificates.parse_certificate(cert, files.cert, "tls")
        key = certificates.read_key_pem(files.key, "tls")
        public = certificates.parse_key(key, files.key, "tls").public_key()
        renewed = renewal_of(files.cert, ".crt")
        if certificate.public_key() != public and not certificates.is_missing(renewed, "tls"):
            cert = certificates.read_pem(renewed, "tls")
            certificate = certificates.parse_certificate(cert, renewed, "tls")
        if certificate.public_key() == public:
            return cert, key, certificate
    raise ConfigError(f"tls: {files.key} is not the key of {files.cert}: one of them was renewed without the other")


def require_identity(loaded: LoadedTls, name: str, role: PeerRole, run: str) -> LoadedTls:
    """Return `loaded` if it is of this process; raise ConfigError if it is another's."""
    wanted = PeerIdentity(name, role, run)
    if loaded.identity != wanted:
        raise ConfigError(f"tls: expected a certificate of {wanted}, got one of {loaded.identity}")
    return loaded


def _check_signed(
    certificate: x509.Certificate, authorities: list[x509.Certificate], files: TlsFiles, now: datetime
) -> None:
    for authority in authorities:
        if _is_signed(certificate, authority):
            certificates.check_validity(authority, now, f"tls: {files.ca}")
            return
    signer = certificate.issuer.rfc4514_string()
    raise ConfigError(f"tls: {files.cert} is signed by {signer!r}, which is not in {files.ca}")


def _is_signed(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


def read_lists(files: TlsFiles, authorities: Sequence[x509.Certificate]) -> tuple[x509.CertificateRevocationList, ...]:
    """Return the revocation lists in their file; raise ConfigError if none of the authorities has signed one."""
    if certificates.is_missing(files.crl, "tls"):
        return ()
    lists = certificates.parse_revocations(certificates.read_pem(files.crl, "tls"), files.crl, "tls")
    if any(_find_signer(crl, authorities) is None for crl in lists):
        raise ConfigError(f"tls: {files.crl} is not signed by an authority of {files.ca}")
    return tuple(lists)


def _list_serials(lists: Iterable[x509.CertificateRevocationList]) -> frozenset[int]:
    return frozenset(row.serial_number for crl in lists for row in crl)


def _find_signer(
    crl: x509.CertificateRevocationList, authorities: Iterable[x509.Certificate]
) -> x509.Certificate | None:
    signers = (authority for authority in authorities if authority.subject == crl.issuer)
    return next((one for one in signers if crl.is_signature_valid(one.public_key())), None)  # type: ignore[arg-type]
