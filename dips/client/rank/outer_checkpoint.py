"""The outer loop's part of a cluster's checkpoint, as a state_dict. No agent, no collectives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, astuple, fields
from typing import Any

import torch

from dips.client.ipc.messages import Saved
from dips.client.rank.feedback import Feedback
from dips.errors import LocalProtocolError
from dips.ids import VersionId
from dips.protocol.data import BegunRange

# ---- feedback checkpoint --------------------------------------------------------------------------------------------


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


# ---- outer checkpoint -----------------------------------------------------------------------------------------------


STATE_FORMAT = 1  # format of the state_dict; any other is refused


def make_state(
    saved: Saved, inner_steps: int, checksum: int, rank: int, tensors: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    """Build the state_dict; this rank's number is appended to the names of its own tensors."""
    own = {f"{name}.rank{rank}": tensor for name, tensor in tensors.items()}
    taken = {"steps": inner_steps, "checksum": checksum}  # Saved has its own `inner_steps`, since the last push
    begun = tuple(number for part in saved.begun for number in astuple(part))
    return {"format": STATE_FORMAT, **taken, **asdict(saved), "begun": begun, **own}


def read_saved(state: Mapping[str, Any]) -> Saved:
    """Return the agent's part. Raises LocalProtocolError for another format."""
    if state.get("format") != STATE_FORMAT:
        raise LocalProtocolError(
            f"expected an outer state of format {STATE_FORMAT}, got {state.get('format')!r}; load it with the Di-PS "
            "that saved it, or leave it out: then the cluster pulls the run's newest version"
        )
    values = {f.name: _restore_tuple(state[f.name]) for f in fields(Saved)}
    flat = values["begun"]
    return Saved(**{**values, "begun": tuple(BegunRange(*flat[i : i + 3]) for i in range(0, len(flat), 3))})


def read_tensors(state: Mapping[str, Any], rank: int) -> dict[str, torch.Tensor]:
    """Return the tensors of one rank, by the names passed to `make_state`."""
    suffix = f".rank{rank}"
    return {name.removesuffix(suffix): tensor for name, tensor in state.items() if name.endswith(suffix)}


def _restore_tuple(value: Any) -> Any:
    """Turn lists into the tuples that were saved: torch.distributed.checkpoint returns lists."""
    return tuple(int(v) for v in value) if isinstance(value, list | tuple) else value
