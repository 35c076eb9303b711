"""The checks of the demo's claims: losses of the global model, and the ledger's record."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from dips.commands.plot import PUSHES, RESULTS
from dips.demo.data import Text, bigram_entropy
from dips.demo.layout import CLUSTERS, EVALUATE_EVERY, FULL_S
from dips.demo.lost_machines import LostMachines
from dips.demo.model import build, loss_of, next_byte_loss
from dips.ids import VersionId
from dips.protocol.enums import SlaveState
from dips.protocol.view import RunView
from dips.store.version import MOMENTUM, THETA
from dips.view.points import RoundHistory

VALIDATION_ROWS, VALIDATION_LENGTH = 256, 256
BATCH = 32
FIRST_LOSS = (5.2, 5.8)  # nats: an untrained model has ln 256 = 5.545


Mark = Mapping[str, Any]  # a line of a timeline


@dataclass(frozen=True, slots=True)
class Losses:
    """Losses in nats per byte on the same validation bytes."""

    first: float  # version 0
    head: float  # the last version, from the slaves' snapshots
    exported: float  # the file of `dips export`, in a plain module
    bigrams: float  # entropy of a byte given the one before it
    left: float | None = None  # the version from which the run continued after a loss; None: there was none
    transformers: float | None = None  # the exported directory, by from_pretrained; None: transformers is not installed


@dataclass(frozen=True, slots=True)
class Kill:
    """The processes that the demo killed, with the state at that time; `slave` is None without kills."""

    cluster: str | None = None
    slave: str | None = None
    slave_sinc: int = 0
    head: VersionId = VersionId(0, 0)  # when the slave was killed
    lost: LostMachines | None = None  # directories were removed, too


@dataclass(frozen=True, slots=True)
class Check:
    claim: str
    holds: bool
    found: str


# ---- losses ---------------------------------------------------------------------------------------------------------


def evaluate_losses(
    initial: Path,
    snapshots: Sequence[Path],
    exported: Path,
    sample: Text,
    left: Sequence[Path] = (),
    directory: Path | None = None,
) -> Losses:
    """Evaluate version 0, the head and the exported file.

    snapshots  directories of the head, one per slave
    left       copies of the version from which the run continued after a loss; empty: there was none
    directory  of the head for transformers; None: there is none
    """
    models = (_join_files([initial]), _join_files(snapshots), load_file(exported))
    first, head, plain = (validation_loss(model, sample) for model in models)
    before = validation_loss(_join_files(left), sample) if left else None
    pretrained = _pretrained_loss(directory, sample) if directory else None
    return Losses(first, head, plain, bigram_entropy(sample), before, pretrained)


def _join_files(paths: Sequence[Path]) -> dict[str, torch.Tensor]:
    """Return θ from several versions' directories, or from one exported file with the parameters' own names."""
    files = [file for path in paths for file in (path.glob("*.safetensors") if path.is_dir() else [path])]
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    return {name.removeprefix(THETA): tensor for name, tensor in tensors.items() if not name.startswith(MOMENTUM)}


def validation_loss(theta: Mapping[str, torch.Tensor], sample: Text) -> float:
    """Load θ into a plain module, strictly, and return its loss; sample uint8[rows, length + 1]."""
    model = build()
    model.load_state_dict(dict(theta))
    return _mean_loss(partial(loss_of, model), sample)


def _pretrained_loss(directory: Path, sample: Text) -> float:
    """Return the loss as a user of transformers would compute it: from_pretrained, logits, cross entropy."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(directory)
    return _mean_loss(lambda batch: next_byte_loss(model(batch[:, :-1]).logits, batch), sample)


def _mean_loss(loss_of_batch: Callable[[torch.Tensor], torch.Tensor], sample: Text) -> float:
    sequences = torch.from_numpy(sample.astype(np.int64))
    with torch.no_grad():
        parts = [(float(loss_of_batch(batch)), len(batch)) for batch in sequences.split(BATCH)]
    return sum(loss * rows for loss, rows in parts) / len(sequences)


# ---- checks ---------------------------------------------------------------------------------------------------------


def check_claims(
    found: Losses,
    rounds: Sequence[RoundHistory],
    status: RunView,
    kill: Kill,
    timelines: Mapping[str, Sequence[Mark]],
    seconds: float,
) -> list[Check]:
    """Check every claim of a run of this kind against its results.

    status     the master's last status
    timelines  of each cluster's agent
    seconds    duration of the run; the bigram entropy is not checked for a short one
    """
    parts = [_about_losses(found, seconds), _about_export(found), _about_pace(rounds), _about_end(status)]
    listed = [check for part in parts for check in part] + [_about_evaluations(rounds)]
    if kill.slave and kill.cluster:
        listed.append(_about_killed_cluster(kill.cluster, rounds, timelines[kill.cluster]))
        listed.append(_about_killed_slave(kill, status, timelines))
    if kill.lost is not None:
        made = _about_mirrors if kill.lost.way == "mirrored" else _about_recovery
        listed += [made(kill.lost, rounds), *_about_loss_since(kill.lost, found)]
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
    losses = {"exported file": found.exported}
    if found.transformers is not None:
        losses["directory that from_pretrained reads"] = found.transformers
    return [
        Check(f"the {what} has the head's loss to 4 decimals", abs(loss - found.head) < 5e-5, f"{loss:.4f}")
        for what, loss in losses.items()
    ]


def _about_pace(rounds: Sequence[RoundHistory]) -> list[Check]:
    fast, slow = (sum(f.inner_steps for r in rounds for f in r.folds if f.push.cluster == name) for name in CLUSTERS)
    claim = "fast took more inner steps than slow, and both took part"
    return [Check(claim, fast > slow > 0, f"{fast} and {slow}")]


def _about_evaluations(rounds: Sequence[RoundHistory]) -> Check:
    """Check that the versions due were evaluated; the last evaluation may have been running when the run ended."""
    due = [r for r in rounds if r.version and not r.undone and r.version.version % EVALUATE_EVERY == 0]
    losses = [r.result.numbers.get("validation_loss") for r in due if r.result and r.result.ok]
    found = ", ".join(f"{loss:.3f}" for loss in losses if loss is not None)
    claim = f"every {EVALUATE_EVERY}th version was evaluated while the run went on"
    return Check(claim, len(losses) >= len(due) - 1, f"{len(losses)} of {len(due)}: {found or 'none'}")


def check_curve(directory: Path, rounds: Sequence[RoundHistory]) -> Check:
    """Compare the files of `dips plot` with the ledger's rows: each accepted push, each evaluation."""
    folds = [(str(r.round), f.push.cluster, _spell_loss(f.loss)) for r in rounds for f in r.folds]
    drawn = [(p["round"], p["cluster"], p["loss"]) for p in _read_csv(directory / PUSHES) if p["kind"] == "accepted"]
    said = [(str(r.round), n, str(x)) for r in rounds if r.result and r.result.ok for n, x in r.result.numbers.items()]
    results = [(p["round"], p["name"], p["value"]) for p in _read_csv(directory / RESULTS) if p["name"]]
    found = f"{len(drawn)} losses of pushes, {len(results)} of evaluations"
    return Check("the curve has the ledger's numbers, all of them", drawn == folds and results == said, found)


def _spell_loss(loss: float | None) -> str:
    return "" if loss is None else str(loss)


def _read_csv(path: Path) -> list[dict[str, str]]:
    """Return the rows of a file; empty if it does not exist."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _about_end(status: RunView) -> list[Check]:
    finished, head = status.finished, status.head
    return [Check("the run is finished at its head", finished == head, f"finished {finished}, head {head}")]


def _about_killed_cluster(name: str, rounds: Sequence[RoundHistory], timeline: Sequence[Mark]) -> Check:
    """Count versions whose round opened after the new trainer attached, which cannot contain a push of the
    killed one.
    """
    lives = [mark["at"] for mark in timeline if mark["kind"] == "trainer_attached"]
    after = [r for r in rounds if len(lives) > 1 and r.opened > lives[1] and _was_accepted(name, r)]
    text = f"{len(after)}, first {after[0].version}" if after else f"none; its trainer had {len(lives)} lives"
    return Check(f"{name}, whose trainer was killed, has accepted contributions after that", bool(after), text)


def _about_killed_slave(kill: Kill, status: RunView, timelines: Mapping[str, Sequence[Mark]]) -> Check:
    """Check that the killed slave's new incarnation has sent layers of a version made after the kill, and a cluster
    installed it.
    """
    slave = status.slaves[kill.slave or ""]
    pulled = [
        version
        for marks in timelines.values()
        for mark in marks
        if mark["kind"] == "pull_end" and mark["installed"]
        if (version := VersionId.parse(mark["version"])) > kill.head
    ]
    reborn = slave.sinc > kill.slave_sinc and slave.state is SlaveState.READY
    sent = slave.heartbeat.bytes_out if slave.heartbeat is not None else 0
    text = f"{len(pulled)} pulls of versions after {kill.head}, {sent / 1e6:.0f} MB; it holds {slave.version}"
    claim = f"{kill.slave}, which was killed, serves versions made after that"
    return Check(claim, bool(pulled) and reborn and sent > 0, text)


def _about_mirrors(lost: LostMachines, rounds: Sequence[RoundHistory]) -> Check:
    """Check that only the outer steps missing in the slave's mirror are lost, and that the ledger has all
    before them.
    """
    lag = lost.head.version - lost.left.version
    claim = f"the run went on at {lost.left}, which {lost.owners[0]}'s mirror held: {lag} outer steps are lost"
    lineage = [r for r in rounds if r.version is not None and not r.undone]
    after = next((r for r in lineage if r.version is not None and r.version.round > lost.head.round), None)
    before = [r for r in lineage if r.version is not None and r.version.round <= lost.left.round]
    if after is None or after.parent is None:
        return Check(claim, False, "no version was made after that")
    text = f"{after.version} follows {after.parent}, and {len(before)} versions before it are in the ledger"
    return Check(claim, after.parent == lost.left and len(before) == lost.left.version, text)


def _about_recovery(lost: LostMachines, rounds: Sequence[RoundHistory]) -> Check:
    claim = f"the run went on from {lost.left}, which was exported before, by dips recover"
    made = next((r for r in rounds if r.recovered), None)
    after = [r for r in rounds if made is not None and r.version is not None and r.round > made.round]
    if made is None or not after:
        return Check(claim, False, "no version was made of the file" if made is None else "none was made after it")
    text = (
        f"{made.version} was made of the file, then {len(after)} outer steps; {(made.recovered or '').split(': ')[-1]}"
    )
    return Check(claim, after[0].parent == made.version, text)


def _about_loss_since(lost: LostMachines, found: Losses) -> list[Check]:
    if found.left is None:
        return []
    claim = f"the loss went on falling from there: {found.left:.4f} at {lost.left}"
    return [Check(claim, found.head < found.left, f"{found.head:.4f}")]


def _was_accepted(cluster: str, round_: RoundHistory) -> bool:
    return any(fold.push.cluster == cluster for fold in round_.folds)
