"""The device of a model and copies to and from it: host memory, a copy stream, events between streams.

Every call to an accelerator that Di-PS makes is in this file, and docs/guides/accelerators.md lists them. All but
one are torch's generic calls (`torch.accelerator`, `torch.Stream`, `torch.Event`, `torch.get_device_module`), which
CUDA, ROCm, XPU and, with torch_npu, Ascend implement. The exception pins our own host memory: torch's allocator of
pinned memory rounds up to a power of two, so pages are registered with the driver where it can do that.

`Device` is the host itself: a copy is complete when its call returns, so its streams and events do nothing. Callers
treat both alike.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, replace
from itertools import chain
from math import inf
from typing import Any
from weakref import ref

import numpy as np
import torch

from dips.client.parallel.adapter import Adapter, HeldParameter
from dips.errors import ConfigError

FLOAT_BYTES = 4
HOST_BLOCK_ITEMS = 1 << 17  # 512 KiB: a block that was written is still in the L2 cache when it is read
DEVICE_BLOCK_ITEMS = 1 << 22  # 16 MiB: copying it takes a thousand times as long as launching the copy


class Device:
    """The host as a device: no operation is asynchronous."""

    accelerated = False  # whether copies can be enqueued and proceed while the host continues
    block_items = HOST_BLOCK_ITEMS

    def __init__(self, where: torch.device | None = None) -> None:
        self.where = where if where is not None else torch.device("cpu")
        self._scratch: torch.Tensor | None = None

    @property
    def scratch(self) -> torch.Tensor:
        """f32[block_items] on the device, scratch memory for one block at a time; allocated at its first use."""
        if self._scratch is None:
            self._scratch = torch.empty(self.block_items, dtype=torch.float32, device=self.where)
        return self._scratch

    def allocate_host(self, numel: int) -> torch.Tensor:
        """Allocate f32[numel] of host memory, exactly this size, pinned if copies to and from a device go
        through it.
        """
        return torch.from_numpy(map_pages(numel))

    def pin_pages(self, array: np.ndarray[Any, np.dtype[np.float32]]) -> bool:
        """Pin memory allocated elsewhere for as long as `array` lives; return False if that is not possible."""
        return True

    @contextmanager
    def ordered_copies(self) -> Iterator[None]:
        """Run the copies of this block on the copy stream, after all work that training has enqueued so far.

        `synchronize` waits for them; work that training enqueues after the block runs after them.
        """
        yield

    @contextmanager
    def background_copies(self) -> Iterator[None]:
        """Run copies as `ordered_copies`, except that later work of the training waits for them only after
        `wait_for_event`.
        """
        yield

    def record_event(self) -> torch.Event | None:
        """Record an event behind the copies that `background_copies` has enqueued so far; None if they are complete."""
        return None

    def wait_for_event(self, event: torch.Event, *, all_streams: bool) -> None:
        """Make later work of the training run after `event`: on the current stream, or on all streams."""

    def synchronize(self) -> None:
        """Wait until every copy is complete."""

    def finish_work(self) -> None:
        """Wait until everything that was enqueued, on any stream, is complete."""

    def count_memory(self) -> float:
        """Return the bytes of its memory, whoever uses them; infinite for the host."""
        return inf


class Accelerator(Device):
    """The accelerator of this process."""

    accelerated = True
    block_items = DEVICE_BLOCK_ITEMS

    def __init__(self, where: torch.device) -> None:
        super().__init__(where)
        self._stream = torch.Stream(device=where)

    def allocate_host(self, numel: int) -> torch.Tensor:
        pages = map_pages(numel)
        if self.pin_pages(pages):
            return torch.from_numpy(pages)
        return torch.empty(numel, dtype=torch.float32, device="cpu", pin_memory=True)

    def pin_pages(self, array: np.ndarray[Any, np.dtype[np.float32]]) -> bool:
        if self.where.type != "cuda" or array.size == 0:  # ROCm's devices have this type, too; others have no such call
            return array.size == 0
        driver: Any = torch.cuda.cudart()
        if not register_pages(driver, array, lambda: torch.zeros(1, device=self.where)):
            return False
        # The array's memory must outlive the registration: the finalizer holds its owner, and runs before it is freed.
        weakref.finalize(array, _unregister, driver, array.ctypes.data, array.base).atexit = False
        return True

    @contextmanager
    def ordered_copies(self) -> Iterator[None]:
        try:
            with self.background_copies():
                yield
        finally:
            torch.accelerator.current_stream(self.where).wait_stream(self._stream)

    @contextmanager
    def background_copies(self) -> Iterator[None]:
        with torch.get_device_module(self.where).device(self.where):  # set_stream sets the current device, too
            training = torch.accelerator.current_stream(self.where)
            self._stream.wait_stream(training)
            torch.accelerator.set_stream(self._stream)
            try:
                yield
            finally:
                torch.accelerator.set_stream(training)

    def record_event(self) -> torch.Event | None:
        event = torch.Event(device=self.where)
        event.record(self._stream)
        return event

    def wait_for_event(self, event: torch.Event, *, all_streams: bool) -> None:
        if all_streams:
            event.synchronize()  # blocks the host, so all that it enqueues later, on any stream, runs later
        else:
            event.wait(torch.accelerator.current_stream(self.where))

    def synchronize(self) -> None:
        self._stream.synchronize()

    def finish_work(self) -> None:
        torch.accelerator.synchronize(self.where)

    def count_memory(self) -> float:
        return float(torch.accelerator.get_memory_info(self.where)[1])


def find_device(views: Sequence[torch.Tensor]) -> Device:
    """Return the device of the tensors to be read and written; adapters refuse a model with several devices."""
    found = next((view.device for view in views if view.device.type not in ("cpu", "meta")), None)
    return Device() if found is None else Accelerator(found)


def register_pages(driver: Any, array: np.ndarray[Any, Any], launch: Callable[[], object]) -> bool:
    """Pin an array's pages with the driver; return False if it refuses.

    launch  launches a kernel. A refusal stays behind as the runtime's last error, and the next launch anywhere in the
            process would raise it: this launch raises it here and thereby clears it
    """
    if int(driver.cudaHostRegister(array.ctypes.data, array.nbytes, 0)) == 0:
        return True
    with suppress(RuntimeError):
        launch()
    return False


def map_pages(numel: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Map f32[numel] in its own pages, exactly this many; physical memory is used only for pages that are touched.

    A process forked from this one, such as a DataLoader's worker, does not get the pages. Otherwise it would hold a
    copy of each page written since; and with pinned pages the fork copies all at once, or this process gets the copies
    while the device continues with the former pages.
    """
    pages = mmap.mmap(-1, max(FLOAT_BYTES, FLOAT_BYTES * numel), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_DONTFORK)
    return np.frombuffer(pages, np.float32, numel)


def enqueue_copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy on the current stream, and wait for the copy if it needs temporary memory of the host.

    torch casts and packs there what it copies to or from the host. CUDA waits for such a copy; torch_npu reads that
    memory before an enqueued copy has filled it, or frees it before the copy has read it.
    """
    on_host = (tensor for tensor in (target, source) if tensor.device.type == "cpu")
    plain = target.dtype is source.dtype and all(tensor.is_contiguous() for tensor in on_host)
    target.copy_(source, non_blocking=plain)


class DeferredScalar:
    """A number that an accelerator is computing, readable without waiting for other work enqueued before it."""

    def __init__(self, scalar: torch.Tensor) -> None:
        """Start copying `scalar`, of one element on an accelerator, to the host; it may be overwritten afterwards."""
        self._host = torch.empty((), dtype=torch.float32, device="cpu", pin_memory=True)
        exact = scalar.detach().reshape(()).float()  # converted on the device: a converting copy would block
        self._host.copy_(exact, non_blocking=True)
        self._arrived = torch.Event(device=scalar.device)
        self._arrived.record(torch.accelerator.current_stream(scalar.device))

    @property
    def ready(self) -> bool:
        """Whether `read` would return without waiting."""
        return bool(self._arrived.query())

    def read(self) -> float:
        """Wait for the number and return it."""
        self._arrived.synchronize()
        return float(self._host)


def is_captured(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether operations on these tensors are being recorded into a CUDA graph instead of executed."""
    return next((t.device.type for t in tensors), "cpu") == "cuda" and torch.cuda.is_current_stream_capturing()


def is_deferred(value: Any) -> bool:
    """Return whether reading a number must wait for an accelerator: it is a plain tensor there."""
    return type(value) is torch.Tensor and value.device.type != "cpu" and value.numel() == 1


def widen_scalar(scalar: torch.Tensor) -> torch.Tensor:
    """Return a copy of a number, on its device, of a type that can hold the sum of many such: of int32, no more than
    512 steps of 4 million tokens.
    """
    kind = torch.promote_types(scalar.dtype, torch.float32) if scalar.is_floating_point() else torch.int64
    return scalar.detach().reshape(()).to(kind, copy=True)


def _unregister(driver: Any, address: int, _owner: Any) -> None:
    driver.cudaHostUnregister(address)


# ---- model memory ----------------------------------------------------------------------------------------------------
# A parameter that is the same object with other memory (`to()`, `bfloat16()`, masters that an optimizer made at its
# first step) is described again. Another object under its name (`fully_shard`, load_state_dict(assign=True), a swapped
# module) is an error, since it is unknown which of the two is trained.


class ModelMemory:
    """The adapter's description of a model, and the addresses of its tensors at that time."""

    def __init__(self, adapter: Adapter, held: Sequence[HeldParameter]) -> None:
        self._adapter, self._held = adapter, list(held)
        self._names = {h.name for h in held}
        self._owners = [(name, ref(owner)) for name, owner, _ in adapter.local_tensors() if name in self._names]
        self._lies_at = self._list_places(adapter.local_tensors())

    @torch.no_grad()
    def compare_memory(self) -> tuple[str, bool]:
        """Return the first parameter that is another object now, or "", and whether tensors or masters have moved.

        Walks over the model once: mixtures of experts have tens of thousands of parameters, and this is called several
        times per round.
        """
        tensors = list(self._adapter.local_tensors())
        present = {(name, id(owner)) for name, owner, _ in tensors}
        gone = min((name for name, owner in self._owners if (name, id(owner())) not in present), default="")
        return gone, not gone and self._list_places(tensors) != self._lies_at

    def describe_again(self) -> tuple[list[HeldParameter], str]:
        """Return the adapter's present description, and the first parameter whose parts here have changed, or ""."""
        try:
            described = merge_tied(self._adapter.held_parameters())
        except ConfigError as error:
            return [], str(error)
        before, now = {h.name: _extent(h) for h in self._held}, {h.name: _extent(h) for h in described}
        other = min((name for name in before.keys() | now.keys() if before.get(name) != now.get(name)), default="")
        if not other:
            self._held, self._lies_at = described, self._list_places(self._adapter.local_tensors())
        return described, other

    def _list_places(
        self, tensors: Iterable[tuple[str, torch.Tensor, torch.Tensor]]
    ) -> set[tuple[str, int, torch.dtype]]:
        return {
            (name, memory.data_ptr(), memory.dtype)
            for name, _, memory in chain(tensors, self._adapter.local_masters())
            if name in self._names
        }


def merge_tied(held: list[HeldParameter]) -> list[HeldParameter]:
    """Merge the two copies of a tied parameter in two chunks: the first is read and both are written."""
    found: dict[str, HeldParameter] = {}
    for h in held:
        first = found.get(h.name)
        if first is not None and first.shape != h.shape:
            raise ConfigError(f"{h.name}: shape {first.shape} in one chunk of the model, {h.shape} in another")
        found[h.name] = (
            replace(first, writes=first.writes + h.writes, masters=first.masters + h.masters) if first else h
        )
    return list(found.values())


def _extent(held: HeldParameter) -> object:
    """Return a value that identifies the parts of the full parameter that are here."""
    return held.shape, *([astuple(block.rect) for block in blocks] for blocks in (held.reads, held.writes))
