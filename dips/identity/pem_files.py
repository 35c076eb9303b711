"""Reads and writes keys, certificates and requests as files; a key that other users may read is refused.

A file is replaced atomically, so that a concurrent reader sees the old or the new one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from dips.errors import ConfigError
from dips.fsync import sync_path, write_aside
from dips.identity.certificates import MOST_PEM, Key
from dips.private_files import require_private

PRIVATE, PUBLIC = 0o600, 0o644

Document = TypeVar("Document")

REQUEST_BEGIN, OLD_REQUEST_BEGIN = b"-----BEGIN CERTIFICATE REQUEST", b"-----BEGIN NEW CERTIFICATE REQUEST"

# of a block of PEM
BEGIN, END, CRL_END = b"-----BEGIN ", b"-----END ", b"-----END X509 CRL-----"


def read_pem(path: Path, key: str) -> bytes:
    """Read a small file; raise ConfigError naming `key` of the configuration, also for a truncated file."""
    try:
        with path.open("rb") as file:
            content = file.read(MOST_PEM + 1)
    except OSError as error:
        raise ConfigError(f"{key}: {path} cannot be read: {error.strerror}{_find_remedy(path, error)}") from error
    if len(content) > MOST_PEM:
        raise ConfigError(f"{key}: {path} has more than {MOST_PEM} bytes: it is no certificate")
    if content.count(BEGIN) != content.count(END):
        raise ConfigError(f"{key}: {path} ends in the middle of a block: it is half-written; copy it once more")
    return content


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
    require_private(path, key)
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
    try:
        with write_aside(path) as aside:
            descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
            os.fchmod(descriptor, mode)  # independent of the umask
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
            sync_path(aside)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error


def _parse(load: Callable[[bytes], Document], content: bytes, path: Path, key: str, what: str) -> Document:
    try:
        return load(content)
    except (ValueError, TypeError) as error:
        reason = str(error).partition("\n")[0][:160]
        raise ConfigError(f"{key}: {path}: expected a {what} in PEM: {reason}") from error
