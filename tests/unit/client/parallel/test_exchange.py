"""What an exchange between ranks takes of memory: blocks that together stay below a bound, in a job of any size."""

from __future__ import annotations

import pytest
import torch

from dips.client.parallel.devices import Device
from dips.client.parallel.plan import LocalRect, Redistribution
from dips.client.parallel.rect import Rect
from dips.client.parallel.shard_buffer import PartExchange, SentPart
from tests.unit.client.parallel.late_device import Meeting, ThreadRanks, run_ranks


class LargeJob:
    """Ranks that exchange over the host."""

    rank = 0

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def can_exchange(self, device: object, wanted: bool) -> bool:
        return False


@pytest.mark.parametrize(("ranks", "most"), [(2, 2 * 1000), (16, 2 * 1000), (1000, 2 * 999 * 4)])
def test_blocks_of_all_peers_together_stay_below_the_bound(ranks: int, most: int) -> None:
    """To and from each peer much more is to travel than 1,000 elements; 4 are the least that is worth a message."""
    exchange = PartExchange(LargeJob(ranks), Device(), True, transit_items=1000, least_block_items=4)  # type: ignore[arg-type]
    rects = [LocalRect(0, 0, Rect.flat_run(0, 10_000))]
    peers = dict.fromkeys(range(1, ranks), rects)
    numel = exchange.most_numel([Redistribution(peers, peers, [])])
    assert most // 4 <= numel <= most


def test_memory_of_a_block_is_used_again() -> None:
    """By the next of its direction and peer that is not larger."""
    exchange = PartExchange(LargeJob(2), Device(), True)  # type: ignore[arg-type]
    first = exchange._room("out", 1, 8)
    assert exchange._room("out", 1, 8).data_ptr() == exchange._room("out", 1, 3).data_ptr() == first.data_ptr()
    assert exchange._room("in", 1, 8).data_ptr() != first.data_ptr()


def test_a_batch_is_as_large_as_a_block_may_be() -> None:
    """Each message costs a round trip: parts that fill one exactly are one."""
    exchange = PartExchange(LargeJob(2), Device(), True, transit_items=16, least_block_items=4)  # type: ignore[arg-type]
    batches = exchange._batches([(torch.zeros(1, 4),)] * 3)
    assert [sum(view.numel() for (view,) in batch) for batch in batches] == [8, 4]


class DeviceRanks(ThreadRanks):
    """Ranks whose process group moves tensors on their devices."""

    def can_exchange(self, device: torch.device, wanted: bool) -> bool:
        return True


def test_blocks_are_not_of_a_scripts_default_type() -> None:
    """Under torch.set_default_dtype(torch.bfloat16) what ranks exchanged was rounded to that, without a word."""

    def play(rank: int, meeting: Meeting) -> list[float]:
        exchange = PartExchange(DeviceRanks(rank, meeting), Device(), True)
        here, there = (torch.full((1, 2), value, dtype=torch.float32) for value in (0.123456789, 0.0))
        exchange.move_parts(*[({1: [SentPart(here)]}, {}), ({}, {0: [there]})][rank])
        return there[0].tolist()

    torch.set_default_dtype(torch.bfloat16)
    try:
        _, received = run_ranks(2, play)
    finally:
        torch.set_default_dtype(torch.float32)
    assert received == torch.tensor([0.123456789] * 2).tolist()
