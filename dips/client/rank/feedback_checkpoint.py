"""Error feedback in a checkpoint: one tensor of bases and one of debts, each of all this rank's pieces in order."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dips.client.rank.feedback import Feedback
from dips.errors import LocalProtocolError
from dips.ids import VersionId

NAMES = ("base", "owed")


def save_feedback(feedback: Feedback) -> dict[str, torch.Tensor]:
    """Copy base and debt; empty for a rank that pushes nothing."""
    parts = zip(NAMES, feedback.checkpoint_arrays(), strict=True)
    return {name: torch.cat([torch.from_numpy(a) for a in arrays]) for name, arrays in parts if arrays}


def restore_feedback(feedback: Feedback, version: VersionId, saved: Mapping[str, torch.Tensor]) -> None:
    """Take what `save_feedback` gave; raise LocalProtocolError if its layout differs or no lossy codec was in use."""
    sizes = [a.size for a in feedback.checkpoint_arrays()[0]]
    if any(name not in saved or saved[name].numel() != sum(sizes) for name in NAMES if sizes):
        raise LocalProtocolError("the checkpoint was saved by another layout of ranks, or without a lossy codec")
    base, owed = ([t.numpy() for t in saved[name].split(sizes)] if sizes else [] for name in NAMES)
    feedback.restore_debt(version, base, owed)
