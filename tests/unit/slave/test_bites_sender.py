"""What a slave serves of a pull: this version, to the present epoch, within a credit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dips.codecs import UPDATE_BLOCK, Codec
from dips.ids import PullId, VersionId
from dips.outer.updates import Update
from dips.protocol.manifest import Layer, Manifest, Parameter
from dips.slave.ports import Say
from dips.slave.sender import OutgoingPull, OutStream, PullSource, Sender
from dips.transport.intake import MOST_BYTES, MOST_CHUNKS, Rate
from dips.wire.chunks import LayerLayout
from dips.wire.frame import BadFrame, Kind, Range, StreamName, decode_error, decode_welcome

PULL, V = PullId("a", 1, 1), VersionId(2, 2)
ITEMS = 1 << 10
MANIFEST = Manifest((Layer("l", (Parameter("l.w", (ITEMS,)),)),))


def name(epoch: int = 1, version: VersionId = V) -> StreamName:
    return StreamName("r", "pull", "a", 1, 1, 0, "s", 1, epoch, str(version))


def serving(chunk_bytes: int = 4096) -> Sender:
    sender = Sender(chunk_bytes, 10.0, lambda: 0.0)
    sender.set_layers(LayerLayout(MANIFEST, (0,)))
    sender.open_pull(PULL, V, {0: np.zeros(ITEMS, np.float32)}, 0.0)
    return sender


def answer(sender: Sender, who: StreamName) -> str:
    """WELCOME, or the code of the ERROR."""
    (say,) = sender.on_hello(0, b"p", who, (), 0.0)
    assert isinstance(say, Say)
    return decode_error(say.body).code if say.kind is Kind.ERROR else say.kind.name


@pytest.mark.parametrize("epoch", [1, 2])
def test_an_epoch_that_is_over_does_not_come_back(epoch: int) -> None:
    """A HELLO at or below the last one changes nothing: the last one is served on."""
    sender = serving()
    assert [answer(sender, name(e)) for e in (1, 2)] == ["WELCOME", "WELCOME"]
    assert answer(sender, name(epoch)) == "stale_push"
    assert len(sender.on_want(0, b"p", name(2).stream_id, (Range(0, 0, 0, 8),), 0.0)) == 1


def test_a_pull_is_of_one_version() -> None:
    """Layers of two versions never mix in one model."""
    assert answer(serving(), name(version=VersionId(1, 1))) == "stale_version"


def test_a_stream_may_ask_for_as_many_chunks_as_may_be_in_flight() -> None:
    """What is asked and not handed over is bounded; the refusal takes nothing in."""
    sender = serving(chunk_bytes=4 * ITEMS)
    answer(sender, name())
    chunk = Range(0, 0, 0, ITEMS)
    assert MOST_BYTES // chunk.nbytes > MOST_CHUNKS, "here chunks are what is bounded first"
    for _ in range(MOST_CHUNKS):
        sender.on_want(0, b"p", name().stream_id, (chunk,), 0.0)
    with pytest.raises(BadFrame) as refused:
        sender.on_want(0, b"p", name().stream_id, (chunk,), 0.0)
    assert refused.value.reason == "credit"


def test_large_chunks_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a credit of four chunks, four may be asked and a fifth is too much."""
    monkeypatch.setattr("dips.slave.sender.MOST_BYTES", 4 * 4 * ITEMS)
    sender = serving(chunk_bytes=4 * ITEMS)
    answer(sender, name())
    chunk = Range(0, 0, 0, ITEMS)
    for _ in range(4):
        sender.on_want(0, b"p", name().stream_id, (chunk,), 0.0)
    with pytest.raises(BadFrame) as refused:
        sender.on_want(0, b"p", name().stream_id, (chunk,), 0.0)
    assert refused.value.reason == "credit"


@pytest.mark.parametrize("jobs", [0, 2 * MOST_CHUNKS])
def test_libzmq_is_given_twice_the_credit(jobs: int) -> None:
    """Not a byte more, and not a chunk more: it lets go of what has arrived late."""
    source = PullSource({})
    stream = OutStream(OutgoingPull(PULL, V, source, 0.0, Rate(0.0)), 0, b"p", 1, 1, 0, queued=MOST_BYTES, jobs=jobs)
    stream.held.append((LaggingTracker(), MOST_BYTES - 8, source))
    assert (stream.has_room(8), stream.has_room(9)) == (not jobs, False)
    stream.jobs = 2 * MOST_CHUNKS - 2
    assert stream.has_room(8)


class LaggingTracker:
    """libzmq holds a chunk until the test says otherwise, as it may long after the rank has it."""

    done = False


def test_a_want_beyond_what_libzmq_has_let_go_of_waits_and_is_not_lost() -> None:
    """Its books lag on a busy machine: what has arrived is still held there, and the rank may ask on by its own.

    Such a WANT was refused, and the pull ended by a stall at both ends at once: "pull … is over".
    """
    sender, held = serving(chunk_bytes=4 * ITEMS), list[LaggingTracker]()
    answer(sender, name())
    chunk = Range(0, 0, 0, ITEMS)
    for _ in range(2 * MOST_CHUNKS):
        (job,) = sender.on_want(0, b"p", name().stream_id, (chunk,), 0.0)
        held.append(LaggingTracker())
        sender.on_sent(job, held[-1])
    assert sender.on_want(0, b"p", name().stream_id, (chunk,) * 3, 0.0) == []
    assert sender.due(0, 0.1) == [] == sender.due(1, 0.1)
    held[0].done = held[1].done = True
    assert sender.due(1, 0.2) == []
    assert len(sender.due(0, 0.2)) == 2
    sender.close_pull(PULL, "closed")
    assert sender.due(0, 0.3) == []


def test_a_want_of_an_ended_stream_does_not_wait_on() -> None:
    """A later epoch asks for what it lacks: nothing of the former one leaves any more."""
    sender = serving(chunk_bytes=4 * ITEMS)
    answer(sender, name(1))
    chunk = Range(0, 0, 0, ITEMS)
    for _ in range(2 * MOST_CHUNKS):
        (job,) = sender.on_want(0, b"p", name().stream_id, (chunk,), 0.0)
        sender.on_sent(job, LaggingTracker())
    sender.on_want(0, b"p", name().stream_id, (chunk,), 0.0)
    answer(sender, name(2))
    assert sender.due(0, 0.1) == []


def offering(*parents: VersionId) -> Sender:
    """A pull of V, with the updates that begin at `parents`, the last one last."""
    sender = Sender(4096, 10.0, lambda: 0.0)
    sender.set_layers(LayerLayout(MANIFEST, (0,)))
    chain = tuple(
        Update(
            Codec.INT8,
            {0: np.full(ITEMS, k, np.int8)},
            {0: np.ones(-(-ITEMS // UPDATE_BLOCK), np.float32)},
            version=version,
            parent=parent,
        )
        for k, (parent, version) in enumerate(zip(parents, (*parents[1:], V), strict=True), 1)
    )
    sender.open_pull(PULL, V, {0: np.zeros(ITEMS, np.float32)}, 0.0, chain)
    return sender


@pytest.mark.parametrize(
    ("held", "depth"), [("v0@r0", 2), ("v1@r1", 1), ("v2@r2", 0), ("v1@r9", 0), ("", 0), ("None", 0), ("x" * 64, 0)]
)
def test_updates_are_for_who_holds_where_they_begin(held: str, depth: int) -> None:
    """Named to the letter; for everybody else there are parameters."""
    sender, who = offering(VersionId(0, 0), VersionId(1, 1)), replace(name(), held=held)
    (say,) = sender.on_hello(0, b"p", who, (Range(0, 0, 0, ITEMS),), 0.0)
    assert isinstance(say, Say)
    welcome = decode_welcome(say.body)
    assert welcome.depth == depth
    (job,) = sender.on_want(0, b"p", who.stream_id, (Range(0, 0, 3, 8),), 0.0)
    body = job.make_body()
    assert len(body) == job.chunk.nbytes == (8 * 4 if depth == 0 else depth * (4 + 8))
    assert depth < 2 or bytes(body) == (np.float32(1).tobytes() + b"\1" * 8) + (np.float32(1).tobytes() + b"\2" * 8)


def test_updates_that_are_not_what_led_to_the_version_are_offered_to_nobody() -> None:
    """Those of one that only reads may have been written again before it says HELLO."""
    for spoiled, version, parent in ((0, None, None), (0, VersionId(9, 9), V), (1, None, None)):
        sender, who = offering(VersionId(0, 0), VersionId(1, 1)), replace(name(), held="v0@r0")
        update = sender._pulls[PULL].chain[spoiled]
        update.version, update.parent = version, parent
        (say,) = sender.on_hello(0, b"p", who, (), 0.0)
        assert isinstance(say, Say) and decode_welcome(say.body).depth == 0


def test_a_moved_reader_goes_on_with_its_updates() -> None:
    """Its bank is free, and what it was offered is not of the bank."""
    sender, who = offering(VersionId(1, 1)), replace(name(), held="v1@r1")
    sender.on_hello(0, b"p", who, (), 0.0)
    sender.move_pull(PULL, {0: np.ones(ITEMS, np.float32)})
    again = replace(who, epoch=2)
    (say,) = sender.on_hello(0, b"p", again, (), 0.0)
    assert isinstance(say, Say) and decode_welcome(say.body).depth == 1
    (job,) = sender.on_want(0, b"p", again.stream_id, (Range(0, 0, 0, 8),), 0.0)
    assert bytes(job.make_body())[4:] == b"\1" * 8
