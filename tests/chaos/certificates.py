"""A chaos run with certificates: an authority of its own, and the ends of lines that read what passes.

A wire carries TLS as any network does. The interpreter behind it (wires.py) reads calls, so it holds what no network
has: it serves with the key of the server that it stands for, and dials with the key of the caller.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from dips.identity import certificates
from dips.identity.authority import Authority
from dips.identity.names import MASTER_NAME, PeerRole
from dips.identity.paths import REVOCATIONS, ROOT
from dips.transport.endpoints import Endpoint, master_peer, slave_peer
from dips.transport.gate import Guard
from dips.transport.tls import LOOK_S, TlsSource
from tests.enrolled import Enrolled

SECURE = "DIPS_CHAOS_SECURE"  # 1: all runs have certificates; 0: none; unset: the files that say so
OPERATOR = "operator"
DIRECTORY = "certs"


def is_secured(chosen: bool) -> bool:
    """Whether a run has certificates that its file chose to have, or not."""
    return {"0": False, "1": True}.get(os.environ.get(SECURE, ""), chosen)


@dataclass(frozen=True, slots=True)
class LineEnds:
    """Whom an interpreter stands for, to its caller and to its server; in plain text: nobody."""

    server: str = ""  # a slave's name, or empty: the master
    caller: TlsSource | None = None
    guard: Guard | None = None  # holds the server's certificate; asked nothing, since the true server asks

    def dial(self, address: str) -> Endpoint:
        return slave_peer(self.server, address, self.caller) if self.server else master_peer(address, self.caller)


class RunCertificates:
    """One certificate for each process of a run, and for the test that looks."""

    def __init__(self, directory: Path, run: str, slaves: Iterable[str], clusters: Iterable[str]) -> None:
        self.enrolled = Enrolled(directory / DIRECTORY, run)
        self._sources: dict[tuple[str, PeerRole], TlsSource] = {}
        self._names = [(MASTER_NAME, PeerRole.MASTER), (OPERATOR, PeerRole.OPERATOR)]
        self._names += [(name, PeerRole.SLAVE) for name in slaves]
        self._names += [(name, PeerRole.CLUSTER) for name in clusters]
        self.enroll_all()

    def enroll(self, name: str, role: PeerRole) -> None:
        """A certificate for a name, the first or a new one."""
        self.enrolled.enroll(name, role)

    def enroll_all(self) -> None:
        for name, role in self._names:
            self.enroll(name, role)

    def serials(self) -> list[str]:
        """Of the certificates that are valid now, as `dips certs revoke` takes them."""
        return [f"{row.serial:x}" for row in self.enrolled.authority.list_issued() if row.revoked is None]

    def revoke(self, *labels: str) -> None:
        """`name.role`, or serials; every process of the run reads the same list."""
        for label in labels:
            self.enrolled.authority.revoke(label)
        self._publish(self.enrolled.authority)

    def add_authority(self) -> None:
        """From now on a second one signs; both are trusted."""
        former = self.enrolled.authority
        self.enrolled.authority = Authority.create(former.directory.with_name("later"), self.enrolled.run)
        self._publish(former, self.enrolled.authority)

    def remove_old_authority(self) -> None:
        self._publish(self.enrolled.authority)

    def _publish(self, *authorities: Authority) -> None:
        """Put into the files that all read what these authorities say."""
        files = self.enrolled.files_of("")
        for to, name in ((files.ca, ROOT), (files.crl, REVOCATIONS)):
            certificates.write_public(to, b"".join((a.directory / name).read_bytes() for a in authorities))

    @property
    def security(self) -> Mapping[str, Any]:
        """Keys of run file and cluster files."""
        return {"tls": str(self.enrolled.files_of("{name}.{role}").cert)}

    def source(self, name: str, role: PeerRole) -> TlsSource:
        """As whom a process shows itself; renewed as its own are."""
        who = name, role
        if who not in self._sources:
            files, looks = self.enrolled.files_of(f"{name}.{role}"), count(step=LOOK_S)
            # Looks again whenever it is asked: a process that was started since has the newest at once.
            self._sources[who] = TlsSource(files, name, role, self.enrolled.run, clock=lambda: next(looks))
        return self._sources[who]

    def ends(self, caller: str, role: PeerRole, server: str = "") -> LineEnds:
        """Of a line from a process to a slave, or to the master."""
        served = self.source(server, PeerRole.SLAVE) if server else self.source(MASTER_NAME, PeerRole.MASTER)
        return LineEnds(server, self.source(caller, role), Guard(served))
