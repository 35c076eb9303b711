"""Updates: a version is what its update makes of the one before, what rounding leaves over comes back, none is torn."""

from __future__ import annotations

import numpy as np
import pytest

from dips.codecs import PULL_CODECS, UPDATE_BLOCK, Codec
from dips.ids import GENESIS, PullId, PushId, VersionId
from dips.outer import kernels, reference
from dips.outer.kernel_pool import KernelPool
from dips.outer.pool import MemorySum
from dips.outer.updates import Update, bytes_per_parameter, count_buffers, cut_parameters
from dips.outer.versions import PushMeasures, Versions
from dips.outer_step import nesterov_numbers, nesterov_step, returned_share
from dips.quantisers import QUANTISERS
from tests.codec_bounds import error_bound
from tests.loading import load_version

LR, MU = 0.7, 0.8
BLOCK = UPDATE_BLOCK
FIELDS = {0: ((0, BLOCK + 5), (BLOCK + 5, 3)), 4: ((0, 7),)}
LAYERS = {0: BLOCK + 8, 4: 7}
LOSSY = tuple(codec for codec in PULL_CODECS if codec.lossy)


def version(n: int) -> VersionId:
    return VersionId(n, n)


def pull(seq: int) -> PullId:
    return PullId("a", 1, seq)


def made(codec: Codec, pinned: int = 1) -> Versions:
    versions = Versions(KernelPool(reference), 1, pinned, codec)
    versions.allocate_banks(LAYERS, FIELDS)
    rng = np.random.default_rng(3)
    start = {layer: rng.standard_normal(n).astype(np.float32) for layer, n in LAYERS.items()}

    def load(theta: dict[int, np.ndarray], momentum: dict[int, np.ndarray]) -> None:
        for layer, numbers in start.items():
            theta[layer][:], momentum[layer][:] = numbers, 0

    load_version(versions, GENESIS, load)
    return versions


def prepare(versions: Versions, n: int) -> PushMeasures:
    """Fold a push of some change and make version n of it."""
    rng, push = np.random.default_rng(n), PushId("a", 1, n)
    assert versions.served_version is not None
    theta = versions.theta(versions.served_version)
    for layer, slot in versions.open_slot(push).items():
        slot[:] = theta[layer] + 1e-3 * rng.standard_normal(slot.size).astype(np.float32)
    versions.fold_push(push, 1.0)
    return versions.prepare_version(version(n), nesterov_step(1.0, LR, MU))


@pytest.mark.parametrize("codec", PULL_CODECS)
def test_a_version_is_measured_as_its_clusters_pull_it(codec: Codec) -> None:
    """After it was rounded: what a trainer pulled and pushes as it is has its digest."""
    versions, push = made(codec), PushId("b", 1, 1)
    prepared = prepare(versions, 1)
    for layer, slot in versions.open_slot(push).items():
        slot[:] = versions.theta(version(1))[layer]
    assert versions.measure_push(push) == prepared


def step(versions: Versions, n: int) -> dict[int, np.ndarray]:
    """Make and serve version n; return its θ."""
    prepare(versions, n)
    versions.flip_version(version(n))
    return {layer: a.copy() for layer, a in versions.theta(version(n)).items()}


def add(update: Update, theta: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
    """What an update makes of a version, one element after another."""
    out = {layer: a.copy() for layer, a in theta.items()}
    for layer, parameters in FIELDS.items():
        block = 0
        for start, numel in parameters:
            for i in range(numel):
                code = update.codes[layer][start + i]
                change = QUANTISERS[update.codec].widen(np.array([code]), 1)[0]
                out[layer][start + i] += change * update.steps[layer][block + i // BLOCK] if update.steps else change
            block += -(-numel // BLOCK)
    return out


def same(a: dict[int, np.ndarray], b: dict[int, np.ndarray]) -> bool:
    return all(np.array_equal(a[layer].view(np.uint32), b[layer].view(np.uint32)) for layer in a)


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("size", [1, BLOCK - 1, BLOCK, BLOCK + 1, 70 * BLOCK + 3])
@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-36, 1e-44])
def test_both_kernels_have_the_same_bits(codec: Codec, size: int, scale: float) -> None:
    """Compiled and plain: θ′, m′, steps and elements; also where changes are too small for a step."""
    rng = np.random.default_rng(size)
    theta, momentum = (rng.standard_normal(size).astype(np.float32) * (scale >= 1e-3) for _ in range(2))
    after = (theta + scale * rng.standard_normal(size)).astype(np.float32)
    outs = []
    for module in (kernels, reference):
        codes = np.zeros(size, QUANTISERS[codec].codes)
        out = after.copy(), momentum.copy(), codes, np.zeros(-(-size // BLOCK), np.float32)
        module.round_update(codec, theta, out[0], out[1], 0.4, out[2], out[3])
        outs.append(out)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(*outs, strict=True))
    bound = error_bound(codec, after - theta, block=size).max()
    assert np.abs(outs[0][0] - after).max() <= 1.001 * bound + 2.0**-119 + np.abs(after).max() * 2.0**-23


def test_the_tiniest_change_that_has_a_step_arrives() -> None:
    """What is just below it does not."""
    tiniest, steps = np.float32(Codec.INT8.tiniest), np.zeros(2, np.float32)
    for module in (kernels, reference):
        theta, after, momentum = (np.zeros(2 * BLOCK, np.float32) for _ in range(3))
        after[0], after[BLOCK] = tiniest, np.nextafter(tiniest, np.float32(0))
        module.round_update(Codec.INT8, theta, after, momentum, 0.4, np.zeros(2 * BLOCK, np.int8), steps)
        assert after[0] > 0.9 * tiniest and after[BLOCK] == 0.0 and steps[1] == 0.0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so_in_its_block(bad: float) -> None:
    """A θ′ that overflowed is no number afterwards either; the next block is well."""
    for module in (kernels, reference):
        theta, after, momentum = (np.zeros(2 * BLOCK, np.float32) for _ in range(3))
        after[3], after[BLOCK + 3], steps = bad, 1.0, np.zeros(2, np.float32)
        module.round_update(Codec.INT8, theta, after, momentum, 0.4, np.zeros(2 * BLOCK, np.int8), steps)
        assert np.isnan(steps[0]) and np.isnan(after[:BLOCK]).all() and np.isfinite(after[BLOCK:]).all()


@pytest.mark.parametrize("codec", LOSSY)
def test_a_version_is_what_its_updates_make_of_an_older_one(codec: Codec) -> None:
    """Bit for bit, over every parameter's blocks, from each version that a chain begins at [invariant 1]."""
    versions, thetas = made(codec), {}
    for n in range(1, 7):
        thetas[version(n)] = step(versions, n)
        chain = versions.pin_updates(pull(n), version(n))
        assert len(chain) == min(n, codec.updates)
        for first in range(len(chain)):
            parent = chain[first].parent
            assert parent is not None
            theta = thetas.get(parent)
            for update in chain[first:] if theta else ():
                theta = add(update, theta)
            assert theta is None or same(theta, thetas[version(n)])
        versions.unpin_version(pull(n))


@pytest.mark.parametrize("codec", LOSSY)
def test_what_rounding_leaves_over_comes_back(codec: Codec) -> None:
    """After 200 steps θ is within 1/(1 − μ) times the largest remainder of exact steps; without m′ it drifts away."""
    rng, n = np.random.default_rng(1), 3 * BLOCK
    theta = {how: np.zeros(n, np.float32) for how in ("back", "lost")}
    momentum = {how: np.zeros(n, np.float32) for how in theta}
    exact, exact_m, remainder = np.zeros(n), np.zeros(n), 0.0
    tilt = 1e-5 * rng.standard_normal(n)  # far below half a step: alone, it would never be seen
    for _ in range(200):
        g = (1e-3 * rng.standard_normal(n) * (rng.random(n) < 0.02) + tilt).astype(np.float32)
        exact_m = MU * exact_m + g
        exact = exact - LR * (g + MU * exact_m)
        for how in theta:
            acc, after = g.copy(), np.empty(n, np.float32)
            reference.apply(theta[how], acc, momentum[how], 1.0, LR, nesterov_numbers(MU), after)
            target, back = after.copy(), returned_share(LR, nesterov_numbers(MU)) if how == "back" else 0.0
            codes = np.zeros(n, QUANTISERS[codec].codes)
            reference.round_update(codec, theta[how], after, acc, back, codes, np.zeros(3, "f4"))
            remainder = max(remainder, float(np.abs(target - after).max())) if how == "back" else remainder
            theta[how], momentum[how] = after, acc
    error, drift = (np.abs(theta[how] - exact).max() for how in ("back", "lost"))
    assert error <= remainder / (1 - MU) + 200 * np.abs(exact).max() * 2.0**-24
    assert not codec.block or drift > 3 * error


def test_an_update_that_was_aborted_is_nobodys() -> None:
    """Its buffer is the next one's, and what led to the head before is still to be had."""
    versions = made(Codec.INT8)
    first = step(versions, 1)
    prepare(versions, 2)
    versions.abort_round()
    assert [u.version for u in versions.pin_updates(pull(1), version(1))] == [version(1)]
    assert versions.pin_updates(pull(2), version(2)) == ()
    theta = step(versions, 3)
    chain = versions.pin_updates(pull(3), version(3))
    assert [(u.parent, u.version) for u in chain] == [(GENESIS, version(1)), (version(1), version(3))]
    assert same(add(chain[1], first), theta)


def test_an_update_that_is_being_written_is_no_longer_the_old_one() -> None:
    """The version that it led to may still be pulled: whole, or from the version after the lost update."""
    versions = made(Codec.INT8)
    for n in (1, 2, 3):
        step(versions, n)
    prepare(versions, 4)  # into the buffer of the update to version 1
    assert [u.version for u in versions.pin_updates(pull(1), version(2))] == [version(2)]
    versions.abort_round()
    assert [u.version for u in versions.pin_updates(pull(2), version(2))] == [version(2)]


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("pinned", [0, 1, 3])
def test_slow_readers_never_hold_the_last_buffer(codec: Codec, pinned: int) -> None:
    """What a pull may read is not written while it may; the next step never waits; later pulls bring parameters."""
    versions, held = made(codec, pinned), {}
    empty = 0
    for n in range(1, 12):
        step(versions, n)
        chain = versions.pin_updates(pull(n), version(n))
        held[n] = [(u, {layer: a.tobytes() for layer, a in u.codes.items()}) for u in chain]
        empty += not chain
        for update, codes in (pair for pairs in held.values() for pair in pairs):
            assert {layer: a.tobytes() for layer, a in update.codes.items()} == codes
    assert empty > 0
    for n in held:
        versions.unpin_version(pull(n))
    step(versions, 12)
    assert len(versions.pin_updates(pull(12), version(12))) == codec.updates, "never more bytes than parameters"


@pytest.mark.parametrize("codec", PULL_CODECS)
def test_updates_stand_in_the_memory_sum(codec: Codec) -> None:
    """What is allocated is what was printed, but for a step more for each parameter that ends within a block."""
    numel, pinned = 64 * BLOCK, 1
    memory = MemorySum(numel, 1, pinned, 0, bytes_per_parameter(codec, pinned))
    versions = Versions(KernelPool(reference), 1, pinned, codec)
    versions.allocate_banks({0: numel})
    assert versions.limit_bytes == memory.pool_bytes
    assert ("updates" in memory.describe_sum()) == codec.lossy
    assert count_buffers(Codec.FP32, 5) == 0 and (count_buffers(Codec.INT8, 3), count_buffers(Codec.BF16, 0)) == (5, 2)
    assert round(bytes_per_parameter(Codec.INT8, 1), 2) == 3.05 and bytes_per_parameter(Codec.BF16, 1) == 4


def test_slices_cut_no_block_and_no_parameter() -> None:
    """Each element is in one slice, each block in one slice's blocks."""
    cuts = cut_parameters({0: ((0, 5 * BLOCK + 1), (5 * BLOCK + 1, 9))}, 2 * BLOCK)
    assert [(c.start, c.stop) for _, c, _ in cuts] == [
        (0, 2 * BLOCK), (2 * BLOCK, 4 * BLOCK), (4 * BLOCK, 5 * BLOCK + 1), (5 * BLOCK + 1, 5 * BLOCK + 10),
    ]  # fmt: skip
    assert [(b.start, b.stop) for _, _, b in cuts] == [(0, 2), (2, 4), (4, 6), (6, 7)]


def test_who_only_reads_holds_no_buffer() -> None:
    """However many follow, slow or dead: the next steps find a buffer, and clusters that train their updates."""
    versions = made(Codec.INT8)
    for n in range(1, 7):
        step(versions, n)
        lent = [versions.pin_updates(PullId(f"{k}.puller", 1, n), version(n)) for k in range(9)]
        assert all(chain == lent[0] and len(chain) == min(n, Codec.INT8.updates) for chain in lent)
        chain = versions.pin_updates(pull(n), version(n))
        assert len(chain) == min(n, Codec.INT8.updates)
        versions.unpin_version(pull(n))
