"""On a device whose copies are as late as its streams permit every rank installs, merges and pushes what it should."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from dips.client.parallel import HostMemory, LazyMemory, UntouchedMemory, host, lay_out, layout
from dips.client.parallel.adapter import HeldParameter, pair_blocks
from dips.client.parallel.devices import DeferredScalar
from dips.client.parallel.rect import box_rects
from dips.client.parallel.tensors import TorchAdapter
from dips.wire.chunks import Piece
from tests.unit.client.parallel.late_device import (
    ON_DEVICE,
    LateDevice,
    Meeting,
    ThreadRanks,
    emulate_streams,
    run_ranks,
)

RANKS, WIDTH = 4, 16
ON_HOST = torch.device("cpu")
PATTERN = torch.arange(WIDTH * WIDTH) % 7.0  # of each weight: so that no element is right in its neighbour's place
KINDS = {"whole": HostMemory, "lazy": LazyMemory, "untouched": UntouchedMemory}


class ColumnShards(TorchAdapter):
    """As tensor parallelism by columns: each rank holds some of each row, so no rank holds a run of a weight."""

    def __init__(self, model: nn.Module, rank: int) -> None:
        super().__init__([model], staged=False)
        self._rank = rank

    def held_parameters(self) -> list[HeldParameter]:
        held = []
        for name, parameter in self._trainable_parameters():
            rows, cols = parameter.shape
            made = pair_blocks(
                name, parameter.detach(), box_rects((rows, cols * RANKS), (0, cols * self._rank), (rows, cols))
            )
            held.append(HeldParameter(name, (rows, cols * RANKS), made, made))
        return held


class LateRank:
    """One rank: its model on a late device, its host memory, and what each layer of the model should be."""

    def __init__(
        self, rank: int, meeting: Meeting, layout_kind: str, kind: str, dtype: torch.dtype, group: torch.device
    ) -> None:
        columns = layout_kind == "columns"
        cols = WIDTH // RANKS if columns else WIDTH
        self._pattern = PATTERN.view(WIDTH, WIDTH)[:, rank * cols if columns else 0 :][:, :cols]
        self.model = nn.Sequential(*[nn.Linear(cols, WIDTH, bias=False, dtype=dtype) for _ in range(2)])
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(1.0 + self._pattern)
        self.device = LateDevice(self.model)
        self.ranks: Any = ThreadRanks(rank, meeting, self.device if group == ON_DEVICE else None)
        here = LateRank.of_thread
        here.device, here.rank, here.columns = self.device, rank, columns
        here.host = f"host{rank // 2}" if layout_kind == "two hosts" else "host"
        laid = lay_out(self.model, self.ranks, spread_items=8)
        self.memory = KINDS[kind](laid.adapter, laid.held, laid.plan, self.ranks)

    of_thread = threading.local()

    @torch.no_grad()
    def train(self, delta: float) -> None:
        for parameter in self.model.parameters():
            parameter.add_(delta)

    def freeze(self) -> list[float]:
        """Push; return the smallest and largest element that would travel."""
        self._end_install()
        self.memory.gather_pieces()
        found = _extremes([piece.array - _pattern_of(piece) for piece in self.memory.pieces])
        self.memory.keep_pushed_shard()
        return found

    def _end_install(self) -> None:
        """Afterwards no rank reads the host memory any more."""
        self.memory.finish_install()
        self.ranks.all_min([0])

    def pull(self, value: float, merge: bool = False) -> None:
        """As `ShardTransfer` does: bytes arrive, all ranks know it, shards are made of them, then the model."""
        self._end_install()
        for piece in self.memory.pieces:
            piece.array[:] = value + _pattern_of(piece)
        self.ranks.all_min([0])
        if merge:
            self.memory.subtract_in_place()
        self.memory.scatter_pieces()
        if merge:
            assert self.memory.merge_shard()
        else:
            self.memory.install_shard()

    def values_of_parameters(self) -> list[float]:
        """The smallest and the largest element of the parameters once the device has done all it was given."""
        self.device.finish_work()
        return _extremes([(layer.weight.float() - self._pattern).numpy() for layer in self.model])

    @torch.no_grad()
    def values(self) -> list[float]:
        """The smallest and the largest element that a forward computes with, on the training's stream."""
        one = torch.eye(self.model[0].in_features, dtype=self.model[0].weight.dtype)
        return _extremes([(layer(one).t().float() - self._pattern).numpy() for layer in self.model])


def _pattern_of(piece: Piece) -> Any:
    return PATTERN[piece.offset : piece.offset + piece.length].numpy()


def _extremes(arrays: list[Any]) -> list[float]:
    return sorted({float(extreme) for array in arrays for extreme in (array.min(), array.max())}) if arrays else []


@pytest.fixture(autouse=True)
def late_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host, the device and the layout of the thread that asks."""
    here = LateRank.of_thread
    emulate_streams(monkeypatch)
    monkeypatch.setattr(layout.socket, "gethostname", lambda: here.host)
    monkeypatch.setattr(host, "find_device", lambda views: here.device)
    plain = layout.choose_adapter
    monkeypatch.setattr(
        layout, "choose_adapter", lambda m, *a: ColumnShards(m, here.rank) if here.columns else plain(m, *a)
    )


def play(layout_kind: str, kind: str, merge: bool, dtype: torch.dtype, group: torch.device) -> list[list[list[float]]]:
    """On each rank: what two pushes froze, and the model after the first pull and after the second."""

    def life(number: int, meeting: Meeting) -> list[list[float]]:
        rank = LateRank(number, meeting, layout_kind, kind, dtype, group)
        with rank.device, torch.no_grad():
            rank.train(1.0)
            found = [rank.freeze()]
            rank.train(0.5 if merge else 0.0)
            rank.pull(9.0, merge)
            found.append(rank.values())
            rank.train(2.0)
            found.append(rank.freeze())
            rank.pull(5.0, merge)
            found.append(rank.values())
        return found

    return run_ranks(RANKS, life)


CASES = [
    (layout_kind, kind, merge)
    for layout_kind, kinds in (("two hosts", KINDS), ("one host", KINDS), ("columns", ("whole",)))
    for kind in kinds
    for merge in (False, True)
]


def mark_cases() -> list[Any]:
    """Each case in bf16 on the device, where most can go wrong; with merges over the host, too, and without in fp32."""
    made = []
    for case in CASES:
        fast = {(torch.bfloat16, ON_DEVICE), (torch.bfloat16, ON_HOST) if case[-1] else (torch.float32, ON_DEVICE)}
        for at in ((torch.float32, ON_DEVICE), (torch.bfloat16, ON_DEVICE), (torch.bfloat16, ON_HOST)):
            name = "-".join(map(str, (*case, *at)))
            made.append(pytest.param(*case, *at, marks=() if at in fast else pytest.mark.slow, id=name))
    return made


@pytest.mark.parametrize(("layout_kind", "kind", "merge", "dtype", "group"), mark_cases())
def test_what_is_late_is_waited_for(
    layout_kind: str, kind: str, merge: bool, dtype: torch.dtype, group: torch.device
) -> None:
    """Frozen 2, pulled 9, trained to 11, frozen, pulled 5, on every rank; with merges also what was trained beside."""
    beside = 0.5 if merge else 0.0
    found = play(layout_kind, kind, merge, dtype, group)
    assert found == [[[2.0], [9.0 + beside], [11.0 + beside], [5.0]]] * RANKS


@pytest.mark.parametrize("group", [ON_DEVICE, ON_HOST], ids=str)
def test_what_16_bits_rounded_away_goes_with_what_is_sent(group: torch.device) -> None:
    """A pull of what bf16 does not hold, then a push without training: bit for bit what was pulled, on every rank."""
    pulled = 9.0 + 2.0**-9

    def life(number: int, meeting: Meeting) -> list[float]:
        rank = LateRank(number, meeting, "columns", "whole", torch.bfloat16, group)
        with rank.device:
            rank.freeze()
            rank.pull(pulled)
            assert rank.values() != [pulled]
            return rank.freeze()

    assert run_ranks(RANKS, life) == [[pulled]] * RANKS


def test_a_merge_that_is_replaced_writes_no_more() -> None:
    """Its copies were enqueued: what they round away must not come over that of the install instead."""
    pulled = 9.0 + 2.0**-9

    def life(number: int, meeting: Meeting) -> list[float]:
        rank = LateRank(number, meeting, "one host", "lazy", torch.bfloat16, ON_DEVICE)
        with rank.device, torch.no_grad():
            rank.freeze()
            rank.train(0.046875)
            rank.pull(pulled, merge=True)
            rank.memory.install_shard()
            rank.values()
            return rank.freeze()

    assert run_ranks(RANKS, life) == [[pulled]] * RANKS


@pytest.mark.parametrize(("layout_kind", "pinned"), [("one host", True), ("columns", False)])
def test_memory_that_ranks_share_is_pinned(layout_kind: str, pinned: bool) -> None:
    """It is allocated by none of them: copies that go through pages that may be swapped out would block."""

    def life(number: int, meeting: Meeting) -> bool:
        rank = LateRank(number, meeting, layout_kind, "whole", torch.float32, ON_DEVICE)
        shared = rank.memory._buffer.block_memory((0, 0, 0), 1).data_ptr()
        return shared in rank.device.pinned and rank.memory._buffer._shared_numel > 0

    assert run_ranks(RANKS, life) == [pinned] * RANKS


@pytest.mark.parametrize(("kind", "merge"), [("lazy", False), ("whole", False), ("whole", True)])
def test_host_memory_that_an_install_still_reads_is_not_free(kind: str, merge: bool) -> None:
    """Forwards wait for their copies on the device alone: who writes into the host memory next waits for them, too."""

    def life(number: int, meeting: Meeting) -> list[float]:
        rank = LateRank(number, meeting, "one host", kind, torch.float32, ON_DEVICE)
        for layer in rank.model:
            layer.forward = lambda x: x  # nothing is computed on the device, so nothing has waited for it yet
        with rank.device, torch.no_grad():
            rank.freeze()
            rank.pull(9.0, merge)
            rank.model(torch.zeros(1))
            assert not rank.memory.pending
            rank._end_install()
            for piece in rank.memory.pieces:
                piece.array[:] = 0.0
            return rank.values_of_parameters()

    assert run_ranks(RANKS, life) == [[9.0]] * RANKS


@pytest.mark.parametrize(("layout_kind", "used"), [("two hosts", True), ("columns", True), ("one host", False)])
def test_a_device_group_is_used_where_parts_travel(layout_kind: str, used: bool) -> None:
    """Replicas of one host share memory: nothing travels, and no communicator is made for it."""

    def life(number: int, meeting: Meeting) -> bool:
        return LateRank(number, meeting, layout_kind, "whole", torch.float32, ON_DEVICE).memory._exchange._on_device

    assert run_ranks(RANKS, life) == [used] * RANKS


def test_a_loss_is_read_as_it_was_and_not_waited_for() -> None:
    """A script that overwrites it in the next step, while the first one is still being computed."""
    with LateDevice() as device, torch.no_grad():
        loss = device.place(torch.tensor(1.0))
        loss.add_(1.0)
        told = DeferredScalar(loss)
        loss.add_(5.0)
        assert not told.ready
        assert told.read() == 2.0 and told.ready


@pytest.mark.parametrize("all_streams", [True, False])
def test_training_waits_for_copies_on_its_stream_or_on_all(all_streams: bool) -> None:
    """FSDP gathers on streams of its own: then the host waits, and else the stream that computes."""
    with LateDevice() as device:
        there = device.place(torch.zeros(1))
        with device.background_copies():
            there.copy_(torch.ones(1), non_blocking=True)
        event: Any = device.record_event()
        device.wait_for_event(event, all_streams=all_streams)
        assert event.query() is all_streams
        device.current.run()
        assert event.query()


def test_training_goes_on_after_copies_in_order() -> None:
    """What it enqueues behind them finds them done, though nobody has waited on the host. What the script makes next is
    on its current device, not on the model's.
    """
    with LateDevice() as device:
        there, training = device.place(torch.zeros(1)), device.current
        device.set_index(3)
        there.add_(3.0)
        with device.ordered_copies():
            there.mul_(2.0)
        assert device.current is training and device.index == 3
        there.add_(1.0)
        assert float(there) == 7.0
        there.add_(1.0)
        device.finish_work()
        assert training.done == training.added
