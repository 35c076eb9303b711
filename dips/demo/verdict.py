"""What the demo claims, and whether it holds: losses of the global model, the ledger's account, a list of checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from dips.demo.data import Text, bigram_entropy
from dips.demo.layout import CLUSTERS, EVALUATE_EVERY, FULL_S
from dips.demo.model import build, loss_of
from dips.ids import VersionId
from dips.master.ledger_history import RoundHistory
from dips.slave.snapshot_manifest import MODEL_FILE, THETA

VALIDATION_ROWS, VALIDATION_LENGTH = 256, 256
BATCH = 32
FIRST_LOSS = (5.2, 5.8)  # nats: a model that knows nothing has ln 256 = 5.545


Mark = Mapping[str, Any]  # a line of a timeline


@dataclass(frozen=True, slots=True)
class Losses:
    """Nats per byte on the same validation bytes."""

    first: float  # version 0
    head: float  # the last version, as the slaves' snapshots hold it
    exported: float  # the file that `dips export` wrote, in a plain module
    bigrams: float  # entropy of a byte given the one before it


@dataclass(frozen=True, slots=True)
class Kill:
    """Whom the demo killed, and what was true then; `slave` is None in a run without kills."""

    cluster: str | None = None
    slave: str | None = None
    slave_sinc: int = 0
    head: VersionId = VersionId(0, 0)  # when the slave was killed
    lost: bool = False  # its directory and the master's were removed


@dataclass(frozen=True, slots=True)
class Check:
    claim: str
    holds: bool
    found: str


# ---- losses ---------------------------------------------------------------------------------------------------------


def evaluate_losses(initial: Path, snapshots: Sequence[Path], exported: Path, sample: Text) -> Losses:
    """Evaluate version 0, the head and the exported file; `snapshots` are the directories of the head, one a slave."""
    theta = {
        name.removeprefix(THETA): tensor
        for path in snapshots
        for name, tensor in load_file(path / MODEL_FILE).items()
        if name.startswith(THETA)
    }
    models = (load_file(initial), theta, load_file(exported))
    first, head, plain = (validation_loss(model, sample) for model in models)
    return Losses(first, head, plain, bigram_entropy(sample))


def validation_loss(theta: Mapping[str, torch.Tensor], sample: Text) -> float:
    """Load θ into a plain module, strictly, and evaluate it; sample uint8[rows, length + 1]."""
    model = build()
    model.load_state_dict(dict(theta))
    sequences = torch.from_numpy(sample.astype(np.int64))
    with torch.no_grad():
        parts = [(float(loss_of(model, batch)), len(batch)) for batch in sequences.split(BATCH)]
    return sum(loss * rows for loss, rows in parts) / len(sequences)


# ---- checks ---------------------------------------------------------------------------------------------------------


def check_claims(
    found: Losses,
    rounds: Sequence[RoundHistory],
    status: Mapping[str, Any],
    kill: Kill,
    timelines: Mapping[str, Sequence[Mark]],
    seconds: float,
) -> list[Check]:
    """Hold every claim that a run of this kind makes against what came.

    status     the master's last
    timelines  of each cluster's agent
    seconds    of the run; a short one is not held to the bigram entropy
    """
    made = [_about_losses(found, seconds), _about_export(found), _about_pace(rounds), _about_end(status)]
    listed = [check for part in made for check in part] + [_about_evaluations(rounds)]
    if kill.slave and kill.cluster:
        listed.append(_about_killed_cluster(kill.cluster, rounds, timelines[kill.cluster]))
        listed.append(_about_killed_slave(kill, status, timelines))
    if kill.lost:
        listed.append(_about_lost_machines(kill, rounds))
    return listed


def _about_losses(found: Losses, seconds: float) -> list[Check]:
    low, high = FIRST_LOSS
    start = f"version 0 knows nothing: between {low} and {high} nats per byte"
    listed = [Check(start, low < found.first < high, f"{found.first:.4f}")]
    if seconds >= FULL_S:
        claim = f"the head is below the bigram entropy of these bytes, {found.bigrams:.4f}"
        listed.append(Check(claim, found.head < found.bigrams, f"{found.head:.4f}"))
    else:
        listed.append(
            Check("the head is better than version 0 by a nat", found.head < found.first - 1, f"{found.head:.4f}")
        )
    return listed


def _about_export(found: Losses) -> list[Check]:
    same = abs(found.exported - found.head) < 5e-5
    return [Check("the exported file has the head's loss to 4 decimals", same, f"{found.exported:.4f}")]


def _about_pace(rounds: Sequence[RoundHistory]) -> list[Check]:
    fast, slow = (sum(_was_accepted(name, r) for r in rounds) for name in CLUSTERS)
    claim = "fast took part in more outer steps than slow, and slow in some"
    return [Check(claim, fast > slow > 0, f"{fast} and {slow}")]


def _about_evaluations(rounds: Sequence[RoundHistory]) -> Check:
    """The last one's process may have been under way when the run ended."""
    due = [r for r in rounds if r.version and not r.undone and r.version.version % EVALUATE_EVERY == 0]
    losses = [r.result.numbers.get("validation_loss") for r in due if r.result and r.result.ok]
    found = ", ".join(f"{loss:.3f}" for loss in losses if loss is not None)
    claim = f"every {EVALUATE_EVERY}th version was evaluated while the run went on"
    return Check(claim, len(losses) >= len(due) - 1, f"{len(losses)} of {len(due)}: {found or 'none'}")


def _about_end(status: Mapping[str, Any]) -> list[Check]:
    finished, head = status.get("finished"), status["head"]
    return [Check("the run is finished at its head", finished == head, f"finished {finished}, head {head}")]


def _about_killed_cluster(name: str, rounds: Sequence[RoundHistory], timeline: Sequence[Mark]) -> Check:
    """Count versions whose round opened after the new trainer had joined in: no push of the dead one can be in them."""
    lives = [mark["at"] for mark in timeline if mark["kind"] == "trainer_attached"]
    after = [r for r in rounds if len(lives) > 1 and r.opened > lives[1] and _was_accepted(name, r)]
    text = f"{len(after)}, first {after[0].version}" if after else f"none; its trainer had {len(lives)} lives"
    return Check(f"{name}, whose trainer was killed, has accepted contributions after that", bool(after), text)


def _about_killed_slave(kill: Kill, status: Mapping[str, Any], timelines: Mapping[str, Sequence[Mark]]) -> Check:
    """Serving means: its new incarnation has sent its layers of a version made after the kill, and a cluster installed
    it.
    """
    slave = status["slaves"].get(kill.slave, {})
    pulled = [
        version
        for marks in timelines.values()
        for mark in marks
        if mark["kind"] == "pull_end" and mark["installed"]
        if (version := VersionId.parse(mark["version"])) > kill.head
    ]
    reborn = slave.get("sinc", 0) > kill.slave_sinc and slave.get("state") == "ready"
    sent = slave.get("bytes_out") or 0
    text = f"{len(pulled)} pulls of versions after {kill.head}, {sent / 1e6:.0f} MB; it holds {slave.get('version')}"
    claim = f"{kill.slave}, which was killed, serves versions made after that"
    return Check(claim, bool(pulled) and reborn and sent > 0, text)


def _about_lost_machines(kill: Kill, rounds: Sequence[RoundHistory]) -> Check:
    """The ledger is the run's, with what was before; undone is what a mirror did not hold yet."""
    before = [r for r in rounds if r.version is not None and r.version <= kill.head]
    undone = [str(r.version) for r in before if r.undone]
    after = [r for r in rounds if r.version is not None and r.version > kill.head]
    went_on = len(before) > len(undone) and bool(after)
    text = f"{len(before)} versions until then, {len(undone)} undone, {len(after)} after"
    return Check("the run went on at the mirrored head, with its history", went_on, text)


def _was_accepted(cluster: str, round_: RoundHistory) -> bool:
    return any(fold.push.cluster == cluster for fold in round_.folds)
