"""Strangers who say HELLO cannot make a slave grow: what they name is held against the layout and a budget first."""

from __future__ import annotations

import random
import tracemalloc
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from dips.errors import ConfigError
from dips.ids import PullId, PushId, VersionId
from dips.protocol.manifest import Layer, Manifest, Parameter
from dips.slave import receiver, sender
from dips.slave.admission import Admission
from dips.slave.ports import Move, PushOver, Say
from dips.slave.receiver import Receiver
from dips.slave.sender import Sender
from dips.transport.intake import Transit
from dips.wire.chunks import LayerLayout
from dips.wire.frame import CODES, BadFrame, Kind, Range, StreamName, decode_error

N, RANKS, LANES = 4096, 4, 2
MANIFEST = Manifest((Layer("a", (Parameter("a.w", (N,)), Parameter("a.b", (7,)))),))
V1 = VersionId(1, 1)
PUSH = StreamName("demo", "push", "x", 1, 1, 0, "s", 3, 1, "")
PULL = StreamName("demo", "pull", "x", 1, 2, 0, "s", 3, 1, str(V1))
HUGE = (1 << 62) - 1


class OpenDoor:
    """A slave with one push of RANKS ranks and one pull open."""

    def __init__(self) -> None:
        self.receiver = Receiver(LANES, 4096, Transit(1 << 20), 2, stall_s=1e9)
        self.sender = Sender(4096, 1e9, lambda: 0.0)
        for half in (self.receiver, self.sender):
            half.set_layers(LayerLayout(MANIFEST, (0,)))
        self.admission = Admission("demo", "s", self.receiver, self.sender)
        self.admission.start(3)
        numbers = {0: np.zeros(N + 7, np.float32)}
        for cluster in ("x", "y"):
            self.receiver.open_push(PushId(cluster, 1, 1), tuple(range(RANKS)), numbers, 1e9, 0.0)
        self.sender.open_pull(PullId("x", 1, 2), V1, numbers, 0.0)

    def hello(self, name: StreamName, pieces: tuple[Range, ...], lane: int = 0, peer: bytes = b"p") -> list[Move]:
        return self.admission.on_hello(lane, peer, name.stream_id, name, pieces, 0.0)

    @property
    def kept(self) -> int:
        """Streams and ranges that somebody's HELLO made this slave keep."""
        pushes, pulls = self.receiver._pushes.values(), self.sender._pulls.values()
        ranges = sum(len(stream.pieces) for push in pushes for stream in push.streams.values())
        assert ranges == self.receiver._ranges
        open_streams = len(self.receiver._streams) + len(self.sender._streams) + self.sender._places
        return open_streams + ranges + sum(len(pull.streams) for pull in pulls)


def refusal(moves: list[Move]) -> str:
    """The code of the one answer to a refused HELLO."""
    (say,) = moves
    assert isinstance(say, Say) and say.kind is Kind.ERROR, say
    return decode_error(say.body).code


@pytest.mark.parametrize("name", [PUSH, PULL])
@pytest.mark.parametrize(
    "pieces",
    [
        (Range(0, 0, 0, N + 1),),
        (Range(0, 0, N, 1),),
        (Range(0, 0, 5, 0),),
        (Range(0, 2, 0, 1),),
        (Range(1, 0, 0, 1),),
        (Range(0, 0, HUGE, HUGE),),
        (Range(0, 0, 0, N), Range(0, 1, 0, 7), Range(0, 0, 0, 1)),
        (Range(0, 0, 0, 1),) * (N + 8),
    ],
)
def test_what_is_not_of_the_layout_is_not_kept(name: StreamName, pieces: tuple[Range, ...]) -> None:
    """One range outside, or more elements than there are: the HELLO is refused and leaves nothing."""
    door = OpenDoor()
    assert refusal(door.hello(name, pieces)) == "ranges"
    assert door.kept == 0
    assert [m.kind for m in door.hello(name, (Range(0, 0, 0, N),)) if isinstance(m, Say)] == [Kind.WELCOME]


SMALL = tuple(Range(0, 0, i, 1) for i in range(6))
YOUNGER = replace(PUSH, cluster="y")


def test_ranges_of_all_pushes_have_a_budget() -> None:
    """Who finds no room beside an older push is told to come again; a push that is over gives its part back."""
    door = OpenDoor()
    with mock.patch.object(receiver, "MOST_RANGES", 10):
        door.hello(PUSH, SMALL)
        assert refusal(door.hello(YOUNGER, SMALL)) == "unknown"
        door.hello(YOUNGER, SMALL[:4])
        assert door.receiver._ranges == 10
        door.receiver.drop_push(PushId("x", 1, 1))
        assert door.receiver._ranges == 4


def test_a_push_that_never_finds_room_ends_its_job() -> None:
    """It alone names more than is ever kept: all its ranks are told what makes fewer, and it leaves nothing."""
    door = OpenDoor()
    with mock.patch.object(receiver, "MOST_RANGES", 10):
        door.hello(PUSH, SMALL)
        told = door.hello(replace(PUSH, rank=1), SMALL)
        says = [decode_error(m.body) for m in told if isinstance(m, Say)]
        assert [say.code for say in says] == ["too_many", "too_many"]
        assert "2 of 8 streams name 12 pieces of parameters, expected at most 10 of all ranks" in says[0].message
        assert [m.push for m in told if isinstance(m, PushOver)] == [PushId("x", 1, 1)]
        assert refusal(door.hello(replace(PUSH, rank=2), SMALL[:1])) == "too_many"
        assert door.receiver._ranges == 0
    assert CODES["too_many"] is ConfigError


def test_of_two_pushes_that_fit_alone_the_older_comes_to_its_end() -> None:
    """Both gather and neither finds room: the younger gives its ranges back, or both would wait for each other."""
    door = OpenDoor()
    with mock.patch.object(receiver, "MOST_RANGES", 10):
        for name in (PUSH, YOUNGER):
            door.hello(name, SMALL[:5])
        assert refusal(door.hello(replace(YOUNGER, rank=1), SMALL[:5])) == "unknown"
        told = door.hello(replace(PUSH, rank=1), SMALL[:5])
        assert [m.kind for m in told if isinstance(m, Say)] == [Kind.ERROR, Kind.WELCOME]
        assert [m.push for m in told if isinstance(m, PushOver)] == [PushId("y", 1, 1)]
        assert door.receiver._ranges == 10


def test_a_push_whose_ranks_have_not_come_makes_room_for_nobody() -> None:
    """It has no ranges to give back, and its cluster did nothing wrong."""
    door = OpenDoor()
    door.receiver.open_push(PushId("z", 1, 1), (0,), {0: np.zeros(N + 7, np.float32)}, 1e9, 0.0)
    with mock.patch.object(receiver, "MOST_RANGES", 10):
        door.hello(PUSH, SMALL)
        assert refusal(door.hello(YOUNGER, SMALL[:5])) == "unknown"
        welcome = door.hello(replace(PUSH, cluster="z"), SMALL[:4])
        assert [m.kind for m in welcome if isinstance(m, Say)] == [Kind.WELCOME]


def test_what_just_fits_takes_no_room_from_a_younger_push() -> None:
    """The budget is used to its last range, and nobody gives any back for that."""
    door = OpenDoor()
    with mock.patch.object(receiver, "MOST_RANGES", 10):
        door.hello(PUSH, SMALL[:4])
        door.hello(YOUNGER, SMALL[:2])
        assert [m.kind for m in door.hello(replace(PUSH, rank=1), SMALL[:4]) if isinstance(m, Say)] == [Kind.WELCOME]
        assert door.receiver._ranges == 10


def test_streams_of_all_pulls_have_a_budget() -> None:
    """Made-up ranks are welcome up to the budget; an honest one that connects again replaces its own stream."""
    door, piece = OpenDoor(), (Range(0, 0, 0, 1),)
    with mock.patch.object(sender, "MOST_STREAMS", 3):
        for rank in range(3):
            door.hello(replace(PULL, rank=rank), piece)
        assert refusal(door.hello(replace(PULL, rank=HUGE), piece)) == "unknown"
        again = door.hello(replace(PULL, rank=1, epoch=2), piece)
        assert [m.kind for m in again if isinstance(m, Say)] == [Kind.WELCOME]


def hostile(rng: random.Random) -> tuple[StreamName, tuple[Range, ...]]:
    """A HELLO of somebody who knows all names and has no right to any."""
    number = lambda *usual: rng.choice([*usual, 0, 1, rng.randrange(1 << 16), HUGE])  # noqa: E731
    name = StreamName(
        "demo", rng.choice(["push", "pull"]), rng.choice(["x", "y" * 64]), number(1), number(1, 2), number(0, 1, 2, 3),
        rng.choice(["s", "s", "s", "t"]), rng.choice([3, 3, 3, 4, HUGE]), number(1, 2), rng.choice(["", str(V1), "?"]),
        rng.randrange(LANES),
    )  # fmt: skip
    count = rng.choice([0, 1, 2, 50])
    pieces = tuple(Range(number(0), number(0, 1), number(0), number(1, 7, N)) for _ in range(count))
    return name, pieces


def kept_by_slave() -> int:
    """Bytes that code of dips has allocated: threads that other tests left have their own."""
    ours = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*/dips/*")])
    return sum(trace.size for trace in ours.traces)


@pytest.mark.parametrize("count", [3_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_thousands_of_hostile_hellos_leave_nothing(count: int) -> None:
    """Whatever they name, a slave keeps at most a stream for each rank that exists and each that a pull may have."""
    door, rng, refused = OpenDoor(), random.Random(11), 0
    tracemalloc.start()
    try:
        with mock.patch.object(sender, "MOST_STREAMS", 100):
            for number in range(count):
                name, pieces = hostile(rng)
                try:
                    moves = door.hello(name, pieces, rng.randrange(LANES), b"%d" % number)
                except BadFrame:
                    moves = []
                refused += any(isinstance(m, Say) and m.kind is Kind.ERROR for m in moves)
                if number == 1_000:
                    door.sender.tick(0.0)
                    first = kept_by_slave()
            door.sender.tick(0.0)
            last = kept_by_slave()
    finally:
        tracemalloc.stop()
    assert refused > count / 2
    assert door.kept <= 3 * (RANKS * LANES + 100) + RANKS * LANES * 50
    assert last - first < 200_000
