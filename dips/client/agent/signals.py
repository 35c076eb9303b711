"""What the tasks of one agent tell each other."""

from __future__ import annotations

import asyncio
from contextlib import suppress


class AgentSignals:
    """Each event is set once; `changes` again and again."""

    def __init__(self) -> None:
        self.terminated = asyncio.Event()  # SIGTERM
        self.stopped = asyncio.Event()  # the core has ordered StopTrainer
        self.detached = asyncio.Event()  # a trainer that others started is done
        self._change = asyncio.Event()

    def notify_change(self) -> None:
        """The core may have another answer now."""
        self._change.set()
        self._change = asyncio.Event()

    def next_change(self) -> asyncio.Event:
        """An event that the next `notify_change` sets; taken before a look at the core, it misses none."""
        return self._change

    async def wait_terminated(self, seconds: float) -> bool:
        """Wait so long, or until SIGTERM; return whether it came."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.terminated.wait()
        return self.terminated.is_set()
