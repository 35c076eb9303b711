"""The data flow without a socket: what goes wrong in a stage is known to the receiver, the sender and the lane."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import zmq

from dips.ids import PullId, PushId, VersionId
from dips.protocol.manifest import Layer, Manifest, Parameter
from dips.slave.flow import ZmqFlow
from dips.slave.ports import FlowEvent, Released
from dips.transport.lane import Handler, Outgoing
from dips.wire.frame import (
    CHECKSUMS,
    Buffer,
    ChecksumGuard,
    FrameGuard,
    HashBody,
    Header,
    Kind,
    Range,
    StreamName,
    decode_want,
    encode_hello,
    encode_want,
    make_message,
    run_id,
)

N, PEER, V1 = 16, b"p", VersionId(1, 1)
WHOLE = (Range(0, 0, 0, N),)


class NoMemory(ChecksumGuard):
    """A guard for whose copies there is no memory."""

    def seal_frame(self, header: Header, body: Buffer, digest: HashBody = hash) -> tuple[bytes, Buffer]:
        raise MemoryError


class QuietLane:
    """Implements LanePort: what it is given to send is kept, and wake-ups are counted."""

    sessions = None

    def __init__(self, index: int, host: str, port: int, *_: object) -> None:
        self.index, self.address = index, f"{host}:{port}"
        self.posted, self.wakes, self.guard = list[Outgoing](), 0, CHECKSUMS

    def start(self, handler: Handler) -> None: ...

    def post_frame(self, frame: Outgoing) -> None:
        self.posted.append(frame)

    def find_guard(self, peer: bytes) -> FrameGuard:
        return self.guard

    def wake(self) -> None:
        self.wakes += 1

    def stop(self) -> None: ...

    def close(self) -> None: ...


class FlowStory:
    """A flow of one lane, its incarnation 3 begun."""

    def __init__(self, *, in_place: bool = True) -> None:
        self.events, self.now = list[FlowEvent](), 0.0
        self.flow = ZmqFlow(
            "r", "s", ("h:1",), 1 << 20, 1 << 24, 2, 10.0, lambda: self.now,
            make_lane=self.make_lane, in_place=in_place, pause=self.pause,
        )  # fmt: skip
        self.flow.set_layers(Manifest((Layer("l", (Parameter("l.w", (N,)),)),)), (0,))
        self.flow.start(3, self.events.append)

    def pause(self, seconds: float) -> None:
        raise AssertionError("a source is held that nothing reads: the slave would never end")

    def make_lane(self, *arguments: object) -> QuietLane:
        self.lane = QuietLane(*arguments)  # type: ignore[arg-type]
        return self.lane

    def tell(self, kind: Kind, name: StreamName, body: bytes) -> None:
        self.pass_on(*make_message(kind, run_id("r"), name.stream_id, body))

    def pass_on(self, part: bytes, body: bytes) -> None:
        self.flow.on_message(0, PEER, [zmq.Frame(part), zmq.Frame(body)])


@pytest.fixture
def story() -> Iterator[FlowStory]:
    """Closed at the end."""
    made = FlowStory()
    yield made
    made.flow.close()


def test_a_flow_that_is_closed_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for what comes nor, where there are cores to spare, for what goes."""
    monkeypatch.setattr("dips.slave.flow.spare_threads", lambda _: 1)
    before = set(threading.enumerate())
    made = FlowStory(in_place=False)
    assert len(set(threading.enumerate()) - before) == 2
    made.flow.close()
    assert not set(threading.enumerate()) - before


def test_a_chunk_that_arrives_damaged_is_asked_for_again_at_once(story: FlowStory) -> None:
    """Its lane is woken: nothing else may come on it that would ask."""
    name, buffer = StreamName("r", "push", "x", 1, 1, 0, "s", 3, 1, ""), np.zeros(N, np.float32)
    story.flow.open_push(PushId("x", 1, 1), (0,), {0: buffer}, 60.0)
    story.tell(Kind.HELLO, name, encode_hello(name, WHOLE))
    story.flow.on_turn(0)
    body, wakes = np.arange(N, dtype=np.float32).tobytes(), story.lane.wakes
    part, _ = CHECKSUMS.seal_frame(Header(Kind.CHUNK, run_id("r"), name.stream_id, len(body), 0), body)
    story.pass_on(part, bytes(len(body)))
    assert story.flow.refused_frames["body_checksum"] == 1
    assert story.lane.wakes == wakes + 1
    story.flow.on_turn(0)
    wants = [frame.body for frame in story.lane.posted if frame.header.kind is Kind.WANT]  # type: ignore[union-attr]
    assert [decode_want(want) for want in wants] == [WHOLE, WHOLE]
    story.pass_on(part, body)
    assert buffer.tobytes() == body


def test_a_chunk_that_cannot_be_made_ends_its_stream_and_holds_no_source(story: FlowStory) -> None:
    """As without memory for its copy: the rank connects again, and a pull that is closed is released."""
    name, pull = StreamName("r", "pull", "x", 1, 1, 0, "s", 3, 1, str(V1)), PullId("x", 1, 1)
    story.flow.open_pull(pull, V1, {0: np.zeros(N, np.float32)})
    story.tell(Kind.HELLO, name, encode_hello(name, WHOLE))
    story.lane.guard = NoMemory()
    story.tell(Kind.WANT, name, encode_want(WHOLE))
    assert story.flow.refused_frames["failed"] == 1
    story.flow.close_pull(pull)
    story.now = 1.0
    story.flow.on_turn(0)
    assert story.events == [Released(pull, "closed")]


def test_a_pull_that_moves_or_ends_wakes_the_lane(story: FlowStory) -> None:
    """A sleeping one would tell of its former source, and release it, only when its next frame arrives."""
    pull, source, wakes = PullId("x", 1, 1), {0: np.zeros(N, np.float32)}, story.lane.wakes
    story.flow.open_pull(pull, V1, source)
    story.flow.move_pull(pull, source)
    assert story.lane.wakes == wakes + 1
    story.flow.close_pull(pull)
    assert story.lane.wakes == wakes + 2
    story.now = 1.0
    story.flow.on_turn(0)
    assert story.events[-1] == Released(pull, "closed")
