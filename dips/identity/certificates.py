"""Makes, reads and writes certificates, keys and requests: P-256, one name each, X.509 by `cryptography`."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, ExtensionOID, NameOID

from dips.errors import ConfigError, Denied
from dips.files import explain_unwritable, require_private, sync_path, write_aside
from dips.identity.names import PeerIdentity, parse_san

# ---- pem files ------------------------------------------------------------------------------------------------------
# Reads and writes keys, certificates and requests as files; a key that other users may read is refused.
#
# A file is replaced atomically, so that a concurrent reader sees the old or the new one.


PRIVATE, PUBLIC = 0o600, 0o644

Document = TypeVar("Document")

# What `cryptography` raises for content that is damaged, or of a kind that it does not know.
UNREADABLE = ValueError, TypeError, x509.InvalidVersion, UnsupportedAlgorithm

REQUEST_BEGIN, OLD_REQUEST_BEGIN = b"-----BEGIN CERTIFICATE REQUEST", b"-----BEGIN NEW CERTIFICATE REQUEST"

# of a block of PEM
BEGIN, END, CRL_END = b"-----BEGIN ", b"-----END ", b"-----END X509 CRL-----"


def read_pem(path: Path, key: str) -> bytes:
    """Read a small file; raise ConfigError naming `key` of the configuration, also for a truncated file."""
    try:
        with path.open("rb") as file:
            content = file.read(MOST_PEM + 1)
    except OSError as error:
        raise _not_read(path, key, error) from error
    if len(content) > MOST_PEM:
        raise ConfigError(f"{key}: {path} has more than {MOST_PEM} bytes: it is no certificate")
    if content.count(BEGIN) != content.count(END):
        raise ConfigError(f"{key}: {path} ends in the middle of a block: it is half-written; copy it once more")
    return content


def is_missing(path: Path, key: str) -> bool:
    """Return whether there is no such file; raise ConfigError if its disk does not tell."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError as error:
        raise _not_read(path, key, error) from error
    return False


def _not_read(path: Path, key: str, error: OSError) -> ConfigError:
    return ConfigError(f"{key}: {path} cannot be read: {error.strerror}{_find_remedy(path, error)}")


def _find_remedy(path: Path, error: OSError) -> str:
    """Return the remedy for a file that is missing or belongs to another user."""
    if isinstance(error, PermissionError):
        return ": give it to the user of this process, or to its group"
    if not isinstance(error, FileNotFoundError):
        return ""
    if not path.parent.is_dir():
        return f": {path.parent} is not there, too; is the Secret or volume mounted? see `dips check`"
    return ": bring it here, `dips certs request` and `dips certs issue` make it"


def read_key_pem(path: Path, key: str) -> bytes:
    """Read a private key's file; raise ConfigError if other users may read it."""
    content = read_pem(path, key)
    try:
        require_private(path, key)
    except OSError as error:
        raise _not_read(path, key, error) from error
    return content


def parse_certificate(content: bytes, path: Path, key: str) -> x509.Certificate:
    return _parse(x509.load_pem_x509_certificate, content, path, key, "certificate")


def parse_certificates(content: bytes, path: Path, key: str) -> list[x509.Certificate]:
    """Return all certificates of a file: during a rollover two authorities are trusted."""
    return _parse(x509.load_pem_x509_certificates, content, path, key, "certificate")


def is_request(content: bytes) -> bool:
    """Whether the content begins like a certificate request, by any tool."""
    return content.lstrip().startswith((REQUEST_BEGIN, OLD_REQUEST_BEGIN))


def parse_request(content: bytes, path: Path, key: str) -> x509.CertificateSigningRequest:
    return _parse(x509.load_pem_x509_csr, content, path, key, "certificate request")


def parse_revocations(content: bytes, path: Path, key: str) -> list[x509.CertificateRevocationList]:
    """Return all revocation lists of a file: during a rollover each authority has one."""
    blocks = [block + CRL_END for block in content.split(CRL_END)[:-1]]
    return [_parse(x509.load_pem_x509_crl, block, path, key, "revocation list") for block in blocks or [content]]


def parse_key(content: bytes, path: Path, key: str) -> Key:
    def load(pem: bytes) -> Key:
        loaded = serialization.load_pem_private_key(pem, None)
        if not isinstance(loaded, ec.EllipticCurvePrivateKey):
            raise ValueError(f"expected a P-256 key, got {type(loaded).__name__}")
        return loaded

    return _parse(load, content, path, key, "private key")


def write_private(path: Path, content: bytes) -> None:
    """Write a file that other users may not read."""
    _write(path, content, PRIVATE)


def write_public(path: Path, content: bytes) -> None:
    _write(path, content, PUBLIC)


def to_pem(document: x509.Certificate | x509.CertificateSigningRequest | x509.CertificateRevocationList) -> bytes:
    return document.public_bytes(serialization.Encoding.PEM)


def _write(path: Path, content: bytes, mode: int) -> None:
    with explain_unwritable(path), write_aside(path, mode) as aside:
        descriptor = os.open(aside, os.O_WRONLY)
        os.fchmod(descriptor, mode)  # independent of the umask
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        sync_path(aside)


def _parse(load: Callable[[bytes], Document], content: bytes, path: Path, key: str, what: str) -> Document:
    try:
        return load(content)
    except UNREADABLE as error:
        reason = str(error).partition("\n")[0][:160]
        raise ConfigError(f"{key}: {path}: expected a {what} in PEM: {reason}") from error


# ---- certificates ---------------------------------------------------------------------------------------------------
# The contents of a certificate are fixed here, so that an authority cannot by mistake sign one that the daemons refuse.


SOON = timedelta(days=14)  # before the end of a certificate that a person renews
CLOCK_SKEW = timedelta(minutes=5)  # between the clocks of the authority's machine and a daemon's
MOST_PEM = 64 * 1024  # bytes of a file of certificates
Key = ec.EllipticCurvePrivateKey


def new_key() -> Key:
    return ec.generate_private_key(ec.SECP256R1())


def key_to_pem(key: Key) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def make_authority(run: str, key: Key, now: datetime, days: int) -> x509.Certificate:
    """Return the run's own root certificate, which may sign certificates and revocations only."""
    name = _common_name(f"dips authority of {run}")
    builder = _builder(name, name, key.public_key(), now, now + timedelta(days=days))
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    return (
        builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )


def make_request(identity: PeerIdentity, key: Key) -> x509.CertificateSigningRequest:
    """Return a certificate request with the public half of `key` and the one name."""
    return (
        x509.CertificateSigningRequestBuilder()
        .subject_name(_common_name(identity.label))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(identity.san)]), critical=False)
        .sign(key, hashes.SHA256())
    )


def sign_request(
    request: x509.CertificateSigningRequest, authority: x509.Certificate, key: Key, now: datetime, life: timedelta
) -> x509.Certificate:
    """Sign for the name in `request`, and use nothing else of it. Raise Denied if it is not usable."""
    public = read_requested_key(request)
    identity = identity_of(request)
    end = min(now + life, authority.not_valid_after_utc)
    builder = _builder(_common_name(identity.label), authority.subject, public, now, end)
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())
    both = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    return (
        builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(identity.san)]), critical=False)
        .add_extension(both, critical=False)
        .add_extension(issuer, critical=False)
        .sign(key, hashes.SHA256())
    )


def read_requested_key(request: x509.CertificateSigningRequest) -> ec.EllipticCurvePublicKey:
    """Return the public key of a request; raise Denied if the request is not signed by it."""
    with suppress(*UNREADABLE):
        public = request.public_key()
        if request.is_signature_valid and isinstance(public, ec.EllipticCurvePublicKey):
            return public
    raise Denied("the request is not signed by the P-256 key that it names: make it by `dips certs request`")


def fingerprint_of(public: ec.EllipticCurvePublicKey) -> str:
    """Return a fingerprint that is short enough to read out by telephone and long enough against collisions."""
    der = public.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return sha256(der).hexdigest()[:32]


def make_revocations(
    serials: dict[int, datetime], authority: x509.Certificate, key: Key, now: datetime
) -> x509.CertificateRevocationList:
    """Return the list of revoked certificates, valid as long as the authority is."""
    builder = x509.CertificateRevocationListBuilder().issuer_name(authority.subject)
    builder = builder.last_update(now - CLOCK_SKEW).next_update(authority.not_valid_after_utc)
    for serial, when in serials.items():
        row = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(when).build()
        builder = builder.add_revoked_certificate(row)
    return builder.sign(key, hashes.SHA256())


def identity_of(document: x509.Certificate | x509.CertificateSigningRequest) -> PeerIdentity:
    """Return the identity in a certificate or request; raise Denied unless it has exactly one name, of Di-PS."""
    try:
        extension = document.extensions.get_extension_for_oid(ExtensionOID.SUBJECT_ALTERNATIVE_NAME)
    except (x509.ExtensionNotFound, x509.DuplicateExtension, x509.UnsupportedGeneralNameType, *UNREADABLE) as error:
        raise Denied("expected one name <name>.<role>.<run>.dips in the certificate, found none") from error
    assert isinstance(extension.value, x509.SubjectAlternativeName)
    names = [entry.value if isinstance(entry, x509.DNSName) else f"{type(entry).__name__}" for entry in extension.value]
    if len(names) != 1:
        raise Denied(f"expected one name <name>.<role>.<run>.dips in the certificate, found {len(names)}: {names[:4]}")
    return parse_san(names[0])


def check_validity(certificate: x509.Certificate, now: datetime, what: str) -> None:
    """Raise ConfigError if `certificate` is expired or not yet valid."""
    begin = certificate.not_valid_before_utc
    check_until(certificate.not_valid_after_utc, now, what)
    if now < begin:
        raise ConfigError(
            f"{what} is valid from {begin:%Y-%m-%d %H:%M} UTC only, it is {now:%Y-%m-%d %H:%M}: see the clock"
        )


def check_until(end: datetime, now: datetime, what: str) -> None:
    """Raise ConfigError if `end` has passed."""
    if now > end:
        raise ConfigError(f"{what} expired at {end:%Y-%m-%d %H:%M} UTC: renew it by `dips certs renew`")


def ends_soon(since: datetime, until: datetime, now: datetime) -> bool:
    """Whether who renews a certificate is late: two weeks before its end, or a quarter of its life if that is less."""
    return until - now < min(SOON, (until - since) / 4)


def signed_at(certificate: x509.Certificate) -> datetime:
    """Return when it was signed: it is valid from CLOCK_SKEW before that."""
    return certificate.not_valid_before_utc + CLOCK_SKEW


def utc_now() -> datetime:
    return datetime.now(UTC)


def _common_name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _builder(
    subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey, now: datetime, end: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(end)
    )
