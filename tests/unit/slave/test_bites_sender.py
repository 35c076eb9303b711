"""What a slave serves of a pull: this version, to the present epoch, within a credit."""

from __future__ import annotations

import numpy as np
import pytest

from dips.ids import PullId, VersionId
from dips.protocol.manifest import Layer, Manifest, Parameter
from dips.slave.moves import Say
from dips.slave.sender import Sender
from dips.transport.credit import MOST_BYTES, MOST_CHUNKS
from dips.wire import streams
from dips.wire.chunks import LayerLayout, Range
from dips.wire.frame import BadFrame, Kind
from dips.wire.streams import StreamName

PULL, V = PullId("a", 1, 1), VersionId(2, 2)
ITEMS = 1 << 10
MANIFEST = Manifest((Layer("l", (Parameter("l.w", (ITEMS,)),)),))


def name(epoch: int = 1, version: VersionId = V) -> StreamName:
    return StreamName("r", "pull", "a", 1, 1, 0, "s", 1, epoch, str(version))


def serving(chunk_bytes: int = 4096) -> Sender:
    sender = Sender(chunk_bytes, 10.0, lambda: 0.0)
    sender.set_layers(LayerLayout(MANIFEST, (0,)))
    sender.open_pull(PULL, V, {0: np.zeros(ITEMS, np.float32)}, 60.0, 0.0)
    return sender


def answer(sender: Sender, who: StreamName) -> str:
    """WELCOME, or the code of the ERROR."""
    (say,) = sender.on_hello(0, b"p", who, (), 0.0)
    assert isinstance(say, Say)
    return streams.decode_error(say.body).code if say.kind is Kind.ERROR else say.kind.name


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


def test_a_stream_may_ask_for_twice_its_credit_of_bytes() -> None:
    """What is asked and not handed over is bounded in bytes; the refusal takes nothing in."""
    sender = serving(chunk_bytes=4 * ITEMS)
    answer(sender, name())
    chunk = Range(0, 0, 0, ITEMS)
    fitting = 2 * MOST_BYTES // chunk.nbytes
    assert fitting > 2 * MOST_CHUNKS, "here chunks are what is bounded first"
    for _ in range(2 * MOST_CHUNKS):
        sender.on_want(0, b"p", name().stream_id, (chunk,), 0.0)
    with pytest.raises(BadFrame) as refused:
        sender.on_want(0, b"p", name().stream_id, (chunk,), 0.0)
    assert refused.value.reason == "credit"


def test_large_chunks_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a credit of two chunks, four may be asked and a fifth is too much."""
    monkeypatch.setattr("dips.slave.sender.MOST_BYTES", 2 * 4 * ITEMS)
    sender = serving(chunk_bytes=4 * ITEMS)
    answer(sender, name())
    chunk = Range(0, 0, 0, ITEMS)
    for _ in range(4):
        sender.on_want(0, b"p", name().stream_id, (chunk,), 0.0)
    with pytest.raises(BadFrame) as refused:
        sender.on_want(0, b"p", name().stream_id, (chunk,), 0.0)
    assert refused.value.reason == "credit"
