"""Receiver: the moments of a push, without a socket and without a clock."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import xxhash

from dips.codecs import Codec
from dips.ids import PushId
from dips.protocol.manifest import Layer, Manifest, Parameter
from dips.slave.ports import Move, PushOver, RankMoved, Say, Staged, Wake
from dips.slave.receiver import Receiver
from dips.transport.intake import CONCURRENT_STREAMS, FLOOR_BYTES, MOST_EACH, Transit, Turns
from dips.wire.chunks import LayerLayout
from dips.wire.frame import BadFrame, Header, Kind, Range, StreamName, decode_error, decode_want, encode_ranges

PUSH = PushId("fast", 1, 1)
N = 4096
MANIFEST = Manifest((Layer("a", (Parameter("a.w", (N,)),)),))
HALVES = (Range(0, 0, 0, N // 2), Range(0, 0, N // 2, N // 2))
VALUES = np.arange(N, dtype=np.float32)


def name(rank: int, epoch: int = 1) -> StreamName:
    return StreamName("demo", "push", "fast", 1, 1, rank, "s0", 1, epoch, "")


class ReceiverStory:
    """A push of two ranks with half of the parameter each; order 1, 0; concurrent_streams 1."""

    def __init__(self, transit: int = 1 << 20, concurrent_streams: int = 1) -> None:
        self.pool = Transit(transit)
        self.receiver = Receiver(1, 4096, self.pool, concurrent_streams, stall_s=10.0)
        self.receiver.set_layers(LayerLayout(MANIFEST, (0,)))
        self.buffer = np.zeros(N, np.float32)
        self.receiver.open_push(PUSH, (1, 0), {0: self.buffer}, 60.0, 0.0)

    def hello(self, rank: int, pieces: tuple[Range, ...] | None = None, epoch: int = 1) -> list[Move]:
        pieces = (HALVES[rank],) if pieces is None else pieces
        return self.receiver.on_hello(0, b"%d" % rank, name(rank, epoch), pieces, 0.0)

    def wants(self, now: float = 0.0) -> list[tuple[bytes, Range]]:
        """Who is asked for what."""
        says = [m for m in self.receiver.plan_wants(0, now) if isinstance(m, Say)]
        return [(say.peer, chunk) for say in says for chunk in decode_want(say.body)]

    def bring(
        self, rank: int, chunk: Range, epoch: int = 1, values: np.ndarray = VALUES, now: float = 0.0
    ) -> list[Move]:
        body = values[chunk.offset : chunk.offset + chunk.length].tobytes()
        checksum = xxhash.xxh3_64_intdigest(body)
        header = Header(Kind.CHUNK, 0, name(rank, epoch).stream_id, len(body), checksum, *chunk[:3])
        claim = self.receiver.claim_chunk(0, b"%d" % rank, header, memoryview(body), now)
        return self.receiver.stage_chunk(claim)


def kinds(moves: list[Move]) -> list[str]:
    return [m.kind.name if isinstance(m, Say) else type(m).__name__ for m in moves]


def test_nobody_is_asked_before_all_ranks_said_hello():
    """The ranges of all ranks are compared before the first WANT."""
    story = ReceiverStory()
    assert kinds(story.hello(0)) == ["WELCOME"]
    assert story.wants() == []
    assert kinds(story.hello(1)) == ["WELCOME", "Wake", "Wake"]
    assert {peer for peer, _ in story.wants()} == {b"1"}  # one asker, and rank 1 is first in the order


def test_a_new_order_of_asking_holds_from_the_next_turn_on():
    """Reorder before the ranks are there, repeated, unknown or of another size: the last good one counts."""
    story = ReceiverStory()
    story.receiver.reorder_push(PUSH, (1, 0))
    story.receiver.reorder_push(PUSH, (0, 1))
    story.receiver.reorder_push(PUSH, (0, 1))
    story.receiver.reorder_push(PUSH, (1, 0, 2))
    story.receiver.reorder_push(PushId("other", 1, 1), (1, 0))
    story.hello(0)
    story.hello(1)
    assert {peer for peer, _ in story.wants()} == {b"0"}
    story.receiver.reorder_push(PUSH, (1, 0))
    assert {peer for peer, _ in story.wants()} <= {b"0"}  # it has its turn and keeps it


def test_pushes_stand_in_one_line():
    """The ranks of a push that joins come between those of the first, as their places say."""
    story, later = ReceiverStory(), PushId("fast", 1, 2)
    story.receiver.open_push(later, (0,), {0: np.zeros(N, np.float32)}, 60.0, 0.0)
    story.receiver.reorder_push(PUSH, (2, 0))
    story.receiver.reorder_push(later, (1,))
    story.hello(0)
    story.hello(1)
    whole = StreamName("demo", "push", "fast", 1, 2, 0, "s0", 1, 1, "")
    story.receiver.on_hello(0, b"later", whole, (Range(0, 0, 0, N),), 0.0)
    first = story.wants()
    assert {peer for peer, _ in first} == {b"1"}
    for _, chunk in first:
        story.bring(1, chunk)
    assert {peer for peer, _ in story.wants()} == {b"later"}
    story.receiver.drop_push(later)
    assert {peer for peer, _ in story.wants()} == {b"0"}


def test_who_waits_already_is_put_into_the_new_order():
    """The one that has its turn keeps it; of the two that wait the other one is next."""
    story, later = ReceiverStory(), PushId("fast", 1, 2)
    story.receiver.open_push(later, (1,), {0: np.zeros(N, np.float32)}, 60.0, 0.0)
    story.receiver.reorder_push(PUSH, (2, 0))
    story.hello(0)
    story.hello(1)
    whole = StreamName("demo", "push", "fast", 1, 2, 0, "s0", 1, 1, "")
    story.receiver.on_hello(0, b"later", whole, (Range(0, 0, 0, N),), 0.0)
    first = story.wants()
    story.receiver.reorder_push(later, (3,))
    for _, chunk in first:
        story.bring(1, chunk)
    assert {peer for peer, _ in story.wants()} == {b"0"}


def test_clusters_do_not_wait_for_each_other_s_links():
    """More of them push than one could fill a slave's link with: all are asked at once, each on a few streams."""
    receiver, pushes = Receiver(1, 4096, Transit(1 << 24), CONCURRENT_STREAMS, stall_s=10.0), range(3 * MOST_EACH)
    receiver.set_layers(LayerLayout(MANIFEST, (0,)))
    ranks = MOST_EACH + 2
    whole, share = Range(0, 0, 0, N), N // ranks
    for i in pushes:
        many = i == 0  # this one has more ranks than streams of a cluster are asked at once
        push = PushId(f"c{i}", 1, 1)
        receiver.open_push(push, tuple(range(ranks if many else 1)), {0: np.zeros(N, np.float32)}, 60.0, 0.0)
        for rank in range(ranks if many else 1):
            last = N - share * (ranks - 1) if rank == ranks - 1 else share
            piece = Range(0, 0, rank * share, last) if many else whole
            name = StreamName("demo", "push", push.cluster, 1, 1, rank, "s0", 1, 1, "")
            receiver.on_hello(0, f"{i}/{rank}".encode(), name, (piece,), 0.0)
    asked = {move.peer for move in receiver.plan_wants(0, 0.0) if isinstance(move, Say)}
    assert asked >= {f"{i}/0".encode() for i in pushes if i}
    assert len(asked & {f"0/{rank}".encode() for rank in range(ranks)}) == MOST_EACH


def test_a_staged_push_says_when_the_bytes_of_each_rank_came():
    """The first and the last of them, over all lanes; a rank without bytes has no such times."""
    receiver = Receiver(2, 4096, Transit(1 << 20), 1, stall_s=10.0)
    receiver.set_layers(LayerLayout(MANIFEST, (0,)))
    receiver.open_push(PUSH, (0, 1), {0: np.zeros(N, np.float32)}, 60.0, 0.0)
    names = {
        (r, lane): StreamName("demo", "push", "fast", 1, 1, r, "s0", 1, 1, "", lane) for r in (0, 1) for lane in (0, 1)
    }
    for (rank, lane), stream in names.items():
        receiver.on_hello(lane, b"%d" % rank, stream, () if rank else (HALVES[lane],), 0.0)
    asked = {
        lane: [c for m in receiver.plan_wants(lane, 0.0) if isinstance(m, Say) for c in decode_want(m.body)]
        for lane in (0, 1)
    }
    now, moves = 0.0, list[Move]()
    for lane, chunk in [(0, asked[0][0]), *((1, chunk) for chunk in asked[1]), *((0, chunk) for chunk in asked[0][1:])]:
        now += 1.0
        body = bytes(chunk.nbytes)
        header = Header(Kind.CHUNK, 0, names[0, lane].stream_id, len(body), xxhash.xxh3_64_intdigest(body), *chunk[:3])
        moves += receiver.stage_chunk(receiver.claim_chunk(lane, b"0", header, body, now))
    (staged,) = [move for move in moves if isinstance(move, Staged)]
    assert staged.ranks == (RankMoved(0, 4 * N, 1.0, now),) and now == 4.0


@pytest.mark.parametrize(("most", "answer"), [(2, "ERROR"), (3, "WELCOME")])
def test_no_push_that_moves_makes_room_for_one_that_gathers(monkeypatch: pytest.MonkeyPatch, most: int, answer: str):
    """Its bytes are on their way: the older one's rank comes again, unless what it names just fits."""
    monkeypatch.setattr("dips.slave.receiver.MOST_RANGES", most)
    story, later = ReceiverStory(), PushId("fast", 1, 2)
    story.receiver.open_push(later, (0,), {0: np.zeros(N, np.float32)}, 60.0, 0.0)
    story.hello(0)
    whole = StreamName("demo", "push", "fast", 1, 2, 0, "s0", 1, 1, "")
    assert kinds(story.receiver.on_hello(0, b"later", whole, (Range(0, 0, 0, N),), 0.0)) == ["WELCOME", "Wake"]
    assert kinds(story.hello(1))[0] == answer
    assert [transfer.seq for transfer in story.receiver.list_transfers()] == [1, 2]


def test_a_rank_with_nothing_ready_waits_for_no_turn():
    """READY with a number that it said before is nothing new: who has the turn is not watched for its sake."""
    story = ReceiverStory()
    story.receiver.on_hello(0, b"1", name(1), (HALVES[1],), 0.0, ready=0)
    story.hello(0)
    assert {peer for peer, _ in story.wants()} == {b"0"}
    story.receiver.on_ready(0, b"1", name(1).stream_id, 0)
    assert story.wants(now=1.0) == []
    story.receiver.on_ready(0, b"1", name(1).stream_id, 1)
    assert {peer for peer, _ in story.wants(now=1.0)} == {b"1"}, "rank 0 has lost its turn"


def test_a_rank_that_has_brought_all_takes_no_turn_when_it_comes_again():
    """Its connection broke after its last byte: the other rank is asked at once."""
    story = ReceiverStory()
    story.hello(0), story.hello(1)
    for peer, chunk in story.wants():
        story.bring(int(peer), chunk)
    assert kinds(story.hello(1, epoch=2)) == ["WELCOME", "DONE"]
    assert {peer for peer, _ in story.wants()} == {b"0"}


def test_the_rates_of_the_last_clusters_are_kept(monkeypatch: pytest.MonkeyPatch):
    """A cluster that comes again finds its own, and no other is forgotten for it."""
    monkeypatch.setattr("dips.slave.receiver.MOST_LINKS", 2)
    receiver = ReceiverStory().receiver
    for number, cluster in enumerate(["a", "b", "c", "b"], 5):
        receiver.open_push(PushId(cluster, 1, number), (0,), {0: np.zeros(N, np.float32)}, 60.0, 0.0)
        whole = StreamName("demo", "push", cluster, 1, number, 0, "s0", 1, 1, "")
        receiver.on_hello(0, b"%d" % number, whole, (Range(0, 0, 0, N),), 0.0)
    assert list(receiver._links) == ["b", "c"]


@pytest.mark.parametrize("wrong", [{"rank": 2}, {"lane": 1}, {"version": "v1@r1"}])
def test_a_hello_that_is_none_of_its_push_is_refused(wrong: dict[str, Any]):
    """A rank that the push does not have, a stream of another lane, the name of a pull's version: each by itself."""
    story = ReceiverStory()
    (answer,) = story.receiver.on_hello(0, b"p", replace(name(0), **wrong), (HALVES[0],), 0.0)
    assert isinstance(answer, Say) and answer.kind is Kind.ERROR and decode_error(answer.body).code == "invalid"
    assert kinds(story.hello(0)) == ["WELCOME"]


def test_a_push_is_staged_when_the_last_chunk_is_in_its_place():
    """Each rank gets DONE when its own are here; the push is staged once, then frozen."""
    story = ReceiverStory()
    story.hello(0)
    story.hello(1)
    news: list[str] = []
    while wants := story.wants():
        for peer, chunk in wants:
            news += kinds(story.bring(int(peer), chunk))
    assert [k for k in news if k != "Wake"] == ["DONE", "DONE", "Staged"]
    assert np.array_equal(story.buffer, VALUES)
    with pytest.raises(BadFrame) as refused:
        story.bring(0, HALVES[0])
    assert refused.value.reason == "unasked"
    assert kinds(story.hello(0, epoch=2)) == ["WELCOME", "DONE"]  # its DONE was lost: it is sent again
    assert story.pool.used_bytes == 0


def test_ranks_without_anything_make_no_push_wait():
    """A push all of whose ranges one rank holds needs the HELLO of the other, and no byte of it."""
    story = ReceiverStory()
    assert kinds(story.hello(0, ())) == ["WELCOME"]
    assert kinds(story.hello(1, HALVES)) == ["WELCOME", "Wake", "DONE"]


def test_a_gap_is_told_to_every_rank():
    """And the push is over: the next HELLO is answered with it too."""
    story = ReceiverStory()
    story.hello(0)
    moves = story.hello(1, ())
    assert kinds(moves) == ["WELCOME", "ERROR", "ERROR", "PushOver"]
    assert moves[-1] == PushOver(PUSH, f"a.w: elements {N // 2} to {N} come from no rank")
    assert kinds(story.hello(1, epoch=2)) == ["ERROR"]


def test_other_ranges_after_a_break_are_refused():
    """What all agreed on does not change under way."""
    story = ReceiverStory()
    story.hello(0)
    (answer,) = story.hello(0, (), epoch=2)
    assert isinstance(answer, Say)
    assert decode_error(answer.body).code == "invalid"


def test_a_drop_between_claim_and_copy_writes_nothing():
    """A chunk waits in the stage's queue while its push is dropped: its bytes go nowhere, the books balance."""
    story = ReceiverStory()
    story.hello(0)
    story.hello(1)
    peer, chunk = story.wants()[0]
    body = memoryview(VALUES[chunk.offset : chunk.offset + chunk.length].tobytes())
    header = Header(Kind.CHUNK, 0, name(1).stream_id, len(body), xxhash.xxh3_64_intdigest(body), *chunk[:3])
    claim = story.receiver.claim_chunk(0, peer, header, body, 0.0)
    story.receiver.drop_push(PUSH)
    assert story.receiver.stage_chunk(claim) == []
    assert not story.buffer.any()
    assert story.pool.used_bytes == 0


def test_who_waits_for_its_turn_is_not_stalled():
    """Silence counts only while something is owed: a push that nobody asks does not end."""
    story = ReceiverStory(transit=4096)
    assert story.pool.take_bytes(4096)  # others use the whole pool
    story.hello(0)
    story.hello(1)
    assert story.wants() == []
    assert story.receiver.tick(1000.0) == []
    story.pool.give_back(4096)
    assert len(story.wants(1050.0)) == 1
    assert kinds(story.receiver.tick(1059.9)) == []
    assert kinds(story.receiver.tick(1060.0)) == ["ERROR", "ERROR", "PushOver"]


def test_a_turn_that_is_used_up_ends_when_its_bytes_are_here():
    """Ranks alternate by their quantum, here a chunk, and never more of them send at once than may."""
    story, asked = ReceiverStory(), list[bytes]()
    story.receiver._turns = [Turns(1, quantum=4096)]
    story.hello(0)
    story.hello(1)
    while wants := story.wants():
        assert story.wants() == []
        for peer, chunk in wants:
            asked.append(peer)
            story.bring(int(peer), chunk)
    assert asked == [b"1", b"0", b"1", b"0"]


def test_how_fast_a_push_moves_is_told_while_it_moves():
    """Its bytes are counted at each look at the clock: heartbeats tell the rate, from which deadlines follow."""
    story = ReceiverStory()
    story.hello(0), story.hello(1)
    (first, chunk), *_ = story.wants()
    story.bring(int(first), chunk)
    story.receiver.tick(1.0)
    (moving,) = story.receiver.list_transfers()
    assert (moving.nbytes, moving.total, moving.bytes_per_s) == (4096, 4 * N, 4096.0)


def test_a_silent_rank_loses_its_turn_to_the_next():
    """Rank 1 was asked and does not answer: rank 0 is asked; the push goes on when rank 1 does."""
    story = ReceiverStory()
    story.hello(0)
    story.hello(1)
    first = story.wants()
    assert story.wants(now=0.9) == []
    second = story.wants(now=1.0)
    assert {peer for peer, _ in second} == {b"0"}
    news = [kind for peer, chunk in first + second for kind in kinds(story.bring(int(peer), chunk))]
    assert news[-1] == "Staged"
    assert Staged(PUSH, 4 * N) == Staged(PUSH, story.buffer.nbytes)
    assert np.array_equal(story.buffer, VALUES)


def test_ranks_that_do_not_follow_the_first_end_a_push():
    """Before the first HELLO it waits for as long as it is open; from then on for its deadline, for each rank anew."""
    story = ReceiverStory()
    assert story.receiver.tick(1e6) == []
    story.hello(0)
    assert kinds(story.receiver.tick(59.9)) == []
    (*_, over) = story.receiver.tick(60.0)
    assert isinstance(over, PushOver) and "no HELLO for 60 s; ranks [1] never said HELLO" in over.reason


def test_a_lane_that_ranks_do_not_reach_is_named():
    """As behind a firewall that lets through one port of two: each rank is there, on the other lane."""
    receiver = Receiver(2, 4096, Transit(1 << 20), 1, stall_s=10.0)
    receiver.set_layers(LayerLayout(MANIFEST, (0,)))
    receiver.open_push(PUSH, (0, 1), {0: np.zeros(N, np.float32)}, 60.0, 0.0)
    for rank in range(2):
        receiver.on_hello(0, b"%d" % rank, replace(name(rank), lane=0), (HALVES[rank],), 0.0)
    (*_, over) = receiver.tick(60.0)
    assert isinstance(over, PushOver) and over.reason.endswith("; ranks [0, 1] never said HELLO on lane 1")


@pytest.mark.parametrize(("room", "wakes"), [(FLOOR_BYTES + 100, True), (3 * FLOOR_BYTES, False)])
def test_a_pool_with_room_for_no_chunk_of_the_smallest_cost_counts_as_empty(room: int, wakes: bool):
    """A lane that was refused by the pool is woken by the next chunk that comes to its place on any lane; one that
    could ask for one chunk more is not.
    """
    manifest = Manifest((Layer("a", (Parameter("a.w", (4,)),)),))
    receiver = Receiver(2, 8, Transit(room), 1, stall_s=10.0)
    receiver.set_layers(LayerLayout(manifest, (0,)))
    receiver.open_push(PUSH, (0,), {0: np.zeros(4, np.float32)}, 60.0, 0.0)
    names = [StreamName("demo", "push", "fast", 1, 1, 0, "s0", 1, 1, "", lane) for lane in range(2)]
    for lane in range(2):
        receiver.on_hello(lane, b"p", names[lane], (Range(0, 0, 2 * lane, 2),), 0.0)
    assert kinds(receiver.plan_wants(0, 0.0)) == ["WANT"]
    assert kinds(receiver.plan_wants(1, 0.0)) == ([] if wakes else ["WANT"])
    body = bytes(8)
    header = Header(Kind.CHUNK, 0, names[0].stream_id, 8, xxhash.xxh3_64_intdigest(body), 0, 0, 0)
    assert (Wake(1) in receiver.stage_chunk(receiver.claim_chunk(0, b"p", header, body, 0.0))) is wakes
    assert kinds(receiver.plan_wants(1, 0.0)) == (["WANT"] if wakes else [])


def test_a_pushs_deadline_counts_from_the_last_rank_that_came():
    """A rank that is slow to compile comes long after the push was opened: the others have as long from then on."""
    story = ReceiverStory()
    story.receiver.on_hello(0, b"0", name(0), (HALVES[0],), 50.0)
    assert story.receiver.tick(109.9) == []
    assert kinds(story.receiver.tick(110.0)) == ["ERROR", "PushOver"]


def test_what_is_ready_stays_ready():
    """An older READY, which comes late, takes nothing back, also before all ranks are here."""
    story, stream = ReceiverStory(), name(1).stream_id
    pieces = (Range(0, 0, N // 2, 1024), Range(0, 0, N // 2 + 1024, 1024))
    story.receiver.on_hello(0, b"1", name(1), pieces, 0.0, ready=0)
    for ready in (2, 1):
        story.receiver.on_ready(0, b"1", stream, ready)
    story.hello(0)
    while wants := story.wants():
        for peer, chunk in wants:
            story.bring(int(peer), chunk)
    assert np.array_equal(story.buffer, VALUES)


def test_a_refused_push_gives_its_ranges_back_once():
    """When it is refused; when it is dropped it has none: others would find room that is not there."""
    story = ReceiverStory()
    story.hello(0)
    assert kinds(story.hello(1, ()))[-1] == "PushOver"
    story.receiver.drop_push(PUSH)
    assert story.receiver._ranges == 0


def test_a_push_is_as_large_as_its_ranks_cut_it():
    """Two ranks that cut a block in two bring two steps for it."""
    story, codec = ReceiverStory(), Codec.INT8
    story.receiver.drop_push(PUSH)
    push = PushId("fast", 1, 2)
    story.receiver.open_push(push, (0, 1), {0: story.buffer}, 60.0, 0.0, codec)
    pieces = [(Range(0, 0, 0, 1000),), (Range(0, 0, 1000, N - 1000),)]
    for rank in range(2):
        story.receiver.on_hello(0, b"%d" % rank, replace(name(rank), seq=2), pieces[rank], 0.0)
    (moving,) = story.receiver.list_transfers()
    cuts = [Range(0, 0, 0, N)], [*pieces[0], *pieces[1]]
    sums = [sum(piece.nbytes for piece in encode_ranges(codec.dtype, cut)) for cut in cuts]
    assert moving.total == sums[1] > sums[0]


def test_a_push_that_is_over_is_not_given_up_again():
    """Two chunks of it could not be placed, by lack of memory: its master hears of it once."""
    story, claims = ReceiverStory(), []
    story.hello(0), story.hello(1)
    for peer, chunk in story.wants()[:2]:
        body = memoryview(VALUES[chunk.offset : chunk.offset + chunk.length].tobytes())
        header = Header(Kind.CHUNK, 0, name(int(peer)).stream_id, len(body), 0, *chunk[:3])
        claims.append(story.receiver.claim_chunk(0, peer, header, body, 0.0))
    assert len(claims) == 2
    assert kinds(story.receiver.give_up(claims[0], MemoryError())) == ["ERROR", "ERROR", "PushOver"]
    assert story.receiver.give_up(claims[1], MemoryError()) == []
    assert story.pool.used_bytes == 0
