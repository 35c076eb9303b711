"""The outer loop's part of a checkpoint, as it is written and read."""

from __future__ import annotations

import pytest
import torch

from dips.client.ipc.messages import Saved
from dips.client.rank.shard_transfer import make_state, read_saved, read_tensors
from dips.errors import LocalProtocolError
from dips.protocol.data import BegunRange

SAVED = Saved("c", "v1@r1", 3, False, 40, 4, (5,), 2.0, 4, (6, 7), 4, (BegunRange(6, 2, 8), BegunRange(7, 0, 8)))


def test_each_rank_finds_its_own_tensors() -> None:
    """Of twelve ranks in one dict: rank 1 takes nothing of rank 10 or 11."""
    state = {}
    for rank in range(12):
        state |= make_state(SAVED, 9, 77, rank, {"owed": torch.full((2,), float(rank))})
    for rank in range(12):
        assert {name: t.tolist() for name, t in read_tensors(state, rank).items()} == {"owed": [rank, rank]}


def test_what_the_agent_saved_comes_back() -> None:
    """Also from torch.distributed.checkpoint, which makes lists of tuples; another format is refused."""
    state = make_state(SAVED, 9, 77, 0, {})
    assert read_saved(state) == SAVED
    assert read_saved({key: list(v) if isinstance(v, tuple) else v for key, v in state.items()}) == SAVED
    with pytest.raises(LocalProtocolError, match="expected an outer state of format"):
        read_saved({**state, "format": state["format"] + 1})
