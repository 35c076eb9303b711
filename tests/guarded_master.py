"""A master's guard of a real authority, whose clocks a test moves."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

from dips.identity.certificates import utc_now
from dips.identity.names import MASTER_NAME, PeerRole
from dips.transport.gate import PEM_KEY, Guard
from dips.transport.tls import TlsSource
from dips.wire.generated import cluster_pb2
from tests.enrolled import Enrolled

JOIN = "/dips.v1.ClusterService/Join"


class GuardedMaster:
    def __init__(self, directory: Path) -> None:
        self.enrolled, self.seconds, self.wall = Enrolled(directory), 0.0, utc_now()
        files = self.enrolled.enroll(MASTER_NAME, PeerRole.MASTER)
        source = TlsSource(files, MASTER_NAME, PeerRole.MASTER, "july", clock=lambda: self.seconds)
        self.guard, self.refused = Guard(source, None, lambda: self.wall), list[tuple[str, str, str]]()
        self.guard.on_refused = lambda who, method, _, why: self.refused.append((who, method, why))

    def context(self, name: str, role: PeerRole = PeerRole.CLUSTER, days: int = 90) -> dict[str, Any]:
        return {PEM_KEY: (self.enrolled.enroll(name, role, timedelta(days=days)).cert.read_bytes(),)}

    def join(self, name: str, context: dict[str, Any]) -> None:
        self.guard.check_call(JOIN, cluster_pb2.ClusterJoined(cluster=name), context)
