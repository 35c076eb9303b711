"""Copies between host memory and whatever `torch.accelerator` offers: pinned memory, and a stream of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


class Device:
    """Where a model lies; on the CPU every method here does nothing special."""

    def __init__(self, views: Sequence[torch.Tensor]) -> None:
        """`views`: the tensors that will be read and written."""
        self._accelerator = next((view.device for view in views if view.device.type != "cpu"), None)
        self._stream: torch.Stream | None = None
        if self._accelerator is not None:
            self._stream = torch.Stream(device=self._accelerator)

    def allocate_host(self, numel: int) -> torch.Tensor:
        """f32[numel] of host memory; pinned if copies to and from the device go through it."""
        return torch.empty(numel, dtype=torch.float32, pin_memory=self._accelerator is not None)

    @contextmanager
    def ordered_copies(self) -> Iterator[None]:
        """Run the copies of this block on the copy stream, after what training has enqueued so far.

        `synchronize` waits for them; what training enqueues after the block runs after them.
        """
        if self._stream is None:
            yield
            return
        try:
            with self.background_copies():
                yield
        finally:
            torch.accelerator.current_stream(self._accelerator).wait_stream(self._stream)

    @property
    def accelerated(self) -> bool:
        """Copies are asynchronous: they can be enqueued and proceed while the host goes on."""
        return self._stream is not None

    @contextmanager
    def background_copies(self) -> Iterator[None]:
        """As `ordered_copies`, but later work of the training waits for the copies only if `wait_for_event` says so."""
        assert self._stream is not None, "a CPU has no copy stream"
        training = torch.accelerator.current_stream(self._accelerator)
        self._stream.wait_stream(training)
        torch.accelerator.set_stream(self._stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(training)

    def record_event(self) -> torch.Event:
        """Record an event behind the copies that `background_copies` has enqueued so far."""
        event = torch.Event(device=self._accelerator)
        event.record(self._stream)
        return event

    def wait_for_event(self, event: torch.Event, *, all_streams: bool) -> None:
        """Run what training enqueues from now on after `event`: on the current stream, or on all streams."""
        if all_streams:
            event.synchronize()  # blocks the host, so whatever it enqueues later, on any stream, is later
        else:
            event.wait(torch.accelerator.current_stream(self._accelerator))

    def synchronize(self) -> None:
        """Return when every copy has arrived."""
        if self._stream is not None:
            self._stream.synchronize()
