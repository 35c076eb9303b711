"""Error feedback, played by one rank: what a codec rounds away arrives later, and only an Outcome settles it."""

from __future__ import annotations

import numpy as np
import pytest

from dips.client.rank.feedback import Feedback
from dips.codecs import Codec
from dips.ids import GENESIS, VersionId
from dips.wire.chunks import Piece, decode_body, encode_body, put_body, split_chunks
from dips.wire.frame import Range, encode_ranges
from tests.codec_bounds import error_bound

SIZES = ((0, 0, 0, 3000), (0, 1, 512, 700), (3, 0, 0, 1))  # layer, param, offset, length
CHUNK_BYTES = 4096
LOSSY = [codec for codec in Codec if codec.lossy]


class FeedbackRank:
    """A rank's model and host buffer, and a slave that decodes what it sends."""

    def __init__(self, codec: Codec, inc: int = 1) -> None:
        self.pieces = [Piece(*size, np.zeros(size[3], np.float32)) for size in SIZES]
        self.feedback = Feedback(self.pieces)
        self.codec, self.inc, self.seq, self.accepted = codec, inc, 0, 0
        self.rng = np.random.default_rng(5)
        self.version = GENESIS
        self.theta = [self.rng.standard_normal(size[3]).astype(np.float32) for size in SIZES]
        self.model: list[np.ndarray] = []
        self.pull(GENESIS)

    def train(self) -> list[np.ndarray]:
        """Take inner steps; return what they changed."""
        change = [(1e-3 * self.rng.standard_normal(m.size)).astype(np.float32) for m in self.model]
        for m, c in zip(self.model, change, strict=True):
            m += c
        return change

    def push(self, codec: Codec | None = None) -> list[np.ndarray]:
        """Freeze and send; return what the slave has of θ_j."""
        codec = codec or self.codec
        self.seq += 1
        self.feedback.settle_last_push(self.inc, self.accepted)
        for piece, m in zip(self.pieces, self.model, strict=True):
            piece.array[:] = m
        self.feedback.freeze_push(self.seq, codec)
        slots = [t.copy() for t in self.theta]
        for piece, slot in zip(self.pieces, slots, strict=True):
            for chunk in split_chunks(encode_ranges(codec.dtype, [piece.range]), codec.chunk_bytes(CHUNK_BYTES)):
                at = slice(chunk.offset - piece.offset, chunk.offset - piece.offset + chunk.length)
                view = piece.array[at].view(np.uint8).data
                body = bytes(self.feedback.encode_chunk(Range(*chunk), view))
                assert body == bytes(self.feedback.encode_chunk(Range(*chunk), view)), "asked again it is the same"
                put_body(codec, body, slot[at])
        return slots

    def outcome(self, kind: str) -> None:
        if kind == "accepted":
            self.accepted = self.seq

    def pull(self, version: VersionId, theta: list[np.ndarray] | None = None) -> None:
        """Receive θ into the host buffer and install it."""
        self.feedback.settle_last_push(self.inc, self.accepted)
        self.theta = [t.copy() for t in theta or self.theta]
        for piece, t in zip(self.pieces, self.theta, strict=True):
            piece.array[:] = t
        self.feedback.set_base(version)
        self.model, self.version = [t.copy() for t in self.theta], version

    def owed(self) -> list[np.ndarray]:
        """What the next push would carry beyond its own change; a question that settles and changes nothing more."""
        self.feedback.settle_last_push(self.inc, self.accepted)
        return [owed.copy() for owed in self.feedback._owed]


def same(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def step_of(rank: FeedbackRank) -> float:
    """The most that one push of `train` can lose of an element."""
    return 2 * float(error_bound(rank.codec, np.full(1, 6e-3, np.float32))[0])


@pytest.mark.parametrize("codec", LOSSY)
def test_what_is_lost_comes_back(codec):
    """After 40 accepted pushes θ has the sum of all changes but one error; without feedback it drifts."""
    rank, version = FeedbackRank(codec), GENESIS
    begin = [t.astype(np.float64) for t in rank.theta]
    true = [np.zeros(t.size) for t in rank.theta]
    bare = [np.zeros(t.size) for t in rank.theta]
    for n in range(1, 41):
        change = rank.train()
        for t, b, c in zip(true, bare, change, strict=True):
            t += c
            b += decode_body(codec, encode_body(codec, c), c.size)
        theta = rank.push()  # the only contribution, outer lr 1, no momentum: θ′ is what was pushed
        rank.outcome("accepted")
        version = VersionId(n, n)
        rank.pull(version, theta)
    error = [np.abs(th - b - t).max() for th, b, t in zip(rank.theta, begin, true, strict=True)]
    drift = [np.abs(b - t).max() for b, t in zip(bare, true, strict=True)]
    assert max(error) < 2 * step_of(rank) + 40 * 4 * 2.0**-24  # and fp32's own rounding of θ, forty times
    assert max(drift) > 2 * max(error)


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("outcome", ["skipped", "dropped"])
def test_a_push_that_came_to_nothing_changes_nothing_that_is_owed(codec, outcome):
    """Its progress is still in the model: the same push again, with the same debt, is bit for bit the same."""
    rank = FeedbackRank(codec)
    rank.train()
    theta = rank.push()
    rank.outcome("accepted")
    rank.pull(VersionId(1, 1), theta)
    owed = rank.owed()
    assert any(o.any() for o in owed)
    rank.train()
    first = rank.push()
    rank.outcome(outcome)
    assert same(rank.owed(), owed)
    assert same(rank.push(), first)


@pytest.mark.parametrize("codec", LOSSY)
def test_a_gated_push_owes_nothing_of_its_own(codec):
    """Its work is gone with the pull; what was owed by accepted work before it is still owed."""
    rank = FeedbackRank(codec)
    rank.train()
    theta = rank.push()
    rank.outcome("accepted")
    rank.pull(VersionId(1, 1), theta)
    owed = rank.owed()
    rank.train()
    rank.push()
    rank.outcome("gated")
    rank.pull(VersionId(2, 3))
    assert same(rank.owed(), owed)


def test_a_push_before_a_checkpoint_is_restored_settles_nothing_of_it():
    """Its outcome, if it was accepted, is that of other work than the checkpoint's."""
    rank = FeedbackRank(Codec.INT8)
    rank.train()
    rank.push()
    restored = [np.full(size[3], 2.0**-9, np.float32) for size in SIZES]
    rank.feedback.restore_debt(GENESIS, rank.theta, restored)
    rank.outcome("accepted")
    assert same(rank.owed(), restored)


def test_a_push_granted_in_fp32_pays_the_debt():
    """θ_local plus what is owed, exactly; after it is accepted nothing is owed."""
    rank = FeedbackRank(Codec.INT8)
    rank.train()
    theta = rank.push()
    rank.outcome("accepted")
    rank.pull(VersionId(1, 1), theta)
    owed = rank.owed()
    rank.train()
    staged = rank.push(Codec.FP32)
    assert same(staged, [m + o for m, o in zip(rank.model, owed, strict=True)])
    rank.outcome("skipped")
    assert same(rank.owed(), owed)
    rank.push(Codec.FP32)
    rank.outcome("accepted")
    assert not any(o.any() for o in rank.owed())


def test_what_the_model_still_contains_is_not_owed_twice():
    """Accepted, and the pull failed: the model has all of its work, so the next push carries no debt beside it."""
    rank = FeedbackRank(Codec.INT8)
    rank.train()
    rank.push()
    rank.outcome("accepted")
    assert any(o.any() for o in rank.owed())
    assert same(rank.push(Codec.FP32), rank.model)


@pytest.mark.parametrize("end", ["another incarnation", "a lineage that went back"])
def test_what_is_owed_ends_with_the_incarnation_and_with_the_lineage(end):
    """A new incarnation's seq begins anew and its θ contains nothing of ours; after a rollback θ owes nothing to old
    work.
    """
    rank = FeedbackRank(Codec.INT8)
    rank.train()
    theta = rank.push()
    rank.outcome("accepted")
    rank.pull(VersionId(5, 5), theta)
    assert any(o.any() for o in rank.owed())
    if end == "another incarnation":
        rank.inc, rank.seq, rank.accepted = 2, 0, 0
    else:
        rank.pull(VersionId(5, 8))
    assert not any(o.any() for o in rank.owed())


def test_an_outcome_of_another_push_settles_nothing():
    """Only the frozen push's own seq counts: an older accepted one was settled, or came to nothing [invariant 5]."""
    rank = FeedbackRank(Codec.INT8)
    rank.train()
    rank.push()
    rank.accepted = rank.seq - 1
    assert not any(o.any() for o in rank.owed())
    rank.accepted = rank.seq  # too late: it was overwritten meanwhile
    assert not any(o.any() for o in rank.owed())


@pytest.mark.parametrize("codec", LOSSY)
def test_a_difference_that_is_not_finite_arrives_so(codec):
    """A diverged model is pushed as such and the gate sees it; nothing of it is owed, since it is never accepted."""
    rank = FeedbackRank(codec)
    rank.train()
    rank.model[1][7], rank.model[0][0] = np.nan, np.inf
    staged = rank.push()
    assert not np.isfinite(staged[1][7]) and not np.isfinite(staged[0][0])
    rank.outcome("gated")
    rank.pull(VersionId(1, 2))
    assert all(np.isfinite(o).all() for o in rank.owed())


def test_it_knows_which_base_it_holds():
    """Differences can be made to the installed version only: before the first install to none."""
    feedback = Feedback([])
    assert not feedback.has_base(None) and not feedback.has_base(GENESIS)
    feedback.set_base(GENESIS)
    assert feedback.has_base(GENESIS) and not feedback.has_base(VersionId(0, 1))
