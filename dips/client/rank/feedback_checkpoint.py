"""Error feedback in a checkpoint: one tensor of bases and one of debts, each of all this rank's pieces in order."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dips.client.rank.feedback import Feedback
from dips.ids import VersionId

NAMES = ("base", "owed")


def save_feedback(feedback: Feedback) -> dict[str, torch.Tensor]:
    """Copy base and debt; empty for a rank that pushes nothing."""
    parts = zip(NAMES, feedback.checkpoint_arrays(), strict=True)
    return {name: torch.cat([torch.from_numpy(a) for a in arrays]) for name, arrays in parts if arrays}


def count_feedback(feedback: Feedback) -> dict[str, int]:
    """How many numbers `save_feedback` gives, by name."""
    sizes = [a.size for a in feedback.checkpoint_arrays()[0]]
    return dict.fromkeys(NAMES, sum(sizes)) if sizes else {}


def restore_feedback(feedback: Feedback, version: VersionId, saved: Mapping[str, torch.Tensor]) -> None:
    """Take what `save_feedback` gave; the names and sizes are those of `count_feedback`."""
    sizes = [a.size for a in feedback.checkpoint_arrays()[0]]
    base, owed = ([t.numpy() for t in saved[name].split(sizes)] if sizes else [] for name in NAMES)
    feedback.restore_debt(version, base, owed)
