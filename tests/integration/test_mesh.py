"""`MeshLoop` on real ranks: EDiT on a mesh, without a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.accelerator import DEVICE
from dips.ids import VersionId
from dips.telemetry import timeline
from tests.integration.test_adapters import under_torchrun
from tests.integration.test_constant_model import train_beside_a_plain_rank

pytestmark = pytest.mark.torchrun
WORDS = ("layer_by_layer", "synchronous", "not_finite", "timed", "idle", "carried_out", "saved")
# NCCL ends a process whose peer is gone, and has no groups for tensors of the host.
WORDS += ("refused", "a_rank_dies") if DEVICE == "cpu" else ("allocated",)
MANY = ("layer_by_layer", "long_intervals", "synchronous", "not_finite")


def run(
    directory: Path, replicas: int, ranks: int, *words: str, monkeypatch: pytest.MonkeyPatch
) -> list[dict[str, Any]]:
    monkeypatch.setenv("CHECK_MESH_CHECKPOINT", str(directory / "checkpoint"))
    out = directory / f"found{replicas}"
    return under_torchrun(ranks, out, "check_mesh.py", str(replicas), *words, within_s=300)


@pytest.fixture(scope="module")
def four(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Four ranks as 2 × 2 that went through everything; layer by layer, half of the time, only if it is chosen."""
    chosen = {item.name for item in request.session.items}
    left_out = set() if test_layer_by_layer_is_all_at_once_bit_for_bit.__name__ in chosen else {"layer_by_layer"}
    with pytest.MonkeyPatch.context() as patch:
        words = (word for word in WORDS if word not in left_out)
        return run(tmp_path_factory.mktemp("mesh"), 2, 4, *words, monkeypatch=patch)


def check_layer_by_layer(found: list[dict[str, Any]], replicas: int) -> None:
    for rank, of in enumerate(found):
        for case, got in {**of["layer_by_layer"], **of.get("long_intervals", {})}.items():
            if case == "held":
                assert 0 < got[0] <= got[1], f"rank {rank}: more than two layers on the device"
                continue
            assert got["same"] and got["agree"] and got["moved"], (rank, case, got)
            assert got["pended"] > 0, "a sync goes on in the forward"
            assert got["rolled_back"], "flagged on all: the layers stay as they were"
            counts = [sum(count > 0 for count in of_sync) for of_sync in got["left_out"]]
            assert counts[1] == 0 and max(counts) == replicas and (replicas == 1 or 1 in counts), got["left_out"]


@pytest.mark.slow
@pytest.mark.timeout(330)
def test_layer_by_layer_is_all_at_once_bit_for_bit(four: list[dict[str, Any]]) -> None:
    """Every loss, every shard and the momentum; with a warm-up, one replica flagged, all flagged; two layers held."""
    check_layer_by_layer(four, 2)


@pytest.mark.skipif(DEVICE == "cpu", reason="it asks the allocator of an accelerator")
def test_a_sync_holds_two_layers_of_outer_state(four: list[dict[str, Any]]) -> None:
    """Anchor, momentum and the next ones of a layer, and the sums of two, beyond what a step without a sync holds."""
    for of in four:
        assert 1 < max(of["allocated"]["layers"][2:]) <= 5.2, of["allocated"]


@pytest.mark.parametrize("how", ["outer", "warm-up"])
def test_with_sgd_it_is_synchronous_training(four: list[dict[str, Any]], how: str) -> None:
    """τ = 1 with an outer step of 1.0, and a warm-up, train what averaged gradients do, to 1e-6."""
    assert all(of["synchronous"][how] < 1e-6 for of in four), [of["synchronous"] for of in four]


def test_a_nan_is_left_out_and_replaced(four: list[dict[str, Any]]) -> None:
    """Only in its layer; the replica goes on with the others' model, and moments that are not NaN."""
    for of in (rank["not_finite"] for rank in four):
        assert of["finite"] and of["agree"] and of["reset"], of
        assert of["report"] == [[1], [0, 1]], of


def test_by_time_replicas_take_unequal_steps(four: list[dict[str, Any]]) -> None:
    """The fast replica does not wait for the slow one's steps, and both ranks of a replica stop after the same."""
    fast, slow = four[0]["timed"]["steps"]
    assert fast > slow > 0
    assert [of["timed"]["taken"] for of in four] == [fast, fast, slow, slow]
    assert all(of["timed"]["agree"] and of["timed"]["steps"] == [fast, slow] for of in four)
    assert [of["timed"]["syncs"] for of in four] == [2] * 4, "one clock of a replica is enough"


def test_a_replica_without_a_step_brings_what_it_holds(four: list[dict[str, Any]]) -> None:
    """Not what it had before the last sync: with an outer step of 1.0 all hold the mean."""
    for of in (rank["idle"] for rank in four):
        assert of["steps"] == [1, 0] and of["agree"] and of["moved"] and of["off"] < 1e-6, of


def test_a_replica_a_step_behind_the_last_sync_waits_for_those_that_trained_on(four: list[dict[str, Any]]) -> None:
    """`sync` carries out the one that is under way and makes another, on all ranks or on none."""
    for of in (rank["carried_out"] for rank in four):
        assert of["steps"] == [1, 0] and of["agree"], of


def test_a_checkpoint_holds_the_outer_state(four: list[dict[str, Any]]) -> None:
    """Momentum and statistics come back; between two syncs nothing is saved, since the replicas differ."""
    for of in (rank["saved"] for rank in four):
        assert "call sync before" in of["between"]
        assert of["same"] and of["moved"] and of["agree"] and of["after"]
        assert (of["syncs"], of["steps"], of["last"]) == (3, 5, 5)


REFUSED = {
    "no rectangle": "expected two dims over all 4 ranks",
    "τ = 0": "steps=0",
    "both": "seconds instead",
    "HSDP": "expected the shard dim alone",
    "DDP": "DistributedDataParallel averages gradients",
    "plain": "expected a parameter sharded by FSDP2",
    "compiled": "a sync's hooks would break the compiled graph of a FSDPLayoutBlock",
    "clip": "a norm with per_layer: true",
    "gates": "penalty.gates: expected edit or none, got dips",
    "merge": "outer.merge: rda is not made for a mesh",
    "another τ on one rank": "differ in the arguments of MeshLoop: steps",
    "other values": "differ in the first values of the model",
    "sharded over all": "sharded over ranks [0, 1, 2, 3], expected",
    "not all ranks": "expected two dims over all 4 ranks, replicas × ranks of a replica, got 1 × 2",
    "other shapes": "differ in the shards of one sync group: output.weight",
    "disagree": "ranks disagree whether a sync is due: rank 0 has taken 1 steps since the last one, rank 2 2",
}


@pytest.mark.parametrize("what", REFUSED)
def test_it_is_refused_with_one_sentence_on_all_ranks(four: list[dict[str, Any]], what: str) -> None:
    """Nobody trains on, and nobody waits for those who cannot."""
    told = {of["refused"][what] for of in four}
    assert len(told) == 1 and REFUSED[what] in told.pop(), four[0]["refused"][what]


def test_a_rank_that_dies_in_a_sync_leaves_the_last_one_whole(four: list[dict[str, Any]]) -> None:
    """The others have one sentence within the deadline, now and later, and the parameters of the sync before."""
    for of in (rank["a_rank_dies"] for rank in four[:3]):
        assert of["whole"] and of["seconds"] < 5.0 + 5.0, of
        assert of["told"][0] == of["told"][1] and "a sync did not end: a rank is gone" in of["told"][0]
        assert "LocalProtocolError: not all 4 ranks reached MeshLoop.sync" in of["missed"], "a call that it misses"


@pytest.mark.slow
@pytest.mark.timeout(330)
@pytest.mark.parametrize(
    ("replicas", "ranks"), [(1, 2), (2, 2), (2, 4), (3, 6)], ids=["1 × 2", "2 × 1", "2 × 2", "3 × 2"]
)
def test_other_meshes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replicas: int, ranks: int) -> None:
    """Likewise with one replica, with replicas of one rank, and with three replicas."""
    found = run(tmp_path, replicas, ranks, *MANY[: 3 if replicas == 1 else 4], monkeypatch=monkeypatch)
    check_layer_by_layer(found, replicas)
    assert all(max(of["synchronous"].values()) < 1e-6 for of in found)


@pytest.mark.slow
@pytest.mark.timeout(330)
def test_a_checkpoint_of_two_replicas_is_loaded_into_three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 × 2 into 3 × 2 (EDiT §4.4): all three begin with one model and go on."""
    run(tmp_path, 2, 4, "saved", monkeypatch=monkeypatch)
    for of in run(tmp_path, 3, 6, "saved", monkeypatch=monkeypatch):
        assert of["saved"]["agree"] and of["saved"]["after"]
        assert (of["saved"]["syncs"], of["saved"]["steps"], of["saved"]["last"]) == (3, 5, 5)


@pytest.mark.slow
@pytest.mark.timeout(330)
def test_a_mesh_is_a_cluster_like_any_other(tmp_path: Path) -> None:
    """2 × 2 and a plain cluster through master and slaves, the reference's number on every rank after every round. No
    push between two syncs. A rank killed in a sync: the job is started again, pulls, and its pushes count.
    """
    dying = tmp_path / "fast.out.die"
    rounds = train_beside_a_plain_rank(tmp_path, "train_mesh.py", [dying], steps=3, within_s=250)
    syncs = [mark for mark in timeline.read_marks(tmp_path / "fast/timeline.jsonl") if mark["kind"] == "mesh_sync"]
    pushes = sum(fold.push.cluster == "fast" for each in rounds for fold in each.folds)
    assert len(syncs) >= pushes and all("inner steps and" in mark["text"] for mark in syncs), "each push follows a sync"
    for rank in range(4):
        seen = json.loads((tmp_path / f"fast.out.{rank}").read_text())
        assert all(steps == 0 for _, _, steps in seen), "a push between two syncs"
        assert VersionId.parse(seen[0][0]).version >= 2, "what was written is of the second attempt"
