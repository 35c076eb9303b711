"""The check before every handler of a server with certificates: who calls, whether the certificate is still valid, and
whether its holder may make this call.

The handshake has proven that the caller holds the key of a certificate of our authority. With each call it is checked
again, so that a certificate that was revoked or has expired is refused within a heartbeat, also on existing
connections.
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

KEPT_CALLERS = 4096  # parsed certificates; 1,000 clusters and 1,000 slaves, each renewed once
PEM_KEY = "x509_pem_cert"


@dataclass(frozen=True, slots=True)
class Caller:
    """A certificate that a peer presented in its handshake."""

    identity: PeerIdentity
    serial: int
    until: datetime


class Guard:
    """The checks of one server."""

    def __init__(
        self,
        source: TlsSource,
        clusters: Collection[str] | None = None,
        wall: Callable[[], datetime] = utc_now,
    ) -> None:
        """`clusters` lists those that may join; None: all with a certificate for it."""
        self._trusted = b""  # the authorities at the time when callers were parsed
        self.source, self._clusters, self._wall = source, clusters, wall
        self._callers: dict[bytes, Caller] = {}
        self._admitted: dict[str, Caller] = {}  # clusters → the certificate of their last admitted call
        self.refused: Counter[str] = Counter()  # by method
        self.handshakes = HandshakeWatch()
        # called with each refusal: caller (empty: unknown), method, request, reason
        self.on_refused: Callable[[str, str, Any, str], None] = lambda *_: None

    def check_call(self, method: str, request: Any, context: Mapping[str, Iterable[bytes]]) -> PeerIdentity:
        """Return the caller's identity; raise Denied with the reason if it may not make this call."""
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
        """Return the identity in a connection's certificate, without checking rights; None if there is none."""
        try:
            return self._identify(context).identity
        except Denied:
            return None

    def name_caller(self, context: Mapping[str, Iterable[bytes]]) -> str:
        """Return the caller for the ledger: name and role in the certificate."""
        return self._identify(context).identity.label

    def change_clusters(self, clusters: Collection[str] | None) -> None:
        """Replace the list of clusters that may join; None: all with a certificate for it."""
        self._clusters = clusters

    def take_expelled(self) -> list[tuple[str, str]]:
        """Return the admitted clusters that may no longer take part, each once, with the reason; to be called now and
        then.

        The caller ends the cluster's transfers and open questions; its further calls are refused here.
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
        """Raise Denied unless the caller's certificate is valid here and now."""
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
        if loaded.ca != self._trusted:  # an authority was added or removed: connections outlive it
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
