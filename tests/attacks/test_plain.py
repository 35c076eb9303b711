"""Attacks on daemons in plain text: whoever may use this machine's loopback reaches every port.

What such a neighbour can still do is in docs/guides/threats.md. That nobody ends the run, locks anybody out or fills a
memory is shown here: the run beside each attack makes two more versions with both clusters and loses no round.
"""

from __future__ import annotations

import os
import resource
import socket
import struct
from collections.abc import Iterator

import pytest

from dips.http.server import REQUEST_S
from dips.identity.names import PeerRole
from dips.protocol import effects, events
from dips.protocol.claims import MOST_TERMS_AHEAD
from dips.transport import lane
from dips.transport.lane import HANDSHAKE_MS
from dips.transport.limits import PEER_CALLS_AT_ONCE
from dips.wire.frame import Kind, make_message, run_id
from dips.wire.generated import status_pb2
from dips.wire.messages import MAX_INTEGER, to_proto
from tests.attacks import callers
from tests.attacks.callers import refused_with
from tests.attacks.deployment import RUN, AttackedRun
from tests.attacks.wild_dealer import WildDealer, hello
from tests.enrolled import Enrolled

pytestmark = [pytest.mark.attacks, pytest.mark.real_commands, pytest.mark.timeout(240)]
REGISTER, EXECUTE, JOIN = "SlaveService/Register", "OrderService/Execute", "ClusterService/Join"
BY_GRPC = "not: gRPC closes it and tells nobody"
BY_ZMQ = "not: libzmq closes it and tells nobody"
LANE_CLOSED_S = HANDSHAKE_MS / 1000 + 4.0


@pytest.fixture(autouse=True)
def run_goes_on(plain: AttackedRun) -> Iterator[None]:
    yield from plain.going_on()


def tell(plain: AttackedRun, daemon: str, method: str, said: object) -> str:
    return refused_with(plain.address_of(daemon), None, "", method, said)


# ---- terms, incarnations, names ------------------------------------------------------------------------------------


@pytest.mark.parametrize("term", [1 << 62, 2 + MOST_TERMS_AHEAD, 2, 0], ids=["2**62", "a million", "the next", "none"])
def test_register_as_a_slave_that_lives(plain: AttackedRun, term: int) -> None:
    """A term that it claims to have seen ends no master."""
    forged = events.SlaveRegistered(0, "ps0", "x", RUN, "127.0.0.1:9", ("127.0.0.1:9",), 0, None, None, (), 4, "")
    said = to_proto(forged)
    said.term_seen = term  # type: ignore[attr-defined]
    answer = tell(plain, "master", REGISTER, said)
    reason, told = ("remote_protocol", "expected at most") if term > 2 else ("busy", "a name that is free")
    assert told in answer, answer
    plain.note_attack(f"Register as ps0 from elsewhere, term seen {term}", "none", "claims", "master", reason, 1)


@pytest.mark.parametrize("term", [(1 << 63) - 1, MAX_INTEGER, 2 + MOST_TERMS_AHEAD, 2], ids=str)
def test_an_order_of_a_later_term(plain: AttackedRun, term: int) -> None:
    """It does not lock out the true master: a term rises by the slave's own Register alone."""
    said = to_proto(effects.Order("ps0", 1, 0, 1 << 40, effects.Abort(1 << 40, "forged"), 1.0))
    said.term = term  # type: ignore[attr-defined]
    answer = tell(plain, "ps0", EXECUTE, said)
    beyond = term > MAX_INTEGER
    assert ("expected at most" if beyond else "as soon as it registers") in answer, answer
    reason = "remote_protocol" if beyond else "unavailable"
    plain.note_attack(f"an order of term {term}", "none", "fences", "ps0", reason, 1)


def test_an_order_for_another_incarnation_or_slave(plain: AttackedRun) -> None:
    for slave, sinc in (("ps0", 1 << 40), ("ps1", 1)):
        answer = tell(plain, "ps0", EXECUTE, effects.Order(slave, sinc, 1, 1 << 40, effects.Ping(), 1.0))
        assert "is for" in answer, answer
    plain.note_attack("an order for another slave", "none", "fences", "ps0", "remote_protocol", 1)


def test_join_as_a_cluster_that_lives(plain: AttackedRun) -> None:
    """It is told so; an agent that lives keeps its name."""
    joined = events.ClusterJoined(0, "west", "mine", RUN, "0" * 64, "0" * 64)
    answer = tell(plain, "master", JOIN, joined)
    assert "digest" in answer, answer
    plain.note_attack("Join as west, without its configuration", "none", "digests", "master", "config", 1)


def test_certificates_to_plain_text(plain: AttackedRun) -> None:
    directory = plain.directory / "others"
    files = Enrolled(directory, RUN).enroll("west", PeerRole.CLUSTER)
    answer = refused_with(plain.run.address, files, "x", "StatusService/Status", status_pb2.StatusRequest())
    assert answer.startswith(("UNAVAILABLE", "DEADLINE_EXCEEDED")), answer
    plain.note_attack("TLS to plain text", "another authority's", "gRPC", "", "", 0, why=BY_GRPC)


# ---- too much ------------------------------------------------------------------------------------------------------


def test_a_flood_of_calls(plain: AttackedRun) -> None:
    said = []
    with callers.channel_to(plain.run.address, None, "") as channel:
        call = channel.unary_unary("/dips.v1.StatusService/Describe", lambda m: m.SerializeToString(), bytes)
        for _ in range(int(PEER_CALLS_AT_ONCE) * 4):
            said.append(call.future(status_pb2.DescribeRequest(), timeout=30))
        codes = [future.code().name for future in said]
    assert codes.count("RESOURCE_EXHAUSTED") > 100, {code: codes.count(code) for code in set(codes)}
    plain.note_attack(f"{len(codes)} calls at once", "none", "rate", "master", "rate", 100)


@pytest.mark.parametrize("daemon", ["master", "ps0"])
def test_garbage_and_silence(plain: AttackedRun, daemon: str) -> None:
    address = callers.host_and_port(plain.address_of(daemon))
    said = (b"", os.urandom(1 << 16), b"GET / HTTP/1.1\r\n\r\n", callers.client_hello())
    connections = [callers.connect_to(address) for _ in said]
    for connection, words in zip(connections, said, strict=True):
        connection.sendall(words)
    assert all(callers.closed_within(connection, 10.0) for connection in connections)
    for connection in connections:
        connection.close()
    plain.note_attack(f"silence, garbage, HTTP/1 and TLS to {daemon}", "none", "gRPC", "", "", 0, why=BY_GRPC)


# ---- lanes ---------------------------------------------------------------------------------------------------------


FRAMES = {
    "one part": ((b"x",), "parts"),
    "three parts": ((b"x", b"y", b"z"), "parts"),
    "a short header": ((b"DIPS", b""), "size"),
    "a random header": ((os.urandom(64), b""), "magic"),
    "another run": (hello(wire_run="other"), "run"),
    "a flipped bit": ((hello()[0], b"\0" + hello()[1][1:]), "body_checksum"),
    "a HELLO of another stream's number": (hello(stream=7), "message"),
    "a HELLO that is no msgpack": (make_message(Kind.HELLO, run_id(RUN), 7, b"\xc1" * 50), "message"),
    "a WANT of no stream": (make_message(Kind.WANT, run_id(RUN), 7, b"\x90"), "stream"),
    "a kind that slaves are not sent": (make_message(Kind.WELCOME, run_id(RUN), 7, b"\x90"), "kind"),
    "a HELLO for another slave": (hello(slave="ps1"), "hello"),
    "a HELLO on a pull that is not open": (hello(), "hello"),
}


def test_frames_of_every_wrong_kind(plain: AttackedRun) -> None:
    """Each is counted under its reason; what is answered is an ERROR."""
    with WildDealer(plain.lane_of("ps0")) as dealer:
        for what, (parts, reason) in FRAMES.items():
            answer = dealer.answers_to(*parts)
            assert not answer or answer[0][5] == Kind.ERROR, (what, answer)
            plain.note_attack(what, "none", "frames", "ps0", f"frame_{reason}", 1)


def test_huge_frames(plain: AttackedRun) -> None:
    """A frame above the limit ends its connection before it is read."""
    for nbytes in (2 << 20, 1 << 40):
        raw = greet(plain.lane_of("ps0"))
        raw.sendall(b"\x02" + struct.pack(">Q", nbytes))
        for _ in range(2):
            try:
                raw.sendall(b"x" * (1 << 16))
            except OSError:
                break
        assert callers.closed_within(raw, 5.0)
        raw.close()
        plain.note_attack(f"a frame that says {nbytes} bytes", "none", "libzmq", "", "", 0, why=BY_ZMQ)


def greet(address: tuple[str, int]) -> socket.socket:
    """A bare socket that has shaken hands as a ZMTP 3.0 DEALER without keys."""
    raw = callers.connect_to(address)
    raw.sendall(b"\xff" + b"\0" * 8 + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" * 32)
    ready = b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    raw.sendall(b"\x04" + bytes([len(ready)]) + ready)
    raw.settimeout(5.0)
    assert raw.recv(64)
    return raw


def test_garbage_and_silence_to_a_lane(plain: AttackedRun) -> None:
    """Handshakes that are none are counted, and ended."""
    address = plain.lane_of("ps0")
    begin = b"\xff" + b"\0" * 8
    said = {"nothing": b"", "half a greeting": begin, "another mechanism": begin + b"\x7f\3\0PLAIN" + b"\0" * 47}
    connections = [callers.connect_to(address) for _ in said]
    for connection, words in zip(connections, said.values(), strict=True):
        connection.sendall(words)
    assert all(callers.closed_within(connection, LANE_CLOSED_S) for connection in connections)
    for connection, what in zip(connections, said, strict=True):
        connection.close()
        plain.note_attack(f"{what} to a lane", "none", "libzmq", "ps0", "lane_handshake", 1)


def test_a_flood_of_connections_to_a_lane(plain: AttackedRun) -> None:
    """The door shuts; what is connected stays, and in time there is room again."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    address, connections = plain.lane_of("ps1"), []
    for _ in range(lane.MOST_CONNECTIONS + lane.BACKLOG + 512):
        try:
            connections.append(callers.connect_to(address, 0.5))
        except OSError:
            break
    assert len(connections) >= lane.FEWEST_CONNECTIONS
    for connection in connections:
        connection.close()
    reason = "lane_full" if len(connections) > lane.MOST_CONNECTIONS else "lane_handshake"
    plain.note_attack(f"{len(connections)} connections to a lane", "none", "door", "ps1", reason, 1)


# ---- HTTP ----------------------------------------------------------------------------------------------------------
# With certificates: test_ports.py


def ask_http(plain: AttackedRun, daemon: str, words: bytes) -> bytes:
    """What it answers to these words, until it hangs up."""
    with callers.connect_to(("127.0.0.1", plain.http[daemon])) as raw:
        raw.sendall(words)
        raw.settimeout(REQUEST_S + 6.0)
        answer = bytearray()
        while more := raw.recv(1 << 16):
            answer += more
    return bytes(answer)


@pytest.mark.parametrize("daemon", ["master", "ps0", "west"])
def test_a_page_of_the_web_that_points_its_name_here(plain: AttackedRun, daemon: str) -> None:
    """DNS rebinding: the browser is on this machine, the page is a stranger's, and the Host header tells."""
    hosts = ("evil.example", f"evil.example:{plain.http[daemon]}", "127.0.0.1.evil.example", "localhost.evil.example")
    for host in hosts:
        words = f"GET /metrics HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
        answer = ask_http(plain, daemon, words.encode())
        assert answer.startswith(b"HTTP/1.1 403") and b"dips_" not in answer, answer[:200]
        assert b"access-control-allow-origin" not in answer.lower()
    plain.note_attack(f"DNS rebinding to {daemon}", "none", "Host", daemon, "http_denied", len(hosts))


@pytest.mark.parametrize(
    "path",
    ["/../../etc/passwd", "/..%2f..%2fetc%2fpasswd", "//etc/passwd", "/metrics/../../ps0.log", "/%2e%2e/dips.yaml",
     "/page.html%00", "http://127.0.0.1/../dips.yaml"],
)  # fmt: skip
def test_paths_that_lead_out(plain: AttackedRun, path: str) -> None:
    """No path is a file's: there are five addresses, and nothing else."""
    words = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
    answer = ask_http(plain, "master", words.encode())
    assert answer.startswith((b"HTTP/1.1 404", b"HTTP/1.1 400")), answer[:200]
    assert b"root:" not in answer and b"shared" not in answer
    why = "not: there is nothing; 404"
    plain.note_attack(f"GET {path}", "none", "no such route", "", "", 0, why)


def test_who_would_change_something_by_http(plain: AttackedRun) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        words = f"{method} /api/state HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
        assert ask_http(plain, "master", words.encode()).startswith(b"HTTP/1.1 405")
    plain.note_attack("POST, PUT, DELETE, PATCH, OPTIONS", "none", "GET and HEAD alone", "master", "http_request", 5)


# ---- in the end ----------------------------------------------------------------------------------------------------


def test_all_are_counted(plain: AttackedRun) -> None:
    plain.require_counted()
