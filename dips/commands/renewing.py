"""Certificates of a day that renew themselves, where no cert-manager does it: the authority's port, and who asks there.

The authority signs for the holder of a valid certificate that it signed itself, for the same name and role, and for
nobody else. The first certificate of a name, and each of an operator, is signed by a person (`dips certs issue`).

The new key is made where it is used. Its certificate is put in place only if it fits: what an impostor at the address
answers is refused, and the former files stay in use. Daemons read their files again by themselves (transport/tls.py).

Known limits: whoever may serve holds the authority's key on a machine with a network; a stolen certificate is renewed
by its thief as well, until the name is revoked.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from dips import daemon
from dips.errors import (
    Busy,
    ConfigError,
    Corrupt,
    Denied,
    FailedDisk,
    LocalProtocolError,
    RemoteProtocolError,
    Unavailable,
)
from dips.files import explain_unwritable
from dips.identity import certificates
from dips.identity.authority import Authority
from dips.identity.certificates import identity_of, utc_now
from dips.identity.names import AUTHORITY_NAME, PeerIdentity, PeerRole
from dips.identity.paths import TlsFiles, renewal_of
from dips.telemetry.logs import Log
from dips.transport import control
from dips.transport.endpoints import Endpoint
from dips.transport.gate import Guard
from dips.transport.tls import TlsSource
from dips.wire.generated import authority_pb2
from dips.wire.generated.authority_pb2_grpc import (
    AuthorityServiceServicer,
    AuthorityServiceStub,
    add_AuthorityServiceServicer_to_server,
)

CRT, KEY, CSR = ".crt", ".key", ".csr"
LOOK_S = 60.0  # between two looks at a certificate that is not due
LOOKS = 24  # at least in the third of its life in which it is renewed
DEADLINE_S = 10.0  # of a call; the list of signed certificates is read in it
# What passes, here or at the authority; ConfigError: a file beside the certificate is wrong, as while it is copied.
AGAIN = (Unavailable, Busy, RemoteProtocolError, FailedDisk, ConfigError)

# ---- the authority's port -------------------------------------------------------------------------------------------


class AuthorityPort(AuthorityServiceServicer):
    """Signs the next certificate of each caller that the guard lets in."""

    def __init__(self, authority: Authority, life: timedelta, guard: Guard, log: Log) -> None:
        self._authority, self._life, self._guard, self._log = authority, life, guard, log

    async def Renew(self, request: Any, context: Any) -> authority_pb2.CertificateRenewed:
        caller = self._guard.read_caller(context.auth_context())
        try:
            asked = x509.load_der_x509_csr(request.request)
        except certificates.UNREADABLE as error:
            raise RemoteProtocolError(f"expected a certificate request in DER from {caller.identity}") from error
        gone, label = threading.Event(), caller.identity.label
        try:
            signed = await asyncio.to_thread(
                self._authority.renew, asked, caller.serial, label, self._life, gone.is_set
            )
        except asyncio.CancelledError:
            gone.set()
            raise
        until, serial = signed.not_valid_after_utc, f"{signed.serial_number:x}"
        self._log.info("renewed", who=str(caller.identity), serial=serial, until=until.isoformat())
        return authority_pb2.CertificateRenewed(certificate=signed.public_bytes(Encoding.DER))

    async def ListRevoked(self, request: Any, context: Any) -> authority_pb2.RevocationsListed:
        revocations = await asyncio.to_thread(self._authority.read_revocations)
        return authority_pb2.RevocationsListed(revocations=revocations.public_bytes(Encoding.DER))


async def serve_authority(
    directory: Path, listen: str, life: timedelta, log: Log, ready: Callable[[str], None] = lambda _: None
) -> None:
    """Sign renewals on host:port until SIGTERM or SIGINT; `ready` is called with the address."""
    authority, stopped = Authority.open(directory), asyncio.Event()
    files, since = _certify_itself(authority, life)
    report = lambda problem: log.warning("certificate", problem=problem)  # noqa: E731
    guard = Guard(TlsSource(files, AUTHORITY_NAME, PeerRole.AUTHORITY, authority.run, report))
    server = control.make_server(lambda method, error: log.error("call_failed", method=method, exc_info=error), guard)
    add_AuthorityServiceServicer_to_server(AuthorityPort(authority, life, guard, log), server)
    address = f"{listen.rpartition(':')[0]}:{control.bind_server(server, listen, '--listen', guard)}"
    await server.start()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(server.stop, DEADLINE_S)  # who has asked is answered
        stack.enter_context(daemon.end_signals(stopped.set))
        log.info("serving", address=address, run=authority.run, hours=life / timedelta(hours=1))
        ready(address)
        while not stopped.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(min(LOOK_S, life.total_seconds() / 3)):
                    await stopped.wait()
            # By the clock: a machine may have slept, or its clock been set.
            if stopped.is_set() or timedelta(0) <= utc_now() - since < life / 3:
                continue
            try:
                _, since = await asyncio.to_thread(_certify_itself, authority, life)
            except (FailedDisk, ConfigError, OSError) as error:  # a disk may have room, or answer, at the next look
                log.error("certificate", problem=str(error))
    log.info("stopped")


def _certify_itself(authority: Authority, life: timedelta) -> tuple[TlsFiles, datetime]:
    """Write a new key and certificate of the authority's port into its directory; return also when it was signed."""
    identity = PeerIdentity(AUTHORITY_NAME, PeerRole.AUTHORITY, authority.run)
    key, files = certificates.new_key(), TlsFiles.beside(authority.directory / (identity.label + CRT))
    signed = authority.issue(certificates.make_request(identity, key), identity.label, life)
    certificates.write_private(files.key, certificates.key_to_pem(key))
    certificates.write_public(files.cert, certificates.to_pem(signed))
    return files, certificates.signed_at(signed)


# ---- who asks -------------------------------------------------------------------------------------------------------


class Renewer:
    """Keeps one certificate valid, with its key beside it."""

    def __init__(self, certificate: Path, address: str, say: Callable[[str], None]) -> None:
        """Read the files; raise ConfigError if they do not fit or the certificate has ended. `say` gets sentences."""
        self._certificate, self._say = certificate, say
        self._finish_former()
        files = TlsFiles.beside(certificate)
        own = certificates.parse_certificate(certificates.read_pem(certificate, "tls"), certificate, "tls")
        self._own = identity_of(own)
        self._tls = TlsSource(files, self._own.name, self._own.role, self._own.run, say)
        authority = PeerIdentity(AUTHORITY_NAME, PeerRole.AUTHORITY, self._own.run)
        self._peer = Endpoint(f"the authority at {address}", address, authority, self._tls)

    async def renew(self) -> None:
        """Ask for the next certificate and put it in place, after its key is written: of what a full disk cannot take
        the authority would sign as many as it signs for a name.

        Raise Denied if the authority refuses, Busy if it signed too many for this name, Unavailable if it does not
        answer, RemoteProtocolError if what it answers does not fit, FailedDisk if this disk fails.
        """
        key = certificates.new_key()
        request = certificates.make_request(self._own, key).public_bytes(Encoding.DER)
        self._finish_former()
        certificates.write_private(renewal_of(self._certificate, KEY), certificates.key_to_pem(key))
        reply = await self._ask("Renew", authority_pb2.RenewalAsked(request=request))
        signed = self._check_answer(reply.certificate, key)
        certificates.write_public(renewal_of(self._certificate, CRT), certificates.to_pem(signed))
        put_in_place(renewal_of(self._certificate, CRT), self._certificate)
        self._say(f"{self._certificate}: renewed, valid until {signed.not_valid_after_utc:%Y-%m-%d %H:%M:%S} UTC")

    async def follow_revocations(self) -> None:
        """Write what the authority has revoked into crl.pem beside the certificate, if that is news.

        Lists of other authorities stay in the file: during a rollover each has one. Raise Unavailable or Denied as
        `renew`, RemoteProtocolError if the answer is of no authority of ours, or older than what we have.
        """
        reply = await self._ask("ListRevoked", authority_pb2.RevocationsAsked())
        loaded, path = self._tls.read_current(), self._tls.files.crl
        try:
            told = x509.load_der_x509_crl(reply.revocations)
        except ValueError as error:
            raise RemoteProtocolError(f"{self._peer} answered no list of revocations: {error}") from error
        signer = loaded.find_signer(told)
        if signer is None:
            raise RemoteProtocolError(f"{self._peer}: its list of revocations is signed by no authority of ours")
        there = not certificates.is_missing(path, "tls")
        known = certificates.parse_revocations(certificates.read_pem(path, "tls"), path, "tls") if there else []
        former = [crl for crl in known if loaded.find_signer(crl) == signer]
        if any(told.last_update_utc < crl.last_update_utc for crl in former):
            raise RemoteProtocolError(
                f"{self._peer}: its list of revocations is of {told.last_update_utc}, older than {path}: "
                "was the authority restored from a copy? Revoke again there what it has forgotten"
            )
        if former != [told]:
            others = [crl for crl in known if crl not in former]
            certificates.write_public(path, b"".join(map(certificates.to_pem, (*others, told))))
            self._say(f"{path}: {len(told)} revoked, as of {told.last_update_utc:%Y-%m-%d %H:%M:%S} UTC")

    async def keep(self) -> None:
        """Renew in the last third of each certificate's life, and follow what is revoked; until cancelled.

        Raise Denied if the authority refuses, or the certificate has ended: only a person can help then.
        """
        problem = ""
        while True:
            loaded = await asyncio.to_thread(self._tls.read_current)
            left, life = loaded.until - utc_now(), loaded.until - loaded.since
            if ended := self._tls.find_expiry():
                raise Denied(f"{ended}; `dips certs request` and `issue` make a new one")
            if left < life / 3:
                try:
                    await self.renew()
                except AGAIN as error:
                    self._say(f"{self._certificate} is not renewed, and ends at {loaded.until:%H:%M:%S} UTC: {error}")
            try:
                await self.follow_revocations()
                problem = ""
            except AGAIN as error:
                if not problem:  # once: it is tried again and again
                    self._say(f"{self._tls.files.crl} may be old: {error}")
                problem = str(error)
            await asyncio.sleep(min(LOOK_S, life.total_seconds() / 3 / LOOKS, left.total_seconds() + 0.1))

    def _finish_former(self) -> None:
        """Put in place what a former renewal, ended between the two renames, left."""
        if not certificates.is_missing(signed := renewal_of(self._certificate, CRT), "certificate"):
            put_in_place(signed, self._certificate)

    async def _ask(self, method: str, request: Any) -> Any:
        """Call the authority; what is wrong with its own files is RemoteProtocolError: not these files are at fault."""
        channel = control.open_channel(self._peer)
        try:
            return await control.call_method(
                getattr(AuthorityServiceStub(channel), method), request,
                deadline_s=DEADLINE_S, peer=self._peer, unavailable=Unavailable, explain=True,
            )  # fmt: skip
        except (ConfigError, Corrupt, FailedDisk, LocalProtocolError) as error:
            raise RemoteProtocolError(f"{self._peer}: {error}") from error
        finally:
            await channel.close()

    def _check_answer(self, der: bytes, key: certificates.Key) -> x509.Certificate:
        """Return the certificate; raise RemoteProtocolError if it is not ours, of our key and of our authority."""
        try:
            signed = x509.load_der_x509_certificate(der)
            fits = identity_of(signed) == self._own and signed.public_key() == key.public_key()
            certificates.check_validity(signed, utc_now(), "it")
        except (ValueError, Denied, ConfigError) as error:
            raise RemoteProtocolError(f"{self._peer} answered no certificate that can be used: {error}") from error
        if not fits or not self._tls.read_current().trusts(signed):
            raise RemoteProtocolError(f"{self._peer}: expected a certificate of {self._own}, of its authority and key")
        return signed


# ---- files ----------------------------------------------------------------------------------------------------------


def put_in_place(signed: Path, certificate: Path) -> None:
    """Rename the new files over the old, the key first: between the two renames `load_tls` takes the new pair."""
    renewed, present = renewal_of(certificate, KEY), certificate.with_suffix(KEY)
    key = present if certificates.is_missing(renewed, "key") else renewed  # ended between the two renames
    new = certificates.parse_certificate(certificates.read_pem(signed, "certificate"), signed, "certificate")
    secret = certificates.parse_key(certificates.read_key_pem(key, "key"), key, "key")
    if new.public_key() != secret.public_key():
        remedy = f"sign {key.with_suffix(CSR)} again" if key == renewed else "it is of a former renewal: remove it"
        raise ConfigError(f"{signed} was not signed for {key}: {remedy}")
    with explain_unwritable(certificate):
        key.rename(present)
        signed.rename(certificate)
