"""The library in two real ranks on gloo: what each holds and pushes, broadcasts, installs on all ranks or on none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dips.client.rank.model_checks import UNKNOWN
from dips.protocol.manifest import Manifest
from dips.wire.chunks import LayerLayout, describe_uncovered
from dips.wire.frame import Range

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
pytestmark = [pytest.mark.torchrun, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of the two ranks found; torchrun is started once for all tests of this file."""
    out = tmp_path_factory.mktemp("ranks") / "found"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(HERE / "check_ranks.py"), str(out)],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(out.with_name(f"found.{rank}").read_text()) for rank in range(2)]


@pytest.mark.parametrize("kind", ["plain", "fsdp", "hsdp", "replicated"])
def test_pieces_cover_every_parameter_once(ranks: list[dict[str, Any]], kind: str) -> None:
    """Uneven shards, empty shards, replicas: no element is pushed twice and none is forgotten."""
    manifest = Manifest.from_json(ranks[0][kind]["manifest"])
    claims = {f"rank {r}": [Range(*piece) for piece in found[kind]["pieces"]] for r, found in enumerate(ranks)}
    assert describe_uncovered(LayerLayout(manifest, range(len(manifest.layers))), claims) == []


def test_the_manifest_does_not_depend_on_the_layout(ranks: list[dict[str, Any]]) -> None:
    """Clusters of different layouts train one model."""
    assert len({found[kind]["digest"] for found in ranks for kind in ("plain", "fsdp", "hsdp")}) == 1


def test_what_is_replicated_is_shared_out(ranks: list[dict[str, Any]]) -> None:
    """Both ranks of a plain job move some of the model, together all of it once; FSDP2 ranks move their own shards."""
    moved = {kind: [sum(p[3] for p in found[kind]["pieces"]) for found in ranks] for kind in ("plain", "fsdp", "hsdp")}
    assert all(sum(shares) == 75 and min(shares) > 0 for shares in moved.values()), moved
    assert moved["fsdp"] == [found["fsdp"]["holds"] for found in ranks]


def test_a_parameter_that_is_a_sum_is_refused_by_name(ranks: list[dict[str, Any]]) -> None:
    """No rank holds the value of a partial DTensor; every rank raises the same error."""
    assert all(found["partial"].startswith("weight: its placement Partial") for found in ranks)


def test_ranks_that_disagree_all_raise_the_same_error(ranks: list[dict[str, Any]]) -> None:
    """Another shape and another layer are named, on every rank alike; no rank waits for one that has left."""
    assert len({found["odd one"] for found in ranks}) == 1
    assert "0.weight: shape (2, 2) on rank 0, (3, 2) on rank 1" in ranks[0]["odd one"]
    assert "1.weight: on rank 1, not on rank 0" in ranks[0]["odd one"]


def test_an_error_on_one_rank_is_raised_on_all(ranks: list[dict[str, Any]]) -> None:
    """Rank 0's model is fine; it raises what is wrong with rank 1's."""
    assert len({found["wrong on rank 1"] for found in ranks}) == 1
    assert ranks[0]["wrong on rank 1"].startswith("rank 1: weight: expected a parameter of one of torch.float32")


def test_what_rank_0_broadcasts_all_ranks_get(ranks: list[dict[str, Any]]) -> None:
    """And ranks are numbered without gaps."""
    assert [found["received"] for found in ranks] == ["said by rank 0"] * 2
    assert ranks[1]["numbered"] == [0, 1] and ranks[0]["numbered"][1] == 1


def test_what_holds_on_one_rank_alone_holds_on_none(ranks: list[dict[str, Any]]) -> None:
    """As the file of a checkpoint that fewer ranks have saved."""
    assert [found["hold"] for found in ranks] == [[True, False, False]] * 2


def test_a_pull_that_fails_on_one_rank_is_installed_on_none(ranks: list[dict[str, Any]]) -> None:
    """The healthy rank learns of it in the next collective and cancels its own share; no model is touched."""
    assert [found["fails"]["ok"] for found in ranks] == [False, False]
    assert [found["fails"]["untouched"] for found in ranks] == [True, True]
    assert ranks[0]["fails"]["reason"] == "another rank failed"
    assert ranks[1]["fails"]["reason"] == "UnavailableSlave: ps1 is gone"
    assert max(found["fails"]["seconds"] for found in ranks) < 5


def test_a_pull_that_succeeds_leaves_the_optimizer_alone(ranks: list[dict[str, Any]]) -> None:
    """θ is replaced in place on every rank; AdamW's moments survive."""
    for found in ranks:
        assert found["pulls"] == {"ok": True, "sevens": True, "moments": True, "nbytes": 75 * 4}


def test_what_was_trained_beside_a_pull_is_merged(ranks: list[dict[str, Any]]) -> None:
    """Frozen at 4, trained on to 4.5, pulled 9: 9.5 on every rank."""
    assert [found["merges"] for found in ranks] == [{"merged": True, "values": [9.5]}] * 2


def test_what_is_not_finite_on_one_rank_is_merged_on_none(ranks: list[dict[str, Any]]) -> None:
    """A NaN would stay for ever: both ranks install the version as it is."""
    assert [found["diverged"] for found in ranks] == [{"merged": False, "values": [9.0]}] * 2


def test_parameters_that_were_replaced_are_not_pushed(ranks: list[dict[str, Any]]) -> None:
    """`fully_shard` after OuterLoop: what would be pushed is not what is trained. All ranks raise the same error."""
    for kind, where in (("sharded late", "rank 0"), ("replaced on rank 1", "rank 1")):
        (refusal,) = {found[kind] for found in ranks}
        assert refusal.startswith("call fully_shard first, then OuterLoop"), "what is shown of a crash begins there"
        assert f"{where}: blocks.0." in refusal, refusal


@pytest.mark.parametrize(
    ("case", "named"),
    [
        ("no ddp", ""),
        ("experts", "expert.weight (ranks 0 and 1: 0.5 of its norm apart). "),
        ("hsdp apart", "embed.weight (ranks 0 and 1: "),
    ],
)
def test_replicas_that_differ_are_not_pushed(ranks: list[dict[str, Any]], case: str, named: str) -> None:
    """DDP forgotten, experts of each rank's own, HSDP's replicas: of each a part would be pushed. One error for all."""
    ((told,), other) = (found[case] for found in ranks)
    assert other == [told]
    assert told.startswith(f"ConfigError: ranks hold different values as replicas of {named}"), told
    assert "Is DistributedDataParallel or fully_shard forgotten? Experts of each rank's own must be DTensors" in told


def test_a_frozen_base_has_one_digest_however_it_is_cut(ranks: list[dict[str, Any]]) -> None:
    """That of its first elements, where they are; a rank that has other elements knows none, instead of a wrong one."""
    digests = [found["frozen"] for found in ranks]
    known = digests[0]["whole"]
    has_first = {"whole": (0, 1), "cut": (0,), "cut in two dims": (0,), "cut from rank 1 on": (1,), "on rank 1": (1,)}
    for kind, of in has_first.items():
        assert [found[kind] for found in digests] == [known if rank in of else UNKNOWN for rank in range(2)], kind
    assert known


@pytest.mark.parametrize("case", ["ddp", "shards"])
def test_replicas_that_are_alike_are_pushed(ranks: list[dict[str, Any]], case: str) -> None:
    """And shards, which differ anyhow."""
    assert [found[case] for found in ranks] == [[""], [""]]


def test_what_kernels_round_is_warned_of(ranks: list[dict[str, Any]]) -> None:
    """Replicas that another order of additions moved apart are pushed, with a warning: which, and by how much."""
    for found in ranks:
        (told,) = found["rounding"]
        assert told.startswith("ranks hold different values as replicas of weight (ranks 0 and 1: 9.5e-07 of"), told


def test_replicas_are_compared_now_and_then(ranks: list[dict[str, Any]]) -> None:
    """At the first push and each sixteenth after it."""
    for found in ranks:
        *former, last = found["later"]
        assert not any(former) and last.startswith("ConfigError: ranks hold different values as replicas of weight")
