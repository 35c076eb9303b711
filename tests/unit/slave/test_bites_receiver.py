"""What a slave believes of a push's bytes: the body's checksum, the codec, the epoch; and when it gives a push up."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import xxhash

from dips.codecs import Codec, Dtype
from dips.ids import PushId
from dips.outer import reference
from dips.protocol.manifest import Layer, Manifest, Parameter
from dips.slave.ports import FrameRefused, Move, PushOver, Say, Staged
from dips.slave.receiver import Receiver
from dips.transport.intake import Transit
from dips.wire import frame
from dips.wire.chunks import LayerLayout, encode_body
from dips.wire.frame import BadFrame, Header, Kind, Range, StreamName, decode_error, decode_want

PUSH, N, STALL_S, DEADLINE_S = PushId("a", 1, 1), 2048, 10.0, 60.0
WHOLE = Range(0, 0, 0, N)
VALUES = np.arange(N, dtype=np.float32)
PEER = b"p"


def name(epoch: int = 1) -> StreamName:
    return StreamName("r", "push", "a", 1, 1, 0, "s", 1, epoch, "")


class OneRank:
    """A push of one rank, one lane, two chunks."""

    def __init__(self, codec: Codec = Codec.FP32) -> None:
        layout = LayerLayout(Manifest((Layer("l", (Parameter("l.w", (N,)),)),)), (0,))
        self.pool = Transit(1 << 20)
        self.receiver = Receiver(1, 4096, self.pool, 1, STALL_S)
        self.receiver.set_layers(layout)
        self.buffer = np.zeros(N, np.float32)
        self.receiver.open_push(PUSH, (0,), {0: self.buffer}, DEADLINE_S, 0.0, codec)

    def hello(self, epoch: int = 1, now: float = 0.0) -> Say:
        """Return the answer."""
        answer = self.receiver.on_hello(0, PEER, name(epoch), (WHOLE,), now)[0]
        assert isinstance(answer, Say)
        return answer

    def wants(self, now: float = 0.0) -> list[Range]:
        says = [move for move in self.receiver.plan_wants(0, now) if isinstance(move, Say)]
        return [chunk for say in says for chunk in decode_want(say.body)]

    def bring(
        self, chunk: Range, *, wrong: bool = False, dtype: Dtype = Codec.FP32.dtype, epoch: int = 1
    ) -> list[Move]:
        body = VALUES[chunk.offset : chunk.offset + chunk.length].tobytes()
        checksum = xxhash.xxh3_64_intdigest(body)
        if wrong:
            body = bytes([body[0] ^ 1]) + body[1:]
        header = Header(Kind.CHUNK, 0, name(epoch).stream_id, len(body), checksum, *chunk[:3], dtype)
        return self.receiver.stage_chunk(self.receiver.claim_chunk(0, PEER, header, memoryview(body), 0.0))

    def bring_body(self, chunk: Range, body: bytearray, dtype: Dtype) -> list[Move]:
        """A chunk's bytes as somebody spelled them, under their right checksum."""
        checksum = xxhash.xxh3_64_intdigest(body)
        header = Header(Kind.CHUNK, 0, name().stream_id, len(body), checksum, *chunk[:3], dtype)
        return self.receiver.stage_chunk(self.receiver.claim_chunk(0, PEER, header, memoryview(body), 0.0))


def test_a_body_that_is_not_what_was_sent_is_refused_and_asked_again() -> None:
    """It is counted by its reason, nothing of it is in the buffer, and the push is whole when it came right."""
    push = OneRank()
    push.hello()
    first, second = push.wants()
    with pytest.raises(BadFrame) as refused:
        push.bring(first, wrong=True)
    assert refused.value.reason == "body_checksum"
    assert not push.buffer.any()
    push.bring(second)
    assert push.wants() == [first]
    assert any(isinstance(move, Staged) for move in push.bring(first))
    assert np.array_equal(push.buffer, VALUES)


def test_a_chunk_in_a_codec_that_was_not_granted_is_refused() -> None:
    """Differences would be written as parameters, or added to them."""
    push = OneRank()
    push.hello()
    chunk = push.wants()[0]
    with pytest.raises(BadFrame) as refused:
        push.bring(chunk, dtype=Codec.BF16.dtype)
    assert refused.value.reason == "type"


@pytest.mark.parametrize("codec", [codec for codec in Codec if codec.block])
@pytest.mark.parametrize("step", [np.nan, np.inf, -np.inf, -1e-3, 3.4e38])
@pytest.mark.parametrize("at", [0, 3])  # blocks
def test_a_step_that_is_not_finite_ends_the_push(codec: Codec, step: float, at: int) -> None:
    """Under a right checksum it would come again: the push is over with the reason, all that was asked is given back,
    and nothing of the chunk is in the buffer [invariant 8]."""
    push = OneRank(codec)
    push.hello()
    first, *rest = push.wants()
    body = bytearray(encode_body(codec, VALUES[first.offset : first.offset + first.length]))
    body[4 * at : 4 * at + 4] = np.float32(step).tobytes()
    moves = push.bring_body(first, body, codec.dtype)
    assert moves[0] == FrameRefused("step")
    told = next(decode_error(move.body) for move in moves if isinstance(move, Say))
    over = next(move for move in moves if isinstance(move, PushOver))
    assert told.code == "refused" and f"for block {at} of a chunk" in told.message and f"block {at}" in over.reason
    assert not push.buffer.any()
    assert not push.receiver.tick(1e9) and not push.wants()
    with pytest.raises(BadFrame) as refused:
        push.bring(rest[0] if rest else first, dtype=codec.dtype)
    assert refused.value.reason == "stream" and not push.buffer.any()


@pytest.mark.parametrize("codec", [codec for codec in Codec if codec.block])
def test_large_steps_are_left_to_the_gate(codec: Codec) -> None:
    """A block with nearly the largest number that its steps can be of, and one that ends within a chunk: finite."""
    push = OneRank(codec)
    push.hello()
    values = np.full(N, 0.97 * float(np.finfo(np.float32).max) * codec.largest / (codec.largest + 1), np.float32)
    for chunk in push.wants():
        moves = push.bring_body(chunk, bytearray(encode_body(codec, values[: chunk.length])), codec.dtype)
    assert any(isinstance(move, Staged) for move in moves)
    assert not reference.measure(np.zeros(N, np.float32), push.buffer)[0] < 1e76


@pytest.mark.parametrize("epoch", [1, 2])
def test_an_epoch_that_is_over_does_not_come_back(epoch: int) -> None:
    """A HELLO at or below the last one is refused; what the last one may do it still may."""
    push = OneRank()
    push.hello(1)
    push.hello(2)
    assert decode_error(push.hello(epoch).body).code == "stale_push"
    for chunk in push.wants():
        push.bring(chunk, epoch=2)
    assert np.array_equal(push.buffer, VALUES)


def test_a_push_that_does_not_move_is_given_up_after_the_stall() -> None:
    """Asked, and nothing came: not before `stall_s`, and then with who owes how much."""
    push = OneRank()
    push.hello()
    push.wants()
    assert push.receiver.tick(STALL_S - 0.1) == []
    over = [move for move in push.receiver.tick(STALL_S) if isinstance(move, PushOver)]
    assert [o.push for o in over] == [PUSH] and "rank 0 brought 0 of" in over[0].reason


def test_a_push_is_not_given_up_before_its_ranks_come() -> None:
    """They may be at the beginning of an inner step of an hour; and what nobody was asked for nobody owes."""
    push = OneRank()
    assert push.receiver.tick(100 * DEADLINE_S) == []
    push.hello()
    assert push.receiver.tick(200 * DEADLINE_S) == []
    push.wants(200 * DEADLINE_S)
    assert push.receiver.tick(200 * DEADLINE_S + STALL_S - 0.1) == []
    assert push.receiver.tick(200 * DEADLINE_S + STALL_S)


def test_a_drop_returns_when_nobody_writes_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that is under way ends first: the slot may be another push's a moment later."""
    push = OneRank()
    push.hello()
    chunk = push.wants()[0]
    copying, go_on, dropped = threading.Event(), threading.Event(), threading.Event()
    check = frame.check_body

    def slowly(header: Header, body: memoryview) -> None:
        check(header, body)
        copying.set()
        assert go_on.wait(10)

    monkeypatch.setattr(frame, "check_body", slowly)
    stage = threading.Thread(target=push.bring, args=(chunk,))
    stage.start()
    assert copying.wait(10)
    drop = threading.Thread(target=lambda: (push.receiver.drop_push(PUSH), dropped.set()))
    drop.start()
    assert not dropped.wait(0.05)
    go_on.set()
    assert dropped.wait(10)
    stage.join()
    drop.join()
    assert push.pool.used_bytes == 0
