"""The demo's checks bite: each claim has a run that does not keep it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from dips.commands.plot import PUSHES, RESULTS
from dips.demo.lost_machines import LostMachines, Way
from dips.demo.model import build, loss_of
from dips.demo.verdict import Check, Kill, Losses, check_claims, check_curve, evaluate_losses, validation_loss
from dips.ids import PushId, VersionId
from dips.protocol.enums import OutcomeKind
from dips.protocol.records import FoldRow, OutcomeRow
from dips.protocol.view import RunView, SlaveView
from dips.view.points import PushPoint, ResultHistory, ResultPoint, RoundHistory, list_points, write_csv
from tests.unit.view.views import make_run, make_slave

GOOD = Losses(first=5.55, head=1.9, exported=1.9, bigrams=2.4)


def applied(number: int, opened: float, *clusters: str) -> RoundHistory:
    """A round that made version `number` of one push of each cluster."""
    version, parent = VersionId(number, number), VersionId(number - 1, number - 1)
    folds = tuple(FoldRow(PushId(c, 1, number), parent, 10, 2, 1.0, 1.0, 0.0, 2.0, ()) for c in clusters)
    return RoundHistory(number, "applied", "", opened, opened + 1, version, parent, 10, 1.0, 1.0, False, folds, ())


ROUNDS = [applied(1, 10, "fast"), applied(2, 20, "fast", "slow"), applied(3, 40, "fast", "slow")]
STATUS = make_run(
    head="v3@r3", finished="v3@r3", slaves={"slave-1": make_slave(sinc=2, version="v3@r3", bytes_out=1000)}
)
TIMELINES: dict[str, list[dict[str, Any]]] = {
    "fast": [{"kind": "pull_end", "installed": True, "version": "v3@r3", "at": 42.0}],
    "slow": [{"kind": "trainer_attached", "at": 5.0}, {"kind": "trainer_attached", "at": 35.0}],
}
KILL = Kill("slow", "slave-1", slave_sinc=1, head=VersionId(2, 2))


def failed(
    found: Losses = GOOD,
    rounds: Sequence[RoundHistory] = ROUNDS,
    status: RunView = STATUS,
    kill: Kill = KILL,
    timelines: dict[str, list[dict[str, Any]]] = TIMELINES,
    seconds: float = 200.0,
) -> list[str]:
    listed: list[Check] = check_claims(found, rounds, status, kill, timelines, seconds)
    return [check.claim for check in listed if not check.holds]


def test_a_good_run_passes() -> None:
    """Every claim holds for a run that keeps them all."""
    assert failed() == []
    assert len(check_claims(GOOD, ROUNDS, STATUS, KILL, TIMELINES, 200.0)) == 8


@pytest.mark.parametrize(
    ("found", "word"),
    [
        (replace(GOOD, first=4.9), "version 0 knows nothing"),
        (replace(GOOD, head=2.5, exported=2.5), "below the bigram entropy"),
        (replace(GOOD, exported=1.9001), "exported file"),
    ],
)
def test_losses(found: Losses, word: str) -> None:
    """A first loss not of ignorance, a head that learned too little, an export that differs: each fails."""
    assert [claim for claim in failed(found) if word in claim]
    assert len(failed(found)) == 1


def test_a_short_run_is_held_to_less() -> None:
    """Without time to get below the bigrams a run must still gain a nat, and nobody was killed in it."""
    assert failed(replace(GOOD, head=3.0, exported=3.0), kill=Kill(), seconds=60) == []
    assert failed(replace(GOOD, head=5.0, exported=5.0), kill=Kill(), seconds=60) != []


@pytest.mark.parametrize("rounds", [ROUNDS[1:], ROUNDS[:1], []])
def test_pace(rounds: list[RoundHistory]) -> None:
    """Fast must have trained more than slow, and slow in one version at least."""
    assert any("fast took more" in claim for claim in failed(rounds=rounds))


def test_evaluations() -> None:
    """Each tenth version was evaluated; one whose process was under way at the end may be missing, two may not."""
    found = ResultHistory(True, "", {"validation_loss": 2.0}, 1.0, 0.0)
    tenth, last = replace(applied(10, 50, "fast"), result=found), applied(20, 60, "fast")
    assert failed(rounds=[*ROUNDS, tenth, last]) == []
    wrong = [*ROUNDS, applied(10, 50, "fast"), last]
    assert failed(rounds=wrong) == ["every 10th version was evaluated while the run went on"]


def test_the_end() -> None:
    """A run that is not finished, or whose head is not what it finished at, fails."""
    assert failed(status=replace(STATUS, finished=None)) == ["the run is finished at its head"]


def test_a_push_of_the_dead_does_not_count() -> None:
    """A contribution in a round that was open before the new trainer came may be the old one's."""
    early = [*ROUNDS[:2], applied(3, 34, "fast", "slow"), applied(4, 41, "fast")]
    assert any("accepted contributions after" in claim for claim in failed(rounds=early))
    assert any(
        "accepted contributions after" in claim
        for claim in failed(timelines={**TIMELINES, "slow": TIMELINES["slow"][:1]})
    )


@pytest.mark.parametrize(
    "slave",
    [
        make_slave(sinc=1, bytes_out=1000),
        make_slave("lost", "silent", sinc=2, bytes_out=1000),
        make_slave(sinc=2, bytes_out=0),
        replace(make_slave(sinc=2), heartbeat=None),
    ],
)
def test_a_slave_that_did_not_come_back(slave: SlaveView) -> None:
    """The old incarnation, a lost one, or one that sent nothing, serves nobody."""
    assert any("slave-1" in claim for claim in failed(status=replace(STATUS, slaves={"slave-1": slave})))


def test_a_version_from_before_the_kill_does_not_count() -> None:
    """Serving an old version again proves nothing."""
    old = {**TIMELINES, "fast": [{"kind": "pull_end", "installed": True, "version": "v2@r2", "at": 42.0}]}
    refused = {**TIMELINES, "fast": [{"kind": "pull_end", "installed": False, "version": "v3@r3", "at": 42.0}]}
    assert any("slave-1" in claim for claim in failed(timelines=old))
    assert any("slave-1" in claim for claim in failed(timelines=refused))


def lost(way: Way, left: VersionId, head: VersionId) -> Kill:
    """slave-1 was killed at `head` and lost its directory; the run could go on from `left`."""
    return replace(KILL, head=head, lost=LostMachines(way, ("slave-1",), head, left, ()))


def test_the_run_goes_on_at_the_mirrored_head_with_its_history() -> None:
    """The first version after the loss follows the mirrored one, all before it are in the ledger, the loss falls."""
    v1, v2, since = VersionId(1, 1), VersionId(2, 2), replace(GOOD, left=2.2)
    after = replace(ROUNDS[2], version=VersionId(2, 1003), round=1003, parent=v1)
    rounds = [ROUNDS[0], replace(ROUNDS[1], undone="slave-1 cannot offer it"), after]
    assert failed(since, ROUNDS, kill=lost("mirrored", v2, v2)) == []
    (claim,) = [c for c in failed(since, rounds, kill=lost("mirrored", v2, v2)) if "mirror held" in c]
    assert "went on at v2@r2" in claim
    mirrored = [
        c.claim for c in check_claims(since, rounds, STATUS, lost("mirrored", v1, v2), TIMELINES, 200.0) if c.holds
    ]
    assert any("went on at v1@r1, which slave-1's mirror held: 1 outer steps are lost" in c for c in mirrored)
    assert any("mirror held" in c for c in failed(since, ROUNDS[1:], kill=lost("mirrored", v2, v2)))
    assert any("went on falling" in c for c in failed(replace(GOOD, left=1.8), kill=lost("mirrored", v2, v2)))


def test_the_run_goes_on_from_an_exported_model() -> None:
    """A version made of the file is in the history, and the next one follows it."""
    v1, since = VersionId(1, 1), replace(GOOD, left=2.2)
    made = replace(ROUNDS[1], recovered="from saved.safetensors: no momentum was lost", folds=())
    kill = lost("unmirrored", v1, v1)
    assert not any("dips recover" in c for c in failed(since, [ROUNDS[0], made, ROUNDS[2]], kill=kill))
    for rounds in (ROUNDS, [ROUNDS[0], made], [made, replace(ROUNDS[2], parent=v1)]):
        assert any("dips recover" in c for c in failed(since, rounds, kill=kill))


def test_losses_come_from_the_files(tmp_path: Path) -> None:
    """Version 0, the slaves' snapshots put together, and the export are loaded strictly and evaluated alike."""
    torch.manual_seed(0)
    first, head = build(), build()
    parts: list[dict[str, torch.Tensor]] = [{}, {}]
    for i, (name, tensor) in enumerate(head.state_dict().items()):
        parts[i % 2][f"theta.{name}"] = tensor
        parts[i % 2][f"momentum.{name}"] = torch.zeros_like(tensor)
    for i, part in enumerate(parts):
        (tmp_path / str(i)).mkdir()
        save_file(part, tmp_path / str(i) / "model.safetensors")
    save_file(first.state_dict(), tmp_path / "first")
    save_file(head.state_dict(), tmp_path / "head")
    sample = np.random.default_rng(0).integers(0, 256, (3, 17), dtype=np.uint8)
    found = evaluate_losses(tmp_path / "first", [tmp_path / "0", tmp_path / "1"], tmp_path / "head", sample)
    assert found.head == found.exported != found.first
    assert found.left is None
    files = [tmp_path / str(i) / "model.safetensors" for i in (0, 1)]
    again = evaluate_losses(tmp_path / "first", [tmp_path / "0", tmp_path / "1"], tmp_path / "head", sample, files)
    assert again.left == found.head
    with torch.no_grad():
        assert found.head == pytest.approx(loss_of(head, torch.from_numpy(sample.astype(np.int64))).item(), rel=1e-5)
    with pytest.raises(RuntimeError, match="Missing key"):
        validation_loss({}, sample)


def test_a_curve_that_is_not_the_ledgers_is_seen(tmp_path: Path) -> None:
    """What `dips plot` writes passes; a digit that differs, or a version's evaluation that is missing, does not."""
    result = ResultHistory(True, "", {"validation_loss": 2.5}, 1.0, 50.0)
    rounds = [*ROUNDS[:2], replace(ROUNDS[2], result=result)]
    outcomes = [
        tuple(OutcomeRow(f.push, OutcomeKind.ACCEPTED, "", f.tokens, 2, 1.0, 0.0, ()) for f in r.folds) for r in rounds
    ]
    rounds = [replace(r, outcomes=told) for r, told in zip(rounds, outcomes, strict=True)]
    points, results = list_points(rounds)
    write_csv(tmp_path / PUSHES, PushPoint, (p for point in points for p in point.pushes))
    assert not check_curve(tmp_path, rounds).holds
    write_csv(tmp_path / RESULTS, ResultPoint, results)
    assert check_curve(tmp_path, rounds).holds
    (tmp_path / PUSHES).write_text((tmp_path / PUSHES).read_text().replace(",2.0,", ",2.1,", 1))
    assert not check_curve(tmp_path, rounds).holds
