"""The server at the end of a channel: its address, the name in its certificate, and an explanation if it does not
answer.

gRPC's own "Socket closed" hides which certificate was refused by which side, so a separate handshake finds out.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509

from dips.errors import ConfigError, Denied
from dips.identity.certificates import identity_of
from dips.identity.names import MASTER_NAME, PeerIdentity, PeerRole
from dips.identity.paths import TlsFiles
from dips.identity.tls_files import LoadedTls, load_tls
from dips.transport.tls import TlsSource, load_certificate

PROBE_S = 3.0  # timeout of a handshake that explains why a call failed
PULLERS = (PeerRole.OPERATOR, PeerRole.PULLER)  # who may pull without being a cluster


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One server, as its callers know it."""

    what: str  # for messages: "the master at 10.0.0.1:7800"
    address: str  # host:port
    identity: PeerIdentity | None = None  # the identity that its certificate must have; None: plain text
    tls: TlsSource | None = field(default=None, compare=False)
    run: str = ""  # that its caller means; "": any. In plain text no certificate says whose master has an address

    def __str__(self) -> str:
        return self.what

    def require_run(self, served: object) -> None:
        """Raise ConfigError if the master serves another run than its caller means."""
        if self.run and served != self.run:
            raise ConfigError(
                f"{self} serves run {served!r}, the run file is of {self.run!r}: "
                "start its own master, at an address of its own"
            )

    def explain_silence(self) -> str:
        """Return the result of a handshake with a server that gRPC could not reach; empty if it explains nothing.
        Blocks.
        """
        host, _, port = self.address.rpartition(":")
        try:
            raw = socket.create_connection((host.strip("[]"), int(port)), PROBE_S)
        except (OSError, ValueError):
            return ""
        with raw:
            if self.tls is None or self.identity is None:
                return _explain_plain(raw)
            return _explain_tls(raw, self.tls, self.identity)


def master_peer(address: str, tls: TlsSource | None, run: str = "") -> Endpoint:
    """Return the endpoint of the run's master; `run` is its name, if the caller knows it."""
    identity = PeerIdentity(MASTER_NAME, PeerRole.MASTER, tls.run) if tls is not None else None
    return Endpoint(f"the master at {address}", address, identity, tls, run)


def credentials_peer(address: str, cert: Path, roles: Collection[PeerRole], warn: Callable[[str], None]) -> Endpoint:
    """Return the endpoint of the run's master for the holder of a certificate; ConfigError unless it is of these roles.

    cert  with its key and ca.crt beside it
    warn  called with problems of these files, which are read again when they change
    """
    files = TlsFiles.beside(cert)
    own = load_tls(files).identity
    if own.role not in roles:
        raise ConfigError(f"{cert}: expected a certificate of the role {' or '.join(roles)}, got one of {own}")
    return master_peer(address, TlsSource(files, own.name, own.role, own.run, warn))


def slave_peer(name: str, address: str, tls: TlsSource | None) -> Endpoint:
    """Return the endpoint of one of the run's slaves."""
    identity = PeerIdentity(name, PeerRole.SLAVE, tls.run) if tls is not None else None
    return Endpoint(f"slave {name} at {address}", address, identity, tls)


def _explain_plain(raw: socket.socket) -> str:
    """Explain whether the server expects TLS while this process uses plain text."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with context.wrap_socket(raw):
            return "it expects certificates: give this process a certificate (`tls`)"
    except ssl.SSLError as error:
        asks = "CERTIFICATE" in (error.reason or "")
        return "it expects certificates: give this process a certificate (`tls`)" if asks else ""
    except OSError:
        return ""


def _explain_tls(raw: socket.socket, source: TlsSource, wanted: PeerIdentity) -> str:
    context = _probe_context(source)
    try:
        with context.wrap_socket(raw) as secured:
            shown = secured.getpeercert(binary_form=True)
            if reason := _wrong_name(shown, wanted):
                return reason
            try:
                refused = not secured.recv(1)  # gRPC's server sends first if it accepts a client
            except TimeoutError:
                refused = False
            return f"it refused our certificate ({source.files.cert})" if refused else ""
    except ssl.SSLCertVerificationError as error:
        return f"its certificate is refused: {error.verify_message} (by {source.files.ca})"
    except ssl.SSLError as error:
        if error.reason == "WRONG_VERSION_NUMBER":
            return "it speaks plain text: give it a certificate (`tls`), or this process `tls: off`"
        return f"it refused our certificate ({source.files.cert}): {error.reason}"
    except OSError as error:
        return f"the handshake broke: {error}"


def _probe_context(source: TlsSource) -> ssl.SSLContext:
    loaded: LoadedTls = source.read_current()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # compared here, with a sentence for people
    context.load_verify_locations(cadata=loaded.ca.decode())
    load_certificate(context, loaded)
    context.set_alpn_protocols(["h2"])
    return context


def _wrong_name(shown: bytes | None, wanted: PeerIdentity) -> str:
    if shown is None:
        return "it showed no certificate"
    try:
        found = identity_of(x509.load_der_x509_certificate(shown))
    except Denied as error:
        return f"its certificate: {error}"
    return "" if found == wanted else f"its certificate is of {found}, expected {wanted}"
