"""Pulls of updates over the real data flow: bit for bit, also over broken connections; who cannot take them gets θ."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from dips.client.rank.transfer import LanePart, PullTransfer, pull_pieces
from dips.codecs import Codec
from dips.errors import StaleVersion, UnavailableSlave
from dips.ids import GENESIS, PullId, PushId, VersionId
from dips.outer import kernels
from dips.outer.kernel_pool import KernelPool
from dips.outer.updates import Update
from dips.outer.versions import Versions
from dips.outer_step import nesterov_step
from dips.wire.frame import BadFrame, Welcome
from tests.integration.test_flow import (
    LAYERS,
    MANIFEST,
    FlowUnderTest,
    Model,
    V,
    base,
    blank,
    model,
    proxy,
    running_flow,
    same,
    shares,
    together,
)
from tests.loading import load_version

PULL = PullId("fast", 1, 1)
V3 = VersionId(3, 4)
OTHER = VersionId(2, 9)


def two_steps(codec: Codec, open_at: FlowUnderTest, pull: PullId = PULL) -> dict[VersionId, Model]:
    """Make v3@r4 and V of v0@r0, and open a pull of V; return θ of each."""
    versions, thetas = make_two(codec)
    open_at.flow.open_pull(pull, V, versions.held.pin_version(pull, V), versions.pin_updates(pull, V))
    return thetas


def make_two(codec: Codec) -> tuple[Versions, dict[VersionId, Model]]:
    fields = {
        i: tuple(zip(MANIFEST.layers[i].param_offsets(), (p.numel for p in MANIFEST.layers[i].parameters), strict=True))
        for i in LAYERS
    }
    versions = Versions(KernelPool(kernels), 1, 1, codec)
    versions.allocate_banks({i: MANIFEST.layers[i].numel for i in LAYERS}, fields)
    start = model(1)

    def load(theta: Model, momentum: Model) -> None:
        for i in LAYERS:
            theta[i][:], momentum[i][:] = start[i], 0

    load_version(versions, GENESIS, load)
    thetas = {GENESIS: start}
    for seq, version in enumerate((V3, V), 1):
        change, push = model(seq + 1), PushId("fast", 1, seq)
        before = thetas[GENESIS if seq == 1 else V3]
        for i, slot in versions.open_slot(push).items():
            slot[:] = before[i] + np.float32(1e-3) * change[i]
        versions.fold_push(push, 1.0)
        versions.prepare_version(version, nesterov_step(1.0, 0.7, 0.8))
        versions.flip_version(version)
        thetas[version] = {i: a.copy() for i, a in versions.theta(version).items()}
    return versions, thetas


def count_sent(slave: FlowUnderTest) -> int:
    """Bytes that the slave counted, when it has counted all: a rank may have the last chunk before that."""
    slave.flow.close_pull(PULL)
    slave.heard.wait("released", PULL)
    return slave.flow.bytes_out


@pytest.mark.usefixtures("stage_threads")
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(
    ("codec", "held", "share"), [(Codec.BF16, V3, 0.5), (Codec.INT8, V3, 0.254), (Codec.INT8, GENESIS, 0.508)]
)
def test_updates_make_the_version_bit_for_bit(codec: Codec, held: VersionId, share: float, ranks: int) -> None:
    """From the version before, or from two before; ranks' pieces begin anywhere in a block; real bytes count."""
    with running_flow(lanes=2) as slave:
        thetas = two_steps(codec, slave)
        target = {i: thetas[held][i].copy() for i in LAYERS}
        hands = shares(target, ranks)
        stats = together(
            *(lambda r=r: pull_pieces(slave.grant(ranks), base(1, r), hands[r], held=held) for r in range(ranks))
        )
        assert same(target, thetas[V])
        assert sum(s.nbytes for s in stats) == count_sent(slave)  # type: ignore[attr-defined]
        assert slave.flow.bytes_out == pytest.approx(share * 4 * MANIFEST.numel, rel=0.01)
        assert not slave.flow.refused_frames


@pytest.mark.parametrize(
    ("codec", "held"), [(Codec.BF16, GENESIS), (Codec.INT8, OTHER), (Codec.INT8, None), (Codec.FP32, V3)]
)
def test_who_cannot_take_updates_gets_parameters(codec: Codec, held: VersionId | None) -> None:
    """Too far behind, on a version of another lineage, without one, or in a run without updates."""
    with running_flow() as slave:
        thetas, target = two_steps(codec, slave), blank()
        pull_pieces(slave.grant(1), base(1), shares(target, 1)[0], held=held)
        assert same(target, thetas[V])
        assert count_sent(slave) == 4 * MANIFEST.numel


def test_updates_that_were_cut_are_resumed_and_added_once() -> None:
    """Each chunk is added to the older version exactly once, whatever breaks between [invariants 1, 5]."""
    with running_flow() as slave, proxy(slave.flow.lane_addresses()[0], 60_000, cuts=3, upward=False) as cut:
        thetas = two_steps(Codec.INT8, slave)
        target = {i: thetas[GENESIS][i].copy() for i in LAYERS}
        stats = pull_pieces(slave.grant(1, [cut.address]), base(1), shares(target, 1)[0], held=GENESIS)
        assert same(target, thetas[V])
        assert stats.connections == 4


class Overtaken(PullTransfer):
    """A pull of one that only reads, whose first update is written again as soon as it was offered."""

    lent: Update

    def on_welcome(self, part: LanePart, welcome: Welcome, now: float) -> None:
        super().on_welcome(part, welcome, now)
        self.lent.version = self.lent.parent = None  # as Updates.begin_update does


def test_who_only_reads_is_told_when_its_updates_are_written_again() -> None:
    """It holds no buffer, gets no byte of another update, and all parameters when it asks anew."""
    reader = PullId("eval.puller", 1, 1)
    with running_flow() as slave:
        versions, thetas = make_two(Codec.INT8)
        chain = versions.pin_updates(reader, V)
        assert len(chain) == 2 and not any(update.pulls for update in chain)
        slave.flow.open_pull(reader, V, versions.held.pin_version(reader, V), chain)
        target = {i: thetas[GENESIS][i].copy() for i in LAYERS}
        moving = Overtaken(
            slave.grant(1), base(1, cluster="eval.puller"), shares(target, 1)[0], 10.0, time.monotonic, held=GENESIS
        )
        moving.lent = chain[0]
        with pytest.raises(StaleVersion, match="newer versions took the place"):
            moving.run(threading.Event(), None)

        again = PullId("eval.puller", 1, 2)
        slave.flow.open_pull(again, V, versions.held.pin_version(again, V), chain)
        pull_pieces(slave.grant(1), base(2, cluster="eval.puller"), shares(target, 1)[0], held=GENESIS)
        assert same(target, thetas[V])


def test_a_rank_believes_no_offer_that_it_cannot_take() -> None:
    """Updates for a rank that holds nothing, of a dtype that nobody knows, or others after a broken connection."""
    with running_flow() as slave:
        hand = shares(blank(), 1)[0]
        for held, said, error in (
            (None, Welcome(0, 4096, 5, 1), BadFrame),
            (V3, Welcome(0, 4096, 2, 1), BadFrame),
            (V3, Welcome(0, 4096, 5, 7), BadFrame),
        ):
            moving = PullTransfer(slave.grant(1), base(1), hand, 1.0, lambda: 0.0, held=held)
            with pytest.raises(error):
                moving.on_welcome(moving._parts[0], said, 0.0)
            _end(moving)
        moving = PullTransfer(slave.grant(1), base(1), hand, 1.0, lambda: 0.0, held=V3)
        moving.on_welcome(moving._parts[0], Welcome(0, 4096, 5, 1), 0.0)
        with pytest.raises(UnavailableSlave, match="other chunks than before"):
            moving.on_welcome(moving._parts[0], Welcome(0, 4096), 0.0)
        _end(moving)


def _end(moving: PullTransfer) -> None:
    """Give back what a transfer that never ran has taken."""
    for part in moving._parts:
        part.stream.close()
    moving._context.term()
    moving._waker.close()
