"""Access to the HTTP port. Probes are open to all; the rest needs a certificate of the run, or the token.

On loopback the port uses plain text, and every user of the machine may read, unless a token is set. A web page whose
own name resolves to 127.0.0.1 (DNS rebinding) is recognised by the Host header.
"""

from __future__ import annotations

import hashlib
import hmac
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509

from dips.errors import ConfigError, Denied
from dips.identity import pem_files
from dips.identity.certificates import identity_of, utc_now
from dips.identity.names import PeerRole
from dips.telemetry.refusals import count_refusal
from dips.transport.tls import TlsSource

PROBES = frozenset({"/healthz", "/readyz"})  # the kubelet has no certificate; they reveal little
READERS = frozenset(PeerRole)  # every role of the run may read, as with `dips status`
LEAST_TOKEN, MOST_TOKEN = 16, 4096  # characters
LOOK_S = 1.0  # least time between two checks of the token's file
SCHEME = "bearer "


@dataclass(frozen=True, slots=True)
class HttpRefusal:
    """The status and reason of a refused request."""

    status: int
    reason: str


class ReaderToken:
    """The token of readers without a certificate; replaced when its file is, without a restart."""

    def __init__(self, path: Path, report: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        """Read the token; raise ConfigError if it is not usable. `report` is called if a later one is not."""
        self._path, self._report, self._clock, self._lock = path, report, clock, threading.Lock()
        self._looked, self._digest, self._told = clock(), self._read_digest(), ""

    def matches(self, token: str) -> bool:
        """Whether it is the token, compared in constant time."""
        return hmac.compare_digest(self._current_digest(), _digest_of(token))

    def _current_digest(self) -> bytes:
        with self._lock:
            now = self._clock()
            if now - self._looked >= LOOK_S:
                self._looked = now
                try:
                    self._digest, self._told = self._read_digest(), ""
                except ConfigError as error:
                    if str(error) != self._told:
                        self._told = str(error)
                        self._report(f"the new token is not used: {error}")
            return self._digest

    def _read_digest(self) -> bytes:
        token = pem_files.read_key_pem(self._path, "http_token").decode("ascii", "replace").strip()
        if not LEAST_TOKEN <= len(token) <= MOST_TOKEN or not token.isprintable() or " " in token:
            raise ConfigError(
                f"http_token: {self._path}: expected one word of {LEAST_TOKEN} to {MOST_TOKEN} characters "
                f"(`openssl rand -hex 32`), got {len(token)} characters"
            )
        return _digest_of(token)


class Door:
    """Decides on each request. `tls` is the certificate of the port; None: plain text, on loopback."""

    def __init__(
        self, tls: TlsSource | None, token: ReaderToken | None, wall: Callable[[], datetime] = utc_now
    ) -> None:
        self._tls, self._token, self._wall = tls, token, wall

    def check_request(self, path: str, headers: Mapping[str, str], certificate: bytes | None) -> HttpRefusal | None:
        """Return the refusal, or None. `certificate` is the DER that the handshake has verified, if any."""
        if path in PROBES:
            return None
        refusal = self._find_refusal(headers, certificate)
        if refusal is not None:
            count_refusal("http_denied")
        return refusal

    def _find_refusal(self, headers: Mapping[str, str], certificate: bytes | None) -> HttpRefusal | None:
        shown = headers.get("authorization", "")
        if self._token is not None and shown:
            if shown[: len(SCHEME)].lower() == SCHEME and self._token.matches(shown[len(SCHEME) :].strip()):
                return None
            return HttpRefusal(401, "the token is not the one of http_token")
        if self._tls is not None and certificate is not None:
            try:
                self._check_certificate(certificate, self._tls)
            except Denied as error:
                return HttpRefusal(403, str(error))
            return None
        if self._tls is None and self._token is None:
            return None if is_local_name(headers.get("host", "")) else HttpRefusal(403, "ask for it by its address")
        wanted = [
            *(["a certificate of this run"] if self._tls is not None else []),
            *(["the token of http_token (Authorization: Bearer)"] if self._token is not None else []),
        ]
        return HttpRefusal(
            401, f"expected {' or '.join(wanted)}, got neither" if wanted[1:] else f"expected {wanted[0]}"
        )

    def _check_certificate(self, der: bytes, tls: TlsSource) -> None:
        """Raise Denied if a certificate, whose signature the handshake has verified, is revoked, expired or of another
        run.
        """
        certificate = x509.load_der_x509_certificate(der)
        identity = identity_of(certificate)
        if identity.run != tls.run:
            raise Denied(f"this is run {tls.run!r}, the certificate is of {identity}")
        if identity.role not in READERS:
            raise Denied(f"{identity} may not read here")
        if certificate.serial_number in tls.read_current().revoked:
            raise Denied(f"the certificate of {identity} is revoked")
        if self._wall() > certificate.not_valid_after_utc:
            raise Denied(f"the certificate of {identity} is expired")


def is_local_name(host: str) -> bool:
    """Whether a Host header is an address or `localhost`, with or without a port, and not a domain name."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() and not host.endswith("]") else host
    name = name.strip("[]")
    try:
        return name in ("", "localhost") or bool(ip_address(name))
    except ValueError:
        return False


def _digest_of(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
