"""Attacks on the ports beside the control and data lanes: HTTP with certificates, and the agent's line for ranks.

Those of HTTP in plain text are in test_plain.py.
"""

from __future__ import annotations

import os
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from dips.client.agent.agent import ADMIT_S
from dips.client.ipc import messages
from dips.client.ipc.address import ANSWER, GREETING, PROOF, TAG, TokenClient
from dips.http.server import HANDSHAKE_S, MAX_HEADER_BYTES, MOST_CONNECTIONS, REQUEST_S
from dips.identity.names import PeerRole
from dips.identity.paths import TlsFiles
from tests.attacks import callers
from tests.attacks.deployment import JOB_TOKEN, RUN, TOKEN, AttackedRun
from tests.enrolled import Enrolled

pytestmark = [pytest.mark.attacks, pytest.mark.real_commands, pytest.mark.timeout(240)]
MARGIN_S = 6.0  # a busy machine
DAEMONS = ("master", "ps0", "west")


@pytest.fixture(autouse=True)
def run_goes_on(secured: AttackedRun) -> Iterator[None]:
    yield from secured.going_on()


# ---- HTTP ----------------------------------------------------------------------------------------------------------


def read(
    secured: AttackedRun, daemon: str, path: str, files: TlsFiles | None, headers: dict[str, str] | None = None
) -> tuple[int, str]:
    """What the port answers to who shows these."""
    asked = urllib.request.Request(f"{secured.base_url}:{secured.http[daemon]}{path}", headers=headers or {})
    try:
        with urllib.request.urlopen(asked, timeout=10, context=secured.client_context(files)) as answer:
            return int(answer.status), answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.parametrize("daemon", DAEMONS)
def test_a_reader_without_a_certificate(secured: AttackedRun, daemon: str) -> None:
    """It gets the probes, and nothing else."""
    assert read(secured, daemon, "/healthz", None)[0] == 200
    paths = ("/metrics", "/", "/api/state", "/nowhere")
    for path in paths:
        status, said = read(secured, daemon, path, None)
        assert status == 401 and "expected" in said and "dips_" not in said, (path, said)
    secured.note_attack(f"metrics and page of {daemon}", "none", "http", daemon, "http_denied", len(paths))


@pytest.mark.parametrize("shown", ["Bearer " + "b" * len(TOKEN), f"Bearer {TOKEN[:-1]}", f"Basic {TOKEN}", "Bearer "])
def test_a_wrong_token(secured: AttackedRun, shown: str) -> None:
    assert read(secured, "master", "/metrics", None, {"Authorization": f"Bearer {TOKEN}"})[0] == 200
    status, said = read(secured, "master", "/metrics", None, {"Authorization": shown})
    assert status == 401 and "token" in said, said
    secured.note_attack(f"a wrong token ({len(shown)} characters)", "none", "http", "master", "http_denied", 1)


def test_a_viewer_who_was_revoked_or_is_of_another_run(secured: AttackedRun) -> None:
    revoked = secured.certificate_of("mallory", PeerRole.VIEWER)
    assert read(secured, "ps0", "/metrics", revoked)[0] == 200
    secured.enrolled.authority.revoke("mallory.viewer")
    time.sleep(1.1)  # daemons look once a second
    others = secured.forge("others", ["eve.viewer.other.dips"])
    for files, told in ((revoked, "is revoked"), (others, f"this is run '{RUN}'")):
        status, said = read(secured, "ps0", "/metrics", files)
        assert status == 403 and told in said, said
        secured.note_attack(f"metrics, with a certificate: {told}", "a viewer", "http", "ps0", "http_denied", 1)


def test_a_cluster_reads_no_other_daemon(secured: AttackedRun) -> None:
    """Nor does a slave, or a puller; its own port is open to its own name."""
    west = secured.certificate_of("west", PeerRole.CLUSTER)
    assert read(secured, "west", "/metrics", west)[0] == 200
    for who, files in (
        ("west.cluster", west),
        ("ps1.slave", secured.certificate_of("ps1", PeerRole.SLAVE)),
        ("eve.puller", secured.certificate_of("eve", PeerRole.PULLER)),
    ):
        for path in ("/metrics", "/api/state"):
            status, said = read(secured, "master", path, files)
            assert status == 403 and "may not read here" in said, (who, path, said)
        secured.note_attack(f"metrics and page of the master, by {who}", who, "http", "master", "http_denied", 2)


@pytest.mark.parametrize("daemon", DAEMONS)
def test_handshakes_that_fail(secured: AttackedRun, daemon: str) -> None:
    """Another authority's certificate, an expired one, and plain text."""
    stranger = Enrolled(secured.directory / f"strangers-{daemon}", RUN).enroll("eve", PeerRole.VIEWER)
    expired = secured.forge("expired-viewer", [f"eve.viewer.{RUN}.dips"], begin_s=-7200, end_s=-3600)
    for what, files in (("a stranger's certificate", stranger), ("an expired one", expired)):
        with pytest.raises((ssl.SSLError, OSError)):
            read(secured, daemon, "/metrics", files)
        secured.note_attack(f"{what}, at HTTP of {daemon}", "a forger", "TLS", daemon, "http_handshake", 1)
    raw = callers.connect_to(("127.0.0.1", secured.http[daemon]))
    raw.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    assert callers.closed_within(raw, HANDSHAKE_S + MARGIN_S)
    raw.close()
    secured.note_attack(f"plain HTTP to {daemon}", "none", "TLS", daemon, "http_handshake", 1)


def test_slow_handshakes_and_slow_headers(secured: AttackedRun) -> None:
    """Both are ended in time, and hold up nobody."""
    address = ("127.0.0.1", secured.http["ps0"])
    silent = [callers.connect_to(address) for _ in range(4)]
    slow = [secured.client_context(None).wrap_socket(callers.connect_to(address)) for _ in range(4)]
    for connection in slow:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Slow: ")
    for _ in range(3):
        for connection in slow:
            connection.sendall(b"y")
        assert read(secured, "ps0", "/healthz", None)[0] == 200
    assert all(callers.closed_within(connection, REQUEST_S + MARGIN_S) for connection in (*slow, *silent))
    for connection in (*slow, *silent):
        connection.close()
    secured.note_attack("handshakes that stop", "none", "http", "ps0", "http_handshake", len(silent))
    secured.note_attack("headers that never end", "none", "http", "ps0", "http_slow", len(slow))


def test_more_connections_than_it_takes(secured: AttackedRun) -> None:
    """The oldest end; a probe and a scrape come through meanwhile."""
    address = ("127.0.0.1", secured.http["master"])
    connections = [callers.connect_to(address) for _ in range(MOST_CONNECTIONS * 4)]
    assert read(secured, "master", "/healthz", None)[0] == 200
    assert secured.read_refusals("master")["http_connections"] >= MOST_CONNECTIONS * 2
    for connection in connections:
        connection.close()
    secured.note_attack(
        f"{len(connections)} connections to HTTP", "none", "http", "master", "http_connections", MOST_CONNECTIONS * 2
    )


def test_requests_that_are_none(secured: AttackedRun) -> None:
    """Long ones, ones with a body, ones that would change something, garbage."""
    viewer = secured.certificate_of("scraper", PeerRole.VIEWER)
    asked = {
        "headers of 20 KiB": b"GET /metrics HTTP/1.1\r\nHost: x\r\nX: "
        + b"y" * (MAX_HEADER_BYTES + 4096)
        + b"\r\n\r\n",
        "POST": b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n",
        "a body": b"GET /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 9999999999\r\n\r\n",
        "chunks without an end": b"GET /metrics HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n",
        "garbage": os.urandom(512) + b"\r\n\r\n",
    }
    for what, words in asked.items():
        raw = secured.client_context(viewer).wrap_socket(callers.connect_to(("127.0.0.1", secured.http["ps1"])))
        raw.sendall(words)
        raw.settimeout(REQUEST_S + MARGIN_S)
        answer = raw.recv(64)
        assert answer.split(b" ")[1] in (b"400", b"405", b"413", b"431"), (what, answer)
        raw.close()
        secured.note_attack(f"an HTTP request with {what}", "scraper.viewer", "http", "ps1", "http_request", 1)


# ---- the agent's line ----------------------------------------------------------------------------------------------


def test_who_does_not_know_the_jobs_token(secured: AttackedRun) -> None:
    """Garbage, silence, a guess: hung up on, counted, and the trainer beside them goes on."""
    address = ("127.0.0.1", secured.agent_line)
    for what, token in (
        ("garbage", b""),
        ("a guessed token", b"g" * len(JOB_TOKEN)),
        ("half of it", JOB_TOKEN[:12].encode()),
    ):
        raw = callers.connect_to(address)
        greeting = callers.read_exactly(raw, GREETING)
        raw.sendall(TokenClient(token, greeting).answer if token else os.urandom(ANSWER))
        assert callers.closed_within(raw, ADMIT_S)
        raw.close()
        secured.note_attack(f"{what} to the agent's line", "none", "token", "west", "agent_line_refused", 1)
    silent = callers.connect_to(address)
    assert callers.read_exactly(silent, GREETING) and callers.closed_within(silent, ADMIT_S + MARGIN_S)
    silent.close()
    secured.note_attack("silence to the agent's line", "none", "10 s", "west", "agent_line_refused", 1)


def test_a_greeting_that_is_sent_back(secured: AttackedRun) -> None:
    """A proof that was overheard proves nothing on the next connection: each has its own nonce."""
    address = ("127.0.0.1", secured.agent_line)
    first = callers.connect_to(address)
    overheard = TokenClient(JOB_TOKEN.encode(), callers.read_exactly(first, GREETING)).answer
    second = callers.connect_to(address)
    callers.read_exactly(second, GREETING)
    second.sendall(overheard)
    assert callers.closed_within(second, ADMIT_S)
    for connection in (first, second):
        connection.close()
    secured.note_attack("a proof that was overheard", "none", "nonces", "west", "agent_line_refused", 1)


def test_messages_that_were_altered(secured: AttackedRun) -> None:
    """Behind a true handshake: one without its tag, one of an absurd length."""
    for what, frame in (
        ("a wrong tag", messages.LENGTH.pack(8) + b"\x81" * 8 + b"t" * TAG),
        ("an absurd length", messages.LENGTH.pack((1 << (8 * messages.LENGTH.size)) - 1)),
    ):
        raw = callers.connect_to(("127.0.0.1", secured.agent_line))
        client = TokenClient(JOB_TOKEN.encode(), callers.read_exactly(raw, GREETING))
        raw.sendall(client.answer)
        client.accept_proof(callers.read_exactly(raw, PROOF))
        raw.sendall(frame)
        assert callers.closed_within(raw, ADMIT_S)
        raw.close()
        secured.note_attack(f"a message with {what}", "the job's token", "seal", "west", "agent_line_malformed", 1)


# ---- in the end ----------------------------------------------------------------------------------------------------


def test_all_are_counted(secured: AttackedRun) -> None:
    secured.require_counted()
