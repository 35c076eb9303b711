"""A rank's transfers over real host memory, one process and slaves that are two functions: feedback."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dips.client.ipc.messages import PushResult
from dips.client.parallel import HostMemory, LazyMemory, lay_out
from dips.client.parallel.adapter import HeldParameter, pair_blocks
from dips.client.parallel.layout import ModelLayout
from dips.client.parallel.plan import Holding, RankLayout, gather_layouts, make_plan
from dips.client.parallel.rect import box_rects
from dips.client.parallel.tensors import TorchAdapter
from dips.client.rank import transfer
from dips.client.rank.agent_client import JobCollectives
from dips.client.rank.shard_transfer import ShardTransfer, TransferRequest
from dips.client.rank.transfer import TransferIdentity, TransferStats
from dips.codecs import Codec
from dips.errors import ConfigError, UnavailableSlave
from dips.ids import GENESIS, VersionId
from dips.protocol.effects import Grant
from dips.wire.chunks import decode_body
from tests.unit.client.parallel.late_device import Meeting, ThreadRanks, run_ranks


class FakeSlaves:
    """What pulls bring and pushes leave; `fails_at` counts the pulls down to one that fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.theta: float | list[np.ndarray] = 0.0
        self.pushed: list[np.ndarray] = []
        self.fails_at = 0
        self.found: tuple[VersionId | None, list[np.ndarray]] = (None, [])  # by a pull: what it says, and what is there
        monkeypatch.setattr(transfer, "push_pieces", self._push)
        monkeypatch.setattr(transfer, "pull_pieces", self._pull)

    def _push(self, grant: Grant, base: Any, pieces: Any, *, encode: Any, **_: Any) -> TransferStats:
        sent = [(encode(piece.range, piece.array.view(np.uint8).data), piece.length) for piece in pieces]
        self.pushed = [decode_body(Codec.INT8, body, length).copy() for body, length in sent]
        return TransferStats(0, 0.0, 1)

    def _pull(self, grant: Grant, base: Any, pieces: Any, held: Any = None, **_: Any) -> TransferStats:
        self.found = held, [piece.array.copy() for piece in pieces]
        self.fails_at -= 1
        if self.fails_at == 0:
            raise UnavailableSlave("ps1 is gone")
        for number, piece in enumerate(pieces):
            piece.array[:] = self.theta if isinstance(self.theta, float) else self.theta[number]
        return TransferStats(0, 0.0, 1)


@pytest.fixture
def slaves(monkeypatch: pytest.MonkeyPatch) -> FakeSlaves:
    return FakeSlaves(monkeypatch)


class TransferRank:
    """A rank of a job of one, under int8 pushes."""

    def __init__(
        self,
        memory: type[HostMemory] = HostMemory,
        codec: Codec = Codec.INT8,
        pull_codec: Codec = Codec.FP32,
        dtype: torch.dtype = torch.float32,
        optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
    ) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)).to(dtype)
        self.optimizer = optimizer(self.model.parameters(), lr=0.1)  # type: ignore[call-arg]
        collectives = JobCollectives()
        layout = lay_out(self.model, collectives, None if optimizer is torch.optim.SGD else self.optimizer)
        self.transfers = ShardTransfer(
            memory(layout.adapter, layout.held, layout.plan, collectives), collectives, 1.0, codec, pull_codec
        )
        self._seq = 0

    def request(self, version: VersionId, accepted: int, codec: Codec) -> TransferRequest:
        self._seq += 1
        base = None if codec == Codec.FP32 else version
        grant = Grant(version, (), 60.0, codec, base)
        return TransferRequest(grant, TransferIdentity("r", "c", 1, self._seq, 0), lambda *_: "", accepted)

    def push(self, version: VersionId, accepted: int = 0) -> int:
        """Push differences to `version`; return the push's seq."""
        assert self.transfers.begin_push(self.request(version, accepted, Codec.INT8)).wait(5).ok
        return self._seq

    def pull(self, version: VersionId, accepted: int = 0) -> None:
        assert self.transfers.begin_pull(self.request(version, accepted, Codec.FP32)).wait(5).ok
        self.transfers.install_version(version)

    @torch.no_grad()
    def train(self) -> None:
        for p in self.model.parameters():
            p.add_(torch.randn_like(p) * 1e-2)

    def owed(self) -> np.ndarray:
        return self.transfers.checkpoint_tensors()["owed"].numpy().copy()


V1, V2 = VersionId(1, 1), VersionId(2, 2)


@pytest.fixture
def indebted(slaves: FakeSlaves) -> TransferRank:
    """A rank whose first push was accepted and whose second is out: it owes what the first one rounded away."""
    rank = TransferRank()
    rank.pull(GENESIS)
    rank.train()
    first = rank.push(GENESIS)
    rank.pull(V1, accepted=first)
    assert rank.owed().any(), "the pull settled the first push"
    rank.train()
    rank.push(V1, accepted=first)
    return rank


def test_an_accepted_push_is_settled_by_the_next_pull(indebted: TransferRank) -> None:
    """What it carried of the debt is paid, what it rounded away is the new debt."""
    before = indebted.owed()
    indebted.pull(V2, accepted=indebted._seq)
    assert indebted.owed().any() and not np.array_equal(indebted.owed(), before)


def test_an_accepted_push_is_settled_by_the_next_push(indebted: TransferRank, slaves: FakeSlaves) -> None:
    """Its pull failed, so the model still holds what was rounded away: the next push carries the difference alone."""
    indebted.push(V1, accepted=indebted._seq)
    assert not indebted.owed().any()


@pytest.mark.parametrize("pull", ["fails", "never begins"])
def test_a_checkpoint_owes_nothing_that_its_model_contains(
    indebted: TransferRank, slaves: FakeSlaves, pull: str
) -> None:
    """An accepted push without its pull: who resumes pushes the difference alone, as this rank would. The result of an
    older push settles nothing.
    """
    seq, before = indebted._seq, indebted.owed()
    older, result = (PushResult(1, number, "accepted", "") for number in (seq - 1, seq))
    assert np.array_equal(indebted.transfers.checkpoint_tensors(older)["owed"].numpy(), before)
    if pull == "fails":
        slaves.fails_at = 1
        assert not indebted.transfers.begin_pull(indebted.request(V2, seq, Codec.FP32)).wait(5).ok
    saved, resumed = indebted.transfers.checkpoint_tensors(result), TransferRank()
    resumed.model.load_state_dict(indebted.model.state_dict())
    resumed.transfers.restore_tensors(V1, saved)
    pushed = []
    for rank in (indebted, resumed):
        rank.push(V1, accepted=seq if rank is indebted else 0)
        pushed.append(slaves.pushed)
    assert all(map(np.array_equal, *pushed)) and not saved["owed"].any()


def test_a_checkpoint_settles_an_accepted_push_for_good(indebted: TransferRank) -> None:
    """The pull that comes later leaves the debt of that push, as if nothing had been saved before."""
    saved, seq = indebted.transfers.checkpoint_tensors(PushResult(1, indebted._seq, "accepted", "")), indebted._seq
    indebted.pull(V2, accepted=seq)
    assert indebted.owed().any() and not saved["owed"].any()


def test_a_checkpoint_settles_no_push_that_was_skipped(indebted: TransferRank) -> None:
    """Its outcome is known as that of an accepted one is: the debt is the one before it."""
    before = indebted.owed()
    saved = indebted.transfers.checkpoint_tensors(PushResult(1, indebted._seq, "skipped", ""))
    assert np.array_equal(saved["owed"].numpy(), before)


@pytest.mark.parametrize("outcome", ["skipped", "gated"])
def test_a_push_that_was_not_accepted_changes_nothing_that_is_owed(
    indebted: TransferRank, slaves: FakeSlaves, outcome: str
) -> None:
    """Skipped: the same push again is bit for bit the same. Gated: the debt outlives the pull."""
    before, carried = indebted.owed(), slaves.pushed
    if outcome == "skipped":
        indebted.push(V1, accepted=1)
        assert all(map(np.array_equal, slaves.pushed, carried))
    else:
        indebted.pull(V2, accepted=1)
    assert np.array_equal(indebted.owed(), before)


def test_a_lossy_push_without_its_base_fails(slaves: FakeSlaves) -> None:
    """Differences to a version that is not held here would be differences to nothing."""
    rank = TransferRank()
    result = rank.transfers.begin_push(rank.request(V1, 0, Codec.INT8)).wait(5)
    assert not result.ok and "differences to v1@r1, not held here" in result.reason


@pytest.mark.parametrize("codec", [Codec.FP32, Codec.INT8])
def test_a_pull_of_updates_begins_with_the_version_that_it_names(slaves: FakeSlaves, codec: Codec) -> None:
    """Whatever was pushed, or came of a pull that failed: the host buffer is the base again, and HELLO names it."""
    rank = TransferRank(codec=codec, pull_codec=Codec.INT8)
    slaves.theta = 0.5
    rank.pull(GENESIS)
    assert slaves.found[0] is None
    rank.train()
    rank.transfers.begin_push(rank.request(GENESIS, 0, codec)).wait(5)
    slaves.theta = 0.75
    rank.pull(V1)
    assert slaves.found[0] == GENESIS and all((a == 0.5).all() for a in slaves.found[1])
    slaves.theta, slaves.fails_at = 9.0, 1
    assert not rank.transfers.begin_pull(rank.request(V2, 0, Codec.FP32)).wait(5).ok
    rank.pull(V2)
    assert slaves.found[0] == V1 and all((a == 0.75).all() for a in slaves.found[1])


def test_without_updates_a_pull_names_nothing(indebted: TransferRank, slaves: FakeSlaves) -> None:
    """Lossy pushes keep a base as well; it is not spent on a copy that nobody needs."""
    assert slaves.found[0] is None


@pytest.mark.parametrize("codec", [Codec.FP32, Codec.INT8])
def test_updates_are_added_to_what_was_pulled_not_to_what_16_bits_hold_of_it(slaves: FakeSlaves, codec: Codec) -> None:
    """The model moves to bf16 and back to the slaves: neither the base nor a push of an untrained model is rounded."""
    rank = TransferRank(codec=codec, pull_codec=Codec.INT8)
    rank.model.bfloat16()
    for version, held, theta in ((GENESIS, None, 0.1), (V1, GENESIS, 0.10001), (V2, V1, 0.10002)):
        slaves.theta = theta
        rank.pull(version)
        assert slaves.found[0] == held
        rank.transfers.begin_push(rank.request(version, 0, codec)).wait(5)
        carried = slaves.pushed if codec == Codec.INT8 else [piece.array for piece in rank.transfers._memory.pieces]
        untrained = np.float32(0.0 if codec == Codec.INT8 else theta)
        assert carried and all((array == untrained).all() for array in carried)
    assert all((array == np.float32(0.10001)).all() for array in slaves.found[1])
    assert all((p == torch.tensor(0.10002).bfloat16()).all() for p in rank.model.parameters())


def test_a_model_that_is_not_finite_is_not_pushed(slaves: FakeSlaves) -> None:
    """One infinity: nothing is frozen, nothing travels, and the result names the parameter."""
    rank = TransferRank(codec=Codec.FP32)
    rank.pull(GENESIS)
    with torch.no_grad():
        next(rank.model.parameters()).view(-1)[0] = float("inf")
    result = rank.transfers.begin_push(rank.request(GENESIS, 0, Codec.FP32)).wait(5)
    assert (result.ok, result.diverged) == (False, True) and "is not finite on rank 0" in result.reason
    assert not slaves.pushed


def test_a_checkpoint_of_another_layout_or_codec_is_found(indebted: TransferRank) -> None:
    """Before anything is asked for it: what is lacking, by name; what is there beyond is passed over."""
    saved = indebted.transfers.checkpoint_tensors()
    assert indebted.transfers.find_misfit({**saved, "other": torch.zeros(3)}) == ""
    numel = saved["owed"].numel()
    lacking = {"base": saved["base"]}
    assert indebted.transfers.find_misfit(lacking) == f"rank 0 expected {numel} numbers of owed, got None"
    short = {**saved, "base": saved["base"][1:]}
    assert indebted.transfers.find_misfit(short) == f"rank 0 expected {numel} numbers of base, got {numel - 1}"
    for beyond in ({}, {"rounded": torch.zeros(3)}):
        assert TransferRank(codec=Codec.FP32).transfers.find_misfit(beyond) == ""
    started_anew = TransferRank()
    started_anew.transfers.restore_tensors(V1, saved)
    assert np.array_equal(started_anew.owed(), saved["owed"].numpy())


class UpperOrLower(TorchAdapter):
    """As FSDP2 on two ranks: each holds one half of the rows of every parameter."""

    rank = 0

    def held_parameters(self) -> list[HeldParameter]:
        held = []
        for whole in super().held_parameters():
            (rows, cols), view = whole.shape, whole.writes[0].view
            parts = box_rects((2 * rows, cols), (rows * self.rank, 0), (rows, cols))
            made = pair_blocks(whole.name, view, parts)
            held.append(HeldParameter(whole.name, (2 * rows, cols), made, made))
        return held


def transfers_of(rank: int, meeting: Meeting, halves: bool) -> ShardTransfer:
    """Return the transfers of one of two ranks, which hold halves of every parameter, or all of it as replicas do."""
    ranks: Any = ThreadRanks(rank, meeting)
    model = nn.ModuleList(nn.Linear(3, 2 if halves else 4, bias=False) for _ in range(2))
    layout = lay_out(model, ranks)
    if halves:
        adapter = UpperOrLower([model], staged=False)
        adapter.rank = rank
        held = adapter.held_parameters()
        claims = ((h.name, Holding(h.shape, *[tuple(b.rect for b in h.reads)] * 2)) for h in held)
        told, _ = gather_layouts(RankLayout.from_claims(claims, "a"), "", ranks)
        layout = ModelLayout(adapter, held, make_plan(told, rank))
    return ShardTransfer(HostMemory(layout.adapter, layout.held, layout.plan, ranks), ranks, 1.0, Codec.INT8)


def test_a_pull_waits_for_ranks_that_still_install_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replicas share host memory; one pulls V2 at once, while the other is slow to install V1 from it."""
    written = threading.Event()

    def pull(grant: Grant, base: Any, pieces: Any, **_: Any) -> TransferStats:
        for piece in pieces:
            piece.array[:] = float(grant.version.version)
            if grant.version == V2:
                written.set()
        return TransferStats(0, 0.0, 1)

    monkeypatch.setattr(transfer, "pull_pieces", pull)

    def play(rank: int, meeting: Meeting) -> list[float]:
        moving = transfers_of(rank, meeting, halves=False)
        memory = moving._memory
        requests = [
            TransferRequest(Grant(v, (), 60.0), TransferIdentity("r", "c", 1, v.version, rank), lambda *_: "")
            for v in (V1, V2)
        ]
        assert moving.begin_pull(requests[0]).wait(1).ok
        moving._begin_install(V1)
        if rank == 1:
            written.wait(0.5)
        memory.install_shard()
        found = [number for _, view in memory.named_views() for number in view.unique().tolist()]
        assert moving.begin_pull(requests[1]).wait(1).ok
        return found

    assert run_ranks(2, play) == [[1.0, 1.0], [1.0, 1.0]]


def test_as_many_numbers_of_other_elements_are_of_another_layout() -> None:
    """Two replicas push one matrix each, two shards half of both: as many numbers, of other elements."""
    digests, numels = set[int](), set[int]()
    for halves in (False, True, False):
        both = run_ranks(2, lambda rank, meeting, halves=halves: transfers_of(rank, meeting, halves))
        assert both[0].layout == both[1].layout < 1 << 63
        digests.add(both[0].layout)
        numels |= {tensor.numel() for one in both for tensor in one.checkpoint_tensors().values()}
    assert len(digests) == 2 and numels == {12}


def test_a_checksum_is_of_what_is_trained_now(slaves: FakeSlaves) -> None:
    """Memory that has moved since the last transfer, as by `model.data = …`, is found anew first."""
    rank = TransferRank()
    for parameter in rank.model.parameters():
        parameter.data = torch.zeros_like(parameter)
    assert rank.transfers.checksum() == 0


def test_what_16_bits_rounded_away_goes_with_a_checkpoint(slaves: FakeSlaves) -> None:
    """A trainer that is started anew pushes what the former one would have."""
    former, anew = (TransferRank(codec=Codec.FP32, dtype=torch.bfloat16) for _ in range(2))
    for rank, slaves.theta in ((former, 1.0 + 2.0**-10), (anew, 1.0)):
        rank.pull(V1)
    saved = former.transfers.checkpoint_tensors()
    assert anew.transfers.find_misfit(saved) == ""
    anew.transfers.restore_tensors(V1, saved)
    assert anew.transfers.checkpoint_tensors()["rounded"].unique().tolist() == [2.0**-10]


class HalfMasters(torch.optim.SGD):
    """Keeps fp32 masters of the first layer, made at its first step; the others have 16 bits alone."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"][:2]:
            self.state[parameter].setdefault("master_param", parameter.detach().float())


def test_a_checkpoint_of_masters_lacks_what_they_hold(slaves: FakeSlaves) -> None:
    """Before the first step every parameter of 16 bits rounds, afterwards those alone that have no masters: what is
    saved after the second pull is restored, what is saved before it as well.
    """
    former, anew = (TransferRank(codec=Codec.FP32, dtype=torch.bfloat16, optimizer=HalfMasters) for _ in range(2))
    states = []
    for slaves.theta in (1.0 + 2.0**-10, 1.0 + 2.0**-9):
        former.pull(V1)
        former.optimizer.step()
        former.transfers.checksum()
        states.append(former.transfers.checkpoint_tensors())
    assert [state["rounded"].numel() for state in states] == [39, 15]
    slaves.theta = 1.0
    anew.pull(V1)
    anew.optimizer.step()  # masters are loaded with the optimizer
    anew.transfers.checksum()
    for state, rounded in zip(states, (2.0**-10, 2.0**-9), strict=True):
        assert anew.transfers.find_misfit(state) == ""
        anew.transfers.restore_tensors(V1, state)
        found = anew.transfers.checkpoint_tensors()["rounded"]
        assert (found.numel(), found.unique().tolist()) == (state["rounded"].numel(), [rounded])
    other = {"rounded": torch.zeros(14)}
    assert anew.transfers.find_misfit(other) == "rank 0 expected 15 numbers of rounded, got 14"


def test_a_parameter_that_is_not_finite_beside_its_master_is_found(slaves: FakeSlaves) -> None:
    """The push reads the master alone; the forward reads the parameter."""
    rank = TransferRank(codec=Codec.FP32, dtype=torch.bfloat16, optimizer=HalfMasters)
    rank.pull(V1)
    rank.optimizer.step()
    with torch.no_grad():
        next(rank.model.parameters()).fill_(float("nan"))
    assert rank.transfers.begin_push(rank.request(V1, 0, Codec.FP32)).wait(5).diverged


def test_a_pull_ends_the_lazy_install_before_it(slaves: FakeSlaves) -> None:
    """Two pulls and no step between, the second breaks: every parameter is the first version's, none is older."""
    rank = TransferRank(LazyMemory, codec=Codec.FP32)
    slaves.theta = 1.0
    rank.pull(V1)
    slaves.theta, slaves.fails_at = 2.0, 1
    assert not rank.transfers.begin_pull(rank.request(V2, 0, Codec.FP32)).wait(5).ok
    assert all((p == 1.0).all() for p in rank.model.parameters())


def test_a_push_ends_the_lazy_install_before_it(slaves: FakeSlaves) -> None:
    """What it replaces is not looked at: a model that was not finite may be healed by then."""
    rank = TransferRank(LazyMemory)
    with torch.no_grad():
        next(rank.model.parameters()).fill_(float("nan"))
    slaves.theta = 1.0
    rank.pull(V1)
    rank.push(V1)
    assert all((p == 1.0).all() for p in rank.model.parameters())


@pytest.mark.parametrize("merge", [False, True])
def test_an_optimizer_that_undoes_a_version_is_found(slaves: FakeSlaves, merge: bool) -> None:
    """However the version came into the model: installed, or merged beside training."""
    rank, steps = TransferRank(codec=Codec.FP32), [0]
    rank.transfers._optimizer_steps = lambda: steps[0]

    def take_step() -> None:
        steps[0] += 1
        rank.transfers.on_inner_step()

    slaves.theta = 1.0
    rank.pull(V1)
    rank.train()
    take_step()
    slaves.theta = 2.0
    before = [p.detach().clone() for p in rank.model.parameters()]
    if merge:
        rank.transfers._memory.keep_pushed_shard()
        assert rank.transfers.begin_pull(rank.request(V2, 0, Codec.FP32), merge=True).wait(5).ok
        assert rank.transfers.merge_version(V2)
    else:
        rank.pull(V2)
    with torch.no_grad():
        for p, former in zip(rank.model.parameters(), before, strict=True):
            p.copy_(former)
    with pytest.raises(ConfigError, match="the first optimizer step after a pull wrote back the values from before"):
        take_step()
