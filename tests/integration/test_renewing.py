"""Certificates that renew themselves: the authority's port by real gRPC and daemons whose certificates live seconds."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import structlog
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from dips.commands import certs
from dips.commands.renewing import AuthorityPort, Renewer, serve_authority
from dips.errors import Busy, Denied, RemoteProtocolError, Unavailable
from dips.files import sync_path
from dips.identity import certificates
from dips.identity.authority import MOST_LIVE, Authority
from dips.identity.certificates import utc_now
from dips.identity.names import AUTHORITY_NAME, PeerIdentity, PeerRole, make_identity
from dips.identity.paths import TlsFiles
from dips.identity.tls_files import load_tls
from dips.transport import control
from dips.transport.endpoints import Endpoint
from dips.transport.gate import Guard
from dips.transport.tls import TlsSource
from dips.wire.generated import authority_pb2
from dips.wire.generated.authority_pb2_grpc import AuthorityServiceStub, add_AuthorityServiceServicer_to_server
from tests.enrolled import Enrolled
from tests.integration import cluster_harness as harness
from tests.integration.test_mistakes import CLI, tiny
from tests.integration.train_constant import tensors
from tests.waiting import eventually

RUN = "july"
DAY = timedelta(days=1)
LOG = structlog.get_logger()


@pytest.fixture
def enrolled(tmp_path: Path) -> Enrolled:
    return Enrolled(tmp_path, RUN)


@asynccontextmanager
async def served(enrolled: Enrolled, life: timedelta = DAY) -> AsyncIterator[str]:
    """The authority's port; its address."""
    address = asyncio.get_running_loop().create_future()
    ca = enrolled.directory / "ca"
    task = asyncio.create_task(serve_authority(ca, "127.0.0.1:0", life, LOG, address.set_result))
    await asyncio.wait([address, task], return_when=asyncio.FIRST_COMPLETED)
    try:
        yield address.result()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def said_by(files: TlsFiles, address: str) -> tuple[Renewer, list[str]]:
    said: list[str] = []
    return Renewer(files.cert, address, said.append), said


async def ask(files: TlsFiles, address: str, request: bytes) -> Any:
    """The bare call, by who holds `files`."""
    unaware = replace(files, crl=files.ca.with_name("no crl.pem"))  # whoever asks leaves a list out that names him
    own = load_tls(unaware).identity
    source = TlsSource(unaware, own.name, own.role, own.run)
    peer = Endpoint("it", address, PeerIdentity(AUTHORITY_NAME, PeerRole.AUTHORITY, RUN), source)
    channel = control.open_channel(peer)
    try:
        return await control.call_method(
            AuthorityServiceStub(channel).Renew, authority_pb2.RenewalAsked(request=request), deadline_s=10.0,
            peer=peer, unavailable=Unavailable,
        )  # fmt: skip
    finally:
        await channel.close()


def request_of(name: str, role: PeerRole) -> bytes:
    request = certificates.make_request(make_identity(name, role, RUN), certificates.new_key())
    return request.public_bytes(Encoding.DER)


# ---- one renewal ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", [PeerRole.MASTER, PeerRole.SLAVE, PeerRole.CLUSTER, PeerRole.PULLER, PeerRole.VIEWER])
async def test_the_same_name_another_key_and_a_day(enrolled: Enrolled, role: PeerRole) -> None:
    files = enrolled.enroll("master" if role is PeerRole.MASTER else "west", role)
    first = load_tls(files)
    async with served(enrolled) as address:
        renewer, said = said_by(files, address)
        await renewer.renew()
    now = load_tls(files)
    assert now.identity == first.identity and now.key != first.key
    assert DAY - timedelta(minutes=1) < now.until - utc_now() <= DAY
    assert said[0].startswith(f"{files.cert}: renewed, valid until")
    assert [path.name for path in files.cert.parent.glob("*.renewal.*")] == []
    assert len(Authority.open(enrolled.directory / "ca").find_live(now.identity)) == 2


async def test_no_other_name_or_role_comes_out(enrolled: Enrolled) -> None:
    """A cluster asks to be an operator, the master, another cluster, and for nothing; an operator for its own."""
    west, ada = enrolled.enroll("west", PeerRole.CLUSTER), enrolled.enroll("ada", PeerRole.OPERATOR)
    async with served(enrolled) as address:
        before = enrolled.authority.list_issued()
        for name, role in (("west", PeerRole.OPERATOR), ("master", PeerRole.MASTER), ("east", PeerRole.CLUSTER)):
            with pytest.raises(Denied, match=rf"expected a request of west\.cluster, got one of {name}\.{role}"):
                await ask(west, address, request_of(name, role))
        with pytest.raises(Denied, match="expected a certificate of cluster or master or puller or slave or viewer"):
            await ask(ada, address, request_of("ada", PeerRole.OPERATOR))
        with pytest.raises(RemoteProtocolError, match="expected a certificate request in DER from cluster 'west'"):
            await ask(west, address, b"\x30\x03junk")
    assert enrolled.authority.list_issued() == before


async def test_who_is_revoked_gets_nothing_at_once(enrolled: Enrolled) -> None:
    """The list of what was signed is read in the call: no second passes in which a thief could renew."""
    west = enrolled.enroll("west", PeerRole.CLUSTER)
    async with served(enrolled) as address:
        await ask(west, address, request_of("west", PeerRole.CLUSTER))
        revoked = enrolled.authority.revoke("west.cluster")
        with pytest.raises(Denied, match="revoked"):
            await ask(west, address, request_of("west", PeerRole.CLUSTER))
    assert len(revoked) == 2, "what was renewed is revoked as well"


async def test_a_certificate_that_was_signed_elsewhere(enrolled: Enrolled) -> None:
    """By cert-manager with the same key, or by a list that was lost: nobody could revoke what comes of it."""
    west = enrolled.enroll("west", PeerRole.CLUSTER)
    issued = enrolled.directory / "ca" / "issued.jsonl"
    issued.write_text(issued.read_text().splitlines(keepends=True)[0])
    async with served(enrolled) as address:
        with pytest.raises(Denied, match="was not signed here"):
            await ask(west, address, request_of("west", PeerRole.CLUSTER))


async def test_nothing_is_signed_for_who_has_given_up(enrolled: Enrolled, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the authority's disk was silent each try waited for the list, and was signed when it was back: these were
    all that a name may have, and its present certificate ended hours later.
    """
    monkeypatch.setattr("dips.commands.renewing.DEADLINE_S", 0.2)
    west = enrolled.enroll("west", PeerRole.CLUSTER)
    async with served(enrolled) as address:
        issued = len(enrolled.authority.list_issued())
        with enrolled.authority._lock():
            for _ in range(2):
                with pytest.raises(Unavailable):
                    await said_by(west, address)[0].renew()
        monkeypatch.setattr("dips.commands.renewing.DEADLINE_S", 10.0)
        await said_by(west, address)[0].renew()
    assert len(enrolled.authority.list_issued()) == issued + 1


async def test_who_asks_on_and_on_fills_no_disk(enrolled: Enrolled) -> None:
    west = enrolled.enroll("west", PeerRole.CLUSTER)
    async with served(enrolled) as address:
        for _ in range(MOST_LIVE - 1):
            await ask(west, address, request_of("west", PeerRole.CLUSTER))
        before = enrolled.authority.list_issued()
        with pytest.raises(Busy, match=f"has {MOST_LIVE} valid certificates"):
            await ask(west, address, request_of("west", PeerRole.CLUSTER))
        assert enrolled.authority.list_issued() == before
        east = enrolled.enroll("east", PeerRole.CLUSTER)
        await ask(east, address, request_of("east", PeerRole.CLUSTER))


class Forger(AuthorityPort):
    """Answers with a certificate of its own choice."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer

    async def Renew(self, request: Any, context: Any) -> authority_pb2.CertificateRenewed:
        return authority_pb2.CertificateRenewed(certificate=self.answer)


@asynccontextmanager
async def posing(files: TlsFiles, answer: bytes) -> AsyncIterator[str]:
    own = load_tls(files).identity
    guard = Guard(TlsSource(files, own.name, own.role, own.run))
    server = control.make_server(lambda *_: None, guard)
    add_AuthorityServiceServicer_to_server(Forger(answer), server)
    port = control.bind_server(server, "127.0.0.1:0", "it", guard)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def test_what_an_impostor_answers_is_not_used(enrolled: Enrolled, tmp_path: Path) -> None:
    """A slave at the authority's address; then answers of another key, of another authority, and no certificate."""
    west, slave = enrolled.enroll("west", PeerRole.CLUSTER), enrolled.enroll("s0", PeerRole.SLAVE)
    before = west.cert.read_bytes(), west.key.read_bytes()
    async with posing(slave, b"") as address:
        with pytest.raises(Unavailable, match="its certificate is of slave 's0'"):
            await said_by(west, address)[0].renew()
    true = enrolled.enroll(AUTHORITY_NAME, PeerRole.AUTHORITY)
    (tmp_path / "other").mkdir()
    foreign = Enrolled(tmp_path / "other", RUN).enroll("west", PeerRole.CLUSTER)
    for files, told in (
        (west, "of its authority and key"),
        (foreign, "of its authority and key"),
        (None, "no certificate"),
    ):
        der = x509.load_pem_x509_certificate(files.cert.read_bytes()).public_bytes(Encoding.DER) if files else b"junk"
        async with posing(true, der) as address:
            with pytest.raises(RemoteProtocolError, match=told):
                await said_by(west, address)[0].renew()
    assert (west.cert.read_bytes(), west.key.read_bytes()) == before


async def test_ended_between_the_two_renames(enrolled: Enrolled) -> None:
    """The key is the new one's, the certificate still the old one: who starts then has the new pair, and the next
    start of `renew` puts the other half in place.
    """
    west = enrolled.enroll("west", PeerRole.CLUSTER)
    first = west.cert.read_bytes()
    async with served(enrolled) as address:
        await said_by(west, address)[0].renew()
        renewed = west.cert.read_bytes()
        west.cert.with_name("west.cluster.renewal.crt").write_bytes(renewed)
        west.cert.write_bytes(first)
        assert load_tls(west).cert == renewed
        said_by(west, address)
    assert west.cert.read_bytes() == renewed and load_tls(west).cert == renewed


# ---- revocations ----------------------------------------------------------------------------------------------------


def far_away(enrolled: Enrolled, files: TlsFiles) -> TlsFiles:
    """The same certificate on another machine, which nothing but the port connects with the authority's directory."""
    directory = enrolled.directory / "far"
    directory.mkdir()
    for path in (files.ca, files.cert, files.key):
        shutil.copy2(path, directory)
    return TlsFiles.beside(directory / files.cert.name)


async def test_what_is_revoked_is_known_on_all_machines_soon(
    enrolled: Enrolled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody copies a file: who keeps its certificate asks for the list at each look, and the next one that connects
    is refused.
    """
    monkeypatch.setattr("dips.commands.renewing.LOOK_S", 0.05)
    west = far_away(enrolled, enrolled.enroll("west", PeerRole.CLUSTER))
    enrolled.enroll("east", PeerRole.CLUSTER)
    async with served(enrolled) as address:
        renewer, said = said_by(west, address)
        keeping = asyncio.create_task(renewer.keep())
        await eventually(lambda: said)
        assert ": 0 revoked, as of" in said[0] and load_tls(west).revoked == frozenset()
        (row,) = enrolled.authority.revoke("east.cluster")
        await eventually(lambda: len(said) >= 2)
        keeping.cancel()
    assert ": 1 revoked, as of" in said[1] and load_tls(west).revoked == {row.serial}


async def test_the_list_of_another_authority_stays(enrolled: Enrolled, tmp_path: Path) -> None:
    """During a rollover both are believed, and each revokes what it has signed."""
    (tmp_path / "other").mkdir()
    other = Enrolled(tmp_path / "other", RUN)
    gone = other.enroll("north", PeerRole.CLUSTER)
    other.authority.revoke("north.cluster")
    west = far_away(enrolled, enrolled.enroll("west", PeerRole.CLUSTER))
    west.ca.write_bytes(west.ca.read_bytes() + gone.ca.read_bytes())
    west.crl.write_bytes(gone.crl.read_bytes())
    enrolled.enroll("east", PeerRole.CLUSTER)
    enrolled.authority.revoke("east.cluster")
    async with served(enrolled) as address:
        renewer, said = said_by(west, address)
        await renewer.follow_revocations()
        written = west.crl.stat().st_mtime_ns
        await renewer.follow_revocations()
    assert len(load_tls(west).revoked) == 2 and len(said) == 1
    assert west.crl.stat().st_mtime_ns == written, "no news, nothing written"


async def test_a_list_that_forgets_is_not_used(enrolled: Enrolled, tmp_path: Path) -> None:
    """The authority's directory was restored from a copy: what it revoked since then stays revoked here."""
    west = far_away(enrolled, enrolled.enroll("west", PeerRole.CLUSTER))
    authority = enrolled.authority
    (tmp_path / "other").mkdir()
    now, later = utc_now(), utc_now() + timedelta(hours=1)
    known = certificates.make_revocations({7: now}, authority.root, authority._key, later)
    west.crl.write_bytes(certificates.to_pem(known))
    async with served(enrolled) as address:
        with pytest.raises(RemoteProtocolError, match=r"older than .*crl\.pem: was the authority restored from a copy"):
            await said_by(west, address)[0].follow_revocations()
        assert load_tls(west).revoked == {7}
        foreign = Enrolled(tmp_path / "other", RUN).authority.read_revocations()
        (enrolled.directory / "ca" / "crl.pem").write_bytes(certificates.to_pem(foreign))
        with pytest.raises(RemoteProtocolError, match="signed by no authority of ours"):
            await said_by(west, address)[0].follow_revocations()


# ---- one that goes on -----------------------------------------------------------------------------------------------


async def test_it_is_renewed_when_due_and_again_while_the_authority_is_away(enrolled: Enrolled) -> None:
    west, east = enrolled.enroll_ending("west", PeerRole.CLUSTER), enrolled.enroll("east", PeerRole.CLUSTER)
    nobody = f"127.0.0.1:{harness.free_port()}"
    away, said = said_by(west, nobody)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(2.0):
            await away.keep()
    assert said and "is not renewed, and ends at" in said[0] and "cannot be reached" in said[0]
    async with served(enrolled) as address:
        before = east.cert.read_bytes()
        (due, said), (not_due, _) = said_by(west, address), said_by(east, address)
        keeping = [asyncio.create_task(renewer.keep()) for renewer in (due, not_due)]
        await eventually(lambda: said)
        for task in keeping:
            task.cancel()
    assert "renewed, valid until" in said[0] and load_tls(west).until - utc_now() > timedelta(hours=23)
    assert east.cert.read_bytes() == before, "89 days are left"


async def test_it_ends_when_only_a_person_can_help(enrolled: Enrolled) -> None:
    """The authority refuses; or the certificate has ended, while nobody answered."""
    west = enrolled.enroll_ending("west", PeerRole.CLUSTER)
    enrolled.authority.revoke("west.cluster")
    west.crl.unlink()  # it has not heard of it
    async with served(enrolled) as address:
        with pytest.raises(Denied, match="revoked"):
            await said_by(west, address)[0].keep()
    north = enrolled.enroll_ending("north", PeerRole.CLUSTER, timedelta(seconds=1.5))
    renewer, said = said_by(north, f"127.0.0.1:{harness.free_port()}")
    with pytest.raises(Denied, match=r"north.cluster.crt expired at .*`dips certs request` and `issue` make a new one"):
        async with asyncio.timeout(20.0):
            await renewer.keep()
    assert ["is not renewed" in said[0], "crl.pem may be old" in said[1], len(said)] == [True, True, 2], said


async def test_a_file_that_is_wrong_for_a_while_ends_no_renewal(
    enrolled: Enrolled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crl.pem that is being copied there, or a certificate that a person brings for another key, ended it with 78,
    which nothing restarts: a day later the certificate had ended.
    """
    monkeypatch.setattr("dips.commands.renewing.LOOK_S", 0.02)
    west = far_away(enrolled, enrolled.enroll_ending("west", PeerRole.CLUSTER))
    stray = west.cert.with_name("west.cluster.renewal.crt")
    async with served(enrolled) as address:
        renewer, said = said_by(west, address)
        west.crl.write_text("-----BEGIN X509 CRL-----\n")
        stray.write_bytes(enrolled.enroll("west", PeerRole.CLUSTER).cert.read_bytes())
        keeping = asyncio.create_task(renewer.keep())
        await eventually(lambda: len(said) > 3 or keeping.done())
        west.crl.unlink()
        stray.unlink()
        await eventually(lambda: any("renewed, valid until" in line for line in said) or keeping.done())
        keeping.cancel()
    assert "was not signed for" in said[0] and "crl.pem may be old: tls: " in said[1]
    assert load_tls(west).until - utc_now() > timedelta(hours=23)


@pytest.mark.parametrize("name", ["crl.pem", "west.cluster.renewal.crt", "west.cluster.renewal.key"])
async def test_a_disk_that_answers_with_an_error_for_a_while_ends_no_renewal(
    enrolled: Enrolled, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Whether a file is there was asked outside of what is tried again: EIO or ESTALE of a network's disk ended it."""
    monkeypatch.setattr("dips.commands.renewing.LOOK_S", 0.02)
    west, stat, fails = far_away(enrolled, enrolled.enroll_ending("west", PeerRole.CLUSTER)), Path.stat, True

    def fail(path: Path, **more: Any) -> os.stat_result:
        if fails and path.name == name:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return stat(path, **more)

    async with served(enrolled) as address:
        renewer, said = said_by(west, address)
        monkeypatch.setattr(Path, "stat", fail)
        keeping = asyncio.create_task(renewer.keep())
        await eventually(lambda: any("Input/output error" in line for line in said) or keeping.done())
        fails = False
        await eventually(lambda: any("renewed, valid until" in line for line in said) or keeping.done())
        assert not keeping.done()
        keeping.cancel()


@pytest.mark.parametrize("full", ["west.cluster", "ca"])
async def test_a_disk_that_is_full_for_a_while_ends_no_renewal(
    enrolled: Enrolled, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    """Here or at the authority: it is tried until there is room again, also if that takes many tries."""
    monkeypatch.setattr("dips.commands.renewing.LOOK_S", 0.02)
    west, there_is_room = far_away(enrolled, enrolled.enroll_ending("west", PeerRole.CLUSTER)), False

    def sync(path: Path) -> None:
        if not there_is_room and "west" in path.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync_path(path)

    def fsync(fd: int) -> None:
        if not there_is_room and "issued" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with served(enrolled) as address:
        if full == "ca":
            monkeypatch.setattr("dips.identity.authority.os.fsync", fsync)
        else:
            monkeypatch.setattr(certificates, "sync_path", sync)
        renewer, said = said_by(west, address)
        keeping = asyncio.create_task(renewer.keep())
        await eventually(lambda: len(said) > MOST_LIVE or keeping.done(), 60)
        there_is_room = True
        await eventually(lambda: "renewed, valid until" in said[-1] or keeping.done(), 60)
        keeping.cancel()
    assert "is not renewed, and ends at" in said[0] and "No space left" in said[0]
    assert load_tls(west).until - utc_now() > timedelta(hours=23)


async def test_a_command_renews_once_or_until_a_signal(
    enrolled: Enrolled, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both take the certificate and the list of revocations; with --watch it goes on, and SIGTERM ends it."""
    monkeypatch.setattr("dips.commands.renewing.LOOK_S", 0.05)
    west = far_away(enrolled, enrolled.enroll("west", PeerRole.CLUSTER))
    first, said = load_tls(west).cert, ""
    async with served(enrolled) as address:
        await asyncio.to_thread(certs.renew_command, west.cert, None, 1, address, False)
        once = load_tls(west)
        assert once.cert != first and once.revoked == frozenset() and west.crl.exists()
        assert "renewed, valid until" in capsys.readouterr().out
        enrolled.enroll("east", PeerRole.CLUSTER)
        enrolled.authority.revoke("east.cluster")
        watching = asyncio.create_task(certs._renew_from(west.cert, address, watch=True))
        while "1 revoked, as of" not in said and not watching.done():
            await asyncio.sleep(0.02)
            said += capsys.readouterr().out
        signal.raise_signal(signal.SIGTERM)
        await watching
    assert capsys.readouterr().out.endswith("stopped\n") and load_tls(west).cert == once.cert, "it is not due"


async def test_the_port_certifies_itself_again(enrolled: Enrolled) -> None:
    """When a third of its certificate's life is over: it may serve for months."""
    own = enrolled.directory / "ca" / f"{make_identity(AUTHORITY_NAME, PeerRole.AUTHORITY, RUN).label}.crt"
    async with served(enrolled, timedelta(seconds=3)), asyncio.timeout(30.0):
        first = own.read_bytes()
        await eventually(lambda: own.read_bytes() != first)


async def test_the_port_of_a_machine_that_slept_certifies_itself_again(
    enrolled: Enrolled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or whose clock was set: how late it is decides, not how long the port has waited."""
    monkeypatch.setattr("dips.commands.renewing.LOOK_S", 0.05)
    own = enrolled.directory / "ca" / f"{make_identity(AUTHORITY_NAME, PeerRole.AUTHORITY, RUN).label}.crt"
    async with served(enrolled), asyncio.timeout(30.0):
        for ahead in (timedelta(hours=9), timedelta(hours=-1)):
            first = own.read_bytes()
            await asyncio.sleep(0.3)
            assert own.read_bytes() == first, "it is not due"
            monkeypatch.setattr("dips.commands.renewing.utc_now", lambda ahead=ahead: utc_now() + ahead)
            await eventually(lambda first=first: own.read_bytes() != first)
            monkeypatch.setattr("dips.commands.renewing.utc_now", utc_now)


async def test_the_port_goes_on_while_its_disk_is_full(enrolled: Enrolled, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what is revoked with the certificate that it has, and certifies itself when there is room again. ESTALE
    of NFS ended it with 78, which nothing restarts.
    """
    monkeypatch.setattr("dips.commands.renewing.LOOK_S", 0.05)
    west, tries = enrolled.enroll("west", PeerRole.CLUSTER), 0
    own = enrolled.directory / "ca" / f"{make_identity(AUTHORITY_NAME, PeerRole.AUTHORITY, RUN).label}.crt"

    def sync(path: Path) -> None:
        nonlocal tries
        tries += 1
        raise OSError(code := (errno.ENOSPC, errno.ESTALE)[tries % 2], os.strerror(code))

    async with served(enrolled, timedelta(seconds=12)) as address, asyncio.timeout(60.0):
        first = own.read_bytes()
        with monkeypatch.context() as full:
            full.setattr(certificates, "sync_path", sync)
            await eventually(lambda: tries >= 3)
        await eventually(lambda: own.read_bytes() != first)
        await said_by(far_away(enrolled, west), address)[0].follow_revocations()


async def test_a_signal_ends_the_port(enrolled: Enrolled) -> None:
    """Whoever asks then is not answered."""
    west, address = enrolled.enroll("west", PeerRole.CLUSTER), asyncio.get_running_loop().create_future()
    serving = serve_authority(enrolled.directory / "ca", "127.0.0.1:0", DAY, LOG, address.set_result)
    task = asyncio.create_task(serving)
    await address
    signal.raise_signal(signal.SIGTERM)
    await task
    with pytest.raises(Unavailable, match="cannot be reached"):
        await said_by(west, address.result())[0].renew()


async def test_who_has_asked_when_the_port_ends_is_answered(
    enrolled: Enrolled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is signed counts among the certificates of its name; whoever had asked got none, and asked for another."""
    west, signing, signed = enrolled.enroll("west", PeerRole.CLUSTER), threading.Event(), threading.Event()
    renew = Authority.renew

    def renew_slowly(*arguments: Any) -> Any:
        signing.set()
        assert signed.wait(20.0)
        return renew(*arguments)

    monkeypatch.setattr(Authority, "renew", renew_slowly)
    async with served(enrolled) as address:
        asking = asyncio.create_task(said_by(west, address)[0].renew())
        await eventually(signing.is_set)
        asyncio.get_running_loop().call_later(0.2, signed.set)
    await asking
    assert len(Authority.open(enrolled.directory / "ca").find_live(load_tls(west).identity)) == 2


@pytest.mark.slow
@pytest.mark.real_commands
def test_the_two_commands(enrolled: Enrolled) -> None:
    """As typed: the port, one renewal, one that goes on until SIGTERM, and a name that was revoked."""
    address, west = f"127.0.0.1:{harness.free_port()}", enrolled.enroll("west", PeerRole.CLUSTER)
    serving = subprocess.Popen(
        [*CLI, "certs", "serve", enrolled.directory / "ca", "--listen", address], stderr=subprocess.PIPE, text=True
    )
    try:
        assert serving.stderr is not None and "serving" in serving.stderr.readline()
        once = [*CLI, "certs", "renew", west.cert, "--from", address]
        done = subprocess.run(once, capture_output=True, text=True, timeout=60)
        assert (done.returncode, "renewed, valid until" in done.stdout) == (0, True), done
        enrolled.enroll_ending("west", PeerRole.CLUSTER)
        watching = subprocess.Popen([*once, "--watch"], stdout=subprocess.PIPE, text=True)
        assert watching.stdout is not None and "renewed, valid until" in watching.stdout.readline()
        watching.terminate()
        assert watching.communicate(timeout=20)[0] == "stopped\n" and watching.returncode == 0
        enrolled.authority.revoke("west.cluster")
        west.crl.unlink()
        done = subprocess.run(once, capture_output=True, text=True, timeout=60)
        assert (done.returncode, "revoked" in done.stderr) == (77, True), done
    finally:
        serving.terminate()
        assert serving.wait(20) == 0
        serving.stderr.close()


# ---- daemons whose certificates live seconds ------------------------------------------------------------------------

LIFE = timedelta(seconds=24)


class Renewing:
    """The authority's port and a renewer for each name, on a loop of their own."""

    def __init__(self, enrolled: Enrolled, names: dict[str, TlsFiles]) -> None:
        self._loop, self._tasks, self.said = asyncio.new_event_loop(), dict[str, asyncio.Task[None]](), list[str]()
        self._enrolled, self._names, self._ready = enrolled, names, threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),))

    def __enter__(self) -> Renewing:
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join()
        self._loop.close()

    def stop_for(self, name: str) -> None:
        self._loop.call_soon_threadsafe(self._tasks[name].cancel)

    async def _run(self) -> None:
        self._stopped = asyncio.Event()
        authority = self._enrolled.authority
        identity = PeerIdentity(AUTHORITY_NAME, PeerRole.AUTHORITY, authority.run)
        files = self._enrolled.enroll(AUTHORITY_NAME, PeerRole.AUTHORITY)
        guard = Guard(TlsSource(files, identity.name, identity.role, identity.run))
        server = control.make_server(lambda *_: None, guard)
        add_AuthorityServiceServicer_to_server(AuthorityPort(authority, LIFE, guard, LOG), server)
        address = f"127.0.0.1:{control.bind_server(server, '127.0.0.1:0', 'it', guard)}"
        await server.start()
        for name, own in self._names.items():
            self._tasks[name] = asyncio.create_task(Renewer(own.cert, address, self.said.append).keep())
        self._ready.set()
        await self._stopped.wait()
        for task in self._tasks.values():
            task.cancel()
        await asyncio.wait(self._tasks.values())
        await server.stop(None)


@pytest.fixture(name="names")
def of_seconds(tmp_path: Path) -> tuple[Enrolled, dict[str, TlsFiles]]:
    enrolled = Enrolled(tmp_path / "certs", "test")
    roles = {"master": PeerRole.MASTER, "ps0": PeerRole.SLAVE, "west": PeerRole.CLUSTER, "east": PeerRole.CLUSTER}
    return enrolled, {name: enrolled.enroll(name, role, LIFE) for name, role in roles.items()}


@pytest.mark.slow
@pytest.mark.real_commands
@pytest.mark.timeout(300)
def test_a_run_whose_certificates_live_for_seconds(tmp_path: Path, names: tuple[Enrolled, dict[str, TlsFiles]]) -> None:
    """Three lives of each: no round is lost and nobody is refused. Then west's ends in the middle of its transfers."""
    enrolled, files = names
    shared = {"penalty": {"gates": []}, "stop": {"versions": 1_000_000}}
    security = {"tls": "certs/{name}.{role}.crt"}
    with (
        Renewing(enrolled, files) as renewing,
        harness.Run(tmp_path, tensors(), shared=shared, slaves=1, security=security) as run,
    ):
        master, (slave,) = run.start_master(), run.start_slaves()
        west, east = (run.start_cluster(name, tiny(tmp_path, "steps"), steps=10) for name in ("west", "east"))
        first: datetime = load_tls(files["master"]).until
        run.until(lambda: load_tls(files["master"]).until > first + 2 * LIFE, 120, "three lives of the master's")

        for process in (master, slave, west, east):
            text = process.log.read_text()
            assert process.code is None and "denied" not in text.lower() and "expired" not in text, text[-2000:]

        renewing.stop_for("west")
        run.until(lambda: west.code is not None, 60, "west's certificate ends")
        over = "the certificate of cluster 'west' of run 'test' expired at"
        assert west.code == 77 and f"may take part no more: {over}" in west.log.read_text(), west.tail()
        assert f'"cluster": "west", "reason": "{over}' in master.log.read_text()
        made = run.head().version
        run.until(lambda: run.head().version > made, 30, "east makes a version")
        assert not run.skipped()
        assert all(process.code is None for process in (master, slave, east))
