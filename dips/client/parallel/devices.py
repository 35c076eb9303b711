"""Copies between host memory and whatever `torch.accelerator` offers: pinned memory, and a stream of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


class Device:
    """Where a model lies; on the CPU every call here is plain."""

    def __init__(self, views: Sequence[torch.Tensor]) -> None:
        """`views`: the tensors that will be read and written."""
        self._accelerator = next((view.device for view in views if view.device.type != "cpu"), None)
        self._stream: torch.Stream | None = None
        if self._accelerator is not None:
            self._stream = torch.Stream(device=self._accelerator)

    def host(self, items: int) -> torch.Tensor:
        """f32[items] of host memory; pinned if copies to and from the device go through it."""
        return torch.empty(items, dtype=torch.float32, pin_memory=self._accelerator is not None)

    @contextmanager
    def copies(self) -> Iterator[None]:
        """Copies made within run on a stream of their own, after what the training has already asked for.

        `wait` ends them; what the training asks for afterwards comes after them.
        """
        if self._stream is None:
            yield
            return
        try:
            with self.aside():
                yield
        finally:
            torch.accelerator.current_stream(self._accelerator).wait_stream(self._stream)

    @property
    def accelerated(self) -> bool:
        """Copies can be asked for and go on by themselves."""
        return self._stream is not None

    @contextmanager
    def aside(self) -> Iterator[None]:
        """As `copies`, but what the training asks for afterwards does not come after them, unless `hold` says so."""
        assert self._stream is not None, "there is nobody but this thread to copy"
        training = torch.accelerator.current_stream(self._accelerator)
        self._stream.wait_stream(training)
        torch.accelerator.set_stream(self._stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(training)

    def mark(self) -> torch.Event:
        """Name the copies that were asked for within `aside` so far."""
        event = torch.Event(device=self._accelerator)
        event.record(self._stream)
        return event

    def hold(self, mark: torch.Event, *, everywhere: bool) -> None:
        """Let what the training asks for from now on come after `mark`; on streams of others too with `everywhere`."""
        if everywhere:
            mark.synchronize()  # this thread waits, so whatever it asks for later is later
        else:
            mark.wait(torch.accelerator.current_stream(self._accelerator))

    def wait(self) -> None:
        """Return when every copy has arrived."""
        if self._stream is not None:
            self._stream.synchronize()
