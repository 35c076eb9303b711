"""The door of a lane: it counts who is in, shuts when the house is full, and opens again."""

from __future__ import annotations

import ctypes
import queue
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
import zmq

from dips.telemetry.refusals import refusals_by_reason
from dips.transport import lane
from dips.transport.lane import Lane, LaneDoor, Outgoing, _listen, most_connections
from dips.transport.seal import Greeter, new_keys
from dips.wire.frame import Header, Kind
from tests.waiting import until

MOST = 4


@pytest.fixture(name="door")
def small_door(monkeypatch: pytest.MonkeyPatch) -> Iterator[LaneDoor]:
    monkeypatch.setattr(lane, "ROOM", 2)
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    door = LaneDoor(router, "127.0.0.1", 0, MOST)
    yield door
    door.stop_watching(router)
    router.close()
    door.close()
    context.term()


def wait_for(door: LaneDoor, connections: int) -> None:
    until(lambda: door.follow_connections() or door.connections == connections, lambda: door.connections)


def test_a_full_house_lets_nobody_in_until_there_is_room(door: LaneDoor) -> None:
    """Who comes meanwhile waits at its TCP, and is not told that nobody listens."""
    before = refusals_by_reason().get("lane_full", 0)
    inside = [socket.create_connection(("127.0.0.1", door.port), 2.0) for _ in range(MOST - 1)]
    wait_for(door, MOST - 1)
    assert refusals_by_reason().get("lane_full", 0) == before, "there is a place left"
    inside.append(socket.create_connection(("127.0.0.1", door.port), 2.0))
    wait_for(door, MOST)
    assert refusals_by_reason()["lane_full"] == before + 1
    with pytest.raises(TimeoutError):
        socket.create_connection(("127.0.0.1", door.port), 0.1)
    late = socket.socket()
    late.setblocking(False)
    late.connect_ex(("127.0.0.1", door.port))
    for connection in inside[:2]:
        connection.close()
    wait_for(door, MOST - 2)
    wait_for(door, MOST - 1)
    for connection in (late, *inside):
        connection.close()
    wait_for(door, 0)


@pytest.mark.parametrize(("host", "bound"), [("127.0.0.1", "127.0.0.1"), ("*", "::")])
def test_a_lane_listens_where_it_is_said(host: str, bound: str) -> None:
    """On that address and no other; on all of them both protocols' callers are let in. A slave that starts again has
    its port at once, though connections of the former process hold it for a minute (TIME_WAIT), and a caller that is
    gone before it is accepted holds nobody up."""
    port = 0
    for _ in range(2):
        with _listen(host, port) as listener:
            assert listener.getsockname()[0] == bound and not listener.getblocking()
            port = listener.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), 5.0) as caller:
                listener.setblocking(True)
                listener.accept()[0].close()  # first to close is who waits
                assert caller.recv(1) == b""


def test_a_port_that_is_taken_is_an_error(door: LaneDoor) -> None:
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    with pytest.raises(OSError):
        LaneDoor(router, "127.0.0.1", door.port)
    router.close()
    context.term()


def test_lanes_share_half_of_the_files_that_may_be_open() -> None:
    """Besides those of the process itself; no lane has fewer connections than a few, or more than are of use."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = list[int]()
    try:
        for limit in (lane.OWN_FILES + 1, lane.OWN_FILES + 2 * 4 * 100):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            found.append(most_connections(4))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert found == [lane.FEWEST_CONNECTIONS, 100]
    assert most_connections(1) <= lane.MOST_CONNECTIONS


class LostFrames:
    """Counts the frames that did not leave."""

    lost = 0

    def still_wanted(self) -> bool:
        return True

    def on_sent(self, tracker: zmq.MessageTracker) -> None:
        pytest.fail("nobody is there")

    def on_not_sent(self) -> None:
        self.lost += 1


def test_what_cannot_leave_is_told() -> None:
    """A frame for nobody, an answer to who has no session, and what is posted when the lane is closing: a source of a
    pull, or a probe's place, is free only then."""
    watch, key = LostFrames(), new_keys()
    open_, sealed = Lane(0, "127.0.0.1", 0, 10.0), Lane(1, "127.0.0.1", 0, 10.0, key)
    open_._send_frame(Outgoing(b"nobody", b"", b"", watch))
    assert watch.lost == 1
    sealed._send_frame(Outgoing(key.public.encode() + b"nobody", Header(Kind.PROBE, 7, 1, 0, 0), b"", watch))
    assert watch.lost == 2
    for lane_ in (open_, sealed):
        lane_.post_frame(Outgoing(b"nobody", b"", b"", watch))
        lane_.close()
    assert watch.lost == 4


class SentBy:
    """On which thread a frame was handed to libzmq; empty before."""

    thread = ""

    def still_wanted(self) -> bool:
        return True

    def on_sent(self, tracker: zmq.MessageTracker) -> None:
        self.thread = threading.current_thread().name

    def on_not_sent(self) -> None:
        pytest.fail("its peer is there")


class AnsweringHandler:
    """Answers each message, and notes whether the answer had left when `post_frame` returned."""

    def __init__(self, served: Lane) -> None:
        self.served, self.heard, self.turns = served, queue.SimpleQueue[tuple[bytes, str]](), queue.SimpleQueue[int]()

    def on_message(self, lane: int, peer: bytes, parts: list[zmq.Frame]) -> None:
        leaving = SentBy()
        self.served.post_frame(Outgoing(peer, b"answer", parts[0].bytes, leaving))
        self.heard.put((peer, leaving.thread))

    def on_turn(self, lane: int) -> None:
        self.turns.put(lane)

    def until_asleep(self) -> None:
        """Return when no turn follows for a moment."""
        for _ in range(1000):
            try:
                self.turns.get(timeout=0.05)
            except queue.Empty:
                return
        pytest.fail("the lane never sleeps")


def test_a_lane_sleeps_until_there_is_something_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long its poll may last: a frame that comes or is to leave, a wake and its end are seen at once. Only its
    own thread touches the socket; what that posts leaves before it reads on."""
    monkeypatch.setattr(lane, "_POLL_MS", 60_000)
    served = Lane(3, "127.0.0.1", 0, 10.0)
    served.start(handler := AnsweringHandler(served))
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.setsockopt(zmq.RCVTIMEO, 10_000)
        peer.connect(f"tcp://{served.address}")
        for number in (b"1", b"2"):
            peer.send_multipart([number, b"body"])
            assert peer.recv_multipart() == [b"answer", number]
            name, thread = handler.heard.get(timeout=10)
            assert thread == "lane-3"
            handler.until_asleep()
        for _ in range(2):
            served.post_frame(Outgoing(name, b"posted", b"body", leaving := SentBy()))
            assert peer.recv_multipart() == [b"posted", b"body"]
            handler.until_asleep()
        served.wake()
        handler.turns.get(timeout=10)
        assert leaving.thread == "lane-3"
    begun = time.monotonic()
    served.close()
    assert time.monotonic() - begun < 30
    Lane(3, "127.0.0.1", int(served.address.rpartition(":")[2]), 10.0).close()  # the port is free
    assert served._waker.theirs.fileno() == -1


class HearingHandler:
    """Notes who sent what."""

    def __init__(self) -> None:
        self.heard = queue.SimpleQueue[tuple[bytes, bytes]]()

    def on_message(self, lane: int, peer: bytes, parts: list[zmq.Frame]) -> None:
        self.heard.put((peer, parts[0].bytes))

    def on_turn(self, lane: int) -> None:
        """Nothing is due."""


def test_a_sleeping_lane_sees_who_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long its poll may last: a rank's proof is answered, and who is not admitted is counted."""
    monkeypatch.setattr(lane, "_POLL_MS", 60_000)
    key, rank, before = new_keys(), new_keys(), refusals_by_reason().get("lane_handshake", 0)
    served = Lane(0, "::1", 0, 10.0, key, lambda key: key == rank.public)
    served.start(handler := HearingHandler())
    assert served.address.startswith("[::1]:")
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer, context.socket(zmq.DEALER) as stranger:
        for caller, keys in ((peer, rank), (stranger, new_keys())):
            caller.setsockopt(zmq.IPV6, 1)
            caller.setsockopt(zmq.LINGER, 0)
            keys.speak_to(caller, key.public)
        peer.connect(f"tcp://{served.address}")
        peer.send(b"1")
        assert handler.heard.get(timeout=10)[1] == b"1"
        stranger.connect(f"tcp://{served.address}")
        until = time.monotonic() + 10
        while refusals_by_reason().get("lane_handshake", 0) == before:
            assert time.monotonic() < until, "nobody has counted it"
            time.sleep(0.005)
    served.close()


def test_a_session_ends_with_its_connection() -> None:
    """Whoever connected and left again and again displaced the sessions of ranks that wait for their turn: what they
    were asked was dropped without a word, and their pushes with it."""
    key, rank = new_keys(), new_keys()
    served = Lane(0, "127.0.0.1", 0, 10.0, key)
    served.start(handler := HearingHandler())
    sessions = served.sessions
    assert sessions is not None
    with zmq.Context() as context:
        for _ in range(3):
            with context.socket(zmq.DEALER) as peer:
                rank.speak_to(peer, key.public)
                peer.connect(f"tcp://{served.address}")
                peer.send(b"1")
                sessions.greet_peer(handler.heard.get(timeout=10)[0], Greeter(rank, key.public).greeting)
                assert len(sessions) >= 1
        until(lambda: len(sessions) == 0, lambda: len(sessions))
    served.close()


def greet_plainly(port: int) -> socket.socket:
    """A ZMTP 3.0 connection of a DEALER, by hand."""
    caller = socket.create_connection(("127.0.0.1", port), 10.0)
    ready = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER"
    caller.sendall(b"\xff" + bytes(8) + b"\x7f\x03\0" + b"NULL".ljust(20, b"\0") + bytes(32))
    caller.sendall(bytes((4, len(ready))) + ready)
    said = b""
    while b"Identity" not in said:
        said += caller.recv(1 << 10)
    return caller


@pytest.mark.parametrize("busy", [False, True])
def test_a_message_without_an_end_ends_its_connection(monkeypatch: pytest.MonkeyPatch, busy: bool) -> None:
    """libzmq kept whatever came: empty parts made a slave's memory grow 32 times as fast as they were sent, until it
    was killed. Whoever sends as much in whole messages stays, and has sent no more than that. In a flood of messages,
    which leaves something to read after each batch, it is ended, too."""
    read_batch = Lane._read_batch
    monkeypatch.setattr(Lane, "_read_batch", lambda *words: read_batch(*words) or busy)
    monkeypatch.setattr(lane, "LOOK_S", 0.0)
    monkeypatch.setattr(lane, "MOST_UNFINISHED", 1 << 16)
    before = refusals_by_reason().get("lane_unfinished", 0)
    served = Lane(0, "127.0.0.1", 0, 10.0)
    served.start(handler := HearingHandler())
    port = int(served.address.rpartition(":")[2])
    more, last = b"\1\0", b"\0\0"
    with greet_plainly(port) as honest, greet_plainly(port) as endless:
        for _ in range(1 << 6):
            honest.sendall((b"\1\xff" + bytes(255)) * 8 + last)
            endless.sendall(more * (1 << 10) + last)
            for _ in range(2):
                handler.heard.get(timeout=10)
        with suppress(ConnectionError):
            endless.sendall(more * (1 << 17))

        def is_ended() -> bool:
            honest.sendall(more + last)
            handler.heard.get(timeout=10)
            return refusals_by_reason().get("lane_unfinished", 0) > before

        until(is_ended)
        with suppress(ConnectionError):
            while endless.recv(1 << 10):
                """What the lane has said of itself."""
        is_ended()
    served.close()


@pytest.mark.parametrize("greeting", [b"\1\0", b"\xff" + bytes(8) + b"\x7f\1\5\0\0"], ids=["1.0", "2.0"])
def test_a_peer_of_an_old_protocol_ends_no_lane(greeting: bytes) -> None:
    """libzmq does not say by which connection its messages came; that ended the lane's thread."""
    served = Lane(0, "127.0.0.1", 0, 10.0)
    served.start(handler := HearingHandler())
    port = int(served.address.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), 10.0) as old, greet_plainly(port) as honest:
        old.sendall(greeting + (b"\2\0x" if greeting[0] == 1 else b"\0\1x"))
        assert handler.heard.get(timeout=10)[1] == b"x"
        honest.sendall(b"\0\1y")
        assert handler.heard.get(timeout=10)[1] == b"y"
    served.close()


def test_who_sends_is_not_looked_at(door: LaneDoor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at 4,096 connections, each second, took a lane's thread a quarter of it on two slow cores."""
    looked_at = list[socket.socket]()

    def taken_bytes(connection: socket.socket) -> int:
        looked_at.append(connection)
        return 0

    monkeypatch.setattr(lane, "LOOK_S", 0.0)
    monkeypatch.setattr(lane, "_taken_bytes", taken_bytes)
    with socket.create_connection(("127.0.0.1", door.port), 2.0), socket.create_connection(("127.0.0.1", door.port)):
        wait_for(door, 2)
        door.end_unfinished(False)
        for _ in range(3):
            door._open[min(door._open)] += 1
            door.end_unfinished(False)
        assert len(looked_at) == 3, "the other one"


class ToldFrame(bytes):
    """Of a message that came by the connection with descriptor 7."""

    def get(self, option: int) -> int:
        return 7


class ToldEvents:
    """A monitor of the connection with descriptor 7."""

    def __init__(self, *events: zmq.Event) -> None:
        self.events = list(events)

    def getsockopt(self, option: int) -> int:
        return int(zmq.POLLIN) if self.events else 0

    def recv_multipart(self, flags: int) -> list[bytes]:
        return [struct.pack("=hi", self.events.pop(0), 7), b""]


def test_the_end_of_a_connection_is_not_taken_for_that_of_the_next(
    door: LaneDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Descriptors are used again: an end that was read only after the next one's first frame ended its session, and its
    push stalled."""
    with monkeypatch.context() as patched:
        patched.setattr(door, "monitor", told := ToldEvents(zmq.Event.ACCEPTED))
        door.follow_connections()
        told.events = [zmq.Event.DISCONNECTED, zmq.Event.ACCEPTED]
        door.count_read(b"next", [ToldFrame(b"frame")])  # type: ignore[list-item]
        door.follow_connections()
        assert door.take_gone() == [] and door.connections == 1
        told.events = [zmq.Event.DISCONNECTED]
        door.follow_connections()
        assert door.take_gone() == [b"next"] and door.connections == 0


def test_nobody_knows_the_number_of_the_next_connection() -> None:
    """libzmq's were the same in every process, and it aborts when a connection's number is another's name already: one
    peer that took the next number for its own name ended a slave."""
    numbers = list[bytes]()
    for _ in range(2):
        ctypes.CDLL(None).srand(1)  # as in a process that begins
        served = Lane(0, "127.0.0.1", 0, 10.0)
        served.start(handler := HearingHandler())
        with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
            peer.connect(f"tcp://{served.address}")
            peer.send(b"1")
            numbers.append(handler.heard.get(timeout=10)[0])
        served.close()
    assert numbers[0] != numbers[1]


def test_who_still_sends_is_not_forgotten_for_who_greets() -> None:
    """A lane has room for so many sessions; the end of a connection may be told late."""
    key = new_keys()
    served = Lane(0, "127.0.0.1", 0, 10.0, key, most=2)
    served.start(handler := HearingHandler())
    sessions = served.sessions
    assert sessions is not None

    def greet(name: bytes) -> bytes:
        sessions.greet_peer(name, Greeter(rank, key.public).greeting)
        return name

    rank = new_keys()
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        rank.speak_to(peer, key.public)
        peer.connect(f"tcp://{served.address}")
        peer.send(b"1")
        sender = greet(handler.heard.get(timeout=10)[0])
        gone = [greet(rank.public.encode() + str(number).encode()) for number in range(3)]
        peer.send(b"2")
        assert handler.heard.get(timeout=10) == (sender, b"2")
        greet(rank.public.encode() + b"new")
        assert served.find_guard(sender) is not None and served.find_guard(gone[0]) is None
    served.close()
