"""Attacks on daemons with certificates: without one, with a wrong one, with a true one of somebody else's rights.

Each is refused, and the run beside it makes two more versions with both clusters and loses no round. In the end all are
counted and no daemon has grown.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import grpc
import pytest

from dips.client.preflight.peers import admit_probe
from dips.client.version_pull import _describe_run
from dips.identity.names import PeerRole
from dips.identity.paths import TlsFiles
from dips.ids import GENESIS, PullId, PushId
from dips.protocol import effects, events
from dips.protocol.claims import MOST_TERMS_AHEAD
from dips.protocol.enums import Activity, TrainerState
from dips.protocol.heartbeats import ClusterHeartbeat
from dips.protocol.manifest import Manifest
from dips.transport.endpoints import master_peer
from dips.transport.limits import HANDSHAKE_MS, PEER_CALLS_AT_ONCE
from dips.transport.seal import new_keys
from dips.transport.tls import TlsSource
from dips.wire.frame import Header, Kind, encode_probe, make_message, pack_header, run_id
from dips.wire.generated import cluster_pb2, operator_pb2, status_pb2
from dips.wire.messages import to_proto
from tests.attacks import callers
from tests.attacks.callers import describe, refused_with
from tests.attacks.deployment import RUN, AttackedRun
from tests.attacks.wild_dealer import SealedDealer, WildDealer, hello
from tests.integration.test_mistakes import tiny

pytestmark = [pytest.mark.attacks, pytest.mark.real_commands, pytest.mark.timeout(240)]
MASTER_SAN = f"master.master.{RUN}.dips"
STATUS = "StatusService/Status"
JOIN, REGISTER, EXECUTE = "ClusterService/Join", "SlaveService/Register", "OrderService/Execute"
CLOSED_S = HANDSHAKE_MS / 1000 + 4.0
ENDS_S = 10.0  # left of a certificate that ends in the middle of something


@pytest.fixture(autouse=True)
def run_goes_on(secured: AttackedRun) -> Iterator[None]:
    yield from secured.going_on()


def join(cluster: str) -> events.ClusterJoined:
    return events.ClusterJoined(0, cluster, "nonce", RUN, "0" * 64, "0" * 64, take_over=True)


def look(channel: grpc.Channel) -> dict[str, Any]:
    call = channel.unary_unary(f"/dips.v1.{STATUS}", lambda m: m.SerializeToString(), status_pb2.StatusReply.FromString)
    status: dict[str, Any] = json.loads(call(status_pb2.StatusRequest(), timeout=callers.CALL_S).json)
    return status


def register(slave: str, term: int = 0) -> events.SlaveRegistered:
    return events.SlaveRegistered(0, slave, "mine", RUN, "127.0.0.1:9", ("127.0.0.1:9",), term, None, None, (), 4, "")


# ---- certificates --------------------------------------------------------------------------------------------------

HANDSHAKES = {
    "plain text to TLS": lambda d: None,
    "a certificate of another authority of the same name": AttackedRun.forge_elsewhere,
    "an expired certificate": lambda d: d.forge("expired", [f"west.cluster.{RUN}.dips"], begin_s=-7200, end_s=-3600),
    "one that is not valid yet": lambda d: d.forge("future", [f"west.cluster.{RUN}.dips"], begin_s=3600, end_s=7200),
}


@pytest.mark.parametrize("daemon", ["master", "ps0"])
@pytest.mark.parametrize("attack", HANDSHAKES)
def test_the_handshake_refuses(secured: AttackedRun, attack: str, daemon: str) -> None:
    files: TlsFiles | None = HANDSHAKES[attack](secured)
    san = MASTER_SAN if daemon == "master" else f"ps0.slave.{RUN}.dips"
    said = refused_with(secured.address_of(daemon), files, san, STATUS, status_pb2.StatusRequest())
    assert said.startswith(("UNAVAILABLE", "DEADLINE_EXCEEDED")), said
    secured.note_attack(
        f"{attack}, at {daemon}", "none" if files is None else "a forger", "TLS", daemon, "handshake", 1
    )


def test_no_certificate_is_shown(secured: AttackedRun) -> None:
    files = secured.certificate_of("ada", PeerRole.VIEWER)
    said = refused_with(secured.run.address, files, MASTER_SAN, STATUS, status_pb2.StatusRequest(), shown=False)
    assert said.startswith("UNAVAILABLE"), said
    secured.note_attack("no certificate in the handshake", "none", "TLS", "master", "handshake", 1)


def test_a_revoked_certificate(secured: AttackedRun) -> None:
    files = secured.certificate_of("mallory", PeerRole.VIEWER)
    secured.enrolled.authority.revoke("mallory.viewer")
    time.sleep(1.1)  # daemons look once a second
    said = refused_with(secured.run.address, files, MASTER_SAN, STATUS, status_pb2.StatusRequest())
    assert "is revoked" in said
    secured.note_attack("a revoked certificate", "its former holder", "guard", "master", "denied", 1)


def test_a_certificate_that_ends_in_the_middle_of_a_transfer(secured: AttackedRun) -> None:
    """Its pull is open at the slaves when it ends: a sentence, counted, and the pull is dropped within a second."""
    files = secured.forge("ending", [f"south.cluster.{RUN}.dips"], end_s=ENDS_S)
    viewer, keys = secured.certificate_of("scraper", PeerRole.VIEWER), new_keys()
    with (
        callers.channel_to(secured.run.address, files, MASTER_SAN) as channel,
        callers.channel_to(secured.run.address, viewer, MASTER_SAN) as looking,
    ):
        known = describe(channel)
        digest = Manifest.from_json(known["manifest"]).digest
        joined = events.ClusterJoined(0, "south", "n", RUN, digest, known["config_digest"])
        inc = callers.ask_cluster(channel, "Join", cluster_pb2.JoinReply, joined).inc
        pull = PullId("south", inc, 1)
        wanted = events.PullRequested(0, pull, 1, None, (keys.public,))
        while not isinstance(
            callers.ask_cluster(channel, "RequestPull", cluster_pb2.RequestPullReply, wanted), effects.Grant
        ):
            pass
        beat = ClusterHeartbeat(
            "south", inc, TrainerState.TRAINING, Activity.INNER, 1, 5, 1, 0, 1.0, GENESIS, 0, 0, 0.0
        )  # fmt: skip
        over = f"the certificate of cluster 'south' of run {RUN!r} expired at"
        while (answer := callers.ask(channel, "ClusterService/Heartbeat", beat))[0] == "OK":
            time.sleep(0.2)
        assert answer[0] == "PERMISSION_DENIED" and answer[1].startswith(over), answer
        secured.run.until(lambda: look(looking)["clusters"]["south"]["state"] == "gone", 5, "south is expelled")
        south = look(looking)["clusters"]["south"]
        assert south["cause"] == "expelled" and over in south["reason"], south
        status, said = callers.ask(channel, "ClusterService/FinishPull", events.PullFinished(0, pull, installed=False))
    assert status == "PERMISSION_DENIED" and said.startswith(over), (status, said)
    secured.note_attack("a certificate that ends in mid-transfer", "south, once", "guard", "master", "denied", 1)


@pytest.mark.parametrize(
    ("what", "sans", "told"),
    [
        ("two names in one", [f"west.cluster.{RUN}.dips", f"east.cluster.{RUN}.dips"], "found 2"),
        ("no name of Di-PS", ["west.example.org"], "expected a certificate for"),
        ("a certificate of another run", ["west.cluster.other.dips"], "this is run 'test'"),
        ("a second master", [f"mallory.master.{RUN}.dips"], "a run has one master"),
    ],
)
def test_names_that_are_none(secured: AttackedRun, what: str, sans: list[str], told: str) -> None:
    files = secured.forge(what.replace(" ", "-"), sans)
    said = refused_with(secured.run.address, files, MASTER_SAN, JOIN, join("west"))
    assert said.startswith("PERMISSION_DENIED") and told in said, said
    secured.note_attack(what, "a careless authority", "guard", "master", "denied", 1)


def test_another_certificates_key(secured: AttackedRun) -> None:
    """The certificate is public: whoever shows it without its key does not get as far as a connection."""
    west, east = (secured.certificate_of(name, PeerRole.CLUSTER) for name in ("north", "south"))
    mixed = TlsFiles.beside(secured.directory / "mixed" / west.cert.name)
    mixed.cert.parent.mkdir()
    for source, target in ((west.ca, mixed.ca), (west.cert, mixed.cert), (east.key, mixed.key)):
        shutil.copy(source, target)
    posing = secured.run.start_cluster("north", tiny(secured.directory), tls=str(mixed.cert))
    secured.run.wait(posing, 60, code=78)
    assert "is not the key of" in posing.log.read_text()
    said = refused_with(
        secured.run.address, replace(west, key=east.key), MASTER_SAN, STATUS, status_pb2.StatusRequest()
    )
    assert said.startswith("UNAVAILABLE"), said
    secured.note_attack(
        "another certificate's key", "north, with south's key", "its own start; TLS", "", "", 0,
        why="not: it does not get as far as a connection",
    )  # fmt: skip


# ---- rights --------------------------------------------------------------------------------------------------------


def test_a_cluster_that_speaks_for_another(secured: AttackedRun) -> None:
    north = secured.certificate_of("north", PeerRole.CLUSTER)
    for method, said in (
        (JOIN, join("west")),
        ("ClusterService/RequestPush", events.PushRequested(0, PushId("west", 1, 9999), GENESIS, 1)),
        ("ClusterService/Leave", events.ClusterLeft(0, "west", 1, 0, "bye")),
    ):
        answer = refused_with(secured.run.address, north, MASTER_SAN, method, said)
        assert "got 'west'" in answer, answer
        secured.note_attack(f"{method.partition('/')[2]} as another cluster", "north", "rights", "master", "denied", 1)


@pytest.mark.parametrize(
    ("name", "role", "method", "said"),
    [
        ("eve", PeerRole.VIEWER, "OperatorService/Drain", operator_pb2.DrainAsked(slave="ps0")),
        ("north", PeerRole.CLUSTER, "OperatorService/Drain", operator_pb2.DrainAsked(slave="ps0")),
        ("ps1", PeerRole.SLAVE, "OperatorService/Drain", operator_pb2.DrainAsked(slave="ps0")),
        ("north", PeerRole.CLUSTER, REGISTER, register("ps0")),
        ("ps1", PeerRole.SLAVE, REGISTER, register("ps0", 2)),
        ("ada", PeerRole.OPERATOR, REGISTER, register("ps0")),
    ],
    ids=["viewer drains", "cluster drains", "slave drains another", "cluster registers", "slave registers as another",
         "operator registers"],
)  # fmt: skip
def test_whom_the_master_refuses(
    secured: AttackedRun, request: pytest.FixtureRequest, name: str, role: PeerRole, method: str, said: object
) -> None:
    files = secured.certificate_of(name, role) if name != "ps1" else secured.forge(name, [f"ps1.slave.{RUN}.dips"])
    answer = refused_with(secured.run.address, files, MASTER_SAN, method, said)
    assert answer.startswith("PERMISSION_DENIED"), answer
    secured.note_attack(request.node.callspec.id, f"{name}.{role}", "rights", "master", "denied", 1)


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("ClusterService/RequestPush", events.PushRequested(0, PushId("eve.puller", 1, 9), GENESIS, 1)),
        ("ClusterService/RequestRanges", events.RangesRequested(0, "eve.puller", 1, 1, 1, ())),
        ("ClusterService/RequestPull", events.PullRequested(0, PullId("west", 1, 9999), 1)),
        (JOIN, join("west")),
        (JOIN, join("eve")),
        (STATUS, status_pb2.StatusRequest()),
        ("OperatorService/Tune", operator_pb2.TuningAsked(changes=[operator_pb2.TunedOption(key="outer.lr", value=9)])),
        ("OperatorService/Quarantine", operator_pb2.QuarantineAsked(cluster="west", reason="because")),
        ("OperatorService/Drain", operator_pb2.DrainAsked(slave="ps0")),
        ("OperatorService/Extend", operator_pb2.ExtensionAsked()),
        ("OperatorService/Rollback", operator_pb2.RollbackAsked()),
        ("OperatorService/Rebalance", operator_pb2.RebalanceAsked(slave="ps0", slaves=["ps0", "ps9"])),
        ("OperatorService/Recover", operator_pb2.RecoverAsked(source="mine")),
        (REGISTER, register("ps0")),
    ],
    ids=["push", "lease", "pull as another", "join as a cluster", "join as a cluster of its name", "look", "tune",
         "quarantine", "drain", "extend", "roll back", "rebalance", "recover", "register"],
)  # fmt: skip
def test_what_a_puller_may_not(secured: AttackedRun, request: pytest.FixtureRequest, method: str, said: object) -> None:
    """A stolen puller's key gives the parameters away, as any follower must have them, and nothing else."""
    files = secured.certificate_of("eve", PeerRole.PULLER)
    answer = refused_with(secured.run.address, files, MASTER_SAN, method, said)
    assert answer.startswith("PERMISSION_DENIED"), answer
    secured.note_attack(request.node.callspec.id, "eve.puller", "rights", "master", "denied", 1)


def test_a_puller_that_says_that_it_trains(secured: AttackedRun) -> None:
    """It joins, and no window waits for it: the run beside it goes on as before (`run_goes_on`)."""
    files = secured.certificate_of("eve", PeerRole.PULLER)
    with callers.channel_to(secured.run.address, files, MASTER_SAN) as channel:
        described = describe(channel)
        assert described["clusters"] == {}, "it sees nobody"
        manifest = Manifest.from_json(described["manifest"])
        event = events.ClusterJoined(0, "eve.puller", "n", RUN, manifest.digest, described["config_digest"])
        assert callers.ask(channel, JOIN, event) == ("OK", "")
        beat = ClusterHeartbeat(
            "eve.puller", 1, TrainerState.TRAINING, Activity.INNER, 1, 5, 1, 0, 1.0, GENESIS, 0, 0, 0.0,
            aligned_steps=10, step_s=0.1, since_push=5, tokens_consumed=1 << 40,
        )  # fmt: skip
        for _ in range(4):
            assert callers.ask(channel, "ClusterService/Heartbeat", beat)[0] == "OK"
            time.sleep(0.5)
        assert callers.ask(channel, "ClusterService/Leave", events.ClusterLeft(0, "eve.puller", 1, 1 << 40))[0] == "OK"
    viewer = secured.certificate_of("scraper", PeerRole.VIEWER)
    with callers.channel_to(secured.run.address, viewer, MASTER_SAN) as channel:
        seen = look(channel)["clusters"]["eve.puller"]
    assert seen["state"] == "gone" and not seen["pace"] and seen["tokens_lost"] == 0, seen


def test_what_a_cluster_sees_of_the_others(secured: AttackedRun) -> None:
    """Itself, and how far the run is: no loss, norm, address or last line of another; what it needs to join besides."""
    files = secured.certificate_of("west", PeerRole.CLUSTER)
    with callers.channel_to(secured.run.address, files, MASTER_SAN) as channel:
        status = look(channel)
        described = describe(channel)
    assert set(status["clusters"]) == set(described["clusters"]) == {"west"}
    assert status["slaves"] == {} and status["concerns"] == [] and status["head"].startswith("v")
    assert {key for slave in described["slaves"].values() for key in slave} == {"state", "reason", "lanes", "key"}
    assert "east" not in json.dumps(status)


@pytest.mark.parametrize(("name", "role"), [("north", PeerRole.CLUSTER), ("ada", PeerRole.OPERATOR)])
def test_who_orders_a_slave(secured: AttackedRun, name: str, role: PeerRole) -> None:
    """Only the master does, whatever term the order bears."""
    order = effects.Order("ps0", 1, (1 << 53) - 1, 1, effects.Ping(), 1.0)
    files = secured.certificate_of(name, role)
    answer = refused_with(secured.address_of("ps0"), files, f"ps0.slave.{RUN}.dips", EXECUTE, order)
    assert answer.startswith("PERMISSION_DENIED"), answer
    secured.note_attack("an order to a slave", f"{name}.{role}", "rights", "ps0", "denied", 1)


@pytest.mark.parametrize("term", [1 << 62, 2 + MOST_TERMS_AHEAD, 3, 0], ids=["2**62", "a million", "the next", "none"])
def test_a_stolen_slaves_certificate(secured: AttackedRun, term: int) -> None:
    """Another process with ps0's own certificate, while ps0 lives: its terms end no master."""
    files = secured.forge("stolen", [f"ps0.slave.{RUN}.dips"])
    said = to_proto(register("ps0", min(term, (1 << 53) - 1)))
    said.term_seen = term  # type: ignore[attr-defined]
    answer = refused_with(secured.run.address, files, MASTER_SAN, REGISTER, said)
    told = "expected at most" if term > 3 else "a name that is free"
    assert told in answer, answer
    reason = "remote_protocol" if term > 3 else "busy"
    secured.note_attack(f"a second ps0, which has seen term {term}", "ps0, stolen", "claims", "master", reason, 1)


# ---- too much ------------------------------------------------------------------------------------------------------


def test_a_flood_of_calls(secured: AttackedRun) -> None:
    """The flooder alone is held back."""
    files = secured.certificate_of("eve", PeerRole.VIEWER)
    with callers.channel_to(secured.run.address, files, MASTER_SAN) as channel:
        call = channel.unary_unary("/dips.v1.StatusService/Describe", lambda m: m.SerializeToString(), bytes)
        call(status_pb2.DescribeRequest(), timeout=5)
        codes = list[str]()
        with ThreadPoolExecutor(16) as threads:  # on a slow machine they are hardly more in a second than it may make
            while codes.count("RESOURCE_EXHAUSTED") <= 100 and len(codes) < 20 * PEER_CALLS_AT_ONCE:
                codes += threads.map(lambda _: _code_of(call), range(int(PEER_CALLS_AT_ONCE)))
    assert codes.count("RESOURCE_EXHAUSTED") > 100, {code: codes.count(code) for code in set(codes)}
    secured.note_attack(f"{len(codes)} calls at once", "eve.viewer", "rate", "master", "rate", 100)


def _code_of(call: grpc.UnaryUnaryMultiCallable) -> str:
    try:
        call(status_pb2.DescribeRequest(), timeout=20)
    except grpc.RpcError as error:
        return callers.status_of(error)
    return "OK"


def test_huge_messages(secured: AttackedRun) -> None:
    files = secured.certificate_of("north", PeerRole.CLUSTER)
    for what, method, huge in (
        ("a message of 40 MiB", JOIN, replace(join("north"), nonce="x" * (40 << 20))),
        ("a question of 2 MiB", "OperatorService/Drain", operator_pb2.DrainAsked(slave="p" * (2 << 20))),
    ):
        answer = refused_with(secured.run.address, files, MASTER_SAN, method, huge)
        assert answer.startswith("RESOURCE_EXHAUSTED"), answer
        secured.note_attack(what, "north.cluster", "gRPC", "master", "unheard", 1)


def test_a_method_that_is_none(secured: AttackedRun) -> None:
    files = secured.certificate_of("north", PeerRole.CLUSTER)
    answer = refused_with(secured.run.address, files, MASTER_SAN, "OperatorService/Shutdown", join("north"))
    assert answer.startswith("UNIMPLEMENTED"), answer
    secured.note_attack("an unknown method", "north.cluster", "gRPC", "master", "unknown_method", 1)


@pytest.mark.parametrize("daemon", ["master", "ps0"])
def test_half_open_connections_and_slow_handshakes(secured: AttackedRun, daemon: str) -> None:
    """Who says nothing, half of a handshake, or garbage, is hung up on."""
    address, hello = callers.host_and_port(secured.address_of(daemon)), callers.client_hello()
    said = {
        "nothing": b"",
        "half of a handshake": hello[: len(hello) // 2],
        "garbage": os.urandom(4096),
        "HTTP": b"GET /",
    }
    connections = [callers.connect_to(address) for _ in said for _ in range(8)]
    for connection, words in zip(connections, list(said.values()) * 8, strict=True):
        connection.sendall(words)
    slow = callers.connect_to(address)
    for at in range(5):
        try:
            slow.sendall(hello[at : at + 1])
        except OSError:
            break
        time.sleep(1.0)
    assert all(callers.closed_within(connection, CLOSED_S) for connection in (*connections, slow))
    for connection in (*connections, slow):
        connection.close()
    for what in (*said, "a handshake, byte by byte"):
        secured.note_attack(f"connections that say {what}, to {daemon}", "none", "handshake_s", daemon, "handshake", 1)


def test_a_flood_of_connections(secured: AttackedRun) -> None:
    """Beyond the most that it takes they are closed at once; those on which the run lives stay."""
    address = callers.host_and_port(secured.address_of("ps0"))
    connections = []
    for _ in range(600):
        connections.append(callers.connect_to(address))
    assert sum(callers.closed_within(connection, 0.01) for connection in connections) >= 300
    for connection in connections:
        connection.close()
    secured.note_attack("600 connections to a slave", "none", "most connections", "ps0", "handshake", 100)


# ---- lanes ---------------------------------------------------------------------------------------------------------
# Who has a key of an open transfer and reaches for another's: tests/integration/test_lane_thieves.py


@pytest.mark.parametrize("attack", ["plain text", "a key of nothing", "garbage"])
def test_who_has_no_key_of_a_lane(secured: AttackedRun, attack: str) -> None:
    """A lane lets nobody in without the key of an open push or pull."""
    address = secured.lane_of("ps0")
    if attack == "garbage":
        raw = callers.connect_to(address)
        raw.sendall(b"\xff" + b"\0" * 8 + b"\x7f\3\0PLAIN" + os.urandom(1024))
        assert callers.closed_within(raw, 14.0)
        raw.close()
    else:
        with WildDealer(address, keys=attack != "plain text") as dealer:
            assert not dealer.answers_to(*hello())
    secured.note_attack(f"{attack} to a lane", "none", "ZAP", "ps0", "lane_handshake", 1)


def test_frames_that_are_not_sealed_as_they_should(secured: AttackedRun) -> None:
    """Of an enrolled cluster whose key is admitted, or of who stands between: repeated, reordered, cut, cut anew, of
    another connection, plain, before a greeting.
    """
    source = TlsSource(secured.certificate_of("north", PeerRole.CLUSTER), "north", PeerRole.CLUSTER, RUN)
    master = master_peer(secured.run.address, source)
    keys, described = asyncio.run(admit_probe(master, "north")), asyncio.run(_describe_run(master))
    lane, server = described["slaves"]["ps0"]["lanes"][0], described["slaves"]["ps0"]["key"]
    body = encode_probe(0, 100)
    probe = Header(Kind.PROBE, run_id(RUN), 7, len(body), 0)
    with SealedDealer(lane, RUN, keys, server) as dealer, SealedDealer(lane, RUN, keys, server) as other:
        early = make_message(Kind.PROBE, run_id(RUN), 7, body)
        small = make_message(Kind.GREETING, run_id(RUN), 7, b"\0" + bytes(32))
        for parts in (early, small):
            dealer.send(parts)
        dealer.greet()
        other.greet()
        first, second, third = (dealer.seal(probe, body) for _ in range(3))
        *_, foreign = (other.seal(probe, body) for _ in range(5))
        dealer.send(second)
        assert dealer.receive()[0].kind is Kind.PROBE
        cut = pack_header(probe._replace(length=len(body) - 50, counter=9)), third[1][50:]
        moved = pack_header(probe._replace(stream=8, counter=3)), third[1]
        told = make_message(Kind.HELLO, run_id(RUN), 7, body)
        wrong = {
            "a frame before its connection's greeting": (None, "seal"),
            "a greeting of a key of low order": (None, "greeting"),
            "a second greeting": (make_message(Kind.GREETING, run_id(RUN), 7, dealer.greeter.greeting), "greeting"),
            "a frame that was sent before": (second, "replayed"),
            "a frame out of order": (first, "replayed"),
            "a frame without its end": ((third[0], third[1][:-1]), "length"),
            "a frame that is cut anew": (cut, "seal"),
            "a frame of another stream's number": (moved, "seal"),
            "a frame of another connection": (foreign, "seal"),
            "a plain frame": (told, "length"),
        }
        for what, (parts, reason) in wrong.items():
            if parts is not None:
                dealer.send(parts)
            secured.note_attack(what, "north.cluster", "seal", "ps0", f"frame_{reason}", 1)
        dealer.send(third)
        assert dealer.receive()[0].kind is Kind.PROBE, "the connection has lost nothing by it"


# ---- text ----------------------------------------------------------------------------------------------------------


def test_a_reason_that_would_clear_the_screen(secured: AttackedRun) -> None:
    """An enrolled cluster says it; log and status spell it."""
    files = secured.certificate_of("north", PeerRole.CLUSTER)
    evil = events.ClusterLeft(0, "north", 1, 0, "\x1b[2J\u202e\nmaster: all is well")
    with callers.channel_to(secured.run.address, files, MASTER_SAN) as channel:
        callers.ask(channel, "ClusterService/Leave", evil)
    log = (secured.directory / "master.log").read_text()
    assert "\x1b" not in log and "\u202e" not in log and "\nmaster: all" not in log
    secured.note_attack(
        "a reason with escape sequences", "north.cluster", "printable", "", "", 0, why="not: it may say so, spelled"
    )


# ---- in the end ----------------------------------------------------------------------------------------------------


def test_all_are_counted(secured: AttackedRun) -> None:
    secured.require_counted()
