"""Encrypted lanes: a push and a pull, sealed, and who is refused: in the handshake, by a HELLO, or by each frame."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from random import Random

import numpy as np
import pytest
import xxhash
import zmq

from dips.client.preflight.probe import measure_round_trip
from dips.client.rank import transfer
from dips.client.rank.transfer import Piece, TransferIdentity, pull_pieces, push_pieces
from dips.errors import Denied, LocalProtocolError, RemoteProtocolError, UnavailableSlave
from dips.ids import PullId, PushId, VersionId
from dips.protocol.effects import Grant, SlaveAddress
from dips.protocol.manifest import Layer, Manifest, Parameter
from dips.slave.flow import ZmqFlow
from dips.transport import seal, stream
from dips.transport.intake import Transit
from dips.wire.frame import (
    Header,
    Kind,
    Range,
    StreamName,
    encode_hello,
    encode_probe,
    encode_want,
    make_message,
    run_id,
)
from tests.attacks.lane_relay import LaneRelay, Parts
from tests.attacks.wild_dealer import SealedDealer
from tests.unit.slave.test_sender import asked
from tests.unit.slave.test_sender import make as make_sender
from tests.waiting import until

RUN, SINC, V, NUMEL = "r", 3, VersionId(2, 7), 300_000
WITHIN_MS = 20_000  # what is to happen at once, on a loaded machine
PULL = StreamName(RUN, "pull", "a", 1, 1, 0, "s0", SINC, 1, str(V))
HELLO, WANT = encode_hello(PULL, [Range(0, 0, 0, 8)]), encode_want([Range(0, 0, 0, 8)])
MANIFEST = Manifest(tuple(Layer(f"l{i}", (Parameter(f"l{i}.w", (NUMEL,)),)) for i in range(2)))


@contextmanager
def running_flow(key: seal.KeyPair | None, lanes: int = 1) -> Iterator[ZmqFlow]:
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


def identity(keys: seal.KeyPair | None, seq: int = 1, cluster: str = "a") -> TransferIdentity:
    return TransferIdentity(RUN, cluster, 1, seq, 0, keys)


def dealer(flow: ZmqFlow, keys: seal.KeyPair, route: bytes = b"") -> SealedDealer:
    return SealedDealer(flow.lane_addresses()[0], RUN, keys, flow.public_key, route)


def zeros() -> dict[int, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    return {i: np.zeros(NUMEL, np.float32) for i in range(2)}


@pytest.mark.parametrize("lanes", [1, 3])
def test_a_push_and_a_pull_are_sealed(lanes: int) -> None:
    """Bit for bit as without, on every lane, with one pair of keys."""
    keys = seal.new_keys()
    with running_flow(seal.new_keys(), lanes) as flow:
        slot = zeros()
        flow.open_push(PushId("a", 1, 1), (0,), slot, 20.0, keys=(keys.public,))
        stats = push_pieces(grant(flow, flow.public_key), identity(keys), pieces(2.5))
        assert stats.connections == lanes and not flow.refused_frames
        assert all((array == 2.5).all() for array in slot.values())
        flow.open_pull(PullId("a", 1, 2), V, slot, keys=(keys.public,))
        wanted = pieces(0.0)
        pull_pieces(grant(flow, flow.public_key), identity(keys, 2), wanted)
        assert all((piece.array == 2.5).all() for piece in wanted)


def test_a_push_holds_few_sealed_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked for beyond them waits, and all arrives."""
    keys, most, held = seal.new_keys(), 1 << 19, list[int]()
    monkeypatch.setattr(transfer, "TRANSIT_BYTES", most)
    take = Transit.take_bytes

    def note(pool: Transit, nbytes: int) -> bool:
        taken = take(pool, nbytes)
        if pool.limit == most:
            held.append(pool.used_bytes if taken else -1)
        return taken

    monkeypatch.setattr(Transit, "take_bytes", note)
    with running_flow(seal.new_keys()) as flow:
        slot = zeros()
        flow.open_push(PushId("a", 1, 1), (0,), slot, 20.0, keys=(keys.public,))
        push_pieces(grant(flow, flow.public_key), identity(keys), pieces(2.5))
        assert all((array == 2.5).all() for array in slot.values())
    assert -1 in held and max(held) <= most


def test_keys_that_are_worn_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """By those of another connection, on which the rest moves; a push whose all had been sent at once needs none."""
    keys = seal.new_keys()
    monkeypatch.setattr(seal, "WORN_BYTES", 1 << 20)
    monkeypatch.setattr(stream, "LOOK_S", 0.0)
    with running_flow(seal.new_keys()) as flow:
        for seq in range(1, 21):
            slot = zeros()
            flow.open_push(PushId("a", 1, seq), (0,), slot, 20.0, keys=(keys.public,))
            moved = push_pieces(grant(flow, flow.public_key), identity(keys, seq), pieces(2.5))
            assert all((array == 2.5).all() for array in slot.values())
            if moved.connections > 1:
                return
    pytest.fail("twenty pushes, each on one connection")


def test_a_chunk_for_who_is_gone_is_not_sealed() -> None:
    """Its rank died between WANT and the turn of the chunk: its session is gone, and what it read is free."""
    sender = make_sender()
    job = asked(sender)
    with running_flow(seal.new_keys()) as flow:
        flow._sender = sender
        flow._send_chunk(job)
        assert (job.source.in_flight, flow.refused_frames["failed"]) == (0, 0)


def test_a_rank_that_is_early_comes_again() -> None:
    """ZAP refuses it until its push is open; libzmq never retries a refused socket, so the rank makes a new one."""
    keys = seal.new_keys()
    with running_flow(seal.new_keys()) as flow, ThreadPoolExecutor(1) as thread:
        moving = thread.submit(push_pieces, grant(flow, flow.public_key), identity(keys), pieces(2.5))
        while not flow.refused_frames["key"]:
            assert not moving.done()
        slot = zeros()
        flow.open_push(PushId("a", 1, 1), (0,), slot, 20.0, keys=(keys.public,))
        assert moving.result(30).connections > 1 and (slot[0] == 2.5).all()


def test_a_rank_whose_key_is_refused_waits_for_nothing() -> None:
    """The refusal takes the socket's pipe, and a DEALER without one blocks whoever sends: its frames stay posted."""
    with running_flow(seal.new_keys()) as flow, zmq.Context() as context:
        keys = seal.new_keys(), flow.public_key
        refused = stream.Stream(context, flow.lane_addresses()[0], PULL, (), 10.0, Random(0), keys)

        def send_on() -> None:
            try:
                while not flow.refused_frames["key"]:
                    refused.advance_connection(time.monotonic())
                refused.post_frame(b"header", b"body")
                refused.flush_outbox()
            finally:
                refused.close()

        sending = threading.Thread(target=send_on, daemon=True)
        sending.start()
        sending.join(WITHIN_MS / 1000)
        assert not sending.is_alive()  # if it is, the context's end wakes it


@pytest.mark.parametrize("who", ["plain", "mistaken", "stranger"])
def test_who_is_not_admitted_moves_nothing(who: str) -> None:
    """A plain rank, one that takes us for another slave, and one whose key is of nothing open: no handshake ends."""
    keys = seal.new_keys()
    with running_flow(seal.new_keys()) as flow:
        server = {"plain": "", "mistaken": seal.new_keys().public, "stranger": flow.public_key}[who]
        slot = zeros()
        flow.open_push(PushId("a", 1, 1), (0,), slot, 20.0, keys=(keys.public,))
        mine = seal.new_keys() if who == "stranger" else keys
        with pytest.raises(UnavailableSlave, match="not connected"):
            push_pieces(grant(flow, server, 1.0), identity(mine), pieces(2.5))
        assert not any(array.any() for array in slot.values()) and flow.bytes_in == 0
        assert bool(flow.refused_frames["key"]) == (who == "stranger")


def test_a_hello_in_anothers_name_is_denied() -> None:
    """A rank that is admitted by its own open push can neither steal another's pull nor push in another's name."""
    west, eve = seal.new_keys(), seal.new_keys()
    with running_flow(seal.new_keys()) as flow:
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
    west, eve = seal.new_keys(), seal.new_keys()
    with running_flow(seal.new_keys()) as flow:
        flow.open_pull(PullId("a", 1, 1), V, zeros(), keys=(west.public,))
        flow.open_push(PushId("eve", 1, 1), (0,), zeros(), 20.0, keys=(eve.public,))
        with dealer(flow, west, b"west").greet() as socket:
            socket.send(socket.seal_message(Kind.HELLO, PULL.stream_id, HELLO))
            assert socket.receive()[0].kind is Kind.WELCOME
            socket.send(socket.seal_message(Kind.WANT, PULL.stream_id, WANT))
            assert socket.receive()[0].kind is Kind.CHUNK

        def ask_as_eve() -> bool:
            """Before its lane has seen west go, eve, who takes west's route, gets none."""
            with dealer(flow, eve, b"west") as socket, suppress(zmq.Again):
                socket.socket.setsockopt(zmq.RCVTIMEO, 100)
                socket.greet()
                socket.send(socket.seal_message(Kind.WANT, PULL.stream_id, WANT))
                socket.socket.poll(100)
            return bool(flow.refused_frames["stream"])

        until(ask_as_eve)
        flow.close_pull(PullId("a", 1, 1))
        with dealer(flow, west):
            until(lambda: flow.refused_frames["key"] == 1)  # in the handshake: before it nothing is sent


def test_a_connection_that_outlives_its_transfer_gets_nothing() -> None:
    """libzmq keeps it, whatever became of its key: every frame is looked at."""
    keys = seal.new_keys()
    with running_flow(seal.new_keys()) as flow:
        flow.open_pull(PullId("a", 1, 1), V, zeros(), keys=(keys.public,))
        with dealer(flow, keys).greet() as socket:
            socket.send(socket.seal_message(Kind.PROBE, 7, encode_probe(0)))
            assert socket.receive()[0].kind is Kind.PROBE
            flow.close_pull(PullId("a", 1, 1))
            socket.send(socket.seal_message(Kind.PROBE, 7, encode_probe(0)))
            until(lambda: flow.refused_frames["key"] == 1)


def test_a_probe_is_answered_for_its_key() -> None:
    """Once the master has named it, and no longer than for its time."""
    keys = seal.new_keys()
    with running_flow(seal.new_keys()) as flow:
        flow.admit_probe("west", keys.public)
        assert measure_round_trip(flow.lane_addresses()[0], RUN, (keys, flow.public_key)) < 5.0
        assert not flow.refused_frames


def test_a_plain_lane_takes_no_rank_that_expects_a_key() -> None:
    """A rank that was given a key never speaks plain text."""
    with running_flow(None) as flow, pytest.raises(UnavailableSlave, match="not connected"):
        push_pieces(grant(flow, seal.new_keys().public, 1.0), identity(seal.new_keys()), pieces(2.5))
    assert flow.public_key == ""


def test_encrypted_lanes_open_nothing_without_keys() -> None:
    """An order without keys is refused, so nothing is ever open to everybody; a rank without a key says so."""
    with running_flow(seal.new_keys()) as flow:
        with pytest.raises(RemoteProtocolError, match="the lanes of this run are encrypted"):
            flow.open_push(PushId("a", 1, 1), (0,), zeros(), 20.0)
        with pytest.raises(LocalProtocolError, match="s0 are encrypted, and this rank has no key"):
            push_pieces(grant(flow, flow.public_key, 1.0), identity(None), pieces(2.5))


# ---- a man in the middle -------------------------------------------------------------------------------------------


class Tamperer:
    """Does something to every third CHUNK that passes; all other frames go on as they are."""

    def __init__(self, way: str) -> None:
        self._do, self._seen, self._kept = getattr(self, f"_{way}"), 0, list[Parts]()
        self.first: Parts = []
        self.secret = b""  # what must not be seen
        self.leaked = False

    def __call__(self, parts: Parts) -> list[Parts]:
        self.leaked |= bool(self.secret) and any(self.secret in part for part in parts)
        if len(parts) != 2 or parts[0][5] != Kind.CHUNK:
            return [parts]
        self._seen += 1
        kept, self._kept = self._kept, []
        if self._seen % 3:
            return [parts, *kept]
        return [*self._do(parts), *kept]

    def _repeat(self, parts: Parts) -> list[Parts]:
        """Itself, once more, and the first one of all."""
        self.first = self.first or parts
        return [parts, parts, self.first]

    def _delay(self, parts: Parts) -> list[Parts]:
        """The third comes after the fourth."""
        if self._seen > 3:
            return [parts]
        self._kept = [parts]
        return []

    def _flip(self, parts: Parts) -> list[Parts]:
        """A bit of it, and then what was sent."""
        return [[parts[0], bytes([parts[1][0] ^ 1]) + parts[1][1:]], parts]

    def _forge(self, parts: Parts) -> list[Parts]:
        """As a plain lane would believe it, of zeros."""
        fields = bytearray(parts[0][:56])
        body = bytes(len(parts[1]))
        fields[48:56] = xxhash.xxh3_64_digest(body)[::-1]
        return [[bytes(fields) + xxhash.xxh3_64_digest(bytes(fields))[::-1], body], parts]


MIDDLE = {
    "repeat": {"unasked", "replayed"},
    "delay": {"replayed"},
    "flip": {"seal", "unasked", "replayed", "stream"},  # the last may come when its stream is over
    "forge": {"seal", "unasked", "replayed", "stream"},
}


@pytest.mark.parametrize("way", MIDDLE)
def test_who_stands_between_changes_nothing(way: str) -> None:
    """Frames that are repeated, delayed, altered or forged on the way: refused, and asked for again; all arrives."""
    keys, tamperer = seal.new_keys(), Tamperer(way)
    with running_flow(seal.new_keys()) as flow, LaneRelay(flow.lane_addresses()[0], tamperer, tamperer) as relay:
        there = SlaveAddress("s0", SINC, (relay.address,), (0, 1), flow.public_key)
        granted, slot, values = Grant(V, (there,), 30.0), zeros(), pieces(2.5)
        tamperer.secret = values[0].array[:8].tobytes()
        flow.open_push(PushId("a", 1, 1), (0,), slot, 20.0, keys=(keys.public,))
        assert push_pieces(granted, identity(keys), values).connections == 1
        assert all((array == 2.5).all() for array in slot.values())
        assert flow.refused_frames
        flow.open_pull(PullId("a", 1, 2), V, slot, keys=(keys.public,))
        wanted = pieces(0.0)
        assert pull_pieces(granted, identity(keys, 2), wanted).connections == 1
        assert all((piece.array == 2.5).all() for piece in wanted)
        assert set(flow.refused_frames) <= MIDDLE[way] and not tamperer.leaked


def test_a_connection_that_is_played_again_moves_nothing() -> None:
    """All that a rank has sent, from the proof on, on a new connection: the slave's half of the keys is another."""
    keys, sent = seal.new_keys(), list[Parts]()

    def note(parts: Parts) -> list[Parts]:
        sent.append(parts)
        return [parts]

    with running_flow(seal.new_keys()) as flow:
        flow.open_push(PushId("a", 1, 1), (0,), zeros(), 20.0, keys=(keys.public,))
        with LaneRelay(flow.lane_addresses()[0], note) as relay:
            there = SlaveAddress("s0", SINC, (relay.address,), (0, 1), flow.public_key)
            push_pieces(Grant(V, (there,), 30.0), identity(keys), pieces(2.5))
        slot, before = zeros(), flow.bytes_in
        flow.open_push(PushId("a", 1, 2), (0,), slot, 20.0, keys=(keys.public,))
        with dealer(flow, keys) as again:
            for parts in sent:
                again.send(parts)
            until(lambda: flow.refused_frames.total() == len(sent) - 1)  # all but the greeting
            assert set(flow.refused_frames) == {"seal", "stream"}
        assert flow.bytes_in == before and not any(array.any() for array in slot.values())


def test_each_wrong_frame_is_refused_and_counted() -> None:
    """Of a rank that may be here: before its greeting, greeted twice, repeated, out of order, cut, of another's key."""
    keys = seal.new_keys()
    with running_flow(seal.new_keys()) as flow, ExitStack() as stack:
        flow.admit_probe("a", keys.public)
        socket, other = both = [stack.enter_context(dealer(flow, keys)) for _ in range(2)]
        probe = Header(Kind.PROBE, run_id(RUN), 7, len(encode_probe(0)), 0)
        refused = []

        def expect(reason: str, parts: tuple[bytes, bytes]) -> None:
            refused.append(reason)
            socket.send(parts)
            until(lambda: flow.refused_frames[reason] == refused.count(reason))

        expect("seal", make_message(Kind.PROBE, run_id(RUN), 7, encode_probe(0)))
        expect("greeting", make_message(Kind.GREETING, run_id(RUN), 7, bytes(32)))
        socket.greet()
        other.greet()
        expect("greeting", make_message(Kind.GREETING, run_id(RUN), 7, socket.greeter.greeting))
        (first, second, third), (*_, foreign) = ([s.seal(probe, encode_probe(0)) for _ in range(3)] for s in both)
        socket.send(second)
        assert socket.receive()[0].kind is Kind.PROBE
        expect("replayed", second)
        expect("replayed", first)
        expect("length", (third[0], third[1][:-1]))
        expect("seal", foreign)
        socket.send(third)
        assert socket.receive()[0].kind is Kind.PROBE
        assert flow.refused_frames.total() == len(refused)
