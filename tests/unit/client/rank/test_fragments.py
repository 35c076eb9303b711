"""Fragments: how layers are cut, which of them may move, and what a rank's push and merge of them leave behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dips.client.parallel import HostMemory, lay_out
from dips.client.rank import transfer
from dips.client.rank.agent_client import JobCollectives
from dips.client.rank.fragments import FragmentGate, cut_fragments
from dips.client.rank.shard_transfer import ShardTransfer, TransferRequest, TransferResult
from dips.client.rank.transfer import TransferIdentity, TransferStats
from dips.codecs import Codec
from dips.errors import ConfigError, LocalProtocolError, UnavailableSlave
from dips.ids import GENESIS, VersionId
from dips.protocol.effects import Grant
from dips.wire.chunks import Piece, decode_body

V1, V2 = VersionId(1, 1), VersionId(2, 2)
LAYERS, H, WAIT_S = 3, 4, 5.0


# ---- how layers are cut ----------------------------------------------------------------------------------------------


def test_layers_of_one_size_are_dealt_in_strides():
    """As Streaming DiLoCo prefers; a large embedding is a fragment by itself."""
    assert cut_fragments([5] * 7, 3) == ((0, 3, 6), (1, 4), (2, 5))
    assert cut_fragments([100, *[12] * 8, 100], 4) == ((0,), (9,), (1, 3, 5, 7), (2, 4, 6, 8))


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.data())
def test_fragments_are_about_equal(sizes, data):
    """Every layer is in one, none is empty, and no two differ by more than a layer."""
    count = data.draw(st.integers(1, len(sizes)))
    fragments = cut_fragments(sizes, count)
    assert sorted(layer for layers in fragments for layer in layers) == list(range(len(sizes)))
    filled = [sum(sizes[layer] for layer in layers) for layers in fragments]
    assert min(filled) > 0 and max(filled) - min(filled) <= max(sizes)


def test_a_layer_is_never_cut():
    """More fragments than layers are refused, with the number that is possible."""
    with pytest.raises(ConfigError, match=r"4 is more than the 3 layers .* at most 3"):
        cut_fragments([1, 1, 1], 4)


def test_a_fragment_has_arrived_when_those_before_it_have():
    """Merges go in the order of the fragments; what is not open has not arrived, even if it is empty here."""
    values = np.zeros(8, np.float32)
    gate = FragmentGate(((0,), (1,), (2,)), [Piece(0, 0, 0, 8, values), Piece(1, 0, 0, 8, values)])
    gate.open_next()
    gate.record_arrived(1, 8)
    assert gate.arrived == 0
    gate.record_arrived(0, 8)
    assert gate.arrived == 2
    gate.open_next()
    assert gate.arrived == 3


def test_an_empty_fragment_arrives_when_it_is_open():
    """A rank that has no piece of the second of three: neither it nor the first after it is merged before its time."""
    values = np.zeros(8, np.float32)
    gate = FragmentGate(((0,), (1,), (2,)), [Piece(0, 0, 0, 8, values), Piece(2, 0, 0, 8, values)])
    gate.record_arrived(0, 8)
    assert gate.arrived == 1
    gate.open_next()
    assert gate.arrived == 2


# ---- a rank ----------------------------------------------------------------------------------------------------------


class PatientSlaves:
    """They take and bring one fragment after the other, as the gate opens them; `breaks_at` breaks one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, codec: Codec) -> None:
        self.codec, self.theta, self.breaks_at = codec, 0.0, -1
        self.pushed: dict[int, np.ndarray] = {}  # by layer: all that came of the present push
        monkeypatch.setattr(transfer, "push_pieces", self._push)
        monkeypatch.setattr(transfer, "pull_pieces", self._pull)

    def _push(self, grant: Any, base: Any, pieces: Any, *, encode: Any, cancel: Any, **options: Any) -> TransferStats:
        self.pushed = {}

        def take(pieces: list[Piece]) -> None:
            for layer in {p.layer for p in pieces}:
                mine = [p for p in pieces if p.layer == layer]
                sent = [encode(p.range, p.array.view(np.uint8).data) if encode else p.array for p in mine]
                self.pushed[layer] = np.concatenate(
                    [decode_body(self.codec, bytes(b), p.length) for b, p in zip(sent, mine, strict=True)]
                )

        return self._follow(pieces, take, cancel, **options)

    def _pull(self, grant: Any, base: Any, pieces: Any, *, cancel: Any, **options: Any) -> TransferStats:
        gate = options.get("gate")

        def bring(pieces: list[Piece]) -> None:
            for piece in pieces:
                piece.array[:] = self.theta
                if gate is not None:
                    gate.record_arrived(piece.layer, piece.length)

        return self._follow(pieces, bring, cancel, **options)

    def _follow(
        self,
        pieces: Any,
        move: Callable[[list[Piece]], None],
        cancel: threading.Event,
        gate: FragmentGate | None = None,
        **_: Any,
    ) -> TransferStats:
        groups = [list(pieces)] if gate is None else gate.group_pieces(pieces)
        for number, group in enumerate(groups):
            while gate is not None and gate.open <= number:
                if cancel.wait(0.001):
                    raise UnavailableSlave("cancelled")
            if number == self.breaks_at:
                raise UnavailableSlave("ps1 is gone")
            move(group)
        return TransferStats(0, 0.0, 1)


class StaggeredRank:
    """The only rank of a job, with three layers; each inner step adds its number's worth of steps to every element."""

    def __init__(self, slaves: PatientSlaves, fragments: int = LAYERS) -> None:
        torch.manual_seed(3)
        self.slaves = slaves
        self.model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(LAYERS)])
        collectives = JobCollectives()
        layout = lay_out(self.model, collectives)
        memory = HostMemory(layout.adapter, layout.held, layout.plan, collectives)
        self.transfers = ShardTransfer(memory, collectives, 1.0, slaves.codec, fragments=fragments)
        self.seq = 0
        assert self.transfers.begin_pull(self._request(GENESIS, Codec.FP32)).wait(WAIT_S).ok
        self.transfers.install_version(GENESIS)

    def _request(self, version: VersionId, codec: Codec, accepted: int = 0) -> TransferRequest:
        self.seq += 1
        grant = Grant(version, (), 60.0, codec, version if codec.lossy else None)
        return TransferRequest(grant, TransferIdentity("r", "c", 1, self.seq, 0), lambda *_: "", accepted)

    @torch.no_grad()
    def take_step(self, delta: float = 2.0**-10) -> None:
        for parameter in self.model.parameters():
            parameter.add_(delta)
        self.transfers.on_inner_step()

    def push(self, base: VersionId, interval: int = 1, accepted: int = 0, delta: float = 2.0**-10) -> TransferResult:
        """Train beside a push until it is over."""
        moving = self.transfers.begin_push(self._request(base, self.slaves.codec, accepted), True, interval)
        return self._train_beside(moving, delta)

    def pull(self, version: VersionId, interval: int = 1, accepted: int = 0, delta: float = 2.0**-10) -> TransferResult:
        return self._train_beside(
            self.transfers.begin_pull(self._request(version, Codec.FP32, accepted), True, interval), delta
        )

    def _train_beside(self, moving: Any, delta: float) -> TransferResult:
        end = time.monotonic() + WAIT_S
        while (result := moving.poll()) is None:
            assert time.monotonic() < end, "it is not over"
            if moving.steps_until_due is not None:
                self.take_step(delta)
        return result

    def values(self) -> list[float]:
        """The number that all elements of each layer are."""
        found = [torch.cat([p.detach().reshape(-1) for p in layer.parameters()]) for layer in self.model]
        assert all(bool((elements == elements[0]).all()) for elements in found), found
        return [float(elements[0]) for elements in found]


@pytest.fixture
def slaves(monkeypatch: pytest.MonkeyPatch) -> PatientSlaves:
    return PatientSlaves(monkeypatch, Codec.FP32)


def test_each_fragment_is_frozen_at_its_own_step(slaves):
    """Of three layers the second is pushed with what one interval has trained beside the first, the third with two."""
    rank = StaggeredRank(slaves)
    assert rank.push(GENESIS, interval=2, delta=1.0).ok
    assert [set(slaves.pushed[layer]) for layer in range(LAYERS)] == [{0.0}, {2.0}, {4.0}]


def test_a_push_that_nobody_trains_beside_has_every_layer(slaves):
    """It keeps no shard and staggers nothing: the whole model is frozen as it is, whatever its fragments are."""
    rank = StaggeredRank(slaves)
    rank.take_step(1.0)
    assert rank.transfers.begin_push(rank._request(GENESIS, Codec.FP32)).wait(WAIT_S).ok
    assert [set(slaves.pushed[layer]) for layer in range(LAYERS)] == [{1.0}] * LAYERS


def test_paused_training_staggers_nothing(slaves):
    """The last push of the data, or a push that the script demands: all of it is frozen and moved at once."""
    rank = StaggeredRank(slaves)
    moving = rank.transfers.begin_push(rank._request(GENESIS, Codec.FP32), True, 1000)
    rank.take_step(1.0)
    assert moving.wait(WAIT_S).ok
    assert [set(slaves.pushed[layer]) for layer in range(LAYERS)] == [{0.0}, {1.0}, {1.0}]


def test_a_merge_keeps_what_was_trained_since_each_freeze(slaves):
    """θ ← θ_local + θ_new − θ_pushed, every layer at its own time: what was trained beside it is all there."""
    rank = StaggeredRank(slaves)
    assert rank.push(GENESIS, delta=0.0).ok
    slaves.theta = 8.0
    rank.take_step(1.0)
    assert rank.pull(V1, interval=2, delta=1.0).ok
    assert rank.transfers.merge_version(V1)
    assert rank.values() == [1.0 + 4.0 + 8.0] * LAYERS


def test_a_fragment_is_merged_when_it_has_arrived(slaves):
    """Layers that were not asked for yet are the cluster's own."""
    rank = StaggeredRank(slaves)
    assert rank.push(GENESIS, delta=0.0).ok
    slaves.theta = 8.0
    moving, end = rank.transfers.begin_pull(rank._request(V1, Codec.FP32), True, 2), time.monotonic() + WAIT_S
    while rank.values() == [0.0] * LAYERS:
        assert moving.poll() is None and time.monotonic() < end
    assert rank.values() == [8.0, 0.0, 0.0]
    assert moving.wait(WAIT_S).ok and rank.values() == [8.0] * LAYERS


@pytest.mark.parametrize("fragment", [1, 2])
def test_a_nan_before_a_late_fragment_ends_the_push(slaves, fragment):
    """Nothing that is not finite is offered: the push is given up with its reason, as one that was never begun."""
    rank = StaggeredRank(slaves)
    moving = rank.transfers.begin_push(rank._request(GENESIS, Codec.FP32), True, 1)
    for _ in range(fragment - 1):
        rank.take_step(1.0)
        assert moving.poll() is None
    rank.take_step(float("nan"))
    result = moving.poll()
    assert result is not None and (result.ok, result.diverged) == (False, True)
    assert "is not finite on rank 0" in result.reason
    assert all(np.isfinite(values).all() for values in slaves.pushed.values())
    assert len(slaves.pushed) <= fragment


def test_a_parameter_that_is_replaced_before_a_late_fragment_ends_the_job(slaves):
    """What would be pushed of it is not what is trained."""
    rank = StaggeredRank(slaves)
    moving = rank.transfers.begin_push(rank._request(GENESIS, Codec.FP32), True, 1)
    rank.model[2] = nn.Linear(4, 4)
    rank.take_step()
    with pytest.raises(LocalProtocolError, match=r"rank 0: 2\.bias was replaced after OuterLoop was made"):
        moving.poll()
    moving.cancel()


def test_an_optimizer_that_undoes_one_fragment_is_found(slaves):
    """Each is looked at after its own merge: the others have other versions then."""
    rank, steps = StaggeredRank(slaves), [1]
    rank.transfers._optimizer_steps = lambda: steps[0]
    for version, slaves.theta in ((V1, 8.0), (V2, 9.0)):
        assert rank.push(GENESIS, delta=0.0).ok
        before = [p.detach().clone() for p in rank.model.parameters()]
        assert rank.pull(version, delta=0.0).ok and rank.transfers.merge_version(version)
        rank.take_step()
    with torch.no_grad():
        for parameter, former in zip(rank.model.parameters(), before, strict=True):
            parameter.copy_(former)
    steps[0] += 1
    with pytest.raises(ConfigError, match="the first optimizer step after a pull wrote back the values from before"):
        rank.take_step()


def test_a_merge_that_would_not_be_finite_installs_the_version_whole(slaves):
    """NaN beside a pull: the rest is brought at once, and all layers are what was pulled, also those merged before."""
    rank = StaggeredRank(slaves)
    assert rank.push(GENESIS, delta=0.0).ok
    slaves.theta = 8.0
    moving, end = rank.transfers.begin_pull(rank._request(V1, Codec.FP32), True, 1), time.monotonic() + WAIT_S
    while rank.values()[0] != 8.0:
        assert moving.poll() is None and time.monotonic() < end
    with torch.no_grad():
        rank.model[1].weight[0, 0] = float("nan")
    rank.transfers.on_inner_step()
    while (result := moving.poll()) is None:
        assert time.monotonic() < end
    assert result.ok and not rank.transfers.merge_version(V1)
    assert rank.values() == [8.0] * LAYERS


@pytest.mark.parametrize(("breaks_at", "torn"), [(0, False), (1, True)])
def test_a_pull_that_breaks_between_fragments_leaves_two_versions(slaves, breaks_at, torn):
    """The result says so; the pull that follows is a whole one, and mends it."""
    rank = StaggeredRank(slaves)
    assert rank.push(GENESIS, delta=0.0).ok
    slaves.theta, slaves.breaks_at = 8.0, breaks_at
    moving, end = rank.transfers.begin_pull(rank._request(V1, Codec.FP32), True, 1), time.monotonic() + WAIT_S
    while torn and rank.values()[0] != 8.0:
        assert moving.poll() is None and time.monotonic() < end
    rank.take_step(0.0)
    while (result := moving.poll()) is None:
        assert time.monotonic() < end
    assert (result.ok, result.torn) == (False, torn)
    slaves.breaks_at = -1
    assert rank.transfers.begin_pull(rank._request(V2, Codec.FP32)).wait(WAIT_S).ok
    rank.transfers.install_version(V2)
    assert rank.values() == [8.0] * LAYERS


@pytest.mark.parametrize("codec", [codec for codec in Codec if codec.lossy])
def test_error_feedback_of_fragments_is_that_of_the_whole(monkeypatch, codec):
    """With nothing trained beside them, pushes in fragments carry, and owe, the same bits as whole ones."""
    found = []
    for fragments in (1, LAYERS):
        slaves = PatientSlaves(monkeypatch, codec)
        rank = StaggeredRank(slaves, fragments)
        carried, accepted = [], 0
        for base, version in ((GENESIS, V1), (V1, V2), (V2, VersionId(3, 3))):
            generator = torch.Generator().manual_seed(version.version)
            with torch.no_grad():
                for parameter in rank.model.parameters():
                    parameter.add_(1e-2 * torch.randn(parameter.shape, generator=generator))
            assert rank.push(base, accepted=accepted, delta=0.0).ok
            accepted, slaves.theta = rank.seq, 0.125 * version.version
            carried.append(np.concatenate([slaves.pushed[layer] for layer in range(LAYERS)]))
            assert rank.pull(version, accepted=accepted, delta=0.0).ok
            assert rank.transfers.merge_version(version)
        found.append((carried, rank.transfers.checkpoint_tensors()["owed"].numpy()))
    for one, other in zip(found[0][0], found[1][0], strict=True):
        assert np.array_equal(one, other)
    assert np.array_equal(found[0][1], found[1][1]) and found[0][1].any()


def test_differences_are_to_no_base_while_half_of_it_is_newer(monkeypatch):
    """A lossy push after a pull that broke between fragments would be of two versions: it fails, and says so."""
    slaves = PatientSlaves(monkeypatch, Codec.INT8)
    rank = StaggeredRank(slaves)
    assert rank.push(GENESIS, delta=0.0).ok
    slaves.breaks_at = 1
    moving, end = rank.transfers.begin_pull(rank._request(V1, Codec.FP32), True, 1), time.monotonic() + WAIT_S
    while (result := moving.poll()) is None:
        assert time.monotonic() < end
        rank.take_step(0.0)
    assert result.torn
    for version in (GENESIS, V1):
        failed = rank.push(version)
        assert not failed.ok and "not held here" in failed.reason
