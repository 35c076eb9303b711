"""Updates on the wire: any range of any parameter brings the same bits, and what is counted is what travels."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dips.outer import reference
from dips.outer.updates import Update
from dips.protocol.manifest import Layer, Manifest, Parameter
from dips.slave.update_chunks import cut_updates
from dips.wire.chunks import LayerLayout, Range
from dips.wire.frame import BLOCK, BadFrame, Dtype
from dips.wire.updates import SPELLINGS, range_of, spelling_of

SIZES = (2 * BLOCK + 70, 9, BLOCK)
LAYOUT = LayerLayout(Manifest((Layer("a", tuple(Parameter(f"a.{i}", (n,)) for i, n in enumerate(SIZES))),)), (0,))


def chain_of(dtype: int, depth: int, layout: LayerLayout = LAYOUT) -> tuple[np.ndarray, np.ndarray, tuple[Update, ...]]:
    """θ, what it becomes, and the updates between them."""
    rng = np.random.default_rng(5)
    theta = start = rng.standard_normal(layout.numel[0]).astype(np.float32)
    updates = []
    for _ in range(depth):
        after = theta + 1e-3 * rng.standard_normal(theta.size).astype(np.float32)
        codes = np.zeros(theta.size, np.int8 if dtype == Dtype.INT8_UPDATE else np.uint16)
        steps = np.zeros(sum(-(-field.numel // BLOCK) for field in layout.fields.values()), np.float32)
        kernel = reference.round_int8 if dtype == Dtype.INT8_UPDATE else reference.round_bf16
        for field in layout.fields.values():
            cut, blocks = (
                slice(field.start, field.start + field.numel),
                slice(field.block, field.block + -(-field.numel // BLOCK)),
            )
            kernel(theta[cut], after[cut], np.zeros(field.numel, np.float32), 0.4, codes[cut], steps[blocks])
        updates.append(Update({0: codes}, {0: steps} if dtype == Dtype.INT8_UPDATE else {}))
        theta = after
    return start, theta, tuple(updates)


CHAINS = {key: chain_of(*key) for key in SPELLINGS}


@st.composite
def ranges(draw: st.DrawFn) -> Range:
    param = draw(st.integers(0, len(SIZES) - 1))
    offset = draw(st.integers(0, SIZES[param] - 1))
    return Range(0, param, offset, draw(st.integers(1, SIZES[param] - offset)))


@pytest.mark.parametrize("key", SPELLINGS)
@settings(deadline=None)
@given(piece=ranges())
def test_any_range_becomes_the_newer_version(key: tuple[int, int], piece: Range) -> None:
    """From the middle of a block to the middle of another: cut by the slave, added by the rank, bit for bit."""
    start, after, updates = CHAINS[key]
    spelling = spelling_of(*key)
    assert spelling is not None
    body = cut_updates(LAYOUT, updates, piece)
    assert len(body) == spelling.range(*piece).nbytes
    cut = slice(*LAYOUT.place_range(piece))
    target = start[cut].copy()
    spelling.add_updates(memoryview(b"?" + body)[1:], piece, target)
    assert target.tobytes() == after[cut].tobytes()


@pytest.mark.parametrize("key", SPELLINGS)
def test_updates_are_fewer_bytes_than_parameters(key: tuple[int, int]) -> None:
    """Two of int8 are half, one of either a half or a quarter; a chain that gained nothing is no spelling."""
    piece = Range(0, 0, 0, 1 << 18)
    assert range_of(*key)(*piece).nbytes <= 0.51 * piece.nbytes


@pytest.mark.parametrize("said", [(0, 1), (1, 1), (2, 1), (4, 2), (5, 0), (5, 3), (9, 1), (1 << 60, 1 << 60)])
def test_what_a_welcome_may_not_say_is_refused(said: tuple[int, int]) -> None:
    """A slave that offers what this release does not know is a bad peer, not a crash."""
    with pytest.raises(BadFrame, match="not known"):
        spelling_of(*said)


def test_parameters_are_no_updates() -> None:
    """Depth 0 of fp32 is the plain pull."""
    assert spelling_of(0, 0) is None and range_of(0, 0) is Range


@pytest.mark.parametrize("key", SPELLINGS)
@pytest.mark.parametrize("offset", [0, 3, BLOCK])
def test_what_is_cut_off_ends_with_a_block(key: tuple[int, int], offset: int) -> None:
    """However little is wanted: a block that is cut in two would travel with two steps."""
    spelling = spelling_of(*key)
    assert spelling is not None
    piece = spelling.range(0, 0, offset, 4 * BLOCK - offset)
    for most in (1, BLOCK - 1, BLOCK + 1, 3 * BLOCK):
        cut = piece.cut(most)
        assert (cut.offset + cut.length) % BLOCK == 0 and most <= cut.length < most + BLOCK
