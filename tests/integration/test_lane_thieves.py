"""Enrolled and not, they reach for what is another's on the lanes of a secured run; a cluster beside them trains on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dips.client.agent.agent import MasterLink
from dips.client.rank.transfer import Piece, TransferIdentity, pull_pieces, push_pieces
from dips.client.version_pull import CALL_S, _describe_run, list_pieces
from dips.dataclass import replace
from dips.errors import Denied, StalePush, UnavailableSlave
from dips.identity.authority import Authority
from dips.identity.names import PeerRole
from dips.identity.paths import TlsFiles
from dips.ids import PullId, PushId
from dips.protocol.effects import Grant, Joined, Pending, Refused
from dips.protocol.enums import Activity, TrainerState
from dips.protocol.events import ClusterJoined, PullFinished, PullRequested, PushAborted, PushRequested
from dips.protocol.heartbeats import ClusterHeartbeat
from dips.protocol.manifest import Manifest
from dips.transport import seal
from dips.transport.endpoints import Endpoint, master_peer
from dips.transport.tls import TlsSource
from tests.enrolled import enroll_all
from tests.integration import cluster_harness as harness
from tests.integration.test_mistakes import tiny
from tests.integration.train_constant import tensors

RUN = "test"
CLUSTERS = ("west", "north", "eve")
PEERS = [
    ("master", PeerRole.MASTER),
    *((f"ps{i}", PeerRole.SLAVE) for i in range(2)),
    *((name, PeerRole.CLUSTER) for name in CLUSTERS),
]
WAIT_S = 30.0


@dataclass
class PlayedCluster:
    """A cluster that the test plays: it has joined with its certificate, and its lease is kept."""

    name: str
    inc: int
    master: Endpoint
    link: MasterLink
    manifest: Manifest
    keys: seal.KeyPair
    lease: asyncio.Task[None]

    def identity(self, seq: int, name: str | None = None, inc: int | None = None) -> TransferIdentity:
        return TransferIdentity(RUN, name or self.name, self.inc if inc is None else inc, seq, 0, self.keys)

    def pieces(self, value: float) -> list[Piece]:
        return list_pieces(self.manifest, np.full(self.manifest.numel, value, np.float32))

    async def request(self, question: PullRequested | PushRequested) -> Grant:
        """Ask until it is granted."""
        async with asyncio.timeout(WAIT_S):
            while not isinstance(answer := await self.link.ask_master(question), Grant):
                assert isinstance(answer, (Pending, Refused)), answer
                await asyncio.sleep(0.05)
        return answer


async def keep_lease(link: MasterLink, name: str, inc: int, seq: int) -> None:
    """Send heartbeats of a cluster that awaits transfer `seq`; end by the error of the first that is refused."""
    while True:
        beat = ClusterHeartbeat(
            name, inc, TrainerState.STARTING, Activity.PULL, 0, 0, 0, 0, 0.0, None, 0, 0, 0.0, transfer_seq=seq
        )
        await link.send_heartbeat(beat, CALL_S)
        await asyncio.sleep(0.3)


@asynccontextmanager
async def member(run: harness.Run, name: str, seq: int) -> AsyncIterator[PlayedCluster]:
    files = TlsFiles.of(Path(run.security["tls"]), name, PeerRole.CLUSTER)
    source = TlsSource(files, name, PeerRole.CLUSTER, RUN)
    master = master_peer(run.address, source)
    described = await _describe_run(master)
    manifest, link = Manifest.from_json(described["manifest"]), MasterLink(master, described["shared"])
    event = ClusterJoined(0, name, f"nonce of {name}", RUN, manifest.digest, described["config_digest"])
    joined = await link.ask_master(event)
    assert isinstance(joined, Joined), joined
    lease = asyncio.create_task(keep_lease(link, name, joined.inc, seq))
    try:
        yield PlayedCluster(name, joined.inc, master, link, manifest, seal.new_keys(), lease)
    finally:
        lease.cancel()
        await asyncio.gather(lease, return_exceptions=True)
        await link.close()


async def fails(error: type[Exception], match: str, move: Callable[..., Any], *args: Any) -> None:
    """The transfer fails so."""
    with pytest.raises(error, match=match):
        await asyncio.to_thread(move, *args)


@pytest.mark.timeout(180)
def test_nothing_of_another_is_to_be_had_on_the_lanes(tmp_path: Path) -> None:
    security = enroll_all(tmp_path / "certs", RUN, PEERS)
    shared = {"penalty": {"gates": []}, "stop": {"versions": 10_000}}
    with harness.Run(tmp_path, tensors(), shared=shared, slaves=2, security=security) as run:
        run.start_servers()
        west = run.start_cluster("west", tiny(tmp_path, "until_told"), max_restarts=0)
        run.until(lambda: len(run.versions()) >= 1, 60, "west's first version")
        asyncio.run(reach_for_all(run))
        before = len(run.versions())
        run.until(lambda: len(run.versions()) >= before + 2, 60, "two more versions of west")
        assert west.code is None and not run.skipped()


async def reach_for_all(run: harness.Run) -> None:
    """North has a pull and then a push open; eve, whose certificate is as good, wants both."""
    async with member(run, "north", 1) as north, member(run, "eve", 1) as eve:
        granted = await north.request(PullRequested(0, PullId("north", north.inc, 1), 1, None, (north.keys.public,)))
        assert all(slave.key for slave in granted.slaves)
        hurried = replace(granted, deadline_s=1.0)

        # nobody is let in: not in plain text, not with a key of nothing that is open
        plain = replace(hurried, slaves=tuple(replace(slave, key="") for slave in granted.slaves))
        await fails(UnavailableSlave, "not connected", pull_pieces, plain, north.identity(1), north.pieces(0.0))
        await fails(UnavailableSlave, "not connected", pull_pieces, hurried, eve.identity(1), eve.pieces(0.0))
        stolen = eve.identity(1, "north", north.inc)
        await fails(UnavailableSlave, "not connected", pull_pieces, hurried, stolen, eve.pieces(0.0))

        # eve is let in by a pull of her own, and says HELLO on north's
        own = PullRequested(0, PullId("eve", eve.inc, 1), 1, None, (eve.keys.public,))
        hers = await eve.request(own)
        await fails(Denied, "not that of rank 0 of north/", pull_pieces, granted, stolen, eve.pieces(0.0))
        # north has lost nothing by it; its next push is nobody else's either
        room = north.pieces(0.0)
        await asyncio.to_thread(pull_pieces, granted, north.identity(1), room)
        assert any(piece.array.any() for piece in room)
        await north.link.ask_master(PullFinished(0, PullId("north", north.inc, 1), True))
        push = PushId("north", north.inc, 2)
        pushing = await north.request(PushRequested(0, push, granted.version, 1, keys=(north.keys.public,)))
        forged = eve.identity(2, "north", north.inc)
        await fails(Denied, "not that of rank 0 of north/", push_pieces, pushing, forged, eve.pieces(9.0))
        await asyncio.to_thread(push_pieces, pushing, north.identity(2), north.pieces(1.0))
        await north.link.ask_master(PushAborted(0, push, "it was a try"))

        # eve's own pull ends with her certificate, and her key with it
        await asyncio.to_thread(pull_pieces, hers, eve.identity(1), eve.pieces(0.0))
        Authority.open(Path(run.security["tls"]).with_name("ca")).revoke("eve.cluster")
        with pytest.raises(Denied, match="revoked"):
            await asyncio.wait_for(eve.lease, WAIT_S)
        async with asyncio.timeout(WAIT_S):
            while standing_of(run, "eve"):
                await asyncio.sleep(0.1)
        late = replace(hers, deadline_s=1.0)
        async with asyncio.timeout(WAIT_S):
            while True:
                with suppress(StalePush):  # a slave has yet to get the order: its pull is there, and over
                    await fails(UnavailableSlave, "not connected", pull_pieces, late, eve.identity(1), eve.pieces(0.0))
                    break


def standing_of(run: harness.Run, cluster: str) -> bool:
    """Whether the ledger has the cluster as one that lives."""
    with run.ledger() as ledger:
        return not next(c.ended for c in ledger.read_state().clusters if c.name == cluster)
