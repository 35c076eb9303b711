"""A daemon's `serve` in the test's own process."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

LONGEST_S = 20.0  # to be ready, and to end


@asynccontextmanager
async def served(serve: Callable[[Callable[[str], None]], Coroutine[Any, Any, int]]) -> AsyncIterator[str]:
    """Yield the address with which `serve` calls its argument when it is ready; SIGTERM then ends it, with 0."""
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve(ready.set_result))
    either: list[asyncio.Future[Any]] = [serving, ready]
    await asyncio.wait(either, timeout=LONGEST_S, return_when=asyncio.FIRST_COMPLETED)
    assert ready.done(), serving
    yield ready.result()
    signal.raise_signal(signal.SIGTERM)
    assert await asyncio.wait_for(serving, LONGEST_S) == 0
