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
from dips.identity.names import PeerIdentity, PeerRole
from dips.identity.rights import check_enrolled, check_right
from dips.transport.handshakes import HandshakeWatch
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
        self._admitted: dict[str, Caller] = {}  # clusters, by the certificate of their last call that was let in
        self.refused: Counter[str] = Counter()  # by method
        self.handshakes = HandshakeWatch()
        # told of each refusal: who (empty: not known), the method, the request, why
        self.on_refused: Callable[[str, str, Any, str], None] = lambda *_: None

    def check_call(self, method: str, request: Any, context: Mapping[str, Iterable[bytes]]) -> PeerIdentity:
        """Return who asks; raise Denied with the reason if it may not."""
        who = ""
        try:
            caller = self._identify(context)
            who = caller.identity.label
            self._check_standing(caller)
            check_right(caller.identity, method, request)
        except Denied as error:
            self.refused[method] += 1
            self.on_refused(who, method, request, str(error))
            raise
        if caller.identity.role is PeerRole.CLUSTER:
            self._admitted[caller.identity.name] = caller
        return caller.identity

    def identify_caller(self, context: Mapping[str, Iterable[bytes]]) -> PeerIdentity | None:
        """Who a connection's certificate says that it is, whatever that may; None if it does not say."""
        try:
            return self._identify(context).identity
        except Denied:
            return None

    def name_caller(self, context: Mapping[str, Iterable[bytes]]) -> str:
        """Who asks, as the ledger keeps it: name and role of the certificate."""
        return self._identify(context).identity.label

    def change_clusters(self, clusters: Collection[str] | None) -> None:
        """Those that may join from now on; None: all whose certificate says so."""
        self._clusters = clusters

    def take_expelled(self) -> list[tuple[str, str]]:
        """Clusters that were let in and may take part no more, each once, with the reason; looked for now and then.

        What such a cluster still moves, and what it waits for, is ended by whoever asks this: its calls are refused
        here.
        """
        expelled = list[tuple[str, str]]()
        for name, caller in list(self._admitted.items()):
            try:
                self._check_standing(caller)
            except Denied as error:
                del self._admitted[name]
                expelled.append((name, str(error)))
        return expelled

    def _check_standing(self, caller: Caller) -> None:
        """Raise Denied unless the caller's certificate counts now, here."""
        if caller.identity.run != self.source.run:
            raise Denied(f"this is run {self.source.run!r}, the certificate is of {caller.identity}")
        if caller.serial in self.source.read_current().revoked:
            raise Denied(f"the certificate of {caller.identity} is revoked")
        if self._wall() > caller.until:
            raise Denied(f"the certificate of {caller.identity} expired at {caller.until:%Y-%m-%d %H:%M} UTC")
        check_enrolled(caller.identity, self._clusters)

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
