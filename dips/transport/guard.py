"""Stands before every handler of a server with certificates: who calls, whether that certificate still counts, and
whether its holder may ask this.

The handshake has proven that the caller holds the key of a certificate of our authority. What happened to that
certificate since is looked at with each call, so that one that was revoked or has expired ends within a heartbeat,
also on connections that were made before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from cryptography import x509

from dips.errors import Denied
from dips.identity.certificates import identity_of, utc_now
from dips.identity.names import PeerIdentity
from dips.identity.rights import check_enrolled, check_right
from dips.transport.tls import TlsSource

KEPT_CALLERS = 4096  # certificates that were read; 1,000 clusters and 1,000 slaves, each renewed once
PEM_KEY = "x509_pem_cert"


@dataclass(frozen=True, slots=True)
class Caller:
    """A certificate that a peer showed in its handshake."""

    identity: PeerIdentity
    serial: int
    until: datetime


class Guard:
    """The door of one server."""

    def __init__(
        self,
        source: TlsSource,
        clusters: Collection[str] | None = None,
        wall: Callable[[], datetime] = utc_now,
    ) -> None:
        """`clusters`: those that may join; None: all whose certificate says so."""
        self._trusted = b""  # the authorities by which callers were looked at
        self.source, self._clusters, self._wall = source, clusters, wall
        self._callers: dict[bytes, Caller] = {}
        self.refused: Counter[str] = Counter()  # by method

    def check_call(self, method: str, request: Any, context: Mapping[str, Iterable[bytes]]) -> PeerIdentity:
        """Return who asks; raise Denied with the reason if it may not."""
        try:
            caller = self._identify(context)
            if caller.identity.run != self.source.run:
                raise Denied(f"this is run {self.source.run!r}, the certificate is of {caller.identity}")
            if caller.serial in self.source.read_current().revoked:
                raise Denied(f"the certificate of {caller.identity} is revoked")
            if self._wall() > caller.until:
                raise Denied(f"the certificate of {caller.identity} expired at {caller.until:%Y-%m-%d %H:%M} UTC")
            check_enrolled(caller.identity, self._clusters)
            check_right(caller.identity, method, request)
        except Denied:
            self.refused[method] += 1
            raise
        return caller.identity

    def _identify(self, context: Mapping[str, Iterable[bytes]]) -> Caller:
        pem = next(iter(context.get(PEM_KEY, ())), None)
        if pem is None:
            raise Denied("no certificate was shown")
        loaded = self.source.read_current()
        if loaded.ca != self._trusted:  # an authority came or went: connections outlive it
            self._callers.clear()
            self._trusted = loaded.ca
        if (known := self._callers.get(pem)) is not None:
            return known
        certificate = x509.load_pem_x509_certificate(pem)
        if not loaded.trusts(certificate):
            raise Denied(f"the certificate of {identity_of(certificate)} is of an authority that is trusted no longer")
        caller = Caller(identity_of(certificate), certificate.serial_number, certificate.not_valid_after_utc)
        if len(self._callers) >= KEPT_CALLERS:
            self._callers.pop(next(iter(self._callers)))
        self._callers[pem] = caller
        return caller
