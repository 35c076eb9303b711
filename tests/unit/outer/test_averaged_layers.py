"""Layers of buffers: averaged by tokens, whatever the outer step does to the others, and in no norm."""

from __future__ import annotations

import numpy as np
import pytest

from dips.codecs import Codec
from dips.ids import GENESIS, PushId, VersionId
from dips.outer import kernels, reference
from dips.outer.kernel_pool import KernelPool
from dips.outer.versions import Versions
from dips.outer_step import nesterov_step
from tests.loading import load_version

LAYERS, BUFFERS = {0: 3, 1: 2}, 1
V1, V2 = VersionId(1, 1), VersionId(2, 2)


def made(kernel_set: object, codec: Codec = Codec.FP32) -> Versions:
    versions = Versions(KernelPool(kernel_set), 2, 0, codec)  # type: ignore[arg-type]
    versions.allocate_banks(LAYERS, averaged=frozenset({BUFFERS}))

    def load(theta: dict[int, np.ndarray], momentum: dict[int, np.ndarray]) -> None:
        for layer in LAYERS:
            theta[layer][:], momentum[layer][:] = 1.0, 0.0

    load_version(versions, GENESIS, load)
    return versions


def stage(versions: Versions, seq: int, parameters: float, buffers: float) -> PushId:
    push = PushId("a", 1, seq)
    slot = versions.open_slot(push)
    slot[0][:], slot[BUFFERS][:] = parameters, buffers
    return push


@pytest.mark.parametrize("kernel_set", [kernels, reference])
def test_buffers_become_the_mean_by_tokens_in_every_round(kernel_set: object) -> None:
    """Weights 1 and 3: (1·2 + 3·6)/4 = 5, with momentum, learning rate and a clipping scale that the others get."""
    versions = made(kernel_set)
    for version, pushed in ((V1, (2.0, 6.0)), (V2, (10.0, 14.0))):
        first, second = (stage(versions, 2 * version.version + k, 0.5, b) for k, b in enumerate(pushed))
        versions.fold_push(first, 1.0)
        versions.fold_push(second, 3.0)
        versions.prepare_version(version, nesterov_step(0.001, 0.7, 0.8))
        versions.flip_version(version)
        assert versions.theta(version)[BUFFERS].tolist() == [(pushed[0] + 3 * pushed[1]) / 4] * 2
        assert 0.99 < versions.theta(version)[0][0] < 1.0, "parameters are stepped and clipped"


def test_no_norm_contains_them_and_what_is_not_finite_is_seen() -> None:
    """A push that moves buffers alone has norm 0; one with NaN in a buffer is not finite (invariant 8)."""
    versions = made(reference)
    assert versions.measure_push(stage(versions, 1, 1.0, 100.0)).layer_sq == (0.0, 0.0)
    assert not all(map(np.isfinite, versions.measure_push(stage(versions, 2, 1.0, float("nan"))).layer_sq))
    assert versions.fold_push(PushId("a", 1, 1), 1.0) == (0.0, 0.0)


def test_an_aborted_round_leaves_no_weight() -> None:
    """The next round's mean is of its own pushes."""
    versions = made(reference)
    versions.fold_push(stage(versions, 1, 1.0, 8.0), 1.0)
    versions.abort_round()
    versions.fold_push(stage(versions, 2, 1.0, 3.0), 1.0)
    versions.prepare_version(V1, nesterov_step(1.0, 0.7, 0.8))
    assert (versions.flip_version(V1), versions.theta(V1)[BUFFERS])[1].tolist() == [3.0, 3.0]


@pytest.mark.parametrize("codec", [Codec.INT8, Codec.BF16])
def test_a_lossy_pull_codec_keeps_them_near_the_mean(codec: Codec) -> None:
    """Within half a step of the update; what it rounds away stays out of m."""
    versions = made(reference, codec)
    versions.fold_push(stage(versions, 1, 0.5, 3.0), 1.0)
    versions.prepare_version(V1, nesterov_step(1.0, 0.7, 0.8))
    versions.flip_version(V1)
    assert versions.theta(V1)[BUFFERS] == pytest.approx([3.0, 3.0], rel=1 / 127)
    assert versions.momentum(V1)[BUFFERS].tolist() == [-2.0, -2.0]
