"""Where a model lies, and how bytes get there: host memory for copies, a stream of their own, events between streams.

Every call to an accelerator that Di-PS makes stands in this file, and docs/guides/accelerators.md lists them. All but
one are torch's generic ones (`torch.accelerator`, `torch.Stream`, `torch.Event`, `torch.get_device_module`), which
CUDA, ROCm, XPU and, with torch_npu, Ascend implement. The exception pins host memory of our own: torch's allocator of
pinned memory rounds up to a power of two, so where the driver can register pages they are registered.

`Device` is the host itself: a copy is over when its call returns, so streams and events have nothing to do. What calls
it is the same for both.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch

FLOAT_BYTES = 4
HOST_BLOCK_ITEMS = 1 << 17  # 512 KiB: a block that was written is still in the L2 cache when it is looked at
DEVICE_BLOCK_ITEMS = 1 << 22  # 16 MiB: a copy of it takes a thousand times what its launch does


class Device:
    """The host: nothing is asynchronous."""

    accelerated = False  # copies can be enqueued and proceed while the host goes on
    block_items = HOST_BLOCK_ITEMS

    def __init__(self, where: torch.device | None = None) -> None:
        self.where = where if where is not None else torch.device("cpu")
        self._scratch: torch.Tensor | None = None

    @property
    def scratch(self) -> torch.Tensor:
        """f32[block_items] on the device, for one block at a time; allocated at its first use."""
        if self._scratch is None:
            self._scratch = torch.empty(self.block_items, dtype=torch.float32, device=self.where)
        return self._scratch

    def allocate_host(self, numel: int) -> torch.Tensor:
        """f32[numel] of host memory, no more; if copies to and from a device go through it, pinned."""
        return torch.from_numpy(map_pages(numel))

    def pin_pages(self, array: np.ndarray[Any, np.dtype[np.float32]]) -> bool:
        """Pin memory that something else has allocated, for as long as `array` lives; False if that is not possible."""
        return True

    @contextmanager
    def ordered_copies(self) -> Iterator[None]:
        """Run the copies of this block on the copy stream, after what training has enqueued so far.

        `synchronize` waits for them; what training enqueues after the block runs after them.
        """
        yield

    @contextmanager
    def background_copies(self) -> Iterator[None]:
        """As `ordered_copies`, but later work of the training waits for the copies only if `wait_for_event` says so."""
        yield

    def record_event(self) -> torch.Event | None:
        """Record an event behind the copies that `background_copies` has enqueued so far; None: they are over."""
        return None

    def wait_for_event(self, event: torch.Event, *, all_streams: bool) -> None:
        """Run what training enqueues from now on after `event`: on the current stream, or on all streams."""

    def synchronize(self) -> None:
        """Return when every copy has arrived."""


class Accelerator(Device):
    """One accelerator of this process."""

    accelerated = True
    block_items = DEVICE_BLOCK_ITEMS

    def __init__(self, where: torch.device) -> None:
        super().__init__(where)
        self._stream = torch.Stream(device=where)

    def allocate_host(self, numel: int) -> torch.Tensor:
        pages = map_pages(numel)
        if self.pin_pages(pages):
            return torch.from_numpy(pages)
        return torch.empty(numel, dtype=torch.float32, pin_memory=True)

    def pin_pages(self, array: np.ndarray[Any, np.dtype[np.float32]]) -> bool:
        if self.where.type != "cuda" or array.size == 0:  # the name of ROCm's devices, too; no other has such a call
            return array.size == 0
        driver: Any = torch.cuda.cudart()
        if not register_pages(driver, array, lambda: torch.zeros(1, device=self.where)):
            return False
        # The array's memory must outlive the registration: the finalizer holds its owner, and runs before that goes.
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
            event.synchronize()  # blocks the host, so whatever it enqueues later, on any stream, is later
        else:
            event.wait(torch.accelerator.current_stream(self.where))

    def synchronize(self) -> None:
        self._stream.synchronize()


def find_device(views: Sequence[torch.Tensor]) -> Device:
    """The device of the tensors that will be read and written; an adapter refuses a model that has several."""
    found = next((view.device for view in views if view.device.type not in ("cpu", "meta")), None)
    return Device() if found is None else Accelerator(found)


def register_pages(driver: Any, array: np.ndarray[Any, Any], launch: Callable[[], object]) -> bool:
    """Have the driver pin an array's pages; False if it refuses.

    launch  launches a kernel. A refusal stays behind as the runtime's last error, which the next launch of anybody
            would raise as its own: this one raises it here, and by that clears it
    """
    if int(driver.cudaHostRegister(array.ctypes.data, array.nbytes, 0)) == 0:
        return True
    with suppress(RuntimeError):
        launch()
    return False


def map_pages(numel: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """f32[numel] in pages of its own: exactly so many, physical memory only for those that are touched.

    A process that is forked from this one has none of them, as a DataLoader's worker is: it would hold a copy of each
    that is written since, and where the pages are pinned the fork copies all at once, or this process gets the copies
    while the device goes on with the former ones.
    """
    pages = mmap.mmap(-1, max(FLOAT_BYTES, FLOAT_BYTES * numel), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_DONTFORK)
    return np.frombuffer(pages, np.float32, numel)


class DeferredScalar:
    """A number that an accelerator will have computed: read without waiting for what is enqueued before it."""

    def __init__(self, scalar: torch.Tensor) -> None:
        """`scalar`: of one element, on an accelerator; it may be overwritten afterwards."""
        self._host = torch.empty((), dtype=torch.float32, pin_memory=True)
        exact = scalar.detach().reshape(()).float()  # on the device: a copy that converts would block
        self._host.copy_(exact, non_blocking=True)
        self._arrived = torch.Event(device=scalar.device)
        self._arrived.record(torch.accelerator.current_stream(scalar.device))

    @property
    def ready(self) -> bool:
        """Whether `read` would return at once."""
        return bool(self._arrived.query())

    def read(self) -> float:
        """The number; waits for it."""
        self._arrived.synchronize()
        return float(self._host)


def is_captured(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether what is done with them now is recorded in a CUDA graph, to be done by its replays."""
    return next((t.device.type for t in tensors), "cpu") == "cuda" and torch.cuda.is_current_stream_capturing()


def is_deferred(value: Any) -> bool:
    """Whether reading a number waits for an accelerator: a plain tensor there."""
    return type(value) is torch.Tensor and value.device.type != "cpu" and value.numel() == 1


def _unregister(driver: Any, address: int, _owner: Any) -> None:
    driver.cudaHostUnregister(address)
