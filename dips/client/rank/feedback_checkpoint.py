"""Error feedback in a checkpoint: one tensor of bases and one of debts, each over all pieces of this rank in order."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dips.client.rank.feedback import Feedback
from dips.ids import VersionId

NAMES = ("base", "owed")


def save_feedback(feedback: Feedback) -> dict[str, torch.Tensor]:
    """Return copies of base and debt; empty for a rank that pushes nothing."""
    parts = zip(NAMES, feedback.checkpoint_arrays(), strict=True)
    return {name: torch.cat([torch.from_numpy(a) for a in arrays]) for name, arrays in parts if arrays}


def count_feedback(feedback: Feedback) -> dict[str, int]:
    """Return the number of elements of each tensor of `save_feedback`, by name."""
    sizes = [a.size for a in feedback.checkpoint_arrays()[0]]
    return dict.fromkeys(NAMES, sum(sizes)) if sizes else {}


def restore_feedback(feedback: Feedback, version: VersionId, saved: Mapping[str, torch.Tensor]) -> None:
    """Restore the tensors of `save_feedback`; names and sizes must be those of `count_feedback`."""
    sizes = [a.size for a in feedback.checkpoint_arrays()[0]]
    base, owed = ([t.numpy() for t in saved[name].split(sizes)] if sizes else [] for name in NAMES)
    feedback.restore_debt(version, base, owed)
