"""gRPC with certificates, real sockets: who gets in, who is told what, and what changes without a restart."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from dips.client.agent.agent import MasterLink
from dips.errors import ConfigError, Denied, UnavailableMaster
from dips.identity import certificates
from dips.identity.certificates import utc_now
from dips.identity.names import MASTER_NAME, PeerRole
from dips.identity.paths import TlsFiles
from dips.master.runtime import dial_slave
from dips.protocol.events import ClusterLeft
from dips.telemetry.refusals import refusals_by_reason
from dips.transport import control, tls
from dips.transport.endpoints import Endpoint, master_peer
from dips.transport.gate import Guard
from dips.transport.limits import PATIENCE_S
from dips.transport.tls import LOOK_S, TlsSource
from dips.wire.generated import cluster_pb2, operator_pb2
from dips.wire.generated.cluster_pb2_grpc import ClusterServiceServicer, ClusterServiceStub
from dips.wire.generated.cluster_pb2_grpc import add_ClusterServiceServicer_to_server as add_clusters
from dips.wire.generated.operator_pb2_grpc import OperatorServiceStub
from dips.wire.generated.slave_pb2 import Order
from dips.wire.generated.slave_pb2_grpc import OrderServiceServicer
from dips.wire.generated.slave_pb2_grpc import add_OrderServiceServicer_to_server as add_orders
from tests.enrolled import Enrolled

RUN = "july"
NO_LIST = Path("no crl.pem")


@pytest.fixture
def enrolled(tmp_path: Path) -> Enrolled:
    return Enrolled(tmp_path, RUN)


class Clusters(ClusterServiceServicer):
    """A master that lets every request in that reaches it."""

    async def Join(self, request: Any, context: Any) -> cluster_pb2.JoinReply:
        return cluster_pb2.JoinReply(pending=cluster_pb2.Pending(reason=request.cluster))


class HandClock:
    """Time for a source of certificates, so that it looks at its files when the test says."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def source_of(files: TlsFiles, name: str, role: PeerRole, clock: HandClock | None = None, **more: Any) -> TlsSource:
    return TlsSource(files, name, role, RUN, clock=clock or HandClock(), **more)


@asynccontextmanager
async def master(source: TlsSource | None, clusters: tuple[str, ...] | None = None) -> AsyncIterator[tuple[str, Any]]:
    guard = Guard(source, clusters) if source is not None else None
    server = control.make_server(lambda method, error: pytest.fail(f"{method}: {error!r}"), guard)
    add_clusters(Clusters(), server)
    port = control.bind_server(server, "127.0.0.1:0", "master.listen", guard)
    await server.start()
    try:
        yield f"127.0.0.1:{port}", guard
    finally:
        await server.stop(0)


async def join(peer: Endpoint, cluster: str, channel: Any = None) -> str:
    """Join once; what the master answered."""
    own = channel or control.open_channel(peer)
    try:
        reply = await control.call_method(
            ClusterServiceStub(own).Join, cluster_pb2.ClusterJoined(cluster=cluster), deadline_s=10.0, peer=peer,
            unavailable=UnavailableMaster, explain=True,
        )  # fmt: skip
    finally:
        if channel is None:
            await own.close()
    return str(reply.pending.reason)


async def test_a_cluster_with_its_certificate(enrolled: Enrolled) -> None:
    ours = source_of(enrolled.enroll(MASTER_NAME, PeerRole.MASTER), MASTER_NAME, PeerRole.MASTER)
    west = source_of(enrolled.enroll("west", PeerRole.CLUSTER), "west", PeerRole.CLUSTER)
    async with master(ours) as (address, guard):
        assert await join(master_peer(address, west), "west") == "west"
        with pytest.raises(Denied, match="expected the name of cluster 'west' of run 'july', got 'east'"):
            await join(master_peer(address, west), "east")
        assert dict(guard.refused) == {"/dips.v1.ClusterService/Join": 1}


async def test_who_is_not_listed(enrolled: Enrolled) -> None:
    ours = source_of(enrolled.enroll(MASTER_NAME, PeerRole.MASTER), MASTER_NAME, PeerRole.MASTER)
    west = source_of(enrolled.enroll("west", PeerRole.CLUSTER), "west", PeerRole.CLUSTER)
    async with master(ours, ("east",)) as (address, _):
        with pytest.raises(Denied, match="a name of the run file's list"):
            await join(master_peer(address, west), "west")


async def test_another_role(enrolled: Enrolled) -> None:
    ours = source_of(enrolled.enroll(MASTER_NAME, PeerRole.MASTER), MASTER_NAME, PeerRole.MASTER)
    viewer = source_of(enrolled.enroll("west", PeerRole.VIEWER), "west", PeerRole.VIEWER)
    async with master(ours) as (address, _):
        with pytest.raises(
            Denied, match="expected a certificate of cluster or operator or puller, got that of viewer 'west'"
        ):
            await join(master_peer(address, viewer), "west")


async def test_a_service_that_is_not_served_is_not_reached(enrolled: Enrolled) -> None:
    ours = source_of(enrolled.enroll(MASTER_NAME, PeerRole.MASTER), MASTER_NAME, PeerRole.MASTER)
    ada = master_peer("", source_of(enrolled.enroll("ada", PeerRole.OPERATOR), "ada", PeerRole.OPERATOR))
    async with master(ours) as (address, _):
        peer = replace(ada, address=address)
        channel = control.open_channel(peer)
        with pytest.raises(Exception, match="UNIMPLEMENTED"):
            await control.call_method(
                OperatorServiceStub(channel).Drain, operator_pb2.DrainAsked(slave="s0"), deadline_s=10.0, peer=peer,
                unavailable=UnavailableMaster,
            )  # fmt: skip
        await channel.close()


async def test_orders_of_another_than_the_master(enrolled: Enrolled) -> None:
    """A stream of calls ends with the first that its peer may not make; who waits is told why."""
    guard = Guard(source_of(enrolled.enroll("s0", PeerRole.SLAVE), "s0", PeerRole.SLAVE))
    server = control.make_server(lambda method, error: pytest.fail(f"{method}: {error!r}"), guard)
    add_orders(OrderServiceServicer(), server)
    address = f"127.0.0.1:{control.bind_server(server, '127.0.0.1:0', 'slaves.s0.listen', guard)}"
    await server.start()
    calls = dial_slave("s0", address, source_of(enrolled.enroll("west", PeerRole.CLUSTER), "west", PeerRole.CLUSTER))
    with pytest.raises(Denied, match="expected a certificate of master, got that of cluster 'west'"):
        await asyncio.wait_for(calls.ask(Order(slave="s0")), 20)
    await calls.close()
    await server.stop(0)
    assert sum(guard.refused.values()) == 1


class TestStrangers:
    """Each is told what is wrong, not "Socket closed"."""

    async def test_plain_text_to_a_master_with_certificates(self, enrolled: Enrolled) -> None:
        ours = source_of(enrolled.enroll(MASTER_NAME, PeerRole.MASTER), MASTER_NAME, PeerRole.MASTER)
        async with master(ours) as (address, _):
            with pytest.raises(UnavailableMaster, match="it expects certificates: give this process a certificate"):
                await join(master_peer(address, None), "west")

    async def test_certificates_to_a_master_in_plain_text(self, enrolled: Enrolled) -> None:
        west = source_of(enrolled.enroll("west", PeerRole.CLUSTER), "west", PeerRole.CLUSTER)
        async with master(None) as (address, _):
            with pytest.raises(UnavailableMaster, match="it speaks plain text"):
                await join(master_peer(address, west), "west")

    async def test_a_certificate_of_another_authority(self, enrolled: Enrolled, tmp_path: Path) -> None:
        ours = source_of(enrolled.enroll(MASTER_NAME, PeerRole.MASTER), MASTER_NAME, PeerRole.MASTER)
        (tmp_path / "other").mkdir()
        forged = source_of(Enrolled(tmp_path / "other", RUN).enroll("west", PeerRole.CLUSTER), "west", PeerRole.CLUSTER)
        async with master(ours) as (address, _):
            with pytest.raises(UnavailableMaster, match=r"its certificate is refused: .* \(by .*other/ca\.crt\)"):
                await join(master_peer(address, forged), "west")

    async def test_a_forged_certificate_that_trusts_the_true_master(self, enrolled: Enrolled, tmp_path: Path) -> None:
        true = enrolled.enroll(MASTER_NAME, PeerRole.MASTER)
        (tmp_path / "other").mkdir()
        files = Enrolled(tmp_path / "other", RUN).enroll("west", PeerRole.CLUSTER)
        files.ca.write_bytes(files.ca.read_bytes() + true.ca.read_bytes())
        forged = source_of(files, "west", PeerRole.CLUSTER)
        async with master(source_of(true, MASTER_NAME, PeerRole.MASTER)) as (address, guard):
            with pytest.raises(UnavailableMaster, match="it refused our certificate"):
                await join(master_peer(address, forged), "west")
            assert not guard.refused, "the handshake already failed"
            before = refusals_by_reason().get("handshake", 0)
            guard.handshakes._clock = lambda: time.monotonic() + PATIENCE_S
            guard.handshakes.on_call("another")
            assert refusals_by_reason().get("handshake", 0) > before, "and is counted when no call has followed it"

    async def test_a_slave_that_poses_as_the_master(self, enrolled: Enrolled) -> None:
        slave = source_of(enrolled.enroll("s0", PeerRole.SLAVE), "s0", PeerRole.SLAVE)
        west = source_of(enrolled.enroll("west", PeerRole.CLUSTER), "west", PeerRole.CLUSTER)
        async with master(slave) as (address, _):
            with pytest.raises(UnavailableMaster, match=r"its certificate is of slave 's0'.*expected master 'master'"):
                await join(master_peer(address, west), "west")


class TestWithoutRestart:
    async def test_a_renewed_certificate_and_a_half_written_one(self, enrolled: Enrolled) -> None:
        clock, problems = HandClock(), []
        files = enrolled.enroll(MASTER_NAME, PeerRole.MASTER)
        ours = source_of(files, MASTER_NAME, PeerRole.MASTER, clock, report=problems.append)
        first, old_key = ours.read_current(), files.key.read_bytes()
        enrolled.enroll(MASTER_NAME, PeerRole.MASTER)
        new_key = files.key.read_bytes()
        files.key.write_bytes(old_key)  # between the two renames
        clock.now += LOOK_S
        assert ours.read_current() is first and "one of them was renewed without the other" in problems[0]
        files.key.write_bytes(new_key)
        clock.now += LOOK_S
        assert ours.read_current().cert != first.cert
        west = source_of(enrolled.enroll("west", PeerRole.CLUSTER), "west", PeerRole.CLUSTER)
        async with master(ours) as (address, _):
            assert await join(master_peer(address, west), "west") == "west"

    async def test_half_a_renewal_beside_a_master_that_is_not_reached(self, enrolled: Enrolled) -> None:
        """What is wrong there is found out with what is loaded, so a daemon waits for its master, and does not end."""
        files = enrolled.enroll("west", PeerRole.CLUSTER)
        west = source_of(files, "west", PeerRole.CLUSTER)
        for spoil in (lambda: files.key.write_bytes(certificates.key_to_pem(certificates.new_key())), files.key.unlink):
            spoil()
            async with master(None) as (address, _):
                with pytest.raises(UnavailableMaster, match="it speaks plain text"):
                    await join(master_peer(address, west), "west")

    def test_a_secret_that_vanishes(self, enrolled: Enrolled) -> None:
        """What was loaded stays in use, and the report names the file and what to do."""
        clock, problems = HandClock(), []
        files = enrolled.enroll("west", PeerRole.CLUSTER)
        ours = source_of(files, "west", PeerRole.CLUSTER, clock, report=problems.append)
        first, content = ours.read_current(), files.cert.read_bytes()
        files.cert.unlink()
        clock.now += LOOK_S
        assert ours.read_current() is first
        (problem,) = problems
        assert f"tls: {files.cert} cannot be read: No such file" in problem and "bring it here" in problem
        files.cert.write_bytes(content)
        clock.now += LOOK_S
        assert ours.read_current().cert == first.cert and len(problems) == 1

    def test_a_silent_disk_is_waited_for_once(self, enrolled: Enrolled, monkeypatch: pytest.MonkeyPatch) -> None:
        """Event loops ask for the certificate: a network's disk without its server stopped heartbeats and ended leases.

        A read of a FIFO waits for its writer, as one of such a disk for its server.
        """
        monkeypatch.setattr(tls, "SILENT_S", 0.05)
        clock, files = HandClock(), enrolled.enroll("west", PeerRole.CLUSTER)
        ours = source_of(files, "west", PeerRole.CLUSTER, clock)
        first = ours.read_current()
        enrolled.enroll("west", PeerRole.CLUSTER)
        renewed = files.cert.read_bytes()
        files.cert.unlink()
        os.mkfifo(files.cert)
        for _ in range(3):
            clock.now += LOOK_S
            assert ours.read_current() is first and ours.find_problem() == ""
        looks = [thread for thread in threading.enumerate() if thread.name == "certificates"]
        assert len(looks) == 1, "one thread waits for it, however long it is silent"
        files.cert.write_bytes(renewed)  # the disk answers
        looks[0].join(10.0)
        assert ours.read_current().cert == renewed != first.cert

    def test_what_breaks_a_look_is_heard_though_its_disk_answers_late(
        self, enrolled: Enrolled, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nobody waits for it any more: whoever asks for the certificate next has the error, once, and none later."""
        monkeypatch.setattr(tls, "SILENT_S", 0.05)
        clock, files = HandClock(), enrolled.enroll("west", PeerRole.CLUSTER)
        ours = source_of(files, "west", PeerRole.CLUSTER, clock)
        ours._report = None  # type: ignore[assignment]  # a bug
        content = files.cert.read_bytes()
        files.cert.unlink()
        os.mkfifo(files.cert)
        clock.now += LOOK_S
        assert ours.read_current().cert == content
        (look,) = [thread for thread in threading.enumerate() if thread.name == "certificates"]
        files.cert.write_bytes(b"no certificate")
        look.join(10.0)
        with pytest.raises(TypeError, match="not callable"):
            ours.read_current()
        assert ours.read_current().cert == content

    def test_a_list_that_cannot_be_looked_at_is_told(self, enrolled: Enrolled) -> None:
        """A disk may refuse to say whether it is there: who has loaded goes on, who starts does not."""
        clock, problems = HandClock(), []
        files = enrolled.enroll("west", PeerRole.CLUSTER)
        enrolled.authority.revoke("west.cluster")
        enrolled.enroll("west", PeerRole.CLUSTER)
        files.crl.write_bytes((enrolled.directory / "ca" / "crl.pem").read_bytes())
        ours = source_of(files, "west", PeerRole.CLUSTER, clock, report=problems.append)
        first = ours.read_current()
        assert first.revoked
        files.crl.unlink()
        files.crl.symlink_to("x" * 300)
        clock.now += LOOK_S
        assert ours.read_current() is first
        told = f"tls: {files.crl} cannot be read: File name too long"
        assert problems == [f"the new files are not used: {told}"] == [ours.find_problem()]
        with pytest.raises(ConfigError, match="cannot be read: File name too long"):
            source_of(files, "west", PeerRole.CLUSTER)

    def test_a_disk_that_answers_with_an_error_is_asked_again(self, enrolled: Enrolled, tmp_path: Path) -> None:
        """As one of a network whose server starts anew: slaves and agents ended at their next heartbeat."""
        clock, problems, disk = HandClock(), [], tmp_path / "disk"
        disk.symlink_to(enrolled.enroll("west", PeerRole.CLUSTER).cert.parent)
        files = TlsFiles.beside(disk / "west.cluster.crt")
        ours = source_of(files, "west", PeerRole.CLUSTER, clock, report=problems.append)
        first = ours.read_current()
        disk.unlink()
        disk.symlink_to("n" * 300)  # no name of a file is as long
        for _ in range(3):
            clock.now += LOOK_S
            assert ours.read_current() is first
        assert "File name too long" in problems[0] and len(problems) == len(set(problems))
        disk.unlink()
        disk.symlink_to(enrolled.directory)
        clock.now += LOOK_S
        assert (ours.read_current().cert, ours.find_problem()) == (first.cert, "")

    def test_what_a_refused_renewal_says_to_do_helps(self, enrolled: Enrolled) -> None:
        """Who may read a file changes neither its size nor its time: the certificate before was used to its end."""
        clock, problems = HandClock(), []
        files = enrolled.enroll("west", PeerRole.CLUSTER)
        ours = source_of(files, "west", PeerRole.CLUSTER, clock, report=problems.append)
        first = ours.read_current()
        enrolled.enroll("west", PeerRole.CLUSTER)
        files.key.chmod(0o644)
        for _ in range(3):
            clock.now += LOOK_S
            assert ours.read_current() is first
        assert len(problems) == 1 and problems[0].endswith("chmod 600 it")
        files.key.chmod(0o600)
        clock.now += LOOK_S
        assert (ours.read_current().cert, ours.find_problem()) == (files.cert.read_bytes(), "")

    def test_a_list_that_vanishes_lets_nobody_in_again(self, enrolled: Enrolled) -> None:
        """Without crl.pem beside the certificate nothing is revoked; one that revoked something is missed."""
        clock, problems = HandClock(), []
        ours = source_of(
            enrolled.enroll("west", PeerRole.CLUSTER), "west", PeerRole.CLUSTER, clock, report=problems.append
        )
        content = ours.files.crl.read_bytes()
        ours.files.crl.unlink()
        clock.now += LOOK_S
        assert ours.read_current().revoked == frozenset() and problems == []
        ours.files.crl.write_bytes(content)
        enrolled.enroll("east", PeerRole.CLUSTER)
        (row,) = enrolled.authority.revoke("east.cluster")
        ours.files.crl.write_bytes((enrolled.directory / "ca" / "crl.pem").read_bytes())
        clock.now += LOOK_S
        assert ours.read_current().revoked == {row.serial}
        ours.files.crl.unlink()
        clock.now += LOOK_S
        assert ours.read_current().revoked == {row.serial}
        assert "crl.pem is gone, and what it revoked stays revoked: bring it back" in problems[-1]

    @pytest.mark.parametrize("by", ["an older one", "another authority's"])
    def test_a_list_that_is_replaced_lets_nobody_in_again(self, enrolled: Enrolled, tmp_path: Path, by: str) -> None:
        """By a copy from before, or by the list of a new authority alone while the former one is trusted: what the
        present list revoked stays so, and what the other one revokes counts, too."""
        clock, problems = HandClock(), []
        files = enrolled.enroll("west", PeerRole.CLUSTER)
        (tmp_path / "new").mkdir()
        later = Enrolled(tmp_path / "new", RUN)
        files.ca.write_bytes(files.ca.read_bytes() + later.files_of("east.cluster").ca.read_bytes())
        ours = source_of(files, "west", PeerRole.CLUSTER, clock, report=problems.append)
        before, revoked = files.crl.read_bytes(), set[int]()
        for authority in (enrolled, later):
            authority.enroll("east", PeerRole.CLUSTER)
        (row,) = enrolled.authority.revoke("east.cluster")
        revoked.add(row.serial)
        clock.now += LOOK_S
        assert ours.read_current().revoked == revoked
        if by == "another authority's":
            (row,) = later.authority.revoke("east.cluster")
            revoked.add(row.serial)
            before = later.files_of("east.cluster").crl.read_bytes()
        present = files.crl.read_bytes()
        files.crl.write_bytes(before)
        for _ in range(3):
            clock.now += LOOK_S
            assert ours.read_current().revoked == revoked
        assert len(problems) == 1 and "crl.pem lacks what it had revoked" in problems[0] == ours.find_problem()
        files.crl.write_bytes(present + (before if by == "another authority's" else b""))
        clock.now += LOOK_S
        assert ours.read_current().revoked == revoked and ours.find_problem() == ""

    @pytest.mark.parametrize("ends", ["revoked", "expired"])
    def test_whose_own_certificate_has_ended_still_hears_who_is_revoked(self, enrolled: Enrolled, ends: str) -> None:
        """It goes on with what it has loaded until it is given another, and so must refuse whom a later list names."""
        clock, problems = HandClock(), []
        files = enrolled.enroll("west", PeerRole.CLUSTER)
        ours = source_of(files, "west", PeerRole.CLUSTER, clock, report=problems.append)
        enrolled.enroll("east", PeerRole.CLUSTER)
        if ends == "revoked":
            enrolled.authority.revoke("west.cluster")
        else:
            enrolled.enroll("west", PeerRole.CLUSTER, timedelta())
        (row,) = enrolled.authority.revoke("east.cluster")
        files.crl.write_bytes((enrolled.directory / "ca" / "crl.pem").read_bytes())
        clock.now += LOOK_S
        assert row.serial in ours.read_current().revoked
        assert len(problems) == 1 and f"{files.cert} " in problems[0] and ends in problems[0]

    def test_whose_certificate_has_ended_is_told_of_a_damaged_list_once(self, enrolled: Enrolled) -> None:
        """Of both, each once: it lets in whom the list names until somebody has brought a whole one."""
        clock, problems = HandClock(), []
        files = enrolled.enroll("west", PeerRole.CLUSTER)
        ours = source_of(files, "west", PeerRole.CLUSTER, clock, report=problems.append)
        enrolled.enroll("west", PeerRole.CLUSTER, timedelta())
        enrolled.enroll("east", PeerRole.CLUSTER)
        before = files.crl.read_bytes()
        (row,) = enrolled.authority.revoke("east.cluster")
        whole = files.crl.read_bytes()
        files.crl.unlink()
        files.crl.write_bytes(whole[:-40])
        for _ in range(3):
            clock.now += LOOK_S
            assert ours.read_current().revoked == frozenset()
        ended, damaged = problems
        assert f"{files.cert} expired" in ended and ours.find_problem() == ended
        assert damaged.startswith(f"the new revocation list is not used: tls: {files.crl}")
        files.crl.write_bytes(whole)
        clock.now += LOOK_S
        assert ours.read_current().revoked == {row.serial} and len(problems) == 2
        files.crl.write_bytes(before)
        clock.now += LOOK_S
        assert ours.read_current().revoked == {row.serial} and "lacks what it had revoked" in problems[2]
        assert ours.find_problem() == ended, "its certificate is what must be mended first"

    async def test_one_that_is_revoked_on_an_open_connection(self, enrolled: Enrolled) -> None:
        clock = HandClock()
        ours = source_of(enrolled.enroll(MASTER_NAME, PeerRole.MASTER), MASTER_NAME, PeerRole.MASTER, clock)
        west = source_of(enrolled.enroll("west", PeerRole.CLUSTER), "west", PeerRole.CLUSTER)
        east = source_of(enrolled.enroll("east", PeerRole.CLUSTER), "east", PeerRole.CLUSTER)
        async with master(ours) as (address, _):
            peer = master_peer(address, west)
            channel = control.open_channel(peer)
            assert await join(peer, "west", channel) == "west"
            enrolled.authority.revoke("west.cluster")
            clock.now += LOOK_S
            with pytest.raises(Denied, match="the certificate of cluster 'west' of run 'july' is revoked"):
                await join(peer, "west", channel)
            assert await join(master_peer(address, east), "east") == "east"
            await channel.close()

    async def test_a_caller_shows_its_renewed_certificate(self, enrolled: Enrolled) -> None:
        """The channel stays, its connection is made anew."""
        served, called = HandClock(), HandClock()
        ours = source_of(enrolled.enroll(MASTER_NAME, PeerRole.MASTER), MASTER_NAME, PeerRole.MASTER, served)
        west = source_of(enrolled.enroll("west", PeerRole.CLUSTER), "west", PeerRole.CLUSTER, called)
        async with master(ours) as (address, _):
            peer = master_peer(address, west)
            channel = control.open_channel(peer)
            assert await join(peer, "west", channel) == "west"
            enrolled.authority.revoke("west.cluster")
            served.now += LOOK_S
            with pytest.raises(Denied, match="is revoked"):
                await join(peer, "west", channel)
            enrolled.enroll("west", PeerRole.CLUSTER)
            called.now += LOOK_S
            assert await join(peer, "west", channel) == "west"
            await channel.close()

    async def test_the_authority_rolls_over(self, enrolled: Enrolled, tmp_path: Path) -> None:
        """Both are trusted, then certificates of the new one arrive, then the old one is gone."""
        clock = HandClock()
        files = enrolled.enroll(MASTER_NAME, PeerRole.MASTER)
        ours = source_of(replace(files, crl=NO_LIST), MASTER_NAME, PeerRole.MASTER, clock)
        (tmp_path / "new").mkdir()
        later = Enrolled(tmp_path / "new", RUN).enroll("west", PeerRole.CLUSTER)
        async with master(ours) as (address, guard):
            both = files.ca.read_bytes() + later.ca.read_bytes()
            later.ca.write_bytes(both)
            west = source_of(replace(later, crl=NO_LIST), "west", PeerRole.CLUSTER)
            with pytest.raises(UnavailableMaster):
                await join(master_peer(address, west), "west")
            assert guard.handshakes._begun, "it is counted when no call has followed"
            files.ca.write_bytes(both)
            clock.now += LOOK_S
            assert await join(master_peer(address, west), "west") == "west"

    async def test_an_authority_that_goes_takes_open_connections_with_it(
        self, enrolled: Enrolled, tmp_path: Path
    ) -> None:
        clock = HandClock()
        files, old = enrolled.enroll(MASTER_NAME, PeerRole.MASTER), enrolled.enroll("west", PeerRole.CLUSTER)
        ours = source_of(replace(files, crl=NO_LIST), MASTER_NAME, PeerRole.MASTER, clock)
        (tmp_path / "new").mkdir()
        new = Enrolled(tmp_path / "new", RUN).enroll(MASTER_NAME, PeerRole.MASTER)
        old_ca = tmp_path / "old.crt"
        old_ca.write_bytes(files.ca.read_bytes())
        async with master(ours) as (address, guard):
            peer = master_peer(address, source_of(replace(old, ca=old_ca, crl=NO_LIST), "west", PeerRole.CLUSTER))
            channel = control.open_channel(peer)
            assert await join(peer, "west", channel) == "west"
            files.ca.write_bytes(new.ca.read_bytes())
            files.cert.write_bytes(new.cert.read_bytes())
            files.key.write_bytes(new.key.read_bytes())
            clock.now += LOOK_S
            with pytest.raises(Denied, match="'west' of run 'july' is of an authority that is trusted no longer"):
                await join(peer, "west", channel)
            assert dict(guard.refused) == {"/dips.v1.ClusterService/Join": 1}
            await channel.close()

    async def test_an_agent_whose_own_certificate_expired_is_told(self, enrolled: Enrolled) -> None:
        """A handshake that is refused looks like a master that is away; until it expires, that is what it is."""
        clock = HandClock()
        west = source_of(enrolled.enroll("west", PeerRole.CLUSTER), "west", PeerRole.CLUSTER, clock)
        link = MasterLink(master_peer("127.0.0.1:1", west), {})
        try:
            with pytest.raises(UnavailableMaster):
                await link.ask_master(ClusterLeft(0, "west", 1, 0))
            west._loaded = replace(west._loaded, until=utc_now() - timedelta(minutes=1))
            with pytest.raises(Denied, match=r"west.cluster.crt expired at .* renew it by `dips certs renew`"):
                await link.ask_master(ClusterLeft(0, "west", 1, 0))
            enrolled.enroll("west", PeerRole.CLUSTER)
            clock.now += LOOK_S
            with pytest.raises(UnavailableMaster):
                await link.ask_master(ClusterLeft(0, "west", 1, 0))
        finally:
            await link.close()


def test_anothers_files_are_refused_at_the_start(enrolled: Enrolled) -> None:
    with pytest.raises(ConfigError, match=r"expected a certificate of slave 's1'.*got one of slave 's0'"):
        source_of(enrolled.enroll("s0", PeerRole.SLAVE), "s1", PeerRole.SLAVE)
