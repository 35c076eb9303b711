"""Who may read at the HTTP port, decided without a socket."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from dips.errors import ConfigError
from dips.http import daemon
from dips.http.daemon import (
    CERTIFICATE,
    LEAST_TOKEN,
    MAX_HEADER_BYTES,
    MOST_TOKEN,
    CachedView,
    Door,
    ReaderToken,
    RequestGate,
    is_local_name,
)
from dips.identity.certificates import utc_now
from dips.identity.names import PeerRole
from dips.identity.paths import TlsFiles
from dips.telemetry.refusals import refusals_by_reason
from dips.transport.tls import TlsSource
from tests.enrolled import Enrolled

TOKEN = "0123456789abcdef" * 2


def token_file(directory: Path, text: str = TOKEN, mode: int = 0o600) -> Path:
    path = directory / "token"
    path.write_text(text + "\n")
    path.chmod(mode)
    return path


def der_of(files: TlsFiles) -> bytes:
    return x509.load_pem_x509_certificate(files.cert.read_bytes()).public_bytes(Encoding.DER)


@pytest.fixture(name="enrolled", scope="module")
def an_authority(tmp_path_factory: pytest.TempPathFactory) -> Enrolled:
    return Enrolled(tmp_path_factory.mktemp("ca"))


@pytest.fixture(name="tls", scope="module")
def the_daemons(enrolled: Enrolled) -> TlsSource:
    return TlsSource(enrolled.enroll("s0", PeerRole.SLAVE), "s0", PeerRole.SLAVE, enrolled.run)


@pytest.mark.parametrize("role", list(PeerRole))
def test_operators_and_viewers_may_read(enrolled: Enrolled, tls: TlsSource, role: PeerRole) -> None:
    """Of the other roles only the daemon itself: a cluster does not read what another one's loss is."""
    name = {PeerRole.MASTER: "master", PeerRole.AUTHORITY: "authority"}.get(role, "eve")
    refusal = Door(tls, None).check_request("/metrics", {}, der_of(enrolled.enroll(name, role)))
    if role in (PeerRole.OPERATOR, PeerRole.VIEWER):
        assert refusal is None
    else:
        assert refusal is not None and refusal.status == 403 and "may not read here" in refusal.reason
    assert Door(tls, None).check_request("/metrics", {}, der_of(tls.files)) is None


def test_without_a_certificate_only_probes_are_answered(tls: TlsSource) -> None:
    """The refusal says what was expected, and is counted."""
    door, before = Door(tls, None), refusals_by_reason().get("http_denied", 0)
    assert door.check_request("/healthz", {}, None) is None and door.check_request("/readyz", {}, None) is None
    for path in ("/metrics", "/", "/healthz/", "/nowhere"):
        refusal = door.check_request(path, {}, None)
        assert refusal is not None and refusal.status == 401
        assert "certificate" in refusal.reason
    assert refusals_by_reason()["http_denied"] == before + 4


def test_a_certificate_that_no_longer_counts_is_refused(enrolled: Enrolled, tls: TlsSource, tmp_path: Path) -> None:
    """Of another run, expired, revoked: each with its sentence, also on a connection that was made before."""
    other = Enrolled(tmp_path, run="august").enroll("eve", PeerRole.VIEWER)
    ours = enrolled.enroll("eve", PeerRole.VIEWER)
    until = x509.load_pem_x509_certificate(ours.cert.read_bytes()).not_valid_after_utc
    assert Door(tls, None, wall=lambda: until).check_request("/metrics", {}, der_of(ours)) is None
    late = Door(tls, None, wall=lambda: until + timedelta(seconds=1))
    for door, files, said in ((Door(tls, None), other, "of run 'august'"), (late, ours, "is expired")):
        refusal = door.check_request("/metrics", {}, der_of(files))
        assert refusal is not None and refusal.status == 403
        assert said in refusal.reason
    enrolled.authority.revoke("eve.viewer")
    fresh = TlsSource(tls.files, "s0", PeerRole.SLAVE, enrolled.run)
    refusal = Door(fresh, None).check_request("/metrics", {}, der_of(ours))
    assert refusal is not None and "is revoked" in refusal.reason


def test_the_token_opens_and_another_does_not(tls: TlsSource, tmp_path: Path) -> None:
    """With or without certificates; a wrong token is refused although the certificate would do."""
    token = ReaderToken(token_file(tmp_path), lambda problem: None)
    for door in (Door(tls, token), Door(None, token)):
        assert door.check_request("/metrics", {"authorization": f"Bearer {TOKEN}"}, None) is None
        for shown in ("Bearer ", f"Bearer {TOKEN}x", f"Basic {TOKEN}", TOKEN):
            refusal = door.check_request("/metrics", {"authorization": shown}, None)
            assert refusal is not None and refusal.status == 401
        refusal = door.check_request("/metrics", {}, None)
        assert refusal is not None and "the token of http_token" in refusal.reason


def test_a_challenge_comes_with_401_only(enrolled: Enrolled, tls: TlsSource) -> None:
    """Whoever shows nothing is told what to show; whoever may not read is not asked again."""
    gate = RequestGate(None, Door(tls, None), lambda problem: None)
    late = RequestGate(None, Door(tls, None, wall=lambda: utc_now() + timedelta(days=91)), lambda problem: None)
    shown = der_of(enrolled.enroll("eve", PeerRole.VIEWER))
    for checked, certificate, status in ((gate, None, 401), (late, shown, 403)):
        scope = {"headers": [], "method": "GET", "path": "/metrics", CERTIFICATE: certificate}
        answer = checked._refuse_request(scope)
        assert answer is not None and answer.status_code == status
        assert answer.headers.get("www-authenticate") == ('Bearer realm="dips"' if status == 401 else None)


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        (TOKEN, 0o644, "chmod 600"),
        ("short", 0o600, f"{LEAST_TOKEN} to"),
        ("two words are no token", 0o600, "one word"),
        (f"{TOKEN}\n{TOKEN}", 0o600, "one word"),
    ],
)
def test_a_token_file_that_does_not_do_is_refused(tmp_path: Path, text: str, mode: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ReaderToken(token_file(tmp_path, text, mode), lambda problem: None)


@pytest.mark.parametrize(("length", "beyond"), [(LEAST_TOKEN, LEAST_TOKEN - 1), (MOST_TOKEN, MOST_TOKEN + 1)])
def test_a_token_as_short_or_long_as_is_allowed(tmp_path: Path, length: int, beyond: int) -> None:
    """One character less or more is refused."""
    assert ReaderToken(token_file(tmp_path, "x" * length), lambda problem: None).matches("x" * length)
    with pytest.raises(ConfigError, match=f"got {beyond} characters"):
        ReaderToken(token_file(tmp_path, "x" * beyond), lambda problem: None)


def test_headers_may_have_as_many_bytes_as_the_bound() -> None:
    """Names and values together; the refusal of more is counted, and names the bound."""
    gate = RequestGate(None, Door(None, None), lambda problem: None)
    for length, refused in ((MAX_HEADER_BYTES - 1, False), (MAX_HEADER_BYTES, True)):
        scope = {"headers": [(b"x", b"y" * length)], "method": "GET", "path": "/metrics", CERTIFICATE: None}
        answer = gate._refuse_request(scope)
        assert (answer is not None and answer.status_code == 431) is refused


def test_a_token_is_replaced_without_a_restart(tmp_path: Path) -> None:
    """A second later the new one counts; half of a replacement is reported once, and the former one stays."""
    now, told = [0.0], list[str]()
    token = ReaderToken(token_file(tmp_path), told.append, clock=lambda: now[0])
    token_file(tmp_path, "f" * 32)
    assert token.matches(TOKEN)
    now[0] = 1.0
    assert token.matches("f" * 32) and not token.matches(TOKEN)
    token_file(tmp_path, "")
    for now[0] in (3.0, 5.0):
        assert token.matches("f" * 32)
    assert len(told) == 1 and "the new token is not used" in told[0]


def test_a_silent_disk_under_the_token_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are checked on the port's one loop: probes had no answer, and a supervisor kills who gives none.

    A read of a FIFO waits for its writer, as one of a network's disk for its server.
    """
    monkeypatch.setattr(daemon, "SILENT_S", 0.05)
    now, file = [0.0], token_file(tmp_path)
    token = ReaderToken(file, lambda problem: None, clock=lambda: now[0])
    file.unlink()
    os.mkfifo(file, 0o600)
    for now[0] in (1.0, 2.0, 3.0):
        assert token.matches(TOKEN)
    looks = [thread for thread in threading.enumerate() if thread.name == "http token"]
    assert len(looks) == 1, "one thread waits for it, however long it is silent"
    file.write_text("f" * 32)  # the disk answers
    looks[0].join(10.0)
    assert token.matches("f" * 32)


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1:9400", True), ("localhost:9400", True), ("localhost", True), ("[::1]:9400", True), ("[::1]", True),
        ("", True),
        ("10.0.0.1", True), ("evil.example:9400", False), ("127.evil.example", False), ("localhost.x", False),
    ],
)  # fmt: skip
def test_a_page_of_the_web_cannot_read_loopback(host: str, local: bool) -> None:
    """DNS rebinding: a name of the web's that leads to 127.0.0.1 is refused by the Host header."""
    assert is_local_name(host) is local
    assert (Door(None, None).check_request("/metrics", {"host": host}, None) is None) is local


def test_a_view_is_built_once_a_second() -> None:
    """However many read; a failure is told to all of that second, and the next tries again."""
    now, built = [0.0], list[int]()

    def build() -> int:
        built.append(1)
        if len(built) == 2:
            raise TimeoutError("the loop does not answer")
        return len(built)

    view = CachedView(build, clock=lambda: now[0])
    assert [view.read() for _ in range(100)] == [1] * 100
    now[0] = 1.0
    for _ in range(3):
        with pytest.raises(TimeoutError):
            view.read()
    now[0] = 2.0
    assert view.read() == 3 and len(built) == 3
