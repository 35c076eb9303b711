"""Probes are answered within bounds, and what is no probe is refused."""

from __future__ import annotations

import msgspec
import pytest
import zmq

from dips.slave.flow import MOST_ANSWERS, Probes
from dips.wire.frame import (
    CHECKSUMS,
    MESSAGE_LIMIT,
    BadFrame,
    Header,
    Kind,
    decode_probe,
    encode_done,
    encode_probe,
    unpack_header,
)


class Leaving(zmq.MessageTracker):
    done = False


def test_answers_on_their_way_are_bounded() -> None:
    """A peer that asks and does not read gets so many and no more; what has left makes room."""
    probes, tracker = Probes(run=5), Leaving()
    for _ in range(MOST_ANSWERS):
        answer = probes.make_answer(b"p", 7, 1000)
        answer.watch.on_sent(tracker)
    with pytest.raises(BadFrame, match="probes are being answered"):
        probes.make_answer(b"p", 7, 1000)
    tracker.done = True
    for _ in range(MOST_ANSWERS):
        probes.make_answer(b"p", 7, 1000)
    with pytest.raises(BadFrame):
        probes.make_answer(b"p", 7, 1000)
    answer.watch.on_not_sent()  # its peer is gone
    probes.make_answer(b"p", 7, 1000)


@pytest.mark.parametrize("nbytes", [0, 1, MESSAGE_LIMIT])
def test_an_answer_is_a_frame_of_the_run(nbytes: int) -> None:
    """It has the size that was asked for, and is believed by the other end."""
    answer = Probes(run=5).make_answer(b"p", 7, decode_probe(encode_probe(nbytes, 10)))
    assert isinstance(answer.header, Header)
    part, body = CHECKSUMS.seal_frame(answer.header, answer.body)
    header = unpack_header(part, 5, len(body), MESSAGE_LIMIT)
    assert (header.kind, header.stream, header.length) == (Kind.PROBE, 7, nbytes)


@pytest.mark.parametrize("body", [b"", b"\x93\x01\x02\x03", encode_done(3), msgspec.msgpack.encode([1, "text"])])
def test_what_is_no_probe_is_refused(body: bytes) -> None:
    """Another message, or one that wants more than a frame may hold."""
    with pytest.raises(BadFrame):
        decode_probe(body)
    with pytest.raises(BadFrame):
        decode_probe(encode_probe(MESSAGE_LIMIT + 1))
