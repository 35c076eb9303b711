"""Lanes with a key: a push and a pull by CURVE, and who is refused: in the handshake, or by a HELLO."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
import zmq

from dips.client.preflight.probe import measure_round_trip
from dips.client.rank.transfer import Piece, TransferIdentity, pull_pieces, push_pieces
from dips.errors import Denied, LocalProtocolError, RemoteProtocolError, UnavailableSlave
from dips.ids import PullId, PushId, VersionId
from dips.protocol.effects import Grant, SlaveAddress
from dips.protocol.manifest import Layer, Manifest, Parameter
from dips.slave.flow import ZmqFlow
from dips.transport import curve
from dips.wire.frame import (
    Kind,
    Range,
    StreamName,
    encode_hello,
    encode_probe,
    encode_want,
    make_message,
    run_id,
    unpack_header,
)

RUN, SINC, V, NUMEL = "r", 3, VersionId(2, 7), 300_000
WITHIN_MS = 20_000  # what is to happen at once, on a loaded machine
MANIFEST = Manifest(tuple(Layer(f"l{i}", (Parameter(f"l{i}.w", (NUMEL,)),)) for i in range(2)))


@contextmanager
def running_flow(key: curve.KeyPair | None, lanes: int = 1) -> Iterator[ZmqFlow]:
    """A slave's data flow."""
    flow = ZmqFlow(RUN, "s0", ("127.0.0.1:0",) * lanes, 1 << 18, 64 << 20, 2, 10.0, key=key)
    flow.set_layers(MANIFEST, (0, 1))
    flow.start(SINC, lambda event: None)
    try:
        yield flow
    finally:
        flow.close()


def grant(flow: ZmqFlow, key: str, deadline_s: float = 20.0) -> Grant:
    return Grant(V, (SlaveAddress("s0", SINC, flow.lane_addresses(), (0, 1), key),), deadline_s)


def pieces(value: float) -> list[Piece]:
    return [Piece(i, 0, 0, NUMEL, np.full(NUMEL, value, np.float32)) for i in range(2)]


def identity(keys: curve.KeyPair | None, seq: int = 1, cluster: str = "a") -> TransferIdentity:
    return TransferIdentity(RUN, cluster, 1, seq, 0, keys)


def zeros() -> dict[int, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    return {i: np.zeros(NUMEL, np.float32) for i in range(2)}


@pytest.mark.parametrize("lanes", [1, 3])
def test_a_push_and_a_pull_go_by_curve(lanes: int) -> None:
    """Bit for bit as without, on every lane, with one pair of keys."""
    keys = curve.new_keys()
    with running_flow(curve.new_keys(), lanes) as flow:
        slot = zeros()
        flow.open_push(PushId("a", 1, 1), (0,), slot, 20.0, keys=(keys.public,))
        stats = push_pieces(grant(flow, flow.public_key), identity(keys), pieces(2.5))
        assert stats.connections == lanes and not flow.refused_frames
        assert all((array == 2.5).all() for array in slot.values())
        flow.open_pull(PullId("a", 1, 2), V, slot, keys=(keys.public,))
        wanted = pieces(0.0)
        pull_pieces(grant(flow, flow.public_key), identity(keys, 2), wanted)
        assert all((piece.array == 2.5).all() for piece in wanted)


def test_a_rank_that_is_early_comes_again() -> None:
    """ZAP refuses it until its push is open; libzmq never retries a refused socket, so the rank makes a new one."""
    keys = curve.new_keys()
    with running_flow(curve.new_keys()) as flow, ThreadPoolExecutor(1) as thread:
        moving = thread.submit(push_pieces, grant(flow, flow.public_key), identity(keys), pieces(2.5))
        while not flow.refused_frames["key"]:
            assert not moving.done()
        slot = zeros()
        flow.open_push(PushId("a", 1, 1), (0,), slot, 20.0, keys=(keys.public,))
        assert moving.result(30).connections > 1 and (slot[0] == 2.5).all()


@pytest.mark.parametrize("who", ["plain", "mistaken", "stranger"])
def test_who_is_not_admitted_moves_nothing(who: str) -> None:
    """A plain rank, one that takes us for another slave, and one whose key is of nothing open: no handshake ends."""
    keys = curve.new_keys()
    with running_flow(curve.new_keys()) as flow:
        server = {"plain": "", "mistaken": curve.new_keys().public, "stranger": flow.public_key}[who]
        slot = zeros()
        flow.open_push(PushId("a", 1, 1), (0,), slot, 20.0, keys=(keys.public,))
        mine = curve.new_keys() if who == "stranger" else keys
        with pytest.raises(UnavailableSlave, match="not connected"):
            push_pieces(grant(flow, server, 1.0), identity(mine), pieces(2.5))
        assert not any(array.any() for array in slot.values()) and flow.bytes_in == 0
        assert bool(flow.refused_frames["key"]) == (who == "stranger")


def test_a_hello_in_anothers_name_is_denied() -> None:
    """A rank that is admitted by its own open push can neither steal another's pull nor push in another's name."""
    west, eve = curve.new_keys(), curve.new_keys()
    with running_flow(curve.new_keys()) as flow:
        slot = zeros()
        flow.open_pull(PullId("a", 1, 1), V, slot, keys=(west.public,))
        flow.open_push(PushId("a", 1, 2), (0,), slot, 20.0, keys=(west.public,))
        flow.open_push(PushId("eve", 1, 1), (0,), zeros(), 20.0, keys=(eve.public,))
        with pytest.raises(Denied, match=r"not that of rank 0 of a/1\^1"):
            pull_pieces(grant(flow, flow.public_key), identity(eve), pieces(0.0))
        with pytest.raises(Denied, match="not that of rank 0"):
            push_pieces(grant(flow, flow.public_key), identity(eve, 2), pieces(6.5))
        assert flow.refused_frames["hello"] == 2 and flow.bytes_out == flow.bytes_in == 0
        wanted = pieces(1.0)
        pull_pieces(grant(flow, flow.public_key), identity(west), wanted)
        assert not any(piece.array.any() for piece in wanted), "the pull beside it goes on"


def test_frames_of_another_connection_are_refused() -> None:
    """Whoever knows a stream's number and its route, but not its key, asks in vain; so does a key whose pull closed."""
    west, eve = curve.new_keys(), curve.new_keys()
    with running_flow(curve.new_keys()) as flow, zmq.Context() as context:
        flow.open_pull(PullId("a", 1, 1), V, zeros(), keys=(west.public,))
        flow.open_push(PushId("eve", 1, 1), (0,), zeros(), 20.0, keys=(eve.public,))
        name = StreamName(RUN, "pull", "a", 1, 1, 0, "s0", SINC, 1, str(V))
        want = make_message(Kind.WANT, run_id(RUN), name.stream_id, encode_want([Range(0, 0, 0, 8)]))
        hello = make_message(Kind.HELLO, run_id(RUN), name.stream_id, encode_hello(name, [Range(0, 0, 0, 8)]))

        def connect(keys: curve.KeyPair) -> zmq.Socket[bytes]:
            socket = context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDTIMEO, WITHIN_MS)
            socket.setsockopt(zmq.RCVTIMEO, WITHIN_MS)
            socket.setsockopt(zmq.ROUTING_ID, b"west")  # eve takes this route once west is gone
            keys.speak_to(socket, flow.public_key)
            socket.connect(f"tcp://{flow.lane_addresses()[0]}")
            return socket

        def receive_kind(socket: zmq.Socket[bytes]) -> Kind:
            header, body = socket.recv_multipart()
            return unpack_header(header, run_id(RUN), len(body), 1 << 20).kind

        with connect(west) as socket:
            socket.send_multipart(hello)
            assert receive_kind(socket) is Kind.WELCOME
            socket.send_multipart(want)
            assert receive_kind(socket) is Kind.CHUNK

        def ask_as_eve() -> bool:
            """Before its lane has seen west go, eve gets no route."""
            with connect(eve) as socket:
                socket.send_multipart(want)
                socket.poll(100)
            return bool(flow.refused_frames["stream"])

        wait_for(ask_as_eve)
        flow.close_pull(PullId("a", 1, 1))
        with connect(west):
            wait_for(lambda: flow.refused_frames["key"] == 1)  # in the handshake: before it nothing is sent


def test_a_connection_that_outlives_its_transfer_gets_nothing() -> None:
    """libzmq keeps it, whatever became of its key: every frame is looked at."""
    keys = curve.new_keys()
    with running_flow(curve.new_keys()) as flow, zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.SNDTIMEO, WITHIN_MS)
        flow.open_pull(PullId("a", 1, 1), V, zeros(), keys=(keys.public,))
        probe = make_message(Kind.PROBE, run_id(RUN), 7, encode_probe(0))
        socket.setsockopt(zmq.LINGER, 0)
        keys.speak_to(socket, flow.public_key)
        socket.connect(f"tcp://{flow.lane_addresses()[0]}")
        socket.send_multipart(probe)
        assert len(socket.recv_multipart()) == 2
        flow.close_pull(PullId("a", 1, 1))
        socket.send_multipart(probe)
        wait_for(lambda: flow.refused_frames["key"] == 1)


def test_a_probe_is_answered_for_its_key() -> None:
    """Once the master has named it, and no longer than for its time."""
    keys = curve.new_keys()
    with running_flow(curve.new_keys()) as flow:
        flow.admit_probe("west", keys.public)
        assert measure_round_trip(flow.lane_addresses()[0], RUN, (keys, flow.public_key)) < 5.0
        assert not flow.refused_frames


def test_a_plain_lane_takes_no_rank_that_expects_a_key() -> None:
    """A rank that was given a key never speaks plain text."""
    with running_flow(None) as flow, pytest.raises(UnavailableSlave, match="not connected"):
        push_pieces(grant(flow, curve.new_keys().public, 1.0), identity(curve.new_keys()), pieces(2.5))
    assert flow.public_key == ""


def test_encrypted_lanes_open_nothing_without_keys() -> None:
    """An order without keys is refused, so nothing is ever open to everybody; a rank without a key says so."""
    with running_flow(curve.new_keys()) as flow:
        with pytest.raises(RemoteProtocolError, match="the lanes of this run are encrypted"):
            flow.open_push(PushId("a", 1, 1), (0,), zeros(), 20.0)
        with pytest.raises(LocalProtocolError, match="s0 are encrypted, and this rank has no key"):
            push_pieces(grant(flow, flow.public_key, 1.0), identity(None), pieces(2.5))


def wait_for(true: Callable[[], bool]) -> None:
    end = time.monotonic() + WITHIN_MS / 1000
    while not true():
        assert time.monotonic() < end
        time.sleep(0.001)
