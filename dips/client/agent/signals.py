"""Events by which the tasks of one agent notify each other."""

from __future__ import annotations

import asyncio
from contextlib import suppress


class AgentSignals:
    """The events of one agent: each is set once, except changes, which are announced repeatedly."""

    def __init__(self) -> None:
        self.terminated = asyncio.Event()  # SIGTERM
        self.stopped = asyncio.Event()  # the core has ordered StopTrainer
        self.detached = asyncio.Event()  # a trainer that others started has detached
        self._change = asyncio.Event()

    def notify_change(self) -> None:
        """Wake the tasks that wait for a change of the core's state."""
        self._change.set()
        self._change = asyncio.Event()

    def next_change(self) -> asyncio.Event:
        """Return an event that the next `notify_change` sets; take it before reading the core, so that no change is
        missed.
        """
        return self._change

    async def wait_terminated(self, seconds: float) -> bool:
        """Wait `seconds` or until SIGTERM arrives; return whether it arrived."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.terminated.wait()
        return self.terminated.is_set()
