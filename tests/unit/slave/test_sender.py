"""Sender: a source is released when nobody reads it any more, and that is said once [invariant 11]."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dips.ids import PullId, VersionId
from dips.protocol.manifest import Layer, Manifest, Parameter
from dips.slave.ports import Move, Released, Say, SourceMoved
from dips.slave.sender import MOST_JOBS, ChunkSend, Sender
from dips.transport.intake import MOST_CHUNKS
from dips.wire.chunks import LayerLayout
from dips.wire.frame import BadFrame, Kind, Range, StreamName, check_body, decode_error, unpack_header

PULL, V = PullId("fast", 1, 1), VersionId(2, 2)
MANIFEST = Manifest((Layer("a", (Parameter("a.w", (1000,)),)),))
CHUNK = Range(0, 0, 100, 50)


class SentTracker:
    """libzmq's word on a body, as the test wants it."""

    def __init__(self) -> None:
        self.done = False


def name(epoch: int = 1) -> StreamName:
    return StreamName("demo", "pull", "fast", 1, 1, 0, "s0", 1, epoch, str(V))


def make() -> Sender:
    sender = Sender(4096, 10.0, lambda: 0.0)
    sender.set_layers(LayerLayout(MANIFEST, (0,)))
    sender.open_pull(PULL, V, {0: np.arange(1000, dtype=np.float32)}, 0.0)
    return sender


def code(moves: list[Move]) -> str:
    (move,) = moves
    assert isinstance(move, Say)
    return decode_error(move.body).code if move.kind is Kind.ERROR else move.kind.name


def asked(sender: Sender, peer: bytes = b"p", epoch: int = 1) -> ChunkSend:
    assert code(sender.on_hello(0, peer, name(epoch), (), 0.0)) == "WELCOME"
    (job,) = sender.on_want(0, peer, name(epoch).stream_id, (CHUNK,), 0.0)
    return job


def test_a_chunk_leaves_from_the_source_with_its_checksum():
    """The body is the source's own memory, and the header is right."""
    job = asked(make())
    part, body = job.make_frame(7)
    header = unpack_header(part, 7, len(body), 4096)
    check_body(header, body)
    assert np.frombuffer(body, np.float32).tolist() == list(range(100, 150))
    assert (header.layer, header.param, header.offset, header.stream) == (0, 0, 100, name().stream_id)


def test_a_source_is_held_until_the_last_tracker_is_done():
    """Not at send, not at DONE, not at close: when libzmq has let go; and it is said once."""
    sender, tracker = make(), SentTracker()
    job = asked(sender)
    sender.on_sent(job, tracker)
    sender.on_done(0, b"p", name().stream_id)
    sender.close_pull(PULL, "closed")
    assert sender.tick(0.0) == []
    tracker.done = True
    assert sender.tick(0.0) == [Released(PULL, "closed")]
    assert sender.tick(0.0) == []
    assert not sender.holds_sources


def test_a_source_is_held_while_a_chunk_is_queued():
    """A chunk between WANT and socket reads the source too; after the close it does not leave any more."""
    sender = make()
    job = asked(sender)
    assert job.still_wanted()
    sender.close_pull(PULL, "closed")
    assert not job.still_wanted()
    assert sender.tick(0.0) == []
    job.on_not_sent()
    assert sender.tick(0.0) == [Released(PULL, "closed")]


def test_a_source_that_was_moved_is_held_until_its_last_chunk_is_gone():
    """What was asked before the move leaves from the old source; what is asked after it comes from the new one.

    SourceMoved is said once, when no queued chunk and no tracker holds a byte of the old one.
    """
    sender, tracker, copy = make(), SentTracker(), np.arange(1000, dtype=np.float32)
    before = asked(sender)
    (queued,) = sender.on_want(0, b"p", name().stream_id, (CHUNK,), 0.0)
    sender.on_sent(before, tracker)
    sender.move_pull(PULL, {0: copy})
    (after,) = sender.on_want(0, b"p", name().stream_id, (CHUNK,), 0.0)
    assert np.shares_memory(np.frombuffer(after.body, np.uint8), copy)
    assert not np.shares_memory(np.frombuffer(queued.body, np.uint8), copy)
    assert bytes(after.body) == bytes(queued.body)
    tracker.done = True
    sender.move_pull(PULL, {0: copy.copy()})
    after.on_not_sent()
    assert sender.tick(0.0) == [], "a chunk of the first source is queued, none of the second"
    queued.on_not_sent()
    assert sender.tick(0.0) == [SourceMoved(PULL)]
    assert sender.tick(0.0) == []
    sender.close_pull(PULL, "closed")
    assert sender.tick(0.0) == [Released(PULL, "closed")]


def test_what_a_cluster_was_sent_is_counted_when_it_has_left():
    """At once if libzmq holds it no more; and the end of one pull says nothing of another's streams."""
    sender, tracker, other = make(), SentTracker(), PullId("slow", 1, 1)
    tracker.done = True
    asked(sender).on_sent(tracker)
    (moving,) = sender.list_transfers()
    assert (moving.nbytes, sender.sent_by_cluster()) == (CHUNK.nbytes, {"fast": CHUNK.nbytes})
    sender.open_pull(other, V, {0: np.arange(1000, dtype=np.float32)}, 0.0)
    hello = StreamName("demo", "pull", "slow", 1, 1, 0, "s0", 1, 1, str(V))
    assert code(sender.on_hello(0, b"q", hello, (), 0.0)) == "WELCOME"
    sender.close_pull(PULL, "closed")
    assert sender.tick(0.0) == [Released(PULL, "closed")]
    assert code(sender.on_hello(0, b"q", hello, (), 0.0)) == "stale_push"


def test_a_pull_is_as_large_as_what_its_ranks_named_whoever_of_them_is_done():
    """A rank that is done, or came back over another connection, is counted once for as long as its pull is open."""
    sender, whole = make(), (Range(0, 0, 0, 500),)
    for rank, peer in enumerate((b"p", b"q")):
        sender.on_hello(0, peer, replace(name(), rank=rank), whole, 0.0)
    sender.on_hello(0, b"r", replace(name(epoch=2), rank=1), whole, 0.0)
    assert [t.total for t in sender.list_transfers()] == [4000]
    sender.on_done(0, b"p", name().stream_id)
    assert sender.tick(0.0) == []
    assert [t.total for t in sender.list_transfers()] == [4000]


def test_a_closed_pull_is_released_and_not_moved():
    """The end of a pull says more than its move; a move after the close, or of an unknown pull, changes nothing."""
    sender, source = make(), {0: np.arange(1000, dtype=np.float32)}
    job = asked(sender)
    sender.move_pull(PULL, source)
    sender.close_pull(PULL, "closed")
    sender.move_pull(PULL, source)
    sender.move_pull(PullId("other", 1, 1), source)
    assert sender.tick(0.0) == []
    job.on_not_sent()
    assert sender.tick(0.0) == [Released(PULL, "closed")]


def test_a_superseded_connection_is_waited_for():
    """A later epoch takes over at once; what libzmq still holds for the old one keeps the source."""
    sender, old, new = make(), SentTracker(), SentTracker()
    sender.on_sent(asked(sender, b"old", 1), old)
    sender.on_sent(asked(sender, b"new", 2), new)
    with pytest.raises(BadFrame, match="no stream"):
        sender.on_want(0, b"old", name(1).stream_id, (CHUNK,), 0.0)
    assert code(sender.on_hello(0, b"old", name(1), (), 0.0)) == "stale_push"
    new.done = True
    sender.close_pull(PULL, "closed")
    assert sender.tick(0.0) == []
    old.done = True
    assert sender.tick(0.0) == [Released(PULL, "closed")]


def test_a_rank_that_does_not_take_what_it_asked_for_stalls():
    """From when something was sent, or was last taken; a second chunk that is held ends it."""
    sender, first, second = make(), SentTracker(), SentTracker()
    sender.on_sent(asked(sender), first)
    (other,) = sender.on_want(0, b"p", name().stream_id, (CHUNK,), 0.0)
    sender.on_sent(other, second)
    assert sender.tick(9.0) == []
    first.done = True
    assert sender.tick(9.5) == []  # it moved at 9.5
    assert sender.tick(19.4) == []
    assert sender.tick(19.6) == []  # closed: what libzmq holds is waited for
    second.done = True
    assert sender.tick(19.7) == [Released(PULL, "nothing moved for 10 s")]


def test_who_is_not_asked_never_stalls():
    """Not before its ranks' HELLO, not between two questions, not while what is asked has yet to leave here."""
    sender, tracker = make(), SentTracker()
    assert sender.tick(1e6) == []
    job = asked(sender)
    assert sender.tick(2e6) == []
    sender.on_sent(job, tracker)
    tracker.done = True
    assert sender.tick(3e6) == []
    assert sender.on_want(0, b"p", name().stream_id, (CHUNK,), 4e6)


def test_what_is_owed_counts_from_when_it_was_sent():
    """A question that was asked long ago and whose chunk leaves now has just begun to be waited for."""
    now = [0.0]
    sender = Sender(4096, 10.0, lambda: now[0])
    sender.set_layers(LayerLayout(MANIFEST, (0,)))
    sender.open_pull(PULL, V, {0: np.arange(1000, dtype=np.float32)}, 0.0)
    job = asked(sender)
    now[0] = 100.0
    job.on_sent(SentTracker())
    assert sender.tick(109.0) == [] and sender.list_transfers()
    sender.tick(110.0)
    assert sender.list_transfers() == ()


def test_before_and_after_a_pull_a_rank_hears_which():
    """Not open yet: try again. Over: never again."""
    sender = make()
    later = StreamName("demo", "pull", "fast", 1, 2, 0, "s0", 1, 1, str(V))
    assert code(sender.on_hello(0, b"p", later, (), 0.0)) == "unknown"
    sender.close_pull(PULL, "closed")
    assert code(sender.on_hello(0, b"p", name(), (), 0.0)) == "stale_push"
    sender.tick(0.0)
    assert code(sender.on_hello(0, b"p", name(), (), 0.0)) == "stale_push"


def test_a_repeated_pull_of_a_version_needs_no_reading():
    """The checksum is remembered under the version's name: bytes that went bad since do not pass at their reader."""
    sender, values = make(), np.arange(1000, dtype=np.float32)
    asked(sender).make_frame(7)
    later = PullId("slow", 1, 1)
    values[120] = -1.0
    sender.open_pull(later, V, {0: values}, 0.0)
    other = StreamName("demo", "pull", "slow", 1, 1, 0, "s0", 1, 1, str(V))
    sender.on_hello(0, b"q", other, (), 0.0)
    (job,) = sender.on_want(0, b"q", other.stream_id, (CHUNK,), 0.0)
    part, body = job.make_frame(7)
    with pytest.raises(BadFrame, match="checksum"):
        check_body(unpack_header(part, 7, len(body), 4096), body)


def test_bytes_of_a_file_vouch_for_no_others():
    """Who only reads is served from a snapshot, which may have rotted: its checksum is not that of the head's bytes."""
    sender, reader = make(), PullId("eval.puller", 1, 1)
    sender.open_pull(reader, V, {0: np.full(1000, -1.0, np.float32)}, 0.0)
    hello = StreamName("demo", "pull", "eval.puller", 1, 1, 0, "s0", 1, 1, str(V))
    sender.on_hello(0, b"q", hello, (), 0.0)
    for job in (*sender.on_want(0, b"q", hello.stream_id, (CHUNK,), 0.0), asked(sender)):
        part, body = job.make_frame(7)
        check_body(unpack_header(part, 7, len(body), 4096), body)


def test_a_chunk_is_wanted_until_its_stream_or_pull_is_over():
    """What waits for its checksum then is not sent."""
    sender = make()
    first = asked(sender, b"old", 1)
    second = asked(sender, b"new", 2)
    assert (first.still_wanted(), second.still_wanted()) == (False, True)
    sender.close_pull(PULL, "closed")
    assert not second.still_wanted()


@pytest.mark.parametrize("wrong", [Range(0, 0, 990, 20), Range(0, 0, 0, 513)])
def test_a_want_outside_of_the_layer_or_too_long_is_refused(wrong: Range):
    """Each by itself, and nothing of it is sent; the longest chunk is the one that the slave named."""
    sender = Sender(2048, 10.0, lambda: 0.0)
    sender.set_layers(LayerLayout(MANIFEST, (0,)))
    sender.open_pull(PULL, V, {0: np.arange(1000, dtype=np.float32)}, 0.0)
    asked(sender)
    with pytest.raises(BadFrame) as refused:
        sender.on_want(0, b"p", name().stream_id, (CHUNK, wrong), 0.0)
    assert refused.value.reason == "range"
    assert len(sender.on_want(0, b"p", name().stream_id, (Range(0, 0, 0, 512),), 0.0)) == 1


def test_of_two_pulls_the_first_to_stall_is_waited_for_and_both_end_with_the_slave():
    """What moved is in their rate for a time; another incarnation believes no checksum of this one and serves none."""
    now = [0.0]
    sender = Sender(4096, 10.0, lambda: now[0])
    sender.set_layers(LayerLayout(MANIFEST, (0,)))
    for number, now[0] in ((1, 0.0), (2, 5.0)):
        who = StreamName("demo", "pull", "fast", 1, number, 0, "s0", 1, 1, str(V))
        sender.open_pull(PullId("fast", 1, number), V, {0: np.arange(1000, dtype=np.float32)}, now[0])
        sender.on_hello(0, b"p", who, (), now[0])
        for tracker in (SentTracker(), SentTracker()):
            (job,) = sender.on_want(0, b"p", who.stream_id, (CHUNK,), now[0])
            job.make_frame(7)
            job.on_sent(tracker)
            tracker.done = number == 2
    now[0] = 6.0
    assert sender.tick(6.0) == [] and sender.list_transfers()[-1].bytes_per_s == 400.0
    now[0] = 12.0
    assert sender.tick(12.0) == [] and sender.list_transfers()[-1].bytes_per_s == 0.0
    sender.on_done(0, b"p", who.stream_id)
    with pytest.raises(BadFrame, match="no stream"):
        sender.on_want(0, b"p", who.stream_id, (CHUNK,), 12.0)
    sender.close_all("the slave ends")
    assert sender.list_transfers() == () and len(sender.checksums) == 0
    assert sender.tick(12.0) == [Released(PullId("fast", 1, 2), "the slave ends")]
    with pytest.raises(BadFrame, match="no stream"):
        sender.on_want(0, b"p", name().stream_id, (CHUNK,), 6.0)


def test_what_has_left_makes_room_at_once(monkeypatch: pytest.MonkeyPatch):
    """A WANT looks at the trackers itself: it does not wait for the lane's next turn."""
    monkeypatch.setattr("dips.slave.sender.MOST_CHUNKS", 1)
    sender, trackers = make(), [SentTracker(), SentTracker()]
    asked(sender).on_sent(trackers[0])
    (second,) = sender.on_want(0, b"p", name().stream_id, (CHUNK,), 0.0)
    second.on_sent(trackers[1])
    trackers[0].done = trackers[1].done = True
    assert len(sender.on_want(0, b"p", name().stream_id, (CHUNK,), 0.0)) == 1


def test_a_pull_that_stalls_is_released_when_nothing_of_it_is_on_its_way():
    """It is closed after the stall, and its version is read no more; until then its chunk may still be sent."""
    sender, tracker = make(), SentTracker()
    sender.on_sent(asked(sender), tracker)
    assert [v for _, v, _ in sender.list_sources()] == [V]
    assert sender.tick(9.9) == []
    assert sender.tick(10.0) == []
    tracker.done = True
    assert [type(move) for move in sender.tick(10.1)] == [Released]
    assert sender.list_sources() == []


def test_a_slow_reader_of_sealed_chunks_leaves_room_for_others():
    """Copies are bounded over all streams; one takes at most as much as it leaves, and waits with the rest."""
    sender, slow = Sender(4096, 10.0, lambda: 0.0, sealed=True, copies=7000), name()
    sender.set_layers(LayerLayout(MANIFEST, (0,)))
    sender.open_pull(PULL, V, {0: np.arange(1000, dtype=np.float32)}, 0.0)
    other = PullId("slow", 1, 1)
    sender.open_pull(other, V, {0: np.arange(1000, dtype=np.float32)}, 0.0)
    fast = StreamName("demo", "pull", "slow", 1, 1, 0, "s0", 1, 1, str(V))
    chunks = (Range(0, 0, 0, 250),) * 10  # of 1000 bytes
    for peer, stream in ((b"p", slow), (b"q", fast)):
        sender.on_hello(0, peer, stream, (), 0.0)
    jobs = sender.on_want(0, b"p", slow.stream_id, chunks, 0.0)
    assert len(jobs) == 4  # of 7 that have room
    others = sender.on_want(0, b"q", fast.stream_id, chunks, 0.0)
    assert len(others) == 2
    assert sender.due(0, 0.0) == []
    trackers = [SentTracker() for _ in others]
    for job, tracker in zip(others, trackers, strict=True):
        sender.on_sent(job, tracker)
        tracker.done = True
    assert [job.stream.peer for job in sender.due(0, 0.0)] == [b"q", b"q"]
    for job in jobs:
        sender.on_not_sent(job)  # its connection is gone
    assert len(sender.due(0, 0.0)) == 2
    sender.close_all("over")


def test_followers_that_die_at_once_leave_room_for_clusters():
    """Of three on a fast link, as when their site is cut off, the copies held back all pulls of this slave until they
    had stalled.
    """
    sender = Sender(1000, 10.0, lambda: 0.0, sealed=True, copies=128_000)
    sender.set_layers(LayerLayout(MANIFEST, (0,)))
    given = list[int]()
    for cluster in ("f.puller", "g.puller", "h.operator", "west"):
        sender.open_pull(PullId(cluster, 1, 1), V, {0: np.arange(1000, dtype=np.float32)}, 0.0)
        stream = StreamName("demo", "pull", cluster, 1, 1, 0, "s0", 1, 1, str(V))
        sender.on_hello(0, cluster.encode(), stream, (), 0.0)
        given.append(len(sender.on_want(0, cluster.encode(), stream.stream_id, (Range(0, 0, 0, 250),) * 64, 0.0)))
    assert given == [32, 16, 8, 36]


def test_a_lane_is_given_no_more_chunks_than_it_can_queue():
    """Of more ranks than its queue has room for each gets all that it asked for, in its turn, on its first stream; one
    whose chunks were dropped would wait until it takes its connection for dead.
    """
    sender, chunks, ranks = make(), (CHUNK,) * MOST_CHUNKS, MOST_JOBS // MOST_CHUNKS + 2
    streams = [StreamName("demo", "pull", "fast", 1, 1, rank, "s0", 1, 1, str(V)) for rank in range(ranks)]
    jobs = list[ChunkSend]()
    for stream in streams:
        sender.on_hello(0, b"p", stream, (), 0.0)
        jobs += sender.on_want(0, b"p", stream.stream_id, chunks, 0.0)
    assert len(jobs) == MOST_JOBS and sender.due(0, 0.0) == []
    for job in jobs:
        job.on_sent(tracker := SentTracker())
        tracker.done = True
    more = sender.due(0, 0.0)
    assert len(more) == ranks * MOST_CHUNKS - MOST_JOBS
    more[0].on_not_sent()
    assert len(sender.on_want(0, b"p", streams[0].stream_id, chunks, 0.0)) == MOST_CHUNKS
