"""Updates on the wire: any range of any parameter brings the same bits, and what is counted is what travels."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dips.codecs import UPDATE_BLOCK, Codec, Dtype
from dips.outer import reference
from dips.outer.updates import Update
from dips.protocol.manifest import Layer, Manifest, Parameter
from dips.quantisers import QUANTISERS
from dips.slave.sender import cut_updates
from dips.wire.chunks import LayerLayout, put_pulled
from dips.wire.frame import BadFrame, Range, pulled_range_type, range_type

SIZES = (2 * UPDATE_BLOCK + 70, 9, UPDATE_BLOCK)
LAYOUT = LayerLayout(Manifest((Layer("a", tuple(Parameter(f"a.{i}", (n,)) for i, n in enumerate(SIZES))),)), (0,))


def chain_of(
    dtype: Dtype, depth: int, layout: LayerLayout = LAYOUT
) -> tuple[np.ndarray, np.ndarray, tuple[Update, ...]]:
    """θ, what it becomes, and the updates between them."""
    rng = np.random.default_rng(5)
    theta = start = rng.standard_normal(layout.numel[0]).astype(np.float32)
    updates = []
    for _ in range(depth):
        after = theta + 1e-3 * rng.standard_normal(theta.size).astype(np.float32)
        codes = np.zeros(theta.size, QUANTISERS[dtype.codec].codes)
        steps = np.zeros(sum(-(-field.numel // UPDATE_BLOCK) for field in layout.fields.values()), np.float32)
        for field in layout.fields.values():
            cut, blocks = (
                slice(field.start, field.start + field.numel),
                slice(field.block, field.block + -(-field.numel // UPDATE_BLOCK)),
            )
            momentum = np.zeros(field.numel, np.float32)
            reference.round_update(dtype.codec, theta[cut], after[cut], momentum, 0.4, codes[cut], steps[blocks])
        updates.append(Update(dtype.codec, {0: codes}, {0: steps} if dtype.codec.block else {}))
        theta = after
    return start, theta, tuple(updates)


Pull = tuple[Dtype, int]  # what the chunks of a pull are, and how many updates each brings
PULLS = [(codec.update_dtype, depth) for codec in Codec for depth in range(1, codec.updates + 1)]
CHAINS = {key: chain_of(*key) for key in PULLS}


@st.composite
def ranges(draw: st.DrawFn) -> Range:
    param = draw(st.integers(0, len(SIZES) - 1))
    offset = draw(st.integers(0, SIZES[param] - 1))
    return Range(0, param, offset, draw(st.integers(1, SIZES[param] - offset)))


@pytest.mark.parametrize("key", PULLS)
@settings(deadline=None)
@given(piece=ranges())
def test_any_range_becomes_the_newer_version(key: Pull, piece: Range) -> None:
    """From the middle of a block to the middle of another: cut by the slave, added by the rank, bit for bit."""
    start, after, updates = CHAINS[key]
    body, chunk = cut_updates(LAYOUT, updates, piece), range_type(*key)(*piece)
    assert len(body) == chunk.nbytes
    cut = slice(*LAYOUT.place_range(piece))
    target = start[cut].copy()
    put_pulled(chunk, memoryview(b"?" + body)[1:], target)
    assert target.tobytes() == after[cut].tobytes()


@pytest.mark.parametrize("key", PULLS)
def test_updates_are_fewer_bytes_than_parameters(key: Pull) -> None:
    """Two of int8 are half, one of either a half or a quarter; a chain that gained nothing is no spelling."""
    piece = Range(0, 0, 0, 1 << 18)
    assert range_type(*key)(*piece).nbytes <= 0.51 * piece.nbytes


@pytest.mark.parametrize("said", [(0, 1), (1, 0), (1, 1), (2, 1), (4, 2), (5, 0), (5, 3), (9, 1), (1 << 60, 1 << 60)])
def test_what_a_welcome_may_not_say_is_refused(said: tuple[int, int]) -> None:
    """A slave that offers what this release does not know is a bad peer, not a crash."""
    with pytest.raises(BadFrame, match="not known"):
        pulled_range_type(*said)


def test_parameters_are_no_updates() -> None:
    """Depth 0 of fp32 is the plain pull."""
    assert pulled_range_type(0, 0) is Range and Range(0, 0, 0, 1).depth == 0


@pytest.mark.parametrize("key", PULLS)
@pytest.mark.parametrize("offset", [0, 3, UPDATE_BLOCK])
def test_what_is_cut_off_ends_with_a_block(key: Pull, offset: int) -> None:
    """However little is wanted: a block that is cut in two would travel with two steps."""
    piece = range_type(*key)(0, 0, offset, 4 * UPDATE_BLOCK - offset)
    for most in (1, UPDATE_BLOCK - 1, UPDATE_BLOCK + 1, 3 * UPDATE_BLOCK):
        cut = piece.cut(most)
        assert (cut.offset + cut.length) % UPDATE_BLOCK == 0 and most <= cut.length < most + UPDATE_BLOCK
